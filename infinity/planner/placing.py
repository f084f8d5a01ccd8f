"""Which saved storages leave, for a given set of recomputed blocks and a given budget."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from infinity.core.plan import Hardware, Place
from infinity.planner.channels import Channels
from infinity.planner.lifetimes import InactivePeriod
from infinity.planner.loading import least_memory
from infinity.planner.migration import migrate
from infinity.planner.script import Saved, Script


def places_for(
    script: Script, hardware: Hardware, capacity_nbytes: int, everything: dict[int, Place]
) -> Iterator[dict[int, Place]]:
    """Ways to keep ``capacity_nbytes``: hidden transfers first; all transfers alike; ``everything``."""
    seen: list[dict[int, Place]] = []
    for first in (_hidden(script, hardware, capacity_nbytes), {}, everything):
        places = first if first is everything else _forced(script, hardware, capacity_nbytes, first)
        if places not in seen and int(least_memory(script, places).max(initial=0)) <= capacity_nbytes:
            seen.append(places)
            yield places


def all_places(script: Script, hardware: Hardware) -> dict[int, Place]:
    """Where all that can leave goes, if that frees memory."""
    return _forced(script, hardware, 0, {})


def _hidden(script: Script, hardware: Hardware, capacity_nbytes: int) -> dict[int, Place]:
    leaving = [i for i, saved in enumerate(script.saved) if _gains(saved)]
    periods = [
        InactivePeriod(i, script.saved[i].nbytes, script.saved[i].free_at, script.saved[i].needed_at)
        for i in leaving
    ]
    channels = Channels.of(script.times, hardware, script.units())
    chosen = migrate(periods, script.times, script.memory, capacity_nbytes, channels)
    return {leaving[migration.period]: migration.place for migration in chosen}


def _gains(saved: Saved) -> bool:
    return saved.can_leave and saved.free_at < saved.needed_at


def _forced(
    script: Script, hardware: Hardware, capacity_nbytes: int, places: Mapping[int, Place]
) -> dict[int, Place]:
    """Add to ``places``, worst position first, until memory fits or nothing can leave any more."""
    chosen = dict(places)
    lanes = _Loads(script.saved, hardware, chosen)
    # The longest gap first: it helps the most positions for the same bytes.
    waiting = [i for i, saved in enumerate(script.saved) if _gains(saved) and i not in chosen]
    waiting.sort(key=lambda i: (script.saved[i].free_at - script.saved[i].needed_at, i))
    gaps = np.array([(script.saved[i].free_at, script.saved[i].needed_at) for i in waiting]).reshape(-1, 2)
    over = least_memory(script, chosen) - capacity_nbytes
    while over.max(initial=0) > 0:
        at = int(np.argmax(over))
        helpful = np.flatnonzero((gaps[:, 0] <= at) & (at < gaps[:, 1])).tolist()
        number = next((n for n in helpful if lanes.place(waiting[n]) is not None), None)
        if number is None:
            over[at] = 0  # nothing helps here
            continue
        saved = script.saved[waiting[number]]
        chosen[waiting[number]] = lanes.put(waiting[number])
        over[saved.free_at : saved.needed_at] -= saved.nbytes
        gaps[number] = 0  # it is gone
    return chosen


class _Loads:
    """How busy each place's channels are with what has been put there."""

    def __init__(self, saved: Sequence[Saved], hardware: Hardware, places: Mapping[int, Place]) -> None:
        read, write, host = (
            hardware.read_bytes_per_s,
            hardware.write_bytes_per_s,
            hardware.host_bytes_per_s,
        )
        self._saved = saved
        self._s_per_byte = {}
        if read > 0 and write > 0:
            self._s_per_byte[Place.NVME] = 1 / read + 1 / write
        if host > 0:
            self._s_per_byte[Place.HOST] = 2 / host
        self._nbytes = {Place.NVME: 0, Place.HOST: 0}
        for index, where in places.items():
            self._nbytes[where] += saved[index].nbytes
        self._host_nbytes = hardware.host_nbytes

    def place(self, index: int) -> Place | None:
        """Where it would be there and back the soonest."""
        nbytes = self._saved[index].nbytes
        possible = [
            where
            for where in self._s_per_byte
            if where is Place.NVME or self._nbytes[where] + nbytes <= self._host_nbytes
        ]
        return min(possible, key=lambda w: (self._nbytes[w] + nbytes) * self._s_per_byte[w], default=None)

    def put(self, index: int) -> Place:
        where = self.place(index)
        assert where is not None
        self._nbytes[where] += self._saved[index].nbytes
        return where
