"""Restores the states of an interrupted run into a model's units.

[Note: found, then put in place]
Before the model is built, the ranks agree on the newest commit (:mod:`infinity.shards.saved`). While it is
built nothing is stored. Then :func:`restore` gives every unit its states. With as many ranks as before, a
unit that is cut as it was keeps its extents, and is only read if it lives in host memory now. Any other unit
is made anew from the old shards, chunk by chunk; until the first commit after that stands on all ranks the
old files stay, so a crash loses nothing.
"""

import contextlib
import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from infinity.core.errors import BEGIN_ANEW, StateError
from infinity.core.nbytes import ShardPiece, Span, shard_pieces
from infinity.nvme.volume import Volume, open_own
from infinity.optim.rules import ADAMW
from infinity.partition.unit import Segment, Unit, UnitIndex
from infinity.shards.homes import DiskHome, HostHome
from infinity.shards.saved import SavedRank, SavedRun
from infinity.shards.storage import ChunkExtents, ShardStore, Version, versions_of_plain, versions_to_plain
from infinity.shards.tiers import Tiers
from infinity.shards.verified import load_sums

#: Matches the name of a tile: that of its parameter, and its rows.
_TILE = re.compile(r"(.*)\[(\d+):(\d+)\]", re.DOTALL)


def describe(units: Sequence[Unit], tiers: Tiers) -> dict[str, Any]:
    """Return the layout for a commit: where the versions of every unit lie, and what lies there.

    A unit whose values are loaded from a checkpoint again has no versions; the layout has that one's files.
    """
    listed = []
    for unit in units:
        versions = None
        if not unit.home.reloadable:
            disk = unit.home.copy if isinstance(unit.home, HostHome) else unit.home
            assert isinstance(disk, DiskHome)
            versions = versions_to_plain(disk.versions)
        segments = [[s.name, s.offset, list(s.shape)] for s in unit.segments]
        listed.append({"numel": unit.numel, "segments": segments, "versions": versions})
    base = dict(tiers.base_files) if any(unit.home.reloadable for unit in units) else {}
    files = tiers.storage.files
    drives = 0 if files is None else len(files.paths)
    return {
        "dtype": str(tiers.layout.dtype), "rule": tiers.storage.rule.name, "drives": drives,
        "units": listed, "base": base,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Restored:
    """Holds files and places that go when the first commit after the restored one stands on all ranks."""

    adopted: set[int]  # units that have the places of the saved commit; all others have new ones
    versions: Sequence[Version] = ()  # in the rank's own files
    paths: Sequence[Path] = ()  # of the generation before

    def discard(self, store: ShardStore) -> None:
        store.free_versions(self.versions)
        for path in self.paths:
            path.unlink(missing_ok=True)


def restore(saved: SavedRun, units: UnitIndex, tiers: Tiers, volume: Volume) -> Restored:
    """Restore this rank's part of every unit from the saved commit, in the unit's home.

    Raises a StateError, which names the first difference, if the model or its frozen base is another one.
    """
    storage, layout = tiers.storage, (saved.own or saved.ranks[0]).layout
    dtype, was = str(tiers.layout.dtype), layout["dtype"]
    if was != dtype:
        raise StateError(
            f"the interrupted run computes in {was}, this one in {dtype}: set train.dtype as it was"
        )
    rule, was = storage.rule.name, layout.get("rule", ADAMW.name)
    if was != rule:
        raise StateError(f"the interrupted run was updated by {was}, this one by {rule}: {BEGIN_ANEW}")
    mine = None if saved.own is None else _Source(saved.own, 0)
    likes = {u.index for u in units if mine is not None and mine.is_like(u, storage.chunk_numel)}
    unsaved = {
        _whole(name)[0]
        for unit in layout["units"]
        if unit["versions"] is None
        for name, _, _ in unit["segments"]
    }
    # The others have their values from a checkpoint that was loaded again, as in the interrupted run.
    restored = [
        u for u in units if not u.home.reloadable or any(s.whole_name not in unsaved for s in u.segments)
    ]
    if len(restored) < len(units):
        _check_base(layout.get("base", tiers.base_files), tiers.base_files)
    sources = {} if mine is None else {mine.saved.files.rank: mine}
    if any(unit.index not in likes for unit in restored):
        for rank in range(saved.world_size):
            if rank not in sources:
                first = volume.add_sealed([open_own(path) for path in saved.ranks[rank].data])
                if storage.sums is not None:
                    load_sums(storage.sums, saved.ranks[rank], first)
                sources[rank] = _Source(saved.ranks[rank], first)
    tiers.pending = False
    with contextlib.closing(_Reader(tiers, sources, saved.world_size)) as reader:
        for unit in restored:
            if isinstance(unit.home, DiskHome):  # it may have been placed for values of a base
                unit.home.free()
            if mine is not None and unit.index in likes:
                _adopt(unit, mine, tiers)
            else:
                _make_anew(unit, tiers, reader)
            unit.updates += 1
    for source in sources.values():
        if source is not mine:  # another rank removes it, perhaps before this one
            volume.drop_sealed(source.first, len(source.saved.data))
            if storage.sums is not None:
                storage.sums.drop(source.first, len(source.saved.data))
    if mine is not None:
        return Restored(likes, [v for n, each in enumerate(mine.versions) if n not in likes for v in each])
    paths = (path for source in sources.values() for path in source.paths(units[0].world_size))
    return Restored(likes, paths=list(paths))


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


class _Source:
    """Holds the units of one rank in the saved commit; ``first`` is the volume's number of its first file."""

    def __init__(self, saved: SavedRank, first: int) -> None:
        self.saved, self.first = saved, first
        self.units: Sequence[Mapping[str, Any]] = saved.layout["units"]
        self.versions = [versions_of_plain(unit["versions"] or [], first) for unit in self.units]

    def is_like(self, unit: Unit, chunk_numel: int) -> bool:
        """Return whether the saved unit of this index has the same segments, in chunks that fit staging."""
        if unit.index >= len(self.units) or not self.versions[unit.index]:
            return False
        saved = self.units[unit.index]
        return (
            saved["numel"] == unit.numel
            and saved["segments"] == [[s.name, s.offset, list(s.shape)] for s in unit.segments]
            and all(c.numel <= chunk_numel for v in self.versions[unit.index] for c in v.chunks)
        )

    def committed(self, index: int) -> Version:
        """Return the committed version of a unit; a StateError if its values came from a checkpoint."""
        versions = self.versions[index]
        if not versions:
            raise _differs(f"loads {self.units[index]['segments'][0][0]} from a checkpoint, frozen")
        return versions[self.saved.record.versions[index] % len(versions)]

    def paths(self, world_size: int) -> Iterator[Path]:
        """Yield each file of the rank's generation, and its locks if it is none of ``world_size`` ranks."""
        files = self.saved.files
        for folder in {self.saved.journal.parent, *(path.parent for path in self.saved.data)}:
            yield from folder.glob(f"{files.stem}[-.]*")
            if files.rank >= world_size:
                yield folder / f"rank{files.rank}.lock"


def _adopt(unit: Unit, source: _Source, tiers: Tiers) -> None:
    """Let a unit keep its extents; if it lives in host memory, read them."""
    record = source.saved.record
    for segment, steps in zip(unit.segments, record.counts[unit.index], strict=True):
        segment.steps = steps
    tiers.adopt(unit, source.versions[unit.index], record.versions[unit.index])


def _make_anew(unit: Unit, tiers: Tiers, reader: "_Reader") -> None:
    spans: list[Span] = []
    old: dict[Hashable, tuple[int, int]] = {}
    for s in unit.segments:
        for place in reader.find(s):
            s.steps = place.steps
            start, stop = max(s.first, place.first), min(s.first + s.numel, place.stop)
            source, shift = (s.whole_name, start), s.offset - s.first
            spans.append(Span(source, start + shift, stop + shift))
            old[source] = (place.unit, place.offset + start - place.first)
    for start, weight, state in tiers.make_anew(unit):
        fields = (weight, *state)
        for values in fields:
            values.zero_()
        first = unit.shard_start + start
        for piece in shard_pieces(first, first + len(weight), spans, old, reader.shard_numels):
            stop = piece.target + piece.stop - piece.start
            reader.read(piece, tuple(values[piece.target : stop] for values in fields))


@dataclass(frozen=True, slots=True)
class _Place:
    """Locates elements ``[first, stop)`` of a parameter by their old unit and offset; has its step count.

    ``shape`` is the parameter's without its first dimension, if it has any.
    """

    unit: int
    offset: int
    shape: tuple[int, ...]
    steps: int
    first: int
    stop: int


class _Reader:
    """Reads ranges of saved units; keeps the chunk that was read last."""

    def __init__(self, tiers: Tiers, sources: Mapping[int, _Source], world_size: int) -> None:
        self._tiers, self._sources = tiers, sources
        any_rank = next(iter(sources.values()))
        self.shard_numels = [unit["numel"] // world_size for unit in any_rank.units]
        self._places: dict[str, list[_Place]] = {}
        for index, unit in enumerate(any_rank.units):
            counts = any_rank.saved.record.counts[index]
            for (tile, offset, shape), steps in zip(unit["segments"], counts, strict=True):
                (name, row), inner = _whole(tile), tuple(shape[1:])
                first = row * math.prod(inner)
                place = _Place(index, offset, inner, steps, first, first + math.prod(shape))
                self._places.setdefault(name, []).append(place)
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

    def read(self, piece: ShardPiece, into: tuple[Tensor, ...]) -> None:
        chunks, at = self._sources[piece.rank].committed(piece.unit).chunks, piece.start
        while at < piece.stop:
            chunk = next(each for each in chunks if each.start <= at < each.start + each.numel)
            if self._chunk is not chunk:
                self.close()
                self._chunk, self._fields = chunk, self._held.enter_context(self._tiers.store.reading(chunk))
            end = min(piece.stop, chunk.start + chunk.numel)
            for target, values in zip(into, self._fields, strict=True):
                target[at - piece.start : end - piece.start] = values[at - chunk.start : end - chunk.start]
            at = end

    def close(self) -> None:
        self._chunk, self._fields = None, ()
        self._held.close()
