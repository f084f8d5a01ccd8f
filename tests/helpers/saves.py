"""Portable checkpoints in the background, held until a test lets them go on."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from infinity.api import portable
from infinity.shards.homes import Snapshot
from tests.helpers.limits import HANG_S


@contextlib.contextmanager
def held(patch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No value of a checkpoint is read or written before the event is set."""
    opened, reserve = threading.Event(), portable.reserve

    def reserving(*args: Any) -> None:
        assert opened.wait(HANG_S)
        reserve(*args)

    patch.setattr(portable, "reserve", reserving)
    yield opened


def go_on_when_closed(patch: pytest.MonkeyPatch, opened: threading.Event) -> None:
    """Set the event when the snapshot of a save is closed, and not before."""
    close = Snapshot.close

    def closing(self: Snapshot) -> None:
        opened.set()
        close(self)

    patch.setattr(Snapshot, "close", closing)
