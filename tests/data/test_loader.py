"""Batches: every sequence once an epoch, disjoint over ranks, resumed exactly, held-out apart."""

import json
from collections import Counter
from collections.abc import Iterable
from itertools import chain, islice, takewhile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.core.config import SettingError
from infinity.data.loader import HeldOut, Loader
from infinity.data.opening import Data, DataConfig, open_data
from infinity.data.sequences import Batch, BatchShape, token_stream
from infinity.data.tokenizer import DataError
from infinity.data.tokens import PAIRS
from tests.helpers.cases import examples

# ten sequences of four, each known by its first token
TOKENS = token_stream(np.arange(10 * 4 + 1, dtype=np.uint16), 4)


def loaders(world_size: int, batch_size: int = 1, **how: bool | int) -> list[Loader]:
    return [
        Loader.of(
            [TOKENS], BatchShape(seq_len=4, batch_size=batch_size, rank=rank, world_size=world_size), **how
        )
        for rank in range(world_size)
    ]


def firsts(batches: list[Batch]) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch.tokens]


def test_targets_are_the_tokens_that_follow() -> None:
    (loader,) = loaders(1, shuffle=False)
    batch = next(loader)
    assert batch.tokens.tolist() == [[0, 1, 2, 3]]
    assert batch.targets.tolist() == [[1, 2, 3, 4]]
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert (batch.positions, batch.mask) == (None, None)


def test_every_rank_knows_the_number_of_targets_on_all_ranks() -> None:
    assert [(b.token_count, b.target_count) for b in map(next, loaders(3, 2))] == [(24, 24)] * 3


@examples(30)
@given(world_size=st.integers(1, 4), batch_size=st.integers(1, 2), seed=st.integers(0, 5))
def test_ranks_share_an_epoch_without_a_common_sequence(world_size: int, batch_size: int, seed: int) -> None:
    steps = 10 // (world_size * batch_size)
    seen = [firsts(list(islice(loader, steps))) for loader in loaders(world_size, batch_size, seed=seed)]
    flat = [first for rank in seen for first in rank]
    assert len(set(flat)) == len(flat) == steps * world_size * batch_size


def test_the_order_depends_on_seed_and_epoch() -> None:
    (one,), (same,), (other,) = loaders(1, seed=1), loaders(1, seed=1), loaders(1, seed=2)
    first, second = firsts(list(islice(one, 10))), firsts(list(islice(one, 10)))
    assert sorted(first) == sorted(second) == list(range(0, 40, 4))
    assert first != second
    assert one.streams[0].place[0] == 1
    assert firsts(list(islice(same, 20))) == first + second
    assert firsts(list(islice(other, 10))) != first


@examples(30)
@given(before=st.integers(0, 25), seed=st.integers(0, 3), batch_size=st.integers(1, 3))
def test_a_saved_position_resumes_exactly(before: int, seed: int, batch_size: int) -> None:
    (loader,), (resumed,) = loaders(1, batch_size, seed=seed), loaders(1, batch_size, seed=seed)
    for _ in range(before):
        next(loader)
    resumed.load_state_dict(loader.state_dict())
    for _ in range(15):
        assert torch.equal(next(loader).tokens, next(resumed).tokens)


def test_a_position_is_valid_for_another_number_of_ranks() -> None:
    two = loaders(2)
    begun = [firsts(list(islice(loader, 2))) for loader in two]
    four = loaders(4)
    for loader in four:
        loader.load_state_dict(two[0].state_dict())
    rest = [firsts([next(loader)]) for loader in four]
    (whole,) = loaders(1)
    assert sorted(chain(*begun, *rest)) == sorted(firsts(list(islice(whole, 8))))


@pytest.mark.parametrize(("other", "name"), [({"seed": 9}, "seed"), ({"identity": "else"}, "tokens")])
def test_a_position_in_other_data_is_refused(other: dict[str, int], name: str) -> None:
    (loader,), (stranger,) = loaders(1), loaders(1, **other)
    with pytest.raises(DataError, match=f"saved position has {name}="):
        stranger.load_state_dict(loader.state_dict())


def test_too_few_sequences_for_a_batch_is_an_error_with_the_numbers() -> None:
    with pytest.raises(DataError, match=r"10 sequences of 4 tokens; a micro-batch needs 12 \(4 ranks with"):
        loaders(4, 3)


