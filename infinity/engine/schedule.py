"""All micro-batches through a block before the next: a step reads every weight twice, not twice for each.

[Note: stand-ins]
The whole step's batch goes through the model's own forward once. While it does, stand-ins are in the
places of the modules that this forward calls. A block's stand-in runs the block on one slice of the
batch after another, each under ``torch.utils.checkpoint``: only the block's inputs are kept. Autograd
runs the newest nodes first, so backward, too, finishes all slices of a block before the block below.

[Note: the tail]
What follows the last block (norm, head, loss) must never see the whole batch: nothing is as large as
its logits. So the tail runs once for each slice, under checkpoint as well: the model is called again
with the slice's part of the batch, and what has run already gives back its part of what it gave. Then
an exception leaves the forward of the whole batch.

[Note: gradients add up first]
Autograd adds a parameter's gradients of all slices before the parameter gets their sum. So ranks
reduce once in a step; and beside the budgets there is memory for the gradients of one block.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from infinity.core.errors import StateError

Loss = Callable[..., Tensor]
#: Outputs of modules in the order of their calls, each as one tree per slice.
Given = dict[nn.Module, list[Sequence[Any]]]


class Losses(NamedTuple):
    """``losses``, ``(micro_batches,)``: each slice's loss; ``loss``, ``()``: their mean."""

    loss: Tensor
    losses: Tensor


class Blocks(NamedTuple):
    """The modules that a model runs one after another, and the name of their list."""

    name: str
    modules: tuple[nn.Module, ...]

    def __str__(self) -> str:
        return f"{self.name}, {len(self.modules)} x {type(self.modules[0]).__name__}"


class LayerSchedule:
    """Runs a model on a whole step's batch, all its micro-batches through a block before the next.

    Call it in place of the model, outside ``no_sync``, and run ``backward`` on what it returns. Logits of
    the whole batch never exist, and neither does any other output than the loss. Dropout draws other
    numbers than a loop over micro-batches, which goes through the blocks in another order.

    Args:
        model: The model. Its blocks are the largest ``nn.ModuleList``; they, and what follows them, are
            recomputed in backward, so it needs no checkpointing of its own.
        micro_batches: Slices of each batch.
        loss: The loss of one slice, ``()``, given its part of the arguments; by default the ``loss`` of
            what the model returns. It runs again in backward.

    Raises:
        StateError: The model has no ``nn.ModuleList`` with parameters.
        ValueError: ``micro_batches`` is not positive.
    """

    def __init__(self, model: nn.Module, micro_batches: int, loss: Loss | None = None) -> None:
        if micro_batches < 1:
            raise ValueError(f"micro_batches: got {micro_batches}; wanted at least 1")
        self.micro_batches = micro_batches
        self.blocks = find_blocks(model)
        self._model = model
        self._loss = loss or partial(_loss_of, model)
        calls = _calls(model, set(self.blocks.modules))
        self._places = [Place(parent, name, StandIn(module, self)) for parent, name, module in calls]
        self.caller: Caller | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Losses:
        """The losses of a batch, ``micro_batches`` slices of equal size.

        Tensors with as many rows (dim 0) as the batch's first tensor are cut, here and between blocks;
        everything else is every slice's. Caches of keys and values are left out.

        Raises:
            StateError: The model cannot be scheduled; says why.
            ValueError: The rows are no multiple of ``micro_batches``, or cannot be told from tokens.
        """
        self._check()
        whole = Whole(self, Cut.of_batch((args, kwargs), self.micro_batches), (args, kwargs))
        with self.calling(whole), suppress(Finished):
            self._loss(*args, **kwargs)
        if whole.losses is None:
            raise StateError(
                f"{self.blocks}: the forward ended without a call of the last one. Blocks that are skipped "
                "or nested need the ordinary schedule"
            )
        return Losses(whole.losses.mean(), whole.losses)

    def __repr__(self) -> str:
        return f"LayerSchedule({self.micro_batches} micro-batches through each of {self.blocks})"

    @contextmanager
    def calling(self, caller: "Caller") -> Iterator[None]:
        """Let ``caller`` decide, inside this context, what a call of the model's modules does."""
        before = [(place.parent, place.name, place.parent._modules[place.name]) for place in self._places]
        outer, self.caller = self.caller, caller
        try:
            for place in self._places:
                place.parent._modules[place.name] = place.stand_in
            yield
        finally:
            for parent, name, module in before:
                parent._modules[name] = module
            self.caller = outer

    def tail(self, given: Given, index: int, batch: Any, *_: Any) -> Tensor:
        """The loss of slice ``index``, from what the blocks have ``given``."""
        args, kwargs = batch
        with self.calling(Tail(given, index)):
            loss = self._loss(*args, **kwargs)
        if not isinstance(loss, Tensor) or loss.dim():
            raise StateError(f"the loss of a slice is {_described(loss)}; wanted a scalar tensor")
        return loss

    def _check(self) -> None:
        """Nothing in the model gets in the way.

        Raises:
            StateError: It recomputes its blocks itself, or collects a loss from inside them.
        """
        owners = {*self.blocks.modules, *(place.parent for place in self._places)}
        if any(getattr(module, "gradient_checkpointing", False) is True for module in owners):
            raise StateError(
                f"{type(self._model).__name__} has gradient_checkpointing on, and the layer schedule "
                "recomputes blocks itself; turn it off"
            )
        if getattr(getattr(self._model, "config", None), "output_router_logits", False):
            raise StateError(
                "output_router_logits is on: that loss needs the routers of all blocks at once. Turn it off, "
                "or use the ordinary schedule"
            )


