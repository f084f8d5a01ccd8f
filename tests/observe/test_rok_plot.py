"""The table and the picture of the recompute-offload-keep curve."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from infinity.app.rok_plot import RokPoint, draw_rok, rok_table

KEEP = RokPoint(way="keep", batch_size=2, step_s=0.5, tokens=100, flops=10**9, peak_nbytes=3 << 20)
PLAN = replace(KEEP, way="plan", budget_nbytes=1 << 20, peak_nbytes=1 << 20, nbytes_stored=2 << 20)
FAILED = RokPoint(way="offload", batch_size=4, error="ended by SIGKILL: out of memory?")
POINTS = [KEEP, FAILED, PLAN, replace(PLAN, peak_nbytes=2 << 20)]


def test_throughput_is_of_the_algorithm_over_the_time_of_the_step() -> None:
    assert (KEEP.tokens_per_s, KEEP.flops_per_s) == (200.0, 2e9)
    assert (FAILED.tokens_per_s, FAILED.flops_per_s) == (0.0, 0.0)


def test_a_table_shows_every_point_and_why_one_has_no_figures() -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(rok_table(POINTS))
    lines = out.getvalue().splitlines()
    assert lines[1].split() == ["2", "keep", "3", "MiB", "200", "2.0", "0.500"]
    assert lines[2].split(maxsplit=2) == ["4", "offload", "ended by SIGKILL: out of memory?"]
    assert lines[3].split() == ["2", "plan", "1", "MiB", "1", "MiB", "200", "2.0", "0.500", "2", "MiB"]


def test_a_picture_shows_the_ways_with_figures_and_their_batch_sizes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_rok(tmp_path / "rok.svg", POINTS, title="A curve")
    text = (tmp_path / "rok.svg").read_text()
    for words in ("A curve", "keep", "plan", "batch 2", "activation peak", "Gflop/s"):
        assert f"<!-- {words}" in text or f"({words}" in text, words
    assert "<!-- offload" not in text
    assert "<!-- batch 4" not in text
