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
            lock = _lock(path / f"rank{rank}.lock")
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
        locks = list(path.glob(_LOCKS))
        if locks and not any(_is_held(lock) for lock in locks):
            found.append(path)
    return found


def leftovers_line(roots: Iterable[Path | str]) -> str:
    """What to tell people about dead runs' files, and how to remove them; empty when there are none."""
    found = [path for root in roots for path in find_leftovers(Path(root).resolve())]
    if not found:
        return ""
    nbytes = sum(file.stat().st_blocks * 512 for path in found for file in path.glob("*"))
    paths = " ".join(shlex.quote(str(path)) for path in found)
    runs = "a run" if len(found) == 1 else f"{len(found)} runs"
    return (
        f"{runs} ended without removing {format_nbytes(nbytes)} of files, which nobody uses; "
        f"to remove them: rm -r {paths}"
    )


def _lock(path: Path) -> int:
    """Descriptor of the lock file, locked.

    Raises:
        LockedError: Another process holds it.
    """
    for _ in range(_TRIES):
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if _try_lock(lock, fcntl.LOCK_EX) and _is_named(lock, path):
                _sign(lock)
                lock, locked = -1, lock
                return locked
        finally:
            if lock >= 0:
                os.close(lock)
        time.sleep(_PAUSE_S)
    raise LockedError(errno.EWOULDBLOCK, _who(path), str(path))


def _try_lock(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_named(lock: int, path: Path) -> bool:
    """Whether the locked file still is the one at ``path``: its owner may have removed it."""
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
        owner = json.loads(path.read_text())
        text = f"process {owner['pid']} on {owner['host']}, started {owner['started']}"
    except (OSError, ValueError, KeyError, TypeError):
        text = "another process"
    return (
        f"{path.parent} is in use by {text}; wait for that run or end it, or give this one another "
        "run.name or memory.nvme"
    )


def _is_held(path: Path) -> bool:
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return True  # its run is removing it, or it is another user's: nothing to offer
    try:
        return not _try_lock(lock, fcntl.LOCK_SH)
    finally:
        os.close(lock)
