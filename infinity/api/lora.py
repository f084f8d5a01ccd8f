"""Adds LoRA adapters (arXiv:2106.09685) through ``peft``: the base stays frozen where it lives.

[Note: a frozen base]
A frozen unit has no gradient, no optimizer state and no second version: it is read once for forward and once
for backward, and never written. Adapters are in units of their own, as a unit of both would carry the state
of both. They are added to a finished model, of which peft asks only shapes and dtypes: nothing is fetched.
"""

import contextlib
import difflib
import re
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn

from infinity.activations.tensor_cache import patched
from infinity.api.adapters import (
    CONFIG,
    NAMES,
    LoraConfig,
    SavedAdapters,
    check_used,
    from_peft,
    note_on_base,
    peft,
)
from infinity.api.several import DEFAULT, adapters_of, check_adapter, layers_of, parameters_by_adapter
from infinity.core.config import SettingError, settings_of, shown
from infinity.core.errors import (
    CheckpointError,
    InfinityError,
    RecipeError,
    StateError,
    library_errors,
    quiet_libraries,
)
from infinity.engine.runtime import runtime_of
from infinity.partition.init_context import Construction, ServedParameters

#: Parts of the names of modules and parameters in a model with adapters.
_OF_PEFT = {
    "base_model", "model", "base_layer", "original_module", "modules_to_save", "token_adapter", "weight",
    "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "lora_dropout",
    "trainable_tokens_delta", "trainable_tokens_original",
}  # fmt: skip
#: Adapters of two blocks share a unit while it is smaller than ``1 / _SHARE`` of a full one.
_SHARE = 16


