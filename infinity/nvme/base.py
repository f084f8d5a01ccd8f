"""A frozen base on NVMe: written once, sealed, and read by every run of the same checkpoint.

[Note: one copy]
The directory ``base-<key>`` beside the runs' own has a file of each rank for each directory of
``memory.nvme``. The key says what the bytes are made of. A file is the extents, then a manifest with the
place and the SHA-256 of every chunk, then the manifest's own digest; the same manifest ends all files of
a rank, so files that do not belong together are recognised. A base is written as a file of the run that
makes it, so a run that is killed on the way leaves nothing but its own directory. It gets its name, by a
rename, when it is whole and on disk.

[Note: readers and the writer]
Readers hold a shared lock on the file itself, so a base without a lock is unused, and its directory may be
removed; a removed file stays readable for runs that have it open. One run at a time writes a base of a rank:
it holds the lock beside it, and sets the time of that file as it goes on. Other runs wait for it, and when
the time stands still, they keep a copy of their own.

[Note: damage]
A chunk is used for training only after its digest was compared, since this run opened the base. A chunk
that differs costs its unit's place in the base: the unit is read from the checkpoint again. The file loses
its name, so that the next run writes a new one; runs that read it go on.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.core.errors import DirectoryError, DiskError, InfinityError, LockedError, UnsafePathError
from infinity.core.extent import BLOCK_NBYTES, Extent, Piece
from infinity.core.files import (
    is_named,
    lock_file,
    open_locked,
    own_directory,
    shared_directory,
    sync,
    try_lock,
)
from infinity.nvme.volume import SealedFile

_MAGIC = b"infinity-base-1\n"
#: After the manifest: its SHA-256, its size, and the magic (bytes).
_TAIL_NBYTES = 32 + 8 + len(_MAGIC)
_MOST_MANIFEST_NBYTES = 2**30
#: A writer that did not go on for so long is not waited for (s).
_PATIENCE_S = 60.0


class DamagedBaseError(InfinityError, OSError):
    """The file of a frozen base is not what was sealed."""

    def __init__(self, path: Path | str, what: str) -> None:
        self.path, self.what = str(path), what
        super().__init__(errno.EIO, f"the frozen base is damaged: {what}", self.path)


@dataclass(frozen=True, slots=True)
class BaseChunk:
    """A chunk of a unit's shard in a base: weights, what makes them exact, and the SHA-256 of both."""

    weight: Extent
    exact: Extent
    sha256: str


Chunks = tuple[BaseChunk, ...]


@dataclass(frozen=True, slots=True)
class SealedBase:
    """The files of one rank, open, locked, and not compared with their digests yet.

    Attributes:
        shards: Chunks by the unit's index; their files are counted from 0.
    """

    files: tuple[SealedFile, ...]
    shards: Mapping[int, Chunks]


