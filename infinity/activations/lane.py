"""Copies on a thread, and beside an accelerator on a stream, of their own."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor


class Lane:
    """One thread that copies, in the order in which it was asked.

    Args:
        name: Of the thread.
        device: Where activations are; an accelerator gets a stream for the lane.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"infinity-{name}")
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, move: Callable[["Lane"], None]) -> "Job":
        """Start ``move(lane)``, after all that the calling thread has given its stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        job = Job(partial(move, self))
        self._thread.submit(job.run)
        return job

    def catch_up(self) -> None:
        """Return when what was given to streams before this move was asked for has been computed."""
        if self._stream is not None:
            self._stream.synchronize()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Return when ``target`` has the bytes of ``source``; on the lane's thread."""
        if self._stream is None:
            target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._stream.synchronize()

    def close(self) -> None:
        """Finish what was asked."""
        self._thread.shutdown()


class Job:
    """A transfer that a lane makes. Once it has ended it holds nothing of what it moved."""

    def __init__(self, move: Callable[[], None]) -> None:
        self._ended = threading.Event()
        self._lock = threading.Lock()  # guards what follows
        self._move: Callable[[], None] | None = move
        self._calls: list[Callable[[], None]] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make it; on the lane's thread."""
        move, self._move = self._move, None
        assert move is not None
        try:
            move()
        except BaseException as error:  # wait() raises it
            self._error = error.with_traceback(None)
        del move
        with self._lock:
            self._ended.set()
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)

    def done(self) -> bool:
        return self._ended.is_set()

    def then(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._calls.append(call)
                return
        call()
