"""Figures of each step, their views (progress, ``metrics.jsonl``), and the summary of a run."""

import json
import math
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from infinity.core.files import append_file, open_regular, record_of, write_file
from infinity.core.nbytes import format_nbytes
from infinity.core.plan import Outcome

#: The end of a metrics file in which its last step is looked for (bytes); a line has some hundred.
_TAIL_NBYTES = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReport:
    """Figures of what is trained in a step, such as one of several adapters."""

    loss: float | None
    lr: float
    grad_norm: float | None
    skipped: bool
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport(AdapterReport):
    """Figures of one optimizer step on one rank; times in seconds of wall clock, sizes in bytes."""

    step: int
    step_s: float
    stall_s: dict[str, float] = field(default_factory=dict)  # by cause: read, write, update, ...
    nbytes_read: int = 0  # since the last report: of updates that lag, with the next one
    nbytes_written: int = 0
    nbytes_crossed: int = 0  # of weights and gradients, from other nodes
    nbytes_copied: int = 0  # of commits, to the next node's drives
    planned_nbytes_read: int | None = None  # None while the step is recorded, not planned
    planned_nbytes_written: int | None = None
    on_demand: int = 0  # uses that the plan did not foresee
    speculated: int = 0  # updates that started inside backward, before the norm was known
    rolled_back: int = 0  # those of them that started again, or were forgotten in a skipped step
    spilled_nbytes: int = 0  # of gradients that wait on NVMe: until step(), or for the next micro-batch
    tiles: int = 0  # of packed experts, that come and go
    tiles_used: int = 0  # those of them that some rank's batches were routed to
    peak_nbytes: dict[str, int] = field(default_factory=dict)  # by tier: device, host, nvme
    adapters: dict[str, AdapterReport] = field(default_factory=dict)  # by name, if there are several
    metrics: dict[str, float] = field(default_factory=dict)  # of the task, means over its examples

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s if self.step_s else 0.0

    @property
    def bottleneck(self) -> str:
        return bottleneck(self.stall_s, self.step_s)


def bottleneck(stall_s: dict[str, float], total_s: float) -> str:
    """Return the cause of the longest stall; ``compute`` if that is at most 5 % of ``total_s``."""
    cause, waited_s = max(stall_s.items(), key=lambda item: item[1], default=("compute", 0.0))
    return cause if waited_s > 0.05 * total_s else "compute"


def perplexity(loss: float) -> float:
    """Return exp(loss); infinity if that exceeds a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class HeldOutFigures(NamedTuple):
    """Means over the examples of one held-out set, for one of several adapters; names may be empty."""

    adapter: str
    name: str  # of the set
    loss: float
    examples: int  # of all ranks
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The held-out loss after ``step`` steps, the mean over the examples of all ranks; of each adapter, too.

    Metrics of one of several held-out sets have names such as ``code/accuracy``, and so has its loss.
    """

    step: int
    loss: float
    adapters: dict[str, float] = field(default_factory=dict)  # by name, if there are several
    metrics: dict[str, float] = field(default_factory=dict)  # of the task, and losses of sets
    per_token: bool = True  # the loss, so that there is a perplexity; else of examples

    @classmethod
    def of(cls, step: int, parts: Sequence[HeldOutFigures], *, per_token: bool = True) -> "Evaluation":
        """Return the means over all of ``parts``, and over those of each adapter and of each set."""

        def losses(by: str) -> dict[str, float]:
            names = dict.fromkeys(getattr(each, by) for each in parts)
            return {name: loss([e for e in parts if getattr(e, by) == name]) for name in names if name}

        def loss(of: Sequence[HeldOutFigures]) -> float:
            return mean_of([each.loss for each in of], [each.examples for each in of])

        metrics = dict[str, float]()
        for part in parts:
            begin = "".join(f"{each}/" for each in part[:2] if each)
            metrics |= {f"{begin}{name}": value for name, value in part.metrics.items()}
        metrics |= {f"{name}/loss": each for name, each in losses("name").items()}
        return cls(step, loss(parts), losses("adapter"), metrics, per_token)

    @property
    def figures(self) -> dict[str, float]:
        """Return all figures by the names that ``train.keep_best`` has for them."""
        adapters = {f"{name}/loss": loss for name, loss in self.adapters.items()}
        return {"loss": self.loss, **adapters, **self.metrics}


