"""What is exported is what plain save_pretrained saves, of every kind of model."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import infinity
from infinity.api.saved import saved_tensors
from infinity.checkpoint.load import named_targets
from infinity.engine.runtime import runtime_of
from infinity.partition.unit import is_placeholder
from tests.helpers import models, training, zoo
from tests.helpers.cases import few

SMALL_FILES = 30_000  # bytes of values: several files of a tiny model


@contextlib.contextmanager
def sharded(factory: Callable[[], nn.Module], overrides: list[str], unit_nbytes: int = 8000) -> Iterator[Any]:
    """The model under infinity in bf16, trained for a step so that its values are nobody's first ones."""
    with training.small_units(unit_nbytes), infinity.Init(training.recipe("bf16", overrides)):
        model = factory()
    try:
        yield model
    finally:
        infinity.close(model)


def train_a_step(model: Any, batch: Callable[..., dict[str, Any]]) -> infinity.AdamW:
    optimizer = infinity.AdamW(model, lr=1e-2)
    backward(model, batch)
    optimizer.step()
    return optimizer


def backward(model: Any, batch: Callable[..., dict[str, Any]]) -> None:
    inputs = {key: v.to(model.dtype) if v.is_floating_point() else v for key, v in batch(0).items()}
    model(**inputs).loss.backward()


def plain_twin(factory: Callable[[], nn.Module], values: dict[str, Tensor], batch: Any = None) -> Any:
    """The plain model with these values: parameters in bf16, buffers as they were made.

    It sees ``batch`` first: some models write into their configs what kind of labels they saw.
    """
    model = factory()
    if batch is not None:
        model(**batch(0))
    for param in model.parameters():
        param.data = param.data.bfloat16()
    model.load_state_dict(values)
    return model


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a directory; each is in one file."""
    files = sorted(folder.glob("*.safetensors"))
    loaded = [load_file(file) for file in files]
    assert sum(map(len, loaded)) == len(set().union(*loaded))
    index = folder / "model.safetensors.index.json"
    if len(files) > 1:
        weight_map = json.loads(index.read_text())["weight_map"]
        assert weight_map == {key: f.name for f, held in zip(files, loaded) for key in held}
    else:
        assert not index.exists()
    return {key: value for held in loaded for key, value in held.items()}


def streamed(model: nn.Module) -> dict[str, Tensor]:
    """What a server would be given."""
    return {name: value.cpu().clone() for name, value in infinity.stream_weights(model)}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert set(got) == set(want)
    for key, value in want.items():
        assert got[key].dtype == value.dtype, key
        assert torch.equal(got[key], value), key


def assert_as_saved(out: Path, plain: Any, folder: Path) -> None:
    """``out`` holds what the plain model saves: tensors, configs, and nothing else."""
    plain.save_pretrained(folder)
    assert_equal(tensors_of(out), tensors_of(folder))
    assert {p.name for p in out.glob("*config.json")} == {p.name for p in folder.glob("*config.json")}
    for path in folder.glob("*config.json"):
        assert json.loads((out / path.name).read_text()) == json.loads(path.read_text()), path.name


EVERYWHERE = [*((name, "nvme") for name in zoo.NAMES), ("gpt2", "host"), ("mixtral", "host")]
#: An encoder-decoder, tied; experts, packed in two ways.
FEW = ("t5", "mixtral", "deepseek_v3")
FAST = (*((name, "nvme") for name in FEW), ("gpt2", "host"))


@pytest.mark.parametrize(("name", "place"), few(FAST, EVERYWHERE))
def test_an_export_is_what_plain_save_pretrained_saves(name: str, place: str, tmp_path: Path) -> None:
    factory, batch = zoo.build(name, seed=3)
    overrides = ["memory.host=256MiB"] if place == "host" else training.streaming(tmp_path / "nvme")
    with sharded(factory, overrides) as model:
        train_a_step(model, batch)
        infinity.export(model, tmp_path / "out", max_shard_nbytes=SMALL_FILES)
        values = infinity.state_dict(model)
        assert not any((tmp_path / "nvme").glob("*/*out*"))
        assert_equal(streamed(model), tensors_of(tmp_path / "out"))
        next(infinity.stream_weights(model))  # and no more of them
        backward(model, batch)
        with pytest.raises(infinity.StateError, match="gradients of a step that is not over"):
            next(infinity.stream_weights(model))
    plain = plain_twin(factory, values, batch)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert_as_saved(tmp_path / "out", plain, tmp_path / "plain")


class WithEmpty(nn.Module):
    """Has a parameter and a buffer without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.none = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("nothing", torch.empty(2, 0))


