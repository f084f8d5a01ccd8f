"""One micro-batch of a model on fake tensors: its operators, and what hooks ask of the runtime.

[Note: written down, then played]
Operators run on fake tensors, which have shapes and no memory, under the runtime's own hooks. What the hooks
ask of the prefetcher, of backward's pins and of gradients is written down between the operators, and then
asked of the runtime's own :class:`Prefetcher`, with the sizes, homes and window that a run would have. So the
trace is the runtime's own, and a record, which knows neither sizes nor windows, serves plans for any budget.

[Note: micro-batches in a block]
A layer schedule takes all micro-batches of a step through a block before the next one. So what a block was
given is there for all of them until its backward; also, while one of them is in the block's backward, or in
what follows the last block, the gradients of what the block returned and was given. What is inside a block is
there for one of them. All that is recorded is one micro-batch: a block is taken to return as many bytes as
the next one is given. What all blocks are given (angles, masks) depends on the sequences if these have
positions or a mask of their own.
"""

import gc
import sys
import weakref
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from infinity.activations.blocks import NamedBlock, recomputable_blocks, tracked
from infinity.activations.logits import Mode
from infinity.activations.profiler import Life, Profiler, Recording, running_node
from infinity.activations.tensor_cache import LEAST_NBYTES, PassRecord
from infinity.core.errors import CheckpointError, library_errors
from infinity.core.plan import Kind, Phase, Place, SlotKey
from infinity.engine.hooks import Hooks, register_forward_hooks
from infinity.partition.init_context import install_parameter_dict
from infinity.partition.pins import BackwardPins
from infinity.partition.prefetcher import Prefetcher
from infinity.partition.tiles import TiledWeight, TileView
from infinity.partition.unit import Segment, Unit, UnitIndex
from infinity.planner.prefetch_plan import Event
from infinity.planner.updates import Completions
from infinity.predict.operators import Operation, Touches
from infinity.recipes.models.causal import CausalLoss

#: Operators that read a few rows of their first argument.
_LOOKUPS = {"aten.embedding.default", "aten.index_select.default"}
_WHY = "the model cannot be planned without values, since what its forward does depends on them"


# --- the record --------------------------------------------------------------------------------------


def _is_own(life: Life) -> bool:
    """Return whether a storage is the step's own: no weight, and nothing that it was given."""
    return life.kind in (Kind.WORKING, Kind.ACTIVATION, Kind.GRADIENT)


class Call(NamedTuple):
    """A call of a method of the runtime's parts, or of the tensor cache, after ``at`` operators had ended."""

    at: int
    part: str
    method: str
    args: tuple[Any, ...]
    options: dict[str, Any]


class Row(NamedTuple):
    """The cost of one operator: what it computes and moves.

    Attributes:
        operation: The call, to be timed; None: it cannot be repeated.
    """

    flops: float
    nbytes: float
    fp32: bool
    operation: Operation | None = None


@dataclass
class Record:
    """The record of one micro-batch.

    Attributes:
        profiled: Operators, storages, slots and calls of blocks.
        rows: A row for each operator.
        recomputes: Whether a region runs its forward again.
        backward_begins: The operator at which the backward of each call of a block begins; empty without
            backward.
    """

    profiled: Recording
    rows: list[Row]
    calls: list[Call]
    recomputes: Callable[[int], bool]
    backward_begins: dict[int, int] = field(default_factory=dict)

    def peak_nbytes(self, micro_batches: int = 1, *, apart: bool = False) -> int:
        """The most bytes of the step's own storages at one time.

        Args:
            micro_batches: Micro-batches that go through a block together; see the module's note on them.
            apart: Sequences have positions or a mask of their own.
        """
        lives = filter(_is_own, self.profiled.storages.lives)
        spans = [(life.born, life.died, life.nbytes) for life in lives]
        waiting = self._waiting(apart=apart)
        spans += [(born, died, (micro_batches - 1) * nbytes) for born, died, nbytes in waiting]
        changes = defaultdict[int, int](int)
        for born, died, nbytes in spans:
            changes[born] += nbytes
            if died is not None:
                changes[died] -= nbytes
        there = most = 0
        for at in sorted(changes):
            there += changes[at]
            most = max(most, there)
        return most

    def _waiting(self, *, apart: bool) -> Iterator[tuple[int, int | None, int]]:
        """Yield from when to when a micro-batch has how many bytes while another one is in a block."""
        lives, marks = self.profiled.storages.lives, self.profiled.regions
        takers = Counter(index for mark in marks for index in mark.inputs if _is_own(lives[index]))
        given = [sum(lives[i].nbytes for i in mark.inputs if takers[i] == 1) for mark in marks]
        returned = [*given[1:], *given[-1:]]
        forward_end = sum(call.phase is Phase.FORWARD for call in self.profiled.calls)
        end = len(self.profiled.calls)
        began = [self.backward_begins.get(at, end) for at in range(len(marks))]
        for index, count in takers.items():
            life = lives[index]
            if count == 1 or apart:
                yield life.born, None if life.died is None else max(life.died, began[-1]), life.nbytes
        for at, ended in enumerate([end, *began][: len(marks)]):
            yield began[at], ended, given[at] + returned[at]  # gradients
        if marks:
            yield marks[-1].end, began[-1], returned[-1]
            yield forward_end, began[-1], returned[-1]  # its gradient

    @property
    def again_flops(self) -> float:
        """Flops of forwards that run again."""
        found: dict[int, float] = {}
        for call, row in zip(self.profiled.calls, self.rows, strict=True):
            if row.flops and call.phase is Phase.FORWARD:
                found[call.region] = found.get(call.region, 0.0) + row.flops
        return sum(flops for region, flops in found.items() if region % 2 and self.recomputes(region))


