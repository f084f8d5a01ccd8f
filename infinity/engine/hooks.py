"""Turns calls of modules, and what autograd saves, into uses of units.

[Note: handles in place of weights]
Autograd must never hold a unit's buffer. Saved tensors in one are packed as a :class:`Handle`; unpacking
gathers the unit if needed and views it, so backward asks for exactly the weights that it reads. All else
that autograd saves goes to the tensor cache.

[Note: forwards inside a backward]
Recomputation (either kind of ``torch.utils.checkpoint``) runs modules inside the backward pass, where
checkpoint's own hooks see the saved tensors and ours stay closed. A unit that is used there stays pinned
until its gradients are complete; one that is frozen in part may be read after its last gradient, so its
gradients are complete when backward ends. A frozen unit stays until backward has passed every call that reads
it, which the gradient of the call's input tells, or, if that input needs no gradient or cannot be seen, until
backward ends.

[Note: a leaf on several ranks]
Ranks use different experts. So entering a leaf uses all its units in the order of the model, whatever happens
inside. In backward the first weight or gradient of a leaf opens it, and the first of anything else ends it:
then all its gradients are complete, and experts that no rank used are left alone. Gradients of a leaf that
ran several times are complete at the end of backward.

[Note: logits in slices]
A head whose logits are pending (:mod:`infinity.activations.logits`) uses no unit when it is called. All
slices are one use where the loss is computed, in the model's forward or after it: the order of uses is that
of whole logits, on every rank. An inference pass with pending logits goes on until they are read once, or
another pass begins; until then units of the calls around the head stay. Backward recomputes all slices
together, so the head is kept for one autograd node, not until its gradients are complete: with tied weights
that would be the whole backward pass.

[Note: tiles]
Operators on a parameter in tiles use one tile after the other (:mod:`infinity.partition.tiles`). What they
save of it becomes a handle also where ``torch.utils.checkpoint`` has opened hooks of its own, so a tile need
not stay until the backward pass of a recomputed forward.

[Note: calls inside]
A call costs the thread that feeds an accelerator more than many kernels take. So a call uses the units of all
parameters in its module at once if that is one, or two that take turns (budgets have room for two), or if
none comes and goes. Until it ends, calls of modules inside find that all is there, and do nothing. A frozen
unit goes when backward has passed the call: where no input tells that, modules inside do as ever. So do
those around blocks, each of which brings its own, and around the head, whose calls may be pending.

[Note: the outermost module]
The outermost module of a call opens and closes the saved-tensor hooks, since submodules are called on their
own, too. PyTorch calls no hook after a forward that ``KeyboardInterrupt`` ended: so the outermost call keeps
its Python frame, and only a frame that has ended can be cleared. What such a call holds is given back before
the next call, visit, backward pass or step.

Torch keeps hooks of tensors where Python's collector cannot look. So such a hook holds neither a parameter
nor us; otherwise a model would live as long as the process.
"""

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from infinity.activations.controller import Activations, recomputable_blocks
from infinity.activations.logits import LogitSlices, PendingLogits, find_head
from infinity.activations.profiler import NO_NODE, running_node
from infinity.activations.recompute import in_backward, saving_hooks, untraced
from infinity.activations.tensor_cache import KeptTensor
from infinity.core.errors import StateError
from infinity.core.lifecycle import Ended
from infinity.core.process import UninterruptedExit, uninterrupted, weakly
from infinity.engine.gradients import Gradients
from infinity.partition.divided import arrived, is_divided, joined
from infinity.partition.init_context import ForwardHooks, ServedParameters
from infinity.partition.prefetcher import BackwardPins, Prefetcher
from infinity.partition.unit import Segment, Unit, UnitIndex

#: Stands for the autograd node that reads a frozen head, for all slices.
_SLICES = NO_NODE - 1


@dataclass(slots=True)
class Handle:
    """Stands for a view of a unit's flat buffer in autograd's graph."""

    unit: Unit
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    updates: int


@dataclass(frozen=True, slots=True)
class Reach:
    """Lists the parameters that a call of a module uses: its own, or all in it."""

    places: Mapping[Unit, Sequence[Segment]] = field(default_factory=dict)
    inside: Sequence[ServedParameters] = ()  # of the modules in it
    at_once: bool = False  # units may be used at once even if they come and go


