"""What each channel can still carry while each operator runs.

[Note: bytes by operator]
A channel is cut where operators begin. Each piece holds the bytes that fit into the operator's time and
that nobody has taken yet, so a transfer may use several holes, and two transfers share one.

[Note: reads beside writes]
When an NVMe drive reads and writes at once, both together move ``mixed_bytes_per_s``, half each as far as
they can. A byte that is written therefore costs the reads of the same time what they lose while it moves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infinity.core.plan import Hardware
from infinity.core.profile import Traffic
from infinity.planner.sums import Sums


class Channel:
    """Free bytes by operator; positions past the last operator go on at the first (the next step)."""

    def __init__(self, times: np.ndarray, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        self._latency_nbytes = int(latency_s * bytes_per_s)
        self._free = Sums((times * bytes_per_s).astype(np.int64))
        self._length = len(times)
        self._total = int(self._free.below(self._length))
        self._beside: Channel | None = None
        self._tax = 0.0

    def share(self, beside: "Channel", tax: float) -> None:
        """A byte that moves here takes ``tax`` bytes from ``beside``; see [Note: reads beside writes]."""
        self._beside, self._tax = beside, tax

    def time_s(self, nbytes: int) -> float:
        """How long the channel is busy with ``nbytes``, alone (s)."""
        return (nbytes + self._latency_nbytes) / self.bytes_per_s if self.bytes_per_s else float("inf")

    def free_nbytes(self, begin: int, end: int) -> int:
        """What the channel can still carry in [begin, end), at most a step."""
        return int(self._below(end) - self._below(begin))

    def booked_nbytes(self, nbytes: int) -> int:
        """What ``nbytes`` take of it, their latency with them."""
        return nbytes + self._latency_nbytes

    def until(self) -> np.ndarray:
        """What the channel can still carry before each operator, and in the step."""
        return np.cumsum([0, *self._free.numbers])

    def earliest_end(self, begin: int, nbytes: int) -> int | None:
        """The first operator that finds ``nbytes`` moved when they may start with operator ``begin``.

        None when a whole step has no room for them.
        """
        before = self._below(begin)
        until = before + nbytes + self._latency_nbytes
        if until > before + self._total:
            return None
        steps = max(0, (until - 1) // self._total) if self._total else 0
        return max(begin, steps * self._length + self._free.first_end(until - steps * self._total))

    def latest_start(self, end: int, nbytes: int) -> int | None:
        """The last operator with which ``nbytes`` may start, so that operator ``end`` finds them moved.

        None when the time from operator 0 on (or a step before ``end``, if that is later) has no room.
        """
        until = self._below(end) - nbytes - self._latency_nbytes
        if until < 0 or nbytes + self._latency_nbytes > self._total:
            return None
        steps = until // self._total if self._total else 0
        return min(end, steps * self._length + self._free.last_end(until - steps * self._total))

    def take_from(self, begin: int, nbytes: int) -> None:
        """Carry ``nbytes`` as early as may be from operator ``begin`` on; what finds no room is dropped."""
        wanted, at = min(nbytes + self._latency_nbytes, self._total), begin % self._length
        while wanted > 0:
            if not self._free.numbers[at]:
                at = self._free.first_end(self._free.below(at) + 1) - 1
            if at < self._length:
                wanted -= self._take(at, wanted)
            at = at + 1 if at + 1 < self._length else 0

    def take_until(self, end: int, nbytes: int) -> None:
        """Carry ``nbytes`` as late as may be before operator ``end``; what finds no room is dropped."""
        wanted, at = min(nbytes + self._latency_nbytes, self._total), (end - 1) % self._length
        while wanted > 0:
            if not self._free.numbers[at]:
                at = self._free.first_end(self._free.below(at)) - 1
            if at >= 0:
                wanted -= self._take(at, wanted)
            at = at - 1 if at > 0 else self._length - 1

    def _take(self, at: int, wanted: int) -> int:
        taken = self._drop(at, wanted)
        if self._beside is not None and self._tax:
            self._beside._drop(at, int(taken * self._tax))
        return taken

    def _drop(self, at: int, nbytes: int) -> int:
        dropped = min(nbytes, int(self._free.numbers[at]))
        self._free.add(at, -dropped)
        self._total -= dropped
        return dropped

    def _below(self, end: int) -> int:
        """Free bytes before operator ``end``, counting on in the next step."""
        below = 0
        while end >= self._length:
            below, end = below + self._total, end - self._length
        return below + int(self._free.below(end))


@dataclass(frozen=True, slots=True)
class Channels:
    """The ways between device memory and its neighbours, for one step.

    Attributes:
        host_nbytes: Host memory that may be taken.
    """

    nvme_write: Channel
    nvme_read: Channel
    to_host: Channel
    from_host: Channel
    host_nbytes: int

    @classmethod
    def of(cls, times: np.ndarray, hardware: Hardware, traffic: Sequence[Traffic] = ()) -> "Channels":
        """The channels of a step whose operators take ``times`` (s), with the units' own traffic on them."""
        read, write = hardware.read_bytes_per_s, hardware.write_bytes_per_s
        latency_s = hardware.latency_s
        made = cls(
            Channel(times, write, latency_s),
            Channel(times, read, latency_s),
            Channel(times, hardware.host_bytes_per_s, latency_s),
            Channel(times, hardware.host_bytes_per_s, latency_s),
            hardware.host_nbytes,
        )
        mixed_read, mixed_write = mixed_rates(hardware)
        made.nvme_write.share(made.nvme_read, (read - mixed_read) / mixed_write if mixed_write else 0.0)
        made.nvme_read.share(made.nvme_write, (write - mixed_write) / mixed_read if mixed_read else 0.0)
        for unit in traffic:
            if unit.nbytes_read:
                made.nvme_read.take_from(unit.at, unit.nbytes_read)
            if unit.nbytes_written:
                made.nvme_write.take_from(unit.at, unit.nbytes_written)
        return made


def mixed_rates(hardware: Hardware) -> tuple[float, float]:
    """Bytes per second of reads and of writes while both are busy; see [Note: reads beside writes]."""
    half = hardware.mixed_bytes_per_s / 2
    write = min(hardware.write_bytes_per_s, half)
    read = min(hardware.read_bytes_per_s, hardware.mixed_bytes_per_s - write)
    return read, min(hardware.write_bytes_per_s, hardware.mixed_bytes_per_s - read)
