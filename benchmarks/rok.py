"""Measure throughput against the activation peak for each way to treat activations.

The ways are recompute, offload, keep (hence the name) and plans for several budgets. The output is a table,
``rok.json`` and ``rok.png``.

    python benchmarks/rok.py RECIPE [key=value ...] [--batches 1,2,4] [--steps 5] [--out runs/rok]

[Note: how it is measured]
Each point is a short training of the recipe's model on the recipe's data in a process of its own, so that no
point inherits memory or speed from another, and one that fails leaves the others. ``memory.device`` of the
recipe is ignored, so that units have the same share of memory in all points. The peak is metered in one pass;
times are medians of later steps.

Source: SSDTrain (arXiv:2408.10013): a run is a point, its activation peak against its model throughput.
"""

import argparse
import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from infinity.activations.controller import METERED, ActivationBudget, Activations
from infinity.app.loop import Loop
from infinity.app.runs import RECIPE, write_recipe
from infinity.app.train import ActivationView, built, open_inputs, process_group, set_threads
from infinity.core.config import SettingError
from infinity.core.errors import InfinityError, RecipeError
from infinity.core.files import create_file, write_file
from infinity.core.nbytes import format_nbytes
from infinity.core.plan import FOLDER, PLAN, Planning
from infinity.data.sequences import Batch
from infinity.observe.metrics import Evaluation, StepReport, View
from infinity.planner.search import PlanSearch
from infinity.predict.plan_run import print_line
from infinity.recipes.loading import load_recipe
from infinity.recipes.recipe import Recipe, with_values

#: Budgets of the plans, as fractions of the way from the smallest possible budget to the peak of "keep".
SHARES = (0.1, 0.4, 0.7)
_SIMPLE: tuple[Literal["keep", "recompute", "offload"], ...] = ("keep", "recompute", "offload")
#: Files in the folder of a point.
POINT, RESULT = "point.json", "result.json"
_COLORS = {"keep": "#7a7f87", "recompute": "#8e6bbf", "offload": "#e08a3c", "plan": "#2f6db5"}
_MARKERS = {"keep": "s", "recompute": "^", "offload": "D", "plan": "o"}


@dataclass(frozen=True, kw_only=True)
class RokPoint:
    """One run of the curve; figures are those of one rank and one optimizer step.

    Attributes:
        batch_size: Sequences of a micro-batch.
        budget_nbytes: Budget of the plan; None: the lowest peak that does not slow down the step.
        error: Why the point has no figures; empty: it has.
        flops: Floating-point operations of forward and backward, without recomputation.
        peak_nbytes: Peak of the tensors that a micro-batch allocates, without gradients.
    """

    way: Literal["keep", "recompute", "offload", "plan"]
    batch_size: int
    budget_nbytes: int | None = None
    error: str = ""
    step_s: float = 0.0
    tokens: int = 0
    flops: int = 0
    peak_nbytes: int = 0
    nbytes_stored: int = 0
    nbytes_loaded: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s if self.step_s else 0.0

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.step_s if self.step_s else 0.0

    @property
    def name(self) -> str:
        """The way and its budget, for display."""
        return self.way if self.budget_nbytes is None else f"{self.way} {format_nbytes(self.budget_nbytes)}"


