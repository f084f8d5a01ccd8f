"""Micro-batches one by one, or all through a block before the next: bytes and time of a step.

Everything is on NVMe, and ``memory.device`` keeps little more than two units of weights. One by one,
a step of M micro-batches reads the weights about 2 M times; layer by layer, twice. Layer by layer
recomputes blocks, so it stands beside the ordinary schedule with and without recomputation. Each row
runs in processes of its own, and the rows take turns in rounds.

    python benchmarks/schedule.py [--quick] [--json FILE] [--size 134M] [--lengths 64,256] [--micro 1,2,4,8]
"""

import argparse
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import llama
import processes
from options import Options, folder_on
from processes import Measured
from report import Claim, print_claims, print_table
from worker import Job, Phase

from infinity.device.machine import DTYPES

SIZES = {
    shape.name: shape
    for shape in (llama.Shape("23M", 512, 6, 1376, vocabulary=4_000), llama.MEDIUM, llama.LARGE)
}
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Way:
    """A row of the table, for each number of micro-batches."""

    title: str
    schedule: str
    checkpoint: bool = False


STEP, RECOMPUTING, LAYER = (
    Way("one by one", "step"),
    Way("one by one, recomputing", "step", checkpoint=True),
    Way("layer by layer", "layer"),
)


class Bench:
    """Every way with every number of micro-batches; ``figures[way, length, micro_batches]``."""

    def __init__(self, shape: llama.Shape, options: argparse.Namespace, folder: Path) -> None:
        self.shape, self.options, self.folder = shape, options, folder
        self.figures: dict[tuple[Way, int, int], Measured] = {}

    def run(self) -> None:
        ways = [STEP, RECOMPUTING, LAYER]
        for number in range(self.options.rounds):
            for length in self.options.lengths:
                # Every other round runs backwards: a machine that slows down favours nobody.
                for way in ways if number % 2 == 0 else ways[::-1]:
                    self.measure(way, length)

    def measure(self, way: Way, length: int) -> None:
        """Steps of every number of micro-batches, each of them one sequence."""
        print(f"{self.shape.name}: {way.title}, {length} tokens", file=sys.stderr, flush=True)
        job = Job(
            way="infinity",
            shape=replace(self.shape, checkpoint=way.checkpoint).as_dict(),
            phases=[asdict(Phase(length * micro_batches)) for micro_batches in self.options.micro],
            warmup=3,
            steps=self.options.steps,
            folder=str(self.folder),
            overrides=self.overrides(),
            length=length,
            micro_rows=1,
            schedule=way.schedule,
            dtype=self.options.dtype,
        )
        for micro_batches, ranks in zip(self.options.micro, processes.run(job)):
            self.figures.setdefault((way, length, micro_batches), Measured()).add(ranks)

    def overrides(self) -> list[str]:
        """Gradients wait for their norm; beside them there is room for four of the largest units."""
        largest = max(self.shape.vocabulary * self.shape.hidden, self.shape.block_numel)
        rounding = 2 * MIB * (2 * self.shape.layers + 16)
        itemsize = DTYPES[self.options.dtype].itemsize
        return [
            "memory.activations=keep",  # the budget is of units alone
            f"memory.device={itemsize * (self.shape.numel + 4 * largest) + rounding}",
            f"memory.host={self.options.host}",
            "memory.resident=false",
            f"memory.nvme=[{self.folder}]",
            f"run.dir={self.folder / 'runs'}",
        ]

    def rows(self) -> list[list[str]]:
        return [
            self._row(*key) for key in sorted(self.figures, key=lambda key: (key[1], key[2], key[0].title))
        ]

    def _row(self, way: Way, length: int, micro_batches: int) -> list[str]:
        found = self.figures[way, length, micro_batches]
        tokens = length * micro_batches
        return [
            *(self.shape.name, str(length), str(micro_batches), way.title),
            f"{found.read / 1e9:.2f}",
            f"{found.read / self.shape.numel:.1f}",
            f"{found.written / self.shape.numel:.1f}",
            f"{found.median_s:.2f}",
            f"{tokens / found.median_s:.0f}",
            f"{found.peak_rss / 1e9:.2f}",
        ]

    def claims(self) -> list[Claim]:
        claims: list[Claim] = []
        least, most = min(self.options.micro), max(self.options.micro)
        for length in self.options.lengths:
            at = f"{self.shape.name}, {most} x {length} tokens"
            layer = self.figures[LAYER, length, most]
            few = self.figures[LAYER, length, least]
            claims += [
                Claim.at_most(
                    f"{at}: bytes read layer by layer / with {least}", layer.read / few.read, 1.0, "x"
                ),
                Claim.at_most(
                    f"{at}: runs with uses that no plan foresaw", float(not layer.planned), 0.0, ""
                ),
            ]
            other = self.figures[RECOMPUTING, length, most]
            text = f"{at}: step layer by layer / {RECOMPUTING.title}"
            claims.append(Claim.at_most(text, layer.median_s / other.median_s, 1.0, "x"))
        return claims


COLUMNS = [
    *("size", "tokens of each", "M", "way", "read GB", "read B/param", "written B/param"),
    *("step s", "tokens/s", "peak RSS GB"),
]


def options_of(argv: list[str] | None) -> Any:
    parser = Options(__doc__, "a small model, one round: under a minute", rounds=2)
    parser.add_argument("--size", default="134M", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--lengths", default="64,256", help="tokens of a micro-batch, which is one sequence")
    parser.add_argument("--micro", default="1,2,4,8", help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=4, help="measured steps per round")
    parser.add_argument("--host", default="96MiB", help="memory.host")
    options = parser.parse(argv, size="23M", lengths="32", micro="1,4", rounds=1, steps=3)
    options.lengths = [int(length) for length in options.lengths.split(",")]
    options.micro = [int(number) for number in options.micro.split(",")]
    return options


def main(argv: list[str] | None = None) -> None:
    options = options_of(argv)
    with folder_on(options.nvme, "schedule") as folder:
        bench = Bench(SIZES[options.size], options, folder)
        bench.run()
    print_table(COLUMNS, bench.rows())
    claims = bench.claims()
    print_claims(claims, options.json)


if __name__ == "__main__":
    main()
