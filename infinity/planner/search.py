"""Search for the fastest plan within a budget.

For a budget and a set of recomputed blocks, storages leave where memory is above the budget, fullest position
first. Of those that help there, the one with the longest inactive period goes, to the place from which all
that goes there would be back the soonest. The simulator predicts the cost of that, and of storing whatever
can leave. Blocks are recomputed in a fixed order; their number is searched from the one with the least bound.

[Note: a bound]
What memory has no room for at a moment has left before, and comes back after it: a step takes at least the
time of these bytes on all channels, and of the compute behind or before them. More blocks take more compute,
and leave less to move: of those that compute longer than they move, the fewest have the least bound, or the
next fewer. The fastest plan has some blocks more. What a bound rules out is not simulated.

Source: TeraIO (arXiv:2506.06472), section 3.3, for inactive periods and timelines of channels; not for its
order, a benefit by cost that is valued anew with each choice.

[Note: late stores]
A budget is kept however late stores end. The tensor cache is called when a slot is packed, and when backward
first asks for one. Memory grows between two calls; so each call waits for the slots without whose stores
memory might exceed the budget before the next: those packed first, since stores begin in that order. The
simulated step waits so, too; on a drive as fast as measured most of them have gone before. A plan without a
budget keeps within its peak and the bytes that wait for the measured drive.

[Note: one ladder for every budget]
The plan for a budget is the fastest one for a rung within it. Rungs depend on the profile and the hardware
only, and what is found for a rung on no other one: more memory never makes a step slower. Some rungs are
equally far apart, others grow by the same share, so that a small budget, too, has one near it.

[Note: levels]
A recomputed block need not run all of its operators again (see the note on kept operators in ``lifetimes``).
Those of all blocks are put in order by the seconds that they save for each byte, and a level keeps so many of
the first. From the plan for level 0, where all run again, blocks and level are searched together.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from infinity.core.errors import BudgetError, RecipeError
from infinity.core.nbytes import format_nbytes
from infinity.core.plan import (
    ActivationPlan,
    Hardware,
    Load,
    Outcome,
    Place,
    Profile,
    SlotKey,
    StoreWait,
)
from infinity.planner.lifetimes import (
    LEVELS,
    MADE,
    InactivePeriod,
    Lifetimes,
    Places,
    index_of,
    kept_levels,
    least_memory,
    lifetimes_of,
    recomputation_order,
)
from infinity.planner.simulator import LOAD, Simulator, channel_timelines, load_of, play

#: Budgets of the ladder, from the smallest that can be met to what keeping everything takes.
RUNGS = 32
#: Of so many blocks one more or less makes no difference; of twice as many two.
_MANY = 128
#: A step that is slower than keeping everything by no more than this share counts as not slowed down.
NO_SLOWDOWN = 0.03
#: One that is slower by no more than this share is not worth a search for a faster one.
NEGLIGIBLE = 0.002
#: A plan near another recomputes something else if that makes a step faster by this share.
WORTH_A_CHANGE = 0.01


def places_within(
    lifetimes: Lifetimes, hardware: Hardware, capacity_nbytes: int, coded: Iterable[int] = ()
) -> dict[int, Place]:
    """Choose storages that leave, fullest position first, until memory fits or nothing more can leave.

    Those of ``coded`` are coded, whether they leave or not; others only where there is no other place.
    """
    periods = lifetimes.periods
    chosen = dict.fromkeys(coded, Place.CODED)
    read, write, host = hardware.read_bytes_per_s, hardware.write_bytes_per_s, hardware.host_bytes_per_s
    s_per_byte: dict[Place, float] = {}  # there and back
    if read > 0 and write > 0:
        s_per_byte[Place.NVME] = 1 / read + 1 / write
    if host > 0:
        s_per_byte[Place.HOST] = 2 / host
    move_s, most = hardware.compute_s_per_move, {Place.NVME: math.inf, Place.HOST: hardware.host_nbytes}
    given = Counter[Place]()

    def soonest(period: InactivePeriod, coded: bool) -> Place | None:
        asked = {place: given[place] + period.moved(place.as_coded(coded)) for place in s_per_byte}
        possible = (place for place in s_per_byte if asked[place] <= most[place])
        return min(possible, key=lambda place: asked[place] * s_per_byte[place], default=None)

    # The longest gap first: it helps the most positions for the same bytes. Where moves cost, the largest.
    waiting = [i for i, period in enumerate(periods) if period.is_worth_storing]
    waiting.sort(key=lambda i: (-move_s * periods[i].nbytes, periods[i].begin - periods[i].end, i))
    over, gaps = _over(lifetimes, chosen, [periods[i] for i in waiting])
    over -= capacity_nbytes
    begins, ends = gaps[:, 0].copy(), gaps[:, 1].copy()
    # In how many of the gaps each position is.
    change = (np.bincount(at, minlength=len(over) + 1) for at in (begins, ends))
    helped = np.cumsum(np.subtract(*change)[: len(over)])
    over[helped == 0] = 0
    if len(s_per_byte) > 1 and hardware.host_nbytes < (all_nbytes := int(over.max(initial=0))):
        # Else the first would fill host memory, and the last, which have the least time, wait for the drive.
        left = (all_nbytes - hardware.host_nbytes) / max(1, hardware.host_nbytes)
        s_per_byte[Place.HOST] = max(s_per_byte[Place.HOST], s_per_byte[Place.NVME] * left)
    while len(over) and over[at := int(over.argmax())] > 0:
        for number in np.flatnonzero((begins <= at) & (at < ends)):
            index, period = waiting[number], periods[waiting[number]]
            before = chosen.get(index, Place.KEEP)
            place = soonest(period, before is Place.CODED)
            if place is not None:
                given[place] += period.moved(place.as_coded(before is Place.CODED))
                place = place.as_coded(before is Place.CODED)
            elif period.coded is not None and period.coded.is_fixed and before is Place.KEEP:
                place = Place.CODED
            if place is not None:
                chosen[index] = place
                begin, end, released, gone = gaps[number]
                over[np.r_[begin:end, released:gone]] += period.kept(place) - period.kept(before)
                over[end:released] += period.beside(place) - period.beside(before) + lifetimes.padding_nbytes
                helped[begin:end] -= 1
                begins[number] = ends[number] = 0  # it is gone
                break
        else:
            over[at] = 0  # nothing helps here
        if not helped[at]:
            over[helped == 0] = 0
    return chosen


def _over(
    lifetimes: Lifetimes, places: Places, periods: Sequence[InactivePeriod]
) -> tuple[np.ndarray, np.ndarray]:
    """Return bytes by stretch of positions, and the stretches at which gaps and releases begin and end.

    From one of these to the next positions have one fate: the fullest counts for all of them.
    """
    moments = [(p.begin, p.end, p.released_at + 1, p.gone_at) for p in periods]
    ends = np.array(moments, dtype=np.int64).reshape(-1, 4)
    memory, stretches = least_memory(lifetimes, places), np.union1d([0], ends)
    if not len(ends):
        return memory[:0], ends
    return np.maximum.reduceat(memory, stretches[stretches < len(memory)]), np.searchsorted(stretches, ends)


class Candidate(NamedTuple):
    """Pairs a plan with its predicted cost."""

    plan: ActivationPlan
    outcome: Outcome


def with_loads(
    lifetimes: Lifetimes,
    places: Places,
    hardware: Hardware,
    capacity_nbytes: int | None,
    policy: str = "plan",
) -> ActivationPlan:
    """Make the plan that stores ``places`` and loads them as late as channels and memory allow.

    Each load starts when backward asks for something, in the order of need. With a capacity, memory stays
    within it if :func:`least_memory` does: the storage needed first gets room first, and a load without room
    starts later, at worst when it is needed. The plan has no budget yet.
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
    kept = lifetimes.kept
    coded = ((periods[index], place) for index, place in sorted(places.items()))
    codecs = {p.key: p.coded.codec for p, place in coded if place.is_coded and p.coded is not None}
    return ActivationPlan(policy, placed, tuple(loads), recomputed, kept, codecs=codecs)


