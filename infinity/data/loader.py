"""Batches of a run, from streams of sequences whose order all ranks share.

A batch of all ranks has the next ``global_batch_size`` sequences, of which each rank takes its slice. So
shares are disjoint, a place is a few numbers that are valid for any number of ranks, and every rank knows the
number of targets on all ranks without communication.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infinity.data.sequences import Batch, BatchShape, Ints, Sequences, join
from infinity.data.tokenizer import DataError


class Stream:
    """Sequences without end: of each epoch a window at a time; of these sequences, all are its only window.

    The order of a window follows from ``seed`` and the numbers of epoch and window. It leaves out what is no
    ``multiple``.
    """

    def __init__(
        self, name: str, sequences: Sequences, seed: tuple[int, ...], *, shuffle: bool, multiple: int = 1
    ) -> None:
        self.name, self.sequences, self._seed, self._multiple = name, sequences, seed, multiple
        self._shuffle, self._order = shuffle, np.zeros(0, np.int64)
        self.place = (0, 0, 0, "")

    @property
    def place(self) -> tuple[int, int, int, str]:
        """Return epoch, window, position in it, and a digest of what it is made of; empty: it is not open."""
        return self._epoch, self._window, self._position, self._digest

    @place.setter
    def place(self, place: Sequence[Any]) -> None:
        self._epoch, self._window, self._position, self._digest = place
        self._is_open = False

    def take(self, count: int) -> Iterator[tuple[Sequences, Ints]]:
        """Yield ``count`` sequences, each time some of one window."""
        empty = 0
        while count:
            if not self._is_open:
                self._open()
            which = self._order[self._position : self._position + count]
            self._position, count = self._position + len(which), count - len(which)
            if len(which):
                yield self.sequences, which
            if count:
                empty = 0 if len(self._order) else empty + 1
                if empty > self._windows():
                    raise DataError(
                        f"{self.name}: nothing in it makes a sequence of {self.sequences.seq_len}"
                    )
                self.place = (*self._following, 0, "")

    def upcoming(self, count: int) -> Ints:
        """Return those of the next ``count`` sequences, ascending, where there is one window."""
        ahead, found, size = copy.copy(self), np.zeros(len(self.sequences), np.bool_), len(self.sequences)
        while count > 0 and not found.all():
            for _, which in ahead.take(min(count, size)):
                found[which] = True
            count -= size
        return np.flatnonzero(found)

    @property
    def _following(self) -> tuple[int, int]:
        """Epoch and window of the next one."""
        ends = self._window + 1 == self._windows()
        return (self._epoch + 1, 0) if ends else (self._epoch, self._window + 1)

    def _open(self) -> None:
        self.sequences, digest, *numbers = self._read()
        if self._digest not in ("", digest):
            raise DataError(
                f"{self.name}: the files are not those that the run was interrupted with: window "
                f"{self._window} of epoch {self._epoch} has other tokens"
            )
        order = self._ordered(len(self.sequences), self._epoch, *numbers)
        self._order = order[: len(order) // self._multiple * self._multiple]
        self._digest, self._is_open = digest, True

    def _ordered(self, count: int, *numbers: int) -> Ints:
        """Return an order of ``count`` things, which follows from the seed and ``numbers``."""
        rng = np.random.default_rng((*self._seed, *numbers))
        return rng.permutation(count) if self._shuffle else np.arange(count)

    def _windows(self) -> int:
        """Return the number of windows of the epoch."""
        return 1

    def _read(self) -> tuple[Any, ...]:
        """Return the window's sequences, a digest of its tokens, and what tells its order from others'."""
        return self.sequences, ""


class Loader:
    """Endless iterator over one rank's training batches, of which streams have shares by ``weights``.

    Places of another ``identity`` are refused. ``per_epoch`` is the number of sequences of an epoch, or an
    estimate.
    """

    def __init__(
        self, streams: Sequence[Stream], weights: Sequence[float], shape: BatchShape,
        identity: Mapping[str, Any], per_epoch: float, *, estimated: bool = False,
    ) -> None:  # fmt: skip
        self.streams, self.shape, self.estimated = streams, shape, estimated
        self._identity = {**identity, "seq_len": shape.seq_len}
        self._shares, self._taken = np.cumsum((0, *weights)) / sum(weights), 0
        self.micro_batches_per_epoch = per_epoch / shape.global_batch_size

    @classmethod
    def of(
        cls, parts: Sequence[Sequences], shape: BatchShape, seed: int = 0, shuffle: bool = True,
        identity: str = "", weights: Sequence[float] = (),
    ) -> "Loader":  # fmt: skip
        """Return the loader of sequences that are all known, of several parts by weights.

        Without weights batches of an epoch are whole: what is left at its end is left out.
        """
        size, seq_len, count = shape.global_batch_size, shape.seq_len, sum(map(len, parts))
        if count < size:
            raise DataError(
                f"the training data has {count} sequences of {seq_len} tokens; a micro-batch needs {size} "
                f"({shape.world_size} ranks with train.batch_size={shape.batch_size}): give more data, or "
                "lower train.batch_size or model.seq_len"
            )
        streams = [
            Stream(
                f"data {number}", each, (seed, number) if weights else (seed,), shuffle=shuffle,
                multiple=1 if weights else size,
            )
            for number, each in enumerate(parts)
        ]  # fmt: skip
        place = {"tokens": identity, "seed": seed, "shuffle": shuffle}
        return cls(streams, weights or (1.0,), shape, place, count // size * size)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        shape, parts, filled = self.shape, list[Batch](), 0
        for stream, count in zip(self.streams, self._counts(shape.global_batch_size)):
            for sequences, together in stream.take(count):
                ranks = np.arange(filled, filled + len(together)) // shape.batch_size
                parts.append(sequences.batch(together[ranks == shape.rank], together))
                filled += len(together)
        self._taken += filled
        return join(parts)

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
            yield self.sequences.batch(self.shape.share(together), together)

    def order(self, limit: int) -> Ints:
        """Return the sequences of each of those batches, ``(batches, sequences)``, on all ranks."""
        count, size = len(self.sequences), self.shape.global_batch_size
        number = max(1, min(limit, count // size))
        return (np.arange(number * size) * count // (number * size)).reshape(number, size)