@dataclass(slots=True)
class Frame:
    """Holds a module whose forward is running, and the units that it keeps."""

    module: nn.Module
    pinned: list[int]
    served: ServedParameters | None = None  # the module's own ones, if all are in memory while it runs
    reach: Reach = field(default_factory=Reach)
    contexts: ExitStack | None = None  # what an outermost call opened: saved-tensor hooks, pending logits
    recorded: bool = False  # autograd records this outermost call
    inference: bool = False  # it does not
    pending: bool = False  # a head in it has not been computed: its loss may follow the call
    leaf: bool = False  # its units are used as one
    call: FrameType | None = None  # of the outermost call: see [Note: the outermost module]


class Uses:
    """Knows the reaches of the modules of one model's units, until parameters are replaced.

    Also the ``leaves``, modules whose units are used as one on several ranks, and which backward is in.
    """

    def __init__(self, units: UnitIndex, leaves: Mapping[nn.Module, tuple[Unit, ...]]) -> None:
        self.leaves, self._units = leaves, units
        self.leaf_of = {unit.index: leaf for leaf in leaves.values() for unit in leaf}
        self.calls: Counter[tuple[Unit, ...]] = Counter()  # of leaves, since the last backward
        self.current: tuple[Unit, ...] = ()  # the leaf that backward is in; empty: in none
        self._reaches: weakref.WeakKeyDictionary[nn.Module, tuple[Reach, Reach]] = weakref.WeakKeyDictionary()
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # that ran,
        self._around: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # and what is around blocks and heads
        self._replaced = 0

    def leave(self, following: tuple[Unit, ...]) -> tuple[Unit, ...]:
        """Move on to the leaf that backward is in now; return the one that is over, if any."""
        left, self.current = self.current, following
        return () if left is following or self.calls[left] > 1 else left

    def look_into(self, model: nn.Module) -> None:
        """Find the modules around blocks, and around the head."""
        if model in self._models:
            return
        self._models.add(model)
        self._reaches.clear()
        head, names = find_head(model), [block.name for block in recomputable_blocks(model)]
        for name in names + [name for name, module in model.named_modules() if module is head]:
            parts = name.split(".")
            self._around.update(model.get_submodule(".".join(parts[:n])) for n in range(len(parts)))

    def of(self, module: nn.Module) -> tuple[Reach, Reach]:
        """Return the reach of a module's own parameters, and of all in it; that is empty around blocks."""
        if self._replaced != ServedParameters.replaced:
            self._replaced = ServedParameters.replaced
            self._reaches.clear()
        if (found := self._reaches.get(module)) is None:
            inside = [*module.modules()]
            around = module in self._around or any(each in self.leaves for each in inside)
            whole = Reach() if around else self._reach(inside)
            found = self._reaches[module] = self._reach([module]), whole
        return found

    def _reach(self, modules: Sequence[nn.Module]) -> Reach:
        params = {id(p): p for each in modules for p in each._parameters.values() if p is not None}
        found = [place for p in params.values() if (place := self._units.find(p)) is not None]
        turns = sum(unit is not following for (unit, _), (following, _) in pairwise(found))
        places: dict[Unit, list[Segment]] = {}
        for unit, segment in found:
            places.setdefault(unit, []).append(segment)
        served = (each._parameters for each in modules[1:])
        inside = [each for each in served if isinstance(each, ServedParameters)]
        return Reach(places, inside, at_once=len(places) == 1 or (len(places) == 2 and turns > 2))


@dataclass(slots=True)
class _Outside:
    """Holds the uses of units outside any forward."""

    units: list[int] = field(default_factory=list)  # that were touched there
    goes_on: bool = False  # a pass does: a visit of those, or inference whose loss is to follow
    pending: list[int] = field(default_factory=list)  # of calls that are over, but whose logits are pending


