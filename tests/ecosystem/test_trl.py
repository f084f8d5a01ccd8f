"""Each trainer of TRL logs what it logs without infinity, with all weights trained and with adapters."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, TrainerCallback

import infinity
from tests.helpers.launch import ROOT, run_ranks, start_ranks
from tests.helpers.tokenizers import write_tokenizer

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of what other packages do
]

TEXT = [
    line.strip()
    for file in sorted(Path(pytest.__file__).parent.glob("*.py"))
    for line in file.read_text(encoding="utf-8").splitlines()
    if 20 < len(line.strip()) < 60
]
COUNT = 16
FIRST, SECOND, THIRD = (TEXT[start * COUNT : (start + 1) * COUNT] for start in range(3))
DATA: dict[str, dict[str, list[Any]]] = {
    "SFT": {"text": FIRST},
    "DPO": {"prompt": FIRST, "chosen": SECOND, "rejected": THIRD},
    "Reward": {"prompt": FIRST, "chosen": SECOND, "rejected": THIRD},
    "KTO": {"prompt": FIRST, "completion": SECOND, "label": [each % 2 == 0 for each in range(COUNT)]},
    "GRPO": {"prompt": FIRST},
    "RLOO": {"prompt": FIRST},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "SFT": {"max_length": 64},
    "DPO": {"max_length": 64},
    "Reward": {"max_length": 128},
    "KTO": {"max_length": 64, "per_device_train_batch_size": 4},
    "GRPO": {
        "num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 8, "beta": 0.1,
    },
    "RLOO": {
        "num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 8, "beta": 0.1,
    },
}  # fmt: skip


def vowels(completions: list[str], **_: Any) -> list[float]:
    """Return rewards that differ between samples."""
    return [float(sum(letter in "aeiou" for letter in each)) for each in completions]


class Base:
    """A checkpoint of a small model with its tokenizer, and trainers of it."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self.path = folder / "base"
        self.tokenizer = write_tokenizer(self.path)
        sizes = {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "vocab_size": len(self.tokenizer), "pad_token_id": self.tokenizer.pad_token_id,
            "eos_token_id": self.tokenizer.eos_token_id,
        }  # fmt: skip
        self.model: Any = LlamaForSequenceClassification if kind == "Reward" else LlamaForCausalLM
        torch.manual_seed(0)
        self.model(LlamaConfig(**sizes, **({"num_labels": 1} if kind == "Reward" else {}))).save_pretrained(
            self.path
        )

    def trained(self, *, ours: bool, adapters: bool, callbacks: Any = (), run: str = "", **more: Any) -> Any:
        """Train in ``ours`` or in TRL's own trainer, in a run with a name if ``run`` gives it one."""
        settings = getattr(trl, f"{self.kind}Config")(
            str(self.folder / ("ours" if ours else "plain")), max_steps=3, gradient_accumulation_steps=2,
            **({"per_device_train_batch_size": 2, "save_strategy": "no"} | SETTINGS[self.kind] | more),
            learning_rate=1e-3, max_grad_norm=0.5, logging_steps=1, report_to="none", disable_tqdm=True,
            use_cpu=True, bf16=False, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4,
            ddp_backend="gloo" if "RANK" in os.environ else None,
        )  # fmt: skip
        kind = getattr(trl, f"{self.kind}Trainer")
        if ours:
            places = ["train.dtype=fp32", f"memory.nvme=[{self.folder / 'drive'}]"]
            model = infinity.from_pretrained(
                self.path, infinity.load_recipe(overrides=[*places, *([f"run.name={run}"] if run else [])]),
                frozen=adapters, auto_class=self.model,
            )  # fmt: skip
            kind = infinity.trainer(kind)
        else:
            model = self.model.from_pretrained(self.path, dtype=torch.float32)
        given: dict[str, Any] = {"reward_funcs": vowels} if self.kind in ("GRPO", "RLOO") else {}
        if adapters:
            given["peft_config"] = LoraConfig(
                r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian",
                task_type="SEQ_CLS" if self.kind == "Reward" else "CAUSAL_LM",
            )  # fmt: skip
        torch.manual_seed(1)
        data = datasets.Dataset.from_dict(DATA[self.kind])
        trainer = kind(
            model=model, args=settings, train_dataset=data, eval_dataset=data.select(range(8)),
            processing_class=self.tokenizer, callbacks=[*callbacks], **given,
        )  # fmt: skip
        trainer.train()
        return trainer


def close(trainer: Any) -> None:
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            infinity.close(model)


def logged(trainer: Any) -> list[dict[str, float]]:
    timed = "runtime", "per_second", "time"
    return [
        {
            name: value for name, value in entry.items()
            if isinstance(value, float) and not any(word in name for word in timed)
        }
        for entry in trainer.state.log_history
    ]  # fmt: skip


