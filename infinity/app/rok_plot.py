"""The recompute-offload-keep curve: what memory for activations buys in throughput, as table and picture.

Source: SSDTrain (arXiv:2408.10013): a run is a point, its activation peak against its model throughput.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from infinity.core.nbytes import format_nbytes

_COLORS = {"keep": "#7a7f87", "recompute": "#8e6bbf", "offload": "#e08a3c", "plan": "#2f6db5"}
_MARKERS = {"keep": "s", "recompute": "^", "offload": "D", "plan": "o"}


@dataclass(frozen=True, kw_only=True)
class RokPoint:
    """One run of the curve; figures are of one rank and one optimizer step.

    Attributes:
        batch_size: Sequences of a micro-batch.
        budget_nbytes: Of a plan; None: the lowest peak that does not slow the step down.
        error: Why it has no figures; empty: it has.
        flops: Of the algorithm: forward and backward, recomputation left out.
        peak_nbytes: The most that a micro-batch's own tensors take at one time, gradients left out.
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
        """For people: the way, and its budget."""
        return self.way if self.budget_nbytes is None else f"{self.way} {format_nbytes(self.budget_nbytes)}"


def rok_table(points: Sequence[RokPoint]) -> Table:
    """A line for each point."""
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
    """Draw the points that have figures as PNG or SVG, by the ending of ``path``.

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
    _dress(axes, max((point.peak_nbytes for point in points), default=0))
    axes.set_ylim(0, 1.1 * most_per_s / scale or 1)
    axes.set_ylabel(f"model throughput ({unit}, recomputation not counted)")
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _lines(points: Sequence[RokPoint]) -> Iterator[list[RokPoint]]:
    """Points to be joined: a simple way's over batch sizes, a batch size's plans over budgets."""
    groups: dict[tuple[str, int], list[RokPoint]] = {}
    for point in points:
        key = (point.way, point.batch_size if point.way == "plan" else 0)
        groups.setdefault(key, []).append(point)
    for group in groups.values():
        yield sorted(group, key=lambda point: point.peak_nbytes)


def _label(axes: Any, line: Sequence[RokPoint], scale: float) -> None:
    """Say the batch size at each point, and once for the plans of one."""
    for point in line[-1:] if line[0].way == "plan" else line:
        axes.annotate(
            f"batch {point.batch_size}",
            (point.peak_nbytes, point.flops_per_s / scale),
            xytext=(6, 5),
            textcoords="offset points",
            fontsize=8,
            color=_COLORS.get(point.way, "#333333"),
        )


def _dress(axes: Any, most_nbytes: int) -> None:
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
