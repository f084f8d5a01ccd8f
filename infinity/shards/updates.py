"""Updates of shards: from complete gradients to committed versions.

:class:`infinity.planner.updates.ShardUpdate` decides when an update starts, stands, is rolled back or frees
memory; this module carries out its actions with transfers, the pipeline, threads and streams.

[Note: what is forgotten] Skipping a step, or ``zero_grad()`` without ``step()``, publishes nothing: updates
are rolled back, and the next update overwrites the next version.

[Note: shards in host memory] A unit in host memory has one place, so it is only updated at ``step``. For a
commit it is also written to NVMe while the next step computes; its next update waits until these writes have
ended. Beside an accelerator, a thread updates it during the next forward, once its gradient has come, and the
unit's upload waits for that. A unit that is on the accelerator, too, is updated there
(:mod:`infinity.shards.homes`). For a commit it is brought home first, and its next update waits for nothing.

[Note: two passes of an update] Of a rule of whole matrices (:mod:`infinity.optim.matrix`) an update has a
first pass, which leaves directions in the gradient; then matrices are transformed, and a last pass begins.
One rank does so as soon as directions are there. Several exchange them at ``step``, unit by unit in the order
of their indices. Since the first pass takes the gradient's place, it starts inside backward only if no clip
coefficient can void it.
"""

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from torch import Tensor

from infinity.comm.shared import SharedSlice
from infinity.core.errors import StateError
from infinity.core.lifecycle import Tier, UpdateState
from infinity.core.nbytes import Extent, Transfer, chained
from infinity.device.memory import Lease
from infinity.optim.rules import PlacedRule, ResidentRules
from infinity.partition.unit import Segment, Unit, UpdateFuture
from infinity.planner.updates import Do, ShardUpdate, Speculation, StepOrder
from infinity.shards.homes import HostHome
from infinity.shards.journal import NOWHERE
from infinity.shards.matrices import ChunkPasses, transform_all
from infinity.shards.pipeline import Run, Runs, ShardSource, StepHypers, UpdateJob, UpdatePipeline
from infinity.shards.records import Records
from infinity.shards.tiers import Tiers

#: Calls that begin the first pass of an update, if it has two, and the last.
Passes = tuple[Callable[[], object] | None, Callable[[], object]]


class Weights(NamedTuple):
    """Committed weights of a shard in memory, if any, and where else its update writes the new ones."""

    values: Tensor | None = None  # (shard_numel,) in the compute dtype; None: the update reads them from NVMe
    lease: Lease | None = None  # given back when the update has read them; None: it is not its own
    stay: Tensor | None = None

    @classmethod
    def staying(cls, values: Tensor) -> "Weights":
        """Return weights in memory that the update replaces in place."""
        return cls(values, stay=values)

    def release(self) -> None:
        if self.lease is not None:
            self.lease.release()


@dataclass(slots=True)
class PendingUpdate:
    """A unit whose gradient of this step is complete on this rank, and its update."""

    unit: Unit
    update: ShardUpdate
    used: tuple[Segment, ...]  # parameters that have a gradient
    arrived: Transfer | None = None  # after which there is what follows; None: it is there
    grad: Tensor = field(init=False)  # (shard_numel,) in memory, as long as ``lease`` is held
    lease: Lease = field(init=False)
    weights: Weights = field(default_factory=Weights)
    sum_of_squares: float = 0.0  # known at ``step``
    grad_scale: float = 1.0  # the clip coefficient, as far as it is known
    started: "Started" = field(init=False)  # once the update has started; another one if it starts again
    stored: Transfer | None = None  # ends when the gradient is on NVMe; None: it stays in memory


@dataclass(slots=True)
class Started:
    """The jobs of an update that has started, and what they report to."""

    future: UpdateFuture
    runs: Runs
    place: int | None = None  # the version that jobs in the pipeline write
    jobs: Sequence[UpdateJob] = ()  # of its passes
    cancelled: bool = False  # no other pass begins
    last: Callable[[], object] = lambda: None  # begins the last pass
    passes: int = 1
    directed: Transfer = field(default_factory=Transfer)  # ends with the first of two passes


