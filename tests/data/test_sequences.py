"""Rows hold what fits, every target is predicted once, and batches tell documents apart."""

from itertools import islice, takewhile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.data.loader import Loader
from infinity.data.opening import Data, DataConfig, open_data
from infinity.data.sequences import (
    Batch,
    BatchShape,
    Sequences,
    best_fit,
    join,
    rows_of,
    token_stream,
)
from infinity.data.tokenizer import DataError
from infinity.data.tokens import Tokens
from tests.helpers.cases import examples


def document_rows(tokens: Tokens, seq_len: int, *, packing: bool) -> Sequences:
    return rows_of(tokens, BatchShape(seq_len=seq_len, batch_size=1), packing=packing)


SIZES = st.lists(st.integers(1, 40), max_size=60)


@examples(200)
@given(SIZES)
def test_rows_hold_every_document_within_their_capacity(sizes: list[int]) -> None:
    rows = best_fit(np.array(sizes, np.int64), 40)
    used = np.bincount(rows, weights=sizes).astype(int) if sizes else np.array([], int)
    assert (used > 0).all()
    assert (used <= 40).all()
    if len(used) > 1:  # any two that are emptiest would not go into one
        assert sum(sorted(used)[:2]) > 40


def test_complementary_sizes_fill_rows_completely() -> None:
    sizes = np.array([3, 7] * 500 + [6, 4] * 500 + [5] * 100)
    rows = best_fit(sizes, 10)
    assert np.bincount(rows, weights=sizes).tolist() == [10.0] * 1050


def test_many_documents_fill_rows_to_99_percent() -> None:
    sizes = np.random.default_rng(0).integers(1, 2049, 400_000)
    rows = best_fit(sizes, 2048)
    assert rows.max() + 1 <= 1.01 * -(-sizes.sum() // 2048)


def masked(documents: np.ndarray, counts: np.ndarray | None) -> Tokens:
    values = np.zeros(documents[-1, 1], np.uint16)
    return Tokens(values=values, loss_mask=counts, documents=documents, largest=0, digest="d")


def texts(*lengths: int) -> Tokens:
    """Texts of these many tokens, end to end."""
    stops = np.cumsum(lengths)
    return masked(np.stack([stops - lengths, stops, np.array(lengths)], axis=1), None)


def spans(rows: Sequences) -> list[list[tuple[int, int]]]:
    """For each row the inputs of its pieces, from and up to."""
    both = [(int(a), int(a + n)) for a, n in zip(rows.starts, rows.sizes)]
    return [both[a:b] for a, b in zip(rows.firsts, rows.firsts[1:])]


def test_text_is_cut_so_that_each_token_is_predicted_once() -> None:
    rows = document_rows(texts(11, 4), 4, packing=True)
    assert sorted(span for row in spans(rows) for span in row) == [(0, 4), (4, 8), (8, 10), (11, 14)]
    assert rows.target_counts.sum() == 10 + 3
    assert (rows.truncated, rows.empty) == (0, 0)


def test_without_packing_a_document_is_a_row_and_loses_its_end() -> None:
    rows = document_rows(texts(11, 4), 4, packing=False)
    assert spans(rows) == [[(0, 4)], [(11, 14)]]
    assert rows.target_counts.tolist() == [4, 3]
    assert rows.truncated == 1


@pytest.mark.parametrize("packing", [True, False])
def test_an_answer_is_never_separated_from_its_question(packing: bool) -> None:
    counts = np.array([*(0, 0, 0, 1, 1, 1, 1), *(0, 0, 0, 0, 0, 0, 1), *(0, 1)], np.bool_)
    found = np.array([[0, 7, 4], [7, 14, 1], [14, 16, 1]])
    rows = document_rows(masked(found, counts), 5, packing=packing)
    assert sorted(span for row in spans(rows) for span in row) == [(0, 5), (14, 15)]
    assert sorted(rows.target_counts) == [1, 3]  # of the first document's answer one token is lost
    assert (rows.truncated, rows.empty) == (2, 1)  # of the second all of it


def test_documents_without_targets_are_counted_as_empty() -> None:
    rows = document_rows(texts(1, 3, 1), 4, packing=True)
    assert spans(rows) == [[(1, 3)]]
    assert rows.empty == 2
    assert len(document_rows(texts(1), 4, packing=True)) == 0


@examples(100)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(1, 12))
def test_packed_text_is_all_there(lengths: list[int], seq_len: int) -> None:
    rows = document_rows(texts(*lengths), seq_len, packing=True)
    inputs = sorted(at for row in spans(rows) for a, b in row for at in range(a, b))
    stops = set(np.cumsum(lengths) - 1)
    assert inputs == [at for at in range(sum(lengths)) if at not in stops]
    assert all(sum(b - a for a, b in row) <= seq_len for row in spans(rows))


