"""The C library's allocator, from which torch takes host memory. Imports no torch.

[Note: remainders]
torch wants every block at a multiple of 64 bytes, so glibc takes a larger one and cuts off what lies before
and after it. Before version 2.39 these remainders, 96 bytes together, go to a cache of small chunks
(``tcache``), in which nothing is merged: small objects take them, and a block that is freed leaves a hole
that is too small for the next block of its size. The heap grows while most of it is free
(https://sourceware.org/bugzilla/show_bug.cgi?id=30723). Without that cache a remainder is merged with what is
free beside it. The cache can be turned off only before a process starts.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_MERGES = (2, 39)
_VARIABLE = "GLIBC_TUNABLES"
_TUNABLES = {"glibc.malloc.tcache_count": 0, "glibc.malloc.mxfast": 0}
#: Of drivers: beside an accelerator activations are not in host memory.
_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd")


def tunables(environment: Mapping[str, str]) -> str | None:
    """``GLIBC_TUNABLES`` with which a process reuses what torch frees, see [Note: remainders].

    None: it does anyway, or the variable says already what shall be cached.
    """
    version = _glibc_version()
    given = environment.get(_VARIABLE, "")
    if version is None or version >= _MERGES or any(name in given for name in _TUNABLES):
        return None
    return ":".join([*filter(None, [given]), *(f"{name}={value}" for name, value in _TUNABLES.items())])


def heap_line() -> str:
    """A line for users whose process will not reuse what torch frees; empty if it will."""
    wanted = tunables(os.environ)
    if wanted is None:
        return ""
    version = ".".join(map(str, _glibc_version() or ()))
    return (
        f"glibc {version} reuses little of the memory that torch frees, so the process takes more than its "
        f"budget for activations: start Python with {_VARIABLE}={wanted}, or use glibc 2.39 or later"
    )


def restart_with_tunables(program: str, arguments: Sequence[str]) -> None:
    """Replace this process, which has only begun, by the same one that reuses what torch frees.

    Returns if nothing would change; if there is an accelerator; or if the interpreter was not started as
    ``program`` with ``arguments``, so that it is unknown how to start it again.

    Args:
        program: ``sys.argv[0]``.
        arguments: ``sys.argv[1:]``.
    """
    wanted, started = tunables(os.environ), sys.orig_argv
    is_ours = Path(program).name in ("infinity", "__main__.py") and started[-len(arguments) :] == [*arguments]
    if wanted is None or not (is_ours and sys.executable) or any(map(os.path.exists, _ACCELERATORS)):
        return
    os.execve(sys.executable, [sys.executable, *started[1:]], {**os.environ, _VARIABLE: wanted})


def _glibc_version() -> tuple[int, ...] | None:
    """Of this process; None: it has another C library."""
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return None
    found = re.fullmatch(r"glibc (\d+)\.(\d+).*", text)
    return (int(found[1]), int(found[2])) if found else None
