"""Updates of shards by the clock: a driver of the decisions that training drives with threads and engines.

What starts, is stored, stands and gives memory back is decided by :mod:`infinity.planner.updates`, and which
chunk moves next. Here an action takes time, and its end is the next event.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from infinity.core.lifecycle import UpdateState
from infinity.planner.channels import Channel
from infinity.planner.events import UPDATE, DeviceMemory, VirtualClock
from infinity.planner.prefetch_plan import Kind
from infinity.planner.step import StepScript, StepSetup
from infinity.planner.updates import ChunkInFlight, ChunkQueue, Do, Expected, Job, Move, Moves, ShardUpdate

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
        self._play(self._queue.expect(Expected(name=str(u), chunks=self._chunks(u)) for u in coming))

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
