"""Views of a run: metrics, TensorBoard and progress, and what a run reports about its activations."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from infinity.activations.controller import Activations
from infinity.app.runs import METRICS
from infinity.core.errors import InfinityError
from infinity.observe.metrics import MetricsFile, StepReport, TensorBoard, View
from infinity.observe.progress import ProgressDisplay
from infinity.observe.summary import ActivationSummary
from infinity.planner.planning import FOLDER, save_measured
from infinity.recipes.recipe import Recipe


class Views(View):
    """All views of a run as one; without any on ranks other than 0."""

    def __init__(self, views: Iterable[View] = ()) -> None:
        self._views = list(views)

    def add(self, view: View) -> None:
        self._views.append(view)

    def step(self, report: StepReport) -> None:
        for view in self._views:
            view.step(report)

    def evaluated(self, step: int, loss: float) -> None:
        for view in self._views:
            view.evaluated(step, loss)

    def log(self, line: str) -> None:
        for view in self._views:
            view.log(line)

    def loading(self, done_nbytes: int, total_nbytes: int) -> None:
        for view in self._views:
            view.loading(done_nbytes, total_nbytes)

    def close(self) -> None:
        with ExitStack() as stack:
            for view in self._views:
                stack.callback(view.close)


def open_display(recipe: Recipe, folder: Path, world_size: int) -> Views:
    """Open the display of progress, if the recipe asks for it."""
    views = Views()
    if recipe.observe.progress:
        views.add(ProgressDisplay(recipe.train.steps, log_every=recipe.train.log_every))
        ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
        model = recipe.model.path or f"{recipe.model.numel:,} parameters"
        views.log(f"{model} on {ranks}; files in {folder}")
    return views


def add_files(views: Views, recipe: Recipe, folder: Path, *, after: int) -> None:
    """Add the files of figures that the recipe asks for; what they have of steps after ``after`` is cut.

    With -1, for a run that begins, they become empty.
    """
    try:
        if recipe.observe.metrics:
            synced = recipe.durability.survives == "power"
            views.add(MetricsFile(folder / METRICS, after=after, synced=synced))
        if recipe.observe.tensorboard:
            views.add(TensorBoard(folder / "tensorboard", after=after))
    except OSError as error:
        raise InfinityError(f"{error.filename or folder}: {error.strerror}") from error


class ActivationView(View):
    """View that saves the plan for activations, says it by ``log``, and collects figures of the summary."""

    def __init__(
        self, activations: Activations, folder: Path, accumulate: int, log: Callable[[str], object]
    ) -> None:
        self._activations, self._folder = activations, folder / FOLDER
        self._accumulate, self._log = accumulate, log
        self._planned = False
        self._moved = 0, 0
        self._steps: list[tuple[int, int, float]] = []  # stored, loaded, stall

    def step(self, report: StepReport) -> None:
        stats = self._activations.cache.stats
        moved = stats.nbytes_stored, stats.nbytes_loaded
        if self._planned or self._activations.policy != "plan":
            stored, loaded = (now - before for now, before in zip(moved, self._moved))
            self._steps.append((stored, loaded, report.stall_s.get("activation", 0.0)))
        self._moved = moved
        planning = self._activations.planning
        if planning is not None and not self._planned:
            self._planned = True
            planning.save(self._folder)
            self._log(planning.describe())

    def result(self) -> ActivationSummary | None:
        """Return the figures so far and write ``measured.json``; None: all activations were kept."""
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
