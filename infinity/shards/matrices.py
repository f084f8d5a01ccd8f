"""Whole matrices of a unit: exchanged between ranks, transformed by their owners; and what passes move.

[Note: owners] Each matrix has one owner, chosen from the shapes alone, so that work is even. Of every rank it
gets the part of the directions that lies in that rank's shard, and gives back the same part of what it made.
So a matrix is transformed as on one rank, with the same bits.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from infinity.comm.ranks import Ranks
from infinity.optim.matrix import MatrixRule, Place, owners
from infinity.optim.state import StateLayout
from infinity.partition.unit import Segment, Unit
from infinity.shards.journal import NOWHERE, ChunkExtents, Version
from infinity.shards.pipeline import Runs


def transform_all(
    rule: MatrixRule, ranks: Ranks, unit: Unit, runs: Runs, directions: Tensor, loads: list[int] | None
) -> None:
    """Replace directions, ``(shard_numel,)``, by what the rule makes of the unit's matrices; blocks.

    Several ranks must all call, with the same units in order; ``loads`` is what :func:`owners` has so far.
    """

    def make(place: Place, values: Tensor) -> Tensor:
        return rule.transform_flat(place, values, runs.scale, ranks.device)

    if ranks.collectives is None:
        for place in runs.matrices:
            part = directions[place.start : place.stop]
            part.copy_(make(place, part))
        return
    collectives, everyone, n = ranks.collectives, range(ranks.world_size), unit.shard_numel
    shards = [(rank * n, rank * n + n) for rank in everyone]
    owned: list[list[Place]] = [[] for _ in everyone]
    for place, owner in zip(runs.matrices, owners(runs.matrices, ranks.world_size, loads), strict=True):
        owned[owner].append(place)
    whole, (low, high) = owned[ranks.rank], shards[ranks.rank]
    given = [[place.within(low, high) for place in places] for places in owned]
    taken = [[place.within(*shard) for place in whole] for shard in shards]

    def exchange(parts: Sequence[Tensor], sent: list[list[int]], got: list[list[int]]) -> tuple[Tensor, ...]:
        values = torch.cat([directions.new_empty(0), *parts]).cpu()
        arrived = collectives.all_to_all(
            f"matrices of {unit.name}", values, [*map(sum, sent)], [*map(sum, got)]
        )
        return torch.split(arrived, [numel for numels in got for numel in numels])

    mine = [
        directions[max(low, min(high, p.start)) - low :][: p.within(low, high)]
        for places in owned
        for p in places
    ]
    arrived, made = exchange(mine, given, taken), []
    for number, place in enumerate(whole):
        parts = arrived[number :: len(whole)]  # of all ranks, in order
        made.append(torch.split(make(place, torch.cat(parts)), [len(part) for part in parts]))
    back = exchange([parts[rank] for rank in everyone for parts in made], taken, given)
    for part, values in zip(mine, back, strict=True):
        part.copy_(values)


class ChunkPasses:
    """What each of the two passes of a unit on NVMe moves of its shard's chunks."""

    def __init__(
        self, unit: Unit, rule: MatrixRule, layout: StateLayout, is_matrix: Callable[[Segment], bool]
    ) -> None:
        self._leading = StateLayout(layout.dtype, (), rule.matrix_moments)
        low = unit.shard_start
        self._spans = [(s.offset - low, s.stop - low, is_matrix(s)) for s in unit.segments if s.numel]

    def _kinds(self, chunk: ChunkExtents) -> set[bool]:
        """Return True if there are matrices in a chunk, and False if there is anything else."""
        stop = chunk.start + chunk.numel
        return {kind for begin, end, kind in self._spans if begin < stop and chunk.start < end}

    def first(self, version: Version) -> Version:
        """Return what the first pass moves of a version: moments of chunks with matrices."""
        chunks = []
        for chunk in version.chunks:
            if True in self._kinds(chunk):
                moments = chunk.moments.part(0, self._leading.state_nbytes(chunk.numel))
                chunks.append(ChunkExtents(chunk.start, chunk.numel, NOWHERE, NOWHERE, moments))
        return Version(tuple(chunks))

    def last(self, version: Version, directed: Version) -> Version:
        """Return what the last pass moves: all but the moments of chunks in which there are only matrices.

        Those that the first pass has written, in chunks with both, are read where it did: in ``directed``.
        """
        chunks = []
        for chunk, other in zip(version.chunks, directed.chunks, strict=True):
            moments, kinds = chunk.moments, self._kinds(chunk)
            if kinds == {True, False}:
                nbytes = self._leading.state_nbytes(chunk.numel)
                moments = other.moments.part(0, nbytes) + moments.part(nbytes, moments.nbytes - nbytes)
            elif True in kinds:
                moments = NOWHERE
            chunks.append(ChunkExtents(chunk.start, chunk.numel, chunk.weight, chunk.exact, moments))
        return Version(tuple(chunks))
