"""Commit records: which version of each unit is the committed one, after every step.

[Note: what a record needs]
A record names the version of each unit, the step counts of its parameters, the small state that belongs to
the step (learning rates, generators, a loader's position), and the file that says where versions lie. It is
written when the updates of its step have landed, in one of two alternating places. With
``durability.survives=process`` nothing is synced: the kernel keeps what was written when a process is
killed. With ``power`` the data, the record and its name are synced, in this order.

[Note: the commit barrier]
The updates of step t+1 write over what step t-1 committed. So the first of them waits until the record
of step t is on disk on every rank (a rank reduces no gradient of a step before its own record of the step
before is on disk), and then removes the record of t-1, which is whole no longer. By then the forward pass of
step t+1 has waited for nearly all updates of step t anyway. A process that is killed at any moment leaves a
record whose versions are whole, and all ranks one of the same step.

[Note: writes in place]
``infinity.gathered(modify=True)`` and loaded states write over committed versions. Before the first of these
writes the records go, and the next forward pass records the same step again.

[Note: files that were put back]
Records are numbered. Each data file begins with a block that says which run, rank and drive it belongs to,
and the number of the oldest record that is whole: where a record has been removed, its versions may be
written over. So a record, or a data file, that a copy put back is recognized. What cannot be: a copy of all
files that was made while the run wrote.
"""

import contextlib
import errno
import io
import json
import math
import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from infinity.core.errors import DirectoryError, DiskError, InfinityError, StateError, first_line
from infinity.core.extent import BLOCK_NBYTES
from infinity.core.files import create_file, open_regular, read_file, sync
from infinity.core.transfer import Transfer

_MAGIC = b"infinity-commit-3"
_LAYOUT_MAGIC = b"infinity-layout-1"
_HEAD_MAGIC = b"infinity-shards-1"
_SUMS_MAGIC = b"infinity-sums-1"
#: The most that a record, or the description of where versions lie, is expected to have (bytes).
_MOST_NBYTES = 2**32
#: The same of the sums of blocks, a thousandth of the data files (bytes).
_MOST_SUMS_NBYTES = 2**38
_MOST_PARAMETERS, _MOST_RANKS = 2**24, 2**20
#: Places of a unit: the recorded, the committed and the next one, and one that is being saved.
MOST_PLACES = 4
#: What the fields of a file raise that has the right checksum and other content.
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, RecursionError)


class CorruptRecordError(InfinityError, OSError):
    """A commit record is there, but is not what was written."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """Names of one rank's files in a run's directories.

    Attributes:
        generation: Grows when a run goes on with files of another layout: on another number of ranks.
        run: A random number that the files of a run have in common.
    """

    rank: int
    generation: int = 1
    run: int = 0

    def data(self, drive: int) -> str:
        """The file of the rank's shards on drive number ``drive``."""
        return f"rank{self.rank}-{self.generation}-{drive}.bin"

    def record(self, place: int) -> str:
        """The commit record in ``place``, 0 or 1."""
        return f"rank{self.rank}-{self.generation}.commit{place}"

    def invalid(self) -> str:
        """The last record, while committed versions are written in place."""
        return f"rank{self.rank}-{self.generation}.invalid"

    def layout(self, number: int) -> str:
        """Where versions lie; there is a new one when extents were allocated since the last record."""
        return f"rank{self.rank}-{self.generation}.layout{number}"

    def sums(self, place: int) -> str:
        """Sums of the blocks of the data files, as they are with the record in ``place``."""
        return f"rank{self.rank}-{self.generation}.sums{place}"


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """After ``step``, unit ``i`` of this rank is in its version ``versions[i]``.

    Attributes:
        counts: Updates that each parameter of each unit has had.
        layout: Number and CRC-32 of the file that says where versions lie.
        world_size: Ranks that share the units.
        state: The small state of the step; see :func:`pack`.
        files: Those that it belongs to.
        number: One more than the record before; see [Note: files that were put back].
        sums: CRC-32 of the file with the sums of blocks; None: none were kept.
    """

    step: int
    versions: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...] = ()
    layout: tuple[int, int] = (0, 0)
    world_size: int = 1
    state: bytes = field(default=b"", repr=False)
    files: RankFiles = RankFiles(0)
    number: int = 0
    sums: int | None = None


