"""Simulate a step under a plan: predict its time, stalls, peaks and bytes, and when each of them happens.

[Note: a simulated step]
Compute runs the positions of a step in order; between them the tensor cache packs, stores, loads and
releases. Where memory is short, only two things hold compute back: packing waits while more than the plan's
backlog waits to be stored, and packing and asking wait for the stores that the plan says. When backward asks
for a storage, the loads tied to it start, and its own if that has not; then compute waits for it. Stores that
are left at the end do not count.

[Note: where bytes are]
A slot has the states of the tensor cache (:class:`infinity.core.lifecycle.SlotState`). Its memory is free
when its store has ended and forward is done with it, and is taken again as soon as its load is asked for. A
slot that is asked for before it has left stays, and its store is cancelled if it waits for others (here all
but the first wait; the cache has a few in flight). Storing what other code holds frees nothing. Host memory
is taken when a slot is packed, and given back when backward is done with it, or its store is cancelled.

[Note: stops]
The simulator stops only at positions where something is to be done; in between compute runs as far as
transfers allow, and the fullest position counts, with what was away before. With a timeline it stops at every
position, which changes nothing else.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from infinity.core.errors import RecipeError
from infinity.core.lifecycle import SlotState
from infinity.core.plan import ActivationPlan, Hardware, Outcome, Place, Profile, StoreWait
from infinity.planner.events import LOAD, NEVER_S, STORE, Channel, TransferQueues
from infinity.planner.lifetimes import InactivePeriod, Lifetimes, lifetimes_of


class Interval(NamedTuple):
    """Names what took from ``begin_s`` to ``end_s`` of the step."""

    begin_s: float
    end_s: float
    name: str


class Sample(NamedTuple):
    """Records that from ``at_s`` on ``nbytes`` are in device memory."""

    at_s: float
    nbytes: int


@dataclass(slots=True)
class StepTimeline:
    """Records what happens in a simulated micro-batch with its update, for pictures.

    Attributes:
        memory: Bytes of the step's own storages on the device; a step function.
        channels: Transfers of each channel that moved something, in order.
    """

    memory: list[Sample] = field(default_factory=lambda: [Sample(0.0, 0)])
    channels: dict[str, list[Interval]] = field(default_factory=dict)
    stalls: list[Interval] = field(default_factory=list)
    recomputed: list[Interval] = field(default_factory=list)
    backward_s: float = 0.0


def play(
    profile: Profile, plan: ActivationPlan, hardware: Hardware, timeline: StepTimeline | None = None
) -> Outcome:
    """Predict what one micro-batch with its update costs under ``plan``; fill ``timeline``.

    Raises:
        RecipeError: The plan was made for another profile, or needs a channel that ``hardware`` lacks.
    """
    lifetimes = lifetimes_of(profile, plan.recomputed)
    others = [
        *((load.after, load.slot) for load in plan.loads),
        *((wait.at, wait.slot) for wait in plan.waits),
    ]
    named = {*plan.places, *(key for pair in others for key in pair if key is not None)}
    lacking = [f"slot {k.region}.{k.ordinal}" for k in sorted(named - lifetimes.index.keys())]
    lacking += [f"block {region}" for region in sorted(plan.recomputed - {b.region for b in profile.blocks})]
    if lacking:
        raise RecipeError(
            f"the plan ({plan.policy}) names {', '.join(lacking[:5])}, which this profile lacks: "
            "it was made for another one; plan again"
        )
    return Simulator(lifetimes, plan, hardware, timeline).run()


def play_in_detail(
    profile: Profile, plan: ActivationPlan, hardware: Hardware
) -> tuple[Outcome, StepTimeline]:
    """Predict the same as :func:`play`, with a timeline; raises the same errors."""
    timeline = StepTimeline()
    outcome = play(profile, plan, hardware, timeline)
    labels = [channel.label for channel in Channel]
    timeline.channels = {name: timeline.channels[name] for name in labels if name in timeline.channels}
    return outcome, timeline


# --- the tensor cache --------------------------------------------------------------------------------


class _Gauge:
    def __init__(self) -> None:
        self.nbytes = self.peak_nbytes = 0

    def add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)


@dataclass(slots=True)
class _Slot:
    """Tracks a storage that a plan stores; see [Note: where bytes are].

    Attributes:
        is_away: The bytes are not in memory: the slot is STORED, and forward is done with it.
        is_wanted: Backward has asked for it; a store that ends now frees nothing.
        is_released: Backward is done with it before its store has ended.
    """

    period: InactivePeriod
    place: Place
    state: SlotState = SlotState.RESIDENT
    is_away: bool = False
    is_wanted: bool = False
    is_released: bool = False

    def nbytes_at(self, place: Place) -> int:
        return self.period.nbytes if self.place is place else 0


class _Slots:
    """Moves the slots that a plan stores as the tensor cache would; by index of their inactive period.

    Attributes:
        loads: Slots to load, by the slot whose asking starts the loads; None: the beginning of backward.
        away_nbytes: Device memory that slots do not take.
        backlog: Bytes whose store has not ended.
        nbytes_stored, nbytes_loaded: Written to NVMe, and read from there.
    """

    def __init__(self, lifetimes: Lifetimes, plan: ActivationPlan, queues: TransferQueues) -> None:
        index = lifetimes.index
        self.all = {
            index[key]: _Slot(lifetimes.periods[index[key]], place)
            for key, place in plan.places.items()
            if place is not Place.KEEP
        }
        self.loads: defaultdict[int | None, list[int]] = defaultdict(list)
        for load in plan.loads:
            self.loads[None if load.after is None else index[load.after]].append(index[load.slot])
        self._queues = queues
        # Within a capacity no store may hold what backward has released.
        late = set() if plan.capacity_nbytes is None else {SlotState.STORING}
        self._unreadable = {SlotState.LOADING} | late
        self.backlog, self.host = _Gauge(), _Gauge()
        self.away_nbytes = self.nbytes_stored = self.nbytes_loaded = 0

    def pack(self, index: int) -> None:
        slot = self.all[index]
        slot.state = SlotState.STORING
        self.backlog.add(slot.period.nbytes)
        self.host.add(slot.nbytes_at(Place.HOST))
        self._queues.submit(STORE[slot.place], index, slot.period.nbytes)

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
        return index not in self.all or self.all[index].state not in self._unreadable

    def release(self, index: int) -> None:
        """Give back the slot's host memory, now or when its store ends; backward is done with it."""
        slot = self.all[index]
        if slot.state is SlotState.STORING:
            slot.is_released = True
        else:
            self.host.add(-slot.nbytes_at(Place.HOST))

    def end(self, channel: int, index: int, at: int) -> None:
        slot = self.all[index]
        if channel == LOAD[slot.place]:
            slot.state = SlotState.RESIDENT
            self.nbytes_loaded += slot.nbytes_at(Place.NVME)
            return
        self.backlog.add(-slot.period.nbytes)
        self.nbytes_stored += slot.nbytes_at(Place.NVME)
        if slot.is_released:
            self.host.add(-slot.nbytes_at(Place.HOST))
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
            self._queues.submit(LOAD[slot.place], index, slot.period.nbytes)
        elif slot.state is SlotState.STORED:
            slot.state = SlotState.RESIDENT
        elif slot.state is SlotState.STORING:
            slot.is_wanted = True
            if self._queues.cancel(STORE[slot.place], index):
                slot.state = SlotState.RESIDENT
                self.backlog.add(-slot.period.nbytes)
                self.host.add(-slot.nbytes_at(Place.HOST))
                slot.place = Place.KEEP

    def _leave(self, slot: _Slot) -> None:
        slot.is_away = True
        self.away_nbytes += slot.period.nbytes


