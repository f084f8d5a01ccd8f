"""Resources that the process that opened them closes: when asked, when nothing holds them, or at its end.

[Note: forked children]
A forked child has a copy of every object, none of the threads, and the same files. If it closed what it
inherited, it would wait for threads that it does not have, remove the files of its parent, and speak to other
ranks in the parent's name. So everything that must be closed hangs on an :class:`OwnedStack`.

[Note: dropped without close]
The garbage collector calls finalizers on any thread, inside any lock. So a finalizer waits for nothing: it
hands the stack to a thread of its own, which closes it. The stack must not refer to its holder, or the holder
is never collected: what holds threads and files knows those that it serves :func:`weakly`.
"""

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_dropped: "queue.SimpleQueue[Callable[[], object]]" = queue.SimpleQueue()  # its put may interrupt itself
_closer: threading.Thread | None = None


class OwnedStack(contextlib.ExitStack):
    """An exit stack of the process that made it; in a forked child it ends without calling anything."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if os.getpid() != self._pid:
            self.pop_all()
            return False
        return bool(super().__exit__(kind, error, trace))

    def close_with(self, holder: object) -> None:
        """Close when ``holder`` is collected, too: see [Note: dropped without close]."""
        global _closer
        if _closer is None or not _closer.is_alive():  # none yet, or this is a child of the one that had it
            _closer = threading.Thread(target=_close_dropped, name="infinity-closer", daemon=True)
            _closer.start()
        weakref.finalize(holder, _dropped.put, self.close).atexit = False


def close_collected() -> None:
    """Return when everything that was collected until now is closed."""
    if _closer is not None and _closer.is_alive():
        reached = threading.Event()
        _dropped.put(reached.set)
        reached.wait()


def weakly(method: Callable[P, R]) -> Callable[P, R | None]:
    """Return a function that calls a bound ``method`` while its object lives, and does nothing afterwards."""
    ref = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
        found = ref()
        return None if found is None else found(*args, **kwargs)

    return call


def _close_dropped() -> None:
    while True:
        call = _dropped.get()
        with contextlib.suppress(Exception):  # its holder is gone: no caller can be told
            call()
        del call
