"""Lifetimes and inactive periods of one step's storages, also of a step that recomputes some blocks.

A lifetime lasts from the operator that makes a storage to the last one that uses it; an inactive period is
the gap between the last use of a saved storage in forward and its first use in backward.

[Note: keys of recomputed blocks]
A plan names a saved storage by its region and its ordinal there. A recomputed block packs only its inputs,
so ordinals count those inputs, without the ones that an earlier region packed. Where that moves a storage
into a region that does not recompute, the ordinals of that region are unknown before it has run: its
storages are kept, and a plan cannot name them.

Source: TeraIO (arXiv:2506.06472), section 2 (active tensors, inactive periods).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from infinity.core.plan import BlockCall, Kind, Phase, Place, Profile, SlotKey, SlotUse, Traffic

#: Kinds of storages that the step itself allocates on the device, which an activation budget covers.
MADE = frozenset({Kind.ACTIVATION, Kind.WORKING})


def operator_times(profile: Profile) -> np.ndarray:
    """Seconds of each operator, ``(operators,)``; time between operators is spread over them."""
    times = np.array([operator.time_s for operator in profile.operators], dtype=float)
    measured = float(times.sum())
    if measured <= 0:
        return np.full(len(times), profile.step_s / max(len(times), 1))
    return times * (max(profile.step_s, measured) / measured)


def memory(profile: Profile) -> np.ndarray:
    """Bytes that the step's own storages take during each operator if all are kept, ``(operators,)``."""
    change = np.zeros(len(profile.operators) + 1, dtype=np.int64)
    for storage in profile.storages:
        if storage.kind in MADE:
            change[storage.born] += storage.nbytes
            change[storage.dies + 1] -= storage.nbytes
    return np.cumsum(change[:-1])


@dataclass(frozen=True, slots=True)
class InactivePeriod:
    """The gap between forward's last use of a saved storage and backward's first; in positions of the step.

    Attributes:
        key: Name of the storage in a plan, if ``is_named``.
        packed_at: Its store may start after this position.
        begin: First position at which its memory is free if the store takes no time.
        end: First position of backward that needs it.
        released_at: Last position of backward that needs it.
        is_freed: Storing it frees memory: the step allocated it, and no other code holds it.
        can_leave: ``is_freed``, and a plan can name it.
        is_named: Its key is known before the step runs; see [Note: keys of recomputed blocks].
    """

    key: SlotKey
    nbytes: int
    packed_at: int
    begin: int
    end: int
    released_at: int
    is_freed: bool
    can_leave: bool
    is_named: bool

    @property
    def is_worth_storing(self) -> bool:
        """The storage can leave, and at least one position can do without it."""
        return self.can_leave and self.begin < self.end


class Recomputation(NamedTuple):
    """Positions ``[begin, end)`` in which a block runs its forward again."""

    block: BlockCall
    begin: int
    end: int


@dataclass(frozen=True)
class Lifetimes:
    """A step as the planner sees it.

    Positions are operators; a recomputed block's forward has its own in front of the block's backward.

    Attributes:
        times: Seconds of each position.
        until_s: Seconds before each position, and of the whole step.
        memory: Bytes of the step's own storages during each position if nothing is stored.
        periods: Inactive periods of saved storages, in the order in which backward needs them.
        backward: First position of backward, recomputations included.
        traffic: Bytes that units read and write, by position.
        operators: Operator of each position; of a recomputation, the one before which it runs.
        recomputations: In the order of positions.
        padding_nbytes: What a storage takes beyond its size once it has been loaded.
    """

    times: np.ndarray
    until_s: list[float]
    memory: np.ndarray
    periods: tuple[InactivePeriod, ...]
    backward: int
    traffic: Mapping[int, Traffic]
    operators: np.ndarray
    recomputations: tuple[Recomputation, ...]
    padding_nbytes: int

    @cached_property
    def index(self) -> dict[SlotKey, int]:
        """Index in ``periods`` of each storage that a plan can name."""
        return {period.key: i for i, period in enumerate(self.periods) if period.is_named}

    @property
    def recomputed(self) -> frozenset[int]:
        """Regions of the recomputed blocks."""
        return frozenset(again.block.region for again in self.recomputations)


#: Where storages go, by index of their inactive period.
Places = Mapping[int, Place]


def least_memory(lifetimes: Lifetimes, places: Places) -> np.ndarray:
    """Bytes by position if every store took no time and every load started when it is needed."""
    change = np.zeros(len(lifetimes.memory) + 1, dtype=np.int64)
    for index in places:
        period = lifetimes.periods[index]
        if period.begin < period.end:
            change[period.begin] -= period.nbytes
            change[period.end] += period.nbytes + lifetimes.padding_nbytes
            change[period.released_at + 1] -= lifetimes.padding_nbytes
    return lifetimes.memory + np.cumsum(change[:-1])


