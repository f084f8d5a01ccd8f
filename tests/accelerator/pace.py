"""Gives the simulated accelerator, its link, the host's cores and drives durations, on the wall's clock.

A kernel, a copy, an update on cores or a drive's request is computed at once, and then lasts as long as its
flops or bytes take at a rate: one after the other on each resource, each as soon as what it waits for has
ended. A thread of the host that waits for it sleeps until then. So real threads, locks and decisions run
against a machine of any shape; only the host's own Python takes its own time.
"""

import functools
import math
import time
from bisect import bisect, insort
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock
from typing import Any

from infinity.nvme.engines import ThreadsEngine
from infinity.optim.rules import HostRule
from tests.accelerator.device import simulator
from tests.accelerator.simulator import Range

COMPUTE, UP, DOWN, CORES, READ, WRITE = (
    "compute",
    "host to device",
    "device to host",
    "cores",
    "read",
    "write",
)
RESOURCES = (COMPUTE, UP, DOWN, CORES, READ, WRITE)
_PRODUCTS = ("mm", "addmm", "bmm")


@dataclass(eq=False)
class Pace:
    """Durations of all that resources do.

    Attributes:
        rates: Of each resource: bytes per second, of compute flops; what is missing takes no time.
        done: What each resource did since :meth:`clear`: bytes, or flops.
        busy: When each resource did it: begin and end (s).
    """

    rates: Mapping[str, float] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    busy: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    lock: Any = field(default_factory=Lock)

    def clear(self) -> None:
        with self.lock:
            self.done.clear()
            self.busy = {name: [] for name in RESOURCES}

    def take(self, resource: str, amount: float, ready_s: float) -> float:
        """Let a resource do something as soon as it is free after ``ready_s``; return when it has ended."""
        with self.lock:
            self.done[resource] += round(amount)
            taken_s = amount / self.rates.get(resource, math.inf)
            if not taken_s:
                return ready_s
            busy = self.busy.setdefault(resource, [])
            at_s, first = ready_s, max(0, bisect(busy, (ready_s,)) - 1)
            for began_s, ended_s in islice(busy, first, None):
                if began_s >= at_s + taken_s:
                    break
                at_s = max(at_s, ended_s)
            insort(busy, (at_s, at_s + taken_s))
            return at_s + taken_s

    def work(self, what: str, reads: Sequence[Range], writes: Sequence[Range]) -> tuple[str, float] | None:
        """Return the resource that a kernel or copy takes, and its flops or bytes; None: it takes no time."""
        if what in (UP, DOWN):
            return what, max((end - begin for begin, end in (*reads, *writes)), default=0)
        if what.partition(".")[0] in _PRODUCTS:
            sizes = [end - begin for begin, end in (*reads[-2:], *writes)]
            return COMPUTE, 2 * math.sqrt(math.prod(size / 2 for size in sizes))  # bf16: m k, k n and m n
        return None

    def sleep_until(self, at_s: float) -> None:
        while (left_s := at_s - time.perf_counter()) > 0:
            time.sleep(left_s)


def install(pace: Pace) -> None:
    """Let everything in this process last as ``pace`` says; once in a process."""
    pace.clear()
    simulator.pace = pace
    _wrap(HostRule, "update", functools.partial(_updates, pace))
    _wrap(ThreadsEngine, "_move", functools.partial(_moves, pace))


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any) -> Any:
        return around(original, *args)

    setattr(owner, name, wrapped)


def _updates(pace: Pace, update: Any, rule: Any, weight: Any, grad: Any, state: Any, *more: Any) -> None:
    began_s = time.perf_counter()
    update(rule, weight, grad, state, *more)
    nbytes = 2 * weight.nbytes + grad.nbytes + 2 * sum(each.nbytes for each in state)
    pace.sleep_until(pace.take(CORES, nbytes, began_s))


def _moves(pace: Pace, move: Any, engine: Any, request: Any) -> int:
    began_s = time.perf_counter()
    moved: int = move(engine, request)
    pace.sleep_until(pace.take(WRITE if request.move.writes else READ, moved, began_s))
    return moved
