"""Rows of every format become standard forms; what has none is refused with what was wanted and got."""

from typing import Any

import pytest

from infinity.core.config import SettingError
from infinity.data.formats import COLUMNS, FORMATS, SUPERVISED, Completion, Reading, document_of
from infinity.data.opening import DataConfig
from infinity.data.tokenizer import Chat, MalformedError

ASKED, ANSWERED = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
CHAT = {"messages": [ASKED, ANSWERED]}
ALL = Reading(tuple(FORMATS))


@pytest.mark.parametrize(
    ("row", "standard"),
    [
        ({"text": "a", "id": 1}, {"text": "a"}),
        ({"text": "a", "label": "2"}, {"text": "a", "label": 2}),  # as CSV has it
        ({"prompt": "a", "completion": "b", "text": "c"}, {"prompt": "a", "completion": "b"}),
        (
            {"prompt": "a", "completion": "b", "label": "true"},
            {"prompt": "a", "completion": "b", "label": True},
        ),
        (CHAT | {"prompt": "?"}, CHAT),
        ({"messages": '[{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]'}, CHAT),
        ({"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}]}, CHAT),
        ({"conversations": [ASKED, ANSWERED], "tools": None}, CHAT),
        (
            {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}], "system": "s",
             "tools": '[{"name": "f"}]'},
            {"messages": [{"role": "system", "content": "s"}, ASKED, ANSWERED], "tools": [{"name": "f"}]},
        ),
        (
            {"conversations": [{"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
                               {"from": "observation", "value": "1"}]},
            {"messages": [
                {"role": "assistant",
                 "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]},
                {"role": "tool", "content": "1"},
            ]},
        ),
        ({"instruction": "?", "output": "!"}, CHAT),
        ({"instruction": "?", "input": "", "output": "!"}, CHAT),
        (
            {"instruction": "a", "input": "b", "output": "!", "system": "s", "history": [["?", "!"]]},
            {"messages": [{"role": "system", "content": "s"}, ASKED, ANSWERED,
                          {"role": "user", "content": "a\nb"}, ANSWERED]},
        ),
        (
            {"prompt": "?", "chosen": "a", "rejected": "b", "messages": []},
            {"prompt": "?", "chosen": "a", "rejected": "b"},
        ),
        (
            {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, ANSWERED]},
            {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, ANSWERED]},
        ),
        (
            {"instruction": "?", "chosen": "a", "rejected": "b"},
            {"prompt": [ASKED], "chosen": "a", "rejected": "b"},
        ),
        (
            {"conversations": [{"from": "human", "value": "?"}], "chosen": {"from": "gpt", "value": "!"},
             "rejected": {"role": "assistant", "content": "."}},
            {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [{"role": "assistant", "content": "."}]},
        ),
    ],
)  # fmt: skip
def test_the_columns_of_a_row_say_its_format(row: dict[str, Any], standard: dict[str, Any]) -> None:
    formats = tuple(name for name in FORMATS if "chosen" in row or name in SUPERVISED)
    found = Reading(("preference", *formats)).standard(row)
    assert found == standard


def test_a_format_by_name_takes_its_own_rows_only() -> None:
    row = {"text": "a", "prompt": "b", "completion": "c"}
    assert Reading(("text",)).standard(row) == {"text": "a"}
    with pytest.raises(MalformedError, match=r"^wanted 'instruction' and 'output'; got the fields text, pro"):
        Reading(("alpaca",)).standard(row)


def test_fields_give_columns_their_names() -> None:
    reading = Reading(SUPERVISED, {"prompt": "question", "completion": "answer"})
    row = {"question": "?", "answer": "!", "id": 3}
    assert document_of(reading.standard(row)) == Completion("?", "!")
    # other sources of a mixture may have these names already, or another format
    assert document_of(reading.standard({"prompt": "?", "completion": "!"})) == Completion("?", "!")
    assert document_of(reading.standard({"instruction": "?", "output": "!"})) == Chat([ASKED, ANSWERED], None)
    wanted = r"data\.fields\.prompt: got question; wanted one of the fields questions, answer; did you mean q"
    with pytest.raises(MalformedError, match=wanted):
        reading.standard({"questions": "?", "answer": "!"})


def test_a_row_without_a_format_is_refused_with_all_that_are_accepted() -> None:
    wanted = (
        "wanted 'messages', 'conversations', 'prompt' and 'completion', 'instruction' and 'output', or "
        "'text'; got the fields question, answer; data.fields gives other names of columns"
    )
    with pytest.raises(MalformedError) as raised:
        Reading().standard({"question": "?", "answer": "!"})
    assert str(raised.value).startswith(wanted)


def test_every_supervised_format_becomes_a_document() -> None:
    rows = {"messages": CHAT, "sharegpt": {"conversations": CHAT["messages"]}, "text": {"text": "a"},
            "prompt-completion": {"prompt": "a", "completion": "b"},
            "alpaca": {"instruction": "?", "output": "!"}}  # fmt: skip
    assert rows.keys() == set(SUPERVISED)
    for name, row in rows.items():
        found = document_of(Reading((name,)).standard(row))
        assert isinstance(found, str | Completion | Chat), name


def test_settings_of_formats_are_checked() -> None:
    with pytest.raises(SettingError, match=r"fields: got 'promt'; wanted .*; did you mean prompt\?"):
        DataConfig(fields={"promt": "question"})
    with pytest.raises(
        SettingError, match=r"weights: .*; wanted one for each entry of data\.files, which has 2"
    ):
        DataConfig(files=("a", "b"), weights=(1.0,))
    with pytest.raises(SettingError, match="format: got 'preference'; wanted auto or one of messages, "):
        DataConfig(format="preference").reading()
    assert DataConfig(format="alpaca").reading().formats == ("alpaca",)
    assert {"text", "chosen", "conversations", "tools"} <= set(COLUMNS)
