"""What ``make test`` leaves out exists, took long, and is no guarantee."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.helpers import tiers
from tests.helpers.launch import ROOT

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_long" time="{long}" />
<testcase classname="tests.test_a" name="test_cases[one]" time="{long}" />
<testcase classname="tests.test_a" name="test_cases[two]" time="0.5" />
<testcase classname="tests.b.test_c" name="test_all_long[x[0]]" time="{long}" />
<testcase classname="tests.b.test_c" name="test_all_long[y]" time="1.5" />
</testsuite></testsuites>"""


def test_each_name_in_the_list_is_a_test() -> None:
    gone = []
    for name in tiers.listed():
        file, _, test = name.partition("::")
        path, function = ROOT / file, re.sub(r"\[.*", "", test)
        if not path.exists() or not re.search(rf"^def {function}\(", path.read_text("utf-8"), re.MULTILINE):
            gone.append(name)
    assert not gone, "renamed or gone; rename or remove them in tests/thorough.txt, too"


def test_what_took_long_in_every_report_is_thorough(tmp_path: Path) -> None:
    reports = [tmp_path / "busy.xml", tmp_path / "idle.xml"]
    for report, long_s in zip(reports, (9, 2), strict=True):
        report.write_text(REPORT.format(long=long_s))
    names = tiers.long(reports)
    assert names == [
        "tests/b/test_c.py::test_all_long",
        "tests/test_a.py::test_cases[one]",
        "tests/test_a.py::test_long",
    ]
    reports[1].write_text(REPORT.format(long=0.1))
    assert tiers.long(reports) == ["tests/b/test_c.py::test_all_long[y]"]


def test_names_are_of_tests_and_of_cases_and_a_guarantee_is_always_shown() -> None:
    names = ["t.py::test_a", "t.py::test_b[1]", "t.py::test_c"]
    items = [
        Item("t.py::test_a[x]"),
        Item("t.py::test_b[1]"),
        Item("t.py::test_b[2]"),
        Item("t.py::test_c", "always"),
    ]
    tiers.mark_thorough(items, names)  # type: ignore[arg-type]
    assert [item.marks for item in items] == [["thorough"], ["thorough"], [], ["always"]]


class Item(SimpleNamespace):
    """A test, as far as it is looked at."""

    def __init__(self, nodeid: str, *marks: str) -> None:
        super().__init__(nodeid=nodeid, marks=[*marks])

    def get_closest_marker(self, name: str) -> Any:
        return name if name in self.marks else None

    def add_marker(self, mark: Any) -> None:
        self.marks.append(mark.name)
