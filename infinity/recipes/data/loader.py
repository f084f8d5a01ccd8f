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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infinity.core.config import Config, SettingError, Valid, option, setting
from infinity.recipes.data.tokenizer import DataError, open_tokenizer
from infinity.recipes.data.tokens import Tokens, find_files, open_tokens

Ints = NDArray[np.int64]

#: A target that is ignored by the losses of torch and transformers.
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """Files, tokenizer, and how documents are laid out as sequences."""

    files: tuple[str, ...] = option(
        ("stdlib",),
        "text and .jsonl files, globs or directories; stdlib: the sources of Python's standard library",
        path=True,
    )
    eval_files: tuple[str, ...] = option(
        (), "held-out files, excluded from training; empty: hold out eval_fraction of the data", path=True
    )
    eval_fraction: float = setting(
        0.01, "fraction at the end of the data that is held out", Valid(least=0, below=1)
    )
    tokenizer: str | None = option(
        None,
        "bytes, a tokenizer.json, or a Hugging Face directory; null: that of model.path, else bytes",
        path=True,
    )
    packing: bool | None = setting(
        None,
        "true: several whole documents per sequence, attending only to themselves; false: one per sequence; "
        "null: text as one stream, prompts and chats as true",
    )
    skip_malformed: bool = setting(False, "count and skip malformed lines of .jsonl")
    cache: str = option("runs/tokens", "directory in which tokens are cached between runs", path=True)
    shuffle: bool = setting(True, "shuffle sequences anew every epoch; false: keep their order")
    seed: int = setting(0, "seed of the shuffling", Valid(0, 2**63 - 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.files or not all(self.files):
            raise SettingError("files", self.files, "at least one path, glob or 'stdlib'")
        if self.tokenizer == "":
            raise SettingError("tokenizer", self.tokenizer, "bytes, a path, or null")


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


class TokenLoader:
    """Endless iterator over one rank's training batches; positions of another ``identity`` are refused."""

    def __init__(
        self, sequences: Sequences, shape: BatchShape, seed: int = 0, shuffle: bool = True, identity: str = ""
    ) -> None:
        self._sequences, self._shape = sequences, shape
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
        self._order = np.arange(len(self._sequences))
        if self._identity["shuffle"]:
            rng = np.random.default_rng((self._identity["seed"], epoch))
            self._order = rng.permutation(len(self._sequences))


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


@dataclass(frozen=True, slots=True)
class Data:
    """Training and held-out data of a run."""

    train: TokenLoader
    held_out: HeldOut | None
    packed: bool = False  # sequences hold several documents each, which must not attend to each other
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
    tokens, held_out = _open_tokens(config, vocab_size, model_path, log)
    found = [("data.files", config.files, tokens)]
    found += [("data.eval_files", config.eval_files, held_out)] if held_out is not None else []
    packing, notes = config.packing, []
    if packing is None and any(each.loss_mask is not None for _, _, each in found):
        packing = True
    for key, _, each in found:
        if each.malformed[0]:
            number, first = each.malformed
            notes.append(f"{key}: skipped {number} malformed lines; the first: {first}")
    if held_out is None and config.eval_fraction:
        tokens, held_out, note = _hold_out(config, shape.seq_len, packing, tokens)
        notes.append(note)
    elif packing is None:
        for key, names, each in found:
            if len(each.values) <= shape.seq_len:
                raise DataError(
                    f"{key} ({', '.join(names)}): {len(each.values)} tokens, fewer than one sequence of "
                    f"{shape.seq_len} and its target; give more data or lower model.seq_len"
                )

    def laid_out(tokens: Tokens) -> Sequences:
        if packing is None:
            return token_stream(tokens.values, shape.seq_len)
        return document_rows(tokens, shape.seq_len, packing=packing)

    train, held = laid_out(tokens), None if held_out is None else laid_out(held_out)
    if held is not None and not len(held):
        raise DataError(
            "the held-out data has no target that counts in the loss, in sequences of "
            f"{shape.seq_len} tokens; give more of it or raise model.seq_len"
        )
    if packing is not None:
        notes.append(f"training data: {train}")
        notes += [f"held-out data: {held}"] if held is not None else []
    identity = f"{tokens.digest}:{train.identity}"
    loader = TokenLoader(train, shape, seed=config.seed, shuffle=config.shuffle, identity=identity)
    return Data(loader, None if held is None else HeldOut(held, shape), packing is True, tuple(notes))


def _open_tokens(
    config: DataConfig, vocab_size: int, model_path: str | None, log: Callable[[str], object]
) -> tuple[Tokens, Tokens | None]:
    tokenizer = open_tokenizer(config.tokenizer or model_path or "bytes")
    if model_path is None and tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"data.tokenizer has {tokenizer.vocab_size} tokens, model.vocab_size is {vocab_size}; "
            f"set model.vocab_size={tokenizer.vocab_size}"
        )
    eval_files = find_files(config.eval_files, key="data.eval_files")
    files = [path for path in find_files(config.files) if path not in eval_files]
    if not files:
        raise DataError(
            f"data.files ({', '.join(config.files)}): each of them is one of data.eval_files, too, so none "
            "is left to train on; name others, or hold a part of them out with data.eval_fraction"
        )
    options: Any = {"cache": Path(config.cache), "skip_malformed": config.skip_malformed, "log": log}
    tokens = open_tokens(files, tokenizer, **options)
    held_out = open_tokens(eval_files, tokenizer, **options) if eval_files else None
    largest = max(tokens.largest, -1 if held_out is None else held_out.largest)
    if largest >= vocab_size:
        raise DataError(
            f"the data contains the token {largest}; the model in {model_path} has {vocab_size} tokens; "
            "data.tokenizer=null selects the model's own tokenizer"
        )
    return tokens, held_out


def _hold_out(
    config: DataConfig, seq_len: int, packing: bool | None, tokens: Tokens
) -> tuple[Tokens, Tokens, str]:
    """Hold out the last tokens, or whole documents; return the others, these, and a line about it."""
    kind, field, least = ("tokens", "values", seq_len + 1)
    if packing is not None:
        kind, field, least = ("documents", "documents", 1)
    whole = getattr(tokens, field)
    count = max(round(len(whole) * config.eval_fraction), least)
    if len(whole) - count < least:
        raise DataError(
            f"data.files ({', '.join(config.files)}): {len(whole)} {kind} are too few to hold {count} out "
            f"and train on a sequence of {seq_len}; give more data, lower data.eval_fraction (0: hold "
            "nothing out), or lower model.seq_len"
        )
    train, held_out = (replace(tokens, **{field: part}) for part in (whole[:-count], whole[-count:]))
    fraction = f"(data.eval_fraction={config.eval_fraction:g})"
    return train, held_out, f"held out: the last {count:,} of {len(whole):,} {kind} {fraction}"
