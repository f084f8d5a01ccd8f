"""Decoders compiled to one kernel have the bits of the eager operators, or are not used."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from infinity.checkpoint import codecs
from infinity.checkpoint import quantized as fused
from infinity.checkpoint.directory import Checkpoint
from infinity.checkpoint.forms import decode_checkpoint, read_quantization
from infinity.checkpoint.quantized import Decoded
from infinity.device import machine
from tests.helpers import quantized

CPU = torch.device("cpu")
SCALES = (torch.rand(4, 3) + 0.1).bfloat16()


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernels of other tests; and Triton, which the CPU's compiler does not need."""
    monkeypatch.setattr(fused, "_kernels", {})
    monkeypatch.setattr(fused, "_told", set())
    monkeypatch.setattr(fused, "why_not", lambda: "")
    yield
    for key in [key for key in machine._compiling if isinstance(key, tuple) and key[-1] == CPU]:
        machine._compiling.pop(key).join()


def int8() -> list[Tensor]:
    return [torch.randint(-128, 128, (4, 12), dtype=torch.int8), SCALES]


def decode(
    parts: list[Tensor], how: Callable[..., Tensor] = codecs.decode_int8, said: list[str] | None = None
) -> Tensor | None:
    """Values of a kernel; None: there is none."""
    expected = how(0, *parts).reshape(-1)
    out = torch.zeros_like(expected)
    meta = [torch.empty_like(each, device="meta") for each in (*parts, out)]
    fused.prepare(how, meta[:-1], meta[-1], CPU, print if said is None else said.append)
    return out if fused.fill(how, 0, parts, out, lambda: expected[:24]) else None


def as_compiled(change: Callable[[Tensor], object]) -> Callable[..., Any]:
    """In place of ``torch.compile``: the function itself, whose result ``change`` makes another one."""

    def compiled(fill: Callable[..., None], **options: Any) -> Callable[..., None]:
        assert options["dynamic"]

        def run(out: Tensor, *arguments: Any, **tables: Tensor) -> None:
            fill(out, *arguments, **tables)
            change(out)

        return run

    return compiled


def test_a_kernel_with_the_same_bits_is_used_and_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", as_compiled(lambda out: None))
    parts, said = int8(), list[str]()
    assert torch.equal(decode(parts, said=said), codecs.decode_int8(0, *parts).reshape(-1))
    [kernel] = fused._kernels.values()
    out = torch.empty(48, dtype=torch.bfloat16)
    assert fused.fill(codecs.decode_int8, 0, parts, out, lambda: pytest.fail("it was compared before"))
    more = [each.repeat(3, 1) for each in parts]  # of another size
    assert torch.equal(decode(more), codecs.decode_int8(0, *more).reshape(-1))
    assert [*fused._kernels.values()] == [kernel]
    assert said == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda out: out[:1].neg_(), "decode_int8 gives other bits when compiled"),
        (lambda out: 1 / 0, "division by zero"),
    ],
)
def test_the_eager_operators_go_on_where_bits_differ_or_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], object], why: str
) -> None:
    monkeypatch.setattr(torch, "compile", as_compiled(change))
    said = list[str]()
    assert decode(int8(), said=said) is None
    assert decode([each.float() if each is SCALES else each for each in int8()], said=said) is None
    assert said == [f"weights are decoded on the accelerator by several kernels, not one: {why}"]


def test_without_triton_nothing_is_compiled_and_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "why_not", lambda: "Triton is not installed")
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    said = list[str]()
    assert decode(int8(), said=said) is None
    assert [line.rpartition(": ")[2] for line in said] == ["Triton is not installed"]


def test_a_process_compiles_few_kernels_and_none_where_it_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", as_compiled(lambda out: None))
    monkeypatch.setattr(fused, "_MOST_KERNELS", 1)
    assert decode(int8()) is not None
    assert decode([torch.randint(-128, 128, (1, 12), dtype=torch.int8), SCALES[:1]]) is None


def test_numbers_of_a_matrix_are_arguments_and_no_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", as_compiled(lambda out: None))
    for offset in (0.25, 0.5):
        how = partial(
            codecs.decode_4bit, numbers=codecs.NF4, dtype=torch.bfloat16, together=2, offset=offset,
            of_sizes=tuple(torch.linspace(-1, 1, 256).tolist()),
        )  # fmt: skip
        sizes = torch.randint(0, 256, (4, 1), dtype=torch.uint8)
        parts = [torch.randint(0, 256, (4, 32), dtype=torch.uint8), sizes, torch.rand(2, 1)]
        assert decode(parts, how) is not None
    assert len(fused._kernels) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("kind", quantized.KINDS)
def test_each_format_is_one_kernel_with_the_bits_of_the_eager_operators(tmp_path: Path, kind: str) -> None:
    """By the compiler's own C++ for the CPU, which fuses as its Triton does."""
    if not shutil.which("g++"):
        pytest.skip("no C++ compiler (install g++)")
    from torch._inductor import metrics

    quantized.write(kind, tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        form = read_quantization(tmp_path)
        assert form is not None
        decode_checkpoint(checkpoint, form, torch.bfloat16)
        found = [tensor for tensor in checkpoint.values() if isinstance(tensor, Decoded)]
        for tensor in found:
            metrics.reset()
            before, said = len(fused._kernels), list[str]()
            tensor.compile_ahead(CPU, said.append)
            expected = torch.empty(tensor.shape.numel(), dtype=tensor.dtype)
            tensor.fill(0, expected)
            out, parts = torch.empty_like(expected), tensor._read(0, len(expected) // tensor.numel)
            assert fused.fill(tensor.decode, 0, parts, out, lambda values=expected: values), said
            assert torch.equal(out.view(torch.int16), expected.view(torch.int16))
            assert metrics.generated_kernel_count == len(fused._kernels) - before
    assert 0 < len(fused._kernels) < 8
