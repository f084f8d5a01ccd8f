"""The commit point: what the record on disk names is whole, at every moment."""

import errno

import pytest
import torch

import infinity
from infinity.core.transfer import TransferFuture
from infinity.shards.updates import CommitRecord, read_commit
from tests.helpers import models
from tests.helpers.reference import Rule
from tests.helpers.training import build, optimizer_for, streaming


def test_the_record_follows_every_committed_step(tmp_path):
    factory, batch = models.build("gpt", seed=1)
    for clip in (1.0, None):
        model = build(factory, "bf16", streaming(tmp_path))
        optimizer = optimizer_for(model, Rule(max_grad_norm=clip))
        runtime = optimizer.runtime
        for step in range(3):
            model(**batch(step)).loss.backward()
            optimizer.step()
            optimizer.synchronize()
            record = read_commit(runtime.executor().updates.commits.path)
            assert record == CommitRecord(step + 1, tuple(unit.version for unit in runtime.units))
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
    from infinity.shards.updates import Commits

    commits = Commits(tmp_path / "record", lambda: None)
    good, bad = TransferFuture(), TransferFuture()
    good.finish(None)
    commits.add(CommitRecord(1, (0,)), [good])
    commits.wait()
    commits.add(CommitRecord(2, (1,)), [good, bad])
    bad.finish(infinity.DiskError(errno.EIO, "write", tmp_path / "x", offset=0, nbytes=1))
    with pytest.raises(infinity.DiskError):
        commits.wait()
    assert read_commit(commits.path) == CommitRecord(1, (0,))
    commits.close()
