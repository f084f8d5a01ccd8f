"""``infinity report``: one page about a run, without a network: curves, summary, samples and recipe."""

import html
import io
import json
import sys
from array import array
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from infinity.app import runs
from infinity.app.loop import BEST_FOLDER, best_steps
from infinity.app.samples import SAMPLES
from infinity.core.errors import RecipeError, library_errors, optional_package, quiet_libraries
from infinity.core.files import read_file, record_of, user_path, write_file
from infinity.core.nbytes import format_nbytes
from infinity.observe.metrics import (
    Summary,
    SummaryBuilder,
    finite,
    read_lines,
    read_metrics,
    summary_rows,
)
from infinity.observe.sinks import scalars_of
from infinity.recipes.recipe import Recipe

#: The page in the run's folder, where nothing else is said.
REPORT = "report.html"
#: The most samples and characters of a page.
_MOST_SAMPLES, _MOST_CHARS = 60, 4000
#: The most points of a curve, and of the line through a noisy one.
_MOST_POINTS, _LINE_POINTS = 1500, 50
#: The longest summary that is read (bytes).
_MOST_SUMMARY_NBYTES = 2**24
_MOVED = "bytes that a rank moves in a step"
#: Charts of scalars that are no losses or metrics.
_CHARTS = {
    "speed/tokens_per_s": "tokens per second", "speed/step_s": "seconds of a step",
    "optimizer/lr": "learning rate", "optimizer/grad_norm": "norm of the gradient",
    "bytes/read": _MOVED, "bytes/written": _MOVED,
    "bytes/planned_read": _MOVED, "bytes/planned_written": _MOVED,
}  # fmt: skip
_PAGE = Template(Path(__file__).with_suffix(".html").read_text("utf-8"))

#: Step and value of each point, ``(points, 2)``.
Points: TypeAlias = NDArray[np.float64]


def write_report(path: str | Path, output: Path | None = None) -> Path:
    """Write the page of a run's folder, and return its path; RecipeError: no run, or it cannot be written."""
    folder = user_path(path, "RUN")
    recipe = runs.recipe_of(folder)
    out = folder / REPORT if output is None else output
    curves, totals = defaultdict[str, "array[float]"](lambda: array("d")), SummaryBuilder()
    for line in read_metrics(folder / runs.METRICS):
        totals.take(line)
        for name, value in scalars_of(line).items():
            if finite(value) is not None:
                curves[name].extend((line.step, value or 0.0))
    charts = charts_of(curves, {*(recipe.data.eval_sets or {}), *recipe.adapters})
    texts = {
        "name": folder.resolve().name, "recipe": recipe.to_yaml(keys=()), "whole": recipe.to_yaml(),
        "state": runs.state_of(folder), "version": version("infinity-offload"),
    }  # fmt: skip
    page = _PAGE.substitute(
        {name: html.escape(text) for name, text in texts.items()},
        charts="\n".join(draw(title, lines) for title, lines in charts.items()),
        summary=_table(rows_of(folder, totals, recipe)),
        samples=_table(_samples(folder / SAMPLES)),
    )
    with library_errors(RecipeError, f"{out} cannot be written (--output FILE writes elsewhere)"):
        write_file(out, page)
    return out


def charts_of(
    curves: Mapping[str, "array[float]"], sets: Collection[str]
) -> Mapping[str, Mapping[str, Points]]:
    """Return the lines of each chart by their names, given steps and values in turn of each scalar.

    ``sets`` are the names of held-out sets and adapters, with which names of metrics may begin.
    """
    charts = defaultdict[str, dict[str, Points]](dict)
    for scalar, values in curves.items():
        kind, where, *rest = scalar.split("/")
        owners = [each for each in rest if each in sets]
        if kind in ("loss", "metrics"):
            title = "/".join(each for each in rest if each not in sets) or "loss"
            label = ", ".join([*owners, "training" if where == "train" else "held-out"])
        else:
            title, label = _CHARTS.get(f"{kind}/{where}", ""), ", ".join(owners) or where.replace("_", " ")
        if title and (title != _MOVED or any(values[1::2])):
            charts[title][label] = np.array(values).reshape(-1, 2)
    return charts


def averaged(points: Points, most: int) -> Points:
    """Return at most so many points, each the mean of as many neighbours, but for the last one."""
    count = -(-len(points) // most)
    return np.array([points[at : at + count].mean(0) for at in range(0, len(points), count)])


def draw(title: str, lines: Mapping[str, Points]) -> str:
    """Return a chart as SVG; a curve of many points is faint, with a line of means through it."""
    plots = optional_package("matplotlib", "plots", RecipeError, "infinity report draws with matplotlib")
    from matplotlib.figure import Figure

    out = io.StringIO()
    settings = {"svg.hashsalt": title, "svg.fonttype": "none", "text.parse_math": False}
    with quiet_libraries(), plots.rc_context(settings):
        figure = Figure(figsize=(6, 3), layout="constrained")
        axes = figure.subplots()
        for number, (name, points) in enumerate(lines.items()):
            how: Any = {"color": f"C{number % 10}", "linestyle": "--" if name.startswith("planned") else "-"}
            if many := len(points) > _LINE_POINTS:
                axes.plot(*averaged(points, _MOST_POINTS).T, **how, alpha=0.3)
            axes.plot(*averaged(points, _LINE_POINTS).T, **how, label=name, marker="" if many else ".")
        axes.set_title(title, loc="left")
        axes.grid(alpha=0.3)
        if title == _MOVED:
            axes.yaxis.set_major_formatter(lambda value, position: format_nbytes(value))
        if len(lines) > 1:
            axes.legend(fontsize="small")
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # equal figures give equal pages
        figure.savefig(out, format="svg", metadata=nothing)
    text = out.getvalue()
    return text[text.index("<svg") :]


def rows_of(folder: Path, totals: SummaryBuilder, recipe: Recipe) -> list[tuple[str, str]]:
    """Return the summary of a run, as at its end, or of the steps so far; empty: it has made none."""
    found = _finished(folder / runs.SUMMARY) or totals.result(folder=folder)
    rows = summary_rows(found) if found.steps else []
    if best := best_steps(folder / BEST_FOLDER):
        rows.append(("best model", f"step {best[-1]:,} by {recipe.train.keep_best}; export --best"))
    return rows


def _finished(path: Path) -> Summary | None:
    """Return the summary of a finished run; None: it is not finished, or another version wrote it."""
    try:
        found: Summary = record_of(Summary, json.loads(read_file(path, _MOST_SUMMARY_NBYTES)))
        return found
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    cells = ("".join(f"<td>{html.escape(each)}</td>" for each in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _samples(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the last samples of a file, latest first: step, prompt (of a chat its last message) and text."""
    for given, _ in reversed(deque(read_lines(path, sys.maxsize), _MOST_SAMPLES)):
        try:
            prompt, text = given["prompt"], str(given["text"])
            if isinstance(prompt, list):
                prompt = prompt[-1]["content"]
        except (KeyError, TypeError, IndexError):
            continue
        named = f"{given['adapter']}: {prompt}" if given.get("adapter") else str(prompt)
        yield f"step {given['step']:,}", named[-_MOST_CHARS:], text[:_MOST_CHARS]
