"""Records of blocks that repeat only some, from which the record of the whole model is derived.

[Note: what repeats]
Blocks are of one kind if their modules have the same classes, settings and shapes, their parameters the same
places in units, and if they are recomputed alike. A *run* is a stretch of blocks whose kinds have a period.
Of a run one block, two periods (*twins*) and the last blocks are recorded; whole periods between are left
out. A block that is left out returns what it was given, after its call has been compared with that of its
twin: the same tensors, the same settings, and no operator between two blocks.

[Note: layers that know their number]
A setting that counts the blocks is the same for all of them. A forward that decides by it what to do, other
than by a list of the model's config, is not noticed.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from infinity.activations.controller import NamedBlock, recomputable_blocks
from infinity.activations.recompute import in_backward
from infinity.activations.tensor_cache import patched
from infinity.core.errors import CheckpointError
from infinity.partition.unit import Unit, UnitIndex
from infinity.predict.derive import Derivation, Owners, Run, UnderivableError
from infinity.predict.operators import COLD
from infinity.predict.recording import Batch, Cut, Record, record_blocks

#: The longest period of blocks that is looked for.
_LONGEST = 12
#: What every module has.
_INTERNAL = frozenset(vars(nn.Module()))


def find_run(kinds: Sequence[object]) -> Run | None:
    """Return the run that leaves out the most blocks; None: none leaves out any."""
    found: list[Run] = []
    for period in range(1, min(_LONGEST, len(kinds) // 4) + 1):
        first = 0
        for at in range(len(kinds) - period + 1):
            ends = at + period == len(kinds) or kinds[at] != kinds[at + period]
            if ends:
                found.append(Run(first, at + period - first, period))
                first = at + 1
    best = max(found, key=lambda run: (run.left_out, -run.period), default=None)
    return best if best is not None and best.left_out else None


def record(
    model: Any, units: UnitIndex, leaves: Mapping[nn.Module, tuple[Unit, ...]], dtype: torch.dtype,
    batch: Batch, recomputes: Callable[[int], bool],
) -> Record:  # fmt: skip
    """Record one micro-batch of a model; arguments and errors as of :func:`record_blocks`.

    Of blocks that repeat only some run: see [Note: what repeats].
    """
    blocks = recomputable_blocks(model)
    owners = Owners(units, leaves, blocks)
    run = find_run(kinds_of(model, blocks, owners, recomputes))
    if run is not None:
        kept = run.kept(len(blocks))
        watched = _Watched(blocks, run, kept)
        with suppress(UnderivableError, CheckpointError):  # all of them, then
            some = record_blocks(
                model, units, leaves, dtype, batch, lambda region: recomputes(2 * kept[region // 2] + 1),
                [blocks[at] for at in kept], watched.installed,
            )  # fmt: skip
            if not batch.timed or watched.outlasts_caches(some):
                return Derivation(some, watched.backward, owners, blocks, run).record(recomputes)
    return record_blocks(model, units, leaves, dtype, batch, recomputes, blocks)


# --- which blocks are alike --------------------------------------------------------------------------


def kinds_of(
    model: Any, blocks: Sequence[NamedBlock], owners: Owners, recomputes: Callable[[int], bool]
) -> list[object]:
    """Return what is equal for blocks of one kind; see [Note: what repeats]."""
    numbers = [int(last) if (last := block.name.rpartition(".")[2]).isdecimal() else 0 for block in blocks]
    settings = [dict(_settings(block)) for block in blocks]
    counting = {
        name
        for name in set.intersection(*map(set, settings)) if len(blocks) > 1
        if len({type(own[name]) is int and own[name] - at for own, at in zip(settings, numbers)}) == 1
        and len({own[name] for own in settings}) == len(set(numbers))
    } if blocks else set()  # fmt: skip
    lists = [value for value in _lists(getattr(model, "config", None)) if len(value) == len(blocks)]
    return [
        (
            frozenset((name, value) for name, value in own.items() if name not in counting),
            tuple(_plain(value[at]) for value in lists),
            tuple(map(str, owners.layout_of(block.module))),
            recomputes(2 * at + 1),
        )
        for at, (own, block) in enumerate(zip(settings, blocks, strict=True))
    ]


def _settings(block: NamedBlock) -> Iterator[tuple[object, Any]]:
    """Yield all that a block's forward may depend on, by name."""
    where = ".".join(block.name.split(".")[-2:])
    for name, module in block.module.named_modules(remove_duplicate=False):
        yield name, type(module)
        yield (name, "training"), module.training
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for own, tensor in dict.items(tensors):
                facts = None if tensor is None else (tensor.shape, tensor.dtype, tensor.requires_grad)
                yield (name, kind, own), facts
        for own, value in vars(module).items():
            if own not in _INTERNAL:
                yield (name, "setting", own), _plain(value, where)


