"""The device budget when more gradients wait than an optimizer step alone tells."""

import contextlib
import itertools
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import BudgetError
from infinity.core.nbytes import rounded
from infinity.device.memory import Pool
from infinity.engine import executor
from infinity.engine.gradients import Gradients
from infinity.partition.unit import Unit
from tests.helpers import models, training
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks
from tests.helpers.lockstep import Toy, batch, seeded
from tests.helpers.reference import Reference, Rule
from tests.helpers.training import DTYPES, assert_bitwise, reference, small_units, streaming, train

FREE = Rule(max_grad_norm=None)


def needed(error: pytest.ExceptionInfo[BudgetError]) -> int:
    """Bytes, as the error tells them."""
    return int(re.search(r"\((\d+) bytes\)", str(error.value))[1])


def test_a_derived_budget_stays_at_the_first_no_sync_where_little_memory_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(executor, "free_host_nbytes", lambda: 2)
    factory, batches = models.build("llama", seed=3)
    model = training.build(factory, "bf16", streaming(tmp_path))
    optimizer = infinity.AdamW(model)
    least = optimizer.budgets["device"]
    with infinity.no_sync(model):
        model(**batches(0)).loss.backward()
    model(**batches(1)).loss.backward()
    optimizer.step()
    report = optimizer.report()
    assert report.peak_nbytes["device"] <= optimizer.budgets["device"] == least
    assert report.spilled_nbytes > 0
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


class WideBlock(nn.Module):
    """A block of many units, with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32, 64))
        self.linears = nn.ModuleList(nn.Sequential(nn.Linear(64, 64)) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * self.scale[0]
        for linear in self.linears:
            h = linear(h)
        return x + h


class Wide(nn.Module):
    """Three such blocks; the model has a parameter of its own, too."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(32, 64))
        self.first = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(WideBlock() for _ in range(3))
        self.last = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        x = self.first(x) + self.shift[0]
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(loss=self.last(x).float().square().mean())


