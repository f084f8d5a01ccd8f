"""Interrupts a training loop as Ctrl-C may: at any line of the package that its thread comes to.

A *trial* trains a tiny model and raises ``KeyboardInterrupt`` at one *moment* of an iteration: before a line
runs for the n-th time in it. Then it does what people do in a notebook, and goes on to the end. What it gives
must be what a run gives that nothing interrupted; or a :class:`StateError` says what is lost, and a new model
of the run goes on from its last commit.
"""

import contextlib
import dis
import functools
import gc
import os
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import infinity
from infinity.activations import tensor_cache
from infinity.core.errors import StateError
from infinity.engine.runtime import runtime_of
from tests.helpers import lockstep, training

PACKAGE = str(Path(infinity.__file__).parent) + os.sep
#: Iterations of a trial. The first is recorded; the others follow a plan.
COUNT = 5
#: How long a trial may take (s).
PATIENCE_S = 30


class Moment(NamedTuple):
    """Before a line of the package runs for the ``nth`` time, from 1."""

    file: str
    line: int
    nth: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.nth})"


class Interrupter:
    """Raises ``KeyboardInterrupt`` on this thread at a moment; counts how often each line runs.

    Args:
        moment: None: none, count only.
    """

    def __init__(self, moment: Moment | None = None) -> None:
        self.counts: Counter[tuple[str, int]] = Counter()
        self.came = False
        self._moment = moment

    def __enter__(self) -> "Interrupter":
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        return self._line if code.co_filename.startswith(PACKAGE) and code.co_name != "<module>" else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "line" and not _ends_with(frame.f_code, frame.f_lasti):
            key = frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_lineno
            self.counts[key] += 1
            if self._moment == (*key, self.counts[key]):
                self.came = True
                raise KeyboardInterrupt
        return self._line


@functools.cache
def _ends_with(code: CodeType, at: int) -> bool:
    """Whether the instruction begins the ``__exit__`` of a ``with``, which has a line event, too.

    Signals raise after calls, at jumps back and where functions begin, not there: a lock is given back.
    """
    three = [each for each in dis.get_instructions(code) if at <= each.offset < at + 6]
    return [(each.opname, each.argval) for each in three] == [("LOAD_CONST", None)] * 3


