"""Where activations are stored, NVMe or host memory, and how their bytes get there and back.

[Note: no copy]
Without an accelerator the engine writes an activation from where it lies. The drive wants whole blocks at
addresses that are multiples of a block, and an allocator gives neither: so the few bytes before the first
and after the last whole block stay in memory, and the rest moves as it is: wherever the activation lies, as
many blocks, so that a plan's bytes are exact. It comes back into fresh memory
that begins at the same place of a block, so that alignment, which some kernels look at, stays the same.

[Note: staging]
Other ways go through host memory, pinned beside an accelerator, or past it with GPUDirect Storage. One thread
stores and another one loads, each in the order of the calls and each on a stream of its own: copies out
overlap with copies in, and both with compute. A copy waits for what compute had been given when its tensor
was packed, or its memory allocated, and for nothing after that. Compute may use the bytes of a load as soon
as the copies are on their way, since its stream waits for them. Memory is held until they have ended.
"""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infinity.core.nbytes import BLOCK_NBYTES, Extent, aligned
from infinity.core.plan import Hardware, Place
from infinity.core.transfer import Transfer, TransferEngine, stream
from infinity.device.accelerator import (
    StreamTransfer,
    record,
    synchronize,
    use_own_stream,
    wait_on_host,
    wait_on_stream,
)
from infinity.device.memory import HostBuffer, Lease, Pool
from infinity.nvme.probe import measure
from infinity.nvme.volume import Volume

_MIB = 2**20
#: A copy of this size runs at full speed, and its write begins soon (bytes).
_PIECE_NBYTES = 16 * _MIB

Storage = torch.UntypedStorage


class Loading(NamedTuple):
    """A storage that holds the bytes from ``offset_nbytes`` on as soon as ``transfer`` has ended."""

    storage: Storage
    offset_nbytes: int
    transfer: Transfer


class StoredActivation:
    """Room for one storage, which is given back when it is freed and nothing is in flight.

    Args:
        give_back: Gives back extents or host memory; runs on any thread.
    """

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back = give_back
        self._lock = threading.Lock()  # guards what follows
        self._in_flight: dict[object, Storage] = {}
        self._is_unwanted = self._is_given_back = False

    def store(self, storage: Storage) -> Transfer:
        """Start storing ``storage``, once; it is held until the transfer has ended, and no longer."""
        raise NotImplementedError

    def load(self) -> Loading:
        """Start loading; the store has ended well."""
        raise NotImplementedError

    def free(self) -> None:
        """Give the room back as soon as nothing is in flight. May be called twice, from any thread."""
        self._is_unwanted = True
        self._end(None)

    def _hold(self, storage: Storage, transfer: Transfer) -> Transfer:
        """Keep ``storage`` alive until ``transfer`` has ended."""
        move = object()
        with self._lock:
            self._in_flight[move] = storage
        transfer.then(partial(self._end, move))
        return transfer

    def _end(self, move: object) -> None:
        with self._lock:
            storage = self._in_flight.pop(move, None)
            give_back = self._is_unwanted and not self._in_flight and not self._is_given_back
            self._is_given_back |= give_back
        del storage  # outside the lock: memory is given back
        if give_back:
            self._give_back()


def open_stores(
    device: torch.device, pool: Pool, piece_nbytes: int, volume: Volume | None, engine: TransferEngine | None
) -> "dict[Place, ActivationStore]":
    """Open the stores that there are for activations.

    Without an accelerator activations are in host memory already: only NVMe is farther away.

    Args:
        device: Where activations are.
        pool: Host memory, pinned beside an accelerator.
        piece_nbytes: Bytes of it that are staged at one time.
        volume: Hands out extents; None: there is no NVMe.
        engine: Moves bytes to and from them.
    """
    stores: dict[Place, ActivationStore] = {}
    on_cpu = device.type == "cpu"
    if not on_cpu:
        stores[Place.HOST] = StagedStore(device, pool, piece_nbytes=piece_nbytes)
    if volume is not None and engine is not None:
        stores[Place.NVME] = (
            DirectStore(volume, engine)
            if on_cpu
            else StagedStore(device, pool, volume, engine, piece_nbytes=piece_nbytes)
        )
    return stores


