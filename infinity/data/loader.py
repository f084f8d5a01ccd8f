"""Batches of a run, from streams of sequences whose order all ranks share.

A batch of all ranks has the next ``global_batch_size`` sequences, of which each rank takes its slice. So
shares are disjoint, a place is a few numbers that are valid for any number of ranks, and every rank knows the
number of targets on all ranks without communication.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infinity.data.sequences import Batch, BatchShape, Ints, Sequences, join
from infinity.data.tokenizer import DataError


class Stream:
    """Sequences without end, in each epoch in an order that follows from ``seed`` and the epoch's number.

    An epoch leaves out what is no ``multiple``.
    """

    def __init__(
        self, sequences: Sequences, seed: tuple[int, ...], *, shuffle: bool, multiple: int = 1
    ) -> None:
        self.sequences, self._seed, self._shuffle = sequences, seed, shuffle
        self._count = len(sequences) // multiple * multiple
        self.place = (0, 0)

    @property
    def place(self) -> tuple[int, int]:
        """Return the epoch and the position in it."""
        return self._epoch, self._position

    @place.setter
    def place(self, place: Sequence[int]) -> None:
        self._epoch, self._position = place
        rng = np.random.default_rng((*self._seed, self._epoch))
        count = len(self.sequences)
        self._order = (rng.permutation(count) if self._shuffle else np.arange(count))[: self._count]

    def take(self, count: int) -> Ints:
        """Return the next ``count`` sequences."""
        found = list[Ints]()
        while count:
            if self._position == self._count:
                self.place = (self._epoch + 1, 0)
            found.append(self._order[self._position : self._position + count])
            self._position += len(found[-1])
            count -= len(found[-1])
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def upcoming(self, count: int) -> Ints:
        """Return those of the next ``count`` sequences, ascending."""
        ahead, found, size = copy.copy(self), np.zeros(len(self.sequences), np.bool_), self._count
        while count > 0 and not found.all():
            found[ahead.take(min(count, size))] = True
            count -= size
        return np.flatnonzero(found)


class Loader:
    """Endless iterator over one rank's training batches, of which ``parts`` have shares by ``weights``.

    Without weights batches of an epoch are whole: what is left at its end is left out. Places of another
    ``identity``, seed or order are refused.
    """

    def __init__(
        self, parts: Sequence[Sequences], shape: BatchShape, seed: int = 0, shuffle: bool = True,
        identity: str = "", weights: Sequence[float] = (),
    ) -> None:  # fmt: skip
        size, seq_len, count = shape.global_batch_size, shape.seq_len, sum(map(len, parts))
        if count < size:
            raise DataError(
                f"the training data has {count} sequences of {seq_len} tokens; a micro-batch needs {size} "
                f"({shape.world_size} ranks with train.batch_size={shape.batch_size}): give more data, or "
                "lower train.batch_size or model.seq_len"
            )
        self.shape, self.micro_batches_per_epoch = shape, float(count // size)
        self.streams = [
            Stream(
                each, (seed, number) if weights else (seed,), shuffle=shuffle, multiple=1 if weights else size
            )
            for number, each in enumerate(parts)
        ]
        shares = weights or (1.0,)
        self._shares, self._taken = np.cumsum((0, *shares)) / sum(shares), 0
        self._identity: dict[str, Any] = {"tokens": identity, "seed": seed, "shuffle": shuffle}
        self._identity["seq_len"] = seq_len

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        shape, parts, filled = self.shape, list[Batch](), 0
        for stream, count in zip(self.streams, self._counts(shape.global_batch_size)):
            together = stream.take(count)
            ranks = np.arange(filled, filled + count) // shape.batch_size
            if count:
                parts.append(stream.sequences.batch(together[ranks == shape.group], together))
            filled += count
        self._taken += filled
        return join(parts).part(shape)

    def upcoming(self, micro_batches: int) -> Iterator[tuple[Stream, Ints]]:
        """Yield each stream with those of its sequences that so many micro-batches from here on have."""
        counts = self._counts(micro_batches * self.shape.global_batch_size)
        yield from ((stream, stream.upcoming(count)) for stream, count in zip(self.streams, counts))

    def _counts(self, count: int) -> list[int]:
        """Return how many of the next ``count`` sequences are of each stream."""
        begins, ends = (np.rint(self._shares * at).astype(int) for at in (self._taken, self._taken + count))
        counts: list[int] = np.diff(ends - begins).tolist()
        return counts

    def state_dict(self) -> dict[str, Any]:
        """Return the place before the next batch; the same on every rank."""
        places = [stream.place for stream in self.streams]
        return {**self._identity, "taken": self._taken, "places": places}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved place, also with another number of ranks or batch size."""
        for key, value in self._identity.items():
            if state.get(key) != value:
                why = "; the files, their sizes or contents, or settings have changed" * (key == "tokens")
                was = f"the saved position has {key}={state.get(key)!r}"
                raise DataError(f"data: {was}, this run {value!r}{why}")
        self._taken = int(state["taken"])
        for stream, place in zip(self.streams, state["places"], strict=True):
            stream.place = place


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
            yield self.sequences.batch(self.shape.share(together), together).part(self.shape)

    def order(self, limit: int) -> Ints:
        """Return the sequences of each of those batches, ``(batches, sequences)``, on all ranks."""
        count, size = len(self.sequences), self.shape.global_batch_size
        number = max(1, min(limit, count // size))
        return (np.arange(number * size) * count // (number * size)).reshape(number, size)
