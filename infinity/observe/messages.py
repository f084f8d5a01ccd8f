"""Messages for the user, which may be emitted before a display exists, or without any."""

import logging
from collections.abc import Callable

#: Messages that no display shows go here; see them with ``logging.basicConfig(level=logging.INFO)``.
log = logging.getLogger("infinity")


class MessageBuffer:
    """Forwards messages to a display; until one is attached, logs and collects them."""

    def __init__(self) -> None:
        self._show: Callable[[str], object] | None = None
        self._pending: list[str] = []

    def __call__(self, text: str) -> None:
        if self._show is None:
            log.info("%s", text)
            self._pending.append(text)
        else:
            self._show(text)

    def attach(self, show: Callable[[str], object]) -> None:
        """Forward all messages to ``show``, earlier ones first."""
        self._show = show
        pending, self._pending = self._pending, []
        for text in pending:
            show(text)
