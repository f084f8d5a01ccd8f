"""Pack what autograd saves as references to slots, and unpack it bitwise: the tensor cache.

[Note: identity]
An address is used again as soon as its memory is free. So a storage is identified by its object, held weakly,
which torch keeps as long as the memory lives. Views and transposes share it.

[Note: versions]
Autograd refuses to read a saved tensor that was modified in place since, but not where hooks are. So hooks
compare versions themselves, also after the bytes have left: a tensor without bytes that shares the count of
writes stays behind. Writes that torch does not count reach backward only while the storage is in memory.

[Note: one record per forward pass]
Several forward passes may be in flight (interleaved micro-batches); backward of each asks its own record what
to load. A slot lives as long as a graph refers to it, so a step left half-way leaves nothing behind.

[Note: readers]
Several operators may save one storage. It is loaded once, held until each has read it, and then dropped. A
graph that is kept (``retain_graph``) loads it again.
"""

import math
import time
import weakref
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
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
    return cast(F, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


@contextmanager
def patched(target: Any, name: str, value: object) -> Iterator[None]:
    """Set the attribute ``name`` of ``target`` to ``value``, hiding its class's, until the context ends."""
    before = target.__dict__.get(name)
    target.__dict__[name] = value
    try:
        yield
    finally:
        if before is None:
            del target.__dict__[name]
        else:
            target.__dict__[name] = before


# --- policies and records ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ActivationPolicy:
    """Says what slots and blocks do while the model runs.

    Attributes:
        loads: Slots to load when backward first asks for a key, or begins (None). No mapping: load those
            that were packed before the one asked for.
        waits: The slot up to which all must have been stored when one is packed (False) or asked for (True).
        keeps_budget: Whether bytes of stores that have not ended count in a budget.
    """

    place: Callable[[SlotKey], Place]
    recomputes: Callable[[int], bool]
    loads: Mapping[SlotKey | None, Sequence[SlotKey]] | None = None
    waits: Mapping[tuple[SlotKey, bool], SlotKey] = field(default_factory=dict)
    keeps_budget: bool = False


def planned(plan: ActivationPlan) -> ActivationPolicy:
    loads: defaultdict[SlotKey | None, list[SlotKey]] = defaultdict(list)
    for load in plan.loads:
        loads[load.after].append(load.slot)
    waits = {(wait.at, wait.backward): wait.slot for wait in plan.waits}
    budget = plan.capacity_nbytes is not None
    return ActivationPolicy(plan.place, plan.recomputed.__contains__, loads, waits, budget)


def uniform(place: Place, *, recompute: bool = False, last: int = -1) -> ActivationPolicy:
    """Return the policy that treats all slots and blocks alike, except those from region ``last`` on.

    Backward begins with these, so they stay. Below 0, as of a model without blocks: no exception.
    """
    end = math.inf if last < 0 else last
    return ActivationPolicy(
        lambda key: place if key.region < end else Place.KEEP, lambda region: recompute and region < end
    )


class PassRecord:
    """Knows the position of a forward pass, and its slots in the order of packing.

    Attributes:
        region: 2n - 1 in the n-th call of a block, 2n after it.
        packed: Keys, which grow.
        stores: The number that the queue gave to each slot's store.
        asked, fetched: Slots that backward asked for, and slots that were loaded ahead.
        backward: Autograd's number of the backward pass that runs.
    """

    def __init__(self, policy: ActivationPolicy) -> None:
        self.policy = policy
        self.region = self._ordinal = 0
        self.slots: weakref.WeakValueDictionary[SlotKey, Slot] = weakref.WeakValueDictionary()
        self.packed: list[SlotKey] = []
        self.region_nbytes: Counter[int] = Counter()
        self.stores: dict[SlotKey, int] = {}
        self.asked: set[SlotKey] = set()
        self.fetched: set[SlotKey] = set()
        self.backward = -1
        self._empty: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def enter(self) -> int:
        """Begin the next call of a block; return its region."""
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


# --- handles -----------------------------------------------------------------------------------------


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

    def __init__(self, slot: Slot, record: PassRecord, tensor: Tensor) -> None:
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


def storages_of(tensors: Iterable[Tensor]) -> "weakref.WeakSet[torch.UntypedStorage]":
    """Return the storages of ``tensors``, held weakly; see [Note: identity]."""
    return weakref.WeakSet(tensor.untyped_storage() for tensor in tensors if is_plain(tensor))


def is_plain(tensor: Tensor) -> bool:
    """Return whether storage, offset, sizes and strides describe all of a tensor."""
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
        device: Tensors elsewhere pass through.
        wait: Runs a function that waits, and counts its time as a stall.

    Attributes:
        backlog_nbytes: Bytes that may wait to be stored before packing waits; None: any.
        exempt: Storages that pass through: those of parameters and buffers, which live anyway.
        record: That of the forward pass that runs; None: none does, and everything is kept.
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
    def pack(self, tensor: Tensor) -> KeptTensor:
        """Return what autograd keeps for ``tensor``; DiskError: no room, or an earlier store failed."""
        record = self.record
        if record is None or not self._takes(tensor):
            return KeptTensor(tensor)
        with self._unprofiled():
            self.stats.free_dropped()
            storage = tensor.untyped_storage()
            slot = self._slots.get(storage._cdata)
            if slot is None or not slot.is_of(storage, tensor._version):
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
        if self.profiler is not None:
            self.profiler.packed(slot.key, tensor)
        place = record.policy.place(slot.key)
        if place is not Place.KEEP:
            record.stores[slot.key] = self.queue.put(slot, self.stores[place])
            if self.backlog_nbytes is not None and self.queue.nbytes > self.backlog_nbytes:
                self._count_wait(partial(self.queue.wait_below, self.backlog_nbytes))
        self._wait_for_stores(record, slot.key, backward=False)
        return slot

    def _wait_for_stores(self, record: PassRecord, key: SlotKey, *, backward: bool) -> None:
        """Wait for the stores whose bytes have to be gone when ``key`` is packed or asked for."""
        last = record.policy.waits.get((key, backward))
        number = None if last is None else record.stores.get(last)
        if number is not None and not self.queue.has_ended(number):
            self._count_wait(partial(self.queue.wait_until, partial(self.queue.has_ended, number)))

    # --- backward ----------------------------------------------------------------------------

    @untraced
    def unpack(self, packed: KeptTensor) -> Tensor:
        """Return the packed tensor, bitwise.

        RuntimeError: it was modified in place since. DiskError: it could not be read, or a store failed.
        """
        self.queue.check()
        backward = torch._C._current_graph_task_id()
        if self.profiler is not None and backward not in (-1, self._profiled_backward):
            self._profiled_backward = backward
            self.profiler.backward_begins()
            torch.autograd.Variable._execution_engine.queue_callback(self.profiler.update_begins)
        kept = packed.check()
        if not isinstance(packed, SlotHandle):
            return kept
        with self._unprofiled():
            self.stats.free_dropped()
            tensor = self._read(packed)
        if self.profiler is not None:
            self.profiler.unpacked(packed.slot.key, tensor)
        return tensor

    def _read(self, packed: SlotHandle) -> Tensor:
        slot, record = packed.slot, packed.record
        self.queue.cancel(slot)
        self._start_loads(record, slot.key)
        if slot.state is SlotState.STORING and (self.profiler is not None or record.policy.keeps_budget):
            # No store may hold bytes that backward has released: a profile or a budget counts them.
            self._count_wait(lambda: self.queue.wait_until(lambda: slot.state is not SlotState.STORING))
        self.stats.forwarded += slot.state is SlotState.STORING
        self.stats.on_demand += slot.fetch()
        storage, offset_nbytes = slot.read(self._count_wait)
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
        """Finish what is in flight; graphs that still live can then read only bytes that are in memory."""
        self.queue.drain()
        self.stats.free_dropped()
        for store in self.stores.values():
            store.close()
