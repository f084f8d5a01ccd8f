"""Bounded pools of host and device memory, counted to the byte.

A buffer is as large as was asked, in whole pages. One that is given back is kept for the next lease of the
same size; kept buffers are unmapped, oldest first, as soon as their bytes are needed.

[Note: why a mapping of our own]
The kernel pins a buffer's pages for every direct request: 2 MiB pages make that one step in place of 512.
Only private anonymous mappings get them by MADV_HUGEPAGE. A mapping is also given back to the system at once.

[Note: order lives in the lease]
An accelerator works long after the call that gave it work. So a buffer carries the events of what was begun
with it, and ``tensor`` and ``memory`` wait for them: for accelerator memory the calling thread's stream, for
host memory the thread itself. A thread that gave a stream work on a buffer that another thread or stream uses
next calls ``record_use``; giving back accelerator memory does so by itself. A buffer of accelerator memory is
lent again at once, with its events; one of host memory when its copies have ended.

[Note: memory of an accelerator]
torch's allocator gives memory to the stream that was current when it was asked, and takes it back in that
stream's order. A pool asks on a stream of its own, on which nothing else runs: its memory does not mix with
activations, a new buffer waits for what had the memory before, and a buffer that goes is first waited for
there. It is no arena, in which a lease that fits by bytes might find no gap that is large enough.

[Note: forked children]
A child finds zeros in place of a buffer (MADV_WIPEONFORK). Otherwise every worker of a ``DataLoader`` would
keep a second copy of the pool as training writes on. The addresses stay taken: were they free
(MADV_DONTFORK), a buffer that the child gives back could unmap what it has put there.
"""

import ctypes
import functools
import mmap
import os
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

import torch
from torch import Tensor

from infinity.core.errors import BudgetError, StateError, copied
from infinity.core.nbytes import HUGE_NBYTES, format_nbytes, rounded
from infinity.device.accelerator import (
    least_s,
    new_stream,
    on_stream,
    page_lock,
    page_unlock,
    record,
    synchronize,
    wait_on_stream,
)

#: Of Linux 4.14; the module mmap has no name for it.
_MADV_WIPEONFORK = 18
_SLICE_S = 0.5


class HostBuffer:
    """Owns a private anonymous mapping, on huge pages if it is that large, page-locked for an accelerator."""

    is_kept = True  # for the next lease of its size

    def __init__(self, nbytes: int, device: torch.device | None = None) -> None:
        self.nbytes, self.device = nbytes, device or torch.device("cpu")
        self.events: list[torch.Event] = []  # which the next user waits for
        self._unlock: weakref.finalize[..., object] | None = None
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
            with suppress(OSError, AttributeError):  # a kernel without them: slower, and right
                self._map.madvise(mmap.MADV_HUGEPAGE)
            start = -ctypes.addressof(ctypes.c_char.from_buffer(self._map)) % HUGE_NBYTES
        self.memory = memoryview(self._map)[start : start + nbytes]
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=start)
        if self.device.type != "cpu":
            self.lock(self.tensor)

    def lock(self, memory: Tensor) -> None:
        """Page-lock ``memory``, whole pages, until :meth:`unlock`; BudgetError: the driver refuses."""
        address = memory.data_ptr()
        if (code := page_lock(address, memory.nbytes, self.device)) != 0:
            raise BudgetError(
                f"{self.device} could not page-lock {format_nbytes(memory.nbytes)} of host memory "
                f"(error {code}); lower memory.host, or raise the limit of locked memory (ulimit -l)",
                "memory.host",
            )
        # Also for a buffer that is dropped: the driver refuses to lock a new mapping at an address that it
        # believes to be locked.
        self._unlock = weakref.finalize(self, _unlock_pages, os.getpid(), address, self.device, self.events)
        self._unlock.atexit = False

    def wait(self) -> None:
        for event in self.events:
            if not event.query():
                event.synchronize()
        self.events.clear()

    def unlock(self) -> None:
        self.wait()
        if self._unlock is not None:
            self._unlock()

    def close(self) -> None:
        """Give the pages back now; the addresses go with the last view, which until then reads zeros."""
        self.unlock()
        self._map.madvise(mmap.MADV_DONTNEED)


def _unlock_pages(owner: int, address: int, device: torch.device, events: list[torch.Event]) -> None:
    if os.getpid() != owner:
        return  # a forked child has no part in the parent's driver
    for event in events:
        event.synchronize()
    page_unlock(address, device)


