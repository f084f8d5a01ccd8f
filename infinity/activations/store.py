"""Store activations on NVMe or in host memory, and load them again.

[Note: no copy]
Without an accelerator the engine writes an activation from where it lies. The drive wants whole blocks at
addresses that are multiples of a block: so the few bytes before the first and after the last whole block stay
in memory. How many blocks move depends on the size alone, so that a plan's bytes are exact. A load's fresh
memory begins at the same offset in a block, since some kernels look at alignment.

[Note: staging]
Other stores go through pinned host memory, or past it with GPUDirect Storage. One thread stores and another
loads, each on its own stream: copies overlap with each other and with compute. A copy waits for what compute
had been given when its tensor was packed or allocated, and holds memory until it has ended. Compute may use
loaded bytes as soon as their copies are issued, since its stream waits for them.

[Note: coded]
A codec takes the place of each copy of what is staged. The code of a piece is written behind that of the one
before it, or, in the storage's own memory, kept in a tensor of its own.
"""

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infinity.core.nbytes import BLOCK_NBYTES, Extent, Transfer, TransferEngine, aligned, stream
from infinity.core.plan import Hardware, Place
from infinity.device import accelerator
from infinity.device.memory import Lease, Pool, measure_link
from infinity.nvme.probe import measure
from infinity.nvme.volume import Volume

#: A copy of this size runs at full speed, and its write begins soon (bytes).
_PIECE_NBYTES = 2**24
#: What an accelerator codes at one time: that takes up to ten times as much of its memory (bytes).
_CODED_NBYTES = 2**20

Storage = torch.UntypedStorage


class Loading(NamedTuple):
    """A load: when ``transfer`` has ended, the bytes are in ``storage`` from ``offset_nbytes`` on."""

    storage: Storage
    offset_nbytes: int
    transfer: Transfer


class Form:
    """Copies pieces of a storage, uint8, to other memory and back: as they are, or, derived, coded."""

    @property
    def rounds(self) -> torch.dtype | None:
        """Return the dtype of the values that do not come back as they were; None: all bits do."""
        return None

    def put(self, piece: Tensor, out: Tensor) -> int:
        """Begin to write a piece to ``out``, which is as large, and return its bytes there."""
        out.copy_(piece, non_blocking=True)
        return len(piece)

    def get(self, there: Tensor, piece: Tensor) -> None:
        """Begin to write ``piece`` from its bytes in other memory."""
        piece.copy_(there, non_blocking=True)


PLAIN = Form()


class StoredActivation:
    """Owns room for one storage; when freed, with nothing in flight, ``give_back`` runs, on any thread."""

    rounds: torch.dtype | None = None  # as :attr:`Form.rounds`
    kept_nbytes = 0  # what the stored form takes of the memory in which storages are

    def __init__(self, moved_nbytes: int, give_back: Callable[[], None]) -> None:
        self.moved_nbytes = moved_nbytes  # to another memory; known when it has been stored
        self._lock = threading.Lock()  # guards what follows
        self._give_back: Callable[[], None] | None = give_back
        self._in_flight: dict[object, Storage] = {}
        self._is_unwanted = False

    def store(self, storage: Storage) -> Transfer:
        """Start storing ``storage``, at most once; it is held until the transfer has ended."""
        raise NotImplementedError

    def load(self) -> Loading:
        """Start loading; the store must have succeeded."""
        raise NotImplementedError

    def free(self) -> None:
        """Give the room back as soon as nothing is in flight; may be called twice, from any thread."""
        self._is_unwanted = True
        self._end(None)

    def _hold(self, storage: Storage, transfer: Transfer) -> Transfer:
        move = object()
        with self._lock:
            self._in_flight[move] = storage
        transfer.then(partial(self._end, move))
        return transfer

    def _end(self, move: object) -> None:
        give_back = None
        with self._lock:
            storage = self._in_flight.pop(move, None)
            if self._is_unwanted and not self._in_flight:
                give_back, self._give_back = self._give_back, None
        del storage  # outside the lock: memory is given back
        if give_back is not None:
            give_back()


