"""The queues of a simulated accelerator: when kernels run, and which accesses nothing orders.

[Note: schedules]
A kernel is an entry in the queue of a stream. Its stream's order and the events that the stream waits for are
all that decides when it may run; within that, three schedules choose:

    eager    at once, in the order of the calls: a missing wait gives right numbers, and is still a race
    lazy     as late as possible: when somebody waits for it, another rank included
    random   in between, by a seed

[Note: races]
Each stream has a vector clock. Recording an event copies it, waiting for an event joins it, and what the host
has waited for is joined by everything that is enqueued later. Two accesses to overlapping bytes, at least one
of them a write, of which the later is not after the earlier by these clocks are a race, whatever the numbers
say. Host memory takes part: a copy reads or writes it on a stream; what the host does to it is told by
:meth:`Simulator.host_access`, or by :meth:`Simulator.flight` where it takes time (a drive's DMA, an update on
another thread).

[Note: one clock for the host]
All threads of the host share one clock: what one of them waited for, all know. Threads of the host that race
with each other are therefore not seen, unless one of them is in flight.
"""

import os
import random
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any, Literal

Schedule = Literal["eager", "lazy", "random"]
Range = tuple[int, int]  # addresses: from the first byte to after the last
Clock = dict[int, int]  # of each stream, the number of its last entry that is known to come before

HOST = -1  # the host's "stream"; flights have smaller numbers
STREAMS_PER_DEVICE = 1 << 20
_OURS = str(Path(__file__).parent)
_SKIPPED = (f"{os.sep}torch{os.sep}", "importlib", "threading.py", "contextlib.py", "functools.py", "<")


class Site:
    """Where in the program something was done: the innermost frames outside torch and the simulator."""

    __slots__ = ("frames", "thread")

    def __init__(self, depth: int = 3) -> None:
        frames: list[tuple[CodeType, int]] = []
        frame = sys._getframe(2)
        at: Any = frame
        while at is not None and len(frames) < depth:
            if not _skipped(at.f_code):
                frames.append((at.f_code, at.f_lineno))
            at = at.f_back
        self.frames, self.thread = tuple(frames), threading.current_thread().name

    def place(self, below: str) -> str:
        """The innermost function outside of the folder ``below``, as ``mover.py UnitMover._upload``."""
        outside = [code for code, _ in self.frames if f"{os.sep}{below}{os.sep}" not in code.co_filename]
        codes = outside or [code for code, _ in self.frames]
        return f"{_short(codes[0].co_filename)} {codes[0].co_qualname}" if codes else "torch"

    def __str__(self) -> str:
        told = " < ".join(f"{_short(c.co_filename)}:{line}" for c, line in self.frames)
        return f"{told or 'torch'} on {self.thread}"


_skips: dict[CodeType, bool] = {}


def _skipped(code: CodeType) -> bool:
    found = _skips.get(code)
    if found is None:
        name = code.co_filename
        test = Path(name).name.startswith("test_")
        found = _skips[code] = not test and (name.startswith(_OURS) or any(s in name for s in _SKIPPED))
    return found


def _short(filename: str) -> str:
    return "/".join(Path(filename).parts[-2:])


@dataclass(slots=True, eq=False)
class Flight:
    """What the host has begun and nobody has seen end: a drive's request, an update."""

    what: str
    number: int
    seen: bool = False


@dataclass(slots=True, eq=False)
class Access:
    """What a kernel, a copy or the host does to some bytes: it reads or writes them."""

    writes: bool
    stream: int
    seq: int
    what: str
    site: Site
    flight: Flight | None = None

    def __str__(self) -> str:
        who = (
            "the host"
            if self.stream == HOST
            else "the host, in flight"
            if self.flight
            else f"stream {self.stream}"
        )
        return f"{self.what} on {who} {'writes' if self.writes else 'reads'} ({self.site})"


