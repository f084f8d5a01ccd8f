"""One saved storage: where its bytes are, and what moves them."""

import threading
import weakref
from collections.abc import Callable
from functools import partial

import torch

from infinity.activations.ledger import Ledger
from infinity.activations.shelf import Loading, Shelf, Stored
from infinity.core.lifecycle import Lifecycle, SlotState
from infinity.core.profile import SlotKey
from infinity.core.transfer import Transfer

S = SlotState


class Slot:
    """A storage that autograd saves; lives as long as some graph refers to it.

    While it is RESIDENT or STORING it holds its storage. What was stored is held again from its load until
    its readers have read it, and can be loaded once more as long as the graph lives.

    Args:
        key: Its name in a plan.
        storage: The bytes.
        version: How often they had been written.
        ledger: Counts bytes.
    """

    def __init__(self, key: SlotKey, storage: torch.UntypedStorage, version: int, ledger: Ledger) -> None:
        self.key, self.version, self.nbytes = key, version, storage.nbytes()
        self.lifecycle: Lifecycle[SlotState] = Lifecycle(f"activation {key.region}.{key.ordinal}", S.RESIDENT)
        self.readers = 0  # saved tensors that backward has not read
        self._ledger = ledger
        self._lock = threading.RLock()  # guards what follows
        self._storage: torch.UntypedStorage | None = storage
        self._offset_nbytes = 0
        self._alive = weakref.ref(storage)
        self._stored: Stored | None = None
        self._loading: Loading | None = None
        self._came_back = self._wanted = False
        ledger.came(self.nbytes)

    def __del__(self) -> None:
        # Maybe from the garbage collector, inside any lock: give back later.
        if hasattr(self, "_loading"):
            held = self._storage is not None or self._loading is not None
            self._ledger.left_behind(self._stored, self.nbytes if held else 0)

    def is_of(self, storage: torch.UntypedStorage, version: int) -> bool:
        """Whether these are the bytes of ``storage`` at ``version``."""
        return self._alive() is storage and self.version == version and not self._offset_nbytes

    @property
    def state(self) -> SlotState:
        return self.lifecycle.state

    @property
    def was_loaded(self) -> bool:
        """Whether the bytes are not where they were packed any more."""
        return self._came_back

    # --- away --------------------------------------------------------------------------------

    def shelve(self, shelf: Shelf) -> None:
        """Take room for the bytes; they stay until :meth:`store` has stored them.

        Raises:
            DiskError: The file system is full.
        """
        with self._lock:
            assert self._storage is not None
            self._stored = shelf.take(self._storage, self.lifecycle.name)
            self.lifecycle.move(S.STORING)

    def store(self, ended: Callable[[Exception | None], None]) -> None:
        """Start storing what was shelved."""
        assert self._stored is not None
        assert self._storage is not None
        transfer = self._stored.store(self._storage)
        transfer.then(partial(_landed, weakref.ref(self), transfer, ended))

    def cancel(self) -> None:
        """Do not store what waits to be stored."""
        with self._lock:
            stored, self._stored = self._stored, None
            self.lifecycle.move(S.RESIDENT)
        if stored is not None:
            stored.free()

    def landed(self, well: bool) -> None:
        """The store has ended; if it ended well, the storage is no longer held."""
        if not well:
            self.cancel()
            return
        with self._lock:
            if self._wanted:
                self.lifecycle.move(S.RESIDENT)
            else:
                self.lifecycle.move(S.STORED)
                self._drop()

    def _drop(self) -> None:
        self._storage = None
        self._ledger.went(self.nbytes)

    # --- back --------------------------------------------------------------------------------

    def fetch(self) -> bool:
        """Start to bring the bytes back if they are away; whether a load began."""
        with self._lock:
            self._wanted = True  # a store that ends now need not be loaded
            if self.state is not S.STORED:
                return False
            self._ledger.came(self.nbytes)
            alive = self._alive()
            if alive is not None:  # somebody held it
                self._storage = alive
                self.lifecycle.move(S.RESIDENT)
                return False
            assert self._stored is not None
            self._loading = self._stored.load()
            self.lifecycle.move(S.LOADING)
            return True

    def arriving(self) -> Transfer | None:
        """What a reader has to wait for."""
        with self._lock:
            return None if self._loading is None else self._loading.transfer

    def read(self) -> tuple[torch.UntypedStorage, int]:
        """The storage, and where in it the bytes begin; after what was :meth:`arriving`.

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
            assert self._storage is not None
            return self._storage, self._offset_nbytes

    def _take_in(self, loading: Loading) -> None:
        try:
            loading.transfer.wait()
        except BaseException as error:
            self.lifecycle.move(S.STORED)
            self._ledger.went(self.nbytes)
            del loading
            raise error.with_traceback(None) from None
        self._storage, self._offset_nbytes = loading.storage, loading.offset_nbytes
        self._alive, self._came_back = weakref.ref(loading.storage), True
        self.lifecycle.move(S.RESIDENT)

    def let_go(self) -> None:
        """Its readers have read it: what can be loaded again need not be held."""
        with self._lock:
            if self.state is S.RESIDENT and self._stored is not None:
                self.lifecycle.move(S.STORED)
                self._drop()


def _landed(slot: "weakref.ref[Slot]", transfer: Transfer, ended: Callable[[Exception | None], None]) -> None:
    """On the thread that saw the end; the graph, and the slot with it, may be gone."""
    error = None
    try:
        transfer.wait()
    except Exception as failed:  # also a budget's: who waits for the end must hear of it
        error = failed
    try:
        _tell(slot, error is None)
    finally:
        ended(error)


def _tell(slot: "weakref.ref[Slot]", well: bool) -> None:
    there = slot()  # held here only: a drained queue holds no slot
    if there is not None:
        there.landed(well)
