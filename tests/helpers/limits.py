"""Limits of the process, which need no root: of the size of files (a full disk) and of descriptors."""

import contextlib
import resource
from collections.abc import Iterator


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
