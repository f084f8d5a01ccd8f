"""Directories of the built-in GPT are read back; and of models that ``infinity train`` cannot train."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import infinity
from infinity import CheckpointError, RecipeError
from infinity.app import train as train_module
from infinity.app.train import train
from infinity.recipes.models import GPT
from tests.helpers import models, training, zoo


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A directory of a GPT, and its weights."""
    factory, _ = models.build("gpt", seed=1)
    model = training.build(factory, "bf16", training.streaming(tmp_path / "first"))
    infinity.export(model, tmp_path / "gpt")
    weights = infinity.state_dict(model)
    infinity.close(model)
    return tmp_path / "gpt", weights


def recipe(folder: Path, *overrides: str) -> infinity.Recipe:
    """A short run on a text of letters."""
    text = folder / "text.txt"
    text.write_text("ABCDEFGH" * 400)
    return infinity.load_recipe(
        overrides=[
            f"data.files=[{text}]", f"data.cache={folder}/cache", f"run.dir={folder}/runs", "train.threads=1",
            "train.steps=2", "train.batch_size=2", "model.seq_len=12",
            "observe.progress=false", *overrides,
        ]
    )  # fmt: skip


def test_a_gpt_is_read_back_bitwise_and_trains_on(exported, tmp_path):
    directory, weights = exported
    with training.small_units():
        model = infinity.from_pretrained(
            directory, training.recipe("bf16", training.streaming(tmp_path / "nvme"))
        )
    assert type(model) is GPT
    assert not model.training
    assert model.config.n_layers == 3
    got = infinity.state_dict(model)
    assert set(got) == set(weights)
    assert all(torch.equal(got[key], value) for key, value in weights.items())
    _, batch = models.build("gpt", seed=1)
    optimizer = infinity.AdamW(model.train(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(**batch(0)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    infinity.close(model)


def test_a_run_goes_on_from_what_an_earlier_run_exported(tmp_path, monkeypatch):
    threads = torch.get_num_threads()
    sizes = ["model.n_layers=2", "model.d_model=32", "model.n_heads=2"]
    train(recipe(tmp_path, *sizes, "run.name=first", "run.save=true"))
    first = tmp_path / "runs/first/model"
    summary = train(
        recipe(tmp_path, f"model.path={first}", "run.name=second", "memory.activations=recompute")
    )
    torch.set_num_threads(threads)
    assert summary is not None
    one, two = load_file(first / "model.safetensors"), tmp_path / "runs/second/model/model.safetensors"
    assert {k: v.shape for k, v in one.items()} == {k: v.shape for k, v in load_file(two).items()}
    assert any(not torch.equal(one[key], value) for key, value in load_file(two).items())


def test_what_does_not_fit_a_gpt_is_listed(exported, tmp_path):
    directory, weights = exported
    wrong = {f"{key}s" if key == "norm.weight" else key: value for key, value in weights.items()}
    save_file(wrong, directory / "model.safetensors")
    for new in ((), ("norm.*",)):  # a GPT draws its weights when it is built, and only then
        with pytest.raises(CheckpointError, match=r"missing.*\n +norm\.weight\n.*unknown.*\n +norm\.weights"):
            infinity.from_pretrained(directory, training.recipe("bf16", ["memory.host=64MiB"]), new=new)
    for change, named in (
        ({"n_heads": 5}, "n_heads"),
        ({"n_heads": "many"}, "n_heads: got 'many'; wanted int"),
        ({"n_layers": -1}, "n_l"),
    ):
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(CheckpointError, match=rf"config\.json: .*{named}"):
            infinity.from_pretrained(directory, training.recipe("bf16", ["memory.host=64MiB"]))
        (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="GPTConfig has no depth"):
        infinity.from_pretrained(directory, training.recipe("bf16", ["memory.host=64MiB"]), depth=3)


def test_sequences_longer_than_a_gpt_was_built_for_are_refused_before_it_is_loaded(exported, tmp_path):
    directory, _ = exported
    with pytest.raises(RecipeError, match=r"built for at most 12 tokens per sequence; set model\.seq_len=12"):
        train(recipe(tmp_path, f"model.path={directory}", "model.seq_len=13"))


@pytest.mark.parametrize("name", ["bert", "t5", "vit", "whisper"])
def test_a_model_of_another_kind_is_refused_from_its_config_alone(name, tmp_path, monkeypatch):
    def never(*args: Any, **kwargs: Any) -> None:
        pytest.fail("a weight or the data was read")

    monkeypatch.setattr(train_module, "open_data", never)
    monkeypatch.setattr(infinity, "from_pretrained", never)
    model: Any = zoo.build(name, seed=0)[0]()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path / name)  # and no weights
    with pytest.raises(RecipeError, match=rf"model\.path: {type(model).__name__} does not predict next"):
        train(recipe(tmp_path, f"model.path={tmp_path / name}"))
    model.config.architectures = None
    model.config.save_pretrained(tmp_path / name)
    with pytest.raises(RecipeError, match=r"model\.path: \w+ does not predict next tokens"):
        train(recipe(tmp_path, f"model.path={tmp_path / name}"))
