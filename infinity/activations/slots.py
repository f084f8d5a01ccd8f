"""Saved storages: where the bytes of each one are, how they leave memory in turn, and how they come back."""

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial

import torch

from infinity.activations.store import ActivationStore, Loading, StoredActivation
from infinity.core.lifecycle import Lifecycle, SlotState
from infinity.core.plan import SlotKey
from infinity.core.transfer import Transfer

S = SlotState


class ActivationStats:
    """Counts the bytes of activations in memory, stored and loaded. Any thread may call.

    Attributes:
        resident_nbytes: Bytes of slots in memory.
        peak_nbytes: The most of them at one time.
        nbytes_stored: Bytes given to stores.
        nbytes_loaded: Bytes taken from stores.
        forwarded: Reads that found their bytes in memory, before they had been stored.
        on_demand: Loads that no plan had started.
        waited_s: Seconds for which the training thread waited for stores and loads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.resident_nbytes = self.peak_nbytes = self.nbytes_stored = self.nbytes_loaded = 0
        self.forwarded = self.on_demand = 0
        self.waited_s = 0.0
        self._deferred: deque[tuple[StoredActivation | None, int]] = deque()

    def allocated(self, nbytes: int) -> None:
        """Count bytes that a slot takes in memory."""
        with self._lock:
            self.resident_nbytes += nbytes
            self.peak_nbytes = max(self.peak_nbytes, self.resident_nbytes)

    def freed(self, nbytes: int) -> None:
        """Count bytes that a slot gave back."""
        with self._lock:
            self.resident_nbytes -= nbytes

    def deferred(self, stored: StoredActivation | None, nbytes: int) -> None:
        """Leave a slot's stored bytes and its bytes in memory to :meth:`free_deferred`. Takes no lock."""
        self._deferred.append((stored, nbytes))

    def free_deferred(self) -> None:
        """Give back what collected slots held."""
        while self._deferred:
            stored, nbytes = self._deferred.popleft()
            self.freed(nbytes)
            if stored is not None:
                stored.free()


class _Held:
    """Bytes of a slot in memory, as long as they are there.

    Attributes:
        storage: The storage that has them; None: they are away, though other code may still hold them.
        offset_nbytes: Where they begin in it.
        was_loaded: They are no longer where they were packed.
    """

    __slots__ = ("alive", "offset_nbytes", "storage", "was_loaded")

    def __init__(self, storage: torch.UntypedStorage, offset_nbytes: int = 0, *, was_loaded: bool) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.alive = weakref.ref(storage)
        self.offset_nbytes, self.was_loaded = offset_nbytes, was_loaded


