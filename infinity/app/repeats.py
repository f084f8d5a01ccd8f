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
operator's index, a storage's, an autograd node's, a parameter's, a unit's, a region's) means something in a
block, or outside all blocks. It is either the block's own or a neighbour's, and moves with the block, or it
is always the same, and stays. Which of both it is, two recorded blocks of one place tell (*twins*), whose
records must agree in everything. A block from which no other follows is its own twin. Where twins do not
agree, or where something refers to blocks in another way (an operator that reads the output of every layer),
more blocks are recorded, and in the end all of them.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from infinity.activations.blocks import NamedBlock, recomputable_blocks
from infinity.activations.profiler import NO_NODE, Recording, RegionMark, SlotMark
from infinity.app.recording import Command, Cut, Do, Record, Recorder, Subject, record
from infinity.core.errors import CheckpointError
from infinity.core.profile import Phase, SlotKey

#: First and last blocks of a place that may differ from the others of it; one is tried after the other.
MARGINS = (0, 1)
#: Quarters of all blocks that are recorded at most, or all are.
_MOST = 3
#: Coordinates of a record, as in :class:`Cut`.
_CALLS, _COMMANDS, _LIVES, _NODES = range(4)
_FORWARD, _BACKWARD = 0, 1
#: Autograd gives this number to nodes that accumulate gradients, or larger ones.
_NO_ORDINARY_NODE = 2**62
#: What every module has.
_INTERNAL = frozenset(vars(nn.Module())) | {"forward"}


