"""Measures the times of a model's operators on this machine, each alone, on tensors of its own sizes.

A roofline does not know how close this machine's kernels come to it. A model has some dozens of different
operators, whatever the number of its layers, so all are timed in some seconds, but those that take long or
much memory, which the roofline knows best. Floats are halves, and integers are zeros, which are valid
indices. Operators take turns in rounds, so that a change of the machine's speed hits all; a time is the
median of its rounds. One thread's time is its processor time, which other programs do not change.

[Note: what caches hold]
Without an accelerator an operator takes two to five times as long on bytes that no cache holds. The step
tells how many bytes are touched between the last use of an argument and this one. So before a run the
argument is touched, and so many other bytes after it.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from infinity.device.accelerator import memory_nbytes, synchronize
from infinity.device.machine import free_host_nbytes, usable_cores

#: Timed runs of an operator, after one untimed; large ones run until all have taken so long (s).
_ROUNDS, _IN_ALL_S = 9, 8.0
#: An operator with a longer roofline time is not run (s).
_EXPECTED_S = 1.0
#: Ages (bytes touched between two uses of an argument): few, since exact ones would make all calls differ.
_AGES = tuple(2**n for n in range(14, 26, 2))
#: Age of an argument that no cache holds (bytes).
COLD = 48 * 2**20
#: An operator that moves more than this part of the free memory is not run.
_LEAST_FREE = 4
#: Types of arguments that are recorded as they are.
_PLAIN = (int, float, bool, str, complex, type(None), torch.dtype, torch.layout, torch.memory_format)


class TensorShape(NamedTuple):
    """Describes a tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    age: int = COLD  # bytes that were touched since its last use: see [Note: what caches hold]

    def make(self, device: torch.device) -> Tensor:
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        return made.fill_(0.5 if self.dtype.is_floating_point else 0)


class Touches:
    """Counts, for each storage of a step, the bytes that were touched since its last use."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._last: dict[int, int] = {}

    def age(self, tensor: Tensor) -> int:
        """Return the bytes touched since the tensor's last use, rounded up to one of a few ages."""
        last = self._last.get(tensor.untyped_storage()._cdata)
        age = COLD if last is None else self._nbytes - last
        return next((each for each in _AGES if age <= each), COLD)

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Note that an operator has read or written these tensors."""
        for tensor in tensors:
            self._nbytes += tensor.numel() * tensor.itemsize
            self._last[tensor.untyped_storage()._cdata] = self._nbytes


@dataclass(frozen=True, slots=True)
class Operation:
    """Describes a call of an operator; equal ones take equally long."""

    func: Any
    leaves: tuple[Any, ...]  # of the arguments, with a :class:`TensorShape` for each tensor
    spec: TreeSpec = field(hash=False)  # how they are nested

    @classmethod
    def of(
        cls, func: Any, args: Any, kwargs: dict[str, Any], age: Callable[[Tensor], int] = lambda tensor: COLD
    ) -> "Operation | None":
        """Return the call without values; None: it has arguments that cannot be made again."""
        given, spec = tree_flatten((tuple(args), kwargs))
        leaves: list[Any] = []
        for leaf in given:
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                leaves.append(TensorShape(tuple(leaf.shape), leaf.stride(), leaf.dtype, age(leaf)))
            elif isinstance(leaf, torch.device):
                leaves.append(torch.device)  # the one that is timed
            elif isinstance(leaf, _PLAIN):
                leaves.append(leaf)
            else:
                return None
        return cls(func, tuple(leaves), spec)

    def time_s(self, device: torch.device, clock: Callable[[], float], others: Tensor) -> float:
        """Run it once, on arguments aged by ``others`` (empty on an accelerator); return seconds."""
        made = [leaf.make(device) if isinstance(leaf, TensorShape) else leaf for leaf in self.leaves]
        ages = [(a.age, b) for a, b in zip(self.leaves, made, strict=True) if isinstance(a, TensorShape)]
        ages.sort(key=lambda each: -each[0])
        given = [device if leaf is torch.device else leaf for leaf in made]
        args, kwargs = tree_unflatten(given, self.spec)
        # Each argument is brought to its age by touching others.
        for (age, tensor), (following, _) in pairwise([*ages, (0, others)]) if len(others) else ():
            if age < COLD:
                others.new_empty(0).set_(tensor.untyped_storage()).add_(0)  # also what a view leaves out
            others[: age - following].add_(1)
        synchronize(device)
        began_s = clock()
        self.func(*args, **kwargs)
        synchronize(device)
        return clock() - began_s


class OperatorTimes:
    """Measures operators on a device, each once; if the cores compute, on ``threads`` threads."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self._device, self._threads = device, threads
        on_one_thread = device.type == "cpu" and threads == 1
        self._clock = time.thread_time if on_one_thread else time.perf_counter
        self._times: dict[Operation, float] = {}

    def measure(self, calls: Iterable[tuple[Operation | None, float, float]]) -> None:
        """Measure the operations that are not known yet, except those that take long or much memory.

        Each comes with its time by the roofline (s), and the bytes that it moves.
        """
        device, on_cpu = self._device, self._device.type == "cpu"
        most_nbytes = (free_host_nbytes() if on_cpu else memory_nbytes(device)[0]) // _LEAST_FREE
        small: dict[Operation, list[float]] = {}
        for operation, expected_s, nbytes in calls:
            if operation is not None and operation not in self._times:
                self._times[operation] = math.nan
                if expected_s <= _EXPECTED_S and nbytes <= most_nbytes:
                    small[operation] = []
        others = () if on_cpu else (torch.accelerator.current_device_index(),)
        kind = {} if on_cpu else {"device_type": device.type}
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            # Fake tensors would take no time. Random numbers are drawn as if none had been here.
            with unset_fake_temporarily(), torch.no_grad(), torch.random.fork_rng(others, **kind):
                self._run_in_rounds(small)
        finally:
            torch.set_num_threads(before)
        for operation, taken_s in small.items():
            if taken_s:  # the first run, which makes kernels ready, counts where there is no other
                self._times[operation] = statistics.median(taken_s[1:] or taken_s)
            else:  # its turn did not come: the next plan tries again
                del self._times[operation]

    def _run_in_rounds(self, operations: dict[Operation, list[float]]) -> None:
        end_s = time.perf_counter() + _IN_ALL_S
        others = torch.ones(COLD if self._device.type == "cpu" else 0, dtype=torch.uint8, device="cpu")
        for _ in range(_ROUNDS + 1):
            for operation, taken_s in list(operations.items()):
                if time.perf_counter() > end_s:
                    return
                try:
                    taken_s.append(operation.time_s(self._device, self._clock, others))
                except Exception:  # any operator's own: it looks at values, or does not fit memory
                    del operations[operation]

    def of(self, operation: Operation | None) -> float:
        """Return the seconds of an operation; not a number: it cannot be run alone."""
        return math.nan if operation is None else self._times.get(operation, math.nan)


def times_of_rank(local_ranks: int, threads: int | None) -> OperatorTimes:
    """Return the times that this process has for one of ``local_ranks``; None: a thread for each core."""
    found = torch.accelerator.current_accelerator(check_available=True)
    cores = usable_cores()
    return _times_on(found or torch.device("cpu"), min(threads or max(1, cores // local_ranks), cores))


_times_on = functools.cache(OperatorTimes)