class Hooks:
    """Turns the calls of one model's modules, and autograd's, into uses of units and into gradients.

    ``leaves`` are units that are used as one, by module; ``begin_forward`` is called before each forward that
    autograd records.
    """

    def __init__(
        self, units: UnitIndex, leaves: Mapping[nn.Module, tuple[Unit, ...]], activations: Activations,
        prefetcher: Prefetcher, pins: BackwardPins, gradients: Gradients, begin_forward: Callable[[], None],
    ) -> None:  # fmt: skip
        self.units, self.activations = units, activations
        self.prefetcher, self.pins, self.gradients = prefetcher, pins, gradients
        self._begin_forward = begin_forward
        self.logits = LogitSlices(
            self._running, lambda head: tuple(unit.updates for unit in units.holding(head.parameters()))
        )
        self.stack: list[Frame] = []
        self.recorded = False  # whether autograd recorded a forward pass of parameters that train
        self._uses, self._outside = Uses(units, leaves), _Outside()
        #: Of the backward pass that goes on; dead: it raised, so autograd dropped what it was to call.
        self.backward: weakref.ref[Callable[[], None]] | None = None
        self._graphs: list[list[Hooks]] = []  # those of that pass, each of which kept us until now
        self._reads: Counter[int] = Counter()  # calls that read a frozen unit and wait for their backward

    @property
    def _plain(self) -> bool:
        """Whether nothing comes and goes, so that autograd may save tensors as they are."""
        return not self.prefetcher.nbytes and self.activations.policy == "keep"

    def end(self, why: str) -> None:
        """Make every later call from a module or autograd raise ``why``."""
        while self.stack:  # a forward that was left without its hook
            self._end_frame(self.stack.pop())
        ended: Any = Ended(why)
        self.prefetcher = self.pins = self.gradients = ended

    def enter(self, module: nn.Module, args: Any = ()) -> None:
        self._close_ended()
        outermost, again, frame = not self.stack, in_backward(), Frame(module, [])
        self.stack.append(frame)  # whatever comes, its contexts will be left
        if again:
            self._enter_backward()
        if outermost:
            frame.call, frame.contexts = _running_call(), ExitStack()
            if not again:
                self._open(frame, frame.contexts)
            frame.contexts.enter_context(self.logits.opened(module))
        if module is self.logits.head and self.logits.defers(module, args):
            for each in self.stack:
                each.pending = True
            return
        if (leaf := self._uses.leaves.get(module)) is not None:
            if torch.is_grad_enabled() and not again:
                self._uses.calls[leaf] += 1
            for unit in leaf:
                self._use(unit, frame)
            frame.leaf = True
        reach = self._reach_of(module, args)
        for unit in reach.places:
            self._use(unit, frame)
        for unit, segments in reach.places.items():
            self._check_attached(unit, segments)
        for unit in reach.places if self.pins.frozen and torch.is_grad_enabled() else ():
            if unit.index in self.pins.frozen and self.prefetcher.streams(unit.index):
                self._watch(unit.index, args)
        if isinstance(module._parameters, ServedParameters):
            frame.served = module._parameters
            frame.served.in_use += 1
        frame.reach = reach
        for inside in reach.inside:
            inside.covered += 1

    def _reach_of(self, module: nn.Module, args: Any) -> Reach:
        """Return what a call of ``module`` uses now: see [Note: calls inside]."""
        own, all_in_it = self._uses.of(module)
        streaming = [unit for unit in all_in_it.places if self.prefetcher.streams(unit.index)]
        if not streaming:
            return all_in_it if all_in_it.places else own
        beside = {unit for frame in self.stack for unit in frame.reach.places}
        if not all_in_it.at_once or len(beside.union(all_in_it.places)) > 2:
            return own
        frozen = torch.is_grad_enabled() and any(unit.index in self.pins.frozen for unit in streaming)
        seen = any(isinstance(value, Tensor) and value.requires_grad for value in args) if frozen else True
        return all_in_it if seen else own

    def _watch(self, index: int, args: Any) -> None:
        """Register a hook that tells when backward has passed a call that reads a frozen unit."""
        if self._reads[index] and in_backward():
            return  # recomputed: the graph of the first forward is the one that backward goes through
        for value in args:
            if isinstance(value, Tensor) and value.requires_grad:
                self._reads[index] += 1
                value.register_hook(functools.partial(weakly(self._passed), index))  # type: ignore[no-untyped-call]

    @uninterrupted
    def _passed(self, index: int, grad: Tensor) -> None:
        if self._reads[index]:
            self._reads[index] -= 1
            if not self._reads[index]:
                self.pins.unpin(index)

    def leave(self, module: nn.Module, output: Any) -> None:
        """Release the units of a module's forward, also when it raised (then ``output`` is None)."""
        for frame in reversed(self.stack):
            if frame.module is module:
                self._unwind(frame, output)
                return

    def _close_ended(self) -> None:
        call = self.stack[0].call if self.stack else None
        if call is not None:
            try:
                call.clear()
            except RuntimeError:  # it runs
                return
            self._unwind(self.stack[0], None)

    def _unwind(self, frame: Frame, output: Any) -> None:
        """Close ``frame`` and those above it whose hooks never ran."""
        top = None
        while top is not frame:
            top = self.stack.pop()
            self._close(top, output if top is frame else None)

    def touch(self, param: nn.Parameter) -> None:
        """Use the unit of ``param`` when code reads it as an attribute of a module."""
        place = self.units.find(param)
        if place is None:
            return
        unit, outside = place[0], self._outside
        if self.prefetcher.streams(unit.index):
            self._close_ended()
            if self.stack:
                self._use(unit, self.stack[-1])
            elif in_backward():
                self._use_in_backward(unit)
            elif unit.index not in outside.units:
                if not self.prefetcher.holds([*outside.units, unit.index]):
                    self.release_unscoped_units()  # print(model) asks for every bias
                self._begin_visit()
                self.prefetcher.use(unit.index)
                outside.units.append(unit.index)
        self._check_attached(unit, place[1:])

    def _check_attached(self, unit: Unit, segments: Sequence[Segment]) -> None:
        unit.check_data(segments)

    def release_unscoped_units(self) -> None:
        """Release the units that were touched outside any forward, and end the pass outside."""
        self._close_ended()
        if self._outside.units:
            self._begin_visit()
            while self._outside.units:
                self.prefetcher.unpin(self._outside.units.pop(0))
        self._end_outside()

    def _begin_visit(self) -> None:
        self._end_outside()
        self.prefetcher.begin_inference(visit=True)
        self._outside.goes_on = True

    def _end_outside(self) -> None:
        """End the pass outside any forward; units that were touched there stay."""
        while self._outside.pending:
            self.prefetcher.unpin(self._outside.pending.pop(0))
        if self._outside.goes_on:
            self._outside.goes_on = False
            self.prefetcher.end_inference()

    def _use(self, unit: Unit, frame: Frame) -> None:
        if not self.prefetcher.streams(unit.index) or unit.index in frame.pinned:
            return
        if in_backward():  # see [Note: forwards inside a backward]
            self._use_in_backward(unit, recomputing=not self.logits.computing)
            return
        one_use = unit.index in self._uses.leaf_of or self.logits.computing
        if one_use and any(f.leaf and unit.index in f.pinned for f in self.stack):
            return
        self.prefetcher.use(unit.index)
        frame.pinned.append(unit.index)

    @contextmanager
    def using_tile(self, unit: Unit, following: Sequence[Unit]) -> Iterator[None]:
        """Hold a tile gathered; see :data:`infinity.partition.tiles.Using`."""
        if not self.prefetcher.streams(unit.index):
            with self._saving_handles():
                yield
            return
        with UninterruptedExit() as stack:
            with uninterrupted:
                recomputed = in_backward()
                if recomputed:  # beside what backward keeps
                    self.pins.make_room(unit.index, running_node())
                elif not self.stack:
                    self._begin_visit()  # which the next pass ends, if none does before
                coming = [each.index for each in following if self.prefetcher.streams(each.index)]
                self.prefetcher.use(unit.index, coming, recomputed=recomputed)
                stack.callback(self.prefetcher.unpin, unit.index)
            self._check_attached(unit, unit.segments)
            with self._saving_handles():
                yield

    def _saving_handles(self) -> AbstractContextManager[Any]:
        """Return a context in which saved tensors of units become handles, and others go where they went."""
        others = saving_hooks()
        if self._plain or not torch.is_grad_enabled() or others[0] == self.pack:
            return nullcontext()

        def pack(tensor: Tensor) -> Any:
            ours = self.unit_of(tensor) is not None
            return ours, (self.pack if ours else others[0])(tensor)

        def unpack(packed: Any) -> Any:
            ours, value = packed
            return (self.unpack if ours else others[1])(value)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _open(self, frame: Frame, contexts: ExitStack) -> None:
        self.release_unscoped_units()
        self._uses.look_into(frame.module)
        self.abort_backward()
        if not torch.is_grad_enabled():
            frame.inference = True
            self.prefetcher.begin_inference()
            return
        self._expect_gradients()
        self._begin_forward()
        frame.recorded = True
        contexts.enter_context(self.activations.open(frame.module))
        if not self._plain:
            contexts.enter_context(torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack))

    def _close(self, frame: Frame, output: Any) -> None:
        if frame.pending:
            self._outside.pending += frame.pinned
        else:
            for index in frame.pinned:
                self.prefetcher.unpin(index)
        if frame.inference:
            self._outside.goes_on = True
            if not frame.pending:
                self._end_outside()
        self._end_frame(frame)
        kept = [self]  # until the backward of a graph that holds no handles
        for leaf in tree_leaves(output) if frame.recorded else ():
            if isinstance(leaf, Tensor) and leaf.requires_grad and type(leaf) is not PendingLogits:
                leaf.register_hook(functools.partial(weakly(self._enter_backward), kept))  # type: ignore[no-untyped-call]

    @staticmethod
    def _end_frame(frame: Frame) -> None:
        if frame.served is not None:
            frame.served.in_use -= 1
        for each in frame.reach.inside:
            each.covered -= 1
        if frame.contexts is not None:
            frame.contexts.close()

    @contextmanager
    def _running(self, module: nn.Module) -> Iterator[None]:
        """Run ``module`` as a part of the pass that runs, or that ran last; see [Note: logits in slices]."""
        if in_backward():
            yield  # recomputed: its calls say what they use
            return
        frame, outside = Frame(module, [], leaf=True), self._outside
        with UninterruptedExit() as stack:
            with uninterrupted:
                stack.callback(self._end_run, frame)
                if not self.stack:
                    frame.inference = not torch.is_grad_enabled()
                    if outside.units or outside.goes_on != frame.inference:
                        self.release_unscoped_units()
                        if frame.inference:
                            self.prefetcher.begin_inference(visit=True)
                    if not (frame.inference or self._plain):
                        hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
                        stack.enter_context(hooks)
                self.stack.append(frame)
                for unit in self.units.holding(filter(self.units.find, module.parameters())):
                    self._use(unit, frame)  # tiles are used one by one
            yield

    def _end_run(self, frame: Frame) -> None:
        if any(each is frame for each in self.stack):
            self._unwind(frame, None)
        self._end_outside()
        for each in self.stack:
            each.pending = False  # the first read is over

    def unit_of(self, tensor: Tensor) -> Unit | None:
        return self.prefetcher.mover.attached.get(tensor.untyped_storage().data_ptr())

    def pack(self, tensor: Any) -> Any:
        if is_divided(tensor):
            return tensor._spec, self.pack(tensor._local_tensor)
        tensor = arrived(tensor)
        unit = self.unit_of(tensor)
        if unit is None:
            if self.activations.policy == "keep":
                return KeptTensor(tensor)
            with uninterrupted:
                return self.activations.cache.pack(tensor)
        if (profiler := self.activations.cache.profiler) is not None:
            profiler.saves()
        return Handle(
            unit, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride(), unit.updates
        )

    def unpack(self, packed: Any) -> Any:
        if type(packed) is tuple:  # a DTensor
            return joined(self.unpack(packed[1]), packed[0])
        if not isinstance(packed, Handle):
            if self.activations.policy == "keep":
                return packed.check()
            with uninterrupted:
                return self.activations.cache.unpack(packed)
        unit = packed.unit
        if unit.updates != packed.updates:
            raise StateError(
                f"{unit.name}: its weights were updated after the forward pass whose backward pass runs now. "
                "Call backward() before step(), or run the forward again"
            )
        self._enter_backward()
        if self.prefetcher.streams(unit.index):
            with uninterrupted:
                self._use_in_backward(unit)
        assert unit.flat is not None
        flat = unit.flat if packed.dtype == unit.dtype else unit.flat.view(packed.dtype)
        value = flat.as_strided(packed.size, packed.stride, packed.offset)
        if torch.is_grad_enabled() and self.prefetcher.streams(unit.index):
            return value.clone()  # create_graph: the new graph saves it where our hooks do not reach
        return value

    def _enter_backward(self, kept: list["Hooks"] | None = None, grad: Tensor | None = None) -> None:
        """Ask autograd, once per backward pass, to call back when it ends; ``kept`` is cleared then."""
        if kept:
            self._graphs.append(kept)
        if self.backward is not None and self.backward() is not None:
            return
        with uninterrupted:
            self._close_ended()  # an evaluation, whose pass would go on
            self._end_outside()
            self.abort_backward()
            end = self._end_backward
            self.backward = weakref.ref(end)
            self.gradients.expect(backward=True)
            torch.autograd.Variable._execution_engine.queue_callback(end)  # which alone holds it

    def _use_in_backward(self, unit: Unit, recomputing: bool = False) -> None:
        leaf = self._uses.leaf_of.get(unit.index, ())
        if not recomputing or leaf is not self._uses.current:
            self._move_to(() if recomputing else leaf)
        if leaf or recomputing:
            for each in leaf or (unit,):
                if self.prefetcher.streams(each.index):
                    self.pins.keep(each.index, running_node(), to_the_end=True)
        elif unit.index not in self.pins.frozen:
            self.pins.keep(unit.index, running_node())
        else:
            node = _SLICES if self.logits.computing else running_node()
            self.pins.keep_for(unit.index, node)

    def _move_to(self, leaf: tuple[Unit, ...]) -> None:
        """Note that backward is in ``leaf`` (empty: in none), and complete the one that it has left."""
        if left := self._uses.leave(leaf):
            self.gradients.complete_together(left)
            for unit in left:  # those that are frozen
                self.pins.unpin(unit.index)

    @uninterrupted
    def _end_backward(self) -> None:
        self._move_to(())
        for leaf, calls in self._uses.calls.items():
            if calls > 1:  # its gradients come at the end
                self.gradients.complete_together(leaf)
        self.gradients.end_backward()
        self._leave_backward()

    def abort_backward(self) -> None:
        """Drop what a failed backward pass left, if one did, so that it is not taken for gradients."""
        if self.backward is None:
            return
        self.gradients.abort_backward()
        self._leave_backward()

    def _leave_backward(self) -> None:
        while self._graphs:
            self._graphs.pop().clear()
        self.backward = None
        self._uses.calls.clear()
        self._uses.current = ()
        self.pins.drop()

    def _expect_gradients(self) -> None:
        self.pins.frozen = {unit.index for unit in self.units if not unit.trainable}
        for unit in self.units:
            for segment in unit.segments[:1]:  # a tile is alone in its unit
                if segment.is_tile and segment.param.requires_grad != segment.whole.requires_grad:
                    segment.param.requires_grad_(segment.whole.requires_grad)  # torch.func refuses the call
        self.gradients.expect()
        self.recorded |= len(self.pins.frozen) < len(self.units)

    @uninterrupted
    def take_gradient(self, param: int, grad: Tensor) -> None:
        """Take the gradient of a parameter, given by its id, from autograd."""
        unit, segment = self.units.place_of(param)
        self._enter_backward()
        self._move_to(self._uses.leaf_of.get(unit.index, ()))
        self.gradients.receive(unit, segment, grad)


