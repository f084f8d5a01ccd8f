"""Portable checkpoints beside training: when, how many, and what stays when one fails; ``infinity save``."""

import contextlib
import errno
import json
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import infinity
from infinity.api import checkpoints
from infinity.api.checkpoints import AUTO_SHARE, CheckpointConfig, Checkpoints, Interval, Pace
from infinity.api.portable import PortableSave
from infinity.app.export import save_run
from infinity.app.loop import Loop
from infinity.app.train import built, train
from infinity.checkpoint.distcp import DistributedCheckpoint
from infinity.checkpoint.writer import RangeWriter, Series
from infinity.cli import main
from infinity.core.config import SettingError
from infinity.core.errors import CheckpointError, InfinityError, RecipeError
from infinity.observe.metrics import View
from infinity.partition import builder
from infinity.recipes.models import GPT
from tests.app.test_goes_on import (
    STEPS,
    interrupt,
    metrics,
    model,
    recipe,
    same,
    stop,
    whole,
    words,
)
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks, start_ranks
from tests.helpers.runs import small_units
from tests.helpers.saves import go_on_when_closed, held

__all__ = ["small_units", "whole"]  # fixtures


@pytest.mark.parametrize(
    ("every", "interval"),
    [
        (None, None), ("auto", Interval()), ("500 steps", Interval(500)), ("1step", Interval(1)),
        ("30min", Interval(seconds=1800)), ("1.5 h", Interval(seconds=5400)), ("90s", Interval(seconds=90)),
    ],
)  # fmt: skip
def test_every_is_steps_or_a_time(every: str | None, interval: Interval | None) -> None:
    assert CheckpointConfig(every=every).interval() == interval


@pytest.mark.parametrize("every", ["", "500", "0 steps", "1.5 steps", "-3min", "min", "0s", "3 days", 500])
def test_anything_else_is_an_error_that_says_what_is_wanted(every: Any) -> None:
    with pytest.raises(SettingError, match=r'every: got .*; wanted auto, or such as "500 steps", 30min'):
        CheckpointConfig(every=every)


times = st.floats(0.01, 20)


@given(
    step_s=st.floats(1, 20), slower_s=st.lists(st.tuples(times, times), min_size=1, max_size=8),
    steps=st.integers(1, 20), expected_s=times,
)  # fmt: skip
def test_auto_keeps_its_share_of_the_time(
    step_s: float, slower_s: list[tuple[float, float]], steps: int, expected_s: float
) -> None:
    """But for what the last save cost more than the one before, which nobody could know."""
    now, spent, previous, pace = 0.0, 0.0, expected_s, Pace(expected_s, 0.0)
    for slower, waited in slower_s:
        while not pace.allows(AUTO_SHARE, now):
            now += step_s
            pace.step(step_s, saving=False)
        assert spent + previous <= AUTO_SHARE * (now + previous) * (1 + 1e-9)
        pace.begin(now)
        for _ in range(steps):
            now += step_s + slower
            pace.step(step_s + slower, saving=True)
        pace.cost_s += waited
        now += waited
        took = pace.end(now)
        cost = slower * steps + waited
        assert took == pytest.approx((step_s + slower) * steps + waited)
        previous = max(cost, 0.1 * took)
        spent += previous
        assert spent <= AUTO_SHARE * now * (1 + 1e-9) or not pace.allows(AUTO_SHARE * (1 - 1e-9), now)


