"""Encoding is the way back of decoding: what was not changed has its old bits, anything else the nearest."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from infinity.checkpoint import codecs

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
E4M3 = E4M3[E4M3.isfinite()].unique()
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = torch.cat([-E2M1, E2M1]).unique()


def same(a: Tensor, b: Tensor) -> bool:
    """The same bits."""
    return a.dtype == b.dtype and a.shape == b.shape and bits(a).equal(bits(b))


def bits(values: Tensor) -> Tensor:
    return values.reshape(-1).view(torch.uint8)


@dataclass
class Matrix:
    """A matrix in some form, and which scale each of its values has.

    Attributes:
        parts: Its stored tensors; the scales are the one of number ``at``.
        of: The group of each value, like the values.
    """

    parts: list[Tensor]
    at: int
    of: Tensor
    decode: Any
    encode: Any
    numbers: Tensor | None = None  # that a value may be, times its scale; None: whole numbers
    symmetric: bool = True
    bits: int = 4

    @property
    def values(self) -> Tensor:
        return self.decode(*self.parts).float()

    def with_scales(self, scales: Tensor) -> list[Tensor]:
        return [*self.parts[: self.at], scales, *self.parts[self.at + 1 :]]


def fp8(rows: int, columns: int, block: tuple[int, int], dtype: torch.dtype) -> Matrix:
    down, across = -(-rows // block[0]), -(-columns // block[1])
    if dtype.itemsize == 1:
        scales = torch.randint(90, 140, (down, across), dtype=torch.uint8).view(dtype)
    else:
        scales = (torch.rand(down, across) * 10 ** (8 * torch.rand(down, across) - 4) + 1e-6).to(dtype)
    codes = torch.randint(0, 255, (rows, columns)).to(torch.uint8)
    codes[codes == 0x7F] = 0x80  # -0.0 for NaN
    of = torch.arange(rows)[:, None] // block[0] * across + torch.arange(columns) // block[1]
    return Matrix(
        [codes.view(torch.float8_e4m3fn), scales], 1, of,
        partial(codecs.decode_fp8, 0, block=block),
        partial(codecs.encode_fp8, block=block), E4M3,
    )  # fmt: skip


def mxfp4(experts: int, rows: int, groups: int) -> Matrix:
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), dtype=torch.uint8)
    scales = torch.randint(1, 240, (experts, rows, groups), dtype=torch.uint8)
    of = torch.arange(scales.numel()).view(experts, rows, groups, 1).expand(-1, -1, -1, 32)
    return Matrix(
        [blocks, scales], 1, of.flatten(2).transpose(1, 2),
        partial(codecs.decode_mxfp4, 0, dtype=torch.float32),
        codecs.encode_mxfp4, E2M1,
    )  # fmt: skip


def words_of(numbers: Tensor, bits: int) -> Tensor:
    """``(rows, n)`` in words of 32 bits, the first number of a word in its lowest bits."""
    several = 32 // bits
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % several))
    shifted = numbers.view(len(numbers), -1, several) << bits * torch.arange(several)
    return shifted.sum(-1).to(torch.int32)  # the upper half wraps around


def packed(rows: int, groups: int, size: int, bits: int, dtype: torch.dtype, zeros: bool) -> Matrix:
    most, columns = 1 << bits, groups * size
    whole = words_of(torch.randint(0, most, (rows, columns)), bits)
    scales = (torch.rand(rows, groups) * 0.1 + 1e-3).to(dtype)
    points = words_of(torch.randint(0, most, (groups, rows)), bits).T
    of = torch.arange(rows * groups).view(rows, groups, 1).expand(-1, -1, size).flatten(1)
    parts = [whole, scales, points] if zeros else [whole, scales]
    how = {"bits": bits, "spare": -columns % (32 // bits)}
    return Matrix(
        parts, 1, of, partial(codecs.decode_packed, 0, **how), partial(codecs.encode_packed, **how),
        symmetric=not zeros, bits=bits,
    )  # fmt: skip


def nvfp4(rows: int, groups: int, divides: bool) -> Matrix:
    codes = torch.randint(0, 256, (rows, groups * 8), dtype=torch.uint8)
    scales = torch.randint(1, 0x7F, (rows, groups), dtype=torch.uint8).view(torch.float8_e4m3fn)
    whole = 10 ** (8 * torch.rand(1, 1) - 4)
    of = torch.arange(rows * groups).view(rows, groups, 1).expand(-1, -1, 16).flatten(1)
    return Matrix(
        [codes, scales, whole], 1, of,
        partial(codecs.decode_e2m1, 0, divides=divides), partial(codecs.encode_e2m1, divides=divides), E2M1,
    )  # fmt: skip


def mxfp4_rows(rows: int, groups: int) -> Matrix:
    matrix = mxfp4(1, rows, groups)
    parts = [part[0].flatten(1) for part in matrix.parts]
    decode = partial(codecs.decode_e2m1, 0)
    return Matrix(parts, 1, matrix.of[0].T, decode, codecs.encode_e2m1, E2M1)


def int8(rows: int, groups: int, size: int, dtype: torch.dtype, zeros: bool, one: bool) -> Matrix:
    whole = torch.randint(-128, 128, (rows, groups * size), dtype=torch.int8)
    shape = (1, 1) if one else (rows, groups)
    scales = (torch.rand(shape) * 0.1 + 1e-3).to(dtype)
    points = torch.randint(-128, 128, shape, dtype=torch.int8)
    of = torch.arange(rows * groups).view(rows, groups, 1).expand(-1, -1, size).flatten(1)
    return Matrix(
        [whole, scales, points] if zeros else [whole, scales], 1, of * (not one),
        partial(codecs.decode_int8, 0), codecs.encode_int8, symmetric=not zeros, bits=8,
    )  # fmt: skip


def llm_int8(rows: int, columns: int) -> Matrix:
    whole = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    of = torch.arange(rows).unsqueeze(1).expand(-1, columns)
    decode = partial(codecs.decode_int8, 0, factor=codecs.LLM_INT8)
    return Matrix([whole, torch.rand(rows, 1) + 0.1], 1, of, decode, codecs.encode_llm_int8, bits=8)


def four_bit(blocks: int, numbers: tuple[float, ...], dtype: torch.dtype, nested: bool) -> Matrix:
    """Codes of the largest number are left out where scales are nested, so that none is beyond it."""
    codes = torch.randint(0, 256, (blocks, 16), dtype=torch.uint8)
    how: dict[str, Any] = {"numbers": numbers, "dtype": dtype}
    parts = [codes, torch.rand(blocks, 1) + 0.1]
    if nested:
        table = torch.linspace(-1, 1, 256)
        how |= {"of_sizes": tuple(table.tolist()), "together": 3, "offset": 1.5}
        sizes = torch.randint(0, 256, (blocks, 1), dtype=torch.uint8)
        parts = [codes, sizes, torch.rand(-(-blocks // 3), 1) + 0.1]
    of = torch.arange(blocks).unsqueeze(1).expand(-1, 32)
    decode, encode = partial(codecs.decode_4bit, 0, **how), partial(codecs.encode_4bit, **how)
    return Matrix(parts, 1, of, decode, encode, torch.tensor(numbers).unique())


SIZES = st.integers(1, 20)
TABLES = st.just(codecs.NF4)
BITS = st.sampled_from([4, 8])
SCALES = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.float8_e8m0fnu])
ANY = st.one_of(
    st.builds(fp8, SIZES, SIZES, st.tuples(st.integers(1, 9), st.integers(1, 9)), SCALES),
    st.builds(mxfp4, st.integers(1, 3), SIZES, st.integers(1, 3)),
    st.builds(
        packed, SIZES, st.integers(1, 3), st.integers(1, 9), BITS,
        st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.booleans(),
    ),
    st.builds(nvfp4, SIZES, st.integers(1, 3), st.booleans()),
    st.builds(mxfp4_rows, SIZES, st.integers(1, 3)),
    st.builds(
        int8, SIZES, st.integers(1, 3), st.integers(1, 9),
        st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.booleans(), st.just(False),
    ),
    st.builds(int8, SIZES, st.just(1), SIZES, st.just(torch.float32), st.booleans(), st.just(True)),
    st.builds(llm_int8, SIZES, SIZES),
    st.builds(four_bit, SIZES, TABLES, st.just(torch.float32), st.just(False)),
)  # fmt: skip


@st.composite
def matrices(draw: Any) -> Matrix:
    torch.manual_seed(draw(st.integers(0, 10**6)))
    matrix: Matrix = draw(ANY)
    return matrix


NESTED = st.builds(four_bit, SIZES, TABLES, st.sampled_from([torch.float32, torch.bfloat16]), st.just(True))


@given(st.one_of(matrices(), NESTED))
def test_what_was_decoded_and_not_changed_is_encoded_as_it_was(matrix):
    for part, again in zip(matrix.parts, matrix.encode(matrix.values, *matrix.parts), strict=True):
        assert same(again, part)


def trained(matrix: Matrix, size: float) -> Tensor:
    """Values of this size with zeros of both signs among them, or small changes of those that there are."""
    values = matrix.values
    new = values * (1 + torch.randn(values.shape) / 100) if not size else torch.randn(values.shape) * size
    new = new.contiguous()
    new.view(-1)[torch.rand(new.numel()) < 0.1] = 0.0
    new = new.contiguous()
    new.view(-1)[torch.rand(new.numel()) < 0.1] = -0.0
    return new


def per_group(matrix: Matrix, values: Tensor, reduce: str) -> Tensor:
    groups = matrix.parts[matrix.at].numel()
    found = torch.zeros(groups, dtype=values.dtype)
    return found.scatter_reduce(0, matrix.of.flatten(), values.flatten(), reduce)


def scale_of(matrix: Matrix, parts: list[Tensor]) -> Tensor:
    scales = parts[matrix.at]
    if scales.dtype == torch.uint8:
        return (scales.double() - 127).exp2().flatten()
    if len(parts) == 3 and matrix.numbers is E2M1:  # divided by or multiplied with one more
        whole = matrix.encode.keywords["divides"]
        return (scales.float() / parts[2] if whole else scales.float() * parts[2]).double().flatten()
    return scales.double().flatten()


@given(matrices(), st.sampled_from([0, 1e-30, 1e-3, 1.0, 1e4]), st.sampled_from(["had", "zero", "nan"]))
def test_what_was_changed_becomes_the_nearest_number_of_its_scale(matrix, size, before):
    """Whatever the scales were; and no block is further from its values than by the format's own rule."""
    new, parts = trained(matrix, size), matrix.parts
    scales = parts[matrix.at]
    if scales.is_floating_point() and scales.itemsize > 1 and before != "had":
        parts = matrix.with_scales(torch.full_like(scales, 0 if before == "zero" else math.nan))
    encoded = matrix.encode(new, *parts)
    back = matrix.decode(*encoded).double()
    assert back.isfinite().all()
    found = scale_of(matrix, encoded)
    off = per_group(matrix, (back - new.double()).abs(), "amax")
    if matrix.numbers is not None:
        found[found == 0] = 1.0  # kept where all values are 0
        steps = new.double().flatten() / found[matrix.of.flatten()]
        nearest = (steps[:, None] - matrix.numbers.double()).abs().amin(1)
        taken = (back.double().flatten() / found[matrix.of.flatten()] - steps).abs()
        assert (taken <= nearest * (1 + 1e-5) + 1e-6 * steps.abs().clamp(max=1e3)).all()
    elif before != "had":  # by its own rule: half a step, beside what rounds a scale and a product
        low, high = (per_group(matrix, sign * new, "amax").double() for sign in (-1, 1))
        span = 2 * torch.maximum(low, high) if matrix.symmetric else low + high
        step = span / (2**matrix.bits - 1)
        rounding = torch.finfo(scales.dtype).eps * (low + high) * 2**matrix.bits / 8
        tiny = 2.0**-24 * 2**matrix.bits if scales.dtype == torch.float16 else 1e-38
        assert (off <= 0.5 * step * (1 + 2 * matrix.symmetric) + rounding + tiny).all()


