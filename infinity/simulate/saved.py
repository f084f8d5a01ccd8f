"""Which storages wait for backward under a plan, and which ones are computed again.

[Note: what a recomputed block leaves]
A recomputed block saves its inputs only, in their order, without those that an earlier region saved, and
asks for all of them before it runs again. Its own slots go after their last use in forward and come back
when its backward begins. One that backward needs before that was saved by another block, too, and stays.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from infinity.core.plan import ActivationPlan
from infinity.core.profile import Block, Kind, Profile, Slot, SlotKey

#: What the step itself makes in memory; units, gradients, states and inputs are there anyway.
MADE = frozenset({Kind.ACTIVATION, Kind.WORKING})


@dataclass(frozen=True, slots=True)
class Recomputation:
    """A block that runs its forward again, and the storages that are gone meanwhile."""

    block: Block
    dropped: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """What autograd saves under a plan: slots in the order of packing, and what is recomputed."""

    slots: tuple[Slot, ...]
    recomputations: tuple[Recomputation, ...]


def saved_under(profile: Profile, plan: ActivationPlan) -> Saved:
    """What the passes under ``plan`` save.

    Raises:
        ValueError: The plan names a slot or a block that the profile lacks.
    """
    blocks = {block.region: block for block in profile.blocks if block.region in plan.recomputed}
    own: dict[int, list[Slot]] = {}
    for slot in profile.slots:
        own.setdefault(slot.key.region, []).append(slot)
    slots: dict[int, Slot] = {}  # by storage
    for region in sorted({*own, *blocks}):
        block = blocks.get(region)
        for slot in own[region] if block is None else _inputs(profile, block, slots):
            slots.setdefault(slot.storage, slot)
    for block in blocks.values():
        _need(slots, block)
    _check(plan, slots, set(blocks))
    recomputations = (
        Recomputation(block, tuple(_dropped(own.get(region, []), block, slots)))
        for region, block in blocks.items()
    )
    return Saved(tuple(sorted(slots.values(), key=lambda s: s.packed_at)), tuple(recomputations))


def _inputs(profile: Profile, block: Block, packed: dict[int, Slot]) -> Iterator[Slot]:
    """The slots of a recomputed block; see [Note: what a recomputed block leaves]."""
    known = {slot.storage: slot for slot in profile.slots if slot.storage in block.inputs}
    packed_at, needed_at = max(0, block.forward[0] - 1), block.backward[0]
    fresh = [storage for storage in dict.fromkeys(block.inputs) if storage not in packed]
    for ordinal, storage in enumerate(fresh):
        key, use = SlotKey(block.region, ordinal), profile.storages[storage]
        if storage in known:
            yield replace(known[storage], key=key, packed_at=packed_at)
        else:
            held = use.kind not in MADE
            yield Slot(key, storage, use.nbytes, packed_at, needed_at, needed_at, held)


def _need(slots: dict[int, Slot], block: Block) -> None:
    """Before ``block`` runs again, all its inputs must be there."""
    at = block.backward[0]
    for storage in block.inputs:
        slot = slots[storage]
        unpacked_at, released_at = min(slot.unpacked_at, at), max(slot.released_at, at)
        slots[storage] = replace(slot, unpacked_at=unpacked_at, released_at=released_at)


def _dropped(own: list[Slot], block: Block, slots: dict[int, Slot]) -> Iterator[int]:
    for slot in own:
        if slot.storage not in slots and not slot.held and slot.unpacked_at >= block.backward[0]:
            yield slot.storage


def _check(plan: ActivationPlan, slots: dict[int, Slot], regions: set[int]) -> None:
    keys = {slot.key for slot in slots.values()}
    named = {*plan.places, *(load.slot for load in plan.loads)}
    if named <= keys and plan.recomputed <= regions:
        return
    lacking = [f"slot {key.region}.{key.ordinal}" for key in sorted(named - keys)]
    lacking += [f"block {region}" for region in sorted(plan.recomputed - regions)]
    raise ValueError(
        f"the plan ({plan.policy}) names {', '.join(lacking[:5])}, which this profile lacks: "
        "it was made for another one. Make a plan of this profile"
    )
