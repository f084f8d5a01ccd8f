"""Training on an accelerator gives the same bits under every schedule, the CPU's bits, and no race.

Where a real accelerator is at hand, ``tests/gpu`` trains the same scenarios on it.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.accelerator.harness import HOST, SCHEDULES, Scenario, digest, math_attention, simulate, train
from tests.accelerator.scenarios import FAST, SLOW, TIGHT
from tests.accelerator.simulator import Schedule


def check(scenario: Scenario, folder: Path, schedules: Sequence[tuple[Schedule, int]] = SCHEDULES) -> None:
    ranks = simulate(scenario, folder, schedules)
    assert len(ranks) == scenario.world
    for runs in ranks:
        assert len(runs) == len(schedules)
        for run in runs:
            assert run.faults == [], f"{run.schedule}: {len(run.faults)} faults, first:\n{run.faults[0]}"
        assert {run.schedule: run.losses for run in runs} == {run.schedule: runs[0].losses for run in runs}
        assert {run.schedule: run.digest for run in runs} == {run.schedule: runs[0].digest for run in runs}
        assert all(run.kernels > 500 for run in runs)  # it trained on the device
    if scenario.world == 1 and not scenario.dropout:
        # Without an accelerator activations are not stored in host memory: they are in it, as all gradients
        # are that wait and have no NVMe.
        alone = ("memory.activations=offload", *(TIGHT if scenario.place == HOST else ()))
        more = tuple(word for word in scenario.more if word not in alone)
        with math_attention():
            plain = train(replace(scenario, more=more), str(folder))
        assert ranks[0][0].losses == plain.losses
        assert ranks[0][0].bits == digest(plain, norms=False)


@pytest.mark.parametrize("name", FAST)
def test_training_is_bitwise_the_same_at_once_and_as_late_as_possible_without_a_race(
    tmp_path: Path, name: str
):
    check(FAST[name], tmp_path, SCHEDULES[:2])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_every_scenario_is_bitwise_the_same_under_every_schedule_without_a_race(tmp_path: Path, name: str):
    check({**FAST, **SLOW}[name], tmp_path)
