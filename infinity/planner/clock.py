"""Plays a whole training step on a clock: what the runtime would do, when, and what waits for what.

[Note: what is played]
The training thread goes through the runtime's own plan (:mod:`infinity.planner.prefetch_plan`): it computes,
waits for units, releases and fetches. Beside it move fetches (NVMe to host memory), uploads, gathers,
decoding, reductions, gradients' copies, and the chunks of updates, through the queues that the runtime has:
one for each channel, one for the collectives, one for decoding, and a bounded number of chunks in staging
memory. Device memory is leased and given back as the pools do, and a lease that finds no room waits. All
ranks do the same, so one is played, with its share of what they have in common.

[Note: one queue of collectives]
A gather is queued when its fetch begins, so that all ranks issue collectives in one order, and holds those
behind it until its shard is there: also reductions, whose gradients wait in device memory meanwhile.

[Note: gradients that pass]
Without an accelerator memory of a complete gradient, and of its reduction, counts until the next gradient has
begun, or backward has ended; one unit is reduced at a time, and none when a backward pass begins, as in
:mod:`infinity.engine.gradients`.

[Note: the step that repeats]
Updates lag into the next step, by more from step to step until something waits for them. So steps are played
until they repeat, and the last one counts; its bytes are those of its own transfers, whenever they move. The
first of them begins with its last micro-batch, which is the one that has updates.

[Note: micro-batches that repeat]
All micro-batches but the last one use the same units in the same order, and from the second or third one on
their plan is the same (``Plan.repeats``). Such a micro-batch is played until it ends in the state in which it
began; then each further one takes what it took. Where that does not happen in the first few, it is taken to
be so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from infinity.core.lifecycle import UpdateState
from infinity.planner.channels import Channel
from infinity.planner.events import DECODE, LINKS, UPDATE, DeviceMemory, StepCost, Task, VirtualClock
from infinity.planner.machines import COLLECTIVE_S
from infinity.planner.prefetch_plan import Event, Kind
from infinity.planner.step import MicroBatch, StepScript, StepSetup, StepTrace, Stored, tries
from infinity.planner.updates import ChunkInFlight, ChunkQueue, Do, Job, Move, Moves, ShardUpdate

#: Steps are played until so many take about as long as each other, and so many at most.
_LEAST_STEPS, _ALIKE, _MOST_STEPS = 3, 0.005, 10


def play_step(trace: StepTrace, setup: StepSetup) -> StepCost:
    """Predict what a training step costs; see [Note: what is played]."""
    return _Player(StepScript.of(trace, setup), setup).run()


def _are_alike(marks: Sequence[StepCost]) -> bool:
    """Return whether steps repeat: the last few took about as long."""
    last = [after.step_s - before.step_s for before, after in pairwise(marks[-_LEAST_STEPS - 1 :])]
    return len(last) == _LEAST_STEPS and max(last) <= (1 + _ALIKE) * min(last)


class _Player:
    """Plays a script for some steps; see [Note: what is played]."""

    def __init__(self, script: StepScript, setup: StepSetup) -> None:
        self.script, self.setup, self.units = script, setup, setup.units
        self._clock = VirtualClock(setup.rates)
        self._memory = DeviceMemory(setup.division, on_accelerator=setup.on_accelerator)
        self._updates = PlayedUpdates(script, setup, self._clock, self._memory)
        self._on_device = frozenset(setup.division.on_device)
        self._ready: dict[int, bool] = {}  # units on their way, or there
        self._staying: set[int] = set()
        self._gradients: dict[int, int] = {}  # device memory of a gradient that waits
        self._reduced: dict[int, int] = {}  # device memory of gradient shards that add up
        self._arriving = 0  # gradients on their way to updates
        self._reducing = 0  # those of them that are being reduced
        self._carried = False  # one of the micro-batch before was
        self._away: dict[int, bool] = {}

    # --- units ---------------------------------------------------------------------------------

    def _lease(self, nbytes: int) -> None:
        """Take device memory; wait until there is room."""
        if not self._memory.has_room(nbytes):
            self._memory.end_turn()
            self._clock.wait(lambda: self._memory.has_room(nbytes), "memory")
        self._memory.take(nbytes)

    def _gather(self, unit: int, then: Callable[[], None]) -> Callable[[], None]:
        """Queue a unit's gather; return what says that this rank's shard is there."""
        if self.setup.ranks == 1:
            return then
        shape = self.units[unit]
        nbytes = shape.nbytes if shape.stored is None else shape.stored.nbytes
        self._clock.nbytes[LINKS] += nbytes
        rates = self.setup.rates
        job = Task(nbytes / rates.gather_bytes_per_s + COLLECTIVE_S, then, rates.link_threads, ready=False)
        self._clock.servers[LINKS].submit(job)
        return partial(self._clock.servers[LINKS].ready, job)

    def _start(self, unit: int) -> None:
        """Begin to bring a unit's full values."""
        shape = self.units[unit]
        stayed = unit in self._staying
        stored_nbytes = 0 if shape.stored is None else shape.stored.nbytes
        if not (shape.on_nvme or self.setup.on_accelerator or self.setup.ranks > 1):
            stored_nbytes = 0  # decoded from where it lies
        if not stayed:
            self._lease(shape.nbytes)
            self._lease(stored_nbytes)
        self._staying.discard(unit)
        self._ready[unit] = False

        def decoded() -> None:
            self._memory.give_back(stored_nbytes)
            self._ready[unit] = True

        def gathered() -> None:
            if shape.stored is None:
                self._ready[unit] = True
            else:
                rates = self.setup.rates
                self._clock.serve(DECODE, shape.stored.decode_s(rates), decoded, rates.threads)

        arrived = self._gather(unit, gathered)

        def upload() -> None:
            if self.setup.on_accelerator and unit not in self._on_device:
                self._clock.move(Channel.HOST_TO_DEVICE, shape.moved_nbytes, arrived)
            else:
                arrived()

        if stayed:
            self._updates.when_computed(unit, upload)
        elif not shape.on_nvme:
            upload()
        else:
            self._clock.count(Channel.NVME_READ, shape.read_nbytes)
            read = partial(self._clock.send, Channel.NVME_READ, shape.read_nbytes, upload)
            self._updates.when_landed(unit, read)

    def _release(self, unit: int) -> None:
        if self._ready.pop(unit, None) is not None:
            self._memory.give_back(self.units[unit].nbytes)

    def _use(self, unit: int) -> None:
        if unit not in self._ready:
            self._start(unit)
        if not self._ready[unit]:
            cause = "read" if self.units[unit].on_nvme else "upload"
            cause = "update" if self._updates.is_landing(unit) else cause
            self._clock.wait(lambda: self._ready[unit], cause)

    # --- gradients -----------------------------------------------------------------------------

    def _accumulate(self, unit: int) -> None:
        """A unit has a gradient of earlier micro-batches."""
        shape, setup = self.units[unit], self.setup
        gradients = self._gradients if setup.ranks == 1 else self._reduced
        gradients[unit] = shape.nbytes if setup.ranks == 1 else setup.gradient_nbytes(unit)
        self._lease(gradients[unit])

    def _begin_gradient(self, unit: int) -> None:
        if unit not in self._gradients:
            if self._carried:
                self._clock.wait(lambda: not self._reducing, LINKS)
                self._carried = False
            self._gradients[unit] = self.units[unit].nbytes
            self._lease(self.units[unit].nbytes)
            self._memory.end_turn()

    def _end_gradient(self, unit: int, ends: bool) -> None:
        """A unit's gradient of a micro-batch is complete."""
        shape, setup = self.units[unit], self.setup
        # It has been copied to the unit's buffer, and its norm is taken.
        self._clock.compute((3 if ends else 2) * shape.nbytes / setup.rates.memory_bytes_per_s)
        if setup.ranks == 1:
            if ends:
                self._hand_over(unit, self._gradients.pop(unit, 0), self._memory.turn)
            return
        full = self._gradients.pop(unit, 0)
        if not full:
            self._lease(shape.nbytes)
            self._memory.end_turn()
            full = shape.nbytes
        shard = setup.gradient_nbytes(unit)
        if self._reducing and not setup.on_accelerator:
            self._clock.wait(lambda: not self._reducing, LINKS)
        self._lease(shape.nbytes)
        self._lease(shard)
        self._arriving += 1
        self._reducing += 1
        turn = self._memory.turn

        def reduced() -> None:
            self._arriving -= 1
            self._reducing -= 1
            self._memory.give_back_late(full, turn)
            self._memory.give_back_late(shape.nbytes, turn)
            if unit in self._reduced:  # it was added to that of earlier micro-batches
                self._memory.give_back_late(shard, turn)
            self._reduced[unit] = shard
            if ends:
                self._hand_over(unit, self._reduced.pop(unit), turn)

        self._clock.nbytes[LINKS] += shape.nbytes
        time_s = shape.nbytes / setup.rates.reduce_bytes_per_s + COLLECTIVE_S
        if setup.on_accelerator:
            self._clock.serve(LINKS, time_s, reduced)
            return
        self._clock.serve(LINKS, time_s, lambda: None, setup.rates.link_threads)
        # The same thread adds up what has arrived, divides it, and takes its norm.
        itemsize = shape.nbytes // (shape.shard_numel * setup.ranks)
        passes = setup.ranks * (itemsize + 2 * setup.reduce_itemsize) + 2 * setup.reduce_itemsize
        self._clock.serve(LINKS, shape.shard_numel * passes / setup.rates.memory_bytes_per_s, reduced)

    def _hand_over(self, unit: int, nbytes: int, turn: int) -> None:
        """Give a gradient, complete in ``turn`` and with ``nbytes`` of device memory, to its update."""
        if not self.setup.on_accelerator or unit in self._on_device:
            self._updates.add(unit, nbytes, turn)
            return
        self._arriving += 1

        def arrived() -> None:
            self._arriving -= 1
            self._memory.give_back(nbytes)
            self._updates.add(unit, 0, turn)

        self._clock.move(Channel.DEVICE_TO_HOST, self.setup.gradient_nbytes(unit), arrived)

    # --- the step ------------------------------------------------------------------------------

    def run(self) -> StepCost:
        """Play some steps and return what the last one took."""
        script, last = self.script, self.script.micro_batches[-1]
        for unit in script.present if last.begin else ():
            self._lease(self.units[unit].nbytes)
            self._ready[unit] = True
        for units in script.micro_batches[0].begun.values() if last.begin else ():
            for unit in units:
                self._accumulate(unit)
        self._play([last], 0)
        marks = [self._mark()]
        while len(marks) <= (1 if script.is_long else _MOST_STEPS) and not _are_alike(marks):
            self._play(script.micro_batches, script.more)
            marks.append(self._mark())
        return marks[-1].plus(marks[-2], -1.0)

    def _mark(self) -> StepCost:
        return self._clock.mark(self._memory.peak_nbytes)

    def _play(self, micro_batches: Sequence[MicroBatch], more: int) -> None:
        """Play one step, from its first fetch to its commit.

        Args:
            more: Micro-batches that are like the one that repeats, and not among those.
        """
        script = self.script
        for unit in script.plan.begin if micro_batches[0].begin == 0 else ():
            if unit not in self._ready or unit in self._staying:
                self._start(unit)
        self._updates.expect()
        for index, micro_batch in enumerate(micro_batches):
            if more and index == script.repeated:
                self._repeat(micro_batch, 1 + more)
            else:
                self._play_one(micro_batch)
        self._clock.wait(lambda: not self._arriving, LINKS)
        self._updates.commit()

    def _repeat(self, micro_batch: MicroBatch, times: int) -> None:
        """Play a micro-batch so many times; see [Note: micro-batches that repeat]."""
        before, most = self._state(), tries(len(micro_batch.compute_s))
        for left in reversed(range(times)):
            mark = self._mark()
            self._play_one(micro_batch)
            after = self._state()
            if before == after or times - left >= most:
                self._clock.skip(self._mark().plus(mark, -1.0), left)
                return
            before = after

    def _state(self) -> tuple[object, ...]:
        """Return all that the rest of a step follows from, besides what is played; equal up to rounding."""
        return (
            self._memory.state(), self._clock.state(), self._updates.state(), self._arriving,
            dict(self._ready), self._staying.copy(), dict(self._gradients), dict(self._reduced),
            dict(self._away),
        )  # fmt: skip

    def _play_one(self, micro_batch: MicroBatch) -> None:
        plan = self.script.plan
        last = len(micro_batch.compute_s) - 1
        for position, compute_s in enumerate(micro_batch.compute_s):
            self._before(micro_batch, position)
            if compute_s:
                self._clock.compute(compute_s)
            self._after(micro_batch, position)
            if position < last:
                self._event(plan.events[micro_batch.begin + position])
                actions = plan.actions[micro_batch.begin + position]
                for unit in actions.release:
                    self._release(unit)
                for unit in actions.fetch:
                    if unit not in self._ready:
                        self._start(unit)
        self._memory.end_turn()
        self._carried = bool(self._reducing) and not self.setup.on_accelerator

    def _before(self, micro_batch: MicroBatch, position: int) -> None:
        for stored in micro_batch.loads.get(position, ()):
            self._load(stored)
        for stored in micro_batch.asks.get(position, ()):
            if not self._away.get(id(stored), True):
                self._clock.wait(partial(self._away.__getitem__, id(stored)), "activation")
            self._away.pop(id(stored), None)

    def _load(self, stored: Stored) -> None:
        self._away[id(stored)] = False

        def there() -> None:
            self._away[id(stored)] = True

        def upload() -> None:
            if self.setup.on_accelerator:
                self._clock.move(Channel.HOST_TO_DEVICE, stored.nbytes, there)
            else:
                there()

        if stored.on_nvme:
            self._clock.move(Channel.NVME_READ, stored.nbytes, upload)
        else:
            upload()

    def _after(self, micro_batch: MicroBatch, position: int) -> None:
        for stored in micro_batch.packs.get(position, ()):

            def write(stored: Stored = stored) -> None:
                if stored.on_nvme:
                    self._clock.move(Channel.NVME_WRITE, stored.nbytes, lambda: None)

            if self.setup.on_accelerator:
                self._clock.move(Channel.DEVICE_TO_HOST, stored.nbytes, write)
            else:
                write()
        for unit in micro_batch.begun.get(position, ()):
            self._begin_gradient(unit)
        for unit, ends in micro_batch.completed.get(position, ()):
            self._end_gradient(unit, ends)

    def _event(self, event: Event) -> None:
        if event.kind is Kind.USE:
            self._use(event.unit)
        elif event.kind is Kind.DONE:
            unit = event.unit
            shape = self.units[unit]
            if unit in self._ready:
                stays, kept = unit in self.script.plan.stays, self.script.kept[unit] and shape.on_nvme
                if stays:
                    self._staying.add(unit)
                elif kept and self.setup.ranks == 1 and not self.setup.on_accelerator:
                    del self._ready[unit]  # the update has the full buffer
                    self._updates.weights[unit] = shape.nbytes
                else:
                    if kept and not self.setup.on_accelerator:
                        self._lease(shape.weight_nbytes)
                        self._updates.weights[unit] = shape.weight_nbytes
                    self._release(unit)
                if kept and self.setup.on_accelerator:
                    self._clock.move(Channel.DEVICE_TO_HOST, shape.weight_nbytes, lambda: None)
            if shape.trainable:
                self._end_gradient(unit, True)


