"""Tokens as sequences of equal length: one stream that is cut anywhere, or rows of whole documents.

Rows are laid out once, from the lengths of documents alone, so every rank computes the same layout.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infinity.recipes.data.tokens import Tokens

Ints = NDArray[np.int64]

#: A target that is ignored by the losses of torch and transformers.
IGNORED = -100


class Batch(NamedTuple):
    """Sequences of one rank, each tensor ``(batch_size, seq_len)``, int64, on the CPU.

    Attributes:
        tokens: Inputs.
        targets: The next tokens; -100 where they do not count in the loss.
        positions: Position of each token in its document, where a sequence holds several that must not
            attend to each other; None: every sequence holds one document.
        mask: 0 for padding; None: there is none, or ``positions`` separate it.
        token_count: Inputs without padding, of this micro-batch on all ranks together.
        target_count: Targets that count in the loss, of this micro-batch on all ranks together.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None
    mask: Tensor | None = None
    token_count: int = 0
    target_count: int = 0


class Sequences(Protocol):
    """The source of a loader's batches: a :class:`TokenStream` or :class:`DocumentRows`."""

    @property
    def seq_len(self) -> int: ...

    @property
    def identity(self) -> str:
        """Identifies how the sequences were made from their tokens."""
        ...

    def __len__(self) -> int: ...

    def batch(self, which: Ints, together: Ints) -> Batch:
        """Return the sequences ``which`` of this rank; ``together`` are those of all ranks."""
        ...


