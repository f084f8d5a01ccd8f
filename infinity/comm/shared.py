"""Host memory that all ranks of one node share: full weights are there once, not once for each rank.

[Note: a file without a name] The memory is a file that was never in a directory: it goes with the last
process that has it open, however that ends, and the size of /dev/shm does not bound it. Rank 0 makes it, the
others open it through /proc, and a word in it tells that it is the same one. It is sparse: a place has
addresses, and takes memory where it was written, near the cores of the rank that wrote it.

[Note: who writes, who reads] A place holds the slices of all ranks side by side, as a gather leaves them.
Each rank writes its own slice and reads all. Nothing is locked: ranks write at the same points of their
programs. An exchange before tells each that no other reads any more: every one of
:class:`infinity.comm.ranks.Ranks` first waits for this rank's reads. One after it tells that all have written
(:meth:`infinity.comm.ranks.Ranks.wait_for_writes`). In a step these are the exchange of the gradient's norm,
which a rank enters when its backward pass is over, and one at the end of the optimizer's ``step()``.

[Note: beside an accelerator] The second one would make ``step()`` wait for updates, which go on beside the
next forward. So each place has a count for each rank of the updates that it has written, and a unit's upload
waits until all counts are as many as updates have begun, on each rank the same. Reads are copies on streams,
which the rank waits for on the host. Each rank page-locks a place with its first upload.
"""

import fcntl
import mmap
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch

from infinity.comm.collectives import Collectives
from infinity.comm.peers import Peers
from infinity.core.errors import BudgetError, copied
from infinity.core.nbytes import HUGE_NBYTES, Transfer, aligned, rounded
from infinity.device.machine import total_host_nbytes
from infinity.device.memory import HostBuffer

#: Addresses for so many times the machine's memory, since those of what has gone are not used again.
_ADDRESSES = 4
_WORD_NBYTES = 16
#: Time between two looks for what other ranks have written (s).
_PAUSE_S = 5e-4


def _new_file(word: bytes) -> int:
    file = os.memfd_create("infinity")
    try:
        os.ftruncate(file, _ADDRESSES * rounded(total_host_nbytes()))
        os.pwrite(file, word, 0)
    except BaseException:
        os.close(file)
        raise
    return file


class NodeMemory:
    """Memory of a node's ranks, each of which takes the same places in the same order; no file: to plan."""

    def __init__(
        self, rank: int, world_size: int, file: int = -1, device: torch.device | None = None,
        peers: Peers | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.world_size, self.device = rank, world_size, device or torch.device("cpu")
        self.peers = peers
        self.wait_for_reads: Callable[[], object] = lambda: None  # until this rank's copies from it ended
        self._file, self._end = file, HUGE_NBYTES  # after the word, and counts for each place
        self._counts = _WORD_NBYTES
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
    def open(cls, collectives: Collectives, device: torch.device) -> "NodeMemory | None":
        """Return memory that every rank has open, for ``device``; None: one has not. Every rank must call."""
        rank, file, word, made = collectives.rank, -1, secrets.token_bytes(_WORD_NBYTES), None
        with suppress(OSError, AttributeError):  # a system without such files
            if rank == 0:
                file = _new_file(word)
        process, number, word = collectives.share_all((os.getpid(), file, word), "shared memory")[0]
        with suppress(OSError):  # other containers, whose processes cannot be seen, or too few addresses
            if rank > 0 and number >= 0:
                file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            if file >= 0 and os.pread(file, _WORD_NBYTES, 0) == word:
                made = cls(rank, collectives.world_size, file, device, collectives.peers)
        if bool(collectives.exchange("least", [made is not None], "shared memory").all()):
            return made
        if file >= 0:
            os.close(file)
        return None

    @staticmethod
    def works() -> bool:
        """Return whether processes here have such files; those of other containers may not open them."""
        with suppress(OSError, AttributeError), open(_new_file(b""), "rb") as file:
            return os.access(f"/proc/{os.getpid()}/fd/{file.fileno()}", os.W_OK)
        return False

    def slice(self, nbytes: int) -> "SharedSlice":
        """Return this rank's slice, of ``nbytes``, of the next place; zeros."""
        begin, self._end = self._end, self._end + rounded(self.world_size * nbytes)
        counts, self._counts = self._counts, self._counts + 8 * self.world_size
        if self._end > len(self.map) or self._counts > HUGE_NBYTES:
            raise BudgetError(
                "weights moved to host memory too often; set memory.shared=never", "memory.host"
            )
        return SharedSlice(self, begin, nbytes, counts)

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

    def __init__(self, memory: NodeMemory, begin: int, nbytes: int, counts: int) -> None:
        self.nbytes, self.device, self.events = rounded(nbytes), memory.device, []
        self._unlock, self._owner, own = None, memory, begin + memory.rank * nbytes
        self.begun = 0  # updates of the place, of which each rank has written so many:
        self.written = np.frombuffer(memory.map, np.int64, memory.world_size, counts)
        pages = aligned(own, mmap.PAGESIZE), (own + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        self._part = mmap.MADV_REMOVE, pages[0], pages[1] - pages[0]  # others have bytes of other pages
        self.memory = memoryview(memory.map)[own : own + nbytes]
        count = memory.world_size * nbytes
        self.whole = torch.frombuffer(memory.map, dtype=torch.uint8, count=count, offset=begin)
        self.tensor = self.whole[own - begin : own - begin + nbytes]

    def follow(self, update: Transfer) -> None:
        """Count an update of the place, which all ranks begin, and tell them when this one has ended it."""
        self.begun += 1
        update.then(self._end_update)

    def _end_update(self) -> None:
        self.written[self._owner.rank] += 1

    def wait_for_writes(self, updates: int, who: str) -> None:
        """Block until all ranks have written so many updates; PeerError: another rank will not."""
        overdue: Callable[[], BaseException | None] | None = None
        while int(self.written.min()) < updates:
            assert self._owner.peers is not None
            overdue = overdue or self._owner.peers.watch(f"the update of {who}")
            if (error := overdue()) is not None:
                raise copied(error)
            time.sleep(_PAUSE_S)

    def lock_whole(self) -> None:
        """Page-lock the place for the accelerator, unless it is; BudgetError: the driver refuses."""
        if self._unlock is None:
            self.lock(self.whole)

    def close(self) -> None:
        """Give the slice's pages back, unless other ranks may go on with them."""
        self.unlock()
        if not self._owner.closed:
            with suppress(OSError, ValueError):  # pages larger than slices
                self._owner.map.madvise(*self._part)
