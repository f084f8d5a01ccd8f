"""States read ahead: the same bits, no byte read twice, and never in the way of jobs that have come."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.optim.elementwise import ADAMW
from infinity.partition.unit import SHARD_QUANTUM
from infinity.planner.updates import RESERVE
from infinity.shards.pipeline import ShardSource
from tests.helpers.cases import examples
from tests.helpers.fakes import FakeEngine
from tests.helpers.limits import comes_true
from tests.shards.test_pipeline import DTYPES, make_shard, playing

LAYOUT = ADAMW.layout(DTYPES[0])


def expected(shard) -> tuple[str, ShardSource]:
    """The shard's update, before it comes."""
    return shard.job.name, shard.job.source


def done(*shards) -> bool:
    return all(shard.ends.done for shard in shards)


def shards_of(engine, count: int, chunks: int = 3, **options) -> list:
    return [
        make_shard(engine, LAYOUT, [1] * chunks, [(0, chunks * SHARD_QUANTUM)], name=f"unit {i}", **options)
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
        assert comes_true(lambda: done(*shards))
        state, weight = (
            5 * 3 * nbytes(SHARD_QUANTUM) for nbytes in (LAYOUT.state_nbytes, LAYOUT.weight_nbytes)
        )
        gradient = weight  # of the same dtype
        assert engine.nbytes_read == state + (not at_hand) * weight + (not grad_at_hand) * gradient
        pipeline.drain()
        for shard in shards:
            shard.check(engine, LAYOUT)
            assert shard.ends.done == [None]


@pytest.mark.parametrize("depth", [4, 9, 20])
def test_what_is_read_ahead_leaves_as_much_room_beside_larger_buffers_for_gradients(depth):
    engine = FakeEngine()
    shards = shards_of(engine, 7, grad_at_hand=False)
    chunk_nbytes = LAYOUT.nbytes(SHARD_QUANTUM)
    with playing(engine, LAYOUT, depth=depth, grains=depth) as (pipeline, pool):
        most = depth * 12 // 14 - RESERVE  # of chunks with gradients, in the room of depth others
        pipeline.expect([expected(shard) for shard in shards])
        assert comes_true(lambda: engine.nbytes_read == most * LAYOUT.state_nbytes(SHARD_QUANTUM))
        held = [pool.try_lease(chunk_nbytes, who="another") for _ in range(RESERVE)]  # a save, say
        assert all(held)
        for lease in held:
            lease.release()
        for shard in shards:
            pipeline.submit(shard.job)
        pipeline.drain()
        for shard in shards:
            shard.check(engine, LAYOUT)


def test_a_drained_pipeline_reads_again_what_was_written_in_another_way():
    engine = FakeEngine()
    [shard] = shards_of(engine, 1)
    chunk = shard.job.source.version.chunks[0]
    good = engine.get(chunk.state)
    with playing(engine, LAYOUT, depth=9) as (pipeline, _):
        engine.put(chunk.state, bytes(len(good)))
        pipeline.expect([expected(shard)])
        assert comes_true(lambda: engine.nbytes_read == 3 * LAYOUT.state_nbytes(SHARD_QUANTUM))
        pipeline.drain()
        engine.put(chunk.state, good)
        pipeline.submit(shard.job)
        pipeline.drain()
        shard.check(engine, LAYOUT)


def test_a_job_that_has_come_gets_the_buffers_of_what_was_read_ahead_where_others_hold_the_rest():
    engine = FakeEngine()
    early, late = shards_of(engine, 2)
    nbytes = LAYOUT.nbytes(SHARD_QUANTUM)
    with playing(engine, LAYOUT, depth=9, grains=3) as (pipeline, pool):
        with pool.lease(2 * nbytes, who="somebody"):
            pipeline.expect([expected(late)])
            assert comes_true(lambda: engine.nbytes_read == LAYOUT.state_nbytes(SHARD_QUANTUM))
            pipeline.submit(early.job)
            assert comes_true(lambda: done(early))
        early.check(engine, LAYOUT)
        pipeline.submit(late.job)
        pipeline.drain()
        late.check(engine, LAYOUT)
