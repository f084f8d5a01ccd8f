"""A loop of one's own on the workers of Ray Train, which starts them and makes the process group.

    pip install "ray[train]"
    python examples/ray_train.py --workers 2 --nvme /mnt/nvme0

It learns the sources of Python's own standard library, byte by byte, as examples/plain_loop.py does.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer

import infinity


def train(options: dict[str, Any]) -> None:
    """What each worker runs."""
    from plain_loop import CONFIG, batches  # beside this file
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    recipe = infinity.load_recipe(overrides=[f"memory.nvme=[{options['nvme']}]", "memory.host=64MiB"])
    with infinity.Init(recipe):
        model = LlamaForCausalLM(CONFIG)
    optimizer = infinity.AdamW(model, lr=3e-3, max_grad_norm=1.0)
    for step, batch in enumerate(batches(options["steps"])):
        loss = model(**{key: value.to(model.device) for key, value in batch.items()}).loss
        loss.backward()
        optimizer.step()
        ray.train.report({"step": step, "loss": loss.item()})
        if ray.train.get_context().get_world_rank() == 0 and (step % 5 == 0 or step == options["steps"] - 1):
            print(f"step {step:3}  loss {loss.item():.3f}", flush=True)
    optimizer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--nvme", help="a directory on a drive of each machine; default: a temporary one")
    options = parser.parse_args()
    gpus = torch.accelerator.is_available()
    path = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"  # where workers find plain_loop
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": path}})
    with tempfile.TemporaryDirectory() as scratch:
        TorchTrainer(
            train,
            train_loop_config={"steps": options.steps, "nvme": options.nvme or scratch},
            scaling_config=ray.train.ScalingConfig(num_workers=options.workers, use_gpu=gpus),
            torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if gpus else "gloo"),
            run_config=ray.train.RunConfig(storage_path=scratch),
        ).fit()


if __name__ == "__main__":
    main()
