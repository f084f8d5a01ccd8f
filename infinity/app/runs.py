"""Folders of runs: begin, continue, list and remove them.

[Note: the states of a run] A folder with ``recipe.yaml`` is a run's. The run is running while rank 0 holds
the lock in it, finished when it has a summary, and interrupted otherwise. An interrupted run continues from
directories of its name in ``memory.nvme``. If it was interrupted before its first commit, it begins anew in
its folder, with any recipe.
"""

import contextlib
import errno
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.table import Table
from rich.text import Text

from infinity.api.checkpoints import CHECKPOINTS_FOLDER
from infinity.comm.ranks import Ranks, gather
from infinity.core.errors import (
    BEGIN_ANEW,
    BudgetError,
    ChangedFileError,
    CheckpointError,
    InfinityError,
    LockedError,
    RecipeError,
    StateError,
)
from infinity.core.files import is_locked, is_own, lock_file, lock_owner, sync, user_path, write_file
from infinity.core.nbytes import format_nbytes
from infinity.core.plan import CHOICE, Choice
from infinity.nvme.run_directory import size_of
from infinity.observe.metrics import StepReport, last_step, read_metrics
from infinity.recipes.loading import load_recipe
from infinity.recipes.recipe import Recipe, changed_numbers, keeping, with_values
from infinity.shards import saved

#: Files in a run's folder; the recipe has every key, with the dtype that was chosen for ``auto``.
RECIPE, SUMMARY, METRICS, LOCK = "recipe.yaml", "summary.json", "metrics.jsonl", "run.lock"
#: Folders in which a run keeps its trained model, or only its adapters; and in which either are averages.
MODEL_FOLDER, ADAPTERS_FOLDER, EMA_FOLDER = "model", "adapters", "ema"
#: What the folder may contain if the run was killed while it made the folder.
_BEGINNINGS = {LOCK, f"{RECIPE}.new"}
#: So few steps may be lost without an error.
_MOST_UNCOMMITTED = 2
#: Errors of file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True, slots=True)
class Run:
    """A run that begins or continues."""

    recipe: Recipe
    folder: Path
    before: Recipe | None = None  # with which it was interrupted; None: it begins
    lost: int = 0  # steps that are made again from the first one, since none of them was recorded
    choice: Choice | None = None  # what a plan chose when it began; None: nothing was planned
    ended: bool = False  # it is finished, with this recipe: a job that is started again has nothing to do

    def choosing(self, choice: Choice | None) -> "Run":
        """Return the run with what ``choice`` has of the keys that its recipe leaves to ``auto``."""
        recipe = self.recipe if choice is None else with_values(self.recipe, choice.values)
        return replace(self, recipe=recipe.as_without_plan(), choice=choice)


def find_run(recipe: Recipe, elsewhere: int | None = None) -> Run:
    """Return the run that a recipe names, a new or an interrupted one; changes nothing.

    ``elsewhere`` is the last step that other nodes keep of it.

    Raises:
        RecipeError: The run is finished or running, ``run.resume`` says otherwise, or the run was interrupted
            with another recipe; names each key that differs.
    """
    name = recipe.run.name or f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{os.getpid()}"
    folder = Path(recipe.run.dir) / name
    kept = committed_step(recipe, name)
    kept = elsewhere if kept is None else kept
    if not _is_begun(folder):
        if recipe.run.resume == "must":
            raise RecipeError(
                f"run.resume=must: {folder} is not an interrupted run; run.resume=auto begins a new one"
            )
        if kept is not None and recipe.run.resume == "auto":
            raise RecipeError(
                f"run.name: memory.nvme keeps step {kept} of an interrupted run {name}, whose folder is not "
                f"{folder}: give this run another name, or remove what is kept: "
                f"rm -r {shlex.join(map(str, drive_directories(recipe, name)))}"
            )
        return Run(recipe, folder)
    if not is_interrupted(folder):
        before = load_recipe(folder / RECIPE)
        alike = (recipe.steps, recipe.optim.rule.name) == (before.steps, before.optim.rule.name)
        if alike and not changed_numbers(before, recipe):
            return Run(recipe, folder, before, ended=True)
        raise _finished(recipe, folder)
    if recipe.run.resume == "never":
        raise RecipeError(
            f"run.name: {folder} was interrupted, and run.resume=never goes on with no run: "
            f"{_or_remove(folder)}"
        )
    before = load_recipe(folder / RECIPE)
    if kept is None:
        return Run(recipe, folder, lost=_steps_lost(recipe, before, folder))
    if recipe.steps < kept:
        raise RecipeError(
            f"train.steps: got {recipe.steps}; wanted at least {kept}, the step at which {folder} was "
            "interrupted"
        )
    if changes := changed_numbers(before, recipe):
        raise RecipeError(
            f"{folder} was interrupted at step {kept}, and with this recipe it would go on with other "
            f"numbers: {'; '.join(changes)}. Give it the values that it had, or {_or_remove(folder)}"
        )
    chosen = Choice.read(folder / CHOICE)
    return Run(keeping(before, recipe, {} if chosen is None else chosen.values), folder, before)


