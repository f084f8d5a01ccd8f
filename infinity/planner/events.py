"""Provides the clock of predictions, on which compute, transfers and jobs take time and end.

[Note: rates]
Between two events every rate is constant. A channel moves one transfer after the other in the order of
submission, as the cache's queues do. A transfer's first byte moves ``latency_s`` after it was submitted, even
if it waited for others meanwhile: the cache has several of them on their way. Compute beside transfers loses
``compute_s_per_byte`` for each of their bytes, but never stands still: the operating system gives it a share
of the cores.

[Note: reads beside writes]
When an NVMe drive reads and writes at once, both together move ``mixed_bytes_per_s``, half each as far as
they can. A byte that is written therefore costs the reads of the same time what they lose while it moves.

[Note: units go first]
Bytes of units go before bytes of activations. In a real step both go in the order of submission, and compute
waits for a late unit. Here it does not, since the measured step has waited for units already. So units come
when they came, and activations bear the whole delay. Units slow compute no more than when it was measured.

[Note: shared cores]
Without an accelerator compute, updates, decoding and collectives run on threads of their own. Where more of
them run than the rank has cores, each has the same share, and compute waits for the slowest of its threads.
What I/O takes of the cores, it takes from compute.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from infinity.core.budget import DeviceBudget, rounded
from infinity.core.plan import Hardware, Place, Traffic
from infinity.planner.machines import RankRates


class Channel(IntEnum):
    """Names one direction of one link."""

    NVME_WRITE = 0
    NVME_READ = 1
    DEVICE_TO_HOST = 2
    HOST_TO_DEVICE = 3

    @property
    def label(self) -> str:
        """Return the name in tables and pictures."""
        return ("NVMe write", "NVMe read", "device to host", "host to device")[self]


#: The channel by which a storage goes to a place, and the one by which it comes back.
STORE = {Place.NVME: Channel.NVME_WRITE, Place.HOST: Channel.DEVICE_TO_HOST}
LOAD = {Place.NVME: Channel.NVME_READ, Place.HOST: Channel.HOST_TO_DEVICE}

#: Share of its speed that compute keeps beside transfers, at least.
LEAST_SPEED = 0.1
NEVER_S = float("inf")
#: Transfers that begin in less than this begin now, or rounding would make them wait again and again (s).
_NOW_S = 1e-12
#: Times that agree in so many digits after the point are the same.
_DIGITS = 9
#: As indices: looking a member of an enum up costs more than the arithmetic around it.
_WRITE, _READ = int(Channel.NVME_WRITE), int(Channel.NVME_READ)
#: Names of what moves and computes.
COMPUTE, LINKS, UPDATE, DECODE = "compute", "links", "update", "decode"
_LABELS = [channel.label for channel in Channel]


def mixed_rates(hardware: Hardware) -> tuple[float, float]:
    """Return bytes per second of reads and writes while both are busy; see [Note: reads beside writes]."""
    half = hardware.mixed_bytes_per_s / 2
    write = min(hardware.write_bytes_per_s, half)
    read = min(hardware.read_bytes_per_s, hardware.mixed_bytes_per_s - write)
    return read, min(hardware.write_bytes_per_s, hardware.mixed_bytes_per_s - read)


def delay_s_per_byte(hardware: Hardware) -> float:
    """Return seconds by which each moved byte delays compute, bounded so that compute never stops."""
    read, write = mixed_rates(hardware)
    most = max(read + write, hardware.read_bytes_per_s, hardware.write_bytes_per_s)
    most += 2 * hardware.host_bytes_per_s if hardware.host_nbytes else 0.0
    return min(hardware.compute_s_per_byte, (1 - LEAST_SPEED) / most if most else 0.0)


@dataclass(slots=True)
class _Transfer:
    """Describes bytes on their way."""

    what: Any  # the index of a slot, or the call that follows; None: units
    left_nbytes: float
    ready_s: float  # when the first byte may move
    began_s: float | None = None  # when it did


class TransferQueues:
    """Queues the transfers of each channel, and lets time pass in :meth:`advance`; see [Note: rates]."""

    def __init__(self, hardware: Hardware) -> None:
        host = hardware.host_bytes_per_s
        self.now_s = 0.0
        #: Of each channel alone.
        self.rates = (hardware.write_bytes_per_s, hardware.read_bytes_per_s, host, host)
        self._mixed = mixed_rates(hardware)
        self._latency_s, self._delay_s_per_byte = hardware.latency_s, delay_s_per_byte(hardware)
        self._queues: tuple[deque[_Transfer], ...] = tuple(deque() for _ in Channel)
        self._units = [_Transfer(None, 0.0, 0.0), _Transfer(None, 0.0, 0.0)]  # written and read
        self._moving: list[tuple[int, _Transfer, float]] | None = None  # with its rate; None: has changed
        self._next_s = self._speed = 0.0

    def submit(self, channel: Channel, what: object, nbytes: int) -> None:
        """Queue a transfer, which :meth:`advance` returns as ``what`` when it ends."""
        self._queues[channel].append(_Transfer(what, float(nbytes), self.now_s + self._latency_s))
        self._moving = None

    def submit_units(self, traffic: Traffic) -> None:
        """Queue the transfers of units; see [Note: units go first]."""
        self._units[_READ].left_nbytes += traffic.nbytes_read
        self._units[_WRITE].left_nbytes += traffic.nbytes_written
        self._moving = None

    def cancel(self, channel: Channel, what: object) -> bool:
        """Cancel a transfer that waits for another one; False: it is first in its queue, so on its way."""
        queue = self._queues[channel]
        for at, transfer in enumerate(queue):
            if transfer.what == what and at:
                del queue[at]
                return True
        return False

    def state(self) -> list[list[tuple[int, float]]]:
        """Return each channel's queue as bytes left and seconds until they move, rounded to compare."""
        return [
            [(round(each.left_nbytes), round(max(0.0, each.ready_s - self.now_s), 9)) for each in queue]
            for queue in self._queues
        ]

    def speed(self) -> float:
        """Return the speed of compute beside what moves now, at most 1."""
        if self._moving is None:
            self._settle()
        return self._speed

    def next_s(self) -> float:
        """Return the seconds until a transfer ends or rates change; infinite if nothing moves."""
        if self._moving is None:
            self._settle()
        return self._next_s

    def moving(self) -> list[tuple[int, _Transfer, float]]:
        """Return the transfers that move now, with channel and bytes per second."""
        return self._settle() if self._moving is None else self._moving

    def advance(self, passed_s: float) -> list[tuple[int, Any, float]]:
        """Let time pass, at most :meth:`next_s`; return channel, what and beginning (s) of what ended."""
        moving = self.moving()
        ended: list[tuple[int, Any, float]] = []
        self.now_s += passed_s
        if passed_s >= self._next_s:
            self._moving = None
        self._next_s -= passed_s
        for channel, transfer, rate in moving:
            transfer.left_nbytes -= rate * passed_s
            # Less than half a byte is nothing, or rounding would leave crumbs that never end.
            if transfer.left_nbytes <= 0.5:
                transfer.left_nbytes, self._moving = 0.0, None
                assert transfer.began_s is not None
                ended.append((channel, transfer.what, transfer.began_s))
                if transfer.what is None:
                    transfer.began_s = None  # units will move again
                else:
                    self._queues[channel].popleft()
        return ended

    def _settle(self) -> list[tuple[int, _Transfer, float]]:
        """Return what moves now at which rate; set the speed of compute, and the time until that changes."""
        moving: list[tuple[int, _Transfer, float]] = []
        next_s, beside, rates = NEVER_S, 0.0, self.rates
        for channel, queue in enumerate(self._queues):
            if channel < 2 and self._units[channel].left_nbytes:
                moving.append((channel, self._units[channel], rates[channel]))
            elif queue:
                first = queue[0]
                wait_s = first.ready_s - self.now_s
                if wait_s <= _NOW_S:
                    moving.append((channel, first, rates[channel]))
                elif wait_s < next_s:
                    next_s = wait_s
        if len(moving) > 1 and moving[1][0] == _READ:  # beside writes
            read, write = self._mixed
            moving[:2] = [(_WRITE, moving[0][1], write), (_READ, moving[1][1], read)]
        moving = [each for each in moving if each[2] > 0]
        for _, transfer, rate in moving:
            if transfer.began_s is None:
                transfer.began_s = self.now_s
            left_s = transfer.left_nbytes / rate
            if left_s < next_s:
                next_s = left_s
            if transfer.what is not None:
                beside += rate
        self._moving, self._next_s = moving, next_s
        self._speed = max(LEAST_SPEED, 1 - self._delay_s_per_byte * beside)
        return moving


