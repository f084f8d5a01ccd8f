"""Finds the last commit of an interrupted run: the newest step that every rank holds whole.

[Note: brought back]
Before the last commit is looked for, the ranks tell each other which files their nodes have. What a node
needs and lacks is sent by one that has it, be it the rank's own or its copy, and gets the own files' names,
the journal's last: a kill meanwhile costs nothing.
"""

import contextlib
import errno
import mmap
import os
import secrets
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from infinity.comm.ranks import Ranks, peer_errors
from infinity.core.config import MemoryConfig, SettingError
from infinity.core.errors import (
    BEGIN_ANEW,
    ChangedFileError,
    DiskError,
    LockedError,
    StateError,
)
from infinity.core.files import create_file, is_locked, open_found, sync
from infinity.core.nbytes import Piece
from infinity.nvme.run_directory import RunDirectory, finished_path
from infinity.nvme.volume import Space, disk_errors, open_direct, read_piece
from infinity.optim.rules import find_rule
from infinity.shards.journal import (
    CommitRecord,
    Contents,
    CorruptJournalError,
    Head,
    Journal,
    RankFiles,
    Resume,
    read_journal,
)

#: Bytes of a version that are read, sent and written at one time.
PART_NBYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class SavedRank:
    """Holds the files of one rank of an interrupted run."""

    files: RankFiles
    journal: Path
    record: CommitRecord
    data: Sequence[Path]  # by number of the drive
    spaces: Sequence[Space]  # what the extents of its units take in each of them

    def committed(self) -> Iterator[tuple[str, Piece]]:
        """Yield each piece of the committed versions, with the name of a parameter of its unit."""
        for unit in self.record.units:
            for piece in unit.committed.pieces:
                yield unit.segments[0][0] if unit.segments else "padding", piece

    def paths(self, world_size: int) -> Iterator[Path]:
        """Yield each file of the rank's generation, and its locks if it is none of ``world_size`` ranks."""
        for folder in {self.journal.parent, *(path.parent for path in self.data)}:
            yield from folder.glob(f"{self.files.stem}[-.]*")
            yield from folder.glob(f"{replace(self.files, kind='copy').stem}[-.]*")
            if self.files.rank >= world_size:
                yield folder / f"rank{self.files.rank}.lock"


@dataclass(frozen=True, slots=True)
class SavedRun:
    """Holds the last commit of an interrupted run."""

    step: int
    generation: int
    run: int
    world_size: int
    own: SavedRank | None  # of this rank, if there are as many ranks now: it goes on in its own files
    ranks: Mapping[int, SavedRank]  # of old ranks; all of them, if there are others now

    def state(self, rank: int) -> bytes:
        """Return the small state for ``rank``: its own, or that of an old rank in its place."""
        return (self.own or self.ranks[rank % self.world_size]).record.state


def find_saved(folders: Sequence[Path], ranks: Ranks, note: Callable[[str], object]) -> SavedRun | None:
    """Return the newest commit in a run's directories that all ranks hold whole; None: there is none.

    Every rank must call, with its directories locked. ``note`` gets a line about each damaged record.

    Raises:
        LockedError: A process of the old run still lives.
        StateError: Files of the run are missing, or no commit is whole.
        ChangedFileError: A file of the run was cut.
    """
    journals = _journals(folders)
    begun = [(files, each) for files, each in journals if each.commits or each.problems]
    over = all(finished_path(each.path.parent, files.rank).exists() for files, each in begun)
    lost = _without_journal(folders, [files for files, _ in journals])
    in_place = any(each.head is not None and each.head.in_place for _, each in journals)
    if ranks.least(over and not lost and not in_place, "whether the run is over"):
        return None
    newest, problems = max((files.generation for files, _ in begun), default=0), list[str]()
    for generation in range(_most(newest, ranks), 0, -1):
        of_ranks = [each for files, each in begun if files.generation == generation]
        found = _in_generation(folders, ranks, of_ranks, problems)
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
    # Some ranks may have its first commit already and others, whose data files are there, none: then there is
    # nothing to lose.
    records = [record for _, each in begun for record in each.commits.values()]
    number, step, old_ranks = (
        _most(max((getattr(record, name) for record in records), default=0), ranks)
        for name in ("number", "step", "world_size")
    )
    needed = [ranks.rank] if old_ranks == ranks.world_size else range(old_ranks)
    has_data = all([*folder.glob(f"rank{rank}-*.bin")] for rank in needed for folder in folders)
    if number > 1 or (step > 1 and not ranks.least(has_data, "the interrupted run's files")):
        raise StateError(
            f"the run in {where} has no commit that is whole on all ranks (the newest is of step {step}): "
            f"give every directory and every rank that it had; {BEGIN_ANEW}"
        )
    return None


