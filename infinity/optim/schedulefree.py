"""Schedule-free AdamW: an average of the iterates takes the place of a learning-rate schedule."""

import math
from collections.abc import Mapping
from typing import Any

from infinity.core.config import SettingError
from infinity.optim.formula import root
from infinity.optim.rule import EMA, OFFSET, Group, Rule
from infinity.optim.state import Moment


class ScheduleFreeRule(Rule):
    """AdamW as in The Road Less Scheduled (arXiv:2405.15682), algorithm 1; the learning rate is constant.

    The weight is y, at which gradients are taken. Beside it is x - y, where x is the average of the iterates
    z: ``infinity.ema(model)`` holds it, and evaluations and exports of a run are of it. Since y =
    (1 - beta1) z + beta1 x, z follows from both. The rate rises in the first ``warmup_steps`` updates of a
    parameter, in which an iterate has the square of its rate as its weight. A scheduler may not raise it: the
    average would not know.
    """

    name = "schedulefree"
    moments = Moment("exp_avg_sq"), Moment(OFFSET)
    defaults: Mapping[str, Any] = {
        "lr": 2.5e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "warmup_steps": 0,
    }  # fmt: skip
    scheduled = False

    def numbers(self, group: Group, step: int) -> tuple[float, ...]:
        lr, beta1, beta2 = map(float, (group["lr"], *group["betas"]))
        warmup = max(1, int(group["warmup_steps"]))
        rising = min(step, warmup)
        squares = rising * (rising + 1) * (2 * rising + 1) / 6 + (step - rising) * warmup**2
        new = rising**2 / squares  # the share of the newest iterate in the average
        return (
            lr * (1 - beta1) * rising / warmup, beta2, 1 - beta2, math.sqrt(1 - beta2**step),
            float(group["eps"]), float(group["weight_decay"]), new * beta1 / (1 - beta1), 1 - new,
        )  # fmt: skip

    @property
    def averaged(self) -> Rule:
        raise SettingError(EMA, "a decay", f"null: {self.name} keeps an average of its own")

    @staticmethod
    def update(
        weight: Any, grad: Any, exp_avg_sq: Any, ema_offset: Any, rate: Any, beta2: Any, fresh: Any,
        correction: Any, eps: Any, decay: Any, toward: Any, kept: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        exp_avg_sq = exp_avg_sq * beta2 + fresh * (grad * grad)
        step = rate * (grad / (root(exp_avg_sq) / correction + eps) + decay * weight)
        apart = ema_offset + step  # of x and the new z, times 1 - beta1
        return weight - step - toward * apart, exp_avg_sq, kept * apart
