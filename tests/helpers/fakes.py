"""A disk and a pool of plain memory, that count, wait and fail when they are told to."""

import mmap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from infinity.core.errors import BudgetError, DiskError
from infinity.core.nbytes import BLOCK_NBYTES, Extent, Piece, Transfer, aligned
from tests.helpers.limits import HANG_S


class FakeEngine:
    """Files in memory: one ``bytearray`` for each file number.

    Args:
        threads: Requests in flight at one time.
        fail_write: The number of the write that fails, from 1; 0: none. Later writes end after it, so that
            no order of threads lets them be done first.
        fail_read: The same for reads.
        errno: With which they fail.
    """

    name = "fake"

    def __init__(
        self,
        *,
        threads: int = 8,
        fail_write: int = 0,
        fail_read: int = 0,
        errno: int = 5,
    ) -> None:
        self.files: dict[int, bytearray] = {}
        self.log: list[tuple[str, int, int]] = []  # what was asked, in order: action, file, offset
        self.nbytes_read = self.nbytes_written = 0
        self.in_flight = self.peak_in_flight = 0
        self._errno = errno
        self._fail = {"read": fail_read, "write": fail_write}
        self._failed: set[str] = set()  # actions of which one has failed, and told those who wait for it
        self.counts = {"read": 0, "write": 0}  # of requests that were submitted
        self._changed = threading.Condition()
        self._may_end: Callable[[str, int], bool] = lambda action, number: True
        self._workers = ThreadPoolExecutor(threads)

    def hold(self, until: Callable[[str, int], bool] = lambda action, number: False) -> None:
        """Requests end when ``until(action, number)`` is true, each action's numbers beginning with 1.

        It is looked at whenever something was submitted or has ended.
        """
        with self._changed:
            self._may_end = until
            self._changed.notify_all()

    def let_go(self) -> None:
        self.hold(lambda action, number: True)

    @property
    def ended(self) -> int:
        """Requests that have ended."""
        return sum(self.counts.values()) - self.in_flight

    def wait_for(self, in_flight: int) -> None:
        """Return when so many requests are in flight."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.in_flight == in_flight, HANG_S)

    def extent(self, nbytes: int, file: int = 0) -> Extent:
        """New space at the end of ``file``."""
        content = self.files.setdefault(file, bytearray())
        offset = len(content)
        content.extend(bytes(aligned(nbytes)))
        return Extent((Piece(file, offset, nbytes),))

    def put(self, extent: Extent, content: bytes) -> None:
        (piece,) = extent.pieces
        self.files[piece.file][piece.offset : piece.offset + piece.nbytes] = content

    def get(self, extent: Extent) -> bytes:
        (piece,) = extent.pieces
        return bytes(self.files[piece.file][piece.offset : piece.offset + piece.nbytes])

    def read(self, extent: Extent, memory: memoryview, *, urgent: bool = False) -> Transfer:
        return self._submit("read", extent, memory)

    def write(self, extent: Extent, memory: memoryview) -> Transfer:
        return self._submit("write", extent, memory)

    def _submit(self, action: str, extent: Extent, memory: memoryview) -> Transfer:
        assert memory.nbytes == extent.nbytes
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        assert address % BLOCK_NBYTES == 0, "staging memory is not aligned"
        with self._changed:
            self.counts[action] += 1
            count = self.counts[action]
            self.in_flight += 1
            self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
            self.log.append((action, extent.pieces[0].file, extent.pieces[0].offset))
            self._changed.notify_all()
        transfer = Transfer()
        self._workers.submit(self._run, transfer, action, count, extent, memory)
        return transfer

    def _run(self, transfer: Transfer, action: str, count: int, extent: Extent, memory: memoryview) -> None:
        transfer.run(partial(self._move, action, count, extent, memory))
        with self._changed:
            if count == self._fail[action]:
                self._failed.add(action)
                self._changed.notify_all()

    def _move(self, action: str, count: int, extent: Extent, memory: memoryview) -> None:
        later = 0 < self._fail[action] < count
        with self._changed:
            ends = self._changed.wait_for(
                lambda: self._may_end(action, count) and (not later or action in self._failed), HANG_S
            )
            self.in_flight -= 1
            self._changed.notify_all()
            assert ends, f"{action} {count} was held for ever"
            if count == self._fail[action]:
                piece = extent.pieces[0]
                raise DiskError(self._errno, action, "/fake", offset=piece.offset, nbytes=piece.nbytes)
            if action == "read":
                memory[:] = self.get(extent)
                self.nbytes_read += extent.nbytes
            else:
                self.put(extent, bytes(memory))
                self.nbytes_written += extent.nbytes

    def close(self) -> None:
        self._workers.shutdown()


class FakeLease:
    """A buffer of a :class:`FakePool`."""

    def __init__(self, pool: "FakePool", nbytes: int) -> None:
        self._pool, self.nbytes = pool, nbytes
        self.memory = memoryview(mmap.mmap(-1, nbytes))
        self.tensor: Any = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.tensor.fill_(0xA5)  # nobody may rely on zeros
        self.whole, self.lent = self.tensor, None  # no rank shares it

    def record_use(self) -> None:
        """Nothing: no stream uses it."""

    def release(self) -> None:
        self._pool.give_back(self)

    def __enter__(self) -> "FakeLease":
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class FakePool:
    """At most ``capacity_nbytes`` leased at one time."""

    def __init__(self, capacity_nbytes: int, *, patience_s: float = HANG_S) -> None:
        self.capacity_nbytes, self._patience_s = capacity_nbytes, patience_s
        self.leased_nbytes = self.peak_nbytes = 0
        self.refused = 0  # how often what was asked for did not fit
        self._held: set[FakeLease] = set()
        self._changed = threading.Condition()

    def try_lease(self, nbytes: int, *, who: str) -> FakeLease | None:
        with self._changed:
            if self.leased_nbytes + nbytes > self.capacity_nbytes:
                self.refused += 1
                return None
            self.leased_nbytes += nbytes
            self.peak_nbytes = max(self.peak_nbytes, self.leased_nbytes)
            lease = FakeLease(self, nbytes)
            self._held.add(lease)
            return lease

    def lease(self, nbytes: int, *, who: str) -> FakeLease:
        deadline = time.monotonic() + self._patience_s
        while (lease := self.try_lease(nbytes, who=who)) is None:
            if nbytes > self.capacity_nbytes or time.monotonic() > deadline:
                raise BudgetError(f"{who}: no {nbytes} of {self.capacity_nbytes} bytes; raise memory.host")
            with self._changed:
                self._changed.wait(0.02)
        return lease

    def give_back(self, lease: FakeLease) -> None:
        with self._changed:
            if lease in self._held:
                self._held.remove(lease)
                self.leased_nbytes -= lease.nbytes
                self._changed.notify_all()

    def close(self) -> None:
        with suppress(BufferError):
            self._held.clear()
