"""Tracks which units a backward pass keeps until their last reader is done, and which leaf it is in."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from infinity.partition.prefetcher import Prefetcher
from infinity.partition.unit import Unit


class BackwardPins:
    """Keeps each unit that a backward pass uses until its last reader in that pass is done.

    ``node`` is the number of the autograd node that reads a unit, or for which it is recomputed.
    """

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher = prefetcher
        #: In the order in which they came, each with the node that reads it; None: a recomputed forward does.
        self._kept: dict[int, Any] = {}
        self._node: Any = None  # the autograd node that read frozen units last,
        self._read: list[int] = []  # and which ones

    def __contains__(self, index: int) -> bool:
        return index in self._kept

    def recomputed(self, index: int) -> bool:
        """Return whether a recomputed forward reads the unit."""
        return self._kept.get(index, self) is None

    def keep(self, index: int, node: Any, *, to_the_end: bool = False) -> None:
        """Use a unit until its gradients are complete; without ``to_the_end`` at most until room is short."""
        if to_the_end:
            self._reach(node)
        if index in self._kept:
            if self._kept[index] is not None:
                self._kept[index] = None if to_the_end else node
            return
        self.make_room(index, node)
        self._kept[index] = None if to_the_end else node
        self._prefetcher.use(index)

    def keep_for(self, index: int, node: Any) -> None:
        """Use a unit without gradients until another node reads one."""
        self._reach(node)
        if index not in self._read:
            self.make_room(index, node)
            self._read.append(index)
            self._prefetcher.use(index)

    def make_room(self, index: int, node: Any) -> None:
        """Release units that need not be kept, if unit ``index`` does not fit beside them."""
        if index not in self._kept and index not in self._read:
            if not self._prefetcher.holds([*self._kept, *self._read, index]):
                self._reach(node)
            self.shrink([index], node)

    def shrink(self, beside: Sequence[int] = (), node: Any = None) -> None:
        """Release units that need not be kept and that ``node`` does not read, if they no longer fit."""
        for earlier, reader in list(self._kept.items()):
            if self._prefetcher.holds([*self._kept, *self._read, *beside]):
                break
            if reader is not None and reader != node:  # kept for its update only, which can read it again
                self.unpin(earlier)

    def _reach(self, node: Any) -> None:
        """Release units without gradients that an earlier node read: no other one reads them."""
        if node != self._node:
            for read in self._read:
                self._prefetcher.unpin(read)
            self._node, self._read = node, []

    def unpin(self, index: int) -> None:
        """Release a unit that is not read any more, and whose weights stay."""
        if index in self._kept:
            del self._kept[index]
            self._prefetcher.unpin(index)

    def forget(self, index: int) -> None:
        """Forget a unit whose gradients are complete, and whose weights went to the update."""
        self._kept.pop(index, None)

    def drop(self) -> None:
        """Release every unit at the end of the backward pass."""
        for index in [*self._kept, *self._read]:
            self._prefetcher.unpin(index)
        self._kept.clear()
        self._node, self._read = None, []


class Leaves:
    """Knows the modules whose units are used as one on several ranks, and which of them backward is in."""

    def __init__(self, leaves: Mapping[nn.Module, tuple[Unit, ...]]) -> None:
        self.of_module = leaves
        self._of_unit = {unit.index: leaf for leaf in leaves.values() for unit in leaf}
        self._calls: Counter[tuple[Unit, ...]] = Counter()  # since the last backward
        self._current: tuple[Unit, ...] = ()

    def of(self, unit: Unit) -> tuple[Unit, ...]:
        """Return the leaf of a unit; empty: it is in none."""
        return self._of_unit.get(unit.index, ())

    def count_call(self, leaf: tuple[Unit, ...]) -> None:
        self._calls[leaf] += 1

    def move_to(self, leaf: tuple[Unit, ...]) -> tuple[Unit, ...]:
        """Record that backward is in ``leaf`` (empty: in none); return the leaf that is over with it."""
        left, self._current = self._current, leaf
        return () if left is leaf or self._calls[left] > 1 else left

    def is_in(self, leaf: tuple[Unit, ...]) -> bool:
        return leaf is self._current

    def several_calls(self) -> list[tuple[Unit, ...]]:
        """Return the leaves that ran several times, whose gradients come at the end."""
        return [leaf for leaf, calls in self._calls.items() if calls > 1]

    def end_backward(self) -> None:
        self._calls.clear()
        self._current = ()
