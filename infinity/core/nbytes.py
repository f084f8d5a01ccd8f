"""Sizes in text (``8GiB``, ``1.5TB``), and byte ranges on disk."""

import re
from dataclasses import dataclass
from decimal import Decimal

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_nbytes(text: str | int) -> int:
    """Return the bytes that ``text`` stands for: ``8GiB`` is 8 * 2**30, ``8GB`` is 8 * 10**9."""
    valid = isinstance(text, str | int) and not isinstance(text, bool)
    match = _PATTERN.fullmatch(str(text)) if valid else None
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write 8GiB, 512MiB or a number of bytes")
    return int(Decimal(match[1]) * _UNITS[match[2].upper()])


def format_nbytes(nbytes: float) -> str:
    """Return ``nbytes`` as text, in binary units with three digits."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(nbytes) < 1023.5:
            break
        nbytes, unit = nbytes / 1024, larger
    return f"{nbytes:.3g} {unit}" if unit != "B" and abs(nbytes) < 999.5 else f"{nbytes:.0f} {unit}"


#: Offsets and sizes of extents are multiples of this (bytes), as O_DIRECT wants on file systems that we met.
BLOCK_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class Piece:
    """Describes a contiguous byte range of one file of a volume."""

    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Describes a byte range that may lie on several drives, in the order of its bytes."""

    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def __add__(self, other: "Extent") -> "Extent":
        """Join this range and ``other`` after it; pieces that touch become one."""
        pieces = list(self.pieces)
        for piece in other.pieces:
            last = pieces[-1] if pieces else None
            if last and last.file == piece.file and last.offset + last.nbytes == piece.offset:
                pieces[-1] = Piece(last.file, last.offset, last.nbytes + piece.nbytes)
            else:
                pieces.append(piece)
        return Extent(tuple(pieces))

    def head(self, nbytes: int) -> "Extent":
        return self.part(0, nbytes)

    def part(self, start: int, nbytes: int) -> "Extent":
        """Return ``nbytes`` of the range from its byte ``start`` on."""
        pieces: list[Piece] = []
        for piece in self.pieces:
            skip = min(piece.nbytes, start)
            take = min(piece.nbytes - skip, nbytes)
            if take:
                pieces.append(Piece(piece.file, piece.offset + skip, take))
            start, nbytes = start - skip, nbytes - take
        return Extent(tuple(pieces))


def aligned(nbytes: int, block: int = BLOCK_NBYTES) -> int:
    """Return ``nbytes`` rounded up to a multiple of ``block`` (bytes)."""
    return -(-nbytes // block) * block


def around(piece: Piece) -> Piece:
    """Return the smallest range of whole blocks that contains ``piece``."""
    offset = piece.offset // BLOCK_NBYTES * BLOCK_NBYTES
    return Piece(piece.file, offset, aligned(piece.offset + piece.nbytes) - offset)
