"""Stores in the order of packing, a bounded number of bytes at one time."""

import threading
import weakref
from collections import OrderedDict
from functools import partial

from infinity.activation.ledger import Ledger
from infinity.activation.shelf import Shelf
from infinity.activation.slot import Slot
from infinity.core.errors import DiskError


class StoreQueue:
    """What waits to be stored can still be called off; what a shelf has, cannot.

    Args:
        ledger: Counts bytes.
        in_flight_nbytes: What shelves are given at one time, at least one slot.
    """

    def __init__(self, ledger: Ledger, in_flight_nbytes: int = 64 * 2**20) -> None:
        self._ledger, self._most_nbytes = ledger, in_flight_nbytes
        self._changed = threading.Condition(threading.RLock())  # guards what follows
        self._waiting: OrderedDict[weakref.ref[Slot], int] = OrderedDict()  # a slot goes with its graph
        self._in_flight_nbytes = 0
        self._error: DiskError | None = None

    def put(self, slot: Slot, shelf: Shelf) -> None:
        """Store ``slot`` in its turn.

        Raises:
            DiskError: There is no room for it, or an earlier store failed.
        """
        self.check()
        slot.shelve(shelf)
        with self._changed:
            self._waiting[weakref.ref(slot)] = slot.nbytes
        self._start()

    def call_off(self, slot: Slot) -> None:
        """Do not store ``slot`` if it still waits."""
        with self._changed:
            waited = self._waiting.pop(weakref.ref(slot), None) is not None
        if waited:
            slot.cancel()

    @property
    def nbytes(self) -> int:
        """Bytes that wait or are in flight."""
        with self._changed:
            return sum(self._waiting.values()) + self._in_flight_nbytes

    def wait_below(self, nbytes: int) -> None:
        """Return when at most ``nbytes`` wait or are in flight, or nothing does.

        Raises:
            DiskError: A store failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.nbytes <= nbytes or not self._in_flight_nbytes)
        self.check()

    def check(self) -> None:
        """Raise what a store ended with, once.

        Raises:
            DiskError: A store failed; its bytes are still in memory.
        """
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def drain(self) -> None:
        """Return when nothing is in flight; nothing more is stored."""
        with self._changed:
            self._waiting.clear()
            self._changed.wait_for(lambda: not self._in_flight_nbytes)

    def _start(self) -> None:
        while (slot := self._next()) is not None:
            slot.store(partial(self._ended, slot.nbytes))

    def _next(self) -> Slot | None:
        """The next one that may go, and whose graph still lives."""
        with self._changed:
            while self._waiting:
                there, nbytes = next(iter(self._waiting.items()))
                busy = self._in_flight_nbytes
                if busy and busy + nbytes > self._most_nbytes:
                    return None
                del self._waiting[there]
                slot = there()
                if slot is not None:
                    self._in_flight_nbytes += nbytes
                    self._ledger.nbytes_stored += nbytes
                    return slot
            return None

    def _ended(self, nbytes: int, error: DiskError | None) -> None:
        with self._changed:
            self._in_flight_nbytes -= nbytes
            self._error = self._error or error
            self._changed.notify_all()
        self._start()
