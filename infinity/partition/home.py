"""The home of a unit's shard, as those see it who move full values, and an update in flight there."""

import threading
from collections.abc import Callable

from infinity.core.lifecycle import Tier, UnitState
from infinity.core.transfer import ChainedTransfer, Lease, Transfer
from infinity.planner.shard_update import ShardUpdate


class UpdateFuture(Transfer):
    """An update in flight; ends when its last write has landed.

    Attributes:
        update: The update itself.
        computed: Set when the new weights exist, and the update reads what it was given no more.
    """

    __slots__ = ("computed", "update")

    def __init__(self, update: ShardUpdate) -> None:
        super().__init__()
        self.update = update
        self.computed = threading.Event()

    def wait_computed(self) -> None:
        """Return when the new weights exist, though they may not be on disk yet.

        Raises:
            DiskError: The update has failed.
        """
        while not self.computed.wait(1.0):  # in slices: Ctrl-C must get through
            pass
        if self.done():
            self.wait()

    def finish(self, error: BaseException | None = None) -> None:
        super().finish(error)
        self.computed.set()


class Home:
    """Where a unit's committed shard is between uses; alone, a tier that is planned for it.

    The homes of a model in training are :class:`infinity.shards.homes.ShardHome`.

    Attributes:
        version: Which of its places on NVMe is the committed one.
        updating: The last update of the shard, in flight or landed; None: there was none.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier, self.version = tier, 0
        self.updating: UpdateFuture | None = None

    @property
    def tier(self) -> Tier:
        """Host memory or NVMe."""
        return self._tier

    @property
    def resting_state(self) -> UnitState:
        """The state of a unit that is nowhere else."""
        return UnitState.ON_HOST if self.tier is Tier.HOST else UnitState.ON_NVME

    @property
    def lease(self) -> Lease | None:
        """What holds the shard in memory, in the form that it travels in; None: nothing does."""
        return None

    @property
    def is_on_device(self) -> bool:
        """Whether the newest weights are in accelerator memory, or what makes them was given to it."""
        return False

    @property
    def waits_for(self) -> str:
        """The cause of a wait for :meth:`read`: the shard's ``update``, or the disk's ``read``."""
        return "update" if self.updating is not None and self.updating.update.holds_fetches else "read"

    def updated_in_place(self) -> Callable[[], object]:
        """Return a wait for the new weights where they were; without an update there is none."""
        return (lambda: None) if self.updating is None else self.updating.wait_computed

    def read(self, memory: memoryview, start: int = 0) -> Transfer:
        """Start reading the newest committed shard, after the update in flight that makes it.

        Args:
            memory: For weights, or for their stored form if the unit has one.
            start: The first byte of the shard that is read; whole blocks.
        """
        update = self.updating
        if update is None or update.update.speculated:  # which writes the next version
            return self.fetch(memory, start)
        return ChainedTransfer(update, lambda: self.fetch(memory, start))

    def fetch(self, memory: memoryview, start: int = 0) -> Transfer:
        """Start reading the shard, in the form that it travels in, from byte ``start`` on."""
        raise NotImplementedError

    def fetched_nbytes(self, piece_nbytes: int | None) -> int:
        """Return the bytes that a fetch reads, in pieces of ``piece_nbytes``; None: as a whole."""
        return 0
