"""Policies that decide what happens to activations: four simple ones, and our own plan.

Each policy is ``policy(profile, hardware, capacity_nbytes) -> ActivationPlan``. A budget that its plan does
not keep is a BudgetError that says what would be enough.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from infinity.core.errors import BudgetError
from infinity.core.nbytes import format_nbytes
from infinity.core.plan import ActivationPlan, Hardware, Place, Profile
from infinity.planner.channels import Channel, channel_timelines
from infinity.planner.lifetimes import MADE, Lifetimes, lifetimes_of
from infinity.planner.migration import Places
from infinity.planner.search import PlanSearch, with_loads, within
from infinity.planner.simulator import Simulator

#: Storages that an error names.
NAMED = 3


def keep_all(profile: Profile, hardware: Hardware, capacity_nbytes: int | None = None) -> ActivationPlan:
    """Keep every saved storage in device memory."""
    return _checked("keep", profile, hardware, capacity_nbytes, lifetimes_of(profile), {})


def recompute_all(profile: Profile, hardware: Hardware, capacity_nbytes: int | None = None) -> ActivationPlan:
    """Run the forward of every block again in backward; only its inputs stay."""
    lifetimes = lifetimes_of(profile, frozenset(block.region for block in profile.blocks))
    return _checked("recompute", profile, hardware, capacity_nbytes, lifetimes, {})


def offload_all(profile: Profile, hardware: Hardware, capacity_nbytes: int | None = None) -> ActivationPlan:
    """Store everything that frees memory on NVMe, and load it just in time.

    As in the runtime, what the last block saves stays, and what comes after it: backward begins with that.
    """
    lifetimes = lifetimes_of(profile)
    last = max((block.region for block in profile.blocks), default=math.inf)
    leaving = {
        i: Place.NVME
        for i, period in enumerate(lifetimes.periods)
        if period.is_worth_storing and period.key.region < last
    }
    return _checked("offload", profile, hardware, capacity_nbytes, lifetimes, leaving)


def adaptive(profile: Profile, hardware: Hardware, capacity_nbytes: int | None = None) -> ActivationPlan:
    """Store as many blocks as NVMe can take, from the first one on, so that compute never waits for it.

    Source: SSDTrain (arXiv:2408.10013), section 3.3.3: the last module such that everything before it is
    written before its backward starts, and it can itself be written and read back by then.
    """
    lifetimes = lifetimes_of(profile)
    last = _last_block(profile, lifetimes, hardware)
    leaving = {
        i: Place.NVME
        for i, period in enumerate(lifetimes.periods)
        if period.is_worth_storing and period.key.region <= last
    }
    return _checked("adaptive", profile, hardware, capacity_nbytes, lifetimes, leaving)


def plan(profile: Profile, hardware: Hardware, capacity_nbytes: int | None = None) -> ActivationPlan:
    """The fastest plan that was found within the budget; without one, the lowest peak for 3 % of the step.

    The plan's ``capacity_nbytes`` is the rung of the ladder that it was made for, at most the budget: see
    [Note: one ladder for every budget] in :mod:`infinity.planner.search`.

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


#: By the name that a recipe gives.
POLICIES: dict[str, Callable[[Profile, Hardware, int | None], ActivationPlan]] = {
    "keep": keep_all,
    "offload": offload_all,
    "recompute": recompute_all,
    "adaptive": adaptive,
    "plan": plan,
}


def _checked(
    policy: str, profile: Profile, hardware: Hardware, capacity_nbytes: int | None, lifetimes: Lifetimes,
    places: Places,
) -> ActivationPlan:  # fmt: skip
    """A plan that stores ``places``; checked against the budget."""
    made = with_loads(lifetimes, places, hardware, capacity_nbytes, policy)
    if capacity_nbytes is not None:
        found = within(lifetimes, made, hardware, capacity_nbytes)
        if found is None:
            needed_nbytes = Simulator(lifetimes, made, hardware).run().peak_nbytes
            raise budget_error(profile, hardware, capacity_nbytes, policy, needed_nbytes)
        made, _ = found
    return replace(made, capacity_nbytes=capacity_nbytes)


def _last_block(profile: Profile, lifetimes: Lifetimes, hardware: Hardware) -> int:
    """Region of the last block that SSDTrain's rule offloads; -1 if it offloads none."""
    timelines = channel_timelines(lifetimes.times, hardware, lifetimes.traffic.values())
    writes, reads = timelines[Channel.NVME_WRITE], timelines[Channel.NVME_READ]
    written, last = 0, -1
    for block in sorted(profile.blocks, key=lambda b: b.region):
        own = [p for p in lifetimes.periods if p.key.region == block.region and p.can_leave]
        own.sort(key=lambda p: p.packed_at)
        before, begins = written, block.backward[0]
        for period in own:
            end = writes.earliest_end(period.packed_at + 1, period.nbytes)
            writes.book_from(period.packed_at + 1, period.nbytes)
            written = len(lifetimes.times) if end is None else max(written, end)
        back = reads.latest_start(begins, sum(period.nbytes for period in own))
        if before > begins or back is None or written > back:
            break
        last = block.region
    return last


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

    Args:
        logits: The way in which ``memory.logits=auto`` had them computed; None: it chose nothing.
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
    largest = ", ".join(f"{storage.name} {format_nbytes(storage.nbytes)}" for storage in there[:NAMED])
    again = "recomputation before " if operator in lifetimes.operators[at + 1 :] else ""
    name = profile.operators[operator].name
    where = _where(profile, operator)
    return f"{again}operator {operator} ({name}) {where}, where the largest are {largest}"


def _where(profile: Profile, operator: int) -> str:
    for block in profile.blocks:
        if block.forward[0] <= operator < block.forward[1]:
            return f"in the forward of {block.name}"
        if block.backward[0] <= operator < block.backward[1]:
            return f"in the backward of {block.name}"
    return f"in {profile.operators[operator].phase}, outside blocks"


def _in_bytes(nbytes: int) -> str:
    return f"{format_nbytes(nbytes)} ({nbytes} bytes)"
