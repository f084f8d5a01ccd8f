"""Stalls: time that compute waits, by cause."""

import time
from collections.abc import Callable
from typing import Any

from infinity.core.transfer import Lease, Pool
from infinity.observe.timeline import Timeline


class Stalls:
    """Counts the training thread's waits; the time between two waits is compute.

    Args:
        timeline: Receives the compute spans.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.seconds: dict[str, float] = {}
        self.timeline = timeline
        self._waited_until = time.perf_counter()

    def __call__(self, cause: str, wait: Callable[[], object]) -> None:
        """Run ``wait`` and count its seconds as a stall of ``cause``."""
        begin = time.perf_counter()
        self.timeline.add("compute", "compute", self._waited_until, begin)
        try:
            wait()
        finally:
            self._waited_until = end = time.perf_counter()
            self.seconds[cause] = self.seconds.get(cause, 0.0) + end - begin


class CountingPool:
    """Pool of the training thread that counts waiting for a buffer as a stall of cause ``update``."""

    def __init__(self, pool: Pool, stalls: Stalls) -> None:
        self._pool, self._stalls = pool, stalls
        self._held_back: list[Lease] = []

    def hold_back(self, lease: Lease) -> None:
        """Let a lease be given back after :meth:`give_back` only, or when a buffer does not fit beside it."""
        lease.defer_release(True)
        self._held_back.append(lease)

    def give_back(self) -> None:
        """Give back what was held back, as soon as its users have released it."""
        held_back, self._held_back = self._held_back, []
        for lease in held_back:
            lease.defer_release(False)

    def lease(self, nbytes: int, *, who: str) -> Lease:
        found = [self._pool.try_lease(nbytes, who=who)]
        if found[0] is None:
            self.give_back()
            self._stalls("update", lambda: found.append(self._pool.lease(nbytes, who=who)))
        assert found[-1] is not None
        return found[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)
