"""Times of a model's operators on this machine: each is run alone, on tensors of the sizes that it is given.

A roofline knows an operator's flops and bytes, but not how well this machine's kernels reach them. A model
has some dozens of operators that differ, whatever the number of its layers, so all are timed in some seconds.
Values do not matter: floats are halves, and integers are zeros, which are valid indices. All are timed in
rounds, one after the other, so that a machine that changes its speed changes it for all; a time is the median
of its rounds. One thread's time is that of its processor, which other programs do not change. What was timed
once holds for all plans of a process.

[Note: what caches hold]
Without an accelerator an operator takes two to five times as long on bytes that no cache holds. Of each
argument it is known how many bytes the step touches between its last use and this one. Before a run the
argument is touched, and so many other bytes after it: what caches hold then is what they hold in the step,
however large they are.

In a model that is large for this machine operators take minutes, or more memory than there is. The large ones
are left to the roofline, which knows them best.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from infinity.device.accelerator import memory_nbytes, synchronize
from infinity.device.machine import free_host_nbytes, usable_cores

#: An operator is run so often, and once before that; the large ones until all have taken so long (s).
_ROUNDS, _IN_ALL_S = 9, 8.0
#: One that the roofline gives more time is not run (s).
_EXPECTED_S = 1.0
#: Bytes that are touched between two uses of an argument; exact values would make all operations differ.
_AGES = tuple(2**n for n in range(14, 26, 2))
#: Of an argument that no cache holds (bytes).
COLD = 48 * 2**20
#: Nor one that reads and writes more than this part of the free memory.
_LEAST_FREE = 4
#: Types of arguments that are written down as they are.
_PLAIN = (int, float, bool, str, complex, type(None), torch.dtype, torch.layout, torch.memory_format)


class TensorShape(NamedTuple):
    """A tensor without its values.

    Attributes:
        age: Bytes that were touched since its last use: see [Note: what caches hold].
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    age: int = COLD

    def make(self, device: torch.device) -> Tensor:
        """Return such a tensor; see the module's docstring for its values."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        return made.fill_(0.5 if self.dtype.is_floating_point else 0)


class Touches:
    """Knows of each storage of a step how many bytes were touched since its last use."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._last: dict[int, int] = {}

    def age(self, tensor: Tensor) -> int:
        """Return one of a few ages, the nearest above."""
        last = self._last.get(tensor.untyped_storage()._cdata)
        age = COLD if last is None else self._nbytes - last
        return next((each for each in _AGES if age <= each), COLD)

    def note(self, tensors: Iterable[Tensor]) -> None:
        """An operator has read or written these."""
        for tensor in tensors:
            self._nbytes += tensor.numel() * tensor.itemsize
            self._last[tensor.untyped_storage()._cdata] = self._nbytes


