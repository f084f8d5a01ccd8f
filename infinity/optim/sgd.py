"""Stochastic gradient descent with momentum."""

from collections.abc import Mapping
from typing import Any

from infinity.core.config import SettingError
from infinity.optim.formula import where
from infinity.optim.rule import Group, Rule
from infinity.optim.state import Moment


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
