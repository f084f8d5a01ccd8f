"""The chunk pipeline: read i+1, update i and write i-1 at the same time, on a thread of its own.

A chunk is a part of a shard that fits one staging buffer. It goes through three stages::

    READING   its state (and its weights, where they are not at hand) flies into the buffer
    UPDATED   the rule has run; the new weights and the new state lie in the buffer
    WRITING   they fly to the next version; then the buffer is given back

States may be read before their job comes, see :mod:`infinity.optim.ahead`. Up to ``depth`` chunks are in
some stage. The thread sleeps until a transfer ends or a job comes. What
starts next is the first chunk of the job with the lowest priority number; what is updated next is the
most urgent chunk whose reads have ended, in whatever order they end.

[Note: one error ends all] After a disk error nobody can say which version is whole but the committed
one, which no job writes to. So the first error fails the job that met it and every other job, given or
still to come, with that same error. Transfers in flight are awaited before their buffers are given
back, because the kernel may still write into them.
"""

import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from heapq import heappop, heappush

from infinity.core.errors import StateError
from infinity.core.transfer import Lease, Pool, TransferEngine
from infinity.optim.ahead import RESERVE, Expected, ReadAhead
from infinity.optim.job import Chunk, Run, UpdateJob, check_job, pieces
from infinity.optim.layout import StateLayout
from infinity.optim.rules import AdamWRule
from infinity.optim.slot import PipelineStats, Progress, Slot

__all__ = ["Chunk", "Expected", "PipelineStats", "Run", "UpdateJob", "UpdatePipeline"]


class UpdatePipeline:
    """Plays update jobs beside training.

    Args:
        engine: Moves the bytes.
        pool: Staging buffers are leased from it, each as long as its chunk is in flight.
        layout: What the state holds.
        rule: Updates a slice of a chunk.
        depth: Chunks in flight at one time.
        name: Of the thread.
    """

    def __init__(
        self, engine: TransferEngine, pool: Pool, layout: StateLayout, rule: AdamWRule, *,
        depth: int = 3, name: str = "infinity-update",
    ) -> None:  # fmt: skip
        if depth < 1:
            raise ValueError(f"depth is {depth}; a pipeline holds at least 1 chunk")
        self._engine, self._pool, self._layout, self._rule = engine, pool, layout, rule
        self._depth = depth
        self._changed = threading.Condition()  # guards what follows
        self._events = 0
        self._submitted: list[Progress | ReadAhead] = []  # in order of arrival
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

    def submit(self, job: UpdateJob) -> None:
        """Queue ``job``; returns at once.

        Raises:
            ValueError: Chunks and runs do not fit the shard.
            StateError: The pipeline is closed.
            BaseException: The error that ended the pipeline.
        """
        check_job(job, self._layout)
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._closing:
                raise StateError(f"{job.name}: the update pipeline is closed")
            self._count += 1
            self._unfinished += 1
            self._submitted.append(Progress(job, (job.priority, self._count)))
            self._notify()

    def expect(self, expected: Iterable[Expected]) -> None:
        """Jobs that will come, in order: their states may be read now. What was expected before is over."""
        with self._changed:
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
                raise self._error

    @property
    def idle(self) -> bool:
        """Whether every submitted job is done."""
        return self._unfinished == 0

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

    # --- what is read ahead ------------------------------------------------------------------

    def _read_ahead(self) -> bool:
        """While no job waits for a buffer: send out the read of a state whose job will come."""
        coming = self._ahead.next() if len(self._slots) + RESERVE < self._depth else None
        if coming is None or self._waiting:
            return False
        name, chunk = coming
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
        if tuple(slot.chunk for slot in slots) != job.chunks[: len(slots)]:
            self._drop(slots)
            return
        progress.started = len(slots)
        for slot in slots:
            slot.progress = progress
            if job.weight is None:
                self._read_weight(slot)

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
        """Of a chunk's buffer: its state, then its weights."""
        return self._layout.state_nbytes(chunk.numel) + self._layout.weight_nbytes(chunk.numel)

    def _read(self, slot: Slot) -> None:
        self._slots.append(slot)
        extent = slot.chunk.state_read
        slot.transfers = [self._engine.read(extent, slot.lease.memory[: extent.nbytes])]
        slot.transfers[0].then(self._notify)
        self._count_up(nbytes_read=extent.nbytes)
        if slot.progress is not None and slot.progress.job.weight is None:
            self._read_weight(slot)

    def _read_weight(self, slot: Slot) -> None:
        extent, begin = slot.chunk.weight_read, slot.chunk.state_read.nbytes
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
        old = new if job.weight is None else job.weight[chunk.start : chunk.start + chunk.numel]
        for begin, stop, hyper in pieces(job.runs, chunk.start, chunk.start + chunk.numel):
            part = slice(begin - chunk.start, stop - chunk.start)
            if hyper is not None:
                parts = tuple(field[part] for field in state)
                self._rule.update(old[part], job.grad[begin:stop], parts, new[part], hyper)
            elif old is not new:
                new[part].copy_(old[part])
        if job.in_place:
            old.copy_(new)

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
            if slot.progress.landed == len(slot.progress.job.chunks):
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
