r"""The jitted AdamW beside torch's fused AdamW with its casts, and beside a plain copy of its bytes.

For each dtype and number of threads all run in one process and in turns: each round times every contender
once, the medians are compared. Weights and gradients are of the dtype, the master and both moments exact
fp32. Ours updates in place, as shards that stay in host memory, and in chunks from one weight buffer into
another, as the pipeline does. A copy of the same bytes reads half of what an update in place reads and
writes, and writes half.

    python benchmarks/update.py
    python benchmarks/update.py --quick --json update.json

What a CPU with AVX2 would run, on one that has more:

    NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx2,+f16c,+fma,+bmi,+bmi2,+lzcnt,+movbe,+popcnt \
        ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/update.py
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from report import Claim, print_table, write_json

from infinity.core.nbytes import aligned
from infinity.optim.elementwise import ADAMW
from infinity.optim.rules import CHUNK_NUMEL, HostRule
from infinity.optim.state import store_master
from infinity.partition.unit import SHARD_QUANTUM

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: Jitted against torch's fused AdamW, and against the copy.
TARGETS = {"fused": 1.2, "copy": 0.9}


def touched_nbytes(dtype: torch.dtype) -> int:
    """Bytes that the update of one element reads and writes: weight, state, gradient."""
    old_weight = 0 if dtype == torch.float16 else dtype.itemsize  # of which the state has the master
    return 2 * round(ADAMW.layout(dtype).bytes_per_element) + old_weight


class Ours:
    """The rule, in place, and in the pipeline's chunks from one weight buffer into another."""

    def __init__(self, numel: int, dtype: torch.dtype, threads: int) -> None:
        self.rule = HostRule(ADAMW, dtype, threads=threads)
        layout = ADAMW.layout(dtype)
        self.state = layout.views(torch.zeros(layout.state_nbytes(numel), dtype=torch.uint8), numel)
        self.weight, self.out = torch.empty(2, numel, dtype=dtype)
        store_master(layout, torch.randn(numel), self.weight, self.state)
        self.grad = torch.randn(numel).to(dtype)
        self.hyper = ADAMW.hyper({**ADAMW.idle, "lr": 1e-5, "weight_decay": 0.01}, step=10)

    def in_place(self) -> None:
        self.rule.update(self.weight, self.grad, self.state, self.weight, self.hyper)

    def chunks(self) -> None:
        for begin in range(0, self.grad.numel(), CHUNK_NUMEL):
            part = slice(begin, begin + CHUNK_NUMEL)
            state = tuple(field[part] for field in self.state)
            self.rule.update(self.weight[part], self.grad[part], state, self.out[part], self.hyper)


class Fused:
    """``torch.optim.AdamW(fused=True)`` on fp32 masters, with the casts from and to the dtype."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.master = torch.nn.Parameter(torch.randn(numel))
        self.weight, self.grad = self.master.detach().to(dtype), torch.randn(numel).to(dtype)
        self.master.grad = self.grad if dtype == torch.float32 else torch.zeros(numel)
        self.optimizer = torch.optim.AdamW([self.master], lr=1e-5, fused=True)

    def step(self) -> None:
        assert self.master.grad is not None
        if self.grad is not self.master.grad:
            self.master.grad.copy_(self.grad)
        self.optimizer.step()
        if self.grad is not self.master.grad:
            self.weight.copy_(self.master.detach())


class Copy:
    """A copy that reads half of the update's bytes and writes half."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.source, self.target = torch.ones(2, numel * touched_nbytes(dtype) // 2, dtype=torch.uint8)

    def copy(self) -> None:
        self.target.copy_(self.source)


def in_turns(contenders: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds of each contender; each runs once a round, after one round to warm up.

    Every round has another order: who follows the copy finds the caches full of its unwritten bytes.
    """
    shuffled = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, run in shuffled.sample(list(contenders.items()), len(contenders)):
            began = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def measure(numel: int, dtype: torch.dtype, threads: int, rounds: int) -> dict[str, float]:
    """Median seconds of each contender."""
    torch.set_num_threads(threads)
    ours, fused, copy = Ours(numel, dtype, threads), Fused(numel, dtype), Copy(numel, dtype)
    return in_turns(
        {"in place": ours.in_place, "chunks": ours.chunks, "fused": fused.step, "copy": copy.copy}, rounds
    )


def claims(name: str, threads: int, took: dict[str, float]) -> list[Claim]:
    return [
        Claim.at_least(
            f"AdamW {name}, threads={threads}: {ours} / {other}", took[other] / took[ours], target, "x"
        )
        for ours in ("in place", "chunks")
        for other, target in TARGETS.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=int, default=64_000_000, help="elements that are updated")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of every contender")
    parser.add_argument("--quick", action="store_true", help="16 M elements, 9 rounds")
    parser.add_argument("--json", type=Path, help="write the claims to this file")
    options = parser.parse_args()
    numel, rounds = (16_000_000, 9) if options.quick else (options.numel, options.rounds)
    numel = aligned(numel, SHARD_QUANTUM)
    rows: list[list[str]] = []
    found: list[Claim] = []
    for name in options.dtypes:
        for threads in options.threads:
            took = measure(numel, DTYPES[name], threads, rounds)
            found += (new := claims(name, threads, took))
            gb_per_s = numel * touched_nbytes(DTYPES[name]) / took["in place"] / 1e9
            speeds = [f"{numel / took[who] / 1e6:.0f}" for who in ("in place", "chunks", "fused", "copy")]
            rows.append([name, str(threads), *speeds, f"{gb_per_s:.1f}", *(f"{c.value:.2f}" for c in new)])
    print(f"AdamW, {numel / 1e6:.0f} M elements, M elements/s, median of {rounds} rounds")
    ratios = ["/ fused", "/ copy", "chunks / fused", "chunks / copy"]
    print_table(["dtype", "threads", "in place", "chunks", "fused", "copy", "GB/s", *ratios], rows)
    for claim in found:
        if not claim.holds:
            print(f"MISSED  {claim.claim}: {claim.value:.2f}x (target: at least {claim.target})")
    if options.json:
        write_json(options.json, found)


if __name__ == "__main__":
    main()
