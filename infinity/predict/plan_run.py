"""Implements ``infinity plan RUN``: shows a run's activation plan, or plans again for another budget.

Nothing is trained and torch is not imported. Prints a table of the blocks and one that compares the plan with
simple policies, and draws memory over one step with the channels below it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from infinity.core.errors import InfinityError, RecipeError
from infinity.core.files import user_path
from infinity.core.nbytes import format_nbytes, parse_nbytes
from infinity.core.plan import (
    CHOICE,
    FOLDER,
    PLAN,
    ActivationPlan,
    Choice,
    Outcome,
    Phase,
    Place,
    Planning,
    Profile,
)
from infinity.planner.lifetimes import index_of, operator_times
from infinity.planner.search import plan as make_plan
from infinity.planner.search import simple_plan
from infinity.planner.simulator import Interval, Sample, StepTimeline, play

#: Names of the simple policies in the output.
_SIMPLE = {
    "keep": "keep all",
    "offload": "offload all",
    "recompute": "recompute all",
    "adaptive": "SSDTrain's rule",
}


def show_plan(run: str, budget: str | None, console: Console) -> None:
    """Print what a run chose, its plan and the cost of alternatives, and write its picture.

    ``run`` is its folder, or one that ``Planning.save`` wrote. With a ``budget`` for everything that a step
    allocates on the device, such as ``2GiB``, plan again for it.

    Raises:
        RecipeError: The run has no plan, or the budget is not a size.
        BudgetError: No plan keeps the budget; names the smallest budget that can be kept.
    """
    chosen = Choice.read(user_path(run, "RUN") / CHOICE)
    if chosen is not None:
        print_line(console, chosen.line)
    try:
        planning = open_plan(run, budget)
    except RecipeError as error:
        if chosen is None or budget is not None:
            raise
        print_line(console, str(error))
        return
    print_line(console, planning.describe())
    console.print()
    console.print(plan_table(plan_rows(planning.profile, planning.plan)))
    console.print()
    console.print(alternatives_table(alternatives(planning)))
    console.print()
    name = "plan" if budget is None else f"plan_{planning.plan.capacity_nbytes}"
    print_line(console, _draw(planning, find_folder(user_path(run, "RUN")) / f"{name}.png"))


def open_plan(run: str, budget: str | None) -> Planning:
    """Return the plan of a run, or one for another budget; arguments and errors as :func:`show_plan`."""
    planning = Planning.load(find_folder(user_path(run, "RUN")))
    if budget is None:
        return planning
    try:
        nbytes = parse_nbytes(budget)
    except ValueError as error:
        raise RecipeError(f"--budget: {error}") from error
    plan = make_plan(planning.profile, planning.hardware, nbytes)
    predicted = play(planning.profile, plan, planning.hardware)
    plan = replace(plan, capacity_nbytes=nbytes)  # it may be made for less
    return replace(planning, plan=plan, predicted=predicted, measured=None)


def find_folder(run: Path) -> Path:
    """Return the folder that holds a run's plan; RecipeError: there is none, and how to make one."""
    for folder in (run / FOLDER, run):
        if (folder / PLAN).is_file():
            return folder
    if not run.is_dir():
        raise RecipeError(
            f"{run}: no such file or folder; give a recipe, as in configs/, or the folder of a run, such as "
            "runs/mine"
        )
    planned = sorted(run.glob(f"*/{FOLDER}/{PLAN}"), key=lambda path: path.stat().st_mtime)
    if planned:
        raise RecipeError(
            f"{run} is a directory of runs; the newest with a plan is {planned[-1].parent.parent}"
        )
    raise RecipeError(
        f"{run}: contains no plan for activations. A run makes one in its second step if its recipe sets "
        "memory.activations=plan or memory.device: infinity train RECIPE memory.activations=plan"
    )


class Alternative(NamedTuple):
    """Describes one row of the comparison: a policy and its cost; None: ``note`` says why."""

    name: str
    outcome: Outcome | None
    note: str = ""


