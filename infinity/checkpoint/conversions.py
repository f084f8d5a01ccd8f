"""Conversions of transformers without values: which stored elements make which tensor, in both directions.

[Note: conversions as byte ranges]
transformers renames and reshapes tensors on load: experts of a layer are stacked into one parameter,
a fused matrix is cut into query, key and value. Its operations are run once on stand-ins. Their result
says, part by part, which elements of which stored tensors follow each other in the parameter, so any
range of it can be read without the rest. An operation that takes elements apart (a transposed last
dimension), or does arithmetic, raises :class:`UntraceableError`.

[Note: two traces]
transformers converts weights back when it saves them: a Mixtral's packed experts become one tensor per
expert again. That conversion is run without values, too. First on tensors of the meta device that remember
what they were made of: this gives keys, shapes, and which tensors are converted together. Then, group by
group, on the stand-ins above: what is only cut, stacked or renamed can be streamed from any shard. What
remains (a transposed matrix) is converted with its values, as soon as its group's members are there.
"""

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from infinity.checkpoint.directory import MemoryTensor, Stored
from infinity.checkpoint.writer import TensorSpec
from infinity.core.errors import CheckpointError

Source = TypeVar("Source")

#: With more parts than this the memory is not worth it: the parameter is converted as a whole.
MOST_PARTS = 2**18


def is_transformers(model: nn.Module) -> bool:
    """Return whether transformers knows how to load and save ``model``."""
    transformers: Any = sys.modules.get("transformers")  # a program with such a model has imported it
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


class UntraceableError(Exception):
    """An operation does more than put runs of elements in another order."""


class Part(NamedTuple, Generic[Source]):
    """``numel`` elements from ``start`` on are those of ``source`` from ``offset`` on."""

    start: int
    source: Source
    offset: int
    numel: int


