"""infinity: fine-tune models far larger than the memory of the machine.

Three changed lines in a plain PyTorch loop::

    recipe = infinity.load_recipe("recipe.yaml")
    with infinity.Init(recipe):
        model = LlamaForCausalLM(config)
    optimizer = infinity.AdamW(model, lr=1e-5, max_grad_norm=1.0)
"""

import ast
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

#: Modules of the public names, which ``__init__.pyi`` lists for type checkers, too. Each is imported when it
#: is used first, so that what needs no torch starts at once.
_HOMES = {
    name.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module != __name__
    for name in node.names
}

__all__ = sorted(_HOMES)
__version__ = version("infinity-offload")


def __getattr__(name: str) -> Any:
    if name == "optim":
        return import_module("infinity.optim")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "from_pretrained":
        import_module("infinity.recipes.models")  # registers the model, which a checkpoint may name
    globals()[name] = value = getattr(import_module(str(_HOMES[name])), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
