"""Threads beside training: slices of one loop on several of them, and a thread on which numba compiles.

A pool of our own, because numba's parallel loops must not be started from two threads at one time, and
torch's pool belongs to training. Slices are whole pieces of an elementwise loop, or rows that are summed one
by one, so their number changes no bit.
"""

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from infinity.device.machine import local_ranks, usable_cores

#: A slice takes at least this many elements: some 50 us of work, several times what handing it over costs.
LEAST_NUMEL = 2**16

#: A fork waits as long for code that is being compiled (s): on a busy machine that has taken more than 30.
_FORK_WAIT_S = 300.0

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_compiling: dict[object, threading.Thread] = {}
_given: int | None = None  # threads that were chosen for this rank


def set_rank_threads(threads: int) -> None:
    """Let this rank compute on as many threads, PyTorch's and those of updates."""
    global _given
    _given = threads
    torch.set_num_threads(threads)


def rank_threads() -> int:
    """Return the threads of this rank: PyTorch's.

    Where the user has set nothing, torchrun sets ``OMP_NUM_THREADS=1``: then they are the rank's share of
    the cores.
    """
    threads = torch.get_num_threads()
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    if threads > 1 or threads == _given or not by_torchrun:
        return threads
    return _share_of_cores()


@functools.cache
def _share_of_cores() -> int:
    """This rank's; files of the system are read for it, and every update asks."""
    return max(1, usable_cores() // local_ranks())


def background_threads() -> int:
    """Threads for work beside training: half of the rank's, at least one."""
    return max(1, rank_threads() // 2)


def in_slices(
    run: Callable[[int, int], object], numel: int, threads: int, *, least: int = LEAST_NUMEL
) -> None:
    """Call ``run(begin, end)`` for slices of ``range(numel)``, on this thread and ``threads - 1`` others.

    Args:
        run: Releases the interpreter lock; called at least once, with an empty slice if ``numel`` is 0.
        numel: Elements, or rows of them.
        threads: The most slices that run at one time.
        least: No slice but the last is smaller.
    """
    size = max(least, -(-numel // threads))
    size += -size % 64  # slices of whole cache lines: no two threads write one
    others = [_submit(run, begin, min(begin + size, numel)) for begin in range(size, numel, size)]
    try:
        run(0, min(size, numel))
    finally:
        wait(others)
    for other in others:
        other.result()


def compile_ahead(key: object, run: Callable[[], object]) -> None:
    """Call ``run``, which calls jitted functions, on a thread of its own; once for each ``key``.

    Who needs such a function earlier waits for numba's lock. What ``run`` raises, they raise, too.
    """
    with _lock:
        if key not in _compiling:
            # not a daemon: an interpreter that ends while LLVM compiles may crash
            _compiling[key] = threading.Thread(target=_quietly, args=(run,), name="infinity-compile")
            _compiling[key].start()


def compiling() -> bool:
    """Whether jitted functions may not be there yet: who has another form of one need not wait for it."""
    return any(thread.is_alive() for thread in list(_compiling.values()))


def _quietly(run: Callable[[], object]) -> None:
    try:
        run()
    except Exception:  # the same error meets who needs the function, on a thread that can tell of it
        return


def _submit(run: Callable[[int, int], object], begin: int, end: int) -> "Future[object]":
    global _pool
    try:
        with _lock:
            _pool = _pool or ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="infinity-slice")
            return _pool.submit(run, begin, end)
    except RuntimeError:  # the interpreter ends: the updates in flight are finished without new threads
        done: Future[object] = Future()
        done.set_result(run(begin, end))
        return done


def _before_fork() -> None:
    """A child would inherit numba's lock, held by a thread that it does not have."""
    for thread in list(_compiling.values()):
        if thread is not threading.current_thread():
            thread.join(_FORK_WAIT_S)


def _after_fork() -> None:
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
