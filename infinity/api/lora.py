"""Adds LoRA adapters (arXiv:2106.09685) through ``peft``: the base stays frozen where it lives.

[Note: a frozen base]
A frozen unit has no gradient, no optimizer state and no second version: it is read once for forward and once
for backward, and never written. Adapters are in units of their own, as a unit of both would carry the state
of both. They are added to a finished model, of which peft asks only shapes and dtypes: nothing is fetched.

[Note: as if alone]
A model with several adapters is its base, and inside ``with infinity.adapter(model, name)`` the base with
that adapter alone. Only its parameters get gradients there. Each adapter has its own parameter groups, so
gradients are clipped by its own norm, and an adapter whose gradient is not finite is skipped without the
others. Its random generators go on where its last block left them. So each is trained to the bit as if it
were alone.
"""

import contextlib
import re
import weakref
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn

from infinity.activations.recompute import Choice, patched
from infinity.api.adapters import (
    CONFIG,
    NAMES,
    LoraConfig,
    SavedAdapters,
    check_used,
    from_peft,
    note_on_base,
    peft,
    saved_names,
)
from infinity.core.config import SettingError, settings_of, shown
from infinity.core.errors import (
    CheckpointError,
    InfinityError,
    RecipeError,
    StateError,
    did_you_mean,
    library_errors,
    quiet_libraries,
)
from infinity.core.files import user_path
from infinity.device.accelerator import generator_states, set_generator_states
from infinity.engine.runtime import Runtime, runtime_of
from infinity.partition.divided import Parts
from infinity.partition.init_context import Construction, ServedParameters

#: What peft calls an adapter without a name.
DEFAULT = "default"
#: Parts of the names of modules and parameters in a model with adapters.
_OF_PEFT = {
    "base_model", "model", "base_layer", "original_module", "modules_to_save", "token_adapter", "weight",
    "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "lora_dropout",
    "trainable_tokens_delta", "trainable_tokens_original",
}  # fmt: skip
#: Adapters of two blocks share a unit while it is smaller than ``1 / _SHARE`` of a full one.
_SHARE = 16
_NOT_DIVIDED = (
    "{} of what is divided over the ranks of a mesh: only plain adapters of linear layers are. Name other "
    "modules, leave out lora.dora, or train adapters without a tp_plan"
)


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
            hint = did_you_mean(each, known, f"known: {', '.join(known)}")
            raise RecipeError(f"add_lora has no setting {shown(each)}{hint}")
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
    with contextlib.ExitStack() as files:
        if not isinstance(config, LoraConfig):
            adapted = wrap(model, from_peft(config, model), None, name)
        elif config.adapter is None:
            adapted = wrap(model, config.for_peft(model), None, name)
        else:
            saved = files.enter_context(SavedAdapters(user_path(config.adapter, "the directory of adapters")))
            adapted = wrap(model, saved.config, saved, name)
            with placeholders_in_state_dict(model):
                saved.fill(adapted, name)
        _cut_into_units(adapted, construction)
    return adapted


def wrap(model: Any, config: Any, saved: SavedAdapters | None = None, name: str = DEFAULT) -> Any:
    """Return peft's model around ``model``, with adapters whose first values follow from ``config``.

    A ``model`` of peft gets one adapter more, and is returned.
    With ``saved``, or in a run that is resumed, values that follow from the base's are not computed.
    """
    if config.use_dora and _divided(model):
        raise StateError(_NOT_DIVIDED.format("DoRA layer"))
    given = None if saved is not None else deepcopy(config)  # peft changes it
    servers = _servers(model)
    later = saved is not None or any(server.resuming for server in servers)  # first values come from there
    values = bool(config.trainable_token_indices) or config.use_dora
    reading: Any = contextlib.nullcontext()
    if saved is not None:
        reading = library_errors(CheckpointError, f"{saved.path / CONFIG} for {type(model).__name__}")
    with _serving_peft(model, values and not later, not later), quiet_libraries():
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
    config.base_model_name_or_path = model.get_base_model().__dict__.get("name_or_path")  # as peft's first
    model.add_adapter(name, config)
    for params in parameters_by_adapter(model).values():
        for param in params:
            param.requires_grad_(True)
    return model