@given(NESTED, st.sampled_from([0.1, 1.0, 1e3]), st.integers(0, 10**6))
def test_largest_sizes_that_are_quantized_themselves_cost_no_more_than_twice_the_error(matrix, size, seed):
    """But where all are far below the offset that the file keeps, 1.5 here: one step is 1 % of it."""
    new = torch.randn(matrix.values.shape, generator=torch.Generator().manual_seed(seed)) * size
    encoded = matrix.encode(new, *matrix.parts)
    back, exact = matrix.decode(*encoded).float(), torch.zeros(len(new), 1)
    assert [part.shape for part in encoded] == [part.shape for part in matrix.parts]
    numbers = matrix.encode.keywords["numbers"]
    plain = codecs.encode_4bit(new, matrix.parts[0], exact, numbers=numbers, dtype=torch.float32)
    best = codecs.decode_4bit(0, *plain, numbers=numbers, dtype=torch.float32)
    assert (back - new).norm() <= 2 * (best - new).norm() + 0.02 * new.norm()


def test_e4m3_and_e2m1_are_rounded_as_torch_and_the_standard_round():
    values = torch.cat(
        [E4M3, (E4M3[1:] + E4M3[:-1]) / 2, torch.randn(9999) * 2.0 ** torch.randint(-14, 7, (9999,))]
    )
    values = torch.cat([values, values.nextafter(values + 1), torch.tensor([-0.0])]).clamp(-448, 448)
    beside = torch.stack([values, torch.full_like(values, 448.0)], dim=1)  # so that each scale is 1
    no = torch.full(beside.shape, torch.nan).to(torch.float8_e4m3fn)
    found, scales = codecs.encode_fp8(beside, no, torch.ones(len(values), 1), block=(1, 2))
    assert scales.eq(1).all()
    assert same(found[:, 0], values.to(torch.float8_e4m3fn))
    sizes = torch.tensor([0, 0.25, 0.26, 0.5, 0.75, 1, 1.25, 1.26, 1.75, 2, 2.5, 2.6, 3.5, 4, 5, 5.1, 6])
    codes = torch.tensor([0, 0, 1, 1, 2, 2, 2, 3, 4, 4, 4, 5, 6, 6, 6, 7, 7], dtype=torch.uint8)
    groups = torch.nn.functional.pad(torch.stack([sizes, -sizes]), (0, 32 - len(sizes)))
    no, tiny = torch.full((1, 2, 1, 16), 0x77, dtype=torch.uint8), torch.ones(1, 2, 1, dtype=torch.uint8)
    blocks, scales = codecs.encode_mxfp4(groups.T.unsqueeze(0), no, tiny)
    assert scales.eq(127).all()  # of 1, for the largest size is the largest number
    found = torch.stack((blocks & 15, blocks >> 4), -1).view(2, 32)[:, : len(sizes)]
    assert same(found, torch.stack([codes, codes + 8]))


