"""Adapters of packed experts: peft's numbers within rounding, the same bits wherever the experts are."""

import contextlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import infinity
from infinity import RecipeError, add_lora, cli, save_lora
from infinity.api import saved as merging
from infinity.api.saved import split_experts
from infinity.engine.runtime import runtime_of
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks, several
from tests.helpers.reference import Reference, Rule
from tests.helpers.training import optimizer_for, recipe, small_units, streaming
from tests.shards.test_resume import same

pytestmark = [  # what peft itself says to users of plain PyTorch
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]

TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False,
    "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3Moe": ("Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8}),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "DeepseekV3": ("DeepseekV3Config", DEEPSEEK),
    "Glm4Moe": (
        "Glm4MoeConfig",
        {"n_routed_experts": 4, "moe_intermediate_size": 24, "head_dim": 8, "first_k_dense_replace": 1},
    ),
    "GptOss": ("GptOssConfig", {"num_local_experts": 4, "head_dim": 8, "intermediate_size": 32}),
    "Llama4": (
        "Llama4TextConfig",
        {"num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 40, "num_experts_per_tok": 1},
    ),
    "Qwen2Moe": (
        "Qwen2MoeConfig",
        {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    ),
}  # fmt: skip
RANK, ALPHA = 8, 16.0


def make(family: str) -> Any:
    config, sizes = FAMILIES[family]
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, config)(**TEXT | sizes))
    for path, module in model.named_modules():
        if "experts" in path or "gate" in path:  # some are zeros, and all are small
            for name in [name for name, _ in module.named_parameters(recurse=False)]:
                nn.init.normal_(getattr(module, name), std=0.05)
    return model.train()


def batch(step: int, rank: int = 0, world: int = 1) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 97, (4, 12), generator=torch.Generator().manual_seed(step))
    rows = slice(4 // world * rank, 4 // world * (rank + 1))
    return {"input_ids": tokens[rows], "labels": tokens[rows].clone()}


def built(family: str, overrides: list[str], dtype: str = "fp32", change: Any = None, **options: Any) -> Any:
    with small_units(), infinity.Init(recipe(dtype, overrides)):
        model = make(family)
    if change is not None:
        change(model)
    torch.manual_seed(5)
    with small_units():
        return add_lora(model, **{"rank": RANK, "alpha": ALPHA, **options})


def saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    save_lora(model, folder)
    return load_file(folder / "adapter_model.safetensors")


def trained(model: Any, steps: int = 3, rank: int = 0, world: int = 1, rule: Any = None) -> list[float]:
    optimizer, losses = optimizer_for(model, rule or Rule()), []
    for step in range(steps):
        loss = model(**batch(step, rank, world)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@contextlib.contextmanager
def closing(model: Any):
    try:
        yield model
    finally:
        infinity.close(model)


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", few(("Qwen3Moe", "GptOss", "Llama4"), FAMILIES))
def test_experts_without_names_are_adapted_and_train_as_with_pefts_own_wrapper(tmp_path, family):
    with closing(built(family, streaming(tmp_path / "nvme"))) as model:
        saved(model, tmp_path / "start")
        ours = trained(model, 4)
        ended = saved(model, tmp_path / "end")
        model.eval()
        with torch.no_grad():
            logits = model(**batch(99)).logits
    theirs = peft.PeftModel.from_pretrained(make(family), str(tmp_path / "start"), is_trainable=True)
    assert any("experts" in name and param.requires_grad for name, param in theirs.named_parameters())
    loop = Reference(theirs, torch.float32, Rule())
    losses = [float(loss) for step in range(4) for loss in loop.step([batch(step)]).losses]
    assert ours == pytest.approx(losses, rel=1e-4)
    for name, value in peft.get_peft_model_state_dict(theirs).items():
        torch.testing.assert_close(ended[name], value, rtol=2e-3, atol=2e-4, msg=name)
    loaded = peft.PeftModel.from_pretrained(make(family), str(tmp_path / "end")).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch(99)).logits, logits, rtol=1e-4, atol=1e-5)


