"""The base of every engine: a transfer is cut into requests, queued, and ends with its last request.

[Note: the life of a request]
``queued`` (in one of two queues, urgent first) -> ``with the kernel`` -> ``settled``. An engine takes
requests with :meth:`RequestQueue.take`, moves their bytes and tells :meth:`QueuedEngine.settle` the
result, as the kernel gave it: a count, or a negative errno. Settling compares the count with what was
asked; what is missing goes back to the front of the queue. A transfer ends when each of its requests
is settled, also after an error, because until then the kernel may still touch the memory.

[Note: Ctrl-C]
A signal raises between any two bytecodes of the main thread, and only there. So a caller does one thing
that counts, a single append to a queue; all else happens on threads of the engine, and no moment exists
in which an interrupt leaves a request that is never settled.
"""

import errno
import resource
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor

from infinity.core.errors import DiskError, StateError
from infinity.core.nbytes import BLOCK_NBYTES, Extent, aligned
from infinity.core.transfer import Transfer
from infinity.nvme.volume import Volume

#: A request that is interrupted or moves nothing this often in a row is an error.
_PATIENCE = 1000


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
        """Every request is settled; the engine's lock is not held."""
        self.memory = None
        self.finish(self.error)


class Request:
    """A contiguous part of a move, small enough for one system call."""

    __slots__ = ("fd", "file", "move", "moved", "nbytes", "note", "offset", "start", "tries")

    def __init__(self, move: Move, file: int, fd: int, offset: int, start: int, nbytes: int) -> None:
        self.move, self.file, self.fd = move, file, fd
        self.offset = offset  # in the file
        self.start = start  # in the move's memory
        self.nbytes, self.moved, self.tries = nbytes, 0, 0
        self.note = ""  # what a library said beyond an errno

    def memory(self) -> Any:
        """The part of the move's memory that is still to be moved."""
        assert self.move.memory is not None
        return self.move.memory[self.start + self.moved : self.start + self.nbytes]


def _too_large(request: Request) -> bool:
    """Return whether the process may not write so far (``ulimit -f``).

    The kernel cuts such a write at the limit. Then it says that its length is not one of O_DIRECT's, or,
    without O_DIRECT, writes the same part of a block again and again.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return limit != resource.RLIM_INFINITY and request.offset + request.nbytes > limit


class RequestQueue:
    """Requests that wait, urgent ones first, and the bytes of those that an engine has taken.

    Attributes:
        lock: Guards everything here; an engine guards its own counts with it, too.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._urgent: deque[Request] = deque()
        self._others: deque[Request] = deque()
        self._taken_nbytes = 0

    def __len__(self) -> int:
        """Return the number of requests that wait."""
        return len(self._urgent) + len(self._others)

    @property
    def nbytes(self) -> int:
        """Bytes of requests that wait or were taken."""
        return self._taken_nbytes + sum(r.nbytes for queue in (self._urgent, self._others) for r in queue)

    @property
    def is_idle(self) -> bool:
        """Return whether no request waits, and none is with the kernel."""
        return not (self._taken_nbytes or self._urgent or self._others)

    def put(self, requests: Sequence[Request], *, urgent: bool) -> None:
        """Append requests, in their order."""
        (self._urgent if urgent else self._others).extend(requests)

    def take(self) -> Request | None:
        """Return the next request; None: no request waits."""
        queue = self._urgent or self._others
        if not queue:
            return None
        request = queue.popleft()
        self._taken_nbytes += request.nbytes
        return request

    def put_back(self, request: Request) -> None:
        """Let a request that was taken go first."""
        self.drop(request)
        self._urgent.appendleft(request)

    def drop(self, request: Request) -> None:
        """Count a request that was taken as over."""
        self._taken_nbytes -= request.nbytes


