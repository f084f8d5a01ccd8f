"""What rows of training data mean: a table of formats, and the standard form that each becomes.

| standard form | of the formats |
|---|---|
| ``messages``, ``tools`` | ``messages``, ``sharegpt``, ``alpaca`` |
| ``prompt``, ``chosen``, ``rejected`` | ``preference`` |
| ``prompt``, ``completion``, ``label`` | ``prompt-completion`` |
| ``text``, ``label`` | ``text`` |

A format is a row of :data:`FORMATS`. Tokens are made of standard forms, so another format is no matter of
theirs.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from infinity.core.config import shown
from infinity.core.errors import did_you_mean
from infinity.data.tokenizer import ASSISTANT, Chat, MalformedError, Message

Record: TypeAlias = dict[str, Any]

#: Roles of messages, by their names elsewhere.
_ROLES = {
    "human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bard": ASSISTANT, "bing": ASSISTANT,
    "model": ASSISTANT, "function_call": ASSISTANT, "observation": "tool", "function_response": "tool",
}  # fmt: skip


class Completion(NamedTuple):
    """Prompt and completion; only the completion counts in the loss."""

    prompt: str
    completion: str


class Format(NamedTuple):
    """Columns of a format, those that a row may have beside them, and a row's standard form."""

    columns: tuple[str, ...]
    more: tuple[str, ...]
    standard: Callable[[Record], Record]

    def __str__(self) -> str:
        return " and ".join(map(repr, self.columns))


def _chat_of(row: Record) -> Record:
    """Return the messages of a chat, whose turns have ``role`` and ``content``, or ``from`` and ``value``."""
    name = "messages" if "messages" in row else "conversations"
    turns = _values(row[name])
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    found = {"messages": [*system, *map(_message, turns)] if isinstance(turns, list) else turns}
    return found | ({"tools": _values(row["tools"])} if row.get("tools") else {})


def _message(turn: Any) -> Any:
    """Return a turn as a message with ``role`` and ``content``; what is none is returned as it is."""
    if not isinstance(turn, dict) or "role" in turn or "from" not in turn:
        return turn
    role, value = turn["from"], turn.get("value")
    if role == "function_call":
        calls = _values(value)
        functions = [{"type": "function", "function": call} for call in _list(calls)]
        return {"role": ASSISTANT, "tool_calls": functions}
    return {"role": _ROLES.get(role, role) if isinstance(role, str) else role, "content": value}


def _question(row: Record) -> Iterator[Message]:
    """Yield the messages of an instruction; earlier turns are ``history``."""
    if row.get("system"):
        yield {"role": "system", "content": row["system"]}
    for turns in _list(_values(row.get("history"))):
        if not isinstance(turns, list) or len(turns) != 2:
            raise MalformedError(f"'history': wanted pairs of question and answer; got {shown(turns)}")
        yield from ({"role": role, "content": turn} for role, turn in zip(("user", ASSISTANT), turns))
    parts = [row["instruction"], row.get("input")]
    if not all(part is None or isinstance(part, str) for part in parts):
        raise MalformedError("'instruction' and 'input': wanted strings")
    yield {"role": "user", "content": "\n".join(filter(None, parts))}


def _preference(row: Record) -> Record:
    """Return a prompt with two answers, each a string or messages."""
    found = {name: _answer(row[name]) for name in ("chosen", "rejected")}
    if row.get("prompt") is not None:
        return found | {"prompt": _answer(row["prompt"])}
    if "instruction" in row:
        return found | {"prompt": [*_question(row)]}
    if "conversations" in row or "messages" in row:
        return found | {"prompt": _chat_of(row)["messages"]}
    return found


def _answer(value: Any) -> Any:
    if isinstance(value, dict):
        return [_message(value)]
    return [*map(_message, value)] if isinstance(value, list) else value


def _columns(*names: str) -> Callable[[Record], Record]:
    """Return what takes the columns ``names`` as they are, and a label if there is one."""
    return lambda row: (
        {name: row[name] for name in names} | ({"label": _values(row["label"])} if "label" in row else {})
    )


def _values(value: Any) -> Any:
    """Return what a text holds, if it is JSON, as in CSV; else the value."""
    try:
        return parse_json(value.encode()) if isinstance(value, str) else value
    except MalformedError:
        return value


