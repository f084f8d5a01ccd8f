"""What a play looked like: memory over time, when each channel moved what, and when compute stood."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Interval(NamedTuple):
    """Something that took from ``begin_s`` to ``end_s`` of the step (s)."""

    begin_s: float
    end_s: float
    name: str


class Sample(NamedTuple):
    """From ``at_s`` on, ``nbytes`` are in memory."""

    at_s: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """One micro-batch with its update.

    Attributes:
        memory: Of the device, without units, gradients and states; a step function.
        channels: For each channel that moved something its transfers, in order.
        stalls: When compute waited, and for what.
        recomputed: When a block's forward ran again.
        backward_s: When backward began (s).
        most_backlog_nbytes: The most that waited in memory for its store to end.
    """

    memory: tuple[Sample, ...]
    channels: Mapping[str, tuple[Interval, ...]]
    stalls: tuple[Interval, ...]
    recomputed: tuple[Interval, ...]
    backward_s: float
    most_backlog_nbytes: int
