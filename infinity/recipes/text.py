"""The text of a recipe: YAML within limits, as plain values and back, and its references."""

from collections.abc import Mapping
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf

from infinity.core.config import shown
from infinity.core.errors import first_line

#: What YAML may contain: tags, levels, and values (as often as aliases repeat them).
_KINDS = {"str", "int", "float", "bool", "null", "timestamp", "seq", "map", "merge", "value"}
_MOST_LEVELS, _MOST_VALUES = 16, 100_000
_TOO_DEEP = f"nested deeper than {_MOST_LEVELS} levels"
_MOST_PROBLEM_CHARS = 300


class ProblemError(ValueError):
    """Raised for a wrong key or, if ``key`` is empty, a wrong recipe; ``line`` is as in ``:3``."""

    def __init__(self, problem: object, *, key: str = "", line: str = "") -> None:
        super().__init__(str(problem))
        self.key, self.line = key, line


def parse(text: str) -> Any:
    """Parse YAML into plain values, or raise a ProblemError; ``${...}`` stays."""
    line, problem = "", _TOO_DEEP
    cause: Exception
    try:
        _check_nodes(yaml.compose(text, Loader=yaml.SafeLoader))
        parsed = OmegaConf.from_dotlist([f"value={text}"])
        return OmegaConf.to_container(parsed, resolve=False)["value"]  # type: ignore[call-overload, index]
    except yaml.YAMLError as error:
        mark, cause = getattr(error, "problem_mark", None), error
        problem, line = str(getattr(error, "problem", None) or error), f":{mark.line + 1}" if mark else ""
    except RecursionError as error:
        cause = error
    except Exception as error:  # parsers raise many types: ValueError of numbers and dates, those of ${
        key = str(getattr(error, "full_key", None) or "").removeprefix("value").removeprefix(".")
        problem, cause = f"{key}: {first_line(error)}" if key else first_line(error), error
    raise ProblemError(problem[:_MOST_PROBLEM_CHARS], line=line) from cause


def _check_nodes(root: Any) -> None:
    """Refuse YAML with more than a recipe may have; aliases count as often as they are used."""
    left, count = [] if root is None else [(root, 0)], 0
    while left:
        (node, level), count = left.pop(), count + 1
        kind, problem = _tag(node), ""
        if level > _MOST_LEVELS:
            problem = _TOO_DEEP
        elif count > _MOST_VALUES:
            problem = f"more than {_MOST_VALUES} values"
        elif kind not in _KINDS:
            problem = f"wanted text, numbers, true, false, null, lists and keys; got {kind[:50]}"
        elif isinstance(node, yaml.SequenceNode):
            left += [(item, level + 1) for item in node.value]
        elif isinstance(node, yaml.MappingNode):
            left += [(value, level + 1) for _, value in node.value]
            wrong = next((key for key, _ in node.value if _tag(key) not in ("str", "merge")), None)
            if wrong is not None:
                got = shown(wrong.value) if isinstance(wrong, yaml.ScalarNode) else "a list, or keys"
                node, problem = wrong, f"wanted the name of a key; got {got}"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _tag(node: Any) -> str:
    return str(node.tag).removeprefix("tag:yaml.org,2002:")


def resolved(given: Mapping[str, Any]) -> Any:
    """Return values with references such as ``${train.steps}`` and ``${oc.env:HOME}`` resolved."""
    try:
        return OmegaConf.to_container(OmegaConf.create(dict(given)), resolve=True)
    except Exception as error:  # a reference may name a resolver, which may raise any type
        key = getattr(error, "full_key", None)
        raise ProblemError(first_line(error)[:_MOST_PROBLEM_CHARS], key=str(key or "")) from error


def written(given: Mapping[str, Any]) -> str:
    """Return values as YAML, which :func:`parse` reads back."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(given)))
