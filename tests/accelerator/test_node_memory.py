"""Ranks of a machine share host memory beside accelerators: whole units are uploaded, none is gathered."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from tests.accelerator.harness import HOST, Scenario, batch_of, digest, train
from tests.accelerator.process import needs_simulator
from tests.accelerator.scenarios import SHARED
from tests.helpers.launch import mark, run_ranks, start_ranks
from tests.helpers.models import build
from tests.helpers.training import optimizer_for

TIGHT = "memory.device=176KiB"  # units come and go
SCENARIO = Scenario(place=HOST, more=(SHARED, TIGHT), steps=2, accumulate=2, clip=1.0)


def begin(schedule: Any = "lazy", *, peers: bool = True) -> Any:
    """Start the simulator, whose devices reach each other's memory or not, and return it."""
    from tests.accelerator import device, observe

    simulator = device.start()
    observe.install()
    device.Module.can_device_access_peer = staticmethod(lambda one, other: peers)  # type: ignore[attr-defined]
    simulator.reset(schedule, int(os.environ["RANK"]))
    return simulator


def plays(scenario: Scenario, folder: str, peers: bool) -> tuple[str, int, list[str], bool, int]:
    """Train; return a digest, how often units were gathered, faults, and what host memory is taken."""
    from infinity.comm.nodes import Nodes
    from infinity.engine.runtime import runtime_of

    simulator, gathers, shares, taken = begin(peers=peers), [], [], []
    gather = Nodes.gather

    def looks(step: int, model: Any, optimizer: Any) -> None:
        runtime = runtime_of(model)
        shares.append(runtime.ranks.memory is not None)
        taken.append(sum(runtime.tiers.taken.values()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Nodes, "gather", lambda self, *args: (gathers.append(1), gather(self, *args))[1])
        found = train(replace(scenario, steps=2), folder, looks)
    if dist.is_initialized():
        dist.destroy_process_group()
    told = [*simulator.races, *simulator.early]
    return digest(found), len(gathers), told, shares[0], taken[-1]


@pytest.mark.thorough
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_shared_weights_train_to_the_bits_of_gathered_ones_without_a_collective(tmp_path: Path, world: int):
    needs_simulator()
    ways = {how: replace(SCENARIO, more=(f"memory.shared={how}", TIGHT)) for how in ("always", "never")}
    found = {how: run_ranks(plays, world, way, str(tmp_path), True, group=False) for how, way in ways.items()}
    for shared, gathered in zip(found["always"], found["never"], strict=True):
        assert shared[0] == gathered[0]
        assert shared[2] == gathered[2] == []
        assert (shared[3], gathered[3]) == (True, False)
        assert shared[4] == gathered[4]  # of the budget a rank takes its own part, in either way
        assert shared[1] < gathered[1] / 2  # exact values for the state dictionary at the end


@pytest.mark.thorough
@pytest.mark.parametrize("peers", [False, True])
def test_without_being_told_ranks_share_where_no_device_reaches_another(tmp_path: Path, peers: bool):
    needs_simulator()
    way = replace(SCENARIO, more=(TIGHT,), accumulate=1)
    for *_, faults, shares, _ in run_ranks(plays, 2, way, str(tmp_path), peers, group=False):
        assert faults == []
        assert shares is not peers


def evaluates(schedule: str) -> tuple[list[float], list[str]]:
    """Rank 0 evaluates alone between backward and step, and looks at its losses afterwards."""
    simulator, losses = begin(schedule), []
    rank = int(os.environ["RANK"])
    model = training_model()
    optimizer = optimizer_for(model, SCENARIO.rule)
    for step in range(3):
        model(**batch_of(SCENARIO, step)).loss.backward()
        with torch.no_grad():
            waiting = [model(**batch_of(SCENARIO, number)).loss for number in range(3 * (rank == 0))]
        optimizer.step()
        losses += [each.item() for each in waiting]
    infinity.close(model)
    dist.destroy_process_group()
    return losses, [*simulator.races, *simulator.early]


def training_model() -> Any:
    from tests.helpers import training

    overrides = [*HOST, SHARED, TIGHT, "partition.timeout_s=60"]
    return training.build(build("llama", seed=1)[0], "bf16", overrides)


@pytest.mark.thorough
def test_what_one_rank_reads_alone_is_not_changed_by_the_step_that_another_takes():
    needs_simulator()
    eager, late = (run_ranks(evaluates, 2, schedule, group=False) for schedule in ("eager", "lazy"))
    assert eager[0][0] == late[0][0]
    assert len(eager[0][0]) == 9
    assert [faults for _, faults in (*eager, *late)] == [[]] * 4


def dies() -> None:
    """Rank 1 is killed before its update has been written, which rank 0 waits for."""
    from infinity.comm.shared import SharedSlice

    begin("eager")
    model = training_model()
    optimizer = optimizer_for(model, SCENARIO.rule)
    if os.environ["RANK"] == "1":

        def killed(self: SharedSlice) -> None:
            mark("dies")
            os.kill(os.getpid(), signal.SIGKILL)

        SharedSlice._end_update = killed  # type: ignore[method-assign]
    for step in range(100):
        model(**batch_of(SCENARIO, step)).loss.backward()
        optimizer.step()


@pytest.mark.thorough
def test_a_rank_that_dies_in_its_update_ends_the_other_which_names_it():
    needs_simulator()
    with start_ranks(dies, 2, group=False) as ranks:
        other, killed = ranks.wait()
    assert killed.exit_code == -signal.SIGKILL
    assert other.error_type == "PeerError", other
    assert "rank 1" in other.message
    assert not other.hung