def wide_batch(step: int, rank: int = 0, world: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(4 // world, 64, generator=generator, dtype=torch.bfloat16)}


def freeze(model: nn.Module) -> None:
    """Leave one linear layer of each block, and the last one of the model."""
    model.requires_grad_(False)
    model.last.requires_grad_(True)
    for block in model.blocks:
        block.linears[2].requires_grad_(True)


def within_the_least(
    folder: Any, overrides: list[str], frozen: bool, clip: float | None, rank: int = 0, world: int = 1
) -> tuple[training.Trained, int]:
    """Training of the wide model within the least device memory, as the error tells it, and that."""
    rule, change = Rule(max_grad_norm=clip), freeze if frozen else lambda model: None

    def trained(nbytes: int) -> training.Trained:
        where = streaming(folder, f"memory.device={nbytes}", "partition.tile=never", *overrides)
        return train(
            seeded(Wide), wide_batch, where, steps=3, rule=rule, change=change, rank=rank, world=world
        )

    with pytest.raises(BudgetError) as raised:
        trained(1024)
    return trained(needed(raised)), needed(raised)


#: Each of them.
PAIRS = (("keep", True, None), ("recompute", False, 1.0))


@pytest.mark.parametrize(
    ("activations", "frozen", "clip"),
    few(PAIRS, itertools.product(("keep", "recompute"), (False, True), (None, 1.0))),
)
def test_the_least_budget_has_room_for_all_units_in_use_at_one_time(
    tmp_path, monkeypatch, activations, frozen, clip
):
    impatient(monkeypatch)
    trained, nbytes = within_the_least(tmp_path, [f"memory.activations={activations}"], frozen, clip)
    assert max(each.peak_nbytes["device"] for each in trained.reports) <= nbytes
    plain = reference(
        seeded(Wide), wide_batch, steps=3, rule=Rule(max_grad_norm=clip),
        change=freeze if frozen else lambda model: None,
    )  # fmt: skip
    assert_bitwise(trained, plain)


class Nested(nn.Module):
    """Modules inside each other, each with a unit of which one half is used before the inner one."""

    def __init__(self, depth: int, innermost: nn.Module) -> None:
        super().__init__()
        self.before, self.after = (nn.Parameter(torch.eye(48)) for _ in range(2))
        self.inner = Nested(depth - 1, innermost) if depth else innermost

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner((x @ self.before).tanh())
        return (x @ self.after).tanh()


class Nest(nn.Module):
    def __init__(self, depth: int = 6, inside: int = 0) -> None:
        super().__init__()
        chain = nn.Sequential(*(Nested(0, nn.Identity()) for _ in range(inside)))
        self.nested = Nested(depth, chain if inside else nn.Linear(48, 48))

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.nested(x[:, :48]).float().square().mean())


@pytest.mark.parametrize(("versions", "clip"), [(1, 1.0), (2, None)])
def test_gradients_that_are_open_at_one_time_have_room_in_the_least_budget(
    tmp_path, monkeypatch, versions, clip
):
    impatient(monkeypatch)
    rule, most = Rule(max_grad_norm=clip), [0]
    borrow = Gradients.borrow

    def counted(self: Gradients, opened: Sequence[Unit]) -> None:
        borrow(self, opened)
        most[0] = max(most[0], len(opened))

    monkeypatch.setattr(Gradients, "borrow", counted)

    def trained(nbytes: int) -> training.Trained:
        where = streaming(tmp_path, f"memory.device={nbytes}", f"memory.versions={versions}")
        return train(seeded(Nest), wide_batch, [*where, "memory.activations=keep"], steps=3, rule=rule)

    with pytest.raises(BudgetError) as raised:
        trained(1024)
    found = trained(needed(raised))
    assert most[0] > 3
    assert_bitwise(found, reference(seeded(Nest), wide_batch, steps=3, rule=rule))


class WideInside(nn.Module):
    """Modules inside each other, and in the innermost one wider ones, which run one after the other."""

    def __init__(self) -> None:
        super().__init__()
        wide = nn.Sequential(*(nn.Sequential(nn.Linear(48, 160), nn.Linear(160, 48)) for _ in range(6)))
        self.nested = Nested(9, wide)

    forward = Nest.forward


def test_gradients_that_speculation_keeps_in_memory_have_room_beside_those_that_are_open(
    tmp_path, monkeypatch
):
    impatient(monkeypatch)
    rule = Rule(max_grad_norm=1e9)

    def trained(nbytes: int) -> training.Trained:
        where = streaming(tmp_path, f"memory.device={nbytes}", "memory.versions=2", "memory.activations=keep")
        return train(seeded(WideInside), wide_batch, where, steps=3, rule=rule)

    with pytest.raises(BudgetError) as raised:
        trained(1024)
    found = trained(needed(raised) + 2**17)  # for gradients of some of the wider ones, which are the largest
    gradients = sum(2 * param.numel() for param in WideInside().parameters())
    assert all(each.speculated and 0 < each.spilled_nbytes < gradients for each in found.reports)
    assert_bitwise(found, reference(seeded(WideInside), wide_batch, steps=3, rule=rule))


def nested_on_a_rank(folder: str) -> None:
    rank = torch.distributed.get_rank()

    def trained(clip: float | None, *more: str) -> training.Trained:
        where = streaming(folder, "memory.activations=keep", *more)
        rule = Rule(max_grad_norm=clip)
        return train(seeded(Nest), wide_batch, where, steps=3, rule=rule, rank=rank, world=2)

    with pytest.MonkeyPatch.context() as patch:
        impatient(patch)
        for versions, clip in ((1, 1.0), (2, None)):
            given = f"memory.versions={versions}"
            with pytest.raises(BudgetError) as raised:
                trained(clip, given, "memory.device=1024")
            nbytes = needed(raised)
            found = trained(clip, given, f"memory.device={nbytes}")
            assert max(each.peak_nbytes["device"] for each in found.reports) <= nbytes
            assert_bitwise(found, trained(clip, given))


def test_on_two_ranks_gradients_that_are_open_at_one_time_have_room_in_the_least_budget(tmp_path):
    run_ranks(nested_on_a_rank, 2, str(tmp_path))


def speculating_on_a_rank(folder: str) -> None:
    """Gradients of updates that speculate are kept until step: many while those of outer modules are open."""
    rank, shares, asked = torch.distributed.get_rank(), list[int](), 0
    borrow, trainable = Gradients.borrow, Unit.trainable.fget

    def counted(self: Gradients, opened: Sequence[Unit]) -> None:
        def count(unit: Unit) -> Any:
            nonlocal asked
            asked += 1
            return trainable(unit)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Unit, "trainable", property(count))
            borrow(self, opened)
        itemsize = self.path.reduce_dtype.itemsize
        shares.append(sum(rounded(unit.shard_numel * itemsize) for unit in self.units))

    def trained(*more: str) -> training.Trained:
        where = streaming(folder, "memory.activations=keep", "memory.versions=2", *more)
        factory, rule = seeded(lambda: Nest(3, 9)), Rule(max_grad_norm=1e9)
        return train(factory, wide_batch, where, steps=3, rule=rule, rank=rank, world=2)

    with pytest.MonkeyPatch.context() as patch:
        impatient(patch)
        patch.setattr(Gradients, "borrow", counted)
        roomy = trained()
        with pytest.raises(BudgetError) as raised:
            trained("memory.device=1024")
        asked = 0
        found = trained(f"memory.device={needed(raised) + shares[0]}")  # the least without gradients on NVMe
        assert all(each.speculated and not each.spilled_nbytes for each in found.reports)
        assert_bitwise(found, roomy)
        assert asked <= 3 * 20  # all units once in a step, not whenever a gradient begins


