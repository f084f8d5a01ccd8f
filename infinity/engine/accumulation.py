"""Where gradients of a step add up: ``p.grad``, the flat gradient of a unit, the sum over micro-batches.

[Note: where autograd adds]
Autograd leaves a gradient in ``p.grad`` if that is None, and otherwise adds to what is there. So from a
forward pass until its backward has ended each parameter that trains has something there, and no gradient
comes unseen, whatever backward goes through: an :class:`AwaitedGradient`, whose addition is a call of ours.

A call takes as long as a small kernel. So when the first gradient of a unit of small parameters has come, the
others get views of the unit's flat gradient, to which autograd adds without us; the version of a view tells
that it did. One of those that have yet to come, at best the last, stays awaited, so a unit is complete at its
last gradient. The flat gradient begins as -0.0, to which every value is added exactly.

Before a forward pass, and after backward where no gradient came, ``p.grad`` is None: what a backward pass
leaves there that goes through no module (a penalty on weights, say) is taken when the next one ends, or the
step.

[Note: micro-batches]
With one rank a micro-batch adds to the flat gradient in the compute dtype, as ``p.grad`` would. With several
ranks each micro-batch is reduced at once and the shards are summed: full gradients of a model larger than
memory could not be kept. Sums that device memory has no room for leave it until the next micro-batch adds to
them: for NVMe, or beside an accelerator for host memory and from there for NVMe. With one rank they come back
in the order in which they left, one ahead of backward where there is room; with several, beside their unit's
reduction.

One that came ahead has its memory until something else finds no room: backward's thread gives that back, and
no other takes the sum. One that comes for a reduction keeps it: another thread waits for it and adds to it.
"""

import operator
import random
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext

from infinity.core.errors import StateError
from infinity.core.nbytes import Transfer
from infinity.device.accelerator import use_own_stream
from infinity.device.machine import OrderedThreads
from infinity.device.memory import CountingPool, HostPool, Lease, Pool
from infinity.partition.tiles import METADATA
from infinity.partition.unit import Segment, Unit, UnitIndex
from infinity.shards.updates import StoredGradients, Updates

#: Elements that take longer to set to -0.0, and to add to, than a call that copies a gradient.
SMALL_NUMEL = 2**15


#: What ``model.zero_grad(set_to_none=False)`` does to each gradient.
_OF_ZERO_GRAD = "requires_grad_", "zero_"


class ReleasedGradient(torch.Tensor):
    """Stands in for ``p.grad`` while the gradient is in its unit: has its shape; any operation raises."""

    is_spent = False  # by a step, or nothing has come: it may be set to zero

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = getattr(func, "__name__", str(func))
        if name == "__get__":  # of a property, which func is bound to
            name = func.__self__.__name__
        if name == "_has_compatible_shallow_copy_type":  # model.to(...): itself, in its own place
            return True
        with torch._C.DisableTorchFunctionSubclass():
            # Profilers of operators call them again, and torch.compile looks at shapes.
            looked_at = isinstance(func, torch._ops.OpOverload) or name == "untyped_storage"
            if looked_at or name in METADATA or TracingContext.try_get() is not None:
                return func(*args, **(kwargs or {}))
            if name in ("to", "cpu", "cuda", "half", "bfloat16", "float", "double", "empty_like"):
                return args[0]  # model.to(...): the weight itself is moved or refuses the cast
            if name == "__set__" and args[0] is args[1]:
                return None  # the same
            if name in _OF_ZERO_GRAD and args[0].is_spent:
                return args[0]
        raise _kept_in_unit(name)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"ReleasedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


def _kept_in_unit(name: object) -> StateError:
    return StateError(
        f"{name} on a parameter's .grad: the gradient is kept in its unit, sharded. Train with "
        "infinity.AdamW(model, ...), not another optimizer; in a Trainer by infinity.trainer(Trainer). "
        "In place of torch.nn.utils.clip_grad_norm_ give it max_grad_norm, or call "
        "optimizer.clip_grad_norm_(max_norm) before step(); read optimizer.grad_norm after it; see "
        "gradients by infinity.on_gradient(model, fn), or as param.register_hook(fn) gives them; scale the "
        "loss by optimizer.scale(loss)"
    )


