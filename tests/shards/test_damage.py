"""What a crash, a drive or a hand did to the files of an interrupted run: found and named, never loaded."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from infinity.core.errors import ChangedFileError, InfinityError, StateError
from infinity.shards import commits
from infinity.shards.commits import read_commit
from tests.helpers.cases import examples
from tests.helpers.crashes import go_on


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


def record_of(run: Path) -> Path:
    """Of the newest step."""
    return max(run.glob("*.commit?"), key=lambda path: read_commit(path).step)


def layout_of(run: Path) -> Path:
    return max(run.glob("*.layout*"), key=lambda path: path.stat().st_mtime)


def refuse(run: Path, error: type[Exception], *says: str) -> None:
    with pytest.raises(error) as caught:
        go_on(run.parent, 3)
    for text in says:
        assert text in str(caught.value)


def test_a_copy_of_all_files_goes_on_as_the_run_did(run, kept):
    assert go_on(run.parent, 3) == (kept / "losses").read_text().split()[2:]


@pytest.mark.parametrize("which", [record_of, layout_of])
@pytest.mark.parametrize("how", ["cut", "flipped", "emptied", "missing"])
def test_a_damaged_record_is_named(run, which, how):
    path = which(run)
    whole = path.read_bytes()
    for other in run.glob("*.commit?"):
        if other != record_of(run):
            other.unlink()
    damaged = {
        "cut": whole[:-3],
        "flipped": whole[:60] + bytes([whole[60] ^ 8]) + whole[61:],
        "emptied": b"",
    }
    if how == "missing":
        path.unlink()
        if which is record_of:
            refuse(run, StateError, "rank0-1-0.bin", "its records are not in", "run.resume=never")
            return
    else:
        path.write_bytes(damaged[how])
    refuse(run, StateError, path.name, "run.resume=never")


def test_the_previous_commit_is_used_and_it_is_said(run, caplog, kept):
    """Both records are there between a commit and the first update after it."""
    records = sorted(run.glob("*.commit?"), key=lambda path: read_commit(path).step)
    assert [read_commit(path).step for path in records] == [1, 2]
    records[1].write_bytes(b"torn")
    with caplog.at_level("INFO", "infinity"):
        assert go_on(run.parent, 3) == (kept / "losses").read_text().split()[1:]
    assert any(records[1].name in line and "step 1" in line for line in caplog.messages), caplog.messages


@pytest.mark.parametrize("what", ["commit", "layout", "both", "data"])
def test_another_runs_files_are_found_out(run, kept, what):
    for path in run.glob("*.commit?"):
        if path != record_of(run):
            path.unlink()
    other, mine = kept / "nvme" / "other", record_of(run)
    if what in ("commit", "both"):
        shutil.copy(record_of(other), mine)
    if what in ("layout", "both"):
        shutil.copy(layout_of(other), layout_of(run))
    if what == "data":
        shutil.copy(other / "rank0-1-0.bin", run)
    if what == "layout":  # both describe the same places
        assert len(go_on(run.parent, 3)) == 1
    else:
        refuse(run, StateError, "rank0-1-0.bin: not the file", "run.resume=never")


def test_an_older_record_is_found_out(run, kept):
    """Its versions were written over since."""
    shutil.rmtree(run)
    shutil.copytree(kept / "3", run)
    for path in run.glob("*.commit?"):
        path.unlink()
    shutil.copy(record_of(kept / "1"), run)
    shutil.copy(layout_of(kept / "1"), run)
    refuse(run, StateError, "put back from a copy", "run.resume=never")


def test_an_older_data_file_is_found_out(run, kept):
    shutil.rmtree(run)
    shutil.copytree(kept / "3", run)
    shutil.copy(kept / "1" / "rank0-1-0.bin", run)
    refuse(run, StateError, "rank0-1-0.bin: older than", "put back from a copy")


@pytest.mark.parametrize("how", ["cut", "missing", "emptied", "another's"])
def test_a_changed_data_file_is_named(run, how):
    data = run / "rank0-1-0.bin"
    if how == "cut":
        os.truncate(data, 8192)
        refuse(run, ChangedFileError, str(data), "was cut to 8192 bytes")
    elif how == "missing":
        data.unlink()
        refuse(run, StateError, data.name, "is missing", "memory.nvme", "run.resume=never")
    elif how == "emptied":
        os.truncate(data, 0)
        refuse(run, ChangedFileError, str(data), "was cut to 0 bytes")
    else:
        data.write_bytes(bytes(data.stat().st_size))
        refuse(run, StateError, str(data), "not a file of shards")


# --- files with the right checksum and other content ----------------------------------------------


def parts_of(path: Path) -> tuple[bytes, list[bytes]]:
    head, _, rest = path.read_bytes().partition(b"\n")
    magic, _, *sizes = head.split(b" ")
    parts = []
    for size in sizes:
        parts.append(rest[: int(size)])
        rest = rest[int(size) :]
    return magic, parts


def rewrite(path: Path, body: object, *, magic: bytes, rest: list[bytes]) -> int:
    """Put other JSON into a record or layout, with the checksum that belongs to it."""
    return commits._replace(path, magic, (json.dumps(body).encode(), *rest), synced=False)


def changes(value):
    """Ways to change one value somewhere in ``value``: paths."""
    if isinstance(value, dict):
        return [[key, *path] for key, each in value.items() for path in changes(each)] + [[]]
    if isinstance(value, list):
        return [[i, *path] for i, each in list(enumerate(value))[:4] for path in changes(each)] + [[]]
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
    """Any value of a record or layout is another one, with the right checksum: no error of another type."""
    from infinity.comm.ranks import Ranks
    from infinity.shards.saved import find_saved

    folder = tmp_path / "fuzz"
    if not folder.exists():
        shutil.copytree(kept / "2", folder)
        for path in folder.glob("*.commit?"):
            if path != record_of(folder):
                path.unlink()
    record, layout = record_of(kept / "2"), layout_of(kept / "2")
    (magic, (body, state)), (layout_magic, [described]) = parts_of(record), parts_of(layout)
    body, described = json.loads(body), json.loads(described)
    of_layout = data.draw(st.booleans())
    path = data.draw(st.sampled_from(changes(described if of_layout else body)))
    new = data.draw(ABSURD)
    if of_layout:
        described = changed(described, path, new)
        crc = rewrite(folder / layout.name, described, magic=layout_magic, rest=[])
        body["layout"][1] = crc
    else:
        body = changed(body, path, new)
        shutil.copy(layout, folder)
    rewrite(folder / record.name, body, magic=magic, rest=[state])
    with contextlib.suppress(InfinityError):
        find_saved([folder], Ranks(0, 1, torch.device("cpu")), lambda line: None)
