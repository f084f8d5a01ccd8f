"""Which documents share a sequence: a plan of rows, made once, from lengths alone."""

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Documents, or parts of them, each of which is predicted from its own beginning.

    ``(pieces,)`` each: the first token, how many are inputs (every target is the token after its
    input, so one token more belongs to the piece), and how many targets count.
    """

    starts: Ints
    sizes: Ints
    targets: Ints

    def take(self, which: NDArray[Any]) -> "Pieces":
        return Pieces(starts=self.starts[which], sizes=self.sizes[which], targets=self.targets[which])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Row ``i`` holds the pieces from ``firsts[i]`` up to ``firsts[i + 1]``.

    Attributes:
        truncated: Documents whose end did not fit into a sequence.
        empty: Documents of which nothing is left to predict.
    """

    pieces: Pieces
    firsts: Ints
    truncated: int
    empty: int

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def sums(self, values: Ints) -> Ints:
        """For each row the sum of its pieces' ``values``."""
        totals = np.concatenate([[0], np.cumsum(values)])
        return np.diff(totals[self.firsts])


def plan_rows(documents: Ints, counts: NDArray[np.bool_] | None, *, seq_len: int, packing: bool) -> Plan:
    """Lay ``documents`` into rows of ``seq_len`` inputs.

    With ``packing`` as many to a row as fit, and text that is longer is cut into pieces, so that
    each of its tokens is predicted once. Without it a row each. What has tokens that do not count
    (a prompt, a chat) is never cut into pieces, because an answer without its question teaches
    guessing: its end is left out.

    Args:
        documents: ``(documents, 3)``, as in :class:`~infinity.app.data.tokens.Tokens`.
        counts: Likewise.
    """
    starts, stops, learned = documents[documents[:, 1] - documents[:, 0] > 1].T
    first = 1 if counts is None else counts[starts]  # learned or not, it is never a target
    pieces = Pieces(starts=starts, sizes=stops - starts - 1, targets=learned - first)
    if packing:
        pieces = _cut(pieces, learned == stops - starts, seq_len)
    cut = len(pieces.starts) - len(starts)
    long = np.flatnonzero(pieces.sizes > seq_len)
    pieces.sizes[long] = seq_len
    for at in long:
        first = pieces.starts[at] + 1
        pieces.targets[at] = seq_len if counts is None else counts[first : first + seq_len].sum()
    left = np.flatnonzero(pieces.targets > 0)
    empty = len(documents) + cut - len(left)
    pieces = pieces.take(left)
    rows = fit(pieces.sizes, seq_len) if packing else np.arange(len(left))
    order = np.argsort(rows, kind="stable")
    firsts = np.concatenate([[0], np.cumsum(np.bincount(rows))]).astype(np.int64)
    return Plan(pieces=pieces.take(order), firsts=firsts, truncated=len(long), empty=empty)


def fit(sizes: Ints, capacity: int) -> Ints:
    """The row of each size, so that no row exceeds ``capacity`` and few rows are needed.

    Best fit, the largest first; sizes that are equal are placed together, so the time grows with
    the number of different sizes rather than of documents.
    """
    rows = np.empty(len(sizes), dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    opened, with_room, rooms = 0, defaultdict[int, list[int]](list), list[int]()
    for run in np.split(order, np.flatnonzero(np.diff(sizes[order])) + 1) if len(sizes) else ():
        size = int(sizes[run[0]])
        while len(run):
            at = bisect_left(rooms, size)
            if at == len(rooms):
                new = -(-len(run) // (capacity // size))
                with_room[capacity] = list(range(opened, opened + new))
                opened += new
                rooms.append(capacity)
            room = rooms[at]
            chosen = with_room[room][: len(run)]
            rows[run[: len(chosen)]] = chosen
            run = run[len(chosen) :]
            del with_room[room][: len(chosen)]
            if not with_room[room]:
                rooms.pop(at)
            if room > size:
                if not with_room[room - size]:
                    insort(rooms, room - size)
                with_room[room - size] += chosen
    return rows


def _cut(pieces: Pieces, text: NDArray[np.bool_], seq_len: int) -> Pieces:
    """``pieces``, with those that are ``text`` and longer than ``seq_len`` cut into several."""
    parts = np.where(text, -(-pieces.sizes // seq_len), 1)
    source = np.repeat(np.arange(len(parts)), parts)
    number = np.arange(len(source)) - np.repeat(np.cumsum(parts) - parts, parts)
    rest = pieces.sizes[source] - number * seq_len
    sizes = np.where(text[source], np.minimum(rest, seq_len), rest)
    return Pieces(
        starts=pieces.starts[source] + number * seq_len,
        sizes=sizes,
        targets=np.where(text[source], sizes, pieces.targets[source]),
    )
