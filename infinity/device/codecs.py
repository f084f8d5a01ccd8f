"""Stored forms of weights, decoded to what a model computes with: elementwise torch, on any device.

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

Sources: DeepSeek-V3 ``inference/kernel.py`` (``weight_dequant``); transformers ``Fp8Dequantize`` and
``convert_moe_packed_tensors``; compressed-tensors ``PackedQuantizationCompressor``; GPTQModel
``dequantize_weight``.
"""

import torch
from torch import Tensor

#: Values of the sixteen e2m1 numbers; the upper eight are negative.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: What GPTQ's first format subtracts from the zero points, all eight of a word at one time.
_ONE_IN_EACH_NIBBLE = 0x11111111


def decode_fp8(values: Tensor, scales: Tensor, block: tuple[int, int], first_row: int = 0) -> Tensor:
    """Decode rows of an FP8 matrix with a scale for each block; fp32.

    Args:
        values: Rows from ``first_row`` on, ``(n, columns)``, float8.
        scales: Of the whole matrix, ``(blocks of rows, blocks of columns)``; of one byte: exponents (e8m0).
        block: Rows and columns of a block; see [Note: blocks at the edge].
    """
    (count, width), scales = values.shape, as_float(scales)
    if values.is_cpu:  # a table is several times as fast as torch's conversion
        codes = torch.arange(256, dtype=torch.uint8, device="cpu").view(values.dtype).float()
        out = codes.index_select(0, values.view(torch.uint8).flatten().int()).view(count, width)
    else:
        out = values.float()
    of_rows = scales[torch.arange(first_row, first_row + count, device=values.device) // block[0]]
    if width == of_rows.shape[1] * block[1]:
        out.view(count, -1, block[1]).mul_(of_rows.unsqueeze(-1))
    else:
        out.mul_(of_rows[:, torch.arange(width, device=values.device) // block[1]])
    return out


def as_float(scales: Tensor) -> Tensor:
    """Scales of FP8 blocks in fp32."""
    if scales.dtype == torch.uint8:  # e8m0 under another name, as MXFP8 files have it
        return (scales.float() - 127).exp2()
    return scales.float()


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
        scales: For each row, of groups of equal size: ``(n, groups)``.
        zeros: What stands for zero in each group, ``(n, groups)``, from -2**(bits-1) on; None: 0.
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
        zeros_less_one: As the format ``gptq`` has them; ``gptq_v2`` has them as they are.
    """
    if zeros_less_one:
        zeros = zeros + (_ONE_IN_EACH_NIBBLE if bits == 4 else _ONE_IN_EACH_NIBBLE & 0x01010101)
    groups = groups.long()
    values = _unpack(packed.T, bits, scales.dtype)[:, : len(groups)].contiguous()
    centres = _unpack(zeros, bits, scales.dtype)[:, : scales.shape[1]]
    values -= centres.T.index_select(1, groups)  # small whole numbers, exact in every dtype
    return values.mul_(scales.T.index_select(1, groups))


def _unpack(words: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """The unsigned values in ``words``, ``(rows, n)`` int32: ``(rows, n * 32 / bits)``."""
    # not contiguous(): that leaves strides of transposed words as they are where a row has one
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 4:
        return _pairs(octets, torch.arange(16, device=words.device).to(dtype))
    return octets.to(dtype)
