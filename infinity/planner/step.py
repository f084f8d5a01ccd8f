"""A training step before it runs: what it uses in which order, and what that takes.

A :class:`StepTrace` is one micro-batch as the hooks of a model see it, recorded without values. With the
sizes of its units and a division of the memory budgets it is everything that the runtime's own plan follows
from: a :class:`StepScript`, which :mod:`infinity.planner.clock` plays.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from infinity.core.budget import DeviceBudget, rounded
from infinity.core.errors import BudgetError
from infinity.core.nbytes import format_nbytes
from infinity.planner.machines import RankRates
from infinity.planner.prefetch_plan import Event, Kind, Plan, make_plan

#: Micro-batches of which it is tried whether they repeat, whatever that takes.
_LEAST = 3
#: Of steps with more events fewer micro-batches and steps are played, and updates in larger chunks.
_MANY_EVENTS = 20_000


@dataclass(frozen=True, slots=True)
class StoredShape:
    """Sizes of a frozen unit that travels as it lies in a checkpoint, and is decoded after the gather.

    Attributes:
        nbytes: Bytes of all ranks' shards.
        shard_nbytes: Bytes of one shard, of which ``read_nbytes`` are read from drives.
        decode_nbytes: Bytes that the operators which decode all shards read and write; there are
            ``decode_operators``.
    """

    nbytes: int
    shard_nbytes: int
    read_nbytes: int
    decode_nbytes: int = 0
    decode_operators: int = 0

    def decode_s(self, rates: RankRates) -> float:
        """Seconds of decoding, by the roofline."""
        return max(self.decode_nbytes / rates.decode_bytes_per_s, self.decode_operators * rates.operator_s)


@dataclass(frozen=True, slots=True)
class UnitShape:
    """Sizes of a unit on one rank.

    Attributes:
        shard_numel: Elements of the shard, padding included.
        nbytes: Bytes of the full buffer, in the compute dtype.
        weight_nbytes: Bytes of the shard; ``state_nbytes`` of its state, of which ``moments_nbytes`` are
            moments.
        params: Parameters of the unit in all.
        on_nvme: The shard's home is NVMe; else it is host memory.
        streams: The full values come and go.
        host_gradient_nbytes: Bytes of the gradient that waits in host memory, beside an accelerator.
        stored: The form in which it travels; None: the compute dtype.
        base_nbytes: Bytes that a fetch reads, in whole blocks, of a frozen unit that is read where it lies in
            a checkpoint; None: it lies in the run's own files.
    """

    name: str
    shard_numel: int
    nbytes: int
    weight_nbytes: int
    state_nbytes: int
    moments_nbytes: int
    params: int
    trainable: bool
    on_nvme: bool = True
    streams: bool = True
    host_gradient_nbytes: int = 0
    stored: StoredShape | None = None
    base_nbytes: int | None = None

    @property
    def read_nbytes(self) -> int:
        """Return the bytes that a fetch reads from drives."""
        if self.stored is not None:
            return self.stored.read_nbytes
        return self.weight_nbytes if self.base_nbytes is None else self.base_nbytes

    @property
    def moved_nbytes(self) -> int:
        """Return the bytes of the shard as it is uploaded and gathered."""
        return self.weight_nbytes if self.stored is None else self.stored.shard_nbytes

    @property
    def gathered_nbytes(self) -> int:
        """Device memory of the full buffer, and of what it is decoded from."""
        return rounded(self.nbytes) + (0 if self.stored is None else rounded(self.stored.nbytes))

    @property
    def resident_nbytes(self) -> int:
        """Host memory that the shard takes with all that training needs of it."""
        kept = rounded(self.weight_nbytes) + rounded(self.state_nbytes - self.moments_nbytes)
        if self.stored is not None:
            kept = rounded(self.stored.shard_nbytes)
        return kept + (self.trained_nbytes if self.trainable else 0)

    @property
    def trained_nbytes(self) -> int:
        """Return the host memory that the unit takes in addition while it is trained."""
        return rounded(self.moments_nbytes) + rounded(self.host_gradient_nbytes)


def all_resident_nbytes(units: Sequence[UnitShape]) -> int:
    """Return the host memory that a model is built in without drives: room for training each unit."""
    return sum(replace(each, trainable=True).resident_nbytes for each in units)


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
        nbytes = replace(unit, trainable=True).resident_nbytes
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
    return tuple(
        replace(
            unit,
            on_nvme=index not in resident,
            streams=index not in resident or not alone_on_cpu or unit.stored is not None,
        )
        for index, unit in enumerate(units)
    )


@dataclass(frozen=True, slots=True)
class Stored:
    """An activation that leaves device memory.

    Attributes:
        packed_at: Events before forward has made it.
        asked_at: Events before backward needs it.
        load_at: Events before its load starts.
        on_nvme: It goes to NVMe; else to host memory.
    """

    nbytes: int
    packed_at: int
    load_at: int
    asked_at: int
    on_nvme: bool


@dataclass(frozen=True, slots=True)
class StepTrace:
    """The forward and the backward of one micro-batch.

    Operators are given by arrays of equal length; an operator at position ``p`` runs after ``p`` events.

    Attributes:
        events: Uses of units in order, as the last micro-batch of a step has them.
        begun: Positions at which a unit's first gradient comes, with the unit.
        completed: Positions at which a unit's last gradient comes, with the unit.
        flops: Flops of matrix products, by operator; likewise ``nbytes`` read and written.
        fp32: Whether an operator computes in fp32, in place of the compute dtype.
        model_flops: Flops of the algorithm, without recomputation.
        tokens: Tokens of the micro-batch.
        peak_nbytes: The most that the step's own storages take of device memory at one time.
        stored: Activations that leave device memory.
        measured_s: Seconds that operators take on the machine that is planned for; not a number: unknown.
    """

    events: tuple[Event, ...]
    begun: tuple[tuple[int, int], ...]
    completed: tuple[tuple[int, int], ...]
    position: np.ndarray
    flops: np.ndarray
    nbytes: np.ndarray
    fp32: np.ndarray
    model_flops: float
    tokens: int
    peak_nbytes: int
    stored: tuple[Stored, ...] = ()
    measured_s: np.ndarray | None = None

    def operator_s(self, rates: RankRates) -> np.ndarray:
        """Seconds of each operator: as measured, or by the roofline."""
        rate = np.where(self.fp32, rates.fp32_flops_per_s, rates.flops_per_s)
        each = np.maximum(self.flops / rate, self.nbytes / rates.memory_bytes_per_s)
        each = np.maximum(each, rates.operator_s)
        if self.measured_s is None:
            return each
        return np.where(np.isnan(self.measured_s), each, self.measured_s + rates.operator_s)

    def times_s(self, rates: RankRates) -> np.ndarray:
        """Seconds of compute at each position, ``(events + 1,)``."""
        each = self.operator_s(rates)
        return np.bincount(self.position, weights=each, minlength=len(self.events) + 1)

    def accumulated(self) -> tuple[tuple[Event, ...], list[int]]:
        """Events of a micro-batch that another one follows: units are released, not updated.

        Returns:
            The events, and for each position of this trace the position among them.
        """
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

    def scaled(self, factor: float) -> "StepTrace":
        """A micro-batch of ``factor`` times as many tokens: every operator takes so much longer."""
        return replace(
            self,
            flops=self.flops * factor,
            nbytes=self.nbytes * factor,
            model_flops=self.model_flops * factor,
            tokens=round(self.tokens * factor),
            peak_nbytes=round(self.peak_nbytes * factor),
            stored=tuple(replace(each, nbytes=round(each.nbytes * factor)) for each in self.stored),
            measured_s=None if self.measured_s is None else self.measured_s * factor,
        )


# --- the script of a step -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepSetup:
    """Everything that a step follows from, besides its trace.

    Attributes:
        division: The division of the device budget.
        micro_batches: Micro-batches of a step.
        early: Updates start inside backward.
        clips: Gradients are kept until the step ends.
        staged_chunks: The number of staged chunks, of ``chunk_numel`` elements.
        piece_nbytes: The largest shard that may stay while it is updated; None: any.
        reduce_itemsize: Bytes per element of a reduced gradient.
        spilled: Units whose gradients wait on NVMe.
    """

    units: tuple[UnitShape, ...]
    rates: RankRates
    division: DeviceBudget
    ranks: int
    on_accelerator: bool
    micro_batches: int
    early: bool
    clips: bool
    chunk_numel: int
    staged_chunks: int
    piece_nbytes: int | None
    reduce_itemsize: int
    spilled: frozenset[int] = frozenset()

    def gradient_nbytes(self, unit: int) -> int:
        """Bytes of this rank's shard of a unit's gradient."""
        return self.units[unit].shard_numel * self.reduce_itemsize


@dataclass(slots=True)
class MicroBatch:
    """The work of the training thread in a micro-batch, by position: before an event, after as many events.

    Attributes:
        begin: Position of its first event in the step's plan.
        compute_s: Seconds of compute before each event, and after the last.
        begun: Units whose first gradient comes before it.
        completed: Units whose gradient of a micro-batch is complete, and whether that ends the step's: those
            that the plan's events do not tell.
        packs: Activations that leave; ``loads`` and ``asks`` likewise those that are loaded and needed.
    """

    begin: int
    compute_s: list[float]
    begun: dict[int, list[int]] = field(default_factory=dict)
    completed: dict[int, list[tuple[int, bool]]] = field(default_factory=dict)
    packs: dict[int, list[Stored]] = field(default_factory=dict)
    loads: dict[int, list[Stored]] = field(default_factory=dict)
    asks: dict[int, list[Stored]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepScript:
    """The work of the training thread in one step.

    Attributes:
        plan: The plan of the micro-batches below.
        repeated: Index of the micro-batch of which there are ``more``.
        first_uses: Units in the order in which they are first used, each with its rank there.
        kept: Whether the weights of each unit are there, for the update, when its gradients are complete.
        present: Units that are there when the last micro-batch begins.
    """

    plan: Plan
    micro_batches: Sequence[MicroBatch]
    repeated: int
    more: int
    first_uses: dict[int, int]
    kept: dict[int, bool]
    present: frozenset[int]

    @property
    def is_long(self) -> bool:
        """Return whether fewer steps are played, and updates in larger chunks."""
        return len(self.plan.events) > _MANY_EVENTS

    @classmethod
    def of(cls, trace: StepTrace, setup: StepSetup) -> "StepScript":
        times = trace.times_s(setup.rates).tolist()
        earlier, places = trace.accumulated()
        before = setup.micro_batches - 1
        planned, most = min(before, 2), tries(len(earlier))
        plan = plan_of(earlier * planned + trace.events, setup, (len(earlier), planned))
        while plan.repeats is None and planned < min(before, most):
            planned = min(before, most, 2 * planned)
            plan = plan_of(earlier * planned + trace.events, setup, (len(earlier), planned))
        repeated = planned - 1 if plan.repeats is None else plan.repeats.start // len(earlier)

        def made(index: int) -> MicroBatch:
            ends = index == planned
            where = range(len(times)) if ends else places
            part = MicroBatch(index * len(earlier), [0.0] * (len(trace.events if ends else earlier) + 1))
            for position, time_s in enumerate(times):
                part.compute_s[where[position]] += time_s
            for position, unit in trace.begun:
                if index == 0 or setup.ranks > 1:
                    part.begun.setdefault(where[position], []).append(unit)
            for position, unit in trace.completed:
                if (not ends and setup.ranks > 1) or (ends and not setup.units[unit].streams):
                    part.completed.setdefault(where[position], []).append((unit, ends))
            for each in trace.stored:
                part.packs.setdefault(where[each.packed_at], []).append(each)
                part.loads.setdefault(where[each.load_at], []).append(each)
                part.asks.setdefault(where[each.asked_at], []).append(each)
            return part

        micro_batches = [made(index) for index in range(planned + 1)]
        uses = dict.fromkeys(event.unit for event in plan.events if event.kind is Kind.USE)
        first_uses = {unit: rank for rank, unit in enumerate(uses)}
        walked = _walk_plan(plan, micro_batches[-1].begin, hold_weights=setup.division.hold_weights)
        return cls(plan, micro_batches, repeated, before - planned, first_uses, *walked)


def tries(events: int) -> int:
    """Micro-batches of so many events of which it is tried whether they repeat, before they are taken to."""
    return max(_LEAST, _MANY_EVENTS // max(1, events))


def plan_of(events: Sequence[Event], setup: StepSetup, repeats: tuple[int, int] | None = None) -> Plan:
    """The plan that the runtime's prefetcher makes from a step's events."""
    nbytes = {index: unit.gathered_nbytes for index, unit in enumerate(setup.units) if unit.streams}
    most = setup.piece_nbytes
    can_stay = {
        index
        for index, unit in enumerate(setup.units)
        if unit.on_nvme and (most is None or unit.weight_nbytes <= most)
    }
    return make_plan(events, nbytes, setup.division.window, can_stay=can_stay, repeats=repeats)


def _walk_plan(plan: Plan, begin: int, *, hold_weights: bool) -> tuple[dict[int, bool], frozenset[int]]:
    """Return ``kept`` and ``present`` of a script whose last micro-batch has begun at position ``begin``."""
    present, kept = set(plan.begin), {}
    before = frozenset(present)
    for position, ((kind, unit), actions) in enumerate(zip(plan.events, plan.actions, strict=True)):
        if position == begin:
            before = frozenset(present)
        if kind is Kind.USE:
            present.add(unit)
        elif kind is Kind.DONE:
            stays = unit in plan.stays
            kept[unit] = unit in present and (hold_weights or stays)
            if not stays:
                present.discard(unit)
        present.difference_update(actions.release)
        present.update(actions.fetch)
    return kept, before
