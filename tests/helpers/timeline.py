"""Timelines of runs, read back."""

import json
from pathlib import Path

from infinity.observe.timeline import Span


def read_trace(path: Path) -> tuple[Span, ...]:
    """Read the spans that :func:`write_trace` wrote, rounded to microseconds."""
    events = json.loads(path.read_text("utf-8"))["traceEvents"]
    lanes = {e["pid"]: e["args"]["name"].split(" ", 2)[2] for e in events if e["ph"] == "M"}
    return tuple(
        Span(lanes[e["pid"]], e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
        for e in events
        if e["ph"] == "X"
    )
