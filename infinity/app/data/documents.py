"""From files to documents of tokens, and what of each document is learned."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from infinity.app.data.files import DataError, read_lines, read_pieces
from infinity.app.data.records import Chat, Completion, MalformedError, parse_record
from infinity.app.data.tokenizer import Encoded, Tokenizer, encode_completion


class Chunk(NamedTuple):
    """Some tokens of a document, ``(n,)``, in order."""

    tokens: NDArray[Any]
    counts: NDArray[np.bool_] | None  # which are learned; None: all of them
    last: bool  # the document ends with it


def read_documents(
    path: Path, tokenizer: Tokenizer, malformed: Callable[[DataError], None]
) -> Iterator[Chunk]:
    """The tokens of ``path``: of its lines' records if it is ``.jsonl``, else of its text.

    A text begins with the tokenizer's opening and ends with its separator; a prompt begins so, and
    its completion ends so; a chat is what the template makes of it.

    Args:
        malformed: Called with the error of each line that cannot be used; raises it, or counts it.

    Raises:
        DataError: The file cannot be read, or the tokenizer has no chat template for its chats.
    """
    if path.suffix != ".jsonl":
        yield from _read_text(path, tokenizer)
        return
    for number, line in read_lines(path):
        try:
            chunks = _encode(line, tokenizer)
        except MalformedError as error:
            malformed(DataError(f"{path}:{number}: {error}"))
            continue
        except DataError as error:
            raise DataError(f"{path}:{number}: {error}") from error
        yield from chunks


def _read_text(path: Path, tokenizer: Tokenizer) -> Iterator[Chunk]:
    opening = tokenizer.opening
    for piece in read_pieces(path):
        tokens = tokenizer.encode(piece.text)
        yield Chunk(_between(opening, tokens, tokenizer.separator if piece.last else None), None, piece.last)
        opening = None


def _encode(line: bytes, tokenizer: Tokenizer) -> list[Chunk]:
    record = parse_record(line)
    if isinstance(record, Chat):
        return [Chunk(*_some(encoded), last=True) for encoded in tokenizer.encode_chat(record)]
    opening, separator = tokenizer.opening, tokenizer.separator
    if isinstance(record, Completion):
        tokens, counts = encode_completion(record.prompt, record.completion, tokenizer)
        around = [False] * (opening is not None), [True] * (separator is not None)
        learned = np.concatenate([around[0], counts, around[1]]).astype(np.bool_)
        return [Chunk(*_some(Encoded(_between(opening, tokens, separator), learned)), last=True)]
    return [Chunk(_between(opening, tokenizer.encode(record.text), separator), None, last=True)]


def _some(encoded: Encoded) -> Encoded:
    """``encoded``, where a token is learned that has one before it to be predicted from."""
    if not encoded.counts[1:].any():
        raise MalformedError("none of its tokens is learned, so it teaches nothing")
    return encoded


def _between(opening: int | None, tokens: NDArray[Any], separator: int | None) -> NDArray[Any]:
    around = [np.array([] if each is None else [each], tokens.dtype) for each in (opening, separator)]
    return np.concatenate([around[0], tokens, around[1]])
