"""Streams a checkpoint into the tiers of a model that was built under ``Init`` without values.

[Note: whose names]
transformers renames and converts keys on load (``conversion_mapping``) and matches a base model's weights
with a model with a head, and the other way round. Its own functions are asked for each key, so whatever
``from_pretrained`` accepts is accepted. But keys that are missing, left over or of another shape are an
error, unless the caller named them.

[Note: one pass, one chunk]
Each unit's home asks for this rank's slice, chunk by chunk. So an element is read once, by the rank that
keeps it, and host memory holds one chunk.

[Note: values that stay where they are]
Frozen weights may be read from safetensors files at each use (:mod:`infinity.shards.base`), if these have
each value of a unit once, as runs of elements. Values that transformers computes (a transposed matrix)
cannot.

[Note: what the checkpoint lacks]
The model's own ``initialize_weights`` sets such parameters, over all modules as transformers does, so that
the same random numbers are drawn. What it touches of other units is scratch memory.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from infinity.checkpoint.conversions import Part, Trace, Traced, cut, is_transformers
from infinity.checkpoint.directory import Checkpoint, FileTensor, Stored, View
from infinity.core.errors import CheckpointError, library_errors
from infinity.core.nbytes import BLOCK_NBYTES, Piece
from infinity.optim.rules import default_rule, store_master
from infinity.partition.init_context import Masters
from infinity.partition.unit import Segment, Unit, UnitIndex

#: Called with the bytes that this rank has read, and with all that it will read.
OnProgress = Callable[[int, int], object]
#: The most keys of a kind that an error names.
_MOST_NAMED = 50
#: Elements that are rounded at a time.
_PIECE_NUMEL = 2**20


# --- the plan: which stored tensors make which parameter, decided before any is read -----------------


def named_targets(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers under every name that they have."""
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _find(
    model: Any, checkpoint: Checkpoint, targets: Mapping[str, Tensor]
) -> tuple[dict[str, "Values"], set[str], dict[str, str]]:
    """Return values by name as transformers makes them, unknown keys, and errors of names.

    Keys are the names in models that are none of transformers.
    """
    found, unexpected, wrong = dict[str, Values](), set[str](), dict[str, str]()
    if not is_transformers(model):
        found |= {key: Traced.whole(stored) for key, stored in checkpoint.items() if key in targets}
        return found, checkpoint.keys() - targets.keys(), wrong
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    conversions, kept = dict[str, _Conversion](), dict[str, Tensor]()
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
            conversion = conversions.setdefault(name, _Conversion(model, name, transform, kept))
            conversion.sources[key] = (pattern or key, checkpoint[key])
    for name, conversion in conversions.items():
        try:
            found |= conversion.trace()
        except Exception as error:  # whatever transformers does there, it cannot do it with these
            wrong[name] = f"cannot be made from {', '.join(conversion.sources)}: {error}"
    for name in found.keys() - targets.keys():
        unexpected.update(conversions[name].sources if name in conversions else [name])
        del found[name]
    model._weight_conversions = [each for each in transforms if each.was_used()]
    return found, unexpected, wrong


