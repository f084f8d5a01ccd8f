"""Decide about updates, without threads: when a gradient is complete, what follows, and where.

Training drives these decisions with threads, streams and engines (:mod:`infinity.shards.updates`,
:mod:`infinity.shards.pipeline`), a plan with a virtual clock (:mod:`infinity.predict.play`). Both tell what
has happened, and carry out the actions that are returned. Orders in which a step uses units are here, too.

[Note: when gradients are complete] A unit's gradient is complete when all its trainable parameters have
fired, or backward ends. Then nothing in this step reads the unit's weights any more, and they go to the
update with the gradient. So it is later:

- for what is gathered as one (a leaf): when backward leaves its module;
- for a unit that is recomputed and partly frozen: at the end of the pass, since the recomputed forward reads
  all parameters, and the last gradient is not the last read;
- under ``no_sync``: only a micro-batch's gradients are complete, no gradient of the step is.

[Note: when an update starts] With two versions a unit's update starts inside backward, as soon as its
gradient exists: it reads the committed version and writes the next, which ``step`` publishes. Otherwise
updates start at ``step``. Either way they lag into the next forward, in the order in which it needs units: a
unit's next fetch waits for its own update.

[Note: speculation] The clip coefficient depends on the norm of all gradients, which is known at ``step``. An
update inside backward takes it to be 1. If it is, ``step`` validates the update. If not, or if
``param_groups`` changed, the update is rolled back and starts again from the committed version. So gradients
are kept until ``step``, except by an optimizer that never clips. While speculation is predicted to be wrong,
updates of an optimizer that clips start at ``step``.

[Note: gradients on NVMe] Where memory is too small for all gradients that wait for ``step``, those of some
units are written to NVMe as soon as they are complete; their memory is given back when an update inside
backward has read it, too. An update at ``step`` reads its gradient from NVMe, chunk by chunk, so that no
memory grows with the shard.

[Note: chunks in flight] A chunk is a part of a shard that fits one staging buffer; up to ``depth`` of them
are in flight. The first chunk of the most urgent job (lowest priority number) is read next. Of the chunks
that have been read the most urgent is computed, one at a time. A cancelled job drops what was read for it,
and ends when its writes have landed, so that the next job may write to the same extents.

[Note: what may be read ahead] The state of a committed version changes only by the unit's own update. So it
can be read once the earlier update has landed, in the order in which jobs will come, into buffers that leave
:data:`RESERVE` chunks for jobs that come in another order. A job takes what was read ahead only if it reads
the same source. Before code writes states in another way (``load_state_dict``), it lets nothing be expected.
"""

from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any

from infinity.core.lifecycle import Lifecycle, UpdateState
from infinity.planner.prefetch_plan import Event, Kind


class StepOrder:
    """Learns the order in which a step uses its units and completes their ``gradients``."""

    def __init__(self) -> None:
        self._first_uses: dict[int, int] = {}
        self.gradients: tuple[int, ...] = ()  # empty while unknown

    def learn(self, events: Sequence[Event]) -> None:
        self._first_uses = {e.unit: i for i, e in reversed([*enumerate(events)]) if e.kind is Kind.USE}
        self.gradients = tuple(event.unit for event in events if event.kind is Kind.DONE)

    def first_use(self, unit: int) -> int:
        """Return the position of a unit's first use in a step, or the unit's index while unknown."""
        return self._first_uses.get(unit, unit)

    def by_use(self, units: Iterable[int]) -> list[int]:
        """Return units in the order in which the next step needs them."""
        return sorted(units, key=lambda unit: (self.first_use(unit), unit))

    def coming(self, *, early: bool) -> list[int]:
        """Return units in the order of their updates, ``early`` ones in backward; empty while unknown."""
        gradients = dict.fromkeys(self.gradients)  # a step that was forgotten may have begun the pass
        return [*gradients] if early else self.by_use(gradients)


