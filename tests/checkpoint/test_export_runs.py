"""A run keeps its trained model when it is asked to, and ``infinity export`` publishes it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import infinity
from infinity.app.recipe import Recipe, load_recipe
from infinity.app.train import train
from infinity.cli import main
from infinity.core.errors import DiskError
from tests.helpers.tokenizers import write_tokenizer

CHAT = [{"role": "user", "content": "the?"}, {"role": "assistant", "content": "the abc"}]
SIZES = ("model.n_layers=1", "model.d_model=16", "model.n_heads=2")


def recipe(folder: Path, *overrides: str, sizes: tuple[str, ...] = SIZES) -> Recipe:
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    small = [
        f"run.dir={folder}/runs", "run.name=one", "observe.progress=false", f"data.files={text}",
        f"data.cache={folder}/tokens", f"memory.nvme=[{folder}/nvme]", "memory.host=64MiB",
        "model.seq_len=16", "train.steps=2", "optim.lr=1e-2",
        "train.batch_size=2", "train.eval_every=null", "train.threads=1", "train.dtype=bf16",
    ]  # fmt: skip
    return load_recipe(overrides=[*small, *sizes, *overrides])


def test_a_run_keeps_its_model_only_when_asked_and_export_publishes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(recipe(tmp_path, "run.name=none"))
    assert not (tmp_path / "runs/none/model").exists()
    assert main(["export", str(tmp_path / "runs/none"), str(tmp_path / "out")]) == 1
    assert "no folder model; wanted the folder of a run" in capsys.readouterr().err

    trained: dict[str, torch.Tensor] = {}
    close = infinity.close
    monkeypatch.setattr(
        infinity, "close", lambda m, **how: (trained.update(infinity.state_dict(m)), close(m))
    )
    train(recipe(tmp_path, "run.save=true"))
    kept = load_file(tmp_path / "runs/one/model/model.safetensors")
    assert kept.keys() == trained.keys()
    assert all(torch.equal(kept[key], value) for key, value in trained.items())

    assert main(["export", str(tmp_path / "runs/one"), str(tmp_path / "out")]) == 0
    assert "exported" in capsys.readouterr().out
    published = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(published[key], value) for key, value in trained.items())
    assert json.loads((tmp_path / "out/config.json").read_text())["d_model"] == 16
    assert main(["export", str(tmp_path / "runs/one"), str(tmp_path / "out")]) == 1
    assert "exists and is not empty" in capsys.readouterr().err


def test_a_tuned_model_is_kept_with_its_tokenizer_and_is_what_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    first = LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes))
    first.save_pretrained(tmp_path / "base")
    tokenizer = write_tokenizer(tmp_path / "base")
    train(recipe(tmp_path, f"model.path={tmp_path}/base", sizes=()))
    out = tmp_path / "runs/one/model"
    assert AutoTokenizer.from_pretrained(out).apply_chat_template(
        CHAT, tokenize=False
    ) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    tuned = AutoModelForCausalLM.from_pretrained(out)
    assert (type(tuned), tuned.dtype) == (LlamaForCausalLM, torch.bfloat16)
    same = [n for n, p in tuned.named_parameters() if torch.equal(p.float(), first.get_parameter(n))]
    assert same == []


def test_a_run_whose_model_will_not_fit_ends_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    from infinity.app.loop import Loop

    def never(self: Loop) -> None:
        raise AssertionError("a step was made")

    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=10))
    monkeypatch.setattr(Loop, "run", never)
    with pytest.raises(DiskError, match="finding room for the trained model"):
        train(recipe(tmp_path, "run.save=true"))
