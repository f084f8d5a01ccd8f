"""Checkmate's program: which values each stage of backward has, and which it makes again, at the least cost.

Source: Checkmate (Jain et al., MLSys 2020): variables S (a value is there when a stage begins) and R (a group
runs in a stage), its constraints of dependency and memory, and its two-phase rounding of the relaxation.
Operators are too many for a 0/1 program, so forward is cut into groups, at places that only saved storages
cross. Memory is counted by group and stage, and corrected by what the replayed profile then takes.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
from replay import Run, droppable, with_runs

from infinity.core.plan import ActivationPlan, Hardware, Phase, Profile
from infinity.planner.lifetimes import MADE, memory, operator_times
from infinity.planner.simulator import play

#: Groups of the 0/1 program (or as many as blocks need), and of the one that is relaxed and rounded.
EXACT, RELAXED = 12, 20
#: Where a relaxed S becomes 1.
THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
#: Seconds for one program, and programs for a budget.
LIMIT_S, TRIES = 4.0, 3
_STILL = Hardware(0, 0, 0, 0)  # nothing moves


@dataclass(frozen=True)
class _Value:
    """Saved storages that the same group makes, the same groups read, and the same stages need."""

    maker: int
    readers: frozenset[int]
    needed: frozenset[int]
    storages: tuple[int, ...]
    nbytes: int


@cache
def checkmate(profile: Profile, capacity: int) -> Profile | None:
    """Return the step with the least recomputation whose peak is within the budget; None: none was found."""
    best = None
    for groups in (EXACT, RELAXED):
        graph, room = _Graph(profile, groups), capacity
        for _ in range(TRIES):
            steps = [graph.step(there) for there in graph.solve(room, exact=groups == EXACT)]
            if not steps:
                break
            peaks = [play(step, ActivationPlan("Checkmate"), _STILL).peak_nbytes for step in steps]
            kept = [step for step, peak in zip(steps, peaks) if peak <= capacity]
            best = min([*kept, *([best] if best else [])], key=lambda step: step.step_s, default=None)
            nearest = min(peaks, key=lambda peak: abs(peak - capacity))
            if abs(nearest - capacity) < 0.01 * capacity:
                break
            room += capacity - nearest
    return best


class _Graph:
    """Groups of forward, stages of backward (one for each group) and the values between them."""

    def __init__(self, profile: Profile, groups: int) -> None:
        self._groups = groups
        self._profile, self._slots = profile, droppable(profile)
        forward = sum(operator.phase is Phase.FORWARD for operator in profile.operators)
        self._edges = edges = [*self._cuts(forward), forward]
        self.count = len(edges) - 1
        group_of = np.searchsorted(edges, np.arange(forward), "right") - 1
        self._starts = self._stage_starts(group_of)
        ends = [*self._starts[1:], len(profile.operators)]
        bundles: defaultdict[tuple[int, frozenset[int], frozenset[int]], list[int]] = defaultdict(list)
        for s, slot in self._slots.items():
            at = [k for k in range(forward) if s in profile.operators[k].inputs]
            maker = int(group_of[profile.storages[s].born])
            readers = frozenset(int(group_of[k]) for k in at) - {maker}
            first, last = self._stage_of(slot.unpacked_at), self._stage_of(slot.released_at)
            bundles[maker, readers, frozenset(range(last, first + 1))].append(s)
        size = profile.storages
        self.values = [
            _Value(*key, tuple(found), sum(size[s].nbytes for s in found)) for key, found in bundles.items()
        ]
        times = operator_times(profile)
        self.costs = [float(times[b:e].sum()) for b, e in pairwise(edges)]
        rest = memory(profile)
        for s in self._slots:
            rest[size[s].born : size[s].dies + 1] -= size[s].nbytes
        #: What else is in memory: the most during each group, and during each stage, and when that begins.
        self.beside = [int(rest[b:e].max(initial=0)) for b, e in pairwise(edges)]
        self.in_stage = [int(rest[b:e].max(initial=0)) for b, e in zip(self._starts, ends)][::-1]
        self.at_start = [int(rest[max(b - 1, 0)]) for b in self._starts][::-1]

    def _cuts(self, forward: int) -> list[int]:
        """Return where groups begin: where blocks do, and inside blocks where only saved storages cross."""
        operators, storages = self._profile.operators[:forward], self._profile.storages
        last = {s: k for k, operator in enumerate(operators) for s in operator.inputs}
        crossing = np.zeros(forward + 1, dtype=int)  # storages that no plan can keep
        for s, k in last.items():
            use = storages[s]
            if use.kind in MADE and s not in self._slots and use.dies < forward:
                crossing[use.born + 1 : k + 1] += 1
        at = {0, *(edge for block in self._profile.blocks for edge in block.forward if edge < forward)}
        clean = [k for k in range(1, forward) if not crossing[k] and k not in at]
        saved = np.zeros(forward + 1)
        for s, slot in self._slots.items():
            saved[storages[s].born + 1] += slot.nbytes
        until = np.cumsum(saved)
        while len(at) < self._groups and clean:
            edges = [*sorted(at), forward]
            begin, end = max(pairwise(edges), key=lambda e: until[e[1]] - until[e[0]])
            inside = [k for k in clean if begin < k < end]
            if not inside:
                break
            middle = (until[begin] + until[end]) / 2
            at.add(best := min(inside, key=lambda k: abs(until[k] - middle)))
            clean.remove(best)
        return sorted(at)

    def _stage_starts(self, group_of: np.ndarray) -> list[int]:
        """Return where the stages begin in backward, that of the last group first."""
        first = [len(self._profile.operators)] * self.count
        for slot in self._slots.values():
            group = int(group_of[min(slot.packed_at, len(group_of) - 1)])
            first[group] = min(first[group], slot.unpacked_at)
        begun = next(k for k, o in enumerate(self._profile.operators) if o.phase is not Phase.FORWARD)
        starts = [begun]
        for group in reversed(range(self.count - 1)):  # the stage of a group that saves nothing is empty
            asked = first[group] if first[group] < len(self._profile.operators) else starts[-1]
            starts.append(max(starts[-1], asked))
        return starts

    def _stage_of(self, at: int) -> int:
        return self.count - int(np.searchsorted(self._starts, at, "right"))

    def solve(self, room: int, *, exact: bool) -> list[np.ndarray]:
        """Return S ``(stages, values)`` for a budget; of a relaxed program one for each threshold."""
        found = _Program(self, room).solve(exact)
        if found is None:
            return []
        whole = {tuple((found > at).ravel()): found > at for at in (THRESHOLDS if not exact else (0.5,))}
        return list(whole.values())

    def _runs(self, there: np.ndarray) -> np.ndarray:
        """Return R ``(stages, groups)``: each stage runs what it lacks, Checkmate's second phase."""
        runs = np.zeros((self.count, self.count), dtype=bool)
        for t in reversed(range(self.count)):
            for i in reversed(range(self.count)):
                for v, value in enumerate(self.values):
                    if value.maker != i or there[t, v]:
                        continue
                    later = t > 0 and there[t - 1, v]
                    runs[t, i] |= t in value.needed or later or any(runs[t, j] for j in value.readers)
        return runs

    def step(self, there: np.ndarray) -> Profile:
        """Return the step that keeps so, and replays what it lacks."""
        top, runs = self.count - 1, self._runs(there)
        dropped = {s for v, value in enumerate(self.values) if not there[top, v] for s in value.storages}
        found = []
        for t in reversed(range(self.count)):
            again = [k for i in range(self.count) if runs[t, i] for k in range(*self._edges[i : i + 2])]
            if again:
                found.append(Run(self._starts[top - t], tuple(again)))
        return with_runs(self._profile, dropped, found)


