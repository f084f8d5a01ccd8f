"""Ctrl-C at any line of the package: a loop goes on bitwise, or an error says what there is to go on from."""

import _thread
import random
import signal
import threading
import time
import traceback

import pytest
import torch

import infinity
from infinity import StateError
from infinity.app.models.causal import CausalLoss
from infinity.core.interrupts import Bookkeeping
from infinity.engine.gradients import UnitGradient
from infinity.engine.hooks import Hooks
from infinity.engine.runtime import runtime_of
from infinity.optim.rules import AdamWRule
from infinity.shards.updates import Updates
from tests.helpers import models, training
from tests.helpers.interrupts import (
    ENDINGS,
    SCENARIOS,
    Interrupter,
    Loop,
    Moment,
    moments,
    trial,
    undisturbed,
)
from tests.helpers.lockstep import BOTH, NVME, batch, lockstep

THEN = ("again", "zero_grad", "look")
#: Trials of the fast suite, by scenario.
FEW = {"nvme": 6, "host clipped recorded": 8}
#: Of the long one; of the scenarios that are not named so many, else every line.
MANY = 150
EVERY_LINE = ("nvme clipped", "host")


def play(name, folder, count):
    """Trials at ``count`` moments (None: one of each line): those that end wrongly, and how many each way."""
    draw, scenario = random.Random(name), SCENARIOS[name]
    wanted = undisturbed(scenario, folder / "undisturbed")
    chosen: list[tuple[int, Moment]] = []
    for number in (0, 2):
        by_line: dict[tuple[str, int], list[Moment]] = {}
        for moment in moments(wanted.lines[number]):
            by_line.setdefault(moment[:2], []).append(moment)
        chosen += [(number, draw.choice(each)) for each in by_line.values()]
    wrong, ways = [], dict.fromkeys(ENDINGS, 0)
    for number, moment in chosen if count is None else draw.sample(chosen, count):
        then = draw.choice(THEN)
        ending = trial(scenario, wanted, folder / "trial", moment, number, then)
        if ending in ENDINGS:
            ways[ending] += 1
        else:
            wrong.append(f"iteration {number}, {moment}, {then}: {ending}")
    return wrong, ways


