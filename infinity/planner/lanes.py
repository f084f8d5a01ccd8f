"""Transfers in flight, played in time: what :mod:`infinity.planner.clock` moves its bytes on.

Each lane is a queue, first come, first served; the units' own bytes go before those of activations. Reads
and writes of NVMe that run together share the drive as :func:`infinity.planner.channels.mixed_rates` says.
"""

from collections import deque

from infinity.core.plan import Hardware, Place
from infinity.planner.channels import mixed_rates

WRITE, READ, TO_HOST, FROM_HOST = range(4)
STORING = {Place.NVME: WRITE, Place.HOST: TO_HOST}
LOADING = {Place.NVME: READ, Place.HOST: FROM_HOST}

#: Compute that runs beside transfers keeps at least this share of its speed.
LEAST_SPEED = 0.1


def delay_s_per_byte(hardware: Hardware) -> float:
    """How long a byte that moves delays compute, so that compute never stands still (s)."""
    read, write = mixed_rates(hardware)
    most = max(read + write, hardware.read_bytes_per_s, hardware.write_bytes_per_s)
    most += 2 * hardware.host_bytes_per_s if hardware.host_nbytes else 0.0
    return min(hardware.compute_s_per_byte, (1 - LEAST_SPEED) / most if most else 0.0)


class Lanes:
    """Four queues of transfers; time passes in :meth:`advance`."""

    def __init__(self, hardware: Hardware) -> None:
        self._alone = (
            hardware.write_bytes_per_s,
            hardware.read_bytes_per_s,
            hardware.host_bytes_per_s,
            hardware.host_bytes_per_s,
        )
        read, write = mixed_rates(hardware)
        self._mixed = (write, read)
        self._latency_s = hardware.latency_s
        self._queues: tuple[deque[int], ...] = (deque(), deque(), deque(), deque())
        self._left: list[float] = [0.0] * 4  # of the first of each queue, bytes
        self._units = [0.0, 0.0]  # bytes that units still have to write and read
        self._nbytes: dict[tuple[int, int], int] = {}
        self._delay_s_per_byte = delay_s_per_byte(hardware)

    def submit(self, lane: int, name: int, nbytes: int) -> None:
        """Queue a transfer, which :meth:`advance` names when it has ended."""
        self._nbytes[lane, name] = nbytes
        self._queues[lane].append(name)
        if len(self._queues[lane]) == 1:
            self._begin(lane)

    def submit_units(self, nbytes_read: int, nbytes_written: int) -> None:
        """Queue what units move, before everything else."""
        self._units[WRITE] += nbytes_written
        self._units[READ] += nbytes_read

    def cancel(self, lane: int, name: int) -> bool:
        """Take a transfer from the queue if no byte of it has moved; else it goes on."""
        queue = self._queues[lane]
        if queue and queue[0] == name:
            return False
        queue.remove(name)
        return True

    def speed(self) -> float:
        """How fast compute runs beside what moves now, of 1."""
        if not self._delay_s_per_byte:
            return 1.0
        rates = self._rates()
        moving = sum(rates[lane] for lane in range(4) if self._queues[lane] and not self._is_with_units(lane))
        return max(LEAST_SPEED, 1 - self._delay_s_per_byte * moving)

    def is_idle(self) -> bool:
        return not any(self._queues) and not any(self._units)

    def next_s(self) -> float:
        """Until a transfer ends, or rates change (s); infinite if nothing moves."""
        soonest = float("inf")
        for lane, rate in enumerate(self._rates()):
            nbytes = self._units[lane] if self._is_with_units(lane) else self._left[lane]
            if rate and (self._queues[lane] or self._is_with_units(lane)):
                soonest = min(soonest, nbytes / rate)
        return soonest

    def advance(self, passed_s: float) -> list[tuple[int, int]]:
        """Let time pass, at most :meth:`next_s`; lane and name of what ended."""
        ended = []
        for lane, rate in enumerate(self._rates()):
            moved = rate * passed_s
            if self._is_with_units(lane):
                self._units[lane] = _less(self._units[lane], moved)
            elif self._queues[lane]:
                self._left[lane] = _less(self._left[lane], moved)
                if not self._left[lane] and rate:
                    ended.append((lane, self._queues[lane].popleft()))
                    self._begin(lane)
        return ended

    def _begin(self, lane: int) -> None:
        if self._queues[lane]:
            nbytes = self._nbytes[lane, self._queues[lane][0]]
            self._left[lane] = nbytes + self._latency_s * self._alone[lane]

    def _is_with_units(self, lane: int) -> bool:
        return lane < 2 and self._units[lane] > 0

    def _rates(self) -> tuple[float, float, float, float]:
        writing = bool(self._queues[WRITE]) or self._units[WRITE] > 0
        reading = bool(self._queues[READ]) or self._units[READ] > 0
        write, read = self._mixed if writing and reading else self._alone[:2]
        return write, read, self._alone[TO_HOST], self._alone[FROM_HOST]


def _less(nbytes: float, moved: float) -> float:
    """What is left; less than half a byte is nothing, or rounding would leave crumbs that never end."""
    left = nbytes - moved
    return left if left > 0.5 else 0.0
