"""The errors of this package. A message says what was wanted, what was got, where, and what to change.

A wrong value is also a :class:`ValueError`, and an error of a drive also an :class:`OSError`.
"""

import copy
import difflib
import errno as errno_names
import logging
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

#: The most that a message quotes of another library's (characters).
_QUOTED_CHARS = 1000
_TOO_MANY_FILES = errno_names.EMFILE, errno_names.ENFILE
_MORE_FILES = "raise the limit of open files (ulimit -n)"
#: What to do with a run that cannot go on.
BEGIN_ANEW = "to begin anew, give the run another name (in a loop of your own, run.resume=never begins anew)"


class InfinityError(Exception):
    """Base class of the errors that infinity raises."""


class RecipeError(InfinityError, ValueError):
    """Raised when a recipe has an unknown key, a wrong type or an impossible value."""


class BudgetError(InfinityError, ValueError):
    """Raised when a budget cannot hold what is needed; ``part`` is its key, such as memory.host, if any."""

    def __init__(self, message: str, part: str = "") -> None:
        super().__init__(message)
        self.part = part


class CheckpointError(InfinityError, ValueError):
    """Raised when a checkpoint is damaged or does not fit the model; lists everything that is wrong."""


class StateError(InfinityError, RuntimeError):
    """Raised when the state of a model, a unit or an optimizer does not allow a call."""


class DivergenceError(InfinityError, RuntimeError):
    """Raised when ranks took different paths: they asked for different units at the same point."""


class LaunchError(InfinityError, RuntimeError):
    """Raised when ranks were started so that they cannot train: without a device each, or a place to meet."""


class PeerError(InfinityError, RuntimeError):
    """Raised when another rank failed, died or stalled; the message says which and why."""


class FileError(InfinityError, OSError):
    """Raised for a file; ``str`` is the message, with the path once and the error's number in words."""

    def __str__(self) -> str:
        text = str(self.strerror)
        return text if str(self.filename) in text else f"{self.filename}: {text}"


class LockedError(FileError):
    """Raised when another run uses a run's directory."""


class DiskError(FileError):
    """Raised when not all of the ``nbytes`` asked for at ``offset`` of a file were moved."""

    def __init__(
        self, errno: int, action: str, path: Path | str, *, offset: int = 0, nbytes: int = 0, moved: int = 0
    ) -> None:
        which = f" of {nbytes} bytes at offset {offset} failed after {moved} bytes" if nbytes else " failed"
        text = (
            f"{action}{which}: {_named(errno)}; {free_space(str(path))}. "
            f"The committed step is unharmed; {_advice(errno)}"
        )
        self._say(errno, text, path, offset, nbytes)

    def _say(self, errno: int, text: str, path: Path | str, offset: int = 0, nbytes: int = 0) -> None:
        self.path, self.offset, self.nbytes = str(path), offset, nbytes
        OSError.__init__(self, errno, text, self.path)

    def __reduce__(self) -> tuple[object, ...]:
        # An OSError is made again from its arguments, which here are not those of the constructor.
        return _remade, (type(self), self.errno, self.strerror, self.__dict__)


class DirectoryError(DiskError):
    """Raised when a directory cannot be used for a run."""

    def __init__(self, errno: int, action: str, path: Path | str) -> None:
        text = (
            f"{action} failed: {_named(errno)}; "
            f"{_MORE_FILES + ', or ' if errno in _TOO_MANY_FILES else ''}"
            "give memory.nvme a directory on a local drive that this user may write"
        )
        self._say(errno, text, path)


class UnsafePathError(DiskError):
    """Raised when another user could have chosen, or could still change, what a path leads to."""

    def __init__(self, path: Path | str, why: str) -> None:
        self._say(errno_names.EPERM, f"{path} {why}", path)


class ChangedFileError(DiskError):
    """Raised when another program changed, truncated, replaced or removed a file that a run uses."""

    advice = (
        "what this run kept there is lost. Start the run again, from its last saved model if there is one, "
        "and let nothing else write in memory.nvme"
    )

    def __init__(self, path: Path | str, what: str) -> None:
        self._say(errno_names.ESTALE, f"{path} {what}, by another program: {self.advice}", path)


class ChangedCheckpointError(ChangedFileError):
    """Raised when a checkpoint's file that a run reads its frozen base from was changed."""

    advice = (
        "the frozen base is read from there at every step. Download or copy the checkpoint again, start the "
        "run again, and leave a checkpoint alone while runs use it"
    )


