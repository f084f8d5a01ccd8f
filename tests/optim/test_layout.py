"""What lies on disk per element."""

import pytest
import torch

from infinity.core.nbytes import BLOCK_NBYTES
from infinity.optim.layout import CHUNK_NUMEL, GRAIN_NUMEL
from infinity.optim.rules import ADAMW


@pytest.mark.parametrize(
    ("dtype", "weight", "state"), [(torch.bfloat16, 2, 10), (torch.float16, 2, 12), (torch.float32, 4, 8)]
)
def test_bytes_per_element_are_what_the_plan_counts(dtype, weight, state):
    layout = ADAMW.layout(dtype)
    assert (layout.weight_nbytes(7), layout.state_nbytes(7)) == (7 * weight, 7 * state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("numel", [0, GRAIN_NUMEL, 3 * GRAIN_NUMEL])
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
    for numel in (GRAIN_NUMEL, CHUNK_NUMEL):
        assert layout.weight_nbytes(numel) % BLOCK_NBYTES == 0
        assert layout.state_nbytes(numel) % BLOCK_NBYTES == 0


def test_what_does_not_fit_is_refused():
    layout = ADAMW.layout(torch.bfloat16)
    with pytest.raises(ValueError, match="20480 bytes"):
        layout.views(torch.zeros(100, dtype=torch.uint8), GRAIN_NUMEL)
    with pytest.raises(ValueError, match="multiple of 2048"):
        layout.views(torch.zeros(50, dtype=torch.uint8), 5)
    with pytest.raises(ValueError, match=r"allowed: torch\.bfloat16"):
        ADAMW.layout(torch.int64)
