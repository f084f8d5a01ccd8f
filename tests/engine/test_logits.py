"""Logits in slices under ``Init``: numbers within rounding, alike in every placement; uses as for whole."""

import contextlib
import itertools
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import infinity
from infinity.activations.controller import METERED
from infinity.core.errors import BudgetError, StateError
from infinity.recipes.models import CausalLoss
from tests.helpers import models
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks, several
from tests.helpers.reference import Rule
from tests.helpers.runs import metrics_of
from tests.helpers.training import (
    UNTILED,
    Trained,
    assert_bitwise,
    build,
    optimizer_for,
    reference,
    streaming,
    train,
)

SLICES = "memory.logits=slices"
#: Updates of tiny gradients differ most where Adam divides by their size.
NEAR = {"rtol": 1e-4, "atol": 1e-5}


def assert_near(ours: Trained, plain: Trained) -> None:
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    for name, weight in plain.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, **NEAR)


def counted_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each slice from now on."""
    rows, cross_entropy = list[int](), F.cross_entropy

    def counted(given: torch.Tensor, target: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        if type(given) is torch.Tensor and more.get("reduction") == "none":
            rows.append(len(target))
        return cross_entropy(given, target, *args, **more)

    monkeypatch.setattr(F, "cross_entropy", counted)
    return rows


@pytest.mark.parametrize("name", few(("gpt2",), ("llama", "gpt2")))
def test_training_is_the_plain_loops_within_rounding_and_the_same_in_every_placement(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = counted_rows(monkeypatch)
    options: dict[str, Any] = {"dtype": "fp32", "steps": 3, "rule": Rule(lr=1e-3)}
    factory, batch = models.build(name, 1)
    ours = train(factory, batch, ["memory.host=1GiB", SLICES], **options)
    plain = reference(factory, batch, **options)
    assert_near(ours, plain)
    assert max(rows) == models.HIDDEN // 4
    for place in ("memory.device=600KiB", "memory.activations=offload"):
        assert_bitwise(train(factory, batch, streaming(tmp_path, SLICES, place), **options), ours)


def events(overrides: list[str], steps: int = 4, *, freeze: bool, after: bool) -> tuple[Any, int]:
    """The uses of units in a step, and how many of the last steps' uses no plan foresaw."""
    factory, batch = models.build("llama", 1)
    model: Any = build(factory, "fp32", overrides)
    model.lm_head.weight.requires_grad_(not freeze)
    optimizer, on_demand = optimizer_for(model, Rule()), 0
    with contextlib.closing(optimizer):
        loss = CausalLoss(model)
        for step in range(steps):
            given = batch(step)
            if after:
                (loss(given["input_ids"], given["labels"]) / 48).backward()
            else:
                model(**given).loss.backward()
            optimizer.step()
            on_demand += optimizer.report().on_demand if step > 1 else 0
            with torch.no_grad():
                model(**given)
        plan = optimizer.runtime.executor().prefetcher.training.plan
        return plan.events, on_demand


@pytest.mark.parametrize(
    ("freeze", "after"),
    few(((False, True),), itertools.product((False, True), (False, True))),
)
def test_the_order_of_uses_is_that_of_whole_logits(tmp_path: Path, freeze: bool, after: bool) -> None:
    of_slices = events(streaming(tmp_path, SLICES), freeze=freeze, after=after)
    of_whole = events(streaming(tmp_path, "memory.logits=whole"), freeze=freeze, after=after)
    assert of_slices[1] == of_whole[1] == 0
    assert of_slices[0] == of_whole[0]


