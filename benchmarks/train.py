"""Whole training steps side by side: in memory, on NVMe, FSDP2, and what the machine allows.

Each way runs in fresh processes, the ways take turns in rounds, and every ratio is of figures
from one run. Limits bound what a step with all states on NVMe can reach:

- the in-memory step while fio moves the same bytes beside it (I/O costs compute, too),
- the step's bytes at the rate that fio reaches with the same mix of reads and writes, and
- where every measured step was clipped, so that no update stood before ``step()``: the in-memory backward,
  and after it the in-memory forward or the bytes of the update and the forward, whichever takes longer.

    python benchmarks/train.py [--quick] [--json FILE] [--sizes 134M,367M] [--tokens 512,1024,2048]
"""

import argparse
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import fio
import llama
import processes
from options import Options, folder_on, say
from processes import Measured
from report import Claim, print_claims, print_table
from worker import Job, Phase

from infinity.device.machine import DTYPES, Dtype
from infinity.optim.elementwise import ADAMW

SIZES = {shape.name: shape for shape in (llama.TINY, llama.MEDIUM, llama.LARGE)}


def bytes_per_parameter(dtype: Dtype) -> tuple[int, int]:
    """Bytes that a step reads and writes with everything on NVMe and exact fp32 Adam.

    They are the plan's numbers, which the limits use where the run itself reports none.
    """
    layout = ADAMW.layout(DTYPES[dtype])
    weight, both = layout.weight_nbytes(1), round(layout.bytes_per_element)
    return weight + both, both


@dataclass(frozen=True, slots=True)
class Way:
    """A row of the table."""

    key: str
    title: str
    way: str
    world: int = 1
    nvme: bool = False


WAYS = (
    Way("plain", "(a) plain PyTorch, in memory", "plain"),
    Way("memory", "(b) infinity, in memory", "infinity"),
    Way("nvme", "(c) infinity, all on NVMe", "infinity", nvme=True),
    Way("fsdp2", "(d) FSDP2, in memory, 2 ranks", "fsdp2", world=2),
    Way("nvme2", "(c) on 2 ranks", "infinity", world=2, nvme=True),
)
BESIDE = Way("beside", "(a) while fio moves (c)'s bytes", "plain")
_LARGEST = "  <- the largest limit"


