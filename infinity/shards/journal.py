"""Keeps one rank's commits, the places of versions, and the sums of blocks in one SQLite database.

[Note: what a commit needs]
A commit names the version of each unit, where versions lie, the step counts of its parameters, and the small
state of the step (learning rates, generators, a loader's position). It is written in one transaction when the
updates of its step have landed. With ``durability.survives=power`` the data and then the journal are synced.
SQLite's write-ahead log would be faster, but on a full disk it cannot be read.

[Note: the commit barrier]
The updates of step t+1 write over what step t-1 committed. So the first of them waits until every rank's
journal has the commit of step t (a rank reduces no gradient of a step before its own commit of the step
before is there), and retires that of t-1. Stages of a pipeline do not reduce together: each rank counts
itself in the store when its commit is there, and who waits for its own waits for all. So whenever a process
is killed, each rank has a whole commit, all of the same step.

[Note: writes in place]
``infinity.gathered(modify=True)`` and loaded states write over committed versions. Before the first of these
writes the journal says that no commit is whole, and the next forward pass records the same step again.

[Note: the head]
Without syncs a power cut may leave an older database, while versions have been written over since. So a block
beside it, written in place past the page cache as versions are, says whose journal it is and which is the
oldest whole commit.
"""

import contextlib
import errno
import io
import json
import mmap
import os
import re
import resource
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from infinity.core.config import Config, Valid, option
from infinity.core.errors import DirectoryError, DiskError, InfinityError, StateError, first_line
from infinity.core.files import built, create_file, open_found, open_regular, sync
from infinity.core.nbytes import BLOCK_NBYTES, Extent, Piece, Transfer
from infinity.nvme.volume import open_direct

_HEAD_MAGIC = b"infinity-journal-2"
_TABLES = """
CREATE TABLE commits (number INTEGER PRIMARY KEY, body BLOB, crc INTEGER);
CREATE TABLE blobs (number INTEGER, kind INTEGER, body BLOB, crc INTEGER);
"""
#: Bytes that are in one row: SQLite has values of up to 1 GB. And the kind of those of a small state, where
#: others have the number of the drive whose sums they are.
_ROW_NBYTES, _STATE = 2**29, -1
#: Errors of reading rows that are not what was written.
_MALFORMED = (TypeError, ValueError)
_OF_RANK = re.compile(r"(rank|copy)(\d+)-(\d+)[-.].*")

#: Whether a run that was interrupted goes on.
Resume = Literal["auto", "never", "must"]


@dataclass(frozen=True, kw_only=True)
class DurabilityConfig(Config):
    """Commits of steps: what they survive, and how often one is recorded."""

    survives: Literal["process", "power"] = option(
        "process",
        "what a committed step survives; process: any kill; power: a power cut, too, for a sync of the "
        "drives in every step",
    )
    copies: int = option(
        1,
        "places of each commit; 2: the next node's drives have it, too, and a lost node loses nothing",
        Valid(1, 2),
    )
    every: int | None = option(
        None,
        "steps from one recorded commit to the next; null: 1 if all states live on NVMe, else as many as "
        "keep the cost of writing those in host memory below 3.5 % of the time",
        Valid(1, 10**9),
    )


class CorruptJournalError(InfinityError, OSError):
    """Raised when a journal is there, but is not what was written."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """Names one rank's files in a run's directories."""

    rank: int
    generation: int = 1  # grows when a run goes on with files of another layout: on another number of ranks
    run: int = 0  # a random number that the journals of a run have in common
    kind: str = "rank"  # or "copy": see :mod:`infinity.shards.copies`

    @classmethod
    def of(cls, path: Path) -> "RankFiles | None":
        """Return the names of the rank whose file ``path`` is; None: no rank's, or a lock."""
        match = _OF_RANK.fullmatch(path.name)
        return None if match is None else cls(int(match[2]), int(match[3]), kind=match[1])

    @property
    def stem(self) -> str:
        return f"{self.kind}{self.rank}-{self.generation}"

    def data(self, drive: int) -> str:
        return f"{self.stem}-{drive}.bin"

    @property
    def journal(self) -> str:
        """Return the name of the database; its head, and SQLite's own file, add an ending to it."""
        return f"{self.stem}.commits"


