"""Tokenizers, and the loss mask of prompts and chats.

[Note: the assistant's tokens of a chat] If a template marks them (``{% generation %}``), its marks are used.
Otherwise a turn is the difference between two renderings: the chat up to and including the turn, and the chat
before it with the template's generation prompt. The tokens that end a turn belong to it, so that a model
learns to stop.

[Note: untrusted files] No code of a tokenizer's directory is run, and nothing is downloaded. A file is opened
only if it is a regular file, of a size that the library can take. A chat template is a program in a sandbox,
which keeps it from all files.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from infinity.checkpoint.directory import TOKENIZER_FILES, read_json_object
from infinity.checkpoint.model import check_counts, offline
from infinity.core.errors import InfinityError, library_errors
from infinity.core.files import read_file, user_path

_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")

#: Suffixes of the files in a tokenizer's directory on which its tokens may depend (weights are excluded).
_TOKENIZER_FILES = (".json", ".jinja", ".txt", ".model")
#: The largest file of a tokenizer that is read; those of a vocabulary of 250,000 have 30 MiB.
_MOST_FILE_NBYTES = 2**27
#: The longest run of text without a space (characters): libraries keep some hundred bytes for each.
_MOST_WORD_CHARS = 2**22

#: The role whose messages count in the loss.
ASSISTANT = "assistant"

Message = dict[str, Any]


class DataError(InfinityError, ValueError):
    """Raised when training data is missing, malformed or too short."""


class MalformedError(ValueError):
    """Raised when a line cannot be used; the message is the reason, and the caller adds file and line."""


class Chat(NamedTuple):
    """Messages with a ``role`` and, usually, a ``content``; the assistant's count in the loss."""

    messages: list[Message]
    tools: list[Any] | None


class Encoded(NamedTuple):
    """A document, or a part: ``tokens`` and ``loss_mask`` (True: the token counts), each ``(n,)``."""

    tokens: NDArray[Any]
    loss_mask: NDArray[np.bool_]
    last: bool = True  # the document ends with this part
    label: int = 0  # of the document, in data that has labels


class Rendered(NamedTuple):
    """A chat as text; ``spans`` are the assistant's character ranges ``(begin, end)``."""

    text: str
    spans: list[tuple[int, int]]


class Tokenizer:
    """Encodes text as token ids below ``vocab_size``."""

    vocab_size: int
    opening: int | None = None  # token at the beginning of every document, if any
    separator: int | None  # token at the end of every document, if any
    fingerprint: str  # equal ones give equal tokens
    name: str = "bytes"  # by which it was opened

    def __reduce__(self) -> tuple[Any, ...]:
        return open_tokenizer, (self.name,)  # another process opens it again

    def encode(self, text: str) -> NDArray[Any]:
        """Return ``(tokens,)`` in an unsigned integer dtype that holds ``vocab_size``."""
        raise NotImplementedError

    def decode(self, tokens: NDArray[Any]) -> str:
        """Return the text of tokens, those of special ones, too."""
        raise NotImplementedError

    def encode_chat(self, chat: Chat) -> list[Encoded]:
        """Encode a chat with the tokenizer's template, as one document or one per answer.

        MalformedError: the template refuses the chat. DataError: there is no template.
        """
        raise NotImplementedError

    def encode_question(self, chat: Chat) -> NDArray[Any]:
        """Encode a chat, with the tokenizer's template, up to where an answer begins; raises as above."""
        raise NotImplementedError

    @property
    def ends(self) -> set[int]:
        """The tokens after which nothing follows: that of a document, and that of an answer in a chat."""
        return set() if self.separator is None else {self.separator}


class BytesTokenizer(Tokenizer):
    r"""Tokenizer whose tokens are the bytes of UTF-8; byte 0 separates documents.

    Its chat template writes a line ``role: content`` per message; byte 0 instead of a newline ends a message
    of the assistant.
    """

    vocab_size, separator, fingerprint = 256, 0, "bytes"

    def encode(self, text: str) -> NDArray[Any]:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, tokens: NDArray[Any]) -> str:
        return bytes(tokens).decode(errors="replace")

    def encode_chat(self, chat: Chat) -> list[Encoded]:
        if chat.tools:
            raise MalformedError("'tools': the bytes tokenizer has no template for them")
        tokens, masks = [], []
        for number, message in enumerate(chat.messages, start=1):
            if not isinstance(message.get("content"), str):
                raise MalformedError(f"message {number}: wanted a 'content' that is a string")
            is_answer = message["role"] == ASSISTANT
            content = self.encode(f"{message['content']}{chr(0) if is_answer else chr(10)}")
            role = self.encode(f"{message['role']}: ")
            tokens += [role, content]
            masks += [np.zeros(len(role), np.bool_), np.full(len(content), is_answer)]
        return [Encoded(np.concatenate(tokens), np.concatenate(masks))]

    def encode_question(self, chat: Chat) -> NDArray[Any]:
        [given] = self.encode_chat(chat)
        return np.concatenate([given.tokens, self.encode(f"{ASSISTANT}: ")])


