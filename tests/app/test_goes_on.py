"""A run that is interrupted and started again is bitwise the run that was never interrupted."""

import json
import os
import shutil
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
from infinity.app.export import publish_run
from infinity.app.loop import BatchLoss, Loop
from infinity.app.runs import committed_step, list_runs, remove_runs
from infinity.app.train import train
from infinity.cli import main
from infinity.core.errors import CheckpointError, InfinityError, RecipeError
from infinity.observe.metrics import Summary, View
from infinity.partition import builder
from infinity.recipes.loading import load_recipe
from infinity.recipes.recipe import Recipe
from infinity.shards.journal import Journal
from tests.helpers.launch import ROOT, Ended, mark, start_ranks
from tests.helpers.limits import HANG_S, comes_true, hang
from tests.helpers.runs import small_units

__all__ = ["small_units"]  # a fixture
STEPS = 6
#: Stands for the end of a run.
SUMMARY_STEP = STEPS + 2
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
        f"memory.nvme=[{folder}/nvme]", "memory.host=64MiB", "durability.every=1", "model.n_layers=2",
        "model.d_model=16", "model.n_heads=2", "model.seq_len=16", f"train.steps={STEPS}",
        "train.batch_size=4", "train.accumulate=2", "train.eval_every=2", "train.eval_first=true",
        "train.threads=1", "train.dtype=fp32", "optim.lr=1e-2", "optim.schedule=cosine",
        "optim.warmup_steps=2", *overrides,
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    train(recipe(folder))
    return folder


#: What a run calls at the end of each forward pass, optimizer step and evaluation.
ENDS = {
    "loss": (BatchLoss, "sum"),
    "step": (infinity.optim.Optimizer, "report"),
    "evaluation": (View, "evaluated"),
}


def after_each(patch: pytest.MonkeyPatch, where: str, act: Callable[[int], object]) -> None:
    """Call ``act`` with the number of the step at the end of each forward pass, step or evaluation."""
    loops, run = list[Loop](), Loop.run
    owner, method = ENDS[where]
    done = getattr(owner, method)

    def running(self: Loop) -> None:
        loops.append(self)
        run(self)

    def acting(self: Any, *args: Any, **more: Any) -> Any:
        result = done(self, *args, **more)
        if loops and (where != "step" or "loss" in more):  # other reports are of no step
            act(loops[-1].step)
        return result

    patch.setattr(Loop, "run", running)
    patch.setattr(owner, method, acting)


def stop(patch: pytest.MonkeyPatch, where: str, step: int, error: BaseException) -> None:
    """Raise at the end of a forward pass ("loss"), of an optimizer step or an evaluation, in one step."""

    def act(now: int) -> None:
        if now == step:
            raise error

    after_each(patch, where, act)


#: Where it stops, and the step that is kept: a step is committed when the next one has begun.
STOPS = [
    pytest.param("loss", 4, 3, marks=pytest.mark.always),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (
            ("evaluation", 4, 3),
            ("loss", 1, 0),
            ("loss", 2, 1),
            ("step", 3, 2),
            ("step", STEPS, STEPS - 1),
        )
    ),
]


@pytest.mark.parametrize(("where", "step", "kept"), STOPS)
def test_the_same_recipe_goes_on_bitwise(
    tmp_path: Path, whole: Path, where: str, step: int, kept: int
) -> None:
    # Only a signal waits for the record that is being written.
    error = InfinityError("x") if where == "evaluation" else KeyboardInterrupt()
    with pytest.MonkeyPatch.context() as patch:
        stop(patch, where, step, error)
        with pytest.raises(type(error)):
            train(recipe(tmp_path))
    [note] = error.__notes__
    if kept:
        [listed] = list_runs(tmp_path / "runs")
        assert (listed.state, listed.step, bool(listed.directories)) == ("interrupted", kept, True)
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
    assert train(recipe(tmp_path)) is None  # a job that is started again


