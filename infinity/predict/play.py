"""Plays a whole training step on a clock: what the runtime would do, when, and what waits for what.

[Note: what is played]
The training thread goes through the runtime's own plan (:mod:`infinity.planner.prefetch_plan`): it computes,
waits for units, releases and fetches. All else goes through the runtime's queues: one for each channel, one
for the collectives, one for decoding, and a bounded number of chunks of updates in staging memory. All ranks
do the same, so one is played, with its share of what they have in common.

[Note: one queue of collectives]
All ranks issue collectives in one order, so a gather is queued when its fetch begins, and holds those behind
it until its shard is there: also reductions, whose gradients wait in device memory meanwhile.

[Note: gradients that pass]
Without an accelerator memory of a complete gradient, and of its reduction, counts until the next gradient has
begun, or backward has ended; one unit is reduced at a time, and none when a backward pass begins, as in
:mod:`infinity.engine.gradients`.

[Note: the step that repeats]
Updates lag into the next step, by more from step to step until something waits for them. So steps are played
until they repeat, and the last one counts. The first begins with its last micro-batch, the one with updates.

[Note: what ends as it begins]
A step, or a micro-batch, that ends in the state in which it began is followed by equal ones: those are not
played. Most micro-batches but the last one have the same plan, often all but the first one or two. If none of
the first few ends as it begins, the last of them is taken to.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from infinity.core.lifecycle import UpdateState
from infinity.planner.prefetch_plan import Actions, Event, Kind
from infinity.planner.simulator import Channel
from infinity.planner.updates import ChunkInFlight, ChunkQueue, Do, Job, Move, Moves, ShardUpdate
from infinity.predict.machines import COLLECTIVE_S, HEADER_S
from infinity.predict.step import (
    DECODE,
    LINKS,
    OVER,
    UPDATE,
    DeviceMemory,
    StepCost,
    StepScript,
    StepSetup,
    StepTrace,
    Stored,
    VirtualClock,
    tries,
)

#: Steps are played until so many in a row take about equally long, and so many at most.
_LEAST_STEPS, _ALIKE, _MOST_STEPS = 3, 0.005, 10
#: A unit's update is played in at most so many chunks.
_CHUNKS = 8


def play_step(trace: StepTrace, setup: StepSetup) -> StepCost:
    """Predict what a training step costs; see [Note: what is played]."""
    return _Player(trace, setup).run()


#: The training thread's work between two events of the plan: calls, seconds of compute, calls.
_Calls = list[Callable[[], object]]
_Span = tuple[_Calls, float, _Calls]


class _Player:
    """Plays a step several times; see [Note: what is played]."""

    def __init__(self, trace: StepTrace, setup: StepSetup) -> None:
        self.trace, self.setup = trace, setup
        self.script = StepScript.of(trace, setup)
        self._clock = VirtualClock(setup.rates, on_accelerator=setup.on_accelerator)
        self._memory = DeviceMemory(setup.division, self._clock)
        self._updates = _PlayedUpdates(self.script, setup, self._clock, self._memory)
        #: Items on their way, with what waits for them, or there (None).
        self._coming: dict[int, list[Callable[[], object]] | None] = {}
        self._staying: set[int] = set()
        self._gradients: dict[int, int] = {}  # device memory of a gradient that waits
        self._sums = _PlayedSums(setup, self._clock, self._memory)
        self._arriving = 0  # gradients on their way to updates
        self._reducing = 0  # those of them that are being reduced
        self._carried = False  # one of the micro-batch before was
        self._away: dict[int, bool] = {}  # activations that are loaded, and whether they are there
        times_s, places = trace.times_s(setup.rates).tolist(), trace.accumulated()[1]
        self._micro_batches = [self._spans(i, times_s, places) for i in range(self.script.earlier + 1)]

    def _spans(self, index: int, times_s: list[float], places: list[int]) -> list[_Span]:
        """Return the work of a micro-batch; ``places``: where others follow, positions of the trace."""
        trace, setup, last = self.trace, self.setup, index == self.script.earlier
        count = 1 + (len(trace.events) if last else self.script.length)
        before, after = ([_Calls() for _ in range(count)] for _ in range(2))
        work_s, at = [0.0] * count, range(count) if last else places
        for position, time_s in zip(at, times_s, strict=True):
            work_s[position] += time_s
        for each in trace.stored:
            before[at[each.load_at]].append(partial(self._load, each))
            if each.packed_at is not None:
                after[at[each.packed_at]].append(partial(self._pack, each))
        for each in trace.stored:
            before[at[each.asked_at]].append(partial(self._ask, each))
        for position, unit in trace.begun:
            if index == 0 or setup.ranks > 1 or unit in self._sums.leaving:
                after[at[position]].append(partial(self._begin_gradient, unit))
        for position, unit in trace.completed:
            # In the last micro-batch the plan's events tell those of units that stream.
            adds = setup.ranks > 1 or unit in self._sums.leaving
            if (last and not setup.units[unit].streams) or (not last and adds):
                after[at[position]].append(partial(self._end_gradient, unit, last))
        return list(zip(before, work_s, after))

    def _start(self, item: int) -> None:
        """Begin to bring an item: read, uploaded, gathered and decoded, each step when the one before ends.

        An item ``~unit`` is the stored bytes of a tile, of which its full values are made.
        """
        setup, clock, unit = self.setup, self._clock, ~item if item < 0 else item
        shape, stayed, waiting = setup.units[unit], item in self._staying, list[Callable[[], object]]()
        travels, decodes = setup.travels(unit), shape.stored_nbytes > 0 and item >= 0
        beside = shape.stored_nbytes if travels and decodes and ~item not in self._coming else 0
        if not stayed:
            self._memory.lease(setup.item_nbytes(item))
            self._memory.lease(beside)
        self._staying.discard(item)
        self._coming[item] = waiting

        def is_there() -> None:
            self._memory.give_back(beside)
            if self._coming.get(item) is waiting:
                self._coming[item] = None
            for call in waiting:
                call()

        arrived: Callable[[], object] = is_there
        if decodes:
            operators_s = shape.decode_operators * setup.rates.operator_s
            time_s = max(shape.decode_nbytes / setup.rates.decode_bytes_per_s, operators_s)
            arrived = partial(clock.serve, DECODE, time_s, is_there, setup.rates.threads)
        if item >= 0 and ~item in self._coming:
            first = self._coming[~item]
            arrived() if first is None else first.append(arrived)
        elif travels or not shape.stored_nbytes:
            self._bring(unit, arrived, stayed=stayed)
        else:
            arrived()

    def _bring(self, unit: int, arrived: Callable[[], object], *, stayed: bool) -> None:
        """Bring a unit's shard to the device, and those of other ranks; then call ``arrived``."""
        setup, clock, shape, rates = self.setup, self._clock, self.setup.units[unit], self.setup.rates
        if setup.gathers(unit):  # see [Note: one queue of collectives]
            nbytes = shape.stored_nbytes or shape.nbytes
            clock.nbytes[LINKS] += nbytes
            time_s = nbytes / rates.links_bytes_per_s + COLLECTIVE_S
            arrived = clock.serve(LINKS, time_s, arrived, rates.link_threads, ready=False)
        upload = arrived
        if unit not in self._memory.updated:
            upload = partial(clock.over_link, Channel.HOST_TO_DEVICE, setup.uploaded_nbytes(unit), arrived)
        if stayed:
            self._updates.when_computed(unit, upload)
        elif not shape.on_nvme:
            self._updates.when_landed(unit, upload)
        else:
            clock.count(Channel.NVME_READ, shape.read_nbytes)
            read = partial(clock.send, Channel.NVME_READ, shape.read_nbytes, upload)
            self._updates.when_landed(unit, read)

    def _release(self, item: int) -> None:
        if item in self._coming:
            del self._coming[item]
            self._memory.give_back(self.setup.item_nbytes(item))

    def _begin_gradient(self, unit: int) -> None:
        if unit not in self._gradients:
            if self._carried:
                self._clock.wait(lambda: not self._reducing, LINKS)
                self._carried = False
            self._gradients[unit] = self.setup.units[unit].nbytes
            if self.setup.ranks > 1 or not self._sums.take(unit):
                self._memory.lease(self.setup.units[unit].nbytes)
            self._memory.end_turn()

    def _end_gradient(self, unit: int, ends: bool) -> None:
        """Complete a unit's gradient of a micro-batch; ``ends``: it is the last one."""
        shape, setup = self.setup.units[unit], self.setup
        # It has been copied to the unit's buffer, and its norm is taken.
        self._clock.compute((3 if ends else 2) * shape.nbytes / setup.rates.memory_bytes_per_s)
        if setup.ranks == 1:
            if unit in self._sums.away:
                self._begin_gradient(unit)
            nbytes = self._gradients.pop(unit, 0)
            if ends:
                self._hand_over(unit, nbytes, self._memory.turn)
            elif nbytes:
                self._sums.put(unit, self._memory.turn)
            return
        if not self._gradients.pop(unit, 0):
            self._memory.lease(shape.nbytes)
            self._memory.end_turn()
        shard = setup.gradient_nbytes(unit)
        if self._reducing and not setup.on_accelerator:
            self._clock.wait(lambda: not self._reducing, LINKS)
        self._memory.lease(shape.nbytes)
        self._memory.lease(shard)
        if unit in self._sums.away:
            self._sums.bring_back(unit)  # while the gradient is reduced
        self._arriving += 1
        self._reducing += 1
        turn = self._memory.turn

        def reduced() -> None:
            self._arriving -= 1
            self._reducing -= 1
            for _ in range(2):  # the gradient, and what the other ranks sent
                self._memory.give_back_late(shape.nbytes, turn)
            complete = turn
            if self._sums.add(unit):  # to that of earlier micro-batches, whose turns are over
                self._memory.give_back_late(shard, turn)
                complete = OVER
            if ends:
                self._hand_over(unit, shard, complete)
            else:
                self._sums.put(unit, complete)

        self._clock.nbytes[LINKS] += shape.nbytes
        time_s = shape.nbytes / setup.rates.links_bytes_per_s + COLLECTIVE_S
        if setup.on_accelerator:  # where reductions are asked for
            self._clock.serve(LINKS, time_s + self._header_s, reduced)
            return
        self._clock.serve(LINKS, time_s, _nothing, setup.rates.link_threads)
        # The same thread adds up what has arrived, divides it, and takes its norm.
        itemsize = shape.nbytes // (shape.shard_numel * setup.ranks)
        passes = setup.ranks * (itemsize + 2 * setup.reduce_itemsize) + 2 * setup.reduce_itemsize
        self._clock.serve(LINKS, shape.shard_numel * passes / setup.rates.memory_bytes_per_s, reduced)

    def _hand_over(self, unit: int, nbytes: int, turn: int) -> None:
        """Give a gradient, complete in ``turn`` and with ``nbytes`` of device memory, to its update.

        A unit to which backward brings none has no update; see :mod:`infinity.engine.gradients`.
        """
        if unit not in self.script.trained:
            self._memory.give_back_late(nbytes, turn)
            self._memory.give_back(self._updates.weights.pop(unit, 0))
            return
        if not self.setup.on_accelerator or unit in self._memory.updated:
            self._updates.take(self._updates.expect_gradient(unit, nbytes, turn))
            return
        lags, job = not self.setup.units[unit].on_nvme, self._updates.expect_gradient(unit, 0, turn)
        self._arriving += not lags

        def arrived() -> None:
            self._arriving -= not lags
            self._memory.give_back(nbytes)
            self._updates.take(job)

        nbytes_moved = self.setup.gradient_nbytes(unit)
        self._clock.move(Channel.DEVICE_TO_HOST, nbytes_moved, arrived, order=lags and 1 + job.priority)

    def _pack(self, stored: Stored) -> None:
        write = partial(self._clock.move, Channel.NVME_WRITE, stored.nbytes, _nothing)
        self._clock.over_link(Channel.DEVICE_TO_HOST, stored.nbytes, write if stored.on_nvme else _nothing)

    def _load(self, stored: Stored) -> None:
        self._away[id(stored)] = False
        is_there = partial(self._away.__setitem__, id(stored), True)
        self._clock.bring(stored.nbytes, is_there, on_nvme=stored.on_nvme)

    def _ask(self, stored: Stored) -> None:
        if not self._away.get(id(stored), True):
            self._clock.wait(partial(self._away.__getitem__, id(stored)), "activation")
        self._away.pop(id(stored), None)

    def run(self) -> StepCost:
        """Play some steps and return the cost of the last one."""
        script, setup = self.script, self.setup
        if script.earlier:  # the step begins with its last micro-batch: the others have left these
            for item in script.present:
                self._memory.lease(setup.item_nbytes(item))
                self._coming[item] = None
            gradients = self._gradients if setup.ranks == 1 else self._sums.here
            for _, unit in self.trace.begun:
                if unit in self._sums.leaving:
                    self._sums.away[unit] = None
                else:
                    gradients[unit] = nbytes = setup.gradient_nbytes(unit)
                    self._memory.lease(nbytes)
        self._play(script.earlier)
        marks, state, before = [self._mark()], self._state, None
        while len(marks) <= (1 if script.is_long else _MOST_STEPS) and state != before:
            self._play(0)
            marks.append(self._mark())
            before, state = state, self._state
            last_s = [after.step_s - before.step_s for before, after in pairwise(marks[-_LEAST_STEPS - 1 :])]
            if len(last_s) == _LEAST_STEPS and max(last_s) <= (1 + _ALIKE) * min(last_s):
                break
        return marks[-1].plus(marks[-2], -1.0)

    @property
    def _state(self) -> object:
        """Return what the steps that follow depend on; see [Note: what ends as it begins]."""
        there = {item: waiting is None for item, waiting in self._coming.items()}
        return self._clock.waiting, self._memory.leased_nbytes, there, self._updates.state, self._arriving

    @property
    def _header_s(self) -> float:
        return HEADER_S * (self.setup.ranks - 1)

    def _mark(self) -> StepCost:
        return self._clock.mark(self._memory.peak_nbytes)

    def _play(self, first: int) -> None:
        """Play a step from the beginning of its micro-batch ``first`` to its commit."""
        script = self.script
        if self.setup.ranks > 1:
            self._clock.serve(LINKS, self._header_s, _nothing)  # of the first collective
        if first == 0:
            for item in self._coming.keys() - {*script.plan.begin}:
                self._release(item)
            for item in script.plan.begin:
                if item not in self._coming or item in self._staying:
                    self._start(item)
        self._updates.expect()
        for index in range(first, len(self._micro_batches)):
            if script.more and index == script.repeated:
                self._repeat(index, 1 + script.more)
            else:
                self._play_micro_batch(index)
        self._clock.wait(lambda: not self._arriving, LINKS)
        self._updates.commit()

    def _repeat(self, index: int, times: int) -> None:
        """Play a micro-batch ``times`` times; see [Note: what ends as it begins]."""
        most, state = tries(self.script.length + 1), self._state
        for left in reversed(range(times)):
            mark, before = self._mark(), state
            self._play_micro_batch(index)
            state = self._state
            if state == before or times - left >= most:
                self._clock.skip(self._mark().plus(mark, -1.0), left)
                return

    def _play_micro_batch(self, index: int) -> None:
        plan, spans, begin = self.script.plan, self._micro_batches[index], index * self.script.length
        for position, (before, work_s, after) in enumerate(spans, start=begin):
            for call in before:
                call()
            if work_s:
                self._clock.compute(work_s)
            for call in after:
                call()
            if position < begin + len(spans) - 1:
                self._event(plan.events[position], plan.actions[position])
        self._memory.end_turn()
        self._carried = bool(self._reducing) and not self.setup.on_accelerator

    def _event(self, event: Event, actions: Actions) -> None:
        unit, shape = event.unit, self.setup.units[event.unit]
        if event.kind is Kind.DONE:
            self._complete(unit)
        for each in actions.release:
            self._release(each)
        for each in (*actions.fetch, unit) if event.kind is Kind.USE else actions.fetch:
            if each not in self._coming:
                self._start(each)
        if event.kind is Kind.USE and self._coming[unit] is not None:
            cause = "read" if shape.on_nvme else "upload"
            cause = DECODE if self._coming.get(~unit, ()) is None else cause
            cause = "update" if self._updates.is_landing(unit) else cause
            self._clock.wait(lambda: self._coming[unit] is None, cause)

    def _complete(self, unit: int) -> None:
        """End a unit's gradient, and let go of its weights unless they stay."""
        shape, setup = self.setup.units[unit], self.setup
        if unit in self._coming:
            stays, nbytes = unit in self.script.plan.stays, 0  # of device memory for weights
            kept = shape.on_nvme and (stays or setup.division.hold_weights)
            if stays:
                self._staying.add(unit)
            elif kept and setup.ranks == 1 and not setup.on_accelerator:
                del self._coming[unit]  # the update has the full buffer
                nbytes = shape.nbytes
            else:
                if kept and not setup.on_accelerator:
                    nbytes = shape.weight_nbytes
                    self._memory.lease(nbytes)
                self._release(unit)
            if kept:
                self._updates.weights[unit] = nbytes
                self._clock.over_link(Channel.DEVICE_TO_HOST, shape.weight_nbytes, _nothing)
        if shape.trainable:
            self._end_gradient(unit, True)


