"""A plan on a clock: step time, stalls, peaks and bytes. Planner and simulator run the same one.

[Note: a play]
Compute runs the positions of a script in order, and between them it does what the tensor cache does; see
[Note: where bytes are] in :mod:`infinity.planner.cache`. While more than the plan's backlog is not stored,
packing waits: nothing else keeps compute back where memory is short. When backward asks for a storage, the
loads that are tied to it start, and it is loaded itself if nobody has done so; then compute waits for it,
before it asks for the next one. The time of what is still stored at the end is not the step's.

[Note: marks]
The clock stops only where something is to be done; in between it lets compute run as far as transfers allow.
A :class:`~infinity.planner.lanes.Recorder` makes it stop at every position, and changes nothing else.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from enum import IntEnum, auto
from functools import partial
from itertools import pairwise

import numpy as np

from infinity.core.errors import RecipeError
from infinity.core.plan import Hardware, Outcome, Place
from infinity.planner.cache import Cache
from infinity.planner.lanes import LOADING, NAMES, STORING, Lanes, Recorder
from infinity.planner.moves import Moves
from infinity.planner.script import Script


def play(script: Script, moves: Moves, hardware: Hardware) -> Outcome:
    """What one micro-batch with its update costs; see [Note: a play].

    Raises:
        RecipeError: A place is reached by a channel that moves nothing.
    """
    return Clock(script, moves, hardware).play()


class Do(IntEnum):
    """What is to be done before a position, in this order."""

    PACK = auto()
    USE_UP = auto()
    RELEASE = auto()
    BEGIN = auto()  # backward
    ASK = auto()


class Clock:
    """One play of ``moves``; see [Note: a play] and [Note: marks]."""

    def __init__(
        self, script: Script, moves: Moves, hardware: Hardware, recorder: Recorder | None = None
    ) -> None:
        self._script, self._moves, self._in_detail = script, moves, recorder is not None
        self._recorder = recorder or Recorder()
        self._lanes = Lanes(hardware, self._recorder)
        self._cache = Cache(script, moves, self._lanes)
        self._agenda = _agenda(script, moves)
        self._stall_s = self._recompute_s = 0.0
        self._peak_nbytes = 0
        _check(moves, self._lanes)

    @property
    def most_backlog_nbytes(self) -> int:
        """The most that has waited to be stored."""
        return self._cache.backlog.peak_nbytes

    @property
    def now_s(self) -> float:
        return self._lanes.now_s

    def play(self) -> Outcome:
        """Play it, once."""
        script, end = self._script, len(self._script.times)
        every = range(end if self._in_detail else 0)
        again = (each for at in script.again for each in (at, at + 1))
        for at, following in pairwise(sorted({0, end, *self._agenda, *script.traffic, *again, *every})):
            self._stop(at)
            began_s = self.now_s
            self._run(at, following)
            if at in script.again:
                self._recompute_s += self.now_s - began_s
                self._recorder.recomputed(at, began_s, self.now_s)
        self._stop(end)
        step_s = self.now_s
        self._drain(end)
        return self._outcome(step_s)

    # --- between positions -------------------------------------------------------------------

    def _stop(self, at: int) -> None:
        """Do what is to be done before position ``at``."""
        cache = self._cache
        for do, index in self._agenda.get(at, ()):
            if do is Do.PACK:
                cache.pack(index)
                self._wait(at, None, self._is_stored)
            elif do is Do.USE_UP:
                cache.use_up(index, at)
            elif do is Do.RELEASE:
                cache.release(index)
            elif do is Do.BEGIN:
                self._recorder.began_backward(self.now_s)
                cache.foresee(None, at)
            elif cache.ask(index, at):
                self._note(self._between(at))
                self._wait(at, index, partial(cache.is_there, index))
        if at in self._script.traffic:
            self._lanes.submit_units(*self._script.traffic[at])

    def _is_stored(self) -> bool:
        """Is no more waiting to be stored than may?"""
        most_nbytes = self._moves.backlog_nbytes
        return most_nbytes is None or self._cache.backlog.nbytes <= most_nbytes

    def _wait(self, at: int, name: int | None, until: Callable[[], bool]) -> None:
        began_s, between = self.now_s, self._between(at)
        while not until():
            assert self._lanes.next_s() < float("inf"), "nothing moves, and somebody waits"
            self._pass(self._lanes.next_s(), at, at, between)
        if self.now_s > began_s:
            self._stall_s += self.now_s - began_s
            self._recorder.waited(name, began_s, self.now_s)

    def _between(self, at: int) -> int:
        """Bytes before position ``at`` if nothing were away: no more than its neighbours take."""
        memory = self._script.memory
        return int(min(memory[at - 1], memory[at])) if 0 < at < len(memory) else 0

    def _drain(self, end: int) -> None:
        self._note(0)
        while self._lanes.next_s() < float("inf"):
            self._pass(self._lanes.next_s(), end, end, 0)

    # --- compute -----------------------------------------------------------------------------

    def _run(self, at: int, following: int) -> None:
        """Compute the positions from ``at`` up to ``following``."""
        done_s = self._script.until_s[at]
        for nbytes, work_s in self._parts(at, following):
            self._note(nbytes)
            self._compute(at, following, done_s, done_s + work_s, nbytes)
            done_s += work_s

    def _parts(self, at: int, following: int) -> Iterator[tuple[int, float]]:
        """Bytes and seconds of a position, or of the operators that it computes again; or of several ones.

        Bytes of several ones are left out: see :meth:`_highest`.
        """
        script = self._script
        if at in script.again:
            again = script.again[at]
            yield from zip(again.memory.tolist(), again.times.tolist(), strict=True)
        else:
            nbytes = int(script.memory[at]) if following == at + 1 else 0
            yield nbytes, script.until_s[following] - script.until_s[at]

    def _compute(self, at: int, following: int, done_s: float, goal_s: float, nbytes: int) -> None:
        """Let compute get on from ``done_s`` to ``goal_s`` of its time; it holds ``nbytes`` with all."""
        lanes, until_s = self._lanes, self._script.until_s
        while done_s < goal_s:
            speed, next_s = lanes.speed(), lanes.next_s()
            left_s = (goal_s - done_s) / speed
            done_s = goal_s if left_s <= next_s else done_s + next_s * speed
            first = bisect_left(until_s, done_s, at, following)
            self._pass(min(left_s, next_s), max(at, first - 1), first, nbytes)

    def _pass(self, passed_s: float, running: int, first: int, nbytes: int) -> None:
        """Let time pass while ``running`` runs; ``first`` is the first position that finds what has ended."""
        before = self._cache.away_nbytes
        for lane, index in self._lanes.advance(passed_s):
            self._cache.end(lane, index, running, first)
        if self._cache.away_nbytes != before:
            self._note(nbytes)

    # --- the outcome -------------------------------------------------------------------------

    def _note(self, nbytes: int) -> None:
        """The device holds ``nbytes`` without what is away."""
        there = nbytes - self._cache.away_nbytes
        self._peak_nbytes = max(self._peak_nbytes, there)
        self._recorder.holds(self.now_s, there)

    def _outcome(self, step_s: float) -> Outcome:
        cache = self._cache
        return Outcome(
            step_s=step_s,
            stall_s=self._stall_s,
            recompute_s=self._recompute_s,
            peak_nbytes=max(self._peak_nbytes, self._highest()),
            host_peak_nbytes=cache.host.peak_nbytes,
            nbytes_stored=cache.nbytes_stored,
            nbytes_loaded=cache.nbytes_loaded,
        )

    def _highest(self) -> int:
        """The most bytes at the beginning of a position; recomputations have been noted."""
        away = np.zeros(len(self._script.memory) + 1, dtype=np.int64)
        for at, nbytes in self._cache.changes:
            away[at] += nbytes
        there = self._script.memory - np.cumsum(away[:-1])
        there[list(self._script.again)] = 0
        return int(there.max(initial=0))


def _agenda(script: Script, moves: Moves) -> dict[int, list[tuple[Do, int]]]:
    """What is to be done before each position, in order."""
    found: dict[int, list[tuple[Do, int]]] = {}
    asked = {after for after, _ in moves.loads if after is not None} | moves.places.keys()
    for index in sorted(moves.places, key=lambda index: script.saved[index].key):
        saved = script.saved[index]
        found.setdefault(saved.packed_at + 1, []).append((Do.PACK, index))
        found.setdefault(saved.free_at, []).append((Do.USE_UP, index))
        if moves.places[index] is Place.HOST:
            found.setdefault(max(saved.packed_at, saved.released_at) + 1, []).append((Do.RELEASE, index))
    found.setdefault(script.backward, []).append((Do.BEGIN, -1))
    for index in sorted(asked):
        found.setdefault(script.saved[index].needed_at, []).append((Do.ASK, index))
    for do in found.values():
        do.sort(key=lambda each: each[0])
    return found


def _check(moves: Moves, lanes: Lanes) -> None:
    for place in set(moves.places.values()):
        for lane in (STORING[place], LOADING[place]):
            if not lanes.rate(lane) > 0:
                raise RecipeError(
                    f"the plan moves activations by {NAMES[lane]}, whose bandwidth is not above 0; plan again"
                )
