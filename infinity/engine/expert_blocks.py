"""Runs a block on all micro-batches around its experts, which run once, on the tokens of all of them.

[Note: experts once]
Experts that do not stay in memory would be read for each micro-batch. So each goes through the block until it
calls the experts: their arguments are kept, and an exception leaves the block. Then the experts run once, on
the rows of all micro-batches, one after another. After that each micro-batch goes through the block again:
modules that have run give back what they returned, the experts that micro-batch's rows. If the block calls
experts again, so it goes on.

Autograd does the same in backward: the rows of all micro-batches have gradients before the experts' backward
begins. Operators that the block itself runs between modules run again, and draw the same random numbers then.

[Note: the rows of experts]
Which experts a module runs for a row has to be said beside it: by a tensor of integers with as many rows. A
module that is given something else runs for each micro-batch. Whether experts run once does not follow from
memory, tiles or ranks, since sums over joined rows are rounded otherwise: it follows from the model alone.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from infinity.core.errors import StateError
from infinity.engine.stand_ins import Calls, written
from infinity.partition.builder import is_packed

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ExpertBlock:
    """Runs ``block`` on several micro-batches together; see [Note: experts once]."""

    def __init__(self, block: nn.Module, experts: set[nn.Module]) -> None:
        self.block, self.experts, self.calls = block, experts, Calls(block, experts)

    @classmethod
    def of(cls, block: nn.Module) -> "ExpertBlock | None":
        """Return how to run ``block``; None: it has no packed experts."""
        experts = experts_of(block)
        return cls(block, experts) if experts else None

    def __call__(self, given: Sequence[Arguments]) -> list[Any]:
        """Return what the block returns for each micro-batch, whose arguments are ``given``."""
        running = [_Running(self, *arguments) for arguments in given]
        while True:
            for each in running:
                each.go_on()
            waiting = [each for each in running if each.reached is not None]
            if not waiting:
                return [each.output for each in running]
            modules = {each.reached[0] for each in waiting if each.reached is not None}
            if len(waiting) < len(running) or len(modules) > 1:
                raise self.refusal("calls experts for some micro-batches, and for others none or other ones")
            self._run(modules.pop(), waiting)

    def _run(self, experts: nn.Module, waiting: Sequence["_Running"]) -> None:
        """Call ``experts`` once, and give each micro-batch its rows of what they return."""
        (args, kwargs), rows = self._joined(waiting)
        output = experts(*args, **kwargs)
        del args, kwargs
        leaves, spec = tree_flatten(output)
        columns: list[Sequence[Any]] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.shape[:1] != (sum(rows),):
                shape = tuple(leaf.shape)
                raise self.refusal(
                    f"has {type(experts).__name__}, which returns a tensor {shape} for {sum(rows)} rows"
                )
            is_cut = isinstance(leaf, Tensor)  # into parts that the block may write into
            columns.append([part.clone() for part in leaf.split(rows)] if is_cut else [leaf] * len(rows))
        for index, each in enumerate(waiting):
            each.take(experts, tree_unflatten([column[index] for column in columns], spec))

    def _joined(self, waiting: Sequence["_Running"]) -> tuple[Arguments, list[int]]:
        """Return the arguments of all micro-batches as one, and the rows of each."""
        trees = [tree_flatten(each.reached[1:]) for each in waiting if each.reached is not None]
        specs: list[TreeSpec] = [spec for _, spec in trees]
        rows = [_rows(leaves) for leaves, _ in trees]
        joined: list[Any] = []
        for column in zip(*(leaves for leaves, _ in trees), strict=False):
            first = column[0]
            if isinstance(first, Tensor):
                joined.append(torch.cat(column))
            elif all(other is first or other == first for other in column[1:]):
                joined.append(first)
            else:
                specs = []
        if any(spec != specs[0] for spec in specs) or not specs:
            raise self.refusal("gives its experts other arguments for each micro-batch than tensors of rows")
        return tree_unflatten(joined, specs[0]), rows

    def refusal(self, what: str) -> StateError:
        return StateError(
            f"{type(self.block).__name__} {what}, so micro-batches cannot go through it together. Use the "
            "ordinary schedule (train.schedule=step)"
        )


class _Returned(NamedTuple):
    """Holds what a call of a module returned, its versions then, and generators after the call."""

    module: nn.Module
    output: Any
    versions: list[int]
    generators: Any


class _Reached(Exception):  # noqa: N818 (nothing went wrong)
    """Raised to leave a block at its experts."""


class _Running:
    """Runs one micro-batch through a block, from experts to experts."""

    def __init__(self, block: ExpertBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._block, self._args, self._kwargs = block, args, kwargs
        self._versions = _versions((args, kwargs))
        self._returned: list[_Returned] = []  # in the order of the calls
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._generators = _Generators(tensors)
        self._began: Any = None  # generators when the block began
        #: The experts that the block wants to call, with positional and named arguments; None: it has ended.
        self.reached: tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None = None
        self.output: Any = None

    def go_on(self) -> None:
        """Run the block until it calls experts that have not run, or ends."""
        generators, turn = self._generators, 0
        now = generators.state()
        if self._returned:
            self._check(self._versions, (self._args, self._kwargs), "what it was given")
            generators.restore(self._began)
        else:
            self._began = now

        def call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal turn
            turn += 1
            if turn <= len(self._returned):
                last = turn == len(self._returned)
                return self._again(module, turn - 1, now if last else None)
            if module in self._block.experts and _rows(tree_leaves((args, kwargs))):
                self.reached = module, args, kwargs
                raise _Reached
            return self.take(module, module(*args, **kwargs))

        with self._block.calls.handed_to(call):
            try:
                self.output = self._block.block(*self._args, **self._kwargs)
            except _Reached:
                return
        self._returned.clear()

    def take(self, module: nn.Module, output: Any) -> Any:
        """Note, and return, what ``module`` returned to the block."""
        self.reached = None
        self._returned.append(_Returned(module, output, _versions(output), self._generators.state()))
        return output

    def _again(self, module: nn.Module, turn: int, generators: Any) -> Any:
        """Return what a call returned before; go on with ``generators``, or (None) with those after it."""
        returned = self._returned[turn]
        if returned.module is not module:
            raise self._block.refusal("calls other modules when it runs again")
        self._check(returned.versions, returned.output, f"what its {type(module).__name__} returned")
        self._generators.restore(returned.generators if generators is None else generators)
        return returned.output

    def _check(self, versions: list[int], tree: Any, what: str) -> None:
        if _versions(tree) != versions:
            raise self._block.refusal(f"writes into {what}, and runs again from that")


class _Generators:
    """Reads and sets the states of torch's random generators: of the CPU, and of the devices of tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._there = [*{leaf.device: leaf for leaf in tensors if leaf.device.type != "cpu"}.values()]

    def state(self) -> Any:
        devices = get_device_states(*self._there) if self._there else ([], [])
        return torch.get_rng_state(), *devices

    def restore(self, state: Any) -> None:
        own, devices, states = state
        torch.set_rng_state(own)
        if devices:
            kind = self._there[0].device.type
            set_device_states(devices, states, device_type=kind)


def experts_of(block: nn.Module) -> set[nn.Module]:
    """Return the modules in ``block`` that run packed experts, with the adapters around them."""
    found = set()
    for name, module in block.named_modules():
        if any(is_packed(module, param) for param in _parameters(module)):
            while name and getattr(parent := _parent(block, name), "base_layer", None) is module:
                module, name = parent, name.rpartition(".")[0]  # peft's wrapper, which takes its calls
            found.add(module)
    inner = {below for module in found for below in module.modules() if below is not module}
    return found - inner


def _parent(block: nn.Module, name: str) -> nn.Module:
    return block.get_submodule(name.rpartition(".")[0])


def _parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    return (param for param in module._parameters.values() if param is not None)


def _rows(leaves: Sequence[Any]) -> int:
    """Return the rows of all tensors among arguments of experts; 0: see [Note: the rows of experts]."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    heights = {leaf.shape[:1] for leaf in tensors}
    integers = (each for each in tensors if not each.is_floating_point() and each.dtype != torch.bool)
    if len(heights) != 1 or next(integers, None) is None:
        return 0
    return next(iter(heights.pop()), 0)


def _versions(tree: Any) -> list[int]:
    return [written(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
