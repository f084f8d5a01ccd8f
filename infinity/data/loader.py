"""Batches of a run: tokens as sequences of equal length, in a shuffled order that all ranks share.

Each epoch has one global order of sequences. Micro-batch ``n`` is the n-th run of ``global_batch_size``
sequences, of which each rank takes its slice. So shares are disjoint, a position is one number that is valid
for any number of ranks, and every rank knows the number of targets on all ranks without communication.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from infinity.core.config import SettingError
from infinity.data.entries import EVAL_SETS, HELD_OUT, TRAIN, DataConfig, Part, Sources, open_sources
from infinity.data.examples import Kind
from infinity.data.sequences import (
    Batch,
    BatchShape,
    Ints,
    Sequences,
    document_rows,
    example_rows,
    joined,
    token_stream,
)
from infinity.data.tokenizer import DataError
from infinity.data.tokens import Tokens


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
        self.sequences, self.shape, self._mixture = sequences, shape, mixture
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
        size = self.shape.global_batch_size
        if self._position + size > len(self._order):
            self._seek(self.epoch + 1, 0)
        together = self._order[self._position : self._position + size]
        self._position += size
        return self.sequences.batch(self.shape.share(together), together)

    def state_dict(self) -> dict[str, Any]:
        """Return the position before the next batch; the same on every rank."""
        return {**self._identity, "epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position, also with another number of ranks or batch size."""
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise DataError(f"data: the saved position has {key}={state.get(key)!r}, this run {value!r}")
        self._seek(int(state["epoch"]), int(state["position"]))

    def upcoming(self, micro_batches: int) -> Ints:
        """Return the sequences that so many micro-batches from here on have, ascending."""
        epoch, order, first = self.epoch, self._order, self._position
        found, size = np.zeros(len(self.sequences), np.bool_), self.shape.global_batch_size
        while micro_batches > 0 and not found.all():
            count = min(micro_batches, (len(order) - first) // size)
            found[order[first : first + count * size]] = True
            micro_batches, epoch, first = micro_batches - count, epoch + 1, 0
            order = self._order_of(epoch)
        return np.flatnonzero(found)

    def _seek(self, epoch: int, position: int) -> None:
        self.epoch, self._position, self._order = epoch, position, self._order_of(epoch)

    def _order_of(self, epoch: int) -> Ints:
        seed, shuffle = self._identity["seed"], self._identity["shuffle"]
        if self._mixture is not None:
            return self._mixture.order(epoch, seed, shuffle)
        if shuffle:
            return np.random.default_rng((seed, epoch)).permutation(len(self.sequences))
        return np.arange(len(self.sequences))


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Sequences excluded from training; the same in every evaluation."""

    sequences: Sequences
    shape: BatchShape

    def batches(self, limit: int) -> Iterator[Batch]:
        """Yield at most ``limit`` batches, equally many on every rank, spread over all held-out sequences.

        Sequences repeat if they do not fill one micro-batch.
        """
        for together in self.order(limit):
            yield self.sequences.batch(self.shape.share(together), together)

    def order(self, limit: int) -> Ints:
        """Return the sequences of each of those batches, ``(batches, sequences)``, on all ranks."""
        count, size = len(self.sequences), self.shape.global_batch_size
        number = max(1, min(limit, count // size))
        return (np.arange(number * size) * count // (number * size)).reshape(number, size)


class Layout(NamedTuple):
    """How documents become sequences: packed, one in each, or (null) as one stream; ``kind``: examples."""

    shape: BatchShape
    packing: bool | None
    kind: Kind | None = None

    @property
    def seq_len(self) -> int:
        return self.shape.seq_len

    def of(self, tokens: Tokens, parts: Sequence[Part]) -> list[Sequences]:
        """Return the sequences of each part; DataError: one has too few tokens."""
        return [self._of(tokens, part) for part in parts]

    def _of(self, tokens: Tokens, part: Part) -> Sequences:
        seq_len = self.shape.seq_len
        if self.packing is not None:
            only = replace(tokens, documents=part.documents)
            if self.kind is not None:
                return example_rows(only, self.shape, self.kind, packing=self.packing)
            return document_rows(only, seq_len, packing=self.packing)
        if part.end - part.begin <= seq_len:
            raise DataError(
                f"{part.name}: {part.end - part.begin} tokens, fewer than one sequence of {seq_len} and "
                "its target; give more data or lower model.seq_len"
            )
        found = token_stream(tokens.values[part.begin : part.end], seq_len)
        return replace(found, values=tokens.values, starts=found.starts + part.begin)


@dataclass(frozen=True, slots=True)
class Data:
    """Training and held-out data of a run."""

    train: TokenLoader
    evaluated: Mapping[str, HeldOut]  # held-out data by the names of data.eval_sets; the other one has none
    packed: bool  # sequences hold several documents each, which must not attend to each other
    sources: Sources  # what train is of
    layout: Layout
    notes: tuple[str, ...] = ()  # lines for the user: how documents were laid out, truncated or skipped
    labels: int = 0  # one more than the largest label of examples

    @property
    def held_out(self) -> HeldOut | None:
        """Return the data of ``data.eval_files``, or ``data.eval_fraction``."""
        return self.evaluated.get("")


def open_data(
    config: DataConfig,
    shape: BatchShape,
    *,
    vocab_size: int,
    model_path: str | None = None,
    log: Callable[[str], object] = lambda line: None,
    kind: Kind | None = None,
    all_tokens: bool = False,
) -> Data:
    """Open the data of a run. All ranks may call at the same time.

    Args:
        vocab_size: The model's; DataError: the data has a token beyond it.
        model_path: The model's directory, whose tokenizer is used if the recipe names none.
        log: Called with a progress line now and then, while this process tokenizes.
        kind: Of the examples; None: text, prompts and chats.
        all_tokens: Count in the loss, also those of prompts.
    """
    given = open_sources(config, vocab_size, model_path, log, kind, all_tokens=all_tokens)
    train, others = given[TRAIN], {key: each for key, each in given.items() if key != TRAIN}
    packing, notes = _packing(config, given, kind), list[str]()
    for each in given.values():
        notes += each.notes(mixed=bool(config.weights) and each is train)
    layout, parts = Layout(shape, packing, kind), train.parts if config.weights else [train.whole]
    held = {key: joined(layout.of(each.tokens, [each.whole])) for key, each in others.items()}
    if not held and config.eval_fraction:
        together = 1 if kind is None else kind.documents
        cut = [_hold_out(config, shape.seq_len, packing, part, together) for part in parts]
        parts, held_parts, more = (list(each) for each in zip(*cut))
        notes += more
        held[HELD_OUT] = joined(layout.of(train.tokens, held_parts))
    by_part, mixture = layout.of(train.tokens, parts), None
    sequences = joined(by_part)
    for key, found in held.items():
        if not len(found):
            raise DataError(
                f"the {_called(key)} has no target that counts in the loss, in sequences of "
                f"{shape.seq_len} tokens; give more of it or raise model.seq_len"
            )
    if packing is not None:
        notes += [f"training data: {sequences}", *(f"{_called(key)}: {each}" for key, each in held.items())]
    identity = f"{train.tokens.digest}:{sequences.identity}"
    if config.weights:
        mixture = Mixture(tuple(map(len, by_part)), config.weights)
        identity += f":{list(config.weights)}"
        notes += _notes_on(mixture, parts)
    loader = TokenLoader(sequences, shape, config.seed, config.shuffle, identity, mixture)
    evaluated = {
        "" if key == HELD_OUT else key.removeprefix(EVAL_SETS): HeldOut(each, shape)
        for key, each in held.items()
    }
    of = (each.examples for each in (sequences, *held.values()) if each.examples is not None)
    labels = max((1 + int(each.labels.max(initial=-1)) for each in of), default=0)
    return Data(loader, evaluated, packing is True, train, layout, tuple(notes), labels)


def _packing(config: DataConfig, given: Mapping[str, Sources], kind: Kind | None) -> bool | None:
    """Return whether rows are packed; None: tokens are one stream."""
    if kind is not None and kind.whole:
        if config.packing:
            wanted = "false or null for a task whose model scores whole documents"
            raise SettingError("data.packing", True, wanted)
        return False
    if config.packing is None and kind is None:
        return True if any(each.tokens.loss_mask is not None for each in given.values()) else None
    return config.packing is not False


def _called(key: str) -> str:
    return "held-out data" if key == HELD_OUT else key


def _notes_on(mixture: Mixture, parts: Sequence[Part]) -> Iterator[str]:
    for part, rows, count in zip(parts, mixture.rows, mixture.counts):
        if not rows:
            raise DataError(f"{part.name}: no sequence to mix in (data.weights)")
        share = count / max(1, sum(mixture.rows))
        yield (
            f"{part.name}: {rows:,} sequences, {share:.1%} of an epoch, which has each of them "
            f"{count / rows:.3g} times"
        )


def _hold_out(
    config: DataConfig, seq_len: int, packing: bool | None, part: Part, together: int
) -> tuple[Part, Part, str]:
    """Hold out the last tokens, or whole documents; return the others, these, and a line about it.

    Documents stay ``together`` in such numbers.
    """
    kind, whole, least = "tokens", part.end - part.begin, seq_len + 1
    if packing is not None:
        kind, whole, least = "documents", len(part.documents), together
    count = max(round(whole * config.eval_fraction / together) * together, least)
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
