"""Sizes in text: ``8GiB``, ``512MiB``, ``1.5TB``."""

import re
from decimal import Decimal

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_nbytes(text: str | int) -> int:
    """Bytes that ``text`` stands for: ``8GiB`` is 8 * 2**30, ``8GB`` is 8 * 10**9.

    Raises:
        ValueError: Not a size, or an unknown unit.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise ValueError(f"{text!r} is not a size; write 8GiB, 512MiB or a number of bytes")
    match = _PATTERN.fullmatch(str(text))
    if not match or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write 8GiB, 512MiB or a number of bytes")
    return int(Decimal(match[1]) * _UNITS[match[2].upper()])


def format_nbytes(nbytes: float) -> str:
    """Return ``nbytes`` as text, in binary units with three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1023.5:
            return f"{_digits(nbytes) if unit != 'B' else f'{nbytes:.0f}'} {unit}"
        nbytes /= 1024
    return f"{_digits(nbytes)} TiB"


def _digits(number: float) -> str:
    return f"{number:.3g}" if abs(number) < 999.5 else f"{number:.0f}"
