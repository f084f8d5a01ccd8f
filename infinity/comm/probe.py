"""How fast ranks of this machine exchange bytes through host memory."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_TRIES, _TIMEOUT_S = 4, 30.0


def exchange_bytes_per_s(nbytes: int = 2**24) -> float:
    """Bytes that one of two ranks sends to the other per second, by gloo, as both do at one time.

    Both are threads of this process, in groups that no other code sees.

    Args:
        nbytes: Of a unit's full values: each rank sends a half.
    """
    store, half = torch._C._distributed_c10d.HashStore(), nbytes // 2

    def rank(number: int) -> float:
        group: Any = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=_TIMEOUT_S))
        full, other = (torch.zeros(nbytes, dtype=torch.uint8, device="cpu") for _ in range(2))
        best_s = float("inf")
        for _ in range(_TRIES):
            began_s = time.perf_counter()
            group._allgather_base(full, full[number * half : (number + 1) * half].clone()).wait()
            group.alltoall_base(other, full, [], []).wait()
            best_s = min(best_s, time.perf_counter() - began_s)
        return best_s

    with ThreadPoolExecutor(2) as threads:
        return 2 * half / max(threads.map(rank, range(2)))
