"""What ``infinity plan`` predicts beside what runs measure: bytes, peaks of memory and step times.

    python benchmarks/predictions.py [--quick] [--json FILE] [--only WORD] [--large]

Each run is a recipe in fresh processes, one for each rank: new GPTs, and Llamas whose checkpoint is made
here.
Bytes are those of the engine over all measured steps, from one drained pipeline to the next; times are
medians of the steps. The peak of units is that of their pool; the peak of activations is metered in a step of
its own. ``others`` are the cores that other programs, or the hypervisor, took meanwhile: times need a quiet
machine, bytes and peaks do not. Each rank computes on one thread.

``--large`` is one run instead: 2.5 B parameters, all on NVMe (60 GB there; ten minutes).
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama
import processes
from options import Options, folder_on, say
from report import Claim, print_claims, print_table

#: What predictions may be off by.
TIME_WITHIN, PEAK_WITHIN = 0.10, 0.03
WARM_UP, STEPS = 3, 8

_GPT = ("model.n_layers=8", "model.d_model=512", "model.n_heads=8", "model.seq_len=256", "train.batch_size=2")
_WIDE = (
    "model.n_layers=4",
    "model.d_model=768",
    "model.n_heads=12",
    "model.seq_len=128",
    "train.batch_size=4",
)
_LLAMA = ("llama", "model.seq_len=256", "train.batch_size=2")
_STREAM = ("memory.resident=false", "memory.host=256MiB")
_KEEP = ("memory.activations=keep",)
_LORA = ("lora.rank=8",)
#: Name, ranks, and what the recipe says; ``LEAST`` is the least device memory, as the error names it.
RUNS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("GPT, all on NVMe", 1, (*_GPT, *_STREAM, *_KEEP)),
    ("GPT, small device", 1, (*_GPT, *_STREAM, *_KEEP, "memory.device=LEAST", "optim.max_grad_norm=null")),
    ("GPT, small device, clipping", 1, (*_GPT, *_STREAM, *_KEEP, "memory.device=LEAST")),
    ("GPT, fp32", 1, (*_GPT, *_STREAM, *_KEEP, "train.dtype=fp32", "memory.device=LEAST")),
    ("GPT, half in host memory", 1, (*_WIDE, *_KEEP, "memory.host=384MiB", "memory.resident=true")),
    ("GPT, all in host memory", 1, (*_GPT, *_KEEP, "memory.host=1GiB", "memory.resident=true")),
    ("GPT, four micro-batches", 1, (*_GPT, *_STREAM, *_KEEP, "train.accumulate=4")),
    ("GPT, recomputed", 1, (*_GPT, *_STREAM, "memory.activations=recompute")),
    ("GPT, activations planned", 1, (*_GPT, *_STREAM, "memory.activations=plan", "memory.device=160MiB")),
    ("GPT, two ranks", 2, (*_GPT, *_STREAM, *_KEEP)),
    ("GPT, two ranks, small device", 2, (*_WIDE, *_STREAM, *_KEEP, "memory.device=LEAST")),
    ("Llama", 1, (*_LLAMA, *_STREAM, *_KEEP)),
    ("Llama, LoRA", 1, (*_LLAMA, *_STREAM, *_KEEP, *_LORA)),
    ("Llama, LoRA, small device", 1, (*_LLAMA, *_STREAM, *_KEEP, *_LORA, "memory.device=LEAST")),
    ("Llama, LoRA, two ranks, recomputed", 2, (*_LLAMA, *_STREAM, *_LORA, "memory.activations=recompute")),
)  # fmt: skip
#: What a machine of 24 GiB and a drive of 70 GB can hold: its steps are a minute each.
_XL = ("model.n_layers=32", "model.d_model=2560", "model.n_heads=20", "model.seq_len=128")
LARGE = (
    "GPT of 2.5 B, all on NVMe",
    1,
    (*_XL, *_KEEP, "train.batch_size=1", "train.dtype=auto", "optim.max_grad_norm=null",
     "memory.resident=false", "memory.host=2GiB", "memory.device=2GiB"),
)  # fmt: skip
LARGE_STEPS = 3


@dataclass(frozen=True, slots=True)
class Job:
    """What one process does.

    Attributes:
        way: ``run``; ``make`` saves the Llama.
        steps: Measured ones.
    """

    way: str
    overrides: list[str] = field(default_factory=list)
    llama: str = ""
    steps: int = STEPS


def make(job: Job) -> dict[str, Any]:
    """Save a Llama as bf16, as published ones are."""
    import torch

    shape = llama.Shape("", 512, 8, 1376, vocabulary=4_000)
    llama.make(shape).to(torch.bfloat16).save_pretrained(job.llama)
    return {}


def run(job: Job) -> dict[str, Any]:
    """Train; a rank's figures."""
    import torch

    import infinity
    from infinity.activations.controller import METERED
    from infinity.activations.profiler import MemoryMeter
    from infinity.app.train import built, process_group, set_threads
    from infinity.observe.metrics import View
    from infinity.recipes.models import CausalLoss

    recipe = infinity.load_recipe(overrides=job.overrides)
    set_threads(recipe.train)
    shape = recipe.train.batch_size, recipe.model.seq_len
    step_s: list[float] = []
    with process_group(recipe), built(recipe, None, View()) as (model, optimizer):
        model.train()
        loss, runtime = CausalLoss(model), optimizer.runtime

        def moved() -> tuple[int, int]:
            engine: Any = runtime.storage.engine
            return (0, 0) if engine is None else (engine.nbytes_read, engine.nbytes_written)

        def step() -> None:
            for micro in range(recipe.train.accumulate):
                tokens = torch.randint(256, shape)
                if micro + 1 < recipe.train.accumulate:
                    with infinity.no_sync(model):
                        loss(tokens, tokens).backward()
                else:
                    loss(tokens, tokens).backward()
            optimizer.step()

        for _ in range(WARM_UP + METERED * (recipe.memory.activations == "plan")):
            step()
        optimizer.synchronize()
        before, busy_s, began_s = moved(), cores_busy_s(), time.perf_counter()
        for _ in range(job.steps):
            at_s = time.perf_counter()
            step()
            step_s.append(time.perf_counter() - at_s)
        optimizer.synchronize()
        all_s, after = time.perf_counter() - began_s, moved()
        ours, all_of_them = (now - then for now, then in zip(cores_busy_s(), busy_s, strict=True))
        world = int(os.environ.get("WORLD_SIZE", "1"))
        planning, device = runtime.activations.planning, runtime.peak_nbytes()["device"]
        if planning is None:
            with MemoryMeter() as meter:
                step()
            activations = meter.peak_nbytes()
        else:
            activations = runtime.activations.metered_nbytes
        budgets = optimizer.budgets
        on_demand = runtime.executor().figures.on_demand
    read, written = ((b - a) / job.steps for a, b in zip(before, after))
    return {
        "step_s": statistics.median(step_s), "mean_s": all_s / job.steps, "read": read, "written": written,
        "device": device, "activations": activations, "budgets": budgets, "on_demand": on_demand,
        "others": (all_of_them - world * ours) / all_s,
    }  # fmt: skip


