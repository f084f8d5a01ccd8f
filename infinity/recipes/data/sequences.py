"""Tokens as sequences of equal length: one stream cut anywhere, or rows of whole documents.

Rows are laid out once, from the lengths of documents alone, so every rank computes the same layout.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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

    If sequences hold several documents, which must not attend to each other, ``positions`` are those of
    tokens in their documents. Counts are of this micro-batch on all ranks together.
    """

    tokens: Tensor
    targets: Tensor  # the next tokens; -100 where they do not count in the loss
    positions: Tensor | None = None
    mask: Tensor | None = None  # 0 for padding; None: there is none, or positions separate it
    token_count: int = 0  # inputs without padding
    target_count: int = 0  # that count in the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Rows of pieces: row ``i`` holds the pieces ``firsts[i]`` to ``firsts[i + 1]`` (exclusive).

    A piece is a document, a part of one, or a sequence of a stream, and is predicted from its own beginning.
    A target is the token after its input, so a piece has one more token than inputs.
    """

    values: NDArray[Any]
    loss_mask: NDArray[np.bool_] | None
    seq_len: int
    starts: Ints  # the first token of each piece, (pieces,)
    sizes: Ints  # its inputs
    firsts: Ints
    token_counts: Ints  # inputs of each row, (rows,)
    target_counts: Ints  # its targets that count in the loss
    packing: bool  # rows hold several pieces; else their padding is masked
    identity: str  # of the layout, given the tokens
    documents: int = 1
    truncated: int = 0  # documents that were longer than a row
    empty: int = 0  # pieces without a target that counts in the loss

    def __len__(self) -> int:
        return len(self.token_counts)

    def batch(self, which: Ints, together: Ints) -> Batch:
        """Return the sequences ``which`` of this rank; ``together`` are those of all ranks."""
        shape = (len(which), self.seq_len)
        tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        positions = np.zeros(shape, np.int64)
        for row, index in enumerate(which):
            filled = 0
            for piece in range(self.firsts[index], self.firsts[index + 1]):
                start, size = self.starts[piece], self.sizes[piece]
                place, following = slice(filled, filled + size), slice(start + 1, start + 1 + size)
                tokens[row, place] = self.values[start : start + size]
                targets[row, place] = self.values[following]
                if self.loss_mask is not None:
                    targets[row, place][~self.loss_mask[following]] = IGNORED
                positions[row, place] = np.arange(size)
                filled += size
            positions[row, filled:] = np.arange(self.seq_len - filled)  # padding attends only to itself
        used = self.token_counts[which]
        several = bool((np.diff(self.firsts)[which] > 1).any())
        padded = not self.packing and bool((used < self.seq_len).any())
        return Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(targets),
            positions=torch.from_numpy(positions) if several else None,
            mask=torch.from_numpy(np.arange(self.seq_len) < used[:, None]).long() if padded else None,
            token_count=int(self.token_counts[together].sum()),
            target_count=int(self.target_counts[together].sum()),
        )

    def __str__(self) -> str:
        slots, pieces = max(1, len(self) * self.seq_len), len(self.starts)
        used, targets = int(self.token_counts.sum()), int(self.target_counts.sum())
        cut = f"{self.documents:,} documents, {pieces:,} pieces,"
        text = (
            f"{cut if pieces > self.documents else f'{pieces:,} documents'} in {len(self):,} sequences of "
            f"{self.seq_len:,} ({used / slots:.0%} full, {targets / max(1, used):.0%} of tokens in the loss)"
        )
        if self.truncated:
            text += f"; {self.truncated:,} longer ones truncated"
        if self.empty:
            text += f"; {self.empty:,} skipped, since none of their tokens counts in the loss"
        return text


def token_stream(values: NDArray[Any], seq_len: int) -> Sequences:
    """Cut documents, end to end, into sequences, each of which begins where the last one ends."""
    count = max(0, (len(values) - 1) // seq_len)
    sizes, numbers = np.full(count, seq_len), np.arange(count + 1)
    return Sequences(
        values=values, loss_mask=None, seq_len=seq_len, starts=numbers[:-1] * seq_len, sizes=sizes,
        firsts=numbers, token_counts=sizes, target_counts=sizes, packing=False, identity=str(len(values)),
    )  # fmt: skip


def document_rows(tokens: Tokens, seq_len: int, *, packing: bool) -> Sequences:
    """Assign documents to rows of ``seq_len`` inputs, padded at the end.

    With ``packing`` a row holds as many documents as fit, and longer text is cut into pieces, so that each of
    its tokens is predicted once; without, a row holds one document. Documents with tokens that do not count
    in the loss (prompts, chats) are truncated, not cut: an answer without its question would train the model
    to guess.
    """
    documents, mask = tokens.documents, tokens.loss_mask
    begins, ends, counted = documents[documents[:, 1] - documents[:, 0] > 1].T
    inputs, cut = ends - begins - 1, packing & (counted == ends - begins)
    targets = counted - (1 if mask is None else mask[begins])  # the first token is never a target
    parts = np.where(cut, -(-inputs // seq_len), 1)
    source = np.repeat(np.arange(len(parts)), parts)
    offsets = (np.arange(len(source)) - np.repeat(np.cumsum(parts) - parts, parts)) * seq_len
    starts, left, cut = begins[source] + offsets, inputs[source] - offsets, cut[source]
    sizes = np.minimum(left, seq_len)
    targets = np.where(cut, sizes, targets[source])
    truncated = np.flatnonzero((left > seq_len) & ~cut)
    for at in truncated:
        first = starts[at] + 1
        targets[at] = seq_len if mask is None else mask[first : first + seq_len].sum()
    used = np.flatnonzero(targets > 0)
    rows = best_fit(sizes[used], seq_len) if packing else np.arange(len(used))
    order = used[np.argsort(rows, kind="stable")]
    firsts = np.concatenate([[0], np.cumsum(np.bincount(rows))]).astype(np.int64)
    return Sequences(
        values=tokens.values,
        loss_mask=mask,
        seq_len=seq_len,
        starts=starts[order],
        sizes=sizes[order],
        firsts=firsts,
        token_counts=np.add.reduceat(sizes[order], firsts[:-1]),
        target_counts=np.add.reduceat(targets[order], firsts[:-1]),
        packing=packing,
        identity=f"{'packed' if packing else 'single'}:{len(documents)}",
        documents=len(documents),
        truncated=len(truncated),
        empty=len(documents) - len(begins) + len(starts) - len(used),
    )


def best_fit(sizes: Ints, capacity: int) -> Ints:
    """Assign each size to a row, so that no row exceeds ``capacity`` and few rows are needed.

    Best-fit decreasing; equal sizes are placed together, so the time grows with the number of different
    sizes.
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


def join(batches: Sequence[Batch]) -> Batch:
    """Concatenate micro-batches along the batch dimension."""

    def together(parts: Sequence[Tensor | None], default: Tensor) -> Tensor | None:
        if all(part is None for part in parts):
            return None
        return torch.cat([default if part is None else part for part in parts])

    tokens, targets, positions, masks, token_counts, target_counts = zip(*batches)
    places = torch.arange(tokens[0].shape[1], device="cpu").expand_as(tokens[0])
    return Batch(
        torch.cat(tokens),
        torch.cat(targets),
        together(positions, places),
        together(masks, torch.ones_like(places)),
        sum(token_counts),
        sum(target_counts),
    )