#: Of 3, 4 and 6 tokens; of the last only the final two count in the loss.
TOKENS = Tokens(
    values=np.arange(1, 14, dtype=np.uint16),
    loss_mask=np.array([1] * 7 + [0] * 4 + [1] * 2, np.bool_),
    documents=np.array([[0, 3, 3], [3, 7, 4], [7, 13, 2]]),
    largest=13,
    digest="d",
)


def batch(rows: Sequences) -> Batch:
    which = np.arange(len(rows))
    return rows.batch(which, which)


def test_packed_rows_separate_documents_by_positions() -> None:
    found = batch(document_rows(TOKENS, 6, packing=True))
    assert found.tokens.tolist() == [[8, 9, 10, 11, 12, 0], [1, 2, 4, 5, 6, 0]]
    assert found.targets.tolist() == [[-100, -100, -100, 12, 13, -100], [2, 3, 5, 6, 7, -100]]
    assert found.positions is not None
    assert found.positions.tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 0, 1, 2, 0]]
    assert found.mask is None
    assert (found.token_count, found.target_count) == (10, 7)


def test_rows_of_one_document_mask_their_padding() -> None:
    found = batch(document_rows(TOKENS, 3, packing=False))
    assert found.tokens.tolist() == [[1, 2, 0], [4, 5, 6]]  # the third's answer did not fit
    assert found.targets.tolist() == [[2, 3, -100], [5, 6, 7]]
    assert found.mask is not None
    assert found.mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert found.positions is None
    assert found.token_count == found.target_count == 5


def test_rows_that_hold_one_document_need_no_positions() -> None:
    rows = document_rows(TOKENS, 6, packing=True)
    first = np.array([0])
    assert rows.batch(first, first).positions is None


def test_joined_micro_batches_equal_the_whole_batch() -> None:
    for packing in (True, False):
        rows = document_rows(TOKENS, 6, packing=packing)
        parts = [rows.batch(np.array([i]), np.array([i])) for i in range(len(rows))]
        joined, whole = join(parts), batch(rows)
        for one, other in zip(joined[:2], whole[:2]):
            assert torch.equal(one, other)
        assert joined[4:] == whole[4:]
        assert (joined.mask is None) == (whole.mask is None)
        if packing:  # a row of one document has positions up to its end; padding has no targets
            assert torch.equal(joined.positions[whole.targets >= 0], whole.positions[whole.targets >= 0])
        else:
            assert torch.equal(joined.mask, whole.mask)
    assert join([token_stream(np.arange(9), 4).batch(np.array([0]), np.array([0]))]).positions is None


def open_lines(tmp_path: Path, *, seq_len: int = 16, **config: object) -> Data:
    path = tmp_path / "a.jsonl"
    if not path.exists():
        lines = [f'{{"prompt": "{i:02}+1=", "completion": "{i + 1:02}"}}' for i in range(40)]
        path.write_text("\n".join(lines))
    settings = {"files": (str(path),), "cache": str(tmp_path / "cache"), "eval_fraction": 0.0, **config}
    return open_data(DataConfig(**settings), BatchShape(seq_len=seq_len, batch_size=2), vocab_size=256)


def epoch(loader: Loader) -> list[Batch]:
    return list(takewhile(lambda _: loader.streams[0].place[0] == 0, loader))


def answers(batches: list[Batch]) -> list[str]:
    rows = [row[row != -100] for batch in batches for row in batch.targets]
    return [text for row in rows for text in bytes(row.tolist()).decode().split("\0") if text]


@pytest.mark.parametrize("packing", [None, True, False])
def test_every_answer_is_a_target_once_an_epoch(tmp_path: Path, packing: bool | None) -> None:
    data = open_lines(tmp_path, packing=packing)
    assert sorted(answers(epoch(data.train))) == [f"{i + 1:02}" for i in range(40)]
    assert data.packed is (packing is not False)  # prompts are packed unless the recipe says otherwise


def test_text_alone_is_one_stream_unless_the_recipe_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n' * 20)
    stream, packed = open_lines(tmp_path), open_lines(tmp_path, packing=True)
    assert (stream.packed, stream.notes) == (False, ())
    assert next(stream.train).positions is None
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n' * 30)
    both = open_lines(tmp_path, packing=True, files=(str(tmp_path / "*.jsonl"),))
    assert next(both.train).positions is not None
    assert (
        packed.notes[0]
        == "training data: 20 documents in 20 sequences of 16 (62% full, 100% of tokens in the loss)"
    )


