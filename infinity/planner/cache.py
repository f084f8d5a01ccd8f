"""What the tensor cache does with storages that a plan sends away, on a clock.

[Note: where bytes are]
A storage that is packed is queued to be stored. Its memory is free when its store has ended and forward has
used it for the last time, and is taken again from the moment its load is asked for. What has not gone when
its load is asked for stays, and is not loaded; a store that still waits for others is called off (here all
but the first wait; the executor has a few of them on their way). Storing what other code holds frees nothing.
Host memory is taken when a storage is packed, and given back when backward has used it for the last time, or
its store is called off.
"""

from collections import defaultdict
from enum import Enum, auto

from infinity.core.plan import Place
from infinity.planner.lanes import LOADING, READ, STORING, TO_HOST, WRITE, Lanes
from infinity.planner.moves import Moves
from infinity.planner.script import Script


class Where(Enum):
    """Where the bytes of a storage are."""

    RESIDENT = auto()  # and there they stay
    STORING = auto()
    FORWARDED = auto()  # being stored, in vain
    DROPPED = auto()  # the same, and backward is done with them
    STORED = auto()  # and resident until forward is done with them
    AWAY = auto()
    LOADING = auto()


class Level:
    """Bytes that rise and fall."""

    def __init__(self) -> None:
        self.nbytes = self.peak_nbytes = 0

    def add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)


class Cache:
    """Stores and loads as :class:`Moves` say; storages are indices into the script's saved ones.

    Attributes:
        away_nbytes: Device memory that the step's storages do not take.
        changes: The first position that finds each change of it, and by how much.
        backlog: Bytes whose store has not ended.
        host: Bytes of host memory.
        nbytes_stored: Written to NVMe.
        nbytes_loaded: Read from NVMe.
    """

    def __init__(self, script: Script, moves: Moves, lanes: Lanes) -> None:
        self._saved, self._places, self._lanes = script.saved, dict(moves.places), lanes
        self._where = dict.fromkeys(moves.places, Where.RESIDENT)
        self._loads: defaultdict[int | None, list[int]] = defaultdict(list)
        for after, index in moves.loads:
            self._loads[after].append(index)
        self.backlog, self.host = Level(), Level()
        self.changes: list[tuple[int, int]] = []
        self.away_nbytes = self.nbytes_stored = self.nbytes_loaded = 0

    # --- what compute does -------------------------------------------------------------------

    def pack(self, index: int) -> None:
        """Forward saves the storage: store it."""
        place, nbytes = self._places[index], self._saved[index].nbytes
        self._where[index] = Where.STORING
        self.backlog.add(nbytes)
        self.host.add(self._on_host(index))
        self._lanes.submit(STORING[place], index, nbytes)

    def use_up(self, index: int, at: int) -> None:
        """Forward is done with the storage before position ``at``."""
        if self._where[index] is Where.STORED:
            self._leave(index, at)

    def foresee(self, index: int | None, at: int) -> None:
        """Backward asks for the storage, or begins (None): start the loads that are tied to that."""
        for each in self._loads.pop(index, ()):
            self._fetch(each, at)

    def ask(self, index: int, at: int) -> bool:
        """Backward needs the storage before position ``at``; must it wait?"""
        self.foresee(index, at)
        self._fetch(index, at)
        return not self.is_there(index)

    def is_there(self, index: int) -> bool:
        """Does nobody have to wait for the storage?"""
        return self._where.get(index) is not Where.LOADING

    def release(self, index: int) -> None:
        """Backward is done with the storage."""
        if self._where[index] in (Where.STORING, Where.FORWARDED):
            self._where[index] = Where.DROPPED
        else:
            self.host.add(-self._on_host(index))

    # --- what lanes do -----------------------------------------------------------------------

    def end(self, lane: int, index: int, running: int, first: int) -> None:
        """A transfer has ended during position ``running``; ``first`` is the first that finds it so."""
        nbytes = self._saved[index].nbytes
        if lane in (WRITE, TO_HOST):
            self.backlog.add(-nbytes)
            self.nbytes_stored += nbytes if lane == WRITE else 0
            self._stored(index, running, first)
        else:
            self._where[index] = Where.RESIDENT
            self.nbytes_loaded += nbytes if lane == READ else 0

    def _stored(self, index: int, running: int, first: int) -> None:
        where, saved = self._where[index], self._saved[index]
        if where is Where.DROPPED:
            self.host.add(-self._on_host(index))
        stays = where is not Where.STORING or not saved.is_freed
        self._where[index] = Where.RESIDENT if stays else Where.STORED
        if not stays and saved.free_at <= running:
            self._leave(index, first)

    # --- parts -------------------------------------------------------------------------------

    def _leave(self, index: int, at: int) -> None:
        self._where[index] = Where.AWAY
        self._change(at, self._saved[index].nbytes)

    def _fetch(self, index: int, at: int) -> None:
        where = self._where.get(index)
        if where is Where.AWAY:
            self._where[index] = Where.LOADING
            self._change(at, -self._saved[index].nbytes)
            self._lanes.submit(LOADING[self._places[index]], index, self._saved[index].nbytes)
        elif where is Where.STORED:
            self._where[index] = Where.RESIDENT
        elif where is Where.STORING:
            self._where[index] = Where.FORWARDED
            if self._lanes.cancel(STORING[self._places[index]], index):
                self._call_off(index)

    def _call_off(self, index: int) -> None:
        self._where[index] = Where.RESIDENT
        self.backlog.add(-self._saved[index].nbytes)
        self.host.add(-self._on_host(index))
        del self._places[index]

    def _change(self, at: int, nbytes: int) -> None:
        self.away_nbytes += nbytes
        self.changes.append((at, nbytes))

    def _on_host(self, index: int) -> int:
        return self._saved[index].nbytes if self._places.get(index) is Place.HOST else 0
