"""Byte ranges on disk."""

from dataclasses import dataclass

#: Extents, their offsets and their sizes are multiples of this: what O_DIRECT wants of
#: every file system that we met (bytes).
BLOCK_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous byte range of one file of a volume."""

    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Extent:
    """A byte range that may lie on several drives, in the order of its bytes."""

    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def __add__(self, other: "Extent") -> "Extent":
        """This range and then ``other``; pieces that touch become one."""
        pieces = list(self.pieces)
        for piece in other.pieces:
            last = pieces[-1] if pieces else None
            if last and last.file == piece.file and last.offset + last.nbytes == piece.offset:
                pieces[-1] = Piece(last.file, last.offset, last.nbytes + piece.nbytes)
            else:
                pieces.append(piece)
        return Extent(tuple(pieces))

    def head(self, nbytes: int) -> "Extent":
        """The first ``nbytes`` of the range."""
        return self.part(0, nbytes)

    def part(self, start: int, nbytes: int) -> "Extent":
        """``nbytes`` of the range from its byte ``start`` on."""
        pieces: list[Piece] = []
        for piece in self.pieces:
            skip = min(piece.nbytes, start)
            take = min(piece.nbytes - skip, nbytes)
            if take:
                pieces.append(Piece(piece.file, piece.offset + skip, take))
            start, nbytes = start - skip, nbytes - take
        return Extent(tuple(pieces))


def aligned(nbytes: int, block: int = BLOCK_NBYTES) -> int:
    """``nbytes`` rounded up to a multiple of ``block`` (bytes)."""
    return -(-nbytes // block) * block


def around(piece: Piece) -> Piece:
    """The smallest range of whole blocks that has all of ``piece``."""
    offset = piece.offset // BLOCK_NBYTES * BLOCK_NBYTES
    return Piece(piece.file, offset, aligned(piece.offset + piece.nbytes) - offset)