def test_held_out_prompts_do_not_count_in_the_loss(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("text " * 20)
    data = open_lines(tmp_path, files=(str(tmp_path / "b.txt"),), eval_files=(str(tmp_path / "a.jsonl"),))
    assert data.packed
    (held,) = data.evaluated[""].batches(1)
    assert held.target_count == int((held.targets >= 0).sum()) < held.token_count


def test_whole_documents_are_held_out(tmp_path: Path) -> None:
    data = open_lines(tmp_path, eval_fraction=0.25)
    held = answers(list(data.evaluated[""].batches(100)))
    assert len(held) >= 8  # rows that fill no batch are left out
    assert set(held) <= {f"{i + 1:02}" for i in range(30, 40)}
    assert not set(held) & set(answers(epoch(data.train)))


def test_ranks_pack_the_same_rows_and_share_them(tmp_path: Path) -> None:
    open_lines(tmp_path)
    config = DataConfig(files=(str(tmp_path / "a.jsonl"),), cache=str(tmp_path / "cache"), eval_fraction=0.0)
    ranks = [
        next(
            open_data(
                config, BatchShape(seq_len=16, batch_size=2, rank=r, world_size=3), vocab_size=256
            ).train
        )
        for r in range(3)
    ]
    assert len({batch.target_count for batch in ranks}) == 1
    assert sum(int((batch.targets >= 0).sum()) for batch in ranks) == ranks[0].target_count
    seen = answers(ranks)
    assert len(set(seen)) == len(seen)


def test_a_position_in_rows_resumes_and_is_refused_by_another_layout(tmp_path: Path) -> None:
    first = open_lines(tmp_path).train
    for _ in range(7):
        next(first)
    resumed = open_lines(tmp_path).train
    resumed.load_state_dict(first.state_dict())
    for one, other in islice(zip(first, resumed), 5):
        assert torch.equal(one.tokens, other.tokens)
    with pytest.raises(DataError, match="saved position has tokens="):
        open_lines(tmp_path, packing=False).train.load_state_dict(first.state_dict())


def test_notes_count_truncated_and_skipped_documents(tmp_path: Path) -> None:
    lines = [
        "nonsense",
        '{"prompt": "long long", "completion": "yes"}',
        '{"prompt": "1", "completion": "234567"}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines + ['{"prompt": "", "completion": "a"}'] * 8))
    notes = open_lines(tmp_path, seq_len=4, skip_malformed=True).notes
    assert notes[0].startswith("data.files: skipped 1 malformed rows; the first: ")
    assert notes[1].endswith(
        "2 longer ones truncated; 1 skipped, since none of their tokens counts in the loss"
    )


def test_data_without_targets_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "long long", "completion": "yes"}\n' * 9)
    with pytest.raises(DataError, match="the training data has 0 sequences of 4"):
        open_lines(tmp_path, seq_len=4)
    (tmp_path / "b.jsonl").write_text('{"prompt": "", "completion": "yes"}\n' * 9)
    with pytest.raises(DataError, match="the held-out data has no target that counts"):
        open_lines(
            tmp_path, seq_len=4, files=(str(tmp_path / "b.jsonl"),), eval_files=(str(tmp_path / "a.jsonl"),)
        )
    (tmp_path / "c.jsonl").write_text('{"prompt": "", "completion": "yes"}\n')
    with pytest.raises(DataError, match=r"c\.jsonl\): 1 documents are too few to hold 1 out"):
        open_lines(tmp_path, files=(str(tmp_path / "c.jsonl"),), eval_fraction=0.5, packing=True)


def test_a_note_says_what_is_held_out(tmp_path: Path) -> None:
    assert "held out: the last 10 of 40 documents (data.eval_fraction=0.25)" in (
        open_lines(tmp_path, eval_fraction=0.25).notes
    )
    text = {"files": (str(tmp_path / "b.txt"),), "eval_fraction": 0.1}
    (tmp_path / "b.txt").write_text("text " * 200)
    data = open_lines(tmp_path, **text)
    assert data.notes == ("held out: the last 100 of 1,001 tokens (data.eval_fraction=0.1)",)
    assert not any("held out" in note for note in open_lines(tmp_path).notes)


def test_a_note_counts_documents_and_pieces_of_long_text(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("text " * 20)
    [note] = open_lines(tmp_path, files=(str(tmp_path / "b.txt"),), packing=True).notes
    assert (
        note
        == "training data: 1 documents, 7 pieces, in 7 sequences of 16 (89% full, 100% of tokens in the loss)"
    )


def test_an_epoch_has_the_reported_number_of_micro_batches(tmp_path: Path) -> None:
    loader = open_lines(tmp_path, packing=False).train
    assert len(epoch(loader)) == loader.micro_batches_per_epoch == 20
