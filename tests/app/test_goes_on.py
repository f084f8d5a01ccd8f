"""A run that is interrupted and started again is bitwise the run that was never interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import infinity
from infinity.app.recipe import Recipe, load_recipe
from infinity.app.runs import list_runs
from infinity.app.train import Loop, publish_run, train
from infinity.cli import main
from infinity.core.errors import CheckpointError, InfinityError, RecipeError
from infinity.partition import builder

STEPS = 6
#: Figures that are bitwise those of an uninterrupted run; times and bytes are not.
EXACT = ("kind", "step", "loss", "lr", "grad_norm", "skipped", "tokens", "perplexity")


def words(folder: Path, *overrides: str) -> list[str]:
    """Overrides of a tiny run whose states lie on NVMe."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    return [
        f"run.dir={folder}/runs", "run.name=one", "run.save=true", "observe.progress=false",
        f"data.files={text}", f"data.cache={folder}/tokens", "data.eval_fraction=0.2",
        f"memory.nvme=[{folder}/nvme]", "memory.host=64MiB",
        "model.n_layers=2", "model.d_model=16", "model.n_heads=2", "model.seq_len=16", f"train.steps={STEPS}",
        "train.batch_size=4", "train.accumulate=2", "train.eval_every=2", "train.eval_first=true",
        "train.threads=1", "train.dtype=fp32", "optim.lr=1e-2", "optim.schedule=cosine", "optim.warmup_steps=2",
        *overrides,
    ]  # fmt: skip


def recipe(folder: Path, *overrides: str) -> Recipe:
    return load_recipe(overrides=words(folder, *overrides))


def metrics(folder: Path, name: str = "one") -> list[dict[str, Any]]:
    text = (folder / "runs" / name / "metrics.jsonl").read_text()
    return [{key: line.get(key) for key in EXACT} for line in map(json.loads, text.splitlines())]


def model(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture(autouse=True, scope="module")
def small_units() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "TARGET_SHARD_NBYTES", 8000)
        threads = torch.get_num_threads()
        yield
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    train(recipe(folder))
    return folder


def stop(patch: pytest.MonkeyPatch, method: str, step: int, error: BaseException) -> None:
    """Let a method of the loop raise at its end in one step, once."""
    done: Callable[..., Any] = getattr(Loop, method)

    def stopping(self: Loop, *args: Any) -> Any:
        result = done(self, *args)
        if self.step == step:
            raise error
        return result

    patch.setattr(Loop, method, stopping)


#: Where it stops, and the step that is kept: a step is committed when the next one has begun.
STOPS = [
    ("loss", 1, 0),
    ("loss", 2, 1),
    ("loss", 4, 3),
    ("_step", 3, 2),
    ("_evaluate", 4, 3),
    ("_step", STEPS, STEPS - 1),
]


@pytest.mark.parametrize(("where", "step", "kept"), STOPS)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), InfinityError("x")], ids=["Ctrl-C", "error"])
def test_the_same_recipe_goes_on_bitwise(
    tmp_path: Path, whole: Path, where: str, step: int, kept: int, error: BaseException
) -> None:
    error.__notes__ = []
    with pytest.MonkeyPatch.context() as patch:
        stop(patch, where, step, error)
        with pytest.raises(type(error)):
            train(recipe(tmp_path))
    [note] = error.__notes__ or [""]
    if kept:
        [listed] = list_runs(tmp_path / "runs")
        assert (listed.state, listed.step, listed.nbytes > 0) == ("interrupted", kept, True)
        assert f"step {kept} of {STEPS} is kept" in note
        assert f"infinity resume {tmp_path}/runs/one" in note
    with (tmp_path / "runs/one/metrics.jsonl").open("a") as torn:
        torn.write('{"kind": "step", "st')
    summary = train(recipe(tmp_path))
    assert summary is not None
    assert metrics(tmp_path) == metrics(whole)
    assert same(model(tmp_path / "runs/one/model"), model(whole / "runs/one/model"))
    before = json.loads((whole / "runs/one/summary.json").read_text())
    assert (summary.steps, summary.first_step) == (STEPS, 1)
    for name in ("first_loss", "last_loss", "first_held_out", "last_held_out"):
        assert getattr(summary, name) == before[name]
    assert list((tmp_path / "nvme").iterdir()) == []
    with pytest.raises(RecipeError, match="is finished after 6 steps"):
        train(recipe(tmp_path))
