"""Compute lifetimes and inactive periods of a step's storages, also if some blocks are recomputed.

A lifetime lasts from the operator that makes a storage to the last one that uses it; an inactive period is
the gap between the last use of a saved storage in forward and its first use in backward.

[Note: keys of recomputed blocks]
A plan names a saved storage by its region and its ordinal there. A recomputed block packs only those inputs
that no earlier region packed. Where that moves a storage into a region that is not recomputed, the ordinals
there are unknown before it has run: a plan cannot name its storages, and they are kept.

[Note: kept operators]
Of a recomputed block some operators need not run again: copies of what they make are packed after the block's
inputs, and read where they would run. To tell them apart all of its operators are watched, which takes time.

Source: TeraIO (arXiv:2506.06472), section 2 (active tensors, inactive periods).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from infinity.core.plan import (
    ActivationPlan,
    BlockCall,
    CodedForm,
    Kind,
    OperatorKey,
    Phase,
    Place,
    Profile,
    SlotKey,
    SlotUse,
    Traffic,
)

#: Kinds of storages that the step itself allocates on the device, which an activation budget covers.
MADE = frozenset({Kind.ACTIVATION, Kind.WORKING})
#: What watching takes for each operator of a profile, each time that it runs, with the views between them:
#: 40 to 60 us on a virtual machine. See [Note: kept operators].
WATCHED_S = 5e-5
#: What a copy takes for each byte of what a kept operator makes, there: into memory that is new.
COPIED_S = 2.5e-10
#: Sets of operators that recomputation need not run again.
LEVELS = 16
#: Of more blocks than so many those that run again are spread over each round of so many.
_MANY, _ROUND = 32, 4
#: What starting a store or a load takes of a CPU that also computes, and what reading it takes later, there.
MOVED_S = 2.5e-4


def operator_times(profile: Profile) -> np.ndarray:
    """Return the seconds of each operator, ``(operators,)``; time between operators is spread over them."""
    times = np.array([operator.time_s for operator in profile.operators], dtype=float)
    measured = float(times.sum())
    if measured <= 0:
        return np.full(len(times), profile.step_s / max(len(times), 1))
    return times * (max(profile.step_s, measured) / measured)


def memory(profile: Profile) -> np.ndarray:
    """Return the bytes of the step's own storages during each operator if all stay, ``(operators,)``."""
    change = np.zeros(len(profile.operators) + 1, dtype=np.int64)
    for storage in profile.storages:
        if storage.kind in MADE:
            change[storage.born] += storage.nbytes
            change[storage.dies + 1] -= storage.nbytes
    return np.cumsum(change[:-1])


@dataclass(frozen=True, slots=True)
class InactivePeriod:
    """Describes the gap between a saved storage's last use in forward and its first in backward."""

    key: SlotKey
    nbytes: int
    packed_at: int  # its store may start after this position
    begin: int  # the first position at which its memory is free if the store takes no time
    end: int  # the first position of backward that needs it
    released_at: int  # the last one
    gone_at: int  # the first position after it is given back: a recomputed block's graph holds its inputs
    is_freed: bool  # storing it frees memory: the step allocated it, and no other code holds it
    can_leave: bool  # and a plan can name it
    is_named: bool  # its key is known before the step runs; see [Note: keys of recomputed blocks]
    coded: CodedForm | None = None

    def kept(self, place: Place) -> int:
        """Return the bytes that it takes of device memory while it waits in a place."""
        return self.nbytes if place is Place.KEEP else self.beside(place)

    def beside(self, place: Place) -> int:
        """Return those that it takes beside the storage itself, whatever a later step has in it."""
        if place is not Place.CODED or self.coded is None:
            return 0
        return self.coded.nbytes if self.coded.is_fixed else self.nbytes

    def moved(self, place: Place) -> int:
        """Return the bytes that go to a place and come back."""
        return self.coded.nbytes if place.is_coded and self.coded is not None else self.nbytes

    @property
    def is_worth_storing(self) -> bool:
        return self.can_leave and self.begin < self.end


