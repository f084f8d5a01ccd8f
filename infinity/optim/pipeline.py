"""The chunk pipeline: read i+1, update i and write i-1 at the same time, on a thread of its own.

A chunk is a part of a shard that fits one staging buffer. It goes through three stages::

    READING   its state (and its weights and gradient, where they are not at hand) flies into the buffer
    UPDATED   the rule has run; the new weights and the new state lie in the buffer
    WRITING   they fly to the next version; then the buffer is given back

States may be read before their job comes, see [Note: what may be read ahead]. Up to ``depth`` chunks are in
some stage. The thread sleeps until a transfer ends or a job comes. The first chunk of the job with the
lowest priority number starts next; of the chunks whose reads have ended, in whatever order, the most urgent
is updated next.

[Note: one error ends all] After a disk error only the committed version is known to be whole, since
no job writes to it. So the first error fails the job that met it and every other job, given or
still to come, with that same error. Transfers in flight are awaited before their buffers are given
back, because the kernel may still write into them.

[Note: what may be read ahead] The state of a committed version changes only by the unit's own update,
so it can be read as soon as the earlier update has landed. It is read in the order in which jobs will
come, and only into buffers that leave :data:`RESERVE` chunks for jobs that come in another order. A
job takes what was read for it only where it reads the same extents; anything else is dropped. Code that
writes states in another way (``load_state_dict``) drains the pipeline first, which forgets it all.

[Note: a gradient on NVMe] is read chunk by chunk, as state is, so that no memory grows with the shard. The
buffers of such chunks are larger, and fewer of them fit the pool at one time. So fewer are read ahead: as
many as leave the room of :data:`RESERVE` chunks, which others may wait for before the jobs come.

[Note: a cancelled job] starts no further chunk, and what was read for it is dropped. It is done when
its writes in flight have landed, so that the next job may write to the same extents.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

import torch
from torch import Tensor

from infinity.core.budget import rounded
from infinity.core.errors import StateError, copied
from infinity.core.extent import Extent
from infinity.core.transfer import Lease, Pool, Transfer, TransferEngine
from infinity.optim.layout import StateLayout
from infinity.optim.rules import Rule


@dataclass(frozen=True, slots=True)
class Run:
    """Elements ``[start, stop)`` of the shard, updated with one group's ``hyper``.

    Elements in no run are frozen or padding: their weights and state are carried over unchanged.
    """

    start: int
    stop: int
    hyper: Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements ``[start, start + numel)`` of the shard, and where they are read and written.

    Attributes:
        grad_read: Of the gradient; None: it is at hand.
    """

    start: int
    numel: int
    weight_read: Extent
    state_read: Extent
    weight_write: Extent
    state_write: Extent
    grad_read: Extent | None = None

    @property
    def reads(self) -> tuple[int, int, Extent, Extent, Extent | None]:
        """What is read: elements and extents."""
        return self.start, self.numel, self.weight_read, self.state_read, self.grad_read

    @property
    def grad_nbytes(self) -> int:
        """Bytes of the gradient that are read."""
        return 0 if self.grad_read is None else self.grad_read.nbytes


@dataclass(slots=True)
class UpdateJob:
    """The update of one shard.

    Attributes:
        name: Of the unit, for messages.
        weight: The shard in the compute dtype, ``(shard_numel,)``; None: each chunk reads
            ``weight_read`` too.
        grad: ``(shard_numel,)``, or the dtype of a gradient of which each chunk reads ``grad_read``.
        chunks: In any order; they do not overlap.
        runs: Ascending, not overlapping.
        priority: Lower goes first: the position of the shard's next use.
        in_place: The new weights are put there, too, before ``on_computed``; it may be ``weight`` itself.
        on_done: Called once, on the pipeline's thread, after the last write has landed, or with the error.
        on_computed: Called when the last chunk has been updated: ``weight`` and ``grad`` are used no more.
            Not called when the job fails or is cancelled before.
    """

    name: str
    weight: Tensor | None
    grad: Tensor | torch.dtype
    chunks: tuple[Chunk, ...]
    runs: tuple[Run, ...]
    priority: int
    on_done: Callable[[BaseException | None], None]
    on_computed: Callable[[], None] | None = None
    in_place: Tensor | None = None


