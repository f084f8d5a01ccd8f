"""Puts the states of an interrupted run into their places.

[Note: found, then put in place]
Before the model is built, the ranks agree on the newest commit (:mod:`infinity.shards.saved`). While it is
built nothing is stored. Afterwards :func:`restore` gives every unit its states. With as many ranks as
before, a unit that is cut as it was keeps its extents: nothing moves, but into host memory if it lives there
now. Any other unit is made anew from the old shards, chunk by chunk; the old files go when the first commit
after that stands on all ranks, and until then a crash leaves them as they were.
"""

import contextlib
import math
import re
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from infinity.core.errors import BEGIN_ANEW, StateError
from infinity.core.files import open_found
from infinity.core.intervals import ShardPiece, Span, shard_pieces
from infinity.nvme.volume import SealedFile, Volume, open_direct
from infinity.optim.rules import ADAMW
from infinity.partition.unit import Segment, Unit, UnitIndex
from infinity.shards.homes import DiskHome, HostHome
from infinity.shards.saved import SavedRank, SavedRun
from infinity.shards.storage import ShardStore, Version, versions_of_plain, versions_to_plain
from infinity.shards.tiers import Tiers, is_reloadable
from infinity.shards.verified import BlockSums, load_sums

#: The name of a tile: that of its parameter, and its rows.
_TILE = re.compile(r"(.*)\[(\d+):(\d+)\]", re.DOTALL)


def describe(units: Sequence[Unit], tiers: Tiers) -> dict[str, Any]:
    """Describe where the versions of every unit lie, and what lies there: the layout for a commit.

    A unit whose values come from a checkpoint that is loaded again has none, and the files of that are.
    """
    listed = []
    for unit in units:
        versions = None
        if not is_reloadable(unit):
            disk = unit.home.copy if isinstance(unit.home, HostHome) else unit.home
            assert isinstance(disk, DiskHome)
            versions = versions_to_plain(disk.versions)
        segments = [[s.name, s.offset, list(s.shape)] for s in unit.segments]
        listed.append({"numel": unit.numel, "segments": segments, "versions": versions})
    base = dict(tiers.base_files) if any(map(is_reloadable, units)) else {}
    files = tiers.storage.files
    drives = 0 if files is None else len(files.paths)
    return {
        "dtype": str(tiers.layout.dtype), "rule": tiers.storage.rule.name, "drives": drives,
        "units": listed, "base": base,
    }  # fmt: skip


def _is_there(unit: Unit, tiers: Tiers, unsaved: Container[str]) -> bool:
    """Whether a checkpoint was loaded again that gives the unit's values, as in the interrupted run."""
    return is_reloadable(unit) and all(segment.whole_name in unsaved for segment in unit.segments)


@dataclass(slots=True)
class Restored:
    """Files and places that go when the first commit after the restored one stands on all ranks.

    Attributes:
        adopted: Units that have the places of the saved commit; all others have new ones.
        versions: Extents in the rank's own files.
        sources: Files of the generation before.
    """

    adopted: set[int]
    versions: list[Version] = field(default_factory=list)
    sources: list["_Source"] = field(default_factory=list)

    def discard(self, store: ShardStore, world_size: int) -> None:
        """Give room back."""
        store.free_versions(self.versions)
        for source in self.sources:
            for path in source.paths(world_size):
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()


