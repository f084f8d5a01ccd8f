"""The global gradient norm and the clip coefficient.

[Note: order of summation] Squares are summed in float64: no finite gradient overflows, and the error is far
below the last place of the float32 that the clip coefficient becomes. Each row of ``ROW_NUMEL`` elements is
added by one thread into ``LANES`` sums side by side, as vector instructions do, and these in pairs; rows,
units and ranks are added without rounding. So threads change nothing, and where a model is cut into units and
shards changes the last bits of the float64 norm only. (To carry the errors of rounding along would make those
the same, too. It doubles what the norm costs: clipped steps of 512 tokens took 5 to 12 % longer.)
"""

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from infinity.optim.threads import background_threads, in_slices

ROW_NUMEL, LANES = 2**15, 128


#: A sum that was rounded to float64, and what rounding took from it.
Sum = tuple[float, float]


def sum_of_squares(grad: Tensor) -> Sum:
    """The sum of squares of ``grad``; inf and nan propagate.

    Args:
        grad: bfloat16, float16 or float32, any shape.
    """
    flat = grad.detach().reshape(-1)
    rows = flat.numel() // ROW_NUMEL
    tail = flat.new_zeros(ROW_NUMEL)
    tail[: flat.numel() - rows * ROW_NUMEL] = flat[rows * ROW_NUMEL :]
    return add_up(part for each in (flat[: rows * ROW_NUMEL], tail) for part in _row_sums(each))


def add_up(parts: Iterable[float]) -> Sum:
    """The sum of ``parts``, whatever their order; inf and nan propagate."""
    parts = [*parts]
    total = math.fsum(parts)
    return total, math.fsum([*parts, -total]) if math.isfinite(total) else 0.0


def norm_on_device(grad: Tensor) -> Tensor:
    """The norm of ``grad``, in float64, ``()``, by one operator of its accelerator; does not wait for it.

    It adds in an order of its own, which depends on the numel alone: a norm is the same to the bit wherever
    the shard lies, but not on another kind of device.
    """
    norm: Tensor = torch.linalg.vector_norm(grad.detach().reshape(-1), dtype=torch.float64)
    return norm


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


def _row_sums(flat: Tensor) -> list[float]:
    """Sums of squares of each row of ``ROW_NUMEL`` elements."""
    from infinity.optim import kernels

    if flat.dtype == torch.float16 and not kernels.converts_half():
        flat = flat.float()  # without rounding
    table = kernels.array(flat).reshape(-1, ROW_NUMEL // LANES, LANES)
    sums = np.empty(len(table))
    in_slices(
        lambda begin, end: kernels.squares(table[begin:end], sums[begin:end]),
        len(table), background_threads(), least=2,
    )  # fmt: skip
    return sums.tolist()
