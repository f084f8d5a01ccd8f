"""``train.task``, the best model, early stopping and held-out sets, from the recipe to the export."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from infinity.app import train as train_module
from infinity.app.export import publish_run
from infinity.app.loop import BEST_FOLDER, REFERENCE, Best, Loop, best_of, best_steps
from infinity.app.train import train
from infinity.cli import main
from infinity.core.errors import CheckpointError, RecipeError
from infinity.observe.metrics import Evaluation, Summary
from infinity.recipes.loading import load_recipe
from infinity.recipes.recipe import Recipe
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks, start_ranks

pytestmark = [  # what peft itself says to users of plain PyTorch
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

STEPS = 6
#: Figures that are bitwise those of an uninterrupted run.
EXACT = ("kind", "step", "loss", "grad_norm", "skipped", "tokens", "metrics")
#: Keys of each task beside those of all.
TASKS = {
    "dpo": ["train.task=dpo", "data.files=pairs.jsonl"],
    "kto": ["train.task=kto", "data.files=judged.jsonl"],
    "reward": ["train.task=reward", "data.files=pairs.jsonl", "data.packing=null"],
    "classify": ["train.task=classify", "data.files=labelled.jsonl", "data.packing=null"],
}
WORDS = ["unit", "shard", "tier", "fetch", "upload"]


def words(seed: int) -> str:
    return " ".join(WORDS[(seed * 3 + at) % len(WORDS)] for at in range(1 + seed % 3))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base and data of each task."""
    folder = tmp_path_factory.mktemp("place")
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    rows: dict[str, list[dict[str, Any]]] = {"pairs": [], "judged": [], "labelled": []}
    for each in range(24):
        good, prompt = each % 2 == 0, f"{words(each)}: "
        rows["pairs"].append({"prompt": prompt, "chosen": f"a {words(each)}", "rejected": f"b {words(each)}"})
        rows["judged"].append({"prompt": prompt, "completion": words(each), "label": good})
        rows["labelled"].append({"text": f"{'a' if good else 'b'} {words(each)}", "label": int(good)})
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def recipe(place: Path, folder: Path, task: str, *overrides: str) -> Recipe:
    given = [each.replace("data.files=", f"data.files={place}/") for each in TASKS[task]]
    return load_recipe(
        overrides=[
            f"run.dir={folder}/runs", "run.name=one", "observe.progress=false", f"model.path={place}/base",
            "data.tokenizer=bytes", f"data.cache={place}/tokens", "data.eval_fraction=0.25",
            f"memory.nvme=[{folder}/nvme]", "memory.host=64MiB", "durability.every=1", "model.seq_len=64",
            f"train.steps={STEPS}", "train.batch_size=2", "train.accumulate=2", "train.eval_every=2",
            "train.threads=1", "train.dtype=fp32", "train.schedule=step", "optim.lr=1e-2", *given, *overrides,
        ]
    )  # fmt: skip


def lines(folder: Path, kind: str = "") -> list[dict[str, Any]]:
    found = map(json.loads, (folder / "runs/one/metrics.jsonl").read_text().splitlines())
    return [{key: line.get(key) for key in EXACT} for line in found if kind in line["kind"]]


def same(a: Path, b: Path) -> bool:
    one, other = load_file(a), load_file(b)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_learned_and_its_metrics_are_kept(task: str, place: Path, tmp_path: Path) -> None:
    summary = train(recipe(place, tmp_path, task, "train.keep_best=loss"))
    assert isinstance(summary, Summary)
    first, *_, last = lines(tmp_path, "evaluation")
    assert last["loss"] < first["loss"]
    assert last["loss"] == summary.last_held_out
    assert last["metrics"] == summary.metrics != {}
    assert summary.last_perplexity is None
    best = min(lines(tmp_path, "evaluation"), key=lambda line: line["loss"])["step"]
    assert best_steps(tmp_path / "runs/one" / BEST_FOLDER)[-1] == best
    publish_run(tmp_path / "runs/one", tmp_path / "out", best=True)
    trained = tmp_path / "runs/one/model/model.safetensors"
    assert same(tmp_path / "out/model.safetensors", trained) == (best == STEPS)
    cls: Any = LlamaForCausalLM if task in ("dpo", "kto") else LlamaForSequenceClassification
    model, info = cls.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    if cls is LlamaForSequenceClassification:
        assert (model.config.num_labels, model.config.pad_token_id) == (1 if task == "reward" else 2, 0)


