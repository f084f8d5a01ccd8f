"""Beside an accelerator gradients wait in host memory or on NVMe, and a small budget is enough."""

import re
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity import BudgetError
from infinity.core.lifecycle import Tier
from infinity.engine.runtime import runtime_of
from tests.helpers import models, training
from tests.helpers.launch import run_ranks
from tests.helpers.reference import Rule
from tests.helpers.training import optimizer_for

harness = pytest.importorskip("tests.accelerator.harness")

PLACE = ("memory.nvme=[{folder}]", "memory.engine=threads")
#: Chunks of updates fit it, and little else.
SMALL = 200 * 1024


def enough(folder: str, resident: str) -> tuple[int, int, int]:
    """A small budget, units whose gradients wait on NVMe with it, and all that live there."""
    from tests.accelerator import device

    device.start().reset("eager", 0)
    host = SMALL * (2 if resident == "true" else 1)
    for _ in range(2):
        where = [each.format(folder=folder) for each in PLACE]
        where += [f"memory.host={host}", f"memory.resident={resident}"]
        model = training.build(models.build("llama", seed=1)[0], "fp32", where)
        try:
            optimizer_for(model, Rule())
            division = runtime_of(model).executor().budget.host
            assert division is not None
            units = [unit.home for unit in runtime_of(model).units]
            parts = division.gradients + division.weights + division.staging
            assert runtime_of(model).storage.host_pool.capacity_nbytes + parts == host
            break
        except BudgetError as error:
            host = int(re.search(r"\((\d+) bytes\) are enough", str(error))[1])
        finally:
            infinity.close(model)
    return host, len(division.spilled), units.count(Tier.NVME)


def trained(place: tuple[str, ...], folder: Path, schedule: str = "eager", **options: Any) -> str:
    """A digest of all bits of a run there."""
    scenario = harness.Scenario(place=place, dtype="fp32", **{"clip": 1.0, **options})
    [[run]] = harness.simulate(scenario, folder, [(schedule, 1)])
    assert run.faults == []
    digest: str = run.digest
    return digest


def test_gradients_that_do_not_fit_host_memory_wait_on_nvme_and_change_no_bit(tmp_path: Path) -> None:
    harness.needs_simulator()
    [(host, spilled, units)] = run_ranks(enough, 1, str(tmp_path), "false", group=False)
    assert (host, spilled) == (SMALL, units)
    assert units > 2
    small = (*PLACE, f"memory.host={host}", "memory.resident=false")
    large = (*PLACE, "memory.host=64MiB", "memory.resident=false")
    options = {"clip": 1e-3, "steps": 4, "accumulate": 2}  # updates are rolled back, then held
    assert trained(small, tmp_path, "random", **options) == trained(large, tmp_path, **options)


def test_units_that_stay_in_host_memory_have_room_for_their_gradients(tmp_path: Path) -> None:
    harness.needs_simulator()
    [(host, _, _)] = run_ranks(enough, 1, str(tmp_path), "true", group=False)
    small = (*PLACE, f"memory.host={host}")
    assert trained(small, tmp_path) == trained(("memory.host=64MiB",), tmp_path)