def _divided(model: nn.Module) -> list[ServedParameters]:
    """Return what serves parameters that are divided over the ranks of a mesh."""
    served = (m._parameters for m in model.modules() if isinstance(m._parameters, ServedParameters))
    return [each for each in served if each.divided]


def _servers(model: nn.Module) -> set[Any]:
    """Return what serves the parameters of ``model``; a plan has nothing that does."""
    served = (m._parameters for m in model.modules() if isinstance(m._parameters, ServedParameters))
    return {parameters.server for parameters in served}


@contextlib.contextmanager
def _serving_peft(model: nn.Module, values: bool, copies: bool) -> Iterator[None]:
    """Serve released parameters inside as peft needs them to make adapters.

    Parameters that it asks for have their shapes only, so that nothing is gathered; with ``values`` those of
    a unit at a time. Whole copies of modules (modules_to_save) have values with ``copies``. What
    is divided over ranks gets the adapters of whole layers, which are divided then.
    """

    def copy(server: Any, param: nn.Parameter) -> nn.Parameter:
        if not copies:
            return nn.Parameter(torch.empty_like(param, memory_format=torch.contiguous_format))
        with server.values.gathered([param], modify=False):
            return nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format))

    with contextlib.ExitStack() as stack:
        for parameters in _divided(model):
            stack.enter_context(patched(parameters, "divided", {}))
        for server in (servers := _servers(model)):
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
        construction.serve_all(adapted)
        divide_adapters(adapted, construction.builder.units.parts)


def divide_adapters(model: nn.Module, parts: Parts) -> None:
    """Divide adapters as their layers are divided over the ranks of a mesh; StateError: they cannot be.

    The factor beside the divided dimension has this rank's part of it, the other one is whole on each rank.
    A takes its input as the layer does, and B gives its result as the layer does.
    """
    for layer in _divided_layers(model, parts):
        from torch.distributed.tensor import Replicate, distribute_tensor

        base: Any = getattr(layer, "base_layer", None)
        if not isinstance(base, nn.Linear) or (part := parts.of(base)) is None:
            raise StateError(_NOT_DIVIDED.format(type(layer).__name__))
        spec = part.spec
        pairs = [(a, layer.lora_B[name]) for name, a in layer.lora_A.items()]
        for number, factor in ((number, factor) for pair in pairs for number, factor in enumerate(pair)):
            if any(id(p) in parts for p in dict.values(factor._parameters)):
                continue  # of another adapter, made before
            how = [each if each.is_shard(1 - number) else Replicate() for each in spec.placements]
            for key, whole in [*factor.named_parameters()]:
                divided = distribute_tensor(whole.detach(), spec.mesh, how, src_data_rank=None)
                factor.register_parameter(key, nn.Parameter(divided))
            hooks = base._forward_hooks if number else base._forward_pre_hooks
            put: Any = factor.register_forward_hook if number else factor.register_forward_pre_hook
            for hook in [*hooks.values()]:
                if getattr(hook, "__module__", "").startswith("torch.distributed.tensor"):  # of its style
                    put(hook)


def _divided_layers(model: nn.Module, parts: Parts) -> list[Any]:
    """Return the layers with adapters that have parameters divided over the ranks of a mesh."""
    return [
        layer
        for layer in (layers_of(model) if parts else ())
        if any(id(p) in parts for m in layer.modules() for p in dict.values(m._parameters))
    ]


def check_adapters(model: nn.Module, parts: Parts) -> None:
    """Raise a StateError for adapters of divided layers that peft made by itself, so that they are not."""
    for layer in _divided_layers(model, parts):
        factors = getattr(layer, "lora_A", {"": layer}).values()
        if any(id(p) not in parts for each in factors for p in dict.values(each._parameters) or (None,)):
            raise StateError(
                "peft made adapters for a model that is divided over the ranks of a mesh: call "
                "infinity.add_lora(model, config), which takes a peft.LoraConfig and returns peft's model"
            )


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
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for full_name, param in model.named_parameters():
        if param.requires_grad and (name is None or id(param) in mine):
            is_vector, is_b = param.ndim < 2, "lora_B" in full_name or "lora_embedding_B" in full_name
            groups.setdefault((is_vector, is_vector or (is_b and lr_ratio != 1)), []).append(param)
    rates, decays = (lr, lr * lr_ratio), (weight_decay, 0.0)
    return [
        {"params": groups[each], "lr": rates[each[1]], "weight_decay": decays[each[0]], **key}
        for each in sorted(groups)
    ]


