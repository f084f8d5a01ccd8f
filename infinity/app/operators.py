"""Times of a model's operators on this machine: each is run alone, on tensors of its sizes.

A roofline knows an operator's flops and bytes, but not how well this machine's kernels reach them. A model
has some dozens of operators that differ, whatever the number of its layers, so all are timed in some seconds.
Values do not matter: floats are halves, and integers are zeros, which are valid indices. Without an
accelerator caches are emptied before each run: of what a step saves for backward, and of weights that drives
have written, nothing is left there. One thread's time is that of its processor, which other programs do not
change.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from infinity.device.accelerator import synchronize
from infinity.device.machine import free_host_nbytes, usable_cores

#: An operator is run so often, but stops when it has taken so long (s).
_RUNS, _MOST_S = 3, 0.2
#: What is written between two runs, so that caches hold nothing of the first (bytes).
_CACHES_NBYTES = 48 * 2**20
#: One whose arguments take more than this part of the free memory is not run: its results take some, too.
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


def _nbytes(value: Any) -> int:
    """Bytes of the tensors in ``value``."""
    if isinstance(value, TensorShape):
        return math.prod(value.shape) * value.dtype.itemsize
    return sum(map(_nbytes, value)) if isinstance(value, tuple) else 0


def _thawed(value: Any, device: torch.device) -> Any:
    if isinstance(value, TensorShape):
        return value.make(device)
    if isinstance(value, tuple):
        return tuple(_thawed(each, device) for each in value)
    return device if value is torch.device else value


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
        self._times: dict[Operation | None, float] = {None: math.nan}

    @classmethod
    def of_rank(cls, local_ranks: int, threads: int | None = None) -> "OperatorTimes":
        """Those of a rank that shares this machine with others.

        Args:
            local_ranks: On this machine.
            threads: On which it computes; None: one for each of its cores.
        """
        found = torch.accelerator.current_accelerator(check_available=True)
        return cls(found or torch.device("cpu"), threads or max(1, usable_cores() // local_ranks))

    def measure(self, operations: Iterable[Operation | None]) -> None:
        """Run those of ``operations`` that are not known yet."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            with unset_fake_temporarily(), torch.no_grad():  # fake tensors would take no time
                for each in dict.fromkeys(operations):
                    if each is not None and each not in self._times:
                        self._times[each] = _time_s(each, self._device, self._clock)
        finally:
            torch.set_num_threads(before)

    def of(self, operation: Operation | None) -> float:
        """Return the seconds of one that was measured; not a number: it cannot be run alone."""
        return self._times[operation]


def _time_s(operation: Operation, device: torch.device, clock: Callable[[], float]) -> float:
    """The median of some runs; the first, which makes kernels ready, does not count."""
    if _nbytes(operation.args) + _nbytes(operation.kwargs) > free_host_nbytes() // _LEAST_FREE:
        return math.nan
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
    except (RuntimeError, TypeError, IndexError):  # it looks at values, or does not fit memory
        return math.nan
    return statistics.median(taken_s[1:])