class Accesses:
    """The accesses to each byte of memory that later ones are compared with.

    Memory is cut where accesses begin and end, and bytes side by side with the same accesses are one piece
    again when they are accessed together.
    """

    def __init__(self) -> None:
        self._begins = [0]  # of pieces, ascending; each ends where the next one begins
        self._lists: list[list[Access]] = [[]]  # never changed, as pieces share them

    def of(self, begin: int, end: int) -> Iterator[Access]:
        """Accesses to any of the bytes from ``begin`` to ``end``; one may come again and again."""
        for index in range(bisect_right(self._begins, begin) - 1, bisect_left(self._begins, end)):
            yield from self._lists[index]

    def change(self, begin: int, end: int, new: Callable[[list[Access]], list[Access]]) -> None:
        """Replace the accesses of each piece from ``begin`` to ``end`` by ``new`` ones."""
        first, last = self._cut(begin), self._cut(end)
        begins: list[int] = []
        lists: list[list[Access]] = []
        for index in range(first, last):
            found = new(self._lists[index])
            if not lists or found != lists[-1]:
                begins.append(self._begins[index])
                lists.append(found)
        self._begins[first:last] = begins
        self._lists[first:last] = lists

    def _cut(self, address: int) -> int:
        """The index of the piece that begins at ``address``."""
        index = bisect_left(self._begins, address)
        if index == len(self._begins) or self._begins[index] != address:
            self._begins.insert(index, address)
            self._lists.insert(index, self._lists[index - 1])
        return index


@dataclass(slots=True, eq=False)
class Entry:
    """One kernel, copy, wait or collective in a queue.

    Attributes:
        run: The work; None: nothing to compute.
        external: Starts work that ends by itself, later, with :meth:`Simulator.finish`.
        after: The entry of another stream that comes first.
    """

    stream: int
    seq: int
    what: str
    run: Callable[[], None] | None = None
    external: Callable[["Entry"], None] | None = None
    after: "Entry | None" = None
    done: bool = False
    started: bool = False
    ended_s: float = 0.0  # on its stream's own time
    work: tuple[str, float] | None = None  # what it takes of a resource, where work has a pace


@dataclass(slots=True, eq=False)
class Queue:
    clock: Clock = field(default_factory=dict)
    entries: "deque[Entry]" = field(default_factory=deque)
    last: Entry | None = None
    time_s: float = 0.0  # how long its entries have taken, and waits for other streams


@dataclass(frozen=True, slots=True)
class Mark:
    """What an event recorded."""

    clock: Clock
    last: Entry | None
    time_s: float = 0.0  # of the stream, if nothing was in its queue


@dataclass(frozen=True, slots=True)
class Wait:
    """A place where the host waits for the device."""

    place: str
    thread: str


def _join(into: Clock, other: Clock) -> None:
    for stream, seq in other.items():
        if into.get(stream, 0) < seq:
            into[stream] = seq


def _ended_s(marks: Sequence[Mark]) -> float:
    return max((mark.time_s if mark.last is None else mark.last.ended_s for mark in marks), default=0.0)


