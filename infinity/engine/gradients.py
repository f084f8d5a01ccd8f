"""Gradients of one model's step: collected by unit, and sent to the updates when they are complete.

When a unit's gradient is complete is decided by :class:`infinity.planner.updates.Completions`; its way
from there is :class:`infinity.engine.gradient_path.GradientPath`.

[Note: micro-batches]
With one rank a micro-batch adds to the flat gradient, in the compute dtype, as ``p.grad`` would.
With several ranks each micro-batch is reduced at once and its shard is added up: full gradients of
a model larger than memory could not be kept.
"""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn

from infinity.core.budget import rounded
from infinity.core.errors import StateError
from infinity.core.lifecycle import Tier
from infinity.core.transfer import Lease
from infinity.engine.gradient_path import GradientPath, TakesWeights
from infinity.engine.unit_gradient import UnitGradient, check_placeholder
from infinity.partition.pins import BackwardPins
from infinity.partition.prefetcher import Prefetcher
from infinity.partition.unit import Segment, Unit, UnitIndex
from infinity.planner.updates import Completions
from infinity.shards.updates import Weights


class Gradients:
    """The gradients of one model's step on this rank.

    Args:
        units: All units of the model.
        leaves: Indices of units that are reduced when backward leaves their module.
        prefetcher: Serves uses of units.
        pins: Units that backward keeps.
        path: Brings complete gradients to the updates.
        hold_weights: Keep a unit's weights for its update, in place of reading them again.

    Attributes:
        completions: Decides when the gradient of a unit is complete.
    """

    def __init__(
        self, units: UnitIndex, leaves: frozenset[int], prefetcher: Prefetcher, pins: BackwardPins,
        path: GradientPath, *, hold_weights: bool,
    ) -> None:  # fmt: skip
        self.units, self.prefetcher, self.pins, self.path = units, prefetcher, pins, path
        self.hold_weights = hold_weights
        self.completions = Completions(
            leaves, lambda index: (len(units[index].trainable), len(units[index].segments)), pins.recomputed
        )
        self._received: dict[int, Segment] = {}  # by id of the parameter, whose .grad is a placeholder
        self._open: dict[int, UnitGradient] = {}
        self._loan = WindowLoan(units, leaves, prefetcher, pins, path, self.completions)

    @property
    def received(self) -> bool:
        """Return whether a backward pass of this step gave gradients."""
        return bool(self._received)

    # --- what hooks call ---------------------------------------------------------------------

    def receive(self, unit: Unit, segment: Segment, grad: Tensor) -> None:
        """Take in one parameter's gradient of this backward pass.

        Raises:
            StateError: The gradients of this step are complete already.
        """
        if self.completions.synced:
            raise StateError(
                "a second backward() before step(). To accumulate micro-batches, run every backward() but "
                "the last inside `with infinity.no_sync(model):`; to drop the first one's gradients, call "
                "optimizer.zero_grad()"
            )
        complete = self.completions.fire(unit.index, segment.index)
        if unit.index in self.completions.delivered:
            raise StateError(
                f"{segment.name} got a gradient after its unit's gradients were complete. Where several "
                "calls share a weight, torch.utils.checkpoint recomputes them with use_reentrant=False (else "
                "each has a backward pass of its own); and what is gathered as one (partition.leaf) is used "
                "inside its module only"
            )
        gradient = self._open.get(unit.index) or self._begin(unit)
        gradient.add(segment, grad)
        self._received[id(segment.param)] = segment
        if complete:
            self._complete(unit)

    def received_from(self, param: nn.Parameter) -> bool:
        """Return whether a gradient was received from ``param`` in this step."""
        return id(param) in self._received

    def check_received(self, param: nn.Parameter) -> None:
        """Raise if a gradient that was received from ``param`` in this step was dropped or replaced."""
        segment = self._received.get(id(param))
        if segment is not None:
            check_placeholder(segment)

    def check(self) -> None:
        """Raise if a received gradient was dropped or replaced, or a weight written.

        Raises:
            StateError: ``model.zero_grad()``, ``p.grad = ...``, ``p.data = ...`` or the like.
        """
        for segment in self._received.values():
            check_placeholder(segment)
        for unit in self.units:
            if unit.flat is not None:
                unit.check_all_attached()

    def complete_together(self, units: Iterable[Unit]) -> None:
        """Complete the gradients of these units, whatever has not fired."""
        for index in self.completions.left(unit.index for unit in units if unit.trainable):
            self._complete(self.units[index])

    def end_backward(self) -> None:
        """Complete all gradients at the end of a graph, whatever has not fired."""
        if not self.completions.in_backward:
            return  # torch.autograd.grad: nothing was accumulated
        self._fill_tiles()
        trained = (unit.index for unit in self.units if unit.trainable)
        for index in self.completions.left_at_end(trained, self._open):
            self._complete(self.units[index])
        self.completions.end_backward()
        self._loan.end_backward()
        self.path.pool.give_back()

    def _fill_tiles(self) -> None:
        """Give tiles without a gradient one of zeros, if another tile of their parameter has one."""
        used = {id(segment.whole) for segment in self._received.values() if segment.is_tile}
        for unit, segment in self.units.segments() if used else ():
            waiting = unit.index not in self._open and unit.index not in self.completions.passed
            if id(segment.whole) in used and segment.is_tile and waiting:
                gradient = self._begin(unit)
                gradient.used[segment.index] = 1
                gradient.flat.zero_()
                if self.completions.syncing or self.path.collectives is not None:
                    self._complete(unit)

    def abort_backward(self) -> None:
        """Forget the gradients of this step, whose backward pass raised."""
        if self.completions.in_backward:
            self.reset()

    # --- step --------------------------------------------------------------------------------

    def reset(self, *, committed: bool = False) -> None:
        """Drop what is left of this step's gradients: it is ``committed``, or forgotten."""
        self.path.finish()
        self.path.pool.give_back()
        for gradient in self._open.values():
            gradient.lease.release()
        self._open.clear()
        self._received.clear()
        self.path.reset()
        self._loan.repay()
        delivered = self.completions.delivered
        self.completions.reset()
        if not committed:
            self.path.updates.forget()
            # the buffers of units that stayed may hold what is forgotten
            self.prefetcher.forget(self.prefetcher.staying & delivered)

    # --- one unit ----------------------------------------------------------------------------

    def _begin(self, unit: Unit) -> UnitGradient:
        if not self.completions.passed:  # the last reduction of the micro-batch before
            self.path.wait_for_reduction()
        self._loan.settle([unit, *(each.unit for each in self._open.values())])
        gradient = self._open[unit.index] = UnitGradient.begin(unit, self.path.pool)
        self.path.pool.give_back()
        return gradient

    def _complete(self, unit: Unit) -> None:
        """Reduce what this backward pass gave ``unit``; after the last micro-batch hand its gradient over."""
        self.completions.complete(unit.index)
        if unit.index not in self._open and self.path.collectives is not None:
            self._begin(unit)  # another rank may have one
        if not self.completions.syncing:
            self.pins.unpin(unit.index)
            if self.path.collectives is not None:
                self._send(unit, None)
            return
        try:
            weights = self._take_weights(unit)  # may raise, while the gradient is still in its place
            self._send(unit, weights)
        finally:  # what is fetched in its place may need memory that the update gives back
            if self.prefetcher.streams(unit.index):
                self.prefetcher.done(unit.index)

    def _send(self, unit: Unit, weights: TakesWeights | None) -> None:
        gradient = self._open.pop(unit.index, None)
        if self.prefetcher.residents.borrowed_nbytes:
            self._loan.settle([each.unit for each in self._open.values()])
        self.path.send(unit, gradient, weights)

    def _take_weights(self, unit: Unit) -> TakesWeights:
        """Keep this rank's weights for the update, as far as they are in memory."""
        if self.prefetcher.streams(unit.index):
            self.pins.forget(unit.index)
            if self.prefetcher.stays(unit.index):
                values = self.path.mover.stay(unit.index)
                return lambda: Weights.staying(values())
            if (lease := self.path.mover.take(unit.index)) is not None:
                return self._keep_weights(unit, lease)
        return Weights

    def _keep_weights(self, unit: Unit, lease: Lease) -> Callable[[], Weights]:
        """Keep this rank's weights of a full buffer that is not needed any more, for their update."""
        host, kept = self.path.host, None
        if self.hold_weights and unit.home.tier is Tier.NVME:
            if unit.world_size == 1 and host is None:
                return lambda: Weights(lease.tensor.view(unit.dtype), lease)
            who = f"weights of {unit.name}"
            if host is None:
                kept = self.path.pool.lease(unit.shard_nbytes, who=who)
            else:  # without room there the update reads them
                kept = host.weights.try_lease(unit.shard_nbytes, who=who)
            if kept is not None:
                self.path.mover.copy_to_host(unit, lease, kept)
        lease.release()
        return Weights if kept is None else lambda: Weights(kept.tensor.view(unit.dtype), kept)


