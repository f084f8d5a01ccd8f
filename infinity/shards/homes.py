"""Homes of shards in host memory, on NVMe and on the accelerator; values kept for a checkpoint.

A home yields its exact values chunk by chunk to whatever reads or writes them: construction, checkpoints,
exports, user code. Homes in a checkpoint's own files are in :mod:`infinity.shards.base`.

[Note: two places of one shard] A unit whose home is host memory may have its weights and states on the
accelerator, too, if ``memory.device`` has room for them (:func:`infinity.core.budget.place_states`). It goes
there with its first update. From then on its gradients stay there, updates run there, gathers copy the
weights from there, and host memory has older values, until a commit, checkpoint, export or state dictionary
has the newest ones **brought home**. New values from elsewhere are written to host memory; the unit goes to
the accelerator again with its next update.

[Note: order] One stream updates shards and brings them home, in the order of the calls. So bringing home
gives the values after the last update before the call, however soon the next one follows. An update has ended
when the stream was given the last of its work: leases carry the order to the streams that copy the weights.
The caller gives the stream its work, if there is nothing to wait for. A thread does so for work that waits
for host memory, and for all work queued behind it.

[Note: what keeps the values] While one thread writes a portable checkpoint and others train, a
:class:`Snapshot` keeps the values of its step. A unit on NVMe keeps the place that holds them: its updates
alternate between the others, of which one more is made if needed. Without room for that, or with one place
only, the update waits until the unit has been read. A unit that is read where it lies in a checkpoint does
not change; one that is to get a home of its own waits. A unit in host memory is updated in its place. Just
before, its values are left to where a commit has written them, or copied if the host budget has room; else
the update waits. With the first copy the snapshot takes the memory through which units on NVMe are read: else
these could wait for copies, which are freed after them.
"""

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from infinity.comm.shared import NodeMemory, SharedSlice
from infinity.core.errors import BudgetError, DiskError, StateError
from infinity.core.lifecycle import Tier
from infinity.core.nbytes import Transfer, chained, rounded
from infinity.device.accelerator import new_stream, on_stream, record, use_own_stream, wait_on_host
from infinity.device.memory import DevicePool, Lease
from infinity.optim.rules import RESIDENT_NUMEL
from infinity.optim.state import StateField, StateLayout
from infinity.partition.unit import Chunk, Home, Unit
from infinity.shards.journal import NOWHERE, ChunkExtents, Version
from infinity.shards.pipeline import Run, Runs
from infinity.shards.storage import ShardStore, Storage, chunk_places


class DiskHome(Home):
    """Shard on NVMe: one version until it is first trained, then two or more places, written in turn."""

    def __init__(self, store: ShardStore, unit: Unit, versions: list[Version] | None = None) -> None:
        super().__init__(Tier.NVME)
        self.store, self._unit = store, unit
        places = chunk_places(unit.shard_numel, store.chunk_numel)
        self.versions = versions or [store.weights(places, unit.name)]

    @property
    def trains(self) -> bool:
        chunks = [chunk for version in self.versions for chunk in version.chunks]
        if self.store.layout.moments:
            return all(chunk.moments.pieces for chunk in chunks)
        exact = not self.store.layout.exact or all(chunk.exact.pieces for chunk in chunks)
        return exact and len(self.versions) >= min(2, self.store.versions)

    def at(self, place: int) -> Version:
        """Return the version in a place; a unit that was never trained has one."""
        return self.versions[place % len(self.versions)]

    @property
    def committed(self) -> Version:
        return self.at(self.version)

    def fetch(self, memory: memoryview, start: int = 0) -> Transfer:
        part = self.committed.weight.part(start, memory.nbytes)
        return self.store.engine.read(part, memory, urgent=True)

    read_weight = fetch

    def fetched_nbytes(self, piece_nbytes: int | None) -> int:
        return self._unit.shard_nbytes

    def train(self, count: int | None = None) -> None:
        """Make room for training, zeros, in ``count`` places (default: as many as the store's)."""
        if self.trains:
            return
        [first], store, name = self.versions, self.store, self._unit.name
        chunks = (store.with_state(chunk, name, moments=True) for chunk in first.chunks)
        self.versions = [Version(tuple(chunks)), *(self._new() for _ in range(1, count or store.versions))]

    def add_exact(self, number: int) -> ChunkExtents:
        """Make room, zeros, for what makes a chunk exact, of a shard that was never trained."""
        [version] = self.versions
        chunk = self.store.with_state(version.chunks[number], self._unit.name, moments=False)
        if chunk is not version.chunks[number]:
            self.versions = [Version((*version.chunks[:number], chunk, *version.chunks[number + 1 :]))]
        return chunk

    def add_version(self) -> None:
        """Make room for another version of a trained shard; after a DiskError nothing has changed."""
        self.versions = [*self.versions, self._new()]

    def _new(self) -> Version:
        chunks: list[ChunkExtents] = []
        store, name = self.store, self._unit.name
        try:
            for chunk in self.versions[0].chunks:
                chunks += store.weights([(chunk.start, chunk.numel)], name).chunks
                for moments in (False, True):
                    chunks[-1] = store.with_state(chunks[-1], name, moments=moments)
        except DiskError:
            store.free_versions([Version(tuple(chunks))])
            raise
        return Version(tuple(chunks))

    def free(self) -> None:
        self.store.free_versions(self.versions)
        self.versions = []

    def chunks(self, *, read: bool = True, write: bool = False) -> Iterator[Chunk]:
        """Yield every chunk; where memory allows, one is written while the caller has the next."""
        store = self.store
        with ExitStack() as landing:
            for number, chunk in enumerate(self.committed.chunks):
                nbytes = self.store.layout.nbytes(chunk.numel)
                lease = store.pool.try_lease(nbytes, who="exact values")
                if lease is None:
                    landing.close()
                    lease = store.pool.lease(nbytes, who="exact values")
                with ExitStack() as held:
                    held.callback(lease.release)
                    weight, state = self.store.layout.chunk_views(lease.tensor, chunk.numel)
                    if read:
                        store.read(chunk, lease)
                    yield chunk.start, weight, state
                    if write:
                        # Room that was not written reads as zeros, which are no float16 masters.
                        half = self.store.layout.dtype is torch.float16
                        bits = (field.view(torch.int64) for field in state[: len(self.store.layout.exact)])
                        if not chunk.exact.pieces and (half or any(bool(each.any()) for each in bits)):
                            chunk = self.add_exact(number)
                        for transfer in store.write(chunk, lease):
                            held.callback(transfer.wait)
                        landing.close()
                        landing.enter_context(held.pop_all())