def pack(state: Mapping[str, Any]) -> bytes:
    """Return a small state (containers of tensors, numbers and text) as bytes.

    Whether it has something else, which cannot be read back, is found when the record is written.

    Raises:
        StateError: It has something that cannot even be written.
    """
    file = io.BytesIO()
    try:
        torch.save(dict(state), file)
    except Exception as error:
        raise _not_kept(error) from error
    return file.getvalue()


def _not_kept(error: Exception) -> StateError:
    return StateError(
        "the state of the optimizer, or of what it follows, cannot be kept with a commit "
        f"({first_line(error)}). Tensors, numbers, text, and lists and dictionaries of them can: let "
        "state_dict() return these"
    )


def unpack(data: bytes) -> dict[str, Any]:
    """Return what :func:`pack` was given; runs no code from ``data``."""
    state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    return state


def write_commit(path: Path, record: CommitRecord, *, synced: bool = True) -> None:
    """Replace the record at ``path``; a crash at any moment leaves the old one or the new one.

    What the record speaks of must be on disk before (:meth:`infinity.nvme.volume.Volume.sync`).
    One writer per path.

    Args:
        synced: The record survives a power cut, too.

    Raises:
        OSError: It could not be written; the old record is whole.
    """
    fields = {
        "step": record.step,
        "versions": record.versions,
        "counts": [each[0] if len(set(each)) == 1 else each for each in record.counts],
        "numbers": [len(each) for each in record.counts],
        "layout": record.layout,
        "world_size": record.world_size,
        "files": [record.files.rank, record.files.generation, record.files.run],
        "number": record.number,
        "sums": record.sums,
    }
    body = json.dumps(fields, separators=(",", ":")).encode()
    _replace(path, _MAGIC, (body, record.state), synced=synced)


def read_commit(path: Path) -> CommitRecord | None:
    """The record at ``path``; None when nothing was committed.

    Raises:
        CorruptRecordError: The file is not a whole record.
    """
    parts = _read(path, _MAGIC, 2, "not a whole commit record")
    if parts is None:
        return None
    body, state = parts
    try:
        return _record_of(json.loads(body), state)
    except _MALFORMED as error:
        raise CorruptRecordError(f"{path}: not a whole commit record ({first_line(error)})") from error


def _record_of(fields: dict[str, Any], state: bytes) -> CommitRecord:
    """Return a record from its fields; raise one of ``_MALFORMED`` if they are not a record's."""
    numbers = whole_numbers(fields["numbers"], most=_MOST_PARAMETERS)
    if sum(numbers) > _MOST_PARAMETERS:
        raise ValueError(f"{sum(numbers)} parameters")
    counts = tuple(
        whole_numbers(each if isinstance(each, list) else [each] * number)
        for each, number in zip(fields["counts"], numbers, strict=True)
    )
    step, world_size, number = whole_numbers([fields["step"], fields["world_size"], fields["number"]])
    layout, crc = whole_numbers(fields["layout"])
    rank, generation, run = whole_numbers(fields["files"])
    sums = None if fields["sums"] is None else whole_numbers([fields["sums"]])[0]
    if not 1 <= world_size <= _MOST_RANKS:
        raise ValueError(f"{world_size} ranks")
    versions, files = (
        whole_numbers(fields["versions"], most=MOST_PLACES - 1),
        RankFiles(rank, generation, run),
    )
    return CommitRecord(step, versions, counts, (layout, crc), world_size, state, files, number, sums)


def whole_numbers(values: Any, most: int = 2**63) -> tuple[int, ...]:
    """Return numbers from a file.

    Raises:
        ValueError: They are no list of whole numbers from 0 to ``most``.
    """
    if not isinstance(values, list) or not all(type(each) is int and 0 <= each <= most for each in values):
        raise ValueError("something else than whole numbers")
    return tuple(values)


