"""Pack what autograd saves as references to slots, and unpack it bitwise: the tensor cache.

[Note: identity]
An address is used again as soon as its memory is free. So a storage is identified by its object, held weakly,
which torch keeps as long as the memory lives. Views and transposes share it.

[Note: versions]
Autograd refuses to read a saved tensor that was modified in place since, but not where hooks are. So hooks
compare versions themselves: a tensor without bytes that shares the count of writes stays behind.

[Note: one record per forward pass]
Several forward passes may be in flight (interleaved micro-batches); backward of each asks its own record what
to load. A slot lives as long as a graph refers to it, so a step left half-way leaves nothing behind.

[Note: rounded]
A storage whose codec loses precision is read as it comes back from its store, never as it was, however soon
backward asks for it and whatever else holds it: or numbers would depend on time. Where its store failed, or
never began since another one did, no backward pass can read it.

[Note: readers]
Several operators may save one storage. It is loaded once, held until each has read it, and then dropped. A
graph that is kept (``retain_graph``) loads it again.
"""

import math
import threading
import time
import weakref
from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from infinity.activations.codecs import Coding
from infinity.activations.profiler import Profiler, is_plain
from infinity.activations.recompute import KeptOperators, untraced
from infinity.activations.store import PLAIN, ActivationStore, Form, Loading, StoredActivation
from infinity.core.errors import StateError
from infinity.core.lifecycle import Lifecycle, SlotState
from infinity.core.nbytes import Transfer
from infinity.core.plan import ActivationPlan, Place, SlotKey

#: Smaller storages are kept: they cost a request each, and free next to nothing (bytes).
LEAST_NBYTES = 256 * 2**10
#: A tensor that is a smaller part of its storage than one in so many is a row of the user's data.
_LEAST_PART = 64

S = SlotState


