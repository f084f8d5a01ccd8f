"""Which of many cases the fast suite runs; the long one runs all of them."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def few(fast: Container[Any], every: Iterable[Any]) -> list[Any]:
    """Parameters of a test, those that are not in ``fast`` marked ``slow``; a tuple is several arguments."""
    return [
        case
        if case in fast
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in every
    ]
