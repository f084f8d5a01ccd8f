"""Sums of squares are exact to float64 and do not depend on threads."""

import math

import pytest
import torch

from infinity.optim.rules import ROW_NUMEL, clip_coefficient, norm_on_device, sum_of_squares

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_float64_sum(dtype):
    grad = torch.randn(5 * ROW_NUMEL + 123).to(dtype)
    wanted = math.fsum((grad.double() ** 2).tolist())
    assert sum_of_squares(grad) == pytest.approx(wanted, rel=1e-14)
    shifted = grad[1:]
    wanted = math.fsum((shifted.double() ** 2).tolist())
    assert sum_of_squares(shifted) == pytest.approx(wanted, rel=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_change_a_bit(dtype):
    grad = torch.randn(23 * ROW_NUMEL + 5).to(dtype)
    before = torch.get_num_threads()
    sums = set()
    try:
        for threads in (1, 2, 4, 6):
            torch.set_num_threads(threads)
            sums.add(sum_of_squares(grad))
    finally:
        torch.set_num_threads(before)
    assert len(sums) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("at", [7, -1])
def test_inf_and_nan_propagate(dtype, bad, at):
    grad = torch.zeros(2 * ROW_NUMEL + 5, dtype=dtype)
    grad[at] = bad
    assert not math.isfinite(sum_of_squares(grad))


def test_no_finite_gradient_overflows():
    grad = torch.full((2 * ROW_NUMEL,), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    assert math.isfinite(sum_of_squares(grad))


def test_small_and_empty_gradients():
    assert sum_of_squares(torch.empty(0)) == 0.0
    assert sum_of_squares(torch.tensor([[3.0, 4.0]])) == 25.0
    assert sum_of_squares(torch.tensor([[3.0, 0.0], [4.0, 0.0]])[:, 0]) == 25.0


@pytest.mark.parametrize("norm", [0.0, 0.3, 1.0, 7.5, 1e30])
def test_the_coefficient_is_that_of_clip_grad_norm(norm):
    parameter = torch.nn.Parameter(torch.ones(()))
    parameter.grad = torch.tensor(norm)
    torch.nn.utils.clip_grad_norm_([parameter], 1.5)
    assert norm * clip_coefficient(norm, 1.5) == pytest.approx(parameter.grad.item(), rel=1e-6)
    assert clip_coefficient(norm, None) == 1.0


@pytest.mark.parametrize("numel", [0, 1, ROW_NUMEL, 3 * ROW_NUMEL + 5, 33 * ROW_NUMEL])
def test_an_accelerator_adds_the_same_squares_in_an_order_of_its_own(numel):
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).bfloat16()
    assert norm_on_device(grad).item() ** 2 == pytest.approx(sum_of_squares(grad), rel=1e-14)
