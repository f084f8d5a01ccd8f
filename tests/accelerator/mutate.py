"""Finds each wait and each event of the product in its source, and runs training without one of them.

Imports nothing of infinity: its modules are changed while they are imported, in a process of their own.
"""

import ast
import functools
import importlib.abc
import importlib.machinery
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent / "infinity"

#: Calls that order work on a device, by what is called; any file, or one.
ORDERS = (
    ("", r"(accelerator\.)?(wait_on_stream|wait_on_host|record|synchronize)"),
    ("", r".*\.(record_use|record_last_use|record_event|record_stream|wait_event|wait_stream)"),
    ("", r"(.*\.)?(event|stream)\.(synchronize|query)"),
    ("device/memory.py", r"(buffer|self)\.wait"),
    ("comm/collectives.py", r"work\.wait"),
    ("", r".*\.(wait_for_reads|wait_for_uploads)"),
    ("shards/homes.py", r"buffer\.wait_for_writes"),
)
#: The first defines these functions for all others; the other has a ``record`` of its own.
NOT_IN = ("device/accelerator.py", "predict/repeats.py")
#: Other threads go on for so long before the host waits (s): what they do then, no wait has ordered.
_PAUSE_S = 0.002
#: Of the error if the call was not left out.
UNCHANGED = "was imported as it is, or not at all"


@dataclass(frozen=True, order=True)
class Mutation:
    """A call that is left out: in which file and function, what is called, the how manieth such call."""

    file: str
    function: str
    call: str
    number: int

    def __str__(self) -> str:
        return f"{self.file} {self.function}: {self.call} ({self.number})"


@functools.cache
def mutations(root: Path = ROOT) -> tuple[Mutation, ...]:
    """Every wait and every event of the product."""
    found: list[Mutation] = []
    for path in sorted(root.rglob("*.py")):
        file = str(path.relative_to(root))
        if file not in NOT_IN:
            found += [mutation for mutation, _ in _calls(file, ast.parse(path.read_text(encoding="utf-8")))]
    return tuple(found)


def _calls(file: str, tree: ast.AST) -> Iterator[tuple[Mutation, ast.Call]]:
    counts: dict[tuple[str, str], int] = {}

    def visit(node: ast.AST, function: str) -> Iterator[tuple[Mutation, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            inside = function
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inside = f"{function}.{child.name}" if function else child.name
            if isinstance(child, ast.Call) and _orders(file, child):
                text = ast.unparse(child.func)
                counts[function, text] = number = counts.get((function, text), 0) + 1
                yield Mutation(file, function, text, number), child
            yield from visit(child, inside)

    yield from visit(tree, "")


def _orders(file: str, call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if not name.startswith(("wait", "record", "synchronize", "query")):
        return False  # soon: to unparse every call of the package takes seconds
    text = ast.unparse(call.func)
    return any(where in ("", file) and re.fullmatch(pattern, text) for where, pattern in ORDERS)


def without(source: str, mutation: Mutation) -> ast.Module:
    """The module without that call.

    Raises:
        LookupError: It has no such call.
    """
    tree = ast.parse(source)
    for found, call in _calls(mutation.file, tree):
        if found == mutation:
            result = "True" if found.call.endswith(".query") else "None"
            call.func = ast.parse(f"(lambda *a, **k: {result})", mode="eval").body
            return ast.fix_missing_locations(tree)
    raise LookupError(f"there is no {mutation}")


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads the module of a mutation without the call."""

    mutation: Mutation

    def get_code(self, fullname: str) -> Any:
        return compile(without(Path(self.path).read_text(encoding="utf-8"), self.mutation), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation
        self.name = "infinity." + mutation.file.removesuffix(".py").replace("/", ".")

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if fullname == self.name else None
        if spec is not None:
            loader = _Loader(fullname, str(spec.origin))
            loader.mutation = self._mutation
            spec.loader = loader
        return spec


def play_without(mutation: Mutation | None, name: str, folder: str, schedules: Sequence[Any]) -> list[Any]:
    """On each rank, in a process of its own: train the scenario ``name`` without one call."""
    if mutation is not None:
        if "infinity" in sys.modules:
            raise RuntimeError("infinity was imported before it could be changed")
        sys.meta_path.insert(0, _Finder(mutation))
    from tests.accelerator import device, harness
    from tests.accelerator.scenarios import ALL

    device.simulator.pause_s = _PAUSE_S
    try:
        return harness.play(ALL[name], folder, schedules)
    finally:
        if mutation is not None:
            module = sys.modules.get(sys.meta_path[0].name)
            if not isinstance(getattr(module, "__loader__", None), _Loader):
                raise RuntimeError(f"{mutation.file} {UNCHANGED}")
