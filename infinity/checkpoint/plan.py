"""Which stored tensors make which parameter of a model, and what does not fit: decided before any is read.

[Note: whose names]
transformers renames and converts keys on load (``conversion_mapping``) and finds a base model's weights
under a model with a head, and the other way round. The plan asks its own functions for each key, so it
accepts what ``from_pretrained`` accepts. It is stricter in one thing: keys that are missing, left over or
of another shape are an error, unless the caller named them.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from infinity.checkpoint.directory import Checkpoint, Stored
from infinity.checkpoint.saved_keys import is_transformers
from infinity.checkpoint.traced import Traced
from infinity.core.errors import CheckpointError


class Values(Protocol):
    """Where the values of one parameter come from."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtypes(self) -> set[torch.dtype]: ...

    def fill(self, start: int, out: Tensor) -> None:
        """Put elements from ``start`` on into ``out``, ``(n,)``; blocking."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """What the caller allows: patterns as of a shell, compared with whole names.

    Attributes:
        new: Parameters that the model initialises itself when the checkpoint lacks them, or has
            them in another shape.
        ignore: Keys of the checkpoint that the model need not have.
    """

    new: Sequence[str] = ()
    ignore: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """From names of a model's parameters and persistent buffers to their values.

    Attributes:
        values: By name; of several names of one tensor, the one that is read.
        twins: Names whose tensor another name in ``values`` has, too: read and compared.
        new: Names that the model initialises itself, sorted.
    """

    values: Mapping[str, Values]
    twins: Mapping[str, Values]
    new: tuple[str, ...]


def plan_loading(model: Any, checkpoint: Checkpoint, choice: Choice) -> LoadPlan:
    """The plan for one model, built but without values.

    Args:
        model: Of transformers, or of ours; afterwards it knows the conversions that were used, as
            ``save_pretrained`` needs to undo them.
        checkpoint: Its tensors.
        choice: What need not fit.

    Raises:
        CheckpointError: Keys are missing, left over, or of another shape or kind; lists all of them.
    """
    targets = dict(named_targets(model))
    found = _find(model, checkpoint, targets)
    wrong = {name: why for name, values in found.values.items() if (why := _misfit(targets[name], values))}
    found.wrong.update({name: why for name, why in wrong.items() if not _any(name, choice.new)})
    fitting = {name: values for name, values in found.values.items() if name not in wrong}
    read, twins = _split_tied(targets, fitting)
    have = {id(targets[name]) for name in read}
    lacking = {name for name, tensor in targets.items() if id(tensor) not in have and name not in found.wrong}
    missing, unexpected = _serious(model, lacking, found.unexpected)
    if is_transformers(model):  # others draw their weights where they are built
        missing = {name for name in missing if not _any(name, choice.new)}
    unexpected = {key for key in unexpected if not _any(key, choice.ignore)}
    if missing or unexpected or found.wrong:
        raise CheckpointError(_complaint(model, checkpoint, missing, unexpected, found.wrong))
    return LoadPlan(read, twins, tuple(sorted(lacking)))


def named_targets(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, under every name that they have."""
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


@dataclass(slots=True)
class _Found:
    values: dict[str, Values] = field(default_factory=dict)
    unexpected: set[str] = field(default_factory=set)
    wrong: dict[str, str] = field(default_factory=dict)
    kept: dict[str, Tensor] = field(default_factory=dict)  # see :class:`Converted`


@dataclass(slots=True)
class _Group:
    """Keys that together make one parameter, or several."""

    transform: Any  # None: as it is stored
    members: list[tuple[str, str]] = field(default_factory=list)  # pattern and key


