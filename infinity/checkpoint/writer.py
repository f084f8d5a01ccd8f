"""Writes directories that appear when they are whole, and safetensors files in them, piece by piece.

[Note: where it is made]
Everything is written into a hidden sibling, ``.NAME.xxxxxxxx.part``, synced to the drive, and renamed. The
process that makes it holds a lock on it, so the next save to the same place removes what a killed one left.

[Note: the layout of a file]
Eight bytes of length, a JSON header, then the tensors' bytes without a hole. Wider types come first and the
header ends on a multiple of eight, so that every tensor begins on a multiple of its item size, as readers
that map the file need it. Otherwise tensors keep the given order.

[Note: past the page cache]
Values are copied into aligned blocks, which threads write with O_DIRECT while the next values are read: twice
as fast as through the page cache, which only the ends of a run go through that do not fill 4,096 bytes.
"""

import errno as errno_names
import glob
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from infinity.checkpoint.directory import DTYPES, INDEX, SAFETENSORS
from infinity.comm.ranks import ALONE, Ranks, agree, all_ranks_or_raise
from infinity.core.errors import CheckpointError, DiskError, free_space
from infinity.core.files import open_locked, sync
from infinity.core.nbytes import BLOCK_NBYTES, aligned
from infinity.device.memory import HostBuffer

#: Bytes of a block, and how many blocks are filled or written at a time.
_WRITE_NBYTES, _DEPTH = 4 * 2**20, 4

_Bytes: TypeAlias = np.ndarray[Any, Any]

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY


class WriteError(DiskError):
    """Raised when a file of a checkpoint could not be written whole."""

    def __init__(self, errno: int, action: str, path: Path | str, offset: int = 0, nbytes: int = 0) -> None:
        name = errno_names.errorcode.get(errno, str(errno))
        where = f" ({nbytes} bytes at offset {offset})" if nbytes else ""
        text = (
            f"{action}{where} failed: {os.strerror(errno)} ({name}); {free_space(str(path))}. Nothing of "
            "it stays, and the model is unharmed; make room, or choose a directory that this user may "
            "write on a larger file system"
        )
        self._say(errno, text, path, offset, nbytes)


def check_room(folder: Path, nbytes: int, action: str | None = None) -> None:
    """Raise a WriteError if the file system has no room for ``nbytes`` that will be written."""
    action = action or f"making room for {folder}"
    with writing(action, folder):
        space = shutil.disk_usage(folder)
    if space.total and space.free < nbytes:  # a file system without a size says 0
        raise WriteError(errno_names.ENOSPC, action, folder, nbytes=nbytes)


