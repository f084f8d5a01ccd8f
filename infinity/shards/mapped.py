"""The frozen base of a fine-tune: units whose weights are read where they lie, in a checkpoint's own files.

[Note: nothing is copied]
A unit whose values all come from safetensors files, and that found no room in host memory, has no extents.
A fetch of it reads the bytes that its values are made of: this rank's ranges of each stored tensor, widened
to whole blocks, as O_DIRECT wants, by the run's own engine. They land in a staging buffer, and a thread makes
weights of them: it copies, casts or decodes. So what is read is the stored form, a half or a quarter of
the weights where it is quantized, and any number of runs read one checkpoint, which none writes.

[Note: pieces]
A shard is made piece by piece: what a piece is made of fits a staging buffer, and the next piece is read
while one is decoded. Pieces are cut where the stored form can be cut (a row of FP8, an expert of MXFP4).
Bytes of a block that two pieces need are read twice; so are scales of a row of blocks.

[Note: the end of a file]
An engine reads whole blocks, and a file's last bytes are seldom one. Those are read by a call of their own,
and are not counted.

[Note: what is trusted]
A file's inode, size and time of last change, taken when its header was read, and compared at every step: what
differs ends the run with an error that names the file.
"""

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from infinity.core.errors import DiskError, StateError
from infinity.core.extent import BLOCK_NBYTES, Extent, Piece, aligned, around
from infinity.core.transfer import Lease, Transfer
from infinity.optim.layout import StateLayout, store_master
from infinity.optim.threads import background_threads
from infinity.partition.unit import Unit
from infinity.shards.storage import Storage

#: The most that one staging buffer takes where nothing larger is decoded as a whole (bytes).
_BUFFER_NBYTES = 4 * 2**20
#: Part of the host budget that all of them may take, for the same.
_SHARE = 8
#: The least that a buffer takes: a few ranges, each with the rest of its blocks (bytes).
_LEAST_NBYTES = 8 * BLOCK_NBYTES
_MOST_THREADS = 4

#: Puts bytes of a file, by its number and offset, into a contiguous tensor.
ReadStaged = Callable[[int, int, Tensor], None]


