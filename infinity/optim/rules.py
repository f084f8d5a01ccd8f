"""Update rules over flat shards: a loop jitted by numba, elementwise torch on another device, a CUDA kernel.

[Note: two forms of a rule] The scalar function in :mod:`infinity.optim.kernels` and the torch function here
have the same operations in the same order, each one that every implementation rounds correctly
(``+ - * /`` and the square root). So both give the same bits on the CPU, whole or in slices, on one thread or
many, in place or not. ``Tensor.sqrt`` on a CPU is not such an operation: it may come from a vector
library that is off by one in the last place in one case of six. NumPy's is, so the torch form takes that. On
an accelerator whose root is not known to be rounded correctly, the root in float64 gives the same bits: it
has more than twice as many. On CUDA the same operations are one kernel (:mod:`infinity.optim.cuda`), since
the host would take longer to launch thirty than the accelerator to run them.

[Note: updates of host memory on an accelerator] :class:`DeviceRule` has the interface of :class:`AdamWRule`
for tensors in host memory. Pieces of them go to the accelerator and come back, on two streams in turn: while
one piece is updated, the next one goes there and the one before it comes back.
"""

import functools
import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from infinity.core.budget import rounded
from infinity.device.accelerator import rounds_roots
from infinity.device.memory import HostBuffer
from infinity.optim.cuda import adamw_by_cuda
from infinity.optim.layout import StateLayout, master_of, store_master
from infinity.optim.norm import sum_of_squares
from infinity.optim.threads import LEAST_NUMEL, background_threads, compile_ahead

#: Elements that the torch form takes at one time: bounds its temporaries.
_PIECE_NUMEL = 2**18
#: Temporaries of float32 that it has at one time.
_TEMPORARIES = 8
#: Elements that an update of host memory has on an accelerator at one time, on each of two streams.
_DEVICE_NUMEL = 2**20
_TRIES = 3
#: Elements of a slice where several threads update at one time: some ms of work.
_LEAST_BESIDE = 2**21
#: Elements of a shard in an accelerator's memory that are updated at one time.
RESIDENT_NUMEL = 2**22


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
        """The numbers that the rule reads: float32, ``(8,)``, computed in float64 and rounded once."""
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
    weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], weight_out: Tensor, hyper: Tensor,
    *, piece_numel: int = _PIECE_NUMEL,
) -> None:  # fmt: skip
    """AdamW with decoupled weight decay, on the fp32 master of ``weight``; see :meth:`AdamWRule.update`.

    Args:
        piece_numel: Elements that are updated at one time.

    Source: Decoupled Weight Decay Regularization (arXiv:1711.05101), algorithm 2.
    """
    layout = StateLayout.of(weight.dtype)
    decay, toward, beta2, fresh, rate, correction, eps, scale = hyper.unbind()
    for begin in range(0, weight.numel(), piece_numel):
        part = slice(begin, begin + piece_numel)
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


def adamw_on_device(
    weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], hyper: Tensor, *, piece_numel: int = _PIECE_NUMEL
) -> None:
    """Update tensors in an accelerator's memory in their places, by the calling thread's stream.

    Args:
        hyper: ``Hyper.tensor()``, in host memory.
        piece_numel: Elements that are updated at one time, where elementwise torch does it.
    """
    with torch.no_grad():
        if not adamw_by_cuda(weight, grad, state, hyper):
            adamw_by_torch(weight, grad, state, weight, _there(hyper, weight.device), piece_numel=piece_numel)


def _there(hyper: Tensor, device: torch.device) -> Tensor:
    """``hyper`` on an accelerator. A copy from host memory would wait for the stream, kernels do not."""
    there = torch.empty(len(hyper), device=device)
    for place, number in zip(there.unbind(), hyper.tolist(), strict=True):
        place.fill_(number)
    return there


def scratch_nbytes(numel: int) -> int:
    """Return what the update of a shard of ``numel`` elements in an accelerator's memory takes beside it."""
    return min(numel, RESIDENT_NUMEL) * _TEMPORARIES * 4


