"""The memory that pools lend: private mappings on huge pages, and accelerator memory.

[Note: why a mapping of our own]
The kernel pins a buffer's pages for every direct request: 2 MiB pages make that one step in place of
512. Only private anonymous mappings get them by MADV_HUGEPAGE. A mapping is also given back to the
system at once, which an allocator does when it pleases, and is exactly as large as was asked.

[Note: forked children]
Buffers are not inherited (MADV_DONTFORK). Otherwise every worker of a ``DataLoader`` would, page by
page as training writes on, keep a second copy of the whole pool, and huge pages would be broken up.
"""

import ctypes
import mmap
from typing import Any, Protocol

import torch
from torch import Tensor

from infinity.core.errors import BudgetError, StateError
from infinity.core.extent import BLOCK_NBYTES, aligned
from infinity.core.nbytes import format_nbytes

#: Size of a huge page (bytes).
HUGE_NBYTES = 2 * 2**20


def rounded(nbytes: int) -> int:
    """What a buffer of ``nbytes`` takes: whole pages, huge ones from 2 MiB on (bytes)."""
    return aligned(max(1, nbytes), HUGE_NBYTES if nbytes >= HUGE_NBYTES else BLOCK_NBYTES)


def _cudart() -> Any:
    cuda: Any = torch.cuda
    return cuda.cudart()


class Buffer(Protocol):
    """Memory of one buffer; ``tensor`` is uint8 and spans all of it."""

    nbytes: int
    tensor: Tensor

    @property
    def memory(self) -> memoryview: ...

    def close(self) -> None:
        """Give the memory back; nobody may use it any more."""
        ...


class HostBuffer:
    """A private anonymous mapping, on huge pages where it is that large.

    Args:
        nbytes: As :func:`rounded` gives it.
        pin: Page-lock it for the accelerator.
    """

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        self.nbytes, self._pinned = nbytes, False
        huge = nbytes >= HUGE_NBYTES
        # Older kernels put a mapping anywhere: one spare huge page of addresses, never touched,
        # leaves room to start on a multiple of 2 MiB.
        span = nbytes + HUGE_NBYTES if huge else nbytes
        self._map = mmap.mmap(-1, span, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_DONTFORK)
        start = 0
        if huge:
            self._advise_huge()
            start = -ctypes.addressof(ctypes.c_char.from_buffer(self._map)) % HUGE_NBYTES
        self._memory = memoryview(self._map)[start : start + nbytes]
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=start)
        if pin:
            self._register()

    @property
    def memory(self) -> memoryview:
        return self._memory

    def _advise_huge(self) -> None:
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except (OSError, AttributeError):  # a kernel without them: slower, and right
            return

    def _register(self) -> None:
        code = int(_cudart().cudaHostRegister(self.tensor.data_ptr(), self.nbytes, 0))
        if code != 0:
            raise BudgetError(
                f"CUDA could not page-lock {format_nbytes(self.nbytes)} of host memory (error {code}); "
                "lower memory.host, or raise the limit of locked memory (ulimit -l)"
            )
        self._pinned = True

    def close(self) -> None:
        if self._pinned:
            _cudart().cudaHostUnregister(self.tensor.data_ptr())
            self._pinned = False
        # The pages go now; the addresses go with the last view of them, so that a view that
        # outlives its lease reads zeros and never somebody else's memory.
        self._map.madvise(mmap.MADV_DONTNEED)


class DeviceBuffer:
    """Accelerator memory, from torch's allocator."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)

    @property
    def memory(self) -> memoryview:
        raise StateError(f"a buffer on {self.tensor.device} has no host memory; use its tensor")

    def close(self) -> None:
        """Nothing: torch's allocator takes the memory with the last reference."""
