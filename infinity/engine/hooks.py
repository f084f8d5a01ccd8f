"""Module and autograd hooks: what PyTorch tells us, turned into uses of units.

[Note: handles in place of weights]
Autograd must never hold a unit's buffer. Saved tensors that live in one are packed as a
:class:`Handle`; unpacking gathers the unit if it is not there and views it. So the backward pass
asks for exactly the weights that it reads, and buffers can be reused between forward and backward.

[Note: forwards inside a backward]
Recomputation (either kind of ``torch.utils.checkpoint``) runs modules inside the backward pass,
where checkpoint's own hooks see the saved tensors. Ours stay closed there, and a unit that is used
stays pinned until its gradients are complete. A frozen unit has none. It stays until backward has
passed every call that reads it, which the gradient of the call's input tells; where an input needs no
gradient, or cannot be seen, until backward ends. A unit that is frozen in part has gradients, and what
is frozen in it may be read after the last one, so they are complete when backward ends.

[Note: a leaf on several ranks]
Ranks use different experts. So entering a leaf uses all its units, in the order of the model, and what
happens inside changes nothing. In backward the first weight or gradient of a leaf opens it; the first
of anything else closes it: autograd goes through operators from the latest to the earliest, so it has
left the leaf. Then all its gradients are complete, those of experts that nobody used as zeros. When a
leaf ran several times before one backward, its gradients come at the end, and so does their completion.

[Note: everything else that autograd saves]
goes to the tensor cache, which keeps it, stores it, or lets blocks be recomputed.

[Note: who is outermost]
People call submodules, and run forward twice before one backward. Whichever module is outermost in
a call opens the saved-tensor hooks and closes them.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from infinity.activations.activations import Activations
from infinity.activations.cache import Kept, Saved
from infinity.core.errors import StateError
from infinity.partition.gradients import ReleasedGradient
from infinity.partition.pins import BackwardPins
from infinity.partition.prefetcher import Prefetcher
from infinity.partition.unit import Segment, Unit, placeholder


@dataclass(frozen=True, slots=True)
class Handle:
    """Stands for a view of a unit's flat buffer in autograd's graph."""

    unit: Unit
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    updates: int


@dataclass(slots=True)
class Frame:
    """A module whose forward is running, and the units that it keeps."""

    module: nn.Module
    pinned: list[int]
    opened: ExitStack | None = None  # the saved-tensor context, when this call is outermost
    inference: bool = False
    leaf: bool = False


class GradientSink(Protocol):
    """Where gradients go."""

    def begin_forward(self) -> None: ...
    def receive(self, unit: Unit, segment: Segment, grad: Tensor) -> None: ...
    def complete_together(self, units: Iterable[Unit]) -> None: ...
    def end_backward(self) -> None: ...
    def abort_backward(self) -> None: ...


class Hooks:
    """Connects one model's modules to its prefetcher and to the gradient sink.

    Args:
        prefetcher: Serves uses.
        sink: Takes gradients.
        attached: Units whose flat buffers exist now, by the address of their storage.
        activations: Takes what autograd saves and no unit has.
    """

    def __init__(
        self, prefetcher: Prefetcher, sink: GradientSink, attached: dict[int, Unit], activations: Activations
    ) -> None:
        self.activations = activations
        self.connect(prefetcher, sink, attached)
        self.places: dict[int, tuple[Unit, Segment]] = {}
        self.stack: list[Frame] = []
        self._hooked: set[int] = set()
        self._in_backward = False
        self._loose_pins: list[int] = []  # units touched outside any forward
        self._taken: dict[int, Segment] = {}  # whose gradient of this step the sink has, by id
        self._leaves: Mapping[nn.Module, tuple[Unit, ...]] = {}
        self._leaf_of: dict[int, tuple[Unit, ...]] = {}  # by index of the unit
        self._reads: Counter[int] = Counter()  # calls that read a frozen unit and wait for their backward
        self._leaf_calls: Counter[tuple[Unit, ...]] = Counter()  # since the last backward
        self._leaf: tuple[Unit, ...] = ()  # that backward is in

    def connect(self, prefetcher: Prefetcher, sink: GradientSink, attached: dict[int, Unit]) -> None:
        """Between steps: from now on these serve the model."""
        self.prefetcher, self.sink, self.attached = prefetcher, sink, attached
        self.pins = BackwardPins(prefetcher)

    def learn(self, units: list[Unit], leaves: Mapping[nn.Module, tuple[Unit, ...]]) -> None:
        """Where each parameter is, and which units are gathered as one."""
        self.places = {id(s.param): (unit, s) for unit in units for s in unit.segments}
        self._leaves = leaves
        self._leaf_of = {unit.index: leaf for leaf in leaves.values() for unit in leaf}

    def completes(self, unit: Unit) -> bool:
        """Whether the unit's gradients are complete, and its weights unread, after the last one of them."""
        frozen_in_part = len(unit.trainable) < len(unit.segments)
        recomputed = self.pins.recomputed(unit.index)
        return unit.index not in self._leaf_of and not (recomputed and frozen_in_part)

    # --- forward -----------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: Any = ()) -> None:
        """Before ``module.forward(*args)``."""
        frame = Frame(module, [])
        if torch._C._current_graph_task_id() != -1:
            self._enter_backward()
        elif not self.stack:
            self._open(frame)
        self.stack.append(frame)
        if module in self._leaves:
            self._enter_leaf(self._leaves[module], frame)
        for param in module._parameters.values():
            place = self.places.get(id(param))
            if place is not None:
                self._use(place[0], frame)
                place[0].check_attached(place[1])
                if not place[0].trainable and torch.is_grad_enabled():
                    self._watch(place[0].index, args)

    def _watch(self, index: int, args: Any) -> None:
        """Learn when backward has passed a call that reads a frozen unit."""
        if self._reads[index] and torch._C._current_graph_task_id() != -1:
            return  # recomputed: the graph of the first forward is the one that backward goes through
        for value in args:
            if isinstance(value, Tensor) and value.requires_grad:
                self._reads[index] += 1
                value.register_hook(functools.partial(self._passed, index))  # type: ignore[no-untyped-call]

    def _passed(self, index: int, grad: Tensor) -> None:
        if self._reads[index]:
            self._reads[index] -= 1
            if not self._reads[index]:
                self.pins.unpin(index)

    def _enter_leaf(self, leaf: tuple[Unit, ...], frame: Frame) -> None:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._leaf_calls[leaf] += 1
        for unit in leaf:
            self._use(unit, frame)
        frame.leaf = True

    def leave(self, module: nn.Module, output: Any) -> None:
        """After ``module.forward``, also when it raised (then ``output`` is None)."""
        if not any(frame.module is module for frame in self.stack):
            return
        while (frame := self.stack.pop()).module is not module:
            self._close(frame, None)  # a forward that was left without its hook (Ctrl-C)
        self._close(frame, output)

    def touch(self, param: nn.Parameter) -> None:
        """Somebody asked a module for ``param`` by name."""
        place = self.places.get(id(param))
        if place is None:
            return
        unit, segment = place
        if self.streams(unit):
            self._touch(unit)
        unit.check_attached(segment)

    def _touch(self, unit: Unit) -> None:
        if self.stack:
            self._use(unit, self.stack[-1])
        elif torch._C._current_graph_task_id() != -1:
            self._use_in_backward(unit)
        elif unit.index not in self._loose_pins:
            if not self.prefetcher.holds([*self._loose_pins, unit.index]):
                self.let_go()  # print(model) asks for every bias
            self.prefetcher.begin_visit()
            self.prefetcher.use(unit.index)
            self._loose_pins.append(unit.index)

    def let_go(self) -> None:
        """Units that were touched outside any forward need not stay."""
        if self._loose_pins:
            loose, self._loose_pins = self._loose_pins, []
            for index in loose:
                self.prefetcher.unpin(index)
            self.prefetcher.end_inference()

    def _use(self, unit: Unit, frame: Frame) -> None:
        if not self.streams(unit) or unit.index in frame.pinned:
            return
        if torch._C._current_graph_task_id() != -1:  # see [Note: forwards inside a backward]
            self._use_in_backward(unit, recomputing=True)
            return
        if unit.index in self._leaf_of and any(f.leaf and unit.index in f.pinned for f in self.stack):
            return
        self.prefetcher.use(unit.index)
        frame.pinned.append(unit.index)

    def streams(self, unit: Unit) -> bool:
        """Whether the unit's full values come and go; the others are always there."""
        return unit.index in self.prefetcher.nbytes

    def _open(self, frame: Frame) -> None:
        self.let_go()
        if self._in_backward:
            self._abort_backward()
        if not torch.is_grad_enabled():
            frame.inference = True
            self.prefetcher.begin_inference()
            return
        self._hook_parameters()
        self.sink.begin_forward()
        frame.opened = self.activations.open(frame.module)
        frame.opened.enter_context(torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack))

    def _close(self, frame: Frame, output: Any) -> None:
        for index in frame.pinned:
            self.prefetcher.unpin(index)
        if frame.inference:
            self.prefetcher.end_inference()
        if frame.opened is not None:
            frame.opened.close()
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._enter_backward)  # type: ignore[no-untyped-call]

    # --- saved tensors -----------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Handle | Kept | Saved:
        unit = self.attached.get(tensor.untyped_storage().data_ptr())
        if unit is None:
            return self.activations.cache.pack(tensor)
        return Handle(
            unit, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride(), unit.updates
        )

    def unpack(self, packed: Handle | Kept | Saved) -> Tensor:
        if not isinstance(packed, Handle):
            return self.activations.cache.unpack(packed)
        unit = packed.unit
        if unit.updates != packed.updates:
            raise StateError(
                f"{unit.name}: its weights were updated after the forward pass whose backward pass runs "
                "now. Call backward() before step(), or run the forward again"
            )
        self._enter_backward()
        if self.streams(unit):
            self._use_in_backward(unit)
        assert unit.flat is not None
        value = unit.flat.view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)
        if torch.is_grad_enabled() and self.streams(unit):
            return value.clone()  # create_graph: the new graph saves it where our hooks do not reach
        return value

    # --- backward ----------------------------------------------------------------------------

    def _enter_backward(self, grad: Tensor | None = None) -> None:
        """A backward pass runs: its end must reach us, whatever it began with."""
        if not self._in_backward:
            self._in_backward = True
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)

    def _use_in_backward(self, unit: Unit, recomputing: bool = False) -> None:
        leaf = self._leaf_of.get(unit.index, ())
        if not recomputing or leaf is not self._leaf:
            self._move_to(() if recomputing else leaf)
        if leaf:
            for each in leaf:
                if self.streams(each):
                    self.pins.keep(each.index, None)
        elif recomputing:
            self.pins.keep(unit.index, None)
        elif unit.trainable:
            self.pins.keep(unit.index, torch._C._current_autograd_node())
        else:
            self.pins.keep_for(torch._C._current_autograd_node(), unit.index)

    def _move_to(self, leaf: tuple[Unit, ...]) -> None:
        """Backward is in ``leaf`` (or in none), and has left the one before."""
        if leaf is self._leaf:
            return
        left, self._leaf = self._leaf, leaf
        if left and self._leaf_calls[left] <= 1:
            self.sink.complete_together(left)
            for unit in left:  # those that are frozen
                self.pins.unpin(unit.index)

    def _end_backward(self) -> None:
        self._move_to(())
        for leaf, calls in self._leaf_calls.items():
            if calls > 1:
                self.sink.complete_together(leaf)
        self.sink.end_backward()
        self._leave_backward()

    def _abort_backward(self) -> None:
        """The last backward pass raised; what it left behind must not be taken for gradients."""
        self.sink.abort_backward()
        self._leave_backward()

    def _leave_backward(self) -> None:
        self._in_backward, self._leaf = False, ()
        self._leaf_calls.clear()
        self.pins.drop()

    # --- parameters --------------------------------------------------------------------------

    def _hook_parameters(self) -> None:
        """Gradient hooks for parameters that became trainable."""
        for key, (unit, segment) in self.places.items():
            if key not in self._hooked and segment.param.requires_grad:
                self._hooked.add(key)
                segment.param.register_hook(functools.partial(self._drop_placeholder, segment.param))  # type: ignore[no-untyped-call]
                take = functools.partial(self._take_gradient, unit, segment)
                segment.param.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def _drop_placeholder(self, param: nn.Parameter, grad: Tensor) -> None:
        segment = self._taken.get(id(param))
        if segment is not None:
            _check_gradient(segment)
        if type(param.grad) is ReleasedGradient:
            param.grad = None

    def _take_gradient(self, unit: Unit, segment: Segment, param: Tensor) -> None:
        self._enter_backward()
        self._move_to(self._leaf_of.get(unit.index, ()))
        grad = param.grad
        param.grad = placeholder(segment.shape, unit.dtype, param.device).as_subclass(ReleasedGradient)
        if grad is not None:
            self.sink.receive(unit, segment, grad)
            self._taken[id(param)] = segment

    def check_gradients(self) -> None:
        """Nobody dropped or replaced a gradient that this step has taken, or wrote a weight.

        Raises:
            StateError: ``model.zero_grad()``, ``p.grad = ...`` or the like.
        """
        for segment in self._taken.values():
            _check_gradient(segment)
        for unit, segment in self.places.values():
            if unit.flat is not None:
                unit.check_attached(segment)

    def forget_gradients(self) -> None:
        """The step is over, or forgotten."""
        self._taken.clear()


def _check_gradient(segment: Segment) -> None:
    grad = segment.param.grad
    if type(grad) is not ReleasedGradient:
        raise StateError(
            f"{segment.name}.grad was {'dropped' if grad is None else 'replaced'} after backward(), but the "
            "gradient itself is kept in its unit and would be applied. To drop the gradients call "
            "optimizer.zero_grad(), not model.zero_grad(); to change them, use hooks of tensors "
            "(param.register_hook) or scale the loss"
        )


def dress(module: nn.Module, enter: Callable[[nn.Module, Any], None], leave: Callable[..., None]) -> None:
    """Register the forward hooks of one module.

    They are plain functions: ``copy.deepcopy`` of a module shares functions and would clone the
    whole runtime through a bound method.
    """

    def before(module: nn.Module, args: Any) -> None:
        enter(module, args)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        leave(module, output)

    module.register_forward_pre_hook(torch.compiler.disable(before), prepend=True)  # type: ignore[no-untyped-call]
    module.register_forward_hook(torch.compiler.disable(after), always_call=True)  # type: ignore[no-untyped-call]
