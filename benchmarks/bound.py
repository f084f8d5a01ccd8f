"""A step time that no plan can beat: a linear program in which everything may be done by halves.

A share of each saved storage goes to NVMe or to the host, a share of each block is computed again. The step
is cut into at most :data:`POINTS` stretches. In each, channels carry no more than its time allows (compute,
recomputation and stalls), and at its fullest operator memory is within the budget. What a real plan must do
in order (which bytes are stored first, when a load may start) is left out or done as early as may be, so a
plan that recomputes whole blocks is always a solution, and the optimum is a lower bound of its time. One
that keeps some operators of them may be faster: these are no variables here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from infinity.core.errors import BudgetError
from infinity.core.nbytes import format_nbytes
from infinity.core.plan import BlockCall, Hardware, Profile
from infinity.planner.lifetimes import MADE, InactivePeriod, lifetimes_of
from infinity.planner.simulator import Channel, delay_s_per_byte, mixed_rates

#: Stretches that the step is cut into at most.
POINTS = 200


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
        self._rows: list[Mapping[int, float]] = []
        self._lows: list[float] = []
        self._highs: list[float] = []

    def variable(self, cost: float = 0.0, most: float = float("inf")) -> int:
        """A number from 0 to ``most``."""
        self.costs.append(cost)
        self.most.append(most)
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
        found = milp(self.costs, bounds=Bounds(0.0, np.array(self.most)), constraints=constraints)
        return float(found.fun) if found.status == 0 else None


@dataclass(frozen=True, slots=True)
class _PlaceVariables:
    """Variables of one place: shares by saved storage, and bytes by stretch, counted from the beginning.

    Attributes:
        shares: For each inactive period, by its index; the part of the storage that is stored here.
        written: Bytes that have been stored by the end of the stretch.
        read: Bytes that have been loaded by the end of the stretch.
    """

    shares: Mapping[int, int]
    written: Sequence[int]
    read: Sequence[int]


class _Model:
    """The linear program of one profile, machine and budget; bytes are shares of ``_unit``."""

    def __init__(self, profile: Profile, hardware: Hardware, capacity_nbytes: int) -> None:
        self._profile, self._hardware, self._capacity = profile, hardware, capacity_nbytes
        self._lifetimes = lifetimes_of(profile)
        length = len(self._lifetimes.times)
        count = min(POINTS, length)
        self._edges = [i * length // count for i in range(count + 1)]
        memory = self._lifetimes.memory
        self._fullest = [b + int(np.argmax(memory[b:e])) for b, e in zip(self._edges, self._edges[1:])]
        self._unit = float(max(memory.max(initial=0), 1))  # of all bytes in the program
        self._rows = _Rows()
        self._periods = [_packed_early(period, profile) for period in self._lifetimes.periods]
        self._redone = {block.region: self._rows.variable(0.0, 1.0) for block in profile.blocks}
        self._stalls = [self._rows.variable(1.0) for _ in range(count)]
        self._delays = [self._rows.variable(1.0) for _ in range(count)]

    def solve(self) -> float:
        hardware = self._hardware
        drive = hardware.read_bytes_per_s > 0 and hardware.write_bytes_per_s > 0
        places = {}
        if drive:
            places["nvme"] = self._place()
            self._limit_drive(places["nvme"])
        if hardware.host_nbytes and hardware.host_bytes_per_s > 0:
            places["host"] = self._place()
            self._limit_host(places["host"])
        self._limit_shares(list(places.values()))
        self._limit_delays(list(places.values()))
        self._limit_memory(list(places.values()))
        for block in self._profile.blocks:
            self._rows.costs[self._redone[block.region]] = self._forward_s(block)
        extra_s = self._rows.solve()
        if extra_s is None:
            raise BudgetError(
                f"no plan keeps {format_nbytes(self._capacity)} ({self._capacity} bytes); "
                "smallest_budget says what can be kept"
            )
        return float(self._lifetimes.times.sum()) + extra_s

    def _forward_s(self, block: BlockCall) -> float:
        return float(self._lifetimes.times[slice(*block.forward)].sum())

    def _place(self) -> _PlaceVariables:
        """A place, whose stores follow packing and whose loads come before need."""
        rows, count = self._rows, len(self._fullest)
        shares = {i: rows.variable(0.0, 1.0) for i, period in enumerate(self._periods) if period.can_leave}
        written, read = rows.variables(count), rows.variables(count)
        ends = [end - 1 for end in self._edges[1:]]
        packed = self._until(shares, ends, [period.packed_at for period in self._periods])
        needed = self._until(shares, ends, [period.end for period in self._periods])
        for j in range(count):
            rows.row([(1, written[j]), (-1, packed[j])], high=0)
            rows.row([(1, read[j]), (-1, needed[j])], low=0)
            rows.row([(1, read[j]), (-1, written[j])], high=0)
            if j:
                rows.row([(1, written[j]), (-1, written[j - 1])], low=0)
                rows.row([(1, read[j]), (-1, read[j - 1])], low=0)
        return _PlaceVariables(shares, written, read)

    def _until(self, shares: Mapping[int, int], marks: Sequence[int], at: Sequence[int]) -> list[int]:
        """For each mark, bytes of the stored shares whose position ``at`` is not after it."""
        sums = self._rows.variables(len(marks))
        order = sorted(shares, key=lambda i: at[i])
        taken = 0
        for j, mark in enumerate(marks):
            terms = [(1.0, sums[j])]
            if j:
                terms.append((-1.0, sums[j - 1]))
            while taken < len(order) and at[order[taken]] <= mark:
                index = order[taken]
                terms.append((-self._periods[index].nbytes / self._unit, shares[index]))
                taken += 1
            self._rows.row(terms, low=0, high=0)
        return sums

    def _time_terms(self, j: int, factor: float) -> list[tuple[float, int]]:
        """``factor`` times the seconds of a stretch beyond the time of its operators."""
        terms = [(factor, self._stalls[j]), (factor, self._delays[j])]
        begun = range(self._edges[j], self._edges[j + 1])
        blocks = [block for block in self._profile.blocks if block.backward[0] in begun]
        return [*terms, *((factor * self._forward_s(b), self._redone[b.region]) for b in blocks)]

    def _time_s(self, j: int) -> float:
        return float(self._lifetimes.times[self._edges[j] : self._edges[j + 1]].sum())

    def _limit_drive(self, place: _PlaceVariables) -> None:
        """Bytes read and written in a stretch, units' included, fit into its time."""
        unit_read, unit_written = self._unit_bytes(Channel.NVME_READ), self._unit_bytes(Channel.NVME_WRITE)
        for j in range(len(self._fullest)):
            for read_s, write_s in _faces(self._hardware):
                read_s, write_s = read_s * self._unit, write_s * self._unit
                terms = [
                    *_in_stretch(place.read, j, read_s),
                    *_in_stretch(unit_read, j, read_s),
                    *_in_stretch(place.written, j, write_s),
                    *_in_stretch(unit_written, j, write_s),
                ]
                self._rows.row([*terms, *self._time_terms(j, -1.0)], high=self._time_s(j))

    def _unit_bytes(self, channel: Channel) -> list[int]:
        """Variables for the bytes of units on a channel: never later than beside other traffic."""
        lifetimes, reads = self._lifetimes, channel is Channel.NVME_READ
        mixed_read, mixed_write = mixed_rates(self._hardware)
        rate = mixed_read if reads else mixed_write
        asked = done = 0.0
        sums = self._rows.variables(len(self._fullest))
        for j in range(len(sums)):
            for at in range(self._edges[j], self._edges[j + 1]):
                if at in lifetimes.traffic:
                    unit = lifetimes.traffic[at]
                    asked += unit.nbytes_read if reads else unit.nbytes_written
                done = min(asked, done + rate * float(lifetimes.times[at]))
            self._rows.row([(1, sums[j])], low=done / self._unit, high=asked / self._unit)
            if j:
                self._rows.row([(1, sums[j]), (-1, sums[j - 1])], low=0)
        return sums

    def _limit_host(self, place: _PlaceVariables) -> None:
        rate = self._hardware.host_bytes_per_s / self._unit
        for j in range(len(self._fullest)):
            for way in (place.written, place.read):
                terms = [*_in_stretch(way, j, 1.0), *self._time_terms(j, -rate)]
                self._rows.row(terms, high=rate * self._time_s(j))
        stored = [(self._periods[i].nbytes / self._unit, v) for i, v in place.shares.items()]
        self._rows.row(stored, high=self._hardware.host_nbytes / self._unit)

    def _limit_shares(self, places: Sequence[_PlaceVariables]) -> None:
        """Do not store what is dropped."""
        droppable = {(block.region, s) for block in self._profile.blocks for s in self._dropped_by(block)}
        for i, period in enumerate(self._periods):
            terms = [(1.0, place.shares[i]) for place in places if i in place.shares]
            if (period.key.region, i) in droppable:
                terms.append((1.0, self._redone[period.key.region]))
            if len(terms) > 1:
                self._rows.row(terms, high=1.0)

    def _dropped_by(self, block: BlockCall) -> list[int]:
        """Saved storages that the block's recomputation makes again."""
        inputs = {s.key for s in self._profile.slots if s.storage in block.inputs}
        return [
            i
            for i, period in enumerate(self._lifetimes.periods)
            if period.key.region == block.region and period.key not in inputs and period.can_leave
        ]

    def _limit_delays(self, places: Sequence[_PlaceVariables]) -> None:
        """Bytes that move beside compute delay it; those that move in a stall do not."""
        hardware, unit = self._hardware, self._unit
        delay_s = delay_s_per_byte(hardware) * unit
        read, write = mixed_rates(hardware)
        most = max(read + write, hardware.read_bytes_per_s, hardware.write_bytes_per_s)
        most += 2 * hardware.host_bytes_per_s
        for j in range(len(self._fullest) if delay_s else 0):
            moved = [
                t
                for place in places
                for way in (place.written, place.read)
                for t in _in_stretch(way, j, delay_s)
            ]
            terms = [*moved, (-1.0, self._delays[j]), (-delay_s * most / unit, self._stalls[j])]
            self._rows.row(terms, high=0)

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
                if self._lifetimes.periods[i].begin <= mark < block.backward[0]:
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
        freeable = self._until(place.shares, marks, [period.begin for period in self._periods])
        needed = self._until(place.shares, marks, [period.end for period in self._periods])
        freed, there = rows.variables(len(marks)), rows.variables(len(marks))
        for m, mark in enumerate(marks):
            j = int(np.searchsorted(self._edges, mark, "right")) - 1
            rows.row([(1, freed[m]), (-1, freeable[m])], high=0)
            rows.row([(1, freed[m]), (-1, place.written[j])], high=0)
            rows.row([(1, there[m]), (-1, needed[m])], low=0)
            if j:
                rows.row([(1, there[m]), (-1, place.read[j - 1])], low=0)
        return [[(-1.0, freed[m]), (1.0, there[m])] for m in range(len(marks))]


def _packed_early(period: InactivePeriod, profile: Profile) -> InactivePeriod:
    """Let an input of a block be stored as soon as the block begins, as if the block were recomputed."""
    begins = [block.forward[0] - 1 for block in profile.blocks if block.region == period.key.region]
    return replace(period, packed_at=min([period.packed_at, *begins]))


def _in_stretch(until: Sequence[int], j: int, factor: float) -> list[tuple[float, int]]:
    """``factor`` times the bytes of stretch ``j``, from sums that count from the beginning."""
    return [(factor, until[j]), *([(-factor, until[j - 1])] if j else [])]


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
