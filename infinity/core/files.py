"""Paths that users write, files where other users may write, their records, locks, and lasting names.

[Note: a name is not a file]
In a directory that several users write, a name may be another user's link to a third file. So a file is made
anew, without following a link, after whatever has its name is removed (:func:`create_file`), in a directory
that is this user's alone (:func:`own_directory`), in one where no other user can replace it
(:func:`shared_directory`). A file that is found has its owner checked on the open descriptor
(:func:`open_found`). Links in a path that a user gives are followed, but only a regular file of limited size
is read (:func:`read_file`): a pipe would block for ever and ``/dev/zero`` never end.

[Note: one kind of lock]
Every lock is ``flock`` on an open descriptor, which the kernel gives back however the process ends. A holder
may unlink the file: the next one finds that its descriptor has no name, and opens the path again.
"""

import errno
import fcntl
import functools
import math
import os
import socket
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TextIO, get_args, get_origin, get_type_hints

from infinity.core.errors import LockedError, RecipeError, UnsafePathError

#: The longest wait for a lock, which a search for unused files holds for a moment; and between tries (s).
PATIENCE_S = 0.4
_PAUSE_S = 0.02
#: The owner, in a container without root, of /tmp and of all other files of the machine's root.
_UNMAPPED_UID = 65534
#: The longest text that a lock file is expected to hold (bytes).
_MOST_OWNER_NBYTES = 4096
#: The longest name of a file, and the longest path, that Linux takes (bytes).
_NAME_NBYTES, _PATH_NBYTES = 255, 4095
_hints: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)


def create_file(path: Path, flags: int = os.O_WRONLY) -> int:
    """Return a descriptor of a new file of mode 0600, which replaces what had its name."""
    path.unlink(missing_ok=True)
    return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def write_file(path: Path, text: str) -> None:
    """Write a file of mode 0600 that replaces what had its name; a kill leaves one of the two."""
    draft = path.with_name(f"{path.name}.new")
    with open(create_file(draft), "w", encoding="utf-8") as file:
        file.write(text)
    draft.replace(path)