class Bench:
    """All ways at one size; ``self.figures[way key, tokens]`` fills round by round."""

    def __init__(self, shape: llama.Shape, options: argparse.Namespace, folder: Path) -> None:
        self.shape, self.options, self.folder = shape, options, folder
        self.figures: dict[tuple[str, int], Measured] = {}
        self.mixed_per_s: list[float] = []
        self.failed: dict[str, str] = {}
        self.has_fio = fio.available()

    def run(self) -> None:
        if self.has_fio:
            fio.prepare(self.folder, (1 << 30) if self.options.quick else None)
        for number in range(self.options.rounds):
            ways = [way for way in WAYS if way.key in self.options.ways]
            # Every other round runs backwards: a machine that slows down favours nobody.
            for way in ways if number % 2 == 0 else ways[::-1]:
                self.measure(way)
            if self.has_fio:
                seconds = 2 if self.options.quick else 5
                rate = fio.mixed_bytes_per_s(self.folder, *self.bytes_per_step(), seconds=seconds)
                self.mixed_per_s.append(rate)
                self.measure(BESIDE)

    def measure(self, way: Way) -> None:
        if way.key in self.failed:
            return
        say(f"{self.shape.name}: {way.title}")
        job = Job(
            way=way.way,
            shape=self.shape.as_dict(),
            phases=[asdict(self.phase(way, tokens)) for tokens in self.options.tokens],
            warmup=self.options.warmup,
            steps=self.options.steps,
            folder=str(self.folder),
            overrides=self.overrides(way) if way.way == "infinity" else [],
            clip=self.options.clip,
            dtype=self.options.dtype,
        )
        try:
            phases = processes.run(job, way.world)
        except RuntimeError as error:
            # A way that cannot run here must not hide the figures of the others.
            self.failed[way.key] = str(error)
            print(error, file=sys.stderr)
            return
        for tokens, ranks in zip(self.options.tokens, phases):
            self.figures.setdefault((way.key, tokens), Measured()).add(ranks)

    def phase(self, way: Way, tokens: int) -> Phase:
        if way is not BESIDE or ("plain", tokens) not in self.figures:
            return Phase(tokens)
        read, written = self.bytes_per_step()
        alone_s = self.figures["plain", tokens].median_s
        return Phase(tokens, read, written, alone_s, self.disk_s())

    def overrides(self, way: Way) -> list[str]:
        budget = [f"memory.host={self.options.host if way.nvme else '20GiB'}"]
        budget += [f"run.dir={self.folder / 'runs'}"]
        if not way.nvme:
            return budget
        budget += ["memory.resident=false"]
        if way.world == 1:  # gradients wait for the norm, and some room to look ahead
            itemsize = DTYPES[self.options.dtype].itemsize
            budget.append(f"memory.device={int(1.7 * itemsize * self.shape.numel) + 96 * 2**20}")
            budget.append("memory.activations=keep")  # the budget is of units alone
        return [*budget, f"memory.nvme=[{self.folder}]"]

    def bytes_per_step(self) -> tuple[float, float]:
        """What (c) reads and writes in a step: as reported, else as the plan has it."""
        for tokens in self.options.tokens:
            found = self.figures.get(("nvme", tokens))
            if found and found.read:
                return found.read, found.written
        read, written = bytes_per_parameter(self.options.dtype)
        return read * self.shape.numel, written * self.shape.numel

    def disk_s(self) -> float:
        """The step's bytes at fio's mixed rate (s)."""
        return sum(self.bytes_per_step()) / statistics.median(self.mixed_per_s)

    def limits_s(self, tokens: int) -> dict[str, float]:
        """What bounds (c)'s step, by the title of its row (s)."""
        beside, found = self.figures.get((BESIDE.key, tokens)), {}
        if beside:
            found[BESIDE.title] = beside.median_s
        if self.mixed_per_s:
            rate = statistics.median(self.mixed_per_s)
            found[f"(c)'s bytes at fio's mixed {rate / 1e9:.2f} GB/s"] = self.disk_s()
        plain, nvme = (self.figures.get((key, tokens)) for key in ("plain", "nvme"))
        clipped = self.options.clip is not None and nvme is not None and not nvme.stood
        if self.mixed_per_s and clipped and plain and plain.parts_s:
            forward_s, backward_s = map(statistics.median, zip(*plain.parts_s))
            nbytes = sum(self.bytes_per_step())
            nbytes -= self.shape.numel * DTYPES[self.options.dtype].itemsize  # weights that backward reads
            clipped_s = backward_s + max(forward_s, nbytes / rate)
            found["(a)'s backward, then its forward or (c)'s bytes"] = clipped_s
        return found

    def rows(self) -> list[list[str]]:
        rows = []
        for tokens in self.options.tokens:
            plain, limits_s = self.figures.get(("plain", tokens)), self.limits_s(tokens)
            largest = max(limits_s, key=lambda title: limits_s[title], default="")
            for way in (*WAYS, BESIDE):
                found = self.figures.get((way.key, tokens))
                if found:
                    title = way.title + _LARGEST * (way.title == largest)
                    rows.append(self._row(tokens, title, found, plain))
            for title, limit_s in limits_s.items():
                if title != BESIDE.title:
                    title += _LARGEST * (title == largest)
                    rows.append([self.shape.name, str(tokens), title, f"{limit_s:.2f}", *[""] * 5])
        return rows

    def _row(self, tokens: int, title: str, found: Measured, plain: Measured | None) -> list[str]:
        ratio = f"{found.median_s / plain.median_s:.2f}" if plain else ""
        moved = [f"{found.read / 1e9:.2f}", f"{found.written / 1e9:.2f}"] if found.read else ["", ""]
        if found.moved:
            last = found.moved[-1]
            moved = [f"{last[key] * found.median_s / 1e9:.2f}" for key in ("read_per_s", "written_per_s")]
        speed, memory = f"{tokens / found.median_s:.0f}", f"{found.peak_rss / 1e9:.2f}"
        return [
            *(self.shape.name, str(tokens), title, f"{found.median_s:.2f}", speed, ratio, memory),
            *moved,
        ]

    def claims(self) -> list[Claim]:
        claims = []
        for tokens in self.options.tokens:
            at = f"{self.shape.name}, {tokens} tokens"
            step_s = {way.key: self._median(way.key, tokens) for way in WAYS}
            limit_s = max(self.limits_s(tokens).values()) if (BESIDE.key, tokens) in self.figures else None
            for text, mine, other, target in (
                ("all on NVMe / the largest limit", step_s["nvme"], limit_s, 1.05),
                ("infinity in memory / plain PyTorch", step_s["memory"], step_s["plain"], 1.02),
                ("NVMe on 2 ranks / FSDP2 in memory", step_s["nvme2"], step_s["fsdp2"], 1.0),
            ):
                if mine and other:
                    claims.append(Claim.at_most(f"{at}: {text}", mine / other, target, "x"))
            nvme = self.figures.get(("nvme", tokens))
            if nvme:
                claims.append(as_planned(at, nvme))
            plain = self.figures.get(("plain", tokens))
            if nvme and plain and self.shape is llama.LARGE:
                text = f"{at}: peak RSS, all on NVMe / plain PyTorch"
                claims.append(Claim.at_most(text, nvme.peak_rss / plain.peak_rss, 0.4, "x"))
        return claims

    def _median(self, key: str, tokens: int) -> float | None:
        found = self.figures.get((key, tokens))
        return found.median_s if found else None


