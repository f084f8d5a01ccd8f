"""infinity: fine-tune models far larger than the memory of the machine.

Three changed lines in a plain PyTorch loop::

    recipe = infinity.load_recipe("recipe.yaml")
    with infinity.Init(recipe):
        model = LlamaForCausalLM(config)
    optimizer = infinity.AdamW(model, lr=1e-5, max_grad_norm=1.0)
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinity.api import Init, close, gathered, no_sync, state_dict
    from infinity.core.errors import (
        BudgetError,
        CheckpointError,
        DiskError,
        DivergenceError,
        InfinityError,
        PeerError,
        RecipeError,
        StateError,
    )
    from infinity.lora import add_lora, save_lora
    from infinity.offloading import offload_activations
    from infinity.optimizer import AdamW
    from infinity.pretrained import from_pretrained
    from infinity.recipe import Recipe, load_recipe
    from infinity.saving import export
    from infinity.scheduling import layer_schedule

#: Where each name lives; it is imported when it is used first, so that what needs no torch starts at once.
_HOMES = {
    "Init": "infinity.api",
    "close": "infinity.api",
    "gathered": "infinity.api",
    "no_sync": "infinity.api",
    "state_dict": "infinity.api",
    "BudgetError": "infinity.core.errors",
    "CheckpointError": "infinity.core.errors",
    "DiskError": "infinity.core.errors",
    "DivergenceError": "infinity.core.errors",
    "InfinityError": "infinity.core.errors",
    "PeerError": "infinity.core.errors",
    "RecipeError": "infinity.core.errors",
    "StateError": "infinity.core.errors",
    "add_lora": "infinity.lora",
    "save_lora": "infinity.lora",
    "offload_activations": "infinity.offloading",
    "AdamW": "infinity.optimizer",
    "from_pretrained": "infinity.pretrained",
    "Recipe": "infinity.recipe",
    "load_recipe": "infinity.recipe",
    "export": "infinity.saving",
    "layer_schedule": "infinity.scheduling",
}

__all__ = [
    "AdamW",
    "BudgetError",
    "CheckpointError",
    "DiskError",
    "DivergenceError",
    "InfinityError",
    "Init",
    "PeerError",
    "Recipe",
    "RecipeError",
    "StateError",
    "add_lora",
    "close",
    "export",
    "from_pretrained",
    "gathered",
    "layer_schedule",
    "load_recipe",
    "no_sync",
    "offload_activations",
    "save_lora",
    "state_dict",
]

__version__ = version("infinity-offload")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