def files_in(folders: Iterable[Path], pattern: str) -> Iterator[tuple[Path, RankFiles]]:
    """Yield the files of ranks in these directories whose names match, without locks."""
    for path in (path for folder in folders for path in sorted(folder.glob(pattern))):
        if (files := RankFiles.of(path)) is not None:
            yield path, files


def _journals(folders: Iterable[Path]) -> list[tuple[RankFiles, Contents]]:
    """Return every journal, but those of a process that ended while it made the first files."""
    found = []
    for path, files in files_in(folders, "rank*.commits"):
        try:
            found.append((files, read_journal(path)))
        except CorruptJournalError as error:
            if any(path.parent.glob(f"{files.stem}-*.bin")):
                found.append((files, Contents(path, problems=[str(error)])))
    return found


def committed_step(folders: Sequence[Path]) -> int | None:
    """Return the last step that all ranks with files in these directories have committed; None: none."""
    newest: dict[int, dict[int, CommitRecord]] = {}  # by generation and rank
    for files, each in _journals(folders):
        if each.commits:
            newest.setdefault(files.generation, {})[files.rank] = each.commits[max(each.commits)]
    # A rank that went on with another number of ranks may be ahead of the others.
    whole = [g for g, records in newest.items() if len(records) >= records[min(records)].world_size]
    return min(each.step for each in newest[max(whole or newest)].values()) if newest else None


def _without_journal(folders: Sequence[Path], journals: Container[RankFiles]) -> Path | None:
    """Return a data file of an interrupted run whose journal is in none of these directories."""
    for path, files in files_in(folders, "rank*.bin"):
        if files not in journals and not finished_path(path.parent, files.rank).exists():
            return path
    return None


def clear(folders: Sequence[Path], ranks: Ranks, keep: int) -> None:
    """Remove the files of all generations but ``keep``, also of former ranks, once all ranks have looked."""
    for path, files in files_in(folders, "*"):
        own = files.kind == "copy" or files.rank % ranks.world_size == ranks.rank
        if own and files.generation != keep:
            path.unlink(missing_ok=True)
    for lock in (lock for folder in folders for lock in folder.glob("rank*.lock")):
        if not is_locked(lock):  # of a rank that is on another node now, or no more
            lock.unlink(missing_ok=True)


def _most(value: int, ranks: Ranks) -> int:
    return -ranks.least(-value, "the interrupted run's files")


def _in_generation(
    folders: Sequence[Path], ranks: Ranks, journals: Iterable[Contents], problems: list[str]
) -> SavedRun | None:
    found: dict[int, dict[int, SavedRank]] = {}  # by rank and step
    for each in journals:
        problems += each.problems
        for step, record in each.commits.items():
            try:
                saved = _saved(folders, each, record)
            except CorruptJournalError as error:
                problems.append(str(error))
                continue
            found.setdefault(saved.files.rank, {})[step] = saved
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


def _saved(folders: Sequence[Path], contents: Contents, record: CommitRecord) -> SavedRank:
    """Return a commit and all that belongs to it, checked; raises as :func:`find_saved`."""
    assert contents.head is not None  # it comes before the first commit
    files, spaces = contents.head.owner, _spaces(record)
    data = []
    for drive, space in enumerate(spaces):
        paths = [path for path in (folder / files.data(drive) for folder in folders) if path.exists()]
        if len(paths) != 1:
            where = ", ".join(map(str, folders))
            what = "is missing from" if not paths else "is there more than once in"
            raise StateError(
                f"{files.data(drive)} of the interrupted run {what} {where}: name its directories in "
                f"memory.nvme; {BEGIN_ANEW}"
            )
        size = paths[0].stat().st_size
        if size < space.end:
            raise ChangedFileError(paths[0], f"was cut to {size} bytes of at least {space.end}")
        data += paths
    return SavedRank(files, contents.path, record, data, spaces)


