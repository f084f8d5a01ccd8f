"""Reads directories of ``torch.distributed.checkpoint`` by byte ranges, without trusting them.

[Note: what is executed]
The metadata is a pickle, and torch's own reader would run whatever it names. Here a pickle may name only the
format's classes, for which there are stand-ins. Every number that comes out is checked before it is used:
types, boxes inside their tensor, ranges inside their file, files beside the metadata. Records are read by
torch's restricted unpickler.

[Note: records]
A value is a record of ``torch.save``: a zip archive without compressed members. torch reads a tensor's record
without its values and says where they lie, so a range is read from its place, whatever the record's size.
"""

import io
import pickle
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from reprlib import repr as short  # also of what holds itself a million times
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.utils import _create_file_view

from infinity.checkpoint.directory import (
    FileTensor,
    MemoryTensor,
    ReadableFile,
    Stored,
    StoredTensors,
    View,
)
from infinity.core.errors import CheckpointError, library_errors
from infinity.core.files import read_file
from infinity.core.nbytes import Box, boxes, flat_offset, overlap

METADATA = ".metadata"
#: Limits of the metadata and of a value that is no tensor (bytes).
_MOST_METADATA_NBYTES, _MOST_OBJECT_NBYTES = 2**31, 2**26


class DistributedCheckpoint(StoredTensors):
    """Opens a directory with ``.metadata``, whose presence shows that it is complete: it is written last."""

    def _open(self) -> None:
        self._files: dict[str, ReadableFile] = {}
        self.objects: dict[str, _Record] = {}  # values that are no tensors
        self._parse(self._metadata())

    def value(self, key: str) -> Any:
        """Return a value that is no tensor, or raise a CheckpointError: it is damaged, or would run code."""
        record = self.objects[key]
        if record.nbytes > _MOST_OBJECT_NBYTES:
            raise CheckpointError(f"{self.path}: {key} has {record.nbytes} bytes; wanted a number or a text")
        with (
            library_errors(CheckpointError, f"{self.path}: {key} is no plain value"),
            record.opened() as file,
        ):
            return torch.load(file, map_location="cpu", weights_only=True)

    def _metadata(self) -> Any:
        if not (self.path / METADATA).is_file():
            what = f"no {METADATA}" if self.path.is_dir() else "no such directory"
            raise CheckpointError(
                f"{self.path}: {what}; wanted a directory that torch.distributed.checkpoint.save or "
                "infinity.save_checkpoint has written"
            )
        with library_errors(CheckpointError, str(self.path / METADATA)):
            raw = read_file(self.path / METADATA, _MOST_METADATA_NBYTES)
        what = f"{self.path / METADATA} is refused: it is damaged, or loading it would run code"
        with library_errors(CheckpointError, what):
            return _Unpickler(io.BytesIO(raw)).load()

    def _parse(self, metadata: Any) -> None:
        what = f"{self.path / METADATA} is not as torch.distributed.checkpoint writes it"
        with library_errors(CheckpointError, what):
            records = {
                (_text(key.fqn), _numbers(getattr(key, "offset", None))): info
                for key, info in metadata.storage_data.items()
            }
            for key, entry in metadata.state_dict_metadata.items():
                name = _text(key)
                if hasattr(entry, "chunks"):
                    self[name] = self._tensor(name, entry, records)
                else:
                    self.objects[name] = self._record(records[name, None])

    def _tensor(self, key: str, entry: Any, records: Mapping[Any, Any]) -> "ChunkedTensor":
        dtype, shape = entry.properties.dtype, _numbers(entry.size)
        if not isinstance(dtype, torch.dtype) or shape is None:
            raise ValueError(f"{key} has dtype {short(dtype)}")
        chunks = []
        for chunk in entry.chunks:
            offsets, sizes = _numbers(chunk.offsets), _numbers(chunk.sizes)
            if offsets is None or sizes is None or len(offsets) != len(shape) or len(sizes) != len(shape):
                raise ValueError(f"{key} has a part of another number of dimensions")
            box = Box(offsets, sizes)
            if any(stop > size for stop, size in zip(box.stops, shape, strict=True)):
                raise ValueError(f"{key} has a part {box} outside its shape {shape}")
            if box.numel:
                chunks.append((box, self._record(records[key, offsets])))
        held, numel = sum(box.numel for box, _ in chunks), Box((0,) * len(shape), shape).numel
        if held != numel:
            raise ValueError(f"the parts of {key} hold {held} of {numel} elements")
        return ChunkedTensor(key, dtype, torch.Size(shape), chunks)

    def _record(self, info: Any) -> "_Record":
        name, offset, nbytes = _text(info.relative_path), info.offset, info.length
        if any(c in name for c in "/\\\0") or name in ("", ".", ".."):
            raise CheckpointError(
                f"{self.path / METADATA} names the file {name[:200]!r}; wanted one that lies beside it"
            )
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{self.path / name} is compressed or encrypted: save without extensions")
        if name not in self._files:
            self._files[name] = ReadableFile(self.path / name)
            self._opened.callback(self._files[name].close)
        file = self._files[name]
        size = file.nbytes
        if type(offset) is not int or type(nbytes) is not int or not 0 <= offset <= offset + nbytes <= size:
            raise CheckpointError(
                f"{file.path} has {size} bytes; the metadata names {short(nbytes)} bytes at {short(offset)}. "
                "The checkpoint is damaged: copy it again, or take an earlier one"
            )
        return _Record(file, offset, nbytes)