def _is_begun(folder: Path) -> bool:
    """Return whether ``folder`` is a run's folder; RecipeError: it is something else."""
    try:
        if (folder / RECIPE).is_file():
            return True
        if not os.path.lexists(folder) or {path.name for path in folder.iterdir()} <= _BEGINNINGS:
            return False
    except OSError as error:
        raise RecipeError(f"run.dir: {error.filename or folder}: {error.strerror}") from error
    raise RecipeError(
        f"run.name: {folder} exists, and is no run's folder; give the run another name, or none"
    )


def state_of(folder: Path) -> Literal["running", "finished", "interrupted"]:
    """Return the state of the run in ``folder``: see [Note: the states of a run]."""
    lock = folder / LOCK
    if lock.exists() and is_locked(lock):
        return "running"
    return "finished" if (folder / SUMMARY).exists() else "interrupted"


def is_interrupted(folder: Path) -> bool:
    """Return whether ``folder`` is an interrupted run's; RecipeError: the run is running."""
    if not (folder / RECIPE).is_file():
        return False
    state = state_of(folder)
    if state == "running":
        raise _in_use(folder)
    return state == "interrupted"


def _in_use(folder: Path) -> RecipeError:
    return RecipeError(
        f"run.name: {folder} is in use by {lock_owner(folder / LOCK)}; wait for that run or end it, or give "
        "a new one another name"
    )


def _finished(recipe: Recipe, folder: Path) -> RecipeError:
    steps, more = load_recipe(folder / RECIPE).steps, ""
    if recipe.steps > steps:
        model, latest = folder / "model", folder / CHECKPOINTS_FOLDER / "latest"
        source = f": model.path={model}" if model.is_dir() else ", if it saved one (run.save)"
        more = (
            f". Its files on the drives were removed then, so train.steps={recipe.steps} cannot go on "
            f"from there: begin a new run from its trained model{source}"
        )
        if latest.is_dir():
            more += f"; in a loop of your own, infinity.load_checkpoint loads {latest}"
    return RecipeError(f"run.name: {folder} is finished after {steps} steps; {_or_remove(folder)}{more}")


def _steps_lost(recipe: Recipe, before: Recipe, folder: Path) -> int:
    """Return how many steps of an interrupted run are lost, as none was committed; or refuse that."""
    load = recipe.checkpoint.load
    if load is not None and (folder / CHECKPOINTS_FOLDER).resolve() in Path(load).resolve().parents:
        raise RecipeError(
            f"checkpoint.load: {load} is one of {folder} itself, which would begin anew without it: give "
            "this run another name"
        )
    elsewhere, logged = committed_step(before, folder.name), last_step(folder / METRICS)
    lines = read_metrics(folder / METRICS)
    made = sum(isinstance(line, StepReport) and not line.skipped for line in lines)
    if elsewhere is not None:
        raise RecipeError(
            f"memory.nvme: {folder} was interrupted at step {elsewhere}, and what it goes on from lies in "
            f"{_listed(drive_directories(before, folder.name))}: give memory.nvme="
            f"[{','.join(before.memory.nvme)}], or move these directories"
        )
    if recipe.run.resume == "must":
        raise RecipeError(f"run.resume=must: {folder} was interrupted before any step was kept")
    # what it had before its first record is still there, unless it was moved or removed
    kept_at_first = not _why_none(before) and drive_directories(before, folder.name)
    if made > _MOST_UNCOMMITTED and not kept_at_first:
        raise RecipeError(
            f"run.name: {folder} was interrupted after step {logged}, and there is nothing to go on from: "
            f"{_why_nothing(before)}; {_or_remove(folder)}"
        )
    return made


