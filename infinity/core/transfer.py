"""Bytes in flight, and the memory they fly into: submit, then wait; only ``wait`` may fail."""

from collections.abc import Callable
from typing import Any, Protocol

from infinity.core.extent import Extent


class Transfer(Protocol):
    """A move in flight."""

    def wait(self) -> None:
        """Return when every byte has moved. May be called again, from any thread.

        Raises:
            DiskError: A request failed, or moved fewer bytes than it was asked to.
        """
        ...

    def done(self) -> bool:
        """Whether ``wait`` would return (or raise) at once."""
        ...

    def then(self, call: Callable[[], None]) -> None:
        """Run ``call`` once, when the move has ended, well or not; at once if it has.

        ``call`` runs on the thread that saw the end. It must be short, must not wait, and
        learns how the move ended by calling ``wait`` (which then returns at once).
        """
        ...


class TransferEngine(Protocol):
    """Moves bytes between extents and memory. Any thread may call."""

    @property
    def name(self) -> str: ...

    def read(self, extent: Extent, memory: memoryview, *, urgent: bool = False) -> Transfer:
        """Start reading ``extent`` into ``memory``.

        Args:
            extent: Aligned to ``BLOCK_NBYTES``.
            memory: Writable, page-aligned, exactly ``extent.nbytes`` bytes; stays alive and
                untouched until ``wait`` returns.
            urgent: Goes before requests that are queued but not yet with the kernel.
        """
        ...

    def write(self, extent: Extent, memory: memoryview) -> Transfer:
        """Start writing ``memory`` to ``extent``; the same rules as :meth:`read`."""
        ...

    @property
    def nbytes_read(self) -> int:
        """Bytes of all reads that ended well, since the engine was made."""
        ...

    @property
    def nbytes_written(self) -> int: ...

    def close(self) -> None:
        """Wait for what is in flight, then give back threads and kernel contexts."""
        ...


class Lease(Protocol):
    """Holding one buffer of a pool. A context manager; ``release`` may be called twice."""

    @property
    def nbytes(self) -> int: ...

    @property
    def tensor(self) -> Any:
        """The buffer as a ``torch.uint8`` tensor, ``(nbytes,)``, sharing one storage."""
        ...

    @property
    def memory(self) -> memoryview:
        """The buffer for an engine, page-aligned; only of pools in host memory."""
        ...

    def release(self) -> None: ...

    def __enter__(self) -> "Lease": ...

    def __exit__(self, *exc: object) -> None: ...


class Pool(Protocol):
    """A bounded set of buffers, counted to the byte."""

    @property
    def capacity_nbytes(self) -> int: ...

    @property
    def leased_nbytes(self) -> int: ...

    @property
    def peak_nbytes(self) -> int:
        """The most that was leased at one time (bytes)."""
        ...

    def lease(self, nbytes: int, *, who: str) -> Lease:
        """Hold a buffer of ``nbytes``; block until it fits.

        Raises:
            BudgetError: ``nbytes`` can never fit, or nothing was given back for the pool's
                patience (s); names who holds what, and what to turn.
        """
        ...

    def try_lease(self, nbytes: int, *, who: str) -> Lease | None:
        """The same without blocking: None when it does not fit now."""
        ...

    def fail(self, error: BaseException) -> None:
        """Whoever waits for a buffer, or would have to, raises ``error``."""
        ...

    def close(self) -> None: ...
