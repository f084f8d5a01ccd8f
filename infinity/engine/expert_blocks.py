"""Runs a block on all micro-batches around its experts, which run once, on the tokens of all of them.

[Note: experts once]
Experts that do not stay in memory would be read for each micro-batch. So each goes through the block, which
calls the experts: their arguments are kept. Where the block wants to know what they returned, an exception
leaves it. Then the experts run once, on the rows of all micro-batches, one after another. After that each
micro-batch goes through the block again: modules that have run give back what they returned, the experts that
micro-batch's rows. If the block calls experts again, so it goes on.

Autograd does the same in backward: the rows of all micro-batches have gradients before the experts' backward
begins. Operators that the block itself runs between modules run again, and draw the same random numbers then.

[Note: the rows of experts]
Which experts a module runs for a row has to be said beside it: by a tensor of integers with as many rows. A
module that is given something else runs for each micro-batch. Whether experts run once does not follow from
memory, tiles or ranks, since sums over joined rows are rounded otherwise: it follows from the model alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from infinity.activations.recompute import Unwritten, in_backward, saving_hooks
from infinity.core.errors import StateError
from infinity.engine.expert_parts import PartsOfExperts, Share, packed, runs_in_parts, weighs_rows
from infinity.engine.stand_ins import Calls

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ExpertBlock:
    """Runs ``block`` on several micro-batches together, each call of a :class:`Call`.

    ``share`` is that of a tile in the room for those of a part of experts; ``run`` runs the block itself.
    """

    def __init__(
        self, block: nn.Module, experts: set[nn.Module], share: Share,
        run: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        self.block, self.experts, self.share, self.run = block, experts, share, run or block
        self.calls = Calls(block, experts)

    @classmethod
    def of(cls, block: nn.Module, share: Share, run: Callable[..., Any] | None = None) -> Self | None:
        """Return how to run ``block``; None: it has no packed experts."""
        experts = experts_of(block)
        return cls(block, experts, share, run) if experts else None

    @property
    def in_parts(self) -> bool:
        """Return whether tiles of all experts serve the rows of all micro-batches, part by part."""
        return all(map(weighs_rows, self.experts))

    def refusal(self, what: str) -> StateError:
        return StateError(
            f"{type(self.block).__name__} {what}, so micro-batches cannot go through it together. Use the "
            "ordinary schedule (train.schedule=step)"
        )


class Call:
    """Runs a block on several micro-batches, in forward and, called again, in backward's recomputation.

    See [Note: experts once].
    """

    def __init__(self, block: ExpertBlock) -> None:
        self._block = block
        self._ends_before_experts = False  # the recomputation does: see [Note: what is saved before]

    def __call__(self, given: Sequence[Arguments]) -> list[Any]:
        """Return what the block returns for each micro-batch, whose arguments are ``given``."""
        running = [_Running(self._block, *arguments) for arguments in given]
        recomputed = in_backward()
        saved_before: list[int] | None = None  # what the block saves until it uses the experts' results
        while True:
            with _counting_saved() as saved:
                for each in running:
                    each.go_on()
            waiting = [each for each in running if each.reached is not None]
            if not waiting:
                self._ends_before_experts = saved == saved_before
                return [each.output for each in running]
            run, rows = self._experts(running, waiting)
            if recomputed and self._ends_before_experts:
                for each in running:
                    each.go_on(without_experts=True)
                return []  # it is not needed
            if torch.is_grad_enabled() and not recomputed and isinstance(run, PartsOfExperts):
                with _counting_saved(drop=True) as saved:
                    for each in running:
                        each.go_on(without_experts=True)
                saved_before = saved
            self._give(waiting, run(), rows)

    def _experts(
        self, running: Sequence["_Running"], waiting: Sequence["_Running"]
    ) -> tuple[Callable[[], Any], list[int]]:
        """Return what runs the experts on the rows of all micro-batches, and how many rows each has."""
        modules = {each.reached[0] for each in waiting if each.reached is not None}
        if len(waiting) < len(running) or len(modules) > 1:
            raise self._block.refusal(
                "calls experts for some micro-batches, and for others none or other ones"
            )
        (args, kwargs), rows = self._joined(waiting)
        experts = modules.pop()
        if kwargs or not runs_in_parts(experts, args):
            return partial(experts, *args, **kwargs), rows
        return PartsOfExperts(experts, self._block.share, *args), rows

    def _give(self, waiting: Sequence["_Running"], output: Any, rows: list[int]) -> None:
        """Give each micro-batch its rows of what the experts returned."""
        leaves, spec = tree_flatten(output)
        columns: list[Sequence[Any]] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.shape[:1] != (sum(rows),):
                shape = tuple(leaf.shape)
                raise self._block.refusal(f"has experts that return a tensor {shape} for {sum(rows)} rows")
            is_cut = isinstance(leaf, Tensor)  # into parts that the block may write into
            columns.append([part.clone() for part in leaf.split(rows)] if is_cut else [leaf] * len(rows))
        for index, each in enumerate(waiting):
            each.take(tree_unflatten([column[index] for column in columns], spec))

    def _joined(self, waiting: Sequence["_Running"]) -> tuple[Arguments, list[int]]:
        """Return the arguments of all micro-batches as one, and the rows of each."""
        trees = [tree_flatten(each.reached[1:]) for each in waiting if each.reached is not None]
        spec, joined = trees[0][1], list[Any]()
        alike = all(other == spec for _, other in trees)
        for first, *others in zip(*(leaves for leaves, _ in trees), strict=False):
            is_rows = isinstance(first, Tensor)
            alike = alike and (is_rows or all(other is first or other == first for other in others))
            joined.append(torch.cat([first, *others]) if is_rows and alike else first)
        if not alike:
            raise self._block.refusal("gives experts arguments that differ and are no tensors of rows")
        return tree_unflatten(joined, spec), [_rows(leaves) for leaves, _ in trees]


class _Returned(NamedTuple):
    """Holds what a call of a module returned, and generators after the call."""

    module: nn.Module
    output: Any
    unwritten: Unwritten
    generators: Any


class _Reached(Exception):  # noqa: N818 (nothing went wrong)
    """Raised to leave a block that cannot go on without its experts."""


_RESHAPES = {"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze"}


class _Awaited(Tensor):
    """Stands for what experts will return: it can be reshaped, any other use leaves the block."""

    stands_in = True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _RESHAPES:
            return args[0]
        raise _Reached


_AWAITED = _Awaited()


class _Running:
    """Runs one micro-batch through a block, from where it awaits experts to where it does so again."""

    def __init__(self, block: ExpertBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._block, self._args, self._kwargs = block, args, kwargs
        self._unwritten = Unwritten((args, kwargs))
        self._returned: list[_Returned] = []  # in the order of the calls
        leaves = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        #: Tensors on each device whose generator is restored.
        self._there = [*{leaf.device: leaf for leaf in leaves if leaf.device.type != "cpu"}.values()]
        self._began: Any = None  # generators when the block began
        #: The experts that the block has called, with positional and named arguments; None: it has ended.
        self.reached: tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None = None
        self._place = 0  # of their call among those that returned
        self.output: Any = None

    def go_on(self, *, without_experts: bool = False) -> None:
        """Run the block until it awaits experts, or ends; or again to where it awaits those that it does now.

        Only what the block does between modules is done again.
        """
        turn, before, now = 0, len(self._returned), self._generators()
        if self._returned:
            self._check(self._unwritten, "what it was given")
            self._restore(self._began)
        else:
            self._began = now

        def call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal turn
            turn += 1
            if turn <= before:
                return self._again(module, turn - 1, now if turn == before else None)
            if without_experts:
                raise _Reached
            leaves = tree_leaves((args, kwargs))
            if any(leaf is _AWAITED for leaf in leaves):
                raise _Reached
            if module not in self._block.experts or not _rows(leaves):
                return self._note(module, module(*args, **kwargs))
            if self.reached is not None:
                raise _Reached
            self.reached, self._place = (module, args, kwargs), len(self._returned)
            return self._note(module, _AWAITED)

        with self._block.calls.handed_to(call), suppress(_Reached):
            output = self._block.run(*self._args, **self._kwargs)
        if without_experts:
            self._restore(now)
        elif self.reached is None:
            self.output = output
            self._returned.clear()

    def take(self, output: Any) -> None:
        """Note what the experts returned that the block awaits."""
        self.reached = None
        awaited = self._returned[self._place]
        self._returned[self._place] = awaited._replace(output=output, unwritten=Unwritten(output))

    def _note(self, module: nn.Module, output: Any) -> Any:
        self._returned.append(_Returned(module, output, Unwritten(output), self._generators()))
        return output

    def _again(self, module: nn.Module, turn: int, generators: Any) -> Any:
        """Return what a call returned before; go on with ``generators``, or (None) with those after it."""
        returned = self._returned[turn]
        if returned.module is not module:
            raise self._block.refusal("calls other modules when it runs again")
        self._check(returned.unwritten, f"what its {type(module).__name__} returned")
        self._restore(returned.generators if generators is None else generators)
        return returned.output

    def _check(self, unwritten: Unwritten, what: str) -> None:
        if not unwritten:
            raise self._block.refusal(f"writes into {what}, and runs again from that")

    def _generators(self) -> Any:
        """Return the states of torch's random generators: of the CPU, and of the devices of arguments."""
        return torch.get_rng_state(), *(get_device_states(*self._there) if self._there else ([], []))

    def _restore(self, generators: Any) -> None:
        own, devices, states = generators
        torch.set_rng_state(own)
        if devices:
            set_device_states(devices, states, device_type=self._there[0].device.type)


