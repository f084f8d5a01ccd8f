"""Slots go along the edges of their table only; the queue keeps its order; the ledger returns to zero."""

import gc
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from infinity.activations.ledger import Ledger
from infinity.activations.queue import StoreQueue
from infinity.activations.script import Alike, Planned
from infinity.activations.shelf import DirectShelf
from infinity.activations.slot import Slot
from infinity.core.errors import BudgetError, DiskError, StateError
from infinity.core.extent import BLOCK_NBYTES
from infinity.core.lifecycle import SLOT_ALLOWED, Lifecycle, SlotState
from infinity.core.plan import ActivationPlan, Load, Place
from infinity.core.profile import SlotKey
from tests.activation.stage import Stage
from tests.helpers.faulty import Fault

S = SlotState


def make_slot(ledger: Ledger, ordinal: int = 0, nbytes: int = 20_000) -> tuple[Slot, Tensor]:
    tensor = torch.arange(nbytes, dtype=torch.uint8) + ordinal
    return Slot(SlotKey(1, ordinal), tensor.untyped_storage(), tensor._version, ledger), tensor


def values(slot: Slot) -> Tensor:
    storage, offset = slot.read()
    return torch.empty(0, dtype=torch.uint8).set_(storage)[offset : offset + slot.nbytes]


@pytest.mark.parametrize("state", list(S))
@pytest.mark.parametrize("to", list(S))
def test_only_the_edges_of_the_table_exist(state, to):
    lifecycle: Lifecycle[SlotState] = Lifecycle("activation 1.0", state)
    if to in SLOT_ALLOWED[state]:
        lifecycle.move(to)
        assert lifecycle.state is to
    else:
        with pytest.raises(StateError, match=rf"activation 1\.0: {state.name} -> {to.name}; allowed: "):
            lifecycle.move(to)


def test_a_slot_goes_all_the_way_and_back(any_stage):
    ledger = Ledger()
    slot, tensor = make_slot(ledger)
    wanted, done = tensor.clone(), threading.Event()
    slot.shelve(any_stage.shelf)
    assert slot.state is S.STORING
    slot.store(lambda error: done.set())
    del tensor
    assert done.wait(5)
    assert (slot.state, ledger.resident_nbytes) == (S.STORED, 0)
    assert slot.fetch()
    assert not slot.fetch()
    assert (slot.state, ledger.resident_nbytes) == (S.LOADING, slot.nbytes)
    assert torch.equal(values(slot), wanted)
    assert (slot.state, slot.was_loaded) == (S.RESIDENT, True)
    slot.let_go()
    assert (slot.state, ledger.resident_nbytes) == (S.STORED, 0)
    slot.fetch()
    assert torch.equal(values(slot), wanted)
    del slot
    ledger.tidy()
    assert ledger.resident_nbytes == 0
    assert ledger.peak_nbytes == 20_000
    any_stage.assert_empty()


def test_a_storage_that_somebody_holds_needs_no_load(stage):
    slot, tensor = make_slot(stage.cache.ledger)
    stage.cache.queue.put(slot, stage.shelf)
    stage.all_stored()
    assert slot.state is S.STORED
    assert not slot.fetch()
    assert slot.state is S.RESIDENT
    assert values(slot).data_ptr() == tensor.data_ptr()


def test_what_is_wanted_while_it_is_stored_stays(stage):
    stage.engine.delay_s = 0.05
    slot, _ = make_slot(stage.cache.ledger)
    stage.cache.queue.put(slot, stage.shelf)
    assert not slot.fetch()
    stage.all_stored()
    assert slot.state is S.RESIDENT
    assert stage.engine.reads == 0


