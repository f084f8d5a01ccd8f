"""Decides which steps of a model are recorded, what each record holds, and which places on NVMe it keeps.

Which versions of units are committed is known when a step ends, the small state (a scheduler's next learning
rate) when the next forward pass begins. Then :class:`infinity.shards.journal.Journal` writes the record.
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
from infinity.core.nbytes import Transfer
from infinity.partition.unit import Unit
from infinity.planner.updates import Speculation
from infinity.shards.homes import HostHome
from infinity.shards.journal import CommitRecord, Journal, pack, unpack
from infinity.shards.restore import describe
from infinity.shards.saved import SavedRun
from infinity.shards.snapshot import Snapshot
from infinity.shards.tiers import Tiers

#: Returns a step's small state, and a function for the rest, called when the next forward pass begins.
SmallState = Callable[[], tuple[Mapping[str, Any], Callable[[], Mapping[str, Any]] | None]]


@dataclass(slots=True)
class StepState:
    """Holds the small state of the last recorded step, which is complete when the next forward begins."""

    packed: bytes = b""  # empty: no step has one
    step: int = 0  # whose state it is
    taken: Mapping[str, Any] | None = None  # that of a later step, which is not packed
    late: Callable[[], Mapping[str, Any]] | None = None  # returns the rest of it

    def complete(self, step: int) -> None:
        if self.taken is None:
            raise StateError(
                f"step() of the optimizer raised before step {step} was recorded, so no later one can be: "
                "end the program, and go on from the step before with infinity.resume"
            )
        late = {} if self.late is None else self.late()
        self.packed, self.step, self.taken = pack({**self.taken, **late}), step, None


#: Share of the time that commits may cost.
_MOST_COST = 0.035
#: Steps with a commit written beside them, and as many without, after which the interval is chosen.
_SEEN_STEPS = 4


class CommitInterval:
    """Chooses the steps that are recorded: every one, or as few as keep the cost of commits low.

    A commit writes its record, and what lies in host memory, while the next step computes. How much longer
    that step takes is measured: at first every second step is recorded, then every n-th, so that commits take
    at most 3.5 % of the time. Where all states live on NVMe, every step is recorded.
    """

    def __init__(self, every: int | None) -> None:
        self.wanted = every  # None: as measured
        self.every, self.chosen = 1, False  # steps from one record to the next; whether it stays so
        self._ended_s: float | None = None
        self._recorded = False  # the step before the one that runs now
        #: The time of steps with a commit beside them, and without.
        self._took_s: dict[bool, list[float]] = {True: [], False: []}

    def step(self, *, recorded: bool) -> None:
        """Note the end of a step; if it is ``recorded``, its commit is written beside the next one."""
        if not self.chosen:
            now_s = time.monotonic()
            if self._ended_s is not None:
                self._took_s[self._recorded].append(now_s - self._ended_s)
            self._ended_s, self._recorded = now_s, recorded

    @property
    def measured(self) -> int | None:
        """Return the interval (steps) that this rank would choose; None: it has seen too few steps."""
        if min(map(len, self._took_s.values())) < _SEEN_STEPS:
            return None
        step_s = median(self._took_s[False])
        return max(1, math.ceil((median(self._took_s[True]) - step_s) / (_MOST_COST * step_s)))


class Records:
    """Records one model's steps, and hands over what is written for them.

    Args:
        commits: The journal; None if no process could go on with the run.
        every: Steps from one recorded commit to the next; None: as many as hide its cost.
        speculation: Its prediction belongs to the small state of a step.
    """

    def __init__(
        self, tiers: Tiers, units: Sequence[Unit], commits: Journal | None, every: int | None,
        speculation: Speculation,
    ) -> None:  # fmt: skip
        self.tiers, self.units, self.commits = tiers, units, commits
        self._speculation, self._small = speculation, StepState()
        self.interval, self.steps = CommitInterval(every), 0  # steps that were committed
        self.planned: Counter[str] = Counter()  # bytes that updates and records were to "read" and "write"
        # What is not recorded yet, and what must land before; nothing there: it was written over in place.
        self._commit: tuple[CommitRecord, list[Transfer] | None] | None = None
        self._layout = -1  # changes of the store that the last record knew
        self._kept: list[CommitRecord] = []  # those on disk, or on the way, which a crash may need
        self._lock = threading.Lock()
        if commits is not None:
            tiers.before_write = self._before_write

    @property
    def recorded(self) -> int | None:
        """Return the step of the last record that was handed over to be written; None: there is none."""
        return self._kept[-1].step if self._kept else None

    def end_step(self) -> None:
        """Begin to record the step that was just committed, if it is one that is recorded."""
        self.steps += 1
        recorded = self.commits is not None and (self.steps % self.interval.every == 0 or self._void)
        if recorded:
            self._store_residents()
            self._commit = self._make_commit()
        self.interval.step(recorded=recorded)

    @property
    def _void(self) -> bool:
        return self.commits is not None and bool(self._small.packed) and not self.commits.stands

    def stores_residents(self, updated: Container[int]) -> bool:
        """Return whether a commit of a step that updates these units writes units in host memory."""
        return any(unit.index in updated or not home.reloadable for unit, home in self._residents())

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

    def _make_commit(self) -> tuple[CommitRecord, list[Transfer]]:
        updates = (unit.home.updating for unit in self.units)
        # Those of steps without a record, too.
        landing: list[Transfer] = [update for update in updates if update is not None]
        landing += [transfer for _, home in self._residents() for transfer in home.storing]
        versions = tuple(unit.home.version for unit in self.units)
        counts = tuple(tuple(segment.steps for segment in unit.segments) for unit in self.units)
        layout, store = None, self.tiers.store
        if self._layout != store.changes:
            self._layout, layout = store.changes, describe(self.units, self.tiers)
        world_size = self.units[0].world_size
        return CommitRecord(self.steps, versions, counts, world_size, layout=layout), landing

    def record(self, small: SmallState) -> None:
        """Add its small state to the step that :meth:`end_step` ended, if that is recorded."""
        if self._commit is not None:
            self._take(*small())
            if self._small.late is None:
                self.end_commit()

    def reload(self, small: SmallState) -> None:
        """Replace the small state of the last step by one that was loaded."""
        self.record(small)
        self._take(*small())

    def _take(self, state: Mapping[str, Any], late: Callable[[], Mapping[str, Any]] | None) -> None:
        self._small.taken, self._small.late = {**state, "predictor": self._speculation.counter}, late

    def end_commit(self) -> None:
        """Hand over the last commit to be written; without one, that of a step written over in place.

        Raises a StateError if its small state is missing or cannot be kept: no later step can be recorded.
        """
        with self._lock:
            commit, self._commit = self._commit, None
        if self.commits is None:
            return
        if commit is not None:
            self._commit = commit  # if its state cannot be had
            self._small.complete(commit[0].step)
            self._commit = None
        again = self._void and self._small.step == self.steps  # else the next step is recorded
        if again and self._small.taken is not None:
            self._small.complete(self.steps)
        self._small.taken = None  # it belongs to no step that is recorded
        record, landing = (None, None) if commit is None else commit
        if again if record is None else landing is None:
            self._store_residents()
            self._layout = -1  # what was described for this step may not have been written
            record, landing = self._make_commit()
        if record is not None and landing is not None:
            self._kept.append(replace(record, layout=None))  # which may be large
            self.commits.add(replace(record, state=self._small.packed), landing)

    def take_over(
        self, saved: SavedRun, rank: int, adopted: Container[int], obsolete: Callable[[], None]
    ) -> None:
        """Continue after a saved commit whose states are restored, with its versions of ``adopted`` units.

        ``obsolete`` is called when the next commit stands on all ranks.
        """
        self.steps = self._small.step = saved.step
        self._small.packed = saved.state(rank)
        self._speculation.counter = unpack(self._small.packed)["predictor"]
        if self.commits is not None:
            self.commits.obsolete = obsolete
            record = CommitRecord(saved.step, ())
            if saved.own is not None:
                record = saved.own.record
                self.commits.take_over(record)
            # Of this model's units: cut otherwise, it may have more than the record.
            places = (record.versions[u.index] if u.index in adopted else -1 for u in self.units)
            self._kept = [replace(record, versions=tuple(places), layout=None)]

    def land_commit(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` for the commit that was handed over last, whether it succeeds or not."""
        last = None if self.commits is None else self.commits.last
        deadline = time.monotonic() + timeout_s
        while last is not None and not last.done() and time.monotonic() < deadline:
            time.sleep(0.01)

    def wait_for_commit(self) -> None:
        """Wait for the last record to be on disk, if places that it frees may be written now. Any thread.

        See [Note: the commit barrier]. With a third place the step after a record need not wait.
        """
        if self._commit is not None:
            self.end_commit()
        recorded_now = self.recorded == self.steps
        if self.commits is not None and not (recorded_now and self.interval.every > 1):
            self.commits.wait()

    def _pass_barrier(self) -> None:
        """Wait until versions of all records but the last may be written; see [Note: the commit barrier]."""
        if self._commit is not None:
            self.end_commit()
        if self.commits is not None:
            self.commits.wait()
            self.commits.retire()
            self._kept = self._kept[-1:]

    def next_place(self, unit: Unit) -> int:
        """Return the place that the unit's update or its commit writes; wait until it may be written."""

        def free_place() -> int | None:
            return self.tiers.next_place(unit, [record.versions[unit.index] for record in self._kept])

        place = free_place()
        if place is None:
            self._pass_barrier()
            place = free_place()
        if place is None:
            place = self.tiers.spare_place(unit)
        if place is None:  # the one that was being saved has been read meanwhile
            place = free_place()
        if place is None:
            raise StateError(f"{unit.name}: all of its places on NVMe are recorded")
        return place

    def land_residents(self) -> None:
        """Wait until units in host memory may be written in place: no commit or save reads them."""
        for _, home in self._residents():
            for transfer in home.storing:
                transfer.wait()
        self.tiers.snapshot.wait()

    def _before_write(self) -> None:
        self.land_residents()
        if self._commit is not None:
            self._commit = self._commit[0], None
        if self.commits is not None and self.commits.stands:
            self.commits.invalidate()
            self._kept = []

    def snapshot(self) -> Snapshot:
        """Return a snapshot of every unit after the last step, read beside training. Raises a DiskError."""
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
