"""Says what a Hugging Face directory of a model holds, also of a base with adapters merged into its weights.

[Note: a merged weight is a stored tensor]
A model without values says which tensors a directory of it holds, and what each is made of; the base's
checkpoint gives any range of a parameter, decoded and rounded to the compute dtype, as adapters saw it in
training. A merged weight is such a tensor, whose ranges are changed by the adapters when they are read: in
fp32, and rounded once. So nothing is gathered, at any size, and the files are those of an export.

[Note: bitwise peft]
``B @ A`` and the sum are those of peft's ``merge_and_unload``, in fp32 and for a block of rows at a time: the
same bits for matrices of one block, and within rounding for larger ones.

[Note: two forms of adapters of experts]
peft's own form (``target_parameters``) has one pair of matrices for all experts of a packed parameter.
Servers such as vLLM and SGLang load adapters of the layers that a checkpoint has (``experts.3.gate_proj``).
Both say the same: projections in one parameter share ``lora_A``, and each has its rows of ``lora_B``.
"""

import contextlib
import copy
import dataclasses
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from infinity.api.adapters import CONFIG, VALUES, SavedAdapters
from infinity.api.lora import wrap
from infinity.checkpoint.directory import Checkpoint, Latest, Stored, View, tokenizer_files
from infinity.checkpoint.forms import decode_checkpoint, read_quantization
from infinity.checkpoint.load import (
    CheckpointValues,
    Converted,
    OnProgress,
    Part,
    Trace,
    Traced,
    is_transformers,
    named_targets,
    parts_of,
)
from infinity.checkpoint.model import build_model, read_config
from infinity.checkpoint.quantize import Requantized, export_stored
from infinity.checkpoint.writer import TensorSpec, copy_files, new_directory, plan_files, writing
from infinity.comm.ranks import ALONE, Ranks, all_ranks_or_raise
from infinity.core.errors import CheckpointError
from infinity.core.files import user_path

#: The most bytes of values in one file of a directory.
MAX_SHARD_NBYTES = 5 * 10**9
#: Elements of a weight that are merged at a time; a row at least.
_BLOCK_NUMEL = 2**21
#: The matrices ``left`` ``(experts, rows, rank)`` and ``right`` ``(experts, rank, columns)``, fp32.
Factors: TypeAlias = tuple[Tensor, Tensor]


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
            f"{type(model).__name__} has adapters: export it with merge=True, or save the adapters alone "
            "with infinity.save_lora"
        )
    own, trace = {name: named[name] for name in _without_aliases(model, named)}, Trace()
    made = {name: trace.stand_in(name, each.shape, each.dtype) for name, each in own.items()}
    if is_transformers(model):
        from transformers.core_model_loading import revert_weight_conversion

        with trace:
            made = revert_weight_conversion(model, made)
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
    # Where each element has one place: spans of a unit's buffer must not overlap.
    numel = {name: each.numel() for name, each in own.items()}
    streamed = {names for names in placed.keys() - untraced if placed[names] == sum(numel[n] for n in names)}
    return [item if item.sources in streamed else replace(item, parts=None) for item in saved]


def convert(
    model: nn.Module, values: Mapping[str, Tensor], wanted: Iterable[TensorSpec]
) -> dict[str, Tensor]:
    """Convert tensors, given by the model's names, to those that are saved as ``wanted``."""
    from transformers.core_model_loading import revert_weight_conversion

    result: dict[str, Tensor] = revert_weight_conversion(model, dict(values))
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


