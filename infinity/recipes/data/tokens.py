"""Tokenized training data: documents encoded once, cached on disk and memory-mapped.

A cache entry is named by a digest of the files (path, size, modification time), the tokenizer and the user,
so a changed file gets a new entry. Only that user can read it: tokens are as private as the text. Of ranks
that start together one takes a lock and writes, while the others wait.
"""

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infinity.core.errors import UnsafePathError
from infinity.core.files import create_file, lock_file, own_directory, sync, write_file
from infinity.recipes.data.documents import (
    Chat,
    Completion,
    DataError,
    MalformedError,
    Text,
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

    ``documents``, ``(documents, 3)``, has each one's first token, end (exclusive), and number of tokens that
    count in the loss.
    """

    values: NDArray[Any]  # (tokens,)
    loss_mask: NDArray[np.bool_] | None  # (tokens,), True where one counts in the loss; None: all count
    documents: NDArray[np.int64]
    largest: int  # of values; -1 if there are none
    digest: str  # of the contents
    malformed: tuple[int, str] = (0, "")  # lines that were skipped, and the error of the first of them


def open_tokens(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    cache: Path,
    *,
    skip_malformed: bool = False,
    log: Callable[[str], object] = lambda line: None,
) -> Tokens:
    """Return the tokens of ``files`` in order, mapped from ``cache``; tokenize them first if needed.

    Memory does not grow with the files. If ``skip_malformed``, malformed lines of JSONL are counted, not
    raised. While this process writes tokens, ``log`` gets a line every ten seconds.
    """
    seen: list[object] = [_FORMAT, os.geteuid(), tokenizer.fingerprint, skip_malformed]
    for file in files:
        try:
            stat = file.stat()
        except OSError as error:
            raise DataError(f"{file}: {error.strerror}") from error
        seen.append((str(file), stat.st_size, stat.st_mtime_ns))
    path = cache / hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:32]
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

    def mapped(name: str, dtype: np.dtype[Any], *shape: int) -> NDArray[Any]:
        nbytes, wanted = (path / name).stat().st_size, math.prod(shape) * dtype.itemsize
        if nbytes != wanted:
            raise ValueError(f"{name} has {nbytes} bytes, wanted {wanted}")
        return (
            np.memmap(path / name, dtype=dtype, mode="r", shape=shape) if nbytes else np.empty(shape, dtype)
        )

    try:
        about = json.loads((path / _ABOUT).read_text("utf-8"))
        count = about["tokens"]
        return Tokens(
            values=mapped(_TOKENS, dtype, count),
            loss_mask=mapped(_LOSS_MASK, np.dtype(np.bool_), count) if about["counted"] else None,
            documents=mapped(_DOCUMENTS, np.dtype(np.int64), about["documents"], 3),
            largest=about["largest"],
            digest=about["digest"],
            malformed=(about["malformed"], about["first_malformed"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"data.cache: {path} is damaged: {error}; remove it, and the next run writes it again"
        ) from error


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
    digest, logged_s = hashlib.sha256(), time.monotonic()
    about: dict[str, Any] = {"tokens": 0, "documents": 0, "largest": -1, "counted": False}
    about |= {"malformed": 0, "first_malformed": ""}
    begin = targets = 0  # of the open document: its first token, and those that count in the loss
    with ExitStack() as stack:
        opened = {
            name: stack.enter_context(open(create_file(folder / name), "wb"))
            for name in (_TOKENS, _LOSS_MASK, _DOCUMENTS)
        }

        def append(name: str, values: NDArray[Any]) -> None:
            content = values.tobytes()
            digest.update(content)
            opened[name].write(content)

        for number, file in enumerate(files, start=1):
            for chunk in encode_documents(file, tokenizer):
                if isinstance(chunk, DataError):
                    if not skip_malformed:
                        raise DataError(f"{chunk}; data.skip_malformed=true skips such lines") from chunk
                    about["first_malformed"] = about["first_malformed"] or str(chunk)
                    about["malformed"] += 1
                    continue
                append(_TOKENS, chunk.tokens)
                append(_LOSS_MASK, chunk.loss_mask)
                about["counted"] |= not chunk.loss_mask.all()  # some token does not count
                about["largest"] = max(about["largest"], int(chunk.tokens.max(initial=0)))
                about["tokens"] += len(chunk.tokens)
                targets += int(chunk.loss_mask.sum())
                if chunk.last:
                    append(_DOCUMENTS, np.array([begin, about["tokens"], targets], np.int64))
                    begin, targets = about["tokens"], 0
                    about["documents"] += 1
                if time.monotonic() - logged_s >= LINES_EVERY_S:
                    logged_s = time.monotonic()
                    log(f"tokenizing {file}, {number} of {len(files)}: {about['tokens']:,} tokens so far")
    if not about["counted"]:
        (folder / _LOSS_MASK).unlink()  # every token counts
    write_file(folder / _ABOUT, json.dumps({**about, "digest": digest.hexdigest()}))


def encode_documents(path: Path, tokenizer: Tokenizer) -> Iterator[Encoded | DataError]:
    """Encode the documents of ``path``: one per line of a ``.jsonl`` file, else the whole text.

    The tokenizer's opening precedes texts and prompts, its separator follows texts and completions; a chat is
    what its template renders. A malformed line yields its error.
    """
    before, after = ([] if each is None else [each] for each in (tokenizer.opening, tokenizer.separator))
    if path.suffix != ".jsonl":
        for text, last in read_pieces(path):
            yield _enclosed(before, tokenizer.encode(text), after if last else [], last=last)
            before = []
        return
    for number, line in read_lines(path):
        try:
            record = parse_record(line)
            if isinstance(record, Chat):
                found = tokenizer.encode_chat(record)
            elif isinstance(record, Completion):
                tokens, mask, _ = encode_completion(record.prompt, record.completion, tokenizer)
                found = [_enclosed(before, tokens, after, mask)]
            else:
                found = [_enclosed(before, tokenizer.encode(record.text), after)]
            # the first token has nothing to be predicted from
            if not isinstance(record, Text) and not all(each.loss_mask[1:].any() for each in found):
                raise MalformedError("none of its tokens counts in the loss")
        except MalformedError as error:
            yield DataError(f"{path}:{number}: {error}")
        except DataError as error:
            raise DataError(f"{path}:{number}: {error}") from error
        else:
            yield from found


def _enclosed(
    before: list[int],
    tokens: NDArray[Any],
    after: list[int],
    mask: NDArray[np.bool_] | None = None,
    *,
    last: bool = True,
) -> Encoded:
    """Put tokens around a document's; with a ``mask`` those before do not count in the loss."""
    values = np.concatenate([np.array(before, tokens.dtype), tokens, np.array(after, tokens.dtype)])
    if mask is None:
        return Encoded(values, np.ones(len(values), np.bool_), last)
    mask = np.concatenate([np.zeros(len(before), np.bool_), mask, np.ones(len(after), np.bool_)])
    return Encoded(values, mask, last)