def check_placeholder(segment: Segment) -> None:
    """Raise if the gradient of a parameter was dropped or replaced since it was received."""
    grad = segment.whole.grad
    if not isinstance(grad, ReleasedGradient):
        raise StateError(
            f"{segment.name}.grad was {'dropped' if grad is None else 'replaced'} after backward(), but the "
            "gradient itself is in its unit and would be applied. Drop it with optimizer.zero_grad(), not "
            "model.zero_grad(); change it by a hook (param.register_hook), or scale the loss"
        )


class AwaitedGradient(ReleasedGradient):
    """Gives what is added to it to ``arrived``, with the id of its parameter; has no memory."""

    param: int
    arrived: Callable[[int, Tensor], object]

    @classmethod
    def of(cls, grad: Tensor, param: int, arrived: Callable[[int, Tensor], object]) -> "AwaitedGradient":
        """Return one of the shape, dtype and device of ``grad``."""
        made: AwaitedGradient = torch.Tensor._make_wrapper_subclass(
            cls, grad.shape, dtype=grad.dtype, device=grad.device
        )
        made.param, made.arrived, made.is_spent = param, arrived, True
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        awaited = args[0]
        if not isinstance(awaited, cls) or func not in _ADDS:
            raise _kept_in_unit(func)
        awaited.is_spent = False
        with torch._C.DisableTorchFunctionSubclass():
            awaited.arrived(awaited.param, args[1])
            if func is _ADDS[0]:
                return awaited
            summed = cls.of(awaited, awaited.param, awaited.arrived)  # create_graph gives it the sum's graph
            summed.is_spent = False
            return summed


_ADDS = torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor


@dataclass(slots=True)
class Gradient:
    """Holds the gradient of one unit, ``(numel,)``, or of this rank's shard of it, ``(shard_numel,)``."""

    lease: Lease
    dtype: torch.dtype
    used: bytearray  # 1: the segment has a gradient of this step, of a shard on any rank
    open: Tensor | None = None  # of a unit: ``flat``, made once for all its parameters
    sealed: bool = False  # what no gradient reaches is zero

    @classmethod
    def of(cls, unit: Unit, pool: Pool | CountingPool) -> "Gradient":
        """Return an empty one of a whole unit; blocks while updates hold too much memory."""
        lease = pool.lease(unit.nbytes, who=f"gradient of {unit.name}")
        used, values = bytearray(len(unit.segments)), lease.tensor.view(unit.dtype)
        return cls(lease, unit.dtype, used, values)

    @property
    def flat(self) -> Tensor:
        """Return the values, ordered after every earlier use of their buffer."""
        return self.lease.tensor.view(self.dtype)

    def add(self, segment: Segment, grad: Tensor) -> None:
        """Add one parameter's gradient of this backward, as ``p.grad`` would."""
        if grad.is_sparse:
            wanted = "wanted a dense one. Build the embedding with sparse=False"
            raise StateError(f"{segment.name} got a sparse gradient; {wanted}")
        assert self.open is not None
        place = segment.view_of(self.open)
        if self.used[segment.index]:
            place.add_(grad)
        else:
            place.copy_(grad)
            self.used[segment.index] = 1

    def seal(self, segments: Iterable[Segment]) -> None:
        """Set elements that no gradient of the unit's ``segments`` reached to zero (frozen ones, padding)."""
        if self.sealed:
            return
        flat, position = self.flat, 0
        for segment in segments:
            if self.used[segment.index]:
                if position < segment.offset:
                    flat[position : segment.offset].zero_()
                position = segment.stop
        if position < len(flat):
            flat[position:].zero_()


