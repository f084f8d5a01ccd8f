"""The update pipeline: read i+1, compute i and write i-1 at the same time, on a thread of its own.

:class:`infinity.planner.updates.ChunkQueue` decides what is read, computed and written next. The thread
carries that out, and sleeps until its inbox has an event: a new job, or the end of a transfer.

[Note: one error ends all] After a disk error only the committed version is known to be whole, since no job
writes to it. So the first error fails every job, present or future. Transfers in flight are awaited before
their buffers are released, because the kernel may still write into them.

[Note: step counts] The bias correction of a parameter depends on how often that parameter was updated. So its
segment has its own count, which grows when an update of it is committed. A shard is updated in runs of
segments with equal group and count: one run per group, as long as every step uses every parameter.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from infinity.comm.ranks import Ranks
from infinity.core.config import SettingError
from infinity.core.errors import StateError, copied
from infinity.core.nbytes import Extent, Transfer, TransferEngine, aligned, rounded
from infinity.device.memory import Lease, Pool
from infinity.optim.matrix import MATRIX, matrices_of
from infinity.optim.rule import Group, Place, Rule, Way
from infinity.optim.rules import LossScaler, PlacedRule
from infinity.optim.state import BLOCK_NUMEL, StateLayout
from infinity.partition.unit import Segment, Unit
from infinity.planner.updates import ChunkInFlight, ChunkQueue, Job, Move, Moves, Stage
from infinity.shards.journal import NOWHERE, ChunkExtents, Version


class Run(NamedTuple):
    """Elements ``[start, stop)`` of a shard, updated alike; elements in no run are carried over."""

    start: int
    stop: int
    hyper: Tensor
    rule: Rule


class Runs(NamedTuple):
    """How a shard is updated: see [Note: two passes] of :mod:`infinity.optim.matrix`."""

    last: tuple[Run, ...]  # of a rule without matrices, all of the update
    first: tuple[Run, ...] = ()  # make directions of gradients, in their place
    matrices: tuple[Place, ...] = ()  # the same on all ranks; in the flat buffer of the unit
    factor: float = 1.0  # of directions, before a transform


#: Hyperparameters, and the rule that takes them.
Hyper = tuple[Tensor, Rule]


def runs_of(unit: Unit, hyper_of: Mapping[int, Hyper]) -> tuple[Run, ...]:
    """Cut the shard into runs of equal hyperparameters, given by ``hyper_of`` for each segment's index.

    They end with whole blocks: behind a segment is padding, which stays zero.
    """
    runs: list[Run] = []
    low, high = unit.shard_start, unit.shard_start + unit.shard_numel
    joined = False  # only padding lies between the last run and this segment; it stays zero
    for segment in unit.segments:
        hyper = hyper_of.get(segment.index)
        start, stop = max(low, segment.offset) - low, min(high, segment.stop) - low
        if hyper is None:
            joined = False
        elif start < stop:
            stop = aligned(stop, BLOCK_NUMEL)
            if joined and runs[-1].hyper is hyper[0]:
                start = runs.pop().start
            runs.append(Run(start, stop, *hyper))
            joined = True
    return tuple(runs)


#: Numbers of matrices of a parameter, and what is kept of these, by name: a row for each.
Part = tuple[Sequence[int], Mapping[str, Tensor]]


class Sums:
    """What a rule keeps of whole matrices: fp32, zero at first, in leased host memory of each one's owner.

    Owners are chosen from the shapes alone, in the order of the groups, so that each keeps about as much.

    Attributes:
        was: By id of a parameter, the names of its moments, and the shapes of what is kept of its matrices.
        owners: By id of a parameter, the rank that keeps what is kept of each of its matrices.
    """

    def __init__(self, rule: Rule, ranks: Ranks) -> None:
        self._rule, self._ranks, self.owners = rule, ranks, dict[int, list[int]]()
        self.was: dict[int, tuple[Sequence[str], Mapping[str, Sequence[int]]]] = {}
        self._of: dict[int, dict[str, Tensor]] = {}  # of this rank's matrices, a row for each
        self._numels = [0] * ranks.world_size  # that each rank keeps
        self._pool: Pool | None = None
        self._leases: list[Lease] = []  # kept for as long as the pool

    def hold(self, groups: Iterable[Group], pool: Pool) -> None:
        """Make room for parameters of these groups that have none yet; BudgetError: there is none."""
        self._pool = pool
        self._add((group, param) for group in groups for param in group["params"])

    def _add(self, params: Iterable[tuple[Group, nn.Parameter]]) -> None:
        was, owners, numels = dict(self.was), dict(self.owners), [*self._numels]
        shapes = dict[int, dict[str, tuple[int, ...]]]()
        for group, param in params:
            key, packed = id(param), len(param.shape) == 3
            if key not in was:
                was[key] = self._rule.kept(group, param.shape), self._rule.sums(param.shape, group)
            if key not in owners:
                kept, ranks = was[key][1], list[int]()
                count = matrices_of(param.shape)[0] if kept else 0
                for _ in range(count):
                    ranks.append(numels.index(min(numels)))
                    numels[ranks[-1]] += sum(map(math.prod, kept.values())) // count
                owners[key], own = ranks, ranks.count(self._ranks.rank)
                shapes[key] = {name: (own, *(tuple(of[packed:]) or (1,))) for name, of in kept.items()}
        sizes = [math.prod(shape) for each in shapes.values() for shape in each.values()]
        flat: Iterator[Tensor] = iter(())
        if sizes:
            assert self._pool is not None
            self._leases.append(lease := self._pool.lease(4 * sum(sizes), who="sums of matrices"))
            flat = iter(torch.split(lease.tensor[: 4 * sum(sizes)].zero_().view(torch.float32), sizes))
        self.was, self.owners, self._numels = was, owners, numels  # there is room
        self._of |= {k: {n: next(flat).view(of) for n, of in each.items()} for k, each in shapes.items()}

    def check(self, group: Group, segment: Segment, *, loads: bool = False) -> None:
        """Raise a SettingError if a group's numbers change what is kept of a parameter.

        With numbers that it ``loads`` come moments of elements, of any names.
        """
        shape = segment.whole_shape
        now = self._rule.kept(group, shape), self._rule.sums(shape, group)
        if self.was.get(id(segment.whole), now)[loads:] != now[loads:]:
            name = MATRIX if MATRIX in group else "param_groups"
            raise SettingError(
                name, group.get(name), f"as it was when the optimizer was made or loaded, since states of "
                f"{segment.whole_name} are of that"
            )  # fmt: skip

    def of_matrix(
        self, group: Group, segment: Segment, number: int
    ) -> tuple[int, Mapping[str, Tensor], int | None]:
        """Return the count of this update of a matrix of a parameter or tile, what is kept, and the owner."""
        key, (_, rows, columns) = id(segment.whole), matrices_of(segment.whole_shape)
        if key not in self.owners:  # it was put into a group without add_param_group
            self._add([(group, segment.whole)])
        if not self._of[key]:
            return segment.steps + 1, {}, None
        place = segment.first // max(1, rows * columns) + number
        before, owner = self.owners[key][:place].count(self._ranks.rank), self.owners[key][place]
        own = owner == self._ranks.rank
        kept = {name: each[before] for name, each in self._of[key].items()} if own else {}
        return segment.steps + 1, kept, owner

    def _places(self, key: int, rank: int) -> list[int]:
        return [place for place, owner in enumerate(self.owners[key]) if owner == rank]

    def own(self, param: nn.Parameter) -> Part:
        """Return copies of what this rank keeps of a parameter."""
        kept = {name: values.clone() for name, values in self._of[id(param)].items()}
        return self._places(id(param), self._ranks.rank), kept

    def whole(self, param: nn.Parameter) -> dict[str, Tensor]:
        """Return copies of what is kept of a parameter, on rank 0 with values. Every rank must call."""
        key, (ranks, world) = id(param), (self._ranks, range(self._ranks.world_size))
        owners, found = self.owners[key], dict[str, Tensor]()
        for name, shape in self.was[key][1].items():
            numel, part = math.prod(shape) // max(1, len(owners)), self._of[key][name].reshape(-1).clone()
            counts = [numel * owners.count(rank) for rank in world]
            if ranks.collectives is not None:
                got, sent = ([0] * len(world) if ranks.rank else counts), [0] * len(world)
                sent[0] = len(part)
                part = ranks.collectives.all_to_all("sums of matrices", part, sent, got)
            found[name] = torch.empty(tuple(shape), device="meta" if ranks.rank else "cpu")
            for rank, values in enumerate(() if ranks.rank else torch.split(part, counts)):
                places = self._places(key, rank)
                found[name].view(len(owners), numel)[places] = values.view(len(places), numel)
        return found

    def load(self, found: Mapping[int | None, Sequence[Part]]) -> None:
        """Replace what is kept, by id of the parameter; where it has no parts, it becomes zero."""
        for key, kept in self._of.items():
            own = {place: row for row, place in enumerate(self._places(key, self._ranks.rank))}
            parts = found.get(key, ())
            if parts and not own.keys() <= {place for places, _ in parts for place in places}:
                raise StateError(
                    "other ranks kept what the rule keeps of matrices in the interrupted run: make parameter "
                    "groups with the same parameters in the same order, or go on with another number of ranks"
                )
            for name, values in kept.items():
                values.zero_()
                for places, given in parts:
                    rows = given[name].reshape(len(places), *values.shape[1:])
                    for place, row in zip(places, rows, strict=True):
                        if place in own:
                            values[own[place]] = row


def check_group(rule: Rule, group: Group, places: Callable[[nn.Parameter], Iterable[Segment]]) -> None:
    """Raise a SettingError unless the numbers of a parameter group are possible, and fit its parameters."""
    rule.check_numbers(group)
    for segment in (each for param in group["params"] for each in places(param)):
        rule.check_place(group, segment.whole_name, segment.shape, tiled=segment.is_tile)


class StepHypers:
    """Hyperparameters of a step, read once from the optimizer's groups for all of its updates.

    Numbers of groups may change at any time. While one is ``wrong``, no update of a step starts inside
    backward: ``step()`` says what is wrong with it, and updates nothing.
    """

    def __init__(self, rule: Rule, units: Iterable[Unit], ranks: Ranks) -> None:
        self._rule, self.wrong = rule, False
        #: Sizes and numbers of groups that were right, by id of the list of parameters.
        self._right: dict[int, tuple[int, dict[str, Any]]] = {}
        self._segments: dict[int, list[Segment]] = {}  # by id of the parameter
        for segment in (segment for unit in units for segment in unit.segments):
            self._segments.setdefault(id(segment.whole), []).append(segment)
        self.groups: Sequence[Mapping[str, Any]] = ()
        self.scaler: LossScaler | None = None  # of the losses, on this rank or in the last stage
        self._read: list[dict[str, Any]] | None = None  # the options of each group; None: not in this step
        self._read_from: object = None  # the groups that were read
        self._group_of: dict[int, int] = {}  # by id of the parameter
        self._tensors: dict[tuple[Any, ...], Tensor] = {}  # by rule, group, step count and gradient scale
        self.sums = Sums(rule, ranks)
        self._lock = threading.Lock()

    def check(self, group: Group) -> None:
        """Raise a SettingError unless a group is right, and what is kept of its parameters is as it was."""
        params, numbers = group["params"], {name: group.get(name) for name in self._rule.defaults}
        count, were = self._right.get(id(params), (-1, numbers))
        if (count, were) == (len(params), numbers):
            return
        self._rule.check_numbers(group)
        if count != len(params) or {**were, "lr": 0} != {**numbers, "lr": 0}:  # which alone changes often
            check_group(self._rule, group, self._places)
            for segment in (each for param in params for each in self._places(param)):
                self.sums.check(group, segment)
        self._right[id(params)] = len(params), deepcopy(numbers)

    def _places(self, param: nn.Parameter) -> Sequence[Segment]:
        return self._segments.get(id(param), ())

    def look(self) -> None:
        """Find out whether a number of a group is wrong."""
        try:
            for group in self.groups:
                self.check(group)
            self.wrong = False
        except SettingError:
            self.wrong = True

    def begin_step(self) -> None:
        """Read the groups, unless this step has done so."""
        with self._lock:
            if self._read is None:
                self.look()
                self._read_from, self._tensors = self.groups, {}
                self._read = [deepcopy({**group, "params": ()}) for group in self.groups]
                self._group_of = {id(p): i for i, group in enumerate(self.groups) for p in group["params"]}

    def way(self, segment: Segment) -> Way | None:
        """Return how a parameter is updated, by the groups of this step, or the last; None: it is not."""
        number, groups = self._group_of.get(id(segment.whole)), self._read or self.groups
        if number is None or number >= len(groups):
            return None
        kept = partial(self.sums.of_matrix, groups[number], segment) if self._rule.in_turn else None
        return self._rule.way(groups[number], segment.offset, segment.shape, kept)

    @property
    def loss_scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.scale

    def runs(self, unit: Unit, used: Iterable[Segment], grad_scale: float) -> Runs:
        """Return the parts of a shard that are updated: see [Note: step counts]. Any thread.

        ``used`` parameters have a gradient; those in no group are left alone.
        """
        self.begin_step()
        last, first, places = dict[int, Hyper](), dict[int, Hyper](), list[Place]()
        scale, back = grad_scale / self.loss_scale, self.loss_scale if unit.dtype is torch.float16 else 1.0

        def hyper(rule: Rule, number: int, step: int, scale: float, **more: Any) -> Hyper:
            key = rule.name, number, step, scale, *more.values()
            if key not in self._tensors:
                group = {**self._read[number], **more}  # type: ignore[index]
                self._tensors[key] = rule.hyper(group, step=step, grad_scale=scale)
            return self._tensors[key], rule

        with self._lock:
            for segment in used:
                way = self.way(segment)
                if way is None or self._read is None:
                    continue
                how = self._group_of[id(segment.whole)], segment.steps + 1
                if way.first is not None:
                    first[segment.index] = hyper(way.first, *how, scale, back=back)
                last[segment.index] = hyper(way.last, *how, 1.0 if way.matrices else scale, **way.numbers)
                places += way.matrices
        return Runs(runs_of(unit, last), runs_of(unit, first), tuple(places), 1 / back if first else scale)

    def party(self, used: Iterable[Segment]) -> object:
        """Return whose gradient these parameters of a unit have: their groups' key ``adapter``, or None.

        A StateError says that they are of several.
        """
        self.begin_step()
        assert self._read is not None
        places = {self._group_of.get(id(segment.whole)) for segment in used} - {None}
        found = {self._read[place].get("adapter") for place in places if place is not None}
        if len(found) > 1:
            raise StateError(
                f"parameters of {', '.join(sorted(map(str, found)))} are in one unit, so their gradients "
                "cannot be clipped apart: give all parameter groups of an adapter the same key 'adapter'"
            )
        return next(iter(found), None)

    @property
    def parties(self) -> list[object]:
        """Return whatever :meth:`party` may return."""
        adapters = {group["adapter"] for group in self.groups if group.get("adapter") is not None}
        return [None, *sorted(adapters)]

    def count(self, used: Iterable[Segment]) -> None:
        """Count the committed update of these parameters; call after :meth:`runs`."""
        for segment in used:
            segment.steps += id(segment.whole) in self._group_of

    @property
    def changed(self) -> bool:
        """Whether the groups have changed since this step read them."""
        if self._read is None or self.wrong:
            return self._read is not None
        now, was = (
            [{n: group[n] for n in self._rule.defaults} for group in groups]
            for groups in (self.groups, self._read)
        )
        return self._read_from is not self.groups or now != was

    def end_step(self) -> None:
        """Let the next update read the groups anew."""
        self._read = None


@dataclass(frozen=True, slots=True)
class ShardSource:
    """What an update reads of one shard; ``gradient``, in ``grad_dtype``, is empty if it is in memory."""

    version: Version
    gradient: Extent = NOWHERE
    grad_dtype: torch.dtype = torch.float32

    def gradient_of(self, chunk: ChunkExtents) -> Extent:
        return self.gradient.part(*(self.grad_dtype.itemsize * each for each in (chunk.start, chunk.numel)))


@dataclass(slots=True, kw_only=True, eq=False)
class UpdateJob(Job):
    """The update of one shard on NVMe.

    Two callbacks run on the pipeline's thread: ``on_computed`` after the last chunk was computed, when
    ``weight`` and ``grad`` are no longer used (not if the job fails or is cancelled before), and ``on_done``
    once, after the last write or with the error.
    """

    source: ShardSource
    writes: Version  # the new values go there, in the chunks of ``source``
    weight: Tensor | None  # (shard_numel,) in the compute dtype, as ``grad``; None: each chunk reads its own
    grad: Tensor | None
    runs: tuple[Run, ...]  # ascending, not overlapping
    directs: bool = False  # it is a first pass, whose results take the place of ``grad``
    in_place: Tensor | None = None  # the new weights are put there, too, before ``on_computed``
    on_computed: Callable[[], None]
    on_done: Callable[[BaseException | None], None]

    def __post_init__(self) -> None:
        self.chunks = len(self.writes.chunks)

    def read_nbytes(self, indices: Iterable[int]) -> int:
        """Return the bytes that are read for these chunks."""
        chunks = [self.source.version.chunks[index] for index in indices]
        weights = 0 if self.weight is not None else sum(chunk.weight.nbytes for chunk in chunks)
        return weights + sum(chunk.state.nbytes + self.source.gradient_of(chunk).nbytes for chunk in chunks)

    def written_nbytes(self, indices: Iterable[int]) -> int:
        """Return the bytes that are written for these chunks."""
        chunks = [self.writes.chunks[index] for index in indices]
        return sum(chunk.state.nbytes + chunk.weight.nbytes for chunk in chunks)


@dataclass(slots=True)
class _Buffer:
    """The staging memory of a chunk in flight: weights, state, and the gradient if that is read."""

    lease: Lease
    extents: ChunkExtents  # of the version that is read
    transfers: list[Transfer]  # the last ones


class UpdatePipeline:
    """Plays update jobs beside training, ``depth`` chunks at a time, each in a lease of ``pool``."""

    def __init__(
        self, engine: TransferEngine, pool: Pool, layout: StateLayout, rule: PlacedRule, *, depth: int = 3
    ) -> None:
        self._engine, self._pool, self._layout, self._rule = engine, pool, layout, rule
        self._inbox: SimpleQueue[Callable[[], Moves]] = SimpleQueue()  # what has happened
        self._lock = threading.Lock()  # guards the next one, and the order of what is put beside it
        self._refusal: BaseException | None = None  # of what comes: it failed, or is closed
        self._drained: list[Transfer] = []  # end when the queue is idle
        self._queue = ChunkQueue(depth)  # the thread's, as what follows
        self._buffers: dict[ChunkInFlight, _Buffer] = {}
        self._thread = threading.Thread(target=self._main, name="infinity-update", daemon=True)
        self._thread.start()

    def submit(self, job: UpdateJob) -> None:
        """Queue ``job`` and return at once; raise the error that ended the pipeline, if there is one."""
        self._tell(partial(self._queue.submit, job))

    def cancel(self, job: UpdateJob) -> None:
        """End a job soon; return at once. ``on_done`` is called as for any job."""
        self._inbox.put(partial(self._queue.cancel, job))

    def expect(self, sources: Iterable[tuple[str, ShardSource]]) -> None:
        """Read the states of coming jobs ahead, in this order; replaces what was expected before."""
        depth, expected = self._queue.depth, list[Job]()
        for name, source in sources:
            fits = None
            if source.gradient.pieces:  # as many larger chunks as have the room of ``depth`` others
                first = source.version.chunks[0]
                nbytes = self._layout.nbytes(first.numel)
                fits = depth * rounded(nbytes) // rounded(nbytes + source.gradient_of(first).nbytes)
            expected.append(Job(name=name, chunks=len(source.version.chunks), source=source, fits=fits))
        self._inbox.put(partial(self._queue.expect, expected))

    def drain(self) -> None:
        """Block until every submitted job is done, and nothing read ahead is kept."""
        drained = Transfer()

        def begin() -> Moves:
            self._drained.append(drained)
            return self._queue.expect(())

        self._tell(begin)
        drained.wait()

    def abandon(self, error: BaseException) -> None:
        """End every job with ``error`` and start no other chunk; return at once."""

        def fail() -> Moves:
            raise error

        self._inbox.put(fail)

    def close(self) -> None:
        """Finish the submitted jobs, then end the thread; raises nothing. May be called again."""
        with self._lock:
            self._refusal = self._refusal or StateError("the update pipeline is closed")
        self.expect(())
        self._thread.join()

    def _tell(self, event: Callable[[], Moves]) -> None:
        with self._lock:
            if self._refusal is not None:
                raise copied(self._refusal)
            self._inbox.put(event)

    def _main(self) -> None:  # on the pipeline's thread, as all that follows
        try:
            while not (self._refusal and self._inbox.empty() and self._queue.idle):
                while not self._inbox.empty():
                    self._carry_out(self._inbox.get()())
                if self._queue.idle:
                    while self._drained:
                        self._drained.pop().finish()
                moves = self._queue.next()
                if not moves and not (self._refusal and self._queue.idle):
                    moves = self._inbox.get()()  # sleeps until an event comes
                self._carry_out(moves)
        except BaseException as error:  # everyone who waits must learn of it
            self._fail(error)

    def _carry_out(self, moves: Moves) -> None:
        for move, target in moves:
            match move:
                case Move.READ:
                    self._read(target)
                case Move.REST:
                    self._read_rest(target)
                case Move.COMPUTE:
                    self._compute(target)
                case Move.WRITE:
                    self._write(target)
                case Move.FREE:
                    self._buffers.pop(target).lease.release()
                case Move.COMPUTED:
                    target.on_computed()
                case Move.ENDED:
                    target.on_done(None)

    def _read(self, chunk: ChunkInFlight) -> None:
        """Lease a buffer and read the state into it, and the rest if the job has come."""
        extents = chunk.source.version.chunks[chunk.index]
        nbytes = self._layout.nbytes(extents.numel) + chunk.source.gradient_of(extents).nbytes
        who = f"update of {chunk.name}"
        lease = self._pool.try_lease(nbytes, who=who)
        if lease is None and (chunk.job is None or len(self._queue.in_flight) > 1):
            self._carry_out(self._queue.refuse(chunk))  # one will come with the end of another chunk
            return
        self._buffers[chunk] = _Buffer(lease or self._pool.lease(nbytes, who=who), extents, [])
        self._start(chunk, self._engine.read, extents.state, self._state_begin(extents))
        if chunk.job is not None:
            self._read_rest(chunk)

    def _state_begin(self, extents: ChunkExtents) -> int:
        """Return the byte of a chunk's buffer where what is moved of the state begins."""
        weight, exact, _ = self._layout.parts_nbytes(extents.numel)
        return weight + (0 if extents.exact.pieces else exact)

    def _read_rest(self, chunk: ChunkInFlight) -> None:
        job, extents = chunk.job, self._buffers[chunk].extents
        if job.weight is None:
            self._start(chunk, self._engine.read, extents.weight, 0)
        gradient = job.source.gradient_of(extents)
        if gradient.pieces:
            self._start(chunk, self._engine.read, gradient, self._layout.nbytes(extents.numel))

    def _start(
        self, chunk: ChunkInFlight, move: Callable[[Extent, memoryview], Transfer], extent: Extent, begin: int
    ) -> None:
        """Start a transfer of a chunk's buffer from byte ``begin`` on; its end is an event in the inbox."""
        if not extent.pieces:
            return
        buffer = self._buffers[chunk]
        transfer = move(extent, buffer.lease.memory[begin : begin + extent.nbytes])
        buffer.transfers.append(transfer)
        chunk.moving += 1

        def moved() -> Moves:
            if chunk.stage is not Stage.DROPPED:
                transfer.wait()
            return self._queue.moved(chunk)

        transfer.then(partial(self._inbox.put, moved))

    def _compute(self, chunk: ChunkInFlight) -> None:
        job, held = chunk.job, self._buffers[chunk]
        extents, buffer = held.extents, held.lease.tensor
        new, state = self._layout.chunk_views(buffer, extents.numel)
        whole = slice(extents.start, extents.start + extents.numel)
        old = new if job.weight is None else job.weight[whole]
        read = job.source.gradient_of(extents).nbytes
        end = self._layout.nbytes(extents.numel)
        grad = buffer[end : end + read].view(job.source.grad_dtype) if read else job.grad[whole]
        if job.directs:  # in place
            old = new = grad
        runs = [(max(r.start, whole.start), min(r.stop, whole.stop), r) for r in job.runs]
        if old is not new and sum(max(0, stop - begin) for begin, stop, _ in runs) < extents.numel:
            new.copy_(old)  # some parameters are not updated
        for begin, stop, run in runs:
            if begin < stop:
                part = slice(begin - whole.start, stop - whole.start)
                parts = self._layout.part(state, part.start, part.stop)
                self._rule.update(old[part], grad[part], parts, new[part], run.hyper, run.rule)
        if job.in_place is not None:
            job.in_place[whole].copy_(new)
        self._carry_out(self._queue.computed(chunk))

    def _write(self, chunk: ChunkInFlight) -> None:
        extents = chunk.job.writes.chunks[chunk.index]
        self._buffers[chunk].transfers.clear()
        self._start(chunk, self._engine.write, extents.state, self._state_begin(extents))
        self._start(chunk, self._engine.write, extents.weight, 0)

    def _fail(self, error: BaseException) -> None:
        """End every job with ``error``; see [Note: one error ends all]."""
        with self._lock:
            self._refusal = error
        for buffer in self._buffers.values():
            for transfer in buffer.transfers:
                with suppress(BaseException):
                    transfer.wait()
            buffer.lease.release()
        failed: list[UpdateJob] = []
        while not self._inbox.empty():  # jobs that came meanwhile, or were cancelled
            with suppress(BaseException):
                failed += [job for move, job in self._inbox.get()() if move is Move.ENDED]
        for job in (*failed, *self._queue.jobs):
            assert isinstance(job, UpdateJob)
            try:
                job.on_done(error)
            except BaseException as second:  # the others must learn of the first
                error.add_note(f"{job.name}: on_done raised {second!r} when told of this")
        for drained in self._drained:
            drained.finish(error)
