"""Search for the fastest plan within a budget.

For a budget and a set of recomputed blocks, :mod:`infinity.planner.placement` chooses the storages that leave
and when they come back; the simulator predicts what that costs. What remains is how many blocks to recompute:
the first so many of a fixed order, searched around the number of the next smaller budget.

[Note: one ladder for every budget]
The plan for a budget is the fastest one for a rung within it, and rungs depend on the profile and the
hardware only. They are climbed from the smallest budget that can be met, so the search for one rung does
not depend on the budget either: more memory never makes a step slower.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from infinity.core.errors import BudgetError
from infinity.core.nbytes import format_nbytes
from infinity.core.plan import ActivationPlan, BlockCall, Hardware, Outcome, Place, Profile
from infinity.planner.channels import Channel
from infinity.planner.lifetimes import MADE, Lifetimes, ProfileIndex, least_memory, lifetimes_of
from infinity.planner.placement import channel_timelines, places_within, with_loads, within
from infinity.planner.simulator import Simulator

#: Budgets of the ladder, from the smallest that can be met to what keeping everything takes.
RUNGS = 32
#: Of so many blocks one more or less makes no difference; of twice as many two.
_MANY = 128
#: A step that is slower than keeping everything by no more than this share counts as not slowed down.
NO_SLOWDOWN = 0.03
#: One that is slower by no more than this share is not worth a search for a faster one.
NEGLIGIBLE = 0.002


# --- the ladder --------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """A plan and its predicted cost."""

    plan: ActivationPlan
    outcome: Outcome


class PlanSearch:
    """Finds plans for one profile on one machine; ``keep`` is the one that keeps everything."""

    def __init__(self, profile: Profile, hardware: Hardware) -> None:
        self._hardware = hardware
        # Of the step that recomputes the blocks of some regions; and all its storages that can leave.
        self._lifetimes = cache(ProfileIndex(profile).lifetimes)
        self._everything = cache(lambda recomputed: places_within(self._lifetimes(recomputed), hardware, 0))
        self._order = _order(profile)
        self._count = 0  # of recomputed blocks in the plan for the rung below
        self.keep = self._simulated(ActivationPlan("plan"))

    def lowest(self) -> tuple[Lifetimes, np.ndarray]:
        """Lifetimes with the lowest peak that a plan can reach, and memory by position."""
        found = (
            (self._lifetimes(blocks), least_memory(self._lifetimes(blocks), self._everything(blocks)))
            for blocks in self._some_sets()
        )
        return min(found, key=lambda each: int(each[1].max(initial=0)))

    def smallest_budget(self) -> int:
        """Bytes of the smallest budget that a plan can keep, however slowly."""
        return int(self.lowest()[1].max(initial=0))

    def frontier(self, capacity_nbytes: int) -> Iterator[Candidate]:
        """The fastest plans that were found for rungs up to a capacity, smallest rung first.

        Once a plan is as fast as keeping everything, the rungs between it and the highest, which moves the
        fewest bytes, are left out. See [Note: one ladder for every budget].
        """
        rungs = [rung for rung in self._rungs() if rung <= capacity_nbytes]
        for rung in rungs:
            candidate = self._best(rung)
            if candidate is not None:
                yield candidate
            if self._is_fast(candidate) and rung != rungs[-1]:
                if (last := self._best(rungs[-1])) is not None:
                    yield last
                return

    def without_slowdown(self) -> Candidate:
        """The plan of the smallest rung, its budget left out, that does not slow the step down."""
        best = self.keep
        allowed_s = best.outcome.step_s * (1 + NO_SLOWDOWN)
        rungs = self._rungs()
        low, high, at = 0, len(rungs), 0  # the smallest may do
        while low < high:
            candidate = self._best(rungs[at])
            if candidate is not None:
                unbound = replace(candidate.plan, capacity_nbytes=None, backlog_nbytes=None)
                candidate = self._simulated(unbound)
            if candidate is None or candidate.outcome.step_s > allowed_s:
                low = at + 1
            else:
                best, high = candidate, at
            at = (low + high) // 2
        return best

    # --- parts -------------------------------------------------------------------------------

    def _simulated(self, plan: ActivationPlan) -> Candidate:
        return Candidate(plan, Simulator(self._lifetimes(plan.recomputed), plan, self._hardware).run())

    def _some_sets(self) -> Iterator[frozenset[int]]:
        """Sets of recomputed blocks that may reach the lowest peak."""
        yield frozenset()
        if min(self._hardware.read_bytes_per_s, self._hardware.write_bytes_per_s) <= 0:
            yield from (frozenset(self._order[: count + 1]) for count in range(len(self._order)))

    def _rungs(self) -> list[int]:
        """Budgets, growing; the first is the smallest that can be met."""
        least = self.smallest_budget()
        most = max(least, int(self._lifetimes(frozenset()).memory.max(initial=0)))
        return sorted({least + (most - least) * rung // RUNGS for rung in range(RUNGS)})

    def _is_fast(self, candidate: Candidate | None) -> bool:
        """Whether it is about as fast as keeping everything."""
        limit_s = self.keep.outcome.step_s * (1 + NEGLIGIBLE)
        return candidate is not None and candidate.outcome.step_s <= limit_s

    def _best(self, rung: int) -> Candidate | None:
        """The fastest plan for this budget, with about as many recomputed blocks as for the rung below."""
        order = self._order
        found = self._faster(None, rung, frozenset(order[: self._count]))
        step = max(1, len(order) // 32 if self._count else len(order) // 4)
        while step > len(order) // _MANY and order and not self._is_fast(found):
            for count in (self._count + step, self._count - step):
                if 0 <= count <= len(order):
                    candidate = self._faster(found, rung, frozenset(order[:count]))
                    if candidate is not found:
                        found, self._count = candidate, count
                        break
            else:
                step //= 2
        if found is None:
            for recomputed in self._some_sets():
                found = self._faster(found, rung, recomputed)
        return found

    def _faster(self, best: Candidate | None, rung: int, recomputed: frozenset[int]) -> Candidate | None:
        """The fastest plan with these blocks, if it is faster than ``best``; else ``best``."""
        lifetimes, hardware = self._lifetimes(recomputed), self._hardware
        everything = self._everything(recomputed)
        if int(least_memory(lifetimes, everything).max(initial=0)) > rung:
            return best
        chosen = places_within(lifetimes, hardware, rung)
        for places in (chosen, everything) if chosen != everything else (chosen,):
            plan = with_loads(lifetimes, places, hardware, rung)
            limit_s = math.inf if best is None else best.outcome.step_s
            if (found := within(lifetimes, plan, hardware, rung, limit_s)) is not None:
                best = Candidate(replace(found[0], capacity_nbytes=rung), found[1])
            if self._is_fast(best):
                break
        return best


def _order(profile: Profile) -> tuple[int, ...]:
    """Regions of blocks in the order in which they are recomputed: by worth, and evenly spread."""
    blocks = {block.region: block for block in profile.blocks}
    nbytes = Counter[int]()
    for slot in profile.slots:
        block = blocks.get(slot.key.region)
        if block is not None and slot.storage not in block.inputs and not slot.held:
            nbytes[block.region] += slot.nbytes
    useful = [block for block in profile.blocks if nbytes[block.region]]

    def worth(block: BlockCall) -> float:
        time_s = sum(o.time_s for o in profile.operators[slice(*block.forward)])
        return float(f"{nbytes[block.region] / max(time_s, 1e-9):.1e}")

    spread = {block.region: _radical_inverse(i) for i, block in enumerate(useful)}
    return tuple(b.region for b in sorted(useful, key=lambda b: (-worth(b), spread[b.region])))


def _radical_inverse(number: int) -> float:
    """The bits mirrored at the point: 0, 1/2, 1/4, 3/4, ... (van der Corput), evenly spread prefixes."""
    return int(f"{number:b}"[::-1], 2) / (1 << max(1, number.bit_length()))


# --- policies ----------------------------------------------------------------------------------------

#: What decides about activations: profile, hardware and capacity (bytes; None: any) give a plan.
Policy = Callable[[Profile, Hardware, int | None], ActivationPlan]


def plan(profile: Profile, hardware: Hardware, capacity_nbytes: int | None = None) -> ActivationPlan:
    """The fastest plan that was found within the budget; without one, the lowest peak for 3 % of the step.

    The plan's ``capacity_nbytes`` is the rung of the ladder that it was made for, at most the budget: see
    [Note: one ladder for every budget].

    Raises:
        BudgetError: No plan keeps the budget; says the smallest that can be kept, and what holds it there.
    """
    search = PlanSearch(profile, hardware)
    if capacity_nbytes is None:
        return search.without_slowdown().plan
    if search.keep.outcome.peak_nbytes <= capacity_nbytes:
        return replace(search.keep.plan, capacity_nbytes=capacity_nbytes)
    if search.smallest_budget() > capacity_nbytes:
        raise budget_error(profile, hardware, capacity_nbytes)
    candidates = search.frontier(capacity_nbytes)
    return min(
        candidates, key=lambda c: (c.outcome.step_s, c.outcome.nbytes_stored, c.outcome.peak_nbytes)
    ).plan


def _uniform(
    policy: str, profile: Profile, hardware: Hardware, capacity_nbytes: int | None = None
) -> ActivationPlan:
    """The plan that recomputes every block, or stores on NVMe what regions save up to one's last."""
    again = frozenset(block.region for block in profile.blocks if policy == "recompute")
    lifetimes, last = lifetimes_of(profile, again), -1.0
    if policy == "offload":  # backward begins with the last block: what that saves stays, as in training
        last = max((block.region - 1 for block in profile.blocks), default=math.inf)
    elif policy == "adaptive":
        last = _last_in_time(profile, lifetimes, hardware)
    periods = enumerate(lifetimes.periods)
    places = {i: Place.NVME for i, period in periods if period.is_worth_storing and period.key.region <= last}
    made = with_loads(lifetimes, places, hardware, capacity_nbytes, policy)
    if capacity_nbytes is not None:
        found = within(lifetimes, made, hardware, capacity_nbytes)
        if found is None:
            needed_nbytes = Simulator(lifetimes, made, hardware).run().peak_nbytes
            raise budget_error(profile, hardware, capacity_nbytes, policy, needed_nbytes)
        made, _ = found
    return replace(made, capacity_nbytes=capacity_nbytes)


