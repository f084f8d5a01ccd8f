"""Gradients of one model's step: collected by unit, reduced, and given to the updates when they are complete.

Where they add up is in :mod:`infinity.engine.accumulation`.

[Note: parameters without a gradient]
A parameter that no backward pass of this step reached on any rank is left alone, as torch's optimizers leave
one whose ``grad`` is None: weight, moments and step count stay. A unit of only such parameters has no update.
Where another rank used the parameter, or another tile of it has a gradient, its own is zero.

[Note: gradients that pass]
Without an accelerator a unit is reduced while the next one computes, and no later: the training thread waits
for the previous reduction, as FSDP2 does, and for the last one of a micro-batch when the next backward
begins. Memory of a complete gradient, and of its reduction, is given back when the next gradient has begun or
backward has ended, however soon it is read. So what gradients take does not depend on the pace of collectives
and updates, and :mod:`infinity.predict.play` can predict it. On an accelerator streams order reductions, and
memory is lent again as soon as they are issued.

[Note: gradients of other ranks]
Where ranks are on different paths (:mod:`infinity.comm.agreement`), a unit's gradient comes in parts, some of
which this rank only owns a slice of. The parts add up like micro-batches, and the sum goes to the update at
``step()``, when no rank has more; updates of such a unit do not start inside backward. What has no room until
then (gradients that nothing keeps) waits on NVMe.

[Note: gradients of one rank]
Where ranks compute different blocks (:mod:`infinity.engine.stages`), one rank has all of a unit's gradient.
All ranks take their slices of it at the same place of their programs, and nobody waits there. So reductions
have one order, and a rank goes on to its next block while another ends the last one.

[Note: gradients leave an accelerator]
The hook only gives the stream of the backward pass its work. A thread with a stream of its own lets another
stream take the norm, after that or after the reduction, copies the gradient to host memory, and hands it
over. The lease carries the order from stream to stream. Of gradients that wait to leave the one goes first
whose unit the next forward needs first: what backward completes last does not wait for all the others.

``step()`` reads all norms at once, and waits for gradients of units on NVMe only. Those of units in host
memory leave while the next forward computes, which waits for the units that it uses: an update begins when
its gradient has come.

The gradient of a unit that is updated on the accelerator stays there: the hook, or the thread of collectives,
gives the norm's stream its work. Another thread would wait up to 5 ms each time for the interpreter's lock.

[Note: gradients borrow from the window]
Budgets have room for one gradient that is open and one on its way to its update. Where units have parameters
of modules inside each other, more are open at a time and borrow room of the units' window. Ranks begin and
complete the same units, so they decide alike; leaves have room of their own.
"""

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from infinity.core.errors import StateError
from infinity.core.lifecycle import Tier
from infinity.core.nbytes import Transfer, rounded
from infinity.core.process import uninterrupted
from infinity.device.accelerator import new_stream, on_stream
from infinity.device.memory import CountingPool, HostPool, Lease
from infinity.engine.accumulation import Accumulation, Gradient, OffloadThread, Sums, check_placeholder
from infinity.optim.rules import norm_on_device, sum_of_squares
from infinity.partition.mover import UnitMover
from infinity.partition.prefetcher import BackwardPins, Prefetcher
from infinity.partition.unit import Segment, Unit, UnitIndex
from infinity.planner.updates import Completions
from infinity.shards.updates import PendingUpdate, Updates, Weights

#: Is given a parameter's name, and the elements ``(n,)`` of its gradient in this rank's shard.
OnGradient = Callable[[str, Tensor], object]
#: Returns the weights of a shard for its update; waits for copies from an accelerator.
TakesWeights = Callable[[], Weights]


class HostPools(NamedTuple):
    """Holds pinned host memory beside an accelerator: see :class:`infinity.core.budget.HostBudget`."""

    gradients: HostPool
    weights: HostPool
    staging: HostPool


