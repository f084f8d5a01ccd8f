"""Gradients leave the accelerator in their order, and go on leaving while the next forward computes."""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from infinity.core.nbytes import Transfer
from infinity.device.memory import CountingPool, HostPool
from infinity.engine.accumulation import OffloadThread
from infinity.engine.gradients import GradientPath
from infinity.engine.runtime import runtime_of
from tests.accelerator.test_on_device import begin, make, run, same, state, steps

pytest.importorskip("tests.accelerator.harness")

PLACE = ["memory.host=64MiB", "memory.device=64MiB", "memory.updates=host", "memory.activations=keep"]


def test_of_gradients_that_are_complete_the_one_that_is_needed_first_leaves_first():
    told: Any = SimpleNamespace(announce=lambda left: None, on_failure=lambda error: None)
    thread, gate, went = OffloadThread(torch.device("cpu"), told), threading.Event(), list[int]()
    thread.run(gate.wait)  # type: ignore[arg-type]
    lefts = [Transfer() for _ in range(5)]
    for order, idle in ((5, False), (4, True), (1, False), (2, True), (3, True)):
        gradient: Any = SimpleNamespace(idle=idle)
        thread.leave(lambda order=order: went.append(order), gradient, lefts[order - 1], order)
    thread.run(lambda: went.append(0))  # all but gradients goes before
    gate.set()
    for left in lefts:
        left.wait()
    thread.close()
    assert went == [0, 2, 3, 4, 5, 1]  # of those that are not complete the one that will be first


def test_gradients_that_wait_to_leave_give_their_memory_to_a_sum_that_comes_back():
    cpu, nbytes = torch.device("cpu"), 4096
    memory, told = HostPool(nbytes, key="memory.device"), SimpleNamespace(device=cpu)
    memory.patience_s = 1.0
    mover: Any = SimpleNamespace(collectives=None, staging=told)
    updates: Any = SimpleNamespace(
        tiers=SimpleNamespace(reduce_dtype=torch.float32), stored_gradients=None,
        announce=lambda left: None, on_failure=lambda error: None,
    )  # fmt: skip
    pool = CountingPool(memory, lambda cause, call: call())
    path, gate, left = GradientPath(mover, updates, pool, None), threading.Event(), Transfer()
    assert path._beside is not None
    gradient = pool.lease(nbytes, who="a gradient of a unit in host memory")
    path._beside.run(gate.wait)  # type: ignore[arg-type]
    path._beside.leave(gradient.release, gradient, left, 1)
    came = path._beside.run(lambda: pool.lease(nbytes, who="a sum that comes back").release())
    gate.set()
    came.wait()
    left.wait()
    path.close()
    assert memory.leased_nbytes == 0


@contextmanager
def held_back(model: nn.Module) -> Iterator[threading.Event]:
    """Inside the context no gradient leaves before the event is set."""
    runtime_of(model).synchronize()  # those of the step before have left
    gate, leave_next = threading.Event(), OffloadThread._leave_next

    def gated(self: OffloadThread) -> None:
        if gate.wait(0.005):
            leave_next(self)
        else:  # the thread has other things to do
            self._threads.submit(lambda: gated(self), 1)

    OffloadThread._leave_next = gated  # type: ignore[method-assign]
    try:
        yield gate
    finally:
        gate.set()
        OffloadThread._leave_next = leave_next  # type: ignore[method-assign]


def late(schedule: str, clip: float | None) -> tuple[bool, bool, list[str]]:
    """Whether updates wait after a step whose gradients leave late, and bits are the same; and races."""
    simulator = begin(schedule, 1)
    model, optimizer = make(PLACE, clip=clip)
    steps(model, optimizer, range(5))
    expected = state(model, optimizer)
    optimizer.close()
    model, optimizer = make(PLACE, clip=clip)
    steps(model, optimizer, range(2))
    waits = True
    for number in range(2, 5):
        with held_back(model) as gate:
            steps(model, optimizer, range(number, number + 1))
            waiting = [unit.home.updating for unit in runtime_of(model).units]
            waits &= not any(each.done() for each in waiting)
            timer = threading.Timer(0.2, gate.set)
            timer.start()
            found = state(model, optimizer) if number == 4 else {}  # waits for them
            with torch.no_grad():
                model(**batch())
            timer.join()
    right = same(found, expected)
    optimizer.close()
    return waits, right, [*simulator.races, *simulator.early]


@pytest.mark.parametrize(("schedule", "clip"), [("eager", None), ("random", 0.1)])
def test_a_step_ends_before_its_gradients_have_left_and_the_next_use_waits(schedule: str, clip: float | None):
    assert run(late, schedule, clip) == (True, True, [])


def skipped() -> tuple[bool, bool]:
    """Whether a step is skipped whose gradients leave late, and leaves all as it was."""
    begin()
    model, optimizer = make(PLACE)
    steps(model, optimizer, range(2))
    before = state(model, optimizer)
    with held_back(model) as gate:
        (model(**batch()).logits.sum() * math.inf).backward()
        threading.Timer(0.2, gate.set).start()
        optimizer.step()
    found = optimizer.skipped, same(state(model, optimizer), before)
    optimizer.close()
    return found


def batch() -> dict[str, Any]:
    return {"input_ids": torch.zeros(1, 4, dtype=torch.long).to("sim")}


def test_a_step_that_is_skipped_waits_for_gradients_that_leave_and_changes_nothing():
    assert run(skipped) == (True, True)


def failed() -> tuple[str, str]:
    """What raises when a gradient cannot leave after the step: the step, and the next forward."""
    begin()
    model, optimizer = make(PLACE)
    steps(model, optimizer, range(2))
    raised = []
    with held_back(model) as gate:
        host = runtime_of(model).executor().host
        assert host is not None

        def lease(nbytes: int, who: str) -> None:
            raise OSError("no memory for a gradient")

        host.gradients.lease = lease  # type: ignore[assignment, method-assign]
        for call in (lambda: steps(model, optimizer, range(2, 3)), lambda: model(**batch())):
            try:
                call()
                raised.append("")
            except OSError as error:
                raised.append(str(error))
            gate.set()
    optimizer.close()
    return raised[0], raised[1]


def test_the_error_of_a_gradient_that_leaves_late_is_raised_by_the_next_use():
    assert run(failed) == ("", "no memory for a gradient")


def clipped() -> tuple[list[float], list[float]]:
    """Norms where gradients leave at their pace, and where they leave while ``step()`` adds up."""
    begin()
    found: list[list[float]] = []
    read_norms = GradientPath.read_norms
    for slow in (False, True):
        model, optimizer = make(PLACE, clip=0.1)
        norms = list[float]()
        for number in range(2):
            with held_back(model) as gate:

                def between(self: GradientPath, gate: threading.Event = gate) -> None:
                    read_norms(self)
                    gate.set()
                    for pending in self.updates.ready.values():
                        assert pending.arrived is not None
                        pending.arrived.wait()

                GradientPath.read_norms = between if slow else read_norms  # type: ignore[method-assign]
                if not slow:
                    gate.set()
                steps(model, optimizer, range(number, number + 1))
            norms.append(optimizer.grad_norm or 0.0)
        GradientPath.read_norms = read_norms  # type: ignore[method-assign]
        found.append(norms)
        optimizer.close()
    return found[0], found[1]


def test_gradients_that_leave_while_step_adds_up_their_norms_are_counted():
    at_their_pace, meanwhile = run(clipped)
    assert meanwhile == at_their_pace
    assert min(at_their_pace) > 0
