"""Timeline of a run: spans on lanes, recorded by wrappers, exported to Perfetto or drawn.

Lanes beside each other show what a step waited for. A disabled timeline costs one comparison per span.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from infinity.core.files import write_file
from infinity.core.nbytes import Extent
from infinity.core.transfer import Transfer, TransferEngine

#: Lanes in the order in which they are drawn; others follow by name.
LANES = ("compute", "read", "write", "update", "collective")
#: Number of spans that are kept; older ones are dropped.
CAPACITY = 200_000
_COLORS = {
    "compute": "#4c78a8",
    "read": "#54a24b",
    "write": "#e45756",
    "update": "#f2a541",
    "collective": "#9d76c1",
}


class Span(NamedTuple):
    """An interval on a lane; times are seconds of the timeline's clock."""

    lane: str
    name: str
    start_s: float
    end_s: float


class Timeline:
    """Collects spans, from any thread.

    Args:
        enabled: Record spans.
        clock: Returns seconds.
    """

    def __init__(self, *, enabled: bool = True, clock: Callable[[], float] = time.perf_counter) -> None:
        self.enabled = enabled
        self.clock = clock
        self._spans: deque[Span] = deque(maxlen=CAPACITY)
        self._lock = threading.Lock()
        self._nothing = nullcontext()

    def span(self, lane: str, name: str) -> AbstractContextManager[None]:
        """Record the body of a ``with`` statement as one span, also if it raises."""
        return self._timed(lane, name) if self.enabled else self._nothing

    def add(self, lane: str, name: str, start_s: float, end_s: float) -> None:
        """Record a span that was timed with :attr:`clock`."""
        if self.enabled:
            with self._lock:
                self._spans.append(Span(lane, name, start_s, end_s))

    def spans(self) -> tuple[Span, ...]:
        """Return the recorded spans, sorted by start."""
        with self._lock:
            return tuple(sorted(self._spans, key=lambda span: span.start_s))

    @contextmanager
    def _timed(self, lane: str, name: str) -> Iterator[None]:
        start_s = self.clock()
        try:
            yield
        finally:
            self.add(lane, name, start_s, self.clock())


class WatchedEngine:
    """Transfer engine that records its transfers as spans, and reports the bytes of every request.

    Attributes:
        listener: Called with bytes read and bytes written, on any thread; None: nothing is reported.
    """

    def __init__(self, engine: TransferEngine, timeline: Timeline) -> None:
        self._engine, self.name, self._timeline = engine, engine.name, timeline
        self.listener: Callable[[int, int], object] | None = None

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
    """Update rule that records each update as a span of lane ``update``."""

    def __init__(self, rule: Any, timeline: Timeline) -> None:
        self._rule, self._timeline = rule, timeline

    def update(self, *args: Any) -> None:
        with self._timeline.span("update", "update"):
            self._rule.update(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)


def write_trace(spans: Sequence[Span], path: Path, *, rank: int = 0) -> None:
    """Write ``spans`` as Chrome trace events, for ui.perfetto.dev; time starts at 0.

    A lane becomes a process, and its overlapping spans (concurrent reads) its threads, because one thread
    of a trace cannot show two spans at the same time.
    """
    start_s = min((span.start_s for span in spans), default=0.0)
    lanes = _lanes(spans)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"rank {rank} {lane}"}}
        for pid, lane in enumerate(lanes)
    ]
    for span, row in zip(spans, _rows(spans)):
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "pid": lanes.index(span.lane),
                "tid": row,
                "ts": (span.start_s - start_s) * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
            }
        )
    write_file(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def draw(spans: Sequence[Span], path: Path, *, start_s: float = 0.0, end_s: float | None = None) -> None:
    """Draw ``spans`` between two times as PNG or SVG, one row per lane.

    Needs matplotlib (extra: plots).

    Args:
        start_s: Start of the drawn part, relative to the first span.
        end_s: The end of the picture; None: that of the last span.
    """
    from matplotlib.figure import Figure

    zero_s = min((span.start_s for span in spans), default=0.0) + start_s
    last_s = max((span.end_s for span in spans), default=0.0) if end_s is None else zero_s - start_s + end_s
    shown = [span for span in spans if span.end_s > zero_s and span.start_s < last_s]
    lanes = _lanes(shown)
    figure = Figure(figsize=(11, 0.6 + 0.45 * len(lanes)), layout="constrained")
    axes = figure.add_subplot()
    for y, lane in enumerate(lanes):
        bars = [
            (max(span.start_s, zero_s) - zero_s, min(span.end_s, last_s) - max(span.start_s, zero_s))
            for span in shown
            if span.lane == lane
        ]
        axes.broken_barh(bars, (y - 0.36, 0.72), facecolor=_COLORS.get(lane, "#888888"), edgecolor="none")
    axes.set_yticks(range(len(lanes)), labels=lanes)
    axes.invert_yaxis()
    axes.set_xlim(0, last_s - zero_s)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(path, dpi=150)


def _lanes(spans: Sequence[Span]) -> list[str]:
    found = {span.lane for span in spans}
    return [lane for lane in LANES if lane in found] + sorted(found.difference(LANES))


def _rows(spans: Sequence[Span]) -> list[int]:
    """Return for each span the first row of its lane that is free when it starts."""
    free_s: dict[str, list[float]] = {}
    rows = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda i: spans[i].start_s):
        span, ends = spans[index], free_s.setdefault(spans[index].lane, [])
        row = next((i for i, end_s in enumerate(ends) if end_s <= span.start_s), len(ends))
        ends[row : row + 1] = [span.end_s]
        rows[index] = row
    return rows
