"""Stores in the order of packing, a bounded number of bytes at one time."""

import threading
import weakref
from collections import OrderedDict
from functools import partial

from infinity.activations.ledger import Ledger
from infinity.activations.shelf import Shelf
from infinity.activations.slot import Slot


class StoreQueue:
    """What waits to be stored can still be called off; what a shelf has, cannot.

    Args:
        ledger: Counts bytes.
        in_flight_nbytes: What shelves are given at one time, at least one slot.
    """

    def __init__(self, ledger: Ledger, in_flight_nbytes: int = 64 * 2**20) -> None:
        self._ledger, self._most_nbytes = ledger, in_flight_nbytes
        self._lock = threading.RLock()  # guards what follows
        self._changed = threading.Condition(self._lock)
        self._waiting: OrderedDict[weakref.ref[Slot], int] = OrderedDict()  # a slot goes with its graph
        self._in_flight: dict[object, int] = {}  # bytes of each store
        self._in_flight_nbytes = 0
        self._starting, self._begun = False, object()  # the store that was begun last
        self._error: Exception | None = None

    def put(self, slot: Slot, shelf: Shelf) -> None:
        """Store ``slot`` in its turn.

        Raises:
            DiskError: There is no room for it, or an earlier store failed.
        """
        self.check()
        slot.shelve(shelf)
        with self._lock:
            self._waiting[weakref.ref(slot)] = slot.nbytes
        self._start()

    def call_off(self, slot: Slot) -> None:
        """Do not store ``slot`` if it still waits."""
        with self._lock:
            waited = self._waiting.pop(weakref.ref(slot), None) is not None
        if waited:
            slot.cancel()

    @property
    def nbytes(self) -> int:
        """Bytes that wait or are in flight."""
        with self._lock:
            return sum(n for slot, n in self._waiting.items() if slot() is not None) + self._in_flight_nbytes

    def wait_below(self, nbytes: int) -> None:
        """Return when at most ``nbytes`` wait or are in flight, or nothing does.

        Raises:
            DiskError: A store failed.
        """
        with self._lock:
            self._changed.wait_for(lambda: self.nbytes <= nbytes or not self._in_flight)
        self.check()

    def check(self) -> None:
        """Raise what a store ended with, once: the other stores end before, or are not begun.

        Raises:
            DiskError: A store failed; its bytes are still in memory.
        """
        if self._error is None:
            return
        self.drain()
        error, self._error = self._error, None
        assert error is not None
        try:
            raise error.with_traceback(None)
        finally:
            del error  # an error whose frame holds it keeps the step's graph alive

    def drain(self) -> None:
        """Return when nothing is in flight; what waits is not stored."""
        with self._lock:
            self._waiting.clear()
            self._changed.wait_for(lambda: not (self._in_flight or self._starting))

    def _start(self) -> None:
        """Start what may go. One thread at a time: a store that ends at once does not start the next one."""
        with self._lock:
            if self._starting:
                return
            self._starting = True
        try:
            while self._start_one():
                pass
        except BaseException:  # Ctrl-C: nobody may wait for a store that was not begun
            self._starting = False
            self._end(self._begun)
            raise

    def _start_one(self) -> bool:
        slot = self._next()  # held here only: a drained queue holds no slot
        if slot is not None:
            slot.store(partial(self._ended, self._begun))
        return slot is not None

    def _next(self) -> Slot | None:
        """The next one that may go, and whose graph still lives; None: nobody starts any more."""
        with self._lock:
            while self._waiting:
                there, nbytes = next(iter(self._waiting.items()))
                if self._in_flight and self._in_flight_nbytes + nbytes > self._most_nbytes:
                    break
                del self._waiting[there]
                slot = there()
                if slot is not None:
                    self._begun = object()
                    self._in_flight[self._begun] = nbytes
                    self._in_flight_nbytes += nbytes
                    self._ledger.nbytes_stored += nbytes
                    return slot
            self._starting = False
            self._changed.notify_all()
            return None

    def _ended(self, store: object, error: Exception | None) -> None:
        with self._lock:
            self._error = self._error or error
        self._end(store)
        self._start()

    def _end(self, store: object) -> None:
        with self._lock:
            self._in_flight_nbytes -= self._in_flight.pop(store, 0)
            self._changed.notify_all()
