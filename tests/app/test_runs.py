"""The folders of runs: which run a recipe names, what is refused and why, the list, the removal."""

import json
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from infinity.app.runs import (
    LOCK,
    METRICS,
    RECIPE,
    Run,
    find_run,
    how_to_go_on,
    interrupted_run,
    list_runs,
    opened,
    remove_runs,
)
from infinity.cli import main
from infinity.core.errors import ChangedFileError, InfinityError, LockedError, RecipeError, StateError
from infinity.core.files import lock_file
from infinity.data.sources import find_files
from infinity.observe.metrics import MetricsFile, StepReport
from infinity.recipes.loading import load_recipe
from infinity.recipes.recipe import Recipe, changed_numbers
from infinity.shards.journal import CommitRecord, Journal, RankFiles

REPORT = StepReport(step=1, loss=1.0, lr=1.0, grad_norm=1.0, skipped=False, step_s=1.0, tokens=1)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def recipe(*overrides: str) -> Recipe:
    drive = f"memory.nvme=[{Path('nvme').absolute()}]"
    return load_recipe(overrides=["run.name=mine", drive, "train.steps=9", *overrides])


def interrupt(given: Recipe, *, logged: int = 0, committed: int | None = None, name: str = "mine") -> Path:
    """Leave behind what a run does that was killed: its folder, and its directory on the drive."""
    folder = Path("runs", name)
    with opened(Run(given, folder)):
        pass
    metrics = MetricsFile(folder / METRICS)
    for step in range(1, logged + 1):
        metrics.step(
            StepReport(step=step, loss=1.0, lr=1.0, grad_norm=1.0, skipped=False, step_s=1.0, tokens=1)
        )
    metrics.close()
    if committed is not None:
        keep(Path("nvme", name), committed)
    return folder


def keep(directory: Path, step: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "rank0.lock").touch()
    (directory / "rank0.bin").write_bytes(b"x" * 8192)
    journal = Journal(directory, RankFiles(0))
    journal.append(CommitRecord(step))
    journal.close()


def refusal(given: Recipe) -> str:
    with pytest.raises(RecipeError) as raised:
        find_run(given)
    return str(raised.value)


# --- which run it is -------------------------------------------------------------------------------


def test_a_new_run_has_no_recipe_of_before() -> None:
    assert find_run(recipe()) == Run(recipe(), Path("runs/mine"))
    assert not Path("runs").exists()


def test_an_interrupted_run_is_gone_on_with_in_the_dtype_that_was_chosen() -> None:
    interrupt(recipe("train.dtype=bf16"), logged=3, committed=3)
    found = find_run(recipe("run.resume=must", "memory.host=1GiB", "train.steps=20"))
    assert found.before == recipe("train.dtype=bf16").with_absolute_paths()
    assert (found.recipe.train.dtype, found.recipe.train.steps) == ("bf16", 20)


def test_a_run_that_was_killed_before_its_first_commit_begins_anew_with_any_recipe() -> None:
    folder, other = interrupt(recipe(), logged=2), recipe("optim.lr=1")
    assert find_run(other) == Run(other, folder, lost=2)
    Path("nvme/mine").mkdir(parents=True)
    Path("nvme/mine/rank0.lock").touch()
    interrupt(recipe(), logged=7)  # with durability.every: what it would have recorded is there
    assert find_run(other) == Run(other, folder, lost=9)
    with opened(Run(other, Path("runs/mine"))):
        assert load_recipe("runs/mine/recipe.yaml") == other.with_absolute_paths()
    assert "interrupted before any step was kept" in refusal(recipe("run.resume=must"))


def test_a_run_that_was_killed_while_it_made_its_folder_begins() -> None:
    for name in ("", LOCK, f"{RECIPE}.new"):
        Path("runs/mine").mkdir(parents=True, exist_ok=True)
        if name:
            Path("runs/mine", name).touch()
        assert find_run(recipe()).before is None
    Path("runs/mine/thesis.tex").touch()
    assert "runs/mine exists, and is no run's folder" in refusal(recipe())


def test_a_recipe_with_which_a_run_has_not_gone_on_yet_is_not_kept_nor_tried_again() -> None:
    folder, refused = interrupt(recipe(), committed=3), recipe("train.accumulate=3")
    run = find_run(refused)  # how a step is divided is known when the commit is read
    with opened(run):
        assert load_recipe(folder / RECIPE) == recipe().with_absolute_paths()
    assert "To go on: infinity resume runs/mine;" in how_to_go_on(run, RecipeError("other sequences"))
    assert "run the same command again" in how_to_go_on(run, KeyboardInterrupt())
    assert "run the same command again" not in how_to_go_on(run, StateError("a data file is missing"))
    lost = how_to_go_on(run, ChangedFileError("nvme/mine/rank0-1-0.bin", "was removed"))
    assert lost == "to remove the run: infinity runs --remove mine"


