"""The small state of a step: what belongs to it beside its shards, put together as its parts become known."""

from collections.abc import Callable, Mapping
from typing import Any

from infinity.core.errors import StateError
from infinity.planner.shard_update import Predictor
from infinity.shards.journal import pack, unpack

#: A part of the state, and what returns the rest of it later; None: that is all.
Parts = tuple[Mapping[str, Any], Callable[[], Mapping[str, Any]] | None]


class StepState:
    """The small state of the last recorded step.

    Step counts, generators and what the optimizer follows are known when ``step()`` ends, the learning rates
    that schedulers set after it when the next forward pass begins.

    Args:
        predictor: Of clipped steps; belongs to the state.

    Attributes:
        packed: As bytes; empty: no step has one.
        step: Whose state it is.
    """

    def __init__(self, predictor: Predictor) -> None:
        self.packed, self.step = b"", 0
        self._predictor = predictor
        self._parts: Parts | None = None

    def take(self, state: Mapping[str, Any], late: Callable[[], Mapping[str, Any]] | None) -> None:
        """Take what is known when a step ends, or when a state was loaded; ``late`` returns the rest."""
        self._parts = {**state, "predictor": self._predictor.counter}, late

    @property
    def is_taken(self) -> bool:
        """Whether a state was taken that is not packed."""
        return self._parts is not None

    def complete(self, step: int) -> None:
        """Pack what was taken, with the rest of it.

        Raises:
            StateError: ``step()`` raised before anything was taken; or the state cannot be kept.
        """
        if self._parts is None:
            raise StateError(
                f"step() of the optimizer raised before step {step} was recorded, so no later one can be: "
                "end the program, and go on from the step before with infinity.resume"
            )
        state, late = self._parts
        self.packed, self.step = pack({**state, **({} if late is None else late())}), step
        self._parts = None

    def forget(self) -> None:
        """Drop what was taken: it belongs to no step that is recorded."""
        self._parts = None

    def restore(self, packed: bytes, step: int) -> None:
        """Go on with the state of a saved step."""
        self.packed, self.step = packed, step
        self._predictor.counter = unpack(packed)["predictor"]
