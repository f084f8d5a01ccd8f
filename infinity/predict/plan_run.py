"""Implements ``infinity plan RUN``: shows a run's activation plan, or plans again for another budget.

Nothing is trained and torch is not imported. Prints a table of the blocks and one that compares the plan with
simple policies, and draws memory over one step with the channels below it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from infinity.core.errors import InfinityError, RecipeError
from infinity.core.files import user_path
from infinity.core.nbytes import format_nbytes, parse_nbytes
from infinity.core.plan import ActivationPlan, Outcome, Place
from infinity.planner.planning import FOLDER, PLAN, Planning, PlanRow, load_measured, plan_rows
from infinity.planner.search import POLICIES
from infinity.planner.search import plan as make_plan
from infinity.planner.simulator import play, play_in_detail

#: ``(time_s, nbytes)``: bytes in memory from that time on.
Samples = Sequence[tuple[float, int]]
#: ``(begin_s, end_s, name)``; those named "units" are drawn paler.
Intervals = Sequence[tuple[float, float, str]]

_KEPT, _PLANNED, _BUDGET = "#b8bcc4", "#2f6db5", "#c0392b"
_LANE_COLORS = {
    "stall": "#c0392b",
    "recompute": "#8e6bbf",
    "NVMe write": "#e08a3c",
    "NVMe read": "#4f9d5d",
    "device to host": "#c9a227",
    "host to device": "#3a9a9a",
}
#: Names of the simple policies in the output.
_BASELINES = {
    "keep": "keep all",
    "offload": "offload all",
    "recompute": "recompute all",
    "adaptive": "SSDTrain's rule",
}


class ShownPlan(NamedTuple):
    """Holds a run's plan, or one for the same profile and another budget."""

    planning: Planning
    measured: Outcome | None  # None: the run did not measure it, or had another budget
    picture: Path  # in the folder of the run's plan


def show_plan(run: str, budget: str | None, console: Console) -> None:
    """Print the plan of a run and the cost of alternatives, and write its picture.

    Args:
        run: The run's folder, or a folder that ``Planning.save`` wrote.
        budget: Device memory for everything that a step allocates, such as ``2GiB``: plan again for it.

    Raises:
        RecipeError: The run has no plan, or the budget is not a size.
        BudgetError: No plan keeps the budget; names the smallest budget that can be kept.
    """
    shown = open_plan(run, budget)
    planning = shown.planning
    print_line(console, planning.describe())
    console.print()
    console.print(plan_table(plan_rows(planning.profile, planning.plan)))
    console.print()
    console.print(alternatives_table(list(alternatives(shown))))
    console.print()
    print_line(console, _draw(shown))


def open_plan(run: str, budget: str | None) -> ShownPlan:
    """Return the plan of a run, or one for another budget; arguments and errors as :func:`show_plan`."""
    folder = find_folder(user_path(run, "RUN"))
    planning = Planning.load(folder)
    if budget is None:
        return ShownPlan(planning, load_measured(folder), folder / "plan.png")
    try:
        nbytes = parse_nbytes(budget)
    except ValueError as error:
        raise RecipeError(f"--budget: {error}") from error
    plan = make_plan(planning.profile, planning.hardware, nbytes)
    predicted = play(planning.profile, plan, planning.hardware)
    plan = replace(plan, capacity_nbytes=nbytes)  # it may be made for less
    return ShownPlan(replace(planning, plan=plan, predicted=predicted), None, folder / f"plan_{nbytes}.png")


def find_folder(run: Path) -> Path:
    """Find the folder that holds a run's plan.

    Raises:
        RecipeError: There is none; says how to make one.
    """
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


def alternatives(shown: ShownPlan) -> Iterator[Alternative]:
    """Yield the plan as predicted and measured, then the simple policies."""
    planning = shown.planning
    capacity, hardware = planning.plan.capacity_nbytes, planning.hardware
    within = "" if capacity is None else f"within {format_nbytes(capacity)}"
    yield Alternative("the plan, predicted", planning.predicted, within)
    if shown.measured is not None:
        note = "recompute s as predicted" if shown.measured.recompute_s else ""
        yield Alternative("the plan, measured", shown.measured, note)
    for name, words in _BASELINES.items():
        plan = POLICIES[name](planning.profile, hardware, None)
        stores = Place.NVME in plan.places.values()
        if name == "recompute" and not plan.recomputed:
            yield Alternative(words, None, "not possible: the model has no blocks")
        elif stores and min(hardware.read_bytes_per_s, hardware.write_bytes_per_s) <= 0:
            yield Alternative(words, None, "not possible: memory.nvme is empty")
        else:
            outcome = play(planning.profile, plan, hardware)
            over = capacity is not None and outcome.peak_nbytes > capacity
            yield Alternative(words, outcome, "over the budget" if over else "")


def _draw(shown: ShownPlan) -> str:
    """Write the picture; return a line with its path, or with the reason why there is none."""
    profile, plan, hardware = shown.planning.profile, shown.planning.plan, shown.planning.hardware
    _, kept = play_in_detail(profile, ActivationPlan("keep"), hardware)
    _, planned = play_in_detail(profile, plan, hardware)
    lanes = {"stall": planned.stalls, "recompute": planned.recomputed, **planned.channels}
    folder = shown.picture.parent
    run = (folder.parent if folder.name == FOLDER else folder).resolve().name
    title = f"One step with the plan of {run}, as predicted"
    capacity = plan.capacity_nbytes
    try:
        draw_memory(shown.picture, kept.memory, planned.memory, lanes, capacity_nbytes=capacity, title=title)
    except ImportError:
        return "the picture needs matplotlib: pip install 'infinity-offload[plots]'"
    except OSError as error:
        why = error.strerror or error  # matplotlib's own errors have no number
        raise InfinityError(f"{shown.picture}: the picture cannot be written: {why}") from error
    return f"memory over the step, without and with the plan: {shown.picture}"