@dataclass(frozen=True, slots=True)
class _Conversion:
    """Describes one use of transformers' own conversion of several stored tensors."""

    model: Any
    name: str
    transform: Any  # the converter; None: the only source is the parameter
    kept: dict[str, Tensor]  # shared by a model's conversions: the last result, for its next chunk
    sources: dict[str, tuple[str, Stored]] = field(default_factory=dict)  # by key, with the matched pattern

    def trace(self) -> dict[str, "Values"]:
        """Return the source of the values of each parameter that the conversion makes."""
        if self.transform is None:
            [(_, source)] = self.sources.values()
            return {self.name: Traced.whole(source)}
        trace = Trace()
        with trace:
            made = self.run(lambda source: trace.stand_in(source, source.shape, _converted_dtype(source)))
        traced = {name: (each.shape, trace.parts(each)) for name, each in made.items()}
        return {
            name: Converted(self, name, shape) if parts is None else Traced(shape, parts)
            for name, (shape, parts) in traced.items()
        }

    def run(self, stand_in: Callable[[Stored], Tensor]) -> dict[str, Tensor]:
        """Convert ``stand_in(tensor)`` of each stored tensor; return the results by full name."""
        transform = copy.deepcopy(self.transform)
        for key, (pattern, source) in self.sources.items():
            transform.add_tensor(self.name, key, pattern, stand_in(source))
        made = transform.convert(self.name, model=self.model, config=self.model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


class Converted:
    """Represents a parameter that is converted as a whole when it is first read."""

    def __init__(self, conversion: _Conversion, name: str, shape: torch.Size) -> None:
        self._conversion, self._name, self.shape = conversion, name, shape

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {_converted_dtype(source) for _, source in self._conversion.sources.values()}

    def fill(self, start: int, out: Tensor) -> None:
        kept = self._conversion.kept
        if self._name not in kept:
            kept.clear()
            made = self._conversion.run(lambda source: read_whole(source, _converted_dtype(source)))
            kept[self._name] = made[self._name].reshape(-1)
        out.copy_(kept[self._name][start : start + len(out)])


#: The source of one parameter's values.
Values: TypeAlias = Traced | Converted


def _converted_dtype(source: Stored) -> torch.dtype:
    """Return fp32 for floating point, so that a conversion rounds as in an fp32 model."""
    return torch.float32 if source.dtype.is_floating_point else source.dtype


def read_whole(source: Stored | Values, dtype: torch.dtype) -> Tensor:
    values = torch.empty(source.shape.numel(), dtype=dtype, device="cpu")
    source.fill(0, values)
    return values.view(source.shape)


def make_part(part: Part[Stored], out: Tensor, view: View) -> None:
    """Fill ``out`` with a part's values, rounded as an fp32 master is to the weights of a trained unit."""
    if part.source.dtype == out.dtype:
        part.source.fill(part.offset, out, view)
        return
    layout, offset = default_rule().layout(out.dtype).only(exact=True), part.offset
    for piece in torch.split(out, _PIECE_NUMEL):
        master = torch.empty(len(piece), dtype=torch.float32, device=out.device)
        part.source.fill(offset, master, view)
        exact = (torch.empty_like(master, dtype=field.dtype) for field in layout.exact)
        store_master(layout, master, piece, tuple(exact))
        offset += len(piece)


def _misfit(target: Tensor, values: Values) -> str | None:
    if values.shape != target.shape:
        return f"the checkpoint has shape {tuple(values.shape)}, the model {tuple(target.shape)}"
    if target.is_floating_point() and not all(dtype.is_floating_point for dtype in values.dtypes):
        kinds = ", ".join(sorted(str(dtype) for dtype in values.dtypes))
        return f"the checkpoint has {kinds}, wanted floating point: are its weights quantized?"
    return None


def _serious(model: Any, missing: set[str], unexpected: set[str]) -> tuple[set[str], set[str]]:
    """Remove the keys that the model's own rules ignore."""
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
    lines = [f"{checkpoint.path} does not fit {type(model).__name__}:"]
    for what, each in (
        ("missing from the checkpoint", sorted(missing)),
        ("unknown to the model", sorted(unexpected)),
        ("wrong", [f"{name}: {why}" for name, why in sorted(wrong.items())]),
    ):
        if each:
            more = [f"... and {len(each) - _MOST_NAMED} more"] if len(each) > _MOST_NAMED else []
            lines += [f"{what} ({len(each)}):", *(f"  {line}" for line in each[:_MOST_NAMED] + more)]
    lines.append(
        "Choose the model's class with auto_class. To train parameters from the model's own initialization, "
        "name them in new=[...]; to leave keys out, name them in ignore=[...]; patterns such as classifier.* "
        "will do (in a recipe: model.new, model.ignore)"
    )
    return "\n".join(lines)


# --- the load ----------------------------------------------------------------------------------------


class CheckpointValues:
    """Reads one model's values from one checkpoint, as :mod:`infinity.partition.init_context` asks for them.

    Args:
        checkpoint: Stays open until :meth:`fill` returns, or as long as units are read where they lie.
        new: Shell patterns of full parameter names that the model initializes itself where the checkpoint
            lacks them, or has them in another shape.
        ignore: Patterns of keys of the checkpoint that the model need not have.
        on_progress: Called after each unit that was read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        new: Sequence[str] = (),
        ignore: Sequence[str] = (),
        on_progress: OnProgress | None = None,
    ) -> None:
        self._checkpoint, self._new, self._ignore = checkpoint, new, ignore
        self._on_progress = on_progress
        self._initialized: list[str] = []  # names that the checkpoint lacks
        self._model: Any = None
        self._values: dict[int, list[tuple[str, Values]]] = {}  # by id of the tensor: its names
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
            for name in list(found):
                if why := _misfit(targets[name], found[name]):
                    del found[name]
                    if not _any(name, self._new):
                        wrong[name] = why
            have = {id(targets[name]) for name in found}
            missing = {name for name, each in targets.items() if id(each) not in have and name not in wrong}
            self._initialized = sorted(missing)
            if is_transformers(model):  # others draw their weights where they are built
                missing, unexpected = _serious(model, missing, unexpected)
                missing = {name for name in missing if not _any(name, self._new)}
            unexpected = {key for key in unexpected if not _any(key, self._ignore)}
            if missing or unexpected or wrong:
                raise CheckpointError(_complaint(model, checkpoint, missing, unexpected, wrong))
        for name, tensor in targets.items():
            if name in found:
                self._values.setdefault(id(tensor), []).append((name, found[name]))

    def follow(self, replaced: Mapping[int, nn.Parameter]) -> None:
        """Move each parameter's values, by its id, to the one that replaced it."""
        self._values = {
            id(replaced[key]) if key in replaced else key: values for key, values in self._values.items()
        }

    def notes(self) -> list[str]:
        lines = []
        if self._initialized:
            lines.append(f"initialized, as the checkpoint lacks them: {', '.join(self._initialized)}")
        if self._checkpoint.pickled:
            lines.append(
                f"{self._checkpoint.path} holds pickled weights; save_pretrained writes them as safetensors, "
                "which load faster"
            )
        return lines

    def counts(self, unit: Unit) -> bool:
        return any(id(s.whole) in self._initializing for s in unit.segments)

    def fill(self, units: UnitIndex, masters: Masters) -> None:
        """Fill the model in one pass; raises a CheckpointError if a file fails or tied weights differ."""
        sizes = [self._nbytes(unit) for unit in units]
        for unit, done_nbytes in zip(units, itertools.accumulate(sizes), strict=True):
            masters.put(unit, functools.partial(self.master, unit))
            if self._on_progress is not None:
                self._on_progress(done_nbytes, sum(sizes))
        in_units = {id(segment.whole) for _, segment in units.segments()}
        with torch.no_grad():
            for _, tensor in named_targets(self._model):
                if id(tensor) in self._values and id(tensor) not in in_units:
                    tensor.copy_(read_whole(self._values[id(tensor)][0][1], tensor.dtype))
        self._initialize()

    def freeze(self, units: UnitIndex) -> None:
        for _, segment in units.segments():
            if id(segment.whole) in self._values:
                segment.whole.requires_grad_(False)

    def master(self, unit: Unit, start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)`` of the unit's full flat buffer, with zeros in gaps.

        They are valid until the next call; fp32, or bf16 where files and model have nothing else.
        """
        if len(self._scratch) < stop - start:  # reused: fresh memory would fault in its pages at each call
            self._scratch = torch.empty(stop - start, dtype=torch.float32, device="cpu")
        every = (v for s in unit.segments for _, v in self._values.get(id(s.whole), ()))
        stored = {dtype for values in every for dtype in values.dtypes}
        half = unit.dtype == torch.bfloat16 and stored <= {torch.bfloat16}  # exact, and without a cast
        dtype = torch.bfloat16 if half else torch.float32
        out = self._scratch.view(dtype)[: stop - start].zero_()
        for s in unit.segments:
            low, high = max(start, s.offset), min(stop, s.stop)
            if low < high and id(s.whole) in self._values:
                self._read(s, s.first + low - s.offset, out[low - start : high - start])
        return out

    # --- values that stay where they are (infinity.shards.base.BaseValues) ------------------

    def why_not_mapped(self, unit: Unit) -> str:
        """Return why values of ``unit`` cannot be read where they lie; empty: they can."""
        for s in unit.segments:
            given = self._values.get(id(s.whole), [])
            if not given:
                return f"{s.whole_name} is not in the checkpoint"
            if len(given) > 1:
                return f"the files have {s.whole_name} twice"
            if isinstance(given[0][1], Converted):
                return f"transformers computes {s.whole_name} when it loads it"
        return ""

    def scratch_nbytes(self, unit: Unit) -> int:
        """Return the most accelerator memory that :meth:`make` takes (bytes); 0: nothing is quantized."""
        return max((part.source.scratch_nbytes for _, part in self.parts(unit, 0, unit.numel)), default=0)

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
        for s in unit.segments:
            low, high = max(start, s.offset), min(stop, s.stop)
            if low < high:
                [(_, values)] = self._values[id(s.whole)]
                assert isinstance(values, Traced)
                for part in cut(values.parts, s.first + low - s.offset, high - low):
                    yield low + part.start, part

    def close(self) -> None:
        self._checkpoint.close()

    # --- the pass ------------------------------------------------------------------------------

    def _read(self, segment: Segment, start: int, out: Tensor) -> None:
        """Read elements of a parameter; a tied weight that the files have twice must be equal in both."""
        (_, values), *others = self._values[id(segment.whole)]
        values.fill(start, out)
        for name, twin in others:
            other = torch.empty_like(out)
            twin.fill(start, other)
            if not torch.equal(other.view(torch.uint8), out.view(torch.uint8)):
                raise CheckpointError(
                    f"{self._checkpoint.path}: {name} and {segment.whole_name} are one parameter of the "
                    "model, but the checkpoint has different values for them. If they should be two, "
                    "override the config: tie_word_embeddings=False"
                )

    def _nbytes(self, unit: Unit) -> int:
        first, last = unit.shard_start, unit.shard_start + unit.shard_numel
        return sum(
            max(0, min(last, s.stop) - max(first, s.offset)) * max(dtype.itemsize for dtype in values.dtypes)
            for s in unit.segments
            for _, values in self._values.get(id(s.whole), ())
        )

    def _initialize(self) -> None:
        """Initialize what the checkpoint lacks (see the note), and buffers that no checkpoint holds."""
        targets = dict(named_targets(self._model))
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
