"""Sums over ranges of numbers that change, and searches in them, in logarithmic time.

Source: Fenwick, "A new data structure for cumulative frequency tables", 1994.
"""

from collections.abc import Iterable
from itertools import accumulate


class Sums:
    """Numbers >= 0 by position; :meth:`below` adds up, the searches invert it."""

    def __init__(self, numbers: Iterable[float]) -> None:
        self.numbers = list(numbers)
        until = [0, *accumulate(self.numbers)]
        # Entry i holds the sum of the last (i & -i) numbers before position i.
        self._tree = [until[i] - until[i - (i & -i)] for i in range(len(until))]
        self._top = 1 << len(self.numbers).bit_length()

    def add(self, at: int, number: float) -> None:
        """Change the number at ``at``."""
        self.numbers[at] += number
        tree, i = self._tree, at + 1
        while i < len(tree):
            tree[i] += number
            i += i & -i

    def below(self, end: int) -> float:
        """The sum of the numbers before position ``end``."""
        tree, total = self._tree, self._tree[0]
        while end:
            total += tree[end]
            end -= end & -end
        return total

    def first_end(self, amount: float) -> int:
        """The smallest end with ``below(end) >= amount``; past the last position if there is none."""
        tree, at, step = self._tree, 0, self._top
        if amount <= 0:
            return 0
        while step:
            if at + step < len(tree) and tree[at + step] < amount:
                at += step
                amount -= tree[at]
            step >>= 1
        return at + 1

    def last_end(self, amount: float) -> int:
        """The largest end with ``below(end) <= amount``."""
        tree, at, step = self._tree, 0, self._top
        while step:
            if at + step < len(tree) and tree[at + step] <= amount:
                at += step
                amount -= tree[at]
            step >>= 1
        return at
