"""Plan which units a recorded step fetches and releases at each position, in bounded memory; without torch.

[Note: keep, then look ahead]
Between two uses stays whatever saves the most fetches: when room is short, the unit whose next use is
farthest goes (Belady). Other units come as early as there is room, nearest use first, but never in the place
of one that stays. So the trace is walked twice. The first walk finds the uses that are served by what an
earlier use left in memory. So that there is room to fetch ahead, it also has the units of the next
:data:`LEAD` uses there, one for each stage of a fetch (disk, bus, other ranks). The second walk releases
everything else as soon as its use ends, and fills the room with the units that are used next.

Walks go around: a unit that is used at the end of a pass may stay for the beginning of the next, even if it
is updated in between, where its update can write the new weights into the same buffer.

Source: Belady 1966; Cao, Felten, Karlin, Li, "A study of integrated prefetching and caching strategies" 1995
(conservative replacement, earliest fetch); ZeRO-Infinity (arXiv:2104.07857), section 6.2 (the overlap-centric
order of transfers); TeraIO (arXiv:2506.06472) for lifetimes that wrap around the step.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heappop, heappush
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple


class Kind(Enum):
    """Names the kinds of events in a trace."""

    USE = "use"  # its full values are needed from here on
    UNPIN = "unpin"  # one of its users needs them no more
    DONE = "done"  # its gradients are complete: the update takes the weights away


class Event(NamedTuple):
    """Records what a pass did to a unit; traces omit no event, so equal traces have equal plans."""

    kind: Kind
    unit: int


#: Uses ahead whose units are on their way, whatever else could stay in their place.
LEAD = 3
_USE, _UNPIN, _DONE = Kind.USE, Kind.UNPIN, Kind.DONE


@dataclass(frozen=True, slots=True)
class Actions:
    """Names the units to release after an event, and then those to start fetching, in this order."""

    release: tuple[int, ...] = ()
    fetch: tuple[int, ...] = ()


_NOTHING = Actions()


@dataclass(frozen=True, slots=True)
class Plan:
    """Holds the decisions for a pass with a certain trace."""

    events: tuple[Event, ...]
    begin: tuple[int, ...]  # units on their way before the first event, nearest use first
    actions: tuple[Actions, ...]  # after each event
    peak_nbytes: int  # of full buffers
    #: Units of ``begin`` that a pass before with the same plan leaves in memory.
    stays: frozenset[int] = frozenset()

    def fetched(self) -> Iterator[int]:
        """Yield the units that a pass fetches, in order, if the pass before followed the same plan."""
        yield from (unit for unit in self.begin if unit not in self.stays)
        for actions in self.actions:
            yield from actions.fetch


class Run(NamedTuple):
    """Joins uses of one unit that have no use of another between them."""

    unit: int
    first: int  # position of its first use
    last: int  # position of its last use
    #: Index of the unit's next run, counted on into the next pass; infinite: an update comes before it.
    following: float


def runs_of(events: Sequence[Event], can_stay: Collection[int] = ()) -> tuple[Run, ...]:
    """Return the runs of a pass, in order; units of ``can_stay`` may be updated where they are.

    A unit that is used after its update began, for what is frozen in it, has a run of its own for that.
    """
    uses, done, again = list[tuple[tuple[int, bool], int]](), set[int](), set[int]()
    for position, (kind, unit) in enumerate(events):
        if kind is _USE:
            uses.append(((unit, unit in done), position))
            again |= done & {unit}
        elif kind is _DONE:
            done.add(unit)
    grouped = ((unit, [position for _, position in each]) for (unit, _), each in groupby(uses, itemgetter(0)))
    spans = [(unit, positions[0], positions[-1]) for unit, positions in grouped]
    updated = done.difference(can_stay) | again
    following = {unit: float(len(spans) + i) for i, (unit, _, _) in reversed([*enumerate(spans)])}
    following |= dict.fromkeys(updated, math.inf)
    runs: list[Run] = []
    for i, (unit, first, last) in reversed([*enumerate(spans)]):
        runs.append(Run(unit, first, last, following[unit]))
        following[unit] = i
    return tuple(reversed(runs))


class Memory:
    """Tracks which units are present while a trace is walked, and the place in the trace."""

    def __init__(
        self, runs: Sequence[Run], nbytes: Mapping[int, int], capacity_nbytes: int, fetched: set[int]
    ) -> None:
        self.runs, self.nbytes, self.capacity_nbytes = runs, nbytes, capacity_nbytes
        self.fetched = fetched  # indices of runs that do not find their unit in memory
        self.present: dict[int, float] = {}  # the index of each unit's next run
        self._farthest: list[tuple[float, int]] = []  # a heap of those, negative; some are out of date
        self.present_nbytes = self.peak_nbytes = 0
        self.pins: dict[int, int] = {}
        self.index = 0  # runs that have begun

    def load(self, unit: int, run: float) -> None:
        self._expect(unit, run)
        self.present_nbytes += self.nbytes[unit]
        self.peak_nbytes = max(self.peak_nbytes, self.present_nbytes)

    def _expect(self, unit: int, run: float) -> None:
        self.present[unit] = run
        heappush(self._farthest, (-run, -unit))

    def drop(self, unit: int) -> None:
        if self.present.pop(unit, None) is not None:
            self.present_nbytes -= self.nbytes[unit]

    def held(self, position: int) -> set[int]:
        """Return units that must stay: pinned, or between two uses of the run that goes on."""
        held = set(self.pins)
        if self.index and position < self.runs[self.index - 1].last:
            held.add(self.runs[self.index - 1].unit)
        return held

    def make_room(self, nbytes: int, held: set[int]) -> list[int]:
        """Drop units, the farthest next use first, until ``nbytes`` fit, or only ``held`` ones are left."""
        dropped: list[int] = []
        staying: list[tuple[float, int]] = []
        while self.present_nbytes + nbytes > self.capacity_nbytes and self._farthest:
            run, unit = heappop(self._farthest)
            if self.present.get(-unit) != -run:
                continue  # out of date
            if -unit in held:
                staying.append((run, unit))
            else:
                dropped.append(-unit)
                self.drop(-unit)
        for each in staying:
            heappush(self._farthest, each)
        return dropped

    def note(self, position: int, event: Event) -> None:
        """Count pins and runs. The unit of a use is present."""
        kind, unit = event
        pins = self.pins.get(unit, 0)
        if kind is _USE:
            self.pins[unit] = pins + 1
            run = self.runs[self.index] if self.index < len(self.runs) else None
            if run is not None and run.first == position:
                self._expect(unit, run.following)
                self.index += 1
        elif kind is _UNPIN and pins > 1:
            self.pins[unit] = pins - 1
        else:
            self.pins.pop(unit, None)
            in_next_pass = len(self.runs) <= self.present.get(unit, math.inf) < math.inf
            if kind is _DONE and not in_next_pass:
                self.drop(unit)


class Keeping(Memory):
    """Finds the runs that find their unit in memory: the first walk of [Note: keep, then look ahead]."""

    def lap(self, events: Sequence[Event]) -> None:
        """Walk one pass from what the last one left."""
        self.fetched = set()
        self._look_ahead(-1)
        for position, event in enumerate(events):
            if event[0] is _USE and event[1] not in self.present:
                self._fetch(self.index, self.held(position))
            self.note(position, event)
            self._look_ahead(position)
            if self.present_nbytes > self.capacity_nbytes:  # of units that were pinned together
                self.make_room(0, self.held(position))

    def wrap(self) -> None:
        """Begin the next pass with what is present."""
        self.index = 0
        self.pins.clear()
        self._farthest.clear()
        for unit, run in list(self.present.items()):
            if math.isinf(run):  # it was used after its update began
                self.drop(unit)
            else:
                self._expect(unit, run - len(self.runs))

    def _look_ahead(self, position: int) -> None:
        """Fetch the units of the next :data:`LEAD` runs, as far as they fit beside what is held."""
        coming = [run[0] for run in self.runs[self.index : self.index + LEAD]]
        if all(map(self.present.__contains__, coming)):
            return
        held = self.held(position)
        room = self.capacity_nbytes - sum(self.nbytes[unit] for unit in held)
        for index, unit in enumerate(coming, self.index):
            if unit not in held:
                room -= self.nbytes[unit]
                if room < 0:
                    return
                held.add(unit)
            if unit not in self.present:
                self._fetch(index, held)

    def _fetch(self, index: int, held: set[int]) -> None:
        unit = self.runs[index].unit
        self.make_room(self.nbytes[unit], held)
        self.load(unit, index)
        self.fetched.add(index)


class Filling(Memory):
    """Decides the actions, which fetch as early as there is room, in the order of use: the second walk."""

    cursor = 0  # runs before it have their unit, or find it kept

    def begin(self, first: Mapping[int, int]) -> tuple[int, ...]:
        """Return what is present before the first event, nearest use first; ``first``: runs by unit."""
        for unit, index in first.items():
            if index not in self.fetched:
                self.load(unit, index)
        self._fill()
        return tuple(sorted(self.present, key=lambda unit: self.present[unit]))

    def lap(self, events: Sequence[Event]) -> tuple[Actions, ...]:
        """Return the actions after each event."""
        actions = []
        for position, event in enumerate(events):
            kind, unit = event
            release: list[int] = []
            fetch: list[int] = []
            if kind is _USE and unit not in self.present:
                release += self.make_room(self.nbytes[unit], self.held(position))
                self.load(unit, self.index)
                self.cursor = max(self.cursor, self.index + 1)
                fetch.append(unit)
            self.note(position, event)
            if kind is not _USE and unit in self.present and unit not in self.held(position):
                following = self.present[unit]
                not_kept = math.isinf(following) or int(following) % len(self.runs) in self.fetched
                # Where units that were pinned together are too much, one that is kept goes, too.
                if not_kept or self.present_nbytes > self.capacity_nbytes:
                    self.drop(unit)
                    release.append(unit)
            fetch += self._fill()
            if not (release or fetch):
                actions.append(_NOTHING)
                continue
            again = set(release) & set(fetch)  # there is room after all
            fetched = tuple(each for each in fetch if each not in again)
            actions.append(Actions(tuple(sorted(set(release) - again)), fetched))
        return tuple(actions)

    def _fill(self) -> list[int]:
        fetch: list[int] = []
        while self.cursor < len(self.runs):
            if self.cursor in self.fetched:
                unit = self.runs[self.cursor].unit
                fits = self.present_nbytes + self.nbytes[unit] <= self.capacity_nbytes
                if unit in self.present or not fits:
                    break
                self.load(unit, self.cursor)
                fetch.append(unit)
            self.cursor += 1
        return fetch


def make_plan(
    events: Sequence[Event], nbytes: Mapping[int, int], capacity_nbytes: int, can_stay: Collection[int] = ()
) -> Plan:
    """Return the plan for a recorded pass, whose units have full buffers of ``nbytes``.

    Units that ``can_stay`` may be updated where they are, and so stay for the next pass.
    """
    events = tuple(events)
    runs = runs_of(events, can_stay)
    keeping = Keeping(runs, nbytes, capacity_nbytes, set())
    keeping.lap(events)
    keeping.wrap()
    keeping.lap(events)
    filling = Filling(runs, nbytes, capacity_nbytes, keeping.fetched)
    first = {run.unit: index for index, run in reversed([*enumerate(runs)])}
    begin, actions = filling.begin(first), filling.lap(events)
    # the second walk may have dropped a unit that the first one kept to the end
    kept = frozenset(unit for unit in begin if first[unit] not in keeping.fetched)
    stays = kept.intersection(filling.present)
    lost = {event.unit for event in events if event.kind is _DONE} & (kept - stays)
    if lost:  # their updates take the weights away, so they leave room from there on
        return make_plan(events, nbytes, capacity_nbytes, set(can_stay) - lost)
    return Plan(events, begin, actions, filling.peak_nbytes, stays)
