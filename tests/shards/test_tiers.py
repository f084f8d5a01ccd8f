"""Where units live: what is frozen takes no room for training until it is trained."""

import contextlib
import itertools
from typing import Any

import pytest
import torch

import infinity
from infinity import BudgetError
from infinity.core.lifecycle import Tier
from infinity.engine.runtime import runtime_of
from tests.helpers import training
from tests.helpers.cases import few
from tests.helpers.lockstep import Toy, batch, place, seeded
from tests.helpers.reference import Reference, Rule
from tests.helpers.training import DTYPES, small_units

FROZEN = ("blocks.0", "blocks.1", "first")


class HalfFrozen(Toy):
    """A toy of which a part is frozen when it is built."""

    def __init__(self) -> None:
        super().__init__()
        for name, param in self.named_parameters():
            param.requires_grad_(not name.startswith(FROZEN))


def groups(model: Any) -> list[dict[str, Any]]:
    """Every parameter, trainable now or later."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


@contextlib.contextmanager
def both(where: list[str], dtype: str, rule: Rule):
    """A half frozen model under infinity, its optimizer, and the plain loop."""
    factory = seeded(HalfFrozen)
    with small_units(3000), infinity.Init(training.recipe(dtype, where)):
        model = factory()
    try:
        optimizer = infinity.AdamW(
            model, lr=rule.lr, betas=rule.betas, eps=rule.eps, max_grad_norm=rule.max_grad_norm,
            params=groups(model),
        )  # fmt: skip
        yield model, optimizer, Reference(factory(), DTYPES[dtype], rule)
    finally:
        infinity.close(model)


def step_both(model: Any, optimizer: Any, plain: Reference, number: int) -> None:
    loss = model(**batch(number)).loss
    optimizer.scale(loss).backward()
    optimizer.step()
    assert [loss.item()] == [float(each) for each in plain.step([batch(number)]).losses]


@pytest.mark.parametrize(
    ("where", "dtype", "clip"),
    few(
        (
            ("host", "bf16", 1.0), ("host", "fp16", None), ("nvme", "fp16", 1.0), ("nvme", "fp32", None),
            ("nvme", "bf16", None), ("one-version", "bf16", None), ("one-version", "fp32", 1.0),
        ),
        itertools.product(("host", "nvme", "one-version"), ("bf16", "fp16", "fp32"), (1.0, None)),
    ),
)  # fmt: skip
def test_what_was_frozen_from_the_start_is_thawed_with_its_exact_weights(tmp_path, where, dtype, clip):
    room = [*place(where, tmp_path), "memory.device=1MiB"]  # for the gradients of all, later
    with both(room, dtype, Rule(max_grad_norm=clip)) as (model, optimizer, plain):
        for number in range(6):
            if number == 3:
                for each in (model, plain.model):
                    each.requires_grad_(True)
            step_both(model, optimizer, plain, number)
        weights = infinity.state_dict(model)
        for name, param in plain.parameters.items():
            assert torch.equal(weights[name], param.detach()), name
        state = optimizer.state_dict()["state"]
        names = {id(p): name for name, p in model.named_parameters()}
        order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        assert len(state) == len(order)
        for i, name in enumerate(order):
            assert torch.equal(state[i]["master"], plain.masters[name]), name
            assert torch.equal(state[i]["exp_avg_sq"], plain.v[name]), name


def test_disk_holds_two_versions_of_what_is_trained_and_one_of_the_rest(tmp_path):
    with both(place("nvme", tmp_path), "bf16", Rule()) as (model, optimizer, plain):
        runtime = runtime_of(model)
        for number in range(2):
            step_both(model, optimizer, plain, number)
        frozen = sum(unit.numel for unit in runtime.units if not unit.trainable)
        trained = sum(unit.numel for unit in runtime.units if unit.trainable)
        assert min(frozen, trained) > 0
        exact = (2 + 2) * frozen  # weights, and what makes random fp32 values exact
        assert runtime.peak_nbytes()["nvme"] == exact + 2 * 12 * trained


def test_building_writes_the_exact_weights_and_no_state(tmp_path):
    with small_units(3000), infinity.Init(training.recipe("bf16", place("nvme", tmp_path))):
        model = seeded(Toy)()
    runtime = runtime_of(model)
    assert runtime.tiers.store.engine.nbytes_written == (2 + 2) * sum(unit.numel for unit in runtime.units)
    infinity.close(model)


def test_nothing_is_written_to_what_is_frozen(tmp_path):
    with both(place("nvme", tmp_path), "bf16", Rule(max_grad_norm=None)) as (model, optimizer, plain):
        trained = sum(unit.numel for unit in runtime_of(model).units if unit.trainable)
        optimizer.report()
        for number in range(3):
            step_both(model, optimizer, plain, number)
            optimizer.synchronize()
            assert optimizer.report().nbytes_written == 12 * trained


def test_a_thawed_unit_that_no_longer_fits_host_memory_is_an_error_that_says_what_to_turn(tmp_path):
    where = [f"memory.nvme=[{tmp_path}]", "memory.host=330KiB", "memory.device=1MiB"]
    with both(where, "bf16", Rule()) as (model, optimizer, plain):
        units = runtime_of(model).units
        assert all(unit.home.tier is Tier.HOST for unit in units)
        step_both(model, optimizer, plain, 0)
        model.requires_grad_(True)
        with pytest.raises(BudgetError, match=r"was frozen when the model first ran.*Raise memory.host"):
            model(**batch(1))