def test_the_drives_of_a_run_are_found_from_any_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = interrupt(recipe("memory.nvme=[nvme]"), logged=7, committed=6).absolute()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert find_run(interrupted_run(folder)).before is not None
    assert remove_runs(folder.parent, ["mine"], lambda line: True)
    assert not Path("../nvme/mine").exists()


def test_the_model_and_the_data_of_a_run_are_found_from_any_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = Path.cwd()
    given = recipe("model.path=base", "data.files=[texts/*.txt,stdlib]", "data.tokenizer=bytes")
    folder = interrupt(given, logged=2, committed=2)
    assert find_run(given).before is not None  # the same names mean the same
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    found = interrupted_run(root / folder)
    assert found.model.path == str(root / "base")
    assert found.data.files == (str(root / "texts/*.txt"), "stdlib")
    assert found.data.tokenizer == "bytes"
    with pytest.raises(RecipeError, match=r"model\.path was .*base"):  # here it is another one
        find_run(replace(found, model=given.model))


def test_a_path_is_absolute_whatever_its_name_and_that_of_the_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = Path.cwd()
    for name in ("texts [1]", "runs ${mine}", "gone"):
        (root / name / "texts").mkdir(parents=True)
        (root / name / "texts" / "a.txt").touch()
    monkeypatch.chdir("texts [1]")
    given = load_recipe(overrides=[
        "memory.nvme=[bytes,stdlib]", "model.path=../bytes/../base", "data.tokenizer=./bytes",
        "data.files=[texts/*.txt,stdlib,./stdlib]", "data.eval_files=[stdlib]",
    ])  # fmt: skip
    made = given.with_absolute_paths()
    assert made.memory.nvme == (str(root / "texts [1]/bytes"), str(root / "texts [1]/stdlib"))
    assert made.model.path == str(root / "bytes/../base")  # bytes may be a link
    assert find_files(made.data.files[:1]) == (root / "texts [1]/texts/a.txt",)
    assert made.data.files[1:] == ("stdlib", str(root / "texts [1]/stdlib"))
    assert (made.data.eval_files, made.data.tokenizer) == (("stdlib",), str(root / "texts [1]/bytes"))
    assert made.with_absolute_paths() == made
    monkeypatch.chdir(root / "runs ${mine}")
    assert given.with_absolute_paths().memory == given.memory  # no recipe can name it
    monkeypatch.chdir(root / "gone")
    shutil.rmtree(root / "gone")
    assert given.with_absolute_paths() == given


def test_a_recipe_that_changes_numbers_is_refused_and_each_key_is_named() -> None:
    interrupt(recipe(), logged=3, committed=3)
    said = refusal(recipe("optim.lr=0.5", "run.seed=7", "model.n_heads=3", "memory.host=1GiB"))
    assert "interrupted at step 3" in said
    assert "run.seed was 0, is 7; model.n_heads was 6, is 3; optim.lr was 0.0003, is 0.5." in said
    assert "infinity runs --remove mine" in said


def test_budgets_and_views_change_no_numbers_and_the_rest_does() -> None:
    free = [
        "run.dir=x", "run.name=x", "run.save=true", "memory.device=1GiB", "memory.nvme=[]", "train.steps=3",
        "memory.engine=threads", "memory.activations=plan", "partition.timeout_s=5", "train.eval_every=7",
        "train.threads=2", "observe.timeline=true", "data.cache=x", "data.files=[x]",
    ]  # fmt: skip
    assert changed_numbers(recipe(), recipe(*free)) == []
    for override in (
        "train.dtype=bf16",
        "optim.schedule=cosine",
        "data.seed=1",
        "lora.alpha=3",
        "model.tied=true",
    ):
        key = override.partition("=")[0]
        [change] = changed_numbers(recipe(), recipe(override))
        assert change.startswith(f"{key} was ")
    assert changed_numbers(recipe("train.dtype=bf16"), recipe()) == []


@pytest.mark.parametrize("other", ["optim.name=lion", "optim.master=kahan", "optim.ema=0.9"])
def test_another_rule_may_have_other_numbers_but_no_other_clipping(other: str) -> None:
    assert changed_numbers(recipe(), recipe(other, "optim.lr=1e-5", "optim.schedule=cosine")) == []
    [change] = changed_numbers(recipe(), recipe(other, "optim.lr=1e-5", "optim.max_grad_norm=2"))
    assert change == "optim.max_grad_norm was 1.0, is 2.0"


def test_fewer_steps_than_were_made_are_refused() -> None:
    interrupt(recipe(), logged=7, committed=6)
    assert "train.steps: got 5; wanted at least 6" in refusal(recipe("train.steps=5"))
    assert find_run(recipe("train.steps=6")).before is not None


