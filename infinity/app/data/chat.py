"""Which characters of a chat, as a template writes it, are the assistant's.

A template that marks them (``{% generation %}``) is believed. With any other a turn is what the
chat with it has beyond the chat before it and the template's words that ask for an answer. The
words that end a turn belong to it, because a model must learn to stop.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from infinity.app.data.records import ASSISTANT, MalformedError, Message

#: ``render(messages, ask)``: the text of a chat; with ``ask``, as far as an answer would begin.
Render = Callable[[Sequence[Message], bool], str]


class Rendered(NamedTuple):
    """A chat as text; ``spans`` are the characters, from and up to, that are the assistant's."""

    text: str
    spans: list[tuple[int, int]]


def render_turns(messages: Sequence[Message], render: Render) -> list[Rendered]:
    """The chat as one text with all of its assistant's turns.

    Some templates write a turn otherwise once others follow it (they leave out old thoughts, or
    move the system's words to the last question). Then every turn becomes a text of its own, which
    ends with it: what the model will have before it when it answers.

    Raises:
        MalformedError: The template does not keep the question as it was when an answer follows.
    """
    turns = [
        _render_turn(messages[:number], message, render)
        for number, message in enumerate(messages)
        if message["role"] == ASSISTANT
    ]
    whole = render(messages, False)
    if all(whole.startswith(turn.text) for turn in turns):
        return [Rendered(whole, [span for turn in turns for span in turn.spans])]
    return turns


def _render_turn(before: Sequence[Message], message: Message, render: Render) -> Rendered:
    text = render([*before, message], False)
    if not before:
        return Rendered(text, [(0, len(text))])
    asked = render(before, True)
    begin = _common(asked, text)
    if begin < len(asked) and begin < len(render(before, False)):
        raise MalformedError(
            f"message {len(before) + 1}: the chat template writes what stands before it otherwise once "
            "it is there, so what is the assistant's cannot be told; mark it by {% generation %}"
        )
    return Rendered(text, [(begin, len(text))])


def _common(one: str, other: str) -> int:
    """How many characters both begin with."""
    pairs = enumerate(zip(one, other))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def count_tokens(offsets: NDArray[np.int64], spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which tokens have a character inside ``spans``.

    Args:
        offsets: ``(tokens, 2)``, the characters of each token, from and up to.
        spans: Likewise, in characters.
    """
    counts = np.zeros(len(offsets), dtype=np.bool_)
    starts, stops = offsets[:, 0], offsets[:, 1]
    for begin, end in spans:
        counts |= (starts < end) & (stops > begin) & (stops > starts)
    return counts
