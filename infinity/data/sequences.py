"""Sequences of equal length: documents cut anywhere, or rows of whole documents or examples.

Rows are laid out once, from the lengths of documents alone, so every rank computes the same layout.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infinity.core.config import SettingError
from infinity.data.tokenizer import DataError
from infinity.data.tokens import TEXTS, Kind, Part, Tokens

Ints = NDArray[np.int64]

#: A target that is ignored by the losses of torch and transformers.
IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Sequence length, sequences per rank and micro-batch, and this rank's place among all ranks.

    Groups of ``parts`` neighbouring ranks have the same sequences, of which each takes an equal part.
    """

    seq_len: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    padding: int = 0  # the token after a document's end
    parts: int = 1

    def __post_init__(self) -> None:
        if self.seq_len % self.parts:
            near = max(1, round(self.seq_len / self.parts)) * self.parts
            wanted = f"a multiple of train.sequence_ranks={self.parts}, such as {near}"
            raise SettingError("model.seq_len", self.seq_len, wanted)

    @property
    def global_batch_size(self) -> int:
        """Sequences in one micro-batch of all ranks together."""
        return self.batch_size * (self.world_size // self.parts)

    @property
    def group(self) -> int:
        """Whose sequences this rank has: the number of its group."""
        return self.rank // self.parts

    def share(self, together: Ints) -> Ints:
        """Return the slice of a micro-batch of all ranks that is this rank's, or its group's."""
        return together[self.group * self.batch_size : (self.group + 1) * self.batch_size]


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
    target_count: int = 0  # that count in the loss; or examples, whose documents are compared or labelled
    #: Of data of examples: which of its row's documents a token is of, (batch_size, seq_len), if these are
    #: several; and for each of them, (batch_size, documents), its label, -1 where there is none, and the
    #: log-probability that the reference gives it.
    segments: Tensor | None = None
    labels: Tensor | None = None
    reference: Tensor | None = None

    def part(self, shape: BatchShape) -> "Batch":
        """Return the tokens of these sequences that are ``shape.rank``'s; of texts, padded at their ends."""
        if shape.parts == 1:
            return self
        counted = torch.arange(shape.seq_len, device="cpu").expand_as(self.tokens)
        whole = self.tokens, self.targets, counted if self.positions is None else self.positions
        tokens, targets, positions = (
            each.chunk(shape.parts, dim=1)[shape.rank % shape.parts] for each in whole
        )
        return self._replace(tokens=tokens, targets=targets, positions=positions, mask=None)


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
    token_counts: Ints  # inputs of each row, (rows,); or of the rows of each example
    target_counts: Ints  # its targets that count in the loss, or examples
    packing: bool  # rows hold several pieces; else their padding is masked
    identity: str  # of the layout, given the tokens
    documents: int = 1
    truncated: int = 0  # documents that were longer than a row
    empty: int = 0  # pieces without a target that counts in the loss
    examples: "Examples | None" = None  # what pieces are of; None: each is a document

    def __len__(self) -> int:
        return len(self.token_counts)

    @property
    def first_pieces(self) -> Ints:
        """Return the first piece of each sequence."""
        return self.firsts[: -1 : self.examples.height if self.examples else 1]

    def rows(self, which: Ints) -> Ints:
        """Return the rows of sequences: of examples that have one for each document, several."""
        height = 1 if self.examples is None else self.examples.height
        return (which[:, None] * height + np.arange(height)).ravel()

    def pieces(self, which: Ints) -> Ints:
        """Return the pieces of the rows of examples, ``(rows, documents)``; -1: there is none."""
        assert self.examples is not None
        rows, places = self.rows(which), np.arange(self.examples.width)
        there = places < np.diff(self.firsts)[rows, None]
        return np.where(there, self.firsts[rows, None] + places, -1)

    def batch(self, which: Ints, together: Ints) -> Batch:
        """Return the sequences ``which`` of this rank; ``together`` are those of all ranks."""
        of, rows = self.examples, self.rows(which)
        shape = (len(rows), self.seq_len)
        tokens, targets = np.full(shape, of.padding if of else 0, np.int64), np.full(shape, IGNORED, np.int64)
        positions, segments, used = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(len(rows))
        for row, index in enumerate(rows):
            filled = 0
            for number, piece in enumerate(range(self.firsts[index], self.firsts[index + 1])):
                start, size = self.starts[piece], self.sizes[piece]
                place, following = slice(filled, filled + size), slice(start + 1, start + 1 + size)
                tokens[row, place] = self.values[start : start + size]
                if of is None or not of.whole:
                    targets[row, place] = self.values[following]
                    if self.loss_mask is not None:
                        targets[row, place][~self.loss_mask[following]] = IGNORED
                positions[row, place], segments[row, place] = np.arange(size), number
                filled += size
            positions[row, filled:] = np.arange(self.seq_len - filled)  # padding attends only to itself
            used[row] = filled
        several = bool((np.diff(self.firsts)[rows] > 1).any())
        padded = not self.packing and bool((used < self.seq_len).any())
        found = Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(targets),
            positions=torch.from_numpy(positions) if several else None,
            mask=torch.from_numpy(np.arange(self.seq_len) < used[:, None]).long() if padded else None,
            token_count=int(self.token_counts[together].sum()),
            target_count=int(self.target_counts[together].sum()),
        )
        if of is None:
            return found
        pieces, split = self.pieces(which), torch.from_numpy(segments) if self.packing else None
        labels = torch.from_numpy(np.where(pieces < 0, -1, of.labels[pieces]))
        reference = torch.from_numpy(np.where(pieces < 0, np.float32(0), of.reference[pieces]))
        return found._replace(segments=split, labels=labels, reference=reference)

    def __str__(self) -> str:
        slots, pieces, of = max(1, len(self) * self.seq_len), len(self.starts), self.examples
        used, targets = int(self.token_counts.sum()), int(self.target_counts.sum())
        cut = f", {pieces:,} pieces," if pieces > self.documents else ""
        text = (
            f"{min(pieces, self.documents):,} documents{cut} in {len(self):,} sequences of "
            f"{self.seq_len:,} ({used / slots:.0%} full, {targets / max(1, used):.0%} of tokens in the loss)"
        )
        if of is not None:
            text = f"{targets:,} examples of {of.documents} documents in {len(self):,} rows"
            text += f" ({used / (slots * of.height):.0%} full)"
        text += f"; {self.truncated:,} longer ones truncated" if self.truncated else ""
        skipped = f"; {self.empty:,} skipped, since none of their tokens counts in the loss"
        return text + (skipped if self.empty else "")


