"""Sizes in text (``8GiB``, ``1.5TB``), ranges of bytes and elements, and bytes in flight.

Submit, then wait: only :meth:`Transfer.wait` may fail.
"""

import math
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from types import TracebackType
from typing import NamedTuple, Protocol, TypeVar

from infinity.core.errors import copied

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_nbytes(text: str | int) -> int:
    """Return the bytes that ``text`` stands for: ``8GiB`` is 8 * 2**30, ``8GB`` is 8 * 10**9."""
    valid = isinstance(text, str | int) and not isinstance(text, bool)
    match = _PATTERN.fullmatch(str(text)) if valid else None
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write 8GiB, 512MiB or a number of bytes")
    return int(Decimal(match[1]) * _UNITS[match[2].upper()])


def format_nbytes(nbytes: float) -> str:
    """Return ``nbytes`` as text, in binary units with three digits."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(nbytes) < 1023.5:
            break
        nbytes, unit = nbytes / 1024, larger
    return f"{nbytes:.3g} {unit}" if unit != "B" and abs(nbytes) < 999.5 else f"{nbytes:.0f} {unit}"


#: Offsets and sizes of extents are multiples of this (bytes), as O_DIRECT wants on file systems that we met.
BLOCK_NBYTES = 4096
#: Size of a huge page (bytes).
HUGE_NBYTES = 2 * 2**20


@dataclass(frozen=True, slots=True)
class Piece:
    """Describes a contiguous byte range of one file of a volume."""

    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Describes a byte range that may lie on several drives, in the order of its bytes."""

    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def __add__(self, other: "Extent") -> "Extent":
        """Join this range and ``other`` after it; pieces that touch become one."""
        pieces = list(self.pieces)
        for piece in other.pieces:
            last = pieces[-1] if pieces else None
            if last and last.file == piece.file and last.offset + last.nbytes == piece.offset:
                pieces[-1] = Piece(last.file, last.offset, last.nbytes + piece.nbytes)
            else:
                pieces.append(piece)
        return Extent(tuple(pieces))

    def part(self, start: int, nbytes: int) -> "Extent":
        """Return ``nbytes`` of the range from its byte ``start`` on."""
        pieces: list[Piece] = []
        for piece in self.pieces:
            skip = min(piece.nbytes, start)
            take = min(piece.nbytes - skip, nbytes)
            if take:
                pieces.append(Piece(piece.file, piece.offset + skip, take))
            start, nbytes = start - skip, nbytes - take
        return Extent(tuple(pieces))