def implementation(name: str) -> Any:
    return lambda model: model.set_experts_implementation(name)


def recompute(model: Any) -> None:
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()


#: Tiles of two experts, and of two experts' factors of the largest rank; linear layers are smaller.
TILED = {"bf16": "partition.tile=7KiB", "fp32": "partition.tile=14KiB"}
LARGE = 64
WAYS: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    "grouped": ("Qwen3Moe", "fp32", None, {}),
    "tiles of both": ("Glm4Moe", "bf16", None, {"rank": LARGE}),
    "rank 3": ("Qwen3Moe", "bf16", None, {"rank": 3}),
    "one by one": ("Mixtral", "fp32", implementation("eager"), {}),
    "transposed": ("GptOss", "bf16", None, {}),
    "transposed one by one": ("GptOss", "fp32", implementation("eager"), {"rank": LARGE}),
    "recomputed": ("Qwen3Moe", "bf16", recompute, {"rank": LARGE}),
}


@pytest.mark.parametrize("way", few(("rank 3", "transposed one by one", "recomputed"), WAYS))
def test_adapters_of_experts_have_the_same_bits_in_memory_on_nvme_and_in_tiles(tmp_path, way):
    family, dtype, change, options = WAYS[way]
    places = [["memory.host=1GiB"], streaming(tmp_path / "nvme"), streaming(tmp_path / "nvme", TILED[dtype])]
    found = []
    for number, place in enumerate(places):
        with closing(built(family, place, dtype, change, **options)) as model:
            losses = trained(model, rule=Rule(max_grad_norm=None))
            tiles = [unit for unit in runtime_of(model).units if unit.routed]
            assert any(tiles) == (number == 2)
            assert any(unit.trainable for unit in tiles) == (number == 2 and options.get("rank") == LARGE)
            found.append((losses, saved(model, tmp_path / str(number))))
    (losses, weights), *others = found
    for again, values in others:
        assert again == losses
        assert [name for name in weights if not torch.equal(values[name], weights[name])] == []
    assert all(weight.abs().sum() > 0 for name, weight in weights.items() if "lora_B" in name)


class OneByOne(nn.Module):
    """Packed experts as layers: what peft calls the unpacked model."""

    def __init__(self, packed: Any) -> None:
        super().__init__()
        self.act_fn = packed.act_fn
        self.both, self.down = nn.ModuleList(), nn.ModuleList()
        for layers, weights in ((self.both, packed.gate_up_proj), (self.down, packed.down_proj)):
            for weight in weights.detach():
                layers.append(nn.Linear(*reversed(weight.shape), bias=False))
                layers[-1].weight = nn.Parameter(weight.clone())

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for number, (both, down) in enumerate(zip(self.both, self.down, strict=True)):
            token, place = (index == number).nonzero(as_tuple=True)
            gate, up = both(hidden[token]).chunk(2, dim=-1)
            out.index_add_(0, token, down(self.act_fn(gate) * up) * weights[token, place, None])
        return out


def test_adapted_experts_are_those_of_peft_on_the_unpacked_model_within_rounding(tmp_path):
    with closing(built("Qwen3Moe", streaming(tmp_path / "nvme", TILED["fp32"]))) as model:
        start = saved(model, tmp_path / "start")
        ours = trained(model, 4)
        ended = saved(model, tmp_path / "end")
    plain = make("Qwen3Moe")
    for layer in plain.model.layers:
        layer.mlp.experts = OneByOne(layer.mlp.experts)
    targets = [*(f"both.{i}" for i in range(4)), *(f"down.{i}" for i in range(4))]
    targets += ["q_proj", "k_proj", "v_proj", "o_proj"]
    theirs = peft.get_peft_model(plain, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets))

    def unpacked(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same values by expert, from peft's matrices of all of them."""
        found = {}
        for name, value in values.items():
            if "experts" not in name:
                found[name] = value
                continue
            inner, factor = "base_layer" in name, "lora_A" if "lora_A" in name else "lora_B"
            for i in range(4):
                part = value[i * RANK : (i + 1) * RANK] if factor == "lora_A" else value[:, i::4]
                to = f"experts.{'both' if inner else 'down'}.{i}.{factor}.weight"
                found[name[: name.index("experts.")] + to] = part.contiguous()
        return found

    assert peft.set_peft_model_state_dict(theirs, unpacked(start)).unexpected_keys == []
    loop = Reference(theirs, torch.float32, Rule())
    losses = [float(loss) for step in range(4) for loss in loop.step([batch(step)]).losses]
    assert ours == pytest.approx(losses, rel=1e-5)
    wanted = peft.get_peft_model_state_dict(theirs)
    assert wanted.keys() == unpacked(ended).keys()
    for name, value in unpacked(ended).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-3, atol=1e-4, msg=name)


