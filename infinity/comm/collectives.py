"""Collectives of weights and gradients, a check that every rank does the same, and a watch for lost ranks.

[Note: one thread, one order] Every rank must issue its collectives in the same order. The training thread
queues them in the order of the trace; one thread takes each, waits for what it needs (its shard's fetch), and
issues it on process groups of its own. So gathers ahead of their use overlap compute in a fixed order.

[Note: the header] Before each collective the ranks exchange a few integers: kind, unit, step, number of the
collective, and whether this rank has failed, as when its shard's fetch did. Where they differ, every rank
raises an error that says who wanted what, instead of a hang or a sum of unrelated numbers.

[Note: why beside] A rank that fails outside a collective cannot tell its peers through one in which they do
not take part. So each rank keeps an entry in the store through which torch.distributed made its groups, on a
connection of its own. A thread writes it every second, with a growing beat, and looks whether another rank
ended. Waiting ranks then raise within about two seconds, and say which rank is silent, and whether its
process still exists.

[Note: which parameters were used] The header of a reduction has a digest of the set of parameters that have
gradients on this rank. Only where digests differ, in few steps, do the ranks exchange the sets; without any
gradient nothing is reduced.

[Note: reduction] Gradients travel in the compute dtype, one slice to each owner, who adds them in fp32 in the
order of ranks. A ring would move as many bytes, but the order of its additions depends on where an element
lies in the unit, and for the same exactness it would send fp32.

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
import itertools
import json
import os
import pickle
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from infinity.core.errors import DivergenceError, InfinityError, PeerError, StateError, copied, first_line
from infinity.device.accelerator import StreamTransfer, use_own_stream

T = TypeVar("T")
_KINDS = ("gather", "reduce", "sum", "least", "any", "check", "share")
_SLICE_S = 0.25
#: An accelerator's collective in flight for this long makes this rank check, this often, on the others (s).
_LOOK_S = 2.0
#: NCCL's own watchdog ends the process without a word: it waits for so much longer than we do (s).
_WATCHDOG_S = 120.0

#: How often a rank shows that it lives, and looks for others that ended (s).
BEAT_S = 1.0
#: How long a rank looks for what silenced another (s).
_SILENCE_S = 3.5 * BEAT_S
#: How long the store may take to answer (s).
_PATIENCE_S = 10.0
#: A collective that a rank took part in before it left ends within this time after that (s).
FAREWELL_S = 5.0

_ALL_ALIVE = "every rank is alive, so one of them is busy elsewhere: in its own code, or with its data"
_made = itertools.count()  # every rank makes its Peers in the same order

#: ``all_gather_into_tensor``, under the name that newer releases of torch want.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One rank's entry in the store."""

    rank: int
    pid: int
    host: str
    machine: str  # whose process numbers can be looked up here
    beat: int = 0  # grows while the process runs
    end: str = ""  # the way in which it ended
    failed: bool = False  # it ended by an error of its own

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


