"""Slots go along the edges of their table only; the queue keeps its order; the stats returns to zero."""

import threading
import weakref

import pytest
import torch
from torch import Tensor

from infinity.activations.tensor_cache import ActivationStats, Slot, StoreQueue
from infinity.core.errors import BudgetError, DiskError, StateError
from infinity.core.lifecycle import EDGES, Lifecycle, SlotState
from infinity.core.plan import SlotKey
from tests.activations.stage import Stage
from tests.helpers.faulty import Fault
from tests.helpers.limits import collected, comes_true

S = SlotState


def make_slot(stats: ActivationStats, ordinal: int = 0, nbytes: int = 20_000) -> tuple[Slot, Tensor]:
    tensor = torch.arange(nbytes, dtype=torch.uint8) + ordinal
    return Slot(SlotKey(1, ordinal), tensor.untyped_storage(), tensor._version, stats), tensor


def values(slot: Slot) -> Tensor:
    storage, offset = slot.read(lambda load: load())
    return torch.empty(0, dtype=torch.uint8).set_(storage)[offset : offset + slot.nbytes]


@pytest.mark.parametrize("state", list(S))
@pytest.mark.parametrize("to", list(S))
def test_only_the_edges_of_the_table_exist(state, to):
    lifecycle: Lifecycle[SlotState] = Lifecycle("activation 1.0", state)
    if to in EDGES[state]:
        lifecycle.move(to)
        assert lifecycle.state is to
    else:
        with pytest.raises(StateError, match=rf"activation 1\.0: {state.name} -> {to.name}; allowed: "):
            lifecycle.move(to)


def test_a_slot_goes_all_the_way_and_back(any_stage):
    stats = ActivationStats()
    slot, tensor = make_slot(stats)
    wanted = tensor.clone()
    slot.reserve(any_stage.store)
    assert slot.state is S.STORING
    _, transfer = slot.start_store()
    del tensor
    transfer.wait()
    slot.end_store()
    assert (slot.state, stats.resident_nbytes) == (S.STORED, 0)
    assert slot.fetch()
    assert not slot.fetch()
    assert (slot.state, stats.resident_nbytes) == (S.LOADING, slot.nbytes)
    assert torch.equal(values(slot), wanted)
    assert slot.state is S.RESIDENT
    slot.drop()
    assert (slot.state, stats.resident_nbytes) == (S.STORED, 0)
    slot.fetch()
    assert torch.equal(values(slot), wanted)
    del slot
    stats.free_dropped()
    assert stats.resident_nbytes == 0
    assert stats.peak_nbytes == 20_000
    any_stage.assert_empty()


def test_a_storage_that_somebody_holds_needs_no_load(stage):
    slot, tensor = make_slot(stage.cache.stats)
    stage.cache.queue.put(slot, stage.store)
    stage.all_stored()
    assert slot.state is S.STORED
    assert not slot.fetch()
    assert slot.state is S.RESIDENT
    assert values(slot).data_ptr() == tensor.data_ptr()


def test_what_is_wanted_while_it_is_stored_stays(stage):
    stage.engine.hold()
    slot, _ = make_slot(stage.cache.stats)
    stage.cache.queue.put(slot, stage.store)
    assert not slot.fetch()
    stage.engine.let_go()
    stage.all_stored()
    assert slot.state is S.RESIDENT
    assert stage.engine.reads == 0


@pytest.mark.parametrize("where", ["waiting", "storing", "stored", "loading", "resident"])
def test_a_slot_whose_graph_is_dropped_leaves_nothing_wherever_it_is(any_stage, where):
    any_stage.engine.delay_s = 0.02
    queue, stats = any_stage.cache.queue, any_stage.cache.stats
    queue.most_nbytes = 1
    ahead, _ = make_slot(stats)
    slot, tensor = make_slot(stats, 1)
    queue.put(ahead, any_stage.store)
    queue.put(slot, any_stage.store)
    del tensor
    if where != "waiting":
        queue.wait_below(20_000)
    if where in ("stored", "loading", "resident"):
        any_stage.all_stored()
    if where in ("loading", "resident"):
        assert slot.fetch()
    if where == "resident":
        slot.read(lambda load: load())
    del slot, ahead
    any_stage.assert_empty()


# --- the queue -----------------------------------------------------------------------------------


def test_stores_begin_in_the_order_of_packing_and_few_bytes_at_a_time(stage):
    stage.engine.hold()
    stats = stage.cache.stats
    queue = StoreQueue(stats, in_flight_nbytes=50_000)
    slots, order, most, write = [], [], 0, stage.engine.write

    def noted(extent, memory):
        order.append(extent.pieces[0].offset)
        return write(extent, memory)

    stage.engine.write = noted
    for number in range(8):
        slots.append(make_slot(stats, number)[0])
        queue.put(slots[-1], stage.store)
        most = max(most, queue.in_flight_nbytes)
    assert queue.nbytes == 8 * 20_000
    stage.engine.let_go()
    queue.wait_below(60_000)
    assert queue.nbytes <= 60_000
    queue.wait_below(0)
    assert order == sorted(order)
    assert len(order) == 8
    assert most == 40_000
    assert {slot.state for slot in slots} == {S.STORED}


