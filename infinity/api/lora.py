"""LoRA through ``peft``: the base stays frozen where it lives, small adapters are trained.

[Note: a frozen base]
A frozen unit has no gradient, no optimizer state and no second version: it is read once for the forward
pass and once for the backward pass, and never written. Adapters are in units of their own, because a
unit that mixed both would carry the state of both. They are added to a finished model, so peft asks the
base for shapes and dtypes only, and no weight of it is fetched. A base that ``from_pretrained`` loaded with
``frozen=True`` is read where it lies, in the checkpoint's files: see :mod:`infinity.shards.base`.

Source: LoRA (arXiv:2106.09685).
"""

import contextlib
import hashlib
import secrets
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.api.init import gathered
from infinity.checkpoint.export import Publication
from infinity.core.errors import RecipeError, StateError
from infinity.core.files import open_regular
from infinity.engine.runtime import runtime_of
from infinity.partition.init_context import Construction, ServedParameters
from infinity.partition.unit import UnitIndex

__all__ = ["add_lora", "save_lora"]

_EVERY_LINEAR = "all-linear"
#: Adapters of two blocks share a unit while it is smaller than this part of a full one.
_SHARE = 16


def add_lora(
    model: nn.Module, *, rank: int = 16, alpha: float = 16.0, target_modules: Sequence[str] = (),
    dropout: float = 0.0,
) -> Any:  # fmt: skip
    """Freeze ``model`` and give its linear layers trainable adapters; every rank calls, with one seed.

    Call it after ``Init`` (or ``from_pretrained``, with ``frozen=True`` so that the base is not copied)
    and before ``infinity.AdamW``. What it returns is what ``peft.get_peft_model`` returns, and is trained in
    place of ``model``.

    Args:
        model: Built under ``infinity.Init``.
        rank: Columns of each adapter's first matrix.
        alpha: Adapters are scaled by ``alpha / rank``.
        target_modules: Names of the layers, as peft takes them (``q_proj``, ...); none: every linear layer
            but a language model's head.
        dropout: Probability of the dropout before each adapter.

    Raises:
        StateError: The model is not finished, or runs already.
        RecipeError: peft is not installed, finds no such layers, or would adapt experts in one parameter.
    """
    _peft()  # without it nothing else matters
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
    """Give a finished model adapters in units of ``construction``; see :func:`add_lora`.

    Raises:
        RecipeError: peft is not installed, finds no such layers, or would adapt experts in one parameter.
    """
    peft = _peft()
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout,
        target_modules=list(target_modules) or _EVERY_LINEAR,
        task_type="CAUSAL_LM" if type(model).__name__.endswith("ForCausalLM") else None,
    )  # fmt: skip
    with _shapes_only(model), warnings.catch_warnings():
        # peft asks transformers for a property under a name that is on its way out
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        try:
            adapted = peft.get_peft_model(model, config)
        except ValueError as error:
            raise RecipeError(f"adapters for {type(model).__name__}: {error}") from error
    _refuse_packed(adapted, type(model).__name__)
    _cut_into_units(adapted, construction)
    return adapted


def _refuse_packed(adapted: nn.Module, kind: str) -> None:
    """Raise where peft would write sums into a frozen parameter: experts in one parameter, a router.

    Raises:
        RecipeError: Names such a parameter, and the layers that can have adapters.
    """
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    layers = {name: each for name, each in adapted.named_modules() if isinstance(each, LoraLayer)}
    packed = {name: each for name, each in layers.items() if isinstance(each, ParamWrapper)}
    if not packed:
        return
    blocks = tuple(f"{name.rpartition('.')[0]}." for name in packed)
    inside = {name.rpartition(".")[2] for name in layers if name.startswith(blocks)}
    free = {name.rpartition(".")[2] for name in layers.keys() - packed.keys()} - inside
    name, first = next(iter(packed.items()))
    name = f"{name.removeprefix('base_model.model.').removesuffix('.base_layer')}.{first.parameter_name}"
    choose = f": lora.target_modules=[{','.join(sorted(free))}]" if free else " in lora.target_modules"
    raise RecipeError(
        f"adapters for {kind}: peft writes those of {name}, which is a parameter, no layer (packed experts "
        f"or a router), into the frozen weight itself. Name other layers{choose}"
    )


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise RecipeError("adapters need peft: pip install 'infinity-offload[lora]'") from error
    return peft