class Operation(NamedTuple):
    """A call of an operator: equal ones take equally long.

    Attributes:
        args: Nested tuples, with a :class:`TensorShape` for each tensor; ``kwargs`` by name.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    @classmethod
    def of(
        cls, func: Any, args: Any, kwargs: dict[str, Any], age: Callable[[Tensor], int] = lambda tensor: COLD
    ) -> "Operation | None":
        """Return the call without values; None: it has arguments that cannot be made again.

        Args:
            age: Gives the age of a tensor.
        """
        try:
            named = tuple((name, _frozen(kwargs[name], age)) for name in sorted(kwargs))
            return cls(func, _frozen(args, age), named)
        except TypeError:
            return None


def _frozen(value: Any, age: Callable[[Tensor], int]) -> Any:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise TypeError
        return TensorShape(tuple(value.shape), value.stride(), value.dtype, age(value))
    if isinstance(value, list | tuple):
        return tuple(_frozen(each, age) for each in value)
    if isinstance(value, torch.device):
        return torch.device  # the one that is timed
    if isinstance(value, _PLAIN):
        return value
    raise TypeError


def _thawed(value: Any, device: torch.device, made: list[tuple[int, Tensor]]) -> Any:
    """Return the value; tensors are added to ``made``, with their ages."""
    if isinstance(value, TensorShape):
        made.append((value.age, value.make(device)))
        return made[-1][1]
    if isinstance(value, tuple):
        return tuple(_thawed(each, device, made) for each in value)
    return device if value is torch.device else value


class Candidate(NamedTuple):
    """An operation that may be timed, and what it is expected to take.

    Attributes:
        operation: The operation; None: it cannot be repeated.
        expected_s: The time by the roofline (s).
        nbytes: Bytes that it reads and writes.
    """

    operation: Operation | None
    expected_s: float
    nbytes: float


class OperatorTimes:
    """Times of operators, each measured once.

    Args:
        device: The device on which they run.
        threads: Threads of torch, if the cores compute.
    """

    def __init__(self, device: torch.device, threads: int) -> None:
        self._device, self._threads = device, threads
        on_one_thread = device.type == "cpu" and threads == 1
        self._clock = time.thread_time if on_one_thread else time.perf_counter
        self._times: dict[Operation, float] = {}

    @classmethod
    def of_rank(cls, local_ranks: int, threads: int | None = None) -> "OperatorTimes":
        """Return those of a rank that shares this machine with others, as far as this process knows them.

        Args:
            local_ranks: Ranks on this machine.
            threads: Threads on which the rank computes; None: one for each of its cores.
        """
        found = torch.accelerator.current_accelerator(check_available=True)
        cores = usable_cores()
        return _known(found or torch.device("cpu"), min(threads or max(1, cores // local_ranks), cores))

    def measure(self, calls: Iterable[Candidate]) -> None:
        """Run the operations of ``calls`` that are not known yet, as far as they take little."""
        most_nbytes = _free_nbytes(self._device) // _LEAST_FREE
        small: dict[Operation, list[float]] = {}
        for operation, expected_s, nbytes in calls:
            if operation is not None and operation not in self._times:
                self._times[operation] = math.nan
                if expected_s <= _EXPECTED_S and nbytes <= most_nbytes:
                    small[operation] = []
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            # Fake tensors would take no time. Random numbers are drawn as if none had been here.
            with unset_fake_temporarily(), torch.no_grad(), _random_state(self._device):
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
                    taken_s.append(_time_s(operation, self._device, self._clock, others))
                except Exception:  # any operator's own: it looks at values, or does not fit memory
                    del operations[operation]

    def of(self, operation: Operation | None) -> float:
        """Return the seconds of one that was measured; not a number: it cannot be run alone."""
        return math.nan if operation is None else self._times.get(operation, math.nan)


@functools.cache
def _known(device: torch.device, threads: int) -> OperatorTimes:
    return OperatorTimes(device, threads)


def _free_nbytes(device: torch.device) -> int:
    return free_host_nbytes() if device.type == "cpu" else memory_nbytes(device)[0]


def _random_state(device: torch.device) -> AbstractContextManager[None]:
    """Keep the state of torch's random numbers."""
    if device.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([torch.accelerator.current_device_index()], device_type=device.type)


def _time_s(operation: Operation, device: torch.device, clock: Callable[[], float], others: Tensor) -> float:
    """Seconds of one run.

    Args:
        others: Memory that is touched meanwhile: see [Note: what caches hold]; empty on an accelerator.
    """
    made: list[tuple[int, Tensor]] = []
    args, kwargs = _thawed(operation.args, device, made), _thawed(operation.kwargs, device, made)
    if len(others):
        _age(made, others)
    synchronize(device)
    began_s = clock()
    operation.func(*args, **dict(kwargs))
    synchronize(device)
    return clock() - began_s


def _age(made: Sequence[tuple[int, Tensor]], others: Tensor) -> None:
    """Touch tensors, the oldest first, and other memory after each, so that all become as old as they are."""
    ages = sorted(made, key=lambda each: -each[0])
    for (age, tensor), (following, _) in pairwise([*ages, (0, others)]):
        if age < COLD:
            others.new_empty(0).set_(tensor.untyped_storage()).add_(0)  # also what a view leaves out
        others[: age - following].add_(1)
