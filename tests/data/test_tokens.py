"""Tokens are the files' text, cached once, under a name that changes when they do."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinity.app.data import tokens as tokens_module
from infinity.app.data.files import DataError
from infinity.app.data.tokenizer import BytesTokenizer, open_tokenizer
from infinity.app.data.tokens import open_tokens

tokenizers = pytest.importorskip("tokenizers")


def write_tokenizer(path: Path) -> Path:
    vocabulary = {"<|endoftext|>": 0, "unk": 1, "the": 2, "cat": 3}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="unk"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.save(str(path))
    return path


def test_bytes_of_every_file_are_followed_by_a_separator(tmp_path: Path) -> None:
    files = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    files[0].write_text("aä\n")
    files[1].write_text(json.dumps({"text": "x"}) + "\n" + json.dumps({"text": "y"}))
    found = open_tokens(files, BytesTokenizer(), tmp_path / "cache")
    assert bytes(found.values) == "aä\n\0x\0y\0".encode()
    assert found.values.dtype == np.uint8


def test_a_local_tokenizer_gives_its_own_numbers(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(write_tokenizer(tmp_path / "tokenizer.json")))
    (tmp_path / "a.txt").write_text("the cat sat")
    found = open_tokens([tmp_path / "a.txt"], tokenizer, tmp_path / "cache")
    assert found.values.tolist() == [2, 3, 1, 0]
    assert tokenizer.vocab_size == 4


def test_tokenizers_that_are_not_there_or_not_tokenizers_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"No such file.*wanted bytes, a tokenizer\.json or a dir"):
        open_tokenizer(str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"bad\.json: not a tokenizer\.json"):
        open_tokenizer(str(tmp_path / "bad.json"))


def test_the_cache_is_written_once_also_by_many_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("hello")
    written = []
    write = tokens_module._write
    begin = threading.Barrier(8)

    def write_slowly(*args: Any) -> None:
        written.append(1)
        time.sleep(0.2)
        write(*args)

    monkeypatch.setattr(tokens_module, "_write", write_slowly)
    found: list[bytes] = []

    def open_it() -> None:
        begin.wait()
        found.append(bytes(open_tokens([tmp_path / "a.txt"], BytesTokenizer(), tmp_path / "cache").values))

    threads = [threading.Thread(target=open_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"hello\0"] * 8
    assert len(written) == 1
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = open_tokens([path], BytesTokenizer(), tmp_path / "cache")
    path.write_text("two")  # as long as before
    os.utime(path, (1, 1))
    second = open_tokens([path], BytesTokenizer(), tmp_path / "cache")
    assert bytes(second.values) == b"two\0"
    assert first.digest != second.digest


def test_equal_text_elsewhere_has_an_equal_digest(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("same")
    digests = {
        open_tokens([tmp_path / name], BytesTokenizer(), tmp_path / "cache").digest
        for name in ("a.txt", "b.txt")
    }
    assert len(digests) == 1


def test_a_failure_leaves_no_cache_behind(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("nonsense")
    for _ in range(2):
        with pytest.raises(DataError, match="not JSON"):
            open_tokens([tmp_path / "a.jsonl"], BytesTokenizer(), tmp_path / "cache")
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} <= {".lock"}


def test_a_cache_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "cache").write_text("a file is in the way")
    with pytest.raises(DataError, match=r"data\.cache: .*cache"):
        open_tokens([tmp_path / "a.txt"], BytesTokenizer(), tmp_path / "cache")


def test_people_are_told_how_far_a_long_tokenisation_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file in files:
        file.write_text("word " * 10)
    said: list[str] = []
    open_tokens(files, BytesTokenizer(), tmp_path / "quick", say=said.append)
    assert said == []
    monkeypatch.setattr(tokens_module, "LINES_EVERY_S", 0.0)
    open_tokens(files, BytesTokenizer(), tmp_path / "slow", say=said.append)
    assert said[0].startswith(f"tokenising {files[0]}, 1 of 2: ")
    assert said[-1] == f"tokenising {files[1]}, 2 of 2: 102 tokens so far"
    said.clear()
    open_tokens(files, BytesTokenizer(), tmp_path / "slow", say=said.append)  # they are there
    assert said == []