def assert_alike(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert len(wanted) == 6  # of three steps, two evaluations and the end
    for ours, plain in zip(found, wanted, strict=True):
        assert ours == pytest.approx(plain, abs=2e-5, rel=1e-6)
        for loss in ("loss", "eval_loss"):
            assert ours.get(loss, 0) == pytest.approx(plain.get(loss, 0), abs=1e-6)


@pytest.mark.parametrize("adapters", [False, True], ids=["all", "adapters"])
@pytest.mark.parametrize("kind", DATA)
def test_a_trainer_logs_what_it_logs_without_infinity(kind: str, adapters: bool, tmp_path: Path):
    base = Base(tmp_path, kind)
    plain = base.trained(ours=False, adapters=adapters)
    ours = base.trained(ours=True, adapters=adapters)
    assert_alike(logged(ours), logged(plain))
    ours.save_model(str(tmp_path / "saved"))
    names = {each.name for each in (tmp_path / "saved").iterdir()}
    assert ("adapter_model.safetensors" if adapters else "model.safetensors") in names
    reference = getattr(ours, "ref_model", None)
    assert (reference is not None) == (not adapters and kind in ("DPO", "KTO", "GRPO", "RLOO"))
    close(ours)


def on_a_rank(folder: str, kind: str, ours: bool, how: str) -> list[dict[str, float]]:
    """Train in this process; ``how``: with a run's name, saving each step, or killed in its second step."""
    run: dict[str, Any] = {} if not how else {"run": "mine", "save_strategy": "steps", "save_steps": 1}
    killed = [Killer()] if how == "killed" else []
    trainer = Base(Path(folder), kind).trained(ours=ours, adapters=False, callbacks=killed, **run)
    if ours:
        close(trainer)
    return logged(trainer)


class Killer(TrainerCallback):
    """Ends the process after its second backward of the second step, as the system would."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("kind", DATA)
def test_two_ranks_log_what_ddp_logs(kind: str, tmp_path: Path):
    given = [(on_a_rank, 2, str(tmp_path), kind, ours, "") for ours in (True, False)]
    ours, plain = (run_ranks(*each, group=False) for each in given)
    for own, theirs in zip(ours, plain, strict=True):
        assert_alike(own, theirs)


@pytest.mark.parametrize("kind", DATA)
def test_a_killed_trainer_goes_on_bitwise(kind: str, tmp_path: Path):
    whole, again = tmp_path / "whole", tmp_path / "again"
    [wanted] = run_ranks(on_a_rank, 1, str(whole), kind, True, "", group=False)
    with start_ranks(on_a_rank, 1, str(again), kind, True, "killed", group=False) as ranks:
        assert [end.exit_code for end in ranks.wait()] == [-signal.SIGKILL]
    [found] = run_ranks(on_a_rank, 1, str(again), kind, True, "named", group=False)
    assert found[:-1] == wanted[:-1]  # the last has the mean over the steps of its own process


def test_reference_values_are_computed_before_training(tmp_path: Path):
    base = Base(tmp_path, "DPO")
    plain = base.trained(ours=False, adapters=False, precompute_ref_log_probs=True)
    ours = base.trained(ours=True, adapters=False, precompute_ref_log_probs=True)
    for found, wanted in zip(logged(ours), logged(plain), strict=True):
        assert found == pytest.approx(wanted, abs=2e-5, rel=1e-6)
    infinity.close(ours.model)


def test_adapters_that_are_there_before_are_not_copied_for_a_reference(tmp_path: Path):
    base = Base(tmp_path, "DPO")
    places = ["train.dtype=fp32", f"memory.nvme=[{tmp_path / 'drive'}]"]
    recipe = infinity.load_recipe(overrides=places)
    model = infinity.add_lora(infinity.from_pretrained(base.path, recipe, frozen=True), rank=4)
    settings = trl.DPOConfig(str(tmp_path / "out"), use_cpu=True, bf16=False, report_to="none")
    data = datasets.Dataset.from_dict(DATA["DPO"])
    with pytest.raises(infinity.StateError, match=r"would copy the model's adapters as 'ref'.*peft_config"):
        infinity.trainer(trl.DPOTrainer)(
            model=model, args=settings, train_dataset=data, processing_class=base.tokenizer
        )
    infinity.close(model)


def test_the_snippet_of_the_docs_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = (ROOT / "docs/training_loops.md").read_text(encoding="utf-8")
    (code,) = (each for each in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "SFTTrainer" in each)
    base = Base(tmp_path, "SFT")
    short = 'SFTConfig("out", max_steps=2, use_cpu=True, bf16=False, report_to="none"'
    for name, own in (
        ("Qwen3-30B-A3B-FP8", base.path), ("/mnt/nvme0", tmp_path / "drive"), ('SFTConfig("out"', short),
    ):  # fmt: skip
        assert name in code
        code = code.replace(name, str(own))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"dataset": datasets.Dataset.from_dict(DATA["SFT"])}
    exec(code, names)
    assert names["trainer"].state.global_step == 2
    assert (tmp_path / "out/checkpoint-2/adapter_model.safetensors").is_file()
    close(names["trainer"])