def test_ranks_get_equally_many_held_out_batches_and_none_in_common() -> None:
    ranks = [HeldOut(TOKENS, BatchShape(seq_len=4, batch_size=2, rank=r, world_size=2)) for r in range(2)]
    seen = [firsts(list(rank.batches(2))) for rank in ranks]
    assert [len(rank) for rank in seen] == [4, 4]
    assert len(set(seen[0] + seen[1])) == 8
    assert seen[0] == firsts(list(ranks[0].batches(2)))
    few = HeldOut(token_stream(TOKENS.values[:9], 4), BatchShape(seq_len=4, batch_size=3))
    assert firsts(list(few.batches(8))) == [0, 0, 4]  # two sequences fill a batch of three


def open_text(tmp_path: Path, text: str, **config: object) -> Data:
    (tmp_path / "a.txt").write_text(text)
    settings = {"files": (str(tmp_path / "a.txt"),), "cache": str(tmp_path / "cache"), **config}
    return open_data(DataConfig(**settings), BatchShape(seq_len=4, batch_size=1), vocab_size=256)


@pytest.mark.parametrize("length", [86, 87, 88, 89, 90])
def test_the_held_out_part_never_overlaps_training(tmp_path: Path, length: int) -> None:
    text = "".join(chr(32 + i) for i in range(length))  # every token once
    data = open_text(tmp_path, text, eval_fraction=0.2)
    epoch = takewhile(lambda _: data.train.streams[0].place[0] == 0, data.train)
    train = {int(x) for batch in epoch for half in batch[:2] for x in half.flatten()}
    held = {int(x) for batch in data.evaluated[""].batches(100) for half in batch[:2] for x in half.flatten()}
    assert train
    assert held
    assert not train & held


def test_held_out_files_are_excluded_from_training(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("bbbbbbbbbb")
    data = open_text(
        tmp_path, "aaaaaaaaaa", files=(str(tmp_path / "*.txt"),), eval_files=(str(tmp_path / "b.txt"),)
    )
    assert set(next(data.train).tokens.flatten().tolist()) == {ord("a")}
    assert set(next(data.evaluated[""].batches(1)).tokens.flatten().tolist()) == {ord("b")}


def test_if_every_training_file_is_held_out_the_error_says_so(tmp_path: Path) -> None:
    names = (str(tmp_path / "*.txt"),)
    with pytest.raises(
        DataError, match=r"data\.files \(.*\*\.txt\): each of them is one of data\.eval_files"
    ):
        open_text(tmp_path, "aaaaaaaaaa", files=names, eval_files=names)


def test_nothing_is_held_out_with_a_fraction_of_0(tmp_path: Path) -> None:
    assert open_text(tmp_path, "some text", eval_fraction=0.0).evaluated == {}


def test_files_shorter_than_a_sequence_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"3 tokens, fewer than one sequence of 4"):
        open_text(tmp_path, "ab", eval_fraction=0.0)
    with pytest.raises(DataError, match=r"7 tokens are too few to hold 5 out and train"):
        open_text(tmp_path, "abcdef")


def test_a_tokenizer_larger_than_the_vocabulary_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    config = DataConfig(files=(str(tmp_path / "a.txt"),), cache=str(tmp_path))
    shape = BatchShape(seq_len=4, batch_size=1)
    with pytest.raises(DataError, match=r"256 tokens, model\.vocab_size is 100; set model\.vocab_size=256"):
        open_data(config, shape, vocab_size=100)


