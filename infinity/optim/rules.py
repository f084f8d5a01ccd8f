"""Update rules: the arithmetic of an optimizer over flat shards, and what runs it on each device.

Only an :class:`UpdateRule` knows the number, dtypes and names of its moments. A second optimizer is a
subclass and a row in :data:`RULES`.

[Note: forms of a rule] The scalar function in :mod:`infinity.optim.kernels`, :meth:`UpdateRule.step` and the
CUDA kernel have the same operations in the same order, each of which every implementation rounds correctly
(``+ - * /`` and the square root; the kernel fuses no multiply-add). So all give the same bits, whole or in
slices, on any number of threads, in place or not. ``Tensor.sqrt`` on a CPU may come from a vector library
that is off by one in the last place, so the torch form takes NumPy's. On an accelerator whose root is not
known to be rounded correctly, the root in float64 gives the same bits. CUDA has a kernel because launching
thirty operators would take the host longer than the accelerator needs to run them.
"""

import contextlib
import functools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from infinity.core.budget import rounded
from infinity.core.config import Config, Valid, setting
from infinity.device.accelerator import compile_kernel, rounds_roots
from infinity.device.machine import LEAST_NUMEL, background_threads, compile_ahead
from infinity.device.memory import HostBuffer
from infinity.optim.layout import StateField, StateLayout, master_of, store_master
from infinity.optim.norm import sum_of_squares

#: Elements that the torch form takes at one time, and its float32 temporaries of that size.
_PIECE_NUMEL, _TEMPORARIES = 2**18, 8
#: Elements that an update of host memory has on an accelerator at one time, on each of two streams.
_DEVICE_NUMEL = 2**20
#: Elements of a slice where several threads update at one time: some ms of work.
_LEAST_BESIDE = 2**21
#: Elements of a shard in an accelerator's memory that are updated at one time.
RESIDENT_NUMEL = 2**22
_TRIES = 3
#: A parameter group whose update changes no weight: for measuring, and to compile ahead.
IDLE = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Config):
    """AdamW, its learning-rate schedule and its loss scale."""

    lr: float = setting(3e-4, "peak learning rate", Valid(0, 10**6))
    betas: tuple[float, float] = setting(
        (0.9, 0.95), "decay of the first and second moment", Valid(least=0, below=1)
    )
    eps: float = setting(1e-8, "added to the root of the second moment", Valid(1e-30, 1))
    weight_decay: float = setting(0.1, "decoupled weight decay", Valid(0, 10**6))
    max_grad_norm: float | None = setting(
        1.0, "clip the global gradient norm to this; null: never clip", Valid(1e-30, 1e30)
    )
    schedule: Literal["constant", "cosine", "linear"] = setting(
        "constant", "learning rate after warm-up, until train.steps"
    )
    warmup_steps: int = setting(0, "steps in which the rate rises from 0", Valid(0, 10**9))
    min_lr_ratio: float = setting(0.1, "where cosine and linear end, as a share of lr", Valid(0, 1))
    loss_scale: float = setting(2.0**16, "first loss scale of fp16 training; it then adapts", Valid(1, 2**32))


