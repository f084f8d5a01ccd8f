"""Signs of life, failures and ends of ranks, told beside the collectives.

[Note: why beside]
A rank that fails between two collectives, or whose peers are somewhere else, cannot tell them through
a collective, in which the others do not take part. So each rank keeps one entry in the store through which
torch.distributed made its groups, on a connection of its own. A thread writes it every second, with
a beat that grows, and looks whether another rank ended. Waiting ranks then raise within about two seconds,
and can say which rank is silent, and whether its process still exists.
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

from infinity.core.errors import DivergenceError, PeerError, first_line

#: A rank shows that it lives, and looks at the others, this often (s).
BEAT_S = 1.0
#: No longer than this does a rank look for what silenced another (s).
_LOOK_S = 3.5 * BEAT_S
#: How long the store may take to answer (s).
_PATIENCE_S = 10.0
#: Once another rank has left, what it still takes part in ends within this time (s).
FAREWELL_S = 5.0

_made = itertools.count()  # every rank makes its Peers in the same order


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The entry of one rank in the store.

    Attributes:
        beat: Grows while the process runs.
        end: The way in which it ended; empty while it goes on.
        failed: It ended by an error of its own.
    """

    pid: int
    host: str
    machine: str  # whose process numbers can be looked up here
    beat: int = 0
    end: str = ""
    failed: bool = False


class Peers:
    """This rank's entry, and a look at the others'. Any thread may call.

    Args:
        rank: This one.
        world_size: Ranks.
        on_end: Called once, on the thread of this object, when other ranks ended: with what they said,
            and whether one of them failed (after a clean end it is called again for a failure).
    """

    def __init__(self, rank: int, world_size: int, on_end: Callable[[str, bool], None]) -> None:
        self.rank, self.world_size, self._on_end = rank, world_size, on_end
        self._store, self._prefix = _own_store(), f"infinity/{next(_made)}"
        self._here: list[int] | None = None  # ranks of this machine, once they were looked for
        self._me = Entry(pid=os.getpid(), host=socket.gethostname(), machine=_machine())
        self._publish(self._me)
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards this rank's entry
        self._thread = threading.Thread(target=self._main, name="infinity-peers", daemon=True)
        self._thread.start()

    def tell(self, end: str, *, failed: bool) -> None:
        """Say how this rank ended; the first word stays, but a failure replaces a clean end."""
        with self._lock, suppress(RuntimeError):  # the store may be gone: its keeper ended before us
            if not self._me.failed and (failed or not self._me.end):
                self._publish(replace(self._me, end=end, failed=failed))
                self._store.add(f"{self._prefix}/{'failed' if failed else 'ended'}", 1)

    def explain(self) -> str:
        """Say which ranks are why a collective did not end; look for a few seconds at most."""
        until = time.monotonic() + _LOOK_S
        first: dict[int, Entry] = {}
        while True:
            try:
                entries = self._others()
            except RuntimeError:
                return "the process that keeps the store of torch.distributed, rank 0 or its launcher, ended"
            first = first or entries
            told = _told(entries) or _gone(entries, self._me.machine)
            if told:
                return told
            if time.monotonic() > until:
                return _silent(first, entries)
            time.sleep(0.2)

    def dead(self) -> str:
        """Ranks of this machine whose processes have ended without a word; empty if none has. Looks once.

        Call when every rank has written its entry.
        """
        try:
            entries = self._others(self._here)
        except RuntimeError:
            return ""  # the store is gone: explain() says so
        self._here = [rank for rank, entry in entries.items() if entry.machine == self._me.machine]
        silent = {rank: entry for rank, entry in entries.items() if not entry.end}
        return _gone(silent, self._me.machine, "ZX")

    def close(self) -> None:
        """End the thread; the entry stays."""
        self._closed.set()
        self._thread.join(_PATIENCE_S)

    # --- the thread --------------------------------------------------------------------------

    def _main(self) -> None:
        heard = 0, 0
        while not self._closed.wait(BEAT_S):
            others: dict[int, Entry] = {}
            with suppress(RuntimeError):  # the store is gone; waits for collectives say why
                heard, others = self._beat(heard)
            if told := _told(others):
                self._on_end(told, any(entry.failed for entry in others.values()))

    def _beat(self, heard: tuple[int, int]) -> tuple[tuple[int, int], dict[int, Entry]]:
        """Show that this rank lives; return how many ended, and the others' entries if more did."""
        with self._lock:
            self._publish(replace(self._me, beat=self._me.beat + 1))
        ends = self._store.add(f"{self._prefix}/failed", 0), self._store.add(f"{self._prefix}/ended", 0)
        return ends, {} if ends == heard else self._others()

    # --- the store ---------------------------------------------------------------------------

    def _publish(self, entry: Entry) -> None:
        self._me = entry
        self._store.set(f"{self._prefix}/{self.rank}", json.dumps(asdict(entry)))

    def _others(self, ranks: Iterable[int] | None = None) -> dict[int, Entry]:
        """The entries of other ``ranks``, of all by default, as far as they wrote one."""
        found = {}
        for rank in range(self.world_size) if ranks is None else ranks:
            key = f"{self._prefix}/{rank}"
            if rank != self.rank and self._store.check([key]):
                found[rank] = Entry(**json.loads(self._store.get(key)))
        return found


