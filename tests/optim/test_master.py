"""The split of a master into weight and remainder loses nothing, and equal sums have equal parts."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from infinity.optim.elementwise import ADAMW
from infinity.optim.state import KAHAN, master_of, store_master
from tests.helpers.cases import examples

EDGES = [
    0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00007FFF, 0x00008000, 0x00008001,
    0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x3F808000, 0xBF818000,
]  # fmt: skip
BF16 = ADAMW.layout(torch.bfloat16)


def floats(bits: list[int]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def is_nan(bits: int) -> bool:
    return bits & 0x7F800000 == 0x7F800000 and bits & 0x7FFFFF != 0


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.empty(len(master), dtype=torch.bfloat16)
    remainder = torch.empty(len(master), dtype=torch.int16)
    store_master(BF16, master, weight, (remainder,))
    return weight, remainder


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    return master_of(BF16, weight, (remainder,))


@examples(100)
@given(st.lists(st.integers(0, 2**32 - 1).filter(lambda bits: not is_nan(bits)), min_size=1, max_size=64))
def test_join_of_split_gives_every_bit_back(bits):
    master = floats([*bits, *EDGES])
    assert same(join(*split(master)), master)


def test_every_upper_half_with_every_kind_of_lower_half_is_split_as_the_formula_says():
    upper = np.arange(2**16, dtype=np.int64)[:, None] << 16
    bits = (upper | [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]).astype(np.uint32).flatten()
    bits = bits[~np.isnan(bits.view(np.float32))]
    weight, remainder = split(torch.from_numpy(bits.view(np.float32)))
    rounded = (bits + np.uint32(0x8000)) >> 16
    assert (weight.view(torch.int16).numpy() == rounded.astype(np.uint16).view(np.int16)).all()
    assert (remainder.numpy() == bits.astype(np.int64) - (rounded.astype(np.int64) << 16)).all()
    assert same(join(weight, remainder), torch.from_numpy(bits.view(np.float32)))


def test_the_weight_is_the_nearest_bfloat16_and_ties_go_away_from_zero():
    master = torch.randn(10_000) * torch.logspace(-30, 30, 10_000)
    ties = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert same(split(master)[0][~ties], master.to(torch.bfloat16)[~ties])
    tie = floats([0x3F808000, 0xBF808000])
    assert split(tie)[0].tolist() == [1.0078125, -1.0078125]


def test_a_master_that_rounds_to_infinity_stays_finite():
    largest = torch.tensor([torch.finfo(torch.float32).max])
    weight, remainder = split(largest)
    assert weight.isinf().all()
    assert same(join(weight, remainder), largest)


def test_nan_stays_nan():
    weight, remainder = split(torch.tensor([float("nan"), -float("nan")]))
    assert weight.isnan().all()
    assert join(weight, remainder).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_stored_master_is_read_back(dtype):
    layout, master, weight = ADAMW.layout(dtype), torch.randn(6001), torch.empty(6001, dtype=dtype)
    state = tuple(torch.empty(6001, dtype=field.dtype) for field in layout.fields)
    store_master(layout, master, weight, state)
    assert same(master_of(layout, weight, state), master)
    assert torch.allclose(weight.float(), master, rtol=2**-8)


@examples(100)
@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64),
    st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_what_rounding_took_is_found_again_from_the_sum_of_both(bits, dtype):
    master, layout = floats([*bits, *EDGES]), ADAMW.with_master(KAHAN).layout(dtype)
    first, again = (
        (torch.empty(len(master), dtype=dtype), torch.empty(len(master), dtype=dtype)) for _ in range(2)
    )
    store_master(layout, master, first[0], first[1:])
    total = master_of(layout, first[0], first[1:])
    store_master(layout, total, again[0], again[1:])
    for one, two in zip(first, again, strict=True):  # but for the sign of zero
        assert torch.equal(one.float().nan_to_num(nan=7.0), two.float().nan_to_num(nan=7.0))
    assert torch.equal(first[0].isnan(), master.isnan())
    assert torch.equal(total.isinf(), first[0].isinf())  # no NaN beyond the range
    assert bool(total[master.to(dtype).isinf()].isinf().all())