@pytest.mark.parametrize("packing", ["true", "false"])
def test_the_reference_is_the_model_before_the_first_step(packing: str, place: Path, tmp_path: Path) -> None:
    more = ["train.eval_first=true", f"data.packing={packing}"]
    train(recipe(place, tmp_path, "dpo", *more, "train.steps=1", "train.eval_every=1"))
    first, step, _ = lines(tmp_path)
    assert first["metrics"]["rewards/margins"] == step["metrics"]["rewards/margins"] == 0
    assert step["loss"] == pytest.approx(0.6931, abs=1e-4)


def test_packed_pairs_have_the_losses_of_pairs_alone(place: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    more = ["data.shuffle=false", "train.steps=3", "data.eval_fraction=0", "train.eval_every=null"]
    packed = ["data.packing=true", "model.seq_len=4096", "train.batch_size=1", "train.accumulate=1"]
    rows = ["data.packing=false", "train.batch_size=24", "train.accumulate=1"]
    train(recipe(place, tmp_path / "a", "dpo", *more, *packed))
    train(recipe(place, tmp_path / "b", "dpo", *more, *rows))
    for one, other in zip(lines(tmp_path / "a"), lines(tmp_path / "b"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["metrics"] == pytest.approx(other["metrics"], abs=1e-4)


@pytest.mark.parametrize("task", few(["kto"], ["dpo", "kto"]))
def test_the_layer_schedule_has_the_losses_of_the_ordinary_one(
    task: str, place: Path, tmp_path: Path
) -> None:
    for name in ("step", "layer"):
        (tmp_path / name).mkdir()
        train(recipe(place, tmp_path / name, task, f"train.schedule={name}", "train.steps=3"))
    for one, other in zip(lines(tmp_path / "step"), lines(tmp_path / "layer"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["metrics"] == pytest.approx(other["metrics"], abs=1e-4)


def dies(folder: str, place: str, task: str, overrides: list[str], step: int) -> None:
    """Train, and be killed when ``step`` has been evaluated, before it is committed."""
    seen = Loop._evaluate

    def evaluate(self: Loop, at: int) -> None:
        seen(self, at)
        if at == step:
            os.kill(os.getpid(), signal.SIGKILL)

    Loop._evaluate = evaluate  # type: ignore[method-assign]
    train(recipe(Path(place), Path(folder), task, *overrides))


@pytest.mark.parametrize("more", few([[]], [[], ["lora.rank=4"]]), ids=["all", "adapters"])
def test_a_killed_run_goes_on_bitwise_with_its_reference_and_its_best(
    more: list[str], place: Path, tmp_path: Path
) -> None:
    overrides = ["train.keep_best=rewards/margins", "train.patience=9", *more]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    train(recipe(place, whole, "dpo", *overrides))
    with start_ranks(dies, 1, str(killed), str(place), "dpo", overrides, 4) as ranks:
        (end,) = ranks.wait()
    assert end.exit_code == -signal.SIGKILL
    assert best_steps(killed / "runs/one" / BEST_FOLDER) == [2, 4]
    reference = (killed / "runs/one" / REFERENCE).stat().st_mtime_ns
    train(recipe(place, killed, "dpo", *overrides))
    assert lines(killed) == lines(whole)
    assert (killed / "runs/one" / REFERENCE).stat().st_mtime_ns == reference  # it is not computed again
    file = "adapters/adapter_model.safetensors" if more else "model/model.safetensors"
    assert same(killed / "runs/one" / file, whole / "runs/one" / file)
    steps = best_steps(whole / "runs/one" / BEST_FOLDER)
    assert best_steps(killed / "runs/one" / BEST_FOLDER) == steps == [4, 6]
    for step in steps:
        best = f"runs/one/{BEST_FOLDER}/step-{step}/{file}"
        assert same(killed / best, whole / best)


def test_steps_that_need_more_of_the_reference_are_refused(place: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "write_model", lambda *_, **__: 1 / 0)  # at its end
        with pytest.raises(ZeroDivisionError):
            train(recipe(place, tmp_path, "dpo", "train.steps=2", "data.packing=false"))
    with pytest.raises(
        RecipeError, match=r"train\.task=dpo: for \d+ sequences it is not known.*train\.steps"
    ):
        train(recipe(place, tmp_path, "dpo", "train.steps=4", "data.packing=false"))


def test_adapters_know_their_reference_at_any_step(place: Path, tmp_path: Path) -> None:
    more = ["data.packing=false", "lora.rank=4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "write_model", lambda *_, **__: 1 / 0)  # at its end
        with pytest.raises(ZeroDivisionError):
            train(recipe(place, tmp_path, "dpo", "train.steps=2", *more))
    train(recipe(place, tmp_path, "dpo", "train.steps=4", *more))
    (tmp_path / "whole").mkdir()
    train(recipe(place, tmp_path / "whole", "dpo", "train.steps=4", *more))
    assert lines(tmp_path, "step") == lines(tmp_path / "whole", "step")


def test_training_ends_when_nothing_gets_better(place: Path, tmp_path: Path) -> None:
    more = ["train.patience=2", "train.eval_every=1", "optim.lr=0", "train.keep_best=loss"]
    summary = train(recipe(place, tmp_path, "reward", *more))
    assert summary is not None
    assert summary.steps == 3  # the first is the best, and two are as good
    assert best_steps(tmp_path / "runs/one" / BEST_FOLDER) == [1]
    assert train(recipe(place, tmp_path, "reward", *more)) is None  # it is finished


def test_each_held_out_set_has_figures_of_its_own(place: Path, tmp_path: Path) -> None:
    sets = f"data.eval_sets={{easy: [{place}/labelled.jsonl], hard: [{tmp_path}/hard.jsonl]}}"
    given = [json.loads(line) for line in (place / "labelled.jsonl").read_text().splitlines()]
    hard = [{**row, "label": 1 - row["label"]} for row in given]
    (tmp_path / "hard.jsonl").write_text("\n".join(map(json.dumps, hard)))
    (tmp_path / "mine.jsonl").write_text((place / "labelled.jsonl").read_text())
    more = [sets, f"data.files={tmp_path}/mine.jsonl", "train.keep_best=easy/accuracy"]
    train(recipe(place, tmp_path, "classify", *more))
    *_, last = lines(tmp_path, "evaluation")
    assert set(last["metrics"]) == {
        f"{name}/{each}" for name in ("easy", "hard") for each in ("loss", "accuracy")
    }
    assert last["metrics"]["easy/accuracy"] + last["metrics"]["hard/accuracy"] == pytest.approx(1)
    assert last["metrics"]["easy/loss"] < last["metrics"]["hard/loss"]
    mean = (last["metrics"]["easy/loss"] + last["metrics"]["hard/loss"]) / 2
    assert last["loss"] == pytest.approx(mean)


@pytest.mark.parametrize(
    ("task", "override", "message"),
    [
        ("dpo", "train.keep_best=accuracy", r"train\.keep_best: got 'accuracy'.*loss, rewards/chosen"),
        ("dpo", "train.eval_every=null", r"train\.patience: got 3; wanted null without evaluations"),
        ("reward", "data.packing=true", r"packing: got True.*scores whole documents"),
        ("classify", "model.num_labels=1", r"num_labels: the data has labels up to 1.*num_labels=2"),
        ("dpo", "train.sample_prompts=none.txt", r"train\.sample_prompts: none\.txt: No such file"),
        ("kto", "data.files=labelled.jsonl", r"labelled\.jsonl:1: .*wanted 'prompt' and 'completion'"),
        ("classify", "data.files=pairs.jsonl", r"pairs\.jsonl:1: .*wanted 'text'"),
    ],
)  # fmt: skip
def test_what_a_task_cannot_use_is_said_before_weights_are_read(
    task: str, override: str, message: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(train_module, "built")
    override = override.replace("data.files=", f"data.files={place}/")
    with pytest.raises(
        Exception if "files" in override or "prompts" in override else RecipeError, match=message
    ):
        train(recipe(place, tmp_path, task, "train.patience=3", override))


def test_a_new_model_of_ours_scores_no_documents(place: Path, tmp_path: Path) -> None:
    given = recipe(place, tmp_path, "reward")
    with pytest.raises(RecipeError, match=r"train\.task=reward scores whole documents.*model\.path"):
        train(load_recipe(overrides=["train.task=reward", f"data.files={place}/pairs.jsonl",
                                     f"run.dir={tmp_path}", "data.tokenizer=bytes"]))  # fmt: skip
    assert given.train.task == "reward"


def on_two(folder: str, place: str, task: str) -> Any:
    return train(recipe(Path(place), Path(folder), task, "train.batch_size=1", "train.keep_best=loss"))


@pytest.mark.parametrize("task", few(["kto"], ["kto", "classify"]))
def test_two_ranks_have_the_losses_of_one(task: str, place: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    train(recipe(place, tmp_path / "one", task))
    run_ranks(on_two, 2, str(tmp_path / "two"), str(place), task)
    for one, other in zip(lines(tmp_path / "one"), lines(tmp_path / "two"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["metrics"] == pytest.approx(other["metrics"], abs=1e-4)
    assert best_steps(tmp_path / "two/runs/one" / BEST_FOLDER)


@pytest.mark.slow
def test_the_best_adapters_are_merged(place: Path, tmp_path: Path) -> None:
    train(recipe(place, tmp_path, "dpo", "lora.rank=4", "train.keep_best=loss"))
    main(["export", f"{tmp_path}/runs/one", f"{tmp_path}/best", "--best", "--merge"])
    main(["export", f"{tmp_path}/runs/one", f"{tmp_path}/last", "--merge"])
    assert same(tmp_path / "best/model.safetensors", tmp_path / "last/model.safetensors")


def test_a_run_without_a_best_model_says_so(place: Path, tmp_path: Path) -> None:
    train(recipe(place, tmp_path, "classify", "train.steps=1"))
    with pytest.raises(CheckpointError, match=r"keeps no best model: .*train\.keep_best"):
        publish_run(tmp_path / "runs/one", tmp_path / "out", best=True)


def follower(folder: Path, metric: str, patience: int | None = None) -> tuple[Best, list[str]]:
    said: list[str] = []
    given = load_recipe(overrides=[f"train.keep_best={metric}", f"train.patience={patience or 'null'}"])
    return Best(
        given, folder, lambda out: (out / "model").mkdir(parents=True), leads=True, say=said.append
    ), said


def test_a_best_model_stays_until_the_next_but_one(tmp_path: Path) -> None:
    best, said = follower(tmp_path, "accuracy", 2)
    for step, accuracy in enumerate((0.5, 0.6, 0.6, float("nan"), 0.9, 0.8, 0.8), start=1):
        best.seen(Evaluation(step, 1.0, metrics={"accuracy": accuracy}))
        if step == 4:
            assert best.is_over  # two evaluations were no better
    assert (best.step, best.value, best.since, best.is_over) == (5, 0.9, 2, True)
    assert best_steps(tmp_path / BEST_FOLDER) == [2, 5]
    assert said[-1].startswith("training ends after step 7: no better accuracy in 2 evaluations since step 5")


def test_the_best_loss_of_one_of_several_adapters_is_followed(tmp_path: Path) -> None:
    best, _ = follower(tmp_path, "poem/loss")
    for step, loss in enumerate((2.0, 1.0, 1.5), start=1):
        best.seen(Evaluation(step, 1.0 / step, {"poem": loss, "prose": 1.0 / step}))
    assert (best.step, best.value) == (2, 1.0)


def test_a_run_that_goes_on_forgets_best_models_of_steps_that_are_made_again(tmp_path: Path) -> None:
    best, _ = follower(tmp_path, "loss")
    for step in (1, 2):
        best.seen(Evaluation(step, 1.0 / step))
        state = best.state_dict() if step == 1 else state  # noqa: F821
    again, _ = follower(tmp_path, "loss")
    again.load_state_dict(state)
    assert best_steps(tmp_path / BEST_FOLDER) == [1]
    again.seen(Evaluation(2, 0.5))
    assert best_steps(tmp_path / BEST_FOLDER) == [1, 2]


def test_what_a_kill_left_of_a_best_model_is_none_and_is_written_again(tmp_path: Path) -> None:
    (tmp_path / BEST_FOLDER / "step-1/.model.0123abcd.part").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="keeps no best model"):
        best_of(tmp_path)
    best, _ = follower(tmp_path, "loss")
    best.load_state_dict(best.state_dict())
    best.seen(Evaluation(1, 0.5))
    assert (best_of(tmp_path) / "model").is_dir()
