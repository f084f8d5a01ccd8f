"""Files are found in a fixed order; errors name file and line; JSONL records follow from their fields."""

import itertools
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.data import sources as documents_module
from infinity.data.formats import Completion, Reading, document_of
from infinity.data.sources import Source, find_files, read_lines, read_pieces
from infinity.data.tokenizer import Chat, DataError, MalformedError
from tests.helpers.cases import examples


def test_names_keep_their_order_and_each_file_comes_once(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.jsonl", "skip.bin"):
        (tmp_path / name).write_text("x")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "d.txt").write_text("x")

    def found(*patterns: str) -> list[str]:
        return [path.name for path in find_files([str(tmp_path / pattern) for pattern in patterns])]

    assert found("*.txt") == ["a.txt", "b.txt"]
    assert found("b.txt", "*.txt") == ["b.txt", "a.txt"]
    assert found("**/*.txt") == ["a.txt", "b.txt", "d.txt"]
    assert found("") == ["a.txt", "b.txt", "c.jsonl", "d.txt"]


def test_relative_globs_start_at_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    assert find_files(["*.txt"]) == (tmp_path / "a.txt",)


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    for name in ("pipe.txt", "pipe.jsonl"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "a.txt").write_text("x")
    assert [path.name for path in find_files([str(tmp_path)])] == ["a.txt"]
    for path in (tmp_path / "pipe.txt", Path("/dev/zero")):
        assert find_files([str(path)]) == (path,)
        for read in (read_lines, read_pieces):
            with pytest.raises(DataError, match=rf"{path}: not a regular file"):
                list(read(Source(path)))


def test_a_line_of_records_has_a_limit(tmp_path: Path) -> None:
    path, most = tmp_path / "a.jsonl", 2**26
    with path.open("wb") as file:  # zeros, of which a hole takes no room
        for length in (most, most + 1):
            file.seek(length - 1, os.SEEK_CUR)
            file.write(b"\n")
    with pytest.raises(
        DataError, match=r"a\.jsonl:2: the line has more than 64 MiB; wanted a document per line"
    ):
        list(read_lines(Source(path)))


def test_a_long_line_of_text_is_cut_before_a_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "PIECE_CHARS", 20)
    path = tmp_path / "a.txt"
    words, word = "some words " * 30, "x" * 95
    for text in (words, f"one\n{words}\nlast", word, word + " y\n" * 9):
        path.write_text(text)
        pieces = [text for text, _ in read_pieces(Source(path))]
        assert "".join(pieces) == text
        assert max(map(len, pieces)) < 40
        for before, after in itertools.pairwise(pieces):
            assert before.endswith("\n") or after.startswith(" ") or " " not in before


def test_a_name_without_files_is_an_error_that_shows_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.files: '.*none\*\.txt' matches no file"):
        find_files([str(tmp_path / "none*.txt")])


def test_stdlib_is_this_machines_library_without_its_tests() -> None:
    found = find_files(["stdlib"])
    assert Path(json.__file__).resolve() in found
    assert not any({"site-packages", "test"} & set(path.parts) for path in found)
    assert len(set(found)) == len(found)


def test_text_comes_whole_however_it_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {i}\r\nä\n" for i in range(50))
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    monkeypatch.setattr(documents_module, "PIECE_CHARS", 10)
    pieces = list(read_pieces(Source(path)))
    assert len(pieces) > 10
    assert "".join(piece for piece, _ in pieces) == text
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]


def test_lines_are_numbered_as_editors_do_and_blank_ones_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n \n\n{"text":\r "two"}\r\nlast')
    assert list(read_lines(Source(path))) == [
        (1, b'{"text": "one"}\n'),
        (4, b'{"text":\r "two"}\r\n'),
        (5, b"last"),
    ]


def test_text_that_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine\n\xff\xfe\n")
    with pytest.raises(DataError, match="not UTF-8 text"):
        list(read_pieces(Source(path)))


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.txt: No such file"):
        list(read_pieces(Source(tmp_path / "gone.txt")))
    with pytest.raises(DataError, match=r"gone\.jsonl: No such file"):
        list(read_lines(Source(tmp_path / "gone.jsonl")))


ASKED = {"role": "user", "content": "?"}
ANSWERED = {"role": "assistant", "content": "!"}


def line(value: Any) -> bytes:
    return json.dumps(value).encode()


def parse_record(content: bytes) -> str | Completion | Chat:
    return document_of(Reading().standard(content))


def test_the_kind_of_a_record_follows_from_its_fields() -> None:
    assert parse_record(line({"text": "a", "id": 1})) == "a"
    assert parse_record(line({"prompt": "a", "completion": "b", "text": "c"})) == Completion("a", "b")
    chat = {"messages": [ASKED, ANSWERED], "prompt": "?", "tools": [{"name": "f"}]}
    assert parse_record(line(chat)) == Chat([ASKED, ANSWERED], [{"name": "f"}])


def test_null_fields_of_a_message_are_dropped() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    chat = parse_record(line({"messages": [ASKED, called], "tools": None}))
    assert chat == Chat([ASKED, {"role": "assistant", "tool_calls": [{"name": "f"}]}], None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "cut', "not JSON: Unterminated string"),
        (b"\xff\xfe", "not UTF-8 text at byte 0"),
        (b'{"text": "\\ud83d"}', "half of a surrogate pair is not text"),
        (b"[" * 100_000, "not JSON: .*(recursion|Stack overflow)"),
        (b"1" * 5000, "not JSON: Exceeds the limit"),
        (b'{"body": "x", "id": 1}', "wanted 'messages', .*, or 'text'; got the fields body, id"),
        (b"{}", "got none"),
        (b'{"prompt": "x"}', "got the fields prompt"),
        (b'{"prompt": "x", "completion": 1}', "'completion': wanted a string; got int"),
        (b'{"text": null}', "'text': wanted a string; got null"),
        (b"[1]", "wanted an object; got list"),
        (b'{"messages": []}', "'messages': wanted a non-empty list; got an empty list"),
        (b'{"messages": "hi"}', "'messages': wanted a non-empty list; got str"),
        (b'{"messages": [{"role": "assistant"}, "hi"]}', "message 2: wanted an object whose 'role'"),
        (b'{"messages": [{"role": 1}]}', "message 1: wanted an object whose 'role' is a string"),
        (b'{"messages": [{"role": "user", "content": "?"}]}', "none has the role assistant"),
        (b'{"messages": [{"role": "assistant"}], "tools": "f"}', "'tools': wanted a list; got str"),
        (b'{"instruction": 1, "output": "x"}', "'instruction' and 'input': wanted strings"),
        (b'{"instruction": "x", "output": "y", "history": ["z"]}', "'history': wanted pairs of question"),
        (b'{"conversations": [{"from": "human", "value": "?"}]}', "none has the role assistant"),
    ],
)
def test_a_malformed_line_is_rejected_with_the_reason(content: bytes, message: str) -> None:
    with pytest.raises(MalformedError, match=message):
        parse_record(content)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["text", "prompt", "completion", "messages", "role", "content", "tools"]), inner
        )
    ),
    max_leaves=12,
)


@examples(300)
@given(st.binary(max_size=60) | VALUES.map(line))
def test_any_line_is_a_record_or_malformed(content: bytes) -> None:
    with suppress(MalformedError):
        record = parse_record(content)
        assert isinstance(record, str | Completion | Chat)
        json.dumps(record, ensure_ascii=False).encode()  # no half of a surrogate pair is left
