"""An interrupted run whose directories, limits or settings are others than before; and full disks."""

import os
import shutil
import sqlite3
import threading
import time
from pathlib import Path

import pytest
import torch

import infinity
from infinity.core.errors import DiskError, InfinityError, LockedError, StateError
from infinity.engine.runtime import Runtime
from infinity.nvme.run_directory import RunDirectory
from infinity.shards.journal import Journal
from tests.helpers.cases import few
from tests.helpers.crashes import PLACES, Net, go_on
from tests.helpers.journals import ended_in_the_transaction
from tests.helpers.launch import holding
from tests.helpers.limits import HANG_S, bound_by_modes, file_limit
from tests.helpers.training import build


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list[str]:
    return go_on([tmp_path_factory.mktemp("whole")], 4, keep=False)


# --- other directories -----------------------------------------------------------------------------


def test_directories_may_be_given_in_another_order(tmp_path, whole):
    a, b = tmp_path / "a", tmp_path / "b"
    assert go_on([a, b], 2) == whole[:2]
    assert go_on([b, a], 4, keep=False) == whole[2:]
    assert [list(path.iterdir()) for path in (a, b)] == [[], []]


def test_a_run_may_be_moved_to_another_drive(tmp_path, whole):
    go_on([tmp_path / "a"], 2)
    shutil.move(tmp_path / "a", tmp_path / "elsewhere")
    assert go_on([tmp_path / "elsewhere"], 4) == whole[2:]


def test_the_directories_of_two_drives_may_be_moved_into_one(tmp_path, whole):
    a, b = tmp_path / "a", tmp_path / "b"
    go_on([a, b], 2)
    for path in (b / "mine").iterdir():
        if not (a / "mine" / path.name).exists():
            shutil.move(path, a / "mine")
    assert go_on([a], 4) == whole[2:]


