"""Interval arithmetic of resharding: which ranges of one layout make up a range of another.

All ranges count elements and are half open. A *line* is a sequence of elements that lie end to end: a unit's
flat buffer, or a parameter in row-major order. A shard is one rank's equal slice of a unit's line.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """Describes elements ``[start, stop)`` of a line, and what lies there."""

    source: Hashable
    start: int
    stop: int


class ShardPiece(NamedTuple):
    """Describes elements ``[start, stop)`` of the shard that ``rank`` has of ``unit``."""

    unit: int
    rank: int
    start: int
    stop: int
    target: int  # their place in the range that was asked for, counted from its first element


class Box(NamedTuple):
    """Describes an N-dimensional part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def stops(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def shard_pieces(
    start: int, stop: int, new: Sequence[Span], old: Mapping[Hashable, tuple[int, int]], numels: Sequence[int]
) -> Iterator[ShardPiece]:
    """Yield in order the pieces of old shards that make up ``[start, stop)`` of a new unit's flat buffer.

    The number of ranks and the division into units may differ. Padding gives nothing.

    Args:
        new: Parameters of the new unit, where they lie in its flat buffer, ascending, without overlap.
        old: The old unit of each parameter, by the same sources, and its first element there.
        numels: Elements of one rank's shard, by old unit.
    """
    for source, first, last in new:
        low, high = max(start, first), min(stop, last)
        if low >= high:
            continue
        unit, offset = old[source]
        shift, numel = offset - first, numels[unit]
        while low < high:
            rank, begin = divmod(low + shift, numel)
            end = min(numel, begin + high - low)
            yield ShardPiece(unit, rank, begin, end, low - start)
            low += end - begin


def boxes(shape: Sequence[int], start: int, stop: int, most: int | None = None) -> Iterator[Box]:
    """Cut elements ``[start, stop)`` of a row-major tensor into the fewest contiguous boxes, in order.

    At most ``2 * len(shape) - 1`` boxes, unless a box may have only ``most`` elements.
    """
    most = max(1, stop - start if most is None else most)
    inner = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if not shape and start < stop:
        yield Box((), ())
    while shape and start < stop:
        room = min(most, stop - start)
        # The outermost dimension of which whole rows begin here and fit.
        dim = next(d for d, numel in enumerate(inner) if start % numel == 0 and room >= numel)
        offsets = [start // numel % size for numel, size in zip(inner, shape, strict=True)]
        rows = min(room // inner[dim], shape[dim] - offsets[dim])
        yield Box(tuple(offsets), (*(1 for _ in range(dim)), rows, *shape[dim + 1 :]))
        start += rows * inner[dim]


def overlap(one: Box, other: Box) -> Box | None:
    """Return the box that two boxes of one tensor share, or None."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    stops = map(min, one.stops, other.stops)
    sizes = tuple(stop - offset for stop, offset in zip(stops, offsets, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def flat_offset(offsets: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the index of the element at ``offsets`` of a row-major tensor of shape ``sizes``."""
    at = 0
    for offset, size in zip(offsets, sizes, strict=True):
        at = at * size + offset
    return at