def test_on_two_ranks_gradients_that_speculation_keeps_have_room_beside_those_that_are_open(tmp_path):
    run_ranks(speculating_on_a_rank, 2, str(tmp_path))


def wide_on_a_rank(folder: str) -> list[tuple[int, int]]:
    rank, found = torch.distributed.get_rank(), []
    with pytest.MonkeyPatch.context() as patch:
        impatient(patch)
        for activations in ("keep", "recompute"):
            trained, nbytes = within_the_least(
                folder, [f"memory.activations={activations}"], True, None, rank, 2
            )
            found.append((max(each.peak_nbytes["device"] for each in trained.reports), nbytes))
    return found


def test_on_two_ranks_frozen_units_take_their_window_only(tmp_path):
    for found in run_ranks(wide_on_a_rank, 2, str(tmp_path)):
        for peak, nbytes in found:
            assert peak <= nbytes
        assert found[0][1] < found[1][1]


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that finds no room is an error within seconds."""
    monkeypatch.setattr(Pool, "patience_s", 5.0)


def test_transformers_gradient_checkpointing_has_room_for_a_block_or_the_next_forward_says_what_it_needs(
    tmp_path, monkeypatch
):
    impatient(monkeypatch)
    factory, batches = models.build("llama", seed=3)

    def start(nbytes: int) -> tuple[nn.Module, infinity.AdamW]:
        places = streaming(tmp_path, f"memory.device={nbytes}", "partition.tile=never")
        recipe = training.recipe("bf16", places)
        with training.small_units(2000), infinity.Init(recipe):  # more than two units in a block
            model = factory()
        try:
            return model, infinity.AdamW(model, max_grad_norm=None)
        except BudgetError:
            infinity.close(model)
            raise

    with pytest.raises(BudgetError) as raised:
        start(1024)
    model, _ = start(needed(raised))
    model.activation_checkpointing_enable()
    with pytest.raises(BudgetError, match="units in use at one time") as raised:
        model(**batches(0))
    infinity.close(model)
    model, optimizer = start(needed(raised))
    model.activation_checkpointing_enable()
    for step in range(3):
        model(**batches(step)).loss.backward()
        optimizer.step()
    assert optimizer.report().peak_nbytes["device"] <= needed(raised)
    infinity.close(model)


def test_steps_without_clipping_update_inside_backward_whatever_was_clipped_before(tmp_path, monkeypatch):
    impatient(monkeypatch)
    where = streaming(tmp_path, "memory.device=4200KiB", "memory.activations=keep")
    with infinity.Init(training.recipe("fp32", where)):
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    for most in (1e-3, None):
        optimizer = infinity.AdamW(model, max_grad_norm=most)
        for _ in range(3):  # each step with a limit is clipped: the next waits for its norm
            model(torch.ones(4, 512)).pow(2).sum().backward()
            optimizer.step()
        speculated = optimizer.report().speculated
        assert bool(speculated) is (most is None)
    infinity.close(model)


@pytest.mark.parametrize(
    ("resident", "adapters"),
    few((("true", False), ("false", True)), itertools.product(("true", "false"), (False, True))),
)
def test_the_least_host_memory_that_the_error_names_trains_the_same_and_less_does_not(
    tmp_path, monkeypatch, resident, adapters
):
    impatient(monkeypatch)

    def trained(nbytes: int) -> training.Trained:
        where = [f"memory.nvme=[{tmp_path}]", f"memory.host={nbytes}", f"memory.resident={resident}"]
        change = freeze if adapters else lambda model: None
        return train(seeded(Wide), wide_batch, where, steps=3, change=change)

    with pytest.raises(BudgetError) as raised:
        trained(1024)
    nbytes = needed(raised)
    with pytest.raises(BudgetError):
        trained(nbytes - 1)
    ours = trained(nbytes)
    assert_bitwise(
        ours, reference(seeded(Wide), wide_batch, steps=3, change=freeze if adapters else lambda model: None)
    )
    assert max(each.peak_nbytes["host"] for each in ours.reports) <= nbytes