class _PlayedSums:
    """Drives sums of earlier micro-batches by the clock, as :class:`infinity.engine.accumulation.Sums`."""

    def __init__(self, setup: StepSetup, clock: VirtualClock, memory: DeviceMemory) -> None:
        self._setup, self._clock, self._memory = setup, clock, memory
        self.leaving = frozenset(setup.division.spilled)  # units whose sums leave device memory
        self.here: dict[int, int] = {}  # device memory of those that stay
        self.away: dict[int, bool | None] = {}  # whether those that left are back; None: they stay away

    def put(self, unit: int, turn: int) -> None:
        """Keep a sum in device memory, which it has had since ``turn``, or let it leave."""
        nbytes, clock = self._setup.gradient_nbytes(unit), self._clock
        if unit not in self.leaving:
            self.here[unit] = nbytes
            return
        self.away[unit] = None
        give_back = partial(self._memory.give_back_late, nbytes, turn)
        if not self._setup.on_accelerator:
            clock.move(Channel.NVME_WRITE, nbytes, give_back)
            return
        clock.move(Channel.DEVICE_TO_HOST, nbytes, give_back)
        if unit in self._setup.spilled:
            clock.move(Channel.NVME_WRITE, nbytes, _nothing)

    def take(self, unit: int) -> bool:
        """Wait for a sum that left, and let the next one come; return whether there is one."""
        if unit not in self.away:
            return False
        self.bring_back(unit)
        self._clock.wait(lambda: bool(self.away[unit]), "read")
        del self.away[unit]
        if self._setup.division.ahead and self.away:
            self.bring_back(next(iter(self.away)))
        return True

    def add(self, unit: int) -> bool:
        """Add a reduced gradient to the sum; return whether there is one."""
        left = unit in self.away  # it came beside the reduction
        self.away.pop(unit, None)
        return self.here.pop(unit, 0) > 0 or left

    def bring_back(self, unit: int) -> None:
        """Begin to bring a sum back to device memory, if it is away."""
        if self.away[unit] is None:
            nbytes, self.away[unit] = self._setup.gradient_nbytes(unit), False
            self._memory.lease(nbytes)

            def is_there() -> None:
                if self.away.get(unit) is False:  # else its reduction has ended before
                    self.away[unit] = True

            self._clock.bring(nbytes, is_there, on_nvme=unit in self._setup.spilled)