_T = TypeVar("_T")


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
    params, stand_ins = _Parameters(subject, blocks, chosen), _StandIns(blocks, chosen)
    kept = [blocks[at] for at in chosen.kept]
    left_out = [blocks[at].module for at in chosen.sources]

    def region_recomputes(region: int) -> bool:
        return recomputes(2 * chosen.kept[region // 2] + 1)

    try:
        some = record(subject, kept, region_recomputes, left_out, stand_ins.installed)
    except CheckpointError as error:  # with all blocks it may do, or says why not
        raise UnderivableError(str(error)) from error
    stand_ins.check()
    whole = derive(some, chosen, params, [block.name for block in blocks])
    return replace(whole, recomputes=recomputes)


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

    @cached_property
    def blocks(self) -> int:
        """Of the model."""
        return len(self.kept) + len(self.sources)

    @cached_property
    def indices(self) -> dict[int, int]:
        """Where in ``kept`` each recorded block is; what comes before all blocks, block -1, is at -1."""
        return {at: index for index, at in enumerate((-1, *self.kept), -1)}

    def source(self, at: int) -> int:
        """The index of the recorded block that a block is, or follows from."""
        return self.indices[self.sources.get(at, at)]

    def twin(self, at: int) -> int:
        """The index of that block's twin, or its own."""
        source = self.sources.get(at, at)
        return self.indices[self.twins.get(source, source)]


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

    def __init__(self, blocks: Sequence[NamedBlock], chosen: Chosen) -> None:
        self._blocks, self._chosen = blocks, chosen
        #: Of recorded blocks: how they were called, and what they returned.
        self._seen: dict[int, tuple[object, object, object]] = {}
        self._order: list[int] = []
        self._last = 0  # storage that the block before returned
        self._place: tuple[int, int] | None = None  # in the record, when a stand-in was called
        self._why: str | None = None

    @contextmanager
    def installed(self, recorder: Recorder) -> Iterator[None]:
        """Inside, the blocks' forwards are replaced."""
        before = [module.__dict__.get("forward") for _, module in self._blocks]
        try:
            for at, (_, module) in enumerate(self._blocks):
                own = module.forward
                left_out = at in self._chosen.sources
                module.__dict__["forward"] = (
                    partial(self._stand_in, recorder, at)
                    if left_out
                    else partial(self._observe, recorder, at, own)
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

    def _observe(
        self, recorder: Recorder, at: int, own: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if torch._C._current_graph_task_id() != -1:  # recomputed
            return own(*args, **kwargs)
        self._order.append(at)
        if self._place is not None and self._place[0] != recorder.operators:
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

    def _stand_in(self, recorder: Recorder, at: int, *args: Any, **kwargs: Any) -> Any:
        self._order.append(at)
        called, hidden = self._describe(args, kwargs)
        place = recorder.operators, len(recorder.record.commands)
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


def derive(some: Record, chosen: Chosen, params: "_Parameters", names: Sequence[str]) -> Record:
    """Return the record of the whole model; see [Note: derived, and checked].

    Args:
        some: The record of the blocks that were chosen.
        names: Of all blocks.

    Raises:
        UnderivableError: It does not follow from ``some``.
    """
    before = _Stretches.of(some, len(chosen.kept))
    whole = Record(Recording(), [], [], some.recomputes)
    derived = _Derived(some, whole, before, before.repeated(chosen), chosen, params, names)
    for way, at in _order(chosen.blocks):
        _Stretch(derived, way, at).copy()
        if way == _BACKWARD:
            whole.returns[at] = derived.after.bounds(way, at)[0]
    profiled = whole.profiled
    profiled.phase, profiled.region = Phase.BACKWARD, 2 * chosen.blocks
    last, ended = _Stretch(derived, _FORWARD, chosen.blocks - 1), some.profiled.forward_end_node
    profiled.forward_end_node = last.ended(_NODES, ended, ended)
    profiled.backward_end = len(profiled.calls)
    profiled.alive_after = frozenset(
        index for index, life in enumerate(profiled.storages.lives) if life.died is None
    )
    return whole


def _order(blocks: int) -> Iterator[tuple[int, int]]:
    """The stretches of a record: their way, and their block; -1: before all blocks."""
    yield from ((_FORWARD, block) for block in range(-1, blocks))
    yield from ((_BACKWARD, block) for block in reversed(range(blocks)))


class _Stretches:
    """Where the stretches of a record begin; each of them reaches to the next one.

    Args:
        starts: In :func:`_order`, and where the last one ends.
    """

    def __init__(self, blocks: int, starts: Sequence[Cut]) -> None:
        self._blocks, self._starts = blocks, starts
        self._columns = list(zip(*starts[:-1], strict=True))

    @classmethod
    def of(cls, record: Record, blocks: int) -> "_Stretches":
        if len(record.begins) != blocks or set(record.returns) != set(range(blocks)):
            raise UnderivableError("not every block has a backward")
        profiled = record.profiled
        lives = len(profiled.storages.lives)
        ends = Cut(len(profiled.calls), len(record.commands), lives, _NO_ORDINARY_NODE)
        backward = (record.returns[index] for index in reversed(range(blocks)))
        starts = [Cut(0, 0, 0, 0), *record.begins, *backward, ends]
        if any(one > other for pair in pairwise(starts) for one, other in zip(*pair, strict=True)):
            raise UnderivableError("the backward of blocks is not in their order")
        return cls(blocks, starts)

    def repeated(self, chosen: Chosen) -> "_Stretches":
        """Those of the whole model's record, each as long as the one that it follows from."""
        starts = [Cut(0, 0, 0, 0)]
        for way, at in _order(chosen.blocks):
            begin, end = self.bounds(way, chosen.source(at))
            starts.append(Cut(*(new + e - b for new, b, e in zip(starts[-1], begin, end, strict=True))))
        return _Stretches(chosen.blocks, starts)

    def bounds(self, way: int, block: int) -> tuple[Cut, Cut]:
        """Where a stretch begins and ends."""
        number = 1 + block if way == _FORWARD else 2 * self._blocks - block
        return self._starts[number], self._starts[number + 1]

    def find(self, coordinate: int, value: int) -> tuple[int, tuple[int, int]]:
        """In which block's stretch a number is; in which way, and how far behind the stretch's beginning."""
        column = self._columns[coordinate]
        number = bisect_right(column, value) - 1
        if number <= self._blocks:
            return number - 1, (_FORWARD, value - column[number])
        return 2 * self._blocks - number, (_BACKWARD, value - column[number])


class _Parameters:
    """Parameters of blocks by their position there, which is the same in all blocks that are alike.

    Attributes:
        segments: The index of each segment among all, by its unit and its index there.
        places: By block of the model and position: unit and segment of a parameter, or of a tile.
    """

    def __init__(self, subject: Subject, blocks: Sequence[NamedBlock], chosen: Chosen) -> None:
        self.segments = {
            (unit.index, segment.index): at for at, (unit, segment) in enumerate(subject.units.segments())
        }
        self.places: list[list[tuple[int, int]]] = []
        self._chosen = chosen
        #: Block and position of a segment; and the first position that a unit has in a block.
        self._positions: dict[tuple[int, int], tuple[int, int]] = {}
        self._firsts: dict[tuple[int, int], int] = {}
        for at, block in enumerate(blocks):
            self.places.append([])
            for param in block.module.parameters():
                found = subject.units.places(param)
                if not found:
                    raise UnderivableError("a parameter is in no unit")
                for unit, segment in found:
                    self._add(at, (unit.index, segment.index))
        for at, other in (*chosen.sources.items(), *chosen.twins.items()):
            if self._division(at, subject) != self._division(other, subject):
                raise UnderivableError("units divide blocks of one kind in different ways")

    def _add(self, at: int, place: tuple[int, int]) -> None:
        own = self.places[at]
        if place in self._positions:
            raise UnderivableError("blocks share a parameter")
        self._positions[place] = at, len(own)
        self._firsts.setdefault((place[0], at), len(own))
        own.append(place)

    def _division(self, at: int, subject: Subject) -> list[object]:
        """How units divide a block."""
        units = [subject.units[index] for index, _ in self.places[at]]
        here = Counter(unit.index for unit in units)
        number = {index: order for order, index in enumerate(here)}
        leaves = subject.leaf_units
        return [
            (
                number[unit.index],
                bool(unit.trainable),
                # of a frozen unit hooks count the calls that read it
                bool(unit.trainable) or here[unit.index] == len(unit.segments),
                unit.index in leaves,
            )
            for unit in units
        ]

    def find(self, place: tuple[int, int]) -> tuple[int, int]:
        """The recorded block that a segment is in, and its position there; -1: none.

        Raises:
            UnderivableError: It is in a block that was left out, whose uses are not recorded.
        """
        at, position = self._positions.get(place, (-1, -1))
        if at not in self._chosen.indices:
            raise UnderivableError("something reads a parameter of a block that is left out")
        return self._chosen.indices[at], position

    def find_unit(self, unit: int, near: int) -> tuple[int, int]:
        """Recorded block ``near``, or one beside it, that has a unit; and the unit's first position there."""
        kept = self._chosen.kept
        for index in (near, near + 1, near - 1):
            if 0 <= index < len(kept) and (unit, kept[index]) in self._firsts:
                return index, self._firsts[unit, kept[index]]
        return -1, -1


@dataclass(frozen=True)
class _Derived:
    """A record that is being derived.

    Attributes:
        before: Stretches of the record of ``some`` blocks; ``after`` those of the ``whole`` one.
        names: Of all blocks.
    """

    some: Record
    whole: Record
    before: _Stretches
    after: _Stretches
    chosen: Chosen
    params: _Parameters
    names: Sequence[str]

    @cached_property
    def weights(self) -> list[tuple[int, int]]:
        """Unit and segment of the storages that were there first: the parameters' own."""
        return list(self.params.segments)


class _Stretch:
    """Copies a stretch of a record to where it is in that of the whole model.

    Whatever is numbered goes through :meth:`_block`: both twins' numbers are looked up, as the index of a
    recorded block and what they mean there, and the same of the right block is the number in the copy.

    Args:
        at: Block of the whole model; -1: before all blocks.
    """

    def __init__(self, derived: _Derived, way: int, at: int) -> None:
        self._derived, self._way, self._at = derived, way, at
        self._index, self._twin = derived.chosen.source(at), derived.chosen.twin(at)
        self._own = derived.before.bounds(way, self._index)
        self._other = derived.before.bounds(way, self._twin)

    def copy(self) -> None:
        """Copy all that is recorded there.

        Raises:
            UnderivableError: It differs from its twin, or refers to blocks in another way.
        """
        own, other = ([e - b for b, e in zip(*bounds, strict=True)] for bounds in (self._own, self._other))
        self._agree(own, other)
        self._copy_calls()
        self._copy_lives()
        self._copy_commands()
        if self._way == _FORWARD and self._at >= 0:
            self._copy_mark()

    # --- numbers -----------------------------------------------------------------------------

    def _block(self, index: int, twin: int, *, alike: bool, same: bool) -> int:
        """The block of the whole model that recorded block ``index`` stands for; -1: none.

        Args:
            twin: The recorded block that the twin refers to.
            alike: Both refer to the same thing in their blocks.
            same: They refer to the same thing.
        """
        chosen, distance = self._derived.chosen, index - self._index
        if index >= 0 and alike and -1 <= distance <= 1 and distance == twin - self._twin:
            at = self._at + distance
            if 0 <= at < chosen.blocks:
                return at
        if not same:
            raise UnderivableError("blocks of one place refer to different things")
        if index < 0:
            return -1
        at = chosen.kept[index]
        beside = self._index >= 0 and at - self._at == distance
        if self._index == self._twin and at in chosen.twins and not beside:
            raise UnderivableError("something refers to a block in the middle")
        return at

    def _number(self, coordinate: int, value: int, twin: int) -> int:
        index, inside = self._derived.before.find(coordinate, value)
        other, other_inside = self._derived.before.find(coordinate, twin)
        at = self._block(index, other, alike=inside == other_inside, same=value == twin)
        way, offset = inside
        return self._derived.after.bounds(way, at)[0][coordinate] + offset

    def ended(self, coordinate: int, value: int, twin: int) -> int:
        """The same for a number of operators, or nodes, that have ended: the last of them decides."""
        if value == 0 or twin == 0:
            self._agree(value, twin)
            return 0
        return self._number(coordinate, value - 1, twin - 1) + 1

    def _node(self, value: int, twin: int) -> int:
        if _is_ordinary(value) and _is_ordinary(twin):
            return self._number(_NODES, value, twin)
        self._agree(value, twin)
        return value

    def _storage(self, value: int, twin: int) -> int:
        weights = self._derived.weights
        self._agree(value < len(weights), twin < len(weights))
        if value < len(weights):
            return self._derived.params.segments[self._segment(weights[value], weights[twin])]
        return self._number(_LIVES, value, twin)

    def _storages(self, values: Sequence[int], twins: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(self._storage, values, twins))

    def _segment(self, value: tuple[int, int], twin: tuple[int, int]) -> tuple[int, int]:
        """A unit and its segment."""
        params = self._derived.params
        (index, position), (other, twin_position) = params.find(value), params.find(twin)
        at = self._block(index, other, alike=position == twin_position, same=value == twin)
        return value if at < 0 else params.places[at][position]

    def _unit(self, value: int, twin: int) -> int:
        params = self._derived.params
        index, position = params.find_unit(value, self._index)
        other, twin_position = params.find_unit(twin, self._twin)
        at = self._block(index, other, alike=position == twin_position, same=value == twin)
        return value if at < 0 else params.places[at][position][0]

    def _region(self, value: int, twin: int) -> int:
        """Regions 2b + 1 and 2b + 2 are those of block b."""
        (index, inside), (other, twin_inside) = divmod(value - 1, 2), divmod(twin - 1, 2)
        at = self._block(index, other, alike=inside == twin_inside, same=value == twin)
        return 2 * at + 1 + inside

    def _key(self, value: SlotKey, twin: SlotKey) -> SlotKey:
        self._agree(value.ordinal, twin.ordinal)
        return SlotKey(self._region(value.region, twin.region), value.ordinal)

    # --- what is recorded --------------------------------------------------------------------

    def _agree(self, own: object, twin: object) -> None:
        if own != twin:
            raise UnderivableError("records of blocks of one place differ")

    def _pairs(self, items: Sequence[_T], coordinate: int) -> Iterator[tuple[_T, _T]]:
        """What is in this stretch, each with its twin."""
        own, twin = (slice(begin[coordinate], end[coordinate]) for begin, end in (self._own, self._other))
        return zip(items[own], items[twin], strict=True)

    def _copy_calls(self) -> None:
        some, whole = self._derived.some, self._derived.whole
        pairs = self._pairs(some.profiled.calls, _CALLS), self._pairs(some.rows, _CALLS)
        for (call, twin), (row, twin_row) in zip(*pairs, strict=True):
            self._agree(
                (call.name, call.phase, len(call.inputs), len(call.outputs), row.cost),
                (twin.name, twin.phase, len(twin.inputs), len(twin.outputs), twin_row.cost),
            )
            whole.profiled.calls.append(
                call._replace(
                    inputs=self._storages(call.inputs, twin.inputs),
                    outputs=self._storages(call.outputs, twin.outputs),
                    region=self._region(call.region, twin.region),
                    node=self._node(call.node, twin.node),
                )
            )
            whole.rows.append(row)

    def _copy_lives(self) -> None:
        lives = self._derived.whole.profiled.storages.lives
        for life, twin in self._pairs(self._derived.some.profiled.storages.lives, _LIVES):
            self._agree(
                (life.name, life.nbytes, life.kind, life.held, life.died is None),
                (twin.name, twin.nbytes, twin.kind, twin.held, twin.died is None),
            )
            born = self._number(_CALLS, life.born, twin.born)
            died = life.died
            if died is not None and twin.died is not None:
                died = self.ended(_CALLS, died, twin.died)
            lives.append(replace(life, born=born, died=died))

    def _copy_commands(self) -> None:
        begin, twin_begin = self._own[0].calls, self._other[0].calls
        new_begin = self._derived.after.bounds(self._way, self._at)[0].calls
        for command, twin in self._pairs(self._derived.some.commands, _COMMANDS):
            at = command.at - begin
            self._agree(
                (command.do, at, len(command.units), command.nbytes, command.node is None),
                (twin.do, twin.at - twin_begin, len(twin.units), twin.nbytes, twin.node is None),
            )
            self._derived.whole.commands.append(self._command(command, twin, new_begin + at))

    def _command(self, command: Command, twin: Command, at: int) -> Command:
        _, do, units, segment, node, key, nbytes = command
        if key is not None and twin.key is not None:
            new_key = self._key(key, twin.key)
            if do is Do.PACK:
                self._copy_slot(key, twin.key, new_key)
            key = new_key
        if do is Do.RECEIVE:
            unit, segment = self._segment((units[0], segment), (twin.units[0], twin.segment))
            units = (unit,)
        else:
            units = tuple(map(self._unit, units, twin.units))
        if node is not None and twin.node is not None:
            node = self._node(node, twin.node)
        return Command(at, do, units, segment, node, key, nbytes)

    def _copy_slot(self, key: SlotKey, twin_key: SlotKey, new_key: SlotKey) -> None:
        slots = self._derived.some.profiled.slots
        mark, twin = slots[key], slots[twin_key]
        self._agree((mark.unpacked is None, len(mark.nodes)), (twin.unpacked is None, len(twin.nodes)))
        nodes = []
        for number, pair in enumerate(zip(mark.nodes, twin.nodes, strict=True)):
            try:
                nodes.append(self._node(*pair))
            except UnderivableError:
                # All blocks may unpack a slot of the model's beginning: those in the middle come before the
                # last node, which decides how long the slot is needed.
                if self._index != self._twin or number + 1 == len(mark.nodes):
                    raise
        unpacked = mark.unpacked
        if unpacked is not None and twin.unpacked is not None:
            unpacked = self._number(_CALLS, unpacked, twin.unpacked)
        self._derived.whole.profiled.slots[new_key] = SlotMark(
            self._storage(mark.storage, twin.storage),
            self.ended(_CALLS, mark.packed, twin.packed),
            unpacked,
            nodes,
        )

    def _copy_mark(self) -> None:
        """Copy the mark of a block's call."""
        marks = self._derived.some.profiled.regions
        mark, twin = marks[self._index], marks[self._twin]
        self._agree(len(mark.inputs), len(twin.inputs))
        self._derived.whole.profiled.regions.append(
            RegionMark(
                2 * self._at + 1,
                self._derived.names[self._at],
                self._number(_CALLS, mark.begin, twin.begin),
                self._number(_NODES, mark.first_node, twin.first_node),
                self.ended(_CALLS, mark.end, twin.end),
                self.ended(_NODES, mark.end_node, twin.end_node),
                self._storages(mark.inputs, twin.inputs),
            )
        )


def _is_ordinary(node: int) -> bool:
    """Whether it is a node, and none that accumulates gradients."""
    return NO_NODE < node < _NO_ORDINARY_NODE
