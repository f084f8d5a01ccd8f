"""Portable checkpoints of a run while it trains: when they are due, the newest of them, and how many stay."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import infinity
from infinity.checkpoint.publish import Series
from infinity.core.config import SettingError, Valid, check, setting
from infinity.core.errors import CheckpointError, DiskError, PeerError

#: Where they are in the run's folder.
CHECKPOINTS_FOLDER = "checkpoints"
#: What saving may take of a run's time with ``every: auto``.
AUTO_SHARE = 0.035
#: How fast the first save of ``every: auto`` is expected to be.
_ASSUMED_BYTES_PER_S = 500e6
#: Exact weights and two moments, fp32.
_NBYTES_PER_PARAMETER = 12
_EVERY = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(steps?|s|min|h)")
_SECONDS = {"s": 1, "min": 60, "h": 3600}


class Interval(NamedTuple):
    """How much lies between two checkpoints: steps, or seconds, or what costs little (neither)."""

    steps: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Portable checkpoints beside training."""

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
    """Saves a model between two steps when that is due.

    A save that fails leaves those before it as they are, and training goes on.

    Args:
        folder: The run's.
        steps: Of the run; after the last one a checkpoint is due, unless ``every`` is auto.
        agree: Returns the mean of a number over all ranks, so that they decide alike.
        say: Gets a line for people about each checkpoint; on rank 0.
    """

    def __init__(
        self, config: CheckpointConfig, model: Any, optimizer: Any, folder: Path, *, steps: int,
        agree: Callable[[float], float], say: Callable[[str], object],
    ) -> None:  # fmt: skip
        self._model, self._optimizer, self._steps = model, optimizer, steps
        self._agree, self._say = agree, say
        self._interval = config.interval() or Interval()
        self._leads = optimizer.runtime.ranks.rank == 0
        self._series = Series(folder / CHECKPOINTS_FOLDER, "step", config.keep)
        numel = sum(p.numel() for p in model.parameters())
        self._pace = Pace(_NBYTES_PER_PARAMETER * numel / _ASSUMED_BYTES_PER_S, time.monotonic())

    def after(self, step: int) -> bool:
        """Save a checkpoint after ``step`` if one is due; return whether one was. Every rank must call."""
        if not self._is_due(step):
            return False
        begun = time.monotonic()
        try:
            infinity.save_checkpoint(self._model, self._optimizer, self._series.path(step))
            if self._leads:
                self._series.publish(step)
        except (DiskError, PeerError, CheckpointError) as error:
            line = f"WARNING: no checkpoint after step {step}, training goes on: {error}"
            self._say(line)
            self._optimizer.runtime.notes.append(line)  # for the summary
        else:
            took_s = time.monotonic() - begun
            self._say(f"checkpoint after step {step} in {took_s:.1f} s: {self._series.path(step)}")
        self._pace.saved(begun, time.monotonic())
        return True

    def _is_due(self, step: int) -> bool:
        every, last = self._interval.steps, step == self._steps
        if every is not None and step % every and not last:
            return False
        wanted = self._leads and not self._series.path(step).exists() and self._is_time(last)
        return self._agree(float(wanted)) > 0

    def _is_time(self, last: bool) -> bool:
        """Whether it is time by rank 0's clock."""
        if self._interval == Interval():
            return self._pace.allows(AUTO_SHARE, time.monotonic())
        seconds = self._interval.seconds
        return last or seconds is None or time.monotonic() - self._pace.last_s >= seconds


class Pace:
    """What saving has cost until now. All times are of one clock that never jumps (s).

    Source: CheckFreq (FAST '21): the frequency follows from the measured cost, so that it is bounded.

    Attributes:
        last_s: When the last save ended, or the run began.
    """

    def __init__(self, expected_s: float, now_s: float) -> None:
        self._begun_s = self.last_s = now_s
        self._expected_s, self._spent_s = expected_s, 0.0

    def saved(self, begun_s: float, ended_s: float) -> None:
        """Take note of a save; the next one is expected to take as long."""
        self._expected_s = ended_s - begun_s
        self._spent_s += self._expected_s
        self.last_s = ended_s

    def allows(self, share: float, now_s: float) -> bool:
        """Whether all saves, with one that begins now, take at most ``share`` of the time."""
        spent_s = self._spent_s + self._expected_s
        return spent_s <= share * (now_s - self._begun_s + self._expected_s)
