"""Codes that an accelerator makes of saved storages are the CPU's, bit for bit."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from infinity.activations.codecs import CODECS, Code
from infinity.core.config import LOSSY_CODECS
from tests.accelerator.process import simulated
from tests.activations.test_codecs import DTYPES, patterns

pytest.importorskip("tests.accelerator.harness")

KINDS = ("any", "two", "zeros", "floats", "normal")


def some_bytes(kind: str, dtype: torch.dtype, nbytes: int) -> Tensor:
    if kind != "normal":
        return patterns(3, kind, nbytes)
    x = torch.randn(nbytes // 2, generator=torch.Generator().manual_seed(4)) * 10
    x[:300], x[300:600] = 0.0, -0.0
    x[600:900] *= 1e-33
    x[1024:1280] = 3.3  # a group of one value
    return x.to(dtype).view(torch.uint8)[:nbytes].clone()


def on_device(code: Code, piece: Tensor, start: int) -> tuple[Any, Tensor]:
    """The code that the device makes of bytes ``start`` into a storage, and its inverse of that."""
    whole = torch.zeros(start + len(piece), dtype=torch.uint8).to("sim")
    whole[start:] = piece.to("sim")
    out = torch.full_like(piece, 0xA5).pin_memory()
    nbytes = code.put(whole[start:], out)
    torch.accelerator.synchronize()
    back = torch.full_like(piece, 0x5A).to("sim")
    code.get(out[:nbytes], back)
    return out[:nbytes].clone(), back.cpu()


@simulated
def test_a_device_makes_the_codes_of_the_cpu_and_each_reads_those_of_the_other():
    made = 0
    for name, dtype, kind in itertools.product(CODECS, DTYPES, KINDS):
        if not CODECS[name](dtype) or (kind == "normal" and not dtype.is_floating_point):
            continue
        piece, start = some_bytes(kind, dtype, 12_345 // 8 * 8), 4096
        code, out = Code(name, dtype, 11), torch.full((len(piece),), 0xA5, dtype=torch.uint8)
        whole = torch.cat([torch.zeros(start, dtype=torch.uint8), piece])
        there = out[: code.put(whole[start:], out)]
        coded, back = on_device(code, piece, start)
        assert len(coded) == len(there), (name, dtype, kind)
        if name in LOSSY_CODECS:
            assert torch.equal(coded, there), (name, dtype, kind)
        decoded, crossed = (torch.full_like(piece, 0x5A) for _ in range(2))
        code.get(there, decoded)
        code.get(coded, crossed)
        assert torch.equal(back, decoded), (name, dtype, kind)
        assert torch.equal(crossed, decoded), (name, dtype, kind)
        made += len(there) < len(piece)
    assert made > 20
