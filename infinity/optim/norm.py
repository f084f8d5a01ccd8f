"""The global gradient norm, the clip coefficient and the scale of fp16 losses.

[Note: order of summation] Squares are summed in float64, so no finite gradient overflows. On the CPU the
order of additions depends on the numel alone, never on threads: one thread sums each row of ``ROW_NUMEL``
elements into ``LANES`` sums side by side, as vector instructions do; these are added in pairs, and the sums
of the rows without rounding. On an accelerator it depends on the numel and the kind of device.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infinity.device.machine import background_threads, in_slices

ROW_NUMEL, LANES = 2**15, 128


def sum_of_squares(grad: Tensor) -> float:
    """Return the sum of squares of a CPU tensor of any shape, in float64; inf and nan propagate."""
    flat = grad.detach().reshape(-1)
    whole = flat.numel() // ROW_NUMEL * ROW_NUMEL
    tail = flat.new_zeros(ROW_NUMEL)
    tail[: flat.numel() - whole] = flat[whole:]
    return math.fsum([*_row_sums(flat[:whole]), *_row_sums(tail)])


def _row_sums(flat: Tensor) -> list[float]:
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
    """Return the norm of ``grad``, float64, ``()``, by one operator of its accelerator; does not block."""
    norm: Tensor = torch.linalg.vector_norm(grad.detach().reshape(-1), dtype=torch.float64)
    return norm


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Return the factor of :func:`torch.nn.utils.clip_grad_norm_` for a finite norm, rounded to float32."""
    if max_norm is None:
        return 1.0
    return float(torch.tensor(min(1.0, max_norm / (norm + 1e-6)), dtype=torch.float32, device="cpu"))


@dataclass(slots=True)
class LossScaler:
    """Dynamic loss scaling: doubles the scale after good steps in a row, halves it after an overflow.

    Every rank must pass the same ``found_inf``, so that all scales stay equal.

    Source: Mixed Precision Training (arXiv:1710.03740), section 3.2.
    """

    scale: float
    interval: int = 2000
    good_steps: int = 0

    def update(self, found_inf: bool) -> None:
        self.good_steps = 0 if found_inf else self.good_steps + 1
        if found_inf:
            self.scale /= 2
        elif self.good_steps == self.interval:
            self.good_steps = 0
            self.scale = min(2 * self.scale, 2.0**1023)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
