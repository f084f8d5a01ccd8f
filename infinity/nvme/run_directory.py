"""A run owns a directory named by its id, and each of its ranks a lock in it.

[Note: which runs are alive] A rank holds the lock on its file ``rank<r>.lock`` as long as its process lives.
So a directory whose locks are all free is a dead run's, on the machine that asks.
"""

import contextlib
import errno
import os
import secrets
import shlex
import time
from collections.abc import Iterable
from pathlib import Path

from infinity.core import files
from infinity.core.errors import DirectoryError, LockedError
from infinity.core.nbytes import format_nbytes
from infinity.nvme.volume import disk_errors

_LOCKS = "rank*.lock"
#: The files from which an interrupted run goes on; see :mod:`infinity.shards.journal`.
_COMMITS = "rank*.commits-head"
#: The longest wait for another rank that looks whether it is the last one, which takes it a moment (s).
_TURN_S = 10.0
#: Errors of file systems without locks of directories, such as NFS.
_NO_LOCKS = {errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP}


def new_run_id() -> str:
    """Return an id that no other run has, and that sorts by time: ``20260131-235959-1a2b3c``."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


class RunDirectory:
    """Owns one rank's place in the directory ``root/run_id``, which it makes or joins, and locks.

    LockedError: a live process holds the rank's place. UnsafePathError: it, or ``root``, is another user's,
    or all may write it. DirectoryError: it cannot be made or written.
    """

    def __init__(self, root: Path, run_id: str, rank: int) -> None:
        self.path, self.rank = Path(os.path.realpath(root)) / run_id, rank
        self._files: set[Path] = set()
        self._lock_path = self.path / f"rank{rank}.lock"
        with disk_errors(f"making the run's directory {self.path}", self.path, DirectoryError):
            try:
                files.shared_directory(self.path.parent)
                files.own_directory(self.path)
                self._lock = files.lock_file(self._lock_path)  # a descriptor; -1 after remove
            except LockedError as error:
                advice = "wait for that run or end it, or give this one another run.name or memory.nvme"
                if files.is_locked_here(self._lock_path):
                    advice = (
                        "that is this process, which has a model of the run: before another one is built "
                        "call infinity.close(model, keep=True), or drop the model and all that holds it "
                        "(in a notebook also results of its forward passes, and tracebacks)"
                    )
                text = f"{self.path} is in use by {files.lock_owner(self._lock_path)}; {advice}"
                raise LockedError(errno.EWOULDBLOCK, text, str(self._lock_path)) from error

    def file(self, name: str) -> Path:
        """Return the path of this rank's file ``name``, which :meth:`remove` removes."""
        path = self.path / name
        self._files.add(path)
        return path

    def is_empty(self) -> bool:
        """Return whether the directory holds nothing but locks."""
        with contextlib.suppress(OSError):  # it was removed, or no descriptor is left to list it with
            return {*self.path.iterdir()} == {*self.path.glob(_LOCKS)}
        return False

    def remove(self) -> None:
        """Remove this rank's files and its lock, and the directory with the last rank's."""
        if self._lock < 0:
            return
        own = set(self._files)
        with contextlib.suppress(OSError):  # no descriptor is left to list it with
            own.update(self.path.glob(f"rank{self.rank}-*"))
        for path in own:
            path.unlink(missing_ok=True)
        self._lock_path.unlink(missing_ok=True)  # while it is held: see :mod:`infinity.core.files`
        self.leave()
        with contextlib.suppress(OSError):  # another rank's files are there, or another program's
            self.path.rmdir()

    def finish(self) -> None:
        """Record that this rank is done with the run. Once all ranks are, no process goes on with it."""
        if self._lock >= 0:
            os.close(files.create_file(finished_path(self.path, self.rank)))

    def remove_finished(self, world_size: int) -> None:
        """Give back the lock, and remove the files of all ranks if all that are here have finished.

        Until then another rank may die, and need the states of all to go on. Ranks look in turns, the
        directory locked: two at a time could each find the other's lock taken, and no file would go.
        """
        if self._lock < 0:
            return
        self.leave()
        directory = os.O_RDONLY | os.O_DIRECTORY
        with contextlib.ExitStack() as held, contextlib.suppress(LockedError, FileNotFoundError):
            try:
                held.callback(os.close, files.open_locked(self.path, directory, patience_s=_TURN_S))
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            ranks = {int(path.stem[len("rank") :]): path for path in self.path.glob(_LOCKS)}
            for path in ranks.values():
                held.callback(os.close, files.open_locked(path, os.O_RDWR, patience_s=0))
            finished = [finished_path(self.path, rank) for rank in ranks if rank < world_size]
            if all(path.exists() for path in finished):
                last = [*finished, *ranks.values()]
                others = [*self.path.glob("rank*"), *self.path.glob("copy*")]  # copies of other nodes' ranks
                for path in [path for path in others if path not in last] + last:
                    path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # another program put a file there
                    self.path.rmdir()

    def leave(self) -> None:
        """Give back the lock, and leave the files to the process that goes on with the run."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def finished_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.finished"


def find_leftovers(root: Path) -> list[Path]:
    """Return this user's directories below ``root`` of runs that ended without removing them."""
    found = []
    for path in filter(files.is_own, sorted(Path(root).glob("*/"))):
        locks = list(path.glob(_LOCKS))
        if locks and not any(files.is_locked(lock, shared=True) for lock in locks):
            found.append(path)
    return found


def leftovers_line(roots: Iterable[Path | str], own: str = "") -> str:
    """Return lines for people about files that no run uses, without the run ``own``; may be empty."""
    places = [Path(os.path.realpath(root)) for root in roots]
    lines = []
    try:
        found = [path for root in places for path in find_leftovers(root) if path.name != own]
        kept = [path for path in found if any(path.glob(_COMMITS))]
    except OSError:  # who makes the run's own files says it
        return ""
    dead = [path for path in found if path not in kept]
    if kept:
        runs = "an interrupted run keeps" if len(kept) == 1 else "interrupted runs keep"
        names = ", ".join(sorted({path.name for path in kept}))
        lines.append(
            f"{runs} {size_of(kept)} to go on from ({names}): start the same program again, or `infinity "
            f"resume RUN` for a run of infinity train; to remove them: rm -r {shlex.join(map(str, kept))}"
        )
    if dead:
        runs = "a run" if len(dead) == 1 else f"{len(dead)} runs"
        lines.append(
            f"{runs} ended without removing {size_of(dead)} of files, which no run uses; "
            f"to remove them: rm -r {shlex.join(map(str, dead))}"
        )
    return "\n".join(lines)


def size_of(folders: Iterable[Path]) -> str:
    nbytes = 0
    for file in (file for path in folders for file in path.glob("*")):
        with contextlib.suppress(OSError):  # its run, or a person, removes it just now
            nbytes += file.stat().st_blocks * 512
    return format_nbytes(nbytes)
