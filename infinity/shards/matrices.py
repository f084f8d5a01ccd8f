"""Whole matrices of a unit: exchanged between ranks, transformed by their owners; and what passes move.

[Note: owners] Each matrix has one owner, chosen from the shapes alone, so that work is even, or what each
keeps of matrices (:class:`infinity.shards.pipeline.Sums`). Of every rank an owner gets the part of the
directions that lies in that rank's shard, and gives back the same part of what it made.
So a matrix is transformed as on one rank, with the same bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from infinity.comm.ranks import Ranks
from infinity.optim.matrix import owners
from infinity.optim.rule import Place, Way
from infinity.optim.state import StateLayout
from infinity.partition.unit import Unit
from infinity.shards.journal import NOWHERE, ChunkExtents, Version
from infinity.shards.pipeline import Runs


def transform_all(ranks: Ranks, unit: Unit, runs: Runs, directions: Tensor, loads: list[int] | None) -> None:
    """Replace directions, ``(shard_numel,)``, by what is made of the unit's matrices; blocks.

    Several ranks must all call, with the same units in order; ``loads`` is what :func:`owners` has so far.
    """

    def make(place: Place, values: Tensor) -> Tensor:
        matrix = values.view(place.rows, place.columns).to(ranks.device)
        with torch.no_grad():
            made = place.transform(matrix if runs.factor == 1 else matrix.float() * runs.factor)
        return made.reshape(-1).to(values)

    if ranks.collectives is None:
        for place in runs.matrices:
            part = directions[place.start : place.stop]
            part.copy_(make(place, part))
        return
    collectives, everyone, n = ranks.collectives, range(ranks.world_size), unit.shard_numel
    shards = [(rank * n, rank * n + n) for rank in everyone]
    owned: list[list[Place]] = [[] for _ in everyone]
    for place, owner in zip(runs.matrices, owners(runs.matrices, ranks.world_size, loads), strict=True):
        owned[owner if place.owner is None else place.owner].append(place)
    whole, (low, high) = owned[ranks.rank], shards[ranks.rank]
    given = [[place.within(low, high) for place in places] for places in owned]
    taken = [[place.within(*shard) for place in whole] for shard in shards]

    def exchange(parts: Sequence[Tensor], sent: list[list[int]], got: list[list[int]]) -> tuple[Tensor, ...]:
        none = torch.empty(0, dtype=directions.dtype, device="cpu")
        values = torch.cat([none, *(part.cpu() for part in parts)])
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
    """What each of the two passes of a unit on NVMe moves of its shard's chunks.

    ``ways`` are those of the segments that have two passes, by index.
    """

    def __init__(self, unit: Unit, ways: Mapping[int, Way]) -> None:
        way, low = next(iter(ways.values())), unit.shard_start
        moments = () if way.first is None else way.first.moments
        self._first, self._skips = StateLayout(unit.dtype, (), moments), not way.last.moments
        self._spans = [(s.offset - low, s.stop - low, s.index in ways) for s in unit.segments if s.numel]

    def _split(self, chunk: ChunkExtents) -> tuple[int, bool]:
        """Return the bytes of moments that the first pass moves, and whether the last one moves none."""
        stop = chunk.start + chunk.numel
        kinds = {kind for begin, end, kind in self._spans if begin < stop and chunk.start < end}
        nbytes = self._first.state_nbytes(chunk.numel) if True in kinds else 0
        return nbytes, self._skips and kinds == {True}

    def first(self, version: Version) -> Version:
        """Return what the first pass moves of a version: moments of chunks with matrices."""
        sizes = ((chunk, self._split(chunk)[0]) for chunk in version.chunks)
        return Version(tuple(
            ChunkExtents(chunk.start, chunk.numel, NOWHERE, NOWHERE, chunk.moments.part(0, nbytes))
            for chunk, nbytes in sizes if nbytes
        ))  # fmt: skip

    def last(self, version: Version, directed: Version) -> Version:
        """Return what the last pass moves: all but the moments of chunks in which there are only matrices.

        Those that the first pass has written, in chunks with both, are read where it did: in ``directed``.
        """
        chunks = []
        for chunk, other in zip(version.chunks, directed.chunks, strict=True):
            nbytes, skipped = self._split(chunk)
            rest = chunk.moments.part(nbytes, chunk.moments.nbytes - nbytes)
            moments = NOWHERE if skipped else other.moments.part(0, nbytes) + rest
            chunks.append(replace(chunk, moments=moments))
        return Version(tuple(chunks))
