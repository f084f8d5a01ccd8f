"""Plays a whole training step on a clock: what the runtime would do, when, and what waits for what.

[Note: what is played]
The training thread goes through the runtime's own plan (:mod:`infinity.planner.prefetch_plan`): it computes,
waits for units, releases and fetches. Beside it move fetches (NVMe to host memory), uploads, gathers,
decoding, reductions, gradients' copies, and the chunks of updates, through the queues that the runtime has:
one for each channel, one for the collectives, one for decoding, and a bounded number of chunks in staging
memory. Device memory is leased and given back as the pools do, and a lease that finds no room waits. All
ranks do the same, so one is played, with its share of what they have in common.

[Note: shared cores]
Without an accelerator compute, updates, decoding and collectives run on threads of their own. Where more of
them run than the rank has cores, each has the same share, and compute waits for the slowest of its threads.
What I/O takes of the cores, it takes from compute (:mod:`infinity.planner.channels`).

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

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from infinity.core.budget import DeviceBudget, rounded
from infinity.core.lifecycle import UpdateState
from infinity.planner.channels import Channel
from infinity.planner.chunk_queue import (
    Action,
    Actions,
    ChunkInFlight,
    ChunkQueue,
    Compute,
    Computed,
    Ended,
    Expected,
    Read,
    ReadRest,
    Write,
)
from infinity.planner.chunk_queue import (
    Job as ChunkJob,
)
from infinity.planner.machines import COLLECTIVE_S, RankRates
from infinity.planner.prefetch_plan import Event, Kind
from infinity.planner.shard_update import Do, ShardUpdate
from infinity.planner.simulator import Job, Server, TransferQueues
from infinity.planner.step import MicroBatch, StepScript, StepSetup, StepTrace, Stored, tries

#: Steps are played until so many take about as long as each other, and so many at most.
_LEAST_STEPS, _ALIKE, _MOST_STEPS = 3, 0.005, 10
#: A unit's update is played in at most so many chunks.
_CHUNKS = 8
_NEVER_S = float("inf")
#: Names of what moves and computes.
COMPUTE, LINKS, UPDATE, DECODE = "compute", "links", "update", "decode"
_LABELS = [channel.label for channel in Channel]


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step takes on one rank, once steps repeat.

    Attributes:
        step_s: Its time (s).
        busy_s: Seconds for which each channel moves, links gather or reduce, cores update, devices compute,
            and stored weights are decoded.
        nbytes: Bytes that each channel moves; of the links, full buffers.
        stall_s: Seconds for which compute waits, by cause.
        device_peak_nbytes: The most that units, gradients and updates take of device memory.
    """

    step_s: float
    busy_s: dict[str, float]
    nbytes: dict[str, int]
    stall_s: dict[str, float]
    device_peak_nbytes: int

    @property
    def bottleneck(self) -> str:
        """What is busy for the largest share of the step."""
        return max(self.busy_s, key=lambda name: self.busy_s[name])

    def plus(self, other: "StepCost", times: float) -> "StepCost":
        """This cost and ``times`` another one; peaks stay."""

        def added(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
            return {name: a.get(name, 0.0) + times * b.get(name, 0.0) for name in a | b}

        nbytes = {
            name: round(self.nbytes.get(name, 0) + times * other.nbytes.get(name, 0))
            for name in self.nbytes | other.nbytes
        }
        return StepCost(
            self.step_s + times * other.step_s, added(self.busy_s, other.busy_s), nbytes,
            added(self.stall_s, other.stall_s), self.device_peak_nbytes,
        )  # fmt: skip


def play_step(trace: StepTrace, setup: StepSetup) -> StepCost:
    """Predict what a training step costs; see [Note: what is played]."""
    return _Player(StepScript.of(trace, setup), setup).run()


# --- the clock ---------------------------------------------------------------------------------------


class _Clock:
    """Lets time pass for a rank's channels, collectives, cores and device, and keeps account of it.

    Attributes:
        servers: What does one thing after the other beside compute, by name.
        busy_s: As in :class:`StepCost`, since the beginning; likewise ``nbytes`` and ``stall_s``.
        skipped_s: Seconds of micro-batches that were not played.
    """

    def __init__(self, rates: RankRates) -> None:
        self._rates, self._computing = rates, False
        self._queues = TransferQueues(rates.channels)
        #: What follows each transfer of a channel, where they end in order.
        self._then: tuple[deque[Callable[[], None]], ...] = tuple(deque() for _ in Channel)
        self.servers = {LINKS: Server(), UPDATE: Server(), DECODE: Server()}
        self.busy_s: defaultdict[str, float] = defaultdict(float)
        self.nbytes: Counter[str] = Counter()
        self.stall_s: defaultdict[str, float] = defaultdict(float)
        self.skipped_s = 0.0

    def wait(self, until: Callable[[], bool], cause: str) -> None:
        """Let time pass until something has happened."""
        began_s = self._queues.now_s
        while not until():
            if self.elapse(_NEVER_S) == _NEVER_S:
                break  # a lease beyond the budget: the runtime would give back what is kept in vain
        self.stall_s[cause] += self._queues.now_s - began_s

    def compute(self, work_s: float) -> None:
        """Let the training thread compute what takes ``work_s`` if nothing else runs."""
        self.busy_s[COMPUTE] += work_s
        self._computing = True
        while work_s > 1e-12:
            speed = self._queues.speed() * self._share()
            if not self._rates.cores and self.servers[DECODE].busy:
                speed *= 0.5  # they share the device
            work_s -= speed * self.elapse(work_s / speed)
        self._computing = False

    def move(self, channel: Channel, nbytes: int, then: Callable[[], None]) -> None:
        """Count and send bytes."""
        self.count(channel, nbytes)
        self.send(channel, nbytes, then)

    def count(self, channel: Channel, nbytes: int) -> None:
        """Count bytes of this step, whenever they move."""
        self.nbytes[_LABELS[channel]] += nbytes

    def send(self, channel: Channel, nbytes: int, then: Callable[[], None]) -> None:
        """Queue the transfer of bytes that were counted."""
        if not self._queues.rates[channel] > 0 or nbytes <= 0:
            then()
            return
        self._then[channel].append(then)
        self._queues.submit(channel, 0, nbytes)

    def serve(self, name: str, time_s: float, then: Callable[[], None], threads: float = 1.0) -> None:
        """Queue what one of the servers does in ``time_s``."""
        self.servers[name].submit(Job(time_s, then, threads))

    def elapse(self, most_s: float) -> float:
        """Let time pass until something ends, at most ``most_s``; return the seconds; infinite: none will."""
        share, queues, servers = self._share(), self._queues, self.servers.items()
        passed_s = min(most_s, queues.next_s())
        for _, server in servers:
            if server.left_s < share * passed_s:
                passed_s = server.left_s / share
        if passed_s == _NEVER_S:
            return passed_s
        busy_s, ends = self.busy_s, False
        for channel, _, _ in queues.moving():
            busy_s[_LABELS[channel]] += passed_s
        for name, server in servers:
            if server.left_s < _NEVER_S:
                busy_s[name] += passed_s
                server.left_s -= share * passed_s
                ends = ends or server.left_s <= 1e-12
        ended = queues.advance(passed_s)
        for _, server in servers if ends else ():  # what ends may submit to another one
            while server.left_s <= 1e-12:
                server.end()()
        for channel, _, _ in ended:
            self._then[channel].popleft()()
        return passed_s

    def _share(self) -> float:
        """The share of its speed that each part has which runs now: see [Note: shared cores]."""
        rates = self._rates
        if not rates.cores:
            return 1.0
        threads = sum(server.threads for server in self.servers.values()) + rates.threads * self._computing
        return min(1.0, rates.cores / threads) if threads else 1.0

    def mark(self, device_peak_nbytes: int) -> StepCost:
        """What has passed until now."""
        passed_s, busy_s = self._queues.now_s + self.skipped_s, dict(self.busy_s)
        return StepCost(passed_s, busy_s, dict(self.nbytes), dict(self.stall_s), device_peak_nbytes)

    def skip(self, each: StepCost, times: int) -> None:
        """Let the same pass some times more."""
        self.skipped_s += times * each.step_s
        for name, time_s in each.busy_s.items():
            self.busy_s[name] += times * time_s
        for name, nbytes in each.nbytes.items():
            self.nbytes[name] += times * nbytes
        for cause, time_s in each.stall_s.items():
            self.stall_s[cause] += times * time_s

    def state(self) -> tuple[object, ...]:
        """All that is under way, equal up to rounding."""
        return self._queues.state(), *(server.state() for server in self.servers.values())


class _DeviceMemory:
    """Counts what is leased of the device budget, as the pools do.

    Attributes:
        turn: Of gradients: another one begins with each of them; see [Note: gradients that pass].
    """

    def __init__(self, division: DeviceBudget, *, on_accelerator: bool) -> None:
        self._total_nbytes, self._on_accelerator = division.total, on_accelerator
        self._leased_nbytes = self.peak_nbytes = division.states
        self._passing_nbytes = self.turn = 0

    def has_room(self, nbytes: int) -> bool:
        return self._leased_nbytes + self._passing_nbytes + rounded(nbytes) <= self._total_nbytes

    def take(self, nbytes: int) -> None:
        self._leased_nbytes += rounded(nbytes)
        self.peak_nbytes = max(self.peak_nbytes, self._leased_nbytes + self._passing_nbytes)

    def give_back(self, nbytes: int) -> None:
        self._leased_nbytes -= rounded(nbytes)

    def give_back_late(self, nbytes: int, turn: int) -> None:
        """Give back a gradient's memory; it counts until the ``turn`` in which it was complete has ended."""
        self.give_back(nbytes)
        if turn == self.turn and not self._on_accelerator:
            self._passing_nbytes += rounded(nbytes)

    def end_turn(self) -> None:
        """The next gradient has begun."""
        self.turn += 1
        self._passing_nbytes = 0

    def state(self) -> tuple[int, int]:
        return self._leased_nbytes, self._passing_nbytes


# --- updates -----------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True, eq=False)
class _ShardJob(ChunkJob):
    """The computation of an update, with the bytes of each of its chunks.

    Attributes:
        rest_nbytes: Of what is read beside the state: weights and gradient, where they are not at hand.
        compute_s: What the rule takes.
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


class _Updates:
    """Drives the updates of shards, and the queue of their chunks, by the clock.

    Attributes:
        weights: Device memory of weights that wait for their unit's update.
    """

    def __init__(self, script: StepScript, setup: StepSetup, clock: _Clock, memory: _DeviceMemory) -> None:
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
        """Whether fetches of a unit wait for its update."""
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
        """What is expected and under way."""
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

    def _play(self, actions: Actions) -> None:
        """Carry out what follows from an event, and begin what can begin now."""
        for action in actions:
            self._carry_out(action)
        while (begins := self._queue.next()) is not None:
            self._carry_out(begins)

    def _carry_out(self, action: Action | Computed | Ended) -> None:
        match action:
            case Read(chunk):
                unit, rest = int(chunk.name), _job(chunk).rest_nbytes if chunk.job else 0
                state_nbytes = round(self._setup.units[unit].state_nbytes / self._chunks(unit))
                self._send(chunk, Channel.NVME_READ, state_nbytes + rest)
            case ReadRest(chunk):
                if _job(chunk).rest_nbytes:
                    self._send(chunk, Channel.NVME_READ, _job(chunk).rest_nbytes)
            case Compute(chunk):
                computed = lambda: self._play(self._queue.computed(chunk))  # noqa: E731
                threads = self._setup.rates.background_threads
                self._clock.serve(UPDATE, _job(chunk).compute_s, computed, threads)
            case Write(chunk):
                self._send(chunk, Channel.NVME_WRITE, _job(chunk).written_nbytes)
            case Computed(_ShardJob(pending=pending)):
                self._on(pending, pending.update.computed())
                follows, pending.computed = pending.computed or (), None
                for call in follows:
                    call()
            case Ended(_ShardJob(pending=pending)):
                self._on(pending, pending.update.landed())
                for call in pending.landed:
                    call()
                pending.landed.clear()

    def _send(self, chunk: ChunkInFlight, channel: Channel, nbytes: int) -> None:
        chunk.moving += 1
        self._clock.send(channel, nbytes, lambda: self._play(self._queue.moved(chunk)))


def _job(chunk: ChunkInFlight) -> _ShardJob:
    assert isinstance(chunk.job, _ShardJob)
    return chunk.job


# --- the player --------------------------------------------------------------------------------------


def _are_alike(marks: Sequence[StepCost]) -> bool:
    """Whether steps repeat: the last few took about as long."""
    last = [after.step_s - before.step_s for before, after in pairwise(marks[-_LEAST_STEPS - 1 :])]
    return len(last) == _LEAST_STEPS and max(last) <= (1 + _ALIKE) * min(last)


class _Player:
    """Plays a script for some steps; see [Note: what is played].

    It has more attributes than other classes: where each unit, gradient and activation is, since every event
    may move them all.
    """

    def __init__(self, script: StepScript, setup: StepSetup) -> None:
        self.script, self.setup, self.units = script, setup, setup.units
        self._clock = _Clock(setup.rates)
        self._memory = _DeviceMemory(setup.division, on_accelerator=setup.on_accelerator)
        self._updates = _Updates(script, setup, self._clock, self._memory)
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
        job = Job(nbytes / rates.gather_bytes_per_s + COLLECTIVE_S, then, rates.link_threads, ready=False)
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
        """One step, from its first fetch to its commit.

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
        """All that the rest of a step follows from, besides what is played; equal up to rounding."""
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
