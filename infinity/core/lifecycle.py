"""Where a unit is, and where it may go next.

One enum, one table, one :meth:`Lifecycle.move`. A state is described by the memory it costs;
nothing else remembers where a unit's bytes are.
"""

from enum import Enum

from infinity.core.errors import StateError


class UnitState(Enum):
    """What memory a unit's weights cost on this rank."""

    ON_NVME = "an extent"
    FETCHING = "extent + staging buffer being filled"
    ON_HOST = "shard in host memory"
    UPLOADING = "shard in host and device memory"
    ON_DEVICE = "shard in device memory"
    GATHERING = "shard + full buffer being filled"
    GATHERED = "full buffer, parameters view it"


S = UnitState

#: Every edge that exists. With one rank and no accelerator the staging buffer is the full
#: buffer, so FETCHING leads straight to GATHERED. Every state may fall back to where the
#: unit lives (ON_NVME or ON_HOST): that is a release, or a copy that an update made stale.
ALLOWED: dict[UnitState, frozenset[UnitState]] = {
    S.ON_NVME: frozenset({S.FETCHING}),
    S.FETCHING: frozenset({S.ON_HOST, S.UPLOADING, S.GATHERING, S.GATHERED, S.ON_NVME}),
    S.ON_HOST: frozenset({S.UPLOADING, S.GATHERING, S.GATHERED, S.ON_NVME}),
    S.UPLOADING: frozenset({S.ON_DEVICE, S.GATHERING, S.GATHERED, S.ON_HOST, S.ON_NVME}),
    S.ON_DEVICE: frozenset({S.GATHERING, S.GATHERED, S.ON_HOST, S.ON_NVME}),
    S.GATHERING: frozenset({S.GATHERED, S.ON_HOST, S.ON_NVME}),
    S.GATHERED: frozenset({S.ON_HOST, S.ON_NVME}),
}


class Lifecycle:
    """The state of one unit."""

    def __init__(self, name: str, state: UnitState) -> None:
        self.name = name
        self.state = state

    def move(self, state: UnitState) -> None:
        """Go to ``state``.

        Raises:
            StateError: There is no such edge; names the unit, the states and what was allowed.
        """
        allowed = ALLOWED[self.state]
        if state not in allowed:
            names = ", ".join(sorted(s.name for s in allowed))
            raise StateError(f"{self.name}: {self.state.name} -> {state.name}; allowed: {names}")
        self.state = state
