"""Gathers and reductions of units in two steps, within nodes and across their borders.

[Note: two steps] Where several nodes have several ranks each, a byte crosses the border of a node once. Rank
``k * L + l`` is number l of node k. A *gather* begins across borders: ranks with the same number exchange
their shards, which are every L-th slice of the unit. Then the ranks of a node exchange what they have. A
*reduction* begins within nodes: each rank adds, in fp32 and in the order of ranks, what its node has for the
owners with its own number, and rounds the sums to the compute dtype, as it rounds the gradient of its batch.
The owners add the sums of nodes in their order. So numbers depend on how many ranks a node has, which a
recipe may fix, but not on where they run. Shards lie where they lie without nodes.

[Note: slices that are kept] What came across the border for a gather may stay in host memory until the unit's
next update. Until then the unit is gathered within nodes only: in forward, in backward, in each micro-batch,
and one that is frozen crosses borders once in a run.

[Note: for some ranks] What only some ranks want goes in parts, through memory of a fixed size: ranks that
serve have no memory for a unit. Only on one node.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from infinity.core.nbytes import BLOCK_NBYTES
from infinity.device.memory import Lease

#: ``all_gather_into_tensor``, under the name that newer releases of torch want.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
#: What a rank sends and receives at one time: see [Note: for some ranks].
PART_NBYTES = 2**22


@dataclass(frozen=True, slots=True)
class Kept:
    """Slices of a unit that other nodes sent, or memory for them: see [Note: slices that are kept]."""

    lease: Lease
    current: bool  # they are there, or will be when the gathers that were queued before have ended


class Nodes:
    """The nodes of the ranks that share units, a ``row``, ``local`` on each, and this rank's groups.

    ``make`` makes process groups of these sets of ranks and returns this rank's; ``end`` ends a collective.
    """

    def __init__(
        self, rank: int, row: Sequence[int], local: int, make: Callable[[list[list[int]]], Any],
        end: Callable[[Any, Any], None],
    ) -> None:  # fmt: skip
        self.row, self.world_size, self.per_node = row, len(row), local
        self.local = self.world_size if local == 1 else local
        self.count = self.world_size // self.local
        self.node, self.number = divmod(row.index(rank), self.local)
        ranks = [*range(self.world_size)]
        self._inner = make([ranks[first : first + self.local] for first in ranks[:: self.local]])
        self._across = None
        if self.count > 1:
            self._across = make([ranks[number :: self.local] for number in range(self.local)])
        self.groups = [self._inner] if self._across is None else [self._inner, self._across]
        self._end = end
        self.nbytes_crossed = 0  # that other nodes sent to this rank

    def gather(self, full: Tensor, kept: Kept | None = None) -> None:
        """Complete ``full``, ``(numel,)``, of which this rank has its own slice."""
        if self._across is not None:
            self._fetch_across(full, kept)
        runs = full.chunk(self.count)
        works = [
            all_gather(run, run.chunk(self.local)[self.number], group=self._inner, async_op=True)
            for run in runs
        ]
        for work in works:
            self._end(work, self._inner)

    def _fetch_across(self, full: Tensor, kept: Kept | None) -> None:
        """Bring the slices of ranks with the same number on other nodes."""
        slices, nodes = full.chunk(self.world_size), range(self.count)
        mine = slices[self.number :: self.local]
        others = [mine[node] for node in nodes if node != self.node]
        held = () if kept is None else kept.lease.tensor.view(full.dtype).chunk(len(others))
        if kept is not None and kept.current:
            for piece, came in zip(others, held, strict=True):
                piece.copy_(came, non_blocking=True)
        else:
            # They arrive side by side in the last slices of the buffer. Each then moves down, or stays, so in
            # this order none is overwritten before it has moved.
            last = slices[-self.count :]
            last[self.node].copy_(mine[self.node])
            arriving = full[-self.count * len(last[0]) :]
            self._end(all_gather(arriving, last[self.node], group=self._across, async_op=True), self._across)
            for piece, came in zip(mine, last, strict=True):
                piece.copy_(came)
            for piece, came in zip(others, held):
                came.copy_(piece, non_blocking=True)
            self.nbytes_crossed += sum(piece.nbytes for piece in others)
        if kept is not None:
            kept.lease.record_use()

    def reduce(self, full: Tensor, spare: Tensor, out: Tensor) -> None:
        """Leave in ``out``, ``(numel / world_size,)``, the mean over ranks of this rank's slice of ``full``.

        ``full`` and ``spare``, ``(numel,)`` each, are overwritten. Sums have the dtype of ``out``.
        """
        runs = [*zip(spare.chunk(self.count), full.chunk(self.count), strict=True)]
        works = [dist.all_to_all_single(came, sent, group=self._inner, async_op=True) for came, sent in runs]
        for work in works:
            self._end(work, self._inner)
        if self._across is None:
            _add(out, spare.chunk(self.local))
        else:
            sums, came = (each[: self.count * len(out)] for each in (full, spare))
            for total, (run, _) in zip(sums.chunk(self.count), runs, strict=True):
                _add(out, run.chunk(self.local))
                total.copy_(out)
            self._end(dist.all_to_all_single(came, sums, group=self._across, async_op=True), self._across)
            self.nbytes_crossed += came.nbytes // self.count * (self.count - 1)
            _add(out, came.chunk(self.count))
        out.div_(self.world_size)

    def gather_for(
        self, ranks: Sequence[int], nbytes: int, shard: Callable[[int, int], Tensor], full: Tensor | None
    ) -> None:
        """Complete ``full``, ``(world_size * nbytes,)`` uint8, on ``ranks``; it is None on others.

        ``shard`` returns a part of this rank's shard of ``nbytes``, given where it begins and its bytes.
        """
        for start, size in self._parts(nbytes, BLOCK_NBYTES):
            part = shard(start, size)
            mine = size if full is not None else 0
            arrived = self._send(
                part.repeat(len(ranks)), [size * (r in ranks) for r in self.all], [mine] * self.world_size
            )
            if full is not None:
                full.view(self.world_size, nbytes)[:, start : start + size] = arrived.view(-1, size)

    def reduce_for(self, ranks: Sequence[int], full: Tensor | None, out: Tensor, dtype: torch.dtype) -> None:
        """Leave in ``out`` the mean over all ranks, of which only ``ranks`` have a ``full`` of ``dtype``."""
        for start, size in self._parts(len(out), BLOCK_NBYTES):
            sent, mine = out.new_empty(0, dtype=dtype), 0
            if full is not None:
                sent, mine = full.view(self.world_size, -1)[:, start : start + size].flatten(), size
            arrived = self._send(sent, [mine] * self.world_size, [size * (r in ranks) for r in self.all])
            part = out[start : start + size]
            _add(part, arrived.chunk(len(ranks)))
            part.div_(self.world_size)

    @property
    def all(self) -> range:
        return range(self.world_size)

    def _parts(self, count: int, quantum: int) -> Iterator[tuple[int, int]]:
        most = max(quantum, PART_NBYTES // self.world_size // quantum * quantum)
        return ((start, min(most, count - start)) for start in range(0, count, most))

    def _send(self, sent: Tensor, counts: list[int], arriving: list[int]) -> Tensor:
        arrived = sent.new_empty(sum(arriving))
        work = dist.all_to_all_single(arrived, sent, arriving, counts, group=self._inner, async_op=True)
        self._end(work, self._inner)
        return arrived


def _add(out: Tensor, each: Sequence[Tensor]) -> None:
    out.copy_(each[0])
    for other in each[1:]:
        out.add_(other)
