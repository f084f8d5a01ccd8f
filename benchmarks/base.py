"""Starting a fine-tune with adapters: with a copy of the base, and with one that is read where it lies.

    python benchmarks/base.py [--quick] [--json FILE] [--sizes 134M,367M]

A start is ``from_pretrained`` in a fresh process. The checkpoint is read from the drive, not from the page
cache.
"""

import argparse
import shutil
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama
import processes
from checkpoint_worker import forget, import_all
from options import Options, folder_on, say
from report import Claim, print_claims, print_table
from train import SIZES
from worker import peak_rss_nbytes

from infinity.device.machine import DTYPES

#: How a run starts, in turn.
WAYS = {"own": "a copy of its own", "mapped": "read where it lies"}


@dataclass(frozen=True, slots=True)
class Job:
    """What one process does; paths are of directories."""

    way: str  # of WAYS, or make
    shape: dict[str, Any]
    source: str
    overrides: list[str] = field(default_factory=list)
    dtype: str = "bf16"  # of the weights


def make(job: Job) -> dict[str, Any]:
    """Save a new model as a checkpoint."""
    llama.make(llama.Shape(**job.shape)).to(DTYPES[job.dtype]).save_pretrained(job.source)
    return {}


def start(job: Job) -> dict[str, Any]:
    """Seconds until the model is there, and the bytes that its engine moved for it."""
    import infinity
    from infinity.engine.runtime import runtime_of

    recipe = infinity.load_recipe(overrides=[f"train.dtype={job.dtype}", *job.overrides])
    forget(Path(job.source))
    began = time.perf_counter()
    model = infinity.from_pretrained(job.source, recipe, frozen=job.way != "own")
    seconds = time.perf_counter() - began
    engine: Any = runtime_of(model).tiers.store.engine
    moved = {"read": engine.nbytes_read, "written": engine.nbytes_written}
    infinity.close(model)
    return {"seconds": seconds, "peak_rss": peak_rss_nbytes(), **moved}


def measure(shape: llama.Shape, options: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Every way's figures, round by round."""
    figures: dict[str, list[dict[str, Any]]] = defaultdict(list)
    nvme, source = folder / "nvme", str(folder / "source")
    overrides = [f"memory.nvme=[{nvme}]", "memory.host=256MiB", "memory.resident=false"]
    processes.run(Job("make", shape.as_dict(), source, dtype=options.dtype), worker=Path(__file__))
    for _ in range(options.rounds):
        for way in WAYS:
            say(f"{shape.name}: {WAYS[way]}")
            job = Job(way, shape.as_dict(), source, overrides, options.dtype)
            [[result]] = processes.run(job, worker=Path(__file__))
            figures[way].append(result)
        shutil.rmtree(nvme)
    return figures


def rows_of(shape: llama.Shape, figures: dict[str, list[dict[str, Any]]]) -> tuple[list[list[str]], Claim]:
    seconds = {way: statistics.median(each["seconds"] for each in figures[way]) for way in WAYS}
    rows = []
    for way, title in WAYS.items():
        last, peak = figures[way][-1], max(each["peak_rss"] for each in figures[way])
        moved = (f"{last[key] / 2**20:.0f}" for key in ("read", "written"))
        ratio = f"{seconds[way] / seconds['mapped']:.2f}"
        rows.append([shape.name, title, f"{seconds[way]:.2f}", ratio, *moved, f"{peak / 2**20:.0f}"])
    value = seconds["own"] / seconds["mapped"]
    text = f"{shape.name}: start with a copy / with none"
    return rows, Claim.at_least(text, value, 1.0, "x")


def main(argv: list[str] | None = None) -> None:
    parser = Options(__doc__, "a small model, one round: under a minute", rounds=3)
    parser.add_argument("--sizes", default="134M,367M", help=f"of {', '.join(SIZES)}")
    options = parser.parse(argv, sizes="134M", rounds=1)
    rows, claims = [], []
    for name in options.sizes.split(","):
        with folder_on(options.nvme, "base") as folder:
            more, claim = rows_of(SIZES[name], measure(SIZES[name], options, folder))
        rows += more
        claims.append(claim)
    print_table(["size", "run", "start s", "/ mapped", "read MiB", "written MiB", "peak RSS MiB"], rows)
    print_claims(claims, options.json, wanted="at least")


def work(job: Job) -> list[dict[str, Any]]:
    """One process of a round."""
    import_all()
    return [make(job) if job.way == "make" else start(job)]


if __name__ == "__main__":
    processes.serve(Job, work, main)
