"""The house: imports point down only, as the table of the design says."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "infinity"

#: What each part may import of ours, besides itself. Modules that lie directly in the package
#: (recipe, hooks, runtime, optimizer, train, cli, ...) are the top and may import anything below.
TABLE: dict[str, set[str]] = {
    "core": set(),
    "observe": {"core"},
    "planner": {"core"},
    "simulate": {"core", "planner"},
    "nvme": {"core", "observe"},
    "partition": {"core", "observe"},
    "optim": {"core", "observe"},
    "activation": {"core", "observe"},
    "layers": {"core"},
    "models": {"core"},
    "data": {"core"},
    "prefetch": {"core", "observe", "partition"},
    "checkpoint": {"core", "observe", "partition"},
}

#: Third parties that only these modules (paths below the package) may import.
ONLY_IN = {"omegaconf": {"recipe.py"}}
TORCH_FREE = {"core", "planner", "simulate"}
ONLY_INSIDE_FUNCTIONS = {"kvikio", "cupy"}


@dataclass(frozen=True)
class Import:
    """``file`` imports ``module``, a dotted name; ``lazy`` inside a function or for types only."""

    file: Path
    line: int
    module: str
    lazy: bool
    type_checking: bool


def imports_of(file: Path, root: Path) -> Iterator[Import]:
    """Every import in ``file``, with relative ones made absolute."""
    package = ["infinity", *file.relative_to(root).parent.parts]

    def visit(node: ast.AST, lazy: bool, typing: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(file, child.lineno, alias.name, lazy, typing)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                stem = ".".join([*base, *([child.module] if child.module else [])])
                for alias in child.names:
                    yield Import(file, child.lineno, f"{stem}.{alias.name}", lazy, typing)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from visit(child, True, typing)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from visit(child, lazy, True)
            else:
                yield from visit(child, lazy, typing)

    yield from visit(ast.parse(file.read_text()), False, False)


def part_of(path: Path) -> str:
    """The row of the table: a folder's name, or a top module's."""
    return path.parts[0] if len(path.parts) > 1 else path.stem


def violations(root: Path) -> list[str]:
    """What in the package at ``root`` breaks the table, one line each."""
    found = []
    parts = {p.name for p in root.iterdir() if p.is_dir() and any(p.glob("*.py"))}
    found += [f"{part}/ has no row in the table" for part in sorted(parts - set(TABLE))]
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        for item in imports_of(file, root):
            wrong = judge(relative, item)
            if wrong:
                found.append(f"{relative}:{item.line}: {wrong}")
    found += [f"import cycle: {' -> '.join(cycle)}" for cycle in cycles(root)]
    return found


def judge(relative: Path, item: Import) -> str | None:
    """Why this import is not allowed, or None."""
    part = part_of(relative)
    outer, _, rest = item.module.partition(".")
    if outer != "infinity":
        if outer in ONLY_IN and str(relative) not in ONLY_IN[outer]:
            return f"only {', '.join(ONLY_IN[outer])} may import {outer}"
        if outer == "torch" and part in TORCH_FREE:
            return f"{part} is free of torch"
        if outer in ONLY_INSIDE_FUNCTIONS and not (item.lazy or item.type_checking):
            return f"{outer} is imported inside functions only"
        return None
    target = rest.partition(".")[0]
    if len(relative.parts) == 1 or target == part:
        return None
    if target not in TABLE.get(part, set()):
        allowed = ", ".join(sorted(TABLE.get(part, set()))) or "nothing of ours"
        return f"{part} imports {item.module}; allowed: {allowed}"
    return None


def cycles(root: Path) -> list[list[str]]:
    """Import cycles between modules, counting only imports that run when a module is imported."""
    names = {module_name(file, root): file for file in root.rglob("*.py")}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for name, file in names.items():
        for item in imports_of(file, root):
            if item.lazy or item.type_checking:
                continue
            target = item.module
            while target and target not in names:
                target = target.rpartition(".")[0]
            # A package's own __init__ runs before its modules; that it names them is no cycle.
            if target and target != name and not name.startswith(target + "."):
                graph[name].add(target)
    return _cycles_of(graph)


def module_name(file: Path, root: Path) -> str:
    parts = ["infinity", *file.relative_to(root).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _cycles_of(graph: dict[str, set[str]]) -> list[list[str]]:
    found: list[list[str]] = []
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> None:
        if name in path:
            found.append([*path[path.index(name) :], name])
        elif name not in done:
            for target in sorted(graph[name]):
                walk(target, [*path, name])
            done.add(name)

    for name in sorted(graph):
        walk(name, [])
    return found


def test_imports_point_down_only() -> None:
    assert violations(ROOT) == []


def unsaid_encodings(tree: ast.AST) -> list[int]:
    """Lines where text is read or written in the locale's encoding."""
    lines = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        mode = "".join(str(arg.value) for arg in call.args if isinstance(arg, ast.Constant))
        said = any(keyword.arg == "encoding" for keyword in call.keywords) or "utf-8" in mode
        opens = name == "open" and isinstance(call.func, ast.Name) and "b" not in mode
        opens |= name == "open" and mode in ("r", "w", "a", "x")
        if not said and (opens or name in ("read_text", "write_text")):
            lines.append(call.lineno)
    return lines


