"""TeraIO's algorithm 1, by property and by hand."""

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.core.plan import Hardware, Place
from infinity.planner.channels import Channels
from infinity.planner.lifetimes import InactivePeriod
from infinity.planner.migration import Migration, Pressure, migrate


def endless(host_nbytes: int = 0) -> Hardware:
    return Hardware(1e12, 1e12, 2e12, 1e12, host_nbytes=host_nbytes)


def alone(periods: list[InactivePeriod], length: int) -> np.ndarray:
    """Memory that holds nothing but what the periods could take away."""
    memory = np.zeros(length, dtype=np.int64)
    for period in periods:
        for at in range(period.begin, period.end):
            memory[at % length] += period.nbytes
    return memory


def test_the_longest_pressure_per_byte_moved_leaves_first() -> None:
    periods = [InactivePeriod(0, 10, 4, 6), InactivePeriod(1, 10, 1, 9)]
    chosen = migrate(periods, np.ones(10), alone(periods, 10), 10, Channels.of(np.ones(10), endless()))
    assert [migration.period for migration in chosen] == [1]


def test_nothing_moves_while_memory_fits() -> None:
    periods = [InactivePeriod(0, 10, 1, 9)]
    channels = Channels.of(np.ones(10), endless())
    assert migrate(periods, np.ones(10), alone(periods, 10), 10, channels) == []


def test_a_gap_shorter_than_the_way_there_and_back_is_left() -> None:
    periods = [InactivePeriod(0, 30, 1, 6)]
    channels = Channels.of(np.ones(10), Hardware(10.0, 10.0, 20.0, 10.0))
    assert migrate(periods, np.ones(10), alone(periods, 10), 0, channels) == []


def test_the_host_takes_what_the_drive_has_no_time_for_up_to_its_limit() -> None:
    periods = [InactivePeriod(i, 30, 1, 9) for i in range(4)]
    channels = Channels.of(np.ones(10), Hardware(10.0, 10.0, 20.0, 1e9, host_nbytes=60))
    chosen = migrate(periods, np.ones(10), alone(periods, 10), 0, channels)
    assert [migration.place for migration in chosen] == [Place.NVME, Place.HOST, Place.HOST]


def test_gaps_of_weights_that_go_on_in_the_next_step_are_used() -> None:
    periods = [InactivePeriod(0, 10, 6, 13)]
    channels = Channels.of(np.ones(10), Hardware(10.0, 10.0, 20.0, 1.0))
    assert migrate(periods, np.ones(10), alone(periods, 10), 0, channels) == [Migration(0, Place.NVME, 7, 12)]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40), st.integers(1, 50)), max_size=30), st.data()
)
@settings(deadline=None, max_examples=100)
def test_migrations_lie_within_their_periods_and_channels_are_never_overbooked(
    drawn: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    length = 40
    times = np.ones(length)
    periods = [
        InactivePeriod(i, nbytes, begin, min(begin + extent, length))
        for i, (begin, extent, nbytes) in enumerate(drawn)
    ]
    rate = data.draw(st.sampled_from([1.0, 10.0, 1000.0]))
    memory = alone(periods, length)
    capacity = data.draw(st.integers(0, int(memory.max(initial=0))))
    channels = Channels.of(times, Hardware(rate, rate, 2 * rate, rate, host_nbytes=100))
    chosen = migrate(periods, times, memory, capacity, channels)
    assert len({migration.period for migration in chosen}) == len(chosen)
    for migration in chosen:
        period = periods[migration.period]
        assert period.begin <= migration.gone < migration.back <= period.end
    for place, most in ((Place.NVME, rate * length), (Place.HOST, 100)):
        assert sum(periods[m.period].nbytes for m in chosen if m.place is place) <= most


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.data())
@settings(deadline=None, max_examples=100)
def test_pressure_is_the_time_above_capacity_after_any_changes(
    numbers: list[int], data: st.DataObject
) -> None:
    memory, length = np.array(numbers), len(numbers)
    pressure = Pressure(np.ones(length), memory, 20)
    for _ in range(data.draw(st.integers(0, 6))):
        begin = data.draw(st.integers(0, length - 1))
        end = data.draw(st.integers(begin, begin + length))
        nbytes = data.draw(st.integers(1, 20))
        pressure.lower(begin, end, nbytes)
        for at in range(begin, end):
            memory[at % length] -= nbytes
        assert pressure.high_s(0, length) == np.count_nonzero(memory > 20)
        assert pressure.is_high() == bool((memory > 20).any())


def many(number: int) -> float:
    """Seconds of this process to plan ``number`` random periods at 60 % of the bandwidth they want."""
    draw = random.Random(0)
    times = np.full(number, 1e-4)
    periods = []
    for i in range(number):
        begin, end = sorted((draw.randrange(number), draw.randrange(number)))
        periods.append(InactivePeriod(i, draw.randrange(1, 1 << 20), begin, end + 1))
    changes = np.zeros(number + 2, dtype=np.int64)
    for period in periods:
        changes[period.begin] += period.nbytes
        changes[period.end] -= period.nbytes
    memory = np.cumsum(changes)[:number]
    rate = 0.6 * sum(period.nbytes for period in periods) / float(times.sum())
    channels = Channels.of(times, Hardware(rate, rate, 1.5 * rate, rate, host_nbytes=1 << 30))
    began_s = time.process_time()
    migrate(periods, times, memory, int(memory.max() * 0.4), channels)
    return time.process_time() - began_s


@pytest.mark.slow
def test_a_hundred_thousand_periods_take_seconds_and_ten_times_as_many_about_ten_times_as_long() -> None:
    few, all_ = many(10_000), many(100_000)
    print(f"10,000 periods {few:.2f} s, 100,000 periods {all_:.2f} s")
    assert all_ < 20
    assert all_ < 20 * few
