"""Items in a memory of bounded size: what is there, what is in use, and what goes first. Pure: no torch.

An item is whatever has a size and comes and goes as a whole: a unit's full values, a tile, stored bytes that
others are decoded from, a saved activation. It counts from the moment at which it begins to arrive. Who asks
decides what comes; what goes is decided here, in one order for all items.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class ResidentSet(Generic[Item]):
    """Items that are in memory or on their way there.

    Args:
        capacity_nbytes: What they may take together.
        release: Called with an item that goes; it calls :meth:`discard`.

    Attributes:
        present: Bytes of each item, least recently used first.
        pins: How often each is in use; those are not released.
        spare: Present items that no plan wants: the first to go.
        borrowed_nbytes: What others have of the capacity for a while.
    """

    def __init__(self, capacity_nbytes: int, release: Callable[[Item], None]) -> None:
        self.capacity_nbytes, self._release = capacity_nbytes, release
        self.present: OrderedDict[Item, int] = OrderedDict()
        self.pins: dict[Item, int] = {}
        self.spare: dict[Item, None] = {}
        self.nbytes = self.borrowed_nbytes = 0

    def __contains__(self, item: Item) -> bool:
        return item in self.present

    def __iter__(self) -> Iterator[Item]:
        return iter([*self.present])

    def fits(self, nbytes: int) -> bool:
        """Whether there is room for so many bytes more."""
        return self.nbytes + nbytes + self.borrowed_nbytes <= self.capacity_nbytes

    def add(self, item: Item, nbytes: int) -> None:
        """Count an item that begins to arrive."""
        self.present[item] = nbytes
        self.nbytes += nbytes

    def discard(self, item: Item) -> None:
        """Do not count an item any more."""
        self.nbytes -= self.present.pop(item, 0)
        self.spare.pop(item, None)

    def use(self, item: Item) -> None:
        """Take note that an item, which is present, is used now."""
        self.present.move_to_end(item)

    def pin(self, item: Item) -> None:
        self.pins[item] = self.pins.get(item, 0) + 1

    def unpin(self, item: Item) -> bool:
        """Take back one pin; False: there is none."""
        if self.pins.get(item, 0):
            self.pins[item] -= 1
            return True
        return False

    def spare_all(self) -> None:
        """Let everything that is not in use be the first to go."""
        self.spare.update((item, None) for item in self.present if not self.pins.get(item))

    def release(self, items: Iterable[Item]) -> None:
        """Release those of ``items`` that are present and not in use."""
        for item in items:
            if item in self.present and not self.pins.get(item):
                self._release(item)

    def make_room(self, nbytes: int, going: Iterator[Item]) -> bool:
        """Release items in the order of ``going`` until so many bytes fit; return whether they do."""
        while not self.fits(nbytes):
            item = next(going, None)
            if item is None:
                return False
            self.release([item])
        return True

    def spare_items(self) -> Iterator[Item]:
        """Yield what no plan wants, the first to go first."""
        yield from [*self.spare]

    def to_go(self) -> Iterator[Item]:
        """Yield what is present as it is released: what no plan wants, then the least recently used."""
        yield from self.spare_items()
        yield from [*self.present]
