"""The house: imports point down only, floor by floor, and never in a circle."""

import ast
import functools
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "infinity"

#: The rooms, from the top floor to the ground. A module imports its own room and lower floors only; rooms on
#: one floor do not import each other. Imports for types and inside functions count, too.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"app"}),
    frozenset({"predict"}),
    frozenset({"recipes", "integrations"}),
    frozenset({"api"}),
    frozenset({"engine", "data"}),
    frozenset({"checkpoint", "shards"}),
    frozenset({"activations", "partition"}),
    frozenset({"planner", "optim", "nvme", "comm"}),
    frozenset({"device", "observe"}),
    frozenset({"core"}),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

#: Modules that may lie beside the rooms; they may import any of them.
TOP = {"__init__.py", "__main__.py", "cli.py"}

#: Third parties that only these modules (paths below the package) may import.
ONLY_IN = {"omegaconf": {"recipes/text.py"}}
TORCH_FREE = {"core", "planner"}
ONLY_INSIDE_FUNCTIONS = {"kvikio", "cupy"}
#: Chosen for the product by those who asked for it: they may not leave, however few lines would do without.
CHOSEN = {"kvikio", "libaio", "numba", "omegaconf", "safetensors"}


@dataclass(frozen=True)
class Import:
    """``file`` imports ``module``, a dotted name; ``lazy`` inside a function or for types only."""

    file: Path
    line: int
    module: str
    lazy: bool
    type_checking: bool


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def imports_of(file: Path, root: Path) -> tuple[Import, ...]:
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
            elif isinstance(child, ast.If) and any(
                "TYPE_CHECKING" in (getattr(each, "id", ""), getattr(each, "attr", ""))
                for each in ast.walk(child.test)
            ):
                yield from visit(child, lazy, True)
            else:
                yield from visit(child, lazy, typing)

    return tuple(visit(parsed(file), False, False))


def violations(root: Path) -> list[str]:
    """What in the package at ``root`` breaks the rule, one line each."""
    found = []
    rooms = {p.name for p in root.iterdir() if p.is_dir() and any(p.glob("*.py"))}
    found += [f"{room}/ is on no floor" for room in sorted(rooms - set(FLOOR_OF))]
    found += [f"{file.name} lies in no room" for file in sorted(root.glob("*.py")) if file.name not in TOP]
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
    room = relative.parts[0]
    outer, _, rest = item.module.partition(".")
    if outer != "infinity":
        if outer in ONLY_IN and str(relative) not in ONLY_IN[outer]:
            return f"only {', '.join(ONLY_IN[outer])} may import {outer}"
        if outer == "torch" and room in TORCH_FREE:
            return f"{room} is free of torch"
        if outer in ONLY_INSIDE_FUNCTIONS and not (item.lazy or item.type_checking):
            return f"{outer} is imported inside functions only"
        return None
    target = rest.partition(".")[0]
    if len(relative.parts) == 1 or target == room or (room == "app" and target not in FLOOR_OF):
        return None  # programs use the public names, as any script does
    if FLOOR_OF.get(target, -1) <= FLOOR_OF.get(room, -1):
        return f"{room} imports {item.module}, which is not on a lower floor"
    return None


def cycles(root: Path) -> list[list[str]]:
    """Import cycles between modules; imports for types and inside functions count."""
    names = {module_name(file, root): file for file in root.rglob("*.py")}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for name, file in names.items():
        for item in imports_of(file, root):
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


def test_what_was_chosen_for_the_product_stays() -> None:
    imported = {item.module.split(".")[0] for file in ROOT.rglob("*.py") for item in imports_of(file, ROOT)}
    assert imported >= CHOSEN, f"{CHOSEN - imported}: put back what reached them"


def test_imports_point_down_only() -> None:
    assert violations(ROOT) == []


