"""Rules of whole matrices: Muon, Adafactor, APOLLO, GaLore and SOAP, and the classes of their kinds.

[Note: two passes] What is updated together is a run of elements of a shard, which may be any part of a
matrix. So a rule of matrices (Muon) is two elementwise ones around a transform. The first pass reads and
writes only moments, and leaves the **direction** in the place of the gradient. Then each matrix is
transformed as a whole, by one rank, its owner. The last pass moves only the exact weight, by what was made of
its direction. So every byte of a state moves once.

[Note: the companion] Embeddings, output heads, vectors, and what a group says is no matrix
(``matrix: false``) are updated by an elementwise rule, the companion, in the last pass. Fields of moments are
those of the matrix rule, then what the companion has more; where names are the same, they share them. Chunks
on NVMe in which there are only matrices never move the others.

[Note: which matrices] A weight of two dimensions is a matrix; of three, as packed experts are, each along the
first; of more, as of convolutions over images, it is one with a row for each output channel.

[Note: scales] Directions have the dtype of gradients. In fp16 they keep the loss scale, as gradients do.

[Note: matrices in another space] Of a matrix G of gradients, (short, long) or turned so, APOLLO and GaLore
(few dimensions) and SOAP (eigenvectors) keep the moments of AdamW in a space that is made of G, as sums in
host memory, so shards have weights alone. Vectors, and weights of a group with ``matrix: false``, are the
companion's: AdamW, whose moments are then sums, too. Eigenvectors and QR are computed on the CPU by the owner
of the matrix, whatever else is on a device.
"""

import functools
import math
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Size, Tensor, nn

from infinity.core.config import SettingError, Valid
from infinity.core.errors import StateError
from infinity.optim.elementwise import ADAMW
from infinity.optim.formula import where
from infinity.optim.rule import EMA, OFFSET, Averaged, Group, Kept, Place, Rule, Sums, Way
from infinity.optim.state import Moment, StateLayout

#: Numbers of a parameter group: whether its weights are matrices, and in how many parts of rows each is.
MATRIX, PARTS = "matrix", "parts"


