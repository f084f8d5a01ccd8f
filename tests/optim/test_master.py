"""The split of a master into weight and remainder loses nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from infinity.optim.layout import GRAIN_NUMEL, StateLayout
from infinity.optim.master import initial_state, join, master_of, split

EDGES = [
    0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00007FFF, 0x00008000, 0x00008001,
    0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x3F808000, 0xBF818000,
]  # fmt: skip


def floats(bits: list[int]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def is_nan(bits: int) -> bool:
    return bits & 0x7F800000 == 0x7F800000 and bits & 0x7FFFFF != 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1).filter(lambda bits: not is_nan(bits)), min_size=1, max_size=64))
def test_join_of_split_gives_every_bit_back(bits):
    master = floats(bits)
    assert same(join(*split(master)), master)


@pytest.mark.parametrize("bits", EDGES)
def test_edges_come_back_bitwise(bits):
    master = floats([bits])
    assert same(join(*split(master)), master)


def test_every_upper_half_with_every_kind_of_lower_half_comes_back():
    upper = torch.arange(2**16, dtype=torch.int64)[:, None] << 16
    bits = (upper | torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])).to(torch.int32).flatten()
    master = bits.view(torch.float32)
    master = master[~master.isnan()]
    assert same(join(*split(master)), master)


def test_the_weight_is_the_nearest_bfloat16_and_ties_go_away_from_zero():
    master = torch.randn(10_000) * torch.logspace(-30, 30, 10_000)
    ties = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert same(split(master)[0][~ties], master.to(torch.bfloat16)[~ties])
    tie = floats([0x3F808000, 0xBF808000])
    assert split(tie)[0].tolist() == [1.0078125, -1.0078125]


def test_a_master_that_rounds_to_infinity_stays_finite():
    largest = torch.tensor([torch.finfo(torch.float32).max])
    weight, high, low = split(largest)
    assert weight.isinf().all()
    assert same(join(weight, high, low), largest)


def test_nan_stays_nan():
    weight, high, low = split(torch.tensor([float("nan"), -float("nan")]))
    assert weight.isnan().all()
    assert join(weight, high, low).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_first_state_holds_the_master_and_zero_moments(dtype):
    layout, numel = StateLayout.of(dtype), 3 * GRAIN_NUMEL
    master, weight = torch.randn(numel), torch.empty(numel, dtype=dtype)
    buffer = torch.full((layout.state_nbytes(numel),), 0xA5, dtype=torch.uint8)
    initial_state(layout, master, weight, buffer)
    state = layout.views(buffer, numel)
    assert same(master_of(layout, weight, state), master)
    assert torch.allclose(weight.float(), master, rtol=2**-8)
    assert not state[-1].any()
    assert not state[-2].any()
