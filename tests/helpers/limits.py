"""Limits: of what a test waits for, and of the process (files, descriptors), which need no root."""

import contextlib
import resource
from collections.abc import Iterator

#: What only a hang takes, however busy the machine (s): whatever a test waits for has come long before.
#: Below pytest's own limit (pyproject.toml), so that the message is that of the test.
HANG_S = 300.0


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
