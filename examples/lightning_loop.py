"""The three changed lines inside Lightning.

    python examples/lightning_loop.py --nvme /mnt/nvme0

It learns the sources of Python's own standard library, byte by byte.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

import infinity

CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4
)  # its tokens are bytes


def stretches(count: int, length: int = 128) -> list[dict[str, torch.Tensor]]:
    """Random stretches of the standard library."""
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    starts = torch.randint(len(text) - length, (count,), generator=torch.Generator().manual_seed(0))
    rows = [data[start : start + length].long() for start in starts.tolist()]
    return [{"input_ids": row, "labels": row} for row in rows]


class Learner(lightning.LightningModule):
    """A Llama that infinity holds, and its optimizer."""

    def __init__(self, recipe: infinity.Recipe, steps: int) -> None:
        super().__init__()
        self.steps = steps
        with infinity.Init(recipe):
            self.model = LlamaForCausalLM(CONFIG)

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        print(f"step {number:3}  loss {loss.item():.6f}")
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = infinity.AdamW(self.model, lr=3e-3, max_grad_norm=1.0)  # clips, in place of the Trainer
        scheduler = get_cosine_schedule_with_warmup(optimizer, 2, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main(steps: int, nvme: str) -> None:
    torch.manual_seed(0)
    recipe = infinity.load_recipe(overrides=[f"memory.nvme=[{nvme}]", "memory.host=64MiB"])
    learner = Learner(recipe, steps)
    trainer = lightning.Trainer(max_steps=steps, devices=1, barebones=True)
    trainer.fit(learner, DataLoader(stretches(steps * 8), batch_size=8))
    infinity.close(learner)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--nvme", help="a directory on a fast drive; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        main(options.steps, options.nvme or scratch)
