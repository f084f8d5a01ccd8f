"""A model far larger than the memory allowed: it trains, within the budget, near the limit.

The model never fits, so its limit is put together from parts that do, all in one run: plain
PyTorch with one block and with three gives the time of a block (forward, recomputation,
backward, update) and of the rest (embedding, head, loss), once alone and once while fio moves
the big run's bytes beside it; and fio's mixed rate gives the time of its bytes.

    python benchmarks/capacity.py --params 1.2B --rss 4GiB
    python benchmarks/capacity.py --params 4B
"""

import argparse
import re
import shutil
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import fio
import llama
import processes
from options import Options, folder_on, say
from processes import Measured
from report import Claim, print_claims, print_table
from train import as_planned, bytes_per_parameter
from worker import Job, Phase

#: Bytes on disk per parameter: an exact fp32 master, in one part or two, and two moments, per version.
STATE_PER_PARAMETER = 12

#: What torch, activations, logits and one unit's construction take besides the states' pools, for each
#: element of the model's width (bytes): 3 GiB at 2,048 and 4.5 at 3,072, as measured with 2,048 tokens.
PROCESS_NBYTES_PER_WIDTH = 1536 << 10


def process_nbytes(shape: llama.Shape) -> int:
    """What a process takes besides its pools (bytes)."""
    return PROCESS_NBYTES_PER_WIDTH * shape.hidden


class Capacity:
    """One big shape and the small ones that bound it."""

    def __init__(self, shape: llama.Shape, options: argparse.Namespace, folder: Path) -> None:
        self.shape, self.options, self.folder = shape, options, folder
        self.mixed_per_s: list[float] = []

    def run(self) -> None:
        say(f"{self.shape.name}: {self.shape.numel / 1e9:.3f} B parameters, {self.shape.layers} blocks")
        self.has_fio = fio.available()
        self.versions = self.options.versions or self.versions_that_fit()
        self.big = self.measure("infinity", self.shape, Phase(self.options.tokens), self.overrides())
        read, written = self.big.read, self.big.written
        if not read:
            read, written = (n * self.shape.numel for n in bytes_per_parameter(self.options.dtype))
        self.nbytes = read + written
        if self.has_fio:
            fio.prepare(self.folder)
            times = range(1 if self.options.quick else 3)
            self.mixed_per_s = [fio.mixed_bytes_per_s(self.folder, read, written) for _ in times]
        small = [replace(self.shape, layers=layers) for layers in (1, 3)]
        phase = Phase(self.options.tokens)
        alone = [self.measure("plain", shape, phase).median_s for shape in small]
        self.alone_s = self.whole(*alone)
        self.beside_s = None
        if self.has_fio:
            # The small ones get the share of the bytes that their part of the big step gets.
            shares = [part_s / self.alone_s for part_s in alone]
            phases = [
                Phase(self.options.tokens, read * share, written * share, part_s, self.disk_s * share)
                for share, part_s in zip(shares, alone)
            ]
            loaded = [self.measure("plain", *pair).median_s for pair in zip(small, phases)]
            self.beside_s = self.whole(*loaded)

    def whole(self, one: float, three: float) -> float:
        """The time of the whole model (s), from those of one block and of three."""
        block = max(0.0, three - one) / 2  # a disturbed machine may time three below one
        return one + (self.shape.layers - 1) * block

    @property
    def disk_s(self) -> float:
        return self.nbytes / statistics.median(self.mixed_per_s)

    @property
    def limit_s(self) -> float | None:
        return None if self.beside_s is None else max(self.beside_s, self.disk_s)

    def measure(
        self, way: str, shape: llama.Shape, phase: Phase, overrides: list[str] | None = None
    ) -> Measured:
        loaded = " beside fio" if phase.read else ""
        say(f"{self.shape.name}: {way}, {shape.layers} blocks{loaded}")
        job = Job(
            way=way,
            shape=shape.as_dict(),
            phases=[asdict(phase)],
            warmup=self.options.warmup,
            steps=self.options.steps,
            folder=str(self.folder),
            overrides=overrides or [],
            clip=None,
            dtype=self.options.dtype,
        )
        measured = Measured()
        measured.add(processes.run(job)[0])
        return measured

    def versions_that_fit(self) -> int:
        """Two places per unit where the disk has them with room to spare, else one."""
        free = shutil.disk_usage(self.folder).free - 3 * fio.file_nbytes(self.folder)
        return 2 if 2.1 * STATE_PER_PARAMETER * self.shape.numel < free else 1

    def overrides(self) -> list[str]:
        return [
            "memory.resident=false",
            f"memory.host={self.options.host}",
            "memory.activations=keep",  # of units alone: blocks are recomputed
            f"memory.device={self.options.rss - process_nbytes(self.shape) - self.options.host}",
            f"memory.nvme=[{self.folder}]",
            f"memory.versions={self.versions}",
            f"run.dir={self.folder / 'runs'}",
        ]

    def rows(self) -> list[list[str]]:
        rows = [
            ["parameters", f"{self.shape.numel / 1e9:.3f} B"],
            ["their states in memory (plain PyTorch)", f"{16 * self.shape.numel / 1e9:.1f} GB"],
            ["versions on disk", str(self.versions)],
            ["tokens per step", str(self.options.tokens)],
            ["construction", f"{self.big.made_s:.0f} s"],
            ["median step", f"{self.big.median_s:.1f} s"],
            ["tokens/s", f"{self.options.tokens / self.big.median_s:.0f}"],
            ["read / written per step", f"{self.big.read / 1e9:.1f} / {self.big.written / 1e9:.1f} GB"],
            ["peak RSS", f"{self.big.peak_rss / 2**30:.2f} GiB"],
            ["loss, first to last", f"{self.big.losses[0]:.3f} to {self.big.losses[-1]:.3f}"],
            ["in memory, from one and three blocks", f"{self.alone_s:.1f} s"],
        ]
        if self.beside_s is not None:
            rate = statistics.median(self.mixed_per_s)
            rows.append(["the same while fio moves the bytes", f"{self.beside_s:.1f} s"])
            rows.append([f"the bytes at fio's mixed {rate / 1e9:.2f} GB/s", f"{self.disk_s:.1f} s"])
        return rows

    def claims(self) -> list[Claim]:
        name = f"{self.shape.name}, {self.options.tokens} tokens"
        limit = self.options.rss / 2**30
        claims = [Claim.at_most(f"{name}: peak RSS", self.big.peak_rss / 2**30, limit, " GiB")]
        claims.append(as_planned(name, self.big))
        if self.limit_s:
            claims.append(
                Claim.at_most(f"{name}: step / the larger limit", self.big.median_s / self.limit_s, 1.1, "x")
            )
        return claims


