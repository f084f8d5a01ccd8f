"""A run keeps its trained model when it is asked to, and ``infinity export`` publishes it."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import infinity
from infinity.app.export import publish_run
from infinity.app.runs import write_recipe
from infinity.app.train import train
from infinity.cli import main
from infinity.core.errors import CheckpointError, DiskError
from infinity.recipes.loading import load_recipe
from infinity.recipes.recipe import Recipe
from tests.app.test_goes_on import stop
from tests.helpers import quantized
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


def test_a_run_of_a_quantized_checkpoint_is_exported_in_its_stored_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a finished run, and of an interrupted one; the tokenizer is copied, and the line has the error."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    monkeypatch.delenv("RANK", raising=False)
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    base = tmp_path / "base"
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes)).save_pretrained(base)
    write_tokenizer(base)
    quantized.fp8(base)
    given = recipe(tmp_path, f"model.path={base}", "durability.every=1", sizes=())
    with pytest.MonkeyPatch.context() as patch:
        stop(patch, "loss", 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            train(given)
    run = tmp_path / "runs/one"
    said = (
        r"\(14 weights in FP8, relative error 0\.0\d+ in the mean, 0\.0\d+ at most, of model\.layers\.\S+\)"
    )
    for out, when in (("first", " after step 1"), ("second", "")):
        if not when:
            train(given)
            capsys.readouterr()
        assert main(["export", str(run), str(tmp_path / out), "--stored"]) == 0
        printed = capsys.readouterr().out
        assert re.fullmatch(rf"exported the model of {run}{when} {said} to {tmp_path / out}\n", printed), (
            printed
        )
        stored = load_file(tmp_path / out / "model.safetensors")
        before = load_file(base / "model.safetensors")
        assert {key: tensor.dtype for key, tensor in stored.items()} == {
            key: tensor.dtype for key, tensor in before.items()
        }
        assert AutoTokenizer.from_pretrained(tmp_path / out).apply_chat_template(CHAT, tokenize=False)
        tuned = LlamaForCausalLM.from_pretrained(tmp_path / out, dtype=torch.bfloat16)
        for key, value in load_file(run / "model/model.safetensors").items() if not when else ():
            assert torch.allclose(tuned.state_dict()[key].float(), value.float(), rtol=0.1, atol=2e-3), key


@pytest.mark.parametrize(
    ("override", "what"),
    [("lora.rank=2", "trained adapters"), ("model.path=null", "trained a new model")],
)
def test_a_run_without_a_stored_form_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, what: str
) -> None:
    run = tmp_path / "runs/one"
    run.mkdir(parents=True)
    write_recipe(recipe(tmp_path, "model.path=somewhere", override, sizes=()), run)
    assert main(["export", str(run), str(tmp_path / "out"), "--stored"]) == 1
    said = capsys.readouterr().err
    assert what in said
    assert "export without --stored" in said
    assert main(["export", str(tmp_path), str(tmp_path / "out"), "--stored"]) == 1
    assert "wanted the folder of a run" in capsys.readouterr().err


def test_files_in_folders_of_a_kept_model_come_with_it_in_either_form(tmp_path: Path) -> None:
    quantized.write("gpt_oss", like := tmp_path / "like")
    model = infinity.from_pretrained(like, load_recipe(overrides=["memory.host=64MiB"]))
    infinity.export(model, kept := tmp_path / "run/model")
    infinity.close(model)
    (kept / "notes/of/training").mkdir(parents=True)
    (kept / "notes/of/training/one.txt").write_text("one")
    write_recipe(recipe(tmp_path, f"model.path={like}", sizes=()), tmp_path / "run")
    (tmp_path / "run/summary.json").write_text("{}")  # it is finished
    for out, stored in ((tmp_path / "plain", False), (tmp_path / "stored", True)):
        publish_run(tmp_path / "run", out, stored=stored)
        assert (out / "notes/of/training/one.txt").read_text() == "one"
    (kept / "config.json").unlink()
    for stored in (False, True):
        with pytest.raises(CheckpointError, match=rf"{kept} holds no config.json"):
            publish_run(tmp_path / "run", tmp_path / "never", stored=stored)
    assert not (tmp_path / "never").exists()
