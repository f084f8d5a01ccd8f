"""Gradients of units, and their sums over the micro-batches of a step.

[Note: micro-batches]
With one rank a micro-batch adds to the flat gradient in the compute dtype, as ``p.grad`` would. With several
ranks each micro-batch is reduced at once and the shards are summed: full gradients of a model larger than
memory could not be kept. Sums that device memory has no room for leave it until the next micro-batch adds to
them: for NVMe, or beside an accelerator for host memory and from there for NVMe. With one rank they come back
in the order in which they left, one ahead of backward where there is room; with several, beside their unit's
reduction.

One that came ahead has its memory until something else finds no room: backward's thread gives that back, and
no other takes the sum. One that comes for a reduction keeps it: another thread waits for it and adds to it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from infinity.core.errors import StateError
from infinity.core.nbytes import Transfer
from infinity.device.memory import CountingPool, HostPool, Lease, Pool
from infinity.partition.unit import Segment, Unit
from infinity.shards.updates import StoredGradients


@dataclass(slots=True)
class Gradient:
    """Holds the gradient of one unit, ``(numel,)``, or of this rank's shard of it, ``(shard_numel,)``."""

    lease: Lease
    dtype: torch.dtype
    used: bytearray  # 1: the segment has a gradient of this step, of a shard on any rank
    open: Tensor | None = None  # of a unit: ``flat``, made once for all its parameters

    @classmethod
    def of(cls, unit: Unit, pool: Pool | CountingPool) -> "Gradient":
        """Return an empty one of a whole unit; blocks while updates hold too much memory."""
        lease = pool.lease(unit.nbytes, who=f"gradient of {unit.name}")
        used, values = bytearray(len(unit.segments)), lease.tensor.view(unit.dtype)
        return cls(lease, unit.dtype, used, values)

    @property
    def flat(self) -> Tensor:
        """Return the values, ordered after every earlier use of their buffer."""
        return self.lease.tensor.view(self.dtype)

    def add(self, segment: Segment, grad: Tensor) -> None:
        """Add one parameter's gradient of this backward, as ``p.grad`` would."""
        if grad.is_sparse:
            wanted = "wanted a dense one. Build the embedding with sparse=False"
            raise StateError(f"{segment.name} got a sparse gradient; {wanted}")
        assert self.open is not None
        place = segment.view_of(self.open)
        if self.used[segment.index]:
            place.add_(grad)
        else:
            place.copy_(grad)
            self.used[segment.index] = 1

    def seal(self, segments: Iterable[Segment]) -> None:
        """Set elements that no gradient of the unit's ``segments`` reached to zero (frozen ones, padding)."""
        flat, position = self.flat, 0
        for segment in segments:
            if self.used[segment.index]:
                if position < segment.offset:
                    flat[position : segment.offset].zero_()
                position = segment.stop
        if position < len(flat):
            flat[position:].zero_()


@dataclass(slots=True)
class Away:
    """Tracks a sum that has left device memory."""

    dtype: torch.dtype
    used: bytearray
    nbytes: int
    host: Lease | None = None  # None: it is on NVMe
    coming: tuple[Lease, Transfer] | None = None  # device memory, and when it is there