class ActivationStats:
    """Counts the bytes of slots in memory, stored and loaded. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.resident_nbytes = self.peak_nbytes = self.nbytes_stored = self.nbytes_loaded = 0
        self.forwarded = 0  # reads of slots in memory whose store had not ended
        self.on_demand = 0  # loads that no plan had started
        self.waited_s = 0.0  # by the training thread, for stores and loads
        self.moves, self.handled_s = 0, 0.0  # that it started; to start and read them, on the CPU
        #: Of collected slots, what :meth:`free_dropped` gives back: stored bytes, bytes in memory.
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
    ``version`` is autograd's count of writes to the storage when it was saved.
    """

    def __init__(
        self, key: SlotKey, storage: torch.UntypedStorage, version: int, stats: ActivationStats
    ) -> None:
        self.key, self.version, self.nbytes = key, version, storage.nbytes()
        self.lifecycle: Lifecycle[SlotState] = Lifecycle(f"activation {key.region}.{key.ordinal}", S.RESIDENT)
        self.readers = 0  # saved tensors in it that backward has not read
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
            self._stats.dropped.append((self._stored, self._kept_nbytes + self.nbytes * held))

    def is_of(self, storage: torch.UntypedStorage, tensor: Tensor) -> bool:
        """Return whether the slot has what is in a tensor's storage now; a rounded one, of no other kind."""
        last, offset_nbytes = self._last
        same = self.version == tensor._version and last() is storage and not offset_nbytes
        return same and self.rounds in (None, tensor.dtype)

    @property
    def state(self) -> SlotState:
        return self.lifecycle.state

    def reserve(self, store: ActivationStore, form: Form = PLAIN) -> None:
        """Reserve room in ``store``, where :meth:`start_store` stores; DiskError: the file system is full."""
        with self._lock:
            assert self._storage is not None
            self._stored = store.reserve(self._storage, self.lifecycle.name, form)
            self.lifecycle.move(S.STORING)

    def start_store(self) -> tuple[StoredActivation, Transfer]:
        assert self._stored is not None
        assert self._storage is not None
        return self._stored, self._stored.store(self._storage)

    def cancel_store(self) -> None:
        """Keep the storage in memory; one that would be rounded stays as unreadable as before its store."""
        with self._lock:
            if self.rounds:
                return
            stored, self._stored = self._stored, None
            self.lifecycle.move(S.RESIDENT)
        if stored is not None:
            stored.free()

    @property
    def rounds(self) -> torch.dtype | None:
        """Return of what dtype values are read only as they are loaded; see [Note: rounded]."""
        return None if self._stored is None else self._stored.rounds

    @property
    def _kept_nbytes(self) -> int:
        """Return what its code takes in memory."""
        away = self._stored is not None and self.state is not S.STORING
        return self._stored.kept_nbytes if away and self._stored is not None else 0

    def end_store(self) -> None:
        """End a store that succeeded: release the storage, unless backward asked for it."""
        with self._lock:
            assert self._stored is not None
            self._stats.add(self._stored.kept_nbytes)
            if self._is_wanted and not self.rounds:
                self.lifecycle.move(S.RESIDENT)
            else:
                self._release()

    def fetch(self) -> bool:
        """Start to load the bytes if they are away; return whether a load began."""
        with self._lock:
            self._is_wanted = True
            if self.state is not S.STORED:
                return False
            self._stats.add(self.nbytes)
            self._storage = None if self.rounds else self._last[0]()
            if self._storage is not None:  # other code held it
                self.lifecycle.move(S.RESIDENT)
                return False
            assert self._stored is not None
            self._loading = self._stored.load()
            self._stats.nbytes_loaded += self._stored.moved_nbytes
            self._stats.moves += 1
            self.lifecycle.move(S.LOADING)
            return True

    def read(self, wait: Callable[[Callable[[], None]], None]) -> tuple[torch.UntypedStorage, int]:
        """Return the storage, and where the slot begins in it (bytes); errors of its load, once, or store."""
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
                assert self._stored is not None
                self._stored.rounds = None  # what is there now has been loaded
                self.lifecycle.move(S.RESIDENT)
            if self.rounds:
                raise StateError(
                    f"{self.lifecycle.name} was not stored, after an error of a store, and with this "
                    "memory.codec only what was stored is read: run the forward pass again"
                )
            assert self._storage is not None
            return self._storage, self._last[1]

    def drop(self) -> None:
        """Release the storage, which all readers have read, once its bytes can be loaded again."""
        with self._lock:
            self._is_wanted = False
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

    def put(self, slot: Slot, store: ActivationStore, form: Form = PLAIN) -> int:
        """Store ``slot`` when its turn comes; return its number, which grows. DiskError: no room."""
        self.check()
        slot.reserve(store, form)
        self._stats.moves += 1
        with self._lock:
            self._number = number = self._number + 1
            self._waiting[weakref.ref(slot)] = number, slot.nbytes
        self._start()
        return number

    def cancel(self, slot: Slot) -> None:
        """Keep ``slot`` in memory if it still waits and may be; a store in flight goes on."""
        with self._lock:
            waited = not slot.rounds and self._waiting.pop(weakref.ref(slot), None) is not None
        if waited:
            slot.cancel_store()

    @property
    def in_flight_nbytes(self) -> int:
        with self._lock:
            return sum(self._in_flight.values())

    @property
    def nbytes(self) -> int:
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
        """Wait until ends of stores make ``is_over()`` true, or nothing is left; then :meth:`check`."""
        with self._lock:  # between the end of one store and the start of the next nothing is in flight
            self._changed.wait_for(
                lambda: is_over() or not (self._waiting or self._in_flight or self._starting)
            )
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
            stored = None
            try:
                stored, transfer = slot.start_store()
            except BaseException as error:  # surfaces at the next wait, as one of the disk
                transfer = Transfer()
                transfer.finish(error.with_traceback(None))
            transfer.then(partial(self._ended, number, weakref.ref(slot), transfer, stored))
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
                    return number, slot
            self._starting = False
            self._changed.notify_all()
            return None

    def _ended(
        self, number: int, ref: "weakref.ref[Slot]", transfer: Transfer, stored: StoredActivation | None
    ) -> None:
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
            if stored is not None and error is None:
                self._stats.nbytes_stored += stored.moved_nbytes
            self._error = self._error or error
            del self._in_flight[number]
            self._changed.notify_all()
        self._start()


