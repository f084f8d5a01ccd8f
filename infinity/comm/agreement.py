"""Agreement of ranks on what comes next: once a step, and on each collective that was not in the step before.

[Note: the header] Before a collective that not all ranks expect they exchange a few integers: kind,
unit, step, number of the collective, and whether this rank has failed, as when its shard's fetch did. Headers
have a process group of their own, because a rank that leaves the order alone asks while the others have begun
a collective that it may never begin. If they do not come soon, it writes to the store that it asks, and at
which collective. A rank that waits in a collective reads the store now and then, and joins.

[Note: ranks on different paths] Ranks may use other modules, or run more micro-batches, than others. So where
wants differ, all ranks choose the same :class:`Turn` from all headers: whose want is next. Who wants it does
it, and all others *serve* it, on the thread of collectives, whatever they compute: they send their shard of a
unit that is gathered, and as owners take in the gradients of those that have some. Their own wants wait. The
choice depends on the programs of ranks only, not on when they ask: a rank asks when it has a want, and who
waits for others at ``step()`` wants the norm. So numbers do not depend on timing.

- What some have begun in a known order comes first. Those that do not want it complete it with memory of
  their own, once; a sum of values that are not there yet is void, and is asked for again.
- Then gathers: no sum depends on their order.
- Then reductions: of the earliest micro-batch, in it of the last unit of the model, where backward begins. So
  a rank that leaves out a unit does not hold back others, and ranks that use it add in the order of ranks. A
  rank that completes a unit later than this order, since it used a part of it, adds to that sum.
- A unit is complete when all ranks have given the last of it together; what was given in parts is complete at
  ``step()``, where no rank has more to give.

A rank that closes its model serves until all do. All else (values, checks, sums) all ranks must want. The
step after one of these knows no order.

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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from infinity.comm.peers import Peers, how_it_ended
from infinity.core.errors import DivergenceError

#: Kinds of collectives; of those between the first and the last none ends on a rank before all have begun it.
#: ``near`` is a gather that needs the ranks of a node only.
#: ``add`` is a reduction of a micro-batch that others follow on this rank.
KINDS = (
    "check",
    "share",
    "gather",
    "values",
    "write",
    "sum",
    "least",
    "any",
    "reduce",
    "near",
    "add",
    "leave",
)
_ASKED, _GATHER, _REDUCE, _LEAVE = 2, *map(KINDS.index, ("gather", "reduce", "leave"))
REDUCTIONS = _REDUCE, KINDS.index("add")
#: Those that give the values of all ranks.
EXCHANGES = tuple(map(KINDS.index, ("sum", "least", "any")))
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


class Header(NamedTuple):
    """Describes what a rank wants, to the others."""

    kind: int
    item: int
    step: int
    number: int  # of collectives before
    micro: int  # of the micro-batch in the step, of a reduction
    failed: int
    begun: int  # it has begun it
    numel: int  # of the parameters that may have been used
    digest: int  # of those that were
    order: int  # the digest of the last step's order

    @property
    def wants(self) -> tuple[int, int, int]:
        """Return what must be the same for ranks to do it together."""
        reduces = self.kind in REDUCTIONS
        return (_REDUCE, self.item, self.micro) if reduces else (self.kind, self.item, 0)


class Turn(NamedTuple):
    """Says what all ranks do next: see [Note: ranks on different paths]."""

    want: Want
    ranks: tuple[int, ...]  # that want it; the others serve
    whole: bool = True  # all ranks take part as if they wanted it
    ends: bool = True  # of a reduction: all ranks have given the last of the unit in this step

    @classmethod
    def of(cls, headers: Sequence[Header], *, serves: bool = True) -> "Turn | None":
        """Choose the next collective; None: ranks want what does not go together."""
        begun = [each for each in headers if each.begun]
        gathers = [each for each in headers if each.kind == _GATHER]
        reductions = [each for each in headers if each.kind in REDUCTIONS]
        if begun:
            first = begun[0]
        elif gathers:
            first = min(gathers, key=lambda each: each.item)
        elif reductions:
            first = min(reductions, key=lambda each: (each.micro, -each.item))
        else:
            first = headers[0]
        ranks = tuple(rank for rank, each in enumerate(headers) if each.wants == first.wants)
        alike = len(ranks) == len(headers)
        may_differ = (_GATHER, *REDUCTIONS, *(EXCHANGES if begun else ()))
        if not alike and not (serves and first.kind in may_differ):
            return None
        ends = alike and all(each.kind == _REDUCE for each in headers)
        return cls(Want(first.kind, first.item), ranks, alike or bool(begun), ends)


class KnownOrder:
    """The collectives of the last step and of this one. Used by the thread that issues them."""

    def __init__(self, *, asks_reductions: bool) -> None:
        self.asks_reductions = asks_reductions
        self._last, self._now = list[Want](), list[Want]()
        self._step, self._follows = 0, False
        self.parted, self._parts_now = False, False  # some ranks wanted what others did not; in this step
        self._ended: set[int] = set()  # units that are complete in this step

    def begin(self, step: int) -> None:
        """Begin a step, if this is another one."""
        if step != self._step:
            self._last, self._now = [] if self._parts_now else self._now, []
            self._step, self._follows, self._parts_now = step, False, False
            self._ended.clear()

    def may_do(self, turn: Turn) -> bool:
        """Return whether ranks may part for ``turn``: not if it reduces a unit that was complete."""
        return turn.want.kind not in REDUCTIONS or turn.want.item not in self._ended

    def done(self, turn: Turn) -> None:
        """Take note of a turn that is over."""
        if turn.ends and turn.want.kind == _REDUCE:
            self._ended.add(turn.want.item)

    @property
    def digest(self) -> int:
        """The digest of the last step's order, in the header of a step's first collective; 0 in others."""
        return 0 if self._now or not self._last else hash(tuple(self._last)) % 2**62 + 1

    def expects(self, want: Want) -> bool:
        """Return whether ``want`` is what all ranks want next that do not ask; if so it is taken."""
        follows = self._follows and self._next() == want
        if follows and not (want.kind in REDUCTIONS and self.asks_reductions):
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
        asked = want.kind < _ASKED or (want.kind in REDUCTIONS and not (same and want.digest))
        if len(self._now) < MOST_KNOWN:
            self._now.append(want._replace(digest=_NONE) if asked else want)

    def part(self, want: Want) -> None:
        """Take note that some ranks do not want ``want``: until the next step all ask."""
        self._follows, self.parted, self._parts_now = False, True, True
        self._now.append(want)

    def _next(self) -> Want | None:
        at = len(self._now)
        return self._last[at] if at < len(self._last) else None


class Call(NamedTuple):
    """Describes a collective that this rank issues."""

    want: Want
    step: int
    name: str  # for people
    used: bytes = b""  # 1 for each parameter that has a gradient here, in a reduction
    micro: int = 0  # the number of its micro-batch in the step


class Agreement:
    """Makes sure that all ranks do the same before any issues it. Used by the thread that issues it.

    All ranks are those of ``group``. ``of_all_ranks`` returns the tensors of the ranks of a group. Unless a
    rank ``serves`` what others want, all must want the same.
    """

    def __init__(
        self, peers: Peers, group: Any, of_all_ranks: Callable[[Tensor, Any], Tensor], *,
        asks_reductions: bool,
    ) -> None:  # fmt: skip
        self.group = group
        self.asked, self._count = self._ranks[0] << 40, 0  # exchanges of headers, and collectives
        self._called = -1  # the exchange in which the others were told
        self.used = b""  # by any rank, as far as it is known, in the last collective
        self._peers, self._of_all_ranks = peers, of_all_ranks
        self.order = KnownOrder(asks_reductions=asks_reductions)
        self._call, self._follows = Call(Want(0, 0), 0, ""), False
        self.serves = False
        self.turn = self._for_all(Want(0, 0))  # the last one

    @property
    def _ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.group)

    def _for_all(self, want: Want) -> Turn:
        return Turn(want, tuple(self._ranks), ends=want.kind == _REDUCE)

    def reach(self, call: Call, failure: BaseException | None) -> Turn:
        """Return what all ranks do next, once that is certain, or raise.

        ``failure`` is why this rank cannot go on, which it has told the others. Raises it, a PeerError if
        another rank has failed, or a DivergenceError.
        """
        self.order.done(self.turn)
        self._count += 1
        self._call, self.used = call, call.used
        self.order.begin(call.step)
        self._follows = self.order.expects(call.want)
        if not self._follows:
            self.turn = self._ask(failure)
        elif failure is not None:
            raise failure
        else:
            self.turn = self._for_all(call.want)
        return self.turn

    def join(self) -> None:
        """Exchange headers in an expected collective, if another rank asks; raise as :meth:`reach`."""
        if self._follows and self._peers.asks(self.asked, self._count):
            self._follows = False
            self.order.retract()
            self.turn = self._ask(begun=True)

    def call_others(self) -> None:
        """Say, once, that this rank waits for others in an exchange of headers."""
        if self._called != self.asked:
            self._called = self.asked
            self._peers.ask(self.asked, self._count)

    def _ask(self, failure: BaseException | None = None, *, begun: bool = False) -> Turn:
        call, order = self._call, self.order.digest
        want = call.want
        mine = Header(
            want.kind, want.item, call.step, self._count, call.micro, int(failure is not None), int(begun),
            len(call.used), want.digest, order,
        )  # fmt: skip
        # Compared as lists: a torch operator would release the GIL, and wait for the computing thread.
        everyone = self._of_all_ranks(torch.tensor(mine, device="cpu"), self.group).tolist()
        headers = [Header(*each) for each in everyone]
        failed = [place for place, header in enumerate(headers) if header.failed]
        turn = None
        if not failed and all(each[2:4] == mine[2:4] for each in headers):
            turn = Turn.of(headers, serves=self.serves)
        if turn is not None and len(turn.ranks) < len(headers) and not self.order.may_do(turn):
            turn = None
        left = [place for place, header in enumerate(headers) if header.kind == _LEAVE]
        if turn is None and left and not failed:  # others want what needs it
            self.asked += 1
            if want.kind == _LEAVE:
                return self._for_all(want)
            raise self._peers.peer_error("; ".join(f"rank {self._ranks[r]} closed its model" for r in left))
        if turn is not None:
            self._take(turn, headers, want)
            turn = turn._replace(ranks=tuple(self._ranks[place] for place in turn.ranks))
            self.asked += 1  # not earlier: a wait for the sets would call others to the next exchange
            return turn
        wanted: list[Any] = [None] * len(headers)
        told = call.name if failure is None else how_it_ended(failure)
        dist.all_gather_object(wanted, told, group=self.group)
        self.asked += 1
        if failed:
            raise self._peers.peer_error("; ".join(f"rank {self._ranks[r]} {wanted[r]}" for r in failed))
        wants = "; ".join(f"rank {r} wants {what}" for r, what in zip(self._ranks, wanted, strict=True))
        raise DivergenceError(
            f"the ranks took different paths at collective {self._count}: {wants}. "
            + (_MAY if self.serves else _MUST)
        )

    def _take(self, turn: Turn, headers: Sequence[Header], want: Want) -> None:
        """Take in what all ranks agreed on, and which parameters any of them used."""
        alike = len(turn.ranks) == len(headers)
        same = alike and all(header.digest == want.digest for header in headers)
        if alike and len({header.kind for header in headers}) == 1:
            order = headers[0].order
            known = order > 0 and all(header.order == order for header in headers)
            self.order.agreed(want, same=same, known=known)
        else:
            self.order.part(turn.want)
        if turn.want.kind in REDUCTIONS and not same:
            wanted = self._ranks.index(self._peers.rank) in turn.ranks
            used = self._call.used if wanted else bytes(headers[turn.ranks[0]].numel)
            sets = torch.frombuffer(bytearray(used), dtype=torch.uint8)
            self.used = self._of_all_ranks(sets, self.group).amax(0).numpy().tobytes()


_MAY = (
    "Ranks may use other modules than others, and run more micro-batches; but calls that concern all ranks "
    "(step, zero_grad that drops gradients, gathered, state_dict, checkpoints, tiles of experts) must come "
    "in the same order on each"
)
_MUST = (
    "Every rank must run the same modules in the same order; feed every rank a batch that takes the same "
    "branches, or name the class of the module that branches (experts, say) in partition.leaf"
)
