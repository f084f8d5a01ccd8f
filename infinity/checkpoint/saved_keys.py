"""Under which keys a model is saved, and where the values of each key are in the model's own tensors.

[Note: two traces]
transformers renames and converts weights when it loads them, and converts them back when it saves: a
Mixtral's packed experts become one tensor per expert again. That conversion is run without values. First
on tensors of the meta device that remember what they were made of: this says keys, shapes, and which
tensors are converted together. Then, group by group, on stand-ins that know the place of every element
(:mod:`infinity.checkpoint.traced`): what is only cut, stacked or renamed can be streamed from any shard.
What remains (a transposed matrix) is converted with its values, as soon as its group's members are there.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from infinity.checkpoint.tensor_writer import TensorSpec
from infinity.checkpoint.traced import Traced
from infinity.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Part:
    """``numel`` elements of a saved tensor, from ``start`` on: those of ``source`` from ``offset`` on."""

    start: int
    source: str
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor of the directory.

    Attributes:
        sources: The model's own names of the tensors that are converted together with those of this one.
        parts: Where its values are, in order; None: only the conversion itself can say.
    """

    spec: TensorSpec
    sources: frozenset[str]
    parts: tuple[Part, ...] | None


def is_transformers(model: nn.Module) -> bool:
    """Whether transformers knows how to load and save ``model``."""
    transformers: Any = sys.modules.get("transformers")  # who has such a model has imported it
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def saved_tensors(model: nn.Module, named: Mapping[str, Tensor]) -> list[Saved]:
    """What a directory of ``model`` holds, without values.

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
    traced = {name: _Origin.of(name, named[name]) for name in _without_aliases(model, named)}
    own = {id(tensor) for tensor in traced.values()}
    saved: list[Saved] = []
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
    """What is saved of a group of tensors that are converted together.

    Args:
        values: The group, by the model's own names.
        wanted: What the plan says that comes of it.

    Raises:
        CheckpointError: Something else comes of it.
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


def _as_it_is(spec: TensorSpec, name: str) -> Saved:
    numel = torch.Size(spec.shape).numel()
    return Saved(spec, frozenset([name]), (Part(0, name, 0, numel),))


def _join(
    conversions: list[tuple[frozenset[str], list[TensorSpec]]], sources: frozenset[str], spec: TensorSpec
) -> None:
    """Add what is made of ``sources`` to the conversion that shares some of them."""
    specs = [spec]
    for other in [other for other in conversions if other[0] & sources]:
        conversions.remove(other)
        sources, specs = sources | other[0], other[1] + specs
    conversions.append((sources, specs))


@dataclass(frozen=True, slots=True)
class _Named:
    """A tensor of the model for :class:`Traced`."""

    name: str
    shape: torch.Size
    dtype: torch.dtype

    def fill(self, start: int, out: Tensor) -> None:
        raise AssertionError("places are traced, not values")


def _located(model: nn.Module, named: Mapping[str, Tensor], specs: list[TensorSpec]) -> list[Saved]:
    """What comes of one conversion, with the places of the values where they can be found."""
    sources, parts = frozenset(named), dict[str, tuple[Part, ...]]()
    stand_ins = {name: Traced.whole(_Named(name, t.shape, t.dtype)) for name, t in named.items()}
    try:
        for key, value in _reverted(model, stand_ins).items():
            runs = (Part(run.start, run.source.name, run.offset, run.numel) for run in value.runs)
            if value.dtypes == {spec.dtype for spec in specs if spec.key == key}:
                parts[key] = tuple(runs)
    except Exception:  # whatever transformers does there, stand-ins cannot
        parts = {}
    placed = sum(part.numel for each in parts.values() for part in each)
    whole = parts.keys() == {spec.key for spec in specs} and placed == sum(t.numel() for t in named.values())
    return [Saved(spec, sources, parts[spec.key] if whole else None) for spec in specs]


class _Origin(Tensor):
    """A tensor of the meta device that knows which named tensors it was made of."""

    sources: frozenset[str]

    @classmethod
    def of(cls, name: str, like: Tensor) -> "_Origin":
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
    stand_ins = {id(tensor): torch.empty(1) for tensor in named.values()}
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
