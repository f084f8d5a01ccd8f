"""Beside an accelerator gradients wait in host memory: a small budget is refused at once, or is enough."""

import re
from pathlib import Path

import pytest

import infinity
from infinity import BudgetError
from infinity.engine.runtime import runtime_of
from tests.helpers import models, training
from tests.helpers.launch import run_ranks
from tests.helpers.reference import Rule
from tests.helpers.training import optimizer_for

harness = pytest.importorskip("tests.accelerator.harness")

PLACE = ("memory.nvme=[{folder}]", "memory.engine=threads")
#: Chunks of updates fit it, and the gradients of the model do not.
SMALL = 200 * 1024


def enough(folder: str, resident: str) -> tuple[str, int]:
    """Why a budget is too small, before the first step, and the one that it says is enough."""
    from tests.accelerator import device

    device.start().reset("eager", 0)
    host, told = SMALL * (2 if resident == "true" else 1), ""
    for _ in range(2):
        where = [each.format(folder=folder) for each in PLACE]
        where += [f"memory.host={host}", f"memory.resident={resident}"]
        model = training.build(models.build("llama", seed=1)[0], "fp32", where)
        try:
            optimizer_for(model, Rule())
            division = runtime_of(model).executor().budget.host
            assert division is not None
            parts = division.gradients + division.weights + division.staging
            assert runtime_of(model).storage.host_pool.capacity_nbytes + parts == host
            break
        except BudgetError as error:
            told = str(error)
            host = int(re.search(r"\((\d+) bytes\) are enough", told)[1])
        finally:
            infinity.close(model)
    return told, host


def trained(place: tuple[str, ...], folder: Path) -> str:
    """A digest of all bits of a run there."""
    scenario = harness.Scenario(place=place, clip=1.0, dtype="fp32")
    [[run]] = harness.simulate(scenario, folder, [("eager", 0)])
    digest: str = run.digest
    return digest


def test_a_budget_that_gradients_do_not_fit_is_refused_before_the_first_step(tmp_path: Path) -> None:
    harness.needs_simulator()
    [(told, host)] = run_ranks(enough, 1, str(tmp_path), "false", group=False)
    assert "of gradients that wait for step()" in told
    assert "max_grad_norm=null" in told
    small = (*PLACE, f"memory.host={host}", "memory.resident=false")
    large = (*PLACE, "memory.host=64MiB", "memory.resident=false")
    assert trained(small, tmp_path) == trained(large, tmp_path)


def test_units_that_stay_in_host_memory_have_room_for_their_gradients(tmp_path: Path) -> None:
    harness.needs_simulator()
    [(_, host)] = run_ranks(enough, 1, str(tmp_path), "true", group=False)
    small = (*PLACE, f"memory.host={host}")
    assert trained(small, tmp_path) == trained(("memory.host=64MiB",), tmp_path)
