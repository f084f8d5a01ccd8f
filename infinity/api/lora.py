"""Adds LoRA adapters (arXiv:2106.09685) through ``peft``: the base stays frozen where it lives.

[Note: a frozen base]
A frozen unit has no gradient, no optimizer state and no second version: it is read once for forward and once
for backward, and never written. Adapters are in units of their own, as a unit of both would carry the state
of both. They are added to a finished model, of which peft asks only shapes and dtypes: nothing is fetched.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.activations.tensor_cache import patched
from infinity.api.init import gathered
from infinity.checkpoint.writer import Publication
from infinity.core.errors import RecipeError, StateError, quiet_libraries
from infinity.core.files import open_regular, user_path
from infinity.engine.runtime import runtime_of
from infinity.partition.init_context import Construction, ServedParameters

#: Adapters of two blocks share a unit while it is smaller than ``1 / _SHARE`` of a full one.
_SHARE = 16


def add_lora(
    model: nn.Module, *, rank: int = 16, alpha: float = 16.0, target_modules: Sequence[str] = (),
    dropout: float = 0.0,
) -> Any:  # fmt: skip
    """Freeze ``model`` and give its linear layers trainable adapters; every rank calls, with one seed.

    Call it after ``Init`` (or ``from_pretrained``, with ``frozen=True`` so that the base is not copied) and
    before ``infinity.AdamW``. Returns ``peft.get_peft_model``'s, to be trained in place of ``model``.

    Args:
        rank: Columns of each adapter's first matrix.
        alpha: Adapters are scaled by ``alpha / rank``.
        target_modules: Names of the layers, as peft takes them (``q_proj``, ...); none: every linear layer
            but a language model's head.
        dropout: Probability of the dropout before each adapter.

    Raises:
        StateError: The model is not finished, or runs already.
        RecipeError: peft is not installed, finds no such layers, or would adapt experts in one parameter.
    """
    runtime = runtime_of(model)
    if runtime.construction.active or runtime.started:
        raise StateError(
            "add_lora wants a model that is finished and did not run yet: call it after the `with "
            "infinity.Init(recipe)` block, before infinity.AdamW and before anything reads or runs the model"
        )
    adapted = make_adapters(
        model, runtime.construction, rank=rank, alpha=alpha, target_modules=target_modules, dropout=dropout
    )  # fmt: skip
    runtime.meet()
    return adapted


def make_adapters(
    model: nn.Module, construction: Construction, *, rank: int, alpha: float, target_modules: Sequence[str],
    dropout: float,
) -> Any:  # fmt: skip
    """Give a finished model adapters in units of ``construction``; see :func:`add_lora`."""
    try:
        import peft
    except ImportError as error:
        raise RecipeError("adapters need peft: pip install 'infinity-offload[lora]'") from error
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout,
        target_modules=list(target_modules) or "all-linear",
        task_type="CAUSAL_LM" if type(model).__name__.endswith("ForCausalLM") else None,
    )  # fmt: skip
    with _shapes_only(model), quiet_libraries():
        try:
            adapted = peft.get_peft_model(model, config)
        except ValueError as error:
            raise RecipeError(f"adapters for {type(model).__name__}: {error}") from error
    _refuse_packed(adapted, type(model).__name__)
    _cut_into_units(adapted, construction)
    return adapted


def _refuse_packed(adapted: nn.Module, kind: str) -> None:
    """Raise where peft would write into a frozen parameter: packed experts, or a router."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    layers = {name: each for name, each in adapted.named_modules() if isinstance(each, LoraLayer)}
    packed = {name: each for name, each in layers.items() if isinstance(each, ParamWrapper)}
    if not packed:
        return
    blocks = tuple(f"{name.rpartition('.')[0]}." for name in packed)
    others = {name: name.rpartition(".")[2] for name in layers}
    inside = {other for name, other in others.items() if name.startswith(blocks)}
    free = sorted({other for name, other in others.items() if name not in packed} - inside)
    name, first = next(iter(packed.items()))
    name = f"{name.removeprefix('base_model.model.').removesuffix('.base_layer')}.{first.parameter_name}"
    choose = f": lora.target_modules=[{','.join(free)}]" if free else " in lora.target_modules"
    raise RecipeError(
        f"adapters for {kind}: peft writes those of {name}, which is a parameter, no layer (packed experts "
        f"or a router), into the frozen weight itself. Name other layers{choose}"
    )


