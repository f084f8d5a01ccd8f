"""Quantized weights on a real accelerator: one kernel for each format, with the bits of the CPU."""

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from infinity.checkpoint import quantized as fused
from infinity.checkpoint.directory import Checkpoint
from infinity.checkpoint.forms import decode_checkpoint, read_quantization
from infinity.checkpoint.quantized import Decoded
from tests.accelerator.harness import here
from tests.helpers import quantized

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", quantized.KINDS)
def test_each_format_is_decoded_by_one_kernel_to_the_bits_of_the_cpu(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    if why := fused.why_not():
        pytest.skip(why)
    quantized.write(kind, tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        form = read_quantization(tmp_path)
        assert form is not None
        decode_checkpoint(checkpoint, form, dtype)
        content = (tmp_path / "model.safetensors").read_bytes()
        stored = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(here())

        def view(file: int, offset: int, nbytes: int) -> torch.Tensor:
            return stored[offset : offset + nbytes].clone()  # at a place that needs no copy

        said = list[str]()
        for tensor in [each for each in checkpoint.values() if isinstance(each, Decoded)]:
            expected = torch.empty(tensor.shape.numel(), dtype=dtype)
            tensor.fill(0, expected)
            tensor.compile_ahead(here(), said.append)
            out = torch.empty_like(expected, device=here())
            tensor.fill(0, out, view)  # compares
            assert torch.equal(out.cpu(), expected)
            parts = tensor._read(0, len(out) // tensor.numel, view)
            with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.XPU]) as kernels:
                assert fused.fill(tensor.decode, 0, parts, out.zero_(), pytest.fail), said
                torch.accelerator.synchronize()
            assert torch.equal(out.cpu(), expected)
            names = [each.name for each in kernels.events() if "triton" in each.name]
            assert len(names) == 1, names
        assert said == []
