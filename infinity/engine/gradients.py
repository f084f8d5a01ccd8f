"""Gradients on their way from autograd to the updates: collected by unit, reduced over ranks, handed over.

[Note: when gradients are complete]
When every trainable parameter of the unit has fired, or when the backward pass ends. Then the unit's weights
have no reader left in this step and go to the update with the gradient.

[Note: parameters without a gradient]
A parameter that no backward pass of this step reached, on any rank, is left alone, as one whose ``grad`` is
None is by torch's optimizers: its weight, its moments and its step count stay. A unit without any other
has no update. Where another rank used the parameter, its gradient here counts as zero.

[Note: micro-batches]
With one rank a micro-batch adds to the flat gradient, in the compute dtype, as ``p.grad`` would.
With several ranks each micro-batch is reduced at once and its shard is added up: full gradients of
a model larger than memory could not be kept.

[Note: gradients that pass]
Without an accelerator a unit is reduced while the next one computes, and not later: the training thread waits
for the reduction before, and for the last one of a micro-batch when the next backward pass begins. And memory
of a complete gradient, and of its reduction, is given back when the next gradient has begun, or backward has
ended, however soon it is read. So what gradients take does not hang on how long collectives, drives and
updates need, and is what :mod:`infinity.planner.clock` says. On an accelerator streams order reductions, and
their memory is lent again as soon as they were issued.

Source: FSDP2 (torch.distributed.fsdp), which waits for a reduce-scatter before it starts the next.

[Note: gradients leave an accelerator]
The hook only gives the stream of the backward pass its work. After that, or after the reduction, a thread
with a stream of its own copies the gradient to host memory and takes its norm, while backward goes on; it
waits for both, and hands the gradient over. The lease carries the order from stream to stream. The norm
has a stream of its own, so that the copy does not wait for it: the bus is what is short.

The gradient of a unit that is updated on the accelerator stays there, and nothing waits until ``step()``: the
hook, or the thread of collectives, gives the norm's stream its work, too, and ``step()`` reads all norms at
once. Another thread would need the interpreter's lock from the one that computes, and get it every 5 ms.
"""

import functools
import operator
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._guards import TracingContext

from infinity.comm.collectives import Collectives
from infinity.core.budget import HostBudget, rounded
from infinity.core.errors import StateError
from infinity.core.lifecycle import Tier
from infinity.core.transfer import Lease, Pool, Transfer
from infinity.device.accelerator import new_stream, on_stream, use_own_stream
from infinity.device.memory import HostPool
from infinity.observe.stalls import CountingPool
from infinity.optim.norm import norm_on_device, sum_of_squares
from infinity.partition.mover import UnitMover
from infinity.partition.pins import BackwardPins
from infinity.partition.prefetcher import Prefetcher
from infinity.partition.unit import Segment, Unit, UnitIndex, placeholder
from infinity.shards.updates import Updates, Weights


class UnitGradient:
    """The flat gradient of one unit, ``(numel,)`` in the compute dtype.

    Lives from the first gradient of a step until its reduction or update; micro-batches add to it
    in the compute dtype and in order, exactly as ``p.grad`` would.
    """

    def __init__(self, unit: Unit, lease: Lease) -> None:
        self.unit, self.lease = unit, lease
        self.flat: Tensor = lease.tensor.view(unit.dtype)
        self.used = bytearray(len(unit.segments))  # 1: the segment holds a gradient of this step
        self.trainable = len(unit.trainable)  # parameters that fire in this backward
        self._fired: set[int] = set()  # indices of segments that fired in it

    @classmethod
    def begin(cls, unit: Unit, pool: Pool) -> "UnitGradient":
        """Lease memory for a unit's gradient; block while updates hold too much."""
        return cls(unit, pool.lease(unit.nbytes, who=f"gradient of {unit.name}"))

    def add(self, segment: Segment, grad: Tensor) -> None:
        """Take in one parameter's gradient of this backward."""
        if grad.is_sparse:
            raise StateError(
                f"{segment.name} got a sparse gradient; wanted a dense one. Build the embedding "
                "with sparse=False"
            )
        place = self.flat.narrow(0, segment.offset, segment.numel).view(segment.shape)
        if self.used[segment.index]:
            place.add_(grad)
        else:
            place.copy_(grad)
            self.used[segment.index] = 1
        self._fired.add(segment.index)

    @property
    def complete(self) -> bool:
        """Whether every trainable parameter has fired in this backward."""
        return len(self._fired) == self.trainable

    def end_backward(self) -> None:
        """Expect another micro-batch."""
        self._fired.clear()
        self.trainable = len(self.unit.trainable)

    def seal(self) -> Tensor:
        """Set elements that no gradient reached (unused, frozen, padding) to zero; return the flat buffer."""
        position = 0
        for segment in self.unit.segments:
            if self.used[segment.index]:
                if position < segment.offset:
                    self.flat[position : segment.offset].zero_()
                position = segment.stop
        if position < self.unit.numel:
            self.flat[position:].zero_()
        return self.flat


