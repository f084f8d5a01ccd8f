"""A unit's flat gradient: collected as p.grad would be, zeros where nothing came."""

import math

import pytest
import torch
from torch import nn

from infinity.core.errors import StateError
from infinity.engine.accumulation import ReleasedGradient
from infinity.engine.gradients import Gradient
from infinity.partition.unit import Unit, layout, placeholder
from tests.helpers.fakes import FakePool


@pytest.fixture
def unit() -> Unit:
    params = [(f"p{i}", nn.Parameter(torch.empty(shape))) for i, shape in enumerate([(5, 7), (3, 3), (9,)])]
    return Unit(0, layout(params), torch.bfloat16, 0, 1)


@pytest.fixture
def gradient(unit):
    return Gradient.of(unit, FakePool(2**20))


def test_a_gradient_leases_a_flat_buffer(unit):
    pool = FakePool(2**20)
    gradient = Gradient.of(unit, pool)
    assert pool.leased_nbytes == unit.nbytes
    assert gradient.flat.shape == (unit.numel,)
    gradient.lease.release()
    assert pool.leased_nbytes == 0


def test_micro_batches_add_up_in_the_compute_dtype_and_in_order(unit, gradient):
    plain = {}
    for _ in range(5):
        for s in unit.segments:
            grad = torch.randn(s.shape).bfloat16()
            plain[s.name] = plain[s.name] + grad if s.name in plain else grad
            gradient.add(s, grad)
    gradient.seal(unit.segments)
    flat = gradient.flat
    for s in unit.segments:
        assert torch.equal(flat[s.offset : s.stop].view(s.shape), plain[s.name])


@pytest.mark.parametrize("missing", [(), (0,), (1,), (2,), (0, 1, 2)])
def test_what_no_gradient_reached_is_zero(unit, gradient, missing):
    for i, s in enumerate(unit.segments):
        if i not in missing:
            gradient.add(s, torch.ones(s.shape))
    gradient.seal(unit.segments)
    flat = gradient.flat
    expected = torch.zeros(unit.numel)
    for i, s in enumerate(unit.segments):
        if i not in missing:
            expected[s.offset : s.stop] = 1
    assert torch.equal(flat.float(), expected)


def test_a_parameter_without_elements_is_not_taken_for_its_neighbour():
    shapes = [(0, 7), (5, 7), (3, 0), (4, 3), (0,), (9,)]
    params = [(f"p{i}", nn.Parameter(torch.empty(shape))) for i, shape in enumerate(shapes)]
    unit = Unit(0, layout(params), torch.bfloat16, 0, 1)
    gradient, plain = Gradient.of(unit, FakePool(2**20)), {}
    for turn in range(2):
        for s in unit.segments if turn else reversed(unit.segments):
            grad = torch.randn(s.shape).bfloat16()
            plain[s.name] = plain[s.name] + grad if s.name in plain else grad
            gradient.add(s, grad)
    gradient.seal(unit.segments)
    flat = gradient.flat
    for s in unit.segments:
        assert torch.equal(flat[s.offset : s.stop].view(s.shape), plain[s.name])


def test_a_transposed_gradient_lands_in_the_parameters_order(unit, gradient):
    grad = torch.arange(35.0).view(7, 5).t()
    gradient.add(unit.segments[0], grad)
    gradient.seal(unit.segments)
    assert torch.equal(gradient.flat[:35].view(5, 7).float(), grad)


def test_a_sparse_gradient_is_refused(unit, gradient):
    with pytest.raises(StateError, match="p0 got a sparse gradient"):
        gradient.add(unit.segments[0], torch.ones(5, 7).to_sparse())


def test_a_released_gradient_has_a_shape_and_refuses_to_be_read():
    grad = placeholder(torch.Size((2, 3)), torch.float32, torch.device("cpu")).as_subclass(ReleasedGradient)
    assert (grad.shape, grad.dtype, grad.numel(), grad.dim()) == ((2, 3), torch.float32, 6, 2)
    assert "ReleasedGradient" in repr(grad)
    reads = (lambda: grad.norm(), lambda: grad.mul_(2), lambda: grad + 1, lambda: torch.isnan(grad), grad.sum)
    for read in reads:
        with pytest.raises(StateError, match="kept in its unit"):
            read()
    with pytest.raises(StateError):
        nn.utils.clip_grad_norm_([param_with(grad)], 1.0)


def param_with(grad) -> nn.Parameter:
    param = nn.Parameter(torch.full((2, 3), math.pi))
    param.grad = grad
    return param
