"""Records one micro-batch on fake tensors: its operators, and what hooks ask of the runtime.

[Note: written down, then played]
Operators run on fake tensors under the runtime's own hooks. Calls of the prefetcher, of backward's pins and
of gradients are recorded between the operators, then replayed on the runtime's own :class:`Prefetcher` with
the sizes, homes and window of a run. So one record serves plans for any budget.

[Note: micro-batches in a block]
A layer schedule takes all micro-batches of a step through a block before the next one. So a block's inputs
exist for all of them until its backward; and while one is in the block's backward, or in what follows the
last block, so do the gradients of what it returned, then those of what it was given. What of this waits in
device memory a plan says (:mod:`infinity.planner.passing`). What is inside a block exists for one. Only
one micro-batch is recorded, and a block is taken to return as many bytes as the next one is given. What all
blocks are given (angles, masks) is one for all sequences without positions or a mask of their own.

Experts run once for all micro-batches (:mod:`infinity.engine.expert_blocks`), and part by part; a plan has
the smallest parts, those of one tile. So what exists while they run, or between them and the block's end,
exists for all; in backward, too, from where they are recomputed. They are known by their grouped products.

[Note: moves in a stretch of a step]
A trace has one micro-batch, whose operators take as long as those of all. So values that leave in a block's
forward leave when it begins, and what a block needs comes while it runs: its end waits for the last of it.
The runtime moves one micro-batch after the other, each beside the compute of another.
"""

import gc
import itertools
import math
import random
import sys
import weakref
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from infinity.activations.controller import NamedBlock, recomputable_blocks, tracked
from infinity.activations.logits import Mode
from infinity.activations.profiler import Profiler, tensors_in
from infinity.activations.recompute import patched
from infinity.activations.store import directly_moved_nbytes
from infinity.activations.tensor_cache import LEAST_NBYTES, ActivationPolicy, PassRecord
from infinity.core.errors import CheckpointError, library_errors
from infinity.core.plan import Kind, Phase, Place, SlotKey
from infinity.engine.expert_blocks import Call, ExpertBlock
from infinity.engine.hooks import Hooks, register_forward_hooks
from infinity.partition.init_context import install_parameter_dict
from infinity.partition.prefetcher import BackwardPins, Prefetcher
from infinity.partition.tiles import TiledWeight, TileView, used_after
from infinity.partition.unit import Segment, Unit, UnitIndex
from infinity.planner.passing import ON_THEIR_WAY, PassingPlan
from infinity.planner.updates import Completions
from infinity.predict.operators import Operation, Touches
from infinity.predict.step import StepTrace, Stored, TileUse
from infinity.recipes.models import CausalLoss

#: Operators that read a few rows of their first argument; that write a few; that only allocate.
_LOOKUPS = {"aten.embedding.default", "aten.index_select.default", "aten.index.Tensor"}
_INSERTS = {"aten.index_put_.default", "aten.index_add_.default"}
_EMPTY = {"aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default"}
#: So many tokens are taken to use all experts.
MANY_TOKENS = 1024
#: Parts of the runtime that hooks ask.
_PARTS = "prefetcher", "pins", "gradients"
#: Storages of the step itself: no weights, and nothing that it was given.
_OWN = {Kind.WORKING, Kind.ACTIVATION, Kind.GRADIENT}
_WHY = "the model cannot be planned: its step fails on tensors without values, on which it may depend"


#: Units that are used as one, by module.
Leaves = Mapping[nn.Module, tuple[Unit, ...]]
#: A call of the runtime: operators before it, part, method, arguments.
Command = tuple[int, str, str, tuple[Any, ...], dict[str, Any]]