#: Where a kind of accelerator may be named.
KNOW_ACCELERATORS = ("device/", "nvme/engines/gds_engine.py")
#: A model's own parameters are made where the user says (``with torch.device``).
MAKE_PARAMETERS = ("recipes/models.py",)
FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand",
    "randn", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
KINDS = {"cuda", "xpu", "mps", "hpu"}


def named_accelerators(tree: ast.AST) -> list[int]:
    """Lines that are about one kind of accelerator: ``torch.cuda``, ``x.is_cuda``, ``d.type == "cuda"``."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
            if (of_torch and node.attr in KINDS) or node.attr in {f"is_{kind}" for kind in KINDS}:
                lines.append(node.lineno)
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            items = [item for side in sides for item in getattr(side, "elts", [side])]
            if any(getattr(side, "attr", "") == "type" for side in sides) and any(
                getattr(item, "value", None) in KINDS for item in items
            ):
                lines.append(node.lineno)
    return lines


def factories_without_device(tree: ast.AST) -> list[int]:
    """Lines that make a tensor on whatever device ``with torch.device(...)`` around them says."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in FACTORIES) == ("torch", True)
        and not any(keyword.arg == "device" for keyword in node.keywords)
    ]


def found_by(find: Callable[[ast.AST], Sequence[object]], exempt: tuple[str, ...] = ()) -> list[str]:
    """What ``find`` returns for each file of the package but those whose names begin with ``exempt``."""
    files = [(file, str(file.relative_to(ROOT))) for file in sorted(ROOT.rglob("*.py"))]
    return [
        f"{name}: {what}"
        for file, name in files
        if not exempt or not name.startswith(exempt)
        for what in find(parsed(file))
    ]


@pytest.mark.parametrize(
    ("find", "exempt"),
    [(named_accelerators, KNOW_ACCELERATORS), (factories_without_device, MAKE_PARAMETERS)],
)
def test_one_room_knows_accelerators_and_every_tensor_is_made_where_it_belongs(
    find: Callable[[ast.AST], list[int]], exempt: tuple[str, ...]
) -> None:
    assert found_by(find, exempt) == []


@pytest.mark.parametrize(
    ("find", "source", "wrong"),
    [
        (named_accelerators, "torch.cuda.synchronize()", True),
        (named_accelerators, "if tensor.device.type in ('cpu', 'cuda'): ...", True),
        (named_accelerators, "if 'xpu' == device.type: ...", True),
        (named_accelerators, "tensor.is_cuda", True),
        (named_accelerators, "if device.type == 'cpu': ...", False),
        (factories_without_device, "torch.empty(3)", True),
        (factories_without_device, "torch.empty(3, device=device)", False),
        (factories_without_device, "torch.from_numpy(a)", False),
    ],
)  # fmt: skip
def test_a_named_accelerator_and_a_tensor_without_device_are_caught(
    find: Callable[[ast.AST], list[int]], source: str, wrong: bool
) -> None:
    assert bool(find(ast.parse(source))) is wrong


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
    assert found_by(unsaid_encodings) == []


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


#: The most lines of each room. A number rises only in a commit whose body says what left instead.
ROOM_BUDGETS = {
    "": 615,
    "activations": 3354,
    "api": 4344,
    "app": 2793,
    "checkpoint": 4161,
    "comm": 2014,
    "core": 2307,
    "data": 2722,
    "device": 1306,
    "engine": 5477,
    "integrations": 785,
    "nvme": 1213,
    "observe": 978,
    "optim": 2907,
    "partition": 3155,
    "planner": 2738,
    "predict": 5262,
    "recipes": 1623,
    "shards": 5165,
}


def room_lines(root: Path) -> dict[str, int]:
    """Return the lines of each room; those beside the rooms under an empty name."""
    found: dict[str, int] = {}
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        room = parts[0] if len(parts) > 1 else ""
        found[room] = found.get(room, 0) + len(file.read_text(encoding="utf-8").splitlines())
    return found


