"""Records steps of a model, keeps the places on NVMe that records name, and restores what was recorded.

Which versions of units are committed is known when a step ends, the small state (a scheduler's next learning
rate) when the next forward pass begins. Then :class:`infinity.shards.journal.Journal` writes the record.

[Note: found, then put in place] Before the model of an interrupted run is built, the ranks agree on the
newest commit (:mod:`infinity.shards.saved`). While it is built nothing is stored. Then :func:`restore` gives
every unit its states. With as many ranks as before, a unit that is cut as it was keeps its extents, and is
only read if it lives in host memory now. Any other unit is made anew from the old shards, chunk by chunk;
until the first commit after that stands on all ranks the old files stay, so a crash loses nothing.
"""

import contextlib
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from infinity.core.errors import BEGIN_ANEW, DiskError, StateError
from infinity.core.nbytes import Transfer, shard_ranges
from infinity.nvme.volume import open_own
from infinity.optim.dictionaries import carried
from infinity.optim.rule import Rule, Way
from infinity.optim.rules import find_rule
from infinity.optim.state import StateLayout
from infinity.partition.unit import Segment, Unit, UnitIndex
from infinity.planner.updates import Speculation
from infinity.shards.homes import DiskHome, HostHome, Snapshot
from infinity.shards.journal import ChunkExtents, CommitRecord, UnitRecord, Version, pack, unpack
from infinity.shards.saved import SavedRun
from infinity.shards.storage import ShardStore
from infinity.shards.tiers import Tiers
from infinity.shards.verified import load_sums

#: Returns a step's small state, and a function for the rest, called when the next forward pass begins.
SmallState = Callable[[], tuple[Mapping[str, Any], Callable[[], Mapping[str, Any]] | None]]