@contextmanager
def writing(action: str, path: Path, nbytes: int = 0) -> Iterator[None]:
    """Raise errors of the file system inside, also those of safetensors, as a :class:`WriteError`."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        where = error.filename2 or error.filename or path
        raise WriteError(error.errno or errno_names.EIO, action, str(where), nbytes=nbytes) from error
    except SafetensorError as error:
        if (found := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise WriteError(int(found[1]), action, path, nbytes=nbytes) from error


class Publication(AbstractContextManager["Publication"]):
    """Makes the directory ``path`` for what will be ``out``, and removes it unless it is published.

    Rank 0 makes it, at its own ``out``; every rank of ``ranks`` must construct one, and sees the directory.
    Raises a CheckpointError if ``out`` is taken or another rank does not see it, else a WriteError.
    """

    def __init__(self, out: Path, ranks: Ranks = ALONE, verb: str = "export") -> None:
        place, what = (out.absolute(), secrets.token_hex(4)), f"agreeing on the directory to {verb} to"
        self.out, self.token = agree(place, ranks.world_size, what)
        self.path = _partial_path(self.out, self.token)
        self._leads, self._lock = ranks.rank == 0, -1
        try:
            with all_ranks_or_raise(ranks, f"making {self.out}"):
                if self._leads:
                    check_free(self.out)
                    with writing(f"making a directory beside {self.out}", self.path):
                        self.out.parent.mkdir(parents=True, exist_ok=True)
                        self.path.mkdir()
                    with suppress(OSError):  # a file system without locks: what is left behind stays there
                        self._lock = open_locked(self.path, _DIRECTORY)
                    with writing(f"looking for what a killed export left beside {self.out}", self.path):
                        _remove_leftovers(self.out.parent, glob.escape(self.out.name))
            with all_ranks_or_raise(ranks, f"looking for {self.path}"):
                if not self.path.is_dir():
                    raise CheckpointError(
                        f"rank {ranks.rank} does not see {self.path}, which rank 0 has just made; {verb} to "
                        "a directory on a file system that every rank sees"
                    )
        except BaseException:
            self.close()
            raise

    def publish(self) -> None:
        """Sync all to the drive and let ``out`` appear, unless its name is taken; ranks but 0 do nothing."""
        if not self._leads:
            return
        with writing(f"publishing {self.out}", self.path):
            for path in [*self.path.rglob("*"), self.path]:
                sync(path)
            try:
                self.path.rename(self.out)
            except OSError as error:
                if error.errno in (errno_names.ENOTEMPTY, errno_names.EEXIST, errno_names.ENOTDIR):
                    check_free(self.out)
                raise
            sync(self.out.parent)

    def close(self) -> None:
        """Remove what was not published."""
        if self._leads:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __exit__(self, *exc: object) -> None:
        self.close()


class Series:
    """Publishes directories ``NAME-NUMBER``, keeps the newest ``keep``, and links ``latest`` to the last."""

    def __init__(self, folder: Path, name: str, keep: int) -> None:
        self.folder, self._name, self._keep = folder, name, keep

    def path(self, number: int) -> Path:
        return self.folder / f"{self._name}-{number}"

    def publish(self, number: int) -> None:
        """Let ``latest`` point to this directory, which is complete, and remove those beyond ``keep``."""
        latest = self.folder / "latest"
        with writing(f"writing {latest}", latest):
            self.remove_leftovers()
            draft = self.folder / ".latest.new"
            draft.unlink(missing_ok=True)
            draft.symlink_to(self.path(number).name)
            draft.replace(latest)
            sync(self.folder)
            found = (each.name.removeprefix(f"{self._name}-") for each in self.folder.glob(f"{self._name}-*"))
            others = sorted({int(each) for each in found if each.isdecimal()} - {number})
            for old in others[: max(0, len(others) - self._keep + 1)]:
                removed = _partial_path(self.path(old), "old")
                self.path(old).rename(removed)  # first, so that none is there in part
                shutil.rmtree(removed, ignore_errors=True)

    def remove_leftovers(self) -> None:
        """Remove what killed processes left of directories that they made or removed."""
        _remove_leftovers(self.folder, f"{glob.escape(self._name)}-*")


def _partial_path(out: Path, token: str) -> Path:
    return out.parent / f".{out.name}.{token}.part"


def check_free(out: Path) -> None:
    """Raise a CheckpointError unless a directory can appear at ``out`` without replacing anything."""
    link = out.is_symlink()  # also to an empty directory: what is renamed does not replace a link
    if not link and out.is_dir() and not any(out.iterdir()):
        return
    if link or out.exists():
        what = "is a symbolic link" if link else "is not empty" if out.is_dir() else "is a file"
        raise CheckpointError(f"{out} exists and {what}; wanted a new directory: name another")


def _remove_leftovers(folder: Path, pattern: str) -> None:
    """Remove what killed exports to names of this pattern left; running ones hold their locks."""
    for path in folder.glob(f".{pattern}.*.part"):
        with suppress(OSError):
            lock = open_locked(path, _DIRECTORY, patience_s=0)
            try:
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Describes a tensor that will be written."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FilePlan:
    """Holds the plan of one file of ``nbytes``: its header, and each tensor's offset in the file, by key."""

    name: str
    header: bytes
    starts: Mapping[str, int]
    nbytes: int
    numel: int = 0  # of all tensors


def plan_file(name: str, tensors: Sequence[TensorSpec]) -> FilePlan:
    """Plan a file by [Note: the layout of a file]; a CheckpointError for equal keys and unknown dtypes."""
    offsets: dict[str, int] = {}
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize):
        if tensor.key in entries:
            raise CheckpointError(f"{tensor.key}: two tensors of {name} have this key; each needs its own")
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"{tensor.key}: safetensors cannot hold {tensor.dtype}; cast it first")
        offsets[tensor.key] = at
        entries[tensor.key] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    starts = {key: len(header) + offset for key, offset in offsets.items()}
    return FilePlan(name, header, starts, len(header) + at, sum(tensor.numel for tensor in tensors))


def plan_files(tensors: Sequence[TensorSpec], max_shard_nbytes: int = 2**32) -> tuple[FilePlan, ...]:
    """Share ``tensors``, in order, among files of at most ``max_shard_nbytes``; a larger one has its own."""
    if type(max_shard_nbytes) is not int or max_shard_nbytes < 1:
        raise CheckpointError(f"max_shard_nbytes: got {max_shard_nbytes!r}; wanted a count of bytes")
    shards: list[list[TensorSpec]] = [[]]
    room = max_shard_nbytes
    for tensor in tensors:
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = max_shard_nbytes
        shards[-1].append(tensor)
        room -= tensor.nbytes
    count = len(shards)
    if count == 1:
        return (plan_file(SAFETENSORS, tensors),)
    names = (f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1))
    return tuple(plan_file(name, shard) for name, shard in zip(names, shards, strict=True))


