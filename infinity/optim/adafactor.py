"""Adafactor: second moments as sums over rows and columns of each matrix."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from infinity.core.config import Valid
from infinity.optim.matrix import WholeRule
from infinity.optim.rule import Group, Sums

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
