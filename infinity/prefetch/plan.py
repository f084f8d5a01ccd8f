"""What is fetched and released at each position of a recorded step. Pure: no torch, no clock.

[Note: the nearest future]
At every position memory should hold the units that will be used soonest: those in use, then the
next one, the one after it, and so on, until the budget is full. What is there and does not belong
to that set is released; what belongs to it and is not there is fetched, nearest use first. With a
known future this one rule is both things that are usually two mechanisms: prefetching as far ahead
as memory allows, and Belady's rule for what to keep (the last blocks of the forward pass are still
there when the backward pass begins).

Source: Belady 1966 (the farthest next use goes first); ZeRO-Infinity (arXiv:2104.07857), section
6.2 (the overlap-centric order of transfers); TeraIO (arXiv:2506.06472) for lifetimes that wrap
around the step.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from infinity.prefetch.trace import Event, Kind


@dataclass(frozen=True, slots=True)
class Actions:
    """After an event: release these units, then start fetching those, in this order."""

    release: tuple[int, ...] = ()
    fetch: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Frozen decisions for one pass.

    Attributes:
        events: The trace that it was made for.
        begin: Units that should be on their way before the first event, nearest use first.
        actions: One for each event.
        peak_nbytes: The most bytes of full buffers at one time.
    """

    events: tuple[Event, ...]
    begin: tuple[int, ...]
    actions: tuple[Actions, ...]
    peak_nbytes: int

    def fetched(self, present: Iterable[int] = ()) -> Iterator[int]:
        """The units that a pass fetches, in order, when ``present`` are there before it begins."""
        there = set(present)
        yield from (unit for unit in self.begin if unit not in there)
        for actions in self.actions:
            yield from actions.fetch


class Window:
    """Plays events on a set of units that are present; decides by the nearest future."""

    def __init__(self, events: Sequence[Event], nbytes: Mapping[int, int], capacity_nbytes: int) -> None:
        self.events, self.nbytes, self.capacity_nbytes = events, nbytes, capacity_nbytes
        self.uses = [(i, e.unit) for i, e in enumerate(events) if e.kind is Kind.USE]
        self.present: set[int] = set()
        self.pins: Counter[int] = Counter()
        self.peak_nbytes = 0
        self._next = 0  # first entry of uses that is not before the position

    def desired(self, position: int) -> list[int]:
        """Pinned units, then the units of the nearest uses after ``position`` that fit."""
        while self._next < len(self.uses) and self.uses[self._next][0] <= position:
            self._next += 1
        wanted = dict.fromkeys(u for u in self.present if self.pins[u])
        room = self.capacity_nbytes - sum(self.nbytes[u] for u in wanted)
        for i in range(self._next, len(self.uses)):
            unit = self.uses[i][1]
            if unit in wanted:
                continue
            if self.nbytes[unit] > room:
                break
            wanted[unit] = None
            room -= self.nbytes[unit]
        return list(wanted)

    def turn(self, position: int) -> Actions:
        """Bring what is present to what is desired after ``position``."""
        wanted = self.desired(position)
        release = tuple(sorted(self.present - set(wanted)))
        fetch = tuple(u for u in wanted if u not in self.present)
        self.present = set(wanted)
        self.peak_nbytes = max(self.peak_nbytes, sum(self.nbytes[u] for u in wanted))
        return Actions(release, fetch)

    def play(self, position: int, event: Event) -> Actions:
        """One event, and what to do after it; a use of what is absent fetches it first."""
        demand: tuple[int, ...] = ()
        if event.kind is Kind.USE:
            if event.unit not in self.present:
                demand = (event.unit,)
                self.present.add(event.unit)
            self.pins[event.unit] += 1
        elif event.kind is Kind.UNPIN:
            self.pins[event.unit] = max(0, self.pins[event.unit] - 1)
        else:
            self.pins[event.unit] = 0
            self.present.discard(event.unit)
        actions = self.turn(position)
        return Actions(actions.release, demand + actions.fetch)


def make_plan(events: Sequence[Event], nbytes: Mapping[int, int], capacity_nbytes: int) -> Plan:
    """The plan for a recorded pass.

    Args:
        events: What happened, in order.
        nbytes: Size of each unit's full buffer (bytes).
        capacity_nbytes: What all full buffers together may take.
    """
    window = Window(events, nbytes, capacity_nbytes)
    begin = window.turn(-1).fetch
    actions = tuple(window.play(i, event) for i, event in enumerate(events))
    return Plan(tuple(events), begin, actions, window.peak_nbytes)