class Sums:
    """Sums of a step's earlier micro-batches, by unit: see [Note: micro-batches].

    ``run`` runs a call where bytes leave ``pool`` for ``host``, beside an accelerator; else both are None.
    """

    def __init__(
        self, pool: CountingPool, host: HostPool | None, stored: StoredGradients,
        run: Callable[[Callable[[], None]], Transfer] | None,
    ) -> None:  # fmt: skip
        self._pool, self._host, self._stored, self._run = pool, host, stored, run
        self.leaving: frozenset[int] = frozenset()  # units whose sums leave device memory
        self.ahead = False  # one may come back while another one leaves
        self.here: dict[int, Gradient] = {}
        self.away: dict[int, Away] = {}  # in the order in which they left
        self._early: Away | None = None  # came ahead; only backward's thread reads it
        pool.reclaim = self._leave_again

    def __contains__(self, index: int) -> bool:
        return index in self.here or index in self.away

    def put(self, unit: Unit, total: Gradient) -> None:
        """Keep a unit's sum until the next micro-batch."""
        if unit.index not in self.leaving:
            self.here[unit.index] = total
            return
        away = self.away[unit.index] = Away(total.dtype, total.used, total.lease.nbytes)
        leave = partial(self._leave, unit, total.lease, away)
        leave() if self._run is None else self._run(leave)

    def divide(self, leaving: Iterable[int], units: Sequence[Unit], *, ahead: bool) -> None:
        """Let sums of ``leaving`` units leave from now on, those that are here at once."""
        self.leaving, self.ahead = frozenset(leaving), ahead
        for index in self.leaving & {*self.here}:
            if (total := self.here.pop(index, None)) is not None:
                self.put(units[index], total)

    def take(self, unit: Unit) -> Gradient | None:
        """Return a unit's sum, in device memory, and forget it; blocks until it is there."""
        self.expect(unit)
        away = self.away.get(unit.index)
        if away is None or away.coming is None:
            return self.here.pop(unit.index, None)
        if self._early is away:
            self._early = None
        lease, arrived = away.coming
        arrived.wait()
        del self.away[unit.index]
        if away.host is not None:
            away.host.release()
        return Gradient(lease, away.dtype, away.used)

    def expect(self, unit: Unit) -> None:
        """Begin to bring a unit's sum back, if it is away."""
        away = self.away.get(unit.index)
        if away is not None and away.coming is None:
            self._fetch(unit, away, self._pool.lease(away.nbytes, who=f"gradient of {unit.name}"))

    def expect_next(self, units: Sequence[Unit]) -> None:
        """Begin to bring back the sum that left first, if there is room beside what comes and goes."""
        index, away = next(iter(self.away.items()), (0, None))
        if self.ahead and away is not None and away.coming is None:
            lease = self._pool.try_lease(away.nbytes, who=f"gradient of {units[index].name}")
            if lease is not None:
                self._fetch(units[index], away, lease)
                self._early = away

    def clear(self) -> None:
        for total in self.here.values():
            total.lease.release()
        for away in self.away.values():
            if away.coming is not None:
                lease, arrived = away.coming
                arrived.then(lease.release)
            if away.host is not None:
                away.host.release()
        self.here.clear()
        self.away.clear()
        self._early = None

    def _leave(self, unit: Unit, lease: Lease, away: Away) -> None:
        if self._host is not None:
            host = self._host.lease(away.nbytes, who=f"gradient of {unit.name}")
            host.tensor.copy_(lease.tensor, non_blocking=True)
            host.record_use()
            lease.release()
            if unit.index not in self._stored.chosen:
                away.host = host
                return
            lease = host
        self._stored.write(unit, lease).then(lease.release)

    def _fetch(self, unit: Unit, away: Away, lease: Lease) -> None:
        upload = partial(self._upload, unit, away, lease)
        arrived = self._stored.read(unit, lease) if self._run is None else self._run(upload)
        away.coming = lease, arrived

    def _upload(self, unit: Unit, away: Away, lease: Lease) -> None:
        assert self._host is not None
        host = away.host
        if host is None:
            host = self._host.lease(away.nbytes, who=f"gradient of {unit.name}")
            self._stored.read(unit, host).wait()
        lease.tensor.copy_(host.tensor, non_blocking=True)
        host.record_use()
        lease.record_use()
        if away.host is None:
            host.release()

    def _leave_again(self) -> None:
        """Give back memory of what came ahead of its use: something else finds no room."""
        early, self._early = self._early, None
        if early is not None and early.coming is not None:
            lease, arrived = early.coming
            arrived.wait()
            lease.release()
            early.coming = None
