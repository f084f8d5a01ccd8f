"""Implements ``memory.verify``: compares every block that is read with the sum made when it was written.

[Note: sums of blocks]
Each block of 4,096 bytes in this rank's files has 32 bits in memory: 0 while its content is unknown, else the
sum of its content, its place and whose file it is. So swapped blocks are found, and writes that a drive
acknowledged and lost. A transfer ends when its sums are made, or compared, on threads beside the engine's.
Each commit keeps them for a process that resumes and for :func:`verify`. A checkpoint's own files have none.
"""

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from infinity.comm.ranks import ALONE
from infinity.core.errors import DamagedDataError, StateError
from infinity.core.nbytes import BLOCK_NBYTES, Extent, Piece, Transfer, TransferEngine, chained
from infinity.device.machine import background_threads
from infinity.nvme.volume import Volume, open_own
from infinity.shards.journal import CorruptJournalError, read_sums
from infinity.shards.saved import PART_NBYTES, SavedRank, find_saved, parts_of

Sums = Any  # numpy's, uint32, ``(blocks,)``

#: Words of a block are summed side by side in this many lanes.
_LANES = 64
#: Damaged places of one rank that are listed, at most.
_MOST_LISTED = 20


def salt_of(rank: int, drive: int) -> int:
    """Return the number that is mixed into the sums of a rank's file on a drive."""
    return rank * 4096 + drive


