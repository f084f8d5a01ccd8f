"""What a saved tensor is: a storage, a view of it, and a version.

[Note: identity]
An address is used again as soon as its memory is free, so identity is the storage object itself, which torch
keeps as long as the memory lives; we hold it weakly. Views and transposes share it.

[Note: versions]
Autograd refuses to read a saved tensor that was written in place since, but only where no hooks are. So
hooks must compare versions themselves, also after the bytes have left memory: a tensor without bytes that
shares the counter of writes stays behind. Writes that torch does not count (through ``.data``, numpy or a
kernel of one's own) reach the backward pass only while the storage is in memory.
"""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor


class Watch:
    """Tells whether a tensor was written in place since; holds none of its memory."""

    __slots__ = ("_counter", "_shape", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._version, self._shape = tensor._version, tensor.shape
        self._counter = tensor.detach()
        self._counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def check(self) -> None:
        """Nobody wrote it.

        Raises:
            RuntimeError: Somebody did.
        """
        check_version(self._counter, self._version, self._shape)


def check_version(counter: Tensor, version: int, shape: torch.Size | None = None) -> None:
    """A tensor of ``shape`` that shares ``counter``'s count of writes is as it was at ``version``.

    Raises:
        RuntimeError: It is not, as autograd says where no hooks are.
    """
    if counter._version != version:
        what = "" if counter.is_nested else f" {list(counter.shape if shape is None else shape)}"
        raise RuntimeError(
            "a tensor that the backward pass needs was modified by an inplace operation after it was saved: "
            f"{str(counter.dtype).removeprefix('torch.')}{what} is at version {counter._version}; "
            f"wanted version {version}. torch.autograd.set_detect_anomaly(True) shows the operator that "
            "saved it"
        )


class View:
    """How a saved tensor lies in its storage."""

    __slots__ = ("_dtype", "_offset", "_size", "_stride")

    def __init__(self, tensor: Tensor) -> None:
        self._dtype, self._offset = tensor.dtype, int(tensor.storage_offset())
        self._size, self._stride = tensor.size(), tensor.stride()

    def of(self, storage: torch.UntypedStorage, offset_nbytes: int) -> Tensor:
        """The tensor, whose storage's bytes begin ``offset_nbytes`` into ``storage``."""
        empty = torch.empty(0, dtype=self._dtype, device=storage.device)
        offset = self._offset + offset_nbytes // self._dtype.itemsize
        return empty.set_(storage, offset, self._size, self._stride)


def storages_of(tensors: Iterable[Tensor]) -> "weakref.WeakSet[torch.UntypedStorage]":
    """The storages of ``tensors``, as long as these live: see [Note: identity]."""
    return weakref.WeakSet(tensor.untyped_storage() for tensor in tensors if is_plain(tensor))


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is strided memory of its own kind, so that storage and view say all of it."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.device.type in ("cpu", "cuda")
    )