class Accumulation:
    """Says what ``p.grad`` of each parameter is, and which gradients autograd has added to their units.

    With ``all_tell`` each gradient is told of.
    """

    def __init__(self, units: UnitIndex, *, all_tell: bool) -> None:
        self.units, self._all_tell = units, all_tell
        #: Is called with the id of a parameter and its gradient; may not keep the model alive.
        self.arrived: Callable[[int, Tensor], object] = print  # until hooks are there
        self._trained: list[Segment] = []
        self._awaited: dict[int, AwaitedGradient] = {}  # by id of the parameter
        self._known: set[int] = set()  # parameters that had a gradient, which is dense
        self._views: weakref.WeakKeyDictionary[Any, tuple[Unit, dict[int, Tensor]]] = (
            weakref.WeakKeyDictionary()  # of the unit that was last in a buffer
        )
        #: By unit: those whose p.grad is a view, with its version when it was put there.
        self._open: dict[int, list[tuple[Segment, Tensor, int]]] = {}
        self._last: dict[int, int] = {}  # by unit: the parameter whose gradient came last
        self._draw = random.Random(0).randrange

    def look(self) -> None:
        """Find the parameters that train now."""
        self._trained = [segment for unit in self.units for segment in unit.trainable]

    def expect(self, received: Container[int]) -> None:
        """Await a gradient of each parameter that trains, but those of ``received`` that were dropped."""
        for segment in self._trained:
            if segment.param.grad is None and id(segment.param) not in received:
                self._await(segment.param)

    def _await(self, param: Tensor) -> AwaitedGradient:
        awaited = self._awaited.get(id(param))
        if awaited is None or awaited.device != param.device:
            awaited = self._awaited[id(param)] = AwaitedGradient.of(param, id(param), self.arrived)
        param.grad = awaited
        return awaited

    def receive(self, segment: Segment) -> None:
        """Take note that a gradient has come."""
        self._known.add(id(segment.param))
        if segment.is_tile:
            self._await(segment.whole).is_spent = False

    def end(self, received: Container[int]) -> None:
        """Await nothing any more: leave placeholders where the gradient of this step was ``received``."""
        self.close(*self.opened)
        for segment in self._trained:
            if id(segment.param) not in received and isinstance(segment.param.grad, ReleasedGradient):
                segment.param.grad = None

    def spend(self, received: Iterable[Segment]) -> None:
        """Let the placeholders of gradients that a step has used, or dropped, be set to zero."""
        with torch._C.DisableTorchFunctionSubclass():
            for segment in received:
                for param in (segment.param, segment.whole) if segment.is_tile else (segment.param,):
                    if type(grad := param.grad) is AwaitedGradient:
                        if grad.grad_fn is not None:  # of create_graph: it would keep the graphs of all steps
                            grad = self._await(param)
                        grad.is_spent = True

    def unseen(self, received: Container[int]) -> list[tuple[Segment, Tensor]]:
        """Take the gradients that autograd left in ``p.grad``; where one was ``received`` it was replaced."""
        kinds, found = (type(None), AwaitedGradient, ReleasedGradient), list[tuple[Segment, Tensor]]()
        for segment in (each for unit in self.units for each in unit.trainable):  # also since the forward
            grad = segment.param.grad
            if type(grad) not in kinds and id(segment.param) not in received:
                assert grad is not None
                self._await(segment.param).is_spent = False
                found.append((segment, grad))
        return found

    def open(self, unit: Unit, gradient: Gradient, told: Segment) -> None:
        """Let autograd add gradients of a unit of small parameters to its flat one, as one is to be added."""
        small = unit.numel <= SMALL_NUMEL * len(unit.segments)
        if self._all_tell or not small or unit.index in self._open or torch.is_grad_enabled():
            return
        opened = self._open[unit.index] = list[tuple[Segment, Tensor, int]]()
        fresh, flat, buffer = not any(gradient.used), gradient.flat, gradient.lease.buffer
        if fresh:
            flat.fill_(-0.0)
            gradient.sealed = True
        owner, views = self._views.get(buffer, (None, {}))
        if owner is not unit:
            views = {}
            self._views[buffer] = unit, views
        last, known = self._last.get(unit.index, 0), self._known
        with torch._C.DisableTorchFunctionSubclass():
            for segment in unit.trainable:
                param, index = segment.param, segment.index
                if type(param.grad) is not AwaitedGradient or id(param) not in known or index == last:
                    continue
                if segment is told or param._backward_hooks or param._post_accumulate_grad_hooks:
                    continue  # hooks may read p.grad
                if (view := views.get(index)) is None:
                    view = views[index] = segment.view_of(flat).data.as_subclass(ReleasedGradient)
                if not (fresh or gradient.used[index]):
                    view.fill_(-0.0)
                opened.append((segment, view, view._version))
                param.grad = view

    def added(self, unit: Unit) -> list[Segment]:
        """Return the segments of a unit to which autograd has added since this was last asked."""
        opened = self._open.get(unit.index)
        if not opened:
            return []
        came, missing = list[Segment](), list[tuple[Segment, Tensor, int]]()
        with torch._C.DisableTorchFunctionSubclass():
            for each in opened:
                segment, view, version = each
                grad, same = segment.param.grad, view._version == version
                if grad is view and same:
                    missing.append(each)
                    continue
                if grad is not None and type(grad) is not AwaitedGradient:
                    summed = grad is not view and grad.grad_fn is not None
                    if summed:  # by create_graph inside this backward
                        view.copy_(grad.detach())
                    if summed or grad is view:  # else it was replaced, which will be refused
                        self._await(segment.param).is_spent = False
                elif same:  # it was dropped before a gradient came
                    continue
                came.append(segment)
        self._open[unit.index] = missing
        return came

    def watch(self, unit: Unit, missing: int) -> None:
        """Await one of the ``missing`` gradients of a unit, if none is; the last guess was wrong."""
        opened = self._open.get(unit.index)
        if opened and len(opened) == missing:  # drawn, so that no order of gradients needs a call for each
            self._await(opened.pop(self._draw(len(opened)))[0].param)

    def close(self, *units: Unit, last: Segment | None = None) -> None:
        """Await the gradients of units again, of which one was completed by that of ``last``, or none."""
        for unit in units:
            for segment, view, _ in self._open.pop(unit.index, ()):
                if segment.param.grad is view:
                    self._await(segment.param)
            if last is not None:
                self._last[unit.index] = last.index

    @property
    def opened(self) -> list[Unit]:
        return [self.units[index] for index in self._open]