def cores_busy_s() -> tuple[float, float]:
    """Seconds of cores that this process has used, and all, with what the hypervisor gave to others."""
    words = Path("/proc/stat").read_text(encoding="utf-8").split(maxsplit=9)
    user, nice, system, _, _, irq, soft, stolen = map(int, words[1:9])
    mine = os.times()
    return mine.user + mine.system, (user + nice + system + irq + soft + stolen) / os.sysconf("SC_CLK_TCK")


def predict(job: Job, machine: Any, ranks: int) -> dict[str, Any]:
    """The plan's figures for the same, with all budgets given."""
    import infinity
    from infinity.planner.simulator import play
    from infinity.predict.dry_run import dry_run

    planned = dry_run(infinity.load_recipe(overrides=job.overrides), machine, ranks, here=True)
    cost, made = planned.cost, planned
    activations = made.trace.peak_nbytes
    if made.activations.places or made.activations.recomputed:
        activations = play(made.profile, made.activations, made.rates.channels).peak_nbytes
    return {
        "step_s": cost.step_s, "read": cost.nbytes.get("NVMe read", 0),
        "written": cost.nbytes.get("NVMe write", 0), "device": cost.device_peak_nbytes,
        "activations": activations, "bottleneck": cost.bottleneck, "least": made.division.least,
        "total": made.division.total,
    }  # fmt: skip


def overrides_of(given: Sequence[str], folder: Path, machine: Any, ranks: int) -> list[str]:
    """A run's overrides, with its model, its files, and the device memory that is the least."""
    import infinity
    from infinity.predict.dry_run import dry_run

    overrides = [
        *given, "train.threads=1", f"memory.nvme=[{folder / 'nvme'}]", f"run.dir={folder / 'runs'}",
        "observe.progress=false",
    ]  # fmt: skip
    if "llama" in overrides:
        overrides[overrides.index("llama")] = f"model.path={folder / 'llama'}"
    if not any(each.startswith("train.dtype") for each in overrides):
        overrides.append("train.dtype=bf16")
    if not any(each.startswith("optim.max_grad_norm") for each in overrides):
        overrides.append("optim.max_grad_norm=1e9")  # what is clipped is updated twice: no plan foresees it
    if any("LEAST" in each for each in overrides):
        roomy = [each for each in overrides if "LEAST" not in each]
        division = dry_run(infinity.load_recipe(overrides=roomy), machine, ranks).division
        overrides = [each.replace("LEAST", str(division.least)) for each in overrides]
    elif not any(each.startswith("memory.device") for each in overrides):
        overrides.append("memory.device=256MiB")
    return overrides


