"""AdamW: its numbers, its moments, and its arithmetic in three forms that give the same bits."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infinity.device.accelerator import rounds_roots
from infinity.optim.cuda import adamw_by_cuda
from infinity.optim.layout import StateField
from infinity.optim.rule import Hyper, UpdateRule


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWHyper(Hyper):
    """The numbers of one AdamW update of one parameter group."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def numbers(self) -> tuple[float, ...]:
        """Return the eight numbers that the rule reads."""
        return (
            1 - self.lr * self.weight_decay,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            self.lr / (1 - self.beta1**self.step),
            math.sqrt(1 - self.beta2**self.step),
            self.eps,
            self.grad_scale,
        )


class AdamWRule(UpdateRule):
    """AdamW with decoupled weight decay, on the fp32 master of a weight.

    Source: Decoupled Weight Decay Regularization (arXiv:1711.05101), algorithm 2.
    """

    name = "adamw"
    moments = StateField("exp_avg", torch.float32), StateField("exp_avg_sq", torch.float32)

    def hyper(self, group: Mapping[str, Any]) -> Hyper:
        """Read the numbers of a parameter group of torch's AdamW."""
        return AdamWHyper(
            lr=float(group["lr"]), beta1=float(group["betas"][0]), beta2=float(group["betas"][1]),
            eps=float(group["eps"]), weight_decay=float(group["weight_decay"]),
        )  # fmt: skip

    def step(
        self, master: Tensor, grad: Tensor, moments: tuple[Tensor, ...], numbers: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return the new master and both new moments."""
        decay, toward, beta2, fresh, rate, correction, eps, scale = numbers
        exp_avg, exp_avg_sq = moments
        g = grad * scale
        m = exp_avg + toward * (g - exp_avg)
        v = exp_avg_sq * beta2 + fresh * (g * g)
        master = master * decay
        return master - rate * (m / (root(v) / correction + eps)), m, v

    def loop(self, dtype: torch.dtype) -> Callable[..., object] | None:
        """Return the jitted loop of a compute dtype."""
        from infinity.optim import kernels  # late: numba takes 0.3 s to import

        return kernels.adamw_loops[dtype]

    def update_by_kernel(
        self, weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], hyper: Tensor
    ) -> bool:
        """Start the update as one CUDA kernel; False: there is none for this device."""
        return adamw_by_cuda(weight, grad, state, hyper)


#: The rule; it keeps nothing between updates.
ADAMW = AdamWRule()


def root(x: Tensor) -> Tensor:
    """The correctly rounded square root; see [Note: two forms of a rule] in :mod:`infinity.optim.rules`."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.sqrt(x.numpy()))
    return x.sqrt() if rounds_roots(x.device) else _root_in_float64(x)


def _root_in_float64(x: Tensor) -> Tensor:
    return x.double().sqrt_().float()