class StoredGradients:
    """Gradients of the ``chosen`` units, which wait on NVMe; ``planned`` counts what they move."""

    def __init__(self, tiers: Tiers, units: Sequence[Unit], planned: dict[str, int]) -> None:
        self._tiers, self._units, self._planned = tiers, units, planned
        self.chosen: frozenset[int] = frozenset()
        self._places: dict[int, Extent] = {}
        self._writes: dict[int, Transfer] = {}  # the last of each unit

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients that wait on NVMe in each step."""
        return sum(self._tiers.gradient_nbytes(self._units[index]) for index in self.chosen)

    def place_of(self, unit: Unit) -> Extent:
        """Return the place of a unit's gradient; the first call makes it."""
        if unit.index not in self._places:
            nbytes, what = self._tiers.gradient_nbytes(unit), f"the gradient of {unit.name}"
            self._places[unit.index] = self._tiers.store.volume.allocate(nbytes, what=what)
        return self._places[unit.index]

    def write(self, unit: Unit, lease: Lease) -> Transfer:
        """Start to write a unit's gradient, once nothing uses its place any more."""
        self._wait_for_place(unit.index)
        place = self.place_of(unit)
        self._planned["write"] += place.nbytes
        stored = self._tiers.store.engine.write(place, lease.memory[: place.nbytes])
        self._writes[unit.index] = stored
        return stored

    def read(self, unit: Unit, lease: Lease) -> Transfer:
        """Start to read what was written last, once it is there."""
        place, engine = self.place_of(unit), self._tiers.store.engine
        self._planned["read"] += place.nbytes
        memory = lease.memory[: place.nbytes]
        return chained(self._writes[unit.index], partial(engine.read, place, memory))

    def _wait_for_place(self, index: int) -> None:
        updating, written = self._units[index].home.updating, self._writes.get(index)
        if updating is not None:
            updating.wait()
        if written is not None:
            with suppress(OSError):  # who needed what was written has raised it
                written.wait()

    def place(self, indices: frozenset[int], in_use: Iterable[int]) -> None:
        """Store gradients of exactly these units from the next step on; places ``in_use`` stay."""
        self.chosen = indices
        for index in self._places.keys() - indices - set(in_use):
            self._wait_for_place(index)
            self._tiers.store.volume.free(self._places.pop(index))
        for index in sorted(indices):
            self.place_of(self._units[index])

    def land(self) -> None:
        """Block until no gradient is on its way to NVMe; DiskError: one could not be written."""
        for stored in self._writes.values():
            stored.wait()


