"""Describes a training step before it runs: what it uses in which order, and what that takes.

The runtime's own plan, a :class:`StepScript`, follows from a micro-batch as hooks see it, sizes of units and
the division of the memory budgets; :mod:`infinity.predict.play` plays it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from infinity.core.budget import DeviceBudget
from infinity.core.errors import BudgetError
from infinity.core.nbytes import format_nbytes, rounded
from infinity.planner.prefetch_plan import Event, Kind, Plan, make_plan
from infinity.predict.machines import RankRates

#: The least micro-batches that are played before they are taken to repeat.
_LEAST = 3
#: Longer steps (events) are played with fewer micro-batches and steps, and updates in larger chunks.
_MANY_EVENTS = 20_000


@dataclass(frozen=True, slots=True)
class UnitShape:
    """Holds sizes of a unit on one rank; a frozen one may travel in stored form, decoded after the gather."""

    name: str
    shard_numel: int  # padding included
    nbytes: int  # of the full buffer, in the compute dtype
    weight_nbytes: int  # of the shard
    state_nbytes: int
    moved_nbytes: int  # of the shard as it is uploaded and gathered
    read_nbytes: int  # what a fetch reads from drives
    kept_nbytes: int  # host memory that the shard takes there
    trained_nbytes: int  # and in addition while it is trained
    params: int
    trainable: bool
    on_nvme: bool = True  # the shard's home; else it is host memory
    streams: bool = True  # the full values come and go
    in_checkpoint: bool = False  # it is read where it lies in one; else it lies in the run's own files
    stored_nbytes: int = 0  # of all ranks' shards as they lie there; 0: it travels in the compute dtype
    decode_nbytes: int = 0  # what the operators read and write that decode all shards
    decode_operators: int = 0

    @property
    def gathered_nbytes(self) -> int:
        """Return the device memory of the full buffer, and of what it is decoded from."""
        return rounded(self.nbytes) + rounded(self.stored_nbytes)

    @property
    def resident_nbytes(self) -> int:
        """Return the host memory that the shard takes with all that training needs of it."""
        return self.kept_nbytes + (self.trained_nbytes if self.trainable else 0)


def all_resident_nbytes(units: Sequence[UnitShape]) -> int:
    """Return the host memory that a model is built in without drives: room for training each unit."""
    return sum(each.kept_nbytes + each.trained_nbytes for each in units)


def choose_homes(
    units: Sequence[UnitShape], resident_nbytes: int, *, drives: bool, alone_on_cpu: bool
) -> tuple[UnitShape, ...]:
    """Return the units with their homes, as :class:`infinity.shards.tiers.Tiers` gives them.

    While a model is built it is unknown what will be trained, so room for the moments of each unit is set
    aside; when the optimizer is made, what frozen units do not need goes to others, trained ones first.

    Raises:
        BudgetError: They do not fit host memory, and there are no drives.
    """
    used, resident = 0, set()
    for index, unit in enumerate(units):
        nbytes = unit.kept_nbytes + unit.trained_nbytes
        if used + nbytes <= resident_nbytes:
            used += nbytes
            resident.add(index)
        elif not drives:
            total = all_resident_nbytes(units)
            raise BudgetError(
                f"weights and optimizer states take {format_nbytes(total)} of host memory per rank, of which "
                f"memory.host leaves {format_nbytes(resident_nbytes)} for them. Raise memory.host to "
                f"{total} bytes or more, or give memory.nvme one or more directories"
            )
    used -= sum(units[i].trained_nbytes for i in resident if not units[i].trainable)
    for index in sorted(range(len(units)), key=lambda i: not units[i].trainable):
        nbytes = units[index].resident_nbytes
        if index not in resident and used + nbytes <= resident_nbytes:
            used += nbytes
            resident.add(index)
    found = list(units)
    for index in resident:
        streams = not alone_on_cpu or units[index].stored_nbytes > 0
        found[index] = replace(units[index], on_nvme=False, streams=streams)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Stored:
    """Describes an activation that leaves device memory; positions count the events before."""

    nbytes: int
    packed_at: int  # forward has made it
    load_at: int  # its load starts
    asked_at: int  # backward needs it
    on_nvme: bool  # else it goes to host memory


@dataclass(frozen=True, slots=True)
class StepTrace:
    """Holds the forward and the backward of one micro-batch.

    Operators are given by arrays of equal length; an operator at position ``p`` runs after ``p`` events.
    """

    events: tuple[Event, ...]  # uses of units, as the last micro-batch of a step has them
    begun: tuple[tuple[int, int], ...]  # positions at which a unit's first gradient comes, with the unit
    completed: tuple[tuple[int, int], ...]  # likewise its last gradient
    position: np.ndarray
    flops: np.ndarray  # of matrix products
    nbytes: np.ndarray  # read and written
    fp32: np.ndarray  # it computes in fp32, in place of the compute dtype
    model_flops: float  # without recomputation
    tokens: int
    peak_nbytes: int  # the most that the step's own storages take of device memory at one time
    stored: tuple[Stored, ...] = ()
    measured_s: np.ndarray | None = None  # on the machine that is planned for; not a number: unknown

    def operator_s(self, rates: RankRates) -> np.ndarray:
        """Return the seconds of each operator: as measured, or by the roofline."""
        rate = np.where(self.fp32, rates.fp32_flops_per_s, rates.flops_per_s)
        each = np.maximum(self.flops / rate, self.nbytes / rates.memory_bytes_per_s)
        each = np.maximum(each, rates.operator_s)
        if self.measured_s is None:
            return each
        return np.where(np.isnan(self.measured_s), each, self.measured_s + rates.operator_s)

    def times_s(self, rates: RankRates) -> np.ndarray:
        """Return the seconds of compute at each position, ``(events + 1,)``."""
        return np.bincount(self.position, self.operator_s(rates), minlength=len(self.events) + 1)

    def accumulated(self) -> tuple[tuple[Event, ...], list[int]]:
        """Return the events if another micro-batch follows (no updates), and each position among them."""
        pins: dict[int, int] = {}
        events: list[Event] = []
        places = [0]
        for event in self.events:
            count = pins.get(event.unit, 0)
            if event.kind is Kind.DONE:
                pins[event.unit] = 0
                if count:
                    events.append(Event(Kind.UNPIN, event.unit))
            else:
                pins[event.unit] = count + 1 if event.kind is Kind.USE else max(0, count - 1)
                events.append(event)
            places.append(len(events))
        return tuple(events), places

    def scaled(self, factor: int) -> "StepTrace":
        """Return the trace of ``factor`` times as many tokens, where every operator takes so much longer."""
        return replace(
            self,
            flops=self.flops * factor,
            nbytes=self.nbytes * factor,
            model_flops=self.model_flops * factor,
            tokens=self.tokens * factor,
            measured_s=None if self.measured_s is None else self.measured_s * factor,
        )


# --- the script of a step -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepSetup:
    """Holds all that a step follows from, besides its trace."""

    units: tuple[UnitShape, ...]
    rates: RankRates
    division: DeviceBudget
    ranks: int
    on_accelerator: bool
    micro_batches: int
    early: bool  # updates start inside backward
    clips: bool  # gradients are kept until the step ends
    chunk_numel: int
    staged_chunks: int
    piece_nbytes: int | None  # the largest shard that may stay while it is updated; None: any
    reduce_itemsize: int  # bytes per element of a reduced gradient
    spilled: frozenset[int] = frozenset()  # units whose gradients wait on NVMe

    def gradient_nbytes(self, unit: int) -> int:
        """Return the bytes of this rank's shard of a unit's gradient."""
        return self.units[unit].shard_numel * self.reduce_itemsize


@dataclass(frozen=True, slots=True)
class StepScript:
    """Holds the runtime's own plan of one step, with as many of its micro-batches as are played."""

    plan: Plan
    earlier: int  # micro-batches before the last one
    length: int  # events of each of these
    repeated: int  # index of the one of which there are ``more``, which are not in the plan
    more: int
    first_uses: dict[int, int]  # units in the order in which they are first used, each with its rank there
    kept: dict[int, bool]  # whether a unit's weights are there, for its update, when its gradient is complete
    present: frozenset[int]  # units that are there when the last micro-batch begins

    @property
    def is_long(self) -> bool:
        """Return whether fewer steps are played, and updates in larger chunks."""
        return len(self.plan.events) > _MANY_EVENTS

    @classmethod
    def of(cls, trace: StepTrace, setup: StepSetup) -> "StepScript":
        accumulated = trace.accumulated()[0]
        before, length = setup.micro_batches - 1, len(accumulated)
        earlier, most = min(before, 2), tries(length)
        plan = plan_of(accumulated * earlier + trace.events, setup, (length, earlier))
        while plan.repeats is None and earlier < min(before, most):
            earlier = min(before, most, 2 * earlier)
            plan = plan_of(accumulated * earlier + trace.events, setup, (length, earlier))
        repeated = earlier - 1 if plan.repeats is None else plan.repeats.start // length
        uses = dict.fromkeys(event.unit for event in plan.events if event.kind is Kind.USE)
        first_uses = {unit: rank for rank, unit in enumerate(uses)}
        present, kept = set(plan.begin), {}
        at_last = frozenset(present)
        for position, ((kind, unit), actions) in enumerate(zip(plan.events, plan.actions, strict=True)):
            if position == earlier * length:
                at_last = frozenset(present)
            if kind is Kind.USE:
                present.add(unit)
            elif kind is Kind.DONE:
                stays = unit in plan.stays
                kept[unit] = unit in present and (setup.division.hold_weights or stays)
                if not stays:
                    present.discard(unit)
            present.difference_update(actions.release)
            present.update(actions.fetch)
        return cls(plan, earlier, length, repeated, before - earlier, first_uses, kept, at_last)


def tries(events: int) -> int:
    """Return how many micro-batches of so many events are played before they are taken to repeat."""
    return max(_LEAST, _MANY_EVENTS // max(1, events))


def plan_of(events: Sequence[Event], setup: StepSetup, repeats: tuple[int, int] | None = None) -> Plan:
    """Return the plan that the runtime's prefetcher makes from a step's events."""
    nbytes = {index: unit.gathered_nbytes for index, unit in enumerate(setup.units) if unit.streams}
    most = setup.piece_nbytes
    can_stay = {
        index
        for index, unit in enumerate(setup.units)
        if unit.on_nvme and (most is None or unit.weight_nbytes <= most)
    }
    return make_plan(events, nbytes, setup.division.window, can_stay=can_stay, repeats=repeats)
