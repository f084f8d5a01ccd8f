"""A disk that fails and a peer that dies while kernels, copies and collectives are in flight."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.core.errors import DiskError, InfinityError
from tests.accelerator.harness import SCHEDULES, Scenario, train
from tests.accelerator.process import needs_simulator
from tests.accelerator.simulator import Schedule
from tests.helpers.faulty import Fault
from tests.helpers.launch import run_ranks, start_ranks
from tests.test_faults import breakable

LATER = Scenario(steps=6, clip=1.0, more=("partition.timeout_s=200",))


def start(schedule: Schedule, seed: int) -> Any:
    from tests.accelerator import device, observe

    simulator = device.start()
    observe.install()
    simulator.reset(schedule, seed)
    return simulator


def fail_the_disk(
    folder: str, on: str, activations: str, schedules: list[tuple[Schedule, int]]
) -> list[tuple[str, list[str]]]:
    """Under each schedule the third transfer of step 2 fails: how it ended, and what raced."""
    scenario = Scenario(steps=4, clip=1.0, more=(f"memory.activations={activations}",))
    ends = []
    for schedule, seed in schedules:
        simulator = start(schedule, seed)
        with breakable() as engines:

            def before(step: int, model: Any, optimizer: Any) -> None:
                if step == 1:
                    done = {"read": engines[0].reads, "write": engines[0].writes}[on]
                    engines[0].faults = (Fault(on=on, nth=done + 3),)

            try:
                train(scenario, folder, before)
            except DiskError as error:
                ends.append((type(error).__name__, [*simulator.races, *simulator.early]))
            else:
                ends.append(("nothing", []))
        torch.accelerator.synchronize()
    return ends


@pytest.mark.parametrize(
    ("on", "activations", "schedules"),
    [
        ("read", "keep", SCHEDULES[:2]),
        *(
            pytest.param(on, activations, SCHEDULES, marks=pytest.mark.slow)
            for on in ("read", "write")
            for activations in ("keep", "offload")
        ),
    ],
)
def test_a_disk_error_is_raised_and_nothing_in_flight_loses_its_memory(
    tmp_path: Path, on: str, activations: str, schedules: list[tuple[Schedule, int]]
):
    needs_simulator()
    given = str(tmp_path), on, activations, schedules
    [ends] = run_ranks(fail_the_disk, 1, *given, group=False)
    assert ends == [("DiskError", [])] * len(schedules)


def die_in_step_2(folder: str, schedule: Schedule, where: str) -> str:
    from tests.accelerator import simccl

    simulator = start(schedule, int(os.environ["RANK"]))

    def die(*args: Any) -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    def before(step: int, model: Any, optimizer: Any) -> None:
        if step == 2 and where == "between steps":
            die()
        if step == 2 and where == "collective" and os.environ["RANK"] == "1":
            simccl.SimGroup.issue = die  # after the ranks have agreed on it: the other one's never ends
        if step == 2 and where == "backward":
            block = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))[1]
            block.register_forward_hook(lambda module, args, out: out.register_hook(die) and None)

    try:
        train(LATER, folder, before)
    except InfinityError as error:
        return f"{type(error).__name__}: {error}; {simulator.races}"
    return "nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "where"),
    [
        ("eager", "between steps"),
        pytest.param("eager", "backward", marks=pytest.mark.slow),
        pytest.param("lazy", "backward", marks=pytest.mark.slow),
        pytest.param("eager", "collective", marks=pytest.mark.slow),
        pytest.param("lazy", "collective", marks=pytest.mark.slow),
        pytest.param("lazy", "between steps", marks=pytest.mark.slow),
    ],
)
def test_a_peer_that_dies_ends_the_other_rank_though_collectives_on_the_device_never_end(
    tmp_path: Path, schedule: Schedule, where: str
):
    needs_simulator()
    with start_ranks(die_in_step_2, 2, str(tmp_path), schedule, where, group=False) as ranks:
        other, killed = ranks.wait()
    assert killed.exit_code == -signal.SIGKILL
    assert not other.hung, other
    assert other.result.startswith("PeerError"), other
    assert "rank 1" in other.result