def _why_none(recipe: Recipe) -> str:
    """Return why a run with this recipe keeps no step; empty if it keeps them."""
    if not recipe.memory.nvme:
        return "without memory.nvme no step is kept"
    if recipe.memory.versions < 2:
        return "with memory.versions=1 no step is kept"
    return "with run.resume=never no step is kept" if recipe.run.resume == "never" else ""


def _why_nothing(recipe: Recipe) -> str:
    return _why_none(recipe) or (
        f"no step is kept in {_listed(recipe.memory.nvme)} (if its files were moved, or a drive is not "
        "mounted, see to memory.nvme)"
    )


def _or_remove(folder: Path) -> str:
    return f"give the run another name, or remove it: {removal_of(folder)}"


def removal_of(folder: Path) -> str:
    """Return the command that removes a run."""
    parent = "" if str(folder.parent) == "runs" else f" {shlex.quote(str(folder.parent))}"
    return f"infinity runs{parent} --remove {shlex.quote(folder.name)}"


@contextlib.contextmanager
def opened(run: Run) -> Iterator[None]:
    """On rank 0 make the run's folder, hold its lock in this block, and write a new run's recipe."""
    folder = run.folder
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # a run may be as private as its data
            stack.enter_context(locked(folder))
            if (folder / SUMMARY).exists():  # since find_run looked
                raise _finished(run.recipe, folder)
            if run.before is None:  # else when it goes on: until then this recipe may be refused
                shutil.rmtree(folder / CHECKPOINTS_FOLDER, ignore_errors=True)  # of steps that were lost
                write_recipe(run.recipe, folder)
                if run.choice is None:
                    (folder / CHOICE).unlink(missing_ok=True)
                else:
                    run.choice.write(folder / CHOICE)
            if run.recipe.durability.survives == "power":
                for path in (folder / RECIPE, folder, folder.parent):
                    sync(path)
        except OSError as error:
            raise RecipeError(f"run.dir: {error.filename or folder}: {error.strerror}") from error
        yield


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run's lock in this block; RecipeError: another process, which it names, holds it."""
    lock, path = -1, folder / LOCK
    try:
        lock = lock_file(path)
    except LockedError as error:
        raise _in_use(folder) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    try:
        yield
    finally:
        if lock >= 0:
            path.unlink(missing_ok=True)  # while it is held: see infinity.core.files
            os.close(lock)


def write_recipe(recipe: Recipe, folder: Path) -> None:
    """Write the recipe into the run's folder, with absolute paths of drives, model and data."""
    write_file(folder / RECIPE, recipe.with_absolute_paths().to_yaml())


