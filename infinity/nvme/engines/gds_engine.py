"""GPUDirect Storage: drive and accelerator exchange bytes without host memory between them.

[Note: on streams of our own]
kvikio's synchronous calls wait for the default stream, and with it for all that computes; its asynchronous
ones for the stream they are given. So each thread of the engine has one, which first waits for the work that
the caller's stream had when the transfer was asked for. The thread waits until the bytes have moved.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from infinity.core.errors import StateError
from infinity.core.nbytes import Extent, Transfer, TransferEngine
from infinity.nvme.engines import Memory, Move, Request, ThreadsEngine
from infinity.nvme.volume import Volume


class GdsEngine:
    """Moves accelerator tensors by kvikio's asynchronous cuFile calls; host memory by ``host``'s engine.

    Raises an ImportError without kvikio, and a StateError without an accelerator.
    """

    name = "gds"

    def __init__(self, volume: Volume, host: Callable[[], TransferEngine]) -> None:
        self._device = _DeviceEngine(volume)
        self._host = host()

    def read(self, extent: Extent, memory: Memory, *, urgent: bool = False) -> Transfer:
        if isinstance(memory, Tensor):
            return self._device.read(extent, memory, urgent=urgent)
        return self._host.read(extent, memory, urgent=urgent)

    def write(self, extent: Extent, memory: Memory) -> Transfer:
        if isinstance(memory, Tensor):
            return self._device.write(extent, memory)
        return self._host.write(extent, memory)

    @property
    def nbytes_read(self) -> int:
        return self._host.nbytes_read + self._device.nbytes_read

    @property
    def nbytes_written(self) -> int:
        return self._host.nbytes_written + self._device.nbytes_written

    def close(self) -> None:
        self._device.close()
        self._host.close()


class _DeviceEngine(ThreadsEngine):
    """Moves tensors of the accelerator: see [Note: on streams of our own]."""

    name = "gds"

    def __init__(self, volume: Volume) -> None:
        import kvikio  # imported here: only machines with CUDA have it

        if not torch.cuda.is_available():
            raise StateError("memory.engine=gds needs a CUDA device; use auto")
        self._streams = threading.local()
        self._files: list[Any] = [kvikio.CuFile(volume.path(file), "r+") for file in range(len(volume))]
        super().__init__(volume)

    def begin(self, move: Move) -> None:
        assert isinstance(move.memory, Tensor)
        move.after = torch.cuda.current_stream(move.memory.device).record_event()

    def _move(self, request: Request) -> int:
        memory = request.memory()
        if not hasattr(self._streams, "mine"):
            torch.accelerator.set_device_index(memory.device)  # of this thread
            self._streams.mine = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]
        stream = self._streams.mine
        stream.wait_event(request.move.after)
        file = self._files[request.file]
        call = file.raw_write_async if request.move.writes else file.raw_read_async
        at = request.offset + request.moved
        moving = call(memory, stream.cuda_stream, size=memory.nbytes, file_offset=at)
        return int(moving.check_bytes_done())  # once the bytes have moved

    def stop(self) -> None:
        super().stop()
        for file in self._files:
            file.close()
