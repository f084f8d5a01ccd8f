"""One way of training, in a process of its own: ``python worker.py JOB OUT``.

JOB is a :class:`Job` as JSON; into ``OUT.rank`` goes a list of :class:`Phase` results. Each
way is a small class with ``step(batch) -> loss``, and nothing of the others is imported.
"""

import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fio
import llama
import torch
from torch import Tensor
from torch.profiler import record_function

from infinity.comm.ranks import backend_of
from infinity.device.accelerator import synchronize
from infinity.device.machine import DTYPES

#: A load beside a run: the most rates tried, and how far a step's time may be from what one supposes.
_RATES, _AS_SUPPOSED = 4, 0.03


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps of one size; with bytes given, while fio moves just so many per step beside them.

    ``alone_s`` is the step without that load, ``disk_s`` the bytes' own time: the rate starts
    from the larger one.
    """

    tokens: int
    read: float = 0.0  # bytes per step
    written: float = 0.0
    alone_s: float = 0.0
    disk_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """What one process (or one group of ranks) measures."""

    way: str  # a key of WAYS
    shape: dict[str, Any]
    phases: list[dict[str, Any]]
    warmup: int
    steps: int
    folder: str
    overrides: list[str] = field(default_factory=list)  # of the recipe, for infinity
    lr: float = 1e-4
    clip: float | None = 1.0  # the largest norm of the gradients
    length: int = llama.SEQUENCE  # tokens of a sequence
    micro_rows: int | None = None  # sequences of a micro-batch, for infinity; None: all of a step
    schedule: str = "step"  # of micro-batches
    lora: int = 0  # rank of adapters of all linear layers, which alone are trained; 0: all weights are
    dtype: str = "bf16"  # of the computation: bf16, fp16 or fp32
    device: str = "cpu"  # where it computes


class Plain:
    """PyTorch in memory: weights in the job's dtype, fp32 masters, fused AdamW and the casts between them.

    Attributes:
        parts: Seconds of the last step's forward and backward; on a CPU.
    """

    def __init__(self, shape: llama.Shape, job: Job) -> None:
        with torch.device(job.device):  # where its values are drawn faster
            model = llama.make(shape)
            if job.lora:
                import peft

                config = peft.LoraConfig(r=job.lora, target_modules="all-linear", task_type="CAUSAL_LM")
                model = peft.get_peft_model(model, config)
            self.model = model.to(DTYPES[job.dtype])
        self.weights = [p for p in self.model.parameters() if p.requires_grad]
        self.masters = [p.detach().float() for p in self.weights]  # in fp32 they are the weights
        self.adamw = torch.optim.AdamW(self.masters, lr=job.lr, fused=True)
        self.clip = job.clip
        self.parts: tuple[float, float] | None = None

    def step(self, batch: dict[str, Tensor]) -> float:
        began_s = time.perf_counter()
        with record_function("phase forward"):
            loss = self.model(**batch).loss
        forward_s = time.perf_counter() - began_s
        with record_function("phase backward"):
            loss.backward()
        self.parts = forward_s, time.perf_counter() - began_s - forward_s
        with record_function("phase update"), torch.no_grad():
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.weights, self.clip)
            for weight, master in zip(self.weights, self.masters):
                master.grad = None if weight.grad is None else weight.grad.float()
                weight.grad = None
            self.adamw.step()
            for weight, master in zip(self.weights, self.masters):
                master.grad = None
                if weight.dtype != master.dtype:
                    weight.copy_(master)
        return float(loss)

    def close(self) -> None:
        pass


class PlainMuon(Plain):
    """The same with ``torch.optim.Muon`` for the matrices of blocks."""

    def __init__(self, shape: llama.Shape, job: Job) -> None:
        super().__init__(shape, job)
        named = dict(zip((name for name, _ in self.model.named_parameters()), self.masters, strict=True))
        own = [p for name, p in named.items() if "layers" in name and p.ndim == 2]
        others = [p for name, p in named.items() if "layers" not in name or p.ndim != 2]
        muon, adamw = torch.optim.Muon(own, lr=job.lr), torch.optim.AdamW(others, lr=job.lr, fused=True)
        self.adamw = type("Both", (), {"step": lambda _: (muon.step(), adamw.step())})()


class FSDP2:
    """``fully_shard``: fp32 shards, beside an accelerator in host memory; the job's dtype; fused AdamW."""

    def __init__(self, shape: llama.Shape, job: Job) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        if not torch.distributed.is_initialized():  # one rank
            torch.distributed.init_process_group(
                backend_of(torch.device(job.device)),
                store=torch.distributed.HashStore(),
                rank=0,
                world_size=1,
            )
        mesh = init_device_mesh(torch.device(job.device).type, (int(os.environ.get("WORLD_SIZE", "1")),))
        how: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=DTYPES[job.dtype])}
        if job.device != "cpu":
            how["offload_policy"] = CPUOffloadPolicy()
        with torch.device(job.device):
            self.model = llama.make(shape)
        for block in self.model.model.layers:
            fully_shard(block, **how)
        fully_shard(self.model, **how)
        self.adamw = torch.optim.AdamW(self.model.parameters(), lr=job.lr, fused=True)
        self.clip = job.clip

    def step(self, batch: dict[str, Tensor]) -> float:
        loss = self.model(**batch).loss
        loss.backward()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.adamw.step()
        self.adamw.zero_grad()
        return float(loss)

    def close(self) -> None:
        torch.distributed.destroy_process_group()


