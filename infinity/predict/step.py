"""Describes a training step before it runs, and the clock on which it is played.

The runtime's own plan, a :class:`StepScript`, follows from a micro-batch as hooks see it, sizes of units and
the division of the memory budgets; :mod:`infinity.predict.play` plays it.

[Note: shared cores]
Without an accelerator compute, updates, decoding and collectives run on threads of their own. Where more of
them run than the rank has cores, each has the same share, and compute waits for the slowest of its threads.
What I/O takes of the cores, it takes from compute.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import takewhile
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from infinity.core.budget import DeviceBudget, spread
from infinity.core.errors import BudgetError
from infinity.core.nbytes import format_nbytes, rounded
from infinity.partition.mover import Item
from infinity.partition.mover import Stored as StoredItem
from infinity.partition.prefetcher import Prefetcher
from infinity.planner.prefetch_plan import Actions, Event, Kind, Plan, make_plan
from infinity.planner.queues import NEVER_S, Job, Queues
from infinity.planner.simulator import LEAST_SPEED, Channel, channel_rates, delay_s_per_byte, mixed_rates
from infinity.planner.updates import StepOrder
from infinity.predict.machines import RankRates

#: Names of what computes, and of what does one job after the other beside compute.
COMPUTE, LINKS, UPDATE, DECODE = "compute", "links", "update", "decode"
#: Queues of the clock: channels, but those of codecs, and what does one job after the other. Beside them the
#: training thread.
_QUEUES = [*(channel.label for channel in list(Channel)[:4]), LINKS, UPDATE, DECODE]
_LINKS, _DECODE = 4, 6
#: The turn of a gradient whose memory no longer counts until the next one has begun.
OVER = -1
#: The least micro-batches that are planned, and played, before they are taken to repeat.
_LEAST = 3
#: Longer steps (events) are played with fewer micro-batches and steps, and updates in larger chunks.
_MANY_EVENTS = 20_000
#: Steps that are walked with tiles of experts: the first without a plan, two that say which are expected.
_WALKS = 3
_NO_ACTIONS = Actions()


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
    routed: bool = False  # it is a tile of experts
    in_checkpoint: bool = False  # it is read where it lies in one; else it lies in the run's own files
    stored_nbytes: int = 0  # of all ranks' shards as they lie there; 0: it travels in the compute dtype
    decode_nbytes: int = 0  # what the operators read and write that decode all shards
    decode_operators: int = 0

    @property
    def gathered_nbytes(self) -> int:
        """Return the device memory of the full buffer, and of what it is decoded from."""
        return rounded(self.nbytes) + rounded(self.stored_nbytes)

    @property
    def built_nbytes(self) -> int:
        """Return the host memory that is set aside for the shard before it is known what trains."""
        return self.kept_nbytes + self.trained_nbytes

    @property
    def resident_nbytes(self) -> int:
        """Return the host memory that the shard takes with all that training needs of it."""
        return self.built_nbytes if self.trainable else self.kept_nbytes


def choose_homes(
    units: Sequence[UnitShape], resident_nbytes: int, settled_nbytes: int, *, drives: bool, in_place: bool
) -> tuple[UnitShape, ...]:
    """Return the units with their homes, as :class:`infinity.shards.tiers.Tiers` gives them.

    While a model is built room for the moments of each unit is set aside; when the optimizer is made, what
    frozen units do not need goes to others, trained ones first, within ``settled_nbytes``. ``in_place``: what
    is there needs no other memory.

    Raises:
        BudgetError: They do not fit host memory, and there are no drives.
    """
    used, resident = 0, set()
    for index, unit in enumerate(units):
        if used + unit.built_nbytes <= resident_nbytes:
            used += unit.built_nbytes
            resident.add(index)
        elif not drives:
            total = sum(each.built_nbytes for each in units)
            raise BudgetError(
                f"weights and optimizer states take {format_nbytes(total)} of host memory per rank, of which "
                f"memory.host leaves {format_nbytes(resident_nbytes)} for them. Raise memory.host to "
                f"{total} bytes or more, or give memory.nvme one or more directories",
                "memory.host",
            )
    used -= sum(units[i].trained_nbytes for i in resident if not units[i].trainable)
    left = [index for index in range(len(units)) if index not in resident]
    for index in (each for each in left if units[each].trainable):
        nbytes = units[index].resident_nbytes
        if used + nbytes <= settled_nbytes:
            used += nbytes
            resident.add(index)
    frozen = [index for index in left if not units[index].trainable]
    sizes = [units[index].resident_nbytes for index in frozen]
    resident.update(frozen[place] for place in spread(sizes, settled_nbytes - used))
    found = list(units)
    for index in resident:
        streams = not in_place or units[index].stored_nbytes > 0
        found[index] = replace(units[index], on_nvme=False, streams=streams)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Stored:
    """Describes an activation that leaves device memory; positions count the events before."""

    nbytes: int
    packed_at: int | None  # forward has made it; None: it has left already, and is loaded once more
    load_at: int  # its load starts
    asked_at: int  # backward needs it
    on_nvme: bool  # else it goes to host memory
    has_room: bool = True  # of its own there; else that of one that was used before


class TileUse(NamedTuple):
    """Describes a use of a tile of experts in forward, or in one that is recomputed, as hooks tell it."""

    following: tuple[int, ...]  # tiles that are used after it
    recomputed: bool


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
    tiles: tuple[tuple[int, TileUse], ...] = ()  # with their positions; other uses are backward's own
    measured_s: np.ndarray | None = None  # on the machine that is planned for; not a number: unknown
    calls: int = 1  # of each operator, which together have these flops, bytes and seconds

    def operator_s(self, rates: RankRates) -> np.ndarray:
        """Return the seconds of each operator: as measured, or by the roofline."""
        rate = np.where(self.fp32, rates.fp32_flops_per_s, rates.flops_per_s)
        each = np.maximum(self.flops / rate, self.nbytes / rates.memory_bytes_per_s)
        each = np.maximum(each, self.calls * rates.operator_s)
        if self.measured_s is None:
            return each
        launched_s = self.measured_s + self.calls * rates.operator_s
        return np.where(np.isnan(self.measured_s), each, launched_s)

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

    def scaled(self, factor: float, calls: int = 1) -> "StepTrace":
        """Return the trace of ``factor`` times as many tokens, with ``calls`` calls of each operator."""
        return replace(
            self,
            flops=self.flops * factor,
            nbytes=self.nbytes * factor,
            model_flops=self.model_flops * factor,
            tokens=round(self.tokens * factor),
            measured_s=None if self.measured_s is None else self.measured_s * factor,
            calls=self.calls * calls,
        )


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
    together: tuple[frozenset[int], ...] = ()  # tiles of each block that all its micro-batches use
    of_others: frozenset[int] = frozenset()  # units of adapters that the traced micro-batch does not use
    whole: bool = False  # host memory has all of a unit: see :attr:`infinity.comm.ranks.Ranks.host_is_whole`

    def item_nbytes(self, item: int) -> int:
        """Return the device memory of a unit's full values, or (``~unit``) of a tile's stored bytes."""
        if item < 0:
            return self.units[~item].stored_nbytes if self.travels(~item) else 0
        return self.units[item].nbytes

    def travels(self, unit: int) -> bool:
        """Return whether a unit's shard moves; else it is used, or decoded, where it lies."""
        return self.units[unit].on_nvme or self.on_accelerator or not self.whole

    def gathers(self, unit: int) -> bool:
        """Return whether this rank has a part of a unit, and gets the others from other ranks."""
        in_host = not self.units[unit].on_nvme and unit not in self.division.on_device
        return self.ranks > 1 and not (self.whole and in_host)

    def uploaded_nbytes(self, unit: int) -> int:
        """Return the bytes of a unit that come to this rank's accelerator by its link."""
        shape = self.units[unit]
        return shape.moved_nbytes if self.gathers(unit) else shape.stored_nbytes or shape.nbytes

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
    order: StepOrder
    present: frozenset[int]  # units that are there when the last micro-batch begins
    trained: frozenset[int]  # those to which backward brings a gradient

    @property
    def is_long(self) -> bool:
        """Return whether fewer steps are played, and updates in larger chunks."""
        return len(self.plan.events) > _MANY_EVENTS

    @classmethod
    def of(cls, trace: StepTrace, setup: StepSetup) -> "StepScript":
        before, length = setup.micro_batches - 1, len(trace.accumulated()[0])
        earlier = min(before, tries(length))
        plan, more = plan_of(trace, setup, earlier), before - earlier
        turns = [plan.actions[i * length : (i + 1) * length] for i in range(earlier)]
        repeated = next((i for i, each in enumerate(turns[1:]) if each == turns[i]), earlier - 1)
        alike = sum(1 for _ in takewhile(lambda each: each == turns[repeated], turns[repeated + 1 :]))
        if alike:  # one of them is played
            earlier, more = earlier - alike, more + alike
            begin, end = repeated * length, (repeated + alike) * length
            events = plan.events[:begin] + plan.events[end:]
            plan = replace(plan, events=events, actions=plan.actions[:begin] + plan.actions[end:])
        order, present = StepOrder(), set(plan.begin)
        order.learn(plan.events)
        for (kind, unit), actions in zip(plan.events[: earlier * length], plan.actions, strict=False):
            if kind is Kind.USE:
                present.add(unit)
            present.difference_update(actions.release)
            present.update(actions.fetch)
        trained = setup.of_others | {unit for _, unit in trace.begun if setup.units[unit].trainable}
        return cls(plan, earlier, length, repeated, more, order, frozenset(present), trained)


