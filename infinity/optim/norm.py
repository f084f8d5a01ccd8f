"""The global gradient norm and the clip coefficient.

[Note: the same norm however a model is cut] Squares of floats are exact in float64, and no finite gradient
overflows. They are added with the errors of rounding beside them, about 90 bits, and the total over all
units and ranks is rounded once. So it does not depend on where units, tiles and shards begin, nor on threads
(but where the exact sum lies within 2**-35 of its last place from the middle of two floats). Each row of
``ROW_NUMEL`` elements is added by one thread into ``LANES`` sums side by side, as vector instructions do. An
accelerator adds in float64 by an operator of its own; see :func:`norm_on_device`.
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
    the shard lies, but on another kind of device, or of a model that is cut elsewhere, within rounding.
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
    """Sums of squares of each row of ``ROW_NUMEL`` elements, and what rounding took from each."""
    from infinity.optim import kernels

    if flat.dtype == torch.float16 and not kernels.converts_half():
        flat = flat.float()  # without rounding
    table = kernels.array(flat).reshape(-1, ROW_NUMEL // LANES, LANES)
    sums, errors = np.empty((2, len(table)))
    in_slices(
        lambda begin, end: kernels.squares(table[begin:end], sums[begin:end], errors[begin:end]),
        len(table), background_threads(), least=2,
    )  # fmt: skip
    return [*sums.tolist(), *np.nan_to_num(errors, nan=0.0).tolist()]  # of inf no error is known
