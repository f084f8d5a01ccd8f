"""Finds the last commit of an interrupted run: the newest step that every rank holds whole."""

import errno
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.comm.ranks import Ranks
from infinity.core.errors import LockedError, StateError
from infinity.core.files import is_locked
from infinity.nvme.volume import Space
from infinity.shards.commits import CommitRecord, CorruptRecordError, RankFiles, read_commit, read_layout
from infinity.shards.store import versions_of_plain

_RECORD = re.compile(r"rank(\d+)-(\d+)\.commit([01])")
_OF_RANK = re.compile(r"rank(\d+)-(\d+)[-.].*")


@dataclass(frozen=True, slots=True)
class SavedRank:
    """What one rank of an interrupted run has on disk.

    Attributes:
        files: Names of its files.
        folder: Of its record.
        place: Of its record, 0 or 1.
        layout: Where versions lie; see :func:`describe`.
        data: Its data files, by number of the drive.
    """

    files: RankFiles
    folder: Path
    place: int
    record: CommitRecord
    layout: Mapping[str, Any]
    data: tuple[Path, ...]

    def spaces(self) -> list[Space]:
        """What the extents of its units take of each data file."""
        taken: list[list[tuple[int, int]]] = [[] for _ in self.data]
        for unit in self.layout["units"]:
            for version in versions_of_plain(unit["versions"] or []):
                for piece in (piece for chunk in version.chunks for piece in chunk.pieces):
                    taken[piece.file].append((piece.offset, piece.nbytes))
        return [Space.of(ranges) for ranges in taken]


@dataclass(frozen=True, slots=True)
class SavedRun:
    """The last commit of an interrupted run.

    Attributes:
        step: Steps that were committed.
        world_size: Ranks that the run had.
        own: What this rank has, if there are as many ranks now: it goes on in its own files.
        load: Returns what an old rank has.
    """

    step: int
    generation: int
    world_size: int
    own: SavedRank | None
    load: Callable[[int], SavedRank]

    def state(self, rank: int) -> bytes:
        """The small state for ``rank``: its own, or that of an old rank in its place."""
        return (self.own or self.load(rank % self.world_size)).record.state


def find_saved(folders: Sequence[Path], ranks: Ranks, note: Callable[[str], object]) -> SavedRun | None:
    """Return the newest commit in a run's directories that all ranks hold whole; None: there is none.

    Every rank must call, with its directories locked.

    Args:
        note: Called with a line about each record that is damaged.

    Raises:
        LockedError: A process of the old run still lives.
        StateError: Files of the run are missing.
    """
    newest = max((generation for _, generation, _ in _records(folders)), default=0)
    for generation in range(_most(newest, ranks), 0, -1):
        found = _in_generation(folders, ranks, generation, note)
        if found is not None:
            return found
    _require_none(folders)
    return None


def committed_step(folders: Sequence[Path]) -> int | None:
    """Return the last step that all ranks with files in a run's directories here have committed; None: none.

    Any process may ask; nothing is changed. A run that goes on looks with :func:`find_saved`.
    """
    steps: dict[int, dict[int, int]] = {}  # by generation and rank
    complete: dict[int, bool] = {}
    for rank, generation, path in _records(folders):
        try:
            record = read_commit(path)
        except CorruptRecordError:
            continue
        if record is not None:
            of_ranks = steps.setdefault(generation, {})
            of_ranks[rank] = max(record.step, of_ranks.get(rank, 0))
            complete[generation] = len(of_ranks) >= record.world_size
    # a rank that went on with another number of ranks may be ahead of the others
    newest = max(steps, key=lambda generation: (complete[generation], generation), default=None)
    return None if newest is None else min(steps[newest].values())


def _require_none(folders: Sequence[Path]) -> None:
    """Raise if a run has commits, none of which is whole.

    After its first step some ranks may have a record already and others none: then there is nothing to lose.
    """
    where = ", ".join(map(str, folders))
    anew = "run.resume=never begins anew"
    if any(path for folder in folders for path in folder.glob("rank*.invalid")):
        raise StateError(
            f"the run in {where} was ended while its weights were written in place (infinity.gathered with "
            f"modify=True, or a state was loaded), so none of its steps is whole: {anew}"
        )
    for _, _, path in _records(folders):
        try:
            record = read_commit(path)
        except CorruptRecordError as error:
            raise StateError(f"{error}; no commit of the run in {where} is whole: {anew}") from error
        if record is not None and record.step > 1:
            raise StateError(
                f"the run in {where} has no commit that is whole on all ranks ({path.name} is of step "
                f"{record.step}): give every directory and every rank that it had; {anew}"
            )


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


def _records(folders: Iterable[Path]) -> Iterator[tuple[int, int, Path]]:
    """Rank, generation and path of every commit record."""
    for folder in folders:
        for path in sorted(folder.glob("rank*.commit?")):
            if match := _RECORD.fullmatch(path.name):
                yield int(match[1]), int(match[2]), path


def _in_generation(
    folders: Sequence[Path], ranks: Ranks, generation: int, note: Callable[[str], object]
) -> SavedRun | None:
    found: dict[int, dict[int, tuple[CommitRecord, Path]]] = {}  # by rank and step
    for rank, _, path in (each for each in _records(folders) if each[1] == generation):
        try:
            record = read_commit(path)
        except CorruptRecordError as error:
            note(f"{error}; the commit before it is looked for")
            continue
        if record is not None:
            found.setdefault(rank, {})[record.step] = record, path
    sizes = (record.world_size for each in found.values() for record, _ in each.values())
    world_size = _most(max(sizes, default=0), ranks)
    as_before = world_size == ranks.world_size
    needed = [found.get(rank, {}) for rank in ([ranks.rank] if as_before else range(world_size))]
    newest = min((max(steps, default=-1) for steps in needed), default=-1)
    step = ranks.least(newest, "the last commit")
    holds = step >= 0 and all(step in steps for steps in needed)
    if not ranks.least(holds, "the last commit"):
        return None
    for lock in (folder / f"rank{r}.lock" for r in range(ranks.world_size, world_size) for folder in folders):
        if lock.exists() and is_locked(lock):
            raise LockedError(errno.EWOULDBLOCK, "a rank of the interrupted run lives: end it", str(lock))

    def load(rank: int) -> SavedRank:
        if step not in found.get(rank, {}):
            raise StateError(
                f"the record of step {step} of rank {rank} of the interrupted run is not in "
                f"{', '.join(map(str, folders))}: every rank must see the files of all, to go on with others"
            )
        return _saved(folders, RankFiles(rank, generation), *found[rank][step])

    return SavedRun(step, generation, world_size, load(ranks.rank) if as_before else None, load)


def _saved(folders: Sequence[Path], files: RankFiles, record: CommitRecord, path: Path) -> SavedRank:
    layout = read_layout(path.with_name(files.layout(record.layout[0])), record.layout[1])
    data = []
    for drive in range(layout["drives"]):
        paths = [folder / files.data(drive) for folder in folders if (folder / files.data(drive)).exists()]
        if len(paths) != 1:
            where = ", ".join(str(folder) for folder in folders)
            what = "is missing from" if not paths else "is there more than once in"
            raise StateError(
                f"{files.data(drive)} of the interrupted run {what} {where}: name its directories in "
                "memory.nvme; run.resume=never begins anew"
            )
        data.append(paths[0])
    return SavedRank(files, path.parent, int(path.name[-1]), record, layout, tuple(data))
