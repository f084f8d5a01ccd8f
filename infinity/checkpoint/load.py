"""Streams a checkpoint into the tiers of a model that was built under ``Init`` without values.

[Note: whose names]
transformers renames and converts keys on load (``conversion_mapping``) and matches a base model's weights
with a model with a head, and the other way round. Its own functions are asked for each key, so whatever
``from_pretrained`` accepts is accepted. But keys that are missing, left over or of another shape are an
error, unless the caller named them.

[Note: conversions as byte ranges]
transformers also stacks and cuts tensors when it loads them, and back when it saves them. Its operations run
once on meta tensors inside a :class:`Trace`, which notes what every tensor is copied from, for one of the
layers that are alike. So any range can be read or written without the rest. Tensors that are computed, or
copied element by element (a transposed last dimension), have no parts: they are converted whole.

[Note: one pass, one chunk]
Each unit's home asks for this rank's slice, chunk by chunk. So an element is read once, by the rank that
keeps it, and host memory holds one chunk. Frozen weights may be read from safetensors files at each use
(:mod:`infinity.shards.base`), if these have each value of a unit once, as runs of elements.

[Note: what the checkpoint lacks]
The model's own ``initialize_weights`` sets such parameters, over all modules as transformers does, so that
the same random numbers are drawn. What it touches of other units is scratch memory.
"""

import copy
import functools
import itertools
import math
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infinity.checkpoint.directory import (
    Checkpoint,
    FileTensor,
    Latest,
    Stored,
    StoredPart,
    View,
    misfits,
)
from infinity.core.errors import CheckpointError, library_errors, listed
from infinity.core.nbytes import BLOCK_NBYTES, Piece
from infinity.optim.state import StateLayout, store_master
from infinity.partition.unit import Segment, Unit, UnitIndex

Source = TypeVar("Source")

#: Called with what this rank is doing (loading), the bytes that it has done, and all that it will.
OnProgress = Callable[[str, int, int], object]
#: The most keys of a kind that an error names.
_MOST_NAMED = 50
#: The most sources of a parameter that do not go together that an error names.
_MOST_ODD = 4
#: Elements that are rounded at a time.
_PIECE_NUMEL = 2**20
#: A parameter with more parts is converted as a whole: a list of them would take too much memory.
MOST_PARTS = 2**18


class Part(NamedTuple, Generic[Source]):
    """Says that ``numel`` elements from ``start`` on are those of ``source`` from ``offset`` on."""

    start: int
    source: Source
    offset: int
    numel: int


class Traced(Stored):
    """Describes a tensor as parts of stored tensors, in order and without gaps.

    With a ``dtype`` it is in that, rounded as by :func:`make_part`.
    """

    def __init__(
        self, shape: Sequence[int], parts: list[Part[Stored]], dtype: torch.dtype | None = None
    ) -> None:
        self.shape, self.parts, self._rounds = torch.Size(shape), parts, dtype is not None
        if dtype is not None:
            self.dtype = dtype

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {part.source.dtype for part in self.parts}

    def fill(self, start: int, out: Tensor, view: View | None = None) -> None:
        for part in cut(self.parts, start, len(out)):
            piece = out[part.start : part.start + part.numel]
            if self._rounds:
                make_part(part, piece)
            else:
                part.source.fill(part.offset, piece)


def parts_of(stored: Stored) -> list[Part[Stored]]:
    return stored.parts if isinstance(stored, Traced) else [Part(0, stored, 0, stored.shape.numel())]


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
        """Return the parts of a storage that copies filled, each from a tensor to a view of the storage."""
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
    """Return where runs, contiguous in all views, begin in each storage, and their length; None: too many."""
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


