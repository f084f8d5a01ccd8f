"""The faulty engine fails as a disk does, and moves everything else."""

import errno
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.core.errors import DiskError
from infinity.core.nbytes import Extent
from infinity.device.memory import HostPool
from infinity.nvme.engines import make_engine
from infinity.nvme.volume import Volume
from tests.helpers.faulty import Fault, FaultyEngine
from tests.helpers.limits import comes_true

NBYTES = 64 * 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Volume, Extent, memoryview]]:
    pool, volume = HostPool(2**20), Volume([tmp_path / "v.bin"])
    with pool.lease(NBYTES, who="test") as lease:
        yield volume, volume.allocate(NBYTES, what="test"), lease.memory
    volume.close()


def test_the_nth_write_fails_and_the_others_do_not(disk: tuple[Volume, Extent, memoryview]) -> None:
    volume, extent, memory = disk
    engine = FaultyEngine(make_engine("threads", volume), Fault(on="write", nth=2, errno=errno.ENOSPC))
    engine.write(extent, memory).wait()
    second = engine.write(extent, memory)
    with pytest.raises(DiskError, match="ENOSPC"):
        second.wait()
    engine.read(extent, memory).wait()
    engine.write(extent, memory).wait()
    assert (engine.reads, engine.writes, engine.nbytes_written) == (1, 3, 2 * NBYTES)
    engine.close()


def test_a_short_transfer_moves_its_share_and_is_an_error(disk: tuple[Volume, Extent, memoryview]) -> None:
    volume, extent, memory = disk
    engine = FaultyEngine(make_engine("threads", volume), Fault(on="read", nth=1, share=0.5, forever=True))
    memory[:] = b"\1" * NBYTES
    engine.write(extent, memory).wait()
    memory[:] = b"\0" * NBYTES
    for _ in range(2):
        with pytest.raises(DiskError, match=f"after {NBYTES // 2} bytes"):
            engine.read(extent, memory).wait()
    assert bytes(memory) == b"\1" * (NBYTES // 2) + b"\0" * (NBYTES // 2)
    engine.close()


@pytest.mark.parametrize("held", [False, True])
def test_a_slow_disk_ends_late_and_well(disk: tuple[Volume, Extent, memoryview], held: bool) -> None:
    volume, extent, memory = disk
    engine = FaultyEngine(make_engine("threads", volume), delay_s=0.0 if held else 0.05)
    began, called = time.monotonic(), []
    if held:
        engine.hold()
    move = engine.write(extent, memory)
    move.then(lambda: called.append(move.done()))
    if held:
        assert not move.done()
        engine.let_go()
    move.wait()
    assert held or time.monotonic() - began >= 0.05
    move.then(lambda: called.append(True))
    assert comes_true(lambda: called == [True, True])
    engine.close()