def test_a_wait_for_a_slot_covers_all_that_were_put_before_it(stage):
    stage.engine.hold()
    queue = StoreQueue(stage.cache.stats, in_flight_nbytes=1)  # one after the other
    slots = [make_slot(stage.cache.stats, number)[0] for number in range(3)]
    numbers = [queue.put(slot, stage.store) for slot in slots]
    assert not queue.has_ended(numbers[0])
    stage.engine.let_go()
    queue.wait_until(lambda: queue.has_ended(numbers[1]))
    assert [slot.state for slot in slots[:2]] == [S.STORED, S.STORED]
    assert queue.has_ended(numbers[1])
    queue.cancel(slots[2])
    queue.wait_until(lambda: slots[2].state is not S.STORING)  # whether it had begun or not
    queue.drain()
    assert queue.has_ended(numbers[2])


def test_what_is_called_off_is_not_stored_and_gives_its_room_back_at_once(stage):
    stage.engine.hold()
    queue = stage.cache.queue
    queue.most_nbytes = 1
    slots = [make_slot(stage.cache.stats, n)[0] for n in range(3)]
    for slot in slots:
        queue.put(slot, stage.store)
    taken = stage.volume.allocated_nbytes
    queue.cancel(slots[1])
    assert slots[1].state is S.RESIDENT
    assert stage.volume.allocated_nbytes <= taken - 3 * 4096  # whole blocks, wherever they lie
    queue.cancel(slots[0])  # too late
    stage.engine.let_go()
    stage.all_stored()
    assert [slot.state for slot in slots] == [S.STORED, S.RESIDENT, S.STORED]
    assert stage.engine.writes == 2


def test_draining_stores_nothing_more_and_what_waited_can_be_read(stage):
    stage.engine.hold()
    queue = stage.cache.queue
    queue.most_nbytes = 1
    slots = [make_slot(stage.cache.stats, n)[0] for n in range(3)]
    for slot in slots:
        queue.put(slot, stage.store)

    def let_go():
        assert comes_true(lambda: queue.nbytes == queue.in_flight_nbytes)  # nothing waits any more
        stage.engine.let_go()

    other = threading.Thread(target=let_go)
    other.start()
    queue.drain()
    other.join()
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
    queue = StoreQueue(stage.cache.stats, in_flight_nbytes=1)
    first = Told()
    stage.engine.write = lambda extent, memory: first
    slots = [make_slot(stage.cache.stats, n, 100)[0] for n in range(1000)]
    queue.put(slots[0], stage.store)
    at_once = Told()
    at_once.end()
    stage.engine.write = lambda extent, memory: at_once
    for slot in slots[1:]:
        queue.put(slot, stage.store)
    assert queue.nbytes == 100_000
    first.end()
    queue.drain()
    assert {slot.state for slot in slots} == {S.STORED}


def test_a_failed_store_is_told_once_and_ends_the_others(stage):
    stage.engine.faults = (Fault(on="write", nth=2, forever=True),)
    stage.engine.hold()
    queue = stage.cache.queue
    queue.most_nbytes = 50_000
    slots = [make_slot(stage.cache.stats, n)[0] for n in range(6)]
    for slot in slots:
        queue.put(slot, stage.store)
    stage.engine.let_go()
    with pytest.raises(DiskError, match=r"write of .* failed"):
        queue.wait_below(0)
    queue.check()
    queue.wait_below(0)
    assert queue.nbytes == 0
    for number, slot in enumerate(slots):
        slot.fetch()
        assert int(values(slot)[0]) == number
    stage.engine.faults = ()
    queue.put(make_slot(stage.cache.stats)[0], stage.store)
    stage.all_stored()


def test_an_error_that_is_not_the_disks_is_told_and_nothing_hangs(tmp_path):
    stage = Stage(tmp_path, "disk")
    stage.pool.patience_s = 0.05
    with stage.pool.lease(stage.pool.capacity_nbytes, who="units"):
        slot, _ = make_slot(stage.cache.stats)
        stage.cache.queue.put(slot, stage.store)
        with pytest.raises(BudgetError, match=r"raise memory\.host"):
            stage.all_stored()
    assert slot.state is S.RESIDENT
    del slot
    stage.assert_empty()
    stage.close()


def test_a_store_that_cannot_begin_is_told_and_leaves_nobody_waiting(stage):
    def broken(extent, memory):
        raise RuntimeError("the device")

    slot, _ = make_slot(stage.cache.stats)
    write, stage.engine.write = stage.engine.write, broken
    stage.cache.queue.put(slot, stage.store)
    with pytest.raises(RuntimeError, match="the device"):
        stage.all_stored()
    assert slot.state is S.RESIDENT
    stage.engine.write = write
    other, _ = make_slot(stage.cache.stats, 1)
    stage.cache.queue.put(other, stage.store)
    stage.all_stored()
    assert other.state is S.STORED


def test_slots_that_die_inside_any_lock_do_not_wait_for_it(stage):
    stats = stage.cache.stats
    ring: list = []
    slot, _ = make_slot(stats)
    ring += [slot, ring]
    gone = weakref.ref(slot)
    del slot, ring

    class Zero(int):
        """No bytes; whoever adds them collects garbage, inside the lock that guards the sum."""

        def __radd__(self, other: int) -> int:
            assert collected(gone)
            return other

    stage.cache.queue.wait_until(lambda: stats.add(Zero()) is None)  # called inside the queue's lock
    assert gone() is None
    stats.free_dropped()
    assert stats.resident_nbytes == 0
