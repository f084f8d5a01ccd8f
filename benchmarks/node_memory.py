"""Time of a step and memory of all ranks of one machine: weights once, against once for each rank.

Real ranks on CPUs, in fp32: weights in memory that ranks share (``memory.shared=auto``), weights that each
rank gathers (``never``), FSDP2 and DDP. All train the same blocks by AdamW, or adapters on frozen ones. Ways
take turns; a step is the slowest rank's, and cores are those of all ranks together. Memory is the sum of
proportional set sizes (PSS) of all ranks, beyond that before the model was made.

    python benchmarks/node_memory.py [--quick] [--json FILE] [--ranks 2,4] [--rounds 3] [--steps 5]
    python benchmarks/node_memory.py --plans [--quick]
    python benchmarks/node_memory.py --rivals [--quick]

The second form predicts the same beside accelerators: on cards that do not reach each other's memory each
rank uploads whole units, or uploads its part and gathers the others by host memory. The third predicts what
RoundPipe measured on eight RTX 4090 (arXiv:2604.27085), with as many tokens a step as its artifact has.
"""

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from options import Options, say
from processes import run
from report import Claim, print_claims, print_table
from torch import nn

import infinity
from infinity.core.errors import BudgetError
from infinity.predict.dry_run import DryRun, dry_run
from infinity.predict.machines import load_machine
from infinity.recipes.loading import load_recipe

WAYS = ("shared", "gathered", "FSDP2", "DDP")
RANK, TARGETS = 16, ["up", "down"]


@dataclass
class Job:
    way: str
    width: int
    blocks: int
    tokens: int
    steps: int
    adapters: bool