class Batch(NamedTuple):
    """Holds a micro-batch without values."""

    tokens: tuple[int, int]  # its shape
    logits: Mode = "whole"
    packing: bool | None = None  # whole documents, several in a sequence, or one, padded; None: a stream
    on_accelerator: bool = False  # some kernels differ from those of the CPU
    timed: bool = False  # its operators can be timed, each alone
    together: bool = False  # one of several that go through a block together
    scored: bool = False  # the model's head scores documents, in place of next tokens
    routed: int = MANY_TOKENS  # tokens that experts in tiles get together, of all its micro-batches


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Records a block's forward and backward, as operators ``[begin, end)`` and ``[backward, done)``."""

    begin: int
    end: int
    backward: int
    done: int
    given: int  # bytes of one micro-batch that no other block is given
    returned: int  # bytes that it returns for one micro-batch


def waiting(spans: Sequence[BlockSpan], plan: PassingPlan) -> Iterator[tuple[int, int, int]]:
    """Yield begin, end and bytes of what waits in device memory for all micro-batches but the running one.

    Without values that are kept for backward, whose lives a record knows.
    """
    others = plan.slices - 1
    held = min(others, plan.held)
    for block, span in enumerate(spans):
        # Gradients of what the block returned make place for those of what it was given.
        yield span.backward, span.done, max(held * span.returned, (held if block else others) * span.given)
        last = span is spans[-1]
        until = spans[-1].backward if last else spans[block + 1].end
        # What tails take make place for its gradient.
        beyond = held - min(others, kept_of(plan, block))
        if last or beyond > 0:
            number = held if last else beyond
            yield span.end, until, number * span.returned
    if spans and plan.leaves:
        yield spans[0].begin, spans[0].done, ON_THEIR_WAY * plan.nbytes


def kept_of(plan: PassingPlan, block: int) -> int:
    """Return for how many micro-batches a block's output stays in device memory until backward."""
    return sum(plan.value(block * plan.slices + index) is Place.KEEP for index in range(plan.slices))


def moves(
    spans: Sequence[BlockSpan], plan: PassingPlan, position: Callable[[int], int], *, on_accelerator: bool
) -> Iterator[Stored]:
    """Yield the moves of values and gradients; ``position`` returns the place of an operator in the trace."""
    nbytes = plan.nbytes if on_accelerator else directly_moved_nbytes(plan.nbytes)

    def moved(
        places: list[Place], leaves: int | None, comes: tuple[int, int], has_room: bool
    ) -> Iterator[Stored]:
        load_at, asked_at = map(position, comes)
        packed_at = None if leaves is None else position(leaves)
        for place in (Place.HOST, Place.NVME):
            if number := places.count(place):
                on_nvme = place is Place.NVME
                yield Stored(number * nbytes, packed_at, load_at, asked_at, on_nvme, has_room)

    indices = range(plan.slices)
    gradients = [plan.gradient(index) for index in indices]
    for block, span in enumerate(spans):
        values = [plan.value(block * plan.slices + index) for index in indices]
        above = spans[block + 1] if block + 1 < len(spans) else None
        # The tails take what the last block returned, in forward and in backward.
        used = (span.end, span.backward - 1) if above is None else (above.backward, above.done - 1)
        yield from moved(values, span.begin, used, True)
        again = [place for index, place in enumerate(values) if not plan.is_held(index)]
        yield from moved(again, None, used if above is None else (above.begin, above.end - 1), False)
        yield from moved(gradients, used[0], (span.backward, span.done - 1), False)


_attention = functional.scaled_dot_product_attention


def _fused_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    """Attend in one kernel also where values are narrower than keys, as accelerators do, not the CPU.

    Values are padded to the width of keys, so it is planned with a little more work and memory.
    """
    width = value.shape[-1]
    if (missing := key.shape[-1] - width) > 0:
        value = functional.pad(value, (0, missing))
    attended = _attention(query, key, value, *args, **options)
    return attended[..., :width] if missing > 0 else attended


