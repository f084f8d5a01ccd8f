"""Prefetches units ahead of their use by a recorded plan, and serves on demand what the plan did not foresee.

[Note: passes]
A training pass lasts from one optimizer step to the next; an inference pass is one outermost call without
gradients. Each kind has its own trace and plan. A visit is neither: a few values are read (``gathered``,
``state_dict``), and no plan follows from it.

[Note: the same on every rank]
Every decision here depends on events and sizes only, never on what has already arrived. So ranks that run the
same modules start the same gathers in the same order.

[Note: what stays while it is updated]
If the plan begins with a unit and there is room, its buffer stays when its gradients are complete, and the
update writes the new weights there. A use before the next pass releases it and gets the committed version.

[Note: what the plan did not foresee]
An event that is not the plan's next one is served on demand, and the plan waits: often a use was added. If
the last few events occur together later in the plan, something was left out, and it goes on from there. The
new trace becomes the plan of the next pass.

[Note: tiles of experts]
Which tiles a step uses depends on its batch, so plans have none. A use of one tells those that follow it,
which begin to arrive as far as there is room. Backward uses tiles in reverse: uses in forward are written
down, and crossed out as backward comes to them. A block that is recomputed uses its tiles anew, in place of
what forward wrote down, in another order; so they are not brought before. Tiles are the first to go. Plans
leave them a quarter of the room beside full buffers (more of a small one), or all that they need, or, where
micro-batches use them one after another before the next block, room for those of a block.

Before the router of a block has chosen, tiles that both steps before used there are expected again: they come
after the last tile of the block before, as far as the plan leaves room, and go first if not chosen. What the
plan fetches when a unit is released comes before them, or with the next planned use.

A tile in a stored form is two items, the second made of the first: stored bytes come as far ahead as memory
has room, full values for this use and the next few. Where micro-batches go through a block together, its
tiles are decoded once in backward, if memory holds all of them so.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from infinity.partition.mover import Item, Stored, UnitMover
from infinity.planner.prefetch_plan import Event, Kind, Plan, make_plan
from infinity.planner.updates import StepOrder, TileOrder

#: Tiles decoded before their turn: as many, or as many bytes if these are more; some ms of a thread's work.
DECODED_AHEAD = 4
DECODED_AHEAD_NBYTES = 2**26
#: The room for tiles that no plan takes, if it is no more than half: it keeps a drive busy for 0.1 s.
TILES_NBYTES = 2**28
#: Events that must follow each other as in the plan before it goes on elsewhere.
CONTEXT = 3


class ResidentSet:
    """Knows the items in memory or on their way there, and decides which go.

    ``release`` is called with an item that goes, and must :meth:`discard` it.
    """

    def __init__(self, capacity_nbytes: int, release: Callable[[Item], None]) -> None:
        self.capacity_nbytes, self._release = capacity_nbytes, release
        self.present: OrderedDict[Item, int] = OrderedDict()  # bytes of each, least recently used first
        self.pins: dict[Item, int] = {}  # users of each; an item in use is not released
        self.spare: dict[Item, None] = {}  # present, and no plan wants them: the first to go
        self.nbytes = 0
        self.borrowed_nbytes = 0  # the part of the capacity that others have for a while

    def __contains__(self, item: Item) -> bool:
        return item in self.present

    def __iter__(self) -> Iterator[Item]:
        return iter([*self.present])

    def fits(self, nbytes: int) -> bool:
        return self.nbytes + nbytes + self.borrowed_nbytes <= self.capacity_nbytes

    def add(self, item: Item, nbytes: int) -> None:
        self.present[item] = nbytes
        self.nbytes += nbytes

    def discard(self, item: Item) -> None:
        self.nbytes -= self.present.pop(item, 0)
        self.spare.pop(item, None)

    def pin(self, item: Item) -> None:
        self.pins[item] = self.pins.get(item, 0) + 1

    def unpin(self, item: Item) -> bool:
        """Take back one pin; return whether there was one."""
        if self.pins.get(item, 0):
            self.pins[item] -= 1
            return True
        return False

    def release(self, items: Iterable[Item]) -> None:
        """Release each of ``items`` that is present and not in use."""
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

    def to_go(self, *, spare: bool = True, others: bool = True) -> Iterator[Item]:
        """Yield present items in the order of release: what no plan wants, then the least recently used."""
        yield from [*self.spare] if spare else ()
        yield from [*self.present] if others else ()


class Pass:
    """Follows one kind of pass: its plan, and the position in it."""

    def __init__(self) -> None:
        self.follow(None)
        self.restart()

    def follow(self, plan: Plan | None) -> None:
        self.plan = plan
        self._places: dict[tuple[Event, ...], list[int]] = {}  # where each context ends in the plan

    def restart(self) -> None:
        self.trace: list[Event] = []
        self.cursor = 0  # the plan's next event
        self.begun = False
        self.on_demand = 0  # uses that no plan foresaw
        #: The units that the plan fetches; None: there is none, or the pass has left it.
        self.fetched: list[int] | None = None if self.plan is None else []

    @property
    def position(self) -> int:
        return len(self.trace)

    def foresees(self, event: Event) -> bool:
        return self.plan is not None and self.plan.events[self.cursor : self.cursor + 1] == (event,)

    def align(self, event: Event) -> range:
        """Record ``event``; return the positions of the plan that are over with it, none when unforeseen."""
        self.trace.append(event)
        plan, begin = self.plan, self.cursor
        if plan is not None and self.foresees(event):
            self.trace[-1] = plan.events[begin]  # equal events of all passes are one object
            self.cursor += 1
        elif plan is not None and len(self.trace) >= CONTEXT:
            if not self._places:
                for i in range(CONTEXT, len(plan.events) + 1):
                    self._places.setdefault(plan.events[i - CONTEXT : i], []).append(i - 1)
            places = self._places.get(tuple(self.trace[-CONTEXT:]), [])
            nearest = bisect_left(places, begin)
            if nearest < len(places):
                self.cursor = places[nearest] + 1
        return range(begin, self.cursor)


class TileRoom:
    """Counts the part of a capacity that tiles take: bytes of units, and of tiles as they begin to arrive."""

    def __init__(self, nbytes: Mapping[int, int], stored: Mapping[int, int], capacity_nbytes: int) -> None:
        self._nbytes, self.stored, self._capacity_nbytes = nbytes, stored, capacity_nbytes
        self.keeps_decoded = False  # from one use in a block to the next
        self.together_nbytes = 0  # of tiles that a block uses when it is recomputed, and again in backward
        self.decoded: dict[int, int] = {}  # bytes of full buffers, present, that were made of stored bytes
        self.items = {tile: Stored(tile) for tile in stored}
        #: The largest full buffer that stored bytes are decoded into; 0: there are none.
        self.slot_nbytes = max((nbytes[tile] - stored[tile] for tile in stored), default=0)
        self.slots = 1 + DECODED_AHEAD  # full buffers that take turns
        if self.slot_nbytes:
            ahead = max(DECODED_AHEAD, DECODED_AHEAD_NBYTES // self.slot_nbytes)
            self.slots = max(2, min(1 + ahead, capacity_nbytes // 2 // self.slot_nbytes))
        self.slots_nbytes = self.slots * self.slot_nbytes
        #: What plans leave to tiles in any case: room for two, and beside full buffers for more to come.
        most = min(capacity_nbytes // 2, self.slots_nbytes + max(capacity_nbytes // 4, TILES_NBYTES))
        least = 2 * max((nbytes[tile] for tile in stored), default=0)
        self._tiles_nbytes = max(least, min(self.slots_nbytes + sum(stored.values()), most))
        #: The least that plans need.
        self._others_nbytes = 2 * max((nbytes[unit] for unit in nbytes.keys() - stored), default=0)

    def hold_together(self, tiles: Iterable[Collection[int]]) -> None:
        """Leave room in plans for any one of these sets of tiles: decoded if they fit, else stored."""
        sets = [self.stored.keys() & each for each in tiles]
        decoded = max((sum(self._nbytes[tile] for tile in each) for each in sets), default=0)
        stored = max((sum(self.stored[tile] for tile in each) for each in sets), default=0)
        self.keeps_decoded = 0 < decoded <= self._capacity_nbytes - self._others_nbytes
        self.together_nbytes = decoded if self.keeps_decoded else stored and stored + self.slots_nbytes

    @property
    def part_nbytes(self) -> int:
        """Return the room for stored bytes of one part's tiles; small if all of a block's stay."""
        room_nbytes = max(0, self._capacity_nbytes - self.planned_nbytes - self.slots_nbytes)
        return room_nbytes // (8 if self.together_nbytes else 2)

    @property
    def planned_nbytes(self) -> int:
        """Return the bytes that plans may take: all but the room for tiles, unless other units need it."""
        room = self._tiles_nbytes
        if self.together_nbytes + self._others_nbytes <= self._capacity_nbytes:
            room = max(room, self.together_nbytes)
        return max(self._capacity_nbytes - room, min(self._others_nbytes, self._capacity_nbytes))


class Prefetcher:
    """Keeps the units that the running pass uses next in memory.

    ``nbytes`` has the size of each streaming unit's full buffer, with what it is decoded from. ``can_stay``
    units may be updated where they are; ``routed`` are tiles, see [Note: tiles of experts].
    """

    def __init__(
        self, mover: UnitMover, nbytes: Mapping[int, int], capacity_nbytes: int,
        can_stay: Collection[int] = (), order: StepOrder | None = None, routed: Collection[int] = (),
    ) -> None:  # fmt: skip
        self.mover, self.nbytes, self.can_stay, self.order = mover, nbytes, can_stay, order or StepOrder()
        self.residents = ResidentSet(capacity_nbytes, self._release)
        self.tiles, self.room = TileOrder(), self._make_tile_room(routed)
        self.staying: set[int] = set()  # present, being updated, and not for use before the next pass
        self._later: list[int] = []  # fetches of the plan that were put off
        self.training, self.inference = Pass(), Pass()
        self.running = self.training  # or a visit

    def _make_tile_room(self, tiles: Collection[int]) -> TileRoom:
        stored = {tile: self.mover.stored_nbytes(tile) or self.nbytes[tile] for tile in tiles}
        return TileRoom(self.nbytes, stored, self.residents.capacity_nbytes)

    @property
    def routed(self) -> Collection[int]:
        return self.room.stored.keys()

    def use(self, unit: int, following: Sequence[int] | None = None, *, recomputed: bool = False) -> None:
        """Gather and pin ``unit`` before this returns; then look ahead.

        ``following`` are the tiles that are used after a tile, None in backward; ``recomputed``: the use of a
        tile is one of a forward inside backward.
        """
        self.residents.pin(unit)
        try:
            self._begin()
            if unit in self.routed:
                self._use_tile(unit, self._follow(unit, following, recomputed), recomputed)
            else:
                self._use_planned(unit)
            self.mover.finish(unit)
        except Exception:  # the caller does not unpin it, and the next use reads it again
            self.residents.unpin(unit)
            self.residents.release([unit, Stored(unit)])
            raise

    def _use_planned(self, unit: int) -> None:
        residents, running = self.residents, self.running
        self._fetch_later()
        if unit in self.staying:
            self._release(unit)  # its buffer will hold the next version; the committed one is wanted
        over = running.align(Event(Kind.USE, unit))
        release, fetch = self._actions(over)
        residents.release(release)
        if unit not in residents:
            planned = unit in fetch
            if not planned:
                self.training.fetched = None
                self.training.on_demand += running.plan is not None
            residents.make_room(self.nbytes[unit], self._to_go())
            self._start(unit, self.nbytes[unit])
            if not planned and (running is not self.training or running.plan is not None):
                residents.spare[unit] = None
        elif over:
            residents.spare.pop(unit, None)
        residents.present.move_to_end(unit)
        for each in fetch:
            self._prefetch(each)

    def unpin(self, unit: int) -> None:
        if self.residents.unpin(unit) and unit not in self.routed:
            self._advance(Event(Kind.UNPIN, unit))

    def stays(self, unit: int) -> bool:
        """Return whether ``unit``, whose gradients are complete now, is to be updated where it is."""
        running = self.running
        if running.plan is None or unit not in running.plan.stays or unit not in self.residents:
            return False
        return unit in self.can_stay and running.foresees(Event(Kind.DONE, unit))

    def done(self, unit: int) -> None:
        """Take note that ``unit``'s gradients are complete; the mover has taken its weights, or it stays."""
        self.residents.pins.pop(unit, None)
        if self.stays(unit):
            self.staying.add(unit)
        else:
            self.residents.discard(unit)
        if unit not in self.routed:
            self._advance(Event(Kind.DONE, unit))

    def end_training_pass(self) -> None:
        """Begin a new training pass after an optimizer step, and fetch its first units."""
        self._fetch_later()
        self._conclude(self.training)
        self.tiles = TileOrder(self.tiles.calls, self.tiles.last)
        if self.running is self.training:
            self._begin()

    def begin_inference(self, *, visit: bool = False) -> None:
        """Begin an inference pass, or a visit, which lasts until :meth:`end_inference`."""
        self._fetch_later()
        self.running = Pass() if visit else self.inference

    @contextmanager
    def visiting(self) -> Iterator[None]:
        outer = self.running
        self.begin_inference(visit=True)
        try:
            yield
        finally:
            self.end_inference()
            self.running = outer

    def end_inference(self) -> None:
        """Return to the training pass, which begins again at the next use if it had not begun."""
        if self.running is self.inference:
            self._conclude(self.inference)
            if self.training.position:  # in the middle of a step: what inference left is in the way
                left = (item for item in self.residents if not self.residents.pins.get(item))
                self.residents.spare.update(dict.fromkeys(left))
        self.running = self.training
        self.training.begun = bool(self.training.position)

    def forget(self, units: Iterable[int] | None = None) -> None:
        """Release ``units`` (None: everything) that are present: their copies are stale."""
        stale = None if units is None else set(units)
        if self.mover.kept is not None:
            self.mover.kept.forget(stale)
        self.residents.release([item for item in self.residents if stale is None or _unit_of(item) in stale])

    def resize(self, capacity_nbytes: int) -> None:
        """Keep within another capacity; plans for the old one are forgotten."""
        self.forget()
        if self.mover.kept is not None:
            self.mover.kept.choose()
        self.residents.capacity_nbytes = capacity_nbytes
        self.room = self._make_tile_room(self.routed)
        self.training.follow(None)
        self.inference.follow(None)
        self.order.gradients = ()

    def hold_blocks(self, capacity_nbytes: int, tiles: Iterable[Collection[int]]) -> None:
        """Keep within another capacity, and leave room in plans for any one of these sets of tiles."""
        self.residents.capacity_nbytes = capacity_nbytes
        self.room = self._make_tile_room(self.routed)
        self.room.hold_together(tiles)

    def lend(self, nbytes: int) -> None:
        """Lend ``nbytes`` of the capacity to gradients until the next call; release what is not in use."""
        self.residents.borrowed_nbytes = nbytes
        self.residents.make_room(0, self._to_go())

    def streams(self, unit: int) -> bool:
        """Return whether the unit's full values come and go; otherwise they are always in memory."""
        return unit in self.nbytes

    def holds(self, units: Iterable[int]) -> bool:
        nbytes = self.residents.borrowed_nbytes + sum(self.nbytes[unit] for unit in units)
        return nbytes <= self.residents.capacity_nbytes

    def _conclude(self, ended: Pass) -> None:
        events = tuple(ended.trace)
        if events and (ended.plan is None or ended.plan.events != events):
            ended.follow(make_plan(events, self.nbytes, self.room.planned_nbytes, can_stay=self.can_stay))
            if ended is self.training:
                self.order.learn(events)
        ended.restart()

    def _begin(self) -> None:
        """Bring in the nearest future of a pass, before its first event."""
        running = self.running
        if running.begun or running.plan is None or running.position:
            return
        running.begun = True
        if running is not self.training:  # between backward and step the committed version is wanted
            for unit in [unit for unit in self.residents if unit in self.staying]:
                self._release(unit)  # also the one whose use begins the pass
        wanted, units = set(running.plan.begin), self.mover.units
        for item in self.residents:  # frozen tiles stay, and are the first to go
            if item not in wanted and (_unit_of(item) not in self.routed or units[_unit_of(item)].trainable):
                self.residents.release([item])
        for unit in running.plan.begin:
            if unit not in self.residents:
                self._expect(unit)
            elif unit in self.staying:
                self.staying.discard(unit)
                self.mover.start(unit)
            self._prefetch(unit)
        self._bring_expected()

    def _advance(self, event: Event) -> None:
        release, fetch = self._actions(self.running.align(event))
        self.residents.release(release)
        if self.routed and event.kind is Kind.UNPIN and self.running is self.training:
            self._later = [unit for unit in self._later if unit not in release] + fetch
            return
        for unit in fetch:
            self._prefetch(unit)

    def _actions(self, over: range) -> tuple[list[int], list[int]]:
        """Return the plan's releases and fetches at these positions, taken together."""
        release: dict[int, None] = {}
        fetch: dict[int, None] = {}
        plan = self.running.plan
        if plan is not None and len(over) != 1:
            self.training.fetched = None  # from here on the plan's bytes are not this pass's
        for actions in plan.actions[over.start : over.stop] if plan is not None else ():
            for unit in actions.release:
                fetch.pop(unit, None)
                release[unit] = None
            for unit in actions.fetch:
                release.pop(unit, None)
                fetch[unit] = None
        self._expect(*fetch)
        return list(release), list(fetch)

    def _expect(self, *units: int) -> None:
        if self.training.fetched is not None:
            self.training.fetched += units

    def _fetch_later(self) -> None:
        """Start the fetches that were put off; see [Note: tiles of experts]."""
        while self._later:
            self._prefetch(self._later.pop(0))

    def _prefetch(self, unit: int) -> None:
        """Start what the plan wants, if it fits beside what the plan has."""
        residents = self.residents
        residents.spare.pop(unit, None)
        if unit not in residents and residents.make_room(self.nbytes[unit], residents.to_go(others=False)):
            self._start(unit, self.nbytes[unit])

    def _follow(self, tile: int, following: Sequence[int] | None, recomputed: bool) -> Sequence[int]:
        """Return the tiles that are used after ``tile``, of backward as many as memory has room for."""
        if self.running is self.training:
            self.tiles.used.add(tile)
            if following is not None:
                self.tiles.note(tile, following, recomputed=recomputed)
        if following is not None:
            return following
        found, left_nbytes = [], self.residents.capacity_nbytes
        for each in self.tiles.after(tile):
            left_nbytes -= self.room.stored[each]
            if left_nbytes < 0:
                break
            found.append(each)
        return found

    def _use_tile(self, tile: int, following: Sequence[int], recomputed: bool) -> None:
        residents, room = self.residents, self.room
        if not self._has(tile):
            residents.make_room(self.nbytes[tile], self._to_go())
            self._start_tile(tile, *self._first(tile))
        first = room.items[tile] if room.items[tile] in residents else tile
        residents.spare[first] = None
        nearest = [tile, *following[: room.slots - 1]]
        if not room.keeps_decoded:
            residents.release([each for each in room.decoded if each not in nearest])
        self._decode(tile)
        self._bring([tile, *following])
        if not following:
            later = [*self._later]
            self._fetch_later()
            self._later = [each for each in later if each not in residents]  # the tile has their place
            if not recomputed:
                self._bring_expected()
        for coming in nearest[1:]:
            waits = self._has(coming) and coming not in residents
            if waits and residents.fits(self._decoding_nbytes(coming)):
                self._decode(coming)

    def _bring_expected(self) -> None:
        """Start tiles that are likely to be used next, in room that the plan never takes."""
        plan, present = self.training.plan, self.residents.present
        if self.running is self.training and plan is not None:
            planned = sum(nbytes for item, nbytes in present.items() if _unit_of(item) not in self.routed)
            self._bring(self.tiles.expected(), max(0, plan.peak_nbytes - planned))

    def _bring(self, tiles: Sequence[int], free_nbytes: int = 0) -> None:
        """Start ``tiles``, as far as there is room beside those that are present and ``free_nbytes``."""
        residents, room = self.residents, self.room
        # While there is no plan, what others leave behind is in the way, too.
        known = self._to_go() if self.running.plan is None else residents.to_go(others=False)
        stay: set[Item] = {*tiles, *(room.items[each] for each in tiles if room.slot_nbytes)}
        going = (item for item in known if item not in stay)
        for tile in tiles:
            if not self._has(tile):
                item, nbytes = self._first(tile)
                reserved_nbytes = max(0, room.slots_nbytes - sum(room.decoded.values()))
                if not residents.make_room(nbytes + reserved_nbytes + free_nbytes, going):
                    break
                self._start_tile(tile, item, nbytes)

    def _has(self, tile: int) -> bool:
        return tile in self.residents or self.room.items[tile] in self.residents

    def _first(self, tile: int) -> tuple[Item, int]:
        stored_nbytes, nbytes = self.mover.stored_nbytes(tile), self.nbytes[tile]
        return (self.room.items[tile], stored_nbytes) if 0 < stored_nbytes < nbytes else (tile, nbytes)

    def _start_tile(self, tile: int, item: Item, nbytes: int) -> None:
        if self.running not in (self.training, self.inference):
            self.training.fetched = None
        self._expect(tile)
        self._start(item, nbytes)
        self.residents.spare[item] = None

    def _decode(self, tile: int) -> None:
        if tile not in self.residents:
            stored, nbytes = self.room.items[tile], self._decoding_nbytes(tile)
            self.residents.make_room(nbytes, (item for item in self._to_go() if item != stored))
            self.room.decoded[tile] = nbytes
            self._start(tile, nbytes)

    def _decoding_nbytes(self, tile: int) -> int:
        """Return the bytes that decoding takes beyond the stored bytes, which are present."""
        return self.nbytes[tile] - self.residents.present[self.room.items[tile]]

    def _to_go(self) -> Iterator[Item]:
        """Yield what is present in the order of release.

        Without a plan that is the order in which tiles came, and others were used last.
        """
        return self.residents.to_go(spare=self.running.plan is not None)

    def _start(self, item: Item, nbytes: int) -> None:
        self.residents.add(item, nbytes)
        self.mover.start(item)

    def _release(self, item: Item) -> None:
        if isinstance(item, Stored):
            if self.residents.pins.get(item.unit):
                return
            if item.unit in self.residents:
                self._release(item.unit)
        else:
            self.staying.discard(item)
            self.room.decoded.pop(item, None)
        self.residents.discard(item)
        self.mover.release(item)


