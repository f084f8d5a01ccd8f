"""The update pipeline: read i+1, compute i and write i-1 at the same time, on a thread of its own.

What is read, computed and written next is decided by :class:`infinity.planner.chunk_queue.ChunkQueue`. Here
are the buffers, the transfers, the rule and the thread, which takes events from one inbox: jobs that come,
and transfers that have ended. It sleeps until there is one.

[Note: one error ends all]
After a disk error only the committed version is known to be whole, since no job writes to it. So the first
error fails the job that met it and every other job, given or still to come, with that same error. Transfers
in flight are awaited before their buffers are given back, because the kernel may still write into them.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import torch
from torch import Tensor

from infinity.core.budget import rounded
from infinity.core.errors import StateError, copied
from infinity.core.nbytes import Extent
from infinity.core.transfer import Lease, Pool, Transfer, TransferEngine
from infinity.optim.layout import StateLayout
from infinity.optim.rules import Rule
from infinity.planner.chunk_queue import (
    Actions,
    ChunkInFlight,
    ChunkQueue,
    Compute,
    Computed,
    Ended,
    Expected,
    Free,
    Job,
    Read,
    ReadRest,
    Stage,
    Write,
)
from infinity.shards.hypers import Run
from infinity.shards.store import ChunkExtents, Version


@dataclass(slots=True, kw_only=True, eq=False)
class UpdateJob(Job):
    """The update of one shard on NVMe.

    Attributes:
        weight: The shard in the compute dtype, ``(shard_numel,)``; None: each chunk reads its own, too.
        grad: ``(shard_numel,)``, or the dtype of a gradient that each chunk reads its part of.
        reads: The version that is updated; its chunks do not overlap.
        writes: The version that the new values go to, in the same chunks.
        gradient: Where that lies on NVMe.
        runs: Ascending, not overlapping.
        in_place: The new weights are put there, too, before ``on_computed``; it may be ``weight`` itself.
        on_computed: Called when the last chunk has been computed: ``weight`` and ``grad`` are used no more.
            Not called when the job fails or is cancelled before.
        on_done: Called once, after the last write has landed, or with the error. Both are called on the
            pipeline's thread.
    """

    weight: Tensor | None
    grad: Tensor | torch.dtype
    reads: Version
    writes: Version
    gradient: Extent | None = None
    runs: tuple[Run, ...]
    in_place: Tensor | None = None
    on_computed: Callable[[], None]
    on_done: Callable[[BaseException | None], None]

    def __post_init__(self) -> None:
        self.chunks, self.source = len(self.reads.chunks), (self.reads, self.gradient)

    def grad_read(self, chunk: ChunkExtents) -> Extent | None:
        """Return what a chunk reads of the gradient; None: it is at hand."""
        if self.gradient is None or isinstance(self.grad, Tensor):
            return None
        itemsize = self.grad.itemsize
        return self.gradient.part(itemsize * chunk.start, itemsize * chunk.numel)

    @property
    def unread_nbytes(self) -> int:
        """Bytes that a cancelled job did not read."""
        return sum(self._read_nbytes(self.reads.chunks[index]) for index in self.unread)

    @property
    def unwritten_nbytes(self) -> int:
        """Bytes that a cancelled job did not write."""
        chunks = [self.writes.chunks[index] for index in self.unwritten]
        return sum(chunk.state.nbytes + chunk.weight.nbytes for chunk in chunks)

    def _read_nbytes(self, chunk: ChunkExtents) -> int:
        gradient, weight_nbytes = self.grad_read(chunk), 0 if self.weight is not None else chunk.weight.nbytes
        return chunk.state.nbytes + weight_nbytes + (gradient.nbytes if gradient is not None else 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpectedUpdate(Expected):
    """An update that will come.

    Attributes:
        reads: The version that it will read.
        grad_itemsize: Bytes per element of a gradient that its chunks will read; 0: it will be at hand.
    """

    reads: Version
    grad_itemsize: int = 0


@dataclass(slots=True)
class PipelineStats:
    """What the pipeline's thread did since it was made, in seconds of wall clock, and bytes moved.

    Attributes:
        buffer_wait_s: Nothing in flight, and no staging buffer to be had.
        read_wait_s: Nothing to compute, and reads in flight.
        write_wait_s: Nothing to compute, and only writes in flight.
        update_s: In the rule.
    """

    buffer_wait_s: float = 0.0
    read_wait_s: float = 0.0
    write_wait_s: float = 0.0
    update_s: float = 0.0
    nbytes_read: int = 0
    nbytes_written: int = 0


@dataclass(slots=True)
class _Buffer:
    """The staging memory of a chunk in flight: its state, its weights, and its gradient if that is read.

    Attributes:
        extents: Of the version that is read.
        transfers: The last ones.
    """

    lease: Lease
    extents: ChunkExtents
    transfers: list[Transfer] = field(default_factory=list)

    def settle(self) -> None:
        """Wait until no byte of the buffer is in flight, however that ends; give it back."""
        for transfer in self.transfers:
            with suppress(BaseException):
                transfer.wait()
        self.lease.release()


class UpdatePipeline:
    """Plays update jobs beside training.

    Args:
        engine: Moves the bytes.
        pool: Staging buffers are leased from it, each as long as its chunk is in flight.
        layout: What the state holds.
        rule: Updates a slice of a chunk.
        depth: Chunks in flight at one time.
        name: Of the thread.

    Attributes:
        stats: What the thread did so far.
    """

    def __init__(
        self, engine: TransferEngine, pool: Pool, layout: StateLayout, rule: Rule, *,
        depth: int = 3, name: str = "infinity-update",
    ) -> None:  # fmt: skip
        self._engine, self._pool, self._layout, self._rule = engine, pool, layout, rule
        self.stats = PipelineStats()
        self._inbox: SimpleQueue[Callable[[], Actions]] = SimpleQueue()  # what has happened
        self._lock = threading.Lock()  # guards the next one, and the order of what is put beside it
        self._refusal: BaseException | None = None  # of what comes: it failed, or is closed
        self._drained: list[Transfer] = []  # end when the queue is idle
        self._queue = ChunkQueue(depth)  # the thread's, as what follows
        self._buffers: dict[ChunkInFlight, _Buffer] = {}
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    # --- any thread --------------------------------------------------------------------------

    def submit(self, job: UpdateJob) -> None:
        """Queue ``job``; returns at once.

        Raises:
            StateError: The pipeline is closed.
            BaseException: The error that ended the pipeline.
        """
        self._tell(partial(self._queue.submit, job))

    def cancel(self, job: UpdateJob) -> None:
        """End a job soon; returns at once. ``on_done`` is called as ever.

        See [Note: a cancelled job] in :mod:`infinity.planner.chunk_queue`.
        """
        self._inbox.put(partial(self._queue.cancel, job))

    def expect(self, expected: Iterable[ExpectedUpdate]) -> None:
        """Jobs that will come, in order: their states may be read now. What was expected before is over."""
        self._inbox.put(partial(self._queue.expect, [*expected]))

    def drain(self) -> None:
        """Block until every submitted job is done, and nothing that was read ahead is kept.

        Raises:
            BaseException: The error that ended the pipeline.
        """
        drained = Transfer()
        self._tell(partial(self._begin_drain, drained))
        drained.wait()

    def abandon(self, error: BaseException) -> None:
        """End every job with ``error``, without starting another chunk; returns at once."""
        self._inbox.put(partial(_raise, error))

    def close(self) -> None:
        """Finish what was submitted, then end the thread; raises nothing. May be called again."""
        with self._lock:
            self._refusal = self._refusal or StateError("the update pipeline is closed")
        self.expect(())
        self._thread.join()

    def _tell(self, event: Callable[[], Actions]) -> None:
        with self._lock:
            if self._refusal is not None:
                raise copied(self._refusal)
            self._inbox.put(event)

    # --- the pipeline's thread ---------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not (self._refusal and self._inbox.empty() and self._queue.idle):
                self._turn()
        except BaseException as error:  # everyone who waits must learn of it
            self._fail(error)

    def _turn(self) -> None:
        """Begin what can begin now, or sleep until something has happened."""
        while not self._inbox.empty():
            self._carry_out(self._inbox.get()())
        if self._queue.idle:
            while self._drained:
                self._drained.pop().finish()
        action = self._queue.next()
        if action is not None:
            self._carry_out([action])
        elif not (self._refusal and self._queue.idle):
            self._carry_out(self._sleep()())

    def _sleep(self) -> Callable[[], Actions]:
        began, stats = time.perf_counter(), self.stats
        event = self._inbox.get()
        waited_s, chunks = time.perf_counter() - began, self._queue.in_flight
        if any(chunk.job is not None and chunk.stage is Stage.READING for chunk in chunks):
            stats.read_wait_s += waited_s
        elif any(chunk.stage is Stage.WRITING for chunk in chunks):
            stats.write_wait_s += waited_s
        return event

    def _begin_drain(self, drained: Transfer) -> Actions:
        self._drained.append(drained)
        return self._queue.expect(())

    def _carry_out(self, actions: Actions) -> None:
        for action in actions:
            match action:
                case Read(chunk):
                    self._read(chunk)
                case ReadRest(chunk):
                    self._read_rest(chunk)
                case Compute(chunk):
                    self._compute(chunk)
                case Write(chunk):
                    self._write(chunk)
                case Free(chunk):
                    self._free(chunk)
                case Computed(UpdateJob() as job):
                    job.on_computed()
                case Ended(UpdateJob() as job):
                    job.on_done(None)

    # --- a chunk -----------------------------------------------------------------------------

    def _read(self, chunk: ChunkInFlight) -> None:
        """Lease a buffer and read the state into it; of a job that has come the rest, too."""
        job = chunk.job
        if isinstance(job, UpdateJob):
            extents = job.reads.chunks[chunk.index]
            gradient = job.grad_read(extents)
            grad_nbytes = 0 if gradient is None else gradient.nbytes
        else:
            expected = chunk.expected
            assert isinstance(expected, ExpectedUpdate)
            extents = expected.reads.chunks[chunk.index]
            grad_nbytes = expected.grad_itemsize * extents.numel
        lease = self._lease(chunk, self._chunk_nbytes(extents.numel) + grad_nbytes, f"update of {chunk.name}")
        if lease is None:
            self._carry_out(self._queue.refuse(chunk))
            return
        self._buffers[chunk] = _Buffer(lease, extents)
        self._read_into(chunk, extents.state, 0)
        if job is not None:
            self._read_rest(chunk)

    def _lease(self, chunk: ChunkInFlight, nbytes: int, who: str) -> Lease | None:
        """Return a buffer; None if one will come with the end of another chunk in flight."""
        lease = self._pool.try_lease(nbytes, who=who)
        if lease is None and chunk.job is not None and len(self._queue.in_flight) == 1:
            began = time.perf_counter()
            lease = self._pool.lease(nbytes, who=who)
            self.stats.buffer_wait_s += time.perf_counter() - began
        return lease

    def fits(self, numel: int, grad_itemsize: int) -> int:
        """Return how many chunks that read a gradient have the room of ``depth`` others."""
        nbytes = self._chunk_nbytes(numel)
        return self._queue.depth * rounded(nbytes) // rounded(nbytes + grad_itemsize * numel)

    def _chunk_nbytes(self, numel: int) -> int:
        return self._layout.state_nbytes(numel) + self._layout.weight_nbytes(numel)

    def _read_rest(self, chunk: ChunkInFlight) -> None:
        """Read weights and gradient, where they are not at hand."""
        job, extents = _job(chunk), self._buffers[chunk].extents
        begin = extents.state.nbytes
        if job.weight is None:
            self._read_into(chunk, extents.weight, begin)
        gradient = job.grad_read(extents)
        if gradient is not None:
            self._read_into(chunk, gradient, begin + extents.weight.nbytes)

    def _read_into(self, chunk: ChunkInFlight, extent: Extent, begin: int) -> None:
        memory = self._buffers[chunk].lease.memory[begin : begin + extent.nbytes]
        self._follow(chunk, self._engine.read(extent, memory))
        self.stats.nbytes_read += extent.nbytes

    def _follow(self, chunk: ChunkInFlight, transfer: Transfer) -> None:
        """Let the thread know when a transfer of a chunk ends."""
        self._buffers[chunk].transfers.append(transfer)
        chunk.moving += 1
        transfer.then(partial(self._inbox.put, partial(self._moved, chunk, transfer)))

    def _moved(self, chunk: ChunkInFlight, transfer: Transfer) -> Actions:
        if chunk.stage is not Stage.DROPPED:
            transfer.wait()
        return self._queue.moved(chunk)

    def _compute(self, chunk: ChunkInFlight) -> None:
        """Run the rule over the chunk's runs; elsewhere carry the weights over."""
        began, job, held = time.perf_counter(), _job(chunk), self._buffers[chunk]
        extents, buffer = held.extents, held.lease.tensor
        middle = self._layout.state_nbytes(extents.numel)
        end = middle + self._layout.weight_nbytes(extents.numel)
        state = self._layout.views(buffer[:middle], extents.numel)
        new = buffer[middle:end].view(self._layout.dtype)
        whole = slice(extents.start, extents.start + extents.numel)
        old = new if job.weight is None else job.weight[whole]
        if isinstance(job.grad, Tensor):
            grad = job.grad[whole]
        else:
            grad = buffer[end : end + extents.numel * job.grad.itemsize].view(job.grad)
        for begin, stop, hyper in pieces(job.runs, whole.start, whole.stop):
            part = slice(begin - whole.start, stop - whole.start)
            if hyper is not None:
                parts = tuple(each[part] for each in state)
                self._rule.update(old[part], grad[part], parts, new[part], hyper)
            elif old is not new:
                new[part].copy_(old[part])
        if job.in_place is not None:
            job.in_place[whole].copy_(new)
        self.stats.update_s += time.perf_counter() - began
        self._carry_out(self._queue.computed(chunk))

    def _write(self, chunk: ChunkInFlight) -> None:
        buffer, extents = self._buffers[chunk], _job(chunk).writes.chunks[chunk.index]
        memory, state = buffer.lease.memory, extents.state
        buffer.transfers.clear()
        self._follow(chunk, self._engine.write(state, memory[: state.nbytes]))
        end = state.nbytes + extents.weight.nbytes
        self._follow(chunk, self._engine.write(extents.weight, memory[state.nbytes : end]))
        self.stats.nbytes_written += end

    def _free(self, chunk: ChunkInFlight) -> None:
        self._buffers.pop(chunk).lease.release()

    # --- the end of all ----------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        """End every job with ``error``; see [Note: one error ends all]."""
        with self._lock:
            self._refusal = error
        for buffer in self._buffers.values():
            buffer.settle()
        failed: list[Job] = []
        while not self._inbox.empty():  # jobs that came meanwhile, or were cancelled
            with suppress(BaseException):
                failed += [each.job for each in self._inbox.get()() if isinstance(each, Ended)]
        failed += [self._queue.jobs[order] for order in sorted(self._queue.jobs)]
        for job in failed:
            assert isinstance(job, UpdateJob)
            try:
                job.on_done(error)
            except BaseException as second:  # the others must learn of the first
                error.add_note(f"{job.name}: on_done raised {second!r} when told of this")
        for drained in self._drained:
            drained.finish(error)


def _job(chunk: ChunkInFlight) -> UpdateJob:
    assert isinstance(chunk.job, UpdateJob)
    return chunk.job


def _raise(error: BaseException) -> Actions:
    raise error


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
