"""AdamW, the rule by which runs train by default, and Adam."""

import math
from collections.abc import Mapping
from typing import Any

from infinity.core.config import SettingError
from infinity.optim.formula import root
from infinity.optim.rule import Group, Rule
from infinity.optim.state import Moment, Quantized


class AdamWRule(Rule):
    """AdamW: Decoupled Weight Decay Regularization (arXiv:1711.05101), algorithm 2."""

    name = "adamw"
    moments = Moment("exp_avg"), Moment("exp_avg_sq")
    defaults: Mapping[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    recipe: Mapping[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    decoupled = True  # weight decay is no part of the gradient

    def numbers(self, group: Group, step: int) -> tuple[float, ...]:
        lr, beta1, beta2 = map(float, (group["lr"], *group["betas"]))
        return (
            1 - lr * float(group["weight_decay"]), 1 - beta1, beta2, 1 - beta2, lr / (1 - beta1**step),
            math.sqrt(1 - beta2**step), float(group["eps"]),
        )  # fmt: skip

    def check_numbers(self, group: Group) -> None:
        super().check_numbers(group)
        decoupled = group.get("decoupled_weight_decay", self.decoupled)
        if decoupled != self.decoupled and group["weight_decay"]:
            of = "AdamW" if self.decoupled else "Adam"
            wanted = f"{self.decoupled}, as in torch.optim.{of}, or no weight_decay"
            raise SettingError("decoupled_weight_decay", decoupled, wanted)

    @staticmethod
    def update(
        weight: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, decay: Any, toward: Any, beta2: Any,
        fresh: Any, rate: Any, correction: Any, eps: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        exp_avg = exp_avg + toward * (grad - exp_avg)
        exp_avg_sq = exp_avg_sq * beta2 + fresh * (grad * grad)
        weight = weight * decay
        return weight - rate * (exp_avg / (root(exp_avg_sq) / correction + eps)), exp_avg, exp_avg_sq


class AdamRule(AdamWRule):
    """Adam: A Method for Stochastic Optimization (arXiv:1412.6980); weight decay is added to the gradient."""

    name = "adam"
    defaults: Mapping[str, Any] = {**AdamWRule.defaults, "weight_decay": 0.0}
    recipe: Mapping[str, Any] = {}
    decoupled = False

    def numbers(self, group: Group, step: int) -> tuple[float, ...]:
        return float(group["weight_decay"]), *super().numbers(group, step)[1:]

    @staticmethod
    def update(
        weight: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, decay: Any, toward: Any, beta2: Any,
        fresh: Any, rate: Any, correction: Any, eps: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        grad = grad + decay * weight
        exp_avg = exp_avg + toward * (grad - exp_avg)
        exp_avg_sq = exp_avg_sq * beta2 + fresh * (grad * grad)
        return weight - rate * (exp_avg / (root(exp_avg_sq) / correction + eps)), exp_avg, exp_avg_sq


ADAMW = AdamWRule()


class AdamW8bitRule(AdamWRule):
    """AdamW with both moments in 8 bits: see [Note: quantized moments] of :mod:`infinity.optim.state`."""

    name = "adamw8bit"
    moments = Moment("exp_avg", Quantized()), Moment("exp_avg_sq", Quantized(signed=False))


ADAMW_8BIT = AdamW8bitRule()


class AdamW4bitRule(AdamWRule):
    """AdamW with both moments in 4 bits, in blocks of 128."""

    name = "adamw4bit"
    moments = (
        Moment("exp_avg", Quantized(bits=4, shift=1, block=128)),
        Moment("exp_avg_sq", Quantized(signed=False, bits=4, shift=0, block=128)),
    )