class Recomputation(NamedTuple):
    """Marks the positions ``[begin, end)`` in which a block runs its forward again."""

    block: BlockCall
    begin: int
    end: int


@dataclass(frozen=True)
class Lifetimes:
    """Describes a step by position: its operators, with recomputed forwards in front of their backwards."""

    times: np.ndarray  # seconds
    until_s: list[float]  # before each position, and of the whole step
    memory: np.ndarray  # bytes of the step's own storages if nothing is stored
    periods: tuple[InactivePeriod, ...]  # in the order in which backward needs the storages
    backward: int  # the first position of backward, recomputations included
    traffic: Mapping[int, Traffic]
    operators: np.ndarray  # the operator of a position; of a recomputation, the one before which it runs
    recomputations: tuple[Recomputation, ...]
    kept: Mapping[OperatorKey, int]  # operators of recomputed blocks that do not run again, as in a plan
    padding_nbytes: int

    @cached_property
    def index(self) -> dict[SlotKey, int]:
        return {period.key: i for i, period in enumerate(self.periods) if period.is_named}


#: Where storages go, by index of their inactive period.
Places = Mapping[int, Place]


def least_memory(
    lifetimes: Lifetimes, places: Places, loads: Mapping[int, int] = MappingProxyType({})
) -> np.ndarray:
    """Return bytes by position if the storages of ``places`` were stored in no time.

    ``loads``: positions at which loads start; those of other storages start when they are needed.
    """
    change = np.zeros(len(lifetimes.memory) + 1, dtype=np.int64)
    for index, place in places.items():
        period = lifetimes.periods[index]
        if period.begin < period.end:
            beside = period.beside(place)
            change[period.begin] += beside - period.nbytes
            start = max(period.begin, loads.get(index, period.end))
            change[start] += period.nbytes + lifetimes.padding_nbytes
            change[period.released_at + 1] -= lifetimes.padding_nbytes + period.nbytes
            change[period.gone_at] += period.nbytes - beside
    return lifetimes.memory + np.cumsum(change[:-1])