def _desired(lifetimes: Lifetimes, places: Places, hardware: Hardware) -> dict[int, int]:
    """Return the latest positions from which loads need not be waited for, in the order of need."""
    timelines = channel_timelines(lifetimes.times, hardware, lifetimes.traffic.values())
    until = {channel: timelines[channel].until() for channel, *_ in LOAD.values()}
    left = {channel: int(free[-1]) for channel, free in until.items()}  # before loads that are needed later
    found: dict[int, int] = {}
    before = len(lifetimes.times)
    for index in sorted(places, reverse=True):
        period, channel = lifetimes.periods[index], LOAD[places[index]][0]
        room = min(left[channel], int(until[channel][period.end]))
        room -= load_of(period, channel, places[index]) + timelines[channel].latency_nbytes
        left[channel] = max(0, room)
        start = int(np.searchsorted(until[channel], room, "right")) - 1
        found[index] = before = max(lifetimes.backward, min(before, start, period.end))
    return found


def within(lifetimes: Lifetimes, plan: ActivationPlan, hardware: Hardware, capacity_nbytes: int) -> Candidate:
    """Return ``plan`` with the waits that keep its memory within a capacity; see [Note: late stores]."""
    waits = tuple(_waits(lifetimes, plan, capacity_nbytes))
    plan = replace(plan, capacity_nbytes=capacity_nbytes, waits=waits)
    return Candidate(plan, Simulator(lifetimes, plan, hardware).run())


