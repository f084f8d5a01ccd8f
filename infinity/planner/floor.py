"""The smallest budget that can be kept, and what holds it there."""

import numpy as np

from infinity.core.errors import BudgetError
from infinity.core.nbytes import format_nbytes
from infinity.core.plan import Hardware
from infinity.core.profile import Profile
from infinity.planner.frontier import floor_of
from infinity.planner.lifetimes import MADE

#: Storages that an error names.
NAMED = 3


def smallest_budget(profile: Profile, hardware: Hardware) -> int:
    """Bytes of the smallest budget that :func:`infinity.planner.policies.plan` keeps, however slowly."""
    _, memory = floor_of(profile, hardware)
    return int(memory.max(initial=0))


def budget_error(
    profile: Profile,
    hardware: Hardware,
    capacity_nbytes: int,
    policy: str = "plan",
    needed_nbytes: int | None = None,
) -> BudgetError:
    """What to raise when ``policy`` does not keep a budget; ``needed_nbytes`` is what it takes instead."""
    least = smallest_budget(profile, hardware)
    wanted = _both(capacity_nbytes)
    if needed_nbytes is not None and least <= capacity_nbytes:
        return BudgetError(
            f"activations: {policy} takes {_both(needed_nbytes)}, but the budget for what a step makes in "
            f"device memory is {wanted}; activations: plan keeps it (it can go down to {_both(least)})"
        )
    return BudgetError(
        f"no plan keeps what a step makes in device memory within {wanted}; the smallest budget that can be "
        f"kept is {_both(least)}, because of {what_holds(profile, hardware)}. Raise memory.device to that, "
        "or make micro-batches or sequences smaller"
    )


def what_holds(profile: Profile, hardware: Hardware) -> str:
    """The operator that takes the most even if all leave that can, and its largest storages."""
    script, memory = floor_of(profile, hardware)
    at = int(np.argmax(memory))
    operator = int(script.operators[at])
    gone = {s.key for s in script.saved if s.can_leave and s.free_at <= at < s.needed_at}
    away = {slot.storage for slot in profile.slots if slot.key in gone}
    there = [
        storage
        for index, storage in enumerate(profile.storages)
        if storage.kind in MADE and storage.born <= operator <= storage.dies and index not in away
    ]
    there.sort(key=lambda storage: -storage.nbytes)
    largest = ", ".join(f"{storage.name} {format_nbytes(storage.nbytes)}" for storage in there[:NAMED])
    again = "recomputation before " if operator in script.operators[at + 1 :] else ""
    name = profile.operators[operator].name
    return f"{again}operator {operator} ({name}) {_where(profile, operator)}, where the largest are {largest}"


def _where(profile: Profile, operator: int) -> str:
    for block in profile.blocks:
        if block.forward[0] <= operator < block.forward[1]:
            return f"in the forward of {block.name}"
        if block.backward[0] <= operator < block.backward[1]:
            return f"in the backward of {block.name}"
    return f"in {profile.operators[operator].phase}, outside blocks"


def _both(nbytes: int) -> str:
    return f"{format_nbytes(nbytes)} ({nbytes} bytes)"
