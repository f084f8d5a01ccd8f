"""Runs all micro-batches through a block before the next, so that a step reads every weight only twice.

[Note: slices]
The whole step's batch goes through the model's own forward once, with stand-ins in the places of the modules
that it calls. A block's stand-in runs the block on one slice of the batch after another, each under
``torch.utils.checkpoint``: only the block's inputs are kept, or stored. Autograd runs the newest nodes first,
so backward, too, finishes all slices of a block before the block below. A block with experts takes all slices
together, under one checkpoint (:mod:`infinity.engine.expert_blocks`).

[Note: the tail]
What follows the last block (norm, head, loss) must never see the whole batch, since nothing is as large as
its logits. So the tail runs once per slice, under checkpoint as well: the model is called again with the
slice's part of the batch, and modules that have run give back their output's part for that slice. Then an
exception leaves the forward of the whole batch.

[Note: between blocks]
What blocks return is not joined: the model gets a tensor that has the shape of all rows and knows its parts,
and hands it to the next block. The parts depart from autograd's graph and arrive where the next block takes
them (:mod:`infinity.activations.passing`), so they may leave device memory meanwhile. An operator that the
model itself runs on such a tensor joins the parts.

[Note: gradients add up first]
Autograd adds a parameter's gradients of all slices before the parameter gets their sum. So ranks
reduce once in a step; and beside the budgets there is memory for the gradients of one block.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from infinity.activations.passing import Passed, Passing
from infinity.activations.recompute import Unwritten, in_backward, recomputed, untraced
from infinity.activations.tensor_cache import TensorCache
from infinity.core.errors import StateError
from infinity.device.accelerator import trim_heap
from infinity.engine.expert_blocks import Arguments, Call, ExpertBlock
from infinity.engine.expert_parts import Share
from infinity.engine.stand_ins import Calls, called
from infinity.partition.tiles import METADATA
from infinity.partition.unit import UnitIndex
from infinity.planner.passing import Rooms

Loss = Callable[..., Tensor]


class Losses(NamedTuple):
    """Holds ``losses``, ``(micro_batches,)``, the loss of each slice, and ``loss``, ``()``, their mean."""

    loss: Tensor
    losses: Tensor


class Blocks(NamedTuple):
    """Holds the modules that a model runs one after another, and the name of their list."""

    name: str
    modules: tuple[nn.Module, ...]

    @classmethod
    def of(cls, model: nn.Module) -> "Blocks":
        lists = [
            (sum(param.numel() for param in module.parameters()), name, module)
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList)
        ]
        numel, name, largest = max(lists, key=lambda item: item[0], default=(0, "", nn.ModuleList()))
        if not numel:
            raise StateError(
                f"{type(model).__name__} has no nn.ModuleList with parameters, so its blocks cannot be "
                "found. Use the ordinary schedule"
            )
        return cls(name, tuple(largest))

    def held(
        self, units: UnitIndex, experts: Mapping[nn.Module, ExpertBlock], *, groups: bool
    ) -> tuple[list[set[int]], list[set[int]], str]:
        """Return each block's units, those of its tiles that are used more than once, and what blocks are.

        ``groups``: micro-batches go through experts in several, between which tiles stay in memory.
        """
        whole, tiles = list[set[int]](), list[set[int]]()
        for block in self.modules:
            places = [(units.places(param), units.find(param)) for param in block.parameters()]
            whole.append({place[0].index for _, place in places if place is not None})
            own = {unit.index for parts, place in places if place is None for unit, _ in parts}
            once = block in experts and experts[block].in_parts
            tiles.append(set() if once and not groups else own)
            whole[-1] |= own if once and groups else set()
        return whole, tiles, str(self)

    def __str__(self) -> str:
        return f"{self.name}, {len(self.modules)} x {type(self.modules[0]).__name__}"


class LayerSchedule:
    """Runs a model on a whole step's batch, all its micro-batches through a block before the next.

    Call it in place of the model, outside ``no_sync``, and run ``backward`` on what it returns. Logits of the
    whole batch never exist, and neither does any other output than the loss. Blocks, the members of the
    largest ``nn.ModuleList``, and what follows them are recomputed in backward, so the model needs no
    checkpointing of its own. Dropout draws other numbers than a loop over micro-batches.

    ``micro_batches`` are slices of each batch; ``loss`` returns the loss of one, ``()``, given its part of
    the arguments, and runs again in backward; by default it is the ``loss`` of what the model returns.
    ``cache`` stores what blocks return as far as ``rooms`` say that it does not fit; without them all stays.
    ``share`` tells which share of the room for a part of a block's experts a tile takes. ``group`` is how
    many micro-batches go through a block with experts together; None: all. ``turns`` says whose each slice
    is, and ``within`` returns a context manager in which its work is done.
    """

    def __init__(
        self, model: nn.Module, micro_batches: int, loss: Loss | None = None,
        cache: TensorCache | None = None, rooms: Callable[..., Rooms] = lambda together: Rooms(None),
        share: Share = lambda unit: 0.0, *, group: int | None = None, turns: Sequence[str | None] = (),
        within: Callable[[Any], AbstractContextManager[Any]] = nullcontext,
    ) -> None:  # fmt: skip
        self.micro_batches, self._model = micro_batches, model
        self.group = micro_batches if group is None else group
        for name, number in (("micro_batches", micro_batches), ("group", self.group)):
            if number < 1:
                raise ValueError(f"{name}: got {number}; wanted at least 1")
        self.turns, self.within = turns or [None] * micro_batches, within
        heads = getattr(getattr(model, "config", None), "num_attention_heads", None)
        self.heads = heads if type(heads) is int else 0
        self.blocks = Blocks.of(model)
        if cache is None:
            cache = TensorCache(next(model.parameters()).device, {}, lambda wait: wait())
        self.loss = loss or partial(_loss_of, model)
        self.calls = Calls(model, set(self.blocks.modules))
        #: Blocks with experts, which take all slices together.
        self.expert_blocks = {
            block: run for block in self.blocks.modules if (run := ExpertBlock.of(block, share))
        }
        room = partial(rooms, together=bool(self.expert_blocks))
        self.passing = Passing(cache, len(self.blocks.modules), micro_batches, room)

    def __call__(self, *args: Any, **kwargs: Any) -> Losses:
        """The losses of a batch, ``micro_batches`` slices of equal size.

        Tensors with as many rows (dim 0) as the batch's first tensor are cut, here and between blocks;
        everything else is every slice's, but of ``num_items_in_batch``, by which models of transformers
        divide the sum of a batch's losses, its share. Caches of keys and values are left out. A ValueError
        says that rows are no multiple of ``micro_batches``, or cannot be told from tokens.
        """
        check_model(self._model, self.blocks)
        if kwargs.get("num_items_in_batch") is not None:
            kwargs["num_items_in_batch"] = kwargs["num_items_in_batch"] / self.micro_batches
        try:
            with self.calls.handed_to(self.begin((args, kwargs)).call):
                self.loss(*args, **kwargs)
        except Finished as finished:
            return Losses(finished.losses.mean(), finished.losses)
        raise StateError(
            f"{self.blocks}: the forward ended without a call of the last one. Blocks that are skipped "
            "or nested need the ordinary schedule"
        )

    def begin(self, batch: Any) -> "Forward":
        """Return the forward of a batch, the arguments of a call."""
        return Forward(self, batch)

    def check_beside(self, module: nn.Module) -> None:
        """Raise if ``module``, which gets the whole batch, trains what each slice has its own of."""
        if len(set(self.turns)) > 1 and any(param.requires_grad for param in module.parameters()):
            raise StateError(
                f"{type(module).__name__} runs before the blocks, on all micro-batches at once, and has "
                "adapters, which are chosen for each: leave it out of them, or use the ordinary schedule"
            )

    def __repr__(self) -> str:
        return f"LayerSchedule({self.micro_batches} micro-batches through each of {self.blocks})"


class Finished(Exception):  # noqa: N818 (nothing went wrong)
    """Raised to leave the whole batch's forward after the last block and every slice's tail have run."""

    def __init__(self, losses: Tensor) -> None:
        super().__init__()
        self.losses = losses


class Forward:
    """Runs the whole batch's forward: blocks slice by slice, after the last one the tails.

    Autograd's graph holds it until backward, so it must not hold the losses.
    """

    def __init__(self, schedule: LayerSchedule, batch: Any) -> None:
        self.schedule, self.batch, self.slices = schedule, batch, schedule.micro_batches
        lengths = (len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
        self.rows = next(lengths, 0)
        if not self.rows or self.rows % self.slices:
            raise ValueError(
                f"a batch of {self.rows} rows; wanted a multiple of micro_batches = {self.slices}"
            )
        self.heads = schedule.heads
        #: Outputs of modules in the order of their calls, each as one tree per slice.
        self.given: dict[nn.Module, list[Sequence[Any]]] = {}
        #: What modules beside the blocks returned: the tails take it as it was returned.
        self._unwritten: list[tuple[nn.Module, Unwritten]] = []

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        blocks = self.schedule.blocks.modules
        if module not in blocks:
            self.schedule.check_beside(module)
            output = module(*args, **kwargs)
            self._unwritten.append((module, Unwritten(output)))
        else:
            outputs = self._in_slices(module, args, kwargs)
            if module is blocks[-1]:
                self._end(outputs)
            output = self._joined(outputs, module)
        self.given.setdefault(module, []).append(self._slices(output))
        return output

    def _in_slices(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        kwargs = without_cache(kwargs)
        self._check((args, kwargs), block)
        passing, number = self.schedule.passing, self.schedule.blocks.modules.index(block)
        experts = self.schedule.expert_blocks.get(block)
        parts, outputs = self._slices((args, kwargs)), list[Any]()
        for turn, slices in self._together(block):
            given = tree_map(lambda leaf: None if hasattr(leaf, "get_seq_length") else leaf, parts[slices])
            run = partial(run_block, block) if experts is None else Call(experts)
            with self.schedule.within(turn):
                returned = recomputed_block(run, given, block)
            returned.reverse()
            while returned:  # of what departed nothing may be held
                departed = passing.depart(returned.pop(), self.rows // self.slices, number, len(outputs))
                outputs.append(departed)
        return outputs

    def _together(self, block: nn.Module) -> Iterator[tuple[str | None, slice]]:
        """Yield the slices that go through ``block`` in one call: with experts, a group of one turn."""
        first = 0
        for turn, each in groupby(self.schedule.turns):
            last = first + len([*each])
            step = self.schedule.group if block in self.schedule.expert_blocks else 1
            yield from ((turn, slice(i, min(i + step, last))) for i in range(first, last, step))
            first = last

    def _end(self, outputs: list[Any]) -> NoReturn:
        """Run the tails on ``outputs`` of the last block, and leave the forward by raising."""
        blocks = self.schedule.blocks
        skipped = len(blocks.modules) - 1 - sum(block in self.given for block in blocks.modules)
        if skipped:
            raise StateError(f"{blocks}: the last one ran, and {skipped} before it did not")
        self._check_unwritten()
        losses = []
        for index, batch in enumerate(self._slices(self.batch)):
            with self.schedule.within(self.schedule.turns[index]):
                losses.append(
                    recomputed_block(partial(self._tail, index, batch), outputs[index], blocks.modules[-1])
                )
            self._check_unwritten()
        raise Finished(torch.stack(losses))

    def _tail(self, index: int, batch: Any, returned: Any) -> Tensor:
        """Return the loss of slice ``index``, for which the last block ``returned``; see [Note: the tail]."""
        turns: Counter[nn.Module] = Counter()

        def call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            turn, outputs = turns[module], self.given.get(module, [])
            turns[module] += 1
            if module is self.schedule.blocks.modules[-1] and not turn:
                return returned
            if turn >= len(outputs):
                return module(*args, **kwargs)
            return tree_map_only(Passed, lambda each: Sliced.of([each]), outputs[turn][index])

        args, kwargs = batch
        with self.schedule.calls.handed_to(call):
            loss = self.schedule.loss(*args, **kwargs)
        if not isinstance(loss, Tensor) or loss.dim():
            raise StateError(f"the loss of a slice is {_described(loss)}; wanted a scalar tensor")
        return loss

    def _check_unwritten(self) -> None:
        """Raise if the model wrote into what a tail, or backward's recomputation of a block, takes again."""
        for module, unwritten in self._unwritten:
            if not unwritten:
                raise StateError(
                    f"what {type(module).__name__} returned is written in place, and is needed again. "
                    "Let the model write into a copy, or use the ordinary schedule"
                )

    def _slices(self, tree: Any, rows: int = 0) -> list[Any]:
        """Cut a tree into one per slice: tensors with all ``rows`` are cut, other values are in each."""
        leaves, spec = tree_flatten(tree)
        rows = rows or self.rows
        parts = [
            self._parts(leaf) if _has(leaf, rows) or self._of_heads(leaf, rows) else (leaf,) * self.slices
            for leaf in leaves
        ]
        return [tree_unflatten([part[index] for part in parts], spec) for index in range(self.slices)]

    def _parts(self, leaf: Tensor) -> Sequence[Any]:
        if type(leaf) is Sliced:
            if len(leaf.parts) == self.slices and leaf.unwritten:
                return leaf.parts
            leaf = leaf.whole()
        return torch.split(leaf, len(leaf) // self.slices)

    def _of_heads(self, leaf: Any, rows: int) -> bool:
        """Return whether a leaf has a bias for each head of each row, ``(b * heads, 1, s)`` (ALiBi)."""
        return self.heads > 0 and _has(leaf, rows * self.heads) and leaf.shape[1:2] == (1,)

    def _joined(self, trees: Sequence[Any], block: nn.Module) -> Any:
        """Return the tree of the whole batch from the trees that ``block`` returned, one per slice."""
        height, joined = self.rows // self.slices, []
        for column in zip(*(tree_leaves(tree) for tree in trees), strict=True):
            first = column[0]
            same = torch.equal if isinstance(first, Tensor) else lambda one, other: bool(one == other)
            if isinstance(first, Passed) or _has(first, height):
                joined.append(Sliced.of(column))
            elif all(same(first, other) for other in column[1:]):
                joined.append(first)
            else:
                raise StateError(
                    f"{type(block).__name__} returned {_described(first)}, which differs between slices and "
                    f"has not their {height} rows, so it cannot be joined. Use the ordinary schedule"
                )
        return tree_unflatten(joined, tree_flatten(trees[0])[1])

    def _check(self, args: Any, block: nn.Module) -> None:
        """Raise if a mask ``(s, s)`` among the arguments of ``block`` cannot be told from one ``(b, s)``."""
        leaves = [leaf for leaf in tree_leaves(args) if _has(leaf, self.rows)]
        square = self.slices > 1 and leaves and leaves[0].shape[1:2] == (self.rows,)
        if square and any(other.dim() < 3 for other in leaves[1:]):
            raise ValueError(
                f"{self.rows} rows of {self.rows} tokens: which arguments of {type(block).__name__} have the "
                "batch's rows cannot be told. Change the number of rows or the length"
            )
        biases = [leaf for leaf in leaves if leaf.dim() == 3 and leaf.shape[1] == 1]
        if self.slices > 1 and self.heads == self.rows and biases and leaves[0].shape[1:2] != (1,):
            raise ValueError(
                f"{self.rows} rows and as many heads: whether {_described(biases[0])}, an argument of "
                f"{type(block).__name__}, belongs to rows or to heads cannot be told: change the number of "
                "rows"
            )


class Sliced(Tensor):
    """Stands for the rows of all slices, which are never joined unless an operator reads them.

    ``parts`` are in their order, each a tensor or a :class:`Passed`.
    """

    stands_in = True
    parts: Sequence[Any]
    _whole: Tensor | None
    unwritten: Unwritten  # the joined rows are: else the parts are out of date

    @classmethod
    def of(cls, parts: Sequence[Any]) -> "Sliced":
        first = parts[0]
        shape = len(parts) * first.shape[0], *first.shape[1:]
        self: Sliced = Tensor._make_wrapper_subclass(
            cls, shape, dtype=first.dtype, device=first.device, requires_grad=first.requires_grad
        )
        self.parts, self._whole, self.unwritten = parts, None, Unwritten(None)
        if first.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                self.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        return self

    @classmethod
    @untraced
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name == "__get__":  # of a property, which func is bound to
            name = func.__self__.__name__
        if name == "__set__":
            raise StateError(_ASSIGNED)
        if name in METADATA and name != "__repr__":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(Sliced, Sliced.whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *args: Any) -> Any:
        raise StateError(f"{func}: {_BYPASSED}")

    def whole(self) -> Tensor:
        """Return the rows of all slices, joined when they are first asked for.

        They are a copy even of one part, since the model may write into them, and backward recomputes a block
        from the parts.
        """
        if self._whole is None:
            parts = [each.arrive(each.ticket) if isinstance(each, Passed) else each for each in self.parts]
            self._whole = torch.cat(parts)
            self.unwritten = Unwritten(self._whole)
        return self._whole


_ASSIGNED = (
    "an attribute (.data, .grad, .requires_grad) of what a block returned for all micro-batches is assigned. "
    "Let the model make a new tensor, or use the ordinary schedule"
)
_BYPASSED = (
    "what a block returned for all micro-batches came to a function that torch does not announce to it (a "
    "torch.autograd.Function, a compiled one). Use the ordinary schedule"
)


def _refuse_gradient(grad: Tensor) -> None:
    raise StateError(_BYPASSED)  # it would be lost: parts have gradients, in their blocks


def check_model(model: nn.Module, blocks: Blocks) -> None:
    """Raise StateError if a model recomputes its blocks itself, or collects a loss from inside them."""
    owners = {*blocks.modules, *(parent for parent, _, _ in called(model, set(blocks.modules)))}
    if any(getattr(module, "gradient_checkpointing", False) is True for module in owners):
        raise StateError(
            f"{type(model).__name__} has gradient_checkpointing on, and the layer schedule recomputes blocks "
            "itself; turn it off"
        )
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise StateError(
            "output_router_logits is on: that loss needs the routers of all blocks at once. Turn it off, or "
            "use the ordinary schedule"
        )


def without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "use_cache": False} if "use_cache" in kwargs else kwargs


