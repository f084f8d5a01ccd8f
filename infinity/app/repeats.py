"""Blocks that are alike: a few of them are recorded, and the record of the whole model is derived.

[Note: what is alike]
Blocks are of one kind if their modules have the same classes, settings and shapes, and the plan recomputes
them alike. What a block leaves in a record also depends on its neighbours, so a block's *place* is its kind
with those of the blocks before and after it. Of every place that repeats some blocks are recorded, at the
beginning, in the middle and at the end of the model; the others are left out.

[Note: left out]
The model's own forward calls every block. One that is left out returns what it was given, after comparing the
call with that of a recorded block of its place: the same tensors, the same settings, no operator between it
and the blocks beside it. So masks that alternate are seen, whoever chooses them.

[Note: derived, and checked]
A record is cut where the forward of a block begins, and where its backward does. Every number in it (an
operator's index, a storage's, an autograd node's, a unit's) is either the block's own or a neighbour's, and
moves with the block, or belongs to the model's beginning or end, and stays. Which of both it is, two recorded
blocks of one place tell, whose records must agree in everything. Where they do not, or where something refers
to blocks in another way (an operator that reads the output of every layer), more blocks are recorded, and in
the end all of them.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from infinity.activations.blocks import NamedBlock, recomputable_blocks
from infinity.activations.profiler import NO_NODE, Call, Life, Recording, RegionMark, SlotMark
from infinity.app.recording import Command, Cut, Do, Record, Recorder, Subject, record
from infinity.core.errors import CheckpointError
from infinity.core.profile import Phase, SlotKey

#: First and last blocks of a place that may differ from the others of it; one is tried after the other.
MARGINS = (0, 1)
#: Quarters of all blocks that are recorded at most, or all are.
_MOST = 3
#: Coordinates of a record, as in :class:`Cut`.
_CALLS, _LIVES, _NODES = 0, 2, 3
_FORWARD, _BACKWARD = 0, 1
#: Autograd gives this number to nodes that accumulate gradients, or larger ones.
_NO_ORDINARY_NODE = 2**62
#: What every module has.
_INTERNAL = frozenset(vars(nn.Module())) | {"forward"}


class UnderivableError(Exception):
    """The record of the whole model does not follow from that of some blocks."""


def record_model(subject: Subject, recomputes: Callable[[int], bool]) -> Record:
    """Record one micro-batch of a model, of blocks that are alike only some.

    Args:
        recomputes: Whether a region runs its forward again.

    Raises:
        CheckpointError: The model's forward depends on values.
    """
    blocks = recomputable_blocks(subject.model)
    kinds = kinds_of(subject.model, blocks, recomputes)
    for margin in MARGINS:
        chosen = choose(kinds, margin)
        if chosen is None:
            continue
        try:
            return _record_some(subject, blocks, chosen, recomputes)
        except UnderivableError:
            continue
    return record(subject, blocks, recomputes)


def _record_some(
    subject: Subject, blocks: Sequence[NamedBlock], chosen: "Chosen", recomputes: Callable[[int], bool]
) -> Record:
    moved = _Moved(subject, blocks, chosen)
    kept = [blocks[at] for at in chosen.kept]
    left_out = [blocks[at].module for at in chosen.sources]
    watch: list[_StandIns] = []

    def watched(recorder: Recorder) -> Any:
        watch.append(_StandIns(blocks, chosen, recorder))
        return watch[0].installed()

    def region_recomputes(region: int) -> bool:
        return recomputes(2 * chosen.kept[region // 2] + 1)

    try:
        made = record(subject, kept, region_recomputes, left_out, watched)
    except CheckpointError as error:  # with all blocks it may do, or says why not
        raise UnderivableError(str(error)) from error
    watch[0].check()
    return replace(moved.derive(made), recomputes=recomputes)


# --- which blocks are recorded -----------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    """Blocks that are recorded, by their position in the model.

    Attributes:
        kept: In order.
        sources: For each other block a recorded one of the same place, which comes before it.
        twins: For each recorded block of a place that others are derived from, another one.
    """

    kept: tuple[int, ...]
    sources: dict[int, int]
    twins: dict[int, int]


def choose(kinds: Sequence[int], margin: int) -> Chosen | None:
    """Choose the fewest blocks from which the others follow; None if all must be recorded.

    Args:
        kinds: Of all blocks.
        margin: First and last blocks of a place that are recorded, and that others do not follow from.
    """
    places = _places(kinds)
    steady = set()
    for found in places.values():
        steady.update(found[margin : len(found) - margin])
    place_of = {at: place for place, found in places.items() for at in found}
    last = len(kinds) - 1

    def joins(before: int, after: int) -> bool:
        """Whether nothing between two blocks is missed: each has the neighbours that it had."""
        beside = kinds[before + 1] == kinds[after] and kinds[after - 1] == kinds[before]
        return beside and {before, after} <= steady

    for total in range(2, 1 + _MOST * len(kinds) // 4):
        for tail in range(1, total):
            first, then = total - tail - 1, last + 1 - tail
            nearest = _from_the_middle(first + 2, then - 1)
            middle = next((at for at in nearest if joins(first, at) and joins(at, then)), None)
            if middle is None and not joins(first, then):
                continue
            kept = [*range(first + 1), *([] if middle is None else [middle]), *range(then, last + 1)]
            chosen = _chosen(kept, place_of, steady)
            if chosen is not None:
                return chosen
    return None


def _from_the_middle(begin: int, end: int) -> Iterator[int]:
    """The numbers in ``[begin, end)``, those in the middle first."""
    middle = (begin + end) // 2
    for distance in range(end - begin + 1):
        yield from (at for at in dict.fromkeys((middle + distance, middle - distance)) if begin <= at < end)


def _places(kinds: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
    padded = [-1, *kinds, -1]
    found: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for at in range(len(kinds)):
        found[tuple(padded[at : at + 3])].append(at)
    return found


def _chosen(kept: Sequence[int], place_of: dict[int, tuple[int, ...]], steady: set[int]) -> Chosen | None:
    samples: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for at in kept:
        if at in steady:
            samples[place_of[at]].append(at)
    sources: dict[int, int] = {}
    needed = {place_of[at] for pair in pairwise(kept) if pair[1] > pair[0] + 1 for at in pair}
    for at in sorted(place_of.keys() - set(kept)):
        before = [sample for sample in samples[place_of[at]] if sample < at]
        if at not in steady or not before:
            return None
        needed.add(place_of[at])
        sources[at] = before[-1]
    if any(len(samples[place]) < 2 for place in needed):
        return None
    twins = {
        at: following for place in needed for at, following in pairwise([*samples[place], samples[place][0]])
    }
    return Chosen(tuple(kept), sources, twins)


def kinds_of(model: nn.Module, blocks: Sequence[NamedBlock], recomputes: Callable[[int], bool]) -> list[int]:
    """Numbers of the blocks' kinds; see [Note: what is alike]."""
    settings = [_settings(block) for block in blocks]
    indices = [_index(block.name) for block in blocks]
    values: defaultdict[object, set[object]] = defaultdict(set)
    for own, index in zip(settings, indices, strict=True):
        for name, value in own.items():
            values[name].add(value - index if type(value) is int else None)
    # a setting that counts the blocks is the same for all
    counting = {name for name, found in values.items() if len(found) == 1 and None not in found}
    for name in counting.copy():
        if len({own[name] for own in settings if name in own}) == 1:
            counting.discard(name)
    counts = Counter(block.name.rpartition(".")[0] for block in blocks)
    known: dict[object, int] = {}
    kinds = []
    for at, (own, block) in enumerate(zip(settings, blocks, strict=True)):
        listed = block.name.rpartition(".")[0]
        kind = (
            frozenset((name, value) for name, value in own.items() if name not in counting),
            listed,
            tuple(_layer_settings(getattr(model, "config", None), counts[listed], indices[at])),
            recomputes(2 * at + 1),
        )
        kinds.append(known.setdefault(kind, len(known)))
    return kinds


