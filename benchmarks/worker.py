"""One way of training, in a process of its own: ``python worker.py JOB OUT``.

JOB is a :class:`Job` as JSON; into ``OUT.rank`` goes a list of :class:`Phase` results. Each
way is a small class with ``step(batch) -> loss``, and nothing of the others is imported.
"""

import contextlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import fio
import llama
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps of one size, with a load on the disk beside them where rates are given."""

    tokens: int
    read_per_s: float = 0.0
    written_per_s: float = 0.0


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


class Plain:
    """PyTorch in memory: bf16 weights, fp32 masters, fused AdamW and the casts between them."""

    def __init__(self, shape: llama.Shape, job: Job) -> None:
        self.model = llama.make(shape).bfloat16()
        self.weights = list(self.model.parameters())
        self.masters = [p.detach().float() for p in self.weights]
        self.adamw = torch.optim.AdamW(self.masters, lr=job.lr, fused=True)

    def step(self, batch: dict[str, Tensor]) -> float:
        loss = self.model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters):
                master.grad = None if weight.grad is None else weight.grad.float()
                weight.grad = None
            self.adamw.step()
            for weight, master in zip(self.weights, self.masters):
                weight.copy_(master)
                master.grad = None
        return float(loss)

    def close(self) -> None:
        pass


class FSDP2:
    """``fully_shard`` in memory: fp32 shards, bf16 compute, fused AdamW."""

    def __init__(self, shape: llama.Shape, job: Job) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        self.model = llama.make(shape)
        for block in self.model.model.layers:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.adamw = torch.optim.AdamW(self.model.parameters(), lr=job.lr, fused=True)

    def step(self, batch: dict[str, Tensor]) -> float:
        loss = self.model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adamw.step()
        self.adamw.zero_grad()
        return float(loss)

    def close(self) -> None:
        torch.distributed.destroy_process_group()


class Infinity:
    """infinity, wherever the recipe's budgets put the states."""

    def __init__(self, shape: llama.Shape, job: Job) -> None:
        import infinity

        recipe = infinity.load_recipe(overrides=["train.dtype=bf16", *job.overrides])
        with infinity.Init(recipe):
            self.model = llama.make(shape)
        self.optimizer = infinity.AdamW(self.model, lr=job.lr, max_grad_norm=1.0)
        self.report: Any = None

    def step(self, batch: dict[str, Tensor]) -> float:
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        value = float(loss)
        self.report = self.optimizer.report(loss=value, tokens=batch["input_ids"].numel())
        return value

    def close(self) -> None:
        self.optimizer.close()


WAYS: dict[str, type[Plain] | type[FSDP2] | type[Infinity]] = {
    "plain": Plain,
    "fsdp2": FSDP2,
    "infinity": Infinity,
}


def run(job: Job, rank: int, world: int) -> list[dict[str, Any]]:
    """Construct, then measure phase by phase."""
    shape = llama.Shape(**job.shape)
    start = time.perf_counter()
    way = WAYS[job.way](shape, job)
    made_s = time.perf_counter() - start
    results, at = [], 0
    for phase in (Phase(**phase) for phase in job.phases):
        load: Any = contextlib.nullcontext({})
        if (phase.read_per_s or phase.written_per_s) and rank == 0:
            load = fio.beside(Path(job.folder), phase.read_per_s, phase.written_per_s)
        step_s, losses, reports = [], [], []
        with load as moved:
            for index in range(job.warmup + job.steps):
                batch = llama.batch(shape, phase.tokens, at, rank, world)
                start = time.perf_counter()
                losses.append(way.step(batch))
                if index >= job.warmup:
                    step_s.append(time.perf_counter() - start)
                    reports.append(_figures(way))
                at += 1
        results.append(
            {
                "phase": asdict(phase),
                "made_s": made_s,
                "step_s": step_s,
                "losses": losses,
                "reports": reports,
                "moved": moved,
                "peak_rss": peak_rss_nbytes(),
            }
        )
    way.close()
    return results


def _figures(way: Any) -> dict[str, Any]:
    """The parts of infinity's own report that the tables use; empty for the others."""
    report = getattr(way, "report", None)
    if report is None:
        return {}
    keys = ("nbytes_read", "nbytes_written", "planned_nbytes_read", "planned_nbytes_written", "stall_s")
    return {key: getattr(report, key) for key in (*keys, "peak_nbytes", "on_demand")}


def peak_rss_nbytes() -> int:
    """The most resident memory that this process has had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmHWM in /proc/self/status")


def main() -> None:
    job, out = Job(**json.loads(sys.argv[1])), sys.argv[2]
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if world > 1:
        torch.distributed.init_process_group("gloo")
    Path(f"{out}.{rank}").write_text(json.dumps(run(job, rank, world)))


if __name__ == "__main__":
    main()