def test_the_first_save_of_auto_is_expected_to_stop_training_at_500_mb_per_s() -> None:
    pace = Pace(35.0, 100.0)
    assert not pace.allows(AUTO_SHARE, 1000.0)
    assert pace.allows(AUTO_SHARE, 1065.1)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is published in the step after which it begins."""
    begin = checkpoints.begin_save

    def saving(*args: Any, **more: Any) -> Any:
        save = begin(*args, **more)
        save.wait()
        return save

    monkeypatch.setattr(checkpoints, "begin_save", saving)


def saved(folder: Path) -> set[str]:
    return {path.name for path in (folder / "runs/one/checkpoints").iterdir()}


def latest(folder: Path) -> str:
    return str((folder / "runs/one/checkpoints/latest").readlink())


def weights(path: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Those that a plain model loads from a checkpoint, as a model directory has them."""
    import torch.distributed.checkpoint as dcp

    plain = GPT(recipe(folder).model)
    state = plain.state_dict()
    with warnings.catch_warnings(action="ignore"):  # that this is one process
        dcp.load(state, checkpoint_id=path)
    return state


@pytest.mark.usefixtures("at_once")
def test_a_run_saves_in_time_keeps_the_newest_and_its_numbers_do_not_change(
    tmp_path: Path, whole: Path
) -> None:
    summary = train(recipe(tmp_path, 'checkpoint.every="2 steps"'))
    assert summary is not None
    assert saved(tmp_path) == {"step-4", "step-6", "latest"}
    assert latest(tmp_path) == "step-6"
    assert metrics(tmp_path) == metrics(whole)
    assert same(model(tmp_path / "runs/one/model"), model(whole / "runs/one/model"))
    newest = weights(tmp_path / "runs/one/checkpoints/latest", tmp_path)
    assert same({k: newest[k] for k in model(whole / "runs/one/model")}, model(whole / "runs/one/model"))


@pytest.mark.parametrize("drives", few((True,), (True, False)))
def test_what_is_due_while_another_is_saved_comes_after_it(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, drives: bool
) -> None:
    """After step 2 one begins; it ends after step 5, and then the one that was due after step 4 begins."""
    said: list[str] = []
    monkeypatch.setattr(View, "log", lambda self, line: said.append(line))
    saves, begin, after = list[PortableSave](), checkpoints.begin_save, Checkpoints.after
    with held(monkeypatch) as opened:

        def beginning(*args: Any, **more: Any) -> PortableSave:
            saves.append(begin(*args, **more))
            return saves[-1]

        def letting(self: Checkpoints, step: int, step_s: float) -> bool:
            if step == 5:
                opened.set()
                saves[-1].wait()
            return after(self, step, step_s)

        monkeypatch.setattr(checkpoints, "begin_save", beginning)
        monkeypatch.setattr(Checkpoints, "after", letting)
        more = [] if drives else ["memory.nvme=[]"]
        train(recipe(tmp_path, 'checkpoint.every="2 steps"', "checkpoint.keep=9", *more))
    assert saved(tmp_path) == {"step-2", "step-5", "step-6", "latest"}
    assert latest(tmp_path) == "step-6"
    assert metrics(tmp_path) == metrics(whole)
    assert same(model(tmp_path / "runs/one/model"), model(whole / "runs/one/model"))


def test_auto_saves_and_gives_up_what_the_end_of_the_run_would_wait_for(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = Pace.allows
    monkeypatch.setattr(Pace, "allows", lambda self, share, now_s: due(self, 1e9, now_s))
    close = PortableSave.close
    with held(monkeypatch) as opened:

        def closing(self: PortableSave) -> None:
            opened.set()
            close(self)

        monkeypatch.setattr(PortableSave, "close", closing)
        train(recipe(tmp_path, "checkpoint.every=auto"))
    assert saved(tmp_path) == set()
    assert metrics(tmp_path) == metrics(whole)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), pytest.param(InfinityError("x"), marks=pytest.mark.slow)], ids=repr
)
def test_a_run_that_is_stopped_while_it_saves_leaves_what_was_complete(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    before = set(threading.enumerate())
    with pytest.MonkeyPatch.context() as patch, held(patch) as opened:
        go_on_when_closed(patch, opened)
        stop(patch, "loss", 4, error)
        with pytest.raises(type(error)):
            train(recipe(tmp_path, 'checkpoint.every="2 steps"'))
    assert saved(tmp_path) == set()
    assert not [t for t in set(threading.enumerate()) - before if t.name == "infinity-save"]
    train(recipe(tmp_path, 'checkpoint.every="4 steps"'))
    assert saved(tmp_path) >= {"step-6", "latest"}
    assert metrics(tmp_path) == metrics(whole)
    assert same(model(tmp_path / "runs/one/model"), model(whole / "runs/one/model"))


def killed_while_it_saves(folder: str) -> None:
    """The process dies when its second checkpoint is being written."""
    writers, write = list[RangeWriter](), RangeWriter.write_bytes

    def writing(self: RangeWriter, *args: Any) -> None:
        write(self, *args)
        writers.extend([self] if self not in writers else [])
        if len(writers) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "TARGET_SHARD_NBYTES", 8000)
        patch.setattr(RangeWriter, "write_bytes", writing)
        patch.setattr(PortableSave, "done", property(lambda self: self.join() or True))
        train(recipe(Path(folder), 'checkpoint.every="1 steps"'))


