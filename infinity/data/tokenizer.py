"""From text to token numbers."""

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from infinity.data.files import DataError

_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Tokenizer(Protocol):
    """Turns text into numbers below ``vocab_size``."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def separator(self) -> int | None:
        """The token that stands between documents, if there is one."""
        ...

    @property
    def fingerprint(self) -> str:
        """Two tokenizers with the same fingerprint give the same tokens."""
        ...

    def encode(self, text: str) -> NDArray[Any]:
        """``(tokens,)``, an unsigned integer dtype that holds ``vocab_size``."""
        ...


class BytesTokenizer:
    """A token is a byte of UTF-8; byte 0, which text does not hold, separates documents."""

    vocab_size = 256
    separator: int | None = 0
    fingerprint = "bytes"

    def encode(self, text: str) -> NDArray[Any]:
        return np.frombuffer(text.encode(), dtype=np.uint8)


class JsonTokenizer:
    """A ``tokenizer.json`` of the tokenizers library; nothing is downloaded.

    Raises:
        DataError: No such file, not a tokenizer, or the library is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Library
        except ImportError as error:
            raise DataError(
                f"{path}: reading it needs the tokenizers library: pip install tokenizers"
            ) from error
        try:
            content = path.read_bytes()
            self._library = Library.from_str(content.decode())
        except OSError as error:
            raise DataError(
                f"data.tokenizer: {path}: {error.strerror}; wanted bytes or a tokenizer.json"
            ) from error
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"data.tokenizer: {path}: not a tokenizer.json: {error}") from error
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self.vocab_size: int = self._library.get_vocab_size(with_added_tokens=True)
        found = (self._library.token_to_id(token) for token in _SEPARATORS)
        self.separator: int | None = next((each for each in found if each is not None), None)

    def encode(self, text: str) -> NDArray[Any]:
        ids = self._library.encode(text, add_special_tokens=False).ids
        return np.array(ids, dtype=np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)


def open_tokenizer(name: str) -> Tokenizer:
    """``bytes``, or the path of a ``tokenizer.json``."""
    return BytesTokenizer() if name == "bytes" else JsonTokenizer(Path(name).expanduser())
