"""From what a recipe names to files, and from files to text and numbered lines."""

import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from infinity.core.errors import InfinityError

#: Text is read in whole lines, about this many characters at a time.
PIECE_CHARS = 1 << 20

_STDLIB_EXCEPT = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


class DataError(InfinityError, ValueError):
    """Training data is missing, malformed or too short."""


class Piece(NamedTuple):
    """Some text of a document, and whether the document ends with it."""

    text: str
    last: bool


def find_files(names: Sequence[str], *, key: str = "data.files") -> tuple[Path, ...]:
    """The files that ``names`` stand for, each once: in the order of names, sorted inside one.

    Args:
        names: Paths, globs (``**`` too), directories (their .txt and .jsonl files) or ``stdlib``.
        key: Where the names were given, for the error.

    Raises:
        DataError: A name that stands for no file.
    """
    found: dict[Path, None] = {}
    for name in names:
        matches = _stdlib() if name == "stdlib" else _matches(name)
        if not matches:
            raise DataError(
                f"{key}: {name!r} matches no file in {Path.cwd()}; give a path, a glob or 'stdlib'"
            )
        found.update(dict.fromkeys(path.resolve() for path in matches))
    return tuple(found)


def read_pieces(path: Path) -> Iterator[Piece]:
    """The text of ``path``, which is one document.

    Raises:
        DataError: Not readable, or not UTF-8; names the file and the line.
    """
    lines: list[str] = []
    size = 0
    with _readable(path), path.open(encoding="utf-8", newline="") as file:
        for _, line in _numbered(path, file):
            if size >= PIECE_CHARS:
                yield Piece("".join(lines), last=False)
                lines, size = [], 0
            lines.append(line)
            size += len(line)
    if lines:
        yield Piece("".join(lines), last=True)


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of ``path`` that hold more than blanks, with their numbers from 1.

    Raises:
        DataError: Not readable.
    """
    with _readable(path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                yield number, line


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def _stdlib() -> list[Path]:
    """Sources of Python's own library, without its tests: about the same on every machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(
        path for path in root.rglob("*.py") if not _STDLIB_EXCEPT.intersection(path.relative_to(root).parts)
    )


def _matches(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_dir():
        return sorted(each for each in path.rglob("*") if each.suffix in (".txt", ".jsonl"))
    if path.is_file():
        return [path]
    pattern = path.relative_to(path.anchor)  # Path.glob takes no absolute pattern
    if not pattern.parts:
        return []
    return sorted(each for each in Path(path.anchor).glob(str(pattern)) if each.is_file())


def _numbered(path: Path, file: Iterator[str]) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        for number, line in enumerate(file, start=1):
            yield number, line
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text, after line {number}: {error.reason}") from error
