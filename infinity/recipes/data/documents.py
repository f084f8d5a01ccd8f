"""Training data on disk: find files, read text, and parse lines of JSONL as records.

The fields of a record decide its kind: ``messages`` (with ``tools``, if present) is a chat, else ``prompt``
and ``completion``, else ``text``. Other fields are ignored.
"""

import json
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from infinity.core.errors import InfinityError
from infinity.core.files import open_regular, user_path
from infinity.core.nbytes import format_nbytes

#: Text is read in whole lines, or whole words of longer ones, about this many characters at a time.
PIECE_CHARS = 1 << 20
#: The longest line of JSONL that is read (bytes).
_MOST_LINE_NBYTES = 1 << 26
#: The role whose messages count in the loss.
ASSISTANT = "assistant"

#: Directories left out of ``stdlib``, so that it is nearly the same on every machine.
_STDLIB_EXCEPT = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
_ENDS = ("\n", "\r")  # of a line

Message = dict[str, Any]


class DataError(InfinityError, ValueError):
    """Raised when training data is missing, malformed or too short."""


class MalformedError(ValueError):
    """Raised when a line cannot be used; the message is the reason, and the caller adds file and line."""


class Text(NamedTuple):
    """Document in which every token counts in the loss."""

    text: str


class Completion(NamedTuple):
    """Prompt and completion; only the completion counts in the loss."""

    prompt: str
    completion: str


class Chat(NamedTuple):
    """Messages with a ``role`` and, usually, a ``content``; the assistant's count in the loss."""

    messages: list[Message]
    tools: list[Any] | None


def find_files(names: Sequence[str], *, key: str = "data.files") -> tuple[Path, ...]:
    """Find the files that ``names`` stand for, each once: in the order of names, sorted within one.

    Names are paths, globs (including ``**``), directories (their .txt and .jsonl files) or ``stdlib``. Errors
    name the recipe's ``key``.
    """
    found: dict[Path, None] = {}
    for name in names:
        path = user_path(name, key)
        try:
            files = [path.resolve() for path in _matches(name, path)]
        except (OSError, ValueError, RuntimeError) as error:  # patterns, links to themselves
            reason = error.strerror if isinstance(error, OSError) else error
            raise DataError(f"{key}: {name!r}: {reason}; give a path, a glob or 'stdlib'") from error
        if not files:
            raise DataError(
                f"{key}: {name!r} matches no file in {Path.cwd()}; give a path, a glob or 'stdlib'"
            )
        found.update(dict.fromkeys(files))
    return tuple(found)


def read_pieces(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield pieces of whole lines of the document ``path``, and whether each is the last.

    A line longer than a piece is cut before a space, or anywhere if it has none.
    """
    lines: list[str] = []
    size = number = 0
    with _readable(path), open(open_regular(path), encoding="utf-8", newline="") as file:
        try:
            while line := file.readline(PIECE_CHARS):
                if size >= PIECE_CHARS:
                    text = "".join(lines)
                    end = len(text) if text.endswith(_ENDS) else max(text.rfind(" "), 0) or len(text)
                    yield text[:end], False
                    lines, size = [text[end:]], len(text) - end
                number += line.endswith(_ENDS)
                lines.append(line)
                size += len(line)
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 text, after line {number}: {error.reason}") from error
    if lines:
        yield "".join(lines), True


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of ``path`` that are not blank, each after its number (from 1)."""
    with _readable(path), open(open_regular(path), "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_MOST_LINE_NBYTES + 1), b""), start=1):
            if len(line) > _MOST_LINE_NBYTES:
                raise DataError(
                    f"{path}:{number}: the line has more than {format_nbytes(_MOST_LINE_NBYTES)}; wanted a "
                    "document per line: cut this one into several"
                )
            if not line.isspace():
                yield number, line


def parse_record(line: bytes) -> Text | Completion | Chat:
    """Parse a line of JSONL; MalformedError: it is no record."""
    try:
        value = json.loads(line.decode())
        if b"\\u" in line:  # an escape may encode half a surrogate pair, which no tokenizer accepts
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise MalformedError(f"not UTF-8 text at byte {error.start}: {error.reason}") from error
    except UnicodeEncodeError as error:
        raise MalformedError("half of a surrogate pair is not text") from error
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise MalformedError(f"wanted an object; got {_name(value)}")
    if "messages" in value:
        return _chat(value["messages"], value.get("tools"))
    names = ("prompt", "completion") if {"prompt", "completion"} <= value.keys() else ("text",)
    for name in names:
        if name not in value:
            fields = f"the fields {', '.join(value)}" if value else "none"
            raise MalformedError(f"wanted 'text', 'prompt' and 'completion', or 'messages'; got {fields}")
        if not isinstance(value[name], str):
            raise MalformedError(f"{name!r}: wanted a string; got {_name(value[name])}")
    return Text(value["text"]) if names == ("text",) else Completion(value["prompt"], value["completion"])


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


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def _matches(name: str, path: Path) -> list[Path]:
    if name == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        found = (each for each in root.rglob("*.py") if not _STDLIB_EXCEPT & {*each.relative_to(root).parts})
        return sorted(found)
    if path.is_dir():
        found = (each for each in path.rglob("*") if each.suffix in (".txt", ".jsonl"))
        return sorted(each for each in found if each.is_file())
    if path.exists():
        return [path]  # a pipe or device is refused when it is opened
    # A directory that is there may have brackets in its name.
    base = next((parent for parent in path.parents if parent.is_dir()), Path(path.anchor))
    return sorted(each for each in base.glob(str(path.relative_to(base))) if each.is_file())
