"""Engines move bytes between extents and memory; ``make_engine`` picks one."""

import errno
import os
from collections.abc import Callable

from infinity.core.config import SettingError
from infinity.core.nbytes import TransferEngine
from infinity.nvme.engines.libaio_engine import LibaioEngine
from infinity.nvme.engines.threads_engine import ThreadsEngine
from infinity.nvme.volume import Volume

#: What to install for a module, where it is not its name.
_PACKAGES = {"kvikio": "'infinity-offload[gds]'"}


def make_engine(
    name: str, volume: Volume, note: Callable[[str], object] = lambda line: None
) -> TransferEngine:
    """Return the engine called ``name``; ``auto`` is the fastest that works here.

    ``note`` gets a line for people if that is not the one that is fastest elsewhere. Raises a SettingError if
    the engine that was asked for cannot be used here.
    """
    if name not in ("auto", "libaio", "threads", "gds"):
        raise ValueError(f"memory.engine: got {name!r}; wanted auto | libaio | threads | gds")
    if name == "auto":
        return _fastest(volume, note)
    try:
        if name == "gds":
            from infinity.nvme.engines.gds_engine import GdsEngine

            return GdsEngine(volume, lambda: _fastest(volume, note))
        return LibaioEngine(volume) if name == "libaio" else ThreadsEngine(volume)
    except (ImportError, OSError, AttributeError) as error:
        wanted = f"auto, or threads: {name} cannot be used here ({_why(error)})"
        raise SettingError("memory.engine", name, wanted) from error


def _fastest(volume: Volume, note: Callable[[str], object]) -> TransferEngine:
    if volume.buffered:
        return ThreadsEngine(volume)  # through the page cache, libaio blocks the thread that submits
    try:
        return LibaioEngine(volume)
    except (ImportError, OSError, AttributeError) as error:
        note(
            f"no libaio ({_why(error)}): the engine threads moves the bytes, about as fast, for more CPU time"
        )
        return ThreadsEngine(volume)


def _why(error: Exception) -> str:
    """Return a line for people: what is missing, and how to get it."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error}: pip install {_PACKAGES.get(error.name or '', error.name)}"
    if not isinstance(error, OSError):
        return str(error)
    if error.errno is None:  # of the loader of libraries
        return f"{error}; the system's package is called libaio1, libaio1t64 or libaio"
    if error.errno == errno.EAGAIN:
        return "all requests that the kernel allows are taken: raise fs.aio-max-nr"
    return f"the kernel refuses: {os.strerror(error.errno)}"
