"""The device budget when more gradients wait than an optimizer step alone tells."""

import contextlib
import re
from typing import Any

import pytest
import torch

import infinity
from infinity import BudgetError
from infinity.engine import executor
from tests.helpers import models, training
from tests.helpers.launch import run_ranks
from tests.helpers.lockstep import Toy, batch, seeded
from tests.helpers.reference import Reference, Rule
from tests.helpers.training import DTYPES, assert_bitwise, reference, small_units, streaming, train

FREE = Rule(max_grad_norm=None)


def needed(error: pytest.ExceptionInfo[BudgetError]) -> int:
    """Bytes, as the error tells them."""
    return int(re.search(r"\((\d+) bytes\)", str(error.value))[1])


def least(folder: Any) -> int:
    """The smallest budget for steps of one micro-batch (bytes)."""
    factory, _ = models.build("llama", seed=3)
    model = training.build(factory, "bf16", streaming(folder, "memory.device=1KiB"))
    with pytest.raises(BudgetError) as raised:
        infinity.AdamW(model)
    infinity.close(model)
    return needed(raised)


def too_small_to_accumulate(folder: Any) -> int:
    """What accumulating micro-batches needs, as the first no_sync tells it, at once (bytes)."""
    factory, _ = models.build("llama", seed=3)
    where = streaming(folder, f"memory.device={least(folder)}")
    model = training.build(factory, "bf16", where)
    infinity.AdamW(model)
    with pytest.raises(BudgetError, match=r"wait for the last micro-batch.*train\.schedule=layer") as raised:
        infinity.no_sync(model).__enter__()
    infinity.close(model)
    return needed(raised)


def accumulating(folder: Any, rank: int = 0, world: int = 1) -> tuple[training.Trained, int]:
    """Training within the bytes that the first no_sync wants, and those bytes."""
    factory, batches = models.build("llama", seed=3)
    nbytes = too_small_to_accumulate(folder)
    where = streaming(folder, f"memory.device={nbytes}")
    return train(factory, batches, where, steps=4, accumulate=3, rule=FREE, rank=rank, world=world), nbytes


def on_a_rank(folder: str) -> tuple[list[float], int, int]:
    rank = torch.distributed.get_rank()
    trained, nbytes = accumulating(folder, rank, 2)
    return trained.losses, nbytes, max(each.peak_nbytes["device"] for each in trained.reports)


def test_the_first_no_sync_says_what_accumulating_needs_and_that_is_enough(tmp_path):
    trained, nbytes = accumulating(tmp_path)
    factory, batches = models.build("llama", seed=3)
    assert_bitwise(trained, reference(factory, batches, steps=4, accumulate=3, rule=FREE))
    assert max(each.peak_nbytes["device"] for each in trained.reports) <= nbytes


def test_on_two_ranks_too(tmp_path):
    for losses, nbytes, peak in run_ranks(on_a_rank, 2, str(tmp_path)):
        assert len(losses) == 12
        assert peak <= nbytes


def test_a_derived_budget_grows_with_the_first_no_sync_where_little_memory_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(executor, "_ceiling_nbytes", lambda ranks: 1)
    factory, batches = models.build("llama", seed=3)
    model = training.build(factory, "bf16", streaming(tmp_path))
    optimizer = infinity.AdamW(model)
    least = optimizer.budgets["device"]
    with infinity.no_sync(model):
        model(**batches(0)).loss.backward()
    model(**batches(1)).loss.backward()
    optimizer.step()
    assert least < optimizer.report().peak_nbytes["device"] <= optimizer.budgets["device"]
    infinity.close(model)


@contextlib.contextmanager
def half_frozen(where: list[str]):
    """A model whose blocks are frozen while the optimizer is made, and thawed then; and the plain loop."""
    factory = seeded(Toy)
    with small_units(3000), infinity.Init(training.recipe("bf16", [*where, "partition.tile=never"])):
        model = factory()
    try:
        model.blocks.requires_grad_(False)
        groups = [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": FREE.weight_decay},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = infinity.AdamW(
            model, lr=FREE.lr, betas=FREE.betas, eps=FREE.eps, max_grad_norm=1.0, params=groups
        )
        plain = Reference(factory(), DTYPES["bf16"], Rule(max_grad_norm=1.0))
        plain.model.blocks.requires_grad_(False)
        yield model, optimizer, plain
    finally:
        infinity.close(model)


def step_both(model: Any, optimizer: Any, plain: Reference, number: int) -> None:
    loss = model(**batch(number)).loss
    loss.backward()
    optimizer.step()
    assert [loss.item()] == [float(each) for each in plain.step([batch(number)]).losses]


def test_thawing_more_than_fits_is_an_error_of_the_next_forward_and_what_it_asks_for_is_enough():
    with pytest.raises(BudgetError) as raised, half_frozen(["memory.host=4MiB", "memory.device=1KiB"]):
        pass
    tight = ["memory.host=4MiB", f"memory.device={needed(raised)}"]
    with half_frozen(tight) as (model, optimizer, plain):
        for number in range(2):
            step_both(model, optimizer, plain, number)
        model.requires_grad_(True)
        with pytest.raises(BudgetError, match=r"of gradients that wait for step") as raised:
            model(**batch(2))
        model.blocks.requires_grad_(False)  # as it was: training goes on
        step_both(model, optimizer, plain, 2)
    roomier = ["memory.host=4MiB", f"memory.device={needed(raised)}"]
    with half_frozen(roomier) as (model, optimizer, plain):
        for number in range(5):
            if number == 2:
                model.requires_grad_(True)
                plain.model.requires_grad_(True)
            step_both(model, optimizer, plain, number)
        assert optimizer.report().peak_nbytes["device"] <= needed(raised)


def test_gradients_of_thawed_units_wait_on_nvme_where_they_do_not_fit(tmp_path):
    with pytest.raises(BudgetError) as raised, half_frozen(streaming(tmp_path, "memory.device=1KiB")):
        pass
    with half_frozen(streaming(tmp_path, f"memory.device={needed(raised)}")) as (model, optimizer, plain):
        spilled = []
        for number in range(6):
            if number in (2, 4):
                for each in (model, plain.model):
                    each.blocks.requires_grad_(number == 2)
            step_both(model, optimizer, plain, number)
            report = optimizer.report()
            spilled.append(report.spilled_nbytes)
        assert report.peak_nbytes["device"] <= needed(raised)
        gradients = sum(unit.nbytes for unit in optimizer.runtime.units)
        assert spilled[0] == spilled[1] < spilled[2] == spilled[5] == gradients


def test_a_derived_budget_grows_with_what_is_thawed(tmp_path):
    with half_frozen(streaming(tmp_path)) as (model, optimizer, plain):
        step_both(model, optimizer, plain, 0)
        before = optimizer.budgets["device"]
        for each in (model, plain.model):
            each.requires_grad_(True)
        step_both(model, optimizer, plain, 1)
        assert optimizer.budgets["device"] > before
