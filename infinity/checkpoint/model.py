"""Builds the model of a directory's ``config.json``, of transformers or of ours, without values.

[Note: whose code runs]
A checkpoint brings no code. Some names in a ``config.json`` mean code that is fetched: an attention
``owner/repository`` is a native library of the hub, as are ``flash_attention_2`` where that package is not
installed and the experts ``deepgemm`` and ``sonicmoe``; ``auto_map`` means Python files beside the weights.
Only names of installed code are taken. Models that ask for kernels by themselves do without: :func:`offline`.

[Note: sizes]
10**9 labels in ``config.json`` make as many names. So implausible counts are refused before one is made.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from infinity.activations.recompute import patched
from infinity.checkpoint.directory import read_json_object
from infinity.checkpoint.forms import read_quantization
from infinity.core.errors import CheckpointError, library_errors, optional_package

#: Models that transformers has under another name; Kimi-K2's own code is that of DeepSeek-V3.
_ALIASES = {"kimi_k2": "deepseek_v3"}
#: Implementations of experts in transformers that are written in torch.
_EXPERTS = ("eager", "batched_mm", "grouped_mm")
#: Keys that count modules or labels, keys that do not, and the most that is believed of a count.
_COUNTS, _SIZES = re.compile("layer|block|depth|expert|stage|label"), re.compile("size|dim|length|position")
_MOST_COUNTED = 100_000


class Architecture(NamedTuple):
    """Describes a model class outside transformers that is built from the entries of ``config.json``."""

    config: type[Any]  # a dataclass whose fields are the entries of the file
    model: Callable[[Any], Any]
    longest: str  # the field with the maximum sequence length


#: Keyed by the name in ``architectures``; a module that defines such a model registers it here.
ARCHITECTURES: dict[str, Architecture] = {}


def read_config(path: Path, overrides: dict[str, Any] | None = None) -> Any:
    """Return the ``config.json`` in ``path`` as transformers' config, or ours, with ``overrides``.

    No code of the directory runs. A model of ours is one that :func:`infinity.export` wrote. Raises a
    CheckpointError if the config cannot be read, an override is unknown, or the weights cannot be decoded.
    """
    ours, file = _architecture(path), path / "config.json"
    if ours is not None:
        known = {field.name for field in fields(ours.config)}
        if others := sorted(set(overrides or {}) - known):
            raise CheckpointError(f"{file}: {ours.config.__name__} has no {', '.join(others)}")
        entries = read_json_object(file) | (overrides or {})
        try:
            return ours.config(**{key: value for key, value in entries.items() if key in known})
        except ValueError as error:  # also of a setting
            raise CheckpointError(f"{file}: {error}") from error
    library = optional_package(
        "transformers", "hf", CheckpointError, f"{path}: Hugging Face models need transformers"
    )
    if (path / "adapter_config.json").exists() and not file.exists():
        base = read_json_object(path / "adapter_config.json").get("base_model_name_or_path")
        raise CheckpointError(
            f"{path} holds adapters of {base}, not a model; give the base's directory, or one where peft "
            "merged them into it (PeftModel.from_pretrained, merge_and_unload, save_pretrained)"
        )
    # a plain file with an object in it, whatever transformers would open
    raw = read_json_object(file)
    check_counts(raw, file)
    alias = _ALIASES.get(str(raw.get("model_type")))
    try:
        with library_errors(CheckpointError, str(file)), offline():
            given = {"trust_remote_code": False} if alias is None else {"model_type": alias}
            given |= {"local_files_only": True, "return_unused_kwargs": True} | (overrides or {})
            cls: Any = library.AutoConfig if alias is None else library.CONFIG_MAPPING[alias]
            config, unknown = cls.from_pretrained(str(path), **given)
    except CheckpointError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise CheckpointError(
            f"{file}: its model is code beside the weights (auto_map), which infinity does not run"
        ) from error
    if unknown := unknown.keys() - {"trust_remote_code", "local_files_only"}:
        raise CheckpointError(f"{type(config).__name__} has no {', '.join(sorted(unknown))}")
    restrict(config, file)
    read_quantization(path)  # it can be decoded
    for part in (config, _text_part(config, file)):
        vars(part).pop("quantization_config", None)  # the model's weights are plain ones
    return config


def vocabulary_size(path: Path) -> int:
    """Return the vocabulary size of the model in ``path``; a CheckpointError if it has none."""
    size = getattr(_text_config(path), "vocab_size", None)
    if not isinstance(size, int):
        raise CheckpointError(f"{path / 'config.json'} names no vocab_size; wanted a model of text")
    return size


def longest_sequence(path: Path) -> int | None:
    """Return how many positions the model in ``path`` was made for; None where its config does not say."""
    ours = _architecture(path)
    name = "max_position_embeddings" if ours is None else ours.longest
    longest = getattr(_text_config(path), name, None)
    return longest if isinstance(longest, int) else None


def is_ours(path: Path) -> bool:
    return _architecture(path) is not None


def _architecture(path: Path) -> Architecture | None:
    file = path / "config.json"
    named = read_json_object(file).get("architectures") if file.is_file() else None
    return ARCHITECTURES.get(str(named[0])) if isinstance(named, list) and named else None


def _text_config(path: Path) -> Any:
    config = read_config(path)
    return _text_part(config, path / "config.json") if hasattr(config, "get_text_config") else config


def _text_part(config: Any, where: Path) -> Any:
    """Return the part of a transformers config that describes text, which may be all of it."""
    with library_errors(CheckpointError, str(where)):
        part = config.get_text_config()
    if not hasattr(part, "get_text_config"):
        raise CheckpointError(
            f"{where}: its part on text is {repr(part)[:100]}, which {type(config).__name__} does not read; "
            "wanted a config, or none: remove it (text_config, text_encoder, decoder or generator)"
        )
    return part


def model_class(config: Any) -> Any:
    """Return the transformers class that :func:`build_model` chooses by itself; None where there is none."""
    import transformers

    named = getattr(config, "architectures", None)
    for name in named if isinstance(named, list) else ():
        with library_errors(CheckpointError, f"config.json: architectures: {name!r}"):
            cls = getattr(transformers, name, None) if isinstance(name, str) else None
        if inspect.isclass(cls) and issubclass(cls, transformers.PreTrainedModel):
            return cls
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def build_model(config: Any, auto_class: Any, dtype: torch.dtype) -> Any:
    """Build the model of ``config``, its parameters in fp32 and not initialized, with tied weights tied.

    ``auto_class`` may be a model's own; None: the one that the config names, or ``AutoModelForCausalLM``.
    """
    for ours in ARCHITECTURES.values():
        if isinstance(config, ours.config):
            if auto_class not in (None, ours.model):
                raise CheckpointError(
                    f"{getattr(auto_class, '__name__', auto_class)} cannot build a {type(config).__name__}; "
                    "leave auto_class out"
                )
            with torch.random.fork_rng(devices=[]), _fp32():
                return ours.model(config)
    import transformers
    from transformers import initialization

    with library_errors(CheckpointError, f"{type(config).__name__} of config.json"):
        _note_dtype(config, dtype)
        with torch.random.fork_rng(devices=[]), _fp32(), initialization.no_init_weights(), offline():
            make: Any = auto_class or model_class(config) or transformers.AutoModelForCausalLM
            if not (inspect.isclass(make) and issubclass(make, transformers.PreTrainedModel)):
                make = partial(make.from_config, dtype=torch.float32, trust_remote_code=False)
            model = make(config)
            model.tie_weights()
        _note_dtype(model.config, dtype)
    path = Path(config.name_or_path)
    file = path / "generation_config.json"
    if model.can_generate() and file.is_file():
        read_json_object(file)  # of a size that can be read
        with library_errors(CheckpointError, str(file)), offline():
            generation = transformers.GenerationConfig
            model.generation_config = generation.from_pretrained(str(path), local_files_only=True)
    return model


def _note_dtype(config: Any, dtype: torch.dtype) -> None:
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if part is not None:
            part.dtype = dtype


@contextmanager
def _fp32() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def offline() -> Iterator[None]:
    """Block the hub and its kernels inside, whatever the environment says."""
    from huggingface_hub import constants
    from transformers.integrations import hub_kernels

    def refuse(name: str, **_: object) -> Any:
        raise ImportError(f"{name} is code of the hub, which infinity does not load")

    with patched(constants, "HF_HUB_OFFLINE", True), patched(hub_kernels, "get_kernel_hub", refuse):
        yield


def check_counts(given: Any, where: Path, key: str = "") -> None:
    """Raise a CheckpointError if a number in a config, at any depth, counts more than any model has."""
    if isinstance(given, dict):
        for name, value in given.items():
            check_counts(value, where, name)
    elif isinstance(given, list):
        for value in given:
            check_counts(value, where, key)
    elif isinstance(given, int) and given > _MOST_COUNTED and _COUNTS.search(key) and not _SIZES.search(key):
        raise CheckpointError(f"{where}: {key} is {given}; wanted at most {_MOST_COUNTED}, as any model has")


def restrict(config: Any, where: Path) -> None:
    """Let ``config``, and all configs in it, name only installed code; see [Note: whose code runs]."""
    from transformers import PreTrainedConfig
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = ("eager", *(name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if _is_installed(name)))
    left, seen = [config], set[int]()
    while left:
        part = left.pop()
        if isinstance(part, dict):
            left += part.values()
        elif isinstance(part, list | tuple):
            left += part
        if not isinstance(part, PreTrainedConfig) or id(part) in seen:
            continue
        seen.add(id(part))
        left += vars(part).values()
        vars(part).pop("auto_map", None)
        for setting, known in (("attn_implementation", attention), ("experts_implementation", _EXPERTS)):
            named = getattr(part, f"_{setting}", None)
            if named is not None and named not in known:
                raise CheckpointError(
                    f"{where}: {setting} is {named!r}, which is no code of torch or transformers that is "
                    f"installed here, and a checkpoint chooses no other; known are {', '.join(known)}. "
                    f"Change it in the file, or call from_pretrained(..., {setting}={known[0]!r})"
                )


def _is_installed(attention: str) -> bool:
    """Return whether a registered attention needs nothing from the hub."""
    from transformers import utils

    version = attention.removeprefix("flash_attention_")
    if version != attention:
        return bool(getattr(utils, f"is_flash_attn_{version}_available", lambda: False)())
    return "/" not in attention and "|" not in attention
