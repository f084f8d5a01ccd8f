"""Loading and exporting a checkpoint: beside fio on the same bytes, and beside plain transformers.

    python benchmarks/checkpoint.py [--quick] [--json FILE] [--sizes 134M,367M]
    python benchmarks/checkpoint.py --params 1.2B --rss 4GiB    # load, train 3 steps, export; 1 and 2 ranks

Files are read from the drive, not from the page cache, and count as saved when they are on it. fio
reads an old file while it writes a new one, of just the bytes that the load or the export moves: a load
reads the checkpoint and writes the states, an export reads the weights and writes the directory.
"""

import argparse
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import fio
import llama
import processes
from capacity import nbytes_of, number_of, process_nbytes
from checkpoint_worker import Job
from options import Options, folder_on, say
from report import Claim, print_claims, print_table
from train import SIZES

WORKER = Path(__file__).with_name("checkpoint_worker.py")
MIB = 1 << 20


class Bench:
    """One size; ``self.figures[way]`` fills round by round."""

    def __init__(self, shape: llama.Shape, options: argparse.Namespace, folder: Path) -> None:
        self.shape, self.options, self.folder = shape, options, folder
        self.source = folder / "source"
        self.figures: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self.fio_s: defaultdict[str, list[float]] = defaultdict(list)  # of "load" and "save"

    def measure(self, way: str, world: int = 1, steps: int = 0) -> list[dict[str, Any]]:
        """One job in fresh processes; its ranks' figures."""
        say(f"{self.shape.name}: {way}, {world} rank{'s' if world > 1 else ''}")
        job = Job(
            way=way,
            shape=self.shape.as_dict(),
            source=str(self.source),
            out=str(self.source if way == "make" else self.folder / "out"),
            overrides=[
                f"memory.host={self.options.host // world}",
                *self.limits(world),
                f"memory.nvme=[{self.folder / 'nvme'}]",
                "memory.resident=false",
            ],
            steps=steps,
            tokens=self.options.tokens,
            dtype=self.options.dtype,
        )
        [ranks] = processes.run(job, world, WORKER)
        return ranks

    def limits(self, world: int) -> list[str]:
        """What keeps a rank within ``--rss``, where that is the question."""
        if not self.options.params:
            return []
        device = self.options.rss - process_nbytes(self.shape) - self.options.host // world
        return [f"memory.device={device}", "memory.activations=keep"]

    def speed(self) -> None:
        """All ways in turns, and fio with the bytes that infinity moved."""
        self.measure("make")
        nbytes = sum(path.stat().st_size for path in self.source.glob("*.safetensors"))
        for _ in range(self.options.rounds):
            for way in ("plain", "infinity"):
                self.figures[way] += self.measure(way)
            if fio.available():
                last = self.figures["infinity"][-1]
                moved = {"load": (nbytes, last["written"]), "save": (last["read"], nbytes)}
                for what, (read, written) in moved.items():
                    whole = read // MIB * MIB, written // MIB * MIB
                    self.fio_s[what].append(fio.seconds_for(self.folder, *whole))

    def seconds(self, way: str, what: str) -> float:
        return statistics.median(figure[f"{what}_s"] for figure in self.figures[way])

    def speed_rows(self) -> list[list[str]]:
        rows = []
        for what in ("load", "save"):
            mine = self.seconds("infinity", what)
            for title, seconds in self.compared(what):
                rows.append([self.shape.name, what, title, f"{seconds:.2f}", f"{seconds / mine:.2f}"])
        return rows

    def compared(self, what: str) -> list[tuple[str, float]]:
        found = [("infinity, to and from NVMe", self.seconds("infinity", what))]
        found.append(("plain transformers, in memory", self.seconds("plain", what)))
        if self.fio_s:
            found.append(("fio, the same bytes", statistics.median(self.fio_s[what])))
        return found

    def speed_claims(self) -> list[Claim]:
        claims = []
        for what in self.fio_s:
            value = statistics.median(self.fio_s[what]) / self.seconds("infinity", what)
            text = f"{self.shape.name}: {what}, speed / fio on the same bytes"
            claims.append(Claim.at_least(text, value, 0.8, "x"))
        return claims


def whole_way(bench: Bench, worlds: list[int], rss: int) -> tuple[list[list[str]], list[Claim]]:
    """Load, train, export, with a model that does not fit: rows and claims about memory."""
    rows, claims = [], []
    bench.measure("make")
    for world in worlds:
        ranks = bench.measure("infinity", world, steps=3)
        peak = max(rank["peak_rss"] for rank in ranks)
        losses = [statistics.fmean(values) for values in zip(*(rank["losses"] for rank in ranks))]
        times = (f"{max(rank[key] for rank in ranks):.1f}" for key in ("load_s", "save_s"))
        shown = " ".join(f"{loss:.3f}" for loss in losses)
        rows.append([bench.shape.name, str(world), *times, f"{peak / 2**30:.2f}", shown])
        text = f"{bench.shape.name}, {world} rank(s): peak RSS of a rank, load, 3 steps and export"
        claims.append(Claim.at_most(text, peak / 2**30, rss / 2**30, " GiB"))
    return rows, claims


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = Options(__doc__, "a small model, one round: under a minute", rounds=3)
    parser.add_argument("--sizes", default="134M,367M", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--params", type=number_of, help="in place of speed: the whole way at this size")
    parser.add_argument("--rss", type=nbytes_of, default=4 << 30, help="most resident memory of a rank")
    parser.add_argument("--ranks", default="1,2", help="with --params")
    parser.add_argument("--tokens", type=int, default=512, help="per step, with --params")
    parser.add_argument("--host", type=nbytes_of, default=256 * MIB, help="memory.host, all ranks together")
    return parser.parse(argv, sizes="134M", rounds=1)


def main(argv: list[str] | None = None) -> None:
    options = options_of(argv)
    shapes = [SIZES[name] for name in options.sizes.split(",")]
    if options.params:
        shapes = [llama.shape_near(options.params)]
    rows, claims = [], []
    for shape in shapes:
        with folder_on(options.nvme, "checkpoint") as folder:
            bench = Bench(shape, options, folder)
            if options.params:
                worlds = [int(world) for world in options.ranks.split(",")]
                columns = ["size", "ranks", "load s", "export s", "peak RSS GiB", "losses"]
                rows, claims = whole_way(bench, worlds, options.rss)
            else:
                columns = ["size", "what", "way", "s", "/ infinity"]
                bench.speed()
                rows += bench.speed_rows()
                claims += bench.speed_claims()
    print_table(columns, rows)
    if not fio.available():
        say("fio is not installed: no claim against it")
    print_claims(claims, options.json, wanted="at most" if options.params else "at least")


if __name__ == "__main__":
    main()