@dataclass(slots=True, eq=False)
class Task:
    """Describes a job of a server."""

    time_s: float
    then: Callable[[], None]
    threads: float = 1.0  # that it keeps busy, without an accelerator: see [Note: shared cores]
    ready: bool = True  # it can begin; those behind it wait until it can


class Server:
    """Serves jobs one after the other, in the order in which they were submitted."""

    def __init__(self) -> None:
        self._jobs: deque[Task] = deque()
        self.left_s = NEVER_S  # until the first job ends; infinite: none has begun

    @property
    def busy(self) -> bool:
        return self.left_s < NEVER_S

    @property
    def threads(self) -> float:
        return self._jobs[0].threads if self.busy else 0.0

    def submit(self, job: Task) -> None:
        self._jobs.append(job)
        self._begin()

    def ready(self, job: Task) -> None:
        """Mark ``job`` as ready to begin when its turn comes."""
        job.ready = True
        self._begin()

    def state(self) -> list[float]:
        """Return the seconds that each queued job takes, in order, rounded so that states can be compared."""
        times_s = (job.time_s if job.ready else NEVER_S for job in self._jobs)
        return [round(time_s, _DIGITS) for time_s in (self.left_s, *times_s)]

    def end(self) -> Callable[[], None]:
        """Remove the first job, which has ended, and return what follows it."""
        then = self._jobs.popleft().then
        self.left_s = NEVER_S
        self._begin()
        return then

    def _begin(self) -> None:
        if self.left_s == NEVER_S and self._jobs and self._jobs[0].ready:
            self.left_s = self._jobs[0].time_s


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


