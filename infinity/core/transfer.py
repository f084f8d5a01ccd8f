"""Bytes in flight, and the memory they fly into: submit, then wait; only ``wait`` may fail."""

import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from itertools import islice
from types import TracebackType
from typing import Protocol, TypeVar

from infinity.core.errors import copied
from infinity.core.nbytes import Extent

#: Waits are cut into slices, so that Ctrl-C gets through wherever the signal was delivered (s).
_SLICE_S = 0.5


class Transfer:
    """A move in flight: submitted by one thread, ended by another, waited for by any.

    Once ended it holds neither what it moved nor the calls that were to follow it.
    """

    __slots__ = ("_calls", "_done", "_error", "_event", "_lock", "_traceback")

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._calls: list[Callable[[], None]] = []
        self._done = False
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._event: threading.Event | None = None  # made by the first that waits: most never do

    def wait(self) -> None:
        """Block until every byte has moved; raise what went wrong. May be called again, on any thread."""
        event = None
        with self._lock:
            if not self._done:
                event = self._event = self._event or threading.Event()
        while event is not None and not event.wait(_SLICE_S):
            self._while_waiting()
        if self._error is not None:
            # From where it was raised first: waiting adds nothing to it, and keeps no waiter's frame alive.
            raise copied(self._error).with_traceback(self._traceback)

    def _while_waiting(self) -> None:
        """Raise if the end will not come; called repeatedly while a thread waits."""

    def done(self) -> bool:
        """Return whether ``wait`` would return (or raise) at once."""
        return self._done

    def then(self, call: Callable[[], None]) -> None:
        """Run ``call`` once, when the move has ended, well or not; at once if it has.

        It runs on the thread that ends the move, must not wait, and learns how the move ended by ``wait``.
        """
        with self._lock:
            if not self._done:
                self._calls.append(call)
                return
        call()

    def finish(self, error: BaseException | None = None) -> None:
        """End the transfer, wake all that wait, and run the calls that follow; only the first end counts.

        An exception in a call goes to ``threading.excepthook``, so that the thread survives it.
        """
        with self._lock:
            if self._done:
                return
            self._error, self._traceback = error, error.__traceback__ if error else None
            self._done = True
            calls, self._calls = self._calls, []
            if self._event is not None:
                self._event.set()
        for call in calls:
            try:
                call()
            except Exception:
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))

    def run(self, call: Callable[[], object]) -> None:
        """Run ``call``, and end with its error; without the traceback, which keeps alive what was moved."""
        try:
            call()
        except BaseException as error:  # surfaces at wait
            self.finish(error.with_traceback(None))
        else:
            self.finish()


def chained(first: Transfer, begin: Callable[[], Transfer]) -> Transfer:
    """Return a transfer that ends with a second one, which ``begin`` starts when ``first`` has ended well.

    An error of either ends it. ``begin`` runs on the thread that saw the first end.
    """
    chain = Transfer()

    def go_on() -> None:
        try:
            first.wait()
            second = begin()
        except BaseException as error:  # surfaces at wait
            chain.finish(error)
        else:
            second.then(lambda: chain.run(second.wait))

    first.then(go_on)
    return chain


class TransferEngine(Protocol):
    """Moves bytes between extents and memory, and counts those of transfers that ended well; any thread.

    ``close`` waits for what is in flight, then gives back threads and kernel contexts.
    """

    @property
    def name(self) -> str: ...
    @property
    def nbytes_read(self) -> int: ...
    @property
    def nbytes_written(self) -> int: ...

    def read(self, extent: Extent, memory: memoryview, *, urgent: bool = False) -> Transfer:
        """Start reading ``extent`` into ``memory``; ``write`` has the same rules.

        ``extent`` is aligned to ``BLOCK_NBYTES``. ``memory`` is writable, page-aligned, of exactly
        ``extent.nbytes`` bytes, and stays alive and untouched until ``wait`` returns. ``urgent`` goes before
        requests that are queued but not yet with the kernel.
        """
        ...

    def write(self, extent: Extent, memory: memoryview) -> Transfer: ...

    def close(self) -> None: ...


P = TypeVar("P")
B = TypeVar("B")


def stream(
    pieces: Iterable[P], buffers: Iterable[B], read: Callable[[P, B], Transfer]
) -> Generator[tuple[P, B]]:
    """Read pieces through a few buffers; yield each in order, with the buffer that has it until the next.

    The next ones are read meanwhile. Close the generator before the buffers are given back, so that nothing
    is written to them any more.
    """
    left, free = iter(pieces), deque(buffers)
    reading: deque[tuple[P, B, Transfer]] = deque()
    try:
        while True:
            for piece in islice(left, len(free)):
                lease = free.popleft()
                reading.append((piece, lease, read(piece, lease)))
            if not reading:
                return
            piece, lease, transfer = reading[0]
            transfer.wait()
            yield piece, lease
            reading.popleft()
            free.append(lease)
    finally:
        for _, _, transfer in reading:
            with suppress(OSError):  # another error is on its way already
                transfer.wait()
