"""What one watched rendering says of a chat is what several say, bit by bit; or it says nothing."""

from pathlib import Path
from typing import Any

import pytest

from infinity.data.tokenizer import Chat, MalformedError, open_tokenizer
from tests.helpers.tokenizers import CHATML, write_tokenizer

EACH = "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
END = "{% endfor %}"
ASKS = "{% if add_generation_prompt %}<assistant>{% endif %}"
#: Templates that write message by message, where chats have no tools.
WATCHED = {
    "plain": CHATML,
    "no prompt": EACH + END,
    "trimmed": "{% for m in messages %}\n  <{{ m.role }}>{{ m.content | trim }}{{ eos_token }}\n" + END,
    "a prompt that thinks": EACH + END + ASKS.replace("{% endif %}", "{% if a %}<a>{% endif %}{% endif %}"),
    "a system message first": (
        "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% set rest = messages[1:] %}"
        "{% else %}[be kind]{% set rest = messages %}{% endif %}"
        "{% for message in rest %}<{{ message.role }}>{{ message.content }}" + END + ASKS
    ),
    "what was before": (
        EACH + "{% if loop.first %}!{% elif messages[loop.index0 - 1].role == message.role %};{% endif %}"
        + END
    ),
    "a macro": "{% macro show(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}"
    "{% for message in messages %}{{ show(message) }}" + END + ASKS,
    "tools that look ahead": (
        EACH + "{% if message.role == 'tool' and not loop.last %}{{ messages[loop.index].role }}{% endif %}"
        + END + ASKS
    ),
    "some": EACH.replace("messages %}", "messages if message.role != 'system' %}") + END + ASKS,
}  # fmt: skip
#: Others, of which several renderings are needed.
OTHERS = {
    "the last one": EACH + "{% if not loop.last %};{% endif %}" + END + ASKS,
    "the next one": EACH + "{% if messages[loop.index0 + 1] %};{% endif %}" + END + ASKS,
    "their number": EACH + "{% if messages | length > 2 %};{% endif %}" + END + ASKS,
    "the end first": "{% set last = messages[-1].role %}" + EACH + END + ASKS,
    "a list": "{% set all = messages | list %}" + EACH.replace("messages", "all") + END + ASKS,
    "twice": "{% for m in messages %}{{ m.role[0] }}" + END + EACH + END + ASKS,
    "held back": "{% set text %}" + EACH + END + "{% endset %}{{ text }}" + EACH + END,
    "json": "{{ messages | tojson }}" + EACH + END + ASKS,
    "a prompt of the last role": (
        "{% set ns = namespace(role='') %}{% for m in messages %}{% set ns.role = m.role %}{{ m.content }}"
        + END + "{% if add_generation_prompt %}{{ ns.role }}{% endif %}"
    ),
    "an end": EACH + END + "{% if add_generation_prompt %}<assistant>{% else %}{{ eos_token }}{% endif %}",
    "asked inside": EACH + "{% if loop.last and add_generation_prompt %}<assistant>{% endif %}" + END,
    "cut short": EACH + "{% if loop.index > 1 %}{% break %}{% endif %}" + END + ASKS,
    "refuses": EACH + "{{ raise_exception('no') }}" + END,
}  # fmt: skip
CHATS = ["ua", "suaua", "aua", "uau", "uuaaua", "utua"]


def messages(roles: str) -> list[dict[str, Any]]:
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    return [{"role": names[role], "content": f" the {at} ä" * at} for at, role in enumerate(roles)]


def encoded(tokenizer: Any, roles: str) -> Any:
    try:
        return [
            (each.tokens.tolist(), each.loss_mask.tolist())
            for each in tokenizer.encode_chat(Chat(messages(roles), None))
        ]
    except MalformedError as error:
        return str(error)


@pytest.mark.parametrize("name", [*WATCHED, *OTHERS])
def test_one_rendering_gives_the_tokens_and_masks_of_several(tmp_path: Path, name: str) -> None:
    write_tokenizer(tmp_path, chat_template={**WATCHED, **OTHERS}[name])
    once, several = (open_tokenizer(str(tmp_path)) for _ in range(2))
    several.__dict__["_watched"] = None
    assert [encoded(once, roles) for roles in CHATS] == [encoded(several, roles) for roles in CHATS]


@pytest.mark.parametrize(("name", "renderings"), [("plain", 1), ("the last one", 3)])
def test_a_chat_is_rendered_once_where_that_is_enough(
    tmp_path: Path, name: str, renderings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path, chat_template={**WATCHED, **OTHERS}[name])
    tokenizer: Any = open_tokenizer(str(tmp_path))
    rendered, apply = list[int](), tokenizer._library.apply_chat_template
    monkeypatch.setattr(
        tokenizer._library,
        "apply_chat_template",
        lambda *args, **how: rendered.append(1) or apply(*args, **how),
    )
    ends = None if tokenizer._watched is None else tokenizer._watched.ends(messages("ua"))
    tokenizer.encode_chat(Chat(messages("ua"), None))
    assert (ends is not None) + len(rendered) == renderings


@pytest.mark.parametrize("name", [*WATCHED, *OTHERS])
def test_what_is_watched_is_known(tmp_path: Path, name: str) -> None:
    write_tokenizer(tmp_path, chat_template={**WATCHED, **OTHERS}[name])
    watched = open_tokenizer(str(tmp_path))._watched  # type: ignore[attr-defined]
    if name in ("json", "refuses"):
        with pytest.raises(Exception, match=r"JSON serializable|no"):
            watched.ends(messages("suaua"))
    else:
        known = watched is not None and watched.ends(messages("suaua")) is not None
        assert known == (name in WATCHED)


def test_content_in_parts_and_reasoning_are_rendered_as_transformers_does(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    watched = open_tokenizer(str(tmp_path))._watched  # type: ignore[attr-defined]
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    assert watched.ends([parts]) is None
    assert watched.ends([{"role": "assistant", "content": "a", "thinking": "b"}]) is None
