"""Portable checkpoints beside training: when, how many, and what stays when one fails; ``infinity save``."""

import errno
import json
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import infinity
from infinity.app import checkpoints
from infinity.app.checkpoints import AUTO_SHARE, CheckpointConfig, Interval, Pace
from infinity.app.models.gpt import GPT
from infinity.app.train import save_run, train
from infinity.checkpoint.publish import Series
from infinity.cli import main
from infinity.core.config import SettingError
from infinity.core.errors import CheckpointError
from tests.app.test_goes_on import interrupt, metrics, model, recipe, same, small_units, whole

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


@given(
    step_s=st.floats(0.01, 100), save_s=st.lists(st.floats(0.01, 1000), min_size=1, max_size=20),
    expected_s=st.floats(0.01, 1000),
)  # fmt: skip
def test_auto_keeps_its_share_of_the_time(step_s: float, save_s: list[float], expected_s: float) -> None:
    """But for what the last save took longer than the one before, which nobody could know."""
    now, spent, previous, pace = 0.0, 0.0, expected_s, Pace(expected_s, 0.0)
    for took in save_s:
        now += step_s * -(-max(0.0, (spent + previous) / AUTO_SHARE - previous - now) // step_s)
        assert pace.allows(AUTO_SHARE, now + 1e-6 * now)  # it does begin
        assert spent + previous <= AUTO_SHARE * (now + previous) * (1 + 1e-9)
        pace.saved(now, now + took)
        now, spent, previous = now + took, spent + took, took
        assert spent <= AUTO_SHARE * now or not pace.allows(AUTO_SHARE, now)


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


def test_time_decides_by_a_clock_that_never_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 10**6, 60))
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: float(next(now)))
    said: list[str] = []

    optimizer = SimpleNamespace(runtime=SimpleNamespace(notes=[], ranks=SimpleNamespace(rank=0)))
    monkeypatch.setattr(infinity, "save_checkpoint", lambda model, optimizer, path: path.mkdir(parents=True))
    config = CheckpointConfig(every="10min", keep=3)
    due = checkpoints.Checkpoints(
        config, torch.nn.Linear(2, 2), optimizer, tmp_path, steps=100, agree=lambda x: x, say=said.append
    )
    steps = [step for step in range(1, 60) if due.after(step)]
    assert steps == [10, 20, 30, 40, 50]  # asked once a minute
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        "step-30", "step-40", "step-50", "latest",
    }  # fmt: skip
    assert due.after(100)  # the last step
    assert not due.after(100)  # it is there


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_keeps_the_previous_checkpoint_and_training_goes_on_loudly(
    tmp_path: Path,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: int,
) -> None:
    real, save = os.pwrite, infinity.save_checkpoint

    def full(fd: int, data: Any, offset: int) -> int:
        if "distcp" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise OSError(error, "")
        return real(fd, data, offset)

    def saving(model: Any, optimizer: Any, path: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if path.name != "step-2":
                patch.setattr(os, "pwrite", full)
            save(model, optimizer, path)

    monkeypatch.setattr(infinity, "save_checkpoint", saving)
    summary = train(recipe(tmp_path, 'checkpoint.every="2 steps"', "observe.progress=true"))
    assert saved(tmp_path) == {"step-2", "latest"}
    assert latest(tmp_path) == "step-2"
    assert metrics(tmp_path) == metrics(whole)
    name = errno.errorcode[error]
    assert "WARNING: no checkpoint after step 4, training goes on" in capsys.readouterr().err
    assert summary is not None
    noted = [note for note in summary.notes if note.startswith("WARNING: no checkpoint after step ")]
    assert len(noted) == 2
    assert all(name in note for note in noted)


def test_what_a_killed_save_or_removal_left_goes_with_the_next_one(tmp_path: Path) -> None:
    for name in ("step-1", "step-2", "step-x", ".step-7.1234.part", ".step-1.old.part", ".other.1.part"):
        (tmp_path / name).mkdir()
    series = Series(tmp_path, "step", keep=1)
    series.publish(2)
    left = {"step-2", "latest", "step-x", ".other.1.part"}
    assert {path.name for path in tmp_path.iterdir()} == left
    series.publish(2)
    assert {path.name for path in tmp_path.iterdir()} == left


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
    assert "is not the folder of a run that was interrupted" in capsys.readouterr().err


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
    with pytest.raises(CheckpointError, match="is not the folder of a run that was interrupted"):
        save_run(tmp_path, tmp_path / "out")