def restore(saved: SavedRun, units: UnitIndex, tiers: Tiers, volume: Volume) -> Restored:
    """Give every unit the states of the saved commit, in its home; this rank's part.

    Raises:
        StateError: The model, or its frozen base, is another one than that of the run; names the first
            difference.
        DiskError: States cannot be read, or there is no room.
    """
    layout = (saved.own or saved.ranks[0]).layout
    dtype, was = str(tiers.layout.dtype), layout["dtype"]
    if was != dtype:
        raise StateError(
            f"the interrupted run computes in {was}, this one in {dtype}: set train.dtype as it was"
        )
    rule, was = tiers.storage.rule.name, layout.get("rule", ADAMW.name)
    if was != rule:
        raise StateError(f"the interrupted run was updated by {was}, this one by {rule}: {BEGIN_ANEW}")
    mine = None if saved.own is None else _Source(saved.own, 0)
    likes = {u.index for u in units if mine is not None and mine.is_like(u, tiers.storage.chunk_numel)}
    unsaved = {
        _Place.of(segment[0], 0, 0, (), 0)[0]
        for unit in layout["units"]
        if unit["versions"] is None
        for segment in unit["segments"]
    }
    left, restored = Restored(likes), [u for u in units if not _is_there(u, tiers, unsaved)]
    if len(restored) < len(units):
        _check_base(layout.get("base", tiers.base_files), tiers.base_files)
    sources = {} if mine is None or saved.own is None else {saved.own.files.rank: mine}
    if any(unit.index not in likes for unit in restored):
        for rank in range(saved.world_size):
            if rank not in sources:
                sources[rank] = _open_source(saved.ranks[rank], volume, tiers.storage.sums)
    tiers.pending = False
    with contextlib.closing(_Reader(tiers, sources, saved.world_size)) as reader:
        for unit in restored:
            tiers.forget(unit)  # it may have been placed for values of a base
            if mine is not None and unit.index in likes:
                _adopt(unit, mine, tiers)
            else:
                _make_anew(unit, tiers, reader)
            unit.updates += 1
    for source in sources.values():
        if source is not mine:  # another rank removes it, perhaps before this one
            volume.drop_sealed(source.first, len(source.saved.data))
            if tiers.storage.sums is not None:
                tiers.storage.sums.drop(source.first, len(source.saved.data))
    if mine is not None:
        left.versions = [version for index, version in mine.versions() if index not in likes]
    else:
        left.sources = list(sources.values())
    return left


