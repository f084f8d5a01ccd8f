"""What happens to each slot and block: a plan, or one rule for all of them."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from infinity.core.plan import ActivationPlan, Place
from infinity.core.profile import SlotKey


class Script(Protocol):
    """Asked while the model runs."""

    def place(self, key: SlotKey) -> Place: ...
    def recomputes(self, region: int) -> bool: ...

    def loads(self, after: SlotKey | None) -> Sequence[SlotKey] | None:
        """What to load when backward first asks for ``after``; None: what was packed before it."""
        ...


class Planned:
    """Plays a plan."""

    def __init__(self, plan: ActivationPlan) -> None:
        self.plan = plan
        self._loads: defaultdict[SlotKey | None, list[SlotKey]] = defaultdict(list)
        for load in plan.loads:
            self._loads[load.after].append(load.slot)

    def place(self, key: SlotKey) -> Place:
        return self.plan.place(key)

    def recomputes(self, region: int) -> bool:
        return region in self.plan.recomputed

    def loads(self, after: SlotKey | None) -> Sequence[SlotKey] | None:
        return self._loads.get(after, ())


class Alike:
    """The same for all: keep, store, or recompute.

    Args:
        place: Where slots go.
        recompute: Whether blocks are recomputed.
        last: Region from which on nothing is stored or recomputed: backward begins with it. Below 0: none is,
            as of a model without blocks.
    """

    def __init__(self, place: Place, *, recompute: bool = False, last: int | None = None) -> None:
        self._place, self._recompute, self._last = place, recompute, last

    def place(self, key: SlotKey) -> Place:
        return Place.KEEP if self._is_last(key.region) else self._place

    def recomputes(self, region: int) -> bool:
        return self._recompute and not self._is_last(region)

    def _is_last(self, region: int) -> bool:
        return self._last is not None and 0 <= self._last <= region

    def loads(self, after: SlotKey | None) -> Sequence[SlotKey] | None:
        return None
