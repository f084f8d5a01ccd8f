"""What :mod:`infinity.device.accelerator` promises, on the simulated device; and an update beside a step."""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.core.errors import BudgetError, StateError
from infinity.device.accelerator import on_stream, use_own_stream
from infinity.device.memory import DevicePool, HostBuffer, HostPool
from infinity.partition.mover import Staging, Stored
from infinity.partition.unit import StoredForm
from tests.accelerator.device import host_unregister, simulator
from tests.accelerator.process import needs_simulator, simulated
from tests.helpers import models, training
from tests.helpers.launch import run_ranks
from tests.helpers.limits import HANG_S
from tests.partition.test_mover import ShardsOnDisk, make_mover, make_unit


@simulated
def test_threads_that_share_a_stream_go_back_to_their_own_ones() -> None:
    device, wrong = torch.device("sim", 0), list[object]()
    shared = torch.Stream(device)

    def work() -> None:
        use_own_stream(device)
        mine = torch.accelerator.current_stream(device)
        for _ in range(50):
            with on_stream(shared):
                os.sched_yield()
            wrong.extend(each for each in [torch.accelerator.current_stream(device)] if each != mine)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []


@simulated
def test_a_buffer_that_is_closed_or_dropped_is_unlocked_once_its_copies_have_ended() -> None:
    for close in (True, False):
        simulator.reset("lazy")
        buffer = HostBuffer(8192, torch.device("sim", 0))
        address, there = buffer.tensor.data_ptr(), torch.empty(8192, dtype=torch.uint8, device="sim")
        there.copy_(buffer.tensor, non_blocking=True)
        buffer.events.append(torch.accelerator.current_stream().record_event())
        tensor = buffer.tensor  # its mapping stays
        if close:
            buffer.close()
        del buffer
        assert simulator.early == []
        assert host_unregister(address) != 0  # it is not locked any more
        assert not tensor.is_pinned()


@simulated
def test_memory_that_is_locked_already_is_refused_and_nothing_after_it() -> None:
    device = torch.device("sim", 0)
    buffer = HostBuffer(4096, device)
    with pytest.raises(BudgetError, match="could not page-lock 4 KiB of host memory"):
        buffer.lock(buffer.tensor)
    torch.ones(3, device=device)
    buffer.close()


@simulated
def test_stored_bytes_of_a_tile_that_is_not_used_are_overwritten_after_they_were_decoded() -> None:
    simulator.reset("lazy")
    device, units = torch.device("sim", 0), [make_unit(0), make_unit(1)]
    for unit in units:
        unit.stored = StoredForm(8192, 8192, 0, lambda stored, flat: flat.copy_(stored[: flat.numel()]))
    pool, staging = DevicePool(2**20, device), Staging(HostPool(2**20, device=device), 8192, device)
    shards = ShardsOnDisk(bytes(8192))
    mover = make_mover(units, shards, pool, staging)
    mover.start(Stored(0))
    mover.start(0)
    mover.release(0)
    mover.release(Stored(0))  # the thread that computes has not waited for what decodes
    mover.start(Stored(1))  # in the same memory
    mover.release(Stored(1))
    assert simulator.races == []
    mover.close()
    shards.engine.close()


def move_between_steps(folder: str) -> None:
    """Trainers end with ``model.cpu()``; weights that were written elsewhere are refused all the same."""
    from infinity.engine.runtime import runtime_of
    from tests.accelerator import device, harness

    device.start().reset("eager", 0)
    scenario = harness.Scenario()

    def before(step: int, model: nn.Module, optimizer: Any) -> None:
        if step == 1:
            assert next(model.cpu().parameters()).device.type == "sim"
            model.to(harness.here())  # its buffers
            with infinity.gathered(model):
                flat = runtime_of(model).units[0].flat
                assert flat is not None
                values = flat.clone()
                flat.fill_(float("nan"))  # of training that has diverged: no NaN equals another
                model.cpu()
                assert all(p.device.type == "sim" for p in model.parameters())
                flat.copy_(values)
            model.to(harness.here())
            p = next(model.parameters())
            p.data = torch.ones_like(p, device="cpu")
            with pytest.raises(StateError, match="its data was replaced outside infinity"):
                model.cpu()
            model.to(harness.here())
            first, second = runtime_of(model).units[0].segments[:2]
            for lost in (torch.ones_like(second.param), torch.ones_like(second.param, device="cpu")):
                first.param.data = first.param.data.cpu()
                second.param.data = lost
                with pytest.raises(StateError, match="its data was replaced outside infinity"):
                    list(model.parameters())

    moved, plain = harness.train(scenario, folder, before), harness.train(scenario, folder)
    assert harness.digest(moved) == harness.digest(plain)


