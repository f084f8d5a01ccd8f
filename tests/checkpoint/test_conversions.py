"""A trace says where the elements of a tensor come from, and every range is read from the right places."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from infinity.checkpoint import load as conversions
from infinity.checkpoint.directory import MemoryTensor
from infinity.checkpoint.load import Trace, Traced
from tests.helpers.cases import examples


class Counting(MemoryTensor):
    """Counts the elements that are read from it."""

    def __init__(self, tensor):
        super().__init__(tensor)
        self.numel_read = 0

    def fill(self, start, out):
        self.numel_read += len(out)
        super().fill(start, out)


def traced(operation, *tensors):
    """What ``operation`` makes of tensors, and its parts by a trace; None: it is computed."""
    trace = Trace()
    stand_ins = [trace.stand_in(Counting(each), each.shape, each.dtype) for each in tensors]
    with trace:
        made = operation(*stand_ins)
    parts = trace.parts(made)
    assert trace.sources(made)
    return operation(*tensors), None if parts is None else Traced(made.shape, parts)


def assert_same(tensor, stand_in):
    assert stand_in.shape == tensor.shape
    flat = tensor.reshape(-1)
    n = len(flat)
    for start, stop in ((0, n), (n // 3, n), (n // 4, n - n // 5), (n, n)):
        out = torch.empty(stop - start)
        stand_in.fill(start, out)
        assert torch.equal(out, flat[start:stop])


def fused_experts(*matrices):
    """What transformers does to a mixture's experts: two stacks, joined along the second dimension."""
    half = len(matrices) // 2
    return torch.cat([torch.stack(matrices[:half], dim=0), torch.stack(matrices[half:], dim=0)], dim=1)


def test_experts_are_fused_into_two_parts_each_and_no_element_is_read_twice():
    tensor, stand_in = traced(fused_experts, *(torch.randn(6, 5) for _ in range(8)))
    assert len(stand_in.parts) == 8
    stand_in.fill(0, torch.empty(tensor.numel()))
    assert sum(part.source.numel_read for part in stand_in.parts) == tensor.numel()
    assert_same(tensor, stand_in)


@pytest.mark.parametrize("number", range(3))
def test_each_piece_of_a_cut_matrix_is_one_part(number):
    tensor, stand_in = traced(lambda x: torch.chunk(x, 3, dim=0)[number].contiguous(), torch.randn(12, 5))
    assert len(stand_in.parts) == 1
    assert_same(tensor, stand_in)


#: Operations on a tensor and on its stand-in, each chosen by a number.
OPERATIONS = [
    lambda x, k: torch.cat([x, x], dim=k % x.ndim),
    lambda x, k: torch.stack([x, x], dim=k % (x.ndim + 1)),
    lambda x, k: torch.stack([x, x], dim=-1 - k % (x.ndim + 1)),
    lambda x, k: torch.chunk(x, 1 + k % 3, dim=k % x.ndim)[-1].contiguous(),
    lambda x, k: torch.split(x, 1 + k % 2, dim=k % x.ndim)[0],
    lambda x, k: x.reshape(-1, x.shape[-1]),
    lambda x, k: x.reshape(x.numel()).view(x.shape),
    lambda x, k: x.unsqueeze(k % (x.ndim + 1)),
    lambda x, k: x.squeeze(k % x.ndim),
    lambda x, k: x[k % len(x)],
    lambda x, k: torch.transpose(x, 0, k % x.ndim).contiguous(),
    lambda x, k: torch.transpose(x, k % x.ndim, 0),
    lambda x, k: x.clone(),
]
steps = st.lists(st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 5)), max_size=5)


@examples(200)
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=3), steps=steps)
def test_any_chain_of_operations_gives_the_same_elements(shape, steps):
    def chain(x):
        for number, k in steps:
            if x.ndim and x.numel() <= 5000:
                x = OPERATIONS[number](x, k)
        return x

    tensor, stand_in = traced(chain, torch.randn(*shape))
    assume(stand_in is not None)
    assert_same(tensor, stand_in)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: torch.flip(x, (0,)),
        lambda x: x.t().contiguous(),
        lambda x: torch.stack([x, x], dim=-1),
        lambda x: x.double(),
        lambda x: x.view(torch.int32),
        lambda x: torch.cat([x, x.double()]),
        lambda x: (x + 0)[0],
        lambda x: x.clone().add_(1),
        lambda x: torch.zeros_like(x).copy_(x),
    ],
)
def test_what_is_computed_or_takes_elements_apart_has_no_parts(operation):
    assert traced(operation, torch.randn(3, 4))[1] is None


def test_more_parts_than_are_worth_their_memory_are_none(monkeypatch):
    monkeypatch.setattr(conversions, "MOST_PARTS", 10)
    tensor = torch.randn(11, 2, 3)
    assert len(traced(lambda x: torch.cat([x.reshape(11, 6)] * 5, dim=0), tensor)[1].parts) == 5
    assert traced(lambda x: torch.cat([x, x], dim=1), tensor)[1] is None
    assert traced(lambda x: x.transpose(0, 2), tensor)[1] is None
