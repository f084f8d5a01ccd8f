"""Which byte ranges of one file are taken. Pure arithmetic: no file is touched here."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes ``[offset, offset + nbytes)``; ``fresh`` when nobody had them before."""

    offset: int
    nbytes: int
    fresh: bool


@dataclass(slots=True)
class Space:
    """Best fit among what was given back, else at the end.

    Attributes:
        end: First byte that nobody ever had.
        taken_nbytes: Bytes that are taken now.
    """

    end: int = 0
    taken_nbytes: int = 0
    _free: dict[int, int] = field(default_factory=dict)  # offset -> nbytes, no two touch

    def take(self, nbytes: int) -> Range:
        """A contiguous range of ``nbytes``."""
        self.taken_nbytes += nbytes
        fitting = [(size, offset) for offset, size in self._free.items() if size >= nbytes]
        if not fitting:
            self.end += nbytes
            return Range(self.end - nbytes, nbytes, fresh=True)
        size, offset = min(fitting)
        del self._free[offset]
        if size > nbytes:
            self._free[offset + nbytes] = size - nbytes
        return Range(offset, nbytes, fresh=False)

    def untake(self, taken: Range) -> None:
        """Undo the latest :meth:`take`: a fresh range is fresh again."""
        if taken.fresh:
            self.end -= taken.nbytes
            self.taken_nbytes -= taken.nbytes
        else:
            self.give(taken.offset, taken.nbytes)

    def give(self, offset: int, nbytes: int) -> None:
        """Give a range back; it joins its free neighbours.

        Raises:
            ValueError: Some of it is not taken.
        """
        before = next((start for start, size in self._free.items() if start + size == offset), None)
        inside = any(start < offset + nbytes and offset < start + size for start, size in self._free.items())
        if inside or offset + nbytes > self.end:
            raise ValueError(f"bytes {offset} to {offset + nbytes} are not taken; each is given back once")
        self.taken_nbytes -= nbytes
        if before is not None:
            nbytes += self._free.pop(before)
            offset = before
        nbytes += self._free.pop(offset + nbytes, 0)
        self._free[offset] = nbytes
