"""Keeps exact values of all units after one step, to be read while training goes on.

[Note: what keeps the values]
A unit on NVMe keeps the place that holds them: its updates alternate between the others, of which one more is
made if needed (:meth:`infinity.shards.tiers.Tiers.spare_place`). Without room for that, or with one place
only, the update waits until the unit has been read. A unit that is read where it lies in a checkpoint does
not change; one that is to get a home of its own waits.

A unit in host memory is updated in its place. Just before, its values are left to where a commit has written
them, or copied if the host budget has room; else the update waits. With the first copy the snapshot takes
the memory through which units on NVMe are read: else these could wait for copies, which are freed after them.
"""

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from infinity.core.budget import rounded
from infinity.core.errors import StateError
from infinity.core.nbytes import Transfer
from infinity.device.memory import Lease, Pool
from infinity.optim.layout import StateLayout
from infinity.shards.storage import ChunkExtents, Version

#: Timeout of the training thread's waits, so that Ctrl-C gets through (s).
_SLICE_S = 0.5


@dataclass(slots=True)
class Source:
    """Describes where the values of one unit are."""

    chunks: Sequence[tuple[int, int]] = ()  # start and elements of the parts in which they are read
    values: tuple[Tensor, ...] | None = None  # weights and state in host memory; None: only on NVMe
    version: Version | None = None  # that on NVMe; None: the values are only in host memory
    place: int | None = None  # its number among the unit's places
    landing: Sequence[Transfer] = ()  # what must end before: the update, and writes
    #: Yields all chunks of a unit whose values do not change.
    lasting: Generator[tuple[int, tuple[Tensor, ...]]] | None = None
    copy: Lease | None = None  # holds `values`, where they are the snapshot's own


class Snapshot:
    """Keeps the values of all units as they were when it was made. One thread reads, others train.

    Args:
        pool: Host memory for copies.
        reading: Gives weights and state of a chunk on NVMe inside the context: in the memory that is given,
            or in some of the pool.
    """

    def __init__(
        self, sources: Mapping[int, Source], layout: StateLayout, pool: Pool,
        reading: Callable[[ChunkExtents, Lease | None], AbstractContextManager[tuple[Tensor, ...]]],
    ) -> None:  # fmt: skip
        self._layout, self._pool, self._reading = layout, pool, reading
        self._changed = threading.Condition()  # guards what follows
        self._sources = dict(sources)  # of units that were not read yet
        self._room: Lease | None = None  # in which chunks are read
        self._cancelled = self._busy = False

    def read(self, index: int) -> Generator[tuple[int, tuple[Tensor, ...]]]:
        """Yield first element and fields of each chunk of this shard's exact values and moments, fp32.

        They stay until the next ones are asked for. Once for each unit: it may be overwritten afterwards.

        Raises:
            DiskError: A read failed, or the update that wrote the values.
            StateError: The model was closed meanwhile.
        """
        with self._changed:
            self._check()
            source, self._busy = self._sources[index], True
        try:
            if source.lasting is not None:
                yield from source.lasting
            for transfer in source.landing:
                transfer.wait()
            for number, (start, numel) in enumerate(source.chunks):
                with self._changed:
                    self._check()
                    fields = None if source.values is None else self._copies(source.values, start, numel)
                if fields is not None:
                    yield start, fields
                elif source.version is not None:
                    with self._reading(source.version.chunks[number], self._room) as (weight, *state):
                        yield start, self._layout.full_values(weight, state)
            self._check()
        finally:
            self._busy = False
            self._release(index)

    def _copies(self, values: Sequence[Tensor], start: int, numel: int) -> tuple[Tensor, ...]:
        weight, *fields = (each[start : start + numel] for each in values)
        state = self._layout.complete(fields, numel)
        return tuple(each.clone() for each in self._layout.full_values(weight, state))

    def _check(self) -> None:
        if self._cancelled:
            raise StateError("the model was closed while a checkpoint of it was saved")

    def _release(self, index: int) -> None:
        with self._changed:
            source = self._sources.pop(index, None)
            if source is not None and source.copy is not None:
                source.copy.release()
            if not self._sources and self._room is not None:
                self._room.release()
                self._room = None
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until nothing is read any more, and let every unit be overwritten. May be called twice."""
        with self._changed:
            self._cancelled = True
            while self._busy:
                self._changed.wait(_SLICE_S)
        for index in list(self._sources):
            self._release(index)

    def place(self, index: int) -> int | None:
        """Return the place of a unit that must not be overwritten; None: none must be kept."""
        source = self._sources.get(index)
        return None if source is None else source.place

    def preserve(self, index: int) -> None:
        """Wait until the values of a unit in host memory may be overwritten there."""
        with self._changed:
            source = self._sources.get(index)
            if source is None or source.values is None or source.copy is not None:
                return
            if source.version is not None:
                source.values = None
                return
            if self._copy(source, source.values):
                return
        self.wait_for(index)

    def _copy(self, source: Source, values: Sequence[Tensor]) -> bool:
        if self._room is None:  # for the largest chunk
            versions = [each.version for each in self._sources.values() if each.version is not None]
            numel = max((chunk.numel for version in versions for chunk in version.chunks), default=0)
            nbytes = self._layout.weight_nbytes(numel) + self._layout.state_nbytes(numel)
            self._room = self._pool.try_lease(nbytes, who="a checkpoint")
        nbytes = sum(rounded(each.nbytes) for each in values)
        lease = None if self._room is None else self._pool.try_lease(nbytes, who="a checkpoint")
        if lease is None:
            return False
        copies, at = [], 0
        for each in values:
            copies.append(lease.tensor[at : at + each.nbytes].view(each.dtype).copy_(each))
            at += rounded(each.nbytes)
        source.values, source.copy = tuple(copies), lease
        return True

    def wait_for(self, index: int) -> None:
        """Wait until a unit has been read, or will not be."""
        with self._changed:
            while index in self._sources:
                self._changed.wait(_SLICE_S)

    def wait(self) -> None:
        """Wait until all units have been read, or will not be."""
        for index in list(self._sources):
            self.wait_for(index)
