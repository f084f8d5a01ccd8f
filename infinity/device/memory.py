"""Bounded pools of host and device memory, counted to the byte.

A buffer is as large as was asked, in whole pages. One that is given back is kept for the next lease of
the same size; kept buffers are unmapped, oldest first, as soon as their bytes are needed. So leased
and kept bytes together never exceed the capacity.

[Note: why a mapping of our own]
The kernel pins a buffer's pages for every direct request: 2 MiB pages make that one step in place of
512. Only private anonymous mappings get them by MADV_HUGEPAGE. A mapping is also given back to the
system at once, which an allocator does when it pleases, and is exactly as large as was asked.

[Note: forked children]
A child finds zeros in place of a buffer (MADV_WIPEONFORK). Otherwise every worker of a ``DataLoader`` would,
page by page as training writes on, keep a second copy of the whole pool, and huge pages would be broken up.
The addresses stay taken: were they free (MADV_DONTFORK), a buffer that the child gives back could unmap
what the child has put there since.
"""

import ctypes
import mmap
import threading
import time
from collections import OrderedDict
from typing import Protocol, Self

import torch
from torch import Tensor

from infinity.core.budget import HUGE_NBYTES, rounded
from infinity.core.errors import BudgetError, StateError, copied
from infinity.core.nbytes import format_nbytes
from infinity.device.accelerator import page_lock, page_unlock

#: Of Linux 4.14; the module mmap has no name for it.
_MADV_WIPEONFORK = 18
_SLICE_S = 0.5


class Buffer(Protocol):
    """Memory of one buffer; ``tensor`` is uint8 and spans all of it."""

    nbytes: int
    tensor: Tensor

    @property
    def memory(self) -> memoryview: ...

    def close(self) -> None:
        """Give the memory back; it must not be used any more."""
        ...


class HostBuffer:
    """A private anonymous mapping, on huge pages where it is that large.

    Args:
        nbytes: As :func:`rounded` gives it.
        device: Page-lock it for this accelerator; the CPU, or None: leave it as it is.
    """

    def __init__(self, nbytes: int, device: torch.device | None = None) -> None:
        self.nbytes = nbytes
        self._pinned_for: torch.device | None = None
        huge = nbytes >= HUGE_NBYTES
        # Older kernels put a mapping anywhere: one spare huge page of addresses, never touched,
        # leaves room to start on a multiple of 2 MiB.
        span = nbytes + HUGE_NBYTES if huge else nbytes
        self._map = mmap.mmap(-1, span, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            self._map.madvise(_MADV_WIPEONFORK)
        except OSError:  # an older kernel
            self._map.madvise(mmap.MADV_DONTFORK)
        start = 0
        if huge:
            self._advise_huge()
            start = -ctypes.addressof(ctypes.c_char.from_buffer(self._map)) % HUGE_NBYTES
        self._memory = memoryview(self._map)[start : start + nbytes]
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=start)
        if device is not None and device.type != "cpu":
            self._register(device)

    @property
    def memory(self) -> memoryview:
        return self._memory

    def _advise_huge(self) -> None:
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except (OSError, AttributeError):  # a kernel without them: slower, and right
            return

    def _register(self, device: torch.device) -> None:
        code = page_lock(self.tensor.data_ptr(), self.nbytes, device)
        if code != 0:
            raise BudgetError(
                f"{device} could not page-lock {format_nbytes(self.nbytes)} of host memory (error {code}); "
                "lower memory.host, or raise the limit of locked memory (ulimit -l)"
            )
        self._pinned_for = device

    def close(self) -> None:
        if self._pinned_for is not None:
            page_unlock(self.tensor.data_ptr(), self._pinned_for)
            self._pinned_for = None
        # The pages go now; the addresses go with the last view of them, so that a view that
        # outlives its lease reads zeros and never another buffer's memory.
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


__all__ = ["BufferLease", "BufferPool", "DevicePool", "HostPool", "rounded"]