def find_blocks(model: nn.Module) -> Blocks:
    """The modules of the largest ``nn.ModuleList``, by parameters.

    Raises:
        StateError: There is none.
    """
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    name, largest = max(lists, key=lambda item: _numel(item[1]), default=("", nn.ModuleList()))
    if not _numel(largest):
        raise StateError(
            f"{type(model).__name__} has no nn.ModuleList with parameters, so its blocks cannot be found. "
            "Use the ordinary schedule"
        )
    return Blocks(name, tuple(largest))


# --- cutting -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cut:
    """Cuts trees of tensors along dim 0, and joins them.

    Attributes:
        rows: Rows of the whole batch.
        slices: Number of slices, of equal size.
    """

    rows: int
    slices: int

    @classmethod
    def of_batch(cls, batch: Any, slices: int) -> "Cut":
        """The cut of a step's batch, whose first tensor tells the number of rows."""
        rows = next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 0)
        if not rows or rows % slices:
            raise ValueError(f"a batch of {rows} rows; wanted a multiple of micro_batches = {slices}")
        return cls(rows, slices)

    def apart(self, tree: Any) -> list[Any]:
        """Cut a tree into one per slice: tensors with ``rows`` rows are cut, other values are in each."""
        leaves, spec = tree_flatten(tree)
        parts = [
            leaf.split(self._height) if _has(leaf, self.rows) else (leaf,) * self.slices for leaf in leaves
        ]
        return [tree_unflatten([part[index] for part in parts], spec) for index in range(self.slices)]

    def together(self, trees: Sequence[Any], block: nn.Module) -> Any:
        """The tree of the whole batch, from one per slice that ``block`` returned."""
        if self.slices == 1:
            return trees[0]
        _, spec = tree_flatten(trees[0])
        columns = zip(*(tree_leaves(tree) for tree in trees), strict=True)
        return tree_unflatten([self._join(column, block) for column in columns], spec)

    def _join(self, column: Sequence[Any], block: nn.Module) -> Any:
        first = column[0]
        if _has(first, self._height):
            return torch.cat(tuple(column))
        same = torch.equal if isinstance(first, Tensor) else lambda one, other: bool(one == other)
        if not all(same(first, other) for other in column[1:]):
            raise StateError(
                f"{type(block).__name__} returned {_described(first)}, which differs between slices and "
                f"has not their {self._height} rows, so it cannot be joined. Use the ordinary schedule"
            )
        return first

    def check(self, args: Any, block: nn.Module) -> None:
        """The arguments of ``block`` can be cut.

        Raises:
            ValueError: As many rows as tokens: a mask ``(s, s)`` cannot be told from one ``(b, s)``.
        """
        inputs, *others = [leaf for leaf in tree_leaves(args) if _has(leaf, self.rows)] or [
            torch.empty(0, device="cpu")
        ]
        square = self.slices > 1 and inputs.dim() > 1 and inputs.shape[1] == self.rows
        if square and any(other.dim() < 3 for other in others):
            raise ValueError(
                f"{self.rows} rows of {self.rows} tokens: which arguments of {type(block).__name__} have the "
                "batch's rows cannot be told. Change the number of rows or the length"
            )

    @property
    def _height(self) -> int:
        return self.rows // self.slices


