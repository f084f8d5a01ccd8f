"""``infinity train`` with ``model.path`` trains the checkpoint's weights, as a loop of one's own does."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infinity.app.train import train
from infinity.core.errors import CheckpointError
from infinity.recipes.loading import load_recipe


@pytest.fixture
def trained(saved, tmp_path, monkeypatch):
    """A tiny Llama's checkpoint, and ``run(...)``: the losses of a short run on it."""
    monkeypatch.chdir(tmp_path)
    directory, _, _ = saved("llama")
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": "ABCABCABC" * 12}) + "\n" for _ in range(40)))
    threads, runs = torch.get_num_threads(), []

    def run(*overrides):
        recipe = load_recipe(
            overrides=[
                f"model.path={directory}", "model.seq_len=32", f"data.files=[{text}]", "data.tokenizer=bytes",
                "data.eval_fraction=0", "train.threads=1", "train.steps=3", "train.batch_size=2",
                "observe.progress=false", "run.save=false",
                f"run.dir={tmp_path}/{len(runs)}", *overrides,
            ]
        )  # fmt: skip
        runs.append(recipe)
        train(recipe)
        (metrics,) = Path(recipe.run.dir).glob("*/metrics.jsonl")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        return [line["loss"] for line in lines if line["kind"] == "step"]

    yield directory, run
    torch.set_num_threads(threads)


def test_recomputation_trains_the_same(trained):
    _, run = trained
    assert run() == run("memory.activations=recompute")


def test_a_new_part_is_drawn_from_the_seed_when_the_recipe_names_it(trained):
    directory, run = trained
    path = directory / "model.safetensors"
    tensors = load_file(path)
    del tensors["lm_head.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.new"):
        run()
    first = run("model.new=lm_head.*")
    assert first == run("model.new=lm_head.*")
    assert first != run("model.new=lm_head.*", "run.seed=1")


def test_a_missing_directory_is_an_error_that_names_it(trained, tmp_path):
    _, run = trained
    with pytest.raises(CheckpointError, match=r"none/config\.json: No such file"):
        run(f"model.path={tmp_path}/none")
