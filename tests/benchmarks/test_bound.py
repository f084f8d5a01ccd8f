"""The linear program: below every plan, and close to ours where it matters."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from benchmarks.bound import bound
from infinity.core.errors import BudgetError
from infinity.core.plan import ActivationPlan, Hardware, Load, Place, Profile
from infinity.planner.lifetimes import Lifetimes, least_memory, lifetimes_of
from infinity.planner.search import within
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


def least_under(lifetimes: Lifetimes, plan: ActivationPlan):
    """Return bytes by position if stores took no time."""
    asked = {None: lifetimes.backward} | {period.key: period.end for period in lifetimes.periods}
    starts = {lifetimes.index[load.slot]: asked[load.after] for load in plan.loads}
    places = {lifetimes.index[key]: place for key, place in plan.places.items()}
    return least_memory(lifetimes, places, starts)


def without_codes(profile: Profile) -> Profile:
    """The profile of a step whose storages nothing makes smaller: the bound does not know of codecs."""
    return replace(profile, slots=tuple(replace(slot, coded=None) for slot in profile.slots))


@pytest.mark.slow
@given(random_profiles(), random_hardware(), st.floats(0, 1))
@examples(100, suppress_health_check=[HealthCheck.too_slow])
def test_no_plan_of_whole_blocks_beats_the_bound(profile: Profile, channels: Hardware, share: float) -> None:
    profile = without_codes(profile)
    capacity = budget_between(profile, channels, share)
    outcome = play(profile, plan_of_whole_blocks(profile, channels, capacity), channels)
    assert outcome.step_s >= bound(profile, channels, capacity) * (1 - 1e-6) - 1e-9


@st.composite
def random_plans(draw: st.DrawFn, profile: Profile, channels: Hardware) -> ActivationPlan:
    """Anything that can be said without codecs and kept operators, waits of a budget or none included."""
    regions = [block.region for block in profile.blocks]
    recomputed = frozenset(region for region in regions if draw(st.integers(0, 3)) == 0)
    lifetimes = lifetimes_of(profile, recomputed)
    may_be = [Place.KEEP, Place.NVME, *([Place.HOST] if channels.host_nbytes else [])]
    asked = [period.key for period in lifetimes.periods if period.is_named]
    places, loads = {}, []
    for period in (period for period in lifetimes.periods if period.can_leave):
        if (place := draw(st.sampled_from(may_be))) is Place.KEEP:
            continue
        places[period.key] = place
        if draw(st.booleans()):
            before = [None, *asked[: asked.index(period.key) + 1]]
            loads.append(Load(draw(st.sampled_from(before)), period.key))
    plan = ActivationPlan("any", places, tuple(loads), recomputed)
    if draw(st.booleans()):
        return plan
    least = least_under(lifetimes, plan)
    return within(lifetimes, plan, channels, int(least.max(initial=0))).plan


@given(st.data(), random_profiles(), random_hardware())
@examples(100, suppress_health_check=[HealthCheck.too_slow])
def test_no_plan_whatever_beats_the_bound_for_its_peak(
    data: st.DataObject, profile: Profile, channels: Hardware
) -> None:
    plan = data.draw(random_plans(profile, channels))
    outcome = play(profile, plan, channels)
    if outcome.host_peak_nbytes <= channels.host_nbytes:
        assert outcome.step_s >= bound(profile, channels, outcome.peak_nbytes) * (1 - 1e-6) - 1e-9


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