def print_line(console: Console, line: str) -> None:
    """Print a line without wrapping it."""
    console.print(Text(line), soft_wrap=True)


def make_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    """Return a table whose first column is on the left, and all others on the right."""
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def plan_table(rows: Sequence[PlanRow]) -> Table:
    """Return a table with one row per block; columns without values are omitted."""
    columns = {
        "kept": [row.kept_nbytes for row in rows],
        "to host": [row.host_nbytes for row in rows],
        "to NVMe": [row.nvme_nbytes for row in rows],
        "recomputed": [row.recomputed_nbytes for row in rows],
    }
    shown = {name: sizes for name, sizes in columns.items() if any(sizes)}
    cells = []
    for i, row in enumerate(rows):
        sizes = [row.saved_nbytes, *(of_rows[i] for of_rows in shown.values())]
        times = [f"{1e3 * row.forward_s:.1f}", f"{1e3 * row.backward_s:.1f}"]
        cells.append([row.name, *times, *map(_size, sizes)])
    return make_table(["block", "forward ms", "backward ms", "saved", *shown], cells)


def alternatives_table(rows: Sequence[Alternative]) -> Table:
    """Return a table of alternatives; the column of host memory is omitted if none uses it."""
    on_host = any(row.outcome is not None and row.outcome.host_peak_nbytes for row in rows)
    host = ["host peak"] if on_host else []

    def cells(outcome: Outcome) -> Iterator[str]:
        yield f"{outcome.step_s:.3f}"
        for time_s in (outcome.stall_s, outcome.recompute_s):
            yield f"{time_s:.3f}" if time_s else ""
        yield from map(_size, (outcome.peak_nbytes, outcome.nbytes_stored, outcome.nbytes_loaded))
        yield from [_size(outcome.host_peak_nbytes)] * on_host

    nothing = [""] * (6 + on_host)
    table = make_table(
        ["", "step s", "stall s", "recompute s", "peak", "stored", "loaded", *host, ""],
        ([name, *(nothing if outcome is None else cells(outcome)), note] for name, outcome, note in rows),
    )
    table.columns[-1].justify = "left"
    return table


def _size(nbytes: int) -> str:
    return format_nbytes(nbytes) if nbytes else ""


def draw_memory(
    path: Path, kept: Samples, planned: Samples, lanes: Mapping[str, Intervals], *,
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
    _draw_curves(memory, kept, planned, scale)
    if capacity_nbytes is not None and capacity_nbytes <= memory.get_ylim()[1]:
        memory.axhline(capacity_nbytes, color=_BUDGET, linewidth=1.2, linestyle=(0, (4, 3)))
        text = f" budget\n {format_nbytes(capacity_nbytes)}"
        right = memory.get_yaxis_transform()
        memory.text(1, capacity_nbytes, text, transform=right, color=_BUDGET, va="center")
    _draw_lanes(channels, shown, scale)
    channels.set_xlim(0, last_s * scale or 1)
    channels.set_xlabel(f"time of the step ({unit})")
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _draw_curves(axes: Any, kept: Samples, planned: Samples, scale: float) -> None:
    most_nbytes = max((nbytes for _, nbytes in (*kept, *planned)), default=0)
    for words, samples, color in (("everything kept", kept, _KEPT), ("with the plan", planned, _PLANNED)):
        times, sizes = [at_s * scale for at_s, _ in samples], [nbytes for _, nbytes in samples]
        peak, end = format_nbytes(max(sizes, default=0)), max(times, default=0.0)
        label = f"{words}: at most {peak}, {end:.3g} {'ms' if scale > 1 else 's'}"
        axes.fill_between(times, sizes, step="post", color=color, alpha=0.35, linewidth=0)
        axes.step(times, sizes, where="post", color=color, linewidth=1.3, label=label)
    step_nbytes = 1 << max(0, int(most_nbytes / 6)).bit_length()
    axes.set_yticks(range(0, most_nbytes + step_nbytes, step_nbytes))
    axes.yaxis.set_major_formatter(lambda nbytes, _: format_nbytes(nbytes))
    axes.set_ylim(0, 1.05 * most_nbytes or 1)
    axes.legend(
        frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderpad=0, handlelength=1.2
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", length=0)


def _draw_lanes(axes: Any, lanes: Mapping[str, Intervals], scale: float) -> None:
    for y, (lane, intervals) in enumerate(lanes.items()):
        for units, alpha in ((False, 1.0), (True, 0.35)):
            bars = [(i[0] * scale, (i[1] - i[0]) * scale) for i in intervals if (i[2] == "units") is units]
            color = _LANE_COLORS.get(lane, "#888888")
            # The edge shows transfers that are narrower than a pixel.
            axes.broken_barh(bars, (y - 0.36, 0.72), color=color, alpha=alpha, linewidth=0.5)
    axes.set_yticks(range(len(lanes)), labels=list(lanes))
    axes.set_ylim(max(1, len(lanes)) - 0.5, -0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
