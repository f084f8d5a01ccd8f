"""Extents of every unit: two versions, cut into the chunks of the update.

[Note: the layout of a unit on disk]
A version of a unit is its shard's weights, end to end, and its shard's state, chunk by chunk, each
chunk's fields one after the other. So a forward pass reads the weights in one sweep, and the update
reads and writes each chunk's state in one request sequence.

[Note: room as it is needed]
A unit begins with one version of its weights. The part of a chunk's state that makes its weights exact
gets room when it has something to say: a checkpoint in the compute dtype never needs it. Moments and
the second version get room when the unit is first trained. So a frozen unit takes the bytes of its
weights and no more.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from infinity.core.errors import DiskError
from infinity.core.extent import Extent, Piece
from infinity.nvme.volume import Volume
from infinity.optim.layout import StateLayout

_NOWHERE = Extent(())


@dataclass(frozen=True, slots=True)
class ChunkExtents:
    """Elements ``[start, start + numel)`` of a shard in one version.

    Attributes:
        exact: What the exact values have beyond the weights; empty: nothing.
        moments: Of the update rule; empty while the unit was never trained.
    """

    start: int
    numel: int
    weight: Extent
    exact: Extent = _NOWHERE
    moments: Extent = _NOWHERE

    @property
    def state(self) -> Extent:
        """Everything but the weights."""
        return self.exact + self.moments

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return self.weight.pieces + self.exact.pieces + self.moments.pieces


@dataclass(frozen=True, slots=True)
class Version:
    """One of the places where a unit's shard is on NVMe."""

    chunks: tuple[ChunkExtents, ...]

    @property
    def weight(self) -> Extent:
        """All weights of the shard, in order."""
        whole = Extent(())
        for chunk in self.chunks:
            whole = whole + chunk.weight
        return whole


@dataclass(slots=True)
class StoredShard:
    """A unit's shard on NVMe.

    Attributes:
        versions: One while it was never trained, else two or more places, of which an update writes the next.
        name: The unit's, for messages.
    """

    versions: list[Version]
    name: str

    @property
    def trains(self) -> bool:
        """Whether there is room for moments and for every version."""
        return all(chunk.moments.pieces for version in self.versions for chunk in version.chunks)


def versions_to_plain(versions: Iterable[Version]) -> list[Any]:
    """Versions as lists of numbers, for a file; see :func:`versions_of_plain`."""
    return [
        [
            [
                chunk.start,
                chunk.numel,
                *([[p.file, p.offset, p.nbytes] for p in extent.pieces] for extent in each),
            ]
            for chunk in version.chunks
            for each in [(chunk.weight, chunk.exact, chunk.moments)]
        ]
        for version in versions
    ]


def versions_of_plain(plain: list[Any], first: int = 0) -> list[Version]:
    """Versions that :func:`versions_to_plain` gave, in the files from number ``first`` on."""
    return [
        Version(
            tuple(
                ChunkExtents(
                    start,
                    numel,
                    *(Extent(tuple(Piece(first + p[0], p[1], p[2]) for p in each)) for each in rest),
                )
                for start, numel, *rest in chunks
            )
        )
        for chunks in plain
    ]