# --- ranks, micro-batches and schedules ------------------------------------------------------------


def rank_trains(folder: str, tile: str, family: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    rank = int(os.environ["RANK"])
    with closing(built(family, streaming(folder, tile), rank=LARGE)) as model:
        losses = trained(model, rank=rank, world=2, rule=Rule(max_grad_norm=None))
        return losses, infinity.state_dict(model, every_rank=True)


@pytest.mark.parametrize("family", few(("Qwen3Moe",), ("Qwen3Moe", "GptOss")))
def test_two_ranks_train_the_adapters_of_one_in_tiles_or_whole(tmp_path, family):
    tiles = "partition.tile=never", TILED["fp32"]
    calls = [(rank_trains, str(tmp_path / str(number)), tile, family) for number, tile in enumerate(tiles)]
    found = [*zip(*run_ranks(several, 2, *calls), strict=True)]
    for whole, tiled in zip(*found, strict=True):
        assert tiled[0] == whole[0]
        assert [name for name in whole[1] if not torch.equal(whole[1][name], tiled[1][name])] == []
    (first, weights), (second, same) = found[0]
    assert [name for name in weights if not torch.equal(weights[name], same[name])] == []
    with closing(built(family, streaming(tmp_path / "one"), rank=LARGE)) as model:
        alone = trained(model, rule=Rule(max_grad_norm=None))
    assert [(a + b) / 2 for a, b in zip(first, second, strict=True)] == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("tile", few((TILED["fp32"],), ("partition.tile=never", TILED["fp32"])))
def test_micro_batches_in_the_layer_schedule_train_the_adapters_of_the_step_schedule(tmp_path, tile):
    found = []
    for schedule in ("step", "layer"):
        model = built("Qwen3Moe", streaming(tmp_path, tile, "memory.activations=keep"))
        with closing(model):
            optimizer = optimizer_for(model, Rule(max_grad_norm=None))
            runs: Any = infinity.layer_schedule(model, micro_batches=2) if schedule == "layer" else model
            for step in range(3):
                if schedule == "layer":
                    runs(**batch(step)).loss.backward()
                else:
                    halves = [{key: value[i : i + 2] for key, value in batch(step).items()} for i in (0, 2)]
                    with infinity.no_sync(model):
                        (model(**halves[0]).loss / 2).backward()
                    (model(**halves[1]).loss / 2).backward()
                optimizer.step()
            found.append(infinity.state_dict(model))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-3, atol=1e-4, msg=name)


