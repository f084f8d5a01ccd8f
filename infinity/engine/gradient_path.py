"""The way of a complete gradient: reduced over ranks, added up, copied from a device, given to its update.

[Note: parameters without a gradient]
A parameter that no backward pass of this step reached, on any rank, is left alone, as one whose ``grad`` is
None is by torch's optimizers: its weight, its moments and its step count stay. A unit without any other
has no update. Where another rank used the parameter, its gradient here counts as zero.

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

import operator
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from infinity.comm.collectives import Collectives
from infinity.core.budget import HostBudget
from infinity.core.transfer import Lease, Transfer
from infinity.device.accelerator import new_stream, on_stream, use_own_stream
from infinity.device.memory import HostPool
from infinity.engine.unit_gradient import UnitGradient
from infinity.observe.metrics import CountingPool
from infinity.optim.norm import norm_on_device, sum_of_squares
from infinity.partition.mover import UnitMover
from infinity.partition.unit import Segment, Unit
from infinity.shards.updates import Updates, Weights

#: Returns the weights of a shard for its update; waits for copies from an accelerator.
TakesWeights = Callable[[], Weights]


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


@dataclass(slots=True)
class ShardGradient:
    """The gradient of one shard, added up over micro-batches; ``used`` on any rank, by segment."""

    lease: Lease
    dtype: torch.dtype
    used: bytes

    @property
    def grad(self) -> Tensor:
        """The gradient, ``(shard_numel,)``, ordered after every earlier use of its buffer."""
        grad: Tensor = self.lease.tensor.view(self.dtype)
        return grad


class GradientPath:
    """Brings complete gradients of units to the updates of their shards.

    Args:
        mover: Counts waits of the training thread; has the accelerator's staging memory.
        updates: Gets complete shards.
        pool: Memory of gradients (the device tier).
        host: Pinned host memory, only with an accelerator.
        collectives: None with one rank.
        reduce_dtype: Dtype of the gradient reduction.
    """

    def __init__(
        self, mover: UnitMover, updates: Updates, pool: CountingPool, host: HostPools | None,
        collectives: Collectives | None, reduce_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.mover, self.updates, self.pool, self.host = mover, updates, pool, host
        self.collectives, self.reduce_dtype = collectives, reduce_dtype
        self._shards: dict[int, ShardGradient] = {}  # of earlier micro-batches
        self._reducing: Transfer | None = None  # the last reduction, where the next one waits for it
        self._offload_thread: ThreadPoolExecutor | None = None
        self._norms: torch.Stream | None = None
        self._unread: dict[int, Tensor] = {}  # norms of gradients that stay on the accelerator
        if mover.staging is not None:
            device = mover.staging.device
            self._norms = new_stream(device)
            self._offload_thread = ThreadPoolExecutor(1, "infinity-gradient", use_own_stream, (device,))

    # --- the training thread -----------------------------------------------------------------

    def send(self, unit: Unit, gradient: UnitGradient | None, weights: TakesWeights | None) -> None:
        """Start a complete gradient of a backward pass on its way.

        Args:
            gradient: None with one rank only: see [Note: parameters without a gradient].
            weights: Weights for the update that follows; None: another micro-batch follows.
        """
        total = None
        if gradient is not None:
            gradient.seal()
            gradient.lease.record_use()
            if self.collectives is not None:
                self._reduce(gradient, weights)
                return
            self._hold_back(gradient.lease)
            total = ShardGradient(gradient.lease, unit.dtype, bytes(gradient.used))
        assert weights is not None
        self._offload(unit, partial(self._hand_over, unit, total, weights))

    def wait_for_reduction(self) -> None:
        """Wait for the last reduction where the next gradient does: see [Note: gradients that pass]."""
        if self._reducing is not None:
            self.mover.waits("collective", self._reducing.wait)
            self._reducing = None

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

    def reset(self) -> None:
        """Drop what is left of a step's gradients; none is on its way."""
        for shard in self._shards.values():
            shard.lease.release()
        self._shards.clear()
        self._unread.clear()
        self._reducing = None

    def close(self) -> None:
        """End the thread on which gradients leave."""
        if self._offload_thread is not None:
            self._offload_thread.shutdown()

    def _hold_back(self, *leases: Lease) -> None:
        """Hold a gradient's memory until the next one has begun: see [Note: gradients that pass]."""
        for lease in leases if self.mover.staging is None else ():
            self.pool.hold_back(lease)

    def _reduce(self, gradient: UnitGradient, weights: TakesWeights | None) -> None:
        """Start to reduce a gradient; what follows runs when every rank's has arrived."""
        assert self.collectives is not None
        self.wait_for_reduction()
        unit, flat = gradient.unit, gradient.lease
        spare = self.pool.lease(unit.nbytes, who=f"reduction of {unit.name}")
        nbytes = unit.shard_numel * self.reduce_dtype.itemsize
        lease = self.pool.lease(nbytes, who=f"gradient shard of {unit.name}")
        self._hold_back(flat, spare, lease)

        def buffers() -> tuple[Tensor, Tensor, Tensor]:
            given, arrived = (each.tensor.view(unit.dtype) for each in (flat, spare))
            return given, arrived, lease.tensor.view(self.reduce_dtype)

        def ended(used: bytes) -> None:
            flat.release()
            spare.release()
            lease.record_use()
            reduced = ShardGradient(lease, self.reduce_dtype, used)
            self._offload(unit, partial(self._add_up, unit, reduced, weights))

        pending = self.collectives.reduce(
            unit.index, unit.name, buffers, bytes(gradient.used), ended, self.updates.records.wait_for_commit
        )
        self.updates.announce(pending)
        self._reducing = pending if self.mover.staging is None else None

    # --- the training thread, that of collectives, or the one on which gradients leave -----------

    def _offload(self, unit: Unit, call: Callable[[], None]) -> None:
        """Run ``call`` now, or, if the unit's gradient leaves an accelerator, on the thread for that."""
        if self._offload_thread is None or unit.index in self.updates.chosen:
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

        self._offload_thread.submit(left.run, run)

    def _add_up(self, unit: Unit, reduced: ShardGradient, weights: TakesWeights | None) -> None:
        """Add a micro-batch's gradient to those of earlier ones; hand over the last sum."""
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
        if weights is not None:
            self._hand_over(unit, self._shards.pop(unit.index, None), weights)

    def _hand_over(self, unit: Unit, total: ShardGradient | None, weights: TakesWeights) -> None:
        """Give a step's gradient to the update; None: see [Note: parameters without a gradient]."""
        if total is None:
            weights().release()
            return
        used = tuple(segment for segment in unit.segments if total.used[segment.index])
        if unit.index in self.updates.chosen:
            self._submit_device_update(unit, total, used)
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
        self.updates.add(unit, lease.tensor.view(grad.dtype), squares, lease, weights(), used)

    def _submit_device_update(self, unit: Unit, total: ShardGradient, used: tuple[Segment, ...]) -> None:
        """Give a step's gradient to an update on its accelerator; waits for nothing."""
        with on_stream(self._norms):
            grad = total.grad
            self._unread[unit.index] = norm_on_device(grad)
            total.lease.record_use()  # and so of what the norm's stream has waited for
        self.updates.add(unit, grad, 0.0, total.lease, Weights(), used)
