"""Rows hold what fits; every target is predicted once, or counted as left out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.app.data.packing import Plan, fit, plan_rows

SIZES = st.lists(st.integers(1, 40), max_size=60)


@settings(max_examples=200, deadline=None)
@given(SIZES)
def test_rows_hold_everything_and_no_more_than_they_can(sizes: list[int]) -> None:
    rows = fit(np.array(sizes, np.int64), 40)
    used = np.bincount(rows, weights=sizes).astype(int) if sizes else np.array([], int)
    assert (used > 0).all()
    assert (used <= 40).all()
    if len(used) > 1:  # any two that are emptiest would not go into one
        assert sum(sorted(used)[:2]) > 40


def test_complements_meet_in_full_rows() -> None:
    sizes = np.array([3, 7] * 500 + [6, 4] * 500 + [5] * 100)
    rows = fit(sizes, 10)
    assert np.bincount(rows, weights=sizes).tolist() == [10.0] * 1050


def test_many_documents_leave_hardly_a_gap() -> None:
    sizes = np.random.default_rng(0).integers(1, 2049, 400_000)
    rows = fit(sizes, 2048)
    assert rows.max() + 1 <= 1.01 * -(-sizes.sum() // 2048)


def documents(*lengths: int) -> np.ndarray:
    """Texts of these many tokens, end to end."""
    stops = np.cumsum(lengths)
    return np.stack([stops - lengths, stops, np.array(lengths)], axis=1)


def spans(plan: Plan) -> list[list[tuple[int, int]]]:
    """For each row the inputs of its pieces, from and up to."""
    both = [(int(a), int(a + n)) for a, n in zip(plan.pieces.starts, plan.pieces.sizes)]
    return [both[a:b] for a, b in zip(plan.firsts, plan.firsts[1:])]


def test_text_is_cut_so_that_each_token_is_predicted_once() -> None:
    plan = plan_rows(documents(11, 4), None, seq_len=4, packing=True)
    assert sorted(span for row in spans(plan) for span in row) == [(0, 4), (4, 8), (8, 10), (11, 14)]
    assert plan.sums(plan.pieces.targets).sum() == 10 + 3
    assert (plan.truncated, plan.empty) == (0, 0)


def test_without_packing_a_document_is_a_row_and_loses_its_end() -> None:
    plan = plan_rows(documents(11, 4), None, seq_len=4, packing=False)
    assert spans(plan) == [[(0, 4)], [(11, 14)]]
    assert plan.pieces.targets.tolist() == [4, 3]
    assert plan.truncated == 1


@pytest.mark.parametrize("packing", [True, False])
def test_an_answer_is_never_cut_from_its_question(packing: bool) -> None:
    counts = np.array([*(0, 0, 0, 1, 1, 1, 1), *(0, 0, 0, 0, 0, 0, 1), *(0, 1)], np.bool_)
    found = np.array([[0, 7, 4], [7, 14, 1], [14, 16, 1]])
    plan = plan_rows(found, counts, seq_len=5, packing=packing)
    assert sorted(span for row in spans(plan) for span in row) == [(0, 5), (14, 15)]
    assert sorted(plan.pieces.targets) == [1, 3]  # of the first document's answer one token is lost
    assert (plan.truncated, plan.empty) == (2, 1)  # of the second all of it


def test_documents_without_anything_to_predict_are_counted() -> None:
    plan = plan_rows(documents(1, 3, 1), None, seq_len=4, packing=True)
    assert spans(plan) == [[(1, 3)]]
    assert plan.empty == 2
    assert len(plan_rows(documents(1), None, seq_len=4, packing=True)) == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(1, 12))
def test_packed_text_is_all_there(lengths: list[int], seq_len: int) -> None:
    plan = plan_rows(documents(*lengths), None, seq_len=seq_len, packing=True)
    inputs = sorted(at for row in spans(plan) for a, b in row for at in range(a, b))
    stops = set(np.cumsum(lengths) - 1)
    assert inputs == [at for at in range(sum(lengths)) if at not in stops]
    assert all(sum(b - a for a, b in row) <= seq_len for row in spans(plan))