def _unit_of(item: Item) -> int:
    return item.unit if isinstance(item, Stored) else item


class BackwardPins:
    """Keeps each unit that a backward pass uses until its last reader in that pass is done.

    ``node`` is the number of the autograd node that reads a unit, or for which it is recomputed.
    """

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher = prefetcher
        #: In the order in which they came, each with the node that reads it; None: a recomputed forward does.
        self._kept: dict[int, int | None] = {}
        self._node: int | None = None  # the autograd node that read frozen units last,
        self._read: list[int] = []  # and which ones
        self.frozen: set[int] = set()  # units without a trained parameter, since autograd recorded a forward

    def recomputed(self, index: int) -> bool:
        return index in self._kept and self._kept[index] is None

    def keep(self, index: int, node: Any, *, to_the_end: bool = False) -> None:
        """Use a unit until its gradients are complete; without ``to_the_end`` at most until room is short."""
        if to_the_end:
            self._reach(node)
        reader = None if to_the_end else node
        if index not in self._kept:
            self.make_room(index, node)
            self._kept[index] = reader
            self._prefetcher.use(index)
        elif self._kept[index] is not None:
            self._kept[index] = reader

    def keep_for(self, index: int, node: Any) -> None:
        """Use a unit without gradients until another node reads one."""
        self._reach(node)
        if index not in self._read:
            self.make_room(index, node)
            self._read.append(index)
            self._prefetcher.use(index)

    def make_room(self, index: int, node: Any) -> None:
        """Release units that need not be kept, if unit ``index`` does not fit beside them."""
        if index not in self._kept and index not in self._read:
            if not self._prefetcher.holds([*self._kept, *self._read, index]):
                self._reach(node)
            self.shrink([index], node)

    def shrink(self, beside: Sequence[int] = (), node: Any = None) -> None:
        """Release units that need not be kept and that ``node`` does not read, if they no longer fit."""
        for earlier, reader in list(self._kept.items()):
            if self._prefetcher.holds([*self._kept, *self._read, *beside]):
                break
            if reader is not None and reader != node:  # kept for its update only, which can read it again
                self.unpin(earlier)

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
        for index in [*self._kept, *self._read]:
            self._prefetcher.unpin(index)
        self._kept.clear()
        self._node, self._read = None, []