class Record(Profiler):  # type: ignore[no-untyped-call]
    """Profiles fake operators, by flops and bytes in place of seconds, and records calls of the runtime."""

    def __init__(
        self, weights: Sequence[Tensor], dtype: torch.dtype, batch: Batch, recomputes: Callable[[int], bool]
    ) -> None:
        super().__init__(weights=weights)
        self._dtype, self._touches, self.recorded = dtype, Touches(), self._recorded
        self.batch, self.recomputes = batch, recomputes
        #: Of each operator: flops, bytes, whether it computes in fp32, its call if that can be timed.
        self.rows: list[tuple[float, float, bool, Operation | None]] = []
        self.calls: list[Command] = []

    def tell(self, part: str, method: str, *args: Any, **options: Any) -> None:
        """Record that ``part.method(*args, **options)`` was called."""
        self.calls.append((len(self.rows), part, method, args, options))

    def storage_of(self, tensor: Tensor) -> int:
        return self.recorded.storages.find(tensor, Kind.INPUT, "input")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # asked several times for each operator
            return args[0].fake_device
        result, kwargs = super().__torch_dispatch__(func, types, args, kwargs), kwargs or {}
        if len(self.recorded.calls) == len(self.rows):
            return result
        tensors, given = [*tensors_in(result)], [*tensors_in((args, kwargs))]
        all_of_them = *given, *tensors
        if (name := str(func)) in _LOOKUPS | _INSERTS:  # as many rows as they return, or are given
            tensors = tensors if name in _LOOKUPS else given[-1:]
            given = given[1:] + tensors
        elif name in _EMPTY:
            tensors = given = []
        elif self.batch.together and func is torch.ops.aten._grouped_mm.default:
            given = [each for each in given if each.dim() < 3]  # experts are read once for all micro-batches
        nbytes = sum(each.numel() * each.itemsize for each in (*tensors, *given))
        floats = {each.dtype for each in given if each.is_floating_point()}
        fp32 = floats == {torch.float32} and self._dtype != torch.float32
        operation = None
        if self.batch.timed:
            operation = Operation.of(func, args, kwargs, self._touches.age)
            self._touches.note(all_of_them)
        self.rows.append((_flops(func, args, kwargs, result), float(nbytes), fp32, operation))
        return result

    def peak_nbytes(self, passing: PassingPlan | None = None, group: int = 1) -> int:
        """Return the most bytes of the step's own storages at once; see [Note: micro-batches in a block].

        ``passing``: where what waits between blocks is; None: there is one micro-batch. ``group``: of how
        many micro-batches experts run together.
        """
        lives = self.recorded.storages.lives
        spans = [(life.born, life.died, life.nbytes) for life in lives if life.kind in _OWN]
        if passing is not None:
            spans += [
                *self._kept(passing),
                *waiting(self.block_spans, passing),
                *self._together(passing, group),
            ]
        changes = [(born, nbytes) for born, _, nbytes in spans]
        changes += [(died, -nbytes) for _, died, nbytes in spans if died is not None]
        return max(itertools.accumulate((nbytes for _, nbytes in sorted(changes)), initial=0))

    @property
    def _takers(self) -> Counter[int]:
        """Return how many blocks are given each of the step's own storages."""
        lives, marks = self.recorded.storages.lives, self.recorded.regions
        return Counter(index for mark in marks for index in mark.inputs if lives[index].kind in _OWN)

    @property
    def block_spans(self) -> list[BlockSpan]:
        """Return the calls of blocks in order; each is taken to return what the next one is given."""
        lives, marks, takers = self.recorded.storages.lives, self.recorded.regions, self._takers
        given = [sum(lives[i].nbytes for i in mark.inputs if takers[i] == 1) for mark in marks]
        backward = {block.region: block.backward[0] for block in self.recorded.blocks()}
        began = [backward.get(mark.region, len(self.rows) - 1) for mark in marks]
        done, returned = [len(self.rows), *began], [*given[1:], *given[-1:]]
        return [
            BlockSpan(mark.begin, mark.end, began[i], done[i], given[i], returned[i])
            for i, mark in enumerate(marks)
        ]

    def _kept(self, passing: PassingPlan) -> Iterator[tuple[int, int | None, int]]:
        """Yield begin, end and bytes of what stays for backward of that which blocks are given.

        Of all micro-batches but the recorded one; and less of that, where its own has left.
        """
        lives, spans, others = self.recorded.storages.lives, self.block_spans, passing.slices - 1
        takers, seen = self._takers, set[int]()
        for block, mark in enumerate(self.recorded.regions):
            for index in takers.keys() & {*mark.inputs} - seen:
                seen.add(index)
                life, alone = lives[index], takers[index] == 1
                if not alone:
                    died = None if life.died is None else max(life.died, spans[-1].backward)
                    if self.batch.packing is not None:  # else all micro-batches have the same one
                        yield life.born, died, others * life.nbytes
                    continue
                span, kept = spans[block], kept_of(passing, block - 1) if block else passing.slices
                yield life.born, span.done, min(others, kept) * life.nbytes
                if not kept:  # the recorded one leaves, too
                    yield span.end, span.backward, -life.nbytes
                if life.died is not None:  # with the graph of autograd, in the record
                    yield span.done, max(span.done, life.died), -life.nbytes

    def _together(self, passing: PassingPlan, group: int) -> Iterator[tuple[int, int, int]]:
        """Yield begin, end and bytes of what blocks with experts have of a group's micro-batches but one."""
        others, held = group - 1, min(group - 1, passing.held)
        grouped = [at for at, call in enumerate(self.recorded.calls) if "grouped_mm" in call.name]
        stretches: list[tuple[int, int, int, int]] = []  # a block's, and in it that of its experts
        for number, span in enumerate(self.block_spans):
            kept = min(others, kept_of(passing, number - 1)) if number else others
            for begin, end, backward in ((span.begin, span.end, False), (span.backward, span.done, True)):
                products = grouped[bisect_left(grouped, begin) : bisect_left(grouped, end)]
                if products:
                    stretches.append((begin, end, products[0], products[-1] if backward else end))
                    # What waits elsewhere comes to the block.
                    yield begin, end, (others - (kept if backward else max(kept, held))) * span.given
                    yield begin, end, (others - held) * span.returned * backward
        stretches.sort()
        gradients = {(at, args[-1]) for at, _, method, args, _ in self.calls if method == "receive"}
        for life in self.recorded.storages.lives:
            place = bisect_right(stretches, life.born, key=itemgetter(0)) - 1
            if life.died is None or life.kind not in _OWN or place < 0:
                continue
            _, end, first, last = stretches[place]
            is_there = first < life.died <= end and life.born <= last
            if is_there and (life.died, life.nbytes) not in gradients:
                yield life.born, life.died, others * life.nbytes

    def again_flops(self) -> float:
        """Return the flops of forwards that run again."""
        calls = zip(self.recorded.calls, self.rows, strict=True)
        inside = ((call.region, row[0]) for call, row in calls if call.phase is Phase.FORWARD)
        return sum(flops for region, flops in inside if region % 2 and self.recomputes(region))


