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
from infinity.planner.channels import Channel
from infinity.planner.machines import COLLECTIVE_S, RankRates
from infinity.planner.prefetch_plan import Event, Kind
from infinity.planner.simulator import Job, Server, TransferQueues
from infinity.planner.step import MicroBatch, StepScript, StepSetup, StepTrace, Stored, tries

#: Steps are played until so many take about as long as each other, and so many at most.
_LEAST_STEPS, _ALIKE, _MOST_STEPS = 3, 0.005, 10
#: Chunks of staging that are kept for updates whose gradients exist.
_RESERVE = 2
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


@dataclass(slots=True, eq=False)
class _Update:
    """The update of a unit's shard in one step.

    It has more attributes than other classes: a record of how far one update is.

    Attributes:
        nbytes: Device memory of the gradient; ``weights_nbytes`` of weights that are kept for it.
        storing: The gradient is on its way to NVMe.
        turn: Of device memory, in which the gradient was complete.
        launched: Its gradient is there, and it may run.
        unread: Chunks whose read has not started; likewise the others.
        then: Called when it has been computed; ``landed`` when its writes have ended.
    """

    unit: int
    chunk_numel: int
    chunks: int
    nbytes_read: int
    nbytes_written: int
    nbytes: int = 0
    storing: bool = False
    turn: int = 0
    weights_nbytes: int = 0
    launched: bool = False
    unread: int = 0
    waiting: int = 0
    uncomputed: int = 0
    unwritten: int = 0
    then: list[Callable[[], None]] = field(default_factory=list)
    landed: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unread = self.uncomputed = self.unwritten = self.chunks


