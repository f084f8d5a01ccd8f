"""infinity: fine-tune models far larger than the memory of the machine.

Three changed lines in a plain PyTorch loop::

    recipe = infinity.load_recipe("recipe.yaml")
    with infinity.Init(recipe):
        model = LlamaForCausalLM(config)
    optimizer = infinity.AdamW(model, lr=1e-5, max_grad_norm=1.0)
"""

from importlib.metadata import version

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
