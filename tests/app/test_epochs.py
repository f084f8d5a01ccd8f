"""``train.epochs``: as many steps as the data has, a schedule over them, and a run that goes on."""

import json
import re
from pathlib import Path

import pytest

from infinity.app.train import train
from infinity.cli import main
from infinity.recipes.loading import load_recipe
from infinity.recipes.recipe import Recipe

SMALL = ("model.n_layers=1", "model.d_model=16", "model.n_heads=1")


def recipe(tmp_path: Path, *overrides: str) -> Recipe:
    rows = [{"prompt": f"{i}", "completion": "x"} for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return load_recipe(
        overrides=[
            "model.seq_len=16", "train.dtype=fp32", "train.batch_size=3", "train.accumulate=2",
            "data.packing=false", "data.eval_fraction=0",
            f"data.files={tmp_path}/a.jsonl", f"data.cache={tmp_path}/cache", f"run.dir={tmp_path}/runs",
            "run.name=one", "optim.schedule=linear", "optim.lr=0.5", "optim.min_lr_ratio=0.0",
            "observe.progress=false", *overrides,
        ]
    )  # fmt: skip


def steps_of(tmp_path: Path, name: str) -> list[tuple[int, float, float]]:
    lines = map(json.loads, (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["lr"]) for line in lines if "lr" in line]


def test_the_number_of_steps_follows_from_the_data(tmp_path: Path) -> None:
    # 20 documents are 6 micro-batches of 3, and steps take 2 of them: 4.5 steps, of which the last is whole
    assert train(recipe(tmp_path, "train.epochs=1.5", *SMALL)) is not None
    assert train(recipe(tmp_path, "train.steps=5", "run.name=two", *SMALL)) is not None
    assert len(steps_of(tmp_path, "one")) == 5
    assert steps_of(tmp_path, "one") == steps_of(tmp_path, "two")  # the schedule of the rate, too
    kept = load_recipe(tmp_path / "runs/one/recipe.yaml").train
    assert (kept.steps, kept.epochs) == (5, None)
    assert (
        train(recipe(tmp_path, "train.epochs=1.5", *SMALL)) is None
    )  # it is finished: nothing is left to do


def test_evaluations_may_be_counted_by_epochs(tmp_path: Path) -> None:
    more = ["train.epochs=2", "train.evals_per_epoch=1", "data.eval_fraction=0.1", "train.keep_best=loss"]
    train(recipe(tmp_path, *SMALL, *more))
    kept = load_recipe(tmp_path / "runs/one/recipe.yaml").train
    assert kept.evals_per_epoch is None
    assert kept.steps == 2 * kept.eval_every
    lines = map(json.loads, (tmp_path / "runs/one/metrics.jsonl").read_text().splitlines())
    assert [each["step"] for each in lines if each["kind"] == "evaluation"] == [kept.eval_every, kept.steps]
    assert (tmp_path / "runs/one/best").is_dir()


def test_several_adapters_go_through_the_data_that_is_longest(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from infinity.app.train import _with_steps
    from tests.helpers.models import build

    model = build("llama", seed=0)[0]()
    model.resize_token_embeddings(264)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "b.jsonl").write_text((json.dumps({"prompt": "b", "completion": "x"}) + "\n") * 60)
    given = recipe(
        tmp_path, "train.epochs=2", f"model.path={tmp_path}/model", "lora.rank=2", "data.tokenizer=bytes",
        f"adapters={{a: {{}}, b: {{data: {{files: {tmp_path}/b.jsonl}}}}}}",
    )  # fmt: skip
    found = _with_steps(given)
    assert found.steps == 20  # of 60 documents, 3 x 2 a step, twice
    assert _with_steps(found) == found


def test_a_plan_says_what_it_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.yaml").write_text("train: {epochs: 3}")
    assert main(["plan", str(tmp_path / "r.yaml"), "--on", "dgx-a100"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"a step takes .*; --tokens says what train\.epochs=3 take", said)
