"""Which tests ``make test`` runs, so that it takes minutes: all that are short, and some that are not.

What took long when it was measured last is *thorough*: ``make check`` and CI run it, ``make test`` does not.
``tests/thorough.txt`` lists it, so that no test says how fast a machine is. A test marked ``always`` is never
thorough: of each guarantee ``make test`` shows at least one case. Reports of the whole suite make the list::

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

#: A test, or a case of one, that takes longer is thorough (s, as a worker beside others measures it).
SHORT_S = 1.0
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


def long(reports: Iterable[Path], short_s: float = SHORT_S) -> list[str]:
    """Tests whose every case takes longer than ``short_s`` in each report, and longer cases of the others."""
    least_s: dict[str, float] = {}
    for report in reports:
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
            least_s[name] = min(least_s.get(name, float("inf")), float(case.attrib["time"]))
    tests: dict[str, list[str]] = defaultdict(list)
    for name in least_s:
        tests[_test_of(name)].append(name)
    names = []
    for test, cases in tests.items():
        beyond = [name for name in cases if least_s[name] > short_s]
        names += [test] if len(beyond) == len(cases) else beyond
    return sorted(names)


def _test_of(name: str) -> str:
    """The test of which ``name`` is a case."""
    return re.sub(r"\[.*", "", name, flags=re.DOTALL)


if __name__ == "__main__":
    LISTED.write_text("".join(f"{name}\n" for name in long(map(Path, sys.argv[1:]))), encoding="utf-8")
