"""Derives the record of a whole model from that of some of its blocks.

[Note: derived, and checked]
A record is cut where the forward of a block begins and where its backward does. Every number in it (of an
operator, a storage, a node of autograd, a unit, a region) is a place in one of these stretches, or in none.
What a block refers to is either as far from it as what its twin refers to is from that, and moves with the
block, or it is the same place, and stays. Where twins do not agree in everything, or where something else
refers to a block in the middle of a run, the whole model is recorded.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, starmap
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from infinity.activations.controller import NamedBlock
from infinity.activations.profiler import Call, Life, Recording, RegionMark, SlotMark
from infinity.core.plan import SlotKey
from infinity.partition.unit import Segment, Unit, UnitIndex
from infinity.predict.recording import Command, Cut, Record

#: Autograd gives this number, or a larger one, to nodes that accumulate gradients.
_ACCUMULATES = 2**62
_LEFT_OUT = -2
#: Kinds of numbers: of rows of a record's tables, and of nodes, which are cut at blocks;
OPERATORS, COMMANDS, STORAGES, SLOTS, BLOCKS, NODES = range(6)
#: of units and parameters, which belong to blocks; and of regions.
UNITS, PARAMETERS, REGIONS = range(6, 9)

#: A row of a table: what it is apart from its numbers, and those, each with its kind.
_Row = tuple[Any, list[tuple[int, int]]]


class UnderivableError(Exception):
    """Raised where the record of the whole model does not follow from that of some blocks."""


class Run(NamedTuple):
    """Describes the blocks ``[first, first + length)``, whose kinds repeat after ``period`` blocks."""

    first: int
    length: int
    period: int

    @property
    def gap(self) -> int:
        """Return the block before which others are left out; the twins end there."""
        return self.first + 1 + 2 * self.period

    @property
    def left_out(self) -> int:
        """Return the number of blocks that are left out: whole periods, and two blocks stay after them.

        Two, because what a block returns is let go when the next one has returned.
        """
        return max(0, self.length - 3 - 2 * self.period) // self.period * self.period

    def kept(self, blocks: int) -> list[int]:
        return [*range(self.gap), *range(self.gap + self.left_out, blocks)]

    def is_left_out(self, block: int) -> bool:
        return self.gap <= block < self.gap + self.left_out

    def source(self, block: int) -> int:
        """Return the number among those recorded of a block, or of the one that it is like."""
        if self.is_left_out(block):
            return self.gap - self.period + (block - self.gap) % self.period
        return block if block < self.gap else block - self.left_out


class _Table(NamedTuple):
    """Holds rows of one kind: each row's values, and the numbers of all rows end to end."""

    values: list[Any]
    begins: np.ndarray  # of each row's numbers, and the end of the last one's
    kinds: np.ndarray
    blocks: np.ndarray  # which a number is a place in; below 0: in none
    places: np.ndarray


