"""Channels between device memory, host memory and NVMe: their rates, and the bytes that each can still carry.

[Note: bytes by operator]
A timeline holds, for each operator, the bytes that fit into the operator's time and are not yet booked. So a
transfer may use several gaps, and two transfers may share one.

[Note: reads beside writes]
When an NVMe drive reads and writes at once, both together move ``mixed_bytes_per_s``, half each as far as
they can. A byte that is written therefore costs the reads of the same time what they lose while it moves.
"""

from collections.abc import Iterable
from enum import IntEnum

import numpy as np

from infinity.core.plan import Hardware, Place, Traffic


class Channel(IntEnum):
    """One direction of one link."""

    NVME_WRITE = 0
    NVME_READ = 1
    DEVICE_TO_HOST = 2
    HOST_TO_DEVICE = 3

    @property
    def label(self) -> str:
        """Name in tables and pictures."""
        return ("NVMe write", "NVMe read", "device to host", "host to device")[self]


#: The channel by which a storage goes to a place, and the one by which it comes back.
STORE = {Place.NVME: Channel.NVME_WRITE, Place.HOST: Channel.DEVICE_TO_HOST}
LOAD = {Place.NVME: Channel.NVME_READ, Place.HOST: Channel.HOST_TO_DEVICE}

#: Share of its speed that compute keeps beside transfers, at least.
LEAST_SPEED = 0.1


def mixed_rates(hardware: Hardware) -> tuple[float, float]:
    """Bytes per second of reads and of writes while both are busy; see [Note: reads beside writes]."""
    half = hardware.mixed_bytes_per_s / 2
    write = min(hardware.write_bytes_per_s, half)
    read = min(hardware.read_bytes_per_s, hardware.mixed_bytes_per_s - write)
    return read, min(hardware.write_bytes_per_s, hardware.mixed_bytes_per_s - read)


def delay_s_per_byte(hardware: Hardware) -> float:
    """Seconds by which each byte that moves delays compute, bounded so that compute never stands still."""
    read, write = mixed_rates(hardware)
    most = max(read + write, hardware.read_bytes_per_s, hardware.write_bytes_per_s)
    most += 2 * hardware.host_bytes_per_s if hardware.host_nbytes else 0.0
    return min(hardware.compute_s_per_byte, (1 - LEAST_SPEED) / most if most else 0.0)


class FenwickTree:
    """Prefix sums of numbers >= 0 that change, and searches in them, in logarithmic time.

    Source: Fenwick, "A new data structure for cumulative frequency tables", 1994.
    """

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers: list[float] = numbers.tolist()
        until, i = np.zeros(len(numbers) + 1, numbers.dtype), np.arange(len(numbers) + 1)
        np.cumsum(numbers, out=until[1:])
        # Entry i holds the sum of the last (i & -i) numbers before position i; searches never pass the last.
        self._top = 1 << len(numbers).bit_length() >> 1
        self._tree: list[float] = (until - until[i - (i & -i)]).tolist()
        self._tree += [float("inf")] * (2 * self._top - len(self._tree))

    def add(self, at: int, number: float) -> None:
        """Add ``number`` to the number at ``at``."""
        self.numbers[at] += number
        tree, i, end = self._tree, at + 1, len(self.numbers)
        while i <= end:
            tree[i] += number
            i += i & -i

    def below(self, end: int) -> float:
        """The sum of the numbers before position ``end``."""
        tree, total = self._tree, self._tree[0]
        while end:
            total += tree[end]
            end &= end - 1
        return total

    def between(self, begin: int, end: int) -> float:
        """The sum of the numbers from ``begin`` up to ``end``, ``begin <= end``."""
        tree, total = self._tree, 0.0
        while end > begin:
            total += tree[end]
            end &= end - 1
        while begin > end:  # common to both prefixes
            total -= tree[begin]
            begin &= begin - 1
        return total

    def first_end(self, amount: float) -> int:
        """The smallest end with ``below(end) >= amount``; past the last position if there is none."""
        tree, at, step = self._tree, 0, self._top
        if amount <= 0:
            return 0
        while step:
            number = tree[at + step]
            if number < amount:
                at += step
                amount -= number
            step >>= 1
        return at + 1

    def last_end(self, amount: float) -> int:
        """The largest end with ``below(end) <= amount``."""
        tree, at, step = self._tree, 0, self._top
        while step:
            number = tree[at + step]
            if number <= amount:
                at += step
                amount -= number
            step >>= 1
        return at