class HubTokenizer(Tokenizer):
    """Tokenizer of a ``tokenizer.json``, or of a Hugging Face directory; see [Note: untrusted files]."""

    def __init__(self, path: Path) -> None:
        try:
            from transformers import PreTrainedTokenizerFast, __version__
        except ImportError as error:
            raise DataError(f"{path}: reading it needs transformers: pip install transformers") from error
        self._path, alone = path, not path.is_dir()
        content = [_read_checked(path)] if alone else [b"", str(__version__).encode()]  # which decides, too
        for file in sorted({each for pattern in TOKENIZER_FILES for each in path.glob(pattern)}):
            _read_checked(file)
        if (path / "config.json").exists():  # which is read, too
            check_counts(read_json_object(path / "config.json"), path / "config.json")
        what = "not a tokenizer.json" if alone else "transformers finds no tokenizer there"
        with library_errors(DataError, f"data.tokenizer: {path}: {what}"), offline():
            library = self._library = _opened(path)
            self.vocab_size, self.separator = len(library), library.eos_token_id
            bos, begins = library.bos_token_id, library("").input_ids[:1]  # no truncation, no padding then
            self.opening = bos if begins == [bos] else None
            self._array([each for each in (self.opening, self.separator) if each is not None])
            kind, own = type(library), ("__call__", "_encode_plus")
            self._plain = all(
                getattr(kind, name) is getattr(PreTrainedTokenizerFast, name, None) for name in own
            )
        for file in () if alone else sorted(path.iterdir()):
            if file.suffix in _TOKENIZER_FILES and file.is_file():
                content += [file.name.encode(), file.read_bytes()]
        self.fingerprint = hashlib.sha256(b"\0".join(content)).hexdigest()

    def encode(self, text: str) -> NDArray[Any]:
        _check_words(text)
        with library_errors(DataError, f"data.tokenizer: {self._path} cannot encode a text"):
            return self._array(self._encoded(text).ids)

    def decode(self, tokens: NDArray[Any]) -> str:
        with library_errors(DataError, f"data.tokenizer: {self._path} cannot decode tokens"):
            text: str = self._library.decode(tokens.tolist(), clean_up_tokenization_spaces=False)
            return text

    def _array(self, ids: list[int]) -> NDArray[Any]:
        """Return ``ids`` in the smallest dtype that holds the vocabulary; raise if one exceeds it."""
        return np.array(ids, dtype=np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def encode_chat(self, chat: Chat) -> list[Encoded]:
        if not self._library.is_fast:
            raise DataError(
                f"data.tokenizer: {self._path} does not map tokens to characters, which is needed to find "
                "the assistant's tokens; save it as a tokenizer.json"
            )
        with self._rendering(chat):
            rendered = self._render(chat)
        documents = []
        for text, spans in rendered:
            _check_words(text)
            with library_errors(DataError, f"data.tokenizer: {self._path} cannot encode a chat"):
                found = self._encoded(text)
                offsets = np.fromiter(chain.from_iterable(found.offsets), np.int64).reshape(-1, 2)
                documents.append(Encoded(self._array(found.ids), mask_of_spans(offsets, spans)))
        return documents

    def _encoded(self, text: str) -> Any:
        """Return the tokens of a text as ``ids``, and their characters, if it knows them, as ``offsets``."""
        if self._plain:  # what else transformers looks at for each text is as it was left
            return self._library.backend_tokenizer.encode(text, add_special_tokens=False)
        fast = self._library.is_fast
        found = self._library(text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
        return SimpleNamespace(ids=found.input_ids, offsets=found.get("offset_mapping"))

    def encode_question(self, chat: Chat) -> NDArray[Any]:
        self._template(chat)
        with self._rendering(chat):
            text: str = self._library.apply_chat_template(
                list(chat.messages), tools=chat.tools, add_generation_prompt=True, tokenize=False
            )
        return self.encode(text)

    @property
    def ends(self) -> set[int]:
        ends, special = super().ends, set(self._library.all_special_ids)
        with suppress(DataError, MalformedError):  # no template, or one that wants more of a chat
            example = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}]
            last = self.encode_chat(Chat(example, None))[-1]
            ends.update([each for each in last.tokens[last.loss_mask].tolist() if each in special][-1:])
        return ends

    @contextmanager
    def _rendering(self, chat: Chat) -> Iterator[None]:
        try:
            yield
        except (MalformedError, DataError):
            raise
        except Exception as error:  # a template is a program and may raise any type
            raise MalformedError(f"the chat template rejects it: {error}") from error

    def _template(self, chat: Chat) -> str:
        with library_errors(DataError, f"data.tokenizer: {self._path} has no chat template"):
            template: str = self._library.get_chat_template(tools=chat.tools)
            return template

    def _render(self, chat: Chat) -> list[Rendered]:
        library, template = self._library, self._template(chat)
        if "endgeneration" in template:
            from transformers.utils.chat_template_utils import render_jinja_template

            texts, spans = render_jinja_template(
                [chat.messages], tools=chat.tools, chat_template=template,
                return_assistant_tokens_mask=True, **library.special_tokens_map,
            )  # fmt: skip
            return [Rendered(texts[0], spans[0])]

        def render(messages: Sequence[Message], generation_prompt: bool) -> str:
            text: str = library.apply_chat_template(
                list(messages), tools=chat.tools, add_generation_prompt=generation_prompt, tokenize=False
            )
            return text

        return render_turns(chat.messages, render)