def test_never_and_must_are_obeyed() -> None:
    assert "run.resume=must: runs/mine is not an interrupted run" in refusal(recipe("run.resume=must"))
    interrupt(recipe(), logged=3, committed=3)
    said = refusal(recipe("run.resume=never"))
    assert "interrupted, and run.resume=never" in said
    assert "infinity runs --remove mine" in said


def test_a_finished_run_has_ended_and_is_refused_to_other_numbers_and_more_steps() -> None:
    folder = interrupt(recipe(), logged=9)
    (folder / "summary.json").write_text("{}")
    assert find_run(recipe()).ended
    assert "is finished" in refusal(recipe("optim.name=lion"))
    said = refusal(recipe("optim.lr=0.5"))
    assert "runs/mine is finished after 9 steps; give the run another name, or remove it" in said
    assert "removed then" not in said
    assert "train.steps=20 cannot go on from there" in refusal(recipe("train.steps=20"))
    (folder / "model").mkdir()
    assert "model.path=runs/mine/model" in refusal(recipe("train.steps=20"))
    assert "load_checkpoint" not in refusal(recipe("train.steps=20"))
    (folder / "checkpoints/latest").mkdir(parents=True)
    assert "infinity.load_checkpoint loads runs/mine/checkpoints/latest" in refusal(recipe("train.steps=20"))


def test_a_running_run_is_refused_and_named() -> None:
    with opened(Run(recipe(), Path("runs/mine"))):
        said = refusal(recipe())
        assert f"runs/mine is in use by process {os.getpid()} on " in said
        with pytest.raises(RecipeError, match="in use by"), opened(Run(recipe(), Path("runs/mine"))):
            raise AssertionError("two processes run it")
    assert find_run(recipe()).before is None


def test_a_run_that_was_finished_meanwhile_is_not_overwritten() -> None:
    found = find_run(recipe())
    (interrupt(recipe("train.steps=3")) / "summary.json").write_text("{}")
    with pytest.raises(RecipeError, match="finished after 3 steps"), opened(found):
        raise AssertionError("it was begun")
    assert load_recipe("runs/mine/recipe.yaml").train.steps == 3


def test_what_is_kept_elsewhere_or_not_at_all_is_no_reason_to_begin_anew() -> None:
    interrupt(recipe(), logged=7, committed=6)
    said = refusal(recipe("memory.nvme=[other]"))
    drive = Path("nvme").absolute()
    assert f"at step 6, and what it goes on from lies in {drive}/mine: give memory.nvme=[{drive}]" in said
    shutil.move("nvme", "other")
    assert find_run(recipe("memory.nvme=[other]")).before is not None
    shutil.rmtree("other")
    assert "interrupted after step 7, and there is nothing to go on from: no step is kept in /" in refusal(
        recipe()
    )


@pytest.mark.parametrize(
    ("override", "why"),
    [("memory.nvme=[]", "without memory.nvme"), ("memory.versions=1", "with memory.versions=1"),
     ("run.resume=never", "with run.resume=never")],
)  # fmt: skip
def test_a_run_that_kept_nothing_says_why(override: str, why: str) -> None:
    interrupt(recipe(override), logged=7)
    assert f"nothing to go on from: {why} no step is kept" in refusal(recipe())


def test_what_another_run_of_this_name_keeps_is_not_taken() -> None:
    keep(Path("nvme/mine"), 5)
    said = refusal(recipe())
    assert "memory.nvme keeps step 5 of an interrupted run mine, whose folder is not runs/mine" in said
    assert f"rm -r {Path('nvme').absolute()}/mine" in said
    assert find_run(recipe("run.resume=never")).before is None


def test_resume_takes_the_recipe_of_the_folder() -> None:
    interrupt(recipe("run.name=null", "run.resume=never", "train.dtype=fp32"), name="2026_1", committed=4)
    found = interrupted_run("runs/2026_1", ["memory.host=1GiB"])
    assert (found.run.name, found.run.dir, found.run.resume) == ("2026_1", "runs", "auto")
    assert (found.memory.host, found.train.dtype) == (2**30, "fp32")
    for wrong, what in (("runs", "no recipe.yaml"), ("none", "no such folder")):
        with pytest.raises(RecipeError, match=f"{wrong}: {what}; wanted the folder of a run"):
            interrupted_run(wrong)


# --- listing and removing --------------------------------------------------------------------------


