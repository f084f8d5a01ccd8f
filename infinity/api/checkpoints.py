"""Saves portable checkpoints regularly, beside the training of a run."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from infinity.api.portable import PortableSave, begin_save
from infinity.checkpoint.writer import Series
from infinity.core.config import Config, SettingError, Valid, option, setting
from infinity.core.errors import BudgetError, CheckpointError, DiskError, PeerError

#: The folder of checkpoints in the run's folder.
CHECKPOINTS_FOLDER = "checkpoints"
#: Errors of a save after which training can go on.
_NO_HARM = DiskError, PeerError, CheckpointError, BudgetError
_EVERY = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(steps?|s|min|h)")
_SECONDS = {"s": 1, "min": 60, "h": 3600}


class Interval(NamedTuple):
    """Holds the distance between two checkpoints: steps, or seconds."""

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
        'time between portable checkpoints: "500 steps", 30min, 2h, 90s; null: none',
    )
    keep: int = option(2, "portable checkpoints that stay, the newest", Valid(1, 10**6))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.interval()

    def interval(self) -> Interval | None:
        """Return the interval that ``every`` names, or None; raises a SettingError if it is invalid."""
        if self.every is None:
            return None
        found = _EVERY.fullmatch(self.every.strip())
        number = float(found[1]) if found else 0.0
        if found is None or not number or (found[2].startswith("step") and not number.is_integer()):
            raise SettingError("every", self.every, 'such as "500 steps", 30min, 2h, 90s')
        if found[2].startswith("step"):
            return Interval(steps=int(number))
        return Interval(seconds=number * _SECONDS[found[2]])


class Checkpoints:
    """Saves a model beside training when that is due, one checkpoint at a time.

    A save that fails leaves earlier ones as they are, and training goes on.

    Args:
        folder: The run's, which begins after ``step``.
        steps: The last step; after it a checkpoint is due.
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
        self._saving: PortableSave | None = None  # one that has not ended
        self._last, self._last_s = step, time.monotonic()  # after which step, and when, a save began
        self._failed = 0

    def after(self, step: int) -> bool:
        """Begin a checkpoint if one is due, and end one that is written; return whether that took time.

        Every rank must call.
        """
        saving, ends = self._saving, step == self._steps
        acted = saving is not None and self._go_on(saving, wait=ends)
        if (saving is None or saving.ended) and self._is_due(step):
            acted, saving, self._last, self._last_s = True, None, step, time.monotonic()
            path, then = self._series.path(step), partial(self._series.publish, step)
            with self._harmless():
                saving = begin_save(self._optimizer.model, self._optimizer, path, background=True, then=then)
            if saving is not None and ends:
                self._go_on(saving, wait=True)
        self._saving = None if saving is None or saving.ended else saving
        return acted

    def _go_on(self, saving: PortableSave, *, wait: bool) -> bool:
        """Advance a checkpoint if all ranks are ready, or told to ``wait``; return whether that took time."""
        if not wait and self._agree(float(saving.done)) < 1:
            return False
        failed = self._failed
        with self._harmless():
            if wait:
                saving.wait()
            else:
                saving.advance()
        if saving.ended and self._failed == failed:
            took_s = time.monotonic() - self._last_s
            self._say(f"checkpoint after step {self._last} in {took_s:.1f} s beside training: {saving.out}")
        return True

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """Let a harmless error end the checkpoint, not the training."""
        try:
            yield
        except _NO_HARM as error:
            self._failed += 1
            notes, begin = self._optimizer.runtime.notes, "WARNING: no checkpoint after step"
            line = f"{begin} {self._last}, training goes on: {error}"
            self._say(line)
            if self._failed > 1:
                line = f"{begin} {self._last} and {self._failed - 1} others before, training goes on: {error}"
            notes[:] = [note for note in notes if not note.startswith(begin)] + [line]  # for the summary

    def _is_due(self, step: int) -> bool:
        every, seconds, last = *self._interval, step == self._steps
        if every is not None and step // every == self._last // every and not last:
            return False
        is_time = last or seconds is None or time.monotonic() - self._last_s >= seconds  # by rank 0's clock
        wanted = self._leads and not self._series.path(step).exists() and is_time
        return self._agree(float(wanted)) > 0