class Derivation:
    """Derives the record of all ``blocks`` from that of ``some``; see [Note: derived, and checked]."""

    def __init__(
        self, some: Record, backward: Sequence[Cut | None], owners: "Owners", blocks: Sequence[NamedBlock],
        run: Run,
    ) -> None:  # fmt: skip
        cuts = [cut for cut in (*some.cuts, *reversed(backward)) if cut is not None]
        self._kept = run.kept(len(blocks))
        if not len(some.cuts) == len(backward) == len(self._kept) == len(cuts) // 2:
            raise UnderivableError("blocks are not called once each, or backward does not come to them")
        self._some, self._run, self._names = some, run, [block.name for block in blocks]
        self._lines = _Lines(cuts, some.cut(), run, len(blocks))
        self._owners, self._distances = owners, set[int]()
        owners.keep(self._kept)

    def record(self, recomputes: Callable[[int], bool]) -> Record:
        some, made = self._some.recorded, copy.copy(self._some)
        tables = {kind: self._table(rows) for kind, rows in enumerate(map(list, self._rows()))}
        moves = {kind: self._compare(kind, table) for kind, table in tables.items()}
        found = {kind: [*self._all(kind, table, moves[kind])] for kind, table in tables.items()}
        ends = self._table([((), [(NODES, some.forward_end_node), (OPERATORS, some.backward_end)])])
        [whole] = self._mapped(ends, 0, 1, -1, -1, None, NODES)
        made.recorded = recorded = Recording()
        made.rows = [values[-1] for values, _ in found[OPERATORS]]
        recorded.calls += starmap(self._call, found[OPERATORS])
        made.calls = [*starmap(self._command, found[COMMANDS])]
        made.served = [None] * len(made.calls)
        recorded.storages.lives += starmap(self._life, found[STORAGES])
        recorded.slots.update(starmap(self._slot, found[SLOTS]))
        recorded.regions += starmap(self._mark, found[BLOCKS])
        recorded.forward_end_node, recorded.backward_end = whole
        recorded.alive_after = frozenset(i for i, (life, _) in enumerate(found[STORAGES]) if life[-1])
        recorded.phase, made.recomputes = some.phase, recomputes
        return made

    # --- rows, as values and numbers -----------------------------------------------------------------

    def _storage(self, index: int) -> tuple[int, int]:
        return (PARAMETERS if index < len(self._owners.places) else STORAGES), index

    def _rows(self) -> Iterator[Iterator[_Row]]:
        """Yield the tables of the record, in the order of the kinds of their rows."""
        some, made = self._some, self._some.recorded
        storage = self._storage
        yield (
            (
                (call.name, call.phase, len(call.inputs), row),
                [*map(storage, (*call.inputs, *call.outputs)), (REGIONS, call.region), _node(call.node)],
            )
            for call, row in zip(made.calls, some.rows, strict=True)
        )
        yield map(self._command_row, some.calls, some.served)
        yield (
            (
                (life.name, life.nbytes, life.kind, life.held, life.died is None, index in made.alive_after),
                [(OPERATORS, at) for at in (life.born, life.died, life.returned) if at is not None],
            )
            for index, life in enumerate(made.storages.lives)
        )
        yield (
            (
                (key.ordinal, mark.unpacked is None),
                [
                    (REGIONS, key.region), storage(mark.storage), (OPERATORS, mark.packed),
                    *((OPERATORS, at) for at in (mark.unpacked,) if at is not None),
                    *map(_node, mark.nodes),
                ],
            )
            for key, mark in made.slots.items()
        )  # fmt: skip
        yield (
            (
                (),
                [
                    (REGIONS, mark.region), (OPERATORS, mark.begin), (OPERATORS, mark.end),
                    (NODES, mark.first_node), (NODES, mark.end_node), *map(storage, mark.inputs),
                ],
            )
            for mark in made.regions
        )  # fmt: skip

    def _command_row(self, call: Command, served: Segment | None) -> _Row:
        """Return a call of the runtime: for a unit or a parameter, or units together; and a node, if any."""
        at, part, method, args, options = call
        first, *more = args or ((),)
        if isinstance(first, Unit):
            numbers, more = [(PARAMETERS, self._owners.parameter(first, more[0]))], []
        elif isinstance(first, int):
            numbers = [self._owners.unit(first, served), *map(_node, more)]
        else:
            numbers = [self._owners.unit(unit.index, None) for unit in first]
        kinds = [kind for kind, _ in numbers]
        return (part, method, type(first) if args else None, options, kinds), [(OPERATORS, at), *numbers]

    def _call(self, values: Any, numbers: list[int]) -> Call:
        name, phase, inputs, _ = values
        *storages, region, node = numbers
        return Call(name, (0.0, 0.0), tuple(storages[:inputs]), tuple(storages[inputs:]), phase, region, node)

    def _command(self, values: Any, numbers: list[int]) -> Command:
        part, method, kind, options, kinds = values
        at, *rest = numbers
        given: list[Any] = []
        places = [
            self._owners.places[number] if of == PARAMETERS else (self._owners.units[number], None)
            for number, of in zip(rest, kinds, strict=True)
            if of != NODES
        ]
        nodes = rest[len(places) :]
        if kind is int:
            given = [places[0][0].index, *nodes]
        elif kind is not None:
            given = [*places[0]] if kind is Unit else [tuple(unit for unit, _ in places)]
        return at, part, method, tuple(given), options

    def _life(self, values: Any, numbers: list[int]) -> Life:
        name, nbytes, kind, held, lives_on, _ = values
        born, *ends = numbers
        died = None if lives_on else ends.pop(0)
        return Life(name, nbytes, kind, born, died, ends[0] if ends else None, held)

    def _slot(self, values: Any, numbers: list[int]) -> tuple[SlotKey, SlotMark]:
        ordinal, unread = values
        region, storage, packed, *rest = numbers
        unpacked = None if unread else rest.pop(0)
        return SlotKey(region, ordinal), SlotMark(storage, packed, unpacked, rest)

    def _mark(self, values: Any, numbers: list[int]) -> RegionMark:
        region, begin, end, first_node, end_node, *inputs = numbers
        name = self._names[region // 2]
        return RegionMark(region, name, begin, first_node, end, end_node, tuple(inputs))

    # --- from the numbers of some blocks to those of all ---------------------------------------------

    def _table(self, rows: Sequence[_Row]) -> _Table:
        begins = np.cumsum([0, *(len(numbers) for _, numbers in rows)], dtype=np.int64)
        flat = np.array([each for _, numbers in rows for each in numbers], dtype=np.int64).reshape(-1, 2)
        kinds, places = flat[:, 0], flat[:, 1].copy()
        blocks = np.full(len(flat), -1)
        for kind in range(REGIONS + 1):
            mask = kinds == kind
            lines = self._lines if kind <= NODES else self._owners
            blocks[mask], places[mask] = lines.places_of(kind, places[mask])
        if (blocks == _LEFT_OUT).any():
            raise UnderivableError("something refers to a block that is left out")
        return _Table([values for values, _ in rows], begins, kinds, blocks, places)

    def _compare(self, kind: int, table: _Table) -> dict[int, np.ndarray]:
        """Return which numbers move with the block, by stretch, of the twins, which must agree."""
        moves, run, lines = {}, self._run, self._lines
        for block in range(run.gap - run.period, run.gap):
            for at, before in zip(lines.stretches(block), lines.stretches(block - run.period), strict=True):
                (begin, end), (first, last) = (lines.rows(kind, each) for each in (at, before))
                own, twin = (slice(*table.begins[[a, b]]) for a, b in ((begin, end), (first, last)))
                lengths = np.diff(table.begins[begin : end + 1]), np.diff(table.begins[first : last + 1])
                same = np.array_equal(*lengths) and table.values[begin:end] == table.values[first:last]
                if not same or not np.array_equal(table.kinds[own], table.kinds[twin]):
                    raise UnderivableError("records of blocks of one kind differ")
                step = table.blocks[own] - table.blocks[twin]
                if (table.places[own] != table.places[twin]).any() or not np.isin(
                    step, (0, run.period)
                ).all():
                    raise UnderivableError("blocks of one kind refer to other things")
                moves[at] = step > 0
                self._distances.update((table.blocks[own] - block)[step > 0].tolist())
        return moves

    def _all(
        self, kind: int, table: _Table, moves: Mapping[int, np.ndarray]
    ) -> Iterator[tuple[Any, list[int]]]:
        """Yield the rows of all blocks."""
        lines = self._lines
        for block, source, at in lines.all_stretches():
            begin, end = lines.rows(kind, at)
            moving = moves[at] if block >= 0 and self._run.is_left_out(block) else None
            numbers = self._mapped(table, begin, end, block, source, moving, kind)
            yield from zip(table.values[begin:end], numbers, strict=True)

    def _mapped(
        self, table: _Table, begin: int, end: int, block: int, source: int, moving: np.ndarray | None, of: int
    ) -> Iterator[list[int]]:
        """Yield the numbers of rows that ``block`` of all has from block ``source`` of those recorded."""
        run, own = self._run, slice(*table.begins[[begin, end]])
        kinds, blocks, places = (each[own] for each in (table.kinds, table.blocks, table.places))
        near = np.isin(blocks - source, [*self._distances])
        last = run.first + run.length - run.left_out - 1
        inside = (blocks > run.first + 1) & (blocks < last) & (blocks != source)
        if moving is None:
            crossing = (source >= 0) & ((blocks < run.gap) != (source < run.gap))
            moving = crossing & near & (blocks >= 0)
            inside &= ~near & (crossing | (source < run.first) | (source > last))
        if of == SLOTS:  # each block may unpack what comes before all: the last one to do so is what counts
            inside &= kinds != NODES
        if (inside & ~moving).any():
            raise UnderivableError("something refers to a block in the middle of a run")
        targets = np.where(blocks < run.gap, blocks, blocks + run.left_out)
        targets = np.where(moving, block + blocks - source, targets)
        numbers = places.copy()
        for kind in range(REGIONS + 1):
            mask = (kinds == kind) & (blocks >= 0)
            lines = self._lines if kind <= NODES else self._owners
            numbers[mask] = lines.number(kind, targets[mask], places[mask])
        flat, ends = numbers.tolist(), (table.begins[begin : end + 1] - table.begins[begin]).tolist()
        for first, stop in pairwise(ends):
            yield flat[first:stop]


class _Lines:
    """Cuts what is numbered in the order of a step into stretches: of the recorded blocks, and of all.

    They are: before the blocks; the forward of each; from the last one to the first, the backward of each.
    """

    def __init__(self, cuts: Sequence[Cut], last: Cut, run: Run, blocks: int) -> None:
        self._run, self._count, self._all_count = run, len(cuts) // 2, blocks
        self._begins = [np.array([0, *(cut[kind] for cut in cuts)]) for kind in range(NODES + 1)]
        self._begins[NODES] = self._begins[NODES][: self._count + 1]  # backward makes none that is named
        self._ends = [np.append(begins[1:], last[kind]) for kind, begins in enumerate(self._begins)]
        self._all_begins = []
        stretches = np.array([at for _, _, at in self.all_stretches()])
        for begins, ends in zip(self._begins, self._ends, strict=True):
            lengths = (ends - begins)[stretches[stretches < len(begins)]]
            self._all_begins.append(np.cumsum([0, *lengths[:-1]]))

    def stretches(self, block: int) -> tuple[int, int]:
        """Return the forward and the backward of a recorded block."""
        return 1 + block, 2 * self._count - block

    def rows(self, kind: int, stretch: int) -> tuple[int, int]:
        return int(self._begins[kind][stretch]), int(self._ends[kind][stretch])

    def all_stretches(self) -> Iterator[tuple[int, int, int]]:
        """Yield each stretch of all blocks: the block, the recorded one, and the stretch of that."""
        yield -1, -1, 0
        sources = [self._run.source(block) for block in range(self._all_count)]
        yield from ((block, source, 1 + source) for block, source in enumerate(sources))
        for block, source in reversed([*enumerate(sources)]):
            yield block, source, 2 * self._count - source

    def places_of(self, kind: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the block of each number, and its place there; below 0 and the number: it is in none."""
        at = np.maximum(np.searchsorted(self._begins[kind], numbers, "right") - 1, 0)
        backward = at > self._count
        blocks = np.where(backward, 2 * self._count - at, at - 1)
        blocks[numbers >= _ACCUMULATES] = -1
        return blocks, np.where(blocks < 0, numbers, 2 * (numbers - self._begins[kind][at]) + backward)

    def number(self, kind: int, blocks: np.ndarray, places: np.ndarray) -> np.ndarray:
        at = np.where(places % 2, 2 * self._all_count - blocks, 1 + blocks)
        found: np.ndarray = self._all_begins[kind][at] + places // 2
        return found


class Owners:
    """Knows the parameters, the units of leaves, and the regions of each block.

    A unit may hold parameters of several blocks, such as small adapters. So what is done with it is told by
    the parameter for which it is done; and of a leaf, whose units are used as one, by its place among those.
    """

    def __init__(
        self, units: UnitIndex, leaves: Mapping[nn.Module, tuple[Unit, ...]], blocks: Sequence[NamedBlock]
    ) -> None:
        self.units, self.places, self._leaves = units, [*units.segments()], leaves
        self._firsts = np.cumsum([0, *(len(unit.segments) for unit in units)]).tolist()
        of_block = [[*block.module.parameters()] for block in blocks]
        self._of: dict[int, list[list[int]]] = {
            UNITS: [
                [unit.index for module in block.module.modules() for unit in leaves.get(module, ())]
                for block in blocks
            ],
            PARAMETERS: [
                [self.parameter(unit, segment) for param in params for unit, segment in units.places(param)]
                for params in of_block
            ],
            REGIONS: [[2 * block + 1, 2 * block + 2] for block in range(len(blocks))],
        }
        holders = Counter(unit.index for params in of_block for unit in units.holding(params))
        self._inside = holders.keys() - {unit for of in self._of[UNITS] for unit in of}
        #: Of units of one block that are alike in all blocks of its kind: a parameter of the block.
        self._alone = {
            self.places[at][0].index: at
            for of in self._of[PARAMETERS]
            for at in sorted(of, reverse=True)
            if holders[self.places[at][0].index] == 1 and self._is_alike(self.places[at][0])
        }
        self._found: dict[int, dict[int, tuple[int, int]]] = {}

    def parameter(self, unit: Unit, segment: Segment) -> int:
        return int(self._firsts[unit.index]) + segment.index

    def unit(self, index: int, served: Segment | None) -> tuple[int, int]:
        """Return the number of what a unit is used for."""
        unit = self.units[index]
        if index in self._alone:
            return PARAMETERS, self._alone[index]
        if served is not None:
            return PARAMETERS, self.parameter(unit, served)
        if index in self._inside:
            raise UnderivableError("it is not known for which block a unit is used")
        return UNITS, index

    def _is_alike(self, unit: Unit) -> bool:
        return len(unit.segments) == 1 or not unit.trainable

    def layout_of(self, module: nn.Module) -> Iterator[object]:
        """Yield what calls of a block show of the units of its parameters."""
        frozen = [unit.index for unit in self.units.holding(module.parameters()) if not unit.trainable]
        for inner in module.modules():
            yield [(unit.numel, len(unit.segments)) for unit in self._leaves.get(inner, ())]
            mine = list[int]()
            for param in (each for each in inner._parameters.values() if each is not None):
                for unit, segment in self.units.places(param):
                    if unit.index not in mine:
                        mine.append(unit.index)
                    number = -1 if unit.trainable else frozen.index(unit.index)
                    yield mine.index(unit.index), segment.shape, number, unit.routed

    def keep(self, kept: Sequence[int]) -> None:
        """Number blocks as they are recorded."""
        index = {block: at for at, block in enumerate(kept)}
        for kind in (UNITS, PARAMETERS):
            self._found[kind] = {
                number: (index.get(block, _LEFT_OUT), place)
                for block, numbers in enumerate(self._of[kind])
                for place, number in enumerate(numbers)
            }
        regions = ((2 * at + 1 + place, (at, place)) for at in range(len(kept)) for place in range(2))
        self._found[REGIONS] = dict(regions)

    def places_of(self, kind: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the block of each number, and its place there, as :meth:`_Lines.places_of`."""
        found = [self._found[kind].get(number, (-1, number)) for number in numbers.tolist()]
        blocks, places = np.array(found, dtype=np.int64).reshape(-1, 2).T
        return blocks, places

    def number(self, kind: int, blocks: np.ndarray, places: np.ndarray) -> np.ndarray:
        of = self._of[kind]
        found = [of[block][place] for block, place in zip(blocks.tolist(), places.tolist(), strict=True)]
        return np.array(found, dtype=np.int64)


def _node(number: int) -> tuple[int, int]:
    return NODES, min(number, _ACCUMULATES)
