"""The journal of one rank: its commits, where versions lie, and the sums of blocks, in one SQLite database.

[Note: what a commit needs]
A commit names the version of each unit, the step counts of its parameters, the small state that belongs to
the step (learning rates, generators, a loader's position), and the layout that says where versions lie. It is
written, in one transaction, when the updates of its step have landed. With ``durability.survives=process``
nothing is synced: the kernel keeps what was written when a process is killed. With ``power`` the data and the
journal are synced, in this order. A transaction costs a third to a half of replacing a file; synced, as much.
SQLite's write-ahead log would be faster, but on a full disk it cannot even be read.

[Note: the commit barrier]
The updates of step t+1 write over what step t-1 committed. So the first of them waits until the commit
of step t is in the journal on every rank (a rank reduces no gradient of a step before its own commit of the
step before is there), and then retires the commit of t-1, which is whole no longer. By then the forward pass
of step t+1 has waited for nearly all updates of step t anyway. A process that is killed at any moment leaves
a commit whose versions are whole, and all ranks one of the same step.

[Note: writes in place]
``infinity.gathered(modify=True)`` and loaded states write over committed versions. Before the first of these
writes the journal says that no commit is whole, and the next forward pass records the same step again.

[Note: the head]
Without syncs a power cut may leave an older state of the database, while versions have been written over
since. So a block beside it, which is written in its place past the page cache, as versions are, says whose
journal it is and which commit is the oldest that is whole.
"""

import contextlib
import errno
import io
import json
import mmap
import os
import resource
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from infinity.core.config import Config, Valid, option
from infinity.core.errors import DirectoryError, DiskError, InfinityError, StateError, first_line
from infinity.core.files import create_file, open_found, open_regular, sync
from infinity.core.nbytes import BLOCK_NBYTES
from infinity.core.transfer import Transfer
from infinity.nvme.volume import open_direct

_HEAD_MAGIC = b"infinity-journal-1"
_TABLES = """
CREATE TABLE layouts (number INTEGER PRIMARY KEY, body BLOB, crc INTEGER);
CREATE TABLE commits (number INTEGER PRIMARY KEY, body BLOB, state BLOB, layout INTEGER, crc INTEGER);
CREATE TABLE sums (number INTEGER, drive INTEGER, body BLOB, crc INTEGER);
"""
_MOST_PARAMETERS, _MOST_RANKS = 2**24, 2**20
#: Places of a unit: the recorded, the committed and the next one, and one that is being saved.
MOST_PLACES = 4
#: What the fields of a commit raise that has the right checksum and other content.
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, RecursionError)


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
    every: int | None = option(
        None,
        "steps from one recorded commit to the next; null: 1 if all states live on NVMe, else as many as "
        "keep the cost of writing those in host memory below 3.5 % of the time",
        Valid(1, 10**9),
    )


class CorruptJournalError(InfinityError, OSError):
    """A journal is there, but is not what was written."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """Names of one rank's files in a run's directories.

    Attributes:
        generation: Grows when a run goes on with files of another layout: on another number of ranks.
        run: A random number that the journals of a run have in common.
    """

    rank: int
    generation: int = 1
    run: int = 0

    def data(self, drive: int) -> str:
        """Return the name of the file of the rank's shards on drive number ``drive``."""
        return f"rank{self.rank}-{self.generation}-{drive}.bin"

    @property
    def journal(self) -> str:
        """Name of the database; its head, and SQLite's own file, have it and an ending more."""
        return f"rank{self.rank}-{self.generation}.commits"


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """A commit: after ``step``, unit ``i`` of this rank is in its version ``versions[i]``.

    Attributes:
        counts: Updates that each parameter of each unit has had.
        world_size: Ranks that share the units.
        state: The small state of the step; see :func:`pack`.
        number: The number of the commit, one more than that of the commit before.
    """

    step: int
    versions: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...] = ()
    world_size: int = 1
    state: bytes = field(default=b"", repr=False)
    number: int = 0


