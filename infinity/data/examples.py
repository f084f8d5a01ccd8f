"""Examples that are documents or pairs of them: preferences, judged completions, and texts with labels.

Prompts and completions are strings, or lists of messages, of which the completion's count in the loss. Two
chats are a preference, too: what they begin with alike is the prompt.

[Note: mismatched completions] A judged completion is followed by the same prompt with the completion of the
next row (of the last row: the first one's), by which its loss measures how far the model has moved.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from infinity.data.formats import SUPERVISED, Completion, Reading, Record
from infinity.data.sources import Source
from infinity.data.tokenizer import ASSISTANT, Chat, DataError, Encoded, MalformedError, Tokenizer
from infinity.data.tokens import Documents, Encode, encode_document, encode_documents, encoded_rows

#: The largest label of a text.
_MOST_LABEL = 10**6


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
            alike = _alike(chosen, rejected)
            prompt, chosen, rejected = chosen[:alike], chosen[alike:], rejected[alike:]
        named = (("chosen", chosen), ("rejected", rejected))
        return [_completed(tokenizer, prompt, each, name) for name, each in named]

    return encoded_rows(source, reading, both)


def _alike(chosen: list[Any], rejected: list[Any]) -> int:
    """Return how many messages two chats begin with alike, and leave one of each."""
    differ = (at for at, (one, other) in enumerate(zip(chosen, rejected)) if one != other)
    return next(differ, min(len(chosen), len(rejected)) - 1)


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
