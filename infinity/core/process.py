"""This process: its place among ranks, what it must close, and Ctrl-C, held back while tables change.

[Note: ranks]
Rank and number of ranks are taken from one launcher; the place on the machine from the first that says it:
scripts often set ``RANK`` and ``WORLD_SIZE`` themselves and leave the rest to SLURM.

[Note: forked children]
A forked child has every object and file, but no thread: closing them it would wait for ever, and remove its
parent's files. So everything that must be closed hangs on an :class:`OwnedStack`.

[Note: dropped without close]
The garbage collector calls finalizers on any thread, inside any lock. So a finalizer hands the stack to a
thread that closes it. What holds threads and files refers to its users :func:`weakly`, or the stack's holder
is never collected. That thread ends before the interpreter does: a thread that waits for the interpreter's
lock later is ended by force, and if it is in C++ code (the end of a process group, a sum) the process aborts.

[Note: Ctrl-C]
A signal's handler raises between any two bytecodes of the main thread, and only there. Lines between which
tables do not agree (half of the units are committed) run in sections, ``with uninterrupted:``, whose handlers
call those that they replace when the outermost section ends: nothing is half done or repaired. If a section
hangs, a second signal some time after the first is not held back; models that were built before it raise
:class:`~infinity.core.errors.StateError` from then on.
"""

import _signal  # type: ignore[import-not-found]  # `signal` takes 3 us, and each module's hook has a section
import contextlib
import os
import queue
import re
import signal
import threading
import time
import weakref
import zlib
from collections import namedtuple
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache
from threading import get_ident
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

from infinity.core.errors import LaunchError

P = ParamSpec("P")
R = TypeVar("R")

#: Calls that close; None ends the thread. Its put may interrupt itself.
_dropped: "queue.SimpleQueue[Callable[[], object] | None]" = queue.SimpleQueue()