def test_tensors_without_elements_are_streamed_as_they_are_exported(tmp_path: Path) -> None:
    with sharded(WithEmpty, ["memory.host=64MiB"]) as model:
        infinity.export(model, tmp_path / "out")
        assert_equal(streamed(model), tensors_of(tmp_path / "out"))
        assert streamed(model)["none"].shape == (0, 4)


@pytest.mark.parametrize("name", few(("bert", "deepseek_v3"), ("gpt2", "bert", "mixtral", "deepseek_v3")))
def test_from_pretrained_loads_bitwise_the_same_weights(name: str, tmp_path: Path) -> None:
    factory, batch = zoo.build(name, seed=4)
    with sharded(factory, ["memory.host=256MiB"]) as model:
        train_a_step(model, batch)
        infinity.export(model, tmp_path / "out")
        values = infinity.state_dict(model)
    loaded = type(factory()).from_pretrained(tmp_path / "out").state_dict()
    for key, value in values.items():
        assert torch.equal(loaded[key], value.to(loaded[key].dtype)), key


def turned(model: Any) -> None:
    """Give ``model`` conversions that only its values can tell: fused and transposed weights.

    As of a checkpoint that has query, key and value in one transposed matrix, and its output transposed.
    """
    from transformers.core_model_loading import Chunk, Transpose, WeightConverter

    fused = [f"self_attn.{name}_proj.weight" for name in "qkv"]
    model._weight_conversions = [
        WeightConverter("self_attn.qkv.weight", fused, [Transpose(0, 1), Chunk(0)]),
        WeightConverter("self_attn.out.weight", "self_attn.o_proj.weight", [Transpose(0, 1)]),
    ]


@pytest.mark.parametrize("place", few(("nvme",), ("host", "nvme")))
def test_weights_that_are_transposed_on_saving_are_converted_group_by_group(
    place: str, tmp_path: Path
) -> None:
    factory, _ = models.build("llama", seed=6)
    overrides = ["memory.host=256MiB"] if place == "host" else training.streaming(tmp_path / "nvme")
    with sharded(factory, overrides, unit_nbytes=1500) as model:
        turned(model)
        saved = saved_tensors(model, dict(named_targets(model)))
        groups = {item.sources for item in saved if item.parts is None}
        assert sorted(map(len, groups)) == [1, 1, 1, 3, 3, 3]
        infinity.export(model, tmp_path / "out", max_shard_nbytes=SMALL_FILES)
        assert_equal(streamed(model), tensors_of(tmp_path / "out"))
        values = infinity.state_dict(model)
    plain = plain_twin(factory, values)
    turned(plain)
    assert "model.layers.0.self_attn.qkv.weight" in tensors_of(tmp_path / "out")
    assert_as_saved(tmp_path / "out", plain, tmp_path / "plain")


