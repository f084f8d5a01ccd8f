"""Start ranks as processes of their own, and say how each of them ended.

Processes are forks of a server that has imported torch and infinity (see :mod:`tests.helpers.forks`), talk
over gloo on the loopback address, and their function travels by name: it must be a module-level function of a
test module. Several checks may share a start::

    first, second = run_ranks(several, 2, (check_gather, 4), (check_reduce, 4))[0]

A rank ends when its exit handlers have run. Taking the interpreter apart, too, writes to every page that the
fork shares with its server, which takes longer than most of what ranks do here; tests of how a process ends
ask for it with ``to_the_end``.
"""

import atexit
import contextlib
import faulthandler
import itertools
import math
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.forks import ROOT, SEEDS, Fork, Job
from tests.helpers.limits import HANG_S, comes_true

__all__ = [
    "ROOT", "Ended", "Ranks", "RanksError", "free_port", "holding", "mark", "run_ranks", "several",
    "start_ranks",
]  # fmt: skip

#: Once one rank has failed, how long the others may take to end by themselves (s).
GRACE_S = 30.0

_MARKS = "INFINITY_TEST_MARKS"
_STACK = re.compile(r"^(?:Current t|T)hread 0x.* first\):\n((?:  .*\n)+)\n?", re.MULTILINE)


class RanksError(AssertionError):
    """Ranks failed; the message holds every rank's end and traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one rank ended."""

    rank: int
    exit_code: int  # 0; 1 after an exception; -9 after SIGKILL
    result: Any = None
    error_type: str | None = None  # the exception's class name
    error_bases: tuple[str, ...] = ()  # and those of its bases
    message: str = ""
    traceback: str = ""
    ended_s: float = 0.0  # after the last kill, or after the start when none was killed
    hung: bool = False  # had to be ended by us; traceback then shows where every thread stood
    left_behind: int = 0  # processes of this rank that outlived it

    def __str__(self) -> str:
        how = "hung" if self.hung else f"ended with {self.exit_code}"
        return f"rank {self.rank} {how} after {self.ended_s:.1f} s\n{self.traceback}".rstrip()


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = HANG_S, **options: Any
) -> list[Any]:
    """What ``fn(*args)`` returned on each of ``world_size`` ranks, in rank order.

    ``fn`` runs with the process group made (gloo), unless ``group=False``.

    Raises:
        RanksError: A rank raised, died or hung.
    """
    with start_ranks(fn, world_size, *args, **options) as ranks:
        ends = ranks.wait(timeout_s=timeout_s, stop_on_failure=True)
    if any(end.exit_code != 0 or end.hung for end in ends):
        raise RanksError("\n\n".join(str(end) for end in ends))
    return [end.result for end in ends]


def several(*calls: tuple[Any, ...]) -> list[Any]:
    """Run ``(fn, *args)`` one after the other in the ranks of one start; their results."""
    import torch.distributed as dist

    results = []
    for fn, *args in calls:
        results.append(fn(*args))
        if dist.is_initialized():
            dist.barrier()
    return results


