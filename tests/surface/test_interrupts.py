"""Ctrl-C at any call of the package: the cell is run again and goes on bitwise, in the same process."""

import _thread
import contextlib
import gc
import os
import random
import signal
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch

import infinity
from infinity import StateError
from infinity.activations import tensor_cache
from infinity.core import process as interrupts
from infinity.core.process import UninterruptedExit, uninterrupted
from infinity.engine.runtime import runtime_of
from infinity.optim.rules import HostRule
from infinity.shards.records import Records
from tests.helpers import lockstep, training

PACKAGE = str(Path(infinity.__file__).parent) + os.sep
#: Iterations of a trial. The first is recorded; the others follow a plan.
COUNT = 5


class Interrupter:
    """Sends SIGINT to this thread as a function of the package is called for the n-th time; counts calls.

    Python looks for signals where functions begin, among other places.
    """

    def __init__(self, function=None, nth=0):
        self.calls, self.came = Counter(), False
        self._function, self._nth = function, nth

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc):
        sys.settrace(None)

    def _call(self, frame, event, arg):
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and code.co_filename != interrupts.__file__:
            function = code.co_filename.removeprefix(PACKAGE), code.co_qualname
            self.calls[function] += 1
            if function == self._function and self.calls[function] == self._nth:
                self.came = True
                signal.raise_signal(signal.SIGINT)


@dataclass(frozen=True)
class Scenario:
    """A kind of loop; ``frozen``: parameters whose names contain this are; ``accumulate``: micro-batches."""

    settings: tuple[str, ...]
    nvme: bool = True
    clip: float | None = None
    frozen: str = ""
    accumulate: int = 1


_STREAMS = ("memory.host=200KiB", "memory.resident=false")
SCENARIOS = {
    "nvme": Scenario(_STREAMS),
    "nvme clipped": Scenario(_STREAMS, clip=0.1),
    "one version": Scenario((*_STREAMS, "memory.versions=1")),
    "both": Scenario(("memory.host=260KiB", "durability.every=1")),
    "host": Scenario(("memory.host=64MiB",), nvme=False),
    "host clipped recorded": Scenario(("memory.host=64MiB", "durability.every=1"), clip=0.1),
    "frozen": Scenario(_STREAMS, frozen="up"),
    "micro-batches": Scenario(_STREAMS, accumulate=2),
    "offloaded": Scenario((*_STREAMS, "memory.activations=offload")),
    "recomputed": Scenario((*_STREAMS, "memory.activations=recompute")),
    "tiles": Scenario((*_STREAMS, "partition.tile=2KiB")),
}
#: Trials of the fast suite, by scenario, and of the long one.
FEW = {"nvme": 3, "host clipped recorded": 3, "tiles": 2}
MANY = 80


class Loop:
    """A model, its optimizer, and the cell of a notebook that is run again and again."""

    def __init__(self, scenario, folder):
        self.scenario = scenario
        places = [f"memory.nvme=[{folder}]", "run.name=mine"] if scenario.nvme else []
        recipe = training.recipe("bf16", [*scenario.settings, *places])
        with training.small_units(lockstep.TINY_UNIT), infinity.Init(recipe):
            self.model = lockstep.seeded(lambda: lockstep.Toy(2))()
        for name, param in self.model.named_parameters():
            param.requires_grad_(not scenario.frozen or scenario.frozen not in name)
        self.optimizer = infinity.AdamW(self.model, lr=0.01, max_grad_norm=scenario.clip)
        self.start = infinity.resume(self.model, self.optimizer) if scenario.nvme else 0

    def iteration(self, number):
        """A step, an evaluation, and a look at values: all that they compute."""
        numbers, count = [], self.scenario.accumulate
        for micro in range(count):
            with contextlib.nullcontext() if micro == count - 1 else infinity.no_sync(self.model):
                loss = self.model(**lockstep.batch(count * number + micro)).loss
                loss.backward()
                numbers.append(loss.item())
        self.optimizer.step()
        with torch.no_grad():
            numbers.append(self.model(**lockstep.batch(99)).loss.item())
        with infinity.gathered(self.model.first):
            numbers.append(self.model.first.weight.sum().item())
        return [*numbers, self.model.shift.sum().item()]  # touched outside any forward

    def until_the_end(self):
        """Run the cell until all steps are made; return what each gave."""
        found = {}
        while (number := self.optimizer.steps) < COUNT:
            try:
                found[number] = self.iteration(number)
            except StateError as error:  # the interrupt came between backward and step
                if "zero_grad()" not in str(error):
                    raise
                self.optimizer.zero_grad()
        return found

    def end(self):
        """Return weights, states, and the memory that the model leases when nothing is asked of it."""
        values = [*infinity.state_dict(self.model).values()]
        values += [
            torch.as_tensor(v) for s in self.optimizer.state_dict()["state"].values() for v in s.values()
        ]
        runtime = runtime_of(self.model)
        executor = runtime.executor()
        executor.prefetcher.forget()
        executor.gradients.path.pool.give_back()
        leased = executor.device_pool.leased_nbytes, runtime.storage.host_pool.leased_nbytes
        infinity.close(self.model)
        return values, leased


def interrupted(scenario, folder, number, function, nth):
    """Interrupt an iteration, go on to the end; return what the iterations gave after it, and the end."""
    loop = Loop(scenario, folder)
    for earlier in range(number):
        loop.iteration(earlier)
    silent = mock.patch.object(sys, "unraisablehook")  # an interrupt in a finalizer goes nowhere
    with silent, contextlib.suppress(KeyboardInterrupt), Interrupter(function, nth) as interrupter:
        loop.iteration(number)
    if interrupter.came and scenario.accumulate > 1:
        loop.optimizer.zero_grad()
    return loop.until_the_end(), *loop.end()