class Slot:
    """A storage that autograd saves; lives as long as a graph refers to it.

    While it is RESIDENT or STORING it holds its storage. A stored slot is held again from its load until its
    readers have read it, and can be loaded again as long as the graph lives.

    Args:
        key: Its name in a plan.
        storage: The bytes.
        version: How often they had been written.
        stats: Counts them.

    Attributes:
        store_number: Of its store, as the queue counts; 0: it has none.
        readers: Saved tensors in it that backward has not read.
    """

    def __init__(
        self, key: SlotKey, storage: torch.UntypedStorage, version: int, stats: ActivationStats
    ) -> None:
        self.key, self.version, self.nbytes = key, version, storage.nbytes()
        self.lifecycle: Lifecycle[SlotState] = Lifecycle(f"activation {key.region}.{key.ordinal}", S.RESIDENT)
        self.store_number = self.readers = 0
        self._stats = stats
        self._lock = threading.RLock()  # guards what follows
        self._held = _Held(storage, was_loaded=False)
        self._stored: StoredActivation | None = None
        self._loading: Loading | None = None
        self._is_wanted = False
        stats.allocated(self.nbytes)

    def __del__(self) -> None:
        # Possibly called by the garbage collector, inside any lock: give back later.
        if hasattr(self, "_loading"):
            held = self._held.storage is not None or self._loading is not None
            self._stats.deferred(self._stored, self.nbytes if held else 0)

    def is_of(self, storage: torch.UntypedStorage, version: int) -> bool:
        """Return whether these are the bytes of ``storage`` at ``version``."""
        held = self._held
        return self.version == version and held.alive() is storage and not held.offset_nbytes

    @property
    def was_loaded(self) -> bool:
        """Whether its bytes are no longer where they were packed."""
        return self._held.was_loaded

    @property
    def state(self) -> SlotState:
        return self.lifecycle.state

    # --- to the store ------------------------------------------------------------------------

    def reserve(self, store: ActivationStore) -> None:
        """Reserve room in ``store``; the bytes stay in memory until :meth:`end_store`.

        Raises:
            DiskError: The file system is full.
        """
        with self._lock:
            assert self._held.storage is not None
            self._stored = store.reserve(self._held.storage, self.lifecycle.name)
            self.lifecycle.move(S.STORING)

    def start_store(self) -> Transfer:
        """Start storing the bytes in the reserved room."""
        assert self._stored is not None
        assert self._held.storage is not None
        return self._stored.store(self._held.storage)

    def cancel_store(self) -> None:
        """Give up the reserved room; the bytes stay in memory."""
        with self._lock:
            stored, self._stored = self._stored, None
            self.lifecycle.move(S.RESIDENT)
        if stored is not None:
            stored.free()

    def end_store(self, *, well: bool) -> None:
        """The store has ended: release the storage, unless the store failed or backward asked for it."""
        if not well:
            self.cancel_store()
            return
        with self._lock:
            if self._is_wanted:
                self.lifecycle.move(S.RESIDENT)
            else:
                self._release()

    def _release(self) -> None:
        self.lifecycle.move(S.STORED)
        self._held.storage = None
        self._stats.freed(self.nbytes)

    # --- and back ----------------------------------------------------------------------------

    def fetch(self) -> bool:
        """Start to bring the bytes back if they are away; return whether a load began."""
        with self._lock:
            self._is_wanted = True  # a store that ends now need not be loaded
            if self.state is not S.STORED:
                return False
            self._stats.allocated(self.nbytes)
            self._held.storage = self._held.alive()
            if self._held.storage is not None:  # other code held it
                self.lifecycle.move(S.RESIDENT)
                return False
            assert self._stored is not None
            self._loading = self._stored.load()
            self.lifecycle.move(S.LOADING)
            return True

    def arriving(self) -> Transfer | None:
        """The load that a reader has to wait for."""
        with self._lock:
            return None if self._loading is None else self._loading.transfer

    def read(self) -> tuple[torch.UntypedStorage, int]:
        """Return the storage, and the offset in it (bytes) at which the slot's bytes begin.

        Blocks until the load that was :meth:`arriving` has ended.

        Raises:
            DiskError: The load failed; the bytes are still where they were stored.
        """
        with self._lock:
            loading, self._loading = self._loading, None
            try:
                if loading is not None:
                    self._take_in(loading)
            finally:
                del loading  # an error whose frame holds its transfer keeps the step's graph alive
            assert self._held.storage is not None
            return self._held.storage, self._held.offset_nbytes

    def _take_in(self, loading: Loading) -> None:
        try:
            loading.transfer.wait()
        except BaseException as error:
            self.lifecycle.move(S.STORED)
            self._stats.freed(self.nbytes)
            del loading
            raise error.with_traceback(None) from None
        self._held = _Held(loading.storage, loading.offset_nbytes, was_loaded=True)
        self.lifecycle.move(S.RESIDENT)

    def drop(self) -> None:
        """Release bytes that can be loaded again; all readers have read them."""
        with self._lock:
            if self.state is S.RESIDENT and self._stored is not None:
                self._release()