class _Updates:
    """Plays the pipeline of updates: chunks are read into staging memory, computed, and written.

    Attributes:
        weights: Device memory of weights that wait for their unit's update.
        uncommitted: Units whose update belongs to a step that is not committed yet.
    """

    def __init__(self, script: StepScript, setup: StepSetup, clock: _Clock, memory: _DeviceMemory) -> None:
        self._script, self._setup, self._clock, self._memory = script, setup, clock, memory
        self.weights: dict[int, int] = {}
        self.uncommitted: set[int] = set()
        self._latest: dict[int, _Update] = {}  # of each unit
        self._expected: dict[int, _Update] = {}  # whose gradients will come, in that order
        self._unread: deque[_Update] = deque()  # launched, with chunks to read
        self._slots = setup.staged_chunks
        #: Whether the training thread hands gradients over: with other ranks, or an accelerator, others do.
        self._waits = setup.ranks == 1 and not setup.on_accelerator

    def expect(self) -> None:
        """Let the states of this step's updates be read ahead."""
        script, units = self._script, self._setup.units
        order = [event.unit for event in script.plan.events if event.kind is Kind.DONE]
        if not self._setup.early:
            ended = set(order)
            order = [unit for unit in script.first_uses if unit in ended]
        self._expected = {u: self._update(u) for u in order if units[u].on_nvme and units[u].trainable}
        self._pump()

    def launch(self, unit: int, nbytes: int, turn: int = -1, *, stores: bool = False) -> None:
        """Start a unit's update: its gradient is there.

        Args:
            nbytes: Device memory of the gradient, which was complete in ``turn``.
            stores: The gradient is written to NVMe meanwhile.
        """
        update, before = self._expected.pop(unit, None) or self._update(unit), self._latest.get(unit)
        update.nbytes, update.weights_nbytes, update.launched = nbytes, self.weights.pop(unit, 0), True
        update.turn = turn
        self._clock.count(Channel.NVME_READ, update.nbytes_read)
        self._clock.count(Channel.NVME_WRITE, update.nbytes_written)
        if before is not None and before.unwritten and self._waits:
            self._clock.wait(lambda: not before.unwritten, "update")
        self._latest[unit] = update
        self.uncommitted.add(unit)
        if update.unread:
            self._unread.append(update)
        for _ in range(update.waiting):
            self._compute_chunk(update)
        update.waiting = 0
        self._pump()
        if stores:
            update.storing = True
            gradient_nbytes = self._setup.gradient_nbytes(unit)
            self._clock.move(Channel.NVME_WRITE, gradient_nbytes, partial(self._stored, update))

    def is_landing(self, unit: int) -> bool:
        """Whether an update of a step that is committed is still being written."""
        update = self._latest.get(unit)
        return update is not None and update.unwritten > 0 and unit not in self.uncommitted

    def when_landed(self, unit: int, then: Callable[[], None]) -> None:
        """Call ``then`` as soon as that has been written."""
        if self.is_landing(unit):
            self._latest[unit].landed.append(then)
        else:
            then()

    def when_computed(self, unit: int, then: Callable[[], None]) -> None:
        """Call ``then`` as soon as the unit's latest update has been computed."""
        update = self._latest.get(unit)
        if update is not None and update.uncomputed:
            update.then.append(then)
        else:
            then()

    def give_back_gradients(self) -> None:
        """Give back gradients that were kept until the step's commit."""
        for update in self._latest.values():
            if update.nbytes and not update.uncomputed and not update.storing:
                self._memory.give_back(update.nbytes)
                update.nbytes = 0

    def state(self) -> tuple[object, ...]:
        """What is expected and under way."""
        updates = [
            (each.unit, each.launched, each.unread, each.waiting, each.uncomputed, each.unwritten)
            for each in (*self._expected.values(), *self._latest.values())
            if each.unwritten
        ]
        return self._slots, self.weights.copy(), updates

    def _update(self, unit: int) -> _Update:
        shape, setup = self._setup.units[unit], self._setup
        chunks = min(1 if self._script.is_long else _CHUNKS, -(-shape.shard_numel // setup.chunk_numel))
        written = shape.state_nbytes + shape.weight_nbytes
        read = shape.state_nbytes if self._script.kept.get(unit, False) else written
        if unit in setup.spilled and not setup.early:
            read += setup.gradient_nbytes(unit)
        return _Update(unit, shape.shard_numel // chunks, chunks, read, written)

    def _pump(self) -> None:
        """Start to read chunks for which there is staging memory, those whose gradient exists first."""
        while self._slots > 0:
            update = self._unread[0] if self._unread else None
            if update is None and self._slots > _RESERVE:
                update = next((each for each in self._expected.values() if each.unread), None)
                if update is not None:
                    before = self._latest.get(update.unit)
                    if before is not None and before.unwritten:
                        return
            if update is None:
                return
            self._slots -= 1
            update.unread -= 1
            if self._unread and not self._unread[0].unread:
                self._unread.popleft()
            nbytes = round(update.nbytes_read / update.chunks)
            self._clock.send(Channel.NVME_READ, nbytes, partial(self._read, update))

    def _read(self, update: _Update) -> None:
        if update.launched:
            self._compute_chunk(update)
        else:
            update.waiting += 1

    def _compute_chunk(self, update: _Update) -> None:
        gradient = update.chunk_numel * self._setup.reduce_itemsize
        nbytes = 2 * update.nbytes_written / update.chunks + gradient
        rates = self._setup.rates
        time_s = nbytes / rates.background_bytes_per_s
        self._clock.serve(UPDATE, time_s, partial(self._computed, update), rates.background_threads)

    def _computed(self, update: _Update) -> None:
        update.uncomputed -= 1
        if not update.uncomputed:
            self._memory.give_back(update.weights_nbytes)
            setup, unit = self._setup, update.unit
            waits = setup.clips and unit in self.uncommitted and unit not in setup.spilled
            if not (waits or update.storing):
                self._give_back_gradient(update)
            for then in update.then:
                then()
            update.then.clear()
        nbytes = round(update.nbytes_written / update.chunks)
        self._clock.send(Channel.NVME_WRITE, nbytes, partial(self._written, update))

    def _written(self, update: _Update) -> None:
        update.unwritten -= 1
        self._slots += 1
        if not update.unwritten:
            for then in update.landed:
                then()
            update.landed.clear()
        self._pump()

    def _stored(self, update: _Update) -> None:
        """A gradient is on NVMe; its memory is given back when its update has read it, too."""
        update.storing = False
        if not update.uncomputed:
            self._give_back_gradient(update)

    def _give_back_gradient(self, update: _Update) -> None:
        self._memory.give_back_late(update.nbytes, update.turn)
        update.nbytes = 0


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
        self._held: list[tuple[int, int]] = []
        self._storing: set[int] = set()  # units whose held gradient is on its way to NVMe
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
            self._add(unit, nbytes, turn)
            return
        self._arriving += 1

        def arrived() -> None:
            self._arriving -= 1
            self._memory.give_back(nbytes)
            self._add(unit, 0, turn)

        self._clock.move(Channel.DEVICE_TO_HOST, self.setup.gradient_nbytes(unit), arrived)

    def _add(self, unit: int, nbytes: int, turn: int) -> None:
        spills = unit in self.setup.spilled
        if self.units[unit].on_nvme and self.setup.early:
            self._updates.launch(unit, nbytes, turn, stores=spills)
        elif spills:
            self._held.append((unit, 0))
            self._storing.add(unit)

            def stored() -> None:
                self._storing.discard(unit)
                self._memory.give_back_late(nbytes, turn)

            self._clock.move(Channel.NVME_WRITE, self.setup.gradient_nbytes(unit), stored)
        else:
            self._held.append((unit, nbytes))

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
        self._commit()

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
            dict(self._away), self._held.copy(), self._storing.copy(),
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

    def _commit(self) -> None:
        """``optimizer.step()``: publish updates, start those that waited, update what is in memory."""
        self._updates.uncommitted.clear()
        self._updates.give_back_gradients()
        held, self._held = self._held, []
        for unit, nbytes in sorted(held, key=lambda each: self.script.first_uses.get(each[0], each[0])):
            shape = self.units[unit]
            if shape.on_nvme:
                self._clock.wait(lambda unit=unit: unit not in self._storing, "write")  # type: ignore[misc]
                self._updates.launch(unit, nbytes)
            else:
                moved = 2 * (shape.weight_nbytes + shape.state_nbytes) + self.setup.gradient_nbytes(unit)
                rates = self.setup.rates
                there = unit in self._on_device
                time_s = moved / (rates.memory_bytes_per_s if there else rates.update_bytes_per_s)
                self._clock.busy_s[UPDATE] += time_s
                self._clock.stall_s[UPDATE] += time_s
                left_s = time_s
                while left_s > 1e-12:
                    left_s -= self._clock.elapse(left_s)
                self._memory.give_back(nbytes)
        self._updates.uncommitted.clear()
