"""Training data on disk, and its tokens: documents encoded once, cached and memory-mapped.

The fields of a line of JSONL decide its kind: ``messages`` (with ``tools``, if present) is a chat, else
``prompt`` and ``completion``, else ``text``. Other fields are ignored.

A cache entry is named by a digest of the files (path, size, modification time), the tokenizer and the user,
so a changed file gets a new entry. Only that user can read it: tokens are as private as the text. Of ranks
that start together one takes a lock and writes, while the others wait.
"""

import hashlib
import json
import math
import os
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from infinity.core.errors import UnsafePathError
from infinity.core.files import (
    create_file,
    lock_file,
    open_regular,
    own_directory,
    sync,
    user_path,
    write_file,
)
from infinity.core.nbytes import format_nbytes
from infinity.recipes.data.tokenizer import (
    ASSISTANT,
    Chat,
    DataError,
    Encoded,
    MalformedError,
    Tokenizer,
    encode_completion,
)

#: Gets a line for people.
Log: TypeAlias = Callable[[str], object]

_FORMAT = 3
#: Seconds between progress lines while tokens are written.
LINES_EVERY_S = 10.0

_TOKENS, _LOSS_MASK, _DOCUMENTS, _ABOUT = "tokens", "counts", "documents", "about.json"
#: Text is read in whole lines, or whole words of longer ones, about this many characters at a time.
PIECE_CHARS = 1 << 20
#: The longest line of JSONL that is read (bytes).
_MOST_LINE_NBYTES = 1 << 26
#: Directories left out of ``stdlib``, so that it is nearly the same on every machine.
_STDLIB_EXCEPT = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
_ENDS = ("\n", "\r")  # of a line


class Completion(NamedTuple):
    """Prompt and completion; only the completion counts in the loss."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens of all documents end to end, read-only and memory-mapped."""

    values: NDArray[Any]  # (tokens,)
    loss_mask: NDArray[np.bool_] | None  # (tokens,), True where one counts in the loss; None: all count
    documents: NDArray[np.int64]  # (documents, 3): first token, end (exclusive), tokens that count
    largest: int  # of values; -1 if there are none
    digest: str  # of the contents
    malformed: tuple[int, str] = (0, "")  # lines that were skipped, and the error of the first of them