def aligned(nbytes: int, block: int = BLOCK_NBYTES) -> int:
    """Return ``nbytes`` rounded up to a multiple of ``block`` (bytes)."""
    return -(-nbytes // block) * block


def rounded(nbytes: int) -> int:
    """Return the bytes that a pool takes for a buffer of ``nbytes``: whole pages, huge from 2 MiB on."""
    return aligned(nbytes, HUGE_NBYTES if nbytes >= HUGE_NBYTES else BLOCK_NBYTES)


def rounded_sum(sizes: Iterable[int]) -> int:
    return sum(rounded(nbytes) for nbytes in sizes)


def whole_pages(nbytes: int) -> int:
    """Return the largest buffer that takes no more than ``nbytes`` of a pool."""
    grain = HUGE_NBYTES if nbytes >= HUGE_NBYTES else BLOCK_NBYTES
    return nbytes // grain * grain


def around(piece: Piece) -> Piece:
    """Return the smallest range of whole blocks that contains ``piece``."""
    offset = piece.offset // BLOCK_NBYTES * BLOCK_NBYTES
    return Piece(piece.file, offset, aligned(piece.offset + piece.nbytes) - offset)


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


def shard_ranges(start: int, stop: int, shard_numel: int) -> Iterator[tuple[int, int, int]]:
    """Yield rank, first and last element there of each part of ``[start, stop)`` of a flat buffer."""
    while start < stop:
        rank, begin = divmod(start, shard_numel)
        end = min(shard_numel, begin + stop - start)
        yield rank, begin, end
        start += end - begin


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


#: Waits are cut into slices, so that Ctrl-C gets through wherever the signal was delivered (s).
_SLICE_S = 0.5


class Transfer:
    """A move in flight, of any threads; once ended it holds neither what it moved nor calls that followed."""

    __slots__ = ("_calls", "_done", "_error", "_event", "_lock", "_traceback")

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._calls: list[Callable[[], object]] = []
        self._done = False
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._event: threading.Event | None = None  # made by the first that waits: most never do

    def wait(self) -> None:
        """Block until every byte has moved; raise what went wrong. May be called again, on any thread."""
        event = None
        with self._lock:
            if not self._done:
                event = self._event = self._event or threading.Event()
        while event is not None and not event.wait(_SLICE_S):
            self._while_waiting()
        if self._error is not None:
            # From where it was raised first: waiting adds nothing to it, and keeps no waiter's frame alive.
            raise copied(self._error).with_traceback(self._traceback)

    def _while_waiting(self) -> None:
        """Raise if the end will not come; called repeatedly while a thread waits."""

    def done(self) -> bool:
        """Return whether ``wait`` would return (or raise) at once."""
        return self._done

    def then(self, call: Callable[[], object]) -> None:
        """Run ``call``, which must not wait, when the move has ended, on the thread that ends it, or now."""
        with self._lock:
            if not self._done:
                self._calls.append(call)
                return
        call()

    def finish(self, error: BaseException | None = None) -> None:
        """End the transfer, wake all that wait, and run the calls that follow; only the first end counts."""
        with self._lock:
            if self._done:
                return
            self._error, self._traceback = error, error.__traceback__ if error else None
            self._done = True
            calls, self._calls = self._calls, []
            if self._event is not None:
                self._event.set()
        for call in calls:
            try:
                call()
            except Exception:  # the thread survives it
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))

    def run(self, call: Callable[[], object]) -> None:
        """Run ``call``, and end with its error; without the traceback, which keeps alive what was moved."""
        try:
            call()
        except BaseException as error:  # surfaces at wait
            self.finish(error.with_traceback(None))
        else:
            self.finish()


def chained(first: Transfer, begin: Callable[[], Transfer]) -> Transfer:
    """Return a transfer that ends with a second one, or with an error of either.

    ``begin`` starts the second when ``first`` has ended well, on the thread that saw that.
    """
    chain = Transfer()

    def go_on() -> None:
        try:
            first.wait()
            second = begin()
        except BaseException as error:  # surfaces at wait
            chain.finish(error)
        else:
            second.then(lambda: chain.run(second.wait))

    first.then(go_on)
    return chain


class TransferEngine(Protocol):
    """Moves bytes between extents and memory, and counts those of transfers that ended well; any thread."""

    @property
    def name(self) -> str: ...
    @property
    def nbytes_read(self) -> int: ...
    @property
    def nbytes_written(self) -> int: ...

    def read(self, extent: Extent, memory: memoryview, *, urgent: bool = False) -> Transfer:
        """Start reading ``extent`` into ``memory``; ``write`` has the same rules.

        ``extent`` is aligned to ``BLOCK_NBYTES``. ``memory`` is writable, page-aligned, of exactly
        ``extent.nbytes`` bytes, and stays alive and untouched until ``wait`` returns. ``urgent`` goes before
        requests that are queued but not yet with the kernel.
        """
        ...

    def write(self, extent: Extent, memory: memoryview) -> Transfer: ...

    def close(self) -> None: ...  # waits for what is in flight


P = TypeVar("P")
B = TypeVar("B")


def stream(
    pieces: Iterable[P], buffers: Iterable[B], read: Callable[[P, B], Transfer]
) -> Generator[tuple[P, B]]:
    """Yield pieces in order, each with the buffer that has it until the next, while the next ones are read.

    Close the generator before the buffers are given back, so that nothing is written to them any more.
    """
    left, free = iter(pieces), deque(buffers)
    reading: deque[tuple[P, B, Transfer]] = deque()
    try:
        while True:
            for piece in islice(left, len(free)):
                lease = free.popleft()
                reading.append((piece, lease, read(piece, lease)))
            if not reading:
                return
            piece, lease, transfer = reading[0]
            transfer.wait()
            yield piece, lease
            reading.popleft()
            free.append(lease)
    finally:
        for _, _, transfer in reading:
            with suppress(OSError):  # another error is on its way already
                transfer.wait()
