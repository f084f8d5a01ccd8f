"""The order in which a training step uses its units and completes their gradients. Pure: no torch."""

from collections.abc import Collection, Sequence

from infinity.planner.prefetch_plan import Event, Kind


class StepOrder:
    """The order in which a training step uses its units and completes their gradients.

    Written by the prefetcher when a plan is made, read by whatever schedules updates.

    Attributes:
        gradients: Units in the order in which a step completes their gradients; empty while unknown.
    """

    def __init__(self) -> None:
        self._first_uses: dict[int, int] = {}
        self.gradients: tuple[int, ...] = ()

    def learn(self, events: Sequence[Event]) -> None:
        """Take in a training pass's trace."""
        self._first_uses = {e.unit: i for i, e in reversed([*enumerate(events)]) if e.kind is Kind.USE}
        self.gradients = tuple(event.unit for event in events if event.kind is Kind.DONE)

    def expect_only(self, units: Collection[int]) -> None:
        """Leave out units that completed without a gradient; until the order changes."""
        self.gradients = tuple(unit for unit in self.gradients if unit in units)

    def forget_gradients(self) -> None:
        """The plan that the order of gradients came from is not followed any more."""
        self.gradients = ()

    def first_use(self, unit: int) -> int:
        """Return the position of a unit's first use in the next step; its index while unknown."""
        return self._first_uses.get(unit, unit)