def _last_in_time(profile: Profile, lifetimes: Lifetimes, hardware: Hardware) -> int:
    """The last block such that everything before it is written before its backward, and it is back by then.

    So compute never waits for the drive. -1: there is none.

    Source: SSDTrain (arXiv:2408.10013), section 3.3.3.
    """
    timelines = channel_timelines(lifetimes.times, hardware, lifetimes.traffic.values())
    writes, reads = timelines[Channel.NVME_WRITE], timelines[Channel.NVME_READ]
    written, last = 0, -1
    for block in sorted(profile.blocks, key=lambda b: b.region):
        own = [p for p in lifetimes.periods if p.key.region == block.region and p.can_leave]
        begins = block.backward[0]
        for period in sorted(own, key=lambda p: p.packed_at):
            written = max(written, writes.earliest_end(period.packed_at + 1, period.nbytes))
            writes.book_from(period.packed_at + 1, period.nbytes)
        nbytes, until = sum(period.nbytes for period in own) + reads.latency_nbytes, reads.until()
        if written > begins or until[begins] - until[written] < nbytes:
            break
        last = block.region
    return last


#: By the name that a recipe gives.
POLICIES: dict[str, Policy] = {
    name: partial(_uniform, name) for name in ("keep", "offload", "recompute", "adaptive")
} | {"plan": plan}


