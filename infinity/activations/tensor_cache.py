"""The tensor cache: packs what autograd saves as references to slots, and unpacks it bitwise.

[Note: identity]
An address is used again as soon as its memory is free, so identity is the storage object itself, which torch
keeps as long as the memory lives; we hold it weakly. Views and transposes share it.

[Note: versions]
Autograd refuses to read a saved tensor that was modified in place since, but only where no hooks are. So
hooks must compare versions themselves, also after the bytes have left memory: a tensor without bytes that
shares the counter of writes stays behind. Writes that torch does not count (through ``.data``, numpy or a
kernel of one's own) reach the backward pass only while the storage is in memory.

[Note: one record per forward pass]
Every forward pass has a record of its own: its slots by key, in the order of packing. Several may be in
flight (interleaved micro-batches); backward of each asks its own record what to load. A slot belongs to
graphs: it lives as long as one of them refers to it, so a step that is left half-way leaves nothing behind.

[Note: readers]
Several operators save one storage. It is loaded once, held until each of them has read it, and then dropped.
A graph that is kept (``retain_graph``) reads again: then it is loaded again.
"""

import math
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from infinity.activations.profiler import Profiler
from infinity.activations.slots import ActivationStats, Slot, StoreQueue
from infinity.activations.store import ActivationStore
from infinity.core.lifecycle import SlotState
from infinity.core.plan import ActivationPlan, Place, SlotKey

#: Smaller storages are kept: they cost a request each, and free next to nothing (bytes).
LEAST_NBYTES = 256 * 2**10
#: A tensor that is a smaller part of its storage than one in so many is a row of the user's data.
_LEAST_PART = 64


