"""Records (dataclasses and named tuples) of what JSON made of them."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

_hints: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)


def record_of(kind: Any, given: Mapping[str, Any]) -> Any:
    """Return a record with those of ``given`` that are its fields; others have their defaults."""
    return kind(**{name: built(hint, given[name]) for name, hint in _hints(kind).items() if name in given})


def built(wanted: Any, given: Any) -> Any:
    """Return ``given`` in the type ``wanted``; a record is its fields by name, all of them, or the first.

    A mapping may be pairs, and a number that is not finite None. Raises ValueError, TypeError or KeyError.
    """
    if type(given) is wanted:
        return given
    kinds, origin = get_args(wanted), get_origin(wanted)
    if origin is UnionType:
        return given if type(given) in kinds else built(kinds[0], given)
    if origin is tuple and kinds[-1] is not ...:
        return tuple(map(built, kinds, given))
    if kinds and issubclass(origin, Mapping):
        pairs = given.items() if isinstance(given, dict) else ((key, value) for *key, value in given)
        return {built(kinds[0], key): built(kinds[1], value) for key, value in pairs}
    if kinds:
        make = origin if origin in (tuple, frozenset) else list
        return make(built(kinds[0], each) for each in given)
    if not is_dataclass(wanted) and not hasattr(wanted, "_fields"):
        return math.nan if wanted is float and given is None else wanted(given)
    hints = _hints(wanted)
    if isinstance(given, list):
        given = dict(zip(hints, given, strict=False))
    elif different := hints.keys() ^ given.keys():
        raise ValueError(f"keys {sorted(different)} are missing or unknown")
    return record_of(wanted, given)
