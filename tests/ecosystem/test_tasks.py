"""``infinity train`` with a task of TRL's trainers gives the losses that TRL gives, step by step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

import infinity
from infinity.app.train import train
from tests.helpers.tokenizers import write_tokenizer

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of what other packages do
]

WORDS = ("unit", "shard", "tier", "fetch", "upload", "gather", "release", "evict", "extent", "buffer", "pool")
COUNT = 16


def words(seed: int, count: int) -> str:
    return " ".join(WORDS[(seed * 7 + at * (seed + 3)) % len(WORDS)] for at in range(count))


PAIRS = {
    "prompt": [f"{words(each, 2)}: " for each in range(COUNT)],
    "chosen": [words(each + 1, 1 + each % 3) for each in range(COUNT)],
    "rejected": [words(each + 5, 1 + (each + 1) % 3) for each in range(COUNT)],
}
JUDGED = {
    "prompt": PAIRS["prompt"],
    "completion": PAIRS["chosen"],
    "label": [each % 3 > 0 for each in range(COUNT)],
}
#: All examples in one batch, of packed rows, or of rows for each document.
WHOLE = {"per_device_train_batch_size": COUNT, "gradient_accumulation_steps": 1}
PACKED = ["train.batch_size=1", "train.accumulate=1", "model.seq_len=2048"]
ROWS = [f"train.batch_size={COUNT}", "train.accumulate=1", "data.packing=false"]
#: Of each task: TRL's name, its data, its settings, and those of a recipe.
TASKS: dict[str, tuple[str, dict[str, list[Any]], dict[str, Any], list[str]]] = {
    "dpo": ("DPO", PAIRS, {"beta": 0.2, **WHOLE}, ["train.beta=0.2", *PACKED]),
    "dpo-rows": ("DPO", PAIRS, {}, ["data.packing=false"]),
    "kto": ("KTO", JUDGED, {"desirable_weight": 1.5, **WHOLE}, ["train.desirable_weight=1.5", *PACKED]),
    "kto-rows": ("KTO", JUDGED, {**WHOLE}, ROWS),
    "reward": ("Reward", PAIRS, {}, []),
}
METRICS = {
    "dpo": ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
    "kto": ("rewards/chosen", "rewards/rejected", "kl"),
    "reward": ("accuracy", "margin"),
}


def with_trl(kind: str, data: dict[str, list[Any]], base: Path, out: Path, **more: Any) -> list[Any]:
    settings = getattr(trl, f"{kind}Config")(
        str(out), **({"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2} | more),
        max_steps=4, learning_rate=1e-3, lr_scheduler_type="constant", weight_decay=0.1, adam_beta2=0.95,
        max_grad_norm=1.0, logging_steps=1, report_to="none", disable_tqdm=True, use_cpu=True, bf16=False,
        save_strategy="no", max_length=128, train_sampling_strategy="sequential",
    )  # fmt: skip
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.eos_token
    scores = kind == "Reward"
    cls: Any = LlamaForSequenceClassification if scores else LlamaForCausalLM
    model = cls.from_pretrained(base, dtype=torch.float32)
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model, args=settings, train_dataset=datasets.Dataset.from_dict(data), processing_class=tokenizer
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("case", TASKS)
def test_a_task_has_the_losses_of_trl(case: str, tmp_path: Path) -> None:
    kind, data, settings, more = TASKS[case]
    task, base = case.partition("-")[0], tmp_path / "base"
    tokenizer = write_tokenizer(base)
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": 256,
        "pad_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    torch.manual_seed(0)
    scores = {"num_labels": 1} if kind == "Reward" else {}
    cls: Any = LlamaForSequenceClassification if scores else LlamaForCausalLM
    cls(LlamaConfig(**sizes, **scores)).save_pretrained(base)
    plain = with_trl(kind, data, base, tmp_path / "trl", **settings)
    lines = [dict(zip(data, values)) for values in zip(*data.values())]
    if task == "kto":  # which mismatches with the line before
        lines.reverse()
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    recipe = infinity.load_recipe(
        overrides=[
            f"model.path={base}", f"train.task={task}", f"data.files={tmp_path / 'data.jsonl'}",
            f"run.dir={tmp_path}", "run.name=ours", f"data.cache={tmp_path / 'cache'}", "model.seq_len=64",
            "data.eval_fraction=0", "data.shuffle=false", "train.batch_size=2", "train.accumulate=2",
            "train.steps=4", "train.dtype=fp32", "optim.lr=1e-3", "train.eval_every=null",
            "observe.progress=false", *more,
        ]
    )  # fmt: skip
    train(recipe)
    ours = [json.loads(line) for line in (tmp_path / "ours" / "metrics.jsonl").read_text().splitlines()]
    assert len(ours) == len(plain) == 4
    for found, wanted in zip(ours, plain, strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
        for name in METRICS[task]:
            assert found["metrics"][name] == pytest.approx(wanted[name], abs=2e-5)
