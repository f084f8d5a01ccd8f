"""A step time that no plan can beat: a linear program in which almost everything may be done by halves.

A share of each saved storage goes to NVMe or to the host, a block is computed again or not (a share of it, of
many blocks). What a real plan must do in order (which bytes are stored first) is left out or done as early as
may be, so a plan that recomputes whole blocks is always a solution, and the optimum is a lower bound of its
time. One that keeps some operators of them, or moves codes, may be faster: these are no variables here.

[Note: gaps and stretches]
The step is cut where storages are packed and where backward asks for one: only there a plan waits, starts a
store or a load, or computes a block again. This happens in the gap before the first operator of a stretch,
whose operators then run without a wait. In each, channels carry no more than its time allows, and at its
fullest operator memory is within the budget. A load takes its memory from the gap on in which it starts.

[Note: whole storages]
A storage is away or it is not, which a program of shares does not know. But where memory is within the budget
only if a storage is away, the whole of it must be; and a load can only start after the last operator beside
which it has no room, though everything else that may be were away. The same holds for every plan.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from infinity.core.errors import BudgetError
from infinity.core.nbytes import format_nbytes
from infinity.core.plan import BlockCall, Hardware, Profile
from infinity.planner.lifetimes import MADE, InactivePeriod, ProfileIndex, lifetimes_of
from infinity.planner.simulator import Channel, delay_s_per_byte, mixed_rates

#: Blocks up to which each is computed again or not; of more a share is: the program would take too long.
WHOLE = 8


def bound(profile: Profile, hardware: Hardware, capacity_nbytes: int) -> float:
    """A lower bound (s) of the step time of every plan that keeps ``capacity_nbytes``.

    Raises:
        BudgetError: Not even such a plan keeps the budget.
        ModuleNotFoundError: scipy is not installed.
    """
    return _Model(profile, hardware, capacity_nbytes).solve()


class _Rows:
    """A linear program under construction: minimise the sum of costs under rows ``low <= a x <= high``."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.most: list[float] = []
        self._whole: set[int] = set()
        self._rows: list[Mapping[int, float]] = []
        self._lows: list[float] = []
        self._highs: list[float] = []

    def variable(self, cost: float = 0.0, most: float = float("inf"), *, whole: bool = False) -> int:
        """A number from 0 to ``most``."""
        self.costs.append(cost)
        self.most.append(most)
        self._whole |= {len(self.costs) - 1} if whole else set()
        return len(self.costs) - 1

    def variables(self, count: int) -> list[int]:
        return [self.variable() for _ in range(count)]

    def row(
        self, terms: Iterable[tuple[float, int]], *, low: float = -float("inf"), high: float = float("inf")
    ) -> None:
        summed: dict[int, float] = {}
        for factor, variable in terms:
            summed[variable] = summed.get(variable, 0.0) + factor
        self._rows.append(summed)
        self._lows.append(low)
        self._highs.append(high)

    def solve(self) -> float | None:
        """The least cost; None if there is no solution."""
        # An extra, and a second to import: only a call for the bound needs it.
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        at = [(i, variable) for i, row in enumerate(self._rows) for variable in row]
        factors = [factor for row in self._rows for factor in row.values()]
        shape = (len(self._rows), len(self.costs))
        matrix = csr_array((factors, tuple(np.array(at, dtype=np.int64).reshape(-1, 2).T)), shape=shape)
        constraints = LinearConstraint(matrix, np.array(self._lows), np.array(self._highs))
        whole = np.isin(np.arange(len(self.costs)), [*self._whole]).astype(int)
        limits = Bounds(0.0, np.array(self.most))
        found = milp(self.costs, bounds=limits, constraints=constraints, integrality=whole)
        return float(found.fun) if found.status == 0 else None


class _Cumulative(NamedTuple):
    """Sums from the beginning of the step, by stretch: by the end of its gap, and of its operators."""

    gap: list[int]
    run: list[int]

    def terms(self, j: int, factor: float) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
        """``factor`` times what the gap of stretch ``j`` adds, and what its operators add."""
        before = [(-factor, self.run[j - 1])] if j else []
        return [(factor, self.gap[j]), *before], [(factor, self.run[j]), (-factor, self.gap[j])]


