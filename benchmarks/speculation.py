"""Steps that clip gradients: updates that start inside backward against those that wait for the norm.

    python benchmarks/speculation.py [--quick] [--json FILE] [--sizes 134M] [--tokens 512]

All states are on NVMe; model and batches are the same in every row. No gradient reaches the norm to which it
would be clipped, except in the last row: there all do, and every step is rolled back (by itself speculation
would pause). Rows are processes that take turns, in another order every round; a ratio is the median of the
rounds' ratios, which stands beside its quartiles. A turn ends when its last update has landed.
"""

import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama
import torch
from options import Options, folder_on
from report import Claim, print_claims, print_table
from turns import Actor
from worker import Infinity, Job

from infinity.planner.updates import Speculation

SIZES = {
    shape.name: shape
    for shape in (llama.Shape("23M", 512, 6, 1376, vocabulary=4_000), llama.MEDIUM, llama.LARGE)
}
#: Norms that all gradients are below, or above (the latter changes the updates, and nothing else).
NEVER, ALWAYS = 1e12, 1e-12


@dataclass(frozen=True, slots=True)
class Way:
    """A row: what it clips to, and what it predicts; None: as steps show it."""

    title: str
    clip: float | None
    predicts: bool | None = None


FREE = Way("no clipping", None)
SPECULATING = Way("clipping, speculating", NEVER)
HOLDING = Way("clipping, updates after the norm", NEVER, predicts=False)
ROLLED_BACK = Way("clipping, always rolled back", ALWAYS, predicts=True)
WAYS = [FREE, SPECULATING, HOLDING, ROLLED_BACK]


class Fixed(Speculation):
    """Speculation whose prediction learns nothing."""

    def learn(self, started: int, *, right: bool) -> None:
        counter = self.counter
        super().learn(started, right=right)
        self.counter = counter


class Trainer(Infinity):
    """A row's model, in a process of its own."""

    def __init__(self, shape: llama.Shape, job: Job, tokens: int, predicts: bool | None, threads: int):
        torch.set_num_threads(threads)
        super().__init__(shape, job)
        self.shape, self.tokens, self.number = shape, tokens, 0
        if predicts is not None:
            speculation = self.optimizer.runtime.executor().updates.speculation
            speculation.__class__, speculation.counter = Fixed, 3 * predicts

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def turn(self, steps: int) -> dict[str, float]:
        """Seconds and bytes per step, and the part of the updates that was speculated and rolled back."""
        reports = []
        began = time.perf_counter()
        for _ in range(steps):
            self.step(llama.batch(self.shape, self.tokens, self.number))
            reports.append(self.report)
            self.number += 1
        self.optimizer.synchronize()
        total: dict[str, float] = {"step_s": time.perf_counter() - began}
        for key in ("nbytes_read", "nbytes_written", "speculated", "rolled_back", "on_demand"):
            total[key] = sum(getattr(report, key) for report in reports)
        return {key: value / steps for key, value in total.items()}


@dataclass(slots=True)
class Row:
    """A way's process, and the figures of each of its turns."""

    actor: Actor
    turns: list[dict[str, float]] = field(default_factory=list)

    def median(self, key: str) -> float:
        return statistics.median(turn[key] for turn in self.turns)


def measure(shape: llama.Shape, tokens: int, options: Any, folder: Path) -> dict[Way, Row]:
    """Turns of every way."""
    overrides = [
        "memory.activations=keep",
        f"memory.host={options.host}",
        "memory.resident=false",
        f"memory.nvme=[{folder}]",
    ]
    rows: dict[Way, Row] = {}
    try:
        for way in WAYS:
            print(f"{shape.name}, {tokens} tokens: {way.title}", file=sys.stderr, flush=True)
            job = Job(
                "infinity", shape.as_dict(), [], 0, 0, str(folder), overrides, clip=way.clip, lr=1e-6,
                dtype=options.dtype,
            )  # fmt: skip
            rows[way] = Row(Actor(Trainer, shape, job, tokens, way.predicts, torch.get_num_threads()))
            rows[way].actor.call("turn", 3)  # recorded, and planned
        for number in range(options.rounds):
            first = number % len(WAYS)
            for way in WAYS[first:] + WAYS[:first]:
                rows[way].turns.append(rows[way].actor.call("turn", options.steps))
    finally:
        for row in rows.values():
            row.actor.close()
    return rows


def ratios(row: Row, other: Row) -> list[float]:
    """Step times, round by round."""
    return [a["step_s"] / b["step_s"] for a, b in zip(row.turns, other.turns, strict=True)]


def table(at: list[str], rows: dict[Way, Row]) -> list[list[str]]:
    return [
        [
            *(*at, way.title, f"{row.median('step_s'):.3f}"),
            *(f"{each:.3f}" for each in quartiles(ratios(row, rows[FREE]))),
            *(f"{row.median(key) / 1e9:.2f}" for key in ("nbytes_read", "nbytes_written")),
            *(f"{row.median(key):.0f}" for key in ("speculated", "rolled_back")),
        ]
        for way, row in rows.items()
    ]


def quartiles(values: list[float]) -> list[float]:
    """The median, then the lower and the upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return [middle, low, high]


def claims(at: str, rows: dict[Way, Row]) -> list[Claim]:
    if any(turn["rolled_back"] or not turn["speculated"] for turn in rows[SPECULATING].turns):
        raise SystemExit(f"{at}: a step was rolled back, or not speculated, that should have been")
    foreseen = sum(turn["on_demand"] for row in rows.values() for turn in row.turns)
    found = statistics.median(ratios(rows[SPECULATING], rows[FREE]))
    return [
        Claim.at_most(f"{at}: {SPECULATING.title} / {FREE.title}", found, 1.02, "x"),
        Claim.at_most(f"{at}: uses that no plan foresaw", foreseen, 0.0),
    ]


COLUMNS = [
    *("size", "tokens", "way", "step s", "/ no clipping", "from", "to", "read GB", "written GB"),
    *("updates speculated", "rolled back"),
]


def main(argv: list[str] | None = None) -> None:
    parser = Options(__doc__, "a small model, three rounds: under a minute", rounds=9)
    parser.add_argument("--sizes", default="134M", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--tokens", default="512,2048", help="of a step")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--host", default="512MiB", help="memory.host")
    options = parser.parse(argv, sizes="23M", tokens="256", rounds=3, steps=2, host="96MiB")
    rows, found = [], []
    with folder_on(options.nvme, "speculation") as folder:
        for size in options.sizes.split(","):
            for tokens in map(int, options.tokens.split(",")):
                measured = measure(SIZES[size], tokens, options, folder)
                rows += table([size, str(tokens)], measured)
                found += claims(f"{size}, {tokens} tokens", measured)
    print_table(COLUMNS, rows)
    print_claims(found, options.json, digits=".4g")


if __name__ == "__main__":
    main()
