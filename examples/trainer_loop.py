"""The three changed lines inside the Hugging Face Trainer.

    python examples/trainer_loop.py
    torchrun --nproc-per-node 2 examples/trainer_loop.py --nvme /mnt/nvme0 --out trained --save-every 10

It learns the sources of Python's own standard library, byte by byte. With a name (--name mine) it goes on
after an interruption, when it is started again.
"""

import argparse
import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers import get_cosine_schedule_with_warmup as cosine

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


class Streaming(Accelerator):
    """Accelerate without a copy of the model on every rank: infinity shards weights and reduces gradients."""

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return model  # in place of DistributedDataParallel

    def prepare_optimizer(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return super().prepare_optimizer(optimizer, device_placement=False)  # the state stays where it is

    def no_sync(self, model: Any) -> contextlib.AbstractContextManager[None]:
        return infinity.no_sync(model)

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: infinity.AdamW clips, when it knows the norm over all ranks."""


class StreamingArguments(TrainingArguments):
    """Settings of a Trainer that moves no weights."""

    place_model_on_device = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.save_strategy != "no" and not self.save_only_model:
            raise ValueError(
                f"save_strategy={self.save_strategy.value!r} would have one rank alone gather all optimizer "
                "state, and hold it in memory. Say save_only_model=True, which writes the model as it "
                'trains, or save_strategy="no"'
            )


class Losses(TrainerCallback):
    """Prints the loss of every step."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        entry = state.log_history[-1]
        if state.is_world_process_zero and "loss" in entry:
            print(f"step {entry['step']:3}  loss {float(entry['loss']):.6f}")


class StreamingTrainer(Trainer):
    """A Trainer of a model that infinity holds."""

    def go_on_after(self, step: int) -> None:
        """Train from here on; a Trainer's own checkpoint tells it the step, and nothing else."""
        with tempfile.TemporaryDirectory() as folder:
            if step:
                self.state.global_step = step
                self.state.train_batch_size = self.args.train_batch_size
                self.state.compute_steps(self.args, self.args.max_steps)
                self.state.save_to_json(f"{folder}/trainer_state.json")
            self.train(resume_from_checkpoint=folder if step else None)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: infinity.resume has put weights, optimizer, scheduler and generators back."""

    _load_optimizer_and_scheduler = _load_rng_state = _load_from_checkpoint

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Streaming

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        infinity.export(self.model, output_dir or self.args.output_dir)  # on every rank, unit by unit


def main(steps: int, nvme: str, out: str, save_every: int | None, name: str) -> None:
    settings = StreamingArguments(
        out, max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        save_strategy="steps" if save_every else "no", save_steps=save_every or 0, save_only_model=True,
        logging_steps=1, disable_tqdm=True, report_to="none",
        train_sampling_strategy="sequential", use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    torch.manual_seed(0)
    places = [f"memory.nvme=[{nvme}]", "memory.host=64MiB", f"run.name={name}"]
    with infinity.Init(infinity.load_recipe(overrides=places)):
        model = LlamaForCausalLM(CONFIG)
    optimizer = infinity.AdamW(model, lr=3e-3, max_grad_norm=1.0)
    scheduler = cosine(optimizer, 2, steps)
    trainer = StreamingTrainer(
        model, settings, train_dataset=stretches(steps * 2 * 4 * settings.world_size),
        optimizers=(optimizer, scheduler), callbacks=[Losses],
    )  # fmt: skip
    optimizer.follow(scheduler=scheduler)
    trainer.go_on_after(infinity.resume(model, optimizer))  # 0: a new run
    trainer.save_model(f"{out}/model")  # a directory of its own
    optimizer.close()


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
