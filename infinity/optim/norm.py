"""The global gradient norm and the clip coefficient.

[Note: order of summation] Squares are summed in float64: no finite gradient overflows, and the error is
far below the last place of the float32 that the norm becomes. The order of additions depends on the
numel alone, never on threads: rows of 4096 elements are summed, each by one thread, then the row
sums in their order.
"""

import math

import torch
from torch import Tensor

from infinity.optim.compiled import PIECE_NUMEL

_ROW_NUMEL = 4096


def sum_of_squares(grad: Tensor) -> float:
    """The sum of squares of ``grad``, any floating dtype and shape, in float64; inf and nan propagate."""
    flat = grad.detach().reshape(-1)
    squares = torch.empty(min(PIECE_NUMEL, flat.numel()), dtype=torch.float64, device=flat.device)
    sums = []
    for begin in range(0, flat.numel(), PIECE_NUMEL):
        piece = flat[begin : begin + PIECE_NUMEL]
        part = squares[: piece.numel()].copy_(piece)
        sums.append(part.mul_(part).sum())
    return math.fsum(torch.stack(sums).tolist()) if sums else 0.0


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """What gradients of global ``norm`` are multiplied by, as ``torch.nn.utils.clip_grad_norm_`` does.

    Computed in float64 and rounded to float32, in which the update reads it.

    Args:
        norm: Finite, not negative.
        max_norm: None: never clip.
    """
    if max_norm is None:
        return 1.0
    return float(torch.tensor(min(1.0, max_norm / (norm + 1e-6)), dtype=torch.float32))
