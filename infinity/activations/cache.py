"""The tensor cache: what autograd saves, packed as a reference to a slot.

[Note: one pass, one record]
Every forward pass has a record of its own: its slots by key, in the order of packing. Several may be in
flight (interleaved micro-batches); backward of each asks its own record what to load. A slot belongs to
graphs: it lives as long as one of them refers to it, so a step that is left half-way leaves nothing behind.

[Note: readers]
Several operators save one storage. It is loaded once, held until each of them has read it, and then let
go. A graph that is kept (``retain_graph``) reads again: then it is loaded again.
"""

import time
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from infinity.activations.identity import View, Watch, check_version, is_plain
from infinity.activations.ledger import Ledger
from infinity.activations.queue import StoreQueue
from infinity.activations.script import Script
from infinity.activations.shelf import Shelf
from infinity.activations.slot import Slot
from infinity.core.lifecycle import SlotState
from infinity.core.plan import Place
from infinity.core.profile import SlotKey

#: Smaller storages are kept: they cost a request each, and free next to nothing (bytes).
LEAST_NBYTES = 256 * 2**10
#: A tensor that is a smaller part of its storage than one in so many is a row of the user's data.
_LEAST_PART = 64


F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """``function``, which torch.compile leaves as it is."""
    return cast(F, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


class Observer(Protocol):
    """Learns what the cache does; :class:`infinity.activations.profiler.Profiler` is one."""

    def enter_region(self, region: int, name: str) -> None: ...
    def leave_region(self, region: int, inputs: list[Tensor]) -> None: ...
    def packed(self, key: SlotKey, tensor: Tensor) -> None: ...
    def unpacked(self, key: SlotKey) -> None: ...
    def loaded(self, key: SlotKey, tensor: Tensor) -> None: ...
    def backward_begins(self) -> None: ...
    def update_begins(self) -> None: ...
    def paused(self) -> AbstractContextManager[None]: ...


class Record:
    """One forward pass: where it is, and what it has packed.

    Args:
        script: What happens to its slots.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.region = self._calls = self._ordinal = 0
        self.slots: weakref.WeakValueDictionary[SlotKey, Slot] = weakref.WeakValueDictionary()
        self.packed: list[SlotKey] = []
        self.positions: dict[SlotKey, int] = {}  # in ``packed``
        self.region_nbytes: Counter[int] = Counter()
        self.asked: set[SlotKey] = set()  # by the backward pass
        self.fetched: set[SlotKey] = set()  # for it
        self._empty: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self.backward = -1  # that runs now, by the number that autograd gave it

    def enter_block(self) -> int:
        """A call of a block begins: its region."""
        self._calls += 1
        self._move(2 * self._calls - 1)
        return self.region

    def leave_block(self) -> None:
        """It has ended."""
        self._move(2 * self._calls)

    def _move(self, region: int) -> None:
        self.region, self._ordinal = region, 0

    def was_empty(self, past: Any) -> bool:
        """Whether a cache of keys and values held nothing when the pass came to it first."""
        if past not in self._empty:
            try:
                self._empty[past] = not int(past.get_seq_length())
            except ValueError:  # one that keeps states in place of keys: it does not tell
                self._empty[past] = False
        return self._empty[past]

    def next_key(self) -> SlotKey:
        self._ordinal += 1
        return SlotKey(self.region, self._ordinal - 1)

    def add(self, slot: Slot) -> None:
        self.slots[slot.key] = slot
        self.positions[slot.key] = len(self.packed)
        self.packed.append(slot.key)
        self.region_nbytes[slot.key.region] += slot.nbytes

    def before(self, key: SlotKey, nbytes: int) -> list[SlotKey]:
        """What was packed before ``key``, latest first, until ``nbytes`` of it wait for their readers."""
        found = []
        for position in range(self.positions[key] - 1, -1, -1):
            slot = self.slots.get(self.packed[position])
            if slot is not None:
                nbytes -= slot.nbytes
                found.append(slot.key)
            if nbytes <= 0:
                break
        return found


class Kept:
    """Stands for a tensor that stays where it is."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version

    def tensor(self) -> Tensor:
        """The tensor, unless it was written in place since."""
        check_version(self._tensor, self._version)
        return self._tensor


class Saved:
    """Stands for a tensor whose storage is in a slot."""

    __slots__ = ("read", "record", "slot", "view", "watch")

    def __init__(self, slot: Slot, record: Record, tensor: Tensor) -> None:
        self.slot, self.record, self.read = slot, record, False
        self.view, self.watch = View(tensor), Watch(tensor)
        slot.readers += 1


class TensorCache:
    """Packs and unpacks the saved tensors of one model. The training thread calls.

    Args:
        device: Where activations are; tensors elsewhere pass through.
        shelves: Where slots may go.
        wait: Runs a function that waits, and counts its seconds as a stall.

    Attributes:
        backlog_nbytes: What may wait to be stored before packing waits; None: any.
        exempt: Storages that pass through: parameters and buffers, which live anyway.
        observer: Learns what happens; None: nobody.
        record: Of the forward pass that runs; None: none does, and everything is kept.
    """

    def __init__(
        self, device: torch.device, shelves: Mapping[Place, Shelf], wait: Callable[[Callable[[], None]], None]
    ) -> None:
        self.device, self.shelves, self._wait = device, shelves, wait
        self.ledger = Ledger()
        self.queue = StoreQueue(self.ledger)
        self.backlog_nbytes: int | None = None
        self.exempt: Container[torch.UntypedStorage] = ()
        self.observer: Observer | None = None
        self.record: Record | None = None
        self._noted = -1  # the backward pass that the observer knows of
        self._slots: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()

    # --- forward -----------------------------------------------------------------------------

    @untraced
    def pack(self, tensor: Tensor) -> Kept | Saved:
        """What autograd keeps in place of ``tensor``.

        Raises:
            DiskError: There is no room to store it, or an earlier store failed.
        """
        record = self.record
        if record is None or not self._takes(tensor):
            return Kept(tensor)
        with self._unobserved():
            self.ledger.tidy()
            storage = tensor.untyped_storage()
            slot = self._slots.get(storage._cdata)
            if slot is None or not slot.is_of(storage, tensor._version):
                slot = self._slots[storage._cdata] = self._begin(record, tensor)
            return Saved(slot, record, tensor)

    def _takes(self, tensor: Tensor) -> bool:
        if not is_plain(tensor) or tensor.device != self.device:
            return False
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes < LEAST_NBYTES or storage in self.exempt:
            return False
        # Memory that is not torch's own (numpy's, a file's, that of a worker) cannot be freed by us.
        return storage.resizable() and tensor.nbytes * _LEAST_PART >= nbytes

    def _begin(self, record: Record, tensor: Tensor) -> Slot:
        slot = Slot(record.next_key(), tensor.untyped_storage(), tensor._version, self.ledger)
        record.add(slot)
        if self.observer is not None:
            self.observer.packed(slot.key, tensor)
        place = record.script.place(slot.key)
        if place is not Place.KEEP:
            self.queue.put(slot, self.shelves[place])
            if self.backlog_nbytes is not None and self.queue.nbytes > self.backlog_nbytes:
                self._count_wait(lambda: self.queue.wait_below(self.backlog_nbytes or 0))
        return slot

    # --- backward ----------------------------------------------------------------------------

    @untraced
    def unpack(self, packed: Kept | Saved) -> Tensor:
        """The tensor that was packed, bitwise.

        Raises:
            DiskError: Its bytes could not be read back, or a store failed.
            RuntimeError: It was written in place since.
        """
        self.queue.check()
        self._note_backward()
        if isinstance(packed, Kept):
            return packed.tensor()
        packed.watch.check()
        with self._unobserved():
            self.ledger.tidy()
            tensor, loaded = self._read(packed)
        if self.observer is not None:
            self.observer.unpacked(packed.slot.key)
            if loaded:
                self.observer.loaded(packed.slot.key, tensor)
        return tensor

    def _note_backward(self) -> None:
        backward = torch._C._current_graph_task_id()
        if self.observer is not None and backward not in (-1, self._noted):
            self._noted = backward
            self.observer.backward_begins()
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.observer.update_begins)

    def _read(self, packed: Saved) -> tuple[Tensor, bool]:
        slot = packed.slot
        self._foresee(packed.record, slot.key)
        self.queue.call_off(slot)
        self.ledger.forwarded += slot.state is SlotState.STORING
        if self._fetch(slot):
            self.ledger.on_demand += 1
        self._await(slot)
        storage, offset_nbytes = slot.read()
        if not packed.read:
            packed.read = True
            slot.readers -= 1
        if not slot.readers:
            slot.let_go()
        return packed.view.of(storage, offset_nbytes), slot.was_loaded

    def _await(self, slot: Slot) -> None:
        arriving = slot.arriving()
        if arriving is not None and not arriving.done():
            with suppress(Exception):  # which read() raises, too
                self._count_wait(arriving.wait)

    def _count_wait(self, wait: Callable[[], None]) -> None:
        began_s = time.perf_counter()
        try:
            self._wait(wait)
        finally:
            self.ledger.waited_s += time.perf_counter() - began_s

    def _foresee(self, record: Record, key: SlotKey) -> None:
        """Start what should be on its way when backward asks for ``key``."""
        backward = torch._C._current_graph_task_id()
        if record.backward != backward:
            record.backward = backward
            record.asked.clear()
            record.fetched.clear()
            self._load(record, record.script.loads(None) or ())
        if key not in record.asked:
            record.asked.add(key)
            keys = record.script.loads(key)
            if keys is None:
                keys = record.before(key, max(record.region_nbytes.values()))
            self._load(record, keys)

    def _load(self, record: Record, keys: Iterable[SlotKey]) -> None:
        for key in keys:
            slot = None if key in record.fetched else record.slots.get(key)
            if slot is not None:
                record.fetched.add(key)
                self.queue.call_off(slot)
                self._fetch(slot)

    def _fetch(self, slot: Slot) -> bool:
        began = slot.fetch()
        self.ledger.nbytes_loaded += slot.nbytes * began
        return began

    def _unobserved(self) -> AbstractContextManager[None]:
        return nullcontext() if self.observer is None else self.observer.paused()

    # --- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Finish what is in flight. Graphs that still live can read what is in memory only."""
        self.queue.drain()
        self.ledger.tidy()
        for shelf in self.shelves.values():
            shelf.close()
