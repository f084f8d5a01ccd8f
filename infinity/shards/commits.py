"""Commits of a run: which steps are recorded, and the thread that writes them to the rank's journal.

[Note: the commit barrier]
The updates of step t+1 write over what step t-1 committed. So the first of them waits until the commit
of step t is in the journal on every rank (a rank reduces no gradient of a step before its own commit of the
step before is there), and then retires the commit of t-1, which is whole no longer. By then the forward pass
of step t+1 has waited for nearly all updates of step t anyway. A process that is killed at any moment leaves
a commit whose versions are whole, and all ranks one of the same step.

[Note: writes in place]
``infinity.gathered(modify=True)`` and loaded states write over committed versions. Before the first of these
writes the journal says that no commit is whole, and the next forward pass records the same step again.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any

from infinity.core.errors import StateError
from infinity.core.transfer import Transfer
from infinity.planner.updates import Speculation
from infinity.shards.journal import CommitRecord, Journal, check_state, pack, unpack

#: A part of the state, and what returns the rest of it later; None: that is all.
Parts = tuple[Mapping[str, Any], Callable[[], Mapping[str, Any]] | None]


class StepState:
    """The small state of the last recorded step.

    Step counts, generators and what the optimizer follows are known when ``step()`` ends, the learning rates
    that schedulers set after it when the next forward pass begins.

    Args:
        speculation: The speculation, whose prediction belongs to the state.

    Attributes:
        packed: The state as bytes; empty: no step has one.
        step: The step whose state it is.
    """

    def __init__(self, speculation: Speculation) -> None:
        self.packed, self.step = b"", 0
        self._speculation = speculation
        self._parts: Parts | None = None

    def take(self, state: Mapping[str, Any], late: Callable[[], Mapping[str, Any]] | None) -> None:
        """Take what is known when a step ends, or when a state was loaded; ``late`` returns the rest."""
        self._parts = {**state, "predictor": self._speculation.counter}, late

    @property
    def is_taken(self) -> bool:
        """Return whether a state was taken that is not packed."""
        return self._parts is not None

    def complete(self, step: int) -> None:
        """Pack what was taken, with the rest of it.

        Raises:
            StateError: ``step()`` raised before anything was taken; or the state cannot be kept.
        """
        if self._parts is None:
            raise StateError(
                f"step() of the optimizer raised before step {step} was recorded, so no later one can be: "
                "end the program, and go on from the step before with infinity.resume"
            )
        state, late = self._parts
        self.packed, self.step = pack({**state, **({} if late is None else late())}), step
        self._parts = None

    def forget(self) -> None:
        """Drop what was taken: it belongs to no step that is recorded."""
        self._parts = None

    def restore(self, packed: bytes, step: int) -> None:
        """Go on with the state of a saved step."""
        self.packed, self.step = packed, step
        self._speculation.counter = unpack(packed)["predictor"]


#: Part of the time that commits may cost.
_MOST_COST = 0.035
#: Steps with what a commit writes beside them, and as many without, after which the interval is chosen.
_SEEN_STEPS = 4


class CommitInterval:
    """The steps that are recorded: every one, or as few as keep the cost of commits low.

    Beside its record a commit writes what lies in host memory, while the next step computes. How much longer
    that step takes is measured: at first every second step is recorded. Then every n-th is, so that commits
    take at most 3.5 % of the time. Where all states live on NVMe, every step is recorded.

    Args:
        every: The number of steps; None: as measured.

    Attributes:
        every: Steps from one record to the next.
        chosen: It stays as it is.
    """

    def __init__(self, every: int | None) -> None:
        self.wanted, self.every, self.chosen = every, 1, False
        self._ended_s: float | None = None
        self._recorded = False  # the step before the one that runs now
        self._with_s: list[float] = []
        self._without_s: list[float] = []

    def ends(self, step: int) -> bool:
        """Return whether ``step`` is recorded."""
        return step % self.every == 0

    def step(self, *, recorded: bool) -> None:
        """Note that a step ends; if it is ``recorded``, its commit is written beside the next one."""
        if self.chosen:
            return
        now_s = time.monotonic()
        if self._ended_s is not None:
            (self._with_s if self._recorded else self._without_s).append(now_s - self._ended_s)
        self._ended_s, self._recorded = now_s, recorded

    @property
    def measured(self) -> int | None:
        """The number of steps that this rank would choose; None: too few were seen."""
        if min(len(self._with_s), len(self._without_s)) < _SEEN_STEPS:
            return None
        step_s = median(self._without_s)
        return max(1, math.ceil((median(self._with_s) - step_s) / (_MOST_COST * step_s)))


class Commits:
    """Writes one rank's commits to its journal, on a thread of its own.

    Args:
        journal: Closed with this.
        sync: Makes the drive keep what was written (:meth:`infinity.nvme.volume.Volume.sync`); None: what
            survives the process is enough.
        sums: Returns the sums of the blocks of each data file, which are kept with a commit.

    Attributes:
        obsolete: Called once with the first commit behind all ranks: what an earlier generation had may go.
        last: The commit that is being written, or was written last.
        stands: There is a commit, written or being written, that is valid.
    """

    def __init__(
        self, journal: Journal, sync: Callable[[], None] | None = None,
        sums: Callable[[], Sequence[bytes]] = tuple,
    ) -> None:  # fmt: skip
        self._journal, self._sync, self._sums = journal, sync, sums
        self.obsolete: Callable[[], None] = lambda: None
        self._thread = ThreadPoolExecutor(1, "infinity-commit")
        self.last = Transfer()
        self.last.finish()
        self._lock = threading.Lock()  # of the journal
        self._written = self.stands = False

    def take_over(self, record: CommitRecord) -> None:
        """Go on behind a commit that was found; all ranks have one of its step.

        A later one, which not all ranks had, goes: its versions are about to be written again.
        """
        with self._lock:
            self._journal.go_back(record)
        self.stands = True

    def add(
        self, record: CommitRecord, updates: Sequence[Transfer], layout: Mapping[str, Any] | None = None
    ) -> None:
        """Write ``record`` as soon as every update has landed; never, if one fails.

        Args:
            layout: The layout of versions, if that has changed since the last commit.
        """
        self.wait()
        written = self.last = Transfer()
        self.stands = True
        left = [len(updates) + 1]
        lock = threading.Lock()

        def landed() -> None:
            with lock:
                left[0] -= 1
                if left[0]:
                    return
            try:
                self._thread.submit(written.run, partial(self._write, record, updates, layout))
            except RuntimeError as error:  # closed meanwhile
                written.finish(error)

        for update in updates:
            update.then(landed)
        landed()

    def wait(self) -> None:
        """Block until the last commit is in the journal.

        Raises:
            DiskError: An update of that step failed; the commit before it stands.
            StateError: Its small state could not be read back; likewise.
        """
        self.last.wait()

    @property
    def any(self) -> bool:
        """Return whether there is a commit in the journal."""
        with self._lock:
            return self._journal.any

    def retire(self) -> None:
        """Give up the commit before the last one, whose versions are about to be written; any thread.

        The last one is in the journal of every rank.
        """
        with self._lock:
            self._journal.retire()
            if self._written:
                obsolete, self.obsolete = self.obsolete, lambda: None
                obsolete()

    def invalidate(self) -> None:
        """Give up every commit: committed versions are about to be written in place.

        Raises:
            DiskError: The update of the last step failed.
        """
        self.wait()
        with self._lock:
            self.stands = False
            if self._sync is not None:
                self._sync()
            self._journal.invalidate()

    def close(self) -> None:
        """End the thread, after the commit that is being written."""
        self._thread.shutdown()
        self._journal.close()

    def _write(
        self, record: CommitRecord, updates: Sequence[Transfer], layout: Mapping[str, Any] | None
    ) -> None:
        for update in updates:
            update.wait()  # ended: raises at once if it failed
        if record.state:
            check_state(record.state)  # here, beside training: it takes milliseconds
        if self._sync is not None:
            self._sync()
        with self._lock:
            self._journal.append(record, layout, self._sums())
            self._written = True