class Adapters:
    """The adapters of one model, of which one at a time is used: see [Note: as if alone]."""

    def __init__(self, runtime: Runtime) -> None:
        self.device = runtime.ranks.device
        self.choice = Choice()
        #: The states of the random generators, by name of the adapter.
        self.generators: dict[str, dict[str, Any]] = {}

    def add(self, name: str, model: nn.Module) -> None:
        """Take note of a new adapter, drawn just now; from the second one on the base is used without any."""
        self.generators[name] = generator_states(self.device)
        if len(self.generators) > 1:
            self.choice = Choice()
            follow(model, self.choice)
            model.__dict__.update(set_adapter=_refused, disable_adapter=_refused)  # they freeze others


def _refused(*args: Any, **kwargs: Any) -> None:
    raise StateError(
        "set_adapter or disable_adapter of a model with several adapters: run what one of them does inside "
        "`with infinity.adapter(model, name)`; outside the model is its base"
    )


_adapters: weakref.WeakKeyDictionary[Runtime, Adapters] = weakref.WeakKeyDictionary()


def adapters_of(model: nn.Module) -> Adapters:
    """Return what is known of a model's adapters; it has no names if there are none."""
    runtime = runtime_of(model)
    if runtime not in _adapters:
        _adapters[runtime] = Adapters(runtime)
    return _adapters[runtime]


def check_adapter(model: nn.Module, name: str) -> None:
    """Raise a StateError unless the model has an adapter called ``name``."""
    names = adapters_of(model).generators
    if not isinstance(name, str) or name not in names:
        known = ", ".join(map(repr, names)) or "none: call infinity.add_lora first"
        raise StateError(f"the model has no adapter {shown(name)}; it has {known}")


@contextlib.contextmanager
def adapter(model: nn.Module, name: str) -> Iterator[None]:
    """Context manager in which one of a model's several adapters is used, and trained.

    Run both forward and backward inside::

        for name, batch in batches:
            with infinity.adapter(model, name), infinity.no_sync(model) if more else nullcontext():
                model(**batch).loss.backward()
        optimizer.step()  # each adapter is clipped by its own norm

    Several backward passes before ``step`` are micro-batches, so all but the last go under
    ``infinity.no_sync``. Outside the block a model with several adapters is its base. Every rank must use the
    same ones in the same order.

    Raises:
        StateError: The model has no such adapter, or the block is inside another one.
    """
    check_adapter(model, name)
    adapters = adapters_of(model)
    if len(adapters.generators) == 1:
        yield
        return
    if names := adapters.choice.names:
        raise StateError(f"adapter {name!r} inside a block of adapter {names[0]!r}: end that block first")
    before = generator_states(adapters.device)
    set_generator_states(adapters.generators[name], adapters.device)
    try:
        with adapters.choice.made(name):
            yield
    finally:
        adapters.generators[name] = generator_states(adapters.device)
        set_generator_states(before, adapters.device)


def follow(model: nn.Module, choice: Choice) -> None:
    """Let peft's modules use the adapters that ``choice`` names."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    for module in layers_of(model):
        names = choice.names
        if isinstance(module, TrainableTokensLayer):  # which takes it that it has all of them
            names = choice.among(module.token_indices)
        module.__dict__["_active_adapter"] = names


def layers_of(model: nn.Module) -> list[Any]:
    """Return peft's modules that hold adapters, by their names, in containers ``adapter_layer_names``."""
    if not hasattr(model, "peft_config"):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = BaseTunerLayer, AuxiliaryTrainingWrapper
    return [module for module in model.modules() if isinstance(module, kinds)]


def parameters_by_adapter(model: nn.Module) -> Mapping[str, list[nn.Parameter]]:
    """Return the parameters of each adapter, in the order of the model's."""
    if not hasattr(model, "peft_config"):
        return {}
    with placeholders_in_state_dict(model):  # not read: they may be those of a run that has not gone on yet
        names: Any = model.peft_config
        found = {id(each): name for name in names for each in saved_names(model, name).values()}
    by_name: dict[str, list[nn.Parameter]] = {}
    for param in model.parameters():
        if id(param) in found:
            by_name.setdefault(found[id(param)], []).append(param)
    return by_name