class Peers:
    """Watches the ranks of a group, and keeps the first error of any, after which no collective ends well.

    ``on_failure`` is called once with it, on any thread. A rank may be silent for ``timeout_s``. Any thread
    may call.
    """

    def __init__(
        self, rank: int, world_size: int, timeout_s: float, on_failure: Callable[[BaseException], None]
    ) -> None:
        self.world_size, self.timeout_s, self._on_failure = world_size, timeout_s, on_failure
        self.error: BaseException | None = None  # the first one
        self._left: tuple[str, float] | None = None  # what a rank that left said, and when we heard it
        store: Any = dist.distributed_c10d._get_default_store()
        self._store: Any = PrefixStore(f"infinity/{next(_made)}", store.clone())  # others may block theirs
        self._store.set_timeout(timedelta(seconds=_PATIENCE_S))
        self._here: list[int] | None = None  # ranks of this machine, once they were looked for
        self._me = Entry(rank=rank, pid=os.getpid(), host=socket.gethostname(), machine=_machine())
        self._publish(self._me)
        self._closed = threading.Event()
        self._lock, self._error_lock = threading.Lock(), threading.Lock()  # guard the entry, and the error
        self._thread = threading.Thread(target=self._main, name="infinity-peers", daemon=True)
        self._thread.start()

    def tell(self, error: BaseException) -> None:
        """Tell all ranks that this one cannot go on; they raise at their next wait."""
        self._fail(error)
        self._end(how_it_ended(error), failed=not isinstance(error, PeerError | DivergenceError))

    def overdue(self, what: str) -> BaseException | None:
        """Return the error that a wait for ``what`` must raise; None: it may go on."""
        left = self._left
        if self.error is None and left is not None and time.monotonic() > left[1] + FAREWELL_S:
            self._fail(self.peer_error(left[0], what))
        return self.error

    def explained(self, what: str, error: BaseException | None = None) -> PeerError:
        """Return why ``what`` did not end, or ended with ``error``; blocks some seconds to find the cause."""
        until, why = time.monotonic() + _SILENCE_S, f" ({first_line(error)})" if error is not None else ""
        first: list[Entry] = []
        while True:
            try:
                entries = self._others()
            except RuntimeError:
                told = "the process that keeps the store of torch.distributed, rank 0 or its launcher, ended"
                break
            first = first or entries
            told = _told(entries) or _gone(entries, self._me.machine)
            if not told and time.monotonic() > until:
                # some rank's beat stands still, or all are alive and one is busy elsewhere
                beats = {entry.rank: entry.beat for entry in first}
                still = ", ".join(str(entry) for entry in entries if beats.get(entry.rank) == entry.beat)
                how = f"gave no sign of life for {_SILENCE_S:g} s: dead, stopped, or cut off from the network"
                told = f"{still} {how}" if still else _ALL_ALIVE
            if told:
                break
            time.sleep(0.2)
        return self.peer_error(told, what, why)

    def dead(self) -> str:
        """Describe local ranks whose processes ended without a word; all must have written entries."""
        try:
            entries = self._others(self._here)
        except RuntimeError:
            return ""  # the store is gone: explained() says so
        self._here = [entry.rank for entry in entries if entry.machine == self._me.machine]
        return _gone([entry for entry in entries if not entry.end], self._me.machine, "ZX")

    def peer_error(self, told: str, what: str = "", why: str = "") -> PeerError:
        """Return this rank's error when others ended as ``told`` while it waited for ``what``."""
        waited = f" while this one waited for it in: {what}" if what else ""
        return PeerError(
            f"rank {self._me.rank} stops: {told}{waited}. The first error of the ranks that it names is "
            f"the cause: mend that, then start the run again; if a rank is only slow, raise "
            f"partition.timeout_s ({self.timeout_s:g} s){why}"
        )

    def close(self) -> None:
        """Tell the others that this rank ended, unless it failed, and end the thread; the entry stays."""
        self._end("closed its model", failed=False)
        self._closed.set()
        self._thread.join(_PATIENCE_S)

    def _fail(self, error: BaseException) -> None:
        with self._error_lock:
            first, self.error = self.error is None, self.error or error
        if first:
            self._on_failure(error)

    def _main(self) -> None:
        heard = 0, 0
        while not self._closed.wait(BEAT_S):
            others: list[Entry] = []
            with suppress(RuntimeError):  # the store is gone; waits for collectives say why
                with self._lock:
                    self._publish(replace(self._me, beat=self._me.beat + 1))
                ends = self._store.add("failed", 0), self._store.add("ended", 0)
                if ends != heard:
                    heard, others = ends, self._others()
            if not (told := _told(others)):
                continue
            if any(entry.failed for entry in others):
                self._fail(self.peer_error(told))
            elif self._left is None:
                self._left = (told, time.monotonic())

    def _publish(self, entry: Entry) -> None:
        self._me = entry
        self._store.set(f"{entry.rank}", json.dumps(asdict(entry)))

    def _end(self, end: str, *, failed: bool) -> None:
        """Publish how this rank ended; the first word stays, but a failure replaces a clean end."""
        with self._lock, suppress(RuntimeError):  # the store may be gone: its keeper ended before us
            if not self._me.failed and (failed or not self._me.end):
                self._publish(replace(self._me, end=end, failed=failed))
                self._store.add("failed" if failed else "ended", 1)

    def _others(self, ranks: Iterable[int] | None = None) -> list[Entry]:
        ranks = range(self.world_size) if ranks is None else ranks
        keys = (f"{rank}" for rank in ranks if rank != self._me.rank)
        return [Entry(**json.loads(self._store.get(key))) for key in keys if self._store.check([key])]