NOWHERE = Extent(())


@dataclass(frozen=True, slots=True)
class ChunkExtents:
    """Elements ``[start, start + numel)`` of a shard in one version."""

    start: int
    numel: int
    weight: Extent
    exact: Extent = NOWHERE  # what the exact values have beyond the weights; empty: nothing
    moments: Extent = NOWHERE  # empty while the unit was never trained

    @property
    def state(self) -> Extent:
        """The extents of everything but the weights."""
        return self.exact + self.moments

    @property
    def parts(self) -> tuple[Extent, Extent, Extent]:
        return self.weight, self.exact, self.moments

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(piece for part in self.parts for piece in part.pieces)

    def shifted(self, files: int) -> "ChunkExtents":
        """Return the same places in files whose numbers are larger by ``files``."""
        extents = (
            Extent(tuple(replace(piece, file=piece.file + files) for piece in extent.pieces))
            for extent in self.parts
        )
        return ChunkExtents(self.start, self.numel, *extents)


@dataclass(frozen=True, slots=True)
class Version:
    """One of the places where a unit's shard is on NVMe."""

    chunks: tuple[ChunkExtents, ...]

    @property
    def weight(self) -> Extent:
        """The extent of all weights of the shard, in order."""
        return sum((chunk.weight for chunk in self.chunks), NOWHERE)

    @property
    def pieces(self) -> Iterator[Piece]:
        return (piece for chunk in self.chunks for piece in chunk.pieces)


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """Describes one rank's shard of a unit in a commit."""

    numel: int  # of the unit
    segments: Sequence[tuple[str, int, tuple[int, ...]]]  # name, offset and shape of each parameter
    counts: tuple[int, ...]  # updates that each of them has had
    versions: Sequence[Version]  # in files numbered by drive; empty: its values are those of a checkpoint
    version: int  # the committed one among them

    @property
    def committed(self) -> Version:
        """The committed version; without chunks if the values are those of a checkpoint."""
        return self.versions[self.version % len(self.versions)] if self.versions else Version(())


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """Describes a commit of ``step``."""

    step: int
    units: Sequence[UnitRecord] = ()
    world_size: int = 1
    drives: int = 0
    dtype: str = ""
    rule: str = ""
    base: Mapping[str, str] = field(default_factory=dict)  # digests of files of the frozen base
    mesh: str = ""  # of the ranks; see Ranks
    number: int = 0  # one more than that of the commit before; 0: it is not written yet
    state: bytes = field(default=b"", repr=False)  # see pack()


def _fields(record: Any) -> list[Any]:
    """Return a dataclass as a list, for JSON."""
    return [getattr(record, each.name) for each in fields(record)]


def pack(state: Mapping[str, Any]) -> bytes:
    """Return a small state (containers of tensors, numbers and text) as bytes, or raise a StateError."""
    file = io.BytesIO()
    with _kept_or_raise():
        torch.save(dict(state), file)
    return file.getvalue()


def unpack(data: bytes) -> dict[str, Any]:
    """Return what :func:`pack` was given; runs no code from ``data``."""
    state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    return state


@contextlib.contextmanager
def _kept_or_raise() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise StateError(
            "the state of the optimizer, or of what it follows, cannot be kept with a commit "
            f"({first_line(error)}). Tensors, numbers, text, and lists and dictionaries of them can: let "
            "state_dict() return these"
        ) from error


def parts_of_commit(record: CommitRecord) -> tuple[bytes, bytes]:
    """Return a commit as a body and its small state, of which :func:`commit_of_parts` makes it again."""
    body = json.dumps(_fields(record)[:-2], default=_fields, separators=(",", ":")).encode()
    return body, record.state


