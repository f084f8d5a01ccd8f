"""A machine's shape on the wall's clock: work lasts as long as its bytes take; who waits for it sleeps."""

import time

import pytest
import torch

harness = pytest.importorskip("tests.accelerator.harness")

from tests.accelerator.process import simulated  # noqa: E402


@simulated
def test_copies_last_as_long_as_their_bytes_take_and_both_directions_go_on_at_once() -> None:
    from tests.accelerator import pace
    from tests.accelerator.device import simulator

    paced, there = pace.Pace(), torch.device("sim", 0)
    pace.install(paced)
    try:
        values = torch.arange(2**16, dtype=torch.uint8).pin_memory(there)
        kept = values.to(there)
        torch.accelerator.synchronize()
        paced.clear()
        paced.rates = {pace.UP: 2**18, pace.DOWN: 2**18}  # a quarter of a second each
        began_s = time.perf_counter()
        up, down = (torch.Stream(there) for _ in range(2))
        back = torch.empty(2**16, dtype=torch.uint8).pin_memory(there)
        with up:
            copied = values.to(there, non_blocking=True)
        with down:
            back.copy_(kept, non_blocking=True)
            event = down.record_event()
        [[(up_s, _)], [(down_s, ended_s)]] = paced.busy[pace.UP], paced.busy[pace.DOWN]
        assert down_s - up_s < 0.25  # or this thread was held up for as long
        if time.perf_counter() < ended_s:
            event.synchronize()
        assert time.perf_counter() - began_s >= 0.25
        assert event.query()
        assert torch.equal(back, values)
        assert torch.equal(copied.cpu(), values)
        assert paced.done == {pace.UP: 2**16, pace.DOWN: 2**17}
    finally:
        simulator.pace = None


def test_a_resource_does_what_waits_for_less_in_the_gaps_of_what_waits_for_more() -> None:
    from tests.accelerator.pace import UP, Pace

    paced = Pace({UP: 1.0})
    assert paced.take(UP, 2, 10.0) == 12.0
    assert paced.take(UP, 3, 1.0) == 4.0
    assert paced.take(UP, 7, 1.0) == 19.0
    assert paced.take(UP, 6, 1.0) == 10.0
    assert paced.busy[UP] == [(1.0, 4.0), (4.0, 10.0), (10.0, 12.0), (12.0, 19.0)]
