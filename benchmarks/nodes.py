"""Bytes that cross the borders of nodes in a step, by the kernel's count, and what a slow border costs.

Real ranks over gloo. Each node is a network namespace on a bridge, with a link that ``tc`` throttles (root).
A step gathers each unit twice and reduces it once: as on one node; in two steps, within nodes and across
borders; and so that the second gather stays within the node.

    sudo python benchmarks/nodes.py [--quick] [--json FILE] [--nodes 2] [--local 2] [--mbit 400] [--steps 3]
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from options import Options, say
from report import Claim, print_claims, print_table

from infinity.comm.nodes import Kept
from infinity.comm.ranks import open_ranks
from infinity.device.memory import HostPool

#: Units, and the bytes of each.
UNITS, UNIT_NBYTES = 8, 2**23
#: Beyond payload: headers of TCP and IP, acknowledgements, and what ranks agree on.
OVERHEAD = 1.02
WAYS = ("one node", "two steps", "two steps, kept")


def received_nbytes() -> int:
    """What this namespace has received from others."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
    return sum(int(line.partition(":")[2].split()[0]) for line in lines if line.strip().startswith("border"))


def worker(way: str, steps: int) -> None:
    """Run the steps of one rank; each node's first prints the bytes received and the seconds of a step."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    world, local = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    ranks = open_ranks(torch.device("cpu"), 300.0, lambda error: None, world if way == WAYS[0] else local)
    ours = ranks.collectives
    assert ours is not None
    full = torch.zeros(UNIT_NBYTES // 2, dtype=torch.bfloat16)
    spare, out = torch.zeros_like(full), torch.zeros(len(full) // world)
    pool = HostPool(2 * UNITS * UNIT_NBYTES)
    leases = [pool.lease((ours.nodes.count - 1) * 2 * len(out), who="kept") for _ in range(UNITS)]

    def step() -> None:
        pending = []
        for again in (False, True):
            for unit in range(UNITS):
                kept = Kept(leases[unit], again) if way == WAYS[2] else None
                pending.append(ours.gather(unit, f"layers.{unit}", lambda: full, kept=kept))
        pending += [
            ours.reduce(unit, f"layers.{unit}", lambda: (full, spare, out), b"\1", lambda *_: None)
            for unit in range(UNITS)
        ]
        for each in pending:
            each.wait()
        ours.step += 1

    for number in range(steps + 2):
        dist.barrier()
        before, began_s = received_nbytes(), time.perf_counter()
        step()
        dist.barrier()
        if number >= 2 and ranks.rank % local == 0:  # the first ones make connections, and learn the order
            figures = [received_nbytes() - before, time.perf_counter() - began_s]
            print(json.dumps(figures), flush=True)
    ours.close()
    dist.destroy_process_group()


def ip(*words: object) -> None:
    subprocess.run(["ip", *map(str, words)], check=True)


@contextmanager
def namespaces(nodes: int, mbit: float) -> Iterator[list[str]]:
    """Names of network namespaces that are joined by links of so many Mbit/s, for one node each."""
    with ExitStack() as stack:
        tag = f"n{os.getpid() % 10_000}"
        ip("link", "add", tag, "type", "bridge")
        stack.callback(ip, "link", "del", tag)
        ip("link", "set", tag, "up")
        for node in range(nodes):
            name, outer = f"{tag}-{node}", f"{tag}v{node}"
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            ip("link", "add", outer, "type", "veth", "peer", "name", "border", "netns", name)
            ip("link", "set", outer, "master", tag, "up")
            ip("-n", name, "addr", "add", f"10.77.0.{node + 1}/24", "dev", "border")
            for device in ("border", "lo"):
                ip("-n", name, "link", "set", device, "up")
            shape = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "100ms"]
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "border", *shape], check=True)
            subprocess.run(["tc", "qdisc", "add", "dev", outer, *shape], check=True)
        yield [f"{tag}-{node}" for node in range(nodes)]


def measure(places: list[str], local: int, way: str, steps: int) -> tuple[float, float]:
    """Return the bytes that a node receives in a step, the mean over nodes, and the median seconds of one."""
    world = len(places) * local
    shared = {
        "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local, "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": 29500,
        "OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "border",
    }  # fmt: skip
    processes = []
    for rank in range(world):
        own = {**shared, "RANK": rank, "LOCAL_RANK": rank % local}
        command = [sys.executable, __file__, "--worker", way, "--steps", str(steps)]
        processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", places[rank // local], *command], text=True, stdout=subprocess.PIPE,
                env={**os.environ, **{key: str(value) for key, value in own.items()}},
            )
        )  # fmt: skip
    said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"ranks failed ({way})")
    rows = [json.loads(line) for each in said[::local] for line in each.splitlines()]
    return statistics.mean(row[0] for row in rows), statistics.median(row[1] for row in rows)


def planned_nbytes(way: str, nodes: int, local: int) -> float:
    """Return the payload that a node receives in a step."""
    world = nodes * local
    away = world - local  # slices
    # A ring of all ranks brings a node all slices but one; an all-to-all brings each rank its own from all.
    slices = {WAYS[0]: 2 * (world - 1) + local * away, WAYS[1]: 3 * away, WAYS[2]: 2 * away}[way]
    return UNITS * UNIT_NBYTES * slices / world


def main(argv: list[str] | None = None) -> None:
    options = Options(__doc__, "one step", dtype=False)
    options.add_argument("--nodes", type=int, default=2)
    options.add_argument("--local", type=int, default=2, help="ranks of a node")
    options.add_argument("--mbit", type=float, default=400, help="of a node's link")
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--worker", default="", help="be one of the ranks")
    given = options.parse(argv, steps=1)
    if given.worker:
        worker(given.worker, given.steps)
        return
    if os.geteuid():
        say("omitted: network namespaces need root")
        print_claims([], given.json and Path(given.json))
        return
    found = {}
    with namespaces(given.nodes, given.mbit) as places:
        for way in WAYS:
            say(f"{given.nodes} x {given.local} ranks, {way}, {given.mbit:g} Mbit/s")
            found[way] = measure(places, given.local, way, given.steps)
    rows, claims, base = [], [], found[WAYS[0]]
    for way, (nbytes, step_s) in found.items():
        planned = planned_nbytes(way, given.nodes, given.local)
        parts = [nbytes / 2**20, planned / 2**20, nbytes / base[0], step_s, base[1] / step_s]
        rows.append([way, *(f"{each:.2f}" for each in parts)])
        claims.append(Claim.at_most(f"{way}: received, of planned", nbytes / planned, OVERHEAD))
    print_table(["gathers", "received (MiB)", "planned (MiB)", "of one node's", "step (s)", "faster"], rows)
    print_claims(claims, given.json and Path(given.json))


if __name__ == "__main__":
    main()
