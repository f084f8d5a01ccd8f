"""``infinity rok RECIPE``: measures what memory for activations buys: the recompute-offload-keep curve.

[Note: how it is measured]
Each point is a short training of the recipe's model on the recipe's own data, in a process of its own: none
inherits memory or speed from another, and one that fails leaves the others. ``memory.device`` of the recipe
is left out, so that units have the same share of memory in all points. The peak is metered in one pass;
times are medians of later steps.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from infinity.app.recipe import Recipe, load_recipe
from infinity.app.rok_plot import RokPoint, draw_rok, rok_table
from infinity.core.errors import RecipeError
from infinity.core.nbytes import format_nbytes
from infinity.planner.planning import FOLDER, PLAN, Planning
from infinity.planner.policies import smallest_budget

#: Budgets of plans, as shares of the way from the smallest that can be kept to what keeping everything takes.
SHARES = (0.1, 0.4, 0.7)
_BY_HAND: tuple[Literal["keep", "recompute", "offload"], ...] = ("keep", "recompute", "offload")
#: Runs a point in a folder, and tells how it went.
Measure = Callable[[RokPoint, Path], RokPoint]


def show_rok(
    path: str, overrides: Sequence[str], *, batches: str, steps: int, console: Console
) -> list[RokPoint]:
    """Measure every point, print the table, and write ``rok.json`` and ``rok.png`` into the run's folder.

    Args:
        path: The recipe; ``overrides`` go on top.
        batches: Factors of ``train.batch_size``, as in ``1,2,4``.
        steps: That are timed, of each point.

    Raises:
        RecipeError: The recipe is wrong, or cannot be measured so; or the factors are none.
    """
    from infinity.app.train import RECIPE, make_folder

    recipe = load_recipe(path, overrides)
    if recipe.train.schedule == "layer":
        raise RecipeError("train.schedule=layer recomputes by itself; infinity rok needs train.schedule=step")
    if steps < 1:
        raise RecipeError(f"--steps {steps}: wanted at least 1")
    sizes = [factor * recipe.train.batch_size for factor in _factors(batches)]
    folder = make_folder(recipe)
    _say(console, f"{path} on its own data; each point in a process of its own; files in {folder}")

    def measure(point: RokPoint, at: Path) -> RokPoint:
        """Every point computes in the dtype that the first one chose."""
        nonlocal recipe
        measured = run_point(recipe, steps, point, at)
        recipe = replace(recipe, train=replace(recipe.train, dtype=load_recipe(at / RECIPE).train.dtype))
        return measured

    points = []
    for point in measure_all(sizes, folder, measure):
        points.append(point)
        _say(console, f"batch {point.batch_size}, {point.name}: {_describe(point)}")
        given = {"recipe": path, "overrides": list(overrides), "points": [_figures(each) for each in points]}
        (folder / "rok.json").write_text(json.dumps(given, indent=2) + "\n", encoding="utf-8")
    console.print()
    console.print(rok_table(points))
    console.print()
    _say(console, _draw(folder / "rok.png", points, f"Recompute, offload, keep, or plan: {Path(path).stem}"))
    return points


def measure_all(sizes: Sequence[int], folder: Path, measure: Measure) -> Iterator[RokPoint]:
    """Every way at every batch size, and at each some plans, as they are measured."""
    for batch_size in sizes:
        for way in _BY_HAND:
            yield measure(RokPoint(way=way, batch_size=batch_size), folder / f"batch{batch_size}_{way}")
        free = folder / f"batch{batch_size}_plan"
        yield measure(RokPoint(way="plan", batch_size=batch_size), free)
        for number, budget_nbytes in enumerate(_budgets(free), start=1):
            point = RokPoint(way="plan", batch_size=batch_size, budget_nbytes=budget_nbytes)
            yield measure(point, folder / f"batch{batch_size}_plan{number}")


def run_point(recipe: Recipe, steps: int, point: RokPoint, folder: Path) -> RokPoint:
    """Measure ``point`` in a process of its own; what it prints is kept in ``log.txt``."""
    from infinity.app.rok_point import POINT, RESULT, warmup_steps
    from infinity.app.train import keep_recipe

    folder.mkdir()
    (folder / POINT).write_text(json.dumps(asdict(point)), encoding="utf-8")
    warmup = warmup_steps(recipe.train.accumulate)
    keep_recipe(_recipe_of(recipe, point, warmup + steps), folder)
    log = folder / "log.txt"
    with log.open("w", encoding="utf-8") as out:
        command = [sys.executable, "-m", "infinity.app.rok_point", str(folder)]
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
    if code or not (folder / RESULT).exists():
        return replace(point, error=_why(code, log))
    return RokPoint(**json.loads((folder / RESULT).read_text(encoding="utf-8")))


def _recipe_of(recipe: Recipe, point: RokPoint, steps: int) -> Recipe:
    """The recipe of a point; see [Note: how it is measured]."""
    train = replace(recipe.train, batch_size=point.batch_size, steps=steps)
    return replace(
        recipe,
        run=replace(recipe.run, save=False, name=None),
        train=replace(train, eval_every=None, eval_first=False),
        memory=replace(recipe.memory, activations=point.way, device=None),
    )


def _budgets(folder: Path) -> list[int]:
    """Budgets to plan for, from the profile of the plan in ``folder``; none if it failed."""
    if not (folder / FOLDER / PLAN).exists():
        return []
    planning = Planning.load(folder / FOLDER)
    least = smallest_budget(planning.profile, planning.hardware)
    most = planning.kept.peak_nbytes
    return [least + int(share * (most - least)) for share in SHARES] if least < most else []


def _why(code: int, log: Path) -> str:
    """Why a point failed, in one line."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"ended by {name}{': out of memory?' if name == 'SIGKILL' else ''}"
    lines = log.read_text(errors="replace", encoding="utf-8").strip().splitlines()
    return lines[-1] if lines else f"ended with exit code {code} and without a word"


def _factors(text: str) -> list[int]:
    try:
        factors = [int(part) for part in text.split(",")]
    except ValueError:
        factors = []
    if not factors or min(factors) < 1:
        raise RecipeError(f"--batches {text!r}: wanted factors of train.batch_size, as in 1,2,4")
    return factors


def _figures(point: RokPoint) -> dict[str, object]:
    return asdict(point) | {"tokens_per_s": point.tokens_per_s, "flops_per_s": point.flops_per_s}


def _describe(point: RokPoint) -> str:
    if point.error:
        return point.error
    return f"{format_nbytes(point.peak_nbytes)}, {point.tokens_per_s:,.0f} tokens/s"


def _draw(path: Path, points: Sequence[RokPoint], title: str) -> str:
    """Write the picture; a line that says where it is, or why there is none."""
    if all(point.error for point in points):
        return "no point could be measured; each one's log.txt says why"
    try:
        draw_rok(path, points, title=title)
    except ImportError:
        return "no picture without matplotlib: pip install 'infinity-offload[plots]'"
    except OSError as error:  # the file's, or matplotlib's, which wants a cache
        return f"no picture: {error}"
    return f"throughput against activation peak: {path}"


def _say(console: Console, line: str) -> None:
    console.print(Text(line), soft_wrap=True)
