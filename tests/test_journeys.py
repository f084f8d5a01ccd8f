"""docs/journeys.md is true: its functions exist, each is called by one before it, and no journey is long."""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "journeys.md"
#: A step: "3. `partition/mover.py` `UnitMover.start` ...", with "(from ...)" where no step calls it.
STEP = re.compile(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`(.*)$")
MOST_FILES = 8


@dataclass(frozen=True)
class Step:
    """One function of a journey, and the text after its name."""

    file: str
    name: str
    text: str


def journeys(page: str) -> Iterator[tuple[str, list[Step]]]:
    """Every heading with steps below it, and the steps."""
    for section in re.split(r"^## ", page, flags=re.M)[1:]:
        title, _, body = section.partition("\n")
        steps = [Step(*m.groups()) for line in body.splitlines() if (m := STEP.match(line))]
        if steps:
            yield title, steps


@functools.cache
def parsed(file: Path) -> tuple[list[str], list[ast.stmt]]:
    """The lines of a file, and its statements."""
    text = file.read_text()
    return text.split("\n"), ast.parse(text).body


def source_of(step: Step, package: Path) -> str:
    """The source of a step's function.

    Raises:
        LookupError: The file or the function does not exist.
    """
    file = package / step.file
    if not file.is_file():
        raise LookupError(f"{step.file} does not exist")
    lines, body = parsed(file)
    found: ast.AST | None = None
    for part in step.name.split("."):
        defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = next((node for node in body if isinstance(node, defined) and node.name == part), None)
        if found is None:
            raise LookupError(f"{step.file} has no {step.name}")
        body = found.body
    return "\n".join(lines[found.lineno - 1 : found.end_lineno])


def faults(steps: list[Step], package: Path) -> list[str]:
    """What is wrong with a journey, one line each."""
    found, sources = [], list[str]()
    for step in steps:
        try:
            source = source_of(step, package)
        except LookupError as error:
            found.append(str(error))
            continue
        called = step.name.rpartition(".")[2]
        if not step.text.startswith(" (from ") and not any(
            re.search(rf"\b{called}\b", before) for before in sources
        ):
            found.append(f"{step.file} {step.name}: no step before calls it")
        sources.append(source)
    files = {step.file for step in steps}
    if len(files) > MOST_FILES:
        found.append(f"{len(files)} files: {', '.join(sorted(files))}")
    return found


JOURNEYS = dict(journeys(PAGE.read_text()))


@pytest.mark.parametrize("title", JOURNEYS)
def test_a_journey_names_functions_that_call_each_other(title: str) -> None:
    assert faults(JOURNEYS[title], ROOT / "infinity") == []


def test_a_weight_a_gradient_and_a_saved_activation_have_their_journeys() -> None:
    assert {"A weight", "A gradient", "A saved activation"} <= {title.partition(":")[0] for title in JOURNEYS}


def test_a_lost_trail_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "class A:\n    def go(self):\n        return self.on()\n\n    def on(self): ...\n"
    )
    (tmp_path / "b.py").write_text("def end(): ...\n")
    go, on, end = Step("a.py", "A.go", " (from a test)"), Step("a.py", "A.on", ""), Step("b.py", "end", "")
    assert faults([go, on], tmp_path) == []
    assert faults([go, end], tmp_path) == ["b.py end: no step before calls it"]
    assert faults([go, Step("a.py", "A.off", "")], tmp_path) == ["a.py has no A.off"]
    assert faults([Step("c.py", "f", "")], tmp_path) == ["c.py does not exist"]
