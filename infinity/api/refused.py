"""Refuses optimizers and wrappers that would write to sharded parameters, or copy them."""

from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from infinity.core.errors import StateError
from infinity.engine.runtime import open_runtimes, served


def is_served(model: nn.Module) -> bool:
    """Whether ``model``, or a model that it wraps, was built under ``infinity.Init``."""
    return any(module in served for module in model.modules())


def _refuse_other_optimizers(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise before an optimizer that is not infinity's writes to a parameter that a unit holds."""
    if not open_runtimes or hasattr(optimizer, "runtime"):
        return
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if any(runtime.units.places(param) for runtime in open_runtimes):
            raise StateError(
                f"{type(optimizer).__name__}.step() on parameters that were made under infinity.Init, whose "
                "gradients and states are sharded: write optimizer = infinity.AdamW(model, lr=...)"
            )


def _refuse_wrappers(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    """Raise before a module that copies or reduces parameters itself writes to those that a unit holds."""
    if (
        type(wrapper).__name__ in ("DistributedDataParallel", "DeepSpeedEngine")
        and module is not None
        and is_served(module)
    ):
        raise StateError(
            f"{type(wrapper).__name__} around a model that was built under infinity.Init, which shards "
            "weights and reduces gradients itself: use the model as it is (with Accelerate, the Trainer or "
            "Lightning as in examples/)"
        )


# Public hooks of torch, for all optimizers and modules: nothing is patched.
register_optimizer_step_pre_hook(_refuse_other_optimizers)
register_module_module_registration_hook(_refuse_wrappers)
