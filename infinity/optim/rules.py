"""Update rules: a few lines of elementwise torch, compiled into one pass over memory.

[Note: the same bits] Compiled and eager, whole or in pieces, on one thread or many, in place or not: the
update gives the same bits. So the rule uses only operations that every implementation rounds
correctly (``+ - * /`` and the square root), each written on its own, and the compiler is not allowed to
contract them. ``Tensor.sqrt`` in eager mode is not one of them: it may come from a vector library that is
off by one in the last place in one case of six. NumPy's is, so eager mode takes that.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from infinity.optim.compiled import Elementwise
from infinity.optim.layout import StateLayout
from infinity.optim.master import master_of, store_master


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

    def scaled(self, grad_scale: float) -> "Hyper":
        """The same numbers for gradients that are multiplied by ``grad_scale``."""
        return replace(self, grad_scale=grad_scale)

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


def _root(x: Tensor) -> Tensor:
    """The correctly rounded square root; see [Note: the same bits]."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return x.sqrt()
    return torch.from_numpy(np.sqrt(x.numpy()))


def _adamw_update(weight: Tensor, grad: Tensor, weight_out: Tensor, *state_and_hyper: Tensor) -> None:
    """AdamW with decoupled weight decay, on the fp32 master of ``weight``.

    Source: Decoupled Weight Decay Regularization (arXiv:1711.05101), algorithm 2.
    """
    *fields, hyper = state_and_hyper
    state, layout = tuple(fields), StateLayout.of(weight.dtype)
    decay, toward, beta2, fresh, rate, correction, eps, scale = hyper.unbind()
    exp_avg, exp_avg_sq = state[-2:]
    g = grad.to(torch.float32) * scale
    m = exp_avg + toward * (g - exp_avg)
    v = exp_avg_sq * beta2 + fresh * (g * g)
    master = master_of(layout, weight, state) * decay
    master = master - rate * (m / (_root(v) / correction + eps))
    store_master(layout, master, weight_out, state)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)


class AdamWRule:
    """AdamW over flat shards.

    Args:
        dtype: Compute dtype of the weights: bfloat16, float16 or float32.
        threads: CPU threads of one update; None for half of PyTorch's, which suits a thread that works
            beside training.
        compiled: False for eager, which gives the same bits, several times slower.
        on_compile: Called with a line for people before the rule is compiled (seconds, once; the code is
            cached on disk).
    """

    def __init__(
        self, dtype: torch.dtype, *, threads: int | None = None, compiled: bool = True,
        on_compile: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self.layout = StateLayout.of(dtype)
        self._kernel = Elementwise(_adamw_update, threads=threads, compiled=compiled, on_compile=on_compile)

    @property
    def compiled(self) -> bool:
        """Whether the rule was asked to be compiled."""
        return self._kernel.compiled

    @property
    def threads(self) -> int:
        """CPU threads of one update."""
        return self._kernel.threads

    def prepare(self, grad_dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> None:
        """Compile for gradients of ``grad_dtype`` (None: the compute dtype) on ``device``, ahead of use."""
        weight = torch.empty(2, dtype=self.layout.dtype, device=device)
        grad = torch.empty(2, dtype=grad_dtype or self.layout.dtype, device=device)
        state = [torch.empty(2, dtype=field.dtype, device=device) for field in self.layout.fields]
        self._kernel.prepare(weight, grad, weight, *state, Hyper(lr=0.0).tensor(device))

    def update(
        self, weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], weight_out: Tensor, hyper: Tensor
    ) -> None:
        """Update ``n`` elements in one pass. Any thread; blocks until it is done (CUDA: enqueues).

        Args:
            weight: Compute dtype, ``(n,)``.
            grad: bfloat16, float16 or float32, ``(n,)``.
            state: One contiguous tensor ``(n,)`` per field of the layout; updated in place.
            weight_out: Takes the new weights, ``(n,)``; may be ``weight``.
            hyper: ``Hyper.tensor()``, on the device of the others.
        """
        self._kernel(weight, grad, weight_out, *state, hyper)