def off(predicted: float, measured: float) -> float:
    """How far a prediction is off, as a share of what was measured."""
    return 0.0 if predicted == measured else abs(predicted - measured) / max(measured, 1e-12)


def main(argv: list[str] | None = None) -> None:
    parser = Options(__doc__, "three runs: under a minute", dtype=False)  # in FILE other runs stay
    parser.add_argument("--only", default="", metavar="WORD", help="runs whose name has it")
    parser.add_argument("--large", action="store_true", help="one run of 2.5 B parameters instead")
    options = parser.parse(argv)
    chosen = [LARGE] if options.large else [each for each in RUNS if options.only in each[0]]
    chosen = chosen[:: max(1, len(chosen) // 3)][:3] if options.quick else chosen
    found: list[dict[str, Any]] = []
    try:
        with folder_on(options.nvme, "predictions") as folder:
            for each in measure_all(chosen, folder):
                found.append(each)
                if options.json is not None:
                    keep(each, options.json)
    finally:
        show(found)


def keep(run: dict[str, Any], path: Path) -> None:
    """Write a run's figures to ``path``, beside those of other runs that are there already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    there = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    names = [name for name, _, _ in (*RUNS, LARGE)]
    runs = {each["name"]: each for each in [*there, run] if each["name"] in names}
    ordered = sorted(runs.values(), key=lambda each: names.index(each["name"]))
    path.write_text(json.dumps(ordered, indent=2) + "\n", encoding="utf-8")


def show(found: Sequence[dict[str, Any]]) -> None:
    """Print a table, and what holds."""
    print_table(
        ["run", "ranks", "others", "step s", "planned", "read MiB", "planned ", "written MiB", "planned  ",
         "units MiB", "planned   ", "activations MiB", "planned    ", "bottleneck"],
        [_row(each) for each in found],
    )  # fmt: skip
    print_claims([claim for each in found for claim in _claims(each)])


def measure_all(chosen: Sequence[tuple[str, int, tuple[str, ...]]], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield each run, predicted and measured."""
    from infinity.predict.machines import probe

    say("measuring this machine")
    machine = probe([folder])
    if any("llama" in given for _, _, given in chosen):
        processes.run(Job("make", llama=str(folder / "llama")), worker=Path(__file__))
    for name, ranks, given in chosen:
        say(name)
        overrides = overrides_of(given, folder, machine, ranks)
        job = Job("run", overrides, steps=LARGE_STEPS if name == LARGE[0] else STEPS)
        predicted = predict(job, machine, ranks)
        [figures] = processes.run(job, world=ranks, worker=Path(__file__))
        first = figures[0]
        measured = {
            key: first[key] for key in ("step_s", "read", "written", "activations", "on_demand", "others")
        }
        measured["device"] = max(each["device"] for each in figures)
        measured["step_s"] = max(each["step_s"] for each in figures)
        yield {"name": name, "ranks": ranks, "predicted": predicted, "measured": measured}


def _row(found: dict[str, Any]) -> list[str]:
    cells = [found["name"], str(found["ranks"]), f"{found['measured']['others']:.2f}"]
    for key, scale, digits in (
        ("step_s", 1, 3), ("read", 2**20, 3), ("written", 2**20, 3), ("device", 2**20, 2),
        ("activations", 2**20, 2),
    ):  # fmt: skip
        cells += [f"{found[which][key] / scale:.{digits}f}" for which in ("measured", "predicted")]
    return [*cells, found["predicted"]["bottleneck"]]


def _claims(found: dict[str, Any]) -> list[Claim]:
    predicted, measured, made = found["predicted"], found["measured"], []
    for key, what, within in (
        ("step_s", "step time", TIME_WITHIN), ("read", "bytes read", 0.0), ("written", "bytes written", 0.0),
        ("device", "peak of units", PEAK_WITHIN), ("activations", "peak of activations", PEAK_WITHIN),
    ):  # fmt: skip
        value = off(predicted[key], measured[key])
        made.append(
            Claim(f"{found['name']}: {what} is off by", 100 * value, 100 * within, " %", value <= within)
        )
    return made


def work(text: str, out: str) -> None:
    """One rank: the job, and where its result goes."""
    job = Job(**json.loads(text))
    result = make(job) if job.way == "make" else run(job)
    rank = int(os.environ.get("RANK", "0"))
    Path(f"{out}.{rank}").write_text(json.dumps([result]), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        work(*sys.argv[1:])
    else:
        main()
