"""The pipeline: the same bits as one whole update, overlapped, and one error ends all."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from infinity.core.errors import BudgetError, DiskError, StateError
from infinity.optim.elementwise import ADAMW
from infinity.optim.rules import HostRule
from infinity.optim.state import StateLayout
from infinity.partition.unit import SHARD_QUANTUM
from infinity.shards.journal import NOWHERE, ChunkExtents, Version
from infinity.shards.pipeline import Run, ShardSource, UpdateJob, UpdatePipeline
from tests.helpers.cases import examples
from tests.helpers.fakes import FakeEngine, FakePool
from tests.helpers.limits import comes_true

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HYPERS = [
    ADAMW.hyper({**ADAMW.idle, "lr": 1e-2, "weight_decay": 0.1}, step=3),
    ADAMW.hyper({**ADAMW.idle, "lr": 1e-3}, step=3),
]


class Ends:
    """What a job's callbacks said."""

    def __init__(self) -> None:
        self.computed = 0
        self.done: list[BaseException | None] = []

    def on_computed(self) -> None:
        self.computed += 1

    def on_done(self, error: BaseException | None) -> None:
        self.done.append(error)


@dataclass
class Shard:
    """A shard on a fake disk, and what it must be after the update."""

    job: UpdateJob
    ends: Ends
    weight: Tensor
    state: list[Tensor]

    def check(self, engine: FakeEngine, layout: StateLayout) -> None:
        for chunk in self.job.writes.chunks:
            part = slice(chunk.start, chunk.start + chunk.numel)
            assert engine.get(chunk.weight) == raw(self.weight[part])
            content = torch.frombuffer(bytearray(engine.get(chunk.state)), dtype=torch.uint8)
            for got, wanted in zip(layout.views(content, chunk.numel), self.state, strict=True):
                assert raw(got) == raw(wanted[part])


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def random_field(numel: int, dtype: torch.dtype) -> Tensor:
    if dtype == torch.int16:
        return torch.randint(-(2**15), 2**15, (numel,), dtype=torch.int16)
    return torch.rand(numel)


def make_shard(
    engine: FakeEngine, layout: StateLayout, grains: list[int], runs: list[tuple[int, int]], *,
    name: str = "unit", priority: int = 0, at_hand: bool = True, grad_at_hand: bool = True, file: int = 0,
    grad_dtype: torch.dtype | None = None,
) -> Shard:  # fmt: skip
    """A shard in chunks of ``grains`` times 2048 elements, on disk, with its expected update."""
    numel = sum(grains) * SHARD_QUANTUM
    weight, grad = torch.randn(numel).to(layout.dtype), torch.randn(numel).to(grad_dtype or layout.dtype)
    state = [random_field(numel, field.dtype) for field in layout.fields]
    reads, writes, start = [], [], 0
    for count in (grain * SHARD_QUANTUM for grain in grains):
        for chunks in (reads, writes):
            sizes = layout.weight_nbytes(count), layout.state_nbytes(count)
            chunks.append(ChunkExtents(start, count, *(engine.extent(size, file) for size in sizes)))
        part = slice(start, start + count)
        engine.put(reads[-1].weight, raw(weight[part]))
        engine.put(reads[-1].state, b"".join(raw(field[part]) for field in state))
        start += count
    gradient = NOWHERE if grad_at_hand else engine.extent(numel * grad.itemsize, file)
    if gradient.pieces:
        engine.put(gradient, raw(grad))
    ends = Ends()
    job_runs = tuple(Run(a, b, HYPERS[i % 2], ADAMW) for i, (a, b) in enumerate(runs))
    job = UpdateJob(
        name=name, weight=weight.clone() if at_hand else None, grad=grad if grad_at_hand else None,
        source=ShardSource(Version(tuple(reads)), gradient, grad.dtype), writes=Version(tuple(writes)),
        runs=job_runs, priority=priority, on_done=ends.on_done, on_computed=ends.on_computed,
    )  # fmt: skip
    for run in job_runs:
        part = slice(run.start, run.stop)
        ADAMW.update_by_torch(
            weight[part], grad[part], tuple(f[part] for f in state), weight[part], run.hyper
        )
    return Shard(job, ends, weight, state)