def number_of(text: str) -> float:
    """1.2B, 350M or a plain number."""
    match = re.fullmatch(r"([0-9.]+)([BM]?)", text.strip().upper())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters; write 1.2B or 350M")
    return float(match[1]) * {"B": 1e9, "M": 1e6, "": 1.0}[match[2]]


def nbytes_of(text: str) -> int:
    from infinity.core.nbytes import parse_nbytes

    return parse_nbytes(text)


def machine_nbytes() -> int:
    """Memory of this machine."""
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise OSError("no MemTotal in /proc/meminfo")


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = Options(__doc__, "a tiny model: under a minute")
    parser.add_argument("--params", type=number_of, default=1.2e9, help="about how many, as 1.2B")
    parser.add_argument("--rss", type=nbytes_of, help="most resident memory allowed; default: 85 %% of all")
    parser.add_argument("--host", type=nbytes_of, default=96 << 20, help="memory.host, for staging")
    parser.add_argument("--versions", type=int, choices=(1, 2), help="default: what the disk has room for")
    parser.add_argument("--tokens", type=int, default=2048, help="per step")
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    options = parser.parse(argv, tokens=512)
    options.rss = options.rss or machine_nbytes() * 85 // 100
    return options


def main(argv: list[str] | None = None) -> None:
    options = options_of(argv)
    shape = llama.shape_near(options.params)
    if options.quick:
        shape = replace(llama.TINY, layers=8, checkpoint=True)
    claims: list[Claim] = []
    try:
        with folder_on(options.nvme, "capacity") as folder:
            capacity = Capacity(shape, options, folder)
            capacity.run()
            print_table(["what", "figure"], capacity.rows())
            claims = capacity.claims()
    except (RuntimeError, OSError) as error:
        say(f"not measured: {error}")
    print_claims(claims, options.json)


if __name__ == "__main__":
    main()
