"""What ``make test`` leaves out exists, took long, and is no guarantee."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.helpers import tiers
from tests.helpers.launch import ROOT

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_one" time="2" />
<testcase classname="tests.test_a" name="test_cases[x[0]]" time="1.5" />
<testcase classname="tests.test_a" name="test_cases[y]" time="1" />
<testcase classname="tests.test_a" name="test_cases[z]" time="0.1" />
<testcase classname="tests.test_a" name="test_short" time="0.3" />
<testcase classname="tests.b.test_c" name="test_all_long[x]" time="{long}" />
<testcase classname="tests.b.test_c" name="test_all_long[y]" time="9" />
</testsuite></testsuites>"""


def test_each_name_in_the_list_is_a_test() -> None:
    gone = []
    for name in tiers.listed():
        file, _, test = name.partition("::")
        path, function = ROOT / file, re.sub(r"\[.*", "", test)
        if not path.exists() or not re.search(rf"^def {function}\(", path.read_text("utf-8"), re.MULTILINE):
            gone.append(name)
    assert not gone, "renamed or gone; rename or remove them in tests/thorough.txt, too"


def test_what_is_beyond_the_seconds_of_its_file_in_every_report_is_thorough(tmp_path: Path) -> None:
    reports = [tmp_path / "busy.xml", tmp_path / "idle.xml"]
    for report, long_s in zip(reports, (9, 5), strict=True):
        report.write_text(REPORT.format(long=long_s))
    cases = "tests/test_a.py::test_cases"
    assert tiers.long(reports) == ["tests/b/test_c.py::test_all_long", f"{cases}[x[0]]"]
    reports[1].write_text(REPORT.format(long=1))
    assert tiers.long(reports) == ["tests/b/test_c.py::test_all_long[y]", f"{cases}[x[0]]"]


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
