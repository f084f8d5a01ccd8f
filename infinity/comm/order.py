"""Tells which collectives need no agreement, since all ranks expect them: the step before had the same.

[Note: a known order] A step's collectives are those of the step before, but for some. So with the first one
of a step the ranks compare digests of the last step's order. Where all have the same, each of them takes its
next collective without asking as long as it is the one of the last step: whoever does so knows that all
others either do the same, or ask. Which ones are asked for follows from the order and from what was agreed
on, so it is the same on all ranks, unless one of them leaves the order alone. After all have left it together
they ask until the step ends.

Reductions are expected with the same parameters used. Where these differ once, among ranks or from the step
before (experts), reductions are always asked for.
"""

from typing import NamedTuple

#: Kinds of collectives; of those after the first none ends on a rank before all have begun it.
KINDS = ("check", "share", "gather", "sum", "least", "any", "reduce")
_ASKED, _REDUCE = 2, KINDS.index("reduce")
#: Is the digest of no collective: it is asked for.
_NONE = -1


class Want(NamedTuple):
    """Describes a collective: kind, number of the unit or the like, and a digest of what may differ."""

    kind: int
    item: int
    digest: int = 0  # of the parameters used; 0: no such ones


class KnownOrder:
    """The collectives of the last step and of this one. Used by the thread that issues them."""

    def __init__(self, *, asks_reductions: bool) -> None:
        self.asks_reductions = asks_reductions
        self._last, self._now = list[Want](), list[Want]()
        self._step, self._follows = 0, False

    def begin(self, step: int) -> None:
        """Begin a step, if this is another one."""
        if step != self._step:
            self._last, self._now, self._step, self._follows = self._now, [], step, False

    @property
    def digest(self) -> int:
        """What ranks compare with the first collective of a step."""
        return 0 if self._now or not self._last else hash(tuple(self._last)) % 2**62 + 1

    def expects(self, want: Want) -> bool:
        """Return whether ``want`` is what all ranks want next that do not ask; if so it is taken."""
        follows = self._follows and self._next() == want
        if follows and not (want.kind == _REDUCE and self.asks_reductions):
            self._now.append(want)
            return True
        return False

    def retract(self) -> None:
        """Undo the last :meth:`expects`: another rank asks for something else."""
        self._now.pop()

    def agreed(self, want: Want, *, same: bool, known: bool) -> None:
        """Take in what all ranks agreed on: kind and item.

        Args:
            same: The digests of ``want`` are the same on all ranks.
            known: Those of the last step's order are; counts with the first of a step.
        """
        expected = self._next()
        if not self._now:
            self._follows = known
        self._follows = self._follows and expected is not None and expected[:2] == want[:2]
        if not same or (self._follows and expected and expected.digest not in (want.digest, _NONE)):
            self.asks_reductions = True
        asked = want.kind < _ASKED or (want.kind == _REDUCE and not (same and want.digest))
        self._now.append(want._replace(digest=_NONE) if asked else want)

    def _next(self) -> Want | None:
        at = len(self._now)
        return self._last[at] if at < len(self._last) else None
