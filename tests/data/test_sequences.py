"""Rows of documents as batches: positions, masks and targets say where each of them is."""

from itertools import islice, takewhile
from pathlib import Path

import numpy as np
import pytest
import torch

from infinity.app.data import Batch, Data, TokenLoader, open_data
from infinity.app.data.config import DataConfig
from infinity.app.data.files import DataError
from infinity.app.data.loader import Shape
from infinity.app.data.sequences import Rows, Stream, join
from infinity.app.data.tokens import Tokens

#: Of 3, 4 and 6 tokens; of the last only the final two are learned.
TOKENS = Tokens(
    values=np.arange(1, 14, dtype=np.uint16),
    counts=np.array([1] * 7 + [0] * 4 + [1] * 2, np.bool_),
    documents=np.array([[0, 3, 3], [3, 7, 4], [7, 13, 2]]),
    largest=13,
    digest="d",
)


def batch(rows: Rows) -> Batch:
    which = np.arange(len(rows))
    return rows.batch(which, which)


def test_packed_rows_tell_documents_by_their_positions() -> None:
    found = batch(Rows(TOKENS, 6, packing=True))
    assert found.tokens.tolist() == [[8, 9, 10, 11, 12, 0], [1, 2, 4, 5, 6, 0]]
    assert found.targets.tolist() == [[-100, -100, -100, 12, 13, -100], [2, 3, 5, 6, 7, -100]]
    assert found.positions is not None
    assert found.positions.tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 0, 1, 2, 0]]
    assert found.mask is None
    assert (found.token_count, found.target_count) == (10, 7)


def test_single_rows_tell_what_is_filled_up_by_a_mask() -> None:
    found = batch(Rows(TOKENS, 3, packing=False))
    assert found.tokens.tolist() == [[1, 2, 0], [4, 5, 6]]  # the third's answer did not fit
    assert found.targets.tolist() == [[2, 3, -100], [5, 6, 7]]
    assert found.mask is not None
    assert found.mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert found.positions is None
    assert found.token_count == found.target_count == 5


def test_rows_that_hold_one_document_need_no_positions() -> None:
    rows = Rows(TOKENS, 6, packing=True)
    first = np.array([0])
    assert rows.batch(first, first).positions is None


def test_micro_batches_join_to_the_batch_that_they_are_parts_of() -> None:
    for packing in (True, False):
        rows = Rows(TOKENS, 6, packing=packing)
        parts = [rows.batch(np.array([i]), np.array([i])) for i in range(len(rows))]
        joined, whole = join(parts), batch(rows)
        for one, other in zip(joined[:2], whole[:2]):
            assert torch.equal(one, other)
        assert joined[4:] == whole[4:]
        assert (joined.mask is None) == (whole.mask is None)
        if packing:  # a row with one document has places up to its end; filling counts for nothing
            assert torch.equal(joined.positions[whole.targets >= 0], whole.positions[whole.targets >= 0])
        else:
            assert torch.equal(joined.mask, whole.mask)
    assert join([Stream(np.arange(9), 4).batch(np.array([0]), np.array([0]))]).positions is None


def open_lines(tmp_path: Path, *, seq_len: int = 16, **config: object) -> Data:
    path = tmp_path / "a.jsonl"
    if not path.exists():
        lines = [f'{{"prompt": "{i:02}+1=", "completion": "{i + 1:02}"}}' for i in range(40)]
        path.write_text("\n".join(lines))
    settings = {"files": (str(path),), "cache": str(tmp_path / "cache"), "eval_fraction": 0.0, **config}
    return open_data(DataConfig(**settings), Shape(seq_len=seq_len, batch_size=2), vocab_size=256)


def epoch(loader: TokenLoader) -> list[Batch]:
    return list(takewhile(lambda _: loader.epoch == 0, loader))


def answers(batches: list[Batch]) -> list[str]:
    rows = [row[row != -100] for batch in batches for row in batch.targets]
    return [text for row in rows for text in bytes(row.tolist()).decode().split("\0") if text]


