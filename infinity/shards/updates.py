"""From complete gradients to committed versions.

[Note: when an update starts]
With two versions, and when nothing global must be known first (no clipping), a unit's update starts
as soon as its gradient exists, inside backward: it reads the committed version and writes the next.
``step`` then only turns the page: what was next is committed. Otherwise gradients are held, and the
updates start at ``step``. Either way they lag into the next forward, where the next fetch of a unit
waits for that unit's own update, and they run in the order in which the next forward will need them.

[Note: what is forgotten]
Skipping a step, or ``zero_grad()`` without ``step()``, is not turning the page: the next version is
overwritten by the next update. A unit in host memory has one place, so it is only updated at
``step``.
"""

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from infinity.core.errors import StateError
from infinity.core.tier import Tier
from infinity.core.transfer import Lease, Transfer
from infinity.optim.norm import sum_of_squares
from infinity.optim.pipeline import Chunk, Expected, Run, UpdateJob, UpdatePipeline
from infinity.optim.rules import AdamWRule, Hyper
from infinity.optim.tickets import After, Ticket
from infinity.partition.unit import Unit
from infinity.shards.commits import Commits
from infinity.shards.journal import CommitRecord
from infinity.shards.store import Version
from infinity.shards.tiers import Tiers


@dataclass(frozen=True, slots=True)
class Weights:
    """A shard's committed weights for its update, as far as they are at hand.

    Attributes:
        values: ``(shard_numel,)`` in the compute dtype; None: the update reads them from NVMe.
        lease: Given back when the update has read them; None: they are not the update's to give back.
        stay: The update writes the new weights into ``values``, too.
    """

    values: Tensor | None = None
    lease: Lease | None = None
    stay: bool = False


@dataclass(slots=True)
class Ready:
    """A unit whose gradient of this step is complete on this rank."""

    unit: Unit
    grad: Tensor
    sum_of_squares: float
    lease: Lease  # of the gradient
    weights: Weights
    ticket: Ticket | None = None  # when the update has started

    def release(self) -> None:
        """Gradient and weights are read no more; may be called twice."""
        self.lease.release()
        if self.weights.lease is not None:
            self.weights.lease.release()


@dataclass(frozen=True, slots=True)
class Span:
    """Elements ``[start, stop)`` of a shard that belong to one parameter group."""

    start: int
    stop: int
    group: int


