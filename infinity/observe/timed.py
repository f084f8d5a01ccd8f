"""Engines and an update rule that tell what they do: into a timeline, or to whoever records a step."""

from collections.abc import Callable
from typing import Any

from infinity.core.extent import Extent
from infinity.core.transfer import Transfer, TransferEngine
from infinity.observe.timeline import Timeline


class WatchedEngine:
    """A transfer engine that tells ``listener``, while there is one, the bytes that it is asked to move.

    Attributes:
        listener: Called with bytes read and bytes written, on any thread.
    """

    def __init__(self, engine: TransferEngine) -> None:
        self._engine, self.name = engine, engine.name
        self.listener: Callable[[int, int], object] | None = None

    def read(self, extent: Extent, memory: memoryview, *, urgent: bool = False) -> Transfer:
        if self.listener is not None:
            self.listener(extent.nbytes, 0)
        return self._engine.read(extent, memory, urgent=urgent)

    def write(self, extent: Extent, memory: memoryview) -> Transfer:
        if self.listener is not None:
            self.listener(0, extent.nbytes)
        return self._engine.write(extent, memory)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class TimedEngine:
    """A transfer engine, each of whose transfers is a span of lane ``read`` or ``write``."""

    def __init__(self, engine: TransferEngine, timeline: Timeline) -> None:
        self._engine, self._timeline = engine, timeline
        self.name = engine.name

    def read(self, extent: Extent, memory: memoryview, *, urgent: bool = False) -> Transfer:
        return self._watch("read", "weights" if urgent else "state", extent, memory, urgent)

    def write(self, extent: Extent, memory: memoryview) -> Transfer:
        return self._watch("write", "state", extent, memory, False)

    def _watch(self, lane: str, name: str, extent: Extent, memory: memoryview, urgent: bool) -> Transfer:
        begin_s = self._timeline.clock()
        if lane == "read":
            transfer = self._engine.read(extent, memory, urgent=urgent)
        else:
            transfer = self._engine.write(extent, memory)
        transfer.then(lambda: self._timeline.add(lane, name, begin_s, self._timeline.clock()))
        return transfer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class TimedRule:
    """An update rule, each of whose updates is a span of lane ``update``."""

    def __init__(self, rule: Any, timeline: Timeline) -> None:
        self._rule, self._timeline = rule, timeline

    def update(self, *args: Any) -> None:
        with self._timeline.span("update", "update"):
            self._rule.update(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)
