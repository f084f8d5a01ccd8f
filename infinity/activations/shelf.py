"""Where stored activations wait: NVMe or host memory, and the ways there.

[Note: no copy]
Without an accelerator the engine writes an activation from where it lies. The drive wants whole blocks at
addresses that are multiples of a block, and an allocator gives neither: so the few bytes before the first
and after the last whole block stay in memory, and the rest moves as it is. It comes back into fresh memory
that begins at the same place of a block, so that alignment, which some kernels look at, stays what it was.

[Note: staging]
Other ways go through host memory, pinned beside an accelerator, or with GPUDirect Storage past it. One thread
stores and another one loads, each in the order in which it was asked, and each on a stream of its own:
copies out overlap with copies in, and both with compute. A thread waits for its copies, so who waits for
a transfer need not wait for streams.
"""

import ctypes
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from infinity.activations.lane import Lane
from infinity.core.extent import BLOCK_NBYTES, Extent, aligned
from infinity.core.transfer import Lease, Pool, Transfer, TransferEngine

#: A copy of this size runs at full speed, and its write begins soon (bytes).
_PIECE_NBYTES = 16 * 2**20

Storage = torch.UntypedStorage


class Space(Protocol):
    """Hands out extents; :class:`infinity.nvme.volume.Volume` is one."""

    def allocate(self, nbytes: int, *, what: str, zeroed: bool = False) -> Extent: ...
    def free(self, extent: Extent) -> None: ...


class Stored(Protocol):
    """One storage on a shelf, or on its way there."""

    def store(self, storage: Storage) -> Transfer:
        """Start storing ``storage``, once; it is held until the transfer has ended, and no longer."""
        ...

    def load(self) -> "Loading":
        """Start loading; the store has ended well."""
        ...

    def free(self) -> None:
        """Give the room back, as soon as nothing is in flight. May be called twice, from any thread."""
        ...


class Loading(Protocol):
    """A storage that is being filled.

    Attributes:
        storage: Holds the bytes once ``transfer`` has ended well,
        offset_nbytes: from here on.
    """

    storage: Storage
    offset_nbytes: int
    transfer: Transfer


class Shelf(Protocol):
    """Where storages go."""

    def take(self, storage: Storage, who: str) -> Stored:
        """Room for ``storage``.

        Raises:
            DiskError: The file system is full.
        """
        ...

    def close(self) -> None: ...


class Filled:
    """See :class:`Loading`."""

    __slots__ = ("offset_nbytes", "storage", "transfer")

    def __init__(self, storage: Storage, offset_nbytes: int, transfer: Transfer) -> None:
        self.storage, self.offset_nbytes, self.transfer = storage, offset_nbytes, transfer


# --- NVMe, without a copy ----------------------------------------------------------------------------


class DirectShelf:
    """NVMe for storages in host memory; see [Note: no copy].

    Args:
        space: Where extents come from.
        engine: Reaches them.
    """

    def __init__(self, space: Space, engine: TransferEngine) -> None:
        self.space, self.engine = space, engine

    def take(self, storage: Storage, who: str) -> Stored:
        return _Direct(self, storage, who)

    def close(self) -> None:
        """Nothing: space and engine belong to others."""


class _Direct:
    def __init__(self, shelf: DirectShelf, storage: Storage, who: str) -> None:
        self._shelf, self._nbytes = shelf, storage.nbytes()
        self._head = -storage.data_ptr() % BLOCK_NBYTES
        self._body = max(0, self._nbytes - self._head) // BLOCK_NBYTES * BLOCK_NBYTES
        self._extent = shelf.space.allocate(self._body, what=who) if self._body else Extent(())
        self._room = _Room(partial(_free, shelf.space, [self._extent] if self._body else []))
        self._ends: tuple[bytes, bytes] | None = None

    # Beside an operator that has emptied the caches every call of torch is slow: here are as few as can be.

    def store(self, storage: Storage) -> Transfer:
        source, end = _memory(storage, 0, self._nbytes), self._head + self._body
        self._ends = bytes(source[: self._head]), bytes(source[end:])
        transfer = self._shelf.engine.write(self._extent, source[self._head : end])
        return self._room.busy(transfer, storage)

    def load(self) -> Filled:
        storage = torch.empty(self._nbytes + BLOCK_NBYTES, dtype=torch.uint8).untyped_storage()
        offset = -(storage.data_ptr() + self._head) % BLOCK_NBYTES
        target, end = _memory(storage, offset, self._nbytes), self._head + self._body
        assert self._ends is not None
        target[: self._head], target[end:] = self._ends
        transfer = self._shelf.engine.read(self._extent, target[self._head : end], urgent=True)
        return Filled(storage, offset, self._room.busy(transfer, storage))

    def free(self) -> None:
        self._room.free()


