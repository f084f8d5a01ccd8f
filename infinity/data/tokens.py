"""Tokens of training data: documents encoded once, cached and memory-mapped.

A cache entry is named by a digest of the files (path, size, modification time), the tokenizer and the user,
so a changed file gets a new entry. Only that user can read it: tokens are as private as the text. Of ranks
that start together one takes a lock and writes, while the others wait.

[Note: examples] An example is a document or a pair of them: preferences, judged completions, and texts with
labels. Prompts and completions are strings, or lists of messages, of which the completion's count in the
loss. Two chats are a preference, too: what they begin with alike is the prompt.

[Note: mismatched completions] A judged completion is followed by the same prompt with the completion of the
next row (of the last row: the first one's), by which its loss measures how far the model has moved.
"""

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from infinity.core.errors import LockedError, UnsafePathError
from infinity.core.files import create_file, lock_file, own_directory, sync, write_file
from infinity.data.formats import SUPERVISED, Completion, Reading, Record, document_of
from infinity.data.sources import Source, has_rows, read_pieces, rows, stamps
from infinity.data.tokenizer import (
    ASSISTANT,
    Chat,
    DataError,
    Encoded,
    MalformedError,
    Tokenizer,
    count_alike,
    encode_completion,
)

#: How supervised data is read, without other names of columns.
READ = Reading()
#: Gets a line for people.
Log: TypeAlias = Callable[[str], object]

_FORMAT = 5
#: The documents of a source, and the errors of its malformed rows.
Documents: TypeAlias = Iterator[Encoded | DataError]
#: Returns them; its name is a part of the cache's.
Encode: TypeAlias = Callable[[Source, Tokenizer, Reading], Documents]
#: The largest label of a text.
_MOST_LABEL = 10**6
#: Seconds between progress lines while tokens are written.
LINES_EVERY_S = 10.0
#: Tokens of parts of files are kept so long for a run that goes on.
_MOST_AGE_S = 7 * 24 * 3600.0

_TOKENS, _LOSS_MASK, _DOCUMENTS, _ABOUT = "tokens", "counts", "documents", "about.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens of all documents end to end, read-only and memory-mapped."""

    values: NDArray[Any]  # (tokens,)
    loss_mask: NDArray[np.bool_] | None  # (tokens,), True where one counts in the loss; None: all count
    documents: NDArray[np.int64]  # (documents, 4): first token, end (exclusive), tokens that count, label
    largest: int  # of values; -1 if there are none
    digest: str  # of the contents
    malformed: tuple[int, str] = (0, "")  # rows that were skipped, and the error of the first of them
    #: Of each source the end of its documents and of its tokens, and the rows that were skipped.
    sources: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 3), np.int64))

    def all_counted(self) -> "Tokens":
        """Return the same tokens, of which all count in the loss."""
        documents = np.array(self.documents)
        documents[:, 2] = documents[:, 1] - documents[:, 0]
        return replace(self, loss_mask=None, documents=documents, digest=f"{self.digest}:all")


