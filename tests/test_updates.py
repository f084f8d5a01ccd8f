"""Updates: tickets that many threads wait for, and which elements belong to whom."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from infinity.partition.unit import Unit, layout
from infinity.shards.updates import After, Ticket, spans_of

fast = settings(deadline=None, max_examples=150)


# --- tickets ------------------------------------------------------------------------------------


def test_every_call_runs_once_whenever_the_ticket_ends():
    for _ in range(200):
        ticket, ran, start = Ticket(), [], threading.Barrier(4)

        def register(number, ticket=ticket, ran=ran, start=start):
            start.wait()
            for i in range(20):
                ticket.then(lambda i=i: ran.append((number, i)))

        def finish(ticket=ticket, start=start):
            start.wait()
            ticket.finish(None)

        with ThreadPoolExecutor(4) as threads:
            jobs = [threads.submit(register, n) for n in range(3)] + [threads.submit(finish)]
            for job in jobs:
                job.result()
        assert sorted(ran) == [(n, i) for n in range(3) for i in range(20)]


def test_an_error_surfaces_at_every_wait_and_nowhere_else():
    ticket, ran = Ticket(), []
    ticket.then(lambda: ran.append(1))
    ticket.finish(OSError("disk"))
    assert ticket.done()
    assert ran == [1]
    for _ in range(2):
        with pytest.raises(OSError, match="disk"):
            ticket.wait()


def test_a_transfer_after_another_begins_only_when_the_first_has_ended():
    first, second, begun = Ticket(), Ticket(), []
    after = After(first, lambda: begun.append(1) or second)
    called = []
    after.then(lambda: called.append(1))
    assert not begun
    assert not after.done()
    first.finish(None)
    assert begun == [1]
    assert not after.done()
    assert not called
    second.finish(None)
    assert after.done()
    assert called == [1]
    after.wait()


@pytest.mark.parametrize("where", ["first", "begin", "second"])
def test_an_error_on_the_way_is_told_by_wait(where):
    first, second, begun, called = Ticket(), Ticket(), [], []

    def begin():
        begun.append(1)
        if where == "begin":
            raise OSError("begin")
        return second

    after = After(first, begin)
    after.then(lambda: called.append(1))
    first.finish(OSError("first") if where == "first" else None)
    second.finish(OSError("second"))
    assert after.done()
    assert called == [1]
    assert begun == ([] if where == "first" else [1])
    with pytest.raises(OSError, match=where):
        after.wait()


def test_waiting_for_a_transfer_that_has_not_begun_ends_with_it():
    for _ in range(200):
        first, second, start = Ticket(), Ticket(), threading.Barrier(3)
        after = After(first, lambda second=second: second)
        called = threading.Event()

        def end(ticket, start=start):
            start.wait()
            ticket.finish(None)

        with ThreadPoolExecutor(3) as threads:
            jobs = [threads.submit(end, first), threads.submit(end, second)]
            start.wait()
            after.then(called.set)
            after.wait()
            for job in jobs:
                job.result()
        assert called.wait(5)
        assert after.done()


# --- spans --------------------------------------------------------------------------------------


@st.composite
def parameters(draw):
    """Parameters with their groups (None: frozen), and a number of ranks."""
    out = []
    for i in range(draw(st.integers(1, 8))):
        shape = (draw(st.integers(1, 3000)),) if draw(st.booleans()) else (draw(st.integers(1, 60)), 50)
        param = nn.Parameter(torch.empty(shape))
        out.append((f"p{i}", param, draw(st.sampled_from([None, 0, 0, 1]))))
    return out, draw(st.sampled_from([1, 2, 3]))


@fast
@given(parameters())
def test_every_trainable_element_is_in_one_span_and_no_frozen_one(case):
    params, world_size = case
    segments = layout([(name, param) for name, param, _ in params], 2)
    group_of = {id(param): group for _, param, group in params if group is not None}
    for rank in range(world_size):
        unit = Unit(0, segments, torch.bfloat16, rank, world_size)
        spans = spans_of(unit, group_of)
        owner = [None] * unit.numel
        for segment in segments:
            for i in range(segment.offset, segment.stop):
                owner[i] = (group_of.get(id(segment.param)), "frozen")[id(segment.param) not in group_of]
        got = [None] * unit.shard_numel
        for span in spans:
            assert 0 <= span.start < span.stop <= unit.shard_numel
            for i in range(span.start, span.stop):
                assert got[i] is None, "in two spans"
                got[i] = span.group
        for mine, wanted in zip(got, owner[unit.shard_start :], strict=False):
            assert mine == wanted if isinstance(wanted, int) else wanted is None or mine is None
        assert list(spans) == sorted(spans, key=lambda s: s.start)


def test_neighbours_of_one_group_are_one_span():
    params = [(f"p{i}", nn.Parameter(torch.empty(10, 10))) for i in range(4)]
    unit = Unit(0, layout(params, 2), torch.bfloat16, 0, 1)
    assert len(spans_of(unit, {id(p): 0 for _, p in params})) == 1
    assert len(spans_of(unit, {id(p): i // 2 for i, (_, p) in enumerate(params)})) == 2
    assert len(spans_of(unit, {id(p): 0 for _, p in (params[0], params[2])})) == 2
    assert spans_of(unit, {}) == ()
