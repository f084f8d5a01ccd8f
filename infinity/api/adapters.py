"""Settings of LoRA adapters, and directories of adapters in ``peft``'s format.

[Note: what peft says]
Names and shapes of a model's adapters, and the keys under which they are saved, are those of ``peft``. So
adapters of another base are noticed by their keys, and what ``peft`` saves can be read here, unless its
config asks for what a frozen base that is served in units cannot have.
"""

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from infinity.activations.recompute import patched
from infinity.checkpoint.directory import Stored, StoredTensors, TensorFile, read_json_object
from infinity.core.config import Config, SettingError, Valid, setting, settings_of, shown
from infinity.core.errors import (
    CheckpointError,
    InfinityError,
    RecipeError,
    library_errors,
    listed,
    optional_package,
)
from infinity.core.files import user_path

#: Names of adapters, which are those of modules and of folders.
NAMES = r"\w[\w-]{0,99}"
#: Files of a directory of adapters.
CONFIG, VALUES = "adapter_config.json", "adapter_model.safetensors"
#: Keys of ``peft``'s config that adapters may have here; others must have their defaults.
_KNOWN = {
    "target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern",
    "r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora",
    "fan_in_fan_out", "init_lora_weights", "modules_to_save", "trainable_token_indices", "task_type",
}  # fmt: skip
#: Keys that say how an adapter was made, or nothing.
_NEEDLESS = {
    "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_type", "peft_version",
    "megatron_core", "runtime_config",
}  # fmt: skip
#: Keys with lists of names, and whether one text, a regular expression, is allowed, too.
_LISTS = {"target_modules": True, "target_parameters": False, "modules_to_save": False}
#: Names of heads that peft itself lets a model that classifies train.
_HEADS = "classifier", "score"
#: Ways to set the first values that leave the base as it is.
_INITS = (True, False, "gaussian", "orthogonal")
#: What peft calls the task of a model, by the end of its name; of one that scores texts it trains the head.
_TASKS = ("ForCausalLM", "CAUSAL_LM"), ("ForSequenceClassification", "SEQ_CLS")
#: The most keys of a kind that an error names.
_MOST_NAMED = 4
#: Settings that may stand without adapters, and those that may stand beside lora.adapter.
_WITHOUT_ADAPTERS, _BESIDE_ADAPTER = ("rank", "alpha", "dropout", "adapter"), ("adapter", "lr_ratio")
#: Settings that map names of layers, or regular expressions, to numbers.
_PATTERNS = "rank_pattern", "alpha_pattern"
_RANKS = Valid(1, 2**16)
_ALPHAS = Valid(1e-6, 10**6)


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Config):
    """LoRA adapters on a frozen base model."""

    rank: int | None = setting(None, "rank of each adapter; null: train all weights", _RANKS)
    alpha: float = setting(16.0, "adapters are scaled by alpha / rank", _ALPHAS)
    target_modules: tuple[str, ...] = setting(
        (),
        "layers that get adapters, such as q_proj; empty, or all-linear: every linear layer except the head, "
        "and experts",
    )
    target_parameters: tuple[str, ...] = setting(
        (), "parameters that do and are no layer: packed experts, such as mlp.experts.down_proj"
    )
    dropout: float = setting(0.0, "dropout on the input of each adapter", Valid(least=0, below=1))
    rank_pattern: Mapping[str, int] | None = setting(
        None,
        "ranks of other layers, by the ends of their names or regular expressions: {down_proj: 4}",
        _RANKS,
    )
    alpha_pattern: Mapping[str, float] | None = setting(
        None, "other alphas, named as in rank_pattern", _ALPHAS
    )
    rslora: bool = setting(False, "scale by alpha / sqrt(rank) (rsLoRA)")
    dora: bool = setting(False, "train magnitudes of rows of weights, too (DoRA); reads the base once more")
    init: Literal["default", "gaussian", "orthogonal"] = setting(
        "default", "first values, as peft sets them; those that change the base (pissa, olora) are not known"
    )
    modules_to_save: tuple[str, ...] = setting(
        (), "modules of which a whole copy is trained and saved, such as lm_head or embed_tokens"
    )
    trainable_token_indices: tuple[int, ...] = setting(
        (), "tokens whose rows of the embedding are trained and saved, such as new ones", Valid(0, 2**31)
    )
    adapter: str | None = setting(
        None,
        "directory of adapters in peft's format to go on with, which says all of the above; null: new ones",
        path=True,
    )
    lr_ratio: float | None = setting(
        None, "learning rate of the matrices B, in units of optim.lr (LoRA+); null: 1", Valid(1e-3, 10**6)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if "all-linear" in self.target_modules and len(self.target_modules) > 1:
            wanted = "all-linear alone, or names of layers; lora.modules_to_save trains a head beside them"
            raise SettingError("target_modules", self.target_modules, wanted)
        names, wanted = [each.name for each in settings_of(LoraConfig)], "without lora.rank or lora.adapter"
        allowed: Sequence[str] = (
            names if self.active else _WITHOUT_ADAPTERS
        )  # else all weights would be trained
        if self.adapter is not None:
            allowed, wanted = _BESIDE_ADAPTER, f"with lora.adapter, which says it in its {CONFIG}"
        for name in (each for each in names if each not in allowed):
            value, default = getattr(self, name), getattr(LoraConfig, name)
            if value != default:
                raise SettingError(name, value, f"{json.dumps(default)} {wanted}")
        for name in _PATTERNS:
            if wrong := _no_pattern(getattr(self, name) or ()):
                raise SettingError(name, wrong, "names of layers, or their ends, or regular expressions")

    @property
    def active(self) -> bool:
        """Whether adapters are trained, and not all weights."""
        return self.rank is not None or self.adapter is not None

    def for_peft(self, model: nn.Module) -> Any:
        """Return ``peft.LoraConfig`` of new adapters for ``model``, which may have others."""
        if hasattr(model, "peft_config"):
            model = model.get_base_model()  # type: ignore[operator]
        every = self.target_modules == ("all-linear",) or not (self.target_modules or self.target_parameters)
        config = peft().LoraConfig(
            r=self.rank, lora_alpha=self.alpha, lora_dropout=self.dropout,
            target_modules="all-linear" if every else list(self.target_modules),
            target_parameters=list(self.target_parameters) or None,
            rank_pattern=self.rank_pattern or {}, alpha_pattern=self.alpha_pattern or {},
            use_rslora=self.rslora, use_dora=self.dora,
            init_lora_weights=True if self.init == "default" else self.init,
            modules_to_save=list(self.modules_to_save) or None,
            trainable_token_indices=list(self.trainable_token_indices) or None,
            task_type=next((task for end, task in _TASKS if type(model).__name__.endswith(end)), None),
        )  # fmt: skip
        from infinity.api.expert_lora import check_parameters, name_experts

        if every and not self.target_parameters:
            name_experts(config, model)
        check_parameters(config, model)
        return config


def _no_pattern(names: Iterable[str]) -> str | None:
    """Return the first of ``names`` that is no regular expression."""
    for each in names:
        try:
            re.compile(each)
        except re.error:
            return each
    return None


def _checked(entries: Mapping[str, Any], where: str, error: type[InfinityError]) -> Any:
    """Return the ``peft.LoraConfig`` of these entries; raise ``error`` if it cannot be used here."""
    kind = peft().LoraConfig
    if entries.get("peft_type") != "LORA":
        raise error(f"{where}: peft_type is {shown(entries.get('peft_type'))}; wanted 'LORA'")
    defaults = vars(kind())
    for name, value in entries.items():
        default = defaults.get(name)
        if name not in _KNOWN | _NEEDLESS and value != default and value not in (None, False, [], {}):
            raise error(
                f"{where}: {name} is {shown(value)}; adapters can be used here that have {shown(default)}"
            )
    init = entries.get("init_lora_weights", True)
    if init not in _INITS:
        raise error(
            f"{where}: init_lora_weights is {shown(init)}, which changes the base; convert the adapters "
            "to plain ones with peft (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    for name in _PATTERNS:
        if not isinstance(value := entries.get(name, {}), dict) or _no_pattern(value):
            raise error(f"{where}: {name} is {shown(value)}; wanted a map from names of layers to numbers")
    for value in (entries.get("lora_alpha", 1), *entries.get("alpha_pattern", {}).values()):
        if type(value) not in (int, float) or not math.isfinite(value):
            raise error(f"{where}: an alpha is {shown(value)}; wanted a finite number")
    for name, may_be_text in _LISTS.items():
        value = entries.get(name)
        texts = isinstance(value, list) and all(isinstance(each, str) for each in value)
        if not (value is None or texts or (may_be_text and isinstance(value, str))):
            raise error(f"{where}: {name} is {shown(value)}; wanted a list of names")
    with library_errors(error, where):
        return kind(**{name: value for name, value in entries.items() if name in _KNOWN})


def from_peft(config: Any, model: nn.Module) -> Any:
    """Return a copy of a user's own ``peft.LoraConfig``; raise a RecipeError if it cannot be used here."""
    from infinity.api.expert_lora import check_parameters

    if not isinstance(config, peft().LoraConfig):
        raise RecipeError(f"adapters: wanted a peft.LoraConfig; got {type(config).__name__}")
    entries = {name: sorted(each) if isinstance(each, set) else each for name, each in vars(config).items()}
    checked = _checked(entries | {"peft_type": "LORA"}, "the peft.LoraConfig", RecipeError)
    check_parameters(checked, model)
    return checked


def peft() -> Any:
    """Return the package ``peft``; RecipeError: it is not installed."""
    return optional_package("peft", "lora", RecipeError, "adapters need peft")


def saved_names(adapted: nn.Module, name: str = "default") -> dict[str, Tensor]:
    """Return the parameters that are saved of a model's adapter, by the keys that ``peft`` gives them."""
    from peft import get_peft_model_state_dict

    named = dict(adapted.named_parameters()) | dict(adapted.named_buffers())
    with rows_of_owners(adapted, name):
        found: dict[str, Tensor] = get_peft_model_state_dict(
            adapted, state_dict=named, save_embedding_layers=False, adapter_name=name
        )
    return found


@contextlib.contextmanager
def rows_of_owners(adapted: nn.Module, name: str) -> Iterator[None]:
    """Let ``peft`` ask only embeddings of which the adapter ``name`` trains rows for these rows."""
    from peft.utils.other import TrainableTokensWrapper

    with contextlib.ExitStack() as stack:
        for module in adapted.modules():
            if isinstance(module, TrainableTokensWrapper) and name not in module.token_adapter.token_indices:
                stack.enter_context(patched(module, "adapter_state_dict", lambda *_: {}))
        yield


def check_used(adapted: nn.Module, config: Any, given: Any = None, adapter: str = "default") -> None:
    """Raise a ValueError if ``config`` names modules or tokens that the model does not have.

    With ``given``, the config of new adapters as it was before peft added to it, layers are checked, too.
    """
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    layers, copied, tokens = list[str](), dict[str, nn.Module](), dict[str, Any]()
    for name, module in adapted.named_modules():
        if isinstance(module, LoraLayer) and adapter not in module.r:
            continue
        if isinstance(module, ParamWrapper):
            layers.append(f"{name.replace('.base_layer', '')}.{module.parameter_name}")
        elif isinstance(module, LoraLayer):
            layers.append(name)
        elif isinstance(module, ModulesToSaveWrapper) and adapter in module.modules_to_save:
            copied[name] = module.original_module
        elif isinstance(module, TrainableTokensWrapper) and adapter in module.token_adapter.token_indices:
            tokens[name] = module.token_adapter
    if given is not None:
        _check_layers(layers, config, given)
        _refuse_copies_of_tied(adapted, copied)
    classifies = config.task_type in ("SEQ_CLS", "TOKEN_CLS")
    for wanted in config.modules_to_save or ():
        if classifies and wanted in _HEADS and any(name.endswith(_HEADS) for name in copied):
            continue  # peft names both, and a model has one
        if any(name.endswith(wanted) for name in tokens):
            raise ValueError(
                f"modules_to_save names {shown(wanted)}, of which trainable_token_indices trains rows: leave "
                "one of them out"
            )
        if not any(name.endswith(wanted) for name in copied):
            raise ValueError(f"modules_to_save names {shown(wanted)}, but no module is called so")
    for layer in tokens.values():
        rows, numbers = layer.base_layer.weight.shape[0], layer.token_indices[adapter]
        if twice := [number for number, count in Counter(numbers).items() if count > 1]:
            raise ValueError(f"trainable_token_indices has {twice[0]} more than once")
        if wrong := [number for number in numbers if not 0 <= number < rows]:
            raise ValueError(f"trainable_token_indices has {wrong[0]}; the model has {rows} tokens")


def _check_layers(layers: Sequence[str], config: Any, given: Any) -> None:
    for key in _PATTERNS:
        for pattern in getattr(given, key):
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in layers):
                raise ValueError(f"{key} names {shown(pattern)}, but no layer with adapters is called so")
    # Where a pattern fits no layer peft itself raises; what is excluded came from no user.
    if isinstance(given.target_modules, str) or given.exclude_modules:
        return
    for name in sorted(set(given.target_modules or ()) & set(config.target_modules or ())):  # not converted
        if not any(f".{layer}".endswith(f".{name}") for layer in layers):
            raise ValueError(f"target_modules names {shown(name)}, but no layer is called so")


def _refuse_copies_of_tied(adapted: nn.Module, copied: Mapping[str, nn.Module]) -> None:
    uses = Counter(id(param) for _, param in adapted.named_parameters(remove_duplicate=False))
    for name, module in copied.items():
        if any(uses[id(param)] > 1 for param in module.parameters()):
            raise ValueError(
                f"modules_to_save names {shown(name.rpartition('.')[2])}, whose weight is tied to another "
                "one, and a copy would not be: name tokens in trainable_token_indices, or untie the model"
            )


def note_on_base(directory: str | Path, model: nn.Module) -> str:
    """Return a line if adapters in ``directory`` name another base than ``model``; empty: they do not."""
    where = user_path(directory, "the directory of adapters") / CONFIG
    named = read_json_object(where).get("base_model_name_or_path") if where.is_file() else None
    here = getattr(getattr(model, "config", None), "name_or_path", None)
    known = isinstance(named, str) and named and isinstance(here, str) and here
    if not known or Path(str(named)).name.casefold() == Path(str(here)).name.casefold():
        return ""
    return (
        f"the adapters in {directory} were trained on {shown(named)}, and this base is {shown(here)}: if "
        "that is another model of the same shapes, they mean nothing here"
    )


class SavedAdapters(StoredTensors):
    """Opens a directory of adapters that ``peft`` or :func:`infinity.save_lora` wrote.

    Raises a CheckpointError if a file is missing or damaged, or the config has what is not known here.
    """

    def _open(self) -> None:
        if (of_run := self.path / "adapters" / CONFIG).is_file() and not (self.path / CONFIG).is_file():
            raise CheckpointError(
                f"{self.path} is the folder of a run, and holds no {CONFIG}; use its {of_run.parent}"
            )
        self.entries = read_json_object(self.path / CONFIG)
        self.config = _checked(self.entries, str(self.path / CONFIG), CheckpointError)
        if not (self.path / VALUES).is_file():
            pickled = (self.path / "adapter_model.bin").exists()
            more = "; load and save it once with peft, which writes that file" if pickled else ""
            raise CheckpointError(f"{self.path} holds no {VALUES}{more}")
        file = TensorFile(self.path / VALUES)
        self._opened.callback(file.close)
        self.update(file.tensors)
        most = max((max(each.shape, default=0) for each in self.values()), default=0)
        ranks = [self.config.r, *self.config.rank_pattern.values()]  # memory is taken for them
        if wrong := [each for each in ranks if type(each) is not int or not 0 < each <= max(1, most)]:
            raise CheckpointError(
                f"{self.path / CONFIG}: rank {shown(wrong[0])} is that of no tensor of {VALUES}"
            )

    def match(self, adapted: nn.Module, name: str = "default") -> list[tuple[Tensor, Stored]]:
        """Return each saved parameter of ``adapted`` with its stored values.

        Raises a CheckpointError that names the keys of the one that the other has not, or that have another
        shape: the adapters are those of another model.
        """
        from infinity.api.expert_lora import factors_of

        wanted, factors = saved_names(adapted, name), factors_of(adapted)
        shapes = {
            key: factors[id(tensor)].matrix_shape if id(tensor) in factors else tensor.shape
            for key, tensor in wanted.items()
        }
        kind = type(adapted.get_base_model()).__name__  # type: ignore[operator]
        wrong = [f"{key} is not in the file" for key in wanted if key not in self]
        wrong += [f"{key} is not in the model" for key in self if key not in wanted]
        for key, shape in shapes.items():
            stored = self.get(key)
            if stored is not None and stored.shape != shape:
                wrong.append(f"{key} has shape {tuple(stored.shape)}, in the model {tuple(shape)}")
            elif stored is not None and not stored.dtype.is_floating_point:
                wrong.append(f"{key} is {stored.dtype}, and no floating-point tensor")
        if wrong:
            base = self.entries.get("base_model_name_or_path")
            why = "Their config names no base" if base is None else f"They are adapters of {shown(base)}"
            what = "give that model, or other adapters" if base else "give the model that they are of"
            if self.keys() == wanted.keys():
                ranks = self.config.r, *self.config.rank_pattern.values()
                why = f"Their {CONFIG} says rank {', '.join(map(str, ranks))}. {why}"
            if any(re.search(r"\.experts\.\d+\.", key) for key in self.keys() - wanted.keys()):
                why, what = "They have a layer for each expert (--per-expert)", "give the packed form"
            raise CheckpointError(
                f"{self.path / VALUES} does not fit {kind}: {listed(wrong, _MOST_NAMED)}. {why}: {what}"
            )
        return [(tensor, self[key]) for key, tensor in wanted.items()]

    @torch.no_grad()
    def fill(self, adapted: nn.Module, name: str = "default") -> None:
        """Copy the stored values into the adapters of ``adapted``, but those on the meta device.

        Adapters of parameters read theirs later, while this is open.
        """
        from infinity.api.expert_lora import factors_of

        factors = factors_of(adapted)
        for tensor, stored in self.match(adapted, name):
            if id(tensor) in factors:
                factors[id(tensor)].stored = stored
            elif not tensor.is_meta:
                tensor.copy_(stored.whole(tensor.dtype))
