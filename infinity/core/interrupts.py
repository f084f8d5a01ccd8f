"""Interrupts of the training thread: which of them a model outlives.

[Note: Ctrl-C]
A signal raises between any two bytecodes of the main thread, and only there. In the model's compute nothing
of ours is half done: what the step has so far is dropped when the next one begins. A wait of the training
thread is interrupted as if it had not begun. Updates that ``step()`` computes itself run on a thread of their
own, and the interrupt is raised when they are done. What is left are lines between which tables do not
agree: a buffer is leased and not noted yet, or half of the units are committed. They run in sections, and an
interrupt that leaves one is noted:

- ``with bookkeeping:`` around what a pass does to memory. Before the next use everything that passes have in
  memory is forgotten, and fetched anew from what is stored.
- ``with bookkeeping.states:`` around what changes stored states. Whatever the model is asked then raises, and
  says what there is to go on from.

An accelerator's hooks run on autograd's device thread while the main thread is in ``backward()``. No signal
raises there: the interrupt comes when ``backward()`` returns.
"""

import contextlib
import threading
from collections.abc import Callable
from types import TracebackType

from infinity.core.transfer import Transfer

_WAITED = "It came while training waited for bytes: the model can be used on, and the step run again."


class Section:
    """Context of lines that an interrupt must not come between; may be nested and entered again.

    Attributes:
        interrupted: An interrupt left the context. Ordinary exceptions do not count: they are expected.
    """

    interrupted = False

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self.interrupted |= _WAITED not in getattr(error, "__notes__", ())


class Bookkeeping(Section):
    """The sections of one model: see [Note: Ctrl-C].

    Args:
        repair: Called before the next use after an interrupt; may raise.

    Attributes:
        states: The section around changes of stored states.
    """

    def __init__(self, repair: Callable[[], object] = lambda: None) -> None:
        self.states = Section()
        self._repair = repair
        self._held: BaseException | None = None  # came while something ran to its end

    def check(self) -> None:
        """Repair what an interrupt left; or raise, if that cannot be.

        Raises:
            StateError: See :meth:`infinity.engine.runtime.Runtime.repair`.
        """
        if self.interrupted or self.states.interrupted:
            self._repair()

    def run_to_end(self, call: Callable[[], object]) -> None:
        """Run ``call`` on a thread, where no signal raises; :meth:`raise_held` raises the first that came."""
        ended = Transfer()
        errors: list[BaseException] = []

        def noted() -> None:
            try:
                call()
            except BaseException as error:  # with its traceback, which a transfer drops
                errors.append(error)

        calls = [noted]

        def run() -> None:
            with contextlib.suppress(IndexError):  # the thread before has begun
                ended.run(calls.pop())

        while not ended.done():  # again if the start was interrupted
            try:
                try:
                    threading.Thread(target=run, name="infinity-step").start()
                except (RuntimeError, MemoryError):  # the process may have no more threads
                    run()
                ended.wait()
            except BaseException as error:  # whatever it is, a signal's handler raised it
                self._held = error if self._held is None else self._held
        if errors:
            raise errors.pop()

    def raise_held(self) -> None:
        """Raise what a signal's handler raised while something ran to its end."""
        held, self._held = self._held, None
        if held is not None:
            raise held


def ends_a_wait(error: BaseException) -> None:
    """Let ``error`` pass sections: what it interrupted is a wait, after which everything is as before."""
    if not isinstance(error, Exception):
        error.add_note(_WAITED)