def pack(state: Mapping[str, Any]) -> bytes:
    """Return a small state (containers of tensors, numbers and text) as bytes.

    Whether it has something else, which cannot be read back, is found by :func:`check_state`.

    Raises:
        StateError: It has something that cannot even be written.
    """
    file = io.BytesIO()
    with _kept_or_raise():
        torch.save(dict(state), file)
    return file.getvalue()


def unpack(data: bytes) -> dict[str, Any]:
    """Return what :func:`pack` was given; runs no code from ``data``."""
    state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    return state


def check_state(data: bytes) -> None:
    """Raise a StateError unless a small state can be read back."""
    with _kept_or_raise():
        unpack(data)


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


def whole_numbers(values: Any, most: int = 2**63) -> tuple[int, ...]:
    """Return numbers from a file.

    Raises:
        ValueError: They are no list of whole numbers from 0 to ``most``.
    """
    if not isinstance(values, list) or not all(type(each) is int and 0 <= each <= most for each in values):
        raise ValueError("something else than whole numbers")
    return tuple(values)


def _body_of(record: CommitRecord) -> bytes:
    fields = {
        "step": record.step,
        "versions": record.versions,
        "counts": [each[0] if len(set(each)) == 1 else each for each in record.counts],
        "numbers": [len(each) for each in record.counts],
        "world_size": record.world_size,
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def _record_of(number: int, body: bytes, state: bytes) -> CommitRecord:
    """Return a commit from its parts; raise one of ``_MALFORMED`` if they are not a commit's."""
    fields = json.loads(body)
    numbers = whole_numbers(fields["numbers"], most=_MOST_PARAMETERS)
    if sum(numbers) > _MOST_PARAMETERS:
        raise ValueError(f"{sum(numbers)} parameters")
    counts = tuple(
        whole_numbers(each if isinstance(each, list) else [each] * count)
        for each, count in zip(fields["counts"], numbers, strict=True)
    )
    step, world_size = whole_numbers([fields["step"], fields["world_size"]])
    if not 1 <= world_size <= _MOST_RANKS:
        raise ValueError(f"{world_size} ranks")
    versions = whole_numbers(fields["versions"], most=MOST_PLACES - 1)
    return CommitRecord(step, versions, counts, world_size, state, number)


# --- the head ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Head:
    """The block beside a journal; see [Note: the head].

    It is made with the first commit.

    Attributes:
        oldest: Number of the oldest commit that is whole; 0: none was ever written over.
        in_place: Versions of the commits before that are being written in place.
    """

    owner: RankFiles
    oldest: int = 0
    in_place: bool = False

    def write(self, fd: int) -> None:
        """Write the block."""
        owner = self.owner
        body = b"%d %d %d %d %d" % (owner.rank, owner.generation, owner.run, self.oldest, self.in_place)
        with mmap.mmap(-1, BLOCK_NBYTES) as block:  # aligned, for O_DIRECT
            block.write(b"%s %08x %s\n" % (_HEAD_MAGIC, zlib.crc32(body), body))
            if os.pwrite(fd, block, 0) < BLOCK_NBYTES:
                raise OSError(errno.ENOSPC, "short write")

    @classmethod
    def read(cls, path: Path) -> "Head | None":
        """Read the head of the journal at ``path``; None: there is none.

        Raises:
            CorruptJournalError: It is not what was written.
        """
        try:
            with open(open_regular(_head_path(path)), "rb") as file:
                magic, _, rest = file.read(BLOCK_NBYTES).partition(b"\n")[0].partition(b" ")
        except FileNotFoundError:
            return None
        crc, _, body = rest.partition(b" ")
        if magic != _HEAD_MAGIC or crc != b"%08x" % zlib.crc32(body):
            raise CorruptJournalError(f"{_head_path(path)}: not what was written")
        rank, generation, run, oldest, in_place = (int(each) for each in body.split(b" "))
        return cls(RankFiles(rank, generation, run), oldest, bool(in_place))


def _head_path(path: Path) -> Path:
    return path.with_name(f"{path.name}-head")


# --- writing -----------------------------------------------------------------------------------------


class Journal:
    """The commits of one rank, as they are written; one thread at a time.

    Args:
        folder: The folder in which the journal is, or is made.
        owner: Names the file.
        synced: A commit survives a power cut.

    Raises:
        DirectoryError: The files cannot be made or opened.
    """

    def __init__(self, folder: Path, owner: RankFiles, *, synced: bool = False) -> None:
        self.path, self._synced = folder / owner.journal, synced
        self._head_fd = -1
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
                self._head_fd, _ = open_direct(_head_path(self.path), open_found, "opening")
            rows = self._db.execute("SELECT number FROM commits ORDER BY number")
            self._numbers = [number for (number,) in rows]

    @property
    def any(self) -> bool:
        """Return whether there is a commit; also of a journal that was closed."""
        return bool(self._numbers)

    def append(
        self, record: CommitRecord, layout: Mapping[str, Any] | None = None, sums: Sequence[bytes] = ()
    ) -> None:
        """Write a commit behind the last one; those before that one go.

        Args:
            layout: The layout of versions, if that has changed since the last commit.
            sums: Sums of the blocks of each data file.

        Raises:
            DiskError: It could not be written; what was there is whole.
        """
        if self._head_fd < 0:
            with self._writing():
                self._make_head()
        with self._transaction() as run:
            number = max([*self._numbers, self._head.oldest - 1, 0]) + 1
            if layout is not None:
                body = json.dumps(layout, separators=(",", ":")).encode()
                run("INSERT INTO layouts (body, crc) VALUES (?, ?)", body, zlib.crc32(body))
            [[place]] = run("SELECT max(number) FROM layouts")
            body = _body_of(record)
            crc = zlib.crc32(record.state, zlib.crc32(body))
            run("INSERT INTO commits VALUES (?, ?, ?, ?, ?)", number, body, record.state, place, crc)
            for drive, part in enumerate(sums):
                run("INSERT INTO sums VALUES (?, ?, ?, ?)", number, drive, part, zlib.crc32(part))
            kept = [*self._numbers[-1:], number]
            self._keep_from(run, kept[0])
        self._numbers = kept
        if self._head.in_place:
            with self._writing():
                self._set_head(replace(self._head, in_place=False))

    def retire(self) -> None:
        """Let only the last commit be whole: versions of those before it are about to be written over.

        Raises:
            DiskError: That could not be written.
        """
        newest = max(self._numbers, default=0)
        if self._head.oldest < newest:
            with self._writing():
                self._set_head(replace(self._head, oldest=newest))
            with self._transaction() as run:
                self._keep_from(run, newest)
            self._numbers = [newest]

    def go_back(self, record: CommitRecord) -> None:
        """Let no other commit than ``record``, which all ranks have, be whole."""
        if max(self._numbers) > record.number:
            with self._transaction() as run:
                run("DELETE FROM commits WHERE number > ?", record.number)
            self._numbers = [number for number in self._numbers if number <= record.number]
        self.retire()

    def invalidate(self) -> None:
        """Let no commit be whole: committed versions are about to be written in place."""
        newest = max(self._numbers, default=0)
        with self._writing():
            self._set_head(replace(self._head, oldest=newest + 1, in_place=True))
        with self._transaction() as run:
            self._keep_from(run, newest + 1)
        self._numbers = []

    def close(self) -> None:
        """Close the files. May be called twice."""
        self._db.close()
        if self._head_fd >= 0:
            os.close(self._head_fd)
            self._head_fd = -1

    def _keep_from(self, run: Callable[..., Any], number: int) -> None:
        run("DELETE FROM commits WHERE number < ?", number)
        run("DELETE FROM sums WHERE number NOT IN (SELECT number FROM commits)")
        run(
            "DELETE FROM layouts WHERE number NOT IN (SELECT layout FROM commits) "
            "AND number < (SELECT max(number) FROM layouts)"
        )

    def _make_head(self) -> None:
        """Write the head under a draft's name: a kill leaves none, or a whole one."""
        path = _head_path(self.path)
        draft = path.with_name(f"{path.name}.new")
        self._head_fd, _ = open_direct(draft, create_file, "making")
        self._set_head(self._head)
        os.fsync(self._head_fd)  # once: from now on it is written in its place
        draft.replace(path)
        sync(path.parent)

    def _set_head(self, head: Head) -> None:
        head.write(self._head_fd)
        if self._synced:
            os.fsync(self._head_fd)
        self._head = head

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Callable[..., Any]]:
        with self._writing():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield lambda sql, *values: self._db.execute(sql, values).fetchall()
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _writing(self, kind: type[DiskError] = DiskError) -> Iterator[None]:
        try:
            yield
        except InfinityError:
            raise
        except (sqlite3.Error, OSError) as error:
            code = getattr(error, "errno", None) or _errno_of(error)
            action = f"writing the journal of commits ({first_line(error)})"
            if kind is DirectoryError:
                raise DirectoryError(code, action, self.path) from error
            raise DiskError(code, action, self.path, offset=0, nbytes=0) from error


