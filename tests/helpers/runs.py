"""A tiny run of the command line's trainer, and what it wrote."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.app.train import train
from tests.helpers import training


@pytest.fixture(autouse=True, scope="module")
def small_units() -> Iterator[None]:
    """Where it is imported, models are cut into several units, and threads that runs set are put back."""
    threads = torch.get_num_threads()
    with training.small_units(8000):
        yield
    torch.set_num_threads(threads)


def metrics_of(folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    """The lines of a tiny run's metrics file: three steps of a recipe, and evaluations."""
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    run = [
        f"run.dir={folder}", f"run.name={name}", "observe.progress=false", f"data.files={text}",
        f"data.cache={folder}/tokens", "model.n_layers=2", "model.d_model=16", "model.n_heads=2",
        "model.seq_len=16", "train.steps=3", "train.batch_size=2", "train.accumulate=2", "train.threads=1",
        "train.dtype=fp32", f"memory.nvme={folder}/nvme", "memory.resident=false",
        "memory.host=400KiB", "train.eval_every=2",
    ]  # fmt: skip
    train(infinity.load_recipe(overrides=[*run, *overrides]))
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
