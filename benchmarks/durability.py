"""What the commit of every step costs, and how fast an interrupted run is back.

The same steps of the same model, of a run without a name, which commits nothing, and of named ones, whose
commits survive a kill (``process``) or a power cut (``power``); states on NVMe, and in host memory, from
where commits write them to NVMe. The ways take turns of a few steps. Then the run whose states are in host
memory is started again, and its ``infinity.resume`` compared with fio reading as many bytes of the same
files (without fio, with plain direct reads of them). At last a run whose states are on NVMe saves portable
checkpoints: synchronous ones, and others in the background of its steps.

    python benchmarks/durability.py [--quick] [--json FILE] [--size 134M] [--rounds 6]
"""

import argparse
import contextlib
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fio
import llama
from options import Options, folder_on, say
from report import Claim, print_table, write_json
from schedule import SIZES
from turns import Actor

_MIB = 2**20
_SIZES = {**SIZES, "tiny": llama.TINY}


@dataclass(frozen=True, slots=True)
class Way:
    """A row of the table.

    Attributes:
        more: Overrides of a named run; None: it has no name.
    """

    place: str
    title: str
    more: tuple[str, ...] | None

    @property
    def name(self) -> str:
        return f"{self.place}-{self.title}".replace(" ", "-").replace(",", "")


WAYS = [
    Way("nvme", "no commits", None),
    Way("nvme", "process", ()),
    Way("nvme", "power", ("durability.survives=power",)),
    Way("host", "no commits", None),
    Way("host", "process", ()),
    Way("host", "process, every step", ("durability.every=1",)),
]


class Trainer:
    """One run in a process of its own."""

    def __init__(self, way: Way, shape: llama.Shape, options: argparse.Namespace, folder: Path) -> None:
        import infinity

        host = ["memory.host=96MiB", "memory.resident=false"]
        if way.place == "host":
            host = [f"memory.host={14 * shape.numel + 256 * _MIB}"]
        named = [] if way.more is None else [f"run.name={way.name}", *way.more]
        recipe = infinity.load_recipe(
            overrides=[f"train.dtype={options.dtype}", f"memory.nvme=[{folder}]", *host, *named]
        )
        with infinity.Init(recipe):
            self.model = llama.make(shape)
        self.optimizer = infinity.AdamW(self.model, lr=1e-4)
        self.api, self.shape, self.tokens, self.at = infinity, shape, options.tokens, 0

    def resume(self) -> tuple[float, int]:
        """Seconds of ``infinity.resume``, and the bytes that it read."""
        engine: Any = self.optimizer.runtime.storage.engine
        before, began = engine.nbytes_read, time.perf_counter()
        self.at = self.api.resume(self.model, self.optimizer)
        return time.perf_counter() - began, engine.nbytes_read - before

    def turn(self, steps: int) -> list[float]:
        """Seconds of each of some steps, after one that is not counted; then all has landed."""
        times = [self._step() for _ in range(steps + 1)]
        self.optimizer.synchronize()
        return times[1:]

    def _step(self) -> float:
        batch = llama.batch(self.shape, self.tokens, self.at, 0, 1, self.tokens)
        began = time.perf_counter()
        self.model(**batch).loss.backward()
        self.optimizer.step()
        self.at += 1
        return time.perf_counter() - began

    def save(self, folder: Path, background: bool) -> tuple[float, float, int]:
        """What a portable checkpoint costs (s), how long it takes (s), and how many steps are beside it."""
        usual_s, steps = statistics.median(self.turn(4)), 0
        began = time.perf_counter()
        save = self.api.save_checkpoint(self.model, self.optimizer, folder / "saved", background=background)
        while not save.done:
            self._step()
            steps += 1
        save.wait()
        self.optimizer.synchronize()
        took_s = time.perf_counter() - began
        shutil.rmtree(folder / "saved")
        return took_s - steps * usual_s, took_s, steps

    def every(self) -> int:
        """Steps from one record to the next."""
        return int(self.optimizer.runtime.records.interval.every)

    def files(self) -> list[str]:
        volume = self.optimizer.runtime.storage.volume
        assert volume is not None
        return [str(volume.path(number)) for number in range(len(volume))]

    def end(self, keep: bool) -> None:
        self.api.close(self.model, keep=keep)


@contextlib.contextmanager
def training(*given: Any) -> Iterator[Trainer]:
    trainer = Trainer(*given)
    yield trainer
    trainer.end(keep=False)


@dataclass(slots=True)
class Resumed:
    """Rates in bytes per second, in turn."""

    ours: list[float]
    reads: list[float]
    nbytes: int = 0


