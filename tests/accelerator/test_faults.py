"""A disk that fails and a peer that dies while kernels, copies and collectives are in flight."""

import contextlib
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
from tests.test_faults import SOON_S, breakable

LATER = Scenario(steps=6, clip=1.0, more=("partition.timeout_s=20",))


def start(schedule: Schedule, seed: int) -> Any:
    from tests.accelerator import device, observe

    simulator = device.start()
    observe.install()
    simulator.reset(schedule, seed)
    return simulator


def fail_the_disk(folder: str, on: str, activations: str) -> list[tuple[str, list[str]]]:
    """Under each schedule the third transfer of step 2 fails: how it ended, and what raced."""
    scenario = Scenario(steps=4, clip=1.0, more=(f"memory.activations={activations}",))
    ends = []
    for schedule, seed in SCHEDULES:
        simulator = start(schedule, seed)
        with breakable() as engines:

            def before(step: int, model: Any) -> None:
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
    ("on", "activations"),
    [("read", "keep"), pytest.param("write", "keep", marks=pytest.mark.slow),
     pytest.param("write", "offload", marks=pytest.mark.slow), pytest.param("read", "offload",
     marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_disk_error_is_raised_and_nothing_in_flight_loses_its_memory(
    tmp_path: Path, on: str, activations: str
):
    needs_simulator()
    [ends] = run_ranks(fail_the_disk, 1, str(tmp_path), on, activations, group=False, timeout_s=170)
    assert ends == [("DiskError", [])] * len(SCHEDULES)


def die_in_step_2(folder: str, schedule: Schedule) -> str:
    simulator = start(schedule, int(os.environ["RANK"]))

    def before(step: int, model: Any) -> None:
        if step == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    with contextlib.suppress(ProcessLookupError):
        try:
            train(LATER, folder, before)
        except InfinityError as error:
            return f"{type(error).__name__}: {error}; {simulator.races}"
    return "nothing"


@pytest.mark.parametrize("schedule", ["eager", pytest.param("lazy", marks=pytest.mark.slow)])
def test_a_peer_that_dies_ends_the_other_rank_though_collectives_on_the_device_never_end(
    tmp_path: Path, schedule: Schedule
):
    needs_simulator()
    with start_ranks(die_in_step_2, 2, str(tmp_path), schedule, group=False) as ranks:
        other, killed = ranks.wait(timeout_s=90)
    assert killed.exit_code == -signal.SIGKILL
    assert not other.hung, other
    assert other.result.startswith("PeerError"), other
    assert "rank 1" in other.result
    assert other.ended_s < 60 + SOON_S
