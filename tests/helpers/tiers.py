"""Which tests ``make test`` runs, so that it takes minutes: of each file the shortest.

The others are *thorough*: ``make check`` and CI run them, too. ``tests/thorough.txt`` lists them by what was
measured, so that no test says how fast a machine is; of a guarantee that is long to show, a case is marked
``always`` and never thorough. Reports of the whole suite make the list::

    pytest -n 3 --dist worksteal --ignore tests/ecosystem --junitxml report.xml
    python -m tests.helpers.tiers report.xml
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

import pytest

#: What the tests of a file may take in ``make test``, a case of each before others (s of a worker).
FILE_S = 3.5
#: What takes no longer is never thorough (s).
SHORT_S = 0.3
LISTED = Path(__file__).parents[1] / "thorough.txt"


def listed(path: Path = LISTED) -> list[str]:
    """Names of tests (all cases of each) and of cases, as pytest prints them."""
    return path.read_text(encoding="utf-8").splitlines()


def mark_thorough(items: Iterable[pytest.Item], names: Iterable[str]) -> None:
    """Mark the tests that are ``names``, or cases of them, but those marked ``always``."""
    thorough = {*names}
    for item in items:
        if item.get_closest_marker("always") is None and thorough & {item.nodeid, _test_of(item.nodeid)}:
            item.add_marker(pytest.mark.thorough)


def long(reports: Iterable[Path]) -> list[str]:
    """What is beyond the limits of its file by the least time in any report: tests, and cases of others."""
    least_s: dict[str, float] = {}
    for report in reports:
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
            least_s[name] = min(least_s.get(name, float("inf")), float(case.attrib["time"]))
    short: set[str] = set()  # tests of which a case is not thorough
    beyond, spent_s = [], defaultdict[str, float](float)
    for name in _shortest_first(least_s):
        file = name.partition("::")[0]
        if least_s[name] <= SHORT_S or spent_s[file] + least_s[name] <= FILE_S:
            spent_s[file] += least_s[name]
            short.add(_test_of(name))
        else:
            beyond.append(name)
    return sorted({name if _test_of(name) in short else _test_of(name) for name in beyond})


def _shortest_first(taken_s: dict[str, float]) -> list[str]:
    """The shortest case of each test, then all others."""
    names = sorted(taken_s, key=lambda name: taken_s[name])
    first = {_test_of(name): name for name in reversed(names)}
    return sorted(names, key=lambda name: first[_test_of(name)] != name)


def _test_of(name: str) -> str:
    """The test of which ``name`` is a case."""
    return re.sub(r"\[.*", "", name, flags=re.DOTALL)


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("wanted: reports of the whole suite, as --junitxml writes them")
    LISTED.write_text("".join(f"{name}\n" for name in long(map(Path, sys.argv[1:]))), encoding="utf-8")
