"""Run a worker's job in fresh processes and put its ranks' figures together."""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")


@dataclass(slots=True)
class Measured:
    """One way at one size, over all rounds; times in seconds, sizes in bytes, per rank."""

    step_s: list[float] = field(default_factory=list)
    peak_rss: int = 0  # the largest rank's; construction counts
    read: float = 0.0  # bytes per step, all ranks together
    written: float = 0.0
    planned: bool = True  # every measured step followed its plan
    losses: list[float] = field(default_factory=list)
    moved: list[dict[str, float]] = field(default_factory=list)
    made_s: float = 0.0
    parts_s: list[tuple[float, float]] = field(default_factory=list)  # of plain steps: forward, backward
    stood: bool = False  # some update that had started inside backward did, in some measured step

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s) if self.step_s else float("nan")

    def add(self, ranks: list[dict[str, Any]]) -> None:
        """Take in one phase of one round, as its ranks reported it."""
        # Ranks wait for each other; the slowest clock is the step's.
        self.step_s += [max(times) for times in zip(*(rank["step_s"] for rank in ranks))]
        self.peak_rss = max(self.peak_rss, *(rank["peak_rss"] for rank in ranks))
        self.losses = [statistics.fmean(values) for values in zip(*(rank["losses"] for rank in ranks))]
        self.made_s = max(rank["made_s"] for rank in ranks)
        if ranks[0]["moved"]:
            self.moved.append(ranks[0]["moved"])
        self.parts_s += ranks[0].get("parts", ())
        reports = [[report for report in rank["reports"] if report] for rank in ranks]
        if all(reports):
            self.read = sum(statistics.median(r["nbytes_read"] for r in rank) for rank in reports)
            self.written = sum(statistics.median(r["nbytes_written"] for r in rank) for rank in reports)
            self.planned &= all(_as_planned(report) for rank in reports for report in rank)
            self.stood |= any(r["speculated"] > r["rolled_back"] for rank in reports for r in rank)


def _as_planned(report: dict[str, Any]) -> bool:
    """The step had a plan, and used nothing that it did not foresee.

    A step's own bytes may land during the next one, so they are compared over whole runs
    (``tests/test_bytes.py``), not here.
    """
    return report["planned_nbytes_read"] is not None and report["on_demand"] == 0


def run(job: Any, world: int = 1, worker: Path = WORKER) -> list[list[dict[str, Any]]]:
    """The phases of a job, each with every rank's figures.

    Args:
        job: A dataclass that ``worker`` takes as JSON; its ``way`` names it.
        world: Ranks.
        worker: The script of one rank.

    Raises:
        RuntimeError: A rank failed; carries the end of what it said.
    """
    threads = max(1, (os.cpu_count() or 1) // world)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    shared = {"OMP_NUM_THREADS": threads, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if world > 1:
        shared |= {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        processes, logs = [], []
        for rank in range(world):
            ranked = {**shared, "RANK": rank, "LOCAL_RANK": rank} if world > 1 else shared
            logs.append(Path(folder, f"log.{rank}"))
            with logs[-1].open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(worker), json.dumps(asdict(job)), f"{folder}/out"],
                        env={**os.environ, **{key: str(value) for key, value in ranked.items()}},
                        stdout=log,
                        stderr=log,
                    )
                )
        try:
            for process, path in zip(processes, logs):
                if process.wait() != 0:
                    said = path.read_text(errors="replace", encoding="utf-8").strip()[-2000:]
                    raise RuntimeError(f"{job.way} ended with {process.returncode}:\n{said}")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        ranks = [
            json.loads(Path(f"{folder}/out.{rank}").read_text(encoding="utf-8")) for rank in range(world)
        ]
    return [list(phase) for phase in zip(*ranks)]


def serve(job: type[Any], work: Callable[[Any], list[dict[str, Any]]], main: Callable[[], object]) -> None:
    """Let ``work`` do the job if :func:`run` started this process, one rank; else call ``main``."""
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        text, out = sys.argv[1:]
        Path(f"{out}.0").write_text(json.dumps(work(job(**json.loads(text)))), encoding="utf-8")
    else:
        main()