class MappedValues(Protocol):
    """Says what units are made of, and makes them (:class:`infinity.checkpoint.load.CheckpointValues`)."""

    def why_not_mapped(self, unit: Unit) -> str:
        """Why values of ``unit`` cannot be read where they lie; empty: they can."""
        ...

    def sources(
        self, unit: Unit, start: int, stop: int, most_nbytes: int
    ) -> Iterable[tuple[int, tuple[Piece, ...]]]:
        """Cut elements ``[start, stop)`` of the flat buffer into parts that can be made by themselves.

        Yields:
            Where a part ends, in order, and the bytes that it is made of; in whole blocks at most
            ``most_nbytes``, unless it cannot be cut.
        """
        ...

    def exact_dtype(self, unit: Unit) -> torch.dtype:
        """The unit's own dtype if its values are exact in it, else fp32."""
        ...

    def make(self, unit: Unit, start: int, out: Tensor, read: ReadStaged) -> None:
        """Put elements from ``start`` on of the flat buffer into ``out``; any thread."""
        ...

    def master(self, unit: Unit, start: int, stop: int) -> Tensor:
        """Exact values, read from the files at once: see ``master`` of ``Tiers.put``."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


@dataclass(frozen=True, slots=True)
class _Step:
    """Elements ``[start, stop)`` of a flat buffer, and the bytes that they are made of.

    Attributes:
        extent: Whole blocks, one after the other in a staging buffer.
        tails: What of them is at the end of files; behind the others.
    """

    start: int
    stop: int
    extent: Extent
    tails: tuple[Piece, ...]

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        """Every piece and its place in the buffer: whole blocks."""
        place = 0
        for piece in (*self.extent.pieces, *self.tails):
            yield place, piece
            place += aligned(piece.nbytes)


class MappedBase:
    """Reads units of one checkpoint for this rank.

    Args:
        storage: Of the run; has files on NVMe.
        first: Number of the first of the checkpoint's files in the run's volume.
        sizes: Bytes of each of them.
        values: Closed with this.
        whole_nbytes: The most that is decoded as a whole (bytes).

    Attributes:
        own: Units that are not mapped, and why.
    """

    def __init__(
        self, storage: Storage, first: int, sizes: Sequence[int], values: MappedValues, whole_nbytes: int
    ) -> None:
        assert storage.volume is not None
        assert storage.units_engine is not None
        self._volume, self._engine, self._values = storage.volume, storage.units_engine, values
        self._layout: StateLayout = storage.layout
        self._first, self._sizes = first, sizes
        self.own: dict[str, str] = {}
        self._mapped: dict[int, Unit] = {}
        self._steps: dict[tuple[int, int, int], list[_Step]] = {}
        room = storage.host_nbytes // _SHARE
        share = room // 2 // BLOCK_NBYTES * BLOCK_NBYTES
        self._buffer_nbytes = max(_LEAST_NBYTES, min(_BUFFER_NBYTES, share), whole_nbytes)
        threads = max(1, min(_MOST_THREADS, background_threads(), room // (2 * self._buffer_nbytes)))
        self._leases: list[Lease] = []
        self._pairs: SimpleQueue[tuple[Lease, Lease]] = SimpleQueue()
        self._threads = ThreadPoolExecutor(threads, "infinity-decode")
        self._closed, self._master_lock = threading.Event(), threading.Lock()
        try:
            for _ in range(threads):
                pair = [
                    storage.host_pool.lease(self._buffer_nbytes, who="reading the checkpoint") for _ in "12"
                ]
                self._leases += pair
                self._pairs.put((pair[0], pair[1]))
        except BaseException:
            self.close()
            raise

    @property
    def buffers_nbytes(self) -> int:
        """What this takes of the host budget."""
        return sum(lease.nbytes for lease in self._leases)

    def map(self, unit: Unit) -> bool:
        """Take a unit in, if it can be mapped."""
        why = self._values.why_not_mapped(unit)
        if why:
            self.own[unit.name] = why
            return False
        self._mapped[unit.index] = unit
        return True

    def drop(self, unit: Unit) -> None:
        """The unit has a home of its own."""
        del self._mapped[unit.index]
        self._steps = {key: steps for key, steps in self._steps.items() if key[0] != unit.index}

    @property
    def mapped(self) -> Sequence[Unit]:
        """The units that were taken in."""
        return list(self._mapped.values())

    @contextlib.contextmanager
    def master(self, unit: Unit, start: int, stop: int) -> Iterator[Tensor]:
        """Exact values of elements ``[start, stop)`` of the flat buffer, inside the context. Blocking."""
        with self._master_lock:  # its memory is one for all threads
            yield self._values.master(unit, start, stop)

    def nbytes(self, unit: Unit, piece_nbytes: int) -> int:
        """Bytes that the engine reads for this rank's shard, in pieces of ``piece_nbytes`` of weights."""
        starts = range(0, unit.shard_nbytes, piece_nbytes)
        parts = ((start, min(piece_nbytes, unit.shard_nbytes - start)) for start in starts)
        return sum(step.extent.nbytes for part in parts for step in self._plan(unit, *part))

    def read(self, unit: Unit, memory: memoryview, start: int) -> Transfer:
        """Start making this rank's weights from byte ``start`` on, as many as fill ``memory``."""
        steps, transfer = self._plan(unit, start, memory.nbytes), Transfer()
        out = torch.frombuffer(memory, dtype=unit.dtype)
        try:
            self._threads.submit(transfer.run, lambda: self._make(unit, steps, out))
        except RuntimeError as error:  # closed, or the interpreter ends
            transfer.finish(StateError(f"{unit.name} is read after the model was closed ({error})"))
        return transfer

    def close(self) -> None:
        """End the threads, give back memory and files. May be called twice."""
        self._closed.set()  # what is queued ends at once
        self._threads.shutdown()
        for lease in self._leases:
            lease.release()
        self._leases.clear()
        self._values.close()

    # --- what is read ------------------------------------------------------------------------

    def _plan(self, unit: Unit, start: int, nbytes: int) -> list[_Step]:
        key = unit.index, start, nbytes
        if key not in self._steps:
            first = unit.shard_start + start // unit.dtype.itemsize
            self._steps[key] = list(self._cut(unit, first, first + nbytes // unit.dtype.itemsize))
        return self._steps[key]

    def _cut(self, unit: Unit, start: int, stop: int) -> Iterator[_Step]:
        """Steps whose bytes fit a buffer."""
        at, held, held_nbytes = start, list[Piece](), 0
        end = start
        for part_end, pieces in self._values.sources(unit, start, stop, self._buffer_nbytes):
            nbytes = sum(around(piece).nbytes for piece in pieces)
            if held and held_nbytes + nbytes > self._buffer_nbytes:
                yield self._step(at, end, held)
                at, held, held_nbytes = end, [], 0
            end, held_nbytes = part_end, held_nbytes + nbytes
            held += pieces
        yield self._step(at, stop, held)

    def _step(self, start: int, stop: int, pieces: Iterable[Piece]) -> _Step:
        merged: list[Piece] = []
        for piece in sorted(map(around, pieces), key=lambda each: (each.file, each.offset)):
            last = merged[-1] if merged else None
            if last and last.file == piece.file and piece.offset <= last.offset + last.nbytes:
                end = max(last.offset + last.nbytes, piece.offset + piece.nbytes)
                merged[-1] = Piece(last.file, last.offset, end - last.offset)
            else:
                merged.append(piece)
        blocks, tails = [], []
        for piece in merged:  # see [Note: the end of a file]
            size = self._sizes[piece.file]
            whole = size // BLOCK_NBYTES * BLOCK_NBYTES
            split = min(piece.offset + piece.nbytes, whole)
            if split > piece.offset:
                blocks.append(Piece(self._first + piece.file, piece.offset, split - piece.offset))
            if piece.offset + piece.nbytes > whole:
                begin = max(piece.offset, whole)
                tails.append(Piece(self._first + piece.file, begin, size - begin))
        return _Step(start, stop, Extent(tuple(blocks)), tuple(tails))

    # --- on a thread -------------------------------------------------------------------------

    def _make(self, unit: Unit, steps: Sequence[_Step], out: Tensor) -> None:
        """Read and decode ``steps`` into ``out``, whose first element is that of the first."""
        pair = self._pairs.get()  # there are as many as threads
        reading: deque[tuple[Lease, Transfer]] = deque()
        try:
            free, left = deque(pair), deque(steps)
            for step in steps:
                while left and free:
                    lease, extent = free.popleft(), left.popleft().extent
                    transfer = self._engine.read(extent, lease.memory[: extent.nbytes], urgent=True)
                    reading.append((lease, transfer))
                if self._closed.is_set():
                    raise StateError(f"the model was closed while {unit.name} was read")
                lease, transfer = reading[0]
                transfer.wait()
                self._decode(unit, step, lease, out[step.start - steps[0].start : step.stop - steps[0].start])
                reading.popleft()
                free.append(lease)
        finally:
            for _, transfer in reading:  # the engine still writes into the buffers
                with contextlib.suppress(DiskError):
                    transfer.wait()
            self._pairs.put(pair)

    def _decode(self, unit: Unit, step: _Step, lease: Lease, out: Tensor) -> None:
        pieces = list(step.pieces())
        for place, piece in pieces[len(step.extent.pieces) :]:
            self._read_tail(piece, lease.memory[place : place + BLOCK_NBYTES])

        def read(file: int, offset: int, values: Tensor) -> None:
            """Copy bytes from the buffer."""
            for place, piece in pieces:
                skip = offset - piece.offset
                if piece.file == self._first + file and 0 <= skip < piece.nbytes:
                    target, taken = values.view(torch.uint8), min(values.nbytes, piece.nbytes - skip)
                    target[:taken].copy_(lease.tensor[place + skip : place + skip + taken])
                    if taken < values.nbytes:  # the rest is the tail
                        read(file, offset + taken, target[taken:])
                    return
            raise AssertionError(f"bytes {offset} of file {file} were not read")

        if self._values.exact_dtype(unit) == unit.dtype:
            self._values.make(unit, step.start, out, read)
            return
        master = torch.empty(len(out), dtype=torch.float32, device="cpu")
        self._values.make(unit, step.start, master, read)
        rest = tuple(
            torch.empty(len(out), dtype=field.dtype, device="cpu") for field in self._layout.fields[:1]
        )
        store_master(self._layout, master, out, rest)

    def _read_tail(self, piece: Piece, memory: memoryview) -> None:
        """Read the last bytes of a file; blocking.

        Raises:
            DiskError: They cannot be read.
        """
        code = moved = 0
        try:  # of the last block O_DIRECT reads what there is
            moved = os.preadv(self._volume.fd(piece.file), [memory], piece.offset)
        except OSError as error:
            code = error.errno or errno.EIO
        if moved < piece.nbytes:
            path = self._volume.path(piece.file)
            raise DiskError(
                code or errno.EIO, "read", path, offset=piece.offset, nbytes=piece.nbytes, moved=moved
            )
