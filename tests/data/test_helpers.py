"""Large files encoded by several processes: parts of files, every row once, errors named by their line."""

import json
import pickle
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.data import helpers
from infinity.data.formats import Reading
from infinity.data.opening import DataConfig, open_data
from infinity.data.sequences import BatchShape
from infinity.data.sources import Source, read_lines, rows
from infinity.data.tokenizer import BytesTokenizer, DataError, open_tokenizer
from infinity.data.tokens import TokenCache
from tests.data.test_sources import save_to_disk, write_parquet
from tests.helpers.cases import examples
from tests.helpers.limits import comes_true
from tests.helpers.tokenizers import write_tokenizer

#: Rows of two files, each of 8 characters.
ROWS = 160


def write(folder: Path) -> list[str]:
    for name in "ab":
        lines = [{"text": f"{name}{number:07}"} for number in range(ROWS // 2)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [str(folder / f"{name}.jsonl") for name in "ab"]


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


@pytest.mark.parametrize(("name", "made"), [("a.parquet", write_parquet), ("saved", save_to_disk)])
def test_parts_of_tables_are_all_rows_each_once(tmp_path: Path, name: str, made: Any) -> None:
    pytest.importorskip("datasets")
    made(tmp_path / name)
    source = Source(tmp_path / name)
    parts = [[*rows(part, Reading())] for part in source.parts(4096)]
    assert len(parts) >= 3
    assert all(parts)
    assert [*chain(*parts)] == [*rows(source, Reading())]


def test_a_process_that_encodes_ends_with_its_rank_and_leaves_errors_to_it(tmp_path: Path) -> None:
    files = [Source(Path(name)) for name in write(tmp_path)]
    (tmp_path / "bad.jsonl").write_text("no\n")
    cache, bad = TokenCache(folder=tmp_path / "cache", tokenizer=BytesTokenizer()), tmp_path / "bad.jsonl"
    working = helpers.Helpers(cache, [Source(bad), *files], 1)
    [process] = working.processes
    assert comes_true(lambda: all(cache.entry([file]).exists() for file in files))
    assert process.wait(60) == 0
    assert not cache.entry([Source(bad)]).exists()
    working.end()
    for file in files:
        cache.remove([file])
    orphan = subprocess.Popen([sys.executable, "-m", "infinity.data.helpers"], stdin=subprocess.PIPE)
    orphan.communicate(pickle.dumps((cache, files, 0)))  # its rank is another process, which has ended
    assert orphan.returncode == 0
    assert not any(cache.entry([file]).exists() for file in files)


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
    monkeypatch.setattr(helpers, "Helpers", lambda *given: Mock())
    config = DataConfig(files=tuple(files), cache=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=rf"^{files[0]}:{ROWS // 2 + 1}: not JSON"):
        open_data(config, BatchShape(seq_len=20, batch_size=2), vocab_size=256)


def test_tokenizers_and_caches_reach_another_process(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    for tokenizer in map(open_tokenizer, ("bytes", str(tmp_path), str(tmp_path / "tokenizer.json"))):
        cache = TokenCache(folder=tmp_path, tokenizer=tokenizer, reading=Reading(fields={"text": "t"}))
        again = pickle.loads(pickle.dumps(cache))
        assert again.tokenizer.encode("the cat").tolist() == tokenizer.encode("the cat").tolist()
        (tmp_path / "a.txt").write_text("the cat")
        assert again.entry([Source(tmp_path / "a.txt")]) == cache.entry([Source(tmp_path / "a.txt")])
