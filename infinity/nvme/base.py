"""A frozen base on NVMe: written once, sealed, and read by every run of the same checkpoint.

[Note: one copy]
The directory ``base-<key>`` beside the runs' own has a file of each rank for each directory of
``memory.nvme``. The key says what the bytes are made of. A file is the extents, then a manifest with the
place and the SHA-256 of every chunk, then the manifest's own digest; the same manifest ends all files of
a rank, so files that do not belong together are known. It is written as a file of the run that makes
it, so whoever is killed on the way leaves nothing but his own directory, and gets its name, by a rename,
when it is whole and on disk.

[Note: who reads, who writes]
Readers hold ``flock`` shared on the file itself, so a base that nobody holds is unused, and its directory
may be removed; a removed file stays readable for those who have it open. One run at a time writes a base
of a rank: it holds the lock beside it, and touches that as it gets on. Others wait for it, and when it
stops getting on, they keep a copy of their own.

[Note: damage]
Nobody reads a chunk in training whose digest was not compared since this run opened the base. A chunk
that differs costs its unit's place in the base: the unit is read from the checkpoint again. The file loses
its name, so that the next run writes a new one; who reads it goes on.
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

from infinity.core.errors import DiskError, LockedError
from infinity.core.extent import BLOCK_NBYTES, Extent, Piece
from infinity.nvme.errors import DamagedBaseError, DirectoryError
from infinity.nvme.run_directory import is_named, lock_file, try_lock
from infinity.nvme.volume import SealedFile

_MAGIC = b"infinity-base-1\n"
#: What follows the manifest: its SHA-256, its size, and the magic (bytes).
_TAIL_NBYTES = 32 + 8 + len(_MAGIC)
_MOST_MANIFEST_NBYTES = 2**30
#: A writer that did not get on for so long is not waited for (s).
_PATIENCE_S = 60.0
#: Who looks for unused bases locks them for a moment; tries, and seconds between them.
_TRIES, _PAUSE_S = 20, 0.02


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
        key: What the base is made of, as hexadecimal digits.
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

    # --- reading -----------------------------------------------------------------------------

    def find(self) -> SealedBase | None:
        """The base; None: this run may write it, if :attr:`claimed`, or keeps a copy of its own.

        See [Note: who reads, who writes]. Blocking, while another run writes it.

        Raises:
            DamagedBaseError: There is one, but not a whole one. It lost its name, and is claimed.
            DirectoryError: The directory cannot be made.
        """
        while True:
            with contextlib.suppress(DamagedBaseError):  # or somebody renames its files just now
                if found := self._open():
                    return found
            try:
                self._claim()
            except LockedError:
                if not self._gets_on():
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
        """Whether this run writes the base, and nobody else does."""
        return self._lock >= 0

    def get_on(self) -> None:
        """Tell who waits that the base is still being written."""
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
        """Take away the names that still are those of ``files``; who has them open reads on."""
        for file, path in zip(files, self.paths, strict=True):
            if is_named(file.fd, path):
                path.unlink(missing_ok=True)
        self._remove_folders()

    def _claim(self) -> None:
        folder = self.folders[0]
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = lock_file(self._lock_path)
        except LockedError:
            raise
        except FileNotFoundError:  # who had it removed the folder just now
            raise LockedError(errno.EWOULDBLOCK, "claimed", str(self._lock_path)) from None
        except OSError as error:
            raise DirectoryError(
                error.errno or errno.EIO, f"making the base's directory {folder}", folder
            ) from error

    def _gets_on(self) -> bool:
        try:
            return time.time() - self._lock_path.stat().st_mtime < _PATIENCE_S
        except FileNotFoundError:
            return True  # it is done

    def _remove_folders(self) -> None:
        for folder in self.folders:
            with contextlib.suppress(OSError):  # somebody has files in it
                folder.rmdir()

    def _open(self) -> SealedBase | None:
        """The files, locked; None when one has no name.

        Raises:
            DamagedBaseError: They are not what was sealed.
        """
        with contextlib.ExitStack() as opened:
            fds = []
            for path in self.paths:
                fd = _open_locked(path)
                if fd is None:
                    return None
                opened.callback(os.close, fd)
                fds.append(fd)
            manifest, ends = self._read_manifest(fds)
            files = [
                SealedFile(path, fd, _bypass_cache(fd), end)
                for path, fd, end in zip(self.paths, fds, ends, strict=True)
            ]
            shards = _shards_of(manifest, ends, self.paths[0])
            opened.pop_all()
            return SealedBase(tuple(files), shards)

    def _read_manifest(self, fds: Sequence[int]) -> tuple[dict[str, Any], list[int]]:
        """The manifest that all files end with, and the bytes before it in each."""
        read = [_manifest_of(fd, path) for fd, path in zip(fds, self.paths, strict=True)]
        body = read[0][0]
        for (other, _), path in zip(read, self.paths, strict=True):
            if other != body:
                raise DamagedBaseError(path, "its manifest is not that of the first file")
        ends = [end for _, end in read]
        manifest = _parsed(body, self.paths[0])
        if manifest.get("key") != self.key or manifest.get("nbytes") != ends:
            raise DamagedBaseError(self.paths[0], "its manifest speaks of other files")
        return manifest, ends

    # --- writing -----------------------------------------------------------------------------

    def publish(
        self, drafts: Sequence[tuple[Path, int]], shards: Mapping[int, Chunks]
    ) -> tuple[SealedFile, ...]:
        """Seal what was written and give it the base's names; blocking.

        Args:
            drafts: Path and bytes of extents of each file; on the file systems of ``roots``.
            shards: What they hold.

        Returns:
            The files, open for reading and locked.

        Raises:
            DiskError: They could not be written; nothing has the base's name then.
        """
        ends = [nbytes for _, nbytes in drafts]
        listed = {str(index): [_listed(chunk) for chunk in chunks] for index, chunks in shards.items()}
        manifest = {"key": self.key, "nbytes": ends, "shards": listed}
        body = json.dumps(manifest, separators=(",", ":")).encode()
        tail = body + hashlib.sha256(body).digest() + len(body).to_bytes(8, "little") + _MAGIC
        files: list[SealedFile] = []
        path, nbytes = drafts[0]
        try:
            for (path, nbytes), final in zip(drafts, self.paths, strict=True):
                fd = _seal(path, nbytes, tail)
                files.append(SealedFile(final, fd, _bypass_cache(fd), nbytes))
            # The first file last: whoever finds it finds all.
            for (path, _), final in reversed(list(zip(drafts, self.paths, strict=True))):
                final.parent.mkdir(mode=0o700, exist_ok=True)
                path.rename(final)
                _sync_folder(final.parent)
        except OSError as error:
            if len(files) == len(self.paths):
                self.unlink(files)
            for file in files:
                os.close(file.fd)
            raise DiskError(
                error.errno or errno.EIO, "sealing of the base", path, offset=nbytes, nbytes=len(tail)
            ) from error
        return tuple(files)


def _open_locked(path: Path) -> int | None:
    """A descriptor for reading ``path``, locked against removal; None when it has no such name."""
    for _ in range(_TRIES):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DamagedBaseError(path, error.strerror or str(error)) from error
        if try_lock(fd, fcntl.LOCK_SH) and is_named(fd, path):
            return fd
        os.close(fd)
        time.sleep(_PAUSE_S)
    return None


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
        os.fsync(file.fileno())  # also what came past the page cache: the drive may hold it back
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# --- the manifest --------------------------------------------------------------------------------


def _manifest_of(fd: int, path: Path) -> tuple[bytes, int]:
    """The manifest at the end of a file, and how many bytes come before it."""
    try:
        size = os.fstat(fd).st_size
        tail = os.pread(fd, _TAIL_NBYTES, max(0, size - _TAIL_NBYTES))
        nbytes = int.from_bytes(tail[32:40], "little")
        end = size - _TAIL_NBYTES - nbytes
        if tail[40:] != _MAGIC or end < 0 or nbytes > _MOST_MANIFEST_NBYTES:
            raise DamagedBaseError(path, f"it does not end as a base does ({size} bytes)")
        body = os.pread(fd, nbytes, end)
    except OSError as error:
        if isinstance(error, DamagedBaseError):
            raise
        raise DamagedBaseError(path, f"its manifest cannot be read: {error.strerror}") from error
    if hashlib.sha256(body).digest() != tail[:32]:
        raise DamagedBaseError(path, "its manifest is not what was written")
    return body, end


def _parsed(body: bytes, path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DamagedBaseError(path, f"its manifest is not one ({error})") from error
    if not isinstance(manifest, dict):
        raise DamagedBaseError(path, "its manifest is not one")
    return manifest


def _listed(chunk: BaseChunk) -> list[Any]:
    """A chunk for the manifest."""
    pieces = [[[p.file, p.offset, p.nbytes] for p in extent.pieces] for extent in (chunk.weight, chunk.exact)]
    return [*pieces, chunk.sha256]


def _shards_of(manifest: dict[str, Any], ends: Sequence[int], path: Path) -> dict[int, Chunks]:
    """What a manifest lists, every piece inside its file.

    Raises:
        DamagedBaseError: It lists something else.
    """
    try:
        return {
            int(index): tuple(
                BaseChunk(_extent(weight, ends), _extent(exact, ends), str(sha256))
                for weight, exact, sha256 in chunks
            )
            for index, chunks in manifest["shards"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedBaseError(path, f"its manifest is not one ({error})") from error


def _extent(listed: Any, ends: Sequence[int]) -> Extent:
    pieces = tuple(Piece(*each) for each in listed)
    for piece in pieces:
        numbers = piece.file, piece.offset, piece.nbytes
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"{piece} is no place")
        if piece.offset % BLOCK_NBYTES or piece.nbytes % BLOCK_NBYTES or not piece.nbytes:
            raise ValueError(f"{piece} is not whole blocks")
        if piece.file >= len(ends) or piece.offset + piece.nbytes > ends[piece.file]:
            raise ValueError(f"{piece} is outside its file")
    return Extent(pieces)
