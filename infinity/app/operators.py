"""Times of a model's operators on this machine: each is run alone, on tensors of the sizes that it is given.

A roofline knows an operator's flops and bytes, but not how well this machine's kernels reach them. A model
has some dozens of operators that differ, whatever the number of its layers, so all are timed in some seconds.
Values do not matter: floats are halves, and integers are zeros, which are valid indices. Without an
accelerator 48 MiB are written before each run: in a step, too, caches hold little of what forward saved, and
of weights that drives have written. One thread's time is that of its processor, which other programs do not
change.

In a model that is large for this machine operators take minutes, or more memory than there is. The large ones
are left to the roofline, which knows them best.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from infinity.device.accelerator import memory_nbytes, synchronize
from infinity.device.machine import free_host_nbytes, usable_cores

#: An operator is run so often, but stops when it has taken so long (s).
_RUNS, _MOST_S = 3, 0.2
#: What is written between two runs, so that caches hold nothing of the first (bytes).
_CACHES_NBYTES = 48 * 2**20
#: One that the roofline gives more time is not run (s); nor is any one after so many seconds in all.
_EXPECTED_S, _IN_ALL_S = 1.0, 10.0
#: Nor one that reads and writes more than this part of the free memory.
_LEAST_FREE = 4
#: Types of arguments that are written down as they are.
_PLAIN = (int, float, bool, str, complex, type(None), torch.dtype, torch.layout, torch.memory_format)


class TensorShape(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self, device: torch.device) -> Tensor:
        """Return such a tensor; see the module's docstring for its values."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        return made.fill_(0.5 if self.dtype.is_floating_point else 0)


class Operation(NamedTuple):
    """A call of an operator: equal ones take equally long.

    Attributes:
        args: Nested tuples, with a :class:`TensorShape` for each tensor; ``kwargs`` by name.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> "Operation | None":
        """Return the call without values; None: it has arguments that cannot be made again."""
        try:
            return cls(func, _frozen(args), tuple((name, _frozen(kwargs[name])) for name in sorted(kwargs)))
        except TypeError:
            return None


def _frozen(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise TypeError
        return TensorShape(tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(_frozen(each) for each in value)
    if isinstance(value, torch.device):
        return torch.device  # the one that is timed
    if isinstance(value, _PLAIN):
        return value
    raise TypeError


def _thawed(value: Any, device: torch.device) -> Any:
    if isinstance(value, TensorShape):
        return value.make(device)
    if isinstance(value, tuple):
        return tuple(_thawed(each, device) for each in value)
    return device if value is torch.device else value


class Candidate(NamedTuple):
    """An operation that may be timed, and what it is expected to take.

    Attributes:
        operation: None: it cannot be repeated.
        expected_s: By the roofline.
        nbytes: That it reads and writes.
    """

    operation: Operation | None
    expected_s: float
    nbytes: float


class OperatorTimes:
    """Times of operators, each measured once.

    Args:
        device: Where they run.
        threads: Of torch, if the cores compute.
    """

    def __init__(self, device: torch.device, threads: int) -> None:
        self._device, self._threads = device, threads
        on_one_thread = device.type == "cpu" and threads == 1
        self._clock = time.thread_time if on_one_thread else time.perf_counter
        self._left_s = _IN_ALL_S
        self._times: dict[Operation | None, float] = {None: math.nan}

    @classmethod
    def of_rank(cls, local_ranks: int, threads: int | None = None) -> "OperatorTimes":
        """Those of a rank that shares this machine with others.

        Args:
            local_ranks: On this machine.
            threads: On which it computes; None: one for each of its cores.
        """
        found = torch.accelerator.current_accelerator(check_available=True)
        cores = usable_cores()
        return cls(found or torch.device("cpu"), min(threads or max(1, cores // local_ranks), cores))

    def measure(self, calls: Iterable[Candidate]) -> None:
        """Run the operations of ``calls`` that are not known yet, as far as they take little."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        most_nbytes = _free_nbytes(self._device) // _LEAST_FREE
        try:
            # Fake tensors would take no time. Random numbers are drawn as if none had been here.
            with unset_fake_temporarily(), torch.no_grad(), _random_state(self._device):
                for operation, expected_s, nbytes in calls:
                    if operation is None or operation in self._times:
                        continue
                    began_s = time.perf_counter()
                    small = expected_s <= _EXPECTED_S and nbytes <= most_nbytes and self._left_s > 0
                    time_s = _time_s(operation, self._device, self._clock) if small else math.nan
                    self._times[operation] = time_s
                    self._left_s -= time.perf_counter() - began_s
        finally:
            torch.set_num_threads(before)

    def of(self, operation: Operation | None) -> float:
        """Return the seconds of one that was measured; not a number: it cannot be run alone."""
        return self._times[operation]


def _free_nbytes(device: torch.device) -> int:
    return free_host_nbytes() if device.type == "cpu" else memory_nbytes(device)[0]


def _random_state(device: torch.device) -> AbstractContextManager[None]:
    """Keep the state of torch's random numbers."""
    if device.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([torch.accelerator.current_device_index()], device_type=device.type)


def _time_s(operation: Operation, device: torch.device, clock: Callable[[], float]) -> float:
    """The median of some runs; the first, which makes kernels ready, does not count."""
    try:
        args, kwargs = _thawed(operation.args, device), _thawed(operation.kwargs, device)
        others = torch.ones(_CACHES_NBYTES if device.type == "cpu" else 0, dtype=torch.uint8, device="cpu")
        taken_s: list[float] = []
        began_s = time.perf_counter()
        while len(taken_s) <= _RUNS and (len(taken_s) < 2 or time.perf_counter() - began_s < _MOST_S):
            others.add_(1)
            synchronize(device)
            at_s = clock()
            operation.func(*args, **dict(kwargs))
            synchronize(device)
            taken_s.append(clock() - at_s)
    except Exception:  # any operator's own: it looks at values, or does not fit memory
        return math.nan
    return statistics.median(taken_s[1:])
