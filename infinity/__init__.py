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
    from infinity.api.export import export as export
    from infinity.api.export import save_lora as save_lora
    from infinity.api.export import stream_weights as stream_weights
    from infinity.api.init import Init as Init
    from infinity.api.init import close as close
    from infinity.api.init import ema as ema
    from infinity.api.init import from_pretrained as from_pretrained
    from infinity.api.init import gathered as gathered
    from infinity.api.init import layer_schedule as layer_schedule
    from infinity.api.init import no_sync as no_sync
    from infinity.api.init import on_gradient as on_gradient
    from infinity.api.init import quantize as quantize
    from infinity.api.init import resume as resume
    from infinity.api.init import state_dict as state_dict
    from infinity.api.lora import adapter as adapter
    from infinity.api.lora import add_lora as add_lora
    from infinity.api.lora import lora_groups as lora_groups
    from infinity.api.offload_activations import offload_activations as offload_activations
    from infinity.api.optimizer import AdamW as AdamW
    from infinity.api.portable import load_checkpoint as load_checkpoint
    from infinity.api.portable import save_checkpoint as save_checkpoint
    from infinity.core.errors import BudgetError as BudgetError
    from infinity.core.errors import CheckpointError as CheckpointError
    from infinity.core.errors import DiskError as DiskError
    from infinity.core.errors import DivergenceError as DivergenceError
    from infinity.core.errors import InfinityError as InfinityError
    from infinity.core.errors import PeerError as PeerError
    from infinity.core.errors import RecipeError as RecipeError
    from infinity.core.errors import StateError as StateError
    from infinity.engine.sequence import SequenceRanks as SequenceRanks
    from infinity.integrations.accelerate import Accelerator as Accelerator
    from infinity.integrations.lightning import LightningStrategy as LightningStrategy
    from infinity.integrations.trainer import trainer as trainer
    from infinity.recipes.loading import load_recipe as load_recipe
    from infinity.recipes.recipe import Recipe as Recipe

#: Modules of the names; each is imported when it is used first, so that what needs no torch starts at once.
_HOMES = {
    name: f"infinity.{module}"
    for module, names in {
        "integrations.accelerate": "Accelerator",
        "api.optimizer": "AdamW",
        "api.export": "export save_lora stream_weights",
        "api.init": "Init close ema from_pretrained gathered layer_schedule no_sync on_gradient quantize "
        "resume state_dict",
        "api.lora": "adapter add_lora lora_groups",
        "api.offload_activations": "offload_activations",
        "api.portable": "load_checkpoint save_checkpoint",
        "engine.sequence": "SequenceRanks",
        "integrations.lightning": "LightningStrategy",
        "integrations.trainer": "trainer",
        "core.errors": "BudgetError CheckpointError DiskError DivergenceError InfinityError PeerError "
        "RecipeError StateError",
        "recipes.loading": "load_recipe",
        "recipes.recipe": "Recipe",
    }.items()
    for name in names.split()
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
    globals()[name] = value = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
