"""``infinity plan``: what it prints, what it draws, and how it refuses."""

import io
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from infinity.app.plan import find_folder, open_plan, show_plan, ways
from infinity.cli import main
from infinity.core.errors import BudgetError, RecipeError
from infinity.planner.planning import FOLDER, Planning, save_measured
from infinity.planner.policies import smallest_budget
from tests.helpers.profiles import hardware, transformer
from tests.planner.test_planning import planning_for

PROFILE, DRIVE = transformer(layers=3), hardware(1.0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with a plan in it."""
    planning = planning_for(PROFILE, DRIVE)
    planning.save(tmp_path / "mine" / FOLDER)
    measured = replace(planning.predicted, step_s=0.345)
    save_measured(tmp_path / "mine" / FOLDER, planning.predicted, measured)
    return tmp_path / "mine"


def shown(run: Path, budget: str | None = None) -> str:
    out = io.StringIO()
    show_plan(str(run), budget, Console(file=out, width=160))
    return out.getvalue()


def test_a_plan_is_shown_block_by_block_beside_other_ways_and_what_was_measured(run: Path) -> None:
    pytest.importorskip("matplotlib")
    text = shown(run)
    for words in (
        r"^activations: 3 of 3 blocks to NVMe: peak",
        r"^before the blocks ",
        r"^layers\.0 +18\.3 +36\.7 +36 MiB +36 MiB",
        r"^after the blocks ",
        r"^the plan, predicted +0\.193 ",
        r"^the plan, measured +0\.345 ",
        r"^keep all +0\.193 .*152 MiB",
        r"^offload all ",
        r"^recompute all ",
        r"^SSDTrain's rule ",
        r"^no plan is faster than +0\.193 ",
        r"^memory over the step, before and after: .*plan\.png$",
    ):
        assert re.search(words, text, re.M), f"{words} is not in\n{text}"
    assert (run / FOLDER / "plan.png").read_bytes()[:4] == b"\x89PNG"


def test_the_folder_of_the_plan_will_do(run: Path) -> None:
    assert find_folder(run / FOLDER) == find_folder(run) == run / FOLDER


def test_another_budget_is_planned_for_and_kept_without_running_anything(run: Path) -> None:
    least = smallest_budget(PROFILE, DRIVE)
    budget_nbytes = (least + Planning.load(run / FOLDER).kept.peak_nbytes) // 2
    found = open_plan(str(run), str(budget_nbytes))
    assert found.planning.predicted.peak_nbytes <= budget_nbytes
    assert found.measured is None  # of another plan
    notes = {way.name: way.note for way in ways(found)}
    assert notes["keep all"] == "over the budget"
    assert notes["the plan, predicted"].startswith("within ")
    assert found.picture.name == f"plan_{budget_nbytes}.png"


def test_a_budget_that_no_plan_keeps_says_which_one_could_be_kept(run: Path) -> None:
    with pytest.raises(BudgetError, match=f"{smallest_budget(PROFILE, DRIVE)} bytes"):
        open_plan(str(run), "1MiB")


def test_a_budget_that_is_no_size_says_what_is(run: Path) -> None:
    with pytest.raises(RecipeError, match="--budget: 'much' is not a size; write 8GiB"):
        open_plan(str(run), "much")


def test_a_run_without_a_plan_says_how_to_get_one(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("INFINITY_TRACEBACK", raising=False)
    (tmp_path / "other").mkdir()
    assert main(["plan", str(tmp_path / "other")]) == 1
    assert "memory.activations=plan" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "nowhere")]) == 1
    assert "no such folder" in capsys.readouterr().err
    assert main(["plan", str(tmp_path)]) == 1
    assert f"the newest with a plan is {run}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layers", "gib_per_s", "name", "why"),
    [
        (2, 0.0, "offload all", "not possible: no directory in memory.nvme"),
        (0, 1.0, "recompute all", "not possible: the model has no blocks"),
    ],
)
def test_ways_that_model_or_machine_lack_are_said_to_be_impossible(
    tmp_path: Path, layers: int, gib_per_s: float, name: str, why: str
) -> None:
    planning_for(transformer(layers=layers), hardware(gib_per_s)).save(tmp_path)
    found = {way.name: way for way in ways(open_plan(str(tmp_path), None))}
    assert (found[name].outcome, found[name].note) == (None, why)


def test_without_scipy_the_bound_says_what_to_install(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    found = {way.name: way for way in ways(open_plan(str(run), None))}["no plan is faster than"]
    assert found.outcome is None
    assert "infinity-offload[bound]" in found.note


def test_plans_are_looked_at_without_torch() -> None:
    code = "import sys, infinity.app.plan; print({'torch', 'scipy', 'omegaconf'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
