"""Configuration files of other tools that are given as a recipe: where a recipe says the same."""

from collections.abc import Mapping
from typing import Any

#: Top-level keys that only this tool has.
_MARKS = {
    "Accelerate": {"compute_environment", "distributed_type", "fsdp_config", "mixed_precision"},
    "DeepSpeed": {
        "zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping",
        "bf16", "fp16", "aio", "activation_checkpointing", "wall_clock_breakdown",
    },
}  # fmt: skip
_BUDGETS = "memory.device, memory.host and memory.nvme (budgets; sizes of buffers follow from them)"
_ALWAYS = "nothing (weights, gradients and states are always sharded)"
_SAME = "nothing (derived from the budgets and the model)"
#: What a recipe says in place of each key.
_PLACES = {
    "zero_optimization.stage": _ALWAYS,
    "zero_optimization.offload_param": _BUDGETS,
    "zero_optimization.offload_optimizer": _BUDGETS,
    "zero_optimization": _SAME,
    "aio": "memory.engine",
    "train_micro_batch_size_per_gpu": "train.batch_size",
    "train_batch_size": "train.batch_size (x train.accumulate x ranks)",
    "gradient_accumulation_steps": "train.accumulate",
    "gradient_clipping": "optim.max_grad_norm",
    "bf16": "train.dtype=bf16",
    "fp16": "train.dtype=fp16 and optim.loss_scale",
    "mixed_precision": "train.dtype",
    "optimizer": "optim.lr, optim.betas, optim.eps and optim.weight_decay",
    "scheduler": "optim.schedule and optim.warmup_steps",
    "activation_checkpointing": "memory.activations=recompute",
    "steps_per_print": "train.log_every",
    "wall_clock_breakdown": "observe.timeline",
    "tensorboard": "observe.tensorboard",
    "deepspeed_config": _BUDGETS,
    "fsdp_config.fsdp_offload_params": _BUDGETS,
    "fsdp_config.fsdp_cpu_ram_efficient_loading": "nothing (checkpoints are always streamed)",
    "fsdp_config.fsdp_activation_checkpointing": "memory.activations=recompute",
    "fsdp_config": _ALWAYS,
    "num_processes": "torchrun --nproc-per-node",
    "num_machines": "torchrun --nnodes",
}


def translate(given: Mapping[str, Any]) -> str | None:
    """Say where a recipe has what ``given``, a configuration of another tool, says; None if of none known."""
    tool = next((tool for tool, marks in _MARKS.items() if marks & given.keys()), None)
    if tool is None:
        return None
    keys_at: dict[str, list[str]] = {}
    for key, place in _PLACES.items():
        section, _, name = key.partition(".")
        inner = given.get(section)
        if section in given and (not name or (isinstance(inner, Mapping) and name in inner)):
            keys_at.setdefault(place, []).append(key)
    places = "; ".join(f"{', '.join(keys)} -> {place}" for place, keys in keys_at.items())
    return f"this is a configuration of {tool}, not a recipe, which says it so: {places}"