def own_loop(folder: str, *more: str) -> tuple[list[float], list[float]]:
    """Losses of a loop that computes its loss after the forward, on batches of a length of its own."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    factory, batch = models.build("llama", 1)
    model = build(factory, "fp32", streaming(folder, *more))
    optimizer = optimizer_for(model, Rule(lr=1e-3, max_grad_norm=None))
    losses, held_out = [], []
    with contextlib.closing(optimizer):
        summed = CausalLoss(model)
        for step in range(4):
            tokens = batch(step, rank, world)["input_ids"][:, : 12 - 5 * rank]
            loss = summed(tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            tokens = tokens[:, : 12 - 8 * rank]  # one slice at most on rank 1, whose logits are whole
            with torch.no_grad():
                held_out.append(summed(tokens[:, :-1], tokens[:, 1:]).item())
    return losses, held_out


def test_a_loss_after_the_forward_is_computed_in_slices_on_ranks_of_different_batches(tmp_path: Path) -> None:
    calls = [
        (own_loop, str(tmp_path), f"memory.logits={mode}", "memory.device=200KiB")
        for mode in ("slices", "whole")
    ]
    for ours, whole in run_ranks(several, 2, *calls):
        assert ours[0] == pytest.approx(whole[0], rel=1e-5)
        assert ours[1] == pytest.approx(whole[1], rel=1e-5)


def test_logits_that_are_read_late_are_the_models(tmp_path: Path) -> None:
    factory, batch = models.build("llama", 1)
    plain = factory()(**batch(0)).logits.detach()
    model = build(factory, "fp32", streaming(tmp_path, SLICES))
    optimizer = optimizer_for(model, Rule())
    with contextlib.closing(optimizer):
        output = model(**batch(0))
        assert torch.equal(output.logits + 0, plain)
        output, other = model(**batch(0)), model(**batch(0))
        with torch.no_grad():
            assert torch.equal(output.logits.argmax(-1), plain.argmax(-1))
        model.zero_grad()
        output.loss.backward()
        optimizer.step()
        assert torch.equal(output.logits.argmax(-1), plain.argmax(-1))
        with pytest.raises(StateError, match="before step"):
            other.logits.argmax(-1)
        with pytest.raises(StateError, match="before step"):
            other.loss.backward()


def adapted(overrides: list[str]) -> list[float]:
    factory, batch = models.build("llama", 1)
    model: Any = build(factory, "fp32", overrides)
    model = infinity.add_lora(model, rank=2, target_modules=["q_proj", "lm_head"])
    optimizer, losses = optimizer_for(model, Rule()), []
    with contextlib.closing(optimizer):
        for step in range(4):
            loss = model(**batch(step)).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def test_a_head_with_adapters(tmp_path: Path) -> None:
    whole = adapted(streaming(tmp_path, "memory.logits=whole"))
    assert adapted(streaming(tmp_path, SLICES)) == pytest.approx(whole, rel=1e-5)
    assert whole[-1] < whole[0]


def losses_of(folder: Path, name: str, *overrides: str) -> tuple[list[float], list[float]]:
    """Of every step of a run, and of its evaluations."""
    lines = metrics_of(folder, name, *overrides)
    return tuple([line["loss"] for line in lines if line["kind"] == kind] for kind in ("step", "evaluation"))


@pytest.mark.parametrize("schedule", few(("layer",), ("step", "layer")))
def test_a_recipe_says_so_in_both_schedules(
    tmp_path: Path, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, rows = f"train.schedule={schedule}", counted_rows(monkeypatch)
    whole = losses_of(tmp_path, "whole", chosen, "memory.logits=whole")
    assert not rows
    ours = losses_of(tmp_path, "slices", chosen, SLICES)
    assert ours[0] == pytest.approx(whole[0], rel=1e-5)
    assert ours[1] == pytest.approx(whole[1], rel=1e-5)
    assert whole[1]
    assert max(rows) == 4


# --- a vocabulary that does not fit ------------------------------------------------------------------


WIDE = 2**11


class Wide(nn.Module):
    """A model whose logits are all that is large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WIDE, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.lm_head = nn.Linear(16, WIDE, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return nn.functional.cross_entropy(self.lm_head(hidden).flatten(0, 1), tokens.flatten())


class Shifted(Wide):
    """One that adds a parameter of its own to the hidden state, and leaves the loss to the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(8, 16))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.shift
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return self.lm_head(hidden)


def passes(folder: Path, mode: str) -> list[Any]:
    """The events of a training step and of an evaluation, the losses of which follow the call."""
    model: Any = build(Shifted, "fp32", streaming(folder, f"memory.logits={mode}", UNTILED))
    optimizer, tokens = optimizer_for(model, Rule()), torch.arange(16).view(2, 8)
    with contextlib.closing(optimizer):
        for _ in range(3):
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            with torch.no_grad():
                nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        prefetcher = optimizer.runtime.executor().prefetcher
        assert prefetcher.running is prefetcher.training
        assert not any(prefetcher.residents.pins.values())
        return [each.plan.events for each in (prefetcher.training, prefetcher.inference)]


def test_what_a_model_itself_uses_stays_until_its_logits_are_read_as_for_whole_ones(tmp_path: Path) -> None:
    assert passes(tmp_path, "slices") == passes(tmp_path, "whole")


def wide(folder: Path, *overrides: str) -> tuple[list[float], Any]:
    model = build(Wide, "fp32", streaming(folder, "memory.activations=plan", *overrides))
    optimizer, losses = optimizer_for(model, Rule(lr=1e-3)), []
    with contextlib.closing(optimizer):
        for step in range(METERED + 2):
            tokens = torch.randint(WIDE, (4, 64), generator=torch.Generator().manual_seed(step))
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, optimizer.runtime.activations


def test_auto_trains_within_a_budget_that_whole_logits_exceed(tmp_path: Path) -> None:
    logits_nbytes = 4 * 64 * WIDE * 4
    device = f"memory.device={logits_nbytes}"
    with pytest.raises(BudgetError, match=re.escape("memory.device")):
        wide(tmp_path, device, "memory.logits=whole")
    losses, activations = wide(tmp_path, device)
    assert activations.metered_nbytes < logits_nbytes // 2
    assert losses == pytest.approx(wide(tmp_path, "memory.logits=whole")[0], rel=1e-5)
    # Where whole logits fit, auto computes them whole.
    plenty = wide(tmp_path, "memory.device=64MiB")[0]
    assert plenty == wide(tmp_path, "memory.device=64MiB", "memory.logits=whole")[0]


@pytest.mark.slow
def test_a_budget_that_is_too_small_is_named_with_the_logits_that_it_is_enough_for(tmp_path: Path) -> None:
    def refused(nbytes: int, *overrides: str) -> str:
        with pytest.raises(BudgetError) as raised:
            wide(tmp_path, f"memory.device={nbytes}", UNTILED, *overrides)
        return str(raised.value)

    def named(said: str) -> int:
        return int(re.findall(r"at least .*?\((\d+) bytes\) is required", said)[0])

    logits_nbytes = 4 * 64 * WIDE * 4
    said = refused(600 * 2**10)
    assert "Raise memory.device and set memory.logits=slices (with auto" in said
    wide(tmp_path, f"memory.device={named(said)}", UNTILED, SLICES)
    nbytes = named(refused(2 * logits_nbytes, "memory.logits=whole"))
    said = refused(nbytes - 2**15)
    assert f"({nbytes} bytes) is required" in said
    assert "Raise memory.device, set memory.logits=slices, or" in said
    wide(tmp_path, f"memory.device={nbytes}", UNTILED)
    wide(tmp_path, f"memory.device={nbytes - 2**18}", UNTILED)  # auto knows that whole logits cannot fit
