"""Pinned host memory on the way to an accelerator: a shard goes through it in pieces.

[Note: pieces]
A shard may be larger than what the host budget has for staging. So it is read in pieces of a bounded
size: while one is uploaded, the next one is read into a second buffer if there is room for one. A shard
that is no larger than a piece is read as a whole, ahead of its turn.

[Note: no buffer is waited for in a circle]
Shards are uploaded one after another, in the order in which they were asked for. One that found no buffer
gets one when it is its turn. Until then no later shard takes a buffer, because that one would come back
only after the turn of the first.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from infinity.core.transfer import Lease, Pool, Transfer

#: Starts to read a shard's bytes, from the given one on, into memory.
Fetch = Callable[[memoryview, int], Transfer]
#: Puts bytes, ``(n,)`` uint8, where the shard belongs, from the given byte on; blocking.
Upload = Callable[[Tensor, int], None]


class Staging:
    """Brings shards through a pool.

    Args:
        pool: In host memory.
        piece_nbytes: The most that one buffer takes: whole blocks (bytes).
    """

    def __init__(self, pool: Pool, piece_nbytes: int) -> None:
        self.pool, self.piece_nbytes = pool, piece_nbytes
        self._without = 0  # shards on their way that have no buffer
        self._lock = threading.Lock()

    def bring(self, nbytes: int, who: str, fetch: Fetch, upload: Upload) -> Callable[[], None]:
        """Start to bring a shard of ``nbytes``.

        Returns:
            What brings it; to be called once, on the thread that does so for every shard, in order.
        """
        size = min(nbytes, self.piece_nbytes)
        with self._lock:
            lease = None if self._without else self.pool.try_lease(size, who=who)
            self._without += lease is None
        reading = None if lease is None else fetch(lease.memory, 0)

        def ready() -> None:
            with contextlib.ExitStack() as held:
                first = lease or self._its_turn(size, who)
                held.callback(first.release)
                readings = deque([_Reading(first, 0, reading or fetch(first.memory, 0))])
                second = self.pool.try_lease(size, who=who) if nbytes > size else None
                if second is not None:
                    held.callback(second.release)
                held.callback(_settle, readings)
                self._play(nbytes, readings, second, fetch, upload)

        return ready

    def _its_turn(self, size: int, who: str) -> Lease:
        try:
            return self.pool.lease(size, who=who)
        finally:
            with self._lock:
                self._without -= 1

    def _play(
        self, nbytes: int, readings: "deque[_Reading]", free: Lease | None, fetch: Fetch, upload: Upload
    ) -> None:
        """Read piece i+1 while piece i is uploaded, if there is a ``free`` buffer."""
        size = readings[0].lease.nbytes

        def read(lease: Lease, start: int) -> None:
            memory = lease.memory[: min(size, nbytes - start)]
            readings.append(_Reading(lease, start, fetch(memory, start)))

        for following in (*range(size, nbytes, size), None):
            if following is not None and free is not None:
                read(free, following)
            piece = readings[0]
            piece.transfer.wait()
            readings.popleft()
            upload(piece.lease.tensor[: min(size, nbytes - piece.start)], piece.start)
            if following is not None and free is None:
                read(piece.lease, following)
            elif free is not None:
                free = piece.lease


@dataclass(frozen=True, slots=True)
class _Reading:
    """A piece that is being read into ``lease``, from byte ``start`` of its shard on."""

    lease: Lease
    start: int
    transfer: Transfer


def _settle(readings: Iterable[_Reading]) -> None:
    """Return when nothing is written into the buffers any more."""
    for reading in readings:
        with contextlib.suppress(OSError):  # another error is on its way already
            reading.transfer.wait()
