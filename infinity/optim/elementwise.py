"""Rules that update each element by itself: AdamW, the default, Adam, Lion, SGD and schedule-free AdamW."""

import math
from collections.abc import Mapping
from typing import Any

from infinity.core.config import SettingError
from infinity.optim.formula import root, sign, where
from infinity.optim.rule import EMA, OFFSET, Group, Rule
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


class SGDRule(Rule):
    """SGD as in ``torch.optim.SGD``: weight decay is added to the gradient; momentum, also Nesterov's."""

    name = "sgd"
    moments = (Moment("momentum_buffer"),)
    defaults: Mapping[str, Any] = {
        "lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False,
    }  # fmt: skip

    def check_numbers(self, group: Group) -> None:
        super().check_numbers(group)
        if group["nesterov"] and (not group["momentum"] or group["dampening"]):
            raise SettingError("nesterov", True, "False, or a momentum > 0 without dampening")

    def numbers(self, group: Group, step: int) -> tuple[float, ...]:
        fresh = 1.0 if step == 1 else 1 - float(group["dampening"])
        return (
            float(group["lr"]), float(group["momentum"]), fresh, float(group["weight_decay"]),
            float(group["nesterov"]),
        )  # fmt: skip

    @staticmethod
    def update(
        weight: Any, grad: Any, momentum_buffer: Any, lr: Any, momentum: Any, fresh: Any, decay: Any,
        nesterov: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        grad = grad + decay * weight
        momentum_buffer = momentum * momentum_buffer + fresh * grad
        step = where(nesterov > 0, grad + momentum * momentum_buffer, momentum_buffer)
        return weight - lr * step, momentum_buffer


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