class WindowLoan:
    """Room of the units' window that open gradients borrow when they need more than budgets give them.

    There is room for one that is open and one on its way to its update. More are open at one time where
    units have parameters of modules that run inside each other. Several ranks decide alike, since they
    begin and complete the same units; those of leaves, where they differ, have room of their own.
    """

    def __init__(
        self, units: UnitIndex, leaves: frozenset[int], prefetcher: Prefetcher, pins: BackwardPins,
        path: GradientPath, completions: Completions,
    ) -> None:  # fmt: skip
        self.units, self._leaves, self._prefetcher, self._pins = units, leaves, prefetcher, pins
        self.path, self._completions = path, completions
        self._reserve_nbytes: int | None = None  # on several ranks, the same in a whole backward pass

    def settle(self, opened: Sequence[Unit]) -> None:
        """Borrow what gradients of these units need, and give back what they do not."""
        several, lent = self.path.collectives is not None, self._prefetcher.residents.borrowed_nbytes
        opened = [unit for unit in opened if not (several and unit.index in self._leaves)]
        if len(opened) < (2 if several else 3) and not lent:
            return
        reserve_nbytes = self._gradient_reserve_nbytes()
        if reserve_nbytes is None:
            return
        room = self.path.pool.capacity_nbytes - self._prefetcher.residents.capacity_nbytes
        beyond = max(0, reserve_nbytes + sum(rounded(unit.nbytes) for unit in opened) - room)
        self._prefetcher.lend(beyond)
        if beyond > lent:
            self._pins.shrink()
            self._prefetcher.lend(beyond)

    def end_backward(self) -> None:
        """Take note that what other gradients take may change."""
        self._reserve_nbytes = None

    def repay(self) -> None:
        """Give back everything."""
        self._prefetcher.lend(0)
        self._reserve_nbytes = None

    def _gradient_reserve_nbytes(self) -> int | None:
        """Return what gradients may take beside those that are open (bytes); None: there is room for all."""
        updates, completions = self.path.updates, self._completions
        spilled = updates.stored_gradients.chosen
        early = updates.early and not updates.speculation.clips  # else they are kept until step
        all_wait = completions.accumulated or not completions.syncing or not (early or spilled)

        def waits(unit: Unit) -> bool:
            return unit.index not in spilled and (all_wait or not early or unit.home.tier is Tier.HOST)

        if self.path.collectives is None:
            delivered = (self.units[i] for i in completions.delivered)
            return None if all_wait else sum(rounded(unit.nbytes) for unit in delivered if waits(unit))
        if self.path.host is None and self._reserve_nbytes is None:
            trained, itemsize = [u for u in self.units if u.trainable], self.path.reduce_dtype.itemsize
            shards = [unit.shard_numel * itemsize for unit in trained if waits(unit)]
            reduction = 3 * max(rounded(unit.nbytes) for unit in trained)  # and the weights of an update
            self._reserve_nbytes = sum(map(rounded, shards)) + reduction
        return self._reserve_nbytes
