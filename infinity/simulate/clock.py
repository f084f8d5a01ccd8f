"""A clock on which compute and channels run beside each other.

[Note: rates]
Between two events every rate is constant. A channel moves one transfer after the other. NVMe that reads and
writes at once moves ``mixed_bytes_per_s`` in all: half each, or what one of them leaves. Compute runs at the
speed ``1 - compute_s_per_byte * bytes_per_s`` of the activations that move meanwhile, and stands where that
is not above zero. What units move was there when the profile was measured, and slows nothing more.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from infinity.core.plan import Hardware
from infinity.simulate.timeline import Interval


class Channel(StrEnum):
    """Where bytes move, one transfer after the other."""

    WRITE = "NVMe write"
    READ = "NVMe read"
    TO_HOST = "device to host"
    FROM_HOST = "host to device"


@dataclass(slots=True, eq=False)
class Move:
    """Bytes on their way.

    Attributes:
        ready_s: Before this time the first of them does not move.
        left_nbytes: How many are still to move.
        then: Called when the last has moved.
        slows: Compute runs slower beside it.
        began_s: When the first of them moved; None: not yet.
    """

    channel: Channel
    name: str
    ready_s: float
    left_nbytes: float
    then: Callable[[], None]
    slows: bool
    began_s: float | None = None
    ended: bool = False


@dataclass(slots=True)
class Clock:
    """Time, and what moves; see [Note: rates]."""

    hardware: Hardware
    now_s: float = 0.0
    busy: dict[Channel, list[Interval]] = field(default_factory=lambda: {c: [] for c in Channel})
    _queues: dict[Channel, deque[Move]] = field(default_factory=lambda: {c: deque() for c in Channel})

    def submit(
        self, channel: Channel, name: str, nbytes: int, then: Callable[[], None], *, slows: bool = True
    ) -> Move:
        """Queue a transfer.

        Raises:
            ValueError: The hardware has no such channel.
        """
        if not self._alone_bytes_per_s(channel) > 0:
            raise ValueError(f"{name}: a plan moves it by {channel}, whose bandwidth is not above 0")
        move = Move(channel, name, self.now_s + self.hardware.latency_s, float(nbytes), then, slows)
        self._queues[channel].append(move)
        return move

    def cancel(self, move: Move) -> bool:
        """Take a transfer back that has not begun; whether that was so."""
        if move.began_s is not None:
            return False
        self._queues[move.channel].remove(move)
        return True

    def compute(self, work_s: float) -> None:
        """Let compute run for ``work_s`` of its own time."""
        while work_s > 0:
            work_s = self._advance(work_s)

    def wait(self, until: Callable[[], bool]) -> None:
        """Let compute stand until something that moves makes ``until()`` true."""
        while not until():
            self._advance(math.inf)

    def drain(self) -> None:
        """Let everything arrive."""
        self.wait(lambda: not any(self._queues.values()))

    def _advance(self, work_s: float) -> float:
        """Go to the next event; the work that is left then."""
        rates = self._rates()
        speed = max(0.0, 1.0 - self.hardware.compute_s_per_byte * sum(r for m, r in rates.items() if m.slows))
        step_s = work_s / speed if speed else math.inf
        for move, rate in rates.items():
            step_s = min(step_s, move.left_nbytes / rate)
        waiting = [queue[0] for queue in self._queues.values() if queue and queue[0] not in rates]
        step_s = min([step_s, *(move.ready_s - self.now_s for move in waiting)])
        assert step_s < math.inf, "nothing moves, and somebody waits"
        ended = [move for move, rate in rates.items() if move.left_nbytes / rate <= step_s]
        for move, rate in rates.items():
            move.left_nbytes -= rate * step_s
        for move in waiting:
            if move.ready_s - self.now_s <= step_s:
                move.ready_s = -math.inf  # rounding must not make it wait again
        left_s = 0.0 if speed and work_s / speed <= step_s else work_s - speed * step_s
        self.now_s += step_s
        for move in ended:
            self._end(move)
        return left_s

    def _end(self, move: Move) -> None:
        self._queues[move.channel].popleft()
        assert move.began_s is not None
        self.busy[move.channel].append(Interval(move.began_s, self.now_s, move.name))
        move.ended = True
        move.then()

    def _rates(self) -> dict[Move, float]:
        """Bytes per second of each transfer that moves now."""
        moving = [queue[0] for queue in self._queues.values() if queue and queue[0].ready_s <= self.now_s]
        for move in moving:
            move.began_s = self.now_s if move.began_s is None else move.began_s
        alone = {move: self._alone_bytes_per_s(move.channel) for move in moving}
        nvme = [move for move in moving if move.channel in (Channel.READ, Channel.WRITE)]
        if len(nvme) == 2:
            mixed, (one, other) = self.hardware.mixed_bytes_per_s, nvme
            shares = [(one, mixed - alone[other]), (other, mixed - alone[one])]
            alone |= {move: min(alone[move], max(mixed / 2, rest)) for move, rest in shares}
        return alone

    def _alone_bytes_per_s(self, channel: Channel) -> float:
        return {
            Channel.READ: self.hardware.read_bytes_per_s,
            Channel.WRITE: self.hardware.write_bytes_per_s,
        }.get(channel, self.hardware.host_bytes_per_s)