@dataclass(frozen=True, slots=True)
class _PlaceVariables:
    """Variables of one place: shares by saved storage, and bytes that have been stored and loaded.

    Attributes:
        shares: For each inactive period, by its index; the part of the storage that is stored here.
    """

    shares: Mapping[int, int]
    written: _Cumulative
    read: _Cumulative


class _Model:
    """The linear program of one profile, machine and budget; bytes are shares of ``_unit``."""

    def __init__(self, profile: Profile, hardware: Hardware, capacity_nbytes: int) -> None:
        self._profile, self._hardware, self._capacity = profile, hardware, capacity_nbytes
        self._lifetimes = lifetimes_of(profile)
        self._periods = [*_as_early_as_may_be(profile, self._lifetimes.periods)]
        length = len(self._lifetimes.times)
        at = {0, self._lifetimes.backward, *(period.end for period in self._periods)}
        at |= {early + 1 for each in (self._periods, self._lifetimes.periods) for early in _packed(each)}
        at |= {edge for block in profile.blocks for edge in (max(block.forward[0], 1), block.backward[0])}
        memory = self._lifetimes.memory
        calls = [*sorted(edge for edge in at if edge < length), length]
        fullest = {b + int(np.argmax(memory[b:e])) for b, e in pairwise(calls)}
        self._edges = sorted({*calls, *fullest})
        self._fullest = [b + int(np.argmax(memory[b:e])) for b, e in pairwise(self._edges)]
        self._unit = float(max(memory.max(initial=0), 1))  # of all bytes in the program
        self._rows = _Rows()
        is_whole = len(profile.blocks) <= WHOLE
        self._redone = {
            block.region: self._rows.variable(0.0, 1.0, whole=is_whole) for block in profile.blocks
        }
        waits = [1e9 * (edge in at) for edge in self._edges[:-1]]
        self._stalls, self._handled, self._held_up = (
            [self._rows.variable(1.0, most) for most in waits] for _ in range(3)
        )
        self._delays = [self._rows.variable(1.0) for _ in waits]

    def solve(self) -> float:
        hardware = self._hardware
        drive = hardware.read_bytes_per_s > 0 and hardware.write_bytes_per_s > 0
        places = {}
        earliest = self._earliest()
        if drive:
            places["nvme"] = self._place(earliest)
            self._limit_drive(places["nvme"])
        if hardware.host_nbytes and hardware.host_bytes_per_s > 0:
            places["host"] = self._place(earliest)
            self._limit_host(places["host"])
        self._limit_shares(list(places.values()))
        self._limit_moves(list(places.values()))
        self._limit_delays(list(places.values()))
        self._limit_memory(list(places.values()))
        for block in self._profile.blocks:
            self._rows.costs[self._redone[block.region]] = self._again_s(block)
        extra_s = self._rows.solve()
        if extra_s is None:
            raise BudgetError(
                f"no plan keeps {format_nbytes(self._capacity)} ({self._capacity} bytes); "
                "smallest_budget says what can be kept"
            )
        return float(self._lifetimes.times.sum()) + extra_s

    def _again_s(self, block: BlockCall) -> float:
        return float(self._lifetimes.times[slice(*block.again)].sum())

    def _least(self) -> np.ndarray:
        """Bytes by operator if everything that may be away were."""
        change = np.zeros(len(self._lifetimes.memory) + 1, dtype=np.int64)
        for period in self._periods:
            if period.can_leave and period.begin < period.end:
                change[period.begin] -= period.nbytes
                change[period.end] += period.nbytes
        return self._lifetimes.memory + np.cumsum(change[:-1])

    def _earliest(self) -> Mapping[int, int]:
        """By storage, before which operator its load may start at the earliest: [Note: whole storages]."""
        least, found = self._least(), {}
        for i, period in enumerate(self._periods):
            if period.can_leave:
                begin = max(self._lifetimes.backward, period.begin)
                full = np.flatnonzero(least[begin : period.end] + period.nbytes > self._capacity)
                found[i] = min(period.end, begin + (int(full[-1]) + 1 if len(full) else 0))
        return found

    def _place(self, earliest: Mapping[int, int]) -> _PlaceVariables:
        """A place, whose stores follow packing and whose loads come before need."""
        rows, count = self._rows, len(self._fullest)
        shares = {i: rows.variable(0.0, 1.0) for i, period in enumerate(self._periods) if period.can_leave}
        written, read = (_Cumulative(rows.variables(count), rows.variables(count)) for _ in range(2))
        begins = self._edges[:-1]
        packed = self._until(shares, begins, lambda i: self._periods[i].packed_at + 1)
        needed = self._until(shares, begins, lambda i: self._periods[i].end)
        loaded = self._until(shares, begins, lambda i: earliest[i])
        for j in range(count):
            rows.row([(1, written.run[j]), (-1, packed[j])], high=0)
            rows.row([(1, read.gap[j]), (-1, needed[j])], low=0)
            rows.row([(1, read.run[j]), (-1, loaded[j])], high=0)
            for ways in zip(written, read):
                rows.row([(1, ways[1][j]), (-1, ways[0][j])], high=0)
            for way in (written, read):
                for terms in way.terms(j, 1.0):
                    rows.row(terms, low=0)
        return _PlaceVariables(shares, written, read)

    def _until(self, shares: Mapping[int, int], marks: Sequence[int], at: Callable[[int], int]) -> list[int]:
        """For each mark, bytes of the stored shares whose position ``at`` is not after it."""
        sums = self._rows.variables(len(marks))
        order = sorted(shares, key=at)
        taken = 0
        for j, mark in enumerate(marks):
            terms = [(1.0, sums[j])]
            if j:
                terms.append((-1.0, sums[j - 1]))
            while taken < len(order) and at(order[taken]) <= mark:
                index = order[taken]
                terms.append((-self._periods[index].nbytes / self._unit, shares[index]))
                taken += 1
            self._rows.row(terms, low=0, high=0)
        return sums

    def _gap_terms(self, j: int, factor: float) -> list[tuple[float, int]]:
        """``factor`` times the seconds of a gap."""
        blocks = [block for block in self._profile.blocks if block.backward[0] == self._edges[j]]
        times = (self._stalls[j], self._handled[j], self._held_up[j])
        again = ((factor * self._again_s(block), self._redone[block.region]) for block in blocks)
        return [*((factor, time) for time in times), *again]

    def _time_s(self, j: int) -> float:
        return float(self._lifetimes.times[self._edges[j] : self._edges[j + 1]].sum())

    def _limit_channel(self, uses: Sequence[tuple[_Cumulative, float]]) -> None:
        """What is moved in a gap and beside operators, by seconds of each byte, fits into their time."""
        for j in range(len(self._fullest)):
            gap, run = ([t for w, s in uses for t in w.terms(j, s)[part]] for part in (0, 1))
            self._rows.row([*gap, *self._gap_terms(j, -1.0)], high=0)
            self._rows.row([*run, (-1.0, self._delays[j])], high=self._time_s(j))

    def _limit_drive(self, place: _PlaceVariables) -> None:
        """Bytes read and written, units' included, fit into the time that there is."""
        unit_read, unit_written = self._unit_bytes(Channel.NVME_READ), self._unit_bytes(Channel.NVME_WRITE)
        for read_s, write_s in _faces(self._hardware):
            read_s, write_s = read_s * self._unit, write_s * self._unit
            reads, writes = (
                ((way, read_s) for way in (place.read, unit_read)),
                ((way, write_s) for way in (place.written, unit_written)),
            )
            self._limit_channel([*reads, *writes])

    def _unit_bytes(self, channel: Channel) -> _Cumulative:
        """Variables for the bytes of units on a channel: never later than beside other traffic."""
        lifetimes, reads = self._lifetimes, channel is Channel.NVME_READ
        mixed_read, mixed_write = mixed_rates(self._hardware)
        rate = mixed_read if reads else mixed_write
        asked = done = 0.0
        count = len(self._fullest)
        sums = _Cumulative(self._rows.variables(count), self._rows.variables(count))
        for j in range(count):
            self._rows.row([(1, sums.gap[j])], low=done / self._unit, high=asked / self._unit)
            for at in range(self._edges[j], self._edges[j + 1]):
                if at in lifetimes.traffic:
                    unit = lifetimes.traffic[at]
                    asked += unit.nbytes_read if reads else unit.nbytes_written
                done = min(asked, done + rate * float(lifetimes.times[at]))
            self._rows.row([(1, sums.run[j])], low=done / self._unit, high=asked / self._unit)
            for terms in sums.terms(j, 1.0):
                self._rows.row(terms, low=0)
        return sums

    def _limit_host(self, place: _PlaceVariables) -> None:
        for way in (place.written, place.read):
            self._limit_channel([(way, self._unit / self._hardware.host_bytes_per_s)])
        stored = [(self._periods[i].nbytes / self._unit, v) for i, v in place.shares.items()]
        self._rows.row(stored, high=self._hardware.host_nbytes / self._unit)

    def _limit_shares(self, places: Sequence[_PlaceVariables]) -> None:
        """Do not store what is dropped, and do with one of both what does not fit; [Note: whole storages]."""
        droppable = {(block.region, s) for block in self._profile.blocks for s in self._dropped_by(block)}
        least = self._least()
        for i, period in enumerate(self._periods):
            terms = [(1.0, place.shares[i]) for place in places if i in place.shares]
            if (period.key.region, i) in droppable:
                terms.append((1.0, self._redone[period.key.region]))
            full = least[period.begin : period.end] + period.nbytes > self._capacity
            if terms:
                self._rows.row(terms, low=float(period.can_leave and full.any()), high=1.0)

    def _dropped_by(self, block: BlockCall) -> list[int]:
        """Saved storages that the block's recomputation makes again."""
        inputs = {s.key for s in self._profile.slots if s.storage in block.inputs}
        return [
            i
            for i, period in enumerate(self._periods)
            if period.key.region == block.region and period.key not in inputs and period.can_leave
        ]

    def _limit_moves(self, places: Sequence[_PlaceVariables]) -> None:
        """Starting a store and a load of what leaves takes its time, until it is packed and needed."""
        move_s, late = self._hardware.compute_s_per_move, self._lifetimes.periods
        at = sorted(
            (at, share)
            for place in places
            for i, share in place.shares.items()
            for at in (late[i].packed_at + 1, self._periods[i].end)
        )
        taken = 0
        terms: list[tuple[float, int]] = []
        for j, edge in enumerate(self._edges[:-1] if move_s else ()):
            terms.append((1.0, self._handled[j]))
            before = taken
            while taken < len(at) and at[taken][0] <= edge:
                terms.append((-move_s, at[taken][1]))
                taken += 1
            if taken > before:
                self._rows.row(terms, low=0)

    def _limit_delays(self, places: Sequence[_PlaceVariables]) -> None:
        """Bytes that move beside compute delay it; those that move in a stall do not."""
        hardware, unit = self._hardware, self._unit
        delay_s = delay_s_per_byte(hardware) * unit
        read, write = mixed_rates(hardware)
        most = max(read + write, hardware.read_bytes_per_s, hardware.write_bytes_per_s)
        most += 2 * hardware.host_bytes_per_s
        for j in range(len(self._fullest) if delay_s else 0):
            ways = [way for place in places for way in (place.written, place.read)]
            gap, run = ([t for way in ways for t in way.terms(j, delay_s)[part]] for part in (0, 1))
            in_stall = -delay_s * most / unit, self._stalls[j]
            self._rows.row([*gap, (-1.0, self._held_up[j]), in_stall], high=0)
            self._rows.row([*run, (-1.0, self._delays[j])], high=0)

    def _limit_memory(self, places: Sequence[_PlaceVariables]) -> None:
        """At the fullest operator of each stretch, and where blocks are recomputed."""
        memory = self._lifetimes.memory
        room = self._capacity / self._unit
        again = self._recomputations()
        marks = sorted({*self._fullest, *again})
        away = [terms for place in places for terms in [self._away(place, marks)]]
        dropped = [(b, i) for b in self._profile.blocks for i in self._dropped_by(b)]
        for m, mark in enumerate(marks):
            terms = [t for place_terms in away for t in place_terms[m]]
            for block, i in dropped:
                if self._periods[i].begin <= mark < block.backward[0]:
                    terms.append((-self._periods[i].nbytes / self._unit, self._redone[block.region]))
            if mark in self._fullest:
                self._rows.row(terms, high=room - memory[mark] / self._unit)
            for block, before, working in again.get(mark, ()):
                own = [(factor, v) for factor, v in terms if v != self._redone[block.region]]
                grown = (working / self._unit, self._redone[block.region])
                self._rows.row([*own, grown], high=room - before / self._unit)

    def _recomputations(self) -> dict[int, list[tuple[BlockCall, int, int]]]:
        """By the operator before: a block, bytes before its backward, and bytes that recomputing it adds."""
        redone = lifetimes_of(self._profile, frozenset(self._redone))
        found: dict[int, list[tuple[BlockCall, int, int]]] = {}
        for block in self._profile.blocks:
            first = block.backward[0]
            here = np.flatnonzero(redone.operators == first)
            if len(here) != 2:  # several blocks begin their backward together
                continue
            fresh = sum(s.nbytes for s in self._profile.storages if s.kind in MADE and s.born == first)
            working = int(redone.memory[here[0]] - redone.memory[here[1]]) + fresh
            found.setdefault(first - 1, []).append(
                (block, int(self._lifetimes.memory[first]) - fresh, working)
            )
        return found

    def _away(self, place: _PlaceVariables, marks: Sequence[int]) -> list[list[tuple[float, int]]]:
        """For each mark, the change in memory there."""
        rows = self._rows
        freeable = self._until(place.shares, marks, lambda i: self._periods[i].begin)
        needed = self._until(place.shares, marks, lambda i: self._periods[i].end)
        freed, there = rows.variables(len(marks)), rows.variables(len(marks))
        for m, mark in enumerate(marks):
            j = int(np.searchsorted(self._edges, mark, "right")) - 1
            written = (place.written.gap if mark == self._edges[j] else place.written.run)[j]
            rows.row([(1, freed[m]), (-1, freeable[m])], high=0)
            rows.row([(1, freed[m]), (-1, written)], high=0)
            rows.row([(1, there[m]), (-1, needed[m])], low=0)
            rows.row([(1, there[m]), (-1, place.read.run[j])], low=0)
        return [[(-1.0, freed[m]), (1.0, there[m])] for m in range(len(marks))]


