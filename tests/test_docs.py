"""README and docs: commands and snippets run in a small form, links resolve, the table of keys is current.

Each page runs from top to bottom in a scratch directory. The language of a fenced block decides how it runs:
``bash`` commands, ``python`` snippets (one namespace per page), ``yaml`` recipes and ``json`` records;
``text`` is output. A block after ``<!-- not run: reason -->`` is skipped. ``python tests/test_docs.py``
rewrites the table of docs/recipes.md.
"""

import contextlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from infinity.recipes.loading import load_recipe
from infinity.recipes.recipe import recipe_table
from tests.helpers.limits import HANG_S

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TABLE = "<!-- table: written by `python tests/test_docs.py` from `infinity recipe` -->\n"

#: What makes a documented command or snippet small: a pattern and its replacement.
SMALLER = [
    (r"/mnt/(nvme\d)", r"\1"),
    (r"--steps \d+", "--steps 2"),
    (r"memory\.host=8GiB", "memory.host=64MiB"),
    (r'budget="6GiB"', 'budget="1MiB"'),
    (r"LlamaConfig\(\)", "LlamaConfig(**TINY)"),
    (r"--budget 64MiB", "--budget 8MiB"),
]
#: Overrides for ``infinity train``, after the documented ones.
TRAIN = [
    "train.batch_size=2", "train.eval_batches=1", "train.eval_every=null", "train.threads=1",
    "model.seq_len=32",
]  # fmt: skip
#: Sizes of a new model; a checkpoint has its own.
NEW_MODEL = ["model.n_layers=2", "model.d_model=32", "model.n_heads=2", "data.files=[text.txt]"]
#: A plan for activations is made from the second step on, and measured some steps later.
STEPS = {"memory.activations=plan": 8}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    skipped: str  # the reason, or empty

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text("utf-8")
    pattern = r"(?:^<!-- not run: (?P<reason>.+?) -->\n)?^```(?P<language>\w*)\n(?P<body>.*?)^```$"
    for found in re.finditer(pattern, text, re.M | re.S):
        line = text.count("\n", 0, found.start("language")) + 1
        yield Block(page.name, line, found["language"], found["body"], found["reason"] or "")


class Tiny(nn.Module):
    """The model of snippets that build one of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x.to(block.weight.dtype)).relu()
        return Output(x.square().mean())


class Output(NamedTuple):
    loss: torch.Tensor


TINY_LLAMA = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def namespace_of(page: str) -> dict[str, Any]:
    """The names that a page's snippets use without defining them."""
    ids = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    if page in ("training_loops.md", "activations.md", "interruptions.md", "checkpoints.md"):
        batches: list[dict[str, torch.Tensor]] = [{"x": torch.randn(2, 8)} for _ in range(2)]
    else:
        batches = [{"input_ids": ids, "labels": ids}] * 2
    names: dict[str, Any] = {
        "Model": Tiny, "TINY": TINY_LLAMA, "loader": batches, "micro_batches": batches,
        "dataset": [{name: values[0] for name, values in batches[0].items()}] * 8,
    }  # fmt: skip
    if page == "activations.md":
        import infinity

        names |= {"infinity": infinity, "model": Tiny()}
        names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    return names


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with what the commands name: recipes, examples, a checkpoint, chats and a text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.helpers.tokenizers import write_tokenizer

    for name in ("configs", "examples", "Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY_LLAMA)).save_pretrained(tmp_path / "DIR")
    write_tokenizer(tmp_path / "DIR")
    record = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    for name, count in (("chat", 400), ("code", 8), ("math", 8)):
        (tmp_path / f"{name}.jsonl").write_text(record * count, encoding="utf-8")
    pair = '{"prompt": "a", "chosen": "b", "rejected": "c"}\n'
    (tmp_path / "pairs.jsonl").write_text(pair * 40, encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}]}', encoding="utf-8"
    )
    (tmp_path / "text.txt").write_text("the quick brown fox\n" * 400, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("INFINITY_TRACEBACK", "1")
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


def run_block(block: Block, names: dict[str, Any]) -> None:
    text = block.text
    for pattern, replacement in SMALLER:
        text = re.sub(pattern, replacement, text)
    RUNNERS[block.language](text, names)


def run_python(text: str, names: dict[str, Any]) -> None:
    exec(compile(text, "<snippet>", "exec"), names)


def run_yaml(text: str, names: dict[str, Any]) -> None:
    Path("recipe.yaml").write_text(text, encoding="utf-8")
    load_recipe("recipe.yaml")


def run_json(text: str, names: dict[str, Any]) -> None:
    from infinity.data.formats import FORMATS, Reading

    for line in text.splitlines():
        Reading(tuple(FORMATS)).standard(line.encode())


def run_bash(text: str, names: dict[str, Any]) -> None:
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if words:
            COMMANDS[words[0]](words)


def run_infinity(words: list[str]) -> None:
    """In this process: importing torch anew for every command would take most of the time."""
    from infinity.cli import main

    words = words[1:]
    assert main(small_train(words) if words[0] == "train" else words) == 0


def small_train(words: list[str]) -> list[str]:
    is_new = not any(word.startswith("model.path=") for word in words)
    steps = max([2, *(steps for word, steps in STEPS.items() if word in words)])
    watched = ["train.eval_every=1"] if any("keep_best" in word for word in words) else []
    return [*words, *TRAIN, *watched, f"train.steps={steps}", *(NEW_MODEL if is_new else [])]


def run_torchrun(words: list[str]) -> None:
    at = words.index("infinity") + 1 if "infinity" in words else len(words)
    words = words[:at] + (small_train(words[at:]) if at < len(words) else [])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words[1:]]
    subprocess.run(command, check=True, timeout=HANG_S, env={**os.environ, "OMP_NUM_THREADS": "1"})


