"""What people learn of a run's activations: a line when they are planned, files, and figures at the end."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

from infinity.activations.controller import Activations
from infinity.observe.events import StepReport
from infinity.observe.summary import ActivationSummary
from infinity.planner.planning import FOLDER, save_measured

#: How stalls for activations are named in a report.
CAUSE = "activation"


class ActivationView:
    """Follows the steps of a run; a :class:`~infinity.observe.metrics.View`.

    Args:
        activations: Of the run's model.
        folder: The run's; a plan is kept in it.
        accumulate: Micro-batches of a step.
        say: Gets the line.
    """

    def __init__(
        self, activations: Activations, folder: Path, accumulate: int, say: Callable[[str], object]
    ) -> None:
        self._activations, self._folder = activations, folder / FOLDER
        self._accumulate, self._say = accumulate, say
        self._planned = False
        self._moved = 0, 0
        self._steps: list[tuple[int, int, float]] = []  # since it is settled what is done: bytes, stall

    def step(self, report: StepReport) -> None:
        stats = self._activations.cache.stats
        moved = stats.nbytes_stored, stats.nbytes_loaded
        if self._planned or self._activations.policy != "plan":
            stored, loaded = (now - before for now, before in zip(moved, self._moved))
            self._steps.append((stored, loaded, report.stall_s.get(CAUSE, 0.0)))
        self._moved = moved
        planning = self._activations.planning
        if planning is not None and not self._planned:
            self._planned = True
            planning.save(self._folder)
            self._say(planning.describe())

    def evaluated(self, step: int, loss: float) -> None:
        pass

    def close(self) -> None:
        pass

    def result(self) -> ActivationSummary | None:
        """The figures so far, of which ``measured.json`` is written; None: activations were kept."""
        activations, planning = self._activations, self._activations.planning
        if activations.policy == "keep":
            return None
        stored, loaded, stall_s = (median(figures) for figures in zip(*self._steps or [(0, 0, 0.0)]))
        summary = ActivationSummary(
            policy=activations.policy,
            nbytes_stored=round(stored),
            nbytes_loaded=round(loaded),
            stall_s=stall_s,
            saved_peak_nbytes=activations.cache.stats.peak_nbytes,
        )
        if planning is None:
            return summary
        measured = activations.measured()
        if measured is not None:
            measured = replace(measured, stall_s=stall_s / self._accumulate)
            save_measured(self._folder, planning.predicted, measured)
        return replace(
            summary,
            plan=planning.describe().removeprefix("activations: "),
            planning_s=planning.planning_s,
            predicted=planning.predicted,
            measured=measured,
        )
