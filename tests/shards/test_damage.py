"""What a crash, a drive or a hand did to the files of an interrupted run: found and named, never loaded."""

import os
import shutil
from pathlib import Path

import pytest

from infinity.core.errors import ChangedFileError, StateError
from tests.helpers.crashes import go_on
from tests.helpers.journals import records, run_sql


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    """A run interrupted after step 2, with copies of its files after step 1, 2 and 3 and a run beside it."""
    folder = tmp_path_factory.mktemp("kept")
    for steps in (1, 2, 3):
        go_on(folder / "nvme", steps)
        shutil.copytree(folder / "nvme" / "mine", folder / str(steps))
    go_on(folder / "nvme", 2, name="other")
    (folder / "losses").write_text("\n".join(go_on(folder / "fresh", 3)))
    return folder


@pytest.fixture
def run(kept, tmp_path) -> Path:
    """A copy of the run, after step 2."""
    shutil.copytree(kept / "2", tmp_path / "mine")
    return tmp_path / "mine"


def journal_of(run: Path) -> Path:
    return run / "rank0-1.commits"


def refuse(run: Path, error: type[Exception], *says: str) -> None:
    with pytest.raises(error) as caught:
        go_on(run.parent, 3)
    for text in says:
        assert text in str(caught.value)


def test_a_copy_of_all_files_goes_on_as_the_run_did(run, kept):
    assert go_on(run.parent, 3) == (kept / "losses").read_text().split()[2:]


@pytest.mark.parametrize("how", ["cut", "flipped", "emptied", "missing"])
@pytest.mark.parametrize("which", ["", "-head"])
def test_a_damaged_journal_is_named(run, which, how):
    path = run / f"rank0-1.commits{which}"
    whole = path.read_bytes()
    flipped = whole.replace(b'"adamw"', b'"adamv"') if not which else whole.replace(b" 0 ", b" 1 ")
    damaged = {"cut": whole[:30], "flipped": flipped, "emptied": b""}
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(damaged[how])
    if how == "missing" and not which:
        refuse(run, StateError, "rank0-1-0.bin", "its journal is not in", "run.resume=never")
    else:
        refuse(run, StateError, path.name, "run.resume=never")


def test_the_previous_commit_is_used_and_it_is_said(run, caplog, kept):
    """Both are there between a commit and the first update after it."""
    assert [record.step for record in records(run)] == [1, 2]
    run_sql(journal_of(run), "UPDATE commits SET body = ? WHERE number = 2", b"torn")
    with caplog.at_level("INFO", "infinity"):
        assert go_on(run.parent, 3) == (kept / "losses").read_text().split()[1:]
    assert any("commit 2" in line and "step 1" in line for line in caplog.messages), caplog.messages


def test_an_older_journal_is_found_out(run, kept):
    """Its versions were written over since; the head, which is written past the page cache, says so."""
    shutil.copy(journal_of(kept / "3"), journal_of(run))
    shutil.copy(kept / "3" / "rank0-1.commits-head", run)
    shutil.copy(journal_of(kept / "1"), journal_of(run))
    refuse(run, StateError, "is missing", "run.resume=never")


@pytest.mark.parametrize("how", ["cut", "missing", "emptied"])
def test_a_changed_data_file_is_named(run, how):
    data = run / "rank0-1-0.bin"
    if how == "cut":
        os.truncate(data, 8192)
        refuse(run, ChangedFileError, str(data), "was cut to 8192 bytes")
    elif how == "missing":
        data.unlink()
        refuse(run, StateError, data.name, "is missing", "memory.nvme", "run.resume=never")
    else:
        os.truncate(data, 0)
        refuse(run, ChangedFileError, str(data), "was cut to 0 bytes")