class Infinity:
    """infinity, wherever the recipe's budgets put the states."""

    def __init__(self, shape: llama.Shape, job: Job) -> None:
        import infinity

        where = [f"train.dtype={job.dtype}", f"train.device={job.device}"]
        recipe = infinity.load_recipe(overrides=[*where, *job.overrides])
        with torch.device(job.device), infinity.Init(recipe):
            self.model = llama.make(shape)
        if job.lora:
            self.model = infinity.add_lora(self.model, rank=job.lora)
        self.optimizer = infinity.optim.Optimizer(
            self.model, recipe.optim.rule, lr=job.lr, max_grad_norm=job.clip
        )
        self.report: Any = None
        self.micro_rows, self.api = job.micro_rows, infinity
        self.backward = self.layer_by_layer if job.schedule == "layer" else self.one_by_one

    def step(self, batch: dict[str, Tensor]) -> float:
        rows = len(batch["input_ids"])
        value = self.backward(batch, rows // (self.micro_rows or rows))
        with record_function("phase update"):
            self.optimizer.step()
        self.report = self.optimizer.report(loss=value, tokens=batch["input_ids"].numel())
        return value

    def one_by_one(self, batch: dict[str, Tensor], micro_batches: int) -> float:
        parts = {key: value.chunk(micro_batches) for key, value in batch.items()}
        losses = []
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            with nullcontext() if last else self.api.no_sync(self.model):
                with record_function("phase forward"):
                    loss = self.model(**{key: part[micro] for key, part in parts.items()}).loss
                with record_function("phase backward"):
                    (loss / micro_batches).backward()
                losses.append(float(loss))
        return statistics.fmean(losses)

    def layer_by_layer(self, batch: dict[str, Tensor], micro_batches: int) -> float:
        loss = self.api.layer_schedule(self.model, micro_batches)(**batch).loss
        loss.backward()
        return float(loss)

    def close(self) -> None:
        self.optimizer.close()


WAYS: dict[str, type[Plain] | type[FSDP2] | type[Infinity]] = {
    "plain": Plain,
    "plain muon": PlainMuon,
    "fsdp2": FSDP2,
    "infinity": Infinity,
}


class Meter:
    """Takes steps and their times."""

    def __init__(self, way: Any, shape: llama.Shape, rank: int, world: int, job: Job) -> None:
        self.way, self.shape, self.rank, self.world = way, shape, rank, world
        self.at = 0
        self.length, self.device = job.length, torch.device(job.device)
        self.losses: list[float] = []
        self.reports: list[dict[str, Any]] = []
        self.parts: list[tuple[float, float] | None] = []

    def steps(self, count: int, tokens: int) -> list[float]:
        """Seconds of each of ``count`` steps."""
        times = []
        for _ in range(count):
            batch = llama.batch(self.shape, tokens, self.at, self.rank, self.world, self.length)
            batch = {key: value.to(self.device) for key, value in batch.items()}
            start = time.perf_counter()
            self.losses.append(self.way.step(batch))
            synchronize(self.device)
            times.append(time.perf_counter() - start)
            self.reports.append(_figures(self.way))
            self.parts.append(getattr(self.way, "parts", None))
            self.at += 1
        return times


def run(job: Job, rank: int, world: int) -> list[dict[str, Any]]:
    """Construct, then measure phase by phase."""
    shape = llama.Shape(**job.shape)
    start = time.perf_counter()
    way = WAYS[job.way](shape, job)
    made_s = time.perf_counter() - start
    results = []
    for phase in (Phase(**phase) for phase in job.phases):
        meter = Meter(way, shape, rank, world, job)
        measure = beside if phase.read or phase.written else alone
        step_s, moved = measure(meter, phase, job)
        results.append(
            {
                "made_s": made_s,
                "step_s": step_s,
                "losses": meter.losses,
                "reports": meter.reports[-job.steps :],
                "parts": [each for each in meter.parts[-job.steps :] if each],
                "moved": moved,
                "peak_rss": peak_rss_nbytes(),
                "peak_device": peak_device_nbytes(torch.device(job.device)),
            }
        )
    way.close()
    return results


def alone(meter: Meter, phase: Phase, job: Job) -> tuple[list[float], dict[str, float]]:
    """The measured steps' times, after warming up."""
    meter.steps(job.warmup, phase.tokens)
    return meter.steps(job.steps, phase.tokens), {}


def beside(meter: Meter, phase: Phase, job: Job) -> tuple[list[float], dict[str, float]]:
    """The same while fio moves the phase's bytes in the time of a step.

    The load slows the step, and a slower step needs a lower rate: so the rate follows from steps under the
    rate before, until a step takes as long as the rate supposes.
    """
    folder, wanted_s = Path(job.folder), max(phase.alone_s, phase.disk_s)
    for _ in range(_RATES):
        with fio.beside(folder, phase.read / wanted_s, phase.written / wanted_s):
            slowed_s = statistics.median(meter.steps(job.warmup, phase.tokens))
        supposed_s, wanted_s = wanted_s, max(slowed_s, phase.disk_s)
        if abs(wanted_s - supposed_s) < _AS_SUPPOSED * supposed_s:
            break
    with fio.beside(folder, phase.read / wanted_s, phase.written / wanted_s) as moved:
        step_s = meter.steps(job.steps, phase.tokens)
    return step_s, moved


def _figures(way: Any) -> dict[str, Any]:
    """The parts of infinity's own report that the tables use; empty for the others."""
    report = getattr(way, "report", None)
    if report is None:
        return {}
    keys = ("nbytes_read", "nbytes_written", "planned_nbytes_read", "planned_nbytes_written", "stall_s")
    more = ("peak_nbytes", "on_demand", "speculated", "rolled_back")
    return {key: getattr(report, key) for key in (*keys, *more)}


def peak_device_nbytes(device: torch.device) -> int:
    """The most of an accelerator's memory that torch's allocator has had; 0 where it does not say."""
    if device.type == "cpu":
        return 0
    return int(getattr(torch.get_device_module(device), "max_memory_reserved", lambda: 0)())


def peak_rss_nbytes() -> int:
    """The most resident memory that this process has had."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmHWM in /proc/self/status")


def main() -> None:
    job, out = Job(**json.loads(sys.argv[1])), sys.argv[2]
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if world > 1:
        torch.distributed.init_process_group("gloo")
    Path(f"{out}.{rank}").write_text(json.dumps(run(job, rank, world)), encoding="utf-8")


if __name__ == "__main__":
    main()
