"""The prefetcher: plays a plan ahead of the position, serves on demand what it did not foresee, records anew.

[Note: passes]
A training pass lasts from one optimizer step to the next, whatever the number of forwards and
backwards in it; an inference pass is one outermost call without gradients. Each kind has its own
trace and plan; what is present in memory is shared. A visit is neither: a few values are read
(``gathered``, ``state_dict``), and no plan follows from it.

[Note: the same on every rank]
Every decision here depends on events and sizes only, never on what has already arrived. So ranks
that run the same modules start the same gathers in the same order.

[Note: what stays while it is updated]
Where the plan wants a unit at the beginning of the next pass and there is room, its buffer stays when
its gradients are complete, and the update writes the new weights there. Until the next pass begins
it must not be read: a use before that releases it and is served the committed version on demand.

[Note: what the plan did not foresee]
An event that is not the plan's next one is served on demand, and the plan waits: often a use was
added, and the plan goes on with the event after it. Where the last few events are found together
later in the plan, something was left out, and the plan goes on from there. The new trace becomes
the plan of the next pass.

[Note: routed units]
Which tiles of experts a step uses depends on its batch, so no plan has them, and none is brought that is not
used. When a use of one comes, those that follow it are known (:mod:`infinity.partition.tiles`) and begin to
arrive, as far as there is room. Backward uses them in reverse order, so what comes is known over the whole
model: uses of forward are written down, and crossed out as backward comes to them. A block that is recomputed
uses its tiles anew, and these uses take the place of those that forward wrote down; before the next block is
recomputed its tiles are not brought, since they are used in another order. Tiles are the first to go. Plans
leave them half of the room (all that they need, if that is less), or, where all micro-batches go through a
block before the next, room for those of a block.

In forward the next tiles are known when the router has chosen, and from the last tile to the next router's
choice there is none to be read. So what the plan fetches when a unit is released waits for the last tile, or
for the next use of a unit that is in the plan.

Tiles that are stored in another form come in two steps (:mod:`infinity.partition.mover`): their stored bytes
as far ahead as memory has room, their full values for this use and the next few. Where micro-batches go
through a block together, its tiles are decoded once, if memory holds all of them so.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from infinity.planner.prefetch_plan import Event, Kind, Plan, make_plan


class Mover(Protocol):
    """Moves the weights of one unit; the prefetcher says when."""

    def start(self, unit: int) -> None:
        """Begin to bring the full values; must not wait for the disk or for other ranks.

        For a unit that stayed while it was updated: begin to bring the new values.
        """
        ...

    def finish(self, unit: int) -> None:
        """Wait until the full values are there and the parameters view them."""
        ...

    def release(self, unit: int) -> None:
        """Drop the full values, and stored bytes."""
        ...

    def stored_nbytes(self, unit: int) -> int:
        """Return what the unit takes before it is decoded (bytes); 0: it comes in one step."""
        ...

    def start_stored(self, unit: int) -> None:
        """Begin to bring the stored bytes, which stay until :meth:`release`; must not wait, as ``start``."""
        ...

    def decode(self, unit: int) -> None:
        """Begin to make the full values of stored bytes, which may still be on their way."""
        ...

    def release_decoded(self, unit: int) -> None:
        """Drop the full values; the stored bytes stay."""
        ...


#: Routed units that are decoded before their turn, or as many as have so many bytes: some milliseconds' work,
#: as long as a thread may be kept from its core.
DECODED_AHEAD = 4
DECODED_AHEAD_NBYTES = 2**26
#: Events that must follow each other as in the plan before it goes on elsewhere.
CONTEXT = 3


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


class Pass:
    """One kind of pass: its plan, and where in it we are."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.trace: list[Event] = []
        self.cursor = 0  # the plan's next event
        self.begun = False
        self._places: dict[tuple[Event, ...], list[int]] | None = None

    @property
    def position(self) -> int:
        return len(self.trace)

    def foresees(self, event: Event) -> bool:
        """Whether ``event`` is the plan's next one."""
        return self.plan is not None and self.plan.events[self.cursor : self.cursor + 1] == (event,)

    def follow(self, plan: Plan | None) -> None:
        self.plan, self._places = plan, None

    def restart(self) -> None:
        self.trace, self.cursor, self.begun = [], 0, False

    def align(self, event: Event) -> range:
        """Write ``event`` down; the positions of the plan that are over with it: none when unforeseen."""
        self.trace.append(event)
        if self.plan is None:
            return range(0)
        begin = self.cursor
        if self.foresees(event):
            self.trace[-1] = self.plan.events[begin]  # equal events of all passes are one object
            self.cursor += 1
        elif self.position >= CONTEXT:
            context = tuple(self.trace[-CONTEXT:])
            later = self._find(context)
            if later is not None:
                self.cursor = later + 1
        return range(begin, self.cursor)

    def _find(self, context: tuple[Event, ...]) -> int | None:
        """The nearest position, not over yet, at which the plan has these events."""
        assert self.plan is not None
        if self._places is None:
            self._places = {}
            for i in range(CONTEXT, len(self.plan.events) + 1):
                self._places.setdefault(self.plan.events[i - CONTEXT : i], []).append(i - 1)
        places = self._places.get(context, [])
        nearest = bisect_left(places, self.cursor)
        return places[nearest] if nearest < len(places) else None


