"""Promises of the plan for what waits between blocks: its rooms hold, and nothing moves that could stay."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.core.plan import Place
from infinity.planner.passing import ON_THEIR_WAY, PassingPlan, Rooms, plan_passing


def most_waiting(plan: PassingPlan, blocks: int, place: Place) -> int:
    """Play a step: return the most values and gradients that wait at ``place`` at one time.

    A value waits in device memory until the next block has taken it, if it is held, and for backward where
    the plan says. What is on its way, or in use, is not counted.
    """
    waiting, most = set[tuple[str, int, int]](), 0

    def count() -> int:
        return max(most, len(waiting))

    for block, index in product(range(blocks), range(plan.slices)):
        waiting.discard(("held", block - 1, index))
        if plan.value(block * plan.slices + index) is place:
            waiting.add(("value", block, index))
        elif place is Place.KEEP and plan.is_held(index):
            waiting.add(("held", block, index))
        most = count()
    for index in range(plan.slices):  # the tails
        waiting.discard(("held", blocks - 1, index))
    for block, index in product(reversed(range(blocks)), reversed(range(plan.slices))):
        waiting.discard(("gradient", block + 1, index))
        waiting.discard(("value", block, index))
        if plan.gradient(index) is place:
            waiting.add(("gradient", block, index))
        most = count()
    return most


@given(
    blocks=st.integers(1, 8), slices=st.integers(1, 9), device=st.integers(0, 90), host=st.integers(0, 90),
    nvme=st.booleans(), nbytes=st.integers(1, 5),
)  # fmt: skip
def test_what_waits_never_takes_more_than_its_rooms(
    blocks: int, slices: int, device: int, host: int, nvme: bool, nbytes: int
) -> None:
    plan = plan_passing(blocks, slices, nbytes, Rooms(device * nbytes, host * nbytes, nvme))
    kept = most_waiting(plan, blocks, Place.KEEP)
    assert most_waiting(plan, blocks, Place.HOST) <= host
    assert nvme or not most_waiting(plan, blocks, Place.NVME)
    if nvme or host >= blocks * slices + slices + ON_THEIR_WAY:  # there is room for all elsewhere
        assert kept <= max(device, ON_THEIR_WAY) - (ON_THEIR_WAY if kept < blocks * slices else 0)


@pytest.mark.parametrize("rooms", [Rooms(None), Rooms(100 * (3 * 4 + 4), 0, True), Rooms(0)])
def test_nothing_leaves_where_all_has_room_or_there_is_no_other_place(rooms: Rooms) -> None:
    plan = plan_passing(3, 4, 100, rooms)
    assert {plan.value(number) for number in range(12)} == {Place.KEEP}
    assert {plan.gradient(index) for index in range(4)} == {Place.KEEP}


def test_what_waits_for_the_next_block_stays_before_what_waits_for_backward() -> None:
    few = plan_passing(3, 4, 100, Rooms(100 * (3 + ON_THEIR_WAY), 0, True))
    assert [few.is_held(index) for index in range(4)] == [False, True, True, True]
    assert [few.gradient(index) for index in range(4)] == [Place.NVME, *[Place.KEEP] * 3]
    assert {few.value(number) for number in range(12)} == {Place.NVME}
    more = plan_passing(3, 4, 100, Rooms(100 * (6 + ON_THEIR_WAY), 300, True))
    assert {more.gradient(index) for index in range(4)} == {Place.KEEP}
    places = [more.value(number) for number in range(12)]
    assert places == [*[Place.NVME] * 7, *[Place.HOST] * 3, *[Place.KEEP] * 2]  # backward asks from the end


def test_beside_blocks_that_take_all_micro_batches_at_once_less_waits_on_the_device() -> None:
    alone, together = (Rooms.within("auto", 800, 400, nvme=True, together=each) for each in (False, True))
    assert (alone.device, together.device) == (400, 200)
    assert alone.host == together.host == 200
    assert Rooms.within("keep", 800, 400, nvme=True, together=True).device is None