# --- going on --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", few(("GptOss",), ("Qwen3Moe", "GptOss", "Llama4")))
def test_saved_adapters_of_experts_go_on_in_tiles_as_they_were_and_fit_no_other_model(tmp_path, family):
    options = {"rank_pattern": {"experts.down_proj": 16}, "alpha_pattern": {"gate_up_proj": 4.0}}
    places = [streaming(tmp_path / "nvme", tile) for tile in ("partition.tile=never", TILED["fp32"])]
    with closing(built(family, places[0], **options)) as model:
        trained(model, 2)
        was = saved(model, tmp_path / "saved")
        weights, losses = infinity.state_dict(model), trained_on(model)
    assert {value.shape[0] for name, value in was.items() if "experts.lora_A" in name} == {64}
    found = []
    for place in places:
        with small_units(), infinity.Init(recipe("fp32", place)):
            model = make(family)
        with closing(model):
            with small_units():
                model = add_lora(model, adapter=tmp_path / "saved")
            again = infinity.state_dict(model)
            assert [name for name in weights if not torch.equal(weights[name], again[name])] == []
            assert trained_on(model) == losses
            found.append(trained(model, 2))
    assert found[0] == found[1]
    with small_units(), infinity.Init(recipe("fp32", places[0])):
        model = make("GptOss" if family == "Qwen3Moe" else "Qwen2Moe")  # of other names
    with closing(model), pytest.raises((infinity.CheckpointError, RecipeError)):
        add_lora(model, adapter=tmp_path / "saved")


def trained_on(model: Any) -> float:
    """The loss of a batch, without training."""
    with torch.no_grad():
        return float(model(**batch(50)).loss)


def state_of(model: Any, optimizer: Any) -> tuple[dict[str, torch.Tensor], dict[Any, Any]]:
    return infinity.state_dict(model), optimizer.state_dict()["state"]


def test_a_run_and_a_portable_checkpoint_go_on_with_adapters_of_experts_in_other_tiles(tmp_path):
    def begun(tile: str, nvme: str) -> tuple[Any, Any]:
        model = built("Qwen3Moe", streaming(tmp_path / nvme, tile, f"run.name={nvme}"), "bf16", rank=LARGE)
        return model, optimizer_for(model, Rule(max_grad_norm=None))

    model, optimizer = begun(TILED["bf16"], "a")
    infinity.resume(model, optimizer)
    for step in range(2):
        model(**batch(step)).loss.backward()
        optimizer.step()
    infinity.save_checkpoint(model, optimizer, tmp_path / "portable")
    was = state_of(model, optimizer)
    infinity.close(model, keep=True)
    losses = []
    for nvme, tile in (("a", "partition.tile=never"), ("b", "partition.tile=4KiB")):
        model, optimizer = begun(tile, nvme)
        with closing(model):
            if nvme == "a":
                assert infinity.resume(model, optimizer) == 2
            else:
                infinity.load_checkpoint(model, optimizer, tmp_path / "portable")
            same(state_of(model, optimizer), was)
            losses.append(model(**batch(2)).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)  # the smaller tiles have linear layers, too


# --- merging ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "block"),
    few(
        (("Qwen3Moe", None), ("GptOss", 40)),
        itertools.product(("Qwen3Moe", "Mixtral", "GptOss", "Llama4"), (None, 40)),
    ),
)
def test_adapters_of_experts_are_merged_from_files_to_files_as_peft_merges_them(
    tmp_path, family, block, monkeypatch
):
    if block is not None:
        monkeypatch.setattr(merging, "_BLOCK_NUMEL", block * 32)  # rows of several experts, and parts of one
    make(family).save_pretrained(tmp_path / "base")
    named = {"target_parameters": ["gate.weight", "down_proj"]} if family == "Mixtral" else {}
    with closing(built(family, streaming(tmp_path / "nvme"), **named)) as model:
        trained(model, 2)
        save_lora(model, tmp_path / "adapters")
    with merging.MergedModel(tmp_path / "base", tmp_path / "adapters") as merged:
        merging.merge(merged, tmp_path / "out")
    plain = type(make(family)).from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapters")).merge_and_unload()
    ours = type(plain).from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    base = make(family).state_dict()
    wanted = theirs.state_dict()
    assert ours.keys() == wanted.keys()
    changed = {name for name in wanted if not torch.equal(wanted[name], base[name])}
    assert any("experts" in name for name in changed)
    for name, value in wanted.items():
        if name in changed:
            torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-7, msg=name)
        else:
            assert torch.equal(ours[name], value), name


