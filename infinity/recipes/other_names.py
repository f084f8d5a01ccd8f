"""Names that a recipe's keys have in other tools, for errors about unknown keys and other tools' files."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

#: A key of a recipe, by its name elsewhere.
KNOWN_AS = {
    name: key
    for key, names in {
        "model.path": "base_model model_name_or_path model_name pretrained_model_name_or_path",
        "model.seq_len": "sequence_len max_seq_length max_seq_len max_length cutoff_len block_size",
        "data.files": "datasets dataset dataset_path train_file dataset_dir",
        "data.packing": "sample_packing packed",
        "data.eval_fraction": "val_set_size val_size",
        "optim.lr": "learning_rate",
        "optim.schedule": "lr_scheduler lr_scheduler_type",
        "optim.warmup_steps": "num_warmup_steps warmup_ratio",
        "optim.max_grad_norm": "gradient_clipping gradient_clip_val clip_grad_norm",
        "optim.betas": "adam_beta1 adam_beta2",
        "optim.eps": "adam_epsilon",
        "train.steps": "max_steps",
        "train.epochs": "num_train_epochs num_epochs",
        "train.batch_size": "micro_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu",
        "train.accumulate": "gradient_accumulation_steps",
        "train.dtype": "bf16 fp16 torch_dtype mixed_precision precision",
        "train.eval_every": "eval_steps eval_interval",
        "train.log_every": "logging_steps log_interval",
        "checkpoint.every": "save_steps save_interval",
        "checkpoint.keep": "save_total_limit",
        "run.dir": "output_dir out_dir",
        "lora.rank": "lora_r r lora_rank",
        "lora.alpha": "lora_alpha",
        "lora.dropout": "lora_dropout",
        "lora.target_modules": "lora_target_modules lora_target lora_target_linear",
        "memory.activations": "gradient_checkpointing activation_checkpointing",
        "model.stored_as": "load_in_4bit load_in_8bit",
    }.items()
    for name in names.split()
}


def near(key: str, known: Sequence[str], sections: Sequence[str]) -> str:
    """Return a question that suggests a key in place of an unknown one; empty: none is near."""
    section, _, name = key.rpartition(".")
    siblings = [other for other in known if other.startswith(f"{section}.")]
    near = (
        [other for other in known if other.endswith(f".{name}") or other == KNOWN_AS.get(name or key)]
        or difflib.get_close_matches(key, siblings, n=1, cutoff=0.75)
        or difflib.get_close_matches(key, [] if siblings else [*known, *sections], n=1, cutoff=0.6)
    )
    return f"did you mean {near[0]}?" if near else ""


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


def tool_of(given: Mapping[str, Any]) -> str:
    """Return the name of the tool whose configuration this is; empty: of none of them."""
    return next((tool for tool, marks in _MARKS.items() if marks & given.keys()), "")


def translated(given: Mapping[str, Any]) -> str:
    """Say which keys replace those of another tool's configuration."""
    keys_at: dict[str, list[str]] = {}
    for key, place in _PLACES.items():
        section, _, name = key.partition(".")
        inner = given.get(section)
        if section in given and (not name or (isinstance(inner, Mapping) and name in inner)):
            keys_at.setdefault(place, []).append(key)
    return "; ".join(f"{', '.join(keys)} -> {place}" for place, keys in keys_at.items())
