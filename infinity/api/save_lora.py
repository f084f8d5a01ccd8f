"""Saves adapters: in peft's form, or with a linear layer for each expert in place of packed ones.

[Note: two forms of adapters of experts]
peft's own form (``target_parameters``) has one pair of matrices for all experts of a packed parameter.
Servers such as vLLM and SGLang load adapters of the layers that a checkpoint has (``experts.3.gate_proj``).
Both say the same: projections in one parameter share ``lora_A``, and each has its rows of ``lora_B``.
"""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from infinity.api.adapters import CONFIG, VALUES, SavedAdapters, rows_of_owners, saved_names
from infinity.api.init import gathered
from infinity.api.lora import DEFAULT, check_adapter, placeholders_in_state_dict, wrap
from infinity.api.saved import SavedTensor, saved_tensors
from infinity.checkpoint.directory import Stored
from infinity.checkpoint.load import named_targets
from infinity.checkpoint.model import build_model
from infinity.checkpoint.writer import Publication, writing
from infinity.comm.ranks import all_ranks_or_raise
from infinity.core.errors import CheckpointError, quiet_libraries
from infinity.core.files import user_path
from infinity.engine.runtime import runtime_of


def save_lora(
    model: Any, directory: str | Path, *, per_expert: bool = False, name: str | None = None,
    ema: bool = False,
) -> None:  # fmt: skip
    """Save the adapters that :func:`add_lora` made, for ``peft.PeftModel.from_pretrained``; all must call.

    The adapter called ``name`` is saved; None: all, and those with a name each in a directory of that name
    inside ``directory``, which must not exist, or be empty; it appears on rank 0, whole or not at all. One
    unit of adapters is gathered at a time. With ``per_expert`` adapters of packed experts are those of one
    layer for each expert, as vLLM and SGLang load them, and alphas of single layers are a factor of their
    values; a CheckpointError says that checkpoints of this kind of model have no such layers. With ``ema``
    they are the average that the optimizer keeps. DiskError: a drive failed or is full, on every rank.
    """
    out, known = user_path(directory, "directory"), [*getattr(model, "peft_config", ())]
    if not known:
        raise CheckpointError(
            f"{type(model).__name__} is no model that add_lora returned, so it has no adapters to save; "
            "infinity.export saves all weights"
        )
    if name is not None:
        check_adapter(model, name)
    alone = name is not None or known == [DEFAULT]
    ranks = runtime_of(model).ranks
    with contextlib.ExitStack() as stack:
        with all_ranks_or_raise(ranks, f"making {out}"):
            place = stack.enter_context(Publication(out)) if ranks.rank == 0 else None
        for each in known if name is None else [name]:
            values = _gathered(model, each, ema)
            with all_ranks_or_raise(ranks, f"writing adapters to {out}"):
                if place is not None:
                    folder = place.path if alone else place.path / each
                    with writing(f"writing adapters to {folder}", folder):
                        folder.mkdir(exist_ok=True)
                        _write(model, values, folder, each, per_expert=per_expert)
        with all_ranks_or_raise(ranks, f"publishing {out}"):
            if place is not None:
                place.publish()


def _gathered(model: Any, adapter: str, ema: bool) -> dict[str, Tensor]:
    """Return what is saved with an adapter, on the CPU of rank 0, by full name; every rank must call."""
    from infinity.api.expert_lora import factors_of

    runtime, factors = runtime_of(model), factors_of(model)
    with placeholders_in_state_dict(model):
        wanted = {id(tensor) for tensor in saved_names(model, adapter).values()}
    named = {name: p for name, p in model.named_parameters() if id(p) in wanted}
    values = {name: b.detach().cpu() for name, b in model.named_buffers() if id(b) in wanted}
    for unit in runtime.units:
        ends = {id(s.whole) for s in unit.segments if s.is_last}
        inside = {name: param for name, param in named.items() if id(param) in ends}
        if not inside:
            continue
        units = runtime.units.holding(inside.values())
        with runtime.values.averaged(units, ema=ema), gathered(inside.values()):
            for name, param in inside.items() if runtime.ranks.rank == 0 else ():
                factor = factors.get(id(param))
                value = param.detach() if factor is None else factor.as_matrix(param.detach())
                values[name] = value.cpu().clone()
    return values


