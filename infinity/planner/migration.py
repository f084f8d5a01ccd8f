"""Choose the saved storages that leave device memory, for a set of recomputed blocks and a budget.

TeraIO's algorithm 1 takes the inactive period with the largest benefit per cost. Benefit: its bytes, for as
long as they are away while memory is above capacity. Cost: the time that its two transfers take of their
channels. Both change with every choice, but a benefit only falls, so a heap of old values is enough: the
best of them is valued again, and taken if it is still (nearly) the best.

Source: TeraIO (arXiv:2506.06472), section 3.3, algorithm 1.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from infinity.core.plan import Hardware, Place
from infinity.planner.channels import LOAD, STORE, Channel, ChannelTimeline, FenwickTree, channel_timelines
from infinity.planner.lifetimes import InactivePeriod, Lifetimes

#: A period whose value has fallen is still taken while it is worth this share of the next best's old value.
NEARLY_BEST = 0.75

#: Where storages go, by index of their inactive period.
Places = Mapping[int, Place]


def least_memory(lifetimes: Lifetimes, places: Places) -> np.ndarray:
    """Bytes by position if every store took no time and every load started when it is needed."""
    change = np.zeros(len(lifetimes.memory) + 1, dtype=np.int64)
    for index in places:
        period = lifetimes.periods[index]
        if period.begin < period.end:
            change[period.begin] -= period.nbytes
            change[period.end] += period.nbytes + lifetimes.padding_nbytes
            change[period.released_at + 1] -= lifetimes.padding_nbytes
    return lifetimes.memory + np.cumsum(change[:-1])


def places_within(
    lifetimes: Lifetimes, hardware: Hardware, capacity_nbytes: int, everything: Places
) -> Iterator[Places]:
    """Ways to keep ``capacity_nbytes``: hidden transfers first; all transfers alike; ``everything``."""
    seen: list[Places] = []
    for first in (_hidden(lifetimes, hardware, capacity_nbytes), {}, everything):
        places = first if first is everything else _forced(lifetimes, hardware, capacity_nbytes, first)
        if places not in seen and int(least_memory(lifetimes, places).max(initial=0)) <= capacity_nbytes:
            seen.append(places)
            yield places


def all_places(lifetimes: Lifetimes, hardware: Hardware) -> Places:
    """Places of all storages that can leave, where that frees memory."""
    return _forced(lifetimes, hardware, 0, {})


# --- transfers that are waited for -------------------------------------------------------------------


def _forced(
    lifetimes: Lifetimes, hardware: Hardware, capacity_nbytes: int, places: Places
) -> dict[int, Place]:
    """Add to ``places``, fullest position first, until memory fits or nothing can leave any more."""
    chosen, periods = dict(places), lifetimes.periods
    load = _ChannelLoad(hardware)
    for index, place in chosen.items():
        load.add(place, periods[index].nbytes)
    # The longest gap first: it helps the most positions for the same bytes.
    waiting = [i for i, period in enumerate(periods) if period.is_worth_storing and i not in chosen]
    waiting.sort(key=lambda i: (periods[i].begin - periods[i].end, i))
    gaps = np.array([(periods[i].begin, periods[i].end) for i in waiting], dtype=np.int64).reshape(-1, 2)
    begins, ends = gaps[:, 0].copy(), gaps[:, 1].copy()
    over = least_memory(lifetimes, chosen) - capacity_nbytes
    helped = _covered(begins, ends, len(over))
    over[helped == 0] = 0
    while len(over) and over[at := int(over.argmax())] > 0:
        for number in np.flatnonzero((begins <= at) & (at < ends)).tolist():
            period = periods[waiting[number]]
            soonest = load.soonest(period.nbytes)
            if soonest is not None:
                chosen[waiting[number]] = soonest
                load.add(soonest, period.nbytes)
                over[period.begin : period.end] -= period.nbytes
                over[period.end : period.released_at + 1] += lifetimes.padding_nbytes
                helped[period.begin : period.end] -= 1
                begins[number] = ends[number] = 0  # it is gone
                break
        else:
            over[at] = 0  # nothing helps here
        if not helped[at]:
            over[helped == 0] = 0
    return chosen


def _covered(begins: np.ndarray, ends: np.ndarray, length: int) -> np.ndarray:
    """Count for each of ``length`` positions the gaps that it is in."""
    change = np.bincount(begins, minlength=length + 1) - np.bincount(ends, minlength=length + 1)
    return np.cumsum(change[:length])


class _ChannelLoad:
    """Bytes given to each place so far, and the time that its channels take for them."""

    def __init__(self, hardware: Hardware) -> None:
        read, write, host = hardware.read_bytes_per_s, hardware.write_bytes_per_s, hardware.host_bytes_per_s
        self._s_per_byte = {}
        if read > 0 and write > 0:
            self._s_per_byte[Place.NVME] = 1 / read + 1 / write
        if host > 0:
            self._s_per_byte[Place.HOST] = 2 / host
        self._nbytes = {Place.NVME: 0, Place.HOST: 0}
        self._host_nbytes = hardware.host_nbytes

    def soonest(self, nbytes: int) -> Place | None:
        """The place from which ``nbytes`` more would be back the soonest; None: no place has room."""
        possible = [
            place
            for place in self._s_per_byte
            if place is Place.NVME or self._nbytes[place] + nbytes <= self._host_nbytes
        ]
        return min(possible, key=lambda p: (self._nbytes[p] + nbytes) * self._s_per_byte[p], default=None)

    def add(self, place: Place, nbytes: int) -> None:
        self._nbytes[place] += nbytes


# --- transfers that hide behind compute ----------------------------------------------------------------


def _hidden(lifetimes: Lifetimes, hardware: Hardware, capacity_nbytes: int) -> dict[int, Place]:
    worth = [i for i, period in enumerate(lifetimes.periods) if period.is_worth_storing]
    timelines = channel_timelines(lifetimes.times, hardware, lifetimes.traffic.values())
    chosen = migrate(
        [lifetimes.periods[i] for i in worth], lifetimes.times, lifetimes.memory, capacity_nbytes,
        timelines, hardware.host_nbytes,
    )  # fmt: skip
    return {worth[migration.period]: migration.place for migration in chosen}


@dataclass(frozen=True, slots=True)
class Migration:
    """An inactive period that a storage can spend away from device memory.

    Attributes:
        period: The index of the period among those that were given.
        place: The place of the storage meanwhile.
        gone: The first operator that finds its memory free.
        back: The operator with which it starts to come back; its memory is taken from then on.
        value: The benefit per cost when it was chosen.
    """

    period: int
    place: Place
    gone: int
    back: int
    value: float = field(default=0.0, compare=False)


def migrate(
    periods: Sequence[InactivePeriod],
    times: np.ndarray,
    memory: np.ndarray,
    capacity_nbytes: int,
    timelines: Mapping[Channel, ChannelTimeline],
    host_nbytes: int,
) -> list[Migration]:
    """Choose migrations until ``memory`` is at most ``capacity_nbytes``, or nothing helps any more.

    Args:
        times: Seconds of each operator.
        memory: Bytes during each operator; not changed.
        timelines: The timelines of the channels, on which migrations are booked.
        host_nbytes: Host memory that migrations may take.

    Returns:
        The migrations in the order of choice; all their transfers hide behind operators.
    """
    pressure = Pressure(times, memory, capacity_nbytes)
    chooser = _Chooser(periods, pressure, timelines, host_nbytes)
    heap = [(-chooser.at_most(index), index) for index in range(len(periods)) if periods[index].nbytes]
    heapq.heapify(heap)
    chosen = []
    while heap and pressure.is_high():
        _, index = heapq.heappop(heap)
        migration = chooser.best(index)
        if migration is None:
            continue
        if heap and migration.value < -NEARLY_BEST * heap[0][0]:
            heapq.heappush(heap, (-migration.value, index))
            continue
        chooser.take(migration)
        chosen.append(migration)
    return chosen


class Pressure:
    """The positions whose memory is above capacity, and for how long; memory only falls.

    Positions lie in buckets, the square root of their number in each: bytes taken from a whole bucket are
    noted once for the bucket, until one of its positions is no longer above.
    """

    def __init__(self, times: np.ndarray, memory: np.ndarray, capacity: int) -> None:
        self._width = max(16, int(len(memory) ** 0.5))
        buckets = max(1, -(-len(memory) // self._width))
        self._excess = np.zeros((buckets, self._width), dtype=np.int64)
        self._excess.ravel()[: len(memory)] = np.maximum(memory - capacity, 0)
        self._times = FenwickTree(np.where(memory > capacity, times, 0.0))
        self._counts = np.count_nonzero(self._excess, axis=1)
        self._above = int(self._counts.sum())
        self._lowered = np.zeros(buckets, dtype=np.int64)  # not yet taken from the bucket's positions
        self._least = np.array([_least_above(excess) for excess in self._excess])

    def is_high(self) -> bool:
        """Return whether memory is above capacity anywhere."""
        return self._above > 0

    def high_s(self, begin: int, end: int) -> float:
        """Seconds for which memory is above capacity in [begin, end)."""
        return self._times.between(begin, end)

    def lower(self, begin: int, end: int, nbytes: int) -> None:
        """Take ``nbytes`` away in [begin, end)."""
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
        """Take ``nbytes`` away in a part of one bucket."""
        if self._counts[bucket]:
            first = bucket * self._width
            self._settle(bucket, slice(begin - first, end - first), nbytes)

    def _settle(self, bucket: int, part: slice = slice(0), nbytes: int = 0) -> None:
        """Take the noted bytes, and ``nbytes`` in ``part``, from positions; forget those no longer above."""
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


class _Chooser:
    """Values periods as memory and channels are now."""

    def __init__(
        self,
        periods: Sequence[InactivePeriod],
        pressure: Pressure,
        timelines: Mapping[Channel, ChannelTimeline],
        host_nbytes: int,
    ) -> None:
        self._periods, self._pressure, self._timelines = periods, pressure, timelines
        self._with_host, self._host_left = bool(host_nbytes), host_nbytes

    def at_most(self, index: int) -> float:
        """Upper bound of a period's value: its transfers take no time to begin with."""
        period = self._periods[index]
        least_cost_s = self._cost_s(Place.NVME, period.nbytes)
        if self._with_host:
            least_cost_s = min(least_cost_s, self._cost_s(Place.HOST, period.nbytes))
        return period.nbytes * self._pressure.high_s(period.begin, period.end) / least_cost_s

    def best(self, index: int) -> Migration | None:
        """The period on NVMe; where the drive has no time for it, on the host, if that has room."""
        found = self._on(index, Place.NVME)
        if found is None and self._periods[index].nbytes <= self._host_left:
            found = self._on(index, Place.HOST)
        return found

    def _on(self, index: int, place: Place) -> Migration | None:
        period = self._periods[index]
        gone = self._timelines[STORE[place]].earliest_end(period.begin, period.nbytes)
        if gone is None or gone >= period.end:
            return None
        back = self._timelines[LOAD[place]].latest_start(period.end, period.nbytes)
        if back is None or back <= gone:
            return None
        benefit = period.nbytes * self._pressure.high_s(gone, back)
        if benefit <= 0:
            return None
        return Migration(index, place, gone, back, benefit / self._cost_s(place, period.nbytes))

    def _cost_s(self, place: Place, nbytes: int) -> float:
        return self._timelines[STORE[place]].time_s(nbytes) + self._timelines[LOAD[place]].time_s(nbytes)

    def take(self, migration: Migration) -> None:
        """Book the migration's transfers, and lower the pressure."""
        period = self._periods[migration.period]
        self._timelines[STORE[migration.place]].book_from(period.begin, period.nbytes)
        self._timelines[LOAD[migration.place]].book_until(period.end, period.nbytes)
        self._host_left -= period.nbytes if migration.place is Place.HOST else 0
        self._pressure.lower(migration.gone, migration.back, period.nbytes)
