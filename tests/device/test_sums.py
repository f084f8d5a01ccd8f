"""Products of fp16 that add up in fp16: wherever torch has a setting for them, until the model is closed."""

import types
from collections.abc import Iterator

import pytest
import torch

import infinity
from infinity.core.errors import RecipeError
from infinity.device import machine
from infinity.predict.dry_run import dry_run
from infinity.predict.machines import load_machine
from tests.helpers.models import build

CPU = torch.device("cpu")
FP16 = "train.dtype=fp16", "train.accumulate_dtype=fp16", "memory.host=64MiB"


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """A device that multiplies ``gain`` times as fast where it is told to; the CPU stands for it."""
    told = types.SimpleNamespace(allow_fp16_accumulation=False, gain=2.0)
    monkeypatch.setattr(torch.backends.cpu, "matmul", told, raising=False)
    time_s = lambda *_: 1e-3 / (told.gain if told.allow_fp16_accumulation else 1.0)  # noqa: E731
    monkeypatch.setattr(machine, "multiply_s", time_s)
    machine.fp16_sums_gain.cache_clear()
    yield told
    machine.fp16_sums_gain.cache_clear()
    assert told.allow_fp16_accumulation is False


def model_of(*overrides: str) -> torch.nn.Module:
    with infinity.Init(infinity.load_recipe(overrides=overrides)):
        model: torch.nn.Module = build("llama", seed=1)[0]()
    return model


def test_a_model_sums_in_fp16_until_it_is_closed(products: types.SimpleNamespace) -> None:
    model = model_of(*FP16)
    optimizer = infinity.AdamW(model, lr=1e-3)
    assert products.allow_fp16_accumulation
    other = infinity.AdamW(model_of(*FP16), lr=1e-3)
    optimizer.close()
    assert products.allow_fp16_accumulation  # for the other one
    other.close()
    assert not products.allow_fp16_accumulation


def test_what_a_user_told_torch_is_told_again(products: types.SimpleNamespace) -> None:
    products.allow_fp16_accumulation = True
    assert machine.fp16_sums_gain(CPU) == 2.0
    infinity.AdamW(model_of(*FP16), lr=1e-3).close()
    assert products.allow_fp16_accumulation
    products.allow_fp16_accumulation = False


def test_fp16_models_that_sum_otherwise_are_not_open_together(products: types.SimpleNamespace) -> None:
    optimizer = infinity.AdamW(model_of(*FP16), lr=1e-3)
    with pytest.raises(RecipeError, match="accumulate_dtype: got 'fp32'; wanted fp16, as of the fp16 model"):
        model_of("train.dtype=fp16", "memory.host=64MiB")
    infinity.AdamW(model_of("train.dtype=fp32", "memory.host=64MiB"), lr=1e-3).close()
    optimizer.close()


def test_sums_that_are_no_faster_are_refused(products: types.SimpleNamespace) -> None:
    products.gain = 1.2
    with pytest.raises(RecipeError, match=r"wanted fp32, since sums in fp16 are 1\.2 times as fast"):
        model_of(*FP16)
    products.gain = 2.0
    machine.fp16_sums_gain.cache_clear()
    with pytest.raises(RecipeError, match="are 2 times as fast, on another rank 1 times"):
        machine.accumulate_in_fp16(CPU, lambda gain: 1.0)


def test_a_device_without_the_setting_refuses_it() -> None:
    with pytest.raises(RecipeError, match="fp32, since sums in fp16 cannot be had"):
        model_of(*FP16)


@pytest.mark.parametrize("dtype", ["auto", "bf16", "fp32"])
def test_only_products_of_fp16_sum_in_fp16(dtype: str) -> None:
    with pytest.raises(RecipeError, match=f"wanted fp32 with train.dtype={dtype}"):
        infinity.load_recipe(overrides=[f"train.dtype={dtype}", "train.accumulate_dtype=fp16"])


def test_a_plan_has_the_rate_of_sums_in_fp16_or_refuses_them() -> None:
    given = "train.dtype=fp16", "model.n_layers=4", "model.seq_len=2048", "memory.updates=device"
    plain = infinity.load_recipe(overrides=given)
    summed = infinity.load_recipe(overrides=[*given, "train.accumulate_dtype=fp16"])
    on = load_machine("desktop-4090")
    one, other = (dry_run(recipe, on) for recipe in (plain, summed))
    assert 0.5 <= other.cost.busy_s["compute"] / one.cost.busy_s["compute"] < 0.9
    assert other.rates.flops_per_s == 2 * one.rates.flops_per_s
    with pytest.raises(RecipeError, match=r"on H100 .*fp16 is no faster"):
        assert dry_run(summed, load_machine("hgx-h100"), 1).cost.step_s
