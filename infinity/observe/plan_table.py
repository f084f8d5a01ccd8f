"""A plan for activations as tables: what becomes of each block, and what the step costs beside other ways."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from infinity.core.nbytes import format_nbytes
from infinity.core.plan import Outcome


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A block under a plan.

    Attributes:
        saved_nbytes: What autograd saves of it if everything is kept.
        kept_nbytes: What stays in memory; likewise ``host_nbytes`` and ``nvme_nbytes``.
    """

    name: str
    forward_s: float
    backward_s: float
    saved_nbytes: int
    kept_nbytes: int
    host_nbytes: int
    nvme_nbytes: int

    @property
    def recomputed_nbytes(self) -> int:
        """What is dropped, and computed again."""
        return max(0, self.saved_nbytes - self.kept_nbytes - self.host_nbytes - self.nvme_nbytes)


@dataclass(frozen=True, slots=True)
class Way:
    """Something that could be done with activations, or was, and what it costs.

    Attributes:
        outcome: None: it is not possible, for the reason in ``note``.
        note: For people.
    """

    name: str
    outcome: Outcome | None
    note: str = ""


def plan_table(rows: Sequence[PlanRow]) -> Table:
    """A line for each block; columns that hold nothing are left out."""
    columns = {
        "kept": [row.kept_nbytes for row in rows],
        "to host": [row.host_nbytes for row in rows],
        "to NVMe": [row.nvme_nbytes for row in rows],
        "recomputed": [row.recomputed_nbytes for row in rows],
    }
    shown = {name: sizes for name, sizes in columns.items() if any(sizes)}
    table = _table("block", "forward ms", "backward ms", "saved", *shown)
    for i, row in enumerate(rows):
        times = [f"{1e3 * row.forward_s:.1f}", f"{1e3 * row.backward_s:.1f}"]
        table.add_row(
            Text(row.name), *times, _size(row.saved_nbytes), *(_size(sizes[i]) for sizes in shown.values())
        )
    return table


def ways_table(ways: Sequence[Way]) -> Table:
    """Ways beside each other; the host's column is left out where none uses it."""
    outcomes = [way.outcome for way in ways if way.outcome is not None]
    on_host = any(outcome.host_peak_nbytes for outcome in outcomes)
    host = ["host peak"] if on_host else []
    table = _table("", "step s", "stall s", "recompute s", "peak", "stored", "loaded", *host, "")
    table.columns[-1].justify = "left"
    for way in ways:
        cells = [""] * (6 + on_host) if way.outcome is None else _cells(way.outcome, on_host)
        table.add_row(Text(way.name), *cells, Text(way.note))
    return table


def _cells(outcome: Outcome, on_host: bool) -> list[str]:
    times = [
        f"{outcome.step_s:.3f}",
        *(f"{s:.3f}" if s else "" for s in (outcome.stall_s, outcome.recompute_s)),
    ]
    sizes = [outcome.peak_nbytes, outcome.nbytes_stored, outcome.nbytes_loaded]
    return [*times, *(_size(nbytes) for nbytes in sizes + [outcome.host_peak_nbytes] * on_host)]


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _size(nbytes: int) -> str:
    return format_nbytes(nbytes) if nbytes else ""
