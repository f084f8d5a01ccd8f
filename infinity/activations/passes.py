"""Forward passes with what follows them, one after the other: how long each took, and what it moved.

[Note: passes that can be compared]
A pass lasts from its forward to the next one, or to the end of its step. Where micro-batches accumulate, only
the last pass of a step has the update in it. A profile is of one pass. So what was predicted from it is
compared with the passes that end as the profiled one did: with the step, or with the next forward.
"""

import time
from collections import deque
from dataclasses import dataclass
from statistics import median

from infinity.activations.ledger import Ledger

#: Passes that are remembered.
REMEMBERED = 1000


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass that has ended.

    Attributes:
        nbytes_stored: Activations given to shelves; likewise ``nbytes_loaded``.
        waited_s: For them.
        updates: The step ended with it.
    """

    number: int
    time_s: float
    nbytes_stored: int
    nbytes_loaded: int
    waited_s: float
    updates: bool

    def moving_share(self, s_per_byte: float) -> float:
        """The share of compute's time that what moved took, if each byte takes ``s_per_byte`` of a core.

        Bytes move while compute waits, too. More than half is no delay that was measured, but an error.
        """
        return min(0.5, s_per_byte * (self.nbytes_stored + self.nbytes_loaded) / self.time_s)

    def compute_s(self, s_per_byte: float) -> float:
        """What it takes when nothing moves (s)."""
        return (self.time_s - self.waited_s) * (1 - self.moving_share(s_per_byte))


class Passes:
    """Times the passes of one model.

    Args:
        ledger: Counts what moves.

    Attributes:
        begun: How many there were, the one that runs included.
        ended: The latest ones.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.begun = 0
        self.ended = deque[Pass](maxlen=REMEMBERED)
        self._ledger = ledger
        self._mark: tuple[float, int, int, float] | None = None

    def begin(self) -> None:
        """The next pass begins."""
        self.begun += 1
        self._mark = self._figures()

    def end(self, *, updates: bool) -> None:
        """The pass is over; if none runs, nothing happens."""
        if self._mark is None:
            return
        time_s, stored, loaded, waited_s = (now - then for now, then in zip(self._figures(), self._mark))
        self._mark = None
        self.ended.append(Pass(self.begun - 1, time_s, int(stored), int(loaded), waited_s, updates))

    def typical(self, first: int, *, updates: bool) -> Pass | None:
        """A pass of the medians of those from number ``first`` on that end so; None: there is none."""
        alike = self.alike(first, updates=updates)
        if not alike:
            return None
        return Pass(
            alike[-1].number,
            median(each.time_s for each in alike),
            round(median(each.nbytes_stored for each in alike)),
            round(median(each.nbytes_loaded for each in alike)),
            median(each.waited_s for each in alike),
            updates,
        )

    def alike(self, first: int, *, updates: bool) -> list[Pass]:
        """Those from number ``first`` on that end so."""
        return [each for each in self.ended if each.number >= first and each.updates is updates]

    def _figures(self) -> tuple[float, int, int, float]:
        ledger = self._ledger
        return time.perf_counter(), ledger.nbytes_stored, ledger.nbytes_loaded, ledger.waited_s
