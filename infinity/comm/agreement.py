"""Agreement of ranks on what comes next: once a step, and on each collective that was not in the step before.

[Note: the header] Before a collective that not all ranks expect they exchange a few integers: kind,
unit, step, number of the collective, and whether this rank has failed, as when its shard's fetch did. Where
they differ, every rank raises an error that says who wanted what, instead of a hang or a sum of unrelated
numbers. Headers have a process group of their own, because a rank that leaves the order alone asks while the
others have begun a collective that it never begins. If they do not come soon, it writes to the store that it
asks, and at which collective. A rank that waits in a collective reads the store now and then, and joins.

[Note: which parameters were used] The header of a reduction has a digest of the set of parameters that have
gradients on this rank. Only where digests differ, in few steps, do the ranks exchange the sets; without any
gradient nothing is reduced. On an accelerator, where a reduction is not over when its thread goes on, each is
asked for.

[Note: a known order] A step's collectives are those of the step before, but for some. So with the first one
of a step the ranks compare digests of the last step's order. Where all have the same, each of them takes its
next collective without asking as long as it is the one of the last step. All others then either do the same,
or ask. Which collectives are asked for follows from the order and from what was agreed on, so it is the same
on all ranks, unless one of them leaves the order alone. Once all have left it together, they ask until the
step ends.

Reductions are expected with the same parameters used. Where these differ once, among ranks or from the step
before (experts), reductions are always asked for.
"""

import hashlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from infinity.comm.peers import Peers, how_it_ended
from infinity.core.errors import DivergenceError

#: Kinds of collectives; of those between the first and the last none ends on a rank before all have begun it.
#: ``near`` is a gather that needs the ranks of a node only.
KINDS = ("check", "share", "gather", "values", "write", "sum", "least", "any", "reduce", "near")
_ASKED, _REDUCE = 2, KINDS.index("reduce")
#: Collectives of a step that are remembered; what follows, as in long generations, is asked for.
MOST_KNOWN = 2**16
#: The digest of a collective that is always asked for.
_NONE = -1


class Want(NamedTuple):
    """Describes a collective: kind, number of the unit or the like, and a digest of what may differ."""

    kind: int
    item: int
    digest: int = 0  # of the parameters used; 0: no such ones

    @classmethod
    def of(cls, kind: str, item: int, used: bytes) -> "Want":
        digest = int.from_bytes(hashlib.blake2b(used, digest_size=7).digest()) if any(used) else 0
        return cls(KINDS.index(kind), item, digest)


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
        """The digest of the last step's order, in the header of a step's first collective; 0 in others."""
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
        if len(self._now) < MOST_KNOWN:
            self._now.append(want._replace(digest=_NONE) if asked else want)

    def _next(self) -> Want | None:
        at = len(self._now)
        return self._last[at] if at < len(self._last) else None


class Call(NamedTuple):
    """Describes a collective that this rank issues."""

    want: Want
    step: int
    name: str  # for people
    used: bytes = b""  # 1 for each parameter that has a gradient here, in a reduction


class Agreement:
    """Makes sure that all ranks want the same before any issues it. Used by the thread that issues it.

    ``of_all_ranks`` returns every rank's tensor, exchanged on a group.
    """

    def __init__(
        self, peers: Peers, of_all_ranks: Callable[[Tensor, Any], Tensor], *, asks_reductions: bool
    ) -> None:
        self.group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=peers.timeout_s))
        self.asked = self._count = 0  # exchanges of headers, and collectives
        self._called = -1  # the exchange in which the others were told
        self.used = b""  # by any rank, as far as it is known, in the last collective
        self._peers, self._of_all_ranks = peers, of_all_ranks
        self._order = KnownOrder(asks_reductions=asks_reductions)
        self._call, self._follows = Call(Want(0, 0), 0, ""), False

    def reach(self, call: Call, failure: BaseException | None) -> None:
        """Return once it is certain that all ranks want what ``call`` does, or raise.

        ``failure`` is why this rank cannot go on, which it has told the others. Raises it, a PeerError if
        another rank has failed, or a DivergenceError.
        """
        self._count += 1
        self._call, self.used = call, call.used
        self._order.begin(call.step)
        self._follows = self._order.expects(call.want)
        if not self._follows:
            self._ask(failure)
        elif failure is not None:
            raise failure

    def join(self) -> None:
        """Exchange headers in an expected collective, if another rank asks; raise as :meth:`reach`."""
        if self._follows and self._peers.asks(self.asked, self._count):
            self._follows = False
            self._order.retract()
            self._ask()

    def call_others(self) -> None:
        """Say, once, that this rank waits for others in an exchange of headers."""
        if self._called != self.asked:
            self._called = self.asked
            self._peers.ask(self.asked, self._count)

    def _ask(self, failure: BaseException | None = None) -> None:
        call, order = self._call, self._order.digest
        want = call.want
        mine = [want.kind, want.item, call.step, self._count, int(failure is not None), order, want.digest]
        # Compared as lists: a torch operator would release the GIL, and wait for the computing thread.
        headers = self._of_all_ranks(torch.tensor(mine, device="cpu"), self.group).tolist()
        failed = [rank for rank, header in enumerate(headers) if header[4]]
        if not failed and all(header[:4] == mine[:4] for header in headers):
            same = all(header[6] == want.digest for header in headers)
            known = order > 0 and all(header[5] == order for header in headers)
            self._order.agreed(want, same=same, known=known)
            if not same:
                used = torch.frombuffer(bytearray(call.used), dtype=torch.uint8)
                self.used = self._of_all_ranks(used, self.group).amax(0).numpy().tobytes()
            self.asked += 1  # not earlier: a wait for the sets would call others to the next exchange
            return
        wanted: list[Any] = [None] * len(headers)
        told = call.name if failure is None else how_it_ended(failure)
        dist.all_gather_object(wanted, told, group=self.group)
        self.asked += 1
        if failed:
            raise self._peers.peer_error("; ".join(f"rank {r} {wanted[r]}" for r in failed))
        wants = "; ".join(f"rank {r} wants {what}" for r, what in enumerate(wanted))
        raise DivergenceError(
            f"the ranks took different paths at collective {self._count}: {wants}. Every rank must run "
            "the same modules in the same order; feed every rank a batch that takes the same branches, or "
            "name the class of the module that branches (experts, say) in partition.leaf"
        )
