"""Final summary of a run: a table and ``summary.json``."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from infinity.core.files import write_file
from infinity.core.nbytes import format_nbytes
from infinity.core.plan import Outcome
from infinity.observe.metrics import Evaluation, StepReport, View, bottleneck, finite, perplexity


@dataclass(frozen=True, kw_only=True)
class ActivationSummary:
    """Figures of a run's activations on one rank."""

    policy: str
    nbytes_stored: int  # per step, as the next two: medians over steps
    nbytes_loaded: int
    stall_s: float
    saved_peak_nbytes: int  # of the tensors that autograd saves
    plan: str | None = None  # its description; None, as all that follows: there was none
    planning_s: float | None = None
    predicted: Outcome | None = None  # cost of one micro-batch
    measured: Outcome | None = None


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """Predicted figures of a step on one rank; bytes are those of units."""

    step_s: float
    nbytes_read: int
    nbytes_written: int
    bottleneck: str  # the channel that is busy for the longest part of the step
    advice: str | None = None  # the change with the largest predicted gain


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Figures of a run; bytes are those of one rank, medians are over the planned steps."""

    folder: str
    world_size: int
    steps: int
    first_step: int = 1  # more where the run went on after an interruption without its metrics
    skipped: int
    tokens_per_s: float
    step_s: float
    nbytes_read: int
    nbytes_written: int
    planned_nbytes_read: int | None
    planned_nbytes_written: int | None
    steps_off_plan: int  # steps with uses that the plan did not foresee
    steps_rolled_back: int  # steps whose updates had started before they were known to be clipped
    spilled_nbytes: int = 0  # of gradients that waited on NVMe in the last step
    tiles: int = 0  # of packed experts, that come and go
    tiles_used: int = 0  # those of them that were read or uploaded in a step; the mean
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
    activations: ActivationSummary | None = None  # None: all were kept
    predicted: PredictedStep | None = None  # None: the run was short
    dtype: str | None = None  # compute dtype
    notes: Sequence[str] = ()  # fallbacks on rank 0's machine, and the reasons

    def write(self, path: Path) -> None:
        write_file(path, json.dumps(finite(asdict(self)), indent=2) + "\n")


class SummaryBuilder(View):
    """View that accumulates the figures of a run; memory grows by a few numbers per step."""

    def __init__(self) -> None:
        self.total_s = 0.0  # of all steps
        self._figures: list[tuple[float, ...]] = []  # of each planned step; of all until there is one
        self._planned = False
        self._sums: Counter[str] = Counter()  # over all steps, by name in the summary
        self._stall_s: Counter[str] = Counter()
        self._peak: dict[str, int] = {}
        self._losses: list[float] = []  # the first and the last
        self._held_out: list[float] = []  # likewise
        self._first: StepReport | None = None
        self._last: StepReport | None = None

    def step(self, report: StepReport) -> None:
        self._first, self._last = self._first or report, report
        self.total_s += report.step_s
        planned = report.planned_nbytes_read is not None
        if planned and not self._planned:
            self._figures, self._planned = [], True
        if planned or not self._planned:
            moved = report.nbytes_read, report.nbytes_written
            plan = report.planned_nbytes_read or 0, report.planned_nbytes_written or 0
            self._figures.append((report.step_s, report.tokens_per_s, *moved, *plan, report.on_demand > 0))
        redone = report.rolled_back > 0 and not report.skipped
        self._sums.update(steps=1, skipped=report.skipped, redone=redone, tiles_used=report.tiles_used)
        self._stall_s.update(report.stall_s)
        for tier, nbytes in report.peak_nbytes.items():
            self._peak[tier] = max(nbytes, self._peak.get(tier, 0))
        if report.loss is not None:
            self._losses[1:] = [report.loss]

    def evaluated(self, step: int, loss: float) -> None:
        self._held_out[1:] = [loss]

    def take_in(self, lines: Iterable[tuple[StepReport | Evaluation, int]]) -> None:
        """Add the metrics of steps made before this process."""
        for line, _ in lines:
            if isinstance(line, StepReport):
                self.step(line)
            else:
                self.evaluated(line.step, line.loss)

    def result(
        self,
        *,
        folder: Path,
        world_size: int,
        budgets: Mapping[str, int | None],
        activations: ActivationSummary | None = None,
        predicted: PredictedStep | None = None,
        dtype: str | None = None,
        notes: Sequence[str] = (),
    ) -> Summary:
        """Return the summary so far; ``budgets`` are in bytes by tier, None: no budget."""
        columns = list(zip(*self._figures)) or [(0.0,)] * 7
        step_s, tokens_per_s, *nbytes = map(median, columns[:-1])
        read, written, planned_read, planned_written = map(round, nbytes)
        sums, last = self._sums, self._last
        stall_s: dict[str, float] = dict(self._stall_s)
        losses: Sequence[float | None] = self._losses or [None]
        held_out: Sequence[float | None] = self._held_out or [None]
        perplexities = [None if loss is None else perplexity(loss) for loss in held_out]
        return Summary(
            folder=str(folder),
            world_size=world_size,
            steps=sums["steps"],
            first_step=self._first.step if self._first else 1,
            skipped=sums["skipped"],
            tokens_per_s=tokens_per_s,
            step_s=step_s,
            nbytes_read=read,
            nbytes_written=written,
            planned_nbytes_read=planned_read if self._planned else None,
            planned_nbytes_written=planned_written if self._planned else None,
            steps_off_plan=int(sum(columns[-1])),
            steps_rolled_back=sums["redone"],
            spilled_nbytes=last.spilled_nbytes if last else 0,
            tiles=last.tiles if last else 0,
            tiles_used=round(sums["tiles_used"] / max(1, sums["steps"])),
            peak_nbytes=dict(self._peak),
            budgets=dict(budgets),
            stall_s=stall_s,
            stall_share=sum(stall_s.values()) / self.total_s if self.total_s else 0.0,
            bottleneck=bottleneck(stall_s, self.total_s),
            first_loss=losses[0],
            last_loss=losses[-1],
            first_held_out=held_out[0],
            last_held_out=held_out[-1],
            first_perplexity=perplexities[0],
            last_perplexity=perplexities[-1],
            activations=activations,
            predicted=predicted,
            dtype=dtype,
            notes=list(notes),
        )


def show_summary(summary: Summary, console: Console) -> None:
    """Print the summary as a table."""
    table = Table(title="summary", title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary_rows(summary):
        table.add_row(Text(name), Text(value))
    console.print(table)


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return the rows of the table: names and formatted values."""
    cache = summary.activations
    loaded, stored = (cache.nbytes_loaded, cache.nbytes_stored) if cache is not None else (0, 0)
    ranks = f"{summary.world_size} rank{'s' if summary.world_size > 1 else ''}"
    skipped = f", {summary.skipped} skipped" if summary.skipped else ""
    if summary.first_step > 1:
        skipped += f" after step {summary.first_step - 1}"
    rows = [
        ("steps", f"{summary.steps}{skipped} on {ranks}"),
        ("tokens/s", f"{summary.tokens_per_s:,.0f} ({summary.step_s:.3f} s per step)"),
        ("loss", _first_last(summary.first_loss, summary.last_loss)),
        ("held-out loss", _first_last(summary.first_held_out, summary.last_held_out)),
        ("held-out perplexity", _first_last(summary.first_perplexity, summary.last_perplexity, digits=2)),
        ("read per step", _with_plan(summary.nbytes_read, summary.planned_nbytes_read, loaded)),
        ("written per step", _with_plan(summary.nbytes_written, summary.planned_nbytes_written, stored)),
    ]
    if summary.steps_off_plan:
        rows.append(("", f"{summary.steps_off_plan} steps used units that were not in the plan"))
    if summary.steps_rolled_back:
        rows.append(("speculation", f"steps redone with clipped gradients: {summary.steps_rolled_back}"))
    if summary.spilled_nbytes:
        rows.append(("gradients", f"{summary.spilled_nbytes:,} bytes wait on NVMe in each step"))
    if summary.tiles:
        rows.append(("experts", f"{summary.tiles_used} of {summary.tiles} tiles used in a step"))
    for tier, nbytes in summary.peak_nbytes.items():
        budget = summary.budgets.get(tier)
        beside = "no budget" if budget is None else f"budget {format_nbytes(budget)}"
        rows.append((f"peak {tier}", f"{format_nbytes(nbytes)} ({beside})"))
    if (predicted := summary.predicted) is not None:
        off = summary.step_s / predicted.step_s - 1 if predicted.step_s else 0.0
        moved = f"{predicted.nbytes_read:,} bytes read, {predicted.nbytes_written:,} written"
        text = f"{predicted.step_s:.3g} s per step (measured {off:+.0%}), {moved}"
        rows.append(("predicted", f"{text}, bound by {predicted.bottleneck}"))
        if predicted.advice is not None:
            rows.append(("", f"to be faster: {predicted.advice}"))
    if cache is not None:
        rows += activation_rows(cache)
    causes = ", ".join(f"{cause} {waited_s:.2f} s" for cause, waited_s in summary.stall_s.items() if waited_s)
    rows += [
        ("stall", f"{summary.stall_share:.1%} of the time{f' ({causes})' if causes else ''}"),
        ("bottleneck", summary.bottleneck),
        ("files", summary.folder),
    ]
    rows += [("machine" if number == 0 else "", note) for number, note in enumerate(summary.notes)]
    return rows


