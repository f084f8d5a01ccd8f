"""The commit point: what the record on disk names is whole, at every moment."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import infinity
from infinity.core.nbytes import Transfer
from infinity.shards.journal import (
    CommitRecord,
    CorruptJournalError,
    Journal,
    RankFiles,
    pack,
    read_journal,
    read_sums,
)
from tests.helpers import models
from tests.helpers.journals import ended_in_the_transaction, newest, records, run_sql, units_in
from tests.helpers.reference import Rule
from tests.helpers.training import build, optimizer_for, streaming


def test_a_journal_is_not_written_through_a_planted_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for ending in ("", "-head"):
        (tmp_path / f"rank0-1.commits{ending}").symlink_to(victim)
    with pytest.raises(infinity.InfinityError, match="symbolic link"):
        Journal(tmp_path, RankFiles(0))
    assert victim.read_text() == "precious"


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
            for unit, kept in zip(runtime.units, record.units, strict=True):
                assert (kept.version, kept.versions) == (unit.home.version, unit.home.versions)
                assert kept.counts == (step + 1,) * len(unit.segments)
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
    commits = Journal(tmp_path, RankFiles(0))
    good, bad = Transfer(), Transfer()
    good.finish(None)
    commits.add(CommitRecord(1, units_in(0)), [good])
    commits.wait()
    commits.add(CommitRecord(2, units_in(1)), [good, bad])
    bad.finish(infinity.DiskError(errno.EIO, "write", tmp_path / "x", offset=0, nbytes=1))
    with pytest.raises(infinity.DiskError):
        commits.wait()
    assert newest(tmp_path) == CommitRecord(1, units_in(0), number=1)
    commits.close()


def test_a_small_state_that_could_not_be_read_back_is_never_recorded(tmp_path):
    commits = Journal(tmp_path, RankFiles(0))
    commits.add(CommitRecord(1, units_in(0), state=pack({"follow": {"loader": {"position": 3}}})), [])
    commits.wait()
    commits.add(CommitRecord(2, units_in(1), state=pack({"follow": {"loader": tmp_path}})), [])
    with pytest.raises(infinity.StateError, match=r"what it follows, cannot be kept with a commit"):
        commits.wait()
    assert newest(tmp_path).step == 1
    commits.close()


def test_a_commit_that_no_thread_can_write_any_more_ends_with_the_error(tmp_path):
    commits = Journal(tmp_path, RankFiles(0))
    commits.close()
    commits.add(CommitRecord(1, units_in(0)), [])
    with pytest.raises(RuntimeError, match="shutdown"):
        commits.wait()


# --- the journal --------------------------------------------------------------------------------


def test_what_was_committed_is_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path, RankFiles(0, run=7))
    assert records(tmp_path) == []
    for step in (1, 2, 3):
        record = CommitRecord(step, units_in(*(number % 3 for number in range(step, 1000))))
        journal.append(record)
        assert newest(tmp_path) == replace(record, number=step)
    journal.retire()
    assert [record.step for record in records(tmp_path)] == [3]
    journal.invalidate()
    assert records(tmp_path) == []
    journal.append(CommitRecord(3))
    journal.close()
    assert [record.number for record in records(tmp_path)] == [4]
    assert Journal(tmp_path, RankFiles(0, run=7)).numbers


def test_a_small_state_may_be_larger_than_a_value_of_sqlite(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("infinity.shards.journal._ROW_NBYTES", 100)
    journal, sums = Journal(tmp_path, RankFiles(0)), [b"1234", b"5678"]
    states = [bytes(range(n)) for n in (250, 201, 100)]
    for step, state in enumerate(states, 1):
        journal.append(CommitRecord(step, drives=2, state=state), sums)
        found = read_journal(journal.path).commits[step]
        assert (found.state, read_sums(journal.path, found)) == (state, sums)
    journal.append(CommitRecord(4, state=states[0]), sums)
    journal.close()
    run_sql(journal.path, "UPDATE blobs SET body = zeroblob(50) WHERE kind = -1 AND length(body) = 50")
    contents = read_journal(journal.path)
    assert (4 in contents.commits, len(contents.problems)) == (False, 1)


def test_a_transaction_that_was_cut_off_leaves_the_old_commit(tmp_path: Path) -> None:
    journal = Journal(tmp_path, RankFiles(0))
    journal.append(CommitRecord(1, units_in(0, 1)))
    journal.close()
    with ended_in_the_transaction(KeyboardInterrupt()):
        journal = Journal(tmp_path, RankFiles(0))
        with pytest.raises(KeyboardInterrupt):
            journal.append(CommitRecord(2, units_in(1, 1)))
        assert [record.step for record in records(tmp_path)] == [1]
        journal.close()
    journal = Journal(tmp_path, RankFiles(0))
    journal.append(CommitRecord(3, units_in(1, 0)))
    assert [record.step for record in records(tmp_path)] == [1, 3]


def test_a_commit_is_synced_before_versions_are_written_over(tmp_path: Path, monkeypatch) -> None:
    journal = Journal(tmp_path, RankFiles(0), synced=True)
    assert run_sql(journal.path, "SELECT 1") == [(1,)]
    journal.append(CommitRecord(1, units_in(0)))
    journal.append(CommitRecord(2, units_in(1)))
    calls: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(fd), fsync(fd)))
    journal.retire()
    assert len(calls) == 1  # the head; SQLite syncs by itself


def test_any_changed_byte_is_noticed(tmp_path: Path) -> None:
    """Wherever it is: a damaged commit is not read as another one."""
    journal = Journal(tmp_path, RankFiles(0))
    journal.append(CommitRecord(7, units_in(*range(3), *range(3)), base={"x": "y" * 90}, state=b"s" * 300))
    journal.close()
    whole, [record] = journal.path.read_bytes(), read_journal(journal.path).commits.values()
    table = whole.index(b"CREATE TABLE commits")
    for at in {*range(0, len(whole), 7), *range(table, table + 60)}:
        journal.path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            contents = read_journal(journal.path)
        except CorruptJournalError:
            continue
        assert contents.problems or [*contents.commits.values()] == [record]
    head = journal.path.with_name(f"{journal.path.name}-head")
    journal.path.write_bytes(whole)
    for broken in (b"", head.read_bytes()[:20], b"\xff" * 30):
        head.write_bytes(broken)
        with pytest.raises(CorruptJournalError, match="head: not what was written"):
            read_journal(journal.path)


def test_a_journal_that_lost_its_end_is_found_out(tmp_path: Path) -> None:
    """An unsynced one, by a power cut: its older commit has been written over since."""
    journal = Journal(tmp_path, RankFiles(0))
    journal.append(CommitRecord(1, units_in(0)))
    before = journal.path.read_bytes()
    journal.append(CommitRecord(2, units_in(1)))
    journal.retire()
    journal.close()
    journal.path.write_bytes(before)
    contents = read_journal(journal.path)
    assert not contents.commits
    assert "commit 2 is missing" in contents.problems[0]
