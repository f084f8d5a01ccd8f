"""Engines move bytes between extents and memory; :func:`make_engine` picks one.

A transfer is cut into requests, queued, and ends with its last request. Blocking system calls on a few
threads work wherever Linux does; each other engine has a file.

[Note: the life of a request]
A caller does one thing that counts, a single append to a queue: no Ctrl-C can leave a request that is never
settled. An engine takes it, urgent ones first (:meth:`QueuedEngine.take`), moves its bytes, and gives
:meth:`QueuedEngine.settle` the result. What is missing goes back to the front of the queue. A transfer ends
when each of its requests is settled, also after an error: until then the kernel may touch the memory.
"""

import errno
import os
import resource
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from infinity.core.config import SettingError
from infinity.core.errors import DiskError, StateError
from infinity.core.nbytes import BLOCK_NBYTES, Extent, Transfer, TransferEngine, aligned
from infinity.nvme.volume import Volume

#: A request that is interrupted or moves nothing this often in a row is an error.
_PATIENCE = 1000
#: Of ``threads``: 64 MiB with the kernel, and few switches between threads: fio's speed on what we measured.
_THREADS = 8
_REQUEST_NBYTES = 8 * 2**20
#: Errors of making an engine that cannot be used here.
_UNUSABLE = (ImportError, OSError, AttributeError)
#: What to install for a module, where it is not its name.
_PACKAGES = {"kvikio": "'infinity-offload[gds]'"}

#: Bytes that are read into or written from: with ``gds`` also a uint8 tensor on the device.
Memory: TypeAlias = memoryview | Tensor


class Move(Transfer):
    """A transfer that ends with the last of its requests; its error is a :class:`DiskError`."""

    __slots__ = ("after", "error", "memory", "nbytes", "pending", "writes")

    def __init__(self, memory: Memory, *, writes: bool) -> None:
        super().__init__()
        self.error: DiskError | None = None  # the first of a request
        self.memory: Memory | None = memory  # kept alive until the kernel is done with it
        self.nbytes, self.writes, self.pending = memory.nbytes, writes, 0
        self.after: Any = None  # an event of the accelerator that comes first

    def end(self) -> None:
        """End the transfer, whose requests are settled; the engine's lock is not held."""
        self.memory = None
        self.finish(self.error)


@dataclass(slots=True, eq=False)
class Request:
    """A contiguous part of a move, small enough for one system call."""

    move: Move
    file: int
    fd: int
    offset: int  # in the file
    start: int  # in the move's memory
    nbytes: int
    moved: int = 0
    tries: int = 0
    note: str = ""  # what a library said beyond an errno

    def memory(self) -> Any:
        """The part of the move's memory that is still to be moved."""
        assert self.move.memory is not None
        return self.move.memory[self.start + self.moved : self.start + self.nbytes]