class Hang(BaseException):
    """A trial waits without end."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise :class:`Hang` where this thread is after so many seconds."""

    def ring(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- what is trained ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A kind of loop.

    Attributes:
        settings: Overrides; the directory is added where it is on NVMe.
        frozen: Parameters whose names contain this are.
        accumulate: Micro-batches of a step.
    """

    settings: tuple[str, ...]
    nvme: bool = True
    clip: float | None = None
    frozen: str = ""
    accumulate: int = 1
    rows: int = 5
    slots_nbytes: int | None = None
    tight: bool = True
    batches: Callable[[int], dict[str, Tensor]] = lockstep.batch


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
    "offloaded": Scenario((*_STREAMS, "memory.activations=offload"), slots_nbytes=512),
    "recomputed": Scenario((*_STREAMS, "memory.activations=recompute"), slots_nbytes=512),
    "tiles": Scenario((*_STREAMS, "partition.tile=2KiB"), tight=False),
}


class Loop:
    """A model of a scenario, its optimizer, and the cell of a notebook that is run again and again."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        places = [f"memory.nvme=[{folder}]", "run.name=mine"] if scenario.nvme else []
        with training.small_units(lockstep.TINY_UNIT), infinity.Init(
            training.recipe("bf16", [*scenario.settings, *places])
        ):  # fmt: skip
            self.model = lockstep.seeded(lambda: lockstep.Toy(2))()
        if scenario.tight:
            lockstep._tighten(self.model)
        for name, param in self.model.named_parameters():
            param.requires_grad_(not scenario.frozen or scenario.frozen not in name)
        self.optimizer = infinity.AdamW(self.model, lr=0.01, max_grad_norm=scenario.clip)
        self.start = infinity.resume(self.model, self.optimizer) if scenario.nvme else 0

    def iteration(self, number: int) -> list[float]:
        """A step, and then a look at the model: all that it computes."""
        numbers, count = [], self.scenario.accumulate
        for micro in range(count):
            last = micro == count - 1
            with contextlib.nullcontext() if last else infinity.no_sync(self.model):
                loss = self.model(**self.scenario.batches(count * number + micro)).loss
                loss.backward()
                numbers.append(loss.item())
        self.optimizer.step()
        assert self.optimizer.grad_norm is not None
        return [*numbers, self.optimizer.grad_norm, *self.look()]

    def look(self) -> list[float]:
        """An evaluation, and values."""
        with torch.no_grad():
            found = [self.model(**self.scenario.batches(99)).loss.item()]
        with infinity.gathered(self.model.first):
            found.append(self.model.first.weight.sum().item())
        found.append(self.model.shift.sum().item())  # touched outside any forward
        return found

    def values(self) -> list[Tensor]:
        """Weights and states."""
        weights = infinity.state_dict(self.model)
        states = self.optimizer.state_dict()["state"]
        return [*weights.values(), *(torch.as_tensor(v) for s in states.values() for v in s.values())]

    def held(self) -> tuple[Any, ...]:
        """What the model holds when nothing is asked of it."""
        runtime, executor = runtime_of(self.model), runtime_of(self.model).executor()
        self.optimizer.zero_grad()
        executor.hooks.release_unscoped_units()
        executor.prefetcher.forget()
        self.optimizer.synchronize()
        executor.gradients.pool.give_back()
        pinned = sum(executor.prefetcher.pins.values())
        leased = executor.device_pool.leased_nbytes, runtime.storage.host_pool.leased_nbytes
        units = len(executor.mover.attached), len(executor.mover._arriving), pinned
        return leased, units, executor.hooks.stack

    def close(self, *, keep: bool = False) -> None:
        infinity.close(self.model, keep=keep)


@contextlib.contextmanager
def _small_slots(scenario: Scenario) -> Iterator[None]:
    nbytes = scenario.slots_nbytes or tensor_cache.LEAST_NBYTES
    with mock.patch.object(tensor_cache, "LEAST_NBYTES", nbytes):
        yield


@dataclass
class Undisturbed:
    """What a scenario gives when nothing interrupts it.

    Attributes:
        looks: Before any step, and after each.
        lines: How often each line runs, by iteration.
    """

    numbers: list[list[float]]
    looks: list[list[float]]
    values: list[Tensor]
    held: tuple[Any, ...]
    lines: list[Counter[tuple[str, int]]]


def undisturbed(scenario: Scenario, folder: Path) -> Undisturbed:
    """Train without interrupts."""
    with _small_slots(scenario):
        loop = Loop(scenario, folder)
        numbers, lines = [], []
        looks = [loop.look()]
        for number in range(COUNT):
            with Interrupter() as counted:
                numbers.append(loop.iteration(number))
            lines.append(counted.counts)
            looks.append(numbers[-1][-len(looks[0]) :])
        values = loop.values()
        held = loop.held()
        loop.close()
    return Undisturbed(numbers, looks, values, held, lines)


def moments(lines: Counter[tuple[str, int]], most: int = 3) -> list[Moment]:
    """The first, the last and a middle time of each line."""
    found = []
    for (file, line), count in sorted(lines.items()):
        times = sorted({1, count, (count + 1) // 2})[:most] if most > 1 else [1]
        found += [Moment(file, line, nth) for nth in times]
    return found


# --- a trial -----------------------------------------------------------------------------------------


def trial(
    scenario: Scenario, wanted: Undisturbed, folder: Path, moment: Moment, number: int, then: str = "again"
) -> str:
    """Interrupt iteration ``number`` at a moment, and go on.

    Args:
        then: What comes next: the cell is run ``again``; first ``zero_grad``; or first ``look`` at the model.

    Returns:
        How it ended: ``not reached``, ``went on``, ``said so`` (a StateError, and a new model went on);
        anything else is wrong.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    threads = threading.active_count()
    loops: list[Loop] = []
    try:
        with _small_slots(scenario), limited(PATIENCE_S), _swallowed():
            outcome = _trial(scenario, wanted, folder, moment, number, then, loops)
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error}"[:300] + " at " + _where(error)
        if os.environ.get("INFINITY_RAISE"):
            raise
    try:
        with limited(PATIENCE_S):
            for loop in loops:
                loop.close()
    except BaseException as error:
        outcome = f"close: {type(error).__name__}: {error} at {_where(error)} after {outcome}"
    loops.clear()
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        outcome = f"gradients stay disabled after {outcome}"
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        outcome = f"hooks of saved tensors stay after {outcome}"
    left = [str(path) for path in folder.glob("*/*")] if outcome in ENDINGS else []
    if left:
        outcome = f"files left: {left}"
    if outcome in ENDINGS and threading.active_count() > threads:
        gc.collect()
        if threading.active_count() > threads + 1:  # the one that closes what is collected
            outcome = f"threads left: {[each.name for each in threading.enumerate()]}"
    return outcome


#: Of trials, those that are right.
ENDINGS = ("not reached", "went on", "said so")


def _trial(
    scenario: Scenario, wanted: Undisturbed, folder: Path, moment: Moment, number: int, then: str,
    loops: list[Loop],
) -> str:  # fmt: skip
    loop = Loop(scenario, folder)
    loops.append(loop)
    for earlier in range(number):
        _same(loop.iteration(earlier), wanted.numbers[earlier], f"iteration {earlier}")
    with contextlib.suppress(KeyboardInterrupt), Interrupter(moment) as interrupter:
        loop.iteration(number)
    if not interrupter.came:
        return "not reached"
    try:
        if then == "look":
            _same(loop.look(), wanted.looks[loop.optimizer.steps], "the look after")
        _go_on(loop, wanted, zero=then == "zero_grad" or scenario.accumulate > 1)
        assert loop.held() == wanted.held, f"{loop.held()} held; wanted {wanted.held}"
        return "went on"
    except StateError as error:
        if "Ctrl-C" not in str(error) or "caught inside" in str(error):  # which it was not
            raise
        if not scenario.nvme or "versions=1" in str(scenario.settings):
            return "said so"
        loop.close(keep=True)
        loops.remove(loop)
        loops.append(Loop(scenario, folder))
        assert loops[-1].start >= number - 1, f"the new model goes on from {loops[-1].start}"
        _go_on(loops[-1], wanted, zero=False)
        return "said so"


def _go_on(loop: Loop, wanted: Undisturbed, *, zero: bool) -> None:
    """Run the loop's cell until all steps are made."""
    if zero:
        loop.optimizer.zero_grad()
    while (number := loop.optimizer.steps) < COUNT:
        try:
            found = loop.iteration(number)
        except StateError as error:
            if "zero_grad()" not in str(error) or zero:
                raise
            zero = True
            loop.optimizer.zero_grad()  # as it says
        else:
            _same(found, wanted.numbers[number], f"iteration {number}")
    for mine, theirs in zip(loop.values(), wanted.values, strict=True):
        assert torch.equal(mine, theirs), "final values"


def _same(found: Sequence[float], wanted: Sequence[float], what: str) -> None:
    assert list(found) == list(wanted), f"{what}: {found}; wanted {wanted}"


@contextlib.contextmanager
def _swallowed() -> Iterator[None]:
    """An interrupt in a finalizer goes nowhere."""
    with mock.patch.object(sys, "unraisablehook"):
        yield


def _where(error: BaseException) -> str:
    trace, found = error.__traceback__, []
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.startswith(PACKAGE):
            found.append(f"{file.removeprefix(PACKAGE)}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " < ".join(reversed(found[-3:]))
