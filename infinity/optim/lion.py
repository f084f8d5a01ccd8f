"""Lion: one moment, and steps of equal size."""

from collections.abc import Mapping
from typing import Any

from infinity.optim.formula import sign
from infinity.optim.rule import Group, Rule
from infinity.optim.state import Moment


class LionRule(Rule):
    """Lion: Symbolic Discovery of Optimization Algorithms (arXiv:2302.06675), program 1."""

    name = "lion"
    moments = (Moment("exp_avg"),)
    defaults: Mapping[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}

    def numbers(self, group: Group, step: int) -> tuple[float, ...]:
        lr, beta1, beta2 = map(float, (group["lr"], *group["betas"]))
        return 1 - lr * float(group["weight_decay"]), 1 - beta1, 1 - beta2, lr

    @staticmethod
    def update(
        weight: Any, grad: Any, exp_avg: Any, decay: Any, step_toward: Any, toward: Any, lr: Any
    ) -> tuple[Any, ...]:
        step = sign(exp_avg + step_toward * (grad - exp_avg))
        return weight * decay - lr * step, exp_avg + toward * (grad - exp_avg)
