"""Where a unit may go, and what it says where it may not."""

import itertools

import pytest

from infinity.core.errors import StateError
from infinity.core.lifecycle import EDGES, Lifecycle, SlotState, UnitState, UpdateState

S = UnitState
PAIRS = list(itertools.product(UnitState, UnitState))


def test_every_state_is_in_the_table():
    assert set(EDGES) == {*UnitState, *SlotState, *UpdateState}


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda s: s.name)
def test_a_move_follows_the_table_or_raises_and_changes_nothing(before, after):
    lifecycle = Lifecycle("layers.3", before)
    if after in EDGES[before]:
        lifecycle.move(after)
        assert lifecycle.state is after
        return
    with pytest.raises(StateError, match=f"^layers.3: {before.name} -> {after.name}; allowed: ") as raised:
        lifecycle.move(after)
    assert all(state.name in str(raised.value) for state in EDGES[before])
    assert lifecycle.state is before


def test_every_state_leads_to_gathered_and_back_home():
    def reachable(state):
        found, pending = set(), [state]
        while pending:
            for after in EDGES[pending.pop()] - found:
                found.add(after)
                pending.append(after)
        return found

    for state in UnitState:
        assert {S.GATHERED, S.ON_NVME} <= reachable(state)


def test_a_unit_is_never_gathered_twice():
    assert S.GATHERED not in EDGES[S.GATHERED]
    assert S.FETCHING not in EDGES[S.GATHERED]


def test_an_update_that_was_validated_stays_so_and_one_that_was_rolled_back_is_not_speculated_again():
    assert not EDGES[UpdateState.VALIDATED]
    rolled_back = Lifecycle("update of layers.3", UpdateState.SPECULATED)
    rolled_back.move(UpdateState.ROLLED_BACK)
    with pytest.raises(StateError, match="ROLLED_BACK -> SPECULATED; allowed: VALIDATED"):
        rolled_back.move(UpdateState.SPECULATED)
    rolled_back.move(UpdateState.VALIDATED)
