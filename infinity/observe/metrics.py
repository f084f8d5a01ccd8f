"""A run's figures on disk: ``metrics.jsonl``, one line a step, and TensorBoard."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from infinity.core.errors import InfinityError
from infinity.observe.events import StepReport, perplexity


class View(Protocol):
    """Something that shows a run; called on rank 0 only."""

    def step(self, report: StepReport) -> None:
        """A step ended."""
        ...

    def evaluated(self, step: int, loss: float) -> None:
        """The held-out loss, mean over the tokens of all ranks, after ``step`` steps."""
        ...

    def close(self) -> None: ...


class MetricsFile:
    """Appends JSON lines to ``path``, each whole on disk's side of the process when the call ends.

    A line has ``kind`` "step" (the fields of :class:`StepReport`, ``tokens_per_s``,
    ``bottleneck``) or "evaluation" (``step``, ``loss``, ``perplexity``). Figures that are not finite
    are null.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def step(self, report: StepReport) -> None:
        more = {"tokens_per_s": report.tokens_per_s, "bottleneck": report.bottleneck}
        self._write({"kind": "step", **asdict(report), **more})

    def evaluated(self, step: int, loss: float) -> None:
        figures = {"loss": loss, "perplexity": perplexity(loss)}
        self._write({"kind": "evaluation", "step": step, **figures})

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(finite(line), allow_nan=False) + "\n")
        self._file.flush()  # a run that is killed keeps what it wrote


class TensorBoard:
    """Scalars for TensorBoard in ``folder``.

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
    """``value`` with None for every float that JSON cannot say."""
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
