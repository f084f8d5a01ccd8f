"""The tensors of a checkpoint directory: which key is in which file, and ranges of their elements.

[Note: untrusted files]
Nothing in a directory is believed before it was checked. An index may name only files beside it: a name with
a separator or of a directory is refused before anything is opened, and so is a key that the named file does
not hold, or that two files hold. Only regular files are opened; symbolic links are followed, as Hugging
Face's cache is made of them. The headers of safetensors files are read and checked by the library: tensors
lie one after the other, without gap or overlap, to the end of the file, and each has the bytes of its shape.
What the library does not check is that no key stands in a header twice.

[Note: byte ranges]
The library gives whole tensors, and maps them. A load reads ranges of them, once, into memory of its own.
So the bytes are read here, from the place that follows from the library's order of the tensors.

[Note: pickled weights]
``pytorch_model.bin`` is read by torch's restricted unpickler, which makes tensors and runs no code of
the file's, and mapped into memory rather than read as a whole.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor

from infinity.core.errors import CheckpointError, first_line
from infinity.core.files import open_regular, read_file

SAFETENSORS = "model.safetensors"
PICKLED = "pytorch_model.bin"
INDEX = ".index.json"

#: Types by their names in safetensors files.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip

#: The longest JSON that is read, as long as a header of the format may be (bytes).
_MOST_JSON_NBYTES = 100_000_000
#: How far the kernel is asked to read ahead (bytes).
_AHEAD_NBYTES = 16 * 2**20
#: Elements that are converted at one time.
_PIECE_NUMEL = 2**18
#: Blocks of a file that :meth:`ReadableFile.sample` reads, and their size (bytes).
_SAMPLES, _SAMPLE_NBYTES = 64, 4096


#: Gives bytes of a file, by offset and number, that are in memory: ``(n,)`` uint8, on any device.
View: TypeAlias = Callable[["ReadableFile", int, int], Tensor]


class ByteRange(NamedTuple):
    """Bytes of a file."""

    file: "ReadableFile"
    offset: int
    nbytes: int


class Stored(Protocol):
    """A tensor of a checkpoint."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def fill(self, start: int, out: Tensor) -> None:
        """Put flat elements from ``start`` on into ``out``, ``(n,)``, contiguous, cast to its dtype; blocks.

        Raises:
            CheckpointError: The file ends early, or the disk fails.
        """
        ...


class Checkpoint(dict[str, Stored]):
    """Every tensor of a directory by key; close it when they are read.

    Args:
        path: A directory with ``model.safetensors`` or ``pytorch_model.bin``, or the index of several.

    Attributes:
        pickled: The weights are pickled.
        files: The safetensors files, open.

    Raises:
        CheckpointError: There is none of them, or one is damaged; says which and how.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.pickled = False
        self.files: list[TensorFile] = []
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the files back; may be called twice."""
        self.clear()
        for file in self.files:
            file.close()

    @property
    def nbytes_read(self) -> int:
        """Bytes of tensors that were read from safetensors files by this process."""
        return sum(file.nbytes_read for file in self.files)

    def _open(self) -> None:
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path} is not a directory; give the one with config.json and {SAFETENSORS}, as "
                "`hf download MODEL` prints it or save_pretrained wrote it"
            )
        for single in (SAFETENSORS, PICKLED):
            self.pickled = single == PICKLED
            if (self.path / single).exists():
                return self._add(single, self._open_file(single))
            if (self.path / (single + INDEX)).exists():
                return self._open_index(self.path / (single + INDEX))
        raise CheckpointError(
            f"{self.path} holds no weights; wanted {SAFETENSORS} or {SAFETENSORS}{INDEX} "
            f"(or {PICKLED}, or its index)"
        )

    def _open_index(self, index: Path) -> None:
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: wanted a weight_map from keys to files")
        suffix = Path(PICKLED if self.pickled else SAFETENSORS).suffix
        files: dict[str, list[str]] = {}
        for key, name in weight_map.items():
            if not isinstance(name, str) or not name.endswith(suffix) or any(c in name for c in "/\\\0"):
                raise CheckpointError(
                    f"{index} names the file {name!r}; wanted one that lies beside it and ends with {suffix}"
                )
            files.setdefault(name, []).append(key)
        for name, keys in files.items():
            held = self._open_file(name)
            if lost := sorted(set(keys) - set(held)):
                raise CheckpointError(
                    f"{self.path / name} does not hold what {index.name} says: {', '.join(lost)}"
                )
            self._add(name, held)

    def _add(self, name: str, held: Mapping[str, Stored]) -> None:
        if twice := sorted(set(held) & set(self)):
            raise CheckpointError(
                f"{self.path / name} holds keys that another file holds, too: {', '.join(twice)}"
            )
        self.update(held)

    def _open_file(self, name: str) -> Mapping[str, Stored]:
        if self.pickled:
            return _unpickle(self.path / name)
        self.files.append(TensorFile(self.path / name))
        return self.files[-1].tensors


