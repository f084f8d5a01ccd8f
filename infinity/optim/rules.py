"""Update rules over flat shards: a loop jitted by numba, elementwise torch on another device, a CUDA kernel.

[Note: two forms of a rule] The scalar function in :mod:`infinity.optim.kernels` and :meth:`UpdateRule.step`
have the same operations in the same order, each one that every implementation rounds correctly
(``+ - * /`` and the square root). So both give the same bits on the CPU, whole or in slices, on one thread or
many, in place or not. ``Tensor.sqrt`` on a CPU is not such an operation: it may come from a vector
library that is off by one in the last place in one case of six. NumPy's is, so the torch form takes that. On
an accelerator whose root is not known to be rounded correctly, the root in float64 gives the same bits: it
has more than twice as many. On CUDA the same operations are one kernel (:mod:`infinity.optim.rule`), since
the host would take longer to launch thirty than the accelerator to run them.

[Note: updates of host memory on an accelerator] :class:`DeviceRule` has the interface of :class:`HostRule`
for tensors in host memory. Pieces of them go to the accelerator and come back, on two streams in turn: while
one piece is updated, the next one goes there and the one before it comes back.
"""

import functools
import math
import time

import torch
from torch import Tensor

from infinity.core.budget import rounded
from infinity.device.memory import HostBuffer
from infinity.device.threads import LEAST_NUMEL, background_threads, compile_ahead
from infinity.optim.norm import sum_of_squares
from infinity.optim.rule import ADAMW, PIECE_NUMEL, UpdateRule

#: Temporaries of float32 that it has at one time.
_TEMPORARIES = 8
#: Elements that an update of host memory has on an accelerator at one time, on each of two streams.
_DEVICE_NUMEL = 2**20
_TRIES = 3
#: Elements of a slice where several threads update at one time: some ms of work.
_LEAST_BESIDE = 2**21
#: Elements of a shard in an accelerator's memory that are updated at one time.
RESIDENT_NUMEL = 2**22
#: A parameter group whose update changes no weight: for measuring, and to compile ahead.
IDLE = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


#: Every update rule, by the name that commit records give it.
RULES: dict[str, UpdateRule] = {rule.name: rule for rule in (ADAMW,)}
#: The name of the rule by which runs train.
DEFAULT = ADAMW.name


def default_rule() -> UpdateRule:
    """Return the rule by which runs train."""
    return RULES[DEFAULT]


def scratch_nbytes(numel: int) -> int:
    """Return what the update of a shard of ``numel`` elements in an accelerator's memory takes beside it."""
    return min(numel, RESIDENT_NUMEL) * _TEMPORARIES * 4


class HostRule:
    """An update rule over flat shards in host memory, on the CPU.

    Args:
        rule: Its arithmetic.
        dtype: Compute dtype of the weights: bfloat16, float16 or float32.
        threads: CPU threads of one update; None for half of the rank's, which suits a thread that works
            beside training.
        callers: Threads that may update at one time. Several take larger slices and keep all cores busy
            together: handing many small ones to every core would take longer than their update.
    """

    def __init__(
        self, rule: UpdateRule, dtype: torch.dtype, *, threads: int | None = None, callers: int = 1
    ) -> None:
        self.rule, self.layout, self.callers = rule, rule.layout(dtype), callers
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

            loop = self.rule.loop(weight.dtype)
            if loop is not None and (
                torch.float16 not in (weight.dtype, grad.dtype) or kernels.converts_half()
            ):
                tensors = (weight, grad, weight_out, *state)
                in_place = weight.data_ptr() == weight_out.data_ptr()
                kernels.run(loop, tensors, self.threads, tuple(hyper.numpy()), in_place, least=self._least)
                return
        with torch.no_grad():
            self.rule.update_by_torch(weight, grad, state, weight_out, hyper)


class DeviceRule:
    """An update rule over flat shards in page-locked host memory, on an accelerator.

    For one thread at a time; see [Note: updates of host memory on an accelerator].

    Args:
        rule: Its arithmetic, over weights of ``dtype``.
        device: The accelerator.
    """

    def __init__(self, rule: UpdateRule, dtype: torch.dtype, device: torch.device) -> None:
        self.rule, self.layout, self.device, self.callers = rule, rule.layout(dtype), device, 1
        self._streams = torch.Stream(device), torch.Stream(device)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes of the accelerator's memory."""
        piece = self.layout.weight_nbytes(1) + 4 + self.layout.state_nbytes(1)
        return len(self._streams) * (_DEVICE_NUMEL * piece + PIECE_NUMEL * _TEMPORARIES * 4)

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


@functools.cache
def measure_rates(
    rule: UpdateRule, dtype: torch.dtype, device: torch.device, threads: int
) -> tuple[float, float]:
    """Return the elements that an update in host memory does in a second: on the CPU, and on ``device``.

    Takes some tenths of a second, once in a process.

    Args:
        threads: Of the CPU.
    """
    layout = rule.layout(dtype)
    numel = 2 * _DEVICE_NUMEL
    sizes = [numel * each for each in (dtype.itemsize, dtype.itemsize, layout.state_itemsize)]
    buffers = [HostBuffer(rounded(size), device) for size in sizes]
    try:
        weight, grad, memory = (each.tensor[:size].zero_() for each, size in zip(buffers, sizes, strict=True))
        state = layout.views(memory, numel)
        rates = []
        numbers = rule.hyper(IDLE).tensor()
        for placed in (HostRule(rule, dtype, threads=threads), DeviceRule(rule, dtype, device)):
            best_s = math.inf
            for _ in range(_TRIES):  # the first compiles, and allocates
                began_s = time.perf_counter()
                placed.update(weight.view(dtype), grad.view(dtype), state, weight.view(dtype), numbers)
                best_s = min(best_s, time.perf_counter() - began_s)
            rates.append(numel / best_s)
    finally:
        for each in buffers:
            each.close()
    return rates[0], rates[1]


def prepare(rule: UpdateRule, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    """Compile all that training in ``dtype`` calls, or load it from numba's cache, in the background."""

    def call_all() -> None:
        from infinity.optim import kernels

        weight, grad = (
            torch.empty(0, dtype=dtype, device="cpu"),
            torch.empty(0, dtype=grad_dtype, device="cpu"),
        )
        state = rule.layout(dtype).complete((), 0)
        HostRule(rule, dtype).update(weight, grad, state, weight, rule.hyper(IDLE).tensor())
        sum_of_squares(grad)
        if dtype == torch.bfloat16:
            kernels.run(kernels.join_all, (weight, state[0], torch.empty(0, device="cpu")), 1)
            kernels.run(kernels.split_all, (torch.empty(0, device="cpu"), weight, state[0]), 1)

    compile_ahead((rule.name, dtype, grad_dtype), call_all)