class BufferLease:
    """Holding one buffer; see :class:`infinity.core.transfer.Lease`."""

    __slots__ = ("_buffer", "_nbytes", "_pool", "who")

    def __init__(self, pool: "BufferPool", buffer: Buffer, nbytes: int, who: str) -> None:
        self._pool, self._nbytes, self.who = pool, nbytes, who
        self._buffer: Buffer | None = buffer

    @property
    def nbytes(self) -> int:
        """Bytes that were asked for."""
        return self._nbytes

    @property
    def tensor(self) -> Tensor:
        """``(nbytes,)`` uint8; every lease of one buffer shares one storage.

        Raises:
            StateError: The lease was released.
        """
        return self._held().tensor[: self._nbytes]

    @property
    def memory(self) -> memoryview:
        """The same bytes for an engine.

        Raises:
            StateError: The lease was released, or the buffer is not in host memory.
        """
        return self._held().memory[: self._nbytes]

    def _held(self) -> Buffer:
        buffer = self._buffer
        if buffer is None:
            raise StateError(f"{self.who}: its lease of {format_nbytes(self._nbytes)} was released")
        return buffer

    def release(self) -> None:
        """Give the buffer back; it may be lent again at once."""
        self._pool._take_back(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class BufferPool:
    """A bounded set of buffers, with its accounting. Any thread may call.

    Args:
        capacity_nbytes: Bytes that all buffers may take together.
        key: The setting that bounds them, for messages.
        patience_s: How long a lease waits without anything being given back (s).
    """

    def __init__(self, capacity_nbytes: int, *, key: str, patience_s: float = 30.0) -> None:
        self.capacity_nbytes, self.key, self.patience_s = capacity_nbytes, key, patience_s
        self._changed = threading.Condition()  # guards what follows
        self._leased_nbytes = self._kept_nbytes = self._peak_nbytes = 0
        self._held: dict[str, int] = {}
        self._lent: set[Buffer] = set()
        self._kept: OrderedDict[Buffer, None] = OrderedDict()  # oldest first
        self._released = 0  # how often something was given back
        self._closed = False
        self._failure: BaseException | None = None

    def _make(self, nbytes: int) -> Buffer:
        """New memory of ``nbytes``, already rounded."""
        raise NotImplementedError

    @property
    def leased_nbytes(self) -> int:
        """Bytes that are leased now, in whole pages."""
        return self._leased_nbytes

    @property
    def kept_nbytes(self) -> int:
        """Bytes of buffers that wait for their next lease."""
        return self._kept_nbytes

    @property
    def peak_nbytes(self) -> int:
        """The most that was leased at one time (bytes)."""
        return self._peak_nbytes

    @property
    def held(self) -> dict[str, int]:
        """Bytes that are leased, by holder."""
        with self._changed:
            return dict(self._held)

    def lease(self, nbytes: int, *, who: str) -> BufferLease:
        """Hold a buffer of ``nbytes``; block until it fits.

        Raises:
            BudgetError: It can never fit, or nothing was given back for ``patience_s``.
            StateError: The pool is closed.
            BaseException: It would have to wait, after :meth:`fail`.
        """
        size = rounded(max(1, nbytes))
        if size > self.capacity_nbytes:
            raise BudgetError(
                f"{who} needs {format_nbytes(nbytes)}, in whole pages {size} bytes, at one time; "
                f"{self.key} gives this pool {self.capacity_nbytes} bytes. "
                f"Raise {self.key} by at least {size - self.capacity_nbytes} bytes"
            )
        with self._changed:
            left_s, released = self.patience_s, self._released
            while not self._fits(size):
                if self._failure is not None:
                    raise copied(self._failure)
                if released != self._released:
                    left_s, released = self.patience_s, self._released
                if left_s <= 0:
                    raise BudgetError(self._exhausted(size, who))
                # In slices, none of which counts for more: while the process was stopped nothing could come.
                began, slice_s = time.monotonic(), min(left_s, _SLICE_S)
                self._changed.wait(slice_s)
                left_s -= min(slice_s, time.monotonic() - began)
            return self._lend(nbytes, who)

    def try_lease(self, nbytes: int, *, who: str) -> BufferLease | None:
        """The same without blocking: None when it does not fit now."""
        with self._changed:
            return self._lend(nbytes, who) if self._fits(rounded(max(1, nbytes))) else None

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` from every lease that waits for a buffer, or would have to."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def close(self) -> None:
        """Unmap what is not leased; what is leased goes as it is given back."""
        with self._changed:
            self._closed = True
            self._unmap(self._kept_nbytes)
            self._changed.notify_all()

    def unmap_leased(self) -> None:
        """Give back what is still leased, too: nothing reads or writes it any more."""
        with self._changed:
            for buffer in self._lent:
                buffer.close()

    # --- with the lock held ------------------------------------------------------------------

    def _fits(self, size: int) -> bool:
        if self._closed:
            raise StateError(f"the pool of {self.key} is closed")
        return self._leased_nbytes + size <= self.capacity_nbytes

    def _lend(self, nbytes: int, who: str) -> BufferLease:
        size = rounded(max(1, nbytes))
        # The newest of its size: its pages are the likeliest to be in the caches.
        buffer = next((kept for kept in reversed(self._kept) if kept.nbytes == size), None)
        if buffer is None:
            self._unmap(self._leased_nbytes + self._kept_nbytes + size - self.capacity_nbytes)
            buffer = self._make(size)
        else:
            del self._kept[buffer]
            self._kept_nbytes -= size
        self._lent.add(buffer)
        self._leased_nbytes += size
        self._peak_nbytes = max(self._peak_nbytes, self._leased_nbytes)
        self._held[who] = self._held.get(who, 0) + size
        return BufferLease(self, buffer, nbytes, who)

    def _unmap(self, nbytes: int) -> None:
        """Give at least ``nbytes`` of kept buffers back to the system."""
        while nbytes > 0 and self._kept:
            buffer, _ = self._kept.popitem(last=False)
            self._kept_nbytes -= buffer.nbytes
            nbytes -= buffer.nbytes
            buffer.close()

    def _exhausted(self, size: int, who: str) -> str:
        holders = sorted(self._held.items(), key=lambda item: -item[1])
        named = ", ".join(f"{name}: {format_nbytes(nbytes)}" for name, nbytes in holders[:8])
        more = f" and {len(holders) - 8} more" if len(holders) > 8 else ""
        return (
            f"no buffer of {format_nbytes(size)} for {who} in {self.patience_s:g} s: "
            f"{format_nbytes(self._leased_nbytes)} of {format_nbytes(self.capacity_nbytes)} are leased "
            f"({named}{more}); raise {self.key}"
        )

    # --- from a lease ------------------------------------------------------------------------

    def _take_back(self, lease: BufferLease) -> None:
        with self._changed:
            buffer, lease._buffer = lease._buffer, None
            if buffer is None:
                return
            self._lent.discard(buffer)
            self._leased_nbytes -= buffer.nbytes
            self._held[lease.who] -= buffer.nbytes
            if not self._held[lease.who]:
                del self._held[lease.who]
            self._released += 1
            if self._closed:
                buffer.close()
            else:
                self._kept[buffer] = None
                self._kept_nbytes += buffer.nbytes
            self._changed.notify_all()


class HostPool(BufferPool):
    """Page-aligned host memory: staging buffers, and states that stay resident.

    Args:
        capacity_nbytes: As for :class:`BufferPool`.
        key: As for :class:`BufferPool`.
        device: Page-lock the buffers for this accelerator.
        patience_s: As for :class:`BufferPool` (s).
    """

    def __init__(
        self,
        capacity_nbytes: int,
        *,
        key: str = "memory.host",
        device: torch.device | None = None,
        patience_s: float = 30.0,
    ) -> None:
        super().__init__(capacity_nbytes, key=key, patience_s=patience_s)
        self._device = device

    def _make(self, nbytes: int) -> Buffer:
        return HostBuffer(nbytes, self._device)


class DevicePool(BufferPool):
    """Memory of an accelerator; its leases have no ``memory``.

    A released buffer may be lent at once, so its holder orders the streams that used it first.
    """

    def __init__(
        self,
        capacity_nbytes: int,
        device: torch.device,
        *,
        key: str = "memory.device",
        patience_s: float = 30.0,
    ) -> None:
        super().__init__(capacity_nbytes, key=key, patience_s=patience_s)
        self._device = device

    def _make(self, nbytes: int) -> Buffer:
        return DeviceBuffer(nbytes, self._device)
