"""What is decoded and encoded has the bits of the libraries that define the forms."""

import pytest
import torch

from infinity.checkpoint import codecs
from tests.checkpoint.test_codecs import same

ROWS, COLUMNS = 64, 128
NO_BITSANDBYTES = "make ecosystem"


@pytest.fixture
def compressed(request):
    """``decode(format, tensors, **scheme)`` of compressed-tensors."""
    pytest.importorskip("compressed_tensors", reason="make ecosystem")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    def decode(kind, tensors, **scheme):
        found = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**scheme))
        return BaseCompressor.get_value_from_registry(kind).decompress(tensors, found)["weight"]

    return decode


def test_nvfp4_and_the_mx_forms_are_those_of_compressed_tensors(compressed):
    packed = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8)
    scales = torch.randint(1, 0x7F, (ROWS, COLUMNS // 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
    whole = torch.rand(1) * 9000 + 10
    tensors = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": whole}
    how = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    ours = codecs.decode_e2m1(0, packed, scales, whole.view(1, 1), divides=True)
    assert same(ours.bfloat16(), compressed("nvfp4-pack-quantized", tensors, **how))

    scales = torch.randint(1, 250, (ROWS, COLUMNS // 32), dtype=torch.uint8)
    tensors, how = (
        {"weight_packed": packed, "weight_scale": scales},
        how | {"strategy": "group", "group_size": 32},
    )
    expected = compressed("mxfp4-pack-quantized", tensors, **how)
    assert same(codecs.decode_e2m1(0, packed, scales).bfloat16(), expected)

    scales = torch.randint(100, 140, (ROWS, COLUMNS // 32), dtype=torch.uint8)
    numbers = (torch.randn(ROWS, COLUMNS) * 100).to(torch.float8_e4m3fn)
    how |= {"num_bits": 8, "scale_dtype": torch.uint8}
    expected = compressed("mxfp8-quantized", {"weight": numbers, "weight_scale": scales}, **how)
    assert same(codecs.decode_fp8(0, numbers, scales, block=(1, 32), dtype=torch.bfloat16), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_and_int8_are_those_of_compressed_tensors(compressed, dtype):
    numbers = (torch.randn(ROWS, COLUMNS) * 100).to(torch.float8_e4m3fn)
    for strategy, block in (("tensor", (ROWS, COLUMNS)), ("channel", (1, COLUMNS)), ("block", (16, 32))):
        scales = (torch.rand(ROWS // block[0], COLUMNS // block[1]) * 0.01 + 0.001).to(dtype)
        how = {"num_bits": 8, "type": "float", "strategy": strategy}
        how |= {"block_structure": [16, 32]} if strategy == "block" else {}
        expected = compressed("float-quantized", {"weight": numbers, "weight_scale": scales}, **how)
        assert same(codecs.decode_fp8(0, numbers, scales, block=block, dtype=dtype), expected)
    numbers = torch.randint(-128, 128, (ROWS, COLUMNS), dtype=torch.int8)
    for zeros in (None, torch.randint(-128, 128, (ROWS, 1), dtype=torch.int8)):
        scales = (torch.rand(ROWS, 1) * 0.01 + 0.001).to(dtype)
        tensors = {"weight": numbers, "weight_scale": scales}
        how = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": zeros is None}
        tensors |= {} if zeros is None else {"weight_zero_point": zeros}
        expected = compressed("int-quantized", tensors, **how)
        assert same(codecs.decode_int8(0, numbers, scales, zeros), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_four_bits_are_those_of_bitsandbytes_in_both_directions(dtype):
    functional = pytest.importorskip("bitsandbytes.functional", reason=NO_BITSANDBYTES)
    values, how = (torch.randn(ROWS, COLUMNS) * 0.05).to(dtype), {"numbers": codecs.NF4, "dtype": dtype}
    for size in (64, 128):
        packed, state = functional.quantize_4bit(values, blocksize=size, quant_type="nf4")
        parts = packed.view(-1, size // 2), state.absmax.view(-1, 1)
        ours = codecs.decode_4bit(0, *parts, **how).view(values.shape)
        assert same(ours, functional.dequantize_4bit(packed, state))
        nothing = torch.zeros_like(parts[0]), torch.full_like(parts[1], torch.nan)
        for part, expected in zip(codecs.encode_4bit(values.float(), *nothing, **how), parts, strict=True):
            assert same(part, expected)
        packed, state = functional.quantize_4bit(values, None, None, size, True, "nf4")
        second = state.state2
        nested = {"of_sizes": tuple(second.code.tolist()), "together": second.blocksize}
        parts = packed.view(-1, size // 2), state.absmax.view(-1, 1), second.absmax.view(-1, 1)
        ours = codecs.decode_4bit(0, *parts, **how, **nested, offset=state.offset.item()).view(values.shape)
        assert same(ours, functional.dequantize_4bit(packed, state))


def test_int8_is_that_of_bitsandbytes_in_both_directions():
    functional = pytest.importorskip("bitsandbytes.functional", reason=NO_BITSANDBYTES)
    values = torch.randn(ROWS, COLUMNS).half()
    numbers, sizes, _ = functional.int8_vectorwise_quant(values.clone())
    ours = codecs.decode_int8(0, numbers, sizes.view(-1, 1), factor=codecs.LLM_INT8)
    assert same(ours, functional.int8_vectorwise_dequant(numbers, sizes))
    found = codecs.encode_llm_int8(values.float(), torch.zeros_like(numbers), torch.zeros(ROWS, 1))
    assert same(found[0], numbers)
    assert same(found[1].view(-1), sizes)
