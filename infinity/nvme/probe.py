"""Measures how fast a directory's drive is, to share bytes among several in proportion."""

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.core.nbytes import BLOCK_NBYTES, rounded
from infinity.device.memory import HostBuffer
from infinity.nvme.engines import make_engine
from infinity.nvme.volume import Volume

#: Bytes per parameter and step that are read and written with everything on NVMe.
_READ, _WRITTEN = 14, 12
#: Reads and writes are given in turn, in pieces as large as a chunk of an update.
_PIECE_NBYTES = 8 * 2**20

_measured: dict[int, "Speed"] = {}  # by the device number of the file system
_lock = threading.Lock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Speed:
    """Records the speed of one drive, and the time of a core that each byte costs."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    processor_s_per_byte: float = 0.0
    both_bytes_per_s: float | None = None  # reads and writes at one time, together; None: not measured
    engine: str = ""  # that moved the bytes
    direct: bool = True  # past the page cache, by O_DIRECT
    notes: tuple[str, ...] = ()  # lines for people about what the drive lacks, such as O_DIRECT

    @property
    def mixed_bytes_per_s(self) -> float:
        """Bytes of a training step per second, reads and writes in turn."""
        return (_READ + _WRITTEN) / (_READ / self.read_bytes_per_s + _WRITTEN / self.write_bytes_per_s)


def measure(
    directory: Path, nbytes: int = 64 * 2**20, *, allocated_on: torch.device | None = None,
    both: bool = False, engine: str = "auto",
) -> Speed:  # fmt: skip
    """Write a file of ``nbytes``, write it again, read it, and remove it. Raises a DiskError.

    ``allocated_on``: move memory of torch's allocator, as activations are: on the CPU its pages are pinned
    one by one, at half of the speed of a pool's buffer; an accelerator's bytes move by GPUDirect Storage.
    ``both``: read and write at one time, too, but not by GPUDirect Storage.
    """
    path = Path(directory) / f".probe-{os.getpid()}-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as stack:
        volume = stack.enter_context(contextlib.closing(Volume([path])))
        stack.callback(path.unlink, missing_ok=True)
        name = engine if allocated_on is None or allocated_on.type == "cpu" else "gds"
        notes = list[str]()
        moves: Any = stack.enter_context(contextlib.closing(make_engine(name, volume, notes.append)))
        notes += volume.notes
        about: dict[str, Any] = {"engine": moves.name, "direct": not volume.notes, "notes": tuple(notes)}
        extent = volume.allocate(nbytes, what="the probe of the drive's speed")
        memory = _memory(nbytes, allocated_on)
        moves.write(extent, memory).wait()  # finds the blocks their place: not timed
        processor_s = -time.process_time()
        began = time.perf_counter()
        moves.write(extent, memory).wait()
        written = time.perf_counter()
        moves.read(extent, memory).wait()
        ended = time.perf_counter()
        processor_s += time.process_time()
        rates = nbytes / (ended - written), nbytes / (written - began)
        if not both or name == "gds":
            return Speed(*rates, processor_s / (2 * nbytes), **about)
        moving, half = [], nbytes // 2 // BLOCK_NBYTES * BLOCK_NBYTES
        began = time.perf_counter()
        for begin in range(0, half, _PIECE_NBYTES):  # one half is read while the other is written
            for start, move in ((begin, moves.read), (half + begin, moves.write)):
                part = min(_PIECE_NBYTES, half - begin)
                moving.append(move(extent.part(start, part), memory[start : start + part]))
        for each in moving:
            each.wait()
        both_bytes_per_s = 2 * half / (time.perf_counter() - began)
    return Speed(*rates, processor_s / (2 * nbytes), both_bytes_per_s, **about)


def _memory(nbytes: int, allocated_on: torch.device | None) -> Any:
    """Return memory of a pool or of torch's allocator, written to: untouched memory is one page of zeros."""
    if allocated_on is None:
        buffer = HostBuffer(rounded(nbytes))
        buffer.tensor.fill_(1)
        return buffer.memory[:nbytes]
    if allocated_on.type != "cpu":
        return torch.ones(nbytes, dtype=torch.uint8, device=allocated_on)
    tensor = torch.ones(nbytes + BLOCK_NBYTES, dtype=torch.uint8, device="cpu")
    start = -tensor.data_ptr() % BLOCK_NBYTES
    return tensor.numpy().data[start : start + nbytes]  # keeps the tensor


def stripe_weights(directories: Sequence[Path]) -> list[float]:
    """Return each directory's share of the bytes; drives are measured once (:func:`measure`) per process."""
    if len(directories) == 1:
        return [1.0]
    with _lock:
        speeds = [_speed(Path(directory)).mixed_bytes_per_s for directory in directories]
    return [speed / sum(speeds) for speed in speeds]


def _speed(directory: Path) -> Speed:
    device = directory.stat().st_dev
    if device not in _measured:
        _measured[device] = measure(directory)
    return _measured[device]
