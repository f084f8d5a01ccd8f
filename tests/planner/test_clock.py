"""The clock: by hand, and whether looking at it changes what it shows."""

from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity.core.plan import Hardware, Place
from infinity.planner.clock import Clock, play
from infinity.planner.lanes import READ, WRITE, Lanes, Recorder
from infinity.planner.loading import least_memory, with_loads, within
from infinity.planner.moves import Moves
from infinity.planner.script import Script, script_of
from tests.helpers.profiles import hardware, random_hardware, random_profiles, transformer

#: A byte per second to write, two to read, both together as fast as alone; a second until the first byte.
SLOW = Hardware(2.0, 1.0, 3.0, 1.0, latency_s=1.0)


class Transfers(Recorder):
    """Keeps what has moved."""

    def __init__(self) -> None:
        self.all: list[tuple[int, int | None, float, float]] = []

    def moved(self, lane: int, name: int | None, begin_s: float, end_s: float) -> None:
        self.all.append((lane, name, begin_s, end_s))


def pass_all(lanes: Lanes) -> None:
    while lanes.next_s() < float("inf"):
        lanes.advance(lanes.next_s())


def test_the_latency_of_a_transfer_passes_while_others_move() -> None:
    seen = Transfers()
    lanes = Lanes(SLOW, seen)
    lanes.submit(WRITE, 0, 3)
    lanes.submit(WRITE, 1, 2)
    pass_all(lanes)
    assert seen.all == [(WRITE, 0, 1.0, 4.0), (WRITE, 1, 4.0, 6.0)]


def test_what_units_move_goes_before_what_is_on_its_way() -> None:
    seen = Transfers()
    lanes = Lanes(SLOW, seen)
    lanes.submit(READ, 0, 4)
    lanes.advance(lanes.next_s())
    lanes.advance(1.0)  # two of the four bytes
    lanes.submit_units(6, 0)
    pass_all(lanes)
    assert seen.all == [(READ, None, 2.0, 5.0), (READ, 0, 1.0, 6.0)]


def test_a_transfer_that_waits_for_others_can_be_called_off_and_the_first_one_cannot() -> None:
    seen = Transfers()
    lanes = Lanes(SLOW, seen)
    for name in range(3):
        lanes.submit(WRITE, name, 1)
    assert [lanes.cancel(WRITE, name) for name in (0, 1)] == [False, True]
    pass_all(lanes)
    assert [name for _, name, _, _ in seen.all] == [0, 2]


def all_leave(script: Script, places: Mapping[Place, bool]) -> dict[int, Place]:
    """Whatever can, to the places that there are in turn."""
    there = [place for place, exists in places.items() if exists]
    return {i: there[i % len(there)] for i, saved in enumerate(script.saved) if saved.can_leave and there}


@st.composite
def plays(draw: st.DrawFn) -> tuple[Script, Moves, Hardware]:
    profile, channels = draw(random_profiles()), draw(random_hardware())
    script = script_of(profile, frozenset(b.region for b in profile.blocks if draw(st.booleans())))
    places = all_leave(script, {Place.NVME: True, Place.HOST: draw(st.booleans())})
    moves = with_loads(script, places, channels, None)
    return script, Moves(moves.places, moves.loads, draw(st.sampled_from([None, 0, 50_000]))), channels


@given(plays())
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_a_play_that_is_looked_at_is_the_same(case: tuple[Script, Moves, Hardware]) -> None:
    quick, looked_at = play(*case), Clock(*case, Recorder()).play()
    assert looked_at.step_s == pytest.approx(quick.step_s)
    assert looked_at.stall_s == pytest.approx(quick.stall_s, abs=1e-9)
    assert (looked_at.nbytes_stored, looked_at.nbytes_loaded) == (quick.nbytes_stored, quick.nbytes_loaded)
    assert (looked_at.peak_nbytes, looked_at.host_peak_nbytes) == (quick.peak_nbytes, quick.host_peak_nbytes)


@given(plays())
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_stored_and_not_forwarded_is_loaded_once(case: tuple[Script, Moves, Hardware]) -> None:
    script, moves, _ = case
    outcome = play(*case)
    on_nvme = sum(script.saved[i].nbytes for i, place in moves.places.items() if place is Place.NVME)
    assert outcome.nbytes_loaded <= outcome.nbytes_stored <= on_nvme
    assert outcome.host_peak_nbytes <= sum(script.saved[i].nbytes for i in moves.places) - on_nvme


def test_a_backlog_keeps_a_budget_that_stores_are_too_slow_for() -> None:
    script, slow = script_of(transformer(8)), hardware(0.2)
    places = all_leave(script, {Place.NVME: True})
    capacity = int(least_memory(script, places).max()) * 3 // 2
    moves = with_loads(script, places, slow, capacity)
    free = play(script, moves, slow)
    assert free.peak_nbytes > capacity
    found = within(script, moves, slow, capacity)
    assert found is not None
    bounded, outcome = found
    assert bounded.backlog_nbytes is not None
    assert outcome == play(script, bounded, slow)
    assert outcome.peak_nbytes <= capacity
    assert outcome.stall_s > free.stall_s
    assert within(script, moves, slow, capacity, outcome.step_s) is None  # nothing is faster
    assert within(script, moves, slow, free.peak_nbytes) == (moves, free)
    assert within(script, moves, slow, int(least_memory(script, places).max()) - 1) is None