def test_a_run_that_is_killed_while_it_saves_goes_on_and_removes_what_is_left(
    tmp_path: Path, whole: Path
) -> None:
    words(tmp_path)
    with start_ranks(killed_while_it_saves, 1, str(tmp_path), group=False) as ranks:
        [end] = ranks.wait()
    assert end.exit_code == -signal.SIGKILL
    names = sorted(saved(tmp_path))
    assert names[1:] == ["latest", "step-1"]
    assert names[0].startswith(".step-")
    interrupt(tmp_path, step=STEPS, where="step")
    assert saved(tmp_path) == set(names)
    train(recipe(tmp_path, 'checkpoint.every="1000 steps"'))
    assert saved(tmp_path) == {"latest", "step-1", "step-6"}
    assert metrics(tmp_path) == metrics(whole)
    assert same(model(tmp_path / "runs/one/model"), model(whole / "runs/one/model"))


def on_a_rank(folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "TARGET_SHARD_NBYTES", 8000)
        train(recipe(Path(folder), 'checkpoint.every="1 steps"', "checkpoint.keep=9", "train.batch_size=2"))


def test_two_ranks_save_beside_their_collectives(tmp_path: Path) -> None:
    words(tmp_path)
    run_ranks(on_a_rank, 2, str(tmp_path), group=False)
    assert {"step-1", "step-6", "latest"} <= saved(tmp_path)
    last = tmp_path / "runs/one/checkpoints/latest"
    assert {"__0_0.distcp", "__1_0.distcp"} <= {path.name for path in last.iterdir()}
    newest = weights(last, tmp_path)
    trained = model(tmp_path / "runs/one/model")
    assert same({key: newest[key] for key in trained}, trained)


class Done:
    """A checkpoint that is saved at once."""

    ended, out, done = True, Path(), True

    def advance(self) -> None: ...

    def wait(self) -> None: ...


