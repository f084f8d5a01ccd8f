"""Limits: of what a test waits for, and of the process (files, descriptors), which need no root."""

import contextlib
import ctypes
import gc
import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

#: What only a hang takes, however busy the machine (s): whatever a test waits for has come long before.
#: Below pytest's own limit (pyproject.toml), so that the message is that of the test.
HANG_S = 300.0


def comes_true(what: Callable[[], bool], patience_s: float = HANG_S) -> bool:
    """Whether ``what`` becomes true, however busy the machine: what others have still to do."""
    end, pause_s = time.monotonic() + patience_s, 0.001
    while not (true := what()) and time.monotonic() < end:
        time.sleep(pause_s)
        pause_s = min(0.01, 1.2 * pause_s)
    return true


def hang() -> None:
    """Do nothing until the process is killed, or a signal raises."""
    threading.Event().wait(HANG_S)


def collected(*dropped: "weakref.ref[Any]", patience_s: float = HANG_S / 10) -> bool:
    """Whether what nothing refers to any more is collected.

    One ``gc.collect()`` is too few: it does nothing while another thread collects, and leaves what a thread
    refers to for the moment of a call.
    """
    end = time.monotonic() + patience_s
    gc.collect()
    while alive := any(ref() is not None for ref in dropped):
        if time.monotonic() > end:
            break
        gc.collect()
    return not alive


@contextlib.contextmanager
def limit(which: int, most: int) -> Iterator[None]:
    """Set the soft limit ``which``, as ``resource.RLIMIT_NOFILE``, to ``most``."""
    before = resource.getrlimit(which)
    resource.setrlimit(which, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


def file_limit(nbytes: int) -> contextlib.AbstractContextManager[None]:
    """No file may be larger: the full disk that needs no root."""
    return limit(resource.RLIMIT_FSIZE, nbytes)


@contextlib.contextmanager
def bound_by_modes() -> Iterator[None]:
    """Let the modes of files bind root, too: this thread and those that it starts lose two capabilities."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3; this thread
    before, less = (ctypes.c_uint32 * 6)(), (ctypes.c_uint32 * 6)()  # the first is the effective set

    def call(name: str, data: ctypes.Array[ctypes.c_uint32]) -> None:
        if getattr(libc, name)(header, data) != 0:
            raise OSError(ctypes.get_errno(), name)

    call("capget", before)
    less[:] = before[:]
    less[0] &= ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    call("capset", less)
    try:
        yield
    finally:
        call("capset", before)
