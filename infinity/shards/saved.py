"""Finds the last commit of an interrupted run: the newest step that every rank holds whole."""

import contextlib
import errno
import math
import re
import secrets
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.comm.ranks import Ranks
from infinity.core.config import MemoryConfig
from infinity.core.errors import BEGIN_ANEW, ChangedFileError, LockedError, StateError, first_line
from infinity.core.files import is_locked
from infinity.core.nbytes import BLOCK_NBYTES, Piece
from infinity.device.machine import DTYPES
from infinity.nvme.run_directory import RunDirectory, finished_path
from infinity.nvme.volume import Space
from infinity.optim.layout import StateLayout
from infinity.optim.rules import ADAMW, RULES
from infinity.shards.journal import (
    MOST_PLACES,
    CommitRecord,
    Contents,
    CorruptJournalError,
    Journal,
    RankFiles,
    Resume,
    read_journal,
    whole_numbers,
)

_JOURNAL = re.compile(r"rank(\d+)-(\d+)\.commits")
_DATA = re.compile(r"rank(\d+)-(\d+)-\d+\.bin")
_OF_RANK = re.compile(r"rank(\d+)-(\d+)[-.].*")


@dataclass(frozen=True, slots=True)
class SavedRank:
    """The files of one rank of an interrupted run.

    Attributes:
        files: Names of its files.
        journal: Path of its journal.
        layout: The layout of versions; see :func:`describe`.
        data: The data files, by number of the drive.
    """

    files: RankFiles
    journal: Path
    record: CommitRecord
    layout: Mapping[str, Any]
    data: tuple[Path, ...]

    def committed(self) -> Iterator[tuple[str, Piece]]:
        """Each piece of the committed versions, with a parameter of its unit; files are numbered by drive."""
        for unit, which in zip(self.layout["units"], self.record.versions, strict=True):
            versions = unit["versions"] or [[]]
            for chunk in versions[which % len(versions)]:
                for piece in (piece for extent in chunk[2:] for piece in extent):
                    yield unit["segments"][0][0] if unit["segments"] else "padding", Piece(*piece)

    def spaces(self) -> list[Space]:
        """The space that the extents of its units take in each data file."""
        return spaces_of(self.layout)


@dataclass(frozen=True, slots=True)
class SavedRun:
    """The last commit of an interrupted run.

    Attributes:
        step: Steps that were committed.
        run: The number of the run; see :class:`RankFiles`.
        world_size: Ranks that the run had.
        own: The saved state of this rank, if there are as many ranks now: it goes on in its own files.
        ranks: The saved states of old ranks; all of them, if there are others now.
    """

    step: int
    generation: int
    run: int
    world_size: int
    own: SavedRank | None
    ranks: Mapping[int, SavedRank]

    def state(self, rank: int) -> bytes:
        """The small state for ``rank``: its own, or that of an old rank in its place."""
        return (self.own or self.ranks[rank % self.world_size]).record.state


def find_saved(folders: Sequence[Path], ranks: Ranks, note: Callable[[str], object]) -> SavedRun | None:
    """Return the newest commit in a run's directories that all ranks hold whole; None: there is none.

    Every rank must call, with its directories locked.

    Args:
        note: Called with a line about each record that is damaged, though there is another.

    Raises:
        LockedError: A process of the old run still lives.
        StateError: Files of the run are missing, or no commit is whole.
        ChangedFileError: A file of the run was cut.
    """
    journals = list(_journals(folders))
    begun = [each for each in journals if each.has_commits]
    over = all(finished_path(each.path.parent, each.rank).exists() for each in begun)
    lost = _without_journal(folders, journals)
    heads = [each.contents.head for each in journals if each.contents is not None]
    in_place = any(head is not None and head.in_place for head in heads)
    if ranks.least(over and not lost and not in_place, "whether the run is over"):
        return None
    newest = max((each.generation for each in begun), default=0)
    problems = [each.problem for each in journals if each.problem]
    for generation in range(_most(newest, ranks), 0, -1):
        found = _in_generation(folders, ranks, [e for e in begun if e.generation == generation], problems)
        if found is not None:
            for problem in problems:
                note(f"{problem}. The run goes on from its commit of step {found.step}, which is whole")
            return found
    where = ", ".join(map(str, folders))
    if in_place:
        raise StateError(
            f"the run in {where} was ended while its weights were written in place (infinity.gathered with "
            f"modify=True, or a state was loaded), so none of its steps is whole: {BEGIN_ANEW}"
        )
    if problems:
        raise StateError(
            f"{'; '.join(problems)}. No other commit of the run in {where} is whole: {BEGIN_ANEW}"
        )
    if lost is not None:
        raise StateError(
            f"{lost} is of a run that has commits, but its journal is not in {where}: name every directory "
            f"that it had in memory.nvme; {BEGIN_ANEW}"
        )
    _require_none(folders, ranks, begun)
    return None