def test_time_decides_by_a_clock_that_never_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now[0])

    def begin(model: Any, optimizer: Any, path: Path, *, background: bool, then: Any) -> Done:
        path.mkdir(parents=True)
        then()
        return Done()

    runtime = SimpleNamespace(notes=[], ranks=SimpleNamespace(rank=0))
    optimizer = SimpleNamespace(model=torch.nn.Linear(2, 2), runtime=runtime)
    monkeypatch.setattr(checkpoints, "begin_save", begin)
    config = CheckpointConfig(every="10min", keep=3)
    due = Checkpoints(config, optimizer, tmp_path, step=0, steps=100, agree=lambda x: x, say=print)
    steps = []
    for step in range(1, 60):
        now[0] += 60
        if due.after(step, 60.0):
            steps.append(step)
    assert steps == [10, 20, 30, 40, 50]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        "step-30", "step-40", "step-50", "latest",
    }  # fmt: skip
    assert due.after(100, 60.0)  # the last step
    assert not due.after(100, 60.0)  # it is there


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("error", few((errno.ENOSPC,), (errno.ENOSPC, errno.EIO)))
def test_a_full_disk_keeps_the_previous_checkpoint_and_training_goes_on_loudly(
    tmp_path: Path,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: int,
) -> None:
    real = os.pwrite

    def full(fd: int, data: Any, offset: int) -> int:
        path = str(Path(f"/proc/self/fd/{fd}").readlink())
        if "distcp" in path and "step-2" not in path:
            raise OSError(error, "")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    summary = train(recipe(tmp_path, 'checkpoint.every="2 steps"', "observe.progress=true"))
    assert saved(tmp_path) == {"step-2", "latest"}
    assert latest(tmp_path) == "step-2"
    assert metrics(tmp_path) == metrics(whole)
    assert "WARNING: no checkpoint after step 4, training goes on" in capsys.readouterr().err
    assert summary is not None
    [noted] = [note for note in summary.notes if note.startswith("WARNING: no checkpoint after step ")]
    assert noted.startswith("WARNING: no checkpoint after step 6 and 1 others before, training goes on")
    assert errno.errorcode[error] in noted


def test_what_a_killed_save_or_removal_left_goes_with_the_next_one(tmp_path: Path) -> None:
    for name in ("step-1", "step-2", "step-x", ".step-7.1234.part", ".step-1.old.part", ".other.1.part"):
        (tmp_path / name).mkdir()
    series = Series(tmp_path, "step", keep=1)
    series.publish(2)
    left = {"step-2", "latest", "step-x", ".other.1.part"}
    assert {path.name for path in tmp_path.iterdir()} == left
    series.publish(2)
    assert {path.name for path in tmp_path.iterdir()} == left


