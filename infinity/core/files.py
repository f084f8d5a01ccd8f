"""Paths that users write; locks on files and directories, and names that survive a power cut.

[Note: one kind of lock]
Every lock of the package is ``flock`` on an open descriptor, exclusive or shared. The kernel gives it back
however the process ends, so a lock that can be taken was left by a dead process of this machine. A holder may
unlink the file while it holds the lock: the next one then finds that its descriptor has no name any more, and
opens the path again.
"""

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from infinity.core.errors import LockedError, RecipeError

#: Programs that look for unused files hold their locks for a moment; waited for, and between two tries (s).
PATIENCE_S = 0.4
_PAUSE_S = 0.02
#: The longest name of a file, and the longest path, that Linux takes (bytes).
_NAME_NBYTES, _PATH_NBYTES = 255, 4095


def expand_user(path: str) -> str:
    """Return a path, or a pattern of paths, with ``~`` expanded.

    Raises:
        ValueError: No file can have this path; says why.
    """
    if "\0" in path:
        raise ValueError("the character NUL cannot be in it")
    if path.startswith("~"):
        user = path.partition("/")[0]
        try:
            path = str(Path(path).expanduser())
        except RuntimeError as error:
            raise ValueError(f"there is no home directory {user}; a file of that name is ./{user}") from error
    raw = os.fsencode(path)
    if len(raw) > _PATH_NBYTES or any(len(name) > _NAME_NBYTES for name in raw.split(b"/")):
        raise ValueError(f"a path has at most {_PATH_NBYTES} bytes, and each name in it {_NAME_NBYTES}")
    return path


def user_path(path: str | Path, what: str) -> Path:
    """Return the path that a user gave as ``what``, with ``~`` expanded.

    Raises:
        RecipeError: No file can have this path; says why.
    """
    try:
        return Path(expand_user(os.fspath(path)))
    except ValueError as error:
        raise RecipeError(f"{what} {str(path)[:200]!r}: {error}") from error


def lock_file(path: Path, *, patience_s: float = PATIENCE_S) -> int:
    """Make the file ``path``, lock it exclusively, and write into it which process holds it.

    Args:
        patience_s: How long a conflicting lock is waited for (s); ``math.inf``: until it is free.

    Returns:
        A descriptor; the lock lasts until it is closed.

    Raises:
        LockedError: Another process holds the lock; says which.
        OSError: The file cannot be made.
    """
    lock = open_locked(path, os.O_RDWR | os.O_CREAT, patience_s=patience_s)
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(owner).encode() + b"\n", 0)
    return lock


def open_locked(path: Path, flags: int, *, shared: bool = False, patience_s: float = PATIENCE_S) -> int:
    """Open ``path`` and lock it; the descriptor is that of the file which has this name now.

    Raises:
        LockedError: Another process holds a conflicting lock for longer than ``patience_s``.
        OSError: It cannot be opened.
    """
    deadline = time.monotonic() + patience_s
    while True:
        fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        try:
            if try_lock(fd, shared=shared) and is_named(fd, path):
                fd, locked = -1, fd
                return locked
        finally:
            if fd >= 0:
                os.close(fd)
        if time.monotonic() >= deadline:
            raise LockedError(errno.EWOULDBLOCK, f"locked by {lock_owner(path)}", str(path))
        time.sleep(_PAUSE_S)


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file or directory; False if another process holds a conflicting lock."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path, *, shared: bool = False) -> bool:
    """Whether a process holds a lock that conflicts with a ``shared`` or an exclusive one.

    True as well for a file that is gone, or that this user may not open.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return True
    try:
        return not try_lock(fd, shared=shared)
    finally:
        os.close(fd)


def is_named(fd: int, path: Path) -> bool:
    """Whether an open file still is the one at ``path``."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def lock_owner(path: Path) -> str:
    """The process that wrote itself into a lock file, for messages."""
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        return f"process {owner['pid']} on {owner['host']}, started {owner['started']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def sync(path: Path) -> None:
    """Return when a file's bytes, or the names in a directory, survive a power cut.

    Raises:
        OSError: The drive reports an error.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
