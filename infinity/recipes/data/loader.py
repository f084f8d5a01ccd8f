"""Batches of a run: tokens as sequences of equal length, in a shuffled order that all ranks share.

Sequences are one stream cut anywhere, or rows of whole documents. Rows are laid out once, from the lengths of
documents alone, so every rank computes the same layout.

Each epoch has one global order of sequences. Micro-batch ``n`` is the n-th run of ``global_batch_size``
sequences, of which each rank takes its slice. So shares are disjoint, a position is one number that is valid
for any number of ranks, and every rank knows the number of targets on all ranks without communication.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infinity.recipes.data.entries import DataConfig, Part, Sources, open_sources
from infinity.recipes.data.tokenizer import DataError
from infinity.recipes.data.tokens import Tokens

Ints = NDArray[np.int64]

#: A target that is ignored by the losses of torch and transformers.
IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Sequence length, sequences per rank and micro-batch, and this rank's place among all ranks."""

    seq_len: int
    batch_size: int
    rank: int = 0
    world_size: int = 1

    @property
    def global_batch_size(self) -> int:
        """Sequences in one micro-batch of all ranks together."""
        return self.batch_size * self.world_size

    def share(self, together: Ints) -> Ints:
        """Return this rank's slice of a micro-batch of all ranks."""
        return together[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]


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