def open_tokenizer(name: str) -> Tokenizer:
    """Open ``bytes``, the path of a ``tokenizer.json``, or a directory with a Hugging Face tokenizer."""
    if name == "bytes":
        return BytesTokenizer()
    path = user_path(name, "data.tokenizer")
    tokenizer = HubTokenizer(path)
    tokenizer.name = str(path)
    return tokenizer


def _opened(path: Path) -> Any:
    """Return the tokenizer that transformers makes of a ``tokenizer.json`` or a directory."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not path.is_dir():
        library = PreTrainedTokenizerFast(tokenizer_file=str(path))
        known = library.get_vocab()
        library.eos_token = next((token for token in _SEPARATORS if token in known), None)
        return library
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise DataError(
            f"data.tokenizer: {path}: its tokenizer is code beside it (auto_map), which infinity does not "
            "run; save it as a tokenizer.json"
        ) from error


def encode_completion(prompt: str, completion: str, tokenizer: Tokenizer) -> Encoded:
    """Encode a prompt and its completion; only the completion counts in the loss.

    The prompt has the tokens that it has on its own, as at inference; where prompt and completion would
    share a token, they are encoded separately.
    """
    given, whole = tokenizer.encode(prompt), tokenizer.encode(prompt + completion)
    if not np.array_equal(whole[: len(given)], given):
        whole = np.concatenate([given, tokenizer.encode(completion)])
    return Encoded(whole, np.arange(len(whole)) >= len(given))


def render_turns(
    messages: Sequence[Message], render: Callable[[Sequence[Message], bool], str]
) -> list[Rendered]:
    """Render a chat as one text with all of the assistant's turns, or as one text per turn.

    ``render(messages, generation_prompt)`` returns the text of a chat, up to where an answer would begin.

    Some templates render a turn differently once others follow it (they drop earlier reasoning, or move the
    system message to the last question). Then every turn becomes a text of its own that ends with it, the
    context that the model will see when it answers.
    """
    turns, whole = [], ""
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before, text, begin = messages[:number], render(messages[: number + 1], False), 0
        whole = text if number + 1 == len(messages) else ""
        if before:
            prompt = render(before, True)
            begin = count_alike(prompt, text)
            if begin < len(prompt) and begin < len(render(before, False)):
                raise MalformedError(
                    f"message {number + 1}: the chat template renders the preceding messages differently "
                    "once it follows, so the assistant's text cannot be located; mark it with "
                    "{% generation %}"
                )
        turns.append(Rendered(text, [(begin, len(text))]))
    whole = whole or render(messages, False)
    if all(whole.startswith(turn.text) for turn in turns):
        return [Rendered(whole, [span for turn in turns for span in turn.spans])]
    return turns


def count_alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many characters two texts begin with alike, or messages two chats."""
    if other[: len(one)] == one:
        return len(one)
    return next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def mask_of_spans(offsets: NDArray[np.int64], spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return which tokens have a character in ``spans``; ``offsets``, ``(tokens, 2)``, are their ranges."""
    mask = np.zeros(len(offsets), dtype=np.bool_)
    starts, stops = offsets[:, 0], offsets[:, 1]
    for begin, end in spans:
        mask |= (starts < end) & (stops > begin) & (stops > starts)
    return mask


def _check_words(text: str) -> None:
    """Refuse text with a word so long that tokenizing it would take gigabytes."""
    longest = max(map(len, text.split()), default=0) if len(text) > _MOST_WORD_CHARS else 0
    if longest > _MOST_WORD_CHARS:
        raise MalformedError(f"a word has {longest} characters; wanted a space in {_MOST_WORD_CHARS}")


def _read_checked(path: Path) -> bytes:
    """Read a file of a tokenizer; see [Note: untrusted files]."""
    try:
        return read_file(path, _MOST_FILE_NBYTES)
    except OSError as error:
        raise DataError(
            f"data.tokenizer: {path}: {error.strerror}; wanted bytes, a tokenizer.json or a directory"
        ) from error