@pytest.mark.parametrize("where", ["waiting", "storing", "stored", "loading", "resident"])
def test_a_slot_whose_graph_is_dropped_leaves_nothing_wherever_it_is(any_stage, where):
    any_stage.engine.delay_s = 0.02
    queue, ledger = any_stage.cache.queue, any_stage.cache.ledger
    queue._most_nbytes = 1
    ahead, _ = make_slot(ledger)
    slot, tensor = make_slot(ledger, 1)
    queue.put(ahead, any_stage.shelf)
    queue.put(slot, any_stage.shelf)
    del tensor
    if where != "waiting":
        queue.wait_below(20_000)
    if where in ("stored", "loading", "resident"):
        any_stage.all_stored()
    if where in ("loading", "resident"):
        assert slot.fetch()
    if where == "resident":
        slot.read()
    del slot, ahead
    any_stage.assert_empty()


# --- the queue -----------------------------------------------------------------------------------


def test_stores_begin_in_the_order_of_packing_and_few_bytes_at_a_time(stage):
    stage.engine.delay_s = 0.01
    ledger = stage.cache.ledger
    queue = StoreQueue(ledger, in_flight_nbytes=50_000)
    slots, order, most, write = [], [], 0, stage.engine.write

    def noted(extent, memory):
        order.append(extent.pieces[0].offset)
        return write(extent, memory)

    stage.engine.write = noted
    for number in range(8):
        slots.append(make_slot(ledger, number)[0])
        queue.put(slots[-1], stage.shelf)
        most = max(most, queue._in_flight_nbytes)
    assert queue.nbytes == 8 * 20_000
    queue.wait_below(60_000)
    assert queue.nbytes <= 60_000
    queue.wait_below(0)
    assert order == sorted(order)
    assert len(order) == 8
    assert most == 40_000
    assert {slot.state for slot in slots} == {S.STORED}


def test_what_is_called_off_is_not_stored_and_gives_its_room_back_at_once(stage):
    stage.engine.delay_s = 0.02
    queue = stage.cache.queue
    queue._most_nbytes = 1
    slots = [make_slot(stage.cache.ledger, n)[0] for n in range(3)]
    for slot in slots:
        queue.put(slot, stage.shelf)
    taken = stage.volume.allocated_nbytes
    queue.call_off(slots[1])
    assert slots[1].state is S.RESIDENT
    assert stage.volume.allocated_nbytes <= taken - 3 * 4096  # whole blocks, wherever they lie
    queue.call_off(slots[0])  # too late
    stage.all_stored()
    assert [slot.state for slot in slots] == [S.STORED, S.RESIDENT, S.STORED]
    assert stage.engine.writes == 2


def test_draining_stores_nothing_more_and_what_waited_can_be_read(stage):
    stage.engine.delay_s = 0.02
    queue = stage.cache.queue
    queue._most_nbytes = 1
    slots = [make_slot(stage.cache.ledger, n)[0] for n in range(3)]
    for slot in slots:
        queue.put(slot, stage.shelf)
    queue.drain()
    assert stage.engine.writes == 1
    for number, slot in enumerate(slots):
        slot.fetch()
        assert int(values(slot)[0]) == number


class Told:
    """A transfer that ends when it is told to."""

    def __init__(self) -> None:
        self.calls, self.ended = [], False

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return self.ended

    def then(self, call) -> None:
        if self.ended:
            call()
        else:
            self.calls.append(call)

    def end(self) -> None:
        self.ended = True
        for call in self.calls:
            call()


def test_a_thousand_stores_that_end_at_once_need_no_deep_stack(stage):
    queue = StoreQueue(stage.cache.ledger, in_flight_nbytes=1)
    first = Told()
    stage.engine.write = lambda extent, memory: first
    slots = [make_slot(stage.cache.ledger, n, 100)[0] for n in range(1000)]
    queue.put(slots[0], stage.shelf)
    at_once = Told()
    at_once.end()
    stage.engine.write = lambda extent, memory: at_once
    for slot in slots[1:]:
        queue.put(slot, stage.shelf)
    assert queue.nbytes == 100_000
    first.end()
    queue.drain()
    assert {slot.state for slot in slots} == {S.STORED}