class Sample(NamedTuple):
    """What the model writes after a prompt, a text or messages, when ``step`` steps are made."""

    step: int
    prompt: str | Sequence[Mapping[str, Any]]
    text: str
    adapter: str = ""  # one of several
    number: int = 1  # of the prompt

    def __str__(self) -> str:
        prompt = self.prompt if isinstance(self.prompt, str) else str(self.prompt[-1].get("content", ""))
        begin = prompt if len(prompt) <= 80 else f"... {prompt[-76:]}"
        return (
            f"sample after step {self.step}{self.adapter and f' of {self.adapter}'}: {begin} => {self.text}"
        )


def mean_of(means: Sequence[float], counts: Sequence[int]) -> float:
    """Return the mean over all examples of parts, each with its own mean over ``counts`` of them."""
    return sum(mean * (count / sum(counts)) for mean, count in zip(means, counts, strict=True))


class View:
    """Display or file of a run's figures, or, as this class, all ``views`` as one; used on rank 0 only."""

    views: Sequence["View"] = ()

    def __init__(self, *views: "View") -> None:
        self.views = views

    def add(self, *views: "View") -> None:
        self.views = *self.views, *views

    def _each(self, method: str, *given: Any) -> None:
        for view in self.views:
            getattr(view, method)(*given)

    def step(self, report: StepReport) -> None:
        """Show the figures of a step."""
        self._each("step", report)

    def evaluated(self, found: Evaluation) -> None:
        """Show a held-out loss."""
        self._each("evaluated", found)

    def sampled(self, sample: Sample) -> None:
        """Show what the model writes."""
        self._each("sampled", sample)

    def take(self, line: StepReport | Evaluation) -> None:
        if isinstance(line, StepReport):
            self.step(line)
        else:
            self.evaluated(line)

    def log(self, line: str) -> None:
        """Show a line, if this is a display."""
        self._each("log", line)

    def progress(self, what: str, done_nbytes: int, total_nbytes: int) -> None:
        """Show how much this rank has done of ``what`` precedes training (loading), if this is a display."""
        self._each("progress", what, done_nbytes, total_nbytes)

    def close(self) -> None:
        with ExitStack() as stack:
            for view in self.views:
                stack.callback(view.close)


#: Seconds between plain lines while a checkpoint is loaded or quantized.
LINES_EVERY_S = 10.0