def how_it_ended(error: BaseException) -> str:
    """Return how a rank ended, in words for the others."""
    if isinstance(error, KeyboardInterrupt):
        return "was interrupted (Ctrl-C)"
    if isinstance(error, SystemExit):
        return f"left with exit code {error.code}"
    if isinstance(error, PeerError | DivergenceError):
        return f"stopped because of other ranks: {error}"
    return f"failed with {type(error).__name__}: {error}"


def _told(entries: list[Entry]) -> str:
    failed = any(entry.failed for entry in entries)
    return "; ".join(f"rank {each.rank} {each.end}" for each in entries if each.end and each.failed is failed)


def _gone(entries: list[Entry], machine: str, states: str = "ZXTt") -> str:
    """Describe ranks of this machine whose processes are in one of ``states``: ended or stopped."""
    words = []
    for entry in entries:
        state = _process_state(entry.pid) if entry.machine == machine else "R"
        if state in states:
            how = "is stopped: SIGSTOP or a debugger"
            if state in "ZX":
                how = "was killed or crashed: see its own output, and dmesg for the kernel's word on memory"
            words.append(f"{entry} {how}")
    return "; ".join(words)


def _machine() -> str:
    """Return a name that two processes share if they see the same process numbers."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def _process_state(pid: int) -> str:
    """Return the kernel's letter for a local process: Z or X when it ended, T or t when stopped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return "X"
    return stat.rpartition(")")[2].split()[0]


class DataGroup:
    """Process group of weights and gradients, and what an accelerator has in flight on it.

    Used by the collectives' thread only. On the CPU ``group`` is also that of the headers, and nothing is in
    flight.
    """

    def __init__(self, group: Any, device: torch.device, peers: Peers) -> None:
        self.group, self.device, self._peers = group, device, peers
        self._issued: deque[tuple[Any, float]] = deque()  # and until when each may take
        self._looked_s = 0.0  # when it looked for the other ranks

    def watch(self, work: Any) -> None:
        self._issued.append((work, time.monotonic() + self._peers.timeout_s))

    def in_flight(self) -> bool:
        while self._issued and self._issued[0][0].is_completed():
            self._issued.popleft()
        return bool(self._issued)

    def look_after(self) -> None:
        """Abort what is in flight if it will not end: another rank failed, died, left or stalled."""
        what, now_s, peers = "a collective of the accelerators", time.monotonic(), self._peers
        deadline = self._issued[0][1]
        if peers.error is None and now_s > deadline:
            peers.tell(peers.explained(what))
        elif now_s > max(deadline - peers.timeout_s, self._looked_s) + _LOOK_S:
            self._looked_s = now_s
            if told := peers.dead():
                peers.tell(peers.peer_error(told, what))
        if peers.overdue(what) is None:
            return
        self._issued.clear()
        group = self.group
        with suppress(RuntimeError):  # a group that is its own back end has no other
            group = group._get_backend(self.device)
        if hasattr(group, "abort"):
            group.abort()


