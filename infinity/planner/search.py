"""Search for the fastest plan within a budget.

For a budget and a set of recomputed blocks, :mod:`infinity.planner.migration` chooses the storages that leave
and :func:`with_loads` when they come back; the simulator predicts what that costs. What remains is how many
blocks to recompute, and which: the first so many of a fixed order, searched around the number of the next
smaller budget. Where blocks are few, one more or less matters: other orders, and single blocks, are tried
too.

[Note: one ladder for every budget]
The plan for a budget is the fastest one for a rung within it, and rungs depend on the profile and the
hardware only. They are climbed from the smallest budget that can be met, so the search for one rung does
not depend on the budget either: more memory never makes a step slower.

[Note: backlog]
A plan that would need more than its budget, because stores end later than they should, gets a bound on the
bytes that wait to be stored.

[Note: late stores]
A budget is kept however late stores end, not only as predicted. Memory grows between two points where the
tensor cache is called, the packing of a slot and backward's first request for one; so at each of them the
slots are waited for with which memory might not hold until the next. They are the first that were packed,
since stores are begun in that order. On a drive as fast as measured most of them have gone before.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from infinity.core.plan import (
    ActivationPlan,
    BlockCall,
    Hardware,
    Load,
    Outcome,
    Place,
    Profile,
    SlotKey,
    StoreWait,
)
from infinity.planner.channels import LOAD, channel_timelines
from infinity.planner.lifetimes import Lifetimes, ProfileIndex, lifetimes_of
from infinity.planner.migration import Places, all_places, least_memory, places_within
from infinity.planner.simulator import Simulator

#: Budgets of the ladder, from the smallest that can be met to what keeping everything takes.
RUNGS = 32
#: Blocks are few if they are no more than this.
FEW = 12
#: Of so many blocks one more or less makes no difference; of twice as many two.
_MANY = 128
#: A step that is slower than keeping everything by no more than this share counts as not slowed down.
NO_SLOWDOWN = 0.03
#: One that is slower by no more than this share is not worth a search for a faster one.
NEGLIGIBLE = 0.002
#: Backlogs that are tried: one that is safe, then by halves up to none.
TRIES = 7


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
        start = min(start, asks[bisect_left(asks, wanted)])
        memory[start : period.end] += loaded_nbytes
        loads.append(Load(triggers[start], period.key))
        earliest = start
    placed = {periods[index].key: places[index] for index in sorted(places)}
    return ActivationPlan(policy, placed, tuple(loads), lifetimes.recomputed)


def _desired(lifetimes: Lifetimes, places: Places, hardware: Hardware) -> dict[int, int]:
    """The latest positions from which the loads need not be waited for, in the order of need."""
    timelines = channel_timelines(lifetimes.times, hardware, lifetimes.traffic.values())
    loading = {place: timelines[LOAD[place]] for place in (Place.NVME, Place.HOST)}
    until = {place: timeline.until() for place, timeline in loading.items()}
    left = {place: int(until[place][-1]) for place in loading}  # before the loads that are needed later
    found: dict[int, int] = {}
    before = len(lifetimes.times)
    for index in sorted(places, reverse=True):
        period, place = lifetimes.periods[index], places[index]
        room = min(left[place], int(until[place][period.end])) - loading[place].booked_nbytes(period.nbytes)
        left[place] = max(0, room)
        start = int(np.searchsorted(until[place], room, "right")) - 1
        before = max(lifetimes.backward, min(before, start, period.end))
        found[index] = before
    return found


def within(
    lifetimes: Lifetimes, plan: ActivationPlan, hardware: Hardware, capacity_nbytes: int,
    limit_s: float = float("inf"),
) -> tuple[ActivationPlan, Outcome] | None:  # fmt: skip
    """Bound the plan's backlog if it needs that to keep the capacity; see [Note: backlog].

    Returns:
        The plan and its predicted outcome; None if no backlog helps, or a step takes ``limit_s`` or more.
    """
    simulator = Simulator(lifetimes, plan, hardware)
    outcome = simulator.run_within(limit_s)
    if outcome is None:
        return None
    if outcome.peak_nbytes <= capacity_nbytes:
        return plan, outcome
    places = {lifetimes.index[key]: place for key, place in plan.places.items()}
    least = least_memory(lifetimes, places) + _loaded_early(lifetimes, plan)
    # Beside these bytes there is never more than the backlog, however late stores end.
    low, high = capacity_nbytes - int(least.max(initial=0)), simulator.most_backlog_nbytes
    found, tried_nbytes = None, low
    for _ in range(TRIES if low >= 0 else 0):
        bounded = replace(plan, backlog_nbytes=tried_nbytes)
        simulator = Simulator(lifetimes, bounded, hardware)
        outcome = simulator.run_within(limit_s, capacity_nbytes)
        if simulator.peak_nbytes > capacity_nbytes:
            high = tried_nbytes
        else:
            low = tried_nbytes
            if outcome is not None:
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


def _waits(lifetimes: Lifetimes, plan: ActivationPlan, capacity_nbytes: int) -> Iterator[StoreWait]:
    """The waits with which memory stays within the capacity whenever stores end."""
    places = {lifetimes.index[key]: place for key, place in plan.places.items()}
    memory = least_memory(lifetimes, places) + _loaded_early(lifetimes, plan)
    loads = _load_positions(lifetimes, plan)
    # in the order of packing
    stored = sorted((lifetimes.periods[index] for index in places), key=lambda period: period.key)
    nbytes, packed, begin = (
        np.array([getattr(period, name) for period in stored], dtype=np.int64)
        for name in ("nbytes", "packed_at", "begin")
    )
    # from its load on ``memory`` has a slot's bytes
    load = np.array([loads.get(period.key, period.end) for period in stored], dtype=np.int64)
    calls = _calls(lifetimes) if stored else []
    first = 0  # of the slots that need not have gone yet
    ends = [*(at for at, _, _ in calls[1:]), len(memory)]
    for (at, backward, key), until in zip(calls, ends):
        late = first + np.flatnonzero((packed[first:] < at) & (begin[first:] < until) & (load[first:] > at))
        late, positions = late[::-1], np.arange(at, until)[:, None]  # the newest first
        held = np.where((begin[late] <= positions) & (positions < load[late]), nbytes[late], 0).cumsum(1)
        too_many = (held + memory[at:until, None] > capacity_nbytes).any(0)
        if too_many.any():
            first = int(late[too_many.argmax()]) + 1
            yield StoreWait(key, backward, stored[first - 1].key)


def _calls(lifetimes: Lifetimes) -> list[tuple[int, bool, SlotKey]]:
    """Positions before which the tensor cache is called, each with its call: ``(at, backward, key)``."""
    found: dict[int, tuple[bool, SlotKey]] = {}
    named = [period for period in lifetimes.periods if period.is_named]
    for period in sorted(named, key=lambda period: period.key):  # the last of those packed together
        if period.packed_at < lifetimes.backward:
            found[period.packed_at + 1] = False, period.key
    for period in reversed(named):  # the first of those asked for together
        found[period.end] = True, period.key
    return [(at, *found[at]) for at in sorted(found)]


def _load_positions(lifetimes: Lifetimes, plan: ActivationPlan) -> dict[SlotKey, int]:
    """The position before which each load starts."""
    asked = {None: lifetimes.backward} | {period.key: period.end for period in lifetimes.periods}
    return {load.slot: asked[load.after] for load in plan.loads}


def _loaded_early(lifetimes: Lifetimes, plan: ActivationPlan) -> np.ndarray:
    """Bytes by position of storages whose loads start before they are needed."""
    change = np.zeros(len(lifetimes.memory) + 1, dtype=np.int64)
    for slot, start in _load_positions(lifetimes, plan).items():
        period = lifetimes.periods[lifetimes.index[slot]]
        nbytes = period.nbytes + lifetimes.padding_nbytes
        change[max(start, min(period.begin, period.end))] += nbytes
        change[period.end] -= nbytes
    return np.cumsum(change[:-1])


def least_s(lifetimes: Lifetimes, hardware: Hardware, capacity_nbytes: int) -> float:
    """Seconds that a step takes at least within a capacity.

    What is beyond it at any position must have been stored by then, and is loaded afterwards.
    """
    # The simulator ends transfers up to half a byte early.
    over = np.maximum(lifetimes.memory - capacity_nbytes - len(lifetimes.periods), 0)
    until_s = np.array(lifetimes.until_s)
    host = hardware.host_bytes_per_s if hardware.host_nbytes else 0.0
    too_much = np.maximum(over - hardware.host_nbytes, 0) if host > 0 else over  # for the host

    def moved_s(drive: float) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            both = np.where(over > 0, over / (max(drive, 0.0) + host), 0.0)
            return np.maximum(both, np.where(too_much > 0, too_much / max(drive, 0.0), 0.0))

    before_s = np.maximum(until_s[:-1], moved_s(hardware.write_bytes_per_s))
    after_s = np.maximum(until_s[-1] - until_s[1:], moved_s(hardware.read_bytes_per_s))
    found_s = float((before_s + after_s).max(initial=0.0)) * (1 - 1e-9)  # for rounding
    return max(lifetimes.until_s[-1], found_s)


# --- the ladder --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan and its predicted cost."""

    plan: ActivationPlan
    outcome: Outcome