def test_adapters_of_experts_are_read_once_when_the_merged_model_is_stored_quantized(tmp_path, monkeypatch):
    make("Qwen3Moe").save_pretrained(tmp_path / "base")
    infinity.quantize(tmp_path / "base", tmp_path / "like", "fp8")
    with closing(built("Qwen3Moe", streaming(tmp_path / "nvme"))) as model:
        save_lora(model, tmp_path / "adapters")
        packed = sum(name.endswith("_proj") for name, _ in model.named_parameters() if "experts" in name)
    made, read = [], merging._factors_of_experts
    monkeypatch.setattr(merging, "_factors_of_experts", lambda *given: made.append(given) or read(*given))
    with merging.MergedModel(tmp_path / "base", tmp_path / "adapters") as merged:
        merging.merge(merged, tmp_path / "out", stored_as=tmp_path / "like")
    assert len(made) == packed > 1


# --- what is read --------------------------------------------------------------------------------


def test_tiles_of_experts_without_tokens_are_not_read_and_their_adapters_have_zeros_for_gradients(tmp_path):
    with closing(built("Qwen3Moe", streaming(tmp_path, TILED["bf16"]), "bf16", rank=LARGE)) as model:
        runtime, optimizer = (
            runtime_of(model),
            optimizer_for(model, Rule(max_grad_norm=None, weight_decay=0.0)),
        )
        for layer in model.base_model.model.model.layers:
            chosen = lambda gate, args, out: (*out[:2], torch.tensor([0, 1]).expand_as(out[2]))  # noqa: E731
            layer.mlp.gate.register_forward_hook(chosen)
        started, mover = [], runtime.executor().mover
        start = mover.start
        mover.start = lambda index: (started.append(index), start(index))[1]
        before = saved(model, tmp_path / "before")
        started.clear()
        for step in range(2):
            model(**batch(step)).loss.backward()
            optimizer.step()
        runtime.synchronize()
        units = [runtime.units[index] for index in started if runtime.units[index].routed]
        assert {unit.segments[0].rows for unit in units} == {range(2), range(1), range(1, 2)}
        assert any(unit.trainable for unit in units)
        after = saved(model, tmp_path / "after")
    name = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight"
    trained_experts = [bool((after[name] != before[name])[:, expert::4].any()) for expert in range(4)]
    assert trained_experts == [True, True, False, False]


def test_disabled_adapters_leave_the_base_alone(tmp_path):
    with closing(built("Qwen3Moe", streaming(tmp_path))) as model:
        with torch.no_grad():
            before = model(**batch(0)).logits
        trained(model, 1)
        with torch.no_grad():
            changed = model(**batch(0)).logits
            with model.disable_adapter():
                assert torch.equal(model(**batch(0)).logits, before)
            assert torch.equal(model(**batch(0)).logits, changed)
    assert not torch.equal(changed, before)


# --- names ---------------------------------------------------------------------------------------


def targets_of(model: Any) -> tuple[set[str], set[str], dict[str, int]]:
    config = model.peft_config["default"]
    return set(config.target_modules), set(config.target_parameters or ()), dict(config.rank_pattern)