#: A unit's update is played in at most so many chunks.
_CHUNKS = 8


@dataclass(slots=True, kw_only=True, eq=False)
class _ShardJob(Job):
    """The computation of an update, with the bytes of each of its chunks.

    Attributes:
        rest_nbytes: Bytes read beside the state: weights and gradient, where they are not at hand.
        compute_s: Time that the rule takes (s).
    """

    pending: "_Pending"
    rest_nbytes: int
    written_nbytes: int
    compute_s: float


@dataclass(slots=True, eq=False)
class _Pending:
    """A unit whose gradient of this step is complete.

    Attributes:
        nbytes: Device memory of the gradient, which was complete in ``turn``; ``weights_nbytes`` of weights
            that are kept for the update.
        computed: Calls that follow when the new weights exist; None: they do, or no update runs.
        landed: Calls that follow when its writes have ended.
    """

    unit: int
    update: ShardUpdate
    nbytes: int
    turn: int
    weights_nbytes: int
    computed: list[Callable[[], None]] | None = None
    landed: list[Callable[[], None]] = field(default_factory=list)


class PlayedUpdates:
    """Drives the updates of shards, and the queue of their chunks, by the clock.

    Attributes:
        weights: Device memory of weights that wait for their unit's update.
    """

    def __init__(
        self, script: StepScript, setup: StepSetup, clock: VirtualClock, memory: DeviceMemory
    ) -> None:
        self._script, self._setup, self._clock, self._memory = script, setup, clock, memory
        self._queue = ChunkQueue(setup.staged_chunks)
        self.weights: dict[int, int] = {}
        self._ready: dict[int, _Pending] = {}  # those of this step
        self._latest: dict[int, _Pending] = {}  # those that were started, the last of each unit

    def expect(self) -> None:
        """Let the states of this step's updates be read ahead."""
        script, units = self._script, self._setup.units
        order = [event.unit for event in script.plan.events if event.kind is Kind.DONE]
        if not self._setup.early:
            ended = set(order)
            order = [unit for unit in script.first_uses if unit in ended]
        coming = [unit for unit in order if units[unit].on_nvme and units[unit].trainable]
        self._play(self._queue.expect(Job(name=str(u), chunks=self._chunks(u)) for u in coming))

    def add(self, unit: int, nbytes: int, turn: int) -> None:
        """Take in a unit's gradient, with ``nbytes`` of device memory, which was complete in ``turn``."""
        setup = self._setup
        update = ShardUpdate(
            str(unit), early=setup.early and setup.units[unit].on_nvme, keeps=setup.clips,
            spills=unit in setup.spilled,
        )  # fmt: skip
        self._ready[unit] = pending = _Pending(unit, update, nbytes, turn, self.weights.pop(unit, 0))
        self._on(pending, update.complete())

    def commit(self) -> None:
        """``optimizer.step()``: publish updates, start those that waited."""
        ready, self._ready = list(self._ready.values()), {}
        for pending in ready:
            if pending.update.speculated:
                self._on(pending, pending.update.validate())
        for pending in ready:
            if pending.unit in self._setup.spilled and pending.update.state is UpdateState.HELD:
                self._clock.wait(lambda each=pending: not each.nbytes, "write")  # type: ignore[misc]
        for pending in sorted(ready, key=lambda each: self._script.first_uses.get(each.unit, each.unit)):
            self._on(pending, pending.update.commit())

    def is_landing(self, unit: int) -> bool:
        """Return whether fetches of a unit wait for its update."""
        return unit in self._latest and self._latest[unit].update.holds_fetches

    def when_landed(self, unit: int, then: Callable[[], None]) -> None:
        """Call ``then`` as soon as fetches of the unit need not wait."""
        if self.is_landing(unit):
            self._latest[unit].landed.append(then)
        else:
            then()

    def when_computed(self, unit: int, then: Callable[[], None]) -> None:
        """Call ``then`` as soon as the unit's latest update has been computed."""
        computed = self._latest[unit].computed if unit in self._latest else None
        if computed is not None:
            computed.append(then)
        else:
            then()

    def state(self) -> tuple[object, ...]:
        """Return what is expected and under way."""
        held = [(each.unit, each.nbytes) for each in self._ready.values()]
        return self._queue.state(), self.weights.copy(), held

    # --- what an update says ---------------------------------------------------------------------

    def _on(self, pending: _Pending, actions: tuple[Do, ...]) -> None:
        for action in actions:
            match action:
                case Do.STORE:
                    nbytes = self._setup.gradient_nbytes(pending.unit)
                    stored = lambda: self._on(pending, pending.update.stored())  # noqa: E731
                    self._clock.move(Channel.NVME_WRITE, nbytes, stored)
                case Do.START:
                    if self._setup.units[pending.unit].on_nvme:
                        self._start(pending)
                    else:
                        self._update_in_memory(pending)
                case Do.FREE_GRADIENT:
                    self._memory.give_back_late(pending.nbytes, pending.turn)
                    pending.nbytes = 0
                case Do.FREE_WEIGHTS:
                    self._memory.give_back(pending.weights_nbytes)

    def _start(self, pending: _Pending) -> None:
        setup, unit, before = self._setup, pending.unit, self._latest.get(pending.unit)
        # With other ranks, or an accelerator, it is not the training thread that hands gradients over.
        if before is not None and before.update.in_flight and setup.ranks == 1 and not setup.on_accelerator:
            self._clock.wait(lambda: not before.update.in_flight, "update")
        shape, chunks = setup.units[unit], self._chunks(unit)
        rest = 0 if self._script.kept.get(unit, False) else shape.weight_nbytes
        rest += setup.gradient_nbytes(unit) if pending.update.reads_stored_gradient else 0
        written = shape.state_nbytes + shape.weight_nbytes
        self._clock.count(Channel.NVME_READ, shape.state_nbytes + rest)
        self._clock.count(Channel.NVME_WRITE, written)
        touched = (2 * written + setup.gradient_nbytes(unit)) / chunks
        job = _ShardJob(
            name=str(unit), chunks=chunks, priority=self._script.first_uses.get(unit, unit), pending=pending,
            rest_nbytes=round(rest / chunks), written_nbytes=round(written / chunks),
            compute_s=touched / setup.rates.background_bytes_per_s,
        )  # fmt: skip
        pending.computed = []
        self._latest[unit] = pending
        self._play(self._queue.submit(job))

    def _chunks(self, unit: int) -> int:
        most = 1 if self._script.is_long else _CHUNKS
        return min(most, -(-self._setup.units[unit].shard_numel // self._setup.chunk_numel))

    def _update_in_memory(self, pending: _Pending) -> None:
        """Update a shard that is in host memory, or on the device, while nothing else computes."""
        setup, shape, clock = self._setup, self._setup.units[pending.unit], self._clock
        moved = 2 * (shape.weight_nbytes + shape.state_nbytes) + setup.gradient_nbytes(pending.unit)
        there, rates = pending.unit in setup.division.on_device, setup.rates
        time_s = moved / (rates.memory_bytes_per_s if there else rates.update_bytes_per_s)
        clock.busy_s[UPDATE] += time_s
        clock.stall_s[UPDATE] += time_s
        while time_s > 1e-12:
            time_s -= clock.elapse(time_s)
        self._on(pending, pending.update.landed())

    # --- what the queue says ---------------------------------------------------------------------

    def _play(self, moves: Moves) -> None:
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
                    computed = lambda each=target: self._play(self._queue.computed(each))  # noqa: E731
                    threads = self._setup.rates.background_threads
                    self._clock.serve(UPDATE, target.job.compute_s, computed, threads)
                case Move.WRITE:
                    self._send(target, Channel.NVME_WRITE, target.job.written_nbytes)
                case Move.COMPUTED:
                    pending = target.pending
                    self._on(pending, pending.update.computed())
                    follows, pending.computed = pending.computed or (), None
                    for call in follows:
                        call()
                case Move.ENDED:
                    pending = target.pending
                    self._on(pending, pending.update.landed())
                    for call in pending.landed:
                        call()
                    pending.landed.clear()

    def _send(self, chunk: ChunkInFlight, channel: Channel, nbytes: int) -> None:
        chunk.moving += 1
        self._clock.send(channel, nbytes, lambda: self._play(self._queue.moved(chunk)))
