"""All tokens of some files as one array on disk, written once and mapped into memory.

The cache's name is a digest of the files (path, size, time of change) and the tokenizer, so a
changed file is a new cache. Ranks that start together meet at a lock: one writes, the others wait.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from infinity.data.files import DataError, read_pieces
from infinity.data.tokenizer import Tokenizer

_FORMAT = 1


class Tokens(NamedTuple):
    """``values``, ``(tokens,)``, read-only; ``digest`` is equal where the values are."""

    values: NDArray[Any]
    digest: str


def open_tokens(files: Sequence[Path], tokenizer: Tokenizer, cache: Path) -> Tokens:
    """The tokens of ``files`` in order, mapped from ``cache``.

    Documents are separated by the tokenizer's separator. Memory does not grow with the files.

    Raises:
        DataError: A file is missing or malformed, or the cache cannot be written.
    """
    dtype = tokenizer.encode("").dtype
    path = cache / f"{_key(files, tokenizer)}.{dtype.name}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _write_once(files, tokenizer, path)
        digest = path.with_suffix(".digest").read_text()
        if not path.stat().st_size:
            return Tokens(np.empty(0, dtype), digest)
        return Tokens(np.memmap(path, dtype=dtype, mode="r"), digest)
    except OSError as error:
        raise DataError(f"data.cache: {error.filename or path}: {error.strerror}") from error


def _key(files: Sequence[Path], tokenizer: Tokenizer) -> str:
    seen: list[object] = [_FORMAT, tokenizer.fingerprint]
    for file in files:
        try:
            stat = file.stat()
        except OSError as error:
            raise DataError(f"{file}: {error.strerror}") from error
        seen.append((str(file), stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:32]


def _write_once(files: Sequence[Path], tokenizer: Tokenizer, path: Path) -> None:
    """Write ``path`` unless another process does first; it appears whole or not at all."""
    with closing(os.fdopen(os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR, 0o644))) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            path.with_suffix(".digest").write_text(_write(files, tokenizer, partial))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def _write(files: Sequence[Path], tokenizer: Tokenizer, path: Path) -> str:
    """Write all tokens to ``path``; returns their digest."""
    digest = hashlib.sha256()
    with path.open("wb") as out:
        for piece in (piece for file in files for piece in read_pieces(file)):
            tokens = tokenizer.encode(piece.text)
            if piece.last and tokenizer.separator is not None:
                tokens = np.append(tokens, np.array(tokenizer.separator, tokens.dtype))
            content = tokens.tobytes()
            digest.update(content)
            out.write(content)
    return digest.hexdigest()