def add_lora(model: nn.Module, config: Any = None, *, name: str = DEFAULT, **settings: Any) -> Any:
    """Freeze ``model`` and give layers and experts trainable adapters; every rank calls, with one seed.

    Call it after ``Init`` (or ``from_pretrained``, with ``frozen=True`` so that the base is not copied) and
    before ``infinity.AdamW``. Returns ``peft.get_peft_model``'s, to be trained in place of ``model``. With
    other names it may be called again, on what it returned: several adapters are trained on one base, each as
    if it were alone, in blocks ``with infinity.adapter(model, name)``.

    Args:
        config: A ``peft.LoraConfig`` in place of ``settings``.
        name: That of the adapter: letters, digits, ``_`` and ``-``.
        settings: Keys of a recipe's section ``lora``, without ``lr_ratio``: ``rank`` (by default 16),
            ``alpha``, ``target_modules`` and more, as in :class:`infinity.api.adapters.LoraConfig`. With
            ``adapter="DIR"`` training goes on with adapters in peft's format, whose config says the rest.

    Raises:
        StateError: The model is not finished, runs already, or has an adapter of this name.
        RecipeError: A setting is wrong; peft is not installed, or finds no such layers or parameters.
        CheckpointError: ``adapter`` cannot be read, or has adapters of another model; names the keys.
    """
    runtime = runtime_of(model)
    if not isinstance(name, str) or not re.fullmatch(NAMES, name):
        raise SettingError("name", name, "a name of letters, digits, _ and -, which begins with no -")
    ours, theirs = adapters_of(model).generators, getattr(model, "peft_config", {})
    if name in ours:
        raise StateError(
            f"add_lora: the model has an adapter {name!r} already; name all of its layers in one call, or "
            "give another one another name=..."
        )
    if ours and not hasattr(model, "add_weighted_adapter"):  # not peft's
        raise StateError("add_lora: the model has adapters already; give it what the first call returned")
    if theirs.keys() - ours.keys():
        raise StateError(
            f"add_lora: the model has the adapters {', '.join(theirs)} of peft.get_peft_model: give "
            "add_lora the model as it was before, and their peft.LoraConfig as config"
        )
    if runtime.construction.active or not runtime.at_rest():
        raise StateError(
            "add_lora wants a model that is finished and did not run with gradients yet: call it after the "
            "`with infinity.Init(recipe)` block, before infinity.AdamW"
        )
    if config is not None and settings:
        raise RecipeError(f"add_lora: {', '.join(settings)} beside a config; say it in the config")
    defaults = {} if settings.get("adapter") is not None else {"rank": 16}
    known = [key.name for key in settings_of(LoraConfig)]
    for each in settings:
        if each not in known:
            near = difflib.get_close_matches(each, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise RecipeError(f"add_lora has no setting {shown(each)}; {hint}")
    given = LoraConfig(**(defaults | settings))
    if not given.active:
        raise SettingError("rank", None, "the rank of the adapters, such as 16, or adapter='DIR'")
    note = "" if given.adapter is None else note_on_base(given.adapter, model)
    adapted = make_adapters(model, runtime.construction, given if config is None else config, name)
    if note and runtime.ranks.rank == 0:
        runtime.say(note)
    runtime.meet()
    adapters_of(model).add(name, adapted)
    return adapted


def make_adapters(model: nn.Module, construction: Construction, config: Any, name: str = DEFAULT) -> Any:
    """Give a finished model adapters in units of ``construction``; see :func:`add_lora`."""
    parts = {part for path, _ in model.named_modules() for part in path.split(".")} | _OF_PEFT
    if name in parts:  # peft tells adapters by the parts of names, and would save none
        kind = type(model).__name__
        raise SettingError("name", name, f"a name of an adapter that is no part of a name in {kind}")
    ours = isinstance(config, LoraConfig)
    saved = SavedAdapters(config.adapter) if ours and config.adapter is not None else None
    with contextlib.nullcontext() if saved is None else contextlib.closing(saved):
        if saved is not None:
            given = saved.config
        else:
            given = config.for_peft(model) if ours else from_peft(config, model)
        adapted = wrap(model, given, saved, name)
        if saved is not None:
            with placeholders_in_state_dict(model):
                saved.fill(adapted, name)
        _cut_into_units(adapted, construction)
    return adapted


def wrap(model: Any, config: Any, saved: SavedAdapters | None = None, name: str = DEFAULT) -> Any:
    """Return peft's model around ``model``, with adapters whose first values follow from ``config``.

    A ``model`` of peft gets one adapter more, and is returned.
    With ``saved``, or in a run that is resumed, values that follow from the base's are not computed.
    """
    given = None if saved else deepcopy(config)  # peft changes it
    servers = _servers(model)
    later = saved is not None or any(server.resuming for server in servers)  # first values come from there
    values = bool(config.trainable_token_indices) or config.use_dora
    reading: Any = contextlib.nullcontext()
    if saved is not None:
        reading = library_errors(CheckpointError, f"{saved.path / CONFIG} for {type(model).__name__}")
    with _serving_peft(servers, values and not later, not later), quiet_libraries():
        from infinity.api.expert_lora import ParamWrapper

        try:
            with patched(peft().tuners.lora.layer, "ParamWrapper", ParamWrapper), reading:
                if hasattr(model, "peft_config"):
                    adapted = _add_another(model, config, name)
                else:
                    adapted = peft().get_peft_model(model, config, adapter_name=name)
                check_used(adapted, config, given, name)
        except InfinityError:
            raise
        except (ValueError, TypeError, IndexError) as error:
            key = "trainable_token_indices: " if isinstance(error, IndexError) else ""
            raise RecipeError(f"adapters for {type(model).__name__}: {key}{error}") from error
    return adapted


def _add_another(model: Any, config: Any, name: str) -> Any:
    """Add an adapter to a model of peft that has some, and let all of them train, as peft lets one."""
    from infinity.api.expert_lora import adapted_parameters

    for module in layers_of(model):
        module.__dict__["_active_adapter"] = [model.active_adapter]  # as peft itself has it
    wanted = adapted_parameters(config, model)
    for other, given in model.peft_config.items():
        named = adapted_parameters(given, model)
        if wanted and named and wanted != named:  # peft nests their wrappers, in an order of its own
            raise RecipeError(
                f"adapter {name!r} is on the parameters {', '.join(wanted)}, adapter {other!r} on "
                f"{', '.join(named)}: all adapters of one base that are on parameters must be on the same. "
                "Name these in lora.target_parameters, or train the adapters one at a time"
            )
    model.add_adapter(name, config)
    for params in parameters_by_adapter(model).values():
        for param in params:
            param.requires_grad_(True)
    return model


def _servers(model: nn.Module) -> set[Any]:
    """Return what serves the parameters of ``model``; a plan has nothing that does."""
    served = (m._parameters for m in model.modules() if isinstance(m._parameters, ServedParameters))
    return {parameters.server for parameters in served}


@contextlib.contextmanager
def _serving_peft(servers: set[Any], values: bool, copies: bool) -> Iterator[None]:
    """Serve released parameters inside as peft needs them to make adapters.

    Parameters that it asks for have their shapes only, so that nothing is gathered; with ``values`` those of
    a unit at a time. Whole copies of modules (modules_to_save) have values with ``copies``.
    """

    def copy(server: Any, param: nn.Parameter) -> nn.Parameter:
        if not copies:
            return nn.Parameter(torch.empty_like(param, memory_format=torch.contiguous_format))
        with server.values.gathered([param], modify=False):
            return nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format))

    with contextlib.ExitStack() as stack:
        for server in servers:
            if not values:
                stack.enter_context(patched(server, "touch", lambda param, siblings: None))
            stack.enter_context(patched(server, "deep_copy", partial(copy, server)))
        yield
    for server in servers:
        server.reopen()  # after what was read, units come next


