"""A picture of memory over a step: what it takes when everything is kept, what a plan makes of it, and how.

Memory alone shows *that* a plan helps. The channels below show *what* it does meanwhile, and how much room
they have left; where compute stalls or runs again, they show why.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infinity.core.nbytes import format_nbytes

#: ``(time_s, nbytes)``: from then on so many bytes are in memory.
Samples = Sequence[tuple[float, int]]
#: ``(begin_s, end_s, name)``; what is named "units" is drawn paler.
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


def draw_memory(
    path: Path,
    kept: Samples,
    planned: Samples,
    lanes: Mapping[str, Intervals],
    *,
    capacity_nbytes: int | None = None,
    title: str = "",
) -> None:
    """Draw one step as PNG or SVG, by the ending of ``path``.

    Needs matplotlib (extra: plots).

    Args:
        kept: Memory when everything is kept; ends with the step.
        planned: The same under the plan.
        lanes: What each channel moves under the plan, from the top down; also "stall" and "recompute".
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
    if capacity_nbytes is not None:
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
            # The edge shows transfers that are shorter than a dot of the picture.
            axes.broken_barh(bars, (y - 0.36, 0.72), color=color, alpha=alpha, linewidth=0.5)
    axes.set_yticks(range(len(lanes)), labels=list(lanes))
    axes.set_ylim(max(1, len(lanes)) - 0.5, -0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
