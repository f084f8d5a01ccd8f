"""The ways that stored activations go on this machine: which there are, and how fast they are."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from infinity.activations.shelf import DirectShelf, Shelf, Space, StagedShelf
from infinity.core.plan import Hardware, Place
from infinity.core.transfer import Pool, TransferEngine
from infinity.nvme.probe import measure

_MIB = 2**20


def open_shelves(
    device: torch.device, pool: Pool, piece_nbytes: int, space: Space | None, engine: TransferEngine | None
) -> dict[Place, Shelf]:
    """Where activations may wait.

    Without an accelerator host memory is where they are already: only NVMe is farther away.

    Args:
        device: Where they are.
        pool: Host memory, pinned beside an accelerator.
        piece_nbytes: What of it is staged at one time.
        space: Hands out extents; None: there is no NVMe.
        engine: Reaches them.
    """
    shelves: dict[Place, Shelf] = {}
    if device.type != "cpu":
        shelves[Place.HOST] = StagedShelf(device, pool, piece_nbytes=piece_nbytes)
    if space is not None and engine is not None:
        direct = device.type == "cpu"
        shelves[Place.NVME] = (
            DirectShelf(space, engine)
            if direct
            else StagedShelf(device, pool, space, engine, piece_nbytes=piece_nbytes)
        )
    return shelves


def measure_hardware(device: torch.device, directories: Sequence[str | Path], host_nbytes: int) -> Hardware:
    """What the channels of this rank carry; takes some tenths of a second.

    Args:
        device: Where activations are.
        directories: On NVMe, one for each drive; none: nothing can be stored there.
        host_nbytes: Host memory that activations may take.

    Raises:
        DiskError: A file system is full, or a drive reports an error.
    """
    on_cpu = device.type == "cpu"
    # Without an accelerator activations move from and to where the allocator puts them.
    speeds = [measure(Path(directory), in_allocated=on_cpu) for directory in directories]
    return Hardware(
        read_bytes_per_s=sum(speed.read_bytes_per_s for speed in speeds),
        write_bytes_per_s=sum(speed.write_bytes_per_s for speed in speeds),
        mixed_bytes_per_s=sum(speed.mixed_bytes_per_s for speed in speeds),
        host_bytes_per_s=0.0 if on_cpu else _host_bytes_per_s(device),
        host_nbytes=0 if on_cpu else host_nbytes,
        # Not shared among threads: those of a parallel region wait for the one whose core I/O takes.
        compute_s_per_byte=max((s.processor_s_per_byte for s in speeds), default=0.0) * on_cpu,
    )


def _host_bytes_per_s(device: torch.device) -> float:
    """The slower of the two directions between an accelerator and pinned memory."""
    there = torch.empty(64 * _MIB, dtype=torch.uint8, device=device)
    here = torch.empty(64 * _MIB, dtype=torch.uint8, pin_memory=True)
    slowest = float("inf")
    for target, source in ((here, there), (there, here)):
        target.copy_(source)
        torch.cuda.synchronize(device)
        began_s = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(device)
        slowest = min(slowest, here.numel() / (time.perf_counter() - began_s))
    return slowest
