"""Training data on disk: files found by their names, and their text or rows, a piece at a time.

Rows come from files by their suffix (``READERS``) and from directories that ``Dataset.save_to_disk`` wrote.
Other files are text. Memory does not grow with a file, but for a JSON array.
"""

import csv
import functools
import gzip
import io
import os
import re
import sysconfig
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from infinity.core.errors import library_errors, optional_package
from infinity.core.files import open_regular, read_file, user_path
from infinity.core.nbytes import format_nbytes
from infinity.data.formats import Reading, parse_json
from infinity.data.tokenizer import DataError, MalformedError

#: Text is read in whole lines, or whole words of longer ones, about this many characters at a time.
PIECE_CHARS = 1 << 20
#: A longer line of text may be cut where a part of its file begins, between words.
_LONG_LINE_NBYTES = 1 << 16
#: The longest line of JSONL that is read (bytes), and the largest JSON array.
_MOST_LINE_NBYTES, _MOST_JSON_NBYTES = 1 << 26, 1 << 30
#: Rows of Parquet and Arrow that memory holds at one time.
_BATCH_ROWS = 256
#: Directories left out of ``stdlib``, so that it is nearly the same on every machine.
_STDLIB_EXCEPT = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
_ENDS = ("\n", "\r")  # of a line
#: Files that describe a saved data set, the last one several.
_ABOUT = ("state.json", "dataset_info.json", "dataset_dict.json")
#: First words of names of files that are not for training, where others are.
_TRAIN, _HELD_OUT = {"train", "training"}, {"test", "testing", "validation", "valid", "val", "dev", "eval"}


#: Files that are read from their beginning only.
_FROM_THE_BEGINNING = {".jsonl.gz", ".json", ".csv", ".tsv", ".arrow"}