@dataclass(frozen=True, slots=True)
class ActivationPolicy:
    """Says what slots and blocks do while the model runs."""

    place: Callable[[SlotKey], Place]
    recomputes: Callable[[int], bool]
    #: To be loaded when backward first asks for a key, or begins (None). No mapping: those packed before it.
    loads: Mapping[SlotKey | None, Sequence[SlotKey]] | None = None
    #: The slot up to which all must have been stored when one is packed (False) or asked for (True).
    waits: Mapping[tuple[SlotKey, bool], SlotKey] = field(default_factory=dict)
    keeps_budget: bool = False  # bytes of stores that have not ended count in one
    codecs: Mapping[SlotKey, str] = field(default_factory=dict)
    #: Of blocks that are recomputed, by region.
    kept: Mapping[int, KeptOperators] = field(default_factory=dict)


def planned(plan: ActivationPlan) -> ActivationPolicy:
    loads: defaultdict[SlotKey | None, list[SlotKey]] = defaultdict(list)
    for load in plan.loads:
        loads[load.after].append(load.slot)
    waits = {(wait.at, wait.backward): wait.slot for wait in plan.waits}
    budget = plan.capacity_nbytes is not None
    kept = KeptOperators.of(plan.kept)
    return ActivationPolicy(plan.place, plan.recomputed.__contains__, loads, waits, budget, plan.codecs, kept)


def uniform(
    place: Place, *, recompute: bool = False, last: int = -1, codecs: Mapping[SlotKey, str] | None = None
) -> ActivationPolicy:
    """Return the policy that treats all alike, but keeps those from region ``last`` on: backward's first."""
    end = math.inf if last < 0 else last  # a model without blocks has no exception
    return ActivationPolicy(
        lambda key: place if key.region < end else Place.KEEP,
        lambda region: recompute and region < end,
        codecs={key: codec for key, codec in (codecs or {}).items() if key.region < end},
    )


class PassRecord:
    """Knows the position of a forward pass, and its slots in the order of packing."""

    def __init__(self, policy: ActivationPolicy) -> None:
        self.policy = policy
        self.region = self._ordinal = 0  # 2n - 1 in the n-th call of a block, 2n after it
        self.slots: weakref.WeakValueDictionary[SlotKey, Slot] = weakref.WeakValueDictionary()
        self.packed: list[SlotKey] = []  # which grow
        self.region_nbytes: Counter[int] = Counter()
        self.stores: dict[SlotKey, int] = {}  # the number that the queue gave to each slot's store
        self.asked: set[SlotKey] = set()  # for by backward
        self.fetched: set[SlotKey] = set()  # ahead
        self.backward = -1  # autograd's number of the one that runs
        self._empty: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def enter(self) -> int:
        self.region, self._ordinal = self.region + 1 + self.region % 2, 0
        return self.region

    def leave(self) -> None:
        self.region, self._ordinal = self.region + self.region % 2, 0

    def next_key(self) -> SlotKey:
        self._ordinal += 1
        return SlotKey(self.region, self._ordinal - 1)

    def was_empty(self, kv_cache: Any) -> bool:
        """Return whether a cache of keys and values was empty when the pass first came to it."""
        if kv_cache not in self._empty:
            self._empty[kv_cache] = False
            with suppress(ValueError):  # one that keeps states in place of keys does not tell
                self._empty[kv_cache] = not int(kv_cache.get_seq_length())
        return self._empty[kv_cache]

    def add(self, slot: Slot) -> None:
        self.slots[slot.key] = slot
        self.packed.append(slot.key)
        self.region_nbytes[slot.key.region] += slot.nbytes

    def packed_before(self, key: SlotKey) -> list[SlotKey]:
        """Return slots packed before ``key``, latest first, as many bytes as the largest region has."""
        position, found = bisect_left(self.packed, key), []
        is_own = position < len(self.packed) and self.packed[position] == key
        left = max(self.region_nbytes.values()) if is_own else 0
        while position > 0 and left > 0:
            position -= 1
            if (slot := self.slots.get(self.packed[position])) is not None:
                left -= slot.nbytes
                found.append(slot.key)
        return found


