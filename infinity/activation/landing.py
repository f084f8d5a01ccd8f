"""Where loads land in host memory: on huge pages, which the next load uses again.

[Note: why not the allocator's memory]
A direct read pins every page that it fills. Ordinary pages are pinned one by one, for a third of the speed
and several times the processor's time of huge ones; and fresh pages are filled with zeros first. So one
that backward is done with waits for the next load of its size. The last tensor on it tells when that is.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

#: Less than a huge page lands in the allocator's memory (bytes).
LEAST_NBYTES = 2 * 2**20


class Memory(Protocol):
    """Memory on huge pages; :class:`infinity.nvme.buffers.HostBuffer` is one."""

    nbytes: int

    @property
    def memory(self) -> memoryview: ...

    def close(self) -> None:
        """Give the memory back; nobody may use it any more."""
        ...


class Landings:
    """Lends storages for loads. Any thread may call.

    Args:
        make: New memory of at least so many bytes; the same number for the same number.
        idle_nbytes: What may wait for the next load.
    """

    def __init__(self, make: Callable[[int], Memory], idle_nbytes: int = 64 * 2**20) -> None:
        self._make, self._most_nbytes = make, idle_nbytes
        self._returned: deque[Memory] = deque()  # by whoever dropped the last tensor, maybe inside a lock
        self._lock = threading.Lock()  # guards what follows
        self._idle: deque[Memory] = deque()  # the newest last

    def take(self, nbytes: int) -> torch.UntypedStorage:
        """At least ``nbytes``, whatever is in them; they come back when no tensor is on them any more."""
        if nbytes < LEAST_NBYTES:
            return torch.empty(nbytes, dtype=torch.uint8).untyped_storage()
        with self._lock:
            self._tidy(self._most_nbytes)
            memory = next((idle for idle in reversed(self._idle) if self._suits(idle, nbytes)), None)
            if memory is not None:
                self._idle.remove(memory)
        memory = memory or self._make(nbytes)
        storage = torch.frombuffer(memory.memory, dtype=torch.uint8).untyped_storage()
        weakref.finalize(storage, self._returned.append, memory).atexit = False
        return storage

    def clear(self) -> None:
        """Give back what waits for the next load."""
        with self._lock:
            self._tidy(0)

    def _suits(self, memory: Memory, nbytes: int) -> bool:
        return nbytes <= memory.nbytes < nbytes + nbytes // 16

    def _tidy(self, most_nbytes: int) -> None:
        while self._returned:
            self._idle.append(self._returned.popleft())
        while self._idle and sum(memory.nbytes for memory in self._idle) > most_nbytes:
            self._idle.popleft().close()