class _Program:
    """The program for one budget, in shares of it; a column of R, S and N for each stage and group or value.

    N: the value is made in the stage and stays, for its backward or for stages after it.
    """

    def __init__(self, graph: _Graph, room: int) -> None:
        self._graph, self._room = graph, float(max(room, 1))
        self._n, self._m = graph.count, len(graph.values)
        self._rows: list[dict[int, float]] = []
        self._lows: list[float] = []

    def _r(self, t: int, i: int) -> int:
        return t * self._n + i

    def _s(self, t: int, v: int) -> int:
        return self._n * self._n + t * self._m + v

    def _new(self, t: int, v: int) -> int:
        return self._n * self._n + self._n * self._m + t * self._m + v

    def _at_least(self, terms: Sequence[tuple[float, int]], low: float) -> None:
        row: dict[int, float] = defaultdict(float)
        for factor, column in terms:
            row[column] += factor
        self._rows.append(row)
        self._lows.append(low)

    def _build(self) -> None:
        graph, n, share = self._graph, self._n, [v.nbytes / self._room for v in self._graph.values]
        made = [sum(s for s, v in zip(share, graph.values) if v.maker == i) for i in range(n)]
        for i in range(n):  # forward
            terms, const = [], made[i] + graph.beside[i] / self._room
            for v, value in enumerate(graph.values):
                if value.maker < i:
                    stays = max(value.readers, default=-1) >= i
                    const += share[v] * stays
                    terms += [] if stays else [(-share[v], self._s(n - 1, v))]
            self._at_least(terms, const - 1)
        for t in range(n):
            present = []
            for v, value in enumerate(graph.values):
                here, again, new = self._s(t, v), self._r(t, value.maker), self._new(t, v)
                if t in value.needed:
                    self._at_least([(1, here), (1, again)], 1)
                    self._at_least([(1, new), (1, here)], 1)
                if t:
                    self._at_least([(1, here), (1, again), (-1, self._s(t - 1, v))], 0)
                    self._at_least([(1, new), (1, here), (-1, self._s(t - 1, v))], 0)
                for j in value.readers:
                    self._at_least([(1, here), (1, again), (-1, self._r(t, j))], 0)
                present += [(-share[v], here), (-share[v], new)]
            self._at_least(present, graph.in_stage[t] / self._room - 1)
            for i in range(n):
                others = [
                    (factor, column)
                    for v, value in enumerate(graph.values)
                    for factor, column in present[2 * v : 2 * v + 2]
                    if value.maker != i or column == self._s(t, v)
                ]
                own = made[i] + graph.beside[i] / self._room
                self._at_least([*others, (-own, self._r(t, i))], graph.at_start[t] / self._room - 1)

    def solve(self, exact: bool) -> np.ndarray | None:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        self._build()
        columns = self._new(self._n - 1, self._m - 1) + 1
        rows = [r for r, row in enumerate(self._rows) for _ in row]
        at = [column for row in self._rows for column in row]
        factors = [factor for row in self._rows for factor in row.values()]
        matrix = csr_array((factors, (rows, at)), shape=(len(self._rows), columns))
        costs = np.zeros(columns)
        scale = max(self._graph.costs) or 1.0
        for t in range(self._n):
            for i in range(self._n):
                costs[self._r(t, i)] = self._graph.costs[i] / scale
        limits = LinearConstraint(matrix, np.array(self._lows) - 1e-9, np.inf)
        options = {"time_limit": LIMIT_S, "mip_rel_gap": 0.02}
        whole = np.full(columns, int(exact))
        found = milp(costs, bounds=Bounds(0, 1), constraints=limits, integrality=whole, options=options)
        if found.x is None:
            return None
        begin = self._n * self._n
        return np.asarray(found.x[begin : begin + self._n * self._m]).reshape(self._n, self._m)