class ProfileIndex:
    """Looks up in a profile what lifetimes need, whatever is recomputed."""

    def __init__(self, profile: Profile) -> None:
        self.profile, self.times, self.memory = profile, operator_times(profile), memory(profile)
        self.slots = {slot.storage: slot for slot in profile.slots}
        phases = [operator.phase for operator in profile.operators]
        self.forward_end = next((k for k, p in enumerate(phases) if p is not Phase.FORWARD), len(phases))
        self.last_use: dict[int, int] = {}  # the last operator of forward that touches a storage
        self.touched: defaultdict[int, set[int]] = defaultdict(set)  # storages that a region's operators do
        self.operators: dict[OperatorKey, int] = {}  # of forward
        named = Counter[tuple[int, str]]()
        for k, operator in enumerate(profile.operators[: self.forward_end]):
            storages = (*operator.inputs, *operator.outputs)
            self.last_use.update(dict.fromkeys(storages, k))
            self.touched[operator.region].update(storages)
            name = operator.region, operator.name
            self.operators[OperatorKey(*name, named[name])] = k
            named[name] += 1
        self.born: defaultdict[int, list[int]] = defaultdict(list)  # storages that the step allocates there
        for index, storage in enumerate(profile.storages):
            if storage.kind in MADE:
                self.born[storage.born].append(index)
        self.lifetimes = lru_cache(maxsize=8)(self._lifetimes)

    def may_stay(self, k: int) -> bool:
        """Return whether a copy of what operator ``k`` makes can be saved in place of running it again."""
        operator, storages = self.profile.operators[k], self.profile.storages
        own = all(storages[s].kind in MADE and storages[s].born == k for s in operator.outputs)
        return operator.may_stay and own and bool(operator.inputs and operator.outputs)

    def nbytes_of(self, k: int) -> int:
        """Return the bytes of the storages that operator ``k`` makes."""
        return sum(self.profile.storages[s].nbytes for s in self.profile.operators[k].outputs)

    def again(self, plan: ActivationPlan) -> tuple[frozenset[int], frozenset[int]]:
        """Return what :meth:`lifetimes` takes: what a plan recomputes, all of whose operators are known."""
        return plan.recomputed, frozenset(self.operators[key] for key in plan.kept)

    def _lifetimes(self, recomputed: frozenset[int], kept: frozenset[int] = frozenset()) -> Lifetimes:
        """Return the lifetimes of the step that recomputes blocks, but for operators that are ``kept``."""
        profile = self.profile
        blocks = [block for block in profile.blocks if block.region in recomputed]
        kept = frozenset(k for k in kept if profile.operators[k].region in recomputed)
        packing = _Packing(self, blocks, kept)
        blocks.sort(key=lambda block: block.backward[0])
        starts = np.array([block.backward[0] for block in blocks], dtype=np.int64)
        lengths = np.array([block.again[1] - block.again[0] for block in blocks], dtype=np.int64)
        # Forwards that run again are inserted: the position of each operator.
        inserted, ends = np.repeat(starts, lengths), starts + np.cumsum(lengths)
        operators = np.arange(len(profile.operators))
        position = operators + np.searchsorted(inserted, operators, "right")
        once, stay = self.times.copy(), [*kept]
        for block in blocks:
            once[slice(*block.forward)] += WATCHED_S * bool(packing.kept[block.region])
        twice = once.copy()
        twice[stay] -= self.times[stay]
        once[stay] += [COPIED_S * self.nbytes_of(k) for k in stay]
        again_s = [time_s for block in blocks for time_s in twice[slice(*block.again)]]
        times, there = np.insert(once, inserted, again_s), packing.memory()
        again = [n for block in blocks for n in packing.memory_again(block, there[block.backward[0]])]
        recomputations = tuple(map(Recomputation, blocks, (ends - lengths).tolist(), ends.tolist()))
        traffic: dict[int, Traffic] = {}
        for unit in profile.traffic:
            at = int(position[unit.at])
            read, written = (traffic[at].nbytes_read, traffic[at].nbytes_written) if at in traffic else (0, 0)
            traffic[at] = Traffic(at, read + unit.nbytes_read, written + unit.nbytes_written)
        return Lifetimes(
            times=times,
            until_s=[0.0, *np.cumsum(times).tolist()],
            memory=np.insert(there, inserted, again),
            periods=tuple(sorted(packing.periods(position, recomputations), key=lambda p: (p.end, p.key))),
            backward=int(position[self.forward_end - 1]) + 1 if self.forward_end else 0,
            traffic=traffic,
            operators=np.insert(operators, inserted, inserted),
            recomputations=recomputations,
            kept={key: self.nbytes_of(k) for key, k in self.operators.items() if k in kept},
            padding_nbytes=profile.padding_nbytes,
        )


#: Plans of one profile for several machines share what it says.
index_of = lru_cache(maxsize=1)(ProfileIndex)


def lifetimes_of(profile: Profile, recomputed: frozenset[int] = frozenset()) -> Lifetimes:
    """Return the lifetimes of the profiled step if backward recomputes the blocks of these regions."""
    return index_of(profile).lifetimes(recomputed)


