"""Batches of data that is tokenized while training goes on, a window of it at a time.

[Note: windows] Files are cut into parts. An epoch has all of them in a shuffled order, as windows of about
``data.shuffle_buffer`` bytes. The documents of a window are laid out, and its sequences shuffled, together.
All of this follows from the files, the seed, and the numbers of epoch and window. So a place in the data is a
few numbers, valid for any number of ranks; a run that goes on reads the window that it was in, and no other;
and each rank knows the sequences of all without communication.

[Note: tokens ahead] The tokens of a part are an entry of the cache until the next window is in memory. A
process beside each rank writes entries of the next window, those first that other ranks begin with last.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from infinity.core.errors import LockedError
from infinity.data.entries import Part
from infinity.data.helpers import Helpers, turned
from infinity.data.loader import Stream
from infinity.data.sequences import Ints, Layout, Sequences
from infinity.data.sources import Source, stamps
from infinity.data.tokenizer import DataError
from infinity.data.tokens import TokenCache, Tokens, joined


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