@pytest.mark.parametrize("packing", [None, True, False])
def test_every_answer_is_learned_once_an_epoch(tmp_path: Path, packing: bool | None) -> None:
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
    assert packed.notes[0] == "training data: 20 documents in 20 sequences of 16 (62% full, 100% learned)"


def test_prompts_that_are_held_out_are_not_learned_from_either(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("text " * 20)
    data = open_lines(tmp_path, files=(str(tmp_path / "b.txt"),), eval_files=(str(tmp_path / "a.jsonl"),))
    assert data.packed
    assert data.held_out is not None
    (held,) = data.held_out.batches(1)
    assert held.target_count == int((held.targets >= 0).sum()) < held.token_count


def test_whole_documents_are_held_out(tmp_path: Path) -> None:
    data = open_lines(tmp_path, eval_fraction=0.25)
    assert data.held_out is not None
    held = answers(list(data.held_out.batches(100)))
    assert len(held) >= 8  # rows that fill no batch are left out
    assert set(held) <= {f"{i + 1:02}" for i in range(30, 40)}
    assert not set(held) & set(answers(epoch(data.train)))


def test_ranks_pack_the_same_rows_and_share_them(tmp_path: Path) -> None:
    open_lines(tmp_path)
    config = DataConfig(files=(str(tmp_path / "a.jsonl"),), cache=str(tmp_path / "cache"), eval_fraction=0.0)
    ranks = [
        next(open_data(config, Shape(seq_len=16, batch_size=2, rank=r, world_size=3), vocab_size=256).train)
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


def test_what_was_cut_and_left_out_is_said(tmp_path: Path) -> None:
    lines = [
        "nonsense",
        '{"prompt": "long long", "completion": "yes"}',
        '{"prompt": "1", "completion": "234567"}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines + ['{"prompt": "", "completion": "a"}'] * 8))
    notes = open_lines(tmp_path, seq_len=4, skip_malformed=True).notes
    assert notes[0].startswith("data.files: 1 lines left out as malformed; the first: ")
    assert notes[1].endswith("2 were longer and lost their end; 1 left out, since nothing in them is learned")


def test_nothing_to_learn_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "long long", "completion": "yes"}\n' * 9)
    with pytest.raises(DataError, match="the training data is 0 sequences of 4"):
        open_lines(tmp_path, seq_len=4)
    (tmp_path / "b.jsonl").write_text('{"prompt": "", "completion": "yes"}\n' * 9)
    with pytest.raises(DataError, match="the held-out data has no target that counts"):
        open_lines(
            tmp_path, seq_len=4, files=(str(tmp_path / "b.jsonl"),), eval_files=(str(tmp_path / "a.jsonl"),)
        )
    (tmp_path / "c.jsonl").write_text('{"prompt": "", "completion": "yes"}\n')
    with pytest.raises(DataError, match=r"c\.jsonl\): 1 documents are too few to hold 1 out"):
        open_lines(tmp_path, files=(str(tmp_path / "c.jsonl"),), eval_fraction=0.5, packing=True)


def test_people_are_told_what_is_held_out(tmp_path: Path) -> None:
    assert "held out: the last 10 of 40 documents (data.eval_fraction=0.25)" in (
        open_lines(tmp_path, eval_fraction=0.25).notes
    )
    text = {"files": (str(tmp_path / "b.txt"),), "eval_fraction": 0.1}
    (tmp_path / "b.txt").write_text("text " * 200)
    data = open_lines(tmp_path, **text)
    assert data.notes == ("held out: the last 100 of 1,001 tokens (data.eval_fraction=0.1)",)
    assert not any("held out" in note for note in open_lines(tmp_path).notes)


def test_long_text_is_told_as_documents_and_their_pieces(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("text " * 20)
    [note] = open_lines(tmp_path, files=(str(tmp_path / "b.txt"),), packing=True).notes
    assert note == "training data: 1 documents, 7 pieces, in 7 sequences of 16 (89% full, 100% learned)"


def test_an_epoch_is_as_many_micro_batches_as_are_told(tmp_path: Path) -> None:
    loader = open_lines(tmp_path, packing=False).train
    assert len(epoch(loader)) == loader.micro_batches_per_epoch == 20
