"""Memory over operators, and the gaps between uses."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from infinity.core.profile import Kind, Operator, Phase, Profile, StorageUse
from infinity.planner.lifetimes import InactivePeriod, characterise, inactive_periods, memory, operator_times
from tests.helpers.profiles import MIB, random_profiles, transformer

FORWARD = Phase.FORWARD


def three_operators() -> Profile:
    """A weight that the outer two operators read, and a storage that the last one reads again."""
    operators = (
        Operator("first", 1.0, (0,), (1,), FORWARD, 0),
        Operator("second", 2.0, (), (2,), FORWARD, 0),
        Operator("third", 1.0, (0, 1), (), FORWARD, 0),
    )
    storages = (
        StorageUse("weight", 7, Kind.WEIGHT, 0, 2),
        StorageUse("saved", 10, Kind.ACTIVATION, 0, 2),
        StorageUse("working", 100, Kind.WORKING, 1, 1),
    )
    return Profile(4.0, operators, storages, (), ())


def test_memory_counts_what_the_step_makes_from_birth_to_death() -> None:
    assert memory(three_operators()).tolist() == [10, 110, 10]
    assert memory(three_operators(), {Kind.WEIGHT}).tolist() == [7, 7, 7]


def test_gaps_of_weights_go_on_in_the_next_step_and_those_of_activations_do_not() -> None:
    profile = three_operators()
    assert inactive_periods(profile) == (InactivePeriod(0, 7, 1, 2), InactivePeriod(1, 10, 1, 2))
    earlier = replace(
        profile, operators=(*profile.operators, Operator("update", 1.0, (), (), Phase.UPDATE, -1))
    )
    assert InactivePeriod(0, 7, 3, 4) in inactive_periods(earlier)


@given(random_profiles())
@settings(deadline=None, max_examples=50)
def test_no_operator_uses_a_storage_inside_its_inactive_period(profile: Profile) -> None:
    length = len(profile.operators)
    for period in inactive_periods(profile, frozenset(Kind)):
        for at in range(period.begin, period.end):
            operator = profile.operators[at % length]
            assert period.storage not in (*operator.inputs, *operator.outputs)


@given(random_profiles())
@settings(deadline=None, max_examples=50)
def test_memory_is_the_sum_of_what_is_alive(profile: Profile) -> None:
    alive = [
        sum(
            s.nbytes
            for s in profile.storages
            if s.kind in (Kind.ACTIVATION, Kind.WORKING) and s.born <= at <= s.dies
        )
        for at in range(len(profile.operators))
    ]
    assert memory(profile).tolist() == alive


def test_what_lies_between_operators_is_spread_over_them() -> None:
    profile = replace(three_operators(), step_s=8.0)
    assert np.allclose(operator_times(profile), [2.0, 4.0, 2.0])


def test_most_of_a_transformers_memory_is_at_rest() -> None:
    character = characterise(transformer(24, logits_nbytes=4 * MIB))
    assert character.active_share < 0.1
    assert character.long_share > 0.25
    assert character.active_share <= character.most_active_share <= 1


def test_the_active_share_is_weighed_by_time() -> None:
    # 17 of 17, 100 of 117, 17 of 17 bytes in use, for 1, 2 and 1 seconds.
    assert characterise(three_operators()).active_share == pytest.approx((1 + 2 * 100 / 117 + 1) / 4)