class OffloadThread:
    """Runs what copies gradients off an accelerator, and back, on a thread with a stream of its own.

    ``updates`` hear what is to come, and what went wrong.
    """

    def __init__(self, device: torch.device, updates: Updates) -> None:
        self._updates = updates
        self._threads = OrderedThreads(1, "infinity-gradient", use_own_stream, device)
        #: Order, memory and copy of gradients that wait to leave, as they were or will be complete.
        self._leaving: list[tuple[int, Lease, Callable[[], None]]] = []
        self._ident = 0  # of the thread, once it runs

    def run(self, call: Callable[[], None]) -> Transfer:
        """Run ``call`` there, behind those before it; at once if this is that thread."""
        left = Transfer()
        if threading.get_ident() == self._ident:
            call()
            left.finish()
        else:
            self._updates.announce(left)
            self._threads.submit(self._telling(call, left), 0)
        return left

    def leave(self, call: Callable[[], None], gradient: Lease, left: Transfer, order: int) -> None:
        """Run ``call`` there at its turn, by which a ``gradient`` leaves; ``left`` ends with it.

        What is complete on the accelerator goes first: of that the least order, of the rest what came first.
        """
        self._leaving.append((order, gradient, self._telling(call, left)))
        self._threads.submit(self._leave_next, 1)

    def make_room(self) -> None:
        """Let what waits leave at once, if this is that thread: it is about to wait for their memory."""
        while self._leaving and threading.get_ident() == self._ident:
            self._leave_next()

    def _leave_next(self) -> None:
        if not self._leaving:  # see make_room
            return
        complete = [each for each in self._leaving if each[1].idle] or self._leaving[:1]
        self._leaving.remove(leaving := min(complete, key=operator.itemgetter(0)))
        leaving[-1]()

    def _telling(self, call: Callable[[], None], left: Transfer) -> Callable[[], None]:
        """Return ``call`` that ends ``left``, and tells who waits for memory of its error."""

        def run() -> None:
            self._ident = threading.get_ident()
            try:
                call()
            except BaseException as error:  # a thread that waits for a buffer must hear of it, too
                self._updates.on_failure(error)
                raise

        return partial(left.run, run)

    def close(self) -> None:
        self._threads.close()


@dataclass(slots=True)
class Away:
    """Tracks a sum that has left device memory."""

    dtype: torch.dtype
    used: bytearray
    nbytes: int
    host: Lease | None = None  # None: it is on NVMe
    coming: tuple[Lease, Transfer] | None = None  # device memory, and when it is there


