"""Ranks agree once a step, and on whatever leaves the order of the step before."""

import time
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.comm import agreement
from infinity.comm.agreement import KINDS, KnownOrder, Want
from infinity.comm.ranks import open_ranks
from tests.helpers.cases import examples
from tests.helpers.launch import RanksError, run_ranks
from tests.helpers.limits import HANG_S

RANKS = 3
kinds = st.sampled_from(["gather", "reduce", "sum", "check"])


@st.composite
def programs(draw: st.DrawFn) -> list[list[list[Want]]]:
    """Steps of collectives, each as all ranks want it: those of the step before, and at times others."""
    steps, calls = list[list[list[Want]]](), list[tuple[str, int]]()
    for _ in range(draw(st.integers(2, 6))):
        if not calls or draw(st.integers(0, 3)) == 0:
            calls = draw(st.lists(st.tuples(kinds, st.integers(0, 2)), min_size=1, max_size=6))
        step = []
        for kind, item in calls:
            digests = [1] * RANKS if kind == "reduce" else [0] * RANKS
            if kind == "reduce" and draw(st.integers(0, 5)) == 0:
                digests = draw(st.lists(st.integers(0, 2), min_size=RANKS, max_size=RANKS))
            step.append([Want(KINDS.index(kind), item, digest) for digest in digests])
        steps.append(step)
    return steps


def take(orders: Sequence[KnownOrder], wants: Sequence[Want], step: int) -> int:
    """Let all ranks take a collective; return how many asked, before those that had not asked joined them."""
    for order in orders:
        order.begin(step)
    digests = [order.digest for order in orders]
    follows = [order.expects(want) for order, want in zip(orders, wants, strict=True)]
    if not all(follows):
        known = digests[0] > 0 and len(set(digests)) == 1
        same = len({want.digest for want in wants}) == 1
        for order, want, followed in zip(orders, wants, follows, strict=True):
            if followed:
                assert want.kind >= KINDS.index("gather")  # else it may have ended before the others began
                assert want.digest or KINDS[want.kind] != "reduce"  # nothing would be reduced
                order.retract()
            order.agreed(want, same=same, known=known)
    return RANKS - sum(follows)


@examples(300)
@given(programs())
def test_ranks_with_one_program_have_one_order_whatever_parameters_they_use(steps):
    orders = [KnownOrder(asks_reductions=False) for _ in range(RANKS)]
    alone = 0
    for number, step in enumerate(steps):
        for wants in step:
            alone += take(orders, wants, number) in range(1, RANKS)
        assert len({tuple(order._now) for order in orders}) == 1
        assert len({order.asks_reductions for order in orders}) == 1
    assert alone <= 1  # the others notice late, so from then on reductions are asked for


@examples(300)
@given(programs(), st.data())
def test_who_asks_nobody_wants_what_all_others_want(steps, data):
    """A rank with another program never takes a collective that the others do not."""
    orders = [KnownOrder(asks_reductions=data.draw(st.booleans())) for _ in range(RANKS)]
    place = data.draw(st.integers(0, sum(map(len, steps)) - 1))
    for number, step in enumerate(steps):
        for wants in step:
            if place == 0:
                other = wants[0]._replace(item=3)
                for order in orders:
                    order.begin(number)
                follows = [orders[0].expects(other), *(o.expects(w) for o, w in zip(orders[1:], wants[1:]))]
                assert not follows[0]
                return
            take(orders, wants, number)
            place -= 1


def test_a_step_without_end_is_remembered_so_far(monkeypatch):
    monkeypatch.setattr(agreement, "MOST_KNOWN", 4)
    orders = [KnownOrder(asks_reductions=False) for _ in range(RANKS)]
    for step in range(3):
        wants = [Want(2, unit) for unit in range(6)]
        asked = [take(orders, [want] * RANKS, step) for want in wants]
        assert asked == ([RANKS] * 6 if step == 0 else [RANKS] + [0] * 3 + [RANKS] * 2)
        assert all(len(order._now) == 4 for order in orders)