def is_transformers(model: nn.Module) -> bool:
    transformers: Any = sys.modules.get("transformers")  # a program with such a model has imported it
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def named_targets(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers under every name that they have."""
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _find(
    model: Any, checkpoint: Checkpoint, targets: Mapping[str, Tensor]
) -> tuple[dict[str, Stored], set[str], dict[str, str]]:
    """Return values by name as transformers makes them, else by key; unknown keys; and errors of names."""
    found, unexpected, wrong = dict[str, Stored](), set[str](), dict[str, str]()
    if not is_transformers(model):
        found = {key: stored for key, stored in checkpoint.items() if key in targets}
        return found, checkpoint.keys() - targets.keys(), wrong
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    conversions, latest = dict[str, _Conversion](), Latest[Mapping[str, Tensor]]()
    transforms = get_model_conversion_mapping(model)
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    renamings = [each for each in transforms if not isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix = model.base_model_prefix
    for key in sorted(checkpoint, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, targets)
        if name not in targets and key in targets:
            name, pattern = rename_source_key(key, [], [], prefix, targets)
        if name not in targets:
            unexpected.add(key)
        elif name in conversions and None in (pattern, conversions[name].transform):
            wrong[name] = f"two keys of the checkpoint become it, one is {key}"
        else:
            transform = None if pattern is None else by_pattern[pattern]
            conversion = conversions.setdefault(name, _Conversion(model, name, transform, latest))
            conversion.sources[key] = (pattern or key, checkpoint[key])
    traced: dict[object, _Results] = {}
    for name, conversion in conversions.items():
        try:
            found |= conversion.trace(traced)
        except Exception as error:  # whatever transformers does there, it cannot do it with these
            why = listed(misfits(conversion.sources) or [str(error)], _MOST_ODD)
            wrong[name] = f"cannot be made from {listed([*conversion.sources], 2)}: {why}"
    for name in found.keys() - targets.keys():
        unexpected.update(conversions[name].sources if name in conversions else [name])
        del found[name]
    model._weight_conversions = [each for each in transforms if each.was_used()]
    return found, unexpected, wrong


def sources_of(model: Any, checkpoint: Checkpoint) -> dict[str, set[str]]:
    """Return the keys of the stored tensors that each parameter of ``model`` is made of, by its name."""
    keys = {id(stored): key for key, stored in checkpoint.items()}
    found, _, _ = _find(model, checkpoint, dict(named_targets(model)))

    def made_of(stored: Stored) -> Sequence[Stored]:
        if isinstance(stored, Converted):
            return stored.sources
        return [part.source for part in parts_of(stored)]

    return {name: {keys[id(each)] for each in made_of(stored)} for name, stored in found.items()}


#: What a conversion makes, by name without the layer's number: shapes, and parts of its sources in order.
_Results = dict[str, tuple[torch.Size, list[Part[int]] | None]]


@dataclass(frozen=True, slots=True)
class _Conversion:
    """Describes one use of transformers' own conversion of several stored tensors."""

    model: Any
    name: str
    transform: Any  # the converter; None: the only source is the parameter
    latest: Latest[Mapping[str, Tensor]]  # results of a model's conversions
    sources: dict[str, tuple[str, Stored]] = field(default_factory=dict)  # by key, with the matched pattern

    def trace(self, traced: dict[object, _Results]) -> dict[str, Stored]:
        """Return the values of each parameter that it makes; ``traced``: what others like it have made."""
        if self.transform is None:
            [(_, source)] = self.sources.values()
            return {self.name: source}
        sources = [source for _, source in self.sources.values()]
        layer = (re.findall(r"\.\d+\.", self.name) or [""])[0]  # its number, with the dots

        def hidden(name: str) -> str:
            return name.replace(layer, ".#.", 1) if layer else name

        given = tuple(
            (hidden(key), pattern, source.shape, _converted_dtype(source))
            for key, (pattern, source) in self.sources.items()
        )
        alike = id(self.transform), hidden(self.name), given
        if alike not in traced:
            trace, numbers = Trace(), itertools.count()  # tensors are asked for in the order of ``sources``
            with trace:
                made = self.run(
                    lambda each: trace.stand_in(next(numbers), each.shape, _converted_dtype(each))
                )
            traced[alike] = {hidden(name): (each.shape, trace.parts(each)) for name, each in made.items()}
        found = dict[str, Stored]()
        make = functools.partial(self.run, lambda each: each.whole(_converted_dtype(each)))
        for name, (shape, parts) in traced[alike].items():
            own = name.replace(".#.", layer, 1) if layer else name
            if parts is None:
                found[own] = Converted(own, shape, torch.float32, sources, make, self.latest)
            else:
                found[own] = Traced(shape, [Part(at, sources[i], first, n) for at, i, first, n in parts])
        return found

    def run(self, stand_in: Callable[[Stored], Tensor]) -> dict[str, Tensor]:
        """Convert ``stand_in(tensor)`` of each stored tensor; return the results by full name."""
        transform = copy.deepcopy(self.transform)
        for key, (pattern, source) in self.sources.items():
            transform.add_tensor(self.name, key, pattern, stand_in(source))
        made = transform.convert(self.name, model=self.model, config=self.model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


class Converted(Stored):
    """Represents a tensor that ``make`` makes of others, by its name, with more, when one is first read."""

    def __init__(
        self, name: str, shape: torch.Size, dtype: torch.dtype, sources: Sequence[Stored],
        make: Callable[[], Mapping[str, Tensor]], latest: Latest[Mapping[str, Tensor]],
    ) -> None:  # fmt: skip
        self._name, self.shape, self.dtype, self.sources = name, shape, dtype, sources
        self._make, self._latest = make, latest

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {_converted_dtype(source) for source in self.sources}

    def fill(self, start: int, out: Tensor, view: View | None = None) -> None:
        made = self._latest.get(self._make, self._make)[self._name]
        out.copy_(made.reshape(-1)[start : start + len(out)])


def _converted_dtype(source: Stored) -> torch.dtype:
    """Return fp32 for floating point, so that a conversion rounds as in an fp32 model."""
    return torch.float32 if source.dtype.is_floating_point else source.dtype


def make_part(part: Part[Stored], out: Tensor, view: View | None = None) -> None:
    """Fill ``out`` with a part's values, rounded as an fp32 master is to the weights of a trained unit."""
    if part.source.dtypes == {out.dtype}:
        part.source.fill(part.offset, out, view)
        return
    layout, offset = StateLayout.of(out.dtype), part.offset
    for piece in torch.split(out, _PIECE_NUMEL):
        master = torch.empty(len(piece), dtype=torch.float32, device=out.device)
        part.source.fill(offset, master, view)
        exact = (torch.empty_like(master, dtype=field.dtype) for field in layout.exact)
        store_master(layout, master, piece, tuple(exact))
        offset += len(piece)


def _any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _complaint(
    model: Any, checkpoint: Checkpoint, missing: set[str], unexpected: set[str], wrong: Mapping[str, str]
) -> str:
    lines = [f"{checkpoint.path} does not fit {type(model).__name__}:"]
    for what, each in (
        ("missing from the checkpoint", sorted(missing)),
        ("unknown to the model", sorted(unexpected)),
        ("wrong", [f"{name}: {why}" for name, why in sorted(wrong.items())]),
    ):
        if each:
            more = [f"... and {len(each) - _MOST_NAMED} more"] if len(each) > _MOST_NAMED else []
            lines += [f"{what} ({len(each)}):", *(f"  {line}" for line in each[:_MOST_NAMED] + more)]
    # ``experts.3.up_proj.weight`` where the model has ``experts.gate_up_proj``
    layers = {key[: number.start()] for key in unexpected for number in re.finditer(r"\.\d+\.", key)}
    if any(name.rpartition(".")[0] in layers for name in missing):
        lines.append(
            f"Its experts are layers, of which {type(model).__name__} has all of a block in one tensor, and "
            "transformers has no conversion between the two: take a checkpoint whose experts are in one "
            "tensor (bf16, which stored_as quantizes, MXFP4 as gpt-oss, FP8 or NVFP4 of ModelOpt)"
        )
    lines.append(
        "Choose the model's class with auto_class. To train parameters from the model's own initialization, "
        "name them in new=[...]; to leave keys out, name them in ignore=[...]; patterns such as classifier.* "
        "will do (in a recipe: model.new, model.ignore)"
    )
    return "\n".join(lines)


class CheckpointValues:
    """Reads one model's values from one checkpoint, as :mod:`infinity.partition.init_context` asks for them.

    The checkpoint stays open until :meth:`fill` returns, or as long as units are read where they lie.
    Arguments are those of :func:`infinity.from_pretrained`.
    """

    def __init__(
        self, checkpoint: Checkpoint, new: Sequence[str] = (), ignore: Sequence[str] = (),
        on_progress: OnProgress | None = None,
    ) -> None:  # fmt: skip
        for name, patterns in (("new", new), ("ignore", ignore)):
            if not isinstance(patterns, list | tuple) or not all(isinstance(each, str) for each in patterns):
                raise CheckpointError(
                    f"{name}: got {patterns!r}; wanted a list of patterns such as classifier.*"
                )
        self._checkpoint, self._new, self._ignore = checkpoint, new, ignore
        self._on_progress = on_progress
        self._initialized: list[str] = []  # names that the checkpoint lacks
        self._model: Any = None
        self._values: dict[int, list[tuple[str, Stored]]] = {}  # by id of the tensor: its names
        self._initializing: set[int] = set()  # ids of parameters
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")

    def prepare(self, model: Any) -> None:
        """Plan which values the built ``model`` gets; nothing is read yet.

        The model also learns which conversions were used, as ``save_pretrained`` needs to undo them. Raises a
        CheckpointError that lists keys which are missing, left over, or of another shape or kind.
        """
        self._model, checkpoint = model, self._checkpoint
        with library_errors(CheckpointError, f"{checkpoint.path} does not fit {type(model).__name__}"):
            targets = dict(named_targets(model))
            found, unexpected, wrong = _find(model, checkpoint, targets)
            for name, values in list(found.items()):
                target, why = targets[name], ""
                if values.shape != target.shape:
                    why = f"the checkpoint has shape {tuple(values.shape)}, the model {tuple(target.shape)}"
                elif target.is_floating_point() and not all(each.is_floating_point for each in values.dtypes):
                    kinds = ", ".join(sorted(map(str, values.dtypes)))
                    why = f"the checkpoint has {kinds}, wanted floating point: are its weights quantized?"
                if why:
                    del found[name]
                    if not _any(name, self._new):
                        wrong[name] = why
            have = {id(targets[name]) for name in found}
            missing = {name for name, each in targets.items() if id(each) not in have and name not in wrong}
            self._initialized = sorted(missing)
            if is_transformers(model):  # others draw their weights where they are built
                from transformers.utils.loading_report import LoadStateDictInfo

                info = LoadStateDictInfo(
                    missing_keys=missing, unexpected_keys=unexpected, mismatched_keys=set(),
                    error_msgs=[], conversion_errors={}, skipped_pp_keys=set(),
                )  # fmt: skip
                model._adjust_missing_and_unexpected_keys(info)  # what the model's own rules ignore
                missing = {name for name in info.missing_keys if not _any(name, self._new)}
                unexpected = info.unexpected_keys
            unexpected = {key for key in unexpected if not _any(key, self._ignore)}
            if missing or unexpected or wrong:
                raise CheckpointError(_complaint(model, checkpoint, missing, unexpected, wrong))
        for name, tensor in targets.items():
            if name in found:
                self._values.setdefault(id(tensor), []).append((name, found[name]))

    def again(self, model: Any) -> "CheckpointValues":
        """Return the same for another model of the same class and config, built anew."""
        other, targets = copy.copy(self), dict(named_targets(model))
        other._model, other._initializing, other._values = model, set(), {}
        for name, stored in (each for values in self._values.values() for each in values):
            other._values.setdefault(id(targets[name]), []).append((name, stored))
        return other

    def follow(self, replaced: Mapping[int, nn.Parameter]) -> None:
        """Move each parameter's values, by its id, to the one that replaced it."""
        self._values = {id(replaced[k]) if k in replaced else k: each for k, each in self._values.items()}

    def stored(self, tensor: Tensor) -> Stored | None:
        """Return the values of a parameter or buffer of the model; None: the checkpoint has none."""
        given = self._values.get(id(tensor))
        return given[0][1] if given else None

    def notes(self) -> list[str]:
        lacking = ", ".join(self._initialized)
        return [f"initialized, as the checkpoint lacks them: {lacking}"] if lacking else []

    def counts(self, unit: Unit) -> bool:
        return any(id(s.whole) in self._initializing for s in unit.segments)

    def fill(self, units: UnitIndex, masters: Any) -> None:
        """Fill the model in one pass; raises a CheckpointError if a file fails or tied weights differ."""
        self._divide(units)
        sizes = [self._nbytes(unit) for unit in units]
        for unit, done_nbytes in zip(units, itertools.accumulate(sizes), strict=True):
            masters.put(unit, functools.partial(self.master, unit))
            if self._on_progress is not None:
                self._on_progress("loading", done_nbytes, sum(sizes))
        in_units = {id(segment.whole) for _, segment in units.segments()}
        targets = dict(named_targets(self._model))
        with torch.no_grad():
            for tensor in targets.values():
                if id(tensor) in self._values and id(tensor) not in in_units:
                    _, values = self._values[id(tensor)][0]
                    tensor.copy_(values.whole(tensor.dtype))
        # What the checkpoint lacks (see the note), and buffers that no checkpoint holds.
        self._initializing = {id(targets[name]) for name in self._initialized}
        marked = [tensor for tensor in targets.values() if id(tensor) not in self._initializing]
        for tensor in marked:
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # how transformers says "loaded"
        try:
            with library_errors(CheckpointError, f"initializing {type(self._model).__name__}"):
                self._model.initialize_weights()
        finally:
            for carrier in (*marked, *self._model.modules()):
                vars(carrier).pop("_is_hf_initialized", None)

    def _divide(self, units: UnitIndex) -> None:
        """Take what this rank has of parameters that are divided over the ranks of a mesh."""
        for _, segment in units.segments():
            part, name = units.parts.get(id(segment.whole)), segment.whole_name
            given = self._values.get(id(segment.whole))
            if part is not None and given is None:
                raise CheckpointError(
                    f"{name} is divided over ranks, and {self._checkpoint.path} lacks it: each would draw "
                    "the same values for its part. Leave it out of tp_plan"
                )
            if part is not None and given is not None:
                self._values[id(segment.whole)] = [(each, StoredPart(s, part)) for each, s in given]

    def master(self, unit: Unit, start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)`` of the unit's full flat buffer, with zeros in gaps.

        They are valid until the next call; fp32, or bf16 where files and model have nothing else.
        """
        if len(self._scratch) < stop - start:  # reused: fresh memory would fault in its pages at each call
            self._scratch = torch.empty(stop - start, dtype=torch.float32, device="cpu")
        dtype = torch.bfloat16 if self.is_exact(unit) else torch.float32
        out = self._scratch.view(dtype)[: stop - start].zero_()
        for s, low, first, numel in unit.within(start, stop):
            if id(s.whole) in self._values:
                self._read(s, first, out[low - start :][:numel])
        return out

    def is_exact(self, unit: Unit) -> bool:
        """Return whether files and model have nothing but bf16, so that weights need no cast."""
        dtypes = (v.dtypes for s in unit.segments for _, v in self._values.get(id(s.whole), ()))
        return unit.dtype == torch.bfloat16 and set().union(*dtypes) <= {torch.bfloat16}

    def why_not_mapped(self, unit: Unit) -> str:
        """Return why values of ``unit`` cannot be read where they lie; empty: they can."""
        for s in unit.segments:
            given = self._values.get(id(s.whole), [])
            if not given:
                return f"{s.whole_name} is not in the checkpoint"
            if isinstance(given[0][1], StoredPart):
                return f"{s.whole_name} is divided over ranks"
            if len(given) > 1:
                return f"the files have {s.whole_name} twice"
            if isinstance(given[0][1], Converted):
                return f"transformers computes {s.whole_name} when it loads it"
        return ""

    def scratch_nbytes(self, unit: Unit) -> int:
        """Return the most accelerator memory that :meth:`make` takes (bytes); 0: nothing is quantized."""
        return max((part.source.scratch_nbytes for _, part in self.parts(unit, 0, unit.numel)), default=0)

    def compile_ahead(self, units: UnitIndex, say: Callable[[str], object]) -> None:
        """Begin to compile what decodes units on an accelerator; ``say`` is called with why that fails."""
        for unit in units:
            if unit.stored is not None and unit.device.type != "cpu":
                for _, part in self.parts(unit, 0, unit.numel):
                    part.source.compile_ahead(unit.device, say)

    def sources(
        self, unit: Unit, start: int, stop: int, most_nbytes: int | None = None
    ) -> Iterator[tuple[int, tuple[Piece, ...]]]:
        """Yield the end of each separately makeable part of the flat buffer, and the bytes it needs."""
        for low, part in self.parts(unit, start, stop):
            source, at, end = part.source, part.offset, part.offset + part.numel
            step = part.numel
            if most_nbytes is not None and isinstance(source, FileTensor):  # with the rest of its blocks
                step = (most_nbytes - 2 * BLOCK_NBYTES) // source.dtype.itemsize
            while at < end:
                until = min(end, at + step)
                yield low + until - part.offset, tuple(source.ranges(at, until - at))
                at = until

    def make(self, unit: Unit, start: int, out: Tensor, view: View) -> None:
        """Fill ``out`` with elements from ``start`` on of the flat buffer, from a view of :meth:`sources`."""
        done = 0
        for low, part in self.parts(unit, start, start + len(out)):
            out[done : low - start].zero_()  # padding
            done = low - start + part.numel
            make_part(part, out[low - start : done], view)
        out[done:].zero_()

    def parts(self, unit: Unit, start: int, stop: int) -> Iterator[tuple[int, Part[Stored]]]:
        """Yield the start and source of each stored run in ``[start, stop)`` of the flat buffer."""
        for s, low, first, numel in unit.within(start, stop):
            [(_, values)] = self._values[id(s.whole)]
            yield from ((low + part.start, part) for part in cut(parts_of(values), first, numel))

    def close(self) -> None:
        self._checkpoint.close()

    def _read(self, segment: Segment, start: int, out: Tensor) -> None:
        """Read elements of a parameter; a tied weight that the files have twice must be equal in both."""
        (_, values), *others = self._values[id(segment.whole)]
        values.fill(start, out)
        for name, twin in others:
            other = twin.read(start, len(out), out.dtype)
            if not torch.equal(other.view(torch.uint8), out.view(torch.uint8)):
                raise CheckpointError(
                    f"{self._checkpoint.path}: {name} and {segment.whole_name} are one parameter of the "
                    "model, but the checkpoint has different values for them. If they should be two, "
                    "override the config: tie_word_embeddings=False"
                )

    def _nbytes(self, unit: Unit) -> int:
        return sum(
            numel * max(dtype.itemsize for dtype in values.dtypes)
            for s, _, _, numel in unit.within(unit.shard_start, unit.shard_start + unit.shard_numel)
            for _, values in self._values.get(id(s.whole), ())
        )
