"""The commit point: what the record on disk names is whole, at every moment."""

import errno
import os
from pathlib import Path

import pytest
import torch

import infinity
from infinity.core.transfer import Transfer
from infinity.shards.commits import (
    CommitRecord,
    Commits,
    CorruptRecordError,
    RankFiles,
    pack,
    read_commit,
    write_commit,
)
from tests.helpers import models
from tests.helpers.reference import Rule
from tests.helpers.training import build, optimizer_for, streaming


def test_a_record_is_not_written_through_a_planted_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("rank0.commit", "rank0.commit.new"):
        (tmp_path / name).symlink_to(victim)
    record = CommitRecord(3, (0, 1))
    write_commit(tmp_path / "rank0.commit", record)
    assert (victim.read_text(), read_commit(tmp_path / "rank0.commit")) == ("precious", record)


def newest(folder):
    records = [read_commit(path) for path in folder.glob("*.commit?")]
    return max(records, key=lambda record: record.step)


def test_the_record_follows_every_committed_step(tmp_path):
    factory, batch = models.build("gpt", seed=1)
    for clip in (1.0, None):
        model = build(factory, "bf16", streaming(tmp_path, "run.name=mine"))
        optimizer = optimizer_for(model, Rule(max_grad_norm=clip))
        runtime = optimizer.runtime
        for step in range(3):
            model(**batch(step)).loss.backward()
            optimizer.step()
            optimizer.synchronize()
            record = newest(tmp_path / "mine")
            assert record.step == step + 1
            assert record.versions == tuple(unit.home.version for unit in runtime.units)
            assert record.counts == tuple((step + 1,) * len(unit.segments) for unit in runtime.units)
        optimizer.close()


def test_the_committed_version_is_untouched_while_the_next_step_computes(tmp_path):
    factory, batch = models.build("gpt", seed=2)
    model = build(factory, "bf16", streaming(tmp_path))
    optimizer = optimizer_for(model, Rule(max_grad_norm=None))
    runtime = optimizer.runtime
    model(**batch(0)).loss.backward()
    optimizer.step()
    optimizer.synchronize()
    before = {u.index: runtime.tiers.shard_fields(u) for u in runtime.units}
    model(**batch(1)).loss.backward()  # its updates write the next version
    runtime.executor().updates.pipeline.drain()
    for unit in runtime.units:
        after = runtime.tiers.shard_fields(unit)
        assert all(torch.equal(a, b) for a, b in zip(before[unit.index], after, strict=True))
    optimizer.step()
    optimizer.synchronize()
    changed = [not torch.equal(before[u.index][0], runtime.tiers.shard_fields(u)[0]) for u in runtime.units]
    assert all(changed)
    optimizer.close()


def test_a_step_whose_update_failed_is_never_recorded(tmp_path):
    commits = Commits(tmp_path, RankFiles(0))
    good, bad = Transfer(), Transfer()
    good.finish(None)
    commits.add(CommitRecord(1, (0,)), [good])
    commits.wait()
    commits.add(CommitRecord(2, (1,)), [good, bad])
    bad.finish(infinity.DiskError(errno.EIO, "write", tmp_path / "x", offset=0, nbytes=1))
    with pytest.raises(infinity.DiskError):
        commits.wait()
    assert newest(tmp_path) == CommitRecord(1, (0,), number=1)
    commits.close()


def test_a_small_state_that_could_not_be_read_back_is_never_recorded(tmp_path):
    commits = Commits(tmp_path, RankFiles(0))
    commits.add(CommitRecord(1, (0,), state=pack({"follow": {"loader": {"position": 3}}})), [])
    commits.wait()
    commits.add(CommitRecord(2, (1,), state=pack({"follow": {"loader": tmp_path}})), [])
    with pytest.raises(infinity.StateError, match=r"what it follows, cannot be kept with a commit"):
        commits.wait()
    assert newest(tmp_path).step == 1
    commits.close()


# --- the record ---------------------------------------------------------------------------------


def test_what_was_committed_is_read(tmp_path: Path) -> None:
    path = tmp_path / "commit"
    assert read_commit(path) is None
    for step in (1, 2):
        record = CommitRecord(step, tuple(number % 3 for number in range(step, 1000)))
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
