"""Portable checkpoints of a run while it trains: when they are due, the newest of them, and how many stay."""

import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from infinity.api.portable import begin_save
from infinity.checkpoint.export import Series
from infinity.checkpoint.portable import PortableSave
from infinity.core.config import SettingError, Valid, check, setting
from infinity.core.errors import BudgetError, CheckpointError, DiskError, PeerError

#: Where they are in the run's folder.
CHECKPOINTS_FOLDER = "checkpoints"
#: What saving may take of a run's time with ``every: auto``.
AUTO_SHARE = 0.035
#: How fast the first save of ``every: auto`` is expected to be.
_ASSUMED_BYTES_PER_S = 500e6
#: Exact weights and two moments, fp32.
_NBYTES_PER_PARAMETER = 12
#: Part of its time that a save beside training costs at least.
_LEAST_COST = 0.1
#: Steps without a save beside them from which their usual time is taken.
_SEEN_STEPS = 32
#: What a save raises that training can go on after.
_NO_HARM = DiskError, PeerError, CheckpointError, BudgetError
_EVERY = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(steps?|s|min|h)")
_SECONDS = {"s": 1, "min": 60, "h": 3600}


class Interval(NamedTuple):
    """How much lies between two checkpoints: steps, or seconds, or what costs little (neither)."""

    steps: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Portable checkpoints: the one that a run starts from, and those that it saves beside training."""

    load: str | None = setting(
        None,
        "directory of torch.distributed.checkpoint from which a new run starts: weights, moments and step "
        "counts; null: none",
        path=True,
    )
    every: str | None = setting(
        None,
        'time between portable checkpoints: "500 steps", 30min, 2h, 90s; auto: as often as costs at most '
        "3.5 % of the time; null: none",
        numeric=False,
    )
    keep: int = setting(
        2, "portable checkpoints that stay, the newest", valid=Valid(least=1, most=10**6), numeric=False
    )

    def __post_init__(self) -> None:
        check(self)
        self.interval()

    def interval(self) -> Interval | None:
        """Return what ``every`` says; None: there are no checkpoints.

        Raises:
            SettingError: It says nothing that can be meant.
        """
        if self.every is None or self.every == "auto":
            return None if self.every is None else Interval()
        found = _EVERY.fullmatch(self.every.strip())
        number = float(found[1]) if found else 0.0
        if found is None or not number or (found[2].startswith("step") and not number.is_integer()):
            raise SettingError("every", self.every, 'auto, or such as "500 steps", 30min, 2h, 90s')
        if found[2].startswith("step"):
            return Interval(steps=int(number))
        return Interval(seconds=number * _SECONDS[found[2]])


class Checkpoints:
    """Saves a model beside training when that is due; one checkpoint at a time.

    A save that fails leaves those before it as they are, and training goes on.

    Args:
        folder: The run's.
        step: That the run begins after.
        steps: Of the run; after the last one a checkpoint is due, unless ``every`` is auto.
        agree: Returns the mean of a number over all ranks, so that they decide alike.
        say: Gets a line for people about each checkpoint; on rank 0.
    """

    def __init__(
        self, config: CheckpointConfig, model: Any, optimizer: Any, folder: Path, *, step: int, steps: int,
        agree: Callable[[float], float], say: Callable[[str], object],
    ) -> None:  # fmt: skip
        self._model, self._optimizer, self._steps = model, optimizer, steps
        self._agree, self._say = agree, say
        self._interval = config.interval() or Interval()
        self._leads = optimizer.runtime.ranks.rank == 0
        self._series = Series(folder / CHECKPOINTS_FOLDER, "step", config.keep)
        if self._leads:
            self._series.remove_leftovers()
        numel = sum(p.numel() for p in model.parameters())
        self._pace = Pace(_NBYTES_PER_PARAMETER * numel / _ASSUMED_BYTES_PER_S, time.monotonic())
        self._saving: PortableSave | None = None  # one that has not ended
        self._last = step  # after which a save began
        self._failed = 0

    def after(self, step: int, step_s: float) -> bool:
        """Begin a checkpoint if one is due, and end one that is written. Every rank must call.

        Args:
            step_s: How long the step took.

        Returns:
            Whether that took time.
        """
        saving, ends = self._saving, step == self._steps
        self._pace.step(step_s, saving=saving is not None)
        acted = saving is not None and self._go_on(saving, wait=ends)
        if (saving is None or saving.ended) and self._is_due(step):
            acted, saving = True, self._begin(step)
            if saving is not None and ends:
                self._go_on(saving, wait=True)
        self._saving = None if saving is None or saving.ended else saving
        return acted

    def _begin(self, step: int) -> PortableSave | None:
        self._last, began_s = step, time.monotonic()
        self._pace.begin(began_s)
        path, then = self._series.path(step), partial(self._series.publish, step)
        try:
            saving = begin_save(self._model, self._optimizer, path, background=True, then=then)
        except _NO_HARM as error:
            self._fail(error)
            return None
        self._pace.waited(time.monotonic() - began_s)
        return saving

    def _go_on(self, saving: PortableSave, *, wait: bool) -> bool:
        """End a checkpoint, or begin its publication, if all ranks have come so far or are to ``wait``.

        Returns:
            Whether that took time.
        """
        began_s = time.monotonic()
        if wait and self._interval == Interval():
            saving.close()  # waiting would take more than its share
            return True
        if not wait and self._agree(float(saving.done)) < 1:
            return False
        try:
            if wait:
                saving.wait()
            else:
                saving.advance()
        except _NO_HARM as error:
            self._fail(error)
            return True
        now_s = time.monotonic()
        self._pace.waited(now_s - began_s)
        if saving.ended:
            took_s = self._pace.end(now_s)
            self._say(f"checkpoint after step {self._last} in {took_s:.1f} s beside training: {saving.out}")
        return True

    def _fail(self, error: Exception) -> None:
        self._pace.end(time.monotonic())
        self._failed += 1
        notes, begin = self._optimizer.runtime.notes, "WARNING: no checkpoint after step"
        line = f"{begin} {self._last}, training goes on: {error}"
        self._say(line)
        if self._failed > 1:
            line = f"{begin} {self._last} and {self._failed - 1} others before, training goes on: {error}"
        notes[:] = [note for note in notes if not note.startswith(begin)] + [line]  # for the summary

    def _is_due(self, step: int) -> bool:
        every, last = self._interval.steps, step == self._steps
        if every is not None and step // every == self._last // every and not last:
            return False
        wanted = self._leads and not self._series.path(step).exists() and self._is_time(last)
        return self._agree(float(wanted)) > 0

    def _is_time(self, last: bool) -> bool:
        """Whether it is time by rank 0's clock."""
        if self._interval == Interval():
            return not last and self._pace.allows(AUTO_SHARE, time.monotonic())
        seconds = self._interval.seconds
        return last or seconds is None or time.monotonic() - self._pace.last_s >= seconds


