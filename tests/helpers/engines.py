"""The I/O engines that a machine may lack: a test that asks for one is skipped, another one hides it.

A test asks for libaio by a parameter, and conftest.py skips it where there is none. ``test_engines.py``
beside this file looks for tests that ask in another way: they pass on one machine and fail on the next.
"""

import ast
import functools
import re
import tempfile
from pathlib import Path

import pytest

ASKED = "(^|=)libaio$"


def asks_for_libaio(parameter: object) -> bool:
    """Whether a parameter of a test, or one of several, is the engine's name or ``memory.engine=`` it."""
    if isinstance(parameter, str):
        return re.search(ASKED, parameter) is not None
    return isinstance(parameter, tuple | list) and any(map(asks_for_libaio, parameter))


@functools.cache
def missing_libaio() -> str:
    """Why libaio cannot be used on this machine; empty where it can."""
    from infinity.core.config import SettingError
    from infinity.nvme.engines import make_engine
    from infinity.nvme.volume import Volume

    with tempfile.TemporaryDirectory() as folder:
        volume = Volume([Path(folder, "probe")])
        try:
            make_engine("libaio", volume).close()
        except SettingError as error:
            return str(error)
        finally:
            volume.close()
    return ""


def hide_libaio(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without the system's library."""
    from infinity.nvme.engines import libaio_engine

    def missing() -> None:
        raise OSError("libaio.so.1: cannot open shared object file")

    monkeypatch.setattr(libaio_engine, "load", missing)


def unguarded(tree: ast.AST) -> list[int]:
    """Lines that ask for libaio where nothing skips the test without it: not a parameter, and not hidden."""
    guarded = set()
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        hides = any(getattr(node, "id", "") == hide_libaio.__name__ for node in ast.walk(function))
        for part in [function] if hides else function.decorator_list:
            guarded |= {id(node) for node in ast.walk(part)}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and re.search(ASKED, str(node.value)) and id(node) not in guarded
    ]
