"""Where each unit's shard lives, host or NVMe: the only code that turns a unit into bytes.

A unit that fits the host budget stays there and moves nothing; the rest have extents. With one
rank and no accelerator, a unit whose home is host memory *is* its flat buffer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from infinity.core.errors import BudgetError, StateError
from infinity.core.lifecycle import UnitState
from infinity.core.nbytes import format_nbytes
from infinity.core.tier import Tier
from infinity.core.transfer import Lease, Pool, Transfer, TransferEngine
from infinity.nvme.store import ShardStore, Version
from infinity.optim.layout import StateLayout
from infinity.optim.master import master_of, store_master
from infinity.partition.unit import Unit


@dataclass(frozen=True, slots=True)
class Resident:
    """A shard in host memory: weights ``(shard_numel,)`` and the fields of its state."""

    weight: Tensor
    state: tuple[Tensor, ...]
    leases: tuple[Lease, Lease]


class Tiers:
    """The homes of all units of this rank.

    Args:
        layout: What a shard's state is made of.
        pool: Host memory, for residents and staging.
        resident_nbytes: How much of ``pool`` residents may take.
        chunk_numel: Elements that are staged at one time.
        store: Extents on NVMe, and ``engine`` to reach them; None when everything is resident.
        versions: Places per unit on NVMe.
        gather: Makes a full tensor, ``(numel,)``, of this rank's slice; every rank must call.
    """

    def __init__(
        self,
        layout: StateLayout,
        pool: Pool,
        *,
        resident_nbytes: int,
        chunk_numel: int,
        store: ShardStore | None,
        engine: TransferEngine | None,
        versions: int,
        gather: Callable[[Unit, Tensor], Tensor],
    ) -> None:
        self.layout, self.pool, self.store, self.engine = layout, pool, store, engine
        self.chunk_numel, self.versions, self.gather = chunk_numel, versions, gather
        self.residents: dict[int, Resident] = {}
        self.resident_nbytes, self._used_nbytes = resident_nbytes, 0

    # --- homes -------------------------------------------------------------------------------

    def place(self, unit: Unit) -> None:
        """Give a new unit its home.

        Raises:
            BudgetError: It fits no tier; says what is needed.
            DiskError: The file system is full.
        """
        n = unit.shard_numel
        nbytes = self.layout.weight_nbytes(n) + self.layout.state_nbytes(n)
        if self._used_nbytes + nbytes <= self.resident_nbytes:
            self._used_nbytes += nbytes
            self.residents[unit.index] = self._resident(unit)
            unit.home = Tier.HOST
            unit.lifecycle.state = UnitState.ON_HOST
        elif self.store is not None:
            self.store.allocate(unit.index, n, unit.name)
        else:
            raise BudgetError(
                f"{unit.name} needs {format_nbytes(nbytes)} of host memory for its weights and optimizer "
                f"state; memory.host leaves {format_nbytes(self.resident_nbytes)} for them, of which "
                f"{format_nbytes(self._used_nbytes)} are taken by the units before it. Raise memory.host, "
                "or give memory.nvme one or more directories"
            )

    def _resident(self, unit: Unit) -> Resident:
        n, who = unit.shard_numel, unit.name
        weight = self.pool.lease(self.layout.weight_nbytes(n), who=who)
        state = self.pool.lease(self.layout.state_nbytes(n), who=who)
        views = self.layout.views(state.tensor, n)
        return Resident(weight.tensor.view(unit.dtype), views, (weight, state))

    def drop(self, unit: Unit) -> None:
        """Give back a unit's home: nobody uses its parameters any more."""
        if self.store is not None:
            self.store.free(unit.index)
        resident = self.residents.pop(unit.index, None)
        for lease in resident.leases if resident else ():
            lease.release()

    # --- exact values, for construction and for people who write weights ---------------------

    def put(self, unit: Unit, master: Callable[[int, int], Tensor]) -> None:
        """Store exact values of this rank's shard, moments zero; a new unit gets its home first."""
        if unit.index not in self.residents and not self._stored(unit):
            self.place(unit)
        first = unit.shard_start
        resident = self.residents.get(unit.index)
        if resident is not None:
            for start in range(0, unit.shard_numel, self.chunk_numel):
                stop = min(start + self.chunk_numel, unit.shard_numel)
                state = tuple(field[start:stop] for field in resident.state)
                values = master(first + start, first + stop)
                self._initialise(values, resident.weight[start:stop], state)
            return
        for chunk in self.version(unit).chunks:
            weight_nbytes = self.layout.weight_nbytes(chunk.numel)
            state_nbytes = self.layout.state_nbytes(chunk.numel)
            with self.pool.lease(weight_nbytes + state_nbytes, who="storing weights") as lease:
                weight = lease.tensor[:weight_nbytes].view(unit.dtype)
                state = self.layout.views(lease.tensor[weight_nbytes:], chunk.numel)
                values = master(first + chunk.start, first + chunk.start + chunk.numel)
                self._initialise(values, weight, state)
                writes = [
                    self._engine.write(chunk.weight, lease.memory[:weight_nbytes]),
                    self._engine.write(chunk.state, lease.memory[weight_nbytes:]),
                ]
                for write in writes:
                    write.wait()

    def _initialise(self, master: Tensor, weight: Tensor, state: tuple[Tensor, ...]) -> None:
        store_master(self.layout, master, weight, state)
        for moment in state[-2:]:
            moment.zero_()

    def get(self, unit: Unit) -> Tensor:
        """The full exact values, fp32, ``(numel,)``. Every rank must call."""
        return self.gather(unit, self.shard_fields(unit)[0])

    def shard_fields(self, unit: Unit) -> tuple[Tensor, ...]:
        """Copies of this shard's exact values and moments, fp32, ``(shard_numel,)`` each."""
        out = [torch.empty(unit.shard_numel) for _ in range(3)]
        for start, weight, state in self._each_chunk(unit):
            stop = start + len(weight)
            out[0][start:stop] = master_of(self.layout, weight, state)
            out[1][start:stop] = state[-2]
            out[2][start:stop] = state[-1]
        return tuple(out)

    def set_shard_fields(self, unit: Unit, fields: tuple[Tensor, Tensor, Tensor]) -> None:
        """Replace this shard's exact values and moments (optimizer state that is loaded)."""
        for start, weight, state in self._each_chunk(unit, write=True):
            stop = start + len(weight)
            store_master(self.layout, fields[0][start:stop], weight, state)
            state[-2].copy_(fields[1][start:stop])
            state[-1].copy_(fields[2][start:stop])

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
        self, unit: Unit, write: bool = False
    ) -> Iterator[tuple[int, Tensor, tuple[Tensor, ...]]]:
        """Every chunk's start, weights and state in memory; written back when ``write``."""
        resident = self.residents.get(unit.index)
        if resident is not None:
            yield 0, resident.weight, resident.state
            return
        for chunk in self.version(unit).chunks:
            weight_nbytes = self.layout.weight_nbytes(chunk.numel)
            state_nbytes = self.layout.state_nbytes(chunk.numel)
            with self.pool.lease(weight_nbytes + state_nbytes, who="exact values") as lease:
                parts = lease.memory[:weight_nbytes], lease.memory[weight_nbytes:]
                extents = chunk.weight, chunk.state
                moves = [self._engine.read(e, m) for e, m in zip(extents, parts, strict=True)]
                for move in moves:
                    move.wait()
                weight = lease.tensor[:weight_nbytes].view(unit.dtype)
                yield chunk.start, weight, self.layout.views(lease.tensor[weight_nbytes:], chunk.numel)
                if write:
                    moves = [self._engine.write(e, m) for e, m in zip(extents, parts, strict=True)]
                    for move in moves:
                        move.wait()

    # --- what training moves -----------------------------------------------------------------

    def version(self, unit: Unit, ahead: int = 0) -> Version:
        """The committed place of a unit on NVMe, or with ``ahead=1`` the next one."""
        if self.store is None:
            raise StateError(f"{unit.name} is not on NVMe")
        return self.store.version(unit.index, unit.version + ahead)

    def read_weight(self, unit: Unit, memory: memoryview) -> Transfer:
        """Start fetching this shard's committed weights."""
        return self._engine.read(self.version(unit).weight, memory, urgent=True)

    def _stored(self, unit: Unit) -> bool:
        return self.store is not None and self.store.has(unit.index)

    @property
    def _engine(self) -> TransferEngine:
        if self.engine is None:
            raise StateError("memory.nvme names no directory, yet a unit was stored there")
        return self.engine
