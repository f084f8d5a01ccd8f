"""Sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.core.nbytes import format_nbytes, parse_nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 * 2**30), ("8GB", 8 * 10**9), ("1.5 TB", 15 * 10**11), ("512mib", 512 * 2**20),
        ("0", 0), (4096, 4096), (" 7 ", 7), ("1B", 1), ("0.5KiB", 512), ("3TiB", 3 * 2**40),
        ("9007199254740993", 9007199254740993),
    ],
)  # fmt: skip
def test_sizes(text, nbytes):
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "8 apples", "1e9", "8GiBs", "1,5GB", True, None, 1.5, "nan"]
)
def test_what_is_no_size_says_how_to_write_one(text):
    with pytest.raises(ValueError, match="write 8GiB"):
        parse_nbytes(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (2**30, "1 GiB"),
        (5 * 2**40, "5 TiB"), (2**20 - 1, "1 MiB"), (1000 * 2**20, "1000 MiB"),
    ],
)  # fmt: skip
def test_sizes_for_people(nbytes, text):
    assert format_nbytes(nbytes) == text


@given(st.integers(0, 2**50))
def test_what_is_formatted_parses_to_within_three_digits(nbytes):
    text = format_nbytes(nbytes)
    assert "e" not in text, "no powers of ten for people"
    assert abs(parse_nbytes(text) - nbytes) <= 0.006 * nbytes
