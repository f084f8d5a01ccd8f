"""All-gather of weights, all-to-all of gradients, and a check that every rank does the same.

[Note: one thread, one order]
Collectives must be issued in the same order on every rank. The training thread puts them into
one queue, in the order of the trace; one thread takes them out, waits for what each needs (its
shard's fetch), and issues it on process groups that nobody else uses. So a gather ahead of its
use overlaps compute, and no timing can change the order.

[Note: the header]
Before each collective the ranks exchange a few integers: what, which unit, how many so far, and
whether this rank has failed. Ranks that took different paths differ here, and every rank raises
an error that says who wanted what, in place of a hang or a sum of unrelated numbers. A rank that
failed (full disk, error in its shard's fetch) says so here, and every rank raises.

[Note: reduction]
Gradients travel in the compute dtype, one slice to each owner, and the owner adds them in fp32 in
the order of ranks. A ring would move as many bytes, but would add in an order that depends on
where an element lies in the unit, and would travel in fp32 for the same exactness.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from infinity.core.errors import DivergenceError, InfinityError, PeerError

_KINDS = ("gather", "reduce", "sum", "fail")


#: ``all_gather_into_tensor``, under the name that newer releases of torch want.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending:
    """A collective in flight: ``wait()`` returns its result or raises."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._result: Any = None

    def done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> Any:
        """The result, when the collective has ended on this rank.

        Raises:
            DivergenceError: Ranks asked for different things.
            PeerError: Another rank failed, died or stalled.
            DiskError: What the collective needed could not be read here.
        """
        while not self._done.wait(1.0):  # in slices: Ctrl-C must get through
            pass
        if self._error is not None:
            raise self._error
        return self._result

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        self._result, self._error = result, error
        self._done.set()


