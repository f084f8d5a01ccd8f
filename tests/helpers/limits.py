"""What a full disk does, without root."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def file_limit(nbytes: int) -> Iterator[None]:
    """No file may be larger: the full disk that needs no root."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
