"""Simulate a step under a plan: predict its time, stalls, peaks and bytes, and when each of them happens.

[Note: a simulated step]
Compute runs the positions of a step in order; between them the tensor cache packs, stores, loads and
releases. Packing and asking wait for the stores that the plan says. When backward asks for a storage, the
loads tied to it start, and its own if that has not; then compute waits for it. Stores that are left at the
end do not count.

[Note: where bytes are]
A slot has the states of the tensor cache (:class:`infinity.core.lifecycle.SlotState`). Its memory is free
when its store has ended and forward is done with it, and is taken again as soon as its load is asked for. A
slot that is asked for before it has left stays, and its store is cancelled if it waits for others (here all
but the first wait; the cache has a few in flight). Storing what other code holds frees nothing. Host memory
is taken when a slot is packed, and given back when backward is done with it, or its store is cancelled.

[Note: stops]
The simulator stops only where something is to be done; in between compute runs as far as transfers allow, and
the fullest position counts, with what was away before. With a timeline it stops at every position.

[Note: rates]
Between two events every rate is constant. A channel moves one transfer after the other in the order of
submission. A transfer's first byte moves ``latency_s`` after it was submitted, even if it waited for others
meanwhile: the cache has several of them on their way. Compute beside transfers loses ``compute_s_per_byte``
for each of their bytes, but keeps a part of its speed: the operating system gives it a share of the cores.
Where it starts a store or a load, it also loses ``compute_s_per_move``.

[Note: reads beside writes]
When an NVMe drive reads and writes at once, both together move ``mixed_bytes_per_s``, half each as far as
they can. A byte that is written therefore costs the reads of the same time what they lose while it moves.

[Note: units go first]
Bytes of units go before bytes of activations. In a real step both go in the order of submission, and compute
waits for a late unit. Here it does not, since the measured step has waited for units already: activations
bear the whole delay. Units slow compute no more than when it was measured.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from infinity.core.errors import RecipeError
from infinity.core.lifecycle import SlotState
from infinity.core.plan import ActivationPlan, Hardware, Outcome, Place, Profile, SlotKey, StoreWait, Traffic
from infinity.planner.lifetimes import InactivePeriod, Lifetimes, index_of
from infinity.planner.queues import NOTHING_S, Job, Queues


class Channel(IntEnum):
    """Names one direction of one link."""

    NVME_WRITE = 0
    NVME_READ = 1
    DEVICE_TO_HOST = 2
    HOST_TO_DEVICE = 3
    ENCODE = 4
    DECODE = 5

    @property
    def label(self) -> str:
        """Return the name in tables and pictures."""
        return ("NVMe write", "NVMe read", "device to host", "host to device", "encode", "decode")[self]


#: The channels by which a storage goes to a place, one after the other, and those by which it comes back.
STORE = {
    Place.NVME: (Channel.NVME_WRITE,), Place.HOST: (Channel.DEVICE_TO_HOST,), Place.CODED: (Channel.ENCODE,),
    Place.CODED_NVME: (Channel.ENCODE, Channel.NVME_WRITE),
}  # fmt: skip
LOAD = {
    Place.NVME: (Channel.NVME_READ,), Place.HOST: (Channel.HOST_TO_DEVICE,), Place.CODED: (Channel.DECODE,),
    Place.CODED_NVME: (Channel.NVME_READ, Channel.DECODE),
}  # fmt: skip
#: Codecs take a storage's own time: their channels move nanoseconds in place of bytes.
_NS_PER_S = 1e9


def channel_rates(hardware: Hardware) -> tuple[float, ...]:
    """Return bytes per second of each channel alone."""
    write, read, host = hardware.write_bytes_per_s, hardware.read_bytes_per_s, hardware.host_bytes_per_s
    return write, read, host, host, _NS_PER_S, _NS_PER_S


def load_of(period: InactivePeriod, channel: Channel, place: Place) -> int:
    """Return what a storage asks of a channel on its way to a place or back (bytes; of codecs, ns)."""
    if channel in (Channel.ENCODE, Channel.DECODE):
        assert period.coded is not None
        coding_s = period.coded.encode_s if channel is Channel.ENCODE else period.coded.decode_s
        return int(coding_s * _NS_PER_S) + 1
    return period.moved(place)


#: Share of its speed that compute keeps beside transfers, at least.
LEAST_SPEED = 0.1
#: As indices: looking a member of an enum up costs more than the arithmetic around it.
_WRITE, _READ, _ENCODE = int(Channel.NVME_WRITE), int(Channel.NVME_READ), int(Channel.ENCODE)
#: The queues of the clock: channels, and what units write and read.
_UNITS = len(Channel)
_QUEUES = [*(channel.label for channel in Channel), *(channel.label for channel in list(Channel)[:2])]


def mixed_rates(hardware: Hardware) -> tuple[float, float]:
    """Return bytes per second of reads and writes while both are busy; see [Note: reads beside writes]."""
    half = hardware.mixed_bytes_per_s / 2
    write = min(hardware.write_bytes_per_s, half)
    read = min(hardware.read_bytes_per_s, hardware.mixed_bytes_per_s - write)
    return read, min(hardware.write_bytes_per_s, hardware.mixed_bytes_per_s - read)


class ChannelTimeline:
    """Holds the bytes that fit into the time of each operator on a channel, and are not booked yet.

    So a transfer may use several gaps, and two transfers may share one.
    """

    def __init__(self, times: np.ndarray, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self.latency_nbytes = int(latency_s * bytes_per_s)  # that a transfer takes beyond its own
        self._free = (times * bytes_per_s).astype(np.int64)
        #: Another channel, and how many of its bytes each byte booked here takes.
        self.beside: tuple[ChannelTimeline, float] | None = None

    def until(self) -> np.ndarray:
        """Return the free bytes before each operator, and of the whole step, ``(operators + 1,)``."""
        return np.concatenate(([0], np.cumsum(self._free)))

    def book_from(self, begin: int, nbytes: int) -> None:
        """Book ``nbytes`` as early as possible from operator ``begin`` on.

        Bytes without room at the end of the step go on at its beginning, as those of the step before do. What
        finds no room in a whole step is dropped.
        """
        order = (begin + np.arange(len(self._free))) % max(1, len(self._free))
        free = self._free[order]
        taken = np.clip(nbytes + self.latency_nbytes - (np.cumsum(free) - free), 0, free)
        self._free[order] -= taken
        if self.beside is not None:
            beside, tax = self.beside
            beside._free[order] = np.maximum(beside._free[order] - (taken * tax).astype(np.int64), 0)


def channel_timelines(
    times: np.ndarray, hardware: Hardware, traffic: Iterable[Traffic] = ()
) -> dict[Channel, ChannelTimeline]:
    """Return timelines of a step whose operators take ``times`` (s), with the ``traffic`` of units booked."""
    rates = zip(Channel, channel_rates(hardware))
    made = {channel: ChannelTimeline(times, rate, hardware.latency_s) for channel, rate in rates}
    read, write = hardware.read_bytes_per_s, hardware.write_bytes_per_s
    writes, reads = made[Channel.NVME_WRITE], made[Channel.NVME_READ]
    mixed_read, mixed_write = mixed_rates(hardware)
    writes.beside = reads, (read - mixed_read) / mixed_write if mixed_write else 0.0
    reads.beside = writes, (write - mixed_write) / mixed_read if mixed_read else 0.0
    for unit in traffic:
        if unit.nbytes_read:
            reads.book_from(unit.at, unit.nbytes_read)
        if unit.nbytes_written:
            writes.book_from(unit.at, unit.nbytes_written)
    return made


def delay_s_per_byte(hardware: Hardware) -> float:
    """Return seconds by which each moved byte delays compute, bounded so that compute never stops."""
    most = max(sum(mixed_rates(hardware)), hardware.read_bytes_per_s, hardware.write_bytes_per_s)
    most += 2 * hardware.host_bytes_per_s if hardware.host_nbytes else 0.0
    return min(hardware.compute_s_per_byte, (1 - LEAST_SPEED) / most if most else 0.0)


def _speeds_of(hardware: Hardware, going: int, threads: float) -> tuple[float, ...]:
    """Return the speed of each queue's first job, and of compute, while those of ``going`` go on.

    See [Note: reads beside writes] and [Note: units go first].
    """
    bits = [going >> queue & 1 for queue in range(len(_QUEUES))]
    alone = channel_rates(hardware)
    drive = [rate * (bits[i] | bits[_UNITS + i]) for i, rate in enumerate(alone[:2])]
    if all(drive):
        drive[_READ], drive[_WRITE] = mixed_rates(hardware)
    moved = [rate * (1 - bits[_UNITS + i]) for i, rate in enumerate(drive)] + list(alone[2:])
    beside = sum(rate * bit for rate, bit in zip(moved[:_ENCODE], bits))
    slowed = delay_s_per_byte(hardware) * beside + hardware.coding_delay * sum(bits[_ENCODE:_UNITS])
    shares = (rate / full if full else 0.0 for rate, full in zip(moved + drive, alone + alone[:2]))
    return (*shares, max(LEAST_SPEED, 1 - slowed))


class Interval(NamedTuple):
    """Names what took from ``begin_s`` to ``end_s`` of the step."""

    begin_s: float
    end_s: float
    name: str  # "units" for what units moved


class Sample(NamedTuple):
    """Records that from ``at_s`` on ``nbytes`` are in device memory."""

    at_s: float
    nbytes: int


@dataclass(slots=True)
class StepTimeline:
    """Records what happens in a simulated micro-batch with its update, for pictures."""

    #: Bytes of the step's own storages on the device; a step function.
    memory: list[Sample] = field(default_factory=lambda: [Sample(0.0, 0)])
    channels: dict[str, list[Interval]] = field(
        default_factory=lambda: {channel.label: [] for channel in Channel}
    )
    stalls: list[Interval] = field(default_factory=list)
    recomputed: list[Interval] = field(default_factory=list)


def play(
    profile: Profile, plan: ActivationPlan, hardware: Hardware, timeline: StepTimeline | None = None
) -> Outcome:
    """Predict what one micro-batch with its update costs under ``plan``; fill ``timeline``.

    Raises:
        RecipeError: The plan was made for another profile, or needs a channel that ``hardware`` lacks.
    """
    index = index_of(profile)
    unknown = [k for k in plan.kept if k not in index.operators or not index.may_stay(index.operators[k])]
    lifetimes = index.lifetimes(*index.again(replace(plan, kept={} if unknown else plan.kept)))
    named = {*plan.places, *(key for load in plan.loads for key in (load.slot, load.after or load.slot))}
    named.update(key for wait in plan.waits for key in (wait.at, wait.slot))
    periods = {key: lifetimes.periods[at] for key, at in lifetimes.index.items()}
    uncoded = (
        key for key, p in plan.places.items() if key in periods and p.is_coded and not periods[key].coded
    )
    lacking = [f"slot {k.region}.{k.ordinal}" for k in sorted(named - lifetimes.index.keys())]
    lacking += [f"the codec of slot {k.region}.{k.ordinal}" for k in uncoded]
    lacking += [f"operator {key.ordinal} {key.name} of block {key.region}" for key in sorted(unknown)]
    lacking += [f"block {region}" for region in sorted(plan.recomputed - {b.region for b in profile.blocks})]
    if lacking:
        raise RecipeError(
            f"the plan ({plan.policy}) names {', '.join(lacking[:5])}, which this profile lacks: "
            "it was made for another one; plan again"
        )
    return Simulator(lifetimes, plan, hardware, timeline).run()


def _name_of(period: InactivePeriod) -> str:
    """Return the name of a storage in pictures."""
    return f"{period.key.region}.{period.key.ordinal}"


class _Gauge:
    def __init__(self) -> None:
        self.nbytes = self.peak_nbytes = 0

    def add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)


@dataclass(slots=True)
class _Slot:
    """Tracks a storage that a plan stores; see [Note: where bytes are]."""

    period: InactivePeriod
    place: Place
    state: SlotState = SlotState.RESIDENT
    is_away: bool = False  # not in memory: it is STORED, and forward is done with it
    is_wanted: bool = False  # backward has asked for it; a store that ends now frees nothing
    is_released: bool = False  # backward is done with it before its store has ended
    job: Job | None = None  # that is queued, or was last

    @property
    def host_nbytes(self) -> int:
        return self.period.nbytes if self.place is Place.HOST else 0

    @property
    def rounds(self) -> bool:
        """Return whether backward reads only what comes back."""
        return self.place.is_coded and self.period.coded is not None and not self.period.coded.exact


class _Slots:
    """Moves the slots that a plan stores as the tensor cache would; by index of their inactive period."""

    def __init__(
        self, lifetimes: Lifetimes, plan: ActivationPlan, queues: Queues,
        move: Callable[[int, int, float, str, Callable[[], object]], Job], handle: Callable[[], None],
    ) -> None:  # fmt: skip
        index = lifetimes.index
        self.all = {
            index[key]: _Slot(lifetimes.periods[index[key]], place)
            for key, place in plan.places.items()
            if place is not Place.KEEP
        }
        #: Slots to load, by the slot whose asking starts the loads; None: the beginning of backward.
        self.loads: defaultdict[int | None, list[int]] = defaultdict(list)
        for load in plan.loads:
            self.loads[None if load.after is None else index[load.after]].append(index[load.slot])
        self._queues, self._move, self._handle = queues, move, handle
        self.at = 0  # the position of compute
        self._storing: list[tuple[SlotKey, int]] = []  # a heap of slots, of which some may have been stored
        # Within a capacity no store may hold what backward has released.
        late = set() if plan.capacity_nbytes is None else {SlotState.STORING}
        self._unreadable = {SlotState.LOADING} | late
        self.backlog, self.host = _Gauge(), _Gauge()  # bytes whose store has not ended; in host memory
        self.away_nbytes = 0  # device memory that slots do not take
        self.moved_nbytes = Counter[int]()  # by each channel

    def pack(self, index: int) -> None:
        slot = self.all[index]
        slot.state = SlotState.STORING
        heappush(self._storing, (slot.period.key, index))
        self.backlog.add(slot.period.nbytes)
        self.host.add(slot.host_nbytes)
        self._submit(STORE[slot.place][0], index)
        self._handle()

    def has_stored(self, index: int) -> bool:
        """Return whether no store of the slot, or of one packed before it, is still to end."""
        storing = self._storing
        while storing and self.all[storing[0][1]].state is not SlotState.STORING:
            heappop(storing)
        return not storing or storing[0][0] > self.all[index].period.key

    def end_forward_use(self, index: int) -> None:
        slot = self.all[index]
        if slot.state is SlotState.STORED and not slot.is_away:
            self._leave(slot)

    def start_loads(self, after: int | None) -> None:
        """Start the loads tied to slot ``after``; None: to the beginning of backward."""
        for index in self.loads.pop(after, ()):
            self.fetch(index)

    def is_resident(self, index: int) -> bool:
        slot = self.all.get(index)
        return slot is None or not (
            slot.state in self._unreadable or (slot.rounds and slot.state is SlotState.STORING)
        )

    def drop(self, index: int) -> None:
        """Give back the memory of a slot that was stored: backward has read it, its graph is still there."""
        slot = self.all[index]
        if slot.state is SlotState.RESIDENT and slot.place is not Place.KEEP and slot.period.is_freed:
            self._leave(slot)

    def release(self, index: int) -> None:
        """Give back the slot's host memory or code, now or when its store ends; its graph is gone."""
        slot = self.all[index]
        if slot.is_away:
            slot.is_away = False
            self.away_nbytes -= slot.period.nbytes
        if slot.state is SlotState.STORING:
            slot.is_released = True
        else:
            self.host.add(-slot.host_nbytes)
            self.away_nbytes += slot.period.beside(slot.place)

    def _end(self, channel: Channel, index: int) -> None:
        slot = self.all[index]
        stages = (LOAD if channel in LOAD[slot.place] else STORE)[slot.place]
        self.moved_nbytes[channel] += load_of(slot.period, channel, slot.place)
        if channel != stages[-1]:
            self._submit(stages[-1], index)
            return
        if stages is LOAD[slot.place]:
            slot.state = SlotState.RESIDENT
            return
        self.backlog.add(-slot.period.nbytes)
        if slot.is_released:
            self.host.add(-slot.host_nbytes)
        else:
            self.away_nbytes -= slot.period.beside(slot.place)
        if slot.rounds and slot.is_wanted:
            slot.state = SlotState.LOADING
            self._submit(LOAD[slot.place][0], index)
            return
        if slot.is_wanted or slot.is_released or not slot.period.is_freed:
            slot.state = SlotState.RESIDENT
            return
        slot.state = SlotState.STORED
        if slot.period.begin <= self.at:
            self._leave(slot)

    def fetch(self, index: int) -> None:
        """Start the slot's load, or let it stay; backward will need it."""
        slot = self.all.get(index)
        if slot is None or slot.is_released:
            return
        if slot.is_away:
            slot.state, slot.is_away = SlotState.LOADING, False
            self.away_nbytes -= slot.period.nbytes
            self._submit(LOAD[slot.place][0], index)
            self._handle()
        elif slot.state is SlotState.STORED:
            slot.state = SlotState.RESIDENT
        elif slot.state is SlotState.STORING:
            slot.is_wanted = True
            assert slot.job is not None, "its store is queued"
            if not slot.rounds and self._queues.cancel(STORE[slot.place][0], slot.job):
                slot.state = SlotState.RESIDENT
                self.backlog.add(-slot.period.nbytes)
                self.host.add(-slot.host_nbytes)
                slot.place = Place.KEEP

    def _submit(self, channel: Channel, index: int) -> None:
        slot, end = self.all[index], partial(self._end, channel, index)
        work, name = load_of(slot.period, channel, slot.place), _name_of(slot.period)
        slot.job = self._move(channel, channel, work, name, end)

    def _leave(self, slot: _Slot) -> None:
        slot.is_away = True
        self.away_nbytes += slot.period.nbytes