def _index(name: str) -> int:
    last = name.rpartition(".")[2]
    return int(last) if last.isdecimal() else 0


def _settings(block: NamedBlock) -> dict[object, object]:
    """Everything that a block's forward may depend on, by name."""
    found: dict[object, object] = {}
    where = ".".join(block.name.split(".")[-2:])
    for name, module in block.module.named_modules(remove_duplicate=False):
        found[name] = type(module)
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for own, tensor in dict.items(tensors):
                facts = None if tensor is None else (tensor.shape, tensor.dtype, tensor.requires_grad)
                found[name, kind, own] = facts
        for own, value in vars(module).items():
            if own not in _INTERNAL:
                found[name, "setting", own] = _hashable(value, where)
        found[name, "training"] = module.training
    return found


def _hashable(value: object, where: str = "") -> object:
    """A setting in a form that can be compared; things of unknown kinds are equal to themselves only.

    Args:
        where: The block's place in the model, which is no difference in a name of one of its modules.
    """
    if isinstance(value, str):
        return str, f"{value}.".replace(f"{where}.", "#.") if where else value
    if isinstance(value, (bool, int, float, bytes, type(None), torch.dtype, torch.device)):
        return value if type(value) is int else (type(value), value)
    if isinstance(value, (list, tuple)):
        return type(value), *(_hashable(each, where) for each in value)
    if isinstance(value, dict):
        return dict, *((_hashable(key, where), _hashable(each, where)) for key, each in value.items())
    if isinstance(value, (set, frozenset)):
        return set, frozenset(_hashable(each, where) for each in value)
    if isinstance(value, Tensor):
        return Tensor, value.shape, value.dtype
    if isinstance(value, MethodType):
        return MethodType, value.__func__, type(value.__self__)
    if isinstance(value, partial):
        return partial, *(_hashable(each, where) for each in (value.func, value.args, value.keywords))
    return type(value), id(value)


