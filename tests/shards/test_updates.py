"""Which elements of a shard belong to which parameter group."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from infinity.partition.unit import Unit, layout
from infinity.shards.updates import spans_of

fast = settings(deadline=None, max_examples=150)


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
