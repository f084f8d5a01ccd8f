"""Generation: tokens per second with weights in host memory and on NVMe, beside plain transformers.

    python benchmarks/generate.py [--quick] [--json FILE] [--sizes tiny,134M,367M] [--batch 1,8]

Every way runs in a fresh process, in turn, and gives the same tokens. On NVMe the model has a quarter of its
weights as device memory (or two embeddings) and none in host memory; fio reads with O_DIRECT right before.
"""

import argparse
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fio
import llama
import processes
from base import make
from checkpoint_worker import import_all
from options import Options, folder_on, say
from report import Claim, print_claims, print_table
from train import SIZES

from infinity.device.machine import DTYPES

WAYS = {"plain": "plain transformers, in memory", "host": "in host memory", "nvme": "on NVMe"}


@dataclass(frozen=True, slots=True)
class Job:
    """What one process does; paths are of directories."""

    way: str  # of WAYS, or make
    shape: dict[str, Any]
    source: str
    dtype: str
    batches: tuple[int, ...] = ()
    tokens: int = 0  # of each sequence
    overrides: list[str] = field(default_factory=list)


def generate(job: Job) -> list[dict[str, Any]]:
    """For each batch the tokens per second, the bytes that were read for a token, and a sum of all tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    import infinity
    from infinity.engine.runtime import runtime_of

    engine: Any = None
    if job.way == "plain":
        model = AutoModelForCausalLM.from_pretrained(job.source, dtype=DTYPES[job.dtype])
    else:
        recipe = infinity.load_recipe(overrides=[f"train.dtype={job.dtype}", *job.overrides])
        model = infinity.from_pretrained(job.source, recipe)
        if (
            job.way == "nvme"
        ):  # with torch's slow head of prompts; else memory.device needs room for gradients
            model.requires_grad_(False)
        storage = runtime_of(model).tiers.storage
        engine = None if storage.store is None else storage.store.engine
    model.eval()  # in memory not frozen: torch multiplies the last positions with frozen weights slowly
    figures = []
    for batch in job.batches:
        generator = torch.Generator().manual_seed(batch)
        ids = torch.randint(1, job.shape["vocabulary"], (batch, 64), generator=generator)
        given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "use_cache": True}
        given |= {"min_new_tokens": job.tokens, "max_new_tokens": job.tokens, "pad_token_id": 0}
        model.generate(ids, **given | {"min_new_tokens": 2, "max_new_tokens": 2})
        before = 0 if engine is None else engine.nbytes_read
        seconds, cpu_s = -time.perf_counter(), -time.process_time()
        out = model.generate(ids, **given)
        seconds, cpu_s = seconds + time.perf_counter(), cpu_s + time.process_time()
        read = 0 if engine is None else engine.nbytes_read - before
        figures.append({
            "rate": batch * job.tokens / seconds, "read_per_token": read / job.tokens,
            "read_per_s": read / seconds, "sum": int(out.sum()), "cpu_rate": batch * job.tokens / cpu_s,
        })  # fmt: skip
    if job.way != "plain":
        infinity.close(model)
    return figures


def measure(
    shape: llama.Shape, options: argparse.Namespace, folder: Path
) -> tuple[list[list[str]], list[Claim]]:
    """Return rows of a table, and claims, of one size."""
    nvme, source, found = folder / "nvme", str(folder / "source"), defaultdict[str, list[Any]](list)
    tier = {
        "host": [], "plain": [],
        "nvme": [
            f"memory.nvme=[{nvme}]", "memory.host=512MiB", "memory.resident=false",
            f"memory.device={max(2**23 + 4 * shape.vocabulary * shape.hidden, shape.numel // 2)}",
        ],
    }  # fmt: skip
    processes.run(Job("make", shape.as_dict(), source, options.dtype), worker=Path(__file__))
    rates = []
    for _ in range(options.rounds):
        for way in WAYS:
            say(f"{shape.name}: {WAYS[way]}")
            if way == "nvme" and fio.available():
                rates.append(fio.read_bytes_per_s([*Path(source).glob("*.safetensors")], 2))
            job = Job(way, shape.as_dict(), source, options.dtype, options.batch, options.tokens, tier[way])
            phases = processes.run(job, worker=Path(__file__))
            found[way].append([ranks[0] for ranks in phases])
    rows, claims = [], []
    for at, batch in enumerate(options.batch):
        assert len({each[at]["sum"] for rounds in found.values() for each in rounds}) == 1, "other tokens"
        rate = {way: statistics.median(each[at]["rate"] for each in found[way]) for way in WAYS}
        for way in WAYS:
            last = found[way][-1][at]
            disk = last["read_per_s"] / statistics.median(rates) if rates and way == "nvme" else 0.0
            rows.append([
                shape.name, str(batch), WAYS[way], f"{rate[way]:.1f}", f"{rate[way] / rate['plain']:.2f}",
                f"{last['cpu_rate']:.1f}", f"{last['read_per_token'] / 2**20:.0f}", f"{disk:.2f}",
            ])  # fmt: skip
        value = rate["host"] / rate["plain"]
        text = f"{shape.name}, batch {batch}: tokens/s in host memory / plain"
        claims.append(Claim.at_least(text, value, 0.8, "x"))
    return rows, claims


def main(argv: list[str] | None = None) -> None:
    parser = Options(__doc__, "a tiny model, one round: under a minute", rounds=3)
    parser.add_argument("--sizes", default="tiny,134M,367M", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--batch", default="1,8", help="sequences that are generated together")
    parser.add_argument("--tokens", type=int, default=32, help="new ones, of each sequence")
    options = parser.parse(argv, sizes="tiny", rounds=1, tokens=16)
    options.batch = tuple(map(int, options.batch.split(",")))
    rows, claims = [], []
    for name in options.sizes.split(","):
        with folder_on(options.nvme, "generate") as folder:
            more, held = measure(SIZES[name], options, folder)
        rows += more
        claims += held
    print_table(
        ["size", "batch", "weights", "tokens/s", "/ plain", "/ CPU s", "MiB read / token", "/ fio"], rows
    )
    print_claims(claims, options.json, wanted="at least")


def work(job: Job) -> list[dict[str, Any]]:
    """One process of a round."""
    import_all()
    return [make(job)] if job.way == "make" else generate(job)


if __name__ == "__main__":
    processes.serve(Job, work, main)
