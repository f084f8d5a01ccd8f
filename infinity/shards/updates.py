"""Updates of shards: from complete gradients to committed versions.

[Note: when an update starts]
With two versions a unit's update starts as soon as its gradient exists, inside backward: it reads the
committed version and writes the next. ``step`` then only publishes them: what was next is committed.
Otherwise gradients are held, and the updates start at ``step``. Either way they lag into the next forward,
where the next fetch of a unit waits for that unit's own update, and they run in the order in which the next
forward will need them.

[Note: speculation]
What an update needs to know is known at ``step`` only: the clip coefficient, which depends on the norm of all
gradients. An update inside backward takes it to be 1. Where it is, ``step`` validates the updates. Where it
is not, or ``param_groups`` changed meanwhile, they are rolled back: the next version is void, and they start
again from the committed one, with the right numbers. So gradients are kept until ``step``, as they are
without speculation; an optimizer that never clips gives them back as soon as they were read.

Every step tells whether speculation was right, or would have been. While the prediction is that it will not
be (see :class:`infinity.shards.records.Predictor`), updates start at ``step``.

[Note: gradients on NVMe]
Where memory is too small for all gradients that wait for ``step``, some units' are written to NVMe as soon
as they are complete. An update inside backward reads its gradient from memory meanwhile, and memory is given
back when both are done. One that starts at ``step``, for the first time or again, reads it from NVMe, by
chunks. Each gradient has one place, which no commit names. The next write to it waits for all that reads or
writes it.

[Note: what is forgotten]
Skipping a step, or ``zero_grad()`` without ``step()``, publishes nothing: updates are rolled back, and the
next version is overwritten by the next update. A unit in host memory has one place, so it is only updated at
``step``.

[Note: shards in host memory]
A unit in host memory is updated in its place, at ``step``. For a commit it is written to NVMe, too, into
its next version, while the next step computes; its next update waits until the bytes have left. On an
accelerator the shard is not what compute reads, so it is updated on a thread beside the next forward, whose
upload of the unit waits for that. One that is on the accelerator, too, is updated there
(:mod:`infinity.shards.on_device`), also from ``step`` on, beside the next forward: its gradient waits
there. For a commit it is brought home first, and its next update waits for nothing.

[Note: step counts]
The bias correction of a parameter depends on how often it was updated itself. So its segment has a count of
its own, which grows when an update of it is committed, and a shard is updated by runs of segments that have
both group and count in common: one run, or one for each group, as long as every step uses every parameter.
"""

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from infinity.core.errors import StateError
from infinity.core.extent import Extent
from infinity.core.interrupts import Section
from infinity.core.lifecycle import Lifecycle, Tier, UpdateState
from infinity.core.transfer import ChainedTransfer, Lease, Transfer
from infinity.optim.pipeline import Chunk, Expected, Progress, Run, UpdateJob, UpdatePipeline
from infinity.optim.rules import Hyper, Rule
from infinity.partition.prefetcher import StepOrder
from infinity.partition.unit import Segment, Unit
from infinity.shards.commits import Commits
from infinity.shards.records import Predictor, Records
from infinity.shards.store import Version
from infinity.shards.tiers import Tiers


@dataclass(frozen=True, slots=True)
class Weights:
    """A shard's committed weights for its update, as far as they are at hand.

    Attributes:
        values: ``(shard_numel,)`` in the compute dtype; None: the update reads them from NVMe.
        lease: Given back when the update has read them; None: they are not the update's to give back.
        stay: The update writes the new weights there, too: the place of ``values``, if they are at hand.
    """

    values: Tensor | None = None
    lease: Lease | None = None
    stay: Tensor | None = None

    def release(self) -> None:
        """They are read no more; may be called twice."""
        if self.lease is not None:
            self.lease.release()


class UpdateFuture(Transfer):
    """An update in flight; ends when its last write has landed.

    Attributes:
        computed: Set when the new weights exist, and the update reads what it was given no more.
    """

    __slots__ = ("computed",)

    def __init__(self) -> None:
        super().__init__()
        self.computed = threading.Event()

    def wait_computed(self) -> None:
        """Return when the new weights exist, though they may not be on disk yet.

        Raises:
            DiskError: The update has failed.
        """
        while not self.computed.wait(1.0):  # in slices: Ctrl-C must get through
            pass
        if self.done():
            self.wait()

    def finish(self, error: BaseException | None = None) -> None:
        super().finish(error)
        self.computed.set()


