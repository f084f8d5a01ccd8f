"""Records a few of a model's equal blocks, and repeats what was recorded for the others.

[Note: what repeats]
A *round* is as many blocks as after which their kinds repeat, mostly one. Of many equal rounds two at the
beginning and two at the end run; those between return what they are given. What the second and the third
round recorded, neighbors in such a run, must be the same, but for numbers: of operators, storages, nodes of
autograd, regions, units. They are put where they are with all rounds; then the numbers of the rounds between
lie evenly between theirs. If anything is otherwise, all blocks run.

[Note: numbers]
Rows of a round are as far from what they refer to as its neighbor's rows are, in the forward or in the
backward pass, or refer to the same. All other rows refer to places before or behind the rounds between.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from infinity.activations.controller import NamedBlock, recomputable_blocks
from infinity.activations.profiler import Call, Life, Recording, RegionMark, SlotMark
from infinity.core.plan import SlotKey
from infinity.partition.unit import UnitIndex
from infinity.predict.operators import COLD
from infinity.predict.recording import Batch, Command, Leaves, Record, record_step

#: The most blocks of a round.
_LONGEST = 8
#: Rounds that run, the first half of them before those that do not.
_RUN = 4
#: Kinds of numbers; those of units and of their places are the same with any number of blocks.
_FIXED, _AT, _STORAGE, _NODE, _REGION, _UNIT, _PLACE = range(7)
_PLAIN = (bool, int, float, str, torch.dtype, type(None))

#: A row of a record: what is equal in all rounds, and numbers with their kinds.
_Row = tuple[Any, list[tuple[int, int]]]


class _UnequalError(Exception):
    """Rounds are not alike."""


class Rounds(NamedTuple):
    """Describes equal rounds of ``length`` blocks, of which ``more`` do not run."""

    first: int  # block of the second round
    length: int
    more: int

    @property
    def left_out(self) -> range:
        begin = self.first + self.length
        return range(begin, begin + self.more * self.length)

    @property
    def begins(self) -> tuple[int, int, int, int]:
        """Return the first block of each round that runs."""
        behind = self.left_out.stop
        return self.first - self.length, self.first, behind, behind + self.length


def find_rounds(kinds: Sequence[object]) -> list[Rounds]:
    """Return stretches of equal rounds of which some need not run."""
    found, begin = list[Rounds](), 0
    while begin < len(kinds):
        rows = []
        for length in range(1, _LONGEST + 1):
            end = begin + length
            while end < len(kinds) and kinds[end] == kinds[end - length]:
                end += 1
            rows.append(Rounds(begin + length, length, (end - begin) // length - _RUN))
        best = max(rows, key=lambda each: (len(each.left_out), -each.length))
        found += [best] if best.more > 0 else []
        begin += best.length * (best.more + _RUN) if best.more > 0 else 1
    return found


def record(
    model: Any, units: UnitIndex, leaves: Leaves, dtype: torch.dtype, batch: Batch,
    recomputes: Callable[[int], bool],
) -> Record:  # fmt: skip
    """Record one micro-batch of a model; arguments and errors as of :func:`record_step`."""
    blocks = recomputable_blocks(model)
    found = find_rounds(_kinds(blocks, units, [recomputes(2 * at + 1) for at in range(len(blocks))]))
    if found:
        left_out = {at for rounds in found for at in rounds.left_out}
        kept = [at for at in range(len(blocks)) if at not in left_out]
        some = record_step(
            model, units, leaves, dtype, batch, lambda region: recomputes(2 * kept[region // 2] + 1), left_out
        )
        places = {id(segment): at for at, (_, segment) in enumerate(units.segments())}
        held = [
            {places[id(segment)] for param in block.module.parameters() for _, segment in units.places(param)}
            for block in blocks
        ]
        of_place = [unit.index for unit, _ in units.segments()]
        try:
            for rounds in reversed(found):
                four = [set().union(*held[at : at + rounds.length]) for at in rounds.begins]
                there = rounds._replace(first=kept.index(rounds.first))
                some = _Repeated(some, there, four, of_place).record()
        except _UnequalError:
            pass
        else:
            for mark, block in zip(some.recorded.regions, blocks, strict=True):
                mark.name = block.name
            some.recomputes = recomputes
            return some
    return record_step(model, units, leaves, dtype, batch, recomputes)


def _kinds(blocks: Sequence[NamedBlock], units: UnitIndex, recomputed: Sequence[bool]) -> list[object]:
    """Return what is equal for equal blocks: modules, settings, and parameters.

    These are as far from those of the block before in each. A block's own number is no setting.
    """
    settings = [dict(_settings(block.module)) for block in blocks]
    names = set().union(*settings)
    counts = {
        name
        for name in names
        if all(type(own.get(name, at)) is int and own.get(name, at) == at for at, own in enumerate(settings))
    }
    found, before = list[object](), list[tuple[int, int]]()
    for block, own, again in zip(blocks, settings, recomputed, strict=True):
        held = [place for param in block.module.parameters() for place in units.places(param)]
        places = [(unit.index, segment.index) for unit, segment in held]
        same = [(segment.shape, unit.dtype, segment.whole.requires_grad) for unit, segment in held]
        apart = [(b - a, d - c) for (a, c), (b, d) in zip(before, places)]
        found.append((again, same, apart, {name: own[name] for name in own.keys() - counts}))
        before = places
    return found


def _settings(block: nn.Module) -> Iterator[tuple[tuple[str, str], object]]:
    for name, module in block.named_modules():
        yield (name, ""), (type(module), [(each.shape, each.dtype) for each in module.buffers(recurse=False)])
        for key, value in vars(module).items():
            if type(value) in _PLAIN:
                yield (name, key), value


class _Repeated:
    """Makes the record of all rounds from one of ``_RUN``; see the notes of the module."""

    def __init__(
        self, some: Record, rounds: Rounds, held: Sequence[Collection[int]], units: Sequence[int]
    ) -> None:
        self._some, self._weights, self._times = some, len(units), rounds.more + 1
        #: What the first four rounds hold: places, and units.
        self._held = {_PLACE: held, _UNIT: [{units[place] for place in each} for each in held]}
        made, first, length = some.recorded, rounds.first, rounds.length
        backward = {block.region // 2: block.backward[0] for block in made.blocks()}
        try:
            marks = [made.regions[first + i * length] for i in range(3)]
            begins = [backward[first + i * length - 1] for i in (2, 1, 0)]
        except (IndexError, KeyError) as error:
            raise _UnequalError from error
        self._ats = [*(mark.begin for mark in marks), *begins]
        if any(mark.region != 2 * at + 1 for at, mark in enumerate(made.regions)) or (
            some.batch.timed and sum(row[1] for row in some.rows[self._ats[0] : self._ats[1]]) < COLD
        ):  # a block is called twice, or so small that more blocks change what caches hold
            raise _UnequalError
        storages = self._most(max((*call.inputs, *call.outputs, self._weights - 1)) for call in made.calls)
        nodes = self._most(
            call.node if made.forward_end_node <= call.node < 2**62 else made.forward_end_node - 1
            for call in made.calls
        )
        regions = [2 * (first + i * length) + 1 for i in range(3)]
        #: Of each kind of numbers, where the second, third and fourth rounds begin; then, in backward, where
        #: the third, second and first ones do.
        self._begins = {
            _AT: self._ats,
            _STORAGE: storages,
            _NODE: [*(mark.first_node for mark in marks), *nodes[3:]],
            _REGION: [*regions, *[2**62] * 3],
        }

    def _most(self, numbers: Any) -> list[int]:
        found = list(accumulate(numbers, max))
        return [found[at - 1] + 1 for at in self._ats]

    def record(self) -> Record:
        some, made = copy(self._some), self._some.recorded
        some.recorded = recorded = Recording()
        lives = list(map(self._life_row, made.storages.lives, range(len(made.storages.lives))))
        slots = list(map(self._slot_row, made.slots.items()))
        at = [command[0] for command in some.calls]
        regions = [key.region for key in made.slots]
        marks = [mark.region for mark in made.regions]
        forward = self._begins[_REGION]
        operators = list(self._all(list(map(self._call_row, made.calls, some.rows)), self._ats))
        some.calls = [
            (numbers[0], *values[:2], *tree_unflatten(numbers[1:], values[2]))
            for values, numbers in self._all(
                list(map(_command_row, some.calls)), [bisect_left(at, each) for each in self._ats]
            )
        ]
        some.rows = [values[-1] for values, _ in operators]
        for (call, inputs, _), (*storages, region, node) in operators:
            used, written = tuple(storages[:inputs]), tuple(storages[inputs:])
            recorded.calls.append(call._replace(inputs=used, outputs=written, region=region, node=node))
        alive = set[int]()
        for values, numbers in self._all(lives, self._begins[_STORAGE]):
            (name, nbytes, kind, held, is_alive, died, returned), ends = values, iter(numbers)
            if is_alive:
                alive.add(len(recorded.storages.lives))
            life = Life(name, nbytes, kind, next(ends), held=held)
            life.died, life.returned = next(ends) if died else None, next(ends) if returned else None
            recorded.storages.lives.append(life)
        for (ordinal, coded, unpacked), numbers in self._all(
            slots, [bisect_left(regions, each) for each in forward]
        ):
            region, storage, packed, *nodes = numbers
            slot = SlotMark(storage, packed, coded, nodes.pop(0) if unpacked else None, nodes)
            recorded.slots[SlotKey(region, ordinal)] = slot
        rows: list[_Row] = [
            (
                (),
                [
                    (_REGION, mark.region), (_AT, mark.begin), (_NODE, mark.first_node), (_AT, mark.end),
                    (_NODE, mark.end_node), (_AT, mark.saved), *self._storages(mark.inputs),
                ],
            )
            for mark in made.regions
        ]  # fmt: skip
        for _, (region, begin, node, end, end_node, saved, *given) in self._all(
            rows, [bisect_left(marks, each) for each in forward]
        ):
            mark = RegionMark(region, "", begin, node, end, end_node, tuple(given), saved)
            recorded.regions.append(mark)
        recorded.phase, recorded.alive_after = made.phase, frozenset(alive)
        recorded.forward_end_node = self._moved(_NODE, made.forward_end_node, before=False)
        recorded.backward_end = self._moved(_AT, made.backward_end, before=True)
        return some

    # Rows, as what is equal in all rounds and numbers.

    def _storages(self, indices: Sequence[int]) -> Iterator[tuple[int, int]]:
        return ((_PLACE if index < self._weights else _STORAGE, index) for index in indices)

    def _call_row(self, call: Call, row: object) -> _Row:
        numbers = [*self._storages((*call.inputs, *call.outputs)), (_REGION, call.region), (_NODE, call.node)]
        equal = call._replace(times=(0.0, 0.0), inputs=(), outputs=(), region=0, node=0)
        return (equal, len(call.inputs), row), numbers

    def _life_row(self, life: Life, index: int) -> _Row:
        ends = [(_AT, at) for at in (life.born, life.died, life.returned) if at is not None]
        alive = index in self._some.recorded.alive_after
        there = life.died is not None, life.returned is not None
        return (life.name, life.nbytes, life.kind, life.held, alive, *there), ends

    def _slot_row(self, slot: tuple[SlotKey, SlotMark]) -> _Row:
        (region, ordinal), mark = slot
        numbers = [(_REGION, region), *self._storages([mark.storage]), (_AT, mark.packed)]
        numbers += [] if mark.unpacked is None else [(_AT, mark.unpacked)]
        numbers += [(_NODE, node) for node in mark.nodes]
        return (ordinal, mark.coded, mark.unpacked is not None), numbers

    # Where they are with all rounds.

    def _all(self, rows: Sequence[_Row], begins: Sequence[int]) -> Iterator[tuple[Any, list[int]]]:
        """Yield the rows of all rounds; the rounds begin at ``begins`` of ``rows``."""
        second, third, fourth, third_back, second_back, first_back = begins
        yield from self._elsewhere(rows[:second], before=True)
        yield from self._between(rows[second:third], rows[third:fourth], back=False)
        yield from self._elsewhere(rows[fourth:third_back], before=False)
        yield from self._between(rows[second_back:first_back], rows[third_back:second_back], back=True)
        yield from self._elsewhere(rows[first_back:], before=True)

    def _elsewhere(self, rows: Sequence[_Row], *, before: bool) -> Iterator[tuple[Any, list[int]]]:
        for values, numbers in rows:
            yield values, [self._moved(kind, number, before=before) for kind, number in numbers]

    def _moved(self, kind: int, number: int, *, before: bool) -> int:
        """Return a number of a row that is ``before`` the rounds between (and in backward behind them)."""
        if kind not in self._begins:
            return number
        _, third, fourth, _, second_back, first_back = self._begins[kind]
        # A moment at which a round ends is one at which the next begins: the row tells.
        is_moment, more = kind == _AT, self._times - 1
        if before and is_moment and third < number < fourth:
            raise _UnequalError  # it ends in a later round: behind or in one of those between?
        behind = number >= third + (before and is_moment)
        behind_back = number >= second_back + (not before and is_moment)
        return number + more * ((fourth - third) * behind + (first_back - second_back) * behind_back)

    def _between(
        self, one: Sequence[_Row], other: Sequence[_Row], *, back: bool
    ) -> Iterator[tuple[Any, list[int]]]:
        """Yield the rows of the second round, those between, and the third; in backward the other way."""
        if len(one) != len(other):
            raise _UnequalError
        values, ends = [each for each, _ in one], list[list[int]]()
        strides = list[list[int]]()
        for (value, numbers), (same, others) in zip(one, other):
            if value != same or [kind for kind, _ in numbers] != [kind for kind, _ in others]:
                raise _UnequalError
            pairs = [self._apart(kind, a, b) for (kind, a), (_, b) in zip(numbers, others)]
            ends.append([begin for begin, _ in pairs])
            strides.append([stride for _, stride in pairs])
        times = range(self._times + 1)
        for i in reversed(times) if back else times:
            for value, begin, stride in zip(values, ends, strides):
                yield value, [a + i * b for a, b in zip(begin, stride)]

    def _apart(self, kind: int, one: int, other: int) -> tuple[int, int]:
        """Return a number of the second round, and how far it is from that of the next one."""
        apart, more = other - one, self._times - 1
        if not apart:
            return self._moved(kind, one, before=True), 0
        if kind in self._held:
            first_has, second_has, third_has, fourth_has = self._held[kind]
            if one in second_has and other in third_has and not apart % self._times:
                return one, apart // self._times
            if one in first_has and other in second_has:
                return one, apart
            if one in third_has and other in fourth_has:
                return one - more * apart, apart
        if kind not in self._begins:
            raise _UnequalError
        second, third, _, _, second_back, first_back = self._begins[kind]
        forward, backward = third - second, first_back - second_back
        if apart == forward:
            return one, forward
        if apart == -backward:
            return one + more * (forward + backward), -backward
        raise _UnequalError


def _command_row(command: Command) -> _Row:
    at, part, method, args, options = command
    numbers, spec = tree_flatten((args, options))
    kinds = [_FIXED if isinstance(number, bool) else _UNIT for number in numbers]
    if method == "receive":
        kinds = [_PLACE, _FIXED]
    elif part == "pins" and len(kinds) > 1:
        kinds[1] = _NODE
    return (part, method, spec), [(_AT, at), *zip(kinds, map(int, numbers))]
