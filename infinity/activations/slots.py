"""Move saved storages out of memory one after another, and back, and know where the bytes of each are."""

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial

import torch

from infinity.activations.store import ActivationStore, Loading, StoredActivation
from infinity.core.lifecycle import Lifecycle, SlotState
from infinity.core.nbytes import Transfer
from infinity.core.plan import SlotKey

S = SlotState


class ActivationStats:
    """Counts the bytes of slots in memory, stored and loaded. Any thread may call.

    Attributes:
        forwarded: Reads of slots in memory whose store had not ended.
        on_demand: Loads that no plan had started.
        waited_s: Seconds that the training thread waited for stores and loads.
        dropped: What :meth:`free_dropped` gives back for collected slots: stored bytes, bytes in memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.resident_nbytes = self.peak_nbytes = self.nbytes_stored = self.nbytes_loaded = 0
        self.forwarded = self.on_demand = 0
        self.waited_s = 0.0
        self.dropped: deque[tuple[StoredActivation | None, int]] = deque()

    def add(self, nbytes: int) -> None:
        """Count bytes that a slot takes in memory, or gives back (negative)."""
        with self._lock:
            self.resident_nbytes += nbytes
            self.peak_nbytes = max(self.peak_nbytes, self.resident_nbytes)

    def free_dropped(self) -> None:
        while self.dropped:
            stored, nbytes = self.dropped.popleft()
            self.add(-nbytes)
            if stored is not None:
                stored.free()


class Slot:
    """Owns a storage that autograd saves, in memory or stored; lives as long as a graph refers to it.

    It holds its storage while RESIDENT or STORING, and again from each load until all readers have read it.

    Attributes:
        version: Autograd's count of writes to the storage when it was saved.
        readers: Saved tensors in it that backward has not read.
    """

    def __init__(
        self, key: SlotKey, storage: torch.UntypedStorage, version: int, stats: ActivationStats
    ) -> None:
        self.key, self.version, self.nbytes = key, version, storage.nbytes()
        self.lifecycle: Lifecycle[SlotState] = Lifecycle(f"activation {key.region}.{key.ordinal}", S.RESIDENT)
        self.readers = 0
        self._stats = stats
        self._lock = threading.RLock()  # guards what follows
        self._storage: torch.UntypedStorage | None = storage
        # Where the bytes were last: a storage, which other code may still hold, and their offset in it.
        self._last = weakref.ref(storage), 0
        self._stored: StoredActivation | None = None
        self._loading: Loading | None = None
        self._is_wanted = False  # by backward: a store that ends now need not be loaded
        stats.add(self.nbytes)

    def __del__(self) -> None:
        # Possibly called by the garbage collector, inside any lock: give back later.
        if hasattr(self, "_is_wanted"):
            held = self._storage is not None or self._loading is not None
            self._stats.dropped.append((self._stored, self.nbytes if held else 0))

    def is_of(self, storage: torch.UntypedStorage, version: int) -> bool:
        last, offset_nbytes = self._last
        return self.version == version and last() is storage and not offset_nbytes

    @property
    def state(self) -> SlotState:
        return self.lifecycle.state

    # --- to the store ------------------------------------------------------------------------

    def reserve(self, store: ActivationStore) -> None:
        """Reserve room in ``store``, where :meth:`start_store` stores; DiskError: the file system is full."""
        with self._lock:
            assert self._storage is not None
            self._stored = store.reserve(self._storage, self.lifecycle.name)
            self.lifecycle.move(S.STORING)

    def start_store(self) -> Transfer:
        assert self._stored is not None
        assert self._storage is not None
        return self._stored.store(self._storage)

    def cancel_store(self) -> None:
        with self._lock:
            stored, self._stored = self._stored, None
            self.lifecycle.move(S.RESIDENT)
        if stored is not None:
            stored.free()

    def end_store(self) -> None:
        """End a store that succeeded: release the storage, unless backward asked for it."""
        with self._lock:
            if self._is_wanted:
                self.lifecycle.move(S.RESIDENT)
            else:
                self._release()

    # --- and back ----------------------------------------------------------------------------

    def fetch(self) -> bool:
        """Start to load the bytes if they are away; return whether a load began."""
        with self._lock:
            self._is_wanted = True
            if self.state is not S.STORED:
                return False
            self._stats.add(self.nbytes)
            self._storage = self._last[0]()
            if self._storage is not None:  # other code held it
                self.lifecycle.move(S.RESIDENT)
                return False
            assert self._stored is not None
            self._loading = self._stored.load()
            self._stats.nbytes_loaded += self.nbytes
            self.lifecycle.move(S.LOADING)
            return True

    def read(self, wait: Callable[[Callable[[], None]], None]) -> tuple[torch.UntypedStorage, int]:
        """Return the storage, and the offset in it (bytes) at which the slot's bytes begin.

        ``wait`` runs a function that waits for the load. DiskError: it failed, and can be tried again.
        """
        with self._lock:
            loading, self._loading = self._loading, None
            if loading is not None:
                storage, offset_nbytes, transfer = loading
                try:
                    if not transfer.done():
                        wait(transfer.wait)
                    transfer.wait()
                except BaseException as error:
                    self.lifecycle.move(S.STORED)
                    self._stats.add(-self.nbytes)
                    del loading, storage, transfer  # an error whose frame holds them keeps the graph alive
                    raise error.with_traceback(None) from None
                self._storage, self._last = storage, (weakref.ref(storage), offset_nbytes)
                self.lifecycle.move(S.RESIDENT)
            assert self._storage is not None
            return self._storage, self._last[1]

    def drop(self) -> None:
        """Release the storage, which all readers have read, if its bytes can be loaded again."""
        with self._lock:
            if self.state is S.RESIDENT and self._stored is not None:
                self._release()

    def _release(self) -> None:
        self.lifecycle.move(S.STORED)
        self._storage = None
        self._stats.add(-self.nbytes)


class StoreQueue:
    """Stores slots in the order of packing, at least one and up to ``in_flight_nbytes`` at one time."""

    def __init__(self, stats: ActivationStats, in_flight_nbytes: int = 64 * 2**20) -> None:
        self._stats, self.most_nbytes = stats, in_flight_nbytes
        self._lock = threading.RLock()  # guards what follows
        self._changed = threading.Condition(self._lock)
        self._number = 0  # of the slot that was put last
        # Number and bytes of each; a slot goes with its graph.
        self._waiting: OrderedDict[weakref.ref[Slot], tuple[int, int]] = OrderedDict()
        self._in_flight: dict[int, int] = {}  # bytes of each store by its number
        self._starting = False
        self._error: Exception | None = None

    def put(self, slot: Slot, store: ActivationStore) -> int:
        """Store ``slot`` when its turn comes; return its number, which grows. DiskError: no room."""
        self.check()
        slot.reserve(store)
        with self._lock:
            self._number = number = self._number + 1
            self._waiting[weakref.ref(slot)] = number, slot.nbytes
        self._start()
        return number

    def cancel(self, slot: Slot) -> None:
        """Keep ``slot`` in memory if it still waits; a store in flight goes on."""
        with self._lock:
            waited = self._waiting.pop(weakref.ref(slot), None) is not None
        if waited:
            slot.cancel_store()

    @property
    def in_flight_nbytes(self) -> int:
        with self._lock:
            return sum(self._in_flight.values())

    @property
    def nbytes(self) -> int:
        """Return the bytes that wait or are in flight."""
        return sum(nbytes for _, nbytes in self._left())

    def has_ended(self, number: int) -> bool:
        """Return whether nothing that was put up to ``number`` waits or is in flight."""
        return all(left > number for left, _ in self._left())

    def _left(self) -> list[tuple[int, int]]:
        """Return number and bytes of each store that waits or is in flight."""
        with self._lock:
            waiting = (each for slot, each in self._waiting.items() if slot() is not None)
            return [*self._in_flight.items(), *waiting]

    def wait_until(self, is_over: Callable[[], bool]) -> None:
        """Wait until ends of stores make ``is_over()`` true, or nothing is in flight; then :meth:`check`."""
        with self._lock:
            self._changed.wait_for(lambda: is_over() or not (self._in_flight or self._starting))
        self.check()

    def wait_below(self, nbytes: int) -> None:
        """Wait until at most ``nbytes`` wait or are in flight; then :meth:`check`."""
        self.wait_until(lambda: self.nbytes <= nbytes)

    def check(self) -> None:
        """Raise the error of a failed store, once, when no store is in flight; its slot stays in memory."""
        if self._error is not None:
            self.drain()
            error, self._error = self._error, None
            try:
                raise error.with_traceback(None)
            finally:
                del error  # an error whose frame holds it keeps the step's graph alive

    def drain(self) -> None:
        """Wait until nothing is in flight; slots that wait are not stored."""
        with self._lock:
            self._waiting.clear()
            self._changed.wait_for(lambda: not (self._in_flight or self._starting))

    def _start(self) -> None:
        """Start stores, on one thread at a time, so that stores that end at once do not recurse."""
        with self._lock:
            if self._starting:
                return
            self._starting = True
        while (taken := self._take()) is not None:
            number, slot = taken
            try:
                transfer = slot.start_store()
            except BaseException as error:  # surfaces at the next wait, as one of the disk
                transfer = Transfer()
                transfer.finish(error.with_traceback(None))
            transfer.then(partial(self._ended, number, weakref.ref(slot), transfer))
            del taken, slot  # a drained queue holds no slot

    def _take(self) -> tuple[int, Slot] | None:
        """Put in flight the next slot that may go and whose graph still lives; None: there is none."""
        with self._lock:
            while self._waiting:
                ref, (number, nbytes) = next(iter(self._waiting.items()))
                if self._in_flight and self.in_flight_nbytes + nbytes > self.most_nbytes:
                    break
                del self._waiting[ref]
                if (slot := ref()) is not None:
                    self._in_flight[number] = nbytes
                    self._stats.nbytes_stored += nbytes
                    return number, slot
            self._starting = False
            self._changed.notify_all()
            return None

    def _ended(self, number: int, ref: "weakref.ref[Slot]", transfer: Transfer) -> None:
        """End a store, on the thread that saw the end; the graph, and the slot with it, may be gone."""
        error = None
        try:
            transfer.wait()
        except Exception as raised:  # also a budget's: the thread that waits for the end must hear of it
            error = raised.with_traceback(None)
        if (slot := ref()) is not None:
            (slot.end_store if error is None else slot.cancel_store)()
        del slot  # a drained queue holds no slot
        with self._lock:
            self._error = self._error or error
            del self._in_flight[number]
            self._changed.notify_all()
        self._start()