class OwnedStack(contextlib.ExitStack):
    """An exit stack of the process that made it; in a forked child it ends without calling anything."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    def __exit__(self, *exc: Any) -> bool:
        if os.getpid() != self._pid:
            self.pop_all()
            return False
        return bool(super().__exit__(*exc))

    def close_with(self, holder: object) -> None:
        """Close when ``holder`` is collected, too: see [Note: dropped without close]."""
        _start_closer(os.getpid())
        weakref.finalize(holder, _dropped.put, self.close).atexit = False


def close_collected(*, at_exit: bool = False) -> None:
    """Block until everything that was collected so far is closed; ``at_exit``, nothing later is."""
    reached = threading.Event()
    thread = _start_closer(os.getpid())
    _dropped.put(reached.set)
    reached.wait()
    if at_exit:
        _dropped.put(None)
        thread.join()
        _start_closer.cache_clear()  # for what another function at exit may still build


def weakly(method: Callable[P, R]) -> Callable[P, R | None]:
    """Return a function that calls a bound ``method`` while its object lives, and later does nothing."""
    ref = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
        found = ref()
        return None if found is None else found(*args, **kwargs)

    return call


@cache
def _start_closer(pid: int) -> threading.Thread:
    """Start this process's thread that closes; a child has none of its parent's."""
    thread = threading.Thread(target=_close_dropped, name="infinity-closer", daemon=True)
    thread.start()
    return thread


def _close_dropped() -> None:
    while (call := _dropped.get()) is not None:
        with contextlib.suppress(Exception):  # its holder is gone: no caller can be told
            call()
        del call


#: The names of a launcher's variables.
_Launcher = namedtuple("_Launcher", "name rank world_size local_rank local_world_size")

#: The first that is there counts: srun may start torchrun, and mpirun may start processes through srun.
#: SLURM_NTASKS is not among them, as it is also set where a batch script runs, which is one process.
_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Launcher(
        "mpirun", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    ),
    _Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    _Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


@dataclass(frozen=True, slots=True)
class Launch:
    """Describes this process among those that a launcher started."""

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None  # on its machine; None: no launcher says so
    local_world_size: int | None = None
    launcher: str = ""  # who said it; empty: nothing did, and this is the only process


def launched(environment: Mapping[str, str] | None = None) -> Launch:
    """Return the place of this process, or raise a LaunchError if a variable is missing or makes no sense."""
    env = os.environ if environment is None else environment
    named = next((each for each in _LAUNCHERS if each.world_size in env), None)
    local_rank = next((_number(env, each.local_rank) for each in _LAUNCHERS if each.local_rank in env), None)
    several = (
        max(1, _number(env, each.local_world_size)) for each in _LAUNCHERS if each.local_world_size in env
    )
    local_world_size = next(several, None)
    if named is None:
        return Launch(local_rank=local_rank, local_world_size=local_world_size)
    world_size = max(1, _number(env, named.world_size))
    rank = _number(env, named.rank) if world_size > 1 else 0
    if rank >= world_size:
        raise LaunchError(f"{named.rank}={rank}; wanted less than {named.world_size}={world_size}")
    return Launch(rank, world_size, local_rank, local_world_size, named.name)


def find_meeting_point(found: Launch, environment: MutableMapping[str, str] | None = None) -> None:
    """Set ``MASTER_ADDR`` and ``MASTER_PORT``, where the ranks meet, as far as they are not set.

    Raises a LaunchError if that does not follow: from SLURM's list of machines, or as there is only this one.
    """
    env = os.environ if environment is None else environment
    job = env.get("PMIX_NAMESPACE", "")
    if env.get("SLURM_STEP_NUM_TASKS") == str(found.world_size) and "SLURM_STEP_NODELIST" in env:
        job = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
        first = re.match(r"(?:\[[^]]*\]|[^,[])*", env["SLURM_STEP_NODELIST"])  # of node[01-04,07],gpu3
        env.setdefault("MASTER_ADDR", re.sub(r"\[(\d+)[^]]*\]", r"\1", first[0] if first else ""))
    elif found.local_world_size == found.world_size:
        env.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_ADDR" in env and job:
        env.setdefault("MASTER_PORT", str(20_000 + zlib.crc32(job.encode()) % 10_000))
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise LaunchError(
            f"{found.launcher} started {found.world_size} ranks, but {' and '.join(missing)} "
            f"{'are' if len(missing) > 1 else 'is'} not set, where they meet: export MASTER_ADDR, the name "
            "of rank 0's machine, and MASTER_PORT, a free port of it such as 29500 (mpirun -x MASTER_ADDR -x "
            "MASTER_PORT); for runs that do not belong together export WORLD_SIZE=1"
        )


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    if name.endswith("TASKS_PER_NODE"):  # a list, such as 4(x2),3
        counts: list[str] = []
        for part in text.split(","):
            count, _, times = part.removesuffix(")").partition("(x")
            counts += [count] * (int(times) if times.isdecimal() else 1)
        node = env.get("SLURM_NODEID", "0")
        text = counts[int(node)] if node.isdecimal() and int(node) < len(counts) else text
    if not text.isdecimal():
        raise LaunchError(
            f"{name}: got {env.get(name)!r}; wanted a number, as torchrun, srun and mpirun set it. Start the "
            "ranks with one of them, or unset its other variables"
        )
    return int(text)


#: A second signal this long after the first (s) is not held back: launchers send several at once.
PATIENCE_S = 1.0
#: Signals whose handlers are held back. SIGALRM is none of them: it may be what ends a wait that hangs.
HELD_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class _Handler:
    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        section = uninterrupted
        if section.depth or (frame is not None and frame.f_code in _BEGINNING):
            now = time.monotonic()
            _, came = section.pending.setdefault(number, (lambda: self.handler(number, frame), now))
            if now - came < PATIENCE_S:
                return
        section.pending.pop(number, None)
        try:
            self.handler(number, frame)
        except BaseException:
            section.broken += section.depth > 0
            raise


class Section(contextlib.ContextDecorator):
    """Context that holds back signal handlers, which run on the main thread only; may nest, and decorate."""

    def __init__(self) -> None:
        self.depth = 0  # sections that the main thread is in
        self.broken = 0  # those that an exception of a handler has left
        self._main = threading.main_thread().ident
        #: Handlers' calls that are held back, by signal, and when the signals came (s).
        self.pending: dict[int, tuple[Callable[[], object], float]] = {}

    def __enter__(self) -> None:
        if get_ident() == self._main:
            self.depth += 1
            for number in HELD_BACK if self.depth == 1 else ():
                handler = _signal.getsignal(number)
                if callable(handler) and type(handler) is not _Handler:
                    _signal.signal(number, _Handler(handler))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if get_ident() == self._main:
            self.depth -= 1
            if self.pending and not self.depth:
                self._call_handlers()

    def _call_handlers(self) -> None:
        """Call the handlers that were held back, in order, each even if another one raises."""
        while self.pending:
            call, _ = self.pending.pop(next(iter(self.pending)))
            try:
                call()
            finally:
                self._call_handlers()

    def follow_fork(self) -> None:
        """Make the thread that forked the main thread, in a child."""
        if get_ident() != self._main:
            self._main, self.depth, self.pending = get_ident(), 0, {}


class UninterruptedExit(contextlib.ExitStack):
    """An ``ExitStack`` whose contexts end in one section."""

    def __exit__(self, *exc: Any) -> bool | None:
        with uninterrupted:
            return super().__exit__(*exc)


uninterrupted = Section()
os.register_at_fork(after_in_child=uninterrupted.follow_fork)
#: Functions that a section begins in: a signal that comes as one of them is called is held back, too.
_BEGINNING = {Section.__enter__.__code__, UninterruptedExit.__exit__.__code__}