@contextmanager
def playing(
    engine: FakeEngine, layout: StateLayout, *, grains: int = 64, depth: int = 3
) -> Iterator[tuple[UpdatePipeline, FakePool]]:
    """A pipeline whose pool holds ``grains`` times 2048 elements."""
    pool = FakePool(layout.nbytes(SHARD_QUANTUM) * grains)
    rule = HostRule(ADAMW, layout.dtype)
    pipeline = UpdatePipeline(engine, pool, layout, rule, depth=depth)
    try:
        yield pipeline, pool
    finally:
        pipeline.close()
        engine.close()
        assert pool.leased_nbytes == 0, "a lease leaked"


@st.composite
def shapes(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]]]:
    grains = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    numel = sum(grains) * SHARD_QUANTUM
    cuts = sorted(draw(st.lists(st.integers(0, numel), max_size=6, unique=True)))
    return grains, list(zip(cuts[::2], cuts[1::2], strict=False))


@examples(25)
@given(
    dtype=st.sampled_from(DTYPES),
    jobs=st.lists(
        st.tuples(shapes(), st.integers(0, 3), st.booleans(), st.booleans(), st.booleans()),
        min_size=1, max_size=4,
    ),
    depth=st.integers(1, 4),
    room=st.integers(4, 12),
)  # fmt: skip
def test_any_chunks_runs_priorities_and_depth_give_the_bits_of_one_whole_update(dtype, jobs, depth, room):
    """Weights and gradients at hand or on disk, gradients of the compute dtype or fp32."""
    layout, engine = ADAMW.layout(dtype), FakeEngine(threads=3)
    shards = [
        make_shard(
            engine, layout, grains, runs, priority=priority, at_hand=at_hand, grad_at_hand=grad_at_hand,
            grad_dtype=torch.float32 if reduced else None,
        )
        for (grains, runs), priority, at_hand, grad_at_hand, reduced in jobs
    ]  # fmt: skip
    with playing(engine, layout, grains=room, depth=depth) as (pipeline, pool):
        for shard in shards:
            pipeline.submit(shard.job)
        pipeline.drain()
        assert pool.leased_nbytes == 0
    for shard in shards:
        assert shard.ends.done == [None]
        assert shard.ends.computed == 1
        shard.check(engine, layout)


def test_elements_outside_runs_keep_their_weights_and_state():
    layout, engine = ADAMW.layout(torch.bfloat16), FakeEngine()
    shard = make_shard(engine, layout, [1, 1], [(100, 200), (3000, 3001)])
    before = engine.get(shard.job.source.version.chunks[0].state)
    with playing(engine, layout) as (pipeline, _):
        pipeline.submit(shard.job)
        pipeline.drain()
    after = layout.views(
        torch.frombuffer(bytearray(engine.get(shard.job.writes.chunks[0].state)), dtype=torch.uint8),
        SHARD_QUANTUM,
    )
    old = layout.views(torch.frombuffer(bytearray(before), dtype=torch.uint8), SHARD_QUANTUM)
    for new_field, old_field in zip(after, old, strict=True):
        assert raw(new_field[:100]) == raw(old_field[:100])
        assert raw(new_field[200:]) == raw(old_field[200:])
        assert raw(new_field[100:200]) != raw(old_field[100:200])
    shard.check(engine, layout)


@pytest.mark.parametrize("at_hand", [True, False])
@pytest.mark.parametrize("grad_at_hand", [True, False])
def test_bytes_moved_are_those_of_the_layout(at_hand, grad_at_hand):
    layout, engine = ADAMW.layout(torch.bfloat16), FakeEngine()
    shard = make_shard(
        engine, layout, [2, 1], [(0, 6000)], at_hand=at_hand, grad_at_hand=grad_at_hand,
        grad_dtype=torch.float32,
    )  # fmt: skip
    with playing(engine, layout) as (pipeline, _):
        pipeline.submit(shard.job)
        pipeline.drain()
    numel = 3 * SHARD_QUANTUM
    itemsize = 10 + (0 if at_hand else 2) + (0 if grad_at_hand else 4)
    assert engine.nbytes_read == numel * itemsize
    assert engine.nbytes_written == numel * 12


