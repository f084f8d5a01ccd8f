"""What a run did, in one table and one JSON file."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from infinity.core.nbytes import format_nbytes
from infinity.core.plan import Outcome
from infinity.observe.events import StepReport, perplexity
from infinity.observe.metrics import finite

#: A cause is named as the bottleneck when the run waited for it for more than this share.
STALL_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class ActivationSummary:
    """What became of activations, on one rank; a step has ``accumulate`` micro-batches.

    Attributes:
        plan: What the plan does, for people; None: there was none, as all following fields.
    """

    policy: str
    nbytes_stored: int  # a step, as the next two; medians
    nbytes_loaded: int
    stall_s: float
    saved_peak_nbytes: int  # of what autograd saves
    plan: str | None = None
    planning_s: float | None = None
    predicted: Outcome | None = None  # one micro-batch, as measured
    measured: Outcome | None = None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Figures of a run; bytes are one rank's, medians are over the planned steps."""

    folder: str
    world_size: int
    steps: int
    skipped: int
    tokens_per_s: float
    step_s: float
    nbytes_read: int
    nbytes_written: int
    planned_nbytes_read: int | None
    planned_nbytes_written: int | None
    steps_off_plan: int  # steps with uses that the plan did not foresee
    peak_nbytes: dict[str, int]
    budgets: dict[str, int | None] = field(default_factory=dict)
    stall_s: dict[str, float]  # whole run, by cause
    stall_share: float
    bottleneck: str
    first_loss: float | None
    last_loss: float | None
    first_held_out: float | None
    last_held_out: float | None
    first_perplexity: float | None  # of the held-out tokens
    last_perplexity: float | None
    activations: ActivationSummary | None = None  # None: they were kept
    dtype: str | None = None  # of the computation
    notes: Sequence[str] = ()  # what is done otherwise on rank 0's machine, and why

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(finite(asdict(self)), indent=2) + "\n", encoding="utf-8")


class SummaryBuilder:
    """Adds up a run, step by step; what it keeps grows by a few numbers a step.

    A :class:`~infinity.observe.metrics.View`.
    """

    def __init__(self) -> None:
        self._planned = _Series()
        self._all = _Series()
        self._stall_s: Counter[str] = Counter()
        self._peak: dict[str, int] = {}
        self._losses: list[float] = []
        self._held_out: list[float] = []
        self._skipped = 0

    def step(self, report: StepReport) -> None:
        self._all.add(report)
        if report.planned_nbytes_read is not None:
            self._planned.add(report)
        self._stall_s.update(report.stall_s)
        self._skipped += report.skipped
        for tier, nbytes in report.peak_nbytes.items():
            self._peak[tier] = max(nbytes, self._peak.get(tier, 0))
        if report.loss is not None:
            self._losses[1:] = [report.loss]

    def evaluated(self, step: int, loss: float) -> None:
        self._held_out[1:] = [loss]

    def close(self) -> None:
        pass

    def result(
        self,
        *,
        folder: Path,
        world_size: int,
        budgets: Mapping[str, int | None],
        activations: ActivationSummary | None = None,
        dtype: str | None = None,
        notes: Sequence[str] = (),
    ) -> Summary:
        """The summary so far; ``budgets`` in bytes by tier, None where there is none."""
        series = self._planned if self._planned.step_s else self._all
        total_s = sum(self._all.step_s)
        cause, waited_s = max(self._stall_s.items(), key=lambda kv: kv[1], default=("compute", 0.0))
        held_out = (self._held_out[0], self._held_out[-1]) if self._held_out else (None, None)
        hesitation = [None if loss is None else perplexity(loss) for loss in held_out]
        return Summary(
            folder=str(folder),
            world_size=world_size,
            steps=len(self._all.step_s),
            skipped=self._skipped,
            tokens_per_s=series.median(series.tokens_per_s),
            step_s=series.median(series.step_s),
            nbytes_read=round(series.median(series.nbytes_read)),
            nbytes_written=round(series.median(series.nbytes_written)),
            planned_nbytes_read=series.planned_nbytes_read,
            planned_nbytes_written=series.planned_nbytes_written,
            steps_off_plan=series.off_plan,
            peak_nbytes=dict(self._peak),
            budgets=dict(budgets),
            stall_s=dict(self._stall_s),
            stall_share=sum(self._stall_s.values()) / total_s if total_s else 0.0,
            bottleneck=cause if waited_s > STALL_SHARE * total_s else "compute",
            first_loss=self._losses[0] if self._losses else None,
            last_loss=self._losses[-1] if self._losses else None,
            first_held_out=held_out[0],
            last_held_out=held_out[1],
            first_perplexity=hesitation[0],
            last_perplexity=hesitation[1],
            activations=activations,
            dtype=dtype,
            notes=list(notes),
        )