class Part(NamedTuple):
    """Tokens ``begin`` to ``end`` (exclusive) and documents of one source, or of several together."""

    name: str  # for messages: the recipe's key and entries
    begin: int
    end: int
    documents: NDArray[np.int64]
    malformed: int = 0  # rows that were skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCache:
    """Tokens of sources, encoded once and kept in ``folder``; says how they are read and encoded.

    If ``skip_malformed``, malformed rows are counted, not raised.
    """

    folder: Path
    tokenizer: Tokenizer
    reading: Reading = READ
    skip_malformed: bool = False
    encode: Encode = field(default_factory=lambda: encode_documents)

    def open(self, sources: Sequence[Source], log: Log = lambda line: None) -> Tokens:
        """Return the tokens of ``sources`` in order, mapped; encode them first if needed.

        Memory does not grow with the sources. While this process writes tokens, ``log`` gets a line every ten
        seconds.
        """
        path = self.entry(sources)
        with _explained(path):
            while True:
                self.make(sources, log)
                try:
                    own_directory(path)  # no other user writes or reads the tokens
                    return _read_entry(path, self.tokenizer.encode("").dtype)
                except FileNotFoundError:  # another run has removed it, or something else a part of it
                    self.remove(sources)

    def entry(self, sources: Sequence[Source]) -> Path:
        """Return where the tokens of ``sources`` are."""
        seen: list[object] = [_FORMAT, os.geteuid(), self.tokenizer.fingerprint, self.skip_malformed]
        seen += [self.reading.formats, dict(self.reading.fields), self.encode.__name__]
        for source in sources:
            seen += [*stamps(source.path), *([source[1:]] if source.of > 1 else [])]
        suffix = ".part" * any(source.of > 1 for source in sources)
        return self.folder / (hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:32] + suffix)

    def documents(self, source: Source) -> Documents:
        return self.encode(source, self.tokenizer, self.reading)

    def make(
        self, sources: Sequence[Source], log: Log = lambda line: None,
        documents: Callable[[Source], Documents] | None = None, *, patience_s: float = math.inf,
    ) -> None:  # fmt: skip
        """Encode ``sources`` unless they are, or take their ``documents`` where these are there.

        LockedError: another process does it, for ``patience_s``.
        """
        path = self.entry(sources)
        with _explained(path):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.exists():
                how: dict[str, Any] = {"skip_malformed": self.skip_malformed, "log": log}
                _write_once(path, partial(_write, sources, documents or self.documents, **how), patience_s)

    def sweep(self) -> None:
        """Remove what killed runs have left: what they wrote or removed, and parts that have aged."""
        for path in self.folder.glob("[0-9a-f]" * 32 + ".*"):  # and nothing else that is there
            with suppress(OSError):  # LockedError: it is in use
                aged = time.time() - path.stat().st_mtime > _MOST_AGE_S
                if path.suffix == ".partial" or (path.suffix == ".part" and aged):
                    _remove(path)

    def remove(self, sources: Sequence[Source]) -> None:
        """Remove the tokens of ``sources``, at once and whole."""
        with suppress(LockedError, FileNotFoundError):  # another process does; or all of the cache is gone
            _remove(self.entry(sources))


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise errors of the cache as a DataError that says so."""
    try:
        yield
    except LockedError:
        raise
    except UnsafePathError as error:
        raise DataError(f"data.cache: {error.strerror}") from error
    except OSError as error:
        raise DataError(f"data.cache: {error.filename or path}: {error.strerror}") from error


def joined(parts: Sequence[Tokens]) -> Tokens:
    """Return the tokens of several sources together, in memory."""
    sizes = [len(each.values) for each in parts]
    counts = [len(each.documents) for each in parts]
    begins, masked = np.cumsum([0, *sizes[:-1]]), any(each.loss_mask is not None for each in parts)
    malformed = [each.malformed for each in parts]
    masks = (np.ones(n, np.bool_) if p.loss_mask is None else p.loss_mask for p, n in zip(parts, sizes))
    sources = np.cumsum(np.stack([counts, sizes], axis=1), axis=0)
    return Tokens(
        values=np.concatenate([each.values for each in parts]),
        loss_mask=np.concatenate([*masks]) if masked else None,
        documents=np.concatenate(
            [each.documents + np.array([at, at, 0, 0]) for each, at in zip(parts, begins)]
        ),
        largest=max(each.largest for each in parts),
        digest=hashlib.sha256("".join(each.digest for each in parts).encode()).hexdigest(),
        malformed=(sum(n for n, _ in malformed), next((first for n, first in malformed if n), "")),
        sources=np.column_stack([sources, [n for n, _ in malformed]]),
    )


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
            documents=mapped(_DOCUMENTS, np.dtype(np.int64), about["documents"], 4),
            largest=about["largest"],
            digest=about["digest"],
            sources=np.array(about["sources"], np.int64).reshape(-1, 3),
            malformed=(about["malformed"], about["first_malformed"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"data.cache: {path} is damaged: {error}; remove it, and the next run writes it again"
        ) from error


@contextmanager
def _held(path: Path, patience_s: float = 0) -> Iterator[Path]:
    """Hold the lock of an entry; yield where it is written and removed, which only the holder touches."""
    lock, partial = lock_file(path.with_suffix(".lock"), patience_s=patience_s), path.with_suffix(".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed process, which holds no lock
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def _write_once(path: Path, write: Callable[[Path], None], patience_s: float) -> None:
    """Write ``path`` unless another process has done so; it appears whole or not at all."""
    with _held(path, patience_s) as partial:
        if path.exists():
            return
        partial.mkdir(mode=0o700)
        write(partial)
        for file in (*partial.iterdir(), partial):
            sync(file)  # or it may be cut, or full of zeros, once power failed
        partial.rename(path)


def _remove(path: Path) -> None:
    """Remove an entry, or what is left of one, and its lock; LockedError: it is in use."""
    with _held(path) as partial:
        with suppress(FileNotFoundError):  # another process was quicker
            path.rename(partial)
            shutil.rmtree(partial)
        path.with_suffix(".lock").unlink()  # while it is held: see infinity.core.files


def _write(
    sources: Sequence[Source], documents: Callable[[Source], Documents], folder: Path, *,
    skip_malformed: bool, log: Log,
) -> None:  # fmt: skip
    digest, logged_s = hashlib.sha256(), time.monotonic()
    about: dict[str, Any] = {"tokens": 0, "documents": 0, "largest": -1, "counted": False}
    about |= {"malformed": 0, "first_malformed": "", "sources": []}
    begin = targets = 0  # of the open document: its first token, and those that count in the loss
    with ExitStack() as stack:
        opened = {
            name: stack.enter_context(open(create_file(folder / name), "wb"))
            for name in (_TOKENS, _LOSS_MASK, _DOCUMENTS)
        }

        def append(name: str, values: NDArray[Any], more: Sequence[int] = ()) -> None:
            content = values.tobytes()
            digest.update(content)
            opened[name].write(content + np.array(more, np.int64).tobytes())

        for number, source in enumerate(sources, start=1):
            skipped = about["malformed"]
            for chunk in documents(source):
                if isinstance(chunk, DataError):
                    if not skip_malformed:
                        raise DataError(f"{chunk}; data.skip_malformed=true skips such rows") from chunk
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
                    append(_DOCUMENTS, np.array([begin, about["tokens"], targets], np.int64), [chunk.label])
                    if chunk.label:  # else the digest is that of older versions
                        digest.update(chunk.label.to_bytes(8, "little"))
                    begin, targets = about["tokens"], 0
                    about["documents"] += 1
                if time.monotonic() - logged_s >= LINES_EVERY_S:
                    logged_s = time.monotonic()
                    log(f"tokenizing {source}, {number} of {len(sources)}: {about['tokens']:,} tokens so far")
            about["sources"].append([about["documents"], about["tokens"], about["malformed"] - skipped])
    if not about["counted"]:
        (folder / _LOSS_MASK).unlink()  # every token counts
    write_file(folder / _ABOUT, json.dumps({**about, "digest": digest.hexdigest()}))


def encode_documents(source: Source, tokenizer: Tokenizer, reading: Reading = READ) -> Documents:
    """Encode the documents of a source: one per row, or the whole of a text.

    The tokenizer's opening precedes texts and prompts, its separator follows texts and completions; a chat is
    what its template renders. A malformed row yields its error.
    """
    if has_rows(source.path):
        yield from encoded_rows(source, reading, lambda row: encode_document(document_of(row), tokenizer))
        return
    before, after = _ends(tokenizer)
    before, after = before if source.number == 0 else [], after if source.number + 1 == source.of else []
    for text, last in read_pieces(source):
        yield enclosed(before, tokenizer.encode(text), after if last else [], last=last)
        before = []


def encoded_rows(source: Source, reading: Reading, encode: Callable[[Record], list[Encoded]]) -> Documents:
    """Yield the documents of each row, given its standard form, or the error of one that is malformed."""
    if not has_rows(source.path):
        raise DataError(f"{source}: wanted rows, as of .jsonl, of format {', '.join(reading.formats)}")
    for where, row in rows(source, reading):
        try:
            found = encode(reading.standard(row))
        except MalformedError as error:
            yield DataError(f"{where}: {error}")
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        else:
            yield from found


def encode_document(document: str | Completion | Chat, tokenizer: Tokenizer) -> list[Encoded]:
    """Encode a document, as one or, of some chats, one per answer; MalformedError: it cannot be used."""
    before, after = _ends(tokenizer)
    if isinstance(document, str):
        return [enclosed(before, tokenizer.encode(document), after)]
    if isinstance(document, Chat):
        found = tokenizer.encode_chat(document)
    else:
        tokens, mask, *_ = encode_completion(document.prompt, document.completion, tokenizer)
        found = [enclosed(before, tokens, after, mask)]
    if not all(each.loss_mask[1:].any() for each in found):  # the first one has nothing to be predicted from
        raise MalformedError("none of its tokens counts in the loss")
    return found


def _ends(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens before and after a document."""
    opening, separator = tokenizer.opening, tokenizer.separator
    return [] if opening is None else [opening], [] if separator is None else [separator]


