"""Counts the bytes of activations: in memory, stored, loaded; and what slots left behind."""

import threading
from collections import deque

from infinity.activations.shelf import Stored


class Ledger:
    """Any thread may call.

    Attributes:
        resident_nbytes: Of slots, in memory.
        peak_nbytes: The most of them at one time.
        nbytes_stored: Given to shelves.
        nbytes_loaded: Taken from them.
        forwarded: Reads that found their bytes before these had been stored.
        on_demand: Loads that no plan had started.
        waited_s: Of the training thread, for stores and loads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.resident_nbytes = self.peak_nbytes = self.nbytes_stored = self.nbytes_loaded = 0
        self.forwarded = self.on_demand = 0
        self.waited_s = 0.0
        self._left: deque[tuple[Stored | None, int]] = deque()

    def came(self, nbytes: int) -> None:
        """These bytes are in memory."""
        with self._lock:
            self.resident_nbytes += nbytes
            self.peak_nbytes = max(self.peak_nbytes, self.resident_nbytes)

    def went(self, nbytes: int) -> None:
        """They are not any more."""
        with self._lock:
            self.resident_nbytes -= nbytes

    def left_behind(self, stored: Stored | None, nbytes: int) -> None:
        """A slot is gone: its room on a shelf, and its bytes in memory. Takes no lock."""
        self._left.append((stored, nbytes))

    def tidy(self) -> None:
        """Give back what slots left behind."""
        while self._left:
            stored, nbytes = self._left.popleft()
            self.went(nbytes)
            if stored is not None:
                stored.free()