def test_text_files_are_utf8_whatever_the_locale() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in sorted(ROOT.rglob("*.py"))
        for line in unsaid_encodings(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("path.read_text()", True), ("path.write_text(text)", True), ("open(path)", True),
        ("open(path, 'w')", True), ("path.open('a')", True), ("path.read_text('utf-8')", False),
        ("path.write_text(text, encoding='utf-8')", False), ("open(path, 'rb')", False),
        ("open(path, encoding='ascii')", False), ("path.open('xb')", False), ("cache.open(frame)", False),
    ],
)  # fmt: skip
def test_a_text_file_without_encoding_is_caught(source: str, wrong: bool) -> None:
    assert bool(unsaid_encodings(ast.parse(source))) is wrong


WRONG = {
    "a leaf that imports its neighbour": ("nvme/a.py", "from infinity.optim import rules\n"),
    "relative imports are seen through": ("nvme/a.py", "from ..partition import unit\n"),
    "a lazy import counts too": ("optim/a.py", "def f():\n    import infinity.nvme\n"),
    "core imports nothing of ours": ("core/a.py", "from infinity.observe import events\n"),
    "nobody below imports the top": ("prefetch/a.py", "from infinity import runtime\n"),
    "the package's face is the top": ("data/a.py", "from infinity import Init\n"),
    "torch in the planner": ("planner/a.py", "import torch\n"),
    "torch in the simulator, lazily": ("simulate/a.py", "def f():\n    from torch import nn\n"),
    "torch in core": ("core/a.py", "import torch.nn as nn\n"),
    "OmegaConf outside recipe": ("runtime.py", "from omegaconf import OmegaConf\n"),
    "kvikio when a module is imported": ("nvme/a.py", "import kvikio\n"),
    "a part that the table lacks": ("gossip/a.py", ""),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_import_is_caught(what: str, tmp_path: Path) -> None:
    name, source = WRONG[what]
    write_tree(tmp_path, {name: source})
    assert violations(tmp_path), what


def test_an_import_cycle_is_caught(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            "optim/a.py": "from infinity.optim.b import x\n",
            "optim/b.py": "from infinity.optim import c\n",
            "optim/c.py": "import infinity.optim.a\n",
        },
    )
    assert [found for found in violations(tmp_path) if found.startswith("import cycle")]


def test_a_tree_that_keeps_the_table_passes(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            "__init__.py": "from infinity.engine.runtime import Init\n",
            "core/__init__.py": "from infinity.core.tier import Tier\n",
            "core/tier.py": "import enum\n",
            "nvme/a.py": "import torch\nfrom infinity.core import Tier\n\ndef f():\n    import kvikio\n",
            "runtime.py": "from infinity.nvme import a\nfrom .recipe import Recipe\n",
            "recipe.py": "from omegaconf import OmegaConf\n",
            "prefetch/a.py": "from infinity.partition.unit import Unit\n",
            "partition/unit.py": "from ..core.tier import Tier\n",
        },
    )
    assert violations(tmp_path) == []


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)