def open_stores(
    device: torch.device, pool: Pool, piece_nbytes: int, volume: Volume | None, engine: TransferEngine | None
) -> "dict[Place, ActivationStore]":
    """Open the stores for activations on ``device``: NVMe if there is a ``volume``, and host memory.

    Without an accelerator, activations are in host memory already, where only coded ones take fewer bytes.
    Of ``pool`` ``piece_nbytes`` are staged at one time.
    """
    stores: dict[Place, ActivationStore] = {Place.CODED: CodedStore(device, pool, piece_nbytes=piece_nbytes)}
    if device.type != "cpu":
        stores[Place.HOST] = StagedStore(device, pool, piece_nbytes=piece_nbytes)
    if volume is not None and engine is not None:
        coded = stores[Place.CODED_NVME] = StagedStore(
            device, pool, volume, engine, piece_nbytes=piece_nbytes
        )
        stores[Place.NVME] = DirectStore(volume, engine) if device.type == "cpu" else coded
    return stores


def measure_hardware(
    device: torch.device, directories: Sequence[str | Path], host_nbytes: int, gds: bool = False
) -> Hardware:
    """Measure the channels of this rank; takes some tenths of a second.

    ``directories`` are on NVMe, one for each drive; activations may take ``host_nbytes`` of host memory, and
    go from ``device`` to NVMe by GPUDirect Storage (``gds``).
    """
    on_cpu = device.type == "cpu"
    # Without an accelerator activations move from and to memory that the allocator hands out.
    place = device if gds or on_cpu else None
    speeds = [measure(Path(directory), allocated_on=place) for directory in directories]
    return Hardware(
        read_bytes_per_s=sum(speed.read_bytes_per_s for speed in speeds),
        write_bytes_per_s=sum(speed.write_bytes_per_s for speed in speeds),
        mixed_bytes_per_s=sum(speed.mixed_bytes_per_s for speed in speeds),
        host_bytes_per_s=0.0 if on_cpu else min(measure_link(device)),
        host_nbytes=0 if on_cpu else host_nbytes,
        # Not shared among threads: those of a parallel region wait for the one whose core I/O takes.
        compute_s_per_byte=max((s.processor_s_per_byte for s in speeds), default=0.0) * on_cpu,
        coding_delay=1.0 / (torch.get_num_threads() if on_cpu else 1),
    )


class DirectStore:
    """Stores storages in host memory on NVMe; see [Note: no copy]."""

    padding_nbytes = BLOCK_NBYTES  # what a storage takes beyond its size once it has been loaded

    def __init__(self, volume: Volume, engine: TransferEngine) -> None:
        self.volume, self.engine = volume, engine

    def reserve(self, storage: Storage, who: str, form: Form = PLAIN) -> StoredActivation:
        """Reserve room for ``storage``; DiskError: the file system is full."""
        return _Direct(self.volume, self.engine, storage, who)

    def close(self) -> None:
        """Do nothing: volume and engine belong to others."""


