"""How far the loading of a checkpoint has come: bytes, speed and the time that is left."""

import time
from collections.abc import Callable

from infinity.core.nbytes import format_nbytes

#: Between two plain lines (s).
LINES_EVERY_S = 10.0


class LoadClock:
    """Turns bytes that are loaded into lines; its time begins with the first.

    Args:
        clock: Seconds, for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: float | None = None
        self._said_s = 0.0

    def describe(self, done_nbytes: int, total_nbytes: int) -> str:
        """As ``loading 1.5 GiB of 8 GiB  700 MiB/s  9 s left``."""
        elapsed_s = self._elapsed_s()
        parts = [f"loading {format_nbytes(done_nbytes)} of {format_nbytes(total_nbytes)}"]
        if elapsed_s > 0 and done_nbytes:
            parts.append(f"{format_nbytes(done_nbytes / elapsed_s)}/s")
            parts.append(f"{(total_nbytes - done_nbytes) * elapsed_s / done_nbytes:.0f} s left")
        return "  ".join(parts)

    def due(self, done_nbytes: int, total_nbytes: int) -> bool:
        """Whether a plain line should be written now: now and then, and at the end of a long load."""
        elapsed_s = self._elapsed_s()
        last = done_nbytes >= total_nbytes and self._said_s > 0
        if not last and elapsed_s - self._said_s < LINES_EVERY_S:
            return False
        self._said_s = 0.0 if last else elapsed_s
        return True

    def _elapsed_s(self) -> float:
        if self._began_s is None:
            self._began_s = self._clock()
        return self._clock() - self._began_s
