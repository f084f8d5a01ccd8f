"""From autograd's gradients to complete, reduced shards: collect, reduce, hand over.

[Note: when gradients are complete]
When every trainable parameter of the unit has fired, or when the backward pass ends: an unused
parameter counts as zero. Then the unit's weights have no reader left in this step and go to the
update with the gradient.

[Note: micro-batches]
With one rank a micro-batch adds to the flat gradient, in the compute dtype, as ``p.grad`` would.
With several ranks each micro-batch is reduced at once and its shard is added up: full gradients of
a model larger than memory could not be kept.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from infinity.comm.collectives import Collectives, Pending
from infinity.core.errors import StateError
from infinity.core.tier import Tier
from infinity.core.transfer import Lease, Pool
from infinity.engine.hooks import Hooks
from infinity.partition.gradients import UnitGradient
from infinity.partition.mover import UnitMover
from infinity.partition.unit import Segment, Unit
from infinity.shards.updates import Updates, Weights


class Backward:
    """Takes one model's gradients.

    Args:
        units: All units.
        pool: Where gradients are leased (the device tier).
        host: Pinned host memory for the update, only with an accelerator.
        mover: Has the weights.
        updates: Gets complete shards.
        collectives: None with one rank.
        reduce_dtype: Dtype in which shards are added over ranks.
        prepare: Called before each forward.
        hold_weights: Keep a unit's weights for its update, in place of reading them again.
    """

    def __init__(
        self, units: list[Unit], pool: Pool, host: Pool | None, mover: UnitMover, updates: Updates,
        collectives: Collectives | None, reduce_dtype: torch.dtype, prepare: Callable[[], None],
        *, hold_weights: bool,
    ) -> None:  # fmt: skip
        self.units, self.pool, self.host, self.mover = units, pool, host, mover
        self.updates, self.collectives = updates, collectives
        self.reduce_dtype, self.hold_weights, self._prepare = reduce_dtype, hold_weights, prepare
        self.hooks: Hooks  # set by the runtime: hooks and this know each other
        self.syncing = True  # False under no_sync
        self.synced = False  # a backward pass has completed the gradients of this step
        self._open: dict[int, UnitGradient] = {}
        self._shards: dict[int, tuple[Tensor, Lease]] = {}  # added up over micro-batches
        self._pending: list[Pending] = []
        self._delivered: set[int] = set()
        self._fired = False

    # --- what hooks call ---------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A forward pass that autograd records begins."""
        self._prepare()
        self.updates.expect()

    def receive(self, unit: Unit, segment: Segment, grad: Tensor) -> None:
        """One parameter's gradient of this backward pass.

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
            raise StateError(f"{segment.name} got a gradient after its unit's gradients were complete")
        gradient = self._open.get(unit.index)
        if gradient is None:
            gradient = self._begin(unit)
        gradient.add(segment, grad)
        if gradient.complete and self.hooks.completes(unit):
            self._complete(unit, gradient)

    def complete_together(self, units: Iterable[Unit]) -> None:
        """All gradients of these units are there; what has not fired counts as zero."""
        for unit in units if self._fired else ():  # torch.autograd.grad accumulates nothing
            if unit.trainable and unit.index not in self._delivered:
                self._complete(unit, self._open.get(unit.index) or self._begin(unit))

    def _begin(self, unit: Unit) -> UnitGradient:
        gradient = self._open[unit.index] = UnitGradient.begin(unit, self.pool)
        return gradient

    def end_backward(self) -> None:
        """The graph is done: what has not fired counts as zero."""
        if not self._fired:
            return  # torch.autograd.grad: nothing was accumulated
        for unit in self.units:
            gradient = self._open.get(unit.index)
            if self.syncing and unit.trainable and unit.index not in self._delivered:
                self._complete(unit, gradient or self._begin(unit))
            elif gradient is not None and not self.syncing:
                self._complete(unit, gradient)
        self.synced, self._fired = self.syncing, False

    def abort_backward(self) -> None:
        """The backward pass raised: if it left gradients, nothing of this step counts."""
        if self._fired:
            self.reset()

    # --- step --------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until every complete gradient has reached the updates."""
        for pending in self._pending:
            pending.wait()
        self._pending.clear()

    def reset(self) -> None:
        """The step is over, or forgotten: no gradient is left."""
        self.finish()
        for gradient in self._open.values():
            gradient.lease.release()
        for _, lease in self._shards.values():
            lease.release()
        self._open.clear()
        self._shards.clear()
        self._delivered.clear()
        self.synced = self._fired = False
        self.hooks.forget_gradients()
        forgotten = self.updates.forget()
        # the buffers of those that stayed may hold what is forgotten
        self.hooks.prefetcher.forget(self.hooks.prefetcher.staying.intersection(forgotten))

    # --- completion --------------------------------------------------------------------------

    def _complete(self, unit: Unit, gradient: UnitGradient) -> None:
        if not self.syncing:
            self.hooks.pins.unpin(unit.index)
            gradient.end_backward()
            if self.collectives is not None:
                self._reduce(unit, self._open.pop(unit.index), self._add_up)
            return
        del self._open[unit.index]
        self._delivered.add(unit.index)
        weights = self._take_weights(unit)
        if self.collectives is None:
            flat = gradient.seal()
            grad, held = self._to_host(flat, gradient.lease)
            self.updates.add(unit, grad, held, weights)
            return

        def hand_over(shard: Tensor, lease: Lease) -> None:
            total, held = self._add_up(shard, lease, unit)
            del self._shards[unit.index]
            grad, held_on_host = self._to_host(total, held)
            self.updates.add(unit, grad, held_on_host, weights)

        self._reduce(unit, gradient, lambda shard, lease, _: hand_over(shard, lease))

    def _add_up(self, shard: Tensor, lease: Lease, unit: Unit) -> tuple[Tensor, Lease]:
        """Add a reduced shard to those of earlier micro-batches."""
        earlier = self._shards.get(unit.index)
        if earlier is None:
            self._shards[unit.index] = (shard, lease)
        else:
            earlier[0].add_(shard)
            lease.release()
        return self._shards[unit.index]

    def _reduce(
        self, unit: Unit, gradient: UnitGradient, then: Callable[[Tensor, Lease, Unit], object]
    ) -> None:
        assert self.collectives is not None
        flat = gradient.seal()
        spare = self.pool.lease(unit.nbytes, who=f"reduction of {unit.name}")
        nbytes = unit.shard_numel * self.reduce_dtype.itemsize
        lease = self.pool.lease(nbytes, who=f"gradient shard of {unit.name}")
        shard = lease.tensor.view(self.reduce_dtype)

        def ended(_: Tensor) -> None:
            gradient.lease.release()
            spare.release()
            then(shard, lease, unit)

        arrived = spare.tensor.view(unit.dtype)
        pending = self.collectives.reduce(unit.index, unit.name, flat, arrived, shard, ended)
        self._pending.append(pending)

    def _take_weights(self, unit: Unit) -> Weights:
        """The weights of this rank's shard for the update, as far as they are at hand."""
        weights = Weights()
        if self.hooks.streams(unit):
            self.hooks.pins.forget(unit.index)
            if self.hooks.prefetcher.stays(unit.index):
                weights = Weights(self.mover.stay(unit.index), stay=True)
            elif (lease := self.mover.take(unit.index)) is not None:
                weights = self._kept(unit, lease)
            self.hooks.prefetcher.done(unit.index)
        return weights

    def _kept(self, unit: Unit, lease: Lease) -> Weights:
        """What is kept for the update of a full buffer that nobody else needs."""
        if not self.hold_weights or unit.home is Tier.HOST:
            lease.release()
            return Weights()
        full = lease.tensor.view(unit.dtype)
        if unit.world_size == 1 and self.host is None:
            return Weights(full, lease)
        who = f"weights of {unit.name}"
        if self.host is None:
            kept: Lease | None = self.pool.lease(unit.shard_nbytes, who=who)
        else:
            kept = self.host.try_lease(unit.shard_nbytes, who=who)
        if kept is None:  # the update reads them
            lease.release()
            return Weights()
        weight = kept.tensor.view(unit.dtype).copy_(unit.shard_of(full))
        lease.release()
        return Weights(weight, kept)

    def _to_host(self, grad: Tensor, lease: Lease) -> tuple[Tensor, Lease]:
        """A gradient where the update runs: beside the CPU."""
        if self.host is None:
            return grad, lease
        kept = self.host.lease(grad.numel() * grad.itemsize, who="gradient for the update")
        out = kept.tensor.view(grad.dtype)
        out.copy_(grad)
        lease.release()
        return out, kept