def _layer_settings(config: Any, count: int, index: int) -> Iterator[object]:
    """What a config's lists, one entry for each of ``count`` layers, say about a layer."""
    if config is None:
        return
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    for part in parts:
        for name, value in sorted(getattr(part, "__dict__", {}).items()):
            if isinstance(value, (list, tuple)) and len(value) == count:
                yield name, _hashable(value[index])


# --- blocks that are left out ------------------------------------------------------------------------


class _StandIns:
    """Watches the calls of recorded blocks, and stands for the others; see [Note: left out]."""

    def __init__(self, blocks: Sequence[NamedBlock], chosen: Chosen, recorder: Recorder) -> None:
        self._blocks, self._chosen, self._recorder = blocks, chosen, recorder
        #: Of recorded blocks: how they were called, and what they returned.
        self._seen: dict[int, tuple[object, object, object]] = {}
        self._order: list[int] = []
        self._last = 0  # storage that the block before returned
        self._place: tuple[int, int] | None = None  # in the record, when a stand-in was called
        self._why: str | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, the blocks' forwards are replaced."""
        before = [module.__dict__.get("forward") for _, module in self._blocks]
        try:
            for at, (_, module) in enumerate(self._blocks):
                own = module.forward
                left_out = at in self._chosen.sources
                module.__dict__["forward"] = (
                    partial(self._stand_in, at) if left_out else partial(self._observe, at, own)
                )
            yield
        finally:
            for (_, module), other in zip(self._blocks, before, strict=True):
                del module.__dict__["forward"]
                if other is not None:
                    module.__dict__["forward"] = other

    def check(self) -> None:
        """Raise UnderivableError if a block that was left out was called in a way of its own."""
        if self._order != list(range(len(self._blocks))):
            self._why = "blocks are not called once each, in order"
        if self._why is not None:
            raise UnderivableError(self._why)

    def _observe(self, at: int, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:  # recomputed
            return own(*args, **kwargs)
        self._order.append(at)
        if self._place is not None and self._place[0] != self._recorder.operators:
            self._why = "operators run between blocks"
        self._place = None
        called, _ = self._describe(args, kwargs)
        result = own(*args, **kwargs)
        hidden, others = (result[0], result[1:]) if isinstance(result, tuple) and result else (result, None)
        if not isinstance(hidden, Tensor) or any(isinstance(each, Tensor) for each in others or ()):
            self._why = "a block returns something else than a tensor"
            return result
        self._last = hidden.untyped_storage()._cdata
        self._seen[at] = called, _facts(hidden), others
        return result

    def _stand_in(self, at: int, *args: Any, **kwargs: Any) -> Any:
        self._order.append(at)
        called, hidden = self._describe(args, kwargs)
        place = self._recorder.operators, len(self._recorder.record.commands)
        seen = self._seen.get(self._chosen.sources[at])
        if hidden is None:
            self._why = "a block is not given what the one before it returned"
            return args[0] if args else None
        if seen is None or seen[:2] != (called, _facts(hidden)):
            self._why = f"{self._blocks[at].name} is called in another way"
        if self._place not in (None, place):
            self._why = "something happens between blocks"
        self._place = place
        return hidden if seen is None or seen[2] is None else (hidden, *seen[2])  # type: ignore[misc]

    def _describe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, Tensor | None]:
        """Return the call's arguments in a form that can be compared, and what the last block returned."""
        leaves, spec = tree_flatten((args, kwargs))
        found: list[object] = [str(spec)]
        hidden = None
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                found.append(_hashable(leaf))
            elif leaf.untyped_storage()._cdata == self._last:
                hidden = leaf
                found.append(("hidden", *_facts(leaf)))
            else:
                found.append((leaf.untyped_storage()._cdata, *_facts(leaf)))
        return found, hidden