class TileOrder:
    """Knows the order in which backward uses tiles: that of forward, from the last one on.

    ``last`` and ``other`` are the ``calls`` of experts in the two training passes before.
    """

    def __init__(self, last: Sequence[KeysView[int]] = (), other: Sequence[KeysView[int]] = ()) -> None:
        self.calls: list[KeysView[int]] = []  # the tiles of each, in the order of use
        self.last, self._other = last, other
        self.used: set[int] = set()  # in this training pass
        self.to_come: list[int] = []
        self._left: set[int] = set()  # tiles of the running call that it has not used yet
        self._recomputed, self._recomputing = 0, False  # those before this place are recomputed first

    def note(self, tile: int, following: Sequence[int], *, recomputed: bool) -> None:
        """Record a use in forward, or one that is recomputed: backward uses the tile once more."""
        if tile not in self._left:  # the router of a block has chosen
            self.calls.append(dict.fromkeys([tile, *following]).keys())
            self._left = {*following}
        self._left.discard(tile)
        if recomputed and not self._recomputing:  # a block begins
            self._cross_out(tile)
            self._recomputed = len(self.to_come)
        elif not recomputed:
            self._recomputed = 0
        self._recomputing = recomputed
        self.to_come.append(tile)

    def after(self, tile: int) -> Iterator[int]:
        """Yield the tiles that backward uses after ``tile``, which it uses now, each once."""
        self._recomputing = False
        self._cross_out(tile)
        in_order = max(0, len(self.to_come) - self._recomputed)  # below: a block that is not recomputed
        found = {tile}
        for each in islice(reversed(self.to_come), in_order):
            if each not in found:
                found.add(each)
                yield each

    def expected(self) -> list[int]:
        """Return the tiles of the next call in both passes before; none while a call is not over."""
        at = len(self.calls)
        if self._left or at >= min(len(self.last), len(self._other)):
            return []
        if at and not self.calls[-1] & self.last[at - 1]:
            return []  # other blocks are called
        return [tile for tile in self.last[at] if tile in self._other[at]]

    def _cross_out(self, tile: int) -> None:
        """Forget the last use of ``tile``, and all after it."""
        uses = self.to_come
        place = next((at for at in range(len(uses) - 1, -1, -1) if uses[at] == tile), len(uses))
        del uses[place:]


class Completions:
    """Decides when gradients of a step are complete; those of ``leaves`` when backward leaves their module.

    ``parameters`` returns how many parameters of a unit train, and how many it has.
    """

    def __init__(
        self, leaves: frozenset[int], parameters: Callable[[int], tuple[int, int]],
        recomputed: Callable[[int], bool],
    ) -> None:  # fmt: skip
        self.leaves, self._parameters, self._recomputed = leaves, parameters, recomputed
        self.syncing = True  # False under no_sync: backward completes no gradients of the step
        self.awaited = 0  # passes under no_sync after which one does
        # By unit: parameters that fired in this pass, and what ``parameters`` gave.
        self._fired: dict[int, tuple[set[int], int, int]] = {}
        self.passed: set[int] = set()  # units that are complete in this backward pass
        self.reset()

    def fire(self, unit: int, *parameters: int) -> bool:
        """Take note of the gradients of some parameters; return whether they complete the unit's."""
        self.in_backward = True
        if unit not in self._fired:
            self._fired[unit] = set(), *self._parameters(unit)
        fired, trainable, count = self._fired[unit]
        fired.update(parameters)
        if len(fired) < trainable or unit in self.leaves:
            return False
        return trainable == count or not self._recomputed(unit)

    def missing(self, unit: int) -> int:
        """Return how many gradients of a unit have yet to come, after one has."""
        fired, trainable, _ = self._fired[unit]
        return trainable - len(fired)

    def left(self, units: Iterable[int]) -> list[int]:
        """Return which of ``units`` have a gradient that is complete once backward leaves them."""
        # A pass that accumulates nothing (torch.autograd.grad) completes none.
        return [unit for unit in units if self.in_backward and unit not in self.delivered]

    def left_at_end(self, trained: Iterable[int], opened: Collection[int]) -> list[int]:
        """Return the units that the end of the pass completes; ``opened`` ones hold a gradient back."""
        return sorted({*opened, *(self.left(trained) if self.syncing else ())})

    def complete(self, unit: int) -> None:
        """Mark a unit's gradient of this pass as complete, and that of the step unless more follow."""
        self.passed.add(unit)
        self._fired.pop(unit, None)
        if self.syncing:
            self.delivered.add(unit)

    def end_backward(self) -> None:
        self.synced, self.accumulated = self.syncing, not self.syncing
        if self.awaited:
            self.awaited -= 1
            self.syncing = not self.awaited
        self._begin_pass()

    def reset(self) -> None:
        """Begin a step."""
        self.synced = False  # a backward pass has completed the gradients of this step
        self.accumulated = False  # one has given gradients that wait for a later one
        self.lost = False  # those were dropped with a pass that failed
        self.delivered: set[int] = set()  # units whose gradients of this step are complete
        self._begin_pass()

    def _begin_pass(self) -> None:
        self.in_backward = False  # a pass gave gradients and has not ended
        self.passed.clear()
        self._fired.clear()