class Collectives:
    """Collectives of one process, on their own thread and groups; flat buffers lie on ``device``.

    Every rank must construct one at the same point and call its methods in the same order.
    """

    def __init__(
        self, device: torch.device, timeout_s: float,
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ) -> None:  # fmt: skip
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        group = self._control
        if device.type != "cpu":
            group = dist.new_group(
                backend=dist.get_default_backend_for_device(device),
                timeout=timedelta(seconds=timeout_s + _WATCHDOG_S),
            )
        self.peers = Peers(self.rank, self.world_size, timeout_s, on_failure)
        self._data = DataGroup(group, device, self.peers)
        self._exchanges: Any = None  # the group of :meth:`all_to_all`
        self.step = self._count = 0  # calls of the optimizer's step, equal on all ranks; collectives
        self._closed = False
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="infinity-collectives", daemon=True)
        self._thread.start()

    def gather(self, index: int, where: str, bring: Callable[[], Tensor]) -> Pending:
        """Start the all-gather of unit ``index``; ``where`` is for the error when ranks differ.

        ``bring``, on the collectives' thread, waits for this rank's shard and returns the full buffer,
        ``(numel,)``, with the shard in its own slice; it may raise.
        """

        def issue(full: Tensor, _: bool) -> Tensor:
            shard = full.chunk(self.world_size)[self.rank]
            group = self._data.group
            self._end(_all_gather(full, shard, group=group, async_op=True), group)
            return full

        return self._submit("gather", index, where, issue, bring)

    def reduce(
        self, index: int, where: str, buffers: Callable[[], tuple[Tensor, Tensor, Tensor]], used: bytes,
        then: Callable[[bytes], None], ready: Callable[[], object] | None = None,
    ) -> Pending:  # fmt: skip
        """Start the reduction of a unit's gradients to the mean over ranks of this rank's slice.

        All functions are called on the collectives' thread.

        Args:
            buffers: Called if any rank used a parameter. Returns the local gradients, ``(numel,)``; a buffer
                like it for the slices that arrive; and ``(numel / world_size,)`` for the mean, in the dtype
                of the additions.
            used: 1 for each parameter of the unit that has a gradient, 0 where the local gradient is zero.
            then: Called with ``used`` of all ranks together.
            ready: Waits for what every rank must have done before any goes on; may raise.
        """

        def issue(_: object, same: bool) -> bytes:
            by_any = used if same else self._unite(used)
            if not any(by_any):
                return by_any
            (full, spare, out), group = buffers(), self._data.group
            self._end(dist.all_to_all_single(spare, full, group=group, async_op=True), group)
            arrived = spare.view(self.world_size, -1)
            out.copy_(arrived[0])
            for other in arrived[1:]:
                out.add_(other)
            out.div_(self.world_size)
            return by_any

        digest = int.from_bytes(hashlib.blake2b(used, digest_size=7).digest())
        return self._submit("reduce", index, where, issue, ready, then=then, digest=digest)

    def exchange(self, kind: str, values: Sequence[float], where: str) -> Tensor:
        """Return all ranks' values (below 2**53), float64, ``(world_size, len(values))``; blocks."""

        def issue(*_: Any) -> Tensor:
            return self._of_all_ranks(torch.tensor(list(values), dtype=torch.float64, device="cpu"))

        everyone: Tensor = self._submit(kind, len(values), where, issue).value()
        return everyone

    def share(self, value: T, where: str) -> T:
        """Return rank 0's ``value`` on every rank; blocks."""
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)

        def issue(*_: Any) -> Any:
            nbytes = int(self._of_all_ranks(torch.tensor([len(mine)], device="cpu"))[0])
            given = mine if self.rank == 0 else torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
            self._end(dist.broadcast(given, src=0, group=self._control, async_op=True), self._control)
            return pickle.loads(given.numpy().tobytes())

        shared: T = self._submit("share", 0, where, issue).value()
        return shared

    def all_to_all(self, where: str, given: Tensor, sent: list[int], got: list[int]) -> Tensor:
        """Return what all ranks give this one, ``(sum(got),)``, in the order of ranks; blocks.

        ``given`` is in host memory, ``(sum(sent),)``: what each rank gets, in the same order. On a group
        of its own, since gathers that are queued may wait for the update that this is a part of.
        """
        if self._exchanges is None:  # at the same point on every rank
            limit = timedelta(seconds=self.peers.timeout_s)
            self._exchanges = dist.new_group(backend="gloo", timeout=limit)
        arrived, what = given.new_empty(sum(got)), f"{where} (step {self.step + 1})"
        try:
            work = dist.all_to_all_single(arrived, given, got, sent, group=self._exchanges, async_op=True)
            self._end(work, self._exchanges)
        except RuntimeError as error:
            raise self.peers.error or self.peers.explained(what, error) from None
        return arrived

    def check(self, fingerprint: int, where: str) -> None:
        """Raise on every rank unless all have the same ``fingerprint``; blocks."""
        self._submit("check", fingerprint, where, lambda *_: None).wait()

    def close(self) -> None:
        """End the thread, after the collectives that are queued."""
        self._closed = True
        self._queue.put(None)
        self._thread.join(timeout=self.peers.timeout_s if self.peers.error is None else FAREWELL_S)
        self.peers.close()

    def _submit(
        self, kind: str, index: int, where: str, issue: Callable[[Any, bool], Any],
        ready: Callable[[], object] | None = None, then: Callable[[Any], None] | None = None,
        digest: int = 0,
    ) -> Pending:  # fmt: skip
        name, header = f"{kind} {where} (step {self.step + 1})", (_KINDS.index(kind), index, self.step)
        if self._closed:
            raise StateError(f"{kind} {where}: the collectives of this model are closed")
        pending = Pending(name, self.peers.overdue)

        def job() -> None:
            try:
                if self.peers.error is None:
                    pending.result = self._attempt(name, header, issue, ready, digest)
                    if then is not None:
                        then(pending.result)
                    pending.record(self._data.device)
                    pending.finish()
            except BaseException as error:  # nothing may end this thread
                self.peers.tell(error)
            if not pending.done():
                pending.finish(self.peers.error)

        self._queue.put(job)
        return pending

    def _attempt(
        self, name: str, header: tuple[int, ...], issue: Callable[[Any, bool], Any],
        ready: Callable[[], object] | None, digest: int,
    ) -> Any:  # fmt: skip
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
            return issue(prepared, self._agree((*header, self._count), digest, name, local))
        except InfinityError as error:
            raise local or error from None
        except RuntimeError as error:
            # whose message keeps torch's first line; the others are its C++ stack
            raise local or self.peers.error or self.peers.explained(name, error) from None

    def _agree(self, what: tuple[int, ...], digest: int, where: str, failure: BaseException | None) -> bool:
        """Exchange headers and return whether all ranks have this ``digest``: see [Note: the header]."""
        mine = torch.tensor([*what, int(failure is not None), digest], device="cpu")
        # Compared as lists: a torch operator would release the GIL, and wait for the computing thread.
        headers = self._of_all_ranks(mine).tolist()
        self._count += 1
        failed = [rank for rank, header in enumerate(headers) if header[-2]]
        if not failed and all(header[:-1] == headers[0][:-1] for header in headers):
            return all(header[-1] == digest for header in headers)
        wanted: list[Any] = [None] * self.world_size
        told = where if failure is None else how_it_ended(failure)
        dist.all_gather_object(wanted, told, group=self._control)
        if failed:
            raise self.peers.peer_error("; ".join(f"rank {r} {wanted[r]}" for r in failed))
        wants = "; ".join(f"rank {r} wants {what}" for r, what in enumerate(wanted))
        raise DivergenceError(
            f"the ranks took different paths at collective {self._count}: {wants}. Every rank must run "
            "the same modules in the same order; feed every rank a batch that takes the same branches, or "
            "name the class of the module that branches (experts, say) in partition.leaf"
        )

    def _unite(self, used: bytes) -> bytes:
        """Return 1 where ``used`` is 1 on any rank: see [Note: which parameters were used]."""
        mine = torch.frombuffer(bytearray(used), dtype=torch.uint8)
        return self._of_all_ranks(mine).amax(0).numpy().tobytes()

    def _of_all_ranks(self, mine: Tensor) -> Tensor:
        """Return every rank's ``mine``, ``(n,)`` on the CPU, as ``(world_size, n)``; blocks."""
        everyone = torch.empty(self.world_size * len(mine), dtype=mine.dtype, device="cpu")
        self._end(_all_gather(everyone, mine, group=self._control, async_op=True), self._control)
        return everyone.view(self.world_size, -1)

    def _end(self, work: Any, group: Any) -> None:
        """Wait for a collective or raise a RuntimeError: see [Note: no thread stays behind]."""
        while group in (self._control, self._exchanges) and not work.is_completed():
            with suppress(RuntimeError):  # the slice is over, or the work ended badly and says so below
                work.wait(timedelta(seconds=_SLICE_S))
            if not work.is_completed() and self.peers.overdue("its last collectives") is not None:
                _never_destroy(group)
                _never_destroy(work)
                raise RuntimeError("given up")
        work.wait()  # the stream of this thread does, where the group's work is an accelerator's
        if group not in (self._control, self._exchanges):
            self._data.watch(work)

    def _run(self) -> None:
        use_own_stream(self._data.device)  # gathers beside compute
        while (job := self._next()) is not None:
            job()
            del job  # while nothing comes, no model is held
        while self._data.in_flight():  # else an accelerator could wait for ever
            self._data.look_after()
            time.sleep(0.01)

    def _next(self) -> Callable[[], None] | None:
        """Return the next job; until it comes, watch what was issued: see [Note: on an accelerator]."""
        while True:
            try:
                return self._queue.get(timeout=_SLICE_S if self._data.in_flight() else None)
            except queue.Empty:
                self._data.look_after()


def _never_destroy(what: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


def _after_fork() -> None:
    for group in dist.distributed_c10d._world.pg_map if dist.is_available() else ():
        _never_destroy(group)


os.register_at_fork(after_in_child=_after_fork)
