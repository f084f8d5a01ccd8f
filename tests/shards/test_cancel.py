"""A cancelled job: it ends soon, counts what it did not move, and leaves its extents to the next job."""

import random
import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.core.errors import DiskError
from infinity.optim.elementwise import ADAMW
from tests.helpers.cases import examples
from tests.helpers.fakes import FakeEngine
from tests.helpers.limits import HANG_S, comes_true
from tests.shards.test_ahead import done, expected, shards_of
from tests.shards.test_pipeline import DTYPES, Ends, playing

LAYOUT = ADAMW.layout(DTYPES[0])


def again(shard):
    """The job that follows a cancelled one: the same numbers, read anew from the committed version."""
    ends = Ends()
    job = replace(shard.job, weight=None, on_done=ends.on_done, on_computed=ends.on_computed)
    return job, ends


@examples(30)
@given(st.integers(0, 2**32), st.integers(1, 5), st.booleans(), st.booleans(), st.integers(0, 3))
def test_whenever_a_job_is_cancelled_the_next_one_writes_the_right_bits(
    seed, depth, at_hand, grad_at_hand, ahead
):
    """Also with a gradient that was wrong; bytes are those of both jobs less what the first did not move."""
    draw = random.Random(seed)
    engine = FakeEngine(threads=3)
    shards = shards_of(engine, 4, at_hand=at_hand, grad_at_hand=grad_at_hand)
    with playing(engine, LAYOUT, depth=depth + ahead) as (pipeline, pool):
        pipeline.expect([expected(shard) for shard in shards[:ahead]])
        wrong = [replace(s.job, grad=s.job.grad + 1) if grad_at_hand else s.job for s in shards]
        most = draw.randrange(40)  # of what is read and written ends before they are cancelled
        engine.hold(lambda *_: engine.ended < most)
        for job in wrong:
            pipeline.submit(job)
        assert comes_true(lambda: engine.ended >= most or done(*shards))
        for job in wrong:
            pipeline.cancel(job)
        engine.let_go()
        assert comes_true(lambda: done(*shards))
        second = [again(shard) for shard in shards]
        for job, _ in draw.sample(second, len(second)):
            pipeline.submit(job)
        pipeline.drain()
        assert pool.leased_nbytes == 0
        for shard, (_, ends), first in zip(shards, second, wrong, strict=True):
            assert (shard.ends.done, ends.done, ends.computed) == ([None], [None], 1)
            assert shard.ends.computed == (first.computed == len(first.source.version.chunks))
            shard.check(engine, LAYOUT)
        n = sum(chunk.numel for shard in shards for chunk in shard.job.source.version.chunks)
        weight = LAYOUT.weight_nbytes(1)
        state = round(LAYOUT.bytes_per_element) - weight
        gradient = 0 if grad_at_hand else weight  # of the same dtype
        planned = n * (2 * state + (1 if at_hand else 2) * weight + 2 * gradient)
        assert engine.nbytes_read == planned - sum(each.read_nbytes(each.unread) for each in wrong)
        assert engine.nbytes_written == 2 * n * (state + weight) - sum(
            each.written_nbytes(each.unwritten) for each in wrong
        )


def test_a_queued_job_moves_nothing_and_is_done_before_those_that_run():
    engine = FakeEngine()
    running, queued = shards_of(engine, 2)
    with playing(engine, LAYOUT, depth=1) as (pipeline, _):
        engine.hold()
        pipeline.submit(running.job)
        pipeline.submit(queued.job)
        ended = threading.Event()
        queued.job.on_done = lambda error: ended.set()
        pipeline.cancel(queued.job)
        assert ended.wait(HANG_S)
        assert not running.ends.done
        assert (queued.job.started, queued.job.written_nbytes(queued.job.unwritten)) == (
            0,
            queued.job.grad.numel() * 12,
        )
        assert queued.ends.computed == 0
        engine.let_go()
        pipeline.drain()
        running.check(engine, LAYOUT)
        assert engine.nbytes_written == running.job.grad.numel() * 12


def test_a_job_that_is_done_may_be_cancelled_in_vain():
    engine = FakeEngine()
    [shard] = shards_of(engine, 1)
    with playing(engine, LAYOUT) as (pipeline, _):
        pipeline.submit(shard.job)
        pipeline.drain()
        pipeline.cancel(shard.job)
        pipeline.cancel(shard.job)
        pipeline.drain()
        assert (
            shard.ends.done,
            shard.job.read_nbytes(shard.job.unread),
            shard.job.written_nbytes(shard.job.unwritten),
        ) == ([None], 0, 0)
        shard.check(engine, LAYOUT)


def test_a_write_that_fails_after_the_job_was_cancelled_is_an_error_all_the_same():
    engine = FakeEngine(fail_write=1)
    [shard] = shards_of(engine, 1)
    engine.hold(lambda action, number: action == "read")
    with playing(engine, LAYOUT, depth=1) as (pipeline, _):
        pipeline.submit(shard.job)
        assert comes_true(lambda: engine.counts["write"] > 0)
        pipeline.cancel(shard.job)
        engine.let_go()
        with pytest.raises(DiskError):
            pipeline.drain()
        assert [type(error) for error in shard.ends.done] == [DiskError]


def test_new_weights_go_where_they_shall_stay_also_when_the_old_ones_are_read():
    engine = FakeEngine()
    [shard] = shards_of(engine, 1, at_hand=False)
    shard.job.in_place = shard.job.grad.clone()
    with playing(engine, LAYOUT) as (pipeline, _):
        pipeline.submit(shard.job)
        pipeline.drain()
        shard.check(engine, LAYOUT)
    assert shard.job.in_place.equal(shard.weight)
