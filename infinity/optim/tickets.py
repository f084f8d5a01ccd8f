"""Updates in flight, as transfers: what a fetch of the new weights waits for."""

import threading
from collections.abc import Callable
from contextlib import ExitStack

from infinity.core.transfer import Transfer


class Ticket:
    """An update in flight; a :class:`~infinity.core.transfer.Transfer`.

    Attributes:
        computed: Set when what the update was given is read and written no more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.computed = threading.Event()
        self._error: BaseException | None = None
        self._then: list[Callable[[], None]] = []

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        while not self._ended.wait(1.0):
            pass
        if self._error is not None:
            raise self._error

    def wait_computed(self) -> None:
        """Return when the new weights exist, though they may not be on disk yet."""
        while not self.computed.wait(1.0):
            pass
        if self._error is not None:
            raise self._error

    def then(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._then.append(call)
                return
        call()

    def finish(self, error: BaseException | None) -> None:
        with self._lock:
            self._error = error
            self._ended.set()
            self.computed.set()
            calls, self._then = self._then, []
        with ExitStack() as stack:  # runs every call, also when one raises
            for call in reversed(calls):
                stack.callback(call)


class After:
    """A transfer that begins when ``first`` has ended well."""

    def __init__(self, first: Ticket, begin: Callable[[], Transfer]) -> None:
        self._first, self._begin = first, begin
        self._begun = Ticket()  # ends when the second transfer exists, or cannot begin
        self._second: Transfer | None = None
        first.then(self._start)

    def _start(self) -> None:
        try:
            self._first.wait()
            self._second = self._begin()
        except BaseException as error:  # surfaces at wait
            self._begun.finish(error)
        else:
            self._begun.finish(None)

    def done(self) -> bool:
        return self._begun.done() and (self._second is None or self._second.done())

    def wait(self) -> None:
        self._begun.wait()
        assert self._second is not None
        self._second.wait()

    def then(self, call: Callable[[], None]) -> None:
        self._begun.then(lambda: call() if self._second is None else self._second.then(call))