@dataclass(slots=True)
class PendingUpdate:
    """A unit whose gradient of this step is complete on this rank.

    Attributes:
        grad: ``(shard_numel,)``; None: it is on NVMe, or on its way there.
        lease: Of the gradient.
        stored: Ends when the gradient is on NVMe; None: it stays in memory.
        used: Parameters that have a gradient.
        lifecycle: Of the update, when it has started.
        future: Of the update; ``progress`` likewise.
        place: The version that the update writes, when it has started.
    """

    unit: Unit
    grad: Tensor | None
    sum_of_squares: float
    lease: Lease
    weights: Weights
    used: tuple[Segment, ...]
    lifecycle: Lifecycle[UpdateState]
    future: UpdateFuture | None = None
    place: int | None = None
    progress: Progress | None = None
    stored: Transfer | None = None

    @property
    def speculated(self) -> bool:
        return self.lifecycle.state is UpdateState.SPECULATED

    def release_gradient(self) -> None:
        """No update reads the gradient in memory any more; may be called twice."""
        if self.stored is None:
            self.lease.release()
        else:
            self.grad = None
            self.stored.then(self.lease.release)

    def release(self) -> None:
        """Gradient and weights are read no more; may be called twice."""
        self.release_gradient()
        self.weights.release()


class StepHypers:
    """The hyperparameters of a step, read once from the optimizer's groups for all of its updates.

    Attributes:
        groups: The optimizer's ``param_groups``.
        loss_scale: Of the gradients.
    """

    def __init__(self) -> None:
        self.groups: Sequence[Mapping[str, Any]] = ()
        self.loss_scale = 1.0
        self._hypers: list[Hyper] | None = None  # of each group; None: not read in this step
        self._group_of: dict[int, int] = {}  # by id of the parameter
        self._tensors: dict[tuple[int, int, float], Tensor] = {}  # by group, step count and gradient scale
        self._read_from: object = None  # the groups that were read
        self._lock = threading.Lock()

    def runs(self, unit: Unit, used: Iterable[Segment], grad_scale: float) -> tuple[Run, ...]:
        """Return the parts of a shard that are updated: see [Note: step counts]. Any thread.

        Args:
            used: Parameters that have a gradient; those in no group are left alone, too.
            grad_scale: What gradients are multiplied by, beside the loss scale.
        """
        self.begin_step()
        with self._lock:
            hyper_of: dict[int, Tensor] = {}
            for segment in used:
                group = self._group_of.get(id(segment.whole))
                if group is not None:
                    hyper_of[segment.index] = self._tensor(group, segment.steps + 1, grad_scale)
        return runs_of(unit, hyper_of)

    def begin_step(self) -> None:
        """Read the groups, unless this step has done so."""
        with self._lock:
            if self._hypers is None:
                self._hypers, self._tensors, self._read_from = self._read(), {}, self.groups
                groups = enumerate(self.groups)
                self._group_of = {id(p): i for i, group in groups for p in group["params"]}

    def _tensor(self, group: int, step: int, grad_scale: float) -> Tensor:
        assert self._hypers is not None
        key = group, step, grad_scale
        if key not in self._tensors:
            scale = grad_scale / self.loss_scale
            self._tensors[key] = replace(self._hypers[group], step=step, grad_scale=scale).tensor()
        return self._tensors[key]

    def count(self, used: Iterable[Segment]) -> None:
        """Take note that the update of these parameters is committed; after :meth:`runs`."""
        for segment in used:
            segment.steps += id(segment.whole) in self._group_of

    @property
    def changed(self) -> bool:
        """Whether the groups are not what they were when this step read them."""
        if self._hypers is None:
            return False
        return self._read_from is not self.groups or self._hypers != self._read()

    def end_step(self) -> None:
        """Read the groups anew when the next update starts."""
        self._hypers = None

    def _read(self) -> list[Hyper]:
        return [
            Hyper(
                lr=float(group["lr"]), beta1=float(group["betas"][0]), beta2=float(group["betas"][1]),
                eps=float(group["eps"]), weight_decay=float(group["weight_decay"]),
            )
            for group in self.groups
        ]  # fmt: skip


