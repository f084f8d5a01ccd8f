"""The frozen base of a fine-tune: units whose weights are read in place, from a checkpoint's own files.

[Note: nothing is copied] A unit whose values all come from safetensors files, and that found no room in host
memory, has no extents of its own. The run's engine reads its bytes from the checkpoint, widened to whole
blocks for O_DIRECT. Any number of runs can share a checkpoint.

[Note: quantized units] The stored bytes of a unit with quantized weights are all its ranges of files, laid
end to end in whole blocks; each rank reads an equal slice of them into the buffer from which they are
gathered or uploaded. They are decoded on the device, so it does not matter how values lie in the flat buffer.

[Note: other units] The bytes of a unit that is not quantized must be put in order, and often cast. They land
in a staging buffer, and a thread makes this rank's weights of them, piece by piece, while the next piece is
read. A block that two pieces need is read twice.

[Note: the end of a file] An engine reads whole blocks. The bytes after a file's last one are read once, by a
call of their own, and are not counted.

[Note: what is trusted] The inode, size and change time of each file, taken when its header was read, are
compared at every step; a difference ends the run with an error that names the file.
"""

import contextlib
import functools
import mmap
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infinity.core.errors import StateError
from infinity.core.lifecycle import Tier
from infinity.core.nbytes import BLOCK_NBYTES, Extent, Piece, Transfer, aligned, around, stream
from infinity.device.machine import background_threads
from infinity.device.memory import Lease
from infinity.nvme.volume import read_piece
from infinity.optim.state import store_master
from infinity.partition.unit import Chunk, Home, StoredForm, Unit
from infinity.shards.storage import Storage, chunk_places

#: Most and least bytes of one staging buffer; all together may take 1 / ``_SHARE`` of the host budget.
_BUFFER_NBYTES, _LEAST_NBYTES, _SHARE = 4 * 2**20, 8 * BLOCK_NBYTES, 8
#: Two even on few cores: they mostly wait for the drive, and one can start a unit while one ends another.
_LEAST_THREADS, _MOST_THREADS = 2, 4

#: ``view(file, offset, nbytes)`` returns bytes of a file from where they were read to: uint8, ``(nbytes,)``.
ViewRead = Callable[[int, int, int], Tensor]


@dataclass(frozen=True, slots=True)
class BaseStep:
    """Elements ``[start, stop)`` of a flat buffer, and the whole blocks of files that hold their bytes."""

    start: int
    stop: int
    extent: Extent  # its pieces are read to consecutive memory
    tails: tuple[Piece, ...]  # last blocks of files, in memory behind the others

    def shard_nbytes(self, ranks: int) -> int:
        """Return the bytes that each of ``ranks`` reads: an equal number of whole blocks."""
        nbytes = self.extent.nbytes + len(self.tails) * BLOCK_NBYTES
        return aligned(nbytes, BLOCK_NBYTES * ranks) // ranks

    def shard(self, rank: int, ranks: int) -> Extent:
        """Return the extent that one of ``ranks`` reads, without the ends of files."""
        nbytes = self.shard_nbytes(ranks)
        return self.extent.part(rank * nbytes, nbytes)

    def viewer(self, memory: Tensor, first: int) -> ViewRead:
        """Return a function that views ranges of files, numbered from ``first``, as read to ``memory``."""
        places, place = list[tuple[int, int, int]](), 0
        for piece in (*self.extent.pieces, *self.tails):
            places.append((piece.file - first, piece.offset, place))
            place += aligned(piece.nbytes)
        places.sort()

        def view(file: int, offset: int, nbytes: int) -> Tensor:
            at = bisect_right(places, (file, offset, place)) - 1
            _, begin, found = places[at]
            held = places[at + 1][1] - offset if places[at + 1 :] and places[at + 1][0] == file else nbytes
            head = memory.narrow(0, found + offset - begin, min(held, nbytes))
            if held >= nbytes:
                return head
            return torch.cat((head, view(file, offset + held, nbytes - held)))  # the rest is the tail

        return view


