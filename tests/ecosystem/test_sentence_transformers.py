"""Sentence-transformers' trainer logs what it logs without infinity."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

import infinity
from tests.helpers.tokenizers import write_tokenizer

st = pytest.importorskip("sentence_transformers")
parts = pytest.importorskip("sentence_transformers.models")
losses = pytest.importorskip("sentence_transformers.losses")
datasets = pytest.importorskip("datasets")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of what other packages do
]


def trained(folder: Path, base: Path, *, ours: bool) -> tuple[Any, list[float]]:
    first: Any = parts.Transformer(str(base), max_seq_length=32)
    if ours:
        places = ["train.dtype=fp32", f"memory.nvme=[{folder / 'drive'}]", "memory.host=64MiB"]
        recipe = infinity.load_recipe(overrides=places)
        first.model = infinity.from_pretrained(base, recipe, auto_class=BertModel)
    model = st.SentenceTransformer(modules=[first, parts.Pooling(32)], device="cpu")
    settings = st.SentenceTransformerTrainingArguments(
        str(folder / str(ours)), max_steps=4, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=1e-3, max_grad_norm=0.5, logging_steps=1, save_steps=2, report_to="none",
        disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    names = "anchor", "positive"
    data = datasets.Dataset.from_dict({name: [f"unit {i} {name} pool" for i in range(16)] for name in names})
    kind = infinity.trainer(st.SentenceTransformerTrainer) if ours else st.SentenceTransformerTrainer
    loss = losses.MultipleNegativesRankingLoss(model)
    trainer = kind(model, settings, train_dataset=data, loss=loss)
    trainer.train()
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_trainer_logs_what_it_logs_without_infinity(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tokenizer = write_tokenizer(base)
    tokenizer.pad_token, tokenizer.chat_template = tokenizer.eos_token, None
    for file in base.glob("chat_template*"):
        file.unlink()
    tokenizer.save_pretrained(base)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    dropout = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes, **dropout)).save_pretrained(base)
    _, plain = trained(tmp_path, base, ours=False)
    model, found = trained(tmp_path, base, ours=True)
    assert len(plain) == 4
    assert found == pytest.approx(plain, abs=1e-6)
    texts = ["unit 3 anchor", "pool"]
    embedded = model.encode(texts)
    infinity.export(model[0].model, tmp_path / "exported", tokenizer=tokenizer)
    infinity.close(model)
    modules = [parts.Transformer(str(tmp_path / "exported")), parts.Pooling(32)]
    again = st.SentenceTransformer(modules=modules, device="cpu").encode(texts)
    assert again == pytest.approx(embedded, abs=1e-5)
