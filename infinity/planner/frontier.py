"""Our own plans: for each budget of a ladder the fastest that was found.

For a budget and a set of recomputed blocks, :mod:`infinity.planner.placing` chooses what leaves and
:mod:`infinity.planner.loading` when it comes back; the clock says what that costs. What remains is how many
blocks to compute again, and which: the first so many of a fixed order, searched around the number of
the next smaller budget. Where blocks are few, one more or less matters: other orders, and single blocks,
are tried as well.

[Note: one ladder for every budget]
The plan for a budget is the fastest one for a rung within it, and rungs depend on the profile and the
hardware only. They are climbed from the smallest budget that can be met, so the search for one rung does
not depend on the budget either: more memory never makes a step slower.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from infinity.core.plan import ActivationPlan, Hardware, Outcome, Place
from infinity.core.profile import Block, Profile
from infinity.planner.clock import play
from infinity.planner.loading import least_memory, with_loads, within
from infinity.planner.moves import Moves, moves_of, plan_of
from infinity.planner.placing import all_places, places_for
from infinity.planner.script import Script, script_of

#: Budgets of the ladder, from the smallest that can be met to what keeping everything takes.
RUNGS = 32
#: Blocks are few if they are no more than this.
FEW = 12
#: A step that is slower than keeping everything by no more than this share counts as not slowed down.
NO_SLOWDOWN = 0.03
#: One that is slower by no more than this share is not worth a search for a faster one.
NEGLIGIBLE = 0.002


@dataclass(frozen=True, slots=True)
class Point:
    """A plan, and what it is predicted to cost."""

    plan: ActivationPlan
    outcome: Outcome


def keep_point(profile: Profile, hardware: Hardware) -> Point:
    """Everything stays."""
    return Point(ActivationPlan("plan"), play(script_of(profile), Moves(), hardware))


def frontier(profile: Profile, hardware: Hardware, capacity_nbytes: int | None = None) -> Iterator[Point]:
    """The fastest plan that was found for each rung, smallest budget first; see [Note: one ladder ...].

    Args:
        capacity_nbytes: Rungs above it are left out, but for the highest rung below it, which moves the
            fewest bytes, rungs are left out, too, once a plan is as fast as keeping everything.
    """
    search = _Search(profile, hardware)
    rungs = [rung for rung in search.rungs() if capacity_nbytes is None or rung <= capacity_nbytes]
    for rung in rungs:
        point = search.best(rung, thorough=capacity_nbytes is None or rung in rungs[-2:])
        if point is not None:
            yield point
            if search.is_fast(point):
                break
    else:
        return
    if rung != rungs[-1] and (point := search.best(rungs[-1])) is not None:
        yield point


def without_slowdown(profile: Profile, hardware: Hardware) -> Point:
    """The plan of the smallest rung, its budget left out, that does not slow the step down as we count."""
    search, best = _Search(profile, hardware), keep_point(profile, hardware)
    allowed_s = best.outcome.step_s * (1 + NO_SLOWDOWN)
    rungs = search.rungs()
    low, high, at = 0, len(rungs), 0  # the smallest may do
    while low < high:
        point = search.best(rungs[at])
        free = None if point is None else search.without_budget(point)
        if free is None or free.outcome.step_s > allowed_s:
            low = at + 1
        else:
            best, high = free, at
        at = (low + high) // 2
    return best


def floor_of(profile: Profile, hardware: Hardware) -> tuple[Script, np.ndarray]:
    """The script with the lowest peak that a plan can reach, and its memory by position."""
    return _Search(profile, hardware).floor()


class _Search:
    def __init__(self, profile: Profile, hardware: Hardware) -> None:
        self._profile, self._hardware = profile, hardware
        self._scripts: dict[frozenset[int], Script] = {}
        self._orders = list(_orders(profile))
        self._everything: dict[frozenset[int], dict[int, Place]] = {}
        self._count = 0
        self._keep_s = keep_point(profile, hardware).outcome.step_s

    def script(self, recomputed: frozenset[int]) -> Script:
        if recomputed not in self._scripts:
            self._scripts[recomputed] = script_of(self._profile, recomputed)
        return self._scripts[recomputed]

    def some_sets(self) -> Iterator[frozenset[int]]:
        """Sets of recomputed blocks that may reach the lowest peak."""
        yield frozenset()
        drive = min(self._hardware.read_bytes_per_s, self._hardware.write_bytes_per_s)
        if drive <= 0:
            order = self._orders[0]
            yield from (frozenset(order[:count]) for count in range(1, len(order) + 1))

    def everything(self, recomputed: frozenset[int]) -> dict[int, Place]:
        """Where all goes that can leave beside these recomputed blocks."""
        if recomputed not in self._everything:
            self._everything[recomputed] = all_places(self.script(recomputed), self._hardware)
        return self._everything[recomputed]

    def floor(self) -> tuple[Script, np.ndarray]:
        """See :func:`floor_of`."""
        sets = list(self.some_sets())
        memories = [least_memory(self.script(blocks), self.everything(blocks)) for blocks in sets]
        best = min(range(len(sets)), key=lambda i: (int(memories[i].max(initial=0)), i))
        return self.script(sets[best]), memories[best]

    def rungs(self) -> list[int]:
        """Budgets, growing; the first is the smallest that can be met."""
        _, lowest = self.floor()
        least = int(lowest.max(initial=0))
        most = max(least, int(self.script(frozenset()).memory.max(initial=0)))
        return sorted({least + (most - least) * rung // RUNGS for rung in range(RUNGS)})

    def best(self, rung: int, *, thorough: bool = True) -> Point | None:
        """The fastest plan that was found for this budget; ``thorough``: of few blocks each one is tried."""
        best = self._counted(rung)
        if best is None:
            for recomputed in self.some_sets():
                best = self._faster(best, rung, recomputed)
        if best is not None and thorough and len(self._orders[0]) <= FEW:
            best = self._improved(best, rung)
        return best

    def without_budget(self, point: Point) -> Point:
        """The same plan where nobody waits for stores."""
        plan = replace(point.plan, capacity_nbytes=None, backlog_nbytes=None)
        script = self.script(plan.recomputed)
        return Point(plan, play(script, moves_of(script, plan), self._hardware))

    def is_fast(self, point: Point | None) -> bool:
        """Is it about as fast as keeping everything?"""
        return point is not None and point.outcome.step_s <= self._keep_s * (1 + NEGLIGIBLE)

    def _counted(self, rung: int) -> Point | None:
        """Search the number of recomputed blocks around that of the rung below."""
        order = self._orders[0]
        found = self._faster(None, rung, frozenset(order[: self._count]))
        step = max(1, len(order) // 32 if self._count else len(order) // 4)
        while step and order and not self.is_fast(found):
            for count in (self._count + step, self._count - step):
                if 0 <= count <= len(order):
                    point = self._faster(found, rung, frozenset(order[:count]))
                    if point is not found:
                        found, self._count = point, count
                        break
            else:
                step //= 2
        return found

    def _improved(self, best: Point, rung: int) -> Point:
        """Try the same number of other blocks, and changing each one."""
        number = len(best.plan.recomputed)
        sets = [frozenset(order[:number]) for order in self._orders[1:]] if number else []
        sets += [best.plan.recomputed ^ {region} for region in self._orders[0]]
        for recomputed in sets:
            if not self.is_fast(best):
                best = self._faster(best, rung, recomputed) or best
        return best

    def _faster(self, best: Point | None, rung: int, recomputed: frozenset[int]) -> Point | None:
        """The fastest plan with these blocks, if it is faster than ``best``; else ``best``."""
        script, everything = self.script(recomputed), self.everything(recomputed)
        limit_s = float("inf") if best is None else best.outcome.step_s
        if script.until_s[-1] >= limit_s or int(least_memory(script, everything).max(initial=0)) > rung:
            return best
        for places in places_for(script, self._hardware, rung, everything):
            moves = with_loads(script, places, self._hardware, rung)
            found = within(script, moves, self._hardware, rung, limit_s)
            if found is not None:
                made = plan_of("plan", script, found[0], recomputed)
                best = Point(replace(made, capacity_nbytes=rung), found[1])
                limit_s = best.outcome.step_s
            if self.is_fast(best):
                break
        return best


def _orders(profile: Profile) -> Iterator[tuple[int, ...]]:
    """Regions of blocks in the orders in which they are tried: by worth, then spread; early; late first."""
    nbytes = {block.region: 0 for block in profile.blocks}
    blocks = {block.region: block for block in profile.blocks}
    for slot in profile.slots:
        block = blocks.get(slot.key.region)
        if block is not None and slot.storage not in block.inputs and not slot.held:
            nbytes[block.region] += slot.nbytes
    useful = [block for block in profile.blocks if nbytes[block.region]]

    def worth(block: Block) -> float:
        time_s = sum(o.time_s for o in profile.operators[slice(*block.forward)])
        return float(f"{nbytes[block.region] / max(time_s, 1e-9):.1e}")

    spread = {block.region: _radical_inverse(i) for i, block in enumerate(useful)}
    yield tuple(b.region for b in sorted(useful, key=lambda b: (-worth(b), spread[b.region])))
    yield tuple(b.region for b in sorted(useful, key=lambda b: (-worth(b), b.region)))
    yield tuple(b.region for b in sorted(useful, key=lambda b: (-worth(b), -b.region)))


def _radical_inverse(number: int) -> float:
    """The bits mirrored at the point: 0, 1/2, 1/4, 3/4, ... (van der Corput), evenly spread prefixes."""
    value, weight = 0.0, 0.5
    while number:
        value += weight * (number & 1)
        number >>= 1
        weight /= 2
    return value
