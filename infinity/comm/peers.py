"""A watch for lost ranks: each says in the store that it lives, and how it ended.

[Note: why beside] A rank that fails outside a collective cannot tell its peers through one in which they do
not take part. So each rank keeps an entry in the store through which torch.distributed made its groups, on a
connection of its own. A thread writes it every second, with a growing beat, and looks whether another rank
ended. Waiting ranks then raise within about two seconds, and say which rank is silent, and whether its
process still exists.
"""

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from infinity.core.errors import DivergenceError, PeerError, first_line

#: How often a rank shows that it lives, and looks for others that ended (s).
BEAT_S = 1.0
#: How long a rank looks for what silenced another (s).
_SILENCE_S = 3.5 * BEAT_S
#: A wait of this long makes this rank check, this often, on the others (s).
_LOOK_S = 2.0
#: Time between two looks for ranks that have not reached a place (s).
_PAUSE_S = 0.005
#: How long the store may take to answer (s).
_PATIENCE_S = 10.0
#: A collective that a rank took part in before it left ends within this time after that (s).
FAREWELL_S = 5.0

_ALL_ALIVE = "every rank is alive, so one of them is busy elsewhere: in its own code, or with its data"
_made = itertools.count()  # every rank makes its Peers in the same order


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

    @property
    def rank(self) -> int:
        return self._me.rank

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

    def watch(self, what: str) -> Callable[[], BaseException | None]:
        """Return what a wait for ``what`` that begins now calls again and again: :meth:`overdue`.

        It looks whether other ranks live, and gives them ``timeout_s``; then it blocks to find the cause.
        """
        began_s = time.monotonic()
        deadline, next_s = began_s + self.timeout_s, began_s + _LOOK_S

        def look() -> BaseException | None:
            nonlocal next_s
            now_s = time.monotonic()
            if self.error is None and now_s > deadline:
                self.tell(self.explained(what))
            elif now_s > next_s:
                next_s = now_s + _LOOK_S
                if told := self.dead():
                    self.tell(self.peer_error(told, what))
            return self.overdue(what)

        return look

    def come(self, place: str) -> None:
        """Count this rank among those that have reached ``place``."""
        with suppress(RuntimeError):  # the store is gone: explained() says so
            self._store.add(place, 1)

    def wait_for_all(self, place: str, what: str) -> None:
        """Return when all ranks have reached ``place``; PeerError: one failed or stalls. Any thread."""
        look = self.watch(what)
        while (error := look()) is None:
            try:
                if self._store.add(place, 0) >= self.world_size:
                    return
            except RuntimeError as gone:
                raise self.explained(what, gone) from None
            time.sleep(_PAUSE_S)
        raise error

    def ask(self, exchange: int, count: int) -> None:
        """Say that this rank waits in an exchange of headers, by its number, for collective ``count``."""
        with suppress(RuntimeError):  # the store is gone: explained() says so
            self._store.set(f"asks/{exchange}", f"{count}")

    def asks(self, exchange: int, count: int) -> bool:
        """Return whether another rank asks there for collective ``count``, or for one before it."""
        key = f"asks/{exchange}"
        with suppress(RuntimeError):
            return self._store.check([key]) and int(self._store.get(key)) <= count
        return False

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