class Updates:
    """Gradients in, committed versions out.

    It has more attributes than other classes: the updates in flight and the state of the step, which change
    together when it ends.

    Args:
        tiers: Where shards live.
        rule: Updates shards in host memory.
        beside: Runs their updates, one after another; None: the training thread does.
        pipeline: Updates the others; None when everything is resident.
        units: All of the model's.
        order: Of uses and gradients in a step, which orders the updates.
        two_versions: Updates may start inside backward: see [Note: when an update starts].
        clips: The step may scale gradients, so they are kept until then: see [Note: speculation].
        commits: Writes the commit record; None if no process could go on with the run.
        on_failure: Called with the error of an update or of a gradient on its way to it, on any thread.
        every: Steps from one recorded commit to the next; None: as many as hide its cost.
        section: Of bookkeeping that changes stored states; None: one of its own.

    Attributes:
        records: Of the steps that were committed.
        spilled: Indices of units whose gradients wait on NVMe: see [Note: gradients on NVMe].
        speculated: Updates of the last step that started before its norm was known.
        rolled_back: Those of them that were void.
    """

    def __init__(
        self, tiers: Tiers, rule: Rule, beside: ThreadPoolExecutor | None,
        pipeline: UpdatePipeline | None, units: Sequence[Unit], order: StepOrder, *,
        two_versions: bool, clips: bool, commits: Commits | None,
        on_failure: Callable[[BaseException], None], every: int | None = None,
        section: Section | None = None,
    ) -> None:  # fmt: skip
        self._section = section or Section()
        self.tiers, self.rule, self._beside, self.pipeline = tiers, rule, beside, pipeline
        self.units, self.order, self._two_versions, self.clips = units, order, two_versions, clips
        self.predictor = Predictor()
        self.speculated = self.rolled_back = 0
        self.on_failure = on_failure
        self._expecting = False
        self._incoming: list[Transfer] = []  # after which gradients have been added
        self.hypers = StepHypers()
        self.ready: dict[int, PendingUpdate] = {}
        self.planned_read = self.planned_written = 0  # bytes of this step's updates
        self._futures: dict[int, UpdateFuture] = {}
        self.records = Records(tiers, units, commits, every, self._futures, self.predictor)
        self.spilled: frozenset[int] = frozenset()
        self._gradient_writes: dict[int, Transfer] = {}  # the last of each unit
        self._lock = threading.Lock()

    # --- gradients ---------------------------------------------------------------------------

    def announce(self, incoming: Transfer) -> None:
        """Expect a gradient that will have been given to :meth:`add` when ``incoming`` ends; any thread."""
        self._incoming.append(incoming)

    def wait_for_gradients(self) -> None:
        """Block until every announced gradient has been added."""
        for incoming in self._incoming:  # a reduction announces what follows it
            incoming.wait()
        self._incoming.clear()

    def add(
        self, unit: Unit, grad: Tensor, squares: float, lease: Lease, weights: Weights,
        used: tuple[Segment, ...],
    ) -> None:  # fmt: skip
        """Take in a shard's complete gradient, ``(shard_numel,)``; any thread.

        Args:
            grad: In host memory, but for units that are updated on the accelerator.
            squares: The sum of its squares.
            lease: Held for ``grad``, given back when the update has read it.
            weights: Those that the update starts from.
            used: Parameters of the unit that any rank has a gradient of; the others are left alone.
        """
        lifecycle = Lifecycle(f"update of {unit.name}", UpdateState.HELD)
        ready = PendingUpdate(unit, grad, squares, lease, weights, used, lifecycle)
        with self._section:
            self.hypers.begin_step()
            with self._lock:
                self.ready[unit.index] = ready
            if not math.isfinite(ready.sum_of_squares):
                ready.release()  # the step will be skipped, and this gradient not read
                return
            if unit.index in self.spilled:
                self._spill(ready)
            if self.early and unit.home is Tier.NVME:
                self._launch(ready, 1.0, UpdateState.SPECULATED)
            elif ready.stored is not None:
                ready.release_gradient()

    def _spill(self, ready: PendingUpdate) -> None:
        """Start to write a gradient to NVMe: see [Note: gradients on NVMe].

        Raises:
            DiskError: The one before could not be written; or there is no room.
        """
        index, nbytes = ready.unit.index, self.tiers.gradient_nbytes(ready.unit)
        self._wait_for_gradient_place(index)
        ready.stored = self.tiers.write_gradient(ready.unit, ready.lease.memory[:nbytes])
        self._gradient_writes[index] = ready.stored
        self.planned_written += nbytes

    def _wait_for_gradient_place(self, index: int) -> None:
        """Return when nothing reads or writes a unit's gradient on NVMe any more."""
        for last in (self._futures.get(index), self._gradient_writes.get(index)):
            if last is not None:
                last.wait()

    def place_gradients(self, indices: frozenset[int]) -> None:
        """Let the gradients of these units wait on NVMe, and of no others; between two steps.

        Raises:
            DiskError: The file system has no room for them.
        """
        self.spilled = indices
        for index in self.tiers.with_gradient - indices - self.ready.keys():
            self._wait_for_gradient_place(index)
            self.tiers.free_gradient(self.units[index])
        for index in sorted(indices):
            self.tiers.gradient(self.units[index])

    @property
    def spilled_nbytes(self) -> int:
        """Bytes of gradients that wait on NVMe in each step."""
        return sum(self.tiers.gradient_nbytes(self.units[index]) for index in self.spilled)

    def land_held(self) -> None:
        """Return when the gradients that :meth:`commit` reads from NVMe are there.

        Raises:
            DiskError: One could not be written.
        """
        for ready in self.ready.values():
            if ready.stored is not None and ready.lifecycle.state is not UpdateState.VALIDATED:
                ready.stored.wait()

    def land_gradients(self) -> None:
        """Return when no gradient is on its way to NVMe.

        Raises:
            DiskError: One could not be written.
        """
        for stored in self._gradient_writes.values():
            stored.wait()

    @property
    def early(self) -> bool:
        """Whether updates of this step start inside backward."""
        return self._two_versions and self.predictor.right and bool(self.hypers.groups)

    def expect(self) -> None:
        """Let the states of a step's updates be read before their gradients exist."""
        if self.pipeline is not None and not self._expecting:
            self._expecting = True
            self.pipeline.expect([self._expected(self.units[index]) for index in self._coming()])

    def _expected(self, unit: Unit) -> Expected:
        committed = self.tiers.version(unit)  # where the update writes is not known yet, nor needed
        reads_gradient = unit.index in self.spilled and not self.early
        gradient = self.tiers.gradient(unit) if reads_gradient else None
        chunks = partial(_chunks, committed, committed, gradient)
        return Expected(unit.name, chunks, self._futures.get(unit.index))

    def _coming(self) -> list[int]:
        """Units on NVMe in the order of their updates in this step; empty while unknown."""
        on_nvme = [index for index in self.order.gradients if self.units[index].home is Tier.NVME]
        return on_nvme if self.early else self._in_order_of_use(on_nvme)

    def total_sum_of_squares(self) -> float:
        """Return the sum over this rank's shards, in the order of units."""
        return math.fsum(self.ready[i].sum_of_squares for i in sorted(self.ready))

    # --- the step ----------------------------------------------------------------------------

    def validate(self, grad_scale: float) -> bool:
        """Let speculated updates stand if they had the right numbers.

        Returns:
            False: They had not; :meth:`roll_back` comes before :meth:`commit`.

        Raises:
            StateError: They had not, and their gradients were not kept.
        """
        changed = self.hypers.changed
        right = grad_scale == 1.0 and not changed
        speculated = [ready for ready in self.ready.values() if ready.speculated]
        if speculated and not (right or self.clips):
            raise StateError(_CHANGED if changed else _CLIPPED)
        self.predictor.learn(right)
        self.speculated, self.rolled_back = len(speculated), 0
        if changed:
            self.hypers.end_step()
        for ready in speculated if right else ():
            with self._lock:
                ready.lifecycle.move(UpdateState.VALIDATED)
                if ready.future is not None and ready.future.computed.is_set():
                    ready.release_gradient()
        return right or not speculated

    def roll_back(self) -> None:
        """Void the speculated updates; return when nothing writes to the next versions any more."""
        speculated = [ready for ready in self.ready.values() if ready.speculated]
        if self.pipeline is not None:
            self.pipeline.cancel(ready.progress for ready in speculated if ready.progress is not None)
        for ready in speculated:
            assert ready.future is not None
            ready.future.wait()
            assert ready.progress is not None
            ready.lifecycle.move(UpdateState.ROLLED_BACK)
            if ready.stored is not None:
                ready.release_gradient()
            if ready.weights.stay is not None:
                ready.weights = Weights(stay=ready.weights.stay)  # some of them may be new ones
            self.planned_read -= ready.progress.unread_nbytes
            self.planned_written -= ready.progress.unwritten_nbytes
        self.speculated = self.rolled_back = len(speculated)

    @property
    def computes(self) -> bool:
        """Whether :meth:`commit` computes updates itself, which takes long."""
        return self._beside is None and any(ready.unit.home is Tier.HOST for ready in self.ready.values())

    def commit(self, grad_scale: float) -> None:
        """Commit the step: publish validated updates, start the others."""
        for index in self._in_order_of_use(self.ready):
            ready = self.ready[index]
            if ready.lifecycle.state is not UpdateState.VALIDATED:
                self._start(ready, grad_scale)
            self.hypers.count(ready.used)
            self.tiers.from_base.discard(index)
            ready.unit.updates += 1
            if ready.place is not None:
                ready.unit.version = ready.place
        self.records.end_step()
        self._close_step()

    def forget(self) -> None:
        """Drop this step's gradients and updates; the committed version stays."""
        if self.ready:
            self.roll_back()
        for ready in self.ready.values():
            ready.release()
        self._close_step()

    # --- the shards that the mover brings (infinity.partition.mover.Shards) --------------------

    def fetch(self, unit: Unit, memory: memoryview, start: int = 0) -> Transfer:
        """Start fetching a shard's committed weights from byte ``start`` on, after the update of them."""
        future = self._futures.get(unit.index)
        if future is None or future.done() or self._is_next(unit):
            if future is not None and future.done() and not self._is_next(unit):
                future.wait()  # raises if that update failed: its weights are not there
            return self.tiers.fetch(unit, memory, start)
        return ChainedTransfer(future, lambda: self.tiers.fetch(unit, memory, start))

    def resident(self, unit: Unit) -> Lease | None:
        """Return what holds the shard of a unit in host memory, or on the accelerator; None for others."""
        return self.tiers.lease_of(unit)

    def updated_in_place(self, unit: Unit) -> Callable[[], object]:
        """Return a wait for the new weights of a unit where they were; without an update there is none."""
        future = self._futures.get(unit.index)
        return (lambda: None) if future is None else future.wait_computed

    def at_hand(self, unit: Unit) -> bool:
        """Whether the newest weights are in the accelerator's memory, or what makes them was given to it."""
        on_device, future = self.tiers.on_device, self._futures.get(unit.index)
        if on_device is None or unit.index not in on_device:
            return False
        return future is None or future.computed.is_set()

    def fetch_waits_for(self, unit: Unit) -> str:
        """Return the cause of a wait for ``unit``'s fetch: its ``update``, or the disk's ``read``."""
        future = self._futures.get(unit.index)
        return "read" if future is None or future.done() or self._is_next(unit) else "update"

    def wait_until_unused(self, unit: Unit) -> None:
        """Return when no update reads or writes the weights that ``unit`` stayed with."""
        self.wait_for_gradients()  # its own may still be on the way to the update
        ready, future = self.ready.get(unit.index), self._futures.get(unit.index)
        if future is not None:
            future.computed.wait()
        if ready is not None:
            ready.weights = Weights()  # an update that is still to start will read them

    def drain(self) -> None:
        """Block until every update that was started has landed."""
        if self.pipeline is not None:
            self.pipeline.drain()
        for index in self.tiers.residents:
            if index in self._futures:
                self._futures[index].wait()
        self.land_gradients()
        if self.records.commits is not None:
            self.records.commits.wait()

    def abandon(self, error: BaseException) -> None:
        """End every update with ``error``, soon; what is committed on NVMe stays."""
        if self.pipeline is not None:
            self.pipeline.abandon(error)

    # --- starting ----------------------------------------------------------------------------

    def _start(self, ready: PendingUpdate, grad_scale: float) -> None:
        """Start an update with the step's numbers."""
        if ready.unit.home is Tier.NVME:
            self._launch(ready, grad_scale, UpdateState.VALIDATED)
        elif ready.unit.index in self.chosen:
            self._update_on_device(ready, grad_scale)
        else:
            self._update_resident(ready, grad_scale)

    @property
    def chosen(self) -> frozenset[int]:
        """Indices of units whose gradients stay on the accelerator, where they are updated."""
        return frozenset() if self.tiers.on_device is None else self.tiers.on_device.chosen

    def _update_on_device(self, ready: PendingUpdate, grad_scale: float) -> None:
        """Update a unit on the accelerator: see [Note: shards in host memory]."""
        unit, grad, on_device = ready.unit, ready.grad, self.tiers.on_device
        assert grad is not None
        assert on_device is not None
        resident, _ = self.tiers.about_to_update(unit)  # its values in host memory stay
        earlier = self._futures.get(unit.index)
        future = ready.future = self._futures[unit.index] = UpdateFuture()

        def ended(error: BaseException | None) -> None:
            try:
                ready.release()
            except BaseException as raised:  # of a device that does nothing any more
                error = error or raised.with_traceback(None)
            self._landed(future, error)

        try:
            on_device.update(
                unit, resident.values, lambda: ready.lease.tensor.view(grad.dtype),
                self.hypers.runs(unit, ready.used, grad_scale), earlier, ended,
            )  # fmt: skip
        except BaseException as error:
            future.finish(error)  # it may be waited for
            raise

    def _update_resident(self, ready: PendingUpdate, grad_scale: float) -> None:
        """Update a unit in its place: see [Note: shards in host memory]."""
        index, stored = ready.unit.index, self.records.take_stored(ready.unit.index)
        resident, preserve = self.tiers.about_to_update(ready.unit)
        runs, grad = self.hypers.runs(ready.unit, ready.used, grad_scale), ready.grad
        assert grad is not None

        def update() -> None:
            for transfer in stored:
                transfer.wait()
            preserve()
            weights = resident.weight
            for run in runs:
                part = slice(run.start, run.stop)
                state = tuple(f[part] for f in resident.state)
                self.rule.update(weights[part], grad[part], state, weights[part], run.hyper)
            ready.release()

        if self._beside is None:
            update()
            return
        future = ready.future = self._futures[index] = UpdateFuture()

        def beside() -> None:
            error = None
            try:
                update()
            except BaseException as raised:  # surfaces at wait
                error = raised.with_traceback(None)
            self._landed(future, error)

        self._beside.submit(beside)

    def _launch(self, ready: PendingUpdate, grad_scale: float, state: UpdateState) -> None:
        assert self.pipeline is not None
        unit = ready.unit
        ready.place = self.records.next_place(unit)
        earlier = self._futures.get(unit.index)
        if earlier is not None:
            earlier.wait()
        runs = self.hypers.runs(unit, ready.used, grad_scale)
        grad: Tensor | torch.dtype | None = ready.grad
        gradient = None
        if grad is None:
            assert ready.stored is not None
            ready.stored.wait()  # at once after land_held
            grad, gradient = self.tiers.gradient_dtype(unit), self.tiers.gradient(unit)
            self.planned_read += gradient.nbytes
        chunks = _chunks(self.tiers.version(unit), self.tiers.version(unit, ready.place), gradient)
        ready.lifecycle.move(state)  # from here on fetches know whose the update is
        ready.future = self._futures[unit.index] = future = UpdateFuture()
        weight_nbytes, state_nbytes = self._sizes(unit)
        self.planned_read += state_nbytes + (weight_nbytes if ready.weights.values is None else 0)
        self.planned_written += weight_nbytes + state_nbytes
        job = UpdateJob(
            name=unit.name, weight=ready.weights.values, grad=grad, chunks=chunks, runs=runs,
            priority=self.order.first_use(unit.index), on_computed=partial(self._computed, ready, future),
            on_done=partial(self._landed, future), in_place=ready.weights.stay,
        )  # fmt: skip
        try:
            ready.progress = self.pipeline.submit(job)
        except BaseException as error:
            future.finish(error)  # it may be waited for
            raise

    def _computed(self, ready: PendingUpdate, future: UpdateFuture) -> None:
        """The update has read what it was given; on the pipeline's thread."""
        with self._lock:
            ready.weights.release()
            ready.weights = Weights(stay=ready.weights.stay)
            if ready.stored is not None or not (self.clips and ready.speculated):
                ready.release_gradient()
            future.computed.set()

    def _landed(self, future: UpdateFuture, error: BaseException | None) -> None:
        """The end of an update; on the thread that ran it."""
        if error is not None:
            self.on_failure(error)
        future.finish(error)

    def _sizes(self, unit: Unit) -> tuple[int, int]:
        layout = self.tiers.layout
        return layout.weight_nbytes(unit.shard_numel), layout.state_nbytes(unit.shard_numel)

    # --- the end of a step ---------------------------------------------------------------------

    def _in_order_of_use(self, indices: Iterable[int]) -> list[int]:
        """Held updates start in the order in which the next forward needs them."""
        return sorted(indices, key=lambda i: (self.order.first_use(i), i))

    def _close_step(self) -> None:
        self.ready.clear()
        self.hypers.end_step()
        self._expecting = False

    def _is_next(self, unit: Unit) -> bool:
        """Whether the unit's update in flight belongs to a step that is not committed yet."""
        ready = self.ready.get(unit.index)
        return ready is not None and ready.speculated


