"""Only the assistant's tokens of a chat count in the loss, whatever its template does."""

import json
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.core.errors import CheckpointError
from infinity.data import tokenizer as tokenizer_module
from infinity.data.tokenizer import (
    BytesTokenizer,
    Chat,
    DataError,
    Encoded,
    MalformedError,
    Message,
    Rendered,
    Tokenizer,
    mask_of_spans,
    open_tokenizer,
    render_turns,
)
from tests.helpers.cases import examples
from tests.helpers.tokenizers import CHATML, MARKED, write_tokenizer

#: A template that leaves out what the assistant thought, except in the last turn.
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)


def chat(*contents: str, system: str | None = None) -> list[Message]:
    """Questions and answers in turn."""
    messages = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return messages + [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def said(rendered: Rendered) -> list[str]:
    return [rendered.text[begin:end] for begin, end in rendered.spans]


def simple(messages: Sequence[Message], ask: bool) -> str:
    return "".join(f"[{m['role'][0]}]{m['content']};" for m in messages) + ("[a]" if ask else "")


def test_a_turn_is_the_text_after_the_generation_prompt() -> None:
    (whole,) = render_turns(chat("q", "one", "r", "two", system="s"), simple)
    assert whole.text == "[s]s;[u]q;[a]one;[u]r;[a]two;"
    assert said(whole) == ["one;", "two;"]


def test_a_template_that_rewrites_old_turns_gives_one_text_per_answer() -> None:
    def forgetful(messages: Sequence[Message], ask: bool) -> str:
        last = len(messages) - 1
        shown = [
            {**m, "content": m["content"].upper() if i < last and m["role"] == "assistant" else m["content"]}
            for i, m in enumerate(messages)
        ]
        return simple(shown, ask)

    first, second = render_turns(chat("q", "one", "r", "two"), forgetful)
    assert (first.text, said(first)) == ("[u]q;[a]one;", ["one;"])
    assert (second.text, said(second)) == ("[u]q;[a]ONE;[u]r;[a]two;", ["two;"])


def test_a_turn_begins_after_the_common_prefix_with_the_generation_prompt() -> None:
    def thinks(messages: Sequence[Message], ask: bool) -> str:
        return simple(messages, ask) + ("<think>" if ask else "")

    (whole,) = render_turns(chat("q", "one"), thinks)
    assert said(whole) == ["one;"]


def test_a_template_that_rewrites_the_question_is_rejected() -> None:
    def fickle(messages: Sequence[Message], ask: bool) -> str:
        return f"{len(messages)} messages: {simple(messages, ask)}"

    with pytest.raises(MalformedError, match="message 2: the chat template renders the preceding"):
        render_turns(chat("q", "one"), fickle)


def test_a_chat_that_begins_with_the_assistant_counts_from_its_beginning() -> None:
    (whole,) = render_turns(chat("", "one")[1:], simple)
    assert said(whole) == ["[a]one;"]


def test_a_token_counts_when_a_character_of_it_does() -> None:
    offsets = np.array([(0, 2), (2, 4), (3, 5), (5, 5), (5, 6), (6, 8)])
    assert mask_of_spans(offsets, [(4, 6)]).tolist() == [False, False, True, False, True, False]


def learned(tokenizer: Tokenizer, encoded: Encoded, library: object) -> list[str]:
    """Return the runs of tokens that count in the loss, as text."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], encoded.loss_mask, [0]])))
    runs = [encoded.tokens[begin:end].tolist() for begin, end in edges.reshape(-1, 2)]
    return [library.decode(run) for run in runs]  # type: ignore[attr-defined]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["unmarked", "marked"])
def test_the_assistants_tokens_count_with_the_end_of_their_turn(tmp_path: Path, template: str) -> None:
    library = write_tokenizer(tmp_path, chat_template=template)
    tokenizer = open_tokenizer(str(tmp_path))
    messages = chat("the käse?", "abab ✓", "and then", "the end", system="be brief")
    (encoded,) = tokenizer.encode_chat(Chat(messages, None))
    assert library.decode(encoded.tokens) == library.apply_chat_template(messages, tokenize=False)
    assert learned(tokenizer, encoded, library) == ["abab ✓<|im_end|>\n", "the end<|im_end|>\n"]


def test_reasoning_counts_only_in_the_text_that_ends_with_its_turn(tmp_path: Path) -> None:
    library = write_tokenizer(tmp_path, chat_template=THINKING)
    tokenizer = open_tokenizer(str(tmp_path))
    messages = chat("q", "<think>hm</think>one", "r", "<think>so</think>two")
    first, second = tokenizer.encode_chat(Chat(messages, None))
    assert learned(tokenizer, first, library) == ["hm</think>one<|im_end|>\n"]
    assert learned(tokenizer, second, library) == ["so</think>two<|im_end|>\n"]
    assert "hm" not in library.decode(second.tokens)


def test_a_file_that_cuts_and_pads_texts_cuts_and_pads_none_of_the_data(tmp_path: Path) -> None:
    library = write_tokenizer(tmp_path)
    plain = open_tokenizer(str(tmp_path)).encode("a b" * 20)
    library.backend_tokenizer.enable_truncation(8)
    library.backend_tokenizer.enable_padding(length=12)
    library.bos_token = None
    library.save_pretrained(str(tmp_path))
    assert json.loads((tmp_path / "tokenizer.json").read_text())["truncation"]["max_length"] == 8
    assert open_tokenizer(str(tmp_path)).encode("a b" * 20).tolist() == plain.tolist()


def test_an_error_of_the_template_makes_the_line_malformed(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(MalformedError, match="the chat template rejects it: roles must alternate"):
        open_tokenizer(str(tmp_path)).encode_chat(Chat(chat("q", "a"), None))


def test_a_tokenizer_without_a_template_is_an_error_of_the_recipe(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template=None)
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        with pytest.raises(DataError, match=r"data\.tokenizer: .* has no chat template"):
            open_tokenizer(str(name)).encode_chat(Chat(chat("q", "a"), None))


def test_tools_reach_the_template(tmp_path: Path) -> None:
    library = write_tokenizer(tmp_path, chat_template="{{ tools[0]['name'] }}: " + CHATML)
    (encoded,) = open_tokenizer(str(tmp_path)).encode_chat(Chat(chat("q", "a"), [{"name": "weather"}]))
    assert library.decode(encoded.tokens).startswith("weather: <|im_start|>user")


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module", params=[CHATML, MARKED, THINKING], ids=["unmarked", "marked", "thinking"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, chat_template=request.param)
    return open_tokenizer(str(folder))


@examples(60)
@given(
    messages=st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]) | st.text(), "content": JSON}),
        min_size=1,
        max_size=4,
    )
)
def test_any_messages_are_tokens_or_malformed(shared: Tokenizer, messages: list[Message]) -> None:
    with suppress(MalformedError):
        for tokens, counts, *_ in shared.encode_chat(Chat(messages, None)):
            assert len(tokens) == len(counts)
            assert tokens.max(initial=0) < shared.vocab_size


def test_the_bytes_tokenizer_has_a_chat_template() -> None:
    (encoded,) = BytesTokenizer().encode_chat(Chat(chat("hä?", "yes"), None))
    assert bytes(encoded.tokens).decode() == "user: hä?\nassistant: yes\0"
    assert bytes(encoded.tokens[encoded.loss_mask]) == b"yes\0"
    with pytest.raises(MalformedError, match="message 1: wanted a 'content' that is a string"):
        BytesTokenizer().encode_chat(Chat([{"role": "assistant", "content": ["a"]}], None))


# --- untrusted files -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__ }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"]
)
def test_a_chat_template_stays_in_its_sandbox(tmp_path: Path, template: str) -> None:
    write_tokenizer(tmp_path, chat_template=template)
    with pytest.raises(MalformedError, match=r"unsafe|recursion"):
        open_tokenizer(str(tmp_path)).encode_chat(Chat(chat("q", "a"), None))


NAMES = ["tokenizer.json", "tokenizer_config.json", "vocab.json", "additional_chat_templates/x.jinja"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_what_is_no_file_is_refused_before_it_blocks(tmp_path: Path, name: str, kind: str) -> None:
    write_tokenizer(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(DataError, match=rf"data\.tokenizer: {path}: .*not a regular file"):
        open_tokenizer(str(tmp_path))
    if kind != "directory" and name == "tokenizer.json":
        with pytest.raises(DataError, match=rf"data\.tokenizer: {path}: not a regular file"):
            open_tokenizer(str(path))


def test_a_word_that_would_take_gigabytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 10_000
    monkeypatch.setattr(tokenizer_module, "_MOST_WORD_CHARS", most)
    write_tokenizer(tmp_path / "good")
    for name in (tmp_path / "good", tmp_path / "good" / "tokenizer.json"):
        tokenizer = open_tokenizer(str(name))
        with pytest.raises(
            MalformedError, match=f"a word has {most + 1} characters; wanted a space in {most}"
        ):
            tokenizer.encode("the " + "x" * (most + 1))
    assert len(tokenizer.encode("word " * (most // 5 + 1))) > most // 5
    with pytest.raises(MalformedError, match="a word has"):
        open_tokenizer(str(tmp_path / "good")).encode_chat(Chat(chat("q" * (most + 1), "a"), None))


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    os.truncate(tmp_path / "tokenizer.json", 2**27 + 1)  # a hole, which takes no room
    with pytest.raises(DataError, match=rf"tokenizer\.json: has {2**27 + 1} bytes; at most {2**27} are read"):
        open_tokenizer(str(tmp_path / "tokenizer.json"))


def test_a_tokenizer_runs_no_code_and_reaches_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        pytest.fail("the network was reached")

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    write_tokenizer(tmp_path)
    trap = tmp_path / "trap"
    (tmp_path / "evil.py").write_text(f"open({str(trap)!r}, 'w')")
    path = tmp_path / "tokenizer_config.json"
    usual = json.loads(path.read_text())
    for where in ("evil", "evil/repository--evil"):
        for tokenizer_class in ("PreTrainedTokenizerFast", "LlamaTokenizer", "os.system", "T"):
            auto_map = {"auto_map": {"AutoTokenizer": [f"{where}.T", f"{where}.T"]}}
            path.write_text(json.dumps(usual | auto_map | {"tokenizer_class": tokenizer_class}))
            with suppress(DataError):
                open_tokenizer(str(tmp_path))
            assert not trap.exists()
    (tmp_path / "tokenizer.json").rename(tmp_path / "kept")
    with pytest.raises(DataError, match=r"code beside it \(auto_map\), which infinity does not run"):
        open_tokenizer(str(tmp_path))
    (tmp_path / "kept").rename(tmp_path / "tokenizer.json")
    path.write_text(json.dumps(usual))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral", "num_labels": 10**9}))
    with pytest.raises(CheckpointError, match="num_labels is 1000000000"):
        open_tokenizer(str(tmp_path))
