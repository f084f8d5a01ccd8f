"""Tells what training does: spans on lanes for Perfetto, waits by cause, messages.

Lanes side by side show what a step waited for. A disabled timeline costs one comparison per span.
"""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from infinity.core.files import write_file
from infinity.core.nbytes import Extent, Transfer, TransferEngine

#: Logger of messages that no display shows; to see them: ``logging.basicConfig(level=logging.INFO)``.
log = logging.getLogger("infinity")
#: Lanes in the order in which they are shown; others follow by name.
LANES = ("compute", "read", "write", "update", "collective")
#: Number of spans that are kept; older ones are dropped.
CAPACITY = 200_000


class Span(NamedTuple):
    """An interval on a lane; times are seconds of the timeline's clock."""

    lane: str
    name: str
    start_s: float
    end_s: float


class Timeline:
    """Collects spans from any thread, and counts waits of the training thread; ``clock`` returns seconds."""

    def __init__(self, *, enabled: bool = True, clock: Callable[[], float] = time.perf_counter) -> None:
        self.enabled = enabled
        self.clock = clock
        self._spans: deque[Span] = deque(maxlen=CAPACITY)
        self._lock = threading.Lock()
        self.stall_s: dict[str, float] = {}  # by cause
        self._waited_until = clock()

    def stall(self, cause: str, wait: Callable[[], Any]) -> Any:
        """Return ``wait()``; count its seconds as a stall of ``cause``, the time between two as compute."""
        begin = self.clock()
        self.add("compute", "compute", self._waited_until, begin)
        try:
            return wait()
        finally:
            self._waited_until = end = self.clock()
            self.stall_s[cause] = self.stall_s.get(cause, 0.0) + end - begin

    def add(self, lane: str, name: str, start_s: float, end_s: float) -> None:
        """Record a span that was timed with :attr:`clock`."""
        if self.enabled:
            with self._lock:
                self._spans.append(Span(lane, name, start_s, end_s))

    def spans(self) -> tuple[Span, ...]:
        """Return the recorded spans, sorted by start."""
        with self._lock:
            return tuple(sorted(self._spans, key=lambda span: span.start_s))


class MessageBuffer:
    """Forwards messages to a display; until one is attached, logs and collects them."""

    def __init__(self) -> None:
        self._show: Callable[[str], object] | None = None
        self._pending: list[str] = []

    def __call__(self, text: str) -> None:
        if self._show is None:
            log.info("%s", text)
            self._pending.append(text)
        else:
            self._show(text)

    def attach(self, show: Callable[[str], object]) -> None:
        """Forward all messages to ``show``, earlier ones first."""
        self._show = show
        while self._pending:
            show(self._pending.pop(0))


class WatchedEngine:
    """Transfer engine that records its transfers as spans, and reports the bytes of each request."""

    def __init__(self, engine: TransferEngine, timeline: Timeline) -> None:
        self._engine, self.name, self._timeline = engine, engine.name, timeline
        self.listener: Callable[[int, int], object] | None = None  # of bytes read, written; any thread

    def read(self, extent: Extent, memory: memoryview, *, urgent: bool = False) -> Transfer:
        if self.listener is not None:
            self.listener(extent.nbytes, 0)
        begin_s = self._timeline.clock()
        transfer = self._engine.read(extent, memory, urgent=urgent)
        return self._record("read", "weights" if urgent else "state", begin_s, transfer)

    def write(self, extent: Extent, memory: memoryview) -> Transfer:
        if self.listener is not None:
            self.listener(0, extent.nbytes)
        begin_s = self._timeline.clock()
        return self._record("write", "state", begin_s, self._engine.write(extent, memory))

    def _record(self, lane: str, name: str, begin_s: float, transfer: Transfer) -> Transfer:
        if self._timeline.enabled:
            transfer.then(lambda: self._timeline.add(lane, name, begin_s, self._timeline.clock()))
        return transfer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class TimedRule:
    """Update rule that records each update as a span of the lane ``update``."""

    def __init__(self, rule: Any, timeline: Timeline) -> None:
        self._rule, self._timeline = rule, timeline

    def update(self, *args: Any) -> None:
        begin_s = self._timeline.clock()
        self._rule.update(*args)
        self._timeline.add("update", "update", begin_s, self._timeline.clock())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)


def write_trace(spans: Sequence[Span], path: Path, *, rank: int = 0) -> None:
    """Write Chrome trace events for ui.perfetto.dev: lanes are processes, overlapping spans threads."""
    start_s = min((span.start_s for span in spans), default=0.0)
    found = {span.lane for span in spans}
    lanes = [lane for lane in LANES if lane in found] + sorted(found.difference(LANES))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"rank {rank} {lane}"}}
        for pid, lane in enumerate(lanes)
    ]
    free_s: dict[str, list[float]] = {lane: [] for lane in lanes}  # when each row of a lane is free
    for span in sorted(spans, key=lambda span: span.start_s):
        ends = free_s[span.lane]
        row = next((i for i, end_s in enumerate(ends) if end_s <= span.start_s), len(ends))
        ends[row : row + 1] = [span.end_s]
        ts, dur = (span.start_s - start_s) * 1e6, (span.end_s - span.start_s) * 1e6
        pid = lanes.index(span.lane)
        events.append({"ph": "X", "name": span.name, "pid": pid, "tid": row, "ts": ts, "dur": dur})
    write_file(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
