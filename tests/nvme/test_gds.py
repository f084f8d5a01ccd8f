"""GPUDirect Storage by kvikio's asynchronous calls, with a stand-in for kvikio and for CUDA's streams."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from infinity.core.config import SettingError
from infinity.core.errors import DiskError
from infinity.device.memory import Lease
from infinity.nvme import probe
from infinity.nvme.engines import make_engine
from infinity.nvme.volume import Volume

MIB = 2**20
Hold = Callable[..., Lease]


class Stream:
    """A stream of CUDA: what it was told to wait for, and the raw number that kvikio takes."""

    def __init__(self, device: torch.device) -> None:
        self.cuda_stream, self.waited = id(self), list[object]()
        streams[self.cuda_stream] = self

    def wait_event(self, event: object) -> None:
        self.waited.append(event)

    def record_event(self) -> object:
        return object()


class CuFile:
    """The part of ``kvikio.CuFile`` that is used."""

    longest = 2**62  # what one call moves at most

    def __init__(self, path: Path, flags: str) -> None:
        assert flags == "r+"
        self._fd = os.open(path, os.O_RDWR)

    def raw_read_async(self, buf: Tensor, stream: int, size: int, file_offset: int) -> Any:
        return self._later(
            stream, lambda: os.preadv(self._fd, [buf.numpy().data[: self._most(size)]], file_offset)
        )

    def raw_write_async(self, buf: Tensor, stream: int, size: int, file_offset: int) -> Any:
        return self._later(
            stream, lambda: os.pwrite(self._fd, buf.numpy().data[: self._most(size)], file_offset)
        )

    def _most(self, size: int) -> int:
        return min(size, self.longest)

    def _later(self, stream: int, move: Callable[[], int]) -> Any:
        """Bytes move when the future is asked: a test that never asks finds zeros."""
        calls.append((stream, threading.get_ident(), len(streams[stream].waited)))
        return SimpleNamespace(check_bytes_done=move)

    def close(self) -> None:
        os.close(self._fd)


streams: dict[int, Stream] = {}
calls: list[tuple[int, int, int]] = []


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    callers = Stream(torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "kvikio", SimpleNamespace(CuFile=CuFile))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: callers)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    calls.clear()
    yield
    streams.clear()


def moved(volume: Volume, nbytes: int) -> tuple[Tensor, Tensor, Any]:
    """Bytes that went to the drives and came back, and the engine, which is closed."""
    engine: Any = make_engine("gds", volume)
    extent = volume.allocate(nbytes, what="unit")
    out = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    back = torch.zeros_like(out)
    engine.write(extent, out).wait()
    engine.read(extent, back).wait()
    engine.close()
    return out, back, engine


def test_bytes_of_the_accelerator_move_on_a_stream_of_each_thread_after_what_the_caller_computes(
    volume: Volume, kvikio: None
) -> None:
    out, back, engine = moved(volume, 20 * MIB)
    assert torch.equal(out, back)
    assert (engine.nbytes_read, engine.nbytes_written) == (20 * MIB, 20 * MIB)
    assert len(calls) >= 6  # requests of at most 8 MiB
    assert len({stream for stream, _, _ in calls}) == len({thread for _, thread, _ in calls})
    assert all(waited for _, _, waited in calls)


def test_a_short_transfer_goes_on(volume: Volume, kvikio: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CuFile, "longest", 3 * MIB)
    out, back, _ = moved(volume, 8 * MIB)
    assert torch.equal(out, back)


def test_what_cufile_says_of_an_error_reaches_who_waits(
    volume: Volume, kvikio: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("cuFile: the driver went away")

    monkeypatch.setattr(CuFile, "raw_write_async", broken)
    with pytest.raises(DiskError, match="EIO") as raised:
        moved(volume, 4096)
    assert raised.value.__notes__ == ["RuntimeError: cuFile: the driver went away"]


def test_units_go_through_host_memory_by_the_fastest_engine(
    volume: Volume, lease: Hold, kvikio: None
) -> None:
    engine: Any = make_engine("gds", volume)
    extent, out, back = volume.allocate(MIB, what="unit"), lease(MIB, 7), lease(MIB)
    engine.write(extent, out.memory).wait()
    engine.read(extent, back.memory, urgent=True).wait()
    assert torch.equal(out.tensor, back.tensor)
    assert (engine.nbytes_read, engine.nbytes_written, calls) == (MIB, MIB, [])
    engine.close()


def test_the_probe_measures_the_way_that_activations_take(
    tmp_path: Path, kvikio: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *args, device, **kwargs: ones(*args, device="cpu", **kwargs))
    speed = probe.measure(tmp_path, MIB, allocated_on=torch.device("cuda"))
    assert speed.read_bytes_per_s > 0
    assert calls


def test_without_kvikio_the_setting_says_what_to_install(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(SettingError, match=r"pip install 'infinity-offload\[gds\]'"):
        make_engine("gds", volume)
