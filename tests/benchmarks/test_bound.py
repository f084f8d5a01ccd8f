"""The linear program: below every plan, and close to ours where it matters."""

import itertools

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from benchmarks.bound import bound
from infinity.core.errors import BudgetError
from infinity.core.plan import Hardware, Profile
from infinity.planner.simulator import play
from tests.helpers.cases import examples
from tests.helpers.profiles import (
    MIB,
    budget_between,
    hardware,
    plan_of_whole_blocks,
    random_hardware,
    random_profiles,
    transformer,
)

pytest.importorskip("scipy", reason="an extra: bound")


@pytest.mark.slow
@given(random_profiles(), random_hardware(), st.floats(0, 1))
@examples(100, suppress_health_check=[HealthCheck.too_slow])
def test_no_plan_of_whole_blocks_beats_the_bound(profile: Profile, channels: Hardware, share: float) -> None:
    capacity = budget_between(profile, channels, share)
    outcome = play(profile, plan_of_whole_blocks(profile, channels, capacity), channels)
    assert outcome.step_s >= bound(profile, channels, capacity) * (1 - 1e-6) - 1e-9


#: Layers, GiB/s of the drive, and where the budget lies between the least and all that is kept.
FEW = ((8, 0.3, 0.25), (8, 4.0, 0.75))
MANY = (
    *itertools.product((13, 24), (0.3, 1.0, 4.0), (0.25, 0.5, 0.75)),
    (8, 0.3, 0.75),
    (8, 1.0, 0.5),
    (8, 4.0, 0.25),
)


@pytest.mark.parametrize(
    ("layers", "gib_per_s", "share"), [*FEW, *(pytest.param(*each, marks=pytest.mark.slow) for each in MANY)]
)
def test_plans_for_transformers_are_within_a_twentieth_of_the_bound(
    layers: int, gib_per_s: float, share: float
) -> None:
    profile, channels = transformer(layers), hardware(gib_per_s)
    capacity = budget_between(profile, channels, share)
    planned = play(profile, plan_of_whole_blocks(profile, channels, capacity), channels)
    least_s = bound(profile, channels, capacity)
    print(f"{planned.step_s / least_s - 1:.1%} above the bound")
    assert least_s * (1 - 1e-6) <= planned.step_s <= 1.05 * least_s


def test_the_bound_grows_where_a_drive_slows_down_and_a_budget_shrinks() -> None:
    profile = transformer(8)
    capacity = budget_between(profile, hardware(), 0.2)
    seconds = [bound(profile, hardware(rate), capacity) for rate in (8.0, 1.0, 0.5, 0.1)]
    assert seconds[0] == pytest.approx(profile.step_s)
    assert seconds == sorted(seconds)
    assert seconds[-1] > 1.05 * seconds[0]
    assert bound(profile, hardware(0.5), capacity - 8 * MIB) >= seconds[2]


def test_a_budget_below_what_must_be_there_is_an_error() -> None:
    with pytest.raises(BudgetError, match="no plan keeps 1 MiB"):
        bound(transformer(4), hardware(), MIB)