class PlanSearch:
    """Finds plans for one profile on one machine.

    Attributes:
        keep: The plan that keeps everything.
    """

    def __init__(self, profile: Profile, hardware: Hardware) -> None:
        self._profile, self._hardware = profile, hardware
        self._index = ProfileIndex(profile)
        self._lifetimes: dict[frozenset[int], Lifetimes] = {}
        self._orders = list(_orders(profile))
        self._everything: dict[frozenset[int], Places] = {}
        self._count = 0  # of recomputed blocks in the plan for the rung below
        self.keep = self._simulated(ActivationPlan("plan"))

    def lifetimes(self, recomputed: frozenset[int]) -> Lifetimes:
        """Lifetimes if the blocks of these regions are recomputed."""
        if recomputed not in self._lifetimes:
            self._lifetimes[recomputed] = lifetimes_of(self._profile, recomputed, self._index)
        return self._lifetimes[recomputed]

    def lowest(self) -> tuple[Lifetimes, np.ndarray]:
        """Lifetimes with the lowest peak that a plan can reach, and memory by position."""
        sets = list(self._some_sets())
        memories = [least_memory(self.lifetimes(blocks), self._all_places(blocks)) for blocks in sets]
        best = min(range(len(sets)), key=lambda i: (int(memories[i].max(initial=0)), i))
        return self.lifetimes(sets[best]), memories[best]

    def smallest_budget(self) -> int:
        """Bytes of the smallest budget that a plan can keep, however slowly."""
        _, memory = self.lowest()
        return int(memory.max(initial=0))

    def frontier(self, capacity_nbytes: int) -> Iterator[Candidate]:
        """The fastest plans that were found for rungs up to a capacity, smallest rung first.

        Once a plan is as fast as keeping everything, the rungs between it and the highest, which moves the
        fewest bytes, are left out. See [Note: one ladder for every budget].
        """
        rungs = [rung for rung in self._rungs() if rung <= capacity_nbytes]
        for rung in rungs:
            candidate = self._best(rung, thorough=rung in rungs[-2:])
            if candidate is not None:
                yield candidate
                if self._is_fast(candidate):
                    break
        else:
            return
        if rung != rungs[-1] and (candidate := self._best(rungs[-1])) is not None:
            yield candidate

    def without_slowdown(self) -> Candidate:
        """The plan of the smallest rung, its budget left out, that does not slow the step down."""
        best = self.keep
        allowed_s = best.outcome.step_s * (1 + NO_SLOWDOWN)
        rungs = self._rungs()
        low, high, at = 0, len(rungs), 0  # the smallest may do
        while low < high:
            candidate = self._best(rungs[at])
            if candidate is not None:
                candidate = self._simulated(
                    replace(candidate.plan, capacity_nbytes=None, backlog_nbytes=None)
                )
            if candidate is None or candidate.outcome.step_s > allowed_s:
                low = at + 1
            else:
                best, high = candidate, at
            at = (low + high) // 2
        return best

    # --- parts -------------------------------------------------------------------------------

    def _simulated(self, plan: ActivationPlan) -> Candidate:
        lifetimes = self.lifetimes(plan.recomputed)
        return Candidate(plan, Simulator(lifetimes, plan, self._hardware).run())

    def _some_sets(self) -> Iterator[frozenset[int]]:
        """Sets of recomputed blocks that may reach the lowest peak."""
        yield frozenset()
        drive = min(self._hardware.read_bytes_per_s, self._hardware.write_bytes_per_s)
        if drive <= 0:
            order = self._orders[0]
            yield from (frozenset(order[:count]) for count in range(1, len(order) + 1))

    def _all_places(self, recomputed: frozenset[int]) -> Places:
        if recomputed not in self._everything:
            self._everything[recomputed] = all_places(self.lifetimes(recomputed), self._hardware)
        return self._everything[recomputed]

    def _rungs(self) -> list[int]:
        """Budgets, growing; the first is the smallest that can be met."""
        least = self.smallest_budget()
        most = max(least, int(self.lifetimes(frozenset()).memory.max(initial=0)))
        return sorted({least + (most - least) * rung // RUNGS for rung in range(RUNGS)})

    def _best(self, rung: int, *, thorough: bool = True) -> Candidate | None:
        """The fastest plan that was found for this budget; ``thorough``: of few blocks each one is tried."""
        best = self._counted(rung)
        if best is None:
            for recomputed in self._some_sets():
                best = self._faster(best, rung, recomputed)
        if best is not None and thorough and len(self._orders[0]) <= FEW:
            best = self._improved(best, rung)
        return best

    def _is_fast(self, candidate: Candidate | None) -> bool:
        """Return whether it is about as fast as keeping everything."""
        return candidate is not None and candidate.outcome.step_s <= self.keep.outcome.step_s * (
            1 + NEGLIGIBLE
        )

    def _counted(self, rung: int) -> Candidate | None:
        """Search the number of recomputed blocks around that of the rung below."""
        order = self._orders[0]
        found = self._faster(None, rung, frozenset(order[: self._count]))
        step = max(1, len(order) // 32 if self._count else len(order) // 4)
        least = len(order) // _MANY
        while step > least and order and not self._is_fast(found):
            for count in (self._count + step, self._count - step):
                if 0 <= count <= len(order):
                    candidate = self._faster(found, rung, frozenset(order[:count]))
                    if candidate is not found:
                        found, self._count = candidate, count
                        break
            else:
                step //= 2
        return found

    def _improved(self, best: Candidate, rung: int) -> Candidate:
        """Try the same number of other blocks, and changing each one."""
        number = len(best.plan.recomputed)
        sets = [frozenset(order[:number]) for order in self._orders[1:]] if number else []
        sets += [best.plan.recomputed ^ {region} for region in self._orders[0]]
        for recomputed in sets:
            if not self._is_fast(best):
                best = self._faster(best, rung, recomputed) or best
        return best

    def _faster(self, best: Candidate | None, rung: int, recomputed: frozenset[int]) -> Candidate | None:
        """The fastest plan with these blocks, if it is faster than ``best``; else ``best``."""
        lifetimes = self.lifetimes(recomputed)
        limit_s = float("inf") if best is None else best.outcome.step_s
        if least_s(lifetimes, self._hardware, rung) >= limit_s:
            return best
        everything = self._all_places(recomputed)
        if int(least_memory(lifetimes, everything).max(initial=0)) > rung:
            return best
        for places in places_within(lifetimes, self._hardware, rung, everything):
            plan = with_loads(lifetimes, places, self._hardware, rung)
            found = within(lifetimes, plan, self._hardware, rung, limit_s)
            if found is not None:
                best = Candidate(replace(found[0], capacity_nbytes=rung), found[1])
                limit_s = best.outcome.step_s
            if self._is_fast(best):
                break
        return best


def _orders(profile: Profile) -> Iterator[tuple[int, ...]]:
    """Regions of blocks in the orders in which they are tried: by worth, then spread; early; late first."""
    nbytes = {block.region: 0 for block in profile.blocks}
    blocks = {block.region: block for block in profile.blocks}
    for slot in profile.slots:
        block = blocks.get(slot.key.region)
        if block is not None and slot.storage not in block.inputs and not slot.held:
            nbytes[block.region] += slot.nbytes
    useful = [block for block in profile.blocks if nbytes[block.region]]

    def worth(block: BlockCall) -> float:
        time_s = sum(o.time_s for o in profile.operators[slice(*block.forward)])
        return float(f"{nbytes[block.region] / max(time_s, 1e-9):.1e}")

    spread = {block.region: _radical_inverse(i) for i, block in enumerate(useful)}
    yield tuple(b.region for b in sorted(useful, key=lambda b: (-worth(b), spread[b.region])))
    yield tuple(b.region for b in sorted(useful, key=lambda b: (-worth(b), b.region)))
    yield tuple(b.region for b in sorted(useful, key=lambda b: (-worth(b), -b.region)))


def _radical_inverse(number: int) -> float:
    """The bits mirrored at the point: 0, 1/2, 1/4, 3/4, ... (van der Corput), evenly spread prefixes."""
    value, weight = 0.0, 0.5
    while number:
        value += weight * (number & 1)
        number >>= 1
        weight /= 2
    return value
