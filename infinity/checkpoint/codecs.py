"""Stored forms of weights, decoded to what a model computes with, and encoded: elementwise torch.

[Note: the same bits]
Each function does the arithmetic of the library that reads the format for inference, in the same dtypes and
order, so its values are that library's to the bit:

- FP8 with block scales: e4m3 times the scale of its block, in fp32.
- MXFP4, as gpt-oss has it: e2m1 times a power of two for 32 values; exact in bf16.
- INT4 groups of compressed-tensors (nibbles along a row) and GPTQ (down a column): the product with the
  group's scale, in the scales' dtype.

Rows of FP8, of compressed-tensors, and experts of MXFP4 can be decoded by themselves.

[Note: blocks at the edge]
A matrix of 576 rows in blocks of 128 has 5 rows of scales, the last for 64 rows: DeepSeek's own kernel and
the layers of transformers divide the index by the block's size. (The dequantization of transformers 5.23
divides the matrix into as many equal parts as there are scales, and refuses 576 rows.)

[Note: which scale]
Beside each decoder but GPTQ's stands its encoder, which is given what the values were decoded from before
they were trained. A block, or group, of values keeps its scale (and zero point), unless the one that the
format's own rule gives has a smaller error (the sum of squares). A value that is still the decoded one keeps
its number, any other becomes the nearest. So blocks that did not change come back bit by bit, also where two
numbers decode to one value (INT8 with scales in bf16), and those that changed little lose little. A scale
with which nothing can be encoded (0, NaN) is not kept.

The formats' rules: FP8 brings the largest value to 448 (up to the next power of two, where scales are such);
MXFP4 takes the exponent of the largest, less 2 (OCP Microscaling 1.0, 6.3), and saturates; whole numbers
divide the range from the smallest to the largest value, 0 between them, or a range that is symmetric, into
``2**bits - 1`` steps.

Sources: DeepSeek-V3 ``inference/kernel.py`` (``weight_dequant``); transformers ``Fp8Dequantize``,
``Fp8Quantize`` and ``convert_moe_packed_tensors``; compressed-tensors ``PackedQuantizationCompressor`` and
``calculate_qparams``; GPTQModel ``dequantize_weight`` and ``Quantizer.find_params``.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

#: Values of the sixteen e2m1 numbers; the upper eight are negative.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: The largest numbers.
_E4M3_MOST, _E2M1_MOST = 448.0, 6.0
#: Numbers of the largest scale may ask for one so many times as large: -8 of -8 to 7 makes a range of 16.
_ROUNDED_UP = 1.1
#: Elements that are encoded at one time, where a whole matrix is given.
_PIECE_NUMEL = 2**18
#: What GPTQ's first format subtracts from the zero points, all eight of a word at one time.
_ONE_IN_EACH_NIBBLE = 0x11111111


def decode_fp8(values: Tensor, scales: Tensor, block: tuple[int, int], first_row: int = 0) -> Tensor:
    """Decode rows of an FP8 matrix with a scale for each block; fp32.

    Args:
        values: Rows from ``first_row`` on, ``(n, columns)``, float8.
        scales: Scales of the whole matrix, ``(blocks of rows, blocks of columns)``; of one byte: exponents
            (e8m0).
        block: Rows and columns of a block; see [Note: blocks at the edge].
    """
    (count, width), scales = values.shape, as_float(scales)
    out = _e4m3_as_float(values)
    of_rows = scales[torch.arange(first_row, first_row + count, device=values.device) // block[0]]
    if width == of_rows.shape[1] * block[1]:
        out.view(count, -1, block[1]).mul_(of_rows.unsqueeze(-1))
    else:
        out.mul_(of_rows[:, torch.arange(width, device=values.device) // block[1]])
    return out


def _e4m3_as_float(values: Tensor) -> Tensor:
    if not values.is_cpu:
        return values.float()
    # A table is several times as fast as torch's conversion.
    codes = torch.arange(256, dtype=torch.uint8, device="cpu").view(values.dtype).float()
    return codes.index_select(0, values.view(torch.uint8).flatten().int()).view(values.shape)


def as_float(scales: Tensor) -> Tensor:
    """Scales of FP8 blocks in fp32."""
    if scales.dtype == torch.uint8:  # e8m0 under another name, as MXFP8 files have it
        return (scales.float() - 127).exp2()
    return scales.float()


def encode_fp8(
    values: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int], *, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """Encode rows of a matrix as :func:`decode_fp8` decodes them; see [Note: which scale].

    Args:
        values: Rows from the first one of a block on, to the last one of a block or of the matrix, fp32.
        codes: The numbers before, float8_e4m3fn.
        scales: The scales of their blocks before, ``(blocks of rows, blocks of columns)``.
        power_of_two: All scales are powers of two, also those of more than one byte.

    Returns:
        Numbers and scales.
    """
    (rows, columns), (down, across) = values.shape, scales.shape
    beyond = (0, across * block[1] - columns, 0, down * block[0] - rows)

    def by_block(matrix: Tensor) -> Tensor:
        return pad(matrix, beyond).view(down, block[0], across, block[1]).transpose(1, 2).flatten(2)

    def decode(codes: Tensor, scales: Tensor) -> Tensor:
        return _e4m3_as_float(codes.view(torch.float8_e4m3fn)) * as_float(scales).unsqueeze(-1)

    def encode(values: Tensor, scales: Tensor) -> Tensor:
        steps = values / as_float(scales).unsqueeze(-1)
        return _round(steps.clamp_(-_E4M3_MOST, _E4M3_MOST), exponent=4, mantissa=3)

    values, before = by_block(values), by_block(codes.view(torch.uint8))
    own = _fp8_scales(values.abs().amax(-1), scales.dtype, power_of_two)
    found, scales = _nearest(values, before, encode, decode, (scales,), (own,))
    found = found.view(down, across, *block).transpose(1, 2).reshape(down * block[0], -1)
    return found[:rows, :columns].contiguous().view(torch.float8_e4m3fn), scales


def _round(values: Tensor, exponent: int, mantissa: int) -> Tensor:
    """The nearest numbers with so many bits, and one for the sign, as uint8; ties to even.

    By whole numbers, which takes a quarter of the time of torch's conversion.

    Args:
        values: fp32, not beyond the largest number.
    """
    bias, shift = (1 << exponent - 1) - 1, 23 - mantissa
    bits = values.abs().view(torch.int32)
    codes = bits >> shift
    codes.bitwise_and_(1).add_(bits).add_((1 << shift - 1) - 1).bitwise_right_shift_(shift)
    codes -= 127 - bias << mantissa
    small = (values.abs() * 2.0 ** (bias - 1 + mantissa)).round_().int()  # numbers without a leading one
    codes = torch.where(codes < 1 << mantissa, small, codes)
    return codes.add_(values.signbit(), alpha=1 << exponent + mantissa).to(torch.uint8)


def _fp8_scales(largest: Tensor, dtype: torch.dtype, power_of_two: bool) -> Tensor:
    scales = torch.where(largest == 0, 1.0, largest / _E4M3_MOST)
    if dtype.itemsize > 1 and not power_of_two:
        return _clamped(scales, dtype)
    mantissa, exponent = torch.frexp(scales)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)
    if dtype.itemsize > 1:
        return _clamped(_power_of_two(exponent), dtype)
    return (exponent + 127).to(torch.uint8).view(dtype)


def _power_of_two(exponents: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)


def _clamped(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in their dtype; neither zero nor infinite.

    Raises:
        ValueError: One is beyond the dtype, so its values would be, too.
    """
    limits = torch.finfo(dtype)
    largest = scales.max().item() if scales.numel() else 0.0
    if largest > _ROUNDED_UP * limits.max:
        raise ValueError(
            f"its values need a scale of {largest:.4g}, and {dtype}, in which the checkpoint has scales, "
            f"ends at {limits.max:.6g}"
        )
    return scales.clamp(limits.tiny * limits.eps, limits.max).to(dtype)


