"""States that are read before their gradients are there: the disk need not wait for backward.

[Note: what may be read ahead] The state of a committed version changes only by the unit's own update,
so it can be read as soon as the earlier update has landed. It is read in the order in which jobs will
come, and only into buffers that leave :data:`RESERVE` chunks for jobs that come in another order. A
job takes what was read for it only where the extents are its own; anything else is dropped. Whoever
writes states in another way (``load_state_dict``) drains the pipeline first, which forgets it all.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from infinity.core.transfer import Transfer
from infinity.optim.job import Chunk, UpdateJob

#: Chunks in flight that what is read ahead never takes from jobs that have come.
RESERVE = 2


@dataclass(frozen=True, slots=True)
class Expected:
    """A job that will come.

    Attributes:
        name: Of the job.
        chunks: Makes the chunks that the job will have.
        after: The earlier update, which writes what is to be read; None: it is there.
    """

    name: str
    chunks: Callable[[], tuple[Chunk, ...]]
    after: Transfer | None = None


class ReadAhead:
    """What to read ahead; belongs to the pipeline's thread.

    Args:
        expected: In the order in which they will come.
    """

    def __init__(self, expected: Iterable[Expected] = ()) -> None:
        self._expected: Iterator[Expected] = iter(expected)
        self._head: Expected | None = None
        self._chunks: tuple[Chunk, ...] = ()  # of the head
        self._at = 0  # chunks of the head that were handed out
        self._came: set[str] = set()

    def next(self) -> tuple[str, Chunk] | None:
        """The name of a job and its next chunk; None when nothing can be read now."""
        while self._head is None or self._at == len(self._chunks):
            self._head = next(self._expected, None)
            if self._head is None:
                return None
            if self._head.name in self._came:
                self._head = None
            else:
                self._chunks, self._at = self._head.chunks(), 0
        if self._head.after is not None and not self._head.after.done():
            return None
        return self._head.name, self._chunks[self._at]

    def advance(self) -> None:
        """What :meth:`next` gave is being read."""
        self._at += 1

    def came(self, job: UpdateJob) -> None:
        """``job`` is here: nothing more is read ahead for it."""
        self._came.add(job.name)
        if self._head is not None and self._head.name == job.name:
            self._head = None