class Sums:
    """Sums of a step's earlier micro-batches, by unit: see [Note: micro-batches].

    ``run`` runs a call where bytes leave ``pool`` for ``host``, beside an accelerator; else both are None.
    """

    def __init__(
        self, pool: CountingPool, host: HostPool | None, stored: StoredGradients,
        run: Callable[[Callable[[], None]], Transfer] | None,
    ) -> None:  # fmt: skip
        self._pool, self._host, self._stored, self._run = pool, host, stored, run
        self.leaving: frozenset[int] = frozenset()  # units whose sums leave device memory
        self.ahead = False  # one may come back while another one leaves
        self.here: dict[int, Gradient] = {}
        self.away: dict[int, Away] = {}  # in the order in which they left
        self._early: Away | None = None  # came ahead; only backward's thread reads it
        self.in_parts: dict[int, Unit] = {}  # units whose gradients of this step came in parts, on any rank
        self.micro = 0  # backward passes of this step that are over
        self.lent: Lease | None = None  # of the queued reduction, until it begins; a part takes its room
        pool.reclaim.append(self._leave_again)

    def __contains__(self, index: int) -> bool:
        return index in self.here or index in self.away

    def put(self, unit: Unit, total: Gradient, *, leaves: bool = False) -> None:
        """Keep a unit's sum until the next micro-batch; it ``leaves`` device memory if it must."""
        if unit.index not in self.leaving and not leaves:
            self.here[unit.index] = total
            return
        away = self.away[unit.index] = Away(total.dtype, total.used, total.lease.nbytes)
        leave = partial(self._leave, unit, total.lease, away)
        leave() if self._run is None else self._run(leave)

    def divide(self, leaving: Iterable[int], units: Sequence[Unit], *, ahead: bool) -> None:
        """Let sums of ``leaving`` units leave from now on, those that are here at once."""
        self.leaving, self.ahead = frozenset(leaving), ahead
        for index in self.leaving & {*self.here}:
            if (total := self.here.pop(index, None)) is not None:
                self.put(units[index], total)

    def take(self, unit: Unit) -> Gradient | None:
        """Return a unit's sum, in device memory, and forget it; blocks until it is there."""
        self.expect(unit)
        away = self.away.get(unit.index)
        if away is None or away.coming is None:
            return self.here.pop(unit.index, None)
        if self._early is away:
            self._early = None
        lease, arrived = away.coming
        arrived.wait()
        del self.away[unit.index]
        if away.host is not None:
            away.host.release()
        return Gradient(lease, away.dtype, away.used)

    def expect(self, unit: Unit) -> None:
        """Begin to bring a unit's sum back, if it is away."""
        away = self.away.get(unit.index)
        if away is not None and away.coming is None:
            self._fetch(unit, away, self._pool.lease(away.nbytes, who=f"gradient of {unit.name}"))

    def expect_next(self, units: Sequence[Unit]) -> None:
        """Begin to bring back the sum that left first, if there is room beside what comes and goes."""
        index, away = next(iter(self.away.items()), (0, None))
        if self.ahead and away is not None and away.coming is None:
            lease = self._pool.try_lease(away.nbytes, who=f"gradient of {units[index].name}")
            if lease is not None:
                self._fetch(units[index], away, lease)
                self._early = away

    def clear(self) -> None:
        for total in self.here.values():
            total.lease.release()
        for away in self.away.values():
            if away.coming is not None:
                lease, arrived = away.coming
                arrived.then(lease.release)
            if away.host is not None:
                away.host.release()
        self.here.clear()
        self.away.clear()
        self.in_parts.clear()
        self.micro = 0
        self._early = None

    def _leave(self, unit: Unit, lease: Lease, away: Away) -> None:
        if self._host is not None:
            host = self._host.lease(away.nbytes, who=f"gradient of {unit.name}")
            host.tensor.copy_(lease.tensor, non_blocking=True)
            host.record_use()
            lease.release()
            if unit.index not in self._stored.chosen:
                away.host = host
                return
            lease = host
        self._stored.write(unit, lease).then(lease.release)

    def _fetch(self, unit: Unit, away: Away, lease: Lease) -> None:
        upload = partial(self._upload, unit, away, lease)
        arrived = self._stored.read(unit, lease) if self._run is None else self._run(upload)
        away.coming = lease, arrived

    def _upload(self, unit: Unit, away: Away, lease: Lease) -> None:
        assert self._host is not None
        host = away.host
        if host is None:
            host = self._host.lease(away.nbytes, who=f"gradient of {unit.name}")
            self._stored.read(unit, host).wait()
        lease.tensor.copy_(host.tensor, non_blocking=True)
        host.record_use()
        lease.record_use()
        if away.host is None:
            host.release()

    def _leave_again(self) -> None:
        """Give back memory of what came ahead of its use: something else finds no room."""
        early, self._early = self._early, None
        if early is not None and early.coming is not None:
            lease, arrived = early.coming
            arrived.wait()
            lease.release()
            early.coming = None