class Source(NamedTuple):
    """A file or saved data set, or part ``number`` of ``of`` about equal ones, with no row in common."""

    path: Path
    number: int = 0
    of: int = 1

    def __str__(self) -> str:
        return f"{self.path} (part {self.number + 1} of {self.of})" if self.of > 1 else str(self.path)

    @property
    def nbytes(self) -> int:
        """Return the bytes of its files, of a part about its share."""
        with readable(self.path):
            return sum(file.stat().st_size for file in files_of(self.path)) // self.of

    def range(self, count: int) -> range:
        """Return which of ``count`` things, in order, are of this part."""
        return range(count * self.number // self.of, count * (self.number + 1) // self.of)

    def parts(self, nbytes: int) -> list["Source"]:
        """Return its parts of about ``nbytes``, or itself, if it is read from its beginning only."""
        of = 1 if _suffix(self.path) in _FROM_THE_BEGINNING else max(1, -(-self.nbytes // nbytes))
        if of > 1 and self.path.suffix == ".parquet":
            with _parquet_file(self.path) as table:
                of = max(1, min(of, table.num_row_groups))
        return [Source(self.path, number, of) for number in range(of)]


def find_files(names: Sequence[str], *, key: str = "data.files") -> tuple[Path, ...]:
    """Find the sources of paths, globs (with ``**``), directories, names of the hub or ``stdlib``, each once.

    They are in the order of names, sorted within one. Errors name the recipe's ``key``.
    """
    found: dict[Path, None] = {}
    for name in names:
        path = user_path(name, key)
        path = downloaded(path) or path
        try:
            # without links, but for the last one where it has the suffix: the hub's cache has such
            files = [
                real
                if _suffix(real := each.resolve()) == _suffix(each)
                else each.parent.resolve() / each.name
                for each in _matches(name, path)
            ]
        except (OSError, ValueError, RuntimeError) as error:  # patterns, links to themselves
            reason = error.strerror if isinstance(error, OSError) else error
            raise DataError(f"{key}: {name!r}: {reason}; give a path, a glob or 'stdlib'") from error
        if not files:
            if path.is_dir():
                raise DataError(f"{key}: {name!r} has no files of {', '.join(sorted(_SUFFIXES))}")
            hint = (
                f"of a data set of the hub, run hf download --repo-type dataset {name}: nothing is downloaded"
            )
            hint = hint if may_be_of_hub(name) else "give a path, glob or 'stdlib'"
            raise DataError(f"{key}: {name!r} matches no file in {Path.cwd()}; {hint}")
        if path.is_dir() and (parts := _parts(files)):
            raise DataError(f"{key}: {name!r} has files of {parts}: give those to train on, as {name}/train*")
        found.update(dict.fromkeys(files))
    return tuple(found)


def may_be_of_hub(name: str) -> bool:
    """Return whether a name without a file has the form of those of the Hugging Face hub."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name)) and not re.search(r"\.[A-Za-z]\w*$", name)


def downloaded(path: Path) -> Path | None:
    """Return what ``owner/name``, or files of it, is in the hub's cache; None: it is not there."""
    if path.is_absolute() or path.exists() or not may_be_of_hub("/".join(path.parts[:2])):
        return None
    with suppress(Exception):  # no package, no such data set, or a cache that is something else
        from huggingface_hub import snapshot_download

        root = snapshot_download("/".join(path.parts[:2]), repo_type="dataset", local_files_only=True)
        return Path(root, *path.parts[2:])
    return None


def _parts(files: Sequence[Path]) -> str:
    """Say which files are not for training, if there are those that are; empty: all are alike."""
    words = [re.split(r"[-_.]", file.stem.lower())[0] if has_rows(file) else "" for file in files]
    others = [file.name for file, word in zip(files, words) if word in _HELD_OUT]
    return f"train and {others[0]}" if others and _TRAIN & {*words} else ""


def _matches(name: str, path: Path) -> list[Path]:
    if name == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        found = (each for each in root.rglob("*.py") if not _STDLIB_EXCEPT & {*each.relative_to(root).parts})
        return sorted(found)
    if (path / _ABOUT[2]).is_file():  # of a DatasetDict
        if not is_saved(path / "train"):
            raise ValueError(f"a saved data set without a part 'train': give one of {path}/*")
        return [path / "train"]
    if is_saved(path):
        return [path]
    if path.is_dir():
        found = (each for each in path.rglob("*") if _suffix(each) in _SUFFIXES)
        return sorted(each for each in found if each.is_file())
    if path.exists():
        return [path]  # a pipe or device is refused when it is opened
    # A directory that is there may have brackets in its name.
    base = next((parent for parent in path.parents if parent.is_dir()), Path(path.anchor))
    given = base.glob(str(path.relative_to(base)))
    return sorted(each for each in given if is_saved(each) or (each.is_file() and each.name not in _ABOUT))


def is_saved(path: Path) -> bool:
    """Return whether ``Dataset.save_to_disk`` wrote a directory."""
    return all((path / name).is_file() for name in _ABOUT[:2])


def files_of(source: Path) -> list[Path]:
    """Return the files of a source: itself, or those of a saved data set."""
    return sorted(source.iterdir()) if source.is_dir() else [source]


def stamps(source: Path) -> list[tuple[str, int, int]]:
    """Return name, bytes and time of the last change (ns) of each file of a source."""
    with readable(source):
        stats = ((file, file.stat()) for file in files_of(source))
        return [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in stats]


def has_rows(source: Path) -> bool:
    """Return whether a source has rows; else it is text."""
    return _suffix(source) in READERS or source.is_dir()


def _suffix(path: Path) -> str:
    return "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix


class Line(NamedTuple):
    """The place of a line, by its number in a part; lines before are counted where it is shown."""

    source: Source
    number: int

    def __str__(self) -> str:
        path, part, of = self.source
        before = sum(_count_lines(Source(path, each, of)) for each in range(part))
        return f"{path}:{before + self.number}"


@functools.cache
def _count_lines(source: Source) -> int:
    with _opened(source) as file:
        return sum(1 for _ in iter(lambda: file.readline(_MOST_LINE_NBYTES), b""))


#: Places, and what :meth:`Reading.standard` takes.
_Rows = Iterator[tuple[str | Line, Any]]


def _json_lines(source: Source, reading: Reading) -> _Rows:
    return ((Line(source, number), line) for number, line in read_lines(source))


def _json(source: Source, reading: Reading) -> _Rows:
    """Yield the objects of a JSON array; many files of this name are JSONL."""
    path = source.path
    with readable(path), open(open_regular(path), "rb") as file:
        is_array = file.read(2**16).removeprefix(BOM_UTF8).lstrip()[:1] == b"["
    if not is_array:
        yield from _json_lines(source, reading)
        return
    with readable(path):
        content = read_file(path, _MOST_JSON_NBYTES)
    with library_errors(DataError, f"{path}"):
        values = parse_json(content)
    yield from ((f"{path}: item {number}", value) for number, value in enumerate(values, start=1))


def _csv(source: Source, reading: Reading) -> _Rows:
    """Yield the rows of CSV (or TSV) with a header; all values are text."""
    path = source.path
    csv.field_size_limit(_MOST_LINE_NBYTES)
    delimiter = "\t" if path.suffix == ".tsv" else ","
    with readable(path), open(open_regular(path), encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, delimiter=delimiter, strict=True)
        header: list[str] | None = None
        while True:
            where = f"{path}:{lines.line_num + 1}"
            try:
                cells = next(lines, None)
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: not UTF-8 text: {error.reason}") from error
            except csv.Error as error:
                yield where, MalformedError(f"not CSV: {error}")
                continue
            if cells is None:
                return
            if header is None:
                header = cells
                _check_columns(header, path, reading)
            elif len(cells) == len(header):
                yield where, dict(zip(header, cells))
            elif cells:  # else the line is blank
                yield where, MalformedError(f"wanted {len(header)} cells, as in the header; got {len(cells)}")


def _parquet(source: Source, reading: Reading) -> _Rows:
    path = source.path
    with _parquet_file(path) as table:
        columns = _check_columns(table.schema_arrow.names, path, reading)
        groups = source.range(table.num_row_groups)
        first = sum(table.metadata.row_group(each).num_rows for each in range(groups.start))
        batches = table.iter_batches(_BATCH_ROWS, columns=columns, row_groups=[*groups])
        yield from _numbered(path, batches, first)


@contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    with _of_arrow(path, "Parquet") as file:
        from pyarrow import parquet

        yield parquet.ParquetFile(file)


def _arrow(source: Source, reading: Reading) -> _Rows:
    path = source.path
    with _of_arrow(path, "Arrow") as file:
        from pyarrow import ArrowInvalid, ipc

        try:
            stream = ipc.open_stream(file)
            batches: Iterator[Any] = iter(stream)
        except ArrowInvalid:
            file.seek(0)
            stream = ipc.open_file(file)
            batches = map(stream.get_batch, range(stream.num_record_batches))
        columns = _check_columns(stream.schema.names, path, reading)
        yield from _numbered(path, (batch.select(columns) for batch in batches))


def _saved(source: Source, reading: Reading) -> _Rows:
    path = source.path
    datasets = optional_package("datasets", "data", DataError, f"{path}: reading it needs datasets")
    with library_errors(DataError, f"{path}: datasets cannot load what save_to_disk wrote there"):
        saved = datasets.load_from_disk(str(path)).with_format("arrow")
    columns, of_part = _check_columns(saved.column_names, path, reading), source.range(len(saved))
    saved = saved.select_columns(columns).select(of_part)
    yield from _numbered(path, saved.iter(_BATCH_ROWS), of_part.start)


#: How rows are read, by the suffix of their file.
READERS: dict[str, Callable[[Source, Reading], _Rows]] = {
    ".jsonl": _json_lines, ".jsonl.gz": _json_lines, ".json": _json, ".csv": _csv, ".tsv": _csv,
    ".parquet": _parquet, ".arrow": _arrow,
}  # fmt: skip


def rows(source: Source, reading: Reading) -> _Rows:
    """Return places and rows of a source in order; DataError: it cannot be read, or no row has a format."""
    return READERS.get(_suffix(source.path), _saved)(source, reading)


#: Of files in a directory: what else is JSON there describes the data.
_SUFFIXES = {".txt", *READERS} - {".json"}


@contextmanager
def _of_arrow(path: Path, kind: str) -> Iterator[Any]:
    """Open a file, whose damage is a DataError."""
    optional_package("datasets", "data", DataError, f"{path}: reading it needs datasets")
    damaged = library_errors(DataError, f"{path}: cannot be read as {kind}")
    with readable(path), open(open_regular(path), "rb") as file, damaged:
        yield file


def _check_columns(columns: Sequence[str], path: Path, reading: Reading) -> list[str]:
    """Return those of a table's columns that formats read; DataError: they have none of the formats."""
    with library_errors(DataError, f"{path}"):
        reading.check(columns)
    return [name for name in columns if reading.is_read(name)]


def _numbered(path: Path, batches: Iterator[Any], number: int = 0) -> _Rows:
    """Yield the rows of batches, after ``number`` others; a null is a field that a row does not have."""
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield f"{path}: row {number}", {name: each for name, each in row.items() if each is not None}


def read_pieces(source: Source) -> Iterator[tuple[str, bool]]:
    """Yield pieces of whole lines, or of words of longer ones, and whether each is the last."""
    lines: list[str] = []
    size = number = 0
    with _opened(source) as stored, io.TextIOWrapper(stored, "utf-8-sig", newline="") as file:
        try:
            while line := file.readline(PIECE_CHARS):
                if size >= PIECE_CHARS:
                    text = "".join(lines)
                    end = len(text) if text.endswith(_ENDS) else max(text.rfind(" "), 0) or len(text)
                    yield text[:end], False
                    lines, size = [text[end:]], len(text) - end
                number += line.endswith(_ENDS)
                lines.append(line)
                size += len(line)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{source}: not UTF-8 text, after line {number}: {error.reason}; files are text, but for "
                f"those of {', '.join(READERS)}: decompress what is compressed"
            ) from error
    if lines:
        yield "".join(lines), True


@contextmanager
def _opened(source: Source) -> Iterator[Any]:
    """Open a file, or what gzip has compressed in it; of a part, its lines are in memory."""
    path = source.path
    with readable(path), open(open_regular(path), "rb") as file:
        if source.of > 1:
            part = source.range(os.fstat(file.fileno()).st_size)
            most = _MOST_LINE_NBYTES if has_rows(path) else _LONG_LINE_NBYTES
            begin, end = (_line_at(file, each, most) for each in (part.start, part.stop))
            file.seek(begin)
            yield io.BytesIO(file.read(end - begin))
        elif path.suffix == ".gz" and has_rows(path):
            with library_errors(DataError, f"{path}: cannot be read as gzip"), gzip.open(file) as whole:
                yield whole
        else:
            yield file


def _line_at(file: Any, offset: int, most: int) -> int:
    """Return where the first line begins, from ``offset`` on; in a line of ``most`` bytes a word, about."""
    file.seek(max(0, offset - 1))
    rest = file.readline(most) if offset else b""
    if len(rest) < most or rest.endswith(b"\n"):
        return int(file.tell())
    after = rest.find(b" ", 1)
    if after < 0:  # a character
        after = next((at for at in range(1, len(rest)) if rest[at] & 0xC0 != 0x80), len(rest))
    return offset - 1 + after


def read_lines(source: Source) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a source that are not blank, each after its number (from 1)."""
    with _opened(source) as file:
        for number, line in enumerate(iter(lambda: file.readline(_MOST_LINE_NBYTES + 1), b""), start=1):
            if len(line) > _MOST_LINE_NBYTES:
                raise DataError(
                    f"{Line(source, number)}: the line has more than {format_nbytes(_MOST_LINE_NBYTES)}; "
                    "wanted a document per line: cut this one into several"
                )
            if not line.isspace():
                yield number, line


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise errors of the file system as a DataError with the path."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
