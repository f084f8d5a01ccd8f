"""Reads checkpoint directories: which key is in which file, and ranges of each tensor's elements.

[Note: untrusted files]
Nothing in a directory is believed before it was checked. An index may name only files beside it; a key is
refused that the named file does not hold, or that two files hold. Only regular files are opened; symbolic
links are followed, as Hugging Face's cache is made of them. safetensors checks its headers: tensors lie
without gap or overlap to the end of the file, each with the bytes of its shape. Pickled weights are refused.

[Note: byte ranges]
The safetensors library maps files and gives whole tensors; a load reads ranges, once, into memory of its own.
"""

import contextlib
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Self, TypeAlias, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from infinity.core.errors import CheckpointError, library_errors
from infinity.core.files import open_regular, read_file
from infinity.core.nbytes import Piece
from infinity.partition.divided import Part

SAFETENSORS = "model.safetensors"
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

#: Patterns of the files of a tokenizer or processor in a Hugging Face directory; code (``*.py``) is left out.
TOKENIZER_FILES = (
    "tokenizer*.json", "tokenizer*.model", "special_tokens_map.json", "added_tokens.json",
    "vocab*.json", "vocab*.txt", "merges.txt", "*.model", "*.spm", "*.tiktoken", "bpe.codes",
    "normalizer.json", "chat_template*.json", "chat_template*.jinja", "additional_chat_templates/*.jinja",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
#: The longest JSON that is read, which is the format's limit for a header (bytes).
_MOST_JSON_NBYTES = 100_000_000
#: How far the kernel is asked to read ahead (bytes).
_AHEAD_NBYTES = 16 * 2**20
#: Elements that are converted or compared at a time.
_PIECE_NUMEL = 2**18
#: Blocks of a file that :meth:`ReadableFile.sample` reads, and their size (bytes).
_SAMPLES, _SAMPLE_NBYTES = 64, 4096

Made = TypeVar("Made")
#: Returns bytes of a file that are in memory, by file number, offset and count: ``(n,)`` uint8, any device.
View: TypeAlias = Callable[[int, int, int], Tensor]


class Stored:
    """Represents a tensor of a checkpoint; a CheckpointError says that a file ends early or a disk fails."""

    shape: torch.Size
    dtype: torch.dtype

    def fill(self, start: int, out: Tensor, view: View | None = None) -> None:
        """Fill ``out``, ``(n,)``, contiguous, with elements from ``start`` on, cast to its dtype; blocks.

        ``view`` returns the bytes of :meth:`ranges`, on ``out``'s device; None: they are read from the files.
        """
        raise NotImplementedError

    def read(self, start: int = 0, numel: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return elements from ``start`` on, ``(numel,)``, on the CPU; by default all, as they are stored."""
        count = self.shape.numel() - start if numel is None else numel
        out = torch.empty(count, dtype=dtype or self.dtype, device="cpu")
        self.fill(start, out)
        return out

    def whole(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor in its shape, on the CPU; by default as it is stored."""
        return self.read(dtype=dtype).view(self.shape)

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the tensor piece by piece, in its dtype: the first element, and the values."""
        for start in range(0, self.shape.numel(), _PIECE_NUMEL):
            yield start, self.read(start, min(_PIECE_NUMEL, self.shape.numel() - start))

    def equals(self, other: "Stored") -> bool:
        """Return whether ``other`` has the same shape, dtype and bits; reads both."""
        return (self.shape, self.dtype) == (other.shape, other.dtype) and all(
            torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
            for (_, mine), (_, theirs) in zip(self.pieces(), other.pieces(), strict=True)
        )

    def ranges(self, start: int, numel: int) -> Iterable[Piece]:
        """Return the bytes that :meth:`fill` reads, where they lie in safetensors files."""
        raise NotImplementedError

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Dtypes of what it is made of."""
        return {self.dtype}

    @property
    def scratch_nbytes(self) -> int:
        """The most memory of an accelerator that :meth:`fill` takes beside what it is given (bytes)."""
        return 0

    def compile_ahead(self, device: torch.device, say: Callable[[str], object]) -> None:
        """Begin to compile what makes its values on ``device``; ``say`` is called with why that fails."""


class Latest(Generic[Made]):
    """Keeps what was made last, for whoever reads it piece by piece; shared by all that take turns."""

    def __init__(self) -> None:
        self._made: dict[object, Made] = {}

    def get(self, key: object, make: Callable[[], Made]) -> Made:
        if key not in self._made:
            self._made.clear()  # first: memory holds one
            self._made[key] = make()
        return self._made[key]


class StoredTensors(dict[str, Stored]):
    """Maps keys to a directory's tensors and owns its files; a CheckpointError says what is damaged."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self._opened = path, contextlib.ExitStack()
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Close the files; may be called twice."""
        self.clear()
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Checkpoint(StoredTensors):
    """Opens a directory with ``model.safetensors``, or an index of such files."""

    def _open(self) -> None:
        self.files: list[TensorFile] = []  # open safetensors files, by number
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path} is not a directory; give the one with config.json and {SAFETENSORS}, as "
                "`hf download MODEL` prints it or save_pretrained wrote it"
            )
        single, index = self.path / SAFETENSORS, self.path / (SAFETENSORS + INDEX)
        if single.exists():
            self._add(SAFETENSORS, (), index.name)
        elif index.exists():
            for name, keys in _files_of_index(index).items():
                self._add(name, keys, index.name)
        elif pickled := sorted(path.name for path in self.path.glob("pytorch_model*.bin")):
            raise CheckpointError(
                f"{self.path} holds pickled weights ({pickled[0]}), which are not read. If you trust them, "
                f"{SAFETENSORS} is written beside them: import transformers; "
                "kind = transformers.AutoConfig.from_pretrained(DIR).architectures[0]; "
                "getattr(transformers, kind).from_pretrained(DIR, dtype='auto').save_pretrained(DIR)"
            )
        else:
            raise CheckpointError(
                f"{self.path} holds no weights; wanted {SAFETENSORS} or {SAFETENSORS}{INDEX}"
            )

    def _add(self, name: str, keys: Iterable[str], index: str) -> None:
        path = self.path / name
        self.files.append(TensorFile(path, len(self.files)))
        self._opened.callback(self.files[-1].close)
        held = self.files[-1].tensors
        if lost := sorted(set(keys) - set(held)):
            raise CheckpointError(f"{path} does not hold what {index} says: {', '.join(lost)}")
        if twice := sorted(set(held) & set(self)):
            raise CheckpointError(f"{path} holds keys that another file holds, too: {', '.join(twice)}")
        self.update(held)


