"""The global gradient norm, the clip coefficient and the scale of fp16 losses.

[Note: order of summation] Squares are summed in float64: no finite gradient overflows, and the error is
far below the last place of the float32 that the clip coefficient becomes. The order of additions depends on
the numel alone, never on threads: each row of ``ROW_NUMEL`` elements is summed by one thread into
``LANES`` sums side by side, which vector instructions can do in this order; these are added in pairs, and
the sums of the rows without rounding.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infinity.device.machine import background_threads, in_slices

ROW_NUMEL, LANES = 2**15, 128
#: A loss scale grows to this at most.
_MOST_SCALE = 2.0**1023


def sum_of_squares(grad: Tensor) -> float:
    """Return the sum of squares of ``grad`` in float64, on the CPU; inf and nan propagate.

    Args:
        grad: bfloat16, float16 or float32, any shape.
    """
    flat = grad.detach().reshape(-1)
    whole = flat.numel() // ROW_NUMEL * ROW_NUMEL
    tail = flat.new_zeros(ROW_NUMEL)
    tail[: flat.numel() - whole] = flat[whole:]
    return math.fsum([*_row_sums(flat[:whole]), *_row_sums(tail)])


def _row_sums(flat: Tensor) -> list[float]:
    """Return the sum of squares of each row of ``ROW_NUMEL`` elements."""
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
    return [float(each) for each in sums[:, 0]]


def norm_on_device(grad: Tensor) -> Tensor:
    """Return the norm of ``grad``, in float64, ``()``, by one operator of its accelerator; waits for nothing.

    It adds in an order of its own, which depends on the numel alone, too: a norm is the same to the bit
    wherever the shard lies, but not on another kind of device.
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


@dataclass(slots=True)
class LossScaler:
    """Dynamic loss scaling: the scale doubles after good steps in a row, and halves after an overflow.

    Every rank must feed it the same ``found_inf``; then all scales stay equal.

    Attributes:
        interval: Good steps in a row that make it grow.

    Source: Mixed Precision Training (arXiv:1710.03740), section 3.2.
    """

    scale: float
    interval: int = 2000
    good_steps: int = 0

    def update(self, found_inf: bool) -> None:
        """Adapt after a step; with ``found_inf`` that step was skipped."""
        self.good_steps = 0 if found_inf else self.good_steps + 1
        if found_inf:
            self.scale /= 2
        elif self.good_steps == self.interval:
            self.good_steps = 0
            self.scale = min(2 * self.scale, _MOST_SCALE)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its counts, as :meth:`load_state_dict` takes them."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict()``."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