def _facts(tensor: Tensor) -> tuple[object, ...]:
    where = tensor.storage_offset(), tensor.shape, tensor.stride()
    return (*where, tensor.dtype, tensor.requires_grad)


# --- the record of the whole model -------------------------------------------------------------------


class _Parameters:
    """Parameters of blocks by their position there, and units by the parameters that they have."""

    def __init__(self, subject: Subject, blocks: Sequence[NamedBlock]) -> None:
        self._units = subject.units
        leaf_units = subject.leaf_units
        #: By block: unit and segment of each parameter.
        self.places: list[list[tuple[int, int]]] = []
        #: By unit: block and position of its parameters that are in blocks.
        self.of_unit: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        #: The same for each parameter.
        self.of_segment: dict[tuple[int, int], tuple[int, int]] = {}
        for at, block in enumerate(blocks):
            own: list[tuple[int, int]] = []
            for param in block.module.parameters():
                found = subject.units.places(param)
                if not found:
                    raise UnderivableError("a parameter is in no unit")
                for place in ((unit.index, segment.index) for unit, segment in found):
                    if place in self.of_segment:
                        raise UnderivableError("blocks share a parameter")
                    self.of_segment[place] = at, len(own)
                    self.of_unit[place[0]].append((at, len(own)))
                    own.append(place)
            self.places.append(own)
        self._leaf_units = leaf_units

    def check_alike(self, one: int, other: int) -> None:
        """Check that units divide two blocks alike."""
        if self._division(one) != self._division(other):
            raise UnderivableError("units divide blocks of one kind in different ways")

    def _division(self, block: int) -> list[object]:
        numbers: dict[int, int] = {}
        found: list[object] = []
        for index, _ in self.places[block]:
            unit = self._units[index]
            is_whole = all(at == block for at, _ in self.of_unit[index])
            is_whole &= len(self.of_unit[index]) == len(unit.segments)
            # of a frozen unit hooks count the calls that read it
            whole = bool(unit.trainable) or is_whole
            number = numbers.setdefault(index, len(numbers))
            found.append((number, bool(unit.trainable), whole, index in self._leaf_units))
        return found


def _is_ordinary(node: int) -> bool:
    """Whether it is a node, and none that accumulates gradients."""
    return NO_NODE < node < _NO_ORDINARY_NODE