def parse_json(content: bytes) -> Any:
    """Parse JSON; MalformedError: it is none, or has text that cannot be encoded."""
    try:
        value = json.loads(content.decode("utf-8-sig"))
        if b"\\u" in content:  # an escape may encode half a surrogate pair, which no tokenizer accepts
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeDecodeError as error:
        raise MalformedError(f"not UTF-8 text at byte {error.start}: {error.reason}") from error
    except UnicodeEncodeError as error:
        raise MalformedError("half of a surrogate pair is not text") from error
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"not JSON: {error}") from error


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


#: The values of ``data.format``. Of several that fit a row it is of the first.
FORMATS = {
    "messages": Format(("messages",), ("tools",), _chat_of),
    "sharegpt": Format(("conversations",), ("system", "tools"), _chat_of),
    "preference": Format(
        ("chosen", "rejected"),
        ("prompt", "instruction", "input", "system", "history", "messages", "conversations"),
        _preference,
    ),
    "prompt-completion": Format(("prompt", "completion"), ("label",), _columns("prompt", "completion")),
    "alpaca": Format(
        ("instruction", "output"),
        ("input", "system", "history"),
        lambda row: {"messages": [*_question(row), {"role": ASSISTANT, "content": row["output"]}]},
    ),
    "text": Format(("text",), ("label",), _columns("text")),
}
#: Those of chats, prompts with completions, and text.
SUPERVISED = ("messages", "sharegpt", "prompt-completion", "alpaca", "text")
#: Every column that some format reads.
COLUMNS = tuple(dict.fromkeys(name for each in FORMATS.values() for name in (*each.columns, *each.more)))


@dataclass(frozen=True, slots=True)
class Reading:
    """Says how rows are read: the formats that they may have, and other names of their columns."""

    formats: tuple[str, ...] = SUPERVISED
    fields: Mapping[str, str] = field(default_factory=dict)  # a column's name here: its name in the data

    def standard(self, row: Any) -> Record:
        """Return the standard form of a row; MalformedError: it has none, or is such an error itself.

        A line of JSON is parsed.
        """
        if isinstance(row, MalformedError):
            raise row
        row = parse_json(row) if isinstance(row, bytes) else row
        if not isinstance(row, dict):
            raise MalformedError(f"wanted an object; got {_name(row)}")
        name = self.check(row)
        renamed = {ours: row[theirs] for ours, theirs in self.fields.items() if theirs in row}
        return FORMATS[name].standard(row | renamed)

    def check(self, columns: Collection[str]) -> str:
        """Return the format of rows with these columns; MalformedError: they have none of the formats.

        What ``fields`` names is not needed where another source of a mixture has it.
        """
        missing = {ours: theirs for ours, theirs in self.fields.items() if theirs not in columns}
        have = {*columns, *self.fields} - {ours for ours in missing if ours not in columns}
        for name in self.formats:
            if have.issuperset(FORMATS[name].columns):
                return name
        there = f"the fields {', '.join(columns)}" if columns else "none"
        for ours, theirs in missing.items():
            hint = did_you_mean(theirs, columns)
            raise MalformedError(f"data.fields.{ours}: got {theirs}; wanted one of {there}{hint}")
        *most, last = (str(FORMATS[name]) for name in self.formats)
        wanted = f"{', '.join(most)}, or {last}" if most else last
        raise MalformedError(
            f"wanted {wanted}; got {there}; data.fields gives other names of columns, as in "
            "data.fields='{prompt: question, completion: answer}'"
        )

    def is_read(self, column: str) -> bool:
        """Return whether some format reads this column of the data."""
        return column in COLUMNS or column in self.fields.values()


def document_of(record: Record) -> str | Completion | Chat:
    """Return the document of a standard form, to be learned by heart; MalformedError: it is none."""
    if "messages" in record:
        return _chat(record["messages"], record.get("tools"))
    names = ("prompt", "completion") if "completion" in record else ("text",)
    for name in names:
        if not isinstance(record[name], str):
            raise MalformedError(f"{name!r}: wanted a string; got {_name(record[name])}")
    return str(record["text"]) if names == ("text",) else Completion(record["prompt"], record["completion"])


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