@pytest.mark.parametrize(
    ("named", "modules", "parameters"),
    [
        ({}, {"q_proj", "k_proj", "v_proj", "o_proj"}, {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}),
        ({"target_modules": ["q_proj"]}, {"q_proj"}, set()),
        ({"target_parameters": ["experts.down_proj"]}, set(), {"experts.down_proj"}),
        # as peft takes the names of projections that transformers packs
        (
            {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
            {"q_proj"}, {"gate_up_proj", "down_proj"},
        ),
        ({"target_modules": ["gate"]}, set(), {"gate.weight"}),
    ],
)  # fmt: skip
def test_what_is_named_is_adapted_and_only_that_and_peft_loads_it(tmp_path, named, modules, parameters):
    with closing(built("Qwen3Moe", streaming(tmp_path / "nvme"), **named)) as model:
        assert targets_of(model)[:2] == (modules, parameters)
        trained(model, 1)
        values = saved(model, tmp_path / "saved")
        model.eval()
        with torch.no_grad():
            logits = model(**batch(9)).logits
    assert any(".experts." in name for name in values) == bool(parameters - {"gate.weight"})
    loaded = peft.PeftModel.from_pretrained(make("Qwen3Moe"), str(tmp_path / "saved")).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch(9)).logits, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (
            {"target_parameters": ["mlp.experts.gate_up"]},
            r"gate_up'.* Qwen3MoeForCausalLM ends so; did you mean mlp\.experts\.gate_up_proj",
        ),
        ({"target_parameters": ["nowhere"]}, r"target_parameters='nowhere': no parameter"),
        ({"dropout": 0.1}, r"lora\.dropout=0\.1: wanted 0\.0 with adapters of mlp\.experts\.down_proj"),
        ({"dora": True}, r"lora\.dora=True: wanted False with adapters of mlp\.experts"),
        ({"init": "orthogonal"}, r"lora\.init=orthogonal: wanted default or gaussian with adapters of mlp"),
        ({"target_modules": ["gate_proj"]}, r"gate_proj without also targeting up_proj"),
        ({"target_parameters": ["q_norm.weight"]}, r"layers\.0\S*q_norm\.weight is \(8,\); wanted \(experts"),
    ],
)  # fmt: skip
def test_wrong_names_are_an_error_that_says_what_could_be_meant(tmp_path, named, message):
    with small_units(), infinity.Init(recipe("bf16", streaming(tmp_path))):
        model = make("Qwen3Moe")
    with closing(model), pytest.raises(RecipeError, match=message):
        add_lora(model, **named)


def test_an_operator_that_cannot_read_an_adapted_parameter_names_it_and_what_to_turn(tmp_path):
    with closing(built("Qwen3Moe", streaming(tmp_path))) as model:
        experts = model.base_model.model.model.layers[0].mlp.experts.get_base_layer()
        type(experts).forward, before = lambda self, x, *_: x + self.gate_up_proj.sum(), type(experts).forward
        try:
            with pytest.raises(AttributeError, match=r"sum on Qwen3MoeExperts\.gate_up_proj.*lora\.target"):
                model(**batch(0))
        finally:
            type(experts).forward = before
        model(**batch(0)).loss.backward()


# --- a layer for each expert -----------------------------------------------------------------------


@pytest.mark.parametrize("family", few(("Mixtral", "DeepseekV3"), ("Qwen3Moe", "Mixtral", "DeepseekV3")))
def test_adapters_of_a_layer_for_each_expert_are_those_that_peft_loads_for_checkpoints(tmp_path, family):
    make(family).save_pretrained(tmp_path / "base")
    with small_units():
        model = infinity.from_pretrained(tmp_path / "base", recipe("fp32", streaming(tmp_path / "nvme")))
        model = add_lora(model.train(), rank=RANK, alpha=ALPHA)
    with closing(model):
        trained(model, 2)
        save_lora(model, tmp_path / "packed")
        save_lora(model, tmp_path / "layers", per_expert=True)
        model.eval()
        with torch.no_grad():
            logits = model(**batch(9)).logits
    values = load_file(tmp_path / "layers" / "adapter_model.safetensors")
    keys = load_file(tmp_path / "base" / "model.safetensors").keys()
    layers = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in values}
    assert {f"{layer}.weight" for layer in layers} <= keys
    assert {f"{layer}.weight" for layer in layers} >= {key for key in keys if ".experts." in key}
    for layer in (each for each in layers if ".experts." in each):
        a, b = (values[f"base_model.model.{layer}.lora_{factor}.weight"] for factor in "AB")
        weight = load_file(tmp_path / "base" / "model.safetensors")[f"{layer}.weight"]
        assert (b.shape[0], a.shape[1]) == tuple(weight.shape)
        assert a.shape[0] == b.shape[1] == RANK
    loaded = peft.PeftModel.from_pretrained(make(family), str(tmp_path / "layers")).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch(9)).logits, logits, rtol=1e-4, atol=1e-5)
    cli.main(["export", str(tmp_path / "packed"), str(tmp_path / "again"), "--per-expert"])
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert again.keys() == values.keys()
    assert all(torch.equal(values[name], again[name]) for name in values)
    configs = [(tmp_path / each / "adapter_config.json").read_text() for each in ("layers", "again")]
    assert configs[0] == configs[1]
    with small_units(), infinity.Init(recipe("fp32", streaming(tmp_path / "other"))):
        other = make(family)
    with (
        closing(other),
        pytest.raises(infinity.CheckpointError, match=r"a layer for each expert .*packed form"),
    ):
        add_lora(other, adapter=tmp_path / "layers")