def _find(model: Any, checkpoint: Checkpoint, targets: Mapping[str, Tensor]) -> _Found:
    """What transformers would make of every key; the keys of a model of ours are its own names."""
    if not is_transformers(model):
        known: dict[str, Values] = {
            key: Traced.whole(stored) for key, stored in checkpoint.items() if key in targets
        }
        return _Found(known, set(checkpoint) - set(known))
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key

    found, groups = _Found(), dict[str, _Group]()
    transforms = get_model_conversion_mapping(model)
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    renamings = [each for each in transforms if not isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    for key in sorted(checkpoint, key=dot_natural_key):
        name, pattern = _renamed(model, key, renamings, converters, targets)
        if name not in targets:
            found.unexpected.add(key)
        elif pattern is None and name in groups:
            found.wrong[name] = f"two keys of the checkpoint become it, one is {key}"
        else:
            transform = None if pattern is None else copy.deepcopy(by_pattern[pattern])
            groups.setdefault(name, _Group(transform)).members.append((pattern or key, key))
    for name, group in groups.items():
        _convert(model, checkpoint, name, group, found)
    for name in set(found.values) - set(targets):
        found.unexpected.update(key for _, key in groups.get(name, _Group(None, [("", name)])).members)
        del found.values[name]
    model._weight_conversions = [each for each in transforms if each.was_used()]
    return found


def _renamed(
    model: Any, key: str, renamings: list[Any], converters: list[Any], targets: Mapping[str, Tensor]
) -> tuple[str, str | None]:
    """The parameter that ``key`` becomes, or is part of, and the converter's pattern in the second case."""
    from transformers.core_model_loading import rename_source_key

    prefix = model.base_model_prefix
    name, pattern = rename_source_key(key, renamings, converters, prefix, targets)
    if name not in targets and key in targets:
        name, pattern = rename_source_key(key, [], [], prefix, targets)
    return name, pattern


def _convert(model: Any, checkpoint: Checkpoint, name: str, group: _Group, found: _Found) -> None:
    """Put the values that ``group`` makes into ``found``."""
    sources = [(pattern, key, checkpoint[key]) for pattern, key in group.members]
    if group.transform is None:
        found.values[name] = Traced.whole(sources[0][2])
        return
    conversion = _Conversion(model, name, group.transform, sources)
    try:
        found.values.update(conversion.run(Traced.whole))
    except Exception:  # whatever transformers does there, stand-ins cannot: see what tensors do
        try:
            shapes = conversion.run(
                lambda source: torch.empty(source.shape, dtype=source.dtype, device="meta")
            )
            for made, each in shapes.items():
                found.values[made] = Converted(conversion, made, each.shape, found.kept)
        except Exception as error:
            found.wrong[name] = f"cannot be made from {', '.join(k for _, k, _ in sources)}: {error}"


@dataclass(frozen=True, slots=True)
class _Conversion:
    """One use of transformers' own conversion of several stored tensors."""

    model: Any
    name: str
    transform: Any
    sources: list[tuple[str, str, Stored]]

    def run(self, stand_in: Callable[[Stored], Any]) -> dict[str, Any]:
        """What the conversion makes of ``stand_in(tensor)`` for each stored tensor, by full name."""
        transform = copy.deepcopy(self.transform)
        for pattern, key, source in self.sources:
            transform.add_tensor(self.name, key, pattern, stand_in(source))
        made = transform.convert(self.name, model=self.model, config=self.model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


class Converted:
    """A parameter that is converted as a whole, when it is asked for; see :class:`Values`.

    Args:
        conversion: Makes it, perhaps among others.
        name: Which of them.
        shape: Its shape.
        kept: The one that was converted last, ``(numel,)`` by name; the same for all of a model.
    """

    __slots__ = ("_conversion", "_kept", "_name", "shape")

    def __init__(
        self, conversion: _Conversion, name: str, shape: torch.Size, kept: dict[str, Tensor]
    ) -> None:
        self._conversion, self._name, self.shape, self._kept = conversion, name, shape, kept

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {_converted_dtype(source) for _, _, source in self._conversion.sources}

    def fill(self, start: int, out: Tensor) -> None:
        if self._name not in self._kept:
            self._kept.clear()
            self._kept[self._name] = self._conversion.run(_whole)[self._name].reshape(-1)
        out.copy_(self._kept[self._name][start : start + len(out)])


def _converted_dtype(source: Stored) -> torch.dtype:
    """In which a stored tensor is converted: fp32, so that arithmetic rounds as in a model of fp32."""
    return torch.float32 if source.dtype.is_floating_point else source.dtype


def _whole(source: Stored) -> Tensor:
    values = torch.empty(source.shape.numel(), dtype=_converted_dtype(source))
    source.fill(0, values)
    return values.view(source.shape)


def _misfit(target: Tensor, values: Values) -> str | None:
    """Why ``values`` cannot be those of ``target``, or None."""
    if values.shape != target.shape:
        return f"the checkpoint has shape {tuple(values.shape)}, the model {tuple(target.shape)}"
    if target.is_floating_point() and not all(dtype.is_floating_point for dtype in values.dtypes):
        kinds = ", ".join(sorted(str(dtype) for dtype in values.dtypes))
        return f"the checkpoint has {kinds}, wanted floating point: are its weights quantized?"
    return None


def _split_tied(
    targets: Mapping[str, Tensor], found: Mapping[str, Values]
) -> tuple[dict[str, Values], dict[str, Values]]:
    """Values to read, one for each tensor, and those of its other names."""
    read: dict[str, Values] = {}
    twins: dict[str, Values] = {}
    seen: set[int] = set()
    for name in targets:  # the model's order: the same on every rank
        if name in found:
            into = twins if id(targets[name]) in seen else read
            into[name] = found[name]
            seen.add(id(targets[name]))
    return read, twins


def _serious(model: Any, missing: set[str], unexpected: set[str]) -> tuple[set[str], set[str]]:
    """Without those that the model's own rules say to ignore."""
    if not is_transformers(model):
        return missing, unexpected
    from transformers.utils.loading_report import LoadStateDictInfo

    info = LoadStateDictInfo(
        missing_keys=set(missing), unexpected_keys=set(unexpected), mismatched_keys=set(),
        error_msgs=[], conversion_errors={}, skipped_pp_keys=set(),
    )  # fmt: skip
    model._adjust_missing_and_unexpected_keys(info)
    return info.missing_keys, info.unexpected_keys


def _any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _complaint(
    model: Any, checkpoint: Checkpoint, missing: set[str], unexpected: set[str], wrong: Mapping[str, str]
) -> str:
    """Everything that does not fit, and what to do about it."""
    lines = [f"{checkpoint.path} does not fit {type(model).__name__}:"]
    if missing:
        lines += [
            f"missing from the checkpoint ({len(missing)}):",
            *(f"  {name}" for name in sorted(missing)),
        ]
    if unexpected:
        lines += [f"unknown to the model ({len(unexpected)}):", *(f"  {key}" for key in sorted(unexpected))]
    if wrong:
        lines += [f"wrong ({len(wrong)}):", *(f"  {name}: {why}" for name, why in sorted(wrong.items()))]
    lines.append(
        "Choose the model's class with auto_class. To train parameters from the model's own initialisation, "
        "name them in new=[...]; to leave keys out, name them in ignore=[...]; patterns such as classifier.* "
        "will do (in a recipe: model.new, model.ignore)"
    )
    return "\n".join(lines)
