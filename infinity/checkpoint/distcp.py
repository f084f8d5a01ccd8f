"""Directories of ``torch.distributed.checkpoint``, read by byte ranges and without believing them.

[Note: what is executed]
The metadata is a pickle, and torch's own reader unpickles it, which runs whatever it names. Here a pickle may
name the classes of the format, for each of which there is a stand-in that only keeps what it is given, and
nothing else. Every number that comes out is checked before it is used: types, boxes inside their tensor,
ranges inside their file, files beside the metadata.

[Note: records]
A value is a record of ``torch.save``: a zip archive, which has no compressed member. The values of a tensor
lie in one member as they are, so a range of them is read from its place in the file, whatever the size of the
record.
"""

import io
import math
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from infinity.checkpoint.directory import FileTensor, MemoryTensor, ReadableFile, Stored, readable
from infinity.core.errors import CheckpointError, first_line, library_errors
from infinity.core.files import read_file
from infinity.core.intervals import Box, boxes, flat_offset, overlap

METADATA = ".metadata"
#: The longest metadata and the longest value that is no tensor, and the longest description of one (bytes).
_MOST_METADATA_NBYTES, _MOST_OBJECT_NBYTES, _MOST_PICKLE_NBYTES = 2**31, 2**26, 2**16
#: Signature and length of what precedes a member of a zip archive (bytes).
_LOCAL, _LOCAL_NBYTES = b"PK\3\4", 30
_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}  # fmt: skip