# --- compute -----------------------------------------------------------------------------------------


class Simulator:
    """Runs one step under a plan, once; see [Note: a simulated step] and [Note: stops].

    Args:
        lifetimes: In the step that recomputes the plan's blocks; has all slots that the plan names.

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
        self._backlog_nbytes = NEVER_S if plan.backlog_nbytes is None else plan.backlog_nbytes
        self._memory: list[int] = lifetimes.memory.tolist()
        self._queues = TransferQueues(hardware)
        self.slots = _Slots(lifetimes, plan, self._queues)
        self._agenda = self._actions(plan.waits)
        self._at, self._stall_s = 0, 0.0
        self._peak_nbytes = 0
        for place in {slot.place for slot in self.slots.all.values()}:
            for channel in (STORE[place], LOAD[place]):
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
            nbytes_stored=slots.nbytes_stored,
            nbytes_loaded=slots.nbytes_loaded,
        )

    # --- between positions -------------------------------------------------------------------

    def _actions(self, waits: Iterable[StoreWait]) -> dict[int, list[Callable[[], None]]]:
        """Return what to do before each position: pack, leave, release, wait, begin backward, ask."""
        lifetimes, slots = self._lifetimes, self.slots
        found: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)
        packed = sorted(slots.all.items(), key=lambda item: item[1].period.key)
        for index, slot in packed:
            found[slot.period.packed_at + 1].append(partial(self._pack, index))
        for index, slot in packed:
            found[slot.period.begin].append(partial(slots.end_forward_use, index))
        for index, slot in packed:
            if slot.place is Place.HOST:
                at = max(slot.period.packed_at, slot.period.released_at) + 1
                found[at].append(partial(slots.release, index))
        for wait in waits:
            period, last = lifetimes.periods[lifetimes.index[wait.at]], lifetimes.index[wait.slot]
            at = period.end if wait.backward else period.packed_at + 1
            found[at].append(partial(self._wait, "stores", partial(slots.has_stored, last)))
        found[lifetimes.backward].append(self._begin_backward)
        for index in sorted({after for after in slots.loads if after is not None} | slots.all.keys()):
            found[lifetimes.periods[index].end].append(partial(self._ask, index))
        return found

    def _pack(self, index: int) -> None:
        self.slots.pack(index)
        self._wait("stores", lambda: self.slots.backlog.nbytes <= self._backlog_nbytes)

    def _begin_backward(self) -> None:
        if self._timeline is not None:
            self._timeline.backward_s = self._queues.now_s
        self.slots.start_loads(None)

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
                moved = self._timeline.channels.setdefault(Channel(channel).label, [])
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
