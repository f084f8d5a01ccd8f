"""Lets the ranks of a node compute a model's blocks in turn: tokens go to the weights, not weights to tokens.

[Note: stages]
In the layer schedule (:mod:`infinity.engine.schedule`) block k is computed by rank k mod R, for the
micro-batches of all R ranks. What a block returns goes to the rank of the next block as soon as it is there,
its gradient the same way back: a pipeline in which each rank has another block at every time. A block's
weights come to one rank only, twice in a step. Its gradient is the sum over all micro-batches on that rank,
in the compute dtype as ever, and goes from there to the owners of its shards. What is before the first block
and after the last one each rank computes for its own data.

[Note: two passes over the model]
First each rank runs its model's forward without blocks: their stand-ins return at once what only has a shape.
That tells the other arguments of each block (masks, positions), which all ranks tell each other. Then blocks
run, with no code of the model between them, so that no rank waits for another one's model. What a model
computes from what blocks return, other than in blocks and after the last one, is refused.

[Note: one order] All work of a step is ordered by block, then micro-batch; each rank does its part in this
order and sends without waiting, so none waits for what waits for it. Autograd runs a rank's part backwards: a
ticket goes from each message to the next, so that backward reaches all, also for micro-batches of other
ranks, of which this rank's loss knows nothing. The forward takes micro-batches of the last rank first. So a
gradient is added in the order of ranks, and of each rank from its last micro-batch to its first, which is the
layer schedule's order.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from infinity.activations.passing import Passed
from infinity.activations.recompute import node
from infinity.comm.messages import Messages
from infinity.core.errors import StateError
from infinity.core.lifecycle import Tier
from infinity.core.process import weakly
from infinity.engine.executor import StepExecutor
from infinity.engine.schedule import Forward, LayerSchedule, recomputed_block, run_block, without_cache

_OTHERWISE = "Set train.stages=false"


class Stages:
    """Says which rank computes which block, and takes what a block returns there."""

    def __init__(self, schedule: LayerSchedule, executor: StepExecutor) -> None:
        ranks, self.count = executor.tiers.ranks, len(schedule.blocks.modules)
        check_stages(schedule, executor)
        held = [executor.units.holding(block.parameters()) for block in schedule.blocks.modules]
        #: Units of each block alone. The others (a norm's, that is with the last block's) all ranks reduce.
        self.units = [
            [unit for unit in each if {id(s.whole) for s in unit.segments} <= {*map(id, block.parameters())}]
            for each, block in zip(held, schedule.blocks.modules, strict=True)
        ]
        assert ranks.collectives is not None
        self.collectives, self.gradients, self.device = ranks.collectives, executor.gradients, ranks.device
        self.rank, self.world_size = ranks.rank, ranks.world_size
        stops, everyone = [self.of(block) for block in range(self.count)], range(self.world_size)
        ways = {*pairwise(stops), *((each, stops[0]) for each in everyone)}
        ways |= {(stops[-1], each) for each in everyone}
        self.messages = Messages.of(self.collectives, ways | {(to, source) for source, to in ways})
        by = {unit.index: self.of(block) for block, units in enumerate(self.units) for unit in units}
        # Complete where all ranks say so: at their block's end; those of other parameters, too, at the last.
        self.gradients.stage(by, {unit.index for each in held for unit in each})
        executor.budget.keep_states_home()

    def of(self, block: int) -> int:
        """Return the rank that computes ``block``."""
        return block % self.world_size

    @property
    def own(self) -> int:
        """Return how many blocks this rank computes."""
        return len(range(self.rank, self.count, self.world_size))

    def turns(self, micro_batches: int) -> list[tuple[int, int]]:
        """Return each rank and micro-batch, in the order in which a block takes them."""
        return [(rank, micro) for rank in reversed(range(self.world_size)) for micro in range(micro_batches)]

    def complete(self, block: int, grad: Tensor) -> Tensor:
        """Take the slices of a block's gradients, which backward has passed; all ranks do, in this order."""
        self.gradients.complete_block(self.units[block])
        return grad


