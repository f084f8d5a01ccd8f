"""The commit record: which version of each unit belongs to the last whole step."""

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from infinity.core.errors import InfinityError
from infinity.core.files import sync

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
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
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
