"""Preallocated files, one per directory, that hand out extents striped over all of them."""

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infinity.core.errors import (
    ChangedCheckpointError,
    ChangedFileError,
    DirectoryError,
    DiskError,
    UnsafePathError,
)
from infinity.core.files import create_file, is_named, open_found
from infinity.core.nbytes import BLOCK_NBYTES, Extent, Piece, aligned

_MIB = 2**20
#: Files grow in steps of this, so that small extents do not cost a system call each (bytes).
_GROWTH_NBYTES = 64 * _MIB


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A file that is only read.

    Attributes:
        fd: Open for reading; the volume that takes the file in closes it.
        direct: It bypasses the page cache.
        nbytes: Bytes of its extents, which lie at its beginning.
        stamp: The stamp (:func:`stamp_of`) of a file that is not the run's own; None: the file is the run's.
    """

    path: Path
    fd: int
    direct: bool
    nbytes: int
    stamp: tuple[int, ...] | None = None


def stamp_of(found: os.stat_result) -> tuple[int, ...]:
    """The identity and state of a file: device, inode, size, time of the last change."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def open_sealed(path: Path, fd: int) -> SealedFile:
    """Open a file that another program made, and that is open as ``fd``, for reading past the page cache.

    Raises:
        OSError: It cannot be opened again.
    """
    own, flags, direct = f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC, True  # the same file, surely
    try:
        again = os.open(own, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        again, direct = os.open(own, flags), False
    found = os.fstat(again)
    return SealedFile(path, again, direct, found.st_size, stamp_of(found))


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes ``[offset, offset + nbytes)`` of a file; ``fresh`` if they are allocated for the first time."""

    offset: int
    nbytes: int
    fresh: bool


@dataclass(slots=True)
class Space:
    """Taken ranges of one file: best fit among what was given back, else at the end.

    Pure arithmetic: no file is touched.

    Attributes:
        end: The first byte that was never taken.
        taken_nbytes: Bytes that are taken now.
    """

    end: int = 0
    taken_nbytes: int = 0
    _free: dict[int, int] = field(default_factory=dict)  # offset -> nbytes, no two touch

    @classmethod
    def of(cls, taken: Iterable[tuple[int, int]]) -> "Space":
        """The space of a file in which these ranges (offset and bytes, none of them twice) are taken.

        Raises:
            ValueError: Two overlap.
        """
        space = cls()
        for offset, nbytes in sorted(taken):
            if offset < space.end:
                raise ValueError(f"bytes {offset} to {space.end} are taken twice")
            if offset > space.end:
                space._free[space.end] = offset - space.end
            space.end, space.taken_nbytes = offset + nbytes, space.taken_nbytes + nbytes
        return space

    def extend(self, end: int) -> None:
        """Let a file be longer than what is taken: the rest is free, and holds something."""
        nbytes, start = max(0, end - self.end), self.end
        self.end, self.taken_nbytes = start + nbytes, self.taken_nbytes + nbytes
        if nbytes:
            self.give(start, nbytes)

    def take(self, nbytes: int) -> Range:
        """A contiguous range of ``nbytes``."""
        self.taken_nbytes += nbytes
        fitting = [(size, offset) for offset, size in self._free.items() if size >= nbytes]
        if not fitting:
            self.end += nbytes
            return Range(self.end - nbytes, nbytes, fresh=True)
        size, offset = min(fitting)
        del self._free[offset]
        if size > nbytes:
            self._free[offset + nbytes] = size - nbytes
        return Range(offset, nbytes, fresh=False)

    def untake(self, taken: Range) -> None:
        """Undo the latest :meth:`take`: a fresh range is fresh again."""
        if taken.fresh:
            self.end -= taken.nbytes
            self.taken_nbytes -= taken.nbytes
        else:
            self.give(taken.offset, taken.nbytes)

    def give(self, offset: int, nbytes: int) -> None:
        """Give a range back; it joins its free neighbors.

        Raises:
            ValueError: Some of it is not taken.
        """
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


class Volume:
    """Files, one in each directory, in which extents are allocated. Any thread may call.

    A fresh range reads as zeros. A range that was freed and is allocated again holds what it held,
    unless zeros are asked for.

    Args:
        paths: The files; their directories exist and are this user's own.
        weights: Relative speeds of their drives; equal when None.
        found: The files are there; for each the space that its extents take. None: they are made.

    Raises:
        DirectoryError: A file cannot be made, or opened.
        ChangedFileError: A file that was found is shorter than its extents.
        ValueError: ``paths`` and ``weights`` do not fit each other.

    Attributes:
        on_zeros: Called with the number of a file and a range of it that was allocated, and reads as zeros.
    """

    def __init__(
        self, paths: Sequence[Path], weights: Sequence[float] | None = None,
        found: Sequence[Space] | None = None,
    ) -> None:  # fmt: skip
        weights = [1.0] * len(paths) if weights is None else list(weights)
        if not paths or len(paths) != len(weights) or min(weights) <= 0:
            raise ValueError(
                f"a volume needs one positive weight per path; got {weights} for {len(paths)} paths"
            )
        self.on_zeros: Callable[[int, Range], object] = lambda file, zeros: None
        self._weights = [weight / sum(weights) for weight in weights]
        self._lock = threading.Lock()
        self._peak_nbytes = 0
        self._files: list[_File] = []
        try:
            for number, path in enumerate(paths):
                made = _File(path, *_create(path)) if found is None else _found(path, found[number])
                self._files.append(made)
        except BaseException:
            self.close()
            raise
        self._peak_nbytes = self.allocated_nbytes

    def __len__(self) -> int:
        """Number of files."""
        return len(self._files)

    def add_sealed(self, files: Sequence[SealedFile]) -> int:
        """Take in files that are only read; returns the number of the first."""
        first = len(self._files)
        self._files += [_sealed(file) for file in files]
        self._peak_nbytes = max(self._peak_nbytes, self.allocated_nbytes)
        return first

    def drop_sealed(self, first: int, count: int) -> None:
        """Close files that :meth:`add_sealed` took in, which nothing reads any more; they stay on disk."""
        for file in self._files[first : first + count]:
            file.close()
            file.seal(0, None)

    def fd(self, file: int) -> int:
        return self._files[file].fd

    def path(self, file: int) -> Path:
        return self._files[file].path

    @property
    def buffered(self) -> bool:
        """Return whether some file goes through the page cache."""
        return any(not file.direct for file in self._files)

    @property
    def notes(self) -> list[str]:
        """A line for people about each directory whose files go through the page cache."""
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

    @property
    def peak_nbytes(self) -> int:
        """The most that was allocated at one time (bytes)."""
        return self._peak_nbytes

    def allocate(self, nbytes: int, *, what: str, zeroed: bool = False) -> Extent:
        """Take ``nbytes`` that no other extent has; the file system has reserved them.

        From 2 MiB per file on, an extent lies on every file, in proportion to the weights and in steps
        of 1 MiB; a smaller one lies whole on the file that holds least for its weight.

        Args:
            nbytes: A positive multiple of ``BLOCK_NBYTES``.
            what: The owner of the bytes, for messages.
            zeroed: Write zeros where the range held something before.

        Raises:
            DiskError: The file system is full, or the process may not write that large a file.
            ValueError: ``nbytes`` is not such a multiple.
        """
        if nbytes <= 0 or nbytes % BLOCK_NBYTES:
            raise ValueError(
                f"{what}: an extent has a positive multiple of {BLOCK_NBYTES} bytes; got {nbytes}"
            )
        with self._lock:
            taken = self._take(nbytes, what)
            self._peak_nbytes = max(self._peak_nbytes, self.allocated_nbytes)
        if zeroed:
            for file, piece in taken:
                if not piece.fresh:
                    self._files[file].zero(piece)
                self.on_zeros(file, piece)
        return Extent(tuple(Piece(file, piece.offset, piece.nbytes) for file, piece in taken))

    def free(self, extent: Extent) -> None:
        """Give an extent back; nothing may be in flight to or from it.

        Raises:
            ValueError: It was given back before.
        """
        with self._lock:
            for piece in extent.pieces:
                self._files[piece.file].space.give(piece.offset, piece.nbytes)

    def sync(self) -> None:
        """Return when everything written so far survives a power cut.

        Raises:
            DiskError: The drive reports an error.
        """
        for file in self._files[: len(self._weights)]:
            if file.fd < 0:  # it was dropped
                continue
            try:
                os.fdatasync(file.fd)
            except OSError as error:
                raise DiskError(error.errno or errno.EIO, "sync", file.path, offset=0, nbytes=0) from error

    def check(self) -> None:
        """See that the files are those that were made, and no shorter; two system calls each.

        Raises:
            ChangedFileError: Another program truncated, replaced or removed one.
            ChangedCheckpointError: One of a checkpoint is not what it was.
            DiskError: The file system does not answer.
        """
        for file in self._files:
            file.check()

    def close(self) -> None:
        """Close the files; they stay on disk. May be called twice."""
        for file in self._files:
            file.close()

    def _take(self, nbytes: int, what: str) -> list[tuple[int, Range]]:
        taken: list[tuple[int, Range]] = []
        try:
            for file, part in self._parts(nbytes):
                taken.append((file, self._files[file].take(part, what)))
        except BaseException:
            for file, piece in taken:
                self._files[file].space.untake(piece)
            raise
        return taken

    def _parts(self, nbytes: int) -> list[tuple[int, int]]:
        """``(file, nbytes)`` of each part of an extent, in order."""
        count = len(self._weights)
        if count > 1 and nbytes < 2 * _MIB * count:
            return [(min(range(count), key=self._load), nbytes)]
        parts, start, share = [], 0, 0.0
        for file, weight in enumerate(self._weights):
            share += weight
            last = file == count - 1
            stop = nbytes if last else int(share * nbytes / _MIB) * _MIB
            if stop > start:
                parts.append((file, stop - start))
                start = stop
        return parts

    def _load(self, file: int) -> float:
        return self._files[file].space.taken_nbytes / self._weights[file]


class _File:
    """One file of a volume and the space in it."""

    def __init__(self, path: Path, fd: int, direct: bool) -> None:
        self.path, self.fd, self.direct = path, fd, direct
        self.space, self._reserved, self._sealed = Space(), 0, False
        self._stamp: tuple[int, ...] | None = None

    def take(self, nbytes: int, what: str) -> Range:
        taken = self.space.take(nbytes)
        try:
            self._reserve(self.space.end, what)
        except BaseException:
            self.space.untake(taken)
            raise
        return taken

    def _reserve(self, end: int, what: str) -> None:
        """Make the file system promise room up to ``end``."""
        if end <= self._reserved:
            return
        ends = (aligned(end, _GROWTH_NBYTES), end)
        for attempt, reserved in enumerate(ends):
            nbytes = reserved - self._reserved
            try:
                os.posix_fallocate(self.fd, self._reserved, nbytes)
            except OSError as error:
                # A failed call may have reserved a part of it.
                os.ftruncate(self.fd, self._reserved)
                if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                    os.ftruncate(self.fd, end)  # no promise to be had: a full disk shows at a write
                    self._reserved = end
                    return
                if attempt + 1 < len(ends):
                    continue
                action = f"reservation of room for {what}"
                raise DiskError(
                    error.errno or errno.EIO, action, self.path, offset=self._reserved, nbytes=nbytes
                ) from error
            self._reserved = reserved
            return

    def zero(self, piece: Range) -> None:
        """Write zeros; blocking.

        Raises:
            DiskError: They could not be written.
        """
        with mmap.mmap(-1, min(_MIB, piece.nbytes)) as zeros, memoryview(zeros) as view:
            at, end = piece.offset, piece.offset + piece.nbytes
            while at < end:
                try:
                    moved = os.pwrite(self.fd, view[: min(len(view), end - at)], at)
                except OSError as error:
                    raise DiskError(
                        error.errno or errno.EIO, "write of zeros", self.path, offset=at, nbytes=end - at
                    ) from error
                at += moved

    def seal(self, nbytes: int, stamp: tuple[int, ...] | None) -> None:
        """Take the file as one that is never written again, and whose name may go unless it has a stamp."""
        self._sealed, self._stamp = True, stamp
        if stamp is None:
            self.space, self._reserved = Space(nbytes, nbytes), nbytes

    def check(self) -> None:
        """See :meth:`Volume.check`."""
        if self.fd < 0:
            return
        if self._stamp is not None:
            self._check_stamp(self._stamp)
            return
        try:
            named = self._sealed or is_named(self.fd, self.path)
            reserved, size = self._reserved, os.fstat(self.fd).st_size
        except OSError as error:
            raise DiskError(error.errno or errno.EIO, "check", self.path, offset=0, nbytes=0) from error
        if not named:
            raise ChangedFileError(self.path, "was removed or replaced")
        if size < reserved:
            raise ChangedFileError(self.path, f"was cut to {size} bytes of at least {reserved}")

    def _check_stamp(self, stamp: tuple[int, ...]) -> None:
        try:
            named = stamp_of(self.path.stat())
        except FileNotFoundError:
            raise ChangedCheckpointError(self.path, "was removed") from None
        except OSError as error:
            raise DiskError(error.errno or errno.EIO, "check", self.path, offset=0, nbytes=0) from error
        if named[:2] != stamp[:2]:
            raise ChangedCheckpointError(self.path, "was replaced")
        if named != stamp:
            raise ChangedCheckpointError(self.path, f"was written ({stamp[2]} bytes before, {named[2]} now)")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _sealed(file: SealedFile) -> _File:
    taken = _File(file.path, file.fd, file.direct)
    taken.seal(file.nbytes, file.stamp)
    return taken


def _found(path: Path, space: Space) -> _File:
    file = _File(path, *open_direct(path, open_found, "opening"))
    file.space, file._reserved = space, os.fstat(file.fd).st_size
    if file._reserved < space.end:
        file.close()
        raise ChangedFileError(path, f"was cut to {file._reserved} bytes of at least {space.end}")
    space.extend(file._reserved // BLOCK_NBYTES * BLOCK_NBYTES)
    return file


def _create(path: Path) -> tuple[int, bool]:
    """Descriptor of a new file, and whether it bypasses the page cache."""
    return open_direct(path, create_file, "making")


def open_direct(path: Path, open_file: Callable[[Path, int], int], how: str) -> tuple[int, bool]:
    """Open a file for reading and writing; its descriptor, and whether it bypasses the page cache.

    Args:
        open_file: Called with the path and the flags.
        how: The word in messages, ``making`` or ``opening``.

    Raises:
        DirectoryError: It cannot be opened.
    """
    try:
        try:
            return open_file(path, os.O_RDWR | os.O_DIRECT), True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        return open_file(path, os.O_RDWR), False
    except UnsafePathError:
        raise
    except OSError as error:
        raise DirectoryError(error.errno or errno.EIO, f"{how} the file {path}", path) from error