def directly_moved_nbytes(nbytes: int) -> int:
    """Return how many of the ``nbytes`` of a storage in host memory move; see [Note: no copy]."""
    return max(0, nbytes // BLOCK_NBYTES - 1) * BLOCK_NBYTES


class _Direct(StoredActivation):
    # Beside an operator that has emptied the caches every call of torch is slow: here are as few as possible.

    def __init__(self, volume: Volume, engine: TransferEngine, storage: Storage, who: str) -> None:
        self._engine, self._nbytes = engine, storage.nbytes()
        self._head = -storage.data_ptr() % BLOCK_NBYTES
        body = directly_moved_nbytes(self._nbytes)
        self._tail = self._head + body
        self._extent = volume.allocate(body, what=who) if body else Extent(())
        super().__init__(self._nbytes, partial(volume.free, self._extent))
        self._ends: tuple[bytes, bytes] | None = None

    def store(self, storage: Storage) -> Transfer:
        source = _memory(storage, 0, self._nbytes)
        self._ends = bytes(source[: self._head]), bytes(source[self._tail :])
        return self._hold(storage, self._engine.write(self._extent, source[self._head : self._tail]))

    def load(self) -> Loading:
        storage = torch.empty(self._nbytes + BLOCK_NBYTES, dtype=torch.uint8, device="cpu").untyped_storage()
        offset = -(storage.data_ptr() + self._head) % BLOCK_NBYTES
        target = _memory(storage, offset, self._nbytes)
        assert self._ends is not None
        target[: self._head], target[self._tail :] = self._ends
        transfer = self._engine.read(self._extent, target[self._head : self._tail], urgent=True)
        return Loading(storage, offset, self._hold(storage, transfer))


def _memory(storage: Storage, start: int, nbytes: int) -> memoryview:
    """Return ``nbytes`` from ``start`` on of a storage in host memory, which the caller keeps alive."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(storage.data_ptr() + start)).cast("B")


def copying(
    thread: ThreadPoolExecutor, move: Callable[[], object], after: torch.Event | None, device: torch.device
) -> tuple[accelerator.StreamTransfer, Transfer]:
    """Run ``move()`` on a thread that copies; its work on the accelerator waits for an event.

    Of the transfers returned one ends when the copies are issued, one when they have ended and hold no
    memory.
    """
    issued, ended, moves = accelerator.StreamTransfer(), Transfer(), [move]
    del move

    def issue() -> None:
        move = moves.pop()
        accelerator.wait_on_stream(after, device)
        try:
            move()
        finally:
            issued.record(device)

    def end() -> None:
        accelerator.wait_on_host(accelerator.record(device))
        issued.wait()

    def perform() -> None:
        issued.run(issue)
        ended.run(end)

    thread.submit(perform)
    return issued, ended


#: Begins to copy all of a tensor, on a thread that copies.
Move = Callable[[Tensor], object]
#: Where a piece of a storage is in its form, and its bytes there.
Piece = tuple[Extent | Tensor, int]


class _Staged(StoredActivation):
    """Stores a storage on one thread and loads it on another, each by one of two moves."""

    def __init__(
        self, threads: Sequence[ThreadPoolExecutor], storage: Storage, give_back: Callable[[], None],
        moves: tuple[Move, Move], form: Form = PLAIN, pieces: Sequence[Piece] = (),
    ) -> None:  # fmt: skip
        super().__init__(storage.nbytes(), give_back)
        self._threads, self._moves, self.rounds = threads, moves, form.rounds
        self._pieces = pieces if form is not PLAIN else ()
        self._nbytes, self._device = storage.nbytes(), storage.device
        self._packed = accelerator.record(storage.device)  # a store may be started later, by another thread

    def store(self, storage: Storage) -> Transfer:
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        _, ended = copying(self._threads[0], partial(self._moves[0], source), self._packed, self._device)
        ended.then(self._settle)
        return self._hold(storage, ended)

    def _settle(self) -> None:
        if self._pieces:
            self.moved_nbytes = sum(p.nbytes for p, _ in self._pieces if isinstance(p, Extent))
            self.kept_nbytes = sum(p.nbytes for p, _ in self._pieces if isinstance(p, Tensor))

    def load(self) -> Loading:
        target = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        allocated, storage = accelerator.record(self._device), target.untyped_storage()
        issued, ended = copying(self._threads[1], partial(self._moves[1], target), allocated, self._device)
        self._hold(storage, ended)
        return Loading(storage, 0, issued)


class StagedStore:
    """Stores in host memory, or on NVMe behind it; see [Note: staging] and [Note: coded].

    Without a ``volume`` bytes stay in ``pool``. With GPUDirect Storage ``engine`` takes tensors, after what
    the thread's stream waits for. A buffer takes ``piece_nbytes``; more than 16 MiB gain nothing.
    """

    padding_nbytes = 0

    def __init__(
        self, device: torch.device, pool: Pool, volume: Volume | None = None,
        engine: Any = None, *, piece_nbytes: int = _PIECE_NBYTES,
    ) -> None:  # fmt: skip
        self._pool, self._volume, self._engine, self._device = pool, volume, engine, device
        self._piece_nbytes = aligned(min(piece_nbytes, _PIECE_NBYTES))
        self.threads = [
            ThreadPoolExecutor(1, f"infinity-{name}", accelerator.use_own_stream, (device,))
            for name in ("store", "load")
        ]

    def reserve(self, storage: Storage, who: str, form: Form = PLAIN) -> StoredActivation:
        """Reserve room for ``storage``; DiskError: the file system is full."""
        nbytes, engine = storage.nbytes(), self._engine
        moves: tuple[Move, Move]
        if self._volume is None:
            lease, sizes = self._pool.lease(nbytes, who=who), list[int]()
            moves = partial(self._keep, lease, sizes, form), partial(self._back, lease, sizes, form)
            return _Staged(self.threads, storage, lease.release, moves, form)
        extent = self._volume.allocate(aligned(nbytes), what=who)
        pieces: list[Piece] = []
        moves = partial(self._put, extent, pieces, who, form), partial(self._get, pieces, who, form)
        if form is PLAIN and engine.name == "gds":
            moves = (
                lambda source: engine.write(extent.part(0, nbytes), source).wait(),
                lambda target: engine.read(extent.part(0, nbytes), target).wait(),
            )
        return _Staged(self.threads, storage, partial(self._volume.free, extent), moves, form, pieces)

    def close(self) -> None:
        for thread in self.threads:
            thread.shutdown()

    def _pieces(self, tensor: Tensor, form: Form) -> Sequence[Tensor]:
        most = self._piece_nbytes if form is PLAIN or self._device.type == "cpu" else _CODED_NBYTES
        return torch.split(tensor, min(most, self._piece_nbytes))

    def _keep(self, lease: Lease, sizes: list[int], form: Form, source: Tensor) -> None:
        """Copy to a lease of host memory, each piece to its own part."""
        parts = zip(*(self._pieces(each, form) for each in (source, lease.tensor)))
        sizes += [form.put(piece, part) for piece, part in parts]

    def _back(self, lease: Lease, sizes: Sequence[int], form: Form, target: Tensor) -> None:
        parts = zip(*(self._pieces(each, form) for each in (target, lease.tensor)), sizes)
        for piece, part, nbytes in parts:
            form.get(part[:nbytes], piece)

    def _put(self, extent: Extent, pieces: list[Piece], who: str, form: Form, source: Tensor) -> None:
        """Copy the next piece while the one before it is copied, and those before that are written."""
        with ExitStack() as held:  # also after an error nothing is in flight at the end
            copied: deque[tuple[Lease, Extent]] = deque()
            at = 0

            def write_copied() -> None:
                while copied:
                    lease, part = copied.popleft()
                    write = self._engine.write(part, lease.memory[: part.nbytes])
                    held.callback(write.wait)
                    write.then(lease.release)

            for piece in self._pieces(source, form):
                lease = self._pool.try_lease(aligned(len(piece)), who=who)
                if lease is None:
                    write_copied()
                    lease = self._pool.lease(aligned(len(piece)), who=who)
                held.callback(lease.release)
                nbytes = form.put(piece, lease.tensor[: len(piece)])
                lease.record_use()
                write_copied()
                part = extent.part(at, aligned(nbytes))
                pieces.append((part, nbytes))
                copied.append((lease, part))
                at += part.nbytes
            write_copied()

    def _get(self, pieces: Sequence[Any], who: str, form: Form, target: Tensor) -> None:
        """Read the next piece while the one before it is copied."""

        def read(piece: tuple[Extent, int], lease: Lease) -> Transfer:
            reading: Transfer = self._engine.read(piece[0], lease.memory[: piece[0].nbytes])
            return reading

        with ExitStack() as held:
            size = max(part.nbytes for part, _ in pieces)
            buffers = [held.enter_context(self._pool.lease(size, who=who)) for _ in pieces[:2]]
            landed = held.enter_context(closing(stream(pieces, buffers, read)))
            for piece, ((_, nbytes), lease) in zip(self._pieces(target, form), landed):
                form.get(lease.tensor[:nbytes], piece)
                lease.record_use()


class CodedStore(StagedStore):
    """Keeps codes in the memory in which storages are; see [Note: coded]."""

    def reserve(self, storage: Storage, who: str, form: Form = PLAIN) -> StoredActivation:
        codes: list[Piece] = []
        moves = partial(self._encode, codes, who, form), partial(self._decode, codes, form)
        return _Staged(self.threads, storage, codes.clear, moves, form, codes)

    def _encode(self, codes: list[Piece], who: str, form: Form, source: Tensor) -> None:
        for piece in self._pieces(source, form):
            with ExitStack() as held:
                lease = partial(self._pool.lease, len(piece), who=who)
                on_cpu = source.device.type == "cpu"
                out = held.enter_context(lease()).tensor if on_cpu else torch.empty_like(piece)
                code = out[: form.put(piece, out)].clone()
            codes.append((code, len(code)))

    def _decode(self, codes: Sequence[Any], form: Form, target: Tensor) -> None:
        for piece, (code, _) in zip(self._pieces(target, form), codes):
            form.get(code, piece)


#: Stores activations on NVMe or in host memory.
ActivationStore = DirectStore | StagedStore
