"""Adapters for a checkpoint: its weights stay frozen on NVMe, and what is trained is saved alone.

    python examples/lora_loop.py
    torchrun --nproc-per-node 2 examples/lora_loop.py --nvme /mnt/nvme0 --out adapters

A small Llama learns Python's own standard library in memory, as a stand-in for a downloaded checkpoint;
then adapters of a twentieth of its size learn the tables in the library's ``encodings``.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import infinity

LIBRARY = Path(os.__file__).parent


def batches(folder: Path, steps: int, seed: int, count: int = 8) -> Iterator[dict[str, torch.Tensor]]:
    """Random stretches of a folder's sources, byte by byte."""
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - 128, (count,), generator=random).tolist()
        ids = torch.stack([data[start : start + 128] for start in starts]).long()
        yield {"input_ids": ids, "labels": ids}


def make_base(directory: Path, steps: int) -> None:
    """Train a model in plain PyTorch and save it."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in batches(LIBRARY, steps, seed=0):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.bfloat16().save_pretrained(directory)


def main(steps: int, nvme: str, base: Path, out: str) -> None:
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(0)
    make_base(base, steps)
    recipe = infinity.load_recipe(
        overrides=[f"memory.nvme=[{nvme}]", "memory.host=16MiB", "memory.resident=false"]
    )

    model = infinity.from_pretrained(base, recipe)
    model = infinity.add_lora(model, rank=4, alpha=8).train()
    optimizer = infinity.AdamW(model, lr=1e-2, max_grad_norm=1.0)

    for step, batch in enumerate(batches(LIBRARY / "encodings", steps, seed=1 + rank)):
        loss = model(**{key: value.to(model.device) for key, value in batch.items()}).loss
        loss.backward()
        optimizer.step()
        if rank == 0:
            written = optimizer.report().nbytes_written / 2**20
            print(f"step {step:3}  loss {float(loss.detach()):.3f}  {written:.1f} MiB written")
    infinity.save_lora(model, out)  # what peft.PeftModel.from_pretrained(base_model, out) loads
    optimizer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--nvme", help="a directory on a fast drive; default: a temporary one")
    parser.add_argument("--out", help="where the adapters go; default: nowhere that stays")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        main(
            options.steps,
            options.nvme or scratch,
            Path(scratch, "base"),
            options.out or f"{scratch}/adapters",
        )