def test_a_failed_store_is_told_once_and_ends_the_others(stage):
    stage.engine.faults, stage.engine.delay_s = (Fault(on="write", nth=2, forever=True),), 0.01
    queue = stage.cache.queue
    queue._most_nbytes = 50_000
    slots = [make_slot(stage.cache.ledger, n)[0] for n in range(6)]
    for slot in slots:
        queue.put(slot, stage.shelf)
    with pytest.raises(DiskError, match=r"write of .* failed"):
        queue.wait_below(0)
    queue.check()
    queue.wait_below(0)
    assert queue.nbytes == 0
    for number, slot in enumerate(slots):
        slot.fetch()
        assert int(values(slot)[0]) == number
    stage.engine.faults = ()
    queue.put(make_slot(stage.cache.ledger)[0], stage.shelf)
    stage.all_stored()


def test_an_error_that_is_not_the_disks_is_told_and_nothing_hangs(tmp_path):
    stage = Stage(tmp_path, "disk")
    stage.pool.patience_s = 0.05
    with stage.pool.lease(stage.pool.capacity_nbytes, who="units"):
        slot, _ = make_slot(stage.cache.ledger)
        stage.cache.queue.put(slot, stage.shelf)
        with pytest.raises(BudgetError, match=r"raise memory\.host"):
            stage.all_stored()
    assert slot.state is S.RESIDENT
    del slot
    stage.assert_empty()
    stage.close()


def test_an_interrupt_while_a_store_begins_leaves_nobody_waiting(stage):
    def interrupted(extent, memory):
        raise KeyboardInterrupt

    slot, _ = make_slot(stage.cache.ledger)
    write, stage.engine.write = stage.engine.write, interrupted
    with pytest.raises(KeyboardInterrupt):
        stage.cache.queue.put(slot, stage.shelf)
    stage.engine.write = write
    stage.cache.queue.drain()
    other, _ = make_slot(stage.cache.ledger, 1)
    stage.cache.queue.put(other, stage.shelf)
    stage.all_stored()
    assert other.state is S.STORED


def test_slots_that_die_inside_any_lock_do_not_wait_for_it(stage):
    ledger = stage.cache.ledger
    ring: list = []
    slot, _ = make_slot(ledger)
    ring += [slot, ring]
    gone = weakref.ref(slot)
    del slot, ring
    with ledger._lock, stage.cache.queue._lock:
        gc.collect()
        assert gone() is None
    ledger.tidy()
    assert ledger.resident_nbytes == 0


# --- shelves -------------------------------------------------------------------------------------


@given(nbytes=st.one_of(st.integers(1, 40_000), st.integers(-2, 2).map(lambda n: 4 * BLOCK_NBYTES + n)))
@settings(max_examples=30, deadline=None)
def test_every_size_comes_back_to_the_byte_at_the_same_place_of_a_block(tmp_path_factory, nbytes):
    stage = Stage(tmp_path_factory.mktemp("shelf"))
    try:
        tensor = torch.randint(256, (nbytes,), dtype=torch.uint8)
        stored = stage.shelf.take(tensor.untyped_storage(), "test")
        stored.store(tensor.untyped_storage()).wait()
        loading = stored.load()
        loading.transfer.wait()
        back = torch.empty(0, dtype=torch.uint8).set_(loading.storage)[loading.offset_nbytes :][:nbytes]
        assert torch.equal(back, tensor)
        assert back.data_ptr() % BLOCK_NBYTES == tensor.data_ptr() % BLOCK_NBYTES
        stored.free()
        stored.free()
        assert stage.volume.allocated_nbytes == 0
    finally:
        stage.close()


