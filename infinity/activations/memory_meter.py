"""How much memory a step's own tensors take at one time, counted as operators make them."""

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryMeter(TorchDispatchMode):
    """Inside ``with``, counts the bytes of storages that operators make and that still live.

    What was there before, and memory that no operator made (a unit's buffers), is not counted. Gradients
    that parameters keep can be left out at the end, as budgets for activations leave them out.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lock = threading.RLock()  # storages go on any thread
        self._known: dict[int, weakref.ref[Any]] = {}
        self._events: list[tuple[int, int]] = []  # a storage's number, and its bytes or minus these
        self._numbers: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        there = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if _counts(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if _counts(leaf) and _key(leaf) not in there:
                self._add(leaf.untyped_storage())
        return result

    def peak_nbytes(self, without: Sequence[Tensor] = ()) -> int:
        """The most bytes at one time; storages of ``without`` are left out."""
        with self._lock:
            left_out = {self._numbers.get(_key(tensor)) for tensor in without}
            now = peak = 0
            for number, nbytes in self._events:
                now += 0 if number in left_out else nbytes
                peak = max(peak, now)
            return peak

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        with self._lock:
            known = self._known.get(key)
            if known is not None and known() is storage:
                return
            number = len(self._events)
            self._numbers[key] = number
            self._known[key] = weakref.ref(storage, partial(self._gone, key, number, nbytes))
            self._events.append((number, nbytes))

    def _gone(self, key: int, number: int, nbytes: int, _: Any) -> None:
        with self._lock:
            self._events.append((number, -nbytes))
            if self._numbers.get(key) == number:
                del self._numbers[key], self._known[key]


def _counts(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