class GroupFailure:
    """The error after which no collective of some ranks ends well on this one. Any thread may call.

    This rank tells it, or the others do, beside the collectives.

    Args:
        timeout_s: Time for which a silent rank is waited for (s).
        on_failure: Called once with the error.

    Attributes:
        error: The first one; None while all goes well.
        peers: The other ranks.
    """

    def __init__(
        self, rank: int, world_size: int, timeout_s: float, on_failure: Callable[[BaseException], None]
    ) -> None:
        self.rank, self.timeout_s, self._on_failure = rank, timeout_s, on_failure
        self._lock = threading.Lock()  # guards what follows
        self.error: BaseException | None = None
        self._left: tuple[str, float] | None = None  # what a rank that left said, and when we heard it
        self.peers = Peers(rank, world_size, self._heard)

    def tell(self, error: BaseException) -> None:
        """Tell all ranks that this one cannot go on; they raise at their next wait."""
        self._set(error)
        self.peers.tell(how_it_ended(error), failed=not isinstance(error, PeerError | DivergenceError))

    def overdue(self, what: str) -> BaseException | None:
        """Return the error that a wait for ``what`` must raise; None: it may go on."""
        left = self._left
        if self.error is None and left is not None and time.monotonic() > left[1] + FAREWELL_S:
            self._set(self.peer_error(left[0], what))
        return self.error

    def explained(self, what: str, error: BaseException | None = None) -> PeerError:
        """Return why ``what`` did not end, or ended with ``error``; looks for seconds who is at fault."""
        why = f" ({first_line(error)})" if error is not None else ""
        return self.peer_error(self.peers.explain(), what, why)

    def peer_error(self, told: str, what: str = "", why: str = "") -> PeerError:
        """Return the error of this rank, which waited for ``what``, when others ended as ``told``."""
        waited = f" while this one waited for it in: {what}" if what else ""
        return PeerError(
            f"rank {self.rank} stops: {told}{waited}. The first error of the ranks that it names is "
            f"the cause: mend that, then start the run again; if a rank is only slow, raise "
            f"partition.timeout_s ({self.timeout_s:g} s){why}"
        )

    def close(self) -> None:
        """Say that this rank ended, unless it failed."""
        self.peers.tell("closed its model", failed=False)
        self.peers.close()

    def _set(self, error: BaseException) -> None:
        """Keep the first error, and end every wait on this rank with it."""
        with self._lock:
            first, self.error = self.error is None, self.error or error
        if first:
            self._on_failure(error)

    def _heard(self, told: str, failed: bool) -> None:
        """Other ranks ended; on the thread of the peers."""
        if failed:
            self._set(self.peer_error(told))
        elif self._left is None:
            self._left = (told, time.monotonic())


def how_it_ended(error: BaseException) -> str:
    """Return how a rank ended, in words for the others."""
    if isinstance(error, KeyboardInterrupt):
        return "was interrupted (Ctrl-C)"
    if isinstance(error, SystemExit):
        return f"left with exit code {error.code}"
    if isinstance(error, PeerError | DivergenceError):
        return f"stopped because of other ranks: {error}"
    return f"failed with {type(error).__name__}: {error}"


def _own_store() -> Any:
    """The group's store, on a connection of our own: others may block theirs."""
    store: Any = dist.distributed_c10d._get_default_store()
    store = store.clone()
    store.set_timeout(timedelta(seconds=_PATIENCE_S))
    return store


def _told(entries: dict[int, Entry]) -> str:
    """Return what the ranks that ended said; of failures only, if there are any."""
    failed = any(entry.failed for entry in entries.values())
    return "; ".join(
        f"rank {rank} {entry.end}" for rank, entry in entries.items() if entry.end and entry.failed is failed
    )


def _gone(entries: dict[int, Entry], machine: str, states: str = "ZXTt") -> str:
    """Ranks of this machine whose processes are in one of ``states``: ended, or stopped."""
    words = []
    for rank, entry in entries.items():
        state = _process_state(entry.pid) if entry.machine == machine else "R"
        if state not in states:
            continue
        if state in "ZX":
            words.append(
                f"rank {rank} (process {entry.pid} on {entry.host}) was killed or crashed: "
                "see its own output, and dmesg for the kernel's word on memory"
            )
        else:
            words.append(
                f"rank {rank} (process {entry.pid} on {entry.host}) is stopped: SIGSTOP or a debugger"
            )
    return "; ".join(words)


def _silent(before: dict[int, Entry], now: dict[int, Entry]) -> str:
    """Ranks whose beat stands still, or that nothing is wrong with but their absence."""
    still = [rank for rank in before if rank in now and before[rank].beat == now[rank].beat]
    if not still:
        return "every rank is alive, so one of them is busy elsewhere: in its own code, or with its data"
    names = ", ".join(f"rank {rank} (process {now[rank].pid} on {now[rank].host})" for rank in still)
    return f"{names} gave no sign of life for {_LOOK_S:g} s: dead, stopped, or cut off from the network"


def _machine() -> str:
    """The same for two processes that see the same process numbers."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def _process_state(pid: int) -> str:
    """The kernel's letter for a process of this machine: Z or X when it ended, T or t when stopped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return "X"
    return stat.rpartition(")")[2].split()[0]