@dataclass(slots=True)
class DeviceShard:
    """A shard in accelerator memory, which has the newest values of a unit."""

    weight: Lease
    state: Lease
    fields: tuple[Tensor, ...] = ()  # weights, then each field of the state, once it has come
    home: Transfer | None = None  # the last copy of it to host memory; None: values there are older

    def release(self) -> None:
        self.weight.release()
        self.state.release()


class HostHome(Home):
    """Shard in host memory: weights, ``(shard_numel,)``, and the fields of its state.

    With the ``memory`` of a node weights are beside those of other ranks: ``lease.whole`` are all of a unit.
    """

    def __init__(self, storage: Storage, unit: Unit, memory: NodeMemory | None = None) -> None:
        super().__init__(Tier.HOST)
        self._storage, self._unit = storage, unit
        self.places = chunk_places(unit.shard_numel, storage.chunk_numel)
        nbytes, made = self.layout.weight_nbytes(unit.shard_numel), None if memory is None else memory.slice
        self.leases = [self._storage.host_pool.lease(nbytes, who=unit.name, made=made)]
        self.state: tuple[Tensor, ...] = ()  # without the moments while the unit was never trained
        self.bare = True
        self.copy: DiskHome | None = None  # where it is written on NVMe for a commit
        self.recorded = False  # the copy has its values
        self.storing: Sequence[Transfer] = ()  # writes of the copy, until the next update of the values here
        self.there: DeviceShard | None = None  # its newest values: see [Note: two places of one shard]
        if self.layout.dtype is not torch.bfloat16:  # else once its values need it, or it is trained
            self.add()

    def _check_bare(self, state: Sequence[Tensor]) -> None:
        """Raise a BudgetError if a chunk's weights alone are not exact, and have no room for more."""
        if self.bare and any(bool(each.any()) for each in state[: len(self.layout.exact)]):
            raise BudgetError(
                f"{self._unit.name} is frozen, and gets values that bfloat16 cannot hold: their 2 bytes more "
                "per parameter are more than memory.host leaves. Raise memory.host, or round them",
                "memory.host",
            )

    def add(self, *, moments: bool = False) -> None:
        """Take memory, zeros, for what makes the weights exact if there is none, and for ``moments``."""
        pool, numel, name = self._storage.host_pool, self._unit.shard_numel, self._unit.name
        for fields in (self.layout.only(exact=self.bare), self.layout.only(moments=moments)):
            if fields.fields:
                self.leases.append(pool.lease(fields.state_nbytes(numel), who=name))
                self.state += fields.views(self.leases[-1].tensor.zero_(), numel)
        self.bare = False

    @property
    def layout(self) -> StateLayout:
        return self._storage.layout

    @property
    def trains(self) -> bool:
        return len(self.state) == len(self.layout.fields)

    @property
    def lease(self) -> Lease:
        """The lease of the newest weights: of accelerator memory, if they are there."""
        return self.leases[0] if self.there is None else self.there.weight

    @property
    def is_on_device(self) -> bool:
        return self.there is not None and (self.updating is None or self.updating.computed.done())

    def updated_in_place(self) -> Callable[[], object]:
        own, buffer = super().updated_in_place(), self.leases[0].buffer
        if self.there is not None or not isinstance(buffer, SharedSlice):
            return own
        begun = buffer.begun

        def wait() -> None:
            own()  # or its error
            buffer.wait_for_writes(begun, self._unit.name)

        return wait

    @property
    def weight(self) -> Tensor:
        """The weights in host memory; waits for copies of them in flight."""
        weight: Tensor = self.leases[0].tensor.view(self.layout.dtype)
        return weight

    def values(self) -> tuple[Tensor, ...]:
        """Return weights and state in host memory; waits for copies of the weights in flight."""
        return self.weight, *self.state

    @property
    def nbytes(self) -> int:
        return self.leases[0].nbytes + sum(values.nbytes for values in self.state)

    def chunks(self, *, read: bool = True, write: bool = False) -> Iterator[Chunk]:
        """Yield views of every chunk in its place."""
        for start, numel in self.places:
            state = self.layout.complete(self.layout.part(self.state, start, start + numel), numel)
            yield start, self.weight[start : start + numel], state
            if write:
                self._check_bare(state)

    def fill(self, home: Home) -> None:
        """Copy the values of another home of the unit here; blocking."""
        for start, weight, state in home.chunks():
            self._check_bare(state)
            stop = start + len(weight)
            mine = self.weight[start:stop], *self.layout.part(self.state, start, stop)
            for target, source in zip(mine, (weight, *state), strict=False):
                target.copy_(source)

    def _blocks_of(self, chunk: ChunkExtents) -> Iterator[memoryview]:
        """Yield the memory of a chunk's weights, and of each field of its state, in whole blocks."""
        fields = StateField("weight", self.layout.dtype), *self.layout.fields
        for values, of in zip(self.values(), fields, strict=False):  # the last ones may be missing
            memory = values.view(torch.uint8)
            begin = memory.storage_offset() + chunk.start // of.per * of.dtype.itemsize
            yield memory.as_strided((of.nbytes(chunk.numel),), (1,), begin).numpy().data

    def store_copy(
        self, store: ShardStore, next_place: Callable[[Unit], int], updated: Transfer | None
    ) -> None:
        """Start to write the values, once they are ``updated``, to the next place of the copy."""
        new = self.copy is None
        copy = self.copy = self.copy or DiskHome(store, self._unit)
        if self.trains:
            copy.train(2)
        elif self.state:
            for number in range(len(copy.versions[0].chunks)):
                copy.add_exact(number)
        if new:
            self.version = 0
        elif copy.trains:
            self.version = next_place(self._unit)
        copy.version, self.recorded = self.version, True

        storing = list[Transfer]()
        for chunk in copy.committed.chunks:
            extent, at = chunk.weight + chunk.state, 0
            for part in self._blocks_of(chunk):
                write = partial(store.engine.write, extent.part(at, part.nbytes), part)
                storing.append(write() if updated is None else chained(updated, write))
                at += part.nbytes
        self.storing = storing