class BaseFiles:
    """One rank's place in the base ``key``: a file in each directory of ``memory.nvme``.

    Args:
        roots: The directories.
        key: Identifies what the base is made of; hexadecimal digits.
        rank: This rank.
        world_size: Ranks that share each unit.
    """

    def __init__(self, roots: Sequence[Path | str], key: str, rank: int, world_size: int) -> None:
        self.key = key
        self.folders = [Path(root).resolve() / f"base-{key}" for root in roots]
        of, count = f"rank{rank}-of-{world_size}", len(roots)
        names = [f"{of}.{number}-of-{count}.base" for number in range(1, count + 1)]
        self.paths = [folder / name for folder, name in zip(self.folders, names, strict=True)]
        self._lock_path = self.folders[0] / f"{of}.lock"
        self._lock = -1
        self._seen = 0.0, 0.0  # the writer's last sign of life, and when it was seen first (monotonic)

    def find(self) -> SealedBase | None:
        """The base; None: this run may write it, if :attr:`claimed`, or keeps a copy of its own.

        See [Note: readers and the writer]. Blocking, while another run writes it.

        Raises:
            DamagedBaseError: There is one, but not a whole one. It lost its name, and is claimed.
            DirectoryError: The directory cannot be made.
            UnsafePathError: It is a link, another user's, or writable by all users.
        """
        for folder in self.folders:
            if folder.exists():
                own_directory(folder)
        while True:
            with contextlib.suppress(DamagedBaseError):  # or its writer renames the files just now
                if found := self._open():
                    return found
            try:
                self._claim()
            except LockedError:
                if not self._goes_on():
                    return None
                continue
            try:
                found = self._open()
            except DamagedBaseError:
                for path in self.paths:
                    path.unlink(missing_ok=True)
                raise
            if found:
                self.release()
            return found

    @property
    def claimed(self) -> bool:
        """Whether this run, and no other, writes the base."""
        return self._lock >= 0

    def heartbeat(self) -> None:
        """Show runs that wait for the base that it is still being written."""
        if self.claimed:
            os.utime(self._lock)

    def release(self) -> None:
        """Give the claim back; may be called twice."""
        if self.claimed:
            self._lock_path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1
            self._remove_folders()

    def unlink(self, files: Sequence[SealedFile]) -> None:
        """Take away the names that still are those of ``files``; runs that have them open read on."""
        for file, path in zip(files, self.paths, strict=True):
            if is_named(file.fd, path):
                path.unlink(missing_ok=True)
        self._remove_folders()

    def publish(
        self, drafts: Sequence[tuple[Path, int]], shards: Mapping[int, Chunks]
    ) -> tuple[SealedFile, ...]:
        """Seal what was written and give it the base's names; blocking.

        Args:
            drafts: Path and bytes of extents of each file; on the file systems of ``roots``.
            shards: The units in them.

        Returns:
            The files, open for reading and locked.

        Raises:
            DiskError: They could not be written; nothing has the base's name then.
        """
        manifest = {
            "key": self.key,
            "nbytes": [nbytes for _, nbytes in drafts],
            "shards": {
                index: [[_listed(chunk.weight), _listed(chunk.exact), chunk.sha256] for chunk in chunks]
                for index, chunks in shards.items()
            },
        }
        body = json.dumps(manifest, separators=(",", ":")).encode()
        tail = body + hashlib.sha256(body).digest() + len(body).to_bytes(8, "little") + _MAGIC
        files: list[SealedFile] = []
        path, nbytes = drafts[0]
        try:
            for (path, nbytes), final in zip(drafts, self.paths, strict=True):
                fd = _seal(path, nbytes, tail)
                files.append(SealedFile(final, fd, _bypass_cache(fd), nbytes))
            # The first file last: a run that finds it finds all.
            for (path, _), final in reversed(list(zip(drafts, self.paths, strict=True))):
                own_directory(final.parent)
                path.rename(final)
                sync(final.parent)
        except OSError as error:
            if len(files) == len(self.paths):
                self.unlink(files)
            for file in files:
                os.close(file.fd)
            raise DiskError(
                error.errno or errno.EIO, "sealing of the base", path, offset=nbytes, nbytes=len(tail)
            ) from error
        return tuple(files)

    def _claim(self) -> None:
        folder = self.folders[0]
        try:
            shared_directory(folder.parent)
            own_directory(folder)
            self._lock = lock_file(self._lock_path)
        except (LockedError, UnsafePathError):
            raise
        except FileNotFoundError:  # its last holder removed the folder just now
            raise LockedError(errno.EWOULDBLOCK, "claimed", str(self._lock_path)) from None
        except OSError as error:
            action = f"making the base's directory {folder}"
            raise DirectoryError(error.errno or errno.EIO, action, folder) from error

    def _goes_on(self) -> bool:
        """Whether the writer lives and goes on, or has just ended."""
        try:
            sign_s = self._lock_path.stat().st_mtime
        except FileNotFoundError:
            return True
        if sign_s != self._seen[0]:
            self._seen = sign_s, time.monotonic()
        # The second, because a clock that was set back makes the sign one of the future.
        return time.time() - sign_s < _PATIENCE_S and time.monotonic() - self._seen[1] < _PATIENCE_S

    def _remove_folders(self) -> None:
        for folder in self.folders:
            with contextlib.suppress(OSError):  # files of another rank or run are in it
                folder.rmdir()

    def _open(self) -> SealedBase | None:
        """The files, locked; None when one has no name.

        Raises:
            DamagedBaseError: They are not what was sealed.
        """
        with contextlib.ExitStack() as opened:
            files: list[SealedFile] = []
            body = b""
            for path in self.paths:
                try:
                    fd = open_locked(path, os.O_RDONLY, shared=True)
                except (FileNotFoundError, LockedError):
                    return None
                except OSError as error:
                    raise DamagedBaseError(path, error.strerror or str(error)) from error
                opened.callback(os.close, fd)
                manifest, nbytes = _read_manifest(fd, path)
                if files and manifest != body:
                    raise DamagedBaseError(path, "its manifest is not that of the first file")
                body = manifest
                files.append(SealedFile(path, fd, _bypass_cache(fd), nbytes))
            shards = self._parse(body, [file.nbytes for file in files])
            opened.pop_all()
            return SealedBase(tuple(files), shards)

    def _parse(self, body: bytes, ends: Sequence[int]) -> dict[int, Chunks]:
        """The units that a manifest lists, every piece inside its file.

        Args:
            ends: Bytes of extents in each file.

        Raises:
            DamagedBaseError: It is not that of these files, or lists something else.
        """
        try:
            manifest = json.loads(body)
            if manifest["key"] != self.key or manifest["nbytes"] != ends:
                raise ValueError("it describes other files")
            return {
                int(index): tuple(
                    BaseChunk(_extent(weight, ends), _extent(exact, ends), str(sha256))
                    for weight, exact, sha256 in chunks
                )
                for index, chunks in manifest["shards"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedBaseError(self.paths[0], f"its manifest is not valid ({error})") from error


def _bypass_cache(fd: int) -> bool:
    """Let reads bypass the page cache from now on; returns whether the file system can."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


def _seal(path: Path, nbytes: int, tail: bytes) -> int:
    """End the file with ``tail``, on disk; a descriptor for reading it, locked against removal."""
    with open(path, "r+b") as file:
        file.seek(nbytes)
        file.write(tail)
        file.flush()
        os.fchmod(file.fileno(), 0o400)
        os.fsync(file.fileno())  # also what bypassed the page cache: the drive may hold it back
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try_lock(fd, shared=True)  # only this run knows the draft
    return fd


def _read_manifest(fd: int, path: Path) -> tuple[bytes, int]:
    """The manifest at the end of a file, and how many bytes come before it."""
    try:
        size = os.fstat(fd).st_size
        tail = os.pread(fd, _TAIL_NBYTES, max(0, size - _TAIL_NBYTES))
        nbytes = int.from_bytes(tail[32:40], "little")
        end = size - _TAIL_NBYTES - nbytes
        whole = tail[40:] == _MAGIC and end >= 0 and nbytes <= _MOST_MANIFEST_NBYTES
        body = os.pread(fd, nbytes, end) if whole else b""
    except OSError as error:
        raise DamagedBaseError(path, f"its manifest cannot be read: {error.strerror}") from error
    if not whole:
        raise DamagedBaseError(path, f"it does not end as a base does ({size} bytes)")
    if hashlib.sha256(body).digest() != tail[:32]:
        raise DamagedBaseError(path, "its manifest is not what was written")
    return body, end


def _listed(extent: Extent) -> list[list[int]]:
    """An extent for the manifest."""
    return [[piece.file, piece.offset, piece.nbytes] for piece in extent.pieces]


def _extent(listed: Any, ends: Sequence[int]) -> Extent:
    pieces = tuple(Piece(*each) for each in listed)
    for piece in pieces:
        numbers = piece.file, piece.offset, piece.nbytes
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"{piece} is not a range of bytes")
        if piece.offset % BLOCK_NBYTES or piece.nbytes % BLOCK_NBYTES or not piece.nbytes:
            raise ValueError(f"{piece} is not whole blocks")
        if piece.file >= len(ends) or piece.offset + piece.nbytes > ends[piece.file]:
            raise ValueError(f"{piece} is outside its file")
    return Extent(pieces)
