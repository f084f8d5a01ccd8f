"""Configuration files of other tools: refused as a recipe, and translated into one that loads."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from infinity import RecipeError, load_recipe
from infinity.cli import main
from infinity.recipes.other_tools import Why, table, tool_of, tools
from infinity.recipes.recipe import Recipe, keys_of
from infinity.recipes.translation import Translation, translate

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "/mnt/nvme0"},
        "stage3_prefetch_bucket_size": 1e7,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.99], "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 90}},
    "aio": {"block_size": 1048576},
    "curriculum_learning": {"enabled": True},
}
AXOLOTL = {
    "base_model": "NousResearch/Llama-3.2-1B",
    "adapter": "qlora", "load_in_4bit": True,
    "lora_r": 32, "lora_alpha": 16, "lora_dropout": 0.05, "lora_target_linear": True,
    "datasets": [
        {"path": "teknium/GPT4-LLM-Cleaned", "type": "alpaca", "split": "train", "shards": 4},
        {"path": "json", "data_files": ["my.jsonl"], "type": "alpaca", "field_output": "answer",
         "split": "train[:90%]", "ds_type": "json"},
    ],
    "test_datasets": [{"path": "held-out.jsonl", "split": "test", "type": "alpaca"}],
    "val_set_size": 0.1, "sequence_len": 2048, "sample_packing": True, "num_epochs": 2,
    "micro_batch_size": 2, "gradient_accumulation_steps": 4, "optimizer": "adamw_8bit",
    "lr_scheduler": "cosine", "learning_rate": 0.0002, "bf16": "auto", "tf32": False,
    "gradient_checkpointing": True, "flash_attention": True, "warmup_ratio": 0.1, "evals_per_epoch": 4,
    "output_dir": "./out",
}  # fmt: skip
LLAMA_FACTORY = {
    "model_name_or_path": "model", "stage": "sft", "do_train": True, "finetuning_type": "lora",
    "lora_target": "all", "dataset": "identity,mine", "dataset_dir": "data", "template": "llama3",
    "cutoff_len": 1024, "output_dir": "saves", "logging_steps": 10, "save_steps": 500,
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "learning_rate": 1e-4,
    "num_train_epochs": 3.0, "lr_scheduler_type": "cosine", "warmup_steps": 20, "bf16": True,
    "val_size": 0.1, "eval_strategy": "steps", "eval_steps": 50, "max_samples": 1000,
    "interleave_probs": "0.7,0.3", "report_to": ["wandb", "swanlab"], "streaming": True, "buffer_size": 9,
}  # fmt: skip
ARGUMENTS = {
    "output_dir": "out", "per_device_train_batch_size": 4, "max_steps": 200, "num_train_epochs": 3.0,
    "learning_rate": 5e-5, "adam_beta2": 0.95, "warmup_ratio": 0.03, "lr_scheduler_type": "cosine",
    "optim": "rmsprop", "bf16": False, "fp16": True, "max_grad_norm": 0, "eval_strategy": "no",
    "eval_steps": 10, "label_smoothing_factor": 0.0, "save_strategy": "epoch", "save_steps": 500,
    "fsdp_config": {"min_num_params": 0}, "deepspeed": "ds.json",
}  # fmt: skip
FILES = {
    "ds_config.json": (json.dumps(DEEPSPEED), "DeepSpeed"),
    "axolotl.yml": (yaml.safe_dump(AXOLOTL), "Axolotl"),
    "llamafactory.yaml": (yaml.safe_dump(LLAMA_FACTORY), "LLaMA-Factory"),
    "training_args.json": (json.dumps(ARGUMENTS), "transformers' TrainingArguments"),
}
SAYS: dict[str, dict[str, Any]] = {
    "ds_config.json": {
        "memory.nvme": ("/mnt/nvme0",), "train.accumulate": 4, "train.dtype": "bf16", "optim.lr": 2e-5,
        "optim.betas": (0.9, 0.99), "optim.max_grad_norm": 1.0, "optim.schedule": "linear",
        "optim.warmup_steps": 10, "train.steps": 90, "optim.weight_decay": 0.01, "optim.min_lr_ratio": 0.0,
    },
    "axolotl.yml": {
        "model.path": "NousResearch/Llama-3.2-1B", "model.seq_len": 2048, "lora.rank": 32, "lora.alpha": 16.0,
        "data.files": ("teknium/GPT4-LLM-Cleaned", "my.jsonl"),
        "data.eval_files": ("held-out.jsonl",),
        "data.fields": {"output": "answer"}, "data.eval_fraction": 0.1, "data.packing": True,
        "train.epochs": 2.0, "train.steps": None, "train.batch_size": 2, "train.accumulate": 4,
        "optim.lr": 2e-4, "optim.min_lr_ratio": 0.0, "optim.weight_decay": 0.0, "train.dtype": "auto",
        "lora.target_modules": (), "model.stored_as": None, "run.dir": "./out",
        "optim.warmup_ratio": 0.1,
    },
    "llamafactory.yaml": {
        "lora.rank": 8, "lora.alpha": 16.0, "lora.target_modules": (), "model.seq_len": 1024,
        "train.eval_every": 50, "optim.warmup_steps": 20, "checkpoint.every": "500 steps",
        "train.epochs": 3.0, "data.files": ("data/chats.json", "mine"),
        "data.fields": {"conversations": "turns"},
        "data.weights": (0.7, 0.3), "optim.betas": (0.9, 0.999), "optim.schedule": "cosine",
        "data.streaming": True,
    },
    "training_args.json": {
        "train.steps": 200, "train.epochs": None, "optim.betas": (0.9, 0.95), "optim.warmup_ratio": 0.03,
        "train.dtype": "fp16", "train.eval_every": None, "checkpoint.every": None,
        "optim.max_grad_norm": None,
    },
}  # fmt: skip
#: Keys of which a line says why they are not in the recipe.
NOT_IN_IT = {
    "ds_config.json": ["train_micro_batch_size_per_gpu", "zero_optimization.stage", "aio",
                       "curriculum_learning"],
    "axolotl.yml": ["quantization", "flash_attention",
                    "datasets.*.split", "datasets.*.shards", "datasets.*.ds_type", "test_datasets.*.split",
                    "data.files=teknium/GPT4-LLM-Cleaned", "data.files=my.jsonl"],
    "llamafactory.yaml": ["template", "max_samples", "report_to", "buffer_size", "data.files=mine",
                          "dataset.*.num_samples"],
    "training_args.json": ["optim", "deepspeed"],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/chats.json").write_text("[]")
    columns = {"messages": "turns", "system": "system"}
    info = {"identity": {"file_name": "chats.json", "columns": columns, "split": "train", "num_samples": 9}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    for name, (text, _) in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_a_configuration_of_another_tool_becomes_a_recipe_that_loads(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipe", "--from", name, "--output", "made.yaml"]) == 0
    recipe, found = load_recipe("made.yaml"), translate(name)
    assert recipe == found.recipe
    assert {key: recipe.value(key) for key in SAYS[name]} == SAYS[name]
    said = capsys.readouterr().out
    assert said.startswith("wrote made.yaml; train it with: infinity train made.yaml")
    assert f"# from {name} ({FILES[name][1]})" in Path("made.yaml").read_text()
    keys = {key for key, _ in found.said}
    assert keys >= set(NOT_IN_IT[name])
    assert all(f"{key}" in said for key in keys)
    assert main(["recipe", "--from", name, "--output", "made.yaml"]) == 1  # it exists


@pytest.mark.parametrize("name", FILES)
def test_a_configuration_of_another_tool_is_no_recipe_and_the_error_says_what_to_do(
    folder: Path, name: str
) -> None:
    with pytest.raises(RecipeError) as raised:
        load_recipe(name)
    assert f"{name}: this is a configuration of {FILES[name][1]}, not a recipe; " in str(raised.value)
    assert "infinity recipe --from FILE writes one from it" in str(raised.value)


def test_without_output_the_recipe_is_what_standard_output_has(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipe", "--from", "axolotl.yml"]) == 0
    printed = capsys.readouterr()
    Path("printed.yaml").write_text(printed.out)
    assert load_recipe("printed.yaml") == translate("axolotl.yml").recipe
    assert printed.err.startswith("not in the recipe:\n  ")
    assert re.search(r"  .*flash_attention, .*: not translated \(", printed.err)
    assert "hf download --local-dir DIR NousResearch/Llama-3.2-1B" in printed.err


def translated(given: dict[str, Any]) -> Translation:
    Path("given.yaml").write_text(yaml.safe_dump(given))
    return translate("given.yaml")


def why(found: Translation, key: str) -> str:
    return next(why for each, why in found.said if each == key)


def test_keys_that_decide_together_are_combined(folder: Path) -> None:
    whole = translated(AXOLOTL | {"adapter": None})
    assert not whole.recipe.lora.active
    on_drives = {"zero_optimization": {"offload_param": {"nvme_path": "/mnt"}}}
    assert translated(on_drives).recipe.memory.nvme == ("/mnt",)
    preferred = {"stage": "dpo", "pref_beta": 0.2, "report_to": "wandb", "load_best_model_at_end": True}
    given = translated(LLAMA_FACTORY | preferred).recipe
    assert (given.train.task, given.train.beta, given.train.keep_best) == ("dpo", 0.2, "loss")
    assert given.observe.wandb
    assert "got 'ppo'; wanted sft | " in why(translated(LLAMA_FACTORY | {"stage": "ppo"}), "train.task")
    assert translated(AXOLOTL | {"rl": "kto", "rl_beta": 0.3}).recipe.train.task == "kto"
    rules = {"paged_adamw_8bit": "adamw8bit", "adamw_torch_fused": "adamw", "lion": "lion"}
    for name, rule in (rules | {"schedule_free_adamw": "schedulefree"}).items():
        assert translated(AXOLOTL | {"optimizer": name}).recipe.optim.name == rule
    assert translated({"zero_optimization": 3, "optimizer": {"type": "Adam"}}).recipe.optim.name == "adamw"
    assert not translated(LLAMA_FACTORY | {"finetuning_type": "full"}).recipe.lora.active
    muon = translated(LLAMA_FACTORY | {"use_muon": True, "optim": "adamw_torch"}).recipe
    assert muon.optim.name == "muon"
    assert translated(ARGUMENTS | {"optim": "adamw_bnb_8bit"}).recipe.optim.name == "adamw8bit"
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "zero_optimization": 3}
    found = translated(sgd).recipe.optim
    assert (found.options, found.max_grad_norm, found.weight_decay) == ({"momentum": 0.9}, None, 0.0)
    assert translated(sgd | {"gradient_clipping": "auto"}).recipe.optim.max_grad_norm == 1.0
    unsaid = {key: value for key, value in LLAMA_FACTORY.items() if key != "finetuning_type"}
    assert translated(unsaid).recipe.lora.active
    some = AXOLOTL | {"lora_target_modules": ["q_proj"]}
    assert translated(some).recipe.lora.target_modules == ()
    assert translated(some | {"lora_target_linear": False}).recipe.lora.target_modules == ("q_proj",)
    torchs = translated(AXOLOTL | {"optimizer": "torch.optim.Adafactor"})
    assert "scales its rate by the weights" in why(torchs, "optimizer")
    found = translated(LLAMA_FACTORY | {"eval_strategy": "epoch", "quantization_bit": 4})
    assert found.recipe.train.evals_per_epoch == 1
    assert "add model.stored_as=nf4 and memory.nvme=[DIR]" in why(found, "quantization")
    assert translated(LLAMA_FACTORY | {"dataset_dir": "elsewhere"}).recipe.data.files == ("identity", "mine")


def test_values_that_a_recipe_refuses_are_left_out_and_named(folder: Path) -> None:
    found = translated(
        ARGUMENTS | {"learning_rate": -1, "lr_scheduler_type": "polynomial", "adam_epsilon": "small",
                     "save_steps": 0.1, "save_strategy": "steps", "warmup_steps": {"a": 1}, "nonsense": 3,
                     "report_to": [{}, 3]}
    )  # fmt: skip
    assert found.recipe.optim.lr == Recipe().optim.lr
    assert why(found, "optim.lr") == "got -1; wanted float, 0 to 1,000,000"
    assert "got 'polynomial'; wanted constant | cosine | linear" in why(found, "optim.schedule")
    assert "got 'small'; wanted float" in why(found, "optim.eps")
    assert "got '0.1 steps'; wanted auto, or such as" in why(found, "checkpoint.every")
    assert "got {'a': 1}; wanted int" in why(found, "optim.warmup_steps")
    wrong = translated(AXOLOTL | {"datasets": [{"path": 3}, 4]})
    assert "got 3, which is no value that is known here" in why(wrong, "datasets.*.path")
    assert why(wrong, "datasets").startswith("not translated")
    assert why(found, "nonsense").startswith("not translated")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.yaml",
            "a: 1\nb: 2",
            "wanted a configuration of DeepSpeed, .* TrainingArguments; got the keys a, b",
        ),
        ("a.yaml", "- 1", r"wanted keys and values; got \[1\]"),
        ("a.yaml", "a: [", "not valid YAML or JSON"),
        ("none.yaml", None, "none.yaml: cannot be read"),
    ],
)
def test_a_file_that_is_of_no_tool_is_an_error(folder: Path, name: str, text: str, message: str) -> None:
    if text is not None:
        Path(name).write_text(text)
    with pytest.raises(RecipeError, match=message):
        translate(name)


def test_output_needs_a_source(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "--output", "made.yaml"]) == 1
    assert "--output is for --from" in capsys.readouterr().err


def test_rows_name_keys_that_there_are_and_tools_are_told_apart() -> None:
    known = keys_of(Recipe).keys()

    def keys(row: Any) -> Iterator[str]:
        """Yield the keys of a recipe that a row may set."""
        if isinstance(row, dict):
            for each in row.values():
                yield from each if isinstance(each, dict) else keys(each)
        elif not isinstance(row, Why) and " " not in row:
            for each in [row] if isinstance(row, str) else row:
                yield ".".join(each.split(".")[:2])

    for name, tool in tools().items():
        assert {key for row in tool.rows.values() for key in keys(row)} <= {*known, "_lora"}, name
        assert {*tool.defaults} <= {*tool.rows, *known}, name
    assert {*table()["values"]} <= known
    assert tool_of({}) == tool_of({"train": {}, "data": {}}) == ""
    assert tool_of({"zero_optimization": 3}) == "DeepSpeed"


def test_the_best_model_of_evaluations_after_each_epoch_is_kept(folder: Path) -> None:
    given = {"max_steps": -1, "num_train_epochs": 3, "eval_strategy": "epoch", "load_best_model_at_end": True}
    found = translated(ARGUMENTS | given | {"metric_for_best_model": "eval_accuracy", "bf16_full_eval": True})
    train = found.recipe.train
    assert (train.epochs, train.evals_per_epoch, train.keep_best) == (3, 1, "accuracy")
    assert why(found, "bf16_full_eval").startswith("not translated")


def test_what_a_file_does_not_name_is_not_looked_for(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0}')
    assert {key for key, _ in translate(str(file)).said if "=" in key} == set()
