"""Interval arithmetic of resharding, by property."""

import functools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from infinity.core.nbytes import Box, Span, boxes, flat_offset, overlap, shard_pieces
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


@st.composite
def _layouts(draw, sizes):
    """Parameters in units: for each unit, ``(parameter, offset)`` and the length of a rank's shard."""
    ranks = draw(st.integers(1, 4))
    left = draw(st.permutations(range(len(sizes))))
    units = []
    while left:
        count = draw(st.integers(1, len(left)))
        spans, at = [], 0
        for each in left[:count]:
            at += draw(st.integers(0, 3))  # alignment
            spans.append(Span(each, at, at + sizes[each]))
            at += sizes[each]
        units.append((spans, max(1, -(-at // ranks)) + draw(st.integers(0, 2))))
        left = left[count:]
    return ranks, units


@examples(200)
@given(st.data())
def test_shards_of_any_layout_are_made_of_those_of_any_other(data):
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    values = [100 * i + np.arange(size) for i, size in enumerate(sizes)]
    old_ranks, old_units = data.draw(_layouts(sizes))
    new_ranks, new_units = data.draw(_layouts(sizes))

    def flat(spans, numel):
        line = np.full(numel, -1)
        for span in spans:
            line[span.start : span.stop] = values[span.source]
        return line

    shards = [flat(spans, old_ranks * n).reshape(old_ranks, n) for spans, n in old_units]
    homes = {s.source: (unit, s.start) for unit, (spans, _) in enumerate(old_units) for s in spans}
    shard_numel = [numel for _, numel in old_units]
    for spans, numel in new_units:
        wanted = flat(spans, new_ranks * numel)
        start = data.draw(st.integers(0, len(wanted)))
        stop = data.draw(st.integers(start, len(wanted)))
        made, last = np.full(stop - start, -1), 0
        for piece in shard_pieces(start, stop, spans, homes, shard_numel):
            assert last <= piece.target  # in order, without overlap
            last = piece.target + piece.stop - piece.start
            made[piece.target : last] = shards[piece.unit][piece.rank, piece.start : piece.stop]
        assert np.array_equal(made, wanted[start:stop])


def test_gaps_and_empty_spans_give_nothing():
    have = [Span("a", 0, 4), Span("b", 4, 4), Span("c", 6, 10)]
    old = {"a": (0, 10), "c": (1, 0)}
    assert list(shard_pieces(2, 8, have, old, (20, 20))) == [(0, 0, 12, 14, 0), (1, 0, 0, 2, 4)]
    assert list(shard_pieces(4, 6, have, old, (20, 20))) == []