def measure_hardware(
    device: torch.device, directories: Sequence[str | Path], host_nbytes: int, gds: bool = False
) -> Hardware:
    """Measure the channels of this rank; takes some tenths of a second.

    Args:
        device: Where activations are.
        gds: Activations go from there to NVMe by GPUDirect Storage.
        directories: On NVMe, one for each drive; none: nothing can be stored there.
        host_nbytes: Host memory that activations may take.

    Raises:
        DiskError: A file system is full, or a drive reports an error.
    """
    on_cpu = device.type == "cpu"
    # Without an accelerator activations move from and to memory that the allocator hands out.
    place = device if gds or on_cpu else None
    speeds = [measure(Path(directory), allocated_on=place) for directory in directories]
    return Hardware(
        read_bytes_per_s=sum(speed.read_bytes_per_s for speed in speeds),
        write_bytes_per_s=sum(speed.write_bytes_per_s for speed in speeds),
        mixed_bytes_per_s=sum(speed.mixed_bytes_per_s for speed in speeds),
        host_bytes_per_s=0.0 if on_cpu else _host_bytes_per_s(device),
        host_nbytes=0 if on_cpu else host_nbytes,
        # Not shared among threads: those of a parallel region wait for the one whose core I/O takes.
        compute_s_per_byte=max((s.processor_s_per_byte for s in speeds), default=0.0) * on_cpu,
    )


def _host_bytes_per_s(device: torch.device) -> float:
    """The slower of the two directions between an accelerator and pinned memory."""
    there, buffer = torch.empty(64 * _MIB, dtype=torch.uint8, device=device), HostBuffer(64 * _MIB, device)
    here, slowest = buffer.tensor, float("inf")
    try:
        for target, source in ((here, there), (there, here)):
            target.copy_(source)
            synchronize(device)
            began_s = time.perf_counter()
            target.copy_(source)
            synchronize(device)
            slowest = min(slowest, here.numel() / (time.perf_counter() - began_s))
    finally:
        buffer.close()
    return slowest


# --- NVMe, without a copy ----------------------------------------------------------------------------


class DirectStore:
    """NVMe for storages in host memory; see [Note: no copy].

    Attributes:
        padding_nbytes: Bytes that a storage takes beyond its size once it has been loaded.
    """

    padding_nbytes = BLOCK_NBYTES

    def __init__(self, volume: Volume, engine: TransferEngine) -> None:
        self.volume, self.engine = volume, engine

    def reserve(self, storage: Storage, who: str) -> StoredActivation:
        """Reserve room for ``storage``; DiskError: the file system is full."""
        return _Direct(self, storage, who)

    def close(self) -> None:
        """Do nothing: volume and engine belong to others."""


