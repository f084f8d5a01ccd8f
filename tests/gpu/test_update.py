"""The update on a real accelerator: one kernel where it is CUDA, with the bits of every other form."""

import pytest
import torch
from torch import Tensor

from infinity.device.accelerator import rounds_roots
from infinity.optim.adamw import ADAMW
from infinity.optim.cuda import elementwise_kernel
from infinity.optim.rules import HostRule
from tests.accelerator.harness import here

pytestmark = pytest.mark.gpu

NUMEL = 2**20 + 6 * 2048
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def values(dtype: torch.dtype, grad_dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Weights, gradient and states of all magnitudes, on the CPU."""
    generator = torch.Generator().manual_seed(11)

    def spread(least: float, most: float) -> Tensor:
        exponents = torch.empty(NUMEL).uniform_(least, most, generator=generator)
        signs = torch.randint(0, 2, (NUMEL,), generator=generator) * 2 - 1
        return torch.exp2(exponents) * signs

    states = []
    for field in ADAMW.layout(dtype).fields:
        if field.name == "remainder":
            states.append(torch.randint(-(2**15), 2**15, (NUMEL,), generator=generator).to(torch.int16))
        elif field.name == "exp_avg_sq":
            states.append(spread(-140, 10).abs())
        else:
            states.append(spread(-70, 10))
    return spread(-14, 10).to(dtype), spread(-20, 14).to(grad_dtype), tuple(states)


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_has_the_bits_of_torch_and_of_the_cpu(dtype: torch.dtype, grad_dtype: torch.dtype):
    if here().type != "cuda" or not rounds_roots(here()):
        pytest.skip("a kernel of CUDA")
    hyper = ADAMW.hyper({**ADAMW.idle, "lr": 1e-3, "weight_decay": 0.1}, step=3, grad_scale=0.7)
    results = []
    for way in ("kernel", "torch", "cpu"):
        weight, grad, states = values(dtype, grad_dtype)
        if way == "cpu":
            HostRule(ADAMW, dtype).update(weight, grad, states, weight, hyper)
        else:
            weight, grad = weight.to(here()), grad.to(here())
            states = tuple(each.to(here()) for each in states)
            part = slice(3 * 2048, NUMEL)  # the part of one group
            given = weight[part], grad[part], tuple(each[part] for each in states)
            before = tuple(each[: part.start] for each in states)
            if way == "kernel":
                kernel = elementwise_kernel(ADAMW.formula, ADAMW.layout(dtype), grad_dtype, here())
                assert kernel is not None
                kernel(*given, hyper)
                first = weight[: part.start], grad[: part.start], before
                kernel(*first, hyper)
            else:
                ADAMW.update_by_torch(weight, grad, states, weight, hyper.to(here()))
        results.append([each.cpu() for each in (weight, *states)])
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            assert torch.equal(ours, theirs)