def _has(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows


# --- callers -----------------------------------------------------------------------------------------


class Caller(Protocol):
    """Decides what a call of a module does."""

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class Finished(Exception):  # noqa: N818 (nothing went wrong)
    """The last block has run, and every slice's tail: the whole batch's forward has nothing left to do."""


class Whole:
    """The whole batch's forward: blocks run slice by slice, after the last one the tails."""

    def __init__(self, schedule: LayerSchedule, cut: Cut, batch: Any) -> None:
        self.schedule, self.cut, self.batch = schedule, cut, batch
        self.given: Given = {}
        self.losses: Tensor | None = None

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        blocks = self.schedule.blocks.modules
        if module not in blocks:
            output = module(*args, **kwargs)
        else:
            outputs = self._in_slices(module, args, kwargs)
            if module is blocks[-1]:
                self._end(outputs)
            output = self.cut.together(outputs, module)
        self.given.setdefault(module, []).append(self.cut.apart(output))
        return output

    def _in_slices(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        if "use_cache" in kwargs:
            kwargs = {**kwargs, "use_cache": False}
        self.cut.check((args, kwargs), block)
        outputs = []
        for part in self.cut.apart((args, kwargs)):
            leaves, spec = tree_flatten(part)
            leaves = [None if hasattr(leaf, "get_seq_length") else leaf for leaf in leaves]  # a cache
            # Positional, because checkpoint looks there for the devices whose generators it restores.
            outputs.append(checkpoint(partial(_call, block, spec), *leaves, use_reentrant=False))
        return outputs

    def _end(self, outputs: list[Any]) -> NoReturn:
        """The last block has given ``outputs``: run the tails, and leave the forward."""
        blocks = self.schedule.blocks
        skipped = len(blocks.modules) - 1 - sum(block in self.given for block in blocks.modules)
        if skipped:
            raise StateError(f"{blocks}: the last one ran, and {skipped} before it did not")
        self.given[blocks.modules[-1]] = [outputs]
        losses = []
        for index, batch in enumerate(self.cut.apart(self.batch)):
            tail = partial(self.schedule.tail, self.given, index, batch)
            losses.append(checkpoint(tail, *tree_leaves(outputs[index]), use_reentrant=False))
        self.losses = torch.stack(losses)
        raise Finished


class Tail:
    """The forward of one slice after the blocks, to which the values in ``given`` come from the blocks."""

    def __init__(self, given: Given, index: int) -> None:
        self.given, self.index = given, index
        self.turns: Counter[nn.Module] = Counter()

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        turn = self.turns[module]
        self.turns[module] += 1
        outputs = self.given.get(module, [])
        return outputs[turn][self.index] if turn < len(outputs) else module(*args, **kwargs)


# --- stand-ins ---------------------------------------------------------------------------------------


class StandIn(nn.Module):
    """A module's stand-in: calls go to the schedule's caller, everything else to the module."""

    def __init__(self, module: nn.Module, schedule: LayerSchedule) -> None:
        super().__init__()
        # not registered: the module keeps its place in the model
        self.__dict__.update(module=module, schedule=schedule)
        del self.__dict__["training"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        caller = self.__dict__["schedule"].caller
        return caller.call(self.__dict__["module"], args, kwargs)


class Place(NamedTuple):
    """The place of a stand-in: ``parent._modules[name]``."""

    parent: nn.Module
    name: str
    stand_in: StandIn


def _calls(parent: nn.Module, blocks: set[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """The modules that the model around the blocks calls: the blocks, and everything beside them."""
    for name, module in parent._modules.items():
        if module is None:
            continue
        around = module not in blocks and not blocks.isdisjoint(module.modules())
        if around or isinstance(module, nn.ModuleList | nn.ModuleDict):  # those are never called themselves
            yield from _calls(module, blocks)
        else:
            yield parent, name, module


def _call(block: nn.Module, spec: TreeSpec, *leaves: Any) -> Any:
    args, kwargs = tree_unflatten(leaves, spec)
    return block(*args, **kwargs)


def _loss_of(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """The loss that ``model`` returns.

    Raises:
        StateError: There is none.
    """
    output = model(*args, **kwargs)
    loss = getattr(output, "loss", None)
    if loss is None:
        raise StateError(
            f"{type(model).__name__} returned {type(output).__name__} without a loss. Give it targets "
            "(labels=...), or give the schedule a function that computes the loss of one slice"
        )
    return loss  # type: ignore[no-any-return]


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
