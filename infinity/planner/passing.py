"""Decides where values wait that blocks return for all micro-batches, and the gradients of those.

[Note: what waits between blocks]
Where all micro-batches go through a block before the next, what a block returned for each of them waits
twice: for the next block, and for backward, which recomputes that block from it. Its gradient waits once, for
the block that returned it. In forward and in backward as many as there are micro-batches wait for the next
block at one time; what waits for backward grows with every block. A value or gradient that leaves device
memory is written once and read once, a value twice if it leaves before the next block has taken it.
"""

from dataclasses import dataclass

from infinity.core.nbytes import format_nbytes
from infinity.core.plan import Place

#: Micro-batches with room beside those that wait: two on their way out, and two that come ahead of their use.
ON_THEIR_WAY = 4


def share_of_free(*, together: bool) -> int:
    """Return n if values may take an n-th of the device memory that is free; see :meth:`Rooms.within`."""
    return 4 if together else 2


@dataclass(frozen=True, slots=True)
class Rooms:
    """Gives the bytes that waiting values and gradients may take."""

    device: int | None  # None: all stay there
    host: int = 0  # beside an accelerator
    nvme: bool = False  # has room for the rest

    @classmethod
    def within(
        cls, activations: str | None, device: int, host: int, *, nvme: bool, together: bool
    ) -> "Rooms":
        """Return the rooms where so many bytes are free, under a policy for ``activations``.

        Half of what is free, beside which a micro-batch has the rest; of the device a quarter, if blocks take
        all micro-batches ``together``. Nothing leaves under the policies keep and plan, all under offload.
        """
        if activations in ("keep", "plan"):
            return cls(None)
        share = share_of_free(together=together)
        return cls(0 if activations == "offload" else max(0, device) // share, max(0, host) // 2, nvme)


@dataclass(frozen=True, slots=True)
class PassingPlan:
    """Says where values and gradients wait, counted in micro-batches of blocks."""

    values: int  # of all blocks
    slices: int  # micro-batches
    nbytes: int  # of what a block returns for one of them
    held: int  # of a block's values and gradients, that stay for the next block: those of the last ones
    early: int  # values, the first ones, that wait on NVMe for backward
    late: int  # the number of the first value that waits in device memory for it
    gradients: int  # of a block, in host memory

    @property
    def leaves(self) -> bool:
        """Return whether anything leaves device memory."""
        return self.late > 0 or self.held < self.slices

    def describe(self) -> str:
        """Return in words how much waits for backward, and where."""
        numbers = self.early, self.late - self.early, self.values - self.late
        places = zip(numbers, ("on NVMe", "in host memory", "on the device"), strict=True)
        where = ", ".join(f"{format_nbytes(n * self.nbytes)} {place}" for n, place in places if n)
        between = f"; {self.held} of {self.slices} micro-batches stay on the device between blocks"
        return f"what blocks return waits for backward: {where}{between * self.leaves}"

    def is_held(self, index: int) -> bool:
        """Return whether the value of micro-batch ``index`` waits in device memory for the next block."""
        return index >= self.slices - self.held

    def value(self, number: int) -> Place:
        """Return where a value waits for backward; ``number`` counts the micro-batches of all blocks."""
        if number >= self.late:
            return Place.KEEP
        return Place.NVME if number < self.early else Place.HOST

    def gradient(self, index: int) -> Place:
        """Return where the gradient for micro-batch ``index`` waits for the block that returned its value."""
        if self.is_held(index):
            return Place.KEEP
        return Place.HOST if index < self.gradients else Place.NVME


def plan_passing(blocks: int, slices: int, nbytes: int, rooms: Rooms) -> PassingPlan:
    """Return the plan that keeps ``rooms`` and moves the least bytes.

    Room for one more micro-batch between two blocks saves two moves for each block, room for one more that
    waits for backward two in all: so the former comes first. Without another place all stay.
    """
    values, room = blocks * slices, None if rooms.device is None else rooms.device // max(1, nbytes)
    if room is None or room >= values + slices or not (rooms.nvme or rooms.host):
        return PassingPlan(values, slices, nbytes, slices, 0, 0, 0)
    room, host = max(0, room - ON_THEIR_WAY), rooms.host // max(1, nbytes)
    held, kept = min(slices, room), max(0, room - slices)
    # Those that come to the place in which others still wait have room, too.
    host_gradients = min(slices - held, max(0, host - ON_THEIR_WAY))
    host_values = min(values - kept, host - host_gradients - (ON_THEIR_WAY if host_gradients else 0))
    host_values = max(0, host_values)
    if not rooms.nvme:
        kept, held = values - host_values, slices - host_gradients
    late = values - kept
    return PassingPlan(values, slices, nbytes, held, late - host_values, late, host_gradients)
