"""Processes that write entries of a cache of tokens for this one: on other cores, or ahead of training.

What they have not written, or could not, this process writes, or raises the error of. So they only save time.

[Note: the memory of helpers] They are in no budget, so there are as many at most as half of the memory
holds that is free when they start. Large JSON arrays, which are read whole, are left to the rank.
"""

import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import BinaryIO

import numpy as np

from infinity.comm.ranks import rank, world_size
from infinity.core.errors import InfinityError, LockedError
from infinity.data.sources import Source, has_rows
from infinity.data.tokenizer import DataError, Encoded
from infinity.data.tokens import LINES_EVERY_S, Documents, Log, TokenCache
from infinity.device.machine import free_host_nbytes, local_ranks, usable_cores

#: Bytes of rows that are a part, and of those that are worth a process, whose start takes some seconds.
PART_NBYTES, WORTH_NBYTES = 2**21, 2**24
#: Processes beside a rank, the memory of one with a large tokenizer, and the largest JSON array of one.
MOST_HELPERS, HELPER_NBYTES, _MOST_JSON_NBYTES = 15, 2**29, 2**24


class Helpers:
    """At most ``count`` processes that write entries of ``cache``; they end with this one."""

    def __init__(self, cache: TokenCache, count: int) -> None:
        paths = os.pathsep.join(filter(None, sys.path))  # no modules of the working directory
        env = {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
        count = min(count, free_host_nbytes() // 2 // HELPER_NBYTES)
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, env=env, start_new_session=True,
            )
            for _ in range(count)
        ]  # fmt: skip
        self.end = weakref.finalize(self, _end, self.processes)
        for process in self.processes:
            _tell(process, cache)

    def write(self, parts: Sequence[Source]) -> None:
        """Let each process write entries of ``parts``, from another one on, in place of earlier ones."""
        for number, process in enumerate(self.processes):
            _tell(process, turned(parts, number, len(self.processes)))


def _tell(process: "subprocess.Popen[bytes]", what: object) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended
        process.stdin.write(pickle.dumps(what))
        process.stdin.flush()


def _end(processes: "Sequence[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        process.kill()
        process.communicate()


def turned(parts: Sequence[Source], number: int, of: int) -> list[Source]:
    """Return ``parts`` in an order that begins elsewhere for each ``number`` of ``of``."""
    first = len(parts) * number // of
    return [*parts[first:], *parts[:first]]


def write_entries(orders: BinaryIO) -> None:
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
                if part.path.suffix != ".json" or part.nbytes <= _MOST_JSON_NBYTES:
                    cache.make([part], patience_s=0)
        parts = lists.get() if not parts[1:] or not lists.empty() else parts[1:]


def make_together(cache: TokenCache, sources: Sequence[Source], log: Log) -> None:
    """Encode ``sources`` unless they are, with all ranks and cores of this node if they are large.

    Files of rows are cut into parts, whose entries are put together and removed. Rows must not depend on
    those before and after them.
    """
    by_source = {each: each.parts(PART_NBYTES) if has_rows(each.path) else [each] for each in sources}
    parts = [part for each in by_source.values() if len(each) > 1 for part in each]
    worth = sum(part.nbytes for part in parts) // WORTH_NBYTES
    count = min(worth, max(1, usable_cores() // local_ranks()), MOST_HELPERS + 1) - 1
    whole, own = cache.entry(sources), turned(parts, rank(), world_size())
    if not worth or whole.exists():
        return
    helpers, logged_s = Helpers(cache, count), time.monotonic()
    if not helpers.processes and world_size() == 1:  # parts would be written twice, and save no time
        return
    try:
        helpers.write(own[::-1])  # until all meet
        for number, part in enumerate(own):
            if whole.exists():  # another rank has been quicker
                break
            with suppress(LockedError):  # another process writes it
                cache.make([part], log, patience_s=0)
            if time.monotonic() - logged_s >= LINES_EVERY_S:
                logged_s = time.monotonic()
                log(f"tokenizing {part.path}: {number} of {len(own)} parts")
        cache.make(sources, log, lambda source: _documents(cache, by_source[source]))
    except DataError:  # whoever reads all from the beginning raises the first
        pass
    finally:
        helpers.end()
    for part in parts:
        cache.remove([part])


def _documents(cache: TokenCache, parts: Sequence[Source]) -> Documents:
    """Yield the documents of parts, in order, from their entries; of a single one by encoding it."""
    if len(parts) == 1:
        yield from cache.documents(parts[0])
        return
    for part in parts:
        tokens = cache.open([part])
        for begin, end, _, label in tokens.documents.tolist():
            mask = np.ones(end - begin, np.bool_) if tokens.loss_mask is None else tokens.loss_mask[begin:end]
            yield Encoded(tokens.values[begin:end], mask, label=label)
        skipped, first = tokens.malformed
        yield from [DataError(first)] * skipped


if __name__ == "__main__":
    write_entries(sys.stdin.buffer)
