"""Linux's asynchronous I/O: many requests with the kernel, one thread that takes in their results.

One thread sleeps in the kernel until requests are done and submits others in their place; a second submits
what comes while the kernel has less than its share.
"""

import ctypes
import errno
import threading
import time
from types import ModuleType
from typing import Any

from infinity.nvme.engines import QueuedEngine, Request
from infinity.nvme.volume import Volume

#: 32 MiB with the kernel keep a drive busy; more would only make urgent reads wait longer. Fewer and
#: larger requests cost no less processor time, and leave gaps until the next one is submitted.
_REQUEST_NBYTES = 2**20
_DEPTH = 32


def load() -> ModuleType:
    """Return the C layer; raise an ImportError without it, an OSError without the system's library."""
    import libaio.libaio  # imported here: it loads libaio.so.1, which a machine may lack

    module: ModuleType = libaio.libaio
    return module


class LibaioEngine(QueuedEngine):
    """Keeps up to ``depth`` requests with the kernel. Raises as :func:`load`, or if that gives no context."""

    name = "libaio"

    def __init__(self, volume: Volume, *, depth: int = _DEPTH, request_nbytes: int = _REQUEST_NBYTES) -> None:
        super().__init__(volume, request_nbytes)
        self._c: Any = load()
        self._context = self._c.io_context_t()
        self._c.io_queue_init(depth, ctypes.byref(self._context))
        self._slots = _KernelSlots(self._c, depth)
        self._submitting = threading.Lock()
        self._work = threading.Condition(self.lock)  # something is queued
        self._results = threading.Condition(self.lock)  # the kernel has something
        self.start(self._feed, self._reap)

    def wake(self) -> None:
        if self._slots.free:  # else the reaper submits, as soon as one is
            self._work.notify()
        if self.stopping:
            self._results.notify()

    def stop(self) -> None:
        super().stop()
        self._c.io_queue_release(self._context)

    def _feed(self) -> None:
        while True:
            with self.lock:
                while not (self._slots.free and self.waiting):
                    if self.stopping:
                        return
                    self._work.wait()
            self._submit_all()

    def _submit_all(self) -> None:
        """Submit requests as long as there are free slots and queued requests."""
        with self._submitting:
            while True:
                with self.lock:
                    slots = []
                    while self._slots.free and (request := self.take()) is not None:
                        slots.append(self._slots.fill(request))
                if not slots:
                    return
                self._submit(slots)

    def _submit(self, slots: list[int]) -> None:
        taken = code = 0
        try:
            pointers = (self._c.iocb_p * len(slots))(*(self._slots.pointers[slot] for slot in slots))
            taken = self._c.io_submit(self._context, len(slots), pointers)
        except OSError as error:
            code = error.errno or errno.EIO
        with self.lock:
            self._slots.with_kernel += taken
            busy = self._slots.with_kernel > 0
            if taken and busy:
                self._results.notify()
            refused = [self._slots.clear(slot) for slot in slots[taken:]]
            # The code is the first one's; the others were not looked at.
            guilty = refused.pop(0) if code and not (code == errno.EAGAIN and busy) else None
            for request in reversed(refused):
                self.put_back(request)
        if code == errno.EAGAIN:
            time.sleep(0.001)  # the kernel is short of memory
        if guilty is not None:
            self.settle(guilty, -code)

    def _reap(self) -> None:
        events = (self._c.io_event * self._slots.count)()
        while True:
            with self.lock:
                # Below 0 for a moment, when results overtake the count of what was submitted.
                while self._slots.with_kernel <= 0:
                    if self.stopping:
                        return
                    self._results.wait()
            try:
                count = self._c.io_getevents(self._context, 1, self._slots.count, events, None)
            except OSError as error:
                if error.errno != errno.EINTR:
                    raise
                continue
            with self.lock:
                self._slots.with_kernel -= count
                done = [(self._slots.clear(event.data - 1), event.res) for event in events[:count]]
            self._submit_all()  # first keep the drive busy, then wake waiters
            for request, result in done:
                self.settle(request, result)


class _KernelSlots:
    """Owns the C structures of requests that are with the kernel; made once, used again."""

    def __init__(self, c: Any, count: int) -> None:
        self._c, self.count, self.with_kernel = c, count, 0
        self.free = list(range(count))
        self._blocks = (c.iocb * count)()
        self._common = [block.u.c for block in self._blocks]  # views of the same memory
        self.pointers = [ctypes.pointer(block) for block in self._blocks]
        self._requests: list[Request | None] = [None] * count

    def fill(self, request: Request) -> int:
        """Return the slot that now describes what is left of ``request``."""
        slot = self.free.pop()
        self._requests[slot] = request
        block, common = self._blocks[slot], self._common[slot]
        block.data = slot + 1  # ctypes reads a zero pointer as None
        block.aio_lio_opcode = self._c.IO_CMD_PWRITE if request.move.writes else self._c.IO_CMD_PREAD
        block.aio_fildes = request.fd
        common.buf = ctypes.addressof(ctypes.c_char.from_buffer(request.memory()))
        common.nbytes = request.nbytes - request.moved
        common.offset = request.offset + request.moved
        return slot

    def clear(self, slot: int) -> Request:
        request, self._requests[slot] = self._requests[slot], None
        assert request is not None
        self.free.append(slot)
        return request
