"""Host memory that all ranks of one node share: full weights are there once, not once for each rank.

[Note: a file without a name] The memory is a file that was never in a directory: it goes with the last
process that has it open, however that ends, and the size of /dev/shm does not bound it. Rank 0 makes it, the
others open it through /proc, and a word in it tells that it is the same one. It is sparse: a place has
addresses, and takes memory where it was written, near the cores of the rank that wrote it.

[Note: who writes, who reads] A place holds the slices of all ranks side by side, as a gather leaves them.
Each rank writes its own slice and reads all. Nothing is locked: ranks write at the same points of their
programs, where a collective before tells each that no other reads any more, and one after it that all have
written (:meth:`infinity.comm.ranks.Ranks.wait_for_writes`). In a step these are the exchange of the
gradient's norm, which a rank enters when its backward pass is over, and one at the end of the optimizer's
``step()``.
"""

import fcntl
import mmap
import os
import secrets
from contextlib import suppress

import torch

from infinity.comm.collectives import Collectives
from infinity.core.errors import BudgetError
from infinity.core.nbytes import HUGE_NBYTES, rounded
from infinity.device.machine import total_host_nbytes
from infinity.device.memory import HostBuffer

#: Addresses for so many times the machine's memory, since those of what has gone are not used again.
_ADDRESSES = 4
_WORD_NBYTES = 16


class NodeMemory:
    """Memory of a node's ranks, each of which takes the same places in the same order; no file: to plan."""

    def __init__(self, rank: int, world_size: int, file: int = -1) -> None:
        self.rank, self.world_size = rank, world_size
        self._file, self._end = file, HUGE_NBYTES  # after the word
        self._process = os.getpid() if file >= 0 else -1  # that has it open
        if file >= 0:
            self.map = mmap.mmap(file, os.fstat(file).st_size)
            with suppress(OSError, AttributeError):  # where the system lets files have them
                self.map.madvise(mmap.MADV_HUGEPAGE)
            fcntl.flock(file, fcntl.LOCK_SH)  # until this rank closes it, or ends

    @property
    def closed(self) -> bool:
        """Whether this process has left it; a forked child has no part in its parent's."""
        return self._process != os.getpid()

    @classmethod
    def open(cls, collectives: Collectives) -> "NodeMemory | None":
        """Return memory that every rank has open; None: one has not. Every rank must call."""
        rank, file, word, made = collectives.rank, -1, secrets.token_bytes(_WORD_NBYTES), None
        with suppress(OSError, AttributeError):  # a system without such files
            if rank == 0:
                file = os.memfd_create("infinity")
                os.ftruncate(file, _ADDRESSES * rounded(total_host_nbytes()))
                os.pwrite(file, word, 0)
        process, number, word = collectives.share((os.getpid(), file, word), "shared memory")
        with suppress(OSError):  # other containers, whose processes cannot be seen, or too few addresses
            if rank > 0 and number >= 0:
                file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            if file >= 0 and os.pread(file, _WORD_NBYTES, 0) == word:
                made = cls(rank, collectives.world_size, file)
        if bool(collectives.exchange("least", [made is not None], "shared memory").all()):
            return made
        if file >= 0:
            os.close(file)
        return None

    def slice(self, nbytes: int) -> "SharedSlice":
        """Return this rank's slice, of ``nbytes``, of the next place; zeros."""
        begin, self._end = self._end, self._end + rounded(self.world_size * nbytes)
        if self._end > len(self.map):
            raise BudgetError(
                "weights moved to host memory too often; set memory.shared=never", "memory.host"
            )
        return SharedSlice(self, begin, nbytes)

    def close(self) -> None:
        """Leave the memory, which the last rank to do so gives back. May be called twice."""
        if self.closed:
            return
        self._process = -1
        fcntl.flock(self._file, fcntl.LOCK_UN)
        with suppress(OSError):  # another rank has it still
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.map.madvise(mmap.MADV_REMOVE)  # views that outlive it read zeros
        os.close(self._file)


class SharedSlice(HostBuffer):
    """One rank's slice of a place, lent by a pool of host memory; ``whole`` are the slices of all ranks."""

    is_kept = False  # it is shorter than whole pages of its size, and its place is all ranks'

    def __init__(self, memory: NodeMemory, begin: int, nbytes: int) -> None:
        self.nbytes, self.device, self.events = rounded(nbytes), torch.device("cpu"), []
        self._owner, own = memory, begin + memory.rank * nbytes
        self._part = mmap.MADV_REMOVE, own, nbytes
        self.memory = memoryview(memory.map)[own : own + nbytes]
        count = memory.world_size * nbytes
        self.whole = torch.frombuffer(memory.map, dtype=torch.uint8, count=count, offset=begin)
        self.tensor = self.whole[own - begin : own - begin + nbytes]

    def close(self) -> None:
        """Give the slice's pages back, unless other ranks may go on with them."""
        if not self._owner.closed:
            with suppress(OSError, ValueError):  # pages larger than slices
                self._owner.map.madvise(*self._part)