#: What may be asked of a released gradient: nothing that depends on its values.
_SHAPES = frozenset(
    [
        "shape",
        "size",
        "dim",
        "ndim",
        "numel",
        "nelement",
        "stride",
        "dtype",
        "device",
        "layout",
        "element_size",
        "itemsize",
        "is_floating_point",
        "is_complex",
        "is_sparse",
        "is_sparse_csr",
        "is_quantized",
        "is_nested",
        "is_meta",
        "is_cpu",
        "is_cuda",
        "is_mkldnn",
        "is_mps",
        "is_xla",
        "is_leaf",
        "is_contiguous",
        "_has_compatible_shallow_copy_type",
        "is_inference",
        "is_conj",
        "is_neg",
        "requires_grad",
        "grad_fn",
        "get_device",
        "storage_offset",
        "names",
        "has_names",
        "_is_view",
        "__repr__",
        "__hash__",
        "__len__",
    ]
)


class ReleasedGradient(torch.Tensor):
    """Stands for ``p.grad`` while the gradient is in its unit: it has the shape, and no values.

    Any operation on it raises, in place of giving NaN or doing nothing.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = getattr(func, "__name__", str(func))
        if name == "__get__":  # of a property, which func is bound to
            name = func.__self__.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name in _SHAPES or TracingContext.try_get() is not None:  # torch.compile looks at shapes
                return func(*args, **(kwargs or {}))
            if name in ("to", "cpu", "cuda", "half", "bfloat16", "float", "double", "empty_like"):
                return args[0]  # model.to(...): the weight itself is moved or refuses the cast
            if name == "__set__" and args[0] is args[1]:
                return None  # the same
        raise StateError(
            f"{name} on a parameter's .grad: the gradient is kept in its unit, sharded, and is not here. "
            "Train with infinity.AdamW(model, ...), not another optimizer; clip with its max_grad_norm, read "
            "optimizer.grad_norm after step(), and scale the loss in place of gradients (with Accelerate, "
            "the Trainer or Lightning as in examples/)"
        )

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def of(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> "ReleasedGradient":
        """Return the one of this shape: parameters may share it, since nothing can be read or written."""
        with torch.inference_mode(False):
            return placeholder(shape, dtype, device).as_subclass(ReleasedGradient)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"ReleasedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


@dataclass(slots=True)
class ReducedGradient:
    """The gradient of one shard, added up over micro-batches; ``used`` on any rank, by segment."""

    lease: Lease
    dtype: torch.dtype
    used: bytes

    @property
    def grad(self) -> Tensor:
        """``(shard_numel,)``, after what was done with it until now."""
        grad: Tensor = self.lease.tensor.view(self.dtype)
        return grad


class HostPools(NamedTuple):
    """Pinned host memory beside an accelerator: see :class:`infinity.core.budget.HostBudget`."""

    gradients: HostPool
    weights: HostPool
    staging: HostPool

    @classmethod
    def make(cls, device: torch.device) -> "HostPools":
        """Pools without room."""
        return cls(*(HostPool(0, device=device) for _ in cls._fields))

    def resize(self, division: HostBudget) -> None:
        """Give each its part."""
        for pool, nbytes in zip(self, (division.gradients, division.weights, division.staging), strict=True):
            pool.resize(nbytes)


class Gradients:
    """The gradients of one model's step on this rank.

    It has more attributes than other classes: the parts that a gradient goes through, and one table for each
    stage of its way.

    Args:
        units: All of the model's.
        leaves: Indices of units that are reduced when backward leaves their module.
        prefetcher: Serves uses of units.
        pins: Units that backward keeps.
        mover: Has the weights.
        updates: Gets complete shards.
        pool: Memory of gradients (the device tier).
        host: Pinned host memory, only with an accelerator.
        collectives: None with one rank.
        reduce_dtype: Dtype of the gradient reduction.

    Attributes:
        hold_weights: Keep a unit's weights for its update, in place of reading them again.
        syncing: False under ``no_sync``: backward completes no gradients.
        synced: A backward pass has completed the gradients of this step.
    """

    def __init__(
        self, units: UnitIndex, leaves: frozenset[int], prefetcher: Prefetcher, pins: BackwardPins,
        mover: UnitMover, updates: Updates, pool: CountingPool, host: HostPools | None,
        collectives: Collectives | None, reduce_dtype: torch.dtype, *, hold_weights: bool,
    ) -> None:  # fmt: skip
        self.units, self._leaves, self.prefetcher, self.pins = units, leaves, prefetcher, pins
        self.mover, self.updates, self.pool, self.host = mover, updates, pool, host
        self.collectives, self.reduce_dtype = collectives, reduce_dtype
        self.hold_weights = hold_weights
        self.syncing, self.synced = True, False
        self._received: dict[int, Segment] = {}  # by id of the parameter, whose .grad is a placeholder
        self._open: dict[int, UnitGradient] = {}
        self._shards: dict[int, ReducedGradient] = {}
        self._reducing: Transfer | None = None  # the last reduction, where the next one waits for it
        self._delivered: set[int] = set()
        self._passed: set[int] = set()  # units that are complete in this backward pass
        self._fired = self._accumulated = False
        self._beside_nbytes: int | None = None  # on several ranks, the same in a whole backward pass
        self._leaving: ThreadPoolExecutor | None = None
        self._norms: torch.Stream | None = None
        self._unread: dict[int, Tensor] = {}  # norms of gradients that stay on the accelerator
        if mover.staging is not None:
            self._norms = new_stream(mover.staging.device)
            self._leaving = ThreadPoolExecutor(
                1, "infinity-gradient", use_own_stream, (mover.staging.device,)
            )

    @property
    def received(self) -> bool:
        """Whether a backward pass of this step gave gradients."""
        return bool(self._received)

    # --- what hooks call ---------------------------------------------------------------------

    def receive(self, unit: Unit, segment: Segment, grad: Tensor) -> None:
        """Take in one parameter's gradient of this backward pass.

        Raises:
            StateError: The gradients of this step are complete already.
        """
        if self.synced:
            raise StateError(
                "a second backward() before step(). To accumulate micro-batches, run every backward() but "
                "the last inside `with infinity.no_sync(model):`; to drop the first one's gradients, call "
                "optimizer.zero_grad()"
            )
        self._fired = True
        if unit.index in self._delivered:
            raise StateError(
                f"{segment.name} got a gradient after its unit's gradients were complete. Where several "
                "calls share a weight, torch.utils.checkpoint recomputes them with use_reentrant=False (else "
                "each has a backward pass of its own); and what is gathered as one (partition.leaf) is used "
                "inside its module only"
            )
        gradient = self._open.get(unit.index)
        if gradient is None:
            gradient = self._begin(unit)
        gradient.add(segment, grad)
        self._received[id(segment.param)] = segment
        if gradient.complete and self._completes(unit, gradient):
            self._complete(unit)

    def _completes(self, unit: Unit, gradient: UnitGradient) -> bool:
        """Whether the last gradient of ``unit`` also is the last read of its weights."""
        frozen_in_part = gradient.trainable < len(unit.segments)
        return unit.index not in self._leaves and not (frozen_in_part and self.pins.recomputed(unit.index))

    def received_from(self, param: nn.Parameter) -> bool:
        """Whether a gradient was received from ``param`` in this step."""
        return id(param) in self._received

    def check_received(self, param: nn.Parameter) -> None:
        """Raise if a gradient that was received from ``param`` in this step was dropped or replaced."""
        segment = self._received.get(id(param))
        if segment is not None:
            _check_placeholder(segment)

    def check(self) -> None:
        """Raise if a received gradient was dropped or replaced, or a weight written.

        Raises:
            StateError: ``model.zero_grad()``, ``p.grad = ...``, ``p.data = ...`` or the like.
        """
        for segment in self._received.values():
            _check_placeholder(segment)
        for unit in self.units:
            if unit.flat is not None:
                unit.check_all_attached()

    def complete_together(self, units: Iterable[Unit]) -> None:
        """Complete the gradients of these units, whatever has not fired."""
        for unit in units if self._fired else ():  # torch.autograd.grad accumulates nothing
            if unit.trainable and unit.index not in self._delivered:
                self._complete(unit)

    def _begin(self, unit: Unit) -> UnitGradient:
        if self._reducing is not None and not self._passed:  # the last one of the micro-batch before
            self.mover.waits("collective", self._reducing.wait)
            self._reducing = None
        self._share_window(unit)
        gradient = self._open[unit.index] = UnitGradient.begin(unit, self.pool)
        self.pool.give_back()
        return gradient

    def _share_window(self, *beginning: Unit) -> None:
        """Take from the window what open gradients need beyond the room that budgets have for them.

        There is room for one that is open and one on its way to its update. More are open at one time where
        units have parameters of modules that run inside each other. Several ranks decide alike, since they
        begin and complete the same units; those of leaves, where they differ, have room of their own.
        """
        several, lent = self.collectives is not None, self.prefetcher.residents.borrowed_nbytes
        opened = [*beginning, *(each.unit for each in self._open.values())]
        if several:
            opened = [unit for unit in opened if unit.index not in self._leaves]
        if len(opened) < (2 if several else 3) and not lent:
            return
        beside = self._beside_open_nbytes()
        if beside is None:
            return
        room = self.pool.capacity_nbytes - self.prefetcher.residents.capacity_nbytes
        beyond = max(0, beside + sum(rounded(unit.nbytes) for unit in opened) - room)
        self.prefetcher.lend(beyond)
        if beyond > lent:
            self.pins.shrink()
            self.prefetcher.lend(beyond)

    def _beside_open_nbytes(self) -> int | None:
        """Return what gradients may take beside those that are open (bytes); None: there is room for all."""
        updates, spilled = self.updates, self.updates.stored_gradients.chosen
        early = updates.early and not updates.clips  # else they are kept until step
        all_wait = self._accumulated or not self.syncing or not (early or spilled)

        def waits(unit: Unit) -> bool:
            return unit.index not in spilled and (all_wait or not early or unit.home.tier is Tier.HOST)

        if self.collectives is None:
            delivered = (self.units[i] for i in self._delivered)
            return None if all_wait else sum(rounded(unit.nbytes) for unit in delivered if waits(unit))
        if self.host is None and self._beside_nbytes is None:
            trained = [unit for unit in self.units if unit.trainable]
            shards = [unit.shard_numel * self.reduce_dtype.itemsize for unit in trained if waits(unit)]
            reduction = 3 * max(rounded(unit.nbytes) for unit in trained)  # and the weights of an update
            self._beside_nbytes = sum(map(rounded, shards)) + reduction
        return self._beside_nbytes

    def _pass(self, *leases: Lease) -> None:
        """Hold a complete gradient's memory until the next one has begun: see [Note: gradients that pass]."""
        for lease in leases if self.mover.staging is None else ():
            self.pool.hold_back(lease)

    def end_backward(self) -> None:
        """Complete all gradients at the end of a graph, whatever has not fired."""
        if not self._fired:
            return  # torch.autograd.grad: nothing was accumulated
        self._fill_tiles()
        for unit in self.units:
            missing = self.syncing and unit.trainable and unit.index not in self._delivered
            if missing or unit.index in self._open:
                self._complete(unit)
        self.synced, self._fired = self.syncing, False
        self._accumulated = not self.syncing
        self._beside_nbytes = None
        self._passed.clear()
        self.pool.give_back()

    def _fill_tiles(self) -> None:
        """Give tiles without a gradient one of zeros, if another tile of their parameter has one."""
        used = {id(segment.whole) for segment in self._received.values() if segment.is_tile}
        for unit, segment in self.units.segments() if used else ():
            waiting = unit.index not in self._open and unit.index not in self._passed
            if id(segment.whole) in used and segment.is_tile and waiting:
                self._begin(unit).used[segment.index] = 1
                self._open[unit.index].flat.zero_()
                if self.syncing or self.collectives is not None:
                    self._complete(unit)

    def abort_backward(self) -> None:
        """Forget the gradients of this step, whose backward pass raised."""
        if self._fired:
            self.reset()

    # --- step --------------------------------------------------------------------------------

    def finish(self) -> None:
        """Block until every complete gradient has reached the updates."""
        self.updates.wait_for_gradients()

    def read_norms(self) -> None:
        """Tell the updates the norms of gradients that stayed on the accelerator: waits for it, once."""
        if self._unread:
            with on_stream(self._norms):
                norms = torch.stack([*self._unread.values()]).tolist()
            for index, norm in zip(self._unread, norms, strict=True):
                self.updates.ready[index].sum_of_squares = norm**2
            self._unread.clear()

    def reset(self, *, committed: bool = False) -> None:
        """Drop what is left of this step's gradients: it is ``committed``, or forgotten."""
        self.finish()
        self.pool.give_back()
        for gradient in self._open.values():
            gradient.lease.release()
        for shard in self._shards.values():
            shard.lease.release()
        self._open.clear()
        self.prefetcher.lend(0)
        self._shards.clear()
        self._unread.clear()
        self._reducing = self._beside_nbytes = None
        delivered, self._delivered = self._delivered, set()
        self._passed.clear()
        self.synced = self._fired = self._accumulated = False
        self._received.clear()
        if not committed:
            self.updates.forget()
            # the buffers of units that stayed may hold what is forgotten
            self.prefetcher.forget(self.prefetcher.staying & delivered)

    # --- completion --------------------------------------------------------------------------

    def _complete(self, unit: Unit) -> None:
        """Reduce what this backward pass gave ``unit``; after the last micro-batch hand its gradient over."""
        self._passed.add(unit.index)
        gradient = self._open.get(unit.index)
        if gradient is None and self.collectives is not None:
            gradient = self._begin(unit)  # another rank may have one
        if not self.syncing:
            self.pins.unpin(unit.index)
            if self.collectives is not None:
                self._reduce(unit, lambda: None)
            elif gradient is not None:
                gradient.end_backward()
            return
        try:
            weights = self._take_weights(unit)  # may raise, while the gradient is still in its place
            self._delivered.add(unit.index)
            self._send(unit, gradient, weights)
        finally:  # what is fetched in its place may need memory that the update gives back
            if self.prefetcher.streams(unit.index):
                self.prefetcher.done(unit.index)

    def _send(self, unit: Unit, gradient: UnitGradient | None, weights: Callable[[], Weights]) -> None:
        """Start a step's gradient on its way to the update."""
        if self.collectives is not None:
            self._reduce(unit, lambda: self._hand_over(unit, self._shards.pop(unit.index, None), weights))
            return
        total = None
        if gradient is not None:
            del self._open[unit.index]
            if self.prefetcher.residents.borrowed_nbytes:
                self._share_window()
            gradient.seal()
            gradient.lease.record_use()
            self._pass(gradient.lease)
            total = ReducedGradient(gradient.lease, unit.dtype, bytes(gradient.used))
        self._leave(unit, lambda: self._hand_over(unit, total, weights))

    def _leave(self, unit: Unit, call: Callable[[], None]) -> None:
        """Run ``call`` now, or, if the unit's gradient leaves an accelerator, on the thread for that."""
        if self._leaving is None or unit.index in self.updates.chosen:
            call()
            return
        left = Transfer()
        self.updates.announce(left)

        def run() -> None:
            try:
                call()
            except BaseException as error:  # a thread that waits for a buffer must hear of it, too
                self.updates.on_failure(error)
                raise

        self._leaving.submit(left.run, run)

    def _hand_over(self, unit: Unit, total: ReducedGradient | None, weights: Callable[[], Weights]) -> None:
        """Give a step's gradient to the update; None: see [Note: parameters without a gradient]."""
        if total is None:
            weights().release()
            return
        if unit.index in self.updates.chosen:
            self._hand_over_there(unit, total)
            return
        grad, lease = total.grad, total.lease
        total.lease.record_use()  # the stream of the norm waits for what this one has waited for
        if self.host is not None:
            lease = self.host.gradients.lease(grad.nbytes, who="gradient for the update")
            lease.tensor.view(grad.dtype).copy_(grad, non_blocking=True)
            lease.record_use()
        with on_stream(self._norms):
            there = total.grad
            norm = None if self._norms is None else norm_on_device(there)
            total.lease.record_use()
        if self.host is not None:
            total.lease.release()
        with on_stream(self._norms):
            squares = sum_of_squares(there) if norm is None else norm.item() ** 2
        self.updates.add(
            unit, lease.tensor.view(grad.dtype), squares, lease, weights(), _used_segments(unit, total)
        )

    def _hand_over_there(self, unit: Unit, total: ReducedGradient) -> None:
        """Give a step's gradient to an update on its accelerator; waits for nothing."""
        with on_stream(self._norms):
            grad = total.grad
            self._unread[unit.index] = norm_on_device(grad)
            total.lease.record_use()  # and so of what the norm's stream has waited for
        self.updates.add(unit, grad, 0.0, total.lease, Weights(), _used_segments(unit, total))

    def _reduce(self, unit: Unit, then: Callable[[], None]) -> None:
        """Start to reduce ``unit``'s gradient of this backward pass; then add it up, and call ``then``."""
        assert self.collectives is not None
        if self._reducing is not None:  # see [Note: gradients that pass]
            self.mover.waits("collective", self._reducing.wait)
        gradient = self._open.pop(unit.index)
        if self.prefetcher.residents.borrowed_nbytes:
            self._share_window()
        gradient.seal()
        gradient.lease.record_use()
        spare = self.pool.lease(unit.nbytes, who=f"reduction of {unit.name}")
        nbytes = unit.shard_numel * self.reduce_dtype.itemsize
        lease = self.pool.lease(nbytes, who=f"gradient shard of {unit.name}")
        self._pass(gradient.lease, spare, lease)

        def buffers() -> tuple[Tensor, Tensor, Tensor]:
            flat, arrived = (each.tensor.view(unit.dtype) for each in (gradient.lease, spare))
            return flat, arrived, lease.tensor.view(self.reduce_dtype)

        def ended(used: bytes) -> None:
            gradient.lease.release()
            spare.release()
            lease.record_use()
            reduced = ReducedGradient(lease, self.reduce_dtype, used)
            self._leave(unit, lambda: self._add_up(unit, reduced, then))

        pending = self.collectives.reduce(
            unit.index, unit.name, buffers, bytes(gradient.used), ended, self.updates.records.wait_for_commit
        )
        self.updates.announce(pending)
        self._reducing = pending if self.mover.staging is None else None

    def _add_up(self, unit: Unit, reduced: ReducedGradient, then: Callable[[], None]) -> None:
        """Add a micro-batch's gradient to those of earlier ones; then call ``then``."""
        earlier = self._shards.get(unit.index)
        if not any(reduced.used):
            reduced.lease.release()
        elif earlier is None:
            self._shards[unit.index] = reduced
        else:
            earlier.grad.add_(reduced.grad)
            earlier.lease.record_use()
            earlier.used = bytes(map(operator.or_, earlier.used, reduced.used))
            reduced.lease.release()
        then()

    def _take_weights(self, unit: Unit) -> Callable[[], Weights]:
        """Return what returns the weights of this rank's shard for the update, as far as they are in memory.

        It waits for copies from an accelerator.
        """
        weights: Callable[[], Weights] = Weights
        if self.prefetcher.streams(unit.index):
            self.pins.forget(unit.index)
            if self.prefetcher.stays(unit.index):
                weights = _staying(self.mover.stay(unit.index))
            elif (lease := self.mover.take(unit.index)) is not None:
                weights = self._kept(unit, lease)
        return weights

    def _kept(self, unit: Unit, lease: Lease) -> Callable[[], Weights]:
        """Keep this rank's weights of a full buffer that is not needed any more, for their update."""
        if not self.hold_weights or unit.home.tier is Tier.HOST:
            lease.release()
            return Weights
        if unit.world_size == 1 and self.host is None:
            return lambda: Weights(lease.tensor.view(unit.dtype), lease)
        who = f"weights of {unit.name}"
        if self.host is None:
            kept: Lease | None = self.pool.lease(unit.shard_nbytes, who=who)
        else:
            kept = self.host.weights.try_lease(unit.shard_nbytes, who=who)
        if kept is None:  # the update reads them
            lease.release()
            return Weights
        self.mover.copy_to_host(unit, lease, kept)
        lease.release()
        return lambda: Weights(kept.tensor.view(unit.dtype), kept)

    def close(self) -> None:
        """End the thread on which gradients leave."""
        if self._leaving is not None:
            self._leaving.shutdown()


def _used_segments(unit: Unit, total: ReducedGradient) -> tuple[Segment, ...]:
    return tuple(segment for segment in unit.segments if total.used[segment.index])


def _staying(values: Callable[[], Tensor]) -> Callable[[], Weights]:
    def weights() -> Weights:
        weight = values()
        return Weights(weight, stay=weight)

    return weights


def _check_placeholder(segment: Segment) -> None:
    grad = segment.whole.grad
    if type(grad) is not ReleasedGradient:
        raise StateError(
            f"{segment.name}.grad was {'dropped' if grad is None else 'replaced'} after backward(), but the "
            "gradient itself is kept in its unit and would be applied. To drop the gradients call "
            "optimizer.zero_grad(), not model.zero_grad(); to change them, use hooks of tensors "
            "(param.register_hook) or scale the loss"
        )
