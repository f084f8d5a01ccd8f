"""Every update rule on a real accelerator: one kernel where it is CUDA, with the bits of every other form."""

from typing import Any

import pytest
import torch
from torch import Tensor

from infinity.device.accelerator import rounds_roots
from infinity.optim.formula import elementwise_kernel
from infinity.optim.rule import RULES, Rule
from infinity.optim.rules import HostRule
from infinity.optim.state import MASTERS, STOCHASTIC, Quantized, store_master
from tests.accelerator.harness import here

pytestmark = pytest.mark.gpu

NUMEL = 2**20 + 6 * 2048
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
#: Each rule, with an average, too, and form of a master with each dtype of weights and of gradients it has.
NAMED = {
    each.name: each
    for plain in RULES.values()
    for rule in (plain, *(() if plain.averages else (plain.averaged,)))
    for each in (rule.with_master(master) for master in MASTERS if master != STOCHASTIC or not rule.averages)
}
CASES = [
    (name, dtype, grad_dtype)
    for name, rule in NAMED.items()
    for dtype in DTYPES
    for grad_dtype in (DTYPES[:1] if "+" in name else DTYPES)
    if dtype in MASTERS[rule.master] and rule.formula is not None
]


def values(
    rule: Rule, dtype: torch.dtype, grad_dtype: torch.dtype
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Weights, gradient and states of all magnitudes, on the CPU."""
    generator = torch.Generator().manual_seed(11)

    def spread(least: float, most: float) -> Tensor:
        exponents = torch.empty(NUMEL).uniform_(least, most, generator=generator)
        signs = torch.randint(0, 2, (NUMEL,), generator=generator) * 2 - 1
        return torch.exp2(exponents) * signs

    layout = rule.layout(dtype)
    state = layout.complete((), NUMEL)
    weight, grad = torch.empty(NUMEL, dtype=dtype), spread(-20, 14).to(grad_dtype)
    store_master(layout, spread(-14, 10), weight, state)
    moments = []
    for moment in layout.moments:
        drawn = spread(-140, 10).abs() if "sq" in moment.name else spread(-70, 10)
        if isinstance(moment.form, Quantized):  # a whole block of zeros, too
            drawn[: moment.form.block] = 0
        moments.append(drawn)
    layout.store_moments(state, moments)
    return weight, grad, state


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, in which every NaN is the same."""
    tensor = tensor.cpu()
    return (torch.where(tensor.isnan(), torch.nan, tensor) if tensor.is_floating_point() else tensor).view(
        torch.uint8
    )


@pytest.mark.parametrize(("name", "dtype", "grad_dtype"), CASES)
def test_the_kernel_has_the_bits_of_torch_and_of_the_cpu(
    name: str, dtype: torch.dtype, grad_dtype: torch.dtype
):
    if here().type != "cuda" or not rounds_roots(here()):
        pytest.skip("a kernel of CUDA")
    rule: Any = NAMED[name]
    hyper = rule.hyper({**rule.idle, "lr": 1e-3, "weight_decay": 0.1}, step=3, grad_scale=0.7)
    layout, results = rule.layout(dtype), []
    for way in ("kernel", "torch", "cpu"):
        weight, grad, state = values(rule, dtype, grad_dtype)
        if way == "cpu":
            HostRule(rule, dtype).update(weight, grad, state, weight, hyper)
        else:
            weight, grad = weight.to(here()), grad.to(here())
            state = tuple(each.to(here()) for each in state)
            if way == "kernel":
                kernel = elementwise_kernel(rule.formula, layout, grad_dtype, here())
                assert kernel is not None
                for part in (slice(3 * 2048, NUMEL), slice(0, 3 * 2048)):  # parts of two groups
                    kernel(weight[part], grad[part], layout.part(state, part.start, part.stop), hyper)
            else:
                rule.update_by_torch(weight, grad, state, weight, hyper.to(here()))
        results.append([bits(each) for each in (weight, *state)])
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            assert torch.equal(ours, theirs)
