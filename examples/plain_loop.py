"""The three changed lines, in a plain PyTorch loop around an unmodified Hugging Face model.

    python examples/plain_loop.py
    torchrun --nproc-per-node 2 examples/plain_loop.py --nvme /mnt/nvme0 --name mine

It learns the sources of Python's own standard library, byte by byte. With a name it goes on after an
interruption, when it is started again.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

import infinity

CONFIG = LlamaConfig(
    vocab_size=256,  # bytes
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    use_cache=False,
)


def batches(steps: int, sequence: int = 128, count: int = 8) -> Iterator[dict[str, Tensor]]:
    """Random stretches of the standard library; every rank draws its own."""
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    random = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    for _ in range(steps):
        starts = torch.randint(len(data) - sequence, (count,), generator=random)
        ids = torch.stack([data[start : start + sequence] for start in starts.tolist()]).long()
        yield {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--nvme", help="a directory on a fast drive; default: a temporary one")
    parser.add_argument("--name", default="null", help="of the run, which can then go on")
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        nvme = options.nvme or scratch
        recipe = infinity.load_recipe(
            overrides=[f"memory.nvme=[{nvme}]", "memory.host=64MiB", f"run.name={options.name}"]
        )

        with infinity.Init(recipe):  # parameters are sharded as they are created
            model = LlamaForCausalLM(CONFIG)
        optimizer = infinity.AdamW(model, lr=3e-3, max_grad_norm=1.0)

        scheduler = get_cosine_schedule_with_warmup(optimizer, 5, options.steps)
        optimizer.follow(scheduler=scheduler)
        start = infinity.resume(model, optimizer)  # 0: a new run
        for step, batch in islice(enumerate(batches(options.steps)), start, None):
            loss = model(**{key: value.to(model.device) for key, value in batch.items()}).loss
            loss.backward()
            optimizer.step()
            scheduler.step()
            if os.environ.get("RANK", "0") == "0" and (step % 5 == 0 or step == options.steps - 1):
                print(f"step {step:3}  loss {loss.item():.3f}")
        optimizer.close()


if __name__ == "__main__":
    main()
