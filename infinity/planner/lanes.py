"""Transfers in flight, played in time: what :mod:`infinity.planner.clock` moves its bytes on.

[Note: rates]
Between two events every rate is constant. A lane moves one transfer after the other, in the order in which
they were asked for, as the executor's queues do. NVMe that reads and writes at once moves what
:func:`infinity.planner.channels.mixed_rates` says. A transfer's first byte moves ``latency_s`` after it was
asked for, also if it had to wait for others meanwhile: the executor has several of them on their way.
Compute beside transfers loses ``compute_s_per_byte`` for each of their bytes, but it never stands: the
operating system gives it a share of the cores.

[Note: units go first]
What units move goes before the bytes of activations. The executor's engine serves both in the order of
asking; but there compute waits for a unit that is late, and here it does not, since the measured step has
waited for units already. So they come when they came, and activations bear the whole delay. They slow
compute no more than they did when it was measured.
"""

from collections import deque
from dataclasses import dataclass

from infinity.core.plan import Hardware, Place
from infinity.planner.channels import mixed_rates

WRITE, READ, TO_HOST, FROM_HOST = range(4)
#: For people.
NAMES = ("NVMe write", "NVMe read", "device to host", "host to device")
STORING = {Place.NVME: WRITE, Place.HOST: TO_HOST}
LOADING = {Place.NVME: READ, Place.HOST: FROM_HOST}

#: Compute that runs beside transfers keeps at least this share of its speed.
LEAST_SPEED = 0.1
#: What begins in less than this begins now, or rounding would make it wait again and again (s).
_NOW_S = 1e-12


def delay_s_per_byte(hardware: Hardware) -> float:
    """How long a byte that moves delays compute, so that compute never stands still (s)."""
    read, write = mixed_rates(hardware)
    most = max(read + write, hardware.read_bytes_per_s, hardware.write_bytes_per_s)
    most += 2 * hardware.host_bytes_per_s if hardware.host_nbytes else 0.0
    return min(hardware.compute_s_per_byte, (1 - LEAST_SPEED) / most if most else 0.0)


class Recorder:
    """Learns what a play looks like; this one forgets it. Names are indices of a script's saved storages."""

    def moved(self, lane: int, name: int | None, begin_s: float, end_s: float) -> None:
        """A transfer has ended; None: units moved."""

    def holds(self, at_s: float, nbytes: int) -> None:
        """From ``at_s`` on, ``nbytes`` are in device memory."""

    def began_backward(self, at_s: float) -> None:
        """Forward has ended."""

    def waited(self, name: int | None, begin_s: float, end_s: float) -> None:
        """Compute has waited for a load; None: for stores."""

    def recomputed(self, at: int, begin_s: float, end_s: float) -> None:
        """The recomputation at position ``at`` has run."""


@dataclass(slots=True)
class _Move:
    """Bytes on their way; None is the name of what units move, and ``began_s`` when the first byte moved."""

    name: int | None
    left_nbytes: float
    ready_s: float
    began_s: float | None = None


class Lanes:
    """Four queues of transfers, and time, which passes in :meth:`advance`; see [Note: rates].

    Attributes:
        now_s: Since the step began (s).
    """

    def __init__(self, hardware: Hardware, recorder: Recorder) -> None:
        host = hardware.host_bytes_per_s
        self.now_s = 0.0
        self._alone = (hardware.write_bytes_per_s, hardware.read_bytes_per_s, host, host)
        self._mixed = mixed_rates(hardware)
        self._latency_s, self._recorder = hardware.latency_s, recorder
        self._delay_s_per_byte = delay_s_per_byte(hardware)
        self._queues: tuple[deque[_Move], ...] = (deque(), deque(), deque(), deque())
        self._units = [_Move(None, 0.0, 0.0), _Move(None, 0.0, 0.0)]  # written and read
        self._moving: list[tuple[int, _Move, float]] | None = None  # with its rate; None: has changed
        self._next_s = self._speed = 0.0

    def rate(self, lane: int) -> float:
        """What the lane moves alone (bytes per second)."""
        return self._alone[lane]

    def submit(self, lane: int, name: int, nbytes: int) -> None:
        """Queue a transfer, which :meth:`advance` names when it has ended."""
        self._queues[lane].append(_Move(name, float(nbytes), self.now_s + self._latency_s))
        self._moving = None

    def submit_units(self, nbytes_read: int, nbytes_written: int) -> None:
        """Queue what units move; see [Note: units go first]."""
        self._units[READ].left_nbytes += nbytes_read
        self._units[WRITE].left_nbytes += nbytes_written
        self._moving = None

    def cancel(self, lane: int, name: int) -> bool:
        """Take a transfer back that waits for another one. The first one's bytes are on their way."""
        queue = self._queues[lane]
        for at, move in enumerate(queue):
            if move.name == name and at:
                del queue[at]
                return True
        return False

    def speed(self) -> float:
        """How fast compute runs beside what moves now, of 1."""
        self._settle()
        return self._speed

    def next_s(self) -> float:
        """Until a transfer ends, or rates change (s); infinite if nothing moves."""
        self._settle()
        return self._next_s

    def advance(self, passed_s: float) -> list[tuple[int, int]]:
        """Let time pass, at most :meth:`next_s`; lane and name of what ended."""
        moving, ended = self._settle(), []
        self.now_s += passed_s
        if passed_s >= self._next_s:
            self._moving = None
        self._next_s -= passed_s
        for lane, move, rate in moving:
            move.left_nbytes -= rate * passed_s
            # Less than half a byte is nothing, or rounding would leave crumbs that never end.
            if move.left_nbytes <= 0.5:
                move.left_nbytes, self._moving = 0.0, None
                self._end(lane, move)
                if move.name is not None:
                    ended.append((lane, move.name))
        return ended

    def _end(self, lane: int, move: _Move) -> None:
        assert move.began_s is not None
        self._recorder.moved(lane, move.name, move.began_s, self.now_s)
        if move.name is None:
            move.began_s = None  # units will move again
        else:
            self._queues[lane].popleft()

    def _settle(self) -> list[tuple[int, _Move, float]]:
        """What moves now, at which rate; and with it speed, and the time until that changes."""
        if self._moving is not None:
            return self._moving
        first: list[_Move | None] = [queue[0] if queue else None for queue in self._queues]
        next_s = float("inf")
        for lane, move in enumerate(first):
            if lane < 2 and self._units[lane].left_nbytes:
                first[lane] = self._units[lane]
            elif move is not None and move.ready_s - self.now_s > _NOW_S:
                next_s, first[lane] = min(next_s, move.ready_s - self.now_s), None
        read, write = self._mixed
        both = first[WRITE] is not None and first[READ] is not None
        rates = (write, read, *self._alone[2:]) if both else self._alone
        self._moving, beside = [], 0.0
        for lane, move in enumerate(first):
            if move is not None and rates[lane] > 0:
                self._moving.append((lane, move, rates[lane]))
                move.began_s = self.now_s if move.began_s is None else move.began_s
                next_s = min(next_s, move.left_nbytes / rates[lane])
                beside += rates[lane] if move.name is not None else 0.0
        self._next_s, self._speed = next_s, max(LEAST_SPEED, 1 - self._delay_s_per_byte * beside)
        return self._moving
