"""Lightning on a model that infinity holds, with gradient accumulation.

    python examples/lightning_loop.py
    torchrun --nproc-per-node 2 examples/lightning_loop.py --nvme /mnt/nvme0 --name mine

It learns the sources of Python's own standard library, byte by byte. With a name it goes on after an
interruption, when it is started again.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

import infinity

CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4
)  # its tokens are bytes


def stretches(count: int, length: int = 128) -> list[dict[str, torch.Tensor]]:
    """Random stretches of the standard library, the same on every rank."""
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    starts = torch.randint(len(text) - length, (count,), generator=torch.Generator().manual_seed(0))
    rows = [data[start : start + length].long() for start in starts.tolist()]
    return [{"input_ids": row, "labels": row} for row in rows]


class Learner(lightning.LightningModule):
    """A Llama that infinity holds, and its optimizer; ``done`` are the steps before an interruption."""

    def __init__(self, recipe: infinity.Recipe, steps: int) -> None:
        super().__init__()
        with infinity.Init(recipe):
            self.model = LlamaForCausalLM(CONFIG)
        self.adam = infinity.AdamW(self.model, lr=3e-3, max_grad_norm=1.0)  # clips, in place of the Trainer
        self.scheduler = get_cosine_schedule_with_warmup(self.adam, 2, steps)
        self.adam.follow(scheduler=self.scheduler)
        self.done = infinity.resume(self.model, self.adam)  # 0: a new run

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        if self.global_rank == 0:
            print(f"batch {2 * self.done + number:3}  loss {loss.item():.6f}")
        return loss

    def configure_optimizers(self) -> Any:
        return {"optimizer": self.adam, "lr_scheduler": {"scheduler": self.scheduler, "interval": "step"}}


def main(steps: int, nvme: str, name: str) -> None:
    torch.manual_seed(0)
    places = [f"memory.nvme=[{nvme}]", "memory.host=64MiB", f"run.name={name}"]
    recipe = infinity.load_recipe(overrides=places)
    learner = Learner(recipe, steps)
    ranks, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    trainer = lightning.Trainer(
        max_steps=steps - learner.done, accumulate_grad_batches=2, strategy=infinity.LightningStrategy(),
        use_distributed_sampler=False, devices=local, num_nodes=ranks // local, barebones=True,
    )  # fmt: skip
    data = stretches(steps * 2 * 4 * ranks)[learner.done * 2 * 4 * ranks :]
    share = DistributedSampler(data, ranks, int(os.environ.get("RANK", "0")), shuffle=False)
    trainer.fit(learner, DataLoader(data, batch_size=4, sampler=share))
    infinity.close(learner)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--nvme", help="a directory on a fast drive; default: a temporary one")
    parser.add_argument("--name", default="null", help="of the run, which can then go on")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        main(options.steps, options.nvme or scratch, options.name)
