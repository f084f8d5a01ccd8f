"""Update rules: an optimizer's state and arithmetic, what runs it on each device; gradient norm, loss scale.

Only an :class:`UpdateRule` knows the number, dtypes and names of its moments. A second optimizer is a
subclass and a row in :data:`RULES`. A state is what makes the weight exact, which depends on the compute
dtype, and then the moments of the rule:

| compute dtype | weight | exact (bytes per element) |
|---------------|--------|---------------------------|
| bfloat16      | 2      | remainder 2               |
| float16       | 2      | master 4                  |
| float32       | 4      | none                      |

[Note: exact split] A float32 is split into the bfloat16 of its upper half and a signed 16-bit remainder, both
taken as integers: ``bits = (weight << 16) + remainder``. Rounding to nearest with ties up, ``weight = (bits +
0x8000) >> 16``, makes the remainder fit for all 2**32 patterns: nothing is lost. (``Tensor.to(bfloat16)``
differs only in sending ties to even.) Where rounding carries the largest finite values to infinity, the model
computes with an infinite weight, as after any cast to bfloat16, but the master stays finite. A NaN may come
back with another payload.

[Note: forms of a rule] The scalar function in :mod:`infinity.optim.kernels`, :meth:`UpdateRule.step` and the
CUDA kernel have the same operations in the same order, each of which every implementation rounds correctly
(``+ - * /`` and the square root; the kernel fuses no multiply-add). So all give the same bits, whole or in
slices, on any number of threads, in place or not. ``Tensor.sqrt`` on a CPU may come from a vector library
that is off by one in the last place, so the torch form takes NumPy's. On an accelerator whose root is not
known to be rounded correctly, the root in float64 gives the same bits. CUDA has a kernel because the host
would take longer to launch thirty operators than the accelerator to run them.

[Note: order of summation] Squares of gradients are summed in float64, so no finite gradient overflows. On the
CPU the order of additions depends on the numel alone, never on threads: one thread sums each row of
``ROW_NUMEL`` elements into ``LANES`` sums side by side, as vector instructions do; these are added in pairs,
and the sums of the rows without rounding. On an accelerator it depends on the numel and the kind of device.
"""

import contextlib
import functools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from infinity.core.config import Config, Valid, setting
from infinity.core.nbytes import rounded
from infinity.device.accelerator import compile_kernel, rounds_roots
from infinity.device.machine import (
    LEAST_NUMEL,
    background_threads,
    compile_ahead,
    compiling,
    in_slices,
    rank_threads,
)
from infinity.device.memory import HostBuffer

#: Elements that the update pipeline reads, updates and writes at one time.
CHUNK_NUMEL = 2 * 2**20
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
#: Rows and lanes of a sum of squares: see [Note: order of summation].
ROW_NUMEL, LANES = 2**15, 128


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


class StateField(NamedTuple):
    """One value per element: its name and stored dtype."""

    name: str
    dtype: torch.dtype


_EXACT = {
    torch.bfloat16: (StateField("remainder", torch.int16),),
    torch.float16: (StateField("master", torch.float32),),
    torch.float32: (),
}


