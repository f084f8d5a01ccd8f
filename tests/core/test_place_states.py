"""States in what a division leaves of device memory: the arithmetic."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from infinity.core.budget import (
    DeviceBudget,
    Sharing,
    UnitSizes,
    divide_device,
    left_for_states,
    place_states,
)
from infinity.core.nbytes import rounded

MIB = 2**20


def unit(index: int, numel: int, *, trainable: bool = True, on_nvme: bool = False) -> UnitSizes:
    states = rounded(2 * numel) + rounded(10 * numel) if trainable and not on_nvme else 0
    return UnitSizes(
        name=f"layers.{index}", full=2 * numel, shard_grad=2 * numel, shard_weight=2 * numel, streams=True,
        on_nvme=on_nvme, trainable=trainable, waits=False, waits_in_host=trainable, states=states,
    )  # fmt: skip


@st.composite
def models(draw) -> list[UnitSizes]:
    numels = draw(st.lists(st.integers(1, 2000), min_size=1, max_size=12))
    return [
        unit(i, 2048 * numel, trainable=draw(st.booleans()), on_nvme=draw(st.booleans()))
        for i, numel in enumerate(numels)
    ]


def divided(total: int | None, ceiling: int, units: list[UnitSizes]) -> DeviceBudget:
    return divide_device(total, ceiling, units, Sharing(early=False, world_size=1, in_host=True))


def gradients(made: DeviceBudget, units: list[UnitSizes]) -> int:
    return sum(rounded(units[i].shard_grad) for i in made.on_device if not units[i].waits)


def check(before: DeviceBudget, made: DeviceBudget, bound: int, units: list[UnitSizes], scratch: int) -> None:
    window = sum(u.gathered for u in units)
    assert made.total <= max(bound, before.total)
    assert all(units[i].states for i in made.on_device)
    if not made.on_device:
        assert made == before
        return
    assert made.states == sum(units[i].states for i in made.on_device) + scratch
    left = before.lag - made.lag  # gradients of states that are there do not leave
    others = made.total - made.window - made.states - gradients(made, units)
    assert others == before.total - before.window - left
    assert left == min(before.lag, sum(rounded(units[i].shard_grad) // 3 for i in made.on_device))
    assert made.window >= min(before.window, window)  # states take nothing that weights would use


@given(models(), st.integers(0, 200 * MIB), st.integers(0, 8 * MIB))
def test_states_have_what_a_budget_leaves_beside_all_weights(units, more, scratch):
    least = divided(None, 0, units).total
    before = divided(least + more, 0, units)
    made = place_states(before, least + more, units, scratch)
    assert made.total == before.total
    check(before, made, before.total, units, scratch)
    larger = divided(least + more + MIB, 0, units)
    more_states = place_states(larger, larger.total, units, scratch)
    assert bool(more_states.on_device) >= bool(made.on_device)


@given(models(), st.integers(0, 400 * MIB), st.integers(0, 8 * MIB))
def test_a_budget_that_was_derived_grows_to_its_ceiling_for_states(units, more, scratch):
    ceiling = divided(None, 0, units).total + more
    before = divided(None, ceiling, units)
    check(before, place_states(before, ceiling, units, scratch), ceiling, units, scratch)


def test_the_first_units_come_first_and_those_that_are_too_large_stay():
    frozen = [unit(i, 8 * MIB, trainable=False) for i in range(4, 8)]
    units = [unit(0, 8 * MIB), *(unit(i, MIB) for i in range(1, 4)), *frozen]
    weights = sum(u.gathered for u in units)
    bare = divided(None, 0, units)
    leaving = sum(rounded(u.shard_grad) // 3 for u in units if u.trainable)
    base = bare.total - bare.window + weights
    gives = rounded(units[1].shard_grad) // 3  # what does not leave
    for fitting in range(4):
        bound = base + leaving + fitting * (14 * MIB - gives)
        made = place_states(divided(bound, 0, units), bound, units, 0)
        assert made.on_device == tuple(range(1, 1 + fitting))
    all_of_them = base + 11 * 14 * MIB
    assert place_states(divided(all_of_them, 0, units), all_of_them, units, 0).on_device == (0, 1, 2, 3)


def test_a_gradient_that_waits_in_device_memory_anyway_is_not_counted_again():
    units = [replace(unit(0, MIB), waits=True)]
    made = divided(None, 0, units)
    bound = made.total + units[0].states
    assert place_states(divided(bound, 0, units), bound, units, 0).on_device == (0,)


def test_a_part_of_the_memory_stays_for_larger_batches():
    assert left_for_states(10 * MIB, 80 * MIB, MIB) == 5 * MIB
    assert left_for_states(MIB, 80 * MIB, MIB) == 0


def test_as_much_as_activations_took_stays_for_batches_twice_as_large():
    assert left_for_states(40 * MIB, 80 * MIB, 30 * MIB) == 10 * MIB
    assert left_for_states(20 * MIB, 80 * MIB, 30 * MIB) == 0