def append_file(path: Path) -> TextIO:
    """Open the text file ``path`` to append, as :func:`open_found` does; a new one gets mode 0600."""
    return open(open_found(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8")


def open_found(path: Path, flags: int) -> int:
    """Open a file in a directory that others may write; UnsafePathError: it is a link or another user's.

    With ``os.O_CREAT`` it may be made; an existing one must be a file without another name.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UnsafePathError(path, "is a symbolic link, not a file of this run: remove it") from error
    found, why = os.fstat(fd), ""
    if found.st_uid != os.geteuid():
        why = f"belongs to another user (uid {found.st_uid}): remove it, or give another directory"
    elif flags & os.O_CREAT and (not stat.S_ISREG(found.st_mode) or found.st_nlink > 1):
        why = "is a link to another file, or no file: remove it"
    if why:
        os.close(fd)
        raise UnsafePathError(path, why)
    return fd


def own_directory(path: Path) -> None:
    """Make the directory ``path`` with mode 0700, or give it this mode if it is safely this user's."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    fd = open_found(path, os.O_RDONLY)
    try:
        found = os.fstat(fd)
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        if found.st_mode & stat.S_IWOTH:
            raise UnsafePathError(
                path,
                f"is writable by all users (mode {found.st_mode & 0o7777:o}), so its files may be another "
                "user's: remove it",
            )
        if found.st_mode & 0o077:
            os.fchmod(fd, 0o700)
    finally:
        os.close(fd)


def shared_directory(path: Path) -> None:
    """Make the directory ``path``, or check that only this user and root can replace what lies in it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    sticky = bool(found.st_mode & stat.S_ISVTX)
    trusted = (os.geteuid(), 0, _UNMAPPED_UID) if sticky else (os.geteuid(), 0)
    advice = "give a directory of your own, which will be made if it does not exist"
    if found.st_uid not in trusted:
        raise UnsafePathError(
            path, f"belongs to another user (uid {found.st_uid}), who could replace what lies in it: {advice}"
        )
    if found.st_mode & stat.S_IWOTH and not sticky:
        raise UnsafePathError(
            path,
            f"is writable by all users (mode {found.st_mode & 0o7777:o}), who could replace what lies in "
            f"it: {advice}, or say chmod o-w (or +t, as on /tmp)",
        )


def open_regular(path: Path) -> int:
    """Return a descriptor for reading a regular file; links are followed, and nothing blocks."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # a NUL byte
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        what = "Is a directory, not a regular file" if stat.S_ISDIR(mode) else "not a regular file"
        raise OSError(errno.EINVAL, what, str(path))
    return fd


def read_file(path: Path, most_nbytes: int) -> bytes:
    """Return the bytes of a regular file; raise an OSError, also if it has more than ``most_nbytes``."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # It may be growing; room for the most that it may have would be taken at once.
        content = b"" if size > most_nbytes else file.read(min(size + 2**16, most_nbytes + 1))
    if max(size, len(content)) > most_nbytes:
        raise OSError(errno.EFBIG, f"has {size} bytes; at most {most_nbytes} are read", str(path))
    return content


def expand_user(path: str) -> str:
    """Return a path or pattern with ``~`` expanded; raise a ValueError if no file can have this path."""
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
    """Return the path that a user gave as ``what``, with ``~`` expanded; raise a RecipeError if invalid."""
    try:
        return Path(expand_user(os.fspath(path)))
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{what} {str(path)[:200]!r}: {error}") from error


def is_file(path: str | Path) -> bool:
    """Return whether there is a regular file; never raises an OSError."""
    try:
        return Path(path).is_file()
    except OSError:  # such as a name that is too long
        return False


def lock_file(path: Path, *, patience_s: float = PATIENCE_S) -> int:
    """Make the file ``path``, lock it until its descriptor is closed, and write into it who holds it."""
    lock = open_locked(path, os.O_RDWR | os.O_CREAT, patience_s=patience_s)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{_this_process()}{time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode(), 0)
    return lock


def open_locked(path: Path, flags: int, *, shared: bool = False, patience_s: float = PATIENCE_S) -> int:
    """Open this user's ``path``, and lock what has this name now, or raise a LockedError with the holder."""
    deadline = time.monotonic() + patience_s
    while True:
        fd = open_found(path, flags)
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
    """Return whether a process holds a conflicting lock, or the file cannot be opened by this user."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return True
    try:
        return not try_lock(fd, shared=shared)
    finally:
        os.close(fd)


def is_own(path: Path) -> bool:
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode)


def is_named(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def lock_owner(path: Path) -> str:
    """Return, for messages, the process that wrote itself into a lock file, or what else is there."""
    if path.is_symlink():
        return f"a link in the place of {path.name}, which is to be removed"
    owner = _read_owner(path)
    return owner if owner.startswith("process ") else "another process"


def is_locked_here(path: Path) -> bool:
    """Return whether this process wrote itself into a lock file."""
    return _read_owner(path).startswith(_this_process())


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}, started "


def _read_owner(path: Path) -> str:
    try:
        return read_file(path, _MOST_OWNER_NBYTES).decode().strip()
    except (OSError, ValueError):
        return ""


def sync(path: Path) -> None:
    """Block until a file's bytes, or the names in a directory, survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def record_of(kind: Any, given: Mapping[str, Any]) -> Any:
    """Return a record with those of ``given`` that are its fields; others have their defaults."""
    return kind(**{name: built(hint, given[name]) for name, hint in _hints(kind).items() if name in given})


def built(wanted: Any, given: Any) -> Any:
    """Return ``given`` in the type ``wanted``; a record is its fields by name, all of them, or the first.

    A mapping may be pairs, and a number that is not finite None. Raises ValueError, TypeError or KeyError.
    """
    if type(given) is wanted:
        return given
    kinds, origin = get_args(wanted), get_origin(wanted)
    if origin is UnionType:
        return given if type(given) in kinds else built(kinds[0], given)
    if origin is tuple and kinds[-1] is not ...:
        return tuple(map(built, kinds, given))
    if kinds and issubclass(origin, Mapping):
        pairs = given.items() if isinstance(given, dict) else ((key, value) for *key, value in given)
        return {built(kinds[0], key): built(kinds[1], value) for key, value in pairs}
    if kinds:
        make = origin if origin in (tuple, frozenset) else list
        return make(built(kinds[0], each) for each in given)
    if not is_dataclass(wanted) and not hasattr(wanted, "_fields"):
        return math.nan if wanted is float and given is None else wanted(given)
    hints = _hints(wanted)
    if isinstance(given, list):
        given = dict(zip(hints, given, strict=False))
    elif different := hints.keys() ^ given.keys():
        raise ValueError(f"keys {sorted(different)} are missing or unknown")
    return record_of(wanted, given)
