"""The fp32 master weight without storing the weight twice.

[Note: exact split] A float32 is the bfloat16 of its upper half plus a signed 16-bit remainder of
its lower half, both taken as integers: ``bits = (weight << 16) + remainder``. Rounding to nearest
with ties up, ``weight = (bits + 0x8000) >> 16``, makes the remainder fit 16 signed bits for all
2**32 patterns, so the split loses nothing: not for denormals, -0.0 or infinities, and not where
rounding carries the largest finite values to the pattern of infinity (the model then computes with
an infinite weight, as after any cast to bfloat16, but the master stays finite and exact). A NaN stays
a NaN, but may come back with another payload.

Ties go up where ``Tensor.to(bfloat16)`` sends them to even; nothing else differs.
"""

import torch
from torch import Tensor

from infinity.optim.layout import StateLayout

#: Elements that are converted at one time: the temporaries stay in the cache.
_PIECE_NUMEL = 2**18


def split(master: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``master`` (float32) as bfloat16 weight and the remainder's high and low bytes (int8)."""
    bits = master.view(torch.int32)
    weight = (((bits + 0x8000) >> 16) << 16).view(torch.float32).to(torch.bfloat16)
    return weight, (bits >> 8).to(torch.int8), bits.to(torch.int8)


def join(weight: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """The float32 master of which :func:`split` made ``weight``, ``high`` and ``low``."""
    remainder = (high.to(torch.int32) << 8) | (low.to(torch.int32) & 0xFF)
    return (weight.to(torch.float32).view(torch.int32) + remainder).view(torch.float32)


def master_of(layout: StateLayout, weight: Tensor, state: tuple[Tensor, ...]) -> Tensor:
    """The float32 master of ``weight``, ``(n,)``, from the views of its state.

    With float32 weights that is ``weight`` itself, with float16 the field ``master``; not copies.
    """
    if layout.dtype == torch.bfloat16:
        return join(weight, state[0], state[1])
    return state[0] if layout.dtype == torch.float16 else weight


def store_master(layout: StateLayout, master: Tensor, weight: Tensor, state: tuple[Tensor, ...]) -> None:
    """Write ``master`` into ``weight`` and into the fields of ``state`` that keep it, all ``(n,)``."""
    if layout.dtype == torch.bfloat16:
        for target, value in zip((weight, state[0], state[1]), split(master), strict=True):
            target.copy_(value)
        return
    weight.copy_(master)
    if layout.dtype == torch.float16:
        state[0].copy_(master)


def initial_state(layout: StateLayout, master: Tensor, weight_out: Tensor, state_out: Tensor) -> None:
    """Write the weight and the first state (moments zero) of ``master``.

    Args:
        layout: What the state holds.
        master: ``(n,)``, any floating dtype.
        weight_out: ``(n,)`` in the compute dtype.
        state_out: uint8, ``(layout.state_nbytes(n),)``.
    """
    state = layout.views(state_out, master.numel())
    state_out.zero_()
    for begin in range(0, master.numel(), _PIECE_NUMEL):
        piece = slice(begin, begin + _PIECE_NUMEL)
        store_master(
            layout, master[piece].to(torch.float32), weight_out[piece], tuple(field[piece] for field in state)
        )
