"""Sums over ranges of numbers that change, and searches in them, in logarithmic time.

Source: Fenwick, "A new data structure for cumulative frequency tables", 1994.
"""

import numpy as np


class Sums:
    """Numbers >= 0 by position; :meth:`below` adds up, the searches invert it."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers: list[float] = numbers.tolist()
        until, i = np.zeros(len(numbers) + 1, numbers.dtype), np.arange(len(numbers) + 1)
        np.cumsum(numbers, out=until[1:])
        # Entry i holds the sum of the last (i & -i) numbers before position i; searches never pass the last.
        self._top = 1 << len(numbers).bit_length() >> 1
        self._tree: list[float] = (until - until[i - (i & -i)]).tolist()
        self._tree += [float("inf")] * (2 * self._top - len(self._tree))

    def add(self, at: int, number: float) -> None:
        """Change the number at ``at``."""
        self.numbers[at] += number
        tree, i, end = self._tree, at + 1, len(self.numbers)
        while i <= end:
            tree[i] += number
            i += i & -i

    def below(self, end: int) -> float:
        """The sum of the numbers before position ``end``."""
        tree, total = self._tree, self._tree[0]
        while end:
            total += tree[end]
            end &= end - 1
        return total

    def between(self, begin: int, end: int) -> float:
        """The sum of the numbers from position ``begin`` on before ``end``, which is not before it."""
        tree, total = self._tree, 0.0
        while end > begin:
            total += tree[end]
            end &= end - 1
        while begin > end:  # what both have below is left out
            total -= tree[begin]
            begin &= begin - 1
        return total

    def first_end(self, amount: float) -> int:
        """The smallest end with ``below(end) >= amount``; past the last position if there is none."""
        tree, at, step = self._tree, 0, self._top
        if amount <= 0:
            return 0
        while step:
            number = tree[at + step]
            if number < amount:
                at += step
                amount -= number
            step >>= 1
        return at + 1

    def last_end(self, amount: float) -> int:
        """The largest end with ``below(end) <= amount``."""
        tree, at, step = self._tree, 0, self._top
        while step:
            number = tree[at + step]
            if number <= amount:
                at += step
                amount -= number
            step >>= 1
        return at
