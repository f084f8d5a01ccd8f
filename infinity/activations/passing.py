"""Hold what blocks return for all micro-batches, and the gradients of that, until they are used.

[Note: tickets]
Autograd must not hold the memory of what waits between two blocks (:mod:`infinity.planner.passing`). So a
value that a block returned departs: in its place autograd sees a ticket, one element without meaning. The
value arrives where the next block takes it, in forward and again when backward recomputes that block. A
gradient that comes to an arrival waits likewise. The ticket's gradient, which means nothing either, takes
autograd on to the departure, which returns what has waited. Autograd runs the newest nodes first: so the
gradients of all micro-batches wait before the first is taken, as their values did in forward.

[Note: who holds what]
After backward a loss that is still referred to holds all nodes, but not what these have saved. So nodes refer
to gradients only, which are gone when they are taken; what recomputes the block that takes them holds values.
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from infinity.activations import tensor_cache
from infinity.activations.profiler import is_plain
from infinity.activations.recompute import in_backward, node
from infinity.activations.tensor_cache import Slot, SlotHandle, TensorCache
from infinity.core.plan import Place, SlotKey
from infinity.core.process import uninterrupted
from infinity.planner.passing import PassingPlan, Rooms, plan_passing

#: The training thread waits while more bytes than those of this many micro-batches wait to be stored.
_BACKLOG = 2


class Passing:
    """Keeps or stores values between ``blocks``, each of which takes all ``slices`` before the next.

    ``rooms`` is asked when the first block has returned its first value, and when a larger one comes: the
    plan made then stays for later steps, also if their values are smaller. Called by the training thread.
    """

    plan: PassingPlan | None = None  # None: nothing has been returned yet

    def __init__(self, cache: TensorCache, blocks: int, slices: int, rooms: Callable[[], Rooms]) -> None:
        self.cache, self._blocks, self._slices, self._rooms = cache, blocks, slices, rooms
        self.numbers = itertools.count()
        #: By number, in the order of departure: forward comes to values in this order, backward in reverse.
        self.values: weakref.WeakValueDictionary[int, Passed] = weakref.WeakValueDictionary()
        self.gradients: weakref.WeakValueDictionary[int, Gradients] = weakref.WeakValueDictionary()

    def over(self, blocks: int, slices: int) -> "Passing":
        """Return one of the same room between so many blocks."""
        return Passing(self.cache, blocks, slices, self._rooms)

    def depart(self, tree: Any, rows: int, block: int, index: int) -> Any:
        """Return what a block returned for micro-batch ``index``, with a :class:`Passed` for each value.

        Those are tensors with so many ``rows``. All else passes as it is; without gradients everything does.
        """
        if not torch.is_grad_enabled():
            return tree
        leaves, spec = tree_flatten(tree)
        going = [place for place, leaf in enumerate(leaves) if self._takes(leaf, rows)]
        nbytes = sum(leaves[place].nbytes for place in going)
        if self.plan is None or nbytes > self.plan.nbytes:
            self.plan = plan_passing(self._blocks, self._slices, nbytes, self._rooms())
        for place in going:
            leaves[place] = Passed(self, leaves[place], block, index, width=len(going))
        return tree_unflatten(leaves, spec)

    def _takes(self, leaf: Any, rows: int) -> bool:
        return (
            isinstance(leaf, Tensor)
            and is_plain(leaf)
            and leaf.shape[:1] == (rows,)
            and leaf.is_floating_point()
            and leaf.device == self.cache.device
        )

    @uninterrupted
    def put(self, tensor: Tensor, key: SlotKey, place: Place) -> SlotHandle:
        """Keep or begin to store ``tensor``, never written again; DiskError: no room, or a store failed."""
        cache, tensor = self.cache, tensor.detach()
        if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone(memory_format=torch.contiguous_format)  # with nothing else in its storage
        cache.stats.free_dropped()
        slot = Slot(key, tensor.untyped_storage(), tensor._version, cache.stats)
        handle = SlotHandle(slot, None, tensor)
        if place is not Place.KEEP and slot.nbytes >= tensor_cache.LEAST_NBYTES:
            cache.queue.put(slot, cache.stores[place])
            assert self.plan is not None
            most_nbytes = _BACKLOG * self.plan.nbytes
            if cache.queue.nbytes > most_nbytes:
                cache.wait_for(lambda: cache.queue.wait_below(most_nbytes))
        return handle

    @uninterrupted
    def get(self, handle: SlotHandle) -> Tensor:
        """Return the tensor, and forget it if it can be loaded again; DiskError: it could not be read."""
        cache, slot = self.cache, handle.slot
        cache.stats.free_dropped()
        cache.queue.check()
        handle.check()
        slot.fetch()
        tensor = handle.view(*slot.read(cache.wait_for))
        slot.drop()
        return tensor

    @uninterrupted
    def expect(self, handle: SlotHandle, *, last: bool) -> bool:
        """Begin to load what is used next, if ``last`` for the last time, and return whether it was away."""
        if last:
            self.cache.queue.cancel(handle.slot)
        return handle.slot.fetch()


class Gradients:
    """Holds the gradients of a value between the blocks that took it and the one that returned it.

    Those that stay in device memory are added up as they come; of those that leave each waits by itself, one
    for every block that took the value.
    """

    def __init__(self, passing: Passing, key: SlotKey, place: Place, number: int, width: int) -> None:
        self._passing, self._key, self._place = passing, key, place
        self._next = number - width
        self._pass = -1  # the backward pass that they are of: one that failed may have left some
        self._waiting: list[SlotHandle] = []
        passing.gradients[number] = self

    def add(self, grad: Tensor) -> Tensor:
        """Keep a gradient until backward reaches the value; return the gradient of the ticket, a zero."""
        running = torch._C._current_graph_task_id()
        if running != self._pass:
            self._pass, self._waiting = running, []
        if self._waiting and self._place is Place.KEEP:
            grad = self._passing.get(self._waiting.pop()) + grad
        self._waiting.append(self._passing.put(grad, self._key, self._place))
        return grad.new_zeros(())

    def expect(self) -> int:
        """Begin to load those that are away, and return their number."""
        return sum(self._passing.expect(each, last=True) for each in self._waiting)

    def take(self, _: Tensor) -> Tensor:
        """Return the sum, in the order in which they came, as autograd adds; begin to load the next ones."""
        self._passing.cache.stats.on_demand += self.expect()
        if (following := self._passing.gradients.get(self._next)) is not None:
            following.expect()
        waiting, self._waiting = self._waiting, []
        total = self._passing.get(waiting.pop(0))
        while waiting:
            total = total + self._passing.get(waiting.pop(0))
        return total


class Passed:
    """Stands for what ``block`` returned for micro-batch ``index``; see [Note: tickets].

    ``ticket`` is autograd's, ``()``. A block returns ``width`` of them for each micro-batch, so that the next
    micro-batch's is so many further.
    """

    def __init__(self, passing: Passing, value: Tensor, block: int, index: int, width: int) -> None:
        plan, key = passing.plan, SlotKey(2 * block + 1, index)
        assert plan is not None
        self.shape, self.dtype, self.device = value.shape, value.dtype, value.device
        self._passing, self._number, self._width = passing, next(passing.numbers), width
        self._gradients = Gradients(passing, key, plan.gradient(index), self._number, width)
        self._value = passing.put(value, key, plan.value(block * plan.slices + index))
        if plan.is_held(index):
            passing.expect(self._value, last=False)
        self.ticket = node(lambda: value.new_empty(()), self._gradients.take, value)
        self.requires_grad = self.ticket.requires_grad
        passing.values[self._number] = self

    def arrive(self, ticket: Tensor) -> Tensor:
        """Return the value, whose gradient goes to ``ticket``: this one's, or that of a recomputation."""
        return node(self._take, self._gradients.add, ticket)

    def _take(self) -> Tensor:
        """Return the value, and begin to load the one that is used next."""
        passing, backward = self._passing, in_backward()
        passing.cache.stats.on_demand += passing.expect(self._value, last=backward)
        following = passing.values.get(self._number + (-self._width if backward else self._width))
        if following is not None:
            passing.expect(following._value, last=backward)
        return passing.get(self._value)