@dataclass(kw_only=True)
class Speculation:
    """Predicts whether updates that start before the norm is known will be right; see [Note: speculation].

    They will if a saturating counter of two bits, 0 to 3, is at least 2.

    Source: J. E. Smith, A study of branch prediction strategies (ISCA 1981).
    """

    two_versions: bool  # an update may start inside backward
    clips: bool  # the step may scale gradients, so they are kept until then
    counter: int = 2
    started: int = 0  # updates of the last step that started before its norm was known
    rolled_back: int = 0  # those of them that were void

    @property
    def early(self) -> bool:
        """Return whether updates of this step start inside backward: without clipping they always do."""
        return self.two_versions and (self.counter >= 2 or not self.clips)

    def learn(self, started: int, *, right: bool) -> None:
        """Count a step whose updates had, or would have had, the right numbers, or not."""
        self.counter = min(3, self.counter + 1) if right else max(0, self.counter - 1)
        self.started, self.rolled_back = started, 0 if right else started


class Do(Enum):
    """Names an action of an update, which its driver carries out."""

    STORE = "write the gradient to its place on NVMe; then call stored()"
    START = "compute the new weights and state; call computed() when they exist, landed() when it has ended"
    CANCEL = "start no further part of the computation; landed() follows as ever"
    FREE_GRADIENT = "give back the gradient's memory: nothing reads it any more"
    FREE_WEIGHTS = "give back the memory of the weights that were kept for the update"


class ShardUpdate:
    """Tracks a shard's update from its gradient to the end of the step; methods return the actions due.

    It starts inside backward (``early``); the gradient is kept until the step, which may clip (``keeps``), or
    is written to NVMe (``spills``): see [Note: when an update starts], [Note: speculation] and
    [Note: gradients on NVMe].
    """

    def __init__(self, name: str, *, early: bool, keeps: bool, spills: bool) -> None:
        self.lifecycle = Lifecycle(f"update of {name}", UpdateState.HELD)
        self._early, self._keeps = early, keeps
        self._spills = spills and (keeps or not early)  # else it does not wait
        self.in_flight = False  # it was started and has not landed
        self._storing = self._reading = self._rolling_back = False
        self._has_gradient = self._has_weights = True  # in memory

    @property
    def speculated(self) -> bool:
        """Return whether it started before the norm was known, and is neither validated nor rolled back."""
        return self.lifecycle.state is UpdateState.SPECULATED

    @property
    def reads_stored_gradient(self) -> bool:
        """Return whether it reads its gradient from NVMe, once it has started."""
        return self._spills and not self.speculated

    @property
    def holds_fetches(self) -> bool:
        """Return whether the unit's next fetch waits for this update of the committed version."""
        return self.in_flight and not self.speculated

    def complete(self, *, finite: bool = True) -> tuple[Do, ...]:
        """Take the complete gradient; if it is not ``finite``, the step will be skipped, so drop it."""
        if not finite:
            return self.drop()
        self._storing = self._spills
        actions = (Do.STORE,) if self._spills else ()
        return actions + (self._start(UpdateState.SPECULATED) if self._early else ())

    def stored(self) -> tuple[Do, ...]:
        """Take the end of the gradient's write to NVMe, which may have failed."""
        self._storing = False
        return self._free()

    def computed(self) -> tuple[Do, ...]:
        """Take note that the new weights exist: what the update was given is read no more."""
        self._reading = False
        weights = (Do.FREE_WEIGHTS,) if self._has_weights else ()
        self._has_weights = False
        return weights + self._free()

    def landed(self) -> tuple[Do, ...]:
        """Take note that the last byte is written, or the last one in flight of a rolled-back update."""
        self.in_flight = self._reading = False
        return self.roll_back() if self._rolling_back else self._free()

    def validate(self) -> tuple[Do, ...]:
        """Confirm the numbers that the update assumed about the step."""
        self.lifecycle.move(UpdateState.VALIDATED)
        return self._free()

    def roll_back(self) -> tuple[Do, ...]:
        """Void what was written to the next version: the step has other numbers, or is forgotten."""
        self._rolling_back = self.in_flight
        if self.in_flight:
            return (Do.CANCEL,)
        self.lifecycle.move(UpdateState.ROLLED_BACK)
        return self._free()

    def commit(self) -> tuple[Do, ...]:
        """Commit the step: an update that was not validated starts, for the first time or again."""
        return () if self.lifecycle.state is UpdateState.VALIDATED else self._start(UpdateState.VALIDATED)

    def drop(self) -> tuple[Do, ...]:
        """Forget the step; nothing is in flight."""
        freed = [Do.FREE_WEIGHTS] if self._has_weights else []
        freed += [Do.FREE_GRADIENT] if self._has_gradient and not self._storing else []
        self._has_weights, self._has_gradient = False, self._has_gradient and self._storing
        return tuple(freed)

    def _start(self, state: UpdateState) -> tuple[Do, ...]:
        self.lifecycle.move(state)
        self.in_flight = True
        self._reading = not self.reads_stored_gradient
        return (Do.START,)

    def _free(self) -> tuple[Do, ...]:
        """Return what gives the gradient's memory back, once, when nothing will read it there."""
        read_again = self.lifecycle.state in (UpdateState.HELD, UpdateState.ROLLED_BACK)
        read_again |= self._keeps and self.speculated
        read_again &= not self._spills  # then NVMe has it
        if not self._has_gradient or self._storing or self._reading or read_again:
            return ()
        self._has_gradient = False
        return (Do.FREE_GRADIENT,)


