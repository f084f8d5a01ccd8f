"""Commit records: which version of each unit is the committed one, after every step.

[Note: the commit barrier]
The updates of step t+1 write over what step t-1 committed. So the first of them waits until the record
of step t is on disk; by then the forward pass of step t+1 has waited for nearly all updates of step t
anyway. A process that is killed at any moment leaves a record whose versions are whole.
"""

import errno
import json
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from infinity.core.errors import DiskError, InfinityError
from infinity.core.files import create_file, sync
from infinity.core.transfer import Transfer
from infinity.shards.storage import Storage

_MAGIC = "infinity-commit-1"


class CorruptRecordError(InfinityError, OSError):
    """A commit record is there, but is not what was written."""


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """After ``step``, unit ``i`` of this rank is in its version ``versions[i]``."""

    step: int
    versions: tuple[int, ...]


def write_commit(path: Path, record: CommitRecord) -> None:
    """Replace the record at ``path``; a crash at any moment leaves the old one or the new one.

    What the record speaks of must be on disk before (:meth:`infinity.nvme.volume.Volume.sync`).
    One writer per path.

    Raises:
        OSError: It could not be written; the old record is whole.
    """
    body = json.dumps({"step": record.step, "versions": record.versions}, separators=(",", ":"))
    text = f"{_MAGIC} {zlib.crc32(body.encode()):08x} {body}\n"
    draft = path.with_name(path.name + ".new")
    with open(create_file(draft), "wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync(path.parent)  # the new name, too, survives a power cut


def read_commit(path: Path) -> CommitRecord | None:
    """The record at ``path``; None when nothing was committed.

    Raises:
        CorruptRecordError: The file is not a whole record.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        magic, crc, body = data.decode().rstrip("\n").split(" ", 2)
        if magic != _MAGIC or int(crc, 16) != zlib.crc32(body.encode()):
            raise ValueError("checksum")
        fields = json.loads(body)
        return CommitRecord(int(fields["step"]), tuple(int(version) for version in fields["versions"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptRecordError(
            f"{path}: not a whole commit record ({len(data)} bytes, {error}); "
            "the drive lost or changed it: restore a checkpoint"
        ) from error


class Commits:
    """Writes one rank's commit records, on a thread of its own.

    Args:
        path: The record.
        sync: Makes the drive keep what was written (:meth:`infinity.nvme.volume.Volume.sync`).
    """

    def __init__(self, path: Path, sync: Callable[[], None]) -> None:
        self.path, self._sync = path, sync
        self._thread = ThreadPoolExecutor(1, "infinity-commit")
        self._last: Transfer | None = None

    @classmethod
    def open(cls, storage: Storage) -> "Commits | None":
        """Return the writer of a rank's commit records; None where no unit has two versions on disk."""
        if storage.volume is None or storage.commit_record is None or storage.memory.versions < 2:
            return None
        return cls(storage.commit_record, storage.volume.sync)

    def add(self, record: CommitRecord, updates: Sequence[Transfer]) -> None:
        """Write ``record`` as soon as every update has landed; never, if one fails."""
        self.wait()
        written = self._last = Transfer()
        left = [len(updates) + 1]
        lock = threading.Lock()

        def landed() -> None:
            with lock:
                left[0] -= 1
                if left[0]:
                    return
            self._thread.submit(written.run, partial(self._write, record, updates))

        for update in updates:
            update.then(landed)
        landed()

    def wait(self) -> None:
        """Block until the last record is on disk.

        Raises:
            DiskError: An update of that step failed; the record before it stands.
        """
        if self._last is not None:
            self._last.wait()

    def close(self) -> None:
        """End the thread, after the record that is being written."""
        self._thread.shutdown()

    def _write(self, record: CommitRecord, updates: Sequence[Transfer]) -> None:
        for update in updates:
            update.wait()  # ended: raises at once if it failed
        self._sync()
        try:
            write_commit(self.path, record)
        except OSError as error:
            action, code = "writing the commit record", error.errno or errno.EIO
            raise DiskError(code, action, self.path, offset=0, nbytes=0) from error
