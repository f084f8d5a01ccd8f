"""Shards in accelerator memory, with their states: the newest values of some units, and their updates.

[Note: two places of one shard]
A unit whose home is host memory may have its weights and states on the accelerator, too, if
``memory.device`` has room for them (:func:`infinity.core.budget.place_states`). It goes there with its
first update. From then on the accelerator has the newest values: gathers copy the weights from there,
gradients stay there, and the update runs there. The place in host memory keeps older values until they are
read: commits, saved checkpoints, exports and state dictionaries have them **brought home** first, and go on
as for every unit in host memory. What writes values writes them in host memory, and the unit goes to the
accelerator again with its next update. So training moves no byte of such a unit between host and
accelerator, and nothing else needs to know of it.

[Note: order]
One stream updates shards and brings them home, in the order in which that was asked for. So what is brought
home are the values of the step after which that was asked for, however soon the next update follows. An
update has ended when the stream was given the last of it: leases carry the order to the streams that copy the
weights.

Who asks gives the stream its work, if there is nothing to wait for. A thread does so for what waits for host
memory, and for all that is asked for before it is done with that.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from infinity.core.transfer import Lease, Transfer
from infinity.device.accelerator import new_stream, on_stream, record, use_own_stream, wait_on_host
from infinity.device.memory import DevicePool
from infinity.optim.layout import StateLayout
from infinity.optim.rule import UpdateRule
from infinity.optim.rules import RESIDENT_NUMEL
from infinity.partition.unit import Unit
from infinity.shards.homes import HostHome
from infinity.shards.hypers import Run


@dataclass(slots=True)
class _DeviceShard:
    """A shard in accelerator memory.

    Attributes:
        host: The home of its unit, which has older values.
        fields: Weights, then each field of the state, on the accelerator, once it has come.
        home: The last copy of it to host memory; None: values there are older.
    """

    weight: Lease
    state: Lease
    host: HostHome
    fields: tuple[Tensor, ...] = ()
    home: Transfer | None = None

    def release(self) -> None:
        self.weight.release()
        self.state.release()


class DeviceShards:
    """Shards of this rank in accelerator memory: see [Note: two places of one shard].

    Args:
        rule: Updates them; ``layout`` is that of their states.
        device: The accelerator.

    Attributes:
        chosen: Indices of units whose gradients stay on the accelerator, to update them there.
        pool: Of the shards.
    """

    def __init__(self, rule: UpdateRule, layout: StateLayout, device: torch.device) -> None:
        self._rule, self._layout, self._device = rule, layout, device
        self.chosen: frozenset[int] = frozenset()
        self.pool = DevicePool(0, device)
        self._thread = ThreadPoolExecutor(1, "infinity-device-update", use_own_stream, (device,))
        self._stream = new_stream(device)
        self._lock = threading.Lock()  # guards what follows, and the order on the stream
        self._queued = 0  # calls that the thread has still to make
        self._shards: dict[int, _DeviceShard] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._shards

    def update(
        self, unit: Unit, host: HostHome, gradient: Callable[[], Tensor], runs: Iterable[Run],
        after: Transfer | None, ended: Callable[[BaseException | None], None],
    ) -> None:  # fmt: skip
        """Start to update a shard, which comes here if it is not here yet; does not block.

        Args:
            host: Its home.
            gradient: Returns its gradient on the accelerator, after earlier uses.
            after: The update in flight that makes the values of ``host``; None: they are there.
            ended: Called when the stream was given the update, or with the error.
        """
        with self._lock:
            found = self._shards.get(unit.index)
            new = found is None
            if found is None:
                sizes = self._layout.weight_nbytes, self._layout.state_nbytes
                weight, state = (self.pool.lease(size(unit.shard_numel), who=unit.name) for size in sizes)
                found = self._shards[unit.index] = _DeviceShard(weight, state, host)
                host.mirror = weight
            shard = found
            shard.home = None

            def play() -> BaseException | None:
                try:
                    if new and after is not None:
                        after.wait()
                    self._update(shard, gradient(), runs, comes=new)
                except BaseException as raised:  # surfaces at wait
                    return raised.with_traceback(None)
                return None

            if new or self._queued:
                self._queue(lambda: ended(play()))
                return
            with on_stream(self._stream):
                error = play()
        with on_stream(self._stream):
            ended(error)

    def _queue(self, call: Callable[[], object]) -> None:
        """Let the thread make ``call``, which gives the stream work; with the lock."""
        self._queued += 1

        def play() -> None:
            try:
                with on_stream(self._stream):
                    call()
            finally:
                with self._lock:
                    self._queued -= 1

        self._thread.submit(play)

    def _update(self, shard: _DeviceShard, grad: Tensor, runs: Iterable[Run], *, comes: bool) -> None:
        weight: Tensor = shard.weight.tensor.view(self._layout.dtype)  # after the copies of other streams
        if comes:
            shard.fields = weight, *self._layout.views(shard.state.tensor, weight.numel())
            for target, source in zip(shard.fields, shard.host.values(), strict=True):
                target.copy_(source, non_blocking=True)
        for run in runs:
            part = slice(run.start, run.stop)
            state = tuple(each[part] for each in shard.fields[1:])
            self._rule.update_on_device(
                weight[part], grad[part], state, run.hyper, piece_numel=RESIDENT_NUMEL
            )
        shard.weight.record_use()  # which other streams copy; states are used by this one only

    def bring_home(self, index: int, before: Callable[[], object] = lambda: None) -> Transfer | None:
        """Start to copy a shard's newest values to host memory; None: they are there.

        Args:
            before: Returns when host memory may be written; on this class's thread.
        """
        with self._lock:
            shard = self._shards.get(index)
            if shard is None or shard.home is not None:
                return None if shard is None else shard.home
            home = shard.home = Transfer()

            def copy() -> None:
                before()
                # Not through the lease: copies of the weights wait for what the update has left there.
                for target, source in zip(shard.host.values(), shard.fields, strict=True):
                    target.copy_(source, non_blocking=True)
                wait_on_host(record(self._device))

            self._queue(lambda: home.run(copy))
            return home

    def leave(self, index: int) -> None:
        """Let host memory be the only place of a unit that was brought home; does not block."""
        with self._lock:
            shard = self._shards.pop(index, None)
            if shard is not None:
                shard.host.mirror = None
                self._queue(shard.release)  # in the order of its stream

    def elsewhere(self, chosen: frozenset[int]) -> frozenset[int]:
        """Return the units that are here, and that are not ``chosen``."""
        return frozenset(self._shards) - chosen

    def close(self) -> None:
        """End the thread and give back the memory; what was not brought home is lost. May be called twice."""
        for index in list(self._shards):
            self.leave(index)
        self._thread.shutdown()
        self.pool.close()
