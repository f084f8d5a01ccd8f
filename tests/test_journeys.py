"""docs/journeys.md is complete: every file that a traced run enters is there, and no journey gets longer."""

import json
import subprocess
import sys

import pytest

from tests.helpers.journeys import BEGINS, PAGE, ROOT, TITLES, files_on
from tests.helpers.limits import HANG_S

#: The most files that each journey may enter. A number here only falls, or its commit says what is worth it.
MOST_FILES = {
    "life": 57,
    "read": 19,
    "gradient": 28,
    "commit": 15,
    "end": 32,
    "resume": 22,
    "activation": 36,
    "plan": 58,
    "train": 75,
}

#: Files that threads enter only at some times, and that a trace may have though the page has not.
SOMETIMES = 2

ON_PAGE = files_on(PAGE.read_text(encoding="utf-8"))


def test_every_file_on_the_way_is_on_the_page() -> None:
    """A process of its own traces the files that each journey enters now."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.helpers.journeys"],
        cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found.keys() == TITLES.keys()
    for name, journey in found.items():
        missing = sorted({file for file, _ in journey} - set(ON_PAGE[name]))[SOMETIMES:]
        gone = [file for file in ON_PAGE[name] if not (ROOT / "infinity" / file).is_file()]
        assert not missing, f"{name}: run python -m tests.helpers.journeys --write"
        assert not gone, f"{name}: run python -m tests.helpers.journeys --write"


@pytest.mark.parametrize("name", TITLES)
def test_no_journey_enters_more_files_than_it_did(name: str) -> None:
    assert len(ON_PAGE[name]) <= MOST_FILES[name]


def test_the_page_is_read_as_it_is_written() -> None:
    page = f"# Journeys\n\n{BEGINS}\n\n## A commit\n\nMeaning.\n\n1. `a/b.py`: Does it. `f`\n2. `c.py`: g\n"
    assert files_on(page) == {"commit": ["a/b.py", "c.py"]}
