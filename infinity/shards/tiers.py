"""Homes of shards, in host memory or on NVMe: the only code that turns a unit into bytes.

A unit that fits the host budget stays there and moves nothing; the rest have extents. With one
rank and no accelerator, a unit whose home is host memory *is* its flat buffer.

[Note: frozen units]
While a model is built it is unknown what will be trained. So a unit then has its weights and what makes
them exact, and in the host budget the room for its moments is only set aside. When an optimizer is made,
:meth:`Tiers.settle` gives trainable units the rest, and what was set aside for frozen ones to units that
would live on NVMe. A unit that is thawed later gets its moments then.

A quantized unit of a frozen base is in host memory in its stored form, a quarter to a half of its weights.
Its exact values are those of the checkpoint's files.

Where the newest values of a unit in host memory are on an accelerator (:mod:`infinity.shards.on_device`),
what reads or writes values here has them brought home first.
"""

from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from infinity.comm.ranks import Ranks
from infinity.core.budget import rounded
from infinity.core.errors import BudgetError, DiskError, StateError
from infinity.core.extent import Extent
from infinity.core.lifecycle import Tier, UnitState
from infinity.core.nbytes import format_nbytes
from infinity.core.transfer import ChainedTransfer, Lease, Pool, Transfer, TransferEngine
from infinity.optim.layout import StateLayout, master_of, store_master
from infinity.partition.unit import Unit
from infinity.shards.mapped import MappedBase
from infinity.shards.on_device import DeviceShards
from infinity.shards.snapshot import Snapshot, Source
from infinity.shards.storage import Storage
from infinity.shards.store import ChunkExtents, ShardStore, Version


@dataclass(frozen=True, slots=True)
class Resident:
    """A shard in host memory: weights ``(shard_numel,)`` and the fields of its state.

    Attributes:
        dtype: Of the weights.
        state: Without the moments while the unit was never trained.
        leases: The first is of the weights, which an accelerator copies.
        set_aside: The host budget has room for its moments.
    """

    dtype: torch.dtype
    state: tuple[Tensor, ...]
    leases: tuple[Lease, ...]
    set_aside: bool

    @property
    def weight(self) -> Tensor:
        """The weights, after copies of them that are in flight."""
        weight: Tensor = self.leases[0].tensor.view(self.dtype)
        return weight

    def values(self) -> tuple[Tensor, ...]:
        """Return weights and fields of the state, after copies of the weights that are in flight."""
        return self.weight, *self.state

    @property
    def nbytes(self) -> int:
        return self.leases[0].nbytes + sum(values.nbytes for values in self.state)


@dataclass(frozen=True, slots=True)
class Held:
    """The stored form of a shard in host memory.

    Attributes:
        set_aside: The host budget has room for what its training takes.
    """

    lease: Lease
    set_aside: bool