def test_runs_are_listed_with_state_step_size_and_age(capsys: pytest.CaptureFixture[str]) -> None:
    interrupt(recipe(), logged=7, committed=6)
    finished = interrupt(recipe("run.name=done"), logged=9, name="done")
    (finished / "summary.json").write_text("{}")
    old = time.time() - 7300
    for path in (*finished.iterdir(), finished):
        os.utime(path, (old, old))
    Path("runs/tokens").mkdir()
    with opened(Run(recipe("run.name=live"), Path("runs/live"))):
        found = {run.folder.name: run for run in list_runs(Path("runs"))}
        assert [run.folder.name for run in list_runs(Path("runs"))][-1] == "done"
        assert main(["runs"]) == 0
    assert {name: (run.state, run.step) for name, run in found.items()} == {
        "mine": ("interrupted", 6), "done": ("finished", 9), "live": ("running", 0)
    }  # fmt: skip
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["done", "finished", "9/9", "2", "h"] in lines
    [mine] = [line for line in lines if line[0] == "mine"]
    assert mine[1:3] + mine[4:5] == ["interrupted", "6/9", "KiB"]
    assert main(["runs", "none"]) == 1
    assert "none: No such file or directory; wanted a directory of runs" in capsys.readouterr().err


def test_runs_are_listed_though_one_has_no_readable_metrics_and_one_ends_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("other", "ending"):
        interrupt(recipe(f"run.name={name}"), logged=2, name=name)
    Path("runs/other", METRICS).unlink()
    Path("runs/other", METRICS).mkdir()
    look = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        if path.parent.name == "ending" and path.name == LOCK:
            path.unlink()  # its process has just ended
        return look(path)

    Path("runs/ending", LOCK).touch()
    monkeypatch.setattr(Path, "lstat", lstat)
    assert {run.folder.name: run.step for run in list_runs(Path("runs"))} == {"other": 0, "ending": 2}


def test_removing_asks_and_takes_the_folder_and_the_files_on_the_drive(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(recipe(), logged=7, committed=6)
    Path("nvme/mine/copy1-1.commits").touch()  # of durability.copies=2: it goes, too
    asked: list[str] = []
    for answer in ("", "n", EOFError()):

        def ask(line: str, answer: str | EOFError = answer) -> str:
            asked.append(line)
            if isinstance(answer, EOFError):
                raise answer
            return answer

        monkeypatch.setattr("builtins.input", ask)
        assert main(["runs", "--remove", "mine"]) == 0
        assert "nothing was removed" in capsys.readouterr().out
        assert Path("runs/mine").exists()
    drive = Path("nvme").absolute()
    wanted = rf"remove runs/mine \(interrupted, step 6/9\), with \d+ KiB in {drive}/mine\?"
    assert re.match(wanted, asked[0])
    monkeypatch.setattr("builtins.input", lambda line: "y")
    assert main(["runs", "--remove", "mine"]) == 0
    assert list(Path("runs").iterdir()) == list(Path("nvme").iterdir()) == []


def test_removing_never_touches_a_running_run_nor_anything_else_with_it() -> None:
    interrupt(recipe("run.name=dead"), committed=3, name="dead")
    with opened(Run(recipe(), Path("runs/mine"))), pytest.raises(LockedError, match="runs/mine is in use by"):
        remove_runs(Path("runs"), ["dead", "mine"], lambda line: True)
    lock = lock_file(Path("nvme/dead/rank0.lock"))  # a script of the user's own, in this run's directory
    with pytest.raises(LockedError, match="nvme/dead is in use by"):
        remove_runs(Path("runs"), ["dead"], lambda line: True)
    os.close(lock)
    assert Path("nvme/dead/rank0.bin").exists()
    assert remove_runs(Path("runs"), ["dead", "dead"], lambda line: True)


def test_removing_follows_no_link_and_takes_nothing_that_is_not_a_runs(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "rank0.lock").touch()
    (victim / "thesis.tex").touch()
    interrupt(recipe())
    Path("nvme").mkdir()
    Path("nvme/mine").symlink_to(victim)
    Path("runs/mine/link").symlink_to(victim)
    assert remove_runs(Path("runs"), ["mine"], lambda line: True)
    assert sorted(path.name for path in victim.iterdir()) == ["rank0.lock", "thesis.tex"]
    interrupt(recipe("memory.nvme=[home]"))
    home = Path("home/mine")
    home.mkdir(parents=True)
    (home / "thesis.tex").touch()
    assert remove_runs(Path("runs"), ["mine"], lambda line: True)
    assert (home / "thesis.tex").exists()
    Path("runs/linked").symlink_to(victim)
    (victim / RECIPE).touch()
    for name in ("linked", "../victim", "tokens"):
        with pytest.raises(InfinityError, match="no run of this user"):
            remove_runs(Path("runs"), [name], lambda line: True)


def test_what_a_finished_run_shares_its_name_with_stays() -> None:
    (interrupt(recipe(), committed=6) / "summary.json").write_text(json.dumps({}))
    assert remove_runs(Path("runs"), ["mine"], lambda line: True)
    assert Path("nvme/mine/rank0.bin").exists()
