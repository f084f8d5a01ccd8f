"""What one step did to its units, in order."""

from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What happens to a unit at one position of a trace."""

    USE = "use"  # somebody needs the full values from here on
    UNPIN = "unpin"  # that somebody no longer does
    DONE = "done"  # its gradients are complete: the update takes the weights away


class Event(NamedTuple):
    """One position of a trace."""

    kind: Kind
    unit: int


class Trace:
    """A growing record of events; unpins that change nothing for the plan are kept as well.

    Equal traces mean equal plans; :attr:`events` is the whole of it.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, event: Event) -> None:
        self.events.append(event)