@dataclass(slots=True)
class StepState:
    """Small state of the last recorded step; it is complete when the next forward begins."""

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
    """Chooses how many steps lie between two that are recorded, by what commits cost.

    A commit writes its record, what lies in host memory, and its copy, while the next step computes. How much
    longer that step takes is measured while every second step is recorded; then commits take at most 3.5 % of
    the time. Where all states live on NVMe and have no copy, every step is recorded.
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
    """Records one model's steps; without a journal ``commits`` no process could go on with the run."""

    def __init__(
        self, tiers: Tiers, units: Sequence[Unit], every: int | None, speculation: Speculation
    ) -> None:
        self.tiers, self.units, self.commits = tiers, units, tiers.storage.commits
        self._speculation, self._small = speculation, StepState()
        self.interval, self.steps = CommitInterval(every), 0  # steps that were committed
        self.planned: Counter[str] = Counter()  # bytes that updates and records were to "read" and "write"
        # What is not recorded yet, and what must land before; nothing there: it was written over in place.
        self._commit: tuple[CommitRecord, list[Transfer] | None] | None = None
        #: Steps that are on disk, or on the way, which a crash may need, and the version of each unit.
        self._kept: list[tuple[int, Sequence[int]]] = []
        self._obsolete: Callable[[], None] | None = None  # gives up what an earlier generation had
        self._lock = threading.Lock()
        if self.commits is not None:
            tiers.before_write = self._before_write

    @property
    def recorded(self) -> int | None:
        """Return the step of the last record that was handed over; None: there is none."""
        return self._kept[-1][0] if self._kept else None

    def end_step(self) -> None:
        """Begin to record the step that was just committed, if that is its turn."""
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
        """Return whether a commit of a step that updates these units writes more than the step itself."""
        copied = self.commits is not None and self.commits.copies is not None
        return copied or any(unit.index in updated or not home.reloadable for unit, home in self._residents())

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
        return self._describe(), landing

    def _describe(self) -> CommitRecord:
        """Return a record; a unit that is loaded from a checkpoint again has no versions but its files."""
        storage, listed, base = self.tiers.storage, list[UnitRecord](), dict[str, str]()
        for unit in self.units:
            disk = unit.home.copy if isinstance(unit.home, HostHome) else unit.home
            versions: Sequence[Version] = ()
            if unit.home.reloadable:
                base = dict(self.tiers.base_files)
            else:
                assert isinstance(disk, DiskHome)
                versions = disk.versions
            segments = [(s.name, s.offset, tuple(s.shape)) for s in unit.segments]
            counts = tuple(s.steps for s in unit.segments)
            listed.append(UnitRecord(unit.numel, segments, counts, versions, unit.home.version))
        drives, dtype = 0 if storage.files is None else len(storage.files.paths), str(storage.layout.dtype)
        ranks = self.tiers.ranks
        return CommitRecord(
            self.steps, listed, ranks.world_size, drives, dtype, storage.rule.name, base, ranks.mesh
        )

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
        """Let the last commit be written; a step that wrote over states in place makes one of its own.

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
        if again if commit is None else commit[1] is None:  # its states were written over in place
            self._store_residents()
            commit = self._make_commit()
        record, landing = (None, None) if commit is None else commit
        if record is not None and landing is not None:
            self._kept.append((record.step, [unit.version for unit in record.units]))
            self.commits.add(replace(record, state=self._small.packed), landing)
            if self.tiers.ranks.mesh and self.commits.last is not None:
                self.commits.last.then(partial(self._count, self.commits.last, record.step))

    def _count(self, commit: Transfer, step: int) -> None:
        """Tell other stages that the commit of ``step`` has landed here, unless it failed."""
        with contextlib.suppress(Exception):  # it surfaces where the commit is waited for
            commit.wait()
            if (peers := self.tiers.ranks.of_stages) is not None:
                peers.come(f"commits/{step}")

    def _wait_for_all(self) -> None:
        """Wait for the last record to be on disk; in a pipeline, for those of all stages."""
        if self.commits is not None:
            self.commits.wait()
            ranks, step = self.tiers.ranks, self.recorded
            peers = ranks.of_stages if ranks.mesh else None
            if peers is not None and self.commits.last is not None and step is not None:
                peers.wait_for_all(f"commits/{step}", f"commits of step {step}")

    def take_over(
        self, saved: SavedRun, rank: int, adopted: Container[int], obsolete: Callable[[], None]
    ) -> None:
        """Continue after a commit that :func:`restore` has put in place, with what that returned."""
        self.steps = self._small.step = saved.step
        self._small.packed = saved.state(rank)
        self._speculation.counter = unpack(self._small.packed)["predictor"]
        if self.commits is not None:
            self._obsolete = obsolete
            places = [-1] * len(self.units)
            if saved.own is not None:
                self.commits.take_over(saved.own.record)
                # Cut otherwise, this model may have more units than the record.
                places = [
                    saved.own.record.units[u.index].version if u.index in adopted else -1 for u in self.units
                ]
            self._kept = [(saved.step, places)]

    def land_commit(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` for the commit that was handed over last, whether it succeeds or not."""
        if self.commits is not None and self.commits.last is not None:
            ended = threading.Event()
            self.commits.last.then(ended.set)
            ended.wait(timeout_s)

    def wait_for_commit(self) -> None:
        """Wait for the last record to be on disk, if places that it frees may be written now. Any thread.

        See [Note: the commit barrier]. With a third place the step after a record need not wait.
        """
        if self._commit is not None:
            self.end_commit()
        recorded_now = self.recorded == self.steps
        if self.commits is not None and not (recorded_now and self.interval.every > 1):
            self._wait_for_all()

    def _pass_barrier(self) -> None:
        """Wait until versions of all records but the last may be written; see [Note: the commit barrier]."""
        if self._commit is not None:
            self.end_commit()
        if self.commits is not None:
            self._wait_for_all()
            self.commits.retire()
            self._kept = self._kept[-1:]
            if self.commits.last is not None:
                with self._lock:
                    obsolete, self._obsolete = self._obsolete, None
                if obsolete is not None:
                    obsolete()

    def next_place(self, unit: Unit) -> int:
        """Return the place that the unit's update or its commit writes; wait until it may be written."""
        disk, snapshot = self.tiers.trained_disk(unit), self.tiers.snapshot
        if self.tiers.storage.memory.versions == 1:
            snapshot.wait_for(unit.index)
            return unit.home.version

        def free_place() -> int | None:
            taken = {snapshot.place(unit.index), *(places[unit.index] for _, places in self._kept)}
            if unit.home is disk:  # else the committed values are in memory, too
                taken.add(disk.version)
            return next((place for place in range(len(disk.versions)) if place not in taken), None)

        place = free_place()
        if place is None:
            self._pass_barrier()
            place = free_place()
        kept = snapshot.place(unit.index)
        if place is None and kept is not None:
            try:
                disk.add_version()
                place = len(disk.versions) - 1
            except DiskError:  # no room for another one: the save reads its own first
                snapshot.wait_for(unit.index)
                place = kept
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
        self.tiers.snapshot = Snapshot(self.tiers.storage, self.units, landing)
        return self.tiers.snapshot


