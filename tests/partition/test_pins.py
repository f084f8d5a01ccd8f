"""A backward pass lets go what nobody in it reads any more, and sooner where room is short."""

import pytest

from infinity.partition.prefetcher import BackwardPins, Prefetcher


class Room:
    """A mover that moves nothing."""

    def start(self, unit: int) -> None: ...
    def finish(self, unit: int) -> None: ...
    def release(self, unit: int) -> None: ...


@pytest.fixture
def prefetcher() -> Prefetcher:
    """Room for three units of one byte."""
    return Prefetcher(Room(), dict.fromkeys(range(10), 1), 3)


@pytest.fixture
def pins(prefetcher: Prefetcher) -> BackwardPins:
    return BackwardPins(prefetcher)


def pinned(prefetcher: Prefetcher) -> list[int]:
    return [unit for unit, count in prefetcher.residents.pins.items() if count]


def test_a_unit_is_kept_until_its_gradients_are_complete(prefetcher: Prefetcher, pins: BackwardPins) -> None:
    for node in ("matmul", "add"):
        pins.keep(4, node)
    assert prefetcher.residents.pins[4] == 1
    pins.unpin(4)
    assert pinned(prefetcher) == []


def test_where_room_is_short_the_earliest_that_no_node_reads_goes(
    prefetcher: Prefetcher, pins: BackwardPins
) -> None:
    for unit in (1, 2, 3):
        pins.keep(unit, f"node {unit}")
    pins.keep(4, "node 4")
    assert pinned(prefetcher) == [2, 3, 4]


def test_what_a_recomputed_forward_or_the_same_node_reads_does_not_go(
    prefetcher: Prefetcher, pins: BackwardPins
) -> None:
    pins.keep(1, "checkpoint", to_the_end=True)
    pins.keep(1, "an operator of its backward")
    pins.keep(2, "matmul")
    pins.keep(3, "another")
    pins.keep(4, "matmul")
    assert pinned(prefetcher) == [1, 2, 4]
    assert pins.recomputed(1)
    assert not pins.recomputed(2)
    assert not pins.recomputed(9)


def test_frozen_units_go_when_another_operator_reads_one(prefetcher: Prefetcher, pins: BackwardPins) -> None:
    pins.keep_for(1, "addmm")
    pins.keep_for(2, "addmm")
    pins.keep_for(1, "addmm")
    assert pinned(prefetcher) == [1, 2]
    pins.keep_for(3, "mm")
    assert pinned(prefetcher) == [3]


def test_nothing_is_left_when_backward_ends(prefetcher: Prefetcher, pins: BackwardPins) -> None:
    pins.keep(1, "checkpoint", to_the_end=True)
    pins.keep(2, "matmul")
    pins.keep_for(3, "addmm")
    pins.forget(2)  # the update has taken it
    pins.drop()
    assert pinned(prefetcher) == [2]


def test_what_an_earlier_operator_read_makes_room_for_a_recomputed_forward(
    prefetcher: Prefetcher, pins: BackwardPins
) -> None:
    pins.keep_for(1, "head")
    pins.keep(2, "checkpoint", to_the_end=True)
    assert pinned(prefetcher) == [2]
    pins.keep(3, "norm")
    pins.keep(3, "checkpoint", to_the_end=True)
    assert pins.recomputed(3)


def test_frozen_units_and_those_with_gradients_share_the_room(
    prefetcher: Prefetcher, pins: BackwardPins
) -> None:
    for unit in (1, 2, 3):
        pins.keep(unit, f"node {unit}")
    pins.keep_for(4, "addmm")
    assert pinned(prefetcher) == [2, 3, 4]
    pins.keep(5, "addmm")
    assert pinned(prefetcher) == [3, 4, 5]
    pins.keep(6, "mm")  # what addmm read goes first
    assert pinned(prefetcher) == [3, 5, 6]