class _Packing:
    """Finds what the tensor cache packs, region by region, if backward recomputes ``blocks``.

    What ``kept`` operators make is packed after a block's inputs.
    """

    def __init__(self, index: ProfileIndex, blocks: Sequence[BlockCall], kept: frozenset[int]) -> None:
        self._index, self._storages = index, index.profile.storages
        #: By region: what operators make that do not run again, with its operator.
        self.kept: dict[int, dict[int, int]] = {block.region: {} for block in blocks}
        #: By storage, or its complement for a copy: its slot; whether its key is known; the blocks that need
        #: it to run again, and from which of their operators on.
        self.packed: dict[int, tuple[SlotUse, bool, list[tuple[BlockCall, int]]]] = {}
        #: Slots that a block does not save any more; those that something else needs, so they are made twice.
        self.dropped: list[tuple[SlotUse, BlockCall]] = []
        self.twice: list[tuple[SlotUse, BlockCall]] = []
        regions: dict[int, list[SlotUse]] = {block.region: [] for block in blocks}
        for slot in sorted(index.profile.slots, key=lambda slot: slot.key):
            regions.setdefault(slot.key.region, []).append(slot)
        recomputed = {block.region: block for block in blocks}
        for k in sorted(kept):
            operator = index.profile.operators[k]
            if k < recomputed[operator.region].again[1]:
                self.kept[operator.region] |= dict.fromkeys(operator.outputs, k)
        for region, slots in sorted(regions.items()):
            if region in recomputed:
                self._pack_again(recomputed[region], slots)
                continue
            # It may pack a storage that a recomputed block before it would have packed, or one less.
            again = {slot.storage for slot, _ in self.twice} - self.packed.keys()
            moved = any(slot.storage in self.packed for slot in slots)
            moved = moved or not again.isdisjoint(index.touched[region])
            for slot in slots:
                self.packed.setdefault(slot.storage, (slot, not moved, []))

    def _pack_again(self, block: BlockCall, slots: Sequence[SlotUse]) -> None:
        """Pack, in place of its ``slots``, what a recomputed block needs to run again."""
        first, begin, ordinal = block.backward[0], block.forward[0], 0
        needed = [(storage, storage, begin, max(begin - 1, 0)) for storage in block.inputs]
        needed += [(~storage, storage, k, k) for storage, k in self.kept[block.region].items()]
        for name, storage, operator, packed_at in needed:
            if name not in self.packed:
                use, key = self._storages[storage], SlotKey(block.region, ordinal)
                if use.nbytes < self._index.profile.least_nbytes:
                    key = SlotKey(block.region, -1 - storage)
                own = SlotUse(key, storage, use.nbytes, packed_at, first, first, held=False)
                own = self._index.slots.get(name, own)
                held = own.held or use.kind not in MADE
                is_slot = key.ordinal >= 0
                self.packed[name] = replace(own, key=key, packed_at=packed_at, held=held), is_slot, []
                ordinal += is_slot
            self.packed[name][2].append((block, operator - begin))
        for slot in slots:
            if slot.storage not in block.inputs:
                stays = slot.held or slot.unpacked_at < first or slot.released_at >= block.backward[1]
                (self.twice if stays else self.dropped).append((slot, block))

    def memory(self) -> np.ndarray:
        """Return bytes by operator if nothing is stored."""
        resident, storages = self._index.memory.copy(), self._storages
        for slot, block in self.dropped:
            _, _, needed_by = self.packed.get(slot.storage, (None, None, ()))  # as inputs of others
            ends = (of.backward[1] for of, _ in needed_by)
            # Until forward returns, variables may hold it.
            gone = max(self._index.last_use.get(slot.storage, 0) + 1, block.forward[1], *ends)
            if storages[slot.storage].kind in MADE and gone < block.backward[0]:
                resident[gone : block.backward[0]] -= slot.nbytes
        for slot, block in self.twice:
            if storages[slot.storage].kind in MADE:
                resident[slice(*block.backward)] += slot.nbytes
        for name, (slot, _, needed_by) in self.packed.items():
            if storages[slot.storage].kind in MADE and needed_by:
                # The block's graph refers to its inputs. A copy goes while it runs again: `memory_again`.
                begin = storages[name].dies + 1 if name >= 0 else slot.packed_at
                until = max(of.backward[name >= 0] for of, _ in needed_by)
                resident[begin:until] += slot.nbytes
        return resident

    def memory_again(self, block: BlockCall, following: int) -> np.ndarray:
        """Return bytes while the block's forward runs again, with its slots and its working storages."""
        storages, born, (begin, end) = self._storages, self._index.born, block.again
        fresh = sum(storages[index].nbytes for index in born[block.backward[0]])
        slots = {slot.storage for slot, of in (*self.dropped, *self.twice) if of is block}
        kept = self.kept[block.region]
        working = np.zeros(end - begin + 1, dtype=np.int64)
        for at in range(begin, end):
            for index in born[at]:
                working[0 if index in kept else at - begin] += storages[index].nbytes
                # What is among what follows stays; it is not counted before it is made.
                gone = 0 if index in slots else min(storages[index].dies + 1, end) - begin
                working[gone] -= storages[index].nbytes
        return np.asarray(following - fresh + np.cumsum(working[:-1]))

    def periods(
        self, position: np.ndarray, recomputations: Sequence[Recomputation]
    ) -> Iterator[InactivePeriod]:
        first = {again.block.region: again.begin for again in recomputations}
        for storage, (slot, is_named, needed_by) in self.packed.items():
            use, asked = self._storages[slot.storage], [first[of.region] + after for of, after in needed_by]
            packed_at = max(slot.packed_at, use.born)
            free_at = max(packed_at, self._index.last_use.get(storage, 0)) + 1
            needed = min([int(position[slot.unpacked_at]), *asked])
            is_freed = not slot.held and use.kind in MADE and int(position[packed_at]) < needed
            can_leave = is_freed and is_named and slot.nbytes > 0 and packed_at < self._index.forward_end
            released_at = max([int(position[slot.released_at]), *asked])
            ends = [int(position[of.backward[1] - 1]) for of, _ in needed_by if storage >= 0]
            yield InactivePeriod(
                key=slot.key,
                nbytes=slot.nbytes,
                packed_at=int(position[packed_at]),
                begin=int(position[free_at]) if free_at < len(position) else needed,
                end=needed,
                released_at=released_at,
                gone_at=max([released_at, *ends]) + 1,
                is_freed=is_freed,
                can_leave=can_leave,
                is_named=is_named,
                coded=slot.coded,
            )


