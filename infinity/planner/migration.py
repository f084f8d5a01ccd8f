"""TeraIO's algorithm 1: which inactive periods are spent away from device memory, and where.

The best period has the largest benefit per cost. Benefit: its bytes, for as long as they are away while
memory is too full. Cost: the time that its two transfers take of their channels. Both change with every
choice, but a benefit only falls, so a heap of old values is enough: the best of them is valued again,
and taken if it is still (nearly) the best.

Source: TeraIO (arXiv:2506.06472), section 3.3, algorithm 1.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from infinity.core.plan import Place
from infinity.planner.channels import Channel, Channels
from infinity.planner.lifetimes import InactivePeriod
from infinity.planner.sums import Sums

#: A period whose value has fallen is still taken while it is worth this share of the next best's old value.
NEARLY_BEST = 0.75


@dataclass(frozen=True, slots=True)
class Migration:
    """A period whose storage is away.

    Attributes:
        period: Its index among those that were given.
        place: Where the storage is meanwhile.
        gone: The first operator that finds its memory free.
        back: The operator with which it starts to come back; its memory is taken from then on.
    """

    period: int
    place: Place
    gone: int
    back: int


def migrate(
    periods: Sequence[InactivePeriod],
    times: np.ndarray,
    memory: np.ndarray,
    capacity: int,
    channels: Channels,
) -> list[Migration]:
    """Choose migrations until ``memory`` is at most ``capacity``, or nothing helps any more.

    Args:
        times: Seconds of each operator.
        memory: Bytes during each operator, which is left as it is.
        channels: The migrations' bytes are put on them.

    Returns:
        The migrations in the order of choice; all their transfers hide behind operators.
    """
    pressure = Pressure(times, memory, capacity)
    chooser = _Chooser(periods, pressure, channels)
    heap = [(-chooser.at_most(index), index) for index in range(len(periods)) if periods[index].nbytes]
    heapq.heapify(heap)
    chosen = []
    while heap and pressure.is_high():
        _, index = heapq.heappop(heap)
        choice = chooser.best(index)
        if choice is None:
            continue
        if heap and choice.value < -NEARLY_BEST * heap[0][0]:
            heapq.heappush(heap, (-choice.value, index))
            continue
        migration = Migration(index, choice.place, choice.gone, choice.back)
        chooser.take(migration)
        chosen.append(migration)
    return chosen


class Pressure:
    """Memory that is above capacity, and for how long; memory only falls.

    Operators lie in buckets, the square root of their number in each: what lowers a bucket as a whole is
    written down for the whole, until one of its operators is no longer above.
    """

    def __init__(self, times: np.ndarray, memory: np.ndarray, capacity: int) -> None:
        self._length = len(memory)
        self._width = max(16, int(len(memory) ** 0.5))
        buckets = max(1, -(-len(memory) // self._width))
        self._excess = np.zeros((buckets, self._width), dtype=np.int64)
        self._excess.ravel()[: len(memory)] = np.maximum(memory - capacity, 0)
        self._times = Sums(np.where(memory > capacity, times, 0.0))
        self._counts = np.count_nonzero(self._excess, axis=1)
        self._above = int(self._counts.sum())
        self._lowered = np.zeros(buckets, dtype=np.int64)  # of a bucket as a whole, not yet in its operators
        self._least = np.array([_least_above(excess) for excess in self._excess])

    def is_high(self) -> bool:
        """Is memory above capacity anywhere?"""
        return self._above > 0

    def high_s(self, begin: int, end: int) -> float:
        """How long memory is above capacity in [begin, end), which may go on in the next step (s)."""
        if end > self._length:
            return self.high_s(begin, self._length) + self.high_s(0, end - self._length)
        return self._times.between(begin, end)

    def lower(self, begin: int, end: int, nbytes: int) -> None:
        """Take ``nbytes`` away in [begin, end), which may go on in the next step."""
        if end > self._length:
            self.lower(0, end - self._length, nbytes)
            end = self._length
        if begin >= end:
            return
        low, high = -(-begin // self._width), end // self._width
        if low > high:
            self._lower_in(high, begin, end, nbytes)
            return
        self._lowered[low:high] += nbytes
        for bucket in low + np.flatnonzero(self._least[low:high] <= self._lowered[low:high]):
            self._settle(int(bucket))
        if begin < low * self._width:
            self._lower_in(low - 1, begin, low * self._width, nbytes)
        if high * self._width < end:
            self._lower_in(high, high * self._width, end, nbytes)

    def _lower_in(self, bucket: int, begin: int, end: int, nbytes: int) -> None:
        """The same for a part of one bucket."""
        if self._counts[bucket]:
            first = bucket * self._width
            self._settle(bucket, slice(begin - first, end - first), nbytes)

    def _settle(self, bucket: int, part: slice = slice(0), nbytes: int = 0) -> None:
        """Write down what the bucket was lowered by, and forget the operators that are no longer above."""
        excess = self._excess[bucket]
        was_above = excess > 0
        excess -= self._lowered[bucket]
        excess[part] -= nbytes
        self._lowered[bucket] = 0
        first = bucket * self._width
        for at in np.flatnonzero(was_above & (excess <= 0)).tolist():
            self._times.add(first + at, -self._times.numbers[first + at])
        np.maximum(excess, 0, out=excess)
        count = int(np.count_nonzero(excess))
        self._above += count - int(self._counts[bucket])
        self._counts[bucket] = count
        self._least[bucket] = _least_above(excess)


def _least_above(excess: np.ndarray) -> int:
    above = excess[excess > 0]
    return int(above.min()) if len(above) else int(np.iinfo(np.int64).max)


class _Choice(NamedTuple):
    """A migration that is possible now, and its benefit per cost."""

    value: float
    place: Place
    gone: int
    back: int


class _Chooser:
    """Values periods as memory and channels are now."""

    def __init__(self, periods: Sequence[InactivePeriod], pressure: Pressure, channels: Channels) -> None:
        self._periods, self._pressure, self._channels = periods, pressure, channels
        self._host_left = channels.host_nbytes

    def at_most(self, index: int) -> float:
        """What the period is worth if its transfers take no time to begin with."""
        period = self._periods[index]
        return (
            period.nbytes
            * self._pressure.high_s(period.begin, period.end)
            / self._least_cost_s(period.nbytes)
        )

    def best(self, index: int) -> _Choice | None:
        """The period on NVMe; where the drive has no time for it, on the host, if that has room."""
        channels, period = self._channels, self._periods[index]
        found = self._on(index, Place.NVME, channels.nvme_write, channels.nvme_read)
        if found is None and period.nbytes <= self._host_left:
            found = self._on(index, Place.HOST, channels.to_host, channels.from_host)
        return found

    def _on(self, index: int, place: Place, away: Channel, back: Channel) -> _Choice | None:
        period = self._periods[index]
        gone = away.earliest_end(period.begin, period.nbytes)
        if gone is None or gone >= period.end:
            return None
        start = back.latest_start(period.end, period.nbytes)
        if start is None or start <= gone:
            return None
        benefit = period.nbytes * self._pressure.high_s(gone, start)
        if benefit <= 0:
            return None
        cost_s = away.time_s(period.nbytes) + back.time_s(period.nbytes)
        return _Choice(benefit / cost_s, place, gone, start)

    def _least_cost_s(self, nbytes: int) -> float:
        channels = self._channels
        on_nvme = channels.nvme_write.time_s(nbytes) + channels.nvme_read.time_s(nbytes)
        on_host = channels.to_host.time_s(nbytes) + channels.from_host.time_s(nbytes)
        return min(on_nvme, on_host) if channels.host_nbytes else on_nvme

    def take(self, migration: Migration) -> None:
        period, channels = self._periods[migration.period], self._channels
        on_host = migration.place is Place.HOST
        away, back = (
            (channels.to_host, channels.from_host) if on_host else (channels.nvme_write, channels.nvme_read)
        )
        away.take_from(period.begin, period.nbytes)
        back.take_until(period.end, period.nbytes)
        self._host_left -= period.nbytes if on_host else 0
        self._pressure.lower(migration.gone, migration.back, period.nbytes)