class Updates:
    """Gradients in, committed versions out.

    Args:
        tiers: Where shards live.
        rule: Updates shards in host memory, on the training thread.
        pipeline: Updates the others; None when everything is resident.
        early: Start inside backward where versions allow it.
        next_use: Position of a unit's first use in the next pass, for the order of updates.
        order_of_gradients: Indices of units in the order in which a step completes their gradients.
        units: All of the model's, for the commit record.
        commits: Writes the commit record; None without two versions on disk.
        on_failure: Called with the error of an update, on the pipeline's thread.
    """

    def __init__(
        self, tiers: Tiers, rule: AdamWRule, pipeline: UpdatePipeline | None, *, early: bool,
        next_use: Callable[[int], int], order_of_gradients: Callable[[], Sequence[int]] = tuple,
        units: Sequence[Unit] = (), commits: Commits | None = None,
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ) -> None:  # fmt: skip
        self.tiers, self.rule, self.pipeline = tiers, rule, pipeline
        self.early, self.next_use, self._on_failure = early, next_use, on_failure
        self.order_of_gradients = order_of_gradients
        self._expecting = False
        self.units, self.commits = units, commits
        self.groups: Sequence[Mapping[str, Any]] = ()  # the optimizer's param_groups
        self.ready: dict[int, Ready] = {}
        self.steps = 0
        self.loss_scale = 1.0
        self.planned_read = self.planned_written = 0  # bytes of this step's updates
        self._tickets: dict[int, Ticket] = {}
        self._hypers: list[Hyper] | None = None
        self._tensors: list[Tensor] = []
        self._group_of: dict[int, int] = {}  # by id of the parameter; frozen ones are in none
        self._lock = threading.Lock()

    # --- gradients ---------------------------------------------------------------------------

    def add(self, unit: Unit, grad: Tensor, lease: Lease, weights: Weights) -> None:
        """A shard's gradient is complete, ``(shard_numel,)``; any thread.

        Args:
            lease: Held for ``grad``, given back when the update has read it.
            weights: Those that the update starts from.
        """
        squares = sum_of_squares(grad)
        ready = Ready(unit, grad, squares, lease, weights)
        with self._lock:
            self.ready[unit.index] = ready
        if not math.isfinite(ready.sum_of_squares):
            ready.release()  # the step will be skipped: nobody reads this gradient
        elif self.early and unit.home is Tier.NVME:
            self._launch(ready, 1.0)

    def expect(self) -> None:
        """A step begins: the states of its updates may be read before their gradients exist."""
        if self.pipeline is not None and not self._expecting:
            self._expecting = True
            self.pipeline.expect([self._expected(self.units[index]) for index in self._coming()])

    def _expected(self, unit: Unit) -> Expected:
        chunks = partial(_chunks, self.tiers.version(unit), self.tiers.version(unit, ahead=1))
        return Expected(unit.name, chunks, self._tickets.get(unit.index))

    def _coming(self) -> list[int]:
        """Units on NVMe in the order of their updates in this step; empty while unknown."""
        on_nvme = [index for index in self.order_of_gradients() if self.units[index].home is Tier.NVME]
        return on_nvme if self.early else self._in_order_of_use(on_nvme)

    def total_sum_of_squares(self) -> float:
        """Over this rank's shards, in the order of units."""
        return math.fsum(self.ready[i].sum_of_squares for i in sorted(self.ready))

    # --- the step ----------------------------------------------------------------------------

    def commit(self, grad_scale: float) -> None:
        """Make this step's updates the model: turn the page, or start what was held."""
        self._check_hypers()
        for index in self._in_order_of_use(self.ready):
            ready = self.ready[index]
            if ready.ticket is None:
                self._start(ready, grad_scale)
            ready.unit.updates += 1
            if ready.unit.home is Tier.NVME:
                ready.unit.version = (ready.unit.version + 1) % self.tiers.versions
        self.steps += 1
        self._record()
        self._close_step()

    def _record(self) -> None:
        """Let the commit record follow when the updates of this step have landed."""
        if self.commits is not None:
            tickets = [ready.ticket for ready in self.ready.values() if ready.ticket is not None]
            versions = tuple(unit.version for unit in self.units)
            self.commits.add(CommitRecord(self.steps, versions), tickets)

    def forget(self) -> list[int]:
        """Drop this step's gradients and updates; the committed version stays. Returns whose they were."""
        forgotten = list(self.ready)
        for ready in self.ready.values():
            if ready.ticket is not None:
                ready.ticket.wait()  # it writes into the next version, which nobody will read
            ready.release()
        self._close_step()
        return forgotten

    def fetch(self, unit: Unit, memory: memoryview, start: int = 0) -> Transfer:
        """Start reading a shard's committed weights from byte ``start`` on, after the update of them."""
        ticket = self._tickets.get(unit.index)
        if ticket is None or ticket.done() or self._is_next(unit):
            if ticket is not None and ticket.done() and not self._is_next(unit):
                ticket.wait()  # raises if that update failed: its weights are not there
            return self.tiers.read_weight(unit, memory, start)
        return After(ticket, lambda: self.tiers.read_weight(unit, memory, start))

    def updated_in_place(self, unit: Unit) -> Callable[[], object]:
        """What waits for the new weights of a unit that stayed; without an update they are the old ones."""
        ticket = self._tickets.get(unit.index)
        return (lambda: None) if ticket is None else ticket.wait_computed

    def leave_in_peace(self, unit: Unit) -> None:
        """When this returns, no update reads or writes the weights that ``unit`` stayed with."""
        ready, ticket = self.ready.get(unit.index), self._tickets.get(unit.index)
        if ready is not None and ready.ticket is None:
            ready.weights = Weights()  # the update will read them
        elif ticket is not None:
            ticket.computed.wait()

    def fetch_waits_for(self, unit: Unit) -> str:
        """What a fetch of ``unit`` waits for now: its update, or the disk's read."""
        ticket = self._tickets.get(unit.index)
        return "read" if ticket is None or ticket.done() or self._is_next(unit) else "update"

    def drain(self) -> None:
        """Block until every update that was started has landed."""
        if self.pipeline is not None:
            self.pipeline.drain()
        if self.commits is not None:
            self.commits.wait()

    def abandon(self, error: BaseException) -> None:
        """End every update with ``error``, soon; what is committed on NVMe stays."""
        if self.pipeline is not None:
            self.pipeline.abandon(error)

    # --- starting ----------------------------------------------------------------------------

    def _start(self, ready: Ready, grad_scale: float) -> None:
        if ready.unit.home is Tier.NVME:
            self._launch(ready, grad_scale)
        else:
            self._update_resident(ready, grad_scale)

    def _update_resident(self, ready: Ready, grad_scale: float) -> None:
        resident = self.tiers.residents[ready.unit.index]
        hypers = self._tensors_for(grad_scale)
        for span in spans_of(ready.unit, self._group_of):
            part = slice(span.start, span.stop)
            state = tuple(f[part] for f in resident.state)
            weight = resident.weight[part]
            self.rule.update(weight, ready.grad[part], state, weight, hypers[span.group])
        ready.release()

    def _launch(self, ready: Ready, grad_scale: float) -> None:
        assert self.pipeline is not None
        unit = ready.unit
        if self.commits is not None:
            self.commits.wait()  # see the commit barrier
        earlier = self._tickets.get(unit.index)
        if earlier is not None:
            earlier.wait()
        ready.ticket = self._tickets[unit.index] = ticket = Ticket()
        with self._lock:
            hypers = self._tensors_for(grad_scale)
        runs = tuple(Run(s.start, s.stop, hypers[s.group]) for s in spans_of(unit, self._group_of))
        chunks = _chunks(self.tiers.version(unit), self.tiers.version(unit, ahead=1))
        weight_nbytes, state_nbytes = self._sizes(unit)
        self.planned_read += state_nbytes + (weight_nbytes if ready.weights.values is None else 0)
        self.planned_written += weight_nbytes + state_nbytes
        self.pipeline.submit(
            UpdateJob(
                name=unit.name, weight=ready.weights.values, grad=ready.grad, chunks=chunks, runs=runs,
                priority=self.next_use(unit.index), on_computed=partial(_computed, ready, ticket),
                on_done=partial(self._landed, ticket), in_place=ready.weights.stay,
            )
        )  # fmt: skip

    def _landed(self, ticket: Ticket, error: BaseException | None) -> None:
        """The end of an update; on the pipeline's thread."""
        if error is not None:
            self._on_failure(error)
        ticket.finish(error)

    def _sizes(self, unit: Unit) -> tuple[int, int]:
        layout = self.tiers.layout
        return layout.weight_nbytes(unit.shard_numel), layout.state_nbytes(unit.shard_numel)

    # --- hyperparameters ---------------------------------------------------------------------

    def _tensors_for(self, grad_scale: float) -> list[Tensor]:
        """One tensor of hyperparameters for each parameter group; the same all through a step."""
        if self._hypers is None:
            self._hypers = self._read_groups()
            self._group_of = {
                id(p): i for i, group in enumerate(self.groups) for p in _params(group) if p.requires_grad
            }
            self._tensors = [
                replace(h, grad_scale=grad_scale / self.loss_scale).tensor() for h in self._hypers
            ]
        return self._tensors

    def _read_groups(self) -> list[Hyper]:
        out = []
        for group in self.groups:
            beta1, beta2 = group["betas"]
            numbers = [float(group[key]) for key in ("lr", "eps", "weight_decay")]
            lr, eps, decay = numbers
            out.append(
                Hyper(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay, step=self.steps + 1)
            )  # fmt: skip
        return out

    def _check_hypers(self) -> None:
        """The numbers with which updates started inside backward are still those of the groups."""
        if self._hypers is not None and self._hypers != self._read_groups():
            raise StateError(
                "param_groups changed between backward() and step(), but updates of this step already "
                "started inside backward. Set the learning rate before backward() or after step(); or "
                "give max_grad_norm or memory.versions=1, with which updates start at step()"
            )

    def _in_order_of_use(self, indices: Iterable[int]) -> list[int]:
        """Held updates start in the order in which the next forward needs them."""
        return sorted(indices, key=lambda i: (self.next_use(i), i))

    def _close_step(self) -> None:
        self.ready.clear()
        self._hypers = None
        self._expecting = False

    def _is_next(self, unit: Unit) -> bool:
        """Whether the unit's update in flight belongs to a step that is not committed yet."""
        ready = self.ready.get(unit.index)
        return ready is not None and ready.ticket is not None