def run_block(block: nn.Module, given: Sequence[Arguments]) -> list[Any]:
    return [block(*args, **kwargs) for args, kwargs in given]


def recomputed_block(function: Callable[[Any], Any], tree: Any, block: nn.Module) -> Any:
    """Return ``function(tree)``, recomputed in backward; each :class:`Passed` arrives, both times."""
    leaves, spec = tree_flatten(tree)
    passed = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Passed)}

    def call(*leaves: Any) -> Any:
        given, backward = list(leaves), in_backward()
        trim_heap()  # of the block before
        for place, each in sorted(passed.items(), reverse=backward):  # each brings in what comes after it
            given[place] = each.arrive(leaves[place])
        unwritten = Unwritten([given[place] for place in passed])
        output = function(tree_unflatten(given, spec))
        if not unwritten:
            raise StateError(
                f"what {type(block).__name__} takes or returns is written in place, and cannot be recomputed "
                "from then. Let the model write into a copy, or use the ordinary schedule"
            )
        return output

    return recomputed(call, *(leaf.ticket if isinstance(leaf, Passed) else leaf for leaf in leaves))


def _loss_of(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    output = model(*args, **kwargs)
    loss = getattr(output, "loss", None)
    if loss is None:
        raise StateError(
            f"{type(model).__name__} returned {type(output).__name__} without a loss. Give it targets "
            "(labels=...), or give the schedule a function that computes the loss of one slice"
        )
    return loss  # type: ignore[no-any-return]


def _has(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
