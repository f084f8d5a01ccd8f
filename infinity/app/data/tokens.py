"""All tokens of some files as arrays on disk, written once and mapped into memory.

The cache's name is a digest of the files (path, size, time of change) and the tokenizer, so a
changed file is a new cache. Ranks that start together meet at a lock: one writes, the others wait.
"""

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infinity.app.data.documents import Chunk, read_documents
from infinity.app.data.files import DataError
from infinity.app.data.tokenizer import Tokenizer
from infinity.core.files import lock_file

_FORMAT = 2
#: Between two lines while tokens are written (s).
LINES_EVERY_S = 10.0

_TOKENS, _COUNTS, _DOCUMENTS, _ABOUT = "tokens", "counts", "documents", "about.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens of all documents end to end, read-only and mapped from disk.

    Attributes:
        values: ``(tokens,)``.
        counts: ``(tokens,)`` bool: which are learned; None where all are.
        documents: ``(documents, 3)`` int64: first token, the one after the last, and how many are
            learned.
        largest: The largest of ``values``; -1 where there is none.
        digest: Equal where the rest is.
        malformed: Lines that were left out, and the error of the first of them.
    """

    values: NDArray[Any]
    counts: NDArray[np.bool_] | None
    documents: NDArray[np.int64]
    largest: int
    digest: str
    malformed: tuple[int, str] = (0, "")

    def part(self, first: int, stop: int) -> "Tokens":
        """The same tokens with some of the documents."""
        return replace(self, documents=self.documents[first:stop])


#: Gets lines for people.
Say = Callable[[str], object]


def silent(line: str) -> None:
    """Nobody listens."""


def open_tokens(
    files: Sequence[Path], tokenizer: Tokenizer, cache: Path, *, skip_malformed: bool = False,
    say: Say = silent,
) -> Tokens:  # fmt: skip
    """The tokens of ``files`` in order, mapped from ``cache``.

    Memory does not grow with the files.

    Args:
        skip_malformed: Count lines of JSONL that cannot be used, instead of raising.
        say: Gets a line now and then, while this process writes for long.

    Raises:
        DataError: A file is missing or malformed, or the cache cannot be written.
    """
    path = cache / _key(files, tokenizer, skip_malformed)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _write_once(path, lambda folder: _write(files, tokenizer, folder, skip_malformed, say))
        about = json.loads((path / _ABOUT).read_text(encoding="utf-8"))
        return Tokens(
            values=_map(path / _TOKENS, tokenizer.encode("").dtype),
            counts=_map(path / _COUNTS, np.dtype(np.bool_)) if about["counted"] else None,
            documents=_map(path / _DOCUMENTS, np.dtype(np.int64)).reshape(-1, 3),
            largest=about["largest"],
            digest=about["digest"],
            malformed=(about["malformed"], about["first_malformed"]),
        )
    except OSError as error:
        raise DataError(f"data.cache: {error.filename or path}: {error.strerror}") from error


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    if not path.stat().st_size:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def _key(files: Sequence[Path], tokenizer: Tokenizer, skip_malformed: bool) -> str:
    seen: list[object] = [_FORMAT, tokenizer.fingerprint, skip_malformed]
    for file in files:
        try:
            stat = file.stat()
        except OSError as error:
            raise DataError(f"{file}: {error.strerror}") from error
        seen.append((str(file), stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:32]


def _write_once(path: Path, write: Callable[[Path], None]) -> None:
    """Write ``path`` unless another process does first; it appears whole or not at all."""
    lock = lock_file(path.with_suffix(".lock"), patience_s=math.inf)
    try:
        if path.exists():
            return
        partial = path.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a writer that was killed: it holds no lock
        try:
            partial.mkdir()
            write(partial)
            partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    finally:
        os.close(lock)


def _write(files: Sequence[Path], tokenizer: Tokenizer, folder: Path, skip_malformed: bool, say: Say) -> None:
    errors, said_s = _Malformed(skip_malformed), time.monotonic()
    with _Writer(folder) as writer:
        for number, file in enumerate(files, start=1):
            for chunk in read_documents(file, tokenizer, errors):
                writer.add(chunk)
                if time.monotonic() - said_s >= LINES_EVERY_S:
                    said_s = time.monotonic()
                    say(f"tokenising {file}, {number} of {len(files)}: {writer.count:,} tokens so far")
    if not writer.counted:
        (folder / _COUNTS).unlink()  # ones only
    about = {
        "largest": writer.largest,
        "digest": writer.digest.hexdigest(),
        "counted": writer.counted,
        "malformed": errors.number,
        "first_malformed": errors.first,
    }
    (folder / _ABOUT).write_text(json.dumps(about), encoding="utf-8")


@dataclass(slots=True)
class _Malformed:
    """Raises the error of a line, or counts it."""

    skip: bool
    number: int = 0
    first: str = ""

    def __call__(self, error: DataError) -> None:
        if not self.skip:
            raise DataError(f"{error}; data.skip_malformed=true leaves such lines out") from error
        self.first = self.first or str(error)
        self.number += 1


@dataclass(slots=True)
class _Writer:
    """Appends chunks to the files of a cache."""

    folder: Path
    digest: Any = field(default_factory=hashlib.sha256)
    counted: bool = False  # some token is not learned
    largest: int = -1
    _files: ExitStack = field(default_factory=ExitStack)
    _tokens: Any = None
    _counts: Any = None
    _documents: Any = None
    count: int = 0  # tokens so far
    _began: int = 0  # where the open document begins
    _learned: int = 0  # tokens of it

    def __enter__(self) -> "_Writer":
        self._tokens, self._counts, self._documents = (
            self._files.enter_context((self.folder / name).open("wb"))
            for name in (_TOKENS, _COUNTS, _DOCUMENTS)
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def add(self, chunk: Chunk) -> None:
        counts = np.ones(len(chunk.tokens), np.bool_) if chunk.counts is None else chunk.counts
        self._append(self._tokens, chunk.tokens)
        self._append(self._counts, counts)
        self.counted |= not counts.all()
        self.largest = max(self.largest, int(chunk.tokens.max(initial=0)))
        self._learned += int(counts.sum())
        self.count += len(counts)
        if chunk.last:
            self._append(self._documents, np.array([self._began, self.count, self._learned], np.int64))
            self._began, self._learned = self.count, 0

    def _append(self, file: Any, values: NDArray[Any]) -> None:
        content = values.tobytes()
        self.digest.update(content)
        file.write(content)