@contextlib.contextmanager
def _shapes_only(model: nn.Module) -> Iterator[None]:
    """Serve released parameters inside with their shapes only, so that asking for one gathers nothing."""
    served = (m._parameters for m in model.modules() if isinstance(m._parameters, ServedParameters))
    with contextlib.ExitStack() as stack:
        for server in {parameters.server for parameters in served}:
            stack.enter_context(patched(server, "touch", lambda param, siblings: None))
        yield


def _cut_into_units(adapted: nn.Module, construction: Construction) -> None:
    """Cut the new modules of ``adapted`` into units, as if they had been built in the model's own block."""
    full = construction.builder.sizes.full_nbytes
    with construction:
        construction.late = None  # adapters have their values
        construction.add_root(adapted)
        nbytes, block = 0, [""]
        for name, module in adapted.named_modules():
            fresh = [p for p in module.parameters(recurse=False) if p.requires_grad]
            if not fresh:
                continue
            parts = name.split(".")  # the block of model.layers.3.mlp.up is model.layers.3
            number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
            inside = parts[: number + 1]
            if nbytes >= (full if inside == block else full / _SHARE):
                construction.builder.close()
                nbytes = 0
            construction.builder.join(module)
            nbytes += sum(param.numel() for param in fresh) * construction.builder.dtype.itemsize
            block = inside
        construction.builder.close()


def save_lora(model: Any, directory: str | Path) -> None:
    """Save the adapters that :func:`add_lora` made, for ``peft.PeftModel.from_pretrained``; all must call.

    ``README.md`` has the SHA-256 of each weight file of a base that is a directory. One unit of adapters is
    gathered at a time. ``directory`` must not exist, or be empty; it appears on rank 0, whole or not at all.
    """
    from huggingface_hub import ModelCard
    from peft import get_peft_model_state_dict

    runtime, named = runtime_of(model), dict(model.named_parameters())
    kept = get_peft_model_state_dict(model, state_dict=named, save_embedding_layers=False)
    wanted = {id(param) for param in kept.values()}
    values: dict[str, torch.Tensor] = {}
    for unit in runtime.units:
        inside = {id(s.whole) for s in unit.segments} & wanted
        if inside:
            with gathered([s.whole for s in unit.segments]):
                values |= {n: p.detach().cpu().clone() for n, p in named.items() if id(p) in inside}
    if runtime.ranks.rank:
        return
    with Publication(user_path(directory, "directory")) as publication, quiet_libraries():
        model.save_pretrained(str(publication.path), state_dict=values, save_embedding_layers=False)
        card = ModelCard.load(publication.path / "README.md")  # peft's form, whose text is replaced
        base = model.peft_config["default"].base_model_name_or_path
        base = base or "the model that they were trained on"
        if Path(base).is_dir():
            sums = card.data["base_model_sha256"] = {}
            for path in sorted(Path(base).iterdir()):
                if path.suffix in (".safetensors", ".bin"):
                    with open(open_regular(path), "rb") as file:
                        sums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        card.text = _CARD.format(base=base, dtype=runtime.dtype)
        card.save(publication.path / "README.md")
        publication.publish()


_CARD = """
# Adapters of {base}

They change that model and no other. Where it was a directory, the SHA-256 of each of its weight files stands
under base_model_sha256 in the head of this file. With transformers and peft:

    base = AutoModelForCausalLM.from_pretrained("{base}", dtype={dtype})
    model = PeftModel.from_pretrained(base, "the directory of this file")
"""