class Block(nn.Module):
    """A residual block of two matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build(job: Job) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(job.width) for _ in range(job.blocks)))


def made(job: Job) -> tuple[nn.Module, Any]:
    """Return the model and its optimizer."""
    if job.way in ("shared", "gathered"):
        shared = "auto" if job.way == "shared" else "never"
        with infinity.Init(
            infinity.load_recipe(
                overrides=["train.dtype=fp32", "memory.host=4GiB", f"memory.shared={shared}"]
            )
        ):
            model = build(job)
        if job.adapters:
            model = infinity.add_lora(model, rank=RANK, alpha=RANK, target_modules=TARGETS)
        return model, infinity.AdamW(model, lr=1e-4)
    model = build(job)
    blocks = [*model]
    if job.adapters:
        config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS)
        model = peft.get_peft_model(model, config)
    if job.way == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-4)


def pss_nbytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def work(job: Job) -> dict[str, Any]:
    """Train on this rank; return the seconds of each step, and the bytes that the model takes."""
    dist.init_process_group("gloo")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    before = pss_nbytes()
    model, optimizer = made(job)
    x = torch.randn(job.tokens, job.width, generator=torch.Generator().manual_seed(dist.get_rank()))
    times, cores, losses = [], [], []
    for _ in range(job.steps + 2):  # the first ones record, and make memory ready
        dist.barrier()
        began_s, core_s = time.perf_counter(), time.process_time()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began_s)
        cores.append(time.process_time() - core_s)
        losses.append(loss.item())
    dist.barrier()
    nbytes = pss_nbytes() - before
    dist.barrier()
    if isinstance(optimizer, infinity.AdamW):
        optimizer.close()
    dist.destroy_process_group()
    return {"step_s": times[2:], "core_s": cores[2:], "nbytes": nbytes, "losses": losses}


def measure(given: Any, ranks: int, adapters: bool) -> dict[str, list[tuple[float, ...]]]:
    """Return seconds of a step, of all cores, and bytes of all ranks, by way: a row for each round."""
    found: dict[str, list[tuple[float, ...]]] = {way: [] for way in WAYS}
    losses = {}
    for _ in range(given.rounds):
        for way in WAYS:
            job = Job(way, given.width, given.blocks, given.tokens, given.steps, adapters)
            [phase] = run(job, ranks, Path(__file__))
            step_s = statistics.median(map(max, zip(*(rank["step_s"] for rank in phase))))
            core_s = statistics.median(map(sum, zip(*(rank["core_s"] for rank in phase))))
            found[way].append((step_s, core_s, sum(rank["nbytes"] for rank in phase) / 2**20))
            losses[way] = [rank["losses"] for rank in phase]
    if losses["shared"] != losses["gathered"]:
        raise RuntimeError("losses differ between weights that are shared and weights that are gathered")
    return found


def report(given: Any) -> list[Claim]:
    rows, claims = list[list[str]](), list[Claim]()
    for ranks in map(int, given.ranks.split(",")):
        for adapters in (False, True):
            what = f"{ranks} ranks, {'adapters' if adapters else 'all'}"
            say(f"{what} of {given.blocks} blocks of width {given.width} on {os.cpu_count()} cores")
            found = measure(given, ranks, adapters)
            for way, figures in found.items():
                own = [statistics.median(each) for each in zip(*figures)]
                pairs = [zip(*pair) for pair in zip(found["shared"], figures, strict=True)]
                ratios = [statistics.median(a / b for a, b in each) for each in zip(*pairs)]
                shown = [f"{own[0]:.3f}", f"{own[1]:.3f}", f"{own[2]:.0f}"]
                rows.append([what, way, *shown, *(f"{ratio:.2f}x" for ratio in ratios)])
                for of, ratio in zip(("step", "cores", "memory"), ratios) if way != "shared" else ():
                    claims.append(Claim.at_most(f"{what}: {of}, shared to {way}", ratio, 1.0))
    columns = ["trained", "way", "step (s)", "cores (s)", "memory (MiB)", "shared: step", "cores", "memory"]
    print_table(columns, rows)
    return claims


#: What is planned on several cards: a name, sizes of the model, and what its recipe says.
PLANS: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("Llama-3 8B, full", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "rope_theta": 500000.0, "max_position_embeddings": 8192,
    }, ()),
    ("Qwen3-32B, LoRA", {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936,
        "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    }, (f"lora.rank={RANK}", "lora.target_modules=all-linear")),
)  # fmt: skip
#: A model of ``PLANS`` or plans.py, what the recipe says beyond the common part, sequences of 2,048 tokens a
#: step, and the tokens/s that RoundPipe measured; sequences in a micro-batch, and schedules, that are tried.
RIVALS: tuple[tuple[str, str, tuple[str, ...], int, float], ...] = (
    ("Llama-3.1 8B, full", "Llama-3 8B, full", (), 256, 24_275),
    ("Qwen3-32B, full", "Qwen3-32B, LoRA", (), 128, 5_516),
    ("Qwen3-235B, LoRA", "Qwen3-235B-A22B", (
        "lora.rank=32", "lora.target_modules=[q_proj,k_proj,v_proj,o_proj]", "memory.nvme=[nvme]",
    ), 64, 1_820),
)  # fmt: skip
SIZES, SCHEDULES, SUMS = (1, 2, 4, 8), ("step", "layer"), ("fp32", "fp16")
_COMMON = (
    "model.seq_len=2048", "memory.activations=recompute", "optim.max_grad_norm=null", "train.dtype=bf16",
)  # fmt: skip


def plans(cards: Sequence[int], batches: Sequence[tuple[int, int]]) -> None:
    """Print what the clock says of RTX 4090 in a server with 800 GB.

    ``batches`` are sequences in a micro-batch, and micro-batches.
    """
    rows = []
    for name, config, overrides in PLANS:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            for number in cards:
                on = load_machine(
                    "server-4090-800g", [f"devices.per_node={number}", "links.node_host_bytes_per_s=180e9"]
                )
                like: DryRun | None = None
                for size, micro_batches in batches:
                    runs = []
                    for shared in ("always", "never"):
                        more = [
                            f"train.batch_size={size}", f"train.accumulate={micro_batches}",
                            f"memory.shared={shared}", f"memory.host={600 // number}GB",
                        ]  # fmt: skip
                        recipe = load_recipe(None, [f"model.path={folder}", *_COMMON, *overrides, *more])
                        runs.append(like := dry_run(recipe, on, number, like))
                    lacks = "; ".join(runs[0].missing()) or "fits"
                    one, other = runs
                    rows.append([
                        name, f"{number}", f"{one.tokens:,}", f"{other.tokens_per_s:,.0f}",
                        f"{one.tokens_per_s:,.0f}", f"{one.tokens_per_s / other.tokens_per_s:.2f}x",
                        f"{one.cost.bottleneck}", lacks,
                    ])  # fmt: skip
                    say(" ".join(rows[-1]))
    columns = ["model", "cards", "tokens a step", "gathered", "shared", "ratio", "bound by", "memory"]
    print_table(columns, rows)


def rivals(names: Sequence[str], sizes: Sequence[int], schedules: Sequence[str]) -> None:
    """Print the best plan of each row of ``RIVALS``, by the dtype in which products add up."""
    from plans import CONFIGS

    configs = CONFIGS | {name: config for name, config, _ in PLANS}
    on = load_machine("server-4090-800g", ["devices.per_node=8", "links.node_host_bytes_per_s=180e9"])
    rows = []
    for name, model, overrides, sequences, theirs in (each for each in RIVALS if each[0] in names):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(configs[model]))
            like: DryRun | None = None
            for sums in SUMS:
                found = []
                for size, schedule in itertools.product(sizes, schedules):
                    given = [
                        f"model.path={folder}", *_COMMON, *overrides, f"train.batch_size={size}",
                        f"train.accumulate={sequences // 8 // size}", f"train.schedule={schedule}",
                        "train.dtype=fp16", f"train.accumulate_dtype={sums}", "memory.host=92GB",
                        "memory.logits=slices",
                    ]  # fmt: skip
                    try:
                        like = each = dry_run(load_recipe(None, given), on, 8, like)
                    except BudgetError as error:
                        say(f"{name}, {size} x {sequences // 8 // size}, {schedule}: {error}")
                        continue
                    lacks = "; ".join(each.missing())
                    say(f"{name}, sums {sums}, {size} x {sequences // 8 // size}, {schedule}: "
                        f"{each.tokens_per_s:,.0f} {lacks}")  # fmt: skip
                    if not lacks:
                        found.append((each.tokens_per_s, size, schedule, each))
                if not found:
                    rows.append([name, sums, *[""] * 2, f"{theirs:,.0f}", *[""] * 3, "does not fit"])
                    continue
                ours, size, schedule, best = max(found, key=lambda each: each[0])
                busy = {key: s / best.cost.step_s for key, s in best.cost.busy_s.items() if s}
                shares = ", ".join(f"{key} {share:.0%}" for key, share in sorted(busy.items(), key=_share))
                rows.append([
                    name, sums, f"{size} x {sequences // 8 // size} {schedule}", f"{ours:,.0f}",
                    f"{theirs:,.0f}", f"{ours / theirs:.2f}x", f"{best.cost.step_s:.2f}", f"{best.mfu:.0%}",
                    shares,
                ])  # fmt: skip
    columns = ["model", "sums", "micro-batches", "tokens/s", "RoundPipe", "ratio", "step (s)", "MFU", "busy"]
    print_table(columns, rows)


def _share(item: tuple[str, float]) -> float:
    return -item[1]


def main(argv: list[str] | None = None) -> None:
    options = Options(__doc__, "two ranks, small blocks, one round", rounds=3, dtype=False)
    options.add_argument("--ranks", default="2,4", help="numbers of ranks")
    options.add_argument("--width", type=int, default=1024)
    options.add_argument("--blocks", type=int, default=8)
    options.add_argument("--tokens", type=int, default=256, help="of each rank in a step")
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--plans", action="store_true", help="predict steps on cards without peers")
    options.add_argument("--rivals", action="store_true", help="predict what RoundPipe measured")
    given = options.parse(argv, ranks="2", width=128, blocks=3, tokens=16, steps=1, rounds=1)
    if given.plans:
        plans(*((2,), ((1, 1),)) if given.quick else ((2, 8), ((1, 1), (2, 1), (2, 4))))
    elif given.rivals:
        small = given.quick
        rivals([each[0] for each in (RIVALS[:1] if small else RIVALS)], SIZES[: 1 if small else 4],
               SCHEDULES[: 1 if small else 2])  # fmt: skip
    else:
        print_claims(report(given), given.json and Path(given.json))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        Path(f"{sys.argv[2]}.{os.environ['RANK']}").write_text(
            json.dumps([work(Job(**json.loads(sys.argv[1])))]), encoding="utf-8"
        )
    else:
        main()
