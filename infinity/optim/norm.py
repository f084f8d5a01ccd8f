"""The global gradient norm and the clip coefficient.

[Note: order of summation] Squares are summed in float64: no finite gradient overflows, and the error is
far below the last place of the float32 that the clip coefficient becomes. The order of additions
depends on the numel alone, never on threads: each row of ``PIECE_NUMEL`` elements is summed by one
thread, and the sums of the rows are added without rounding.

[Note: pairs] Two bfloat16 are read as one int32 and widened by shifts: the compiler makes vector
instructions of that, and scalar ones of a cast from bfloat16 to float64 (a sixth of the speed).
"""

import math
from functools import cache

import torch
from torch import Tensor

from infinity.optim.compiled import PIECE_NUMEL, Function, background_threads, compile_once, warn_eager


def sum_of_squares(grad: Tensor, *, compiled: bool = True) -> float:
    """The sum of squares of ``grad`` in float64; inf and nan propagate.

    Args:
        grad: bfloat16, float16 or float32, any shape.
        compiled: False adds in another order, eagerly; the results differ by rounding in float64.
    """
    flat = grad.detach().reshape(-1)
    rows = flat.numel() // PIECE_NUMEL
    if not (compiled and rows and flat.device.type == "cpu" and flat.is_contiguous()):
        return math.fsum(_eager_sums(flat))
    whole = rows * PIECE_NUMEL
    sums = torch.empty(rows, dtype=torch.float64)
    _kernel(flat.dtype)(_as_read(flat[:whole]), sums)
    return math.fsum([*sums.tolist(), *_eager_sums(flat[whole:])])


def prepare(dtype: torch.dtype) -> None:
    """Compile for gradients of ``dtype`` on the CPU, so that the first sum does not wait for it."""
    _kernel(dtype)


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


def _eager_sums(flat: Tensor) -> list[float]:
    """One sum for each piece of ``PIECE_NUMEL`` elements."""
    sums = []
    for begin in range(0, flat.numel(), PIECE_NUMEL):
        wide = flat[begin : begin + PIECE_NUMEL].to(torch.float64)
        sums.append((wide * wide).sum())
    return torch.stack(sums).tolist() if sums else []


def _gradient_norm(flat: Tensor, sums: Tensor) -> None:
    """Sums of squares of the rows of ``flat``: bfloat16 pairs as int32, or a floating dtype."""
    if flat.dtype == torch.int32:
        pairs = flat.view(-1, PIECE_NUMEL // 2)
        first = (pairs << 16).view(torch.float32).to(torch.float64)
        second = ((pairs >> 16) << 16).view(torch.float32).to(torch.float64)
        sums.copy_((first * first + second * second).sum(1))
    else:
        wide = flat.view(-1, PIECE_NUMEL).to(torch.float64)
        sums.copy_((wide * wide).sum(1))


def _as_read(flat: Tensor) -> Tensor:
    """``flat`` as :func:`_gradient_norm` takes it; a copy where pairs would not be aligned."""
    if flat.dtype != torch.bfloat16:
        return flat
    return (flat if flat.storage_offset() % 2 == 0 else flat.clone()).view(torch.int32)


@cache
def _kernel(dtype: torch.dtype) -> Function:
    """The compiled sums for gradients of ``dtype``; eager where there is no compiler."""
    threads = background_threads()
    rows = 4 * threads
    grad = torch.zeros(rows * PIECE_NUMEL, dtype=dtype)
    try:
        examples = [_as_read(grad), torch.zeros(rows, dtype=torch.float64)]
        return compile_once(_gradient_norm, examples, threads=threads)
    except Exception as error:  # whatever a missing or broken compiler raises, eager works
        warn_eager(_gradient_norm, error, stacklevel=3)
        return _gradient_norm_eager


def _gradient_norm_eager(flat: Tensor, sums: Tensor) -> None:
    grad = flat.view(torch.bfloat16) if flat.dtype == torch.int32 else flat
    sums.copy_(torch.tensor(_eager_sums(grad), dtype=torch.float64))
