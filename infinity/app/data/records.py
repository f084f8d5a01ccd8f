"""A line of JSONL as a record: a text, a prompt with its completion, or a chat.

What a line is follows from its fields: ``messages`` (with ``tools``, where there are some), else
``prompt`` and ``completion``, else ``text``. Other fields are nobody's business.
"""

import json
from typing import Any, NamedTuple

ASSISTANT = "assistant"

Message = dict[str, Any]


class MalformedError(ValueError):
    """A line cannot be used; the message says why, the caller says where."""


class Text(NamedTuple):
    """A document, every token of which is learned."""

    text: str


class Completion(NamedTuple):
    """What is given, and what is learned to follow it."""

    prompt: str
    completion: str


class Chat(NamedTuple):
    """Messages with a ``role`` and, nearly always, a ``content``; the assistant's are learned."""

    messages: list[Message]
    tools: list[Any] | None


def parse_record(line: bytes) -> Text | Completion | Chat:
    """The record of a line.

    Raises:
        MalformedError: Not UTF-8, not JSON, or not an object with the fields of a record.
    """
    value = _parse_json(line)
    if not isinstance(value, dict):
        raise MalformedError(f"wanted an object; got {_name(value)}")
    if "messages" in value:
        return Chat(_messages(value["messages"]), _tools(value.get("tools")))
    if "prompt" in value and "completion" in value:
        return Completion(_string(value, "prompt"), _string(value, "completion"))
    if "text" in value:
        return Text(_string(value, "text"))
    fields = f"the fields {', '.join(value)}" if value else "none"
    raise MalformedError(f"wanted 'text', 'prompt' and 'completion', or 'messages'; got {fields}")


def _parse_json(line: bytes) -> Any:
    try:
        value = json.loads(line.decode())
        if b"\\u" in line:  # only an escape can smuggle in half a surrogate pair, which no tokenizer takes
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise MalformedError(f"not UTF-8 text at byte {error.start}: {error.reason}") from error
    except UnicodeEncodeError as error:
        raise MalformedError("half of a surrogate pair is not text") from error
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"not JSON: {error}") from error
    return value


def _string(fields: dict[str, Any], key: str) -> str:
    value = fields[key]
    if not isinstance(value, str):
        raise MalformedError(f"{key!r}: wanted a string; got {_name(value)}")
    return value


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise MalformedError(f"'messages': wanted a list of them; got {_name(value)}")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise MalformedError(f"message {number}: wanted an object whose 'role' is a string")
    if not any(message["role"] == ASSISTANT for message in value):
        raise MalformedError(f"'messages': none has the role {ASSISTANT}, so there is nothing to learn")
    return [{key: each for key, each in message.items() if each is not None} for message in value]


def _tools(value: Any) -> list[Any] | None:
    if value is None or isinstance(value, list):
        return value or None
    raise MalformedError(f"'tools': wanted a list; got {_name(value)}")


def _name(value: Any) -> str:
    return "null" if value is None else "an empty list" if value == [] else type(value).__name__
