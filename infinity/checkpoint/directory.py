"""The tensors of a checkpoint directory: which key is in which file, and ranges of their elements.

[Note: what an index may name]
Only files beside it. A name with a separator or of a directory is refused before anything is opened,
and so is a key that the named file does not hold, or that two files hold.

[Note: pickled weights]
``pytorch_model.bin`` is read by torch's restricted unpickler, which makes tensors and runs no code of
the file's, and mapped into memory rather than read as a whole.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from pickle import UnpicklingError
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from infinity.checkpoint.tensor_file import Entry, TensorFile, open_regular, read_json_object
from infinity.core.errors import CheckpointError

SAFETENSORS = "model.safetensors"
PICKLED = "pytorch_model.bin"
INDEX = ".index.json"


class Stored(Protocol):
    """A tensor of a checkpoint."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def fill(self, start: int, out: Tensor) -> None:
        """Put flat elements from ``start`` on into ``out``, ``(n,)``, cast to its dtype; blocking."""
        ...


class Checkpoint(Mapping[str, Stored]):
    """Every tensor of a directory by key; close it when they are read.

    Args:
        path: A directory with ``model.safetensors`` or ``pytorch_model.bin``, or the index of several.

    Raises:
        CheckpointError: There is none of them, or one is damaged; says which and how.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pickled = False
        self._stack = ExitStack()
        self._files: list[TensorFile] = []
        self._tensors: dict[str, Stored] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def __getitem__(self, key: str) -> Stored:
        return self._tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the files back; may be called twice."""
        self._tensors = {}
        self._stack.close()

    @property
    def nbytes_read(self) -> int:
        """Bytes of tensors that were read from safetensors files by this process."""
        return sum(file.nbytes_read for file in self._files)

    def _open(self) -> None:
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path} is not a directory; give the one with config.json and {SAFETENSORS}, as "
                "`hf download MODEL` prints it or save_pretrained wrote it"
            )
        for single in (SAFETENSORS, PICKLED):
            self.pickled = single == PICKLED
            index = self.path / (single + INDEX)
            if (self.path / single).exists():
                return self._take(single, self._open_file(single))
            if index.exists():
                return self._open_index(index)
        raise CheckpointError(
            f"{self.path} holds no weights; wanted {SAFETENSORS} or {SAFETENSORS}{INDEX} "
            f"(or {PICKLED}, or its index)"
        )

    def _open_index(self, index: Path) -> None:
        """The files that an index names; see [Note: what an index may name]."""
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: wanted a weight_map from keys to files")
        files: dict[str, list[str]] = {}
        for key, name in weight_map.items():
            files.setdefault(self._shard_name(name, index), []).append(key)
        for name, keys in files.items():
            held = self._open_file(name)
            lost = sorted(set(keys) - set(held))
            if lost:
                raise CheckpointError(
                    f"{self.path / name} does not hold what {index.name} says: {', '.join(lost)}"
                )
            self._take(name, held)

    def _shard_name(self, name: Any, index: Path) -> str:
        suffix = Path(PICKLED if self.pickled else SAFETENSORS).suffix
        if not isinstance(name, str) or not name.endswith(suffix) or any(c in name for c in "/\\\0"):
            raise CheckpointError(
                f"{index} names the file {name!r}; wanted one that lies beside it and ends with {suffix}"
            )
        return name

    def _take(self, name: str, held: Mapping[str, Stored]) -> None:
        twice = sorted(set(held) & set(self._tensors))
        if twice:
            raise CheckpointError(
                f"{self.path / name} holds keys that another file holds, too: {', '.join(twice)}"
            )
        self._tensors |= held

    def _open_file(self, name: str) -> Mapping[str, Stored]:
        if self.pickled:
            return _unpickle(self.path / name)
        file = self._stack.enter_context(TensorFile(self.path / name))
        self._files.append(file)
        return {key: InFile(file, entry) for key, entry in file.entries.items()}


class InFile:
    """A tensor in a safetensors file; see :class:`Stored`."""

    __slots__ = ("_entry", "_file", "dtype", "shape")

    def __init__(self, file: TensorFile, entry: Entry) -> None:
        self._file, self._entry = file, entry
        self.shape, self.dtype = entry.shape, entry.dtype

    def fill(self, start: int, out: Tensor) -> None:
        self._file.fill(self._entry, start, out)


class InMemory:
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
    except (UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{path} cannot be read as plain tensors: {reason[0][:200]}. {advice}"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(each, Tensor) for each in loaded.values()):
        raise CheckpointError(f"{path} is not a dictionary of tensors. {advice}")
    return {str(key): InMemory(tensor) for key, tensor in loaded.items()}