class DistributedCheckpoint(dict[str, Stored]):
    """Every tensor of a directory by key; close it when they are read.

    Args:
        path: Has ``.metadata``, which is written last.

    Attributes:
        objects: Keys of values that are no tensors.

    Raises:
        CheckpointError: It is none, or damaged; says how.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._files: dict[str, ReadableFile] = {}
        self._objects: dict[str, _Place] = {}
        try:
            self._parse(_unpickled(self._metadata()))
        except BaseException:
            self.close()
            raise

    @property
    def objects(self) -> frozenset[str]:
        return frozenset(self._objects)

    def value(self, key: str) -> Any:
        """Return a value that is no tensor: numbers, texts, lists and dictionaries.

        Raises:
            CheckpointError: It is something else, which would run code; or cannot be read.
        """
        place = self._objects[key]
        if place.nbytes > _MOST_OBJECT_NBYTES:
            raise CheckpointError(f"{self.path}: {key} has {place.nbytes} bytes; wanted a number or a text")
        raw = bytearray(place.nbytes)
        with library_errors(CheckpointError, f"{self.path}: {key} is no plain value"):
            _members(place)  # none is compressed
            place.file.read_bytes(place.offset, memoryview(raw))
            return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)

    def close(self) -> None:
        """Give the files back; may be called twice."""
        self.clear()
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- the metadata ------------------------------------------------------------------------

    def _metadata(self) -> bytes:
        if not (self.path / METADATA).is_file():
            what = f"no {METADATA}" if self.path.is_dir() else "no such directory"
            raise CheckpointError(
                f"{self.path}: {what}; wanted a directory that torch.distributed.checkpoint.save or "
                "infinity.save_checkpoint has written"
            )
        with readable(self.path / METADATA):
            return read_file(self.path / METADATA, _MOST_METADATA_NBYTES)

    def _parse(self, metadata: Any) -> None:
        """Take tensors and other values from the metadata.

        Raises:
            CheckpointError: Something in it is not what the format says.
        """
        try:
            top = metadata.fields
            places = {
                (_text(key.fields["fqn"]), _offsets(key.fields.get("offset"))): info.fields
                for key, info in top["storage_data"].items()
            }
            for key, entry in top["state_dict_metadata"].items():
                if "chunks" in entry.fields:
                    self[_text(key)] = self._tensor(key, entry.fields, places)
                else:
                    self._objects[_text(key)] = self._place(places[key, None])
        except CheckpointError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise CheckpointError(
                f"{self.path / METADATA} is not as torch.distributed.checkpoint writes it "
                f"({type(error).__name__}: {first_line(error)})"
            ) from error

    def _tensor(self, key: str, fields: Mapping[str, Any], places: Mapping[Any, Any]) -> "ChunkedTensor":
        dtype, shape = fields["properties"].fields[0], _offsets(fields["size"])
        if not isinstance(dtype, torch.dtype) or shape is None:
            raise ValueError(f"{key} has dtype {dtype!r}")
        whole, chunks = Box((0,) * len(shape), shape), []
        for chunk in fields["chunks"]:
            offsets, sizes = _offsets(chunk.fields["offsets"]), _offsets(chunk.fields["sizes"])
            if offsets is None or sizes is None or len(offsets) != len(shape) or len(sizes) != len(shape):
                raise ValueError(f"{key} has a part of another number of dimensions")
            box = Box(offsets, sizes)
            if any(stop > size for stop, size in zip(box.stops, shape, strict=True)):
                raise ValueError(f"{key} has a part {box} outside its shape {shape}")
            if box.numel:
                chunks.append((box, self._place(places[key, offsets])))
        held = sum(box.numel for box, _ in chunks)
        if held != whole.numel:
            raise ValueError(f"the parts of {key} hold {held} of {whole.numel} elements")
        return ChunkedTensor(key, dtype, torch.Size(shape), chunks)

    def _place(self, info: Mapping[str, Any]) -> "_Place":
        name, offset, nbytes = _text(info["relative_path"]), info["offset"], info["length"]
        if any(c in name for c in "/\\\0") or name in ("", ".", ".."):
            raise CheckpointError(
                f"{self.path / METADATA} names the file {name[:200]!r}; wanted one that lies beside it"
            )
        if info.get("transform_descriptors"):
            raise CheckpointError(
                f"{self.path / name} is compressed or encrypted: save it without extensions"
            )
        if name not in self._files:
            self._files[name] = ReadableFile(self.path / name)
        file = self._files[name]
        size = os.fstat(file.fd).st_size
        if type(offset) is not int or type(nbytes) is not int or not 0 <= offset <= offset + nbytes <= size:
            raise CheckpointError(
                f"{file.path} has {size} bytes; the metadata names {nbytes!r} bytes at {offset!r}. The "
                "checkpoint is damaged: copy it again, or take an earlier one"
            )
        return _Place(file, offset, nbytes)


class ChunkedTensor:
    """A tensor that lies in parts in several records; see :class:`infinity.checkpoint.directory.Stored`."""

    def __init__(
        self, key: str, dtype: torch.dtype, shape: torch.Size, chunks: list[tuple[Box, "_Place"]]
    ) -> None:
        self.key, self.dtype, self.shape = key, dtype, shape
        self._chunks = chunks
        self._sources: dict[int, Stored] = {}  # by number of the part

    def fill(self, start: int, out: Tensor) -> None:
        filled = at = 0
        for box in boxes(self.shape, start, start + len(out)):
            part = out[at : at + box.numel].view(box.sizes)
            at += box.numel
            for number, (stored, _) in enumerate(self._chunks):
                if common := overlap(box, stored):
                    self._fill(number, common, _narrowed(part, box, common))
                    filled += common.numel
        if filled != len(out):
            raise CheckpointError(f"{self.key}: its parts overlap, and leave elements out: it is damaged")

    def _fill(self, number: int, wanted: Box, out: Tensor) -> None:
        """Fill ``out`` with a box of one part. There it is contiguous, as what a range has of any box."""
        stored, place = self._chunks[number]
        if number not in self._sources:
            self._sources[number] = _open(place, self.dtype, stored.sizes, self.key)
        inside = [a - b for a, b in zip(wanted.offsets, stored.offsets, strict=True)]
        first = flat_offset(inside, stored.sizes)
        if out.is_contiguous():
            self._sources[number].fill(first, out.view(-1))
        else:
            values = torch.empty(wanted.numel, dtype=out.dtype, device="cpu")
            self._sources[number].fill(first, values)
            out.copy_(values.view(wanted.sizes))


def _narrowed(values: Tensor, box: Box, part: Box) -> Tensor:
    """Return ``part`` of ``values``, which are those of ``box``."""
    for dim, (start, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
        values = values.narrow(dim, start - box.offsets[dim], size)
    return values


# --- records -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """Bytes of a file."""

    file: ReadableFile
    offset: int
    nbytes: int


def _open(place: _Place, dtype: torch.dtype, sizes: tuple[int, ...], key: str) -> Stored:
    """Return the tensor of a record.

    Raises:
        CheckpointError: It is not one of this type and shape, with plain values.
    """
    with library_errors(CheckpointError, f"{place.file.path}: the record of {key} is damaged"):
        members = _members(place)
        described = members["data.pkl"]
        if described.nbytes > _MOST_PICKLE_NBYTES:
            raise ValueError(f"its description has {described.nbytes} bytes")
        raw = bytearray(described.nbytes)
        described.file.read_bytes(described.offset, memoryview(raw))
        found = _TensorUnpickler(io.BytesIO(raw)).load()
        if not isinstance(found, _Strided) or found.storage.dtype != dtype or found.size != sizes:
            raise ValueError(f"it holds {found!r:.200}, wanted {dtype} of shape {sizes}")
        if _order(members) not in (b"", b"little"):
            raise ValueError("its bytes are in the other order")
        values = members[f"data/{found.storage.key}"]
        numel = values.nbytes // dtype.itemsize
        if found.stride == _contiguous(sizes):
            if not 0 <= found.offset <= found.offset + math.prod(sizes) <= numel:
                raise ValueError(
                    f"{numel} elements are stored, wanted {math.prod(sizes)} from {found.offset} on"
                )
            return FileTensor(
                values.file, dtype, torch.Size(sizes), values.offset + found.offset * dtype.itemsize
            )
        # A transposed parameter, for instance; mapped, not read as a whole.
        path = f"/proc/self/fd/{values.file.fd}"
        raw_values = np.memmap(path, np.uint8, "c", values.offset, (numel * dtype.itemsize,))
        flat = torch.from_numpy(raw_values).view(dtype)
        return MemoryTensor(flat.as_strided(found.size, found.stride, found.offset))


def _contiguous(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor without gaps."""
    return tuple(math.prod(max(size, 1) for size in sizes[dim + 1 :]) for dim in range(len(sizes)))


