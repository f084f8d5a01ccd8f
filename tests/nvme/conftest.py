"""A volume, memory, and every engine that this machine can run."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infinity.core.nbytes import TransferEngine
from infinity.device.memory import HostPool, Lease
from infinity.nvme.engines import make_engine
from infinity.nvme.volume import Volume

MIB = 2**20


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    volume = Volume([tmp_path / "a.bin", tmp_path / "b.bin"], [2.0, 1.0])
    yield volume
    volume.close()


@pytest.fixture
def lease() -> Iterator[Callable[..., Lease]]:
    """Page-aligned memory of so many bytes, filled with a number."""
    pool = HostPool(256 * MIB)

    def hold(nbytes: int, fill: int = 0) -> Lease:
        lease = pool.lease(nbytes, who="test")
        lease.tensor.fill_(fill)
        return lease

    yield hold
    pool.close()


@pytest.fixture(params=["libaio", "threads", pytest.param("gds", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest, volume: Volume) -> Iterator[TransferEngine]:
    if request.param == "gds":
        pytest.importorskip("kvikio")
    engine = make_engine(request.param, volume)
    yield engine
    engine.close()