def recomputation_order(profile: Profile) -> tuple[int, ...]:
    """Return regions of blocks in the order of recomputation: by worth, and evenly spread."""
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

    # The bits of a number mirrored at the point (van der Corput): prefixes of that order are evenly spread.
    # Those of many blocks are so in rounds, the last ones first: a record has few rounds that are equal.
    size = _ROUND if len(useful) > _MANY else max(1, len(useful))
    spread = {
        block.region: (int(f"{i % size:b}"[::-1], 2) / (1 << max(1, (i % size).bit_length())), -i)
        for i, block in enumerate(useful)
    }
    return tuple(b.region for b in sorted(useful, key=lambda b: (-worth(b), spread[b.region])))


def kept_levels(index: ProfileIndex, order: Sequence[int]) -> Iterator[frozenset[int]]:
    """Yield growing sets of operators that need not run again; see [Note: levels] in ``search``.

    Operators of one name whose storages have the same sizes count as equally long: each is measured once.
    """
    profile, blocks = index.profile, {block.region: block for block in index.profile.blocks}
    alike: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for k in (k for region in order for k in range(*blocks[region].again) if index.may_stay(k)):
        operator = profile.operators[k]
        sizes = (
            tuple(profile.storages[s].nbytes for s in each) for each in (operator.inputs, operator.outputs)
        )
        alike[operator.name, *sizes].append(k)
    saves_s = {
        kind: float(np.median(index.times[ks])) - WATCHED_S - COPIED_S * index.nbytes_of(ks[0])
        for kind, ks in alike.items()
    }
    worth = {kind: saves_s[kind] / max(index.nbytes_of(ks[0]), 1) for kind, ks in alike.items()}
    kinds = sorted((kind for kind in alike if saves_s[kind] > WATCHED_S), key=lambda kind: -worth[kind])
    each_s = [(k, saves_s[kind]) for kind in kinds for k in alike[kind]]
    all_s, so_far_s, level = sum(time_s for _, time_s in each_s), 0.0, 1
    kept: set[int] = set()
    for k, time_s in each_s:
        kept.add(k)
        so_far_s += time_s
        if so_far_s >= all_s * (level / LEVELS - 1e-9):
            level = int(so_far_s / all_s * LEVELS + 1e-9) + 1
            yield frozenset(kept)
