"""Preallocated files, one per directory, that hand out extents striped over all of them."""

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infinity.core.errors import (
    ChangedCheckpointError,
    ChangedFileError,
    DirectoryError,
    DiskError,
    InfinityError,
)
from infinity.core.files import create_file, is_named, open_found
from infinity.core.nbytes import BLOCK_NBYTES, Extent, Piece, aligned

_MIB = 2**20
#: Files grow in steps of this, so that small extents do not cost a system call each (bytes).
_GROWTH_NBYTES = 64 * _MIB


@dataclass(slots=True)
class Space:
    """Tracks taken ranges of one file: best fit among free ones, else at the end. No file is touched."""

    end: int = 0  # the first byte that was never taken
    taken_nbytes: int = 0
    _free: dict[int, int] = field(default_factory=dict)  # offset -> nbytes, no two touch

    @classmethod
    def of(cls, taken: Iterable[tuple[int, int]]) -> "Space":
        """Return a space in which these ranges (offset, bytes) are taken; a ValueError if two overlap."""
        space = cls()
        for offset, nbytes in sorted(taken):
            if offset < space.end:
                raise ValueError(f"bytes {offset} to {space.end} are taken twice")
            if offset > space.end:
                space._free[space.end] = offset - space.end
            space.end, space.taken_nbytes = offset + nbytes, space.taken_nbytes + nbytes
        return space

    def extend(self, end: int) -> None:
        """Extend the space to the end of a longer file: the rest is free, and holds something."""
        if end > self.end:
            self.end, start = end, self.end
            self.taken_nbytes += end - start
            self.give(start, end - start)

    def fits(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` were given back in one place."""
        return any(size >= nbytes for size in self._free.values())

    def take(self, nbytes: int) -> tuple[int, bool]:
        """Return the offset of a range, and whether it was never taken before."""
        self.taken_nbytes += nbytes
        fitting = [(size, offset) for offset, size in self._free.items() if size >= nbytes]
        if not fitting:
            self.end += nbytes
            return self.end - nbytes, True
        size, offset = min(fitting)
        del self._free[offset]
        if size > nbytes:
            self._free[offset + nbytes] = size - nbytes
        return offset, False

    def give(self, offset: int, nbytes: int) -> None:
        """Give back a range, which joins its free neighbors; raise a ValueError if not all of it is taken."""
        before = next((start for start, size in self._free.items() if start + size == offset), None)
        inside = any(start < offset + nbytes and offset < start + size for start, size in self._free.items())
        if inside or offset + nbytes > self.end:
            raise ValueError(f"bytes {offset} to {offset + nbytes} are not taken; each is given back once")
        self.taken_nbytes -= nbytes
        if before is not None:
            nbytes += self._free.pop(before)
            offset = before
        nbytes += self._free.pop(offset + nbytes, 0)
        self._free[offset] = nbytes


@dataclass(slots=True)
class VolumeFile:
    """Owns one file of a volume, and the space in it."""

    path: Path
    fd: int
    direct: bool  # past the page cache
    nbytes: int = 0  # that the file system has reserved, or that are only read
    space: Space = field(default_factory=Space)
    sealed: bool = False  # it is never written again, and may lose its name
    stamp: tuple[int, ...] | None = None  # of a checkpoint's file; None: the file is the run's

    def take(self, nbytes: int, what: str) -> tuple[int, bool]:
        """Take a range for which the file system has promised room; see :meth:`Space.take`."""
        end = 0 if self.space.fits(nbytes) else self.space.end + nbytes
        for reserved in (aligned(end, _GROWTH_NBYTES), end):
            if end <= self.nbytes:
                break
            more = reserved - self.nbytes
            try:
                os.posix_fallocate(self.fd, self.nbytes, more)
            except OSError as error:
                os.ftruncate(self.fd, self.nbytes)  # a failed call may have reserved a part of it
                if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                    os.ftruncate(self.fd, end)  # no promise to be had: a full disk shows at a write
                    reserved = end
                elif reserved == end:
                    action = f"reservation of room for {what}"
                    raise DiskError(
                        error.errno or errno.EIO, action, self.path, offset=self.nbytes, nbytes=more
                    ) from error
                else:
                    continue
            self.nbytes = reserved
        return self.space.take(nbytes)

    def zero(self, piece: Piece) -> None:
        """Write zeros, or raise a DiskError; blocking."""
        with mmap.mmap(-1, min(_MIB, piece.nbytes)) as zeros, memoryview(zeros) as view:
            at, end = piece.offset, piece.offset + piece.nbytes
            while at < end:
                with disk_errors("write of zeros", self.path, offset=at, nbytes=end - at):
                    at += os.pwrite(self.fd, view[: min(len(view), end - at)], at)

    def check(self) -> None:
        if self.fd < 0:
            return
        with disk_errors("check", self.path):
            if self.stamp is not None:
                try:
                    now = _stamp_of(self.path.stat())
                except FileNotFoundError:
                    raise ChangedCheckpointError(self.path, "was removed") from None
                if now[:2] != self.stamp[:2]:
                    raise ChangedCheckpointError(self.path, "was replaced")
                if now != self.stamp:
                    what = f"was written ({self.stamp[2]} bytes before, {now[2]} now)"
                    raise ChangedCheckpointError(self.path, what)
                return
            nbytes = self.nbytes  # first: another thread makes the file larger before it
            if not (self.sealed or is_named(self.fd, self.path)):
                raise ChangedFileError(self.path, "was removed or replaced")
            if (size := os.fstat(self.fd).st_size) < nbytes:
                raise ChangedFileError(self.path, f"was cut to {size} bytes of at least {nbytes}")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _stamp_of(found: os.stat_result) -> tuple[int, ...]:
    """Return the identity and state of a file: device, inode, size, time of the last change."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def open_sealed(path: Path, fd: int) -> VolumeFile:
    """Open a checkpoint's file, which is open as ``fd``, to read it past the page cache."""
    own = Path(f"/proc/self/fd/{fd}")  # the same file, surely
    again, direct = _past_the_cache(own, os.open, os.O_RDONLY | os.O_CLOEXEC)
    found = os.fstat(again)
    return VolumeFile(path, again, direct, found.st_size, sealed=True, stamp=_stamp_of(found))


def open_own(path: Path, space: Space | None = None) -> VolumeFile:
    """Open a file that an interrupted run has left, in which ``space`` is taken; None: only for reading."""
    fd, direct = open_direct(path, open_found, "opening")
    nbytes = os.fstat(fd).st_size
    if space is None:
        return VolumeFile(path, fd, direct, nbytes, Space(nbytes, nbytes), sealed=True)
    space.extend(nbytes // BLOCK_NBYTES * BLOCK_NBYTES)
    return VolumeFile(path, fd, direct, nbytes, space)


@contextlib.contextmanager
def disk_errors(
    action: str, path: Path | str, kind: type[DiskError] = DiskError, /, **where: int
) -> Iterator[None]:
    """Raise errors of the file system inside, but for those of this package, as a DiskError or ``kind``."""
    try:
        yield
    except InfinityError:
        raise
    except OSError as error:
        raise kind(error.errno or errno.EIO, action, path, **where) from error


def open_direct(path: Path, open_file: Callable[[Path, int], int], how: str) -> tuple[int, bool]:
    """Return a descriptor to read and write a file, and whether it bypasses the page cache; else raise."""
    with disk_errors(f"{how} the file {path}", path, DirectoryError):
        return _past_the_cache(path, open_file, os.O_RDWR)


def _past_the_cache(path: Path, open_file: Callable[[Path, int], int], flags: int) -> tuple[int, bool]:
    try:
        return open_file(path, flags | os.O_DIRECT), True
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    return open_file(path, flags), False


def read_piece(fd: int, path: Path, piece: Piece, view: memoryview | mmap.mmap) -> None:
    """Read a piece, or a file's last block from its beginning on; DiskError: not all of it; blocking."""
    where = {"offset": piece.offset, "nbytes": piece.nbytes}
    with disk_errors("read", path, **where):
        moved = os.preadv(fd, [view], piece.offset)
    if moved < piece.nbytes:
        raise DiskError(errno.EIO, "read", path, **where, moved=moved)


class Volume:
    """Allocates extents in files, one in each directory. Any thread may call.

    A fresh range reads as zeros; one that was freed holds what it held, unless zeros are wanted. The folders
    of ``paths`` exist and are this user's own; ``weights`` are speeds of their drives, by default equal.
    ``found``: the files are there; for each the space that its extents take.
    """

    def __init__(
        self, paths: Sequence[Path], weights: Sequence[float] | None = None,
        found: Sequence[Space] | None = None,
    ) -> None:  # fmt: skip
        weights = weights or [1.0] * len(paths)
        #: Called with a range that was allocated, and reads as zeros.
        self.on_zeros: Callable[[Piece], object] = lambda zeros: None
        self._weights = [weight / sum(weights) for weight in weights]
        self._lock = threading.Lock()
        self._files: list[VolumeFile] = []
        try:
            for number, path in enumerate(paths):
                if found is None:
                    self._files.append(VolumeFile(path, *open_direct(path, create_file, "making")))
                else:
                    self._files.append(open_own(path, found[number]))
        except BaseException:
            self.close()
            raise
        self.peak_nbytes = self.allocated_nbytes  # the most at one time

    def __len__(self) -> int:
        return len(self._files)

    def add_sealed(self, files: Sequence[VolumeFile]) -> int:
        """Add files that are only read; return the number of the first."""
        first = len(self._files)
        self._files += files
        self.peak_nbytes = max(self.peak_nbytes, self.allocated_nbytes)
        return first

    def drop_sealed(self, first: int, count: int) -> None:
        """Close files that :meth:`add_sealed` added and nothing reads any more; they stay on disk."""
        for file in self._files[first : first + count]:
            file.close()
            file.space = Space()

    def fd(self, file: int) -> int:
        return self._files[file].fd

    def path(self, file: int) -> Path:
        return self._files[file].path

    @property
    def notes(self) -> list[str]:
        """Return a line for people about each directory whose files go through the page cache."""
        folders = dict.fromkeys(file.path.parent for file in self._files if not file.direct)
        return [
            f"{folder}: this file system has no O_DIRECT, so bytes go through the page cache: slower, and "
            "memory beyond the budget; a local ext4 or xfs drive in memory.nvme has it"
            for folder in folders
        ]

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of all extents that were allocated and not freed."""
        return sum(file.space.taken_nbytes for file in self._files)

    def allocate(self, nbytes: int, *, what: str, zeroed: bool = False) -> Extent:
        """Take ``nbytes``, whole blocks that no other extent has; the file system has reserved them.

        From 2 MiB per file on, an extent lies on every file, in proportion to the weights and in steps of 1
        MiB; a smaller one whole on the file that holds least for its weight. ``what`` names the owner;
        ``zeroed`` writes zeros where the range held something before.
        """
        if nbytes <= 0 or nbytes % BLOCK_NBYTES:
            raise ValueError(
                f"{what}: an extent has a positive multiple of {BLOCK_NBYTES} bytes; got {nbytes}"
            )
        taken: dict[Piece, bool] = {}  # whether it was never taken before
        with self._lock:
            try:
                for file, part in self._parts(nbytes):
                    offset, fresh = self._files[file].take(part, what)
                    taken[Piece(file, offset, part)] = fresh
            except BaseException:
                for piece in taken:
                    self._files[piece.file].space.give(piece.offset, piece.nbytes)
                raise
            self.peak_nbytes = max(self.peak_nbytes, self.allocated_nbytes)
        if zeroed:
            for piece, fresh in taken.items():
                if not fresh:
                    self._files[piece.file].zero(piece)
                self.on_zeros(piece)
        return Extent(tuple(taken))

    def _parts(self, nbytes: int) -> list[tuple[int, int]]:
        """Return ``(file, nbytes)`` of each part of an extent, in order."""
        count = len(self._weights)
        if count > 1 and nbytes < 2 * _MIB * count:
            load = [self._files[file].space.taken_nbytes / self._weights[file] for file in range(count)]
            return [(load.index(min(load)), nbytes)]
        parts, start, share = [], 0, 0.0
        for file, weight in enumerate(self._weights):
            share += weight
            last = file == count - 1
            stop = nbytes if last else int(share * nbytes / _MIB) * _MIB
            if stop > start:
                parts.append((file, stop - start))
                start = stop
        return parts

    def free(self, extent: Extent) -> None:
        """Give back an extent, once; nothing may be in flight to or from it."""
        with self._lock:
            for piece in extent.pieces:
                self._files[piece.file].space.give(piece.offset, piece.nbytes)

    def sync(self) -> None:
        """Block until everything written so far survives a power cut; raise a DiskError if it cannot."""
        for file in self._files[: len(self._weights)]:
            with disk_errors("sync", file.path):
                os.fdatasync(file.fd)

    def check(self) -> None:
        """Raise a ChangedFileError unless the files are what they were; two system calls each."""
        for file in self._files:
            file.check()

    def close(self) -> None:
        """Close the files, which stay on disk. May be called twice."""
        for file in self._files:
            file.close()
