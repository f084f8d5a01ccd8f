"""``infinity report``: one page about a run, without a network: curves, memory, bytes, plan and recipe."""

import html
import json
import sys
from array import array
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from infinity.app import runs
from infinity.app.best import BEST_FOLDER, best_steps
from infinity.app.samples import SAMPLES
from infinity.core.errors import RecipeError, library_errors
from infinity.core.files import read_file, user_path, write_file
from infinity.core.nbytes import format_nbytes
from infinity.observe.metrics import Summary, SummaryBuilder, finite, read_lines, read_metrics
from infinity.observe.sinks import scalars_of
from infinity.recipes.objectives import OBJECTIVES
from infinity.recipes.recipe import Recipe

#: The page in the run's folder, where nothing else is said.
REPORT = "report.html"
#: The most samples and characters of a page.
_MOST_SAMPLES, _MOST_CHARS = 60, 4000
#: The most points of a curve; of more, neighbours are averaged.
_MOST_POINTS = 1500
#: The longest summary that is read (bytes).
_MOST_SUMMARY_NBYTES = 2**24

Points = list[tuple[float, float]]


class Curves:
    """Collects figures by step. A curve has few points, each the mean of as many neighbours."""

    def __init__(self) -> None:
        self._points = defaultdict[str, "array[float]"](lambda: array("d"))  # step, value, step, value ...

    def add(self, name: str, step: int, value: float | None) -> None:
        if value is not None and finite(value) is not None:
            self._points[name].extend((step, value))

    def __getitem__(self, name: str) -> Points:
        points = np.array(self._points.get(name, ())).reshape(-1, 2)
        count = -(-len(points) // _MOST_POINTS) or 1
        groups = (points[at : at + count] for at in range(0, len(points), count))
        return [(float(each[-1, 0]), float(each[:, 1].mean())) for each in groups]

    def names(self, begin: str) -> list[str]:
        return [name for name in self._points if name.startswith(begin)]


def write_report(path: str | Path, output: str | Path | None = None) -> Path:
    """Write the page of a run's folder, and return its path; RecipeError: no run, or it cannot be written."""
    folder = user_path(path, "RUN")
    recipe = runs.recipe_of(folder)
    out = folder / REPORT if output is None else user_path(output, "--output")
    if out.is_dir() or not out.parent.is_dir():
        raise RecipeError(f"--output {output}: wanted a file's path, in a folder that exists")
    data = json.dumps(finite(describe(folder, recipe)), allow_nan=False).replace("<", "\\u003c")
    page = files("infinity.app").joinpath("report.html").read_text("utf-8")
    page = page.replace("TITLE", html.escape(folder.resolve().name), 1).replace("DATA", data, 1)
    with library_errors(RecipeError, f"{out} cannot be written (--output FILE writes elsewhere)"):
        write_file(out, page)
    return out


def describe(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """Return what the page shows, as it shows it."""
    curves, totals, sets = Curves(), SummaryBuilder(), {*(recipe.data.eval_sets or {}), *recipe.adapters}
    for line in read_metrics(folder / runs.METRICS):
        totals.take(line)
        for name, value in scalars_of(line).items():
            curves.add(name, line.step, value)
    found, summary, total_s = totals.result(folder=folder), _summary(folder / runs.SUMMARY), totals.total_s
    compute_s = max(0.0, total_s - sum(found.stall_s.values()))
    waits = sorted(
        ((f"waiting: {cause}", each) for cause, each in found.stall_s.items()), key=lambda item: -item[1]
    )
    last = found.first_step + found.steps - 1
    return {
        "name": folder.resolve().name,
        "state": runs.state_of(folder),
        "about": _about(recipe, summary, last),
        "tiles": [*_tiles(found, recipe, folder)],
        "charts": [*_charts(curves, sets)],
        "memory": [
            {"tier": tier, "peak": peak, "budget": summary.get("budgets", {}).get(tier)}
            for tier, peak in found.peak_nbytes.items() if peak
        ],
        "time": [("computing", compute_s), *(each for each in waits if each[1] >= 0.001 * total_s)]
        if total_s else [],
        "plan": [*_plan(summary)],
        "advice": _advice(summary),
        "samples": [*_samples(folder / SAMPLES)],
        "notes": summary.get("notes", []),
        "recipe": recipe.to_yaml(keys=()),
        "whole_recipe": recipe.to_yaml(),
        "footer": f"infinity {version('infinity-offload')} · {folder}",
    }  # fmt: skip


def _charts(curves: Curves, sets: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield each chart: title, format, and its lines; ``sets`` are names of held-out sets and adapters."""

    def line(name: str, of: str, **how: Any) -> dict[str, Any]:
        return {"name": name, "points": curves[of], **how}

    of_sets, metrics = list[dict[str, Any]](), defaultdict[str, list[dict[str, Any]]](list)
    for of in curves.names("metrics/"):
        _, where, metric = of.split("/", 2)
        begin, _, rest = metric.partition("/")
        if metric.endswith("/loss"):
            of_sets.append(line(metric.removesuffix("/loss"), of, dots=True))
        elif where == "train":
            metrics[metric].insert(0, line("training", of, noisy=True))
        elif begin in sets:
            metrics[rest].append(line(begin, of, dots=True))
        else:
            metrics[metric].append(line("held-out", of, dots=True))
    only = len(of_sets) == 1 and of_sets[0]["points"] == curves["loss/held_out"]
    held_out = [] if only else [line("held-out", "loss/held_out", dots=True)]
    loss = [line("training", "loss/train", noisy=True), *held_out, *of_sets]
    yield {"title": "Loss", "format": "number", "wide": True, "series": loss}
    adapters = [
        line(name.removeprefix(begin) + end, name)
        for begin, end in (("loss/train/", ""), ("loss/held_out/", ", held-out"))
        for name in curves.names(begin)
    ]
    if adapters:
        yield {"title": "Loss of each adapter", "format": "number", "wide": True, "series": adapters}
    for metric, series in metrics.items():
        title = metric.replace("_", " ").replace("/", ", ").capitalize()
        yield {"title": title, "format": "number", "series": series}
    for title, of, shown in (
        ("Tokens per second", "speed/tokens_per_s", "number"),
        ("Seconds of a step", "speed/step_s", "seconds"), ("Learning rate", "optimizer/lr", "number"),
        ("Norm of the gradient", "optimizer/grad_norm", "number"),
    ):  # fmt: skip
        yield {"title": title, "format": shown, "series": [line(title, of, noisy=of != "optimizer/lr")]}
    moved = [
        line(
            f"planned {name}" if planned else name, f"bytes/{planned}{name}", colour=colour,
            dashed=bool(planned), noisy=not planned,
        )
        for planned in ("", "planned_") for colour, name in enumerate(("read", "written"))
    ]  # fmt: skip
    if any(value for each in moved for _, value in each["points"]):
        yield {"title": "Bytes that a rank moves in a step", "format": "bytes", "wide": True, "series": moved}


def _about(recipe: Recipe, summary: Mapping[str, Any], last: int) -> str:
    model = recipe.model.path or f"a new model of {recipe.model.numel:,} parameters"
    trained = "adapters" if recipe.trains_adapters else "all weights"
    parts = [f"{recipe.train.task} of {trained}", str(model), f"{recipe.train.dtype}"]
    if ranks := summary.get("world_size"):
        parts.append(f"{ranks} rank{'s' if ranks > 1 else ''}")
    of = "" if recipe.train.steps is None else f" of {recipe.train.steps:,}"
    parts.append(f"step {last:,}{of}")
    return " · ".join(parts)


def _tiles(found: Summary, recipe: Recipe, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and remark of the figures that are looked for first."""
    per = OBJECTIVES[recipe.train.task].example
    for name, first, last in (
        ("training loss", found.first_loss, found.last_loss),
        ("held-out loss", found.first_held_out, found.last_held_out),
    ):
        if last is not None:
            yield name, f"{last:.4f}", f"per {per}; at first {first:.4f}"
    if best := best_steps(folder / BEST_FOLDER):
        yield "best model", f"step {best[-1]:,}", f"by {recipe.train.keep_best}; export --best"
    if found.steps:
        yield "tokens per second", f"{found.tokens_per_s:,.0f}", "median"
        yield "a step takes", f"{found.step_s:.3g} s", "median"
        moved = found.nbytes_read + found.nbytes_written
        yield "moved in a step", format_nbytes(moved), "read and written by a rank, median"


def _plan(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, planned and measured value, and their difference."""
    predicted, measured_s = summary.get("predicted"), summary.get("step_s")
    if predicted and measured_s:
        yield "a step", *_beside(predicted["step_s"], measured_s, lambda value: f"{value:.3g} s")
    for name, of in (("read in a step", "nbytes_read"), ("written in a step", "nbytes_written")):
        planned = summary.get(f"planned_{of}")
        if planned is not None and (planned or summary[of]):
            yield name, *_beside(planned, summary[of], format_nbytes)
    cache = summary.get("activations") or {}
    if cache.get("predicted") and cache.get("measured"):
        one, other = cache["predicted"], cache["measured"]
        yield "a micro-batch", *_beside(one["step_s"], other["step_s"], lambda value: f"{value:.3g} s")
        yield "activations at their peak", *_beside(one["peak_nbytes"], other["peak_nbytes"], format_nbytes)


def _beside(planned: float, measured: float, shown: Any) -> tuple[str, str, str]:
    off = "" if not planned else f"{measured / planned - 1:+.1%}"
    return shown(planned), shown(measured), off


def _advice(summary: Mapping[str, Any]) -> str:
    predicted = summary.get("predicted") or {}
    bound = f"Bound by {predicted['bottleneck']}." if predicted.get("bottleneck") else ""
    return f"{bound} To be faster: {predicted['advice']}." if predicted.get("advice") else bound


def _samples(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the last samples of a file: step, prompt (of a chat its last message) and text."""
    for given, _ in deque(read_lines(path, sys.maxsize), _MOST_SAMPLES):
        try:
            prompt, text = given["prompt"], str(given["text"])
            if isinstance(prompt, list):
                prompt = prompt[-1]["content"]
        except (KeyError, TypeError, IndexError):
            continue
        named = f"{given['adapter']}: {prompt}" if given.get("adapter") else str(prompt)
        yield {"step": given["step"], "prompt": named[-_MOST_CHARS:], "text": text[:_MOST_CHARS]}


def _summary(path: Path) -> Mapping[str, Any]:
    """Return the summary of a run; empty: it is not finished, or has none that can be read."""
    try:
        found = json.loads(read_file(path, _MOST_SUMMARY_NBYTES))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
