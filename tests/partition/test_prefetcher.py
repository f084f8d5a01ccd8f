"""The prefetcher with a mover that only writes down what it is told."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.partition.mover import Stored
from infinity.partition.prefetcher import DECODED_AHEAD, Prefetcher, TileRoom
from tests.helpers.cases import examples

fast = examples(100)


class FakeMover:
    """Checks the order of calls: start, finish, release; each in its turn.

    Args:
        stored: Bytes of each routed unit's stored form; 0: they come in one step.

    Attributes:
        present: Units, and whether each was finished.
        decoded: Those that were made of stored bytes.
        units: All are trained, so no tile stays from one step to the next.
    """

    def __init__(self, stored: int = 0) -> None:
        self.stored, self.kept = stored, None
        self.units = defaultdict(lambda: SimpleNamespace(trainable=(0,)))
        self.decoded: set[int] = set()
        self.calls: list[tuple[str, int]] = []
        self.present: dict[int, bool] = {}

    def start(self, item) -> None:
        if item in self.present and self.stored:
            assert item not in self.decoded
            self.decoded.add(item)
            self.calls.append(("decode", item))
            return
        unit = item.unit if isinstance(item, Stored) else item
        assert unit not in self.present, f"{unit} is here"
        self.present[unit] = False
        self.calls.append(("start", unit))

    def finish(self, unit: int) -> None:
        self.present[unit] = True
        self.calls.append(("finish", unit))

    def release(self, item) -> None:
        if item in self.decoded:
            self.decoded.remove(item)
            return
        unit = item.unit if isinstance(item, Stored) else item
        del self.present[unit]
        self.calls.append(("release", unit))

    def stored_nbytes(self, unit: int) -> int:
        return self.stored

    def starts(self) -> list[int]:
        return [unit for call, unit in self.calls if call == "start"]


def make(units: int = 10, capacity: int = 5) -> tuple[Prefetcher, FakeMover]:
    mover = FakeMover()
    return Prefetcher(mover, dict.fromkeys(range(units), 1), capacity), mover


def visit(prefetcher: Prefetcher, units) -> None:
    for unit in units:
        prefetcher.use(unit)
        prefetcher.unpin(unit)


def update(prefetcher: Prefetcher, mover: FakeMover, unit: int) -> None:
    """A unit of the backward pass: used, then taken by its update."""
    prefetcher.use(unit)
    del mover.present[unit]
    prefetcher.done(unit)


def step(prefetcher: Prefetcher, mover: FakeMover, forward, backward=None) -> int:
    """One training pass: how many of its uses nobody foresaw."""
    visit(prefetcher, forward)
    for unit in reversed(list(forward)) if backward is None else backward:
        update(prefetcher, mover, unit)
    on_demand = prefetcher.training.on_demand
    prefetcher.forget(forward)
    prefetcher.end_training_pass()
    return on_demand


def infer(prefetcher: Prefetcher, units) -> None:
    prefetcher.begin_inference()
    visit(prefetcher, units)
    prefetcher.end_inference()


def test_the_second_pass_foresees_every_use():
    prefetcher, mover = make()
    assert step(prefetcher, mover, range(10)) == 0  # nothing to foresee with
    mover.calls.clear()
    assert step(prefetcher, mover, range(10)) == 0
    begun = set()
    for (call, unit), after in zip(mover.calls, [*mover.calls[1:], ("", -1)], strict=True):
        begun |= {unit} if call == "start" else set()
        if call == "start" and len(begun) < 10:
            assert after != ("finish", unit), f"{unit} was started only when it was needed"


def test_the_plans_fetches_are_what_the_mover_starts():
    prefetcher, mover = make()
    step(prefetcher, mover, range(10))
    for _ in range(3):
        before = len(mover.starts()) - len(mover.present)
        visit(prefetcher, range(10))
        for unit in reversed(range(10)):
            update(prefetcher, mover, unit)
        assert prefetcher.training.fetched == mover.starts()[before:]
        prefetcher.end_training_pass()
    assert prefetcher.training.fetched is not None


def test_the_first_units_of_the_next_pass_go_out_at_the_step():
    prefetcher, mover = make()
    step(prefetcher, mover, range(10))
    assert list(mover.present) == [0, 1, 2, 3, 4]


def test_a_changed_graph_is_served_counted_and_planned_anew():
    prefetcher, mover = make()
    step(prefetcher, mover, range(10))
    changed = [9, 0, 8, 1, 7, 2, 6, 3, 5, 4]
    assert step(prefetcher, mover, changed) > 0
    assert step(prefetcher, mover, changed) == 0


def test_an_added_use_costs_itself_and_what_it_pushed_out():
    prefetcher, mover = make(12)
    step(prefetcher, mover, range(10))
    assert step(prefetcher, mover, [0, 1, 2, 3, 11, 4, 5, 6, 7, 8, 9], [*reversed(range(10)), 11]) <= 3
    prefetcher, mover = make(12)
    step(prefetcher, mover, range(10))
    assert step(prefetcher, mover, range(10), [9, 8, 7, 6, 11, 5, 4, 3, 2, 1, 0]) <= 2


def test_a_branch_that_was_left_out_costs_at_most_a_few_uses_on_demand():
    prefetcher, mover = make(30)
    step(prefetcher, mover, range(30))
    assert step(prefetcher, mover, [*range(10), *range(20, 30)]) <= 6


def test_bytes_are_not_promised_for_a_pass_that_left_its_plan():
    prefetcher, mover = make()
    step(prefetcher, mover, range(10))
    assert prefetcher.training.fetched is not None
    visit(prefetcher, [5])
    assert prefetcher.training.fetched is None


def test_inference_between_passes_has_its_own_plan():
    prefetcher, mover = make()
    step(prefetcher, mover, range(10))
    infer(prefetcher, range(10))
    assert step(prefetcher, mover, range(10)) == 0
    infer(prefetcher, range(10))
    assert prefetcher.training.on_demand == 0
    assert step(prefetcher, mover, range(10)) == 0


def test_inference_that_fits_reads_its_units_once():
    prefetcher, mover = make(capacity=10)
    for _ in range(5):
        infer(prefetcher, range(10))
    assert len(mover.starts()) == 10


def test_inference_in_a_loop_keeps_what_memory_can_hold():
    prefetcher, mover = make(units=20, capacity=16)
    for _ in range(20):
        infer(prefetcher, range(20))
    assert len(mover.starts()) / 20 < 12  # the least recently used would read all 20


def test_inference_in_the_middle_of_a_step_leaves_memory_to_the_step():
    prefetcher, mover = make()
    step(prefetcher, mover, range(10))
    infer(prefetcher, range(10))
    visit(prefetcher, range(10))
    infer(prefetcher, range(10))
    for unit in reversed(range(10)):
        update(prefetcher, mover, unit)
    assert prefetcher.training.on_demand <= 5  # what the window held, and not the rest


def test_visits_change_no_plan():
    prefetcher, mover = make()
    for _ in range(2):
        step(prefetcher, mover, range(10))
        infer(prefetcher, range(10))
    plans = prefetcher.training.plan, prefetcher.inference.plan
    for unit in range(10):  # a checkpoint between two steps
        prefetcher.begin_inference(visit=True)
        prefetcher.use(unit)
        prefetcher.unpin(unit)
        prefetcher.end_inference()
    assert (prefetcher.training.plan, prefetcher.inference.plan) == plans
    assert step(prefetcher, mover, range(10)) == 0


def test_stale_copies_are_dropped_and_others_stay():
    prefetcher, mover = make()
    visit(prefetcher, [0, 1, 2, 3])
    prefetcher.use(4)
    prefetcher.forget([1, 3, 4, 9])
    assert set(mover.present) == {0, 2, 4}  # 4 is pinned
    prefetcher.forget()
    assert set(mover.present) == {4}


def test_a_pinned_unit_stays_until_its_last_user_ends():
    prefetcher, mover = make(capacity=2)
    prefetcher.use(0)
    prefetcher.use(0)
    prefetcher.unpin(0)
    visit(prefetcher, range(1, 10))
    assert mover.present[0]
    prefetcher.unpin(0)
    visit(prefetcher, range(1, 10))
    assert 0 not in mover.present


# --- routed units ---------------------------------------------------------------------------------

#: Units of each layer: an ordinary one, and tiles of two products of its experts.
LAYERS = [(0, [1, 2, 3], [4, 5]), (6, [7, 8, 9], [10, 11]), (12, [13, 14, 15], [16, 17])]


def routed(capacity: int, head: int = 0) -> tuple[Prefetcher, FakeMover]:
    """Return a prefetcher of LAYERS, and of so many ordinary units after them."""
    mover = FakeMover()
    tiles = {tile for _, first, second in LAYERS for tile in (*first, *second)}
    return Prefetcher(mover, dict.fromkeys(range(18 + head), 1), capacity, routed=tiles), mover


def forward(prefetcher: Prefetcher, layers=LAYERS, *, recomputed: bool = False) -> None:
    for own, first, second in layers:
        visit(prefetcher, [own])
        for tiles, coming in ((first, second), (second, [])):
            for at, tile in enumerate(tiles):
                prefetcher.use(tile, [*tiles[at + 1 :], *coming], recomputed=recomputed)
                prefetcher.unpin(tile)


def arrives(prefetcher: Prefetcher, tile: int) -> bool:
    return tile in prefetcher.residents or Stored(tile) in prefetcher.residents


def backward(prefetcher: Prefetcher, layers=LAYERS) -> list[int]:
    """Return the tiles that had not begun to arrive when they were used."""
    late = []
    for own, first, second in reversed(layers):
        for unit in (*reversed(second), *reversed(first), own):
            late += [unit] if unit in prefetcher.routed and not arrives(prefetcher, unit) else []
            visit(prefetcher, [unit])
    return late


def test_tiles_of_the_next_product_begin_to_arrive_with_those_of_this_one():
    prefetcher, mover = routed(6)
    forward(prefetcher, LAYERS[:1])
    assert mover.calls[:7] == [
        ("start", 0), ("finish", 0), ("start", 1), ("start", 2), ("start", 3), ("start", 4), ("start", 5),
    ]  # fmt: skip


def test_backward_brings_the_tiles_of_earlier_layers_before_it_comes_to_them():
    prefetcher, mover = routed(5)
    for _ in range(2):
        forward(prefetcher)
        mover.calls.clear()
        assert backward(prefetcher) == []
        started = [unit for unit in mover.starts() if unit in prefetcher.routed]
        assert len(started) == len(set(started)), "each of them once"
        prefetcher.end_training_pass()


def test_tiles_of_a_block_that_is_recomputed_are_used_in_another_order():
    prefetcher, mover = routed(5)
    forward(prefetcher)
    for layer in reversed(LAYERS):
        mover.calls.clear()
        forward(prefetcher, [layer], recomputed=True)
        assert backward(prefetcher, [layer]) == []
        started = {unit for unit in mover.starts() if unit in prefetcher.routed}
        assert started <= {*layer[1], *layer[2]}, "none of a block whose turn has not come"
    assert not prefetcher.tiles.to_come


def test_blocks_before_one_that_was_recomputed_may_not_be():
    prefetcher, _ = routed(5)
    forward(prefetcher)
    forward(prefetcher, LAYERS[-1:], recomputed=True)
    backward(prefetcher)
    assert not prefetcher.tiles.to_come


def test_plans_leave_room_for_the_tiles_that_micro_batches_use_one_after_another():
    prefetcher, mover = routed(7)
    prefetcher.room.together_nbytes = 5
    for _ in range(3):
        for layer in LAYERS:
            for _ in range(4):
                forward(prefetcher, [layer])
        started = [unit for unit in mover.starts() if unit in prefetcher.routed]
        mover.calls.clear()
        prefetcher.forget(prefetcher.routed)
        prefetcher.end_training_pass()
    assert sorted(started) == sorted(prefetcher.routed), "each of them once"


def test_tiles_take_half_of_a_small_room_and_of_a_large_one_what_keeps_them_coming(monkeypatch):
    monkeypatch.setattr("infinity.partition.prefetcher.TILES_NBYTES", 8)
    tiles = dict.fromkeys(range(1, 101), 1)
    for capacity, kept in ((10, 5), (16, 8), (20, 8), (32, 8), (100, 25), (1000, 100)):
        room = TileRoom({0: 1, **tiles}, tiles, capacity)
        assert capacity - room.planned_nbytes == kept
        assert room.part_nbytes == kept // 2, "those of the next part come into as much again"
        room.hold_together([set()])
        assert not room.keeps_decoded, "blocks whose experts run in parts keep no tile"


@pytest.mark.parametrize(("most", "stays"), [(4, True), (10**9, False)])
def test_what_each_micro_batch_uses_stays_beside_tiles_that_take_a_small_part(monkeypatch, most, stays):
    monkeypatch.setattr("infinity.partition.prefetcher.TILES_NBYTES", most)
    prefetcher, mover = routed(12, head=7)
    for _ in range(3):
        mover.calls.clear()
        forward(prefetcher)
        for _ in range(4):
            visit(prefetcher, range(18, 25))
        backward(prefetcher)
        prefetcher.end_training_pass()
    assert (len([unit for unit in mover.starts() if unit >= 18]) <= 7) == stays


def test_before_there_is_a_plan_units_of_earlier_layers_go_before_the_tiles_of_this_one():
    prefetcher, mover = routed(7)
    prefetcher.room.hold_together([[*first, *second] for _, first, second in LAYERS])
    for layer in LAYERS:
        for _ in range(4):
            forward(prefetcher, [layer])
    started = [unit for unit in mover.starts() if unit in prefetcher.routed]
    assert sorted(started) == sorted(prefetcher.routed), "each of them once"


def test_before_there_is_a_plan_tiles_of_blocks_go_before_what_each_micro_batch_uses_after_them():
    prefetcher, mover = routed(7, head=5)
    forward(prefetcher)
    for _ in range(4):
        visit(prefetcher, range(18, 23))
    assert [unit for unit in mover.starts() if unit >= 18] == [*range(18, 23)], "each of them once"


def test_tiles_that_both_steps_before_used_arrive_before_the_router_has_chosen():
    prefetcher, mover = routed(12)
    for own in ([7, 8], [8, 9], [8, 9]):
        mover.calls.clear()
        layers = [LAYERS[0], (6, own, [10, 11]), LAYERS[2]]
        forward(prefetcher, layers[:1])
        expected = [unit for unit in (7, 8, 9, 10, 11) if arrives(prefetcher, unit)]
        forward(prefetcher, layers[1:])
        backward(prefetcher, layers)
        prefetcher.end_training_pass()
    assert expected == [8, 10, 11]


def test_expected_tiles_that_the_router_did_not_choose_make_room_for_those_that_it_did():
    prefetcher, mover = routed(8)
    for _ in range(2):
        forward(prefetcher, LAYERS[:2])
        prefetcher.end_training_pass()
    forward(prefetcher, LAYERS[:1])
    assert arrives(prefetcher, 7)
    forward(prefetcher, [(6, [13, 14, 15], [16, 17])])
    assert not arrives(prefetcher, 7)
    assert len(mover.present) <= 8


def test_what_the_plan_fetches_comes_after_the_tiles_that_the_router_chose():
    prefetcher, mover = routed(9)
    for _ in range(2):
        forward(prefetcher)
        backward(prefetcher)
        mover.calls.clear()
        prefetcher.end_training_pass()
    forward(prefetcher, LAYERS[:2])
    starts, tiles = mover.starts(), [unit for layer in LAYERS[:2] for unit in (*layer[1], *layer[2])]
    assert [unit for unit in starts if unit in prefetcher.routed][: len(tiles)] == tiles
    between = [unit for unit in starts[starts.index(tiles[0]) : starts.index(tiles[4])] if unit not in tiles]
    assert between == []


# --- routed units that come in two steps -------------------------------------------------------------

#: Of a full buffer and of what it is decoded from.
FULL, STORED = 10, 5


def in_two_steps(capacity: int) -> tuple[Prefetcher, FakeMover]:
    mover, tiles = FakeMover(STORED), {tile for _, first, second in LAYERS for tile in (*first, *second)}
    sizes = {unit: FULL + STORED if unit in tiles else 1 for unit in range(18)}
    return Prefetcher(mover, sizes, capacity, routed=tiles), mover


def held(prefetcher: Prefetcher, mover: FakeMover) -> int:
    """Bytes that are leased, counted by the mover."""
    sizes = [STORED if unit in prefetcher.routed else 1 for unit in mover.present]
    return sum(sizes) + FULL * len(mover.decoded)


@given(st.integers(2 * (FULL + STORED) + 2, 300), st.booleans())
@fast
def test_stored_bytes_and_full_values_together_never_exceed_the_capacity(capacity, together):
    prefetcher, mover = in_two_steps(capacity)
    if together:
        prefetcher.room.hold_together([[*first, *second] for _, first, second in LAYERS])
    peak = 0
    for name in ("start", "finish"):
        call = getattr(mover, name)

        def checked(unit: int, name=name, call=call) -> None:
            nonlocal peak
            call(unit)
            peak = max(peak, held(prefetcher, mover))
            assert name != "finish" or unit not in prefetcher.routed or unit in mover.decoded

        setattr(mover, name, checked)
    for _ in range(3):
        for layer in LAYERS:
            for _ in range(2 if together else 1):
                forward(prefetcher, [layer])
        backward(prefetcher)
        prefetcher.end_training_pass()
        assert prefetcher.residents.nbytes == held(prefetcher, mover)
    assert peak <= capacity


def test_tiles_arrive_in_their_stored_form_before_there_is_room_to_decode_them():
    prefetcher, mover = in_two_steps(2 * FULL + 5 * STORED + 1)
    prefetcher.use(0)
    prefetcher.unpin(0)
    prefetcher.use(1, [2, 3, 4, 5])
    assert mover.starts() == [0, 1, 2, 3, 4, 5]
    assert mover.decoded == {1, 2}
    prefetcher.unpin(1)
    prefetcher.use(2, [3, 4, 5])
    assert mover.decoded == {2, 3}, "full buffers take turns"
    assert 1 in mover.present, "its stored bytes stay: backward decodes them again"


def test_tiles_that_stay_for_backward_are_not_read_again(monkeypatch):
    monkeypatch.setattr("infinity.partition.prefetcher.DECODED_AHEAD_NBYTES", 0)
    prefetcher, mover = in_two_steps((1 + DECODED_AHEAD) * FULL + 15 * STORED + 3)
    forward(prefetcher)
    assert backward(prefetcher) == []
    started = [unit for unit in mover.starts() if unit in prefetcher.routed]
    assert sorted(started) == sorted(prefetcher.routed), "each of them once, though few are decoded"


def test_as_many_tiles_are_decoded_ahead_as_have_the_bytes(monkeypatch):
    for nbytes, ahead in ((0, DECODED_AHEAD), (7 * FULL, 7), (10**6, 10)):
        monkeypatch.setattr("infinity.partition.prefetcher.DECODED_AHEAD_NBYTES", nbytes)
        prefetcher, mover = in_two_steps(22 * FULL)
        tiles = sorted(prefetcher.routed)
        prefetcher.use(tiles[0], tiles[1:])
        assert mover.decoded == set(tiles[: 1 + ahead])


def test_micro_batches_of_a_block_decode_its_tiles_once_if_memory_has_room_for_them():
    for capacity, once in ((5 * (FULL + STORED) + 2, True), (2 * FULL + 5 * STORED + 2, False)):
        prefetcher, mover = in_two_steps(capacity)
        prefetcher.room.hold_together([[*first, *second] for _, first, second in LAYERS])
        for layer in LAYERS:
            for _ in range(4):
                forward(prefetcher, [layer])
        decoded = [unit for call, unit in mover.calls if call == "decode"]
        assert (sorted(decoded) == sorted(prefetcher.routed)) == once
        started = [unit for unit in mover.starts() if unit in prefetcher.routed]
        assert sorted(started) == sorted(prefetcher.routed), "each of them once"


# --- by property --------------------------------------------------------------------------------


@st.composite
def passes(draw):
    """A few passes of random events over eight units: (kind of pass, events)."""
    event = st.tuples(st.sampled_from(("use", "use", "use", "nest", "unpin", "done")), st.integers(0, 7))
    several = st.lists(st.tuples(st.booleans(), st.lists(event, max_size=25)), min_size=1, max_size=5)
    out = draw(several)
    if draw(st.booleans()):  # like real training: the same again, perhaps with something added
        out = [*out, *out]
    return out


def play(prefetcher: Prefetcher, mover: FakeMover, several) -> None:
    for inference, events in several:
        if inference:
            prefetcher.begin_inference()
        pins: list[int] = []
        dead: set[int] = set()
        for kind, unit in events:
            if kind == "unpin" and pins:
                prefetcher.unpin(pins.pop())
            elif kind == "done" and not inference and unit in mover.present and unit not in pins:
                update(prefetcher, mover, unit)
                dead.add(unit)
            elif kind in ("use", "nest") and unit not in dead:
                prefetcher.use(unit)
                assert mover.present[unit], "a use returns when the unit is there"
                if kind == "nest" and len(pins) < 2:
                    pins.append(unit)
                else:
                    prefetcher.unpin(unit)
            assert set(mover.present) == set(prefetcher.residents)
            assert sum(prefetcher.nbytes[u] for u in mover.present) <= prefetcher.residents.capacity_nbytes
            assert all(mover.present.get(unit) for unit in pins), "a pinned unit stays"
        for unit in pins:
            prefetcher.unpin(unit)
        if inference:
            prefetcher.end_inference()
        else:
            prefetcher.forget(dead)
            prefetcher.end_training_pass()


@fast
@given(passes(), st.lists(st.integers(1, 9), min_size=8, max_size=8), st.integers(0, 40))
def test_whatever_happens_uses_are_served_within_the_budget(several, sizes, more):
    mover = FakeMover()
    capacity = sum(sorted(sizes)[-3:]) + more  # two that are pinned and one that is used
    play(Prefetcher(mover, dict(enumerate(sizes)), capacity), mover, several)


@fast
@given(passes(), st.integers(3, 9))
def test_equal_events_give_equal_calls(several, capacity):
    logs = []
    for _ in range(2):
        prefetcher, mover = make(8, capacity)
        play(prefetcher, mover, several)
        logs.append(mover.calls)
    assert logs[0] == logs[1]


@fast
@given(st.lists(st.integers(0, 7), min_size=1, max_size=30), st.integers(2, 9))
def test_any_pass_that_is_repeated_is_foreseen(units, capacity):
    prefetcher, _ = make(8, capacity)
    for _ in range(3):
        visit(prefetcher, units)
        on_demand = prefetcher.training.on_demand
        prefetcher.end_training_pass()
        assert on_demand == 0


def test_frozen_tiles_stay_from_one_step_to_the_next() -> None:
    mover = FakeMover()
    mover.units = defaultdict(lambda: SimpleNamespace(trainable=()))
    prefetcher = Prefetcher(mover, {0: 1, 1: 1}, 8, routed=[1])
    for _ in range(3):
        for unit, following in ((0, None), (1, ())):
            prefetcher.use(unit, following)
            prefetcher.unpin(unit)
        prefetcher.end_training_pass()
    assert mover.calls.count(("start", 1)) == 1


@pytest.mark.parametrize("tiles", [[], [set()]])
def test_stored_bytes_of_large_tiles_have_room_beside_full_buffers(tiles: list[set[int]]) -> None:
    room = TileRoom(dict.fromkeys(range(64), 3 << 28), dict.fromkeys(range(64), 1 << 28), 40 << 28)
    room.hold_together(tiles)
    assert (room.slots_nbytes >> 28, room.planned_nbytes >> 28) == (10, 20)
    assert room.part_nbytes >> 28 == 5  # two parts': nothing stays for another group