@dataclass(frozen=True, slots=True)
class _Found:
    """A journal in a directory.

    Attributes:
        contents: The contents of the journal; None: it cannot be read.
        problem: Why not, or empty.
    """

    rank: int
    generation: int
    path: Path
    contents: Contents | None
    problem: str = ""

    @property
    def has_commits(self) -> bool:
        return self.contents is None or bool(self.contents.commits or self.contents.problems)


def _journals(folders: Iterable[Path]) -> Iterator[_Found]:
    """Yield every journal, those of a process that ended while it made the first files left out."""
    for path in (path for folder in folders for path in sorted(folder.glob("rank*.commits"))):
        if match := _JOURNAL.fullmatch(path.name):
            rank, generation = int(match[1]), int(match[2])
            try:
                contents = read_journal(path)
            except CorruptJournalError as error:
                if any(path.parent.glob(f"rank{rank}-{generation}-*.bin")):
                    yield _Found(rank, generation, path, None, str(error))
                continue
            owner = RankFiles(rank, generation) if contents.head is None else contents.head.owner
            if (owner.rank, owner.generation) != (rank, generation):
                problem = f"{path}: put in the place of another rank's, or generation's, journal"
                yield _Found(rank, generation, path, None, problem)
            else:
                yield _Found(rank, generation, path, contents)


def committed_step(folders: Sequence[Path]) -> int | None:
    """Return the last step that all ranks with files in a run's directories here have committed; None: none.

    Any process may ask; nothing is changed. A run that goes on looks with :func:`find_saved`.
    """
    steps: dict[int, dict[int, int]] = {}  # by generation and rank
    complete: dict[int, bool] = {}
    for each in _journals(folders):
        if each.contents is not None and each.contents.commits:
            record, _ = each.contents.commits[max(each.contents.commits)]
            of_ranks = steps.setdefault(each.generation, {})
            of_ranks[each.rank] = record.step
            complete[each.generation] = len(of_ranks) >= record.world_size
    # a rank that went on with another number of ranks may be ahead of the others
    newest = max(steps, key=lambda generation: (complete[generation], generation), default=None)
    return None if newest is None else min(steps[newest].values())


def _require_none(folders: Sequence[Path], ranks: Ranks, begun: Iterable[_Found]) -> None:
    """Raise if a run has commits, none of which is whole on all ranks.

    Some ranks may have its first commit already and others, whose data files are there, none: then there is
    nothing to lose.
    """
    records = [r for e in begun if e.contents is not None for r, _ in e.contents.commits.values()]
    number, step, old_ranks = (
        _most(max((getattr(record, name) for record in records), default=0), ranks)
        for name in ("number", "step", "world_size")
    )
    needed = [ranks.rank] if old_ranks == ranks.world_size else range(old_ranks)
    has_data = all([*folder.glob(f"rank{rank}-*.bin")] for rank in needed for folder in folders)
    if number > 1 or (step > 1 and not ranks.least(has_data, "the interrupted run's files")):
        where = ", ".join(map(str, folders))
        raise StateError(
            f"the run in {where} has no commit that is whole on all ranks (the newest is of step {step}): "
            f"give every directory and every rank that it had; {BEGIN_ANEW}"
        )