@dataclass(frozen=True, slots=True)
class StateLayout:
    """State fields that go with weights of ``dtype``, in the order of their bytes."""

    dtype: torch.dtype
    exact: tuple[StateField, ...]  # they make the weight exact
    moments: tuple[StateField, ...]  # the update rule keeps them; zeros before the first update

    @property
    def fields(self) -> tuple[StateField, ...]:
        return self.exact + self.moments

    @property
    def full_names(self) -> tuple[str, ...]:
        """Names of the fp32 values that a state stands for: the master weight, then each moment."""
        return "master", *(field.name for field in self.moments)

    def only(self, *, exact: bool = False, moments: bool = False) -> "StateLayout":
        """Return the layout of a part of the state."""
        return StateLayout(self.dtype, self.exact if exact else (), self.moments if moments else ())

    def moments_of(self, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the moments among the fields of a whole state."""
        return tuple(state[len(self.exact) :])

    def full_values(self, weight: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the fp32 master and each moment as fp32, ``(n,)``; views where they are stored so."""
        state = tuple(state)
        return master_of(self, weight, state), *(moment.float() for moment in self.moments_of(state))

    def complete(self, state: Sequence[Tensor], numel: int) -> tuple[Tensor, ...]:
        """Return a state with zeros for the last fields, which a state that was never trained lacks."""
        missing = self.fields[len(state) :]
        return *state, *(torch.zeros(numel, dtype=field.dtype, device="cpu") for field in missing)

    def weight_nbytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def state_nbytes(self, numel: int) -> int:
        return numel * sum(field.dtype.itemsize for field in self.fields)

    def nbytes(self, numel: int) -> int:
        """Return the bytes of weights and state of ``numel`` elements."""
        return self.weight_nbytes(numel) + self.state_nbytes(numel)

    def views(self, buffer: Tensor, numel: int) -> tuple[Tensor, ...]:
        """Cut ``buffer``, uint8, ``(state_nbytes(numel),)``, into one view ``(numel,)`` per field."""
        sizes = [numel * field.dtype.itemsize for field in self.fields]
        parts = zip(torch.split(buffer, sizes), self.fields, strict=True)
        return tuple(part.view(field.dtype) for part, field in parts)

    def chunk_views(self, buffer: Tensor, numel: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return views of weights and state of ``numel`` elements at the beginning of ``buffer``, uint8."""
        middle, end = self.weight_nbytes(numel), self.nbytes(numel)
        return buffer[:middle].view(self.dtype), self.views(buffer[middle:end], numel)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split a float32 master into bfloat16 weight and int16 remainder, by torch, on any device."""
    bits = master.view(torch.int32)
    weight = (((bits + 0x8000) >> 16) << 16).view(torch.float32).to(torch.bfloat16)
    return weight, bits.to(torch.int16)


def master_of(
    layout: StateLayout, weight: Tensor, state: tuple[Tensor, ...], *, eager: bool = False
) -> Tensor:
    """Return the float32 master of ``weight``, ``(n,)``, which is a view but for bfloat16."""
    if layout.dtype != torch.bfloat16:
        return state[0] if layout.dtype == torch.float16 else weight
    if eager or weight.device.type != "cpu" or compiling():
        return (weight.to(torch.float32).view(torch.int32) + state[0]).view(torch.float32)
    from infinity.optim import kernels

    master = torch.empty(weight.numel(), device="cpu")
    kernels.run(kernels.join_all, (weight, state[0], master), rank_threads())
    return master


def store_master(
    layout: StateLayout, master: Tensor, weight: Tensor, state: tuple[Tensor, ...], *, eager: bool = False
) -> None:
    """Write exact values into ``weight`` and the fields of ``state`` that keep them, all ``(n,)``.

    ``master`` is float32, or bfloat16 where that is the compute dtype; ``eager`` is as for :func:`master_of`.
    """
    if layout.dtype != torch.bfloat16:
        weight.copy_(master)
        if layout.dtype == torch.float16:
            state[0].copy_(master)
    elif master.dtype == torch.bfloat16:
        weight.copy_(master)
        state[0].zero_()
    elif eager or weight.device.type != "cpu" or compiling():
        for target, value in zip((weight, state[0]), split(master), strict=True):
            target.copy_(value)
    else:
        from infinity.optim import kernels

        kernels.run(kernels.split_all, (master.contiguous(), weight, state[0]), rank_threads())


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
        """Start an update in place by one kernel of the accelerator; return False if there is none."""
        return False

    def layout(self, dtype: torch.dtype) -> StateLayout:
        """Return the state that goes with weights of ``dtype``; ValueError: there is none."""
        if dtype not in _EXACT:
            allowed = ", ".join(str(known) for known in _EXACT)
            raise ValueError(f"no update rule for weights of {dtype}; allowed: {allowed}")
        return StateLayout(dtype, _EXACT[dtype], self.moments)

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
        callers: Threads that may update at one time. Several take larger slices: handing small ones to every
            core would take longer than their update.
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
    """Update rule over flat shards in page-locked host memory, on an accelerator; not thread-safe."""

    def __init__(self, rule: UpdateRule, dtype: torch.dtype, device: torch.device) -> None:
        self.rule, self.layout, self.device, self.callers = rule, rule.layout(dtype), device, 1
        self._streams = torch.Stream(device), torch.Stream(device)  # one updates while the other copies

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


def sum_of_squares(grad: Tensor) -> float:
    """Return the sum of squares of a CPU tensor of any shape, in float64; inf and nan propagate."""
    flat = grad.detach().reshape(-1)
    whole = flat.numel() // ROW_NUMEL * ROW_NUMEL
    tail = flat.new_zeros(ROW_NUMEL)
    tail[: flat.numel() - whole] = flat[whole:]
    return math.fsum([*_row_sums(flat[:whole]), *_row_sums(tail)])


def _row_sums(flat: Tensor) -> list[float]:
    from infinity.optim import kernels

    if flat.dtype == torch.float16 and not kernels.converts_half():
        flat = flat.float()  # without rounding
    table = kernels.array(flat).reshape(-1, ROW_NUMEL // LANES, LANES)
    sums = np.zeros((len(table), LANES))
    in_slices(
        lambda begin, end: kernels.squares(table[begin:end], sums[begin:end]),
        len(table), background_threads(), least=2,
    )  # fmt: skip
    while sums.shape[1] > 1:
        sums = sums[:, ::2] + sums[:, 1::2]
    return [float(each) for each in sums[:, 0]]


def norm_on_device(grad: Tensor) -> Tensor:
    """Return the norm of ``grad``, float64, ``()``, by one operator of its accelerator; does not block."""
    norm: Tensor = torch.linalg.vector_norm(grad.detach().reshape(-1), dtype=torch.float64)
    return norm


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Return the factor of :func:`torch.nn.utils.clip_grad_norm_` for a finite norm, rounded to float32."""
    if max_norm is None:
        return 1.0
    return float(torch.tensor(min(1.0, max_norm / (norm + 1e-6)), dtype=torch.float32, device="cpu"))


@dataclass(slots=True)
class LossScaler:
    """Dynamic loss scaling: doubles the scale after good steps in a row, halves it after an overflow.

    Every rank must pass the same ``found_inf``, so that all scales stay equal.

    Source: Mixed Precision Training (arXiv:1710.03740), section 3.2.
    """

    scale: float
    interval: int = 2000
    good_steps: int = 0

    def update(self, found_inf: bool) -> None:
        self.good_steps = 0 if found_inf else self.good_steps + 1
        if found_inf:
            self.scale /= 2
        elif self.good_steps == self.interval:
            self.good_steps = 0
            self.scale = min(2 * self.scale, 2.0**1023)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
