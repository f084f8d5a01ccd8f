"""A timeline records spans of all threads, and nothing if it is disabled."""

import json
import threading
from pathlib import Path

import pytest

from infinity.observe import timeline as timeline_module
from infinity.observe.timeline import Span, Timeline, write_trace
from tests.helpers.timeline import read_trace

SPANS = (
    Span("read", "unit 0", 10.0, 12.0),
    Span("compute", "layer 0", 11.0, 11.5),
    Span("read", "unit 1", 11.0, 13.0),
    Span("other", "x", 12.0, 12.5),
    Span("read", "unit 2", 12.0, 14.0),
)


def test_spans_are_sorted_by_their_start() -> None:
    timeline = Timeline()
    timeline.add("compute", "forward", 1.0, 2.0)
    timeline.add("write", "unit 0", 0.5, 9.0)
    assert timeline.spans() == (Span("write", "unit 0", 0.5, 9.0), Span("compute", "forward", 1.0, 2.0))


def test_a_disabled_timeline_records_nothing() -> None:
    timeline = Timeline(enabled=False)
    timeline.add("read", "unit 0", 0.0, 1.0)
    assert timeline.spans() == ()


def test_spans_of_many_threads_are_all_kept() -> None:
    timeline = Timeline()

    def work(lane: str) -> None:
        for index in range(200):
            timeline.add(lane, str(index), timeline.clock(), timeline.clock())

    threads = [threading.Thread(target=work, args=(lane,)) for lane in ("read", "write", "update", "compute")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = timeline.spans()
    assert len(set(spans)) == 800
    assert [span.start_s for span in spans] == sorted(span.start_s for span in spans)


def test_only_the_latest_spans_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "CAPACITY", 3)
    timeline = Timeline()
    for index in range(5):
        timeline.add("read", str(index), index, index + 1)
    assert [span.name for span in timeline.spans()] == ["2", "3", "4"]


def test_a_trace_holds_every_span_in_microseconds_from_zero(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    write_trace(SPANS, path, rank=3)
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert list(names.values()) == ["rank 3 compute", "rank 3 read", "rank 3 other"]
    shown = {event["name"]: event for event in events if event["ph"] == "X"}
    assert (shown["layer 0"]["ts"], shown["layer 0"]["dur"]) == (1e6, 0.5e6)
    assert names[shown["unit 1"]["pid"]] == "rank 3 read"
    assert read_trace(path) == tuple(
        Span(span.lane, span.name, span.start_s - 10, span.end_s - 10) for span in SPANS
    )


def test_concurrent_reads_get_rows_of_their_own(tmp_path: Path) -> None:
    write_trace(SPANS, tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    rows = {event["name"]: event["tid"] for event in events if event["ph"] == "X"}
    assert (rows["unit 0"], rows["unit 1"], rows["unit 2"]) == (0, 1, 0)


def test_a_trace_without_spans_is_a_trace(tmp_path: Path) -> None:
    write_trace((), tmp_path / "t.json")
    assert read_trace(tmp_path / "t.json") == ()