def test_a_chunk_is_read_while_one_is_updated_and_the_one_before_is_written():
    """Read i + 2 and write i end when both have begun: one after the other would not end."""
    layout, chunks = ADAMW.layout(torch.float32), 12
    engine = FakeEngine()
    shard = make_shard(engine, layout, [1] * chunks, [(0, 2048)])

    def both_have_begun(action: str, number: int) -> bool:
        if action == "read":
            return engine.counts["write"] >= 2 * (number - 2)  # weights and states are two writes
        return engine.counts["read"] >= min((number + 1) // 2 + 2, chunks)

    engine.hold(both_have_begun)
    with playing(engine, layout, depth=3) as (pipeline, _):
        pipeline.submit(shard.job)
        pipeline.drain()
    assert engine.peak_in_flight >= 3
    shard.check(engine, layout)


def test_a_more_urgent_job_goes_before_chunks_that_have_not_started():
    layout, engine = ADAMW.layout(torch.float32), FakeEngine()
    slow = make_shard(engine, layout, [1] * 8, [(0, 100)], name="slow", priority=9, file=1)
    urgent = make_shard(engine, layout, [1], [(0, 100)], name="urgent", priority=1, file=2)
    with playing(engine, layout, depth=2) as (pipeline, _):
        engine.hold()
        pipeline.submit(slow.job)
        engine.wait_for(in_flight=2)
        pipeline.submit(urgent.job)
        engine.let_go()
        pipeline.drain()
    reads = [file for action, file, _ in engine.log if action == "read"]
    assert reads == [1, 1, 2, *[1] * 6]


def test_weight_and_grad_are_free_while_the_last_writes_are_in_flight():
    layout, engine = ADAMW.layout(torch.float32), FakeEngine()
    shard = make_shard(engine, layout, [1], [(0, 100)])
    in_flight_when_computed = []

    def computed() -> None:
        in_flight_when_computed.append((engine.in_flight, list(shard.ends.done)))
        engine.let_go()

    shard.job.on_computed = computed
    engine.hold(lambda action, number: action == "read")
    with playing(engine, layout) as (pipeline, _):
        pipeline.submit(shard.job)
        pipeline.drain()
    assert in_flight_when_computed == [(2, [])]


def test_a_job_without_chunks_is_done_at_once():
    layout, engine = ADAMW.layout(torch.float32), FakeEngine()
    ends = Ends()
    with playing(engine, layout) as (pipeline, _):
        none = Version(())
        pipeline.submit(
            UpdateJob(
                name="empty", weight=None, grad=torch.empty(0), source=ShardSource(none), writes=none,
                runs=(), on_done=ends.on_done, on_computed=ends.on_computed,
            )
        )  # fmt: skip
        pipeline.drain()
    assert (ends.computed, ends.done) == (1, [None])


@pytest.mark.parametrize("fault", [{"fail_write": 1}, {"fail_write": 7}, {"fail_read": 1}, {"fail_read": 5}])
def test_a_disk_error_fails_its_job_and_all_later_ones_and_gives_back_every_buffer(fault):
    layout, engine = ADAMW.layout(torch.bfloat16), FakeEngine(**fault)
    shards = [make_shard(engine, layout, [1, 1, 1], [(0, 5000)], priority=i) for i in range(3)]
    with playing(engine, layout) as (pipeline, pool):
        for shard in shards:
            with_error = submit_or_error(pipeline, shard.job)
        with pytest.raises(DiskError, match="offset"):
            pipeline.drain()
        assert pool.leased_nbytes == 0
        with pytest.raises(DiskError):
            pipeline.submit(shards[0].job)
    told = [shard.ends.done for shard in shards if shard.ends.done]
    assert all(len(done) == 1 for done in told)
    assert isinstance(told[-1][0], DiskError)
    if with_error is None:
        assert isinstance(shards[-1].ends.done[0], DiskError)


def submit_or_error(pipeline: UpdatePipeline, job: UpdateJob) -> BaseException | None:
    try:
        pipeline.submit(job)
    except DiskError as error:
        return error
    return None


@pytest.mark.parametrize("where", ["on_computed", "on_done", "rule"])
def test_an_error_of_ours_ends_the_pipeline_loudly(where, monkeypatch):
    def broken(*args: object) -> None:
        raise RuntimeError("broken")

    layout, engine = ADAMW.layout(torch.float32), FakeEngine()
    first, second = (make_shard(engine, layout, [1], [(0, 100)], priority=i) for i in range(2))
    if where == "rule":
        monkeypatch.setattr(HostRule, "update", broken)
    else:
        setattr(first.job, where, broken)
    with playing(engine, layout, depth=1) as (pipeline, _):
        pipeline.submit(first.job)
        with pytest.raises(RuntimeError, match="broken"):
            pipeline.drain()
        with pytest.raises(RuntimeError, match="broken"):
            pipeline.submit(second.job)
    assert second.ends.done == []
    assert where == "on_done" or isinstance(first.ends.done[0], RuntimeError)


def test_a_callback_that_raises_when_told_of_an_error_hides_neither_error_nor_job():
    layout, engine = ADAMW.layout(torch.float32), FakeEngine(fail_read=1)
    first, second = (make_shard(engine, layout, [1], [(0, 100)], priority=i) for i in range(2))
    first.job.on_done = lambda error: 1 // 0
    with playing(engine, layout) as (pipeline, _):
        engine.hold()
        pipeline.submit(first.job)
        pipeline.submit(second.job)
        engine.let_go()
        with pytest.raises(DiskError) as caught:
            pipeline.drain()
    assert "ZeroDivisionError" in caught.value.__notes__[0]
    assert isinstance(second.ends.done[0], DiskError)


def test_a_chunk_that_can_never_fit_the_pool_is_a_budget_error():
    layout, engine = ADAMW.layout(torch.float32), FakeEngine()
    shard = make_shard(engine, layout, [4], [(0, 100)])
    with playing(engine, layout, grains=2) as (pipeline, _):
        pipeline.submit(shard.job)
        with pytest.raises(BudgetError, match=r"memory\.host"):
            pipeline.drain()


def test_it_waits_for_buffers_that_others_hold():
    layout, engine = ADAMW.layout(torch.float32), FakeEngine()
    shard = make_shard(engine, layout, [1, 1], [(0, 4096)])
    with playing(engine, layout, grains=1) as (pipeline, pool):
        other = pool.lease(pool.capacity_nbytes, who="prefetch")
        pipeline.submit(shard.job)
        assert comes_true(lambda: pool.refused > 0)
        assert not shard.ends.done
        other.release()
        pipeline.drain()
    shard.check(engine, layout)


def test_a_closed_pipeline_takes_no_jobs_and_has_finished_those_it_took():
    layout, engine = ADAMW.layout(torch.float32), FakeEngine()
    shard = make_shard(engine, layout, [1, 1], [(0, 4096)])
    with playing(engine, layout) as (pipeline, _):
        engine.hold()
        pipeline.submit(shard.job)
        threading.Timer(0.05, engine.let_go).start()
        pipeline.close()
        assert shard.ends.done == [None]
        with pytest.raises(StateError, match="closed"):
            pipeline.submit(shard.job)


def test_an_idle_pipeline_sleeps():
    layout, engine = ADAMW.layout(torch.float32), FakeEngine()
    with playing(engine, layout):
        [thread] = [each for each in threading.enumerate() if each.name == "infinity-update"]
        clock = time.pthread_getcpuclockid(thread.ident)
        before = time.clock_gettime(clock)
        time.sleep(0.3)
        assert time.clock_gettime(clock) - before < 0.1


def test_gradients_on_disk_take_no_memory_beside_the_buffers_of_their_chunks():
    layout, engine = ADAMW.layout(torch.bfloat16), FakeEngine()
    shard = make_shard(engine, layout, [1] * 40, [(0, 40 * SHARD_QUANTUM)], at_hand=False, grad_at_hand=False)
    with playing(engine, layout, grains=3, depth=3) as (pipeline, pool):
        pipeline.submit(shard.job)
        pipeline.drain()
        assert pool.peak_nbytes == 2 * SHARD_QUANTUM * 14  # in room for three chunks of 12 bytes per element
    shard.check(engine, layout)