@contextlib.contextmanager
def start_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    group: bool = True,
    to_the_end: bool = False,
    imported: bool = True,
) -> Iterator["Ranks"]:
    """Ranks that run, for tests that kill some; nothing outlives the block.

    Args:
        group: Make the process group first.
        to_the_end: Ranks take their interpreters apart when they end.
        imported: The package is imported already; else ranks import it anew.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = Ranks(fn, world_size, args, Path(folder), group, to_the_end, imported)
        try:
            yield ranks
        finally:
            ranks.close()


@contextlib.contextmanager
def holding(fn: Callable[..., Any], *args: Any) -> Iterator["Ranks"]:
    """Another process that keeps what ``fn(*args)`` gave, until it is killed."""
    with start_ranks(_hold, 1, fn, args, group=False) as ranks:
        ranks.reached("holds", 0)
        yield ranks


def _hold(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    held = fn(*args)
    mark("holds")
    signal.pause()
    del held


def mark(name: str) -> None:
    """Say, from within a rank, that it has come this far (see :meth:`Ranks.reached`)."""
    Path(os.environ[_MARKS], f"{name}.{os.environ['RANK']}").touch()


def free_port() -> int:
    """A port that nothing listens at, nor will before its ranks do.

    It is below those that the kernel gives away, and each worker of the suite has some of its own: between
    this call and the rank that listens, all other tests open and close hundreds of connections.
    """
    while True:
        port = next(_ports)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("", port))
            return port


def _own_ports() -> Iterator[int]:
    """Ports of this worker, for ever; its forks, and other suites on this machine, begin somewhere else."""
    first = 10_000 + 500 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 40)
    return (first + number % 500 for number in itertools.count(os.getpid()))


_ports = _own_ports()


class Ranks:
    """Handles to running ranks."""

    def __init__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        args: tuple[Any, ...],
        folder: Path,
        group: bool,
        to_the_end: bool,
        imported: bool,
    ) -> None:
        self.folder, self._imported = folder, imported
        (folder / "job").write_bytes(pickle.dumps((group, to_the_end, fn, args)))
        port = str(free_port())
        self.processes = [self._start(rank, world_size, port) for rank in range(world_size)]
        self._since = time.monotonic()  # the first start of all also imports

    def _start(self, rank: int, world_size: int, port: str) -> Fork:
        variables = {
            "RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": world_size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
            _MARKS: self.folder,
        }
        job = Job(
            module=__name__,
            function="run_job",
            argument=str(self.folder),
            environment={**os.environ, **{key: str(value) for key, value in variables.items()}},
            path=[str(ROOT), *(p for p in sys.path if p)],
            log=str(self.folder / f"log.{rank}"),
            imported=self._imported,
        )
        return Fork(job, seed=SEEDS[rank % len(SEEDS)])

    def reached(self, name: str, rank: int) -> None:
        """Return when ``rank`` has called ``mark(name)``; fail when it ends or takes too long."""
        path, process = self.folder / f"{name}.{rank}", self.processes[rank]
        comes_true(lambda: path.exists() or process.poll() is not None)
        if not path.exists():
            raise RanksError(f"rank {rank} never reached {name!r}\n{self._log(rank)}")

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Send ``signum`` to ``rank``; from now on ``ended_s`` counts."""
        self._since = time.monotonic()
        self.processes[rank].send_signal(signum)

    def wait(self, *, timeout_s: float = HANG_S, stop_on_failure: bool = False) -> list[Ended]:
        """How every rank ended; those still running after ``timeout_s`` count as hung.

        Args:
            timeout_s: From now (s).
            stop_on_failure: Once a rank failed, give the others ``GRACE_S`` only.
        """
        ended_s: dict[int, float] = {}
        until = math.inf

        def ended() -> bool:
            nonlocal until
            for rank, process in enumerate(self.processes):
                if rank not in ended_s and process.poll() is not None:
                    ended_s[rank] = time.monotonic() - self._since
                    if stop_on_failure and process.returncode != 0:
                        until = min(until, time.monotonic() + GRACE_S)
            return len(ended_s) == len(self.processes) or time.monotonic() >= until

        comes_true(ended, timeout_s)
        hung = {rank for rank in range(len(self.processes)) if rank not in ended_s}
        self._show_threads(hung)
        left = {rank: self._leftovers(rank) for rank in ended_s}
        self.close()
        now_s = time.monotonic() - self._since
        return [
            self._ended(rank, ended_s.get(rank, now_s), rank in hung, left.get(rank, 0))
            for rank in range(len(self.processes))
        ]

    def close(self) -> None:
        """End every process of every rank, at once."""
        for process in self.processes:
            # Its group bears its pid, and holds what it left behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _show_threads(self, hung: set[int]) -> None:
        """Have hung ranks write their stacks into their logs, that of the main thread last."""
        before = {rank: len(self._text(rank)) for rank in hung}
        for rank in hung:
            self.processes[rank].send_signal(signal.SIGUSR1)
        # one that is stopped shows nothing
        comes_true(lambda: all("in run_job" in self._text(rank)[before[rank] :] for rank in hung), 10)

    def _leftovers(self, rank: int) -> int:
        try:
            os.killpg(self.processes[rank].pid, 0)
        except ProcessLookupError:
            return 0
        return 1

    def _ended(self, rank: int, ended_s: float, hung: bool, left_behind: int) -> Ended:
        outcome: dict[str, Any] = {"traceback": self._log(rank)}
        path = self.folder / f"result.{rank}"
        if path.exists():
            outcome.update(pickle.loads(path.read_bytes()))
        if self.processes[rank].returncode not in (0, 1):  # it crashed, perhaps after it had left its result
            outcome["traceback"] = self._log(rank)
        return Ended(
            rank=rank,
            exit_code=self.processes[rank].returncode,
            ended_s=ended_s,
            hung=hung,
            left_behind=left_behind,
            **outcome,
        )

    def _text(self, rank: int) -> str:
        return (self.folder / f"log.{rank}").read_text(errors="replace")

    def _log(self, rank: int) -> str:
        return _fold_stacks(self._text(rank))[-8000:]


def _fold_stacks(log: str) -> str:
    """Of threads that stand at the same place, which faulthandler shows one by one, show one."""
    stacks = _STACK.findall(log)
    counts = Counter(stacks)
    folded = [f"{counts[each]} at\n{each}" for each in dict.fromkeys(stacks)]  # the main thread is the last
    return _STACK.sub("", log) + "\n".join(folded)


def run_job(argument: str) -> int:
    """What a rank does: make the group, call the function, leave the result in a file."""
    folder = Path(argument)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    group, to_the_end, fn, args = pickle.loads((folder / "job").read_bytes())
    outcome: dict[str, Any]
    try:
        outcome = {"result": _call(group, fn, args)}
    except BaseException as error:  # KeyboardInterrupt and SystemExit are ends to report, too
        traceback.print_exc()
        outcome = {
            "error_type": type(error).__name__,
            "error_bases": tuple(base.__name__ for base in type(error).__mro__),
            "message": str(error),
            "traceback": traceback.format_exc(),
        }
    path = folder / f"result.{os.environ['RANK']}"
    temporary = path.with_name(f"{path.name}.part")
    temporary.write_bytes(pickle.dumps(outcome))
    temporary.rename(path)
    code = 1 if "error_type" in outcome else 0
    if to_the_end:
        return code
    if "tests.accelerator.device" not in sys.modules:  # its threads may sit in C++ code for ever
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _call(group: bool, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if not group:
        return fn(*args)
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        result = fn(*args)
        # A rank that left early would take the others' connections with it.
        if dist.is_initialized():
            dist.barrier()
        return result
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