def _check_base(was: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise unless the files of the frozen base are those of the interrupted run.

    Raises:
        StateError: They differ; names one.
    """
    other = next((name for name in sorted(was.keys() | now.keys()) if was.get(name) != now.get(name)), None)
    if other is not None:
        how = "lacked it then" if other not in was else "holds other bytes" if other in now else "lacks it"
        raise StateError(
            f"the frozen base is not the one of the interrupted run: {other}: the checkpoint {how}. Put back "
            f"the files that the run began with; {BEGIN_ANEW}"
        )


def _open_source(saved: SavedRank, volume: Volume, sums: BlockSums | None) -> "_Source":
    first = len(volume)
    for path in saved.data:
        fd, direct = open_direct(path, open_found, "opening")
        volume.add_sealed([SealedFile(path, fd, direct, path.stat().st_size)])
    if sums is not None:
        load_sums(sums, saved, first)
    return _Source(saved, first)


def _differs(how: str) -> str:
    return f"the model is not the one of the interrupted run, which {how}: build it as before; {BEGIN_ANEW}"


class _Source:
    """The units of one rank in the saved commit.

    Attributes:
        first: Number of the volume's file that is its first.
    """

    def __init__(self, saved: SavedRank, first: int) -> None:
        self.saved, self.record, self.first = saved, saved.record, first
        self.units: Sequence[Mapping[str, Any]] = saved.layout["units"]
        self._versions = [versions_of_plain(unit["versions"] or [], first) for unit in self.units]

    def segments(self) -> Iterator[tuple[str, int, int, tuple[int, ...], int]]:
        """Name, unit, offset, shape and step count of every parameter."""
        for index, (unit, counts) in enumerate(zip(self.units, self.record.counts, strict=True)):
            for (name, offset, shape), steps in zip(unit["segments"], counts, strict=True):
                yield name, index, offset, tuple(shape), steps

    def is_like(self, unit: Unit, chunk_numel: int) -> bool:
        """Return whether the unit is cut as the one of its index was, into chunks that can be staged."""
        if unit.index >= len(self.units) or not self._versions[unit.index]:
            return False
        saved = self.units[unit.index]
        return (
            saved["numel"] == unit.numel
            and saved["segments"] == [[s.name, s.offset, list(s.shape)] for s in unit.segments]
            and all(c.numel <= chunk_numel for v in self._versions[unit.index] for c in v.chunks)
        )

    def versions(self) -> Iterator[tuple[int, Version]]:
        """Every version, with the index of its unit."""
        return ((index, version) for index, each in enumerate(self._versions) for version in each)

    def of_unit(self, index: int) -> list[Version]:
        return self._versions[index]

    def committed(self, index: int) -> Version:
        """The committed version of a unit.

        Raises:
            StateError: The run has none: its values come from a checkpoint.
        """
        versions = self._versions[index]
        if not versions:
            raise StateError(
                _differs(f"loads {self.units[index]['segments'][0][0]} from a checkpoint, frozen")
            )
        return versions[self.record.versions[index] % len(versions)]

    def paths(self, world_size: int) -> Iterator[Path]:
        """Every file of the rank in its generation; its locks, if it is none of ``world_size`` ranks."""
        rank = self.saved.files.rank
        stem = f"rank{rank}-{self.saved.files.generation}"
        for folder in {self.saved.journal.parent, *(path.parent for path in self.saved.data)}:
            yield from folder.glob(f"{stem}[-.]*")
            if rank >= world_size:
                yield folder / f"rank{rank}.lock"


def _adopt(unit: Unit, source: _Source, tiers: Tiers) -> None:
    """Let a unit keep its extents; one that lives in host memory is read."""
    for segment, steps in zip(unit.segments, source.record.counts[unit.index], strict=True):
        segment.steps = steps
    tiers.adopt(unit, source.of_unit(unit.index), source.record.versions[unit.index])


def _make_anew(unit: Unit, tiers: Tiers, reader: "_Reader") -> None:
    """Make a unit's states from the saved shards, wherever they are."""
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
    """The old place of a parameter, or of a tile of it: index of the unit, offset in it; and its step count.

    Attributes:
        shape: The shape of the parameter without its first dimension, if it has any.
        first: The first element of the parameter that was there.
        stop: The one after the last.
    """

    unit: int
    offset: int
    shape: tuple[int, ...]
    steps: int
    first: int
    stop: int

    @classmethod
    def of(
        cls, name: str, unit: int, offset: int, shape: tuple[int, ...], steps: int
    ) -> tuple[str, "_Place"]:
        """The name of a parameter, and where it was; ``name`` may be that of a tile."""
        tile, width = _TILE.fullmatch(name), math.prod(shape[1:])
        first = 0 if tile is None else int(tile[2]) * width
        place = cls(unit, offset, shape[1:], steps, first, first + math.prod(shape))
        return (name if tile is None else tile[1]), place


class _Reader:
    """Reads ranges of saved units; keeps the chunk that was read last.

    Args:
        sources: Sources by old rank.

    Attributes:
        shard_numels: Elements of a shard of each saved unit.
    """

    def __init__(self, tiers: Tiers, sources: Mapping[int, _Source], world_size: int) -> None:
        self._tiers, self._sources = tiers, sources
        any_rank = next(iter(sources.values()))
        self.shard_numels = [unit["numel"] // world_size for unit in any_rank.units]
        self._places: dict[str, list[_Place]] = {}
        for segment in any_rank.segments():
            name, place = _Place.of(*segment)
            self._places.setdefault(name, []).append(place)
        self._held = contextlib.ExitStack()
        self._at: tuple[int, int, int] | None = None
        self._fields: tuple[Tensor, ...] = ()

    def find(self, segment: Segment) -> list[_Place]:
        """Return where a parameter was, or what has elements of a tile.

        Raises:
            StateError: The run has no such parameter.
        """
        name, shape = segment.whole_name, tuple(segment.whole_shape)
        places = self._places.get(name, [])
        numel = sum(place.stop - place.first for place in places)
        was = shape
        if places and shape and (inner := math.prod(places[0].shape)):
            was = numel // inner, *places[0].shape
        if not places or was != shape or numel != math.prod(shape):
            has = f"{name} of shape {was}" if places else f"no {name}"
            raise StateError(_differs(f"has {has}; this one has shape {shape}"))
        if segment.numel == segment.whole_shape.numel():
            return places
        stop = segment.first + segment.numel
        return [place for place in places if place.first < stop and segment.first < place.stop]

    def read(self, piece: ShardPiece, into: tuple[Tensor, ...]) -> None:
        """Copy a piece of a saved shard, field by field."""
        at = piece.start
        while at < piece.stop:
            start, fields = self._chunk(piece.rank, piece.unit, at)
            end = min(piece.stop, start + len(fields[0]))
            for target, values in zip(into, fields, strict=True):
                target[at - piece.start : end - piece.start] = values[at - start : end - start]
            at = end

    def _chunk(self, rank: int, unit: int, within: int) -> tuple[int, tuple[Tensor, ...]]:
        """Start and fields of the chunk that has element ``within`` of a rank's shard."""
        chunks = self._sources[rank].committed(unit).chunks
        number = next(n for n, c in enumerate(chunks) if c.start <= within < c.start + c.numel)
        if self._at != (rank, unit, number):
            self.close()
            self._fields = self._held.enter_context(self._tiers.store.reading(chunks[number]))
            self._at = rank, unit, number
        return chunks[number].start, self._fields

    def close(self) -> None:
        """Give the memory back. May be called twice."""
        self._at, self._fields = None, ()
        self._held.close()