class DamagedDataError(DiskError):
    """Raised when bytes that were read are not those that were written there (``memory.verify``)."""

    def __init__(self, path: Path | str, *, offset: int, nbytes: int) -> None:
        text = (
            f"{path}: {nbytes} bytes from offset {offset} on are not what this run wrote there: the drive, "
            "its connection, memory or another program changed them. Start the run again: if only the "
            "reading failed, it goes on from its last commit; `infinity verify RUN` says whether that is "
            f"whole. If it is not, go on from a copy of the run's files or a saved model; {BEGIN_ANEW}"
        )
        self._say(errno_names.EIO, text, path, offset, nbytes)


def optional_package(name: str, extra: str, kind: type[InfinityError], what: str) -> Any:
    """Return a package that an extra of this one installs; raise ``kind``, which says ``what`` needs it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise kind(f"{what}: pip install 'infinity-offload[{extra}]'") from error


@contextmanager
def library_errors(kind: type[InfinityError], what: str) -> Iterator[None]:
    """Raise any error of a library, even a Rust panic, as ``kind``, with ``what`` and the reason."""
    try:
        yield
    except InfinityError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = str(error)
        if isinstance(error, OSError) and error.strerror and str(error.filename) in what:
            reason = error.strerror  # what is wrong with a file that is named already
        reason = reason.strip()[:_QUOTED_CHARS] or type(error).__name__
        if isinstance(error, KeyError):  # which says the key alone
            reason = f"{reason} is unknown, or missing"
        raise kind(f"{what}: {reason}") from error


#: Guards the threads inside :func:`quiet_libraries`, and what puts the filters back.
_quiet, _quiet_threads, _filters = threading.Lock(), list[int](), ExitStack()


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Show no log record and no warning while any thread is in the context; errors are raised as ever."""
    with _quiet:
        if not _quiet_threads:
            _filters.callback(logging.disable, logging.root.manager.disable)
            logging.disable(logging.CRITICAL)
            _filters.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        _quiet_threads.append(threading.get_ident())
    try:
        yield
    finally:
        with _quiet:
            _quiet_threads.pop()
            if not _quiet_threads:
                _filters.close()


def _remade(kind: type[DiskError], errno: int, text: str, attributes: dict[str, object]) -> DiskError:
    error = kind.__new__(kind)
    OSError.__init__(error, errno, text, attributes["path"])
    error.__dict__.update(attributes)
    return error


def _named(errno: int) -> str:
    return f"{os.strerror(errno)} ({errno_names.errorcode.get(errno, str(errno))})"


def copied(error: BaseException) -> BaseException:
    """Return a copy of an error to raise in its place, since a raised error keeps its frames alive."""
    try:
        found = copy.copy(error)
        found.__dict__.update(error.__dict__)  # its notes
    except Exception:  # of a class whose arguments are not those of its constructor
        return error
    found.__cause__, found.__suppress_context__ = error.__cause__, error.__suppress_context__
    return found


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, or the name of its type."""
    line = str(error).strip().partition("\n")[0][:300] or type(error).__name__
    return f"{line} is unknown, or missing" if isinstance(error, KeyError) else line


def listed(items: Sequence[str], most: int) -> str:
    """Return ``items`` for a message, and the number of those after ``most``."""
    more = [f"and {len(items) - most} more"] if len(items) > most else []
    return "; ".join([*items[:most], *more])


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", *, most: int = 1) -> str:
    """Return what follows an error about ``name``: the nearest of ``known``, or else ``otherwise``."""
    near = difflib.get_close_matches(name, [*known], n=most)
    hint = f"did you mean {' or '.join(near)}?" if near else otherwise
    return hint and f"; {hint}"


def free_space(path: str) -> str:
    """Return the free space of ``path``'s file system, for a message."""
    try:
        stat = os.statvfs(os.path.dirname(path) or ".")
    except OSError:
        return "free space unknown"
    return f"{stat.f_bavail * stat.f_frsize} bytes free on the file system"


def _advice(errno: int) -> str:
    if errno in (errno_names.ENOENT, errno_names.ENOTDIR, errno_names.ESTALE):
        return "the directory was removed, replaced or unmounted while the run used it: start the run again"
    if errno in _TOO_MANY_FILES:
        return _MORE_FILES
    if errno in (errno_names.ENOSPC, errno_names.EDQUOT, errno_names.EFBIG):
        return "make room, or give memory.nvme a directory on a larger file system"
    if errno in (errno_names.EACCES, errno_names.EPERM, errno_names.EROFS):
        return "give memory.nvme a directory that this user may write"
    return "check the drive (dmesg, smartctl), or give memory.nvme another directory"
