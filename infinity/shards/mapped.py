"""The frozen base of a fine-tune: units whose weights are read where they lie, in a checkpoint's own files.

[Note: nothing is copied]
A unit whose values all come from safetensors files, and that found no room in host memory, has no extents.
A fetch of it reads the bytes that its values are made of, widened to whole blocks, as O_DIRECT wants, by the
run's own engine. So any number of runs read one checkpoint, which none writes.

[Note: quantized units]
Of a unit with quantized weights each rank reads an equal slice of the stored bytes: of all ranges of files
that the unit is made of, laid end to end in whole blocks. They land where they are gathered or uploaded from,
and what is gathered is decoded on the device (see :mod:`infinity.partition.mover`). No slice depends on where
a value is in the flat buffer, so every format is read so, whatever it can be cut into. In host memory, too,
such a unit lies in its stored form.

[Note: other units]
The bytes of a unit that is not quantized need an order and often a cast, so they land in a staging buffer,
and a thread makes this rank's weights of them, piece by piece: the next is read while one is copied. Bytes of
a block that two pieces need are read twice.

[Note: the end of a file]
An engine reads whole blocks, and a file's last bytes are seldom one. Those are read by a call of their own,
and are not counted: of a quantized unit once, when it is mapped.

[Note: what is trusted]
A file's inode, size and time of last change, taken when its header was read, and compared at every step: what
differs ends the run with an error that names the file.
"""

import contextlib
import errno
import mmap
import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from infinity.core.errors import DiskError, StateError
from infinity.core.extent import BLOCK_NBYTES, Extent, Piece, aligned, around
from infinity.core.transfer import Lease, Transfer
from infinity.optim.layout import StateLayout, store_master
from infinity.optim.threads import background_threads
from infinity.partition.unit import StoredForm, Unit
from infinity.shards.storage import Storage

#: The most that one staging buffer takes (bytes).
_BUFFER_NBYTES = 4 * 2**20
#: Part of the host budget that all of them may take, for the same.
_SHARE = 8
#: The least that a buffer takes: a few ranges, each with the rest of its blocks (bytes).
_LEAST_NBYTES = 8 * BLOCK_NBYTES
#: Two also on few cores: they wait for the drive most of the time, and while one copies the last piece of a
#: unit, those of the next are on their way.
_LEAST_THREADS, _MOST_THREADS = 2, 4

#: Gives bytes of a file, by its number, their offset and number, where they were read to: ``(n,)`` uint8.
ViewRead = Callable[[int, int, int], Tensor]


