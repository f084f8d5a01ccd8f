"""When each stored storage comes back: as late as its channel allows, or later where room is short."""

from bisect import bisect_left
from collections.abc import Mapping

import numpy as np

from infinity.core.plan import Hardware, Place
from infinity.planner.channels import Channels
from infinity.planner.clock import Moves
from infinity.planner.script import Script


def least_memory(script: Script, places: Mapping[int, Place]) -> np.ndarray:
    """Bytes by position if every store took no time and every load started when it is needed."""
    memory = script.memory.copy()
    for index in places:
        saved = script.saved[index]
        if saved.free_at < saved.needed_at:
            memory[saved.free_at : saved.needed_at] -= saved.nbytes
    return memory


def with_loads(
    script: Script, places: Mapping[int, Place], hardware: Hardware, capacity_nbytes: int | None
) -> Moves:
    """Loads for what is stored; each starts when backward asks for something, in order of need.

    With a capacity, memory stays within it, if :func:`least_memory` does: what is needed first has the
    first right to room, and a load without room starts later, at worst when it is needed.
    """
    asks = sorted({script.backward} | {s.needed_at for s in script.saved if s.is_named})
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
        loads.append((start, index))
        earliest = start
    return Moves(dict(places), loads)


def _desired(script: Script, places: Mapping[int, Place], hardware: Hardware) -> dict[int, int]:
    """The latest positions from which the loads need not be waited for, in the order of need."""
    channels = Channels.of(script.times, hardware, script.units())
    found: dict[int, int] = {}
    before = len(script.times)
    for index in sorted(places, reverse=True):
        saved = script.saved[index]
        channel = channels.from_host if places[index] is Place.HOST else channels.nvme_read
        start = channel.latest_start(saved.needed_at, saved.nbytes)
        channel.take_until(saved.needed_at, saved.nbytes)
        before = min(before, script.backward if start is None else start)
        found[index] = before
    return found
