"""Hugging Face Accelerate on a model that infinity holds, with gradient accumulation.

    python examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py --nvme /mnt/nvme0 --name mine

It learns the sources of Python's own standard library, byte by byte. With a name it goes on after an
interruption, when it is started again.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader
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


def main(steps: int, nvme: str, name: str) -> None:
    torch.manual_seed(0)
    accelerator = infinity.Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    places = [f"memory.nvme=[{nvme}]", "memory.host=64MiB", f"run.name={name}"]
    with infinity.Init(infinity.load_recipe(overrides=places)):
        model = LlamaForCausalLM(CONFIG)
    optimizer = infinity.AdamW(model, lr=3e-3, max_grad_norm=1.0)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, steps)
    loader = DataLoader(stretches(steps * 2 * 4 * accelerator.num_processes), batch_size=4)
    model, prepared, loader = accelerator.prepare(model, optimizer, loader)
    optimizer.follow(scheduler=scheduler)
    done = 2 * infinity.resume(model, optimizer)  # batches of the committed steps; 0: a new run
    for number, batch in enumerate(accelerator.skip_first_batches(loader, done), start=done):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            prepared.step()
            prepared.zero_grad()
        if accelerator.sync_gradients:
            scheduler.step()
        accelerator.print(f"batch {number:3}  loss {float(accelerator.gather(loss.detach()).mean()):.6f}")
    optimizer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--nvme", help="a directory on a fast drive; default: a temporary one")
    parser.add_argument("--name", default="null", help="of the run, which can then go on")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        main(options.steps, options.nvme or scratch, options.name)
