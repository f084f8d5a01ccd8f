"""When each stored storage comes back: as late as its channel allows, or later where room is short.

[Note: room]
Nothing keeps compute back for want of memory but the bound on what waits to be stored. So a plan that would
need more than its budget, because stores end later than they should, gets such a bound.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from infinity.core.plan import Hardware, Outcome, Place
from infinity.planner.channels import Channels
from infinity.planner.clock import Clock, play
from infinity.planner.moves import Moves
from infinity.planner.script import Script

#: Backlogs that are tried: one that is safe, then by halves up to none.
TRIES = 7


def least_memory(script: Script, places: Mapping[int, Place]) -> np.ndarray:
    """Bytes by position if every store took no time and every load started when it is needed."""
    change = np.zeros(len(script.memory) + 1, dtype=np.int64)
    for index in places:
        saved = script.saved[index]
        if saved.free_at < saved.needed_at:
            change[saved.free_at] -= saved.nbytes
            change[saved.needed_at] += saved.nbytes
    return script.memory + np.cumsum(change[:-1])


def with_loads(
    script: Script, places: Mapping[int, Place], hardware: Hardware, capacity_nbytes: int | None
) -> Moves:
    """Loads for what is stored; each starts when backward asks for something, in order of need.

    With a capacity, memory stays within it, if :func:`least_memory` does: what is needed first has the
    first right to room, and a load without room starts later, at worst when it is needed.
    """
    first: dict[int, int | None] = {
        saved.needed_at: i for i, saved in reversed([*enumerate(script.saved)]) if saved.is_named
    }
    first[script.backward] = None
    asks = sorted(first)
    desired = _desired(script, places, hardware)
    memory = least_memory(script, places)
    loads = []
    earliest = script.backward
    for index in sorted(places):
        saved = script.saved[index]
        start = saved.needed_at
        wanted = asks[max(0, bisect_left(asks, desired[index] + 1) - 1)]
        wanted = max(wanted, earliest, min(saved.free_at, start))
        if capacity_nbytes is not None and wanted < start:
            full = np.flatnonzero(memory[wanted:start] + saved.nbytes > capacity_nbytes)
            wanted += int(full[-1]) + 1 if len(full) else 0
        start = min(start, asks[bisect_left(asks, wanted)])
        memory[start : saved.needed_at] += saved.nbytes
        loads.append((first[start], index))
        earliest = start
    return Moves(dict(places), loads)


def within(
    script: Script, moves: Moves, hardware: Hardware, capacity_nbytes: int, limit_s: float = float("inf")
) -> tuple[Moves, Outcome] | None:
    """``moves``, with a backlog if they need one to keep the capacity, and what they cost; see [Note: room].

    None: no backlog helps, or a step takes ``limit_s`` or more.
    """
    clock = Clock(script, moves, hardware)
    outcome = clock.play()
    if outcome.step_s >= limit_s:
        return None
    if outcome.peak_nbytes <= capacity_nbytes:
        return moves, outcome
    least = least_memory(script, moves.places) + _early(script, moves)
    # Beside these bytes there is never more than the backlog, however late stores end.
    low, high = capacity_nbytes - int(least.max(initial=0)), clock.most_backlog_nbytes
    found, tried_nbytes = None, low
    for _ in range(TRIES if low >= 0 else 0):
        bounded = replace(moves, backlog_nbytes=tried_nbytes)
        outcome = play(script, bounded, hardware)
        if outcome.peak_nbytes > capacity_nbytes:
            high = tried_nbytes
        else:
            low = tried_nbytes
            if outcome.step_s < limit_s:
                found, limit_s = (bounded, outcome), outcome.step_s
        tried_nbytes = (low + high) // 2
    return found


def _early(script: Script, moves: Moves) -> np.ndarray:
    """Bytes by position that are there because their loads start before they are needed."""
    change = np.zeros(len(script.memory) + 1, dtype=np.int64)
    for after, index in moves.loads:
        saved = script.saved[index]
        start = script.backward if after is None else script.saved[after].needed_at
        change[max(start, min(saved.free_at, saved.needed_at))] += saved.nbytes
        change[saved.needed_at] -= saved.nbytes
    return np.cumsum(change[:-1])


def _desired(script: Script, places: Mapping[int, Place], hardware: Hardware) -> dict[int, int]:
    """The latest positions from which the loads need not be waited for, in the order of need."""
    channels = Channels.of(script.times, hardware, script.units())
    ways = {Place.NVME: channels.nvme_read, Place.HOST: channels.from_host}
    until = {place: way.until() for place, way in ways.items()}
    left = {place: int(until[place][-1]) for place in ways}  # before the loads that are needed later
    found: dict[int, int] = {}
    before = len(script.times)
    for index in sorted(places, reverse=True):
        saved, place = script.saved[index], places[index]
        room = min(left[place], int(until[place][saved.needed_at])) - ways[place].booked_nbytes(saved.nbytes)
        left[place] = max(0, room)
        start = int(np.searchsorted(until[place], room, "right")) - 1
        before = max(script.backward, min(before, start, saved.needed_at))
        found[index] = before
    return found