def as_planned(name: str, found: Measured) -> Claim:
    """Whether every measured step followed its plan."""
    return Claim.at_most(
        f"{name}: runs with uses that no plan foresaw", 0.0 if found.planned else 1.0, 0.0, ""
    )


COLUMNS = ["size", "tokens", "way", "step s", "tokens/s", "/ (a)", "peak RSS GB", "read GB", "written GB"]


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = Options(__doc__, "a tiny model, one round: under a minute", rounds=2)
    parser.add_argument("--sizes", default="134M,367M", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--tokens", default="512,1024,2048", help="per step, all ranks together")
    parser.add_argument("--ways", default=",".join(way.key for way in WAYS), help="rows to measure")
    parser.add_argument("--clip", default="1.0", help="largest gradient norm in every way, or none")
    parser.add_argument("--steps", type=int, default=4, help="measured steps per round")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--host", default="96MiB", help="memory.host of the runs on NVMe, per rank")
    options = parser.parse(argv, sizes="tiny", tokens="512", rounds=1, steps=3, host="128MiB")
    options.sizes = [SIZES[name] for name in options.sizes.split(",")]
    options.tokens = [int(tokens) for tokens in options.tokens.split(",")]
    options.ways = options.ways.split(",")
    options.clip = None if options.clip == "none" else float(options.clip)
    return options


def main(argv: list[str] | None = None) -> None:
    options = options_of(argv)
    rows, claims = [], []
    for shape in options.sizes:
        with folder_on(options.nvme, "train") as folder:
            bench = Bench(shape, options, folder)
            bench.run()
        if not bench.has_fio:
            say("fio is not installed: no limits, and no claim against them")
        rows += bench.rows()
        claims += bench.claims()
        print_table(COLUMNS, rows)
    print_claims(claims, options.json)


if __name__ == "__main__":
    main()
