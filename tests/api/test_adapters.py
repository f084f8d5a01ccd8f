"""Settings of adapters are peft's: its training to the bit, its files, errors where it is silent."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file, save_file

import infinity
from infinity import CheckpointError, RecipeError, StateError, add_lora, save_lora
from infinity.api.adapters import LoraConfig, SavedAdapters, note_on_base
from infinity.app.export import publish_run
from infinity.app.train import train as train_recipe
from infinity.engine.runtime import runtime_of
from tests.api.test_lora import ALPHA, RANK, built, closing, overrides, plain, train, train_plain
from tests.app.test_goes_on import stop
from tests.checkpoint.test_export_runs import recipe as run_recipe
from tests.helpers import models, training, zoo
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks
from tests.helpers.reference import Rule, compute_weight
from tests.helpers.tokenizers import write_tokenizer
from tests.helpers.training import DTYPES, assert_bitwise, small_units

pytestmark = [  # what peft itself says to users of plain PyTorch
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]

#: Settings here, and what they are called by peft.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "patterns": (
        {"rank_pattern": {"down_proj": 2, r"layers\.1\..*q_proj": 3}, "alpha_pattern": {"up_proj": 3.0}},
        {"rank_pattern": {"down_proj": 2, r"layers\.1\..*q_proj": 3}, "alpha_pattern": {"up_proj": 3.0}},
    ),
    "rslora": ({"rslora": True}, {"use_rslora": True}),
    "gaussian": ({"init": "gaussian"}, {"init_lora_weights": "gaussian"}),
    "orthogonal": ({"init": "orthogonal"}, {"init_lora_weights": "orthogonal"}),
    "dora": ({"dora": True}, {"use_dora": True}),
    "head": ({"modules_to_save": ["lm_head"]}, {"modules_to_save": ["lm_head"]}),
    "embedding": (
        {"modules_to_save": ["embed_tokens", "norm"], "target_modules": ["q_proj"]},
        {"modules_to_save": ["embed_tokens", "norm"], "target_modules": ["q_proj"]},
    ),
    "tokens": ({"trainable_token_indices": [3, 96]}, {"trainable_token_indices": [3, 96]}),
    "embedded": (
        {"target_modules": ["embed_tokens", "v_proj"]}, {"target_modules": ["embed_tokens", "v_proj"]}
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", ["nvme"])
@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_trains_to_the_bit_as_peft_does(tmp_path: Path, name: str, place: str) -> None:
    factory, batch = models.build("llama", seed=21)
    ours, theirs = SETTINGS[name]
    with closing(built(factory, training.recipe("bf16", overrides(place, tmp_path)), **ours)) as model:
        got = train(model, batch, Rule())
    wanted = train_plain(plain(factory, "bf16", **theirs), batch, "bf16", Rule())
    assert_bitwise(got, wanted)
    assert len(set(got.losses)) == 4


# --- going on ------------------------------------------------------------------------------------


def loaded(factory: Any, dtype: str, adapters: Path) -> Any:
    """Plain PyTorch with adapters that peft loads to go on with them."""
    model = factory()
    for param in model.parameters():
        param.data = compute_weight(param.data, DTYPES[dtype])
    return peft.PeftModel.from_pretrained(model, str(adapters), is_trainable=True)


#: Those whose adapters are read in another way; how they began is not read again. Of patterns, rslora and an
#: embedding's adapters test_a_run_with_every_setting_goes_on_to_the_bit_after_an_interruption reads them all.
READ = ("dora", "tokens", "embedded")


@pytest.mark.parametrize("name", few(READ, SETTINGS))
def test_saved_adapters_go_on_to_the_bit_as_in_peft(tmp_path: Path, name: str) -> None:
    factory, batch = models.build("llama", seed=22)
    ours, _ = SETTINGS[name]
    with closing(built(factory, training.recipe("bf16", overrides("nvme", tmp_path / "a")), **ours)) as model:
        train(model, batch, Rule(), steps=2)
        save_lora(model, tmp_path / "saved")
        before = infinity.state_dict(model)
    with small_units(), infinity.Init(training.recipe("bf16", overrides("nvme", tmp_path / "b"))):
        again = factory()
    with closing(again):
        with small_units():
            again = add_lora(again, adapter=tmp_path / "saved")
        after = infinity.state_dict(again)
        assert before.keys() == after.keys()
        assert all(torch.equal(value, after[key]) for key, value in before.items())
        got = train(again, batch, Rule(), steps=2)
    wanted = train_plain(loaded(factory, "bf16", tmp_path / "saved"), batch, "bf16", Rule(), steps=2)
    assert_bitwise(got, wanted)


def rank_saves_and_goes_on(folder: str) -> list[float]:
    import os

    rank, (factory, batch) = int(os.environ["RANK"]), models.build("llama", seed=23)
    settings = {"dora": True, "modules_to_save": ["lm_head"], "trainable_token_indices": [5]}
    with closing(
        built(factory, training.recipe("fp32", overrides("nvme", f"{folder}/{rank}a")), **settings)
    ) as model:
        train(model, batch, Rule(), steps=1, rank=rank, world=2)
        save_lora(model, Path(folder, "saved"))
        want = infinity.state_dict(model, every_rank=True)
    with small_units(), infinity.Init(training.recipe("fp32", overrides("nvme", f"{folder}/{rank}b"))):
        model = factory()
    with closing(model):
        with small_units():
            model = add_lora(model, adapter=Path(folder, "saved"))
        got = infinity.state_dict(model, every_rank=True)
        assert all(torch.equal(value, got[key]) for key, value in want.items())
        return train(model, batch, Rule(), steps=2, rank=rank, world=2).losses


def test_two_ranks_save_copies_of_modules_and_go_on_alike(tmp_path: Path) -> None:
    first, second = run_ranks(rank_saves_and_goes_on, 2, str(tmp_path))
    factory, batch = models.build("llama", seed=23)
    whole = train_plain(loaded(factory, "fp32", tmp_path / "saved"), batch, "fp32", Rule(), steps=2)
    for a, b, loss in zip(first, second, whole.losses, strict=True):
        assert (a + b) / 2 == pytest.approx(loss, rel=1e-5)


def saved(folder: Path, **settings: Any) -> Path:
    """Adapters that peft saves."""
    factory, _ = models.build("llama", seed=24)
    config = {"r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    peft.get_peft_model(factory(), peft.LoraConfig(**(config | settings))).save_pretrained(folder)
    return folder


def edit(folder: Path, **entries: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def refusal(folder: Path, recipe_folder: Path, name: str = "llama") -> str:
    factory, _ = models.build(name, seed=24)
    with infinity.Init(training.recipe("bf16", overrides("nvme", recipe_folder))):
        model = factory()
    with closing(model), pytest.raises((CheckpointError, RecipeError)) as raised:
        add_lora(model, adapter=folder)
    return str(raised.value)


def test_adapters_of_another_model_are_refused_by_the_names_of_their_keys(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved")
    values = load_file(folder / "adapter_model.safetensors")
    first = next(key for key in values if "q_proj.lora_A" in key)
    save_file(values | {first: torch.zeros(RANK, 8)}, folder / "adapter_model.safetensors")
    assert f"{first} has shape (4, 8), in the model (4, 32)" in refusal(folder, tmp_path / "a")
    save_file(values | {first: values[first].long()}, folder / "adapter_model.safetensors")
    assert f"{first} is torch.int64, and no floating-point" in refusal(folder, tmp_path / "int")
    rest = {key: value for key, value in values.items() if key != first}
    save_file(rest | {"other.weight": torch.zeros(2)}, folder / "adapter_model.safetensors")
    said = refusal(folder, tmp_path / "b")
    assert f"{first} is not in the file; other.weight is not in the model" in said
    assert "q_proj" in refusal(folder, tmp_path / "c", "gpt2")  # peft finds no such layers there


def test_adapters_of_a_base_of_another_name_are_used_and_a_line_says_so(tmp_path: Path) -> None:
    model = SimpleNamespace(config=SimpleNamespace(name_or_path="/models/Llama-3-8B"))
    folder = saved(tmp_path / "saved")
    config = json.loads((folder / "adapter_config.json").read_text())
    for named, notes in ((None, False), ("meta/llama-3-8b", False), ("meta/Llama-2-7b", True)):
        (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": named}))
        assert ("were trained on 'meta/Llama-2-7b'" in note_on_base(folder, model)) is notes


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"peft_type": "IA3"}, r"adapter_config\.json: peft_type is 'IA3'; wanted 'LORA'"),
        ({"bias": "all"}, r"bias is 'all'; adapters can be used here that have 'none'"),
        ({"layer_replication": [[0, 1]]}, r"layer_replication is \[\[0, 1\]\]; adapters can be used here"),
        ({"of_tomorrow": 3}, r"of_tomorrow is 3; adapters can be used here that have None"),
        ({"init_lora_weights": "pissa"}, r"init_lora_weights is 'pissa', which changes the base"),
        ({"r": 10**12}, r"rank 1000000000000 is that of no tensor of adapter_model\.safetensors"),
        ({"r": "many"}, r"rank 'many' is that of no tensor"),
        ({"rank_pattern": {"q_proj": -1}}, r"rank -1 is that of no tensor"),
        ({"rank_pattern": 3}, r"rank_pattern is 3; wanted a map from names of layers to numbers"),
        (
            {"alpha_pattern": {"((": 3}},
            r"config\.json: alpha_pattern is {'\(\(': 3}; wanted a map",
        ),
        (
            {"r": 2, "rank_pattern": {"q_proj": 3}},
            r"\(4, 32\), in the model \(3, 32\).*says rank 2, 3\. Th",
        ),
        (
            {"target_modules": ["q"]},
            r"adapter_config\.json for Llama.*: Target modules {'q'} not found",
        ),
        ({"modules_to_save": ["nowhere"]}, r"modules_to_save names 'nowhere', but no module is called so"),
        ({"modules_to_save": "lm_head"}, r"modules_to_save is 'lm_head'; wanted a list of names"),
        ({"target_modules": [5]}, r"target_modules is \[5\]; wanted a list of names"),
        ({"lora_alpha": "x"}, r"adapter_config\.json: an alpha is 'x'; wanted a finite number"),
        ({"lora_alpha": float("nan")}, r"an alpha is nan; wanted a finite number"),
        ({"lora_dropout": "x"}, r"adapter_config\.json for LlamaForCausalLM: "),
    ],
)
def test_a_config_that_asks_for_something_unknown_is_refused(
    tmp_path: Path, entries: dict[str, Any], message: str
) -> None:
    import re

    folder = saved(tmp_path / "saved")
    edit(folder, **entries)
    assert re.search(message, refusal(folder, tmp_path / "run"))


def test_all_linear_is_what_no_names_mean() -> None:
    model = models.build("llama", seed=1)[0]()
    every = LoraConfig(rank=2, target_modules=("all-linear",)).for_peft(model)
    assert every.to_dict() == LoraConfig(rank=2).for_peft(model).to_dict()
    adapted = peft.get_peft_model(model, every)
    assert "q_proj" in str(adapted.targeted_module_names)


def test_a_directory_without_adapters_says_what_is_missing(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "holds no adapter_model.safetensors; load and save it once with peft" in refusal(
        folder, tmp_path / "run"
    )
    with pytest.raises(CheckpointError, match=r"nowhere/adapter_config\.json: No such file"):
        SavedAdapters(tmp_path / "nowhere")


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank_pattern": {"nowhere": 3}}, "rank_pattern names 'nowhere', but no layer with adapters"),
        ({"alpha_pattern": {"(": 3.0}}, "alpha_pattern: got '\\('; wanted names of layers, or their ends"),
        ({"modules_to_save": ["nowhere"]}, "modules_to_save names 'nowhere', but no module is called so"),
        ({"trainable_token_indices": [97]}, "trainable_token_indices: index 97 is out of bounds"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: got .*wanted map from text to int or null, 1 to"),
        ({"init": "pissa"}, "init: got 'pissa'; wanted default | gaussian | orthogonal"),
        ({"rank": None}, "rank: got None; wanted the rank of the adapters"),
        ({"ranks": 3}, "add_lora has no setting 'ranks'; did you mean rank"),
        ({"bits": 4}, "add_lora has no setting 'bits'; known: rank, alpha"),
        ({"target_modules": ["q_proj", "nope"]}, "target_modules names 'nope', but no layer is called so"),
        ({"trainable_token_indices": [3, 4, 3]}, "trainable_token_indices has 3 more than once"),
        (
            {"trainable_token_indices": [3], "modules_to_save": ["embed_tokens"]},
            "modules_to_save names 'embed_tokens', of which trainable_token_indices trains rows",
        ),
        (
            {"target_parameters": ["embed_tokens.weight"]},
            "is of an embedding, which is no product; name embed_tokens in lora.target_modules",
        ),
        ({"adapter": "x", "rank": 3}, "rank: got 3; wanted null with lora.adapter, which says it"),
        ({"adapter": "x", "dora": True}, "dora: got True; wanted false with lora.adapter"),
    ],
)
def test_what_peft_would_pass_over_is_an_error_that_names_it(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    factory, _ = models.build("llama", seed=25)
    with infinity.Init(training.recipe("bf16", overrides("nvme", tmp_path))):
        model = factory()
    with closing(model), pytest.raises(RecipeError, match=message):
        add_lora(model, **settings)


def test_a_recipe_says_patterns_as_maps_and_reads_itself_again(tmp_path: Path) -> None:
    given = ["model.path=/base", "lora.rank=8", "lora.rank_pattern={down_proj: 4, 'layers\\.0\\..*': 2}"]
    recipe = infinity.load_recipe(overrides=given)
    assert recipe.lora.rank_pattern == {"down_proj": 4, r"layers\.0\..*": 2}
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    assert infinity.load_recipe(tmp_path / "recipe.yaml") == recipe
    for wrong in ("3", "[q_proj]", "{q_proj: 1.5}", "{q_proj: many}"):
        with pytest.raises(RecipeError, match=r"lora\.rank_pattern.*wanted map from text to int"):
            infinity.load_recipe(overrides=[f"lora.rank_pattern={wrong}"])
    with pytest.raises(RecipeError, match=r"lora\.adapter.*null without model\.path"):
        infinity.load_recipe(overrides=["lora.adapter=/somewhere"])
    assert not LoraConfig().active
    for alone in ("lora.dora=true", "lora.lr_ratio=2", "lora.modules_to_save=[lm_head]"):
        with pytest.raises(RecipeError, match=r"without lora\.rank or lora\.adapter"):
            infinity.load_recipe(overrides=["model.path=/base", alone])


@pytest.mark.parametrize("settings", [{}, {"dora": True, "modules_to_save": ["lm_head"]}])
def test_b_learns_faster_in_the_groups_that_peft_makes_for_lora_plus(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    factory, batch = models.build("llama", seed=26)
    theirs = {"use_dora" if key == "dora" else key: value for key, value in settings.items()}
    reference = plain(factory, "fp32", **theirs)
    numbers = {"betas": (0.9, 0.95), "eps": 1e-8}
    wanted = create_loraplus_optimizer(
        reference, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16.0, loraplus_weight_decay=0.1, **numbers
    )

    def rates(model: Any, optimizer: Any) -> dict[str, tuple[float, float]]:
        names = {id(param): name for name, param in model.named_parameters()}
        found = {}
        for group in optimizer.param_groups:
            decays = group["weight_decay"]
            for param in group["params"]:  # peft lets magnitudes decay; here vectors never do
                found[names[id(param)]] = group["lr"], decays if param.ndim > 1 else 0.0
        return found

    recipe = training.recipe("fp32", overrides("nvme", tmp_path))
    with closing(built(factory, recipe, **settings)) as model:
        groups = infinity.lora_groups(model, lr=1e-3, lr_ratio=16.0, weight_decay=0.1)
        optimizer = infinity.AdamW(model, params=groups, **numbers)
        assert rates(model, optimizer) == rates(reference, wanted)
        for step in range(0 if settings else 4):
            for each, by in ((model, optimizer), (reference, wanted)):
                loss = each(**batch(step)).loss
                loss.backward()
                by.step()
                by.zero_grad()
        ours = infinity.state_dict(model)
    for name, value in reference.named_parameters():
        torch.testing.assert_close(ours[name], value.detach(), rtol=1e-4, atol=1e-6)


def test_tokens_of_a_tied_embedding_are_trained_in_both_of_its_uses(tmp_path: Path) -> None:
    factory, batch = zoo.build("qwen3", seed=27)
    settings = {"trainable_token_indices": [7, 8]}
    with closing(built(factory, training.recipe("bf16", overrides("nvme", tmp_path)), **settings)) as model:
        got = train(model, batch, Rule())
        trained = [unit for unit in runtime_of(model).units if unit.trainable]
        assert sum("trainable_tokens" in s.whole_name for unit in trained for s in unit.segments) == 1
    assert_bitwise(got, train_plain(plain(factory, "bf16", **settings), batch, "bf16", Rule()))


def test_copies_of_tied_weights_are_refused_when_they_are_made(tmp_path: Path) -> None:
    factory, _ = zoo.build("qwen3", seed=27)
    with infinity.Init(training.recipe("bf16", overrides("nvme", tmp_path))):
        model = factory()
    with closing(model), pytest.raises(RecipeError, match=r"'embed_tokens', whose weight is tied .*_indices"):
        add_lora(model, modules_to_save=["embed_tokens", "lm_head"])


def test_adapters_are_added_once_and_only_adapters_are_saved_as_such(tmp_path: Path) -> None:
    factory, _ = models.build("llama", seed=24)
    with infinity.Init(training.recipe("bf16", overrides("nvme", tmp_path))):
        model = factory()
    with closing(model):
        with pytest.raises(CheckpointError, match=r"LlamaForCausalLM .* has no adapters to save"):
            save_lora(model, tmp_path / "saved")
        adapted = add_lora(model, rank=2)
        for each in (model, adapted):
            with pytest.raises(StateError, match="has an adapter 'default' already"):
                add_lora(each, rank=2)


def test_matrices_b_of_embeddings_are_among_those_that_learn_faster(tmp_path: Path) -> None:
    factory, _ = models.build("llama", seed=24)
    recipe, targets = training.recipe("fp32", overrides("nvme", tmp_path)), ["q_proj", "embed_tokens"]
    with closing(built(factory, recipe, target_modules=targets)) as model:
        groups = infinity.lora_groups(model, lr=1e-3, lr_ratio=16.0)
        rates = {id(param): group["lr"] for group in groups for param in group["params"]}
        for name, param in model.named_parameters():
            if param.requires_grad:
                assert rates[id(param)] == (1.6e-2 if "_B" in name else 1e-3), name


# --- runs ----------------------------------------------------------------------------------------


def base_in(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes)).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def of_run(folder: Path, *more: str) -> infinity.Recipe:
    settings = [
        "lora.rank=4", "lora.dora=true", "lora.lr_ratio=4", "lora.rank_pattern={down_proj: 2}",
        "lora.modules_to_save=[lm_head]", "lora.trainable_token_indices=[7, 299]",
    ]  # fmt: skip
    given = [f"model.path={folder}/base", "durability.every=1", "train.steps=3", "train.accumulate=2"]
    return run_recipe(folder, *given, *settings, *more, sizes=())


def adapters_in(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapters" / "adapter_model.safetensors")


def test_a_run_with_every_setting_goes_on_to_the_bit_after_an_interruption(tmp_path: Path) -> None:
    base_in(tmp_path / "base")
    train_recipe(of_run(tmp_path, "run.name=whole"))
    with pytest.MonkeyPatch.context() as patch:
        stop(patch, "loss", 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            train_recipe(of_run(tmp_path, "run.name=parts"))
    train_recipe(of_run(tmp_path, "run.name=parts"))
    whole, parts = (adapters_in(tmp_path / "runs" / name) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(value, parts[key]) for key, value in whole.items())
    assert sum("lora_magnitude_vector" in key for key in whole) == 14
    assert {"base_model.model.lm_head.weight"} < whole.keys()
    with pytest.raises(CheckpointError, match=r"is the folder of a run.*use its .*whole/adapters"):
        SavedAdapters(tmp_path / "runs" / "whole")


@pytest.mark.slow
def test_a_run_that_began_from_adapters_goes_on_when_these_are_gone(tmp_path: Path) -> None:
    base_in(tmp_path / "base")

    def further(name: str) -> infinity.Recipe:
        given = [f"model.path={tmp_path}/base", "durability.every=1", "train.steps=3", f"run.name={name}"]
        return run_recipe(tmp_path, *given, f"lora.adapter={tmp_path}/first", sizes=())

    train_recipe(of_run(tmp_path, "run.name=before"))
    (tmp_path / "runs" / "before" / "adapters").rename(tmp_path / "first")
    train_recipe(further("whole"))
    with pytest.MonkeyPatch.context() as patch:
        stop(patch, "loss", 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            train_recipe(further("parts"))
    (tmp_path / "first").rename(tmp_path / "elsewhere")
    assert "the adapters of" in publish_run(tmp_path / "runs" / "parts", tmp_path / "exported")
    train_recipe(further("parts"))
    whole, parts = (adapters_in(tmp_path / "runs" / name) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(value, parts[key]) for key, value in whole.items())


def test_the_layer_schedule_trains_what_steps_do_from_the_first_forward_on(tmp_path: Path) -> None:
    """Also where no evaluation has shown that the checkpoint's config works."""
    base_in(tmp_path / "base")
    train_recipe(of_run(tmp_path, "run.name=step", "memory.activations=keep"))
    train_recipe(of_run(tmp_path, "run.name=layer", "memory.activations=keep", "train.schedule=layer"))
    one, other = (adapters_in(tmp_path / "runs" / name) for name in ("step", "layer"))
    for key, value in one.items():
        assert torch.equal(value, other[key]), key
