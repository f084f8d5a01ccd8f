"""Blocking system calls on a few threads: works wherever Linux does."""

import errno
import os
import threading

from infinity.nvme.engines.base import QueuedEngine, Request
from infinity.nvme.volume import Volume

#: Together 64 MiB with the kernel, and few switches between threads: fio's speed on what we measured.
_THREADS = 8
_REQUEST_NBYTES = 8 * 2**20


class ThreadsEngine(QueuedEngine):
    """Calls ``os.preadv`` and ``os.pwritev``, which let other threads run while they wait."""

    name = "threads"

    def __init__(
        self, volume: Volume, *, threads: int = _THREADS, request_nbytes: int = _REQUEST_NBYTES
    ) -> None:
        super().__init__(volume, request_nbytes)
        self._work = threading.Condition(self.lock)
        self.start(*[self._main] * threads)

    def wake(self) -> None:
        self._work.notify(len(self._threads) if self.stopping else self.waiting)

    def _main(self) -> None:
        while True:
            with self.lock:
                while (request := self.take()) is None:
                    if self.stopping:
                        return
                    self._work.wait()
            try:
                result = self._move(request)
            except OSError as error:
                result = -(error.errno or errno.EIO)
            except Exception as error:  # a library's own: wait() raises it
                request.note, result = f"{type(error).__name__}: {error}", -errno.EIO
            self.settle(request, result)

    def _move(self, request: Request) -> int:
        call = os.pwritev if request.move.writes else os.preadv
        return call(request.fd, [request.memory()], request.offset + request.moved)
