"""GPUDirect Storage: drive and accelerator exchange bytes without host memory between them."""

from typing import Any

import torch

from infinity.core.errors import StateError
from infinity.nvme.engines.base import Request
from infinity.nvme.engines.threads_engine import ThreadsEngine
from infinity.nvme.volume import Volume


class GdsEngine(ThreadsEngine):
    """kvikio's cuFile calls on the threads of :class:`ThreadsEngine`.

    ``memory`` may be a uint8 tensor on the accelerator; a memoryview works as with any engine.

    Raises:
        ImportError: kvikio is missing (``pip install infinity-offload[gds]``).
        StateError: There is no accelerator.
    """

    def __init__(self, volume: Volume) -> None:
        import kvikio  # imported here: only machines with CUDA have it

        if not torch.cuda.is_available():
            raise StateError("memory.engine=gds needs a CUDA device; use auto")
        self._files: list[Any] = [kvikio.CuFile(volume.path(file), "r+") for file in range(len(volume))]
        super().__init__(volume, name="gds")

    def _move(self, request: Request) -> int:
        memory = request.memory()
        if isinstance(memory, memoryview):
            return super()._move(request)
        file = self._files[request.file]
        call = file.raw_write if request.move.writes else file.raw_read
        # The call returns when the bytes have moved: no stream of ours takes part.
        return int(call(memory, size=memory.nbytes, file_offset=request.offset + request.moved))

    def _stop(self) -> None:
        super()._stop()
        for file in self._files:
            file.close()
