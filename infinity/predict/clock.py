"""Provides the clock of predicted steps, on which compute, transfers and jobs take time and end.

[Note: shared cores]
Without an accelerator compute, updates, decoding and collectives run on threads of their own. Where more of
them run than the rank has cores, each has the same share, and compute waits for the slowest of its threads.
What I/O takes of the cores, it takes from compute.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from infinity.core.budget import DeviceBudget
from infinity.core.nbytes import rounded
from infinity.planner.simulator import NEVER_S, Channel, TransferQueues
from infinity.predict.machines import RankRates

#: Names of what computes, and of what does one job after the other beside compute.
COMPUTE, LINKS, UPDATE, DECODE = "compute", "links", "update", "decode"
#: Work that takes less has ended (s).
_NOTHING_S = 1e-12
_LABELS = [channel.label for channel in Channel]


@dataclass(frozen=True, slots=True)
class StepCost:
    """Holds the cost of a step on one rank, once steps repeat."""

    step_s: float
    busy_s: dict[str, float]  # for which each channel, collectives, updates, compute and decoding go on
    nbytes: dict[str, int]  # that each channel moves; of the links, full buffers
    stall_s: dict[str, float]  # for which compute waits, by cause
    device_peak_nbytes: int  # of units, gradients and updates

    @property
    def bottleneck(self) -> str:
        """Return the channel or device that is busy for the largest share of the step."""
        return max(self.busy_s, key=lambda name: self.busy_s[name])

    def plus(self, other: "StepCost", times: float) -> "StepCost":
        """Return the sum of this cost and ``times`` times ``other``; the peak of memory is this one's."""

        def added(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
            return {name: a.get(name, 0.0) + times * b.get(name, 0.0) for name in {**a, **b}}

        nbytes = {name: round(number) for name, number in added(self.nbytes, other.nbytes).items()}
        return StepCost(
            self.step_s + times * other.step_s, added(self.busy_s, other.busy_s), nbytes,
            added(self.stall_s, other.stall_s), self.device_peak_nbytes,
        )  # fmt: skip


@dataclass(slots=True)
class Task:
    """Describes a job that takes ``left_s`` more seconds at full speed; one that is not ``ready`` waits."""

    left_s: float
    then: Callable[[], object]
    threads: float  # that it keeps busy, without an accelerator: see [Note: shared cores]
    ready: bool


class VirtualClock:
    """Advances time for a rank's channels, collectives, cores and device, and counts what they do."""

    def __init__(self, rates: RankRates) -> None:
        self._rates, self._computing = rates, False
        self._queues = TransferQueues(rates.channels)
        self._jobs: dict[str, deque[Task]] = {name: deque() for name in (LINKS, UPDATE, DECODE)}
        #: As in :class:`StepCost`, since the beginning.
        self.busy_s: defaultdict[str, float] = defaultdict(float)
        self.nbytes: Counter[str] = Counter()
        self.stall_s: defaultdict[str, float] = defaultdict(float)
        self._skipped = StepCost(0.0, {}, {}, {}, 0)  # of micro-batches that were not played

    def wait(self, until: Callable[[], bool], cause: str) -> None:
        """Let time pass until ``until`` is true, and count it as a stall by ``cause``."""
        began_s = self._queues.now_s
        while not until():
            if self.elapse(NEVER_S) == NEVER_S:
                break  # a lease beyond the budget: the runtime would give back what is kept in vain
        self.stall_s[cause] += self._queues.now_s - began_s

    def compute(self, work_s: float) -> None:
        """Let the training thread compute for ``work_s``, longer if other work shares the cores."""
        self.busy_s[COMPUTE] += work_s
        self._computing = True
        while work_s > _NOTHING_S:
            speed = self._queues.speed() * self._share()
            if not self._rates.cores and self._jobs[DECODE]:
                speed *= 0.5  # they share the device
            work_s -= speed * self.elapse(work_s / speed)
        self._computing = False

    def move(self, channel: Channel, nbytes: int, then: Callable[[], object]) -> None:
        self.count(channel, nbytes)
        self.send(channel, nbytes, then)

    def count(self, channel: Channel, nbytes: int) -> None:
        """Count bytes of this step, whenever they move."""
        self.nbytes[_LABELS[channel]] += nbytes

    def send(self, channel: Channel, nbytes: int, then: Callable[[], object]) -> None:
        """Queue the transfer of bytes that were counted."""
        if self._queues.rates[channel] > 0 and nbytes > 0:
            self._queues.submit(channel, then, nbytes)
        else:
            then()

    def serve(
        self, name: str, time_s: float, then: Callable[[], object], threads: float = 1.0, ready: bool = True
    ) -> Task:
        """Queue a job behind those of the same name, and return it; its turn waits until it is ``ready``."""
        job = Task(time_s, then, threads, ready)
        self._jobs[name].append(job)
        return job

    def elapse(self, most_s: float) -> float:
        """Let time pass until something ends, at most ``most_s``; return it (s), infinite if nothing will."""
        share, queues, running = self._share(), self._queues, self._running()
        passed_s = min(most_s, queues.next_s())
        for _, job in running:
            if job.left_s < share * passed_s:
                passed_s = job.left_s / share
        if passed_s == NEVER_S:
            return passed_s
        for channel, _, _ in queues.moving():
            self.busy_s[_LABELS[channel]] += passed_s
        for name, job in running:
            self.busy_s[name] += passed_s
            job.left_s -= share * passed_s
        ended = queues.advance(passed_s)
        if any(job.left_s <= _NOTHING_S for _, job in running):
            for jobs in self._jobs.values():  # what ends may queue others
                while jobs and jobs[0].ready and jobs[0].left_s <= _NOTHING_S:
                    jobs.popleft().then()
        for _, then, _ in ended:
            then()
        return passed_s

    def _running(self) -> list[tuple[str, Task]]:
        return [(name, jobs[0]) for name, jobs in self._jobs.items() if jobs and jobs[0].ready]

    def _share(self) -> float:
        """Return the share of full speed at which each running thread works when threads outnumber cores."""
        rates = self._rates
        if not rates.cores:
            return 1.0
        threads = sum(job.threads for _, job in self._running()) + rates.threads * self._computing
        return min(1.0, rates.cores / threads) if threads else 1.0

    def mark(self, device_peak_nbytes: int) -> StepCost:
        """Return the cost of all that has passed until now."""
        played = StepCost(self._queues.now_s, self.busy_s, self.nbytes, self.stall_s, device_peak_nbytes)
        return played.plus(self._skipped, 1.0)

    def skip(self, each: StepCost, times: int) -> None:
        """Add ``each`` to the account ``times`` times without playing it."""
        self._skipped = self._skipped.plus(each, times)

    def state(self) -> tuple[object, ...]:
        """Return the transfers and jobs that are under way, rounded so that states can be compared."""
        jobs = [[each.ready and round(each.left_s, 9) for each in jobs] for jobs in self._jobs.values()]
        return self._queues.state(), jobs


class DeviceMemory:
    """Counts what is leased of the device budget, as the pools do; a lease that finds no room waits."""

    def __init__(self, division: DeviceBudget, clock: VirtualClock, *, on_accelerator: bool) -> None:
        self._clock, self._total_nbytes, self._on_accelerator = clock, division.total, on_accelerator
        self.updated = frozenset(division.on_device)  # units whose states are there
        self._leased_nbytes = self.peak_nbytes = division.states
        self._passing_nbytes = self.turn = 0  # of the gradient that is open: see [Note: gradients that pass]

    def lease(self, nbytes: int) -> None:
        def has_room() -> bool:
            return self._leased_nbytes + self._passing_nbytes + rounded(nbytes) <= self._total_nbytes

        if not has_room():
            self.end_turn()
            self._clock.wait(has_room, "memory")
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
        """Free the memory of earlier gradients, since the next gradient has begun."""
        self.turn += 1
        self._passing_nbytes = 0

    def state(self) -> tuple[int, int]:
        return self._leased_nbytes, self._passing_nbytes