def pieces(runs: tuple[Run, ...], start: int, stop: int) -> Iterator[tuple[int, int, Tensor | None]]:
    """Cut ``[start, stop)`` into ``(begin, end, hyper)``; ``hyper`` is None where no run is."""
    at = start
    for run in runs:
        begin, end = max(run.start, at), min(run.stop, stop)
        if begin >= end:
            continue
        if at < begin:
            yield at, begin, None
        yield begin, end, run.hyper
        at = end
    if at < stop:
        yield at, stop, None


def check_job(job: UpdateJob, layout: StateLayout) -> None:
    """Compare a job's sizes with each other.

    Raises:
        ValueError: Names the first that does not fit.
    """
    if isinstance(job.grad, Tensor):
        numel = job.grad.numel()
    else:
        numel = sum(chunk.numel for chunk in job.chunks)
    for weights in (job.weight, job.in_place):
        if weights is not None and (weights.numel() != numel or weights.dtype != layout.dtype):
            raise ValueError(
                f"{job.name}: weight holds {weights.numel()} of {weights.dtype}, "
                f"grad {numel}, the layout is for {layout.dtype}"
            )
    for chunk in job.chunks:
        if not 0 <= chunk.start <= chunk.start + chunk.numel <= numel:
            raise ValueError(f"{job.name}: {chunk.numel} from {chunk.start} are not in a shard of {numel}")
        wanted = (layout.weight_nbytes(chunk.numel), layout.state_nbytes(chunk.numel))
        for weight, state in (
            (chunk.weight_read, chunk.state_read),
            (chunk.weight_write, chunk.state_write),
        ):
            if (weight.nbytes, state.nbytes) != wanted:
                got = f"{weight.nbytes} and {state.nbytes}"
                raise ValueError(
                    f"{job.name}: extents of {got} bytes for weight and state, wanted {wanted[0]} "
                    f"and {wanted[1]} for {chunk.numel} elements"
                )
        grad_nbytes = 0 if isinstance(job.grad, Tensor) else chunk.numel * job.grad.itemsize
        if chunk.grad_nbytes != grad_nbytes:
            raise ValueError(
                f"{job.name}: an extent of {chunk.grad_nbytes} bytes for the gradient of {chunk.numel} "
                f"elements, wanted {grad_nbytes}"
            )
    last = 0
    for run in job.runs:
        if not last <= run.start <= run.stop <= numel:
            raise ValueError(
                f"{job.name}: run {run.start}..{run.stop} overlaps or leaves the shard of {numel}"
            )
        last = run.stop


@dataclass(frozen=True, slots=True)
class PipelineStats:
    """Since the pipeline was made: what its thread did, in seconds of wall clock, and bytes moved.

    Attributes:
        buffer_wait_s: Nothing in flight, and no staging buffer to be had.
        read_wait_s: Nothing to update, and reads in flight.
        write_wait_s: Nothing to update, and only writes in flight.
        update_s: In the rule.
    """

    buffer_wait_s: float = 0.0
    read_wait_s: float = 0.0
    write_wait_s: float = 0.0
    update_s: float = 0.0
    nbytes_read: int = 0
    nbytes_written: int = 0


@dataclass(slots=True, eq=False)
class Progress:
    """How far one job is.

    Attributes:
        unread_nbytes: What a cancelled job did not read, when it is done; ``unwritten_nbytes`` likewise.
    """

    job: UpdateJob
    order: tuple[int, int]  # priority, then order of submission
    started: int = 0
    updated: int = 0
    landed: int = 0
    cancelled: bool = False
    unread_nbytes: int = 0
    unwritten_nbytes: int = 0

    @property
    def ended(self) -> bool:
        """Whether every chunk that will be written has landed."""
        return self.landed == (self.updated if self.cancelled else len(self.job.chunks))


@dataclass(slots=True, eq=False)
class Slot:
    """A chunk in flight, with the buffer that it holds."""

    progress: Progress | None  # None: read ahead, or for a job that was cancelled
    name: str
    chunk: Chunk
    lease: Lease
    transfers: list[Transfer] = field(default_factory=list)
    writing: bool = False
    dropped: bool = False  # read ahead in vain

    @property
    def ahead(self) -> bool:
        return self.progress is None

    @property
    def ended(self) -> bool:
        return all(transfer.done() for transfer in self.transfers)

    def wait(self) -> None:
        for transfer in self.transfers:
            transfer.wait()

    def settle(self) -> None:
        """Wait until no byte of the buffer is in flight, however that ends; give it back."""
        for transfer in self.transfers:
            with suppress(BaseException):
                transfer.wait()
        self.lease.release()


