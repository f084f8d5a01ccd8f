"""Frozen weights in recomputed forwards: the plain bits, and they leave when backward has passed them."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.core.lifecycle import Tier
from infinity.engine.runtime import runtime_of
from tests.helpers import models, quantized
from tests.helpers.cases import few
from tests.helpers.reference import Rule
from tests.helpers.training import assert_bitwise, build, optimizer_for, reference, streaming, train


def recompute(model: Any) -> None:
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()


def recompute_reentrant(model: Any) -> None:
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()


def freeze_some_vectors(model: nn.Module) -> None:
    """Matrices, and two of three vectors: units that are frozen in part."""
    vectors = [p for p in model.parameters() if p.dim() == 1]
    trained = {id(p) for p in vectors[::3]}
    for param in model.parameters():
        param.requires_grad_(id(param) in trained)


def freeze_matrices_of_mlps(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_("mlp" not in name or param.dim() == 1)


FROZEN = [freeze_some_vectors, freeze_matrices_of_mlps]
RECOMPUTED = [recompute, recompute_reentrant]


def both(*changes: Any) -> Any:
    def change(model: nn.Module) -> None:
        for each in changes:
            each(model)

    return change


#: Each of them.
PAIRS = (("llama", freeze_matrices_of_mlps, recompute), ("gpt2", freeze_some_vectors, recompute_reentrant))


@pytest.mark.parametrize(
    ("name", "frozen", "recomputed"), few(PAIRS, itertools.product(("llama", "gpt2"), FROZEN, RECOMPUTED))
)
def test_recomputed_models_that_are_frozen_in_part_train_bitwise(tmp_path, name, frozen, recomputed):
    factory, batch = models.build(name, seed=2)
    rule, change = Rule(max_grad_norm=None), both(frozen, recomputed)
    options = {"rule": rule, "change": change, "steps": 4, "dtype": "fp32"}
    plain = reference(factory, batch, **options)
    assert_bitwise(train(factory, batch, streaming(tmp_path), **options), plain)


@pytest.mark.parametrize("recomputed", RECOMPUTED)
def test_frozen_units_leave_when_backward_has_passed_them(tmp_path, recomputed):
    factory, batch = models.build("llama", seed=2)
    change = both(freeze_matrices_of_mlps, recomputed)
    model: Any = build(factory, "fp32", streaming(tmp_path))
    change(model)
    optimizer = optimizer_for(model, Rule())
    pins = optimizer.runtime.executor().prefetcher.residents.pins
    frozen = {unit.index for unit in optimizer.runtime.units if not unit.trainable}
    assert len(frozen) > 2
    pinned: list[int] = []
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.register_hook(
            lambda grad: pinned.append(sum(pins.get(index, 0) > 0 for index in frozen))
        )
    for step in range(3):
        model(**batch(step)).loss.backward()
        optimizer.step()
    left = {unit for unit, users in pins.items() if users}
    optimizer.close()
    assert pinned
    assert max(pinned) < len(frozen)  # the blocks above have let theirs go
    assert not left


def test_a_frozen_model_that_fits_host_memory_is_read_once(tmp_path):
    """What is set aside for training while a model is built goes to its weights when it runs without."""
    factory, batch = models.build("llama", seed=2)
    base = factory().float()
    base.save_pretrained(tmp_path / "base")
    nbytes = sum(param.nbytes for param in base.parameters())
    places = [f"memory.nvme=[{tmp_path / 'drive'}]", f"memory.host={3 * nbytes}"]
    places += [f"memory.device={nbytes * 4 // 5}", "train.dtype=fp32"]
    model = infinity.from_pretrained(tmp_path / "base", infinity.load_recipe(overrides=places), frozen=True)
    storage = runtime_of(model).tiers.storage
    ids = batch(0)["input_ids"][:2, :8]
    with torch.no_grad():
        wanted = base.eval()(ids).logits
        for _ in range(2):
            assert torch.equal(model.eval()(ids).logits, wanted)
    assert storage.store is not None
    assert storage.store.engine.nbytes_read == 0
    infinity.close(model)


def after(tmp_path: Path, base: Path, how: str, *, ran: bool) -> tuple[list[Tier], list[float]]:
    """Return homes of units, and losses, of a model that is trained in part; it may have run before."""
    nbytes = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    places = [f"memory.nvme=[{tmp_path / 'drive'}]", f"memory.host={4 * nbytes}", "memory.device=4MiB"]
    recipe = infinity.load_recipe(overrides=[*places, "train.dtype=fp32"])
    model: Any = infinity.from_pretrained(base, recipe, frozen=True)
    ids = torch.arange(16).view(2, 8)
    if ran:
        with torch.no_grad():
            model(ids)
        assert runtime_of(model).tiers.store.engine.nbytes_written == 0
    torch.manual_seed(3)
    if how == "thawed":
        model.requires_grad_(True)
    else:
        model = infinity.add_lora(model, rank=2, target_modules=["q_proj"])
    optimizer, losses = infinity.AdamW(model, lr=0.01), list[float]()
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    homes = [unit.home.tier for unit in runtime_of(model).units]
    infinity.close(model)
    return homes, losses


@pytest.mark.parametrize(("form", "how"), [("fp32", "thawed"), ("fp32", "adapters"), ("fp8", "adapters")])
def test_room_that_a_run_before_the_optimizer_took_is_there_for_training(tmp_path, form, how):
    base = tmp_path / "base"
    models.build("llama", seed=2)[0]().float().save_pretrained(base)
    if form == "fp8":
        quantized.fp8(base)
    assert after(tmp_path, base, how, ran=True) == after(tmp_path, base, how, ran=False)