def _waits(lifetimes: Lifetimes, plan: ActivationPlan, capacity_nbytes: int) -> Iterator[StoreWait]:
    """Yield the waits with which memory stays within the capacity whenever stores end."""
    # Positions before which the tensor cache is called, and by what: the last of those packed together, and
    # the first of those asked for together.
    calls: dict[int, tuple[bool, SlotKey]] = {}
    named = [period for period in lifetimes.periods if period.is_named]
    for period in sorted(named, key=lambda period: period.key):
        if period.packed_at < lifetimes.backward:
            calls[period.packed_at + 1] = False, period.key
    calls |= {period.end: (True, period.key) for period in reversed(named)}
    # Stored slots in the order of packing; from its load on ``memory`` has a slot's bytes.
    asked = {None: lifetimes.backward} | {period.key: period.end for period in lifetimes.periods}
    starts = {lifetimes.index[load.slot]: asked[load.after] for load in plan.loads}
    memory = least_memory(lifetimes, {lifetimes.index[k]: p for k, p in plan.places.items()}, starts)
    stored = [lifetimes.index[key] for key in sorted(plan.places)]
    periods = [lifetimes.periods[index] for index in stored]
    nbytes, packed, begin = (
        np.array([getattr(period, name) for period in periods], dtype=np.int64)
        for name in ("nbytes", "packed_at", "begin")
    )
    load = np.array([starts.get(i, period.end) for i, period in zip(stored, periods)], dtype=np.int64)
    first, ats = 0, sorted(calls) if stored else []  # the first of the slots that need not have gone yet
    sums, peaks = np.concatenate(([0], nbytes.cumsum())), np.maximum.reduceat(memory, ats) if ats else memory
    there = np.searchsorted(np.minimum.accumulate(packed[::-1])[::-1], ats)
    loaded = np.concatenate(([0], nbytes[order := load.argsort()].cumsum()))
    most = sums[there] - loaded[np.searchsorted(load[order], ats, "right")]  # packed before, not loaded
    for number, (at, until) in enumerate(pairwise([*ats, len(memory)])):
        if peaks[number] + min(most[number], sums[there[number]] - sums[first]) <= capacity_nbytes:
            continue
        late = first + np.flatnonzero((packed[first:] < at) & (begin[first:] < until) & (load[first:] > at))
        late = late[::-1]  # the newest first
        full = np.flatnonzero(memory[at:until] + nbytes[late].sum() > capacity_nbytes)
        if not len(full):
            continue
        positions = (at + full)[:, None]
        held = np.where((begin[late] <= positions) & (positions < load[late]), nbytes[late], 0).cumsum(1)
        too_many = (held + memory[positions] > capacity_nbytes).any(0)
        if too_many.any():
            first = int(late[too_many.argmax()]) + 1
            yield StoreWait(calls[at][1], calls[at][0], periods[first - 1].key)


