"""Room for shards on NVMe, in versions that are cut into the chunks of the update.

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

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from infinity.core.config import Config, Valid, option
from infinity.core.nbytes import Extent, Piece
from infinity.core.transfer import Lease, Pool, Transfer, TransferEngine
from infinity.nvme.volume import Volume
from infinity.optim.layout import StateLayout, store_master

#: Whether a run that was interrupted goes on.
Resume = Literal["auto", "never", "must"]


@dataclass(frozen=True, kw_only=True)
class DurabilityConfig(Config):
    """Commits of steps: what they survive, and how often one is recorded."""

    survives: Literal["process", "power"] = option(
        "process",
        "what a committed step survives; process: any kill; power: a power cut, too, for a sync of the "
        "drives in every step",
    )
    every: int | None = option(
        None,
        "steps from one recorded commit to the next; null: 1 if all states live on NVMe, else as many as "
        "keep the cost of writing those in host memory below 3.5 % of the time",
        Valid(1, 10**9),
    )


_NOWHERE = Extent(())


@dataclass(frozen=True, slots=True)
class ChunkExtents:
    """Elements ``[start, start + numel)`` of a shard in one version.

    Attributes:
        exact: Extents of what the exact values have beyond the weights; empty: nothing.
        moments: Extents of the update rule's moments; empty while the unit was never trained.
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
    """A version: one of the places where a unit's shard is on NVMe."""

    chunks: tuple[ChunkExtents, ...]

    @property
    def weight(self) -> Extent:
        """Return all weights of the shard, in order."""
        whole = Extent(())
        for chunk in self.chunks:
            whole = whole + chunk.weight
        return whole


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
    """Room on NVMe for the shards of this rank, and how their chunks move.

    Args:
        volume: The volume in which extents are allocated.
        engine: Reads and writes them.
        pool: The pool of staging memory for chunks.
        layout: The layout of weights and states.
        versions: Places of a unit when it is first trained: 1, 2, or 3 where not every step is recorded.
        chunk_numel: Elements of a chunk; a multiple of 2,048.

    Attributes:
        changes: Grows whenever a unit gets or loses extents.
    """

    def __init__(
        self, volume: Volume, engine: TransferEngine, pool: Pool, layout: StateLayout, *,
        versions: int, chunk_numel: int,
    ) -> None:  # fmt: skip
        self.volume, self.engine, self.pool, self.layout = volume, engine, pool, layout
        self.versions, self.chunk_numel = versions, chunk_numel
        self._exact, self._moments = layout.only(exact=True), layout.only(moments=True)
        self._gradients: dict[int, Extent] = {}  # by unit, if its gradient waits here; no commit names it
        self.changes = 0

    def places(self, shard_numel: int) -> list[tuple[int, int]]:
        """Start and elements of every chunk of a shard."""
        starts = range(0, shard_numel, self.chunk_numel)
        return [(start, min(self.chunk_numel, shard_numel - start)) for start in starts]

    # --- room ----------------------------------------------------------------------------------

    def weights(self, places: Iterable[tuple[int, int]], name: str) -> Version:
        """Make room for the weights of one version.

        Raises:
            DiskError: The file system is full.
        """
        return Version(
            tuple(
                ChunkExtents(start, numel, self.volume.allocate(self.layout.weight_nbytes(numel), what=name))
                for start, numel in places
            )
        )

    def with_exact(self, chunk: ChunkExtents, name: str) -> ChunkExtents:
        """Make room, zeros, for what makes a chunk exact, unless it has it."""
        if chunk.exact.pieces or not self._exact.fields:
            return chunk
        return replace(chunk, exact=self._zeros(self._exact, chunk.numel, name))

    def with_state(self, chunk: ChunkExtents, name: str) -> ChunkExtents:
        """Make room, zeros, for all that training needs of a chunk that was never trained."""
        chunk = self.with_exact(chunk, name)
        return replace(chunk, moments=self._zeros(self._moments, chunk.numel, name))

    def _zeros(self, layout: StateLayout, numel: int, name: str) -> Extent:
        return self.volume.allocate(layout.state_nbytes(numel), what=name, zeroed=True)

    def free_versions(self, versions: Iterable[Version]) -> None:
        """Give back extents that no unit has any more."""
        for chunk in (chunk for version in versions for chunk in version.chunks):
            self.volume.free(chunk.weight)
            self.volume.free(chunk.state)

    @property
    def with_gradient(self) -> frozenset[int]:
        """Indices of units with a place for their gradient."""
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

    # --- chunks in memory ------------------------------------------------------------------------

    def views(self, lease: Lease, numel: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return weights and state of a chunk in memory that has room for all of it."""
        middle = self.layout.weight_nbytes(numel)
        end = middle + self.layout.state_nbytes(numel)
        weight = lease.tensor[:middle].view(self.layout.dtype)
        return weight, self.layout.views(lease.tensor[middle:end], numel)

    def chunk_nbytes(self, numel: int) -> int:
        """Return the bytes of weights and state of ``numel`` elements."""
        return self.layout.weight_nbytes(numel) + self.layout.state_nbytes(numel)

    @contextmanager
    def reading(self, chunk: ChunkExtents, room: Lease | None = None) -> Iterator[tuple[Tensor, ...]]:
        """Weights and state of a chunk, in memory that is held inside the context.

        Args:
            room: Memory for it; None: memory of the pool.
        """
        nbytes = self.chunk_nbytes(chunk.numel)
        with nullcontext(room) if room is not None else self.pool.lease(nbytes, who="saved states") as lease:
            weight, state = self.views(lease, chunk.numel)
            self.read(chunk, lease, weight, state)
            yield weight, *state

    def read(self, chunk: ChunkExtents, lease: Lease, weight: Tensor, state: tuple[Tensor, ...]) -> None:
        """Read what a chunk has on NVMe, and complete what it does not have there; blocking."""
        for transfer in [self.engine.read(*part) for part in self._parts(chunk, lease.memory)]:
            transfer.wait()
        if not chunk.exact.pieces:
            store_master(self.layout, weight.float(), weight, state)
        if not chunk.moments.pieces:
            for moment in self.layout.moments_of(state):
                moment.zero_()

    def write(self, chunk: ChunkExtents, lease: Lease) -> list[Transfer]:
        """Start to write what a chunk has room for on NVMe."""
        return [self.engine.write(*part) for part in self._parts(chunk, lease.memory)]

    def _parts(self, chunk: ChunkExtents, memory: memoryview) -> Iterator[tuple[Extent, memoryview]]:
        """Yield a chunk's extents on NVMe, each with its place in memory that has room for all of it."""
        begin = 0
        for extent, nbytes in (
            (chunk.weight, self.layout.weight_nbytes(chunk.numel)),
            (chunk.exact, self._exact.state_nbytes(chunk.numel)),
            (chunk.moments, self._moments.state_nbytes(chunk.numel)),
        ):
            if extent.pieces:
                yield extent, memory[begin : begin + nbytes]
            begin += nbytes
