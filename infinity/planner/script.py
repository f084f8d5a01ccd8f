"""A step as it runs when some blocks are computed again: what every plan for these blocks starts from.

[Note: which key a storage has]
A plan names a saved storage by its region and its number there. A recomputed block packs only its inputs,
so numbers there are those of the inputs, without the ones that an earlier region packed. Where that moves
a storage into a region that does not recompute, the numbers of that region are not known before it
has run: its storages are then kept, and nothing is named by them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from infinity.core.profile import Block, Phase, Profile, Slot, SlotKey, Traffic
from infinity.planner.lifetimes import MADE, memory, operator_times


@dataclass(frozen=True, slots=True)
class Saved:
    """A storage that autograd saves; positions are those of the script.

    Attributes:
        free_at: The first position at which its memory is free if it could be stored in no time.
        packed_at: After this position it may be stored.
        needed_at: The first position of backward that needs it.
        released_at: The last one.
        is_freed: Storing it frees memory: it is the step's own, and no other code holds it.
        can_leave: That is so, and a plan can name it.
        is_named: Its key is known.
    """

    key: SlotKey
    nbytes: int
    packed_at: int
    free_at: int
    needed_at: int
    released_at: int
    is_freed: bool
    can_leave: bool
    is_named: bool


@dataclass(frozen=True, slots=True)
class Recomputation:
    """A block that runs its forward again.

    Attributes:
        times: Seconds of each of its operators.
        memory: Bytes of what the step makes, during each of them, when nothing is stored.
    """

    block: Block
    times: np.ndarray
    memory: np.ndarray


@dataclass(frozen=True, slots=True)
class Script:
    """Positions are operators, with one more in front of the backward of each recomputed block.

    Attributes:
        times: Seconds of each position.
        until_s: Seconds before each position, and of all of them.
        memory: Bytes of what the step makes, during each position, when nothing is stored; at the fullest
            operator of a recomputation.
        saved: In the order of need.
        backward: The first position of backward, recomputations included.
        traffic: Bytes that units read and write, by position.
        operators: The operator of each position; of a recomputation, the one before which it runs.
        again: What is computed again, by position.
    """

    times: np.ndarray
    until_s: list[float]
    memory: np.ndarray
    saved: tuple[Saved, ...]
    backward: int
    traffic: dict[int, tuple[int, int]]
    operators: np.ndarray
    again: Mapping[int, Recomputation]

    @property
    def recompute_s(self) -> float:
        """What recomputation costs in all (s)."""
        return float(sum(self.times[at] for at in self.again))

    def units(self) -> list[Traffic]:
        """What units move, at the script's positions."""
        return [Traffic(at, read, written) for at, (read, written) in self.traffic.items()]


def script_of(profile: Profile, recomputed: frozenset[int] = frozenset()) -> Script:
    """The step with the blocks of these regions computed again in backward."""
    return _Writer(profile, recomputed).write()


@dataclass(slots=True)
class _Packing:
    """A slot as the executor packs it; positions are operators."""

    slot: Slot
    is_named: bool
    needed_by: list[int]  # first operators of the backward of recomputed blocks


