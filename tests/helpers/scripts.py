"""Scripts of ``benchmarks/``, which are no package, for tests of what they write."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from tests.helpers.launch import ROOT


@contextlib.contextmanager
def script(name: str) -> Iterator[Any]:
    """The module ``name``, as ``python benchmarks/name.py`` finds it: beside the modules that it imports."""
    path, before = str(ROOT / "benchmarks"), set(sys.modules)
    sys.path.insert(0, path)
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(path)
        for each in set(sys.modules) - before:
            if str(getattr(sys.modules[each], "__file__", "")).startswith(path):
                del sys.modules[each]