#: Chunks in flight that what is read ahead never takes from jobs that have come.
RESERVE = 2


@dataclass(frozen=True, slots=True)
class Expected:
    """A job that will come.

    Attributes:
        name: Of the job.
        chunks: Makes the chunks that the job will have.
        after: The earlier update, which writes what is to be read; None: it is there.
    """

    name: str
    chunks: Callable[[], tuple[Chunk, ...]]
    after: Transfer | None = None


class ReadAhead:
    """What to read ahead; belongs to the pipeline's thread.

    Args:
        expected: In the order in which they will come.
    """

    def __init__(self, expected: Iterable[Expected] = ()) -> None:
        self._expected: Iterator[Expected] = iter(expected)
        self._head: Expected | None = None
        self._chunks: tuple[Chunk, ...] = ()  # of the head
        self._at = 0  # chunks of the head that were handed out
        self._came: set[str] = set()

    def next(self) -> tuple[str, Chunk] | None:
        """The name of a job and its next chunk; None when nothing can be read now."""
        while self._head is None or self._at == len(self._chunks):
            self._head = next(self._expected, None)
            if self._head is None:
                return None
            if self._head.name in self._came:
                self._head = None
            else:
                self._chunks, self._at = self._head.chunks(), 0
        if self._head.after is not None and not self._head.after.done():
            return None
        return self._head.name, self._chunks[self._at]

    def advance(self) -> None:
        """What :meth:`next` gave is being read."""
        self._at += 1

    def came(self, job: UpdateJob) -> None:
        """``job`` is here: nothing more is read ahead for it."""
        self._came.add(job.name)
        if self._head is not None and self._head.name == job.name:
            self._head = None


@dataclass(frozen=True, slots=True)
class Cancellation:
    """See [Note: a cancelled job]."""

    progress: Progress


__all__ = ["Chunk", "Expected", "PipelineStats", "Progress", "Run", "UpdateJob", "UpdatePipeline"]