def sums_of(memory: memoryview, salt: int, first: int) -> Sums:
    """Return the sum of each block in ``memory``, whose first block is number ``first`` of its file."""
    from infinity.optim import kernels

    words = np.frombuffer(memory, np.uint32).reshape(-1, BLOCK_NBYTES // 4 // _LANES, _LANES)
    sums = np.empty(len(words), np.uint32)
    kernels.block_sums(words, salt, first, sums)
    return sums


def _different(found: Sums, wanted: Sums) -> Iterator[tuple[int, int]]:
    """Yield index and length of each run of blocks whose sum is known and differs."""
    known = wanted[: len(found)]
    bad = np.flatnonzero((found[: len(known)] != known) & (known != 0))
    for run in np.split(bad, np.flatnonzero(np.diff(bad) != 1) + 1):
        if len(run):
            yield int(run[0]), len(run)


class VerifiedEngine:
    """Keeps sums of what is written to files of a volume, and compares what is read. Any thread may call."""

    def __init__(self, engine: TransferEngine, volume: Volume) -> None:
        self._engine, self.name, self._path = engine, engine.name, volume.path
        self._threads = ThreadPoolExecutor(background_threads(), "infinity-verify")
        self._lock = threading.Lock()  # guards what follows
        self._files: dict[int, tuple[int, Sums]] = {}  # salt and sums, by number of the file
        volume.on_zeros = self.set_zeros

    def add(self, first: int, rank: int, drives: int) -> None:
        """Keep sums of a rank's files, from number ``first`` of the volume on; others are not checked."""
        with self._lock:
            for drive in range(drives):
                self._files[first + drive] = salt_of(rank, drive), np.zeros(0, np.uint32)

    def drop(self, first: int, count: int) -> None:
        with self._lock:
            for file in range(first, first + count):
                self._files.pop(file, None)

    def set(self, extent: Extent, memory: memoryview) -> None:
        for piece, salt, part in self._parts(extent, memory):
            first = piece.offset // BLOCK_NBYTES
            self.put(piece.file, first, sums_of(part, salt, first))

    def set_zeros(self, zeros: Piece) -> None:
        memory = memoryview(bytearray(min(zeros.nbytes, PART_NBYTES)))
        for part in parts_of(zeros):
            self.set(Extent((part,)), memory[: part.nbytes])

    def put(self, file: int, first: int, sums: Sums) -> None:
        with self._lock:
            if file not in self._files:
                return
            salt, known = self._files[file]
            end = first + len(sums)
            if end > len(known):
                grown = np.zeros(max(end, len(known) * 5 // 4), np.uint32)
                grown[: len(known)] = known
                self._files[file], known = (salt, grown), grown
            known[first:end] = sums

    def check(self, extent: Extent, memory: memoryview) -> None:
        """Raise a DamagedDataError if ``memory``, read from ``extent``, is not what was written there."""
        for piece, salt, part in self._parts(extent, memory):
            first, count = piece.offset // BLOCK_NBYTES, piece.nbytes // BLOCK_NBYTES
            with self._lock:
                wanted = self._files[piece.file][1][first : first + count].copy()
            for begin, bad in _different(sums_of(part, salt, first), wanted):
                at = (first + begin) * BLOCK_NBYTES
                raise DamagedDataError(self._path(piece.file), offset=at, nbytes=bad * BLOCK_NBYTES)

    def snapshot(self, count: int) -> list[bytes]:
        with self._lock:
            return [self._files[file][1].tobytes() for file in range(count)]

    def _parts(self, extent: Extent, memory: memoryview) -> Iterator[tuple[Piece, int, memoryview]]:
        """Yield each piece in a file with sums, with the file's salt and the piece's part of ``memory``."""
        memory, begin = memory.cast("B"), 0
        for piece in extent.pieces:
            kept = self._files.get(piece.file)
            if kept is not None:
                yield piece, kept[0], memory[begin : begin + piece.nbytes]
            begin += piece.nbytes

    def read(self, extent: Extent, memory: memoryview, *, urgent: bool = False) -> Transfer:
        def check() -> Transfer:
            checked = Transfer()
            self._threads.submit(checked.run, partial(self.check, extent, memory))
            return checked

        return chained(self._engine.read(extent, memory, urgent=urgent), check)

    def write(self, extent: Extent, memory: memoryview) -> Transfer:
        written, write = Transfer(), self._engine.write(extent, memory)
        summed: Future[None] = self._threads.submit(self.set, extent, memory)  # while it is written

        def end() -> None:
            write.wait()
            summed.result()

        write.then(lambda: summed.add_done_callback(lambda _: written.run(end)))
        return written

    def close(self) -> None:
        self._engine.close()
        self._threads.shutdown()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def load_sums(
    sums: VerifiedEngine, saved: SavedRank, first: int, note: Callable[[str], object] = lambda line: None
) -> None:
    """Load the sums of a rank's committed versions, whose first file has number ``first`` of the volume.

    ``note`` is called with a line if there are none. Raises a StateError if they are damaged.
    """
    sums.add(first, saved.files.rank, len(saved.data))
    try:
        kept = _kept_sums(saved)
    except CorruptJournalError as error:
        raise StateError(f"{error}. memory.verify=false goes on without the sums of blocks") from error
    if not kept:
        note("memory.verify: the interrupted run kept no sums, so what it wrote is not checked")
        return
    for _, piece in saved.committed():  # the other versions may have been written since
        begin, count = piece.offset // BLOCK_NBYTES, piece.nbytes // BLOCK_NBYTES
        sums.put(first + piece.file, begin, kept[piece.file][begin : begin + count])


def _kept_sums(saved: SavedRank) -> list[Sums]:
    return [np.frombuffer(part, np.uint32) for part in read_sums(saved.journal, saved.record)]


@dataclass(slots=True)
class RankCheck:
    """What :func:`verify` found in the files of one rank; ``damage`` has a line about each place."""

    rank: int
    step: int
    files: int
    nbytes: int = 0
    checked_nbytes: int = 0
    damage: list[str] = field(default_factory=list)


def verify(folders: Sequence[Path]) -> tuple[list[RankCheck], list[str]]:
    """Check the last commit of an interrupted run: records, descriptions, and each block whose sum was kept.

    Returns the findings of each rank, and lines about damaged records beside a whole commit. Nothing is
    changed. Raises as :func:`find_saved`, and a StateError without a commit.
    """
    lines: list[str] = []
    saved = find_saved(folders, ALONE, lines.append)
    if saved is None:
        raise StateError(f"there is no commit in {', '.join(map(str, folders))}")
    return [_check_rank(saved.ranks[rank]) for rank in range(saved.world_size)], lines


def _check_rank(saved: SavedRank) -> RankCheck:
    check = RankCheck(saved.files.rank, saved.record.step, len(saved.data))
    pieces = sorted(saved.committed(), key=lambda each: (each[1].file, each[1].offset))
    check.nbytes = sum(piece.nbytes for _, piece in pieces)
    try:
        kept = _kept_sums(saved)
    except CorruptJournalError as error:
        check.damage.append(str(error))
        return check
    if not kept:
        return check
    damage: list[str] = []
    with contextlib.ExitStack() as stack:
        buffer = stack.enter_context(mmap.mmap(-1, PART_NBYTES))  # aligned, for O_DIRECT
        files = [open_own(path) for path in saved.data]
        for file in files:
            stack.callback(file.close)
        for name, piece in pieces:
            begin, salt = piece.offset // BLOCK_NBYTES, salt_of(check.rank, piece.file)
            wanted = kept[piece.file][begin : begin + piece.nbytes // BLOCK_NBYTES]
            check.checked_nbytes += int(np.count_nonzero(wanted)) * BLOCK_NBYTES
            for offset, nbytes, why in _bad_ranges(files[piece.file].fd, piece, wanted, salt, buffer):
                where = f"{saved.data[piece.file]}: {nbytes} bytes from offset {offset} on"
                damage.append(f"{where} {why} (the unit of {name})")
    check.damage += damage[:_MOST_LISTED]
    if len(damage) > _MOST_LISTED:
        check.damage.append(f"{len(damage) - _MOST_LISTED} more damaged places")
    return check


def _bad_ranges(
    fd: int, piece: Piece, wanted: Sums, salt: int, buffer: mmap.mmap
) -> Iterator[tuple[int, int, str]]:
    """Yield offset, bytes and reason of each range in ``piece`` that is not what was written."""
    for part in parts_of(piece):
        offset, nbytes = part.offset, part.nbytes
        with memoryview(buffer) as view:
            try:
                moved = os.preadv(fd, [view[:nbytes]], offset)
            except OSError as error:
                yield offset, nbytes, f"cannot be read: {error.strerror}"
                continue
            if moved < nbytes:
                yield offset + moved, nbytes - moved, "are missing"
            first, whole = offset // BLOCK_NBYTES, moved // BLOCK_NBYTES * BLOCK_NBYTES
            found = sums_of(view[:whole], salt, first)
        for begin, count in _different(found, wanted[(offset - piece.offset) // BLOCK_NBYTES :]):
            yield (first + begin) * BLOCK_NBYTES, count * BLOCK_NBYTES, "are not what was written"
