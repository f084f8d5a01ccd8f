"""States read ahead: the same bits, no byte read twice, and never in the way of jobs that have come."""

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.core.transfer import Transfer
from infinity.optim.layout import GRAIN_NUMEL
from infinity.optim.pipeline import RESERVE, Expected, StateLayout
from tests.helpers.cases import examples
from tests.helpers.fakes import FakeEngine
from tests.helpers.limits import HANG_S
from tests.optim.test_pipeline import DTYPES, make_shard, playing

LAYOUT = StateLayout.of(DTYPES[0])


def expected(shard, after=None) -> Expected:
    return Expected(shard.job.name, lambda: shard.job.chunks, after)


def wait_for(condition) -> None:
    until = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.001)


def shards_of(engine, count: int, chunks: int = 3, **options) -> list:
    return [
        make_shard(engine, LAYOUT, [1] * chunks, [(0, chunks * GRAIN_NUMEL)], name=f"unit {i}", **options)
        for i in range(count)
    ]


@examples(30)
@given(
    st.permutations(range(5)), st.lists(st.integers(0, 4), unique=True), st.integers(1, 9), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_jobs_in_any_order_come_out_the_same_and_read_no_byte_twice(
    order, foreseen, depth, at_hand, grad_at_hand
):
    engine = FakeEngine()
    shards = shards_of(engine, 5, at_hand=at_hand, grad_at_hand=grad_at_hand)
    with playing(engine, LAYOUT, depth=depth) as (pipeline, _):
        pipeline.expect([expected(shards[i]) for i in foreseen])
        for i in order:
            pipeline.submit(shards[i].job)
        wait_for(lambda: not pipeline._unfinished)
        state, weight = (
            5 * 3 * nbytes(GRAIN_NUMEL) for nbytes in (LAYOUT.state_nbytes, LAYOUT.weight_nbytes)
        )
        gradient = weight  # of the same dtype
        assert pipeline.stats.nbytes_read == state + (not at_hand) * weight + (not grad_at_hand) * gradient
        pipeline.drain()
        for shard in shards:
            shard.check(engine, LAYOUT)
            assert shard.ends.done == [None]


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 9])
def test_what_is_read_ahead_leaves_buffers_for_jobs_that_come_in_another_order(depth):
    engine = FakeEngine()
    shards = shards_of(engine, 4)
    with playing(engine, LAYOUT, depth=depth) as (pipeline, pool):
        pipeline.expect([expected(shard) for shard in shards[:-1]])
        ahead = min(9, max(0, depth - RESERVE))
        wait_for(lambda: pipeline.stats.nbytes_read == ahead * LAYOUT.state_nbytes(GRAIN_NUMEL))
        pipeline.submit(shards[-1].job)  # nobody expected it
        wait_for(lambda: not pipeline._unfinished)
        shards[-1].check(engine, LAYOUT)
        assert pool.leased_nbytes >= ahead * LAYOUT.state_nbytes(GRAIN_NUMEL)
        pipeline.drain()
        assert pool.leased_nbytes == 0


@pytest.mark.parametrize("depth", [4, 9, 20])
def test_what_is_read_ahead_leaves_as_much_room_beside_larger_buffers_for_gradients(depth):
    engine = FakeEngine()
    shards = shards_of(engine, 7, grad_at_hand=False)
    chunk_nbytes = LAYOUT.weight_nbytes(GRAIN_NUMEL) + LAYOUT.state_nbytes(GRAIN_NUMEL)
    with playing(engine, LAYOUT, depth=depth, grains=depth) as (pipeline, pool):
        pipeline.expect([expected(shard) for shard in shards])
        wait_for(lambda: pipeline.stats.nbytes_read >= LAYOUT.state_nbytes(GRAIN_NUMEL))
        time.sleep(0.05)
        held = [pool.try_lease(chunk_nbytes, who="another") for _ in range(RESERVE)]  # a save, say
        assert all(held)
        for lease in held:
            lease.release()
        for shard in shards:
            pipeline.submit(shard.job)
        pipeline.drain()
        for shard in shards:
            shard.check(engine, LAYOUT)


def test_nothing_is_read_before_the_update_that_writes_it_has_landed():
    engine = FakeEngine()
    [shard] = shards_of(engine, 1)
    earlier = Transfer()
    with playing(engine, LAYOUT, depth=5) as (pipeline, _):
        pipeline.expect([expected(shard, earlier)])
        time.sleep(0.05)
        assert pipeline.stats.nbytes_read == 0
        pipeline.submit(shard.job)
        pipeline.drain()
        shard.check(engine, LAYOUT)


def test_what_was_read_from_another_place_is_not_used():
    engine = FakeEngine()
    [shard] = shards_of(engine, 1)
    wrong = tuple(
        replace(chunk, state_read=engine.extent(chunk.state_read.nbytes, 0)) for chunk in shard.job.chunks
    )
    for chunk in wrong:
        engine.put(chunk.state_read, b"\x7f" * chunk.state_read.nbytes)
    with playing(engine, LAYOUT, depth=9) as (pipeline, _):
        pipeline.expect([Expected(shard.job.name, lambda: wrong)])
        wait_for(lambda: pipeline.stats.nbytes_read == 3 * LAYOUT.state_nbytes(GRAIN_NUMEL))
        pipeline.submit(shard.job)
        pipeline.drain()
        shard.check(engine, LAYOUT)


def test_a_drained_pipeline_reads_again_what_was_written_in_another_way():
    engine = FakeEngine()
    [shard] = shards_of(engine, 1)
    chunk = shard.job.chunks[0]
    good = engine.get(chunk.state_read)
    with playing(engine, LAYOUT, depth=9) as (pipeline, _):
        engine.put(chunk.state_read, bytes(len(good)))
        pipeline.expect([expected(shard)])
        wait_for(lambda: pipeline.stats.nbytes_read == 3 * LAYOUT.state_nbytes(GRAIN_NUMEL))
        pipeline.drain()
        engine.put(chunk.state_read, good)
        pipeline.submit(shard.job)
        pipeline.drain()
        shard.check(engine, LAYOUT)


def test_a_job_that_has_come_gets_the_buffers_of_what_was_read_ahead_where_others_hold_the_rest():
    engine = FakeEngine()
    early, late = shards_of(engine, 2)
    nbytes = LAYOUT.state_nbytes(GRAIN_NUMEL) + LAYOUT.weight_nbytes(GRAIN_NUMEL)
    with playing(engine, LAYOUT, depth=9, grains=3) as (pipeline, pool):
        with pool.lease(2 * nbytes, who="somebody"):
            pipeline.expect([expected(late)])
            wait_for(lambda: pipeline.stats.nbytes_read == LAYOUT.state_nbytes(GRAIN_NUMEL))
            pipeline.submit(early.job)
            wait_for(lambda: not pipeline._unfinished)
        early.check(engine, LAYOUT)
        pipeline.submit(late.job)
        pipeline.drain()
        late.check(engine, LAYOUT)
