"""From text to token numbers."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from infinity.app.data.chat import Rendered, count_tokens, render_turns
from infinity.app.data.files import DataError
from infinity.app.data.records import ASSISTANT, Chat, MalformedError, Message

_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")

#: Files of a tokenizer's directory that may decide its tokens; weights are none of them.
_TOKENIZER_FILES = (".json", ".jinja", ".txt", ".model")


class Encoded(NamedTuple):
    """A document: ``tokens`` and which of them are learned, each ``(n,)``."""

    tokens: NDArray[Any]
    counts: NDArray[np.bool_]


class Tokenizer(Protocol):
    """Turns text into numbers below ``vocab_size``."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def opening(self) -> int | None:
        """The token that every text begins with, if there is one."""
        ...

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

    def encode_chat(self, chat: Chat) -> list[Encoded]:
        """The chat in the words of the tokenizer's template: one document, or one per answer.

        Raises:
            MalformedError: The template cannot take these messages.
            DataError: There is no template.
        """
        ...


class BytesTokenizer:
    r"""A token is a byte of UTF-8; byte 0, which text does not hold, separates documents.

    Its chat template writes a line ``role: content`` per message; byte 0 in place of the line's end
    ends what the assistant says, and is learned with it.
    """

    vocab_size = 256
    opening: int | None = None
    separator: int | None = 0
    fingerprint = "bytes"

    def encode(self, text: str) -> NDArray[Any]:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def encode_chat(self, chat: Chat) -> list[Encoded]:
        if chat.tools:
            raise MalformedError("'tools': the bytes tokenizer has no template for them")
        tokens, counts = [], []
        for number, message in enumerate(chat.messages, start=1):
            if not isinstance(message.get("content"), str):
                raise MalformedError(f"message {number}: wanted a 'content' that is a string")
            learned = message["role"] == ASSISTANT
            said = self.encode(f"{message['content']}{chr(0) if learned else chr(10)}")
            role = self.encode(f"{message['role']}: ")
            tokens += [role, said]
            counts += [np.zeros(len(role), np.bool_), np.full(len(said), learned)]
        return [Encoded(np.concatenate(tokens), np.concatenate(counts))]


class JsonTokenizer:
    """A ``tokenizer.json`` of the tokenizers library; nothing is downloaded.

    Raises:
        DataError: No such file, not a tokenizer, or the library is not installed.
    """

    opening: int | None = None

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
                f"data.tokenizer: {path}: {error.strerror}; wanted bytes, a tokenizer.json or a directory"
            ) from error
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"data.tokenizer: {path}: not a tokenizer.json: {error}") from error
        self._path = path
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self.vocab_size: int = self._library.get_vocab_size(with_added_tokens=True)
        found = (self._library.token_to_id(token) for token in _SEPARATORS)
        self.separator: int | None = next((each for each in found if each is not None), None)

    def encode(self, text: str) -> NDArray[Any]:
        return _array(self._library.encode(text, add_special_tokens=False).ids, self.vocab_size)

    def encode_chat(self, chat: Chat) -> list[Encoded]:
        raise DataError(
            f"data.tokenizer: {self._path} has no chat template; give the directory of a Hugging Face "
            "tokenizer (tokenizer.json with tokenizer_config.json or chat_template.jinja)"
        )


class DirectoryTokenizer:
    """The Hugging Face tokenizer of a directory; nothing is downloaded, no code of it is run.

    Raises:
        DataError: It has no tokenizer that transformers can open, or the library is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise DataError(f"{path}: reading it needs transformers: pip install transformers") from error
        try:
            self._library: Any = AutoTokenizer.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=False
            )
            self.fingerprint = _digest(path)
        except Exception as error:  # whatever the tokenizer's own files make the library raise
            raise DataError(
                f"data.tokenizer: {path}: transformers finds no tokenizer there: {error}"
            ) from error
        self._path = path
        self.vocab_size = len(self._library)
        self.separator: int | None = self._library.eos_token_id
        bos = self._library.bos_token_id
        own = self._library("").input_ids
        self.opening: int | None = bos if bos is not None and own[:1] == [bos] else None

    def encode(self, text: str) -> NDArray[Any]:
        ids = self._library(text, add_special_tokens=False, verbose=False).input_ids
        return _array(ids, self.vocab_size)

    def encode_chat(self, chat: Chat) -> list[Encoded]:
        if not self._library.is_fast:
            raise DataError(
                f"data.tokenizer: {self._path} does not say which characters its tokens are, so what is "
                "the assistant's cannot be told; save it as a tokenizer.json"
            )
        try:
            rendered = self._render(chat)
        except (MalformedError, DataError):
            raise
        except Exception as error:  # a template is a program: it may raise anything
            raise MalformedError(f"the chat template refuses it: {error}") from error
        return [self._encode_rendered(each) for each in rendered]

    def _render(self, chat: Chat) -> list[Rendered]:
        library = self._library
        try:
            template: str = library.get_chat_template(tools=chat.tools)
        except ValueError as error:
            raise DataError(f"data.tokenizer: {self._path} has no chat template: {error}") from error
        if _marks_turns(template):
            from transformers.utils.chat_template_utils import render_jinja_template

            texts, spans = render_jinja_template(
                [chat.messages], tools=chat.tools, chat_template=template,
                return_assistant_tokens_mask=True, **library.special_tokens_map,
            )  # fmt: skip
            return [Rendered(texts[0], spans[0])]

        def render(messages: Sequence[Message], ask: bool) -> str:
            text: str = library.apply_chat_template(
                list(messages), tools=chat.tools, add_generation_prompt=ask, tokenize=False
            )
            return text

        return render_turns(chat.messages, render)

    def _encode_rendered(self, rendered: Rendered) -> Encoded:
        found = self._library(
            rendered.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        offsets = np.array(found.offset_mapping, dtype=np.int64).reshape(-1, 2)
        return Encoded(_array(found.input_ids, self.vocab_size), count_tokens(offsets, rendered.spans))


def open_tokenizer(name: str) -> Tokenizer:
    """``bytes``, the path of a ``tokenizer.json``, or a directory with a Hugging Face tokenizer."""
    if name == "bytes":
        return BytesTokenizer()
    path = Path(name).expanduser()
    return DirectoryTokenizer(path) if path.is_dir() else JsonTokenizer(path)


def encode_completion(prompt: str, completion: str, tokenizer: Tokenizer) -> Encoded:
    """A prompt, which is given, and its completion, which is learned.

    The prompt's tokens are those that it has alone, as when a model is asked; where it and the
    completion would share a token, they are encoded apart.
    """
    given, whole = tokenizer.encode(prompt), tokenizer.encode(prompt + completion)
    if not np.array_equal(whole[: len(given)], given):
        whole = np.concatenate([given, tokenizer.encode(completion)])
    return Encoded(whole, np.arange(len(whole)) >= len(given))


def _array(ids: list[int], vocab_size: int) -> NDArray[Any]:
    return np.array(ids, dtype=np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def _marks_turns(template: str) -> bool:
    return "endgeneration" in template


def _digest(path: Path) -> str:
    """Of every file that may decide the tokens, and of the library that reads them."""
    from transformers import __version__

    digest = hashlib.sha256(str(__version__).encode())
    for file in sorted(path.iterdir()):
        if file.suffix in _TOKENIZER_FILES and file.is_file():
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