#: Chunks in flight that are kept for jobs that have come, and never used to read ahead.
RESERVE = 2


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """Describes the computation of one shard's update, which has come or is expected."""

    name: str  # that of the unit
    chunks: int = 0  # their number; a cancelled job has as many as are written
    priority: int = 0  # lower goes first: the position of the shard's next use
    source: Any = None  # the place that its chunks are read from
    fits: int | None = None  # chunks of an expected job that memory holds; None: as many as of others
    started: int = field(default=0, init=False)  # chunks that are read, or were
    computed: int = field(default=0, init=False)
    landed: int = field(default=0, init=False)
    unread: range = field(default=range(0), init=False)  # chunks that a cancelled job did not read
    unwritten: tuple[int, ...] = field(default=(), init=False)
    cancelled: bool = field(default=False, init=False)


class Stage(Enum):
    """Names the stage of a chunk in flight."""

    READING = "its state (and its weights and gradient, where they are not at hand) flies into the buffer"
    COMPUTING = "the rule runs over the buffer"
    WRITING = "new weights and state fly to the next version; then the buffer is given back"
    DROPPED = "read in vain; its buffer is given back when no byte is in flight"


@dataclass(slots=True, eq=False)
class ChunkInFlight:
    """Tracks a chunk in flight, which has a buffer."""

    name: str  # this, source and index are those of its job
    source: Any
    index: int
    job: Any = None  # None: it was read ahead, or for a job that was cancelled
    stage: Stage = Stage.READING
    moving: int = 0  # transfers that have not ended; the driver counts those that it starts

    @property
    def ahead(self) -> bool:
        """Return whether it waits for a job that has not come."""
        return self.job is None and self.stage is Stage.READING


class Move(Enum):
    """Names an action on a chunk in flight, or (the last two) on a job, for a queue's driver."""

    READ = "lease a buffer, and read the state; of a job that has come the rest, too; no buffer: refuse()"
    REST = "the job of a chunk that was read ahead has come: read what only the job knows"
    COMPUTE = "compute the new values; then computed()"
    WRITE = "write them to the next version"
    FREE = "give back the buffer"
    COMPUTED = "tell that the new weights of a job exist: what the job was given is read no more"
    ENDED = "tell that the last write of a job has landed"


Moves = list[tuple[Move, Any]]


