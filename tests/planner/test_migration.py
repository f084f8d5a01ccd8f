"""TeraIO's algorithm 1, by property and by hand."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from infinity.core.plan import Hardware, Place, SlotKey
from infinity.planner.lifetimes import InactivePeriod
from infinity.planner.placement import Migration, channel_timelines, migrate
from tests.helpers.cases import examples


def endless() -> Hardware:
    return Hardware(1e12, 1e12, 2e12, 1e12)


def period(nbytes: int, begin: int, end: int) -> InactivePeriod:
    return InactivePeriod(SlotKey(0, 0), nbytes, begin, begin, end, end, True, True, True)


def alone(periods: list[InactivePeriod], length: int) -> np.ndarray:
    """Memory that holds nothing but what the periods could take away."""
    memory = np.zeros(length, dtype=np.int64)
    for each in periods:
        for at in range(each.begin, each.end):
            memory[at] += each.nbytes
    return memory


def test_the_longest_pressure_per_byte_moved_leaves_first() -> None:
    periods = [period(10, 4, 6), period(10, 1, 9)]
    chosen = migrate(
        periods, np.ones(10), alone(periods, 10), 10, channel_timelines(np.ones(10), endless()), 0
    )
    assert [migration.period for migration in chosen] == [1]


def test_nothing_moves_while_memory_fits() -> None:
    periods = [period(10, 1, 9)]
    channels = channel_timelines(np.ones(10), endless())
    assert migrate(periods, np.ones(10), alone(periods, 10), 10, channels, 0) == []


def test_a_gap_shorter_than_the_way_there_and_back_is_left() -> None:
    periods = [period(30, 1, 6)]
    channels = channel_timelines(np.ones(10), Hardware(10.0, 10.0, 20.0, 10.0))
    assert migrate(periods, np.ones(10), alone(periods, 10), 0, channels, 0) == []


def test_the_host_takes_what_the_drive_has_no_time_for_up_to_its_limit() -> None:
    periods = [period(30, 1, 9) for i in range(4)]
    channels = channel_timelines(np.ones(10), Hardware(10.0, 10.0, 20.0, 1e9))
    chosen = migrate(periods, np.ones(10), alone(periods, 10), 0, channels, 60)
    assert [migration.place for migration in chosen] == [Place.NVME, Place.HOST, Place.HOST]


def test_a_migration_takes_as_long_as_its_transfers() -> None:
    periods = [period(10, 3, 9)]
    channels = channel_timelines(np.ones(10), Hardware(10.0, 10.0, 20.0, 1.0))
    assert migrate(periods, np.ones(10), alone(periods, 10), 0, channels, 0) == [
        Migration(0, Place.NVME, 4, 8)
    ]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40), st.integers(1, 50)), max_size=30), st.data()
)
@examples(100)
def test_migrations_lie_within_their_periods_and_channels_are_never_overbooked(
    drawn: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    length = 40
    times = np.ones(length)
    periods = [period(nbytes, begin, min(begin + extent, length)) for begin, extent, nbytes in drawn]
    rate = data.draw(st.sampled_from([1.0, 10.0, 1000.0]))
    memory = alone(periods, length)
    capacity = data.draw(st.integers(0, int(memory.max(initial=0))))
    channels = channel_timelines(times, Hardware(rate, rate, 2 * rate, rate))
    chosen = migrate(periods, times, memory, capacity, channels, 100)
    assert len({migration.period for migration in chosen}) == len(chosen)
    for migration in chosen:
        gap = periods[migration.period]
        assert gap.begin <= migration.gone < migration.back <= gap.end
    for place, most in ((Place.NVME, rate * length), (Place.HOST, 100)):
        assert sum(periods[m.period].nbytes for m in chosen if m.place is place) <= most