class StagedSchedule(LayerSchedule):
    """A layer schedule whose blocks the ranks of a node compute in turn; every rank must make it.

    StateError: the ranks, the model or the places of its weights do not allow it.
    """

    def __init__(self, executor: StepExecutor, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.stages = Stages(self, executor)
        several = self.stages.world_size * self.micro_batches
        self.passing = self.passing.over(self.stages.own + 1, several)  # the tails take what comes last

    def begin(self, batch: Any) -> Forward:
        return StagedForward(self.stages, self, batch)


def check_stages(schedule: LayerSchedule, executor: StepExecutor) -> None:
    """Raise a StateError that names what does not go with stages."""
    ranks, units = executor.tiers.ranks, executor.units
    config = getattr(schedule.calls.module, "config", None)
    leaves = executor.gradients.leaves
    blocks, tiles, _ = schedule.blocks.held(units, schedule.expert_blocks, groups=False)
    reasons = {
        "several nodes": ranks.nodes > 1,
        "weights outside of host memory that all ranks share (memory.shared, memory.host, memory.resident)": (
            not ranks.host_is_whole or any(unit.home.tier is not Tier.HOST for unit in units)
        ),
        "an encoder beside the decoder": bool(getattr(config, "is_encoder_decoder", False)),
        "packed experts, or weights in tiles,": bool(schedule.expert_blocks) or any(tiles),
        "modules that are gathered as one (partition.leaf)": any(leaves & each for each in blocks),
        "several adapters": any(turn is not None for turn in schedule.turns),
    }
    for what, found in reasons.items():
        if found:
            raise StateError(f"train.stages with {what} is not supported. {_OTHERWISE}")


@dataclass(frozen=True, slots=True)
class _Own:
    """Stands for what the block before returned, among a block's arguments."""


@dataclass(frozen=True, slots=True)
class _Other:
    """Stands for a tensor among a block's arguments, by its number."""

    number: int


class Told(NamedTuple):
    """What a rank tells the others of its step: see [Note: two passes over the model]."""

    micro_batches: int
    rows: int
    shape: torch.Size  # of what a block takes and returns, for a micro-batch
    dtype: torch.dtype
    calls: Sequence[Any]  # of each block: its arguments, with stand-ins for tensors
    tensors: Sequence[Tensor]


class Elsewhere(Passed):
    """Stands for what a block will return: it has a shape, and no value."""

    def __init__(self, shape: torch.Size, like: Tensor) -> None:
        self.shape, self.dtype, self.device, self.requires_grad = shape, like.dtype, like.device, False
        self.ticket: Any = None

    def arrive(self, ticket: Tensor) -> Tensor:
        raise StateError(
            f"the model computes with what a block returned, before the last block has run. {_OTHERWISE}"
        )


class _Given(Function):
    """Sends a value to another rank, and its gradient comes back; returns the ticket of what follows."""

    @staticmethod
    def forward(ctx: Any, messages: Messages, to: int, value: Tensor, ticket: Tensor) -> Tensor:
        ctx.back = partial(messages.receive, to, value.shape, value.dtype, value.device)
        messages.send(to, value.detach())
        return ticket.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, ctx.back(), grad


class StagedForward(Forward):
    """Runs this rank's part of a forward: see [Note: two passes over the model] and [Note: one order]."""

    def __init__(self, stages: Stages, schedule: LayerSchedule, batch: Any) -> None:
        super().__init__(schedule, batch)
        self.stages, self._calls = stages, list[Any]()
        self._first: Tensor | None = None  # what the first block takes, of all micro-batches
        self._tensors = list[Tensor]()
        self._ticket = torch.zeros((), device=stages.device, requires_grad=torch.is_grad_enabled())

    def _in_slices(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Note the arguments of a block, and return what stands for its values."""
        kwargs = without_cache(kwargs)
        self._check((args, kwargs), block)
        if len(self._calls) != self.schedule.blocks.modules.index(block):
            raise StateError(f"train.stages: the model calls its blocks in another order. {_OTHERWISE}")
        noted = tree_map(self._note, (args, kwargs))
        if sum(isinstance(leaf, _Own) for leaf in tree_leaves(noted)) != 1:
            raise StateError(
                f"train.stages: {type(block).__name__} takes not just one value that the block before "
                f"returned. {_OTHERWISE}"
            )
        self._calls.append(noted)
        assert self._first is not None
        shape = torch.Size((self.rows // self.slices, *self._first.shape[1:]))
        return [Elsewhere(shape, self._first) for _ in range(self.slices)]

    def _note(self, leaf: Any) -> Any:
        """Return what stands for an argument: the value that passes, or another one."""
        if hasattr(leaf, "get_seq_length"):
            return None
        if not isinstance(leaf, Tensor):
            return leaf
        if self._first is None and leaf.shape[:1] == (self.rows,) and leaf.is_floating_point():
            self._first = leaf
        if leaf is self._first or hasattr(leaf, "stands_in"):
            return _Own()
        if leaf.requires_grad:
            raise StateError(
                f"train.stages: what all blocks take besides ({tuple(leaf.shape)}) is trained. {_OTHERWISE}"
            )
        number = next((n for n, each in enumerate(self._tensors) if each is leaf), len(self._tensors))
        self._tensors[number:] = self._tensors[number:] or [leaf]
        return _Other(number)

    def _end(self, outputs: list[Any]) -> Any:
        super()._end(self._run())

    def _run(self) -> list[Any]:
        """Compute this rank's blocks, and return what the last block returned for its own micro-batches."""
        stages, blocks, everyone = self.stages, self.schedule.blocks.modules, self._tell()
        assert self._first is not None
        for value in torch.split(self._first, self.rows // self.slices):
            self._give(stages.of(0), value)
        turns = stages.turns(self.slices)
        for number, block in enumerate(blocks):
            complete: Any = partial(weakly(stages.complete), number)  # the graph may outlive the model
            self._ticket = node(self._ticket.clone, complete, self._ticket)
            if stages.of(number) != stages.rank:
                continue
            arguments = [self._arguments(told, number) for told in everyone]
            for index, (rank, micro) in enumerate(turns):
                source = rank if not number else stages.of(number - 1)
                value = self._take(source, everyone[rank], number // stages.world_size, index)
                given = tree_map_only(_Own, partial(_given, value), arguments[rank][micro])
                [returned] = recomputed_block(partial(run_block, block), [given], block)
                _check_returned(returned, everyone[rank], block)
                self._give(rank if block is blocks[-1] else stages.of(number + 1), returned)
        mine, last = everyone[stages.rank], stages.of(len(blocks) - 1)
        return [self._take(last, mine, stages.own, micro) for micro in range(self.slices)]

    def _tell(self) -> list[Told]:
        """Tell all ranks what this one's blocks take, and return what each has told."""
        assert self._first is not None
        shape = torch.Size((self.rows // self.slices, *self._first.shape[1:]))
        tensors = [tensor.detach().cpu() for tensor in self._tensors]
        mine = Told(self.slices, self.rows, shape, self._first.dtype, self._calls, tensors)
        try:
            pickle.dumps(mine.calls)
        except Exception as error:
            raise StateError(
                f"train.stages: an argument of a block cannot be sent to other ranks ({error}). {_OTHERWISE}"
            ) from None
        everyone = self.stages.collectives.share_all(mine, "what blocks take")
        for what in ("micro_batches", "dtype"):
            if len(found := {getattr(told, what) for told in everyone}) > 1:
                raise StateError(f"train.stages: ranks have different {what}: {sorted(map(str, found))}")
        return everyone

    def _arguments(self, told: Told, number: int) -> list[Any]:
        """Return a block's arguments for each micro-batch of a rank."""
        tensors = [tensor.to(self.stages.device) for tensor in told.tensors]
        whole = tree_map_only(_Other, lambda leaf: tensors[leaf.number], told.calls[number])
        return self._slices(whole, told.rows)

    def _give(self, to: int, value: Tensor) -> None:
        self._ticket = _Given.apply(self.stages.messages, to, value, self._ticket)  # type: ignore[no-untyped-call]

    def _take(self, source: int, told: Told, number: int, index: int) -> Any:
        """Return the next value from ``source``, the one with this ``number`` and ``index`` on this rank."""
        messages, device = self.stages.messages, self.stages.device

        def back(grad: Tensor) -> Tensor:
            messages.send(source, grad)
            return grad.new_zeros(())

        value = node(partial(messages.receive, source, told.shape, told.dtype, device), back, self._ticket)
        return self.schedule.passing.depart(value, told.shape[0], number, index)


def _given(value: Any, _: _Own) -> Any:
    return value


def _check_returned(returned: Any, told: Told, block: nn.Module) -> None:
    if not isinstance(returned, Tensor) or (returned.shape, returned.dtype) != (told.shape, told.dtype):
        raise StateError(
            f"train.stages: {type(block).__name__} returned something else than a tensor "
            f"{tuple(told.shape)} of {told.dtype}, as it takes one. {_OTHERWISE}"
        )