def commit_of_parts(number: int, body: bytes, state: bytes) -> CommitRecord:
    """Return a commit from its parts, of which checksums have shown that they are what was written."""
    record: CommitRecord = built(CommitRecord, json.loads(body))
    return replace(record, number=number, state=state)


@dataclass(frozen=True, slots=True)
class Head:
    """Reads and writes the block beside a journal, made with the first commit; see [Note: the head]."""

    owner: RankFiles
    oldest: int = 0  # the number of the oldest commit that is whole; 0: none was ever written over
    in_place: bool = False  # versions of the commits before that are being written in place

    @staticmethod
    def path(journal: Path) -> Path:
        return journal.with_name(f"{journal.name}-head")

    def write(self, fd: int) -> None:
        owner = self.owner
        body = b"%d %d %d %d %d" % (owner.rank, owner.generation, owner.run, self.oldest, self.in_place)
        with mmap.mmap(-1, BLOCK_NBYTES) as block:  # aligned, for O_DIRECT
            block.write(b"%s %08x %s\n" % (_HEAD_MAGIC, zlib.crc32(body), body))
            if os.pwrite(fd, block, 0) < BLOCK_NBYTES:
                raise OSError(errno.ENOSPC, "short write")

    @classmethod
    def read(cls, journal: Path) -> "Head | None":
        """Read the head beside ``journal``; None: there is none. Raises as :func:`read_journal`."""
        try:
            with open(open_regular(cls.path(journal)), "rb") as file:
                magic, _, rest = file.read(BLOCK_NBYTES).partition(b"\n")[0].partition(b" ")
        except FileNotFoundError:
            return None
        crc, _, body = rest.partition(b" ")
        if magic != _HEAD_MAGIC or crc != b"%08x" % zlib.crc32(body):
            raise CorruptJournalError(f"{cls.path(journal)}: not what was written")
        rank, generation, run, oldest, in_place = (int(each) for each in body.split(b" "))
        head = cls(RankFiles(rank, generation, run, journal.name[:4]), oldest, bool(in_place))
        if head.owner.journal != journal.name:
            raise CorruptJournalError(
                f"{journal}: put in the place of another rank's or generation's journal"
            )
        return head


