"""An engine whose disk fails on cue: an error on the n-th transfer, a short one, a slow or a held one."""

import contextlib
import errno as errno_names
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from infinity.core.errors import DiskError
from infinity.core.nbytes import BLOCK_NBYTES, Extent, Transfer, TransferEngine
from infinity.shards import storage
from tests.helpers.limits import HANG_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The ``nth`` read or write (the first is 1) ends with ``errno``.

    Attributes:
        share: Of its bytes, what moves before: 0 nothing, 0.5 a short transfer.
        forever: Every later one fails, too.
    """

    on: Literal["read", "write"]
    nth: int
    errno: int = errno_names.EIO
    share: float = 0.0
    forever: bool = False

    def hits(self, on: str, count: int) -> bool:
        return on == self.on and (count >= self.nth if self.forever else count == self.nth)


class FaultyEngine:
    """``engine`` with ``faults``; each transfer ends ``delay_s`` later than it would (s).

    Attributes:
        reads, writes: How many were started.
    """

    def __init__(self, engine: TransferEngine, *faults: Fault, delay_s: float = 0.0) -> None:
        self.engine, self.faults, self.delay_s = engine, faults, delay_s
        self.reads = self.writes = 0
        self._lock = threading.Lock()
        self._may_end = threading.Event()
        self._may_end.set()

    @property
    def name(self) -> str:
        return f"faulty {self.engine.name}"

    @property
    def nbytes_read(self) -> int:
        return self.engine.nbytes_read

    @property
    def nbytes_written(self) -> int:
        return self.engine.nbytes_written

    def read(self, extent: Extent, memory: memoryview, *, urgent: bool = False) -> Transfer:
        with self._lock:
            self.reads += 1
            fault = self._fault("read", self.reads)
        return self._start("read", extent, memory, fault, lambda e, m: self.engine.read(e, m, urgent=urgent))

    def write(self, extent: Extent, memory: memoryview) -> Transfer:
        with self._lock:
            self.writes += 1
            fault = self._fault("write", self.writes)
        return self._start("write", extent, memory, fault, self.engine.write)

    def close(self) -> None:
        self.engine.close()

    def hold(self) -> None:
        """Transfers that start from now on are in flight until :meth:`let_go`, however long that takes."""
        self._may_end = threading.Event()

    def let_go(self) -> None:
        self._may_end.set()

    def _fault(self, on: str, count: int) -> Fault | None:
        return next((fault for fault in self.faults if fault.hits(on, count)), None)

    def _start(
        self,
        on: str,
        extent: Extent,
        memory: memoryview,
        fault: Fault | None,
        start: Callable[[Extent, memoryview], Transfer],
    ) -> Transfer:
        if fault is None and not self.delay_s and self._may_end.is_set():
            return start(extent, memory)
        error, moved = None, extent.nbytes
        if fault is not None:
            moved = int(extent.nbytes * fault.share) // BLOCK_NBYTES * BLOCK_NBYTES
            error = DiskError(fault.errno, on, "faulty.bin", offset=0, nbytes=extent.nbytes, moved=moved)
        inner = [start(extent.part(0, moved), memory[:moved])] if moved else []
        return _late(inner, error, self.delay_s, self._may_end)


def _late(
    inner: Sequence[Transfer], error: DiskError | None, delay_s: float, may_end: threading.Event
) -> Transfer:
    """Ends ``delay_s`` after ``inner``, and when it may, with ``error`` if there is one."""

    def end() -> None:
        for transfer in inner:
            transfer.wait()
        assert may_end.wait(HANG_S), "a transfer was held for ever"
        if error is not None:
            raise error

    late = Transfer()
    timer = threading.Timer(delay_s, late.run, [end])
    timer.daemon = True
    if inner:
        inner[0].then(timer.start)
    else:
        timer.start()
    return late


@contextlib.contextmanager
def breakable() -> Iterator[list[FaultyEngine]]:
    """Engines that are made in this context can be given faults."""
    make, made = storage.make_engine, list[FaultyEngine]()

    def faulty(*args: Any) -> FaultyEngine:
        made.append(FaultyEngine(make(*args)))
        return made[-1]

    storage.make_engine = faulty
    try:
        yield made
    finally:
        storage.make_engine = make