def test_ranks_and_alphas_of_chosen_experts_are_kept_in_a_layer_for_each(tmp_path):
    down, attention = r"layers\.0\.mlp\.experts\.down_proj", "q_proj"
    make("Qwen3Moe").save_pretrained(tmp_path / "base")
    with small_units():
        model = infinity.from_pretrained(tmp_path / "base", recipe("fp32", streaming(tmp_path / "nvme")))
        patterns = {"rank_pattern": {down: 4, attention: 2}, "alpha_pattern": {down: 64, attention: 8}}
        model = add_lora(model.train(), rank=RANK, alpha=ALPHA, **patterns)
    with closing(model):
        trained(model, 2)
        save_lora(model, tmp_path / "layers", per_expert=True)
        model.eval()
        with torch.no_grad():
            logits = model(**batch(9)).logits
    config = peft.PeftConfig.from_pretrained(str(tmp_path / "layers"))
    assert not config.alpha_pattern  # servers do not read it
    loaded = peft.PeftModel.from_pretrained(make("Qwen3Moe"), str(tmp_path / "layers")).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch(9)).logits, logits, rtol=1e-4, atol=1e-5)


def test_an_alpha_of_zero_is_a_factor_of_zero_in_a_layer_for_each_expert(tmp_path):
    make("Qwen3Moe").save_pretrained(tmp_path / "base")
    with small_units():
        model = infinity.from_pretrained(tmp_path / "base", recipe("fp32", streaming(tmp_path / "nvme")))
        model = add_lora(model.train(), rank=RANK, alpha=ALPHA)
    with closing(model):
        trained(model, 1)
        save_lora(model, tmp_path / "packed")
    config = json.loads((tmp_path / "packed" / "adapter_config.json").read_text())
    config |= {"lora_alpha": 0, "alpha_pattern": {"q_proj": 8.0}}
    (tmp_path / "packed" / "adapter_config.json").write_text(json.dumps(config))
    split_experts(tmp_path / "packed", tmp_path / "packed", make("Qwen3Moe").config)
    values = load_file(tmp_path / "packed" / "adapter_model.safetensors")
    changing = {key.split(".")[-3] for key, value in values.items() if "lora_B" in key and value.any()}
    assert changing == {"q_proj"}
    assert json.loads((tmp_path / "packed" / "adapter_config.json").read_text())["lora_alpha"] == 1


def test_models_whose_checkpoints_pack_experts_have_no_layer_for_each_and_say_so(tmp_path):
    with (
        closing(built("GptOss", streaming(tmp_path / "nvme"))) as model,
        pytest.raises(infinity.CheckpointError, match=r"GptOssForCausalLM have its experts in one tensor"),
    ):
        save_lora(model, tmp_path / "layers", per_expert=True)
    assert not (tmp_path / "layers").exists()


def test_a_router_that_is_a_linear_layer_gets_no_adapters():
    config = transformers.HunYuanMoEV1Config(
        **TEXT | {"num_experts": 4, "moe_topk": 1, "head_dim": 8, "num_experts_per_tok": 1}
    )
    with small_units(), infinity.Init(recipe("fp32", [])):
        model = transformers.HunYuanMoEV1ForCausalLM(config)
    with closing(add_lora(model, rank=RANK)) as adapted:
        plain = {name for name, each in adapted.named_modules() if type(each) is nn.Linear}
        assert any(name.endswith("mlp.gate.wg") for name in plain)
        assert any(name.endswith("q_proj.base_layer") for name in plain)
