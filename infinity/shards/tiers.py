"""Placement of shards: which home a unit gets within the budgets, and its exact values there.

A unit that fits the host budget stays there, a quantized one of a frozen base in its stored form; the others
live on NVMe. With one rank and no accelerator, or several that share host memory, the home of a unit in host
memory *is* its flat buffer.

[Note: frozen units] While a model is built, it is not known which units will be trained. So a unit first
gets its weights, with what makes them exact if its values need that; the bytes of the rest of its state are
only set aside. When an optimizer is made, :meth:`Tiers.settle` makes room for the state of trainable units,
and gives what was set aside for frozen ones to units that would live on NVMe. A model that runs before it
has an optimizer (a reference, one that generates) lends that to its other frozen units, until an optimizer
needs the room. A unit that is thawed later gets its state then. All ranks must freeze the same units.
"""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy

import torch
from torch import Tensor

from infinity.comm.ranks import Ranks
from infinity.core import budget
from infinity.core.errors import BudgetError, DiskError, StateError
from infinity.core.lifecycle import Tier
from infinity.core.nbytes import Transfer, format_nbytes, rounded
from infinity.device.accelerator import trim_heap
from infinity.device.memory import Lease
from infinity.optim.matrix import matrices_of
from infinity.optim.rule import OFFSET
from infinity.optim.state import StateLayout, master_of, store_master
from infinity.partition.unit import Chunk, Home, Unit
from infinity.shards.base import BaseHome, FrozenBase
from infinity.shards.homes import DeviceShards, DiskHome, HostHome, Snapshot
from infinity.shards.journal import Version
from infinity.shards.storage import ShardStore, Storage, chunk_places

#: The key, beside those of units, of what is set aside for the largest matrix's sums.
_LARGEST = -(2**62)


