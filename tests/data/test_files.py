"""Files are found in a fixed order, and what is wrong with them is said by file and line."""

import json
from pathlib import Path

import pytest

from infinity.app.data import files
from infinity.app.data.files import DataError, find_files, read_lines, read_pieces


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


def test_a_name_without_files_is_an_error_that_shows_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.files: '.*none\*\.txt' matches no file"):
        find_files([str(tmp_path / "none*.txt")])


def test_stdlib_is_this_machines_library_without_its_tests() -> None:
    found = find_files(["stdlib"])
    assert Path(json.__file__).resolve() in found
    assert not any({"site-packages", "test"} & set(path.parts) for path in found)
    assert list(found) == sorted(found)


def test_text_comes_whole_however_it_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {i}\r\nä\n" for i in range(50))
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    monkeypatch.setattr(files, "PIECE_CHARS", 10)
    pieces = list(read_pieces(path))
    assert len(pieces) > 10
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_lines_are_numbered_as_editors_do_and_blank_ones_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n \n\n{"text":\r "two"}\r\nlast')
    assert list(read_lines(path)) == [(1, b'{"text": "one"}\n'), (4, b'{"text":\r "two"}\r\n'), (5, b"last")]


def test_text_that_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine\n\xff\xfe\n")
    with pytest.raises(DataError, match="not UTF-8 text"):
        list(read_pieces(path))


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.txt: No such file"):
        list(read_pieces(tmp_path / "gone.txt"))
    with pytest.raises(DataError, match=r"gone\.jsonl: No such file"):
        list(read_lines(tmp_path / "gone.jsonl"))
