"""Which steps of a model are recorded, what belongs to each record, and which places on NVMe it keeps.

A step that was committed (:mod:`infinity.shards.updates`) is recorded in two parts: which versions of units
are the committed ones is known at once, the small state (a scheduler's next learning rate) when the next
forward pass begins. :class:`infinity.shards.journal.Commits` writes the record when what it names has landed.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from infinity.core.errors import StateError
from infinity.core.transfer import Transfer
from infinity.partition.unit import Unit
from infinity.planner.updates import Speculation
from infinity.shards.homes import HostHome
from infinity.shards.journal import CommitRecord, Commits, pack, unpack
from infinity.shards.restore import describe
from infinity.shards.saved import SavedRun
from infinity.shards.snapshot import Snapshot
from infinity.shards.tiers import Tiers, is_reloadable

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


@dataclass(slots=True)
class Commit:
    """A committed step that is not recorded yet.

    Attributes:
        landing: Transfers that must land before.
        layout: The layout of versions, if that has changed.
        overwritten: Some of the committed values were written in place since.
    """

    record: CommitRecord
    landing: Sequence[Transfer]
    layout: Mapping[str, Any] | None
    overwritten: bool = False


class Records:
    """The records of one model's steps, and what is written for them.

    Args:
        tiers: The homes of shards.
        units: All units of the model.
        commits: Writes the records; None if no process could go on with the run.
        every: Steps from one recorded commit to the next; None: as many as hide its cost.
        speculation: The speculation, whose prediction belongs to the small state of a step.

    Attributes:
        interval: Says which steps are recorded.
        steps: Steps that were committed.
        planned: Bytes that updates and records of all steps were to ``read`` and ``write``.
        recorded: The step of the last record that was given to be written; None: there is none.
    """

    def __init__(
        self, tiers: Tiers, units: Sequence[Unit], commits: Commits | None, every: int | None,
        speculation: Speculation,
    ) -> None:  # fmt: skip
        self.tiers, self.units, self.commits = tiers, units, commits
        self._small = StepState(speculation)
        self.interval, self.steps = CommitInterval(every), 0
        self.planned: Counter[str] = Counter()
        self.recorded: int | None = None
        self._commit: Commit | None = None  # what is not recorded yet
        self._layout = -1  # changes of the store that the last record knew
        self._kept: list[CommitRecord] = []  # those on disk, or on the way, which a crash may need
        self._lock = threading.Lock()
        if commits is not None:
            tiers.before_write = self._before_write

    def end_step(self) -> None:
        """A step was committed: begin to record it, if it is one of those that are."""
        self.steps += 1
        recorded = self.commits is not None and (self.interval.ends(self.steps) or self._void)
        if recorded:
            self._store_residents()
            self._commit = self._make_commit()
        self.interval.step(recorded=recorded)

    @property
    def _void(self) -> bool:
        """Return whether no record stands, since values were written in place."""
        return self.commits is not None and bool(self._small.packed) and not self.commits.stands

    def stores_residents(self, updated: Container[int]) -> bool:
        """Return whether a commit of a step that updates these units writes units in host memory."""
        return any(unit.index in updated or not is_reloadable(unit) for unit, _ in self._residents())

    def _residents(self) -> Iterator[tuple[Unit, HostHome]]:
        return ((unit, unit.home) for unit in self.units if isinstance(unit.home, HostHome))

    def _store_residents(self) -> None:
        """Start to write units in host memory to NVMe: see [Note: shards in host memory]."""
        for unit, home in self._residents():
            if not (home.reloadable or home.recorded):
                self._pass_barrier()
                updated = self.tiers.bring_home(unit) or home.updating
                home.store_copy(self.tiers.store, self.next_place, updated)
                self.planned["write"] += home.nbytes

    def _make_commit(self) -> "Commit":
        updates = (unit.home.updating for unit in self.units)
        # Those of steps without a record, too.
        landing: list[Transfer] = [update for update in updates if update is not None]
        landing += [transfer for _, home in self._residents() for transfer in home.storing]
        versions = tuple(unit.home.version for unit in self.units)
        counts = tuple(tuple(segment.steps for segment in unit.segments) for unit in self.units)
        record = CommitRecord(self.steps, versions, counts, world_size=self.units[0].world_size)
        layout, store = None, self.tiers.store
        if self._layout != store.changes:
            self._layout, layout = store.changes, describe(self.units, self.tiers)
        return Commit(record, landing, layout)

    @property
    def unrecorded(self) -> bool:
        """Return whether a step was committed that is to be recorded, so that another process can go on."""
        return self._commit is not None

    def record(self, state: Mapping[str, Any], late: Callable[[], Mapping[str, Any]] | None) -> None:
        """Record the step that :meth:`end_step` ended, with the small state that belongs to it.

        Args:
            late: Returns the rest of it, which is ready when the next forward pass begins; None: that is all.
        """
        if self._commit is not None:
            self._small.take(state, late)
            if late is None:
                self.end_commit()

    def reload(self, state: Mapping[str, Any], late: Callable[[], Mapping[str, Any]] | None) -> None:
        """Let this be the small state of the last step: one was loaded. As in :meth:`record`."""
        self.record(state, late)
        self._small.take(state, late)

    def end_commit(self) -> None:
        """Hand the last commit over to be written; without one, that of a step written over in place.

        Raises:
            StateError: Its small state is not there, or cannot be kept: no later step can be recorded.
        """
        with self._lock:
            commit, self._commit = self._commit, None
        if self.commits is None:
            return
        if commit is not None:
            self._commit = commit  # if its state cannot be had
            self._small.complete(commit.record.step)
            self._commit = None
        again = self._void and self._small.step == self.steps  # else the next step is recorded
        if again and self._small.is_taken:
            self._small.complete(self.steps)
        self._small.forget()
        if again if commit is None else commit.overwritten:
            self._store_residents()
            self._layout = -1  # what was described for this step may not have been written
            commit = self._make_commit()
        if commit is not None:
            self._kept.append(commit.record)
            self.commits.add(replace(commit.record, state=self._small.packed), commit.landing, commit.layout)
            self.recorded = commit.record.step

    def take_over(
        self, saved: SavedRun, rank: int, adopted: Container[int], obsolete: Callable[[], None]
    ) -> None:
        """Go on after a saved commit, whose states are in their places.

        Args:
            adopted: Units whose places are those that the saved record names.
            obsolete: Called when the next commit stands on all ranks.
        """
        self.steps = saved.step
        self._small.restore(saved.state(rank), saved.step)
        if self.commits is not None:
            self.recorded = saved.step
            self.commits.obsolete = obsolete
            if saved.own is not None:
                self.commits.take_over(saved.own.record)
                record = saved.own.record
                # Of this model's units: cut otherwise, it may have more than the record.
                places = (record.versions[u.index] if u.index in adopted else -1 for u in self.units)
                self._kept = [replace(record, versions=tuple(places))]

    def land_commit(self, timeout_s: float) -> None:
        """Wait for the commit that was handed over last, however it ends, but not for ever."""
        deadline = time.monotonic() + timeout_s
        while self.commits is not None and not self.commits.last.done() and time.monotonic() < deadline:
            time.sleep(0.01)

    def wait_for_commit(self) -> None:
        """Return when the last record is on disk, if places that it frees may be written now. Any thread.

        See [Note: the commit barrier] in :mod:`infinity.shards.journal`. With a third place the step after a
        record need not wait.
        """
        if self._commit is not None:
            self.end_commit()
        recorded_now = self._kept and self._kept[-1].step == self.steps
        if self.commits is not None and not (recorded_now and self.interval.every > 1):
            self.commits.wait()

    def _pass_barrier(self) -> None:
        """Return when the versions of all records but the last may be written; see the same note."""
        if self._commit is not None:
            self.end_commit()
        if self.commits is not None:
            self.commits.wait()
            self.commits.retire()
            self._kept = self._kept[-1:]

    def next_place(self, unit: Unit) -> int:
        """Return the place that the unit's update writes, or its commit; wait until it may be written."""
        place = self._free_place(unit)
        if place is None:
            self._pass_barrier()
            place = self._free_place(unit)
        if place is None:
            place = self.tiers.spare_place(unit)
        if place is None:  # the one that was being saved has been read meanwhile
            place = self._free_place(unit)
        if place is None:
            raise StateError(f"{unit.name}: all of its places on NVMe are recorded")
        return place

    def _free_place(self, unit: Unit) -> int | None:
        return self.tiers.next_place(unit, [record.versions[unit.index] for record in self._kept])

    def land_residents(self) -> None:
        """Return when units in host memory may be written in place: none is written to NVMe, or saved."""
        for _, home in self._residents():
            for transfer in home.storing:
                transfer.wait()
        self.tiers.snapshot.wait()

    def _before_write(self) -> None:
        """Committed values are about to be written in place."""
        self.land_residents()
        if self._commit is not None:
            self._commit.overwritten = True
        if self.commits is not None and self.commits.stands:
            self.recorded = None
            self.commits.invalidate()
            self._kept = []

    def snapshot(self) -> Snapshot:
        """Keep what every unit holds after the last step, to be read while training goes on; between steps.

        Raises:
            DiskError: The file system has no room for units in host memory.
        """
        if self.commits is not None and self._commit is None:  # else the commit has stored them
            self._store_residents()
        landing: dict[int, Sequence[Transfer]] = {}
        for unit in self.units:
            brought, update = self.tiers.bring_home(unit), unit.home.updating
            ends: Sequence[Transfer] = () if update is None else [update]
            if isinstance(unit.home, HostHome):
                ends = unit.home.storing or ends
            landing[unit.index] = ends if brought is None else [brought, *ends]
        return self.tiers.pin(self.units, landing)
