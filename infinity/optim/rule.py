"""An update rule: the arithmetic of one optimizer, and the layout of the state that it keeps.

Nothing outside a rule knows how many moments it has, of what dtype, or what they are called. A second
optimizer is a subclass in a file of its own and a row in :data:`infinity.optim.rules.RULES`.

It has the operations of :mod:`infinity.optim.kernels` in the same order, each rounded as IEEE 754 wants it:
no fused multiply-add, and the compiler's defaults for division, root and denormals. So the bits are those
of every other form.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from infinity.core.config import Valid, check, setting
from infinity.device.accelerator import compile_kernel, rounds_roots
from infinity.optim.layout import StateField, StateLayout, exact_fields, master_of, store_master


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, its learning-rate schedule and its loss scale."""

    lr: float = setting(3e-4, "peak learning rate", valid=Valid(least=0, most=10**6))
    betas: tuple[float, float] = setting(
        (0.9, 0.95), "decay of the first and second moment", valid=Valid(least=0, below=1)
    )
    eps: float = setting(1e-8, "added to the root of the second moment", valid=Valid(least=1e-30, most=1))
    weight_decay: float = setting(0.1, "decoupled weight decay", valid=Valid(least=0, most=10**6))
    max_grad_norm: float | None = setting(
        1.0, "clip the global gradient norm to this; null: never clip", valid=Valid(least=1e-30, most=1e30)
    )
    schedule: Literal["constant", "cosine", "linear"] = setting(
        "constant",
        "learning rate after warm-up, until train.steps",
        valid=Valid(choices=("constant", "cosine", "linear")),
    )
    warmup_steps: int = setting(0, "steps in which the rate rises from 0", valid=Valid(least=0, most=10**9))
    min_lr_ratio: float = setting(
        0.1, "where cosine and linear end, as a share of lr", valid=Valid(least=0, most=1)
    )
    loss_scale: float = setting(
        2.0**16, "first loss scale of fp16 training; it then adapts", valid=Valid(least=1, most=2**32)
    )

    def __post_init__(self) -> None:
        check(self)


#: Elements that the torch form takes at one time: bounds its temporaries.
PIECE_NUMEL = 2**18


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyper:
    """The numbers of one update of one parameter group; a rule's subclass adds its own.

    Attributes:
        step: Of this update, from 1.
        grad_scale: The gradient is multiplied by this first: clip coefficient over loss scale.
    """

    lr: float
    step: int = 1
    grad_scale: float = 1.0

    def numbers(self) -> tuple[float, ...]:
        """Return the numbers that the rule reads, computed in float64."""
        raise NotImplementedError

    def tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the numbers that the rule reads, rounded once: float32, ``(n,)``."""
        return torch.tensor(self.numbers(), dtype=torch.float32, device=device)


class UpdateRule(ABC):
    """The arithmetic of one optimizer, element by element.

    Attributes:
        name: In commit records, so that a run goes on with the rule that it began with.
        moments: The state that it keeps beside the exact weight: one field or more, of 2 bytes or more each.
    """

    name: str
    moments: tuple[StateField, ...]

    def layout(self, dtype: torch.dtype) -> StateLayout:
        """Return the state that goes with weights of ``dtype``.

        Raises:
            ValueError: Not bfloat16, float16 or float32.
        """
        return StateLayout(dtype, exact_fields(dtype), self.moments)

    @abstractmethod
    def hyper(self, group: Mapping[str, Any]) -> Hyper:
        """Read the numbers of a parameter group."""

    @abstractmethod
    def step(
        self, master: Tensor, grad: Tensor, moments: tuple[Tensor, ...], numbers: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return the new master and the new moments of ``n`` elements, by elementwise torch.

        Only ``+ - * /`` and :func:`root` are rounded alike everywhere: see [Note: two forms of a rule] in
        :mod:`infinity.optim.rules`.

        Args:
            master: float32, ``(n,)``; stays as it is, as do the moments.
            grad: float32, ``(n,)``, not scaled.
            numbers: Those of :meth:`Hyper.tensor`, each without dimensions.
        """

    def loop(self, dtype: torch.dtype) -> Callable[..., object] | None:
        """Return a jitted loop that does the same on the CPU; None: torch does it."""
        return None

    def update_by_kernel(
        self, weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], hyper: Tensor
    ) -> bool:
        """Start the same in place on an accelerator by one kernel; False: there is none, nothing was done."""
        return False

    def update_by_torch(
        self, weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], weight_out: Tensor, hyper: Tensor,
        *, piece_numel: int = PIECE_NUMEL,
    ) -> None:  # fmt: skip
        """Update by elementwise torch on any device; see :meth:`infinity.optim.rules.HostRule.update`.

        Args:
            piece_numel: Elements that are updated at one time.
        """
        layout, numbers = self.layout(weight.dtype), hyper.unbind()
        for begin in range(0, weight.numel(), piece_numel):
            part = slice(begin, begin + piece_numel)
            fields = tuple(field[part] for field in state)
            moments = layout.moments_of(fields)
            master = master_of(layout, weight[part], fields, eager=True)
            master, *new = self.step(master, grad[part].to(torch.float32), moments, numbers)
            store_master(layout, master, weight_out[part], fields, eager=True)
            for moment, value in zip(moments, new, strict=True):
                moment.copy_(value)

    @torch.no_grad()
    def update_on_device(
        self, weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], hyper: Tensor,
        *, piece_numel: int = PIECE_NUMEL,
    ) -> None:  # fmt: skip
        """Update tensors in an accelerator's memory in their places, by the calling thread's stream.

        Args:
            hyper: ``Hyper.tensor()``, in host memory.
            piece_numel: Elements that are updated at one time, where elementwise torch does it.
        """
        if not self.update_by_kernel(weight, grad, state, hyper):
            there = _there(hyper, weight.device)
            self.update_by_torch(weight, grad, state, weight, there, piece_numel=piece_numel)


