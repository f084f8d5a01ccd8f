"""Loops of codecs on accelerators, by torch's operators, of the same codes: see ``loops``.

They run on the stream of the thread that moves a storage, which waits where a length depends on values.
Numbers are divided by tensors: a device multiplies by a constant's inverse, which rounds otherwise.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from infinity.activations.loops import BLOCK, LEAST


def _written(out: Tensor, *parts: Tensor) -> int:
    """Write the bytes of ``parts`` to ``out`` if they fit; return their number, or 0."""
    code = torch.cat([part.contiguous().view(torch.uint8).flatten() for part in parts])
    if len(code) >= len(out):
        return 0
    out[: len(code)].copy_(code, non_blocking=True)
    return len(code)


def _shifts(like: Tensor, bits: int) -> Tensor:
    return torch.arange(0, 8, bits, device=like.device, dtype=torch.uint8)[:, None]


def _merged(parts: Tensor, bits: int) -> Tensor:
    """Return bytes ``(..., n)``, made of ``parts``, ``(..., 8 / bits, n)``, the first one lowest."""
    return (parts.to(torch.uint8) << _shifts(parts, bits)).sum(-2, dtype=torch.uint8)


def _parted(merged: Tensor, bits: int) -> Tensor:
    shifted: Tensor = merged.unsqueeze(-2) >> _shifts(merged, bits)
    return shifted.remainder(2**bits)


def encode_bits(words: Tensor, out: Tensor, at: object) -> int:
    differs = words != words[0]
    ends = words.index_select(0, pad(differs.to(torch.uint8).argmax().view(1), (1, 0)))
    other = words == ends[1]
    if bool((differs & ~other).any()):
        return 0
    return _written(out, pad(ends, (0, 16 // words.itemsize - 2)), _merged(other.view(8, -1), 1))


def decode_bits(coded: Tensor, words: Tensor) -> None:
    ends = coded[:16].view(words.dtype)
    words.copy_(torch.where(_parted(coded[16:], 1).flatten() != 0, ends[1], ends[0]))


def encode_zeros(words: Tensor, out: Tensor, at: object) -> int:
    there, size = words != 0, len(words)
    ranks = there.cumsum(0)
    before, count = ranks[-9::8].tolist()  # of the last byte
    if before + 9 > (len(out) - size // 8) // words.itemsize:
        return 0
    kept = words.new_zeros(size + 1).scatter_(0, torch.where(there, ranks - 1, size), words)
    return _written(out, _merged(there.view(-1, 8).t(), 1), kept[: count + 1])


def decode_zeros(coded: Tensor, words: Tensor) -> None:
    bits, kept = coded[: len(words) // 8], coded[len(words) // 8 :].view(words.dtype)
    there = _parted(bits, 1).t().flatten() != 0
    words.copy_(kept[(there.cumsum(0) - 1).clamp(min=0)] * there)


def encode_int8(x: Tensor, out: Tensor, at: object) -> int:
    part = x.view(-1, BLOCK)
    most = part.abs().amax(1)
    full = torch.full_like(most, 127)
    if not bool((most + most / full < torch.inf).all()):
        return 0
    scales, factors = (each.masked_fill(most <= float(LEAST), 0) for each in (most / full, full / most))
    return _written(out, scales, ((part * factors[:, None]).round() + 128).to(torch.uint8))


def decode_int8(coded: Tensor, x: Tensor) -> None:
    scales, codes = coded[: len(x) // BLOCK * 4].view(torch.float32), coded[len(x) // BLOCK * 4 :]
    x.copy_(((codes.view(-1, BLOCK).float() - 128) * scales[:, None]).flatten())


def _in_order(bits: Tensor) -> Tensor:
    """Return integers in the order of the floats that have these bits, or back."""
    return torch.where(bits < 0, ~bits - 2**30 - 2**30, bits)


def encode_2bit(x: Tensor, out: Tensor, at: tuple[int, int]) -> int:
    part = x.view(-1, BLOCK)
    keys = _in_order(part.view(torch.int32))
    low, high = _in_order(torch.stack([keys.amin(1), keys.amax(1)])).view(torch.float32)
    step = (high - low) / torch.full_like(low, 3)
    if not bool((part.abs().amax(1) + step < torch.inf).all()):
        return 0
    step, factor = (
        each.masked_fill(step <= float(LEAST), 0) for each in (step, torch.ones_like(step) / step)
    )
    h = (torch.arange(len(x), device=x.device) + at[1]) * 0x9E3779B9 % 2**32
    h = h ^ torch.full_like(h, at[0])
    h = (h ^ h >> 16) * 0x7FEB352D % 2**32
    h = (h ^ h >> 15) * 0x846CA68B % 2**32
    chance = ((h ^ h >> 16) >> 8).float() * 2**-24
    number = ((part - low[:, None]) * factor[:, None] + chance.view(-1, BLOCK)).int().clamp(max=3)
    return _written(out, torch.stack([low, step], 1), _merged(number.view(-1, 4, BLOCK // 4), 2))


def decode_2bit(coded: Tensor, x: Tensor) -> None:
    ends = coded[: len(x) // BLOCK * 8].view(torch.float32).view(-1, 2)
    number = _parted(coded[len(x) // BLOCK * 8 :].view(-1, BLOCK // 4), 2).view(-1, BLOCK)
    x.copy_((ends[:, :1] + ends[:, 1:] * number.float()).flatten())