class Tiers:
    """The homes of all units of this rank.

    It has more attributes than other classes: a table for each kind of home, and the parts of the storage
    that hold them. Classes of one home each would ask each other where a unit is.

    Args:
        storage: Host memory for residents and staging, and files for the others.
        ranks: Those that share the units.
        reduce_dtype: Dtype of the gradient reduction.

    Attributes:
        base: Reads units of a frozen base where they lie in a checkpoint, while it is loaded.
        from_base: Indices of units that were loaded so: their values can be had again.
        base_files: Digests of a sample of each of its files, by name.
        mapped: The base of each unit that is read where it lies, by the unit's index.
        held: Of those, the stored form of units in host memory. A unit that gets a home of its own leaves it
            there: a copy of it may be on its way.
        pending: The states of an interrupted run are still to be put into their places. Until then units
            on NVMe have none, and what is stored in a unit is forgotten.
        on_device: Of units in host memory, those on the accelerator, too; None: there is none.
        before_write: Called before committed values are written in place.
        snapshot: What is being saved beside training; any thread may end that, and leave one of no unit.
    """

    def __init__(self, storage: Storage, ranks: Ranks, reduce_dtype: torch.dtype) -> None:
        self.storage, self._ranks, self._reduce_dtype = storage, ranks, reduce_dtype
        self.layout: StateLayout = storage.layout
        self.pool: Pool = storage.host_pool
        self.store, self.engine = storage.store, storage.units_engine
        self.chunk_numel = storage.chunk_numel
        self._exact, self._moments = self.layout.only(exact=True), self.layout.only(moments=True)
        self.residents: dict[int, Resident] = {}
        self.resident_nbytes, self._used_nbytes = storage.resident_nbytes, 0
        self.base: MappedBase | None = None
        self.from_base: set[int] = set()
        self.base_files: Mapping[str, str] = {}
        self.mapped: dict[int, MappedBase] = {}
        self.held: dict[int, Held] = {}
        self._recorded: set[int] = set()  # residents whose values are on NVMe, too
        self.pending = False
        self.on_device: DeviceShards | None = None
        self.before_write: Callable[[], object] = lambda: None
        self.snapshot = self._nothing = Snapshot({}, self.layout, self.pool, lambda *_: nullcontext(()))

    # --- homes -------------------------------------------------------------------------------

    def place(self, unit: Unit) -> None:
        """Give a new unit its home, with room for weights and what makes them exact.

        Raises:
            BudgetError: It fits no tier; says what is needed.
            DiskError: The file system is full.
        """
        nbytes = self._nbytes(unit)
        if self.base is not None and self.base.map(unit, quantized=True):
            self.mapped[unit.index] = self.base
            self._hold(unit, set_aside=True)
        elif self._used_nbytes + nbytes <= self.resident_nbytes:
            self._used_nbytes += nbytes
            self._make_resident(unit, set_aside=True)
        elif self.store is not None:
            if self._awaits(unit):
                return
            if self.base is not None and self.base.map(unit):
                self.mapped[unit.index] = self.base
            else:
                self.store.allocate(unit.index, unit.shard_numel, unit.name)
        else:
            raise BudgetError(
                f"{unit.name} needs {format_nbytes(nbytes)} of host memory for its weights and optimizer "
                f"state; memory.host leaves {format_nbytes(self.resident_nbytes)} for them, of which "
                f"{format_nbytes(self._used_nbytes)} are taken by the units before it. Raise memory.host to "
                f"{self._used_nbytes + nbytes} bytes, which the units up to this one take, or more (infinity "
                "plan says what all of them do), or give memory.nvme one or more directories"
            )

    def streams(self, unit: Unit) -> bool:
        """Whether full values of the unit come and go; else its home is its flat buffer."""
        return unit.home is Tier.NVME or unit.stored is not None or not self._ranks.alone_on_cpu

    def settle(self, units: Iterable[Unit], *, movable: bool = False) -> None:
        """Give units the room that is right for what is trained now: see [Note: frozen units].

        Every rank must call with the same units frozen.

        Args:
            movable: No unit is in use yet, so that homes may change.

        Raises:
            BudgetError: A thawed unit's moments do not fit the host budget.
            DiskError: The file system is full.
        """
        units = list(units)
        if movable:
            for unit in units:
                resident = self.residents.get(unit.index)
                if resident is not None and resident.set_aside and not unit.trainable:
                    self.residents[unit.index] = replace(resident, set_aside=False)
                    self._used_nbytes -= self._trained_nbytes(unit)
                self._settle_held(unit)
            for unit in sorted(units, key=lambda unit: not unit.trainable):
                self._promote_to_host(unit)
        for unit in units:
            if unit.trainable:
                self._give_moments(unit)

    def _hold(self, unit: Unit, *, set_aside: bool) -> None:
        """Read the stored form of a quantized unit into host memory if it fits."""
        assert unit.stored is not None
        nbytes = rounded(unit.stored.shard_nbytes)
        aside = self._trained_nbytes(unit) if set_aside else 0
        if self._used_nbytes + nbytes + aside > self.resident_nbytes:
            return
        lease = self.pool.lease(unit.stored.shard_nbytes, who=unit.name)
        try:
            self.mapped[unit.index].fetch(unit, lease.memory, 0).wait()
        except BaseException:
            lease.release()
            raise
        self._used_nbytes += nbytes + aside
        self.held[unit.index] = Held(lease, set_aside)
        unit.home = Tier.HOST
        unit.lifecycle.state = UnitState.ON_HOST

    def _settle_held(self, unit: Unit) -> None:
        """Give back what was set aside for a frozen unit's training, or all, where it is trained."""
        held = self.held.get(unit.index)
        if held is None:
            return
        if held.set_aside:
            self._used_nbytes -= self._trained_nbytes(unit)
            self.held[unit.index] = replace(held, set_aside=False)
        if unit.trainable or unit.stored is None:
            held.lease.release()
            del self.held[unit.index]
            self._used_nbytes -= rounded(held.lease.nbytes)
            self._leave_host(unit)

    def _leave_host(self, unit: Unit) -> None:
        if unit.home is Tier.HOST and unit.index not in self.residents:
            unit.home = Tier.NVME
            if unit.state is UnitState.ON_HOST:
                unit.lifecycle.move(UnitState.ON_NVME)

    def lease_of(self, unit: Unit) -> Lease | None:
        """Return what holds a unit's shard in memory, in the form that it travels in; None: nothing does."""
        if unit.stored is not None:
            held = self.held.get(unit.index)
            return None if held is None else held.lease
        if self.on_device is not None and (lease := self.on_device.weight(unit.index)) is not None:
            return lease
        resident = self.residents.get(unit.index)
        return None if resident is None else resident.leases[0]

    def resident_nbytes_of(self, unit: Unit, *, moments: bool) -> int:
        """Return the bytes that the pool takes for a resident."""
        if unit.index in self.held and unit.index not in self.residents:
            return rounded(self.held[unit.index].lease.nbytes)
        n = unit.shard_numel
        nbytes = rounded(self.layout.weight_nbytes(n)) + rounded(self._exact.state_nbytes(n))
        return nbytes + (rounded(self._moments.state_nbytes(n)) if moments else 0)

    def on_device_nbytes_of(self, unit: Unit) -> int:
        """Return the bytes that the unit's weights and states take of a pool of accelerator memory."""
        n = unit.shard_numel
        return rounded(self.layout.weight_nbytes(n)) + rounded(self.layout.state_nbytes(n))

    def _nbytes(self, unit: Unit, *, trained: bool = True) -> int:
        """Return the bytes of the host budget that a resident takes."""
        return self.resident_nbytes_of(unit, moments=False) + (self._trained_nbytes(unit) if trained else 0)

    def _trained_nbytes(self, unit: Unit) -> int:
        """Return what it takes more while it is trained: moments, and beside an accelerator its gradient."""
        nbytes = rounded(self._moments.state_nbytes(unit.shard_numel))
        return nbytes + (rounded(self.gradient_nbytes(unit)) if self._ranks.on_accelerator else 0)

    def gradient_dtype(self, unit: Unit) -> torch.dtype:
        """Return the dtype of this rank's reduced gradient."""
        return self._reduce_dtype if self._ranks.world_size > 1 else unit.dtype

    def gradient_nbytes(self, unit: Unit) -> int:
        """Return the bytes of this rank's reduced gradient."""
        return unit.shard_numel * self.gradient_dtype(unit).itemsize

    def _make_resident(self, unit: Unit, *, set_aside: bool) -> None:
        n, who = unit.shard_numel, unit.name
        leases = [self.pool.lease(self.layout.weight_nbytes(n), who=who)]
        exact: tuple[Tensor, ...] = ()
        if self._exact.fields:
            leases.append(self.pool.lease(self._exact.state_nbytes(n), who=who))
            exact = self._exact.views(leases[1].tensor, n)
        self.residents[unit.index] = Resident(unit.dtype, exact, tuple(leases), set_aside)
        unit.home = Tier.HOST
        unit.lifecycle.state = UnitState.ON_HOST

    def _promote_to_host(self, unit: Unit) -> None:
        """Move a unit from NVMe into host memory if it fits."""
        if unit.stored is not None and not unit.trainable:
            if unit.index not in self.held:
                self._hold(unit, set_aside=False)
            return
        nbytes = self._nbytes(unit, trained=bool(unit.trainable))
        if (
            unit.index in self.residents
            or not self._placed(unit)
            or self._used_nbytes + nbytes > self.resident_nbytes
        ):
            return
        self._used_nbytes += nbytes
        self._make_resident(unit, set_aside=bool(unit.trainable))
        self._read_resident(unit)
        self._store.free(unit.index)
        self._unmap(unit)

    def _read_resident(self, unit: Unit) -> None:
        """Fill a unit in host memory from its committed version on NVMe."""
        ours = self.residents[unit.index]
        itemsize = sum(field.itemsize for field in ours.state)
        if unit.index not in self.mapped and all(
            chunk.state.nbytes == chunk.numel * itemsize for chunk in self._committed(unit).chunks
        ):
            for transfer in self._move_resident(unit, self._engine.read):
                transfer.wait()
            return
        for start, weight, state in self._each_distant_chunk(unit):
            part = slice(start, start + len(weight))
            ours.weight[part].copy_(weight)
            for mine, field in zip(ours.state, state, strict=False):
                mine[part].copy_(field)

    def _give_moments(self, unit: Unit) -> None:
        resident = self.residents.get(unit.index)
        if resident is None:
            if self.store is not None and not self._awaits(unit):
                self._train(unit)
            return
        if len(resident.state) == len(self.layout.fields):
            return
        if not resident.set_aside:
            nbytes = self._trained_nbytes(unit)
            if self._used_nbytes + nbytes > self.resident_nbytes:
                raise BudgetError(
                    f"{unit.name} was frozen when the optimizer was made, and is trained now: its moments "
                    f"need {format_nbytes(nbytes)} of host memory, of which memory.host leaves "
                    f"{format_nbytes(self.resident_nbytes - self._used_nbytes)}. Raise memory.host, or make "
                    "the optimizer after requires_grad_(True)"
                )
            self._used_nbytes += nbytes
        lease = self.pool.lease(self._moments.state_nbytes(unit.shard_numel), who=unit.name)
        moments = self._moments.views(lease.tensor, unit.shard_numel)
        for moment in moments:
            moment.zero_()
        self.residents[unit.index] = replace(
            resident, state=(*resident.state, *moments), leases=(*resident.leases, lease)
        )

    # --- exact values, for construction and for people who write weights ---------------------

    def put(
        self, unit: Unit, master: Callable[[int, int], Tensor],
        moments: Callable[[int, int], Sequence[Tensor]] | None = None,
    ) -> None:  # fmt: skip
        """Store exact values of this rank's shard; a new unit gets its home first.

        Args:
            unit: Whose.
            master: Gives elements of the full flat buffer, in fp32, or in bf16 where that is exact and
                the compute dtype.
            moments: The same of the moments, called after it; None: they are zero.
        """
        if unit.index not in self.residents and not self._placed(unit):
            self.place(unit)
            if unit.index in self.mapped:
                self.from_base.add(unit.index)
                return  # with its values
        if self._awaits(unit):
            return
        first, trains = unit.shard_start, self._trains(unit)
        for start, weight, state in self._each_chunk(unit, read=False, write=True):
            values = master(first + start, first + start + len(weight))
            self._set_master(values, weight, state)
            if not trains:
                continue
            if moments is None:
                for moment in self.layout.moments_of(state):
                    moment.zero_()
            else:
                given = moments(first + start, first + start + len(weight))
                for moment, value in zip(self.layout.moments_of(state), given, strict=True):
                    moment.copy_(value)
        if self.base is not None:
            self.from_base.add(unit.index)

    def get(self, unit: Unit) -> Tensor:
        """Return the full exact values, fp32, ``(numel,)``. Every rank must call."""
        return self.gather(unit, self.shard_fields(unit)[0])

    def gather(self, unit: Unit, shard: Tensor) -> Tensor:
        """Return full values on the CPU, ``(numel,)``, from every rank's ``shard``. Every rank must call."""
        if self._ranks.collectives is None:
            return shard
        full = torch.empty(unit.numel, dtype=shard.dtype, device="cpu")
        unit.shard_of(full).copy_(shard)
        full = full.to(self._ranks.device)
        self._ranks.collectives.gather(unit.index, unit.name, lambda: full).wait()
        return full.cpu()

    def shard_fields(self, unit: Unit) -> tuple[Tensor, ...]:
        """Copies of this shard's exact values and moments, fp32, ``(shard_numel,)`` each."""
        out = [torch.empty(unit.shard_numel, device="cpu") for _ in self.layout.full_names]
        for start, chunk in self.chunk_fields(unit):
            for field, values in zip(out, chunk, strict=True):
                field[start : start + len(values)] = values
        return tuple(out)

    def chunk_fields(self, unit: Unit) -> Generator[tuple[int, tuple[Tensor, ...]]]:
        """This shard's exact values and moments, fp32, in chunks that stay until the next one is asked for.

        Yields:
            The chunk's first element in the shard, and its fields.
        """
        yield from self._fields(self._each_chunk(unit))

    def _fields(
        self, chunks: Iterable[tuple[int, Tensor, tuple[Tensor, ...]]]
    ) -> Generator[tuple[int, tuple[Tensor, ...]]]:
        for start, weight, state in chunks:
            yield start, self.layout.full_values(weight, state)

    def set_shard_fields(self, unit: Unit, fields: Sequence[Tensor]) -> None:
        """Replace this shard's exact values and moments (optimizer state that is loaded)."""
        self._give_moments(unit)
        for start, weight, state in self._each_chunk(unit, write=True):
            stop = start + len(weight)
            store_master(self.layout, fields[0][start:stop], weight, state)
            for moment, values in zip(self.layout.moments_of(state), fields[1:], strict=True):
                moment.copy_(values[start:stop])

    def set_weights(self, unit: Unit, weight: Tensor, before: Tensor) -> None:
        """Replace this shard's weights, ``(shard_numel,)`` in the compute dtype.

        Where a weight is what it was ``before``, its exact value stays what it was; elsewhere the
        exact value becomes the weight. The moments stay.
        """
        for start, stored, state in self._each_chunk(unit, write=True):
            part = slice(start, start + len(stored))
            exact = master_of(self.layout, before[part], state)
            exact = torch.where(weight[part] == before[part], exact, weight[part].float())
            store_master(self.layout, exact, stored, state)

    def _each_chunk(
        self, unit: Unit, *, read: bool = True, write: bool = False
    ) -> Iterator[tuple[int, Tensor, tuple[Tensor, ...]]]:
        """Every chunk's start, weights and state in memory; stored again when ``write``.

        Moments of a unit that has none are zeros, and are not stored.
        """
        if write:
            self.snapshot.wait()
            self.before_write()
            self.from_base.discard(unit.index)
            self._recorded.discard(unit.index)
        resident = self.at_home(unit)
        if write and self.on_device is not None:
            self.on_device.leave(unit.index)
        if resident is None:
            if self._awaits(unit):
                yield from self._each_missing_chunk(unit)
            else:
                yield from self._each_distant_chunk(unit, read=read, write=write)
            return
        for start in range(0, unit.shard_numel, self.chunk_numel):
            stop = min(start + self.chunk_numel, unit.shard_numel)
            state = self.layout.complete([field[start:stop] for field in resident.state], stop - start)
            yield start, resident.weight[start:stop], state

    def _each_distant_chunk(
        self, unit: Unit, *, read: bool = True, write: bool = False
    ) -> Iterator[tuple[int, Tensor, tuple[Tensor, ...]]]:
        """The same of a unit that is not in host memory."""
        if write:
            self._own(unit)
        if unit.index in self.mapped:
            yield from self._each_mapped_chunk(unit)
        else:
            yield from self._each_stored_chunk(unit, read=read, write=write)

    def _each_mapped_chunk(self, unit: Unit) -> Iterator[tuple[int, Tensor, tuple[Tensor, ...]]]:
        """The same of a unit that is read where it lies."""
        base, first = self.mapped[unit.index], unit.shard_start
        for start, numel in self._store.places(unit.shard_numel):
            nbytes = self.layout.weight_nbytes(numel)
            with self.pool.lease(nbytes + self.layout.state_nbytes(numel), who="exact values") as lease:
                weight = lease.tensor[:nbytes].view(unit.dtype)
                state = self.layout.views(lease.tensor[nbytes:], numel)
                with base.master(unit, first + start, first + start + numel) as values:
                    self._set_master(values, weight, state)
                for moment in self.layout.moments_of(state):
                    moment.zero_()
                yield start, weight, state

    def _set_master(self, values: Tensor, weight: Tensor, state: tuple[Tensor, ...]) -> None:
        """Write exact values, of fp32 or of bf16, into weights and what makes them exact."""
        if values.dtype == torch.bfloat16:
            weight.copy_(values)
            for field in state[: len(self.layout.exact)]:
                field.zero_()
        else:
            store_master(self.layout, values, weight, state)

    def _own(self, unit: Unit) -> None:
        """Give a unit that is read where it lies extents of this run, with its values.

        Raises:
            DiskError: The file system is full.
        """
        if unit.index not in self.mapped:
            return
        base, first = self.mapped[unit.index], unit.shard_start
        self._store.allocate(unit.index, unit.shard_numel, unit.name)
        for start, weight, state in self._each_stored_chunk(unit, read=False, write=True):
            with base.master(unit, first + start, first + start + len(weight)) as values:
                self._set_master(values, weight, state)
        self._unmap(unit)

    def _unmap(self, unit: Unit) -> None:
        """The unit has a home of its own."""
        if unit.index in self.mapped:
            self.snapshot.wait_for(unit.index)
        base = self.mapped.pop(unit.index, None)
        if base is not None:
            base.drop(unit)
            self._leave_host(unit)

    def _each_stored_chunk(
        self, unit: Unit, *, read: bool = True, write: bool = False
    ) -> Iterator[tuple[int, Tensor, tuple[Tensor, ...]]]:
        """The same of a unit with extents; where memory allows, a chunk lands while the next one is made."""
        with ExitStack() as landing:
            for number, chunk in enumerate(self._committed(unit).chunks):
                weight_nbytes = self.layout.weight_nbytes(chunk.numel)
                with ExitStack() as held:
                    lease = self._room(weight_nbytes + self.layout.state_nbytes(chunk.numel), landing)
                    held.callback(lease.release)
                    weight = lease.tensor[:weight_nbytes].view(unit.dtype)
                    state = self.layout.views(lease.tensor[weight_nbytes:], chunk.numel)
                    if read:
                        self._fetch(chunk, lease, weight, state)
                    yield chunk.start, weight, state
                    if write:
                        target = chunk
                        if not chunk.exact.pieces and self._has_remainder(weight, state):
                            target = self._store.add_exact(unit.index, number)
                        for transfer in self._start(self._engine.write, target, lease.memory):
                            held.callback(transfer.wait)
                        landing.close()
                        landing.enter_context(held.pop_all())

    def _each_missing_chunk(self, unit: Unit) -> Iterator[tuple[int, Tensor, tuple[Tensor, ...]]]:
        """Zeros: while a model is built some code reads values, which count for nothing then."""
        for start, numel in self._store.places(unit.shard_numel):
            weight = torch.zeros(numel, dtype=unit.dtype, device="cpu")
            yield start, weight, self.layout.complete((), numel)

    def _awaits(self, unit: Unit) -> bool:
        """Whether the unit's states will come from an interrupted run."""
        return self.pending and not (unit.index in self.from_base or self.base is not None)

    def _room(self, nbytes: int, landing: ExitStack) -> Lease:
        """Staging memory, beside what is ``landing`` or after it."""
        lease = self.pool.try_lease(nbytes, who="exact values")
        if lease is None:
            landing.close()
            lease = self.pool.lease(nbytes, who="exact values")
        return lease

    def _fetch(self, chunk: ChunkExtents, lease: Lease, weight: Tensor, state: tuple[Tensor, ...]) -> None:
        """Read what a chunk has on NVMe, and complete what it does not have there."""
        for transfer in self._start(self._engine.read, chunk, lease.memory):
            transfer.wait()
        if not chunk.exact.pieces:
            store_master(self.layout, weight.float(), weight, state)
        if not chunk.moments.pieces:
            for moment in self.layout.moments_of(state):
                moment.zero_()

    def _has_remainder(self, weight: Tensor, state: tuple[Tensor, ...]) -> bool:
        """Whether any fp32 master differs from its rounded weight."""
        if self.layout.dtype is torch.float16:
            return True  # room that was not written reads as zeros, which are no float16 masters
        return any(bool(remainder.view(torch.int64).any()) for remainder in state[: len(self.layout.exact)])

    def _start(
        self, move: Callable[[Extent, memoryview], Transfer], chunk: ChunkExtents, memory: memoryview
    ) -> list[Transfer]:
        """Read or write what a chunk has on NVMe; ``memory`` has room for all that it could have."""
        return [move(extent, part) for extent, part in self._parts(chunk, memory)]

    def _parts(self, chunk: ChunkExtents, memory: memoryview) -> Iterator[tuple[Extent, memoryview]]:
        """Yield a chunk's extents on NVMe, each with its place in memory."""
        begin = 0
        for extent, nbytes in (
            (chunk.weight, self.layout.weight_nbytes(chunk.numel)),
            (chunk.exact, self._exact.state_nbytes(chunk.numel)),
            (chunk.moments, self._moments.state_nbytes(chunk.numel)),
        ):
            if extent.pieces:
                yield extent, memory[begin : begin + nbytes]
            begin += nbytes

    # --- the states of an interrupted run (infinity.shards.resume) ------------------------------

    def adopt(self, unit: Unit, versions: list[Version], committed: int) -> None:
        """Let a unit have versions that were found; one that lives in host memory is read."""
        self._unmap(unit)
        self._store.adopt(unit.index, unit.name, versions)
        unit.version = committed
        if unit.index in self.residents:
            self._read_resident(unit)
            self._recorded.add(unit.index)

    def make_anew(self, unit: Unit) -> Iterator[tuple[int, Tensor, tuple[Tensor, ...]]]:
        """Give a unit room, and yield the start, weights and state of each chunk, to be written."""
        self._unmap(unit)
        unit.version = 0
        if unit.index not in self.residents:
            self._store.allocate(unit.index, unit.shard_numel, unit.name)
            if unit.trainable or any(segment.steps for segment in unit.segments):
                self._store.train(unit.index)
        yield from self._each_chunk(unit, read=False, write=True)

    @contextmanager
    def reading(self, chunk: ChunkExtents, room: Lease | None = None) -> Iterator[tuple[Tensor, ...]]:
        """Weights and state of a chunk that was found, in memory that is held inside the context.

        Args:
            room: That memory; None: of the host pool.
        """
        middle = self.layout.weight_nbytes(chunk.numel)
        end = middle + self.layout.state_nbytes(chunk.numel)
        with nullcontext(room) if room is not None else self.pool.lease(end, who="saved states") as lease:
            weight = lease.tensor[:middle].view(self.layout.dtype)
            state = self.layout.views(lease.tensor[middle:end], chunk.numel)
            self._fetch(chunk, lease, weight, state)
            yield weight, *state

    # --- units that are on an accelerator, too ---------------------------------------------------

    def at_home(self, unit: Unit) -> Resident | None:
        """Return a unit in host memory when that has its newest values; None: it lives elsewhere."""
        home = self.bring_home(unit)
        if home is not None:
            home.wait()
        return self.residents.get(unit.index)

    def bring_home(self, unit: Unit, written: Iterable[Transfer] = ()) -> Transfer | None:
        """Start to copy a unit's newest values from the accelerator to host memory; None: it is not there.

        Args:
            written: What writes those in host memory to NVMe.
        """
        if self.on_device is None or unit.index not in self.on_device:
            return None
        preserve, written = partial(self.snapshot.preserve, unit.index), tuple(written)

        def before() -> None:
            for transfer in written:
                transfer.wait()
            preserve()

        return self.on_device.bring_home(unit.index, before)

    # --- residents on NVMe, for a commit -------------------------------------------------------

    def changed_residents(self) -> list[int]:
        """Indices of units in host memory that have other values than on NVMe, or none there."""
        return [i for i in self.residents if i not in self.from_base and i not in self._recorded]

    def about_to_update(self, unit: Unit) -> tuple[Resident, Callable[[], object]]:
        """Return a unit in host memory whose values will change in their place, and what to call before."""
        self._recorded.discard(unit.index)
        preserve = partial(self.snapshot.preserve, unit.index)  # not a snapshot of what this update makes
        return self.residents[unit.index], preserve

    def store_resident(
        self, unit: Unit, next_place: Callable[[Unit], int], updated: Transfer | None = None
    ) -> list[Transfer]:
        """Start to write a unit in host memory into its next version on NVMe, which becomes the unit's.

        Args:
            next_place: Which that is, if it has several.
            updated: Ends when its values are there; None: they are.

        Raises:
            DiskError: The file system is full.
        """
        resident, store = self.residents[unit.index], self._store
        new = not store.has(unit.index)
        if new:
            store.allocate(unit.index, unit.shard_numel, unit.name)
        if len(resident.state) == len(self.layout.fields):
            store.train(unit.index, 2)
        elif self._exact.fields:
            store.add_all_exact(unit.index)
        if new:
            unit.version = 0
        elif store.trains(unit.index):
            unit.version = next_place(unit)
        self._recorded.add(unit.index)
        if updated is None or updated.done():
            return self._move_resident(unit, self._engine.write)
        return self._move_resident(
            unit,
            lambda extent, memory: ChainedTransfer(updated, lambda: self._engine.write(extent, memory)),
        )

    def _move_resident(self, unit: Unit, move: Callable[[Extent, memoryview], Transfer]) -> list[Transfer]:
        """Read or write a unit in host memory, where its committed version has the same fields."""
        resident, started = self.residents[unit.index], []
        for chunk in self._committed(unit).chunks:
            extent, at = chunk.weight + chunk.state, 0
            for values in resident.values():
                part = values[chunk.start : chunk.start + chunk.numel].view(torch.uint8).numpy().data
                started.append(move(extent.part(at, part.nbytes), part))
                at += part.nbytes
        return started

    # --- what training moves -----------------------------------------------------------------

    def version(self, unit: Unit, place: int | None = None) -> Version:
        """Return the version that an update reads, or the one in ``place``, which it writes."""
        self._train(unit)
        return self._store.version(unit.index, unit.version if place is None else place)

    def next_place(self, unit: Unit, recorded: Container[int]) -> int | None:
        """Return the place that is written next, by an update or for a commit; None: there is none now.

        Args:
            recorded: Places that commit records name, which a crash must leave whole.
        """
        self._train(unit)
        if self.storage.memory.versions == 1:
            self.snapshot.wait_for(unit.index)
            return unit.version
        taken = {self.snapshot.place(unit.index)}
        if unit.index not in self.residents:  # whose committed values are in memory, too
            taken.add(unit.version)
        places = range(len(self._store.versions_of(unit.index)))
        return next((place for place in places if place not in taken and place not in recorded), None)

    def spare_place(self, unit: Unit) -> int | None:
        """Return a place beside the one that is being saved, which :meth:`next_place` had to leave out.

        It is made; if the file system is full, it is the one that was saved, once it has been. None: no place
        of the unit is being saved any more.
        """
        pinned = self.snapshot.place(unit.index)
        if pinned is None:
            return None
        try:
            self._store.add_version(unit.index)
        except DiskError:
            self.snapshot.wait_for(unit.index)
            return pinned
        return len(self._store.versions_of(unit.index)) - 1

    def add_versions(self, units: Iterable[Unit]) -> None:
        """Give units on NVMe a third place: one is recorded while the other two take turns.

        Raises:
            DiskError: The file system is full.
        """
        store = self._store
        store.versions = 3
        try:
            for unit in units:
                if unit.index in self.residents or not self._stored(unit):
                    continue
                if store.trains(unit.index) and len(store.versions_of(unit.index)) < store.versions:
                    store.add_version(unit.index)
        except DiskError:
            store.versions = 2
            raise

    # --- gradients that wait on NVMe -----------------------------------------------------------

    @property
    def with_gradient(self) -> frozenset[int]:
        """Indices of units whose gradient has a place on NVMe."""
        return frozenset() if self.store is None else self.store.with_gradient

    def gradient(self, unit: Unit) -> Extent:
        """Return the place of a unit's gradient on NVMe, which is made if there is none.

        Raises:
            DiskError: The file system is full.
        """
        return self._store.gradient(unit.index, self.gradient_nbytes(unit), unit.name)

    def free_gradient(self, unit: Unit) -> None:
        """Give that place back; nothing may be in flight there."""
        self._store.free_gradient(unit.index)

    def write_gradient(self, unit: Unit, memory: memoryview) -> Transfer:
        """Start to write a unit's gradient to its place."""
        return self._engine.write(self.gradient(unit), memory)

    # --- what is saved beside training ---------------------------------------------------------

    def pin(self, units: Iterable[Unit], landing: Mapping[int, Sequence[Transfer]]) -> Snapshot:
        """Keep what every unit holds now until it was read, or :meth:`unpin`; between two steps.

        Args:
            landing: What is on its way to NVMe, by index of the unit.
        """
        sources = {}
        for unit in units:
            if unit.index in self.mapped:
                sources[unit.index] = Source(lasting=self._fields(self._each_mapped_chunk(unit)))
                continue
            resident = self.residents.get(unit.index)
            version, place, values = None, None, None
            if resident is None or unit.index in self._recorded:
                version = self._committed(unit)
                place = unit.version % len(self._store.versions_of(unit.index))
            if resident is not None:
                values = resident.values()
            starts = range(0, unit.shard_numel, self.chunk_numel)
            chunks = [(start, min(self.chunk_numel, unit.shard_numel - start)) for start in starts]
            if version is not None:
                chunks = [(chunk.start, chunk.numel) for chunk in version.chunks]
            sources[unit.index] = Source(chunks, values, version, place, landing.get(unit.index, ()))
        self.snapshot = Snapshot(sources, self.layout, self.pool, self.reading)
        return self.snapshot

    def unpin(self) -> None:
        """End what is saved beside training. May be called twice."""
        snapshot, self.snapshot = self.snapshot, self._nothing
        snapshot.close()

    def fetch(self, unit: Unit, memory: memoryview, start: int = 0) -> Transfer:
        """Start fetching this shard, in the form that it travels in, from byte ``start`` on."""
        if unit.stored is not None:
            return self.mapped[unit.index].fetch(unit, memory, start)
        return self.read_weight(unit, memory, start)

    def read_weight(self, unit: Unit, memory: memoryview, start: int = 0) -> Transfer:
        """Start reading this shard's committed weights, in the compute dtype, from byte ``start`` on."""
        base = self.mapped.get(unit.index)
        if base is not None:
            return base.read(unit, memory, start)
        part = self._committed(unit).weight.part(start, memory.nbytes)
        return self._engine.read(part, memory, urgent=True)

    def _train(self, unit: Unit) -> None:
        """Give a unit on NVMe room for all that training needs, in files of this run."""
        self._own(unit)
        self._store.train(unit.index)

    def fetched_nbytes(self, unit: Unit, piece_nbytes: int | None) -> int:
        """Bytes that a fetch of this shard reads, in pieces of ``piece_nbytes``; None: as a whole."""
        if unit.home is not Tier.NVME:
            return 0
        base = self.mapped.get(unit.index)
        if base is None:
            return unit.shard_nbytes
        return base.nbytes(unit, min(unit.shard_nbytes, piece_nbytes or unit.shard_nbytes))

    def _committed(self, unit: Unit) -> Version:
        return self._store.version(unit.index, unit.version)

    def _trains(self, unit: Unit) -> bool:
        """Whether the unit has moments."""
        resident = self.residents.get(unit.index)
        if resident is None:
            return unit.index not in self.mapped and self._store.trains(unit.index)
        return len(resident.state) == len(self.layout.fields)

    def _stored(self, unit: Unit) -> bool:
        return self.store is not None and self.store.has(unit.index)

    def _placed(self, unit: Unit) -> bool:
        """Whether a unit that is not in host memory has a home."""
        return unit.index in self.mapped or self._stored(unit)

    @property
    def _store(self) -> ShardStore:
        if self.store is None:
            raise StateError("memory.nvme names no directory, yet a unit is asked for there")
        return self.store

    @property
    def _engine(self) -> TransferEngine:
        if self.engine is None:
            raise StateError("memory.nvme names no directory, yet a unit was stored there")
        return self.engine
