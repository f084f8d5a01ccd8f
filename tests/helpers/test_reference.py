"""The reference itself: it trains, repeats, and its pieces do what torch's do."""

import itertools

import pytest
import torch
from torch import Tensor

from tests.helpers.cases import few
from tests.helpers.models import NAMES, build
from tests.helpers.reference import Reference, Rule, compute_weight

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


def train(name: str, dtype: torch.dtype, steps: int, dropout: float = 0.0) -> tuple[list[Tensor], Reference]:
    factory, batch = build(name, seed=1, dropout=dropout)
    reference = Reference(factory(), dtype)
    return [reference.step([batch(step)]).losses[0] for step in range(steps)], reference


@pytest.mark.parametrize(
    ("name", "dtype"),
    few(
        [("llama", "bf16"), ("t5", "fp32"), ("vit", "bf16")],
        itertools.product(NAMES, ("bf16", "fp32")),
    ),
)
def test_the_reference_trains(name: str, dtype: str) -> None:
    losses, reference = train(name, DTYPES[dtype], 20)
    assert sum(w.numel() for w in reference.masters.values()) < 300_000
    assert torch.stack(losses[-3:]).mean() < 0.9 * losses[0]
    assert all(p.dtype == DTYPES[dtype] for p in reference.model.parameters())


@pytest.mark.parametrize("name", few(("gpt2", "t5"), NAMES))
def test_the_reference_repeats_bit_for_bit(name: str) -> None:
    (first, one), (second, two) = (train(name, torch.bfloat16, 4, dropout=0.1) for _ in range(2))
    assert torch.equal(torch.stack(first), torch.stack(second))
    assert all(torch.equal(one.masters[key], two.masters[key]) for key in one.masters)


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_of_all_ranks_are_the_batch_of_one(name: str) -> None:
    _, batch = build(name, seed=3)
    whole, parts = batch(5), [batch(5, rank, 2) for rank in range(2)]
    assert all(torch.equal(whole[key], torch.cat([part[key] for part in parts])) for key in whole)
    assert not all(torch.equal(whole[key], batch(6)[key]) for key in whole)


def test_fp16_skips_a_step_that_overflows_and_then_trains() -> None:
    factory, batch = build("llama", seed=1)
    reference = Reference(factory(), torch.float16)
    outcomes = [reference.step([batch(step)]) for step in range(12)]
    assert not outcomes[-1].skipped
    assert reference.steps == sum(not outcome.skipped for outcome in outcomes)
    assert outcomes[-1].losses[0] < outcomes[0].losses[0]


def test_fp32_is_close_to_torch_adamw() -> None:
    factory, batch = build("llama", seed=2)
    rule = Rule(max_grad_norm=None)
    reference, model = Reference(factory(), torch.float32, rule), factory()
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": rule.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=rule.lr, betas=rule.betas, eps=rule.eps)
    for step in range(3):
        reference.step([batch(step)])
        model(**batch(step)).loss.backward()
        adamw.step()
        adamw.zero_grad()
    for (name, p), q in zip(model.named_parameters(), reference.masters.values()):
        torch.testing.assert_close(p.detach(), q, rtol=1e-4, atol=1e-5, msg=name)


def test_bf16_rounds_to_nearest_with_ties_away_from_zero() -> None:
    values = torch.tensor([1.0, -1.0, 1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 - 2**-20, 0.0, -0.0])
    wanted = torch.tensor([1.0, -1.0, 1 + 2**-7, -1 - 2**-7, 1 + 2**-6, 1.0, 0.0, -0.0])
    assert torch.equal(compute_weight(values, torch.bfloat16).float(), wanted)
    random = torch.randn(100_000)
    cut = random - compute_weight(random, torch.bfloat16).float()
    even = random - random.bfloat16().float()
    assert torch.equal(cut.abs(), even.abs())
