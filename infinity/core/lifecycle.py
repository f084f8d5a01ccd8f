"""States of units, activations and updates by memory cost, and edges: the only record of where bytes are."""

from enum import Enum
from typing import Any, Generic, NoReturn, TypeVar

from infinity.core.errors import StateError


class Tier(Enum):
    """Lists the homes that a shard may have between uses."""

    HOST = "host"
    NVME = "nvme"


class UnitState(Enum):
    """Lists the states of a unit, each with the memory that its weights cost on this rank."""

    ON_NVME = "an extent"
    FETCHING = "extent + staging buffer being filled"
    ON_HOST = "shard in host memory"
    UPLOADING = "shard in host and device memory"
    GATHERING = "shard + full buffer being filled"
    GATHERED = "full buffer, parameters view it"


S = UnitState

#: With one rank and no accelerator the staging buffer is the full buffer, so FETCHING leads straight to
#: GATHERED. Every state may fall back to where the unit lives (ON_NVME or ON_HOST): that is a release, or a
#: copy that an update made stale. A unit that is nowhere else moves between the two with its home.
ALLOWED: dict[UnitState, frozenset[UnitState]] = {
    S.ON_NVME: frozenset({S.FETCHING, S.ON_HOST}),
    S.FETCHING: frozenset({S.ON_HOST, S.UPLOADING, S.GATHERING, S.GATHERED, S.ON_NVME}),
    S.ON_HOST: frozenset({S.UPLOADING, S.GATHERING, S.GATHERED, S.ON_NVME}),
    S.UPLOADING: frozenset({S.GATHERING, S.GATHERED, S.ON_HOST, S.ON_NVME}),
    S.GATHERING: frozenset({S.GATHERED, S.ON_HOST, S.ON_NVME}),
    S.GATHERED: frozenset({S.ON_HOST, S.ON_NVME}),
}


class SlotState(Enum):
    """Lists the states of a saved activation, each with the memory that it costs on this rank."""

    RESIDENT = "its storage"
    STORING = "its storage + what it is copied to"
    STORED = "an extent, or host memory"
    LOADING = "the same + a storage being filled"


#: A store that fails, or is not worth it any more, falls back to RESIDENT; a load that fails to STORED.
#: What was loaded is RESIDENT, and STORED again when its readers are done. A storage that
#: another reference kept alive is RESIDENT without a load.
SLOT_ALLOWED: dict[SlotState, frozenset[SlotState]] = {
    SlotState.RESIDENT: frozenset({SlotState.STORING, SlotState.STORED}),
    SlotState.STORING: frozenset({SlotState.STORED, SlotState.RESIDENT}),
    SlotState.STORED: frozenset({SlotState.LOADING, SlotState.RESIDENT}),
    SlotState.LOADING: frozenset({SlotState.RESIDENT, SlotState.STORED}),
}


class UpdateState(Enum):
    """Lists the states of a unit's update in one step, each with what it holds."""

    HELD = "the gradient"
    SPECULATED = "the gradient + a next version that is not committed yet"
    ROLLED_BACK = "the gradient; what was written to the next version is void"
    VALIDATED = "a next version that the step commits"


#: An update is speculated when it starts before the global norm is known. One that starts afterwards, for
#: the first time or again, has the right numbers. In a step that is forgotten none is validated.
UPDATE_ALLOWED: dict[UpdateState, frozenset[UpdateState]] = {
    UpdateState.HELD: frozenset({UpdateState.SPECULATED, UpdateState.VALIDATED}),
    UpdateState.SPECULATED: frozenset({UpdateState.VALIDATED, UpdateState.ROLLED_BACK}),
    UpdateState.ROLLED_BACK: frozenset({UpdateState.VALIDATED}),
    UpdateState.VALIDATED: frozenset(),
}

_EDGES: dict[Any, frozenset[Any]] = {**ALLOWED, **SLOT_ALLOWED, **UPDATE_ALLOWED}
State = TypeVar("State", UnitState, SlotState, UpdateState)


class Lifecycle(Generic[State]):
    """Tracks the state of one unit, slot or update."""

    def __init__(self, name: str, state: State) -> None:
        self.name = name
        self.state: State = state

    def move(self, state: State) -> None:
        """Go to ``state``; raise if there is no such edge."""
        allowed = _EDGES[self.state]
        if state not in allowed:
            names = ", ".join(sorted(s.name for s in allowed))
            raise StateError(f"{self.name}: {self.state.name} -> {state.name}; allowed: {names}")
        self.state = state


class Ended:
    """Stands in for a part that has ended: any use of it raises :class:`StateError`."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> NoReturn:
        raise StateError(self._why)
