"""Stand-ins become what tensors become, and every range of them is read from the right places."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.checkpoint import conversions
from infinity.checkpoint.conversions import Traced, UntraceableError
from infinity.checkpoint.directory import MemoryTensor
from tests.helpers.cases import examples


class Counting(MemoryTensor):
    """Counts the elements that are read from it."""

    def __init__(self, tensor):
        super().__init__(tensor)
        self.numel_read = 0

    def fill(self, start, out):
        self.numel_read += len(out)
        super().fill(start, out)


def pair(*shape):
    """A tensor and its stand-in."""
    tensor = torch.randn(*shape)
    return tensor, Traced.whole(Counting(tensor))


def assert_same(tensor, stand_in):
    assert stand_in.shape == tensor.shape
    flat = tensor.reshape(-1)
    n = len(flat)
    for start, stop in ((0, n), (n // 3, n), (n // 4, n - n // 5), (n, n)):
        out = torch.empty(stop - start)
        stand_in.fill(start, out)
        assert torch.equal(out, flat[start:stop])


def fused_experts(gates, ups):
    """What transformers does to a mixture's experts: two stacks, joined along the second dimension."""
    return torch.cat([torch.stack(gates, dim=0), torch.stack(ups, dim=0)], dim=1)


def test_experts_are_fused_into_two_parts_each_and_no_element_is_read_twice():
    gates, ups = [pair(6, 5) for _ in range(4)], [pair(6, 5) for _ in range(4)]
    tensor = fused_experts([each for each, _ in gates], [each for each, _ in ups])
    stand_in = fused_experts([each for _, each in gates], [each for _, each in ups])
    assert len(stand_in.parts) == 8
    stand_in.fill(0, torch.empty(tensor.numel()))
    assert sum(part.source.numel_read for part in stand_in.parts) == tensor.numel()
    assert_same(tensor, stand_in)


def test_each_piece_of_a_cut_matrix_is_one_part():
    tensor, stand_in = pair(12, 5)
    parts = torch.chunk(stand_in, 3, dim=0)
    for whole, part in zip(torch.chunk(tensor, 3, dim=0), parts, strict=True):
        assert len(part.parts) == 1
        assert_same(whole, part.contiguous())


#: Operations on a tensor and on its stand-in, each chosen by a number.
OPERATIONS = [
    lambda x, k: torch.cat([x, x], dim=k % x.ndim),
    lambda x, k: torch.stack([x, x], dim=k % (x.ndim + 1)),
    lambda x, k: torch.chunk(x, 1 + k % 3, dim=k % x.ndim)[-1].contiguous(),
    lambda x, k: torch.split(x, 1 + k % 2, dim=k % x.ndim)[0].contiguous(),
    lambda x, k: x.reshape(-1, x.shape[-1]),
    lambda x, k: x.reshape(x.numel()).view(x.shape),
    lambda x, k: x.unsqueeze(k % (x.ndim + 1)),
    lambda x, k: x.squeeze(k % x.ndim),
    lambda x, k: torch.transpose(x, 0, k % max(1, x.ndim - 1)).contiguous(),
    lambda x, k: torch.transpose(x, k % max(1, x.ndim - 1), 0).contiguous(),
]
steps = st.lists(st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 5)), max_size=5)


@examples(200)
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=3), steps=steps)
def test_any_chain_of_operations_gives_the_same_elements(shape, steps):
    tensor, stand_in = pair(*shape)
    for number, k in steps:
        if not tensor.ndim or tensor.numel() > 5000:
            break
        tensor, stand_in = OPERATIONS[number](tensor, k), OPERATIONS[number](stand_in, k)
    assert_same(tensor, stand_in)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: torch.transpose(x, 0, 1),
        lambda x: x.transpose(-1, -2),
        lambda x: torch.flip(x, (0,)),
        lambda x: x[0],
        lambda x: x.float(),
    ],
)
def test_what_takes_elements_apart_is_refused(operation):
    with pytest.raises(UntraceableError):
        operation(pair(3, 4)[1])


def test_too_many_parts_are_refused(monkeypatch):
    monkeypatch.setattr(conversions, "MOST_PARTS", 10)
    _, stand_in = pair(11, 2, 3)
    assert len(torch.cat([stand_in.reshape(11, 6)] * 5, dim=0).parts) == 5
    with pytest.raises(UntraceableError):
        torch.cat([stand_in, stand_in], dim=1)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: torch.cat([x, x.reshape(4, 3)], dim=0),
        lambda x: x.reshape(5, 5),
        lambda x: torch.split(x, [1, 1], dim=0),
    ],
)
def test_shapes_that_do_not_fit_are_refused_as_torch_refuses_them(operation):
    tensor, stand_in = pair(3, 4)
    with pytest.raises(RuntimeError):
        operation(tensor)
    with pytest.raises(ValueError):
        operation(stand_in)
