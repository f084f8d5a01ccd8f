"""Decodes and encodes quantized weights by elementwise torch functions.

Decoders get the number of the first row or slab and the stored pieces from there on; encoders get fp32 values
and the pieces before training, and return new pieces.

[Note: the same bits]
Each decoder does the arithmetic of the library that reads the format for inference, in the same dtypes and
order, so its values are that library's to the bit: FP8, MXFP4 and NVFP4 (e2m1), NF4 (of a table)
times their scales in fp32, whole numbers times the scale of their group in the scales' dtype, LLM.int8 times
the largest size of its row, then times 1 / 127, in fp32.

[Note: which scale]
A block or group keeps its scale (and zero point), unless the format's own rule gives one with a smaller sum
of squared errors. A value that equals the decoded one keeps its code, any other gets the nearest. So
unchanged blocks come back bit by bit, also where two codes decode to one value (INT8 with bf16 scales). A
scale that cannot encode anything (0, NaN) is not kept. GPTQ and AWQ, which choose with data, have no encoder.

The formats' rules: FP8 maps the largest value to 448 (the scale is rounded up to a power of two, where scales
are such); MXFP4 takes the exponent of the largest value, less 2 (OCP Microscaling 1.0, 6.3), and saturates;
integers divide the range of values and 0, symmetric where no zero points are stored, into ``2**bits - 1``
steps.

Sources: DeepSeek-V3 ``inference/kernel.py`` (``weight_dequant``); transformers ``Fp8Dequantize``,
``Fp8Quantize`` and ``convert_moe_packed_tensors``; compressed-tensors ``PackedQuantizationCompressor``,
``NVFP4PackedCompressor``, ``NaiveQuantizationCompressor`` and ``calculate_qparams``; ModelOpt
``NVFP4QTensor``; GPTQModel ``dequantize_weight`` and ``Quantizer.find_params``; AutoAWQ ``dequantize_gemm``;
bitsandbytes ``dequantize_4bit`` and ``int8_vectorwise_dequant``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import pad

#: Values of the sixteen e2m1 codes; the upper eight are negative.
_E2M1_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: Values of the codes of bitsandbytes' NF4, whose blocks have values from -1 to 1.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip
#: 1 / 127, as LLM.int8 multiplies by it.
LLM_INT8 = 7.874015718698502e-3
#: A stored block may ask for a scale this many times the largest one: -8 of -8 to 7 makes a range of 16.
_ROUNDED_UP = 1.1
#: Elements that are encoded at a time where a whole matrix is given.
_PIECE_NUMEL = 2**18


def decode_fp8(
    first: int, codes: Tensor, scales: Tensor, *, block: tuple[int, int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Decode rows from ``first`` on of an FP8 matrix with one scale per block; the fp32 product in ``dtype``.

    ``codes`` are ``(n, columns)``; ``scales``, ``(row blocks, column blocks)``, begin with the block in which
    row 0 lies. The last blocks may be smaller, as in DeepSeek's own kernel.
    """
    (count, width), scales = codes.shape, as_float(scales)
    out = _e4m3_as_float(codes)
    of_rows = scales[torch.arange(first, first + count, device=codes.device) // block[0]]
    if not is_compiling() and width == of_rows.shape[1] * block[1]:
        out.view(count, -1, block[1]).mul_(of_rows.unsqueeze(-1))
    else:
        out.mul_(of_rows[:, torch.arange(width, device=codes.device) // block[1]])
    return out.to(dtype)


def _e4m3_as_float(values: Tensor) -> Tensor:
    if values.dtype == torch.int8:  # its bits
        sizes = (values & 127).int()
        normal = (sizes + (120 << 3) << 20).view(torch.float32)
        sizes = torch.where(sizes == 127, math.nan, torch.where(sizes < 8, sizes * 2.0**-9, normal))
        return sizes * torch.where(values < 0, -1.0, 1.0)  # Triton's minus is 0 - x: it has no -0
    if not values.is_cpu:
        return values.float()
    # A table is several times as fast as torch's conversion.
    codes = torch.arange(256, dtype=torch.uint8, device="cpu").view(values.dtype).float()
    return codes.index_select(0, values.view(torch.uint8).flatten().int()).view(values.shape)


def as_float(scales: Tensor) -> Tensor:
    if scales.dtype == torch.uint8:  # e8m0 under another name, as MXFP8 files have it
        return _power_of_two(scales.int() - 127)
    return _e4m3_as_float(scales) if scales.dtype == torch.int8 else scales.float()


def encode_fp8(
    values: Tensor, codes: Tensor, scales: Tensor, *, block: tuple[int, int],
    dtype: torch.dtype = torch.float32, power_of_two: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Encode whole blocks of rows for :func:`decode_fp8`, if ``power_of_two`` with scales that are such."""
    (rows, columns), (down, across) = codes.shape, scales.shape
    beyond = (0, across * block[1] - columns, 0, down * block[0] - rows)

    def by_block(matrix: Tensor) -> Tensor:
        padded = pad(matrix.view(rows, columns), beyond)
        return padded.view(down, block[0], across, block[1]).transpose(1, 2).flatten(2)

    values, before = by_block(values), by_block(codes.view(torch.uint8))
    largest = values.abs().amax(-1)
    own = torch.where(largest == 0, 1.0, largest / _E4M3.most)
    mantissa, exponent = torch.frexp(own)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)
    if scales.dtype.itemsize == 1:
        own = (exponent + 127).to(torch.uint8).view(scales.dtype)
    else:
        own = _clamped(_power_of_two(exponent) if power_of_two else own, scales.dtype)
    found, scales = _E4M3.encode(values, before, scales, own, as_float, dtype)
    found = found.view(down, across, *block).transpose(1, 2).reshape(down * block[0], -1)
    return found[:rows, :columns].contiguous().view(torch.float8_e4m3fn), scales


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return powers of two, fp32, of int32 exponents from -127 to 128 (infinity)."""
    return (exponents + 127 << 23 | (exponents == -127).int() << 22).view(torch.float32)


def _clamped(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales in ``dtype``, neither zero nor infinite; raise a ValueError for one far beyond it."""
    limits = torch.finfo(dtype)
    largest = scales.max().item() if scales.numel() else 0.0
    if largest > _ROUNDED_UP * limits.max:
        raise ValueError(
            f"its values need a scale of {largest:.4g}, and {dtype}, in which the checkpoint has scales, "
            f"ends at {limits.max:.6g}"
        )
    return scales.clamp(limits.tiny * limits.eps, limits.max).to(dtype)


def _nearest(
    values: Tensor, before: Tensor, encode: Callable[..., Tensor], decode: Callable[..., Tensor],
    had: Sequence[Tensor], own: Sequence[Tensor], *, nested: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Encode with old and new scales; return the nearer codes, then their scales: [Note: which scale].

    Args:
        values: ``(..., groups, n)``; ``before`` are their codes until now, uint8.
        encode: Returns the codes of values, given each group's scale (and zero point), ``(..., groups)``;
            ``decode`` is its inverse.
        had: The scales (and zero points) until now; ``own`` are those of the format's rule.
        nested: Scales are codes themselves.
    """
    codes = encode(values, *own)
    if not nested and not had[0].view(torch.uint8).any():  # of a new file: they encode nothing but zeros
        kept, keep = before, ~values.any(-1)
    else:
        kept = torch.where(decode(before, *had) == values, before, encode(values, *had))
        # In fp64: squares of small weights are 0 in fp32. Scales whose error is NaN are not kept.
        errors = [(decode(*x) - values).double().square().sum(-1) for x in ((kept, *had), (codes, *own))]
        keep = errors[0] <= errors[1]

    def choose(a: Tensor, b: Tensor) -> Tensor:
        if a.itemsize > 1:
            return torch.where(keep, a, b)
        return torch.where(keep, a.view(torch.uint8), b.view(torch.uint8)).view(a.dtype)  # e8m0, too

    return torch.where(keep.unsqueeze(-1), kept, codes), *map(choose, had, own)


@dataclass(frozen=True, slots=True)
class _Floats:
    """Describes floats of a few bits, whose largest is ``most``; ``read`` returns those of codes, uint8."""

    exponent: int
    mantissa: int
    most: float
    read: Callable[[Tensor], Tensor]

    def encode(
        self, values: Tensor, before: Tensor, had: Tensor, own: Tensor, factors: Callable[[Tensor], Tensor],
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return the codes of groups, times the ``factors`` of scales, and scales: see :func:`_nearest`."""

        def decode(codes: Tensor, scales: Tensor) -> Tensor:
            return self.read(codes).mul_(factors(scales).unsqueeze(-1)).to(dtype).float()

        def encode(values: Tensor, scales: Tensor) -> Tensor:
            steps = (values / factors(scales).unsqueeze(-1)).nan_to_num_(0)
            return self._round(steps.clamp_(-self.most, self.most))

        return _nearest(values, before, encode, decode, (had,), (own,))

    def _round(self, values: Tensor) -> Tensor:
        """Round fp32 values, none beyond the largest, to codes, ties to even."""
        # Integer arithmetic takes a quarter of the time of torch's conversion.
        bias, shift = (1 << self.exponent - 1) - 1, 23 - self.mantissa
        bits = values.abs().view(torch.int32)
        codes = bits >> shift
        codes.bitwise_and_(1).add_(bits).add_((1 << shift - 1) - 1).bitwise_right_shift_(shift)
        codes -= 127 - bias << self.mantissa
        small = (values.abs() * 2.0 ** (bias - 1 + self.mantissa)).round_().int()  # without a leading one
        codes = torch.where(codes < 1 << self.mantissa, small, codes)
        return codes.add_(values.signbit(), alpha=1 << self.exponent + self.mantissa).to(torch.uint8)


_E4M3 = _Floats(4, 3, 448.0, lambda codes: _e4m3_as_float(codes.view(torch.float8_e4m3fn)))
_E2M1 = _Floats(2, 1, 6.0, lambda codes: _look_up(_E2M1_NUMBERS, codes))


def _look_up(numbers: Sequence[float] | Tensor, codes: Tensor) -> Tensor:
    return _table(numbers, codes).index_select(0, codes.flatten().int()).view(codes.shape)


def decode_mxfp4(first: int, blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decode matrices of gpt-oss's experts, transposed as its model has them: ``(experts, in, out)``.

    ``blocks`` are ``(experts, out, in / 32, 16)``, two values a byte; ``scales`` their exponents, plus 127.
    """
    values, exponents = _e2m1_as_float(blocks), scales.int() - 127
    half = exponents >> 1  # 2 ** 128 is no number
    for each in (half, exponents - half):
        values = values * _power_of_two(each).unsqueeze(-1)
    return values.to(dtype).flatten(-2).transpose(1, 2)


def encode_mxfp4(values: Tensor, blocks: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    """Encode matrices for :func:`decode_mxfp4`: ``values`` are ``(experts, in, out)``, flat or not."""
    experts, out, groups = scales.shape
    rows = values.reshape(experts, 32 * groups, out).transpose(1, 2).flatten(0, 1)
    found, by_row = encode_e2m1(rows, blocks.flatten(0, 1).flatten(1), scales.flatten(0, 1))
    return found.view(blocks.shape), by_row.view(scales.shape)


def decode_e2m1(
    first: int, packed: Tensor, scales: Tensor, whole: Tensor | None = None, *, divides: bool = False
) -> Tensor:
    """Decode rows of e2m1 numbers with one scale per group, as NVFP4 and MXFP4 have them, to fp32.

    Args:
        packed: Two values a byte, the first in the low half: ``(n, columns / 2)``, uint8.
        scales: Scales of each row's groups, of equal size, or their exponents: ``(n, groups)``.
        whole: A scale of all scales, ``(1, 1)`` fp32; ``divides``: they are divided by it.
    """
    values, factors = _e2m1_as_float(packed), as_float(scales)
    if whole is not None:
        factors = factors / whole if divides else factors * whole
    return values.view(*scales.shape, -1).mul_(factors.unsqueeze(-1)).flatten(1)


def encode_e2m1(
    values: Tensor, packed: Tensor, scales: Tensor, whole: Tensor | None = None, *, divides: bool = False
) -> tuple[Tensor, ...]:
    """Encode rows for :func:`decode_e2m1`; all rows of a matrix where there is a scale of scales.

    That one is kept if the scales of all groups then are numbers of their format; else it becomes the one
    with which the largest is 448.
    """
    unit = 1.0
    if whole is not None:
        limits = torch.finfo(scales.dtype)
        unit = (1.0 / whole if divides else whole).double().item()
        largest = values.abs().amax().item() if values.numel() else 0.0
        if not 0 < unit < math.inf or largest / _E2M1.most / unit > _ROUNDED_UP * limits.max:
            least = torch.finfo(torch.float32).tiny  # whose inverse is a number, too
            unit = max(largest / (_E2M1.most * limits.max), least) if largest else 1.0
            whole = torch.full_like(whole, 1.0 / unit if divides else unit)
            scales = torch.full_like(scales.float(), math.nan).to(scales.dtype)

    def factors(scales: Tensor) -> Tensor:
        if whole is None:
            return as_float(scales.view(torch.uint8))
        return scales.float() / whole if divides else scales.float() * whole

    def own(largest: Tensor) -> Tensor:
        if whole is None:
            exponents = torch.frexp(largest).exponent - 3  # of 1 it is 1, and of the largest number 2
            return (exponents.clamp(-127, 127) + 127).to(torch.uint8).view(scales.dtype)
        needed = largest / _E2M1.most / unit
        return needed.clamp(limits.smallest_normal * limits.eps, limits.max).to(scales.dtype)

    pieces = []
    all_of = values.view(*scales.shape, -1), packed.view(*scales.shape, -1), scales
    at_once = max(1, _PIECE_NUMEL // max(1, all_of[0][:1].numel()))
    for piece, block, had in zip(*(torch.split(each, at_once) for each in all_of), strict=True):
        before = torch.stack((block & 15, block >> 4), -1).flatten(-2)
        pieces.append(_E2M1.encode(piece, before, had, own(piece.abs().amax(-1)), factors))
    codes, by_group = (torch.cat([x.view(torch.uint8) for x in each]) for each in zip(*pieces, strict=True))
    found = _join_nibbles(codes).view(packed.shape), by_group.view(scales.dtype)
    return found if whole is None else (*found, whole)


def decode_e2m1_experts(
    first: int, packed: Tensor, scales: Tensor, whole: Tensor, *, together: int, down: bool
) -> Tensor:
    """Decode e2m1 numbers of experts in one parameter, slabs from ``first`` on, to fp32.

    Args:
        packed: Pairs in bytes: of a row each slab, ``(n, 1, columns / 2)``; or, ``down``, of 16 rows each
            slab, ``(n, 8, columns)``, a pair in one column.
        scales: Of 16 numbers each: ``(n, columns / 16)`` or ``(n, columns)``.
        whole: Scales of scales, from that of slab 0 on, each of ``together`` slabs: ``(k, 1)`` fp32.
    """
    packed = (packed.transpose(1, 2) if down else packed).flatten(1)
    at = torch.arange(first, first + len(packed), device=packed.device) // together
    values = decode_e2m1(first, packed, scales, whole[at])
    return values.view(*scales.shape, 16).transpose(1, 2).flatten(1) if down else values


def encode_e2m1_experts(
    values: Tensor, packed: Tensor, scales: Tensor, whole: Tensor, *, down: bool
) -> tuple[Tensor, ...]:
    """Encode slabs for :func:`decode_e2m1_experts`; all slabs of each scale of scales."""
    values = values.view(len(packed), -1, packed.shape[2])
    values, pairs = (x.transpose(1, 2) if down else x for x in (values, packed))
    each = (torch.chunk(x, len(whole)) for x in (values, pairs.flatten(1), scales, whole))
    made = [encode_e2m1(v.reshape(-1), *rest) for v, *rest in zip(*each, strict=True)]
    found, by_group, whole = (
        torch.cat([x.view(torch.uint8) for x in parts]).view(parts[0].dtype)
        for parts in zip(*made, strict=True)
    )
    found = found.view(len(pairs), *pairs.shape[1:])
    return (found.transpose(1, 2).contiguous() if down else found), by_group, whole


def _join_nibbles(codes: Tensor) -> Tensor:
    """Pack two four-bit values into each byte, the first in the low half; halves the last dimension."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def _e2m1_as_float(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    if not is_compiling():
        return _pairs(packed, torch.tensor(_E2M1_NUMBERS, dtype=dtype, device=packed.device))
    codes = _bit_fields(packed, 4)
    sizes = (codes & 7).to(dtype)
    sizes = torch.maximum(torch.maximum(sizes / 2, sizes - 2), sizes * 2 - 8)
    return sizes * torch.where(codes > 7, -1.0, 1.0).to(dtype)  # Triton's minus is 0 - x: it has no -0


def _bit_fields(words: Tensor, bits: int, *, high_first: bool = False) -> Tensor:
    """Return the unsigned numbers of ``bits`` each in whole numbers, along the last dimension."""
    shifts = torch.arange(0, 8 * words.itemsize, bits, dtype=words.dtype, device=words.device)
    shifts = 8 - bits - shifts if high_first else shifts
    return (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(-2)


def _pairs(packed: Tensor, of_nibbles: Tensor, *, high_first: bool = False) -> Tensor:
    """Look up the values of both halves of each byte, the lower first; doubles the last dimension."""
    if is_compiling():
        return of_nibbles[_bit_fields(packed, 4, high_first=high_first).int()]
    low, high = of_nibbles.expand(16, 16), of_nibbles.unsqueeze(1).expand(16, 16)
    table = torch.stack((high, low) if high_first else (low, high), dim=-1)
    both = table.view(torch.int32 if table.itemsize == 2 else torch.int64).flatten()
    out = both.index_select(0, packed.flatten().int()).view(of_nibbles.dtype)
    return out.view(*packed.shape[:-1], -1)


def decode_int8(
    first: int, codes: Tensor, scales: Tensor, zeros: Tensor | None = None, *, factor: float | None = None
) -> Tensor:
    """Decode rows of int8 numbers with one scale per group, to the scales' dtype.

    ``scales`` are those of each row's groups, of equal size: ``(n, groups)``, or ``(1, 1)`` for all rows;
    ``zeros``, int8, are like them. ``factor`` multiplies each product, as LLM.int8 does.
    """
    values = codes.float().view(len(codes), scales.shape[1], -1)  # sums and products round once, at the end
    if zeros is not None:
        values -= zeros.float().unsqueeze(-1)
    values.mul_(scales.float().unsqueeze(-1))
    if factor is not None:
        values.mul_(factor)
    return values.flatten(1).to(scales.dtype)


def decode_4bit(
    first: int, packed: Tensor, sizes: Tensor, second: Tensor | None = None, *,
    numbers: tuple[float, ...] | Tensor, dtype: torch.dtype, of_sizes: tuple[float, ...] | Tensor = (),
    together: int = 1, offset: float | Tensor = 0.0,
) -> Tensor:  # fmt: skip
    """Decode blocks from ``first`` on of a matrix as bitsandbytes packs it; the fp32 product in ``dtype``.

    Args:
        packed: Two values a byte, the first in the high half: ``(n, block / 2)`` bytes, in any dtype.
        sizes: Largest size of each block, ``(n, 1)`` fp32, or with ``second`` its code, uint8.
        second: Scales of ``sizes``, each of ``together``, from that of block 0 on: ``(second blocks, 1)``.
        numbers: Values of the sixteen codes; ``of_sizes`` are those of the 256 codes of sizes, and ``offset``
            is added to every product of them (bitsandbytes' double quantization).
    """
    values = _pairs(packed.view(torch.uint8), _table(numbers, packed), high_first=True)
    if second is not None:
        at = torch.arange(first, first + len(sizes), device=packed.device) // together
        sizes = _look_up(of_sizes, sizes) * second[at] + offset
    return values.mul_(sizes).to(dtype)


def _table(numbers: Sequence[float] | Tensor, like: Tensor) -> Tensor:
    return numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, device=like.device)


def decode_packed(
    first: int, packed: Tensor, scales: Tensor, zeros: Tensor | None = None, *, bits: int, spare: int = 0
) -> Tensor:
    """Decode rows from ``first`` on of grouped integers, as compressed-tensors packs them, to scales' dtype.

    Args:
        packed: ``32 / bits`` values a word, the first in the lowest bits: ``(n, words)``, int32, contiguous;
            the last ``spare`` of a row are none.
        scales: Scales of each row's groups, of equal size: ``(n, groups)``.
        zeros: The zero points, packed along columns, from the word on in which row 0 lies; None: all are 0.
    """
    middle = 1 << bits - 1
    values = _unpack(packed, bits, scales.dtype, middle)
    if spare:
        values = values[:, :-spare].contiguous()
    values = values.view(len(values), scales.shape[1], -1)
    if zeros is not None:
        rows = torch.arange(first, first + len(values), device=zeros.device)
        values -= (_zero_points(zeros, bits)[rows] - middle).to(scales.dtype).unsqueeze(-1)
    return values.mul_(scales.unsqueeze(-1)).flatten(1)


def encode_packed(
    values: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None = None, *, bits: int, spare: int = 0
) -> tuple[Tensor, ...]:
    """Encode rows for :func:`decode_packed`; without zeros, ranges are symmetric."""
    columns = packed.shape[1] * (32 // bits) - spare
    values, before = values.view(-1, columns), _unpack(packed, bits, torch.int16)[:, :columns]
    centres = None if zeros is None else _zero_points(zeros, bits)[: len(values)]
    found = _encode_whole(values, before.to(torch.uint8), scales, centres, bits)
    words = _pack(found[0].flatten(1), bits)
    if zeros is None:
        return words, found[1]
    return words, found[1], _pack(found[2].to(torch.uint8).T, bits).T


def encode_int8(
    values: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Encode rows for :func:`decode_int8`; without zeros, ranges are symmetric."""
    rows = len(scales)  # 1: all have one scale
    centres = None if zeros is None else zeros.short() + 128
    before = codes.view(torch.uint8) ^ 128
    found = _encode_whole(values.view(rows, -1), before.view(rows, -1), scales, centres, 8)
    new = (found[0] ^ 128).view(torch.int8).view(codes.shape)
    return (new, found[1]) if zeros is None else (new, found[1], (found[2] - 128).to(torch.int8))


def _encode_whole(
    values: Tensor, before: Tensor, scales: Tensor, centres: Tensor | None, bits: int
) -> tuple[Tensor, ...]:
    """Encode rows of groups as unsigned numbers; return them, ``(rows, groups, n)``, scales and centres.

    Args:
        before: Numbers until now, ``(rows, columns)`` uint8.
        centres: Numbers that stand for 0, like ``scales``, int16; None: the middle, and ranges are symmetric.
    """
    middle, most, dtype = 1 << bits - 1, (1 << bits) - 1, scales.dtype
    values, before = (x.reshape(len(x), scales.shape[1], -1) for x in (values, before))
    low, high = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
    if centres is None:
        high = torch.maximum(high, -low)
        low = -high
    own = _clamped(torch.where(high == low, 1.0, high / most - low / most), dtype)
    if centres is None:
        centres = own_centres = torch.full_like(scales, middle, dtype=torch.int16)
    else:
        own_centres = (-low / own.float()).round().clamp(0, most).to(torch.int16)

    def decode(codes: Tensor, scales: Tensor, centres: Tensor) -> Tensor:
        return (codes - centres.unsqueeze(-1)).to(dtype) * scales.unsqueeze(-1)

    def encode(values: Tensor, scales: Tensor, centres: Tensor) -> Tensor:
        steps = (values / scales.float().unsqueeze(-1)).round_()
        return steps.add_(centres.unsqueeze(-1)).clamp_(0, most).to(torch.uint8)

    return _nearest(values, before, encode, decode, (scales, centres), (own, own_centres))


def encode_llm_int8(values: Tensor, codes: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
    """Encode rows for :func:`decode_int8` with a factor of 1 / 127; ``sizes`` are ``(n, 1)`` fp32."""
    values, before = values.view(*sizes.shape, -1), codes.view(torch.uint8).view(*sizes.shape, -1)

    def decode(codes: Tensor, sizes: Tensor) -> Tensor:
        return codes.view(torch.int8).float().mul_(sizes.unsqueeze(-1)).mul_(LLM_INT8)

    def encode(values: Tensor, sizes: Tensor) -> Tensor:
        steps = (values * (127.0 / sizes).unsqueeze(-1)).nan_to_num_(0).round_()
        return steps.clamp_(-127, 127).to(torch.int8).view(torch.uint8)

    found, sizes = _nearest(values, before, encode, decode, (sizes,), (values.abs().amax(-1),))
    return found.view(torch.int8).view(codes.shape), sizes


def encode_4bit(
    values: Tensor, packed: Tensor, sizes: Tensor, second: Tensor | None = None, *,
    numbers: tuple[float, ...], dtype: torch.dtype, of_sizes: tuple[float, ...] = (), together: int = 1,
    offset: float = 0.0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Encode blocks for :func:`decode_4bit`, from one on at which a second scale begins."""
    octets = packed.view(torch.uint8)
    values, before = values.view(len(sizes), -1), torch.stack((octets >> 4, octets & 15), -1).flatten(1)
    own, had = values.abs().amax(-1), sizes.flatten()
    by: Tensor | None = None  # the second scale of each block

    def size_of(had: Tensor) -> Tensor:
        if by is None:
            return had.unsqueeze(-1)
        return (_look_up(of_sizes, had) * by + offset).unsqueeze(-1)

    def decode(codes: Tensor, had: Tensor) -> Tensor:
        return _look_up(numbers, codes).mul_(size_of(had)).to(dtype).float()

    def encode(values: Tensor, had: Tensor) -> Tensor:
        return _nearest_number(values * (1.0 / size_of(had).clamp(min=1e-38)), numbers)

    if second is not None:
        at = torch.arange(len(values), device=values.device) // together
        by = second.flatten()[at]
        # A second scale that reaches all sizes is kept, with the codes of those that did not change.
        stays = (decode(before, had) == values).all(-1)
        off = torch.where(stays, size_of(had).squeeze(-1), own) - offset
        reach = torch.zeros_like(second.flatten()).scatter_reduce_(0, at, off.abs(), "amax")
        reach /= max(map(abs, of_sizes))
        keep = reach <= second.flatten() * _ROUNDED_UP
        second = torch.where(keep, second.flatten(), reach).view(second.shape)
        by = second.flatten()[at]
        own = _nearest_number(off / by, of_sizes)
        had = torch.where(keep[at], had, own)
    found, had = _nearest(values, before, encode, decode, (had,), (own,), nested=second is not None)
    joined, sizes = (found[:, ::2] << 4 | found[:, 1::2]).view(packed.dtype), had.view(sizes.shape)
    return (joined, sizes) if second is None else (joined, sizes, second)


def _nearest_number(values: Tensor, numbers: Sequence[float]) -> Tensor:
    """Return the codes, uint8, of the nearest of ``numbers``; of two that are as near, the smaller one's."""
    ascending, order = torch.tensor(numbers, device=values.device).sort(stable=True)
    bounds, values = (ascending[:-1] + ascending[1:]) / 2, values.nan_to_num(0).contiguous()
    if len(bounds) > 15:
        return order.to(torch.uint8)[torch.bucketize(values, bounds)]
    places = torch.zeros_like(values, dtype=torch.uint8)
    for bound in bounds:  # several times as fast as torch's search
        places += values > bound
    return places  # NF4's ascend


def _pack(numbers: Tensor, bits: int) -> Tensor:
    """Pack ``(rows, n)`` uint8 into int32 words, filled up with zeros; the inverse of :func:`_unpack`."""
    numbers = pad(numbers, (0, -numbers.shape[1] % (32 // bits)))
    octets = _join_nibbles(numbers) if bits == 4 else numbers
    return octets.clone(memory_format=torch.contiguous_format).view(torch.int32)  # as in _unpack


def _zero_points(packed: Tensor, bits: int) -> Tensor:
    """Return columns of codes, ``(words, groups)`` int32 to ``(32 / bits * words, groups)`` int16."""
    return _unpack(packed.T, bits, torch.int16).T


def decode_gptq(
    first: int, packed: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor, *, bits: int, less_one: bool
) -> Tensor:
    """Decode a whole matrix as GPTQ packs it, in the scales' dtype: ``(out, in)``.

    Words have ``32 / bits`` values, the first in the lowest bits: of columns in ``packed``, ``(words, out)``,
    of rows in ``zeros``, ``(groups, words)``. ``scales`` are ``(groups, out)``, and ``groups`` has that of
    each input. ``less_one``: zeros are stored less one, as in ``gptq``, not ``gptq_v2``.
    """
    packed, zeros, scales, groups = packed[0], zeros[0], scales[0], groups[0]
    if less_one:  # all of a word at one time
        zeros = zeros + (0x11111111 if bits == 4 else 0x01010101)
    groups = groups.long()
    values = _unpack(packed.T, bits, scales.dtype)[:, : len(groups)].contiguous()
    centres = _unpack(zeros, bits, scales.dtype)[:, : scales.shape[1]]
    values -= centres.T.index_select(1, groups)  # small whole numbers, exact in every dtype
    return values.mul_(scales.T.index_select(1, groups))


def decode_awq(first: int, packed: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """Decode a whole matrix as AWQ packs it for its GEMM kernels, in the scales' dtype: ``(out, in)``.

    Words have eight values of a row, the even ones in the lower half: ``packed`` ``(in, out / 8)``, ``zeros``
    ``(groups, out / 8)``. ``scales`` are those of groups of inputs, of equal size: ``(groups, out)``.
    """
    packed, zeros, scales = packed[0], zeros[0], scales[0]
    groups, rows = scales.shape

    def unpack(words: Tensor) -> Tensor:
        halves = _unpack(words, 4, scales.dtype).view(-1, rows // 8, 2, 4)
        return halves.transpose(2, 3).reshape(-1, rows)

    values = unpack(packed).view(groups, -1, rows) - unpack(zeros).unsqueeze(1)
    return values.mul_(scales.unsqueeze(1)).view(-1, rows).T


def _unpack(words: Tensor, bits: int, dtype: torch.dtype, less: int = 0) -> Tensor:
    """Unpack unsigned values of int32 words, ``(rows, n)`` to ``(rows, n * 32 / bits)``, and subtract."""
    if is_compiling():
        return _bit_fields(words, bits).to(dtype) - less
    # not contiguous(): that leaves strides of transposed words as they are where a row has one
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 4:
        return _pairs(octets, torch.arange(-less, 16 - less, device=words.device).to(dtype))
    return octets.to(dtype).sub_(less)