def alternatives(planning: Planning) -> Iterator[Alternative]:
    """Yield the plan as predicted and measured, then the simple policies."""
    capacity, hardware = planning.plan.capacity_nbytes, planning.hardware
    within = "" if capacity is None else f"within {format_nbytes(capacity)}"
    yield Alternative("the plan, predicted", planning.predicted, within)
    if (measured := planning.measured) is not None:
        note = "recompute s as predicted" if measured.recompute_s else ""
        yield Alternative("the plan, measured", measured, note)
    for name, words in _SIMPLE.items():
        plan = simple_plan(name, planning.profile, hardware)
        stores = Place.NVME in plan.places.values()
        if name == "recompute" and not plan.recomputed:
            yield Alternative(words, None, "not possible: the model has no blocks")
        elif stores and min(hardware.read_bytes_per_s, hardware.write_bytes_per_s) <= 0:
            yield Alternative(words, None, "not possible: memory.nvme is empty")
        else:
            outcome = play(planning.profile, plan, hardware)
            over = capacity is not None and outcome.peak_nbytes > capacity
            yield Alternative(words, outcome, "over the budget" if over else "")


def print_line(console: Console, line: str) -> None:
    """Print a line without wrapping it."""
    console.print(Text(line), soft_wrap=True)


def make_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    """Return a table without the columns that have no values; those with a name, but the first, go right."""
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    cells = list(rows)
    shown = [i for i in range(len(columns)) if not i or any(row[i] for row in cells)]
    for i in shown:
        table.add_column(columns[i], justify="right" if i and columns[i] else "left", no_wrap=True)
    for row in cells:
        table.add_row(*(Text(row[i]) for i in shown))
    return table


class PlanRow(NamedTuple):
    """Holds a block's times and bytes under a plan."""

    name: str
    forward_s: float
    backward_s: float
    saved_nbytes: int  # what autograd saves if everything is kept
    kept_nbytes: int
    host_nbytes: int
    nvme_nbytes: int
    recomputed_nbytes: int  # the rest: what is dropped and recomputed


