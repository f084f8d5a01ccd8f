"""``infinity plan RUN``: what a run does with its activations, or would do in another budget. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from infinity.core.errors import BudgetError, InfinityError, RecipeError
from infinity.core.nbytes import format_nbytes, parse_nbytes
from infinity.core.plan import ActivationPlan, Outcome, Place
from infinity.observe.memory_picture import draw_memory
from infinity.observe.plan_table import Way, plan_table, ways_table
from infinity.planner.planning import FOLDER, PLAN, Planning, load_measured, plan_rows
from infinity.planner.player import play, play_in_detail
from infinity.planner.policies import POLICIES
from infinity.planner.policies import plan as make_plan

#: What each simple policy does, for people.
_BASELINES = {
    "keep": "keep all",
    "offload": "offload all",
    "recompute": "recompute all",
    "adaptive": "SSDTrain's rule",
}


@dataclass(frozen=True, slots=True)
class Shown:
    """A plan that is looked at.

    Attributes:
        folder: Where it was found.
        planning: The run's plan, or one for the same profile in another budget.
        budget_nbytes: The other budget; None: the run's plan.
        measured: What the run's plan took; None: nobody knows.
    """

    folder: Path
    planning: Planning
    budget_nbytes: int | None
    measured: Outcome | None

    @property
    def run(self) -> str:
        """The run's name."""
        return (self.folder.parent if self.folder.name == FOLDER else self.folder).resolve().name

    @property
    def picture(self) -> Path:
        """Where its picture goes."""
        budget = self.budget_nbytes
        return self.folder / ("plan.png" if budget is None else f"plan_{budget}.png")


def show_plan(run: str, budget: str | None, console: Console) -> None:
    """Print the plan of a run, what it costs beside other ways, and write its picture.

    Args:
        run: The run's folder, or a folder that ``Planning.save`` wrote.
        budget: Device memory for all that a step makes, as ``2GiB``: plan again for it, running nothing.

    Raises:
        RecipeError: No plan is there, or the budget is no size.
        BudgetError: No plan keeps the budget; says which one could be kept.
    """
    shown = open_plan(run, budget)
    planning = shown.planning
    say(console, planning.describe())
    console.print()
    console.print(plan_table(plan_rows(planning.profile, planning.plan)))
    console.print()
    console.print(ways_table(list(ways(shown))))
    console.print()
    say(console, draw(shown))


def open_plan(run: str, budget: str | None) -> Shown:
    """The plan of a run, or one for another budget; arguments and errors as :func:`show_plan`."""
    folder = find_folder(Path(run).expanduser())
    planning, measured = Planning.load(folder), load_measured(folder)
    if budget is None:
        return Shown(folder, planning, None, measured)
    try:
        nbytes = parse_nbytes(budget)
    except ValueError as error:
        raise RecipeError(f"--budget: {error}") from error
    plan = make_plan(planning.profile, planning.hardware, nbytes)
    predicted = play(planning.profile, plan, planning.hardware)
    return Shown(folder, replace(planning, plan=plan, predicted=predicted), nbytes, None)


def find_folder(run: Path) -> Path:
    """The folder that holds a run's plan.

    Raises:
        RecipeError: There is none; says how to get one.
    """
    for folder in (run / FOLDER, run):
        if (folder / PLAN).is_file():
            return folder
    if not run.is_dir():
        raise RecipeError(f"{run}: no such folder; give a run's folder, as in runs/2026-01-31_12-00-00_1")
    planned = sorted(run.glob(f"*/{FOLDER}/{PLAN}"), key=lambda path: path.stat().st_mtime)
    if planned:
        raise RecipeError(f"{run} holds runs; the newest with a plan is {planned[-1].parent.parent}")
    raise RecipeError(
        f"{run}: no plan for activations is kept there. A run makes one in its second step where its recipe "
        "says memory.activations=plan, or gives memory.device: infinity train RECIPE memory.activations=plan"
    )


def ways(shown: Shown) -> Iterator[Way]:
    """The plan, what was measured, the simple policies, and what no plan can beat."""
    planning = shown.planning
    capacity, hardware = shown.budget_nbytes or planning.plan.capacity_nbytes, planning.hardware
    within = "" if capacity is None else f"within {format_nbytes(capacity)}"
    yield Way("the plan, predicted", planning.predicted, within)
    if shown.measured is not None:
        note = "recompute s as predicted" if shown.measured.recompute_s else ""
        yield Way("the plan, measured", shown.measured, note)
    for name, words in _BASELINES.items():
        plan = POLICIES[name](planning.profile, hardware, None)
        if name == "recompute" and not plan.recomputed:
            yield Way(words, None, "not possible: the model has no blocks")
        elif _needs_drive(plan) and min(hardware.read_bytes_per_s, hardware.write_bytes_per_s) <= 0:
            yield Way(words, None, "not possible: no directory in memory.nvme")
        else:
            outcome = play(planning.profile, plan, hardware)
            over = capacity is not None and outcome.peak_nbytes > capacity
            yield Way(words, outcome, "over the budget" if over else "")
    yield _bound(planning, capacity)


def _needs_drive(plan: ActivationPlan) -> bool:
    return Place.NVME in plan.places.values()


def _bound(planning: Planning, capacity_nbytes: int | None) -> Way:
    """The step time that no plan beats in the same budget, or with the same peak where there is none."""
    from infinity.planner.bound import bound  # scipy takes a second to import

    nbytes, name = capacity_nbytes or planning.predicted.peak_nbytes, "no plan is faster than"
    try:
        least_s = bound(planning.profile, planning.hardware, nbytes)
    except BudgetError:
        return Way(name, None, f"unknown within {format_nbytes(nbytes)}")
    return Way(name, Outcome(least_s, 0.0, 0.0, nbytes, 0, 0, 0), "linear program")


def draw(shown: Shown) -> str:
    """Write the picture; a line that says where it is, or why there is none."""
    planning = shown.planning
    profile, plan, hardware = planning.profile, planning.plan, planning.hardware
    _, kept = play_in_detail(profile, ActivationPlan("keep"), hardware)
    _, planned = play_in_detail(profile, plan, hardware)
    lanes = {"stall": planned.stalls, "recompute": planned.recomputed, **planned.channels}
    capacity = shown.budget_nbytes or plan.capacity_nbytes
    title = f"One step under the plan of {shown.run}, as predicted"
    try:
        draw_memory(shown.picture, kept.memory, planned.memory, lanes, capacity_nbytes=capacity, title=title)
    except ImportError:
        return "no picture without matplotlib: pip install 'infinity-offload[plots]'"
    except OSError as error:
        why = error.strerror or error  # matplotlib's own errors have no number
        raise InfinityError(f"{shown.picture}: {why}; the picture was not written") from error
    return f"memory over the step, before and after: {shown.picture}"


def say(console: Console, line: str) -> None:
    """A line that is not cut."""
    console.print(Text(line), soft_wrap=True)
