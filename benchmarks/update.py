"""The compiled AdamW beside torch's fused AdamW with its casts, and beside a plain copy of its bytes.

All in one process and in turns: each round times every contender once, the medians are compared. Weights
and gradients are bfloat16, the master and both moments exact fp32. The update reads 14 bytes per
element (weight, remainder, two moments, gradient) and writes 12, so a copy of the same bytes reads 13
and writes 13.

    python benchmarks/update.py
    python benchmarks/update.py --quick --json update.json
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from infinity.optim.master import initial_state
from report import Claim, print_table, write_json

from infinity.core.extent import aligned
from infinity.optim.layout import CHUNK_NUMEL, GRAIN_NUMEL, StateLayout
from infinity.optim.rules import AdamWRule, Hyper

#: Bytes that the update reads and writes per element: weight, remainder, exp_avg, exp_avg_sq; gradient.
TOUCHED_NBYTES = 2 * (2 + 2 + 4 + 4) + 2


class Ours:
    """The rule, whole and in the pipeline's chunks, from one weight buffer into another."""

    def __init__(self, numel: int, threads: int) -> None:
        self.rule = AdamWRule(torch.bfloat16, threads=threads)
        self.rule.prepare()
        layout = StateLayout.of(torch.bfloat16)
        state = torch.empty(layout.state_nbytes(numel), dtype=torch.uint8)
        self.weight, self.out = torch.empty(2, numel, dtype=torch.bfloat16)
        initial_state(layout, torch.randn(numel), self.weight, state)
        self.state = layout.views(state, numel)
        self.grad = torch.randn(numel).to(torch.bfloat16)
        self.hyper = Hyper(lr=1e-5, weight_decay=0.01, step=10).tensor()

    def whole(self) -> None:
        self.rule.update(self.weight, self.grad, self.state, self.out, self.hyper)

    def chunks(self) -> None:
        for begin in range(0, self.grad.numel(), CHUNK_NUMEL):
            part = slice(begin, begin + CHUNK_NUMEL)
            state = tuple(field[part] for field in self.state)
            self.rule.update(self.weight[part], self.grad[part], state, self.out[part], self.hyper)


class Fused:
    """``torch.optim.AdamW(fused=True)`` on fp32 masters, with the casts from and to bfloat16."""

    def __init__(self, numel: int) -> None:
        self.master = torch.nn.Parameter(torch.randn(numel))
        self.master.grad = torch.zeros(numel)
        self.weight = self.master.detach().to(torch.bfloat16)
        self.grad = torch.randn(numel).to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW([self.master], lr=1e-5, fused=True)

    def step(self) -> None:
        assert self.master.grad is not None
        self.master.grad.copy_(self.grad)
        self.optimizer.step()
        self.weight.copy_(self.master.detach())


class Copy:
    """A copy that reads half of the update's bytes and writes half."""

    def __init__(self, numel: int) -> None:
        self.source, self.target = torch.ones(2, numel * TOUCHED_NBYTES // 2, dtype=torch.uint8)

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


def claims(took: dict[str, float]) -> list[Claim]:
    ratios = [
        ("compiled AdamW against torch fused with casts", took["fused"] / took["compiled"], 1.4),
        ("compiled AdamW against a copy of its bytes", took["copy"] / took["compiled"], 0.9),
        ("the same in chunks, against fused", took["fused"] / took["in chunks"], 1.4),
        ("the same in chunks, against the copy", took["copy"] / took["in chunks"], 0.9),
    ]
    return [
        Claim(claim=what, value=value, target=target, unit="x", holds=value >= target)
        for what, value, target in ratios
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--numel", type=int, default=100_000_000, help="elements that are updated")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of every contender")
    parser.add_argument("--quick", action="store_true", help="30 M elements, 15 rounds")
    parser.add_argument("--json", type=Path, help="write the claims to this file")
    options = parser.parse_args()
    numel, rounds = (30_000_000, 15) if options.quick else (options.numel, options.rounds)
    numel = aligned(numel, GRAIN_NUMEL)
    torch.set_num_threads(options.threads)
    ours, fused, copy = Ours(numel, options.threads), Fused(numel), Copy(numel)
    took = in_turns(
        {"compiled": ours.whole, "in chunks": ours.chunks, "fused": fused.step, "copy": copy.copy}, rounds
    )
    print(f"{numel / 1e6:.0f} M elements, {options.threads} threads, median of {rounds} rounds")
    rows = [
        [
            name,
            f"{seconds * 1e3:.1f}",
            f"{numel / seconds / 1e6:.0f}",
            f"{numel * TOUCHED_NBYTES / seconds / 1e9:.1f}",
        ]
        for name, seconds in took.items()
    ]
    print_table(["AdamW, bf16", "ms", "M elements/s", "GB/s of 26 B each"], rows)
    found = claims(took)
    verdicts = [[c.claim, f"{c.value:.2f}", f"{c.target:.2f}", "yes" if c.holds else "no"] for c in found]
    print_table(["claim", "ratio", "target", "holds"], verdicts)
    if options.json:
        write_json(options.json, found)


if __name__ == "__main__":
    main()
