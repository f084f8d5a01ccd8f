"""Interval arithmetic of resharding, by property."""

import functools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from infinity.core.nbytes import Box, boxes, flat_offset, overlap, shard_ranges
from tests.helpers.cases import examples

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def _ranges(draw):
    shape = draw(SHAPES)
    numel = math.prod(shape)
    start = draw(st.integers(0, numel))
    return shape, start, draw(st.integers(start, numel))


def _part(tensor, box):
    return tensor[tuple(slice(start, stop) for start, stop in zip(box.offsets, box.stops, strict=True))]


@given(_ranges(), st.integers(1, 30))
def test_boxes_hold_the_elements_of_the_range_in_order(given, most):
    shape, start, stop = given
    tensor = np.arange(math.prod(shape)).reshape(shape)
    found = [np.arange(0)]
    for box in boxes(shape, start, stop, most):
        part = _part(tensor, box)
        assert 0 < part.size == box.numel <= most
        found.append(part.reshape(-1))
    assert np.array_equal(np.concatenate(found), np.arange(start, stop))


@given(_ranges())
def test_no_other_cut_needs_fewer_boxes(given):
    shape, start, stop = given

    def is_box(low, high):
        """Whether the elements are all those between their least and greatest indices."""
        indices = np.stack(np.unravel_index(np.arange(low, high), shape)) if shape else np.zeros((0, 1), int)
        return np.prod(np.ptp(indices, axis=1) + 1) == high - low

    @functools.cache
    def fewest(low):
        if low == stop:
            return 0
        return 1 + min(fewest(high) for high in range(low + 1, stop + 1) if is_box(low, high))

    assert len(list(boxes(shape, start, stop))) == fewest(start) <= max(1, 2 * len(shape) - 1)


@given(_ranges(), st.data())
def test_what_a_range_has_of_any_box_is_contiguous_in_the_box(given, data):
    """So that one read brings it, however the tensor was cut."""
    shape, start, stop = given
    offsets = [data.draw(st.integers(0, size - 1)) for size in shape]
    sizes = [data.draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True)]
    stored = Box(tuple(offsets), tuple(sizes))
    tensor = np.arange(math.prod(shape)).reshape(shape)
    of_box, found = _part(tensor, stored).reshape(-1), []
    for box in boxes(shape, start, stop):
        if common := overlap(box, stored):
            inside = [o - s for o, s in zip(common.offsets, stored.offsets, strict=True)]
            first = flat_offset(inside, stored.sizes)
            assert np.array_equal(of_box[first : first + common.numel], _part(tensor, common).reshape(-1))
            found += of_box[first : first + common.numel].tolist()
    assert found == [each for each in of_box.tolist() if start <= each < stop]


def test_a_tensor_without_elements_has_no_boxes():
    assert list(boxes((3, 0, 2), 0, 0)) == []


@examples(200)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 9))
def test_the_parts_of_shards_make_up_a_range_in_order(start, more, numel):
    found = [
        rank * numel + place
        for rank, begin, end in shard_ranges(start, start + more, numel)
        for place in range(begin, end)
    ]
    assert found == [*range(start, start + more)]
    assert all(begin < end <= numel for _, begin, end in shard_ranges(start, start + more, numel))
