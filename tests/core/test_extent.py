"""Byte ranges: order and length are kept, whatever is cut and joined."""

from hypothesis import given
from hypothesis import strategies as st

from infinity.core.nbytes import BLOCK_NBYTES, Extent, Piece, aligned

pieces = st.builds(Piece, st.integers(0, 2), st.integers(0, 8), st.integers(1, 6))
extents = st.builds(lambda parts: Extent(tuple(parts)), st.lists(pieces, max_size=6))


def content(extent: Extent) -> list[tuple[int, int]]:
    """Every byte of an extent, as file and offset, in order."""
    return [(p.file, p.offset + i) for p in extent.pieces for i in range(p.nbytes)]


@given(extents, extents)
def test_a_sum_has_the_bytes_of_both_in_order(a, b):
    assert content(a + b) == content(a) + content(b)
    assert (a + b).nbytes == a.nbytes + b.nbytes


@given(extents, st.integers(0, 60))
def test_a_head_is_the_first_bytes(extent, nbytes):
    assert content(extent.part(0, nbytes)) == content(extent)[:nbytes]
    assert all(piece.nbytes > 0 for piece in extent.part(0, nbytes).pieces)


@given(extents, st.integers(0, 60), st.integers(0, 60))
def test_a_part_is_the_bytes_from_its_start_on(extent, start, nbytes):
    assert content(extent.part(start, nbytes)) == content(extent)[start : start + nbytes]
    assert all(piece.nbytes > 0 for piece in extent.part(start, nbytes).pieces)


def test_pieces_that_touch_become_one():
    whole = Extent((Piece(0, 0, 4),)) + Extent((Piece(0, 4, 4),))
    assert whole == Extent((Piece(0, 0, 8),))
    assert len((Extent((Piece(0, 0, 4),)) + Extent((Piece(1, 4, 4),))).pieces) == 2


@given(st.integers(0, 10**9), st.sampled_from([1, 512, BLOCK_NBYTES]))
def test_aligned_is_the_next_multiple(nbytes, block):
    assert aligned(nbytes, block) % block == 0
    assert 0 <= aligned(nbytes, block) - nbytes < block
