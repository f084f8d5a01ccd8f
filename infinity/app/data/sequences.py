"""Tokens as numbered sequences of equal length: a stream that is cut anywhere, or rows of documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infinity.app.data.packing import Ints, Plan, plan_rows
from infinity.app.data.tokens import Tokens

#: A target that counts for nothing, as torch's and Hugging Face's losses have it.
IGNORED = -100


class Batch(NamedTuple):
    """Sequences of one rank, each tensor ``(batch_size, seq_len)``, int64, on the CPU.

    Attributes:
        tokens: Inputs.
        targets: The tokens that follow them; -100 counts for nothing.
        positions: They begin anew with every document of a sequence, which sees only itself; None
            where every sequence holds one.
        mask: 0 where a sequence is filled up; None where nothing is, or where positions say it.
        token_count: Inputs that are not filling, of all ranks' micro-batch together.
        target_count: Targets that count, likewise.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None
    mask: Tensor | None = None
    token_count: int = 0
    target_count: int = 0


class Sequences(Protocol):
    """What a loader takes batches from."""

    @property
    def seq_len(self) -> int: ...

    @property
    def identity(self) -> str:
        """Names how they were made of their tokens."""
        ...

    def __len__(self) -> int: ...

    def batch(self, which: Ints, together: Ints) -> Batch:
        """The sequences ``which``, a rank's share of those of all ranks ``together``."""
        ...


@dataclass(frozen=True, slots=True)
class Stream:
    """Documents one after the other; each sequence begins where the one before it ends.

    ``values`` are ``(tokens,)``. The last sequence needs a token after it, as its last target.
    """

    values: NDArray[Any]
    seq_len: int

    @property
    def identity(self) -> str:
        return str(len(self.values))

    def __len__(self) -> int:
        return max(0, (len(self.values) - 1) // self.seq_len)

    def batch(self, which: Ints, together: Ints) -> Batch:
        size = self.seq_len
        rows = np.stack([self.values[i * size : (i + 1) * size + 1] for i in which]).astype(np.int64)
        both = torch.from_numpy(rows)
        count = len(together) * size
        return Batch(
            both[:, :-1].contiguous(), both[:, 1:].contiguous(), token_count=count, target_count=count
        )


class Rows:
    """Sequences of whole documents, one or (with ``packing``) several to a row, filled up at the end.

    Args:
        tokens: Whose documents.
        seq_len: Inputs in a row.
        packing: Several documents to a row.
    """

    def __init__(self, tokens: Tokens, seq_len: int, *, packing: bool) -> None:
        self.seq_len, self.packing, self.document_count = seq_len, packing, len(tokens.documents)
        self.identity = f"{'packed' if packing else 'single'}:{self.document_count}"
        self._values, self._counts = tokens.values, tokens.counts
        self.plan: Plan = plan_rows(tokens.documents, tokens.counts, seq_len=seq_len, packing=packing)
        self.token_counts = self.plan.sums(self.plan.pieces.sizes)
        self.target_counts = self.plan.sums(self.plan.pieces.targets)

    def __len__(self) -> int:
        return len(self.plan)

    def batch(self, which: Ints, together: Ints) -> Batch:
        shape = (len(which), self.seq_len)
        tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        positions = np.zeros(shape, np.int64)
        for row, index in enumerate(which):
            filled = 0
            for piece in range(self.plan.firsts[index], self.plan.firsts[index + 1]):
                start, size = self.plan.pieces.starts[piece], self.plan.pieces.sizes[piece]
                place = slice(filled, filled + size)
                tokens[row, place] = self._values[start : start + size]
                targets[row, place] = self._targets(start + 1, start + 1 + size)
                positions[row, place] = np.arange(size)
                filled += size
            positions[row, filled:] = np.arange(self.seq_len - filled)  # the filling sees only itself
        used = self.token_counts[which]
        several = bool((np.diff(self.plan.firsts)[which] > 1).any())
        filling = not self.packing and bool((used < self.seq_len).any())
        return Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(targets),
            positions=torch.from_numpy(positions) if several else None,
            mask=torch.from_numpy(np.arange(self.seq_len) < used[:, None]).long() if filling else None,
            token_count=int(self.token_counts[together].sum()),
            target_count=int(self.target_counts[together].sum()),
        )

    def _targets(self, start: int, stop: int) -> NDArray[np.int64]:
        targets = self._values[start:stop].astype(np.int64)
        if self._counts is not None:
            targets[~self._counts[start:stop]] = IGNORED
        return targets


def join(batches: Sequence[Batch]) -> Batch:
    """Micro-batches as one batch, row after row."""
    tokens = torch.cat([batch.tokens for batch in batches])
    targets = torch.cat([batch.targets for batch in batches])
    positions, mask = None, None
    if any(batch.positions is not None for batch in batches):
        places = torch.arange(tokens.shape[1]).expand_as(batches[0].tokens)
        positions = torch.cat([places if each.positions is None else each.positions for each in batches])
    if any(batch.mask is not None for batch in batches):
        whole = torch.ones_like(batches[0].tokens)
        mask = torch.cat([whole if each.mask is None else each.mask for each in batches])
    token_count = sum(batch.token_count for batch in batches)
    return Batch(tokens, targets, positions, mask, token_count, sum(batch.target_count for batch in batches))
