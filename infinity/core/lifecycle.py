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


class SlotState(Enum):
    """Lists the states of a saved activation, each with the memory that it costs on this rank."""

    RESIDENT = "its storage"
    STORING = "its storage + what it is copied to"
    STORED = "an extent, or host memory"
    LOADING = "the same + a storage being filled"


class UpdateState(Enum):
    """Lists the states of a unit's update in one step, each with what it holds."""

    HELD = "the gradient"
    SPECULATED = "the gradient + a next version that is not committed yet"
    ROLLED_BACK = "the gradient; what was written to the next version is void"
    VALIDATED = "a next version that the step commits"


U, A, G = UnitState, SlotState, UpdateState
#: States that may follow each.
EDGES: dict[Any, frozenset[Any]] = {
    # With one rank and no accelerator the staging buffer is the full buffer, so FETCHING leads straight to
    # GATHERED. Every state may fall back to where the unit lives (ON_NVME or ON_HOST): that is a release, or
    # a copy that an update made stale. A unit that is nowhere else moves between the two with its home.
    U.ON_NVME: frozenset({U.FETCHING, U.ON_HOST}),
    U.FETCHING: frozenset({U.ON_HOST, U.UPLOADING, U.GATHERING, U.GATHERED, U.ON_NVME}),
    U.ON_HOST: frozenset({U.UPLOADING, U.GATHERING, U.GATHERED, U.ON_NVME}),
    U.UPLOADING: frozenset({U.GATHERING, U.GATHERED, U.ON_HOST, U.ON_NVME}),
    U.GATHERING: frozenset({U.GATHERED, U.ON_HOST, U.ON_NVME}),
    U.GATHERED: frozenset({U.ON_HOST, U.ON_NVME}),
    # A store that fails, or is not worth it any more, falls back to RESIDENT; a load that fails to STORED.
    # What was loaded is RESIDENT, and STORED again when its readers are done. A storage that another
    # reference kept alive is RESIDENT without a load.
    A.RESIDENT: frozenset({A.STORING, A.STORED}),
    A.STORING: frozenset({A.STORED, A.RESIDENT}),
    A.STORED: frozenset({A.LOADING, A.RESIDENT}),
    A.LOADING: frozenset({A.RESIDENT, A.STORED}),
    # An update is speculated when it starts before the global norm is known. One that starts afterwards, for
    # the first time or again, has the right numbers. In a step that is forgotten none is validated.
    G.HELD: frozenset({G.SPECULATED, G.VALIDATED}),
    G.SPECULATED: frozenset({G.VALIDATED, G.ROLLED_BACK}),
    G.ROLLED_BACK: frozenset({G.VALIDATED}),
    G.VALIDATED: frozenset(),
}
State = TypeVar("State", UnitState, SlotState, UpdateState)


class Lifecycle(Generic[State]):
    """Tracks the state of one unit, slot or update."""

    def __init__(self, name: str, state: State) -> None:
        self.name = name
        self.state: State = state

    def move(self, state: State) -> None:
        """Go to ``state``; raise if there is no such edge."""
        allowed = EDGES[self.state]
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