class ProgressDisplay(View):
    """View that shows every step (in a terminal), or every ``log_every``-th and the last (plain lines).

    Without ``steps`` it is one of what takes long and is no training.
    """

    def __init__(
        self, steps: int, *, log_every: int = 1, console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._steps, self._log_every, self._clock = steps, log_every, clock
        self._console = console or Console(stderr=True)  # standard output is free for results
        self._began: dict[str, float] = {}  # what precedes training, and when
        self._logged_s = 0.0
        self._bar: Progress | None = None
        if self._console.is_terminal:
            columns = (BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn()) if steps else ()
            text = TextColumn("{task.description}")
            self._bar = Progress(*columns, text, console=self._console, refresh_per_second=2)
            self._task = self._bar.add_task("recording the first step" if steps else "", total=steps)
            self._bar.start()

    def progress(self, what: str, done_nbytes: int, total_nbytes: int) -> None:
        now_s = self._clock()
        if what not in self._began:
            self._began[what] = self._logged_s = now_s
        elapsed_s = now_s - self._began[what]
        text = f"{what} {format_nbytes(done_nbytes)} of {format_nbytes(total_nbytes)}"
        if elapsed_s > 0 and done_nbytes:
            text += f"  {format_nbytes(done_nbytes / elapsed_s)}/s"
            text += f"  {(total_nbytes - done_nbytes) * elapsed_s / done_nbytes:.0f} s left"
        is_end_of_long = done_nbytes >= total_nbytes and self._logged_s > self._began[what]
        if self._bar:
            self._bar.update(self._task, description=escape(text))
        elif is_end_of_long or now_s - self._logged_s >= LINES_EVERY_S:
            self._logged_s = now_s
            self.log(text)

    def step(self, report: StepReport) -> None:
        if self._bar:
            self._bar.update(self._task, completed=report.step, description=escape(describe(report)))
        elif report.step % self._log_every == 0 or report.step == self._steps:
            self.log(f"step {report.step}/{self._steps}  {describe(report)}")

    def evaluated(self, found: Evaluation) -> None:
        text = f"step {found.step}/{self._steps}  held-out loss {found.loss:.4f}{_each(found.adapters)}"
        text += f"  perplexity {perplexity(found.loss):,.2f}" if found.per_token else ""
        self.log("  ".join([text, *(f"{name} {value:.4g}" for name, value in found.metrics.items())]))

    def sampled(self, sample: Sample) -> None:
        self.log(str(sample))

    def log(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)  # above the bar

    def close(self) -> None:
        if self._bar:
            self._bar.stop()


def describe(report: StepReport) -> str:
    """Return a step's figures in one line; bytes and stalls are this rank's, the loss all ranks'."""
    losses = {name: each.loss for name, each in report.adapters.items()}
    parts = ["loss -" if report.loss is None else f"loss {report.loss:.4f}{_each(losses)}"]
    parts.append(f"{report.tokens_per_s:,.0f} tokens/s")
    stall_s = sum(report.stall_s.values())
    cause = "" if report.bottleneck == "compute" else f" ({report.bottleneck})"
    parts.append(f"stall {stall_s:.2f} s{cause}")
    if report.nbytes_read or report.nbytes_written:
        parts.append(f"read {format_nbytes(report.nbytes_read)} wrote {format_nbytes(report.nbytes_written)}")
    counted = {
        "from other nodes": report.nbytes_crossed,
        "copied": report.nbytes_copied,
        **report.peak_nbytes,
    }
    parts += [f"{name} {format_nbytes(nbytes)}" for name, nbytes in counted.items() if nbytes]
    if report.on_demand:
        parts.append(f"{report.on_demand} on demand")
    if report.rolled_back and not report.skipped:
        parts.append("clipped: updates rolled back")
    skipped = [f" {name}" for name, each in report.adapters.items() if each.skipped]
    if report.skipped or skipped:
        parts.append(f"skipped{','.join(skipped)}: gradients are not finite")
    return "  ".join(parts)


def _each(losses: Mapping[str, float | None]) -> str:
    """Return the losses of several adapters, in brackets."""
    shown = (f"{name} {'-' if loss is None else format(loss, '.4f')}" for name, loss in losses.items())
    return f" ({', '.join(shown)})" if losses else ""


class StepLines(View):
    """View that is a file of JSON lines, each with a ``step``; those after step ``after`` are cut.

    A line that was added survives a kill, and if ``synced`` a power cut. A number that is not finite is null.
    """

    def __init__(self, path: Path, *, after: int | None = None, synced: bool = False) -> None:
        self._path, self._synced = path, synced
        with append_file(path) as file:
            if after is not None:
                file.truncate(max((end for _, end in read_lines(path, after)), default=0))

    def write(self, line: Mapping[str, Any]) -> None:
        with append_file(self._path) as file:
            file.write(json.dumps(finite(line), allow_nan=False) + "\n")
            file.flush()
            if self._synced:
                os.fsync(file.fileno())


def read_lines(path: Path, last: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the whole lines up to step ``last`` of a file of :class:`StepLines`, with their ends (bytes)."""
    if not path.exists():
        return
    with open(open_regular(path), "rb") as file:
        end = 0
        for text in file:
            line, end = _parsed(text), end + len(text)
            if line is None or line["step"] > last:
                return
            yield line, end


def last_step(path: Path) -> int:
    """Return the last step in such a file; 0 if there is none."""
    if not path.exists():
        return 0
    with open(open_regular(path), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_NBYTES))
        return max((line["step"] for line in map(_parsed, file.readlines()) if line is not None), default=0)


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text) if text.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and type(line.get("step")) is int else None


class MetricsFile(StepLines):
    """File of the figures of a run.

    A line has ``kind`` "step" (the fields of :class:`StepReport`, and more) or "evaluation" (those of
    :class:`Evaluation`).
    """

    def step(self, report: StepReport) -> None:
        derived = {"tokens_per_s": report.tokens_per_s, "bottleneck": report.bottleneck}
        self.write({"kind": "step", **asdict(report), **derived})

    def evaluated(self, found: Evaluation) -> None:
        derived = {"perplexity": perplexity(found.loss)} if found.per_token else {}
        self.write({"kind": "evaluation", **asdict(found), **derived})


def read_metrics(path: Path, last: int = sys.maxsize) -> Iterator[StepReport | Evaluation]:
    """Yield what a metrics file, if there is one, has up to step ``last``."""
    for given, _ in read_lines(path, last):
        try:
            found = record_of(StepReport if given["kind"] == "step" else Evaluation, given)
        except (KeyError, TypeError, ValueError, AttributeError):
            return
        yield found  # older versions wrote less


def finite(value: Any) -> Any:
    """Replace floats that JSON cannot represent with None, also inside dicts and lists."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
class LossSummary:
    """Losses of a run, or of one of its adapters."""

    first_loss: float | None = None
    last_loss: float | None = None
    first_held_out: float | None = None
    last_held_out: float | None = None
    first_perplexity: float | None = None  # of the held-out tokens
    last_perplexity: float | None = None
    skipped: int = 0  # steps


@dataclass(frozen=True, kw_only=True)
class Summary(LossSummary):
    """Figures of a run; bytes are those of one rank, medians are over the planned steps."""

    folder: str
    world_size: int = 1
    steps: int
    first_step: int = 1  # more where the run went on after an interruption without its metrics
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
    adapters: Mapping[str, LossSummary] = field(default_factory=dict)  # by name, if there are several
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the last evaluation
    activations: ActivationSummary | None = None  # None: all were kept
    predicted: PredictedStep | None = None  # None: the run was short
    dtype: str | None = None  # compute dtype
    notes: Sequence[str] = ()  # fallbacks on rank 0's machine, and the reasons

    def write(self, path: Path) -> None:
        write_file(path, json.dumps(finite(asdict(self)), indent=2) + "\n")


#: Figures of steps of which a summary has the median.
_MEDIANS = (
    "step_s", "tokens_per_s", "nbytes_read", "nbytes_written", "planned_nbytes_read",
    "planned_nbytes_written",
)  # fmt: skip


class SummaryBuilder(View):
    """View that accumulates the figures of a run; memory grows by a few numbers per step."""

    def __init__(self) -> None:
        self.total_s = 0.0  # of all steps
        self._figures: list[tuple[float, ...]] = []  # of each planned step; of all until there is one
        self._planned = False
        self._sums: Counter[str] = Counter()  # over all steps
        self._stall_s: Counter[str] = Counter()
        self._peak: dict[str, int] = {}
        self._losses = defaultdict[str, dict[str, Any]](dict)  # of each adapter, and of all by ""
        self._ends: list[StepReport] = []  # the first and the last
        self._metrics: Mapping[str, float] = {}  # of the last evaluation

    def step(self, report: StepReport) -> None:
        self._ends[1:] = [report]
        self.total_s += report.step_s
        planned = report.planned_nbytes_read is not None
        if planned and not self._planned:
            self._figures, self._planned = [], True
        if planned == self._planned:
            self._figures.append((*(getattr(report, name) or 0 for name in _MEDIANS), report.on_demand > 0))
        redone = report.rolled_back > 0 and not report.skipped
        self._sums.update(steps=1, redone=redone, tiles_used=report.tiles_used)
        self._stall_s.update(report.stall_s)
        for tier, nbytes in report.peak_nbytes.items():
            self._peak[tier] = max(nbytes, self._peak.get(tier, 0))
        for name, each in {"": report, **report.adapters}.items():
            self._seen(name, skipped=each.skipped, loss=each.loss)

    def evaluated(self, found: Evaluation) -> None:
        for name, loss in {"": found.loss, **found.adapters}.items():
            self._seen(name, held_out=loss, perplexity=perplexity(loss) if found.per_token else None)
        self._metrics = found.metrics

    def _seen(self, adapter: str, *, skipped: bool = False, **figures: float | None) -> None:
        losses = self._losses[adapter]
        losses["skipped"] = losses.get("skipped", 0) + skipped
        for name, value in figures.items():
            if value is not None:
                losses.setdefault(f"first_{name}", value)
                losses[f"last_{name}"] = value

    def result(self, *, folder: Path, **others: Any) -> Summary:
        """Return the summary so far; ``others`` are the fields that do not follow from figures of steps."""
        *columns, off_plan = list(zip(*self._figures)) or [(0.0,)] * (len(_MEDIANS) + 1)
        medians: dict[str, Any] = {
            name: round(median(column)) if "nbytes" in name else median(column)
            for name, column in zip(_MEDIANS, columns)
        }
        if not self._planned:
            medians |= {"planned_nbytes_read": None, "planned_nbytes_written": None}
        sums, stall_s = self._sums, dict[str, float](self._stall_s)
        first, last = (self._ends[0], self._ends[-1]) if self._ends else (None, None)
        adapters = {name: LossSummary(**each) for name, each in self._losses.items() if name}
        return Summary(
            folder=str(folder), **medians, **others, **self._losses[""], adapters=adapters,
            metrics=dict(self._metrics), steps=sums["steps"], first_step=first.step if first else 1,
            steps_off_plan=int(sum(off_plan)), steps_rolled_back=sums["redone"],
            spilled_nbytes=last.spilled_nbytes if last else 0, tiles=last.tiles if last else 0,
            tiles_used=round(sums["tiles_used"] / max(1, sums["steps"])), peak_nbytes=dict(self._peak),
            stall_s=stall_s, stall_share=sum(stall_s.values()) / self.total_s if self.total_s else 0.0,
            bottleneck=bottleneck(stall_s, self.total_s),
        )  # fmt: skip


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
    skipped += f" after step {summary.first_step - 1}" * (summary.first_step > 1)
    rows = [
        ("steps", f"{summary.steps}{skipped} on {ranks}"),
        ("tokens/s", f"{summary.tokens_per_s:,.0f} ({summary.step_s:.3f} s per step)"),
        ("loss", _first_last(summary.first_loss, summary.last_loss)),
        ("held-out loss", _first_last(summary.first_held_out, summary.last_held_out)),
        *((f"held-out {name}", f"{value:,.4f}") for name, value in summary.metrics.items()),
        *((name, _adapter_row(each)) for name, each in summary.adapters.items()),
        ("read per step", _with_plan(summary.nbytes_read, summary.planned_nbytes_read, loaded)),
        ("written per step", _with_plan(summary.nbytes_written, summary.planned_nbytes_written, stored)),
    ]
    if summary.first_perplexity is not None or summary.first_held_out is None:  # of examples there is none
        ends = _first_last(summary.first_perplexity, summary.last_perplexity, digits=2)
        rows.insert(4, ("held-out perplexity", ends))
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
    rows += activation_rows(cache) if cache is not None else []
    causes = ", ".join(f"{cause} {waited_s:.2f} s" for cause, waited_s in summary.stall_s.items() if waited_s)
    rows += [
        ("stall", f"{summary.stall_share:.1%} of the time{f' ({causes})' if causes else ''}"),
        ("bottleneck", summary.bottleneck),
        ("files", summary.folder),
    ]
    rows += [("machine" if number == 0 else "", note) for number, note in enumerate(summary.notes)]
    return rows


def _adapter_row(figures: LossSummary) -> str:
    text = f"loss {_first_last(figures.first_loss, figures.last_loss)}"
    if figures.last_held_out is not None:
        text += f", held-out {_first_last(figures.first_held_out, figures.last_held_out)}"
    return text + (f", {figures.skipped} steps skipped" if figures.skipped else "")


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
        return f"{nbytes:,} bytes per rank"
    beside = f", plus {activations:,} of activations" if activations else ""
    return f"{nbytes:,} bytes per rank (planned {planned:,}{beside})"