def write_companions(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write what a directory of ``model`` has beside its weights: configs, and the tokenizer's files."""
    name = type(model).__name__
    if is_transformers(model):
        config = copy.deepcopy(model.config)
        config.dtype = str(model.dtype).removeprefix("torch.")
        config.architectures = [name]
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    elif dataclasses.is_dataclass(config := getattr(model, "config", None)):
        text = json.dumps({"architectures": [name]} | dataclasses.asdict(config), indent=2, default=str)  # type: ignore[arg-type]
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(folder)
    elif tokenizer is not None:
        source = user_path(tokenizer, "tokenizer")
        if not (found := tokenizer_files(source)):
            raise CheckpointError(
                f"{source} holds no tokenizer; wanted a directory with tokenizer.json or the like, or "
                "such a file"
            )
        if found == [source]:
            shutil.copyfile(source, folder / "tokenizer.json")
        else:
            copy_files(source, found, folder)


def _converted(model: Any, values: Mapping[str, Stored], specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    return convert(model, {name: each.whole() for name, each in values.items()}, specs)


@dataclass(eq=False, slots=True)
class LowRank:
    """The change of matrices by ``left @ right``, one of each expert, and by DoRA's magnitudes if any.

    Both factors are in memory for the weight that was read last. ``by_columns``: DoRA's norms are of columns.
    """

    read: Callable[[], Factors]
    scaling: float
    latest: Latest[Factors]  # of all weights of a model
    magnitude: Stored | None = None
    by_columns: bool = False

    @property
    def needs_all_rows(self) -> bool:
        """Whether a row depends on others."""
        return self.by_columns and self.magnitude is not None

    def apply(self, values: Tensor, first: int) -> Tensor:
        """Return the merged rows from ``first`` on, of all experts' rows, made of ``values``, fp32."""
        left, right = self.latest.get(self, self.read)
        at, stop = first, first + len(values)
        while at < stop:
            expert, row = divmod(at, left.shape[1])
            taken = min(stop - at, left.shape[1] - row)
            product = left[expert, row : row + taken] @ right[expert]
            values[at - first :][:taken].add_(product.mul_(self.scaling))
            at += taken
        if self.magnitude is None:
            return values
        magnitude = _read(self.magnitude)
        if self.by_columns:
            return values.mul_(magnitude / torch.linalg.norm(values, dim=0))
        return values.mul_((magnitude[first:stop] / torch.linalg.norm(values, dim=1))[:, None])


@dataclass(eq=False, slots=True)
class Rows:
    """The change of a matrix whose rows ``numbers`` are others, those of ``rows``, ``(n, columns)``."""

    numbers: Sequence[int]
    rows: Stored
    needs_all_rows: bool = False

    def apply(self, values: Tensor, first: int) -> Tensor:
        """Return the rows from ``first`` on; ``values`` are those of the base."""
        for i, number in enumerate(self.numbers):
            if first <= number < first + len(values):
                values[number - first] = _read(self.rows, i, i + 1)[0]
        return values


def _read(stored: Stored, first: int = 0, last: int | None = None) -> Tensor:
    """Return rows of a stored tensor in fp32."""
    last = stored.shape[0] if last is None else last
    row = stored.shape[1:]
    values = stored.read(first * row.numel(), (last - first) * row.numel(), torch.float32)
    return values.view(last - first, *row)


@dataclass(eq=False, slots=True)
class MergedWeight(Stored):
    """Represents matrices of the base as adapters change them, in the compute dtype ``dtype``."""

    base: Stored
    change: LowRank | Rows
    name: str
    shape: torch.Size
    dtype: torch.dtype
    block: Latest[Tensor]  # of rows, of all weights of a model

    def fill(self, start: int, out: Tensor, view: View | None = None) -> None:
        columns = self.shape[-1]
        rows = self.shape.numel() // columns
        at_once = rows if self.change.needs_all_rows else max(1, _BLOCK_NUMEL // columns)
        at, stop = start, start + len(out)
        while at < stop:
            first = at // columns // at_once * at_once
            last, low = min(rows, first + at_once), at - first * columns
            block = self.block.get((self, first), partial(self._merge, first, last))
            taken = min(stop - at, len(block) - low)
            out[at - start : at - start + taken].copy_(block[low : low + taken])
            at += taken

    def _merge(self, first: int, last: int) -> Tensor:
        """Return rows ``[first, last)``, flat."""
        columns = self.shape[-1]
        values = torch.empty((last - first) * columns, dtype=self.dtype, device="cpu")
        Traced(self.shape, parts_of(self.base), self.dtype).fill(first * columns, values)
        merged = self.change.apply(values.view(-1, columns).float(), first).to(self.dtype).reshape(-1)
        if not all(end.isfinite() for end in torch.aminmax(merged)):  # which pass NaN on
            raise CheckpointError(
                f"{self.name}: a merged value is NaN or infinite in {self.dtype}: the adapters, or the "
                "base, are not finite or too large, or DoRA divides by the norm of a row of zeros"
            )
        return merged


class MergedModel(contextlib.AbstractContextManager["MergedModel"]):
    """Opens a base and adapters of it as the tensors of a directory of the merged model.

    ``dtype`` is the compute dtype; None: that of the base's config, or of its weights. ``config`` and
    ``auto_class`` are those of the model that was trained; None: as the base's directory says.
    """

    def __init__(
        self, base: Path, adapters: Path, dtype: torch.dtype | None = None, config: Any = None,
        auto_class: Any = None,
    ) -> None:  # fmt: skip
        with contextlib.ExitStack() as opened:
            saved = opened.enter_context(SavedAdapters(adapters))
            config = read_config(base) if config is None else copy.deepcopy(config)
            checkpoint = opened.enter_context(Checkpoint(base))
            quantization, given = read_quantization(base), getattr(config, "dtype", None)
            if not isinstance(given, torch.dtype):  # transformers takes that of the first weights then
                dtypes = (each.dtype for each in checkpoint.values() if quantization is None)
                given = next((each for each in dtypes if each.is_floating_point), torch.bfloat16)
            self.dtype: torch.dtype = dtype or given
            if quantization is not None:
                decode_checkpoint(checkpoint, quantization, self.dtype)
            with torch.device("meta"):
                self.model = build_model(config, auto_class, self.dtype)
                for param in self.model.parameters():
                    param.data = param.data.to(self.dtype)
                values = CheckpointValues(checkpoint, new=["*"], ignore=["*"])
                values.prepare(self.model)
                self.named = dict(named_targets(self.model))
                self.tensors: dict[str, Stored] = {}  # by key in the directory
                tensors = saved_tensors(self.model, self.named)
                changed = self._changed(saved, values)
            found: dict[str, Stored] = {}  # by name in the model
            for name, tensor in self.named.items():
                stored = changed.get(id(tensor)) or values.stored(tensor)
                if stored is None:
                    raise CheckpointError(
                        f"{name} has no value of its shape, neither in {base} nor in {adapters}: these "
                        "were trained on a base with other weights (new tokens or layers), which is not kept"
                    )
                found[name] = Traced(tensor.shape, parts_of(stored), tensor.dtype)
            latest, makes = Latest[Mapping[str, Tensor]](), dict[frozenset[str], Any]()
            for item in tensors:
                key, dtype, shape = item.spec.key, item.spec.dtype, torch.Size(item.spec.shape)
                if item.parts is None:
                    together = {name: found[name] for name in item.sources}
                    specs = [each.spec for each in tensors if each.sources == item.sources]
                    make = makes.setdefault(item.sources, partial(_converted, self.model, together, specs))
                    stored = Converted(key, shape, dtype, [*together.values()], make, latest)
                else:
                    parts = [Part(at, found[name], first, n) for at, name, first, n in item.parts]
                    stored = Traced(shape, parts, dtype)
                self.tensors[key] = stored
            self._opened = opened.pop_all()

    def _changed(self, saved: SavedAdapters, values: CheckpointValues) -> dict[int, Stored]:
        """Return what adapters change, by id of the tensor of the base; the model stays without adapters."""
        from peft.tuners.lora import LoraLayer
        from peft.tuners.lora.layer import ParamWrapper
        from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

        names = {id(tensor): name for name, tensor in self.named.items()}
        every = self.model.named_parameters(remove_duplicate=False)
        uses = Counter(id(param) for _, param in every)
        adapted = wrap(self.model, saved.config, saved)
        stored = {id(tensor): each for tensor, each in saved.match(adapted)}
        found: dict[int, Stored] = {}
        block, latest = Latest[Tensor](), Latest[Factors]()

        def change(weight: Tensor, how: LowRank | Rows) -> None:
            base = values.stored(weight)
            if base is None:
                raise CheckpointError(f"{names[id(weight)]} has adapters, and is not in the base")
            merged = MergedWeight(base, how, names[id(weight)], weight.shape, weight.dtype, block)
            found[id(weight)] = merged

        for name, module in adapted.named_modules():
            if isinstance(module, ParamWrapper):
                weight = module.get_param()
                _refuse_tied(names[id(weight)], uses[id(weight)])
                read = partial(_factors_of_experts, module, stored, weight.shape)
                change(weight, LowRank(read, module.scaling["default"], latest))
            elif isinstance(module, LoraLayer):
                weight = module.get_base_layer().weight
                _refuse_tied(names[id(weight)], uses[id(weight)])
                change(weight, _low_rank(name, module, stored, latest))
            elif isinstance(module, TrainableTokensWrapper) and not module.token_adapter.tied_adapter:
                layer = module.token_adapter
                rows, numbers = layer.trainable_tokens_delta["default"], layer.token_indices["default"]
                change(layer.base_layer.weight, Rows(numbers, stored[id(rows)]))
            elif isinstance(module, ModulesToSaveWrapper):
                copies = module.modules_to_save["default"].state_dict(keep_vars=True)
                for key, tensor in module.original_module.state_dict(keep_vars=True).items():
                    _refuse_tied(names[id(tensor)], uses[id(tensor)])
                    whole: Stored = stored[id(copies[key])]
                    if isinstance(tensor, torch.nn.Parameter) and tensor.ndim:  # through what looks for NaN
                        own = names[id(tensor)]
                        whole = MergedWeight(whole, Rows((), whole), own, tensor.shape, tensor.dtype, block)
                    found[id(tensor)] = whole
        adapted.base_model.unload()
        return found

    def __exit__(self, *exc: object) -> None:
        self._opened.close()


def _refuse_tied(name: str, uses: int) -> None:
    if uses > 1:
        raise CheckpointError(
            f"{name} is tied to another weight of the base, which the adapters leave as it is: in a merged "
            "model both would be one. Use the adapters unmerged, or train lora.trainable_token_indices"
        )


def _factors_of_experts(module: Any, stored: Mapping[int, Stored], shape: torch.Size) -> Factors:
    a, b = (each.of_matrix(_read(stored[id(each.weight)])) for each in module.factors)
    left, right = (a, b) if module.is_left_first else (b, a)
    return left.reshape(-1, shape[-2], left.shape[-1]), right.reshape(-1, left.shape[-1], shape[-1])


def _low_rank(name: str, module: Any, stored: Mapping[int, Stored], latest: Latest[Factors]) -> LowRank:
    from peft.tuners.lora import Embedding, Linear

    adapter, magnitudes = "default", module.lora_magnitude_vector
    if isinstance(module, Embedding):
        pair, transposed = (module.lora_embedding_A[adapter], module.lora_embedding_B[adapter]), True
    elif isinstance(module, Linear):
        pair = module.lora_A[adapter].weight, module.lora_B[adapter].weight
        transposed = module.fan_in_fan_out
    else:
        raise CheckpointError(
            f"{name} has adapters of {type(module).__name__}, which cannot be merged here; those of linear "
            "layers and embeddings can"
        )

    def read() -> Factors:
        a, b = (_read(stored[id(each)]) for each in pair)
        return (a.T[None], b.T[None]) if transposed else (b[None], a[None])

    magnitude = stored[id(magnitudes[adapter].weight)] if adapter in magnitudes else None
    return LowRank(read, module.scaling[adapter], latest, magnitude, transposed)


def merge(
    merged: MergedModel, out: Path, *, max_shard_nbytes: int = MAX_SHARD_NBYTES, tokenizer: Any = None,
    stored_as: Path | None = None, ranks: Ranks = ALONE, on_progress: OnProgress | None = None,
) -> Requantized | None:  # fmt: skip
    """Write the merged model to the new directory ``out``, as :func:`infinity.export` does; all must call.

    Raises:
        CheckpointError: The base or the adapters cannot be read, ``out`` is not free, or a merged value is
            not finite.
        DiskError: A drive failed or is full.
    """
    how: dict[str, Any] = {"prepare": partial(write_companions, merged.model, tokenizer)}
    how |= {"ranks": ranks, "on_progress": on_progress}
    if stored_as is not None:
        values = contextlib.nullcontext(merged.tensors)
        return export_stored(stored_as, out, merged.tensors, values, **how)
    specs = [TensorSpec(key, each.dtype, tuple(each.shape)) for key, each in merged.tensors.items()]
    with (
        new_directory(plan_files(specs, max_shard_nbytes), out, **how) as put,
        all_ranks_or_raise(ranks, f"writing {out}"),
    ):
        for spec in specs[ranks.rank :: ranks.world_size]:
            for start, piece in merged.tensors[spec.key].pieces():
                put(spec.key, start, piece)
    return None


@dataclass(frozen=True, slots=True)
class Projection:
    """Names the layer that a checkpoint has for some rows of an expert of a packed parameter."""

    layer: str
    expert: int
    rows: slice


def split_experts(adapters: Path, folder: Path, config: Any) -> None:
    """Write ``adapters``, which are in peft's form, into ``folder``, with a layer for each expert.

    ``config`` is that of the base. Files in ``folder``, a copy of ``adapters``, are replaced; others that are
    linked to them are not changed. Memory holds all adapters. Adapters of layers stay as they are.

    Raises:
        CheckpointError: The adapters cannot be read, or are those of another model; or the checkpoints of
            this kind of model have packed experts themselves.
    """
    with SavedAdapters(adapters) as saved:
        with torch.device("meta"):
            model = build_model(config, None, torch.float32)
            named = dict(named_targets(model))
            projections = _projections(saved_tensors(model, named), named)
            names = {id(tensor): name for name, tensor in named.items()}
            adapted = wrap(model, saved.config, saved)
        stored = {id(tensor): each for tensor, each in saved.match(adapted)}
        from infinity.api.expert_lora import ParamWrapper

        wrappers = [module for module in adapted.modules() if isinstance(module, ParamWrapper)]
        # Those of other parameters are linear layers in any form.
        layers = {names[id(each.get_param())]: each for each in wrappers if each.get_param().ndim == 3}
        for name, module in layers.items():
            if name not in projections or module.is_left_first:
                raise CheckpointError(
                    f"{name}: checkpoints of {type(model).__name__} have its experts in one tensor, too, so "
                    "there are no layers to name; servers load adapters of such models in peft's own form, "
                    "without per_expert"
                )
        packed = {id(stored[id(factor.weight)]) for each in layers.values() for factor in each.factors}
        kept = ((key, each) for key, each in saved.items() if id(each) not in packed)
        values = {key: each.whole() for key, each in kept}
        entries = dict(saved.entries)
        for name, module in layers.items():
            right, left = (f.of_matrix(stored[id(f.weight)].whole()) for f in module.factors)
            for each in projections[name]:
                key, b = f"base_model.model.{each.layer}", left[each.expert, each.rows]
                values[f"{key}.lora_A.weight"] = right[each.expert].clone()
                values[f"{key}.lora_B.weight"] = b.clone(memory_format=torch.contiguous_format)
        _name_layers(entries, values, adapted, {layers[name]: projections[name] for name in layers})
    with writing(f"writing to {folder}", folder):
        new = folder / f"{VALUES}.new"
        save_file(values, new, metadata={"format": "pt"})
        new.replace(folder / VALUES)
        (folder / CONFIG).unlink()  # another directory may have a link to it
        text = json.dumps(entries, indent=2, sort_keys=True)
        (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def _projections(tensors: Sequence[SavedTensor], named: dict[str, Tensor]) -> dict[str, list[Projection]]:
    """Return the layers that a checkpoint has in place of each packed parameter, by its name."""
    found: dict[str, list[Projection]] = {}
    for item in tensors:
        [part] = item.parts if item.parts is not None and len(item.parts) == 1 else [None]
        if part is None or named[part.source].ndim != 3 or len(item.spec.shape) != 2:
            continue
        _, rows, columns = named[part.source].shape
        expert, first = divmod(part.offset // columns, rows)
        last = first + part.numel // columns
        if tuple(item.spec.shape) == (last - first, columns) and not part.offset % columns and last <= rows:
            layer = item.spec.key.removesuffix(".weight")
            found.setdefault(part.source, []).append(Projection(layer, expert, slice(first, last)))
    whole = {name: named[name].shape[:2].numel() for name in found}
    return {
        name: each
        for name, each in found.items()
        if sum(one.rows.stop - one.rows.start for one in each) == whole[name]
    }


def _name_layers(
    entries: dict[str, Any], values: dict[str, Tensor], adapted: Any,
    layers: Mapping[Any, Sequence[Projection]],
) -> None:  # fmt: skip
    """Let peft's config name the layers of ``layers`` in place of packed parameters.

    Patterns name packed parameters, and a server may read none: each other alpha becomes a factor of B.
    """
    from peft.tuners.lora import LoraLayer

    ranks, ends = dict[str, int](), set[str]()
    entries["lora_alpha"] = entries.get("lora_alpha") or 1  # a layer's alpha of 0 becomes a factor, too
    for name, module in adapted.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        alpha, default = module.lora_alpha["default"], entries["lora_alpha"]
        keys = [f"{name}.lora_B.weight", f"{name}.lora_embedding_B"]
        numbered = [name.removeprefix("base_model.model.")]
        if module in layers:
            ends |= {each.layer.rpartition(".")[2] for each in layers[module]}
            keys = [f"base_model.model.{each.layer}.lora_B.weight" for each in layers[module]]
            # peft packs experts again in models that do, then their layers have no number
            numbered = [re.sub(r"\.\d+(\.\w+)$", r"(\\.\\d+)?\1", each.layer) for each in layers[module]]
        ranks |= dict.fromkeys(numbered, module.r["default"])
        for key in keys if alpha != default else ():
            if key in values:
                values[key] = values[key] * (alpha / default)
    modules = entries.get("target_modules") or []
    every = {name.rpartition(".")[2] for name in ranks}
    entries["target_modules"] = sorted({*modules, *ends} if isinstance(modules, list) else every)
    entries["target_parameters"], entries["alpha_pattern"], entries["rank_pattern"] = None, {}, {}
    for end in sorted(every):
        alike = {name: rank for name, rank in ranks.items() if name.rpartition(".")[2] == end}
        named = {end: max(alike.values())} if len(set(alike.values())) == 1 else alike
        entries["rank_pattern"] |= {name: rank for name, rank in named.items() if rank != entries["r"]}