def show_rok(
    path: str, overrides: Sequence[str], *, batches: str, steps: int, folder: Path, console: Console
) -> list[RokPoint]:
    """Measure every point, print the table, and write ``rok.json`` and ``rok.png`` into a new folder.

    Args:
        path: The recipe; ``overrides`` are applied to it.
        batches: Factors of ``train.batch_size``, as in ``1,2,4``.
        steps: Number of timed steps of each point.

    Raises:
        RecipeError: The recipe, ``batches``, ``steps`` or the folder cannot be used.
    """
    recipe = load_recipe(path, overrides)
    if recipe.train.schedule == "layer":
        raise RecipeError("train.schedule=layer always recomputes; this needs train.schedule=step")
    if steps < 1:
        raise RecipeError(f"--steps {steps}: wanted at least 1")
    sizes = [factor * recipe.train.batch_size for factor in _factors(batches)]
    try:
        for size in sizes:
            _recipe_of(
                recipe, RokPoint(way="keep", batch_size=size), warmup_steps(recipe.train.accumulate) + steps
            )
    except SettingError as error:
        raise RecipeError(f"--batches {batches[:100]} --steps {steps}: train.{error}") from error
    try:
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise RecipeError(f"--out {folder}: {error.strerror}; wanted a new folder") from error

    def measure_with_dtype(point: RokPoint, at: Path) -> RokPoint:
        """Measure a point; all points use the dtype that the first one chose for ``auto``."""
        nonlocal recipe
        measured = run_point(recipe, steps, point, at)
        recipe = with_values(recipe, {"train.dtype": load_recipe(at / RECIPE).train.dtype})
        return measured

    points = []
    print_line(console, f"{path}: each point is a training in its own process; files in {folder}")
    for point in measure_all(sizes, folder, measure_with_dtype):
        points.append(point)
        print_line(console, f"batch {point.batch_size}, {point.name}: {_describe(point)}")
        given = {"recipe": path, "overrides": list(overrides), "points": [_figures(each) for each in points]}
        write_file(folder / "rok.json", json.dumps(given, indent=2) + "\n")
    console.print()
    console.print(rok_table(points))
    console.print()
    title = f"Recompute, offload, keep, or plan: {Path(path).stem}"
    print_line(console, _draw(folder / "rok.png", points, title))
    return points


def measure_all(
    sizes: Sequence[int], folder: Path, run: Callable[[RokPoint, Path], RokPoint]
) -> Iterator[RokPoint]:
    """Measure every way and some plans at every batch size; yield each point when it is done."""
    for batch_size in sizes:
        for way in _SIMPLE:
            yield run(RokPoint(way=way, batch_size=batch_size), folder / f"batch{batch_size}_{way}")
        free = folder / f"batch{batch_size}_plan"
        yield run(RokPoint(way="plan", batch_size=batch_size), free)
        for number, budget_nbytes in enumerate(_budgets(free), start=1):
            point = RokPoint(way="plan", batch_size=batch_size, budget_nbytes=budget_nbytes)
            yield run(point, folder / f"batch{batch_size}_plan{number}")


def run_point(recipe: Recipe, steps: int, point: RokPoint, folder: Path) -> RokPoint:
    """Measure ``point`` in a separate process, whose output goes to ``log.txt``."""
    folder.mkdir(mode=0o700)
    write_file(folder / POINT, json.dumps(asdict(point)))
    warmup = warmup_steps(recipe.train.accumulate)
    write_recipe(_recipe_of(recipe, point, warmup + steps), folder)
    log = folder / "log.txt"
    with open(create_file(log), "w", encoding="utf-8") as out:
        command = [sys.executable, __file__, "--point", str(folder)]
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
    if code or not (folder / RESULT).exists():
        return replace(point, error=_why(code, log))
    return RokPoint(**json.loads((folder / RESULT).read_text("utf-8")))


def _recipe_of(recipe: Recipe, point: RokPoint, steps: int) -> Recipe:
    """Return the recipe of a point; see [Note: how it is measured]."""
    train = replace(recipe.train, batch_size=point.batch_size, steps=steps)
    return replace(
        recipe,
        run=replace(recipe.run, save=False, name=None),
        train=replace(train, eval_every=None, eval_first=False),
        memory=replace(recipe.memory, activations=point.way, device=None),
    )


def _budgets(folder: Path) -> list[int]:
    """Return the budgets to plan for, from the profile of the plan in ``folder``; none without a plan."""
    if not (folder / FOLDER / PLAN).exists():
        return []
    planning = Planning.load(folder / FOLDER)
    least = PlanSearch(planning.profile, planning.hardware).smallest_budget()
    most = planning.kept.peak_nbytes
    return [least + int(share * (most - least)) for share in SHARES] if least < most else []