class Journal:
    """Writes the commits of one rank on a thread of its own. Any thread may call.

    Attributes:
        last: This process's last commit, which may still be being written; None: there is none.
        stands: There is a valid commit, written or being written.
        landed: Called when a commit's updates are on the drive, and before committed versions are written in
            place: syncs the drive if ``durability.survives`` is power, and returns the sums of the blocks of
            each data file, which are kept with the commit.
        copies: The rank's :class:`~infinity.shards.copies.Copies`, which get each commit first; None: none.
    """

    def __init__(self, folder: Path, owner: RankFiles, *, synced: bool = False) -> None:
        self.path, self._synced = folder / owner.journal, synced
        self.landed: Callable[[], Sequence[bytes]] = tuple
        self.copies: Any = None
        self.last: Transfer | None = None
        self._thread = ThreadPoolExecutor(1, "infinity-commit")
        self._lock = threading.RLock()  # guards what follows
        self._head_fd, self.stands = -1, False
        new = not self.path.exists()
        with self._writing(DirectoryError):
            os.close(create_file(self.path) if new else open_found(self.path, os.O_RDWR))
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=PERSIST")
            self._db.execute(f"PRAGMA synchronous={'FULL' if synced else 'OFF'}")
            if new:
                self._db.executescript(_TABLES)
                sync(folder)
            found = Head.read(self.path)
            self._head = found or Head(owner)
            if found is not None:
                self._head_fd, _ = open_direct(Head.path(self.path), open_found, "opening")
            rows = self._db.execute("SELECT number FROM commits ORDER BY number")
            self.numbers = [number for (number,) in rows]  # of the commits that are there

    def add(self, record: CommitRecord, updates: Sequence[Transfer]) -> None:
        """Write ``record`` when every update has landed; never if one fails. Raises as :meth:`wait`."""
        self.wait()
        self.last, self.stands = Transfer(), True
        try:
            self._thread.submit(self.last.run, partial(self._write, record, updates))
        except RuntimeError as error:  # it was closed meanwhile, or no thread can be started
            self.last.finish(error)

    def _write(self, record: CommitRecord, updates: Sequence[Transfer]) -> None:
        for update in updates:
            update.wait()
        if record.state:
            with _kept_or_raise():
                unpack(record.state)  # here, beside training: it takes milliseconds
        sums = self.landed()
        if self.copies is not None:
            newest = max(self.numbers, default=0)
            self.copies.commit(record, sums, retires=self._head.oldest >= newest)
        self.append(record, sums)

    def wait(self) -> None:
        """Block until the last commit is in the journal.

        Raises an error of an update of that step, a DiskError of the journal, or a StateError if the step's
        small state could not be read back.
        """
        if self.last is not None:
            self.last.wait()

    def append(self, record: CommitRecord, sums: Sequence[bytes] = ()) -> None:
        """Write a commit, and delete all earlier ones but the newest; at a DiskError none is deleted."""
        with self._lock, self._writing():
            if self._head_fd < 0:  # under a draft's name first, so that a kill leaves no head, or a whole one
                path = Head.path(self.path)
                draft = path.with_name(f"{path.name}.new")
                self._head_fd, _ = open_direct(draft, create_file, "making")
                self._set_head()
                os.fsync(self._head_fd)  # once: from now on it is written in its place
                draft.replace(path)
                sync(path.parent)
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                number = max([*self.numbers, self._head.oldest - 1, 0]) + 1
                kept = [*self.numbers[-1:], number]
                self._keep_from(kept[0])  # first: there may be blobs of a commit of this number that went
                body, state = parts_of_commit(record)
                crc = zlib.crc32(state, zlib.crc32(body))
                self._db.execute("INSERT INTO commits VALUES (?, ?, ?)", (number, body, crc))
                for kind, blob in [(_STATE, state), *enumerate(sums)]:
                    for at in range(0, len(blob), _ROW_NBYTES):
                        part = memoryview(blob)[at : at + _ROW_NBYTES]
                        row = number, kind, part, zlib.crc32(part)
                        self._db.execute("INSERT INTO blobs VALUES (?, ?, ?, ?)", row)
            self.numbers = kept
            if self._head.in_place:
                self._set_head(in_place=False)

    def _set_head(self, **changes: Any) -> None:
        head = replace(self._head, **changes)
        head.write(self._head_fd)
        if self._synced:
            os.fsync(self._head_fd)
        self._head = head

    def _keep_from(self, number: int) -> None:
        """Delete, in a transaction, the commits before ``number`` and what belongs only to them."""
        self._db.execute("DELETE FROM commits WHERE number < ?", (number,))
        self._db.execute("DELETE FROM blobs WHERE number NOT IN (SELECT number FROM commits)")

    def _set_oldest(self, number: int, *, in_place: bool = False) -> None:
        self._set_head(oldest=number, in_place=in_place or self._head.in_place)
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._keep_from(number)
        self.numbers = [each for each in self.numbers if each >= number]

    def retire(self) -> None:
        """Give up the commit before the last, which is written over from now on: every rank has the last."""
        with self._lock:
            newest = max(self.numbers, default=0)
            if self._head.oldest < newest:
                with self._writing():
                    self._set_oldest(newest)

    def take_over(self, record: CommitRecord) -> None:
        """Continue after a commit of whose step all ranks have one; a later one goes."""
        with self._lock:
            if max(self.numbers) > record.number:
                with self._writing():
                    self._db.execute("DELETE FROM commits WHERE number > ?", (record.number,))
                self.numbers = [number for number in self.numbers if number <= record.number]
            self.retire()
            self.stands = True

    def invalidate(self) -> None:
        """Give up every commit: see [Note: writes in place]."""
        self.wait()
        if self.copies is not None:
            self.copies.invalidate()
        with self._lock, self._writing():
            self.stands = False
            self.landed()
            self._set_oldest(max(self.numbers, default=0) + 1, in_place=True)

    def close(self) -> None:
        """End the thread after the commit that is being written; may be called twice."""
        self._thread.shutdown()
        self._db.close()
        if self._head_fd >= 0:
            os.close(self._head_fd)
            self._head_fd = -1

    @contextlib.contextmanager
    def _writing(self, kind: type[DiskError] = DiskError) -> Iterator[None]:
        try:
            yield
        except InfinityError:
            raise
        except (sqlite3.Error, OSError) as error:
            code = getattr(error, "errno", None)
            if code is None:  # SQLite says in words what it was
                limited = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
                code = errno.ENOSPC if "full" in str(error) else errno.EFBIG if limited else errno.EIO
            raise kind(code, f"writing the journal of commits ({first_line(error)})", self.path) from error