def _errno_of(error: Exception) -> int:
    """Return the number of what SQLite says in words."""
    if "full" in str(error):
        return errno.ENOSPC
    limited = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
    return errno.EFBIG if limited else errno.EIO


# --- the thread that writes ---------------------------------------------------------------------------


class Commits:
    """Writes one rank's commits to its journal, on a thread of its own.

    Args:
        journal: Closed with this.
        sync: Makes the drive keep what was written (:meth:`infinity.nvme.volume.Volume.sync`); None: what
            survives the process is enough.
        sums: Returns the sums of the blocks of each data file, which are kept with a commit.

    Attributes:
        obsolete: Called once with the first commit behind all ranks: what an earlier generation had may go.
        last: The commit that is being written, or was written last.
        stands: There is a commit, written or being written, that is valid.
    """

    def __init__(
        self, journal: Journal, sync: Callable[[], None] | None = None,
        sums: Callable[[], Sequence[bytes]] = tuple,
    ) -> None:  # fmt: skip
        self._journal, self._sync, self._sums = journal, sync, sums
        self.obsolete: Callable[[], None] = lambda: None
        self._thread = ThreadPoolExecutor(1, "infinity-commit")
        self.last = Transfer()
        self.last.finish()
        self._lock = threading.Lock()  # of the journal
        self._written = self.stands = False

    def take_over(self, record: CommitRecord) -> None:
        """Go on behind a commit that was found; all ranks have one of its step.

        A later one, which not all ranks had, goes: its versions are about to be written again.
        """
        with self._lock:
            self._journal.go_back(record)
        self.stands = True

    def add(
        self, record: CommitRecord, updates: Sequence[Transfer], layout: Mapping[str, Any] | None = None
    ) -> None:
        """Write ``record`` as soon as every update has landed; never, if one fails.

        Args:
            layout: The layout of versions, if that has changed since the last commit.
        """
        self.wait()
        written = self.last = Transfer()
        self.stands = True
        left = [len(updates) + 1]
        lock = threading.Lock()

        def landed() -> None:
            with lock:
                left[0] -= 1
                if left[0]:
                    return
            try:
                self._thread.submit(written.run, partial(self._write, record, updates, layout))
            except RuntimeError as error:  # closed meanwhile
                written.finish(error)

        for update in updates:
            update.then(landed)
        landed()

    def wait(self) -> None:
        """Block until the last commit is in the journal.

        Raises:
            DiskError: An update of that step failed; the commit before it stands.
            StateError: Its small state could not be read back; likewise.
        """
        self.last.wait()

    @property
    def any(self) -> bool:
        """Return whether there is a commit in the journal."""
        with self._lock:
            return self._journal.any

    def retire(self) -> None:
        """Give up the commit before the last one, whose versions are about to be written; any thread.

        The last one is in the journal of every rank.
        """
        with self._lock:
            self._journal.retire()
            if self._written:
                obsolete, self.obsolete = self.obsolete, lambda: None
                obsolete()

    def invalidate(self) -> None:
        """Give up every commit: committed versions are about to be written in place.

        Raises:
            DiskError: The update of the last step failed.
        """
        self.wait()
        with self._lock:
            self.stands = False
            if self._sync is not None:
                self._sync()
            self._journal.invalidate()

    def close(self) -> None:
        """End the thread, after the commit that is being written."""
        self._thread.shutdown()
        self._journal.close()

    def _write(
        self, record: CommitRecord, updates: Sequence[Transfer], layout: Mapping[str, Any] | None
    ) -> None:
        for update in updates:
            update.wait()  # ended: raises at once if it failed
        if record.state:
            check_state(record.state)  # here, beside training: it takes milliseconds
        if self._sync is not None:
            self._sync()
        with self._lock:
            self._journal.append(record, layout, self._sums())
            self._written = True