def _spaces(record: CommitRecord) -> list[Space]:
    """Return the space that the units take of each drive."""
    taken: list[list[tuple[int, int]]] = [[] for _ in range(record.drives)]
    for version in (version for unit in record.units for version in unit.versions):
        for piece in version.pieces:
            taken[piece.file].append((piece.offset, piece.nbytes))
    return [Space.of(ranges) for ranges in taken]


def _check_rule(name: str) -> None:
    try:
        find_rule(name)
    except SettingError as error:
        raise StateError(
            f"the interrupted run was updated by {name}, which is no rule here: import its module, or name "
            f"it as optim.name=module:Class; {BEGIN_ANEW}"
        ) from error


def pieces_of(record: CommitRecord) -> set[tuple[int, Piece]]:
    """Return the pieces of committed versions, each with its unit: a changed one lies where none was."""
    return {(index, piece) for index, unit in enumerate(record.units) for piece in unit.committed.pieces}


def write_piece(fd: int, path: Path, part: Piece, view: memoryview) -> None:
    """Write a part of a version in its place; DiskError: not all of it, as on a full drive."""
    where = {"offset": part.offset, "nbytes": part.nbytes}
    with disk_errors("write", path, **where):
        moved = os.pwrite(fd, view, part.offset)
    if moved < part.nbytes:
        raise DiskError(errno.ENOSPC, "write", path, **where, moved=moved)


def parts_of(piece: Piece) -> Iterator[Piece]:
    for at in range(0, piece.nbytes, PART_NBYTES):
        yield Piece(piece.file, piece.offset + at, min(PART_NBYTES, piece.nbytes - at))


class _Entry(NamedTuple):
    """A commit that a rank finds in its directories, of an old ``rank``; ``kind`` is that of its files."""

    generation: int
    world_size: int
    step: int
    rank: int
    kind: str
    journal: str
    number: int


class _Move(NamedTuple):
    """Files of an old rank that ``to`` lacks, and ``source`` has."""

    entry: _Entry
    source: int
    to: int


def bring_back(folders: Sequence[Path], ranks: Ranks, note: Callable[[str], object]) -> None:
    """Bring the files of old ranks to the nodes that need and lack them: [Note: brought back].

    All ranks call, with their directories locked. StateError: the files of a rank and their copy are lost.
    """
    mine = [*_entries(folders)]
    over = any(path for folder in folders for path in folder.glob("rank*.finished"))
    everyone, per_node = [(over, mine)], 1
    if ranks.collectives is not None:
        everyone = ranks.collectives.share_all((over, mine), "the interrupted run's files")
        per_node = ranks.collectives.nodes.per_node
    if any(each for each, _ in everyone):
        return  # it may be over; find_saved() knows
    moves = _moves([entries for _, entries in everyone], per_node)
    if not moves:
        return
    group = dist.new_group(backend="gloo") if ranks.world_size > 1 else None
    with peer_errors("bringing the interrupted run's files"):
        for move in moves:
            if ranks.rank == move.source and move.to // per_node == move.source // per_node:
                _link(Path(move.entry.journal), folders)
            elif ranks.rank == move.source:
                _give(Path(move.entry.journal), folders, group, move.to)
            elif ranks.rank == move.to:
                with disk_errors("bringing the interrupted run's files", folders[0]):
                    _take(folders, group, move.source)
        if ranks.world_size > 1:
            dist.barrier(group)
            dist.destroy_process_group(group)
    of = sorted({move.entry.rank for move in moves})
    note(f"the files of {len(of)} ranks of the interrupted run were brought from other nodes or copies")


def _entries(folders: Sequence[Path]) -> Iterator[_Entry]:
    for path, files in files_in(folders, "*.commits"):
        with contextlib.suppress(CorruptJournalError):
            for step, record in read_journal(path).commits.items():
                if len(_data(files, record.drives, folders)) == record.drives:
                    size, number = record.world_size, record.number
                    yield _Entry(files.generation, size, step, files.rank, files.kind, str(path), number)


def _data(files: RankFiles, drives: int, folders: Sequence[Path]) -> list[Path]:
    places = (folder / files.data(drive) for drive in range(drives) for folder in folders)
    return [path for path in places if path.exists()]