def _flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> float:
    name = str(func)
    if "_scaled_dot_product_flash_attention_for_cpu" in name:
        query, key, value = args[1:4] if "backward" in name else args[:3]
        b, h, s, d = query.shape
        pairs = float(b * h * s * key.shape[2])
        return (5 if "backward" in name else 2) * pairs * float(d + value.shape[3])
    if name.startswith("aten._grouped_mm"):
        (rows, inner), columns = args[0].shape[-2:], args[1].shape[-1]
        # tokens x experts' matrices; or, of gradients, columns of both for each expert: the same flops
        return 2.0 * float(rows) * float(inner) * float(columns)
    count = flop_registry.get(func._overloadpacket)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))


class _Told:
    """Stands in for a part of the runtime: records every call of a method, without tensors.

    Here all units stream: whether they do is asked when calls are played.
    """

    def __init__(self, record: Record, part: str) -> None:
        self._record, self._tell = record, partial(record.tell, part)

    def __getattr__(self, method: str) -> Callable[..., None]:
        return partial(self._tell, method)

    def streams(self, unit: int) -> bool:
        return True

    def holds(self, units: Collection[int]) -> bool:
        return True

    def receive(self, unit: Unit, segment: Segment, grad: Tensor) -> None:
        self._tell("receive", self._record.storage_of(segment.param), segment.numel * unit.dtype.itemsize)

    def complete_together(self, units: Iterable[Unit]) -> None:
        self._tell("complete_together", [unit.index for unit in units])

    def expect(self, *, backward: bool = False) -> None:
        """Do nothing: hooks of parameters take their gradients."""


