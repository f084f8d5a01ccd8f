"""Ctrl-C is held back while tables change.

[Note: Ctrl-C]
A signal's handler raises between any two bytecodes of the main thread, and only there. In the model's compute
nothing of ours is half done: what the step has so far is dropped when the next one begins. What is left are
lines between which tables do not agree: a buffer is leased and not noted yet, or half of the units are
committed. They run in sections, ``with uninterrupted:``. A handler whose signal comes in one is called when
the outermost section ends, so nothing is left half done, and nothing is repaired.

A section may wait for a disk or for other ranks. If that hangs, a second signal is not held back, if it comes
some time after the first. Models that were built before it raise
:class:`~infinity.core.errors.StateError` from then on.

Handlers are called through ours, which a section puts in place of those that it finds. On other threads a
section does nothing: no signal raises there.
"""

import _signal  # type: ignore[import-not-found]  # `signal` takes 3 us, and each module's hook has a section
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from threading import get_ident
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

#: A signal that comes so long after one that is held back is not (s): launchers send several at once.
PATIENCE_S = 1.0
#: Signals whose handlers are held back. SIGALRM is none of them: it may be what ends a wait that hangs.
HELD_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class _Handler:
    """Handler that calls ``handler`` when no section is open."""

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


class Section:
    """Context of lines that no signal's handler comes between; may be nested, and used as a decorator.

    Attributes:
        depth: Sections that the main thread is in.
        pending: The handlers' calls that are held back, by signal, and when these came (s).
        broken: Sections that an exception of a handler has left.
    """

    def __init__(self) -> None:
        self.depth = self.broken = 0
        self._main = threading.main_thread().ident
        self.pending: dict[int, tuple[Callable[[], object], float]] = {}

    def __enter__(self) -> None:
        if get_ident() == self._main:
            self.depth += 1
            if self.depth == 1:
                _take_over_handlers()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if get_ident() == self._main:
            self.depth -= 1
            if self.pending and not self.depth:
                self._call_handlers()

    def _call_handlers(self) -> None:
        """Call what was held back, in order; one that raises does not keep the others from being called."""
        while self.pending:
            call, _ = self.pending.pop(next(iter(self.pending)))
            try:
                call()
            finally:
                self._call_handlers()

    def follow_fork(self) -> None:
        """Let the thread that forked be the main thread, in a child."""
        if get_ident() != self._main:
            self._main, self.depth, self.pending = get_ident(), 0, {}

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def held_back(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return held_back


class UninterruptedExit(ExitStack):
    """An ``ExitStack`` whose contexts end in one section."""

    def __exit__(self, *exc: Any) -> bool | None:
        with uninterrupted:
            return super().__exit__(*exc)


def _take_over_handlers() -> None:
    for number in HELD_BACK:
        handler = _signal.getsignal(number)
        if callable(handler) and type(handler) is not _Handler:
            _signal.signal(number, _Handler(handler))


uninterrupted = Section()
os.register_at_fork(after_in_child=uninterrupted.follow_fork)
#: Functions that a section begins in: a signal that comes as one of them is called is held back, too.
_BEGINNING = {Section.__enter__.__code__, UninterruptedExit.__exit__.__code__}
