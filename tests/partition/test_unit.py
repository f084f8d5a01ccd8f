"""The flat buffer: where parameters lie, what each rank owns, what a released parameter is."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from infinity.core.errors import StateError
from infinity.optim.state import BLOCK_NUMEL
from infinity.partition.unit import SHARD_QUANTUM, Unit, is_placeholder, layout, placeholder
from tests.helpers.cases import examples

fast = examples(60)
shapes = st.lists(
    st.one_of(st.tuples(st.integers(1, 40), st.integers(1, 40)), st.tuples(st.integers(1, 99)), st.just(())),
    min_size=1,
    max_size=10,
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def named(shapes):
    return [(f"layers.0.p{i}", nn.Parameter(torch.randn(shape))) for i, shape in enumerate(shapes)]


@fast
@given(shapes)
def test_parameters_lie_end_to_end_aligned_and_matrices_first(shapes):
    segments = layout(named(shapes))
    assert [s.offset % BLOCK_NUMEL for s in segments] == [0] * len(segments)
    for before, after in itertools.pairwise(segments):
        assert 0 <= after.offset - before.stop < BLOCK_NUMEL
        assert (before.param.ndim < 2) <= (after.param.ndim < 2)
    assert {s.name for s in segments} == {name for name, _ in named(shapes)}


@fast
@given(shapes, dtypes, st.integers(1, 5))
def test_shards_are_equal_whole_quanta_and_cover_the_buffer(shapes, dtype, world_size):
    segments = layout(named(shapes))
    units = [Unit(0, segments, dtype, rank, world_size) for rank in range(world_size)]
    flat = torch.arange(units[0].numel)
    assert torch.equal(torch.cat([unit.shard_of(flat) for unit in units]), flat)
    for unit in units:
        assert unit.shard_numel % SHARD_QUANTUM == 0
        assert unit.numel >= max(s.stop for s in segments)
        assert unit.numel - max(s.stop for s in segments) < SHARD_QUANTUM * world_size
        assert unit.shard_nbytes * world_size == unit.nbytes


@pytest.mark.parametrize("shape", [(3, 4), (5,), (), (1,), (1, 1)])
def test_a_released_parameter_keeps_its_shape_and_has_no_values(shape):
    param = nn.Parameter(torch.randn(shape))
    param.data = placeholder(param.shape, torch.bfloat16, param.device)
    assert (param.shape, param.dtype, param.requires_grad) == (torch.Size(shape), torch.bfloat16, True)
    assert is_placeholder(param.data)
    assert torch.isnan(param).all()
    assert param.data.untyped_storage().nbytes() == 2


def test_writing_to_a_released_parameter_raises():
    param = nn.Parameter(torch.randn(3, 4))
    param.data = placeholder(param.shape, torch.bfloat16, param.device)
    for write in (lambda: param.data.copy_(torch.ones(3, 4)), lambda: param.data.add_(1), param.data.normal_):
        with pytest.raises(RuntimeError):
            write()


@pytest.mark.parametrize("write", [lambda p: p.data.zero_(), lambda p: p.data.fill_(2)])
def test_a_fill_that_torch_lets_through_is_found_at_the_next_use(write):
    unit = unit_of((4, 8))
    write(unit.segments[0].param)
    with pytest.raises(StateError, match=r"layers\.0\.p0"):
        unit.attach(torch.zeros(unit.numel, dtype=torch.bfloat16))


def unit_of(*shapes) -> Unit:
    unit = Unit(0, layout(named(shapes)), torch.bfloat16, 0, 1)
    for s in unit.segments:
        s.param.data = placeholder(s.shape, unit.dtype, s.param.device)
    return unit


def test_attached_parameters_are_views_and_detached_ones_let_go():
    unit = unit_of((4, 8), (3,))
    flat = torch.arange(unit.numel).to(torch.bfloat16)
    unit.attach(flat)
    for s in unit.segments:
        assert torch.equal(s.param.data, flat[s.offset : s.stop].view(s.shape))
        assert s.param.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    unit.detach()
    assert all(is_placeholder(s.param.data) for s in unit.segments)


@pytest.mark.parametrize("write", [torch.Tensor.zero_, lambda old: old.untyped_storage().resize_(0)])
def test_what_is_written_to_an_alias_of_a_released_parameter_is_gone_when_it_is_released_again(write):
    unit = unit_of((4, 8), (3,))
    flat = torch.zeros(unit.numel, dtype=torch.bfloat16)
    unit.attach(flat)
    unit.detach()
    old = unit.segments[0].param.data
    unit.attach(flat)
    write(old)
    unit.detach()
    assert unit.segments[0].param.data.isnan().all()
    unit.attach(flat)


def test_what_is_released_in_inference_mode_serves_training():
    unit = unit_of((4, 8))
    with torch.inference_mode():
        unit.segments[0].param.data.zero_()
        with pytest.raises(StateError):
            unit.check_data(unit.segments)
    flat = torch.zeros(unit.numel, dtype=torch.bfloat16)
    unit.attach(flat)
    unit.detach()
    assert not unit.segments[0].param.is_inference()


@pytest.mark.parametrize("shape", [(), (3,), (4, 8), (2, 0, 3), (0,), (1, 5, 1)])
def test_views_are_contiguous(shape):
    unit = unit_of((4, 8), shape)
    flat = torch.arange(2 * unit.numel).to(torch.bfloat16)[unit.numel :]
    unit.attach(flat)
    for s in unit.segments:
        whole = flat.narrow(0, s.offset, s.numel).view(s.shape)
        assert s.param.stride() == whole.stride()
        assert torch.equal(s.param.data, whole)
        assert s.param.data_ptr() == whole.data_ptr()


@pytest.mark.parametrize(
    "replace", [lambda p: p.data.float(), lambda p: torch.zeros(4, 8, dtype=torch.bfloat16)]
)
def test_data_that_was_replaced_while_released_is_refused_by_name(replace):
    unit = unit_of((4, 8))
    param = unit.segments[0].param
    param.data = replace(param)
    with pytest.raises(StateError, match=r"layers\.0\.p0: its data was replaced outside infinity"):
        unit.attach(torch.zeros(unit.numel, dtype=torch.bfloat16))


def test_names_follow_the_model():
    unit = unit_of((4, 8), (3,))
    ids = [id(s.param) for s in unit.segments]
    unit.rename({ids[0]: "h.3.attn.q", ids[1]: "h.3.attn.bias"})
    assert unit.name == "unit 0 (h.3.attn)"


@pytest.mark.parametrize(
    ("names", "short"),
    [(["a.b.c", "a.b.d"], "a.b"), (["a.b"], "a.b"), (["wte", "wpe"], "wte .. wpe"), (["a.b", "a.bc"], "a")],
)
def test_a_unit_is_named_after_its_parameters_in_short(names, short):
    params = [(name, nn.Parameter(torch.zeros(2))) for name in names]
    unit = Unit(3, layout(params), torch.float32, 0, 1)
    unit.rename({})
    assert unit.name == f"unit 3 ({short})"