def create_files(
    folder: Path, plans: Sequence[FilePlan], constants: Mapping[str, Tensor] | None = None
) -> None:
    """Create files, headers and index, with room for all values or, but for ``constants``, with holes."""
    holes, constants = constants is not None, constants or {}
    if not holes:
        check_room(folder, sum(plan.nbytes for plan in plans))
    for plan in plans:
        path = folder / plan.name
        with writing(f"making {path}", path, plan.nbytes), path.open("xb") as file:
            (os.ftruncate if holes else reserve)(file.fileno(), plan.nbytes)
            file.write(plan.header)
            for key in plan.starts.keys() & constants.keys():
                file.seek(plan.starts[key])
                file.write(constants[key].numpy().tobytes())
    if len(plans) == 1 and plans[0].name == SAFETENSORS:
        return
    nbytes = sum(plan.nbytes - len(plan.header) for plan in plans)
    index = {
        "metadata": {"total_parameters": sum(plan.numel for plan in plans), "total_size": nbytes},
        "weight_map": {key: plan.name for plan in plans for key in plan.starts},
    }
    path = folder / (SAFETENSORS + INDEX)
    with writing(f"writing {path}", path):
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def copy_files(source: Path, paths: Iterable[Path], folder: Path) -> None:
    """Copy files of ``source`` to their places in ``folder``; weights by links if the drive has them."""
    for path in sorted(paths):
        target = folder / path.relative_to(source)
        with writing(f"writing {target}", target):
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".safetensors":
                with suppress(OSError):  # another file system, or one without hard links
                    os.link(path.resolve(), target)
                    continue
            shutil.copyfile(path, target)  # a small file, which may be edited


class OutputFile:
    """Owns a file that is written past the page cache where the file system allows it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._buffered = self._direct = -1
        with writing(f"opening {path}", path):
            self._buffered = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        with suppress(OSError):  # everything goes through the page cache: slower, and right
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)

    def put(self, offset: int, memory: memoryview) -> None:
        """Write ``memory``, page-aligned, whose first byte belongs at ``offset - offset % 4096``; blocks.

        Bytes before ``offset`` are not written. Raises a WriteError unless all others are.
        """
        base = offset - offset % BLOCK_NBYTES
        stop = base + len(memory)
        first, last = aligned(offset), stop - stop % BLOCK_NBYTES
        if self._direct < 0 or first >= last:
            first = last = stop
        self._write(self._buffered, offset, memory[offset - base : first - base])
        self._write(self._direct, first, memory[first - base : last - base])
        self._write(self._buffered, last, memory[last - base :])

    def _write(self, fd: int, offset: int, memory: memoryview) -> None:
        moved = 0
        while moved < len(memory):
            try:
                moved += os.pwrite(fd, memory[moved:], offset + moved)
            except OSError as error:
                if error.errno == errno_names.EINVAL and fd == self._direct:
                    fd = self._buffered  # this file system wants larger blocks, or the last write was short
                    continue
                errno, action = error.errno or errno_names.EIO, f"writing {self.path}"
                raise WriteError(errno, action, self.path, offset + moved, len(memory) - moved) from error

    def sync(self) -> None:
        with writing(f"writing {self.path}", self.path):
            os.fsync(self._buffered)

    def close(self) -> None:
        for fd in {self._buffered, self._direct} - {-1}:
            os.close(fd)
        self._buffered = self._direct = -1


def reserve(fd: int, nbytes: int) -> None:
    """Set the length of a new file, and reserve room where the file system can promise it."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno_names.EOPNOTSUPP, errno_names.EINVAL):
            raise
        os.ftruncate(fd, nbytes)  # no promise to be had: a full disk shows at a write


