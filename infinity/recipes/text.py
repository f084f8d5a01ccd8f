"""The text of a recipe: YAML within limits, as plain values and back, and its references."""

from collections.abc import Mapping
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf

from infinity.core.errors import first_line

_MOST_PROBLEM_CHARS = 300


class ProblemError(ValueError):
    """Raised for a wrong key or, if ``key`` is empty, a wrong recipe; ``line`` is as in ``:3``."""

    def __init__(self, problem: object, *, key: str = "", line: str = "") -> None:
        super().__init__(str(problem))
        self.key, self.line = key, line


def parse(text: str) -> Any:
    """Parse YAML into plain values, or raise a ProblemError; ``${...}`` stays."""
    line, problem = "", "nested too deep"
    cause: Exception
    try:
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
