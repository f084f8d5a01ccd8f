"""The update of a shard, event by event: when it starts, stands, is rolled back, and gives memory back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.core.errors import StateError
from infinity.core.lifecycle import UpdateState
from infinity.planner.updates import Do, ShardUpdate, Speculation

STORE, START, CANCEL, GRADIENT, WEIGHTS = Do.STORE, Do.START, Do.CANCEL, Do.FREE_GRADIENT, Do.FREE_WEIGHTS


def update(*, early: bool = True, keeps: bool = False, spills: bool = False) -> ShardUpdate:
    return ShardUpdate("unit", early=early, keeps=keeps, spills=spills)


def test_without_clipping_it_starts_inside_backward_and_gives_memory_back_as_soon_as_it_is_computed():
    one = update()
    assert one.complete() == (START,)
    assert one.speculated
    assert not one.holds_fetches  # the committed version is whole
    assert one.computed() == (WEIGHTS, GRADIENT)
    assert one.validate() == ()
    assert one.holds_fetches  # what it writes is the committed version now
    assert one.landed() == ()
    assert not one.holds_fetches
    assert one.commit() == ()


def test_with_clipping_the_gradient_is_kept_until_the_norm_is_known():
    one = update(keeps=True)
    assert one.complete() == (START,)
    assert one.computed() == (WEIGHTS,)
    assert one.validate() == (GRADIENT,)
    late = update(keeps=True)
    late.complete()
    assert late.validate() == ()  # the update still reads it
    assert late.computed() == (WEIGHTS, GRADIENT)


def test_an_update_that_was_computed_with_other_numbers_starts_again_from_the_committed_version():
    one = update(keeps=True)
    one.complete()
    one.computed()
    assert one.roll_back() == (CANCEL,)  # writes are in flight
    assert one.speculated
    assert one.landed() == ()
    assert one.lifecycle.state is UpdateState.ROLLED_BACK
    assert one.commit() == (START,)
    assert one.computed() == (GRADIENT,)
    assert one.landed() == ()


def test_one_that_is_cancelled_before_it_is_computed_keeps_the_weights_that_were_at_hand():
    one = update(keeps=True)
    one.complete()
    assert (one.roll_back(), one.landed(), one.commit()) == ((CANCEL,), (), (START,))
    assert one.computed() == (WEIGHTS, GRADIENT)


def test_one_that_has_landed_is_rolled_back_at_once():
    one = update(keeps=True)
    one.complete()
    one.computed()
    one.landed()
    assert one.roll_back() == ()
    assert one.lifecycle.state is UpdateState.ROLLED_BACK


def test_an_update_that_waits_for_the_norm_starts_at_step():
    one = update(early=False)
    assert one.complete() == ()
    assert one.commit() == (START,)
    assert one.holds_fetches
    assert one.computed() == (WEIGHTS, GRADIENT)


@pytest.mark.parametrize("stored_first", [True, False])
def test_a_gradient_on_nvme_leaves_memory_when_it_is_stored_and_an_update_inside_backward_has_read_it(
    stored_first: bool,
):
    one = update(keeps=True, spills=True)
    assert one.complete() == (STORE, START)
    assert not one.reads_stored_gradient
    if stored_first:
        assert (one.stored(), one.computed()) == ((), (WEIGHTS, GRADIENT))
    else:
        assert (one.computed(), one.stored()) == ((WEIGHTS,), (GRADIENT,))
    one.landed()
    assert (one.roll_back(), one.commit()) == ((), (START,))
    assert one.reads_stored_gradient
    assert one.computed() == ()


def test_a_gradient_that_waits_for_step_on_nvme_leaves_memory_at_once():
    one = update(early=False, spills=True)
    assert (one.complete(), one.stored()) == ((STORE,), (GRADIENT,))
    assert one.commit() == (START,)
    assert one.reads_stored_gradient


def test_a_gradient_that_is_not_finite_is_never_read():
    for one in (update(), update(early=False, spills=True)):
        assert one.complete(finite=False) == (WEIGHTS, GRADIENT)
        assert one.drop() == ()


def test_a_forgotten_step_gives_back_what_is_left():
    held = update(early=False)
    held.complete()
    assert held.drop() == (WEIGHTS, GRADIENT)
    stored = update(early=False, spills=True)
    stored.complete()
    assert stored.drop() == (WEIGHTS,)
    assert stored.stored() == (GRADIENT,)  # drives still read it until then


def test_an_update_stands_once():
    one = update()
    one.complete()
    one.validate()
    one.landed()
    with pytest.raises(StateError, match="update of unit: VALIDATED -> ROLLED_BACK"):
        one.roll_back()


@given(st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.data())
def test_in_any_order_of_events_memory_is_given_back_once_and_never_while_it_is_read(
    early: bool, keeps: bool, spills: bool, right: bool, data: st.DataObject
):
    spills &= keeps or not early  # one that does not wait is not stored
    right |= early and not keeps  # where a gradient is not kept, other numbers are an error
    one = update(early=early, keeps=keeps, spills=spills)
    freed: list[Do] = []
    due: list[str] = []  # what is under way and will be told

    def on(actions: tuple[Do, ...]) -> None:
        for action in actions:
            if action is START:
                due.extend(["computed", "landed"])
            elif action is STORE:
                due.append("stored")
            elif action is CANCEL and "computed" in due:
                due.remove("computed")
            elif action is not CANCEL:
                freed.append(action)
        reads = "stored" in due or ("computed" in due and not one.reads_stored_gradient)
        assert not (reads and GRADIENT in freed)

    def happens(event: str) -> None:
        due.remove(event)
        on(getattr(one, event)())

    def pass_time(most: int) -> None:
        for _ in range(data.draw(st.integers(0, most))):
            possible = [e for e in due if not (e == "landed" and "computed" in due)]
            if possible:
                happens(data.draw(st.sampled_from(possible)))

    on(one.complete())
    pass_time(3)
    if one.speculated and not right:
        on(one.roll_back())
        if "landed" in due:
            happens("landed")
    elif one.speculated:
        on(one.validate())
    if spills and "stored" in due:
        happens("stored")
    on(one.commit())
    pass_time(0)
    for event in ("stored", "computed", "landed"):
        if event in due:
            happens(event)
    assert sorted(each.name for each in freed) == ["FREE_GRADIENT", "FREE_WEIGHTS"]


def test_one_clipped_step_among_many_does_not_pause_speculation():
    one = Speculation(two_versions=True, clips=True)
    for right in [True, True, False, True, True, False]:
        assert one.early
        one.learn(4, right=right)
    for _ in range(9):
        one.learn(4, right=False)
    assert not one.early
    one.learn(4, right=True)
    assert not one.early
    one.learn(4, right=True)
    assert one.early
