"""Which chunk of which update is read, computed and written next: decisions that own no thread, move no byte.

A chunk is a part of a shard that fits one staging buffer. Up to ``depth`` of them are in flight::

    READING    its state (and its weights and gradient, where they are not at hand) flies into the buffer
    COMPUTING  the rule runs over the buffer
    WRITING    the new weights and the new state fly to the next version; then the buffer is given back
    DROPPED    read in vain; its buffer is given back when no byte is in flight

The first chunk of the job with the lowest priority number starts next; of the chunks whose reads have ended,
in whatever order, the most urgent is computed next, one at a time. The driver tells what has happened,
carries out the actions that follow from it, and asks what may begin: :mod:`infinity.shards.pipeline` with an
engine and a thread, :mod:`infinity.planner.clock` with a clock.

[Note: what may be read ahead]
The state of a committed version changes only by the unit's own update, so it can be read as soon as the
earlier update has landed. It is read in the order in which jobs will come, and only into buffers that leave
:data:`RESERVE` chunks for jobs that come in another order. A job takes what was read for it only where it
reads the same source; anything else is dropped. Code that writes states in another way (``load_state_dict``)
lets nothing be expected first, which forgets it all.

[Note: a gradient on NVMe]
is read chunk by chunk, as state is, so that no memory grows with the shard. The buffers of such chunks are
larger, and fewer of them fit the pool at one time. So fewer are read ahead: as many as leave the room of
:data:`RESERVE` chunks, which others may wait for before the jobs come.

[Note: a cancelled job]
starts no further chunk, and what was read for it is dropped. It has ended when its writes in flight have
landed, so that the next job may write to the same extents.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush

#: Chunks in flight that what is read ahead never takes from jobs that have come.
RESERVE = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Expected:
    """A job that will come.

    Attributes:
        name: Of its unit.
        chunks: As many.
        source: What they are read from.
        fits: Chunks of it that memory holds at one time; None: as many as of others.
            See [Note: a gradient on NVMe].
    """

    name: str
    chunks: int
    source: object = None
    fits: int | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """The update of one shard.

    Attributes:
        name: Of its unit.
        chunks: As many; a cancelled job has as many as are written.
        priority: Lower goes first: the position of the shard's next use.
        source: What its chunks are read from.
        started: Chunks that are read, or were; ``computed`` and ``landed`` likewise.
        unread: Indices of chunks that were not read when the job was cancelled; ``unwritten`` likewise.
    """

    name: str
    chunks: int = 0
    priority: int = 0
    source: object = None
    started: int = field(default=0, init=False)
    computed: int = field(default=0, init=False)
    landed: int = field(default=0, init=False)
    unread: range = field(default=range(0), init=False)
    unwritten: tuple[int, ...] = field(default=(), init=False)
    cancelled: bool = field(default=False, init=False)
    order: tuple[int, int] = field(default=(0, 0), init=False)  # priority, then order of submission


class Stage(Enum):
    """Where a chunk in flight is; see the module's first lines."""

    READING = "reading"
    COMPUTING = "computing"
    WRITING = "writing"
    DROPPED = "dropped"


@dataclass(slots=True, eq=False)
class ChunkInFlight:
    """A chunk in flight, which has a buffer.

    Attributes:
        name: Of its unit.
        job: That it belongs to; None: it was read ahead, or for a job that was cancelled.
        expected: The job for which it was read ahead; None: for one that had come.
        index: Among the chunks of its job.
        moving: Transfers that have not ended; the driver sets it before it starts some.
    """

    name: str
    job: Job | None
    expected: Expected | None
    index: int
    stage: Stage = Stage.READING
    moving: int = 0

    @property
    def ahead(self) -> bool:
        """Whether it waits for a job that has not come."""
        return self.job is None and self.stage is Stage.READING


@dataclass(frozen=True, slots=True)
class Action:
    """An action on a chunk in flight."""

    chunk: ChunkInFlight


class Read(Action):
    """Lease a buffer, and read the state; of a job that has come also what only the job knows.

    Without a buffer: :meth:`ChunkQueue.refuse`.
    """


class ReadRest(Action):
    """Read what only the job knows, weights and gradient: the job of a chunk that was read ahead has come."""


class Compute(Action):
    """Compute the new values; then :meth:`ChunkQueue.computed`."""


class Write(Action):
    """Write them to the next version."""


class Free(Action):
    """Give back the buffer."""


@dataclass(frozen=True, slots=True)
class Computed:
    """Tell that the new weights of a job exist: what the job was given is read no more."""

    job: Job


@dataclass(frozen=True, slots=True)
class Ended:
    """Tell that the last write of a job has landed."""

    job: Job


Actions = list[Action | Computed | Ended]