class GradientPath:
    """Brings complete gradients of units to the updates of their shards.

    ``pool`` is memory of the device tier, ``host`` pinned host memory beside an accelerator.
    """

    def __init__(
        self, mover: UnitMover, updates: Updates, pool: CountingPool, host: HostPools | None
    ) -> None:
        self.mover, self.updates, self.pool, self.host = mover, updates, pool, host
        self.collectives, self.reduce_dtype = mover.collectives, updates.tiers.reduce_dtype
        self._reducing: Transfer | None = None  # the last reduction, where the next one waits for it
        self._beside: OffloadThread | None = None
        self._norms: torch.Stream | None = None
        self._unread: dict[int, Tensor] = {}  # norms of gradients on the accelerator
        self.watchers: OrderedDict[int, OnGradient] = OrderedDict()  # of each step's gradients
        if mover.staging is not None:
            device = mover.staging.device
            self._norms = new_stream(device)
            self._beside = OffloadThread(device, updates)
        gradients = None if host is None else host.gradients
        run = None if self._beside is None else self._beside.run
        self.sums = Sums(pool, gradients, updates.stored_gradients, run)
        if self._beside is not None:
            pool.reclaim.append(self._beside.make_room)

    def begin(self, unit: Unit) -> Gradient:
        """Return what a backward pass adds a unit's gradient to: with one rank the sum of earlier ones."""
        gradient: Gradient | None = None
        if self.collectives is None and unit.index in self.sums:
            gradient = self.mover.waits("read", partial(self.sums.take, unit))
        if gradient is None:
            return Gradient.of(unit, self.pool)
        gradient.open = gradient.flat
        self.sums.expect_next(self.mover.units)
        return gradient

    def send(self, unit: Unit, gradient: Gradient | None, weights: TakesWeights | None) -> None:
        """Send a complete gradient of a backward pass to its update; None: there is none (one rank only).

        ``weights`` returns the weights that the update starts from; None: another micro-batch follows.
        """
        if gradient is not None:
            gradient.seal(unit.segments)
            gradient.lease.record_use()
            if self.collectives is not None:
                self._reduce(unit, gradient, weights)
                return
            if weights is not None or unit.index in self.sums.leaving:
                self._hold_back(gradient.lease)
        if weights is not None:
            self._pass_on(unit, partial(self._hand_over, unit, gradient, weights))
        elif gradient is not None:
            self.sums.put(unit, gradient)

    def wait_for_reduction(self) -> None:
        """Wait for the last reduction where the next gradient does: see [Note: gradients that pass]."""
        if self._reducing is not None:
            self.mover.waits("collective", self._reducing.wait)
            self._reducing = None

    def read_norms(self) -> None:
        """Report the norms of gradients that were on the accelerator to the updates; blocks once."""
        if self._unread:
            with on_stream(self._norms):
                norms = torch.stack([*self._unread.values()]).tolist()
            for index, norm in zip(self._unread, norms, strict=True):
                if index < 0:
                    self.mover.units.parts.squares += norm**2
                else:
                    self.updates.ready[index].sum_of_squares = norm**2
            self._unread.clear()

    def take_slice(self, index: int, used: bytes, fill: Callable[[Tensor, torch.dtype], None]) -> None:
        """Take in this rank's slice of gradients that only other ranks have, on the collectives' thread."""
        unit = self.mover.units[index]
        self.pool.give_back()  # reductions here wait for those of others
        if self.sums.lent is not None:
            self.sums.lent.release()
        nbytes = unit.shard_numel * self.reduce_dtype.itemsize
        lease = self.pool.lease(nbytes, who=f"gradient shard of {unit.name}")
        fill(lease.tensor.view(self.reduce_dtype), unit.dtype)
        lease.record_use()
        self._keep(unit, Gradient(lease, self.reduce_dtype, bytearray(used)))

    def _keep(self, unit: Unit, part: Gradient) -> None:
        """Keep a part of a unit's gradient until ``step()``."""
        self.sums.in_parts[unit.index] = unit
        self._pass_on(unit, partial(self._add_up, unit, part, None))

    def finish_parts(self) -> None:
        """Hand over what came in parts, now that no rank has more of this step."""
        for index, unit in sorted(self.sums.in_parts.items()):
            if index not in self.updates.ready:
                self._pass_on(unit, partial(self._finish, unit))
        self.updates.wait_for_gradients()

    def _finish(self, unit: Unit) -> None:
        self._hand_over(unit, self.sums.take(unit), Weights)

    def reset(self) -> None:
        self.sums.clear()
        self._unread.clear()
        self.mover.units.parts.squares = self.mover.units.parts.inputs = 0.0
        self._reducing = None

    def close(self) -> None:
        if self._beside is not None:
            self._beside.close()

    def _hold_back(self, *leases: Lease) -> None:
        """Hold a gradient's memory until the next one has begun: see [Note: gradients that pass]."""
        for lease in leases if self.mover.staging is None else ():
            self.pool.hold_back(lease)

    def _reduce(self, unit: Unit, gradient: Gradient, weights: TakesWeights | None) -> None:
        assert self.collectives is not None
        self.wait_for_reduction()
        flat = gradient.lease
        spare = self.pool.lease(unit.nbytes, who=f"reduction of {unit.name}")
        nbytes = unit.shard_numel * self.reduce_dtype.itemsize
        lease = self.pool.lease(nbytes, who=f"gradient shard of {unit.name}")
        if self.mover.staging is None:  # else what follows on another thread may not have put the sum there
            self.sums.expect(unit)
        self._hold_back(flat, spare, lease)
        self.sums.lent = spare if self.mover.staging is None else None

        def buffers() -> tuple[Tensor, Tensor, Tensor]:
            nonlocal spare
            if spare.lent is None:  # see take_slice
                spare = self.pool.lease(unit.nbytes, who=f"reduction of {unit.name}")
            self.sums.lent = None
            given, arrived = (each.tensor.view(unit.dtype) for each in (flat, spare))
            return given, arrived, lease.tensor.view(self.reduce_dtype)

        def ended(used: bytes, ends: bool) -> None:
            self.sums.lent = None
            flat.release()
            spare.release()
            lease.record_use()
            reduced = Gradient(lease, self.reduce_dtype, bytearray(used))
            if ends or (weights is None and unit.index not in self.sums.in_parts):
                self._pass_on(unit, partial(self._add_up, unit, reduced, weights))
                return
            if weights is not None:
                weights().release()
            self.pool.give_back()
            self._keep(unit, reduced)

        pending = self.collectives.reduce(
            unit.index, unit.name, buffers, bytes(gradient.used), ended,
            self.updates.records.wait_for_commit, more=weights is None, micro=self.sums.micro,
        )  # fmt: skip
        self.updates.announce(pending)
        self._reducing = pending if self.mover.staging is None else None

    def scatter(
        self, unit: Unit, gradient: Gradient | None, weights: TakesWeights | None, source: int
    ) -> None:
        """Send the gradient that rank ``source`` has to the owners: see [Note: gradients of one rank]."""
        assert self.collectives is not None
        if gradient is not None:
            gradient.seal(unit.segments)
            gradient.lease.record_use()
        if weights is None:
            raise StateError("the layer schedule over ranks (train.stages) inside infinity.no_sync")
        if gradient is not None and source != self.collectives.rank:
            raise StateError(
                f"{unit.name} ran on another rank than its own: with train.stages call what "
                "infinity.layer_schedule returned, not the model, to train"
            )
        update, nbytes = weights, unit.shard_numel * self.reduce_dtype.itemsize
        # Leased here: another thread may find memory whose last use waits for what the source does later.
        lease = self.pool.lease(nbytes, who=f"gradient shard of {unit.name}")

        def buffers() -> tuple[Tensor | None, Tensor, torch.dtype]:
            full = None if gradient is None else gradient.flat
            return full, lease.tensor.view(self.reduce_dtype), unit.dtype

        def ended(used: bytes) -> None:
            if gradient is not None:
                gradient.lease.release()
            lease.record_use()
            total = Gradient(lease, self.reduce_dtype, bytearray(used)) if any(used) else None
            if total is None:
                lease.release()
            self._pass_on(unit, partial(self._hand_over, unit, total, update))

        used = bytes(len(unit.segments)) if gradient is None else bytes(gradient.used)
        pending = self.collectives.scatter(
            unit.index, unit.name, source, buffers, used, ended,
            self.updates.records.wait_for_commit, micro=self.sums.micro,
        )  # fmt: skip
        self.updates.announce(pending)

    def _pass_on(self, unit: Unit, call: Callable[[], None]) -> None:
        """Run ``call``, which gives a unit's gradient to its update, where it leaves the accelerator."""
        if self._beside is None or unit.index in self.updates.chosen:
            call()
        else:
            self._beside.run(call)

    def _add_up(self, unit: Unit, reduced: Gradient, weights: TakesWeights | None) -> None:
        """Add a micro-batch's gradient to the step's sum; hand the sum over after the last one."""
        total = self.sums.take(unit)
        if not any(reduced.used):
            reduced.lease.release()
        elif total is None:
            total = reduced
        else:
            total.flat.add_(reduced.flat)
            total.lease.record_use()
            total.used = bytearray(map(operator.or_, total.used, reduced.used))
            reduced.lease.release()
        if weights is not None:
            self._hand_over(unit, total, weights)
        elif total is not None:
            waits = unit.home.tier is Tier.HOST or self.updates.speculation.clips
            self.sums.put(
                unit, total, leaves=unit.index in self.sums.in_parts and not (waits and self.host is None)
            )

    def _hand_over(self, unit: Unit, total: Gradient | None, weights: TakesWeights) -> None:
        """Give a step's gradient to the update; None: see [Note: parameters without a gradient]."""
        if total is None:
            weights().release()
            return
        used = tuple(segment for segment in unit.segments if total.used[segment.index])
        if self.watchers:
            self._show(unit, total, used)
        if self.host is None:
            grad = total.flat
            squares = sum(map(sum_of_squares, self._of(unit, grad, self.mover.units.parts.counts)))
            alike = self._of(unit, grad, self.mover.units.parts.is_alike)
            self.mover.units.parts.squares += sum(map(sum_of_squares, alike))
            self.updates.add(unit, grad, squares, total.lease, weights(), used)
            return
        with on_stream(self._norms):
            grad = total.flat
            parts, here = self.mover.units.parts, partial(self._of, unit, grad)
            self._unread[unit.index] = norm = norm_on_device(*(here(parts.counts) or [grad[:0]]))
            if alike := here(parts.is_alike):
                self._unread[~unit.index] = norm_on_device(*alike)
            total.lease.record_use()  # and so of what the norm's stream has waited for
        if unit.index in self.updates.chosen:
            self.updates.add(unit, grad, 0.0, total.lease, Weights(), used)
        else:
            self._leave(unit, total, weights, self.updates.expect_gradient(unit, used), norm)

    def _leave(
        self, unit: Unit, total: Gradient, weights: TakesWeights, pending: PendingUpdate, norm: Tensor
    ) -> None:
        """Let a gradient leave the accelerator when its turn comes; any thread."""
        assert self._beside is not None
        lags, left = unit.home.tier is Tier.HOST, Transfer()
        if not lags:
            self.updates.announce(left)
        pending.arrived = left

        def leave() -> None:
            assert self.host is not None
            grad = total.flat
            lease = self.host.gradients.lease(grad.nbytes, who="gradient for the update")
            lease.tensor.view(grad.dtype).copy_(grad, non_blocking=True)
            lease.record_use()
            total.lease.release()
            # On this stream: that of the norms has those of later gradients, too, which it would wait for.
            squares = None if lags else norm.item() ** 2  # None: ``step()`` reads it
            self.updates.take(pending, lease.tensor.view(grad.dtype), squares, lease, weights())

        order = 1 + self.updates.order.first_use(unit.index) if lags else 0
        self._beside.leave(leave, total.lease, left, order)

    def _show(self, unit: Unit, total: Gradient, used: tuple[Segment, ...]) -> None:
        """Give watchers the gradient of each parameter, as far as it is in this rank's shard."""
        flat, low = total.flat, unit.shard_start
        for segment, start, _, numel in unit.within(low, low + len(flat)):
            for watch in [*self.watchers.values()] if segment in used else ():
                watch(segment.name, flat[start - low :][:numel])
        total.lease.record_use()

    def _of(self, unit: Unit, flat: Tensor, chosen: Callable[[Tensor], bool]) -> list[Tensor]:
        """Return the parts of this rank's gradient that are of ``chosen`` parameters."""
        low, found = unit.shard_start, {chosen(segment.whole) for segment in unit.segments}
        if len(found) == 1:
            return [flat] if found.pop() else []
        within = unit.within(low, low + len(flat))
        return [flat[start - low :][:n] for s, start, _, n in within if chosen(s.whole)]