class Prefetcher:
    """Keeps the nearest future of the running pass in memory.

    It has more attributes than other classes: what is in memory and why it stays, and three kinds of passes.
    Each release looks at both.

    Args:
        mover: Moves units.
        nbytes: Size of each streaming unit's full buffer (bytes).
        capacity_nbytes: What all full buffers together may take.
        can_stay: Units that may be updated where they are.
        order: Learns the order of training steps.
        routed: Units that no plan foresees: see [Note: routed units].

    Attributes:
        together_nbytes: What routed units take that several micro-batches use one after another.
        lent_nbytes: What gradients have of the capacity.
    """

    def __init__(
        self, mover: Mover, nbytes: Mapping[int, int], capacity_nbytes: int,
        can_stay: Collection[int] = (), order: StepOrder | None = None, routed: Collection[int] = (),
    ) -> None:  # fmt: skip
        self.mover, self.nbytes, self.capacity_nbytes = mover, nbytes, capacity_nbytes
        self.can_stay, self.order = can_stay, order or StepOrder()
        self.routed = frozenset(routed)
        self.routed_used: set[int] = set()  # in this training pass
        self.together_nbytes = self.lent_nbytes = 0
        self._keeps_decoded = False  # they stay decoded, from one micro-batch to the next
        self._held: dict[int, int] = {}  # bytes of those that are present
        self._decoded: dict[int, int] = {}  # of them, the full buffers of units whose stored bytes came first
        self._largest_full: int | None = None  # of such a buffer
        self._later: list[int] = []  # fetches of the plan that were put off
        self._coming: dict[int, int] = {}  # bytes of routed units as they are brought
        self._to_come: list[int] = []  # routed units that backward will use, from the last one on
        self._recomputed, self._recomputing = 0, False  # those before this place are recomputed first
        self.present: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._present_nbytes = 0
        self.staying: set[int] = set()  # present, being updated, and not for use before the next pass
        self.pins: dict[int, int] = {}
        self.training, self.inference, self.visit = Pass(), Pass(), Pass()
        self.running = self.training
        self._unforeseen: dict[int, None] = {}  # present, but in no plan: the first to go
        self.on_demand = 0  # uses, in this training pass, that no plan foresaw
        self.planned: list[int] | None = None  # fetches of this training pass, by its plan

    # --- events ------------------------------------------------------------------------------

    def use(self, unit: int, following: Sequence[int] | None = None, *, recomputed: bool = False) -> None:
        """Have ``unit`` gathered and pinned when this returns; then look ahead.

        Args:
            following: Of a routed unit, those that are used next; None: backward reads it.
            recomputed: A forward inside backward uses a routed unit.
        """
        self.pins[unit] = self.pins.get(unit, 0) + 1
        try:
            self._use(unit, following, recomputed)
        except Exception:  # the caller does not unpin it
            self.pins[unit] -= 1
            self._release_all([unit])  # the next use reads it again
            raise

    def _use(self, unit: int, following: Sequence[int] | None, recomputed: bool) -> None:
        self._begin()
        if unit in self.routed:
            if following is None:
                following = self._before(unit)
            elif self.running is self.training:
                self._write_down(unit, recomputed)
            self._use_routed(unit, following)
            return
        self._fetch_later()
        if unit in self.staying:
            self._release(unit)  # its buffer will hold the next version; the committed one is wanted
        over = self.running.align(Event(Kind.USE, unit))
        release, fetch = self._actions(over)
        self._release_all(release)
        if unit not in self.present:
            if unit not in fetch:
                self._count_unforeseen(unit)
            self._make_room(unit)
            self._start(unit)
        elif over:
            self._unforeseen.pop(unit, None)
        self.present.move_to_end(unit)
        self._fetch_all(fetch)
        self.mover.finish(unit)

    def unpin(self, unit: int) -> None:
        """Take back one pin of ``unit``."""
        if self.pins.get(unit, 0):
            self.pins[unit] -= 1
            if unit not in self.routed:
                self._advance(Event(Kind.UNPIN, unit))

    def stays(self, unit: int) -> bool:
        """Whether ``unit``, whose gradients are complete now, is to be updated where it is."""
        running = self.running
        if running.plan is None or unit not in running.plan.stays or unit not in self.present:
            return False
        return unit in self.can_stay and running.foresees(Event(Kind.DONE, unit))

    def done(self, unit: int) -> None:
        """``unit``'s gradients are complete; the mover has taken its weights away, or it stays."""
        self.pins.pop(unit, None)
        if self.stays(unit):
            self.staying.add(unit)
        else:
            self._drop(unit)
        if unit not in self.routed:
            self._advance(Event(Kind.DONE, unit))

    # --- passes ------------------------------------------------------------------------------

    def end_training_pass(self) -> None:
        """An optimizer step: from the next event on, a new pass; its first units go out now."""
        self._fetch_later()
        self._conclude(self.training)
        self.on_demand = 0
        self.routed_used.clear()
        self._to_come.clear()
        self._recomputed, self._recomputing = 0, False
        self.planned = [] if self.training.plan else None
        if self.running is self.training:
            self._begin()

    def begin_inference(self) -> None:
        self._fetch_later()
        self.running = self.inference

    def begin_visit(self) -> None:
        """Begin a visit, which lasts until :meth:`end_inference`."""
        self._fetch_later()
        self.running = self.visit

    def end_inference(self) -> None:
        """The next use belongs to the training pass, which begins again if it had not begun."""
        if self.running is self.visit:
            self.visit.restart()
        else:
            self._conclude(self.inference)
            if self.training.position:  # in the middle of a step: what inference left is in the way
                self._unforeseen.update((u, None) for u in self.present if not self.pins.get(u))
        self.running = self.training
        self.training.begun = bool(self.training.position)

    def forget(self, units: Iterable[int] | None = None) -> None:
        """Release ``units`` (None: everything) that are present: their copies are stale."""
        stale = set(self.present if units is None else units)
        self._release_all([unit for unit in self.present if unit in stale])

    def resize(self, capacity_nbytes: int) -> None:
        """Keep within another capacity; plans for the old one are forgotten."""
        self.forget()
        self.capacity_nbytes, self._largest_full = capacity_nbytes, None
        self._coming.clear()
        self.training.follow(None)
        self.inference.follow(None)
        self.order.forget_gradients()

    def lend(self, nbytes: int) -> None:
        """Leave ``nbytes`` of the capacity to gradients, until told otherwise: what is not in use goes."""
        self.lent_nbytes = nbytes
        for unit in [] if self._fits(0) else self._to_go():
            if self._fits(0):
                break
            self._release_all([unit])

    def hold_together(self, tiles: Iterable[Collection[int]]) -> None:
        """Leave room in plans for any of these sets of routed units, decoded if they fit, or else stored."""
        sets = [self.routed.intersection(each) for each in tiles]
        decoded = max((sum(self.nbytes[unit] for unit in each) for each in sets), default=0)
        stored = max((sum(map(self._coming_nbytes, each)) for each in sets), default=0) + self._turns_nbytes
        self._keeps_decoded = decoded + self._others_nbytes <= self.capacity_nbytes
        self.together_nbytes = decoded if self._keeps_decoded else stored

    def forget_stored(self, unit: int) -> None:
        """Release ``unit`` if its stored bytes are kept: its full values were written."""
        if unit in self._decoded:
            self.forget([unit])

    def streams(self, unit: int) -> bool:
        """Whether the unit's full values come and go; the others are always there."""
        return unit in self.nbytes

    def holds(self, units: Iterable[int]) -> bool:
        """Whether all of ``units`` fit into memory together."""
        return sum(self.nbytes[unit] for unit in units) + self.lent_nbytes <= self.capacity_nbytes

    # --- decisions ---------------------------------------------------------------------------

    def _conclude(self, ended: Pass) -> None:
        events = tuple(ended.trace)
        if events and (ended.plan is None or ended.plan.events != events):
            ended.follow(make_plan(events, self.nbytes, self._planned_nbytes(), can_stay=self.can_stay))
            if ended is self.training:
                self.order.learn(events)
        ended.restart()

    def _planned_nbytes(self) -> int:
        """What plans may take: all but room for routed units, unless other units need it."""
        others = self._others_nbytes
        room = 2 * max((self.nbytes[unit] for unit in self.routed), default=0)
        coming = self._turns_nbytes + sum(map(self._coming_nbytes, self.routed))
        room = max(room, min(coming, self.capacity_nbytes // 2))
        if self.together_nbytes + others <= self.capacity_nbytes:
            room = max(room, self.together_nbytes)
        return max(self.capacity_nbytes - room, min(others, self.capacity_nbytes))

    @property
    def _others_nbytes(self) -> int:
        """The least that plans need."""
        return 2 * max((self.nbytes[unit] for unit in self.nbytes.keys() - self.routed), default=0)

    def _write_down(self, unit: int, recomputed: bool) -> None:
        """Backward will use ``unit``, and before that what is used after it; see [Note: routed units]."""
        if recomputed and not self._recomputing:  # a block begins
            place = _last(self._to_come, unit)
            self._recomputed = len(self._to_come) if place is None else place
            del self._to_come[self._recomputed :]
        elif not recomputed:
            self._recomputed = 0
        self._recomputing = recomputed
        self._to_come.append(unit)

    def _before(self, unit: int) -> Sequence[int]:
        """Routed units that backward uses after ``unit``, as many as memory has room for."""
        self._recomputing = False
        place = _last(self._to_come, unit)
        if place is not None:
            del self._to_come[place:]
        found, room, known = {unit: None}, self.capacity_nbytes, self._coming
        in_order = max(0, len(self._to_come) - self._recomputed)  # below: a block that is not recomputed
        for each in islice(reversed(self._to_come), in_order):
            if each not in found:
                room -= known.get(each) or self._coming_nbytes(each)
                if room < 0:
                    break
                found[each] = None
        del found[unit]
        return list(found)

    def _use_routed(self, unit: int, following: Sequence[int]) -> None:
        """See [Note: routed units]."""
        if self.running is self.training:
            self.routed_used.add(unit)
        if unit not in self.present:
            self._make_room(unit)
            self._start_routed(unit)
        self._unforeseen[unit] = None
        self.present.move_to_end(unit)
        nearest = [unit, *following[: self._turns - 1]]
        if not self._keeps_decoded:
            for other in [each for each in self._decoded if each not in nearest]:
                self._release_decoded(other)
        self._decode(unit)
        self._bring_ahead(following, {unit, *following})
        if not following:
            later = self._later
            self._fetch_later()
            self._later = [each for each in later if each not in self.present]  # the tile is in their place
        for coming in nearest[1:]:
            if coming in self.present and self._fits(self._full_nbytes(coming)):
                self._decode(coming)
        self.mover.finish(unit)

    def _bring_ahead(self, following: Sequence[int], wanted: Collection[int]) -> None:
        """Start units that are used next, as far as there is room beside those that are decoded."""
        going: list[int] | None = None
        for coming in following:
            if coming in self.present:
                continue
            if going is None:  # while there is no plan, what others leave behind is in the way, too
                known = self._to_go() if self.running.plan is None else list(self._unforeseen)
                going = [unit for unit in reversed(known) if unit not in wanted]
            nbytes = self._coming_nbytes(coming) + self._reserved_nbytes
            while going and not self._fits(nbytes):
                self._release_all([going.pop()])
            if not self._fits(nbytes):
                break
            self._start_routed(coming)

    def _decode(self, unit: int) -> None:
        """Have a unit decoded whose stored bytes came first."""
        if unit in self._decoded or self._held[unit] == self.nbytes[unit]:
            return
        nbytes = self._full_nbytes(unit)
        going = [] if self._fits(nbytes) else [each for each in self._to_go() if each != unit]
        for other in going:
            if self._fits(nbytes):
                break
            self._release_all([other])
        self._decoded[unit] = nbytes
        self._held[unit] += nbytes
        self._present_nbytes += nbytes
        self.mover.decode(unit)

    def _release_decoded(self, unit: int) -> None:
        if self.pins.get(unit):
            return
        nbytes = self._decoded.pop(unit)
        self._held[unit] -= nbytes
        self._present_nbytes -= nbytes
        self.mover.release_decoded(unit)

    def _coming_nbytes(self, unit: int) -> int:
        """What a routed unit takes when it is brought (bytes)."""
        nbytes = self._coming.get(unit)
        if nbytes is None:
            nbytes = self._coming[unit] = self.mover.stored_nbytes(unit) or self.nbytes[unit]
        return nbytes

    def _full_nbytes(self, unit: int) -> int:
        """What decoding takes more; 0: it comes in one step."""
        return self.nbytes[unit] - self._coming_nbytes(unit)

    @property
    def _reserved_nbytes(self) -> int:
        """Room that is kept for full buffers that take turns, beyond those that are there."""
        return max(0, self._turns_nbytes - sum(self._decoded.values()))

    @property
    def _turns_nbytes(self) -> int:
        return self._turns * self._turn_nbytes

    @property
    def _turn_nbytes(self) -> int:
        """Of the largest full buffer that stored bytes are decoded into; 0: there are none."""
        if self._largest_full is None:
            self._largest_full = max((self._full_nbytes(unit) for unit in self.routed), default=0)
        return self._largest_full

    @property
    def _turns(self) -> int:
        """Full buffers that take turns."""
        full = self._turn_nbytes
        if not full:
            return 1 + DECODED_AHEAD
        ahead = max(DECODED_AHEAD, DECODED_AHEAD_NBYTES // full)
        return max(2, min(1 + ahead, self.capacity_nbytes // 2 // full))

    def _start_routed(self, unit: int) -> None:
        if self.running is self.visit:
            self.planned = None
        self._expect(unit)
        nbytes = self._coming_nbytes(unit)
        self._start(unit, stored_nbytes=nbytes if nbytes < self.nbytes[unit] else 0)
        self._unforeseen[unit] = None

    def _begin(self) -> None:
        """Before the first event of a pass: bring in its nearest future."""
        running = self.running
        if running.begun or running.plan is None or running.position:
            return
        running.begun = True
        if running is not self.training:  # between backward and step the committed version is wanted
            for unit in [unit for unit in self.present if unit in self.staying]:
                self._release(unit)  # also the one whose use begins the pass
        wanted = set(running.plan.begin)
        self._release_all([unit for unit in self.present if unit not in wanted])
        for unit in running.plan.begin:
            if unit not in self.present:
                self._expect(unit)
            elif unit in self.staying:
                self.staying.discard(unit)
                self.mover.start(unit)
            self._prefetch(unit)

    def _advance(self, event: Event) -> None:
        """Write the event down; when it was foreseen, do what the plan says after it."""
        over = self.running.align(event)
        release, fetch = self._actions(over)
        self._release_all(release)
        if self.routed and event.kind is Kind.UNPIN and self.running is self.training:
            for unit in fetch:
                self._expect(unit)
            self._later = [unit for unit in self._later if unit not in release] + fetch
        else:
            self._fetch_all(fetch)

    def _actions(self, over: range) -> tuple[list[int], list[int]]:
        """Return the plan's releases and fetches at these positions, taken together."""
        if self.running.plan is None:
            return [], []
        if len(over) != 1:
            self.planned = None  # from here on the plan's bytes are not this pass's
        release: dict[int, None] = {}
        fetch: dict[int, None] = {}
        for position in over:
            actions = self.running.plan.actions[position]
            for unit in actions.release:
                fetch.pop(unit, None)
                release[unit] = None
            for unit in actions.fetch:
                release.pop(unit, None)
                fetch[unit] = None
        return list(release), list(fetch)

    def _release_all(self, units: Iterable[int]) -> None:
        for unit in units:
            if unit in self.present and not self.pins.get(unit):
                self._release(unit)

    def _fetch_all(self, units: Iterable[int]) -> None:
        for unit in units:
            self._expect(unit)
            self._prefetch(unit)

    def _fetch_later(self) -> None:
        """Start the fetches that were put off; see [Note: routed units]."""
        if self._later:
            later, self._later = self._later, []
            for unit in later:
                self._prefetch(unit)

    def _count_unforeseen(self, unit: int) -> None:
        self.planned = None
        if self.running.plan is not None:
            self.on_demand += 1
        if self.running.plan is not None or self.running is not self.training:
            self._unforeseen[unit] = None

    def _prefetch(self, unit: int) -> None:
        """Start what the plan wants, if it fits beside what the plan has."""
        self._unforeseen.pop(unit, None)
        if unit in self.present:
            return
        self._evict(list(self._unforeseen), unit)
        if self._fits(self.nbytes[unit]):
            self._start(unit)

    def _make_room(self, unit: int) -> None:
        """Release others until ``unit`` fits."""
        if not self._fits(self.nbytes[unit]):
            self._evict(self._to_go(), unit)

    def _to_go(self) -> list[int]:
        """What is present, as it is released: what no plan wants, then the least recently used.

        While there is no plan, ordinary units go before tiles, which are known to be used again.
        """
        if self.running.plan is None:
            return [*(unit for unit in self.present if unit not in self.routed), *self._unforeseen]
        return [*self._unforeseen, *self.present]

    def _evict(self, candidates: Iterable[int], unit: int) -> None:
        """Release candidates that are not pinned, in their order, until ``unit`` fits."""
        for other in candidates:
            if unit in self.present or self._fits(self.nbytes[unit]):
                return
            self._release_all([other])

    def _fits(self, nbytes: int) -> bool:
        return self._present_nbytes + nbytes + self.lent_nbytes <= self.capacity_nbytes

    def _start(self, unit: int, stored_nbytes: int = 0) -> None:
        if unit not in self.present:
            self._held[unit] = stored_nbytes or self.nbytes[unit]
            self._present_nbytes += self._held[unit]
        self.present[unit] = None
        if stored_nbytes:
            self.mover.start_stored(unit)
        else:
            self.mover.start(unit)

    def _expect(self, unit: int) -> None:
        if self.planned is not None:
            self.planned.append(unit)

    def _release(self, unit: int) -> None:
        self._drop(unit)
        self.staying.discard(unit)
        self.mover.release(unit)

    def _drop(self, unit: int) -> None:
        if unit in self.present:
            del self.present[unit]
            self._present_nbytes -= self._held.pop(unit)
            self._decoded.pop(unit, None)
            self._coming.pop(unit, None)  # what was written has a home of its own, and no stored form
        self._unforeseen.pop(unit, None)


def _last(units: Sequence[int], unit: int) -> int | None:
    """Where ``unit`` is the last time; None: nowhere."""
    return next((at for at in range(len(units) - 1, -1, -1) if units[at] == unit), None)


class BackwardPins:
    """Units that a backward pass uses, each until its last reader in that pass is done.

    Args:
        prefetcher: Serves uses, and has room.
    """

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher = prefetcher
        #: In the order in which they came, each with the number of the autograd node that reads it; None: a
        #: recomputed forward does.
        self._kept: dict[int, Any] = {}
        self._node: Any = None  # the autograd node that read frozen units last,
        self._read: list[int] = []  # and which ones

    def __contains__(self, index: int) -> bool:
        """Whether the unit is kept until its gradients are complete."""
        return index in self._kept

    def recomputed(self, index: int) -> bool:
        """Whether a recomputed forward reads the unit."""
        return self._kept.get(index, self) is None

    def keep(self, index: int, node: Any, *, to_the_end: bool = False) -> None:
        """Use a unit until its gradients are complete, or until room is short.

        Args:
            node: Number of the autograd node that reads it, or for which it is recomputed.
            to_the_end: A recomputed forward or a leaf reads it, and needs it whether room is short or not.
        """
        if to_the_end:
            self._reach(node)
        if index in self._kept:
            if self._kept[index] is not None:
                self._kept[index] = None if to_the_end else node
            return
        self.make_room(index, node)
        self._kept[index] = None if to_the_end else node
        self._prefetcher.use(index)

    def make_room(self, index: int, node: Any) -> None:
        """Release what need not be kept, where a unit that is to be used does not fit beside it.

        Args:
            node: Number of the autograd node that reads it, or for which it is recomputed.
        """
        if index in self._kept or index in self._read:
            return
        if not self._prefetcher.holds([*self._kept, *self._read, index]):
            self._reach(node)
        for earlier, reader in list(self._kept.items()):
            if self._prefetcher.holds([*self._kept, *self._read, index]):
                break
            if reader is not None and reader != node:  # kept for its update only, which can read it again
                self.unpin(earlier)

    def shrink(self) -> None:
        """Release what need not be kept, where it does not fit any more; between two autograd nodes."""
        for earlier, reader in list(self._kept.items()):
            if self._prefetcher.holds([*self._kept, *self._read]):
                break
            if reader is not None:
                self.unpin(earlier)

    def keep_for(self, node: Any, index: int) -> None:
        """Use a unit without gradients until another node reads one."""
        self._reach(node)
        if index not in self._read:
            self.make_room(index, node)
            self._read.append(index)
            self._prefetcher.use(index)

    def _reach(self, node: Any) -> None:
        """Release units without gradients that an earlier node read: no other one reads them."""
        if node != self._node:
            for read in self._read:
                self._prefetcher.unpin(read)
            self._node, self._read = node, []

    def unpin(self, index: int) -> None:
        """Release a unit that is not read any more, and whose weights stay."""
        if index in self._kept:
            del self._kept[index]
            self._prefetcher.unpin(index)

    def forget(self, index: int) -> None:
        """Forget a unit whose gradients are complete, and whose weights went to the update."""
        self._kept.pop(index, None)

    def drop(self) -> None:
        """Release every unit at the end of the backward pass."""
        for index in [*self._kept, *self._read]:
            self._prefetcher.unpin(index)
        self._kept.clear()
        self._node, self._read = None, []