class Bench:
    def __init__(self, shape: llama.Shape, options: argparse.Namespace, folder: Path) -> None:
        self.shape, self.options, self.folder = shape, options, folder
        self.step_s: dict[Way, list[float]] = {way: [] for way in WAYS}  # a median of each turn
        self.every: dict[Way, int] = {}
        self.saves: dict[bool, list[tuple[float, float, int]]] = {False: [], True: []}  # by whether beside

    def run(self) -> Resumed:
        with contextlib.ExitStack() as stack:
            actors = {}
            for way in WAYS:
                say(f"{self.shape.name}: {way.place}, {way.title}")
                actors[way] = Actor(training, way, self.shape, self.options, self.folder)
                stack.callback(actors[way].close)
                actors[way].call("turn", 6)  # records the trace, and chooses the interval
            for number in range(self.options.rounds):
                say(f"round {number + 1} of {self.options.rounds}")
                for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                    self.step_s[way].append(statistics.median(actors[way].call("turn", self.options.steps)))
            self.every = {way: actors[way].call("every") for way in WAYS}
            last = WAYS[-1]
            files = [Path(name) for name in actors[last].call("files")]
            actors[last].call("end", True)
        resumed = self._resume(last, files)
        self._save(WAYS[1])
        return resumed

    def _save(self, way: Way) -> None:
        actor = Actor(training, way, self.shape, self.options, self.folder)
        actor.call("turn", 4)
        for number in range(self.options.rounds):
            say(f"save {number + 1} of {self.options.rounds}")
            for beside in (False, True) if number % 2 == 0 else (True, False):
                self.saves[beside].append(actor.call("save", self.folder, beside))
        actor.call("end", False)
        actor.close()

    def _resume(self, way: Way, files: list[Path]) -> Resumed:
        found = Resumed([], [])
        for number in range(self.options.rounds):
            say(f"resume {number + 1} of {self.options.rounds}")
            actor = Actor(training, way, self.shape, self.options, self.folder)
            seconds, found.nbytes = actor.call("resume")
            found.ours.append(found.nbytes / seconds)
            found.reads.append(found.nbytes / read_s(files, found.nbytes))
            actor.call("end", True)
            actor.close()
        return found

    def ratio(self, way: Way) -> list[float]:
        """Of each round, to the same place without commits."""
        base = next(each for each in WAYS if each.place == way.place and each.more is None)
        return [a / b for a, b in zip(self.step_s[way], self.step_s[base], strict=True)]

    def rows(self) -> list[list[str]]:
        rows = []
        for way in WAYS:
            ratios = sorted(self.ratio(way))
            every = "" if way.more is None else str(self.every[way])
            spread = f"{ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f}"
            step = f"{statistics.median(self.step_s[way]):.3f}"
            rows.append([way.place, way.title, every, step, f"{statistics.median(ratios):.3f}", spread])
        return rows

    def claims(self, resumed: Resumed) -> list[Claim]:
        claims = []
        for way in (way for way in WAYS if way.title == "process"):
            text = f"{self.shape.name}, states on {way.place}: step with commits (process) / without"
            most = 1.01 if way.place == "nvme" else 1.035
            claims.append(Claim.at_most(text, statistics.median(self.ratio(way)), most, "x"))
        rates = [a / b for a, b in zip(resumed.ours, resumed.reads, strict=True)]
        value = statistics.median(rates)
        text = (
            f"{self.shape.name}: rate of infinity.resume / of {'fio' if fio.available() else 'plain reads'}"
        )
        claims.append(Claim.at_least(text, value, 0.8, "x"))
        costs = [beside[0] / alone[0] for alone, beside in zip(*self.saves.values(), strict=True)]
        text = f"{self.shape.name}: cost of a save in the background / of a synchronous one"
        return [*claims, Claim.at_most(text, statistics.median(costs), 1.0, "x")]


def read_s(files: list[Path], nbytes: int) -> float:
    """Seconds to read so many bytes of the files."""
    each = nbytes // len(files) // _MIB * _MIB
    if fio.available():
        jobs = [
            part
            for number, path in enumerate(files)
            for part in (f"--name=read{number}", f"--filename={path}", f"--size={each}", "--rw=read")
        ]
        done = fio._jobs(["--direct=1", f"--bs={fio.BLOCK}", "--thread", "--readonly", *jobs])
        return max(float(job["read"]["runtime"]) for job in done) / 1000
    began = time.perf_counter()
    with mmap.mmap(-1, 8 * _MIB) as block:
        for path in files:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            for at in range(0, each, len(block)):
                os.preadv(fd, [block], at)
            os.close(fd)
    return time.perf_counter() - began


def main(argv: list[str] | None = None) -> None:
    parser = Options(__doc__, "a small model, two rounds: under a minute", rounds=6)
    parser.add_argument("--size", default="134M", help=f"of {', '.join(_SIZES)}")
    parser.add_argument("--tokens", type=int, default=512, help="of a step")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a turn")
    options = parser.parse(argv, size="tiny", tokens=64, rounds=2)
    with folder_on(options.nvme, "durability") as folder:
        bench = Bench(_SIZES[options.size], options, folder)
        resumed = bench.run()
    print_table(["states", "commits", "every", "step s", "/ none", "middle half"], bench.rows())
    rate = statistics.median(resumed.ours) / 1e9
    print(f"infinity.resume: {resumed.nbytes / 1e9:.2f} GB at {rate:.2f} GB/s")
    for beside, saves in bench.saves.items():
        cost_s, took_s, steps = (statistics.median(values) for values in zip(*saves, strict=True))
        what = f"in the background of {steps:.0f} steps" if beside else "synchronous"
        print(f"save, {what}: {took_s:.2f} s, costs {cost_s:.2f} s")
    claims = bench.claims(resumed)
    for claim in claims:
        mark, word = "holds" if claim.holds else "MISSED", "at least" if claim.target < 1 else "at most"
        print(f"{mark:7} {claim.claim}: {claim.value:.3f}{claim.unit} (target: {word} {claim.target:g})")
    if options.json:
        write_json(options.json, claims)


if __name__ == "__main__":
    main()
