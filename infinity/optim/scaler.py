"""The loss scale of fp16 training: as large as it can be without overflowing the gradients."""

import math
from typing import Any


class LossScaler:
    """Dynamic loss scaling, pure arithmetic: it grows after good steps and shrinks after an overflow.

    Every rank must feed it the same ``found_inf``; then all scales stay equal.

    Args:
        scale: The first scale.
        growth: The scale is multiplied by this after ``interval`` good steps in a row.
        backoff: The scale is multiplied by this after a step with non-finite gradients.
        interval: Good steps in a row that make it grow.

    Source: Mixed Precision Training (arXiv:1710.03740), section 3.2.
    """

    def __init__(
        self, scale: float = 2.0**16, *, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000
    ) -> None:
        if not (scale > 0 and growth >= 1 and 0 < backoff <= 1 and interval >= 1):
            raise ValueError(
                f"scale {scale} must be above 0, growth {growth} at least 1, backoff {backoff} in (0, 1], "
                f"interval {interval} at least 1"
            )
        self.scale = float(scale)
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self.good_steps = 0

    def update(self, found_inf: bool) -> None:
        """Adapt after a step; with ``found_inf`` that step was skipped."""
        if found_inf:
            self.scale *= self.backoff
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.good_steps = 0
            grown = self.scale * self.growth
            self.scale = grown if math.isfinite(grown) else self.scale

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its counts, as :meth:`load_state_dict` takes them."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict()``."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
