"""How fast ranks of this machine exchange bytes through host memory."""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_TRIES, _TIMEOUT_S = 8, 30.0


class Exchange(NamedTuple):
    """What two ranks take that send to each other at one time.

    Attributes:
        bytes_per_s: That each sends.
        core_s_per_byte: Time of all cores that each of these costs it, with one that it receives (s).
    """

    bytes_per_s: float
    core_s_per_byte: float


def measure_exchange(nbytes: int = 2**24) -> Exchange:
    """Let two ranks gather and exchange bytes, by gloo.

    Both are threads of this process, in groups that no other code sees.

    Args:
        nbytes: Of a unit's full values: each rank sends a half.
    """
    store, half = torch._C._distributed_c10d.HashStore(), nbytes // 2

    def rank(number: int) -> list[tuple[float, float]]:
        group: Any = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=_TIMEOUT_S))
        full, other = (torch.zeros(nbytes, dtype=torch.uint8, device="cpu") for _ in range(2))
        taken_s = []
        for _ in range(_TRIES):
            began_s, core_s = time.perf_counter(), time.process_time()
            group._allgather_base(full, full[number * half : (number + 1) * half].clone()).wait()
            group.alltoall_base(other, full, [], []).wait()
            taken_s.append((time.perf_counter() - began_s, time.process_time() - core_s))
        return taken_s[1:]  # the first makes pages ready

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(rank, range(2))
    wall_s, core_s = (statistics.median(map(max, a, b)) for a, b in zip(zip(*first), zip(*second)))
    return Exchange(2 * half / wall_s, core_s / 2 / (2 * half))
