"""A volume, memory, and every engine that this machine can run."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infinity.core.transfer import TransferEngine
from infinity.device.memory import BufferLease, HostPool
from infinity.nvme.engines import make_engine
from infinity.nvme.engines.libaio_engine import LibaioEngine
from infinity.nvme.engines.threads_engine import ThreadsEngine
from infinity.nvme.volume import Volume

MIB = 2**20


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    volume = Volume([tmp_path / "a.bin", tmp_path / "b.bin"], [2.0, 1.0])
    yield volume
    volume.close()


@pytest.fixture
def lease() -> Iterator[Callable[..., BufferLease]]:
    """Page-aligned memory of so many bytes, filled with a number."""
    pool = HostPool(256 * MIB)

    def hold(nbytes: int, fill: int = 0) -> BufferLease:
        lease = pool.lease(nbytes, who="test")
        lease.tensor.fill_(fill)
        return lease

    yield hold
    pool.close()


def make(name: str, volume: Volume) -> TransferEngine:
    """The engine called ``name``, or a skip."""
    if name == "libaio":
        try:
            return LibaioEngine(volume)
        except (ImportError, OSError) as error:
            pytest.skip(f"libaio: {error}")
    if name == "gds":
        pytest.importorskip("kvikio")
        return make_engine("gds", volume)
    return ThreadsEngine(volume)


@pytest.fixture(params=["libaio", "threads", pytest.param("gds", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest, volume: Volume) -> Iterator[TransferEngine]:
    engine = make(request.param, volume)
    yield engine
    engine.close()