def _without_journal(folders: Sequence[Path], journals: Iterable[_Found]) -> Path | None:
    """Return a data file of an interrupted run whose journal is in none of these directories."""
    known = {(each.rank, each.generation) for each in journals}
    for path in (path for folder in folders for path in sorted(folder.glob("rank*.bin"))):
        match = _DATA.fullmatch(path.name)
        if match is None or (int(match[1]), int(match[2])) in known:
            continue
        if not finished_path(path.parent, int(match[1])).exists():
            return path
    return None


def clear(folders: Iterable[Path], ranks: Ranks, keep: Container[int] = ()) -> None:
    """Remove files of all generations but these, those of other ranks than today's among them.

    Every rank must call, after all have looked for commits.
    """
    for folder in folders:
        for path in folder.glob("rank*"):
            match = _OF_RANK.fullmatch(path.name)
            if match is None or int(match[1]) % ranks.world_size != ranks.rank or int(match[2]) in keep:
                continue
            path.unlink(missing_ok=True)
            if int(match[1]) >= ranks.world_size:
                (folder / f"rank{match[1]}.lock").unlink(missing_ok=True)


def _most(value: int, ranks: Ranks) -> int:
    return -ranks.least(-value, "the interrupted run's files")


def _in_generation(
    folders: Sequence[Path], ranks: Ranks, journals: Sequence[_Found], problems: list[str]
) -> SavedRun | None:
    found: dict[int, dict[int, SavedRank]] = {}  # by rank and step
    for each in journals:
        if each.contents is None:
            continue
        problems += each.contents.problems
        for step, (record, layout) in each.contents.commits.items():
            try:
                saved = _saved(folders, each.contents, record, layout)
            except CorruptJournalError as error:
                problems.append(str(error))
                continue
            found.setdefault(each.rank, {})[step] = saved
    sizes = (saved.record.world_size for each in found.values() for saved in each.values())
    world_size = _most(max(sizes, default=0), ranks)
    as_before = world_size == ranks.world_size
    needed = [found.get(rank, {}) for rank in ([ranks.rank] if as_before else range(world_size))]
    newest = min((max(steps, default=-1) for steps in needed), default=-1)
    step = ranks.least(newest, "the last commit")
    holds = step >= 0 and all(step in steps for steps in needed)
    if not ranks.least(holds, "the last commit"):
        return None
    runs = [steps[step].files.run for steps in needed]
    run = ranks.least(min(runs), "the interrupted run's number")
    if not ranks.least({*runs} == {run}, "the interrupted run's number"):
        raise StateError(
            f"the ranks' files in {', '.join(map(str, folders))} belong to different runs of this name: give "
            f"each rank the directories that it had; {BEGIN_ANEW}"
        )
    for lock in (folder / f"rank{r}.lock" for r in range(ranks.world_size, world_size) for folder in folders):
        if lock.exists() and is_locked(lock):
            raise LockedError(errno.EWOULDBLOCK, "a rank of the interrupted run lives: end it", str(lock))
    ours = {rank: steps[step] for rank, steps in found.items() if step in steps}
    generation = ours[ranks.rank if as_before else 0].files.generation
    return SavedRun(step, generation, run, world_size, ours[ranks.rank] if as_before else None, ours)


def _saved(
    folders: Sequence[Path], contents: Contents, record: CommitRecord, layout: Mapping[str, Any]
) -> SavedRank:
    """Return a commit and all that belongs to it, checked.

    Raises:
        CorruptJournalError: The layout contradicts itself or the commit.
        StateError: A data file is missing.
        ChangedFileError: A data file was cut.
    """
    assert contents.head is not None  # it comes before the first commit
    files = contents.head.owner
    try:
        spaces = check_layout(layout, record)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise CorruptJournalError(
            f"{contents.path}: step {record.step} contradicts itself ({first_line(error)})"
        ) from error
    data = []
    for drive, space in enumerate(spaces):
        paths = [folder / files.data(drive) for folder in folders if (folder / files.data(drive)).exists()]
        if len(paths) != 1:
            where = ", ".join(str(folder) for folder in folders)
            what = "is missing from" if not paths else "is there more than once in"
            raise StateError(
                f"{files.data(drive)} of the interrupted run {what} {where}: name its directories in "
                f"memory.nvme; {BEGIN_ANEW}"
            )
        if paths[0].stat().st_size < space.end:
            raise ChangedFileError(
                paths[0], f"was cut to {paths[0].stat().st_size} bytes of at least {space.end}"
            )
        data.append(paths[0])
    return SavedRank(files, contents.path, record, layout, tuple(data))


