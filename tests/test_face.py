"""The package's face: every public name is there, the same for type checkers, and free before its use."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import infinity
from tests.helpers.launch import run_ranks


def test_every_public_name_is_what_type_checkers_see() -> None:
    tree = ast.parse(Path(infinity.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: node.module for node in imports for alias in node.names}
    assert set(seen) == {*infinity.__all__, "optim"}
    assert infinity.optim is import_module("infinity.optim")
    del seen["optim"]
    for name, module in seen.items():
        assert getattr(infinity, name) is getattr(import_module(module), name)
    assert set(infinity.__all__) <= set(dir(infinity))


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="'infinity' has no attribute 'Adam'"):
        infinity.Adam  # noqa: B018
    with pytest.raises(ImportError, match="Adam"):
        from infinity import Adam  # noqa: F401


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, infinity, infinity.cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def architectures_after_from_pretrained() -> list[str]:
    assert infinity.from_pretrained
    from infinity.checkpoint.model import ARCHITECTURES

    return list(ARCHITECTURES)


def test_a_checkpoint_of_the_built_in_model_is_known_without_a_recipe() -> None:
    """In a fork, into which nothing has imported the model."""
    assert "GPT" in run_ranks(architectures_after_from_pretrained, 1, group=False)[0]
