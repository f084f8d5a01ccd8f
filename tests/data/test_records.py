"""What a line of JSONL is follows from its fields; what it is not is said."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.app.data.records import Chat, Completion, MalformedError, Text, parse_record

ASKED = {"role": "user", "content": "?"}
ANSWERED = {"role": "assistant", "content": "!"}


def line(value: Any) -> bytes:
    return json.dumps(value).encode()


def test_a_record_is_what_its_fields_say() -> None:
    assert parse_record(line({"text": "a", "id": 1})) == Text("a")
    assert parse_record(line({"prompt": "a", "completion": "b", "text": "c"})) == Completion("a", "b")
    chat = {"messages": [ASKED, ANSWERED], "prompt": "?", "tools": [{"name": "f"}]}
    assert parse_record(line(chat)) == Chat([ASKED, ANSWERED], [{"name": "f"}])


def test_a_messages_fields_that_are_null_are_as_if_they_were_not_there() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    chat = parse_record(line({"messages": [ASKED, called], "tools": None}))
    assert chat == Chat([ASKED, {"role": "assistant", "tool_calls": [{"name": "f"}]}], None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "cut', "not JSON: Unterminated string"),
        (b"\xff\xfe", "not UTF-8 text at byte 0"),
        (b'{"text": "\\ud83d"}', "half of a surrogate pair is not text"),
        (b"[" * 100_000, "not JSON: .*recursion"),
        (b"1" * 5000, "not JSON: Exceeds the limit"),
        (b'{"body": "x", "id": 1}', "wanted 'text', .*; got the fields body, id"),
        (b"{}", "got none"),
        (b'{"prompt": "x"}', "got the fields prompt"),
        (b'{"prompt": "x", "completion": 1}', "'completion': wanted a string; got int"),
        (b'{"text": null}', "'text': wanted a string; got null"),
        (b"[1]", "wanted an object; got list"),
        (b'{"messages": []}', "'messages': wanted a list of them; got an empty list"),
        (b'{"messages": "hi"}', "'messages': wanted a list of them; got str"),
        (b'{"messages": [{"role": "assistant"}, "hi"]}', "message 2: wanted an object whose 'role'"),
        (b'{"messages": [{"role": 1}]}', "message 1: wanted an object whose 'role' is a string"),
        (b'{"messages": [{"role": "user", "content": "?"}]}', "none has the role assistant"),
        (b'{"messages": [{"role": "assistant"}], "tools": "f"}', "'tools': wanted a list; got str"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(content: bytes, message: str) -> None:
    with pytest.raises(MalformedError, match=message):
        parse_record(content)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["text", "prompt", "completion", "messages", "role", "content", "tools"]), inner
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | VALUES.map(line))
def test_any_line_is_a_record_or_malformed(content: bytes) -> None:
    with suppress(MalformedError):
        record = parse_record(content)
        assert isinstance(record, Text | Completion | Chat)
        json.dumps(record, ensure_ascii=False).encode()  # no half of a surrogate pair is left
