"""Which elements of a shard are updated with which numbers."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from infinity.partition.unit import Unit, layout
from infinity.shards.pipeline import runs_of
from tests.helpers.cases import examples

fast = examples(150)
HYPERS = [(torch.zeros(8), None), (torch.ones(8), None)]


@st.composite
def parameters(draw):
    """Parameters with their numbers (None: frozen, or without a gradient), and a number of ranks."""
    out = []
    for i in range(draw(st.integers(1, 8))):
        shape = (draw(st.integers(0, 3000)),) if draw(st.booleans()) else (draw(st.integers(0, 60)), 50)
        param = nn.Parameter(torch.empty(shape))
        out.append((f"p{i}", param, draw(st.sampled_from([None, 0, 0, 1]))))
    return out, draw(st.sampled_from([1, 2, 3]))


@fast
@given(parameters())
def test_every_element_with_numbers_is_in_one_run_and_no_other(case):
    params, world_size = case
    segments = layout([(name, param) for name, param, _ in params])
    chosen = {id(param): number for _, param, number in params}
    hyper_of = {s.index: HYPERS[n] for s in segments if (n := chosen[id(s.param)]) is not None}
    for rank in range(world_size):
        unit = Unit(0, segments, torch.bfloat16, rank, world_size)
        runs = runs_of(unit, hyper_of)
        owner = [None] * unit.numel
        for segment in segments:
            for i in range(segment.offset, segment.stop):
                number = chosen[id(segment.param)]
                owner[i] = "left alone" if number is None else number
        got = [None] * unit.shard_numel
        for run in runs:
            assert 0 <= run.start < run.stop <= unit.shard_numel
            for i in range(run.start, run.stop):
                assert got[i] is None, "in two runs"
                got[i] = 0 if run.hyper is HYPERS[0][0] else 1
        for mine, wanted in zip(got, owner[unit.shard_start :], strict=False):
            assert mine == wanted if isinstance(wanted, int) else wanted is None or mine is None
        assert list(runs) == sorted(runs, key=lambda run: run.start)


def test_neighbours_with_the_same_numbers_are_one_run():
    params = [(f"p{i}", nn.Parameter(torch.empty(10, 10))) for i in range(4)]
    unit = Unit(0, layout(params), torch.bfloat16, 0, 1)
    assert len(runs_of(unit, dict.fromkeys(range(4), HYPERS[0]))) == 1
    assert len(runs_of(unit, {i: HYPERS[i // 2] for i in range(4)})) == 2
    assert len(runs_of(unit, dict.fromkeys((0, 2), HYPERS[0]))) == 2
    assert runs_of(unit, {}) == ()
