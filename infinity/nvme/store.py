"""Which extents hold which unit: two versions, cut into the chunks of the update.

[Note: the layout of a unit on disk]
A version of a unit is its shard's weights, end to end, and its shard's state, chunk by chunk, each
chunk's fields one after the other. So a forward pass reads the weights in one sweep, and the update
reads and writes each chunk's state in one request sequence.
"""

from dataclasses import dataclass

from infinity.core.extent import Extent
from infinity.nvme.volume import Volume


@dataclass(frozen=True, slots=True)
class ChunkExtents:
    """Elements ``[start, start + numel)`` of a shard in one version."""

    start: int
    numel: int
    weight: Extent
    state: Extent


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


class ShardStore:
    """The extents of every unit of this rank.

    Args:
        volume: Where they are allocated.
        weight_itemsize: Bytes of weight per element.
        state_itemsize: Bytes of state per element.
        versions: Places per unit, 1 or 2.
        chunk_numel: Elements of a chunk; a multiple of 2,048.
    """

    def __init__(
        self, volume: Volume, *, weight_itemsize: int, state_itemsize: int, versions: int, chunk_numel: int
    ) -> None:
        self.volume, self.versions, self.chunk_numel = volume, versions, chunk_numel
        self._weight_itemsize, self._state_itemsize = weight_itemsize, state_itemsize
        self._units: dict[int, list[Version]] = {}

    def allocate(self, unit: int, shard_numel: int, name: str) -> None:
        """Make room for every version of a unit.

        Raises:
            DiskError: The file system is full.
        """
        self._units[unit] = [self._version(shard_numel, name) for _ in range(self.versions)]

    def has(self, unit: int) -> bool:
        return unit in self._units

    def version(self, unit: int, which: int) -> Version:
        return self._units[unit][which % self.versions]

    def free(self, unit: int) -> None:
        """Give back what a unit holds."""
        for version in self._units.pop(unit, []):
            for chunk in version.chunks:
                self.volume.free(chunk.weight)
                self.volume.free(chunk.state)

    def _version(self, shard_numel: int, name: str) -> Version:
        starts = range(0, shard_numel, self.chunk_numel)
        sizes = [min(self.chunk_numel, shard_numel - start) for start in starts]
        weights = [self.volume.allocate(n * self._weight_itemsize, what=name) for n in sizes]
        states = [self.volume.allocate(n * self._state_itemsize, what=name) for n in sizes]
        chunks = zip(starts, sizes, weights, states, strict=True)
        return Version(tuple(ChunkExtents(*chunk) for chunk in chunks))