class ChunkQueue:
    """Decides what a pipeline of updates does next. It belongs to one thread.

    Args:
        depth: Chunks in flight at one time.
    """

    def __init__(self, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}; a pipeline holds at least 1 chunk")
        self.depth = depth
        self.in_flight: list[ChunkInFlight] = []
        self.jobs: dict[tuple[int, int], Job] = {}  # those that have not ended
        self._waiting: list[tuple[tuple[int, int], Job]] = []  # a heap of jobs with chunks to start
        self._unended: Counter[str] = Counter()  # jobs, by name
        self._expected: deque[Expected] = deque()
        self._ahead = 0  # chunks of the first expected job that are being read
        self._came: set[str] = set()  # expected jobs that have come
        self._submitted = 0
        self._refused = self._computing = False

    @property
    def idle(self) -> bool:
        """Whether no job is left, and nothing is in flight."""
        return not self.jobs and not self.in_flight

    def state(self) -> tuple[object, ...]:
        """Return everything that the next decisions follow from, in values that can be compared."""
        names = [each.name for each in self._expected if each.name not in self._came]
        jobs = [(each.name, each.started, each.computed, each.landed) for each in self.jobs.values()]
        flying = [(each.index, each.stage, each.moving, each.ahead) for each in self.in_flight]
        return tuple(names), self._ahead, jobs, flying

    # --- what has happened -----------------------------------------------------------------------

    def expect(self, expected: Iterable[Expected]) -> Actions:
        """These jobs will come, in this order; what was expected before is over."""
        self._expected, self._ahead, self._came = deque(expected), 0, set()
        self._refused = False
        return self._drop([chunk for chunk in self.in_flight if chunk.ahead])

    def submit(self, job: Job) -> Actions:
        """A job has come: it takes what was read ahead for it, which are its first chunks."""
        self._submitted += 1
        self._refused = False
        job.order = job.priority, self._submitted
        self.jobs[job.order] = job
        self._unended[job.name] += 1
        ahead = [chunk for chunk in self.in_flight if chunk.ahead and chunk.name == job.name]
        self._came.add(job.name)
        if any(chunk.expected and chunk.expected.source != job.source for chunk in ahead):
            actions = self._drop(ahead)
        else:
            job.started = len(ahead)
            for chunk in ahead:
                chunk.job = job
            actions = [*map(ReadRest, ahead)]
        if not job.chunks:
            return [*actions, Computed(job), *self._end(job)]
        heappush(self._waiting, (job.order, job))
        return actions

    def cancel(self, job: Job) -> Actions:
        """A job is not wanted any more: see [Note: a cancelled job]."""
        if job.order not in self.jobs or job.cancelled:
            return []
        mine = [chunk for chunk in self.in_flight if chunk.job is job]
        reading = [chunk for chunk in mine if chunk.stage is Stage.READING]
        job.unread = range(job.started, job.chunks)
        job.unwritten = (*job.unread, *(chunk.index for chunk in reading))
        job.cancelled, job.chunks = True, job.landed + len(mine) - len(reading)
        job.started = job.chunks
        actions = self._drop(reading)
        return actions + (self._end(job) if job.landed == job.chunks else [])

    def refuse(self, chunk: ChunkInFlight) -> Actions:
        """There is no buffer for a chunk that was to be read: it is tried again after the next event."""
        self._refused = True
        self.in_flight.remove(chunk)
        if chunk.job is None:
            self._ahead -= 1
            return []
        chunk.job.started -= 1
        # Where others hold the reserve a job that has come goes before those that will come.
        return self.expect(()) if all(each.ahead for each in self.in_flight) else []

    def moved(self, chunk: ChunkInFlight) -> Actions:
        """One of a chunk's transfers has ended."""
        self._refused = False
        chunk.moving -= 1
        if chunk.moving or chunk.stage in (Stage.READING, Stage.COMPUTING):
            return []
        self.in_flight.remove(chunk)
        job = chunk.job
        if job is None:
            return [Free(chunk)]
        job.landed += 1
        return [Free(chunk), *(self._end(job) if job.landed == job.chunks else [])]

    def computed(self, chunk: ChunkInFlight) -> Actions:
        """The new values of a chunk exist."""
        job = chunk.job
        assert job is not None
        self._computing, chunk.stage = False, Stage.WRITING
        job.computed += 1
        ends = job.computed == job.chunks and not job.cancelled
        return [Write(chunk), *([Computed(job)] if ends else [])]

    # --- what may begin --------------------------------------------------------------------------

    def next(self) -> Read | Compute | None:
        """Return what begins now; None: nothing can until something happens."""
        return self._read() or self._compute()

    def _read(self) -> Read | None:
        if self._refused or len(self.in_flight) >= self.depth:
            return None
        while self._waiting and self._waiting[0][1].started == self._waiting[0][1].chunks:
            heappop(self._waiting)
        if self._waiting:
            job = self._waiting[0][1]
            chunk = ChunkInFlight(job.name, job, None, job.started)
            job.started += 1
        else:
            expected = self._next_expected()
            if expected is None:
                return None
            chunk = ChunkInFlight(expected.name, None, expected, self._ahead)
            self._ahead += 1
        self.in_flight.append(chunk)
        return Read(chunk)

    def _next_expected(self) -> Expected | None:
        """Return the job whose next chunk may be read ahead; see [Note: what may be read ahead]."""
        expected = self._expected
        while expected and (self._ahead == expected[0].chunks or expected[0].name in self._came):
            expected.popleft()
            self._ahead = 0
        if not expected or self._unended[expected[0].name]:  # the earlier update has not landed
            return None
        most = min(self.depth, expected[0].fits or self.depth) - RESERVE
        return expected[0] if len(self.in_flight) < most else None

    def _compute(self) -> Compute | None:
        if self._computing:
            return None
        ready = [
            (chunk.job.order, chunk.index, chunk)
            for chunk in self.in_flight
            if chunk.job is not None and chunk.stage is Stage.READING and not chunk.moving
        ]
        if not ready:
            return None
        *_, chunk = min(ready, key=lambda each: each[:2])
        self._computing, chunk.stage = True, Stage.COMPUTING
        return Compute(chunk)

    # --- the ends --------------------------------------------------------------------------------

    def _drop(self, chunks: list[ChunkInFlight]) -> Actions:
        actions: Actions = []
        for chunk in chunks:
            chunk.job, chunk.stage = None, Stage.DROPPED
            if not chunk.moving:
                self.in_flight.remove(chunk)
                actions.append(Free(chunk))
        if actions:
            self._refused = False
        return actions

    def _end(self, job: Job) -> Actions:
        del self.jobs[job.order]
        self._unended[job.name] -= 1
        return [Ended(job)]