class MappedValues(Protocol):
    """Says what units are made of, and makes them (:class:`infinity.checkpoint.load.CheckpointValues`)."""

    def why_not_mapped(self, unit: Unit) -> str:
        """Why values of ``unit`` cannot be read where they lie; empty: they can."""
        ...

    def scratch_nbytes(self, unit: Unit) -> int:
        """The most that making ``unit`` takes of an accelerator's memory; 0: nothing of it is quantized."""
        ...

    def sources(
        self, unit: Unit, start: int, stop: int, most_nbytes: int | None = None
    ) -> Iterable[tuple[int, tuple[Piece, ...]]]:
        """Cut elements ``[start, stop)`` of the flat buffer into parts that can be made by themselves.

        Yields:
            Where a part ends, in order, and the bytes that it is made of; in whole blocks at most
            ``most_nbytes``, unless it is quantized.
        """
        ...

    def make(self, unit: Unit, start: int, out: Tensor, view: ViewRead) -> None:
        """Put elements from ``start`` on of the flat buffer into ``out``; any thread and device."""
        ...

    def master(self, unit: Unit, start: int, stop: int) -> Tensor:
        """Exact values, read from the files at once: see ``master`` of ``Tiers.put``."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


@dataclass(frozen=True, slots=True)
class MappedStep:
    """Elements ``[start, stop)`` of a flat buffer, and the bytes that they are made of.

    Attributes:
        extent: Whole blocks, one after the other where they are read to.
        tails: What of them is at the end of files; behind the others, a block for each.
    """

    start: int
    stop: int
    extent: Extent
    tails: tuple[Piece, ...]

    @classmethod
    def of(
        cls, start: int, stop: int, pieces: Iterable[Piece], first: int, sizes: Sequence[int]
    ) -> "MappedStep":
        """Make one of ``pieces`` of files, the first of which is number ``first`` in the volume."""
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
            size = sizes[piece.file]
            whole = size // BLOCK_NBYTES * BLOCK_NBYTES
            split = min(piece.offset + piece.nbytes, whole)
            if split > piece.offset:
                blocks.append(Piece(first + piece.file, piece.offset, split - piece.offset))
            if piece.offset + piece.nbytes > whole:
                begin = max(piece.offset, whole)
                tails.append(Piece(first + piece.file, begin, size - begin))
        return cls(start, stop, Extent(tuple(blocks)), tuple(tails))

    def shard_nbytes(self, ranks: int) -> int:
        """What each of ``ranks`` reads, if they share it in whole blocks of equal number."""
        return aligned(self.nbytes, BLOCK_NBYTES * ranks) // ranks

    def shard(self, rank: int, ranks: int) -> Extent:
        """What ``rank`` reads of it, but for the ends of files."""
        nbytes = self.shard_nbytes(ranks)
        return self.extent.part(rank * nbytes, nbytes)

    @property
    def nbytes(self) -> int:
        """Of the memory that holds them."""
        return self.extent.nbytes + len(self.tails) * BLOCK_NBYTES

    def viewer(self, memory: Tensor) -> Callable[[int, int, int], Tensor]:
        """Return what gives bytes of a file, by its number in the volume, that were read to ``memory``."""
        places, place = list[tuple[int, int, int]](), 0
        for piece in (*self.extent.pieces, *self.tails):
            places.append((piece.file, piece.offset, place))
            place += aligned(piece.nbytes)
        places.sort()

        def view(file: int, offset: int, nbytes: int) -> Tensor:
            at = bisect_right(places, (file, offset, place)) - 1
            _, begin, found = places[at]
            held = places[at + 1][1] - offset if places[at + 1 :] and places[at + 1][0] == file else nbytes
            first = memory.narrow(0, found + offset - begin, min(held, nbytes))
            if held >= nbytes:
                return first
            return torch.cat((first, view(file, offset + held, nbytes - held)))  # the rest is the tail

        return view


def stored_step(unit: Unit, values: MappedValues, first: int, sizes: Sequence[int]) -> MappedStep:
    """All stored bytes of a unit: see [Note: quantized units]; arguments as for :class:`MappedBase`."""
    pieces = [piece for _, pieces in values.sources(unit, 0, unit.numel) for piece in pieces]
    return MappedStep.of(0, unit.numel, pieces, first, sizes)


@dataclass(frozen=True, slots=True)
class BaseBuffers:
    """Staging buffers, a pair for each thread, through which units that are not quantized are read.

    Attributes:
        nbytes: Of one buffer.
    """

    nbytes: int
    threads: int

    @classmethod
    def within(cls, host_nbytes: int) -> "BaseBuffers":
        """Those of a host budget."""
        room = host_nbytes // _SHARE
        nbytes = max(_LEAST_NBYTES, min(_BUFFER_NBYTES, room // 2 // BLOCK_NBYTES * BLOCK_NBYTES))
        threads = min(_MOST_THREADS, max(_LEAST_THREADS, background_threads()))
        return cls(nbytes, max(1, min(threads, room // (2 * nbytes))))

    @property
    def all_nbytes(self) -> int:
        return 2 * self.threads * self.nbytes

    def steps(
        self, unit: Unit, values: MappedValues, start: int, nbytes: int, first: int, sizes: Sequence[int]
    ) -> Iterator[MappedStep]:
        """Cut ``nbytes`` of weights, from byte ``start`` of the shard on, into steps that fit a buffer.

        Args:
            first: Number of the first of the checkpoint's files in the volume; they have ``sizes``.
        """
        at = unit.shard_start + start // unit.dtype.itemsize
        stop = at + nbytes // unit.dtype.itemsize
        held, held_nbytes, end = list[Piece](), 0, at
        for part_end, pieces in values.sources(unit, at, stop, self.nbytes):
            more = sum(around(piece).nbytes for piece in pieces)
            if held and held_nbytes + more > self.nbytes:
                yield MappedStep.of(at, end, held, first, sizes)
                at, held, held_nbytes = end, [], 0
            end, held_nbytes = part_end, held_nbytes + more
            held += pieces
        yield MappedStep.of(at, stop, held, first, sizes)

    def read_nbytes(self, unit: Unit, values: MappedValues, piece_nbytes: int, sizes: Sequence[int]) -> int:
        """Bytes that an engine reads for this rank's shard, in pieces of ``piece_nbytes`` of weights."""
        return sum(
            step.extent.nbytes
            for start in range(0, unit.shard_nbytes, piece_nbytes)
            for step in self.steps(
                unit, values, start, min(piece_nbytes, unit.shard_nbytes - start), 0, sizes
            )
        )


