"""What a run reports about its activations: the line, the files, the figures of the summary."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import infinity
from infinity.activations.controller import METERED
from infinity.activations.tensor_cache import ActivationStats
from infinity.app.train import ActivationView, train
from infinity.core.plan import FOLDER, Hardware, Planning
from infinity.engine import runtime
from infinity.observe.metrics import (
    ActivationSummary,
    StepReport,
    SummaryBuilder,
    activation_rows,
    compared,
    summary_rows,
)
from tests.helpers.profiles import hardware, transformer
from tests.planner.test_planning import planning_for

REPORT = StepReport(
    step=1,
    loss=None,
    lr=1e-3,
    grad_norm=None,
    skipped=False,
    step_s=1.0,
    tokens=1,
    stall_s={"activation": 0.5},
)
PLANNED: Any = {"planned_nbytes_read": 190, "planned_nbytes_written": 300}
PLANNING = planning_for(transformer(layers=2), hardware(4.0))
MEASURED = replace(PLANNING.predicted, step_s=1.1 * PLANNING.predicted.step_s)


def activations(policy: str) -> Any:
    cache = SimpleNamespace(stats=ActivationStats())
    return SimpleNamespace(policy=policy, planning=None, cache=cache, measured=lambda: MEASURED)


def steps(view: ActivationView, stats: ActivationStats, *stored: int) -> None:
    for nbytes in stored:
        stats.nbytes_stored += nbytes
        stats.nbytes_loaded += nbytes // 2
        view.step(REPORT)


def test_a_plan_is_saved_and_announced_once(tmp_path: Path) -> None:
    given, said = activations("plan"), list[str]()
    view = ActivationView(given, tmp_path, 2, said.append)
    steps(view, given.cache.stats, 900)
    assert not (tmp_path / FOLDER).exists()
    given.planning = PLANNING
    steps(view, given.cache.stats, 800, 100, 100, 60)
    assert Planning.load(tmp_path / FOLDER) == PLANNING
    assert said == [PLANNING.describe()]
    result = view.result()
    assert result is not None
    assert (result.nbytes_stored, result.nbytes_loaded, result.stall_s) == (100, 50, 0.5)  # under the plan
    assert result.predicted == PLANNING.predicted
    # Of a step's two micro-batches each waited half as long.
    assert result.measured == replace(MEASURED, stall_s=0.25) == Planning.load(tmp_path / FOLDER).measured


def test_a_policy_by_hand_has_figures_and_no_files(tmp_path: Path) -> None:
    given = activations("offload")
    given.cache.stats.add(5 * 2**20)
    view = ActivationView(given, tmp_path, 1, lambda line: None)
    steps(view, given.cache.stats, 100, 100, 200)
    result = view.result()
    assert result is not None
    assert activation_rows(result) == [
        ("activations", "offload: peak 5 MiB of saved activations"),
        ("", "100 bytes stored and 50 loaded per step, waited for 0.5 s"),
    ]
    assert list(tmp_path.iterdir()) == []


def test_kept_activations_have_no_figures(tmp_path: Path) -> None:
    view = ActivationView(activations("keep"), tmp_path, 1, lambda line: None)
    assert view.result() is None


def test_a_run_that_ends_before_its_plan_has_no_figures_of_it(tmp_path: Path) -> None:
    result = ActivationView(activations("plan"), tmp_path, 1, lambda line: None).result()
    assert result == ActivationSummary(
        policy="plan", nbytes_stored=0, nbytes_loaded=0, stall_s=0.0, saved_peak_nbytes=0
    )


def test_the_summary_compares_predicted_and_measured_cost() -> None:
    figures = ActivationSummary(
        policy="plan", nbytes_stored=1000, nbytes_loaded=900, stall_s=0.25, saved_peak_nbytes=0,
        plan="1 of 2 blocks to NVMe, 1 kept", planning_s=0.125,
        predicted=PLANNING.predicted, measured=MEASURED,
    )  # fmt: skip
    rows = activation_rows(figures)
    assert rows[0] == ("activations", "1 of 2 blocks to NVMe, 1 kept; planned in 0.12 s")
    assert rows[1] == ("", f"measured {compared(PLANNING.predicted, MEASURED)}")
    assert "(+10.0% of predicted)" in rows[1][1]
    assert rows[2] == ("", "1,000 bytes stored and 900 loaded per step, waited for 0.25 s")


def test_bytes_of_activations_are_shown_beside_the_planned_bytes_of_units(tmp_path: Path) -> None:
    view = SummaryBuilder()
    view.step(replace(REPORT, nbytes_read=1090, nbytes_written=1300, **PLANNED))
    figures = ActivationSummary(
        policy="offload", nbytes_stored=1000, nbytes_loaded=900, stall_s=0.0, saved_peak_nbytes=0
    )
    rows = dict(summary_rows(view.result(folder=tmp_path, world_size=1, budgets={}, activations=figures)))
    assert rows["read per step"] == "1,090 bytes per rank (planned 190, plus 900 of activations)"
    assert rows["written per step"] == "1,300 bytes per rank (planned 300, plus 1,000 of activations)"


def test_a_run_saves_its_plan_and_the_measured_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)  # the cache of its data is below it
    fast = Hardware(1e10, 1e10, 1e10, 0.0)  # a busy machine's drive may be worth nothing
    monkeypatch.setattr(runtime, "measure_hardware", lambda *args: fast)
    recipe = infinity.load_recipe(
        overrides=[
            f"run.dir={tmp_path}", "run.name=mine", f"memory.nvme=[{tmp_path}/nvme]", "memory.host=64MiB",
            "memory.activations=plan", "model.n_layers=2", "model.d_model=128", "model.n_heads=2",
            "model.seq_len=256", f"train.steps={METERED + 2}", "train.batch_size=8", "train.eval_every=null",
            "train.dtype=fp32", f"data.files=[{__file__}]", "data.eval_fraction=0",
        ]
    )  # fmt: skip
    train(recipe)
    folder = tmp_path / "mine" / FOLDER
    planning = Planning.load(folder)
    measured = planning.measured
    assert len(planning.profile.blocks) == 2
    assert planning.describe() in capsys.readouterr().err
    given = json.loads((tmp_path / "mine" / "summary.json").read_text())["activations"]
    assert measured is not None
    assert given["predicted"]["peak_nbytes"] == planning.predicted.peak_nbytes
    assert given["measured"]["step_s"] == measured.step_s > 0
    placed = sum(slot.nbytes for slot in planning.profile.slots if slot.key in planning.plan.places)
    # Less where backward wants a tensor before its store begins, which depends on times.
    assert 0 < planning.predicted.nbytes_stored <= placed
    assert 0 < given["nbytes_stored"] <= placed