class QueuedEngine:
    """Queues, results, counters; an engine adds :meth:`wake` and :meth:`stop`, and threads.

    Args:
        volume: Owns the files.
        name: The name in ``memory.engine``.
        request_nbytes: Bytes of a request; an eighth more where that saves one.

    Attributes:
        queue: The queue from which the threads of the engine take their requests.
        nbytes_read: Bytes of reads that ended well.
        nbytes_written: Bytes of writes that ended well.
        stopping: Threads of the engine end.
    """

    def __init__(self, volume: Volume, name: str, request_nbytes: int) -> None:
        self.name, self._volume, self._request_nbytes = name, volume, request_nbytes
        self.queue = RequestQueue()
        self._idle = threading.Condition(self.queue.lock)
        self.nbytes_read = self.nbytes_written = 0
        self._closed = self.stopping = False

    # --- the protocol ------------------------------------------------------------------------

    def read(self, extent: Extent, memory: Memory, *, urgent: bool = False) -> Move:
        """Start reading ``extent`` into ``memory``; see the protocol."""
        return self._start(extent, memory, urgent=urgent, writes=False)

    def write(self, extent: Extent, memory: Memory) -> Move:
        """Start writing ``memory`` to ``extent``; see the protocol."""
        return self._start(extent, memory, urgent=False, writes=True)

    @property
    def in_flight_nbytes(self) -> int:
        """Bytes of requests that are queued or with the kernel."""
        with self.queue.lock:
            return self.queue.nbytes

    def close(self) -> None:
        """Wait for what is in flight, then give back threads and kernel contexts. Twice is harmless."""
        with self.queue.lock:
            self._closed = True
            self.wake()
            self._idle.wait_for(lambda: self.queue.is_idle)
            first, self.stopping = not self.stopping, True
            self.wake()
        if first:
            self.stop()

    # --- what an engine adds -----------------------------------------------------------------

    def wake(self) -> None:
        """Wake threads: something was queued, or they must stop. The lock is held."""
        raise NotImplementedError

    def stop(self) -> None:
        """Give back threads, which end as ``stopping`` is set, and kernel contexts."""
        raise NotImplementedError

    def begin(self, move: Move) -> None:
        """Look at a move before its first request is queued; on the caller's thread."""

    # --- what an engine calls ----------------------------------------------------------------

    def put_back(self, request: Request) -> None:
        """Let a request that was taken go first; the lock is held, on a thread of the engine."""
        self.queue.put_back(request)
        self.wake()

    def settle(self, request: Request, result: int) -> None:
        """Take in the result of a request: bytes moved, or a negative errno. No lock is held."""
        move = request.move
        if self._unfinished(request, result):
            with self.queue.lock:
                self.put_back(request)
            return
        with self.queue.lock:
            self.queue.drop(request)
            move.pending -= 1
            ended = not move.pending
            if ended and move.error is None:
                self.nbytes_written += move.nbytes * move.writes
                self.nbytes_read += move.nbytes * (not move.writes)
        if ended:
            move.end()
        if self._closed:
            with self.queue.lock:
                self._idle.notify_all()

    def _unfinished(self, request: Request, result: int) -> bool:
        """Return whether the rest of a request has to be asked for again."""
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
        if code in (errno.EINVAL, errno.EIO) and request.move.writes and _too_large(request):
            code = errno.EFBIG
        error = DiskError(
            code,
            "write" if request.move.writes else "read",
            self._volume.path(request.file),
            offset=request.offset,
            nbytes=request.nbytes,
            moved=request.moved,
        )
        if request.note:
            error.add_note(request.note)
        return error

    # --- starting ----------------------------------------------------------------------------

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
        with self.queue.lock:
            if self._closed:
                raise StateError(f"the {self.name} engine is closed")
            self.queue.put(requests, urgent=urgent)
            self.wake()
        return move

    def cut(self, move: Move, extent: Extent) -> list[Request]:
        """Return requests in the order of their bytes; those of different files take turns."""
        start, size, by_piece = 0, self._request_nbytes, []
        for piece in extent.pieces:
            file, fd = piece.file, self._volume.fd(piece.file)
            # Of about the same size: a last one of a few blocks would cost as much time as a whole one.
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
