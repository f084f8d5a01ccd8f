"""AdamW of whole matrices in another space: APOLLO and GaLore in one of few dimensions, SOAP in eigenvectors.

[Note: matrices in another space] Of a matrix G of gradients, (short, long) or turned so, these rules keep the
moments of AdamW in a space that is made of G, as sums in host memory, so shards have weights alone. Vectors,
and weights of a group with ``matrix: false``, are the companion's: AdamW, whose moments are then sums, too.
Eigenvectors and QR are computed on the CPU by the owner of the matrix, whatever else is on a device.
"""

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from infinity.core.config import SettingError, Valid
from infinity.optim.matrix import MATRIX, WholeRule, matrices_of, weights_of
from infinity.optim.rule import Group, Sums

_MEAN, _SQUARE, _PROJECTOR, _LENGTH = "exp_avg", "exp_avg_sq", "projector", "update_norm"

#: The least magnitude by which a gradient is divided.
_LEAST = 1e-30


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
    _, vectors = torch.linalg.eigh(values / values.abs().max().clamp(min=_LEAST))
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
            unit = grad / grad.abs().max().clamp(min=_LEAST)  # whose squares are in the range of fp32
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