class ChannelTimeline:
    """Bytes that one channel can still carry while each operator runs; see [Note: bytes by operator].

    Args:
        times: Seconds of each operator.
        bytes_per_s: Rate of the channel.
        latency_s: Added to every transfer.
    """

    def __init__(self, times: np.ndarray, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        self._latency_nbytes = int(latency_s * bytes_per_s)
        self._free = FenwickTree((times * bytes_per_s).astype(np.int64))
        self._length = len(times)
        self._total = int(self._free.below(self._length))
        self._beside: ChannelTimeline | None = None
        self._tax = 0.0

    def share(self, beside: "ChannelTimeline", tax: float) -> None:
        """Let each byte booked here take ``tax`` bytes of ``beside``; see [Note: reads beside writes]."""
        self._beside, self._tax = beside, tax

    def time_s(self, nbytes: int) -> float:
        """Seconds for which ``nbytes`` alone keep the channel busy."""
        return (nbytes + self._latency_nbytes) / self.bytes_per_s if self.bytes_per_s else float("inf")

    def booked_nbytes(self, nbytes: int) -> int:
        """Bytes of the timeline that a transfer of ``nbytes`` takes, its latency included."""
        return nbytes + self._latency_nbytes

    def until(self) -> np.ndarray:
        """Free bytes before each operator, and of the whole step, ``(operators + 1,)``."""
        return np.cumsum([0, *self._free.numbers])

    def earliest_end(self, begin: int, nbytes: int) -> int | None:
        """The first operator that finds ``nbytes`` moved if they may start with operator ``begin``.

        Returns:
            None if the rest of the step has no room for them.
        """
        until = int(self._free.below(begin)) + nbytes + self._latency_nbytes
        return None if until > self._total else max(begin, self._free.first_end(until))

    def latest_start(self, end: int, nbytes: int) -> int | None:
        """The last operator with which ``nbytes`` may start so that operator ``end`` finds them moved.

        Returns:
            None if the step up to ``end`` has no room for them.
        """
        until = int(self._free.below(end)) - nbytes - self._latency_nbytes
        return None if until < 0 else min(end, self._free.last_end(until))

    def book_from(self, begin: int, nbytes: int) -> None:
        """Book ``nbytes`` as early as possible from operator ``begin`` on.

        Bytes without room at the end of the step go on at its beginning, as the bytes of the step before do.
        Bytes that find no room in a whole step are dropped.
        """
        wanted, at = min(nbytes + self._latency_nbytes, self._total), begin % self._length
        while wanted > 0:
            if not self._free.numbers[at]:
                at = self._free.first_end(self._free.below(at) + 1) - 1
            if at < self._length:
                wanted -= self._book(at, wanted)
            at = at + 1 if at + 1 < self._length else 0

    def book_until(self, end: int, nbytes: int) -> None:
        """Book ``nbytes`` as late as possible before operator ``end``; those without room are dropped."""
        wanted, at = min(nbytes + self._latency_nbytes, self._total), end - 1
        while wanted > 0 and at >= 0:
            if not self._free.numbers[at]:
                at = self._free.first_end(self._free.below(at)) - 1
            if at >= 0:
                wanted -= self._book(at, wanted)
            at -= 1

    def _book(self, at: int, wanted: int) -> int:
        taken = self._drop(at, wanted)
        if self._beside is not None and self._tax:
            self._beside._drop(at, int(taken * self._tax))
        return taken

    def _drop(self, at: int, nbytes: int) -> int:
        dropped = min(nbytes, int(self._free.numbers[at]))
        self._free.add(at, -dropped)
        self._total -= dropped
        return dropped


def channel_timelines(
    times: np.ndarray, hardware: Hardware, traffic: Iterable[Traffic] = ()
) -> dict[Channel, ChannelTimeline]:
    """Timelines of a step whose operators take ``times`` (s), with the ``traffic`` of units booked."""
    read, write, host = hardware.read_bytes_per_s, hardware.write_bytes_per_s, hardware.host_bytes_per_s
    made = {
        channel: ChannelTimeline(times, rate, hardware.latency_s)
        for channel, rate in zip(Channel, (write, read, host, host))
    }
    writes, reads = made[Channel.NVME_WRITE], made[Channel.NVME_READ]
    mixed_read, mixed_write = mixed_rates(hardware)
    writes.share(reads, (read - mixed_read) / mixed_write if mixed_write else 0.0)
    reads.share(writes, (write - mixed_write) / mixed_read if mixed_read else 0.0)
    for unit in traffic:
        if unit.nbytes_read:
            reads.book_from(unit.at, unit.nbytes_read)
        if unit.nbytes_written:
            writes.book_from(unit.at, unit.nbytes_written)
    return made
