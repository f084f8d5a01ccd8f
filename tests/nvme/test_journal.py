"""The commit record is the old one or the new one, never something between."""

import os
from pathlib import Path

import pytest

from infinity.nvme.errors import CorruptRecordError
from infinity.shards.updates import CommitRecord, read_commit, write_commit


def test_what_was_committed_is_read(tmp_path: Path) -> None:
    path = tmp_path / "commit"
    assert read_commit(path) is None
    for step in (1, 2):
        record = CommitRecord(step, tuple(range(step, 1000)))
        write_commit(path, record)
        assert read_commit(path) == record
    assert [file.name for file in tmp_path.iterdir()] == ["commit"]


def test_a_crash_before_the_name_changes_leaves_the_old_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "commit"
    write_commit(path, CommitRecord(1, (0, 1)))

    def crash(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        write_commit(path, CommitRecord(2, (1, 1)))
    monkeypatch.undo()
    assert read_commit(path) == CommitRecord(1, (0, 1))
    write_commit(path, CommitRecord(3, (1, 0)))
    assert read_commit(path) == CommitRecord(3, (1, 0))


def test_the_record_is_on_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd)))
    monkeypatch.setattr(Path, "replace", lambda a, b: (calls.append("replace"), replace(a, b)))
    write_commit(tmp_path / "commit", CommitRecord(1, ()))
    assert calls == ["fsync", "replace", "fsync"]


def test_any_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "commit"
    write_commit(path, CommitRecord(7, (1, 0, 1)))
    whole = path.read_bytes()
    for at in range(len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CorruptRecordError, match="not a whole commit record"):
            read_commit(path)
    for broken in (b"", whole[:20], whole[:-5], b"\xff" * 30):
        path.write_bytes(broken)
        with pytest.raises(CorruptRecordError):
            read_commit(path)