def _bytes(storage: Storage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _memory(storage: Storage, start: int, nbytes: int) -> memoryview:
    """``nbytes`` from ``start`` on of a storage in host memory, which the caller keeps alive."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(storage.data_ptr() + start)).cast("B")


def _free(space: Space, extents: list[Extent]) -> None:
    for extent in extents:
        space.free(extent)


class _Room:
    """Room that is given back when nothing is in flight to or from it."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back = give_back
        self._lock = threading.Lock()  # guards what follows
        self._in_flight: dict[object, Storage] = {}
        self._unwanted = self._given = False

    def busy(self, transfer: Transfer, storage: Storage) -> Transfer:
        """Something is in flight until ``transfer`` ends; so long ``storage`` lives, and no longer."""
        move = object()
        with self._lock:
            self._in_flight[move] = storage
        transfer.then(partial(self._settle, move))
        return transfer

    def free(self) -> None:
        self._unwanted = True
        self._settle(None)

    def _settle(self, move: object) -> None:
        with self._lock:
            storage = self._in_flight.pop(move, None)
            give = self._unwanted and not self._in_flight and not self._given
            self._given |= give
        del storage  # without the lock: memory is given back
        if give:
            self._give_back()


# --- through host memory -----------------------------------------------------------------------------


class StagedShelf:
    """Host memory, or NVMe behind it; see [Note: staging].

    Args:
        device: Where activations are.
        pool: Host memory; pinned beside an accelerator.
        space: Where extents come from; None: what is stored stays in ``pool``.
        engine: Reaches them.
        piece_nbytes: Bytes that one buffer may take; larger ones than 16 MiB gain nothing.
    """

    def __init__(
        self, device: torch.device, pool: Pool, space: Space | None = None,
        engine: TransferEngine | None = None, *, piece_nbytes: int = _PIECE_NBYTES,
    ) -> None:  # fmt: skip
        self.pool, self.space, self.engine = pool, space, engine
        self.piece_nbytes = aligned(min(piece_nbytes, _PIECE_NBYTES))
        self.storing, self.loading = Lane("store", device), Lane("load", device)

    def take(self, storage: Storage, who: str) -> Stored:
        if self.space is None or self.engine is None:
            return _InHost(self, storage, self.pool.lease(storage.nbytes(), who=who))
        if self.engine.name == "gds":
            return _Straight(self, storage, self.space.allocate(aligned(storage.nbytes()), what=who))
        return _OnDisk(self, storage, self._extents(self.space, storage.nbytes(), who), who)

    def close(self) -> None:
        """Finish what is in flight."""
        self.storing.close()
        self.loading.close()

    def _cut(self, nbytes: int) -> list[int]:
        """Bytes of each piece."""
        return [min(self.piece_nbytes, nbytes - start) for start in range(0, nbytes, self.piece_nbytes)]

    def _extents(self, space: Space, nbytes: int, who: str) -> list[Extent]:
        """One for each piece."""
        extents: list[Extent] = []
        try:
            for part_nbytes in self._cut(nbytes):
                extents += [space.allocate(aligned(part_nbytes), what=who)]
        except BaseException:
            for extent in extents:
                space.free(extent)
            raise
        return extents


class _Staged:
    """What the ways through host memory share."""

    def __init__(self, shelf: StagedShelf, storage: Storage, give_back: Callable[[], None]) -> None:
        self.shelf, self._nbytes, self._device = shelf, storage.nbytes(), storage.device
        self._room = _Room(give_back)

    def store(self, storage: Storage) -> Transfer:
        source = _bytes(storage)
        return self._room.busy(self.shelf.storing.run(lambda lane: self.put(lane, source)), storage)

    def load(self) -> Filled:
        target = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        job = self.shelf.loading.run(lambda lane: self.get(lane, target))
        return Filled(target.untyped_storage(), 0, self._room.busy(job, target.untyped_storage()))

    def free(self) -> None:
        self._room.free()

    def put(self, lane: Lane, source: Tensor) -> None:
        """Copy all of ``source`` away; on the lane's thread."""
        raise NotImplementedError

    def get(self, lane: Lane, target: Tensor) -> None:
        """Copy it all back."""
        raise NotImplementedError


class _InHost(_Staged):
    """In host memory."""

    def __init__(self, shelf: StagedShelf, storage: Storage, lease: Lease) -> None:
        super().__init__(shelf, storage, lease.release)
        self._lease = lease

    def put(self, lane: Lane, source: Tensor) -> None:
        lane.copy(self._lease.tensor, source)

    def get(self, lane: Lane, target: Tensor) -> None:
        lane.copy(target, self._lease.tensor)


class _OnDisk(_Staged):
    """In extents, each of which is reached by a piece of host memory."""

    def __init__(self, shelf: StagedShelf, storage: Storage, extents: list[Extent], who: str) -> None:
        assert shelf.space is not None
        super().__init__(shelf, storage, partial(_free, shelf.space, extents))
        self._extents, self._who = extents, who

    def put(self, lane: Lane, source: Tensor) -> None:
        """Copy the next piece while those before it are written."""
        assert self.shelf.engine is not None
        with ExitStack() as held:  # also after an error nothing is in flight at the end
            for part, extent in zip(torch.split(source, self.shelf.piece_nbytes), self._extents, strict=True):
                lease = self.shelf.pool.lease(extent.nbytes, who=self._who)
                held.callback(lease.release)
                lane.copy(lease.tensor[: len(part)], part)
                write = self.shelf.engine.write(extent, lease.memory)
                held.callback(write.wait)
                write.then(lease.release)

    def get(self, lane: Lane, target: Tensor) -> None:
        """Read the next piece while the one before it is copied."""
        parts = torch.split(target, self.shelf.piece_nbytes)
        with ExitStack() as held:
            following = self._read(0, held)
            for number, part in enumerate(parts):
                lease, transfer = following
                if number + 1 < len(parts):
                    following = self._read(number + 1, held)
                transfer.wait()
                lane.copy(part, lease.tensor[: len(part)])
                lease.release()

    def _read(self, piece: int, held: ExitStack) -> tuple[Lease, Transfer]:
        """Start reading a piece; ``held`` waits for it before its memory is given back."""
        assert self.shelf.engine is not None
        extent = self._extents[piece]
        lease = self.shelf.pool.lease(extent.nbytes, who=self._who)
        held.callback(lease.release)
        transfer = self.shelf.engine.read(extent, lease.memory)
        held.callback(transfer.wait)
        return lease, transfer


class _Straight(_Staged):
    """In an extent, to and from device memory."""

    def __init__(self, shelf: StagedShelf, storage: Storage, extent: Extent) -> None:
        assert shelf.space is not None
        super().__init__(shelf, storage, partial(shelf.space.free, extent))
        self._extent = extent

    def put(self, lane: Lane, source: Tensor) -> None:
        lane.catch_up()
        engine: Any = self.shelf.engine  # which takes tensors
        engine.write(self._extent.head(len(source)), source).wait()

    def get(self, lane: Lane, target: Tensor) -> None:
        lane.catch_up()
        engine: Any = self.shelf.engine
        engine.read(self._extent.head(len(target)), target).wait()