def run_script(words: list[str]) -> None:
    subprocess.run([sys.executable, *words[1:]], check=True, timeout=HANG_S)


def run_make(words: list[str]) -> None:
    """Only check that the targets exist: they install packages, or run the suite that this is a part of."""
    subprocess.run(["make", "-n", *words[1:]], check=True, stdout=subprocess.DEVNULL)


def run_pip(words: list[str]) -> None:
    """Only check that the extras exist: installing needs a network."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert words[:3] == ["pip", "install", "-e"], words
    extras = re.findall(r"\w+", words[3].removeprefix("."))
    assert set(extras) <= set(project["optional-dependencies"]), words


RUNNERS: dict[str, Callable[[str, dict[str, Any]], None]] = {
    "bash": run_bash,
    "python": run_python,
    "yaml": run_yaml,
    "json": run_json,
    "text": lambda text, names: None,
}
COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "infinity": run_infinity,
    "torchrun": run_torchrun,
    "python": run_script,
    "make": run_make,
    "pip": run_pip,
}


def check_page(page: Path) -> None:
    names = namespace_of(page.name)
    for block in blocks_of(page):
        if not block.skipped:
            try:
                run_block(block, names)
            except BaseException as error:
                raise AssertionError(f"{block}: {type(error).__name__}: {error}") from error
    for value in names.values():
        if isinstance(value, nn.Module):
            close(value)


def close(model: nn.Module) -> None:
    import infinity
    from infinity.core.errors import StateError

    with contextlib.suppress(StateError):  # a plain model, or one that the snippet closed
        infinity.close(model)


@pytest.mark.parametrize(
    "page", [pytest.param(PAGES[0], marks=pytest.mark.always), *PAGES[1:]], ids=lambda page: page.name
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # dcp.load in one process
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*")  # what Lightning warns itself of
@pytest.mark.filterwarnings("ignore:.*litlogger.*")
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_every_command_and_snippet_of_a_page_runs(page: Path, scratch: Path) -> None:
    check_page(page)


def test_every_block_has_a_language_that_can_be_run() -> None:
    wrong = [str(block) for page in PAGES for block in blocks_of(page) if block.language not in RUNNERS]
    assert wrong == []


def test_a_wrong_command_or_snippet_is_an_error(tmp_path: Path, scratch: Path) -> None:
    page = tmp_path / "page.md"
    wrong = (
        "bash\ninfinity fly\n",
        "bash\ncargo run\n",
        "python\n1 / 0\n",
        "yaml\ntrain: {x: 1}\n",
        "json\n{}\n",
    )
    for text in wrong:
        page.write_text(f"# Page\n\n```{text}```\n", encoding="utf-8")
        with pytest.raises(AssertionError, match=r"^page\.md:3: "):
            check_page(page)
    page.write_text("<!-- not run: no such thing -->\n```bash\ncargo run\n```\n", encoding="utf-8")
    check_page(page)


def test_links_resolve() -> None:
    for page in PAGES:
        text = page.read_text("utf-8")
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            found = (page.parent / path) if path else page
            assert "://" in target or found.exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.+)$", found.read_text("utf-8"), re.M)
                assert anchor in {re.sub(r"[^\w-]", "", h.lower().replace(" ", "-")) for h in headings}, (
                    target
                )


def key_table() -> str:
    rows = ["| key | type and range | default | meaning |", "|---|---|---|---|"]
    for row in recipe_table():
        key, kind, default, meaning = (cell.replace("|", "\\|") for cell in row)
        rows.append(f"| `{key}` | {kind} | `{default}` | {meaning} |")
    return "\n".join(rows) + "\n"


def test_the_table_of_keys_is_that_of_infinity_recipe() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text("utf-8")
    assert text.partition(TABLE)[2].strip() == key_table().strip(), "run: python tests/test_docs.py"


def test_every_public_name_is_in_the_reference() -> None:
    import infinity

    page = (ROOT / "docs" / "training_loops.md").read_text("utf-8")
    reference = page.partition("\n## Reference\n")[2].partition("\n## ")[0]
    names = {name for name in infinity.__all__ if not name.endswith("Error")}
    assert names <= {*re.findall(r"`infinity\.(\w+)", reference)}


def test_the_readme_fits_on_two_screens() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 125


if __name__ == "__main__":
    recipes = ROOT / "docs" / "recipes.md"
    before, marker, _ = recipes.read_text("utf-8").partition(TABLE)
    recipes.write_text(f"{before}{marker}\n{key_table()}", encoding="utf-8")
