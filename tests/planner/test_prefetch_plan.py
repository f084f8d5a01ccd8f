"""The plan of a pass, by property: what is there, when, and how few fetches it takes."""

import time
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.planner import prefetch_plan
from infinity.planner.prefetch_plan import LEAD, Event, Kind, Plan, make_plan, runs_of
from tests.helpers.cases import examples, few

fast = examples(150)


@dataclass(frozen=True)
class Case:
    events: tuple[Event, ...]
    nbytes: dict[int, int]
    capacity: int
    can_stay: frozenset[int] = frozenset()

    def plan(self, lead: int = LEAD, capacity: int | None = None) -> Plan:
        return planned(self.events, self.nbytes, capacity or self.capacity, lead, self.can_stay)


def planned(events, nbytes, capacity: int, lead: int = LEAD, can_stay=()) -> Plan:
    """The plan with the units of ``lead`` uses on their way in any case."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefetch_plan, "LEAD", lead)
        return make_plan(events, nbytes, capacity, can_stay)


def visits(units) -> list[Event]:
    """Each unit is used and let go before the next."""
    return [Event(kind, unit) for unit in units for kind in (Kind.USE, Kind.UNPIN)]


def once(units) -> list[Event]:
    """The same in a pass after which nothing may stay."""
    return visits(units) + [Event(Kind.DONE, unit) for unit in dict.fromkeys(units)]


def pinned_peak(events, nbytes) -> int:
    """The most bytes that are pinned at one time."""
    pins: Counter[int] = Counter()
    peak = 0
    for event in events:
        pins[event.unit] += {Kind.USE: 1, Kind.UNPIN: -1, Kind.DONE: -pins[event.unit]}[event.kind]
        peak = max(peak, sum(nbytes[u] for u, n in pins.items() if n))
    return peak


@st.composite
def cases(draw, again: bool = True) -> Case:
    """Nested uses, several pins of one unit, units that are updated (and used ``again``); any room."""
    units = draw(st.integers(1, 8))
    nbytes = {u: draw(st.integers(1, 20)) for u in range(units)}
    events: list[Event] = []
    pins: list[int] = []
    alive = set(range(units))
    for action, pick in draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 99)), max_size=60)):
        unit = pick % units
        if action == 6 and len(alive) > 1 and unit in alive:
            alive.discard(unit)
            pins = [u for u in pins if u != unit]
            events.append(Event(Kind.DONE, unit))
        elif action >= 4 and pins:
            events.append(Event(Kind.UNPIN, pins.pop(pick % len(pins))))
        elif again or unit in alive:
            events.append(Event(Kind.USE, unit))
            if action == 0 and len(pins) < 3:
                pins.append(unit)
            else:
                events.append(Event(Kind.UNPIN, unit))
    events += [Event(Kind.UNPIN, unit) for unit in pins]
    least = max(pinned_peak(events, nbytes), max(nbytes.values()))
    can_stay = frozenset(draw(st.sets(st.sampled_from(range(units)))))
    return Case(tuple(events), nbytes, least + draw(st.integers(0, 60)), can_stay)


def replay(case: Case, plan: Plan):
    """Yield ``(event, present before, actions, present after, pinned after)`` of every position."""
    present, pins = set(plan.begin), Counter()
    for event, actions in zip(plan.events, plan.actions, strict=True):
        pins[event.unit] += {Kind.USE: 1, Kind.UNPIN: -1, Kind.DONE: -pins[event.unit]}[event.kind]
        if event.kind is Kind.DONE and event.unit not in plan.stays:
            present.discard(event.unit)
        before = set(present)
        present -= set(actions.release)
        present |= set(actions.fetch)
        yield event, before, actions, set(present), {u for u, n in pins.items() if n}


@fast
@given(cases(), st.integers(0, 4))
def test_memory_is_never_above_its_capacity(case, lead):
    plan = case.plan(lead)
    for _, _, _, present, _ in replay(case, plan):
        assert sum(case.nbytes[u] for u in present) <= case.capacity
    assert sum(case.nbytes[u] for u in plan.begin) <= case.capacity
    assert plan.peak_nbytes <= case.capacity


@fast
@given(cases(), st.integers(0, 4), st.integers(1, 10))
def test_only_what_is_pinned_may_exceed_the_capacity(case, lead, part):
    capacity = max(1, pinned_peak(case.events, case.nbytes) * part // 10)
    plan = case.plan(lead, capacity)
    for position, (_, _, _, present, pinned) in enumerate(replay(case, plan)):
        goes_on = {run.unit for run in runs_of(case.events) if run.first <= position < run.last}
        nbytes = sum(case.nbytes[u] for u in present)
        assert nbytes <= capacity or present == pinned | goes_on or len(present) == 1


@fast
@given(cases(), st.integers(0, 4))
def test_every_use_finds_its_unit_and_nothing_is_fetched_twice(case, lead):
    plan = case.plan(lead)
    assert len(set(plan.begin)) == len(plan.begin)
    for event, before, actions, present, pinned in replay(case, plan):
        if event.kind is Kind.USE:
            assert event.unit in before or event.unit in actions.fetch
        assert not set(actions.fetch) & before
        assert len(set(actions.fetch)) == len(actions.fetch)
        assert pinned <= present


@fast
@given(cases(), st.integers(0, 4))
def test_a_release_is_of_something_present_that_nobody_pins(case, lead):
    plan = case.plan(lead)
    for event, before, actions, _, pinned in replay(case, plan):
        assert set(actions.release) <= before - pinned
        assert not set(actions.release) & set(actions.fetch), event


@fast
@given(cases(again=False))  # an update takes away what was fetched to be used after it
def test_fetches_come_in_the_order_of_uses_and_each_is_used(case):
    plan = case.plan()
    waiting = list(plan.begin)
    for event, _, actions, _, _ in replay(case, plan):
        waiting += actions.fetch
        if event.kind is Kind.USE and event.unit in waiting:
            waiting.remove(event.unit)
        assert not set(actions.release) & set(waiting), "released before it was used"
    assert not waiting


@fast
@given(cases())
def test_the_plan_depends_on_its_arguments_only(case):
    plans = [case.plan() for _ in range(2)]
    assert plans[0] == plans[1]
    shuffled = replace(case, events=list(case.events), nbytes=dict(reversed(case.nbytes.items())))
    assert shuffled.plan() == plans[0]


@fast
@given(cases())
def test_what_stays_for_the_next_pass_is_there_at_its_end(case):
    plan = case.plan()
    *_, last = [set(plan.begin), *(present for _, _, _, present, _ in replay(case, plan))]
    assert plan.stays <= last
    assert plan.stays <= set(plan.begin)
    updated = {event.unit for event in case.events if event.kind is Kind.DONE}
    assert not (plan.stays & updated) - case.can_stay


def test_a_unit_that_the_second_walk_drops_does_not_count_as_staying():
    use, unpin = (lambda unit: Event(Kind.USE, unit)), (lambda unit: Event(Kind.UNPIN, unit))
    events = (
        use(4), unpin(4), use(2), use(0), use(2), use(3), unpin(3), use(0), unpin(0), use(2), unpin(2),
        use(0), unpin(0), use(1), unpin(1), unpin(2), unpin(0), unpin(2),
    )  # fmt: skip
    case = Case(events, dict.fromkeys(range(5), 1), 4)
    *_, last = (present for _, _, _, present, _ in replay(case, case.plan()))
    assert case.plan().stays <= last


def test_a_unit_that_cannot_stay_until_the_end_leaves_with_its_update():
    events = (Event(Kind.USE, 2), Event(Kind.DONE, 2), *visits([0, 1]))
    case = Case(events, {0: 1, 1: 6, 2: 6}, 12, frozenset({2}))
    plan = case.plan(lead=0)
    for _, before, actions, _, _ in replay(case, plan):
        assert set(actions.release) <= before


# --- how few ----------------------------------------------------------------------------------


def belady(units, capacity: int) -> int:
    """Fewest fetches on demand: the unit that is used farthest ahead goes."""
    present: set[int] = set()
    fetches = 0
    for i, unit in enumerate(units):
        if unit in present:
            continue
        fetches += 1
        if len(present) == capacity:
            rest = list(units[i:])
            present.remove(max(present, key=lambda u: rest.index(u) if u in rest else len(rest)))
        present.add(unit)
    return fetches


def least_recently_used(units, capacity: int) -> int:
    present: dict[int, None] = {}
    fetches = 0
    for unit in units:
        if unit not in present:
            fetches += 1
            if len(present) == capacity:
                del present[next(iter(present))]
        present.pop(unit, None)
        present[unit] = None
    return fetches


sequences = st.lists(st.integers(0, 7), min_size=1, max_size=50)


def fetches(units, capacity: int, lead: int) -> int:
    plan = planned(once(units), dict.fromkeys(range(8), 10), capacity * 10, lead)
    return len(list(plan.fetched()))


@fast
@given(sequences, st.integers(1, 9))
def test_without_room_kept_to_fetch_ahead_fetches_are_as_few_as_possible(units, capacity):
    assert fetches(units, capacity, lead=0) == belady(units, capacity)


@fast
@given(sequences, st.integers(1, 9), st.integers(0, 4))
def test_fetches_are_never_more_than_of_the_least_recently_used(units, capacity, lead):
    assert fetches(units, capacity, lead) <= least_recently_used(units, capacity)


@pytest.mark.parametrize("capacity", range(4, 12))
def test_the_turn_from_forward_to_backward_costs_no_fetch(capacity):
    """The last units of the forward pass are the first of the backward pass."""
    units = list(range(20))
    events = visits(units) + [Event(k, u) for u in reversed(units) for k in (Kind.USE, Kind.DONE)]
    plan = make_plan(events, dict.fromkeys(units, 1), capacity)
    assert len(list(plan.fetched())) == 2 * len(units) - capacity


def test_a_loop_over_more_than_memory_reads_what_does_not_fit_and_room_to_fetch_ahead():
    units = list(range(20))
    plan = make_plan(visits(units * 50), dict.fromkeys(units, 1), 18)
    kept = 18 - 4  # beside the unit in use and the next three
    per_round = sum(len(actions.fetch) for actions in plan.actions) / 50
    assert per_round <= len(units) - kept + 1  # the least recently used would read all 20


# --- when -------------------------------------------------------------------------------------


@fast
@given(sequences.filter(lambda units: len(set(units)) > 1), st.integers(2, 9))
def test_the_next_unit_is_on_its_way_before_the_last_one_is_let_go(units, capacity):
    plan = make_plan(once(units), dict.fromkeys(range(8), 1), capacity)
    for event, before, actions, _, _ in replay(Case((), {}, capacity), plan):
        if event.kind is Kind.USE:
            assert event.unit in before - set(actions.fetch)


def test_as_much_as_fits_is_fetched_ahead():
    plan = make_plan(once(list(range(10))), dict.fromkeys(range(10), 1), 6)
    assert plan.begin == (0, 1, 2, 3, 4, 5)
    assert [a.fetch for a in plan.actions[:8]] == [(), (6,), (), (7,), (), (8,), (), (9,)]


def test_what_is_not_updated_stays_for_the_next_pass():
    plan = make_plan(visits([0, 1, 2]), dict.fromkeys(range(3), 1), 3)
    assert plan.begin == (0, 1, 2)
    assert not any(a.release or a.fetch for a in plan.actions)


def test_what_is_updated_where_it_is_stays_for_the_next_pass_as_far_as_memory_goes():
    units = list(range(20))
    events = visits(units) + [Event(k, u) for u in reversed(units) for k in (Kind.USE, Kind.DONE)]
    nbytes = dict.fromkeys(units, 1)
    for capacity in range(4, 20):
        plan = make_plan(events, nbytes, capacity, can_stay=units)
        assert plan.begin[: len(plan.stays)] == tuple(range(len(plan.stays)))
        assert len(plan.stays) >= capacity - LEAD  # beside the last units on their way
        assert len(list(plan.fetched())) <= 2 * len(units) - capacity - len(plan.stays) + LEAD
    everything = make_plan(events, nbytes, 20, can_stay=units)
    assert not list(everything.fetched())


@pytest.mark.parametrize("capacity", few((500, 25_000), (500, 5000, 25_000, 45_000, 60_000)))
def test_ten_thousand_events_are_planned_in_seconds(capacity):
    units = [*range(500), *reversed(range(500))] * 5
    nbytes = dict.fromkeys(range(500), 100)
    begin = time.process_time()
    make_plan(visits(units), nbytes, capacity)
    assert time.process_time() - begin < 10.0  # about one on a slow machine; a square law takes minutes


def test_a_unit_that_is_used_after_its_update_began_comes_again_and_does_not_stay():
    """Its gradients are complete before backward reads a frozen weight of it."""
    for can_stay in ((), (1,)):
        events = visits([0, 1]) + [Event(k, 1) for k in (Kind.USE, Kind.DONE, Kind.USE, Kind.UNPIN)]
        plan = planned(events, {0: 1, 1: 1}, 2, can_stay=can_stay)
        assert list(plan.fetched()) == [1, 1]
        assert plan.stays == {0}