def test_keys_without_the_number_of_a_layer_or_of_several_layers_are_those_of_plain_saving(
    tmp_path: Path,
) -> None:
    from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming

    def numbered(model: Any) -> None:
        both = [f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1)]
        model._weight_conversions = [
            WeightRenaming(r"norms\.(\d+)", r"layers.\1.input_layernorm.weight"),  # at the end
            WeightRenaming("first_norm", "layers.0.post_attention_layernorm"),
            WeightRenaming(r"layers\.3\.out", "layers.1.self_attn.o_proj"),
            WeightConverter("model.up", both, [Chunk(0)]),
        ]

    factory, _ = models.build("llama", seed=6)
    with sharded(factory, ["memory.host=256MiB"]) as model:
        numbered(model)
        infinity.export(model, tmp_path / "out", max_shard_nbytes=SMALL_FILES)
        assert_equal(streamed(model), tensors_of(tmp_path / "out"))
        values = infinity.state_dict(model)
    plain = plain_twin(factory, values)
    numbered(plain)
    keys = {"model.norms.2", "model.first_norm.weight", "model.layers.3.out.weight", "model.up"}
    assert keys < tensors_of(tmp_path / "out").keys()
    assert_as_saved(tmp_path / "out", plain, tmp_path / "plain")


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v3"])
def test_experts_are_exported_without_gathering_a_unit_and_streamed_with_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory, _ = zoo.build(name, seed=7)
    with sharded(factory, training.streaming(tmp_path / "nvme")) as model:
        before = {id(p): p.data_ptr() for p in model.parameters()}
        infinity.export(model, tmp_path / "out")
        assert all(is_placeholder(p.data) and p.data_ptr() == before[id(p)] for p in model.parameters())
        runtime = runtime_of(model)
        pins = runtime.executor().prefetcher.residents.pins
        largest = max(unit.nbytes for unit in runtime.units)
        for key, value in infinity.stream_weights(model):
            assert value.untyped_storage().nbytes() <= largest, key
            assert sum(count > 0 for count in pins.values()) <= 1
    keys = tensors_of(tmp_path / "out")
    assert any(".experts.3." in key for key in keys)
    assert not any("gate_up_proj" in key for key in keys)


def test_frozen_parameters_and_both_kinds_of_buffers_are_treated_as_plain_saving_does(tmp_path: Path) -> None:
    factory, batch = models.build("vit", seed=8)

    def with_buffers() -> nn.Module:
        model = factory()
        model.register_buffer("kept", torch.arange(5))
        model.vit.register_buffer("also", torch.linspace(0, 1, 7))
        model.register_buffer("forgotten", torch.zeros(3), persistent=False)
        model.vit.embeddings.requires_grad_(False)
        return model

    with sharded(with_buffers, training.streaming(tmp_path / "nvme")) as model:
        train_a_step(model, batch)
        infinity.export(model, tmp_path / "out")
        values = infinity.state_dict(model)
    plain = plain_twin(with_buffers, values, batch)
    assert_as_saved(tmp_path / "out", plain, tmp_path / "plain")
    got = tensors_of(tmp_path / "out")
    assert {"kept", "vit.also"} < set(got)
    assert "forgotten" not in got


def test_an_export_while_updates_are_in_flight_has_the_newest_weights(tmp_path: Path) -> None:
    factory, batch = models.build("llama", seed=9)
    with sharded(factory, training.streaming(tmp_path / "nvme")) as model:
        optimizer = train_a_step(model, batch)
        infinity.export(model, tmp_path / "first")
        first = infinity.state_dict(model)
        model(**batch(1)).loss.backward()
        infinity.export(model, tmp_path / "between")  # before the step, as state_dict does
        optimizer.step()
        infinity.export(model, tmp_path / "second")
        second = infinity.state_dict(model)
    assert_equal(tensors_of(tmp_path / "first"), first)
    assert_equal(tensors_of(tmp_path / "between"), first)
    assert_equal(tensors_of(tmp_path / "second"), second)
    assert not torch.equal(first["lm_head.weight"], second["lm_head.weight"])


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_weights_are_exported_in_the_compute_dtype(dtype: str, tmp_path: Path) -> None:
    factory, _ = models.build("llama", seed=10)
    with training.small_units(), infinity.Init(training.recipe(dtype, training.streaming(tmp_path / "n"))):
        model = factory()
    infinity.export(model, tmp_path / "out")
    assert_equal(tensors_of(tmp_path / "out"), infinity.state_dict(model))
    infinity.close(model)
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == f"float{dtype[2:]}"