def steps_of(kinds: str) -> tuple[list[int], list[bytes]]:
    """Run a step of two gathers, a reduction and a sum for each letter; asked for, and parameters used.

    Letters: ``k``, as before; ``e``, with another sum; ``u``, rank 1 uses another parameter.
    """
    ranks = open_ranks(torch.device("cpu"), HANG_S, lambda error: None)
    ours = ranks.collectives
    assert ours is not None
    full, spare, out, asked, used = torch.zeros(4), torch.zeros(4), torch.zeros(2), list[int](), list[bytes]()
    for kind in kinds:
        before = ours._agreement.asked
        mine = b"\1\0" if kind != "u" or ranks.rank == 0 else b"\0\1"
        for unit in range(2):
            full.chunk(2)[ranks.rank].fill_(unit + ranks.rank)
            gathered = ours.gather(unit, f"unit {unit}", lambda: full).value()
            assert gathered.tolist() == [unit, unit, unit + 1, unit + 1]
        ours.reduce(
            0, "unit 0", lambda: (full, spare, out), mine, lambda each, ends: used.append(each)
        ).wait()
        assert out.tolist() == [[1, 1], [2, 2]][ranks.rank]
        assert ranks.sum(ranks.rank, "a sum") == 1
        if kind == "e":
            assert ranks.least(ranks.rank, "another") == 0
        ours.step += 1
        asked.append(ours._agreement.asked - before)
    ours.close()
    return asked, used


def test_a_step_like_the_one_before_asks_once():
    for asked, _ in run_ranks(steps_of, 2, "kkkeekk"):
        # a sum more is asked for at the end of the first such step, and a step without it is over earlier
        assert asked == [4, 1, 1, 2, 1, 1, 1]


def test_a_rank_that_uses_other_parameters_is_heard_by_those_that_did_not_ask():
    for asked, used in run_ranks(steps_of, 2, "kkukk"):
        assert asked == [4, 1, 2, 2, 2]  # from then on reductions are asked for
        assert used == [b"\1\0", b"\1\0", b"\1\1", b"\1\0", b"\1\0"]


def late_sets() -> None:
    """Run steps in which the sets of parameters used differ, and rank 1 is late with them and after them."""
    ranks = open_ranks(torch.device("cpu"), HANG_S, lambda error: None)
    ours = ranks.collectives
    assert ours is not None
    exchange, late_s = ours._agreement._of_all_ranks, 0.0

    def late(mine: torch.Tensor, group: object) -> torch.Tensor:
        time.sleep(late_s if mine.dtype == torch.uint8 else 0)
        return exchange(mine, group)

    ours._agreement._of_all_ranks = late
    full, spare, out = torch.zeros(4), torch.zeros(4), torch.zeros(2)
    for step in range(4):
        late_s = 0.7 if ranks.rank == 1 and step == 3 else 0.0
        for unit in range(2):
            ours.gather(unit, f"unit {unit}", lambda: full).value()
        mine = b"\1\1" if ranks.rank == 0 else b"\1\0"
        ours.reduce(0, "unit 0", lambda: (full, spare, out), mine, lambda used, ends: None).wait()
        time.sleep(late_s)
        for unit in range(2):
            ours.gather(unit, f"unit {unit}", lambda: full).value()
        ours.step += 1
    ours.close()


def test_a_rank_that_is_late_with_its_set_calls_nobody_to_another_exchange():
    run_ranks(late_sets, 2)


def other_way(after: int) -> None:
    ranks = open_ranks(torch.device("cpu"), HANG_S, lambda error: None)
    ours = ranks.collectives
    assert ours is not None
    for step in range(after + 1):
        for unit in range(3):
            item = 7 if (ranks.rank, step, unit) == (1, after, 1) else unit
            full = torch.zeros(16 if item == 7 else 4)
            ours.gather(item, f"unit {item}", lambda full=full: full).wait()
        ours.step += 1


def values_of_one() -> None:
    ours = open_ranks(torch.device("cpu"), HANG_S, lambda error: None).collectives
    assert ours is not None
    kind = ["gather", "values"][ours.rank]
    ours.gather(0, "unit 0", lambda: torch.zeros(4 * (1 + ours.rank)), kind=kind).wait()


def test_weights_and_exact_values_of_one_unit_are_told_apart():
    with pytest.raises(RanksError, match=r"rank 0 wants gather unit 0 .*; rank 1 wants values unit 0 "):
        run_ranks(values_of_one, 2)


def test_a_rank_that_leaves_a_known_order_alone_ends_in_an_error_that_names_both_wants():
    began = time.monotonic()
    try:
        run_ranks(other_way, 2, 3)
    except RanksError as error:
        told = str(error)
    assert told.count("DivergenceError") >= 2
    assert "rank 0 wants gather unit 1 (step 4); rank 1 wants gather unit 7 (step 4)" in told
    assert time.monotonic() - began < HANG_S / 2