@dataclass(frozen=True, slots=True)
class TokenStream:
    """Documents one after the other; each sequence begins where the previous one ends.

    ``values`` are ``(tokens,)``. The last sequence is followed by a token, its last target.
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


class DocumentRows:
    """Sequences of whole documents, one or (with ``packing``) several per row, padded at the end.

    Args:
        tokens: The documents.
        seq_len: Inputs in a row.
        packing: Put several documents into a row.
    """

    def __init__(self, tokens: Tokens, seq_len: int, *, packing: bool) -> None:
        self.seq_len, self.packing, self.document_count = seq_len, packing, len(tokens.documents)
        self.identity = f"{'packed' if packing else 'single'}:{self.document_count}"
        self._values, self._loss_mask = tokens.values, tokens.loss_mask
        self.layout = lay_out(tokens.documents, tokens.loss_mask, seq_len=seq_len, packing=packing)
        self.token_counts = self.layout.sums(self.layout.pieces.sizes)
        self.target_counts = self.layout.sums(self.layout.pieces.targets)

    def __len__(self) -> int:
        return len(self.layout)

    def batch(self, which: Ints, together: Ints) -> Batch:
        shape = (len(which), self.seq_len)
        tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        positions = np.zeros(shape, np.int64)
        firsts, pieces = self.layout.firsts, self.layout.pieces
        for row, index in enumerate(which):
            filled = 0
            for piece in range(firsts[index], firsts[index + 1]):
                start, size = pieces.starts[piece], pieces.sizes[piece]
                place = slice(filled, filled + size)
                tokens[row, place] = self._values[start : start + size]
                targets[row, place] = self._targets(start + 1, start + 1 + size)
                positions[row, place] = np.arange(size)
                filled += size
            positions[row, filled:] = np.arange(self.seq_len - filled)  # padding attends only to itself
        used = self.token_counts[which]
        several = bool((np.diff(firsts)[which] > 1).any())
        padded = not self.packing and bool((used < self.seq_len).any())
        return Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(targets),
            positions=torch.from_numpy(positions) if several else None,
            mask=torch.from_numpy(np.arange(self.seq_len) < used[:, None]).long() if padded else None,
            token_count=int(self.token_counts[together].sum()),
            target_count=int(self.target_counts[together].sum()),
        )

    def describe(self) -> str:
        """Describe the layout in one line, for the start of a run."""
        layout, slots = self.layout, max(1, len(self) * self.seq_len)
        used, pieces = int(self.token_counts.sum()), len(self.layout.pieces.starts)
        is_cut = pieces > self.document_count
        what = f"{self.document_count:,} documents, {pieces:,} pieces," if is_cut else f"{pieces:,} documents"
        text = (
            f"{what} in {len(self):,} sequences of {self.seq_len:,} ({used / slots:.0%} full, "
            f"{int(self.target_counts.sum()) / max(1, used):.0%} of tokens in the loss)"
        )
        if layout.truncated:
            text += f"; {layout.truncated:,} longer ones truncated"
        if layout.empty:
            text += f"; {layout.empty:,} skipped, since none of their tokens counts in the loss"
        return text

    def _targets(self, start: int, stop: int) -> Ints:
        targets = self._values[start:stop].astype(np.int64)
        if self._loss_mask is not None:
            targets[~self._loss_mask[start:stop]] = IGNORED
        return targets


def join(batches: Sequence[Batch]) -> Batch:
    """Concatenate micro-batches along the batch dimension."""
    tokens = torch.cat([batch.tokens for batch in batches])
    targets = torch.cat([batch.targets for batch in batches])
    positions, mask = None, None
    if any(batch.positions is not None for batch in batches):
        places = torch.arange(tokens.shape[1], device="cpu").expand_as(batches[0].tokens)
        positions = torch.cat([places if each.positions is None else each.positions for each in batches])
    if any(batch.mask is not None for batch in batches):
        whole = torch.ones_like(batches[0].tokens)
        mask = torch.cat([whole if each.mask is None else each.mask for each in batches])
    token_count = sum(batch.token_count for batch in batches)
    return Batch(tokens, targets, positions, mask, token_count, sum(batch.target_count for batch in batches))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Documents, or parts of documents, each predicted from its own beginning.

    ``(pieces,)`` each: the first token, the number of inputs (a target is the token after its input, so
    one more token belongs to the piece), and the number of targets that count in the loss.
    """

    starts: Ints
    sizes: Ints
    targets: Ints

    def take(self, which: NDArray[Any]) -> "Pieces":
        return Pieces(starts=self.starts[which], sizes=self.sizes[which], targets=self.targets[which])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Rows of pieces: row ``i`` holds the pieces ``firsts[i]`` to ``firsts[i + 1]`` (exclusive).

    Attributes:
        truncated: Documents that were longer than a row.
        empty: Documents without a target that counts in the loss.
    """

    pieces: Pieces
    firsts: Ints
    truncated: int
    empty: int

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def sums(self, values: Ints) -> Ints:
        """Return the sum of ``values``, one per piece, for each row."""
        totals = np.concatenate([[0], np.cumsum(values)])
        return np.diff(totals[self.firsts])


def lay_out(
    documents: Ints, loss_mask: NDArray[np.bool_] | None, *, seq_len: int, packing: bool
) -> RowLayout:
    """Assign ``documents`` to rows of ``seq_len`` inputs.

    With ``packing`` a row holds as many documents as fit, and longer text is cut into pieces, so that
    each of its tokens is predicted once. Without it a row holds one document. Documents with tokens that
    do not count in the loss (prompts, chats) are truncated instead of cut, because an answer separated
    from its question would train the model to guess.

    Args:
        documents: ``(documents, 3)``, as in :class:`~infinity.recipes.data.tokens.Tokens`.
        loss_mask: Likewise.
    """
    starts, stops, counted = documents[documents[:, 1] - documents[:, 0] > 1].T
    first = 1 if loss_mask is None else loss_mask[starts]  # the first token is never a target
    pieces = Pieces(starts=starts, sizes=stops - starts - 1, targets=counted - first)
    if packing:
        pieces = _cut(pieces, counted == stops - starts, seq_len)
    cut = len(pieces.starts) - len(starts)
    long = np.flatnonzero(pieces.sizes > seq_len)
    pieces.sizes[long] = seq_len
    for at in long:
        first = pieces.starts[at] + 1
        pieces.targets[at] = seq_len if loss_mask is None else loss_mask[first : first + seq_len].sum()
    left = np.flatnonzero(pieces.targets > 0)
    empty = len(documents) + cut - len(left)
    pieces = pieces.take(left)
    rows = best_fit(pieces.sizes, seq_len) if packing else np.arange(len(left))
    order = np.argsort(rows, kind="stable")
    firsts = np.concatenate([[0], np.cumsum(np.bincount(rows))]).astype(np.int64)
    return RowLayout(pieces=pieces.take(order), firsts=firsts, truncated=len(long), empty=empty)


def best_fit(sizes: Ints, capacity: int) -> Ints:
    """Assign each size to a row, so that no row exceeds ``capacity`` and few rows are needed.

    Best-fit decreasing; equal sizes are placed together, so the time grows with the number of different
    sizes rather than of documents.
    """
    rows = np.empty(len(sizes), dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    opened, with_room, rooms = 0, defaultdict[int, list[int]](list), list[int]()
    for run in np.split(order, np.flatnonzero(np.diff(sizes[order])) + 1) if len(sizes) else ():
        size = int(sizes[run[0]])
        while len(run):
            at = bisect_left(rooms, size)
            if at == len(rooms):
                new = -(-len(run) // (capacity // size))
                with_room[capacity] = list(range(opened, opened + new))
                opened += new
                rooms.append(capacity)
            room = rooms[at]
            chosen = with_room[room][: len(run)]
            rows[run[: len(chosen)]] = chosen
            run = run[len(chosen) :]
            del with_room[room][: len(chosen)]
            if not with_room[room]:
                rooms.pop(at)
            if room > size:
                if not with_room[room - size]:
                    insort(rooms, room - size)
                with_room[room - size] += chosen
    return rows


def _cut(pieces: Pieces, is_text: NDArray[np.bool_], seq_len: int) -> Pieces:
    """Cut those of ``pieces`` that are text and longer than ``seq_len`` into several."""
    parts = np.where(is_text, -(-pieces.sizes // seq_len), 1)
    source = np.repeat(np.arange(len(parts)), parts)
    number = np.arange(len(source)) - np.repeat(np.cumsum(parts) - parts, parts)
    rest = pieces.sizes[source] - number * seq_len
    sizes = np.where(is_text[source], np.minimum(rest, seq_len), rest)
    return Pieces(
        starts=pieces.starts[source] + number * seq_len,
        sizes=sizes,
        targets=np.where(is_text[source], sizes, pieces.targets[source]),
    )