class KeptTensor:
    """Stands in autograd's graph for a tensor that stays where it is."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version

    def check(self) -> Tensor:
        """Return the tensor, or what a slot keeps of it; RuntimeError: it was modified since it was saved."""
        counter, wanted = self._tensor, self._version
        if counter._version != wanted:
            raise RuntimeError(
                "a tensor that the backward pass needs was modified by an inplace operation after it was "
                f"saved: {str(counter.dtype).removeprefix('torch.')}{self._shape()} is at version "
                f"{counter._version}; wanted version {wanted}. torch.autograd.set_detect_anomaly(True) shows "
                "the operator that saved it"
            )
        return counter

    def _shape(self) -> str:
        return "" if self._tensor.is_nested else f" {list(self._tensor.shape)}"


class SlotHandle(KeptTensor):
    """Stands in autograd's graph for a tensor whose storage is in a slot; holds none of its memory."""

    __slots__ = ("_offset", "_size", "_stride", "is_read", "record", "slot")

    def __init__(self, slot: Slot, record: PassRecord | None, tensor: Tensor) -> None:
        super().__init__(tensor)
        self._tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # [Note: versions]
        self.slot, self.record, self.is_read = slot, record, False
        self._offset, self._size, self._stride = int(tensor.storage_offset()), tensor.size(), tensor.stride()
        slot.readers += 1

    def _shape(self) -> str:
        return f" {list(self._size)}"

    def view(self, storage: torch.UntypedStorage, offset_nbytes: int) -> Tensor:
        """Return the tensor, whose slot's bytes begin ``offset_nbytes`` into ``storage``."""
        empty = torch.empty(0, dtype=self._tensor.dtype, device=storage.device)
        offset = self._offset + offset_nbytes // empty.itemsize
        return empty.set_(storage, offset, self._size, self._stride)


