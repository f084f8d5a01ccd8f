"""Which of many cases the fast suite runs; the long one runs all of them."""

import os
from collections.abc import Container, Iterable
from typing import Any

import pytest
from hypothesis import settings

#: Set in conftest.py, for ``make slow``.
LONG = os.environ.get("INFINITY_TEST_LONG") == "1"


def few(fast: Container[Any], every: Iterable[Any]) -> list[Any]:
    """Parameters of a test, those that are not in ``fast`` marked ``slow``; a tuple is several arguments."""
    return [
        case
        if case in fast
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in every
    ]


def examples(count: int, **options: Any) -> settings:
    """Settings of a property: ``count`` examples in the long suite, a quarter of them in the fast one."""
    return settings(max_examples=count if LONG else max(count // 4, 6), **options)
