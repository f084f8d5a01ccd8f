"""Stand-ins for tensors that know from where each of their elements comes.

[Note: conversions as byte ranges]
transformers renames and reshapes tensors on load: experts of a layer are stacked into one parameter,
a fused matrix is cut into query, key and value. Its operations are run once on stand-ins. What comes
out says, run by run, which elements of which stored tensors follow each other in the parameter, so any
range of it can be read without the rest. An operation that takes elements apart (a transposed last
dimension), or does arithmetic, raises :class:`UntraceableError`.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infinity.checkpoint.directory import Stored

#: More runs than this are not worth the memory: the parameter is converted as a whole.
MOST_RUNS = 2**18


class UntraceableError(Exception):
    """An operation does more than put runs of elements in another order."""


class Run(NamedTuple):
    """``numel`` elements from ``start`` on are those of ``source`` from ``offset`` on."""

    start: int
    source: Stored
    offset: int
    numel: int


class Traced:
    """A tensor of a shape, as runs of elements of stored tensors.

    Args:
        shape: Its shape.
        runs: In order, without gaps, from element 0 to the last.
    """

    def __init__(self, shape: Sequence[int], runs: list[Run]) -> None:
        self.shape, self.runs = torch.Size(shape), runs

    @classmethod
    def whole(cls, source: Stored) -> "Traced":
        """All of ``source``, in its own shape."""
        return cls(source.shape, [Run(0, source, 0, source.shape.numel())])

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Of the stored tensors."""
        return {run.source.dtype for run in self.runs}

    def fill(self, start: int, out: Tensor) -> None:
        """See :class:`infinity.checkpoint.directory.Stored`."""
        for run in self.cut(start, len(out)):
            run.source.fill(run.offset, out[run.start : run.start + run.numel])

    def cut(self, start: int, numel: int) -> Iterable[Run]:
        """The runs of ``numel`` flat elements from ``start`` on, counted from there."""
        at = bisect_right(self.runs, start, key=lambda run: run.start) - 1
        stop = start + numel
        while start < stop:
            run = self.runs[at]
            taken = min(stop, run.start + run.numel) - start
            if taken:
                yield Run(start - stop + numel, run.source, run.offset + start - run.start, taken)
            start, at = start + taken, at + 1

    # --- what conversions call ---------------------------------------------------------------

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = _OPERATIONS.get(func)
        if operation is None:
            raise UntraceableError(getattr(func, "__name__", str(func)))
        return operation(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        raise UntraceableError(name)

    def __getitem__(self, index: Any) -> "Traced":
        if index is not Ellipsis:
            raise UntraceableError("indexing")
        return self

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def contiguous(self) -> "Traced":
        return self

    def reshape(self, *shape: Any) -> "Traced":
        sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        if -1 in sizes:
            sizes[sizes.index(-1)] = self.numel() // -math.prod(sizes)
        if math.prod(sizes) != self.numel():
            raise ValueError(f"a tensor of shape {tuple(self.shape)} has no shape {tuple(sizes)}")
        return Traced(sizes, self.runs)

    view = reshape

    def squeeze(self, dim: int) -> "Traced":
        sizes = list(self.shape)
        if sizes[dim] == 1:
            del sizes[dim]
        return Traced(sizes, self.runs)

    def unsqueeze(self, dim: int) -> "Traced":
        sizes = list(self.shape)
        sizes.insert(dim % (self.ndim + 1), 1)
        return Traced(sizes, self.runs)

    def chunk(self, chunks: int, dim: int = 0) -> tuple["Traced", ...]:
        return self.split(-(-self.shape[dim] // chunks), dim)

    def split(self, sizes: Any, dim: int = 0) -> tuple["Traced", ...]:
        dim, total = dim % self.ndim, self.shape[dim]
        if isinstance(sizes, int):
            sizes = [min(sizes, total - begin) for begin in range(0, total, sizes)]
        if sum(sizes) != total:
            raise ValueError(f"dimension {dim} of {tuple(self.shape)} cannot be split into {sizes}")
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(self._narrow(dim, begin, size) for begin, size in zip(begins, sizes, strict=True))

    def _narrow(self, dim: int, begin: int, size: int) -> "Traced":
        outer, width = math.prod(self.shape[:dim]), math.prod(self.shape[dim + 1 :])
        step = self.shape[dim] * width
        places = ((o * step + begin * width, size * width) for o in range(outer))
        return Traced(
            (*self.shape[:dim], size, *self.shape[dim + 1 :]), _joined((self, *at) for at in places)
        )

    def transpose(self, dim0: int, dim1: int) -> "Traced":
        low, high = sorted((dim0 % self.ndim, dim1 % self.ndim))
        if high == self.ndim - 1 and low != high:
            raise UntraceableError("the last dimension is transposed")
        order = list(range(high + 1))
        order[low], order[high] = high, low
        inner = math.prod(self.shape[high + 1 :])
        strides = [math.prod(self.shape[d + 1 :]) for d in range(high + 1)]
        starts = [0]
        for d in order:
            _check_count(len(starts) * self.shape[d])
            starts = [start + i * strides[d] for start in starts for i in range(self.shape[d])]
        sizes = [self.shape[d] for d in order]
        return Traced((*sizes, *self.shape[high + 1 :]), _joined((self, start, inner) for start in starts))


def _cat(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    first = tensors[0].shape
    dim %= len(first)
    for other in tensors:
        if other.shape[:dim] != first[:dim] or other.shape[dim + 1 :] != first[dim + 1 :]:
            shapes = ", ".join(str(tuple(each.shape)) for each in tensors)
            raise ValueError(f"tensors of shapes {shapes} cannot be joined along dimension {dim}")
    widths = [math.prod(each.shape[dim:]) for each in tensors]
    outer = math.prod(first[:dim])
    parts = ((each, o * w, w) for o in range(outer) for each, w in zip(tensors, widths, strict=True))
    length = sum(each.shape[dim] for each in tensors)
    return Traced((*first[:dim], length, *first[dim + 1 :]), _joined(parts))


def _stack(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    return _cat([each.unsqueeze(dim) for each in tensors], dim)


def _joined(parts: Iterable[tuple[Traced, int, int]]) -> list[Run]:
    """The runs of parts (a tensor, its first element, a number of elements) laid end to end."""
    runs: list[Run] = []
    at = 0
    for tensor, start, numel in parts:
        for run in tensor.cut(start, numel):
            last = runs[-1] if runs else None
            if last and last.source is run.source and last.offset + last.numel == run.offset:
                runs[-1] = last._replace(numel=last.numel + run.numel)
            else:
                runs.append(run._replace(start=at))
            at += run.numel
        _check_count(len(runs))
    return runs


def _check_count(runs: int) -> None:
    if runs > MOST_RUNS:
        raise UntraceableError(f"more than {MOST_RUNS} runs of elements")


_OPERATIONS: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.concat: _cat,
    torch.stack: _stack,
    torch.chunk: Traced.chunk,
    torch.split: Traced.split,
    torch.reshape: Traced.reshape,
    torch.squeeze: Traced.squeeze,
    torch.unsqueeze: Traced.unsqueeze,
    torch.transpose: Traced.transpose,
}