def _plain(value: Any, where: str = "") -> Any:
    """Return a setting in a form that can be compared; what is not known is equal to itself only.

    ``where`` ends the block's name, which is no difference in a name of one of its modules.
    """
    if isinstance(value, str):
        return f"{value}.".replace(f"{where}.", "#.") if where else value
    if type(value) is int or value is None:
        return value
    if isinstance(value, bool | float | bytes | torch.dtype | torch.device):
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), *(_plain(each, where) for each in value)
    if isinstance(value, dict):
        return dict, *((_plain(key, where), _plain(each, where)) for key, each in value.items())
    if isinstance(value, set | frozenset):
        return set, frozenset(_plain(each, where) for each in value)
    if isinstance(value, Tensor):
        return Tensor, value.shape, value.dtype
    if isinstance(value, MethodType):
        return MethodType, value.__func__, type(value.__self__)
    if isinstance(value, partial):
        return partial, *(_plain(each, where) for each in (value.func, value.args, value.keywords))
    return type(value), id(value)


def _lists(config: Any) -> Iterator[Sequence[Any]]:
    """Yield the lists of a model's config, some of which have an entry for each layer."""
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    for part in parts:
        for _, value in sorted(getattr(part, "__dict__", {}).items()):
            if isinstance(value, list | tuple):
                yield value


# --- blocks that are left out ------------------------------------------------------------------------


class _Watched:
    """Watches the calls of blocks that are recorded, and stands for the others."""

    def __init__(self, blocks: Sequence[NamedBlock], run: Run, kept: Sequence[int]) -> None:
        self._blocks, self._run = blocks, run
        self._index = {at: index for index, at in enumerate(kept)}
        self.backward: list[Cut | None] = [None] * len(kept)  # where backwards of blocks begin
        self._last = -1  # the block that was called last,
        self._returned: list[Any] = []  # weak references to the tensors that it returned,
        self._ended = 0  # and the operators that had ended then
        self._calls: dict[int, tuple[list[Any], list[Any], Any]] = {}  # of the twins, with what they returned

    @contextmanager
    def installed(self, made: Record) -> Iterator[None]:
        with ExitStack() as stack:
            for at, block in enumerate(self._blocks):
                watch = self._record if at in self._index else self._pass
                call = partial(watch, made, at, block.module.forward)
                stack.enter_context(patched(block.module, "forward", call))
                if at not in self._index:  # and uses nothing
                    stack.enter_context(patched(block.module, "_parameters", _Covered()))
            yield

    def outlasts_caches(self, made: Record) -> bool:
        """Return whether each block touches more than caches hold, so that more blocks change no age."""
        rows, cuts = made.rows, made.cuts
        spans = ((a.operators, b.operators) for a, b in pairwise(cuts))
        return all(sum(nbytes for _, nbytes, *_ in rows[begin:end]) >= COLD for begin, end in spans)

    def _called(self, at: int, operators: int, given: Sequence[Any]) -> list[Any]:
        """Return a call in a form that can be compared; what the block before returned is its place there."""
        if at != self._last + 1 or (self._run.first < at and operators != self._ended):
            raise UnderivableError("blocks are not called one after the other")
        self._last = at
        places = {id(ref()): ("returned", place) for place, ref in enumerate(self._returned)}
        return [
            places.get(id(each), weakref.ref(each)) if isinstance(each, Tensor) else _plain(each)
            for each in given
        ]

    def _left(self, made: Record, leaves: Sequence[Any]) -> None:
        self._returned = [weakref.ref(each) for each in leaves if isinstance(each, Tensor)]
        self._ended = len(made.rows)

    def _record(self, made: Record, at: int, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if in_backward():
            return own(*args, **kwargs)  # recomputed
        call = self._called(at, made.cuts[-1].operators, tree_leaves((args, kwargs)))
        returned = own(*args, **kwargs)
        leaves, spec = tree_flatten(returned)
        if self._run.gap - self._run.period <= at < self._run.gap:
            self._calls[at] = call, list(map(_facts, leaves)), spec
        trained = next((each for each in leaves if isinstance(each, Tensor) and each.requires_grad), None)
        if trained is not None:
            begins = partial(self._backward_begins, weakref.ref(made), self._index[at])
            trained.register_hook(begins)  # type: ignore[no-untyped-call]
        self._left(made, leaves)
        return returned

    def _backward_begins(self, made: "weakref.ref[Record]", index: int, grad: Tensor) -> None:
        if self.backward[index] is None and (record := made()) is not None:
            self.backward[index] = record.cut()

    def _pass(self, made: Record, at: int, own: object, *args: Any, **kwargs: Any) -> Any:
        """Stand for a block that is left out: return what it was given, as its twin does."""
        given = tree_leaves((args, kwargs))
        call = self._called(at, len(made.rows), given)
        wanted, facts, spec = self._calls[self._run.source(at)]
        same = len(call) == len(wanted) and all(map(_same, call, wanted))
        passed = [each for each, place in zip(given, call) if type(place) is tuple and place[0] == "returned"]
        if not same or list(map(_facts, passed)) != facts:
            raise UnderivableError("a block is called, or returns, in another way than its twin")
        self._left(made, passed)
        return tree_unflatten(passed, spec)


class _Covered(dict[str, Any]):
    """Parameters of a block that is left out, which has none."""

    covered = 1


def _facts(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return Tensor, leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad
    return _plain(leaf)


def _same(one: Any, other: Any) -> bool:
    """Return whether arguments of two calls are the same: tensors by identity."""
    if isinstance(one, weakref.ref) and isinstance(other, weakref.ref):
        return one() is other() is not None
    return type(one) is type(other) and bool(one == other)