def _computed(ready: Ready, ticket: Ticket) -> None:
    """The update has read what it was given; on the pipeline's thread."""
    ready.release()
    ticket.computed.set()


def _chunks(committed: Version, following: Version) -> tuple[Chunk, ...]:
    """Those of an update from one version to the next."""
    pairs = zip(committed.chunks, following.chunks, strict=True)
    return tuple(Chunk(a.start, a.numel, a.weight, a.state, b.weight, b.state) for a, b in pairs)


def _params(group: Mapping[str, object]) -> list[Tensor]:
    return group["params"]  # type: ignore[return-value]


def spans_of(unit: Unit, group_of: Mapping[int, int]) -> tuple[Span, ...]:
    """The shard's elements by parameter group; frozen parameters and padding are in none.

    Args:
        group_of: Index of the group of each trainable parameter, by ``id``.
    """
    spans: list[Span] = []
    low, high = unit.shard_start, unit.shard_start + unit.shard_numel
    joined = False  # only padding lies between the last span and this segment; it stays zero
    for segment in sorted(unit.segments, key=lambda s: s.offset):
        group = group_of.get(id(segment.param))
        start, stop = max(low, segment.offset) - low, min(high, segment.stop) - low
        if group is None:
            joined = False
        elif start < stop:
            if joined and spans[-1].group == group:
                spans[-1] = Span(spans[-1].start, stop, group)
            else:
                spans.append(Span(start, stop, group))
            joined = True
    return tuple(spans)
