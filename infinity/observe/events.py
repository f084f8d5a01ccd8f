"""What one step did, as a frozen value that every view (log, progress, summary) reads."""

import math
from dataclasses import dataclass, field
from typing import Literal

Bottleneck = Literal["compute", "read", "write", "update", "collective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Figures of one optimizer step on one rank.

    Times are seconds of wall clock, sizes are bytes of this rank.
    """

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
    peak_nbytes: dict[str, int] = field(default_factory=dict)  # by tier: device, host, nvme

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s if self.step_s else 0.0

    @property
    def bottleneck(self) -> Bottleneck:
        """What the step waited for most; ``compute`` when it hardly waited (under 5 %)."""
        cause, waited_s = max(self.stall_s.items(), key=lambda kv: kv[1], default=("compute", 0.0))
        return cause if waited_s > 0.05 * self.step_s else "compute"  # type: ignore[return-value]


def perplexity(loss: float) -> float:
    """Among how many tokens the model hesitates: exp of its mean ``loss`` per token; inf beyond floats."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
