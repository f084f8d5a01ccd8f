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
for each of their bytes, but never stands still: the operating system gives it a share of the cores.

[Note: reads beside writes]
When an NVMe drive reads and writes at once, both together move ``mixed_bytes_per_s``, half each as far as
they can. A byte that is written therefore costs the reads of the same time what they lose while it moves.

[Note: units go first]
Bytes of units go before bytes of activations. In a real step both go in the order of submission, and compute
waits for a late unit. Here it does not, since the measured step has waited for units already: activations
bear the whole delay. Units slow compute no more than when it was measured.
"""

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from infinity.core.errors import RecipeError
from infinity.core.lifecycle import SlotState
from infinity.core.plan import ActivationPlan, Hardware, Outcome, Place, Profile, StoreWait, Traffic
from infinity.planner.lifetimes import InactivePeriod, Lifetimes, lifetimes_of


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
NEVER_S = float("inf")
#: Transfers that begin in less than this begin now, or rounding would make them wait again and again (s).
_NOW_S = 1e-12
#: As indices: looking a member of an enum up costs more than the arithmetic around it.
_WRITE, _READ, _ENCODE = int(Channel.NVME_WRITE), int(Channel.NVME_READ), int(Channel.ENCODE)


def mixed_rates(hardware: Hardware) -> tuple[float, float]:
    """Return bytes per second of reads and writes while both are busy; see [Note: reads beside writes]."""
    half = hardware.mixed_bytes_per_s / 2
    write = min(hardware.write_bytes_per_s, half)
    read = min(hardware.read_bytes_per_s, hardware.mixed_bytes_per_s - write)
    return read, min(hardware.write_bytes_per_s, hardware.mixed_bytes_per_s - read)


def delay_s_per_byte(hardware: Hardware) -> float:
    """Return seconds by which each moved byte delays compute, bounded so that compute never stops."""
    most = max(sum(mixed_rates(hardware)), hardware.read_bytes_per_s, hardware.write_bytes_per_s)
    most += 2 * hardware.host_bytes_per_s if hardware.host_nbytes else 0.0
    return min(hardware.compute_s_per_byte, (1 - LEAST_SPEED) / most if most else 0.0)


@dataclass(slots=True)
class _Transfer:
    """Describes bytes on their way."""

    what: Any  # the index of a slot, or the call that follows; None: units
    left_nbytes: float
    ready_s: float  # when the first byte may move
    began_s: float | None = None  # when it did


class TransferQueues:
    """Queues the transfers of each channel, and lets time pass in :meth:`advance`; see [Note: rates]."""

    def __init__(self, hardware: Hardware) -> None:
        self.now_s = 0.0
        self.rates = channel_rates(hardware)
        self._coding_delay = hardware.coding_delay
        self._mixed = mixed_rates(hardware)
        self._latency_s, self._delay_s_per_byte = hardware.latency_s, delay_s_per_byte(hardware)
        self.queues: tuple[deque[_Transfer], ...] = tuple(deque() for _ in Channel)
        self._moving: list[tuple[int, _Transfer, float]] | None = None  # with its rate; None: has changed
        self._next_s = self._speed = 0.0

    def submit(self, channel: Channel, what: object, nbytes: int) -> None:
        """Queue a transfer, which :meth:`advance` returns as ``what`` when it ends."""
        self.queues[channel].append(_Transfer(what, float(nbytes), self.now_s + self._latency_s))
        self._moving = None

    def submit_units(self, traffic: Traffic) -> None:
        """Queue the transfers of units before others; see [Note: units go first]."""
        for channel, nbytes in ((_WRITE, traffic.nbytes_written), (_READ, traffic.nbytes_read)):
            queue = self.queues[channel]
            if nbytes and not (queue and queue[0].what is None):
                queue.appendleft(_Transfer(None, 0.0, self.now_s))
            if nbytes:
                queue[0].left_nbytes += nbytes
        self._moving = None

    def cancel(self, channel: Channel, what: object) -> bool:
        """Cancel a transfer that waits for another one; False: it is first but for units, so on its way."""
        queue = self.queues[channel]
        for at, transfer in enumerate(queue):
            if transfer.what == what and at > (queue[0].what is None):
                del queue[at]
                return True
        return False

    def speed(self) -> float:
        """Return the speed of compute beside what moves now, at most 1."""
        if self._moving is None:
            self._settle()
        return self._speed

    def next_s(self) -> float:
        """Return the seconds until a transfer ends or rates change; infinite if nothing moves."""
        if self._moving is None:
            self._settle()
        return self._next_s

    def moving(self) -> list[tuple[int, _Transfer, float]]:
        """Return the transfers that move now, with channel and bytes per second."""
        return self._settle() if self._moving is None else self._moving

    def advance(self, passed_s: float) -> list[tuple[int, Any, float]]:
        """Let time pass, at most :meth:`next_s`; return channel, what and beginning (s) of what ended."""
        moving = self.moving()
        ended: list[tuple[int, Any, float]] = []
        self.now_s += passed_s
        if passed_s >= self._next_s:
            self._moving = None
        self._next_s -= passed_s
        for channel, transfer, rate in moving:
            transfer.left_nbytes -= rate * passed_s
            # Less than half a byte is nothing, or rounding would leave crumbs that never end.
            if transfer.left_nbytes <= 0.5:
                transfer.left_nbytes, self._moving = 0.0, None
                assert transfer.began_s is not None
                ended.append((channel, transfer.what, transfer.began_s))
                self.queues[channel].popleft()
        return ended

    def _settle(self) -> list[tuple[int, _Transfer, float]]:
        """Return what moves now at which rate; set the speed of compute, and the time until that changes."""
        moving: list[tuple[int, _Transfer, float]] = []
        next_s, beside, coding, rates = NEVER_S, 0.0, 0, self.rates
        for channel, queue in enumerate(self.queues):
            if queue:
                first = queue[0]
                wait_s = first.ready_s - self.now_s
                if wait_s <= _NOW_S:
                    moving.append((channel, first, rates[channel]))
                elif wait_s < next_s:
                    next_s = wait_s
        if len(moving) > 1 and moving[1][0] == _READ:  # beside writes
            read, write = self._mixed
            moving[:2] = [(_WRITE, moving[0][1], write), (_READ, moving[1][1], read)]
        moving = [each for each in moving if each[2] > 0]
        for channel, transfer, rate in moving:
            if transfer.began_s is None:
                transfer.began_s = self.now_s
            left_s = transfer.left_nbytes / rate
            if left_s < next_s:
                next_s = left_s
            if channel >= _ENCODE:
                coding += 1
            elif transfer.what is not None:
                beside += rate
        self._moving, self._next_s = moving, next_s
        self._speed = max(LEAST_SPEED, 1 - self._delay_s_per_byte * beside - self._coding_delay * coding)
        return moving


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
    lifetimes = lifetimes_of(profile, plan.recomputed)
    named = {*plan.places, *(key for load in plan.loads for key in (load.slot, load.after or load.slot))}
    named.update(key for wait in plan.waits for key in (wait.at, wait.slot))
    periods = {key: lifetimes.periods[at] for key, at in lifetimes.index.items()}
    uncoded = (
        key for key, p in plan.places.items() if key in periods and p.is_coded and not periods[key].coded
    )
    lacking = [f"slot {k.region}.{k.ordinal}" for k in sorted(named - lifetimes.index.keys())]
    lacking += [f"the codec of slot {k.region}.{k.ordinal}" for k in uncoded]
    lacking += [f"block {region}" for region in sorted(plan.recomputed - {b.region for b in profile.blocks})]
    if lacking:
        raise RecipeError(
            f"the plan ({plan.policy}) names {', '.join(lacking[:5])}, which this profile lacks: "
            "it was made for another one; plan again"
        )
    return Simulator(lifetimes, plan, hardware, timeline).run()


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

    @property
    def host_nbytes(self) -> int:
        return self.period.nbytes if self.place is Place.HOST else 0

    @property
    def rounds(self) -> bool:
        """Return whether backward reads only what comes back."""
        return self.place.is_coded and self.period.coded is not None and not self.period.coded.exact


class _Slots:
    """Moves the slots that a plan stores as the tensor cache would; by index of their inactive period."""

    def __init__(self, lifetimes: Lifetimes, plan: ActivationPlan, queues: TransferQueues) -> None:
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
        self._queues = queues
        # Within a capacity no store may hold what backward has released.
        late = set() if plan.capacity_nbytes is None else {SlotState.STORING}
        self._unreadable = {SlotState.LOADING} | late
        self.backlog, self.host = _Gauge(), _Gauge()  # bytes whose store has not ended; in host memory
        self.away_nbytes = 0  # device memory that slots do not take
        self.moved_nbytes = Counter[int]()  # by each channel

    def pack(self, index: int) -> None:
        slot = self.all[index]
        slot.state = SlotState.STORING
        self.backlog.add(slot.period.nbytes)
        self.host.add(slot.host_nbytes)
        self._submit(STORE[slot.place][0], index)

    def has_stored(self, index: int) -> bool:
        """Return whether no store of the slot, or of one packed before it, is still to end."""
        last = self.all[index].period.key
        return all(s.state is not SlotState.STORING for s in self.all.values() if s.period.key <= last)

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

    def release(self, index: int) -> None:
        """Give back the slot's host memory or code, now or when its store ends; backward is done with it."""
        slot = self.all[index]
        if slot.state is SlotState.STORING:
            slot.is_released = True
        else:
            self.host.add(-slot.host_nbytes)
            self.away_nbytes += slot.period.beside(slot.place)

    def end(self, channel: int, index: int, at: int) -> None:
        slot = self.all[index]
        stages = (LOAD if channel in LOAD[slot.place] else STORE)[slot.place]
        self.moved_nbytes[channel] += load_of(slot.period, Channel(channel), slot.place)
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
        if slot.period.begin <= at:
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
        elif slot.state is SlotState.STORED:
            slot.state = SlotState.RESIDENT
        elif slot.state is SlotState.STORING:
            slot.is_wanted = True
            if not slot.rounds and self._queues.cancel(STORE[slot.place][0], index):
                slot.state = SlotState.RESIDENT
                self.backlog.add(-slot.period.nbytes)
                self.host.add(-slot.host_nbytes)
                slot.place = Place.KEEP

    def _submit(self, channel: Channel, index: int) -> None:
        slot = self.all[index]
        self._queues.submit(channel, index, load_of(slot.period, channel, slot.place))

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
        self._queues = TransferQueues(hardware)
        self.slots = _Slots(lifetimes, plan, self._queues)
        self._agenda = self._actions(plan.waits)
        self._at, self._stall_s = 0, 0.0
        self._peak_nbytes = 0
        for place in {slot.place for slot in self.slots.all.values()}:
            for channel in (*STORE[place], *LOAD[place]):
                if not self._queues.rates[channel] > 0:
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
            self._at = at
            for do in self._agenda.get(at, ()):
                do()
            if at in lifetimes.traffic:
                queues.submit_units(lifetimes.traffic[at])
            if at in begun:
                again_s.append(Interval(queues.now_s, queues.now_s, begun[at].block.name))
            self._compute(at, following)
            if following in ends:
                again_s[-1] = again_s[-1]._replace(end_s=queues.now_s)
        step_s = queues.now_s
        self._note(0)
        while queues.next_s() < NEVER_S:
            self._pass(queues.next_s())
            self._note(0)
        if self._timeline is not None:
            self._timeline.recomputed = again_s
        return Outcome(
            step_s=step_s,
            stall_s=self._stall_s,
            recompute_s=sum(again.end_s - again.begin_s for again in again_s),
            peak_nbytes=self._peak_nbytes,
            host_peak_nbytes=slots.host.peak_nbytes,
            nbytes_stored=slots.moved_nbytes[_WRITE],
            nbytes_loaded=slots.moved_nbytes[_READ],
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
            if slot.place in (Place.HOST, Place.CODED):
                at = max(slot.period.packed_at, slot.period.released_at) + 1
                found[at].append(partial(slots.release, index))
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
        self._wait(self._name(index), lambda: self.slots.is_resident(index))

    def _wait(self, cause: str, until: Callable[[], bool]) -> None:
        """Let time pass before a position, while memory is no more than its neighbours take."""
        queues, memory, at = self._queues, self._memory, self._at
        between = min(memory[at - 1], memory[at]) if 0 < at < len(memory) else 0
        began_s = queues.now_s
        while not until():
            self._note(between)
            assert queues.next_s() < NEVER_S, "compute waits, and nothing moves"
            self._pass(queues.next_s())
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
            speed, next_s = queues.speed(), queues.next_s()
            left_s = (goal_s - done_s) / speed
            done_s = goal_s if left_s <= next_s else done_s + next_s * speed
            running, begun = max(at, begun - 1), max(at + 1, bisect_left(until_s, done_s, at, following))
            self._note(max(memory[running:begun]))
            self._pass(min(left_s, next_s))
        if begun < following:
            self._note(max(memory[begun:following]))

    def _pass(self, passed_s: float) -> None:
        for channel, index, began_s in self._queues.advance(passed_s):
            if self._timeline is not None:
                name = "units" if index is None else self._name(index)
                moved = self._timeline.channels[Channel(channel).label]
                moved.append(Interval(began_s, self._queues.now_s, name))
            if index is not None:
                self.slots.end(channel, index, self._at)

    def _note(self, nbytes: int) -> None:
        """Note that the device would hold ``nbytes`` if nothing were away."""
        there = nbytes - self.slots.away_nbytes
        self._peak_nbytes = max(self._peak_nbytes, there)
        if self._timeline is not None and there != self._timeline.memory[-1].nbytes:
            self._timeline.memory.append(Sample(self._queues.now_s, there))

    def _name(self, index: int) -> str:
        key = self._lifetimes.periods[index].key
        return f"{key.region}.{key.ordinal}"
