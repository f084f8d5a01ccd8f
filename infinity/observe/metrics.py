"""Figures of each step: the report that all views read, ``metrics.jsonl`` and TensorBoard."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from infinity.core.config import check, setting
from infinity.core.errors import InfinityError
from infinity.core.files import append_file

#: A step or run whose longest stall is at most this share of its time is bound by compute.
STALL_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class ObserveConfig:
    """Views of a run; all are written by rank 0."""

    metrics: bool = setting(True, "write metrics.jsonl, one line per step")
    tensorboard: bool = setting(False, "write TensorBoard events (extra: tensorboard)")
    progress: bool = setting(True, "show progress and the final summary")
    timeline: bool = setting(False, "write timeline.json, for Perfetto and chrome://tracing")

    def __post_init__(self) -> None:
        check(self)


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
    peak_nbytes: dict[str, int] = field(default_factory=dict)  # by tier: device, host, nvme

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s if self.step_s else 0.0

    @property
    def bottleneck(self) -> str:
        """The cause of the longest stall; ``compute`` if that is at most 5 % of the step."""
        return bottleneck(self.stall_s, self.step_s)


def bottleneck(stall_s: dict[str, float], total_s: float) -> str:
    """Return the cause of the longest stall; ``compute`` if that is at most 5 % of ``total_s``."""
    cause, waited_s = max(stall_s.items(), key=lambda item: item[1], default=("compute", 0.0))
    return cause if waited_s > STALL_SHARE * total_s else "compute"


def perplexity(loss: float) -> float:
    """Perplexity: exp(loss); infinity if that exceeds a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class View(Protocol):
    """A display or file of a run's figures; called on rank 0 only."""

    def step(self, report: StepReport) -> None:
        """Show the figures of a step."""
        ...

    def evaluated(self, step: int, loss: float) -> None:
        """Show the held-out loss after ``step`` steps, the mean over the tokens of all ranks."""
        ...

    def close(self) -> None: ...


class MetricsFile:
    """View that appends JSON lines to ``path``, each flushed before the call returns.

    A line has ``kind`` "step" (the fields of :class:`StepReport`, ``tokens_per_s``, ``bottleneck``) or
    "evaluation" (``step``, ``loss``, ``perplexity``). Figures that are not finite are null.
    """

    def __init__(self, path: Path) -> None:
        self._file = append_file(path)

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


class TensorBoard:
    """View that writes scalars for TensorBoard into ``folder``.

    Raises:
        InfinityError: The tensorboard package is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InfinityError(
                "observe.tensorboard needs a package: pip install 'infinity-offload[tensorboard]'"
            ) from error
        self._writer: Any = SummaryWriter(str(folder))

    def step(self, report: StepReport) -> None:
        for name, value in _scalars(report).items():
            if value is not None:
                self._writer.add_scalar(name, value, report.step)
        self._writer.flush()

    def evaluated(self, step: int, loss: float) -> None:
        self._writer.add_scalar("loss/held_out", loss, step)
        self._writer.add_scalar("perplexity/held_out", perplexity(loss), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def finite(value: Any) -> Any:
    """Replace floats that JSON cannot represent by None, also inside dicts."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _scalars(report: StepReport) -> dict[str, float | None]:
    return {
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