class MappedBase:
    """Reads units of one checkpoint for this rank.

    It has more attributes than other classes: the files, the units in them, and the memory in which both are
    decoded.

    Args:
        storage: Of the run; has files on NVMe.
        first: Number of the first of the checkpoint's files in the run's volume.
        sizes: Bytes of each of them.
        values: Closed with this.

    Attributes:
        own: Units that are not mapped, and why.
    """

    def __init__(self, storage: Storage, first: int, sizes: Sequence[int], values: MappedValues) -> None:
        assert storage.volume is not None
        assert storage.units_engine is not None
        self._volume, self._engine, self._values = storage.volume, storage.units_engine, values
        self._layout: StateLayout = storage.layout
        self._first, self._sizes = first, sizes
        self.own: dict[str, str] = {}
        self._mapped: dict[int, Unit] = {}
        self._steps: dict[tuple[int, int, int], list[MappedStep]] = {}
        self._stored: dict[int, tuple[MappedStep, Extent]] = {}  # of quantized units, and this rank's part
        self._tails: dict[Piece, bytes] = {}  # of files that they end
        self._buffers = BaseBuffers.within(storage.host_nbytes)
        self._leases: list[Lease] = []
        self._pairs: SimpleQueue[tuple[Lease, Lease]] = SimpleQueue()
        self._threads = ThreadPoolExecutor(self._buffers.threads, "infinity-base")
        self._closed, self._master_lock = threading.Event(), threading.Lock()
        try:
            for _ in range(self._buffers.threads):
                pair = [
                    storage.host_pool.lease(self._buffers.nbytes, who="reading the checkpoint") for _ in "12"
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

    def map(self, unit: Unit, *, quantized: bool = False) -> bool:
        """Take a unit in, if it can be mapped.

        Args:
            quantized: Only if weights of it are; it is in its stored form then.

        Raises:
            DiskError: The end of a file cannot be read.
        """
        why = self._values.why_not_mapped(unit)
        scratch_nbytes = 0 if why else self._values.scratch_nbytes(unit)
        if quantized and not scratch_nbytes:
            return False
        if why:
            self.own[unit.name] = why
            return False
        self._mapped[unit.index] = unit
        if scratch_nbytes:
            unit.stored = self._stored_form(unit, scratch_nbytes)
        return True

    def _stored_form(self, unit: Unit, scratch_nbytes: int) -> StoredForm:
        """See [Note: quantized units]."""
        step = stored_step(unit, self._values, self._first, self._sizes)
        self._stored[unit.index] = step, step.shard(unit.rank, unit.world_size)
        for tail in step.tails:
            if tail not in self._tails:
                with mmap.mmap(-1, BLOCK_NBYTES) as block:  # aligned
                    with memoryview(block) as memory:
                        self._read_tail(tail, memory)
                    self._tails[tail] = block[:]
        shard_nbytes = step.shard_nbytes(unit.world_size)
        decode = partial(self._decode, unit, step)
        return StoredForm(shard_nbytes * unit.world_size, shard_nbytes, scratch_nbytes, decode)

    def drop(self, unit: Unit) -> None:
        """The unit has a home of its own."""
        del self._mapped[unit.index]
        self._stored.pop(unit.index, None)
        unit.stored = None
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
        if unit.stored is not None:
            return self._stored[unit.index][1].nbytes
        starts = range(0, unit.shard_nbytes, piece_nbytes)
        parts = ((start, min(piece_nbytes, unit.shard_nbytes - start)) for start in starts)
        return sum(step.extent.nbytes for part in parts for step in self._plan(unit, *part))

    def fetch(self, unit: Unit, memory: memoryview, start: int) -> Transfer:
        """Start reading this rank's stored bytes of a quantized unit from ``start`` on, into ``memory``."""
        assert unit.stored is not None
        (step, blocks), first = self._stored[unit.index], unit.rank * unit.stored.shard_nbytes + start
        for place, tail in enumerate(step.tails):
            at = step.extent.nbytes + place * BLOCK_NBYTES - first
            if 0 <= at < memory.nbytes:
                memory[at : at + BLOCK_NBYTES] = self._tails[tail]
        if start or memory.nbytes < blocks.nbytes:
            blocks = blocks.part(start, memory.nbytes)
        if blocks.pieces:
            return self._engine.read(blocks, memory[: blocks.nbytes], urgent=True)
        done = Transfer()
        done.finish()
        return done

    def read(self, unit: Unit, memory: memoryview, start: int) -> Transfer:
        """Start making this rank's weights from byte ``start`` on, as many as fill ``memory``."""
        transfer, out = Transfer(), torch.frombuffer(memory, dtype=unit.dtype)
        if unit.stored is not None:
            first = unit.shard_start + start // unit.dtype.itemsize
            make = partial(self._round, unit, first, out)
        else:
            make = partial(self._make, unit, self._plan(unit, start, memory.nbytes), out)
        try:
            self._threads.submit(transfer.run, make)
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

    def _plan(self, unit: Unit, start: int, nbytes: int) -> list[MappedStep]:
        key = unit.index, start, nbytes
        if key not in self._steps:
            steps = self._buffers.steps(unit, self._values, start, nbytes, self._first, self._sizes)
            self._steps[key] = list(steps)
        return self._steps[key]

    # --- on a thread -------------------------------------------------------------------------

    def _make(self, unit: Unit, steps: Sequence[MappedStep], out: Tensor) -> None:
        """Read and copy or cast ``steps`` into ``out``, whose first element is that of the first."""
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
                self._copy(unit, step, lease, out[step.start - steps[0].start : step.stop - steps[0].start])
                reading.popleft()
                free.append(lease)
        finally:
            for _, transfer in reading:  # the engine still writes into the buffers
                with contextlib.suppress(DiskError):
                    transfer.wait()
            self._pairs.put(pair)

    def _copy(self, unit: Unit, step: MappedStep, lease: Lease, out: Tensor) -> None:
        for place, tail in enumerate(step.tails):
            begin = step.extent.nbytes + place * BLOCK_NBYTES
            self._read_tail(tail, lease.memory[begin : begin + BLOCK_NBYTES])
        self._decode(unit, step, lease.tensor, out)

    def _decode(self, unit: Unit, step: MappedStep, memory: Tensor, out: Tensor) -> None:
        """Make the values of ``step`` of the bytes in ``memory``, on the same device."""
        view = step.viewer(memory)

        def view_file(file: int, offset: int, nbytes: int) -> Tensor:
            return view(self._first + file, offset, nbytes)

        self._values.make(unit, step.start, out, view_file)

    def _round(self, unit: Unit, start: int, out: Tensor) -> None:
        """Put weights of a quantized unit from element ``start`` on into ``out``; not by the engine."""
        with self.master(unit, start, start + len(out)) as values:
            if values.dtype == out.dtype:
                out.copy_(values)
                return
            exact = [torch.empty(len(out), dtype=field.dtype, device="cpu") for field in self._layout.exact]
            store_master(self._layout, values, out, tuple(exact))

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
