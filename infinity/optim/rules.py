"""Update rules over flat shards: on the CPU a loop jitted by numba, on another device elementwise torch.

[Note: two forms of a rule] The scalar function in :mod:`infinity.optim.kernels` and the torch function here
have the same operations in the same order, each one that every implementation rounds correctly
(``+ - * /`` and the square root). So both give the same bits on the CPU, whole or in slices, on one thread or
many, in place or not. ``Tensor.sqrt`` on a CPU is not such an operation: it may come from a vector
library that is off by one in the last place in one case of six. NumPy's is, so the torch form takes that.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from infinity.optim.layout import StateLayout, master_of, store_master
from infinity.optim.norm import sum_of_squares
from infinity.optim.threads import background_threads, compile_ahead

#: Elements that the torch form takes at one time: bounds its temporaries.
_PIECE_NUMEL = 2**18


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyper:
    """The numbers of one AdamW update of one parameter group.

    Attributes:
        step: Of this update, from 1.
        grad_scale: The gradient is multiplied by this first: clip coefficient over loss scale.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    step: int = 1
    grad_scale: float = 1.0

    def tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """What the rule reads: float32, ``(8,)``, computed in float64 and rounded once."""
        numbers = (
            1 - self.lr * self.weight_decay,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            self.lr / (1 - self.beta1**self.step),
            math.sqrt(1 - self.beta2**self.step),
            self.eps,
            self.grad_scale,
        )
        return torch.tensor(numbers, dtype=torch.float32, device=device)


def adamw_by_torch(
    weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], weight_out: Tensor, hyper: Tensor
) -> None:
    """AdamW with decoupled weight decay, on the fp32 master of ``weight``; see :meth:`AdamWRule.update`.

    Source: Decoupled Weight Decay Regularization (arXiv:1711.05101), algorithm 2.
    """
    layout = StateLayout.of(weight.dtype)
    decay, toward, beta2, fresh, rate, correction, eps, scale = hyper.unbind()
    for begin in range(0, weight.numel(), _PIECE_NUMEL):
        part = slice(begin, begin + _PIECE_NUMEL)
        fields = tuple(field[part] for field in state)
        exp_avg, exp_avg_sq = fields[-2:]
        g = grad[part].to(torch.float32) * scale
        m = exp_avg + toward * (g - exp_avg)
        v = exp_avg_sq * beta2 + fresh * (g * g)
        master = master_of(layout, weight[part], fields, eager=True) * decay
        master = master - rate * (m / (_root(v) / correction + eps))
        store_master(layout, master, weight_out[part], fields, eager=True)
        exp_avg.copy_(m)
        exp_avg_sq.copy_(v)


def _root(x: Tensor) -> Tensor:
    """The correctly rounded square root; see [Note: two forms of a rule]."""
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt()


class AdamWRule:
    """AdamW over flat shards.

    Args:
        dtype: Compute dtype of the weights: bfloat16, float16 or float32.
        threads: CPU threads of one update; None for half of the rank's, which suits a thread that works
            beside training.
    """

    def __init__(self, dtype: torch.dtype, *, threads: int | None = None) -> None:
        self.layout = StateLayout.of(dtype)
        self.threads = threads or background_threads()

    def update(
        self, weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], weight_out: Tensor, hyper: Tensor
    ) -> None:
        """Update ``n`` elements in one pass. Any thread; blocks until it is done (CUDA: enqueues).

        Args:
            weight: Compute dtype, ``(n,)``.
            grad: bfloat16, float16 or float32, ``(n,)``.
            state: One contiguous tensor ``(n,)`` per field of the layout; updated in place.
            weight_out: Takes the new weights, ``(n,)``; may be ``weight``, and overlaps nothing else.
            hyper: ``Hyper.tensor()``, on the device of the others.
        """
        if weight.device.type == "cpu":
            from infinity.optim import kernels

            if torch.float16 not in (weight.dtype, grad.dtype) or kernels.converts_half():
                tensors = (weight, grad, weight_out, *state)
                loop = kernels.adamw_loops[weight.dtype]
                in_place = weight.data_ptr() == weight_out.data_ptr()
                kernels.run(loop, tensors, self.threads, tuple(hyper.numpy()), in_place)
                return
        with torch.no_grad():
            adamw_by_torch(weight, grad, state, weight_out, hyper)


def prepare(dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    """Compile all that training in ``dtype`` calls, or load it from numba's cache, in the background."""

    def call_all() -> None:
        from infinity.optim import kernels

        weight, grad = (
            torch.empty(0, dtype=dtype, device="cpu"),
            torch.empty(0, dtype=grad_dtype, device="cpu"),
        )
        state = tuple(
            torch.empty(0, dtype=field.dtype, device="cpu") for field in StateLayout.of(dtype).fields
        )
        AdamWRule(dtype).update(weight, grad, state, weight, Hyper(lr=0.0).tensor())
        sum_of_squares(grad)
        if dtype == torch.bfloat16:
            kernels.run(kernels.join_all, (weight, state[0], torch.empty(0, device="cpu")), 1)
            kernels.run(kernels.split_all, (torch.empty(0, device="cpu"), weight, state[0]), 1)

    compile_ahead((dtype, grad_dtype), call_all)