class Simulator:
    """Runs one step under a plan, once; see [Note: a simulated step] and [Note: stops].

    ``lifetimes`` are those of the step that recomputes the plan's blocks, with all slots that the plan names.

    Raises:
        RecipeError: The plan uses a channel that moves nothing.
    """

    def __init__(
        self,
        lifetimes: Lifetimes,
        plan: ActivationPlan,
        hardware: Hardware,
        timeline: StepTimeline | None = None,
    ) -> None:
        self._lifetimes, self._timeline = lifetimes, timeline
        self._memory: list[int] = lifetimes.memory.tolist()
        self._rates, self._latency_s = channel_rates(hardware), hardware.latency_s
        self._queues = Queues(_QUEUES, partial(_speeds_of, hardware))
        self._s_per_move = hardware.compute_s_per_move
        self.slots = _Slots(lifetimes, plan, self._queues, self._move, self._handle)
        self._agenda = self._actions(plan.waits)
        self._stall_s = 0.0
        self._peak_nbytes = 0
        for place in {slot.place for slot in self.slots.all.values()}:
            for channel in (*STORE[place], *LOAD[place]):
                if not self._rates[channel] > 0:
                    raise RecipeError(
                        f"the plan moves activations by {channel.label}, whose bandwidth is not above 0; "
                        "plan again"
                    )

    def run(self) -> Outcome:
        lifetimes, queues, slots, end = self._lifetimes, self._queues, self.slots, len(self._memory)
        begun = {again.begin: again for again in lifetimes.recomputations if again.begin < again.end}
        ends = {again.end for again in begun.values()}
        every = range(0 if self._timeline is None else end)
        stops = sorted({0, end, *self._agenda, *lifetimes.traffic, *begun, *ends, *every})
        again_s: list[Interval] = []
        for at, following in pairwise([*stops, end]):
            slots.at = at
            for do in self._agenda.get(at, ()):
                do()
            if at in lifetimes.traffic:
                self._move_units(lifetimes.traffic[at])
            if at in begun:
                again_s.append(Interval(queues.now_s, queues.now_s, begun[at].block.name))
            self._compute(at, following)
            if following in ends:
                again_s[-1] = again_s[-1]._replace(end_s=queues.now_s)
        step_s = queues.now_s
        self._note(0)
        while queues.pass_on():
            self._note(0)
        if self._timeline is not None:
            self._timeline.recomputed = again_s
        return Outcome(
            step_s=step_s,
            stall_s=self._stall_s,
            recompute_s=sum(again.end_s - again.begin_s for again in again_s),
            peak_nbytes=self._peak_nbytes,
            host_peak_nbytes=slots.host.peak_nbytes,
            nbytes_stored=slots.moved_nbytes[Channel.NVME_WRITE],
            nbytes_loaded=slots.moved_nbytes[Channel.NVME_READ],
        )

    def _actions(self, waits: Iterable[StoreWait]) -> dict[int, list[Callable[[], None]]]:
        """Return what to do before each position: pack, leave, release, wait, begin backward, ask."""
        lifetimes, slots = self._lifetimes, self.slots
        found: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)
        packed = sorted(slots.all.items(), key=lambda item: item[1].period.key)
        for index, slot in packed:
            found[slot.period.packed_at + 1].append(partial(slots.pack, index))
        for index, slot in packed:
            found[slot.period.begin].append(partial(slots.end_forward_use, index))
        for index, slot in packed:
            released, gone = slot.period.released_at + 1, slot.period.gone_at
            if released < gone:
                found[released].append(partial(slots.drop, index))
            if released < gone or slot.place in (Place.HOST, Place.CODED):
                found[max(slot.period.packed_at + 1, gone)].append(partial(slots.release, index))
        for wait in waits:
            period, last = lifetimes.periods[lifetimes.index[wait.at]], lifetimes.index[wait.slot]
            at = period.end if wait.backward else period.packed_at + 1
            found[at].append(partial(self._wait, "stores", partial(slots.has_stored, last)))
        found[lifetimes.backward].append(partial(slots.start_loads, None))
        for index in sorted({after for after in slots.loads if after is not None} | slots.all.keys()):
            found[lifetimes.periods[index].end].append(partial(self._ask, index))
        return found

    def _ask(self, index: int) -> None:
        self.slots.start_loads(index)
        self.slots.fetch(index)
        self._wait(_name_of(self._lifetimes.periods[index]), lambda: self.slots.is_resident(index))

    def _wait(self, cause: str, until: Callable[[], bool]) -> None:
        """Let time pass before a position, while memory is no more than its neighbours take."""
        queues, memory, at = self._queues, self._memory, self.slots.at
        between = min(memory[at - 1], memory[at]) if 0 < at < len(memory) else 0
        began_s = queues.now_s
        while not until():
            self._note(between)
            moves = queues.pass_on()
            assert moves, "compute waits, and nothing moves"
        if queues.now_s > began_s:
            self._note(between)
            self._stall_s += queues.now_s - began_s
            if self._timeline is not None:
                self._timeline.stalls.append(Interval(began_s, queues.now_s, cause))

    def _compute(self, at: int, following: int) -> None:
        """Compute the positions from ``at`` up to ``following``; see [Note: stops]."""
        queues, until_s, memory = self._queues, self._lifetimes.until_s, self._memory
        done_s, goal_s, begun = until_s[at], until_s[following], at
        while done_s < goal_s:
            left_s, most_s = goal_s - done_s, queues.speeds[-1] * (min(queues.ends_s) - queues.now_s)
            done_s = goal_s if left_s <= most_s + NOTHING_S else done_s + most_s
            running, begun = max(at, begun - 1), max(at + 1, bisect_left(until_s, done_s, at, following))
            self._note(max(memory[running:begun]))
            queues.compute(left_s)
        while min(queues.ends_s) <= queues.now_s + NOTHING_S:  # what ends with compute has ended
            queues.pass_on()
        if begun < following:
            self._note(max(memory[begun:following]))

    def _move(self, queue: int, channel: int, work: float, name: str, then: Callable[[], object]) -> Job:
        """Queue a transfer on a channel, or what a codec does."""

        def end() -> None:
            if self._timeline is not None and job.began_s is not None:
                moved = self._timeline.channels[_QUEUES[queue]]
                moved.append(Interval(job.began_s, self._queues.now_s, name))
            then()

        ready_s = self._queues.now_s + self._latency_s * (queue < _UNITS)
        job = Job(work / self._rates[channel], end, ready_s=ready_s)
        self._queues.add(queue, job)
        return job

    def _handle(self) -> None:
        left_s = self._s_per_move
        while left_s:
            left_s = self._queues.compute(left_s)

    def _move_units(self, traffic: Traffic) -> None:
        for channel, nbytes in ((_WRITE, traffic.nbytes_written), (_READ, traffic.nbytes_read)):
            if nbytes and self._rates[channel] > 0:
                self._move(_UNITS + channel, channel, nbytes, "units", lambda: None)

    def _note(self, nbytes: int) -> None:
        """Note that the device would hold ``nbytes`` if nothing were away."""
        there = nbytes - self.slots.away_nbytes
        self._peak_nbytes = max(self._peak_nbytes, there)
        if self._timeline is not None and there != self._timeline.memory[-1].nbytes:
            self._timeline.memory.append(Sample(self._queues.now_s, there))