class Collectives:
    """The collectives of one process, on their own thread and groups.

    Every rank must construct one at the same point and call its methods in the same order.

    Args:
        device: Where the flat buffers are; decides NCCL or gloo.
        timeout_s: How long a silent rank is waited for.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device, self.timeout_s = device, timeout_s
        timeout = timedelta(seconds=timeout_s)
        self._control = dist.new_group(backend="gloo", timeout=timeout)
        self._group = self._control
        if device.type != "cpu":
            self._group = dist.new_group(backend="nccl", timeout=timeout)
        self._count = 0
        self._failure: BaseException | None = None
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="infinity-collectives", daemon=True)
        self._thread.start()

    # --- what the training thread calls ----------------------------------------------------

    def gather(self, index: int, where: str, full: Tensor, ready: Callable[[], object]) -> Pending:
        """Start the all-gather of unit ``index`` into ``full``, ``(numel,)``, in place.

        Args:
            index: The unit.
            where: The unit's name and its use, for the error when ranks differ.
            full: Holds this rank's shard in its own slice once ``ready`` has returned.
            ready: Waits for that shard (and moves it to the device); may raise.
        """

        def issue() -> Tensor:
            shard = full.chunk(self.world_size)[self.rank]
            _all_gather(full, shard, group=self._group)
            self._settle()
            return full

        return self._submit("gather", index, where, issue, ready)

    def reduce(
        self, index: int, where: str, full: Tensor, spare: Tensor, out: Tensor,
        then: Callable[[Tensor], None],
    ) -> Pending:  # fmt: skip
        """Start the reduction of a unit's gradients: the mean over ranks of this rank's slice.

        Args:
            full: The local gradients, ``(numel,)``.
            spare: Same shape and dtype, overwritten: the slices that arrive.
            out: ``(numel / world_size,)``: the mean; its dtype is that of the additions.
            then: Called with ``out``, on the collectives' thread.
        """

        def issue() -> Tensor:
            dist.all_to_all_single(spare, full, group=self._group)
            arrived = spare.view(self.world_size, -1)
            out.copy_(arrived[0])
            for other in arrived[1:]:
                out.add_(other)
            out.div_(self.world_size)
            self._settle()
            then(out)
            return out

        return self._submit("reduce", index, where, issue)

    def sum(self, values: Sequence[float], where: str) -> list[float]:
        """The sums over ranks of a few float64 values; blocks."""

        def issue() -> list[float]:
            mine = torch.tensor(list(values), dtype=torch.float64)
            everyone = torch.empty(self.world_size * len(mine), dtype=torch.float64)
            _all_gather(everyone, mine, group=self._control)
            return [float(x) for x in everyone.view(self.world_size, -1).sum(0)]

        result: list[float] = self._submit("sum", len(values), where, issue).wait()
        return result

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one cannot go on; returns when they know, or can't."""
        if self._failure is None and not isinstance(error, PeerError | DivergenceError):
            text = f"{type(error).__name__}: {error}"
            self._submit("fail", -1, text, lambda: None, fails=True)._done.wait(self.timeout_s)

    def close(self) -> None:
        """End the thread; collectives that wait in the queue end first."""
        self._queue.put(None)
        self._thread.join(timeout=self.timeout_s if self._failure is None else 1.0)

    # --- the thread ------------------------------------------------------------------------

    def _submit(
        self, kind: str, index: int, where: str, issue: Callable[[], Any],
        ready: Callable[[], object] | None = None, fails: bool = False,
    ) -> Pending:  # fmt: skip
        pending = Pending()

        def job() -> None:
            failure = self._failure
            if failure is None:
                failure = self._attempt(pending, kind, index, where, issue, ready, fails)
            if failure is not None:
                self._failure = failure
                pending.finish(error=failure)

        self._queue.put(job)
        return pending

    def _attempt(
        self, pending: Pending, kind: str, index: int, where: str, issue: Callable[[], Any],
        ready: Callable[[], object] | None, fails: bool,
    ) -> BaseException | None:  # fmt: skip
        local: BaseException | None = None
        try:
            if ready is not None:
                ready()
        except BaseException as error:
            local, fails, where = error, True, f"{type(error).__name__}: {error}"
        try:
            self._agree(kind, index, where, fails)
            if local is None and not fails:
                pending.finish(issue())
                return None
        except InfinityError as error:
            return local or error
        except RuntimeError as error:
            return local or PeerError(
                f"rank {self.rank}: another rank died or was silent for {self.timeout_s:g} s while "
                f"this one waited for it in: {kind} {where}. Look at the first error of the other "
                f"ranks; raise partition.timeout_s if a rank is only slow. ({_first_line(error)})"
            )
        return local

    def _agree(self, kind: str, index: int, where: str, fails: bool) -> None:
        """Exchange headers: see [Note: the header]."""
        mine = torch.tensor([_KINDS.index(kind), index, self._count, int(fails)], dtype=torch.int64)
        everyone = torch.empty(self.world_size * len(mine), dtype=torch.int64)
        _all_gather(everyone, mine, group=self._control)
        headers = everyone.view(self.world_size, -1)
        self._count += 1
        if int(headers[:, 3].sum()) == 0 and bool((headers == headers[0]).all()):
            return
        wanted: list[Any] = [None] * self.world_size
        dist.all_gather_object(wanted, f"{kind} {where}" if not fails else where, group=self._control)
        failed = [r for r in range(self.world_size) if int(headers[r, 3])]
        if failed:
            told = "; ".join(f"rank {r} failed with {wanted[r]}" for r in failed)
            raise PeerError(f"{told} (seen by rank {self.rank}); every rank stops here")
        told = "; ".join(f"rank {r} wants {what}" for r, what in enumerate(wanted))
        raise DivergenceError(
            f"the ranks took different paths at collective {self._count}: {told}. Every rank must run "
            "the same modules in the same order; feed every rank a batch that takes the same branches"
        )

    def _settle(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.current_stream(self.device).synchronize()  # this thread only

    def _run(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.set_device(self.device)
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            torch.cuda.set_stream(stream)  # gathers beside compute
        while (job := self._queue.get()) is not None:
            job()


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]