def matrices_of(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return count, rows and columns of matrices: see [Note: which matrices]; a vector is one row."""
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    return 1, (shape[0] if len(shape) > 1 else 1), math.prod(shape[1:] if len(shape) > 1 else shape)


class WholeRule(Rule):
    """Arithmetic of an optimizer that needs whole matrices, in two passes: see [Note: two passes]."""

    moments: tuple[Moment, ...] = ()
    in_one_pass = False
    first: "FirstPass | None" = None  # None: directions are gradients
    of_vectors: Sequence[str] = ()  # what it keeps of each element of a vector, or of what is no matrix

    @abstractmethod
    def remade(self, matrix: Tensor, group: Group, step: int, sums: Sums) -> Tensor:
        """Return the update, ``(rows, columns)``, made from a matrix of directions; change its ``sums``.

        All are on the device of the matrix, whose dtype is that of gradients; ``step`` counts from 1.
        """

    def spaces(self, rows: int, columns: int) -> Mapping[str, Sequence[int]]:
        """Return the shapes of what it keeps of a matrix, by name."""
        return {}

    def sums(self, shape: Sequence[int], group: Group | None = None) -> Mapping[str, Sequence[int]]:
        if len(shape) < 2 or (MATRIX in self.defaults and not (group or self.defaults)[MATRIX]):
            return dict.fromkeys(self.of_vectors, Size(shape))
        packed, (_, rows, columns) = shape[:1] if len(shape) == 3 else (), matrices_of(shape)
        return {name: Size((*packed, *of)) for name, of in self.spaces(rows, columns).items()}

    def rate(self, group: Group, shape: Sequence[int]) -> float:
        """Return the length of a step along a transformed matrix of this shape."""
        return float(group["lr"])

    def numbers(self, group: Group, step: int) -> tuple[float, ...]:
        return ()  # those of its passes

    @staticmethod
    def update(weight: Any, grad: Any, *moments_and_numbers: Any) -> tuple[Any, ...]:
        raise TypeError("a rule of whole matrices updates in two passes")

    @property
    def elementwise(self) -> tuple[Rule, ...]:
        return (self.last,)

    @functools.cached_property
    def last(self) -> Rule:
        return Averaged(LastPass(self)) if EMA in self.defaults else LastPass(self)

    @functools.cached_property
    def averaged(self) -> Rule:
        moments, defaults = (*self.moments, Moment(OFFSET)), {**self.defaults, EMA: 0.999}
        return self.like(name=f"{self.name}+{EMA}", moments=moments, defaults=defaults)

    def check_place(self, group: Group, name: str, shape: Sequence[int], *, tiled: bool) -> None:
        """Raise a SettingError if a matrix is not whole."""
        if tiled and len(shape) != 3:
            other = f", or let its group have {MATRIX}: false" if MATRIX in group else ""
            raise SettingError(
                "optim.name", self.name,
                f"a rule of elements for {name}, which is in tiles of rows, so that no unit has the whole "
                f"matrix: set partition.tile=never{other}"
            )  # fmt: skip

    def way(self, group: Group, start: int, shape: Sequence[int], kept: Kept | None = None) -> Way:
        (count, rows, columns) = matrices_of(shape)
        parts = int(group[PARTS]) if PARTS in self.defaults else 1
        count, rows = count * parts, rows // parts
        places = []
        for number in range(count):
            step, sums, owner = (1, {}, None) if kept is None else kept(number)
            transform = partial(self._transform, group, step, sums)
            places.append(Place(start + number * rows * columns, rows, columns, transform, sums, owner))
        return Way(self.last, {"shape": (rows, columns)}, self.first, places, self.sums(shape, group))

    def _transform(self, group: Group, step: int, sums: Sums, matrix: Tensor) -> Tensor:
        if not matrix.numel():
            return matrix
        there = {name: values.to(matrix.device) for name, values in sums.items()}
        made = self.remade(matrix, group, step, there)
        for name, values in there.items():
            sums[name].copy_(values)
        if made.shape != matrix.shape:
            got, wanted = tuple(made.shape), tuple(matrix.shape)
            raise StateError(f"{self.name}: transform() of a matrix of shape {wanted} returned {got}")
        return made


class MatrixRule(WholeRule):
    """Arithmetic for matrices with moments of their elements, beside a rule for all else.

    A subclass has a ``name``, the ``matrix_moments``, ``defaults`` and the three methods below.
    """

    matrix_moments: tuple[Moment, ...]
    companion: Rule = ADAMW

    def __init_subclass__(cls) -> None:
        own, others = dict(cls.defaults), cls.companion.defaults
        cls.defaults = {**own, **{k: v for k, v in others.items() if k not in own}, MATRIX: True, PARTS: 1}
        names = {moment.name for moment in cls.matrix_moments}
        more = (moment for moment in cls.companion.moments if moment.name not in names)
        cls.moments = (*cls.matrix_moments, *more)
        super().__init_subclass__()

    @abstractmethod
    def direction_numbers(self, group: Group, step: int) -> tuple[float, ...]:
        """Return the numbers that :meth:`direction` takes from a parameter group; steps count from 1."""

    @staticmethod
    @abstractmethod
    def direction(grad: Any, *moments_and_numbers: Any) -> tuple[Any, ...]:
        """Return the direction of each element and the new moments, as :meth:`Rule.update` its results."""

    @abstractmethod
    def transform(self, matrix: Tensor, group: Group) -> Tensor:
        """Return the update, ``(rows, columns)``, made from a matrix of directions, on its device."""

    def remade(self, matrix: Tensor, group: Group, step: int, sums: Sums) -> Tensor:
        return self.transform(matrix, group)

    @property
    def elementwise(self) -> tuple[Rule, ...]:
        return self.companion, self.first, self.last

    @functools.cached_property
    def first(self) -> "FirstPass":  # type: ignore[override]
        return FirstPass(self)

    def with_master(self, master: str) -> Rule:
        return super().with_master(master).like(companion=self.companion.with_master(master))

    @functools.cached_property
    def averaged(self) -> Rule:
        return super().averaged.like(companion=self.companion.averaged)

    def kept(self, group: Group, shape: Sequence[int]) -> list[str]:
        moments = (
            self.matrix_moments if self.takes({**self.defaults, **group}, shape) else self.companion.moments
        )
        return [moment.name for moment in moments]

    def takes(self, group: Group, shape: Sequence[int]) -> bool:
        """Return whether a parameter is a matrix, or packed matrices, of this rule; else the companion's."""
        return bool(group[MATRIX]) and len(shape) > 1

    def numbers_of(self, model: nn.Module) -> Callable[[str, nn.Parameter], Mapping[str, Any]]:
        embedded = embedded_in(model)
        return lambda name, param: {} if param.ndim > 1 and not embedded(name, param) else {MATRIX: False}

    def check_place(self, group: Group, name: str, shape: Sequence[int], *, tiled: bool) -> None:
        """Raise a SettingError if a matrix is not whole, or does not have the parts that its group says."""
        if not self.takes(group, shape):
            return
        super().check_place(group, name, shape, tiled=tiled)
        parts, (_, rows, _) = group[PARTS], matrices_of(shape)
        if parts < 1 or rows % int(parts):
            raise SettingError(PARTS, parts, f"a whole number that divides the rows of {name}, {rows}")

    def way(self, group: Group, start: int, shape: Sequence[int], kept: Kept | None = None) -> Way:
        return super().way(group, start, shape, kept) if self.takes(group, shape) else Way(self.companion)


def weights_of(model: nn.Module, *kinds: type[nn.Module]) -> set[int]:
    """Return ids of the weights of modules of these kinds."""
    # Read past the module, which would fetch a parameter that is asked for.
    found = (dict.get(cast(Any, m._parameters), "weight") for m in model.modules() if isinstance(m, kinds))
    return {id(weight) for weight in found}


def embedded_in(model: nn.Module) -> Callable[[str, nn.Parameter], bool]:
    """Return a function of a parameter's name and the parameter: is it an embedding, head or convolution?

    A head has as many rows as the model's table of tokens: that which it names, or the longest; and it is no
    weight of blocks that are alike. The two-dimensional bias of packed experts is no matrix either.
    """
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    named = getattr(model, "get_input_embeddings", lambda: None)()
    tokens = (
        named
        if isinstance(named, nn.Embedding)
        else max(tables, key=lambda each: each.num_embeddings, default=None)
    )
    rows, others = tokens and tokens.num_embeddings, weights_of(model, nn.Embedding, nn.modules.conv._ConvNd)

    def in_blocks(name: str) -> str:  # but for lists of single layers, such as several heads
        return re.sub(r"(^|\.)\d+\.(?=.*\.)", r"\1*.", name)

    alike = Counter(in_blocks(name) for name, _ in model.named_parameters())
    return lambda name, param: (
        id(param) in others
        or name.endswith("bias")
        or (param.shape[0] == rows and alike[in_blocks(name)] < 2)
    )


def owners(places: Sequence[Place], ranks: int, loads: list[int] | None = None) -> list[int]:
    """Return a rank for each matrix, so that the work of these, and then that of all so far, is even.

    ``loads``, empty at first, is the work of each rank until now, to which that of these is added.
    """
    own, owner, loads = [0] * ranks, [0] * len(places), [] if loads is None else loads
    loads.extend([0] * (ranks - len(loads)))
    for number in sorted(range(len(places)), key=lambda n: (-places[n].work, n)):
        rank = owner[number] = min(range(ranks), key=lambda each: (own[each], loads[each], each))
        own[rank] += places[number].work
        loads[rank] += places[number].work
    return owner


class FirstPass(Rule):
    """First pass of a matrix rule: replaces gradients by directions; it gets them as weight and gradient."""

    of_gradients = True

    def __init__(self, rule: MatrixRule) -> None:
        self._rule, self.name, self.moments = rule, f"{rule.name}: directions", rule.matrix_moments

    def layout(self, dtype: torch.dtype) -> StateLayout:
        return StateLayout(dtype, (), self.moments)

    def numbers(self, group: Group, step: int) -> tuple[float, ...]:
        return *self._rule.direction_numbers({**self._rule.defaults, **group}, step), group.get("back", 1.0)

    def update(self, weight: Any, grad: Any, *moments_and_numbers: Any) -> tuple[Any, ...]:  # type: ignore[override]
        *rest, scale = moments_and_numbers
        made, *moments = self._rule.direction(grad, *rest)
        return made * scale, *moments


class LastPass(Rule):
    """Last pass of a matrix rule: a step along the transformed directions, with decoupled weight decay."""

    moments = ()

    def __init__(self, rule: WholeRule) -> None:
        self._rule, self.name, self.master = rule, f"{rule.name}: steps", rule.master

    def numbers(self, group: Group, step: int) -> tuple[float, ...]:
        group = {**self._rule.defaults, **group}
        decay = 1 - float(group["lr"]) * float(group["weight_decay"])
        return decay, self._rule.rate(group, group.get("shape", (1, 1)))

    @staticmethod
    def update(weight: Any, grad: Any, decay: Any, rate: Any) -> tuple[Any, ...]:
        weight = weight * decay
        return (weight - rate * grad,)


#: What Adafactor keeps of a matrix, and of a vector.
_ROW, _COLUMN, _OF_VECTORS = "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"


class AdafactorRule(WholeRule):
    """Adafactor: Adaptive Learning Rates with Sublinear Memory Cost (arXiv:1804.04235), algorithms 4 and 5.

    The learning rate is the group's, as in transformers' ``Adafactor`` with ``relative_step`` and
    ``scale_parameter`` False, and there is no first moment. Second moments of step t decay by
    1 - t ** -``decay_rate``; an update is shortened to a root mean square of ``clip_threshold`` in each
    matrix. Of packed matrices, such as experts, each is one; a vector keeps its second moments whole.
    """

    name = "adafactor"
    in_turn = True
    of_vectors = (_OF_VECTORS,)
    defaults: Mapping[str, Any] = {
        "lr": 1e-3, "eps": 1e-30, "clip_threshold": 1.0, "decay_rate": 0.8, "weight_decay": 0.0,
    }  # fmt: skip
    ranges: Mapping[str, Valid] = {"clip_threshold": Valid(above=0)}

    def spaces(self, rows: int, columns: int) -> Mapping[str, Sequence[int]]:
        return {_ROW: (rows,), _COLUMN: (columns,)}

    def remade(self, matrix: Tensor, group: Group, step: int, sums: Sums) -> Tensor:
        grad, toward = matrix.float(), step ** -float(group["decay_rate"])
        squares = grad * grad + float(group["eps"])
        if _OF_VECTORS in sums:
            second = sums[_OF_VECTORS].lerp_(squares[0], toward)
            made = grad * second.rsqrt()
        else:
            row = sums[_ROW].lerp_(squares.mean(1), toward)
            column = sums[_COLUMN].lerp_(squares.mean(0), toward)
            made = grad * ((row / row.mean()).rsqrt()[:, None] * column.rsqrt())
        length = made.square().mean().sqrt() / float(group["clip_threshold"])
        return made / length.clamp(min=1)


#: Of Muon's quintic iteration, and what a norm is at least.
_A, _B, _C, _LEAST = 3.4445, -4.7750, 2.0315, 1e-7


class MuonRule(MatrixRule):
    """Muon (Jordan et al., 2024) for matrices, AdamW for all else; numbers are those of ``torch.optim.Muon``.

    With ``match_rms_adamw`` a step is 0.2 sqrt(max(rows, columns)) as long, so that learning rates of AdamW
    fit (Muon is Scalable for LLM Training, arXiv:2502.16982); else sqrt(max(1, rows / columns)). ``betas``
    and ``eps`` are AdamW's.
    """

    name = "muon"
    matrix_moments = (Moment("exp_avg"),)
    defaults: Mapping[str, Any] = {
        "lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_steps": 5,
        "match_rms_adamw": False,
    }  # fmt: skip
    ranges: Mapping[str, Valid] = {"ns_steps": Valid(least=1), "momentum": Valid(least=0, below=1)}
    recipe: Mapping[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1, "match_rms_adamw": True}

    def direction_numbers(self, group: Group, step: int) -> tuple[float, ...]:
        return 1 - float(group["momentum"]), float(group["nesterov"])

    @staticmethod
    def direction(grad: Any, exp_avg: Any, toward: Any, nesterov: Any) -> tuple[Any, ...]:
        exp_avg = exp_avg + toward * (grad - exp_avg)
        return where(nesterov > 0, exp_avg + toward * (grad - exp_avg), exp_avg), exp_avg

    def transform(self, matrix: Tensor, group: Group) -> Tensor:
        """Return the nearest matrix with singular values near 1, by Newton-Schulz iterations in bfloat16."""
        tall = matrix.size(0) > matrix.size(1)
        x = matrix.to(torch.bfloat16)
        x = x.T if tall else x
        x = x / x.norm().clamp(min=_LEAST)
        for _ in range(int(group["ns_steps"])):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
        return x.T if tall else x

    def rate(self, group: Group, shape: Sequence[int]) -> float:
        rows, columns = shape[-2:]
        if group["match_rms_adamw"]:
            return float(group["lr"]) * 0.2 * math.sqrt(max(rows, columns))
        return float(group["lr"]) * math.sqrt(max(1, rows / columns))


_MEAN, _SQUARE, _PROJECTOR, _LENGTH = "exp_avg", "exp_avg_sq", "projector", "update_norm"

#: The least magnitude by which a gradient is divided.
_TINY = 1e-30


def adam(grad: Tensor, group: Group, step: int, sums: Sums, mean: Tensor | None = None) -> Tensor:
    """Return Adam's direction of a gradient, or of ``mean`` if that is kept elsewhere; changes ``sums``."""
    beta1, beta2 = map(float, group["betas"])
    mean = sums[_MEAN].lerp_(grad, 1 - beta1) if mean is None else mean
    square = sums[_SQUARE].lerp_(grad * grad, 1 - beta2)
    root = (square / (1 - beta2**step)).sqrt() + float(group["eps"])
    return mean / (1 - beta1**step) / root


def _eigenvectors(gram: Tensor) -> Tensor:
    """Return eigenvectors on the CPU, the largest's first.

    In fp64: in fp32 LAPACK often does not converge if rows are 0, as those of tokens that a step lacks.
    """
    values = gram.cpu().double()
    _, vectors = torch.linalg.eigh(values / values.abs().max().clamp(min=_TINY))
    return cast(Tensor, vectors.flip(1).float())


class SpaceRule(WholeRule):
    """AdamW in another space of each matrix: see [Note: matrices in another space]."""

    in_turn = True
    of_vectors = (_MEAN, _SQUARE)
    recipe: Mapping[str, Any] = {"weight_decay": 0.1}

    @abstractmethod
    def made(self, grad: Tensor, group: Group, step: int, sums: Sums) -> Tensor:
        """Return the update, ``(rows, columns)``, of a gradient in fp32; change ``sums``."""

    def numbers_of(self, model: nn.Module) -> Callable[[str, nn.Parameter], Mapping[str, Any]]:
        sequences = weights_of(
            model, nn.Conv1d, nn.ConvTranspose1d
        )  # of as many dimensions as packed experts
        return lambda name, param: {MATRIX: False} if id(param) in sequences else {}

    def remade(self, matrix: Tensor, group: Group, step: int, sums: Sums) -> Tensor:
        if sums[_MEAN].ndim < 2 or not group[MATRIX]:
            return adam(matrix.float().view_as(sums[_MEAN]), group, step, sums).view_as(matrix)
        return self.made(matrix.float(), group, step, sums)

    def check_place(self, group: Group, name: str, shape: Sequence[int], *, tiled: bool) -> None:
        """Raise a SettingError if a matrix is not whole, or its group has other sizes than the rule."""
        super().check_place({}, name, shape, tiled=tiled)
        for size in self.sizes:
            if group[size] != self.defaults[size]:
                wanted = f"{self.defaults[size]}, as all parameters have; a group may have {MATRIX}: false"
                raise SettingError(size, group[size], wanted)


class LowRankRule(SpaceRule):
    """AdamW in ``rank`` dimensions in place of a matrix's shorter side."""

    sizes = ("rank",)
    ranges: Mapping[str, Valid] = {
        "rank": Valid(least=1), "update_proj_gap": Valid(least=1), "seed": Valid(0, 2**62),
    }  # fmt: skip

    def check_place(self, group: Group, name: str, shape: Sequence[int], *, tiled: bool) -> None:
        super().check_place(group, name, shape, tiled=tiled)
        shorter = min(matrices_of(shape)[1:])
        if len(shape) > 1 and group[MATRIX] and group["rank"] > shorter:
            raise SettingError(
                "rank", group["rank"], f"at most {shorter}, the shorter side of {name}, or "
                f"{MATRIX}: false in its group, for AdamW"
            )  # fmt: skip

    def spaces(self, rows: int, columns: int) -> Mapping[str, Sequence[int]]:
        low = int(self.defaults["rank"]), max(rows, columns)
        return {_MEAN: low, _SQUARE: low}

    def made(self, grad: Tensor, group: Group, step: int, sums: Sums) -> Tensor:
        if grad.size(0) > grad.size(1):
            return self.of_wide(grad.T, group, step, sums).T
        return self.of_wide(grad, group, step, sums)

    @abstractmethod
    def of_wide(self, grad: Tensor, group: Group, step: int, sums: Sums) -> Tensor:
        """Return the update of a gradient, ``(short, long)``, as :meth:`made`."""


@functools.lru_cache(4)
def _random(rank: int, side: int, seed: int) -> Tensor:
    """Return a projection to ``rank`` dimensions, ``(rank, side)``: normal numbers of variance 1 / rank."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(rank, side, generator=generator, device="cpu") / math.sqrt(rank)


class ApolloRule(LowRankRule):
    """APOLLO: SGD-like Memory, AdamW-level Performance (arXiv:2412.05270), algorithm 1.

    A gradient is scaled by how far AdamW changes its random projection: each of the longer side's channels
    by itself, or all of a matrix alike if ``per_tensor``, and then by ``scale``. Its norm grows by a factor
    of at most ``growth`` in a step (0: any). The projection follows from ``seed``; it is another one every
    ``update_proj_gap`` steps, and nothing is kept of it.
    """

    name = "apollo"
    defaults: Mapping[str, Any] = {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "rank": 128,
        "update_proj_gap": 200, "scale": 1.0, "per_tensor": False, "growth": 1.01, "seed": 0, MATRIX: True,
    }  # fmt: skip

    def spaces(self, rows: int, columns: int) -> Mapping[str, Sequence[int]]:
        return {**super().spaces(rows, columns), _LENGTH: (1,)}

    def of_wide(self, grad: Tensor, group: Group, step: int, sums: Sums) -> Tensor:
        seed = int(group["seed"]) + (step - 1) // int(group["update_proj_gap"])
        low = _random(len(sums[_MEAN]), len(grad), seed).to(grad.device) @ grad
        scaled, dim = adam(low, group, step, sums), None if group["per_tensor"] else 0
        before, after = (torch.linalg.vector_norm(each, dim=dim) for each in (low, scaled))
        made = grad * torch.where(before > 0, after / before, 0) * float(group["scale"])
        length, last, most = torch.linalg.vector_norm(made), sums[_LENGTH], float(group["growth"])
        if most:
            longest = torch.where(last > 0, most * last, length)
            made = made * torch.where(length > longest, longest / length, 1)
            last.copy_(torch.minimum(length, longest))
        return made


class ApolloMiniRule(ApolloRule):
    """APOLLO-Mini: one dimension, and one scale of each matrix (arXiv:2412.05270, section 4.2)."""

    name = "apollo-mini"
    defaults: Mapping[str, Any] = {
        **ApolloRule.defaults, "rank": 1, "scale": math.sqrt(128), "per_tensor": True,
    }  # fmt: skip


class GaLoreRule(LowRankRule):
    """GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection (arXiv:2403.03507), algorithm 2.

    AdamW updates P'G, where P has the ``rank`` leading left singular vectors of a gradient, renewed every
    ``update_proj_gap`` steps; the weight moves by ``scale`` P times that. A vector that is renewed has the
    sign by which it is nearer to the one before, whose moments go on.
    """

    name = "galore"
    defaults: Mapping[str, Any] = {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "rank": 128,
        "update_proj_gap": 200, "scale": 0.25, MATRIX: True,
    }  # fmt: skip

    def spaces(self, rows: int, columns: int) -> Mapping[str, Sequence[int]]:
        return {_PROJECTOR: (min(rows, columns), int(self.defaults["rank"])), **super().spaces(rows, columns)}

    def of_wide(self, grad: Tensor, group: Group, step: int, sums: Sums) -> Tensor:
        projector = sums[_PROJECTOR]
        if (step - 1) % int(group["update_proj_gap"]) == 0:
            unit = grad / grad.abs().max().clamp(min=_TINY)  # whose squares are in the range of fp32
            new = _eigenvectors(unit @ unit.T)[:, : projector.size(1)].to(projector)
            projector.copy_(torch.where((new * projector).sum(0) < 0, -new, new))
        return projector @ adam(projector.T @ grad, group, step, sums) * float(group["scale"])


class SOAPRule(SpaceRule):
    """SOAP: Improving and Stabilizing Shampoo using Adam (arXiv:2409.11321), algorithm 3.

    Second moments are those of gradients in the eigenvectors of Shampoo's L and R, means of G G' and G'G,
    which a step of the power method and QR follow every ``precondition_frequency`` steps. A side longer than
    ``max_precond_dim`` stays as it is. The first update of a matrix only begins L and R.
    """

    name = "soap"
    sizes = ("max_precond_dim",)
    defaults: Mapping[str, Any] = {
        "lr": 3e-3, "betas": (0.95, 0.95), "eps": 1e-8, "weight_decay": 0.01, "precondition_frequency": 10,
        "max_precond_dim": 4096, MATRIX: True,
    }  # fmt: skip
    ranges: Mapping[str, Valid] = {
        "precondition_frequency": Valid(least=1), "max_precond_dim": Valid(least=1),
    }  # fmt: skip

    def spaces(self, rows: int, columns: int) -> Mapping[str, Sequence[int]]:
        found: dict[str, Sequence[int]] = {_MEAN: (rows, columns), _SQUARE: (rows, columns)}
        for side, numel in (("left", rows), ("right", columns)):
            if numel <= self.defaults["max_precond_dim"]:
                found |= {side: (numel, numel), f"{side}_vectors": (numel, numel)}
        return found

    def made(self, grad: Tensor, group: Group, step: int, sums: Sums) -> Tensor:
        left, right = sums.get("left_vectors"), sums.get("right_vectors")

        def turned(values: Tensor, *, back: bool = False) -> Tensor:
            if left is not None:
                values = (left if back else left.T) @ values
            return values if right is None else values @ (right.T if back else right)

        made = torch.zeros_like(grad)
        if step > 1:
            mean = sums[_MEAN].lerp_(grad, 1 - float(group["betas"][0]))
            made = turned(adam(turned(grad), group, step - 1, sums, turned(mean)), back=True)
        for side, vectors, each in (("left", left, grad), ("right", right, grad.T)):
            if vectors is None:
                continue
            kept = sums[side].lerp_(each @ each.T, 1 - float(group["betas"][1]))
            if step == 1:
                vectors.copy_(_eigenvectors(kept))
            elif (step - 1) % int(group["precondition_frequency"]) == 0:
                vectors.copy_(torch.linalg.qr((kept @ vectors).cpu())[0])
        return made