class UpdatePipeline:
    """Plays update jobs beside training.

    It has more attributes than other classes: queues and counts that one thread takes from and others fill,
    under one lock.

    Args:
        engine: Moves the bytes.
        pool: Staging buffers are leased from it, each as long as its chunk is in flight.
        layout: What the state holds.
        rule: Updates a slice of a chunk.
        depth: Chunks in flight at one time.
        name: Of the thread.
    """

    def __init__(
        self, engine: TransferEngine, pool: Pool, layout: StateLayout, rule: Rule, *,
        depth: int = 3, name: str = "infinity-update",
    ) -> None:  # fmt: skip
        if depth < 1:
            raise ValueError(f"depth is {depth}; a pipeline holds at least 1 chunk")
        self._engine, self._pool, self._layout, self._rule = engine, pool, layout, rule
        self._depth = depth
        self._changed = threading.Condition()  # guards what follows
        self._events = 0
        self._submitted: list[Progress | ReadAhead | Cancellation] = []  # in order of arrival
        self._unfinished = 0
        self._count = 0
        self._error: BaseException | None = None
        self._closing = False
        self._ahead_count = 0  # buffers that hold what was read ahead
        # what follows belongs to the thread
        self._waiting: list[tuple[tuple[int, int], Progress]] = []  # a heap of jobs with chunks to start
        self._jobs: dict[tuple[int, int], Progress] = {}  # those that are not done
        self._slots: list[Slot] = []
        self._ahead = ReadAhead()
        self._stats = PipelineStats()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    # --- any thread --------------------------------------------------------------------------

    def submit(self, job: UpdateJob) -> Progress:
        """Queue ``job``; returns at once, with what :meth:`cancel` takes.

        Raises:
            ValueError: Chunks and runs do not fit the shard.
            StateError: The pipeline is closed.
            BaseException: The error that ended the pipeline.
        """
        check_job(job, self._layout)
        with self._changed:
            if self._error is not None:
                raise copied(self._error)
            if self._closing:
                raise StateError(f"{job.name}: the update pipeline is closed")
            self._count += 1
            self._unfinished += 1
            progress = Progress(job, (job.priority, self._count))
            self._submitted.append(progress)
            self._notify()
        return progress

    def cancel(self, jobs: Iterable[Progress]) -> None:
        """End these jobs soon; returns at once. They are done as any other: see [Note: a cancelled job]."""
        with self._changed:
            self._submitted.extend(map(Cancellation, jobs))
            self._notify()

    def expect(self, expected: Iterable[Expected]) -> None:
        """Jobs that will come, in order: their states may be read now. What was expected before is over.

        Raises:
            StateError: The pipeline is closed.
        """
        with self._changed:
            if self._closing:
                raise StateError("the update pipeline is closed")
            self._submitted.append(ReadAhead(expected))
            self._notify()

    def drain(self) -> None:
        """Block until every submitted job is done, and nothing that was read ahead is kept.

        Raises:
            BaseException: The error that ended the pipeline.
        """
        self.expect(())
        with self._changed:
            self._changed.wait_for(self._is_drained)
            if self._error is not None:
                raise copied(self._error)

    @property
    def stats(self) -> PipelineStats:
        """What the thread did so far."""
        return self._stats

    def abandon(self, error: BaseException) -> None:
        """End every job with ``error``, without starting another chunk; returns at once."""
        with self._changed:
            self._error = self._error or error
            self._notify()

    def close(self) -> None:
        """Finish what was submitted, then end the thread; raises nothing. May be called again."""
        with self._changed:
            self._closing = True
            self._submitted.append(ReadAhead())
            self._notify()
        self._thread.join()

    def _is_drained(self) -> bool:
        if self._error is not None:
            return self._unfinished == 0
        return self._unfinished == 0 and not self._submitted and self._ahead_count == 0

    def _notify(self) -> None:
        """Something ended or came; also runs on an engine's thread."""
        with self._changed:
            self._events += 1
            self._changed.notify_all()

    # --- the pipeline's thread ---------------------------------------------------------------

    def _main(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # everyone who waits must learn of it
            self._fail(error)

    def _turn(self) -> bool:
        """Do what can be done now, or sleep until something can; False when all is over."""
        seen = self._take_submitted()
        if self._error is not None:
            raise self._error
        landed = self._land()
        started = self._start() or self._read_ahead()
        updated = self._update()
        return landed or started or updated or self._sleep(seen)

    def _take_submitted(self) -> int:
        """Move new jobs to the heap; the number of events so far."""
        with self._changed:
            new, self._submitted = self._submitted, []
            seen = self._events
        self._jobs.update({each.order: each for each in new if isinstance(each, Progress)})
        for each in new:
            if isinstance(each, ReadAhead):
                self._drop([slot for slot in self._slots if slot.ahead])
                self._ahead = each
            elif isinstance(each, Cancellation):
                self._cancel(each.progress)
            else:
                self._take_job(each)
        self._count_ahead()
        return seen

    def _take_job(self, progress: Progress) -> None:
        self._take_over(progress)
        if progress.started < len(progress.job.chunks):
            heappush(self._waiting, (progress.order, progress))
        elif not progress.job.chunks:
            self._computed(progress)
            self._finish(progress)

    def _cancel(self, progress: Progress) -> None:
        if progress.order not in self._jobs:
            return  # it is done
        job, rest = progress.job, progress.job.chunks[progress.started :]
        reading = [slot for slot in self._slots if slot.progress is progress and not slot.writing]
        progress.cancelled = True
        progress.unread_nbytes = sum(
            chunk.state_read.nbytes
            + chunk.grad_nbytes
            + (chunk.weight_read.nbytes if job.weight is None else 0)
            for chunk in rest
        )
        progress.unwritten_nbytes = sum(
            chunk.state_write.nbytes + chunk.weight_write.nbytes
            for chunk in (*rest, *(slot.chunk for slot in reading))
        )
        for slot in reading:
            slot.progress = None
        self._drop(reading)
        self._waiting = [each for each in self._waiting if each[1] is not progress]
        heapify(self._waiting)
        if progress.ended:
            self._finish(progress)

    # --- what is read ahead ------------------------------------------------------------------

    def _read_ahead(self) -> bool:
        """While no job waits for a buffer: send out the read of a state whose job will come."""
        coming = self._ahead.next() if len(self._slots) + RESERVE < self._depth else None
        if coming is None or self._waiting:
            return False
        name, chunk = coming
        ordinary = rounded(self._nbytes(chunk) - chunk.grad_nbytes)
        if len(self._slots) + RESERVE >= self._depth * ordinary // rounded(self._nbytes(chunk)):
            return False  # see [Note: a gradient on NVMe]
        lease = self._pool.try_lease(self._nbytes(chunk), who=f"update of {name}")
        if lease is None:
            return False
        self._ahead.advance()
        self._read(Slot(None, name, chunk, lease))
        self._count_ahead()
        return True

    def _take_over(self, progress: Progress) -> None:
        """Give a new job what was read for it: its first chunks."""
        job = progress.job
        self._ahead.came(job)
        slots = [slot for slot in self._slots if slot.ahead and not slot.dropped and slot.name == job.name]
        if [slot.chunk.reads for slot in slots] != [chunk.reads for chunk in job.chunks[: len(slots)]]:
            self._drop(slots)
            return
        progress.started = len(slots)
        for slot, chunk in zip(slots, job.chunks, strict=False):
            slot.progress, slot.chunk = progress, chunk  # which knows where it is written
            self._read_rest(slot, job)

    def _drop(self, slots: list[Slot]) -> None:
        for slot in slots:
            slot.dropped = True  # its buffer goes when no byte is in flight
        if slots:
            self._notify()

    def _count_ahead(self) -> None:
        with self._changed:
            self._ahead_count = sum(slot.ahead for slot in self._slots)
            self._changed.notify_all()

    def _sleep(self, seen: int) -> bool:
        with self._changed:
            if self._closing and not (self._jobs or self._submitted or self._slots):
                return False
            began = time.perf_counter()
            self._changed.wait_for(lambda: self._events != seen)
        waited_s = time.perf_counter() - began
        if any(not slot.writing and not slot.ahead for slot in self._slots):
            self._count_up(read_wait_s=waited_s)
        elif any(slot.writing for slot in self._slots):
            self._count_up(write_wait_s=waited_s)
        return True

    def _start(self) -> bool:
        """Send out the reads of as many chunks as there are buffers for."""
        started = False
        while self._waiting and len(self._slots) < self._depth:
            progress = self._waiting[0][1]
            chunk = progress.job.chunks[progress.started]
            lease = self._lease(chunk, progress.job.name)
            if lease is None:
                break
            progress.started += 1
            if progress.started == len(progress.job.chunks):
                heappop(self._waiting)
            self._read(Slot(progress, progress.job.name, chunk, lease))
            started = True
        return started

    def _lease(self, chunk: Chunk, name: str) -> Lease | None:
        """A buffer; None when it will come with the end of a chunk in flight."""
        nbytes, who = self._nbytes(chunk), f"update of {name}"
        lease = self._pool.try_lease(nbytes, who=who)
        if lease is None and self._slots and all(slot.ahead for slot in self._slots):
            self._drop(self._slots)  # others hold the reserve: a job that has come goes first
        elif lease is None and not self._slots:
            began = time.perf_counter()
            lease = self._pool.lease(nbytes, who=who)
            self._count_up(buffer_wait_s=time.perf_counter() - began)
        return lease

    def _nbytes(self, chunk: Chunk) -> int:
        """Of a chunk's buffer: its state, then its weights, then its gradient if that is read."""
        weight_nbytes = self._layout.weight_nbytes(chunk.numel)
        return self._layout.state_nbytes(chunk.numel) + weight_nbytes + chunk.grad_nbytes

    def _read(self, slot: Slot) -> None:
        self._slots.append(slot)
        self._read_into(slot, slot.chunk.state_read, 0)
        if slot.progress is not None:
            self._read_rest(slot, slot.progress.job)

    def _read_rest(self, slot: Slot, job: UpdateJob) -> None:
        """Send out the reads of what is known when the job has come."""
        chunk = slot.chunk
        begin = chunk.state_read.nbytes
        if job.weight is None:
            self._read_into(slot, chunk.weight_read, begin)
        if chunk.grad_read is not None:
            self._read_into(slot, chunk.grad_read, begin + chunk.weight_read.nbytes)

    def _read_into(self, slot: Slot, extent: Extent, begin: int) -> None:
        slot.transfers.append(self._engine.read(extent, slot.lease.memory[begin : begin + extent.nbytes]))
        slot.transfers[-1].then(self._notify)
        self._count_up(nbytes_read=extent.nbytes)

    def _update(self) -> bool:
        """Update the most urgent chunk that has been read, and send out its writes."""
        ready = [
            (slot.progress.order, slot.chunk.start, slot.progress, slot)
            for slot in self._slots
            if slot.progress is not None and not slot.writing and slot.ended
        ]
        if not ready:
            return False
        *_, progress, slot = min(ready, key=lambda each: each[:2])
        slot.wait()
        began = time.perf_counter()
        self._apply(progress.job, slot)
        self._count_up(update_s=time.perf_counter() - began)
        self._write(slot)
        progress.updated += 1
        if progress.updated == len(progress.job.chunks):
            self._computed(progress)
        return True

    def _apply(self, job: UpdateJob, slot: Slot) -> None:
        """Run the rule over the chunk's runs; elsewhere carry the weights over."""
        chunk, buffer = slot.chunk, slot.lease.tensor
        middle = self._layout.state_nbytes(chunk.numel)
        end = middle + self._layout.weight_nbytes(chunk.numel)
        state = self._layout.views(buffer[:middle], chunk.numel)
        new = buffer[middle:end].view(self._layout.dtype)
        whole = slice(chunk.start, chunk.start + chunk.numel)
        old = new if job.weight is None else job.weight[whole]
        if isinstance(job.grad, Tensor):
            grad = job.grad[whole]
        else:
            grad = buffer[end : end + chunk.grad_nbytes].view(job.grad)
        for begin, stop, hyper in pieces(job.runs, whole.start, whole.stop):
            part = slice(begin - chunk.start, stop - chunk.start)
            if hyper is not None:
                parts = tuple(field[part] for field in state)
                self._rule.update(old[part], grad[part], parts, new[part], hyper)
            elif old is not new:
                new[part].copy_(old[part])
        if job.in_place is not None:
            job.in_place[whole].copy_(new)

    def _write(self, slot: Slot) -> None:
        chunk, memory = slot.chunk, slot.lease.memory
        middle = chunk.state_write.nbytes
        end = middle + chunk.weight_write.nbytes
        slot.writing = True
        slot.transfers = [self._engine.write(chunk.state_write, memory[:middle])]
        slot.transfers.append(self._engine.write(chunk.weight_write, memory[middle:end]))
        self._count_up(nbytes_written=end)
        for transfer in slot.transfers:
            transfer.then(self._notify)

    def _land(self) -> bool:
        """Give back the buffers of chunks that are written, or read in vain, and finish jobs."""
        landed = [slot for slot in self._slots if (slot.writing or slot.dropped) and slot.ended]
        for slot in landed:
            if slot.writing:
                slot.wait()
            self._slots.remove(slot)
            slot.lease.release()
            if slot.progress is None:
                self._count_ahead()
                continue
            slot.progress.landed += 1
            if slot.progress.ended:
                self._finish(slot.progress)
        return bool(landed)

    # --- the ends of jobs --------------------------------------------------------------------

    def _computed(self, progress: Progress) -> None:
        if progress.job.on_computed is not None:
            progress.job.on_computed()

    def _finish(self, progress: Progress) -> None:
        del self._jobs[progress.order]
        try:
            progress.job.on_done(None)
        finally:
            self._ended(1)

    def _ended(self, jobs: int) -> None:
        with self._changed:
            self._unfinished -= jobs
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        """End every job with ``error``; see [Note: one error ends all]."""
        with self._changed:
            self._error = error
            late = [each for each in self._submitted if isinstance(each, Progress)]
            failed = [*(self._jobs[order] for order in sorted(self._jobs)), *late]
            self._submitted = []
        for slot in self._slots:
            slot.settle()
        self._slots.clear()
        self._count_ahead()
        for progress in failed:
            try:
                progress.job.on_done(error)
            except BaseException as second:  # the others must learn of the first
                error.add_note(f"{progress.job.name}: on_done raised {second!r} when told of this")
        self._ended(len(failed))

    def _count_up(self, **more: float) -> None:
        new = {name: getattr(self._stats, name) + value for name, value in more.items()}
        self._stats = replace(self._stats, **new)