class _Moved:
    """Derives the record of a whole model; see [Note: derived, and checked].

    It has more attributes than other classes: maps from what is in a record to what takes its place.
    """

    def __init__(self, subject: Subject, blocks: Sequence[NamedBlock], chosen: Chosen) -> None:
        self._blocks, self._chosen = blocks, chosen
        self._count, self._kept = len(blocks), chosen.kept
        self._weights = [(unit.index, segment.index) for unit, segment in subject.units.segments()]
        self._weight_of = {place: index for index, place in enumerate(self._weights)}
        self._params = _Parameters(subject, blocks)
        for at, source in chosen.sources.items():
            self._params.check_alike(at, source)
        for at, twin in chosen.twins.items():
            self._params.check_alike(at, twin)
        number = {at: index for index, at in enumerate(chosen.kept)}
        #: Of each block: the index of the recorded one that it follows from; of a recorded one its twin's.
        self._source = [number[chosen.sources.get(at, at)] for at in range(self._count)]
        self._twin = {number[at]: number[twin] for at, twin in chosen.twins.items()}

    def derive(self, made: Record) -> Record:
        """Return the record of the whole model.

        Raises:
            UnderivableError: It does not follow from ``made``.
        """
        kept = self._kept
        if len(made.begins) != len(kept) or set(made.returns) != set(range(len(kept))):
            raise UnderivableError("not every block has a backward")
        self._old = made
        ends = Cut(len(made.made.calls), len(made.commands), len(made.made.storages.lives), _NO_ORDINARY_NODE)
        backward = [made.returns[index] for index in reversed(range(len(kept)))]
        starts = [Cut(0, 0, 0, 0), *made.begins, *backward, ends]
        if any(before[c] > after[c] for before, after in pairwise(starts) for c in range(4)):
            raise UnderivableError("the backward of blocks is not in their order")
        self._starts = starts
        self._firsts = [[start[c] for start in starts[:-1]] for c in range(4)]
        self._lay_out()
        self._made = Record(Recording(), [], [], made.recomputes)
        for segment in self._segments:
            self._emit(*segment)
        return self._finish()

    def _lay_out(self) -> None:
        """Find where each stretch of the new record begins: forward of all blocks, then backward."""
        count = self._count
        order = [(_FORWARD, -1), *((_FORWARD, at) for at in range(count))]
        order += [(_BACKWARD, at) for at in reversed(range(count))]
        self._segments = order
        self._new: dict[tuple[int, int], Cut] = {}
        begin = [0, 0, 0, 0]
        for way, at in order:
            self._new[way, at] = Cut(*begin)
            number = self._number(way, -1 if at < 0 else self._source[at])
            for c in range(4):
                begin[c] += self._starts[number + 1][c] - self._starts[number][c]
        # of nodes all but the first stretch are shifted alike, so the first begins where it did: at 0

    def _number(self, way: int, index: int) -> int:
        """The number of the stretch of recorded block ``index`` (-1: before all blocks)."""
        return 1 + index if way == _FORWARD else 2 * len(self._kept) - index

    def _place(self, coordinate: int, value: int) -> tuple[int, int, int]:
        """The way, the recorded block, and the distance from where its stretch begins."""
        number = bisect_right(self._firsts[coordinate], value) - 1
        offset = value - self._starts[number][coordinate]
        kept = len(self._kept)
        if number <= kept:
            return _FORWARD, number - 1, offset
        return _BACKWARD, 2 * kept - number, offset

    # --- numbers -----------------------------------------------------------------------------

    def _moved(self, coordinate: int, value: int, twin: int | None) -> int:
        """The number in the new record; ``twin`` is what the other recorded block has in its place."""
        way, index, offset = self._place(coordinate, value)
        shifted = False
        if twin is not None and self._other is not None:
            other_way, other_index, other_offset = self._place(coordinate, twin)
            distance = index - self._index, other_index - self._other
            shifted = distance[0] == distance[1] and (way, offset) == (other_way, other_offset)
        at = self._at_of(index, same=value == twin, shifted=shifted)
        return self._new[way, at][coordinate] + offset

    def _at_of(self, index: int, *, same: bool, shifted: bool) -> int:
        """The block of the whole model that stands where recorded block ``index`` does.

        Args:
            same: Both recorded blocks mean the same thing.
            shifted: Each of them means that of its own, or of its own neighbour.
        """
        if index < 0:
            if self._other is not None and not same:
                raise UnderivableError("blocks of one place refer to different things")
            return -1
        at = self._kept[index]
        if self._other is None:
            self._check_named(index)
            return at
        distance = index - self._index
        if shifted and abs(distance) <= 1 and 0 <= self._at + distance < self._count:
            return self._at + distance
        if same:
            return at
        raise UnderivableError("blocks of one place refer to different things")

    def _check_named(self, index: int) -> None:
        """Check that the model's beginning or end means this very block, and not all of its place."""
        at = self._kept[index]
        beside = self._index >= 0 and at - self._kept[self._index] == index - self._index
        if index in self._twin and not beside:
            raise UnderivableError("something refers to a block in the middle")

    def _ended(self, coordinate: int, value: int, twin: int | None) -> int:
        """The same for a number of operators, or nodes, that have ended: the last of them decides."""
        if value == 0:
            return 0
        return self._moved(coordinate, value - 1, None if twin is None else twin - 1) + 1

    def _node(self, value: int, twin: int | None) -> int:
        ordinary = _is_ordinary(value)
        if twin is not None and (ordinary != _is_ordinary(twin) or (not ordinary and value != twin)):
            raise UnderivableError("autograd nodes differ")
        return self._moved(_NODES, value, twin) if ordinary else value

    def _storage(self, value: int, twin: int | None) -> int:
        if value < len(self._weights):
            if twin is not None and twin >= len(self._weights):
                raise UnderivableError("storages differ")
            return self._weight_of[
                self._segment(self._weights[value], None if twin is None else self._weights[twin])
            ]
        if twin is not None and twin < len(self._weights):
            raise UnderivableError("storages differ")
        return self._moved(_LIVES, value, twin)

    def _segment(self, value: tuple[int, int], twin: tuple[int, int] | None) -> tuple[int, int]:
        """A unit and its segment: of the new block, or of the block beside it, or outside blocks."""
        place = self._params.of_segment.get(value)
        if twin is None:
            if place is not None:
                self._check_named(self._source[place[0]])
            return value
        other = self._params.of_segment.get(twin)
        if place is not None and other is not None:
            relative, position = self._relative(self._index, place[0]), place[1]
            if relative is not None and (relative, position) == (
                self._relative(self._other, other[0]), other[1]
            ):  # fmt: skip
                return self._params.places[self._at + relative][position]
        if value == twin:
            return value
        raise UnderivableError("blocks of one place use different parameters")

    def _unit(self, value: int, twin: int | None) -> int:
        if twin is None:
            return value
        place, other = self._nearest(self._index, value), self._nearest(self._other, twin)
        if place is not None and place == other and 0 <= self._at + place[0] < self._count:
            return self._params.places[self._at + place[0]][place[1]][0]
        if value == twin:
            return value
        raise UnderivableError("blocks of one place use different units")

    def _nearest(self, index: int | None, unit: int) -> tuple[int, int] | None:
        """Which parameter of a recorded block, or of one beside it, is the first that a unit has."""
        assert index is not None
        places = self._params.of_unit.get(unit, [])
        for distance in (0, 1, -1):
            if 0 <= index + distance < len(self._kept):
                at = self._kept[index + distance]
                own = [position for block, position in places if block == at]
                if own:
                    return distance, own[0]
        return None

    def _relative(self, index: int | None, at: int) -> int | None:
        """The distance of block ``at`` from recorded block ``index``, if it is recorded and beside it."""
        assert index is not None
        for distance in (0, 1, -1):
            if 0 <= index + distance < len(self._kept) and self._kept[index + distance] == at:
                return distance if 0 <= self._at + distance < self._count else None
        return None

    def _region(self, value: int, twin: int | None) -> int:
        """Regions 2b + 1 and 2b + 2 are those of block b."""
        if value <= 0:
            if twin is not None and twin != value:
                raise UnderivableError("regions differ")
            return value
        index, inside = divmod(value - 1, 2)
        shifted = False
        if twin is not None:
            assert self._other is not None
            other, other_inside = divmod(twin - 1, 2)
            shifted = (index - self._index, inside) == (other - self._other, other_inside)
        return 2 * self._at_of(index, same=value == twin, shifted=shifted) + 1 + inside

    def _key(self, value: SlotKey, twin: SlotKey | None) -> SlotKey:
        if twin is not None and value.ordinal != twin.ordinal:
            raise UnderivableError("slots differ")
        return SlotKey(self._region(value.region, None if twin is None else twin.region), value.ordinal)

    # --- stretches ---------------------------------------------------------------------------

    def _emit(self, way: int, at: int) -> None:
        """Add the stretch of a block to the new record."""
        self._at, self._index = at, -1 if at < 0 else self._source[at]
        self._other = self._twin.get(self._index)
        number = self._number(way, self._index)
        old, until = self._starts[number], self._starts[number + 1]
        twin = None if self._other is None else self._number(way, self._other)
        other = old if twin is None else self._starts[twin]
        if twin is not None:
            after = self._starts[twin + 1]
            if any(until[c] - old[c] != after[c] - other[c] for c in range(4)):
                raise UnderivableError("records of blocks of one place differ in length")
        self._emit_calls(old, until, other)
        self._emit_lives(old, until, other)
        self._emit_commands(old, until, other, self._new[way, at].calls)
        if way == _FORWARD and at >= 0:
            self._emit_block()

    def _twin_of(self, sequence: Sequence[Any], index: int) -> Any:
        return None if self._other is None else sequence[index]

    def _emit_calls(self, old: Cut, until: Cut, other: Cut) -> None:
        calls, rows = self._old.made.calls, self._old.rows
        for index in range(old.calls, until.calls):
            twin_index = other.calls + index - old.calls
            call, row = calls[index], rows[index]
            twin: Call | None = self._twin_of(calls, twin_index)
            if twin is not None and (
                (call.name, call.phase, len(call.inputs), len(call.outputs), row.cost)
                != (twin.name, twin.phase, len(twin.inputs), len(twin.outputs), rows[twin_index].cost)
            ):
                raise UnderivableError("operators of blocks of one place differ")
            self._made.made.calls.append(
                call._replace(
                    inputs=self._storages(call.inputs, None if twin is None else twin.inputs),
                    outputs=self._storages(call.outputs, None if twin is None else twin.outputs),
                    region=self._region(call.region, None if twin is None else twin.region),
                    node=self._node(call.node, None if twin is None else twin.node),
                )
            )
            self._made.rows.append(row)

    def _storages(self, values: Sequence[int], twins: Sequence[int] | None) -> tuple[int, ...]:
        if twins is None:
            return tuple(self._storage(value, None) for value in values)
        return tuple(self._storage(value, twin) for value, twin in zip(values, twins, strict=True))

    def _emit_lives(self, old: Cut, until: Cut, other: Cut) -> None:
        lives = self._old.made.storages.lives
        for index in range(old.lives, until.lives):
            life = lives[index]
            twin: Life | None = self._twin_of(lives, other.lives + index - old.lives)
            if twin is not None and (
                (life.name, life.nbytes, life.kind, life.held, life.died is None)
                != (twin.name, twin.nbytes, twin.kind, twin.held, twin.died is None)
            ):
                raise UnderivableError("storages of blocks of one place differ")
            born = self._moved(_CALLS, life.born, None if twin is None else twin.born)
            died = life.died
            if died is not None:
                died = self._ended(_CALLS, died, None if twin is None else twin.died)
            self._made.made.storages.lives.append(replace(life, born=born, died=died))

    def _emit_commands(self, old: Cut, until: Cut, other: Cut, calls: int) -> None:
        commands = self._old.commands
        for index in range(old.commands, until.commands):
            command = commands[index]
            twin: Command | None = self._twin_of(commands, other.commands + index - old.commands)
            if twin is not None and (
                (command.do, command.at - old.calls, len(command.units), command.nbytes)
                != (twin.do, twin.at - other.calls, len(twin.units), twin.nbytes)
            ):
                raise UnderivableError("blocks of one place ask for different things")
            self._made.commands.append(self._command(command, twin, command.at - old.calls + calls))

    def _command(self, command: Command, twin: Command | None, at: int) -> Command:
        key = command.key
        if key is not None:
            other = None if twin is None else twin.key
            key = self._key(key, other)
            if command.do is Do.PACK and command.key is not None:
                self._emit_slot(command.key, other, key)
        units, segment = command.units, command.segment
        if command.do is Do.RECEIVE:
            given = None if twin is None else (twin.units[0], twin.segment)
            unit, segment = self._segment((units[0], segment), given)
            units = (unit,)
        elif units:
            twins: Sequence[int | None] = [None] * len(units) if twin is None else twin.units
            units = tuple(self._unit(unit, each) for unit, each in zip(units, twins, strict=True))
        node = command.node
        if twin is not None and (node is None) != (twin.node is None):
            raise UnderivableError("autograd nodes differ")
        if node is not None:
            node = self._node(node, None if twin is None else twin.node)
        return Command(at, command.do, units, segment, node, key, command.nbytes)

    def _emit_slot(self, key: SlotKey, twin_key: SlotKey | None, new_key: SlotKey) -> None:
        slots = self._old.made.slots
        mark, twin = slots[key], None if twin_key is None else slots[twin_key]
        if twin is None:
            nodes = self._nodes_of(mark)
        else:
            if (mark.unpacked is None) != (twin.unpacked is None) or len(mark.nodes) != len(twin.nodes):
                raise UnderivableError("slots of blocks of one place differ")
            nodes = [self._node(*pair) for pair in zip(mark.nodes, twin.nodes, strict=True)]
        unpacked = mark.unpacked
        if unpacked is not None:
            unpacked = self._moved(_CALLS, unpacked, None if twin is None else twin.unpacked)
        self._made.made.slots[new_key] = SlotMark(
            self._storage(mark.storage, None if twin is None else twin.storage),
            self._ended(_CALLS, mark.packed, None if twin is None else twin.packed),
            unpacked,
            nodes,
        )

    def _nodes_of(self, mark: SlotMark) -> list[int]:
        """The nodes that unpack a slot of the model's beginning or end.

        All blocks may: those in the middle come before the last one, which decides how long the slot is
        needed.
        """
        found: list[int] = []
        for number, node in enumerate(mark.nodes):
            try:
                found.append(self._node(node, None))
            except UnderivableError:
                if number + 1 == len(mark.nodes):
                    raise
        return found

    def _emit_block(self) -> None:
        """Add the mark of a call of a block."""
        marks = self._old.made.regions
        mark = marks[self._index]
        twin: RegionMark | None = self._twin_of(marks, self._other or 0)
        if twin is not None and len(mark.inputs) != len(twin.inputs):
            raise UnderivableError("inputs of blocks of one place differ")
        self._made.made.regions.append(
            RegionMark(
                2 * self._at + 1,
                self._blocks[self._at].name,
                self._moved(_CALLS, mark.begin, None if twin is None else twin.begin),
                self._moved(_NODES, mark.first_node, None if twin is None else twin.first_node),
                self._ended(_CALLS, mark.end, None if twin is None else twin.end),
                self._ended(_NODES, mark.end_node, None if twin is None else twin.end_node),
                self._storages(mark.inputs, None if twin is None else twin.inputs),
            )
        )

    def _finish(self) -> Record:
        old, made = self._old.made, self._made.made
        self._at = self._index = len(self._kept) - 1
        self._other = None
        self._at = self._count - 1
        made.phase, made.region = Phase.BACKWARD, 2 * self._count
        made.forward_end_node = self._ended(_NODES, old.forward_end_node, None)
        made.backward_end = len(made.calls)
        made.alive_after = frozenset(i for i, life in enumerate(made.storages.lives) if life.died is None)
        return self._made