class StoreQueue:
    """Stores slots in the order of packing, a bounded number of bytes at one time.

    A slot that waits can be cancelled; one that is in flight cannot.

    Args:
        stats: Counts bytes.
        in_flight_nbytes: Bytes given to stores at one time; at least one slot is.
    """

    def __init__(self, stats: ActivationStats, in_flight_nbytes: int = 64 * 2**20) -> None:
        self._stats, self._most_nbytes = stats, in_flight_nbytes
        self._lock = threading.RLock()  # guards what follows
        self._changed = threading.Condition(self._lock)
        self._number = 0  # of the slot that was put last
        # Number and bytes of each; a slot goes with its graph.
        self._waiting: OrderedDict[weakref.ref[Slot], tuple[int, int]] = OrderedDict()
        self._in_flight: dict[int, int] = {}  # bytes of each store by its number
        self._starting = False
        self._error: Exception | None = None

    def put(self, slot: Slot, store: ActivationStore) -> int:
        """Store ``slot`` in its turn; return its number, which grows.

        Raises:
            DiskError: There is no room for it, or an earlier store failed.
        """
        self.check()
        slot.reserve(store)
        with self._lock:
            self._number = number = self._number + 1
            self._waiting[weakref.ref(slot)] = number, slot.nbytes
        self._start()
        return number

    def cancel(self, slot: Slot) -> None:
        """Keep ``slot`` in memory if it still waits."""
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
        """Bytes that wait or are in flight."""
        with self._lock:
            return self.in_flight_nbytes + sum(
                nbytes for slot, (_, nbytes) in self._waiting.items() if slot() is not None
            )

    def has_ended(self, number: int) -> bool:
        """Return whether nothing that was put up to ``number`` waits or is in flight."""
        with self._lock:
            waiting = (before for slot, (before, _) in self._waiting.items() if slot() is not None)
            return all(before > number for before in (*self._in_flight, *waiting))

    def wait_below(self, nbytes: int) -> None:
        """Return when at most ``nbytes`` wait or are in flight; raise DiskError if a store failed."""
        self._wait_until(lambda: self.nbytes <= nbytes)

    def wait_until(self, number: int) -> None:
        """Return when :meth:`has_ended` is true of ``number``; raise DiskError if a store failed."""
        self._wait_until(lambda: self.has_ended(number))

    def wait_for(self, number: int) -> None:
        """Return when what was put as ``number`` is not in flight; raise DiskError if a store failed."""
        self._wait_until(lambda: number not in self._in_flight)

    def _wait_until(self, is_over: Callable[[], bool]) -> None:
        with self._lock:
            self._changed.wait_for(lambda: is_over() or not (self._in_flight or self._starting))
        self.check()

    def check(self) -> None:
        """Raise the error of a failed store, once, after all others have ended or were dropped.

        Raises:
            DiskError: A store failed; its bytes are still in memory.
        """
        if self._error is not None:
            self.drain()
            error, self._error = self._error, None
            try:
                raise error.with_traceback(None)
            finally:
                del error  # an error whose frame holds it keeps the step's graph alive

    def drain(self) -> None:
        """Return when nothing is in flight; slots that wait are not stored."""
        with self._lock:
            self._waiting.clear()
            self._changed.wait_for(lambda: not (self._in_flight or self._starting))

    def _start(self) -> None:
        """Start stores while bytes may be in flight.

        One thread at a time: a store that ends at once does not start the next one.
        """
        with self._lock:
            if self._starting:
                return
            self._starting = True
        while self._start_one():
            pass

    def _start_one(self) -> bool:
        with self._lock:
            number, slot = self._next()  # held by this frame only: a drained queue holds no slot
            if slot is None:
                self._starting = False
                self._changed.notify_all()
                return False
            self._in_flight[number] = slot.nbytes
            self._stats.nbytes_stored += slot.nbytes
        try:
            transfer = slot.start_store()
        except BaseException:  # nobody may wait for a store that was not begun
            with self._lock:
                self._starting = False
                self._end(number)
            raise
        transfer.then(partial(self._ended, number, weakref.ref(slot), transfer))
        return True

    def _next(self) -> tuple[int, Slot | None]:
        """Take the next slot that may go and whose graph still lives."""
        while self._waiting:
            ref, (number, nbytes) = next(iter(self._waiting.items()))
            if self._in_flight and self.in_flight_nbytes + nbytes > self._most_nbytes:
                break
            del self._waiting[ref]
            if (slot := ref()) is not None:
                return number, slot
        return 0, None

    def _ended(self, number: int, ref: "weakref.ref[Slot]", transfer: Transfer) -> None:
        """End a store, on the thread that saw the end; the graph, and the slot with it, may be gone."""
        error = None
        try:
            transfer.wait()
        except Exception as raised:  # also a budget's: the thread that waits for the end must hear of it
            error = raised.with_traceback(None)
        if (slot := ref()) is not None:
            slot.end_store(well=error is None)
        del slot  # a drained queue holds no slot
        with self._lock:
            self._error = self._error or error
            self._end(number)
        self._start()

    def _end(self, number: int) -> None:
        del self._in_flight[number]
        self._changed.notify_all()