def interrupted_run(folder: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe with which the run in ``folder`` continues."""
    folder = user_path(folder, "RUN")
    recipe = recipe_of(folder, overrides)
    folder = folder.resolve() if folder.name in ("", "..") else folder
    resume = "auto" if recipe.run.resume == "never" else recipe.run.resume
    return replace(recipe, run=replace(recipe.run, dir=str(folder.parent), name=folder.name, resume=resume))


def recipe_of(folder: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe in a run's folder."""
    if not (folder / RECIPE).is_file():
        what = f"no {RECIPE}" if folder.is_dir() else "no such folder"
        raise RecipeError(f"{folder}: {what}; wanted the folder of a run, as `infinity runs` lists them")
    return load_recipe(folder / RECIPE, overrides)


def saved_folder(run: Path) -> Path:
    """Return the folder of the trained model, or of the adapters, that a run of ``infinity train`` kept."""
    for source in (run / ADAPTERS_FOLDER, run / MODEL_FOLDER):
        if source.is_dir():
            return source
    what = f"no folder {MODEL_FOLDER}" if run.is_dir() else "no such folder"
    found = [path for name in (MODEL_FOLDER, ADAPTERS_FOLDER) for path in run.glob(f"*/{name}")]
    newest = max(found, key=lambda path: path.stat().st_mtime).parent if found else None
    raise CheckpointError(
        f"{run}: {what}; wanted the folder of a run that came to its last step with run.save: true, "
        f"with its trained model in {MODEL_FOLDER}/"
        + ("" if newest is None else f". It is a folder of runs; the newest with a model is {newest}")
    )


def drive_directories(recipe: Recipe, name: str) -> list[Path]:
    """Return this user's directories in ``memory.nvme`` of the run ``name``."""
    paths = [Path(root) / name for root in recipe.memory.nvme]
    return [path for path in paths if is_own(path) and any(path.glob("rank*.lock"))]


def committed_step(recipe: Recipe, name: str) -> int | None:
    """Return the step that this machine's drives keep of the run ``name``; None: they keep none."""
    return saved.committed_step(drive_directories(recipe, name))


def kept_by_any(recipe: Recipe, ranks: Ranks) -> int | None:
    """Return, on rank 0, the last step that any node keeps of the run that a recipe names. All ranks call."""
    mine = None if recipe.run.name is None else committed_step(recipe, recipe.run.name)
    return max((each for each in gather(mine, ranks, "finding the run") if each is not None), default=None)


def how_to_go_on(run: Run, error: BaseException) -> str:
    """Return a line on what is kept of a run that ``error`` interrupts; may be empty."""
    name, recipe = run.folder.name, run.recipe
    step = committed_step(recipe, name)
    if step is None:
        if isinstance(error, Exception):
            return ""
        why = _why_none(recipe) or "no step was committed yet"
        return f"{why}; to remove the run: {removal_of(run.folder)}"
    if ChangedFileError.advice in str(error):  # its text, which another rank's PeerError quotes
        return f"to remove the run: {removal_of(run.folder)}"
    directories = drive_directories(recipe, name)
    refused = isinstance(error, (RecipeError, BudgetError, StateError))  # so it would be again
    again = "run the same command again, or " if recipe.run.name and not refused else ""
    return (
        f"step {step} of {recipe.steps} is kept ({size_of(directories)} in {_listed(directories)}). "
        f"To go on: {again}infinity resume {shlex.quote(str(run.folder))}; to remove it: "
        f"{removal_of(run.folder)}"
    )


def _listed(paths: Iterable[Path | str]) -> str:
    return ", ".join(str(path) for path in paths)


def _require_unused(directories: Iterable[Path], *locks: Path) -> None:
    """Refuse a run whose lock, or a rank's in one of its ``directories``, another process holds."""
    for lock in (*locks, *(lock for path in directories for lock in path.glob("rank*.lock"))):
        if lock.exists() and is_locked(lock):
            text = f"{lock.parent} is in use by {lock_owner(lock)}; end that first"
            raise LockedError(errno.EWOULDBLOCK, text, str(lock))


def verify_run(names: Sequence[str]) -> Iterator[str]:
    """Check a run's folder, or its directories on drives; yield lines about them, and raise on damage."""
    from infinity.shards.verified import verify

    folders = directories = [user_path(name, "RUN") for name in names]
    for folder in folders:
        if not folder.is_dir():
            raise RecipeError(
                f"{folder}: no such folder; wanted that of an interrupted run, or, of a loop of your own, "
                "the run's directory on each drive (memory.nvme/NAME)"
            )
    with contextlib.ExitStack() as stack:
        if len(folders) == 1 and (folders[0] / RECIPE).is_file():
            [folder], recipe = folders, interrupted_run(folders[0])
            why, directories = "it is finished", []
            if is_interrupted(folder):
                why, directories = _why_nothing(recipe), drive_directories(recipe, recipe.run.name or "")
            if not directories:
                raise RecipeError(f"{folder} keeps nothing on drives that could be checked: {why}")
            stack.enter_context(locked(folder))
        _require_unused(directories)
        checks, damage = verify(directories)
        yield from damage
        unknown = 0
        for check in checks:
            yield from check.damage
            damage += check.damage
            unknown += check.nbytes - check.checked_nbytes
            sums = f"{format_nbytes(check.checked_nbytes)} of {format_nbytes(check.nbytes)}"
            result = f"{len(check.damage)} damaged places" if check.damage else "no damage"
            where = f"rank {check.rank}, step {check.step}"
            yield f"{where}: records, and {sums} in {check.files} files: {result}"
        if unknown:
            yield (
                f"{format_nbytes(unknown)} could not be checked, because no sums were kept: run with "
                "memory.verify=true for that"
            )
    if damage:
        raise CheckpointError(
            f"{_listed(folders)}: {len(damage)} damaged places. Go on from a copy of the files or from a "
            f"saved model; {BEGIN_ANEW}"
        )


@dataclass(frozen=True, slots=True)
class ListedRun:
    """Row of the table of ``infinity runs``."""

    folder: Path
    state: str
    step: int  # the committed one of an interrupted run; of others, the last in the metrics
    steps: int | None  # of its recipe; None: this version cannot read it
    directories: Sequence[Path]  # on drives of this machine
    changed_s: float  # when its folder was written last (seconds since the epoch)

    @property
    def progress(self) -> str:
        return f"{self.step}" if self.steps is None else f"{self.step}/{self.steps}"


def list_runs(parent: Path) -> list[ListedRun]:
    """Return the runs in a directory, latest first."""
    try:
        folders = [path for path in parent.iterdir() if (path / RECIPE).is_file()]
    except OSError as error:
        raise RecipeError(f"{parent}: {error.strerror}; wanted a directory of runs (run.dir)") from error
    return sorted(map(_looked_at, folders), key=lambda run: -run.changed_s)


def _looked_at(folder: Path) -> ListedRun:
    state, directories, steps, step = state_of(folder), list[Path](), None, None
    with contextlib.suppress(RecipeError):  # another version's
        recipe = load_recipe(folder / RECIPE)
        steps = recipe.steps
        if state != "finished":  # what is there then is another run's
            directories = drive_directories(recipe, folder.name)
        step = committed_step(recipe, folder.name) if state == "interrupted" else None
    changed_s = 0.0
    if step is None:
        with contextlib.suppress(OSError):  # no file, or one that cannot be read
            step = last_step(folder / METRICS)
    for path in (folder, *folder.glob("*.*")):
        with contextlib.suppress(OSError):  # removed just now, as a run's lock is when it ends
            changed_s = max(changed_s, path.lstat().st_mtime)
    return ListedRun(folder, state, step or 0, steps, directories, changed_s)


def runs_table(runs: Sequence[ListedRun]) -> Table:
    """Return a table with one row per run."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "state", "step", "on drives", "age"):
        table.add_column(name, justify="left" if name in ("run", "state") else "right", no_wrap=True)
    for run in runs:
        age_s = max(0.0, time.time() - run.changed_s)
        units = ("d", 86400), ("h", 3600), ("min", 60), ("s", 1)
        unit, unit_s = next((each for each in units if age_s >= each[1]), units[-1])
        size = size_of(run.directories) if run.directories else ""
        cells = run.folder.name, run.state, run.progress, size, f"{age_s / unit_s:.0f} {unit}"
        table.add_row(*map(Text, cells))
    return table


def remove_runs(parent: Path, names: Sequence[str], confirm: Callable[[str], bool]) -> bool:
    """Remove the runs ``names`` in ``parent``, with their files on this machine's drives.

    ``confirm`` gets a line that says what is removed. Nothing is removed if it returns False, or if one of
    the runs is running or another user's.
    """
    with contextlib.ExitStack() as stack:
        runs = []
        for name in dict.fromkeys(names):
            folder = parent / user_path(name, "NAME")
            if folder.name != name or not is_own(folder) or not (folder / RECIPE).is_file():
                raise RecipeError(f"{folder}: no run of this user; wanted a name that `infinity runs` lists")
            runs.append(_looked_at(folder))  # before its lock is held here
            _require_unused(runs[-1].directories, folder / LOCK)
            stack.enter_context(locked(folder))
        directories = [path for run in runs for path in run.directories]
        line = f"remove {', '.join(f'{run.folder} ({run.state}, step {run.progress})' for run in runs)}"
        if directories:
            line += f", with {size_of(directories)} in {_listed(directories)}"
        if not confirm(line):
            return False
        for run in runs:
            try:
                for path in run.directories:
                    for file in (*path.glob("rank*"), *path.glob("copy*")):  # what else is there stays
                        file.unlink()
                    if not path.samefile(run.folder):
                        path.rmdir()
                shutil.rmtree(run.folder)
            except OSError as error:
                what = f"{error.filename or run.folder}: {error.strerror}"
                raise InfinityError(f"{what}; remove it by hand") from error
    return True
