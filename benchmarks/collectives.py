"""Time of a step's collectives beside plain ``torch.distributed``, where bytes are negligible.

Real ranks over gloo. A step gathers each unit twice and reduces it once, in one order, so what it takes
beyond plain collectives is what the ranks pay for agreeing on them. Steps of both ways take turns.

    python benchmarks/collectives.py [--quick] [--json FILE] [--ranks 2,4,8] [--units 400] [--steps 5]
"""

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from options import Options, say
from report import Claim, print_claims, print_table

from infinity.comm.ranks import open_ranks

#: Under the name that this release of torch wants.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

#: Elements of a rank's shard of a unit (bf16).
SHARD_NUMEL = 256
#: The most that agreeing may add to a step of :data:`STEP_S` with :data:`UNITS`, as a part of it.
WANTED, STEP_S, UNITS = 0.01, 0.5, 400


def plain_step(full: torch.Tensor, spare: torch.Tensor, out: torch.Tensor, units: int) -> None:
    """Run the collectives of a step, and the additions of its reductions."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for _ in range(2 * units):
        _all_gather(full, full.chunk(ranks)[rank])
    for _ in range(units):
        dist.all_to_all_single(spare, full)
        arrived = spare.view(ranks, -1)
        out.copy_(arrived[0])
        for other in arrived[1:]:
            out.add_(other)
        out.div_(ranks)


def worker(units: int, steps: int) -> None:
    """Time the steps of one rank; rank 0 prints the seconds of each, plain and ours in turn."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    ranks = open_ranks(torch.device("cpu"), 300.0, lambda error: None)
    assert ranks.collectives is not None
    ours = ranks.collectives
    full = torch.zeros(ranks.world_size * SHARD_NUMEL, dtype=torch.bfloat16)
    spare, out = torch.zeros_like(full), torch.zeros(SHARD_NUMEL)

    def our_step() -> None:
        pending = [ours.gather(unit, f"layers.{unit}", lambda: full) for unit in (*range(units),) * 2]
        pending += [
            ours.reduce(unit, f"layers.{unit}", lambda: (full, spare, out), b"\1", lambda *_: None)
            for unit in range(units)
        ]
        for each in pending:
            each.wait()
        ours.step += 1

    def seconds(step: Callable[[], None]) -> float:
        dist.barrier()
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    for step in range(steps + 2):
        taken = seconds(lambda: plain_step(full, spare, out, units)), seconds(our_step)
        if step >= 2 and ranks.rank == 0:  # the first ones make connections, and learn the order
            print(*taken, flush=True)
    ours.close()
    dist.destroy_process_group()


def measure(ranks: int, units: int, steps: int) -> list[tuple[float, float]]:
    """Return the seconds of each step, plain and ours."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    shared = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", "--units", str(units), "--steps", str(steps)],
            env={**os.environ, **{key: str(value) for key, value in shared.items()}, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{ranks} ranks failed")
    rows = (map(float, line.split()) for line in said[0].splitlines())
    return [(plain, ours) for plain, ours in rows]


def main(argv: list[str] | None = None) -> None:
    options = Options(__doc__, "two ranks, 40 units, two steps", dtype=False)
    options.add_argument("--ranks", default="2,4,8", help="numbers of ranks")
    options.add_argument("--units", type=int, default=UNITS)
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--worker", action="store_true", help="be one of the ranks")
    given = options.parse(argv, ranks="2", units=40, steps=2)
    if given.worker:
        worker(given.units, given.steps)
        return
    rows, claims = [], []
    for ranks in map(int, given.ranks.split(",")):
        say(f"{ranks} ranks, {given.units} units on {os.cpu_count()} cores")
        pairs = measure(ranks, given.units, given.steps)
        plain_s, ours_s = (statistics.median(times) for times in zip(*pairs, strict=True))
        beyond_s = statistics.median(ours - plain for plain, ours in pairs) * UNITS / given.units
        rows.append(
            [f"{ranks}", f"{plain_s:.3f}", f"{ours_s:.3f}", f"{beyond_s:.3f}", f"{ours_s / plain_s:.2f}x"]
        )
        claims.append(
            Claim.at_most(
                f"{ranks} ranks agree on the collectives of {UNITS} units: of a step of {STEP_S} s",
                beyond_s / STEP_S, WANTED,
            )
        )  # fmt: skip
    print_table(["ranks", "plain (s)", "infinity (s)", f"beyond, {UNITS} units (s)", "ratio"], rows)
    print_claims(claims, given.json and Path(given.json))


if __name__ == "__main__":
    main()