class VirtualClock:
    """Advances time for a rank's channels, collectives, cores and device, and counts what they do."""

    def __init__(self, rates: RankRates) -> None:
        self._rates, self._computing = rates, False
        self._queues = TransferQueues(rates.channels)
        #: Each does one thing after the other beside compute.
        self.servers = {LINKS: Server(), UPDATE: Server(), DECODE: Server()}
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
        while work_s > 1e-12:
            speed = self._queues.speed() * self._share()
            if not self._rates.cores and self.servers[DECODE].busy:
                speed *= 0.5  # they share the device
            work_s -= speed * self.elapse(work_s / speed)
        self._computing = False

    def move(self, channel: Channel, nbytes: int, then: Callable[[], None]) -> None:
        self.count(channel, nbytes)
        self.send(channel, nbytes, then)

    def count(self, channel: Channel, nbytes: int) -> None:
        """Count bytes of this step, whenever they move."""
        self.nbytes[_LABELS[channel]] += nbytes

    def send(self, channel: Channel, nbytes: int, then: Callable[[], None]) -> None:
        """Queue the transfer of bytes that were counted."""
        if self._queues.rates[channel] > 0 and nbytes > 0:
            self._queues.submit(channel, then, nbytes)
        else:
            then()

    def serve(self, name: str, time_s: float, then: Callable[[], None], threads: float = 1.0) -> None:
        """Queue a job of ``time_s`` on the server ``name``."""
        self.servers[name].submit(Task(time_s, then, threads))

    def elapse(self, most_s: float) -> float:
        """Let time pass until something ends, at most ``most_s``; return it (s), infinite if nothing will."""
        share, queues, servers = self._share(), self._queues, self.servers.items()
        passed_s = min(most_s, queues.next_s())
        for _, server in servers:
            if server.left_s < share * passed_s:
                passed_s = server.left_s / share
        if passed_s == NEVER_S:
            return passed_s
        busy_s, ends = self.busy_s, False
        for channel, _, _ in queues.moving():
            busy_s[_LABELS[channel]] += passed_s
        for name, server in servers:
            if server.left_s < NEVER_S:
                busy_s[name] += passed_s
                server.left_s -= share * passed_s
                ends = ends or server.left_s <= 1e-12
        ended = queues.advance(passed_s)
        for _, server in servers if ends else ():  # what ends may submit to another one
            while server.left_s <= 1e-12:
                server.end()()
        for _, then, _ in ended:
            then()
        return passed_s

    def _share(self) -> float:
        """Return the share of full speed at which each running thread works when threads outnumber cores."""
        rates = self._rates
        if not rates.cores:
            return 1.0
        threads = sum(server.threads for server in self.servers.values()) + rates.threads * self._computing
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
        return self._queues.state(), *(server.state() for server in self.servers.values())


class DeviceMemory:
    """Counts what is leased of the device budget, as the pools do."""

    def __init__(self, division: DeviceBudget, *, on_accelerator: bool) -> None:
        self._total_nbytes, self._on_accelerator = division.total, on_accelerator
        self.updated = frozenset(division.on_device)  # units whose states are there
        self._leased_nbytes = self.peak_nbytes = division.states
        self._passing_nbytes = self.turn = 0  # of the gradient that is open: see [Note: gradients that pass]

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
        """Free the memory of earlier gradients, since the next gradient has begun."""
        self.turn += 1
        self._passing_nbytes = 0

    def state(self) -> tuple[int, int]:
        return self._leased_nbytes, self._passing_nbytes