def test_a_vocabulary_smaller_than_the_tokenizers_suffices_for_the_tokens_in_the_data(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the text is long enough")  # "x" is 120
    config = DataConfig(files=(str(tmp_path / "a.txt"),), cache=str(tmp_path), tokenizer="bytes")
    shape = BatchShape(seq_len=4, batch_size=1)
    assert open_data(config, shape, vocab_size=121, model_path="model").evaluated.keys() == {""}
    with pytest.raises(DataError, match="the data contains the token 120; the model in model has 120 tokens"):
        open_data(config, shape, vocab_size=120, model_path="model")


def two_sources(tmp_path: Path, **config: object) -> Data:
    """Open 40 rows of a and 10 of b, each a document of its own."""
    for name, count in (("a", 40), ("b", 10)):
        lines = [json.dumps({"prompt": name, "completion": chr(40 + i)}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    names = (str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    settings = {"cache": str(tmp_path / "cache"), "packing": False, "eval_fraction": 0.0, "files": names}
    return open_data(DataConfig(**(settings | config)), BatchShape(seq_len=4, batch_size=2), vocab_size=256)


def names_of(batches: Iterable[Batch]) -> list[tuple[str, int]]:
    return [(chr(row[0]), int(row[1])) for batch in batches for row in batch.tokens.tolist()]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_mixture_has_its_shares_in_every_batch_and_takes_all_rows_in_turn(
    tmp_path: Path, shuffle: bool
) -> None:
    data = two_sources(tmp_path, weights=(1.0, 3.0), shuffle=shuffle)
    assert data.train.micro_batches_per_epoch == 25
    batches = [names_of([batch]) for batch in islice(data.train, 80)]
    for first, second in zip(batches[::2], batches[1::2]):
        assert Counter(name for name, _ in first + second) == {"a": 1, "b": 3}
    seen = Counter(row for batch in batches for row in batch)
    assert {n for (name, _), n in seen.items() if name == "a"} == {1}  # 40 of 40
    assert {n for (name, _), n in seen.items() if name == "b"} == {12}  # 120 of 10
    assert any("of each batch; as many steps as an epoch has without" in note for note in data.notes)
    assert any("take each of them 3.75 times" in note for note in data.notes)


def test_a_mixture_goes_on_where_it_was_from_seed_and_position_alone(tmp_path: Path) -> None:
    data = two_sources(tmp_path, weights=(1.0, 3.0))
    list(islice(data.train, 32))
    state, following = data.train.state_dict(), names_of(islice(data.train, 40))
    again = two_sources(tmp_path, weights=(1.0, 3.0))
    again.train.load_state_dict(state)
    assert names_of(islice(again.train, 40)) == following
    with pytest.raises(DataError, match="the saved position has tokens="):
        two_sources(tmp_path, weights=(1.0, 2.0)).train.load_state_dict(state)
    other = two_sources(tmp_path, weights=(1.0, 3.0), seed=1)
    assert names_of(islice(other.train, 40)) != names_of(islice(two_sources(tmp_path).train, 40))


def test_rows_of_a_mixture_of_pairs_have_room_for_as_many_documents(tmp_path: Path) -> None:
    for name, size in (("a", 1), ("b", 20)):
        rows = [{"prompt": name, "chosen": "y" * size, "rejected": "n" * size}] * 20
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = tuple(str(tmp_path / f"{name}.jsonl") for name in "ab")
    config = DataConfig(files=files, cache=str(tmp_path / "c"), eval_fraction=0.0, weights=(1.0, 1.0))
    batch = next(open_data(config, BatchShape(seq_len=64, batch_size=2), vocab_size=256, kind=PAIRS).train)
    assert batch.labels is not None
    assert batch.reference is not None
    assert batch.labels.shape == batch.reference.shape
    assert sorted((batch.labels >= 0).sum(1).tolist())[0] == 2  # of the long ones a pair
    assert int((batch.labels >= 0).sum()) == 2 * batch.target_count


def test_a_mixture_holds_out_a_part_of_every_source(tmp_path: Path) -> None:
    data = two_sources(tmp_path, weights=(1.0, 1.0), eval_fraction=0.2)
    held = set(names_of(data.evaluated[""].batches(100)))
    assert Counter(name for name, _ in held) == {"a": 8, "b": 2}
    assert not held & set(names_of(islice(data.train, 200)))


def test_a_mixture_of_streams_keeps_sources_apart(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 41)
    names = tuple(str(tmp_path / f"{name}.txt") for name in "ab")
    data = two_sources(tmp_path, files=names, weights=(3.0, 1.0), packing=None)
    rows = [set(row) for batch in islice(data.train, 10) for row in batch.tokens.tolist()]
    assert all(len(row - {0}) == 1 for row in rows)
    assert sum(ord("a") in row for row in rows) == 15


def test_ranks_of_a_group_have_equal_parts_of_the_same_sequences() -> None:
    groups = [
        [
            Loader.of([TOKENS], BatchShape(seq_len=4, batch_size=2, rank=rank, world_size=4, parts=2))
            for rank in pair
        ]
        for pair in ((0, 1), (2, 3))
    ]
    wholes = [
        Loader.of([TOKENS], BatchShape(seq_len=4, batch_size=2, rank=rank, world_size=2)) for rank in range(2)
    ]
    for group, whole in zip(groups, wholes, strict=True):
        parts, batch = [next(each) for each in group], next(whole)
        assert torch.equal(torch.cat([part.tokens for part in parts], 1), batch.tokens)
        assert torch.equal(torch.cat([part.targets for part in parts], 1), batch.targets)
        assert [part.positions.tolist() for part in parts] == [[[0, 1]] * 2, [[2, 3]] * 2]
        assert {part.target_count for part in parts} == {batch.target_count}
    with pytest.raises(SettingError, match=r"a multiple of train\.sequence_ranks=3, such as 3"):
        BatchShape(seq_len=4, batch_size=1, parts=3)