@pytest.mark.usefixtures("at_once")
def test_an_interrupted_run_is_saved_and_still_goes_on(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(tmp_path)
    run, out = tmp_path / "runs/one", tmp_path / "out"
    assert main(["save", str(run), str(out)]) == 0
    assert capsys.readouterr().out == f"saved step 3 of {run} to {out}\n"
    interrupt(tmp_path, 'checkpoint.every="1 steps"', step=6)
    assert same(weights(out, tmp_path), weights(run / "checkpoints/step-4", tmp_path)) is False
    train(recipe(tmp_path))
    assert metrics(tmp_path) == metrics(whole)
    assert same(model(run / "model"), model(whole / "runs/one/model"))
    assert main(["save", str(run), str(tmp_path / "again")]) == 1
    assert "not the folder of an interrupted run" in capsys.readouterr().err


@pytest.mark.usefixtures("at_once")
def test_what_is_saved_of_an_interrupted_run_is_its_last_committed_step(tmp_path: Path) -> None:
    interrupt(tmp_path, 'checkpoint.every="1 steps"', "checkpoint.keep=9")
    run, out = tmp_path / "runs/one", tmp_path / "out"
    assert main(["save", str(run), str(out)]) == 0
    assert same(weights(out, tmp_path), weights(run / "checkpoints/step-3", tmp_path))
    one, other = (
        json.dumps(sorted(p.name for p in path.iterdir())) for path in (out, run / "checkpoints/step-3")
    )
    assert one == other


def test_a_run_of_which_nothing_was_committed_cannot_be_saved(tmp_path: Path) -> None:
    interrupt(tmp_path, step=1)
    assert main(["save", str(tmp_path / "runs/one"), str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="not the folder of an interrupted run"):
        save_run(tmp_path, tmp_path / "out")


# --- a run that starts from one ------------------------------------------------------------------


def states(path: Path) -> dict[str, torch.Tensor]:
    """Weights, moments and step counts of a checkpoint."""
    with DistributedCheckpoint(path) as checkpoint:
        found = {}
        for key in checkpoint:
            found[key] = torch.empty(checkpoint[key].shape.numel(), dtype=checkpoint[key].dtype)
            checkpoint[key].fill(0, found[key])
    return found


def test_a_run_starts_from_a_checkpoint_with_its_own_learning_rate_and_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    constant = "optim.schedule=constant", "optim.warmup_steps=0"
    train(recipe(tmp_path, *constant, 'checkpoint.every="4 steps"'))
    source = tmp_path / "runs/one/checkpoints/step-4"
    assert saved(tmp_path) == {"step-4", "step-6", "latest"}
    given = recipe(
        tmp_path, *constant, "run.name=two", f"checkpoint.load={source}", 'checkpoint.every="1 steps"',
        "checkpoint.keep=9", "observe.progress=true", "train.steps=3", "optim.lr=0.02",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        stop(patch, "loss", 3, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt) as raised:
            train(given)
    assert f"starts from {source}, after 4 steps of its optimizer" in capsys.readouterr().err
    assert "step 2 of 3 is kept" in raised.value.__notes__[0]
    source.rename(tmp_path / "moved")  # it is not needed when the run goes on
    train(given)
    lines = [line for line in metrics(tmp_path, "two") if line["kind"] == "step"]
    assert [(line["step"], line["lr"]) for line in lines] == [(1, 0.02), (2, 0.02), (3, 0.02)]
    counts = [v for k, v in states(tmp_path / "runs/two/checkpoints/step-3").items() if k.endswith(".step")]
    assert set(map(float, counts)) == {7.0}
    assert train(given) is None  # it is finished


def test_it_begins_with_exactly_what_the_checkpoint_holds(tmp_path: Path) -> None:
    train(recipe(tmp_path, 'checkpoint.every="6 steps"'))
    source = tmp_path / "runs/one/checkpoints/latest"
    found: list[dict[str, torch.Tensor]] = []
    made: list[Any] = []
    run = Loop.run

    @contextlib.contextmanager
    def building(*args: Any, **more: Any) -> Iterator[Any]:
        with built(*args, **more) as parts:
            made.extend(parts)
            yield parts

    def saving(self: Loop) -> None:
        model, optimizer = made
        infinity.save_checkpoint(model, optimizer, tmp_path / "again")
        found.append(states(tmp_path / "again"))
        assert {group["lr"] for group in optimizer.param_groups} == {0.5}
        run(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infinity.app.train.built", building)
        patch.setattr(Loop, "run", saving)
        rates = "optim.lr=0.5", "optim.warmup_steps=0", "optim.schedule=constant"
        train(recipe(tmp_path, "run.name=two", f"checkpoint.load={source}", *rates, "train.steps=1"))
    assert same(found[0], states(source))


def test_what_is_no_checkpoint_or_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing: no such directory; wanted a directory that torch"):
        train(recipe(tmp_path, f"checkpoint.load={tmp_path / 'nothing'}"))
    assert not (tmp_path / "runs").exists()
    train(recipe(tmp_path, "train.steps=1", 'checkpoint.every="1 steps"'))
    source = tmp_path / "runs/one/checkpoints/latest"
    with pytest.raises(CheckpointError, match="does not fit GPT"):
        train(recipe(tmp_path, "run.name=two", "model.n_layers=3", f"checkpoint.load={source}"))


@pytest.mark.slow
def test_a_run_that_begins_anew_in_its_folder_has_no_checkpoints_of_the_one_before(tmp_path: Path) -> None:
    interrupt(tmp_path, step=1)
    before = tmp_path / "runs/one/checkpoints/step-1"
    before.mkdir(parents=True)
    with pytest.raises(RecipeError, match=r"checkpoint\.load: .* is one of .*/runs/one itself"):
        train(recipe(tmp_path, f"checkpoint.load={before}"))
    assert before.exists()
    train(recipe(tmp_path, 'checkpoint.every="1000 steps"'))
    assert saved(tmp_path) == {"step-6", "latest"}
