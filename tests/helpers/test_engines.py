"""A test that asks for an engine that a machine may lack is skipped there, and none asks past that."""

import ast
from pathlib import Path

import pytest

from tests.helpers import engines, forks

TESTS = Path(__file__).parents[1]
#: They make the machine that lacks it, or import it where it is.
EXEMPT = {Path(engines.__file__), Path(forks.__file__), Path(__file__)}
EXEMPT |= {TESTS / name for name in ("bare.py", "test_architecture.py")}


def test_no_test_asks_for_libaio_but_by_a_parameter() -> None:
    sources = {file: file.read_text(encoding="utf-8") for file in sorted({*TESTS.rglob("*.py")} - EXEMPT)}
    found = [
        f"{file.relative_to(TESTS)}:{line}"
        for file, source in sources.items()
        if "libaio" in source  # to parse and walk all files takes many seconds
        for line in engines.unguarded(ast.parse(source))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("def test_a(): make_engine('libaio')", True),
        ("PLACE = ['memory.engine=libaio']", True),
        ("@parametrize('engine', ['libaio'])\ndef test_a(engine): make_engine(engine)", False),
        ("@fixture(params=few(['memory.engine=libaio'], []))\ndef place(): ...", False),
        ("def test_a(monkeypatch):\n hide_libaio(monkeypatch)\n make_engine('libaio')", False),
        ("raise OSError('no libaio')", False),
    ],
)
def test_a_test_that_asks_for_it_otherwise_is_caught(source: str, wrong: bool) -> None:
    assert bool(engines.unguarded(ast.parse(source))) is wrong


def test_a_parameter_asks_for_it_by_name_or_as_a_setting() -> None:
    asks = ["libaio", ("memory.engine=libaio", 3), [("threads", "libaio")]]
    assert [engines.asks_for_libaio(each) for each in asks] == [True] * 3
    assert not any(map(engines.asks_for_libaio, ["pip install libaio", "threads", None, ()]))