class TensorCache:
    """Packs and unpacks the saved tensors of one model; called by the training thread.

    Tensors that are not on ``device`` pass through; ``wait`` runs a function that waits, and counts its time
    as a stall.
    """

    def __init__(
        self, device: torch.device, stores: Mapping[Place, ActivationStore],
        wait: Callable[[Callable[[], None]], None],
    ) -> None:  # fmt: skip
        self.device, self.stores, self._wait = device, stores, wait
        self.stats = ActivationStats()
        self.queue = StoreQueue(self.stats)
        self.coding: Coding | None = None  # None: everything is stored as it is
        self.exempt: Container[torch.UntypedStorage] = ()  # which live anyway: of parameters and buffers
        self.profiler: Profiler | None = None
        self.planned: ActivationPolicy | None = None  # for every pass, once there is a plan
        self.record: PassRecord | None = None  # of the forward pass that runs; None: everything is kept
        self._profiled_backward = -1  # the backward pass that the profiler knows of
        self._slots: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()

    @untraced
    def pack(self, tensor: Tensor) -> KeptTensor:
        """Return what autograd keeps for ``tensor``; DiskError: no room, or an earlier store failed."""
        record = self.record
        if self.profiler is not None:
            self.profiler.saves()
        if record is None or not self._takes(tensor):
            return KeptTensor(tensor)
        with self._handling():
            self.stats.free_dropped()
            storage = tensor.untyped_storage()
            slot = self._slots.get(storage._cdata)
            if slot is None or not slot.is_of(storage, tensor):
                slot = self._slots[storage._cdata] = self._begin(record, tensor)
            return SlotHandle(slot, record, tensor)

    def _takes(self, tensor: Tensor) -> bool:
        if not is_plain(tensor) or tensor.device != self.device:
            return False
        storage = tensor.untyped_storage()
        if (nbytes := storage.nbytes()) < LEAST_NBYTES or storage in self.exempt:
            return False
        # Memory that is not torch's own (numpy's, a file's, that of a worker) cannot be freed by us.
        return storage.resizable() and tensor.nbytes * _LEAST_PART >= nbytes

    def _begin(self, record: PassRecord, tensor: Tensor) -> Slot:
        slot = Slot(record.next_key(), tensor.untyped_storage(), tensor._version, self.stats)
        record.add(slot)
        coding = self.coding
        form = None if coding is None else coding.measure(slot.key, tensor)
        if self.profiler is not None:
            self.profiler.packed(slot.key, tensor, form)
        code = coding and coding.code(slot.key, tensor, record.policy.codecs.get(slot.key))
        place = record.policy.place(slot.key).as_coded(code is not None)
        if place is not Place.KEEP:
            record.stores[slot.key] = self.queue.put(slot, self.stores[place], code or PLAIN)
        self._wait_for_stores(record, slot.key, backward=False)
        return slot

    def _wait_for_stores(self, record: PassRecord, key: SlotKey, *, backward: bool) -> None:
        """Wait for the stores whose bytes have to be gone when ``key`` is packed or asked for."""
        last = record.policy.waits.get((key, backward))
        number = None if last is None else record.stores.get(last)
        if number is not None and not self.queue.has_ended(number):
            self.wait_for(partial(self.queue.wait_until, partial(self.queue.has_ended, number)))

    @untraced
    def unpack(self, packed: KeptTensor) -> Tensor:
        """Return the packed tensor; RuntimeError: it was modified; DiskError: a read or a store failed."""
        self.queue.check()
        backward = torch._C._current_graph_task_id()
        if self.profiler is not None and backward not in (-1, self._profiled_backward):
            self._profiled_backward = backward
            self.profiler.backward_begins()
            torch.autograd.Variable._execution_engine.queue_callback(self.profiler.update_begins)
        kept = packed.check()
        if not isinstance(packed, SlotHandle):
            return kept
        with self._handling():
            self.stats.free_dropped()
            tensor = self._read(packed)
        if self.profiler is not None:
            self.profiler.unpacked(packed.slot.key, tensor)
        return tensor

    def _read(self, packed: SlotHandle) -> Tensor:
        slot, record = packed.slot, packed.record
        assert record is not None, "a forward pass packed it"
        self.queue.cancel(slot)
        self._start_loads(record, slot.key)
        if slot.state is S.STORING and (
            slot.rounds or self.profiler is not None or record.policy.keeps_budget
        ):
            # No store may hold bytes that backward has released: a profile or a budget counts them.
            self.wait_for(lambda: self.queue.wait_until(lambda: slot.state is not S.STORING))
        self.stats.forwarded += slot.state is S.STORING
        self.stats.on_demand += slot.fetch()
        storage, offset_nbytes = slot.read(self.wait_for)
        slot.readers -= not packed.is_read
        packed.is_read = True
        if not slot.readers:
            slot.drop()
        return packed.view(storage, offset_nbytes)

    def _start_loads(self, record: PassRecord, key: SlotKey) -> None:
        backward, loads = torch._C._current_graph_task_id(), record.policy.loads
        begins = record.backward != backward
        if begins:
            record.backward = backward
            record.asked.clear()
            record.fetched.clear()
        elif key in record.asked:
            return
        record.asked.add(key)
        self._wait_for_stores(record, key, backward=True)
        if loads is None:
            due = record.packed_before(key)
        else:
            due = [*(loads.get(None, ()) if begins else ()), *loads.get(key, ())]
        for each in due:
            slot = None if each in record.fetched else record.slots.get(each)
            if slot is not None:
                record.fetched.add(each)
                self.queue.cancel(slot)
                slot.fetch()

    def wait_for(self, wait: Callable[[], None]) -> None:
        """Run ``wait``, which waits for transfers, and count its time."""
        began_s = time.perf_counter()
        try:
            self._wait(wait)
        finally:
            self.stats.waited_s += time.perf_counter() - began_s

    @contextmanager
    def _handling(self) -> Iterator[None]:
        """Count the time of what runs inside, less its waits, and leave it out of a profile."""
        stats, began_s = self.stats, time.perf_counter() - self.stats.waited_s
        with nullcontext() if self.profiler is None else self.profiler.paused():
            yield
        if self.device.type == "cpu":  # an accelerator computes meanwhile
            stats.handled_s += time.perf_counter() - stats.waited_s - began_s

    def close(self) -> None:
        """Finish what is in flight; graphs that still live can then read only bytes that are in memory."""
        self.queue.drain()
        self.stats.free_dropped()
        for store in self.stores.values():
            store.close()