class _Series:
    """One number a step, of some of the steps."""

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self.tokens_per_s: list[float] = []
        self.nbytes_read: list[float] = []
        self.nbytes_written: list[float] = []
        self.planned_nbytes_read: int | None = None
        self.planned_nbytes_written: int | None = None
        self.off_plan = 0

    def add(self, report: StepReport) -> None:
        self.step_s.append(report.step_s)
        self.tokens_per_s.append(report.tokens_per_s)
        self.nbytes_read.append(report.nbytes_read)
        self.nbytes_written.append(report.nbytes_written)
        self.planned_nbytes_read = report.planned_nbytes_read
        self.planned_nbytes_written = report.planned_nbytes_written
        self.off_plan += report.on_demand > 0

    @staticmethod
    def median(values: list[float]) -> float:
        return median(values) if values else 0.0


def show_summary(summary: Summary, console: Console) -> None:
    """Print the table."""
    table = Table(title="summary", title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary_rows(summary):
        table.add_row(Text(name), Text(value))
    console.print(table)


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """Names and values for people."""
    stored = summary.activations.nbytes_stored if summary.activations else 0
    loaded = summary.activations.nbytes_loaded if summary.activations else 0
    ranks = f"{summary.world_size} rank{'s' if summary.world_size > 1 else ''}"
    skipped = f", {summary.skipped} skipped" if summary.skipped else ""
    rows = [
        ("steps", f"{summary.steps}{skipped} on {ranks}"),
        ("tokens/s", f"{summary.tokens_per_s:,.0f} ({summary.step_s:.3f} s a step)"),
        ("loss", _first_last(summary.first_loss, summary.last_loss)),
        ("held-out loss", _first_last(summary.first_held_out, summary.last_held_out)),
        ("held-out perplexity", _first_last(summary.first_perplexity, summary.last_perplexity, digits=2)),
        ("read per step", _beside_plan(summary.nbytes_read, summary.planned_nbytes_read, loaded)),
        ("written per step", _beside_plan(summary.nbytes_written, summary.planned_nbytes_written, stored)),
    ]
    if summary.steps_off_plan:
        rows.append(("", f"{summary.steps_off_plan} steps used units that the plan did not foresee"))
    for tier, nbytes in summary.peak_nbytes.items():
        budget = summary.budgets.get(tier)
        beside = "no budget" if budget is None else f"budget {format_nbytes(budget)}"
        rows.append((f"peak {tier}", f"{format_nbytes(nbytes)} ({beside})"))
    if summary.activations is not None:
        rows += activation_rows(summary.activations)
    causes = ", ".join(f"{cause} {waited_s:.2f} s" for cause, waited_s in summary.stall_s.items() if waited_s)
    rows += [
        ("stall", f"{summary.stall_share:.1%} of the time{f' ({causes})' if causes else ''}"),
        ("bottleneck", summary.bottleneck),
        ("files", summary.folder),
    ]
    rows += [("machine" if number == 0 else "", note) for number, note in enumerate(summary.notes)]
    return rows


def activation_rows(figures: ActivationSummary) -> list[tuple[str, str]]:
    """The same of activations."""
    moved = (
        f"{figures.nbytes_stored:,} bytes stored and {figures.nbytes_loaded:,} loaded per step, "
        f"waited {figures.stall_s:.3g} s for them"
    )
    if figures.plan is None:
        peak = f"saved activations take at most {format_nbytes(figures.saved_peak_nbytes)}"
        return [("activations", f"{figures.policy}: {peak}"), ("", moved)]
    rows = [("activations", f"{figures.plan}; planned in {figures.planning_s:.2g} s")]
    if figures.predicted is not None and figures.measured is not None:
        rows.append(("", f"measured {compared(figures.predicted, figures.measured)}"))
    return [*rows, ("", moved)]


def compared(predicted: Outcome, measured: Outcome) -> str:
    """Time and peak of a micro-batch, and how far they are from what was predicted."""
    off_s = measured.step_s / predicted.step_s - 1 if predicted.step_s else 0.0
    off_nbytes = measured.peak_nbytes / predicted.peak_nbytes - 1 if predicted.peak_nbytes else 0.0
    return (
        f"{measured.step_s:.3g} s a micro-batch ({off_s:+.1%} of predicted), "
        f"peak {format_nbytes(measured.peak_nbytes)} ({off_nbytes:+.1%})"
    )


def _first_last(first: float | None, last: float | None, *, digits: int = 4) -> str:
    return "-" if first is None or last is None else f"{first:,.{digits}f} -> {last:,.{digits}f}"


def _beside_plan(nbytes: int, planned: int | None, activations: int) -> str:
    if planned is None:  # everything stayed in memory, or the run ended before there was a plan
        return f"{nbytes:,} bytes per rank" + (", recorded: the plan begins after it" if nbytes else "")
    beside = f", beside {activations:,} of activations" if activations else ""
    return f"{nbytes:,} bytes per rank (planned {planned:,}{beside})"
