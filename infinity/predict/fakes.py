"""Torch's fake tensors, which have no values, with the results of operators cached by call.

A model has some dozens of different calls, whatever the number of its layers. Torch's own mode runs the first
one; later calls with equal arguments only make a result of the same description.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class _Result(NamedTuple):
    """Describes a tensor that an operator returns."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    of: int | None  # the tensor among the arguments whose storage it has; None: it has its own


class FakeTensors(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Runs operators on tensors without values on the CPU."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=False)
        self._known: dict[object, tuple[type | None, tuple[_Result, ...]] | None] = {}

    def dispatch(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        tensors = list[Tensor]()
        try:
            key = func, _facts(args, tensors), _facts(tuple((kwargs or {}).items()), tensors)
            known = self._known.get(key)
        except TypeError:  # something that has no hash
            return super().dispatch(func, types, args, kwargs or {})
        if known is None:
            if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
                result: Any = _grouped_product(*args, **(kwargs or {}))
            else:
                result = super().dispatch(func, types, args, kwargs or {})
            if key not in self._known:
                self._known[key] = None if func._schema.is_mutable else _described(result, tensors)
            return result
        kind, described = known
        made = [self._make(each, tensors) for each in described]
        return made[0] if kind is None else made if kind is list else tuple(made)

    def _make(self, result: _Result, given: Sequence[Tensor]) -> Tensor:
        shape, stride, dtype, offset, of = result
        if of is None:
            made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            made = torch.empty(0, dtype=dtype, device="meta")
            made.set_(given[of].untyped_storage(), offset, shape, stride)
        return FakeTensor(self, made, torch.device("cpu"))


def _grouped_product(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: object = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return a grouped product of any dtype; torch's own kernel for fake tensors knows bf16's alone."""
    groups = [len(a)] if a.dim() == 3 else [] if offs is None else [len(offs)]
    groups = groups if a.dim() == b.dim() else []  # else rows of one belong to matrices of the other
    return a.new_empty(*groups, a.shape[-2], b.shape[-1], dtype=out_dtype or a.dtype)


def _facts(value: Any, tensors: list[Tensor]) -> Any:
    """Return the part of an argument that a result depends on; append its tensors to ``tensors``."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.storage_offset(), type(value)
    if isinstance(value, tuple | list):
        return tuple([_facts(each, tensors) for each in value])
    return type(value), value


def _described(result: Any, given: Sequence[Tensor]) -> tuple[type | None, tuple[_Result, ...]] | None:
    """Return the description of a result; None: not all of its leaves, and of what was given, are fake."""
    leaves = result if isinstance(result, tuple | list) else [result]
    if not all(type(each) is FakeTensor and each.constant is None for each in (*leaves, *given)):
        return None
    storages = [each.untyped_storage()._cdata for each in given]
    found = []
    for leaf in leaves:
        storage = leaf.untyped_storage()._cdata
        of = storages.index(storage) if storage in storages else None
        found.append(_Result(leaf.shape, leaf.stride(), leaf.dtype, leaf.storage_offset(), of))
    return type(result) if leaves is result else None, tuple(found)