def _there(hyper: Tensor, device: torch.device) -> Tensor:
    """``hyper`` on an accelerator. A copy from host memory would wait for the stream, kernels do not."""
    there = torch.empty(len(hyper), device=device)
    for place, number in zip(there.unbind(), hyper.tolist(), strict=True):
        place.fill_(number)
    return there


_THREADS = 256
#: Elements of one launch: its numbers are 32 bits wide.
_MOST_NUMEL = 2**30

_SOURCE = """
typedef unsigned short half_bits;
__device__ float from_bf16(half_bits x) { return __uint_as_float((unsigned)x << 16); }
__device__ float from_half(half_bits x)
{
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x));
    return f;
}
__device__ half_bits to_half(float f)
{
    half_bits x;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x) : "f"(f));
    return x;
}

extern "C" __global__ void adamw(
    WEIGHT *weight, const GRAD *grad, EXACT *exact, float *exp_avg, float *exp_avg_sq,
    int decay_bits, int toward_bits, int beta2_bits, int fresh_bits,
    int rate_bits, int correction_bits, int eps_bits, int scale_bits, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float decay = __int_as_float(decay_bits), toward = __int_as_float(toward_bits);
    float beta2 = __int_as_float(beta2_bits), fresh = __int_as_float(fresh_bits);
    float rate = __int_as_float(rate_bits), correction = __int_as_float(correction_bits);
    float eps = __int_as_float(eps_bits), scale = __int_as_float(scale_bits);
    float g = FROM_GRAD(grad[i]) * scale;
    float m = exp_avg[i] + toward * (g - exp_avg[i]);
    float v = exp_avg_sq[i] * beta2 + fresh * (g * g);
    float master = MASTER * decay;
    master = master - rate * (m / (sqrtf(v) / correction + eps));
    STORE
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
}
"""
#: By the dtype of a weight: its type, that of what makes it exact, the master of both, how they are written.
_WEIGHTS = {
    torch.bfloat16: (
        "half_bits", "short", "__int_as_float((int)((unsigned)weight[i] << 16) + (int)exact[i])",
        "unsigned bits = __float_as_uint(master); exact[i] = bits; weight[i] = (bits + 0x8000) >> 16;",
    ),
    torch.float16: ("half_bits", "float", "exact[i]", "exact[i] = master; weight[i] = to_half(master);"),
    torch.float32: ("float", "float", "weight[i]", "weight[i] = master;"),
}  # fmt: skip
#: By the dtype of a gradient: its type, and what makes a float of it.
_GRADS = {
    torch.bfloat16: ("half_bits", "from_bf16"),
    torch.float16: ("half_bits", "from_half"),
    torch.float32: ("float", ""),
}


@functools.cache
def _kernel(dtype: torch.dtype, grad_dtype: torch.dtype, device: torch.device) -> Callable[..., None] | None:
    names = ("WEIGHT", "EXACT", "MASTER", "STORE", "GRAD", "FROM_GRAD")
    meanings = (*_WEIGHTS[dtype], *_GRADS[grad_dtype])
    defines = "".join(f"#define {name} {meaning}\n" for name, meaning in zip(names, meanings, strict=True))
    return compile_kernel(defines + _SOURCE, "adamw", device)


def adamw_by_cuda(weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], hyper: Tensor) -> bool:
    """Start to update ``weight`` and ``state`` in their places, all ``(n,)``, by the calling thread's stream.

    Args:
        hyper: ``Hyper.tensor()``, in host memory.

    Returns:
        False: There is no such kernel for this device; nothing was done.
    """
    kernel = _kernel(weight.dtype, grad.dtype, weight.device)
    if kernel is None:
        return False
    exact = state[0] if len(state) > 2 else weight
    # As integers: which type a float of Python becomes depends on torch's version.
    numbers = hyper.view(torch.int32).tolist()
    for begin in range(0, weight.numel(), _MOST_NUMEL):
        parts = [each[begin : begin + _MOST_NUMEL] for each in (weight, grad, exact, *state[-2:])]
        n = parts[0].numel()
        kernel(grid=(-(-n // _THREADS), 1, 1), block=(_THREADS, 1, 1), args=[*parts, *numbers, n])
    return True


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
