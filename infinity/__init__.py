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
    from infinity.api.adamw import AdamW
    from infinity.api.export import export
    from infinity.api.init import Init, close, gathered, no_sync, resume, state_dict
    from infinity.api.layer_schedule import layer_schedule
    from infinity.api.lora import add_lora, save_lora
    from infinity.api.offload_activations import offload_activations
    from infinity.api.portable import load_checkpoint, save_checkpoint
    from infinity.api.pretrained import from_pretrained
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
    from infinity.recipes.recipe import Recipe, load_recipe

#: Where each name lives; it is imported when it is used first, so that what needs no torch starts at once.
_HOMES = {
    "Init": "infinity.api.init",
    "close": "infinity.api.init",
    "gathered": "infinity.api.init",
    "no_sync": "infinity.api.init",
    "state_dict": "infinity.api.init",
    "BudgetError": "infinity.core.errors",
    "CheckpointError": "infinity.core.errors",
    "DiskError": "infinity.core.errors",
    "DivergenceError": "infinity.core.errors",
    "InfinityError": "infinity.core.errors",
    "PeerError": "infinity.core.errors",
    "RecipeError": "infinity.core.errors",
    "StateError": "infinity.core.errors",
    "add_lora": "infinity.api.lora",
    "save_lora": "infinity.api.lora",
    "offload_activations": "infinity.api.offload_activations",
    "load_checkpoint": "infinity.api.portable",
    "save_checkpoint": "infinity.api.portable",
    "AdamW": "infinity.api.adamw",
    "from_pretrained": "infinity.api.pretrained",
    "Recipe": "infinity.recipes.recipe",
    "load_recipe": "infinity.recipes.recipe",
    "export": "infinity.api.export",
    "layer_schedule": "infinity.api.layer_schedule",
    "resume": "infinity.api.init",
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
    "load_checkpoint",
    "load_recipe",
    "no_sync",
    "offload_activations",
    "resume",
    "save_checkpoint",
    "save_lora",
    "state_dict",
]

__version__ = version("infinity-offload")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "from_pretrained":
        import_module(
            "infinity.recipes.models.gpt"
        )  # registers the built-in model, which a checkpoint may name
    globals()[name] = value = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