class _Writer:
    """Follows the regions in order: what each one packs, and under which key."""

    def __init__(self, profile: Profile, recomputed: frozenset[int]) -> None:
        self._profile = profile
        self._blocks = sorted(
            (block for block in profile.blocks if block.region in recomputed), key=lambda block: block.region
        )
        self._slots = {slot.storage: slot for slot in profile.slots}
        self._packed: dict[int, _Packing] = {}
        self._dropped: list[tuple[Slot, Block]] = []
        self._twice: list[tuple[Slot, Block]] = []  # these come a second time with their block
        self._forward_end = next(
            (k for k, o in enumerate(profile.operators) if o.phase is not Phase.FORWARD),
            len(profile.operators),
        )
        self._last_use = self._last_uses()

    def write(self) -> Script:
        self._pack_all()
        profile = self._profile
        starts = sorted(block.backward[0] for block in self._blocks)
        # The position of operator k is k plus the recomputations up to it.
        shift = np.searchsorted(np.array(starts, dtype=np.int64), np.arange(len(profile.operators)), "right")
        position = np.arange(len(profile.operators)) + shift
        length = len(profile.operators) + len(starts)
        operators = np.zeros(length, dtype=np.int64)
        operators[position] = np.arange(len(profile.operators))
        of_operators = operator_times(profile)
        times = np.zeros(length)
        times[position] = of_operators
        resident = np.zeros(length, dtype=np.int64)
        resident[position] = self._memory()
        again = {}
        for block in self._blocks:  # the first one's recomputation is the last one before its operator
            at = int(position[block.backward[0]]) - 1
            while at in again:
                at -= 1
            work = of_operators[slice(*block.forward)]
            again[at] = Recomputation(block, work, self._memory_again(block, resident[at + 1]))
            operators[at], times[at] = block.backward[0], work.sum()
            resident[at] = again[at].memory.max(initial=0)
        return Script(
            times=times,
            until_s=[0.0, *np.cumsum(times).tolist()],
            memory=resident,
            saved=tuple(sorted(self._saved(position, again), key=lambda s: (s.needed_at, s.key))),
            backward=int(position[self._forward_end - 1]) + 1 if self._forward_end else 0,
            traffic={int(position[k]): moved for k, moved in self._traffic().items()},
            operators=operators,
            again=again,
        )

    def _last_uses(self) -> dict[int, int]:
        """The last operator of forward that touches each storage."""
        found = {}
        for k, operator in enumerate(self._profile.operators[: self._forward_end]):
            for storage in (*operator.inputs, *operator.outputs):
                found[storage] = k
        return found

    def _pack_all(self) -> None:
        by_region: dict[int, list[Slot]] = {}
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

    def _pack_inputs(self, block: Block) -> None:
        ordinal = 0
        for storage in block.inputs:
            if storage not in self._packed:
                key = SlotKey(block.region, ordinal)
                self._packed[storage] = _Packing(self._input_slot(storage, key, block), True, [])
                ordinal += 1
            self._packed[storage].needed_by.append(block.backward[0])

    def _input_slot(self, storage: int, key: SlotKey, block: Block) -> Slot:
        use, first = self._profile.storages[storage], block.backward[0]
        was_there = use.kind not in MADE
        packed_at = max(block.forward[0] - 1, 0)
        if storage in self._slots:
            slot = self._slots[storage]
            return replace(slot, key=key, packed_at=packed_at, held=slot.held or was_there)
        return Slot(key, storage, use.nbytes, packed_at, first, first, was_there)

    def _drop(self, block: Block, slots: list[Slot]) -> None:
        for slot in slots:
            if slot.storage in block.inputs:
                continue
            if slot.held or slot.unpacked_at < block.backward[0] or slot.released_at >= block.backward[1]:
                self._twice.append((slot, block))
            else:
                self._dropped.append((slot, block))

    def _pack_saved(self, region: int, slots: list[Slot]) -> None:
        moved = any(slot.storage in self._packed for slot in slots) or self._packs_again(region)
        for slot in slots:
            if slot.storage not in self._packed:
                self._packed[slot.storage] = _Packing(slot, not moved, [])

    def _packs_again(self, region: int) -> bool:
        """May the region pack what a recomputed block before it would have packed?"""
        twice = {slot.storage for slot, _ in self._twice} - self._packed.keys()
        return any(
            operator.region == region and twice.intersection((*operator.inputs, *operator.outputs))
            for operator in (self._profile.operators[: self._forward_end] if twice else ())
        )

    def _memory(self) -> np.ndarray:
        """By operator, when nothing is stored."""
        resident = memory(self._profile)
        counted = self._profile.storages
        for slot, block in self._dropped:
            gone = max(self._last_use.get(slot.storage, 0), counted[slot.storage].born) + 1
            if counted[slot.storage].kind in MADE and gone < block.backward[0]:
                resident[gone : block.backward[0]] -= slot.nbytes
        for slot, block in self._twice:
            if counted[slot.storage].kind in MADE:
                resident[slice(*block.backward)] += slot.nbytes
        for storage, packing in self._packed.items():
            if counted[storage].kind in MADE and packing.needed_by:
                resident[counted[storage].dies + 1 : max(packing.needed_by) + 1] += counted[storage].nbytes
        return resident

    def _memory_again(self, block: Block, following: int) -> np.ndarray:
        """While the block's forward runs again: its slots are there, and its working storages as well."""
        storages = self._profile.storages
        begin, end = block.forward
        fresh = sum(s.nbytes for s in storages if s.kind in MADE and s.born == block.backward[0])
        slots = {slot.storage for slot, dropped in (*self._dropped, *self._twice) if dropped is block}
        working = np.zeros(end - begin + 1, dtype=np.int64)
        for index in self._made_in(block):
            if index not in slots and storages[index].kind in MADE:
                working[storages[index].born - begin] += storages[index].nbytes
                working[min(storages[index].dies + 1, end) - begin] -= storages[index].nbytes
        return np.asarray(following - fresh + np.cumsum(working[:-1]))

    def _made_in(self, block: Block) -> Iterator[int]:
        begin, end = block.forward
        for index, storage in enumerate(self._profile.storages):
            if begin <= storage.born < end:
                yield index

    def _saved(self, position: np.ndarray, again: Mapping[int, Recomputation]) -> Iterator[Saved]:
        first = {recomputation.block.backward[0]: at for at, recomputation in again.items()}
        for storage, packing in self._packed.items():
            slot, use = packing.slot, self._profile.storages[storage]
            packed_at = max(slot.packed_at, use.born)
            free_at = max(packed_at, self._last_use.get(storage, 0)) + 1
            asked = [first[k] for k in packing.needed_by]
            needed = min([int(position[slot.unpacked_at]), *asked])
            is_freed = not slot.held and use.kind in MADE and int(position[packed_at]) < needed
            can_leave = is_freed and packing.is_named and slot.nbytes > 0
            yield Saved(
                key=slot.key,
                nbytes=slot.nbytes,
                packed_at=int(position[packed_at]),
                free_at=int(position[free_at]) if free_at < len(position) else needed,
                needed_at=needed,
                released_at=max([int(position[slot.released_at]), *asked]),
                is_freed=is_freed,
                can_leave=can_leave and packed_at < self._forward_end,
                is_named=packing.is_named,
            )

    def _traffic(self) -> dict[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        for unit in self._profile.traffic:
            read, written = found.get(unit.at, (0, 0))
            found[unit.at] = read + unit.nbytes_read, written + unit.nbytes_written
        return found