def test_formats_take_their_own_scales_where_the_old_ones_are_worse():
    values = torch.tensor([[3.0, -448.0, 896.0, 1.0]])
    had, zero = torch.full((1, 2), 1e-3), torch.zeros(1, 4).to(torch.float8_e4m3fn)
    codes, scales = codecs.encode_fp8(values, zero, had, block=(1, 2))
    assert scales.tolist() == [[1.0, 2.0]]
    assert codes.float().tolist() == [[3.0, -448.0, 448.0, 0.5]]
    values[0, 0] = 449.0
    assert codecs.encode_fp8(values, zero, had, block=(1, 2), power_of_two=True)[1].tolist() == [[2.0, 2.0]]

    values = torch.zeros(1, 32, 1)
    values[0, :5, 0] = torch.tensor(
        [7.0, -0.25, 0.75, 2.5, -3.5]
    )  # the largest is too large, the others ties
    no = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
    blocks, scales = codecs.encode_mxfp4(values, no, no[..., 0])
    assert scales.item() == 127
    decoded = codecs.decode_mxfp4(0, blocks, scales)[0, :5, 0]
    assert decoded.tolist() == [6.0, 0.0, 1.0, 2.0, -4.0]
    assert decoded[1].signbit()

    values = torch.tensor([[-7.5, 0.0, 3.0, 7.5]])
    for zeros in (None, torch.full((1, 1), 8, dtype=torch.int32)):  # the points are 0
        words, had = torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 1), 1e-5)
        packed, scales, *points = codecs.encode_packed(values, words, had, zeros, bits=4, spare=4)
        assert scales.item() == 1.0
        assert [point.item() for point in points] == ([] if zeros is None else [8])
        decoded = codecs.decode_packed(0, packed, scales, bits=4, spare=4)
        assert decoded.tolist() == [[-8.0, 0.0, 3.0, 7.0]]