def _nearest(
    values: Tensor,
    before: Tensor,
    encode: Callable[..., Tensor],
    decode: Callable[..., Tensor],
    had: Sequence[Tensor],
    own: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Encode in two ways, and take for each group what is nearer; see [Note: which scale].

    Args:
        values: ``(..., groups, n)``.
        before: The numbers until now, uint8.
        encode: Returns the numbers of values, given a scale and the like of each group, ``(..., groups)``.
        decode: Returns the values of numbers.
        had: The scales and the like until now: kept if the other ones are no better.
        own: The numbers that the format's rule gives.

    Returns:
        The numbers, and for each of ``had`` what was taken.
    """
    kept = torch.where(decode(before, *had) == values, before, encode(values, *had))
    codes = encode(values, *own)
    # In fp64: squares of small weights are 0 in fp32. What NaN stands for is not kept.
    errors = [(decode(*each) - values).double().square().sum(-1) for each in ((kept, *had), (codes, *own))]
    keep = errors[0] <= errors[1]

    def choose(a: Tensor, b: Tensor) -> Tensor:
        if a.itemsize > 1:
            return torch.where(keep, a, b)
        return torch.where(keep, a.view(torch.uint8), b.view(torch.uint8)).view(a.dtype)  # e8m0, too

    return torch.where(keep.unsqueeze(-1), kept, codes), *map(choose, had, own)


def _in_pieces(encode: Callable[..., Sequence[Tensor]], values: Tensor, *others: Tensor) -> list[Tensor]:
    """Call ``encode`` with some rows of each tensor at a time, and join what it returns."""
    rows = max(1, _PIECE_NUMEL // max(1, values[:1].numel()))
    pieces = zip(*(torch.split(each, rows) for each in (values, *others)), strict=True)
    return [torch.cat(parts) for parts in zip(*(encode(*piece) for piece in pieces), strict=True)]


def decode_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decode matrices of gpt-oss's experts, and transpose them as its model has them.

    Args:
        blocks: Two values a byte, the first in the low half: ``(experts, out, groups, 16)``, uint8.
        scales: Exponents, plus 127: ``(experts, out, groups)``, uint8.

    Returns:
        ``(experts, in, out)``, where ``in`` is ``32 * groups``.
    """
    values = _pairs(blocks, torch.tensor(_E2M1, dtype=dtype, device=blocks.device))
    values = torch.ldexp(values, scales.int().sub_(127).unsqueeze(-1)).to(dtype)
    return values.flatten(-2).transpose(1, 2).contiguous()


def encode_mxfp4(values: Tensor, blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Encode matrices as :func:`decode_mxfp4` decodes them; see [Note: which scale].

    Args:
        values: ``(experts, in, out)``, fp32.
        blocks: The numbers before, ``(experts, out, groups, 16)``, uint8.
        scales: The scales of their groups before, ``(experts, out, groups)``, uint8.

    Returns:
        Blocks and scales.
    """
    rows = values.transpose(1, 2).reshape(-1, scales.shape[2], 32)
    found, by_row = _in_pieces(_encode_e2m1, rows, blocks.flatten(0, 1), scales.flatten(0, 1))
    return found.view(blocks.shape), by_row.view(scales.shape)


def _encode_e2m1(values: Tensor, blocks: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    """Blocks and scales of values, ``(n, groups, 32)``."""
    values, before = values.contiguous(), torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    exponents = torch.frexp(values.abs().amax(-1)).exponent - 3  # of 1 it is 1, and of the largest number 2
    numbers = torch.tensor(_E2M1, device=values.device)

    def decode(codes: Tensor, scales: Tensor) -> Tensor:
        steps = numbers.index_select(0, codes.flatten().int()).view(codes.shape)
        return steps.mul_(_power_of_two(scales.int() - 127).unsqueeze(-1))

    def encode(values: Tensor, scales: Tensor) -> Tensor:
        steps = values * _power_of_two(127 - scales.int()).unsqueeze(-1)
        return _round(steps.clamp_(-_E2M1_MOST, _E2M1_MOST), exponent=2, mantissa=1)

    own = (exponents.clamp(-127, 127) + 127).to(torch.uint8)
    codes, scales = _nearest(values, before, encode, decode, (scales,), (own,))
    return _join_nibbles(codes), scales


def _join_nibbles(codes: Tensor) -> Tensor:
    """Two values of four bits in each byte, the first in the low half: the last dimension is half as long."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def _pairs(packed: Tensor, of_nibbles: Tensor) -> Tensor:
    """The values of both halves of each byte, the lower first: the last dimension is twice as long."""
    low, high = of_nibbles.expand(16, 16), of_nibbles.unsqueeze(1).expand(16, 16)
    table = torch.stack((low, high), dim=-1)
    both = table.view(torch.int32 if table.itemsize == 2 else torch.int64).flatten()
    out = both.index_select(0, packed.flatten().int()).view(of_nibbles.dtype)
    return out.view(*packed.shape[:-1], -1)


def decode_packed(packed: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, columns: int) -> Tensor:
    """Decode rows of whole numbers in groups, as compressed-tensors packs them, in the scales' dtype.

    Args:
        packed: ``32 / bits`` values a word, the first in the lowest bits: ``(n, words)``, int32, contiguous.
        scales: Scales of each row's groups, of equal size: ``(n, groups)``.
        zeros: The number that stands for zero in each group, ``(n, groups)``, from -2**(bits-1) on; None: 0.
        bits: 4 or 8.
        columns: Values in a row.
    """
    if bits == 4:
        numbers = torch.arange(-8, 8, device=packed.device).to(scales.dtype)
        values = _pairs(packed.view(torch.uint8), numbers)[:, :columns].contiguous()
    else:
        values = (packed.view(torch.uint8)[:, :columns].short() - 128).to(scales.dtype)
    values = values.view(len(values), scales.shape[1], -1)
    if zeros is not None:
        values -= zeros.to(scales.dtype).unsqueeze(-1)
    return values.mul_(scales.unsqueeze(-1)).flatten(1)


def encode_packed(
    values: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, bits: int
) -> tuple[Tensor, ...]:
    """Encode rows as :func:`decode_packed` decodes them; see [Note: which scale].

    Args:
        values: ``(n, columns)``, fp32.
        packed: The numbers before, ``(n, words)``.
        scales: The scales of their groups before, ``(n, groups)``.
        zeros: The number that stood for zero, ``(n, groups)``; None: 0, and ranges are symmetric.
        bits: 4 or 8.

    Returns:
        Words, scales and, where there are some, zeros.
    """
    middle = 1 << bits - 1
    centres = torch.full_like(scales, middle, dtype=torch.int16) if zeros is None else zeros + middle
    before = _unpack(packed, bits, torch.int16).to(torch.uint8)[:, : values.shape[1]]
    values, before = (each.reshape(len(each), scales.shape[1], -1) for each in (values, before))
    codes, scales, centres = _encode_numbers(values, before, scales, centres, bits, symmetric=zeros is None)
    words = _pack(codes.flatten(1), bits)
    return (words, scales) if zeros is None else (words, scales, centres - middle)


def _encode_numbers(
    values: Tensor, before: Tensor, scales: Tensor, centres: Tensor, bits: int, *, symmetric: bool
) -> tuple[Tensor, ...]:
    """Unsigned numbers of groups, ``(n, groups, k)`` uint8; their scales, and what stands for zero, int16."""
    most, dtype = (1 << bits) - 1, scales.dtype
    low, high = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    own = _clamped(torch.where(high == low, 1.0, high / most - low / most), dtype)
    middle = torch.full_like(centres, 1 << bits - 1)
    if not symmetric:
        middle = (-low / own.float()).round().clamp(0, most).to(torch.int16)

    def decode(codes: Tensor, scales: Tensor, centres: Tensor) -> Tensor:
        return (codes - centres.unsqueeze(-1)).to(dtype) * scales.unsqueeze(-1)

    def encode(values: Tensor, scales: Tensor, centres: Tensor) -> Tensor:
        steps = (values / scales.float().unsqueeze(-1)).round_()
        return steps.add_(centres.unsqueeze(-1)).clamp_(0, most).to(torch.uint8)

    return _nearest(values, before, encode, decode, (scales, centres), (own, middle))


def pack_zeros(zeros: Tensor, bits: int) -> Tensor:
    """Zero points, ``(rows, groups)`` int16, as :func:`unpack_zeros` unpacks them."""
    return _pack((zeros + (1 << bits - 1)).to(torch.uint8).T, bits).T


def _pack(numbers: Tensor, bits: int) -> Tensor:
    """The words of which :func:`_unpack` makes these, ``(rows, n)`` uint8; filled up with zeros."""
    numbers = pad(numbers, (0, -numbers.shape[1] % (32 // bits)))
    octets = _join_nibbles(numbers) if bits == 4 else numbers
    return octets.clone(memory_format=torch.contiguous_format).view(torch.int32)  # as in _unpack


def unpack_zeros(packed: Tensor, bits: int) -> Tensor:
    """The zero points of compressed-tensors, which are packed down a column, ``(words, groups)`` int32.

    Returns:
        ``(rows, groups)``, with rows up to the end of the last word; int16.
    """
    return _unpack(packed.T, bits, torch.int16).T - (1 << bits - 1)


def decode_gptq(
    packed: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor, bits: int, *, zeros_less_one: bool
) -> Tensor:
    """Decode a whole matrix as GPTQ packs it, in the scales' dtype: ``(out, in)``.

    Args:
        packed: ``32 / bits`` values a word, the first in the lowest bits: ``(in * bits / 32, out)``, int32.
        zeros: Packed along a row: ``(groups, out * bits / 32)``, int32.
        scales: ``(groups, out)``.
        groups: The group of each row of inputs, ``(in,)``.
        bits: 4 or 8.
        zeros_less_one: Zeros are stored less one, as in the format ``gptq``; ``gptq_v2`` has them as they
            are.
    """
    if zeros_less_one:
        zeros = zeros + _one_in_each(bits)
    groups = groups.long()
    values = _unpack(packed.T, bits, scales.dtype)[:, : len(groups)].contiguous()
    centres = _unpack(zeros, bits, scales.dtype)[:, : scales.shape[1]]
    values -= centres.T.index_select(1, groups)  # small whole numbers, exact in every dtype
    return values.mul_(scales.T.index_select(1, groups))


def _one_in_each(bits: int) -> int:
    return _ONE_IN_EACH_NIBBLE if bits == 4 else _ONE_IN_EACH_NIBBLE & 0x01010101


def _unpack(words: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """The unsigned values in ``words``, ``(rows, n)`` int32: ``(rows, n * 32 / bits)``."""
    # not contiguous(): that leaves strides of transposed words as they are where a row has one
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 4:
        return _pairs(octets, torch.arange(16, device=words.device).to(dtype))
    return octets.to(dtype)
