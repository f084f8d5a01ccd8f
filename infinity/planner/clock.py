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
from infinity.planner.prefetch_plan import Event, Kind, Plan, make_plan
from infinity.planner.simulator import Job, Server, TransferQueues
from infinity.planner.step import StepTrace, Stored, UnitShape

#: Steps are played until so many take about as long as each other, and so many at most.
_LEAST_STEPS, _ALIKE, _MOST_STEPS = 3, 0.005, 10
#: Micro-batches of which it is tried whether they repeat, whatever that takes.
_LEAST = 3
#: Of steps with more events fewer are played, and updates in larger chunks.
_MANY_EVENTS = 20_000
#: Chunks of staging that are kept for updates whose gradients exist.
_RESERVE = 2
#: A unit's update is played in at most so many chunks.
_CHUNKS = 8
_NEVER_S = float("inf")
_USE, _DONE = Kind.USE, Kind.DONE
#: Names of what moves and computes.
COMPUTE, LINKS, UPDATE, DECODE = "compute", "links", "update", "decode"
_LABELS = [channel.label for channel in Channel]


@dataclass(frozen=True, slots=True)
class StepSetup:
    """Everything that a step follows from, besides its trace.

    Attributes:
        division: Of the device budget.
        micro_batches: Of a step.
        early: Updates start inside backward.
        clips: Gradients are kept until the step ends.
        staged_chunks: Of ``chunk_numel`` elements.
        piece_nbytes: The largest shard that may stay while it is updated; None: any.
        reduce_itemsize: Bytes per element of a reduced gradient.
        spilled: Units whose gradients wait on NVMe.
    """

    units: tuple[UnitShape, ...]
    rates: RankRates
    division: DeviceBudget
    ranks: int
    on_accelerator: bool
    micro_batches: int
    early: bool
    clips: bool
    chunk_numel: int
    staged_chunks: int
    piece_nbytes: int | None
    reduce_itemsize: int
    spilled: frozenset[int] = frozenset()


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
    return _Player(_Script.of(trace, setup), setup).run()