@dataclass(slots=True, kw_only=True, eq=False)
class _PlayedUpdate(Job):
    """Tracks the update of a unit whose gradient of this step is complete."""

    unit: int
    update: ShardUpdate
    gradient_nbytes: int  # device memory of the gradient, which was complete in ``turn``
    turn: int
    weights_nbytes: int | None  # device memory of weights that are kept for the update; None: none are
    rest_nbytes: int = 0  # what each chunk reads beside the state: weights and gradient, if not at hand
    written_nbytes: int = 0  # by each chunk; likewise the time of its computation
    compute_s: float = 0.0
    coming: bool = True  # its gradient has yet to come
    when_computed: list[Callable[[], object]] | None = None  # calls; None: no update runs, or it is computed
    when_landed: list[Callable[[], object]] = field(default_factory=list)


def _nothing() -> None:
    """Follows what nothing waits for."""


class _PlayedUpdates:
    """Drives the updates of shards, and the queue of their chunks, by the clock."""

    def __init__(
        self, script: StepScript, setup: StepSetup, clock: VirtualClock, memory: DeviceMemory
    ) -> None:
        self._script, self._setup, self._clock, self._memory = script, setup, clock, memory
        self._queue = ChunkQueue(setup.staged_chunks)
        self.weights: dict[int, int] = {}  # of units, the device memory of those that wait for their update
        self._ready: dict[int, _PlayedUpdate] = {}  # those of this step
        self._latest: dict[int, _PlayedUpdate] = {}  # those that were started, the last of each unit

    def expect(self) -> None:
        """Let the states of this step's updates be read ahead."""
        units, order = self._setup.units, self._script.order
        trained = self._script.trained
        coming = [u for u in order.coming(early=self._setup.early) if units[u].on_nvme and u in trained]
        self._proceed(self._queue.expect(Job(name=str(u), chunks=self._chunks(u)) for u in coming))

    def expect_gradient(self, unit: int, nbytes: int, turn: int) -> _PlayedUpdate:
        """Add a unit whose gradient comes later, maybe after the commit; or has come, as :meth:`take` says.

        It has ``nbytes`` of device memory since ``turn``.
        """
        setup = self._setup
        update = ShardUpdate(
            str(unit), early=setup.early and setup.units[unit].on_nvme, keeps=setup.clips,
            spills=unit in setup.spilled,
        )  # fmt: skip
        self._ready[unit] = job = _PlayedUpdate(
            name=str(unit), chunks=self._chunks(unit), priority=self._script.order.first_use(unit),
            unit=unit, update=update, gradient_nbytes=nbytes, turn=turn,
            weights_nbytes=self.weights.pop(unit, None),
        )  # fmt: skip
        return job

    def take(self, job: _PlayedUpdate) -> None:
        """Take a gradient that has come."""
        job.coming = False
        self._on(job, job.update.complete())
        if job.update.in_flight and not self._setup.units[job.unit].on_nvme:
            self._begin(job)

    def commit(self) -> None:
        """Commit the step: publish updates, and start those that waited for it."""
        ready, self._ready = list(self._ready.values()), {}
        for job in ready:
            if job.update.speculated:
                self._on(job, job.update.validate())
        for job in ready:
            if job.unit in self._setup.spilled and job.update.lifecycle.state is UpdateState.HELD:
                self._clock.wait(lambda each=job: not each.gradient_nbytes, "write")  # type: ignore[misc]
        for job in sorted(ready, key=lambda each: each.priority):
            self._on(job, job.update.commit())

    def is_landing(self, unit: int) -> bool:
        """Return whether fetches of a unit wait for its update."""
        return unit in self._latest and self._latest[unit].update.holds_fetches

    def when_landed(self, unit: int, then: Callable[[], object]) -> None:
        """Call ``then`` once the unit's update no longer holds back fetches of the unit."""
        if self.is_landing(unit):
            self._latest[unit].when_landed.append(then)
        else:
            then()

    def when_computed(self, unit: int, then: Callable[[], object]) -> None:
        """Call ``then`` once the unit's latest update has been computed."""
        calls = self._latest[unit].when_computed if unit in self._latest else None
        if calls is not None:
            calls.append(then)
        else:
            then()

    @property
    def state(self) -> object:
        """Return how far updates are, and chunks of states, in order."""
        queue = self._queue
        jobs = [(job.name, job.started, job.computed, job.landed) for job in queue.jobs]
        return jobs, [(chunk.name, chunk.index, chunk.stage, chunk.moving) for chunk in queue.in_flight]

    def _chunks(self, unit: int) -> int:
        most = 1 if self._script.is_long else _CHUNKS
        return min(most, -(-self._setup.units[unit].shard_numel // self._setup.chunk_numel))

    def _on(self, job: _PlayedUpdate, actions: tuple[Do, ...]) -> None:
        for action in actions:
            match action:
                case Do.STORE:
                    nbytes = self._setup.gradient_nbytes(job.unit)
                    self._clock.move(Channel.NVME_WRITE, nbytes, lambda: self._on(job, job.update.stored()))
                case Do.START if self._setup.units[job.unit].on_nvme:
                    self._start(job)
                case Do.START:
                    self._update_in_memory(job)
                case Do.FREE_GRADIENT:
                    self._memory.give_back_late(job.gradient_nbytes, job.turn)
                    job.gradient_nbytes = 0
                case Do.FREE_WEIGHTS:
                    self._memory.give_back(job.weights_nbytes or 0)

    def _start(self, job: _PlayedUpdate) -> None:
        setup, unit, before = self._setup, job.unit, self._latest.get(job.unit)
        # With other ranks, or an accelerator, it is not the training thread that hands gradients over.
        if before is not None and before.update.in_flight and setup.ranks == 1 and not setup.on_accelerator:
            self._clock.wait(lambda: not before.update.in_flight, "update")
        shape = setup.units[unit]
        rest = shape.weight_nbytes if job.weights_nbytes is None else 0
        rest += setup.gradient_nbytes(unit) if job.update.reads_stored_gradient else 0
        written = shape.state_nbytes + shape.weight_nbytes
        self._clock.count(Channel.NVME_READ, shape.state_nbytes + rest)
        self._clock.count(Channel.NVME_WRITE, written)
        touched = (2 * written + setup.gradient_nbytes(unit)) / job.chunks
        job.rest_nbytes, job.written_nbytes = round(rest / job.chunks), round(written / job.chunks)
        job.compute_s = touched / setup.rates.background_bytes_per_s
        job.when_computed = []
        self._latest[unit] = job
        self._proceed(self._queue.submit(job))

    def _update_in_memory(self, job: _PlayedUpdate) -> None:
        """Update a shard in host memory, beside an accelerator on threads of its own, or on the device."""
        shape, rates = self._setup.units[job.unit], self._setup.rates
        moved = 2 * (shape.weight_nbytes + shape.state_nbytes) + self._setup.gradient_nbytes(job.unit)
        there = job.unit in self._memory.updated
        time_s = moved / (rates.memory_bytes_per_s if there else rates.update_bytes_per_s)
        if there or not self._setup.on_accelerator:
            self._clock.update(time_s)
            self._on(job, job.update.landed())
            return
        job.when_computed, job.compute_s, self._latest[job.unit] = [], time_s, job
        if not job.coming:
            self._begin(job)

    def _begin(self, job: _PlayedUpdate) -> None:
        self._clock.serve(UPDATE, job.compute_s, partial(self._end, job), order=job.priority)

    def _end(self, job: _PlayedUpdate) -> None:
        follows, job.when_computed = job.when_computed or (), None
        self._on(job, job.update.landed())
        for call in (*follows, *job.when_landed):
            call()
        job.when_landed.clear()

    def _proceed(self, moves: Moves) -> None:
        """Carry out what follows from an event, and begin what can begin now."""
        self._carry_out(moves)
        while begins := self._queue.next():
            self._carry_out(begins)

    def _carry_out(self, moves: Moves) -> None:
        for move, target in moves:
            match move:
                case Move.READ:
                    unit, rest = int(target.name), target.job.rest_nbytes if target.job else 0
                    state_nbytes = round(self._setup.units[unit].state_nbytes / self._chunks(unit))
                    self._send(target, Channel.NVME_READ, state_nbytes + rest)
                case Move.REST if target.job.rest_nbytes:
                    self._send(target, Channel.NVME_READ, target.job.rest_nbytes)
                case Move.COMPUTE:
                    computed = lambda each=target: self._proceed(self._queue.computed(each))  # noqa: E731
                    threads = self._setup.rates.background_threads
                    self._clock.serve(UPDATE, target.job.compute_s, computed, threads)
                case Move.WRITE:
                    self._send(target, Channel.NVME_WRITE, target.job.written_nbytes)
                case Move.COMPUTED:
                    self._on(target, target.update.computed())
                    follows, target.when_computed = target.when_computed or (), None
                    for call in follows:
                        call()
                case Move.ENDED:
                    self._end(target)

    def _send(self, chunk: ChunkInFlight, channel: Channel, nbytes: int) -> None:
        chunk.moving += 1
        self._clock.send(channel, nbytes, lambda: self._proceed(self._queue.moved(chunk)))
