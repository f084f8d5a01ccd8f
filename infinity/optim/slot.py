"""The nouns of the chunk pipeline: a job's progress, a chunk in flight, and what was counted."""

from contextlib import suppress
from dataclasses import dataclass, field

from infinity.core.transfer import Lease, Transfer
from infinity.optim.job import Chunk, UpdateJob


@dataclass(frozen=True, slots=True)
class PipelineStats:
    """Since the pipeline was made: what its thread did, in seconds of wall clock, and bytes moved.

    Attributes:
        buffer_wait_s: Nothing in flight, and no staging buffer to be had.
        read_wait_s: Nothing to update, and reads in flight.
        write_wait_s: Nothing to update, and only writes in flight.
        update_s: In the rule.
    """

    buffer_wait_s: float = 0.0
    read_wait_s: float = 0.0
    write_wait_s: float = 0.0
    update_s: float = 0.0
    nbytes_read: int = 0
    nbytes_written: int = 0


@dataclass(slots=True, eq=False)
class Progress:
    """How far one job is."""

    job: UpdateJob
    order: tuple[int, int]  # priority, then order of submission
    started: int = 0
    updated: int = 0
    landed: int = 0


@dataclass(slots=True, eq=False)
class Slot:
    """A chunk in flight, with the buffer that it holds."""

    progress: Progress | None  # None: read ahead
    name: str
    chunk: Chunk
    lease: Lease
    transfers: list[Transfer] = field(default_factory=list)
    writing: bool = False
    dropped: bool = False  # read ahead in vain

    @property
    def ahead(self) -> bool:
        return self.progress is None

    @property
    def ended(self) -> bool:
        return all(transfer.done() for transfer in self.transfers)

    def wait(self) -> None:
        for transfer in self.transfers:
            transfer.wait()

    def settle(self) -> None:
        """Wait until no byte of the buffer is in flight, however that ends; give it back."""
        for transfer in self.transfers:
            with suppress(BaseException):
                transfer.wait()
        self.lease.release()
