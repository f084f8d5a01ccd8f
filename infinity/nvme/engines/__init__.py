"""Engines move bytes between extents and memory; ``make_engine`` picks one."""

import warnings

from infinity.core.transfer import TransferEngine
from infinity.nvme.engines.libaio_engine import LibaioEngine
from infinity.nvme.engines.threads_engine import ThreadsEngine
from infinity.nvme.volume import Volume


class EngineWarning(UserWarning):
    """The fastest engine cannot be used here; the line says why and what to do."""


def make_engine(name: str, volume: Volume) -> TransferEngine:
    """The engine called ``name``; ``auto`` is the fastest that works here.

    Raises:
        ImportError: The engine that was asked for lacks its package.
        OSError: It lacks its library, or the kernel refuses it.
        ValueError: There is no such engine.
    """
    if name == "auto":
        return _fastest(volume)
    if name == "libaio":
        return LibaioEngine(volume)
    if name == "threads":
        return ThreadsEngine(volume)
    if name == "gds":
        from infinity.nvme.engines.gds_engine import GdsEngine

        return GdsEngine(volume)
    raise ValueError(f"memory.engine: got {name!r}; wanted auto | libaio | threads | gds")


def _fastest(volume: Volume) -> TransferEngine:
    if volume.buffered:
        return ThreadsEngine(volume)  # through the page cache, libaio blocks the thread that submits
    try:
        return LibaioEngine(volume)
    except (ImportError, OSError) as error:
        warnings.warn(
            f"the libaio engine cannot be used here ({error}), so the threads engine moves the bytes: "
            "about as fast, for more CPU time; for libaio: pip install libaio, and the system's package "
            "(libaio1 or libaio1t64 on Debian and Ubuntu, libaio on Fedora)",
            EngineWarning,
            stacklevel=3,
        )
        return ThreadsEngine(volume)
