"""Muon: momentum, made orthogonal matrix by matrix."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from infinity.core.config import Valid
from infinity.optim.formula import where
from infinity.optim.matrix import MatrixRule
from infinity.optim.rule import Group
from infinity.optim.state import Moment

#: Of the quintic iteration, and what a norm is at least.
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