F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """Make torch.compile leave ``function`` as it is."""
    return cast(F, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


# --- policies ----------------------------------------------------------------------------------------


class PlannedPolicy:
    """Follows a plan.

    Attributes:
        keeps_budget: Bytes of stores that have not ended count.
    """

    def __init__(self, plan: ActivationPlan) -> None:
        self.plan, self.place = plan, plan.place
        self._loads: defaultdict[SlotKey | None, list[SlotKey]] = defaultdict(list)
        for load in plan.loads:
            self._loads[load.after].append(load.slot)
        self.keeps_budget = plan.capacity_nbytes is not None
        self._waits = {(wait.at, wait.backward): wait.slot for wait in plan.waits}

    def recomputes(self, region: int) -> bool:
        return region in self.plan.recomputed

    def loads(self, after: SlotKey | None) -> Sequence[SlotKey] | None:
        """Return the slots to load when backward first asks for ``after``."""
        return self._loads.get(after, ())

    def stored_by(self, key: SlotKey, *, backward: bool) -> SlotKey | None:
        """Return the slot up to which all must have been stored when ``key`` is packed or asked for."""
        return self._waits.get((key, backward))


class UniformPolicy:
    """Treats all slots and blocks alike.

    Args:
        place: Where slots go.
        recompute: Whether blocks are recomputed.
        last: Region from which on nothing is stored or recomputed, since backward begins with it. Below 0,
            as of a model without blocks: no such region.
    """

    keeps_budget = False

    def __init__(self, place: Place, *, recompute: bool = False, last: int | None = None) -> None:
        self._place, self._recompute = place, recompute
        self._last = math.inf if last is None or last < 0 else last

    def place(self, key: SlotKey) -> Place:
        return self._place if key.region < self._last else Place.KEEP

    def recomputes(self, region: int) -> bool:
        return self._recompute and region < self._last

    def loads(self, after: SlotKey | None) -> Sequence[SlotKey] | None:
        """Return None: the slots that were packed before ``after`` are loaded."""
        return None

    def stored_by(self, key: SlotKey, *, backward: bool) -> SlotKey | None:
        return None


#: Decides about slots and blocks while the model runs.
ActivationPolicy = PlannedPolicy | UniformPolicy


# --- records and handles -----------------------------------------------------------------------------


class PassRecord:
    """One forward pass: its position, and its slots in the order of packing.

    Args:
        policy: Decides about its slots.

    Attributes:
        region: 2n - 1 in the n-th call of a block, 2n after it.
    """

    def __init__(self, policy: ActivationPolicy) -> None:
        self.policy = policy
        self.region = self._ordinal = 0
        self.slots: weakref.WeakValueDictionary[SlotKey, Slot] = weakref.WeakValueDictionary()
        self.packed: list[SlotKey] = []
        self.positions: dict[SlotKey, int] = {}  # in ``packed``
        self.region_nbytes: Counter[int] = Counter()
        self.stores: dict[SlotKey, int] = {}  # as the queue numbers them
        self.asked: set[SlotKey] = set()  # by the backward pass
        self.fetched: set[SlotKey] = set()  # for it
        self.backward = -1  # the backward pass that runs now, by the number that autograd gave it
        self._empty: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def enter(self) -> int:
        """Begin the next call of a block; return its region."""
        self._move(self.region + 1 + self.region % 2)
        return self.region

    def leave(self) -> None:
        """End the call of a block."""
        self._move(self.region + self.region % 2)

    def _move(self, region: int) -> None:
        self.region, self._ordinal = region, 0

    def next_key(self) -> SlotKey:
        """Return the key of what is packed next."""
        self._ordinal += 1
        return SlotKey(self.region, self._ordinal - 1)

    def was_empty(self, kv_cache: Any) -> bool:
        """Whether a cache of keys and values was empty when the pass came to it first."""
        if kv_cache not in self._empty:
            try:
                self._empty[kv_cache] = not int(kv_cache.get_seq_length())
            except ValueError:  # one that keeps states in place of keys does not tell
                self._empty[kv_cache] = False
        return self._empty[kv_cache]

    def add(self, slot: Slot) -> None:
        self.slots[slot.key] = slot
        self.positions[slot.key] = len(self.packed)
        self.packed.append(slot.key)
        self.region_nbytes[slot.key.region] += slot.nbytes

    def packed_before(self, key: SlotKey) -> list[SlotKey]:
        """Slots that were packed before ``key``, latest first, as many bytes as the largest region has."""
        if key not in self.positions:  # an earlier pass packed it
            return []
        found, nbytes = [], max(self.region_nbytes.values())
        for position in range(self.positions[key] - 1, -1, -1):
            slot = self.slots.get(self.packed[position])
            if slot is not None:
                nbytes -= slot.nbytes
                found.append(slot.key)
            if nbytes <= 0:
                break
        return found


class KeptTensor:
    """Stands in autograd's graph for a tensor that stays where it is."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version

    def tensor(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: The tensor was modified in place since it was saved.
        """
        _check_version(self._tensor, self._version)
        return self._tensor


class SlotHandle:
    """Stands in autograd's graph for a tensor whose storage is in a slot; holds none of its memory.

    Attributes:
        is_read: Backward has read it.
    """

    __slots__ = ("_counter", "_dtype", "_offset", "_size", "_stride", "_version", "is_read", "record", "slot")

    def __init__(self, slot: Slot, record: PassRecord, tensor: Tensor) -> None:
        self.slot, self.record, self.is_read = slot, record, False
        self._dtype, self._offset = tensor.dtype, int(tensor.storage_offset())
        self._size, self._stride = tensor.size(), tensor.stride()
        self._version, self._counter = tensor._version, tensor.detach()
        self._counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # [Note: versions]
        slot.readers += 1

    def check(self) -> None:
        """Raise RuntimeError if the tensor was modified in place since it was saved."""
        _check_version(self._counter, self._version, self._size)

    def view(self, storage: torch.UntypedStorage, offset_nbytes: int) -> Tensor:
        """The tensor, if the bytes of its slot begin ``offset_nbytes`` into ``storage``."""
        empty = torch.empty(0, dtype=self._dtype, device=storage.device)
        offset = self._offset + offset_nbytes // self._dtype.itemsize
        return empty.set_(storage, offset, self._size, self._stride)


def _check_version(counter: Tensor, version: int, shape: torch.Size | None = None) -> None:
    """Raise if ``counter``, which shares the count of writes of a tensor of ``shape``, is not at ``version``.

    Raises:
        RuntimeError: As autograd raises it where no hooks are.
    """
    if counter._version != version:
        what = "" if counter.is_nested else f" {list(counter.shape if shape is None else shape)}"
        raise RuntimeError(
            "a tensor that the backward pass needs was modified by an inplace operation after it was saved: "
            f"{str(counter.dtype).removeprefix('torch.')}{what} is at version {counter._version}; "
            f"wanted version {version}. torch.autograd.set_detect_anomaly(True) shows the operator that "
            "saved it"
        )


def storages_of(tensors: Iterable[Tensor]) -> "weakref.WeakSet[torch.UntypedStorage]":
    """The storages of ``tensors``, as long as these live: see [Note: identity]."""
    return weakref.WeakSet(tensor.untyped_storage() for tensor in tensors if is_plain(tensor))


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is strided memory of its own kind, so that storage and view describe all of it."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.device.type != "meta"
    )


