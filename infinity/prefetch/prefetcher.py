"""Plays a plan: walks ahead of the position, serves what it did not foresee, records anew.

[Note: passes]
A training pass lasts from one optimizer step to the next, whatever the number of forwards and
backwards in it; an inference pass is one outermost call without gradients. Each kind has its own
trace and plan; what is present in memory is shared.

[Note: the same on every rank]
Every decision here depends on events and sizes only, never on what has already arrived. So ranks
that run the same modules start the same gathers in the same order.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Protocol

from infinity.prefetch.plan import Plan, make_plan
from infinity.prefetch.trace import Event, Kind, Trace


class Mover(Protocol):
    """Moves the weights of one unit; the prefetcher says when."""

    def start(self, unit: int) -> None:
        """Begin to bring the full values; must not wait for the disk or for other ranks."""
        ...

    def finish(self, unit: int) -> None:
        """Wait until the full values are there and the parameters view them."""
        ...

    def release(self, unit: int) -> None:
        """Drop the full values."""
        ...


class Pass:
    """One kind of pass: its plan, and where in it we are."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.trace = Trace()
        self.following = False
        self.begun = False

    @property
    def position(self) -> int:
        return len(self.trace.events)


class Prefetcher:
    """Keeps the nearest future of the running pass in memory.

    Args:
        mover: Moves units.
        nbytes: Size of each streaming unit's full buffer (bytes).
        capacity_nbytes: What all full buffers together may take.
    """

    def __init__(self, mover: Mover, nbytes: Mapping[int, int], capacity_nbytes: int) -> None:
        self.mover, self.nbytes, self.capacity_nbytes = mover, nbytes, capacity_nbytes
        self.present: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.pins: dict[int, int] = {}
        self.training, self.inference = Pass(), Pass()
        self.running = self.training
        self._first_uses: dict[int, int] = {}
        self.on_demand = 0  # uses, in this training pass, that no plan foresaw
        self.planned: list[int] | None = None  # fetches of this training pass, by its plan

    # --- events ------------------------------------------------------------------------------

    def use(self, unit: int) -> None:
        """Have ``unit`` gathered and pinned when this returns; then look ahead."""
        self.pins[unit] = self.pins.get(unit, 0) + 1
        self._begin()
        if unit not in self.present:
            if self.running.plan is not None:
                self.on_demand += 1
            self._make_room(unit)
            self._start(unit)
        self.present.move_to_end(unit)
        self._advance(Event(Kind.USE, unit))
        self.mover.finish(unit)

    def unpin(self, unit: int) -> None:
        """One user of ``unit`` has ended."""
        if self.pins.get(unit, 0):
            self.pins[unit] -= 1
            self._advance(Event(Kind.UNPIN, unit))

    def done(self, unit: int) -> None:
        """``unit``'s gradients are complete and the mover has taken its weights away."""
        self.pins.pop(unit, None)
        self.present.pop(unit, None)
        self._advance(Event(Kind.DONE, unit))

    # --- passes ------------------------------------------------------------------------------

    def end_training_pass(self) -> None:
        """An optimizer step: from the next event on, a new pass; its first units go out now."""
        self._conclude(self.training)
        self.on_demand = 0
        self.planned = [] if self.training.plan else None
        if self.running is self.training:
            self._begin()

    def begin_inference(self) -> None:
        self.running = self.inference

    def end_inference(self) -> None:
        """The next use belongs to the training pass, which begins again if it had not begun."""
        self._conclude(self.inference)
        self.running = self.training
        self.training.begun = bool(self.training.position)

    def forget(self, units: Iterable[int] | None = None) -> None:
        """Release ``units`` (None: everything) that are present: their copies are stale."""
        stale = set(self.present if units is None else units)
        for unit in [u for u in self.present if u in stale and not self.pins.get(u)]:
            self._release(unit)

    def first_use(self, unit: int) -> int:
        """Position of a unit's first use in the next training pass; its index while unknown."""
        return self._first_uses.get(unit, unit)

    # --- decisions ---------------------------------------------------------------------------

    def _conclude(self, ended: Pass) -> None:
        events = tuple(ended.trace.events)
        if events and (ended.plan is None or ended.plan.events != events):
            ended.plan = make_plan(events, self.nbytes, self.capacity_nbytes)
            if ended is self.training:
                self._first_uses = {
                    e.unit: i for i, e in reversed([*enumerate(events)]) if e.kind is Kind.USE
                }
        ended.trace, ended.begun = Trace(), False
        ended.following = ended.plan is not None

    def _begin(self) -> None:
        """Before the first event of a pass: bring in its nearest future."""
        running = self.running
        if running.begun or running.plan is None or running.position:
            return
        running.begun = True
        wanted = set(running.plan.begin)
        for unit in [u for u in self.present if u not in wanted and not self.pins.get(u)]:
            self._release(unit)
        for unit in running.plan.begin:
            if unit not in self.present:
                self._expect(unit)
            self._prefetch(unit)

    def _advance(self, event: Event) -> None:
        """Write the event down; when it was foreseen, do what the plan says after it."""
        running = self.running
        position = running.position
        running.trace.add(event)
        plan = running.plan
        if plan is None or not running.following:
            return
        if position >= len(plan.events) or plan.events[position] != event:
            running.following = False  # from here on demand; the new trace becomes the plan
            self.planned = None
            return
        actions = plan.actions[position]
        for unit in actions.release:
            if unit in self.present and not self.pins.get(unit):
                self._release(unit)
        for unit in actions.fetch:
            self._expect(unit)
            self._prefetch(unit)

    def _prefetch(self, unit: int) -> None:
        if unit not in self.present and self._present_nbytes + self.nbytes[unit] <= self.capacity_nbytes:
            self._start(unit)

    def _make_room(self, unit: int) -> None:
        """Release the least recently used until ``unit`` fits; pinned ones stay."""
        for other in list(self.present):
            if self._present_nbytes + self.nbytes[unit] <= self.capacity_nbytes:
                return
            if not self.pins.get(other):
                self._release(other)

    def _start(self, unit: int) -> None:
        self.present[unit] = None
        self.mover.start(unit)

    def _expect(self, unit: int) -> None:
        if self.planned is not None:
            self.planned.append(unit)

    def _release(self, unit: int) -> None:
        del self.present[unit]
        self.mover.release(unit)

    @property
    def _present_nbytes(self) -> int:
        return sum(self.nbytes[u] for u in self.present)