def write_layout(path: Path, layout: Mapping[str, Any], *, synced: bool) -> int:
    """Write the description of where versions lie; return its CRC-32.

    Raises:
        OSError: It could not be written.
    """
    return _replace(path, _LAYOUT_MAGIC, (json.dumps(layout, separators=(",", ":")).encode(),), synced=synced)


def read_layout(path: Path, crc: int) -> dict[str, Any]:
    """Return the description at ``path``.

    Raises:
        CorruptRecordError: It is missing, not whole, or another one than that of CRC-32 ``crc``.
    """
    parts = _read(path, _LAYOUT_MAGIC, 1, "not a whole description of where states lie")
    if parts is None or zlib.crc32(parts[0]) != crc:
        raise CorruptRecordError(f"{path}: missing, or not the one that the commit record speaks of")
    try:
        layout: dict[str, Any] = json.loads(parts[0])
    except _MALFORMED as error:
        raise CorruptRecordError(f"{path}: not a description of where states lie") from error
    return layout


def read_sums(path: Path, crc: int, drives: int) -> list[bytes]:
    """Return the sums of the blocks of each data file at ``path``.

    Raises:
        CorruptRecordError: The file is missing, not whole, or another one than that of CRC-32 ``crc``.
    """
    parts = _read(path, _SUMS_MAGIC, drives, "not the whole sums of blocks", _MOST_SUMS_NBYTES)
    if parts is None or _crc32(parts) != crc or any(len(part) % 4 for part in parts):
        raise CorruptRecordError(f"{path}: missing, or not the one that the commit record speaks of")
    return parts


def head_of(files: RankFiles, drive: int, oldest: int) -> bytes:
    """The first block of a data file: see [Note: files that were put back]."""
    body = b"%d %d %d %d %d" % (files.rank, files.generation, files.run, drive, oldest)
    return b"%s %08x %s\n" % (_HEAD_MAGIC, zlib.crc32(body), body)


def read_head(path: Path) -> tuple[RankFiles, int, int]:
    """Return the owner of a data file, its drive, and the number of the oldest record that is whole.

    Raises:
        CorruptRecordError: Its first block is not what was written.
    """
    with open(open_regular(path), "rb") as file:
        magic, _, rest = file.read(BLOCK_NBYTES).partition(b"\n")[0].partition(b" ")
    crc, _, body = rest.partition(b" ")
    if magic != _HEAD_MAGIC or crc != b"%08x" % zlib.crc32(body):
        raise CorruptRecordError(f"{path}: not a file of shards, or damaged at its beginning")
    rank, generation, run, drive, oldest = (int(each) for each in body.split(b" "))
    return RankFiles(rank, generation, run), drive, oldest


def _replace(path: Path, magic: bytes, parts: Sequence[bytes], *, synced: bool) -> int:
    """Write a file of checked parts under a draft's name, then give it its own; return the CRC-32."""
    crc = _crc32(parts)
    sizes = " ".join(str(len(part)) for part in parts)
    draft = path.with_name(path.name + ".new")
    with open(create_file(draft), "wb") as file:
        file.write(b"%s %08x %s\n" % (magic, crc, sizes.encode()))
        file.writelines(parts)
        file.flush()
        if synced:
            os.fsync(file.fileno())
    draft.replace(path)
    if synced:
        sync(path.parent)  # the new name, too, survives a power cut
    return crc