class DeviceBuffer:
    """Owns accelerator memory, from torch's allocator, on a pool's stream."""

    is_kept = True

    def __init__(self, nbytes: int, device: torch.device, stream: torch.Stream | None) -> None:
        self.nbytes, self.device, self._stream = nbytes, device, stream
        with on_stream(stream):
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
            event = record(device)
        self.events = [] if event is None else [event]

    @property
    def memory(self) -> memoryview:
        raise StateError(f"a buffer on {self.tensor.device} has no host memory; use its tensor")

    def wait(self) -> None:
        """Let the calling thread's stream wait for what is in flight."""
        events, self.events = self.events, []
        for event in events:
            wait_on_stream(event, self.device)

    def close(self) -> None:
        """Let the memory's next owner wait, and give it to torch's allocator."""
        with on_stream(self._stream):
            self.wait()
        self.tensor = self.tensor.new_empty(0)  # a lease that outlived the pool does not hold the memory


def measure_link(device: torch.device, nbytes: int = 2**26) -> tuple[float, float]:
    """Return the bytes per second from pinned host memory to an accelerator, and back."""
    there, buffer = torch.empty(nbytes, dtype=torch.uint8, device=device), HostBuffer(nbytes, device)
    here, rates = buffer.tensor, list[float]()
    try:
        for target, source in ((there, here), (here, there)):
            copy = functools.partial(target.copy_, source)
            rates.append(nbytes / least_s(copy, device, 2))
    finally:
        buffer.close()
    return rates[0], rates[1]


#: Memory of one buffer; ``tensor`` is uint8 and spans all of it.
Buffer = HostBuffer | DeviceBuffer


