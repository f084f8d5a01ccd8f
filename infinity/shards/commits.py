"""The commit point on disk: a step is committed when all its updates have landed and the record says so.

[Note: the commit barrier]
The updates of step t+1 write over what step t-1 committed. So the first of them waits until the record
of step t is on disk; by then the forward pass of step t+1 has waited for nearly all updates of step t
anyway. A process that is killed at any moment leaves a record whose versions are whole.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from infinity.core.transfer import Transfer
from infinity.shards.journal import CommitRecord, write_commit


class Commits:
    """Writes one rank's commit records, on a thread of its own.

    Args:
        path: The record.
        sync: Makes the drive keep what was written (:meth:`infinity.nvme.volume.Volume.sync`).
    """

    def __init__(self, path: Path, sync: Callable[[], None]) -> None:
        self.path, self._sync = path, sync
        self._thread = ThreadPoolExecutor(1, "infinity-commit")
        self._last: Future[None] | None = None

    def add(self, record: CommitRecord, updates: Sequence[Transfer]) -> None:
        """Write ``record`` as soon as every update has landed; never, if one fails."""
        self.wait()
        done: Future[None] = Future()
        self._last = done
        left = [len(updates) + 1]
        lock = threading.Lock()

        def landed() -> None:
            with lock:
                left[0] -= 1
                if left[0]:
                    return
            self._thread.submit(self._write, record, updates, done)

        for update in updates:
            update.then(landed)
        landed()

    def wait(self) -> None:
        """Block until the last record is on disk.

        Raises:
            DiskError: An update of that step failed; the record before it stands.
        """
        while self._last is not None:  # in slices: Ctrl-C must get through
            with contextlib.suppress(TimeoutError):
                self._last.result(timeout=1.0)
                return

    def close(self) -> None:
        """End the thread, after the record that is being written."""
        self._thread.shutdown()

    def _write(self, record: CommitRecord, updates: Sequence[Transfer], done: "Future[None]") -> None:
        try:
            for update in updates:
                update.wait()  # ended: raises at once if it failed
            self._sync()
            write_commit(self.path, record)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)