class _Packed(NamedTuple):
    """Stands in autograd's graph for a saved tensor: of ``unit``, or of slot ``key``."""

    tensor: Tensor
    unit: Unit | None = None
    key: SlotKey | None = None


class _RecordedHooks(Hooks):
    """Runs the runtime's hooks on fake tensors, whose storages have no addresses, and the tensor cache."""

    def __init__(
        self, model: nn.Module, units: UnitIndex, leaves: Leaves, made: Record, blocks: Sequence[NamedBlock]
    ) -> None:
        prefetcher, pins, gradients = (cast(Any, _Told(made, part)) for part in _PARTS)
        activations = cast(Any, SimpleNamespace(open=lambda model: tracked(blocks, cast(Any, self))))
        super().__init__(units, leaves, activations, prefetcher, pins, gradients, lambda: None)
        self.profiler = made
        self.record = PassRecord(ActivationPolicy(lambda key: Place.KEEP, made.recomputes))
        self.taking: list[RemovableHandle] = []  # removed later: in another record they would take gradients
        self._by_storage = {_storage(place[1].param): place for place in units.segments()}
        self._buffers = {_storage(buffer) for buffer in model.buffers() if buffer is not None}
        self._keys: dict[int, SlotKey] = {}
        self.logits.decide(made.batch.logits, lambda: None)

    def _check_attached(self, unit: Unit, segments: Sequence[Segment]) -> None:
        """Do nothing: fake parameters view no buffer."""

    def unit_of(self, tensor: Tensor) -> Unit | None:
        place = self._by_storage.get(_storage(tensor))
        return None if place is None else place[0]

    def pack(self, tensor: Tensor) -> Any:
        self.profiler.saves()
        unit = self.unit_of(tensor)
        small = tensor.untyped_storage().nbytes() < LEAST_NBYTES
        if unit is not None or small or _storage(tensor) in self._buffers:
            return _Packed(tensor, unit)
        index = self.profiler.storage_of(tensor)
        if index not in self._keys:
            self._keys[index] = self.record.next_key()
            self.profiler.packed(self._keys[index], tensor)
        return _Packed(tensor, key=self._keys[index])

    def unpack(self, packed: Any) -> Tensor:
        if packed.unit is not None:
            self._enter_backward()
            self._use_in_backward(packed.unit)
        elif packed.key is not None:
            self.profiler.unpacked(packed.key, packed.tensor)
        return cast(Tensor, packed.tensor)

    def _expect_gradients(self) -> None:
        super()._expect_gradients()
        for _, segment in self.units.segments() if not self.taking else ():
            if segment.param.requires_grad:
                hook = segment.param.register_post_accumulate_grad_hook(self._take_recorded)  # type: ignore[no-untyped-call]
                self.taking.append(hook)

    def _take_recorded(self, param: nn.Parameter) -> None:
        grad, param.grad = param.grad, None
        if grad is not None:
            self.take_gradient(id(param), grad)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def record_step(
    model: Any, units: UnitIndex, leaves: Leaves, dtype: torch.dtype, batch: Batch,
    recomputes: Callable[[int], bool], left_out: Collection[int] = (),
) -> Record:  # fmt: skip
    """Run forward and backward of one micro-batch of a model on fake tensors.

    ``recomputes`` tells whether a region, which is a call of a block, runs its forward again. Blocks that are
    ``left_out`` return what the one before returned, and are no regions.

    Raises:
        CheckpointError: The model's forward depends on values.
    """
    made, packing = Record([s.param for _, s in units.segments()], dtype, batch, recomputes), batch.packing
    named = recomputable_blocks(model)
    blocks = [block for at, block in enumerate(named) if at not in left_out]
    with ExitStack() as stack:
        for at in left_out:
            stack.enter_context(_passing(named[at - 1].module, named[at].module))
        left = {module for at in left_out for module in named[at].module.modules()}
        stack.enter_context(_hooked(model, _RecordedHooks(model, units, leaves, made, blocks), left))
        for block in blocks if batch.together else ():
            stack.enter_context(_experts_in_parts(block.module))
        stack.enter_context(no_collection())  # storages end when nothing refers to them
        masks: Any = sys.modules.get("transformers.masking_utils")
        if packing is None and masks is not None:
            # Sequences are whole: it would look at the values of positions, which fake tensors lack, and
            # else makes a mask for every layer.
            stack.enter_context(patched(masks, "find_packed_sequence_indices", lambda position_ids: None))
        loss: Any = None if batch.scored else CausalLoss(model)
        tokens = torch.zeros(batch.tokens, dtype=torch.int64, device="cpu")
        targets = torch.zeros_like(tokens)
        positions, mask = (tokens if packing is each else None for each in (True, False))
        if batch.on_accelerator:
            stack.enter_context(patched(functional, "scaled_dot_product_attention", _fused_attention))
        with made, library_errors(CheckpointError, _WHY):
            if loss is None:
                value = model(input_ids=tokens, attention_mask=mask).logits.float().sum()
            else:
                value = loss(tokens, targets, positions, mask)
            value.backward()
        del value
        made.update_begins()  # what of the step is left has been let go
    return made


