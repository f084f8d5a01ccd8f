"""Records of what JSON made of them."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import pytest

from infinity.core.files import built, record_of


class Key(NamedTuple):
    name: str
    at: int


@dataclass(frozen=True)
class Part:
    keys: Mapping[Key, float]
    shapes: Sequence[tuple[str, int, tuple[int, ...]]] = ()
    names: frozenset[str] = frozenset()
    value: int | str | None = None


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    by_name: dict[str, Part]
    first: Part | None = None


PART = Part({Key("a", 1): 2.0}, [("b", 3, (4, 5))], frozenset({"c", "d"}), "text")


def test_a_record_is_what_json_made_of_it() -> None:
    text = json.dumps(
        asdict(Part({}, PART.shapes, frozenset(), None)) | {"names": ["c"], "keys": [["a", 1, 2]]}
    )
    assert built(Part, json.loads(text)) == Part({Key("a", 1): 2.0}, PART.shapes, frozenset({"c"}))
    given = {"keys": [["a", 1, 2]], "shapes": [["b", 3, [4, 5]]], "names": ["d", "c"], "value": "text"}
    whole = {"parts": [given, given], "by_name": {"x": given}, "first": given}
    assert built(Whole, whole) == Whole((PART, PART), {"x": PART}, PART)


def test_fields_in_their_order_may_lack_the_last() -> None:
    assert built(Part, [[], [["b", 3, [4, 5]]]]) == Part({}, PART.shapes)


def test_what_is_no_number_is_null_and_only_a_record_of_fields_may_lack_some() -> None:
    found = record_of(Part, {"keys": [["a", 1, None]], "unknown": 1})
    assert math.isnan(found.keys["a", 1])
    with pytest.raises(ValueError, match=r"\['first'\] are missing or unknown"):
        built(Whole, {"parts": [], "by_name": {}})