class ProfileIndex:
    """Lookups in a profile that :func:`lifetimes_of` needs, whatever is recomputed.

    Attributes:
        forward_end: The first operator after forward.
        last_use: By storage: the last operator of forward that touches it.
        touched: By region: the storages that its operators touch.
        born: By operator: the storages that the step itself allocates there.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.times = operator_times(profile)
        self.memory = memory(profile)
        self.slots = {slot.storage: slot for slot in profile.slots}
        self.forward_end = next(
            (k for k, o in enumerate(profile.operators) if o.phase is not Phase.FORWARD),
            len(profile.operators),
        )
        self.last_use: dict[int, int] = {}
        self.touched: defaultdict[int, set[int]] = defaultdict(set)
        for k, operator in enumerate(profile.operators[: self.forward_end]):
            storages = (*operator.inputs, *operator.outputs)
            self.last_use.update(dict.fromkeys(storages, k))
            self.touched[operator.region].update(storages)
        self.born: defaultdict[int, list[int]] = defaultdict(list)
        for index, storage in enumerate(profile.storages):
            if storage.kind in MADE:
                self.born[storage.born].append(index)


def lifetimes_of(
    profile: Profile, recomputed: frozenset[int] = frozenset(), index: ProfileIndex | None = None
) -> Lifetimes:
    """Lifetimes of the profiled step if backward recomputes the blocks of the regions ``recomputed``.

    Args:
        index: The index of the profile, for callers that ask for many lifetimes.
    """
    return _Builder(index or ProfileIndex(profile), recomputed).build()


@dataclass(slots=True)
class _Packing:
    """A slot as the tensor cache packs it; positions are operators."""

    slot: SlotUse
    is_named: bool
    needed_by: list[int]  # first operators of the backward of recomputed blocks


class _Builder:
    """Follows the regions in order: the storages that each one packs, and their keys."""

    def __init__(self, index: ProfileIndex, recomputed: frozenset[int]) -> None:
        self._index, self._profile = index, index.profile
        profile = index.profile
        self._blocks = sorted(
            (block for block in profile.blocks if block.region in recomputed), key=lambda block: block.region
        )
        self._slots, self._last_use, self._forward_end = index.slots, index.last_use, index.forward_end
        self._packed: dict[int, _Packing] = {}
        self._dropped: list[tuple[SlotUse, BlockCall]] = []
        self._again: defaultdict[int, set[int]] = defaultdict(set)  # storages that a block's slots have
        self._twice: list[tuple[SlotUse, BlockCall]] = []  # made a second time when their block runs again

    def build(self) -> Lifetimes:
        self._pack_all()
        profile, index = self._profile, self._index
        operators, memory = np.arange(len(profile.operators)), self._memory()
        blocks = sorted(self._blocks, key=lambda block: block.backward[0])
        starts, lengths = (
            np.array(numbers, dtype=np.int64)
            for numbers in ([b.backward[0] for b in blocks], [b.forward[1] - b.forward[0] for b in blocks])
        )
        inserted, ends = np.repeat(starts, lengths), starts + np.cumsum(lengths)
        position = operators + np.searchsorted(inserted, operators, "right")
        recomputations = tuple(map(Recomputation, blocks, (ends - lengths).tolist(), ends.tolist()))
        again_s = [time_s for block in blocks for time_s in index.times[slice(*block.forward)]]
        times = np.insert(index.times, inserted, again_s)
        again = [n for block in blocks for n in self._memory_again(block, memory[block.backward[0]])]
        periods = sorted(self._periods(position, recomputations), key=lambda p: (p.end, p.key))
        return Lifetimes(
            times=times,
            until_s=[0.0, *np.cumsum(times).tolist()],
            memory=np.insert(memory, inserted, again),
            periods=tuple(periods),
            backward=int(position[self._forward_end - 1]) + 1 if self._forward_end else 0,
            traffic=self._traffic(position),
            operators=np.insert(operators, inserted, inserted),
            recomputations=recomputations,
            padding_nbytes=profile.padding_nbytes,
        )

    # --- packing -----------------------------------------------------------------------------

    def _pack_all(self) -> None:
        by_region: dict[int, list[SlotUse]] = {}
        for slot in self._profile.slots:
            by_region.setdefault(slot.key.region, []).append(slot)
        blocks = {block.region: block for block in self._blocks}
        for region in sorted(by_region.keys() | blocks.keys()):
            slots = sorted(by_region.get(region, ()), key=lambda slot: slot.key)
            if region in blocks:
                self._pack_inputs(blocks[region])
                self._drop(blocks[region], slots)
            else:
                self._pack_saved(region, slots)

    def _pack_inputs(self, block: BlockCall) -> None:
        ordinal = 0
        for storage in block.inputs:
            if storage not in self._packed:
                key = SlotKey(block.region, ordinal)
                self._packed[storage] = _Packing(self._input_slot(storage, key, block), True, [])
                ordinal += 1
            self._packed[storage].needed_by.append(block.backward[0])

    def _input_slot(self, storage: int, key: SlotKey, block: BlockCall) -> SlotUse:
        use, first = self._profile.storages[storage], block.backward[0]
        was_there = use.kind not in MADE
        packed_at = max(block.forward[0] - 1, 0)
        if storage in self._slots:
            slot = self._slots[storage]
            return replace(slot, key=key, packed_at=packed_at, held=slot.held or was_there)
        return SlotUse(key, storage, use.nbytes, packed_at, first, first, was_there)

    def _drop(self, block: BlockCall, slots: list[SlotUse]) -> None:
        for slot in slots:
            if slot.storage in block.inputs:
                continue
            self._again[block.region].add(slot.storage)
            if slot.held or slot.unpacked_at < block.backward[0] or slot.released_at >= block.backward[1]:
                self._twice.append((slot, block))
            else:
                self._dropped.append((slot, block))

    def _pack_saved(self, region: int, slots: list[SlotUse]) -> None:
        moved = any(slot.storage in self._packed for slot in slots) or self._packs_again(region)
        for slot in slots:
            if slot.storage not in self._packed:
                self._packed[slot.storage] = _Packing(slot, not moved, [])

    def _packs_again(self, region: int) -> bool:
        """Whether the region may pack a storage that a recomputed block before it would have packed."""
        twice = {slot.storage for slot, _ in self._twice} - self._packed.keys()
        return not twice.isdisjoint(self._index.touched[region])

    # --- memory, periods, traffic ------------------------------------------------------------

    def _memory(self) -> np.ndarray:
        """Bytes by operator if nothing is stored."""
        resident = self._index.memory.copy()
        storages = self._profile.storages
        for slot, block in self._dropped:
            gone = max(self._last_use.get(slot.storage, 0), storages[slot.storage].born) + 1
            if storages[slot.storage].kind in MADE and gone < block.backward[0]:
                resident[gone : block.backward[0]] -= slot.nbytes
        for slot, block in self._twice:
            if storages[slot.storage].kind in MADE:
                resident[slice(*block.backward)] += slot.nbytes
        for storage, packing in self._packed.items():
            if storages[storage].kind in MADE and packing.needed_by:
                resident[storages[storage].dies + 1 : max(packing.needed_by) + 1] += storages[storage].nbytes
        return resident

    def _memory_again(self, block: BlockCall, following: int) -> np.ndarray:
        """Bytes while the block's forward runs again, with its slots and its working storages."""
        storages = self._profile.storages
        begin, end = block.forward
        fresh = sum(storages[index].nbytes for index in self._index.born[block.backward[0]])
        slots = self._again[block.region]
        working = np.zeros(end - begin + 1, dtype=np.int64)
        for at in range(begin, end):
            for index in self._index.born[at]:
                if index not in slots:
                    working[at - begin] += storages[index].nbytes
                    working[min(storages[index].dies + 1, end) - begin] -= storages[index].nbytes
        return np.asarray(following - fresh + np.cumsum(working[:-1]))

    def _periods(
        self, position: np.ndarray, recomputations: Sequence[Recomputation]
    ) -> Iterator[InactivePeriod]:
        first = {again.block.backward[0]: again.begin for again in recomputations}
        for storage, packing in self._packed.items():
            slot, use = packing.slot, self._profile.storages[storage]
            packed_at = max(slot.packed_at, use.born)
            free_at = max(packed_at, self._last_use.get(storage, 0)) + 1
            asked = [first[k] for k in packing.needed_by]
            needed = min([int(position[slot.unpacked_at]), *asked])
            is_freed = not slot.held and use.kind in MADE and int(position[packed_at]) < needed
            can_leave = is_freed and packing.is_named and slot.nbytes > 0
            yield InactivePeriod(
                key=slot.key,
                nbytes=slot.nbytes,
                packed_at=int(position[packed_at]),
                begin=int(position[free_at]) if free_at < len(position) else needed,
                end=needed,
                released_at=max([int(position[slot.released_at]), *asked]),
                is_freed=is_freed,
                can_leave=can_leave and packed_at < self._forward_end,
                is_named=packing.is_named,
            )

    def _traffic(self, position: np.ndarray) -> dict[int, Traffic]:
        found: dict[int, Traffic] = {}
        for unit in self._profile.traffic:
            at = int(position[unit.at])
            before = found.get(at, Traffic(at, 0, 0))
            found[at] = Traffic(
                at, before.nbytes_read + unit.nbytes_read, before.nbytes_written + unit.nbytes_written
            )
        return found
