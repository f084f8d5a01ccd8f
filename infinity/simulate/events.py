"""What happens at each operator of a step under a plan, before anything is known of time."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from infinity.core.plan import ActivationPlan, Place
from infinity.core.profile import Profile, SlotKey
from infinity.simulate.saved import MADE, Recomputation, Saved


@dataclass(slots=True)
class Event:
    """What happens at one operator.

    Attributes:
        comes_nbytes: Memory that is taken before it,
        goes_nbytes: and given back after it, for storages that stay or are computed again.
        asks: Slots that backward asks for before it.
        recomputes: Blocks whose forward runs again before it.
        packs: Slots that are packed after it.
        used_up: Slots that forward uses for the last time.
        releases: Slots that backward uses for the last time.
    """

    comes_nbytes: int = 0
    goes_nbytes: int = 0
    asks: list[SlotKey] = field(default_factory=list)
    recomputes: list[Recomputation] = field(default_factory=list)
    packs: list[SlotKey] = field(default_factory=list)
    used_up: list[SlotKey] = field(default_factory=list)
    releases: list[SlotKey] = field(default_factory=list)


def events_of(profile: Profile, plan: ActivationPlan, saved: Saved) -> list[Event]:
    """One for each operator."""
    events = [Event() for _ in profile.operators]
    uses = _uses(profile)
    for slot in saved.slots:
        last = _last_before(slot.unpacked_at, uses[slot.storage], slot.packed_at)
        events[last].used_up.append(slot.key)
        events[slot.packed_at].packs.append(slot.key)
        events[slot.unpacked_at].asks.append(slot.key)
        events[slot.released_at].releases.append(slot.key)
    for recomputation in saved.recomputations:
        events[recomputation.block.backward[0]].recomputes.append(recomputation)
    slots = {slot.storage: slot for slot in saved.slots}
    returns = {s: r.block.backward[0] for r in saved.recomputations for s in r.dropped}
    for index, storage in enumerate(profile.storages):
        if storage.kind not in MADE:
            continue
        events[storage.born].comes_nbytes += storage.nbytes
        mine, back_at = slots.get(index), returns.get(index)
        if back_at is not None:
            events[_last_before(back_at, uses[index], storage.born)].goes_nbytes += storage.nbytes
            events[max(storage.dies, back_at)].goes_nbytes += storage.nbytes
        elif mine is None:
            events[storage.dies].goes_nbytes += storage.nbytes
        elif mine.held or plan.place(mine.key) is Place.KEEP:
            events[max(storage.dies, mine.released_at)].goes_nbytes += storage.nbytes
    return events


def _uses(profile: Profile) -> list[list[int]]:
    """For each storage the operators that touch it, in order."""
    uses: list[list[int]] = [[] for _ in profile.storages]
    for at, operator in enumerate(profile.operators):
        for storage in {*operator.inputs, *operator.outputs}:
            uses[storage].append(at)
    return uses


def _last_before(end: int, uses: Sequence[int], otherwise: int) -> int:
    """The last use before operator ``end``."""
    before = bisect_left(uses, end)
    return uses[before - 1] if before else otherwise