def _remove(path: Path) -> None:
    """Remove a record, if there is one.

    Raises:
        DirectoryError: It may not be removed.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise DirectoryError(error.errno or errno.EIO, f"removing {path}", path) from error


def _crc32(parts: Sequence[bytes]) -> int:
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


def _read(
    path: Path, magic: bytes, count: int, what: str, most_nbytes: int = _MOST_NBYTES
) -> list[bytes] | None:
    try:
        data = read_file(path, most_nbytes)
    except FileNotFoundError:
        return None
    try:
        head, _, rest = data.partition(b"\n")
        found, crc, *sizes = head.split(b" ")
        lengths = [int(size) for size in sizes]
        if found != magic or len(lengths) != count or sum(lengths) != len(rest):
            raise ValueError("its first line")
        if len(crc) != 8 or b"%08x" % zlib.crc32(rest) != crc:
            raise ValueError("checksum")
    except ValueError as error:
        raise CorruptRecordError(
            f"{path}: {what} ({len(data)} bytes, {error}); the drive lost or changed it"
        ) from error
    parts, at = [], 0
    for length in lengths:
        parts.append(rest[at : at + length])
        at += length
    return parts


#: Part of the time that commits may cost.
_MOST_COST = 0.035
#: Steps with what a commit writes beside them, and as many without, after which the interval is chosen.
_SEEN_STEPS = 4


class CommitInterval:
    """Which steps are recorded: every one, or as few as keep the cost of commits low.

    Beside its record a commit writes what lies in host memory, while the next step computes. How much longer
    that step takes is measured: at first every second step is recorded. Then every n-th is, so that commits
    take at most 3.5 % of the time. Where all states live on NVMe, every step is recorded.

    Args:
        every: The number of steps; None: as measured.

    Attributes:
        every: Steps from one record to the next.
        chosen: It stays as it is.
    """

    def __init__(self, every: int | None) -> None:
        self.wanted, self.every, self.chosen = every, 1, False
        self._ended_s: float | None = None
        self._recorded = False  # the step before the one that runs now
        self._with_s: list[float] = []
        self._without_s: list[float] = []

    def ends(self, step: int) -> bool:
        """Whether ``step`` is recorded."""
        return step % self.every == 0

    def step(self, *, recorded: bool) -> None:
        """Note that a step ends; if it is ``recorded``, its commit is written beside the next one."""
        if self.chosen:
            return
        now_s = time.monotonic()
        if self._ended_s is not None:
            (self._with_s if self._recorded else self._without_s).append(now_s - self._ended_s)
        self._ended_s, self._recorded = now_s, recorded

    @property
    def measured(self) -> int | None:
        """The number of steps that this rank would choose; None: too few were seen."""
        if min(len(self._with_s), len(self._without_s)) < _SEEN_STEPS:
            return None
        step_s = median(self._without_s)
        return max(1, math.ceil((median(self._with_s) - step_s) / (_MOST_COST * step_s)))


class Commits:
    """Writes one rank's commit records, on a thread of its own.

    It has more attributes than other classes: the files that make up a record (the record, its layout, its
    sums, the heads of the data files) change together, in an order that survives a crash at any point.

    Args:
        folder: Where records lie.
        files: Their names.
        sync: Makes the drive keep what was written (:meth:`infinity.nvme.volume.Volume.sync`); None: what
            survives the process is enough.
        mark: Writes to the heads of the data files which record is the oldest that is whole.
        sums: Returns the sums of the blocks of each data file, which are kept with a record; None: none are.

    Attributes:
        obsolete: Called once with the first record behind all ranks: what an earlier generation had may go.
        last: The record that is being written, or was written last.
        stands: There is a record, written or being written, that is valid.
    """

    def __init__(
        self, folder: Path, files: RankFiles, sync: Callable[[], None] | None = None,
        mark: Callable[[int], object] = lambda oldest: None,
        sums: Callable[[], Sequence[bytes]] | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.files, self._sync, self._mark, self._sums = folder, files, sync, mark, sums
        self.obsolete: Callable[[], None] = lambda: None
        self._thread = ThreadPoolExecutor(1, "infinity-commit")
        self.last = Transfer()  # the record that is being written, or was
        self.last.finish()
        self._lock = threading.Lock()  # guards what follows
        self._places: list[int] = []  # of the records on disk, the newest last
        self._layout = 0, 0  # number and CRC-32
        self._written = False
        self._number = self._oldest = 0  # of the last record, and of the oldest that is whole
        self.stands = False

    def take_over(self, record: CommitRecord, place: int) -> None:
        """Go on behind a record that was found in ``place``; all ranks have one of its step.

        A later one, which not all ranks had, must go: its versions are about to be written again.

        Raises:
            DirectoryError: It may not be removed.
        """
        for name in (self.files.record(1 - place), self.files.invalid()):
            _remove(self.folder / name)
        self._places, self._layout, self.stands = [place], record.layout, True
        self._number, self._oldest = record.number, record.number - 1

    def add(
        self, record: CommitRecord, updates: Sequence[Transfer], layout: Mapping[str, Any] | None = None
    ) -> None:
        """Write ``record`` as soon as every update has landed; never, if one fails.

        Args:
            layout: Where versions lie, if that has changed since the last record.
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
        """Block until the last record is on disk.

        Raises:
            DiskError: An update of that step failed; the record before it stands.
            StateError: Its small state could not be read back; likewise.
        """
        self.last.wait()

    @property
    def any(self) -> bool:
        """Whether there is a record on disk."""
        return bool(self._places)

    def retire(self) -> None:
        """Remove the record before the last one, whose versions are about to be written; any thread.

        The last one is on disk on every rank.
        """
        with self._lock:
            old, self._places = self._places[:-1], self._places[-1:]
            for place in old:
                _remove(self.folder / self.files.record(place))
            self._forget_before(self._number)
            if old:
                self._remove_old_layouts()
            if self._written:
                obsolete, self.obsolete = self.obsolete, lambda: None
                obsolete()

    def invalidate(self) -> None:
        """Remove every record: committed versions are about to be written in place.

        Raises:
            DiskError: The update of the last step failed.
        """
        self.wait()
        with self._lock:
            self.stands = False
            places, self._places = self._places, []
            for place in places[:-1]:
                _remove(self.folder / self.files.record(place))
            for place in places[-1:]:
                (self.folder / self.files.record(place)).replace(self.folder / self.files.invalid())
            self._forget_before(self._number + 1)
            if self._sync is not None:
                self._sync()
                sync(self.folder)

    def close(self) -> None:
        """End the thread, after the record that is being written."""
        self._thread.shutdown()

    def _write(
        self, record: CommitRecord, updates: Sequence[Transfer], layout: Mapping[str, Any] | None
    ) -> None:
        for update in updates:
            update.wait()  # ended: raises at once if it failed
        if record.state:
            try:
                unpack(record.state)  # here, beside training: it takes milliseconds
            except Exception as error:
                raise _not_kept(error) from error
        place = 1 - self._places[-1] if self._places else 0
        path, synced = self.folder / self.files.record(place), self._sync is not None
        try:
            if self._sync is not None:
                self._sync()
            if layout is not None:
                number = self._layout[0] + 1
                crc = write_layout(self.folder / self.files.layout(number), layout, synced=synced)
                self._layout = number, crc
            with self._lock:
                if self._oldest < self._number:  # nothing was retired since the last record
                    path.unlink(missing_ok=True)
                    self._forget_before(self._number)
                sums = (
                    None
                    if self._sums is None
                    else _replace(
                        self.folder / self.files.sums(place), _SUMS_MAGIC, self._sums(), synced=synced
                    )
                )
                record = replace(
                    record, layout=self._layout, files=self.files, number=self._number + 1, sums=sums
                )
                write_commit(path, record, synced=synced)
                self._number += 1
                if not self._places:
                    (self.folder / self.files.invalid()).unlink(missing_ok=True)
                self._places, self._written = [*self._places[-1:], place], True
        except DiskError:
            raise
        except OSError as error:
            action, code = "writing the commit record", error.errno or errno.EIO
            raise DiskError(code, action, path, offset=0, nbytes=0) from error

    def _forget_before(self, number: int) -> None:
        """Note that records before ``number``, which are removed, are whole no longer."""
        if self._oldest < number:
            self._mark(number)
            self._oldest = number

    def _remove_old_layouts(self) -> None:
        for number in range(self._layout[0] - 1, 0, -1):
            path = self.folder / self.files.layout(number)
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                continue
            return