class ChunkedTensor(Stored):
    """Represents a tensor whose parts lie in several records."""

    def __init__(
        self, key: str, dtype: torch.dtype, shape: torch.Size, chunks: list[tuple[Box, "_Record"]]
    ) -> None:
        self.key, self.dtype, self.shape = key, dtype, shape
        self._chunks = chunks
        self._sources: dict[int, Stored] = {}  # by number of the part

    def equals(self, other: Stored) -> bool:
        if isinstance(other, ChunkedTensor) and (self.shape, self._chunks) == (other.shape, other._chunks):
            return True  # names of a tied weight in our own checkpoints
        return super().equals(other)

    def fill(self, start: int, out: Tensor, view: View | None = None) -> None:
        filled = at = 0
        for box in boxes(self.shape, start, start + len(out)):
            values = out[at : at + box.numel].view(box.sizes)
            at += box.numel
            for number, (stored, record) in enumerate(self._chunks):
                if common := overlap(box, stored):
                    if number not in self._sources:
                        self._sources[number] = _tensor_of(record, self.dtype, stored.sizes, self.key)
                    # The overlap is contiguous in the stored part, but perhaps not in the wanted box.
                    inside = [a - b for a, b in zip(common.offsets, stored.offsets, strict=True)]
                    begins = (a - b for a, b in zip(common.offsets, box.offsets, strict=True))
                    place = tuple(slice(a, a + n) for a, n in zip(begins, common.sizes, strict=True))
                    piece = values[place].contiguous()
                    self._sources[number].fill(flat_offset(inside, stored.sizes), piece.view(-1))
                    if piece.data_ptr() != values[place].data_ptr():
                        values[place] = piece
                    filled += common.numel
        if filled != len(out):
            raise CheckpointError(f"{self.key}: its parts overlap, and leave elements out: it is damaged")


@dataclass(frozen=True, slots=True)
class _Record:
    """Locates what torch.save has written of one value: a range of a file."""

    file: ReadableFile
    offset: int
    nbytes: int

    @contextmanager
    def opened(self) -> Iterator[Any]:
        """Present the range as a file of its own."""
        with open(f"/proc/self/fd/{self.file.fd}", "rb") as whole:
            yield _create_file_view(whole, self.offset, self.nbytes)


