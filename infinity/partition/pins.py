"""Units that a backward pass keeps, each until its last reader in that pass is done."""

from typing import Any

from infinity.partition.prefetcher import Prefetcher


class BackwardPins:
    """Units that a backward pass uses, each until its last reader in that pass is done.

    Args:
        prefetcher: Serves uses, and has room.
    """

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher = prefetcher
        #: In the order in which they came, each with the number of the autograd node that reads it; None: a
        #: recomputed forward does.
        self._kept: dict[int, Any] = {}
        self._node: Any = None  # the autograd node that read frozen units last,
        self._read: list[int] = []  # and which ones

    def __contains__(self, index: int) -> bool:
        """Whether the unit is kept until its gradients are complete."""
        return index in self._kept

    def recomputed(self, index: int) -> bool:
        """Whether a recomputed forward reads the unit."""
        return self._kept.get(index, self) is None

    def keep(self, index: int, node: Any, *, to_the_end: bool = False) -> None:
        """Use a unit until its gradients are complete, or until room is short.

        Args:
            node: Number of the autograd node that reads it, or for which it is recomputed.
            to_the_end: A recomputed forward or a leaf reads it, and needs it whether room is short or not.
        """
        if to_the_end:
            self._reach(node)
        if index in self._kept:
            if self._kept[index] is not None:
                self._kept[index] = None if to_the_end else node
            return
        self.make_room(index, node)
        self._kept[index] = None if to_the_end else node
        self._prefetcher.use(index)

    def make_room(self, index: int, node: Any) -> None:
        """Release what need not be kept, where a unit that is to be used does not fit beside it.

        Args:
            node: Number of the autograd node that reads it, or for which it is recomputed.
        """
        if index in self._kept or index in self._read:
            return
        if not self._prefetcher.holds([*self._kept, *self._read, index]):
            self._reach(node)
        for earlier, reader in list(self._kept.items()):
            if self._prefetcher.holds([*self._kept, *self._read, index]):
                break
            if reader is not None and reader != node:  # kept for its update only, which can read it again
                self.unpin(earlier)

    def shrink(self) -> None:
        """Release what need not be kept, where it does not fit any more; between two autograd nodes."""
        for earlier, reader in list(self._kept.items()):
            if self._prefetcher.holds([*self._kept, *self._read]):
                break
            if reader is not None:
                self.unpin(earlier)

    def keep_for(self, node: Any, index: int) -> None:
        """Use a unit without gradients until another node reads one."""
        self._reach(node)
        if index not in self._read:
            self.make_room(index, node)
            self._read.append(index)
            self._prefetcher.use(index)

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
