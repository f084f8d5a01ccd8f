"""A clock for one rank: time passes for its channels, collectives, cores, device and device memory.

[Note: shared cores]
Without an accelerator compute, updates, decoding and collectives run on threads of their own. Where more of
them run than the rank has cores, each has the same share, and compute waits for the slowest of its threads.
What I/O takes of the cores, it takes from compute (:mod:`infinity.planner.channels`).
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from infinity.core.budget import DeviceBudget, rounded
from infinity.planner.channels import Channel
from infinity.planner.machines import RankRates
from infinity.planner.simulator import Job, Server, TransferQueues

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


class VirtualClock:
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


class DeviceMemory:
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
