"""Figures of each step and its stalls: the report that all views show, ``metrics.jsonl`` and TensorBoard."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from infinity.core.config import Config, option
from infinity.core.errors import InfinityError
from infinity.core.files import append_file, open_regular
from infinity.observe.timeline import Timeline


class Stalls:
    """Counts the training thread's waits; the time between two is compute, a span of ``timeline``."""

    def __init__(self, timeline: Timeline) -> None:
        self.seconds: dict[str, float] = {}
        self.timeline = timeline
        self._waited_until = time.perf_counter()

    def __call__(self, cause: str, wait: Callable[[], object]) -> None:
        """Run ``wait`` and count its seconds as a stall of ``cause``."""
        begin = time.perf_counter()
        self.timeline.add("compute", "compute", self._waited_until, begin)
        try:
            wait()
        finally:
            self._waited_until = end = time.perf_counter()
            self.seconds[cause] = self.seconds.get(cause, 0.0) + end - begin


#: The end of a metrics file in which its last step is looked for (bytes); a line has some hundred.
_TAIL_NBYTES = 2**16


@dataclass(frozen=True, kw_only=True)
class ObserveConfig(Config):
    """Views of a run; all are written by rank 0."""

    metrics: bool = option(True, "write metrics.jsonl, one line per step")
    tensorboard: bool = option(False, "write TensorBoard events (extra: tensorboard)")
    progress: bool = option(True, "show progress and the final summary")
    timeline: bool = option(False, "write timeline.json, for Perfetto and chrome://tracing")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Figures of one optimizer step on one rank; times in seconds of wall clock, sizes in bytes."""

    step: int
    loss: float | None
    lr: float
    grad_norm: float | None
    skipped: bool
    step_s: float
    tokens: int
    stall_s: dict[str, float] = field(default_factory=dict)  # by cause: read, write, update, ...
    nbytes_read: int = 0
    nbytes_written: int = 0
    planned_nbytes_read: int | None = None  # None while the step is recorded, not planned
    planned_nbytes_written: int | None = None
    on_demand: int = 0  # uses that the plan did not foresee
    speculated: int = 0  # updates that started inside backward, before the norm was known
    rolled_back: int = 0  # those of them that started again, or were forgotten in a skipped step
    spilled_nbytes: int = 0  # of gradients that wait on NVMe until step()
    tiles: int = 0  # of packed experts, that come and go
    tiles_used: int = 0  # those of them that some rank's batches were routed to
    peak_nbytes: dict[str, int] = field(default_factory=dict)  # by tier: device, host, nvme

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


class View:
    """Display or file of a run's figures, or, as this class, all ``views`` as one; used on rank 0 only."""

    views: Sequence["View"] = ()

    def __init__(self, *views: "View") -> None:
        self.views = views

    def add(self, *views: "View") -> None:
        self.views = *self.views, *views

    def step(self, report: StepReport) -> None:
        """Show the figures of a step."""
        for view in self.views:
            view.step(report)

    def evaluated(self, step: int, loss: float) -> None:
        """Show the held-out loss after ``step`` steps, the mean over the tokens of all ranks."""
        for view in self.views:
            view.evaluated(step, loss)

    def log(self, line: str) -> None:
        """Show a line, if this is a display."""
        for view in self.views:
            view.log(line)

    def loading(self, done_nbytes: int, total_nbytes: int) -> None:
        """Show how much of its weights this rank has loaded, if this is a display."""
        for view in self.views:
            view.loading(done_nbytes, total_nbytes)

    def close(self) -> None:
        with ExitStack() as stack:
            for view in self.views:
                stack.callback(view.close)


class MetricsFile(View):
    """View that appends JSON lines to ``path``, each flushed before the call returns.

    A line has ``kind`` "step" (the fields of :class:`StepReport`, ``tokens_per_s``, ``bottleneck``) or
    "evaluation" (``step``, ``loss``, ``perplexity``). Figures that are not finite are null.

    Args:
        after: Keep whole lines up to this step and cut the others (-1: all). None: keep all.
        synced: Lines survive a power cut, as the commits that follow them do.
    """

    def __init__(self, path: Path, *, after: int | None = None, synced: bool = False) -> None:
        self._file, self._synced = append_file(path), synced
        if after is not None:
            ends = [end for _, end in read_metrics(path, after)]
            self._file.truncate(ends[-1] if ends else 0)

    def step(self, report: StepReport) -> None:
        derived = {"tokens_per_s": report.tokens_per_s, "bottleneck": report.bottleneck}
        self._write({"kind": "step", **asdict(report), **derived})

    def evaluated(self, step: int, loss: float) -> None:
        self._write({"kind": "evaluation", "step": step, "loss": loss, "perplexity": perplexity(loss)})

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(finite(line), allow_nan=False) + "\n")
        self._file.flush()  # a killed run keeps its lines
        if self._synced:
            os.fsync(self._file.fileno())


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The held-out loss after ``step`` steps."""

    step: int
    loss: float


def read_metrics(path: Path, last: int) -> Iterator[tuple[StepReport | Evaluation, int]]:
    """Yield the whole lines up to step ``last`` of a metrics file, if any, with their ends (bytes)."""
    if not path.exists():
        return
    with open(open_regular(path), "rb") as file:
        end = 0
        for text in file:
            line, end = _parsed(text), end + len(text)
            if line is None or line.step > last:
                return
            yield line, end


def last_step(path: Path) -> int:
    """Return the last step in a metrics file; 0 if there is none."""
    if not path.exists():
        return 0
    with open(open_regular(path), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_NBYTES))
        lines = map(_parsed, file.readlines())
        return max((line.step for line in lines if line is not None), default=0)


def _parsed(text: bytes) -> StepReport | Evaluation | None:
    if not text.endswith(b"\n"):
        return None
    line: StepReport | Evaluation
    try:
        given = json.loads(text)
        if given["kind"] == "step":
            line = StepReport(**{each.name: given[each.name] for each in fields(StepReport)})
        else:
            line = Evaluation(given["step"], math.nan if given["loss"] is None else given["loss"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return line if type(line.step) is int else None


class TensorBoard(View):
    """View that writes scalars for TensorBoard to ``folder``, and drops those ``after`` a step."""

    def __init__(self, folder: Path, *, after: int = -1) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InfinityError(
                "observe.tensorboard needs a package: pip install 'infinity-offload[tensorboard]'"
            ) from error
        self._writer: Any = SummaryWriter(str(folder), purge_step=after + 1)

    def step(self, report: StepReport) -> None:
        scalars = {
            "loss/train": report.loss,
            "optimizer/lr": report.lr,
            "optimizer/grad_norm": report.grad_norm,
            "speed/tokens_per_s": report.tokens_per_s,
            "speed/step_s": report.step_s,
            "bytes/read": report.nbytes_read,
            "bytes/written": report.nbytes_written,
            **{f"stall_s/{cause}": waited_s for cause, waited_s in report.stall_s.items()},
            **{f"peak_bytes/{tier}": nbytes for tier, nbytes in report.peak_nbytes.items()},
        }
        self._add(report.step, scalars)

    def evaluated(self, step: int, loss: float) -> None:
        self._add(step, {"loss/held_out": loss, "perplexity/held_out": perplexity(loss)})

    def _add(self, step: int, scalars: Mapping[str, float | None]) -> None:
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def finite(value: Any) -> Any:
    """Replace floats that JSON cannot represent with None, also inside dicts."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