def _why(code: int, log: Path) -> str:
    """Return the reason why a point failed, in one line."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"ended by {name}{': out of memory?' if name == 'SIGKILL' else ''}"
    lines = log.read_text("utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {code} without output"


def _factors(text: str) -> list[int]:
    try:
        factors = [int(part) for part in text.split(",")]
    except ValueError:
        factors = []
    if not factors or min(factors) < 1:
        raise RecipeError(f"--batches {text[:100]!r}: wanted factors of train.batch_size, as in 1,2,4")
    return factors


def _figures(point: RokPoint) -> dict[str, object]:
    return asdict(point) | {"tokens_per_s": point.tokens_per_s, "flops_per_s": point.flops_per_s}


def _describe(point: RokPoint) -> str:
    if point.error:
        return point.error
    return f"{format_nbytes(point.peak_nbytes)}, {point.tokens_per_s:,.0f} tokens/s"


def _draw(path: Path, points: Sequence[RokPoint], title: str) -> str:
    """Write the picture and return a line with its path, or with the reason why there is none."""
    if all(point.error for point in points):
        return "no point could be measured; see log.txt in each point's folder"
    try:
        draw_rok(path, points, title=title)
    except ImportError:
        return "the picture needs matplotlib: pip install 'infinity-offload[plots]'"
    except OSError as error:  # the file's, or matplotlib's, which wants a cache
        return f"the picture cannot be written: {error}"
    return f"throughput against activation peak: {path}"


def warmup_steps(accumulate: int) -> int:
    """Return the number of steps until a plan is made and one of its passes is metered."""
    return math.ceil((METERED + 1) / accumulate)


def measure(folder: Path) -> RokPoint:
    """Train with ``recipe.yaml`` of ``folder`` and return the point of ``point.json`` with its figures.

    A plan is saved in ``folder``, for ``infinity plan``, and the recipe with the dtype chosen for ``auto``.

    Raises:
        InfinityError: As a run may raise.
    """
    point = RokPoint(**json.loads((folder / POINT).read_text("utf-8")))
    recipe = load_recipe(folder / RECIPE)
    set_threads(recipe.train)
    data = open_inputs(recipe, lambda line: None)
    with process_group(recipe), built(recipe, None, View()) as (model, optimizer):
        write_recipe(
            with_values(recipe, {"train.dtype": optimizer.runtime.config.dtype}), folder
        )  # chosen for auto
        activations: Activations = optimizer.runtime.activations
        activations.meters = True
        if point.budget_nbytes is not None:
            activations.budget = ActivationBudget(point.budget_nbytes)
        steps = StepMedians(warmup_steps(recipe.train.accumulate))
        moved = ActivationView(activations, folder, recipe.train.accumulate, lambda line: None)
        loop = Loop(recipe, model, optimizer, data, View(steps, moved))
        loop.run()
        figures = moved.result()
        return replace(
            point,
            step_s=steps.step_s,
            tokens=steps.tokens,
            flops=_flops(loop, model, next(iter(data.train)), recipe),
            peak_nbytes=activations.metered_nbytes or 0,
            nbytes_stored=0 if figures is None else figures.nbytes_stored,
            nbytes_loaded=0 if figures is None else figures.nbytes_loaded,
        )


class StepMedians:
    """View that takes medians over the steps after a warm-up."""

    def __init__(self, warmup: int) -> None:
        self._warmup = warmup
        self._steps: list[tuple[float, int]] = []

    def step(self, report: StepReport) -> None:
        if report.step > self._warmup:
            self._steps.append((report.step_s, report.tokens))

    def evaluated(self, found: Evaluation) -> None:
        pass

    def close(self) -> None:
        pass

    @property
    def step_s(self) -> float:
        return median(step_s for step_s, _ in self._steps)

    @property
    def tokens(self) -> int:
        return round(median(tokens for _, tokens in self._steps))


def _flops(loop: Loop, model: Any, batch: Batch, recipe: Recipe) -> int:
    """Count a step's operations: backward takes twice as many as forward, or as many with frozen weights."""
    # torch's own counter knows attention on accelerators only
    attention = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
    model.eval()
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=attention) as counter:
        loop.loss(batch)
    factor = 3 if recipe.lora.rank is None else 2
    return int(counter.get_total_flops()) * factor * recipe.train.accumulate


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **more: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def rok_table(points: Sequence[RokPoint]) -> Table:
    """Return a table with one row per point."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("batch", "way", "peak", "tokens/s", "Gflop/s", "step s", "stored", "loaded", ""):
        table.add_column(name, justify="left" if name in ("way", "") else "right", no_wrap=name != "")
    for point in points:
        table.add_row(str(point.batch_size), *(Text(cell) for cell in _cells(point)))
    return table


def _cells(point: RokPoint) -> list[str]:
    if point.error:
        return [point.name, "", "", "", "", "", "", point.error]
    moved = [format_nbytes(nbytes) if nbytes else "" for nbytes in (point.nbytes_stored, point.nbytes_loaded)]
    return [
        point.name,
        format_nbytes(point.peak_nbytes),
        f"{point.tokens_per_s:,.0f}",
        f"{point.flops_per_s / 1e9:,.1f}",
        f"{point.step_s:.3f}",
        *moved,
        "",
    ]


def draw_rok(path: Path, points: Sequence[RokPoint], *, title: str = "") -> None:
    """Draw the points that have figures as PNG or SVG, by the suffix of ``path``.

    Needs matplotlib (extra: plots).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    named = set[str]()
    most_per_s = max((point.flops_per_s for point in points), default=0.0)
    scale, unit = (1e12, "Tflop/s") if most_per_s >= 1e12 else (1e9, "Gflop/s")
    for line in _lines([point for point in points if not point.error]):
        way = line[0].way
        axes.plot(
            [point.peak_nbytes for point in line],
            [point.flops_per_s / scale for point in line],
            color=_COLORS.get(way, "#333333"),
            marker=_MARKERS.get(way, "o"),
            linestyle="-" if way == "plan" else (0, (4, 3)),
            linewidth=1.3,
            markersize=6,
            label=None if way in named else way,
        )
        named.add(way)
        _label(axes, line, scale)
    _format_axes(axes, max((point.peak_nbytes for point in points), default=0))
    axes.set_ylim(0, 1.1 * most_per_s / scale or 1)
    axes.set_ylabel(f"model throughput ({unit}, recomputation not counted)")
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _lines(points: Sequence[RokPoint]) -> Iterator[list[RokPoint]]:
    """Yield the points of each line: a way over batch sizes, the plans of a batch size over budgets."""
    groups: dict[tuple[str, int], list[RokPoint]] = {}
    for point in points:
        key = (point.way, point.batch_size if point.way == "plan" else 0)
        groups.setdefault(key, []).append(point)
    for group in groups.values():
        yield sorted(group, key=lambda point: point.peak_nbytes)