class Lease:
    """Holds ``nbytes`` of one buffer of a pool. A context manager; ``release`` may be called twice."""

    __slots__ = ("_deferred", "_pool", "_released", "lent", "nbytes", "who")

    def __init__(self, pool: "Pool", buffer: Buffer, nbytes: int, who: str) -> None:
        self._pool, self.nbytes, self.who = pool, nbytes, who
        self.lent: Buffer | None = buffer  # None: released
        self._deferred = self._released = False

    @property
    def tensor(self) -> Tensor:
        """``(nbytes,)`` uint8, after earlier uses; every lease of one buffer shares one storage."""
        buffer = self.buffer
        if buffer.events:
            buffer.wait()
        return buffer.tensor[: self.nbytes]

    @property
    def whole(self) -> Tensor:
        """Those of all ranks, where they share the memory that holds them, else the same."""
        found: Tensor | None = getattr(self.buffer, "whole", None)
        return self.tensor if found is None else found

    @property
    def memory(self) -> memoryview:
        """The same bytes for an engine; raises :class:`StateError` if the buffer is not in host memory."""
        buffer = self.buffer
        if buffer.events:
            buffer.wait()
        return buffer.memory[: self.nbytes]

    def record_use(self) -> None:
        """Let the next use wait for what the calling thread has given its stream so far."""
        buffer = self.buffer
        event = record(buffer.device)
        if event is not None:
            buffer.events.append(event)

    @property
    def idle(self) -> bool:
        """Whether all that streams were given with the buffer has ended."""
        return all(event.query() for event in [*self.buffer.events])

    @property
    def buffer(self) -> Buffer:
        """The buffer that is held; raises :class:`StateError` once the lease was released."""
        buffer = self.lent
        if buffer is None:
            raise StateError(f"{self.who}: its lease of {format_nbytes(self.nbytes)} was released")
        return buffer

    def release(self) -> None:
        """Give the buffer back; see [Note: order lives in the lease]."""
        self._released = True
        if not self._deferred:
            self._pool.take_back(self)

    def defer_release(self, deferred: bool) -> None:
        """Let :meth:`release`, on any thread, take effect only when this is called with False."""
        self._deferred = deferred
        if self._released and not deferred:
            self._pool.take_back(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class Pool:
    """Lends buffers up to a capacity (bytes); ``key`` is its setting, for messages. Any thread may call."""

    patience_s = 30.0  # for which a lease waits without anything being given back
    _lends_at_once = False  # whether a buffer that is in use by a stream can be lent again

    def __init__(self, capacity_nbytes: int, *, key: str) -> None:
        self.capacity_nbytes, self.key = capacity_nbytes, key
        self.changed = threading.Condition()  # guards what follows
        # A buffer is lent, then, while copies of it are in flight, ending, then kept.
        self._lent: dict[Buffer, str] = {}  # each with its holder
        self._ending: deque[tuple[Buffer, str]] = deque()
        self._kept: OrderedDict[Buffer, None] = OrderedDict()  # oldest first
        self._leased_nbytes = self.peak_nbytes = 0  # lent, ending, or being made
        self._given_back = 0  # leases
        self._closed = False
        self._failure: BaseException | None = None

    def make(self, nbytes: int) -> Buffer:
        """Return new memory of ``nbytes``, already rounded to whole pages."""
        raise NotImplementedError

    @property
    def leased_nbytes(self) -> int:
        """Bytes that are leased now, in whole pages, including those that copies still use."""
        with self.changed:
            self._collect_ended()
            return self._leased_nbytes

    @property
    def kept_nbytes(self) -> int:
        """Bytes of buffers that wait for their next lease."""
        return sum(buffer.nbytes for buffer in list(self._kept))

    @property
    def held(self) -> Counter[str]:
        found = Counter[str]()
        with self.changed:
            for buffer, who in (*self._lent.items(), *self._ending):
                found[who] += buffer.nbytes
        return found

    def lease(self, nbytes: int, *, who: str, made: Callable[[int], "HostBuffer"] | None = None) -> Lease:
        """Hold a buffer of ``nbytes``, or the one that is ``made`` of so many; block until it fits.

        Raises a BudgetError if it can never fit or nothing was given back for ``patience_s``, a StateError if
        the pool is closed, and, instead of waiting, the error that :meth:`fail` was given.
        """
        return self.try_lease(nbytes, who=who, made=made) or self._await_lease(nbytes, who, made)

    def _await_lease(self, nbytes: int, who: str, made: Callable[[int], "HostBuffer"] | None) -> Lease:
        size = rounded(max(1, nbytes))
        if size > self.capacity_nbytes:
            raise BudgetError(
                f"{who} needs {format_nbytes(nbytes)}, in whole pages {size} bytes, at one time; {self.key} "
                f"gives this pool {self.capacity_nbytes} bytes. Raise {self.key} by at least "
                f"{size - self.capacity_nbytes} bytes",
                self.key,
            )
        left_s, given_back = self.patience_s, self._given_back
        while (lease := self.try_lease(nbytes, who=who, made=made)) is None:
            with self.changed:
                if self._failure is not None:
                    raise copied(self._failure)
                if given_back != self._given_back:
                    left_s, given_back = self.patience_s, self._given_back
                if left_s <= 0:
                    holders = self.held.most_common()
                    named = ", ".join(f"{name}: {format_nbytes(held)}" for name, held in holders[:8])
                    more = f" and {len(holders) - 8} more" if len(holders) > 8 else ""
                    raise BudgetError(
                        f"no buffer of {format_nbytes(size)} for {who} in {self.patience_s:g} s: "
                        f"{format_nbytes(self._leased_nbytes)} of {format_nbytes(self.capacity_nbytes)} are "
                        f"leased ({named}{more}); raise {self.key}",
                        self.key,
                    )
                ending = tuple(self._ending[0][0].events) if self._ending else ()
                if not ending and not self._fits(size):
                    # In slices, none of which counts for more: nothing came while the process was stopped.
                    began, slice_s = time.monotonic(), min(left_s, _SLICE_S)
                    self.changed.wait(slice_s)
                    left_s -= min(slice_s, time.monotonic() - began)
            for event in ending:
                event.synchronize()  # it comes by itself
        return lease

    def try_lease(
        self, nbytes: int, *, who: str, made: Callable[[int], "HostBuffer"] | None = None
    ) -> Lease | None:
        """Hold a buffer of ``nbytes`` without blocking; None if it does not fit now."""
        size = rounded(max(1, nbytes))
        with self.changed:
            if self._ending:
                self._collect_ended()
            if not self._fits(size):
                return None
            # The newest of its size: its pages are the likeliest to be in the caches. Of an accelerator's the
            # oldest: the streams that used it are the likeliest to be done.
            kept = iter(self._kept) if self._lends_at_once else reversed(self._kept)
            buffer = next((each for each in kept if each.nbytes == size and made is None), None)
            self._leased_nbytes += size
            self.peak_nbytes = max(self.peak_nbytes, self._leased_nbytes)
            if buffer is not None:
                del self._kept[buffer]
                self._lent[buffer] = who
            unmapped = self._unkeep() if buffer is None else []
        if buffer is None:  # without the lock, since this takes long
            try:
                for each in unmapped:
                    each.close()
                buffer = self.make(size) if made is None else made(nbytes)
            except BaseException:
                with self.changed:
                    self._count_back(size)
                raise
            with self.changed:
                self._lent[buffer] = who
        return Lease(self, buffer, nbytes, who)

    def resize(self, capacity_nbytes: int) -> None:
        """Keep within another capacity; what is leased stays."""
        with self.changed:
            self.capacity_nbytes = capacity_nbytes
            unmapped = self._unkeep()
            self.changed.notify_all()
        for buffer in unmapped:
            buffer.close()

    def fail(self, error: BaseException) -> None:
        """Raise the first ``error`` from every lease that waits, or would have to wait, for a buffer."""
        with self.changed:
            self._failure = self._failure or error
            self.changed.notify_all()

    def close(self) -> None:
        """Unmap what is not leased; unmap leased buffers as they are given back."""
        with self.changed:
            self._closed = True
            unmapped = [*self._kept, *(buffer for buffer, _ in self._ending)]
            for buffer, _ in self._ending:
                self._count_back(buffer.nbytes)
            self._kept.clear()
            self._ending.clear()
            self.changed.notify_all()
        for buffer in unmapped:
            buffer.close()

    def unmap_leased(self) -> None:
        """Give back what is still leased, too; nothing may read or write it any more."""
        with self.changed:
            for buffer in self._lent:
                buffer.close()

    def take_back(self, lease: Lease) -> None:
        with self.changed:
            buffer, lease.lent = lease.lent, None
            if buffer is None:
                return
            who, closed = self._lent.pop(buffer), self._closed or not buffer.is_kept
            if closed or self._lends_at_once or not buffer.events:
                self._count_back(buffer.nbytes)
                if not closed:
                    self._kept[buffer] = None
            else:
                self._ending.append((buffer, who))
                self.changed.notify_all()
        if closed:
            buffer.close()

    def _fits(self, size: int) -> bool:  # as the others below, with the lock held
        if self._closed:
            raise StateError(f"the pool of {self.key} is closed")
        return self._leased_nbytes + size <= self.capacity_nbytes

    def _unkeep(self) -> list[Buffer]:
        """Remove kept buffers, which the caller closes, until the rest fits."""
        taken, nbytes = list[Buffer](), self._leased_nbytes + self.kept_nbytes - self.capacity_nbytes
        while nbytes > 0 and self._kept:
            buffer, _ = self._kept.popitem(last=False)
            nbytes -= buffer.nbytes
            taken.append(buffer)
        return taken

    def _collect_ended(self) -> None:
        """Keep the buffers whose copies have ended."""
        for _ in range(len(self._ending)):
            buffer, who = self._ending.popleft()
            if all(event.query() for event in buffer.events):
                buffer.events.clear()
                self._count_back(buffer.nbytes)
                self._kept[buffer] = None
            else:
                self._ending.append((buffer, who))

    def _count_back(self, nbytes: int) -> None:
        self._leased_nbytes -= nbytes
        self._given_back += 1
        self.changed.notify_all()


class HostPool(Pool):
    """Lends page-aligned host memory for staging and resident states; page-locked for ``device``."""

    def __init__(
        self, capacity_nbytes: int, *, key: str = "memory.host", device: torch.device | None = None
    ) -> None:
        super().__init__(capacity_nbytes, key=key)
        self._device = device

    def make(self, nbytes: int) -> Buffer:
        return HostBuffer(nbytes, self._device)


class DevicePool(Pool):
    """Lends accelerator memory; its leases have no ``memory``. See [Note: memory of an accelerator]."""

    _lends_at_once = True

    def __init__(self, capacity_nbytes: int, device: torch.device) -> None:
        super().__init__(capacity_nbytes, key="memory.device")
        self._device, self._stream = device, new_stream(device)

    def make(self, nbytes: int) -> Buffer:
        return DeviceBuffer(nbytes, self._device, self._stream)

    def take_back(self, lease: Lease) -> None:
        if lease.lent is not None:
            lease.record_use()
        super().take_back(lease)

    def unmap_leased(self) -> None:
        synchronize(self._device)
        super().unmap_leased()


class CountingPool:
    """Leases buffers to the training thread; counts waiting for one as a stall of cause ``update``."""

    def __init__(self, pool: Pool, stalls: Callable[[str, Callable[[], Lease]], Lease]) -> None:
        self._pool, self._stalls = pool, stalls
        self._held_back: list[Lease] = []
        self.reclaim: list[Callable[[], object]] = []  # calls that give back what may come later

    def hold_back(self, lease: Lease) -> None:
        """Keep a lease until :meth:`give_back`, or until a buffer does not fit beside it."""
        lease.defer_release(True)
        self._held_back.append(lease)

    def give_back(self) -> None:
        """Give back the leases that were held back, as soon as their users have released them."""
        with suppress(IndexError):  # another thread may hold back, or give back, meanwhile
            while True:
                self._held_back.pop(0).defer_release(False)

    def lease(self, nbytes: int, *, who: str) -> Lease:
        lease = self._pool.try_lease(nbytes, who=who)
        if lease is None:
            self.give_back()
            for reclaim in self.reclaim:
                reclaim()
            lease = self._stalls("update", lambda: self._pool.lease(nbytes, who=who))
        return lease

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)
