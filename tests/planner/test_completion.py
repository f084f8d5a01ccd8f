"""When a unit's gradient is complete: all that trains has fired, its module is left, or the pass ends."""

from infinity.planner.updates import Completions


def completions(
    *, leaves: tuple[int, ...] = (), trains: tuple[int, int] = (2, 2), recomputed: tuple[int, ...] = ()
) -> Completions:
    return Completions(frozenset(leaves), lambda unit: trains, lambda unit: unit in recomputed)


def test_a_unit_is_complete_when_every_trainable_parameter_has_fired():
    one = completions()
    assert not one.fire(0, 0)
    assert not one.fire(0, 0)  # the same again
    assert one.fire(0, 1)


def test_frozen_parameters_are_not_waited_for():
    one = completions(trains=(2, 3))
    assert not one.fire(0, 0)
    assert one.fire(0, 2)


def test_a_recomputed_forward_reads_frozen_parameters_after_the_last_gradient():
    assert completions(trains=(1, 1), recomputed=(0,)).fire(0, 0)
    one = completions(trains=(1, 2), recomputed=(0,))
    assert not one.fire(0, 0)
    assert one.left_at_end([0, 1], opened=[0]) == [0, 1]


def test_what_is_gathered_as_one_is_complete_when_backward_leaves_it():
    one = completions(leaves=(0, 1), trains=(1, 1))
    assert not one.fire(0, 0)
    assert one.left([0, 1]) == [0, 1]
    one.complete(0)
    assert one.left([0, 1]) == [1]


def test_a_pass_that_accumulates_nothing_completes_nothing():
    assert completions().left([0, 1]) == []


def test_the_end_of_a_pass_completes_units_that_nothing_used():
    one = completions(trains=(1, 1))
    one.fire(2, 0)
    one.complete(2)
    assert one.left_at_end([0, 1, 2], opened=[]) == [0, 1]


def test_under_no_sync_a_pass_completes_what_it_gave_and_the_step_waits():
    one = completions(trains=(1, 1))
    one.syncing = False
    assert one.fire(3, 0)
    one.complete(3)
    assert one.left_at_end([0, 3], opened=[3]) == [3]
    one.end_backward()
    assert (one.synced, one.accumulated, one.in_backward) == (False, True, False)
    assert (one.passed, one.delivered) == (set(), set())
    one.syncing = True
    assert one.fire(3, 0)  # counted anew
    one.complete(3)
    one.end_backward()
    assert (one.synced, one.accumulated, one.delivered) == (True, False, {3})
    one.reset()
    assert (one.synced, one.delivered) == (False, set())


def test_a_parameter_that_is_frozen_between_two_micro_batches_still_has_its_gradient():
    one = completions(trains=(1, 1))
    one.syncing = False
    one.fire(0, 0)
    one.end_backward()
    one.syncing = True
    one.fire(1, 0)
    assert one.left_at_end([1], opened=[0, 1]) == [0, 1]