class Simulator:
    """The devices of one process. Any thread may call.

    Attributes:
        races: One text for each pair of accesses that nothing orders.
        early: Memory that was given back while something in flight still used it.
        waits: How often the host waited, by place and thread.
        kernels: Entries that were enqueued.
        pause_s: For so long other threads go on before the host waits (s).
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # guards all
        self.changed = threading.Condition(self.lock)  # an external entry ended
        self.before_enqueue: Callable[[], None] = lambda: None
        self.helpers = "infinity/device"  # whose waits count as their callers'
        self.pause_s = 0.0
        self.pace: Any = None  # how long work lasts: see tests/accelerator/pace.py; None: as long as it takes
        self._flights = HOST
        self.seq = 0
        self.reset("eager")

    def reset(self, schedule: Schedule, seed: int = 0, *, most: int = 4096) -> None:
        """Forget all that happened; what waits in queues runs first.

        Args:
            schedule: See [Note: schedules].
            seed: Of ``random``.
            most: Entries that one queue holds; more than that, and its first one runs.
        """
        with self.lock:
            for queue in list(getattr(self, "queues", {}).values()):
                if queue.last is not None:
                    self._run_until(queue.last)
            if hasattr(self, "queues"):
                self.before_enqueue()  # what waited for these entries ends with them
            self.schedule, self.random, self.most = schedule, random.Random(seed), most
            self.queues: dict[int, Queue] = {}
            self.events: dict[int, Mark] = {}
            self.host: Clock = {}
            self.accesses = Accesses()
            self.races: list[str] = []
            self.early: list[str] = []
            self.waits: Counter[Wait] = Counter()
            self.kernels = 0

    def queue(self, stream: int) -> Queue:
        found = self.queues.get(stream)
        if found is None:
            found = self.queues[stream] = Queue()
        return found

    # --- work --------------------------------------------------------------------------------

    def enqueue(
        self, stream: int, what: str, run: Callable[[], None] | None,
        reads: Iterable[Range] = (), writes: Iterable[Range] = (), *,
        external: Callable[[Entry], None] | None = None,
    ) -> Entry:  # fmt: skip
        """Put work into a stream's queue; by the schedule it runs at once, later or much later."""
        with self.lock:
            self.before_enqueue()
            self.seq += 1
            self.kernels += 1
            queue = self.queue(stream)
            _join(queue.clock, self.host)
            queue.clock[stream] = self.seq
            self._check(stream, self.seq, what, queue.clock, reads, writes)
            entry = Entry(stream, self.seq, what, run, external)
            if self.pace is not None:
                entry.work = self.pace.work(what, [*reads], [*writes])
            queue.entries.append(entry)
            queue.last = entry
            if self.schedule == "eager":
                self.advance(entry)
            elif self.schedule == "random":
                self._run_some()
            while len(queue.entries) > self.most:
                self._run_until(queue.entries[0])
            return entry

    def _run_some(self) -> None:
        for stream in self.random.sample(list(self.queues), k=len(self.queues)):
            for _ in range(self.random.choice((0, 0, 0, 1, 3))):
                entries = self.queues[stream].entries
                if entries:
                    self.advance(entries[0])

    def advance(self, entry: Entry) -> None:
        """Run until ``entry``, or until a collective that has started and not ended."""
        queue = self.queue(entry.stream)
        while not entry.done:
            first = queue.entries[0]
            if first.after is not None and not first.after.done:
                self.advance(first.after)
                if not first.after.done:
                    return
            elif first.external is not None:
                self._start(first)
                return
            else:
                self._run_first(queue)

    def _run_until(self, entry: Entry) -> None:
        """Run until ``entry`` is done; the lock is free while a collective is waited for."""
        queue = self.queue(entry.stream)
        while not entry.done:
            first = queue.entries[0]
            if first.after is not None and not first.after.done:
                self._run_until(first.after)
            elif first.external is not None:
                self._start(first)
                while not first.done:
                    self.changed.wait()
            else:
                self._run_first(queue)

    def _start(self, entry: Entry) -> None:
        if not entry.started:
            entry.started = True
            assert entry.external is not None
            entry.external(entry)

    def _run_first(self, queue: Queue) -> None:
        first = queue.entries.popleft()
        began_s = time.perf_counter()
        if first.after is not None:
            queue.time_s = max(queue.time_s, first.after.ended_s)
        run, first.run, first.after = first.run, None, None
        try:
            if run is not None:
                run()
        finally:
            if self.pace is None:
                queue.time_s += time.perf_counter() - began_s
            elif first.what != "wait":
                ready_s = max(queue.time_s, began_s)
                queue.time_s = ready_s if first.work is None else self.pace.take(*first.work, ready_s)
            first.ended_s, first.done = queue.time_s, True

    def finish(self, entry: Entry) -> None:
        """End an external entry."""
        with self.lock:
            queue = self.queue(entry.stream)
            if queue.entries and queue.entries[0] is entry:  # else all was forgotten meanwhile
                queue.entries.popleft()
            entry.done, entry.external, entry.ended_s = True, None, queue.time_s
            self.changed.notify_all()
            for other in list(self.queues.values()) if self.schedule == "eager" else ():
                if other.last is not None:
                    self.advance(other.last)

    # --- the host ----------------------------------------------------------------------------

    def host_access(self, what: str, reads: Iterable[Range] = (), writes: Iterable[Range] = ()) -> None:
        """The host reads or writes memory, now."""
        with self.lock:
            self.seq += 1
            self.host[HOST] = self.seq
            self._check(HOST, self.seq, what, self.host, reads, writes)

    def flight(self, what: str, reads: Iterable[Range] = (), writes: Iterable[Range] = ()) -> Flight:
        """The host reads or writes memory from now until :meth:`landed`."""
        with self.lock:
            self.seq += 1
            self._flights -= 1
            flight = Flight(what, self._flights)
            self._check(flight.number, self.seq, what, self.host, reads, writes, flight)
            return flight

    def landed(self, flight: Flight) -> None:
        """The host has seen the end of a flight."""
        flight.seen = True

    def in_flight(self, ranges: Sequence[Range]) -> list[Access]:
        """Accesses to these bytes that the host has not waited for."""
        with self.lock:
            found: dict[int, Access] = {}
            for begin, end in ranges:
                for access in self.accesses.of(begin, end):
                    if not self._known(access, HOST, self.host):
                        found[id(access)] = access
            return list(found.values())

    def released(self, what: str, ranges: Sequence[Range], *, after: Sequence[int] = ()) -> None:
        """Memory is given back; note what still uses it, but for what the events ``after`` stand for."""
        with self.lock:
            site: Site | None = None
            clock: Clock = {}
            for event in after:
                _join(clock, self.events[event].clock if event in self.events else {})
            for access in self.in_flight(ranges):
                if access.flight is None and access.seq <= clock.get(access.stream, 0):
                    continue
                site = site or Site()
                self.early.append(f"{what} ({site}) is given back before {access}")

    # --- races -------------------------------------------------------------------------------

    def _check(
        self, stream: int, seq: int, what: str, clock: Clock, reads: Iterable[Range],
        writes: Iterable[Range], flight: Flight | None = None,
    ) -> None:  # fmt: skip
        site: Site | None = None
        for ranges, writing in ((writes, True), (reads, False)):
            for begin, end in ranges:
                if begin < end:
                    site = site or Site()
                    mine = Access(writing, stream, seq, what, site, flight)
                    self.accesses.change(begin, end, partial(self._added, mine, clock))

    @staticmethod
    def _known(earlier: Access, stream: int, clock: Clock) -> bool:
        """Whether ``earlier`` comes before what ``stream`` does with this clock."""
        if earlier.flight is not None:
            return earlier.flight.seen or earlier.stream == stream
        return earlier.stream == stream or earlier.seq <= clock.get(earlier.stream, 0)

    def _added(self, mine: Access, clock: Clock, others: list[Access]) -> list[Access]:
        """The accesses to some bytes that matter from now on; note those that race with the new one."""
        kept = []
        for other in others:
            ordered = self._known(other, mine.stream, clock)
            if (mine.writes or other.writes) and not ordered and other.seq != mine.seq:
                self._race(other, mine)
            # What comes before a write is never needed again, nor is a read before another read: what is
            # after mine is after the other, too.
            if not (ordered and (mine.writes or not other.writes)):
                kept.append(other)
        return [*kept, mine]

    def _race(self, first: Access, second: Access) -> None:
        text = f"{first}\n  and then {second}"
        if text not in self.races:
            self.races.append(text)

    # --- streams and events ------------------------------------------------------------------

    def record(self, event: int, stream: int) -> None:
        with self.lock:
            self.before_enqueue()
            self.events[event] = self.mark(stream)

    def mark(self, stream: int) -> Mark:
        """What an event that is recorded on ``stream`` now stands for."""
        queue = self.queue(stream)
        _join(queue.clock, self.host)
        return Mark(dict(queue.clock), queue.last, queue.time_s)

    def block(self, event: int, stream: int) -> None:
        with self.lock:
            mark = self.events.get(event)
            if mark is not None:
                self.wait_for(mark, stream)

    def wait_for(self, mark: Mark, stream: int) -> None:
        """Let ``stream`` wait for what ``mark`` stands for."""
        queue = self.queue(stream)
        _join(queue.clock, mark.clock)
        last = mark.last
        if last is None or last.stream == stream:
            return
        if last.done:
            queue.time_s = max(queue.time_s, last.ended_s)
            return
        entry = Entry(stream, self.seq, "wait", after=last)
        queue.entries.append(entry)
        queue.last = entry

    def query(self, event: int, stream: int) -> int:
        """Whether all is done. Asking makes progress, so that polling ends."""
        with self.lock:
            mark = self.events.get(event) if event >= 0 else self.mark(stream)
            if mark is None:
                return 1
            if mark.last is not None and not mark.last.done:
                self.advance(mark.last)
                return 0
            if self.pace is not None and _ended_s([mark]) > time.perf_counter():
                return 0
            _join(self.host, mark.clock)
            return 1

    def synchronize(self, event: int, stream: int, device: int) -> None:
        if self.pause_s:
            time.sleep(self.pause_s)
        with self.lock:
            self.before_enqueue()
            site = Site(6)
            self.waits[Wait(site.place(self.helpers), site.thread)] += 1
            if event >= 0:
                marks = [self.events[event]] if event in self.events else []
            elif stream >= 0:
                marks = [self.mark(stream)]
            else:
                marks = [self.mark(s) for s in list(self.queues) if s // STREAMS_PER_DEVICE == device]
            self.host_waits(marks)
        if self.pace is not None:
            self.pace.sleep_until(_ended_s(marks))

    def host_waits(self, marks: Iterable[Mark]) -> None:
        for mark in marks:
            if mark.last is not None:
                self._run_until(mark.last)
            _join(self.host, mark.clock)

    def elapsed_ms(self, begin: int, end: int) -> float:
        with self.lock:
            marks = self.events[begin], self.events[end]
            ended_s = [mark.time_s if mark.last is None else mark.last.ended_s for mark in marks]
            return (ended_s[1] - ended_s[0]) * 1e3