class ChunkQueue:
    """Decides what a pipeline of updates does next, with ``depth`` chunks in flight; for one thread."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.in_flight: list[ChunkInFlight] = []
        self.jobs: list[Job] = []  # those that have not ended, the most urgent first
        self._expected: dict[str, Job] = {}  # those that have not come, in order
        self._refused = False

    @property
    def idle(self) -> bool:
        return not self.jobs and not self.in_flight

    def expect(self, expected: Iterable[Job]) -> Moves:
        """Expect jobs in this order; forget those that were expected before."""
        self._expected, self._refused = {each.name: each for each in expected}, False
        return self._drop([chunk for chunk in self.in_flight if chunk.ahead])

    def submit(self, job: Job) -> Moves:
        """Add a job, which takes the chunks, its first ones, that were read ahead for it."""
        self._refused = False
        insort(self.jobs, job, key=lambda each: each.priority)  # behind those that came before
        self._expected.pop(job.name, None)
        ahead = [chunk for chunk in self.in_flight if chunk.ahead and chunk.name == job.name]
        if any(chunk.source != job.source for chunk in ahead):
            moves = self._drop(ahead)
        else:
            job.started = len(ahead)
            for chunk in ahead:
                chunk.job = job
            moves = [(Move.REST, chunk) for chunk in ahead]
        return moves if job.chunks else [*moves, (Move.COMPUTED, job), *self._end(job)]

    def cancel(self, job: Job) -> Moves:
        """Cancel a job; see [Note: chunks in flight]."""
        if job not in self.jobs or job.cancelled:
            return []
        mine = [chunk for chunk in self.in_flight if chunk.job is job]
        reading = [chunk for chunk in mine if chunk.stage is Stage.READING]
        job.unread = range(job.started, job.chunks)
        job.unwritten = (*job.unread, *(chunk.index for chunk in reading))
        job.cancelled, job.chunks = True, job.landed + len(mine) - len(reading)
        job.started = job.chunks
        moves = self._drop(reading)
        return moves + (self._end(job) if job.landed == job.chunks else [])

    def refuse(self, chunk: ChunkInFlight) -> Moves:
        """Take back a chunk to be read, for which no buffer is free, until the next event."""
        self._refused = True
        self.in_flight.remove(chunk)
        if chunk.job is None:
            return []
        chunk.job.started -= 1
        # If only chunks that were read ahead hold buffers, they make room for the job that has come.
        return self.expect(()) if all(each.ahead for each in self.in_flight) else []

    def moved(self, chunk: ChunkInFlight) -> Moves:
        """Take the end of one of a chunk's transfers."""
        self._refused = False
        chunk.moving -= 1
        if chunk.moving or chunk.stage in (Stage.READING, Stage.COMPUTING):
            return []
        self.in_flight.remove(chunk)
        job = chunk.job
        if job is None:
            return [(Move.FREE, chunk)]
        job.landed += 1
        return [(Move.FREE, chunk), *(self._end(job) if job.landed == job.chunks else [])]

    def computed(self, chunk: ChunkInFlight) -> Moves:
        job = chunk.job
        chunk.stage = Stage.WRITING
        job.computed += 1
        ends = job.computed == job.chunks and not job.cancelled
        return [(Move.WRITE, chunk), *([(Move.COMPUTED, job)] if ends else [])]

    def next(self) -> Moves:
        """Return the read or computation that begins now; empty: none can before the next event."""
        read = None if self._refused or len(self.in_flight) >= self.depth else self._next_read()
        if read is not None:
            self.in_flight.append(read)
            return [(Move.READ, read)]
        if all(chunk.stage is not Stage.COMPUTING for chunk in self.in_flight):
            read_in = (c for c in self.in_flight if c.job and c.stage is Stage.READING and not c.moving)
            chunk = min(read_in, key=lambda each: (self.jobs.index(each.job), each.index), default=None)
            if chunk is not None:
                chunk.stage = Stage.COMPUTING
                return [(Move.COMPUTE, chunk)]
        return []

    def _next_read(self) -> ChunkInFlight | None:
        for job in self.jobs:
            if job.started < job.chunks:
                job.started += 1
                return ChunkInFlight(job.name, job.source, job.started - 1, job)
        # See [Note: what may be read ahead].
        for first in list(self._expected.values()):
            ahead = sum(chunk.ahead and chunk.name == first.name for chunk in self.in_flight)
            if ahead < first.chunks:
                room = min(self.depth, first.fits or self.depth) - RESERVE
                landed = all(job.name != first.name for job in self.jobs)  # the earlier update
                may_read = landed and len(self.in_flight) < room
                return ChunkInFlight(first.name, first.source, ahead) if may_read else None
            del self._expected[first.name]
        return None

    def _drop(self, chunks: list[ChunkInFlight]) -> Moves:
        moves: Moves = []
        for chunk in chunks:
            chunk.job, chunk.stage = None, Stage.DROPPED
            if not chunk.moving:
                self.in_flight.remove(chunk)
                moves.append((Move.FREE, chunk))
                self._refused = False
        return moves

    def _end(self, job: Job) -> Moves:
        self.jobs.remove(job)
        return [(Move.ENDED, job)]