@pytest.mark.parametrize("nbytes", [1, 8191, 8192, 8193, 3 * 8192, 40_001])
@pytest.mark.parametrize("shelf", ["disk", "host"])
def test_staged_in_pieces(tmp_path, shelf, nbytes):
    stage = Stage(tmp_path, shelf)
    tensor = torch.randint(256, (nbytes,), dtype=torch.uint8)
    stored = stage.shelf.take(tensor.untyped_storage(), "test")
    stored.store(tensor.untyped_storage()).wait()
    loading = stored.load()
    loading.transfer.wait()
    assert torch.equal(torch.empty(0, dtype=torch.uint8).set_(loading.storage), tensor)
    assert stage.pool.peak_nbytes < 8192 * 8 + nbytes * (shelf == "host")
    stored.free()
    stage.assert_empty()
    stage.close()


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("on", ["write", "read"])
def test_a_piece_that_fails_gives_back_every_lease(tmp_path, on, nth):
    stage = Stage(tmp_path, "disk")
    stage.engine.faults = (Fault(on=on, nth=nth),)
    tensor = torch.randint(256, (40_001,), dtype=torch.uint8)
    stored = stage.shelf.take(tensor.untyped_storage(), "test")
    if on == "read":
        stored.store(tensor.untyped_storage()).wait()
    with pytest.raises(DiskError):
        (stored.load().transfer if on == "read" else stored.store(tensor.untyped_storage())).wait()
    stored.free()
    stage.assert_empty()
    stage.close()


def test_room_is_given_back_only_when_nothing_is_in_flight(stage):
    stage.engine.delay_s = 0.05
    tensor = torch.zeros(40_000, dtype=torch.uint8)
    stored = stage.shelf.take(tensor.untyped_storage(), "test")
    transfer = stored.store(tensor.untyped_storage())
    stored.free()
    assert stage.volume.allocated_nbytes > 0
    transfer.wait()
    stage.engine.close()
    assert stage.volume.allocated_nbytes == 0


def test_a_shelf_takes_its_room_or_nothing(tmp_path):
    stage = Stage(tmp_path, "disk")
    allocate, calls = stage.volume.allocate, []

    def full(nbytes, *, what):
        calls.append(nbytes)
        if len(calls) == 3:
            raise DiskError(28, "reservation", "a.bin", offset=0, nbytes=nbytes)
        return allocate(nbytes, what=what)

    stage.volume.allocate = full
    with pytest.raises(DiskError):
        stage.shelf.take(torch.zeros(40_000, dtype=torch.uint8).untyped_storage(), "test")
    assert stage.volume.allocated_nbytes == 0
    stage.close()


def test_direct_shelves_close_nothing_of_others(stage):
    DirectShelf(stage.volume, stage.engine).close()
    stage.volume.free(stage.volume.allocate(BLOCK_NBYTES, what="still open"))


# --- scripts -------------------------------------------------------------------------------------


def test_a_plan_is_played_as_it_says():
    first, second, third = SlotKey(0, 0), SlotKey(1, 0), SlotKey(2, 0)
    plan = ActivationPlan(
        "plan",
        {second: Place.NVME, third: Place.HOST},
        (Load(None, third), Load(third, second)),
        frozenset({1}),
    )
    script = Planned(plan)
    assert [script.place(key) for key in (first, second, third)] == [Place.KEEP, Place.NVME, Place.HOST]
    assert [script.recomputes(region) for region in range(3)] == [False, True, False]
    assert (script.loads(None), script.loads(third), script.loads(first)) == ([third], [second], ())


def test_one_rule_for_all_spares_what_backward_begins_with():
    script = Alike(Place.NVME, recompute=True, last=3)
    assert script.place(SlotKey(2, 9)) is Place.NVME
    assert script.place(SlotKey(3, 0)) is Place.KEEP
    assert script.loads(None) is None
    assert Alike(Place.NVME, last=-1).place(SlotKey(0, 0)) is Place.NVME


def test_the_last_block_is_not_recomputed_for_nothing():
    script = Alike(Place.KEEP, recompute=True, last=3)
    assert [script.recomputes(region) for region in (1, 3, 5)] == [True, False, False]
