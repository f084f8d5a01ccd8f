"""Every kind of source gives the same documents; what is wrong with one is said with file and row."""

import csv
import gzip
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinity.data import sources
from infinity.data.formats import Reading
from infinity.data.opening import Data, DataConfig, open_data
from infinity.data.sequences import BatchShape
from infinity.data.sources import Source, find_files, rows
from infinity.data.tokenizer import BytesTokenizer, DataError, MalformedError
from infinity.data.tokens import TokenCache, Tokens
from infinity.recipes.loading import load_recipe

ROWS = [{"prompt": f"question {i}\n", "completion": f'an "answer", {i}\n', "id": i} for i in range(600)]
COLUMNS = ("prompt", "completion", "id")


def write_csv(path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(ROWS)


def write_json_lines(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def write_arrow(path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.Table.from_pylist(ROWS)
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, 100)


def write_parquet(path: Path, given: Any = ROWS) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(given), path, row_group_size=250)


def save_to_disk(path: Path) -> None:
    pytest.importorskip("datasets").Dataset.from_list(ROWS).save_to_disk(path)


def write_compressed(path: Path) -> None:
    write_json_lines(path)
    path.write_bytes(gzip.compress(path.read_bytes()))


WRITE = {
    "a.jsonl": write_json_lines,
    "a.jsonl.gz": write_compressed,
    "lines.json": write_json_lines,
    "array.json": lambda path: path.write_text(json.dumps(ROWS)),
    "a.csv": write_csv,
    "a.tsv": write_csv,
    "a.parquet": write_parquet,
    "a.arrow": write_arrow,
    "saved": save_to_disk,
}


def read(path: Path, **how: Any) -> Tokens:
    return TokenCache(folder=path.parent / "cache", tokenizer=BytesTokenizer(), **how).open([Source(path)])


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a home directory, in which nothing may be written."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.mark.parametrize("name", WRITE)
def test_every_kind_of_source_has_the_same_tokens(tmp_path: Path, name: str, unseen: Path) -> None:
    WRITE[name](tmp_path / name)
    write_json_lines(tmp_path / "expected.jsonl")
    tokens, expected = read(tmp_path / name), read(tmp_path / "expected.jsonl")
    assert len(expected.documents) == len(ROWS)
    assert tokens.digest == expected.digest
    assert np.array_equal(tokens.values, expected.values)
    assert not list(unseen.iterdir())


def test_a_saved_set_is_found_by_its_folder_and_a_dict_of_them_by_its_part(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    part = datasets.Dataset.from_list(ROWS[:5])
    datasets.DatasetDict(train=part, test=part.select([0])).save_to_disk(tmp_path / "both")
    datasets.DatasetDict(test=part).save_to_disk(tmp_path / "other")
    assert find_files([str(tmp_path / "both")]) == (tmp_path / "both/train",)
    assert find_files([str(tmp_path / "both/test")]) == (tmp_path / "both/test",)
    assert find_files([str(tmp_path / "both/*")]) == (tmp_path / "both/test", tmp_path / "both/train")
    with pytest.raises(DataError, match=r"a saved data set without a part 'train': give one of .*other/"):
        find_files([str(tmp_path / "other")])
    before = read(tmp_path / "both/train")
    shutil.rmtree(tmp_path / "both")
    datasets.DatasetDict(train=part.select([1])).save_to_disk(tmp_path / "both")
    assert read(tmp_path / "both/train").digest != before.digest  # not the cached ones


def test_a_directory_with_files_to_test_is_refused_and_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "dataset_infos.json").write_text("{}")  # which describes the data, and is none
    for name in ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"):
        write_json_lines(tmp_path / "data" / name)
    assert len(find_files([str(tmp_path)])) == 2
    write_json_lines(tmp_path / "data/test-00000-of-00001.jsonl")
    with pytest.raises(DataError, match=r"has files of train and test-00000-of-00001\.jsonl: give those to"):
        find_files([str(tmp_path)])
    assert len(find_files([str(tmp_path / "data/train*")])) == 2
    for name in ("train.txt", "test.txt", "on-train.jsonl"):  # texts, and another first word, are no parts
        (tmp_path / "data" / "texts").mkdir(exist_ok=True)
        (tmp_path / "data" / "texts" / name).write_text("{}")
    assert len(find_files([str(tmp_path / "data/texts")])) == 3


def test_a_directory_of_compressed_files_says_which_files_it_would_take(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match=r"has no files of \.arrow, \.csv, \.jsonl"):
        find_files([str(tmp_path)])


def test_a_damaged_or_cut_compressed_file_is_named(tmp_path: Path) -> None:
    write_compressed(tmp_path / "a.jsonl.gz")
    assert find_files([str(tmp_path)]) == (tmp_path / "a.jsonl.gz",)
    whole = (tmp_path / "a.jsonl.gz").read_bytes()
    for damaged in (b"{}", whole[: len(whole) // 2], whole[:30] + bytes(40) + whole[70:]):
        (tmp_path / "a.jsonl.gz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"a\.jsonl\.gz: cannot be read as gzip: "):
            read(tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize("name", ["a.jsonl", "lines.json", "array.json", "a.csv"])
def test_a_byte_order_mark_is_no_part_of_a_row(tmp_path: Path, name: str) -> None:
    WRITE[name](tmp_path / name)
    path = tmp_path / f"marked-{name}"
    path.write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes())
    marked, plain = (
        [Reading().standard(row) for _, row in rows(Source(each), Reading())]
        for each in (path, tmp_path / name)
    )
    assert marked == plain


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffhello".encode())
    assert [*sources.read_pieces(Source(tmp_path / "a.txt"))] == [("hello", True)]


def test_a_name_of_the_hub_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="run hf download --repo-type dataset tatsu-lab/alpaca: nothing is"):
        find_files(["tatsu-lab/alpaca"])
    with pytest.raises(DataError, match="give a path, glob or 'stdlib'"):
        find_files(["data/chat.jsonl"])


def test_a_name_of_the_hub_is_what_was_downloaded_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the hub's cache are links, whose targets have other names."""
    cache = tmp_path / "hub/datasets--some--chats"
    for folder in ("blobs", "refs", "snapshots/1234/data"):
        (cache / folder).mkdir(parents=True)
    (cache / "refs/main").write_text("1234")
    for name in ("train-0", "train-1", "test-0"):
        (cache / "blobs" / f"sum{name}").write_text(json.dumps({"text": name}) + "\n")
        (cache / f"snapshots/1234/data/{name}.jsonl").symlink_to(f"../../../blobs/sum{name}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    found = find_files(["some/chats/data/train*"])
    first = (next(rows(Source(file), Reading()))[1] for file in found)
    assert [Reading().standard(row) for row in first] == [
        {"text": "train-0"}, {"text": "train-1"}
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"has files of train and test-0\.jsonl: give those to train on"):
        find_files(["some/chats"])
    recipe = load_recipe(overrides=["data.files=[some/chats/data/train*]"])
    assert recipe.with_absolute_paths().data.files == ("some/chats/data/train*",)  # a run that goes on has it
    with pytest.raises(DataError, match="run hf download --repo-type dataset some/others"):
        find_files(["some/others"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "prompt,completion\na,b\nc\n", r"a\.csv:3: wanted 2 cells, as in the header; got 1"),
        ("a.csv", 'prompt,completion\na,"b"c\nd,e\n', r"a\.csv:2: not CSV: .*; data\.skip_malformed=true"),
        ("a.csv", 'prompt,completion\na,"b\n\n', r"a\.csv:2: not CSV: unexpected end of data"),
        ("a.csv", "question,completion\na,b\n", r"a\.csv: wanted .*; got the fields question, completion"),
        ("a.csv", b"prompt,completion\na,\xff\n", r"a\.csv:\d: not UTF-8 text"),
        ("a.gz", b"\x1f\x8b\xff", r"a\.gz: not UTF-8 text, .*decompress what is compressed"),
        ("a.json", '[{"text": "a"}, 3]', r"a\.json: item 2: wanted an object; got int"),
        ("a.json", '[{"text": "a"}, {"body": "b"}]', r"a\.json: item 2: wanted .*; got the fields body"),
        ("a.json", '[{"text": "a"},', r"a\.json: not JSON"),
        ("a.json", '{"text": "a"}\n{"text":', r"a\.json:2: not JSON"),
        ("a.parquet", "no", r"a\.parquet: cannot be read as Parquet: "),
        ("a.arrow", "no", r"a\.arrow: cannot be read as Arrow: "),
    ],
)
def test_what_is_wrong_with_a_source_is_said_with_its_place(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    if name in ("a.parquet", "a.arrow"):
        pytest.importorskip("datasets")
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message) as raised:
        read(tmp_path / name)
    assert str(raised.value).startswith(str(tmp_path))


def test_rows_of_columns_are_numbered_and_nulls_are_fields_that_a_row_lacks(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    mixed = [{"text": "one"}, {"text": None, "prompt": "2", "completion": "3"}, {"text": None}]
    write_parquet(
        tmp_path / "a.parquet", [dict.fromkeys(("text", "prompt", "completion")) | row for row in mixed]
    )
    with pytest.raises(DataError, match=r"a\.parquet: row 3: wanted .*; got none"):
        read(tmp_path / "a.parquet")
    tokens = read(tmp_path / "a.parquet", skip_malformed=True)
    assert bytes(tokens.values) == b"one\x0023\0"
    assert tokens.malformed[0] == 1
    assert tokens.sources.tolist() == [[2, 7, 1]]


def test_a_typo_in_fields_is_found_before_a_row_is_read(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    write_parquet(tmp_path / "a.parquet")
    how = Reading(fields={"prompt": "promt"})
    with pytest.raises(DataError, match=r"a\.parquet: data") as raised:
        read(tmp_path / "a.parquet", reading=Reading(("text",), {"text": "promt"}), skip_malformed=True)
    assert "data.fields.text: got promt; wanted one of the fields prompt, completion, id; " in str(
        raised.value
    )
    assert str(raised.value).endswith("did you mean prompt?")
    assert len(read(tmp_path / "a.parquet", reading=how).documents) == 600  # it has its own


def test_columns_that_no_format_reads_stay_where_they_are(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    write_parquet(tmp_path / "a.parquet")
    reading = Reading(fields={"text": "id"}, formats=("text",))
    ((_, row), *_) = rows(Source(tmp_path / "a.parquet"), reading)
    assert reading.standard(row) == {"text": 0}
    seen = [each for _, each in sources.READERS[".parquet"](Source(tmp_path / "a.parquet"), Reading())]
    assert not isinstance(seen[0], MalformedError)
    assert seen[0].keys() == {"prompt", "completion"}


def test_without_datasets_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"a\.parquet: reading it needs datasets: pip install 'infinity-offl"):
        read(tmp_path / "a.parquet")


def open_files(tmp_path: Path, *names: str, **settings: Any) -> Data:
    settings = {"eval_fraction": 0.0} | settings
    config = DataConfig(
        files=tuple(str(tmp_path / name) for name in names), cache=str(tmp_path / "cache"), **settings
    )
    return open_data(config, BatchShape(seq_len=64, batch_size=2), vocab_size=256)


@pytest.mark.parametrize("content", ["", "prompt,completion\n", "text\n\n\n"])
def test_an_empty_source_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.csv").write_text(content)
    write_csv(tmp_path / "b.csv")
    with pytest.raises(DataError, match=r"^data\.files \(.*a\.csv\): nothing is left to train on: it is emp"):
        open_files(tmp_path, "a.csv")
    assert "600 documents" in str(open_files(tmp_path, "a.csv", "b.csv").notes)
    with pytest.raises(DataError, match=r"a\.csv: nothing is left to train on: it is empty"):
        open_files(tmp_path, "a.csv", "b.csv", weights=(1.0, 1.0))


def test_if_all_rows_are_malformed_the_error_says_so_with_the_first(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("no\n" * 3)
    with pytest.raises(DataError, match=r"left to train on: 3 rows are malformed; the first: .*:1: not JSON"):
        open_files(tmp_path, "a.jsonl", skip_malformed=True)