@pytest.mark.slow
def test_moving_the_model_to_another_device_leaves_its_parameters_where_they_are(tmp_path: Path) -> None:
    needs_simulator()
    run_ranks(move_between_steps, 1, str(tmp_path), group=False)


def build_on_the_device(folder: str) -> None:
    """Values are drawn where ``torch.device`` says; the model trains as one that has them from the CPU."""
    from tests.accelerator import device, harness

    device.start().reset("eager", 0)
    scenario, losses = harness.Scenario(place=harness.HOST), list[list[float]]()
    values: dict[str, torch.Tensor] = {}
    for where in (harness.here(), torch.device("cpu")):
        with where, training.small_units(), infinity.Init(training.recipe("fp32", [*harness.HOST])):
            model = models.build("llama", seed=1)[0]()
        if values:
            model.load_state_dict(values)
        values = infinity.state_dict(model)
        optimizer = training.optimizer_for(model, scenario.rule)
        losses.append([])
        for step in range(2):
            loss = model(**harness.batch_of(scenario, step)).loss
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
        optimizer.close()
    assert losses[0] == losses[1]
    assert all(each.device.type == "cpu" for each in values.values())


def test_a_model_may_be_built_on_the_device(tmp_path: Path) -> None:
    needs_simulator()
    run_ranks(build_on_the_device, 1, str(tmp_path), group=False)


def break_an_update(folder: str) -> tuple[str, str]:
    """The rule raises in step 1, beside the step: what the runtime is told at once, and how training ends."""
    from infinity.engine.runtime import Runtime, runtime_of
    from infinity.optim.rules import HostRule
    from tests.accelerator import device, harness

    device.start().reset("eager", 0)
    found: list[str] = []
    told, failing = list[BaseException](), Runtime.fail

    def fail(*args: object) -> None:
        raise ArithmeticError("the rule")

    def telling(runtime: Runtime, error: BaseException) -> None:
        told.append(error)
        failing(runtime, error)

    Runtime.fail = telling  # type: ignore[method-assign]

    def before(step: int, model: nn.Module, optimizer: Any) -> None:
        if step == 0:
            HostRule.update = fail  # type: ignore[method-assign]
        if step == 1:
            threads = runtime_of(model).executor().updates.rules.threads
            assert threads is not None
            ended = threading.Event()
            threads.submit(ended.set, sys.maxsize)  # after all updates
            assert ended.wait(HANG_S)
            found.extend(map(repr, told))

    with pytest.raises(ArithmeticError) as raised:
        harness.train(harness.Scenario(place=harness.HOST), folder, before)
    return found[0], str(raised.value)


def test_all_that_waits_learns_of_an_update_that_fails_beside_the_step(tmp_path: Path) -> None:
    needs_simulator()
    assert run_ranks(break_an_update, 1, str(tmp_path), group=False) == [
        ("ArithmeticError('the rule')", "the rule")
    ]


@simulated
def test_the_doctor_measures_an_accelerator_and_its_link() -> None:
    from infinity.app.doctor import Examination
    from infinity.core.process import Launch
    from infinity.recipes.loading import load_recipe

    found = Examination(load_recipe(), Launch()).run(patience_s=60.0)
    device = found.facts["device"]
    assert found.wrong == []
    assert min(device["upload_bytes_per_s"], device["download_bytes_per_s"]) > 0
    assert device["memory_nbytes"] >= device["free_nbytes"] > 0
