"""The pipeline over the real engines and a real file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from infinity.core.nbytes import Extent, Transfer
from infinity.device.memory import HostPool
from infinity.nvme.engines import make_engine
from infinity.nvme.volume import Volume
from infinity.optim.elementwise import ADAMW
from infinity.optim.rules import HostRule
from infinity.optim.state import StateLayout
from infinity.partition.unit import SHARD_QUANTUM
from infinity.shards.journal import ChunkExtents, Version
from infinity.shards.pipeline import Run, ShardSource, UpdateJob, UpdatePipeline

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NUMEL, CHUNK = 11 * SHARD_QUANTUM, 4 * SHARD_QUANTUM


class Disk:
    """A volume, an engine and a pool for one test."""

    def __init__(self, name: str, directory: Path) -> None:
        self.volume = Volume([directory / "a", directory / "b"])
        self.engine = make_engine(name, self.volume)
        self.pool = HostPool(2 * 2**20)

    def move(self, extent: Extent, content: Tensor | None = None) -> Tensor:
        """Write ``content``, or read what is there."""
        with self.pool.lease(extent.nbytes, who="test") as lease:
            if content is not None:
                lease.tensor.copy_(content)
                self.engine.write(extent, lease.memory).wait()
            else:
                self.engine.read(extent, lease.memory).wait()
            return lease.tensor.clone()

    def close(self) -> None:
        self.engine.close()
        self.pool.close()
        self.volume.close()


@pytest.fixture(params=["threads", "libaio"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(request.param, tmp_path)
    yield disk
    assert disk.pool.leased_nbytes == 0
    disk.close()


class Shard:
    """A shard with two versions on disk."""

    def __init__(self, disk: Disk, layout: StateLayout) -> None:
        self.layout = layout
        self.weight = torch.randn(NUMEL).to(layout.dtype)
        self.state = torch.randint(0, 60, (layout.state_nbytes(NUMEL),), dtype=torch.uint8)
        self.versions = [self._extents(disk) for _ in range(2)]
        for (weight, state), start in zip(self.versions[0], range(0, NUMEL, CHUNK), strict=True):
            stop = min(NUMEL, start + CHUNK)
            disk.move(weight, self.weight[start:stop].view(torch.uint8))
            disk.move(state, self._state_bytes(start, stop))

    def _extents(self, disk: Disk) -> list[tuple[Extent, Extent]]:
        numels = [min(CHUNK, NUMEL - start) for start in range(0, NUMEL, CHUNK)]
        sizes = [(self.layout.weight_nbytes(n), self.layout.state_nbytes(n)) for n in numels]
        return [
            (disk.volume.allocate(weight, what="weight"), disk.volume.allocate(state, what="state"))
            for weight, state in sizes
        ]

    def _state_bytes(self, start: int, stop: int) -> Tensor:
        fields = self.layout.views(self.state, NUMEL)
        return torch.cat([field[start:stop].contiguous().view(torch.uint8) for field in fields])

    def job(self, read: int, weight: Tensor | None, grad: Tensor, **more: object) -> UpdateJob:
        reads, writes = (
            Version(
                tuple(
                    ChunkExtents(start, min(CHUNK, NUMEL - start), *extents)
                    for start, extents in zip(range(0, NUMEL, CHUNK), self.versions[each], strict=True)
                )
            )
            for each in (read, 1 - read)
        )
        given = {"on_computed": lambda: None, "on_done": lambda error: None} | more
        return UpdateJob(
            name="u", weight=weight, grad=grad, source=ShardSource(reads), writes=writes, **given
        )

    def check(self, disk: Disk, version: int) -> None:
        for (weight, state), start in zip(self.versions[version], range(0, NUMEL, CHUNK), strict=True):
            stop = min(NUMEL, start + CHUNK)
            assert torch.equal(disk.move(weight), self.weight[start:stop].view(torch.uint8))
            assert torch.equal(disk.move(state), self._state_bytes(start, stop))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ten_steps_over_two_versions_equal_the_same_steps_in_memory(disk, dtype):
    layout, rule = ADAMW.layout(dtype), HostRule(ADAMW, dtype)
    shards = [Shard(disk, layout) for _ in range(3)]
    pipeline = UpdatePipeline(disk.engine, disk.pool, layout, rule)
    for step in range(1, 11):
        hyper = ADAMW.hyper({**ADAMW.idle, "lr": 1e-2, "weight_decay": 0.1}, step=step)
        for at, shard in enumerate(shards):
            grad = torch.randn(NUMEL).to(dtype)
            at_hand = shard.weight.clone() if (step + at) % 2 else None
            runs = (Run(3, 5000, hyper, ADAMW), Run(5000, NUMEL - 7, hyper, ADAMW))
            done: list[BaseException | None] = []
            pipeline.submit(
                shard.job((step - 1) % 2, at_hand, grad, runs=runs, priority=-at, on_done=done.append)
            )
            part = slice(3, NUMEL - 7)
            state = tuple(field[part] for field in layout.views(shard.state, NUMEL))
            rule.update(shard.weight[part], grad[part], state, shard.weight[part], hyper)
        pipeline.drain()
        assert done == [None]
    pipeline.close()
    for shard in shards:
        shard.check(disk, 10 % 2)


def lost() -> Transfer:
    """A transfer that failed."""
    transfer = Transfer()
    transfer.finish(OSError(5, "lost"))
    return transfer


def test_an_error_of_the_drive_leaves_the_committed_version_whole(disk, monkeypatch):
    layout = ADAMW.layout(torch.bfloat16)
    shard = Shard(disk, layout)
    write, count = disk.engine.write, 0

    def faulty(extent: Extent, memory: memoryview) -> Transfer:
        nonlocal count
        count += 1
        return lost() if count == 4 else write(extent, memory)

    monkeypatch.setattr(disk.engine, "write", faulty)
    pipeline = UpdatePipeline(disk.engine, disk.pool, layout, HostRule(ADAMW, torch.bfloat16))
    run = Run(0, NUMEL, ADAMW.hyper({**ADAMW.idle, "lr": 1e-2}), ADAMW)
    pipeline.submit(shard.job(0, None, torch.ones(NUMEL), runs=(run,)))
    with pytest.raises(OSError, match="lost"):
        pipeline.drain()
    pipeline.close()
    monkeypatch.undo()
    shard.check(disk, 0)