class DeviceShards:
    """Shards of this rank in accelerator memory; see [Note: two places of one shard]."""

    def __init__(self, layout: StateLayout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self.chosen: frozenset[int] = frozenset()  # units whose gradients stay on the accelerator
        self.pool = DevicePool(0, device)
        self._thread = ThreadPoolExecutor(1, "infinity-device-update", use_own_stream, (device,))
        self._stream = new_stream(device)
        self._lock = threading.Lock()  # guards what follows, and the order on the stream
        self._queued = 0  # calls that the thread still has to make
        self._homes: dict[int, HostHome] = {}  # of units that are here, too

    def update(
        self, unit: Unit, host: HostHome, gradient: Callable[[], Tensor], runs: Runs,
        after: Transfer | None, ended: Callable[[BaseException | None], None],
        transform: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        """Start to update a shard, which is copied here first if it is not here yet; does not block.

        Args:
            gradient: Returns the gradient on the accelerator, after earlier uses of its memory.
            after: The update in flight that makes the values of ``host``.
            ended: Called when the stream has been given the update, or with the error.
            transform: Makes of directions, in the place of the gradient, what the last runs apply.
        """
        with self._lock:
            new, layout = host.there is None, self._layout
            if host.there is None:
                sizes = layout.weight_nbytes, layout.state_nbytes
                weight, state = (self.pool.lease(size(unit.shard_numel), who=unit.name) for size in sizes)
                host.there = DeviceShard(weight, state)
                self._homes[unit.index] = host
            shard = host.there
            shard.home = None

            def update(run: Run, weight: Tensor, grad: Tensor) -> None:
                part, fields = slice(run.start, run.stop), layout.part(shard.fields[1:], run.start, run.stop)
                fields = layout.select(fields, run.rule.layout(weight.dtype))
                run.rule.update_on_device(
                    weight[part], grad[part], fields, run.hyper, piece_numel=RESIDENT_NUMEL
                )

            def play() -> BaseException | None:
                try:
                    if new and after is not None:
                        after.wait()
                    grad = gradient()
                    # After the copies of other streams.
                    weight: Tensor = shard.weight.tensor.view(layout.dtype)
                    if new:
                        shard.fields = weight, *layout.views(shard.state.tensor, weight.numel())
                        for target, source in zip(shard.fields, host.values(), strict=True):
                            target.copy_(source, non_blocking=True)
                    for run in runs.first:
                        update(run, grad, grad)
                    transform()
                    for run in runs.last:
                        update(run, shard.fields[0], grad)
                    shard.weight.record_use()  # which other streams copy; states are used by this one only
                except BaseException as raised:  # surfaces at wait
                    return raised.with_traceback(None)
                return None

            if new or self._queued:
                self._queue(lambda: ended(play()), ended)
                return
            with on_stream(self._stream):
                error = play()
        with on_stream(self._stream):
            ended(error)

    def _queue(self, call: Callable[[], object], failed: Callable[[BaseException], object]) -> None:
        """Let the thread make ``call``, which gives the stream work, or ``failed`` if there is no stream.

        The caller holds the lock.
        """
        self._queued += 1

        def play() -> None:
            try:
                with on_stream(self._stream):
                    call()
            except BaseException as error:  # of a device that does nothing any more
                failed(error.with_traceback(None))
            finally:
                with self._lock:
                    self._queued -= 1

        self._thread.submit(play)

    def bring_home(self, host: HostHome, before: Callable[[], object]) -> Transfer | None:
        """Start to copy a shard's newest values to host memory; None: they are there.

        ``before`` is called on this class's thread, and returns when host memory may be written.
        """
        with self._lock:
            shard = host.there
            if shard is None or shard.home is not None:
                return None if shard is None else shard.home
            home = shard.home = Transfer()

            def copy() -> None:
                before()
                # Not through the lease: copies of the weights wait for what the update has left there.
                for target, source in zip(host.values(), shard.fields, strict=True):
                    target.copy_(source, non_blocking=True)
                wait_on_host(record(self._device))

            self._queue(lambda: home.run(copy), home.finish)
            return home

    def leave(self, index: int) -> None:
        """Give up a unit's place on the accelerator, after it was brought home; does not block."""
        with self._lock:
            host = self._homes.pop(index, None)
            if host is not None and host.there is not None:
                self._queue(host.there.release, lambda error: None)  # in the order of its stream
                host.there = None

    def elsewhere(self, chosen: frozenset[int]) -> frozenset[int]:
        """Return the units that are here but not among ``chosen``."""
        return frozenset(self._homes) - chosen

    def close(self) -> None:
        """End the thread and free the memory; values not brought home are lost. May be called twice."""
        for index in list(self._homes):
            self.leave(index)
        self._thread.shutdown()
        self.pool.close()


@dataclass(slots=True)
class Kept:
    """Describes where the values of one unit are that a snapshot keeps."""

    home: Home
    landing: Sequence[Transfer]  # what must end before: the update, and writes
    chunks: Sequence[ChunkExtents] = ()  # none: the home is a checkpoint's files, which do not change
    values: tuple[Tensor, ...] | None = None  # weights and state in host memory; None: only on NVMe
    place: int | None = None  # on NVMe, where `chunks` are; None: the values are only in host memory
    copy: Lease | None = None  # holds `values`, where they are the snapshot's own
    read: Transfer = field(default_factory=Transfer)  # ends when they have been read, or will not be


class Snapshot:
    """Keeps the values of units as they are after ``landing``; see [Note: what keeps the values]."""

    def __init__(
        self, storage: Storage, units: Iterable[Unit], landing: Mapping[int, Sequence[Transfer]]
    ) -> None:
        self._storage, self._layout = storage, storage.layout
        self._lock = threading.RLock()  # guards what follows
        self.kept: dict[int, Kept] = {}  # by index of a unit that was not read yet
        self._room: Lease | None = None  # in which chunks are read
        self._cancelled, self._reading = False, Transfer()  # the last read of a unit that began
        self._reading.finish()
        for unit in units:
            home = unit.home
            kept = self.kept[unit.index] = Kept(home, landing[unit.index])
            disk: Home | None = home
            if isinstance(home, HostHome):
                kept.values = home.values()
                kept.chunks = [ChunkExtents(*place, NOWHERE) for place in home.places]
                disk = home.copy if home.recorded else None
            if isinstance(disk, DiskHome):
                kept.chunks, kept.place = disk.committed.chunks, disk.version % len(disk.versions)

    def read(self, index: int) -> Generator[tuple[int, tuple[Tensor, ...]]]:
        """Yield first element and fields of each chunk of a shard's exact values and moments, fp32.

        They are valid until the next ones. Once for each unit: it may be overwritten afterwards. Raises a
        DiskError if a read failed, or the update that wrote the values, and a StateError after a close.
        """
        with self._lock:
            self._check()
            kept = self.kept[index]
            self._reading = kept.read
        try:
            for transfer in kept.landing:
                transfer.wait()
            for start, weight, state in () if kept.chunks else kept.home.chunks():
                yield start, self._layout.full_values(weight, state)
            for chunk in kept.chunks:
                with self._lock:
                    self._check()
                    fields = None if kept.values is None else self._copies(kept.values, chunk)
                if fields is not None:
                    yield chunk.start, fields
                elif self._storage.store is not None:  # it is there
                    with self._storage.store.reading(chunk, self._room) as (weight, *saved):
                        yield chunk.start, self._layout.full_values(weight, saved)
            self._check()
        finally:
            self._release(index)

    def _copies(self, values: Sequence[Tensor], chunk: ChunkExtents) -> tuple[Tensor, ...]:
        stop, (weight, *fields) = chunk.start + chunk.numel, values
        state = self._layout.complete(self._layout.part(fields, chunk.start, stop), chunk.numel)
        full = self._layout.full_values(weight[chunk.start : stop], state)
        return tuple(each.clone() for each in full)

    def _check(self) -> None:
        if self._cancelled:
            raise StateError("the model was closed while a checkpoint of it was saved")

    def _release(self, index: int) -> None:
        with self._lock:
            kept = self.kept.pop(index, None)
            if kept is not None and kept.copy is not None:
                kept.copy.release()
            if not self.kept and self._room is not None:
                self._room.release()
                self._room = None
        if kept is not None:
            kept.read.finish()

    def close(self) -> None:
        """Wait until nothing is read any more, and let every unit be overwritten. May be called twice."""
        with self._lock:
            self._cancelled = True
        self._reading.wait()
        for index in list(self.kept):
            self._release(index)

    def place(self, index: int) -> int | None:
        """Return the place of a unit that must not be overwritten; None: none must be kept."""
        kept = self.kept.get(index)
        return None if kept is None else kept.place

    def preserve(self, index: int) -> None:
        """Wait until the values of a unit in host memory may be overwritten there."""
        with self._lock:
            kept = self.kept.get(index)
            if kept is None or kept.values is None or kept.copy is not None:
                return
            if kept.place is not None:
                kept.values = None
                return
            if self._copy(kept, kept.values):
                return
        self.wait_for(index)

    def _copy(self, kept: Kept, values: Sequence[Tensor]) -> bool:
        if self._room is None:  # for the largest chunk
            stored = (each.chunks for each in self.kept.values() if each.place is not None)
            numel = max((chunk.numel for chunks in stored for chunk in chunks), default=0)
            self._room = self._storage.host_pool.try_lease(self._layout.nbytes(numel), who="a checkpoint")
        nbytes = sum(rounded(each.nbytes) for each in values)
        lease = None if self._room is None else self._storage.host_pool.try_lease(nbytes, who="a checkpoint")
        if lease is None:
            return False
        copies, at = [], 0
        for each in values:
            copies.append(lease.tensor[at : at + each.nbytes].view(each.dtype).copy_(each))
            at += rounded(each.nbytes)
        kept.values, kept.copy = tuple(copies), lease
        return True

    def wait_for(self, index: int) -> None:
        """Wait until a unit has been read, or will not be."""
        if (kept := self.kept.get(index)) is not None:
            kept.read.wait()

    def wait(self) -> None:
        """Wait until all units have been read, or will not be."""
        for index in list(self.kept):
            self.wait_for(index)
