"""Adapts parameters that are no layer: experts that transformers packs into one parameter, and routers.

[Note: an adapted parameter]
peft's own wrapper of such a parameter (``ParamWrapper``, ``target_parameters``) adds the whole delta to the
whole weight in each forward. Here the sum ``W + scaling * left @ right`` is never made. While the wrapped
module runs, its attribute is an :class:`AdaptedWeight`: operators that read it multiply by ``W``, and by one
factor after the other, for the same tokens of the same experts. So ``W`` may be in tiles, in stored form or
on NVMe, and is read as without adapters.

[Note: factors of experts]
``left`` is ``(experts, dim 1 of W, rank)`` and ``right`` is ``(experts, rank, dim 2 of W)``: packed experts
themselves, in units of their own, and in tiles where memory cannot hold them whole. peft's ``lora_A`` is the
factor that multiplies inputs first, ``lora_B`` the other one; it saves both as matrices.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from einops import rearrange
from peft.tuners.lora import layer as peft_layer
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import Tensor, nn

from infinity.activations.recompute import patched
from infinity.checkpoint.directory import Stored
from infinity.core.errors import RecipeError, did_you_mean
from infinity.partition.builder import routers

_MATMULS = ("matmul", "mm", "bmm", "__matmul__")
#: What an adapted weight has in common with the weight.
_OF_WEIGHT = {"data_ptr", "device", "dim", "dtype", "is_floating_point", "ndim", "shape", "size"}
#: ``F.grouped_mm`` wants rows of a multiple of this.
_ALIGN_NBYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedWeight:
    """Stands for ``weight + scaling * left @ right``; see [Note: an adapted parameter].

    The last two dimensions are those of a matrix; a first one is experts.
    """

    weight: Any  # a tensor, or what stands for one
    left: Any
    right: Any
    scaling: float
    name: str  # of the parameter, for errors

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        own = next(each for each in (*args, *kwargs.values()) if isinstance(each, cls))
        product = name in _MATMULS or "grouped_mm" in name
        if len(args) > 1 and args[1] is own and (product or name == "linear"):
            inputs, rest = args[0], args[2:]
            base = func(inputs, own.weight, *rest, **kwargs)
            if name == "linear":  # which multiplies by the transposed weight, and adds a bias
                return own._added(base, func(func(inputs, own.right), own.left))
            if "grouped_mm" in name:
                func, kwargs = own._grouped_mm(func), {"offs": kwargs.get("offs")}
            return own._added(base, func(func(inputs, own.left, **kwargs), own.right, **kwargs))
        if len(args) == 2 and args[0] is own and product and not kwargs:
            return own._added(func(own.weight, args[1]), func(own.left, func(own.right, args[1])))
        raise own._refusal(name)

    def _added(self, base: Tensor, delta: Tensor) -> Tensor:
        return base + delta * self.scaling  # as peft's linear layer: rounded twice in bf16

    def _grouped_mm(self, func: Any) -> Any:
        """Return ``func``, or what multiplies factors of this rank one expert after the other."""
        if self.left.shape[-1] * self.dtype.itemsize % _ALIGN_NBYTES == 0:
            return func
        import transformers.integrations.moe  # noqa: F401  (registers it)

        return torch.ops.transformers.grouped_mm_fallback

    def _each(self, change: Any) -> "AdaptedWeight":
        weight, left, right = map(change, (self.weight, self.left, self.right))
        return replace(self, weight=weight, left=left, right=right)

    def __getitem__(self, index: Any) -> "AdaptedWeight":
        if self.ndim != 3 or not isinstance(index, int | Tensor):
            raise self._refusal("indexing other than by experts")
        return self._each(lambda each: each[index])

    def transpose(self, dim0: int, dim1: int) -> "AdaptedWeight":
        if {dim0 % self.ndim, dim1 % self.ndim} != {self.ndim - 2, self.ndim - 1}:
            raise self._refusal("transposing experts")
        swapped = self._each(lambda each: each.transpose(dim0, dim1))
        return replace(swapped, left=swapped.right, right=swapped.left)

    def t(self) -> "AdaptedWeight":
        return self.transpose(-2, -1)

    T = mT = property(t)  # noqa: N815  (torch's names)

    def to(self, *args: Any, **kwargs: Any) -> "AdaptedWeight":
        return self._each(lambda each: each.to(*args, **kwargs))

    def type(self, dtype: torch.dtype) -> "AdaptedWeight":
        return self.to(dtype)

    def float(self) -> "AdaptedWeight":
        return self.to(torch.float32)

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_WEIGHT:
            raise self._refusal(name)
        return getattr(self.weight, name)

    def _refusal(self, what: str) -> AttributeError:
        return AttributeError(
            f"{what} on {self.name}, which has adapters: linear layers and products of experts can read it. "
            "Leave it out of lora.target_parameters and lora.target_modules by naming others there"
        )


class Factor(nn.Module):
    """Holds one factor of a parameter's adapters; see [Note: factors of experts].

    It has values when :meth:`draw` was called: those of all layers need not be in memory together.
    """

    packs_experts = True  # for infinity.partition.builder, if there are three dimensions

    def __init__(self, shape: Sequence[int], *, is_first: bool, transposed: bool, std: float | None) -> None:
        super().__init__()
        self.num_experts, self._is_first = shape[0], is_first
        #: Dimensions of packed values, and of the matrix that peft saves of them.
        packed = ("e i r", "e r o") if transposed else ("e r i", "e o r")
        self._packed, self._matrix = (packed[0], "(e r) i") if is_first else (packed[1], "o (r e)")
        self._std = std  # of normal values; None: uniform ones, as of peft's layers
        self.stored: Stored | None = None  # where to read the values, as they are saved
        self.weight = nn.Parameter(torch.empty(shape, device="meta"))

    def draw(self, device: torch.device) -> None:
        """Create the values, on the CPU or the meta device: zeros for ``lora_B``."""
        values = torch.zeros(self.weight.shape, device=device)
        if self.stored is not None and not values.is_meta:
            values.copy_(self.of_matrix(self.stored.whole(torch.float32)))
            self.stored = None  # its file is closed soon
        elif self._is_first and self._std is not None:
            values.normal_(std=self._std)
        elif self._is_first:
            bound = 1 / math.sqrt(self.matrix_shape[-1])
            values.uniform_(-bound, bound)
        self.weight = nn.Parameter(values, requires_grad=self.weight.requires_grad)

    @property
    def matrix_shape(self) -> torch.Size:
        """The shape of the matrix that peft saves: of all experts."""
        return self.as_matrix(torch.empty(self.weight.shape, device="meta")).shape

    def as_matrix(self, values: Tensor) -> Tensor:
        """Return the values as peft saves them."""
        return values if values.ndim == 2 else rearrange(values, f"{self._packed} -> {self._matrix}")

    def of_matrix(self, matrix: Tensor) -> Tensor:
        """Return the factor whose values peft saved as ``matrix``."""
        pattern = f"{self._matrix} -> {self._packed}"
        return matrix if self.weight.ndim == 2 else rearrange(matrix, pattern, e=self.num_experts)


class ParamWrapper(peft_layer.ParamWrapper):  # type: ignore[misc]  # peft knows its wrapper by its class's name
    """Wraps a module, one of whose parameters has adapters; see [Note: an adapted parameter]."""

    def update_layer(self, adapter_name: str, r: int, lora_alpha: float, config: Any, **kwargs: Any) -> None:
        with torch.device("meta"):  # peft's own matrices; here they are cut by experts
            super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)
        shape = self.get_param().shape
        left, right = (*shape[:-1], r), (*shape[:-2], r, shape[-1])
        first, second = (left, right) if self.is_left_first else (right, left)
        std = 1 / r if config.init_lora_weights == "gaussian" else None
        make = partial(Factor, transposed=self.is_left_first, std=std)
        self.lora_A[adapter_name] = make(first, is_first=True)
        self.lora_B[adapter_name] = make(second, is_first=False)

    @property
    def is_left_first(self) -> bool:
        """Whether ``lora_A`` is the left factor, as peft has it for weights ``(experts, in, out)``."""
        return self._param_ndim == 3 and not self._did_swap_in_out_features

    @property
    def factors(self) -> tuple[Factor, Factor]:
        """The factors of the adapter that :class:`SavedAdapters` are read as, ``lora_A`` first."""
        return self.lora_A["default"], self.lora_B["default"]

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        module, name = self.get_base_layer(), self.parameter_name
        weight = module._parameters.get(name)  # reading the attribute would gather it
        for adapter in (each for each in active_adapters if each in self.lora_A):
            first, second = self.lora_A[adapter].weight, self.lora_B[adapter].weight
            left, right = (first, second) if self.is_left_first else (second, first)
            named = f"{type(module).__name__}.{name}"
            weight = AdaptedWeight(weight, left, right, self.scaling[adapter], named)
        with patched(module, name, weight):
            yield


def name_experts(config: Any, model: nn.Module) -> None:
    """Let ``config``, which names every linear layer, name packed experts, too, where ``model`` has some.

    peft takes names of projections for those of experts that are packed, which a config of peft that other
    layers share (shared experts, dense blocks) can then not name; and it would adapt the router.
    """
    if packed := packed_parameters(model):
        patterns = dict(config.rank_pattern), dict(config.alpha_pattern)
        convert_peft_config_for_transformers(config, model, None)
        config.target_parameters = packed
        config.rank_pattern, config.alpha_pattern = patterns
        linear = ((name, each) for name, each in model.named_modules() if isinstance(each, nn.Linear))
        special = {name for name, each in linear if type(each).forward is not nn.Linear.forward}
        config.exclude_modules = sorted(special.union(name for name, _ in routers(model))) or None


def adapted_parameters(config: Any, model: Any) -> list[str]:
    """Return the names of the parameters that ``config`` adapts, also by names of projections."""
    converted = deepcopy(config)
    convert_peft_config_for_transformers(converted, model.get_base_model(), None)
    return sorted(converted.target_parameters or ())


def check_parameters(config: Any, model: nn.Module) -> None:
    """Raise unless the parameters that ``config`` names are matrices or experts, and all else fits them."""
    shapes = {
        plain_name(name): tuple(param.shape)
        for name, param in model.named_parameters()
        if ".lora_" not in name
    }
    modules = ((plain_name(name), each) for name, each in model.named_modules())
    embeddings = [f"{name}.weight" for name, each in modules if isinstance(each, nn.Embedding)]
    for each in config.target_parameters or ():
        found = {name: shape for name, shape in shapes.items() if f".{name}".endswith(f".{each}")}
        if not found:
            ends = {name.rpartition(".")[2] if "." not in each else _in_block(name) for name in shapes}
            what = f"lora.target_parameters={each!r}: no parameter of {type(model).__name__} ends so"
            raise RecipeError(what + did_you_mean(each, sorted(ends)))
        for name, shape in found.items():
            if len(shape) not in (2, 3):
                raise RecipeError(
                    f"lora.target_parameters={each!r}: {name} is {shape}; wanted (experts, rows, columns), "
                    "or (rows, columns)"
                )
            if name in embeddings:
                raise RecipeError(
                    f"lora.target_parameters={each!r}: {name} is of an embedding, which is no product; name "
                    f"{name.split('.')[-2]} in lora.target_modules"
                )
    packed = ", ".join(sorted(config.target_parameters or ()))
    for key, value, wanted in (
        ("dropout", config.lora_dropout, (0.0,)),
        ("dora", config.use_dora, (False,)),
        ("init", config.init_lora_weights, (True, "gaussian")),
    ):
        if packed and value not in wanted:
            allowed = "default or gaussian" if key == "init" else wanted[0]
            raise RecipeError(
                f"lora.{key}={value}: wanted {allowed} with adapters of {packed}, for which peft has no "
                "other; or name other layers alone in lora.target_modules"
            )


def plain_name(name: str) -> str:
    """Return the name that a module, or its parameter, has in a model without adapters."""
    return name.replace(".base_layer", "")


def _in_block(name: str) -> str:
    """Return the name of a parameter in its block: what follows the block's number."""
    parts = name.split(".")
    number = max((i for i, part in enumerate(parts) if part.isdigit()), default=-1)
    return ".".join(parts[number + 1 :])


def packed_parameters(model: nn.Module) -> list[str]:
    """Return the names, in their blocks, of parameters with the weights of all experts of a module."""
    owned = (
        (f"{plain_name(path)}.{name}", param, getattr(module, "num_experts", None))
        for path, module in model.named_modules()
        for name, param in module.named_parameters(recurse=False)
        if not isinstance(module, Factor)
    )
    return sorted(
        {_in_block(name) for name, param, count in owned if param.ndim == 3 and len(param) == count}
    )


def factors_of(adapted: nn.Module) -> dict[int, Factor]:
    """Return the factors of a model's adapters of parameters, by the ids of their parameters."""
    return {id(each.weight): each for each in adapted.modules() if isinstance(each, Factor)}
