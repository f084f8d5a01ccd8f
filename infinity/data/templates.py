"""A chat template that renders a chat once, and says where the text of each message ends.

[Note: a rendering that is watched]
A turn of the assistant is what the template adds to the chat before it. One rendering of the whole chat shows
that if the template writes message by message: its last loop, outside of all blocks, goes over the messages
once; while it writes one it looks at no later one, and not at how many there are; and after the loop it
writes the generation prompt alone, from nothing that was set before. Then the chat up to a message is what
was written when the loop asked for the next one. This is watched in each rendering.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jinja2 import Environment, Template, nodes

Message: TypeAlias = dict[str, Any]

#: Names of a message's reasoning, which transformers copies from one to the other before it renders.
_REASONING = {"reasoning_content", "thinking", "reasoning"}
#: What of ``loop`` depends on what follows.
_AHEAD = {"last", "nextitem", "length", "revindex", "revindex0"}
_ASKS = "add_generation_prompt"


class ChatTemplate:
    """A template whose renderings are watched; ``given`` are its variables beside the messages.

    ValueError: it does not write message by message.
    """

    def __init__(self, environment: Environment, source: str, given: dict[str, Any]) -> None:
        parsed = environment.parse(source)
        loop, prompt = _loop_and_prompt(parsed)
        loop.iter = _called("watched", loop.iter)
        for look in parsed.find_all(nodes.Getattr):
            if look.attr in _AHEAD:
                look.node = _called("ahead", look.node)
        for each in (parsed, prompt):
            each.set_environment(environment)
        self._given = {"tools": None, "documents": None, **given}
        self._whole, prompted = (
            Template.from_code(environment, environment.compile(each), environment.make_globals(None))
            for each in (parsed, prompt)
        )
        self._prompt = prompted.render(**self._given)

    def ends(self, messages: Sequence[Message]) -> tuple[str, list[int], str] | None:
        """Return a chat's text, the end of each message in it, and the generation prompt.

        None: see [Note: a rendering that is watched]; or a message has more than texts.
        """
        texts = all(type(each) is str for message in messages for each in message.values())
        if not texts or any(_REASONING & message.keys() for message in messages):
            return None
        watch, pieces = _Watch(messages), list[str]()
        seen = {"messages": _Messages(watch), "watched": watch.iterated, "ahead": watch.looked_ahead}
        for piece in self._whole.generate(**self._given, **seen, **{_ASKS: False}):
            pieces.append(piece)
            watch.written += len(piece)
        if watch.ahead or len(watch.ends) != len(messages):
            return None
        return "".join(pieces), watch.ends, self._prompt


def _called(name: str, of: Any) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), [of], [], None, None)


def _loop_and_prompt(parsed: nodes.Template) -> tuple[nodes.For, nodes.Template]:
    """Return a template's last loop, and what it writes then, if it is asked for the generation prompt."""
    at = max((at for at, node in enumerate(parsed.body) if isinstance(node, nodes.For)), default=-1)
    loop, after = parsed.body[at] if at >= 0 else None, parsed.body[at + 1 :]
    names = [*parsed.find_all(nodes.Name)]
    made = {each.name for each in names if each.ctx != "load"}
    made |= {each.name for each in parsed.find_all(nodes.Macro)}
    handed = sum(each.name == "loop" for each in names)  # to a function, such as itself
    handed -= sum(getattr(each.node, "name", "") == "loop" for each in parsed.find_all(nodes.Getattr))
    asks = [each for each in names if each.name == _ASKS]
    if not isinstance(loop, nodes.For) or loop.recursive or loop.else_ or handed or len(asks) != len(after):
        raise ValueError("its last loop is not all that it writes")
    if not after:
        return loop, nodes.Template([], lineno=1)
    [last] = after
    if not isinstance(last, nodes.If) or last.test is not asks[0] or last.elif_ or last.else_:
        raise ValueError("after its last loop it writes more than the generation prompt")
    prompt = nodes.Template(last.body, lineno=1)
    if any(each.name in {*made, "messages"} for each in prompt.find_all(nodes.Name)):
        raise ValueError("the generation prompt depends on the messages")
    return loop, prompt


@dataclass
class _Watch:
    """What a template has looked at of a chat, and how long its text was then."""

    messages: Sequence[Message]
    written: int = 0  # characters
    ends: list[int] = field(default_factory=list)  # of messages, each when the next one was asked for
    ahead: bool = False  # something was looked at too early

    def iterated(self, over: Any) -> Iterator[Message]:
        """Yield what the loop goes over."""
        if not isinstance(over, _Messages) or self.ends:
            yield from self.looked_ahead(over)
            return
        for index in range(over.first, len(self.messages)):
            self._ends(index)
            yield self.messages[index]
        self._ends(len(self.messages))

    def _ends(self, index: int) -> None:
        """Take note that the message before ``index`` ends here."""
        if index:
            self.ahead |= index != len(self.ends) + 1
            self.ends.append(self.written)

    def looked_ahead(self, at: Any) -> Any:
        self.ahead = True
        return at


class _Messages(Sequence[Message]):
    """The messages of a chat from ``first`` on, as a template sees them."""

    def __init__(self, watch: _Watch, first: int = 0) -> None:
        self._watch, self.first = watch, first

    def __getitem__(self, at: Any) -> Any:
        if at == slice(1, None):
            return _Messages(self._watch, self.first + 1)
        if not isinstance(at, int) or not 0 <= at <= len(self._watch.ends) - self.first:
            self._watch.ahead = True
        return self._watch.messages[self.first :][at]

    def __len__(self) -> int:
        self._watch.ahead = True
        return len(self._watch.messages) - self.first

    def __bool__(self) -> bool:
        self._watch.ahead |= self.first > 0
        return len(self._watch.messages) > self.first