class Tiers:
    """Gives each unit its home, and reads and writes its exact values there."""

    def __init__(self, storage: Storage, ranks: Ranks, reduce_dtype: torch.dtype) -> None:
        self.storage, self.ranks, self.reduce_dtype = storage, ranks, reduce_dtype
        self.resident_nbytes = storage.resident_nbytes
        self.taken: dict[int, int] = {}  # bytes of it, also set aside, by unit's index; by ~index, of sums
        self._lent: list[Unit] = []  # in host memory only until an optimizer needs the room
        self.base: FrozenBase | None = None  # while a checkpoint with one is loaded
        self.base_files: Mapping[str, str] = {}  # digests of a sample of each of its files, by name
        # An interrupted run is still to be adopted: until then units on NVMe have no room, and drop writes.
        self.pending = False
        self.on_device: DeviceShards | None = None  # shards that are on the accelerator, too
        self.before_write: Callable[[], object] = lambda: None  # before values are written in place
        self.snapshot = Snapshot(storage, (), {})  # what is saved beside training; any thread may end that

    @property
    def layout(self) -> StateLayout:
        return self.storage.layout

    @property
    def store(self) -> ShardStore:
        """Return the room on NVMe; StateError: there is none."""
        if self.storage.store is None:
            raise StateError("memory.nvme names no directory, yet a unit is asked for there")
        return self.storage.store

    def streams(self, unit: Unit) -> bool:
        """Return whether a unit's full values come and go; else its home is its flat buffer."""
        there = self.ranks.host_is_whole and not self.ranks.on_accelerator
        return unit.home.tier is Tier.NVME or unit.stored is not None or not there

    def resident_nbytes_of(self, unit: Unit, *, moments: bool) -> int:
        """Return the bytes of the host budget that a unit in host memory takes."""
        stored, held = unit.stored, unit.home.stored_form is not None
        if stored is not None and not isinstance(unit.home, HostHome) and (held or not unit.trainable):
            return rounded(stored.shard_nbytes)  # also if it has yet to come
        weight, exact, more = map(rounded, self.layout.parts_nbytes(unit.shard_numel))
        return weight + exact + (more if moments else -self._lacking(unit))

    def _lacking(self, unit: Unit) -> int:
        """Return the bytes of what would make a bare unit exact; 0: it is not bare, or will not be."""
        bare = unit.home.bare and not self._is_restoring(unit)
        return rounded(self.layout.parts_nbytes(unit.shard_numel)[1]) if bare else 0

    def trained_nbytes(self, unit: Unit) -> int:
        """Return what training adds: the rest of the state, and beside an accelerator the gradient."""
        nbytes = rounded(self.layout.parts_nbytes(unit.shard_numel)[2]) + self._lacking(unit)
        return nbytes + (rounded(self.gradient_nbytes(unit)) if self.ranks.on_accelerator else 0)

    def set_aside_sums(self, units: Iterable[Unit]) -> int:
        """Set aside what a rank keeps at most of trained units' matrices, wherever the units live.

        Returns the bytes of that for all units so far: a rank has no more than an even share and one matrix.
        """
        for unit in units:
            shapes = [s.whole_shape for s in unit.segments if not s.first and s.whole.requires_grad]
            kept = {each: 4 * sum(map(math.prod, self.storage.rule.sums(each).values())) for each in shapes}
            self.taken[~unit.index] = -(-sum(map(kept.__getitem__, shapes)) // self.ranks.world_size)
            if self.ranks.world_size > 1:
                largest = (nbytes // max(1, matrices_of(of)[0]) for of, nbytes in kept.items() if nbytes)
                self.taken[_LARGEST] = max(self.taken.get(_LARGEST, 0), *largest, 0)
        return sum(nbytes for key, nbytes in self.taken.items() if key < 0)

    def _trainable_nbytes(self, unit: Unit) -> int:
        return self.resident_nbytes_of(unit, moments=False) + self.trained_nbytes(unit)

    def gradient_dtype(self, unit: Unit) -> torch.dtype:
        """Return the dtype of this rank's reduced gradient."""
        return self.reduce_dtype if self.ranks.world_size > 1 else unit.dtype

    def gradient_nbytes(self, unit: Unit) -> int:
        return unit.shard_numel * self.gradient_dtype(unit).itemsize

    def _take(self, unit: Unit, nbytes: int) -> bool:
        """Let a unit have this many bytes of the budget; False: they are not there."""
        before = self.taken.get(unit.index, 0)
        fits = nbytes <= before or sum(self.taken.values()) - before + nbytes <= self.resident_nbytes
        if fits:
            self.taken[unit.index] = nbytes
        return fits

    def _add_exact(self, unit: Unit) -> None:
        """Make room for what makes a unit in host memory exact, if the budget has it."""
        if isinstance(unit.home, HostHome) and unit.home.bare:
            nbytes = self.resident_nbytes_of(unit, moments=False) + self._lacking(unit)
            if self._take(unit, max(nbytes, self.taken.get(unit.index, 0))):
                unit.home.add()

    def place(self, unit: Unit) -> None:
        """Give a new unit its home, with room for its weights and all that training needs."""
        self.set_aside_sums([unit])
        nbytes = self._trainable_nbytes(unit)
        home = None if self.base is None else self.base.home_of(unit, quantized=True)
        if home is not None:
            unit.move_to(home)
            self._hold(unit, home, self.trained_nbytes(unit))
        elif self._take(unit, nbytes):
            unit.move_to(HostHome(self.storage, unit, self.ranks.memory))
        elif self.storage.store is not None:
            if not self._is_restoring(unit):
                home = None if self.base is None else self.base.home_of(unit)
                unit.move_to(home or DiskHome(self.storage.store, unit))
        else:
            taken_nbytes = sum(self.taken.values())
            raise BudgetError(
                f"{unit.name} needs {format_nbytes(nbytes)} of host memory for its weights and optimizer "
                f"state; memory.host leaves {format_nbytes(self.resident_nbytes)} for them, of which "
                f"{format_nbytes(taken_nbytes)} are taken by the units before it. Raise memory.host to "
                f"{taken_nbytes + nbytes} bytes, which the units up to this one take, or more (infinity "
                "plan says what all of them do), or give memory.nvme one or more directories",
                "memory.host",
            )

    def settle(
        self, units: Iterable[Unit], *, movable: bool = False, planned: bool = False, trains: bool = True
    ) -> None:
        """Make room for what is trained now; homes may change if ``movable``. See [Note: frozen units].

        ``planned``: as for :meth:`Storage.settled_nbytes`. Unless it ``trains``, there is no optimizer yet:
        what it is to train keeps its home, and what was set aside for it.
        """
        units = list(units)
        if movable:
            self.ranks.wait_for_writes("the homes of units")  # nor does a rank read any more
            trained_units = [unit for unit in units if unit.trainable]
            trained = [(self.gradient_nbytes(unit), unit.shard_nbytes) for unit in trained_units]
            settled_nbytes = self.storage.settled_nbytes(trained, planned=planned)
            self.resident_nbytes += settled_nbytes - self.storage.resident_nbytes
            self.storage.resident_nbytes = settled_nbytes
            self.taken.pop(_LARGEST, None)
            self.set_aside_sums(units)
            if trains:
                self._end_loan(trained_units)
            for unit in units:
                if trains or not unit.trainable:
                    self._give_back(unit)
            for unit in trained_units if trains else ():
                self._promote(unit)
            frozen = [u for u in units if not u.trainable and u.index not in self.taken]
            sizes = [self.resident_nbytes_of(unit, moments=False) for unit in frozen]
            for place in budget.spread(sizes, self.resident_nbytes - sum(self.taken.values())):
                self._promote(frozen[place])
                self._lent += [] if trains else [frozen[place]]
        for unit in units if trains else ():
            if unit.trainable:
                self._make_trainable(unit)

    def spare_nbytes(self, units: Iterable[Unit]) -> int:
        """Return half of the host memory that neither residents nor chunks of updates may take."""
        storage, pool = self.storage, self.storage.host_pool
        wished = sum(self.resident_nbytes_of(unit, moments=bool(unit.trainable)) for unit in units)
        chunks_nbytes = budget.STAGED_CHUNKS * storage.chunk_nbytes if storage.memory.nvme else 0
        taken = min(self.resident_nbytes, wished) + chunks_nbytes
        return max(0, pool.capacity_nbytes - max(pool.leased_nbytes, taken)) // 2

    def _hold(self, unit: Unit, home: BaseHome, aside_nbytes: int) -> None:
        """Read a quantized unit's stored form into host memory, if it fits with the bytes to set aside."""
        assert unit.stored is not None
        if not self._take(unit, rounded(unit.stored.shard_nbytes) + aside_nbytes):
            return
        made = None if self.ranks.memory is None else self.ranks.memory.slice
        lease = self.storage.host_pool.lease(unit.stored.shard_nbytes, who=unit.name, made=made)
        try:
            home.fetch(lease.memory).wait()
        except BaseException:
            lease.release()
            raise
        held = copy(home)
        held.stored_form = lease
        unit.move_to(held)

    def _end_loan(self, trained: Iterable[Unit]) -> None:
        """Move back what a run without an optimizer brought to host memory, if ``trained`` units need it."""
        wanted = {unit.index: self._trainable_nbytes(unit) for unit in trained}
        lent, self._lent = self._lent, []
        for unit in lent if sum((self.taken | wanted).values()) > self.resident_nbytes else ():
            host = unit.home
            if host.stored_form is not None:
                self._drop_form(unit, host.stored_form)
            elif isinstance(host, HostHome):
                disk = DiskHome(self.store, unit)
                disk.reloadable = host.reloadable
                pairs = zip(disk.chunks(read=False, write=True), host.chunks(), strict=True)
                for (_, weight, state), (_, mine, state_here) in pairs:
                    for target, source in zip((weight, *state), (mine, *state_here), strict=True):
                        target.copy_(source)
                self._move(unit, disk)
                for lease in host.leases:
                    lease.release()
                del self.taken[unit.index]

    def _drop_form(self, unit: Unit, form: Lease) -> None:
        bare = copy(unit.home)
        bare.stored_form = None
        unit.move_to(bare)
        form.release()
        del self.taken[unit.index]

    def _give_back(self, unit: Unit) -> None:
        """Give back what was set aside and is not needed: moments, or a trained unit's stored form."""
        form = unit.home.stored_form
        if form is not None and (unit.trainable or unit.stored is None):
            self._drop_form(unit, form)
        elif unit.index in self.taken:  # of a trained one, the moments of another rule may take less
            trained_nbytes = self.trained_nbytes(unit) if unit.trainable else 0
            self._take(unit, self.resident_nbytes_of(unit, moments=False) + trained_nbytes)

    def _promote(self, unit: Unit) -> None:
        home, trained = unit.home, bool(unit.trainable)
        if not isinstance(home, DiskHome | BaseHome):
            return
        if isinstance(home, BaseHome) and unit.stored is not None and not trained:
            if home.stored_form is None:
                self._hold(unit, home, 0)
            return
        nbytes = self._trainable_nbytes(unit) if trained else self.resident_nbytes_of(unit, moments=False)
        if self._take(unit, nbytes):
            host = HostHome(self.storage, unit, self.ranks.memory)
            host.reloadable = home.reloadable
            if not home.bare:
                host.add()
            host.fill(home)
            self._move(unit, host)
            if isinstance(home, DiskHome):
                home.free()

    def _make_trainable(self, unit: Unit) -> None:
        home, nbytes = unit.home, self.trained_nbytes(unit)
        if not isinstance(home, HostHome):
            if self.storage.store is not None and not self._is_restoring(unit):
                self.trained_disk(unit)
        elif not home.trains:
            if not self._take(unit, self.resident_nbytes_of(unit, moments=False) + nbytes):
                left_nbytes = self.resident_nbytes - sum(self.taken.values())
                raise BudgetError(
                    f"{unit.name} was frozen when the model first ran or got its optimizer, and is trained "
                    f"now: its state needs {format_nbytes(nbytes)} of host memory, of which memory.host "
                    f"leaves {format_nbytes(left_nbytes)}. Raise memory.host, or make the optimizer after "
                    "requires_grad_(True)",
                    "memory.host",
                )
            home.add(moments=True)

    def _on_disk(self, unit: Unit) -> DiskHome:
        """Return a unit's home on NVMe; one that is read where it lies gets extents of this run."""
        home = unit.home.copy if isinstance(unit.home, HostHome) else unit.home
        if isinstance(home, BaseHome):
            disk = DiskHome(self.store, unit)
            disk.reloadable = home.reloadable
            for start, weight, state in disk.chunks(read=False, write=True):
                home.base.copy_exact(unit, unit.shard_start + start, weight, state)
            self._move(unit, disk)
            return disk
        assert isinstance(home, DiskHome), f"{unit.name} has no home on NVMe yet"
        return home

    def _move(self, unit: Unit, home: Home) -> None:
        """Give a unit another home; it is read where it lies no more."""
        if isinstance(unit.home, BaseHome):
            self.snapshot.wait_for(unit.index)
            unit.stored = None
        home.stored_form = unit.home.stored_form  # see Home
        unit.move_to(home)

    def _is_restoring(self, unit: Unit) -> bool:
        """Whether the unit's states will come from an interrupted run."""
        return self.pending and not (unit.home.reloadable or self.base is not None)

    def put(
        self, unit: Unit, master: Callable[[int, int], Tensor],
        moments: Callable[[int, int], Sequence[Tensor]] | None = None,
    ) -> None:  # fmt: skip
        """Store exact values of this rank's shard; a new unit gets its home first.

        Args:
            master: Returns elements ``[start, stop)`` of the full flat buffer, in fp32, or in bf16 where that
                is exact and the compute dtype; ``moments`` those of each moment; None: they are zero.
        """
        if type(unit.home) is Home:  # it has none yet
            self.place(unit)
            if isinstance(unit.home, BaseHome):
                unit.home.reloadable = True
                return  # with its values
        if self._is_restoring(unit):
            return
        if master(unit.shard_start, unit.shard_start).dtype != torch.bfloat16:
            self._add_exact(unit)
        trains = unit.home.trains
        for start, weight, state in self._each_chunk(unit, read=False, write=True):
            part = unit.shard_start + start, unit.shard_start + start + len(weight)
            store_master(self.layout, master(*part), weight, state)
            if trains:
                self.layout.store_moments(state, None if moments is None else moments(*part))
        unit.home.reloadable = self.base is not None

    def free(self, unit: Unit) -> None:
        """Give back the place of a unit whose parameters have other shapes; its values bring another."""
        if isinstance(unit.home, HostHome):
            for lease in unit.home.leases:
                lease.release()
        elif isinstance(unit.home, DiskHome):
            unit.home.free()
        self.taken.pop(unit.index, None)
        unit.move_to(Home(Tier.NVME))

    def gather(self, unit: Unit, shard: Tensor) -> Tensor:
        """Return full values on the CPU, ``(numel,)``, from every rank's ``shard``. Every rank must call."""
        if self.ranks.collectives is None:
            return shard
        full = torch.empty(unit.numel, dtype=shard.dtype, device="cpu")
        unit.shard_of(full).copy_(shard)
        full = full.to(self.ranks.device)
        self.ranks.collectives.gather(unit.index, unit.name, lambda: full, kind="values").wait()
        return full.cpu()

    def get(self, unit: Unit) -> Tensor:
        """Return the full exact values, fp32, ``(numel,)``. Every rank must call."""
        shard = torch.empty(unit.shard_numel, dtype=torch.float32, device="cpu")
        for start, (values, *_) in self.chunk_fields(unit):
            shard[start : start + len(values)] = values
        return self.gather(unit, shard)

    def shard_fields(self, unit: Unit) -> tuple[Tensor, ...]:
        """Return copies of this shard's exact values and moments, fp32, ``(shard_numel,)`` each."""
        out = [torch.empty(unit.shard_numel, device="cpu") for _ in self.layout.full_names]
        for start, chunk in self.chunk_fields(unit):
            for field, values in zip(out, chunk, strict=True):
                field[start : start + len(values)] = values
        return tuple(out)

    def chunk_fields(self, unit: Unit) -> Generator[tuple[int, tuple[Tensor, ...]]]:
        """Yield the first element and the fp32 fields of each chunk, valid until the next one."""
        for start, weight, state in self._each_chunk(unit):
            yield start, self.layout.full_values(weight, state)

    def averages(self, unit: Unit) -> Generator[tuple[int, Tensor]]:
        """Yield the first element and the averaged weights, in the compute dtype, of each chunk."""
        place = self.layout.full_names.index(OFFSET)
        for start, fields in self.chunk_fields(unit):
            yield start, (fields[0] + fields[place]).to(unit.dtype)

    def put_average(self, unit: Unit) -> Callable[[], None]:
        """Put averages in the place of a trained unit's weights; return a call that puts the weights back.

        A unit on NVMe is read from another place there meanwhile. Of one in host memory the weights are kept
        beside, or on NVMe if ``memory.host`` has no room.
        """
        home = unit.home
        self.at_home(unit)
        with ExitStack() as undo:
            undo.callback(setattr, home, "averaged", False)
            if not isinstance(home, HostHome):
                disk = self._written(unit, self.averages(unit))
                undo.callback(disk.free)
                self._move(unit, disk)
                undo.callback(self._move, unit, home)
                disk.averaged = True
                return undo.pop_all().close
            if self.on_device is not None:
                self.on_device.leave(unit.index)
            weight, who = home.weight, f"weights of {unit.name}, whose average is in their place"
            lease = self.storage.host_pool.try_lease(weight.nbytes, who=who)
            if lease is None and self.storage.store is None:
                lease = self.storage.host_pool.lease(weight.nbytes, who=who)  # or the error
            if lease is None:
                disk = self._written(unit, ((start, part) for start, part, _ in home.chunks()))
                undo.callback(disk.free)
                undo.callback(lambda: _write(weight, ((start, part) for start, part, _ in disk.chunks())))
            else:
                undo.callback(lease.release)
                undo.callback(weight.copy_, lease.tensor[: weight.nbytes].view(unit.dtype).copy_(weight))
            _write(weight, self.averages(unit))
            home.averaged = True
            return undo.pop_all().close

    def _written(self, unit: Unit, weights: Iterable[tuple[int, Tensor]]) -> DiskHome:
        """Write chunks of weights, in the compute dtype, to a place of their own on NVMe."""
        disk = DiskHome(self.store, unit)
        for (_, weight, state), (_, values) in zip(disk.chunks(read=False, write=True), weights):
            store_master(self.layout, values, weight, state)
        return disk

    def check_exact(self, units: Iterable[Unit]) -> None:
        """Raise a StateError if averages are in the place of weights."""
        if any(unit.home.averaged for unit in units):
            raise StateError(
                "inside infinity.ema(model), where the weights are their averages, a model may be evaluated, "
                "generate and be exported: train, write weights, and save or load states after the block"
            )

    def check_averages(self, units: Iterable[Unit]) -> None:
        """Raise a StateError unless the rule keeps averages, and they are not in the place of weights."""
        self.check_exact(units)
        if OFFSET not in self.layout.full_names:
            raise StateError(
                "the optimizer keeps no average of the weights: make it with ema=0.999, or set optim.ema "
                "before the run begins"
            )

    def set_shard_fields(self, unit: Unit, fields: Sequence[Tensor]) -> None:
        """Replace this shard's exact values and moments, fp32, ``(shard_numel,)`` each."""
        self._make_trainable(unit)
        for start, weight, state in self._each_chunk(unit, write=True):
            master, *moments = (field[start : start + len(weight)] for field in fields)
            store_master(self.layout, master, weight, state)
            self.layout.store_moments(state, moments)

    def set_weights(self, unit: Unit, weight: Tensor, before: Tensor) -> None:
        """Replace weights, ``(shard_numel,)``; those that are as ``before`` keep their exact values."""
        for start, stored, state in self._each_chunk(unit, write=True):
            part = slice(start, start + len(stored))
            exact = master_of(self.layout, before[part], state)
            exact = torch.where(weight[part] == before[part], exact, weight[part].float())
            store_master(self.layout, exact, stored, state)

    def _each_chunk(self, unit: Unit, *, read: bool = True, write: bool = False) -> Iterator[Chunk]:
        """Yield the chunks of a unit's newest values in memory; ``write`` stores them again."""
        self.check_exact([unit])
        if write:
            self.snapshot.wait()
            self.before_write()
            unit.home.reloadable = False
            if isinstance(unit.home, HostHome):
                unit.home.recorded = False
        self.at_home(unit)
        if write and self.on_device is not None:
            self.on_device.leave(unit.index)
        home = unit.home
        if not isinstance(home, HostHome) and self._is_restoring(unit):
            # While a model is built for an interrupted run: these values are not used.
            for start, numel in chunk_places(unit.shard_numel, self.storage.chunk_numel):
                weight = torch.zeros(numel, dtype=unit.dtype, device="cpu")
                yield start, weight, self.layout.complete((), numel)
            return
        if write and isinstance(home, BaseHome):
            home = self._on_disk(unit)
        for chunk in home.chunks(read=read, write=write):
            yield chunk
            trim_heap()  # of what was made of it

    def adopt(self, unit: Unit, versions: list[Version], committed: int) -> None:
        """Give a unit versions found on NVMe; a unit that lives in host memory is read from them."""
        disk, host = DiskHome(self.store, unit, versions), unit.home
        disk.version = committed
        if isinstance(host, HostHome):
            self._add_exact(unit)
            host.fill(disk)
            host.copy, host.version, host.recorded = disk, committed, True
        else:
            self._move(unit, disk)

    def renew(self, unit: Unit) -> None:
        """Give a unit room of its own for values that :meth:`put` stores."""
        if isinstance(unit.home, HostHome):
            unit.home.version = 0
        else:
            disk = DiskHome(self.store, unit)
            self._move(unit, disk)
            if unit.trainable or any(segment.steps for segment in unit.segments):
                disk.train()

    def at_home(self, unit: Unit) -> None:
        """Block until a unit's home has its newest values."""
        home = self.bring_home(unit)
        if home is not None:
            home.wait()

    def bring_home(self, unit: Unit) -> Transfer | None:
        """Start to copy a unit's newest values to host memory; None: they are there."""
        if self.on_device is None or not isinstance(unit.home, HostHome):
            return None
        preserve, storing = self.snapshot.preserve, unit.home.storing  # not a snapshot that is yet to be made

        def before() -> None:
            for transfer in storing:  # those of older values in host memory
                transfer.wait()
            preserve(unit.index)

        return self.on_device.bring_home(unit.home, before)

    def trained_disk(self, unit: Unit) -> DiskHome:
        """Return a unit's home on NVMe, or the copy there of one in host memory, with room for training."""
        disk = self._on_disk(unit)
        disk.train()
        return disk

    def add_versions(self, units: Iterable[Unit]) -> bool:
        """Give units on NVMe a third place, which may be recorded while two alternate; False: no room."""
        self.store.versions = 3
        try:
            for home in (unit.home for unit in units):
                if isinstance(home, DiskHome) and home.trains and len(home.versions) < 3:
                    home.add_version()
        except DiskError:
            self.store.versions = 2
            return False
        return True

    def unpin(self) -> None:
        """End the save beside training. May be called twice."""
        snapshot, self.snapshot = self.snapshot, Snapshot(self.storage, (), {})
        snapshot.close()


def _write(weight: Tensor, chunks: Iterable[tuple[int, Tensor]]) -> None:
    for start, values in chunks:
        weight[start : start + len(values)] = values
