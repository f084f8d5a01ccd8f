"""Says what a Hugging Face directory of a model holds: its tensors, of what each is made, and other files."""

import copy
import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infinity.checkpoint.directory import (
    INDEX,
    SAFETENSORS,
    layer_of,
    tokenizer_files,
    with_layer,
    without_layer,
)
from infinity.checkpoint.load import Part, Trace, is_transformers
from infinity.checkpoint.writer import FilePlan, TensorSpec, copy_files, writing
from infinity.core.errors import CheckpointError
from infinity.core.files import user_path

#: The most bytes of values in one file of a directory.
MAX_SHARD_NBYTES = 5 * 10**9


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """Describes one tensor of a saved directory."""

    spec: TensorSpec
    sources: frozenset[str]  # names of the model's tensors that are converted together with this one's
    parts: list[Part[str]] | None  # its values in the model's tensors; None: only conversion makes them

    def of_layer(self, layer: str) -> "SavedTensor":
        """Return the same of a layer, where names are without its number."""
        parts = self.parts and [each._replace(source=with_layer(each.source, layer)) for each in self.parts]
        sources = frozenset(with_layer(name, layer) for name in self.sources)
        return SavedTensor(replace(self.spec, key=with_layer(self.spec.key, layer)), sources, parts)


def saved_tensors(model: nn.Module, named: Mapping[str, Tensor]) -> list[SavedTensor]:
    """Return the tensors that a directory of ``model`` holds, without values.

    ``named`` are parameters and persistent buffers under all their names. Of layers that are alike but for
    their number one is traced. Raises a CheckpointError if some are shared in a way that the model does
    not declare, or the model has adapters.
    """
    if hasattr(model, "peft_config"):
        raise CheckpointError(
            f"{type(model).__name__} has adapters: export it with merge=True, or save the adapters alone "
            "with infinity.save_lora"
        )
    layers: dict[str, dict[str, Tensor]] = {}  # by what their names begin with, up to their number
    names = _without_aliases(model, named)
    for name in names:
        layer = layer_of(name)
        layers.setdefault(name.partition(layer)[0] + layer if layer else "", {})[name] = named[name]
    saved, traced = list[SavedTensor](), dict[object, list[SavedTensor]]()
    for own in layers.values():
        layer = layer_of(next(iter(own)))
        alike = tuple((without_layer(name, layer), each.shape, each.dtype) for name, each in own.items())
        if is_transformers(model):  # a key may have another number, or none
            made = _reverted(model, {n: torch.empty_like(each, device="meta") for n, each in own.items()})
            alike += tuple((without_layer(key, layer), each.shape, each.dtype) for key, each in made.items())
        if alike not in traced:
            traced[alike] = _trace(model, own, layer)
        saved += [item.of_layer(layer) for item in traced[alike]]
    if len({item.spec.key for item in saved}) < len(saved):  # a tensor is made of several layers
        return _trace(model, {name: named[name] for name in names}, "")
    return saved


def _trace(model: nn.Module, named: Mapping[str, Tensor], layer: str) -> list[SavedTensor]:
    """Return what is saved of a layer's tensors, with names without its number."""
    trace = Trace()
    made = {
        name: trace.stand_in(without_layer(name, layer), each.shape, each.dtype)
        for name, each in named.items()
    }
    if is_transformers(model):
        with trace:
            made = _reverted(model, made)
    together: dict[str, frozenset[str]] = {}  # what is converted with a tensor, itself among it
    for value in made.values():
        sources = trace.sources(value)
        sources = sources.union(*(together.get(name, ()) for name in sources))
        together.update(dict.fromkeys(sources, sources))
    saved = [
        SavedTensor(
            _spec(without_layer(key, layer), value),
            together[next(iter(trace.sources(value)))],
            trace.parts(value),
        )
        for key, value in made.items()
    ]
    untraced = {item.sources for item in saved if item.parts is None}
    placed = Counter[frozenset[str]]()
    for item in saved:
        placed[item.sources] += sum(part.numel for part in item.parts or ())
    # Where each element has one place: spans of a unit's buffer must not overlap.
    numel = {without_layer(name, layer): each.numel() for name, each in named.items()}
    streamed = {names for names in placed.keys() - untraced if placed[names] == sum(numel[n] for n in names)}
    return [item if item.sources in streamed else replace(item, parts=None) for item in saved]


def convert(
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


def write_companions(model: Any, files: Sequence[FilePlan], tokenizer: Any, folder: Path) -> None:
    """Write what a directory of ``model`` has beside its ``files``: index, configs, the tokenizer's files."""
    with writing(f"writing to {folder}", folder):
        if len(files) > 1:
            numel = sum(p.numel() for p in model.parameters())
            nbytes = sum(file.nbytes - len(file.header) for file in files)
            index = {
                "metadata": {"total_parameters": numel, "total_size": nbytes},
                "weight_map": {key: file.name for file in files for key in file.starts},
            }
            text = json.dumps(index, indent=2, sort_keys=True)
            (folder / (SAFETENSORS + INDEX)).write_text(text + "\n", encoding="utf-8")
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
