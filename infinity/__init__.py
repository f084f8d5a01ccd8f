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
    from infinity.api.init import Init, close, gathered, layer_schedule, no_sync, resume, state_dict
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

#: Modules of the names; each is imported when it is used first, so that what needs no torch starts at once.
_HOMES = {
    name: f"infinity.{module}"
    for module, names in {
        "api.adamw": "AdamW",
        "api.export": "export",
        "api.init": "Init close gathered layer_schedule no_sync resume state_dict",
        "api.lora": "add_lora save_lora",
        "api.offload_activations": "offload_activations",
        "api.portable": "load_checkpoint save_checkpoint",
        "api.pretrained": "from_pretrained",
        "core.errors": "BudgetError CheckpointError DiskError DivergenceError InfinityError PeerError "
        "RecipeError StateError",
        "recipes.recipe": "Recipe load_recipe",
    }.items()
    for name in names.split()
}

__version__ = version("infinity-offload")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "from_pretrained":
        import_module("infinity.recipes.models.gpt")  # registers the model, which a checkpoint may name
    globals()[name] = value = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