@contextmanager
def _counting_saved(*, drop: bool = False) -> Iterator[list[int]]:
    """Count tensors that autograd saves inside, which go where they went; or (``drop``) nowhere."""
    counted = [0]
    pack, unpack = saving_hooks()

    def count(tensor: Tensor) -> Any:
        counted[0] += 1
        return None if drop else pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(count, unpack):
        yield counted


def experts_of(block: nn.Module) -> set[nn.Module]:
    """Return the modules in ``block`` that run packed experts, with the adapters around them."""
    found = set()
    for name, module in block.named_modules():
        if packed(module):
            while name:
                name = name.rpartition(".")[0]
                if getattr(parent := block.get_submodule(name), "base_layer", None) is not module:
                    break
                module = parent  # peft's wrapper, which takes its calls
            found.add(module)
    inner = {below for module in found for below in module.modules() if below is not module}
    return found - inner


def _rows(leaves: Sequence[Any]) -> int:
    """Return the rows of all tensors among arguments of experts; 0: see [Note: the rows of experts]."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    heights = {leaf.shape[:1] for leaf in tensors}
    integers = (each for each in tensors if not each.is_floating_point() and each.dtype != torch.bool)
    if len(heights) != 1 or next(integers, None) is None:
        return 0
    return next(iter(heights.pop()), 0)