class Traced:
    """A tensor of a shape, as parts of stored tensors.

    Args:
        shape: The shape of the tensor.
        parts: Parts in order, without gaps, from element 0 to the last.
    """

    def __init__(self, shape: Sequence[int], parts: list[Part[Stored]]) -> None:
        self.shape, self.parts = torch.Size(shape), parts

    @classmethod
    def whole(cls, source: Stored) -> "Traced":
        """Return all of ``source``, in its own shape."""
        return cls(source.shape, [Part(0, source, 0, source.shape.numel())])

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of the stored tensors."""
        return {part.source.dtype for part in self.parts}

    def fill(self, start: int, out: Tensor) -> None:
        """See :class:`infinity.checkpoint.directory.Stored`."""
        for part in self.cut(start, len(out)):
            part.source.fill(part.offset, out[part.start : part.start + part.numel])

    def cut(self, start: int, numel: int) -> Iterable[Part[Stored]]:
        """The parts of ``numel`` flat elements from ``start`` on, counted from there."""
        at = bisect_right(self.parts, start, key=lambda part: part.start) - 1
        stop = start + numel
        while start < stop:
            part = self.parts[at]
            taken = min(stop, part.start + part.numel) - start
            if taken:
                yield Part(start - stop + numel, part.source, part.offset + start - part.start, taken)
            start, at = start + taken, at + 1

    # --- what conversions call ---------------------------------------------------------------

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = _OPERATIONS.get(func)
        if operation is None:
            raise UntraceableError(getattr(func, "__name__", str(func)))
        return operation(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        raise UntraceableError(name)

    def __getitem__(self, index: Any) -> "Traced":
        if index is not Ellipsis:
            raise UntraceableError("indexing")
        return self

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def contiguous(self) -> "Traced":
        return self

    def reshape(self, *shape: Any) -> "Traced":
        sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        if -1 in sizes:
            sizes[sizes.index(-1)] = self.numel() // -math.prod(sizes)
        if math.prod(sizes) != self.numel():
            raise ValueError(f"a tensor of shape {tuple(self.shape)} has no shape {tuple(sizes)}")
        return Traced(sizes, self.parts)

    view = reshape

    def squeeze(self, dim: int) -> "Traced":
        sizes = list(self.shape)
        if sizes[dim] == 1:
            del sizes[dim]
        return Traced(sizes, self.parts)

    def unsqueeze(self, dim: int) -> "Traced":
        sizes = list(self.shape)
        sizes.insert(dim % (self.ndim + 1), 1)
        return Traced(sizes, self.parts)

    def chunk(self, chunks: int, dim: int = 0) -> tuple["Traced", ...]:
        return self.split(-(-self.shape[dim] // chunks), dim)

    def split(self, sizes: Any, dim: int = 0) -> tuple["Traced", ...]:
        dim, total = dim % self.ndim, self.shape[dim]
        if isinstance(sizes, int):
            sizes = [min(sizes, total - begin) for begin in range(0, total, sizes)]
        if sum(sizes) != total:
            raise ValueError(f"dimension {dim} of {tuple(self.shape)} cannot be split into {sizes}")
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(self._narrow(dim, begin, size) for begin, size in zip(begins, sizes, strict=True))

    def _narrow(self, dim: int, begin: int, size: int) -> "Traced":
        outer, width = math.prod(self.shape[:dim]), math.prod(self.shape[dim + 1 :])
        step = self.shape[dim] * width
        places = ((o * step + begin * width, size * width) for o in range(outer))
        return Traced(
            (*self.shape[:dim], size, *self.shape[dim + 1 :]), _joined((self, *at) for at in places)
        )

    def transpose(self, dim0: int, dim1: int) -> "Traced":
        low, high = sorted((dim0 % self.ndim, dim1 % self.ndim))
        if high == self.ndim - 1 and low != high:
            raise UntraceableError("the last dimension is transposed")
        order = list(range(high + 1))
        order[low], order[high] = high, low
        inner = math.prod(self.shape[high + 1 :])
        strides = [math.prod(self.shape[d + 1 :]) for d in range(high + 1)]
        starts = [0]
        for d in order:
            _check_count(len(starts) * self.shape[d])
            starts = [start + i * strides[d] for start in starts for i in range(self.shape[d])]
        sizes = [self.shape[d] for d in order]
        return Traced((*sizes, *self.shape[high + 1 :]), _joined((self, start, inner) for start in starts))


def _cat(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    first = tensors[0].shape
    dim %= len(first)
    for other in tensors:
        if other.shape[:dim] != first[:dim] or other.shape[dim + 1 :] != first[dim + 1 :]:
            shapes = ", ".join(str(tuple(each.shape)) for each in tensors)
            raise ValueError(f"tensors of shapes {shapes} cannot be joined along dimension {dim}")
    widths = [math.prod(each.shape[dim:]) for each in tensors]
    outer = math.prod(first[:dim])
    ranges = ((each, o * w, w) for o in range(outer) for each, w in zip(tensors, widths, strict=True))
    length = sum(each.shape[dim] for each in tensors)
    return Traced((*first[:dim], length, *first[dim + 1 :]), _joined(ranges))


def _stack(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    return _cat([each.unsqueeze(dim) for each in tensors], dim)


def _joined(ranges: Iterable[tuple[Traced, int, int]]) -> list[Part[Stored]]:
    """The parts of ranges (a tensor, its first element, a number of elements) laid end to end."""
    parts: list[Part[Stored]] = []
    at = 0
    for tensor, start, numel in ranges:
        for part in tensor.cut(start, numel):
            last = parts[-1] if parts else None
            if last and last.source is part.source and last.offset + last.numel == part.offset:
                parts[-1] = last._replace(numel=last.numel + part.numel)
            else:
                parts.append(part._replace(start=at))
            at += part.numel
        _check_count(len(parts))
    return parts


def _check_count(parts: int) -> None:
    if parts > MOST_PARTS:
        raise UntraceableError(f"more than {MOST_PARTS} parts")


_OPERATIONS: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.concat: _cat,
    torch.stack: _stack,
    torch.chunk: Traced.chunk,
    torch.split: Traced.split,
    torch.reshape: Traced.reshape,
    torch.squeeze: Traced.squeeze,
    torch.unsqueeze: Traced.unsqueeze,
    torch.transpose: Traced.transpose,
}


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of the directory.

    Attributes:
        sources: The model's own names of the tensors that are converted together with those of this one.
        parts: The places of its values, in order, by the model's own names; None: only the conversion can
            say.
    """

    spec: TensorSpec
    sources: frozenset[str]
    parts: tuple[Part[str], ...] | None


def saved_tensors(model: nn.Module, named: Mapping[str, Tensor]) -> list[SavedTensor]:
    """The tensors that a directory of ``model`` holds, without values.

    Args:
        named: Parameters and persistent buffers under all their names.

    Raises:
        CheckpointError: Weights are shared in a way that the model does not declare.
    """
    if hasattr(model, "peft_config"):
        raise CheckpointError(
            f"{type(model).__name__} has adapters, and export writes whole models; save the adapters alone "
            "with infinity.save_lora"
        )
    if not is_transformers(model):
        first: dict[int, str] = {}
        for name, tensor in named.items():
            first.setdefault(id(tensor), name)
        return [_as_it_is(_spec(name, named[name]), name) for name in first.values()]
    traced = {name: _OriginTensor.of(name, named[name]) for name in _without_aliases(model, named)}
    own = {id(tensor) for tensor in traced.values()}
    saved: list[SavedTensor] = []
    conversions: list[tuple[frozenset[str], list[TensorSpec]]] = []
    for key, value in _reverted(model, traced).items():
        if id(value) in own:
            [name] = value.sources
            saved.append(_as_it_is(_spec(key, value), name))
        else:
            _join(conversions, value.sources, _spec(key, value))
    for sources, specs in conversions:
        saved += _located(model, {name: named[name] for name in sorted(sources)}, specs)
    return saved


