"""Objects in processes of their own that take turns: each waits, warm, while another one is measured.

On a shared machine speed changes within minutes by more than what is to be measured. What runs one after the
other is compared with other minutes; what takes turns is compared with what ran a moment ago.
"""

import multiprocessing
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any


class Actor:
    """Serves calls in a new process until it is closed.

    Args:
        make: Makes what serves, there; a function or class that can be imported.
        given: Its arguments.
    """

    def __init__(self, make: Callable[..., AbstractContextManager[Any]], *given: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, given), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, *given: Any) -> Any:
        """What ``method`` returns there.

        Raises:
            RuntimeError: It raised, and has said why; the process has ended.
        """
        try:
            self._pipe.send((method, given))
            return self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            self._process.join()
            raise RuntimeError(f"{method}: its process ended with {self._process.exitcode}") from error

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()


def _serve(
    pipe: Connection, make: Callable[..., AbstractContextManager[Any]], given: tuple[Any, ...]
) -> None:
    with pipe, make(*given) as served:
        while True:
            try:
                method, arguments = pipe.recv()
            except EOFError:
                return
            pipe.send(getattr(served, method)(*arguments))