def _running_call() -> FrameType | None:
    """Return the Python frame of the module call whose hook runs; None: it was called in another way."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:
        frame = frame.f_back
    return frame


def register_forward_hooks(
    module: nn.Module, enter: Callable[[nn.Module, Any], None], leave: Callable[..., None]
) -> list[RemovableHandle]:
    """Register the forward hooks of one module.

    They are plain functions, which ``copy.deepcopy`` of a module shares; with a bound method it would clone
    the whole runtime.
    """
    outer_enter, outer_leave = untraced(enter), untraced(leave)

    def before(module: nn.Module, args: Any) -> None:
        if not getattr(module._parameters, "covered", 0):  # asked of a copy's own parameters
            outer_enter(module, args)

    def after(module: nn.Module, _: Any, output: Any) -> None:
        if not getattr(module._parameters, "covered", 0):
            outer_leave(module, output)

    for name in ("_forward_pre_hooks", "_forward_hooks"):
        if not getattr(module, name):  # else handles of others know the dictionary
            module.__dict__[name] = ForwardHooks()
    both: Any = [torch.compiler.disable(each, recursive=False) for each in (before, after)]  # type: ignore[no-untyped-call]
    handles = [
        module.register_forward_pre_hook(both[0], prepend=True),
        module.register_forward_hook(both[1], always_call=True),
    ]
    for hooks, handle in zip((module._forward_pre_hooks, module._forward_hooks), handles, strict=True):
        if isinstance(hooks, ForwardHooks):
            hooks.parameters, hooks.own = module._parameters, handle.id
    return handles