# --- recording ---------------------------------------------------------------------------------------


class Recorder(Profiler):  # type: ignore[no-untyped-call]
    """Profiles fake operators, by flops and bytes in place of seconds, and writes calls down.

    Args:
        weights: All parameters of the model.
        dtype: The dtype in which the model computes.
        recomputes: Whether a region runs its forward again.
    """

    def __init__(
        self, weights: Sequence[Tensor], dtype: torch.dtype, recomputes: Callable[[int], bool]
    ) -> None:
        super().__init__(weights=weights)
        self._dtype, self._touches = dtype, Touches()
        self.record = Record(self._recorded, [], [], recomputes)

    @property
    def operators(self) -> int:
        """Operators that have ended."""
        return len(self._recorded.calls)

    def tell(self, part: str, method: str, *args: Any, **options: Any) -> None:
        """Write down that ``part.method(*args, **options)`` was called."""
        self._note_node()
        self.record.calls.append(Call(self.operators, part, method, args, options))

    def finished(self) -> Record:
        """Return the record; call after ``with``, when nothing of the step but its weights is held."""
        self._end_backward()
        return self.record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # asked several times for each operator
            return args[0].fake_device
        self._note_node()
        before = self.operators
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.operators > before:
            self.record.rows.append(self._row(func, args, kwargs or {}, result))
        return result

    def _note_node(self) -> None:
        """Note where the backward of a block begins: with the first of its nodes."""
        if torch._C._current_graph_task_id() == -1:
            return
        node = running_node()
        regions = self._recorded.regions
        block = bisect_right(regions, node, key=lambda mark: mark.first_node) - 1
        if block >= 0 and node < regions[block].end_node:
            self.record.backward_begins.setdefault(block, self.operators)

    def _row(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Row:
        tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        given = given_all = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if str(func) in _LOOKUPS:
            given = given[1:] + tensors
        nbytes = sum(each.numel() * each.itemsize for each in (*tensors, *given))
        floats = [each for each in given if each.is_floating_point()]
        fp32 = bool(floats) and all(each.dtype == torch.float32 for each in floats)
        fp32 = fp32 and self._dtype != torch.float32
        operation = Operation.of(func, args, kwargs, self._touches.age)
        self._touches.note((*given_all, *tensors))
        flops = _flops(func, args, kwargs, result)
        return Row(flops, float(nbytes), fp32, operation)


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


class _Packed:
    """Stands in autograd's graph for a saved tensor: of ``unit``, or of slot ``key``."""

    __slots__ = ("key", "tensor", "unit")

    def __init__(self, tensor: Tensor, unit: Unit | None = None, key: SlotKey | None = None) -> None:
        self.tensor, self.unit, self.key = tensor, unit, key


class _Recomputes:
    """Keeps every slot; recomputes some regions."""

    def __init__(self, regions: Callable[[int], bool]) -> None:
        self.recomputes = regions

    def place(self, key: SlotKey) -> Place:
        return Place.KEEP

    def loads(self, after: SlotKey | None) -> None:
        return None


class _Cache:
    """Stands for the tensor cache: tells what is packed and asked for, and keeps everything."""

    def __init__(self, profiler: Recorder, record: PassRecord, exempt: Collection[int]) -> None:
        self.profiler, self.record, self._exempt = profiler, record, exempt
        self._keys: dict[int, tuple[weakref.ref[Any], SlotKey]] = {}
        self._backward = -1

    def pack(self, tensor: Tensor) -> _Packed:
        storage = tensor.untyped_storage()
        if storage.nbytes() < LEAST_NBYTES or storage._cdata in self._exempt:
            return _Packed(tensor)
        known = self._keys.get(storage._cdata)
        if known is None or known[0]() is not storage:
            key = self.record.next_key()
            self._keys[storage._cdata] = weakref.ref(storage), key
            self.profiler.packed(key, tensor)
            self.profiler.tell("slots", "pack", key, storage.nbytes())
        else:
            key = known[1]
        return _Packed(tensor, key=key)

    def unpack(self, packed: _Packed) -> Tensor:
        backward = torch._C._current_graph_task_id()
        if self._backward != backward:
            self._backward = backward
            self.profiler.tell("slots", "begin_backward")
            self.profiler.backward_begins()
        if packed.key is not None:
            self.profiler.unpacked(packed.key)
            self.profiler.tell("slots", "ask", packed.key)
        return packed.tensor


class _Activations:
    """Opens a forward pass, as :class:`infinity.activations.controller.Activations` does."""

    def __init__(self, cache: _Cache, blocks: Sequence[NamedBlock]) -> None:
        self.cache, self._blocks = cache, blocks

    def open(self, model: nn.Module) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(tracked(self._blocks, cast(Any, self.cache)))
        return stack


class _Told:
    """Stands for a part of the runtime: every call of a method is written down, and returns None."""

    def __init__(self, recorder: Recorder, part: str) -> None:
        self._tell = partial(recorder.tell, part)

    def __getattr__(self, method: str) -> Callable[..., None]:
        return partial(self._tell, method)


class _Uses(_Told):
    """Stands for the prefetcher. Here all units stream: whether they do is asked when calls are played."""

    def __init__(self, recorder: Recorder, nbytes: Mapping[int, int], capacity_nbytes: int) -> None:
        super().__init__(recorder, "prefetcher")
        self._nbytes, self._capacity_nbytes = nbytes, capacity_nbytes

    def streams(self, unit: int) -> bool:
        return True

    def holds(self, units: Collection[int]) -> bool:
        return sum(self._nbytes.get(unit, 0) for unit in units) <= self._capacity_nbytes

    def use(self, unit: int, following: Sequence[int] | None = None, *, recomputed: bool = False) -> None:
        self._tell("use", unit)


class _Gradients(_Told):
    """Stands for :class:`infinity.engine.gradients.Gradients`; holds no tensor."""

    def receive(self, unit: Unit, segment: Segment, grad: Tensor) -> None:
        self._tell("receive", unit.index, segment.index)

    def complete_together(self, units: Sequence[Unit]) -> None:
        self._tell("complete_together", [unit.index for unit in units])


class _RecordedHooks(Hooks):
    """The runtime's hooks on fake tensors, whose storages have no addresses.

    Attributes:
        by_storage: Units by the storages of their parameters.
        taking: Hooks of parameters, to be removed: with those of an earlier record they would take gradients.
    """

    by_storage: dict[int, Unit]
    taking: list[RemovableHandle]

    def _check_attached(self, unit: Unit, segment: Segment) -> None:
        """Do nothing: fake parameters view no buffer."""

    def unit_of(self, tensor: Tensor) -> Unit | None:
        return self.by_storage.get(tensor.untyped_storage()._cdata)

    def pack(self, tensor: Tensor) -> Any:
        unit = self.unit_of(tensor)
        return cast(Any, self.activations.cache).pack(tensor) if unit is None else _Packed(tensor, unit)

    def unpack(self, packed: Any) -> Tensor:
        cache = cast(Any, self.activations.cache)
        if packed.unit is None:
            return cast(Tensor, cache.unpack(packed))
        self._enter_backward()
        self._use_in_backward(packed.unit)
        return cast(Tensor, packed.tensor)

    def _hook_parameter(self, param: nn.Parameter) -> None:
        self.taking.append(param.register_post_accumulate_grad_hook(self._take_gradient))  # type: ignore[no-untyped-call]

    def _replace_gradient(self, param: nn.Parameter, unit: Unit, segment: Segment) -> None:
        param.grad = None


@dataclass(frozen=True)
class Subject:
    """The model and micro-batch that are recorded.

    Attributes:
        model: The model, on fake tensors.
        leaves: Units that are gathered as one, by module.
        nbytes: Bytes of streaming units; the window has ``window_nbytes``.
        tokens: Shape of a micro-batch.
        logits: The way in which logits are computed.
        packing: Sequences are whole documents, several (True) or one (False), padded; None: a stream of text.
    """

    model: Any
    units: UnitIndex
    leaves: Mapping[nn.Module, tuple[Unit, ...]]
    dtype: torch.dtype
    nbytes: Mapping[int, int]
    window_nbytes: int
    tokens: tuple[int, int]
    logits: Mode = "whole"
    packing: bool | None = None

    @property
    def leaf_units(self) -> frozenset[int]:
        return frozenset(unit.index for leaf in self.leaves.values() for unit in leaf)


def record(subject: Subject, recomputes: Callable[[int], bool]) -> Record:
    """Run forward and backward of one micro-batch.

    Args:
        recomputes: Whether a region, which is a call of a block, runs its forward again.

    Raises:
        CheckpointError: The model's forward depends on values.
    """
    model, units = subject.model, subject.units
    blocks = recomputable_blocks(model)
    weights = [segment.param for _, segment in units.segments()]
    recorder = Recorder(weights, subject.dtype, recomputes)
    exempt = {
        each.untyped_storage()._cdata
        for each in (*weights, *(buffer for buffer in model.buffers() if buffer is not None))
    }
    cache = _Cache(recorder, PassRecord(cast(Any, _Recomputes(recomputes))), exempt)
    hooks = _RecordedHooks(units, subject.leaves, cast(Any, _Activations(cache, blocks)))
    hooks.taking = []
    hooks.by_storage = {segment.param.untyped_storage()._cdata: unit for unit, segment in units.segments()}
    uses: Any = _Uses(recorder, subject.nbytes, subject.window_nbytes)
    pins: Any = _Told(recorder, "pins")
    gradients: Any = _Gradients(recorder, "gradients")
    hooks.connect(uses, pins, gradients, {}, lambda: None)
    hooks.logits.decide(subject.logits, lambda: None)
    with _hooked(model, hooks), _uncollected(), ExitStack() as stack:
        loss = CausalLoss(model)
        tokens = torch.zeros(subject.tokens, dtype=torch.int64, device="cpu")
        targets = torch.zeros_like(tokens)
        positions, mask = (tokens if subject.packing is each else None for each in (True, False))
        if subject.packing is None:
            stack.enter_context(_without_packing())
        with recorder, library_errors(CheckpointError, _WHY):
            value = loss(tokens, targets, positions, mask)
            value.backward()  # type: ignore[no-untyped-call]
        del value
        return recorder.finished()


@contextmanager
def _without_packing() -> Iterator[None]:
    """Inside, transformers takes sequences for whole ones.

    It looks at the values of positions, which fake tensors lack, and else makes a mask for every layer.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    if masks is None:  # the model is another one
        yield
        return
    before = masks.find_packed_sequence_indices
    masks.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = before


@contextmanager
def _hooked(model: nn.Module, hooks: _RecordedHooks) -> Iterator[None]:
    """Inside, modules tell ``hooks`` what they use."""
    modules = list(model.modules())
    before = {module: module._parameters for module in modules}
    handles = []
    for module in modules:
        module.__dict__["_parameters"] = {n: _read_in_tiles(p, hooks) for n, p in before[module].items()}
        install_parameter_dict(module, lambda param, siblings: hooks.touch(param), _never, lambda param: None)
        handles += register_forward_hooks(module, hooks.enter, hooks.leave)
    try:
        yield
    finally:
        for handle in (*handles, *hooks.taking):
            handle.remove()
        for module, own in before.items():
            module.__dict__["_parameters"] = own


def _read_in_tiles(param: nn.Parameter | None, hooks: _RecordedHooks) -> Any:
    """Return ``param``, or what operators read its tiles through."""
    places = () if param is None else hooks.units.places(param)
    if not any(segment.is_tile for _, segment in places):
        return param
    return TileView(TiledWeight(places, hooks.using_tile, lambda hit: hit, without_values=True))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Inside, storages end when nothing refers to them, and not when Python happens to collect cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _never(param: nn.Parameter) -> nn.Parameter:
    raise CheckpointError("a model that copies its parameters while it runs cannot be planned")


# --- playing -----------------------------------------------------------------------------------------


class _Mover:
    """Moves nothing; see :class:`infinity.partition.prefetcher.Mover`."""

    def start(self, item: object) -> None:
        pass

    finish = release = start

    def stored_nbytes(self, unit: int) -> int:
        return 0


class _CompletedUnits:
    """Takes gradients in as :class:`infinity.engine.gradients.Gradients` does, and notes when."""

    def __init__(self, subject: Subject, prefetcher: Prefetcher, pins: BackwardPins) -> None:
        self._units, self._prefetcher, self._pins = subject.units, prefetcher, pins
        self._completions = Completions(
            subject.leaf_units,
            lambda index: (len(self._units[index].trainable), len(self._units[index].segments)),
            pins.recomputed,
        )
        self.begun: dict[int, int] = {}  # positions, by unit
        self.completed: list[tuple[int, int]] = []

    def receive(self, unit: int, segment: int) -> None:
        self.begun.setdefault(unit, self._prefetcher.training.position)
        if self._completions.fire(unit, segment):
            self._complete(unit)

    def complete_together(self, units: Iterable[int]) -> None:
        for index in self._completions.left(unit for unit in units if self._units[unit].trainable):
            self._complete(index)

    def end_backward(self) -> None:
        self.complete_together(range(len(self._units)))

    def _complete(self, unit: int) -> None:
        self._completions.complete(unit)
        self.completed.append((self._prefetcher.training.position, unit))
        if self._prefetcher.streams(unit):
            self._pins.forget(unit)
            self._prefetcher.done(unit)


class _SlotPositions:
    """Notes at which event slots are packed and asked for."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._training = prefetcher.training
        self.packs: dict[SlotKey, tuple[int, int]] = {}
        self.asks: dict[SlotKey, int] = {}
        self.backward_at = 0

    def pack(self, key: SlotKey, nbytes: int) -> None:
        self.packs[key] = self._training.position, nbytes

    def ask(self, key: SlotKey) -> None:
        self.asks.setdefault(key, self._training.position)

    def begin_backward(self) -> None:
        self.backward_at = self._training.position


@dataclass(frozen=True, slots=True)
class Played:
    """A record as the runtime's prefetcher sees it; positions are numbers of events.

    Attributes:
        begun: Positions at which a unit's first gradient comes, with the unit.
        completed: Positions at which a unit's last gradient comes, with the unit.
        position: The position of each operator.
        packs: The position at which each slot is packed, with its bytes.
        asks: The position at which backward first asks for each slot.
        backward_at: The position at which backward begins.
    """

    events: tuple[Event, ...]
    begun: tuple[tuple[int, int], ...]
    completed: tuple[tuple[int, int], ...]
    position: np.ndarray
    packs: dict[SlotKey, tuple[int, int]]
    asks: dict[SlotKey, int]
    backward_at: int


def play(record: Record, subject: Subject) -> Played:
    """Ask the runtime's own prefetcher and pins for what the calls of a record say."""
    prefetcher = Prefetcher(_Mover(), subject.nbytes, subject.window_nbytes)
    pins, training = BackwardPins(prefetcher), prefetcher.training
    gradients, slots = _CompletedUnits(subject, prefetcher, pins), _SlotPositions(prefetcher)
    parts = {"prefetcher": prefetcher, "pins": pins, "gradients": gradients, "slots": slots}
    position = np.zeros(len(record.profiled.calls), dtype=np.int64)
    played = 0
    for at, part, method, args, options in record.calls:
        if at > played:
            position[played:at] = training.position
            played = at
        if part in ("prefetcher", "pins") and args and not prefetcher.streams(args[0]):
            continue  # the runtime's hooks ask first
        getattr(parts[part], method)(*args, **options)
    position[played:] = training.position
    begun = tuple((at, unit) for unit, at in gradients.begun.items())
    return Played(
        tuple(training.trace), begun, tuple(gradients.completed), position, slots.packs, slots.asks,
        slots.backward_at,
    )  # fmt: skip
