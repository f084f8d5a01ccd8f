"""Collectives of weights and gradients, and a check that every rank does the same.

[Note: one thread, one order] Every rank must issue its collectives in the same order. The training thread
queues them in the order of the trace; one thread takes each, waits for what it needs (its shard's fetch), and
issues it on process groups of its own. So gathers ahead of their use overlap compute in a fixed order.

[Note: reduction] Gradients travel in the compute dtype, one slice to each owner, who adds them in fp32 in the
order of ranks. A ring would move as many bytes, but the order of its additions depends on where an element
lies in the unit, and for the same exactness it would send fp32. Of several nodes see
:mod:`infinity.comm.nodes`.

[Note: on an accelerator] The thread issues a collective on a stream of its own and goes on with the next; it
only waits for headers. Waiting for a :class:`Pending` makes the current stream wait for the collective. If a
rank dies inside one, the others' accelerators would wait for ever. So the thread watches what it has issued,
and aborts it when a rank is gone, or silent for too long: streams go on with values that are not used, since
the next wait raises.

[Note: no thread stays behind] A thread inside a collective's C++ code when the interpreter ends aborts the
process (SIGABRT) as soon as it wakes, when the peers' connections close. So the thread waits in slices and
leaves a collective that will not end. Its group is then never destroyed, since the destructor would wait for
it; nor is its work, whose tensors gloo's thread would release once the peers are gone; nor is any group in a
forked child, which lacks the threads that the destructor would wait for.
"""

import ctypes
import hashlib
import os
import pickle
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from infinity.comm.agreement import EXCHANGES, REDUCTIONS, Agreement, Call, Turn, Want
from infinity.comm.nodes import PART_NBYTES, Kept, Nodes, all_gather
from infinity.comm.peers import FAREWELL_S, Peers
from infinity.core.errors import InfinityError, StateError, copied
from infinity.device.accelerator import StreamTransfer, use_own_stream

T = TypeVar("T")
_SLICE_S = 0.25
#: How long a rank that leaves waits for another one that wants something (s).
LEAVE_S = 30.0
#: NCCL's own watchdog ends the process without a word: it waits for so much longer than we do (s).
_WATCHDOG_S = 120.0


@dataclass(slots=True)
class Server:
    """Has what a rank needs to serve others; both functions are called on the collectives' thread.

    ``shard`` returns the bytes of this rank's shard of a unit, and a function that reads a part of it, given
    where it begins and its bytes; ``take`` takes in this rank's slice of gradients of other ranks, given the
    unit, the parameters that they used, and a function that fills a tensor, given the dtype of gradients.
    """

    shard: Callable[[int], tuple[int, Callable[[int, int], Tensor]]]
    take: Callable[[int, bytes, Callable[[Tensor, torch.dtype], None]], None]
    served: int = 0  # collectives, in this step
    changes: int = 0  # of weights beside steps, equal on all ranks that use the same ones
    left: bool = False  # this rank serves no longer


class Pending(StreamTransfer):
    """A collective in flight on this rank.

    ``wait`` raises ``DivergenceError`` if ranks asked for different things, ``PeerError`` if another rank
    failed, died, left or stalled, and ``DiskError`` if what the collective needed could not be read here.
    ``failure(what)`` returns the error that a wait must raise; None: it may go on.
    """

    __slots__ = ("_failure", "_what", "result")

    def __init__(self, what: str, failure: Callable[[str], BaseException | None]) -> None:
        super().__init__()
        self._what, self._failure = what, failure
        self.result: Any = None  # once it has ended well

    def value(self) -> Any:
        """Wait for the collective and return its result."""
        self.wait()
        return self.result

    def _while_waiting(self) -> None:
        if (failure := self._failure(self._what)) is not None:  # the thread may be stuck in a collective
            raise copied(failure)