def _moves(everyone: Sequence[Sequence[_Entry]], per_node: int) -> list[_Move]:
    """Return what must be brought so that all ranks can go on after the newest commit that is whole."""
    held = [(rank, entry) for rank, entries in enumerate(everyone) for entry in entries]
    lost = list[int]()
    for generation in sorted({entry.generation for _, entry in held}, reverse=True):
        of = [(rank, entry) for rank, entry in held if entry.generation == generation]
        size = of[0][1].world_size
        steps = [{entry.step for _, entry in of if entry.rank == old} for old in range(size)]
        if not (common := set.intersection(*steps)):
            lost = lost or [old for old in range(size) if not steps[old]]
            continue
        # Where nothing is missing, the newest step that all ranks have in their own files is taken.
        ways = [_moves_for(step, of, size, len(everyone), per_node) for step in sorted(common, reverse=True)]
        return [] if [] in ways else ways[0]
    # A kill may leave the first commit in the copy of one rank alone: then there is nothing to lose.
    if lost and any(entry.kind == "copy" for _, entry in held) and max(e.number for _, e in held) > 1:
        raise StateError(
            f"of ranks {', '.join(map(str, lost))} of the interrupted run neither their own files nor their "
            f"copies are here (durability.copies): give the directories of its other nodes; {BEGIN_ANEW}"
        )
    return []