_CHANGED = (
    "param_groups changed between backward() and step(), but updates of this step already started inside "
    "backward. Set the learning rate before backward() or after step(); or make the optimizer with "
    "max_grad_norm (math.inf: never clip), with which they start again"
)
_CLIPPED = (
    "max_grad_norm clips this step, but the optimizer was made without it, so updates of this step already "
    "started inside backward. Make the optimizer with max_grad_norm (math.inf: never clip), and change the "
    "attribute later"
)


def _chunks(committed: Version, following: Version, gradient: Extent | None = None) -> tuple[Chunk, ...]:
    """Those of an update from one version to the next, which read their parts of ``gradient``."""
    pairs = zip(committed.chunks, following.chunks, strict=True)
    chunks = tuple(Chunk(a.start, a.numel, a.weight, a.state, b.weight, b.state) for a, b in pairs)
    if gradient is None:
        return chunks
    size = gradient.nbytes // sum(chunk.numel for chunk in chunks)  # of an element
    return tuple(
        replace(chunk, grad_read=gradient.part(size * chunk.start, size * chunk.numel)) for chunk in chunks
    )


def runs_of(unit: Unit, hyper_of: Mapping[int, Tensor]) -> tuple[Run, ...]:
    """The shard's elements by the numbers of their update.

    Frozen parameters, those without a gradient, and padding are in none.

    Args:
        hyper_of: By index of the segment; parameters that have all numbers in common share the tensor.
    """
    runs: list[Run] = []
    low, high = unit.shard_start, unit.shard_start + unit.shard_numel
    joined = False  # only padding lies between the last run and this segment; it stays zero
    for segment in unit.segments:
        hyper = hyper_of.get(segment.index)
        start, stop = max(low, segment.offset) - low, min(high, segment.stop) - low
        if hyper is None:
            joined = False
        elif start < stop:
            if joined and runs[-1].hyper is hyper:
                runs[-1] = Run(runs[-1].start, stop, hyper)
            else:
                runs.append(Run(start, stop, hyper))
            joined = True
    return tuple(runs)