@contextlib.contextmanager
def _shapes_only(model: nn.Module) -> Iterator[None]:
    """Inside, asking a module for a released parameter gathers nothing: it has a shape, and no values."""
    served = [m._parameters for m in model.modules() if isinstance(m._parameters, ServedParameters)]
    touches = [parameters.touch for parameters in served]
    for parameters in served:
        parameters.touch = lambda param, siblings: None
    try:
        yield
    finally:
        for parameters, touch in zip(served, touches, strict=True):
            parameters.touch = touch


def _cut_into_units(adapted: nn.Module, construction: Construction) -> None:
    """Cut the new modules of ``adapted`` into units, as if they had been built in the model's own block."""
    full = construction.builder.sizes.full_nbytes
    with construction:
        construction.late = None  # adapters have their values
        construction.add_root(adapted)
        nbytes, block = 0, ""
        for name, module in adapted.named_modules():
            fresh = [p for p in module.parameters(recurse=False) if p.requires_grad]
            if not fresh:
                continue
            inside = _block_of(name)
            if nbytes >= (full if inside == block else full / _SHARE):
                construction.builder.close()
                nbytes = 0
            construction.builder.join(module)
            nbytes += sum(param.numel() for param in fresh) * construction.builder.dtype.itemsize
            block = inside
        construction.builder.close()


def _block_of(name: str) -> str:
    """The block of a model that a module is in: ``model.layers.3`` for ``model.layers.3.mlp.up``."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


def save_lora(model: Any, directory: str | Path) -> None:
    """Save the adapters alone as ``peft.PeftModel.from_pretrained`` loads them; every rank must call.

    ``adapter_config.json`` names the base. ``README.md`` says how to load both; where the base is a
    directory, it keeps the SHA-256 of each of its weight files, as ``sha256sum`` prints them. One unit of
    adapters is gathered at a time.

    Args:
        model: The model that :func:`add_lora` returned.
        directory: Must not exist, or be empty; appears on rank 0, whole or not at all.

    Raises:
        CheckpointError: ``directory`` is not free.
        OSError: It cannot be written, or the base cannot be read.
    """
    runtime = runtime_of(model)
    values = _adapters(model, runtime.units)
    if runtime.ranks.rank:
        return
    with Publication(Path(directory).absolute(), secrets.token_hex(4)) as publication:
        model.save_pretrained(str(publication.path), state_dict=values, save_embedding_layers=False)
        base = model.peft_config["default"].base_model_name_or_path
        base = base or "the model that they were trained on"
        _write_card(publication.path / "README.md", base, runtime.dtype)
        publication.publish()


def _adapters(model: Any, units: UnitIndex) -> dict[str, torch.Tensor]:
    """The full values of what peft saves, on the CPU, by the names that parameters have in the model."""
    named = dict(model.named_parameters())
    kept = _peft().get_peft_model_state_dict(model, state_dict=named, save_embedding_layers=False)
    wanted = {id(param) for param in kept.values()}
    values: dict[str, torch.Tensor] = {}
    for unit in units:
        inside = {id(s.whole) for s in unit.segments} & wanted
        if inside:
            with gathered([s.whole for s in unit.segments]):
                values |= {n: p.detach().cpu().clone() for n, p in named.items() if id(p) in inside}
    return values


def _write_card(card_path: Path, base: str, dtype: torch.dtype) -> None:
    """Write a model card that names the base and says how to load the adapters, in place of peft's form."""
    from huggingface_hub import ModelCard

    card = ModelCard.load(card_path)
    if Path(base).is_dir():
        files = sorted(path for path in Path(base).iterdir() if path.suffix in (".safetensors", ".bin"))
        card.data["base_model_sha256"] = {path.name: _sha256(path) for path in files}
    card.text = _CARD.format(base=base, dtype=dtype)
    card.save(card_path)


_CARD = """
# Adapters of {base}

They change that model and no other. Where it was a directory, the SHA-256 of each of its weight files stands
under base_model_sha256 in the head of this file. With transformers and peft:

    base = AutoModelForCausalLM.from_pretrained("{base}", dtype={dtype})
    model = PeftModel.from_pretrained(base, "the directory of this file")
"""


def _sha256(path: Path) -> str:
    with open(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
