"""Channels against a list of free bytes that is searched from end to end."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.core.plan import Hardware, Traffic
from infinity.planner.simulator import Channel, ChannelTimeline, channel_timelines, mixed_rates
from tests.helpers.cases import examples

fast = examples(100)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.data())
@fast
def test_transfers_take_the_first_free_bytes(free: list[int], data: st.DataObject) -> None:
    channel = ChannelTimeline(np.array(free, dtype=float), 1.0)
    length = len(free)
    for _ in range(3):
        at, nbytes = data.draw(st.integers(0, length - 1)), data.draw(st.integers(1, 30))
        channel.book_from(at, nbytes)
        left = nbytes
        for position in [*range(at, length), *range(at)]:
            taken = min(left, free[position])
            free[position] -= taken
            left -= taken
        assert np.diff(channel.until()).tolist() == free


def test_traffic_without_room_at_the_end_of_a_step_goes_on_at_its_beginning() -> None:
    channel = ChannelTimeline(np.ones(4), 10.0)
    channel.book_from(3, 25)
    assert np.diff(channel.until()).tolist() == [0, 5, 10, 0]


def test_latency_delays_every_transfer() -> None:
    for latency_s, left in ((1.0, [0, 0, 10, 10]), (0.0, [0, 10, 10, 10])):
        channel = ChannelTimeline(np.ones(4), 10.0, latency_s=latency_s)
        channel.book_from(0, 10)
        assert np.diff(channel.until()).tolist() == left


def test_units_come_first_and_reads_slow_writes_down() -> None:
    hardware = Hardware(2.0, 4.0, 2.0, 1.0)
    channels = channel_timelines(np.full(3, 100.0), hardware, [Traffic(1, 100, 0)])
    assert np.diff(channels[Channel.NVME_READ].until()).tolist() == [200, 100, 200]
    # Mixed, each way moves 1 B/s; in the 100 s that 100 bytes take, writes lose 3 B/s.
    assert mixed_rates(hardware) == (1.0, 1.0)
    assert np.diff(channels[Channel.NVME_WRITE].until()).tolist() == [400, 100, 400]


@pytest.mark.parametrize("mixed", [12.0, 10.0, 6.0, 1.0])
def test_mixed_rates_share_what_the_drive_moves_in_all(mixed: float) -> None:
    read, write = mixed_rates(Hardware(4.0, 6.0, mixed, 1.0))
    assert read + write == pytest.approx(min(mixed, 10.0))
    assert 0 < read <= 4
    assert 0 < write <= 6
