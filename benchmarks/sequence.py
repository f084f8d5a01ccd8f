"""Long sequences: whole on one rank, and divided over two, beside plain PyTorch.

A step of one sequence of a small Llama, all activations kept: seconds, and the resident memory of a process
beyond what it has before: of the first step, and of three, after which the heap has holes. The product of
attention grows with the square of the length, and is done by both cores in each way.

With ``--longest GIB`` lengths are doubled, from the first of ``--lengths`` up to the last, as long as a step
of all processes together takes no more memory than that beyond what they had. Plain PyTorch and FSDP2
recompute blocks; ours divides the sequence over two ranks, computes logits in slices and puts activations on
NVMe.

    python benchmarks/sequence.py [--quick] [--json FILE] [--lengths 4096,8192,16384]
    python benchmarks/sequence.py --longest 2 --lengths 2048,131072
"""

import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import processes
import torch
from options import Options, folder_on, say
from report import Claim, print_claims, print_table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from worker import peak_rss_nbytes

WAYS = {"plain PyTorch": 1, "one rank": 1, "two ranks": 2}
LONGEST = {"plain PyTorch, recomputing": 1, "FSDP2 on two ranks, recomputing": 2, "two ranks, to NVMe": 2}


@dataclass(frozen=True, slots=True)
class Job:
    """What each rank measures: ``steps`` of one sequence of ``length`` tokens."""

    way: str
    length: int
    steps: int
    layers: int
    width: int = 256
    vocabulary: int = 1024
    nvme: str = ""  # for activations; empty: they are kept


def model_of(job: Job) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=job.vocabulary,
            hidden_size=job.width,
            intermediate_size=3 * job.width,
            num_hidden_layers=job.layers,
            num_attention_heads=job.width // 32,
            num_key_value_heads=job.width // 64,
            max_position_embeddings=job.length,
        )
    )


def work(job: Job, world: int) -> dict[str, Any]:
    tokens = torch.randint(job.vocabulary, (1, job.length), generator=torch.Generator().manual_seed(1))
    given: dict[str, Tensor] = {"input_ids": tokens, "labels": tokens}
    if "PyTorch" in job.way or "FSDP2" in job.way:
        model = model_of(job)
        if "recomputing" in job.way:
            model.gradient_checkpointing_enable()
        if "FSDP2" in job.way:
            from torch.distributed.fsdp import fully_shard

            for block in model.model.layers:
                fully_shard(block)
            fully_shard(model)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    else:
        import infinity

        settings = ["train.dtype=fp32", "memory.host=4GiB"]
        if job.nvme:
            settings += ["memory.activations=offload", f"memory.nvme={job.nvme}", "memory.logits=slices"]
        else:
            settings += ["memory.activations=keep", "memory.logits=whole"]
        with infinity.Init(infinity.load_recipe(overrides=settings)):
            model = model_of(job)
        optimizer = infinity.AdamW(model, lr=1e-4)
        given = infinity.SequenceRanks(model, world).split(tokens, tokens)
    before, times, losses, peaks = peak_rss_nbytes(), list[float](), list[float](), list[int]()
    for _ in range(job.steps):
        began_s = time.perf_counter()
        loss = model(**given, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        times.append(time.perf_counter() - began_s)
        peaks.append(peak_rss_nbytes() - before)
    return {"step_s": times, "losses": losses, "peaks": peaks}


def measure_longest(limit_gib: float, first: int, last: int, nvme: Path) -> None:
    """Print for each way what doubled lengths take, up to the first that takes more than the limit."""
    rows = []
    for way, world in LONGEST.items():
        length = first
        while length <= last:
            with folder_on(nvme, "sequence") as folder:
                where = str(folder) if "NVMe" in way else ""
                job = Job(way, length, 1, layers=2, width=64, vocabulary=32_000, nvme=where)
                [ranks] = processes.run(job, world, Path(__file__))
            gib = sum(rank["peaks"][0] for rank in ranks) / 2**30
            kept = gib <= limit_gib
            step_s, loss = max(rank["step_s"][0] for rank in ranks), ranks[0]["losses"][0]
            rows.append(
                [f"{length:,}", way, f"{gib:.2f}" if kept else f"({gib:.2f})", f"{step_s:.1f}", f"{loss:.4f}"]
            )
            say("  ".join(rows[-1]))
            if not kept:
                break
            length *= 2
    print_table(["tokens", "way", "GiB of all processes", "step s", "loss of rank 0"], rows)


def main() -> None:
    parser = Options(__doc__, "one short length", dtype=False)
    parser.add_argument("--lengths", default="4096,8192,16384", help="tokens of a sequence")
    parser.add_argument("--longest", type=float, metavar="GIB", help="double lengths within this much memory")
    options = parser.parse(None, lengths="512")
    lengths = [*map(int, options.lengths.split(","))]
    if options.longest is None:
        compare(lengths, 2 if options.quick else 4, options.json)
    else:
        measure_longest(options.longest, lengths[0], lengths[-1], options.nvme)


def compare(lengths: list[int], layers: int, output: Path | None) -> None:
    """Print what each way takes for each length."""
    rows, claims = [], []
    for length in lengths:
        found: dict[str, tuple[float, int, list[float]]] = {}
        for way, world in WAYS.items():
            [ranks] = processes.run(Job(way, length, 3, layers), world, Path(__file__))
            step_s = statistics.median(max(each) for each in zip(*(rank["step_s"] for rank in ranks)))
            losses = [statistics.fmean(each) for each in zip(*(rank["losses"] for rank in ranks))]
            peaks = [max(each) for each in zip(*(rank["peaks"] for rank in ranks))]
            found[way] = step_s, peaks[0], losses
            rows.append([f"{length:,}", way, f"{step_s:.2f}", *(f"{peaks[n] / 2**20:.0f}" for n in (0, -1))])
        (whole_s, whole, losses), (parts_s, parts, divided) = found["one rank"], found["two ranks"]
        apart = max(abs(a / b - 1) for a, b in zip(losses, divided))
        claims += [
            Claim.at_most(f"{length:,}: memory of a first step, two ranks / one", parts / whole, 0.6, "x"),
            Claim.at_most(f"{length:,}: a step, two ranks / one", parts_s / whole_s, 1.15, "x"),
            Claim.at_most(f"{length:,}: losses apart", apart, 1e-5),
        ]
    print_table(["tokens", "way", "step s", "MiB of a process", "after three"], rows)
    print_claims(claims, output)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        if world > 1:
            torch.distributed.init_process_group("gloo")
        Path(f"{sys.argv[2]}.{rank}").write_text(json.dumps([work(Job(**json.loads(sys.argv[1])), world)]))
    else:
        main()