class Pace:
    """The cost of saving until now. All times are of one clock that never jumps (s).

    A save costs what the steps beside it take longer than others do, and what training waits for it. It
    counts for at least a tenth of the time that it takes: drives wear out, and times vary.

    Source: CheckFreq (FAST '21): the frequency follows from the measured cost, so that it is bounded.

    Attributes:
        last_s: When the last save began, or the run.
    """

    def __init__(self, expected_s: float, now_s: float) -> None:
        self._begun_s = self.last_s = now_s
        self._expected_s, self._spent_s = expected_s, 0.0
        self._without_s = deque[float](maxlen=_SEEN_STEPS)  # the last steps that no save was beside
        self._beside_s: list[float] = []
        self._waited_s = 0.0

    def step(self, step_s: float, *, saving: bool) -> None:
        """Take note of a step, and whether there was a save beside it."""
        (self._beside_s if saving else self._without_s).append(step_s)

    def begin(self, now_s: float) -> None:
        """A save begins."""
        self.last_s, self._waited_s = now_s, 0.0
        self._beside_s.clear()

    def waited(self, seconds: float) -> None:
        """Training waited for the save."""
        self._waited_s += seconds

    def end(self, now_s: float) -> float:
        """A save has ended; the next one is expected to cost as much. Returns how long it took."""
        took_s = now_s - self.last_s
        usual_s = median(self._without_s) if self._without_s else 0.0
        slower_s = sum(self._beside_s) - usual_s * len(self._beside_s)
        self._expected_s = max(slower_s + self._waited_s, _LEAST_COST * took_s)
        self._spent_s += self._expected_s
        return took_s

    def allows(self, share: float, now_s: float) -> bool:
        """Whether all saves, with one that begins now, cost at most ``share`` of the time."""
        spent_s = self._spent_s + self._expected_s
        return spent_s <= share * (now_s - self._begun_s + self._expected_s)