def _write(model: Any, values: dict[str, Tensor], folder: Path, name: str, *, per_expert: bool) -> None:
    """Write one adapter in peft's format, with a card that names its base, into ``folder``."""
    from huggingface_hub import ModelCard

    with placeholders_in_state_dict(model), rows_of_owners(model, name), quiet_libraries():
        how = {"save_embedding_layers": False, "selected_adapters": [name]}
        model.save_pretrained(str(folder), state_dict=values, **how)
    if (inside := folder / name).is_dir():  # where peft writes adapters of other names than its default
        for path in inside.iterdir():
            path.replace(folder / path.name)
        inside.rmdir()
    if per_expert:
        split_experts(folder, folder, model.get_base_model().config)
    card = ModelCard.load(folder / "README.md")  # peft's form, whose text is replaced
    base = model.peft_config[name].base_model_name_or_path or "the model that they were trained on"
    card.text = _CARD.format(base=base, dtype=runtime_of(model).dtype)
    card.save(folder / "README.md")


_CARD = """
# Adapters of {base}

They change that model and no other. With transformers and peft:

    base = AutoModelForCausalLM.from_pretrained("{base}", dtype={dtype})
    model = PeftModel.from_pretrained(base, "the directory of this file")
"""


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
        layers = {names[id(module.get_param())]: module for module in _packed_layers(adapted)}
        for name, module in layers.items():
            if name not in projections or module.is_left_first:
                raise CheckpointError(
                    f"{name}: checkpoints of {type(model).__name__} have its experts in one tensor, too, so "
                    "there are no layers to name; servers load adapters of such models in peft's own form, "
                    "without per_expert"
                )
        factors = (factor for module in layers.values() for factor in _factors(module))
        packed = {id(stored[id(factor.weight)]) for factor in factors}
        kept = ((key, each) for key, each in saved.items() if id(each) not in packed)
        values = {key: each.whole() for key, each in kept}
        entries = dict(saved.entries)
        for name, module in layers.items():
            values |= _split(module, projections[name], stored)
        packed_in = {module: projections[name] for name, module in layers.items()}
        _name_layers(entries, values, adapted, packed_in)
    with writing(f"writing to {folder}", folder):
        new = folder / f"{VALUES}.new"
        save_file(values, new, metadata={"format": "pt"})
        new.replace(folder / VALUES)
        (folder / CONFIG).unlink()  # another directory may have a link to it
        text = json.dumps(entries, indent=2, sort_keys=True)
        (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def _packed_layers(adapted: Any) -> list[Any]:
    """Return the wrappers of packed experts; those of other parameters are linear layers in any form."""
    from infinity.api.expert_lora import ParamWrapper

    found = (module for module in adapted.modules() if isinstance(module, ParamWrapper))
    return [module for module in found if module.get_param().ndim == 3]


def _factors(module: Any) -> tuple[Any, Any]:
    return module.lora_A["default"], module.lora_B["default"]


def _split(module: Any, projections: Sequence[Projection], stored: Mapping[int, Stored]) -> dict[str, Tensor]:
    """Return the adapters of the layers in place of a packed parameter, by peft's keys."""
    right, left = (factor.of_matrix(stored[id(factor.weight)].whole()) for factor in _factors(module))
    found = {}
    for each in projections:
        key = f"base_model.model.{each.layer}"
        found[f"{key}.lora_A.weight"] = right[each.expert].clone()
        found[f"{key}.lora_B.weight"] = left[each.expert, each.rows].clone(
            memory_format=torch.contiguous_format
        )
    return found


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
