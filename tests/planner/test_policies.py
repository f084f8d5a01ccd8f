"""Plans, by property: budgets hold, loads come in time, more memory is never slower."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from infinity.core.errors import BudgetError, RecipeError
from infinity.core.plan import ActivationPlan, CodedForm, Hardware, Place, Profile
from infinity.planner import search
from infinity.planner.lifetimes import ProfileIndex, lifetimes_of
from infinity.planner.search import places_within, plan, simple_plan
from infinity.planner.simulator import play
from tests.helpers.cases import examples, few
from tests.helpers.profiles import (
    MIB,
    Tape,
    budget_between,
    hardware,
    plan_of_whole_blocks,
    play_in_detail,
    random_hardware,
    random_profiles,
    smallest_budget,
    transformer,
)

POLICIES: dict[str, Callable[[Profile, Hardware], ActivationPlan]] = {
    name: partial(simple_plan, name) for name in ("keep", "offload", "recompute", "adaptive")
} | {"plan": plan}
keep_all, offload_all, adaptive = (POLICIES[name] for name in ("keep", "offload", "adaptive"))
fast = examples(25, suppress_health_check=[HealthCheck.too_slow])


def well_formed(profile: Profile, made: ActivationPlan) -> None:
    """Every stored storage is loaded once, in order of need, from a point that backward reaches before."""
    index = ProfileIndex(profile)
    lifetimes = index.lifetimes(*index.again(made))
    periods = {period.key: period for period in lifetimes.periods if period.is_named}
    assert all(periods[key].can_leave for key in made.places)
    assert sorted(load.slot for load in made.loads) == sorted(made.places)
    needs = [periods[load.slot].end for load in made.loads]
    assert needs == sorted(needs)
    starts = [lifetimes.backward if load.after is None else periods[load.after].end for load in made.loads]
    assert all(start <= need for start, need in zip(starts, needs))
    assert starts == sorted(starts)
    assert made.recomputed <= {block.region for block in profile.blocks}


@pytest.mark.parametrize("policy", POLICIES)
@given(profile=random_profiles(), channels=random_hardware())
@fast
def test_every_policys_plan_is_well_formed_and_survives_json(
    policy: str, profile: Profile, channels: Hardware
) -> None:
    made = POLICIES[policy](profile, channels)
    well_formed(profile, made)
    assert ActivationPlan.from_json(made.to_json()) == made
    assert POLICIES[policy](profile, channels).to_json() == made.to_json()


@given(random_profiles(), random_hardware(), st.floats(0, 1))
@fast
def test_memory_is_never_above_the_budget(profile: Profile, channels: Hardware, share: float) -> None:
    capacity = budget_between(profile, channels, share)
    made = plan(profile, channels, capacity)
    well_formed(profile, made)
    outcome, timeline = play_in_detail(profile, made, channels)
    assert made.capacity_nbytes is not None
    assert made.capacity_nbytes <= capacity
    for slower in (1, 3, 1000):
        late = replace(channels, write_bytes_per_s=channels.write_bytes_per_s / slower)
        assert play(profile, made, late).peak_nbytes <= made.capacity_nbytes
    assert outcome.peak_nbytes == max(sample.nbytes for sample in timeline.memory) <= made.capacity_nbytes
    assert outcome.host_peak_nbytes <= channels.host_nbytes
    assert outcome.step_s >= play(profile, keep_all(profile, channels), channels).step_s - 1e-9


@given(random_profiles(), random_hardware(), st.floats(0, 1), st.floats(0, 1))
@fast
def test_a_larger_budget_is_not_slower_by_a_thousandth(
    profile: Profile, channels: Hardware, first: float, second: float
) -> None:
    less, more = sorted(budget_between(profile, channels, share) for share in (first, second))
    slow, quick = (play(profile, plan(profile, channels, size), channels).step_s for size in (less, more))
    assert quick <= slow * (1 + 1e-3)  # the search leaves differences below NEGLIGIBLE alone; 1.5e-4 was seen


def test_a_budget_half_above_the_least_is_used() -> None:
    profile, slow = transformer(24), hardware(0.2)
    least = smallest_budget(profile, slow)
    scarce, more = (plan(profile, slow, budget) for budget in (least, least * 3 // 2))
    assert more.capacity_nbytes is not None
    assert 1.3 * least < more.capacity_nbytes <= 1.5 * least  # of all that may stay it is a nineteenth
    slower, quicker = (play(profile, made, slow).step_s for made in (scarce, more))
    assert quicker < 0.97 * slower


@given(random_profiles(), random_hardware())
@fast
def test_a_bound_is_below_every_plan(profile: Profile, channels: Hardware) -> None:
    plans = search.PlanSearch(profile, channels)
    for rung in plans._rungs()[::8]:
        for count in range(len(plans._order) + 1):
            again = plans._first(count, 0)
            found = plans._found(again, rung)
            assert found is None or plans._least_s(again, rung) <= found.outcome.step_s * (1 + 1e-9)


@given(random_profiles(), random_hardware())
@fast
def test_the_smallest_budget_is_the_smallest(profile: Profile, channels: Hardware) -> None:
    least = smallest_budget(profile, channels)
    plan(profile, channels, least)
    if least:
        with pytest.raises(BudgetError, match=f"{least} bytes"):
            plan(profile, channels, least - 1)


def test_a_budget_that_no_plan_keeps_is_an_error_that_says_what_holds_it() -> None:
    profile = transformer(4, hidden_nbytes=4 * MIB, logits_nbytes=64 * MIB)
    with pytest.raises(BudgetError) as raised:
        plan(profile, hardware(), 8 * MIB)
    message = str(raised.value)
    assert "within 8 MiB (8388608 bytes)" in message
    assert f"({smallest_budget(profile, hardware())} bytes)" in message
    assert "matmul_backward" in message
    assert "outside blocks" in message
    assert "64 MiB" in message


def test_keep_and_recompute_are_what_they_say() -> None:
    profile, channels = transformer(8), hardware()
    kept = play(profile, keep_all(profile, channels), channels)
    again = play(profile, POLICIES["recompute"](profile, channels), channels)
    assert kept.step_s == pytest.approx(profile.step_s)
    assert kept.stall_s == kept.recompute_s == kept.nbytes_stored == 0
    assert again.peak_nbytes < 0.5 * kept.peak_nbytes
    # Blocks take all but the embedding and the head; one of three parts of their time is forward.
    assert again.step_s == pytest.approx(kept.step_s + again.recompute_s)
    assert again.recompute_s == pytest.approx(8 * 0.02 * 11 / 12)


def test_offloading_everything_moves_each_byte_there_and_back_once() -> None:
    profile, channels = transformer(8), hardware(100.0)
    made = offload_all(profile, channels)
    outcome = play(profile, made, channels)
    nbytes = {slot.key: slot.nbytes for slot in profile.slots}
    assert outcome.nbytes_stored == outcome.nbytes_loaded == sum(nbytes[key] for key in made.places)
    assert outcome.stall_s == 0


def test_on_a_quick_drive_the_peak_falls_for_three_percent_of_the_step() -> None:
    profile, channels = transformer(12), hardware(8.0)
    kept, planned = (play(profile, p(profile, channels), channels) for p in (keep_all, plan))
    assert planned.peak_nbytes < 0.3 * kept.peak_nbytes
    assert planned.step_s <= 1.03 * kept.step_s
    assert plan(profile, channels).capacity_nbytes is None


def test_the_adaptive_rule_offloads_as_much_as_the_drive_can_take_and_no_more() -> None:
    profile = transformer(12)
    regions = []
    for rate in (0.01, 0.5, 1.0, 8.0):
        made = adaptive(profile, hardware(rate))
        outcome = play(profile, made, hardware(rate))
        assert outcome.step_s <= 1.02 * profile.step_s
        regions.append({key.region for key in made.places})
    assert regions[0] == set()
    assert len(regions[0]) < len(regions[1]) < len(regions[2]) < len(regions[3])


def test_a_slow_drive_is_helped_by_the_host_and_by_recomputation() -> None:
    profile = transformer(6)
    slow = hardware(0.2)
    capacity = budget_between(profile, slow, 0.4)
    alone = plan(profile, slow, capacity)
    beside = replace(slow, host_nbytes=4096 * MIB)
    helped = plan(profile, beside, capacity)
    assert alone.recomputed
    assert Place.HOST in helped.places.values()
    assert play(profile, helped, beside).step_s < play(profile, alone, slow).step_s


def test_host_memory_for_half_of_what_leaves_lasts_for_the_blocks_with_the_least_time() -> None:
    profile = transformer(8)
    lifetimes = lifetimes_of(profile)
    all_nbytes = sum(period.nbytes for period in lifetimes.periods if period.is_worth_storing)
    places = places_within(lifetimes, hardware(0.5, host=8.0, host_nbytes=all_nbytes // 2), 0)
    to_host = {lifetimes.periods[index].key.region for index, place in places.items() if place is Place.HOST}
    regions = sorted(block.region for block in profile.blocks)
    assert to_host >= {regions[0], regions[-3], regions[-2]}  # the last one's storages hardly leave


def test_a_plan_for_a_drive_that_is_too_slow_bounds_what_waits_for_it() -> None:
    profile, slow = transformer(8), hardware(0.1)
    least = smallest_budget(profile, slow)
    made = plan(profile, slow, least)
    assert made.waits
    assert play(profile, made, slow).peak_nbytes <= least
    assert play(profile, replace(made, waits=()), slow).peak_nbytes > least


@pytest.mark.parametrize("gigabytes_per_s", few((1.0,), (0.3, 1.0, 4.0)))
def test_to_keep_a_budget_on_a_slower_drive_costs_nothing_on_the_one_that_was_measured(
    gigabytes_per_s: float,
) -> None:
    profile, channels = transformer(8), hardware(gigabytes_per_s)
    made = plan(profile, channels, budget_between(profile, channels, 0.3))
    free = replace(made, waits=())
    # The other exceeds its budget, so it waits for nothing.
    assert play(profile, made, channels).step_s <= 1.035 * play(profile, free, channels).step_s
    slow = replace(channels, write_bytes_per_s=channels.write_bytes_per_s / 10)
    assert play(profile, free, slow).peak_nbytes > made.capacity_nbytes
    assert play(profile, made, slow).peak_nbytes <= made.capacity_nbytes


@given(profile=random_profiles(), channels=random_hardware(), share=st.floats(0.0, 1.0))
@fast
def test_a_plan_near_another_keeps_its_budget(profile: Profile, channels: Hardware, share: float) -> None:
    capacity = budget_between(profile, channels, share)
    first, faster = plan(profile, channels, capacity), replace(channels, latency_s=channels.latency_s / 2)
    made = plan(profile, faster, capacity, first)
    well_formed(profile, made)
    assert play(profile, made, faster).peak_nbytes <= capacity
    free = plan(profile, channels)
    assert plan(profile, faster, None, free) == free


def test_a_plan_on_faster_drives_is_about_as_fast_near_the_one_for_slow_ones() -> None:
    profile, slow, fast = transformer(16), hardware(1.0), hardware(1.5)
    capacity = budget_between(profile, slow, 0.3)
    near, anew = plan(profile, fast, capacity, plan(profile, slow, capacity)), plan(profile, fast, capacity)
    assert play(profile, near, fast).step_s <= 1.01 * play(profile, anew, fast).step_s


def test_where_what_another_plan_recomputes_is_too_little_a_plan_is_searched() -> None:
    profile, none = transformer(8), hardware(0.0)
    least = smallest_budget(profile, none)
    made = plan(profile, none, least, keep_all(profile, none))
    assert made.recomputed
    assert play(profile, made, none).peak_nbytes <= least


def test_without_a_drive_and_without_host_memory_blocks_are_computed_again() -> None:
    profile, none = transformer(6), Hardware(0.0, 0.0, 0.0, 0.0)
    least = smallest_budget(profile, none)
    made = plan(profile, none, least)
    assert made.places == {}
    assert made.recomputed
    assert play(profile, made, none).peak_nbytes <= least


def test_units_traffic_leaves_less_of_the_drive_to_activations() -> None:
    channels = hardware(1.5)
    free, busy = transformer(6), transformer(6, weight_nbytes=8 * MIB)
    capacity = budget_between(free, channels, 0.3)
    slower, quicker = (play(p, plan(p, channels, capacity), channels).step_s for p in (busy, free))
    assert slower > 1.01 * quicker


@given(random_profiles(), random_hardware(), st.floats(0, 1))
@fast
def test_operators_that_stay_make_no_plan_slower(profile: Profile, channels: Hardware, share: float) -> None:
    channels = replace(channels, host_nbytes=0, read_bytes_per_s=1e6, write_bytes_per_s=1e6)  # scarce
    capacity = budget_between(profile, channels, share)
    ours, theirs = (each(profile, channels, capacity) for each in (plan, plan_of_whole_blocks))
    slower, quicker = (play(profile, each, channels).step_s for each in (theirs, ours))
    assert quicker <= slower * (1 + search.NEGLIGIBLE)


def dear_and_cheap() -> Profile:
    """Blocks of two long operators and two short ones that make more."""
    tape = Tape()
    x = tape.run("embedding", 1e-3, [tape.given(4096)], MIB, saves_output=True)
    for layer in range(6):
        with tape.block(f"layers.{layer}"):
            wide = tape.run("product", 2e-2, [x], 4 * MIB, saves=[x], saves_output=True)
            gelu = tape.run("gelu", 1e-3, [wide], 4 * MIB, saves_output=True)
            drop = tape.run("dropout", 1e-3, [gelu], 4 * MIB, saves_output=True)
            x = tape.run("product", 2e-2, [drop], MIB)
    tape.run("loss", 1e-3, [x], 4, saves=[x])
    return tape.finish()


def test_where_memory_is_scarce_what_is_dear_is_not_computed_again() -> None:
    profile, none = dear_and_cheap(), Hardware(0.0, 0.0, 0.0, 0.0)
    capacity = budget_between(profile, none, 0.4)
    made, whole = plan(profile, none, capacity), plan_of_whole_blocks(profile, none, capacity)
    assert {(key.name, key.ordinal) for key in made.kept} >= {("product", 0)}
    assert {*made.kept.values()} <= {MIB, 4 * MIB}
    before, after = play(profile, whole, none), play(profile, made, none)
    assert after.step_s < 0.95 * before.step_s
    assert max(before.peak_nbytes, after.peak_nbytes) <= capacity
    lost = replace(made, kept={key._replace(ordinal=9): nbytes for key, nbytes in made.kept.items()})
    with pytest.raises(RecipeError, match="operator 9 product of block 1"):
        play(profile, lost, none)


def test_what_is_random_is_not_kept() -> None:
    profile, none = dear_and_cheap(), Hardware(0.0, 0.0, 0.0, 0.0)
    drawing = replace(profile, operators=tuple(replace(o, may_stay=False) for o in profile.operators))
    capacity = budget_between(profile, none, 0.5)
    assert plan(profile, none, capacity).kept
    assert not plan(drawing, none, capacity).kept


def test_bytes_that_delay_compute_are_paid_for() -> None:
    profile, free = transformer(8), hardware(8.0)
    charged = replace(free, compute_s_per_byte=0.2 / 8e9)
    made = offload_all(profile, free)
    outcome = play(profile, made, charged)
    moved = outcome.nbytes_stored + outcome.nbytes_loaded
    assert outcome.step_s == pytest.approx(profile.step_s + moved * charged.compute_s_per_byte, rel=1e-3)


def test_a_plan_for_another_profile_is_refused() -> None:
    made = offload_all(transformer(4), hardware())
    with pytest.raises(ValueError, match="plan again"):
        play(transformer(2), made, hardware())


def coded(profile: Profile, codec: str, *, exact: bool = True) -> Profile:
    """The profile, in which a quick codec makes a quarter of each storage."""
    slots = (
        replace(slot, coded=CodedForm(codec, slot.nbytes // 4, 1e-4, 1e-4, exact)) for slot in profile.slots
    )
    return replace(profile, slots=tuple(slots))


def test_on_a_slow_drive_a_plan_moves_the_bytes_of_codes_and_is_faster() -> None:
    profile, slow = transformer(6), hardware(0.5)
    budget = budget_between(profile, slow, 0.2)
    plain, better = plan(profile, slow, budget), plan(coded(profile, "zeros"), slow, budget)
    assert {*better.codecs.values()} == {"zeros"}
    assert {better.place(key) for key in better.codecs} == {Place.CODED_NVME}  # longer ones break no budget
    before, after = play(profile, plain, slow), play(coded(profile, "zeros"), better, slow)
    assert after.step_s < 0.8 * before.step_s
    assert after.nbytes_stored < before.nbytes_stored
    assert max(before.peak_nbytes, after.peak_nbytes) <= budget


def test_without_a_drive_codes_of_one_length_meet_a_budget_that_nothing_else_meets() -> None:
    profile, none = replace(transformer(6), blocks=()), hardware(0.0, host=0.0)
    assert smallest_budget(coded(profile, "zeros"), none) == smallest_budget(profile, none)
    least = smallest_budget(coded(profile, "bits"), none)
    assert least < 0.7 * smallest_budget(profile, none)
    made = plan(coded(profile, "bits"), none, least)
    assert {*made.places.values()} == {Place.CODED}
    assert play(coded(profile, "bits"), made, none).peak_nbytes <= least


def test_a_code_that_has_no_room_beside_what_is_read_from_it_is_not_chosen() -> None:
    tape = Tape()
    made = tape.run("made", 1e-3, [tape.given(0)], 4096, saves_output=True)
    later = tape.run("later", 1e-3, [tape.run("view", 1e-3, [made], 0)], 3072, saves_output=True)
    tape.run("loss", 1e-3, [later], 0)
    profile = coded(tape.finish(), "bits")
    for speed in (1e-6, 1e-3, 1.0):  # of the drive, beside the codec
        channels = hardware(speed)
        least = smallest_budget(profile, channels)  # what was made is read beside its gradient
        assert play(profile, plan(profile, channels, least), channels).peak_nbytes <= least


def test_what_loses_precision_is_coded_under_every_budget_and_never_recomputed() -> None:
    profile, channels = coded(transformer(6), "2bit", exact=False), hardware(1.0)
    worth = {p.key for p in lifetimes_of(profile).periods if p.is_worth_storing}
    for share in (0.0, 0.3, 1.0):
        made = plan(profile, channels, budget_between(profile, channels, share))
        assert made.codecs.keys() == worth
        assert not made.recomputed
    with pytest.raises(RecipeError, match="the codec of slot"):
        play(transformer(6), made, channels)


def test_where_the_last_moment_counts_a_drive_makes_no_plan_slower() -> None:
    profile, gib = transformer(layers=6), 2.0**30
    link = hardware(0.0, host=4.0, host_nbytes=10**12)
    both = replace(link, read_bytes_per_s=gib, write_bytes_per_s=gib, mixed_bytes_per_s=2 * gib)
    least = smallest_budget(profile, both)
    with_drive, alone = (play(profile, plan(profile, each, least), each).step_s for each in (both, link))
    assert with_drive <= alone