class BaseBuffers(NamedTuple):
    """Staging buffers, a pair for each thread, for units that are not quantized."""

    nbytes: int
    threads: int

    @classmethod
    def within(cls, host_nbytes: int) -> "BaseBuffers":
        room = host_nbytes // _SHARE
        nbytes = max(_LEAST_NBYTES, min(_BUFFER_NBYTES, room // 2 // BLOCK_NBYTES * BLOCK_NBYTES))
        threads = min(_MOST_THREADS, max(_LEAST_THREADS, background_threads()))
        return cls(nbytes, max(1, min(threads, room // (2 * nbytes))))

    @property
    def all_nbytes(self) -> int:
        return 2 * self.threads * self.nbytes


@dataclass(frozen=True, slots=True)
class BaseFiles:
    """The files of a checkpoint, of ``sizes``, from number ``first`` of the run's volume on.

    :class:`infinity.checkpoint.load.CheckpointValues` makes ``values`` of stored bytes.
    """

    values: Any
    sizes: Sequence[int]
    buffer_nbytes: int = 0
    first: int = 0

    def stored(self, unit: Unit) -> BaseStep | None:
        """Return all stored bytes of a quantized unit; None: it is not quantized."""
        if not self.values.scratch_nbytes(unit):
            return None
        pieces = [piece for _, pieces in self.values.sources(unit, 0, unit.numel) for piece in pieces]
        return self._step(0, unit.numel, pieces)

    def form(self, unit: Unit, step: BaseStep, decode: Callable[[Tensor, Tensor], None]) -> StoredForm:
        """Return the form in which a quantized unit travels."""
        nbytes, scratch_nbytes = step.shard_nbytes(unit.world_size), self.values.scratch_nbytes(unit)
        return StoredForm(nbytes * unit.world_size, nbytes, scratch_nbytes, decode)

    def steps(self, unit: Unit, start: int, nbytes: int) -> Iterator[BaseStep]:
        """Cut ``nbytes`` of weights, from byte ``start`` of the shard on, into steps that fit a buffer."""
        at = unit.shard_start + start // unit.dtype.itemsize
        stop = at + nbytes // unit.dtype.itemsize
        held, held_nbytes, end = list[Piece](), 0, at
        for part_end, pieces in self.values.sources(unit, at, stop, self.buffer_nbytes):
            more = sum(around(piece).nbytes for piece in pieces)
            if held and held_nbytes + more > self.buffer_nbytes:
                yield self._step(at, end, held)
                at, held, held_nbytes = end, [], 0
            end, held_nbytes = part_end, held_nbytes + more
            held += pieces
        yield self._step(at, stop, held)

    def read_nbytes(self, unit: Unit, piece_nbytes: int) -> int:
        """Return the bytes an engine reads for this rank's shard, ``piece_nbytes`` of weights at a time."""
        starts = range(0, unit.shard_nbytes, piece_nbytes)
        parts = ((start, min(piece_nbytes, unit.shard_nbytes - start)) for start in starts)
        return sum(step.extent.nbytes for part in parts for step in self.steps(unit, *part))

    def _step(self, start: int, stop: int, pieces: Iterable[Piece]) -> BaseStep:
        merged: list[Piece] = []
        for piece in sorted(map(around, pieces), key=lambda each: (each.file, each.offset)):
            last = merged[-1] if merged else None
            if last and last.file == piece.file and piece.offset <= last.offset + last.nbytes:
                end = max(last.offset + last.nbytes, piece.offset + piece.nbytes)
                merged[-1] = Piece(last.file, last.offset, end - last.offset)
            else:
                merged.append(piece)
        blocks, tails = [], []
        for file, offset, nbytes in ((each.file, each.offset, each.nbytes) for each in merged):
            size = self.sizes[file]
            whole = size // BLOCK_NBYTES * BLOCK_NBYTES  # see [Note: the end of a file]
            if offset < whole:
                blocks.append(Piece(self.first + file, offset, min(offset + nbytes, whole) - offset))
            if offset + nbytes > whole:
                tails.append(Piece(self.first + file, whole, size - whole))
        return BaseStep(start, stop, Extent(tuple(blocks)), tuple(tails))


class BaseHome(Home):
    """Home of a unit in a checkpoint's files; a quantized unit gets its stored form."""

    def __init__(self, base: "FrozenBase", unit: Unit) -> None:
        super().__init__(Tier.NVME)
        self.base, self._unit = base, unit
        self._step = base.files.stored(unit)
        self.bare = self._step is None and base.files.values.is_exact(unit)
        self._blocks = Extent(())  # of the stored bytes, this rank's
        if self._step is not None:
            self._blocks = self._step.shard(unit.rank, unit.world_size)
            for tail in self._step.tails:
                base.tail(tail)
            unit.stored = base.files.form(unit, self._step, partial(base.decode, unit, self._step))

    @property
    def tier(self) -> Tier:
        return Tier.NVME if self.stored_form is None else Tier.HOST

    @property
    def lease(self) -> Lease | None:
        return self.stored_form

    def fetched_nbytes(self, piece_nbytes: int | None) -> int:
        if self.stored_form is not None:
            return 0
        if self._unit.stored is not None:
            return self._blocks.nbytes
        whole_nbytes = self._unit.shard_nbytes
        return self.base.read_nbytes(self._unit, min(whole_nbytes, piece_nbytes or whole_nbytes))

    def fetch(self, memory: memoryview, start: int = 0) -> Transfer:
        """Start reading this rank's stored bytes, or weights, from byte ``start`` on."""
        unit, step = self._unit, self._step
        if unit.stored is None or step is None:
            return self.read_weight(memory, start)
        first = unit.rank * unit.stored.shard_nbytes + start
        for place, tail in enumerate(step.tails):
            at = step.extent.nbytes + place * BLOCK_NBYTES - first
            if 0 <= at < memory.nbytes:
                memory[at : at + BLOCK_NBYTES] = self.base.tail(tail)
        part = self._blocks.part(start, memory.nbytes)
        return self.base.store.engine.read(part, memory[: part.nbytes], urgent=True)

    def read_weight(self, memory: memoryview, start: int = 0) -> Transfer:
        unit, out = self._unit, torch.frombuffer(memory, dtype=self._unit.dtype)
        if unit.stored is None:
            make = partial(self.base.make, unit, self.base.steps(unit, start, memory.nbytes), out)
        else:
            exact = self.base.store.layout.only(exact=True).complete((), len(out))
            first = unit.shard_start + start // unit.dtype.itemsize
            make = partial(self.base.copy_exact, unit, first, out, exact)
        return self.base.start(unit, make)

    def chunks(self, *, read: bool = True, write: bool = False) -> Iterator[Chunk]:
        """Yield every chunk, read from the files; they cannot be written."""
        store, first = self.base.store, self._unit.shard_start
        for start, numel in chunk_places(self._unit.shard_numel, store.chunk_numel):
            with store.pool.lease(store.layout.nbytes(numel), who="exact values") as lease:
                weight, state = store.layout.chunk_views(lease.tensor, numel)
                self.base.copy_exact(self._unit, first + start, weight, state)
                store.layout.store_moments(state, None)
                yield start, weight, state


class FrozenBase:
    """Reads units of one checkpoint for this rank; its files are in the run's volume from ``first`` on."""

    def __init__(self, storage: Storage, first: int, sizes: Sequence[int], values: Any) -> None:
        assert storage.store is not None
        self.store = storage.store  # its engine reads the files, which are in the run's volume
        buffers = BaseBuffers.within(storage.host_nbytes)
        self.files = BaseFiles(values, sizes, buffers.nbytes, first)
        self.buffers_nbytes = buffers.all_nbytes  # of the host budget
        self.own: dict[str, str] = {}  # units that are not read where they lie, and why
        # Cached, since every step asks for them.
        self.read_nbytes = functools.cache(self.files.read_nbytes)
        self.steps = functools.cache(lambda *part: tuple(self.files.steps(*part)))
        self._tails: dict[Piece, bytes] = {}
        self._leases: list[Lease] = []
        self._pairs: SimpleQueue[list[Lease]] = SimpleQueue()
        self._threads = ThreadPoolExecutor(buffers.threads, "infinity-base")
        self._closed, self._master_lock = threading.Event(), threading.Lock()
        try:
            for number in range(2 * buffers.threads):
                self._leases.append(storage.host_pool.lease(buffers.nbytes, who="reading the checkpoint"))
                if number % 2:
                    self._pairs.put(self._leases[-2:])
        except BaseException:
            self.close()
            raise

    def home_of(self, unit: Unit, *, quantized: bool = False) -> BaseHome | None:
        """Return the home of a unit in the files; None: it has none, or is not ``quantized`` as asked."""
        why = self.files.values.why_not_mapped(unit)
        if quantized and (why or not self.files.values.scratch_nbytes(unit)):
            return None
        if why:
            self.own[unit.name] = why
            return None
        return BaseHome(self, unit)

    def tail(self, piece: Piece) -> bytes:
        """Return the last block of a file, zero-padded, which is read once; blocking."""
        if piece not in self._tails:
            volume = self.store.volume
            with mmap.mmap(-1, BLOCK_NBYTES) as block:  # aligned; O_DIRECT reads what there is of it
                read_piece(volume.fd(piece.file), volume.path(piece.file), piece, block)
                self._tails[piece] = block[:]
        return self._tails[piece]

    def copy_exact(self, unit: Unit, start: int, weight: Tensor, state: tuple[Tensor, ...]) -> None:
        """Copy exact values from element ``start`` of the flat buffer on into weight and state; blocking."""
        with self._master_lock:  # its memory is one for all threads
            values = self.files.values.master(unit, start, start + len(weight))
            store_master(self.store.layout, values, weight, state)

    def start(self, unit: Unit, call: Callable[[], object]) -> Transfer:
        """Run ``call`` on a thread, and return a transfer that ends with it."""
        transfer = Transfer()
        try:
            self._threads.submit(transfer.run, call)
        except RuntimeError as error:  # closed, or the interpreter ends
            transfer.finish(StateError(f"{unit.name} is read after the model was closed ({error})"))
        return transfer

    def decode(self, unit: Unit, step: BaseStep, memory: Tensor, out: Tensor) -> None:
        """Make the values of ``step`` from the bytes in ``memory``, into ``out`` on the same device."""
        self.files.values.make(unit, step.start, out, step.viewer(memory, self.files.first))

    def close(self) -> None:
        """End the threads, and release memory and files. May be called twice."""
        self._closed.set()  # what is queued ends at once
        self._threads.shutdown()
        for lease in self._leases:
            lease.release()
        self._leases.clear()
        self.files.values.close()

    def make(self, unit: Unit, steps: Sequence[BaseStep], out: Tensor) -> None:
        """Read ``steps``, copied or cast, into ``out``, which begins where the first does; blocking."""
        pair = self._pairs.get()  # there are as many as threads

        def read(step: BaseStep, lease: Lease) -> Transfer:
            return self.store.engine.read(step.extent, lease.memory[: step.extent.nbytes], urgent=True)

        try:
            with contextlib.closing(stream(steps, pair, read)) as landed:
                for step, lease in landed:
                    if self._closed.is_set():
                        raise StateError(f"the model was closed while {unit.name} was read")
                    for place, tail in enumerate(step.tails):
                        begin = step.extent.nbytes + place * BLOCK_NBYTES
                        lease.memory[begin : begin + BLOCK_NBYTES] = self.tail(tail)
                    first = steps[0].start
                    self.decode(unit, step, lease.tensor, out[step.start - first : step.stop - first])
        finally:
            self._pairs.put(pair)
