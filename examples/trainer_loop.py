"""The Hugging Face Trainer on a model that infinity holds.

    python examples/trainer_loop.py
    torchrun --nproc-per-node 2 examples/trainer_loop.py --nvme /mnt/nvme0 --out trained --save-every 10

It learns the sources of Python's own standard library, byte by byte. With a name (--name mine) it goes on
after an interruption, when it is started again.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

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


class Losses(TrainerCallback):
    """Prints the loss of every step."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        entry = state.log_history[-1]
        if state.is_world_process_zero and "loss" in entry:
            print(f"step {entry['step']:3}  loss {float(entry['loss']):.6f}")


def main(steps: int, nvme: str, out: str, save_every: int | None, name: str) -> None:
    settings = TrainingArguments(
        out, max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=3e-3, lr_scheduler_type="cosine", warmup_steps=2, weight_decay=0.01,
        save_strategy="steps" if save_every else "no", save_steps=save_every or 0,
        logging_steps=1, disable_tqdm=True, report_to="none",
        train_sampling_strategy="sequential", use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    torch.manual_seed(0)
    places = [f"memory.nvme=[{nvme}]", "memory.host=64MiB", f"run.name={name}"]
    with infinity.Init(infinity.load_recipe(overrides=places)):
        model = LlamaForCausalLM(CONFIG)
    data = stretches(steps * 2 * 4 * settings.world_size)
    trainer = infinity.trainer(Trainer)(model, settings, train_dataset=data, callbacks=[Losses])
    trainer.train()
    trainer.save_model(f"{out}/model")
    infinity.close(model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--nvme", help="a directory on a fast drive; default: a temporary one")
    parser.add_argument("--out", help="where the trained model goes, as model/; default: nowhere that stays")
    parser.add_argument("--save-every", type=int, metavar="N", help="keep the model of every N-th step, too")
    parser.add_argument("--name", default="null", help="of the run, which can then go on")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or f"{scratch}/trained"
        main(options.steps, options.nvme or scratch, out, options.save_every, options.name)