@dataclass(frozen=True, slots=True)
class Mixture:
    """Shares of several sources in every epoch, by ``weights``; ``rows`` has how many each has, in order.

    An epoch has as many rows as all sources together. Those of a source come in an order of its own, which
    begins anew when all were taken, within an epoch or later: so a small one repeats, of a large one an epoch
    has a part, and the next epoch goes on there.
    """

    rows: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def counts(self) -> Ints:
        """Return how many rows of each source an epoch has."""
        ends: Ints = np.rint(np.cumsum((0, *self.weights)) * (sum(self.rows) / sum(self.weights))).astype(int)
        return ends[1:] - ends[:-1]

    def order(self, epoch: int, seed: int, shuffle: bool) -> Ints:
        """Return the rows of an epoch, in order; it follows from the arguments alone."""
        found, places = [], []
        begins = np.cumsum((0, *self.rows[:-1]))
        for source, (begin, number, count) in enumerate(zip(begins, self.rows, self.counts)):
            first, stop = int(epoch * count), int((epoch + 1) * count)
            which: Ints = np.arange(first, stop) % number
            for turn in range(first // number, -(-stop // number)) if shuffle else ():
                among = slice(max(0, turn * number - first), (turn + 1) * number - first)
                which[among] = np.random.default_rng((seed, turn, source)).permutation(number)[which[among]]
            found.append(begin + which)
            places.append((np.arange(count) + 0.5) / max(1, count))
        if shuffle:
            return np.random.default_rng((seed, epoch)).permutation(np.concatenate(found))
        return np.concatenate(found)[np.argsort(np.concatenate(places), kind="stable")]


class TokenLoader:
    """Endless iterator over one rank's training batches; positions of another ``identity`` are refused."""

    def __init__(
        self, sequences: Sequences, shape: BatchShape, seed: int = 0, shuffle: bool = True,
        identity: str = "", mixture: Mixture | None = None,
    ) -> None:  # fmt: skip
        self._sequences, self._shape, self._mixture = sequences, shape, mixture
        seq_len, count, size = shape.seq_len, len(sequences), shape.global_batch_size
        self._identity: dict[str, Any] = {"tokens": identity, "seq_len": seq_len}
        self._identity |= {"seed": seed, "shuffle": shuffle}
        self.micro_batches_per_epoch = count // size
        if count < size:
            raise DataError(
                f"the training data has {count} sequences of {seq_len} tokens; a micro-batch needs {size} "
                f"({shape.world_size} ranks with train.batch_size={shape.batch_size}): give more data, or "
                "lower train.batch_size or model.seq_len"
            )
        self._seek(0, 0)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        size = self._shape.global_batch_size
        if self._position + size > len(self._order):
            self._seek(self.epoch + 1, 0)
        together = self._order[self._position : self._position + size]
        self._position += size
        return self._sequences.batch(self._shape.share(together), together)

    def state_dict(self) -> dict[str, Any]:
        """Return the position before the next batch; the same on every rank."""
        return {**self._identity, "epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position, also with another number of ranks or batch size."""
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise DataError(f"data: the saved position has {key}={state.get(key)!r}, this run {value!r}")
        self._seek(int(state["epoch"]), int(state["position"]))

    def _seek(self, epoch: int, position: int) -> None:
        self.epoch, self._position = epoch, position
        seed, shuffle = self._identity["seed"], self._identity["shuffle"]
        self._order = np.arange(len(self._sequences))
        if self._mixture is not None:
            self._order = self._mixture.order(epoch, seed, shuffle)
        elif shuffle:
            self._order = np.random.default_rng((seed, epoch)).permutation(len(self._sequences))


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Sequences excluded from training; the same in every evaluation."""

    sequences: Sequences
    shape: BatchShape

    def batches(self, limit: int) -> Iterator[Batch]:
        """Yield at most ``limit`` batches, equally many on every rank, spread over all held-out sequences.

        Sequences repeat if they do not fill one micro-batch.
        """
        count, size = len(self.sequences), self.shape.global_batch_size
        number = max(1, min(limit, count // size))
        order = np.arange(number * size) * count // (number * size)
        for together in order.reshape(number, size):
            yield self.sequences.batch(self.shape.share(together), together)


class Layout(NamedTuple):
    """How documents become sequences: packed, one in each, or (null) as one stream."""

    seq_len: int
    packing: bool | None

    def of(self, tokens: Tokens, parts: Sequence[Part]) -> list[Sequences]:
        """Return the sequences of each part; DataError: one has too few tokens."""
        return [self._of(tokens, part) for part in parts]

    def _of(self, tokens: Tokens, part: Part) -> Sequences:
        if self.packing is not None:
            only = replace(tokens, documents=part.documents)
            return document_rows(only, self.seq_len, packing=self.packing)
        if part.end - part.begin <= self.seq_len:
            raise DataError(
                f"{part.name}: {part.end - part.begin} tokens, fewer than one sequence of {self.seq_len} and "
                "its target; give more data or lower model.seq_len"
            )
        found = token_stream(tokens.values[part.begin : part.end], self.seq_len)
        return replace(found, values=tokens.values, starts=found.starts + part.begin)


@dataclass(frozen=True, slots=True)
class Data:
    """Training and held-out data of a run."""

    train: TokenLoader
    held_out: HeldOut | None
    packed: bool  # sequences hold several documents each, which must not attend to each other
    sources: Sources  # what train is of
    layout: Layout
    notes: tuple[str, ...] = ()  # lines for the user: how documents were laid out, truncated or skipped


def open_data(
    config: DataConfig,
    shape: BatchShape,
    *,
    vocab_size: int,
    model_path: str | None = None,
    log: Callable[[str], object] = lambda line: None,
) -> Data:
    """Open the data of a run. All ranks may call at the same time.

    Args:
        vocab_size: The model's; DataError: the data has a token beyond it.
        model_path: The model's directory, whose tokenizer is used if the recipe names none.
        log: Called with a progress line now and then, while this process tokenizes.
    """
    train, held_out = open_sources(config, vocab_size, model_path, log)
    given = [each for each in (train, held_out) if each is not None]
    packing, notes = config.packing, list[str]()
    for each in given:
        notes += each.notes(mixed=bool(config.weights) and each is train)
    if packing is None and any(each.tokens.loss_mask is not None for each in given):
        packing = True
    parts, held = train.parts if config.weights else [train.whole], []
    if held_out is not None:
        held = [held_out.whole]
    elif config.eval_fraction:
        cut = [_hold_out(config, shape.seq_len, packing, part) for part in parts]
        parts, held, more = (list(each) for each in zip(*cut))
        notes += more
    layout = Layout(shape.seq_len, packing)
    by_part, mixture = layout.of(train.tokens, parts), None
    sequences = joined(by_part)
    held_sequences = joined(layout.of((held_out or train).tokens, held)) if held else None
    if held_sequences is not None and not len(held_sequences):
        raise DataError(
            "the held-out data has no target that counts in the loss, in sequences of "
            f"{shape.seq_len} tokens; give more of it or raise model.seq_len"
        )
    if packing is not None:
        notes.append(f"training data: {sequences}")
        notes += [f"held-out data: {held_sequences}"] if held_sequences is not None else []
    identity = f"{train.tokens.digest}:{sequences.identity}"
    if config.weights:
        mixture = Mixture(tuple(map(len, by_part)), config.weights)
        identity += f":{list(config.weights)}"
        notes += _notes_on(mixture, parts)
    loader = TokenLoader(sequences, shape, config.seed, config.shuffle, identity, mixture)
    held_data = None if held_sequences is None else HeldOut(held_sequences, shape)
    return Data(loader, held_data, packing is True, train, layout, tuple(notes))


def _notes_on(mixture: Mixture, parts: Sequence[Part]) -> Iterator[str]:
    for part, rows, count in zip(parts, mixture.rows, mixture.counts):
        if not rows:
            raise DataError(f"{part.name}: no sequence to mix in (data.weights)")
        share = count / max(1, sum(mixture.rows))
        yield (
            f"{part.name}: {rows:,} sequences, {share:.1%} of an epoch, which has each of them "
            f"{count / rows:.3g} times"
        )


def _hold_out(config: DataConfig, seq_len: int, packing: bool | None, part: Part) -> tuple[Part, Part, str]:
    """Hold out the last tokens, or whole documents; return the others, these, and a line about it."""
    kind, whole, least = "tokens", part.end - part.begin, seq_len + 1
    if packing is not None:
        kind, whole, least = "documents", len(part.documents), 1
    count = max(round(whole * config.eval_fraction), least)
    if whole - count < least:
        raise DataError(
            f"{part.name}: {whole} {kind} are too few to hold {count} out "
            f"and train on a sequence of {seq_len}; give more data, lower data.eval_fraction (0: hold "
            "nothing out), or lower model.seq_len"
        )
    if packing is None:
        train, held_out = part._replace(end=part.end - count), part._replace(begin=part.end - count)
    else:
        train, held_out = (part._replace(documents=each) for each in np.split(part.documents, [-count]))
    fraction = f"(data.eval_fraction={config.eval_fraction:g})"
    of = f" of {part.name}" if config.weights else ""
    return train, held_out, f"held out: the last {count:,} of {whole:,} {kind}{of} {fraction}"