def _packed(periods: Iterable[InactivePeriod]) -> Iterable[int]:
    return (period.packed_at for period in periods)


def _as_early_as_may_be(profile: Profile, periods: Iterable[InactivePeriod]) -> Iterator[InactivePeriod]:
    """Let what blocks read be stored as soon as the first of them begins, as if that were recomputed."""
    index, storages = ProfileIndex(profile), {slot.key: slot.storage for slot in profile.slots}
    for period in periods:
        storage = storages[period.key]
        begins = [max(block.forward[0] - 1, 0) for block in profile.blocks if storage in block.inputs]
        packed_at = max(min([period.packed_at, *begins]), profile.storages[storage].born)
        begin = max(packed_at, index.last_use.get(storage, 0)) + 1
        yield replace(period, packed_at=packed_at, begin=min(period.begin, begin))


def _faces(hardware: Hardware) -> list[tuple[float, float]]:
    """Seconds per byte read and written, by each of which reads and writes together must fit.

    The drive can read alone, write alone, and do both; it can do any mixture of the three in turn.
    """
    read, write = hardware.read_bytes_per_s, hardware.write_bytes_per_s
    mixed_read, mixed_write = mixed_rates(hardware)
    if mixed_read <= 0 or mixed_write <= 0 or mixed_read / read + mixed_write / write <= 1:
        return [(1 / read, 1 / write)]
    return [
        (1 / read, (1 - mixed_read / read) / mixed_write),
        ((1 - mixed_write / write) / mixed_read, 1 / write),
    ]