class Gradients:
    """Collects and completes the gradients of one model's step on this rank; ``leaves`` are their units."""

    def __init__(
        self, units: UnitIndex, leaves: frozenset[int], prefetcher: Prefetcher, path: GradientPath
    ) -> None:
        self.units, self.prefetcher, self.path, self.leaves = units, prefetcher, path, leaves
        self.pins, self.accumulation = BackwardPins(prefetcher), Accumulation(units, all_tell=bool(leaves))
        self.hold_weights = False  # for updates, which then need not read them
        self.completions = Completions(
            leaves, lambda index: (len(units[index].trainable), len(units[index].segments)),
            self.pins.recomputed,
        )  # fmt: skip
        self.computed_by: dict[int, int] = {}  # by unit: the rank that alone has its gradient
        self.received: dict[int, Segment] = {}  # in this step, by id of the parameter
        self._open: dict[int, Gradient] = {}
        self._reserve_nbytes: int | None = None  # on several ranks, the same in a whole backward pass

    def expect(self, *, backward: bool = False) -> None:
        """Await gradients of all parameters that train, now that a forward or a ``backward`` begins.

        Raise a StateError if those that were received were dropped before this backward pass.
        """
        if not backward:
            self.accumulation.look()
        for segment in self.received.values() if backward else ():
            check_placeholder(segment)
        self.accumulation.expect(self.received)

    def receive(self, unit: Unit, segment: Segment, grad: Tensor) -> None:
        if self.completions.synced:
            raise StateError(
                "a second backward() before step(). To accumulate micro-batches, run all but the last inside "
                "`with infinity.no_sync(model):`; to drop the first one's gradients, optimizer.zero_grad()"
            )
        complete = self._note(unit, segment)
        if unit.index in self.completions.delivered:
            raise StateError(
                f"{segment.name} got a gradient after its unit's gradients were complete. Where several "
                "calls share a weight, torch.utils.checkpoint must recompute them with use_reentrant=False; "
                "and what is gathered as one (partition.leaf) is used inside its module only"
            )
        gradient = self._open.get(unit.index) or self._begin(unit)
        if not complete:
            self.accumulation.open(unit, gradient, segment)
        gradient.add(segment, grad)
        self.accumulation.receive(segment)
        self.received[id(segment.param)] = segment
        if complete:
            self.accumulation.close(unit, last=segment)
            self._complete(unit)
        else:
            self.accumulation.watch(unit, self.completions.missing(unit.index))

    def _note(self, unit: Unit, *came: Segment) -> bool:
        """Note gradients that ``came`` and those that autograd added; return whether they are all."""
        if added := self.accumulation.added(unit):
            used = self._open[unit.index].used
            for segment in added:
                used[segment.index] = 1
            self.received.update((id(segment.param), segment) for segment in added)
        return self.completions.fire(unit.index, *(segment.index for segment in (*came, *added)))

    def complete_together(self, units: Iterable[Unit]) -> None:
        """Complete the gradients of these units, even if some parameters have none."""
        for index in self.completions.left(unit.index for unit in units if unit.trainable):
            self._complete(self.units[index])

    def stage(self, computed_by: dict[int, int], together: Iterable[int]) -> None:
        """Take which rank alone computes a unit, by its number, and units that all ranks complete at once."""
        self.computed_by = computed_by
        self.completions.leaves = self.leaves.union(together)

    def complete_block(self, units: Iterable[Unit]) -> None:
        """Complete the gradients of a block, of which all ranks take their slices now."""
        self.completions.in_backward = True
        self.complete_together(units)

    def end_backward(self) -> None:
        """Complete all gradients at the end of a graph, even if some parameters have none."""
        for unit in self.accumulation.opened:
            self._note(unit)
        for segment, grad in self.accumulation.unseen(self.received):
            self.receive(self.units.place_of(id(segment.param))[0], segment, grad)
        self.accumulation.end(self.received)
        if not self.completions.in_backward:
            return  # torch.autograd.grad: nothing was accumulated
        self._fill_tiles()
        trained = (unit.index for unit in self.units if unit.trainable)
        for index in self.completions.left_at_end(trained, self._open):
            self._complete(self.units[index])
        self.completions.end_backward()
        self.path.sums.micro += 1
        self._reserve_nbytes = None
        self.path.pool.give_back()

    def take_unseen(self) -> None:
        """Take what backward passes left of which nothing told; raise if other gradients were dropped."""
        if self.completions.in_backward:
            return  # it failed
        for segment in self.received.values():
            check_placeholder(segment)
        self.accumulation.look()
        with uninterrupted:
            self.end_backward()

    def abort_backward(self) -> None:
        """Drop what a failed backward pass left."""
        if self.completions.in_backward:
            self.fail()
        self.accumulation.end(self.received)

    def _fill_tiles(self) -> None:
        """Give zeros to tiles without a gradient if another tile of their parameter has one."""
        used = {id(segment.whole) for segment in self.received.values() if segment.is_tile}
        for unit, segment in self.units.segments() if used else ():
            waiting = unit.index not in self._open and unit.index not in self.completions.passed
            summed = self.path.collectives is None and unit.index in self.path.sums
            if id(segment.whole) in used and segment.is_tile and waiting and not summed:
                gradient = self._begin(unit)
                gradient.used[segment.index] = 1
                gradient.flat.zero_()
                self._complete(unit)

    def reset(self, *, committed: bool = False) -> None:
        """Drop the remaining gradients of this step, which is ``committed`` or forgotten."""
        self.path.updates.wait_for_gradients()
        self.path.pool.give_back()
        self.accumulation.close(*self.accumulation.opened)
        for gradient in self._open.values():
            gradient.lease.release()
        self._open.clear()
        self.accumulation.spend(self.received.values())
        self.received.clear()
        self.path.reset()
        self.prefetcher.lend(0)
        self._reserve_nbytes = None
        delivered = self.completions.delivered
        self.completions.reset()
        if not committed:
            self.path.updates.forget()
            # the buffers of units that stayed may hold what is forgotten
            self.prefetcher.forget(self.prefetcher.staying & delivered)

    def fail(self) -> None:
        """Drop the gradients of this step, since a backward pass of it failed."""
        lost = self.completions.lost or self.completions.accumulated
        self.reset()
        self.completions.lost = lost

    def _begin(self, unit: Unit) -> Gradient:
        if not self.completions.passed:  # the last reduction of the micro-batch before
            self.path.wait_for_reduction()
        self.borrow([unit.index, *self._open])
        gradient = self._open[unit.index] = self.path.begin(unit)
        self.path.pool.give_back()
        return gradient

    def _complete(self, unit: Unit) -> None:
        """Reduce the gradient of ``unit`` from this backward; after the last micro-batch hand it over."""
        self.completions.complete(unit.index)
        syncing, several = self.completions.syncing, self.path.collectives is not None
        several = several and unit.index not in self.computed_by
        if unit.index not in self._open and (several or (syncing and unit.index in self.path.sums)):
            self._begin(unit)  # another rank may have one, or a micro-batch before had
        if not syncing:
            self.pins.unpin(unit.index)
            self._send(unit, None)
            return
        try:
            self._send(unit, self._take_weights(unit))  # that may raise, while the gradient is in its place
        finally:  # what is fetched in its place may need memory that the update gives back
            if self.prefetcher.streams(unit.index):
                self.prefetcher.done(unit.index)

    def _send(self, unit: Unit, weights: TakesWeights | None) -> None:
        gradient = self._open.pop(unit.index, None)
        if self.prefetcher.residents.borrowed_nbytes:
            self.borrow(self._open)
        if unit.index in self.computed_by:
            self.path.scatter(unit, gradient, weights, self.computed_by[unit.index])
        else:
            self.path.send(unit, gradient, weights)

    def _take_weights(self, unit: Unit) -> TakesWeights:
        """Keep this rank's weights that are in memory for the update."""
        if not self.prefetcher.streams(unit.index):
            return Weights
        mover, host, kept = self.path.mover, self.path.host, None
        self.pins.forget(unit.index)
        if self.prefetcher.stays(unit.index):
            values = mover.stay(unit.index)
            return lambda: Weights.staying(values())
        lease = mover.take(unit.index)  # the full buffer, which is not needed any more
        if lease is None:
            return Weights
        if self.hold_weights and unit.home.tier is Tier.NVME:
            if unit.world_size == 1 and host is None:
                return lambda: Weights(lease.tensor.view(unit.dtype), lease)
            who = f"weights of {unit.name}"
            if host is None:
                kept = self.path.pool.lease(unit.shard_nbytes, who=who)
            else:  # without room there the update reads them
                kept = host.weights.try_lease(unit.shard_nbytes, who=who)
            if kept is not None:
                mover.copy_to_host(unit, lease, kept)
        lease.release()
        return Weights if kept is None else lambda: Weights(kept.tensor.view(unit.dtype), kept)

    def borrow(self, indices: Iterable[int]) -> None:
        """Borrow window memory that the gradients of these units need, and give back what they do not."""
        several, lent = self.path.collectives is not None, self.prefetcher.residents.borrowed_nbytes
        opened = [self.units[i] for i in indices if not (several and i in self.leaves)]
        if len(opened) < (2 if several else 3) and not lent:
            return
        reserve_nbytes = self._others_nbytes()
        if reserve_nbytes is None:
            return
        room = self.path.pool.capacity_nbytes - self.prefetcher.residents.capacity_nbytes
        beyond = max(0, reserve_nbytes + sum(rounded(unit.nbytes) for unit in opened) - room)
        self.prefetcher.lend(beyond)
        if beyond > lent:
            self.pins.shrink()
            self.prefetcher.lend(beyond)

    def _others_nbytes(self) -> int | None:
        """Return the bytes that other gradients than the open ones may take; None: there is room for all."""
        updates, completions, sums = self.path.updates, self.completions, self.path.sums
        accumulates = completions.accumulated or not completions.syncing
        early = updates.early and not updates.speculation.clips  # else they are kept until step
        spilled = updates.stored_gradients.chosen | (sums.leaving if accumulates else frozenset())
        all_wait = (accumulates or not early) and not spilled

        def waits(unit: Unit) -> bool:
            held = accumulates or not early or unit.home.tier is Tier.HOST
            return unit.index not in spilled and held

        if self.path.collectives is None:
            others = (self.units[i] for i in completions.delivered | sums.here.keys())
            return None if all_wait else sum(rounded(unit.nbytes) for unit in others if waits(unit))
        if self.path.host is None and self._reserve_nbytes is None:
            trained, itemsize = [u for u in self.units if u.trainable], self.path.reduce_dtype.itemsize
            shards = [unit.shard_numel * itemsize for unit in trained if waits(unit)]
            reduction = 3 * max(rounded(unit.nbytes) for unit in trained)  # and the weights of an update
            self._reserve_nbytes = sum(map(rounded, shards)) + reduction
        return self._reserve_nbytes
