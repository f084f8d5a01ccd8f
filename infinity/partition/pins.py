"""Which units a backward pass keeps in memory, and for whom."""

from typing import Any

from infinity.partition.prefetcher import Prefetcher


class BackwardPins:
    """Uses units for a backward pass, and lets each go when nobody in it reads it any more.

    Args:
        prefetcher: Serves uses, and has room.
    """

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher = prefetcher
        #: In the order in which they came, each with the autograd node that reads it; None: a recomputed
        #: forward does.
        self._kept: dict[int, Any] = {}
        self._node: Any = None  # the autograd node that read frozen units last,
        self._read: list[int] = []  # and which ones

    def __contains__(self, index: int) -> bool:
        """Whether the unit is kept until its gradients are complete."""
        return index in self._kept

    def recomputed(self, index: int) -> bool:
        """Whether a recomputed forward reads the unit."""
        return self._kept.get(index, self) is None

    def keep(self, index: int, node: Any) -> None:
        """Use a unit until its gradients are complete, or until room is short.

        Args:
            node: The autograd node that reads it; None: a recomputed forward, which needs it to the end.
        """
        if index in self._kept:
            if self._kept[index] is not None:
                self._kept[index] = node
            return
        for earlier, reader in list(self._kept.items()):
            if self._prefetcher.holds([*self._kept, index]):
                break
            if reader is not None and reader is not node:  # kept for its update only, which can read it again
                self.unpin(earlier)
        self._kept[index] = node
        self._prefetcher.use(index)

    def keep_for(self, node: Any, index: int) -> None:
        """Use a unit without gradients until another node reads one."""
        if node is not self._node:  # no operator reads what an earlier one unpacked
            for read in self._read:
                self._prefetcher.unpin(read)
            self._node, self._read = node, []
        if index not in self._read:
            self._read.append(index)
            self._prefetcher.use(index)

    def unpin(self, index: int) -> None:
        """Nobody reads the unit any more, and its weights stay."""
        if index in self._kept:
            del self._kept[index]
            self._prefetcher.unpin(index)

    def forget(self, index: int) -> None:
        """The unit's gradients are complete, and its weights are gone to the update."""
        self._kept.pop(index, None)

    def drop(self) -> None:
        """The backward pass has ended."""
        for index in [*self._kept, *self._read]:
            self._prefetcher.unpin(index)
        self._kept.clear()
        self._node, self._read = None, []