def enclosed(
    before: list[int], tokens: NDArray[Any], after: list[int], mask: NDArray[np.bool_] | None = None, *,
    last: bool = True,
) -> Encoded:  # fmt: skip
    """Put tokens around a document's; with a ``mask`` those before do not count in the loss."""
    values = np.concatenate([np.asarray(each, tokens.dtype) for each in (before, tokens, after)])
    if mask is None:
        return Encoded(values, np.ones(len(values), np.bool_), last)
    return Encoded(values, np.pad(mask, (len(before), len(after)), constant_values=(False, True)), last)


class Kind(NamedTuple):
    """Describes data: the formats of its rows, and the documents that each row becomes."""

    formats: tuple[str, ...]
    encode: Encode
    documents: int  # of an example; 0: the examples are tokens
    whole: bool = False  # documents are not predicted, token by token, but scored
    all_tokens: bool = False  # count in the loss, also those of prompts


def encode_pairs(source: Source, tokenizer: Tokenizer, reading: Reading) -> Documents:
    """Encode the chosen and the rejected completion of each row."""

    def both(record: Record) -> list[Encoded]:
        prompt, chosen, rejected = (record.get(name) for name in ("prompt", "chosen", "rejected"))
        if prompt is None and isinstance(chosen, list) and isinstance(rejected, list):
            alike = min(
                count_alike(chosen, rejected), len(chosen) - 1, len(rejected) - 1
            )  # leave one of each
            prompt, chosen, rejected = chosen[:alike], chosen[alike:], rejected[alike:]
        named = (("chosen", chosen), ("rejected", rejected))
        return [_completed(tokenizer, prompt, each, name) for name, each in named]

    return encoded_rows(source, reading, both)