class ShardStore:
    """The extents of every unit of this rank.

    Args:
        volume: Where they are allocated.
        layout: Of weights and states.
        versions: Places of a unit when it is first trained: 1, 2, or 3 where not every step is recorded.
        chunk_numel: Elements of a chunk; a multiple of 2,048.

    Attributes:
        changes: Grows whenever a unit gets or loses extents.
    """

    def __init__(self, volume: Volume, layout: StateLayout, *, versions: int, chunk_numel: int) -> None:
        self.volume, self.versions, self.chunk_numel = volume, versions, chunk_numel
        self._layout, self._exact, self._moments = layout, layout.only(exact=True), layout.only(moments=True)
        self._shards: dict[int, StoredShard] = {}  # by unit
        self._gradients: dict[int, Extent] = {}  # by unit, if its gradient waits here; no commit names it
        self.changes = 0

    def allocate(self, unit: int, shard_numel: int, name: str) -> None:
        """Make room for one version of a unit's weights.

        Raises:
            DiskError: The file system is full.
        """
        version = Version(self._weights(self.places(shard_numel), name))
        self._set(unit, StoredShard([version], name))

    def adopt(self, unit: int, name: str, versions: list[Version]) -> None:
        """Let a unit have extents that were found, and that the volume counts as taken."""
        self._set(unit, StoredShard(versions, name))

    def versions_of(self, unit: int) -> list[Version]:
        return self._shards[unit].versions

    def _set(self, unit: int, shard: StoredShard) -> None:
        self._shards[unit] = shard
        self.changes += 1

    def places(self, shard_numel: int) -> list[tuple[int, int]]:
        """Start and elements of every chunk of a shard."""
        starts = range(0, shard_numel, self.chunk_numel)
        return [(start, min(self.chunk_numel, shard_numel - start)) for start in starts]

    def has(self, unit: int) -> bool:
        return unit in self._shards

    def trains(self, unit: int) -> bool:
        """Whether the unit has room for moments and for every version."""
        return self._shards[unit].trains

    def version(self, unit: int, which: int) -> Version:
        """The only version of a unit that was never trained, or one of all."""
        versions = self._shards[unit].versions
        return versions[which % len(versions)]

    def add_exact(self, unit: int, number: int) -> ChunkExtents:
        """Make room, zeros, for what makes chunk ``number`` of a unit that was never trained exact.

        Raises:
            DiskError: The file system is full.
        """
        shard = self._shards[unit]
        [version] = shard.versions
        chunk = self._with_exact(version.chunks[number], shard.name)
        shard.versions = [Version((*version.chunks[:number], chunk, *version.chunks[number + 1 :]))]
        self.changes += 1
        return chunk

    def add_all_exact(self, unit: int) -> None:
        """Make room, zeros, for what makes a unit exact that was never trained."""
        for number, chunk in enumerate(self._shards[unit].versions[0].chunks):
            if not chunk.exact.pieces:
                self.add_exact(unit, number)

    def train(self, unit: int, versions: int | None = None) -> None:
        """Make room for all that training needs; moments are zeros. Once is enough.

        Args:
            versions: Places; None: as many as the store's.

        Raises:
            DiskError: The file system is full.
        """
        shard = self._shards[unit]
        if shard.trains:
            return
        [first], name = shard.versions, shard.name
        places = [(chunk.start, chunk.numel) for chunk in first.chunks]
        count = self.versions if versions is None else versions
        bare = [first, *(Version(self._weights(places, name)) for _ in range(1, count))]
        shard.versions = [self._whole(version, name) for version in bare]
        self.changes += 1

    def add_version(self, unit: int) -> None:
        """Make room for another version of a unit that is trained.

        Raises:
            DiskError: The file system is full; nothing changed.
        """
        shard = self._shards[unit]
        chunks: list[ChunkExtents] = []
        try:
            for chunk in shard.versions[0].chunks:
                chunks += self._weights([(chunk.start, chunk.numel)], shard.name)
                chunks[-1] = self._with_exact(chunks[-1], shard.name)
                chunks[-1] = self._with_moments(chunks[-1], shard.name)
        except DiskError:
            self.free_versions([Version(tuple(chunks))])
            raise
        shard.versions = [*shard.versions, Version(tuple(chunks))]
        self.changes += 1

    def _whole(self, version: Version, name: str) -> Version:
        """The version with room for all that training needs."""
        return Version(tuple(self._with_moments(self._with_exact(c, name), name) for c in version.chunks))

    def free(self, unit: int) -> None:
        """Give back what a unit holds."""
        shard = self._shards.pop(unit, None)
        self.free_gradient(unit)
        self.changes += 1
        if shard is not None:
            self.free_versions(shard.versions)

    @property
    def with_gradient(self) -> frozenset[int]:
        """Units with a place for their gradient."""
        return frozenset(self._gradients)

    def gradient(self, unit: int, nbytes: int, name: str) -> Extent:
        """Return the place of a unit's gradient, which is made if there is none.

        Raises:
            DiskError: The file system is full.
        """
        if unit not in self._gradients:
            self._gradients[unit] = self.volume.allocate(nbytes, what=f"the gradient of {name}")
        return self._gradients[unit]

    def free_gradient(self, unit: int) -> None:
        """Give back the place of a unit's gradient, if it has one; nothing may be in flight there."""
        extent = self._gradients.pop(unit, None)
        if extent is not None:
            self.volume.free(extent)

    def free_versions(self, versions: Iterable[Version]) -> None:
        """Give back extents that no unit has any more."""
        for chunk in (chunk for version in versions for chunk in version.chunks):
            self.volume.free(chunk.weight)
            self.volume.free(chunk.state)

    def _weights(self, places: Iterable[tuple[int, int]], name: str) -> tuple[ChunkExtents, ...]:
        return tuple(
            ChunkExtents(start, numel, self.volume.allocate(self._layout.weight_nbytes(numel), what=name))
            for start, numel in places
        )

    def _with_exact(self, chunk: ChunkExtents, name: str) -> ChunkExtents:
        if chunk.exact.pieces or not self._exact.fields:
            return chunk
        return replace(chunk, exact=self._zeros(self._exact.state_nbytes(chunk.numel), name))

    def _with_moments(self, chunk: ChunkExtents, name: str) -> ChunkExtents:
        if not self._moments.fields:
            return chunk
        return replace(chunk, moments=self._zeros(self._moments.state_nbytes(chunk.numel), name))

    def _zeros(self, nbytes: int, name: str) -> Extent:
        return self.volume.allocate(nbytes, what=name, zeroed=True)