def token_stream(values: NDArray[Any], seq_len: int) -> Sequences:
    """Cut documents, end to end, into sequences, each of which begins where the last one ends."""
    count = max(0, (len(values) - 1) // seq_len)
    sizes, numbers = np.full(count, seq_len), np.arange(count + 1)
    return Sequences(
        values=values, loss_mask=None, seq_len=seq_len, starts=numbers[:-1] * seq_len, sizes=sizes,
        firsts=numbers, token_counts=sizes, target_counts=sizes, packing=False, identity=str(len(values)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """What the pieces of :class:`Sequences` are, if ``documents`` of them in turn are an example."""

    documents: int
    height: int  # rows of an example, one for each document; or 1: a row holds whole examples
    width: int  # the most documents of a row
    whole: bool  # nothing is predicted from the documents but what they are
    padding: int  # the token after a document's end
    labels: Ints  # of each piece
    reference: NDArray[np.float32]  # log-probability of each piece; NaN: not known yet


def rows_of(tokens: Tokens, shape: BatchShape, kind: Kind = TEXTS, *, packing: bool) -> Sequences:
    """Assign documents, or the examples that they make, to rows of ``seq_len`` inputs, padded at the end.

    With ``packing`` a row holds as many as fit; without, one document. Packed text that is too long is cut
    into pieces, so that each of its tokens is predicted once. Documents with tokens that do not count in the
    loss (prompts, chats) are truncated, not cut: an answer without its question would train the model to
    guess. So are those of examples, with packing such that an example fits a row. What has no target that
    counts is left out, an example with any of its documents; documents that are ``whole`` have no targets.
    """
    seq_len, together = shape.seq_len, max(1, kind.documents)
    mask, documents = tokens.loss_mask, tokens.documents
    used = slice(len(documents) // together * together)
    given = documents[used if kind.documents else documents[:, 1] - documents[:, 0] > 1]
    begins, lengths, counted = given[:, 0], given[:, 1] - given[:, 0], given[:, 2]
    inputs = lengths - (not kind.whole)
    cut = (counted == lengths) & (packing and not kind.documents)
    parts = np.where(cut, -(-inputs // seq_len), 1)
    source = np.repeat(np.arange(len(parts)), parts)
    offsets = (np.arange(len(source)) - np.repeat(np.cumsum(parts) - parts, parts)) * seq_len
    starts, left, cut = begins[source] + offsets, inputs[source] - offsets, cut[source]
    sizes = np.minimum(left, seq_len)
    if packing and kind.documents:
        long = sizes.reshape(-1, together).sum(1).repeat(together) > seq_len
        sizes = np.where(long, np.minimum(sizes, seq_len // together), sizes)
    truncated = (sizes < left) & ~cut
    targets = counted - (1 if mask is None else mask[begins])  # the first token is never a target
    targets = np.where(cut | kind.whole, sizes, targets[source])
    for at in np.flatnonzero(truncated & (not kind.whole)):
        first, last = starts[at] + 1, starts[at] + 1 + sizes[at]
        targets[at] = sizes[at] if mask is None else mask[first:last].sum()
    groups = np.flatnonzero((targets > 0).reshape(-1, together).all(1))
    totals = sizes.reshape(-1, together).sum(1)[groups]
    rows = best_fit(totals, seq_len) if packing else np.arange(len(groups))
    order = groups[np.argsort(rows, kind="stable")]
    pieces = (order[:, None] * together + np.arange(together)).ravel()
    of_rows = np.bincount(rows) if len(rows) else np.zeros(0, np.int64)
    ends = np.cumsum(of_rows * together) if packing else np.arange(1, len(pieces) + 1)
    counts = np.ones(len(groups)) if kind.documents else targets[groups]
    token_counts, target_counts = (np.bincount(rows, n, len(of_rows)).astype(int) for n in (totals, counts))
    examples = None if not kind.documents else Examples(
        documents=together, height=1 if packing else together, whole=kind.whole, padding=shape.padding,
        width=int(target_counts.max(initial=0)) * together if packing else 1,
        labels=given[pieces, 3], reference=np.zeros(len(pieces), np.float32),
    )  # fmt: skip
    layout = f"{'packed' if packing else 'single'}:{f'{together} of ' if examples else ''}{len(documents)}"
    empty = (len(documents) - len(given) + len(targets)) // together - len(groups)
    return Sequences(
        values=tokens.values, loss_mask=mask, seq_len=seq_len, starts=starts[pieces], sizes=sizes[pieces],
        firsts=np.concatenate([[0], ends]).astype(int), token_counts=token_counts,
        target_counts=target_counts, packing=packing, identity=layout, documents=len(documents),
        truncated=int((truncated[pieces] if examples else truncated).sum()), empty=empty, examples=examples,
    )  # fmt: skip


def joined(parts: Sequence[Sequences]) -> Sequences:
    """Return the rows of several sequences of the same tokens, one after the other."""
    first, *others = parts
    if not others:
        return first

    begins = np.cumsum([0, *(len(each.starts) for each in parts[:-1])])
    ends = [each.firsts[1:] + begin for each, begin in zip(parts, begins)]
    more: dict[str, Any] = {
        name: np.concatenate([getattr(each, name) for each in parts])
        for name in ("starts", "sizes", "token_counts", "target_counts")
    }
    more |= {name: sum(getattr(each, name) for each in parts) for name in ("documents", "truncated", "empty")}
    identity = ";".join(each.identity for each in parts)
    if of := [each.examples for each in parts if each.examples is not None]:
        columns: Any = {
            name: np.concatenate([getattr(each, name) for each in of]) for name in ("labels", "reference")
        }
        more["examples"] = replace(of[0], width=max(each.width for each in of), **columns)
    return replace(first, firsts=np.concatenate([[0], *ends]), identity=identity, **more)


def best_fit(sizes: Ints, capacity: int) -> Ints:
    """Assign each size to one of few rows, none above ``capacity``, by best-fit decreasing.

    Equal sizes are placed together, so the time grows with the number of different sizes.
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


class Layout(NamedTuple):
    """How documents become sequences: packed, one in each, or (null) as one stream."""

    shape: BatchShape
    packing: bool | None
    kind: Kind = TEXTS

    @property
    def seq_len(self) -> int:
        return self.shape.seq_len

    def of(self, tokens: Tokens, parts: Sequence[Part]) -> list[Sequences]:
        """Return the sequences of each part; DataError: one has too few tokens."""
        for part in parts if self.packing is None else ():
            if part.end - part.begin <= self.seq_len:
                raise DataError(
                    f"{part.name}: {part.end - part.begin} tokens, fewer than one sequence of {self.seq_len} "
                    "and its target; give more data or lower model.seq_len"
                )
        return [self.of_part(tokens, part) for part in parts]

    def of_part(self, tokens: Tokens, part: Part) -> Sequences:
        seq_len = self.shape.seq_len
        if self.packing is not None:
            only = replace(tokens, documents=part.documents)
            return rows_of(only, self.shape, self.kind, packing=self.packing)
        if tokens.loss_mask is not None:
            raise DataError(
                f"{part.name}: prompts or chats among texts, of which there were none in what was looked at "
                "first: set data.packing=true"
            )
        found = token_stream(tokens.values[part.begin : part.end], seq_len)
        return replace(found, values=tokens.values, starts=found.starts + part.begin)


def join(batches: Sequence[Batch]) -> Batch:
    """Concatenate micro-batches, or parts of one, along the batch dimension."""
    tokens, targets, positions, masks, token_counts, target_counts, *more = zip(*batches)
    places = [torch.arange(each.shape[1], device="cpu").expand_as(each) for each in tokens]

    def together(parts: Sequence[Tensor | None], defaults: Sequence[Tensor]) -> Tensor | None:
        if all(part is None for part in parts):
            return None
        return torch.cat([default if part is None else part for part, default in zip(parts, defaults)])

    return Batch(
        torch.cat(tokens),
        torch.cat(targets),
        together(positions, places),
        together(masks, [torch.ones_like(each) for each in places]),
        sum(token_counts),
        sum(target_counts),
        *(together(parts, parts) for parts in more),  # in all of them, or in none
    )