#: Regions of blocks that run again, and operators of them that do not.
Again = tuple[frozenset[int], frozenset[int]]
_NOTHING: Again = frozenset(), frozenset()


class PlanSearch:
    """Finds plans for one profile on one machine; ``keep`` is the one that keeps everything."""

    def __init__(self, profile: Profile, hardware: Hardware) -> None:
        self._hardware, self._index = hardware, index_of(profile)
        # Of the step that recomputes some blocks, without some operators; and all storages that can leave.
        self._lifetimes = cache(lambda again: self._index.lifetimes(*again))
        self._everything = cache(lambda again: self._within(again, 0))
        # What is coded in every pass is not recomputed: or numbers would depend on the plan.
        self._rounded = [
            index
            for index, period in enumerate(self._lifetimes(_NOTHING).periods)
            if period.coded is not None and not period.coded.exact and period.is_worth_storing
        ]
        self._order = () if self._rounded else recomputation_order(profile)
        self._levels = [frozenset[int](), *kept_levels(self._index, self._order)]
        #: Of what is recomputed and a rung: its fastest plan; the least that it takes.
        self._found, self._least_s = cache(self._search), cache(self._bound)
        self._least_of = cache(lambda rung: self._least_s(self._first(*self._start(rung)), rung))
        rounded = dict.fromkeys(self._rounded, Place.CODED)
        self.keep = self._simulated(with_loads(self._lifetimes(_NOTHING), rounded, hardware, None))

    def lowest(self) -> tuple[Lifetimes, np.ndarray]:
        """Return the lifetimes with the lowest peak that a plan can reach, and memory by position."""
        found = (
            (self._lifetimes(again), least_memory(self._lifetimes(again), self._everything(again)))
            for again in self._some_sets()
        )
        return min(found, key=lambda each: int(each[1].max(initial=0)))

    def smallest_budget(self) -> int:
        return int(self.lowest()[1].max(initial=0))

    def fastest(self, capacity_nbytes: int) -> ActivationPlan:
        """Return the fastest of the plans for rungs up to a capacity that can be met.

        The highest comes first: often a bound rules out all others. See [Note: one ladder for every budget].
        """
        met: list[Candidate] = []
        for rung in reversed([rung for rung in self._rungs() if rung <= capacity_nbytes]):
            if met and self._least_of(rung) >= min(each.outcome.step_s for each in met):
                break
            if (found := self._best(rung)) is not None:
                met.append(found)
            if self._is_fast(found):
                break
        return min(met, key=lambda c: (c.outcome.step_s, c.outcome.nbytes_stored, c.outcome.peak_nbytes)).plan

    def near(self, like: ActivationPlan, capacity_nbytes: int | None) -> ActivationPlan | None:
        """Return a plan near ``like``, that one if there is no capacity; None: none fits.

        What it recomputes changes only where that makes the step faster by :data:`WORTH_A_CHANGE`.
        """
        try:
            outcome = play(self._index.profile, like, self._hardware)
        except RecipeError:  # it is one for other blocks, or for channels that are not there
            return None
        if capacity_nbytes is None:
            return like if outcome.host_peak_nbytes <= self._hardware.host_nbytes else None
        found, better = self._found(self._index.again(like), capacity_nbytes), self._nearby(capacity_nbytes)
        if found is None or better is None:
            return better and better.plan
        is_worth_it = better.outcome.step_s < (1 - WORTH_A_CHANGE) * found.outcome.step_s
        return (better if is_worth_it else found).plan

    def without_slowdown(self) -> ActivationPlan:
        """Return the plan of the smallest rung that does not slow the step down, without its budget."""
        best = self.keep
        allowed_s = best.outcome.step_s * (1 + NO_SLOWDOWN)

        def do(rung: int) -> bool:
            nonlocal best
            found = self._best(rung)
            if found is not None:
                found = self._simulated(replace(found.plan, capacity_nbytes=None, waits=()))
            if found is None or found.outcome.step_s > allowed_s:
                return False
            best = min(best, found, key=self._cost)
            return True

        rungs = self._rungs()
        # No rung below may do; most often one of the next few does.
        low = bisect_left(rungs, True, key=lambda rung: self._least_of(rung) <= allowed_s)
        at, high, further = low, len(rungs), 1
        while low < high:
            low, high = (low, at) if do(rungs[at]) else (at + 1, high)
            at, further = min(low + further, (low + high) // 2), 2 * further
        do(best.outcome.peak_nbytes)  # a plan of that rung may have the same peak and store less
        lifetimes = self._under(best.plan)
        simulator = Simulator(lifetimes, best.plan, self._hardware)
        most_nbytes = simulator.run().peak_nbytes + simulator.slots.backlog.peak_nbytes
        return replace(best.plan, waits=tuple(_waits(lifetimes, best.plan, most_nbytes)))

    def _within(self, again: Again, rung: int, coded: Iterable[int] = ()) -> dict[int, Place]:
        return places_within(self._lifetimes(again), self._hardware, rung, self._rounded or coded)

    def _coded(self, again: Again, rung: int, coded: Collection[int]) -> dict[int, Place]:
        """Return places in which those of ``coded`` have forms: where a longer one breaks no budget."""
        periods = self._lifetimes(again).periods
        fixed = [i for i in coded if (form := periods[i].coded) is not None and form.is_fixed]
        places = self._within(again, rung, fixed)
        return {i: p.as_coded(True) if i in coded and p.on_nvme else p for i, p in places.items()}

    def _simulated(self, plan: ActivationPlan) -> Candidate:
        return Candidate(plan, Simulator(self._under(plan), plan, self._hardware).run())

    def _under(self, plan: ActivationPlan) -> Lifetimes:
        found: Lifetimes = self._lifetimes(self._index.again(plan))
        return found

    def _some_sets(self) -> Iterator[Again]:
        """Yield what is recomputed where the lowest peak may be reached."""
        yield _NOTHING
        if min(self._hardware.read_bytes_per_s, self._hardware.write_bytes_per_s) <= 0:
            yield from (self._first(count + 1, 0) for count in range(len(self._order)))

    def _first(self, count: int, level: int) -> Again:
        """Return what is recomputed if the first blocks of the order are, at a level."""
        return frozenset(self._order[:count]), self._levels[level]

    def _rungs(self) -> list[int]:
        """Return budgets in growing order; the first is the smallest that can be met."""
        least = self.smallest_budget()
        most = max(least, int(self._lifetimes(_NOTHING).memory.max(initial=0)))
        share = (most / max(1, least)) ** (1 / RUNGS)
        rungs = ((least + (most - least) * i // RUNGS, int(least * share**i)) for i in range(RUNGS))
        return sorted({rung for both in rungs for rung in both})

    def _cost(self, candidate: Candidate) -> tuple[int, int, int]:
        outcome, step_s = candidate.outcome, NEGLIGIBLE * self.keep.outcome.step_s
        return outcome.peak_nbytes, round(outcome.step_s / step_s) if step_s else 0, outcome.nbytes_stored

    def _is_fast(self, candidate: Candidate | None) -> bool:
        limit_s = self.keep.outcome.step_s * (1 + NEGLIGIBLE)
        return candidate is not None and candidate.outcome.step_s <= limit_s

    def _best(self, rung: int) -> Candidate | None:
        """Return the fastest plan for this budget."""
        found = self._nearby(rung)
        if found is None or self._is_fast(found):
            return found
        # Seldom faster: store everything; in host memory alone, or less on the drive; more that is smaller.
        again, given = self._index.again(found.plan), self._hardware
        read, write = given.read_bytes_per_s, given.write_bytes_per_s
        others = [replace(given, compute_s_per_move=0.0)]
        if given.host_nbytes:
            slower = ((share * read, share * write) for share in (0.0, 0.7))
            others = [replace(given, read_bytes_per_s=r, write_bytes_per_s=w) for r, w in slower]
        spread = (places_within(self._lifetimes(again), each, rung, self._rounded) for each in others)
        choices = self._everything(again), *spread
        fitting = [places for places in choices if _peak(self._lifetimes(again), places) <= rung]
        return self._fastest_of(found, rung, again, fitting)

    def _nearby(self, rung: int) -> Candidate | None:
        at, every = self._start(rung, (0,)), (len(self._order), 0)
        found = better = self._faster(None, rung, self._first(*at))
        if self._hardware.compute_s_per_move:  # which bounds do not count: more blocks may be better
            better = self._faster(found, rung, self._first(*every))
        found, at = self._climb(better, rung, at if better is found else every, 0)
        for again in self._some_sets() if found is None else ():
            found = self._faster(found, rung, again)
        if found is None or len(self._levels) == 1:
            return found
        better = self._faster(found, rung, self._first(*(start := self._start(rung))))
        return self._climb(better, rung, at if better is found else start, LEVELS // 4)[0]

    def _start(self, rung: int, levels: Sequence[int] = ()) -> tuple[int, int]:
        """Return blocks and a level, of all or (if blocks are many) some, with the least bound."""
        near, counts = list[tuple[int, int]](), range(len(self._order))
        for level in levels or range(0, len(self._levels), 1 + len(counts) // 32):

            def waits_for_nothing(count: int, level: int = level) -> bool:
                again = self._first(count, level)
                return self._least_s(again, rung) <= self._lifetimes(again).until_s[-1]

            end = bisect_left(counts, True, key=waits_for_nothing)
            near += [(end, level), (max(0, end - 1), level)]
        return min(near, key=lambda at: self._least_s(self._first(*at), rung))

    def _bound(self, again: Again, rung: int) -> float:
        """Return the least that a step takes: what a rung has no room for goes before, and comes after."""
        lifetimes, hardware = self._lifetimes(again), self._hardware
        until_s = np.array(lifetimes.until_s)
        if any(period.coded is not None for period in lifetimes.periods):
            return float(until_s[-1])
        over, host = lifetimes.memory - rung, hardware.host_bytes_per_s * bool(hardware.host_nbytes)
        drive = min(hardware.write_bytes_per_s, hardware.read_bytes_per_s)
        for period in lifetimes.periods if max(drive, host) > 0 else ():
            over[period.released_at + 1 : period.gone_at] -= period.nbytes  # it need not come back
        at = np.flatnonzero(over > 0)

        def least_s(bytes_per_s: float) -> np.ndarray:
            at_once = over[at] / max(bytes_per_s + host, 1e-9)
            beyond = (over[at] - hardware.host_nbytes) / max(bytes_per_s, 1e-9)
            return np.maximum(at_once, beyond)

        before = least_s(hardware.write_bytes_per_s) + until_s[-1] - until_s[at]
        after = least_s(hardware.read_bytes_per_s) + until_s[at]
        return float(max(until_s[-1], before.max(initial=0.0), after.max(initial=0.0)))

    def _climb(
        self, found: Candidate | None, rung: int, at: tuple[int, int], much: int
    ) -> tuple[Candidate | None, tuple[int, int]]:
        """Go from so many blocks and a level to faster ones, with ever smaller steps; ``much``: levels."""
        blocks = len(self._order)
        many = max(1, blocks // 32 if at[0] else blocks // 4)
        while blocks and (many > blocks // _MANY or much) and not self._is_fast(found):
            moves = (many, 0), (-many, 0), (0, much), (0, -much), (many, much), (-many, -much)
            for more, higher in moves if much else moves[:2]:
                near = at[0] + more, at[1] + higher
                if 0 <= near[0] <= blocks and 0 <= near[1] < len(self._levels) and near != at:
                    candidate = self._faster(found, rung, self._first(*near))
                    if candidate is not found:
                        found, at = candidate, near
                        break
            else:
                many, much = many // 2, much // 2
        return found, at

    def _faster(self, best: Candidate | None, rung: int, again: Again) -> Candidate | None:
        """Return the fastest plan that recomputes this, if it is faster than ``best``; else ``best``."""
        if best is not None and self._least_s(again, rung) >= best.outcome.step_s:
            return best
        found = self._found(again, rung)
        is_faster = found and (best is None or found.outcome.step_s < best.outcome.step_s)
        return found if is_faster else best

    def _search(self, again: Again, rung: int) -> Candidate | None:
        lifetimes, hardware = self._lifetimes(again), self._hardware
        chosen = self._within(again, rung)
        choices = [chosen]
        forms = {i: form for i, p in enumerate(lifetimes.periods) if i in chosen and (form := p.coded)}
        if forms and not self._rounded:
            paying = {i for i, f in forms.items() if f.pays(lifetimes.periods[i].nbytes, hardware)}
            choices += [self._coded(again, rung, some) for some in (forms.keys(), paying)]
        # What is coded is in memory, too, while it is read: there it may be too much.
        fitting = [places for places in choices if _peak(lifetimes, places) <= rung]
        if not fitting and _peak(lifetimes, everything := self._everything(again)) > rung:
            return None
        return self._fastest_of(None, rung, again, fitting or [everything])

    def _fastest_of(
        self, best: Candidate | None, rung: int, again: Again, choices: Sequence[Places]
    ) -> Candidate | None:
        lifetimes, hardware = self._lifetimes(again), self._hardware
        for number, places in enumerate(choices):
            if places in choices[:number] or (best and lifetimes.until_s[-1] >= best.outcome.step_s):
                continue
            plan = with_loads(lifetimes, places, hardware, rung)
            found = within(lifetimes, plan, hardware, rung)
            if best is None or found.outcome.step_s < best.outcome.step_s:
                best = found
            if self._is_fast(best):
                break
        return best


def _peak(lifetimes: Lifetimes, places: Places) -> int:
    return int(least_memory(lifetimes, places).max(initial=0))


def plan(
    profile: Profile, hardware: Hardware, capacity_nbytes: int | None = None,
    like: ActivationPlan | None = None,
) -> ActivationPlan:  # fmt: skip
    """Return the fastest plan found within the budget; without one, the lowest peak for 3 % of the step.

    The plan's ``capacity_nbytes`` is its rung, at most the budget: see [Note: one ladder for every budget].
    ``like``: a plan of the same profile for other channels or a like budget, which saves the search.

    Raises:
        BudgetError: No plan keeps the budget; says the smallest that can be kept, and what holds it there.
    """
    search = PlanSearch(profile, hardware)
    if like is not None and (near := search.near(like, capacity_nbytes)) is not None:
        return near
    if capacity_nbytes is None:
        return search.without_slowdown()
    if search.keep.outcome.peak_nbytes <= capacity_nbytes:
        return replace(search.keep.plan, capacity_nbytes=capacity_nbytes)
    if search.smallest_budget() > capacity_nbytes:
        raise budget_error(profile, hardware, capacity_nbytes)
    return search.fastest(capacity_nbytes)


def simple_plan(policy: str, profile: Profile, hardware: Hardware) -> ActivationPlan:
    """Return the plan of a policy without a budget: keep, offload, recompute, or adaptive.

    The last stores all of the first blocks, as many as leave in time and make compute wait for no drive.

    Source: SSDTrain (arXiv:2408.10013), section 3.3.3, for that.
    """
    again = frozenset(block.region for block in profile.blocks if policy == "recompute")
    lifetimes, regions = lifetimes_of(profile, again), sorted(block.region for block in profile.blocks)

    def stored_up_to(last: float) -> ActivationPlan:
        waiting = (i for i, p in enumerate(lifetimes.periods) if p.is_worth_storing and p.key.region <= last)
        return with_loads(lifetimes, dict.fromkeys(waiting, Place.NVME), hardware, None, policy)

    if policy == "offload":  # backward begins with the last block: what that saves stays, as in training
        return stored_up_to(max(regions, default=math.inf) - 1)
    plan = stored_up_to(-1)
    has_drives = min(hardware.read_bytes_per_s, hardware.write_bytes_per_s) > 0
    for region in regions if policy == "adaptive" and has_drives else ():
        more = stored_up_to(region)
        outcome = Simulator(lifetimes, more, hardware).run()
        leaves_nbytes = sum(p.nbytes for p in lifetimes.periods if p.is_named and p.key in more.places)
        if outcome.nbytes_loaded < leaves_nbytes or outcome.stall_s > NEGLIGIBLE * outcome.step_s:
            break
        plan = more
    return plan


def budget_error(profile: Profile, hardware: Hardware, capacity_nbytes: int) -> BudgetError:
    """Describe why no plan keeps a budget."""
    least, where = _least(profile, hardware)
    return BudgetError(
        f"no plan keeps what a step makes in device memory within {_in_bytes(capacity_nbytes)}; the smallest "
        f"budget that can be kept is {_in_bytes(least)}, because of {where}. Raise the budget to that, or "
        "make micro-batches or sequences smaller",
        "memory.device",
    )


#: What to set beside a larger ``memory.device``, by how ``auto`` had logits computed.
_LOGITS = {
    None: "",
    "slices": " and set memory.logits=slices (with auto they are whole where they may fit, which takes more)",
    "whole": ", set memory.logits=slices",
}


def device_error(
    profile: Profile, hardware: Hardware, device_nbytes: int, units_nbytes: int, logits: str | None = None
) -> BudgetError:
    """Describe why no plan keeps within what units, at least ``units_nbytes``, leave of ``memory.device``."""
    least, where = _least(profile, hardware)
    return BudgetError(
        f"memory.device is {format_nbytes(device_nbytes)}; at least {_in_bytes(units_nbytes + least)} is "
        f"required: {format_nbytes(units_nbytes)} for units, and {format_nbytes(least)} for what a step "
        f"makes beside them, however its activations are planned, because of {where}. Raise "
        f"memory.device{_LOGITS[logits]}, or make micro-batches or sequences smaller",
        "memory.device",
    )


def _least(profile: Profile, hardware: Hardware) -> tuple[int, str]:
    """Return the smallest budget, and the operator that needs it, with its largest storages."""
    lifetimes, memory = PlanSearch(profile, hardware).lowest()
    operator = int(lifetimes.operators[at := int(np.argmax(memory))])
    gone = {p.key for p in lifetimes.periods if p.can_leave and p.begin <= at < p.end}
    away = {slot.storage for slot in profile.slots if slot.key in gone}
    there = [
        storage
        for index, storage in enumerate(profile.storages)
        if storage.kind in MADE and storage.born <= operator <= storage.dies and index not in away
    ]
    there = sorted(there, key=lambda storage: -storage.nbytes)[:3]
    largest = ", ".join(f"{storage.name} {format_nbytes(storage.nbytes)}" for storage in there)
    again = "recomputation before " if operator in lifetimes.operators[at + 1 :] else ""
    where = f"in {profile.operators[operator].phase}, outside blocks"
    for block in profile.blocks:
        for phase, (first, end) in (("forward", block.forward), ("backward", block.backward)):
            if first <= operator < end:
                where = f"in the {phase} of {block.name}"
    name = profile.operators[operator].name
    where = f"{again}operator {operator} ({name}) {where}, where the largest are {largest}"
    return int(memory.max(initial=0)), where


def _in_bytes(nbytes: int) -> str:
    return f"{format_nbytes(nbytes)} ({nbytes} bytes)"