class UpdateRule(ABC):
    """Arithmetic of one optimizer, element by element, on the fp32 master of a weight."""

    name: str  # in commit records, so that a run goes on with the rule that it began with
    moments: tuple[StateField, ...]  # beside the exact weight: one field or more, of 2 bytes or more each

    @abstractmethod
    def numbers(self, group: Mapping[str, Any], step: int, grad_scale: float) -> tuple[float, ...]:
        """Return the numbers :meth:`step` takes from a parameter group, in float64; steps count from 1.

        The gradient is multiplied by ``grad_scale`` first: clip coefficient over loss scale.
        """

    @abstractmethod
    def step(
        self, master: Tensor, grad: Tensor, moments: tuple[Tensor, ...], numbers: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return the new master and the new moments, by elementwise torch; the arguments do not change.

        Use only ``+ - * /`` and :func:`root`: see [Note: forms of a rule]. Master and gradient, which is not
        scaled, are float32, ``(n,)``; each of ``numbers`` has no dimensions.
        """

    def loop(self, dtype: torch.dtype) -> Callable[..., object] | None:
        """Return a jitted loop that does the same on the CPU; None: torch does it."""
        return None

    def update_by_kernel(
        self, weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], hyper: Tensor
    ) -> bool:
        """Start the same in place on an accelerator by one kernel; False: there is none."""
        return False

    def layout(self, dtype: torch.dtype) -> StateLayout:
        """Return the state that goes with weights of ``dtype``; ValueError: there is none."""
        return StateLayout.of(dtype, self.moments)

    def hyper(self, group: Mapping[str, Any], *, step: int = 1, grad_scale: float = 1.0) -> Tensor:
        """Return :meth:`numbers`, rounded once: float32, ``(n,)``, in host memory."""
        return torch.tensor(self.numbers(group, step, grad_scale), dtype=torch.float32, device="cpu")

    def update_by_torch(
        self, weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], weight_out: Tensor, hyper: Tensor,
        *, piece_numel: int = _PIECE_NUMEL,
    ) -> None:  # fmt: skip
        """Update by elementwise torch on any device, ``piece_numel`` elements at a time."""
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
        *, piece_numel: int = _PIECE_NUMEL,
    ) -> None:  # fmt: skip
        """Update tensors on an accelerator in place, on the current stream; ``hyper`` is in host memory."""
        if self.update_by_kernel(weight, grad, state, hyper):
            return
        # By kernels that fill it: a copy from host memory would wait for the stream.
        there = torch.empty(len(hyper), device=weight.device)
        for place, number in zip(there.unbind(), hyper.tolist(), strict=True):
            place.fill_(number)
        self.update_by_torch(weight, grad, state, weight, there, piece_numel=piece_numel)


def root(x: Tensor) -> Tensor:
    """Return the correctly rounded square root; see [Note: forms of a rule]."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.sqrt(x.numpy()))
    return x.sqrt() if rounds_roots(x.device) else root_in_float64(x)


def root_in_float64(x: Tensor) -> Tensor:
    return x.double().sqrt_().float()


class AdamWRule(UpdateRule):
    """AdamW: Decoupled Weight Decay Regularization (arXiv:1711.05101), algorithm 2."""

    name = "adamw"
    moments = StateField("exp_avg", torch.float32), StateField("exp_avg_sq", torch.float32)

    def numbers(self, group: Mapping[str, Any], step: int, grad_scale: float) -> tuple[float, ...]:
        lr, beta1, beta2 = map(float, (group["lr"], *group["betas"]))
        return (
            1 - lr * float(group["weight_decay"]), 1 - beta1, beta2, 1 - beta2, lr / (1 - beta1**step),
            math.sqrt(1 - beta2**step), float(group["eps"]), grad_scale,
        )  # fmt: skip

    def step(
        self, master: Tensor, grad: Tensor, moments: tuple[Tensor, ...], numbers: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        decay, toward, beta2, fresh, rate, correction, eps, scale = numbers
        exp_avg, exp_avg_sq = moments
        g = grad * scale
        m = exp_avg + toward * (g - exp_avg)
        v = exp_avg_sq * beta2 + fresh * (g * g)
        master = master * decay
        return master - rate * (m / (root(v) / correction + eps)), m, v

    def loop(self, dtype: torch.dtype) -> Callable[..., object] | None:
        from infinity.optim import kernels  # late: numba takes 0.3 s to import

        return kernels.adamw_loops[dtype]

    def update_by_kernel(
        self, weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], hyper: Tensor
    ) -> bool:
        kernel = _adamw_kernel(weight.dtype, grad.dtype, weight.device)
        if kernel is None:
            return False
        exact = state[0] if len(state) > 2 else weight
        # As integers: which type a float of Python becomes depends on torch's version.
        numbers = hyper.view(torch.int32).tolist()
        for begin in range(0, weight.numel(), _LAUNCH_NUMEL):
            parts = [each[begin : begin + _LAUNCH_NUMEL] for each in (weight, grad, exact, *state[-2:])]
            n = parts[0].numel()
            kernel(grid=(-(-n // _BLOCK), 1, 1), block=(_BLOCK, 1, 1), args=[*parts, *numbers, n])
        return True


#: Threads of a block of the CUDA kernel, and elements of one launch: its numbers are 32 bits wide.
_BLOCK, _LAUNCH_NUMEL = 256, 2**30

_ADAMW_SOURCE = """
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
def _adamw_kernel(
    dtype: torch.dtype, grad_dtype: torch.dtype, device: torch.device
) -> Callable[..., None] | None:
    names = ("WEIGHT", "EXACT", "MASTER", "STORE", "GRAD", "FROM_GRAD")
    meanings = (*_WEIGHTS[dtype], *_GRADS[grad_dtype])
    defines = "".join(f"#define {name} {meaning}\n" for name, meaning in zip(names, meanings, strict=True))
    return compile_kernel(defines + _ADAMW_SOURCE, "adamw", device)


ADAMW = AdamWRule()
#: Every update rule, by the name that commit records give it. Rules keep nothing between updates.
RULES: dict[str, UpdateRule] = {rule.name: rule for rule in (ADAMW,)}
DEFAULT = ADAMW.name


def default_rule() -> UpdateRule:
    """Return the rule by which runs train."""
    return RULES[DEFAULT]


class HostRule:
    """Update rule over flat shards in host memory, on the CPU.

    Args:
        threads: CPU threads of one update; None: half of the rank's, beside training.
        callers: Threads that may update at one time. Several take larger slices, since handing small ones to
            every core would take longer than their update.
    """

    def __init__(
        self, rule: UpdateRule, dtype: torch.dtype, *, threads: int | None = None, callers: int = 1
    ) -> None:
        self.rule, self.layout, self.callers = rule, rule.layout(dtype), callers
        self.threads = threads or background_threads()

    def update(
        self, weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], weight_out: Tensor, hyper: Tensor
    ) -> None:
        """Update ``n`` elements in one pass. Any thread; blocks (on CUDA tensors: enqueues).

        Args:
            grad: bfloat16, float16 or float32, ``(n,)`` as all others but ``hyper``.
            state: One contiguous tensor per field of the layout; updated in place.
            weight_out: Takes the new weights; may be ``weight``, and overlaps nothing else.
            hyper: :meth:`UpdateRule.hyper`, on the device of the others.
        """
        if weight.device.type == "cpu":
            from infinity.optim import kernels

            loop = self.rule.loop(weight.dtype)
            half = torch.float16 in (weight.dtype, grad.dtype)
            if loop is not None and (not half or kernels.converts_half()):
                in_place = weight.data_ptr() == weight_out.data_ptr()
                least = LEAST_NUMEL if self.callers == 1 else _LEAST_BESIDE
                tensors, numbers = (weight, grad, weight_out, *state), tuple(hyper.numpy())
                kernels.run(loop, tensors, self.threads, numbers, in_place, least=least)
                return
        with torch.no_grad():
            self.rule.update_by_torch(weight, grad, state, weight_out, hyper)


class DeviceRule:
    """Update rule over flat shards in page-locked host memory, on an accelerator; not thread-safe.

    Two streams take pieces in turn: while one updates, the other copies results back and inputs there.
    """

    def __init__(self, rule: UpdateRule, dtype: torch.dtype, device: torch.device) -> None:
        self.rule, self.layout, self.device, self.callers = rule, rule.layout(dtype), device, 1
        self._streams = torch.Stream(device), torch.Stream(device)

    @property
    def nbytes(self) -> int:
        """Bytes of accelerator memory that it takes."""
        piece = self.layout.nbytes(1) + 4  # with a gradient of float32
        return len(self._streams) * (_DEVICE_NUMEL * piece + _PIECE_NUMEL * _TEMPORARIES * 4)

    @torch.no_grad()
    def update(
        self, weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], weight_out: Tensor, hyper: Tensor
    ) -> None:
        """Update ``n`` elements as :meth:`HostRule.update` does; blocks until they are back."""
        try:
            for number, begin in enumerate(range(0, weight.numel(), _DEVICE_NUMEL)):
                part, turn = slice(begin, begin + _DEVICE_NUMEL), number % len(self._streams)
                with self._streams[turn]:
                    sources = [each[part] for each in (weight, grad, *state)]
                    there = [each.to(self.device, non_blocking=True) for each in sources]
                    self.rule.update_on_device(there[0], there[1], tuple(there[2:]), hyper)
                    for target, value in zip((weight_out, *state), (there[0], *there[2:]), strict=True):
                        target[part].copy_(value, non_blocking=True)
        finally:
            for stream in self._streams:
                stream.synchronize()


Rule = HostRule | DeviceRule


def scratch_nbytes(numel: int) -> int:
    """Return the temporary bytes of an update of ``numel`` elements in an accelerator's memory."""
    return min(numel, RESIDENT_NUMEL) * _TEMPORARIES * 4


@functools.cache
def measure_rates(
    rule: UpdateRule, dtype: torch.dtype, device: torch.device, threads: int
) -> tuple[float, float]:
    """Return elements per second of updates in host memory, by the CPU and by ``device``, in under 1 s."""
    layout, numel = rule.layout(dtype), 2 * _DEVICE_NUMEL
    sizes = [layout.weight_nbytes(numel), layout.weight_nbytes(numel), layout.state_nbytes(numel)]
    with contextlib.closing(HostBuffer(rounded(sum(sizes)), device)) as buffer:
        weight, grad, memory = torch.split(buffer.tensor[: sum(sizes)].zero_(), sizes)
        weight, grad, state = weight.view(dtype), grad.view(dtype), layout.views(memory, numel)
        rates = []
        for placed in (HostRule(rule, dtype, threads=threads), DeviceRule(rule, dtype, device)):
            best_s = math.inf
            for _ in range(_TRIES):  # the first compiles, and allocates
                began_s = time.perf_counter()
                placed.update(weight, grad, state, weight, rule.hyper(IDLE))
                best_s = min(best_s, time.perf_counter() - began_s)
            rates.append(numel / best_s)
    return rates[0], rates[1]


def prepare(rule: UpdateRule, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    """Compile in the background all that training in ``dtype`` calls, or load it from the cache."""

    def call_all() -> None:
        from infinity.optim import kernels

        weight, grad, master = (
            torch.empty(0, dtype=each, device="cpu") for each in (dtype, grad_dtype, torch.float32)
        )
        state = rule.layout(dtype).complete((), 0)
        HostRule(rule, dtype).update(weight, grad, state, weight, rule.hyper(IDLE))
        sum_of_squares(grad)
        if dtype == torch.bfloat16:
            kernels.run(kernels.join_all, (weight, state[0], master), 1)
            kernels.run(kernels.split_all, (master, weight, state[0]), 1)

    compile_ahead((rule.name, dtype, grad_dtype), call_all)