def test_a_value_beyond_the_largest_number_is_cut_where_the_others_need_the_old_scale():
    values, before = torch.full((512, 512), 1.125), torch.zeros(512, 512).to(torch.float8_e4m3fn)
    values[7, 7] = -470.0
    codes, scales = codecs.encode_fp8(values, before, torch.ones(1, 1), block=(512, 512))
    assert scales.item() == 1.0
    assert codes.float()[7, 6:8].tolist() == [1.125, -448.0]


def test_a_scale_that_serves_as_well_as_another_one_is_kept():
    """As where a block is zero, or its largest value shrank to another number of the old scale."""
    values, before = torch.tensor([[0.0, 0.0, 0.3, 0.1]]), torch.ones(1, 4).to(torch.float8_e4m3fn)
    codes, scales = codecs.encode_fp8(values, before, torch.full((1, 2), 0.1), block=(1, 2))
    assert scales.eq(0.1).all()
    assert codes.float().tolist() == [[0.0, 0.0, 3.0, 1.0]]


@pytest.mark.parametrize("numel", [1, 2**18 - 1, 2**18 + 5])
def test_large_matrices_are_encoded_piece_by_piece_with_the_same_result(numel):
    matrix = mxfp4(1, 8, numel // 256 + 1)
    new = matrix.values + torch.randn(matrix.values.shape) * 1e-3
    rows = (torch.split(each, 1, dim) for each, dim in ((new, 2), *((part, 1) for part in matrix.parts)))
    alone = zip(*(matrix.encode(*row) for row in zip(*rows, strict=True)), strict=True)
    for a, b in zip(matrix.encode(new, *matrix.parts), map(list, alone), strict=True):
        assert same(a, torch.cat(b, dim=1))