def test_a_room_keeps_its_budget_of_lines() -> None:
    lines = room_lines(ROOT)
    assert {room: n for room, n in lines.items() if n > ROOM_BUDGETS.get(room, 0)} == {}


def test_the_lines_of_a_room_are_counted(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a/b.py": "x = 1\ny = 2\n", "a/c/d.py": "z = 3\n", "e.py": "\n"})
    assert room_lines(tmp_path) == {"a": 3, "": 1}


MOST_LINES_OF_A_FILE = 650
MOST_LINES_OF_A_FUNCTION = 60
#: With more a class usually lacks a noun. Frozen dataclasses are records and may have any number.
MANY_ATTRIBUTES = 12

#: What is beyond these limits, by name, and how far it may go: each number only falls, and no name is added.
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}
LARGE_CLASSES: dict[str, int] = {
    "engine/executor.py StepExecutor": 15,
    "engine/hooks.py Hooks": 14,
    "engine/runtime.py Runtime": 16,
    "partition/init_context.py Construction": 13,
    "partition/unit.py Unit": 15,
    "predict/play.py _Player": 15,
    "shards/storage.py Storage": 16,
    "shards/updates.py Updates": 13,
}


def attributes_of(cls: ast.ClassDef) -> set[str]:
    """Attributes of an instance: what methods assign to ``self``, and the fields of a dataclass."""
    found = set()
    if any("dataclass" in ast.unparse(decorator) for decorator in cls.decorator_list):
        fields = (node for node in cls.body if isinstance(node, ast.AnnAssign))
        found = {ast.unparse(node.target) for node in fields if "ClassVar" not in ast.unparse(node)}
    for method in (node for node in cls.body if isinstance(node, ast.FunctionDef) and node.args.args):
        used = (node for node in ast.walk(method) if isinstance(node, ast.Attribute))
        mine = (node for node in used if getattr(node.value, "id", "") == method.args.args[0].arg)
        found |= {node.attr for node in mine if isinstance(node.ctx, ast.Store)}
    return found


