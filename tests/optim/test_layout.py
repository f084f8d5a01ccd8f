"""What lies on disk per element."""

import pytest
import torch

from infinity.core.nbytes import BLOCK_NBYTES
from infinity.optim.elementwise import ADAMW
from infinity.optim.rules import CHUNK_NUMEL
from infinity.partition.unit import SHARD_QUANTUM


@pytest.mark.parametrize(
    ("dtype", "weight", "state"), [(torch.bfloat16, 2, 10), (torch.float16, 2, 12), (torch.float32, 4, 8)]
)
def test_bytes_per_element_are_what_the_plan_counts(dtype, weight, state):
    layout, numel = ADAMW.layout(dtype), SHARD_QUANTUM
    assert (layout.weight_nbytes(numel), layout.state_nbytes(numel)) == (numel * weight, numel * state)
    assert (layout.bytes_per_element, layout.quantum) == (weight + state, SHARD_QUANTUM)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("numel", [0, SHARD_QUANTUM, 3 * SHARD_QUANTUM])
def test_views_cover_the_buffer_once_in_the_order_of_fields(dtype, numel):
    layout = ADAMW.layout(dtype)
    buffer = torch.zeros(layout.state_nbytes(numel), dtype=torch.uint8)
    at = buffer.data_ptr()
    for view, field in zip(layout.views(buffer, numel), layout.fields, strict=True):
        assert (view.dtype, view.shape) == (field.dtype, (numel,))
        assert numel == 0 or view.data_ptr() == at
        view.view(torch.uint8).add_(1)
        at += view.nbytes
    assert bool((buffer == 1).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_whole_grains_are_whole_blocks_on_disk(dtype):
    layout = ADAMW.layout(dtype)
    for numel in (SHARD_QUANTUM, CHUNK_NUMEL):
        assert layout.weight_nbytes(numel) % BLOCK_NBYTES == 0
        assert layout.state_nbytes(numel) % BLOCK_NBYTES == 0


def test_weights_of_another_dtype_are_refused():
    with pytest.raises(ValueError, match=r"allowed: torch\.bfloat16"):
        ADAMW.layout(torch.int64)