def tries(events: int) -> int:
    """Return how many micro-batches of so many events are played before they are taken to repeat."""
    return max(_LEAST, _MANY_EVENTS // max(1, events))


def plan_of(trace: StepTrace, setup: StepSetup, earlier: int = 0) -> Plan:
    """Return what the runtime's prefetcher does in a step: its plan, and what it does with tiles of experts.

    ``earlier`` micro-batches come before the one of the trace. A tile's stored bytes, from which its full
    values are decoded, are ``~unit``.
    """
    accumulated, places = trace.accumulated()
    events, length = accumulated * earlier + trace.events, len(accumulated)
    uses = [(i * length + places[at], use) for i in range(earlier) for at, use in trace.tiles]
    uses += [(earlier * length + at, use) for at, use in trace.tiles]
    window = setup.division.window
    return _walked(events, tuple(uses), setup.units, window, setup.piece_nbytes, setup.together)


@lru_cache(maxsize=8)  # with more drives, say, a step has the same plan
def _walked(
    events: tuple[Event, ...], tile_uses: tuple[tuple[int, TileUse], ...], units: tuple[UnitShape, ...],
    window: int, most: int | None, together: tuple[frozenset[int], ...],
) -> Plan:  # fmt: skip
    nbytes = {index: unit.gathered_nbytes for index, unit in enumerate(units) if unit.streams}
    can_stay = {
        index
        for index, unit in enumerate(units)
        if unit.on_nvme and (most is None or unit.weight_nbytes <= most)
    }
    tiles, uses = [index for index in nbytes if units[index].routed], dict(tile_uses)
    if not tiles:
        return make_plan(events, nbytes, window, can_stay=can_stay)
    # Which tiles stay is in no plan: so steps are walked, until one has the plan and what it expects.
    release, fetch, actions = list[int](), list[int](), list[Actions]()
    mover: Any = SimpleNamespace(
        units=units,
        start=lambda item: fetch.append(_number(item)),
        release=lambda item: release.append(_number(item)),
        finish=lambda unit: None,
        stored_nbytes=lambda unit: rounded(units[unit].stored_nbytes),
    )
    prefetcher = Prefetcher(mover, nbytes, window, can_stay, routed=tiles)
    prefetcher.room.hold_together(together)
    for _ in range(_WALKS):
        begin, peak_nbytes = tuple(map(_number, prefetcher.residents)), 0
        actions.clear()
        for at, (kind, unit) in enumerate(events):
            release.clear()
            fetch.clear()
            if kind is Kind.USE and at in uses:
                prefetcher.use(unit, uses[at].following, recomputed=uses[at].recomputed)
            else:
                {Kind.USE: prefetcher.use, Kind.UNPIN: prefetcher.unpin, Kind.DONE: prefetcher.done}[kind](
                    unit
                )
            actions.append(Actions(tuple(release), tuple(fetch)) if release or fetch else _NO_ACTIONS)
            peak_nbytes = max(peak_nbytes, prefetcher.residents.nbytes)
        plan = prefetcher.training.plan
        prefetcher.end_training_pass()
    stays = frozenset[int]() if plan is None else plan.stays
    return Plan(events, begin, tuple(actions), peak_nbytes, stays)


def _number(item: Item) -> int:
    return ~item.unit if isinstance(item, StoredItem) else item


@dataclass(frozen=True, slots=True)
class StepCost:
    """Holds the cost of a step on one rank, once steps repeat."""

    step_s: float
    busy_s: dict[str, float]  # for which each channel, collectives, updates, compute and decoding go on
    nbytes: dict[str, int]  # that each channel moves; of the links, full buffers
    stall_s: dict[str, float]  # for which compute waits, by cause
    device_peak_nbytes: int  # of units, gradients and updates

    @property
    def bottleneck(self) -> str:
        """Return the channel or device that is busy for the largest share of the step."""
        return max(self.busy_s, key=lambda name: self.busy_s[name])

    def plus(self, other: "StepCost", times: float) -> "StepCost":
        """Return the sum of this cost and ``times`` times ``other``; the peak of memory is this one's."""

        def added(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
            return {name: a.get(name, 0.0) + times * b.get(name, 0.0) for name in {**a, **b}}

        nbytes = {name: round(number) for name, number in added(self.nbytes, other.nbytes).items()}
        return StepCost(
            self.step_s + times * other.step_s, added(self.busy_s, other.busy_s), nbytes,
            added(self.stall_s, other.stall_s), self.device_peak_nbytes,
        )  # fmt: skip


def _speeds_of(rates: RankRates, going: int, threads: float) -> tuple[float, ...]:
    """Return the speed of each queue's first job, and of compute, while those of ``going`` go on."""
    cores, channels = rates.cores, rates.channels
    alone = channel_rates(channels)[:4]
    moved = [rate * (going >> i & 1) for i, rate in enumerate(alone)]
    shared = 1.0  # a link that brings shards one way and gradients the other, and collectives on both
    if rates.by_host and going >> _LINKS & 1 and moved[2] + moved[3]:
        shared = 0.5
        moved[2:] = [0.5 * rate for rate in moved[2:]]
    if moved[0] and moved[1]:
        moved[1], moved[0] = mixed_rates(channels)
    share = min(1.0, cores / threads) if threads else 1.0
    compute = max(LEAST_SPEED, 1 - delay_s_per_byte(channels) * sum(moved)) * share
    if not cores and going >> _DECODE & 1:
        compute *= 0.5  # they share the device
    speeds = (now / rate if now else 1.0 for now, rate in zip(moved, alone))
    return (*speeds, share * shared, share, share, compute)


class VirtualClock:
    """Plays what the training thread does beside the queues of its rank, and counts what it takes."""

    def __init__(self, rates: RankRates, *, on_accelerator: bool) -> None:
        # Others depend on reads and writes, and on decoding; or on each.
        coupled = -1 if rates.cores or delay_s_per_byte(rates.channels) else 0b1000011
        coupled |= 0b0011100 * rates.by_host
        self.queues = Queues(_QUEUES, partial(_speeds_of, rates), rates.threads, coupled)
        self.on_accelerator = on_accelerator
        self.pass_on, self.busy_s = self.queues.pass_on, self.queues.busy_s
        self._bytes_per_s, self._latency_s = channel_rates(rates.channels), rates.channels.latency_s
        #: As in :class:`StepCost`, since the beginning.
        self.nbytes: Counter[str] = Counter()
        self.stall_s: defaultdict[str, float] = defaultdict(float)
        self._skipped = StepCost(0.0, {}, {}, {}, 0)  # of micro-batches that were not played

    def wait(self, until: Callable[[], bool], cause: str) -> None:
        """Let time pass until ``until`` is true, and count it as a stall by ``cause``."""
        began_s = self.queues.now_s
        while not until():
            if not self.pass_on():
                break  # a lease beyond the budget: the runtime would give back what is kept in vain
        self.stall_s[cause] += self.queues.now_s - began_s

    def compute(self, work_s: float) -> None:
        """Let the training thread compute for ``work_s``, longer if other work shares the cores."""
        self.busy_s[COMPUTE] += work_s
        self.queues.set_computing(goes_on=True)
        while work_s:
            work_s = self.queues.compute(work_s)
        self.queues.set_computing(goes_on=False)

    def update(self, time_s: float) -> None:
        """Let an update take ``time_s`` of the training thread, or of what it waits for."""
        self.busy_s[UPDATE] += time_s
        self.stall_s[UPDATE] += time_s
        queues, end_s = self.queues, self.queues.now_s + time_s
        while min(queues.ends_s) <= end_s:
            queues.pass_on()
        queues.now_s = end_s

    def move(self, channel: Channel, nbytes: int, then: Callable[[], object], order: int = 0) -> None:
        self.count(channel, nbytes)
        self.send(channel, nbytes, then, order)

    def over_link(self, channel: Channel, nbytes: int, then: Callable[[], object]) -> None:
        """Call ``then`` when bytes have moved between host and accelerator; at once without one."""
        if self.on_accelerator:
            self.move(channel, nbytes, then)
        else:
            then()

    def bring(self, nbytes: int, then: Callable[[], object], *, on_nvme: bool) -> None:
        """Call ``then`` when bytes have come to the device, from NVMe or host memory."""
        upload = partial(self.over_link, Channel.HOST_TO_DEVICE, nbytes, then)
        if on_nvme:
            self.move(Channel.NVME_READ, nbytes, upload)
        else:
            upload()

    def count(self, channel: Channel, nbytes: int) -> None:
        """Count bytes of this step, whenever they move."""
        self.nbytes[_QUEUES[channel]] += nbytes

    def send(self, channel: Channel, nbytes: int, then: Callable[[], object], order: int = 0) -> None:
        """Queue the transfer of bytes that were counted, before those that wait with a larger ``order``."""
        queues, rate = self.queues, self._bytes_per_s[channel]
        if rate > 0 and nbytes > 0:
            ready_s = queues.now_s + self._latency_s
            queues.add(int(channel), Job(nbytes / rate, then, ready_s=ready_s, order=order))
        else:
            then()

    def serve(
        self, name: str, time_s: float, then: Callable[[], object], threads: float = 1.0, ready: bool = True,
        order: int = 0,
    ) -> Callable[[], None]:  # fmt: skip
        """Queue a job behind those of the same name; its turn waits until it is ``ready``, or let on.

        Returns what lets it go on.
        """
        queue, job = _QUEUES.index(name), Job(time_s, then, threads, 0.0 if ready else NEVER_S, order=order)
        self.queues.add(queue, job)
        return partial(self.queues.let_on, queue, job)

    def mark(self, device_peak_nbytes: int) -> StepCost:
        """Return the cost of all that has passed until now."""
        queues, busy_s = self.queues, self.queues.busy_until_now()
        played = StepCost(queues.now_s, busy_s, self.nbytes, self.stall_s, device_peak_nbytes)
        return played.plus(self._skipped, 1.0)

    def skip(self, each: StepCost, times: int) -> None:
        """Add ``each`` to the account ``times`` times without playing it."""
        self._skipped = self._skipped.plus(each, times)

    @property
    def waiting(self) -> list[tuple[int, str]]:
        """Return of each queue the number of jobs that have not ended, and when the first one does."""
        queues = self.queues
        left_s = (end_s - queues.now_s for end_s in queues.ends_s)
        return [(len(jobs), f"{each_s:.6g}") for jobs, each_s in zip(queues.jobs, left_s)]


class DeviceMemory:
    """Counts what is leased of the device budget, as the pools do; a lease that finds no room waits."""

    def __init__(self, division: DeviceBudget, clock: VirtualClock) -> None:
        self._clock, self._total_nbytes = clock, division.total
        self.updated = frozenset(division.on_device)  # units whose states are there
        self.leased_nbytes = self.peak_nbytes = division.states
        self._passing_nbytes = self.turn = 0  # of the gradient that is open: see [Note: gradients that pass]

    def lease(self, nbytes: int) -> None:
        nbytes = rounded(nbytes)
        most_nbytes = self._total_nbytes - nbytes
        if self.leased_nbytes + self._passing_nbytes > most_nbytes:
            self.end_turn()
            self._clock.wait(lambda: self.leased_nbytes + self._passing_nbytes <= most_nbytes, "memory")
        self.leased_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.leased_nbytes + self._passing_nbytes)

    def give_back(self, nbytes: int) -> None:
        self.leased_nbytes -= rounded(nbytes)

    def give_back_late(self, nbytes: int, turn: int) -> None:
        """Give back a gradient's memory; it counts until the ``turn`` in which it was complete has ended."""
        self.give_back(nbytes)
        if turn == self.turn and not self._clock.on_accelerator:
            self._passing_nbytes += rounded(nbytes)

    def end_turn(self) -> None:
        """Free the memory of earlier gradients, since the next gradient has begun."""
        self.turn += 1
        self._passing_nbytes = 0