@contextmanager
def no_collection() -> Iterator[None]:
    """Let Python collect no cycles, for which it would look at a large model again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _experts_in_parts(block: nn.Module) -> Iterator[None]:
    """Let ``block`` run as in a layer schedule; a part of its experts is as small as tiles allow."""
    found = ExpertBlock.of(block, lambda tile: 1.0, block.forward)
    if found is None:
        yield
        return
    call = Call(found)  # of forward, and of its recomputation

    def forward(*args: Any, **kwargs: Any) -> Any:
        results = call([(args, kwargs)])
        return results[0] if results else None  # it is not needed

    with patched(block, "forward", forward):
        yield


@contextmanager
def _passing(before: nn.Module, block: nn.Module) -> Iterator[None]:
    """Let ``block`` return what the one ``before`` has returned, whose tensors are not held."""
    returned, spec = list[Any](), tree_flatten(None)[1]

    def note(module: nn.Module, args: object, result: Any) -> None:
        nonlocal spec
        leaves, spec = tree_flatten(result)
        returned[:] = [weakref.ref(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def forward(*args: object, **kwargs: object) -> Any:
        leaves = [leaf() if isinstance(leaf, weakref.ref) else leaf for leaf in returned]
        return tree_unflatten(leaves, spec)

    with before.register_forward_hook(note), patched(block, "forward", forward):
        yield


@contextmanager
def _hooked(model: nn.Module, hooks: _RecordedHooks, left_out: Collection[nn.Module]) -> Iterator[None]:
    server = SimpleNamespace(touch=lambda param, _: hooks.touch(param), deep_copy=_never, check=_nothing)
    with ExitStack() as stack:
        for module in [each for each in model.modules() if each not in left_out]:
            params = {name: _read_in_tiles(param, hooks) for name, param in module._parameters.items()}
            stack.enter_context(patched(module, "_parameters", params))
            install_parameter_dict(module, server)
            for handle in register_forward_hooks(module, hooks.enter, hooks.leave):
                stack.callback(handle.remove)
        try:
            yield
        finally:
            for handle in hooks.taking:
                handle.remove()


def _read_in_tiles(param: nn.Parameter | None, hooks: _RecordedHooks) -> Any:
    places = () if param is None else hooks.units.places(param)
    if not any(segment.is_tile for _, segment in places):
        return param
    name, batch = places[0][1].whole_name.rpartition(".")[0], hooks.profiler.batch
    routed = partial(_routed, name, batch.routed / math.prod(batch.tokens))
    after = used_after(hooks.units, places)
    return TileView(TiledWeight(places, hooks.using_tile, lambda hit: hit, after, routed=routed))


def _routed(module: str, more: float, rows: int, experts: int) -> Sequence[int]:
    """Return experts of ``module``: about as many as ``more * rows`` are routed to, by chance."""
    number = round(experts * (1 - (1 - 1 / experts) ** (more * rows)))
    return sorted(random.Random(module).sample(range(experts), max(1, number)))


def _never(param: nn.Parameter) -> nn.Parameter:
    raise CheckpointError("a model that copies its parameters while it runs cannot be planned")


def play(
    record: Record, units: UnitIndex, of_leaves: frozenset[int], nbytes: Mapping[int, int],
    window_nbytes: int,
) -> StepTrace:  # fmt: skip
    """Replay the calls of a record on the runtime's own prefetcher and pins; return the trace.

    ``of_leaves`` are gathered as parts of a leaf, and ``nbytes`` has streaming units.
    """
    mover: Any = SimpleNamespace(start=_nothing, finish=_nothing, release=_nothing, stored_nbytes=_nothing)
    prefetcher = Prefetcher(mover, nbytes, window_nbytes)
    pins, training = BackwardPins(prefetcher), prefetcher.training
    # Gradients are received as in :class:`infinity.engine.gradients.Gradients`.
    completions = Completions(
        of_leaves, lambda index: (len(units[index].trainable), len(units[index].segments)), pins.recomputed
    )
    begun: dict[int, int] = {}  # positions, by unit
    completed, tiles = list[tuple[int, int]](), dict[int, TileUse]()

    def complete(unit: int) -> None:
        completions.complete(unit)
        completed.append((training.position, unit))
        if prefetcher.streams(unit):
            pins.forget(unit)
            prefetcher.done(unit)

    places = list(units.segments())  # which are the first storages of a record

    def receive(place: int, nbytes: int) -> None:
        unit, segment = places[place]
        begun.setdefault(unit.index, training.position)
        if completions.fire(unit.index, segment.index):
            complete(unit.index)

    def complete_together(indices: Iterable[int]) -> None:
        for index in completions.left(index for index in indices if units[index].trainable):
            complete(index)

    every = partial(complete_together, range(len(units)))
    gradients = SimpleNamespace(receive=receive, complete_together=complete_together, end_backward=every)
    parts = dict(zip(_PARTS, (prefetcher, pins, gradients), strict=True))
    position = np.zeros(len(record.rows), dtype=np.int64)
    played = 0
    for at, part, method, args, options in record.calls:
        position[played:at] = training.position
        played = at
        if part != "gradients" and args and not prefetcher.streams(args[0]):
            continue  # the runtime's hooks ask first
        if method == "use" and len(args) > 1:
            following = tuple(filter(prefetcher.streams, args[1]))
            tiles[training.position] = TileUse(following, options["recomputed"])
        getattr(parts[part], method)(*args, **options)
    position[played:] = training.position
    flops, nbytes_moved, fp32 = (np.array(column) for column in list(zip(*record.rows))[:3])
    return StepTrace(
        events=tuple(training.trace), begun=tuple((at, unit) for unit, at in begun.items()),
        completed=tuple(completed), position=position, flops=flops,
        nbytes=nbytes_moved, fp32=fp32, tiles=tuple(tiles.items()),
        model_flops=float(flops.sum()) - record.again_flops(), tokens=math.prod(record.batch.tokens),
        peak_nbytes=record.peak_nbytes(),
    )  # fmt: skip


def _nothing(item: object) -> int:
    """Stands for what moves bytes (:class:`infinity.partition.mover.UnitMover`): none do."""
    return 0