#: Matches the name of a tile: that of its parameter, and its rows.
_TILE = re.compile(r"(.*)\[(\d+):(\d+)\]", re.DOTALL)


def _discard(store: ShardStore, versions: Iterable[Version], paths: Iterable[Path]) -> None:
    store.free_versions(versions)
    for path in paths:
        path.unlink(missing_ok=True)


def restore(
    saved: SavedRun, units: UnitIndex, tiers: Tiers, way: Callable[[Segment], Way | None],
    note: Callable[[str], object],
) -> tuple[set[int], Callable[[], None]]:  # fmt: skip
    """Restore this rank's part of every unit from the saved commit, in the unit's home.

    ``way`` says how a parameter is updated. If that is by another rule than before, moments carry over where
    it needs no others, and begin at zero elsewhere; ``note`` gets a line about it.

    Returns the units that have the places of that commit, and a call that gives up the other places, or the
    files of the generation before: for when the next commit stands on all ranks. Raises a StateError, which
    names the first difference, if the model or its frozen base is another one.
    """
    storage, store, own, record = tiers.storage, tiers.store, saved.own, (saved.own or saved.ranks[0]).record
    dtype, was, were = str(tiers.layout.dtype), record.dtype, [] if own is None else record.units
    if was != dtype:
        raise StateError(
            f"the interrupted run computes in {was}, this one in {dtype}: set train.dtype as it was"
        )
    _check_mesh(record.mesh, tiers.ranks.mesh)
    before = find_rule(record.rule)
    kept = unpack(record.state).get("kept", {})
    anew, layout = _anew(units, before, storage.rule, way, kept, note), before.layout(tiers.layout.dtype)
    likes = {
        u.index for u in units
        if layout == tiers.layout and anew.isdisjoint(u.segments) and _is_like(u, were, storage.chunk_numel)
    }  # fmt: skip
    unsaved = {_whole(name)[0] for u in record.units if not u.versions for name, _, _ in u.segments}
    # The others have their values from a checkpoint that was loaded again, as in the interrupted run.
    restored = [
        u for u in units if not u.home.reloadable or any(s.whole_name not in unsaved for s in u.segments)
    ]
    if len(restored) < len(units):
        _check_base(record.base, tiers.base_files)
    firsts = {} if own is None else {own.files.rank: 0}  # the volume's number of each rank's first file
    if any(unit.index not in likes for unit in restored):
        _add_others(saved, tiers, firsts)
    tiers.pending = False
    with contextlib.closing(_Reader(tiers, layout, saved, firsts)) as reader:
        for unit in restored:
            if isinstance(unit.home, DiskHome):  # it may have been placed for values of a base
                unit.home.free()
            if unit.index in likes:
                was_here = were[unit.index]
                for segment, steps in zip(unit.segments, was_here.counts, strict=True):
                    segment.steps = steps
                tiers.adopt(unit, list(was_here.versions), was_here.version)
            else:
                _make_anew(unit, tiers, reader, anew)
            unit.renew()
    old = [saved.ranks[rank] for rank in firsts if own is None or rank != own.files.rank]
    for each in old:  # another rank removes it, perhaps before this one
        store.volume.drop_sealed(firsts[each.files.rank], len(each.data))
        if storage.sums is not None:
            storage.sums.drop(firsts[each.files.rank], len(each.data))
    versions = [version for i, unit in enumerate(were) if i not in likes for version in unit.versions]
    paths = [path for each in old if own is None for path in each.paths(tiers.ranks.world_size)]
    return likes, partial(_discard, store, versions, paths)


