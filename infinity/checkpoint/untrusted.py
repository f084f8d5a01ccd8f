"""Limits what a checkpoint can cause: no code, no network, and no model that its weights do not fill.

[Note: whose code runs]
Some names in a ``config.json`` mean code that is fetched: an attention ``owner/repository`` is a native
library of the hub, as are ``flash_attention_2`` where that package is not installed and the experts
``deepgemm`` and ``sonicmoe``; ``auto_map`` means Python files beside the weights. Only names of installed
code are taken. Models of transformers that ask for a kernel by themselves do without it: :func:`offline`.

[Note: sizes]
A count in ``config.json`` costs its writer nothing and its reader memory: 10**9 labels make as many names. So
implausible counts are refused before a config is made of them, and a model is refused while it is built if it
has many more parameters than the checkpoint has tensors.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from infinity.core.errors import CheckpointError

#: Implementations of experts in transformers that are written in torch.
_EXPERTS = ("eager", "batched_mm", "grouped_mm")
#: Keys that count modules or labels, keys that do not, and the most that is believed of a count.
_COUNTS, _SIZES = re.compile("layer|block|depth|expert|stage|label"), re.compile("size|dim|length|position")
_MOST_COUNTED = 100_000
#: The most parameters per stored tensor, since some are cut into several, and the most besides.
_PARAMETERS_PER_TENSOR, _MOST_BESIDE = 8, 2_000


@contextmanager
def offline() -> Iterator[None]:
    """Block the hub and its kernels inside, whatever the environment says."""
    from huggingface_hub import constants
    from transformers.integrations import hub_kernels

    kernels: Any = hub_kernels
    loader = getattr(kernels, "get_kernel_hub", None)  # not there without the package "kernels"
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True

    def refuse(name: str, **_: object) -> Any:
        raise ImportError(f"{name} is code of the hub, which infinity does not load")

    kernels.get_kernel_hub = refuse
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
        if loader is None:
            del kernels.get_kernel_hub
        else:
            kernels.get_kernel_hub = loader


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


@contextmanager
def bounded_by(tensors: int, where: Path) -> Iterator[None]:
    """Limit the parameters of a model that is built inside by the checkpoint's number of ``tensors``."""
    most, count = _PARAMETERS_PER_TENSOR * tensors + _MOST_BESIDE, 0

    def register(module: nn.Module, name: str, param: nn.Parameter) -> None:
        nonlocal count
        count += 1
        if count > most:
            raise CheckpointError(
                f"{where} describes a model of more than {most} parameters, but the weights beside it are "
                f"{tensors} tensors: the number of its layers, or the like, is not that of these weights"
            )

    handle = register_module_parameter_registration_hook(register)
    try:
        yield
    finally:
        handle.remove()
