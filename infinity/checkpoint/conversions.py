"""Traces which stored elements make which tensor in conversions of transformers, in both directions.

[Note: conversions as byte ranges]
transformers renames and reshapes tensors when it loads them (the experts of a layer are stacked into one
parameter, a fused matrix is cut into query, key and value), and back when it saves them. Its operations run
once on meta tensors inside a :class:`Trace`, which notes what every tensor is copied from. So any range of a
tensor can be read or written without the rest. Tensors that are computed, or copied element by element (a
transposed last dimension), have no parts: they are converted whole, with their values.
"""

import math
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infinity.checkpoint.directory import Stored
from infinity.checkpoint.writer import TensorSpec
from infinity.core.errors import CheckpointError

Source = TypeVar("Source")

#: A parameter with more parts is converted as a whole: a list of them would take too much memory.
MOST_PARTS = 2**18


def is_transformers(model: nn.Module) -> bool:
    transformers: Any = sys.modules.get("transformers")  # a program with such a model has imported it
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


class Part(NamedTuple, Generic[Source]):
    """Says that ``numel`` elements from ``start`` on are those of ``source`` from ``offset`` on."""

    start: int
    source: Source
    offset: int
    numel: int


class Traced:
    """Describes a tensor as parts of stored tensors, in order and without gaps."""

    def __init__(self, shape: Sequence[int], parts: list[Part[Stored]]) -> None:
        self.shape, self.parts = torch.Size(shape), parts

    @classmethod
    def whole(cls, source: Stored) -> "Traced":
        return cls(source.shape, [Part(0, source, 0, source.shape.numel())])

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {part.source.dtype for part in self.parts}

    def fill(self, start: int, out: Tensor) -> None:
        for part in cut(self.parts, start, len(out)):
            part.source.fill(part.offset, out[part.start : part.start + part.numel])


def cut(parts: Sequence[Part[Source]], start: int, numel: int) -> Iterator[Part[Source]]:
    """Yield the parts of ``numel`` flat elements from ``start`` on, counted from there."""
    at, first, stop = bisect_right(parts, start, key=lambda part: part.start) - 1, start, start + numel
    while start < stop:
        part = parts[at]
        taken = min(stop, part.start + part.numel) - start
        if taken:
            yield Part(start - first, part.source, part.offset + start - part.start, taken)
        start, at = start + taken, at + 1


class _Made(NamedTuple):
    """Records what a storage holds: ``parts`` are copied from ``sources``; None: they were computed."""

    storage: torch.UntypedStorage  # kept, so that no other one gets its address
    dtype: torch.dtype
    sources: frozenset[Any]
    parts: list[Part[Any]] | None


