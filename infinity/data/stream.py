"""Batches of data that is tokenized while training goes on, a window of it at a time.

[Note: windows] Files are cut into parts. An epoch has all of them in a shuffled order, as windows of about
``data.shuffle_buffer`` bytes. The documents of a window are laid out, and its sequences shuffled, together.
All of this follows from the files, the seed, and the numbers of epoch and window. So a place in the data is a
few numbers, valid for any number of ranks; a run that goes on reads the window that it was in, and no other;
and each rank knows the sequences of all without communication.

[Note: tokens ahead] The tokens of a part are an entry of the cache until the next window is in memory. A
process beside each rank writes entries of the next window, those first that other ranks begin with last. It
only saves time: what it has not written, or could not, its rank writes, or raises the error of.
"""

import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, BinaryIO

import numpy as np

from infinity.core.errors import InfinityError, LockedError
from infinity.data.entries import Part
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
        self._ahead: subprocess.Popen[bytes] | None = None

    def open(self, name: str, parts: Sequence[Source], following: Sequence[Source]) -> tuple[Sequences, str]:
        """Return the sequences of ``parts``, in memory, and a digest; the cache keeps no earlier ones."""
        for path in dict.fromkeys(part.path for part in parts):
            if stamps(path) != self._stamps[path]:
                raise DataError(f"{path} has changed since this run began to read it")
        own_first = self._own_first(parts)
        self._write_ahead(own_first[::-1])  # until both meet
        for part in own_first:
            with suppress(LockedError):  # another rank writes it
                self._cache.make([part], self._log, patience_s=0)
        tokens = joined([self._cache.open([part], self._log) for part in parts])
        if tokens.malformed[0]:
            self._log("data: skipped {:,} malformed rows; the first: {}".format(*tokens.malformed))
        for part in self._opened - {*parts, *following}:
            self._cache.remove([part])
        self._opened = {*parts, *following} - self._kept
        self._write_ahead(self._own_first(following))
        checked = self._check(tokens)
        whole = Part(name, 0, len(checked.values), checked.documents)
        return self._layout.of_part(checked, whole), checked.digest

    def _own_first(self, parts: Sequence[Source]) -> list[Source]:
        """Return ``parts`` in an order that begins elsewhere on each rank."""
        first = len(parts) * self._layout.shape.rank // self._layout.shape.world_size
        return [*parts[first:], *parts[:first]]

    def _write_ahead(self, parts: list[Source]) -> None:
        if self._ahead is None:
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
            self._ahead = subprocess.Popen(
                [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, env=env, start_new_session=True,
            )  # fmt: skip
            weakref.finalize(self, _end, self._ahead)
            self._tell(self._cache)
        self._tell(parts)

    def _tell(self, what: object) -> None:
        assert self._ahead is not None
        assert self._ahead.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: this process does its work
            self._ahead.stdin.write(pickle.dumps(what))
            self._ahead.stdin.flush()


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


def write_ahead(orders: BinaryIO) -> None:
    """Write entries of a cache, which is the first that ``orders`` has; then come lists of parts.

    Each list replaces what is left of the one before. Ends with ``orders``: the rank has.
    """
    cache, lists = pickle.load(orders), SimpleQueue[list[Source] | None]()

    def read() -> None:
        with suppress(EOFError):
            while True:
                lists.put(pickle.load(orders))
        lists.put(None)

    threading.Thread(target=read, daemon=True).start()  # templates are rendered in the main thread
    parts: list[Source] | None = []
    while parts is not None:
        for part in parts[:1]:
            with suppress(InfinityError, OSError):  # the rank meets it, too
                cache.make([part], patience_s=0)
        parts = lists.get() if not parts[1:] or not lists.empty() else parts[1:]


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


if __name__ == "__main__":
    write_ahead(sys.stdin.buffer)