class QueuedEngine:
    """Queues requests and counts results; an engine adds :meth:`wake`, and the mains of its threads."""

    name: str  # in memory.engine

    def __init__(self, volume: Volume, request_nbytes: int) -> None:
        self._volume, self._request_nbytes = volume, request_nbytes
        self.lock = threading.Lock()  # guards what follows; an engine guards its own counts with it, too
        self._urgent: deque[Request] = deque()
        self._others: deque[Request] = deque()
        self._idle = threading.Condition(self.lock)
        self._taken_nbytes = self.nbytes_read = self.nbytes_written = 0
        self._closed = self.stopping = False  # threads end
        self._threads: list[threading.Thread] = []

    def start(self, *mains: Callable[[], None]) -> None:
        """Start the engine's threads, which end when ``stopping`` is set."""
        for number, main in enumerate(mains):
            name = f"infinity-{self.name}-{number}"
            self._threads.append(threading.Thread(target=main, name=name, daemon=True))
            self._threads[-1].start()

    def read(self, extent: Extent, memory: Memory, *, urgent: bool = False) -> Move:
        return self._start(extent, memory, urgent=urgent, writes=False)

    def write(self, extent: Extent, memory: Memory) -> Move:
        return self._start(extent, memory, urgent=False, writes=True)

    @property
    def in_flight_nbytes(self) -> int:
        """Bytes of requests that are queued or with the kernel."""
        with self.lock:
            return self._taken_nbytes + sum(r.nbytes for queue in (self._urgent, self._others) for r in queue)

    def close(self) -> None:
        """Wait for what is in flight, then give back threads and kernel contexts. May be called twice."""
        with self.lock:
            self._closed = True
            self.wake()
            self._idle.wait_for(lambda: not (self._taken_nbytes or self.waiting))
            first, self.stopping = not self.stopping, True
            self.wake()
        if first:
            self.stop()

    def wake(self) -> None:
        """Wake threads: something was queued, or they must stop. The lock is held."""
        raise NotImplementedError

    def stop(self) -> None:
        """Give back threads, and what else an engine has."""
        for thread in self._threads:
            thread.join()

    def begin(self, move: Move) -> None:
        """Prepare a move before its first request is queued; on the caller's thread."""

    @property
    def waiting(self) -> int:
        return len(self._urgent) + len(self._others)

    def take(self) -> Request | None:
        """Return the next request; None: no request is queued. The lock is held."""
        queue = self._urgent or self._others
        if not queue:
            return None
        request = queue.popleft()
        self._taken_nbytes += request.nbytes
        return request

    def put_back(self, request: Request) -> None:
        """Put a request that was taken first in the queue; the lock is held, on a thread of the engine."""
        self._taken_nbytes -= request.nbytes
        self._urgent.appendleft(request)
        self.wake()

    def settle(self, request: Request, result: int) -> None:
        """Record the result of a request: bytes moved, or a negative errno. No lock is held."""
        move = request.move
        if self._unfinished(request, result):
            with self.lock:
                self.put_back(request)
            return
        with self.lock:
            self._taken_nbytes -= request.nbytes
            move.pending -= 1
            ended = not move.pending
            if ended and move.error is None:
                self.nbytes_written += move.nbytes * move.writes
                self.nbytes_read += move.nbytes * (not move.writes)
        if ended:
            move.end()
        if self._closed:
            with self.lock:
                self._idle.notify_all()

    def _unfinished(self, request: Request, result: int) -> bool:
        """Record the result; return whether the rest of a request has to be asked for again."""
        if result < 0:
            again = -result in (errno.EINTR, errno.EAGAIN)
        else:
            # Only whole blocks count: the rest must start where O_DIRECT can start.
            moved = min(request.moved + result, request.nbytes)
            moved = moved if moved == request.nbytes else moved // BLOCK_NBYTES * BLOCK_NBYTES
            if moved > request.moved:
                request.moved, request.tries = moved, 0
            again = request.moved < request.nbytes and result > 0
        if again and request.tries < _PATIENCE and request.move.error is None:
            request.tries += 1
            return True
        if request.moved < request.nbytes and request.move.error is None:
            # Nothing moved without an error: the file ended before the extent.
            request.move.error = self._error(request, -result if result < 0 else errno.EIO)
        return False

    def _error(self, request: Request, code: int) -> DiskError:
        if code in (errno.EINVAL, errno.EIO) and request.move.writes:
            # The kernel cuts a write at the limit of `ulimit -f`. Then it says that its length is none for
            # O_DIRECT, or, without that, writes the same part of a block again and again.
            limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
            if limit != resource.RLIM_INFINITY and request.offset + request.nbytes > limit:
                code = errno.EFBIG
        error = DiskError(
            code, "write" if request.move.writes else "read", self._volume.path(request.file),
            offset=request.offset, nbytes=request.nbytes, moved=request.moved,
        )  # fmt: skip
        if request.note:
            error.add_note(request.note)
        return error

    def _start(self, extent: Extent, memory: Memory, *, urgent: bool, writes: bool) -> Move:
        if extent.nbytes != memory.nbytes:
            raise ValueError(f"an extent of {extent.nbytes} bytes and memory of {memory.nbytes} bytes differ")
        if isinstance(memory, memoryview):
            if memory.readonly:
                raise ValueError("memory is read-only; an engine takes writable memory, also to write from")
            memory = memory if memory.itemsize == 1 and memory.ndim == 1 else memory.cast("B")
        move = Move(memory, writes=writes)
        self.begin(move)
        requests = self.cut(move, extent)
        if not requests:
            move.end()
            return move
        move.pending = len(requests)
        with self.lock:
            if self._closed:
                raise StateError(f"the {self.name} engine is closed")
            (self._urgent if urgent else self._others).extend(requests)
            self.wake()
        return move

    def cut(self, move: Move, extent: Extent) -> list[Request]:
        """Return requests in the order of their bytes; those of different files take turns."""
        start, size, by_piece = 0, self._request_nbytes, []
        for piece in extent.pieces:
            file, fd = piece.file, self._volume.fd(piece.file)
            # Of about the same size, up to an eighth larger: a last one of a few blocks costs as much time.
            count = max(1, -(-(piece.nbytes - size // 8) // size))
            step = max(BLOCK_NBYTES, aligned(-(-piece.nbytes // count)))
            by_piece.append(
                [
                    Request(move, file, fd, piece.offset + at, start + at, min(step, piece.nbytes - at))
                    for at in range(0, piece.nbytes, step)
                ]
            )
            start += piece.nbytes
        if len(by_piece) == 1:
            return by_piece[0]
        # Every drive gets work at once; all of one before the next would leave the others idle.
        longest = max(map(len, by_piece), default=0)
        return [piece[i] for i in range(longest) for piece in by_piece if i < len(piece)]


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


def make_engine(
    name: str, volume: Volume, note: Callable[[str], object] = lambda line: None
) -> TransferEngine:
    """Return the engine called ``name``; ``auto`` is the fastest that works here.

    ``note`` gets a line for people if that is not the one that is fastest elsewhere. Raises a SettingError if
    the engine that was asked for cannot be used here.
    """
    from infinity.nvme.engines.libaio_engine import LibaioEngine  # made of the classes above

    def fastest() -> TransferEngine:
        if volume.notes:
            return ThreadsEngine(volume)  # through the page cache, libaio blocks the thread that submits
        try:
            return LibaioEngine(volume)
        except _UNUSABLE as error:
            why = _why(error)
            note(f"no libaio ({why}): the engine threads moves the bytes, about as fast, for more CPU time")
            return ThreadsEngine(volume)

    if name == "auto":
        return fastest()
    try:
        if name == "gds":
            from infinity.nvme.engines.gds_engine import GdsEngine

            return GdsEngine(volume, fastest)
        return LibaioEngine(volume) if name == "libaio" else ThreadsEngine(volume)
    except _UNUSABLE as error:
        wanted = f"auto, or threads: {name} cannot be used here ({_why(error)})"
        raise SettingError("memory.engine", name, wanted) from error


def _why(error: Exception) -> str:
    """Return a line for people: what is missing, and how to get it."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error}: pip install {_PACKAGES.get(error.name or '', error.name)}"
    if not isinstance(error, OSError):
        return str(error)
    if error.errno is None:  # of the loader of libraries
        return f"{error}; the system's package is called libaio1, libaio1t64 or libaio"
    if error.errno == errno.EAGAIN:
        return "all requests that the kernel allows are taken: raise fs.aio-max-nr"
    return f"the kernel refuses: {os.strerror(error.errno)}"