def check_interrupts(name, folder, count):
    """Compare ``count`` trials, each in another function, with a run that nothing interrupts."""
    draw, scenario = random.Random(name), SCENARIOS[name]
    loop = Loop(scenario, folder / "undisturbed")
    wanted, calls = [], {}
    for number in range(COUNT):
        with Interrupter() as counted:
            wanted.append(loop.iteration(number))
        calls[number] = counted.calls
    values, leased = loop.end()
    places = [(number, *call) for number in (0, 2) for call in sorted(calls[number].items())]
    for at, (number, function, times) in enumerate(draw.sample(places, count)):
        place = number, function, draw.randint(1, times)
        found, ended, held = interrupted(scenario, folder / f"{at}", *place)
        for step, numbers in found.items():
            assert numbers == wanted[step], (place, step)
        assert all(map(torch.equal, ended, values)), place
        assert held == leased, place


@pytest.fixture(autouse=True)
def small_slots(monkeypatch):
    monkeypatch.setattr(tensor_cache, "LEAST_NBYTES", 512)


@pytest.mark.parametrize("name", list(FEW))
def test_ctrl_c_at_some_calls_leaves_no_wrong_number(tmp_path, name):
    check_interrupts(name, tmp_path, FEW[name])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", list(SCENARIOS))
def test_ctrl_c_at_any_call_leaves_no_wrong_number(tmp_path, name):
    check_interrupts(name, tmp_path, MANY)


def test_updates_that_step_computes_are_finished_before_the_interrupt_is_raised(tmp_path, monkeypatch):
    update, left = HostRule.update, [1]

    def interrupting(self, *args):
        if left:
            left.pop()
            _thread.interrupt_main()
        update(self, *args)

    with lockstep.lockstep("host", tmp_path) as pair:
        pair.step()
        loss = pair.backward(2)
        monkeypatch.setattr(HostRule, "update", interrupting)
        with pytest.raises(KeyboardInterrupt):
            pair.optimizer.step()
        assert not left
        assert pair.optimizer.steps == 2
        pair.follow(loss, number=2)
        pair.check()
        pair.step()
        pair.check()


def test_a_second_ctrl_c_ends_a_commit_and_names_the_step_that_a_new_model_goes_on_from(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(interrupts, "PATIENCE_S", 0.0)
    loop = Loop(SCENARIOS["nvme"], tmp_path)
    found = [loop.iteration(number) for number in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(Records, "end_step", lambda *_: [signal.raise_signal(signal.SIGINT) for _ in "12"])
        with pytest.raises(KeyboardInterrupt):
            loop.iteration(2)
    message = r"second Ctrl-C .* infinity.close\(model, keep=True\); infinity.resume .* after .* step \(2\)"
    for ask in (loop.optimizer.step, loop.optimizer.zero_grad, lambda: infinity.state_dict(loop.model)):
        with pytest.raises(StateError, match=message):
            ask()
    infinity.close(loop.model, keep=True)
    again, whole = Loop(SCENARIOS["nvme"], tmp_path), Loop(SCENARIOS["nvme"], tmp_path / "whole")
    assert again.start == 2
    assert {**dict(enumerate(found)), **again.until_the_end()} == whole.until_the_end()
    infinity.close(again.model)
    infinity.close(whole.model)


# --- sections ------------------------------------------------------------------------------------------


def test_a_handler_is_called_when_the_outermost_section_ends():
    reached = []

    @uninterrupted
    def run():
        with uninterrupted:
            for _ in range(3):  # those that come at once are one
                signal.raise_signal(signal.SIGINT)
        reached.append(1)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert reached


def test_a_handler_that_was_installed_later_is_held_back_too_and_need_not_raise():
    came, before = [], signal.signal(signal.SIGUSR1, lambda *_: came.append(1))
    try:
        with uninterrupted:
            signal.raise_signal(signal.SIGUSR1)
            assert not came
        assert came == [1]
        signal.raise_signal(signal.SIGUSR1)
        assert came == [1, 1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_section_of_another_thread_holds_nothing_back():
    entered, left = threading.Event(), threading.Event()

    def run():
        with uninterrupted:
            entered.set()
            left.wait()

    thread = threading.Thread(target=run)
    thread.start()
    entered.wait()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    left.set()
    thread.join()


def test_signals_of_another_thread_skip_no_end_of_a_context():
    begun, ended, came, over = 0, 0, 0, threading.Event()
    main, armed = threading.main_thread().ident, False

    def ring():
        for _ in range(300):
            signal.pthread_kill(main, signal.SIGINT)
            over.wait(0.0005)
        over.set()

    def interrupt(*_: object):
        nonlocal armed, came
        if armed:  # not where the test handles the one before: on a busy machine they come together
            armed, came = False, came + 1
            raise KeyboardInterrupt

    def end():
        nonlocal ended
        ended += 1

    thread, before = threading.Thread(target=ring), signal.signal(signal.SIGINT, interrupt)
    gc.disable()  # what other tests left behind is not interrupted where it ends
    try:
        thread.start()
        while not over.is_set():
            try:
                armed = True
                while armed and not over.is_set():
                    with UninterruptedExit() as stack:
                        with uninterrupted:
                            begun += 1
                            stack.callback(end)
                        sum(range(20))
                armed = False
            except KeyboardInterrupt:
                pass
        thread.join()
    finally:
        gc.enable()
        signal.signal(signal.SIGINT, before)
    assert begun == ended
    assert came
