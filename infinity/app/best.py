"""Keeps the best model that an evaluation has found, and ends training that gets no better.

[Note: two of the best]
A best model is published in the run's folder, ``best/step-N``, before its step is committed. The one before
it stays until there is another: a run that is killed between goes on from the step before, and has that one.
"""

import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from infinity.core.errors import CheckpointError
from infinity.observe.metrics import Evaluation
from infinity.recipes.recipe import Recipe

#: The folder of the best models in the run's folder.
BEST_FOLDER = "best"
#: The best models that stay: see [Note: two of the best].
_KEPT = 2
#: Ends of the names of metrics that are better when they are lower.
_LOWER = ("loss", "kl")


class Best:
    """Follows a metric of evaluations; its state is committed with each step, after its evaluation.

    Args:
        folder: The run's; None: no model is kept.
        write: Publishes the trained model as a directory; every rank calls.
    """

    steps_after_optimizer = True

    def __init__(
        self, recipe: Recipe, folder: Path | None, write: Callable[[Path], object], *, leads: bool,
        say: Callable[[str], object],
    ) -> None:  # fmt: skip
        self.metric = recipe.train.keep_best or "loss"
        self._patience = recipe.train.patience
        keeps = folder is not None and recipe.train.keep_best is not None
        self._folder = folder / BEST_FOLDER if folder is not None and keeps else None
        self._write, self._leads, self._say = write, leads, say
        self.step, self.value = 0, math.nan  # of the best evaluation
        self.since = 0  # evaluations after it

    @property
    def is_over(self) -> bool:
        """Return whether so many evaluations were no better that training is to end."""
        return self._patience is not None and self.since >= self._patience

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "value": self.value, "since": self.since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.value, self.since = int(state["step"]), float(state["value"]), int(state["since"])
        kept = best_steps(self._folder) if self._folder is not None and self._leads else []
        if self._folder is not None and self.step in kept:
            for later in kept[kept.index(self.step) + 1 :]:  # of steps that are made again
                shutil.rmtree(self._folder / f"step-{later}")

    def begin(self) -> None:
        """Remove what an earlier process of a run that begins has left."""
        if self._folder is not None and self._leads:
            shutil.rmtree(self._folder, ignore_errors=True)

    def seen(self, found: Evaluation) -> None:
        """Take note of an evaluation, and keep the model if it is the best; every rank calls."""
        value = found.figures.get(self.metric, math.nan)
        sign = 1 if self.metric.endswith(_LOWER) else -1
        if not math.isnan(value) and not sign * value >= sign * self.value:
            self.step, self.value, self.since = found.step, value, 0
            self._keep()
            return
        self.since += 1
        if self.is_over:
            times = f"{self.since} evaluation{'s' if self.since > 1 else ''}"
            self._say(
                f"training ends after step {found.step}: no better {self.metric} in {times} since step "
                f"{self.step} (train.patience)"
            )

    def _keep(self) -> None:
        if self._folder is None:
            return
        out = self._folder / f"step-{self.step}"
        if self.step not in best_steps(self._folder):
            self._write(out)
        if self._leads:
            self._say(f"best {self.metric} so far, {self.value:.4f}: saved {out}")
            for old in best_steps(self._folder)[:-_KEPT]:
                shutil.rmtree(self._folder / f"step-{old}", ignore_errors=True)


def best_steps(folder: Path) -> list[int]:
    """Return the steps of the best models in a folder, ascending: the last one is the best."""
    whole = folder.glob("step-*/[!.]*")  # what is being written, or was when a process was killed, has a dot
    found = {each.parent.name.removeprefix("step-") for each in whole}
    return sorted(int(step) for step in found if step.isdecimal())


def best_of(run: Path) -> Path:
    """Return the folder of the best model of a run; CheckpointError: it keeps none."""
    steps = best_steps(run / BEST_FOLDER)
    if not steps:
        raise CheckpointError(
            f"{run} keeps no best model: wanted a run with train.keep_best (such as loss) that came to an "
            "evaluation"
        )
    return run / BEST_FOLDER / f"step-{steps[-1]}"
