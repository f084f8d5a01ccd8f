"""Configuration files of DeepSpeed and Accelerate given as a recipe."""

import json

import pytest
import yaml

from infinity import RecipeError, load_recipe

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "/mnt/nvme0"},
        "stage3_prefetch_bucket_size": 1e7,
    },
    "aio": {"block_size": 1048576},
}
ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "fsdp_config": {"fsdp_offload_params": True, "fsdp_sharding_strategy": "FULL_SHARD"},
    "mixed_precision": "bf16",
    "num_processes": 8,
}


@pytest.mark.parametrize(
    ("given", "tool", "places"),
    [
        (DEEPSPEED, "DeepSpeed", [
            "zero_optimization.offload_param -> memory.device, memory.host and memory.nvme",
            "train_micro_batch_size_per_gpu -> train.batch_size", "gradient_clipping -> optim.max_grad_norm",
            "gradient_accumulation_steps -> train.accumulate", "bf16 -> train.dtype=bf16",
            "zero_optimization.stage -> nothing", "aio -> memory.engine",
        ]),
        (ACCELERATE, "Accelerate", [
            "fsdp_config.fsdp_offload_params -> memory.device, memory.host and memory.nvme",
            "mixed_precision -> train.dtype", "num_processes -> torchrun --nproc-per-node",
        ]),
        ({"zero_optimization": 3}, "DeepSpeed", ["zero_optimization -> nothing"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dump", [json.dumps, yaml.safe_dump])
def test_a_configuration_of_another_tool_says_where_a_recipe_has_the_same(
    tmp_path, given, tool, places, dump
):
    path = tmp_path / "config"
    path.write_text(dump(given))
    with pytest.raises(
        RecipeError, match=f"config: this is a configuration of {tool}, not a recipe"
    ) as error:
        load_recipe(path)
    assert all(place in str(error.value) for place in places)