def _label(axes: Any, line: Sequence[RokPoint], scale: float) -> None:
    """Write the batch size at each point, and once for the plans of a batch size."""
    for point in line[-1:] if line[0].way == "plan" else line:
        axes.annotate(
            f"batch {point.batch_size}",
            (point.peak_nbytes, point.flops_per_s / scale),
            xytext=(6, 5),
            textcoords="offset points",
            fontsize=8,
            color=_COLORS.get(point.way, "#333333"),
        )


def _format_axes(axes: Any, most_nbytes: int) -> None:
    step_nbytes = 1 << max(0, int(most_nbytes / 6)).bit_length()
    axes.set_xticks(range(0, int(1.15 * most_nbytes) + step_nbytes, step_nbytes))
    axes.xaxis.set_major_formatter(lambda nbytes, _: format_nbytes(nbytes))
    axes.set_xlim(0, 1.15 * most_nbytes or 1)
    axes.set_xlabel("activation peak")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderpad=0)


def work(folder: Path) -> int:
    """Measure the point in ``folder``; return the exit code."""
    try:
        result = measure(folder)
    except InfinityError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    write_file(folder / RESULT, json.dumps(asdict(result)))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe", nargs="?", help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys")
    parser.add_argument("--batches", default="1,2,4", help="factors of train.batch_size (default: 1,2,4)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per point (default: 5)")
    parser.add_argument("--out", type=Path, default=Path("runs/rok"), help="a new folder (default: runs/rok)")
    parser.add_argument("--point", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.point is not None:
        return work(options.point)
    if options.recipe is None:
        parser.error("wanted a recipe")
    how = {name: getattr(options, name) for name in ("batches", "steps")}
    try:
        show_rok(options.recipe, options.overrides, **how, folder=options.out, console=Console())
    except InfinityError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