# --- the cache ---------------------------------------------------------------------------------------


class TensorCache:
    """Packs and unpacks the saved tensors of one model; called by the training thread.

    Args:
        device: Where activations are; tensors elsewhere pass through.
        stores: Where slots may go.
        wait: Runs a function that waits, and counts its seconds as a stall.

    Attributes:
        backlog_nbytes: Bytes that may wait to be stored before packing waits; None: any.
        exempt: Storages that pass through: parameters and buffers, which live anyway.
        profiler: Records the step; None: it is not recorded.
        record: Of the forward pass that runs; None: none does, and everything is kept.
    """

    def __init__(
        self, device: torch.device, stores: Mapping[Place, ActivationStore],
        wait: Callable[[Callable[[], None]], None],
    ) -> None:  # fmt: skip
        self.device, self.stores, self._wait = device, stores, wait
        self.stats = ActivationStats()
        self.queue = StoreQueue(self.stats)
        self.backlog_nbytes: int | None = None
        self.exempt: Container[torch.UntypedStorage] = ()
        self.profiler: Profiler | None = None
        self.record: PassRecord | None = None
        self._profiled_backward = -1  # the backward pass that the profiler knows of
        self._slots: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()

    # --- forward -----------------------------------------------------------------------------

    @untraced
    def pack(self, tensor: Tensor) -> KeptTensor | SlotHandle:
        """Return what autograd keeps in place of ``tensor``.

        Raises:
            DiskError: There is no room to store it, or an earlier store failed.
        """
        record = self.record
        if record is None or not self._takes(tensor):
            return KeptTensor(tensor)
        with self._unprofiled():
            self.stats.free_deferred()
            storage = tensor.untyped_storage()
            slot = self._slots.get(storage._cdata)
            if slot is None or not slot.is_of(storage, tensor._version):
                slot = self._slots[storage._cdata] = self._begin(record, tensor)
            return SlotHandle(slot, record, tensor)

    def _takes(self, tensor: Tensor) -> bool:
        if not is_plain(tensor) or tensor.device != self.device:
            return False
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes < LEAST_NBYTES or storage in self.exempt:
            return False
        # Memory that is not torch's own (numpy's, a file's, that of a worker) cannot be freed by us.
        return storage.resizable() and tensor.nbytes * _LEAST_PART >= nbytes

    def _begin(self, record: PassRecord, tensor: Tensor) -> Slot:
        slot = Slot(record.next_key(), tensor.untyped_storage(), tensor._version, self.stats)
        record.add(slot)
        if self.profiler is not None:
            self.profiler.packed(slot.key, tensor)
        place = record.policy.place(slot.key)
        if place is not Place.KEEP:
            record.stores[slot.key] = slot.store_number = self.queue.put(slot, self.stores[place])
            if self.backlog_nbytes is not None and self.queue.nbytes > self.backlog_nbytes:
                self._count_wait(lambda: self.queue.wait_below(self.backlog_nbytes or 0))
        self._wait_for_stores(record, slot.key, backward=False)
        return slot

    def _wait_for_stores(self, record: PassRecord, key: SlotKey, *, backward: bool) -> None:
        """Wait for the stores whose bytes have to be gone when ``key`` is packed or asked for."""
        last = record.policy.stored_by(key, backward=backward)
        number = None if last is None else record.stores.get(last)
        if number is not None and not self.queue.has_ended(number):
            self._count_wait(lambda: self.queue.wait_until(number))

    # --- backward ----------------------------------------------------------------------------

    @untraced
    def unpack(self, packed: KeptTensor | SlotHandle) -> Tensor:
        """Return the tensor that was packed, bitwise.

        Raises:
            DiskError: Its bytes could not be read back, or a store failed.
            RuntimeError: It was modified in place since.
        """
        self.queue.check()
        self._note_backward()
        if isinstance(packed, KeptTensor):
            return packed.tensor()
        packed.check()
        with self._unprofiled():
            self.stats.free_deferred()
            tensor = self._read(packed)
        if self.profiler is not None:
            self.profiler.unpacked(packed.slot.key)
            if packed.slot.was_loaded:
                self.profiler.loaded(packed.slot.key, tensor)
        return tensor

    def _note_backward(self) -> None:
        backward = torch._C._current_graph_task_id()
        if self.profiler is not None and backward not in (-1, self._profiled_backward):
            self._profiled_backward = backward
            self.profiler.backward_begins()
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.profiler.update_begins)

    def _read(self, packed: SlotHandle) -> Tensor:
        slot = packed.slot
        self.queue.cancel(slot)
        self._start_loads(packed.record, slot.key)
        if slot.state is SlotState.STORING and self._is_strict(packed.record):
            self._count_wait(lambda: self.queue.wait_for(slot.store_number))
        self.stats.forwarded += slot.state is SlotState.STORING
        if self._fetch(slot):
            self.stats.on_demand += 1
        self._wait_for(slot)
        storage, offset_nbytes = slot.read()
        if not packed.is_read:
            packed.is_read = True
            slot.readers -= 1
        if not slot.readers:
            slot.drop()
        return packed.view(storage, offset_nbytes)

    def _is_strict(self, record: PassRecord) -> bool:
        """Whether no store may hold bytes that backward has released: a profile or a budget counts them."""
        return self.profiler is not None or record.policy.keeps_budget

    def _wait_for(self, slot: Slot) -> None:
        # A frame of its own: an error whose frame holds its transfer keeps the step's graph alive.
        arriving = slot.arriving()
        if arriving is not None and not arriving.done():
            with suppress(Exception):  # which read() raises, too
                self._count_wait(arriving.wait)

    def _start_loads(self, record: PassRecord, key: SlotKey) -> None:
        """Start the loads that are due when backward asks for ``key``."""
        backward = torch._C._current_graph_task_id()
        begins = record.backward != backward
        if begins:
            record.backward = backward
            record.asked.clear()
            record.fetched.clear()
        is_first = key not in record.asked
        if is_first:
            record.asked.add(key)
            self._wait_for_stores(record, key, backward=True)
        if begins:
            self._load(record, record.policy.loads(None) or ())
        if is_first:
            keys = record.policy.loads(key)
            self._load(record, record.packed_before(key) if keys is None else keys)

    def _load(self, record: PassRecord, keys: Iterable[SlotKey]) -> None:
        for key in keys:
            slot = None if key in record.fetched else record.slots.get(key)
            if slot is not None:
                record.fetched.add(key)
                self.queue.cancel(slot)
                self._fetch(slot)

    def _fetch(self, slot: Slot) -> bool:
        began = slot.fetch()
        self.stats.nbytes_loaded += slot.nbytes * began
        return began

    def _count_wait(self, wait: Callable[[], None]) -> None:
        began_s = time.perf_counter()
        try:
            self._wait(wait)
        finally:
            self.stats.waited_s += time.perf_counter() - began_s

    def _unprofiled(self) -> AbstractContextManager[None]:
        return nullcontext() if self.profiler is None else self.profiler.paused()

    # --- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Finish what is in flight. Graphs that still live can read only bytes that are in memory."""
        self.queue.drain()
        self.stats.free_deferred()
        for store in self.stores.values():
            store.close()