def _order(members: Mapping[str, _Place]) -> bytes:
    if "byteorder" not in members:
        return b""
    place = members["byteorder"]
    raw = bytearray(min(place.nbytes, 16))
    place.file.read_bytes(place.offset, memoryview(raw))
    return bytes(raw)


def _members(place: _Place) -> dict[str, _Place]:
    """Return the members of an archive, by name without the common folder.

    Raises:
        ValueError: One is compressed, or outside the archive.
    """
    members = {}
    with zipfile.ZipFile(io.BufferedReader(_Window(place))) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
                raise ValueError(f"{member.filename[:100]!r} is compressed")
            header = bytearray(_LOCAL_NBYTES)
            at = member.header_offset
            if not 0 <= at <= place.nbytes - _LOCAL_NBYTES:
                raise ValueError(f"{member.filename[:100]!r} begins outside the record")
            place.file.read_bytes(place.offset + at, memoryview(header))
            at += (
                _LOCAL_NBYTES
                + int.from_bytes(header[26:28], "little")
                + int.from_bytes(header[28:], "little")
            )
            if header[:4] != _LOCAL or at + member.file_size > place.nbytes:
                raise ValueError(f"{member.filename[:100]!r} ends outside the record")
            name = member.filename.partition("/")[2]
            members[name] = _Place(place.file, place.offset + at, member.file_size)
    return members


class _Window(io.RawIOBase):
    """A range of a file as a file of its own."""

    def __init__(self, place: _Place) -> None:
        self._place, self._at = place, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._place.nbytes}[whence]
        if base + offset < 0:
            raise OSError(f"seeking to {base + offset}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        memory = memoryview(buffer).cast("B")
        count = max(0, min(len(memory), self._place.nbytes - self._at))
        self._place.file.read_bytes(self._place.offset + self._at, memory[:count])
        self._at += count
        return count


# --- pickles -----------------------------------------------------------------------------------------


class _StandIn:
    """Keeps what an object of a class of the format was made of."""

    fields: Any = MappingProxyType[str, Any]({})  # of an object without any

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.fields = state


def _sizes(items: Any = ()) -> tuple[int, ...]:
    """Return the sizes: a stand-in for torch.Size."""
    return tuple(items)


def _nothing(*arguments: object) -> None:
    """Return nothing: a stand-in for a value that is not used."""


_FORMAT = "torch.distributed.checkpoint."
#: What a metadata may name, and what is made of it.
_NAMED: dict[tuple[str, str], Callable[..., Any]] = {
    **{
        (_FORMAT + "metadata", name): _StandIn
        for name in (
            "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata",
            "ChunkStorageMetadata", "TensorProperties", "StorageMeta",
        )
    },
    (_FORMAT + "metadata", "_MEM_FORMAT_ENCODING"): _nothing,
    (_FORMAT + "filesystem", "_StorageInfo"): _StandIn,
    ("torch", "Size"): _sizes,
    ("torch.serialization", "_get_layout"): _nothing,
    ("pathlib", "PosixPath"): _nothing,
    ("pathlib._local", "PosixPath"): _nothing,
    ("collections", "OrderedDict"): dict,
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NAMED:
            return _NAMED[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no class of the format")


def _unpickled(raw: bytes) -> Any:
    with library_errors(
        CheckpointError, f"the checkpoint's {METADATA} is refused, as loading it would run code"
    ):
        return _MetadataUnpickler(io.BytesIO(raw)).load()


class _Storage(NamedTuple):
    dtype: torch.dtype
    key: str


class _Strided(NamedTuple):
    """A tensor as torch.save describes it."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def _strided(storage: Any, offset: Any, size: Any, stride: Any, *rest: object) -> _Strided:
    """Return a description of a tensor: a stand-in for torch._utils._rebuild_tensor_v2."""
    numbers = (offset, *size, *stride)
    if not isinstance(storage, _Storage) or any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError("it is not a tensor with plain values")
    return _Strided(storage, offset, tuple(size), tuple(stride))


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _strided
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}; wanted a tensor with plain values")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str):
            raise pickle.UnpicklingError("it refers to something that is no storage")
        return _Storage(dtype, key)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"wanted a text, got {type(value).__name__}")
    return value


def _offsets(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, tuple) or any(type(item) is not int or item < 0 for item in value):
        raise TypeError(f"wanted sizes or offsets, got {value!r:.100}")
    return value