def _moves_for(
    step: int, held: Sequence[tuple[int, _Entry]], old_size: int, size: int, per_node: int
) -> list[_Move]:
    moves = list[_Move]()
    for old in range(old_size):
        there = [(rank, entry) for rank, entry in held if (entry.rank, entry.step) == (old, step)]
        for to in [old] if old_size == size else range(0, size, per_node):
            near = [(rank, entry) for rank, entry in there if rank // per_node == to // per_node]
            if not any(entry.kind == "rank" for _, entry in near):
                source, entry = min(near or there, key=lambda each: (each[1].kind != "rank", each[0]))
                moves.append(_Move(entry, source, to))
    return moves


def _renamed(path: Path) -> Path:
    """Return the place, in the same folder, of a rank's own file whose copy is ``path``."""
    return path.with_name(f"rank{path.name[len('copy') :]}")


def _link(journal: Path, folders: Sequence[Path]) -> None:
    """Give a copy that is on this node the names of the rank's own files, the journal's last."""
    files = RankFiles.of(journal)
    assert files is not None
    drives = max(record.drives for record in read_journal(journal).commits.values())
    for path in (*_data(files, drives, folders), Head.path(journal), journal):
        _renamed(path).unlink(missing_ok=True)
        os.link(path, _renamed(path))
    sync(journal.parent)


def _give(journal: Path, folders: Sequence[Path], group: Any, to: int) -> None:
    """Send a rank's journal, and the committed versions that it names."""
    files, records = RankFiles.of(journal), read_journal(journal).commits.values()
    assert files is not None
    data = _data(files, max(record.drives for record in records), folders)
    pieces = sorted(
        {each for record in records for _, each in pieces_of(record)}, key=lambda p: (p.file, p.offset)
    )
    name, sizes = replace(files, kind="rank").journal, [path.stat().st_size for path in data]
    texts = Head.path(journal).read_bytes(), journal.read_bytes()
    dist.send_object_list([name, sizes, pieces, *texts], to, group)
    memory = mmap.mmap(-1, PART_NBYTES)
    room = torch.frombuffer(memory, dtype=torch.uint8)
    for drive, path in enumerate(data):
        fd, _ = open_direct(path, open_found, "opening")
        for part in (part for piece in pieces if piece.file == drive for part in parts_of(piece)):
            read_piece(fd, path, part, memoryview(memory)[: part.nbytes])
            dist.send(room[: part.nbytes], to, group)
        os.close(fd)


def _take(folders: Sequence[Path], group: Any, source: int) -> None:
    """Write what :func:`_give` sends, the journal last: until it is there, nothing is."""
    received: list[Any] = [None] * 5
    dist.recv_object_list(received, source, group)
    name, sizes, pieces, head, content = received
    journal = folders[0] / name
    files = RankFiles.of(journal)
    assert files is not None
    memory = mmap.mmap(-1, PART_NBYTES)
    room = torch.frombuffer(memory, dtype=torch.uint8)
    for drive, nbytes in enumerate(sizes):
        path = folders[drive % len(folders)] / files.data(drive)
        fd, _ = open_direct(path, create_file, "making")
        os.ftruncate(fd, nbytes)
        for part in (part for each in pieces if each.file == drive for part in parts_of(each)):
            dist.recv(room[: part.nbytes], source, group)
            write_piece(fd, path, part, memoryview(memory)[: part.nbytes])
        os.fsync(fd)
        os.close(fd)
    for path, text in ((Head.path(journal), head), (journal, content)):
        with open(create_file(path), "wb") as file:
            file.write(text)
        sync(path)
    sync(journal.parent)


class RunFiles:
    """Finds the last commit of an interrupted run, or begins a run, in each directory of ``memory.nvme``.

    Args:
        resume: Whether an interrupted run of this id goes on; None: the id is new, and no process will look
            for it again.
        stack: Gives the directories back, last of all that it closes.
        synced: Commits survive a power cut.
        note: Called with a line for people about each thing that the machine lacks.
    """

    def __init__(
        self, memory: MemoryConfig, run_id: str, ranks: Ranks, resume: Resume | None,
        stack: contextlib.ExitStack, *, synced: bool, note: Callable[[str], object],
    ) -> None:  # fmt: skip
        self._looked = False  # for a commit: from then on files without one may go
        self.saved: SavedRun | None = None  # with which this run goes on
        self.journal: Journal | None = None  # of this rank; None: no process will look for its commits
        self.keep = False  # leave the files on disk at the end, if a process can go on with the run
        self.owner, directories = RankFiles(ranks.rank), list[RunDirectory]()
        for root in memory.nvme:
            directories.append(RunDirectory(Path(root), run_id, ranks.rank))
            stack.callback(self._end_directory, directories[-1], ranks.world_size)
        stack.callback(self._finish, directories)
        folders = [directory.path for directory in directories]
        where = ", ".join(map(str, folders))
        if resume is not None:
            if resume != "never":
                bring_back(folders, ranks, note)
            self.saved = saved = None if resume == "never" else find_saved(folders, ranks, note)
            self._looked = saved is None
            if saved is None and resume == "must":
                raise StateError(
                    f"run.resume=must, but there is no commit in {where}; run.resume=auto begins a new run "
                    "there"
                )
            if saved is not None and memory.versions == 1:
                raise StateError(
                    f"an interrupted run is in {where}, which memory.versions=1 would write over: set "
                    f"memory.versions=2 to go on; {BEGIN_ANEW}"
                )
            if saved is not None:
                _check_rule((saved.own or saved.ranks[0]).record.rule)
            clear(folders, ranks, keep=0 if saved is None else saved.generation)
            if saved is None:
                self.owner = RankFiles(ranks.rank, run=ranks.least(secrets.randbits(48), "the run's number"))
            else:
                self.owner = RankFiles(ranks.rank, saved.generation + (saved.own is None), saved.run)
            for folder in folders:
                finished_path(folder, ranks.rank).unlink(missing_ok=True)  # of a run before
        self._looked, self.keep = True, self.saved is not None
        self.own = own = None if self.saved is None else self.saved.own  # the rank's files, which go on
        # It comes before the data files: those without a journal are of a run that has it elsewhere.
        if resume is not None:
            folder = folders[0] if own is None else own.journal.parent
            self.journal = Journal(folder, self.owner, synced=synced)
            stack.callback(self.journal.close)
        named = [directory.file(self.owner.data(drive)) for drive, directory in enumerate(directories)]
        self.paths: Sequence[Path] = named if own is None else own.data  # one on each drive
        self.folders = [path.parent for path in self.paths]

    def _finish(self, directories: list[RunDirectory]) -> None:
        """Mark the run as over in every directory, before the first file goes."""
        if self._looked and self._can_go_on and not self.keep:
            for directory in directories:
                directory.finish()

    @property
    def _can_go_on(self) -> bool:
        return self.saved is not None or (self.journal is not None and bool(self.journal.numbers))

    def _end_directory(self, directory: RunDirectory, world_size: int) -> None:
        if not self._looked and directory.is_empty():
            directory.remove()  # this process made it
        elif not self._looked or (self.keep and self._can_go_on):
            fresh = self.saved is not None and self.saved.own is None
            if fresh and self.journal is not None and not self.journal.numbers:
                for path in directory.path.glob(f"{self.owner.stem}[-.]*"):  # of no use without a commit
                    path.unlink(missing_ok=True)
            directory.leave()
        elif self._can_go_on:
            directory.remove_finished(world_size)
        else:
            directory.remove()
