"""Batches of a run, from streams of sequences whose order all ranks share.

A batch of all ranks has the next ``global_batch_size`` sequences, of which each rank takes its slice. So
shares are disjoint, a place is a few numbers that are valid for any number of ranks, and every rank knows the
number of targets on all ranks without communication.

[Note: windows] Data may be tokenized while training goes on, a window of it at a time. Files are cut into
parts. An epoch has all of them in a shuffled order, as windows of about ``data.shuffle_buffer`` bytes. The
documents of a window are laid out, and its sequences shuffled, together. All of this follows from the files,
the seed, and the numbers of epoch and window; a run that goes on reads the window that it was in, and no
other.

[Note: tokens ahead] The tokens of a part are an entry of the cache until the next window is in memory. A
process beside each rank writes entries of the next window, those first that other ranks begin with last.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from infinity.core.errors import LockedError
from infinity.data.helpers import Helpers, turned
from infinity.data.sequences import Batch, BatchShape, Ints, Layout, Sequences, join
from infinity.data.sources import Source, stamps
from infinity.data.tokenizer import DataError
from infinity.data.tokens import Part, TokenCache, Tokens, joined


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
                parts.append(sequences.batch(together[ranks == shape.group], together))
                filled += len(together)
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


class PartTokens:
    """Opens sequences of parts of files, while a process writes tokens of the parts that follow.

    ``check`` returns tokens as they are trained on, or raises. Of ``entries``, all parts that there are, the
    first part of each stays in the cache.
    """

    def __init__(
        self, cache: TokenCache, layout: Layout, log: Callable[[str], object],
        check: Callable[[Tokens], Tokens], entries: Sequence[Sequence[Source]],
    ) -> None:  # fmt: skip
        self._cache, self._layout, self._log, self._check = cache, layout, log, check
        self._kept, self._opened = {parts[0] for parts in entries}, set[Source]()
        self._stamps = {path: stamps(path) for path in {part.path for parts in entries for part in parts}}
        self._helpers: Helpers | None = None

    def open(self, name: str, parts: Sequence[Source], following: Sequence[Source]) -> tuple[Sequences, str]:
        """Return the sequences of ``parts``, in memory, and a digest; the cache keeps no earlier ones."""
        for path in dict.fromkeys(part.path for part in parts):
            if stamps(path) != self._stamps[path]:
                raise DataError(f"{path} has changed since this run began to read it")
        shape = self._layout.shape
        own, next_own = (turned(each, shape.rank, shape.world_size) for each in (parts, following))
        if self._helpers is not None:  # its start would take as long as the first window
            self._helpers.write(own[::-1])  # until both meet
        for part in own:
            with suppress(LockedError):  # another rank writes it
                self._cache.make([part], self._log, patience_s=0)
        tokens = joined([self._cache.open([part], self._log) for part in parts])
        if tokens.malformed[0]:
            self._log("data: skipped {:,} malformed rows; the first: {}".format(*tokens.malformed))
        for part in self._opened - {*parts, *following}:
            self._cache.remove([part])
        self._opened = {*parts, *following} - self._kept
        if self._helpers is None:
            self._helpers = Helpers(self._cache, 1)
        self._helpers.write(next_own)
        checked = self._check(tokens)
        whole = Part(name, 0, len(checked.values), checked.documents)
        return self._layout.of_part(checked, whole), checked.digest


class Windows(Stream):
    """Stream of parts of files: see [Note: windows]."""

    def __init__(
        self, name: str, parts: Sequence[Source], tokens: PartTokens, nbytes: int, first: Sequences,
        seed: tuple[int, ...], *, shuffle: bool,
    ) -> None:  # fmt: skip
        super().__init__(name, first, seed, shuffle=shuffle)
        self._parts, self._tokens, self._nbytes = parts, tokens, nbytes
        self._sizes = np.array([max(1, part.nbytes) for part in parts])

    def _windows(self) -> int:
        return len(self._windows_of(self._epoch))

    def _read(self) -> tuple[Any, ...]:
        places = (self._epoch, self._window), self._following
        parts = ([self._parts[at] for at in self._windows_of(epoch)[window]] for epoch, window in places)
        return *self._tokens.open(self.name, *parts), self._window

    def _windows_of(self, epoch: int) -> list[Ints]:
        """Return the parts of each window of an epoch."""
        order = self._ordered(len(self._parts), epoch)
        ends = np.cumsum(self._sizes[order])
        windows = (ends - 1) * max(1, round(ends[-1] / self._nbytes)) // ends[-1]
        return np.split(order, np.flatnonzero(np.diff(windows)) + 1)