def interrupt(folder: Path, *overrides: str, step: int = 4, where: str = "loss") -> None:
    """Train until the first forward pass of ``step`` has begun, or to another place in it."""
    with pytest.MonkeyPatch.context() as patch:
        stop(patch, where, step, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            train(recipe(folder, *overrides))


def test_budgets_and_the_number_of_steps_may_change_and_the_schedule_follows(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(tmp_path, f"train.steps={STEPS - 2}", "optim.schedule=constant")
    # what was made until now is the same: warm-up does not depend on the number of steps
    summary = train(recipe(tmp_path, "optim.schedule=constant", "memory.host=1MiB", "memory.resident=false"))
    assert summary is not None
    assert [line["lr"] for line in metrics(tmp_path) if line["kind"] == "step"] == [1e-2] * STEPS
    assert capsys.readouterr().err == ""
    other = tmp_path / "cosine"
    other.mkdir()
    interrupt(other, "train.steps=20")
    train(recipe(other, "observe.progress=true"))
    said = capsys.readouterr().err
    assert "goes on after step 3, where the run was interrupted" in said
    assert "train.steps was 20, is 6: from here on the learning rate follows optim.schedule=cosine" in said
    rates = [line["lr"] for line in metrics(other) if line["kind"] == "step"]
    assert rates[2] != metrics(whole)[4]["lr"]
    assert rates[3:] == [line["lr"] for line in metrics(whole) if line["kind"] == "step"][3:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "override",
    [
        "train.schedule=layer",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("train.dtype=fp16", "optim.max_grad_norm=null")
        ),
    ],
)
def test_other_ways_to_train_go_on_bitwise(tmp_path: Path, override: str) -> None:
    parts = []
    for name in ("whole", "parts"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "parts":
            interrupt(folder, override, "train.eval_every=null", "run.save=false")
        train(recipe(folder, override, "train.eval_every=null"))
        parts.append((metrics(folder), model(folder / "runs/one/model")))
    assert parts[0][0] == parts[1][0]
    assert same(parts[0][1], parts[1][1])


@pytest.mark.parametrize(
    "override",
    [
        pytest.param("lora.rank=null", id="all weights", marks=pytest.mark.slow),
        pytest.param("lora.rank=4", id="adapters"),
    ],
)
def test_a_fine_tune_goes_on_bitwise_and_its_last_commit_can_be_exported(
    tmp_path: Path, override: str
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes)).save_pretrained(tmp_path / "base")
    size = {"model.n_layers", "model.d_model", "model.n_heads"}
    more = [override, "lora.dropout=0.1", f"model.path={tmp_path}/base", "data.tokenizer=bytes"]
    more += ["memory.host=1MiB", "memory.resident=false"]  # a frozen base is read where it lies
    found = {}
    for name in ("whole", "parts"):
        given = [
            word for word in words(tmp_path, f"run.name={name}", *more) if word.partition("=")[0] not in size
        ]
        if name == "parts":
            with pytest.MonkeyPatch.context() as patch:
                stop(patch, "loss", 4, KeyboardInterrupt())
                with pytest.raises(KeyboardInterrupt):
                    train(load_recipe(overrides=given))
            publish_run(tmp_path / "runs/parts", tmp_path / "out")
        train(load_recipe(overrides=given))
        [kept] = [path for path in (tmp_path / "runs" / name).iterdir() if path.is_dir()]
        found[name] = metrics(tmp_path, name), load_file(next(kept.glob("*.safetensors")))
    assert found["whole"][0] == found["parts"][0]
    assert same(found["whole"][1], found["parts"][1])
    exported = load_file(next((tmp_path / "out").glob("*.safetensors")))
    assert exported.keys() == found["whole"][1].keys()
    assert not same(exported, found["whole"][1])


def test_a_run_that_was_interrupted_while_it_saved_its_model_saves_it(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = infinity.export

    def full(*args: Any, **options: Any) -> None:
        export(*args, **options)
        raise InfinityError("the drive is full")

    monkeypatch.setattr(infinity, "export", full)
    with pytest.raises(InfinityError, match="the drive is full"):
        train(recipe(tmp_path))
    monkeypatch.undo()
    monkeypatch.setattr(builder, "TARGET_SHARD_NBYTES", 8000)
    train(recipe(tmp_path))
    assert metrics(tmp_path) == metrics(whole)
    assert same(model(tmp_path / "runs/one/model"), model(whole / "runs/one/model"))


def test_resume_needs_no_recipe_and_an_unnamed_run_is_kept_too(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "recipe.yaml").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        stop(patch, "loss", 4, KeyboardInterrupt())
        assert main(["train", str(tmp_path / "recipe.yaml"), *words(tmp_path, "run.name=null")]) == 130
    [folder] = (tmp_path / "runs").iterdir()
    said = capsys.readouterr().err
    assert said.startswith("infinity: interrupted; the run's files are closed\nstep 3 of 6 is kept (")
    assert f"To go on: infinity resume {folder}; to remove it: infinity runs {tmp_path}/runs --remove" in said
    assert main(["resume", str(folder), "optim.lr=1"]) == 1
    assert "optim.lr was 0.01, is 1.0" in capsys.readouterr().err
    assert main(["resume", str(folder), "memory.host=1MiB"]) == 0
    assert metrics(tmp_path, folder.name) == metrics(whole)
    assert same(model(folder / "model"), model(whole / "runs/one/model"))


def test_an_interrupted_run_can_be_exported_and_still_goes_on(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(tmp_path)
    run, out = tmp_path / "runs/one", tmp_path / "out"
    before = (run / "metrics.jsonl").read_bytes(), (run / "recipe.yaml").read_bytes()
    assert main(["export", str(run), str(out)]) == 0
    assert capsys.readouterr().out == f"exported the model of {run} after step 3 to {out}\n"
    assert ((run / "metrics.jsonl").read_bytes(), (run / "recipe.yaml").read_bytes()) == before
    other = tmp_path / "other"
    other.mkdir()
    interrupt(other, f"run.dir={other}/runs", f"memory.nvme=[{other}/nvme]", step=4)
    train(recipe(tmp_path))
    assert metrics(tmp_path) == metrics(whole)
    assert same(model(run / "model"), model(whole / "runs/one/model"))
    # what was exported are the weights after step 3: those with which step 4 begins
    resumed = recipe(other, "train.steps=3", "optim.schedule=cosine")
    train(resumed)
    assert same(model(out), model(other / "runs/one/model"))


def test_a_run_of_which_nothing_was_committed_cannot_be_exported(tmp_path: Path) -> None:
    interrupt(tmp_path, step=1)
    with pytest.raises(CheckpointError, match="interrupted before its first step was committed"):
        publish_run(tmp_path / "runs/one", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_data_or_another_batch_is_refused_and_the_run_can_still_go_on(
    tmp_path: Path, whole: Path
) -> None:
    interrupt(tmp_path)
    other = tmp_path / "other.txt"
    other.write_text("a lazy dog\n" * 300)
    with pytest.raises(InfinityError, match="the saved position has tokens="):
        train(recipe(tmp_path, f"data.files={other}"))
    with pytest.raises(
        RecipeError, match=r"interrupted with train\.batch_size=4, train\.accumulate=2 and ranks: 1; now"
    ):
        train(recipe(tmp_path, "train.batch_size=8", "train.accumulate=1"))
    train(recipe(tmp_path))
    assert metrics(tmp_path) == metrics(whole)


def test_with_never_nothing_is_kept(tmp_path: Path) -> None:
    interrupt(tmp_path, "run.resume=never")
    assert list((tmp_path / "nvme").iterdir()) == []
    with pytest.raises(RecipeError, match=r"nothing to go on from: with run\.resume=never no step is kept"):
        train(recipe(tmp_path))


def test_a_run_whose_drive_is_its_own_folder_goes_on_and_is_removed(tmp_path: Path, whole: Path) -> None:
    """memory.nvme may be run.dir: then the folder has the states, too."""
    place = f"memory.nvme=[{tmp_path}/runs]"
    interrupt(tmp_path, place)
    [run] = list_runs(tmp_path / "runs")
    assert (run.state, run.step, list(run.directories)) == ("interrupted", 3, [tmp_path / "runs/one"])
    train(recipe(tmp_path, place))
    assert metrics(tmp_path) == metrics(whole)
    assert not list((tmp_path / "runs/one").glob("rank*"))
    interrupt(tmp_path, place, "run.name=two")
    asked: list[str] = []
    assert remove_runs(tmp_path / "runs", ["two"], lambda line: not asked.append(line))
    assert "(interrupted, step 3/6), with " in asked[0]
    assert not (tmp_path / "runs/two").exists()


# --- processes that end --------------------------------------------------------------------------


def on_node(folder: Path, node: int) -> list[str]:
    """Settings of a rank that is a node, with a drive of its own."""
    return [f"memory.nvme=[{folder}/node{node}]", "partition.ranks_per_node=1", "durability.copies=2"]


def command(folder: str, slow_step: int, nodes: bool = False) -> int:
    """Run ``infinity train`` in a rank; in ``slow_step`` the last rank says so, and goes no further."""
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1

    def hold(step: int) -> None:
        if is_last and step == slow_step and torch.is_grad_enabled():
            mark("there")
            hang()

    def die(self: Summary, path: Path) -> None:
        time.sleep(3)  # the other rank has come to its end
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "TARGET_SHARD_NBYTES", 8000)
        after_each(patch, "loss", hold)
        if slow_step == SUMMARY_STEP:
            patch.setattr(Summary, "write", die)
        given = words(Path(folder), "partition.timeout_s=200", "observe.progress=true")
        given += on_node(Path(folder), int(os.environ["RANK"])) if nodes else []
        return main(["train", f"{folder}/recipe.yaml", *given])


def run(
    folder: Path,
    world_size: int,
    *,
    slow_step: int = STEPS + 1,
    kill: Callable[[Any], object] = lambda ranks: None,
    settings: str = "",
    nodes: bool = False,
) -> list[Ended]:
    """Run the command on some ranks; ``kill`` is called in ``slow_step``, when the step before is kept."""
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(settings)
    words(folder)  # writes the data
    given = recipe(folder, *(on_node(folder, 0) if nodes else []))
    with start_ranks(command, world_size, str(folder), slow_step, nodes, group=False) as ranks:
        if slow_step <= STEPS:
            ranks.reached("there", world_size - 1)
            assert comes_true(lambda: committed_step(given, "one") == slow_step - 1)
            kill(ranks)
        return ranks.wait()


@pytest.fixture(scope="module")
def whole_on_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on two ranks that was never interrupted."""
    folder = tmp_path_factory.mktemp("two")
    assert [end.result for end in run(folder, 2)] == [0, 0]
    return folder


@pytest.mark.slow
def test_a_run_whose_first_node_and_its_drives_are_lost_goes_on(tmp_path: Path, whole_on_two: Path) -> None:
    def kill(ranks: Any) -> None:
        for rank in range(2):
            ranks.kill(rank)
        shutil.rmtree(tmp_path / "node0")

    run(tmp_path, 2, slow_step=5, kill=kill, nodes=True)
    assert [end.result for end in run(tmp_path, 2, nodes=True)] == [0, 0]
    assert metrics(tmp_path) == metrics(whole_on_two)
    assert same(*(model(folder / "runs/one/model") for folder in (tmp_path, whole_on_two)))
    assert not list(tmp_path.glob("node*/one"))


@pytest.mark.slow
def test_a_run_that_is_killed_before_its_summary_is_written_goes_on_on_all_ranks(
    tmp_path: Path, whole_on_two: Path
) -> None:
    ends = run(tmp_path, 2, slow_step=SUMMARY_STEP)
    assert [end.exit_code for end in ends] == [-signal.SIGKILL, 0], ends
    assert ends[1].result == 1
    assert [end.result for end in run(tmp_path, 2)] == [0, 0]
    assert metrics(tmp_path) == metrics(whole_on_two)
    assert same(model(tmp_path / "runs/one/model"), model(whole_on_two / "runs/one/model"))


@pytest.mark.parametrize(
    "killed", [[0, 1], pytest.param([1], marks=pytest.mark.slow)], ids=["all ranks", "one rank"]
)
def test_a_killed_run_goes_on_bitwise_on_two_ranks(
    tmp_path: Path, whole_on_two: Path, killed: list[int]
) -> None:
    ends = run(tmp_path, 2, slow_step=4, kill=lambda ranks: [ranks.kill(rank) for rank in killed])
    assert [end.exit_code for end in ends if end.rank in killed] == [-signal.SIGKILL] * len(killed)
    if killed == [1]:
        assert (ends[0].result, "PeerError: " in ends[0].traceback) == (1, True), ends[0]
        assert "step 3 of 6 is kept" in ends[0].traceback
    [listed] = list_runs(tmp_path / "runs")
    assert (listed.state, listed.step) == ("interrupted", 3)
    ends = run(tmp_path, 2)
    assert [end.result for end in ends] == [0, 0], ends
    assert metrics(tmp_path) == metrics(whole_on_two)
    assert same(model(tmp_path / "runs/one/model"), model(whole_on_two / "runs/one/model"))
    assert list((tmp_path / "nvme").iterdir()) == []


def only_rank_0_commits(folder: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            patch.setattr(Journal, "add", lambda *_: None)
        return command(folder, 2)


def test_a_run_whose_first_step_only_some_ranks_had_recorded_begins_anew(
    tmp_path: Path, whole_on_two: Path
) -> None:
    (tmp_path / "recipe.yaml").touch()
    given = recipe(tmp_path)  # writes the data
    with start_ranks(only_rank_0_commits, 2, str(tmp_path), group=False) as ranks:
        ranks.reached("there", 1)
        assert comes_true(lambda: committed_step(given, "one") == 1)
        for rank in range(2):
            ranks.kill(rank)
        ranks.wait()
    ends = run(tmp_path, 2)
    assert [end.result for end in ends] == [0, 0], ends
    assert "before all ranks had recorded a step: it begins anew" in ends[0].traceback
    assert metrics(tmp_path) == metrics(whole_on_two)  # with one evaluation before the first step


@pytest.mark.slow
def test_a_killed_run_whose_tokens_are_made_while_it_trains_goes_on_bitwise(tmp_path: Path) -> None:
    """Its steps are of two windows, and it is killed in the second."""
    settings, kill = "data: {streaming: true, shuffle_buffer: 1KiB}", lambda ranks: [*map(ranks.kill, (0, 1))]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert [end.result for end in run(whole, 2, settings=settings)] == [0, 0]
    ends = run(parts, 2, slow_step=4, kill=kill, settings=settings)
    assert [end.exit_code for end in ends] == [-signal.SIGKILL] * 2
    assert [end.result for end in run(parts, 2, settings=settings)] == [0, 0]
    assert metrics(parts) == metrics(whole)
    assert same(model(parts / "runs/one/model"), model(whole / "runs/one/model"))


@pytest.mark.parametrize(
    ("number", "code"),
    [
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((signal.SIGINT, 130), (signal.SIGTERM, 143))
        ),
        (signal.SIGUSR1, 75),
    ],
    ids=lambda v: str(v),
)
def test_a_stop_signal_keeps_the_last_step_and_says_how_to_go_on(
    tmp_path: Path, whole: Path, number: signal.Signals, code: int
) -> None:
    [end] = run(tmp_path, 1, slow_step=4, kill=lambda ranks: ranks.kill(0, number))
    assert end.result == code, end
    assert "step 3 of 6 is kept" in end.traceback
    assert "Traceback" not in end.traceback
    if number == signal.SIGUSR1:
        train(recipe(tmp_path))
        assert metrics(tmp_path) == metrics(whole)
        assert same(model(tmp_path / "runs/one/model"), model(whole / "runs/one/model"))


@pytest.mark.slow
def test_ctrl_c_twice_on_two_ranks_keeps_the_last_step(tmp_path: Path, whole_on_two: Path) -> None:
    """As torchrun does it: a terminal's Ctrl-C reaches all processes, and the launcher sends another one."""

    def kill(ranks: Any) -> None:
        for _ in range(2):
            for rank in range(2):
                ranks.kill(rank, signal.SIGINT)
            time.sleep(0.02)

    ends = run(tmp_path, 2, slow_step=4, kill=kill)
    assert [end.result for end in ends] == [130, 130], ends
    assert "step 3 of 6 is kept" in ends[0].traceback
    assert [end.result for end in run(tmp_path, 2)] == [0, 0]
    assert metrics(tmp_path) == metrics(whole_on_two)
    assert same(*(model(folder / "runs/one/model") for folder in (tmp_path, whole_on_two)))


def test_a_run_goes_on_with_another_number_of_ranks_and_says_what_a_step_takes(tmp_path: Path) -> None:
    interrupt(tmp_path)
    ends = run(tmp_path, 2)
    assert [end.result for end in ends] == [0, 0], ends
    assert "goes on after step 3" in ends[0].traceback
    assert "a step takes 16 sequences on 2 ranks; it took 8 on 1" in ends[0].traceback
    tokens = [line["tokens"] for line in metrics(tmp_path) if line["kind"] == "step"]
    assert tokens == [128] * 3 + [256] * 3


#: ``python -m infinity``, in which rank 1 kills itself once.
_DIES_ONCE = """
import os, signal, sys
from infinity import cli
from infinity.app.loop import BatchLoss, Loop
from infinity.partition import builder
builder.TARGET_SHARD_NBYTES = 8000
done, run, loops = BatchLoss.__call__, Loop.run, []
def loss(self, batch):
    result = done(self, batch)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and os.environ["RANK"] == "1" and loops and loops[0].step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
def running(self):
    loops.append(self)
    run(self)
BatchLoss.__call__, Loop.run = loss, running
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_torchrun_restarts_a_run_of_which_a_rank_died_and_it_goes_on_bitwise(
    tmp_path: Path, whole_on_two: Path
) -> None:
    (tmp_path / "program.py").write_text(_DIES_ONCE)
    (tmp_path / "recipe.yaml").touch()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [str(tmp_path / "program.py"), "train", str(tmp_path / "recipe.yaml"), *words(tmp_path)]
    done = subprocess.run(
        [*launcher, "--max-restarts", "2", *program],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "failed (exitcode: -9) local_rank: 1" in done.stderr
    assert metrics(tmp_path) == metrics(whole_on_two)
    assert same(model(tmp_path / "runs/one/model"), model(whole_on_two / "runs/one/model"))
