"""What the tensor cache does with slots that a plan sends away, on a clock."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from infinity.core.plan import ActivationPlan, Place
from infinity.core.profile import Slot, SlotKey
from infinity.simulate.clock import Channel, Clock, Move
from infinity.simulate.saved import Saved
from infinity.simulate.timeline import Sample

_STORE = {Place.NVME: Channel.WRITE, Place.HOST: Channel.TO_HOST}
_LOAD = {Place.NVME: Channel.READ, Place.HOST: Channel.FROM_HOST}


class Memory:
    """Bytes in one memory over time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.nbytes = self.peak_nbytes = 0
        self.samples = [Sample(0.0, 0)]

    def add(self, nbytes: int) -> None:
        if nbytes:
            self.nbytes += nbytes
            self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
            self.samples.append(Sample(self._clock.now_s, self.nbytes))


class Where(Enum):
    """Where the bytes of a slot are."""

    RESIDENT = auto()
    STORING = auto()  # resident, and to go as soon as they are stored and forward is done with them
    STORED = auto()
    LOADING = auto()


@dataclass(slots=True, eq=False)
class Away:
    """A slot that a plan sends away.

    Attributes:
        move: Its store or its load, as long as that has not ended.
        used_up: Forward has used it for the last time.
        released: Backward has used it for the last time.
    """

    slot: Slot
    place: Place
    where: Where = Where.RESIDENT
    move: Move | None = None
    used_up: bool = False
    released: bool = False

    @property
    def device_nbytes(self) -> int:
        """What the device gets by its going; a slot that other code holds frees nothing."""
        return 0 if self.slot.held else self.slot.nbytes

    @property
    def host_nbytes(self) -> int:
        return self.slot.nbytes if self.place is Place.HOST else 0


_Then = Callable[[Away], None]


class Cache:
    """Stores and loads slots as a plan says.

    Attributes:
        backlog_nbytes: Bytes whose store has not ended.
        most_backlog_nbytes: The most of them at one time.
        nbytes_stored: Written to NVMe.
        nbytes_loaded: Read from NVMe.
    """

    def __init__(self, clock: Clock, plan: ActivationPlan, saved: Saved) -> None:
        self.clock = clock
        self.device, self.host = Memory(clock), Memory(clock)
        self.backlog_nbytes = self.most_backlog_nbytes = self.nbytes_stored = self.nbytes_loaded = 0
        places = ((slot, plan.place(slot.key)) for slot in saved.slots)
        self._away = {slot.key: Away(slot, place) for slot, place in places if place is not Place.KEEP}
        self._loads: defaultdict[SlotKey | None, list[SlotKey]] = defaultdict(list)
        for load in plan.loads:
            self._loads[load.after].append(load.slot)

    def pack(self, key: SlotKey) -> None:
        """Forward saves the slot: store it."""
        away = self._away.get(key)
        if away is not None:
            self.backlog_nbytes += away.slot.nbytes
            self.most_backlog_nbytes = max(self.most_backlog_nbytes, self.backlog_nbytes)
            self.host.add(away.host_nbytes)
            away.where = Where.STORING
            away.move = self._submit(_STORE, away, self._stored)

    def use_up(self, key: SlotKey) -> None:
        """Forward is done with the slot."""
        away = self._away.get(key)
        if away is not None:
            away.used_up = True
            self._let_go(away)

    def foresee(self, key: SlotKey | None) -> None:
        """Backward asks for ``key``, or begins: start the loads that are tied to that."""
        for each in self._loads.pop(key, ()):
            if each in self._away:
                self._fetch(self._away[each])

    def ask(self, key: SlotKey) -> Move | None:
        """Backward needs the slot: what it has to wait for."""
        self.foresee(key)
        away = self._away.get(key)
        if away is None:
            return None
        self._fetch(away)
        return away.move if away.where is Where.LOADING else None

    def release(self, key: SlotKey) -> None:
        """Backward is done with the slot."""
        away = self._away.get(key)
        if away is not None:
            away.released = True
            if away.move is None:
                self._give_back(away)

    # --- parts -------------------------------------------------------------------------------

    def _submit(self, by: dict[Place, Channel], away: Away, then: _Then) -> Move:
        name = f"{away.slot.key.region}.{away.slot.key.ordinal}"
        return self.clock.submit(by[away.place], name, away.slot.nbytes, partial(then, away))

    def _stored(self, away: Away) -> None:
        away.move = None
        self.backlog_nbytes -= away.slot.nbytes
        self.nbytes_stored += away.slot.nbytes if away.place is Place.NVME else 0
        self._let_go(away)
        if away.released:
            self._give_back(away)

    def _let_go(self, away: Away) -> None:
        if away.where is Where.STORING and away.move is None and away.used_up and not away.slot.held:
            away.where = Where.STORED
            self.device.add(-away.device_nbytes)

    def _fetch(self, away: Away) -> None:
        if away.where is Where.STORED:
            self.device.add(away.device_nbytes)
            away.where = Where.LOADING
            away.move = self._submit(_LOAD, away, self._loaded)
        elif away.where is Where.STORING:
            away.where = Where.RESIDENT
            if away.move is not None and self.clock.cancel(away.move):
                away.move = None
                self.backlog_nbytes -= away.slot.nbytes
                self.host.add(-away.host_nbytes)
                away.place = Place.KEEP

    def _loaded(self, away: Away) -> None:
        away.move, away.where = None, Where.RESIDENT
        self.nbytes_loaded += away.slot.nbytes if away.place is Place.NVME else 0

    def _give_back(self, away: Away) -> None:
        self.device.add(-away.device_nbytes)
        self.host.add(-away.host_nbytes)