def converted(
    model: nn.Module, values: Mapping[str, Tensor], wanted: Iterable[TensorSpec]
) -> dict[str, Tensor]:
    """Convert a group of tensors as they are saved.

    Args:
        values: The group, by the model's own names.
        wanted: The tensors that the plan expects.

    Raises:
        CheckpointError: The conversion gives other ones.
    """
    result = _reverted(model, dict(values))
    got = {key: _spec(key, value) for key, value in result.items()}
    if got != {spec.key: spec for spec in wanted}:
        raise CheckpointError(
            f"{', '.join(values)}: transformers converts them to {', '.join(got)} by themselves, but to "
            f"{', '.join(spec.key for spec in wanted)} beside the model's other weights; export cannot "
            "stream such a conversion. Save with model.save_pretrained, which needs memory for all weights"
        )
    return result


def _as_it_is(spec: TensorSpec, name: str) -> SavedTensor:
    numel = torch.Size(spec.shape).numel()
    return SavedTensor(spec, frozenset([name]), (Part(0, name, 0, numel),))


def _join(
    conversions: list[tuple[frozenset[str], list[TensorSpec]]], sources: frozenset[str], spec: TensorSpec
) -> None:
    """Add a tensor made of ``sources`` to the conversion that shares some of them."""
    specs = [spec]
    for other in [other for other in conversions if other[0] & sources]:
        conversions.remove(other)
        sources, specs = sources | other[0], other[1] + specs
    conversions.append((sources, specs))


def _located(model: nn.Module, named: Mapping[str, Tensor], specs: list[TensorSpec]) -> list[SavedTensor]:
    """The tensors of one conversion, with the places of their values where they can be found."""
    parts: dict[str, tuple[Part[str], ...]] = {}
    sources = {name: MemoryTensor(tensor) for name, tensor in named.items()}
    names = {id(source): name for name, source in sources.items()}
    try:
        reverted = _reverted(model, {name: Traced.whole(source) for name, source in sources.items()})
        for key, value in reverted.items():
            if value.dtypes == {spec.dtype for spec in specs if spec.key == key}:
                parts[key] = tuple(part._replace(source=names[id(part.source)]) for part in value.parts)
    except Exception:  # whatever transformers does there, stand-ins cannot
        parts = {}
    placed = sum(part.numel for each in parts.values() for part in each)
    whole = parts.keys() == {spec.key for spec in specs} and placed == sum(t.numel() for t in named.values())
    return [SavedTensor(spec, frozenset(named), parts[spec.key] if whole else None) for spec in specs]


class _OriginTensor(Tensor):
    """A tensor of the meta device that knows which named tensors it was made of."""

    sources: frozenset[str]

    @classmethod
    def of(cls, name: str, like: Tensor) -> "_OriginTensor":
        traced = torch.empty(like.shape, dtype=like.dtype, device="meta").as_subclass(cls)
        traced.sources = frozenset([name])
        return traced

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        used = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        for leaf in tree_leaves(result):
            if isinstance(leaf, cls) and not any(leaf is known for known in used):
                leaf.sources = frozenset().union(*(known.sources for known in used))
        return result


def _spec(key: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(key, tensor.dtype, tuple(tensor.shape))


def _without_aliases(model: Any, named: Mapping[str, Tensor]) -> Iterable[str]:
    """The names under which a transformers model saves its tensors: of tied weights one."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = set(model._keys_to_ignore_on_save or ())
    stand_ins = {id(tensor): torch.empty(1, device="cpu") for tensor in named.values()}
    alike = {name: stand_ins[id(tensor)] for name, tensor in named.items() if name not in ignored}
    try:
        kept: dict[str, Tensor] = remove_tied_weights_from_state_dict(alike, model)
    except RuntimeError as error:
        raise CheckpointError(str(error)) from error
    return kept


def _reverted(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    from transformers.core_model_loading import revert_weight_conversion

    result: dict[str, Any] = revert_weight_conversion(model, state)
    return result
