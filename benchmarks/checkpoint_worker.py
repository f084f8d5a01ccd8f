"""Load a checkpoint, train a little, save it: one way, one rank: ``python checkpoint_worker.py JOB OUT``.

JOB is a :class:`Job` as JSON; into ``OUT.rank`` goes a list with one result.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama
import torch
from worker import peak_rss_nbytes

from infinity.device.machine import DTYPES


@dataclass(frozen=True, slots=True)
class Job:
    """What one process (or one group of ranks) measures; paths are of directories."""

    way: str  # a key of WAYS
    shape: dict[str, Any]
    source: str
    out: str
    overrides: list[str] = field(default_factory=list)  # of the recipe, for infinity
    steps: int = 0
    tokens: int = 0  # per step
    dtype: str = "bf16"  # of the weights


def forget(folder: Path) -> None:
    """Take a directory's files out of the page cache, so that they are read from the drive."""
    for path in folder.glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def sync(folder: Path) -> None:
    """Wait until a directory's files are on the drive."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def import_all() -> None:
    """What loading and saving import and compile once in a process, so that no way pays for it."""
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")  # hundreds of patterns


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return call(), time.perf_counter() - start


def plain(job: Job) -> dict[str, Any]:
    """Plain transformers, with the whole model in memory."""
    from transformers import AutoModelForCausalLM

    def load() -> Any:
        model = AutoModelForCausalLM.from_pretrained(job.source, dtype=DTYPES[job.dtype])
        for param in model.parameters():  # it maps the files: this reads every page
            param.detach().view(-1)[::1024].sum()
        return model

    def save() -> None:
        model.save_pretrained(job.out)
        sync(Path(job.out))

    forget(Path(job.source))
    model, load_s = timed(load)
    _, save_s = timed(save)
    return {"load_s": load_s, "save_s": save_s}


def infinity_way(job: Job) -> dict[str, Any]:
    """Streamed, wherever the recipe's budgets put the states."""
    import infinity
    from infinity.engine.runtime import runtime_of

    recipe = infinity.load_recipe(overrides=[f"train.dtype={job.dtype}", *job.overrides])
    if int(os.environ.get("RANK", "0")) == 0:
        forget(Path(job.source))
    model, load_s = timed(lambda: infinity.from_pretrained(job.source, recipe))
    engine = runtime_of(model).tiers.store.engine
    loaded = engine.nbytes_written if engine else 0
    losses = list(train(model, job)) if job.steps else []
    runtime_of(model).synchronize()  # the last step's updates are not the export's
    before = engine.nbytes_read if engine else 0
    _, save_s = timed(lambda: infinity.export(model, job.out))
    exported = engine.nbytes_read - before if engine else 0
    infinity.close(model)
    return {"load_s": load_s, "save_s": save_s, "losses": losses, "written": loaded, "read": exported}


def train(model: Any, job: Job) -> Iterable[float]:
    """The losses of a few steps."""
    import infinity

    shape = llama.Shape(**job.shape)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = infinity.AdamW(model, lr=1e-4)
    for step in range(job.steps):
        loss = model(**llama.batch(shape, job.tokens, step, rank, world)).loss
        loss.backward()
        optimizer.step()
        yield float(loss)


def make(job: Job) -> dict[str, Any]:
    """A new model, as a checkpoint directory; built and saved without ever being in memory as a whole."""
    import infinity

    with infinity.Init(infinity.load_recipe(overrides=[f"train.dtype={job.dtype}", *job.overrides])):
        model = llama.make(llama.Shape(**job.shape))
    infinity.export(model, job.out)
    infinity.close(model)
    return {}


WAYS = {"plain": plain, "infinity": infinity_way, "make": make}


def main() -> None:
    job, out = Job(**json.loads(sys.argv[1])), sys.argv[2]
    rank = os.environ.get("RANK", "0")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")
    import_all()
    result = WAYS[job.way](job) | {"peak_rss": peak_rss_nbytes()}
    Path(f"{out}.{rank}").write_text(json.dumps([result]), encoding="utf-8")
    if rank == "0" and job.way != "make":
        shutil.rmtree(job.out)


if __name__ == "__main__":
    main()