def _root(x: Tensor) -> Tensor:
    """The correctly rounded square root; see [Note: two forms of a rule]."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.sqrt(x.numpy()))
    return x.sqrt() if rounds_roots(x.device) else _root_in_float64(x)


def _root_in_float64(x: Tensor) -> Tensor:
    return x.double().sqrt_().float()


class AdamWRule:
    """AdamW over flat shards.

    Args:
        dtype: Compute dtype of the weights: bfloat16, float16 or float32.
        threads: CPU threads of one update; None for half of the rank's, which suits a thread that works
            beside training.
        callers: Threads that may update at one time. Several take larger slices and keep all cores busy
            together: handing many small ones to every core would take longer than their update.
    """

    def __init__(self, dtype: torch.dtype, *, threads: int | None = None, callers: int = 1) -> None:
        self.layout, self.callers = StateLayout.of(dtype), callers
        self.threads = threads or background_threads()
        self._least = LEAST_NUMEL if callers == 1 else _LEAST_BESIDE

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
                kernels.run(loop, tensors, self.threads, tuple(hyper.numpy()), in_place, least=self._least)
                return
        with torch.no_grad():
            adamw_by_torch(weight, grad, state, weight_out, hyper)


class DeviceRule:
    """AdamW over flat shards in page-locked host memory, on an accelerator; for one thread at a time.

    See [Note: updates of host memory on an accelerator].

    Args:
        dtype: As for :class:`AdamWRule`.
        device: The accelerator.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.layout, self.device, self.callers = StateLayout.of(dtype), device, 1
        self._streams = torch.Stream(device), torch.Stream(device)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes of the accelerator's memory."""
        piece = self.layout.weight_nbytes(1) + 4 + self.layout.state_nbytes(1)
        return len(self._streams) * (_DEVICE_NUMEL * piece + _PIECE_NUMEL * _TEMPORARIES * 4)

    @torch.no_grad()
    def update(
        self, weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], weight_out: Tensor, hyper: Tensor
    ) -> None:
        """Update ``n`` elements as :meth:`AdamWRule.update` does; blocks until they are back."""
        try:
            for number, begin in enumerate(range(0, weight.numel(), _DEVICE_NUMEL)):
                part, turn = slice(begin, begin + _DEVICE_NUMEL), number % len(self._streams)
                with self._streams[turn]:
                    sources = [each[part] for each in (weight, grad, *state)]
                    there = [each.to(self.device, non_blocking=True) for each in sources]
                    adamw_on_device(there[0], there[1], tuple(there[2:]), hyper)
                    for target, value in zip((weight_out, *state), (there[0], *there[2:]), strict=True):
                        target[part].copy_(value, non_blocking=True)
        finally:
            for stream in self._streams:
                stream.synchronize()


Rule = AdamWRule | DeviceRule


@functools.cache
def measure_rates(dtype: torch.dtype, device: torch.device, threads: int) -> tuple[float, float]:
    """Return the elements that an update in host memory does in a second: on the CPU, and on ``device``.

    Takes some tenths of a second, once in a process.

    Args:
        threads: Of the CPU.
    """
    layout = StateLayout.of(dtype)
    numel = 2 * _DEVICE_NUMEL
    sizes = [numel * each for each in (dtype.itemsize, dtype.itemsize, layout.state_itemsize)]
    buffers = [HostBuffer(rounded(size), device) for size in sizes]
    try:
        weight, grad, memory = (each.tensor[:size].zero_() for each, size in zip(buffers, sizes, strict=True))
        state = layout.views(memory, numel)
        rates = []
        for rule in (AdamWRule(dtype, threads=threads), DeviceRule(dtype, device)):
            best_s = math.inf
            for _ in range(_TRIES):  # the first compiles, and allocates
                began_s = time.perf_counter()
                rule.update(
                    weight.view(dtype), grad.view(dtype), state, weight.view(dtype), Hyper(lr=0).tensor()
                )
                best_s = min(best_s, time.perf_counter() - began_s)
            rates.append(numel / best_s)
    finally:
        for each in buffers:
            each.close()
    return rates[0], rates[1]


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
