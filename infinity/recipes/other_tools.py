"""Configuration files of other tools: for each tool rows from its keys to a recipe's, of other_tools.yaml.

The same rows give the hint in an error about an unknown key of a recipe.
"""

import difflib
import functools
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]


class Why(str):
    """Says why a recipe has nothing for a key of a tool."""


class Tool(NamedTuple):
    """Keys that only a tool's files have, its rows (with a :class:`Why` for some), and its defaults."""

    marks: frozenset[str] = frozenset()
    rows: Mapping[str, Any] = {}
    defaults: Mapping[str, Any] = {}


@functools.cache
def table() -> Any:
    """Return what ``other_tools.yaml`` has."""
    return yaml.safe_load(files("infinity.recipes").joinpath("other_tools.yaml").read_text("utf-8"))


@functools.cache
def tools() -> Mapping[str, Tool]:
    """Return the tools of the table by their names."""
    found = {"": Tool()}
    for name, each in table()["tools"].items():
        base = found[each.get("as", "")]
        rows = {**base.rows, **each.get("to", {})}
        for why, keys in each.get("missing", {}).items():
            rows |= dict.fromkeys(keys.split(), Why(why))
        found[name] = Tool(
            frozenset(each.get("marks", ())), rows, {**base.defaults, **each.get("defaults", {})}
        )
    return {name: tool for name, tool in found.items() if tool.marks}


@functools.cache
def known_as() -> Mapping[str, str]:
    """Return the key of a recipe by its name in any tool."""
    rows = [item for tool in tools().values() for item in tool.rows.items() if not isinstance(item[1], Why)]
    keys = {name: [row] if isinstance(row, str) else row for name, row in rows}
    for name, row in rows:  # what one of its values sets
        if isinstance(row, dict):
            keys[name] = [
                key for case in row.values() if isinstance(case, dict) for key in case if "." in key
            ]
    return {name.rpartition(".")[2]: ".".join(each[0].split(".")[:2]) for name, each in keys.items() if each}


def tool_of(given: Mapping[str, Any]) -> str:
    """Return the name of the tool whose configuration this is; empty: of none of them.

    A file has one of a tool's marks; of several tools, it is that of which it has the most keys.
    """
    known = {
        name: sum(key in tool.rows or any(each.startswith(f"{key}.") for each in tool.rows) for key in given)
        for name, tool in tools().items()
        if tool.marks & given.keys()
    }
    return max(known, key=lambda name: known[name], default="")


def near(key: str, known: Sequence[str], sections: Sequence[str]) -> str:
    """Return a question that suggests a key in place of an unknown one; empty: none is near."""
    section, _, name = key.rpartition(".")
    siblings = [other for other in known if other.startswith(f"{section}.")]
    near = (
        [other for other in known if other.endswith(f".{name}")]
        or [other for other in known if other == known_as().get(name or key)]
        or difflib.get_close_matches(key, siblings, n=1, cutoff=0.75)
        or difflib.get_close_matches(key, [] if siblings else [*known, *sections], n=1, cutoff=0.6)
    )
    return f"did you mean {near[0]}?" if near else ""