@dataclass(frozen=True, slots=True)
class Contents:
    """Holds the contents of a journal."""

    path: Path
    head: Head | None = None  # none: there was no commit yet, or the journal cannot be read
    commits: Mapping[int, CommitRecord] = field(default_factory=dict)  # whole ones, by step
    problems: Sequence[str] = ()  # a line about each commit that should be whole and is not


def read_journal(path: Path) -> Contents:
    """Read a journal, which a process may be writing; what a kill left of a transaction is undone."""
    head = Head.read(path)
    commits: dict[int, CommitRecord] = {}
    problems: list[str] = []
    with _reading(path) as run:
        if head is None:  # it comes before the first commit
            if run("SELECT number FROM commits"):
                raise CorruptJournalError(f"{Head.path(path)}: missing")
            return Contents(path)
        for number, body, crc in run("SELECT * FROM commits ORDER BY number"):
            try:
                state = _blob(run, number, _STATE)
                if zlib.crc32(state, zlib.crc32(body)) != crc:
                    raise ValueError("checksum")
                record = commit_of_parts(number, body, state)
                if number >= head.oldest:
                    commits[record.step] = record
            except _MALFORMED as error:
                problems.append(f"{path}: commit {number} is not what was written ({first_line(error)})")
    if head.oldest and not head.in_place and not commits and not problems:
        problems.append(f"{path}: commit {head.oldest} is missing; the drive, or a copy, has lost it")
    return Contents(path, head, commits, problems)


def read_sums(path: Path, record: CommitRecord) -> list[bytes]:
    """Return the sums of blocks that were kept with a commit, by data file; empty: there are none."""
    with _reading(path) as run:
        try:
            sums = [_blob(run, record.number, drive) for drive in range(record.drives)]
        except _MALFORMED as error:
            raise CorruptJournalError(
                f"{path}: the sums of step {record.step} are not what was written"
            ) from error
    return sums if any(sums) else []


def _blob(run: Callable[..., list[Any]], number: int, kind: int) -> bytes:
    rows = run("SELECT body, crc FROM blobs WHERE number = ? AND kind = ? ORDER BY rowid", number, kind)
    if any(zlib.crc32(body) != crc for body, crc in rows):
        raise ValueError("checksum")
    return b"".join(body for body, _ in rows)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[Callable[..., list[Any]]]:
    os.close(open_regular(path))
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)) as db:
            db.execute("BEGIN")  # all that is read is of one moment
            yield lambda sql, *values: db.execute(sql, values).fetchall()
    except sqlite3.Error as error:
        raise CorruptJournalError(f"{path}: not a whole journal of commits ({first_line(error)})") from error