def activation_rows(figures: ActivationSummary) -> list[tuple[str, str]]:
    """Return the rows for activations."""
    moved = (
        f"{figures.nbytes_stored:,} bytes stored and {figures.nbytes_loaded:,} loaded per step, "
        f"waited for {figures.stall_s:.3g} s"
    )
    if figures.plan is None:
        peak = f"peak {format_nbytes(figures.saved_peak_nbytes)} of saved activations"
        return [("activations", f"{figures.policy}: {peak}"), ("", moved)]
    rows = [("activations", f"{figures.plan}; planned in {figures.planning_s:.2g} s")]
    if figures.predicted is not None and figures.measured is not None:
        rows.append(("", f"measured {compared(figures.predicted, figures.measured)}"))
    return [*rows, ("", moved)]


def compared(predicted: Outcome, measured: Outcome) -> str:
    """Return time and peak of a micro-batch, with their deviations from the prediction."""
    off_s = measured.step_s / predicted.step_s - 1 if predicted.step_s else 0.0
    off_nbytes = measured.peak_nbytes / predicted.peak_nbytes - 1 if predicted.peak_nbytes else 0.0
    return (
        f"{measured.step_s:.3g} s per micro-batch ({off_s:+.1%} of predicted), "
        f"peak {format_nbytes(measured.peak_nbytes)} ({off_nbytes:+.1%})"
    )


def _first_last(first: float | None, last: float | None, *, digits: int = 4) -> str:
    return "-" if first is None or last is None else f"{first:,.{digits}f} -> {last:,.{digits}f}"


def _with_plan(nbytes: int, planned: int | None, activations: int) -> str:
    if planned is None:  # everything stayed in memory, or the run ended before a plan was made
        recorded = ", recorded; the plan starts with the second step" if nbytes else ""
        return f"{nbytes:,} bytes per rank{recorded}"
    beside = f", plus {activations:,} of activations" if activations else ""
    return f"{nbytes:,} bytes per rank (planned {planned:,}{beside})"