def _files_of_index(index: Path) -> dict[str, list[str]]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: wanted a weight_map from keys to files")
    files: dict[str, list[str]] = {}
    for key, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or any(c in name for c in "/\\\0"):
            raise CheckpointError(
                f"{index} names the file {name!r}; wanted one that lies beside it and ends with .safetensors"
            )
        files.setdefault(name, []).append(key)
    return files


class ReadableFile:
    """Owns a regular file, open for reading; a CheckpointError says that it ends early or the disk fails."""

    def __init__(self, path: Path, number: int = 0) -> None:
        self.path, self.number, self.nbytes_read = path, number, 0  # place in a checkpoint, bytes of tensors
        with library_errors(CheckpointError, str(path)):
            self.fd = open_regular(path)

    def close(self) -> None:
        os.close(self.fd)

    @property
    def nbytes(self) -> int:
        return os.fstat(self.fd).st_size

    def read(self, offset: int, values: Tensor) -> None:
        """Fill a contiguous tensor with the bytes from ``offset`` on; blocking."""
        flat: Any = values.view(torch.uint8).numpy()
        self.read_into(offset, memoryview(flat))
        self.nbytes_read += values.nbytes

    def read_bytes(self, offset: int, nbytes: int) -> bytearray:
        raw = bytearray(nbytes)
        self.read_into(offset, memoryview(raw))
        return raw

    def read_into(self, offset: int, memory: memoryview) -> None:
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
        """Return a digest of the file's size and of evenly spaced blocks: of all bytes, if it is small."""
        nbytes = self.nbytes
        digest, last = hashlib.blake2b(str(nbytes).encode(), digest_size=16), max(0, nbytes - _SAMPLE_NBYTES)
        for offset in sorted({last * number // (_SAMPLES - 1) for number in range(_SAMPLES)}):
            digest.update(self.read_bytes(offset, min(_SAMPLE_NBYTES, nbytes - offset)))
        return digest.hexdigest()


class TensorFile(ReadableFile):
    """Owns an open safetensors file."""

    def __init__(self, path: Path, number: int = 0) -> None:
        super().__init__(path, number)
        self.tensors: dict[str, FileTensor] = {}  # in the order of their bytes
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> None:
        what = f"{self.path} ({self.nbytes} bytes) is not a valid safetensors file: download or copy it again"
        # By descriptor, so that it is the file which was found to be a regular one.
        own = f"/proc/self/fd/{self.fd}"
        with library_errors(CheckpointError, what), safe_open(own, framework="numpy") as file:
            slices = [(key, file.get_slice(key)) for key in file.offset_keys()]
            found = [
                (key, each.get_dtype(), shape := torch.Size(each.get_shape()), shape.numel())
                for key, each in slices
            ]
        length = int.from_bytes(self.read_bytes(0, 8), "little")
        self.header = bytes(self.read_bytes(0, 8 + length))  # everything before the first tensor
        offset = len(self.header)
        for key, name, shape, numel in found:
            if name not in DTYPES:
                raise CheckpointError(f"{self.path}: {key!r} has dtype {name}; known are {', '.join(DTYPES)}")
            self.tensors[key] = FileTensor(self, DTYPES[name], shape, offset)
            offset += numel * DTYPES[name].itemsize


class FileTensor(Stored):
    """Represents a tensor whose values lie in a file unchanged, from byte ``offset`` on."""

    def __init__(self, file: ReadableFile, dtype: torch.dtype, shape: torch.Size, offset: int) -> None:
        self._file, self.dtype, self.shape, self.offset = file, dtype, shape, offset

    def fill(self, start: int, out: Tensor, view: View | None = None) -> None:
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
        with contextlib.suppress(OSError):  # not every file system takes the hint
            stop = self.offset + (start + len(out)) * self.dtype.itemsize
            os.posix_fadvise(self._file.fd, stop, _AHEAD_NBYTES, os.POSIX_FADV_WILLNEED)

    def view(self, start: int, numel: int, view: View) -> Tensor:
        """Return elements from ``start`` on, ``(numel,)``, from the bytes that ``view`` has."""
        [piece] = self.ranges(start, numel)
        raw = view(piece.file, piece.offset, piece.nbytes)
        if raw.storage_offset() % self.dtype.itemsize:  # files of other writers may have any offset
            raw = raw.clone()
        return raw.view(self.dtype)

    def ranges(self, start: int, numel: int) -> list[Piece]:
        itemsize = self.dtype.itemsize
        return [Piece(self._file.number, self.offset + start * itemsize, numel * itemsize)]


class MemoryTensor(Stored):
    """Represents a stored tensor that is in memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def fill(self, start: int, out: Tensor, view: View | None = None) -> None:
        out.copy_(self._tensor.reshape(-1)[start : start + len(out)])  # a copy only where it is strided


class StoredPart(Stored):
    """Represents what this rank has of a tensor; where it has a little of each row, rows are read whole."""

    def __init__(self, stored: Stored, part: Part) -> None:
        self._stored, self._part = stored, part
        self.shape = torch.Size(part.sizes)

    @property
    def dtypes(self) -> set[torch.dtype]:
        return self._stored.dtypes

    def fill(self, start: int, out: Tensor, view: View | None = None) -> None:
        runs = [*self._part.runs(start, start + len(out))]
        done, first, held = 0, 0, out[:0]  # of the whole tensor, from element ``first`` on
        for begin, numel in runs:
            target = out[done : done + numel]
            done += numel
            if numel > _PIECE_NUMEL // 8:
                self._stored.fill(begin, target)
                continue
            if not begin + numel <= first + len(held):
                first, left = begin, sum(runs[-1]) - begin
                held = self._stored.read(first, min(_PIECE_NUMEL, left), out.dtype)
            target.copy_(held[begin - first :][:numel])


def misfits(sources: Mapping[str, tuple[str, Stored]]) -> list[str]:
    """Return what is missing, or has another shape, among tensors that are to be converted together.

    ``sources`` are by key, each with the pattern that it matches: for each expert there is one of a pattern.
    """
    kinds, found = dict[str, dict[str, str]](), list[str]()
    for key, (pattern, _) in sources.items():
        kinds.setdefault(pattern, {})[".".join(["", *re.findall(r"\.(\d+)\.", key)[-1:], ""])] = key
    every = dict.fromkeys(number for own in kinds.values() for number in own)
    for own in kinds.values():
        head, _, tail = next(key.rpartition(number) for number, key in own.items())
        found += [f"{head}{number}{tail} is missing" for number in every if number not in own]
        shapes = {key: tuple(sources[key][1].shape) for key in own.values()}
        usual = Counter(shapes.values()).most_common(1)[0][0]
        wrong = (key for key, shape in shapes.items() if shape != usual)
        found += [f"{key} has shape {shapes[key]}, others {usual}" for key in wrong]
    return found


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or raise a CheckpointError if it is too long or something else."""
    with library_errors(CheckpointError, str(path)):
        raw = read_file(path, _MOST_JSON_NBYTES)
    with library_errors(CheckpointError, f"{path} is not a JSON object"):
        parsed = json.loads(raw.decode("utf-8"))
        if not isinstance(parsed, dict):
            raise ValueError(repr(parsed)[:100])
    return parsed


def tokenizer_files(source: Path) -> list[Path]:
    """Return the files of a tokenizer or processor in ``source``; ``source`` itself if it is a file."""
    if source.is_file():
        return [source]
    return sorted({path for pattern in TOKENIZER_FILES for path in source.glob(pattern) if path.is_file()})
