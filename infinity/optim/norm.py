"""The global gradient norm and the clip coefficient.

[Note: order of summation] Squares are summed in float64: no finite gradient overflows, and the error is
far below the last place of the float32 that the clip coefficient becomes. The order of additions depends on
the numel alone, never on threads: each row of ``ROW_NUMEL`` elements is summed by one thread into
``LANES`` sums side by side, which vector instructions can do in this order; these are added in pairs, and
the sums of the rows without rounding.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infinity.optim.threads import background_threads, in_slices

ROW_NUMEL, LANES = 2**15, 128


def sum_of_squares(grad: Tensor) -> float:
    """The sum of squares of ``grad`` in float64; inf and nan propagate.

    Args:
        grad: bfloat16, float16 or float32, any shape.
    """
    return math.fsum(_row_sums(grad).tolist())


def norm_on_device(grad: Tensor) -> Tensor:
    """The norm of ``grad``, in float64, ``()``, by one operator of its accelerator; does not wait for it.

    It adds in an order of its own, which depends on the numel alone, too: a norm is the same to the bit
    wherever the shard lies, but not on another kind of device.
    """
    norm: Tensor = torch.linalg.vector_norm(grad.detach().reshape(-1), dtype=torch.float64)
    return norm


def _row_sums(grad: Tensor) -> Tensor:
    """Sums of squares of the rows of ``grad``, in float64."""
    flat = grad.detach().reshape(-1)
    rows = flat.numel() // ROW_NUMEL
    tail = flat.new_zeros(ROW_NUMEL)
    tail[: flat.numel() - rows * ROW_NUMEL] = flat[rows * ROW_NUMEL :]
    return torch.from_numpy(np.concatenate([_sums(flat[: rows * ROW_NUMEL]), _sums(tail)]))


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Return the factor of gradients of global ``norm``, as in ``torch.nn.utils.clip_grad_norm_``.

    Computed in float64 and rounded to float32, in which the update reads it.

    Args:
        norm: Finite, not negative.
        max_norm: None: never clip.
    """
    if max_norm is None:
        return 1.0
    return float(torch.tensor(min(1.0, max_norm / (norm + 1e-6)), dtype=torch.float32, device="cpu"))


def _sums(flat: Tensor) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """One sum for each row of ``ROW_NUMEL`` elements."""
    from infinity.optim import kernels

    if flat.dtype == torch.float16 and not kernels.converts_half():
        flat = flat.float()  # without rounding
    table = kernels.array(flat).reshape(-1, ROW_NUMEL // LANES, LANES)
    sums = np.zeros((len(table), LANES))
    in_slices(
        lambda begin, end: kernels.squares(table[begin:end], sums[begin:end]),
        len(table), background_threads(), least=2,
    )  # fmt: skip
    while sums.shape[1] > 1:
        sums = sums[:, ::2] + sums[:, 1::2]
    return sums[:, 0]
