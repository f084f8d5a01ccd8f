"""benchmarks/rok.py: the points that are measured, a failed point, the table and the picture."""

import io
import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.rok import SHARES, RokPoint, draw_rok, main, measure_all, rok_table, run_point
from infinity.core.plan import FOLDER, Planning
from infinity.recipes.loading import load_recipe
from tests.helpers.profiles import hardware, smallest_budget, transformer
from tests.planner.test_planning import planning_for

TINY = """
model: {n_layers: 2, d_model: 64, n_heads: 2, seq_len: 64}
memory: {host: 64MiB, nvme: [NVME]}
data: {files: [DATA], eval_fraction: 0}
train: {batch_size: 2, dtype: fp32, accumulate: 2}
"""


def write(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    text = TINY.replace("NVME", str(tmp_path / "nvme")).replace("DATA", __file__)
    path.write_text(f"{text}run: {{dir: {tmp_path}, name: curve}}\n")
    return str(path)


def test_budgets_lie_between_the_smallest_possible_and_the_peak_of_keep(tmp_path: Path) -> None:
    planning = planning_for(transformer(layers=3), hardware(1.0))

    def measure(point: RokPoint, folder: Path) -> RokPoint:
        if point.way == "plan" and point.budget_nbytes is None:
            planning.save(folder / FOLDER)
        return replace(point, step_s=1.0)

    points = list(measure_all([2, 4], tmp_path, measure))
    for batch_size in (2, 4):
        found = [point for point in points if point.batch_size == batch_size]
        assert [point.way for point in found] == [
            "keep",
            "recompute",
            "offload",
            *["plan"] * (1 + len(SHARES)),
        ]
        budgets = [point.budget_nbytes for point in found[4:]]
        least = smallest_budget(planning.profile, planning.hardware)
        assert budgets == sorted(budgets)
        assert all(least < budget < planning.kept.peak_nbytes for budget in budgets if budget is not None)


def test_a_plan_that_failed_has_no_budgets_and_leaves_the_other_points(tmp_path: Path) -> None:
    points = list(measure_all([2, 4], tmp_path, lambda point, folder: replace(point, error="no")))
    assert [(point.batch_size, point.way) for point in points] == [
        (size, way) for size in (2, 4) for way in ("keep", "recompute", "offload", "plan")
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--batches=99999999"],
            r"--batches 99999999 --steps 5: train\.batch_size: got 199999998; wanted int, 1 to",
        ),
        (["--steps=99999999999"], r"--steps 99999999999: train\.steps: got .*; wanted int or null, 1 to"),
        (["--steps=0"], "--steps 0: wanted at least 1"),
        *((["--batches", text], "--batches .*as in 1,2,4") for text in ("", "a", "0", "1,,2", "-1", "1,x")),
    ],
)
def test_the_numbers_of_rok_have_the_ranges_of_the_recipe(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([write(tmp_path), *arguments, "--out", str(tmp_path / "curve")]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "curve").exists()


@pytest.mark.slow
def test_a_point_that_fails_has_the_reason(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path), ["memory.nvme=[]"])
    point = run_point(recipe, 1, RokPoint(way="offload", batch_size=2), tmp_path / "point")
    assert "memory.activations" in point.error
    assert point.step_s == 0


@pytest.mark.slow
def test_a_recipe_has_a_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "curve")]
    assert main([write(tmp_path), "train.dtype=bf16", "--batches", "4", "--steps", "2", *out]) == 0
    assert "throughput against activation peak" in capsys.readouterr().out
    given = json.loads((tmp_path / "curve" / "rok.json").read_text())
    points = given["points"]
    assert [point["error"] for point in points] == [""] * (4 + len(SHARES))
    keep, recompute, offload, free, *plans = points
    assert keep["tokens"] == 2 * 8 * 64
    assert len({point["flops"] for point in points}) == 1  # of the algorithm, whatever is done
    dense = 2 * 2 * (4 * 64 * 64 + 3 * 64 * 192) + 2 * 64 * 256  # a token's forward: 2 layers and the head
    attention = 2 * 4 * 64 * 64
    assert keep["flops"] == pytest.approx(3 * keep["tokens"] * (dense + attention), rel=0.2)
    assert recompute["peak_nbytes"] < keep["peak_nbytes"]
    assert offload["nbytes_stored"] > 0 == keep["nbytes_stored"]
    for point in plans:
        assert point["peak_nbytes"] <= 1.1 * point["budget_nbytes"]
    folder = tmp_path / "curve" / "batch8_plan" / FOLDER
    assert Planning.load(folder).predicted.peak_nbytes == pytest.approx(free["peak_nbytes"], rel=0.1)
    assert Planning.load(folder).measured is not None
    assert (tmp_path / "curve" / "rok.png").exists()


def test_a_point_whose_process_is_killed_has_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *args, **how: subprocess.CompletedProcess(args, -9))
    recipe = load_recipe(write(tmp_path), ["memory.activations=recompute", "memory.device=1GiB"])
    point = run_point(recipe, 3, RokPoint(way="keep", batch_size=6), tmp_path / "point")
    assert point == RokPoint(way="keep", batch_size=6, error="ended by SIGKILL: out of memory?")
    asked = load_recipe(tmp_path / "point" / "recipe.yaml")
    assert asked.train.batch_size == 6
    assert (asked.memory.activations, asked.memory.device) == ("keep", None)
    assert asked.train.steps == 4 + 3  # seven passes, two a step, before those that are timed


KEEP = RokPoint(way="keep", batch_size=2, step_s=0.5, tokens=100, flops=10**9, peak_nbytes=3 << 20)
PLAN = replace(KEEP, way="plan", budget_nbytes=1 << 20, peak_nbytes=1 << 20, nbytes_stored=2 << 20)
FAILED = RokPoint(way="offload", batch_size=4, error="ended by SIGKILL: out of memory?")
POINTS = [KEEP, FAILED, PLAN, replace(PLAN, peak_nbytes=2 << 20)]


def test_throughput_is_flops_and_tokens_per_second_of_the_step() -> None:
    assert (KEEP.tokens_per_s, KEEP.flops_per_s) == (200.0, 2e9)
    assert (FAILED.tokens_per_s, FAILED.flops_per_s) == (0.0, 0.0)


def test_the_table_shows_every_point_or_its_error() -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(rok_table(POINTS))
    lines = out.getvalue().splitlines()
    assert lines[1].split() == ["2", "keep", "3", "MiB", "200", "2.0", "0.500"]
    assert lines[2].split(maxsplit=2) == ["4", "offload", "ended by SIGKILL: out of memory?"]
    assert lines[3].split() == ["2", "plan", "1", "MiB", "1", "MiB", "200", "2.0", "0.500", "2", "MiB"]


def test_the_picture_shows_the_points_with_figures_and_their_batch_sizes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_rok(tmp_path / "rok.svg", POINTS, title="A curve")
    text = (tmp_path / "rok.svg").read_text()
    for words in ("A curve", "keep", "plan", "batch 2", "activation peak", "Gflop/s"):
        assert f"<!-- {words}" in text or f"({words}" in text, words
    assert "<!-- offload" not in text
    assert "<!-- batch 4" not in text
