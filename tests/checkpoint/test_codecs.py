"""What is decoded has the bits that the library gives which reads the format for inference."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from infinity.checkpoint import codecs
from infinity.checkpoint.directory import Checkpoint, MemoryTensor
from infinity.checkpoint.forms import decode_checkpoint, read_quantization
from tests.helpers import quantized


def same(a, b):
    """The same bits, NaN included."""
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "e8m0", "bytes"])
def test_fp8_blocks_are_decoded_as_transformers_decodes_them(kind, dtype):
    stored = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(32, 8).repeat(2, 6)
    exponents = torch.randint(0, 255, (4, 3), dtype=torch.uint8)
    scales = {
        "fp32": torch.rand(4, 3) * torch.tensor([1e-30, 1.0, 1e30]), "bf16": torch.rand(4, 3).bfloat16(),
        "e8m0": exponents.view(torch.float8_e8m0fnu), "bytes": exponents,
    }[kind]  # fmt: skip
    expected = Fp8Dequantize(None)._dequantize_one(stored, scales, dtype)
    assert same(codecs.decode_fp8(0, stored, scales, block=(16, 16)).to(dtype), expected)
    rows = codecs.decode_fp8(21 - 16, stored[21:40], scales[1:3], block=(16, 16))
    assert same(rows.to(dtype), expected[21:40])


def test_the_last_blocks_of_fp8_may_be_smaller_than_the_others():
    stored, scales = torch.randn(20, 13).to(torch.float8_e4m3fn), torch.rand(3, 2)
    assert same(codecs.decode_fp8(0, stored, scales, block=(8, 8)), quantized.fp8_values(stored, scales, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_decoded_as_transformers_decodes_it_and_as_the_standard_says(dtype):
    blocks = torch.arange(16 * 16 * 2 * 16).view(16, 16, 2, 16).to(torch.uint8)
    scales = torch.arange(16 * 16 * 2).view(16, 16, 2).to(torch.uint8)  # every exponent
    decoded = codecs.decode_mxfp4(0, blocks, scales, dtype=dtype)
    assert same(decoded, convert_moe_packed_tensors(blocks, scales, dtype=dtype))
    finite = scales[:4] % 200
    expected = quantized.mxfp4_values(blocks[:4], finite).to(dtype)
    assert same(codecs.decode_mxfp4(0, blocks[:4], finite, dtype=dtype), expected)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_packed_groups_are_decoded_row_by_row(dtype, zeros):
    whole, scales = torch.randint(0, 16, (20, 24)), torch.rand(20, 3).to(dtype)
    points = torch.randint(0, 16, (20, 3)) if zeros else torch.full((20, 3), 8)
    packed = quantized.words(points.T).T if zeros else None
    decoded = codecs.decode_packed(0, quantized.words(whole), scales, packed, bits=4)
    wide_points, wide_scales = (each.repeat_interleave(8, 1) for each in (points, scales))
    assert same(decoded, quantized.int4_values(whole, wide_points, wide_scales))
    words = quantized.words(whole[3:9])
    part = codecs.decode_packed(3, words, scales[3:9], packed, bits=4)
    assert same(part, decoded[3:9])


def test_zero_points_may_fill_one_word_of_a_column():
    points = torch.randint(0, 16, (8, 3))
    words, packed = quantized.words(torch.full((8, 24), 8)), quantized.words(points.T).T
    decoded = codecs.decode_packed(0, words, torch.ones(8, 3), packed, bits=4)
    assert torch.equal(decoded, (8.0 - points).repeat_interleave(8, 1))


def test_eight_bits_are_packed_four_to_a_word():
    whole, scales = torch.randint(0, 256, (5, 12)), torch.rand(5, 3).bfloat16()
    packed = whole.to(torch.uint8).contiguous().view(torch.int32)
    expected = (whole - 128).bfloat16() * scales.repeat_interleave(4, 1)
    assert same(codecs.decode_packed(0, packed, scales, bits=8), expected)


@pytest.mark.parametrize("zeros_less_one", [True, False])
def test_gptq_is_decoded_with_its_own_order_of_columns(zeros_less_one):
    whole, scales = torch.randint(0, 16, (24, 16)), torch.rand(3, 16).half()
    points, order = torch.randint(0, 16, (3, 16)), torch.randperm(24) // 8
    zeros = quantized.words(points) - 0x11111111 * zeros_less_one
    parts = [each.unsqueeze(0) for each in (quantized.words(whole.T).T, zeros, scales, order)]
    decoded = codecs.decode_gptq(0, *parts, bits=4, less_one=zeros_less_one)
    assert same(decoded, quantized.int4_values(whole, points[order], scales[order]).T)


@pytest.mark.parametrize("wholes", [1, 3])
@pytest.mark.parametrize("down", [True, False])
def test_experts_of_modelopt_are_decoded_and_encoded_along_their_inputs(tmp_path, down, wholes):
    """Of transposed weights and others, with one scale of scales for all experts or one for each."""
    shape, groups = ((3, 16, 20), (3, 2, 20)) if down else ((3, 20, 16), (3, 20, 2))
    scales = (torch.rand(groups) * 300 + 1).to(torch.float8_e4m3fn)
    tensors = {
        "experts.up_proj": torch.randint(0, 256, shape, dtype=torch.uint8),
        "experts.up_proj_weight_scale": scales,
        "experts.up_proj_weight_scale_2": torch.rand(wholes) * 1e-4 + 1e-4,
    }
    save_file(tensors, tmp_path / "model.safetensors")
    given = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": given}))
    form = read_quantization(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        decode_checkpoint(checkpoint, form)
        stored = checkpoint["experts.up_proj"]
        expected = quantized.experts_values(tensors, "experts.up_proj")
        assert stored.shape == expected.shape == ((3, 32, 20) if down else (3, 20, 32))
        assert same(stored.read().view(stored.shape), expected)
        wanted = torch.randn(expected.shape) * expected.std()
        found = {}
        lost, total = stored.encode(
            MemoryTensor(wanted), lambda part, start, new: found.setdefault(id(part), []).append(new)
        )
        new = [torch.cat(found[id(part.tensor)]).view(part.tensor.shape) for part in stored.parts]
    again = quantized.experts_values(dict(zip(tensors, new, strict=True)), "experts.up_proj")
    error = (again - wanted).double().square().sum()
    assert 0.005 < error / wanted.double().square().sum() < 0.02
    assert lost / total == pytest.approx(float(error / wanted.double().square().sum()), rel=1e-4)