def check_layout(layout: Mapping[str, Any], record: CommitRecord) -> list[Space]:
    """Return what extents take of each drive; they must be as large as what they hold, and apart.

    Raises:
        ValueError: They are not, or contradict the record; another error if something is missing.
    """
    dtypes = {str(dtype): dtype for dtype in DTYPES.values()}
    sizes = RULES[layout.get("rule", ADAMW.name)].layout(dtypes[layout["dtype"]])
    [drives] = whole_numbers([layout["drives"]], most=2**12)
    units, base = layout["units"], layout.get("base", {})
    if type(base) is not dict:
        raise ValueError("no files of a base")
    if not drives or not len(units) == len(record.versions) == len(record.counts):
        raise ValueError(f"{len(units)} units on {drives} drives")
    for unit, counts in zip(units, record.counts, strict=True):
        [numel] = whole_numbers([unit["numel"]])
        if numel % record.world_size or len(unit["segments"]) != len(counts):
            raise ValueError(f"a unit of {numel} elements and {len(unit['segments'])} parameters")
        for name, offset, shape in unit["segments"]:
            whole_numbers([offset])
            if type(name) is not str or offset + math.prod(whole_numbers(shape)) > numel:
                raise ValueError(f"parameter {name} outside its unit")
        if unit["versions"] is not None:
            _check_versions(unit["versions"], numel // record.world_size, sizes)
    return spaces_of(layout)


def _check_versions(versions: Any, shard_numel: int, sizes: StateLayout) -> None:
    """Raise unless each version has the bytes of a shard, chunk after chunk."""
    if not 1 <= len(versions) <= MOST_PLACES:
        raise ValueError(f"{len(versions)} versions")
    for version in versions:
        at = 0
        for start, numel, *extents in version:
            whole_numbers([start, numel])
            allowed = (
                (sizes.weight_nbytes(numel),),
                (0, sizes.only(exact=True).state_nbytes(numel)),
                (0, sizes.only(moments=True).state_nbytes(numel)),
            )
            found = [sum(whole_numbers([piece[2] for piece in extent])) for extent in extents]
            if start != at or not numel or any(n not in most for n, most in zip(found, allowed, strict=True)):
                raise ValueError(f"extents of {found} bytes for elements {start} to {start + numel}")
            at += numel
        if at != shard_numel:
            raise ValueError(f"{at} of {shard_numel} elements")


def spaces_of(layout: Mapping[str, Any]) -> list[Space]:
    """The space that extents take in each data file.

    Raises:
        ValueError: Two overlap, or one is not whole blocks.
    """
    taken: list[list[tuple[int, int]]] = [[] for _ in range(layout["drives"])]
    for unit in layout["units"]:
        for version in unit["versions"] or []:
            for extent in (extent for chunk in version for extent in chunk[2:]):
                for piece in extent:
                    file, offset, nbytes = whole_numbers(piece)
                    if offset % BLOCK_NBYTES or nbytes % BLOCK_NBYTES or not nbytes or file >= len(taken):
                        raise ValueError(f"an extent of {nbytes} bytes at {offset} of drive {file}")
                    taken[file].append((offset, nbytes))
    return [Space.of(ranges) for ranges in taken]


class RunFiles:
    """Finds the last commit of an interrupted run, or begins a run, in each directory of ``memory.nvme``.

    Args:
        resume: Whether an interrupted run of this id goes on; None: the id is new, and no process will look
            for it again.
        stack: Gives the directories back, last of all that it closes.
        synced: Commits survive a power cut.
        note: Gets a line for people about each thing that the machine lacks.

    Attributes:
        saved: The last commit of an interrupted run, with which this one goes on.
        journal: The journal of this rank's commits; None: no process will look for them.
        paths: Paths of the data files, one on each drive.
        keep: Leave the files on disk at the end, if a process can go on with the run.

    Raises:
        DiskError: A directory cannot be written.
        StateError: The run cannot go on; says why.
    """

    def __init__(
        self, memory: MemoryConfig, run_id: str, ranks: Ranks, resume: Resume | None,
        stack: contextlib.ExitStack, *, synced: bool, note: Callable[[str], object],
    ) -> None:  # fmt: skip
        self._looked = False  # for a commit: from then on files without one may go
        self._unused = ""  # what files of this run begin with that are of no use before it has a commit
        self.saved: SavedRun | None = None
        self.journal: Journal | None = None
        self.keep = False
        directories = []
        for root in memory.nvme:
            directories.append(RunDirectory(Path(root), run_id, ranks.rank))
            stack.callback(self._end_directory, directories[-1], ranks.world_size)
        stack.callback(self._finish, directories)
        folders = [directory.path for directory in directories]
        files = RankFiles(ranks.rank)
        if resume is not None:
            self.saved, files = self._look_for_commit(folders, ranks, resume, note, versions=memory.versions)
            for folder in folders:
                finished_path(folder, ranks.rank).unlink(missing_ok=True)  # of a run before
        self._looked, self.keep = True, self.saved is not None
        own = None if self.saved is None else self.saved.own
        # It comes before the data files: those without a journal are of a run that has it elsewhere.
        if resume is not None:
            self.journal = Journal(folders[0] if own is None else own.journal.parent, files, synced=synced)
            stack.callback(self.journal.close)
        named = [directory.file(files.data(drive)) for drive, directory in enumerate(directories)]
        self.paths: Sequence[Path] = named if own is None else own.data
        if own is None and self.saved is not None:
            self._unused = f"rank{ranks.rank}-{files.generation}"

    def _look_for_commit(
        self, folders: list[Path], ranks: Ranks, resume: Resume, note: Callable[[str], object], *,
        versions: int,
    ) -> tuple[SavedRun | None, RankFiles]:  # fmt: skip
        """Return the last commit, and the names of this rank's files; remove what belongs to no commit."""
        where = ", ".join(map(str, folders))
        saved = None if resume == "never" else find_saved(folders, ranks, note)
        if saved is None:
            self._looked = True
            if resume == "must":
                raise StateError(
                    f"run.resume=must, but there is no commit in {where}; run.resume=auto begins a new run "
                    "there"
                )
            clear(folders, ranks)
            return None, RankFiles(ranks.rank, run=ranks.least(secrets.randbits(48), "the run's number"))
        if versions == 1:
            raise StateError(
                f"an interrupted run is in {where}, which memory.versions=1 would write over: set "
                f"memory.versions=2 to go on; {BEGIN_ANEW}"
            )
        clear(folders, ranks, keep=(saved.generation,))
        return saved, RankFiles(ranks.rank, saved.generation + (saved.own is None), saved.run)

    @property
    def _has_commit(self) -> bool:
        return self.journal is not None and self.journal.any

    def _finish(self, directories: list[RunDirectory]) -> None:
        """Say in every directory that the run is over, before the first file goes."""
        if self._looked and (self.saved is not None or self._has_commit) and not self.keep:
            for directory in directories:
                directory.finish()

    def _end_directory(self, directory: RunDirectory, world_size: int) -> None:
        committed = self.saved is not None or self._has_commit
        if not self._looked and directory.is_empty():
            directory.remove()  # this process made it
        elif not self._looked or (self.keep and committed):
            if self._unused and not self._has_commit:
                for path in directory.path.glob(f"{self._unused}[-.]*"):
                    path.unlink(missing_ok=True)
            directory.leave()
        elif committed:
            directory.remove_finished(world_size)
        else:
            directory.remove()