def _check_mesh(was: str, now: str) -> None:
    if was != now:
        raise StateError(
            f"the interrupted run was in a mesh of {was or 'none'}, this one in {now or 'none'}: give Init "
            f"the same (others load what infinity.save_checkpoint writes); {BEGIN_ANEW}"
        )


def _check_base(was: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise a StateError that names a file of the frozen base if it differs from the interrupted run's."""
    other = next((name for name in sorted(was.keys() | now.keys()) if was.get(name) != now.get(name)), None)
    if other is not None:
        how = "lacked it then" if other not in was else "holds other bytes" if other in now else "lacks it"
        raise StateError(
            f"the frozen base is not the one of the interrupted run: {other}: the checkpoint {how}. Put back "
            f"the files that the run began with; {BEGIN_ANEW}"
        )


def _differs(how: str) -> StateError:
    return StateError(
        f"the model is not the one of the interrupted run, which {how}: build it as before; {BEGIN_ANEW}"
    )


def _whole(name: str) -> tuple[str, int]:
    """Return the name of a parameter and 0, or of a tile's parameter and the tile's first row in it."""
    tile = _TILE.fullmatch(name)
    return (name, 0) if tile is None else (tile[1], int(tile[2]))


def _is_like(unit: Unit, saved: Sequence[UnitRecord], chunk_numel: int) -> bool:
    """Return whether the saved unit of this index has the same segments, in chunks that fit staging."""
    was = saved[unit.index] if unit.index < len(saved) else None
    return (
        was is not None
        and bool(was.versions)
        and was.numel == unit.numel
        and list(was.segments) == [(s.name, s.offset, tuple(s.shape)) for s in unit.segments]
        and all(chunk.numel <= chunk_numel for version in was.versions for chunk in version.chunks)
    )


def _anew(
    units: UnitIndex, before: Rule, now: Rule, way: Callable[[Segment], Way | None],
    kept: Mapping[str, Sequence[str]], note: Callable[[str], object],
) -> set[Segment]:  # fmt: skip
    """Return the parameters that another rule than before updates, and cannot go on from its moments.

    ``kept`` has the names of these, by that of the parameter.
    """
    if before.name == now.name:
        return set()
    ways = [(segment, way(segment)) for _, segment in units.segments() if segment.whole.requires_grad]
    had = {s: kept.get(s.whole_name, ()) for s, _ in ways}
    anew = {segment for segment, each in ways if each and not each.goes_on_from(had[segment])}
    note(carried(before, now, len(ways) - len(anew), len(ways)))
    return anew


def _add_others(saved: SavedRun, tiers: Tiers, firsts: dict[int, int]) -> None:
    """Open the files of every old rank that is not in ``firsts``, the numbers of their first files."""
    storage = tiers.storage
    for rank in (rank for rank in range(saved.world_size) if rank not in firsts):
        firsts[rank] = tiers.store.volume.add_sealed([open_own(path) for path in saved.ranks[rank].data])
        if storage.sums is not None:
            load_sums(storage.sums, saved.ranks[rank], firsts[rank])


def _make_anew(unit: Unit, tiers: Tiers, reader: "_Reader", anew: Container[Segment]) -> None:
    for s in unit.segments:
        for place in reader.find(s):
            s.steps = 0 if s in anew else place.steps
    tiers.renew(unit)
    fields = lru_cache(1)(partial(reader.fields, unit, anew))
    tiers.put(unit, lambda *part: fields(*part)[0], lambda *part: fields(*part)[1:])
    unit.home.reloadable = False


@dataclass(frozen=True, slots=True)
class _Place:
    """Locates elements ``[first, stop)`` of a parameter by their old unit and offset; has its step count."""

    unit: int
    offset: int
    shape: tuple[int, ...]  # the parameter's without its first dimension
    steps: int
    first: int
    stop: int


class _Reader:
    """Reads ranges of saved units, whose states have ``layout``; keeps the chunk that was read last."""

    def __init__(self, tiers: Tiers, layout: StateLayout, saved: SavedRun, firsts: Mapping[int, int]) -> None:
        self._tiers, self._layout, self._saved, self._firsts = tiers, layout, saved, firsts
        self._store = copy(tiers.store)
        self._store.layout = layout
        self._places: dict[str, list[_Place]] = {}
        units = (saved.own or saved.ranks[0]).record.units
        for index, unit in enumerate(units):
            for (tile, offset, shape), steps in zip(unit.segments, unit.counts, strict=True):
                (name, row), inner = _whole(tile), shape[1:]
                first = row * math.prod(inner)
                place = _Place(index, offset, inner, steps, first, first + math.prod(shape))
                self._places.setdefault(name, []).append(place)
        self._shard_numels = [unit.numel // saved.world_size for unit in units]
        self._held = contextlib.ExitStack()
        self._chunk: ChunkExtents | None = None
        self._fields: tuple[Tensor, ...] = ()

    def find(self, segment: Segment) -> list[_Place]:
        """Return where the elements of a parameter or tile were saved; a StateError if they were nowhere."""
        name, shape = segment.whole_name, tuple(segment.whole_shape)
        places = self._places.get(name, [])
        numel = sum(place.stop - place.first for place in places)
        if not places:
            raise _differs(f"has no {name}; this one has shape {shape}")
        inner = places[0].shape
        if inner != shape[1:] or numel != math.prod(shape):
            was = numel // max(1, math.prod(inner)), *inner
            raise _differs(f"has {name} of shape {was}; this one has shape {shape}")
        if segment.numel == segment.whole_shape.numel():
            return places
        stop = segment.first + segment.numel
        return [place for place in places if place.first < stop and segment.first < place.stop]

    def fields(self, unit: Unit, anew: Container[Segment], start: int, stop: int) -> tuple[Tensor, ...]:
        """Return exact values and moments, fp32, of elements of a unit; no moments of parameters ``anew``."""
        names = self._tiers.layout.full_names
        made = {name: torch.zeros(stop - start, device="cpu") for name in names}
        for s, low, first, numel in unit.within(start, stop):
            for at, values in self._read(s, first, first + numel):
                for name in names[:1] if s in anew else names:
                    if name in values:
                        made[name][low - start + at - first :][: len(values[name])] = values[name]
        return tuple(made.values())

    def _read(self, segment: Segment, at: int, end: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield the first element in its parameter, and the values by name, of parts of ``[at, end)``."""
        for place in self.find(segment):
            low, high, shift = max(at, place.first), min(end, place.stop), place.offset - place.first
            numel = self._shard_numels[place.unit]
            for rank, begin, stop in shard_ranges(low + shift, high + shift, numel):
                unit, first = self._saved.ranks[rank].record.units[place.unit], rank * numel - shift
                if not unit.versions:
                    raise _differs(f"loads {unit.segments[0][0]} from a checkpoint, frozen")
                for chunk in unit.committed.chunks:
                    part = max(begin, chunk.start), min(stop, chunk.start + chunk.numel)
                    if part[0] < part[1]:
                        yield (
                            first + part[0],
                            self._values(rank, chunk, part[0] - chunk.start, part[1] - chunk.start),
                        )

    def _values(self, rank: int, chunk: ChunkExtents, begin: int, stop: int) -> dict[str, Tensor]:
        if self._chunk is not chunk:
            self.close()
            here = chunk.shifted(self._firsts[rank])
            self._chunk, self._fields = chunk, self._held.enter_context(self._store.reading(here))
        weight, *state = self._fields
        values = self._layout.full_values(weight[begin:stop], self._layout.part(state, begin, stop))
        return dict(zip(self._layout.full_names, values, strict=True))

    def close(self) -> None:
        self._chunk, self._fields = None, ()
        self._held.close()
