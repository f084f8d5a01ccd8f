"""Tokenized training data: documents encoded once, cached on disk and mapped into memory.

The name of a cache entry is a digest of the files (path, size, modification time), the tokenizer and the
user, so a changed file gets a new entry. Only that user can read it: tokens are as private as the text. Ranks
that start together meet at a lock: one writes, the others wait.
"""

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from infinity.core.errors import UnsafePathError
from infinity.core.files import create_file, lock_file, own_directory, sync, write_file
from infinity.recipes.data.documents import (
    Chat,
    Completion,
    DataError,
    MalformedError,
    parse_record,
    read_lines,
    read_pieces,
)
from infinity.recipes.data.tokenizer import Encoded, Tokenizer, encode_completion

_FORMAT = 3
#: Seconds between progress lines while tokens are written.
LINES_EVERY_S = 10.0

_TOKENS, _LOSS_MASK, _DOCUMENTS, _ABOUT = "tokens", "counts", "documents", "about.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens of all documents end to end, read-only and memory-mapped.

    Attributes:
        values: ``(tokens,)``.
        loss_mask: ``(tokens,)`` bool, True where a token counts in the loss; None: all of them count.
        documents: ``(documents, 3)`` int64: first token, end (exclusive), and number of tokens that
            count in the loss.
        largest: The largest of ``values``; -1 if there are none.
        digest: Hash of the contents.
        malformed: Number of lines that were skipped, and the error of the first of them.
    """

    values: NDArray[Any]
    loss_mask: NDArray[np.bool_] | None
    documents: NDArray[np.int64]
    largest: int
    digest: str
    malformed: tuple[int, str] = (0, "")

    def part(self, first: int, stop: int) -> "Tokens":
        """Return the same tokens with only the documents ``first`` to ``stop`` (exclusive)."""
        return replace(self, documents=self.documents[first:stop])


def open_tokens(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    cache: Path,
    *,
    skip_malformed: bool = False,
    log: Callable[[str], object] = lambda line: None,
) -> Tokens:
    """Return the tokens of ``files`` in order, mapped from ``cache``; tokenize them first if needed.

    Memory does not grow with the files.

    Args:
        skip_malformed: Count malformed lines of JSONL instead of raising.
        log: Called with a progress line every ten seconds while this process writes tokens.

    Raises:
        DataError: A file is missing or malformed, or the cache cannot be written.
    """
    path = cache / _key(files, tokenizer, skip_malformed)
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _write_once(path, lambda folder: _write(files, tokenizer, folder, skip_malformed, log))
        own_directory(path)  # no other user writes or reads the tokens
        return _read_entry(path, tokenizer.encode("").dtype)
    except UnsafePathError as error:
        raise DataError(f"data.cache: {error.strerror}") from error
    except OSError as error:
        raise DataError(f"data.cache: {error.filename or path}: {error.strerror}") from error


def _read_entry(path: Path, dtype: np.dtype[Any]) -> Tokens:
    """Map the cache entry ``path``, whose tokens are ``dtype``.

    Raises:
        DataError: A file of it is not as it was written, as far as its length says.
        OSError: It cannot be read.
    """
    try:
        about = json.loads((path / _ABOUT).read_text("utf-8"))
        count, masked = about["tokens"], about["counted"]
        return Tokens(
            values=_map(path / _TOKENS, dtype, (count,)),
            loss_mask=_map(path / _LOSS_MASK, np.dtype(np.bool_), (count,)) if masked else None,
            documents=_map(path / _DOCUMENTS, np.dtype(np.int64), (about["documents"], 3)),
            largest=about["largest"],
            digest=about["digest"],
            malformed=(about["malformed"], about["first_malformed"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"data.cache: {path} is damaged: {error}; remove it, and the next run writes it again"
        ) from error


class Chunk(NamedTuple):
    """Consecutive tokens of a document, ``(n,)``."""

    tokens: NDArray[Any]
    loss_mask: NDArray[np.bool_] | None  # None: every token counts in the loss
    last: bool  # the document ends with this chunk


def encode_documents(
    path: Path, tokenizer: Tokenizer, on_malformed: Callable[[DataError], None]
) -> Iterator[Chunk]:
    """Encode the documents of ``path``: one per line of a ``.jsonl`` file, else the whole text.

    The tokenizer's opening precedes texts and prompts, its separator follows texts and completions; a chat
    is what its template renders.

    Args:
        on_malformed: Called with the error of each malformed line; may raise it.

    Raises:
        DataError: The file cannot be read, or the tokenizer has no chat template for its chats.
    """
    if path.suffix != ".jsonl":
        yield from _encode_text(path, tokenizer)
        return
    for number, line in read_lines(path):
        try:
            chunks = _encode_record(line, tokenizer)
        except MalformedError as error:
            on_malformed(DataError(f"{path}:{number}: {error}"))
            continue
        except DataError as error:
            raise DataError(f"{path}:{number}: {error}") from error
        yield from chunks


def _encode_text(path: Path, tokenizer: Tokenizer) -> Iterator[Chunk]:
    opening = tokenizer.opening
    for piece in read_pieces(path):
        tokens = tokenizer.encode(piece.text)
        yield Chunk(_enclose(opening, tokens, tokenizer.separator if piece.last else None), None, piece.last)
        opening = None


def _encode_record(line: bytes, tokenizer: Tokenizer) -> list[Chunk]:
    record = parse_record(line)
    if isinstance(record, Chat):
        return [Chunk(*_require_target(encoded), last=True) for encoded in tokenizer.encode_chat(record)]
    opening, separator = tokenizer.opening, tokenizer.separator
    if isinstance(record, Completion):
        tokens, mask = encode_completion(record.prompt, record.completion, tokenizer)
        before, after = [False] * (opening is not None), [True] * (separator is not None)
        mask = np.concatenate([before, mask, after]).astype(np.bool_)
        return [Chunk(*_require_target(Encoded(_enclose(opening, tokens, separator), mask)), last=True)]
    return [Chunk(_enclose(opening, tokenizer.encode(record.text), separator), None, last=True)]


def _require_target(encoded: Encoded) -> Encoded:
    """Raise unless a token after the first counts in the loss; the first has nothing to be predicted from."""
    if not encoded.loss_mask[1:].any():
        raise MalformedError("none of its tokens counts in the loss")
    return encoded


def _enclose(opening: int | None, tokens: NDArray[Any], separator: int | None) -> NDArray[Any]:
    before, after = (np.array([] if each is None else [each], tokens.dtype) for each in (opening, separator))
    return np.concatenate([before, tokens, after])


def _map(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    nbytes, wanted = path.stat().st_size, math.prod(shape) * dtype.itemsize
    if nbytes != wanted:
        raise ValueError(f"{path.name} has {nbytes} bytes, wanted {wanted}")
    return np.memmap(path, dtype=dtype, mode="r", shape=shape) if nbytes else np.empty(shape, dtype)


def _key(files: Sequence[Path], tokenizer: Tokenizer, skip_malformed: bool) -> str:
    seen: list[object] = [_FORMAT, os.geteuid(), tokenizer.fingerprint, skip_malformed]
    for file in files:
        try:
            stat = file.stat()
        except OSError as error:
            raise DataError(f"{file}: {error.strerror}") from error
        seen.append((str(file), stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:32]


def _write_once(path: Path, write: Callable[[Path], None]) -> None:
    """Write ``path`` unless another process has done so; it appears whole or not at all."""
    lock = lock_file(path.with_suffix(".lock"), patience_s=math.inf)
    try:
        if path.exists():
            return
        partial = path.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed writer, which holds no lock
        try:
            partial.mkdir(mode=0o700)
            write(partial)
            for file in (*partial.iterdir(), partial):
                sync(file)  # or it may be cut, or full of zeros, once power failed
            partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    finally:
        os.close(lock)


def _write(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    folder: Path,
    skip_malformed: bool,
    log: Callable[[str], object],
) -> None:
    errors, logged_s = _MalformedLines(skip_malformed), time.monotonic()
    with _Writer(folder) as writer:
        for number, file in enumerate(files, start=1):
            for chunk in encode_documents(file, tokenizer, errors):
                writer.add(chunk)
                if time.monotonic() - logged_s >= LINES_EVERY_S:
                    logged_s = time.monotonic()
                    log(f"tokenizing {file}, {number} of {len(files)}: {writer.count:,} tokens so far")
    if not writer.masked:
        (folder / _LOSS_MASK).unlink()  # every token counts
    about = {
        "tokens": writer.count,
        "documents": writer.documents,
        "largest": writer.largest,
        "digest": writer.digest.hexdigest(),
        "counted": writer.masked,
        "malformed": errors.number,
        "first_malformed": errors.first,
    }
    write_file(folder / _ABOUT, json.dumps(about))


@dataclass(slots=True)
class _MalformedLines:
    """Raises the error of a malformed line, or counts it."""

    skip: bool
    number: int = 0
    first: str = ""

    def __call__(self, error: DataError) -> None:
        if not self.skip:
            raise DataError(f"{error}; data.skip_malformed=true skips such lines") from error
        self.first = self.first or str(error)
        self.number += 1


@dataclass(slots=True)
class _Writer:
    """Appends chunks to the files of a cache entry."""

    folder: Path
    digest: Any = field(default_factory=hashlib.sha256)
    masked: bool = False  # some token does not count in the loss
    largest: int = -1
    count: int = 0  # tokens so far
    documents: int = 0  # that have ended
    _files: dict[str, Any] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)
    _begin: int = 0  # of the open document
    _targets: int = 0  # its tokens that count in the loss

    def __enter__(self) -> "_Writer":
        for name in (_TOKENS, _LOSS_MASK, _DOCUMENTS):
            self._files[name] = self._stack.enter_context(open(create_file(self.folder / name), "wb"))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def add(self, chunk: Chunk) -> None:
        mask = np.ones(len(chunk.tokens), np.bool_) if chunk.loss_mask is None else chunk.loss_mask
        self._append(_TOKENS, chunk.tokens)
        self._append(_LOSS_MASK, mask)
        self.masked |= not mask.all()
        self.largest = max(self.largest, int(chunk.tokens.max(initial=0)))
        self._targets += int(mask.sum())
        self.count += len(mask)
        if chunk.last:
            self._append(_DOCUMENTS, np.array([self._begin, self.count, self._targets], np.int64))
            self._begin, self._targets, self.documents = self.count, 0, self.documents + 1

    def _append(self, name: str, values: NDArray[Any]) -> None:
        content = values.tobytes()
        self.digest.update(content)
        self._files[name].write(content)