def open_tokens(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    cache: Path,
    *,
    skip_malformed: bool = False,
    log: Log = lambda line: None,
) -> Tokens:
    """Return the tokens of ``files`` in order, mapped from ``cache``; tokenize them first if needed.

    Memory does not grow with the files. If ``skip_malformed``, malformed lines of JSONL are counted, not
    raised. While this process writes tokens, ``log`` gets a line every ten seconds.
    """
    seen: list[object] = [_FORMAT, os.geteuid(), tokenizer.fingerprint, skip_malformed]
    for file in files:
        with _readable(file):
            stat = file.stat()
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
        return np.memmap(path / name, dtype, "r", shape=shape) if nbytes else np.empty(shape, dtype)

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
    with ExitStack() as stack:
        stack.callback(os.close, lock_file(path.with_suffix(".lock"), patience_s=math.inf))
        if path.exists():
            return
        partial = path.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed writer, which holds no lock
        stack.callback(shutil.rmtree, partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        write(partial)
        for file in (*partial.iterdir(), partial):
            sync(file)  # or it may be cut, or full of zeros, once power failed
        partial.rename(path)


def _write(files: Sequence[Path], tokenizer: Tokenizer, folder: Path, skip_malformed: bool, log: Log) -> None:
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
                found = [_enclosed(before, tokenizer.encode(record), after)]
            # the first token has nothing to be predicted from
            if not isinstance(record, str) and not all(each.loss_mask[1:].any() for each in found):
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
    values = np.concatenate([np.asarray(each, tokens.dtype) for each in (before, tokens, after)])
    if mask is None:
        return Encoded(values, np.ones(len(values), np.bool_), last)
    return Encoded(values, np.pad(mask, (len(before), len(after)), constant_values=(False, True)), last)


def find_files(names: Sequence[str], *, key: str = "data.files") -> tuple[Path, ...]:
    """Find the files of paths, globs (with ``**``), directories (.txt and .jsonl) or ``stdlib``, each once.

    They are in the order of names, sorted within one. Errors name the recipe's ``key``.
    """
    found: dict[Path, None] = {}
    for name in names:
        path = user_path(name, key)
        try:
            files = [path.resolve() for path in _matches(name, path)]
        except (OSError, ValueError, RuntimeError) as error:  # patterns, links to themselves
            reason = error.strerror if isinstance(error, OSError) else error
            raise DataError(f"{key}: {name!r}: {reason}; give a path, a glob or 'stdlib'") from error
        if not files:
            raise DataError(f"{key}: {name!r} matches no file in {Path.cwd()}; give a path, glob or 'stdlib'")
        found.update(dict.fromkeys(files))
    return tuple(found)


def read_pieces(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield pieces of whole lines, or of words of longer ones, and whether each is the last."""
    lines: list[str] = []
    size = number = 0
    with _readable(path), open(open_regular(path), encoding="utf-8", newline="") as file:
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
            raise DataError(f"{path}: not UTF-8 text, after line {number}: {error.reason}") from error
    if lines:
        yield "".join(lines), True


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of ``path`` that are not blank, each after its number (from 1)."""
    with _readable(path), open(open_regular(path), "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_MOST_LINE_NBYTES + 1), b""), start=1):
            if len(line) > _MOST_LINE_NBYTES:
                raise DataError(
                    f"{path}:{number}: the line has more than {format_nbytes(_MOST_LINE_NBYTES)}; wanted a "
                    "document per line: cut this one into several"
                )
            if not line.isspace():
                yield number, line


def parse_record(line: bytes) -> str | Completion | Chat:
    """Parse a line of JSONL, as text or another record; MalformedError: it is none."""
    try:
        value = json.loads(line.decode())
        if b"\\u" in line:  # an escape may encode half a surrogate pair, which no tokenizer accepts
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise MalformedError(f"not UTF-8 text at byte {error.start}: {error.reason}") from error
    except UnicodeEncodeError as error:
        raise MalformedError("half of a surrogate pair is not text") from error
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise MalformedError(f"wanted an object; got {_name(value)}")
    if "messages" in value:
        return _chat(value["messages"], value.get("tools"))
    names = ("prompt", "completion") if {"prompt", "completion"} <= value.keys() else ("text",)
    for name in names:
        if name not in value:
            fields = f"the fields {', '.join(value)}" if value else "none"
            raise MalformedError(f"wanted 'text', 'prompt' and 'completion', or 'messages'; got {fields}")
        if not isinstance(value[name], str):
            raise MalformedError(f"{name!r}: wanted a string; got {_name(value[name])}")
    return str(value["text"]) if names == ("text",) else Completion(value["prompt"], value["completion"])


def _chat(messages: Any, tools: Any) -> Chat:
    if not isinstance(messages, list) or not messages:
        raise MalformedError(f"'messages': wanted a non-empty list; got {_name(messages)}")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise MalformedError(f"message {number}: wanted an object whose 'role' is a string")
    if not any(message["role"] == ASSISTANT for message in messages):
        raise MalformedError(f"'messages': none has the role {ASSISTANT}, so no token counts in the loss")
    if tools is not None and not isinstance(tools, list):
        raise MalformedError(f"'tools': wanted a list; got {_name(tools)}")
    given = [{key: each for key, each in message.items() if each is not None} for message in messages]
    return Chat(given, tools or None)


def _name(value: Any) -> str:
    return "null" if value is None else "an empty list" if value == [] else type(value).__name__


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def _matches(name: str, path: Path) -> list[Path]:
    if name == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        found = (each for each in root.rglob("*.py") if not _STDLIB_EXCEPT & {*each.relative_to(root).parts})
        return sorted(found)
    if path.is_dir():
        found = (each for each in path.rglob("*") if each.suffix in (".txt", ".jsonl"))
        return sorted(each for each in found if each.is_file())
    if path.exists():
        return [path]  # a pipe or device is refused when it is opened
    # A directory that is there may have brackets in its name.
    base = next((parent for parent in path.parents if parent.is_dir()), Path(path.anchor))
    return sorted(each for each in base.glob(str(path.relative_to(base))) if each.is_file())