def lengths(tree: ast.Module) -> dict[str, int]:
    """Return the lines of each function by its name, with its class's."""
    found: dict[str, int] = {}

    def visit(node: ast.AST, above: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{above}{child.name}"
                if not isinstance(child, ast.ClassDef):
                    found[name] = (child.end_lineno or child.lineno) - child.lineno + 1
                visit(child, f"{name}.")
            else:
                visit(child, above)

    visit(tree, "")
    return found


def attribute_counts(tree: ast.Module) -> dict[str, int]:
    """Return the attributes of each class that is no frozen record."""
    return {
        node.name: len(attributes_of(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and not any("frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


def beyond(measure: Callable[[ast.Module], dict[str, int]], most: int) -> dict[str, int]:
    """Return what in the package is measured to be more than ``most``, as ``file name``."""
    return {
        f"{file.relative_to(ROOT)} {name}".rstrip(): number
        for file in sorted(ROOT.rglob("*.py"))
        for name, number in measure(parsed(file)).items()
        if number > most
    }


LIMITS = {
    "files": (
        lambda tree: {"": max((each.end_lineno or 0 for each in tree.body), default=0)},
        MOST_LINES_OF_A_FILE,
        LONG_FILES,
    ),
    "functions": (lengths, MOST_LINES_OF_A_FUNCTION, LONG_FUNCTIONS),
    "classes": (attribute_counts, MANY_ATTRIBUTES, LARGE_CLASSES),
}


@pytest.mark.parametrize("kind", LIMITS)
def test_what_is_beyond_a_limit_is_on_the_list_that_only_shrinks(kind: str) -> None:
    measure, most, listed = LIMITS[kind]
    assert {name: n for name, n in beyond(measure, most).items() if n > listed.get(name, most)} == {}


def test_lengths_and_attributes_are_measured() -> None:
    names = ", ".join(f"self.a{number}" for number in range(13))
    record = "@dataclass(frozen=True)\nclass B:\n" + "".join(f"    b{number}: int\n" for number in range(13))
    tree = ast.parse(f"class A:\n    def __init__(self, x):\n        {names} = x\n\n\n{record}")
    assert attribute_counts(tree) == {"A": 13}
    assert lengths(tree) == {"A.__init__": 2}


WRONG = {
    "a neighbour on the same floor": ("nvme/a.py", "from infinity.optim import rules\n"),
    "a higher floor": ("partition/a.py", "from infinity.engine import hooks\n"),
    "relative imports are seen through": ("nvme/a.py", "from ..partition import unit\n"),
    "a lazy import counts too": ("optim/a.py", "def f():\n    import infinity.shards\n"),
    "an import for types counts too": (
        "shards/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from infinity.engine import a\n",
    ),
    "core imports nothing of ours": ("core/a.py", "from infinity.observe import events\n"),
    "the library never imports a program": ("api/a.py", "from infinity.app import recipe\n"),
    "the package's public names are the top": ("api/a.py", "from infinity import Init\n"),
    "torch in the planner": ("planner/a.py", "import torch\n"),
    "torch in the planner, lazily": ("planner/a.py", "def f():\n    from torch import nn\n"),
    "torch in core": ("core/a.py", "import torch.nn as nn\n"),
    "OmegaConf outside recipes": ("engine/a.py", "from omegaconf import OmegaConf\n"),
    "kvikio when a module is imported": ("nvme/a.py", "import kvikio\n"),
    "a room that is on no floor": ("gossip/a.py", ""),
    "a module in no room": ("glue.py", ""),
}  # fmt: skip


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


def test_a_tree_that_keeps_the_rule_passes(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            "__init__.py": "from infinity.api.init import Init\n",
            "core/__init__.py": "from infinity.core.lifecycle import Tier\n",
            "core/lifecycle.py": "import enum\n",
            "nvme/a.py": "import torch\nfrom infinity.core import Tier\n\ndef f():\n    import kvikio\n",
            "api/init.py": "from infinity.nvme import a\nfrom ..partition.unit import Unit\n",
            "recipes/text.py": "from omegaconf import OmegaConf\n",
            "app/train.py": "import infinity\nfrom .recipe import Recipe\n",
            "partition/unit.py": "from ..core.lifecycle import Tier\n",
        },
    )
    assert violations(tmp_path) == []


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)


#: A note that is referred to, and one that begins a line: there it stands.
_NOTE, _NOTE_BEGINS = re.compile(r"\[Note: ([^\]]+)\]"), re.compile(r"^\W*\[Note: ([^\]]+)\]", re.MULTILINE)


def unwritten(source: str, notes: frozenset[str]) -> list[str]:
    return sorted(set(_NOTE.findall(source)) - notes)


def test_every_note_that_is_referred_to_is_written() -> None:
    sources = [path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))]
    notes = frozenset(name for source in sources for name in _NOTE_BEGINS.findall(source))
    assert len(notes) > 100
    assert [name for source in sources for name in unwritten(source, notes)] == []
    assert unwritten("see [Note: not here].", notes) == ["not here"]


#: The commit since which subjects are short.
SINCE, MOST_OF_A_SUBJECT = "ec88544", 72


def test_a_commit_says_what_in_one_line_of_72_characters() -> None:
    command = ["git", "-C", str(ROOT.parent), "log", "--no-merges", "--format=%h %s", f"{SINCE}..HEAD"]
    git = (
        subprocess.run(command, capture_output=True, text=True, check=False) if shutil.which("git") else None
    )
    if git is None or git.returncode:
        pytest.skip("no history of commits is here")
    subjects = [line.partition(" ")[2] for line in git.stdout.splitlines()]
    assert [subject for subject in subjects if len(subject) > MOST_OF_A_SUBJECT] == []
