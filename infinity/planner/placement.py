"""Choose the saved storages that leave device memory within a budget, and when each of them returns.

Storages leave where memory is above the budget, the fullest position first. Of those that help there the one
with the longest inactive period goes, to the place from which all that goes there would be back the soonest.
How that compares with storing whatever can leave, and with recomputing blocks, the simulator tells
(:mod:`infinity.planner.search`).

Source: TeraIO (arXiv:2506.06472), section 3.3, for inactive periods and timelines of channels; not for its
order, a benefit by cost that is valued anew with each choice.

[Note: bytes by operator]
A timeline holds, for each position, the bytes that fit into its time and are not yet booked. So a transfer
may use several gaps, and two transfers may share one.

[Note: backlog]
A plan that would need more than its budget, because stores end later than they should, gets a bound on the
bytes that wait to be stored.

[Note: late stores]
A budget is kept however late stores end, not only as predicted. Memory grows between two calls of the tensor
cache, the packing of a slot and backward's first request for one; so each of them waits for the slots with
which memory might not hold until the next: the first that were packed, since stores begin in that order. On
a drive as fast as measured most of them have gone before.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from infinity.core.plan import (
    ActivationPlan,
    Hardware,
    Load,
    Outcome,
    Place,
    Profile,
    SlotKey,
    StoreWait,
    Traffic,
)
from infinity.planner.channels import LOAD, Channel, mixed_rates
from infinity.planner.lifetimes import Lifetimes, Places, least_memory, lifetimes_of
from infinity.planner.simulator import Simulator

#: Backlogs that are tried: one that is safe, then by halves up to none.
TRIES = 7


# --- the bytes that channels can still carry -----------------------------------------------------------


class ChannelTimeline:
    """Bytes that one channel can still carry while each operator runs; see [Note: bytes by operator].

    Attributes:
        latency_nbytes: Bytes of the timeline that a transfer takes beyond its own.
    """

    def __init__(self, times: np.ndarray, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self.latency_nbytes = int(latency_s * bytes_per_s)
        self._free = (times * bytes_per_s).astype(np.int64)
        self._beside: tuple[ChannelTimeline, float] | None = None

    def share(self, beside: "ChannelTimeline", tax: float) -> None:
        """Let each byte booked here take ``tax`` bytes of ``beside``."""
        self._beside = beside, tax

    def until(self) -> np.ndarray:
        """Free bytes before each operator, and of the whole step, ``(operators + 1,)``."""
        return np.concatenate(([0], np.cumsum(self._free)))

    def earliest_end(self, begin: int, nbytes: int) -> int:
        """The first operator that finds ``nbytes`` moved if they start with ``begin``; or beyond the end."""
        until = self.until()
        return max(begin, int(np.searchsorted(until, until[begin] + nbytes + self.latency_nbytes)))

    def book_from(self, begin: int, nbytes: int) -> None:
        """Book ``nbytes`` as early as possible from operator ``begin`` on.

        Bytes without room at the end of the step go on at its beginning, as those of the step before do; what
        finds no room in a whole step is dropped.
        """
        order = (begin + np.arange(len(self._free))) % max(1, len(self._free))
        free = self._free[order]
        taken = np.clip(nbytes + self.latency_nbytes - (np.cumsum(free) - free), 0, free)
        self._free[order] -= taken
        if self._beside is not None:
            beside, tax = self._beside
            beside._free[order] = np.maximum(beside._free[order] - (taken * tax).astype(np.int64), 0)


def channel_timelines(
    times: np.ndarray, hardware: Hardware, traffic: Iterable[Traffic] = ()
) -> dict[Channel, ChannelTimeline]:
    """Timelines of a step whose operators take ``times`` (s), with the ``traffic`` of units booked."""
    read, write, host = hardware.read_bytes_per_s, hardware.write_bytes_per_s, hardware.host_bytes_per_s
    made = {
        channel: ChannelTimeline(times, rate, hardware.latency_s)
        for channel, rate in zip(Channel, (write, read, host, host))
    }
    writes, reads = made[Channel.NVME_WRITE], made[Channel.NVME_READ]
    mixed_read, mixed_write = mixed_rates(hardware)
    writes.share(reads, (read - mixed_read) / mixed_write if mixed_write else 0.0)
    reads.share(writes, (write - mixed_write) / mixed_read if mixed_read else 0.0)
    for unit in traffic:
        if unit.nbytes_read:
            reads.book_from(unit.at, unit.nbytes_read)
        if unit.nbytes_written:
            writes.book_from(unit.at, unit.nbytes_written)
    return made


# --- storages that leave -------------------------------------------------------------------------------


def places_within(lifetimes: Lifetimes, hardware: Hardware, capacity_nbytes: int) -> dict[int, Place]:
    """Let storages leave, fullest position first, until memory fits or nothing can leave any more."""
    chosen: dict[int, Place] = {}
    periods = lifetimes.periods
    read, write, host = hardware.read_bytes_per_s, hardware.write_bytes_per_s, hardware.host_bytes_per_s
    there_and_back = {
        Place.NVME: read > 0 and write > 0 and 1 / read + 1 / write,
        Place.HOST: host > 0 and 2 / host,
    }
    s_per_byte = {place: cost for place, cost in there_and_back.items() if cost}
    most = {Place.NVME: math.inf, Place.HOST: hardware.host_nbytes}
    given = Counter[Place]()

    def soonest(nbytes: int) -> Place | None:
        """The place from which ``nbytes`` more would be back the soonest; None: no place has room."""
        possible = (place for place in s_per_byte if given[place] + nbytes <= most[place])
        return min(possible, key=lambda place: (given[place] + nbytes) * s_per_byte[place], default=None)

    # The longest gap first: it helps the most positions for the same bytes.
    waiting = [i for i, period in enumerate(periods) if period.is_worth_storing]
    waiting.sort(key=lambda i: (periods[i].begin - periods[i].end, i))
    gaps = np.array([(periods[i].begin, periods[i].end) for i in waiting], dtype=np.int64).reshape(-1, 2)
    begins, ends = gaps[:, 0].copy(), gaps[:, 1].copy()
    over = lifetimes.memory - capacity_nbytes
    # In how many of the gaps each position is.
    change = (np.bincount(at, minlength=len(over) + 1) for at in (begins, ends))
    helped = np.cumsum(np.subtract(*change)[: len(over)])
    over[helped == 0] = 0
    while len(over) and over[at := int(over.argmax())] > 0:
        for number in np.flatnonzero((begins <= at) & (at < ends)).tolist():
            period = periods[waiting[number]]
            if (place := soonest(period.nbytes)) is not None:
                chosen[waiting[number]] = place
                given[place] += period.nbytes
                over[period.begin : period.end] -= period.nbytes
                over[period.end : period.released_at + 1] += lifetimes.padding_nbytes
                helped[period.begin : period.end] -= 1
                begins[number] = ends[number] = 0  # it is gone
                break
        else:
            over[at] = 0  # nothing helps here
        if not helped[at]:
            over[helped == 0] = 0
    return chosen


# --- loads and backlog -------------------------------------------------------------------------------


def with_loads(
    lifetimes: Lifetimes,
    places: Places,
    hardware: Hardware,
    capacity_nbytes: int | None,
    policy: str = "plan",
) -> ActivationPlan:
    """Make the plan that stores ``places`` and loads them as late as channels and memory allow.

    Each load starts when backward asks for something, in the order of need. With a capacity, memory stays
    within it if :func:`least_memory` does: the storage needed first has the first right to room, and a load
    without room starts later, at worst when it is needed. The plan has no budget yet.
    """
    periods = lifetimes.periods
    triggers: dict[int, SlotKey | None] = {p.end: p.key for p in reversed(periods) if p.is_named}
    triggers[lifetimes.backward] = None
    asks = sorted(triggers)
    desired = _desired(lifetimes, places, hardware)
    memory = least_memory(lifetimes, places)
    loads = []
    earliest = lifetimes.backward
    for index in sorted(places):
        period = periods[index]
        start, loaded_nbytes = period.end, period.nbytes + lifetimes.padding_nbytes
        wanted = asks[max(0, bisect_left(asks, desired[index] + 1) - 1)]
        wanted = max(wanted, earliest, min(period.begin, start))
        if capacity_nbytes is not None and wanted < start:
            full = np.flatnonzero(memory[wanted:start] + loaded_nbytes > capacity_nbytes)
            wanted += int(full[-1]) + 1 if len(full) else 0
        earliest = start = min(start, asks[bisect_left(asks, wanted)])
        memory[start : period.end] += loaded_nbytes
        loads.append(Load(triggers[start], period.key))
    placed = {periods[index].key: places[index] for index in sorted(places)}
    recomputed = frozenset(again.block.region for again in lifetimes.recomputations)
    return ActivationPlan(policy, placed, tuple(loads), recomputed)


def _desired(lifetimes: Lifetimes, places: Places, hardware: Hardware) -> dict[int, int]:
    """The latest positions from which the loads need not be waited for, in the order of need."""
    timelines = channel_timelines(lifetimes.times, hardware, lifetimes.traffic.values())
    until = {place: timelines[channel].until() for place, channel in LOAD.items()}
    left = {place: int(free[-1]) for place, free in until.items()}  # before the loads that are needed later
    found: dict[int, int] = {}
    before = len(lifetimes.times)
    for index in sorted(places, reverse=True):
        period, place = lifetimes.periods[index], places[index]
        room = min(left[place], int(until[place][period.end])) - period.nbytes
        room -= timelines[LOAD[place]].latency_nbytes
        left[place] = max(0, room)
        start = int(np.searchsorted(until[place], room, "right")) - 1
        found[index] = before = max(lifetimes.backward, min(before, start, period.end))
    return found


def within(
    lifetimes: Lifetimes, plan: ActivationPlan, hardware: Hardware, capacity_nbytes: int,
    limit_s: float = float("inf"),
) -> tuple[ActivationPlan, Outcome] | None:  # fmt: skip
    """Bound the plan's backlog if it needs that to keep the capacity; see [Note: backlog].

    None if no backlog helps, or a step takes ``limit_s`` or more.
    """
    simulator = Simulator(lifetimes, plan, hardware)
    outcome = simulator.run()
    if outcome.step_s >= limit_s:
        return None
    if outcome.peak_nbytes <= capacity_nbytes:
        return plan, outcome
    # Beside these bytes there is never more than the backlog, however late stores end.
    low = capacity_nbytes - int(_least_under(lifetimes, plan).max(initial=0))
    high = simulator.most_backlog_nbytes
    found, tried_nbytes = None, low
    for _ in range(TRIES if low >= 0 else 0):
        bounded = replace(plan, backlog_nbytes=tried_nbytes)
        outcome = Simulator(lifetimes, bounded, hardware).run()
        if outcome.peak_nbytes > capacity_nbytes:
            high = tried_nbytes
        else:
            low = tried_nbytes
            if outcome.step_s < limit_s:
                found, limit_s = (bounded, outcome), outcome.step_s
        tried_nbytes = (low + high) // 2
    return found


def bounded(profile: Profile, plan: ActivationPlan, hardware: Hardware) -> ActivationPlan:
    """Make a plan keep its capacity on a drive slower than measured, too; see [Note: late stores].

    Without a capacity twice the bytes that wait for the measured drive may wait to be stored.
    """
    lifetimes = lifetimes_of(profile, plan.recomputed)
    if plan.capacity_nbytes is not None:
        return replace(plan, waits=tuple(_waits(lifetimes, plan, plan.capacity_nbytes)))
    simulator = Simulator(lifetimes, plan, hardware)
    simulator.run()
    return replace(plan, backlog_nbytes=2 * simulator.most_backlog_nbytes)


def _load_positions(lifetimes: Lifetimes, plan: ActivationPlan) -> dict[int, int]:
    """The position before which each load starts, by index of the inactive period."""
    asked = {None: lifetimes.backward} | {period.key: period.end for period in lifetimes.periods}
    return {lifetimes.index[load.slot]: asked[load.after] for load in plan.loads}


def _least_under(lifetimes: Lifetimes, plan: ActivationPlan) -> np.ndarray:
    """Bytes by position if every store took no time and loads start as planned."""
    placed = [lifetimes.index[key] for key in plan.places]
    return least_memory(lifetimes, placed, _load_positions(lifetimes, plan))


def _waits(lifetimes: Lifetimes, plan: ActivationPlan, capacity_nbytes: int) -> Iterator[StoreWait]:
    """The waits with which memory stays within the capacity whenever stores end."""
    # Positions before which the tensor cache is called, and by what: the last of those packed together, and
    # the first of those asked for together.
    calls: dict[int, tuple[bool, SlotKey]] = {}
    named = [period for period in lifetimes.periods if period.is_named]
    for period in sorted(named, key=lambda period: period.key):
        if period.packed_at < lifetimes.backward:
            calls[period.packed_at + 1] = False, period.key
    calls |= {period.end: (True, period.key) for period in reversed(named)}
    # Stored slots in the order of packing; from its load on ``memory`` has a slot's bytes.
    memory, starts = _least_under(lifetimes, plan), _load_positions(lifetimes, plan)
    stored = [lifetimes.index[key] for key in sorted(plan.places)]
    periods = [lifetimes.periods[index] for index in stored]
    nbytes, packed, begin, load = np.array(
        [
            (period.nbytes, period.packed_at, period.begin, starts.get(index, period.end))
            for index, period in zip(stored, periods)
        ],
        dtype=np.int64,
    ).reshape(-1, 4).T  # fmt: skip
    first = 0  # of the slots that need not have gone yet
    for at, until in pairwise([*sorted(calls), len(memory)] if stored else ()):
        late = first + np.flatnonzero((packed[first:] < at) & (begin[first:] < until) & (load[first:] > at))
        late, positions = late[::-1], np.arange(at, until)[:, None]  # the newest first
        held = np.where((begin[late] <= positions) & (positions < load[late]), nbytes[late], 0).cumsum(1)
        too_many = (held + memory[at:until, None] > capacity_nbytes).any(0)
        if too_many.any():
            first = int(late[too_many.argmax()]) + 1
            yield StoreWait(calls[at][1], calls[at][0], periods[first - 1].key)
