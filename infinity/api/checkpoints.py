"""Saves portable checkpoints regularly, beside the training of a run."""

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from infinity.api.portable import PortableSave, begin_save
from infinity.checkpoint.writer import Series
from infinity.core.config import Config, SettingError, Valid, option, setting
from infinity.core.errors import BudgetError, CheckpointError, DiskError, PeerError

#: The folder of checkpoints in the run's folder.
CHECKPOINTS_FOLDER = "checkpoints"
#: The part of a run's time that saving may take with ``every: auto``.
AUTO_SHARE = 0.035
#: What the first save of ``every: auto`` is expected to take for each parameter: 12 bytes at 500 MB/s.
_ASSUMED_S = 12 / 500e6
#: The least cost of a save beside training, as a part of its time.
_LEAST_COST = 0.1
#: How many of the last steps without a save give the usual time of a step.
_SEEN_STEPS = 32
#: Errors of a save after which training can go on.
_NO_HARM = DiskError, PeerError, CheckpointError, BudgetError
_EVERY = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(steps?|s|min|h)")
_SECONDS = {"s": 1, "min": 60, "h": 3600}


class Interval(NamedTuple):
    """Holds the distance between two checkpoints: steps, or seconds, or (neither) whatever costs little."""

    steps: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Config):
    """Settings of portable checkpoints: which one a run starts from, and when it saves."""

    load: str | None = setting(
        None,
        "directory of torch.distributed.checkpoint from which a new run starts: weights, moments and step "
        "counts; null: none",
        path=True,
    )
    every: str | None = option(
        None,
        'time between portable checkpoints: "500 steps", 30min, 2h, 90s; auto: as often as costs at most '
        "3.5 % of the time; null: none",
    )
    keep: int = option(2, "portable checkpoints that stay, the newest", Valid(1, 10**6))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.interval()

    def interval(self) -> Interval | None:
        """Return the interval that ``every`` names, or None; raises a SettingError if it is invalid."""
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
    """Saves a model beside training when that is due, one checkpoint at a time.

    A save that fails leaves earlier ones as they are, and training goes on.

    Args:
        folder: The run's, which begins after ``step``.
        steps: The last step; after it a checkpoint is due, unless ``every`` is auto.
        agree: Returns the mean of a number over all ranks, so that they decide alike.
        say: Gets a line for people about each checkpoint; on rank 0.
    """

    def __init__(
        self, config: CheckpointConfig, optimizer: Any, folder: Path, *, step: int, steps: int,
        agree: Callable[[float], float], say: Callable[[str], object],
    ) -> None:  # fmt: skip
        self._optimizer, self._steps = optimizer, steps
        self._agree, self._say = agree, say
        self._interval = config.interval() or Interval()
        self._leads = optimizer.runtime.ranks.rank == 0
        self._series = Series(folder / CHECKPOINTS_FOLDER, "step", config.keep)
        if self._leads:
            self._series.remove_leftovers()
        numel = sum(each.numel() for each in optimizer.model.parameters())
        self._pace = Pace(_ASSUMED_S * numel, time.monotonic())
        self._saving: PortableSave | None = None  # one that has not ended
        self._last = step  # after which a save began
        self._failed = 0

    def after(self, step: int, step_s: float) -> bool:
        """Begin a checkpoint if one is due, and end one that is written; return whether that took time.

        Every rank must call.
        """
        saving, ends = self._saving, step == self._steps
        self._pace.step(step_s, saving=saving is not None)
        acted = saving is not None and self._go_on(saving, wait=ends)
        if (saving is None or saving.ended) and self._is_due(step):
            acted, saving, self._last = True, None, step
            self._pace.begin(time.monotonic())
            path, then = self._series.path(step), partial(self._series.publish, step)
            with self._waiting():
                saving = begin_save(self._optimizer.model, self._optimizer, path, background=True, then=then)
            if saving is not None and ends:
                self._go_on(saving, wait=True)
        self._saving = None if saving is None or saving.ended else saving
        return acted

    def _go_on(self, saving: PortableSave, *, wait: bool) -> bool:
        """Advance a checkpoint if all ranks are ready, or told to ``wait``; return whether that took time."""
        if wait and self._interval == Interval():
            saving.close()  # waiting would take more than its share
            return True
        if not wait and self._agree(float(saving.done)) < 1:
            return False
        failed = self._failed
        with self._waiting():
            if wait:
                saving.wait()
            else:
                saving.advance()
        if saving.ended and self._failed == failed:
            took_s = self._pace.end(time.monotonic())
            self._say(f"checkpoint after step {self._last} in {took_s:.1f} s beside training: {saving.out}")
        return True

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the time inside as waiting; a harmless error ends the checkpoint, not the training."""
        began_s = time.monotonic()
        try:
            yield
        except _NO_HARM as error:
            self._pace.end(time.monotonic())
            self._failed += 1
            notes, begin = self._optimizer.runtime.notes, "WARNING: no checkpoint after step"
            line = f"{begin} {self._last}, training goes on: {error}"
            self._say(line)
            if self._failed > 1:
                line = f"{begin} {self._last} and {self._failed - 1} others before, training goes on: {error}"
            notes[:] = [note for note in notes if not note.startswith(begin)] + [line]  # for the summary
        else:
            self._pace.cost_s += time.monotonic() - began_s

    def _is_due(self, step: int) -> bool:
        every, last = self._interval.steps, step == self._steps
        if every is not None and step // every == self._last // every and not last:
            return False
        now_s, seconds = time.monotonic(), self._interval.seconds  # by rank 0's clock
        if self._interval == Interval():
            is_time = not last and self._pace.allows(AUTO_SHARE, now_s)
        else:
            is_time = last or seconds is None or now_s - self._pace.last_s >= seconds
        wanted = self._leads and not self._series.path(step).exists() and is_time
        return self._agree(float(wanted)) > 0


class Pace:
    """Measures what saving has cost so far. All times are of one clock that never jumps (s).

    A save costs what the steps beside it take longer than others do, and what training waits for it, but at
    least a tenth of the time that it takes: drives wear out, and times vary.

    Source: CheckFreq (FAST '21): the frequency follows from the measured cost, so that it is bounded.
    """

    def __init__(self, expected_s: float, now_s: float) -> None:
        self._begun_s = self.last_s = now_s  # when the run, and the last save, began
        self._expected_s, self._spent_s = expected_s, 0.0
        self._without_s = deque[float](maxlen=_SEEN_STEPS)  # the last steps that no save was beside
        self.cost_s = 0.0  # of the save that runs: also what training waits for it

    def step(self, step_s: float, *, saving: bool) -> None:
        if saving:
            self.cost_s += step_s - (median(self._without_s) if self._without_s else 0.0)
        else:
            self._without_s.append(step_s)

    def begin(self, now_s: float) -> None:
        self.last_s, self.cost_s = now_s, 0.0

    def end(self, now_s: float) -> float:
        """Record the end of a save, whose cost is expected of the next one; return how long it took."""
        took_s = now_s - self.last_s
        self._expected_s = max(self.cost_s, _LEAST_COST * took_s)
        self._spent_s += self._expected_s
        return took_s

    def allows(self, share: float, now_s: float) -> bool:
        """Return whether all saves, with one that begins now, cost at most ``share`` of the time."""
        spent_s = self._spent_s + self._expected_s
        return spent_s <= share * (now_s - self._begun_s + self._expected_s)