class InFlight:
    """Watches what an accelerator has in flight on its process ``groups``; on the CPU there are none.

    Used by the collectives' thread only; others may :meth:`watch`.
    """

    def __init__(self, device: torch.device, peers: Peers) -> None:
        self.device, self._peers = device, peers
        self.groups: list[Any] = []
        self._issued: deque[tuple[Any, Callable[[], BaseException | None]]] = deque()

    def watch(self, work: Any) -> None:
        self._issued.append((work, self._peers.watch("a collective of the accelerators")))

    def any(self) -> bool:
        while self._issued and self._issued[0][0].is_completed():
            self._issued.popleft()
        return bool(self._issued)

    def look_after(self) -> None:
        """Abort what is in flight if it will not end: another rank failed, died, left or stalled."""
        if self._issued[0][1]() is None:
            return
        self._issued.clear()
        for group in self.groups:
            with suppress(RuntimeError):  # a group that is its own back end has no other
                group = group._get_backend(self.device)
            if hasattr(group, "abort"):
                group.abort()


class Collectives:
    """Collectives of one process, on their own thread and groups; flat buffers lie on ``device``.

    Every rank must construct one at the same point and call its methods in the same order. ``ranks_per_node``
    consecutive ranks are taken to be on one node; None: those on one host. The ranks of each of ``rows``
    share units (None: all do): gathers and reductions are theirs. Those of each of ``stages`` run one program
    (None: all do): they agree on each collective, and decide what does not concern other ones.
    """

    def __init__(
        self, device: torch.device, timeout_s: float,
        on_failure: Callable[[BaseException], None] = lambda error: None, ranks_per_node: int | None = None,
        rows: Sequence[Sequence[int]] | None = None, stages: Sequence[Sequence[int]] | None = None,
    ) -> None:  # fmt: skip
        several, limit = stages is not None and len(stages) > 1, timedelta(seconds=timeout_s)
        divide: Any = dist.new_subgroups_by_enumeration

        def of_stage() -> Any:
            return divide(stages, limit, "gloo")[0] if several else dist.new_group(None, limit, "gloo")

        everyone = dist.new_group(backend="gloo", timeout=limit)
        self._controls = everyone, of_stage() if several else everyone
        self.peers = Peers(dist.get_rank(), dist.get_world_size(), timeout_s, on_failure)
        self._in_flight = InFlight(device, self.peers)
        # Of a mesh the headers of reductions are the barrier of commits: a row's ranks wait for its own only.
        asks = device.type != "cpu" or rows is not None
        self._agreement = Agreement(self.peers, of_stage(), self._of_all_ranks, asks_reductions=asks)
        #: Groups on which other threads than this one's wait: of :meth:`all_to_all`, messages; a row's.
        self._apart: dict[str, Any] = {}
        self.messages: Any = None  # of :class:`infinity.comm.messages.Messages`, once there are any
        self.server: Server | None = None  # before the first wait, in which it is looked at
        rows = rows or [range(self.world_size)]
        own = next(row for row in rows if self.rank in row)

        def make(places: list[list[int]], *, on_cpu: bool = device.type == "cpu") -> Any:
            sets = [[row[n] for n in each] for row in rows for each in places]
            backend, limit_s = "gloo", timeout_s
            if not on_cpu:
                backend, limit_s = dist.get_default_backend_for_device(device), timeout_s + _WATCHDOG_S
            elif len(sets) == 1:
                return self._control
            # By all ranks: the name that some would give a group alone counts groups that others may lack.
            return divide(sets, timedelta(seconds=limit_s), backend)[0]

        if ranks_per_node is None and len(rows) == 1:
            host = hashlib.blake2b(socket.gethostname().encode(), digest_size=7).digest()
            hosts = self._of_all_ranks(torch.tensor([int.from_bytes(host)], device="cpu"))
            ranks_per_node = _ranks_per_node(hosts.flatten().tolist())
        self.nodes = Nodes(self.rank, own, ranks_per_node or 1, make, self._end)
        if len(rows) > 1:
            self._apart["row"] = make([[*range(len(own))]], on_cpu=True)
        if device.type != "cpu":
            self._in_flight.groups += self.nodes.groups
        self.step = 0  # calls of the optimizer's step, equal on all ranks
        self._closed = False
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="infinity-collectives", daemon=True)
        self._thread.start()

    @property
    def _control(self) -> Any:
        return self._controls[0]

    @property
    def _stage(self) -> Any:
        return self._controls[1]

    @property
    def rank(self) -> int:
        return self.peers.rank

    @property
    def world_size(self) -> int:
        return self.peers.world_size

    @property
    def _when(self) -> int:
        """The step, above it how often weights changed beside steps: ranks must have the same."""
        return self.step + ((0 if self.server is None else self.server.changes) << 32)

    def serve(self, server: Server) -> None:
        """Let ``server`` take this rank's part in what it does not want: see :mod:`infinity.comm.agreement`.

        Every rank must call at the same point. Without one ranks must want the same; so they must on several
        nodes, and on accelerators, where several collectives may have begun when a rank leaves a known order.
        """
        self.server = server
        alike = self.nodes.local == self.world_size
        self._agreement.serves = alike and self._in_flight.device.type == "cpu"

    def gather(
        self, index: int, where: str, bring: Callable[[], Tensor], kind: str = "gather",
        kept: Kept | None = None,
    ) -> Pending:  # fmt: skip
        """Start the all-gather of unit ``index``; ``where`` is for the error when ranks differ.

        ``kind`` is what is gathered of it: weights, or exact ``values`` that are no part of a pass. Slices of
        other nodes are ``kept``, or were.

        ``bring``, on the collectives' thread, waits for this rank's shard and returns the full buffer,
        ``(numel,)``, with the shard in its own slice; it may raise.
        """

        def issue(full: Tensor, turn: Turn) -> Tensor:
            if turn.whole:
                self.nodes.gather(full, kept)
            else:
                nbytes = len(full) // self.world_size
                own = full.narrow(0, self.rank * nbytes, nbytes)
                self.nodes.gather_for(turn.ranks, nbytes, partial(own.narrow, 0), full)
            return full

        kind = "near" if kept is not None and kept.current else kind
        return self._submit(kind, index, where, issue, bring)

    def reduce(
        self, index: int, where: str, buffers: Callable[[], tuple[Tensor, Tensor, Tensor]], used: bytes,
        then: Callable[[bytes, bool], None], ready: Callable[[], object] | None = None, *,
        more: bool = False, micro: int = 0,
    ) -> Pending:  # fmt: skip
        """Start the reduction of a unit's gradients to the mean over ranks of this rank's slice.

        All functions are called on the collectives' thread.

        Args:
            buffers: Called if any rank used a parameter. Returns the local gradients, ``(numel,)``, which are
                overwritten; a buffer like it for the slices that arrive; and ``(numel / world_size,)`` for
                the mean, in the dtype of the additions.
            used: 1 for each parameter of the unit that has a gradient, 0 where the local gradient is zero.
            then: Called with ``used`` of all ranks together, and whether no rank has more of the unit.
            ready: Waits for what every rank must have done before any goes on; may raise.
            more: Gradients of later micro-batches follow on this rank.
            micro: The number of the micro-batch in this step.
        """

        def issue(_: object, turn: Turn) -> tuple[bytes, bool]:
            if any(self._agreement.used):
                full, spare, out = buffers()
                if turn.whole:
                    self.nodes.reduce(full, spare, out)
                else:
                    self.nodes.reduce_for(turn.ranks, full, out, full.dtype)
            # another rank may have told more of them meanwhile, or that it serves
            return self._agreement.used, self._agreement.turn.ends

        kind = "add" if more else "reduce"
        return self._submit(
            kind, index, where, issue, ready, then=lambda ended: then(*ended), used=used, micro=micro
        )

    def scatter(
        self, index: int, where: str, source: int,
        buffers: Callable[[], tuple[Tensor | None, Tensor, torch.dtype]], used: bytes,
        then: Callable[[bytes], None], ready: Callable[[], object], micro: int,
    ) -> Pending:  # fmt: skip
        """Start giving each rank its slice of a unit's gradients, which only rank ``source`` has.

        As :meth:`reduce`, divided by the number of ranks, too. ``buffers`` returns the gradients (None on
        other ranks), ``(numel / world_size,)`` for the slice, and the dtype of the gradients. ``used`` is
        zero on other ranks.
        """

        def issue(_: object, turn: Turn) -> bytes:
            if any(self._agreement.used):
                self.nodes.reduce_for((source,), *buffers())
            return self._agreement.used

        return self._submit("reduce", index, where, issue, ready, then, used, micro)

    def exchange(
        self, kind: str, values: Sequence[float] | Callable[[], Sequence[float]], where: str, count: int = 0
    ) -> Tensor:
        """Return all ranks' values (below 2**53), float64, ``(world_size, len(values))``; blocks.

        Only values of kind ``sum`` are those of other stages, too.

        A function is called on the collectives' thread when all ranks want their ``count`` values; again if
        a rank had more to reduce before.
        """

        def issue(_: object, turn: Turn) -> Tensor | None:
            mine = [1.0, *(values() if callable(values) else values)]
            group = self._control if kind == "sum" else self._stage
            everyone = self._of_all_ranks(torch.tensor(mine, dtype=torch.float64, device="cpu"), group)
            return everyone[:, 1:] if bool(everyone[:, 0].all()) else None

        everyone: Tensor = self._submit(kind, count or len(values), where, issue).value()  # type: ignore[arg-type]
        return everyone

    def broadcast(self, values: Tensor, index: int, where: str) -> None:
        """Let a row's first rank's ``values``, those of unit ``index`` in host memory, be its; blocks."""

        def issue(*_: Any) -> Tensor:
            ones = torch.ones(1, device="cpu")  # else a rank may end before others begin
            self._of_all_ranks(ones, self._stage)
            group = self._apart.get("row", self._control)
            self._end(dist.broadcast(values, src=self.nodes.row[0], group=group, async_op=True), group)
            return values

        self._submit("write", index, where, issue).wait()

    def share_all(self, value: T, where: str) -> list[T]:
        """Return the ``value`` of each rank; blocks."""
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)

        def issue(*_: Any) -> Any:
            sizes = self._of_all_ranks(torch.tensor([len(mine)], device="cpu")).flatten().tolist()
            padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
            padded[: len(mine)] = mine
            everyone = zip(self._of_all_ranks(padded), sizes, strict=True)
            return [pickle.loads(row[:size].numpy().tobytes()) for row, size in everyone]

        shared: list[T] = self._submit("share", 0, where, issue).value()
        return shared

    def all_to_all(self, where: str, given: Tensor, sent: list[int], got: list[int]) -> Tensor:
        """Return what all ranks give this one, ``(sum(got),)``, in the order of ranks; blocks.

        ``given`` is in host memory, ``(sum(sent),)``: what each rank gets, in the same order. On a group
        of its own, since gathers that are queued may wait for the update that this is a part of.
        """
        if "exchanges" not in self._apart:  # at the same point on every rank
            limit = timedelta(seconds=self.peers.timeout_s)
            self._apart["exchanges"] = dist.new_group(backend="gloo", timeout=limit)
        arrived, what = given.new_empty(sum(got)), f"{where} (step {self.step + 1})"
        group = self._apart["exchanges"]
        work = dist.all_to_all_single(arrived, given, got, sent, group=group, async_op=True)
        self.end_apart(work, group, what)
        return arrived

    def apart(self, ranks: list[int]) -> Any:
        """Return a group of ``ranks`` for messages between their training threads; every rank must call."""
        device, limit_s, backend = self._in_flight.device, self.peers.timeout_s, "gloo"
        if device.type != "cpu":
            backend, limit_s = dist.get_default_backend_for_device(device), limit_s + _WATCHDOG_S
        group = dist.new_group(ranks, timedelta(seconds=limit_s), backend)
        if self.rank in ranks and device.type == "cpu":
            self._apart[repr(ranks)] = group
        elif self.rank in ranks:
            self._in_flight.groups.append(group)
        return group

    def end_apart(self, work: Any, group: Any, what: str) -> None:
        """Wait for what was begun on a group of :meth:`apart`; PeerError: another rank failed or stalls."""
        try:
            self._end(work, group)
        except RuntimeError as error:
            raise self.peers.error or self.peers.explained(what, error) from None
        if group in self._in_flight.groups:
            self._queue.put(_nothing)  # the thread wakes, and watches it

    def check(self, fingerprint: int, where: str) -> None:
        """Raise on every rank unless all have the same ``fingerprint``; blocks."""
        self._submit("check", fingerprint, where, lambda *_: True).wait()

    def leave(self) -> None:
        """Serve other ranks until all have come here, if paths have differed; at most a while without any."""
        server = self.server
        if server is None or not self._agreement.order.parted or self._closed or self.peers.error is not None:
            return
        ended, before, call = threading.Event(), -1, Call(Want.of("leave", 0, b""), self._when, "leave")

        def job() -> None:
            with suppress(InfinityError, RuntimeError):
                while self.rank not in (turn := self._agreement.reach(call, None)).ranks:
                    self._serve(turn)
            ended.set()

        self._queue.put(job)
        while not ended.wait(LEAVE_S) and self._agreement.asked != before:
            before = self._agreement.asked
        server.left = True

    def close(self) -> None:
        """End the thread, after the collectives that are queued."""
        self._closed = True
        self._queue.put(None)
        self._thread.join(timeout=self.peers.timeout_s if self.peers.error is None else FAREWELL_S)
        self.peers.close()

    def _submit(
        self, kind: str, index: int, where: str, issue: Callable[[Any, Turn], Any],
        ready: Callable[[], object] | None = None, then: Callable[[Any], None] | None = None,
        used: bytes = b"", micro: int = 0,
    ) -> Pending:  # fmt: skip
        name = f"{kind} {where} (step {self.step + 1})"
        call = Call(Want.of(kind, index, used), self._when, name, used, micro)
        if self._closed:
            raise StateError(f"{kind} {where}: the collectives of this model are closed")
        pending = Pending(name, self.peers.overdue)

        def job() -> None:
            try:
                if self.peers.error is None:
                    pending.result = self._attempt(call, issue, ready)
                    if then is not None:
                        then(pending.result)
                    pending.record(self._in_flight.device)
                    pending.finish()
            except BaseException as error:  # nothing may end this thread
                self.peers.tell(error)
            if not pending.done():
                pending.finish(self.peers.error)

        self._queue.put(job)
        return pending

    def _attempt(
        self, call: Call, issue: Callable[[Any, Turn], Any], ready: Callable[[], object] | None
    ) -> Any:
        """Return the result of one collective; raise what ``ready`` raised, after telling the others."""
        local: BaseException | None = None
        prepared: object = None
        try:
            if ready is not None:
                prepared = ready()
        except BaseException as error:
            local = error
            self.peers.tell(error)
        try:
            result = None  # until it is this one's turn, and not void
            while result is None:
                turn = self._agreement.reach(call, local)
                if self.rank in turn.ranks:
                    result = issue(prepared, turn)
                else:
                    self._serve(turn)
            return result
        except InfinityError as error:
            raise local or error from None
        except RuntimeError as error:
            # whose message keeps torch's first line; the others are its C++ stack
            raise local or self.peers.error or self.peers.explained(call.name, error) from None

    def _serve(self, turn: Turn) -> None:
        """Take part in what other ranks want; of what they have begun, with memory beside the budgets."""
        kind, index, device = turn.want.kind, turn.want.item, self._in_flight.device
        assert self.server is not None
        self.server.served += 1
        if kind in EXCHANGES:  # void
            self._of_all_ranks(torch.zeros(1 + index, dtype=torch.float64, device="cpu"))
        elif kind not in REDUCTIONS:
            nbytes, shard = self.server.shard(index)
            if turn.whole:
                full = torch.empty(self.world_size * nbytes, dtype=torch.uint8, device=device)
                for start in range(0, nbytes, PART_NBYTES):
                    part = shard(start, min(PART_NBYTES, nbytes - start))
                    full.narrow(0, self.rank * nbytes + start, len(part)).copy_(part)
                self.nodes.gather(full)
            else:
                self.nodes.gather_for(turn.ranks, nbytes, shard, None)
        elif any(self._agreement.used):

            def fill(out: Tensor, dtype: torch.dtype) -> None:
                if turn.whole:
                    full, spare = (
                        torch.zeros(self.world_size * len(out), dtype=dtype, device=device) for _ in range(2)
                    )
                    self.nodes.reduce(full, spare, out)
                else:
                    self.nodes.reduce_for(turn.ranks, None, out, dtype)

            self.server.take(index, self._agreement.used, fill)

    def _of_all_ranks(self, mine: Tensor, group: Any = None) -> Tensor:
        """Return the ``mine`` of every rank of a group, ``(n,)`` on the CPU, as ``(size, n)``; blocks."""
        group = group or self._control
        everyone = torch.empty(group.size() * len(mine), dtype=mine.dtype, device="cpu")
        self._end(all_gather(everyone, mine, group=group, async_op=True), group)
        return everyone.view(group.size(), -1)

    def _end(self, work: Any, group: Any) -> None:
        """Wait for a collective or raise a RuntimeError: see [Note: no thread stays behind]."""
        if group in self._in_flight.groups:
            work.wait()  # the stream of this thread does
            self._in_flight.watch(work)
            return
        while not work.is_completed():
            with suppress(RuntimeError):  # the slice is over, or the work ended badly and says so below
                work.wait(timedelta(seconds=_SLICE_S))
            if work.is_completed():
                break
            try:
                left = self.server is not None and self.server.left
                if left or self.peers.overdue("its last collectives") is not None:
                    raise RuntimeError("given up")
                if group is self._agreement.group:
                    self._agreement.call_others()
                elif group not in self._apart.values():
                    self._agreement.join()
            except BaseException:
                _never_destroy(group)
                _never_destroy(work)
                raise
        work.wait()

    def _run(self) -> None:
        use_own_stream(self._in_flight.device)  # gathers beside compute
        while (job := self._next()) is not None:
            job()
            del job  # while nothing comes, no model is held
        while self._in_flight.any():  # else an accelerator could wait for ever
            self._in_flight.look_after()
            time.sleep(0.01)

    def _next(self) -> Callable[[], None] | None:
        """Return the next job; until it comes, watch what was issued: see [Note: on an accelerator]."""
        while True:
            try:
                return self._queue.get(timeout=_SLICE_S if self._in_flight.any() else None)
            except queue.Empty:
                self._in_flight.look_after()
                try:
                    self._agreement.join()
                except BaseException as error:  # nothing may end this thread
                    self.peers.tell(error)


def _ranks_per_node(hosts: list[Any]) -> int:
    """Return how many ranks each host has, from those of all ranks; 1 if not as many, or not side by side."""
    local = hosts.count(hosts[0])
    return local if hosts == [host for host in dict.fromkeys(hosts) for _ in range(local)] else 1


def _nothing() -> None:
    pass


def _never_destroy(what: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


def _after_fork() -> None:
    for group in dist.distributed_c10d._world.pg_map if dist.is_available() else ():
        _never_destroy(group)


os.register_at_fork(after_in_child=_after_fork)
