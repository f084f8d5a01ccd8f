"""What a crash, a drive or a hand did to the files of an interrupted run: found and named, never loaded."""

import contextlib
import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from infinity.core.errors import ChangedFileError, InfinityError, StateError
from tests.helpers.cases import examples
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


# --- files with the right checksum and other content ----------------------------------------------


def rewrite(path: Path, body: Any) -> None:
    """Put other JSON into the newest commit, with the checksum that belongs to it."""
    text, newest = json.dumps(body).encode(), "number = (SELECT max(number) FROM commits)"
    parts = run_sql(path, f"SELECT body FROM blobs WHERE kind = -1 AND {newest}")
    crc = zlib.crc32(b"".join(part for (part,) in parts), zlib.crc32(text))
    run_sql(path, f"UPDATE commits SET body = ?, crc = ? WHERE {newest}", text, crc)


def changes(value):
    """Ways to change one value somewhere in ``value``: paths."""
    if isinstance(value, dict):
        return [[key, *path] for key, each in value.items() for path in changes(each)] + [[]]
    if isinstance(value, list):
        return [[i, *path] for i, each in list(enumerate(value))[:8] for path in changes(each)] + [[]]
    return [[]]


ABSURD = st.one_of(
    st.none(), st.booleans(), st.text(max_size=3), st.floats(), st.lists(st.integers(-1, 3), max_size=3),
    st.sampled_from([-1, 0, 1, 2, 3, 4095, 4096, 8192, 2**31, 2**63, 2**64, 10**30, 0.5, {}, []]),
)  # fmt: skip


def changed(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


@examples(60, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])  # fmt: skip
@given(st.data())
def test_no_content_is_loaded_that_contradicts_itself(kept, tmp_path, data):
    """Any value of a record is another one, with the right checksum: no error of another type."""
    from infinity.comm.ranks import Ranks
    from infinity.shards.saved import find_saved

    folder = tmp_path / "fuzz"
    if not folder.exists():
        shutil.copytree(kept / "2", folder)
        run_sql(journal_of(folder), "DELETE FROM commits WHERE number = 1")
    [[body]] = run_sql(journal_of(kept / "2"), "SELECT body FROM commits ORDER BY number DESC LIMIT 1")
    body = json.loads(body)
    path = data.draw(st.sampled_from(changes(body)))
    rewrite(journal_of(folder), changed(body, path, data.draw(ABSURD)))
    with contextlib.suppress(InfinityError):
        find_saved([folder], Ranks(0, 1, torch.device("cpu")), lambda line: None)