@contextlib.contextmanager
def placeholders_in_state_dict(model: nn.Module) -> Iterator[None]:
    """Let ``state_dict()``, of which peft takes the keys, gather nothing."""
    with contextlib.ExitStack() as stack:
        for server in _servers(model):
            stack.enter_context(patched(server.values, "_export", lambda *_: None))
        yield


def _cut_into_units(adapted: nn.Module, construction: Construction) -> None:
    """Cut the new modules of ``adapted`` into units, as if they had been built in the model's own block."""
    from infinity.api.expert_lora import Factor

    full = construction.builder.sizes.full_nbytes
    device = torch.device("meta" if construction.device.type == "meta" else "cpu")
    with construction:
        construction.late = None  # adapters have their values
        construction.add_root(adapted)
        nbytes, block = 0, [""]
        for name, module in adapted.named_modules():
            own = [p for p in module.parameters(recurse=False) if p.requires_grad]
            fresh = [p for p in own if not construction.builder.has(p)]
            if not fresh:
                continue
            parts = name.split(".")  # the block of model.layers.3.mlp.up is model.layers.3
            number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
            inside = parts[: number + 1]
            if nbytes >= (full if inside == block else full / _SHARE):
                construction.builder.close()
                nbytes = 0
            if isinstance(module, Factor):
                module.draw(device)
            construction.builder.join(module)
            nbytes += sum(param.numel() for param in fresh) * construction.builder.dtype.itemsize
            block = inside
        construction.builder.close()


def lora_groups(
    model: nn.Module, *, lr: float, lr_ratio: float = 1.0, weight_decay: float = 0.01,
    name: str | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return parameter groups for ``infinity.AdamW(model, params=...)`` in which B may learn faster than A.

    LoRA+ (arXiv:2402.12354): matrices B, and vectors (DoRA's magnitudes, copies of norms), have ``lr_ratio``
    times the rate ``lr`` of the others, as in peft. Vectors do not decay. Of several adapters they are those
    of the one called ``name``, which is the value of their key ``adapter``; StateError: there is none.
    """
    key = {} if name is None else {"adapter": name}
    if name is not None:
        check_adapter(model, name)
        mine = {id(param) for param in parameters_by_adapter(model)[name]}
    others: list[nn.Parameter] = []
    fast = others if lr_ratio == 1 else []
    vectors: list[nn.Parameter] = []
    for full_name, param in model.named_parameters():
        if param.requires_grad and (name is None or id(param) in mine):
            is_b = "lora_B" in full_name or "lora_embedding_B" in full_name
            group = vectors if param.ndim < 2 else fast if is_b else others
            group.append(param)
    groups = [(others, lr, weight_decay), (vectors, lr * lr_ratio, 0.0)]
    if fast is not others:
        groups.insert(1, (fast, lr * lr_ratio, weight_decay))
    return [
        {"params": each, "lr": rate, "weight_decay": decay, **key} for each, rate, decay in groups if each
    ]