# --- budgets that cannot be kept ---------------------------------------------------------------------


def smallest_budget(profile: Profile, hardware: Hardware) -> int:
    """Bytes of the smallest budget that :func:`plan` keeps, however slowly."""
    return PlanSearch(profile, hardware).smallest_budget()


def budget_error(
    profile: Profile, hardware: Hardware, capacity_nbytes: int, policy: str = "plan",
    needed_nbytes: int | None = None,
) -> BudgetError:  # fmt: skip
    """Describe why ``policy`` does not keep a budget; ``needed_nbytes`` is what it takes instead."""
    least = smallest_budget(profile, hardware)
    wanted = _in_bytes(capacity_nbytes)
    if needed_nbytes is not None and least <= capacity_nbytes:
        return BudgetError(
            f"activations: {policy} takes {_in_bytes(needed_nbytes)}, but the budget for what a step makes "
            f"in device memory is {wanted}; activations: plan keeps it (it can go down to {_in_bytes(least)})"
        )
    return BudgetError(
        f"no plan keeps what a step makes in device memory within {wanted}; the smallest budget that can be "
        f"kept is {_in_bytes(least)}, because of {_fullest_operator(profile, hardware)}. Raise the budget to "
        "that, or make micro-batches or sequences smaller"
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
    """Describe why no plan keeps what the least of units, ``units_nbytes``, leaves of ``memory.device``.

    ``logits`` is how ``memory.logits=auto`` had them computed.
    """
    least = smallest_budget(profile, hardware)
    return BudgetError(
        f"memory.device is {format_nbytes(device_nbytes)}; at least {_in_bytes(units_nbytes + least)} is "
        f"required: {format_nbytes(units_nbytes)} for units, and {format_nbytes(least)} for what a step "
        "makes beside them, however its activations are planned, because of "
        f"{_fullest_operator(profile, hardware)}. Raise memory.device{_LOGITS[logits]}, or make "
        "micro-batches or sequences smaller"
    )


def _fullest_operator(profile: Profile, hardware: Hardware) -> str:
    """The operator that takes the most even if all storages leave that can, and its largest storages."""
    lifetimes, memory = PlanSearch(profile, hardware).lowest()
    at = int(np.argmax(memory))
    operator = int(lifetimes.operators[at])
    gone = {p.key for p in lifetimes.periods if p.can_leave and p.begin <= at < p.end}
    away = {slot.storage for slot in profile.slots if slot.key in gone}
    there = [
        storage
        for index, storage in enumerate(profile.storages)
        if storage.kind in MADE and storage.born <= operator <= storage.dies and index not in away
    ]
    there.sort(key=lambda storage: -storage.nbytes)
    largest = ", ".join(f"{storage.name} {format_nbytes(storage.nbytes)}" for storage in there[:3])
    again = "recomputation before " if operator in lifetimes.operators[at + 1 :] else ""
    where = f"in {profile.operators[operator].phase}, outside blocks"
    for block in profile.blocks:
        for phase, (first, end) in (("forward", block.forward), ("backward", block.backward)):
            if first <= operator < end:
                where = f"in the {phase} of {block.name}"
    name = profile.operators[operator].name
    return f"{again}operator {operator} ({name}) {where}, where the largest are {largest}"


def _in_bytes(nbytes: int) -> str:
    return f"{format_nbytes(nbytes)} ({nbytes} bytes)"