# --- reading -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a journal.

    Attributes:
        commits: Whole commits, by step, each with the layout that says where its versions lie.
        problems: A line about each commit that should be whole and is not.
    """

    path: Path
    head: Head | None
    commits: Mapping[int, tuple[CommitRecord, Mapping[str, Any]]]
    problems: Sequence[str]


def read_journal(path: Path) -> Contents:
    """Read a journal, which another process may be writing; what a kill left of a transaction is undone.

    Raises:
        CorruptJournalError: It is not what was written.
    """
    head = Head.read(path)
    commits: dict[int, tuple[CommitRecord, Mapping[str, Any]]] = {}
    problems: list[str] = []
    with _reading(path) as run:
        if head is None:  # it comes before the first commit
            if run("SELECT number FROM commits"):
                raise CorruptJournalError(f"{_head_path(path)}: missing")
            return Contents(path, None, commits, problems)
        for number, body, state, place, crc in run("SELECT * FROM commits ORDER BY number"):
            try:
                if zlib.crc32(state, zlib.crc32(body)) != crc:
                    raise ValueError("checksum")
                record = _record_of(number, body, state)
                [[layout, of_layout]] = run("SELECT body, crc FROM layouts WHERE number = ?", place)
                if zlib.crc32(layout) != of_layout:
                    raise ValueError("checksum of its layout")
                described = json.loads(layout)
            except _MALFORMED as error:
                problems.append(f"{path}: commit {number} is not what was written ({first_line(error)})")
                continue
            if number >= head.oldest:
                commits[record.step] = record, described
    if head.oldest and not head.in_place and not commits and not problems:
        problems.append(f"{path}: commit {head.oldest} is missing; the drive, or a copy, has lost it")
    return Contents(path, head, commits, problems)


def read_sums(path: Path, record: CommitRecord) -> list[bytes]:
    """Return the sums of the blocks of each data file that were kept with a commit; none: empty.

    Raises:
        CorruptJournalError: They are not what was written.
    """
    with _reading(path) as run:
        rows = run("SELECT body, crc FROM sums WHERE number = ? ORDER BY drive", record.number)
    if any(zlib.crc32(body) != crc or len(body) % 4 for body, crc in rows):
        raise CorruptJournalError(f"{path}: the sums of step {record.step} are not what was written")
    return [body for body, _ in rows]


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[Callable[..., list[Any]]]:
    os.close(open_regular(path))
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)) as db:
            yield lambda sql, *values: db.execute(sql, values).fetchall()
    except sqlite3.Error as error:
        raise CorruptJournalError(f"{path}: not a whole journal of commits ({first_line(error)})") from error