def encode_judged(source: Source, tokenizer: Tokenizer, reading: Reading) -> Documents:
    """Encode the completion of each row, and a mismatched one: see [Note: mismatched completions]."""
    found: list[tuple[Record, Encoded]] = []  # the first row, and the one before

    def before_and_mismatched(record: Record) -> list[Encoded]:
        prompt, completion, label = (record.get(name) for name in ("prompt", "completion", "label"))
        if not isinstance(label, bool):
            raise MalformedError(f"'label': got {_shown(label)}; wanted true or false")
        own = _completed(tokenizer, prompt, completion, "completion")
        before, found[1:] = found[-1:], [(record, own._replace(label=int(label)))]
        return [
            each for last, document in before for each in (document, _mismatched(tokenizer, last, record))
        ]

    yield from encoded_rows(source, reading, before_and_mismatched)
    for last, document in found[-1:]:
        yield from (document, _mismatched(tokenizer, last, found[0][0]))


def _mismatched(tokenizer: Tokenizer, prompt_of: Record, completion_of: Record) -> Encoded:
    prompt, completion = prompt_of.get("prompt"), completion_of["completion"]
    try:
        return _completed(tokenizer, prompt, completion, "completion")
    except MalformedError as error:  # a template that takes only the one with the other
        raise DataError(f"the prompt {_shown(prompt)} with the completion of another row: {error}") from error


def encode_labelled(source: Source, tokenizer: Tokenizer, reading: Reading) -> Documents:
    """Encode the text of each row, with its label."""

    def labelled(record: Record) -> list[Encoded]:
        text, label = record["text"], record.get("label")
        if not isinstance(text, str):
            raise MalformedError(f"'text': got {_shown(text)}; wanted a string")
        if not isinstance(label, int) or not 0 <= label <= _MOST_LABEL:
            raise MalformedError(f"'label': got {_shown(label)}; wanted a number from 0")
        return [each._replace(label=int(label)) for each in encode_document(text, tokenizer)]

    return encoded_rows(source, reading, labelled)


def _completed(tokenizer: Tokenizer, prompt: Any, completion: Any, name: str) -> Encoded:
    """Return the document of a completion; MalformedError: ``name``, its column, cannot be used."""
    try:
        if isinstance(completion, str) and (prompt is None or isinstance(prompt, str)):
            return encode_document(Completion(prompt or "", completion), tokenizer)[0]
        return _chat(tokenizer, [*_messages(prompt, "prompt")], [*_messages(completion, name)])
    except MalformedError as error:
        raise MalformedError(f"{name!r}: {error}") from error


def _chat(tokenizer: Tokenizer, prompt: list[Any], completion: list[Any]) -> Encoded:
    """Return the last turn in its context; of its tokens those of the completion's messages count."""
    turns = sum(message["role"] == ASSISTANT for message in completion)
    if not turns:
        raise MalformedError(f"none of its messages has the role {ASSISTANT}")
    found = encode_document(Chat(prompt + completion, None), tokenizer)[-1]
    begins = np.flatnonzero(np.diff(found.loss_mask.astype(np.int8), prepend=0) == 1)
    mask = found.loss_mask.copy()
    mask[: begins[-turns:][0]] = False
    return found._replace(loss_mask=mask)


def _messages(value: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield the messages of a column, in which a string is one, the user's or the assistant's."""
    if isinstance(value, str):
        value = [{"role": "user" if name == "prompt" else ASSISTANT, "content": value}]
    for each in value if isinstance(value, list) else [] if value is None else [value]:
        if not isinstance(each, dict) or not isinstance(each.get("role"), str):
            raise MalformedError("wanted a string, or messages, each with 'role' and 'content'")
        yield {key: content for key, content in each.items() if content is not None}


def _shown(value: Any) -> str:
    return "none" if value is None else json.dumps(value)[:50]


#: Text, prompts and chats.
TEXTS = Kind(SUPERVISED, encode_documents, 0)
PAIRS = Kind(("preference",), encode_pairs, 2)
SCORED_PAIRS = PAIRS._replace(whole=True)
JUDGED = Kind(("prompt-completion",), encode_judged, 2)
LABELLED = Kind(("text",), encode_labelled, 1, whole=True)
