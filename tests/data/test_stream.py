"""Streams: tokens made while batches are taken, every row once an epoch, places that are exact and small."""

import json
import pickle
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.core.errors import RecipeError
from infinity.data import helpers
from infinity.data import loader as stream
from infinity.data.formats import Reading
from infinity.data.loader import Windows
from infinity.data.opening import Data, DataConfig, open_data
from infinity.data.sequences import Batch, BatchShape
from infinity.data.sources import Source, read_lines, read_pieces, rows
from infinity.data.tokenizer import BytesTokenizer, DataError, open_tokenizer
from infinity.data.tokens import TokenCache
from infinity.recipes.loading import load_recipe
from tests.data.test_sources import save_to_disk, write_parquet
from tests.helpers.cases import examples
from tests.helpers.limits import comes_true
from tests.helpers.tokenizers import write_tokenizer

#: Rows of two files, each of 8 characters, so that two fit a sequence of 20; a window has some ten of 160.
ROWS, SEQ_LEN = 160, 20


def write(folder: Path) -> list[str]:
    for name in "ab":
        lines = [{"text": f"{name}{number:07}"} for number in range(ROWS // 2)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [str(folder / f"{name}.jsonl") for name in "ab"]


def opened(folder: Path, rank: int = 0, ranks: int = 1, batch_size: int = 2, **more: Any) -> Data:
    files = more.pop("files", None) or write(folder)
    settings = {
        "files": tuple(files), "cache": str(folder / "cache"), "streaming": True, "shuffle_buffer": 1024,
        "eval_fraction": 0.0, "packing": True, **more,
    }  # fmt: skip
    shape = BatchShape(seq_len=SEQ_LEN, batch_size=batch_size, rank=rank, world_size=ranks)
    return open_data(DataConfig(**settings), shape, vocab_size=256)


def documents(batches: Iterable[Batch]) -> list[str]:
    """The rows of batches, in order."""
    text = "".join(bytes(batch.tokens.to(torch.uint8).numpy()).decode() for batch in batches)
    return re.findall(r"[a-z]\d{7}", text)


@pytest.fixture(autouse=True)
def none_ahead(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Start no process: what is read is the same without, and it takes some seconds to begin."""
    if "ahead" not in request.fixturenames:
        monkeypatch.setattr(stream, "Helpers", lambda cache, count: Mock())


@pytest.fixture
def ahead() -> None:
    """Ask for it: the process is started."""


def epoch(folder: Path, number: int, **how: Any) -> list[str]:
    """The rows of an epoch, in order."""
    loader = opened(folder, batch_size=1, **how).train
    loader.load_state_dict({**loader.state_dict(), "places": [(number, 0, 0, "")]})
    return documents(takewhile(lambda _: loader.state_dict()["places"][0][0] == number, loader))


def test_every_row_comes_once_an_epoch_and_in_another_order_in_the_next(tmp_path: Path) -> None:
    first, second = (epoch(tmp_path, number) for number in range(2))
    assert sorted(first) == sorted(second) == sorted(f"{n}{i:07}" for n in "ab" for i in range(ROWS // 2))
    assert first != second
    assert {row[0] for row in first[:20]} == {"a", "b"}  # a window has parts of several files
    assert epoch(tmp_path, 1, shuffle=False, packing=False) == sorted(first)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write(tmp_path_factory.mktemp("files"))


@examples(24)
@given(taken=st.integers(0, 90), ranks=st.sampled_from([(1, 4), (2, 2), (4, 1)]))
def test_a_place_resumes_exactly_on_any_number_of_ranks(
    files: list[str], taken: int, ranks: tuple[int, int]
) -> None:
    folder = Path(files[0]).parent
    whole = opened(folder, batch_size=4, files=files).train
    for _ in range(taken):
        next(whole)
    place = json.loads(json.dumps(whole.state_dict()))
    shared = [opened(folder, rank, *ranks, files=files).train for rank in range(ranks[0])]
    for loader in shared:
        loader.load_state_dict(place)
    for _ in range(6):
        batch, parts = next(whole), [next(loader) for loader in shared]
        assert torch.equal(batch.tokens, torch.cat([part.tokens for part in parts]))
        assert torch.equal(batch.targets, torch.cat([part.targets for part in parts]))
        assert {(part.token_count, part.target_count) for part in parts} == {batch[4:6]}
        assert batch.target_count == int((batch.targets >= 0).sum())


def test_a_run_that_goes_on_reads_one_window_and_few_tokens_are_kept(
    tmp_path: Path, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, made, make = opened(tmp_path, files=files).train, [], TokenCache.make

    def counted(self: TokenCache, sources: Any, *args: Any, **how: Any) -> None:
        made.extend(source for source in sources if not self.entry([source]).exists())
        make(self, sources, *args, **how)

    monkeypatch.setattr(TokenCache, "make", counted)
    for _ in range(30):
        next(loader)
        kept = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
        assert len(kept) <= 2 * 9 + 1  # parts of two windows, and what was looked at first
    assert len(made) > 20
    place = loader.state_dict()
    made.clear()
    again = opened(tmp_path, files=files).train
    again.load_state_dict(place)
    assert torch.equal(next(again).tokens, next(loader).tokens)
    assert made == []  # its window is still in the cache


@pytest.mark.parametrize("packing", [True, False])
def test_batches_of_two_streams_are_whole_on_every_rank(tmp_path: Path, packing: bool) -> None:
    """Also where one has several documents in a sequence, or padding, and the other has not."""
    lines = [{"text": "c" * 60}] * 40
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    how = {"files": [*write(tmp_path)[:1], str(tmp_path / "c.jsonl")], "weights": (1.0, 2.0)}
    for streaming in (True, False):
        more = how | {"packing": packing, "streaming": streaming}
        whole = opened(tmp_path, batch_size=2, **more).train
        ranks = [opened(tmp_path, rank, 2, 1, **more).train for rank in range(2)]
        for _ in range(8):
            batch, parts = next(whole), [next(loader) for loader in ranks]
            assert torch.equal(batch.tokens, torch.cat([part.tokens for part in parts]))
            for part in (batch, *parts):
                assert all(each is None or each.shape == part.tokens.shape for each in part[2:4])


def test_what_has_changed_since_a_place_was_saved_is_an_error(tmp_path: Path) -> None:
    loader = opened(tmp_path).train
    next(loader)
    place = loader.state_dict()
    for other in ({"seed": 3}, {"shuffle_buffer": 2048}, {"packing": False}):
        with pytest.raises(DataError, match="data: the saved position has"):
            opened(tmp_path, **other).train.load_state_dict(place)
    for name in "ab":
        file = tmp_path / f"{name}.jsonl"
        file.write_text(file.read_text().replace("0", "1"))
    changed = opened(tmp_path, files=[str(tmp_path / f"{name}.jsonl") for name in "ab"]).train
    changed.load_state_dict(place)
    with pytest.raises(
        DataError, match="the files are not those that the run was interrupted with: window 0"
    ):
        next(changed)


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """Also one of the same size, and where rows that end early would be skipped as malformed."""
    loader = opened(tmp_path, skip_malformed=True).train
    next(loader)
    file = tmp_path / "b.jsonl"
    file.write_text(file.read_text().replace("0", "1"))
    with pytest.raises(DataError, match=r"b\.jsonl has changed since this run began to read it"):
        [*islice(loader, ROWS)]


def test_entries_of_which_a_part_was_removed_are_made_again(tmp_path: Path) -> None:
    first = next(opened(tmp_path).train)
    for file in (tmp_path / "cache").glob("*/about.json"):
        file.unlink()
    assert torch.equal(next(opened(tmp_path, files=[str(tmp_path)]).train).tokens, first.tokens)


def test_a_mixture_has_its_shares_in_every_batch_without_end(tmp_path: Path) -> None:
    how: dict[str, Any] = {"files": write(tmp_path), "batch_size": 8, "weights": (3.0, 1.0)}
    loader = opened(tmp_path, **how).train
    batches = [*islice(loader, 60)]
    assert all(Counter(batch.tokens[:, 0].tolist()) == {ord("a"): 6, ord("b"): 2} for batch in batches)
    assert len({*documents(batches)}) == ROWS  # a small source repeats
    place = loader.state_dict()
    again = opened(tmp_path, **how).train
    again.load_state_dict(place)
    assert torch.equal(next(again).tokens, next(loader).tokens)


def test_what_is_held_out_is_spread_over_the_files_and_never_trained_on(tmp_path: Path) -> None:
    name = tmp_path / "a.jsonl"
    name.write_text("".join(json.dumps({"text": f"c{i:07}"}) + "\n" for i in range(20_000)))
    data = opened(tmp_path, files=[str(name)], shuffle_buffer=2**19, eval_fraction=0.2)
    held = {*documents(data.evaluated[""].batches(10**6))}
    trained = {*documents(islice(data.train, 6000))}
    assert not held & trained
    assert len(held | trained) > 19_990  # the last few do not fill a batch
    assert 2_000 < len(held) < 6_000
    assert any(note.startswith("held out: 1 parts of files (data.eval_fraction=0.2)") for note in data.notes)
    with pytest.raises(
        DataError, match=r"too little to hold 0\.01 of it out.*data\.eval_files, or data\.eval_fra"
    ):
        opened(tmp_path, eval_fraction=0.01, files=write(tmp_path)[:1], shuffle_buffer=2**25)


@pytest.mark.parametrize("packing", [None, True])
def test_text_is_cut_into_parts_with_hardly_a_token_lost(tmp_path: Path, packing: bool | None) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {number:04}\n" for number in range(1000)))
    data = opened(tmp_path, files=[str(tmp_path / "a.txt")], packing=packing, shuffle_buffer=4096)
    assert data.packed is (packing is True)
    batches = takewhile(lambda _: data.train.state_dict()["places"][0][0] == 0, data.train)
    seen = [batch.token_count for batch in batches]
    assert 0.97 * 10_000 < sum(seen) <= 10_000
    assert data.train.micro_batches_per_epoch == pytest.approx(len(seen), rel=0.1)


def test_chats_among_texts_that_are_one_stream_are_an_error(tmp_path: Path) -> None:
    lines = [{"text": "a" * 200}] * 40 + [{"prompt": "b" * 100, "completion": "c" * 90}] * 40
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    loader = opened(tmp_path, files=[str(tmp_path / "a.jsonl")], packing=None).train
    with pytest.raises(DataError, match=r"prompts or chats among texts.*data\.packing=true"):
        documents(islice(loader, 400))


def test_malformed_rows_are_an_error_when_they_are_met_or_skipped_with_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "0123456789012345678901234567890123456789"}\n' * 200 + "no\n")
    said: list[str] = []
    shape, how = BatchShape(seq_len=SEQ_LEN, batch_size=2), {"packing": True, "eval_fraction": 0.0}
    given = {"files": (str(tmp_path / "a.jsonl"),), "cache": str(tmp_path / "cache"), "streaming": True}
    for skip in (False, True):
        config = DataConfig(**given, **how, shuffle_buffer=4096, skip_malformed=skip)
        loader = open_data(config, shape, vocab_size=256, log=said.append).train
        if skip:
            assert len([*islice(loader, 200)]) == 200
        else:
            with pytest.raises(DataError, match=r"a\.jsonl:\d+: not JSON.*skip_malformed"):
                documents(islice(loader, 200))
    assert any("skipped 1 malformed rows; the first: " in line for line in said)


def test_data_that_makes_no_sequence_is_an_error_and_not_a_loop(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "%s", "completion": "a"}\n' % ("p" * 50) * 50)
    loader = opened(tmp_path, files=[str(tmp_path / "a.jsonl")]).train
    with pytest.raises(DataError, match=r"a\.jsonl\): nothing in it makes a sequence of 20"):
        next(loader)


@examples(40)
@given(data=st.lists(st.binary(max_size=12), max_size=30), of=st.integers(1, 9))
def test_parts_of_lines_are_all_lines_each_once(
    tmp_path_factory: pytest.TempPathFactory, data: list[bytes], of: int
) -> None:
    path = tmp_path_factory.mktemp("parts") / "a.jsonl"
    path.write_bytes(b"\n".join(each.replace(b"\n", b"") for each in data))
    whole = [line for _, line in read_lines(Source(path))]
    parts = [[line for _, line in read_lines(Source(path, number, of))] for number in range(of)]
    assert [*chain(*parts)] == whole


def test_parts_of_text_are_the_text_also_without_lines_and_spaces(tmp_path: Path) -> None:
    for text in ("a b c\n" * 500_000, "wörd " * 500_000, "ö" * 1_500_000):
        (tmp_path / "a.txt").write_text(text)
        parts = [read_pieces(Source(tmp_path / "a.txt", number, 3)) for number in range(3)]
        found = ["".join(piece for piece, _ in part) for part in parts]
        assert "".join(found) == text
        assert min(map(len, found)) > len(text) // 4


@pytest.mark.parametrize(("name", "made"), [("a.parquet", write_parquet), ("saved", save_to_disk)])
def test_parts_of_tables_are_all_rows_each_once(tmp_path: Path, name: str, made: Any) -> None:
    pytest.importorskip("datasets")
    made(tmp_path / name)
    source = Source(tmp_path / name)
    parts = [[*rows(part, Reading())] for part in source.parts(4096)]
    assert len(parts) >= 3
    assert all(parts)
    assert [*chain(*parts)] == [*rows(source, Reading())]


def test_a_reference_needs_all_data_before_the_first_step() -> None:
    with pytest.raises(RecipeError, match=r"data\.streaming.*false: the reference of train\.task=dpo"):
        load_recipe(overrides=["train.task=dpo", "data.streaming=true"])


@pytest.mark.usefixtures("ahead")
def test_the_next_window_is_written_by_a_process_that_ends_with_its_rank(tmp_path: Path) -> None:
    loader = opened(tmp_path).train
    next(loader)
    [windows] = loader.streams
    assert isinstance(windows, Windows)
    tokens, following = windows._tokens, [windows._parts[at] for at in windows._windows_of(0)[1]]
    written = [tokens._cache.entry([part]) for part in following]
    assert comes_true(lambda: all(path.exists() for path in written))
    assert tokens._helpers is not None
    [process] = tokens._helpers.processes
    del loader, tokens, windows
    assert comes_true(lambda: process.poll() is not None)


@pytest.mark.usefixtures("ahead")
def test_a_process_that_writes_ahead_ends_when_its_rank_is_killed_and_leaves_errors_to_it(
    tmp_path: Path,
) -> None:
    files = [Source(Path(name)) for name in write(tmp_path)]
    (tmp_path / "bad.jsonl").write_text("no\n")
    cache = TokenCache(folder=tmp_path / "cache", tokenizer=BytesTokenizer())
    process = subprocess.Popen([sys.executable, "-m", "infinity.data.helpers"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    for order in (cache, [Source(tmp_path / "bad.jsonl"), files[0]], [files[1]]):
        process.stdin.write(pickle.dumps(order))
    process.stdin.close()  # as the system does
    assert process.wait(60) == 0
    assert not cache.entry([Source(tmp_path / "bad.jsonl")]).exists()


@pytest.mark.parametrize("malformed", [False, True])
def test_large_files_are_encoded_by_several_processes_into_the_same_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, malformed: bool
) -> None:
    files = [Source(Path(name)) for name in write(tmp_path)]
    (tmp_path / "c.txt").write_text("a text, which is not cut\n")
    with files[1].path.open("a") as file:
        file.write("no\n" * malformed)
    sources, said = [*files, Source(tmp_path / "c.txt")], list[str]()
    made, again = (
        TokenCache(folder=tmp_path / name, tokenizer=BytesTokenizer(), skip_malformed=malformed)
        for name in ("made", "again")
    )
    monkeypatch.setattr(helpers, "PART_NBYTES", 400)
    monkeypatch.setattr(helpers, "WORTH_NBYTES", 1000)
    monkeypatch.setattr(helpers, "usable_cores", lambda: 2)
    monkeypatch.setattr(helpers, "LINES_EVERY_S", 0)
    helpers.make_together(made, sources, said.append)
    assert [path.name for path in (tmp_path / "made").iterdir() if path.is_dir()] == [
        made.entry(sources).name
    ]
    assert any(re.fullmatch(r"tokenizing .*: \d+ of \d+ parts", line) for line in said)
    one, other = made.open(sources), again.open(sources)
    assert one.digest == other.digest
    assert one.malformed[0] == other.malformed[0] == malformed
    for name in ("values", "documents", "sources"):
        assert (getattr(one, name) == getattr(other, name)).all()


def test_nothing_is_encoded_in_parts_without_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [Source(Path(name)) for name in write(tmp_path)]
    monkeypatch.setattr(helpers, "PART_NBYTES", 400)
    monkeypatch.setattr(helpers, "WORTH_NBYTES", 1000)
    monkeypatch.setattr(helpers, "usable_cores", lambda: 2)
    monkeypatch.setattr(helpers, "free_host_nbytes", lambda: helpers.HELPER_NBYTES)
    cache = TokenCache(folder=tmp_path / "cache", tokenizer=BytesTokenizer())
    helpers.make_together(cache, sources, print)
    assert not cache.folder.exists()


def test_a_malformed_row_of_a_large_file_is_named_by_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write(tmp_path)
    with Path(files[0]).open("a") as file:
        file.write("no\n")
    monkeypatch.setattr(helpers, "PART_NBYTES", 400)
    monkeypatch.setattr(helpers, "WORTH_NBYTES", 1000)
    monkeypatch.setattr(helpers, "Helpers", lambda cache, count: Mock())
    with pytest.raises(DataError, match=rf"^{files[0]}:{ROWS // 2 + 1}: not JSON"):
        opened(tmp_path, files=files, streaming=False)


def test_tokenizers_and_caches_reach_another_process(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    for tokenizer in map(open_tokenizer, ("bytes", str(tmp_path), str(tmp_path / "tokenizer.json"))):
        cache = TokenCache(folder=tmp_path, tokenizer=tokenizer, reading=Reading(fields={"text": "t"}))
        again = pickle.loads(pickle.dumps(cache))
        assert again.tokenizer.encode("the cat").tolist() == tokenizer.encode("the cat").tolist()
        (tmp_path / "a.txt").write_text("the cat")
        assert again.entry([Source(tmp_path / "a.txt")]) == cache.entry([Source(tmp_path / "a.txt")])