class Trace(TorchDispatchMode):
    """Records what tensors made inside, on the meta device, are copied from.

    Views share a storage, so where their elements lie in it follows from strides. Operators that copy
    (``cat``, ``stack``, ``clone``) make a storage of parts of others; all others compute.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, _Made] = {}  # by address of the storage

    def stand_in(self, source: object, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(torch.Size(shape), dtype=dtype, device="meta")
        self._note(tensor, frozenset([source]), [Part(0, source, 0, tensor.numel())])
        return tensor

    def sources(self, tensor: Tensor) -> frozenset[Any]:
        made = self._made.get(tensor.untyped_storage()._cdata)
        return frozenset() if made is None else made.sources

    def parts(self, tensor: Tensor) -> list[Part[Any]] | None:
        """Return the parts of ``tensor``, flat; None: it was computed, or has too many."""
        return self._copied([(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        used = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        mutable = func._schema.is_mutable
        for made in used if mutable else tree_leaves(result):
            is_view = not mutable and isinstance(made, Tensor) and self.sources(made)
            if isinstance(made, Tensor) and not is_view:
                sources = frozenset[Any]().union(*map(self.sources, used))
                copies = None if mutable else _copies(func, args, made)
                self._note(made, sources, None if copies is None else self._copied(copies))
        return result

    def _note(self, tensor: Tensor, sources: frozenset[Any], parts: list[Part[Any]] | None) -> None:
        storage = tensor.untyped_storage()
        self._made[storage._cdata] = _Made(storage, tensor.dtype, sources, parts)

    def _copied(self, copies: Iterable[tuple[Tensor, Tensor]]) -> list[Part[Any]] | None:
        """Return the parts of a storage into whose views (second) tensors (first) are copied."""
        ranges: list[tuple[int, list[Part[Any]], int, int]] = []
        for tensor, target in copies:
            made, runs = self._made.get(tensor.untyped_storage()._cdata), _runs(tensor, target)
            if made is None or made.parts is None or runs is None:
                return None
            if not tensor.dtype == target.dtype == made.dtype:  # a view of its bytes, or a cast
                return None
            (starts, places), numel = runs
            ranges += ((place, made.parts, start, numel) for place, start in zip(places, starts, strict=True))
        parts: list[Part[Any]] = []
        for place, others, start, numel in sorted(ranges, key=lambda each: each[0]):
            for part in cut(others, start, numel):
                last = parts[-1] if parts else None
                if last and last.source is part.source and last.offset + last.numel == part.offset:
                    parts[-1] = last._replace(numel=last.numel + part.numel)
                else:
                    parts.append(part._replace(start=place + part.start))
        return parts if len(parts) <= MOST_PARTS else None


def _copies(func: Any, args: Sequence[Any], out: Tensor) -> list[tuple[Tensor, Tensor]] | None:
    """Return the tensors that ``func`` copies unchanged, each with the view of ``out`` that it fills."""
    aten = torch.ops.aten
    if func is aten.clone.default:
        return [(args[0], out)]
    if func not in (aten.cat.default, aten.stack.default):
        return None
    tensors, dim = args[0], args[1] if len(args) > 1 else 0
    if func is aten.stack.default:
        tensors = [each.unsqueeze(dim) for each in tensors]
    return list(zip(tensors, torch.split(out, [each.shape[dim] for each in tensors], dim), strict=True))


def _runs(*views: Tensor) -> tuple[list[list[int]], int] | None:
    """Return where runs, contiguous in all views, begin in each storage (row-major), and their length.

    None: there are too many, or each is a single element.
    """
    shape, dim, numel = views[0].shape, views[0].ndim, 1
    while dim and all(shape[dim - 1] == 1 or view.stride(dim - 1) == numel for view in views):
        dim -= 1
        numel *= shape[dim]
    if math.prod(shape[:dim]) > MOST_PARTS or numel == 1 < shape.numel():
        return None
    starts = []
    for view in views:
        at = np.array([view.storage_offset()])
        for size, stride in zip(shape[:dim], view.stride(), strict=False):
            at = (at[:, None] + np.arange(size) * stride).reshape(-1)
        starts.append(at.tolist())
    return starts, numel


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """Describes one tensor of a saved directory."""

    spec: TensorSpec
    sources: frozenset[str]  # names of the model's tensors that are converted together with this one's
    parts: list[Part[str]] | None  # its values in the model's tensors; None: only conversion makes them


def saved_tensors(model: nn.Module, named: Mapping[str, Tensor]) -> list[SavedTensor]:
    """Return the tensors that a directory of ``model`` holds, without values.

    ``named`` are parameters and persistent buffers under all their names. Raises a CheckpointError if some
    are shared in a way that the model does not declare, or the model has adapters.
    """
    if hasattr(model, "peft_config"):
        raise CheckpointError(
            f"{type(model).__name__} has adapters, and export writes whole models; save the adapters alone "
            "with infinity.save_lora"
        )
    trace = Trace()
    names = _without_aliases(model, named)
    made = {name: trace.stand_in(name, named[name].shape, named[name].dtype) for name in names}
    if is_transformers(model):
        with trace:
            made = _reverted(model, made)
    together: dict[str, frozenset[str]] = {}  # what is converted with a tensor, itself among it
    for value in made.values():
        sources = trace.sources(value)
        sources = sources.union(*(together.get(name, ()) for name in sources))
        together.update(dict.fromkeys(sources, sources))
    saved = [
        SavedTensor(_spec(key, value), together[next(iter(trace.sources(value)))], trace.parts(value))
        for key, value in made.items()
    ]
    untraced = {item.sources for item in saved if item.parts is None}
    placed = Counter[frozenset[str]]()
    for item in saved:
        placed[item.sources] += sum(part.numel for part in item.parts or ())

    def is_streamed(names: frozenset[str]) -> bool:
        """Return whether every element has one place: spans of a unit's buffer must not overlap."""
        return names not in untraced and placed[names] == sum(named[name].numel() for name in names)

    return [item if is_streamed(item.sources) else replace(item, parts=None) for item in saved]


def converted(
    model: nn.Module, values: Mapping[str, Tensor], wanted: Iterable[TensorSpec]
) -> dict[str, Tensor]:
    """Convert tensors, given by the model's names, to those that are saved as ``wanted``."""
    result = _reverted(model, dict(values))
    got = {key: _spec(key, value) for key, value in result.items()}
    if got != {spec.key: spec for spec in wanted}:
        raise CheckpointError(
            f"{', '.join(values)}: transformers converts them to {', '.join(got)} by themselves, but to "
            f"{', '.join(spec.key for spec in wanted)} beside the model's other weights; export cannot "
            "stream such a conversion. Save with model.save_pretrained, which needs memory for all weights"
        )
    return result


def _spec(key: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(key, tensor.dtype, tuple(tensor.shape))


def _without_aliases(model: Any, named: Mapping[str, Tensor]) -> list[str]:
    """Return the names under which tensors are saved: one for each set of tied weights."""
    if not is_transformers(model):
        first: dict[int, str] = {}
        for name, tensor in named.items():
            first.setdefault(id(tensor), name)
        return list(first.values())
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = set(model._keys_to_ignore_on_save or ())
    stand_ins = {id(tensor): torch.empty(1, device="cpu") for tensor in named.values()}
    alike = {name: stand_ins[id(tensor)] for name, tensor in named.items() if name not in ignored}
    try:
        return list(remove_tied_weights_from_state_dict(alike, model))
    except RuntimeError as error:
        raise CheckpointError(str(error)) from error


def _reverted(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    from transformers.core_model_loading import revert_weight_conversion

    result: dict[str, Any] = revert_weight_conversion(model, state)
    return result
