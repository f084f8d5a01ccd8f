"""Merged models are those of peft's ``merge_and_unload``, to the bit, made from files to files by blocks."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import infinity
from infinity import CheckpointError
from infinity.api import saved as merging
from infinity.api.saved import MergedModel
from infinity.app.train import train as train_recipe
from infinity.cli import main
from tests.api.test_adapters import edit
from tests.api.test_lora import closing, overrides
from tests.app.test_goes_on import stop
from tests.checkpoint.test_export_runs import recipe as run_recipe
from tests.helpers import models, quantized, training, zoo
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks
from tests.helpers.reference import Rule
from tests.helpers.tokenizers import write_tokenizer
from tests.helpers.training import DTYPES, optimizer_for, small_units

pytestmark = [  # what peft itself says to users of plain PyTorch
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning"),
]

ATTENTION = {"target_modules": ["q_proj", "o_proj", "up_proj"]}
#: A model, and what its adapters are by peft's names.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear layers": ("llama", {"target_modules": "all-linear"}),
    "transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj"]}),
    "tied": ("qwen3", {"target_modules": "all-linear"}),
    "experts in the base": ("deepseek_v3", {"target_modules": ["kv_b_proj", "o_proj"]}),
    "patterns": ("llama", ATTENTION | {"rank_pattern": {"up_proj": 2}, "alpha_pattern": {"q_proj": 3}}),
    "rslora": ("llama", ATTENTION | {"use_rslora": True}),
    "dora": ("llama", ATTENTION | {"use_dora": True}),
    "transposed dora": ("gpt2", {"target_modules": ["c_attn"], "use_dora": True}),
    "embeddings": ("llama", {"target_modules": ["embed_tokens", "v_proj"]}),
    "copies": ("llama", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "tokens": ("llama", {"target_modules": ["v_proj"], "trainable_token_indices": [3, 96]}),
    "tied tokens": ("qwen3", {"target_modules": ["v_proj"], "trainable_token_indices": [3, 96]}),
}  # fmt: skip


def base_of(folder: Path, name: str, dtype: str, seed: int = 31) -> Any:
    """A base that transformers saves, and loads."""
    factory, _ = (zoo if name in ("qwen3", "deepseek_v3") else models).build(name, seed=seed)
    model: Any = factory()
    model.to(DTYPES[dtype]).save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=DTYPES[dtype])


def adapters_of(model: Any, folder: Path, **settings: Any) -> Any:
    """Adapters with values of all kinds, which peft saves; returns the model that it merges."""
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings)
    )
    generator = torch.Generator().manual_seed(3)
    for param in adapted.parameters():
        if param.requires_grad:
            noise = torch.randn(param.shape, generator=generator) * 0.1
            param.data = (param.data.float() + noise).to(param.dtype)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return adapted.merge_and_unload()


def merge(base: Path, adapters: Path, out: Path, **how: Any) -> dict[str, torch.Tensor]:
    with MergedModel(base, adapters) as merged:
        merging.merge(merged, out, **how)
    return {key: value for file in out.glob("*.safetensors") for key, value in load_file(file).items()}


def assert_same(got: dict[str, torch.Tensor], wanted: Any, out: Path, tolerance: float = 0.0) -> None:
    """What is in the files is what peft would save, and what transformers loads from them."""
    wanted.save_pretrained(out.with_name("theirs"))
    theirs = load_file(out.with_name("theirs") / "model.safetensors")
    assert got.keys() == theirs.keys()
    for key, value in theirs.items():
        assert got[key].dtype == value.dtype, key
        if tolerance:
            torch.testing.assert_close(got[key], value, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(got[key], value), key
    again = type(wanted).from_pretrained(out, dtype="auto")
    assert again.dtype == wanted.dtype
    for name, value in again.state_dict().items():
        torch.testing.assert_close(value, wanted.state_dict()[name], rtol=tolerance, atol=tolerance)


#: Peft rounds the norms of DoRA, and changes of embeddings, to the dtype of the base.
ROUNDS = ("dora", "transposed dora", "embeddings")


@pytest.mark.parametrize(
    ("case", "dtype"),
    few(
        [(case, "fp32" if case in ROUNDS else "bf16") for case in CASES],
        itertools.product(CASES, ("fp32", "bf16")),
    ),
)
def test_a_merged_model_is_peft_s_to_the_bit(tmp_path: Path, case: str, dtype: str) -> None:
    name, settings = CASES[case]
    model = base_of(tmp_path / "base", name, dtype)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    wanted = adapters_of(model, tmp_path / "adapters", **settings)
    changed = [key for key, value in wanted.state_dict().items() if not torch.equal(value, before[key])]
    assert changed
    got = merge(tmp_path / "base", tmp_path / "adapters", tmp_path / "out")
    rounds = dtype == "bf16" and case in ROUNDS
    assert_same(got, wanted, tmp_path / "out", 2e-2 if rounds else 0.0)


@pytest.mark.parametrize(
    "case",
    few(
        ("linear layers", "transposed dora", "tokens"),
        ["linear layers", "transposed", "dora", "transposed dora", "embeddings", "tokens"],
    ),
)
def test_blocks_of_rows_give_the_matrix_within_rounding(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, settings = CASES[case]
    model = base_of(tmp_path / "base", name, "fp32")
    wanted = adapters_of(model, tmp_path / "adapters", **settings)
    monkeypatch.setattr(merging, "_BLOCK_NUMEL", 100)  # ends within rows, and between them
    got = merge(tmp_path / "base", tmp_path / "adapters", tmp_path / "out", max_shard_nbytes=9000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert_same(got, wanted, tmp_path / "out", 1e-6)


# --- a model in memory ---------------------------------------------------------------------------


def trained(folder: Path, base: Path, batch: Any, rank: int = 0, world: int = 1, **settings: Any) -> Any:
    with small_units():
        recipe = training.recipe("bf16", overrides("nvme", folder))
        model = infinity.from_pretrained(base, recipe, frozen=True).train()
        torch.manual_seed(5)
        model = infinity.add_lora(model, rank=4, alpha=8.0, **settings)
    optimizer = optimizer_for(model, Rule())
    for step in range(2):
        model(**batch(step, rank, world)).loss.backward()
        optimizer.step()
    return model


def test_a_trained_model_is_exported_merged_as_peft_merges_its_saved_adapters(tmp_path: Path) -> None:
    _, batch = models.build("llama", seed=32)
    plain = base_of(tmp_path / "base", "llama", "bf16", seed=32)
    write_tokenizer(tmp_path / "base")
    with closing(trained(tmp_path / "run", tmp_path / "base", batch, dora=False)) as model:
        infinity.save_lora(model, tmp_path / "adapters")
        (tmp_path / "out.adapters").write_text("of the user")
        infinity.export(model, tmp_path / "out", merge=True, tokenizer=tmp_path / "base")
        (tmp_path / "out.adapters").unlink()
        with pytest.raises(CheckpointError, match="has adapters: export it with merge=True"):
            infinity.export(model, tmp_path / "other")
    wanted = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapters")).merge_and_unload()
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), wanted, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapters", "base", "out", "run", "theirs"]


def rank_exports(folder: str, base: str) -> None:
    import os

    rank = int(os.environ["RANK"])
    _, batch = models.build("llama", seed=33)
    with closing(trained(Path(folder, f"run{rank}"), Path(base), batch, rank, 2)) as model:
        infinity.export(model, Path(folder, "out"), merge=True)
        infinity.save_lora(model, Path(folder, "adapters"))


@pytest.mark.slow
def test_two_ranks_write_the_merged_model_of_one(tmp_path: Path) -> None:
    plain = base_of(tmp_path / "base", "llama", "bf16", seed=33)
    run_ranks(rank_exports, 2, str(tmp_path), str(tmp_path / "base"))
    wanted = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapters")).merge_and_unload()
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), wanted, tmp_path / "out")


def test_a_base_that_no_file_has_cannot_be_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factory, _ = models.build("llama", seed=34)
    with small_units(), infinity.Init(training.recipe("bf16", overrides("nvme", tmp_path / "a"))):
        model = factory()
    with closing(model):
        with pytest.raises(CheckpointError, match="has no adapters to merge: export it without merge"):
            infinity.export(model, tmp_path / "out", merge=True)
        model = infinity.add_lora(model)
        base_of(tmp_path / "base", "llama", "bf16")
        monkeypatch.chdir(tmp_path / "base")  # a checkpoint of this architecture, but not the base
        with pytest.raises(CheckpointError, match=r"merge needs the checkpoint.*name none\. Load"):
            infinity.export(model, tmp_path / "out", merge=True)
    with small_units():
        grown: Any = infinity.from_pretrained(
            tmp_path / "base", training.recipe("bf16", overrides("nvme", tmp_path / "b")), frozen=True
        )
        with infinity.Init(grown):
            grown.resize_token_embeddings(112)
    with closing(grown):
        grown = infinity.add_lora(grown)
        with pytest.raises(CheckpointError, match=r"embed_tokens\.weight has no value of its shape"):
            infinity.export(grown, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()


# --- runs, and directories of adapters -----------------------------------------------------------


def quantized_base(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes)).to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    quantized.fp8(folder)
    return folder


def test_a_run_s_adapters_are_merged_into_a_quantized_base_and_stored_in_its_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an interrupted run, and of a finished one; plain, and quantized again."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.delenv("RANK", raising=False)
    base, run = quantized_base(tmp_path / "base"), tmp_path / "runs/one"
    given = run_recipe(
        tmp_path, f"model.path={base}", "lora.rank=4", "durability.every=1", "optim.lr=0.1", sizes=()
    )
    with pytest.MonkeyPatch.context() as patch:
        stop(patch, "loss", 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            train_recipe(given)
    for when in ("before", "after"):
        if when == "after":
            train_recipe(given)
        for name, more in ((f"{when}-plain", []), (f"{when}-fp8", ["--stored"])):
            assert main(["export", str(run), str(tmp_path / name), "--merge", *more]) == 0
    said = capsys.readouterr().out
    assert f"exported the model of {run} after step 1 to {tmp_path}/before-plain" in said
    assert f"exported the model of {run} (14 weights in FP8, relative error 0.0" in said

    plain = tmp_path / "after-plain"
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    unmerged = peft.PeftModel.from_pretrained(loaded, str(run / "adapters"))
    wanted = unmerged.merge_and_unload().state_dict()
    got = load_file(plain / "model.safetensors")
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[key], value) for key, value in wanted.items())
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())
    assert AutoTokenizer.from_pretrained(plain)("the").input_ids
    before = load_file(tmp_path / "before-plain" / "model.safetensors")
    assert not torch.equal(before["lm_head.weight"], got["lm_head.weight"]) or any(
        not torch.equal(before[key], value) for key, value in got.items()
    )
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "after-fp8", dtype=torch.bfloat16)
    for key, value in stored.state_dict().items():
        torch.testing.assert_close(value, got[key], rtol=0.1, atol=4e-3)
    files = [load_file(each / "model.safetensors") for each in (base, tmp_path / "after-fp8")]
    assert [{key: value.dtype for key, value in each.items()} for each in files[:1]] == [
        {key: value.dtype for key, value in each.items()} for each in files[1:]
    ]


def test_a_directory_of_adapters_is_merged_without_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = adapters_of(base_of(tmp_path / "base", "llama", "bf16"), tmp_path / "adapters", **ATTENTION)
    command = ["export", str(tmp_path / "adapters"), str(tmp_path / "out"), "--merge"]
    assert main(command) == 0
    assert (
        f"exported {tmp_path}/adapters merged into {tmp_path}/base to {tmp_path}/out"
        in capsys.readouterr().out
    )
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), wanted, tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    shutil.move(tmp_path / "base", tmp_path / "moved")
    assert main(command) == 1
    assert "which is no directory with config.json; name it with --base DIR" in capsys.readouterr().err
    config = tmp_path / "adapters" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": None}))
    monkeypatch.chdir(tmp_path / "moved")  # a checkpoint, but nobody named it
    assert main(command) == 1
    assert "the adapters name no base: give --base DIR" in capsys.readouterr().err
    with monkeypatch.context() as patch:  # of two ranks rank 0 alone writes
        patch.setattr("infinity.app.export.rank", lambda: 1)
        assert main([*command, "--base", str(tmp_path / "moved")]) == 0
    assert not (tmp_path / "out").exists()
    assert main([*command, "--base", str(tmp_path / "moved")]) == 0
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), wanted, tmp_path / "out")


@pytest.mark.parametrize(
    ("override", "flags", "what"),
    [
        ("lora.rank=null", ["--merge"], "trained all weights, which have no adapters to merge"),
        (
            "lora.rank=2",
            ["--stored"],
            "adapters, which are not quantized: export without --stored, or the merged",
        ),
        ("lora.rank=2", ["--merge"], "no folder model; wanted the folder of a run"),
        ("lora.rank=2", ["--merge", "--base", "x"], "--base x: that is for a directory of adapters"),
        ("lora.rank=2", ["--base", "x"], "--base is for --merge"),
    ],
)
def test_what_cannot_be_merged_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, flags: list[str], what: str
) -> None:
    from infinity.app.runs import SUMMARY, write_recipe

    run = tmp_path / "runs/one"
    run.mkdir(parents=True)
    write_recipe(run_recipe(tmp_path, "model.path=somewhere", override, sizes=()), run)
    (run / SUMMARY).write_text("{}")
    assert main(["export", str(run), str(tmp_path / "out"), *flags]) == 1
    assert what in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- mistakes ------------------------------------------------------------------------------------


def test_a_tied_weight_that_would_become_two_is_refused(tmp_path: Path) -> None:
    model = base_of(tmp_path / "base", "qwen3", "bf16")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["embed_tokens"]))
    adapted.save_pretrained(tmp_path / "adapters", save_embedding_layers=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is tied to another weight of the base"):
        MergedModel(tmp_path / "base", tmp_path / "adapters")


@pytest.mark.parametrize(
    ("key", "where"),
    [("layers.1.mlp.up_proj.lora_B.weight", r"layers\.1\.mlp\.up_proj"), ("lm_head.weight", "lm_head")],
)
def test_adapters_that_are_not_finite_publish_nothing(tmp_path: Path, key: str, where: str) -> None:
    settings = ATTENTION | {"modules_to_save": ["lm_head"]}
    adapters_of(base_of(tmp_path / "base", "llama", "bf16"), tmp_path / "adapters", **settings)
    file = tmp_path / "adapters" / "adapter_model.safetensors"
    values = load_file(file)
    key = next(each for each in values if each.endswith(key))
    values[key][0, 0] = float("nan")
    save_file(values, file)
    with pytest.raises(CheckpointError, match=rf"{where}\.weight: a merged value is NaN"):
        merge(tmp_path / "base", tmp_path / "adapters", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapters", "base"]


def test_a_base_whose_config_names_no_dtype_is_merged_in_that_of_its_weights(tmp_path: Path) -> None:
    wanted = adapters_of(base_of(tmp_path / "base", "llama", "fp32"), tmp_path / "adapters", **ATTENTION)
    config = json.loads((tmp_path / "base/config.json").read_text())
    assert config.pop("dtype") == "float32"
    (tmp_path / "base/config.json").write_text(json.dumps(config))
    got = merge(tmp_path / "base", tmp_path / "adapters", tmp_path / "out")
    assert_same(got, wanted, tmp_path / "out")


def test_tokens_that_the_base_does_not_have_are_refused(tmp_path: Path) -> None:
    adapters_of(base_of(tmp_path / "base", "llama", "bf16"), tmp_path / "adapters", **CASES["tokens"][1])
    edit(tmp_path / "adapters", trainable_token_indices=[3, 2000])
    with pytest.raises(infinity.InfinityError, match="2000"):
        MergedModel(tmp_path / "base", tmp_path / "adapters")