class Updates:
    """Takes in complete gradients, and updates and commits shards.

    Args:
        rules: Update shards in host memory.
        pipeline: Updates shards on NVMe; None: all are resident.
        clips: Gradients are clipped, and kept until ``step()``.
        every: As for :class:`CommitInterval`.
        on_failure: Called with the error of an update or of a gradient on its way to it, on any thread.
    """

    def __init__(
        self, tiers: Tiers, rules: ResidentRules, pipeline: UpdatePipeline | None, units: Sequence[Unit], *,
        clips: bool, every: int | None, on_failure: Callable[[BaseException], None],
    ) -> None:  # fmt: skip
        self.tiers, self.rules, self.pipeline, self.on_failure = tiers, rules, pipeline, on_failure
        two_versions = tiers.storage.memory.versions == 2
        self.order, self.speculation = StepOrder(), Speculation(two_versions=two_versions, clips=clips)
        self._expecting = False  # of this step
        self._incoming: list[Transfer] = []  # after which gradients have been added
        self.hypers = StepHypers(tiers.storage.rule, units, tiers.ranks)
        self.ready: dict[int, PendingUpdate] = {}  # of this step, by index of the unit
        for unit in units:
            unit.home.updating = None  # of an optimizer before
        self.records = Records(tiers, units, every, self.speculation)
        self.stored_gradients = StoredGradients(tiers, units, self.records.planned)
        self._lock = threading.Lock()  # guards the states of updates

    def announce(self, incoming: Transfer) -> None:
        """Expect a gradient that :meth:`add` gets before ``incoming`` ends; any thread."""
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
        """Take in a shard's complete gradient, ``(shard_numel,)``, and the sum of its squares; any thread.

        Args:
            grad: In ``lease``: host memory, or the accelerator's for units that are updated there.
            used: Parameters of the unit that any rank has a gradient of; the others are left alone.
        """
        self.take(self.expect_gradient(unit, used), grad, squares, lease, weights)

    def expect_gradient(self, unit: Unit, used: tuple[Segment, ...]) -> PendingUpdate:
        """Add a unit whose gradient :meth:`take` gets when it has ``arrived``, maybe after ``step``."""
        self.hypers.begin_step()
        update = ShardUpdate(
            unit.name, early=self.early and unit.home.tier is Tier.NVME, keeps=self.speculation.clips,
            spills=unit.index in self.stored_gradients.chosen,
        )  # fmt: skip
        pending = self.ready[unit.index] = PendingUpdate(unit, update, used)
        return pending

    def take(
        self, pending: PendingUpdate, grad: Tensor, squares: float | None, lease: Lease, weights: Weights
    ) -> None:
        """Take in what has come; ``squares`` None: ``step`` reads them, maybe at this moment."""
        pending.grad, pending.lease, pending.weights = grad, lease, weights
        if squares is not None:
            pending.sum_of_squares = squares
        self._on(pending, partial(pending.update.complete, finite=squares is None or math.isfinite(squares)))

    def _on(self, pending: PendingUpdate, event: Callable[[], tuple[Do, ...]]) -> None:
        """Tell an update what has happened, and carry out the actions that follow; any thread."""
        with self._lock:
            actions = event()
        for action in actions:
            match action:
                case Do.STORE:
                    pending.stored = self.stored_gradients.write(pending.unit, pending.lease)
                    pending.stored.then(lambda: self._on(pending, pending.update.stored))
                case Do.START:
                    self._start(pending)
                case Do.CANCEL:
                    assert self.pipeline is not None
                    with self._lock:
                        pending.started.cancelled = True
                    for job in pending.started.jobs:
                        self.pipeline.cancel(job)
                case Do.FREE_GRADIENT:
                    pending.lease.release()
                case Do.FREE_WEIGHTS:
                    pending.weights.release()
                    pending.weights = Weights(stay=pending.weights.stay)

    def land_held(self) -> None:
        """Block until the gradients that :meth:`commit` reads are on NVMe; DiskError: one is not."""
        for pending in self.ready.values():
            if pending.stored is not None and pending.update.lifecycle.state is not UpdateState.VALIDATED:
                pending.stored.wait()

    @property
    def early(self) -> bool:
        """Whether updates of this step start inside backward; see [Note: two passes of an update]."""
        if not self.tiers.storage.rule.in_one_pass and (self.speculation.clips or self._in_turn):
            return False
        return self.speculation.early and bool(self.hypers.groups) and not self.hypers.wrong

    @property
    def _in_turn(self) -> bool:
        """Whether matrices are transformed at ``step``, in the same order on every rank."""
        return self.tiers.ranks.world_size > 1 or self.tiers.storage.rule.in_turn

    def expect(self) -> None:
        """Let the states for this step's updates be read before their gradients exist."""
        if self.pipeline is None or self._expecting:
            return
        self._expecting = True
        self.hypers.look()
        if self.hypers.wrong:
            return
        units = self.records.units
        spilled = frozenset() if self.early else self.stored_gradients.chosen
        self.pipeline.expect(
            (units[index].name, self._source(units[index], index in spilled))
            for index in self.order.coming(early=self.early)
            if units[index].home.tier is Tier.NVME
        )

    def validate(self, grad_scale: float) -> bool:
        """Let speculated updates stand if their numbers were right; False: call :meth:`roll_back` next.

        Raises a StateError if they were wrong, and the gradients were not kept.
        """
        changed = self.hypers.changed
        right = grad_scale == 1.0 and not changed
        speculated = self._speculated()
        if speculated and not (right or self.speculation.clips):
            raise StateError(_CHANGED if changed else _CLIPPED)
        self.speculation.learn(len(speculated), right=right)
        if changed:
            self.hypers.end_step()
        for pending in speculated if right else ():
            self._on(pending, pending.update.validate)
        return right or not speculated

    def _speculated(self) -> list[PendingUpdate]:
        return [pending for pending in self.ready.values() if pending.update.speculated]

    def roll_back(self, among: Iterable[PendingUpdate] | None = None) -> None:
        """Void the speculated updates (of ``among``); block until none writes to a next version any more."""
        speculated = [each for each in among or self.ready.values() if each.update.speculated]
        for pending in speculated:
            self._on(pending, pending.update.roll_back)
        for pending in speculated:
            pending.started.future.wait()
            if pending.weights.stay is not None:
                pending.weights = Weights(stay=pending.weights.stay)  # some of them may be new ones
            for job in pending.started.jobs:
                self.records.planned["read"] -= job.read_nbytes(job.unread)
                self.records.planned["write"] -= job.written_nbytes(job.unwritten)

    def commit(self, grad_scales: Mapping[object, float]) -> None:
        """Commit the step: publish validated updates, start the others, each with its party's scale."""
        for index in self.order.by_use(self.ready):
            pending = self.ready[index]
            pending.grad_scale = grad_scales[self.hypers.party(pending.used)]
            self._on(pending, pending.update.commit)
            self.hypers.count(pending.used)
            home = pending.unit.home
            home.reloadable = False
            pending.unit.renew()
            if pending.started.place is not None:
                home.version = pending.started.place
        self._begin_last_passes()
        self.records.end_step()
        self._close_step()

    def _begin_last_passes(self) -> None:
        """Exchange directions between ranks and begin the last passes, in the same order on every rank."""
        if self._in_turn:
            error, loads = None, list[int]()
            for _, pending in sorted(self.ready.items()):
                if pending.started.passes == 2 and error is None:
                    error = self._go_on(pending, loads)
                elif pending.started.passes == 2:
                    pending.started.future.finish(error)  # it may be waited for
            if error is not None:
                raise error

    def _transform(self, pending: PendingUpdate, loads: list[int] | None = None) -> None:
        if pending.started.runs.matrices:
            transform_all(self.tiers.ranks, pending.unit, pending.started.runs, pending.grad, loads)

    def forget(self) -> None:
        """Drop this step's gradients and updates; the committed version stays."""
        if self.ready:
            self.speculation.started = self.speculation.rolled_back = len(self._speculated())
            self.drop(self.ready)
        self._close_step()

    def drop(self, indices: Iterable[int]) -> None:
        """Drop gradients and updates of these units; the others may still be committed."""
        dropped = {index: self.ready[index] for index in indices}
        for pending in dropped.values():
            if pending.arrived is not None:
                pending.arrived.wait()
        if dropped:
            self.roll_back(dropped.values())
        for index, pending in dropped.items():
            self._on(pending, pending.update.drop)
            del self.ready[index]

    def _close_step(self) -> None:
        self.ready.clear()
        self.hypers.end_step()
        self._expecting = False

    def wait_until_unused(self, unit: Unit) -> None:
        """Block until no update reads or writes the full weights that ``unit`` still has in memory."""
        self.wait_for_gradients()  # its own may still be on the way to the update
        pending, future = self.ready.get(unit.index), unit.home.updating
        if future is not None:
            future.computed.wait()
        if pending is not None:
            pending.weights = Weights()  # an update that is still to start will read them

    def drain(self) -> None:
        """Block until every update that was started has landed."""
        if self.pipeline is not None:
            self.pipeline.drain()
        for unit in self.records.units:
            if unit.home.tier is Tier.HOST and unit.home.updating is not None:
                unit.home.updating.wait()
        self.stored_gradients.land()
        if self.records.commits is not None:
            self.records.commits.wait()

    @property
    def chosen(self) -> frozenset[int]:
        """Indices of units whose gradients stay on the accelerator, where they are updated."""
        return frozenset() if self.tiers.on_device is None else self.tiers.on_device.chosen

    def _start(self, pending: PendingUpdate) -> None:
        unit, future = pending.unit, UpdateFuture(pending.update)
        runs = self.hypers.runs(unit, pending.used, pending.grad_scale)
        started = pending.started = Started(future, runs)
        try:
            if unit.home.tier is Tier.NVME:
                first, started.last = self._in_pipeline(pending)
            elif unit.index in self.chosen:
                first, started.last = None, self._on_device(pending)
            else:
                first, started.last = self._in_place(pending)
            unit.home.updating = future  # from here on fetches wait for it
            if first is not None:
                started.passes = 2
                if not self._in_turn:
                    started.directed.then(partial(self._go_on, pending))
            (first or started.last)()
        except BaseException as error:
            future.finish(error)  # it may be waited for
            raise

    def _on_device(self, pending: PendingUpdate) -> Callable[[], object]:
        home, dtype, on_device = pending.unit.home, pending.grad.dtype, self.tiers.on_device
        assert on_device is not None
        assert isinstance(home, HostHome)
        home.recorded = False  # its values in host memory stay
        return partial(
            on_device.update, pending.unit, home, lambda: pending.lease.tensor.view(dtype),
            pending.started.runs, home.updating, partial(self._landed, pending),
            partial(self._transform, pending),
        )  # fmt: skip

    def _in_place(self, pending: PendingUpdate) -> Passes:
        home, started = pending.unit.home, pending.started
        assert isinstance(home, HostHome)
        home.recorded = False
        preserve = self.tiers.snapshot.preserve  # of the snapshot now: a later one has the new values
        storing, home.storing = home.storing, ()

        def play(runs: Sequence[Run], then: Callable[[BaseException | None], None], rule: PlacedRule) -> None:
            error: BaseException | None = None
            try:
                if pending.arrived is not None:
                    pending.arrived.wait()  # it has ended, maybe with an error
                for transfer in storing:  # writes and saves of the old values read them first
                    transfer.wait()
                preserve(pending.unit.index)
                for run in runs:
                    part = slice(run.start, run.stop)
                    grad, state = pending.grad[part], home.layout.part(home.state, run.start, run.stop)
                    weights = home.weight[part] if runs is started.runs.last else grad
                    rule.update(weights, grad, state, weights, run.hyper, run.rule)
            except BaseException as raised:  # surfaces at wait
                if self.rules.threads is None:
                    raise
                error = raised.with_traceback(None)
            then(error)

        def begin(runs: Sequence[Run], then: Callable[[BaseException | None], None]) -> None:
            run = partial(self.rules.run, partial(play, runs, then), self.order.first_use(pending.unit.index))
            run() if pending.arrived is None else pending.arrived.then(run)

        buffer, runs = home.leases[0].buffer, started.runs
        if isinstance(buffer, SharedSlice):
            buffer.follow(started.future)
        first = partial(begin, runs.first, started.directed.finish)
        last = partial(begin, runs.last, partial(self._landed, pending))
        return first if runs.matrices else None, last  # on all ranks, or on none

    def _go_on(self, pending: PendingUpdate, loads: list[int] | None = None) -> BaseException | None:
        """Begin the last pass when the first has ended; return the error that ended the update."""
        started, error = pending.started, None
        try:
            started.directed.wait()
            if not started.cancelled:
                self._transform(pending, loads)
            with self._lock:
                ends = started.cancelled
            if not ends:
                started.last()
                return None
        except BaseException as raised:
            error = raised
        for job in started.jobs[1:]:
            job.unread, job.unwritten = range(job.chunks), tuple(range(job.chunks))  # it never began
        self._landed(pending, error)
        return error

    def _in_pipeline(self, pending: PendingUpdate) -> Passes:
        """Return calls that update a unit on NVMe by chunks, from its committed version to the next."""
        assert self.pipeline is not None
        unit, spilled = pending.unit, pending.update.reads_stored_gradient
        started, disk = pending.started, self.tiers.trained_disk(unit)
        started.place = self.records.next_place(unit)
        for earlier in (unit.home.updating, pending.stored if spilled else None):
            if earlier is not None:
                earlier.wait()  # a stored gradient has landed if land_held was called
        job = partial(UpdateJob, name=unit.name, priority=self.order.first_use(unit.index))
        source, writes, first = self._source(unit, spilled), disk.at(started.place), None
        if (passes := self._passes(unit)) is not None:
            first = job(
                source=source, writes=passes.first(writes), weight=None, grad=pending.grad, directs=True,
                runs=started.runs.first, on_computed=lambda: None, on_done=started.directed.finish,
            )  # fmt: skip
            source = replace(source, version=passes.last(disk.committed, writes))
            writes = passes.last(writes, writes)
        last = job(
            source=source, writes=writes, weight=pending.weights.values, in_place=pending.weights.stay,
            grad=None if spilled else pending.grad, runs=started.runs.last,
            on_computed=partial(self._computed, pending), on_done=partial(self._landed, pending),
        )  # fmt: skip
        started.jobs = [each for each in (first, last) if each is not None]
        for each in started.jobs:
            self.records.planned["read"] += each.read_nbytes(range(each.chunks))
            self.records.planned["write"] += each.written_nbytes(range(each.chunks))
        submit = self.pipeline.submit
        return None if first is None else partial(submit, first), partial(submit, last)

    def _passes(self, unit: Unit) -> ChunkPasses | None:
        """Return what two passes of a unit on NVMe move; None: none of its parameters is a matrix."""
        ways = {segment.index: self.hypers.way(segment) for segment in unit.segments}
        matrices = {index: way for index, way in ways.items() if way is not None and way.matrices}
        return ChunkPasses(unit, matrices) if matrices else None

    def _source(self, unit: Unit, spilled: bool) -> ShardSource:
        """Return what the first job of a unit's update reads."""
        gradient = self.stored_gradients.place_of(unit) if spilled else NOWHERE
        version, passes = self.tiers.trained_disk(unit).committed, self._passes(unit)
        version = version if passes is None else passes.first(version)
        return ShardSource(version, gradient, self.tiers.gradient_dtype(unit))

    def _computed(self, pending: PendingUpdate) -> None:
        self._on(pending, pending.update.computed)
        pending.started.future.computed.finish()

    def _landed(self, pending: PendingUpdate, error: BaseException | None) -> None:
        """End an update; called on the thread that ran it."""
        try:
            self._on(pending, pending.update.landed)
        except BaseException as raised:  # of a device that does nothing any more
            error = error or raised.with_traceback(None)
        try:
            if error is not None:
                self.on_failure(error)
        finally:
            pending.started.future.finish(error)  # the thread that writes commits waits for it


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