# --- the script --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _MicroBatch:
    """What the training thread does in one micro-batch, by position: before an event, after as many events.

    Attributes:
        begin: Position of its first event in the step's plan.
        compute_s: Seconds of compute before each event, and after the last.
        begun: Units whose first gradient comes before it.
        completed: Units whose gradient of a micro-batch is complete, and whether that ends the step's: those
            that the plan's events do not tell.
        packs: Activations that leave; ``loads`` and ``asks`` likewise those that are loaded and needed.
    """

    begin: int
    compute_s: list[float]
    begun: dict[int, list[int]] = field(default_factory=dict)
    completed: dict[int, list[tuple[int, bool]]] = field(default_factory=dict)
    packs: dict[int, list[Stored]] = field(default_factory=dict)
    loads: dict[int, list[Stored]] = field(default_factory=dict)
    asks: dict[int, list[Stored]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Script:
    """What the training thread does in one step.

    Attributes:
        plan: Of the micro-batches below.
        repeated: Index of the micro-batch of which there are ``more``.
    """

    plan: Plan
    micro_batches: Sequence[_MicroBatch]
    repeated: int
    more: int

    @classmethod
    def of(cls, trace: StepTrace, setup: StepSetup) -> "_Script":
        times = trace.times_s(setup.rates).tolist()
        earlier, places = trace.accumulated()
        before = setup.micro_batches - 1
        planned, most = min(before, 2), max(_LEAST, _MANY_EVENTS // max(1, len(earlier)))
        plan = plan_of(earlier * planned + trace.events, setup, (len(earlier), planned))
        while plan.repeats is None and planned < min(before, most):
            planned = min(before, most, 2 * planned)
            plan = plan_of(earlier * planned + trace.events, setup, (len(earlier), planned))
        repeated = planned - 1 if plan.repeats is None else plan.repeats.start // len(earlier)

        def made(index: int) -> _MicroBatch:
            ends = index == planned
            where = range(len(times)) if ends else places
            part = _MicroBatch(index * len(earlier), [0.0] * (len(trace.events if ends else earlier) + 1))
            for position, time_s in enumerate(times):
                part.compute_s[where[position]] += time_s
            for position, unit in trace.begun:
                if index == 0 or setup.ranks > 1:
                    part.begun.setdefault(where[position], []).append(unit)
            for position, unit in trace.completed:
                if (not ends and setup.ranks > 1) or (ends and not setup.units[unit].streams):
                    part.completed.setdefault(where[position], []).append((unit, ends))
            for each in trace.stored:
                part.packs.setdefault(where[each.packed_at], []).append(each)
                part.loads.setdefault(where[each.load_at], []).append(each)
                part.asks.setdefault(where[each.asked_at], []).append(each)
            return part

        return cls(plan, [made(i) for i in range(planned + 1)], repeated, before - planned)


def plan_of(events: Sequence[Event], setup: StepSetup, repeats: tuple[int, int] | None = None) -> Plan:
    """The plan that the runtime's prefetcher makes from a step's events."""
    nbytes = {index: unit.gathered_nbytes for index, unit in enumerate(setup.units) if unit.streams}
    most = setup.piece_nbytes
    can_stay = {
        index
        for index, unit in enumerate(setup.units)
        if unit.on_nvme and (most is None or unit.weight_nbytes <= most)
    }
    return make_plan(events, nbytes, setup.division.window, can_stay=can_stay, repeats=repeats)


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


# --- the player --------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Update:
    """The update of a unit's shard in one step.

    It has more attributes than other classes: a record of how far one update is.

    Attributes:
        nbytes: Device memory of the gradient; ``weights_nbytes`` of weights that are kept for it.
        storing: The gradient is on its way to NVMe.
        turn: Of the clock, when the gradient was complete.
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


def _are_alike(marks: Sequence[StepCost]) -> bool:
    """Whether steps repeat: the last few took about as long."""
    last = [after.step_s - before.step_s for before, after in pairwise(marks[-_LEAST_STEPS - 1 :])]
    return len(last) == _LEAST_STEPS and max(last) <= (1 + _ALIKE) * min(last)


class _Player:
    """Plays a script for some steps; see [Note: what is played].

    It has more attributes than other classes: one for each queue and each memory that the runtime has, since
    every event may move them all.
    """

    def __init__(self, script: _Script, setup: StepSetup) -> None:
        self.script, self.setup, self.units = script, setup, setup.units
        self._clock = _Clock(setup.rates)
        self._memory = _DeviceMemory(setup.division, on_accelerator=setup.on_accelerator)
        self._many = len(script.plan.events) > _MANY_EVENTS
        self._on_device = frozenset(setup.division.on_device)
        self._ready: dict[int, bool] = {}  # units on their way, or there
        self._updates: dict[int, _Update] = {}  # the latest of each unit
        self._next: set[int] = set()  # units whose update belongs to a step that is not committed yet
        self._kept: dict[int, bool] = {}
        self._gradients: dict[int, int] = {}  # device memory of a gradient that waits
        self._arriving = 0  # gradients on their way to updates
        self._reducing = 0  # those of them that are being reduced
        self._carried = False  # one of the micro-batch before was
        self._held: list[tuple[int, int]] = []
        self._storing: set[int] = set()  # units whose held gradient is on its way to NVMe
        self._expected: dict[int, _Update] = {}  # whose gradients will come, in that order
        self._unread: deque[_Update] = deque()  # launched, with chunks to read
        self._reduced: dict[int, int] = {}  # device memory of gradient shards that add up
        self._weights: dict[int, int] = {}  # device memory of weights that wait for an update
        self._slots = setup.staged_chunks
        self._away: dict[int, bool] = {}
        self._staying: set[int] = set()

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

        update = self._updates.get(unit)
        if stayed:
            if update is not None and update.uncomputed:
                update.then.append(upload)
            else:
                upload()
        elif not shape.on_nvme:
            upload()
        else:
            self._clock.count(Channel.NVME_READ, shape.read_nbytes)
            read = partial(self._clock.send, Channel.NVME_READ, shape.read_nbytes, upload)
            if update is not None and update.unwritten and unit not in self._next:
                update.landed.append(read)
            else:
                read()

    def _release(self, unit: int) -> None:
        if self._ready.pop(unit, None) is not None:
            self._memory.give_back(self.units[unit].nbytes)

    def _use(self, unit: int) -> None:
        if unit not in self._ready:
            self._start(unit)
        if not self._ready[unit]:
            update = self._updates.get(unit)
            waits = update is not None and bool(update.unwritten) and unit not in self._next
            cause = "update" if waits else "read" if self.units[unit].on_nvme else "upload"
            self._clock.wait(lambda: self._ready[unit], cause)

    # --- gradients -----------------------------------------------------------------------------

    def _shard_nbytes(self, unit: int) -> int:
        """Bytes of this rank's shard of a gradient."""
        return self.units[unit].shard_numel * self.setup.reduce_itemsize

    def _accumulate(self, unit: int) -> None:
        """A unit has a gradient of earlier micro-batches."""
        shape, setup = self.units[unit], self.setup
        gradients = self._gradients if setup.ranks == 1 else self._reduced
        gradients[unit] = shape.nbytes if setup.ranks == 1 else self._shard_nbytes(unit)
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
        shard = self._shard_nbytes(unit)
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

        self._clock.move(Channel.DEVICE_TO_HOST, self._shard_nbytes(unit), arrived)

    def _add(self, unit: int, nbytes: int, turn: int) -> None:
        spills, early = unit in self.setup.spilled, self.units[unit].on_nvme and self.setup.early
        gradient_nbytes = self._shard_nbytes(unit)
        if early:
            self._launch(unit, nbytes, turn)
            if spills:
                job = self._updates[unit]
                job.storing = True
                self._clock.move(Channel.NVME_WRITE, gradient_nbytes, lambda: self._stored(job))
        elif spills:
            self._held.append((unit, 0))
            self._storing.add(unit)

            def stored() -> None:
                self._storing.discard(unit)
                self._memory.give_back_late(nbytes, turn)

            self._clock.move(Channel.NVME_WRITE, gradient_nbytes, stored)
        else:
            self._held.append((unit, nbytes))

    def _stored(self, job: _Update) -> None:
        """A gradient is on NVMe; memory of it is given back when its update has read it, too."""
        job.storing = False
        if not job.uncomputed:
            self._memory.give_back_late(job.nbytes, job.turn)
            job.nbytes = 0

    # --- updates -------------------------------------------------------------------------------

    def _job(self, unit: int) -> _Update:
        shape = self.units[unit]
        chunks = min(1 if self._many else _CHUNKS, -(-shape.shard_numel // self.setup.chunk_numel))
        written = shape.state_nbytes + shape.weight_nbytes
        read = shape.state_nbytes if self._kept.get(unit, False) else written
        if unit in self.setup.spilled and not self.setup.early:
            read += self._shard_nbytes(unit)
        return _Update(unit, shape.shard_numel // chunks, chunks, read, written)

    def _expect(self) -> None:
        """Let the states of this step's updates be read ahead."""
        order = [event.unit for event in self.script.plan.events if event.kind is Kind.DONE]
        if not self.setup.early:
            ended = set(order)
            order = [unit for unit in self._first_uses if unit in ended]
        units = self.units
        self._expected = {u: self._job(u) for u in order if units[u].on_nvme and units[u].trainable}

    @property
    def _on_training_thread(self) -> bool:
        """Whether gradients are handed over there: with other ranks, or an accelerator, others do."""
        return self.setup.ranks == 1 and not self.setup.on_accelerator

    def _launch(self, unit: int, nbytes: int, turn: int = -1) -> None:
        job = self._expected.pop(unit, None) or self._job(unit)
        job.nbytes, job.weights_nbytes, job.launched = nbytes, self._weights.pop(unit, 0), True
        job.turn = turn
        self._clock.count(Channel.NVME_READ, job.nbytes_read)
        self._clock.count(Channel.NVME_WRITE, job.nbytes_written)
        before = self._updates.get(unit)
        if before is not None and before.unwritten and self._on_training_thread:
            self._clock.wait(lambda: not before.unwritten, "update")
        self._updates[unit] = job
        self._next.add(unit)
        if job.unread:
            self._unread.append(job)
        for _ in range(job.waiting):
            self._update_chunk(job)
        job.waiting = 0
        self._pump()

    def _pump(self) -> None:
        """Start to read chunks for which there is staging memory, those whose gradient exists first."""
        while self._slots > 0:
            job = self._unread[0] if self._unread else None
            if job is None and self._slots > _RESERVE:
                job = next((each for each in self._expected.values() if each.unread), None)
                if job is not None:
                    before = self._updates.get(job.unit)
                    if before is not None and before.unwritten:
                        return
            if job is None:
                return
            self._slots -= 1
            job.unread -= 1
            if self._unread and not self._unread[0].unread:
                self._unread.popleft()
            self._clock.send(Channel.NVME_READ, round(job.nbytes_read / job.chunks), partial(self._read, job))

    def _read(self, job: _Update) -> None:
        if job.launched:
            self._update_chunk(job)
        else:
            job.waiting += 1

    def _update_chunk(self, job: _Update) -> None:
        gradient = job.chunk_numel * self.setup.reduce_itemsize
        nbytes = 2 * job.nbytes_written / job.chunks + gradient
        rates = self.setup.rates
        time_s = nbytes / rates.background_bytes_per_s
        self._clock.serve(UPDATE, time_s, partial(self._computed, job), rates.background_threads)

    def _computed(self, job: _Update) -> None:
        job.uncomputed -= 1
        if not job.uncomputed:
            self._memory.give_back(job.weights_nbytes)
            waits = self.setup.clips and job.unit in self._next and job.unit not in self.setup.spilled
            if not (waits or job.storing):
                self._memory.give_back_late(job.nbytes, job.turn)
                job.nbytes = 0
            for then in job.then:
                then()
            job.then.clear()
        self._clock.send(
            Channel.NVME_WRITE, round(job.nbytes_written / job.chunks), lambda: self._written(job)
        )

    def _written(self, job: _Update) -> None:
        job.unwritten -= 1
        self._slots += 1
        if not job.unwritten:
            for then in job.landed:
                then()
            job.landed.clear()
        self._pump()

    # --- the step ------------------------------------------------------------------------------

    def run(self) -> StepCost:
        """Play some steps and return what the last one took."""
        plan, last = self.script.plan, self.script.micro_batches[-1]
        self._first_uses = list(dict.fromkeys(event.unit for event in plan.events if event.kind is Kind.USE))
        self._kept, present = self._walk_plan(last.begin)
        for unit in present if last.begin else ():
            self._lease(self.units[unit].nbytes)
            self._ready[unit] = True
        for units in self.script.micro_batches[0].begun.values() if last.begin else ():
            for unit in units:
                self._accumulate(unit)
        self._play([last], 0)
        marks = [self._mark()]
        while len(marks) <= (1 if self._many else _MOST_STEPS) and not _are_alike(marks):
            self._play(self.script.micro_batches, self.script.more)
            marks.append(self._mark())
        return marks[-1].plus(marks[-2], -1.0)

    def _mark(self) -> StepCost:
        return self._clock.mark(self._memory.peak_nbytes)

    def _walk_plan(self, begin: int) -> tuple[dict[int, bool], set[int]]:
        """What the plan has in memory.

        Returns:
            Of each unit whether its weights are there when its gradients are complete, for the update; and
            the units that are there before position ``begin``.
        """
        plan, present, found = self.script.plan, set(self.script.plan.begin), {}
        before = present.copy()
        for position, ((kind, unit), actions) in enumerate(zip(plan.events, plan.actions, strict=True)):
            if position == begin:
                before = present.copy()
            if kind is _USE:
                present.add(unit)
            elif kind is _DONE:
                stays = unit in plan.stays
                found[unit] = unit in present and (self.setup.division.hold_weights or stays)
                if not stays:
                    present.discard(unit)
            present.difference_update(actions.release)
            present.update(actions.fetch)
        return found, before

    def _play(self, micro_batches: Sequence[_MicroBatch], more: int) -> None:
        """One step, from its first fetch to its commit.

        Args:
            more: Micro-batches that are like the one that repeats, and not among those.
        """
        script = self.script
        for unit in script.plan.begin if micro_batches[0].begin == 0 else ():
            if unit not in self._ready or unit in self._staying:
                self._start(unit)
        self._expect()
        self._pump()
        for index, micro_batch in enumerate(micro_batches):
            if more and index == script.repeated:
                self._repeat(micro_batch, 1 + more)
            else:
                self._play_one(micro_batch)
        self._clock.wait(lambda: not self._arriving, LINKS)
        self._commit()

    def _repeat(self, micro_batch: _MicroBatch, times: int) -> None:
        """Play a micro-batch so many times; see [Note: micro-batches that repeat]."""
        before, most = self._state(), max(_LEAST, _MANY_EVENTS // len(micro_batch.compute_s))
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
        updates = [
            (job.unit, job.launched, job.unread, job.waiting, job.uncomputed, job.unwritten)
            for job in (*self._expected.values(), *self._updates.values())
            if job.unwritten
        ]
        return (
            self._memory.state(), self._slots, self._arriving, dict(self._ready),
            self._staying.copy(),
            dict(self._gradients), dict(self._reduced), dict(self._weights), dict(self._away),
            self._held.copy(), self._storing.copy(), updates,
            self._clock.state(),
        )  # fmt: skip

    def _play_one(self, micro_batch: _MicroBatch) -> None:
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

    def _before(self, micro_batch: _MicroBatch, position: int) -> None:
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

    def _after(self, micro_batch: _MicroBatch, position: int) -> None:
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
                stays, kept = unit in self.script.plan.stays, self._kept[unit] and shape.on_nvme
                if stays:
                    self._staying.add(unit)
                elif kept and self.setup.ranks == 1 and not self.setup.on_accelerator:
                    del self._ready[unit]  # the update has the full buffer
                    self._weights[unit] = shape.nbytes
                else:
                    if kept and not self.setup.on_accelerator:
                        self._lease(shape.weight_nbytes)
                        self._weights[unit] = shape.weight_nbytes
                    self._release(unit)
                if kept and self.setup.on_accelerator:
                    self._clock.move(Channel.DEVICE_TO_HOST, shape.weight_nbytes, lambda: None)
            if shape.trainable:
                self._end_gradient(unit, True)

    def _commit(self) -> None:
        """``optimizer.step()``: publish updates, start those that waited, update what is in memory."""
        self._next.clear()
        for job in self._updates.values():
            if job.nbytes and not job.uncomputed and not job.storing:
                self._memory.give_back(job.nbytes)
                job.nbytes = 0
        held, self._held = self._held, []
        rank = {unit: at for at, unit in enumerate(self._first_uses)}
        for unit, nbytes in sorted(held, key=lambda each: rank.get(each[0], each[0])):
            shape = self.units[unit]
            if shape.on_nvme:
                self._clock.wait(lambda unit=unit: unit not in self._storing, "write")  # type: ignore[misc]
                self._launch(unit, nbytes)
            else:
                moved = 2 * (shape.weight_nbytes + shape.state_nbytes) + self._shard_nbytes(unit)
                rates = self.setup.rates
                there = unit in self._on_device
                time_s = moved / (rates.memory_bytes_per_s if there else rates.update_bytes_per_s)
                self._clock.busy_s[UPDATE] += time_s
                self._clock.stall_s[UPDATE] += time_s
                left_s = time_s
                while left_s > 1e-12:
                    left_s -= self._clock.elapse(left_s)
                self._memory.give_back(nbytes)
        self._next.clear()
