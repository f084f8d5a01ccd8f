"""Each engine against fio: the same file, block size, depth and mix, in turns.

A round runs fio and the engines one after the other on one file, every other round in reverse, so a
drive that slows down or speeds up favours nobody. A ratio is the median of the rounds' ratios.

The engines' buffers lie on transparent huge pages. So do fio's, where glibc knows how (2.35 and later) or the
system has some to give (``sysctl vm.nr_hugepages=80``); without, fio may reach a third of what the drive can
do, which makes every ratio easy to win: the table says which pages fio had.

    python benchmarks/storage.py [--quick] [--json FILE] [--nvme DIR] [--rounds N] [--seconds S]
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fio
from options import Options, folder_on
from report import Claim, print_claims, print_table, write_json

from infinity.core.nbytes import Extent
from infinity.device.memory import HostPool
from infinity.nvme.engines import Move, QueuedEngine, ThreadsEngine
from infinity.nvme.engines.libaio_engine import LibaioEngine
from infinity.nvme.volume import Volume

MIB = 2**20
TRANSFER_NBYTES = 16 * MIB
TARGET = 0.98


@dataclass(frozen=True, slots=True)
class Mix:
    """Of every ``reads + writes`` transfers, so many read."""

    name: str
    reads: int
    writes: int

    def reading(self, number: int) -> bool:
        """Whether transfer ``number`` reads: both kinds spread evenly."""
        total = self.reads + self.writes
        return (number + 1) * self.reads // total > number * self.reads // total


MIXES = (Mix("read", 1, 0), Mix("write", 0, 1), Mix("mixed 50:50", 1, 1), Mix("mixed 14:12", 14, 12))


@dataclass(frozen=True, slots=True)
class Setting:
    """One engine with one size of requests, and so many of them with the kernel."""

    engine: str
    block: int
    depth: int

    @property
    def name(self) -> str:
        return f"{self.engine} {self.block // MIB} MiB x {self.depth}"

    def make(self, volume: Volume) -> QueuedEngine:
        if self.engine == "libaio":
            return LibaioEngine(volume, depth=self.depth, request_nbytes=self.block)
        return ThreadsEngine(volume, threads=self.depth, request_nbytes=self.block)


#: The first and the last are the engines' defaults.
SETTINGS = (
    Setting("libaio", MIB, 32),
    Setting("libaio", 4 * MIB, 16),
    Setting("threads", MIB, 32),
    Setting("threads", 8 * MIB, 8),
)
QUICK = (SETTINGS[0], SETTINGS[3])


@dataclass(frozen=True, slots=True)
class Rate:
    """Bytes per second both ways together, and processor seconds per second."""

    bytes_per_s: float
    cpu: float


class Bench:
    """One file that fio and the engines share."""

    def __init__(self, folder: Path, file_nbytes: int, seconds: float) -> None:
        self.seconds = seconds
        self.volume = Volume([folder / "storage.bin"])
        count = file_nbytes // TRANSFER_NBYTES
        self.extents = [self.volume.allocate(TRANSFER_NBYTES, what="benchmark") for _ in range(count)]
        self.pool = HostPool(8 * TRANSFER_NBYTES)
        self.leases = [self.pool.lease(TRANSFER_NBYTES, who="benchmark") for _ in range(8)]
        for lease in self.leases:
            lease.tensor.random_(0, 256)
        self._fill()

    def _fill(self) -> None:
        """Write the whole file: no job may meet unwritten blocks."""
        engine = ThreadsEngine(self.volume)
        moves = [engine.write(extent, self.leases[0].memory) for extent in self.extents]
        for move in moves:
            move.wait()
        engine.close()

    def engine(self, setting: Setting, mix: Mix) -> Rate:
        """What the engine moves while its queue is never empty."""
        engine = setting.make(self.volume)
        try:
            return self._drive(engine, mix)
        finally:
            engine.close()

    def _drive(self, engine: QueuedEngine, mix: Mix) -> Rate:
        in_flight: list[Move | None] = [None] * len(self.leases)
        number, cpu_s, began = 0, time.process_time(), time.perf_counter()
        while time.perf_counter() - began < self.seconds:
            slot = number % len(in_flight)
            before = in_flight[slot]
            if before is not None:
                before.wait()
            extent, memory = self.extents[number % len(self.extents)], self.leases[slot].memory
            in_flight[slot] = self._start(engine, extent, memory, reading=mix.reading(number))
            number += 1
        for move in in_flight:
            if move is not None:
                move.wait()
        wall_s = time.perf_counter() - began
        return Rate(number * TRANSFER_NBYTES / wall_s, (time.process_time() - cpu_s) / wall_s)

    def _start(self, engine: QueuedEngine, extent: Extent, memory: memoryview, *, reading: bool) -> Move:
        return engine.read(extent, memory) if reading else engine.write(extent, memory)

    def fio(self, setting: Setting, mix: Mix) -> Rate:
        """What fio moves."""
        share = round(100 * mix.reads / (mix.reads + mix.writes))
        pattern = {100: ["--rw=read"], 0: ["--rw=write"]}.get(share, ["--rw=rw", f"--rwmixread={share}"])
        command = [
            *("fio", "--name=storage", "--direct=1", "--ioengine=libaio", "--thread", "--time_based"),
            *(f"--filename={self.volume.path(0)}", f"--size={len(self.extents) * TRANSFER_NBYTES}"),
            *(
                f"--bs={setting.block}",
                f"--iodepth={setting.depth}",
                f"--runtime={int(1000 * self.seconds)}ms",
            ),
            *("--output-format=json", *pattern, *fio.pages().args),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=fio.environment())
        if done.returncode != 0:
            raise OSError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        moved, ms = 0, 1
        for way in ("read", "write"):
            moved, ms = moved + job[way]["io_bytes"], max(ms, job[way]["runtime"])
        return Rate(moved / ms * 1000, (job["usr_cpu"] + job["sys_cpu"]) / 100)

    def close(self) -> None:
        for lease in self.leases:
            lease.release()
        self.pool.close()
        self.volume.close()


def compare(bench: Bench, setting: Setting, mix: Mix, rounds: int) -> tuple[list[Rate], list[Rate]]:
    """Rates of fio and of the engine, round by round."""
    pairs: tuple[list[Rate], list[Rate]] = ([], [])
    runs: list[Callable[[Setting, Mix], Rate]] = [bench.fio, bench.engine]
    for number in range(rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        for which in order:
            pairs[which].append(runs[which](setting, mix))
    return pairs


def measure(bench: Bench, settings: tuple[Setting, ...], rounds: int) -> tuple[list[list[str]], list[Claim]]:
    rows, claims = [], []
    for setting in settings:
        for mix in MIXES:
            print(f"{setting.name}: {mix.name}", file=sys.stderr, flush=True)
            theirs, ours = compare(bench, setting, mix, rounds)
            ratios = [b.bytes_per_s / a.bytes_per_s for a, b in zip(theirs, ours)]
            ratio = statistics.median(ratios)
            rows.append([setting.name, mix.name, *_figures(theirs), *_figures(ours), *_spread(ratios)])
            claim = f"{setting.name}, {mix.name}: engine / fio"
            claims.append(Claim(claim, round(ratio, 3), TARGET, "x", ratio >= TARGET))
    return rows, claims


def _figures(rates: list[Rate]) -> list[str]:
    rate = statistics.median(rate.bytes_per_s for rate in rates)
    return [f"{rate / 1e9:.2f}", f"{statistics.median(rate.cpu for rate in rates):.2f}"]


def _spread(ratios: list[float]) -> list[str]:
    return [f"{value:.3f}" for value in (statistics.median(ratios), min(ratios), max(ratios))]


COLUMNS = ["engine", "mix", "fio GB/s", "fio cpu", "GB/s", "cpu", "ratio", "least", "most"]


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = Options(
        __doc__,
        "the engines' defaults, under a minute",
        rounds=7,
        every="fio and of each engine",
        dtype=False,
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn")
    parser.add_argument("--file", type=int, default=4096, metavar="MIB", help="size of the file")
    return parser.parse(argv, rounds=3, seconds=0.8, file=1024)


def usable(settings: tuple[Setting, ...], volume: Volume) -> tuple[Setting, ...]:
    """Those whose engine works here; says which do not."""
    found = []
    for setting in settings:
        try:
            setting.make(volume).close()
        except (ImportError, OSError) as error:
            print(f"{setting.name} is left out: {error}")
        else:
            found.append(setting)
    return tuple(found)


def main(argv: list[str] | None = None) -> None:
    options = options_of(argv)
    if not fio.available():
        print("fio is not installed, so there is nothing to compare with: apt-get install fio")
        if options.json:
            write_json(options.json, [])
        return
    with folder_on(options.nvme, "storage") as folder:
        file_nbytes = min(options.file * MIB, shutil.disk_usage(folder).free // 4)
        bench = Bench(folder, file_nbytes, options.seconds)
        try:
            settings = usable(QUICK if options.quick else SETTINGS, bench.volume)
            rows, claims = measure(bench, settings, options.rounds)
        finally:
            bench.close()
    print(f"fio's buffers: {fio.pages().title}")
    print_table(COLUMNS, rows)
    print_claims(claims, options.json, wanted="at least", digits=".3f")


if __name__ == "__main__":
    main()
