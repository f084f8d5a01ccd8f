"""Reads safetensors files: a validated header, and ranges of bytes into the caller's memory.

The format: 8 bytes with the header's length (little endian), the header (a JSON object that gives each
tensor a dtype, a shape and two offsets), then the tensors' bytes without gaps. Files come from
strangers, so nothing in a header is believed before it was checked, and only regular files are opened
(symbolic links are followed: Hugging Face's cache is made of them).
"""

import contextlib
import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from infinity.core.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

#: The longest header that the format allows (bytes).
MOST_HEADER_NBYTES = 100_000_000
_MOST_DIMS = 64  # as many as torch allows
#: How far the kernel is asked to read ahead (bytes).
_AHEAD_NBYTES = 16 * 2**20
#: Elements that are converted at one time.
_PIECE_NUMEL = 2**18


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor's place: ``nbytes`` from ``offset`` on, counted from the file's first byte."""

    dtype: torch.dtype
    shape: torch.Size
    offset: int
    nbytes: int


class TensorFile:
    """One safetensors file, open for reading.

    Args:
        path: The file; a symbolic link is followed.

    Raises:
        CheckpointError: It cannot be read, or its header is not what the format demands.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes_read = 0
        self._fd = open_regular(path)
        try:
            self.entries: Mapping[str, Entry] = self._read_header()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def fill(self, entry: Entry, start: int, out: Tensor) -> None:
        """Read elements from ``start`` on into ``out``, ``(n,)``, contiguous, cast to its dtype; blocking.

        Raises:
            CheckpointError: The file ends early, or the disk fails.
        """
        offset = entry.offset + start * entry.dtype.itemsize
        end = offset + len(out) * entry.dtype.itemsize
        if entry.dtype == out.dtype:
            self._read(offset, _memory(out))
        else:
            raw = torch.empty(min(len(out), _PIECE_NUMEL), dtype=entry.dtype)
            for part in torch.split(out, _PIECE_NUMEL):
                piece = raw[: len(part)]
                self._read(offset, _memory(piece))
                part.copy_(piece)
                offset += piece.nbytes
        self._read_ahead(end)

    def _read(self, offset: int, memory: memoryview) -> None:
        """Fill ``memory``; whatever the system gives at one time, every byte comes or an error."""
        done = 0
        while done < memory.nbytes:
            try:
                count = os.preadv(self._fd, [memory[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path}: reading {memory.nbytes} bytes at offset {offset} failed after "
                    f"{done} bytes: {error.strerror}. Check the drive, or copy the checkpoint to another one"
                ) from error
            if count == 0:
                raise CheckpointError(
                    f"{self.path}: wanted {memory.nbytes} bytes at offset {offset}, got {done}: the file "
                    "ends there. Download or copy it again"
                )
            done += count
        self.nbytes_read += done

    def _read_ahead(self, offset: int) -> None:
        with contextlib.suppress(OSError):  # a hint; not every file system takes it
            os.posix_fadvise(self._fd, offset, _AHEAD_NBYTES, os.POSIX_FADV_WILLNEED)

    # --- header ------------------------------------------------------------------------------

    def _read_header(self) -> dict[str, Entry]:
        size = os.fstat(self._fd).st_size
        if size < 8:
            self._refuse(f"it has {size} bytes, and a header alone takes more")
        length = bytearray(8)
        self._read(0, memoryview(length))
        header_nbytes = int.from_bytes(length, "little")
        if header_nbytes > min(MOST_HEADER_NBYTES, size - 8):
            self._refuse(f"its header claims {header_nbytes} bytes, the file has {size}")
        raw = bytearray(header_nbytes)
        self._read(8, memoryview(raw))
        self.nbytes_read = 0  # counts tensors
        header = parse_json_object(bytes(raw), f"the header of {self.path}")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            self._refuse("__metadata__ is not an object of strings")
        data = 8 + header_nbytes
        entries = {name: self._entry(name, given, data) for name, given in header.items()}
        self._check_places(entries, data, size)
        return entries

    def _entry(self, name: str, given: Any, data: int) -> Entry:
        """One tensor's place.

        Args:
            name: Its key.
            given: What the header says of it.
            data: The file's byte at which tensors begin.
        """
        if not isinstance(given, dict) or set(given) != {"dtype", "shape", "data_offsets"}:
            self._refuse(f"{name!r}: wanted dtype, shape and data_offsets, got {_short(given)}")
        shape, offsets = given["shape"], given["data_offsets"]
        if not isinstance(given["dtype"], str) or given["dtype"] not in DTYPES:
            self._refuse(f"{name!r}: dtype {_short(given['dtype'])}; known are {', '.join(DTYPES)}")
        if not _naturals(shape):
            self._refuse(f"{name!r}: shape {_short(shape)} is not a list of sizes")
        if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            self._refuse(f"{name!r}: data_offsets {_short(offsets)} are not a begin and an end")
        dtype, (begin, end) = DTYPES[given["dtype"]], offsets
        nbytes = math.prod(shape) * dtype.itemsize
        if end - begin != nbytes:
            self._refuse(
                f"{name!r}: {given['dtype']} of shape {shape} takes {nbytes} bytes, its offsets span "
                f"{end - begin}"
            )
        return Entry(dtype, torch.Size(shape), data + begin, nbytes)

    def _check_places(self, entries: Mapping[str, Entry], data: int, size: int) -> None:
        """Tensors lie one after the other, without overlap or gap, to the file's end."""
        end = data
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
            if entry.offset != end:
                how = "overlaps the tensor before it" if entry.offset < end else "leaves a gap before it"
                self._refuse(f"{name!r} begins at byte {entry.offset}, wanted {end}: it {how}")
            end += entry.nbytes
        if end != size:
            how = "it is cut off; download or copy it again" if size < end else "nothing may follow them"
            self._refuse(f"its tensors end at byte {end}, the file at {size}: {how}")

    def _refuse(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.path} is not a valid safetensors file: {what}")


def open_regular(path: Path) -> int:
    """A file descriptor for reading ``path``, which must be a file: a pipe would be waited for.

    Raises:
        CheckpointError: It is not there, not a file, or not to be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"{path}: {reason}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError(f"{path} is not a regular file")
    return fd


def read_json_object(path: Path, *, most_nbytes: int = MOST_HEADER_NBYTES) -> dict[str, Any]:
    """The JSON object in the file ``path``.

    Raises:
        CheckpointError: It cannot be read, is longer than ``most_nbytes``, or is something else.
    """
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_nbytes:
            raise CheckpointError(f"{path} has {size} bytes; at most {most_nbytes} are read")
        return parse_json_object(file.read(most_nbytes), str(path))


def parse_json_object(raw: bytes, where: str) -> dict[str, Any]:
    """``raw`` as a JSON object whose keys are all different.

    Raises:
        CheckpointError: It is not one.
    """
    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not a JSON object: {str(error)[:200]}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where} is not a JSON object: {_short(parsed)}")
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{_short(name)} stands there twice")
        found[name] = value
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _naturals(value: Any) -> bool:
    """Whether ``value`` is a list of sizes; so short and so small that their product is soon known."""
    return (
        isinstance(value, list)
        and len(value) <= _MOST_DIMS
        and all(type(each) is int and 0 <= each < 2**63 for each in value)
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory."""
    flat: Any = tensor.view(torch.uint8).numpy()
    return memoryview(flat)
