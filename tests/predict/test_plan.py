"""``infinity plan``: its tables, its picture and its errors."""

import io
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from infinity.cli import main
from infinity.core.errors import BudgetError, RecipeError
from infinity.core.plan import FOLDER, Outcome, Planning
from infinity.predict.plan_run import (
    Alternative,
    PlanRow,
    alternatives,
    alternatives_table,
    draw_memory,
    find_folder,
    open_plan,
    plan_table,
    show_plan,
)
from tests.helpers.profiles import hardware, smallest_budget, transformer
from tests.planner.test_planning import planning_for

PROFILE, DRIVE = transformer(layers=3), hardware(1.0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with a plan in it."""
    planning = planning_for(PROFILE, DRIVE)
    measured = replace(planning.predicted, step_s=0.345)
    replace(planning, measured=measured).save(tmp_path / "mine" / FOLDER)
    return tmp_path / "mine"


def shown(run: Path, budget: str | None = None) -> str:
    out = io.StringIO()
    show_plan(str(run), budget, Console(file=out, width=160))
    return out.getvalue()


def test_a_plan_is_shown_block_by_block_beside_alternatives_and_the_measured_cost(run: Path) -> None:
    pytest.importorskip("matplotlib")
    text = shown(run)
    for words in (
        r"^activations: 2 of 3 blocks to NVMe, 1 kept: peak",
        r"^before the blocks ",
        r"^layers\.0 +18\.3 +36\.7 +36 MiB +36 MiB",
        r"^after the blocks ",
        r"^the plan, predicted +0\.193 ",
        r"^the plan, measured +0\.345 ",
        r"^keep all +0\.193 .*152 MiB",
        r"^offload all ",
        r"^recompute all ",
        r"^SSDTrain's rule ",
        r"^memory over the step, without and with the plan: .*plan\.png$",
    ):
        assert re.search(words, text, re.M), f"{words} is not in\n{text}"
    assert (run / FOLDER / "plan.png").read_bytes()[:4] == b"\x89PNG"


def test_the_plans_own_folder_is_accepted(run: Path) -> None:
    assert find_folder(run / FOLDER) == find_folder(run) == run / FOLDER


def test_another_budget_is_planned_for_without_training(run: Path) -> None:
    least = smallest_budget(PROFILE, DRIVE)
    budget_nbytes = (least + Planning.load(run / FOLDER).kept.peak_nbytes) // 2
    found = open_plan(str(run), str(budget_nbytes))
    assert found.predicted.peak_nbytes <= budget_nbytes
    assert found.measured is None  # of another plan
    notes = {row.name: row.note for row in alternatives(found)}
    assert notes["keep all"] == "over the budget"
    assert notes["the plan, predicted"].startswith("within ")
    pytest.importorskip("matplotlib")
    assert shown(run, str(budget_nbytes)).rstrip().endswith(f"plan_{budget_nbytes}.png")


def test_a_budget_that_is_too_small_is_an_error_with_the_smallest_one(run: Path) -> None:
    with pytest.raises(BudgetError, match=f"{smallest_budget(PROFILE, DRIVE)} bytes"):
        open_plan(str(run), "1MiB")


def test_an_invalid_size_is_an_error_with_an_example(run: Path) -> None:
    with pytest.raises(RecipeError, match="--budget: 'much' is not a size; write 8GiB"):
        open_plan(str(run), "much")


def test_a_run_without_a_plan_is_an_error_that_says_how_to_make_one(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("INFINITY_TRACEBACK", raising=False)
    (tmp_path / "other").mkdir()
    assert main(["plan", str(tmp_path / "other")]) == 1
    assert "memory.activations=plan" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "nowhere")]) == 1
    assert "no such file or folder" in capsys.readouterr().err
    assert main(["plan", str(tmp_path)]) == 1
    assert f"the newest with a plan is {run}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layers", "gib_per_s", "name", "why"),
    [
        (2, 0.0, "offload all", "not possible: memory.nvme is empty"),
        (0, 1.0, "recompute all", "not possible: the model has no blocks"),
    ],
)
def test_alternatives_that_model_or_machine_lack_are_marked_as_impossible(
    tmp_path: Path, layers: int, gib_per_s: float, name: str, why: str
) -> None:
    planning_for(transformer(layers=layers), hardware(gib_per_s)).save(tmp_path)
    found = {row.name: row for row in alternatives(open_plan(str(tmp_path), None))}
    assert (found[name].outcome, found[name].note) == (None, why)


def test_showing_a_plan_imports_no_torch() -> None:
    code = "import sys, infinity.predict.plan_run; print({'torch', 'scipy', 'omegaconf'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


KIB = 1024
ROWS = [
    PlanRow("layers.0", 0.01, 0.02, 8 * KIB, 2 * KIB, 0, 6 * KIB, 0),
    PlanRow("layers.1", 0.01, 0.02, 8 * KIB, 1 * KIB, 0, 0, 7 * KIB),
]
OUTCOME = Outcome(1.5, 0.25, 0.0, 4 * KIB, 0, 3 * KIB, 2 * KIB)


def lines(table: object) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=120).print(table)
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_the_table_has_a_row_per_block_and_no_empty_column() -> None:
    head, first, second = lines(plan_table(ROWS))
    assert head == "block forward ms backward ms saved kept to NVMe recomputed"  # nothing to host
    assert first == "layers.0 10.0 20.0 8 KiB 2 KiB 6 KiB"
    assert second == "layers.1 10.0 20.0 8 KiB 1 KiB 7 KiB"


def test_alternatives_are_compared_even_if_one_is_not_possible() -> None:
    head, plan, other = lines(
        alternatives_table([Alternative("the plan", OUTCOME), Alternative("other", None, "not possible")])
    )
    assert head == "step s stall s peak stored loaded"  # nothing is recomputed
    assert plan == "the plan 1.500 0.250 4 KiB 3 KiB 2 KiB"
    assert other == "other not possible"
    on_host = Outcome(1.5, 0.25, 0.0, 4 * KIB, 5 * KIB, 0, 0)
    head, _, plan = lines(
        alternatives_table([Alternative("the plan", OUTCOME), Alternative("host", on_host)])
    )
    assert head.endswith("host peak")
    assert plan == "host 1.500 0.250 4 KiB 5 KiB"


KEPT = ((0.0, 0), (0.1, 2 << 30), (0.4, 0))
PLANNED = ((0.0, 0), (0.1, 1 << 30), (0.5, 0))
LANES = {
    "NVMe write": ((0.1, 0.2, "1.0"), (0.2, 0.3, "units")),
    "NVMe read": ((0.3, 0.4, "1.0"),),
    "stall": (),
}


def test_the_picture_shows_memory_and_transfers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_memory(tmp_path / "step.svg", KEPT, PLANNED, LANES, capacity_nbytes=1 << 30, title="One step")
    text = (tmp_path / "step.svg").read_text()
    for words in (
        "One step",
        "everything kept: at most 2 GiB, 400 ms",
        "with the plan: at most 1 GiB, 500 ms",
        "budget",
        "NVMe write",
        "NVMe read",
        "time of the step (ms)",
    ):
        assert f"<!-- {words}" in text or f"<!--  {words}" in text
    assert "<!-- stall" not in text  # nothing stalls


def test_the_picture_needs_neither_budget_nor_transfers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_memory(tmp_path / "step.png", KEPT, KEPT, {})
    draw_memory(tmp_path / "empty.png", (), (), {})
    for name in ("step.png", "empty.png"):
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_budget_far_above_the_peak_is_not_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_memory(tmp_path / "step.svg", KEPT, PLANNED, LANES, capacity_nbytes=1 << 40)
    assert "<!--  budget" not in (tmp_path / "step.svg").read_text()