@pytest.mark.parametrize("name", list(FEW))
def test_ctrl_c_at_some_lines_leaves_no_wrong_number(tmp_path, name):
    wrong, ways = play(name, tmp_path, FEW[name])
    assert not wrong, "\n".join(wrong)
    assert ways["went on"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", list(SCENARIOS))
def test_ctrl_c_at_any_line_leaves_no_wrong_number(tmp_path, name):
    wrong, ways = play(name, tmp_path, None if name in EVERY_LINE else MANY)
    assert not wrong, "\n".join(wrong)
    assert ways["went on"]
    assert ways["said so"]


def interrupt(*_, **__):
    raise KeyboardInterrupt


def after(function):
    """``function`` that is interrupted when it is done, before its caller takes note."""

    def interrupted(*args, **kwargs):
        function(*args, **kwargs)
        raise KeyboardInterrupt

    return interrupted


@BOTH
def test_an_interrupt_before_a_lease_is_noted_leaks_no_memory(tmp_path, place, monkeypatch):
    with lockstep(place, tmp_path) as pair:
        pair.step(2)
        with monkeypatch.context() as patch:
            patch.setattr(UnitGradient, "begin", after(UnitGradient.begin))
            for _ in range(3):
                with pytest.raises(KeyboardInterrupt):
                    pair.backward(7)
        pair.step(2)  # without zero_grad
        assert runtime_of(pair.model).executor().device_pool.held.keys().isdisjoint({"gradient"})
        pair.optimizer.zero_grad()
        pair.optimizer.synchronize()
        executor = runtime_of(pair.model).executor()
        executor.prefetcher.forget()
        executor.gradients.pool.give_back()
        assert executor.device_pool.leased_nbytes == 0
        pair.check()


def test_an_interrupt_while_a_pass_is_opened_is_not_taken_for_one_that_the_forward_caught(
    tmp_path, monkeypatch
):
    with lockstep("host", tmp_path) as pair:
        pair.step()
        for name in ("_hook_parameters", "release_unscoped_units"):
            with monkeypatch.context() as patch:
                patch.setattr(Hooks, name, interrupt)
                with pytest.raises(KeyboardInterrupt):
                    pair.backward(7)
            pair.step()
        pair.check()


def test_an_interrupt_while_pending_logits_are_begun_is_over_with_them(tmp_path, monkeypatch):
    factory, batches = models.build("gpt2", 1)
    model = training.build(factory, "fp32", training.streaming(tmp_path, "memory.logits=slices"))
    summed, tokens, use = CausalLoss(model), batches(0, 0, 1)["input_ids"], Hooks._use

    def used(self, unit, frame):
        use(self, unit, frame)
        if frame.leaf:
            raise KeyboardInterrupt

    wanted = summed(tokens[:, :-1], tokens[:, 1:])
    with monkeypatch.context() as patch:
        patch.setattr(Hooks, "_use", used)
        with pytest.raises(KeyboardInterrupt):
            summed(tokens[:, :-1], tokens[:, 1:])
    assert torch.equal(summed(tokens[:, :-1], tokens[:, 1:]), wanted)
    infinity.close(model)


def test_an_interrupt_at_any_line_of_no_sync_leaves_backward_as_it_was(tmp_path):
    with lockstep("host", tmp_path) as pair:
        bookkeeping = runtime_of(pair.model).bookkeeping
        gradients = runtime_of(pair.model).executor().gradients

        def lines(moment=None):
            with Interrupter(moment) as counted, infinity.no_sync(pair.model):
                pass
            return [Moment(*key, nth=1) for key in counted.counts if key[0] == "api/init.py"]

        assert lines()
        for moment in lines():
            with pytest.raises(KeyboardInterrupt):
                lines(moment)
            assert gradients.syncing
            bookkeeping.states.interrupted = False


@NVME
def test_micro_batches_wait_after_an_interrupt_that_is_caught_in_no_sync(tmp_path, place, monkeypatch):
    with lockstep(place, tmp_path) as pair:
        pair.step()
        with infinity.no_sync(pair.model):
            with monkeypatch.context() as patch:
                patch.setattr(UnitGradient, "begin", after(UnitGradient.begin))
                with pytest.raises(KeyboardInterrupt):
                    pair.backward(2)
            pair.backward(2)
        pair.backward(3)
        pair.optimizer.step()
        pair.plain.step([batch(2), batch(3)])
        pair.check()


@NVME
def test_gradients_that_an_interrupted_evaluation_loses_are_not_missed_silently(tmp_path, place, monkeypatch):
    with lockstep(place, tmp_path) as pair:
        pair.step()
        pair.backward(7)
        with monkeypatch.context() as patch:
            executor = runtime_of(pair.model).executor()
            patch.setattr(executor.prefetcher, "_start", after(executor.prefetcher._start))
            patch.setattr(executor.prefetcher, "unpin", interrupt)
            with pytest.raises(KeyboardInterrupt), torch.no_grad():
                pair.model(**batch(9))
        with pytest.raises(StateError, match=r"gradients .* lost: call optimizer.zero_grad\(\)"):
            pair.optimizer.step()
        with pytest.raises(StateError, match=r"gradients .* lost: call optimizer.zero_grad\(\)"):
            pair.model(**batch(9))
        pair.optimizer.zero_grad()
        pair.step(2)
        pair.check()


def test_updates_that_step_computes_are_finished_before_the_interrupt_is_raised(tmp_path, monkeypatch):
    update, left = AdamWRule.update, [1]

    def interrupting(self, *args):
        if left:
            left.pop()
            _thread.interrupt_main()
        update(self, *args)

    with lockstep("host", tmp_path) as pair:
        pair.step()
        loss = pair.backward(2)
        monkeypatch.setattr(AdamWRule, "update", interrupting)
        with pytest.raises(KeyboardInterrupt):
            pair.optimizer.step()
        assert not left
        assert pair.optimizer.steps == 2
        pair.follow(loss, number=2)
        pair.check()
        pair.step()
        pair.check()


def test_what_runs_to_its_end_is_over_whatever_signals_raise_and_its_own_error_says_where(monkeypatch):
    bookkeeping, came, ended = Bookkeeping(), [], []

    def ring(*_):
        came.append(1)
        raise TimeoutError("first" if len(came) == 1 else "second")

    def rung():
        for number in (1, 2):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
            while len(came) < number:
                time.sleep(0.01)
        ended.append(1)

    def wrong():
        raise ValueError("mine")

    before = signal.signal(signal.SIGALRM, ring)
    try:
        bookkeeping.run_to_end(rung)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ended
    with pytest.raises(TimeoutError, match="first"):
        bookkeeping.raise_held()
    bookkeeping.raise_held()
    with pytest.raises(ValueError, match="mine") as raised:
        bookkeeping.run_to_end(wrong)
    assert traceback.extract_tb(raised.tb)[-1].name == "wrong"

    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    bookkeeping.run_to_end(lambda: ended.append(2))
    assert ended == [1, 2]


def test_a_commit_that_is_half_done_names_the_step_that_a_new_model_goes_on_from(tmp_path, monkeypatch):
    scenario = SCENARIOS["nvme"]
    wanted = undisturbed(scenario, tmp_path / "undisturbed")
    loop = Loop(scenario, tmp_path / "run")
    for number in range(2):
        loop.iteration(number)
    with monkeypatch.context() as patch:
        patch.setattr(Updates, "_close_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            loop.iteration(2)
    message = r"Ctrl-C .* infinity.close\(model, keep=True\); infinity.resume .* after .* step \(2\)"
    for ask in (loop.look, loop.optimizer.step, loop.optimizer.zero_grad, loop.values):
        with pytest.raises(StateError, match=message):
            ask()
    loop.close(keep=True)
    again = Loop(scenario, tmp_path / "run")
    assert again.start == 2
    assert again.iteration(2) == wanted.numbers[2]
    again.close()


def test_a_parameter_whose_hooks_are_missing_says_so(tmp_path, monkeypatch):
    with lockstep("host", tmp_path) as pair:
        with monkeypatch.context() as patch:
            patch.setattr(Hooks, "_hook_parameter", interrupt)
            with pytest.raises(KeyboardInterrupt):
                pair.backward(1)
        with pytest.raises(StateError, match=r"Ctrl-C .* Build the model again"):
            pair.backward(1)


def test_a_commit_that_is_half_done_says_so_where_nothing_is_stored(tmp_path, monkeypatch):
    with lockstep("host", tmp_path) as pair:
        pair.backward(1)
        monkeypatch.setattr(type(runtime_of(pair.model).executor()), "_conclude_pass", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pair.optimizer.step()
        with pytest.raises(StateError, match=r"Ctrl-C .* weights since it was built or saved are lost"):
            infinity.state_dict(pair.model)
