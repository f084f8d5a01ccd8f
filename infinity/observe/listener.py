"""Lines for people: a display may come later than the first of them, or never."""

import logging
from collections.abc import Callable

Say = Callable[[str], None]

#: Where lines go that no display shows: a script sees them with ``logging.basicConfig(level=logging.INFO)``.
log = logging.getLogger("infinity")


class Listener:
    """Gives lines to ``say`` once that is set, those from before first; until then they are logged, too."""

    def __init__(self) -> None:
        self._say: Say | None = None
        self._unsaid: list[str] = []

    def __call__(self, text: str) -> None:
        if self._say is None:
            log.info("%s", text)
            self._unsaid.append(text)
        else:
            self._say(text)

    def attend(self, say: Say) -> None:
        """From now on ``say`` shows the lines."""
        self._say = say
        unsaid, self._unsaid = self._unsaid, []
        for text in unsaid:
            say(text)