class RangeWriter(AbstractContextManager["RangeWriter"]):
    """Writes ranges of files in the background; in ascending order, as these become large writes."""

    def __init__(self) -> None:
        self.nbytes = 0  # handed over so far
        self._threads = ThreadPoolExecutor(_DEPTH - 1, "infinity-export")
        self._free = SimpleQueue[_Bytes]()
        for _ in range(_DEPTH):
            self._free.put(HostBuffer(_WRITE_NBYTES).tensor.numpy())
        #: The block that is filled with bytes [start, stop) of a file; it begins with the page of ``start``.
        self._filling: tuple[OutputFile, _Bytes] | None = None
        self._start = self._stop = 0
        self._error: BaseException | None = None
        self._opened: list[OutputFile] = []

    def open(self, path: Path) -> OutputFile:
        """Open an existing file until the end of the context, or raise a WriteError."""
        self._opened.append(OutputFile(path))
        return self._opened[-1]

    def write(self, file: OutputFile, offset: int, values: Tensor) -> None:
        """Hand over ``values``, contiguous on the CPU, which may change then; :meth:`check` raises errors."""
        self.write_bytes(file, offset, values.detach().reshape(-1).view(torch.uint8).numpy())

    def write_bytes(self, file: OutputFile, offset: int, data: _Bytes) -> None:
        """Hand over bytes as :meth:`write` does; ``data`` has dtype uint8."""
        self.nbytes += len(data)
        while len(data) and self._error is None:
            filling, filled = self._filling, self._stop - self._start + self._start % BLOCK_NBYTES
            if filling is None or filling[0] is not file or self._stop != offset or filled == _WRITE_NBYTES:
                self._submit()
                filling = self._filling = file, self._free.get()
                self._start = self._stop = offset
                filled = offset % BLOCK_NBYTES
            taken = min(_WRITE_NBYTES - filled, len(data))
            # By one thread (numpy): torch's would wait for each other where other processes compute.
            filling[1][filled : filled + taken] = data[:taken]
            offset, self._stop, data = offset + taken, self._stop + taken, data[taken:]

    def check(self) -> None:
        """Raise the first WriteError so far; ranges that came after it were dropped."""
        if self._error is not None:
            raise self._error

    def flush(self) -> None:
        self._submit()
        for block in [self._free.get() for _ in range(_DEPTH)]:  # when none is being written
            self._free.put(block)
        self.check()

    def finish(self) -> None:
        """Return when everything is on the drive, or raise as :meth:`check` does."""
        self.flush()
        for file in self._opened:
            file.sync()

    def _submit(self) -> None:
        if self._filling is not None:
            nbytes = self._stop - self._start + self._start % BLOCK_NBYTES
            self._threads.submit(self._put, *self._filling, self._start, nbytes)
        self._filling = None

    def _put(self, file: OutputFile, block: _Bytes, start: int, nbytes: int) -> None:
        try:
            file.put(start, block.data[:nbytes])
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._free.put(block)

    def __exit__(self, *exc: object) -> None:
        self._threads.shutdown(cancel_futures=True)  # they write to the files, and end first
        for file in self._opened:
            file.close()


@contextmanager
def new_directory(
    files: Sequence[FilePlan], out: Path, ranks: Ranks, prepare: Callable[[Path], object], *,
    doing: str = "writing", on_progress: Callable[[str, int, int], object] | None = None,
) -> Iterator[Callable[[str, int, Tensor], None]]:  # fmt: skip
    """Make a directory of ``files``, which appears at ``out`` after the block, in which all values are put.

    Yields ``put(key, start, values)``, which writes elements of a tensor from ``start`` on; see
    :class:`RangeWriter`. Every rank must call, and all of them together put each element once. On rank 0
    ``prepare(folder)`` writes what the directory has beside ``files`` first. ``on_progress`` is called with
    ``doing``, the bytes that this rank has written, and an equal part of all.
    """
    nbytes = sum(file.nbytes - len(file.header) for file in files)
    with Publication(out, ranks) as place:
        with all_ranks_or_raise(ranks, f"making {place.out}"):
            if ranks.rank == 0:
                create_files(place.path, files)
                with writing(f"writing to {place.path}", place.path):
                    prepare(place.path)
        with RangeWriter() as writer:
            with all_ranks_or_raise(ranks, f"writing {place.out}"):
                opened = [(writer.open(place.path / file.name), file.starts) for file in files]
            places = {key: (file, first) for file, starts in opened for key, first in starts.items()}

            def put(key: str, start: int, values: Tensor) -> None:
                file, first = places[key]
                writer.write(file, first + start * values.itemsize, values)
                writer.check()
                if on_progress is not None:
                    on_progress(doing, writer.nbytes, nbytes // ranks.world_size)

            yield put
            with all_ranks_or_raise(ranks, f"writing {place.out}"):
                writer.finish()
            written = ranks.sum(writer.nbytes, f"bytes of {place.out}")
            assert written == nbytes, f"{written} bytes of {nbytes} were written"
        with all_ranks_or_raise(ranks, f"publishing {place.out}"):
            place.publish()