def test_a_directory_that_is_missing_is_named(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    go_on([a, b], 2)
    with pytest.raises(StateError, match=r"rank0-1-1.bin .* is missing .* memory.nvme"):
        go_on([a], 4)
    with pytest.raises(StateError, match=r"rank0-1-1.bin .* has commits.* memory.nvme"):
        go_on([b], 4)
    assert len(go_on([a, b], 4)) == 2  # nothing was lost


# --- other settings ----------------------------------------------------------------------------------


def test_settings_that_would_change_numbers_are_refused(tmp_path, whole):
    go_on([tmp_path], 2, follow={})

    class Other(Net):
        def __init__(self):
            super().__init__()
            self.blocks[0][0] = torch.nn.Linear(32, 64, bias=False)
            self.more = torch.nn.Parameter(torch.zeros(32))

        def forward(self, tokens):
            return super().forward(tokens) + self.more.sum()

    def one_group(model):
        return [{"params": list(model.parameters())}]

    refused = [
        ({"dtype": "bf16"}, "train.dtype"),
        ({"make": Other}, "the model is not the one of the interrupted run"),
        ({"groups": one_group}, "parameter groups"),
        ({"follow": {"loader": Counter()}}, "follow="),
    ]
    for given, says in refused:
        with pytest.raises(StateError, match=says):
            go_on([tmp_path], 4, **given)
    with pytest.raises(StateError, match=r"memory\.versions=2"):
        go_on([tmp_path], 4, "memory.versions=1")
    assert go_on([tmp_path], 4) == whole[2:]  # none of them did any harm


class Counter:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_never_begins_anew_and_must_refuses_to(tmp_path, whole):
    with pytest.raises(StateError, match=r"run\.resume=must"):
        go_on([tmp_path], 1, "run.resume=must")
    go_on([tmp_path], 2)
    assert go_on([tmp_path], 3, "run.resume=must") == whole[2:3]
    assert go_on([tmp_path], 4, "run.resume=never") == whole
    assert go_on([tmp_path], 1) == whole[:1]


def test_two_runs_on_one_drive_go_on_by_themselves(tmp_path, whole):
    go_on([tmp_path], 2)
    go_on([tmp_path], 3, name="other")
    assert go_on([tmp_path], 4) == whole[2:]
    assert go_on([tmp_path], 4, name="other") == whole[3:]


def test_a_second_process_of_a_run_is_refused(tmp_path):
    go_on([tmp_path], 2)
    with holding(RunDirectory, tmp_path, "mine", 0), pytest.raises(LockedError, match="is in use by"):
        go_on([tmp_path], 3)
    assert len(go_on([tmp_path], 3)) == 1  # the lock of a dead process


def test_a_run_that_has_a_model_in_this_process_says_how_to_build_another_one(tmp_path):
    """The cell of a notebook that runs again: the name of the model still holds the one before."""
    model = build(Net, "bf16", [f"memory.nvme=[{tmp_path}]", "run.name=mine"])
    with pytest.raises(LockedError, match=r"this process.* infinity\.close\(model, keep=True\)"):
        build(Net, "bf16", [f"memory.nvme=[{tmp_path}]", "run.name=mine"])
    infinity.close(model, keep=True)
    infinity.close(build(Net, "bf16", [f"memory.nvme=[{tmp_path}]", "run.name=mine"]))


def test_a_clock_that_jumps_changes_nothing(tmp_path, whole):
    go_on([tmp_path], 2)
    for path in (tmp_path / "mine").iterdir():
        os.utime(path, (time.time() + 1e8, time.time() + 1e8))
    assert go_on([tmp_path], 3) == whole[2:3]
    for path in (tmp_path / "mine").iterdir():
        os.utime(path, (0, 0))
    assert go_on([tmp_path], 4) == whole[3:]


# --- full disks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", few(("nvme", "both"), PLACES))
def test_a_full_disk_leaves_the_commit_and_there_may_be_room_later(tmp_path, whole, place):
    """However much is written before the disk is full: while building, resuming, training, recording."""
    with file_limit(2**26 - 1):  # files grow by what they need, where they cannot by 64 MiB
        go_on([tmp_path], 2, place=place)
    kept = sum(path.stat().st_size for path in (tmp_path / "mine").glob("*.bin"))
    failed = 0
    for most in (100, 3000, 2**14, kept // 4, kept // 2, kept - 4096):
        try:
            with file_limit(most):
                go_on([tmp_path], 3, place="nvme" if place == "host" else "host")
        except DiskError:
            failed += 1
            continue
        break
    assert failed
    again = go_on([tmp_path], 4, place=place)
    assert again in (whole[2:], whole[3:])


def test_a_last_step_that_cannot_be_kept_is_an_error_of_close(tmp_path, whole, monkeypatch):
    closing, close = threading.Event(), Runtime.close

    def close_at_last(runtime, *args, **more):
        closing.set()
        close(runtime, *args, **more)

    go_on([tmp_path], 2, place="host")

    def full(journal, *commit):
        assert closing.wait(HANG_S)
        raise DiskError(28, "writing the journal of commits", tmp_path, offset=0, nbytes=0)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "append", full)
        patched.setattr(Runtime, "close", close_at_last)
        with pytest.raises(DiskError, match="No space left") as raised:
            go_on([tmp_path], 3)
    assert "goes on from the commit before" in raised.value.__notes__[-1]
    assert go_on([tmp_path], 4) == whole[2:]


@pytest.mark.parametrize("steps", [0, 2])
def test_no_room_for_a_record_ends_the_run_and_the_record_before_stands(tmp_path, whole, steps):
    if steps:
        go_on([tmp_path], steps)
    with (
        ended_in_the_transaction(sqlite3.OperationalError("database or disk is full")),
        pytest.raises(DiskError, match=r"writing the journal of commits.*No space left"),
    ):
        go_on([tmp_path], 4)
    assert go_on([tmp_path], 4) == whole[steps:]


def test_a_directory_that_may_not_be_written_is_named(tmp_path):
    (tmp_path / "mine").mkdir(mode=0o500)
    try:
        with bound_by_modes(), pytest.raises(InfinityError, match=str(tmp_path)):
            go_on([tmp_path], 3)
    finally:
        (tmp_path / "mine").chmod(0o700)
    assert len(go_on([tmp_path], 3)) == 3


def test_a_file_system_without_direct_io(whole):
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no tmpfs")
    folder = Path("/dev/shm") / f"infinity-{os.getpid()}"
    try:
        go_on([folder], 2)
        assert go_on([folder], 4, keep=False) == whole[2:]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