def _tensor_of(record: _Record, dtype: torch.dtype, sizes: tuple[int, ...], key: str) -> Stored:
    """Return the tensor of a record, or raise a CheckpointError if its type or shape is another."""
    file = record.file
    with library_errors(CheckpointError, f"{file.path}: the record of {key} is damaged"):
        with record.opened() as opened, FakeTensorMode():
            archive = cast(Any, torch._C).PyTorchFileReader(opened)
            if archive.has_record("byteorder") and archive.get_record("byteorder") != b"little":
                raise ValueError("its bytes are in the other order")
            opened.seek(0)
            found = torch.load(opened, weights_only=True)  # nothing is read but the description
        if not isinstance(found, Tensor) or (found.dtype, found.shape, found.layout) != (
            dtype, torch.Size(sizes), torch.strided
        ):  # fmt: skip
            held = (found.dtype, *found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"it holds {held}, wanted {dtype} of shape {sizes}")
        storage: Any = found.untyped_storage()
        start, nbytes = record.offset + storage._checkpoint_offset, storage.nbytes()
        if not record.offset <= start <= record.offset + record.nbytes - nbytes:
            raise ValueError(f"it has {record.nbytes} bytes, wanted {nbytes} of values")
        if found.is_contiguous():
            return FileTensor(file, dtype, found.shape, start + found.storage_offset() * dtype.itemsize)
        # A transposed parameter, for instance; mapped, not read as a whole.
        raw = np.memmap(f"/proc/self/fd/{file.fd}", np.uint8, "c", start, (nbytes,))
        flat = torch.from_numpy(raw).view(dtype)
        return MemoryTensor(flat.as_strided(found.shape, found.stride(), found.storage_offset()))


#: What a metadata may name; stand-ins replace it.
_NAMED = re.compile(
    r"torch\.distributed\.checkpoint\.metadata (Metadata|MetadataIndex|TensorStorageMetadata|TensorProperties"
    r"|BytesStorageMetadata|ChunkStorageMetadata|StorageMeta|_MEM_FORMAT_ENCODING)"
    r"|torch\.distributed\.checkpoint\.filesystem _StorageInfo"
    r"|torch\.serialization _get_layout|pathlib(\._local)? PosixPath|collections OrderedDict"
)


class _StandIn:
    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"dtype": state[0]})  # of TensorProperties


class _Unpickler(pickle.Unpickler):
    """Makes stand-ins of the format's classes, which are all that a metadata may name."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        # A pickle can set attributes of what it names, so this one has a class of its own.
        self._stand_in = type("StandIn", (_StandIn,), {})

    def find_class(self, module: str, name: str) -> Any:
        if _NAMED.fullmatch(f"{module} {name}"):
            return dict if name == "OrderedDict" else self._stand_in
        found = getattr(torch, name, None) if module == "torch" else None
        if found is torch.Size or isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no class of the format")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"wanted a text, got {type(value).__name__}")
    return value


def _numbers(value: Any) -> tuple[int, ...] | None:
    """Return sizes or offsets, checked to be whole and not negative; None as it is."""
    if value is None:
        return None
    if not isinstance(value, tuple) or any(type(item) is not int or item < 0 for item in value):
        raise TypeError(f"wanted sizes or offsets, got {short(value)}")
    return tuple(value)


def common_prefix(names: Sequence[str], keys: Collection[str]) -> str:
    """Return the prefix that most of ``names`` have among ``keys``; the shortest of several."""
    for name in names:
        found = {key.removesuffix(name) for key in keys if key == name or key.endswith(f".{name}")}
        if found:  # all names have the same
            counts = {each: sum(each + name in keys for name in names) for each in sorted(found)}
            return min(counts, key=lambda each: (-counts[each], len(each)))
    return ""


def numbers_of(checkpoint: DistributedCheckpoint, prefix: str, rule: Any) -> dict[str, dict[str, Any]]:
    """Return hyperparameters by name of the parameter, of groups or of each."""
    found: dict[str, dict[str, Any]] = {}
    groups = f"{prefix}param_groups."
    keys = [key for key in checkpoint.objects if key.startswith(groups)]
    listed = {  # the names of each group
        key.removesuffix(".params"): checkpoint.value(key) for key in keys if key.endswith(".params")
    }
    for key in keys:
        group, _, number = key.rpartition(".")
        if number in (*rule.defaults, "initial_lr") and (group in listed or not listed):
            value, names = checkpoint.value(key), listed.get(group, [group.removeprefix(groups)])
            for name in names if isinstance(names, list) else ():
                found.setdefault(str(name), {})[number] = value
    return found