def directly_moved_nbytes(nbytes: int) -> int:
    """Return the bytes that move of a storage of ``nbytes`` in host memory: see [Note: no copy]."""
    return max(0, nbytes // BLOCK_NBYTES - 1) * BLOCK_NBYTES


class _Direct(StoredActivation):
    def __init__(self, store: DirectStore, storage: Storage, who: str) -> None:
        self._engine, self._nbytes = store.engine, storage.nbytes()
        self._head = -storage.data_ptr() % BLOCK_NBYTES
        self._body = directly_moved_nbytes(self._nbytes)
        self._extent = store.volume.allocate(self._body, what=who) if self._body else Extent(())
        super().__init__(partial(_free, store.volume, [self._extent] if self._body else []))
        self._ends: tuple[bytes, bytes] | None = None

    # Beside an operator that has emptied the caches every call of torch is slow: here are as few as possible.

    def store(self, storage: Storage) -> Transfer:
        source, end = _memory(storage, 0, self._nbytes), self._head + self._body
        self._ends = bytes(source[: self._head]), bytes(source[end:])
        return self._hold(storage, self._engine.write(self._extent, source[self._head : end]))

    def load(self) -> Loading:
        storage = torch.empty(self._nbytes + BLOCK_NBYTES, dtype=torch.uint8, device="cpu").untyped_storage()
        offset = -(storage.data_ptr() + self._head) % BLOCK_NBYTES
        target, end = _memory(storage, offset, self._nbytes), self._head + self._body
        assert self._ends is not None
        target[: self._head], target[end:] = self._ends
        transfer = self._engine.read(self._extent, target[self._head : end], urgent=True)
        return Loading(storage, offset, self._hold(storage, transfer))


def _memory(storage: Storage, start: int, nbytes: int) -> memoryview:
    """``nbytes`` from ``start`` on of a storage in host memory, which the caller keeps alive."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(storage.data_ptr() + start)).cast("B")


def _free(volume: Volume, extents: list[Extent]) -> None:
    for extent in extents:
        volume.free(extent)


# --- through host memory -----------------------------------------------------------------------------


class CopyThread:
    """A thread that copies in the order of the calls, on an accelerator's stream of its own."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, f"infinity-{name}", use_own_stream, (device,))

    def run(self, move: Callable[[], None], after: torch.Event | None) -> "Copy":
        """Start ``move()``, whose work on the accelerator comes after an event."""
        copy = Copy(move)
        self._thread.submit(copy.perform, after, self._device)
        return copy

    def close(self) -> None:
        """Finish all moves."""
        self._thread.shutdown()


class Copy(Transfer):
    """A move of a copy thread; once it has ended it holds nothing of what it moved.

    Attributes:
        issued: Ends earlier: when the copies are on their way.
    """

    __slots__ = ("_moves", "issued")

    def __init__(self, move: Callable[[], None]) -> None:
        super().__init__()
        self._moves, self.issued = [move], StreamTransfer()

    def perform(self, after: torch.Event | None, device: torch.device) -> None:
        """Make the move and wait for its copies, on the thread that copies."""

        def issue() -> None:
            move = self._moves.pop()
            wait_on_stream(after, device)
            try:
                move()
            finally:
                self.issued.record(device)

        def end() -> None:
            wait_on_host(record(device))
            self.issued.wait()

        self.issued.run(issue)
        self.run(end)


class StagedStore:
    """Host memory, or NVMe behind it; see [Note: staging].

    Args:
        device: Where activations are.
        pool: Host memory; pinned beside an accelerator.
        volume: Hands out extents; None: stored bytes stay in ``pool``.
        engine: Moves bytes to and from extents.
        piece_nbytes: Bytes that one buffer may take; larger ones than 16 MiB gain nothing.
    """

    padding_nbytes = 0

    def __init__(
        self, device: torch.device, pool: Pool, volume: Volume | None = None,
        engine: TransferEngine | None = None, *, piece_nbytes: int = _PIECE_NBYTES,
    ) -> None:  # fmt: skip
        self.pool, self.volume, self.engine = pool, volume, engine
        self.piece_nbytes = aligned(min(piece_nbytes, _PIECE_NBYTES))
        self.storing, self.loading = CopyThread("store", device), CopyThread("load", device)

    def reserve(self, storage: Storage, who: str) -> StoredActivation:
        """Reserve room for ``storage``; DiskError: the file system is full."""
        if self.volume is None or self.engine is None:
            return _InHost(self, storage, self.pool.lease(storage.nbytes(), who=who))
        if self.engine.name == "gds":
            extent = self.volume.allocate(aligned(storage.nbytes()), what=who)
            return _Gds(self, storage, self.volume, self.engine, extent)
        return _OnDisk(self, storage, self.volume, self.engine, who)

    def close(self) -> None:
        self.storing.close()
        self.loading.close()


class _Staged(StoredActivation):
    """A storage that a copy thread moves."""

    def __init__(self, store: StagedStore, storage: Storage, give_back: Callable[[], None]) -> None:
        super().__init__(give_back)
        self.storing, self.loading = store.storing, store.loading
        self._nbytes, self._device = storage.nbytes(), storage.device
        self._packed = record(storage.device)  # a store may be started later, by another thread

    def store(self, storage: Storage) -> Transfer:
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return self._hold(storage, self.storing.run(lambda: self.put(source), self._packed))

    def load(self) -> Loading:
        target = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        allocated = record(self._device)
        storage, copy = target.untyped_storage(), self.loading.run(lambda: self.get(target), allocated)
        self._hold(storage, copy)
        return Loading(storage, 0, copy.issued)

    def put(self, source: Tensor) -> None:
        """Begin to copy all of ``source`` away, on the thread that stores."""
        raise NotImplementedError

    def get(self, target: Tensor) -> None:
        """Begin to copy all of it back, on the thread that loads."""
        raise NotImplementedError


class _InHost(_Staged):
    """A storage in host memory, each of whose uses follows the end of the copies before it."""

    def __init__(self, store: StagedStore, storage: Storage, lease: Lease) -> None:
        super().__init__(store, storage, lease.release)
        self._lease = lease

    def put(self, source: Tensor) -> None:
        self._lease.tensor.copy_(source, non_blocking=True)

    def get(self, target: Tensor) -> None:
        target.copy_(self._lease.tensor, non_blocking=True)


class _OnDisk(_Staged):
    """A storage in extents, each of which is reached through a piece of host memory."""

    def __init__(
        self, store: StagedStore, storage: Storage, volume: Volume, engine: TransferEngine, who: str
    ) -> None:
        self._pool, self._piece_nbytes, self._engine, self._who = store.pool, store.piece_nbytes, engine, who
        self._extents: list[Extent] = []
        super().__init__(store, storage, partial(_free, volume, self._extents))
        try:
            for start in range(0, self._nbytes, self._piece_nbytes):
                piece_nbytes = min(self._piece_nbytes, self._nbytes - start)
                self._extents.append(volume.allocate(aligned(piece_nbytes), what=who))
        except BaseException:
            self.free()
            raise

    def put(self, source: Tensor) -> None:
        """Copy the next piece while the one before it is copied, and those before that are written."""
        with ExitStack() as held:  # also after an error nothing is in flight at the end
            copied: deque[tuple[Lease, Extent]] = deque()
            for piece, extent in zip(torch.split(source, self._piece_nbytes), self._extents, strict=True):
                lease = self._pool.try_lease(extent.nbytes, who=self._who)
                if lease is None:
                    self._write(copied, held)
                    lease = self._pool.lease(extent.nbytes, who=self._who)
                held.callback(lease.release)
                lease.tensor[: len(piece)].copy_(piece, non_blocking=True)
                lease.record_use()
                self._write(copied, held)
                copied.append((lease, extent))
            self._write(copied, held)

    def _write(self, copied: deque[tuple[Lease, Extent]], held: ExitStack) -> None:
        """Start to write what was copied."""
        while copied:
            lease, extent = copied.popleft()
            write = self._engine.write(extent, lease.memory)
            held.callback(write.wait)
            write.then(lease.release)

    def get(self, target: Tensor) -> None:
        """Read the next piece while the one before it is copied."""
        pieces = [*zip(torch.split(target, self._piece_nbytes), self._extents, strict=True)]

        def read(piece: tuple[Tensor, Extent], lease: Lease) -> Transfer:
            return self._engine.read(piece[1], lease.memory[: piece[1].nbytes])

        with ExitStack() as held:
            size = self._extents[0].nbytes
            buffers = [held.enter_context(self._pool.lease(size, who=self._who)) for _ in pieces[:2]]
            landed = held.enter_context(closing(stream(pieces, buffers, read)))
            for (piece, _), lease in landed:
                piece.copy_(lease.tensor[: len(piece)], non_blocking=True)
                lease.record_use()


class _Gds(_Staged):
    """A storage in an extent, which moves to and from device memory with GPUDirect Storage."""

    def __init__(
        self, store: StagedStore, storage: Storage, volume: Volume, engine: Any, extent: Extent
    ) -> None:
        super().__init__(store, storage, partial(volume.free, extent))
        self._engine, self._extent = engine, extent  # takes tensors, after what the thread's stream waits for

    def put(self, source: Tensor) -> None:
        self._engine.write(self._extent.head(len(source)), source).wait()

    def get(self, target: Tensor) -> None:
        self._engine.read(self._extent.head(len(target)), target).wait()


#: NVMe or host memory, as far as activations are concerned.
ActivationStore = DirectStore | StagedStore