def plan_rows(profile: Profile, plan: ActivationPlan) -> list[PlanRow]:
    """Return time and bytes of each block in forward order, between two rows for operators outside blocks.

    Times add up to the profile's step without its update. Operators between two blocks are in the last row.
    """
    blocks = sorted(profile.blocks, key=lambda block: block.region)
    names = ["before the blocks", *(block.name for block in blocks), "after the blocks"]
    numbers = np.arange(len(profile.operators))
    row_of_operator = np.full(len(numbers), len(names) - 1)
    if blocks:
        row_of_operator[(numbers < blocks[0].forward[0]) | (numbers >= blocks[0].backward[1])] = 0
    row_of_region = {0: 0}
    for row, block in enumerate(blocks, start=1):
        row_of_operator[slice(*block.forward)] = row_of_operator[slice(*block.backward)] = row
        row_of_region[block.region] = row
    phases, times_s = np.array([each.phase for each in profile.operators]), operator_times(profile)
    forward_s, backward_s = (
        np.bincount(row_of_operator, times_s * (phases == phase), len(names)).tolist()
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    saved = [0] * len(names)
    for slot in profile.slots:
        saved[row_of_region.get(slot.key.region, -1)] += slot.nbytes
    by_place = {place: [0] * len(names) for place in Place}
    index = index_of(profile)
    for period in index.lifetimes(*index.again(plan)).periods:
        by_place[plan.place(period.key).as_coded(False)][row_of_region.get(period.key.region, -1)] += (
            period.nbytes
        )
    placed = [by_place[place] for place in (Place.KEEP, Place.HOST, Place.NVME)]
    again = [max(0, of_block - sum(stays)) for of_block, *stays in zip(saved, *placed)]
    rows = list(map(PlanRow, names, forward_s, backward_s, saved, *placed, again))
    return rows if blocks else [rows[0], rows[-1]]


def plan_table(rows: Sequence[PlanRow]) -> Table:
    """Return a table with one row per block."""
    columns = ["block", "forward ms", "backward ms", "saved", "kept", "to host", "to NVMe", "recomputed"]
    return make_table(
        columns,
        [
            [name, f"{1e3 * forward_s:.1f}", f"{1e3 * backward_s:.1f}", *map(_size, sizes)]
            for name, forward_s, backward_s, *sizes in rows
        ],
    )


def alternatives_table(rows: Iterable[Alternative]) -> Table:
    cells = []
    for name, outcome, note in rows:
        figures = [""] * 7
        if (o := outcome) is not None:
            figures = [f"{time_s:.3f}" if time_s else "" for time_s in (o.step_s, o.stall_s, o.recompute_s)]
            figures += map(_size, (o.peak_nbytes, o.nbytes_stored, o.nbytes_loaded, o.host_peak_nbytes))
        cells.append([name, *figures, note])
    columns = ["step s", "stall s", "recompute s", "peak", "stored", "loaded", "host peak"]
    return make_table(["", *columns, ""], cells)


def _size(nbytes: int) -> str:
    return format_nbytes(nbytes) if nbytes else ""


def _draw(planning: Planning, picture: Path) -> str:
    """Write the picture; return a line with its path, or with the reason why there is none."""
    profile, plan, hardware = planning.profile, planning.plan, planning.hardware
    kept, planned = StepTimeline(), StepTimeline()
    play(profile, ActivationPlan("keep"), hardware, kept)
    play(profile, plan, hardware, planned)
    lanes = {"stall": planned.stalls, "recompute": planned.recomputed, **planned.channels}
    folder = picture.parent
    run = (folder.parent if folder.name == FOLDER else folder).resolve().name
    title = f"One step with the plan of {run}, as predicted"
    capacity = plan.capacity_nbytes
    try:
        draw_memory(picture, kept.memory, planned.memory, lanes, capacity_nbytes=capacity, title=title)
    except ImportError:
        return "the picture needs matplotlib: pip install 'infinity-offload[plots]'"
    except OSError as error:
        why = error.strerror or error  # matplotlib's own errors have no number
        raise InfinityError(f"{picture}: the picture cannot be written: {why}") from error
    return f"memory over the step, without and with the plan: {picture}"


def draw_memory(
    path: Path, kept: Sequence[Sample], planned: Sequence[Sample], lanes: Mapping[str, Sequence[Interval]], *,
    capacity_nbytes: int | None = None, title: str = "",
) -> None:  # fmt: skip
    """Draw one step as PNG or SVG, by the ending of ``path``; needs matplotlib (extra: plots).

    Args:
        kept: Memory if everything is kept; ends with the step. ``planned``: memory with the plan.
        lanes: Transfers of each channel with the plan, from the top down; also "stall" and "recompute".
        capacity_nbytes: The plan's budget; None: it has none.
    """
    from matplotlib.figure import Figure

    shown = {name: intervals for name, intervals in lanes.items() if intervals}
    figure = Figure(figsize=(10, 4.2 + 0.32 * len(shown)), layout="constrained")
    heights = [4.2, 0.1 + 0.32 * max(1, len(shown))]
    memory, channels = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    last_s = max((at_s for at_s, _ in (*kept, *planned)), default=0.0)
    scale, unit = (1e3, "ms") if last_s < 1 else (1.0, "s")
    for words, samples, color in (("everything kept", kept, "#b8bcc4"), ("with the plan", planned, "C0")):
        times, sizes = [at_s * scale for at_s, _ in samples], [nbytes for _, nbytes in samples]
        peak, end = format_nbytes(max(sizes, default=0)), max(times, default=0.0)
        label = f"{words}: at most {peak}, {end:.3g} {unit}"
        memory.fill_between(times, sizes, step="post", color=color, alpha=0.35, linewidth=0)
        memory.step(times, sizes, where="post", color=color, label=label)
    most_nbytes = max((nbytes for _, nbytes in (*kept, *planned)), default=0)
    step_nbytes = 1 << max(0, int(most_nbytes / 6)).bit_length()
    memory.set_yticks(range(0, most_nbytes + step_nbytes, step_nbytes))
    memory.yaxis.set_major_formatter(lambda nbytes, _: format_nbytes(nbytes))
    memory.set_ylim(0, 1.05 * most_nbytes or 1)
    memory.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    memory.grid(axis="y", alpha=0.4)
    if capacity_nbytes is not None and capacity_nbytes <= 1.05 * most_nbytes:
        memory.axhline(capacity_nbytes, color="C3", linestyle="--")
        text, right = f" budget\n {format_nbytes(capacity_nbytes)}", memory.get_yaxis_transform()
        memory.text(1, capacity_nbytes, text, transform=right, color="C3", va="center")
    for y, intervals in enumerate(shown.values()):
        for units, alpha in ((False, 1.0), (True, 0.35)):
            shown_here = [each for each in intervals if (each[2] == "units") is units]  # those are paler
            bars = [(begin_s * scale, (end_s - begin_s) * scale) for begin_s, end_s, _ in shown_here]
            # The edge shows transfers that are narrower than a pixel.
            channels.broken_barh(bars, (y - 0.36, 0.72), color=f"C{y}", alpha=alpha, linewidth=0.5)
    channels.set_yticks(range(len(shown)), labels=list(shown))
    channels.set_ylim(max(1, len(shown)) - 0.5, -0.5)
    channels.set_xlim(0, last_s * scale or 1)
    channels.set_xlabel(f"time of the step ({unit})")
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
