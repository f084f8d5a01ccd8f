"""Passes are timed, and compared with those that end alike."""

import pytest

from infinity.activations import controller
from infinity.activations.controller import PassTimer
from infinity.activations.tensor_cache import ActivationStats


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as its only item."""
    now = [100.0]
    monkeypatch.setattr(controller.time, "perf_counter", lambda: now[0])
    return now


def run(
    passes: PassTimer, stats: ActivationStats, clock: list[float], time_s: float, *, updates: bool
) -> None:
    passes.begin()
    clock[0] += time_s
    stats.nbytes_stored += 10
    stats.nbytes_loaded += 7
    stats.waited_s += time_s / 8
    stats.handled_s += time_s / 8
    passes.end(updates=updates)
    clock[0] += 1000.0  # what lies between passes belongs to none


def test_a_pass_with_the_update_is_not_compared_with_one_before_it(clock: list[float]) -> None:
    stats = ActivationStats()
    passes = PassTimer(stats)
    for time_s in (1.0, 3.0, 2.0):  # steps of two micro-batches
        run(passes, stats, clock, time_s, updates=False)
        run(passes, stats, clock, 10 * time_s, updates=True)
    within, last = passes.alike(0, updates=False), passes.alike(0, updates=True)
    assert [each.time_s for each in within] == [1.0, 3.0, 2.0]
    assert [each.time_s for each in last] == [10.0, 30.0, 20.0]
    assert {(each.nbytes_stored, each.nbytes_loaded) for each in last} == {(10, 7)}


def test_the_first_passes_are_left_out(clock: list[float]) -> None:
    stats = ActivationStats()
    passes = PassTimer(stats)
    for time_s in (9.0, 1.0, 1.0):
        run(passes, stats, clock, time_s, updates=True)
    assert [each.time_s for each in passes.alike(1, updates=True)] == [1.0, 1.0]
    assert passes.alike(3, updates=True) == []
    assert passes.begun == 3


def test_a_pass_computes_while_it_does_not_wait_for_bytes_or_move_them(clock: list[float]) -> None:
    stats = ActivationStats()
    passes = PassTimer(stats)
    for time_s in (8.0, 16.0):
        run(passes, stats, clock, time_s, updates=True)
    run(passes, stats, clock, 1.0, updates=False)
    assert [each.compute_s(0.01) for each in passes.alike(0, updates=True)] == pytest.approx(
        [6 * (1 - 0.17 / 8), 12 * (1 - 0.17 / 16)]
    )
    assert [each.compute_s(100.0) for each in passes.alike(0, updates=True)] == [3.0, 6.0]
    assert [each.number for each in passes.alike(1, updates=True)] == [1]


def test_a_pass_ends_once(clock: list[float]) -> None:
    stats = ActivationStats()
    passes = PassTimer(stats)
    passes.end(updates=True)
    run(passes, stats, clock, 1.0, updates=True)
    passes.end(updates=True)
    assert len(passes.ended) == 1


def test_what_is_remembered_is_bounded(clock: list[float]) -> None:
    stats = ActivationStats()
    passes = PassTimer(stats)
    for _ in range(controller.REMEMBERED + 5):
        run(passes, stats, clock, 1.0, updates=True)
    assert len(passes.ended) == controller.REMEMBERED
    assert passes.ended[0].number == 5
