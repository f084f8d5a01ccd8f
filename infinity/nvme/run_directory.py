"""A run owns a directory named by its id, and each of its ranks a lock in it.

[Note: who is alive]
A rank holds ``flock`` on its file ``rank<r>.lock`` as long as its process lives: the kernel gives the
lock back, however the process ends. So a directory whose locks nobody holds is a dead run's, on the
machine that asks; the file's text says which process had it, for people.
"""

import errno
import fcntl
import json
import os
import secrets
import shlex
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from infinity.core.errors import LockedError
from infinity.core.nbytes import format_nbytes
from infinity.nvme.errors import DirectoryError

#: Directories of frozen bases that runs share; see :mod:`infinity.nvme.base`.
_BASES = "base-" + 32 * "[0-9a-f]"
_LOCKS = "rank*.lock"
#: A lock may be probed by :func:`find_leftovers` for a moment; tries, and seconds between them.
_TRIES, _PAUSE_S = 20, 0.02


def new_run_id() -> str:
    """An id that no other run has, and that sorts by time: ``20260131-235959-1a2b3c``."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


class RunDirectory:
    """The directory of one run, locked for one rank of it.

    Attributes:
        path: The directory.
    """

    def __init__(self, path: Path, rank: int, lock: int) -> None:
        self.path, self.rank = path, rank
        self._lock = lock  # descriptor; -1 after remove
        self._files: set[Path] = set()

    @classmethod
    def create(cls, root: Path, run_id: str, rank: int) -> "RunDirectory":
        """Make ``root/run_id``, or join it, and lock it for ``rank``.

        Raises:
            LockedError: A live process holds the rank's place in it: another run has this id.
            DirectoryError: It cannot be made or written.
        """
        path = Path(root).resolve() / run_id
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
            lock = lock_file(path / f"rank{rank}.lock")
        except LockedError:
            raise
        except OSError as error:
            action = f"making the run's directory {path}"
            raise DirectoryError(error.errno or errno.EIO, action, path) from error
        return cls(path, rank, lock)

    def file(self, name: str) -> Path:
        """Path of this rank's file ``name``, which :meth:`remove` removes."""
        if not name or name == ".." or Path(name).name != name:
            raise ValueError(f"{name!r}: the name of a file, without folders, was wanted")
        path = self.path / name
        self._files.add(path)
        return path

    def remove(self) -> None:
        """Remove this rank's files and its lock, and the directory with the last rank's."""
        if self._lock < 0:
            return
        for path in self._files:
            path.unlink(missing_ok=True)
        # Unlinked while it is held: whoever waits for it finds a file without a name, and looks again.
        (self.path / f"rank{self.rank}.lock").unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = -1
        try:
            self.path.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise


def find_leftovers(root: Path) -> list[Path]:
    """Directories below ``root`` of runs that ended without removing them; nothing is changed."""
    found = []
    for path in sorted(Path(root).glob("*/")):
        locks = [] if path.match(_BASES) else list(path.glob(_LOCKS))
        if locks and not any(_is_held(lock) for lock in locks):
            found.append(path)
    return found


def find_unused_bases(root: Path) -> list[Path]:
    """Directories below ``root`` of frozen bases that no run reads or writes; nothing is changed."""
    found = []
    for path in sorted(Path(root).glob(f"{_BASES}/")):
        files = [*path.glob("*.base"), *path.glob(_LOCKS)]
        if files and not any(_is_held(file, fcntl.LOCK_EX) for file in files):
            found.append(path)
    return found


def leftovers_line(roots: Iterable[Path | str]) -> str:
    """What to tell people about files that nobody uses, and how to remove them; empty when there are none."""
    places = [Path(root).resolve() for root in roots]
    lines = []
    if found := [path for root in places for path in find_leftovers(root)]:
        runs = "a run" if len(found) == 1 else f"{len(found)} runs"
        lines.append(
            f"{runs} ended without removing {_size_of(found)} of files, which nobody uses; "
            f"to remove them: {_removal_of(found)}"
        )
    if found := [path for root in places for path in find_unused_bases(root)]:
        lines.append(
            f"{_size_of(found)} of frozen bases are there that no run uses now; a run of the same checkpoint "
            f"starts from them; to remove them: {_removal_of(found)}"
        )
    return "\n".join(lines)


def _size_of(folders: Iterable[Path]) -> str:
    return format_nbytes(sum(file.stat().st_blocks * 512 for path in folders for file in path.glob("*")))


def _removal_of(folders: Iterable[Path]) -> str:
    return "rm -r " + " ".join(shlex.quote(str(path)) for path in folders)


def lock_file(path: Path) -> int:
    """Descriptor of the lock file at ``path``, locked and signed.

    Raises:
        LockedError: Another process holds it.
    """
    for _ in range(_TRIES):
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if try_lock(lock, fcntl.LOCK_EX) and is_named(lock, path):
                _sign(lock)
                lock, locked = -1, lock
                return locked
        finally:
            if lock >= 0:
                os.close(lock)
        time.sleep(_PAUSE_S)
    raise LockedError(errno.EWOULDBLOCK, _who(path), str(path))


def try_lock(lock: int, kind: int) -> bool:
    """Lock an open file, ``LOCK_SH`` or ``LOCK_EX``; returns whether nobody stands against it."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_named(lock: int, path: Path) -> bool:
    """Whether an open file still is the one at ``path``: its owner may have removed it."""
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False


def _sign(lock: int) -> None:
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(owner).encode() + b"\n", 0)


def _who(path: Path) -> str:
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        text = f"process {owner['pid']} on {owner['host']}, started {owner['started']}"
    except (OSError, ValueError, KeyError, TypeError):
        text = "another process"
    return (
        f"{path.parent} is in use by {text}; wait for that run or end it, or give this one another "
        "run.name or memory.nvme"
    )


def _is_held(path: Path, kind: int = fcntl.LOCK_SH) -> bool:
    """Whether somebody stands against a lock of this kind."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return True  # its run is removing it, or it is another user's: nothing to offer
    try:
        return not try_lock(lock, kind)
    finally:
        os.close(lock)