class ReadableFile:
    """A regular file, open for reading ranges of it.

    Args:
        path: The file; a symbolic link is followed.

    Attributes:
        nbytes_read: Bytes of tensors that were read so far.

    Raises:
        CheckpointError: It cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.nbytes_read = path, 0
        with readable(path):
            self.fd = open_regular(path)

    def close(self) -> None:
        """May be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def read(self, offset: int, values: Tensor) -> None:
        """Fill a contiguous tensor with the bytes from ``offset`` on; blocking.

        Raises:
            CheckpointError: The file ends early, or the disk fails.
        """
        flat: Any = values.view(torch.uint8).numpy()
        self.read_bytes(offset, memoryview(flat))
        self.nbytes_read += values.nbytes

    def read_bytes(self, offset: int, memory: memoryview) -> None:
        """Fill ``memory``, in as many calls as the system needs, or raise as :meth:`read` does."""
        done = 0
        while done < memory.nbytes:
            try:
                count = os.preadv(self.fd, [memory[done:]], offset + done)
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

    def sample(self) -> str:
        """A digest of the file's size and of blocks from its beginning to its end: of all, if it is small.

        Raises:
            CheckpointError: It cannot be read.
        """
        nbytes = os.fstat(self.fd).st_size
        digest, block = hashlib.blake2b(str(nbytes).encode(), digest_size=16), bytearray(_SAMPLE_NBYTES)
        last = max(0, nbytes - _SAMPLE_NBYTES)
        for offset in sorted({last * number // (_SAMPLES - 1) for number in range(_SAMPLES)}):
            taken = memoryview(block)[: nbytes - offset]
            self.read_bytes(offset, taken)
            digest.update(taken)
        return digest.hexdigest()

    def read_ahead(self, offset: int) -> None:
        """Ask the kernel for the bytes from ``offset`` on; not every file system takes the hint."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(self.fd, offset, _AHEAD_NBYTES, os.POSIX_FADV_WILLNEED)


class TensorFile(ReadableFile):
    """A safetensors file, open for reading.

    Attributes:
        tensors: Tensors by key, in the order of their bytes.

    Raises:
        CheckpointError: It cannot be read, or is not what the format demands.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> dict[str, "FileTensor"]:
        """Every tensor's type, shape and place; see [Note: untrusted files]."""
        try:
            # By descriptor, so that it is the file which was found to be a regular one.
            with safe_open(f"/proc/self/fd/{self.fd}", framework="numpy") as file:
                found = []
                for key in file.offset_keys():
                    given = file.get_slice(key)
                    shape = torch.Size(given.get_shape())
                    found.append((key, given.get_dtype(), shape, shape.numel()))
        except Exception as error:  # SafetensorError, and those of shapes beyond 64 bits
            size = os.fstat(self.fd).st_size
            raise CheckpointError(
                f"{self.path} ({size} bytes) is not a valid safetensors file: {str(error)[:300]}. Download "
                "or copy it again"
            ) from error
        prefix = bytearray(8)
        self.read_bytes(0, memoryview(prefix))
        header = bytearray(int.from_bytes(prefix, "little"))
        self.read_bytes(8, memoryview(header))
        parse_json_object(header, f"the header of {self.path}")
        offset, tensors = 8 + len(header), {}
        for key, name, shape, numel in found:
            if name not in DTYPES:
                raise CheckpointError(f"{self.path}: {key!r} has dtype {name}; known are {', '.join(DTYPES)}")
            tensors[key] = FileTensor(self, DTYPES[name], shape, offset)
            offset += numel * DTYPES[name].itemsize
        return tensors


class FileTensor:
    """A tensor whose values lie in a file as they are; see :class:`Stored`.

    Attributes:
        offset: The offset of its first byte in the file.
    """

    __slots__ = ("_file", "dtype", "offset", "shape")

    def __init__(self, file: ReadableFile, dtype: torch.dtype, shape: torch.Size, offset: int) -> None:
        self._file, self.dtype, self.shape, self.offset = file, dtype, shape, offset

    def fill(self, start: int, out: Tensor, view: View | None = None) -> None:
        """See :class:`Stored`.

        Args:
            view: Gives the bytes of :meth:`ranges`, on ``out``'s device; None: they are read from the file.
        """
        if view is not None:
            out.copy_(self.view(start, len(out), view))
            return
        offset = self.offset + start * self.dtype.itemsize
        if self.dtype == out.dtype:
            self._file.read(offset, out)
        else:
            raw = torch.empty(min(len(out), _PIECE_NUMEL), dtype=self.dtype, device="cpu")
            for part in torch.split(out, _PIECE_NUMEL):
                piece = raw[: len(part)]
                self._file.read(offset, piece)
                part.copy_(piece)
                offset += piece.nbytes
        self._file.read_ahead(self.offset + (start + len(out)) * self.dtype.itemsize)

    def view(self, start: int, numel: int, view: View) -> Tensor:
        """Elements from ``start`` on, ``(numel,)``, where ``view`` has their bytes."""
        itemsize = self.dtype.itemsize
        raw = view(self._file, self.offset + start * itemsize, numel * itemsize)
        if raw.storage_offset() % itemsize:  # files of other writers may have any offset
            raw = raw.clone()
        return raw.view(self.dtype)

    def ranges(self, start: int, numel: int) -> Iterable[ByteRange]:
        """The bytes that :meth:`fill` reads for ``numel`` elements from ``start`` on."""
        itemsize = self.dtype.itemsize
        yield ByteRange(self._file, self.offset + start * itemsize, numel * itemsize)


class MemoryTensor:
    """A tensor that is mapped or held; see :class:`Stored`."""

    __slots__ = ("_tensor", "dtype", "shape")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def fill(self, start: int, out: Tensor) -> None:
        out.copy_(self._tensor.reshape(-1)[start : start + len(out)])  # a copy only where it is strided


def _unpickle(path: Path) -> dict[str, Stored]:
    """See [Note: pickled weights]."""
    advice = (
        "Convert it once: load it with AutoModel.from_pretrained(DIR) where you trust it, and save it with "
        "save_pretrained(NEW_DIR), which writes safetensors"
    )
    try:
        os.close(open_regular(path))
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of any type, when the file has anything in it
        raise CheckpointError(
            f"{path} cannot be read as plain tensors: {first_line(error)}. {advice}"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(each, Tensor) for each in loaded.values()):
        raise CheckpointError(f"{path} is not a dictionary of tensors. {advice}")
    for key, tensor in loaded.items():
        if not isinstance(key, str):
            raise CheckpointError(
                f"{path} has the key {repr(key)[:100]}; wanted the name of a parameter. {advice}"
            )
        if tensor.layout != torch.strided or not tensor.is_cpu or tensor.dtype not in DTYPES.values():
            kind = f"{tensor.device.type}, {tensor.layout}, {tensor.dtype}".replace("torch.", "")
            raise CheckpointError(
                f"{path}: {key[:200]!r} is a tensor without plain values ({kind}). {advice}"
            )
    return {key: MemoryTensor(tensor) for key, tensor in loaded.items()}


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise what the system says of ``path`` as a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file ``path``.

    Raises:
        CheckpointError: It cannot be read, is too long, or is something else.
    """
    with readable(path):
        raw = read_file(path, _MOST_JSON_NBYTES)
    return parse_json_object(raw, str(path))


def parse_json_object(raw: bytes | bytearray, where: str) -> dict[str, Any]:
    """``raw`` as a JSON object whose keys are all different.

    Raises:
        CheckpointError: It is not one.
    """
    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not a JSON object: {str(error)[:200]}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where} is not a JSON object: {repr(parsed)[:100]}")
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise ValueError(f"{twice[:100]!r} stands there twice")
    return found
